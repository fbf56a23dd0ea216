"""Every test starts from the same seed, on the GPU when there is one, with NaN where nothing was written yet."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

import triton_gallery  # noqa: F401  before anything imports triton: it may switch the interpreter on
from accuracy import DEVICE, FEW
from triton_gallery._launch import interpreter
from triton_gallery._replay import forget_replays

_find_dtype, _dtypes = interpreter._get_np_dtype, {}


def _kept_dtype(dtype):
    """NumPy's dtype for one of Triton's: the interpreter asks with each operation, and makes a table each time."""
    name = dtype.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _find_dtype(dtype)
    return _dtypes[name]


interpreter._get_np_dtype = _kept_dtype


@pytest.fixture(autouse=True)
def _sums_that_overflow(request):
    """Whether integer sums overflow, which takes a tenth of the interpreter's time, only `make fuzz` asks."""
    options, is_slow = interpreter.interpreter_builder.options, "slow" in request.keywords
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=is_slow)


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def _same_seed_and_nan_filled_memory():
    torch.manual_seed(0)
    # A test may change what a replay has kept.
    forget_replays()
    # In this mode torch.empty is filled with NaN (the largest value for integers), so an element that a kernel forgot
    # to write cannot pass for a right one.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    # What one test process keeps for later, others that share the GPU lack.
    if DEVICE.type != "cpu" and torch.accelerator.memory_reserved() > 2**31:
        torch.accelerator.empty_cache()


@pytest.fixture
def fuzz(request, record_property):
    """Calls a check with values of the strategies it is given; and adds to the test's report how often."""

    def run(check, **strategies):
        tried = 0

        def counted(**values):
            nonlocal tried
            tried += 1
            check(**values)

        few = request.param == FEW
        settings(max_examples=request.param, derandomize=few, deadline=None)(given(**strategies)(counted))()
        record_property("inputs", tried)

    return run


def pytest_collection_modifyitems(config, items):
    if DEVICE.type == "cpu":
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
