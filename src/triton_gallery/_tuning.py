"""Tuning, for whoever asks for it: try what could compute a call, time it, and keep the quickest choice on disk."""

import fcntl
import hashlib
import json
import math
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from . import benchmark
from ._arguments import got
from ._launch import num_multiprocessors, recording
from ._replay import forget_replays
from ._report import slug
from ._source import kernel_digests

# A choice other than the shipped one has to be quicker by so much: what two measurements of the same differ by.
_GAIN = 0.99
_FINALISTS = 4

_lock = threading.RLock()
_folder: Path | None = None  # where choices are kept; None where nobody asked for any
# (operation, device, call) -> the choice; None is the shipped one.
_chosen: dict[tuple, list | None] = {}


def set_tuning(enabled: bool, *, folder: str | os.PathLike | None = None) -> None:
    """Let :func:`matmul` find the quickest way to compute each product by trial, or no longer (the default).

    Which kernel computes a product, in which tiles and in how many parts follows from its sizes, by rules that serve
    most products well and need no time. Where this is enabled, the first product of new sizes (or strides, dtypes, bias
    or activation) times what else there is. That takes one to three seconds, some fifteen where kernels have to be
    compiled, and 256 MiB; so lengths that change all the time are better off without. Later products of the same sizes
    take what was the quickest, also in processes that begin later. Gradients are products as well.

    There is a choice on Hopper GPUs, for matrices of 16 or 8 bits whose rows begin at multiples of 16 bytes; elsewhere
    nothing happens. Nothing is tried while a CUDA graph is captured, and the graph keeps what it has captured: capture
    after a first call, and while no other thread makes one.

    Args:
        enabled: for all threads of this process.
        folder: where the choices are kept, in a file for each model of GPU, Triton and state of the package's kernels;
            ignored where `enabled` is False. None means ``triton_gallery`` in the user's cache, ``~/.cache`` or what
            ``XDG_CACHE_HOME`` names.

    Raises:
        TypeError: `enabled` is no bool, or `folder` no path.
        ValueError: `folder` is empty, begins with the home of nobody, has characters that no path has, or is relative
            where the working directory is gone.

    Warns:
        UserWarning: at a trial, the folder cannot be read or written, so that choices last as long as this process; or
            there is too little memory for it, and the rules choose.

    Notes:
        Another choice may add up in another order, and round otherwise. So results may differ from those of the shipped
        rules in the last bits, and from those of a machine with another folder. Equal calls give equal bits once their
        product has been tried. A GPU that has other work during a trial may mislead it.

    Example:
        >>> import triton_gallery as tg
        >>> tg.set_tuning(True)
        >>> # train, or run each product once
        >>> tg.set_tuning(False)
    """
    global _folder
    if not isinstance(enabled, bool):
        raise TypeError(f"set_tuning: enabled must be True or False, got {got(enabled)}")
    if not isinstance(folder, str | os.PathLike | None):
        raise TypeError(f"set_tuning: folder must be a path, got {type(folder).__name__}")
    if enabled and folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "triton_gallery")
    try:
        if enabled and not os.fspath(folder):
            raise RuntimeError("it is empty")
        place = Path(os.fsdecode(folder)).expanduser().absolute() if enabled else None
        if place and b"\0" in os.fsencode(place):
            raise RuntimeError("a null character")
    except (RuntimeError, UnicodeError, FileNotFoundError) as error:  # the last of a relative path from nowhere
        raise ValueError(f"set_tuning: folder must be a path that there can be, got {folder!r}: {error}") from None
    with _lock:
        _folder = place
        _chosen.clear()
        # They hold the launches of what was chosen so far.
        forget_replays()


def is_tuning() -> bool:
    """Whether `set_tuning` asked for it."""
    return _folder is not None


