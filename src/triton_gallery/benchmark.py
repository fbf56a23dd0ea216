"""Measure, record, load and quote benchmarks.

`perf_report` turns a function into a benchmark. On a GPU its `run` measures; elsewhere it loads the record that the
package ships, which says where its numbers come from. `quote` reads one number out of a record, for use in a sentence.

Three environment variables serve whoever writes records: ``TRITON_GALLERY_RECORDS`` names the folder that measured
records are written to, ``GALLERY_COMMAND`` the command to note in them, and ``GALLERY_COMMIT`` the commit, for a copy
of the sources without its git history.
"""

import ctypes
import datetime
import functools
import importlib.resources
import inspect
import json
import math
import numbers
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from ._arguments import got
from ._report import (
    COPY,
    FIGURES,
    LARGEST,
    OURS,
    OVER,
    PROVENANCE,
    RESERVED,
    Report,
    is_ours,
    is_place,
    is_study,
    plot_roofline,
    slug,
    validate,
)
from ._source import function_digest, kernel_digests

_COPY_LIMIT = "copy by torch"
LIMITS = {"copy": "GB/s", "matmul-fp16": "TFLOP/s", "matmul-bf16": "TFLOP/s", "matmul-fp8": "TFLOP/s"}
# More is better in all of them: ratios, bold figures and the word "slower" rely on it.
_UNITS = "GB/s", "TFLOP/s", "calls/ms"

_REFERENCE = re.compile(r"(?P<name>[\w.-]+): (?P<series>.+?)(?: / (?P<base>.+?))? at (?P<at>\S+)")


# --- one measurement --------------------------------------------------------------------------------------------------


def _device() -> torch.device | None:
    """The GPU that compiled kernels run on; None without one, and in the interpreter, whose timings say nothing."""
    return None if triton.knobs.runtime.interpret else torch.accelerator.current_accelerator(check_available=True)


def _gpu(function: str) -> torch.device:
    if _device() is None:
        raise RuntimeError(f"{function}: needs a GPU and compiled kernels; timings in the interpreter say nothing")
    return _device()


def measure(
    fn: Callable, *, grad_to_none: list[torch.Tensor] | None = None, rep: float = 100
) -> tuple[float, float, float]:
    """Time `fn` on the GPU, with the L2 cache flushed before each call.

    As ``triton.testing.do_bench``, but for three things. The cache is flushed as often as it takes to keep the GPU busy
    until the host has launched all of `fn`. Otherwise the time of a small backward pass would be that of the Python
    around it, and would vary with the host. On NVIDIA's GPUs, what the last call asked the cache to keep, with
    ``eviction_policy="evict_last"``, is made like all else first. Otherwise it outlives the flush, and a kernel that
    asks for it finds its input in the cache. And one to seven tiny kernels run between the last flush and the clock's
    start. With one before each call, all calls of a measurement, of whatever small kernel, took one of two times that
    lay up to a microsecond apart, and those of the next measurement the other; so eight microseconds could be seven for
    one library and eight for the next. With another number before each call, both times occur in every measurement,
    and medians repeat within about 1 %, those of the shortest kernels within a few (seen on an H200).

    Args:
        fn: takes no argument and launches the work.
        grad_to_none: tensors whose gradient is dropped before each call, when `fn` is a backward pass.
        rep: how long the timed calls and their flushes take together, in milliseconds; a quarter as long come before.

    Returns:
        The median, 20 % and 80 % quantile of the calls' times in milliseconds.

    Raises:
        RuntimeError: there is no GPU, or Triton's interpreter is on.
        TypeError: `fn` cannot be called, or `grad_to_none` is no list of tensors.
        ValueError: `rep` is no number above 0.

    Example:
        >>> import torch, triton_gallery as tg
        >>> x = torch.randn(4096, 4096, device="cuda")  # doctest: +SKIP
        >>> times = tg.benchmark.measure(lambda: tg.softmax(x, dim=-1))  # doctest: +SKIP
        >>> median, low, high = tg.benchmark.gbps(2 * x.nbytes, times)  # read once and written once # doctest: +SKIP
    """
    if not callable(fn):
        raise TypeError(f"measure: fn must be callable, got {type(fn).__name__}")
    if isinstance(grad_to_none, torch.Tensor) or not isinstance(grad_to_none, Iterable | None):
        raise TypeError(f"measure: grad_to_none must be a list of tensors, got {type(grad_to_none).__name__}")
    grad_to_none = () if grad_to_none is None else tuple(grad_to_none)
    if others := [x for x in grad_to_none if not isinstance(x, torch.Tensor)]:
        raise TypeError(f"measure: grad_to_none must be a list of tensors, got {type(others[0]).__name__} in it")
    if isinstance(rep, bool) or not isinstance(rep, numbers.Real) or not 0 < rep <= LARGEST:
        raise ValueError(f"measure: rep must be a number of milliseconds above 0, got {got(rep)}")
    tiny = torch.zeros(1, device=_gpu("measure"))
    driver = triton.runtime.driver.active
    device, cache = driver.get_device_interface(), driver.get_empty_cache_for_benchmark()
    keep_nothing = _keep_nothing()

    def run(call: Callable, n_calls: int, n_flushes: int) -> torch.Tensor:
        """The time of each of n calls."""
        events = [[device.Event(enable_timing=True) for _ in range(2)] for _ in range(n_calls)]
        last = None
        for i, (start, end) in enumerate(events):
            for x in grad_to_none:
                x.grad = None
            driver.clear_cache(cache)
            if last and keep_nothing:
                # This works at once, so the last call must be over; meanwhile the GPU has a flush to do.
                last.synchronize()
                keep_nothing()
            last = end
            for _ in range(n_flushes):
                driver.clear_cache(cache)
            for _ in range(1 + i % 7):
                tiny.add_(1)
            start.record()
            call()
            end.record()
        device.synchronize()
        return torch.tensor([start.elapsed_time(end) for start, end in events], dtype=torch.float64)

    def on_host() -> float:
        device.synchronize()
        start = time.perf_counter()
        for _ in range(7):
            tiny.add_(1)
        fn()
        return 1e3 * (time.perf_counter() - start)

    run(fn, 1, 1)  # compiles
    host_ms = statistics.median(on_host() for _ in range(5))
    flush_ms = run(lambda: driver.clear_cache(cache), 5, 1).median().item()
    n_flushes = max(1, math.ceil(2 * host_ms / flush_ms))
    call_ms = (1 + n_flushes) * flush_ms + run(fn, 5, n_flushes).median().item()
    run(fn, math.ceil(rep / 4 / call_ms), n_flushes)
    times = run(fn, math.ceil(rep / call_ms), n_flushes)
    return tuple(times.quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)).tolist())


