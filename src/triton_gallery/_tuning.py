"""Tuning, for whoever asks for it: try what could compute a call, time it, and keep the quickest choice on disk."""

import hashlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from . import benchmark
from ._launch import recording
from ._replay import forget_replays
from ._report import slug
from ._source import kernel_digests

# A choice other than the shipped one has to be quicker by so much: what two measurements of the same differ by.
_GAIN = 0.99
_FINALISTS = 4

_lock = threading.RLock()
_folder: Path | None = None  # where choices are kept; None where nobody asked for any
_tables: dict[Path, dict] = {}


def set_tuning(enabled: bool, *, folder: str | os.PathLike | None = None) -> None:
    """Let :func:`matmul` find the quickest way to compute each product by trying, or no longer (the default).

    Which kernel computes a product, in which tiles and in how many parts follows from its sizes, by rules that serve
    most of them well and need no time. Where this is enabled, the first product of new sizes tries what else there is,
    which takes about a second, and some fifteen where kernels have to be compiled; later ones, in other processes too,
    take what was the quickest. Gradients are products as well.

    Only products of 16-bit or 8-bit matrices on Hopper GPUs have a choice; elsewhere nothing happens. Nor is anything
    tried while a CUDA graph is captured: do that after a first call.

    Args:
        enabled: for all threads of this process.
        folder: where the choices are kept, a file for each GPU, Triton and state of the package's kernels. None means
            ``triton_gallery`` in the user's cache, ``~/.cache`` or what ``XDG_CACHE_HOME`` names.

    Raises:
        TypeError: `enabled` is no bool, or `folder` no path.

    Notes:
        Another choice may add up in another order, and round otherwise. So two machines, or two folders, may disagree
        in the last bits, where the shipped rules would not. Equal calls give equal bits as long as the folder stays.

    Example:
        >>> import triton_gallery as tg
        >>> tg.set_tuning(True)
        >>> # train, or multiply once what is to be quick
        >>> tg.set_tuning(False)
    """
    global _folder
    if not isinstance(enabled, bool):
        raise TypeError(f"set_tuning: enabled must be a bool, got {type(enabled).__name__}")
    if not isinstance(folder, str | os.PathLike | None):
        raise TypeError(f"set_tuning: folder must be a path, got {type(folder).__name__}")
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triton_gallery"
    with _lock:
        _folder = Path(folder).absolute() if enabled else None
        # They hold the launches of what was chosen so far.
        forget_replays()


def is_tuning() -> bool:
    """Whether `set_tuning` asked for it."""
    return _folder is not None


def run_quickest(operation: str, call: str, choices: Callable[[], list], run: Callable, device: torch.device) -> None:
    """``run(choice)`` for the quickest choice, which is tried where it is not known.

    Args:
        operation: such as "matmul", whose kernels have to be those that were tried.
        call: all that the time depends on, in words.
        choices: gives what there is besides None, the shipped choice, as lists that JSON can hold.
        run: may be called many times.
        device: where it runs.
    """
    with _lock:
        folder = _folder
        if folder is not None:
            file = _file(folder, operation, device)
            table = _tables.setdefault(file, {})
            if not table:
                table.update(_read(file))
            if call not in table and not torch.cuda.is_current_stream_capturing():
                try:
                    table[call] = _try(choices(), run, device)
                    _write(file, table)
                except torch.OutOfMemoryError:
                    message = f"set_tuning: too little memory to try {call}, so the rules choose; a trial takes 256 MiB"
                    warnings.warn(message, stacklevel=2)
            run(table.get(call, {}).get("choice"))
            return
    run(None)


def _file(folder: Path, operation: str, device: torch.device) -> Path:
    text = json.dumps([triton.__version__, kernel_digests(operation)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return folder / f"{operation}-{slug(torch.cuda.get_device_name(device))}-{digest}.json"


def _read(file: Path) -> dict:
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        if not (isinstance(table, dict) and all(isinstance(found, dict) for found in table.values())):
            raise ValueError("it holds something else than choices")
        return table
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"set_tuning: cannot read {file}, so all is tried anew: {error}", stacklevel=2)
        return {}


def _write(file: Path, table: dict) -> None:
    """What another process wrote meanwhile stays."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        table |= {call: found for call, found in _read(file).items() if call not in table}
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as new:
            json.dump(table, new, indent=1)
        os.replace(new.name, file)
    except OSError as error:
        warnings.warn(f"set_tuning: cannot write {file}, so choices end with this process: {error}", stacklevel=2)


def _try(choices: list, run: Callable, device: torch.device) -> dict:
    """The quickest choice, and the medians in milliseconds that speak for it."""
    tape, recording.tape = recording.tape, None
    try:
        with torch.cuda.device(device):

            def time(choice, rep: float) -> float:
                return benchmark.measure(lambda: run(choice), rep=rep)[0]

            quick = sorted(choices, key=lambda choice: time(choice, 10))[:_FINALISTS]
            times = [(time(choice, 100), choice) for choice in quick]
            shipped_ms = time(None, 100)
    finally:
        recording.tape = tape
    ms, choice = min(times, key=lambda timed: timed[0], default=(shipped_ms, None))
    if ms > _GAIN * shipped_ms:
        ms, choice = shipped_ms, None
    return {"choice": choice, "ms": round(ms, 6), "shipped_ms": round(shipped_ms, 6)}
