"""Kernels that use what only Hopper (sm_90) has; the public functions choose them, and import them only then."""

import functools
import importlib
from types import ModuleType

import triton

# What takes the place of a module: for Triton 3.8, and for no other.
_WIDER = {"attention_forward": "wider_rows", "attention_backward": "wider_rows"}
_STAND_INS = _WIDER if triton.__version__.startswith("3.8.") else {}


@functools.cache
def load(name: str) -> ModuleType | None:
    """The module `name` of this package, or None where the installed Triton's Gluon lacks a piece that it uses."""
    try:
        return importlib.import_module(f".{_STAND_INS.get(name, name)}", __name__)
    except (ImportError, AttributeError):
        return None