@functools.cache
def _keep_nothing() -> Callable[[], object] | None:
    """The driver's call that makes what the L2 cache was asked to keep like all else; None where there is none."""
    return ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache if torch.version.cuda else None


class _Rate(tuple):
    """Median, 20 % and 80 % quantile of a rate that counts `n_bytes`."""

    n_bytes: float


def gbps(n_bytes: float, times: tuple[float, float, float]) -> tuple[float, float, float]:
    """Turn bytes moved and `measure`'s times into GB/s: median, 20 % and 80 % quantile of the rate.

    Args:
        n_bytes: how many.
        times: three, in milliseconds, as `measure` returns them.

    Raises:
        ValueError: `n_bytes` is negative or not finite, or `times` are none that `measure` could return.
    """
    rate = _Rate(_rates("gbps", "n_bytes", n_bytes, times, 1e6))
    rate.n_bytes = n_bytes
    return rate


def _rates(name: str, what: str, count: float, times: tuple[float, float, float], unit: float) -> tuple:
    if not _is_number(count) or not 0 <= count <= LARGEST:
        raise ValueError(f"{name}: {what} must be a finite number that is not negative, got {got(count)}")
    is_three = isinstance(times, tuple | list) and len(times) == 3 and all(map(_is_number, times))
    if not is_three or not 0 < times[1] <= times[0] <= times[2] <= LARGEST:
        rule = "a median, a 20 % and an 80 % quantile above 0, as measure returns them"
        raise ValueError(f"{name}: times must be {rule}, got {got(times)}")
    median, fast, slow = times
    rates = tuple(count / ms / unit for ms in (median, slow, fast))
    if not rates[2] <= LARGEST:
        raise ValueError(f"{name}: times must be long enough for a rate that float64 can hold, got {got(times)}")
    return rates


def _is_number(x) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def tflops(flops: float, times: tuple[float, float, float]) -> tuple[float, float, float]:
    """Turn arithmetic operations and `measure`'s times into TFLOP/s: median, 20 % and 80 % quantile of the rate.

    Args:
        flops: how many.
        times: three, in milliseconds, as `measure` returns them.

    Raises:
        ValueError: `flops` is negative or not finite, or `times` are none that `measure` could return.
    """
    return _rates("tflops", "flops", flops, times, 1e9)


