"""Says in one line what is missing before `make` starts something long; exits with status 1 then.

    python docs/_ext/preflight.py python    is this Python new enough?
    python docs/_ext/preflight.py site      and do torch and Triton fit, and is all there that the site needs?
    python docs/_ext/preflight.py serve     the same for serving it while it is written
    python docs/_ext/preflight.py tests     the same for the tests
    python docs/_ext/preflight.py lint      the same for the checks of style
    python docs/_ext/preflight.py outdated  the same for the list of outdated records
    python docs/_ext/preflight.py gpu       the same for measuring, and will kernels run on a GPU?

What is needed stands in pyproject.toml. This runs on any Python 3, so that an old one gets to say that it is old.
"""

import os
import re
import shutil
import sys
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
# What is asked about, and the extra of the package that it needs. Tests of what is not installed are skipped.
EXTRAS = {
    "site": "docs",
    "serve": "serve",
    "tests": "test-kernels",
    "lint": "lint",
    "outdated": None,
    "gpu": "examples",
}


def oldest_python():
    return numbers(re.search('requires-python = ">=(.+)"', PYPROJECT.read_text(encoding="utf-8"))[1])


def requirements(extra):
    """The distributions that the package needs with this extra: of each, the oldest version and the first too new."""
    import tomllib

    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras, bounds = project["optional-dependencies"], {}
    left = [*project["dependencies"], *extras.get(extra, ())]
    for requirement in left:
        name, of_package, *versions = re.match(
            r"([\w-]+)(?:\[([\w-]+)\])?(?:>=([\d.]+))?(?:<([\d.]+))?", requirement
        ).groups()
        if of_package:
            left += extras[of_package]
        else:
            bounds[name] = [numbers(version or "") for version in versions]
    return bounds


def problem(kind):
    """What is missing, or None."""
    if sys.version_info < oldest_python():
        have, need = (".".join(map(str, version)) for version in (sys.version_info[:2], oldest_python()))
        return f"Python {need} or newer is needed, and {sys.executable} is {have}; name another: make PYTHON=python3.12"
    if kind == "python":
        return None
    from importlib import metadata

    versions = {}
    for name, (oldest, too_new) in requirements(EXTRAS[kind]).items():
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            # Triton's distribution has another name for AMD's and Intel's GPUs.
            versions[name] = version_of_module(name) if name == "triton" else None
        if versions[name] is None:
            return f"{name} is not installed for {sys.executable}; `make` without VENV= installs everything into .venv"
        if numbers(versions[name]) < oldest:
            need = ".".join(map(str, oldest))
            return f"{name} {need} or newer is needed, and {sys.executable} has {versions[name]}"
        if too_new and numbers(versions[name]) >= too_new:
            need = ".".join(map(str, too_new))
            return f"{name} older than {need} is needed, and {sys.executable} has {versions[name]}"
    for requirement in metadata.requires("torch") or ():
        pin = re.match(r"(?:pytorch-)?triton(?:-\w+)?\s*==\s*([\d.]+)", requirement)
        if pin and numbers(pin[1]) != numbers(versions["triton"]):
            return f"torch {versions['torch']} goes with triton {pin[1]}, and {sys.executable} has {versions['triton']}"
    import torch

    if torch.accelerator.current_accelerator(check_available=True) is None:
        return f"torch {torch.__version__} finds no GPU to measure on" if kind == "gpu" else None
    import triton

    if kind == "gpu" and triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, so that kernels would not run on the GPU"
    if kind == "tests" and not (os.environ.get("CXX") or shutil.which("g++")):
        return "the tests of torch.compile need g++ in the PATH, or another C++ compiler whose name is in CXX"
    return missing_for_launches()


def version_of_module(name):
    """The version of a module that can be imported, or None."""
    import importlib

    try:
        return getattr(importlib.import_module(name), "__version__", None)
    except ImportError:
        return None


def missing_for_launches():
    """What Triton lacks to compile the C code with which it launches kernels, or None."""
    import sysconfig

    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "to launch kernels Triton needs a C compiler, gcc or clang in the PATH, or another whose name is in CC"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.exists():
        return f"to launch kernels Triton needs {header}, which is missing; Debian has it in python3-dev"
    return None


def numbers(version):
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:2])


if __name__ == "__main__":
    kinds = ["python", *EXTRAS]
    if sys.argv[1:] not in [[kind] for kind in kinds]:
        sys.exit(f"preflight: name one of {', '.join(kinds)}, got {' '.join(sys.argv[1:]) or 'nothing'}")
    message = problem(sys.argv[1])
    if message:
        sys.exit("triton-gallery: " + message)
