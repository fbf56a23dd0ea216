"""The examples in docstrings: they run, print what they say, and every public function has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

import triton_gallery

MODULES = [
    module.name
    for module in pkgutil.walk_packages(triton_gallery.__path__, "triton_gallery.")
    if ">>>" in (importlib.util.find_spec(module.name).loader.get_source(module.name) or "")
]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the examples use tensors on the CPU")
@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0 and results.failed == 0


def test_every_public_function_has_an_example_that_is_not_skipped():
    functions = [value for value in vars(triton_gallery).values() if inspect.isfunction(value)]
    assert len(functions) >= 8
    missing = [f.__name__ for f in functions if ">>>" not in (f.__doc__ or "") or "+SKIP" in f.__doc__]
    assert missing == []