def _copy(n_bytes: int) -> Callable:
    """torch's copy of so many bytes, read and written ones together."""
    x = torch.randint(256, (n_bytes // 2,), dtype=torch.uint8, device=_gpu("copy"))
    return functools.partial(torch.empty_like(x).copy_, x)


def limit(kind: str) -> dict:
    """Measure the best this GPU can do, once per process: the fastest of many runs.

    Args:
        kind: "copy" (torch copies a gibibyte; bytes read and written count), or "matmul-fp16", "matmul-bf16",
            "matmul-fp8" (torch's 8192 × 8192 × 8192 product of random matrices).

    Returns:
        `name` and `value`, in GB/s for a copy and TFLOP/s for a product.

    Raises:
        TypeError: `kind` is no text.
        ValueError: `kind` is none of these.
        RuntimeError: there is no GPU, or Triton's interpreter is on.
    """
    if not isinstance(kind, str):
        raise TypeError(f"limit: kind must be a str, got {type(kind).__name__}")
    if kind not in LIMITS:
        raise ValueError(f"limit: kind must be one of {', '.join(LIMITS)}, got {kind!r}")
    return _limit(kind)


@functools.cache
def _limit(kind: str) -> dict:
    device, n = _gpu("limit"), 8192
    if kind == "copy":
        name, work, fn = _COPY_LIMIT, 2**31 * 1e-6, _copy(2**31)
    else:
        a, b = (torch.randn(n, n, dtype=torch.float16, device=device) for _ in "ab")
        dtype = {"matmul-fp16": torch.float16, "matmul-bf16": torch.bfloat16, "matmul-fp8": _fp8_dtype()}[kind]
        a, b, one = a.to(dtype), b.to(dtype), torch.ones((), device=device)
        name, work, fn = f"torch.matmul {n}³", 2 * n**3 * 1e-9, functools.partial(torch.matmul, a, b)
        if kind == "matmul-fp8":
            name, options = f"torch._scaled_mm {n}³", {"out_dtype": torch.bfloat16, "use_fast_accum": True}
            fn = functools.partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, **options)
    return {"name": name, "value": _round(work / triton.testing.do_bench(fn, return_mode="min"))}


def _fp8_dtype() -> torch.dtype:
    # The MI300 family multiplies a variant of float8 without a negative zero.
    is_mi300 = torch.version.hip is not None and "gfx94" in torch.cuda.get_device_properties().gcnArchName
    return torch.float8_e4m3fnuz if is_mi300 else torch.float8_e4m3fn


# --- where it was measured --------------------------------------------------------------------------------------------


class Environment(dict):
    """What `environment` found, by the keys of a record; prints one line per entry."""

    def __str__(self) -> str:
        return "\n".join(f"{'triton_gallery' if key == 'package' else key:15}{value}" for key, value in self.items())

    __repr__ = __str__


def environment() -> Environment:
    """Name the GPU, its driver, the versions of everything that takes part, the commit and the date.

    Returns:
        A dict of texts with the keys `gpu`, `driver`, `cuda`, `torch`, `triton`, `python`, `package`, `commit` and
        `date`; prints one line per entry. What does not apply is "none", and what cannot be found out is "unknown".
    """
    device = _device()
    hip, xpu = torch.version.hip and f"HIP {torch.version.hip}", torch.version.xpu and f"XPU {torch.version.xpu}"
    return Environment(
        gpu=_gpu_name() if device else f"none: {_without_gpu()}",
        driver=_driver(device) if device else "none",
        cuda=torch.version.cuda or hip or xpu or "none",
        torch=torch.__version__,
        triton=triton.__version__,
        python=platform.python_version(),
        package=sys.modules[__package__].__version__,
        commit=(os.environ.get("GALLERY_COMMIT") or _commit()).lower(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _without_gpu() -> str:
    return "kernels run in the interpreter" if triton.knobs.runtime.interpret else "no kernel can run"


def _gpu_name() -> str:
    return torch.get_device_module(_device()).get_device_name()


def _driver(device: torch.device) -> str:
    try:
        if device.type == "xpu":
            return torch.xpu.get_device_properties().driver_version
        if torch.version.hip:
            return Path("/sys/module/amdgpu/version").read_text().strip()
        return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@functools.cache
def _commit() -> str:
    """The short commit, plus "-dirty" when code that decides a measurement has changed since; "unknown" elsewhere."""
    git = ("git", "-C", str(Path(__file__).parent))
    # Records are left out, or the first one written would make the others' commit dirty.
    measured = (":/src/triton_gallery", ":/examples", ":/docs/programming-guide")
    code = (*measured, ":(top,exclude)src/triton_gallery/records")
    try:
        # An installed package may lie inside another project's checkout; only a tracked file makes it ours.
        _output(*git, "ls-files", "--error-unmatch", Path(__file__).name)
        changed = _output(*git, "status", "--porcelain", "--", *code)
        return _output(*git, "rev-parse", "--short", "HEAD").strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# --- records ----------------------------------------------------------------------------------------------------------


def load(name: str, gpu: str | None = None) -> Report:
    """Load a record that the package ships. Its figures are hidden where the kernels are no longer those measured.

    Args:
        name: the benchmark's name, such as "softmax-fp16".
        gpu: a folder of records, such as "nvidia-h200". None goes through this machine's GPU, the H200, and then all
            others in alphabetical order, those of them that have a record of this benchmark. It takes the first whose
            record is of today's kernels, and where there is none the first of all, outdated.

    Returns:
        A `Report`, which says in `outdated` whether its figures are hidden.

    Raises:
        FileNotFoundError: no GPU's records hold this benchmark, or not those of `gpu`.
        TypeError: `name` or `gpu` is no text.
        ValueError: the record is not valid.
    """
    if not isinstance(name, str):
        raise TypeError(f"load: name must be a str, got {type(name).__name__}")
    if not isinstance(gpu, str | None):
        raise TypeError(f"load: gpu must be a str, got {type(gpu).__name__}")
    return _load(name, gpu, lambda record: frozenset())


def _load(name: str, gpu: str | None, also_changed: Callable[[dict], frozenset[str]]) -> Report:
    """`load`, for callers that know more of what changed since a record was made."""
    gpus = sorted(file.parent.name for file in _records().glob("*/*.json") if file.stem == name)
    if not gpus:
        raise FileNotFoundError(
            f"benchmark {name}: no record has this name; `make record` on a GPU machine writes them"
        )
    if gpu not in (None, *gpus):
        raise FileNotFoundError(f"benchmark {name}: gpu must be one of {', '.join(gpus)}, got {gpu!r}")
    here = slug(_gpu_name()) if _device() else None
    first, digests = None, kernel_digests(name)
    for folder in [gpu] if gpu else [gpu for gpu in dict.fromkeys([here, "nvidia-h200", *gpus]) if gpu in gpus]:
        record = _read(_records() / folder / f"{name}.json")
        if (record["benchmark"], slug(record["gpu"])) != (name, folder):
            found = f"{record['benchmark']} on {record['gpu']}"
            raise ValueError(f"record {folder}/{name}.json: must be of this benchmark and GPU, got {found}")
        report = Report(record, changed=_changed(record, digests) | also_changed(record))
        if not report.outdated:
            return report
        first = first or report
    return first


def _changed(record: dict, digests: dict[str, str | None]) -> frozenset[str]:
    """The parts of the text whose digest is another than when the record was made; None says that it is not known."""
    text = record["text"]
    changed = {part for part, digest in digests.items() if digest not in (None, text.get(part))}
    # What kernels import belongs to them.
    return frozenset("kernels" if part == "imports" else part for part in changed)


def _records():
    return importlib.resources.files(__package__) / "records"


def _read(file) -> dict:
    """The record in a file, which has to be a valid one."""
    name = f"{file.parent.name}/{file.name}"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"record {name}: not valid JSON: {error}") from None
    validate(record, name)
    return record


# --- the roofline -----------------------------------------------------------------------------------------------------


def roofline(
    report: Report, points: dict[str, tuple[float, float]], *, title: str | None = None, peak: str = "matmul-fp16"
) -> None:
    """Draw points under the roofline of a report's GPU: the rate of a copy times the intensity, up to a peak.

    Both limits were measured: in this process if the report was, and otherwise they come from the report, if it has a
    copy for its limit, and from committed records of the same GPU.

    Args:
        report: what the points were measured with; names the GPU.
        points: for each label, the arithmetic intensity in operations per byte and the rate in TFLOP/s, NaN if not yet
            measured. A rate in GB/s becomes one in TFLOP/s by the intensity of the bytes that were counted.
        title: what is measured, as a heading; the report's own title when None.
        peak: the flat part of the roof: "matmul-fp16", "matmul-bf16" or "matmul-fp8".

    Raises:
        TypeError: `report` is no `Report`, `points` no dict, or `title` no text.
        ValueError: there are no points, or they are no pairs of positive numbers, `peak` is no rate of arithmetic, or
            the report is not yet measured.
        FileNotFoundError: the report was measured on a GPU whose limits no committed record holds.
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> import triton_gallery as tg
        >>> report = tg.benchmark.load("matmul-fp16")
        >>> rate = report.series("triton_gallery")[4096]
        >>> tg.benchmark.roofline(report, {"4096³": (4096 / 3, rate)})
    """
    if not isinstance(report, Report):
        kind = f"{type(report).__module__}.{type(report).__qualname__}"
        raise TypeError(f"roofline: report must be a benchmark.Report, such as load gives, got {kind}")
    if not isinstance(points, dict):
        raise TypeError(f"roofline: points must be a dict, got {type(points).__name__}")
    if not isinstance(title, str | None):
        raise TypeError(f"roofline: title must be a str, got {type(title).__name__}")
    if not report.record["rows"] and not report.live:
        raise ValueError(f"roofline: report must be measured; {report.record['benchmark']} is {report.status()[0]}")
    if not points or not all(map(_is_point, points.values())):
        raise ValueError(f"roofline: points must have a positive intensity and rate, got {got(points)}")
    if not isinstance(peak, str) or LIMITS.get(peak) != "TFLOP/s":
        raise ValueError(f"roofline: peak must be one of {', '.join(list(LIMITS)[1:])}, got {peak!r}")
    heading = f"{title or report.record['title']}: roofline of the {report.record['gpu']}"
    plot_roofline(heading, points, *(_limit_of(report, kind) for kind in ("copy", peak)))


def _is_point(point) -> bool:
    try:
        intensity, rate = point
        return 0 < intensity <= LARGEST and (0 < rate <= LARGEST or rate != rate)  # NaN says not yet measured
    except (TypeError, ValueError):
        return False


def _limit_of(report: Report, kind: str) -> dict:
    if report.live:
        return limit(kind)
    # The record's own, if it is of that kind: products in float16 are measured against such a product.
    of_kind = kind == "copy" or report.record["benchmark"].endswith(kind.removeprefix("matmul"))
    if of_kind and report.record["unit"] == LIMITS[kind] and report.record["limit"]:
        return report.record["limit"]
    folder = _records() / slug(report.record["gpu"])
    # A rate of products stands in the record of that name, and a copy in all that memory limits: the fastest counts.
    files = folder.glob("*.json" if kind == "copy" else f"{kind}.json")
    found = [_read(file)["limit"] for file in files]
    found = [bound for bound in found if bound and (kind != "copy" or bound["name"] == _COPY_LIMIT)]
    if not found:
        raise FileNotFoundError(f"roofline: no committed record of {folder.name} holds the limit {kind}")
    return max(found, key=lambda bound: bound["value"])


# --- a benchmark ------------------------------------------------------------------------------------------------------


def perf_report(benchmark: triton.testing.Benchmark, *, title: str, limit: str | None = None, rounds: int = 1):
    """Mark a function as a benchmark, in the form of ``triton.testing.perf_report``.

    Args:
        benchmark: one ``triton.testing.Benchmark``. Its `ylabel` is the unit, "GB/s", "TFLOP/s" or, for what the host
            takes, "calls/ms"; its `line_names` hold "triton_gallery", unless its name begins with "guide-"; its
            `styles` are not used. Its `plot_name` names the record's file. If it begins with the name of an operation's
            file, as "softmax-fp16" does, the record is outdated when that operation's kernels change; any record is
            when the benchmark's own text does.
        title: what is measured, as a heading.
        limit: what to measure in the same run as the hardware's limit: "copy" (GB/s); "matmul-fp16", "matmul-bf16" or
            "matmul-fp8" (TFLOP/s), as the function `limit` describes them; or None. "copy" also measures, as one more
            provider, a copy of as many bytes as ours is credited with at each x: whatever its size, a kernel has to
            start, to wait for the first bytes and to make room in the L2 cache, which takes a small tensor longer than
            its bytes do.
        rounds: how often each point is measured, with the providers' order reversed every other time, so that a GPU
            that slows down as it warms up favours nobody. The median over the rounds counts.

    Returns:
        A decorator. The function takes the benchmark's arguments and returns what `gbps` or `tflops` returns (median,
        20 % and 80 % quantile of a rate), or None where the provider does not apply; the decorated object has `run`.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    if not isinstance(benchmark, triton.testing.Benchmark):
        raise TypeError(f"perf_report: benchmark must be one triton.testing.Benchmark, got {type(benchmark).__name__}")
    texts = {"title": title, "ylabel": benchmark.ylabel, "plot_name": benchmark.plot_name, "xlabel": benchmark.xlabel}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"perf_report: {name} must be a str, got {type(text).__name__}")
    if benchmark.ylabel not in _UNITS:
        raise ValueError(f"perf_report: ylabel must be one of {', '.join(_UNITS)}, got {benchmark.ylabel!r}")
    if Path(benchmark.plot_name).name != benchmark.plot_name or benchmark.plot_name in ("", ".."):
        raise ValueError(f"perf_report: plot_name must name a file, without folders, got {benchmark.plot_name!r}")
    if not benchmark.plot_name.isprintable() or len(benchmark.plot_name.encode()) > 250:  # and ".json"
        rule = "must be printable and of at most 250 bytes, as names of files are"
        raise ValueError(f"perf_report: plot_name {rule}, got {got(benchmark.plot_name)}")
    if not all(isinstance(names, list | tuple) for names in (benchmark.line_names, benchmark.line_vals)):
        kinds = f"{type(benchmark.line_names).__name__} and {type(benchmark.line_vals).__name__}"
        raise TypeError(f"perf_report: line_names and line_vals must be lists, got {kinds}")
    for name in (benchmark.line_arg, *benchmark.line_names):
        if not isinstance(name, str):
            raise TypeError(f"perf_report: line_arg and what line_names holds must be str, got {name!r}")
    ours = is_study(benchmark.plot_name) or OURS in benchmark.line_names
    n_names = len(set(benchmark.line_names))
    if not ours or not n_names == len(benchmark.line_names) == len(benchmark.line_vals):
        names = f"must name each value, no two alike, one {OURS!r}"
        raise ValueError(f"perf_report: line_names {names}, got {benchmark.line_names}")
    if taken := [name for name in benchmark.line_names if name in RESERVED]:
        raise ValueError(f"perf_report: line_names must hold none of {', '.join(RESERVED)}, got {taken[0]!r}")
    x_names = benchmark.x_names
    if not isinstance(x_names, list | tuple) or not x_names or not all(isinstance(name, str) for name in x_names):
        raise TypeError(f"perf_report: x_names must be a list of one name or more, got {x_names!r}")
    xs, n_sizes = _plain(benchmark.x_vals), len(x_names)
    if isinstance(xs, range):
        xs = list(xs)
    if not isinstance(xs, list):
        raise TypeError(f"perf_report: x_vals must be a list, got {type(benchmark.x_vals).__name__}")
    sizes = [size for x in xs for size in (x if isinstance(x, list) else [x])]
    if not all(map(is_place, sizes)):
        rule = "must hold numbers that float64 can hold, names, or tuples of these"
        raise TypeError(f"perf_report: x_vals {rule}, got {got(xs)}")
    places = [_recorded(x) for x in xs]
    if unnamed := [x for x in places if isinstance(x, str) and (x in OVER or not re.fullmatch(r"\S+", x))]:
        rule = f"that are names must have no blanks, and must not be {', '.join(OVER)}"
        raise ValueError(f"perf_report: x_vals {rule}, got {unnamed[0]!r}")
    n_values = min(len(set(map(str, places))), len(set(places)))
    if not xs or n_values < len(xs):
        raise ValueError(f"perf_report: x_vals must hold one value or more, no two alike, got {xs}")
    if any(len(x) != n_sizes for x in xs if isinstance(x, list)):
        raise ValueError(f"perf_report: each of x_vals must be a number or {n_sizes}, one for each x_name, got {xs}")
    for name, flag in (("x_log", benchmark.x_log), ("y_log", benchmark.y_log)):
        if not isinstance(flag, bool):
            raise TypeError(f"perf_report: {name} must be True or False, got {got(flag)}")
    if benchmark.x_log and any(isinstance(size, int | float) and size <= 0 for size in sizes):
        raise ValueError(f"perf_report: x_vals must be positive where x_log is set, got {xs}")
    if not isinstance(benchmark.args, dict):
        raise TypeError(f"perf_report: args must be a dict, got {type(benchmark.args).__name__}")
    names = [*x_names, benchmark.line_arg, *benchmark.args]
    if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"perf_report: x_names, line_arg and args must be arguments, no two alike, got {names}")
    if limit is not None and (not isinstance(limit, str) or LIMITS.get(limit) != benchmark.ylabel):
        kinds = ", ".join(["None", *(kind for kind, unit in LIMITS.items() if unit == benchmark.ylabel)])
        raise ValueError(f"perf_report: for {benchmark.ylabel} limit must be one of {kinds}, got {limit!r}")
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise ValueError(f"perf_report: rounds must be an int of at least 1, got {rounds!r}")

    def decorate(fn: Callable) -> PerfReport:
        if not callable(fn) or not hasattr(fn, "__name__"):
            raise TypeError(f"perf_report: what it decorates must be a function, got {type(fn).__name__}")
        try:
            inspect.signature(fn).bind(**dict.fromkeys(names))
        except TypeError as error:
            raise TypeError(f"perf_report: {fn.__name__} must take the arguments {', '.join(names)}: {error}") from None
        return PerfReport(fn, benchmark, title, limit, rounds)

    return decorate


@dataclass(frozen=True)
class PerfReport:
    """A benchmark ready to `run`; made by `perf_report`."""

    fn: Callable
    benchmark: triton.testing.Benchmark
    title: str
    limit: str | None
    rounds: int

    def run(self) -> Report:
        """Measure on a GPU, and write the record when ``TRITON_GALLERY_RECORDS`` is set; elsewhere load the record.

        Every call of the function starts from the same seed, so that all providers get the same inputs. A peer that
        raises a RuntimeError, out of memory included, or that Triton cannot compile or launch, is left out at that x,
        and the report says so. With neither a GPU nor a record the report has no rows, and says "not yet measured".

        Raises:
            OSError: ``TRITON_GALLERY_RECORDS`` names no folder that can be written to.
            RuntimeError: a record is asked for and there is no GPU. What our own provider raises passes as it is.
            ValueError: the function returned no rate, or None for ours at every x; or a record is asked for, and its
                provenance is not complete.
        """
        name, folder = self.benchmark.plot_name, os.environ.get("TRITON_GALLERY_RECORDS")
        if _device() is None:
            if folder:
                raise RuntimeError(f"{name}: TRITON_GALLERY_RECORDS is set, but {_without_gpu()}")
            try:
                digest = {"benchmark": self._digest()}
                report = _load(name, None, lambda record: _changed(record, digest))
            except FileNotFoundError:
                report = Report(self._header() | {"limit": None, "rows": []})
            shown = report.status()[0] if report.outdated else f"the committed record is shown, {report.provenance()}"
            print(f"{name}: nothing to measure, {_without_gpu()}; {shown}.")
            return report
        record = self._header()
        if folder:
            # Refuse incomplete provenance now, with a row that stands in for the ones to come, and not after minutes.
            validate(record | {"limit": None, "rows": [{"x": 1, "provider": OURS, "median": 1, "p20": 1, "p80": 1}]})
            try:
                file = Path(folder, slug(record["gpu"]), f"{name}.json").expanduser()
                file.parent.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=file.parent).close()
            except (OSError, RuntimeError) as error:  # the latter of the home of nobody
                rule = "TRITON_GALLERY_RECORDS must name a folder that can be written to"
                raise OSError(f"{name}: {rule}: {error}") from None
        record |= {"limit": None, "left_out": [], "rows": []}
        if self.limit:
            try:
                record["limit"] = limit(self.limit)
            except RuntimeError as error:
                record["left_out"].append({"x": "any", "provider": "limit", "why": _first_line(error)})
        # At first the host has compilers and allocators to start, and small kernels wait for it: nobody counts that.
        xs = _plain(list(self.benchmark.x_vals))
        self._measure(xs[0], {"left_out": [], "rows": []})
        for x in xs:
            self._measure(x, record)
        if not is_study(name) and all(row["provider"] != OURS for row in record["rows"]):
            raise ValueError(f"{name}: {self.fn.__name__} must return a rate of {OURS} at some x, got None at each")
        report = Report(record, live=True)
        if folder:
            validate(record)
            # Beside its place, and moved there: whoever stops this leaves no half of a record.
            new = file.with_suffix(".new")
            new.write_text(report.to_json(), encoding="utf-8")
            new.replace(file)
        return report

    def _header(self) -> dict:
        bench, found = self.benchmark, environment()
        arguments = [f"{x}=x" for x in bench.x_names] + [f"{key}={value!r}" for key, value in bench.args.items()]
        found["inputs"] = f"{self.fn.__name__}({', '.join(arguments)}), torch.manual_seed(0), {self.rounds} round(s)"
        found["command"] = os.environ.get("GALLERY_COMMAND") or shlex.join(["python", *sys.orig_argv[1:]])
        found["text"] = kernel_digests(bench.plot_name) | {"benchmark": self._digest()}
        x = {"x": bench.xlabel or bench.x_names[0], "x_log": bench.x_log, "y_log": bench.y_log}
        head = {"benchmark": bench.plot_name, "title": self.title, **x, "unit": bench.ylabel}
        return head | {key: found[key] for key in PROVENANCE}

    def _digest(self) -> str | None:
        """The digest of the benchmark's text; None without one, as in a notebook, whose cells stand alone."""
        if not inspect.isfunction(self.fn):
            return None
        file = Path(inspect.getsourcefile(self.fn) or "")
        # A page of the guide brings its text along.
        text = file.read_text(encoding="utf-8") if file.is_file() else self.fn.__globals__.get("__source__")
        return text and function_digest(text, self.fn.__name__)

    def _measure(self, x, record: dict) -> None:
        """Add to the record the rows of one x, and what was left out of them."""
        bench = self.benchmark
        sizes = dict(zip(bench.x_names, x if isinstance(x, list) else [x] * len(bench.x_names), strict=True))
        x = _recorded(x)
        torch.accelerator.empty_cache()
        if "torch._dynamo" in sys.modules:
            # After eight shapes of one function torch.compile quietly falls back to eager, a weaker peer.
            torch.compiler.reset()
        providers = list(zip(bench.line_names, bench.line_vals, strict=True))
        points, left_out = {name: [] for name in bench.line_names}, {}
        for i in range(self.rounds):
            for name, value in reversed(providers) if i % 2 else providers:
                if name in left_out:
                    continue
                torch.manual_seed(0)
                try:
                    point = self.fn(**sizes, **{bench.line_arg: value}, **bench.args)
                except (TritonError, RuntimeError) as error:
                    if is_ours(name):
                        error.add_note(f"{bench.plot_name}: {name} failed at x = {x}")
                        raise
                    left_out[name] = _first_line(error)
                else:
                    points[name].append(point)
                    if point is None:
                        left_out[name] = "does not apply"
                    elif not _is_rate(point):
                        rule = "must return a median, a quantile below and one above it, all positive, or None"
                        raise ValueError(
                            f"{bench.plot_name}: {self.fn.__name__} {rule}; for {name} it gave {got(point)}"
                        )
        names = list(bench.line_names)
        n_bytes = next((getattr(point, "n_bytes", 0) for point in points.get(OURS, ())), 0)
        if self.limit == "copy" and n_bytes > 0:
            names.append(COPY)
            try:
                points[COPY] = [gbps(n_bytes, measure(_copy(int(n_bytes))))]
            except RuntimeError as error:
                left_out[COPY] = _first_line(error)
        for name in names:
            if name in left_out:
                record["left_out"].append({"x": x, "provider": name, "why": left_out[name]})
            else:
                medians = [_round(statistics.median(values)) for values in zip(*points[name], strict=True)]
                record["rows"].append({"x": x, "provider": name} | dict(zip(FIGURES, medians, strict=True)))


def _is_rate(point) -> bool:
    try:
        median, low, high = point
        return 0 < low <= median <= high <= LARGEST
    except (TypeError, ValueError):
        return False


def _plain(x):
    """Python's numbers and lists for those of NumPy, which JSON does not take."""
    if isinstance(x, list | tuple):
        return [_plain(part) for part in x]
    return x.tolist() if hasattr(x, "tolist") else x


def _recorded(x):
    """A value of the sweep as a record has it."""
    return "×".join(map(str, x)) if isinstance(x, list | tuple) else x


def _round(value: float) -> float:
    """Five digits, more than a measurement can mean."""
    return float(f"{value:.5g}")


def _first_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {str(error).strip()}".splitlines()[0], 160, placeholder=" …")


# --- a number in a sentence -------------------------------------------------------------------------------------------


def quote(reference: str) -> str:
    """Read one number out of a committed record.

    Args:
        reference: "<benchmark>: <series> at <x>" or "<benchmark>: <series> / <series> at <x>". A series is a provider's
            name, "peers" (the best provider at that x that is neither this package's nor a copy of as many bytes) or
            "limit"; x is one of the sweep's values, or "worst", "best" or "median" over those where the series were
            measured.

    Returns:
        A rate with its unit ("3122 GB/s"), a ratio ("2.71×"), or a share of the limit or of a copy ("88 %"); "not
        yet measured" where the kernels changed after the record was made, and no other GPU has one of today's.

    Raises:
        FileNotFoundError: no record has this name.
        TypeError: the reference is no text.
        ValueError: the reference does not read as above, or names a series or an x that the record does not have.

    Example:
        >>> from triton_gallery import benchmark
        >>> text = benchmark.quote("softmax-fp16: triton_gallery / torch at 4096")
        >>> text.endswith("×") or text == "not yet measured"
        True
    """
    name, *what = _parse(reference)
    return load(name).quote(*what)


def _parse(reference: str) -> tuple[str, str, str | None, str]:
    """The benchmark's name, the series, what to divide it by, and where."""
    if not isinstance(reference, str):
        raise TypeError(f"quote: reference must be a str, got {type(reference).__name__}")
    match = _REFERENCE.fullmatch(reference.strip())
    if match is None:
        form = "'<benchmark>: <series> [/ <series>] at <x, worst, best or median>'"
        raise ValueError(f"quote: reference must read {form}, got {reference!r}")
    return match["name"], match["series"], match["base"], match["at"]
