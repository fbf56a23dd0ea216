"""Kernels that use what only Hopper (sm_90) has; the public functions choose them, and import them only then."""

import functools
import importlib
from types import ModuleType


@functools.cache
def load(name: str) -> ModuleType | None:
    """The module `name` of this package, or None where the installed Triton's Gluon lacks a piece that it uses."""
    try:
        return importlib.import_module(f".{name}", __name__)
    except (ImportError, AttributeError):
        return None