def run_quickest(operation: str, call: str, choices: Callable[[], list], run: Callable, device: torch.device) -> None:
    """``run(choice)`` for the quickest choice, which is tried where it is not known.

    Args:
        operation: such as "matmul", whose kernels have to be those that were tried.
        call: all that the choices depend on, in words.
        choices: gives what there is besides None, the shipped choice, as lists that JSON can hold.
        run: may be called many times.
        device: where it runs.
    """
    key = operation, device, call
    choice = _chosen.get(key, ...)  # None is a choice
    if choice is ...:
        with _lock, torch.cuda.device(device):
            choice = _chosen[key] if key in _chosen else _choose(key, choices(), run)
    run(choice)


def _choose(key: tuple, choices: list, run: Callable) -> list | None:
    """What the file says, or else a trial, which the file then holds, too."""
    operation, device, call = key
    if _folder is None:  # another thread has just ended it
        return None
    file = _file(_folder, operation, device)
    # Of several processes that come to the same call, one tries, and the others take its choice.
    with _held(file):
        table = _read(file)
        found = (table or {}).get(call)
        if isinstance(found, dict) and "choice" in found and found["choice"] in [None, *choices]:
            _chosen[key] = next((choice for choice in choices if choice == found["choice"]), None)
        elif torch.cuda.is_current_stream_capturing():
            if recording.tape is not None:
                recording.tape.keep = False
            return None
        else:
            try:
                found = _try(choices, run)
            except torch.OutOfMemoryError:
                message = f"set_tuning: too little memory to try {call}, so the rules choose; a trial takes 256 MiB"
                warnings.warn(message, stacklevel=2)
                _chosen[key] = None
            else:
                _chosen[key] = found["choice"]
                if table is not None:
                    _write(file, table | {call: found})
    return _chosen[key]


def _file(folder: Path, operation: str, device: torch.device) -> Path:
    text = json.dumps([triton.__version__, num_multiprocessors(device), kernel_digests(operation)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return folder / f"{operation}-{slug(torch.cuda.get_device_name(device))}-{digest}.json"


@contextmanager
def _held(file: Path) -> Iterator[None]:
    """While no other process has it; where there can be no file, nothing."""
    with ExitStack() as stack:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(file.with_suffix(".lock"), "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(file: Path) -> dict | None:
    """The choices by their calls; None where the file is there and cannot be read."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(table, dict):
            raise ValueError("it holds something else than choices")
        return table
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        warnings.warn(f"set_tuning: cannot read {file}, so choices end with this process: {error}", stacklevel=2)
        return None
    except (ValueError, RecursionError) as error:
        warnings.warn(f"set_tuning: cannot read {file}, so all is tried anew: {error}", stacklevel=2)
        return {}


def _write(file: Path, table: dict) -> None:
    new = None
    try:
        # In one step, so that nobody finds a half.
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as new:
            json.dump(table, new, indent=1)
        # Readable for whom the user lets read new files, as the lock is; temporary ones never are.
        os.chmod(new.name, os.stat(file.with_suffix(".lock")).st_mode & 0o777)
        os.replace(new.name, file)
    except OSError as error:
        warnings.warn(f"set_tuning: cannot write {file}, so choices end with this process: {error}", stacklevel=2)
        if new is not None:
            Path(new.name).unlink(missing_ok=True)


def _try(choices: list, run: Callable) -> dict:
    """The quickest choice, and the medians in milliseconds that speak for it."""

    def time(choice: list, rep: float) -> float:
        try:
            return benchmark.measure(lambda: run(choice), rep=rep)[0]
        except (TritonError, RuntimeError):  # no memory for it, or a compiler that cannot do it
            return math.inf

    tape, recording.tape = recording.tape, None
    try:
        shipped_ms = benchmark.measure(lambda: run(None))[0]
        quick = sorted(choices, key=lambda choice: time(choice, 10))[:_FINALISTS]
        times = [(time(choice, 100), choice) for choice in quick]
    finally:
        recording.tape = tape
    ms, choice = min(times, key=lambda timed: timed[0], default=(shipped_ms, None))
    if ms > _GAIN * shipped_ms:
        ms, choice = shipped_ms, None
    return {"choice": choice, "ms": round(ms, 6), "shipped_ms": round(shipped_ms, 6)}
