"""What the compiler made of a call, for GPUs that need not be here.

`inspect` compiles every kernel that a call would launch and reads registers, spills, shared memory, matrix
instructions and load widths from the result. The work happens in a child process, because Triton's interpreter and its
compiler cannot share one. There the tensors become meta tensors, which have a shape and no data, and a driver that only
knows the name of a target stands in for the GPU's.
"""

import functools
import html
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from inspect import getsourcelines
from types import FunctionType, ModuleType

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime.jit import KernelInterface

from . import _launch
from ._arguments import allows_tf32
from ._assembly import read_amdgcn, read_ptx
from ._launch import TENSORS
from ._listing import by_line

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


# --- what a reader gets -----------------------------------------------------------------------------------------------


class _Assembly(dict):
    """The stages of one compilation by name; the machine code is disassembled when somebody asks for it."""

    def __missing__(self, kind: str) -> str:
        if kind != "sass" or not self.get("cubin"):
            raise KeyError(kind)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", "--print-line-info", file.name]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"sass: nvdisasm cannot read the cubin: {done.stderr.strip()}")
        self["sass"] = done.stdout
        return self["sass"]

    def texts(self) -> list[str]:
        """The stages that can be read, those that are disassembled first included."""
        kinds = ("ttir", "ttgir", "llir", "ptx", "sass", "amdgcn")
        return [kind for kind in kinds if kind in self or (kind == "sass" and self.get("cubin"))]


@dataclass(frozen=True)
class Kernel:
    """One kernel compiled for one target. What the toolchain at hand cannot tell is None.

    Attributes:
        name: the kernel's name.
        target: "sm_90", "gfx942", ...
        num_warps: warps of a program, those that the compiler added to specialise them included.
        num_stages: stages of the pipelined loops, as the launch asks for them. A `tl.range` with stages of its own does
            not follow it, nor do kernels in Gluon.
        registers: registers of a thread, in 32-bit units.
        spills: bytes of a thread that did not fit into registers and travel through memory.
        stack: bytes of a thread's stack.
        shared: bytes of shared memory that a program asks for.
        load_bits: the widest load from global memory by one thread, in bits; None where there is none.
        store_bits: the widest store.
        tma_loads: copies to shared memory by the tensor memory accelerator, which take the place of the threads' loads.
        tma_stores: copies and sums from shared memory by the same.
        matrix: how many matrix instructions the code has by family: mma, wgmma, tcgen05, mfma or wmma.
        warnings: what ptxas says of wgmma that it had to serialise or to wait for (C75xx).
        asm: the stages by name: ttir, ttgir, llir, then ptx and cubin, or amdgcn; and `asm["sass"]`, which is
            read out of the cubin when it is asked for.
        source: the file that defines the kernel, the definition's first line in it, and its lines.
    """

    name: str
    target: str
    num_warps: int
    num_stages: int
    registers: int | None
    spills: int | None
    stack: int | None
    shared: int
    load_bits: int | None
    store_bits: int | None
    tma_loads: int
    tma_stores: int
    matrix: dict[str, int]
    warnings: tuple[str, ...]
    asm: dict[str, str | bytes] = field(repr=False, compare=False)
    source: tuple[str, int, tuple[str, ...]] = field(repr=False, compare=False)


_COLUMNS: dict[str, Callable[[Kernel], object]] = {
    "kernel": lambda k: k.name,
    "target": lambda k: k.target,
    "warps": lambda k: k.num_warps,
    "stages": lambda k: k.num_stages,
    "registers": lambda k: k.registers,
    "spills (bytes)": lambda k: k.spills,
    "shared memory (bytes)": lambda k: f"{k.shared:,}",
    "widest load": lambda k: "TMA" if k.tma_loads else k.load_bits and f"{k.load_bits} bit",
    "widest store": lambda k: "TMA" if k.tma_stores else k.store_bits and f"{k.store_bits} bit",
    "matrix instructions": lambda k: ", ".join(f"{count} {family}" for family, count in k.matrix.items()),
    "warnings": lambda k: ", ".join(sorted({re.search(r"C\d+", warning).group() for warning in k.warnings})),
}


@dataclass(frozen=True)
class Report:
    """The kernels that one call compiles to; prints as a table, in a notebook or a page as HTML."""

    kernels: tuple[Kernel, ...]

    def source(self, kernel: str | None = None, target: str = "sm_90", kind: str = "ptx") -> str:
        """One stage of one compilation as text.

        Args:
            kernel: the kernel's name; the first one when None.
            target: one of the report's targets.
            kind: "ttir", "ttgir" or "llir"; "ptx" or "sass" for NVIDIA, "amdgcn" for AMD.

        Raises:
            ValueError: the report has no such kernel, target or stage.
            RuntimeError: nvdisasm, which gives "sass", does not know the target.
        """
        matches = [k for k in self.kernels if k.target == target and kernel in (None, k.name)]
        if not matches:
            known = ", ".join(f"{k.name} for {k.target}" for k in self.kernels) or "none"
            named = f"kernel {kernel}" if kernel else "kernel"
            raise ValueError(f"source: no {named} for {target}; the report has {known}")
        kinds = matches[0].asm.texts()
        if kind not in kinds:
            raise ValueError(f"source: kind must be one of {', '.join(kinds)}, got {kind!r}")
        return matches[0].asm[kind]

    def _table(self) -> list[list[str]]:
        """Header and rows as text, less the columns that are empty throughout."""
        rows = [
            ["–" if (cell := read(k)) in (None, "") else str(cell) for read in _COLUMNS.values()] for k in self.kernels
        ]
        kept = [i for i in range(len(_COLUMNS)) if any(row[i] != "–" for row in rows)]
        return [[row[i] for i in kept] for row in [list(_COLUMNS), *rows]]

    def __str__(self) -> str:
        if not self.kernels:
            return "no kernel was launched"
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.kernels:
            return "<p>no kernel was launched</p>"
        header, *rows = self._table()
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
        body = "".join(
            f'<tr><th scope="row">{html.escape(name).replace("_", "_<wbr>")}</th>'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            + "</tr>\n"
            for name, *cells in rows
        )
        return (
            '<div class="codegen-table" tabindex="0" role="region" aria-label="What each kernel was compiled to">\n'
            f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>"
        )


def inspect(
    function: Callable, /, *args, targets: str | Iterable[str] = TARGETS, backward: bool = False, **kwargs
) -> Report:
    """Compile every kernel that ``function(*args, **kwargs)`` would launch, for each target, without running any.

    Args:
        function: a function that can be imported by name, such as ``triton_gallery.softmax`` or one of your own that
            launches kernels.
        args: its arguments. Of a tensor only dtype, shape, strides and alignment matter: ``torch.empty(4096, 8192,
            dtype=torch.float16, device="meta")`` costs no memory.
        targets: names such as "sm_90" (NVIDIA) or "gfx942" (AMD), or one; without any, those in `TARGETS`.
        backward: compile the gradient's kernels too, for every floating-point tensor among the arguments, and
            in tuples, lists and dicts among them.
        kwargs: its keyword arguments.

    Returns:
        A `Report` with one `Kernel` for each kernel and target, in the order of their launches.

    Raises:
        TypeError: the function cannot be imported by name in another process, or an argument cannot travel there.
        ValueError: there is no target, or one is no name of that form.
        RuntimeError: the call failed, or a kernel did not compile; the message is the child process's.

    Notes:
        Of torch's settings, whether float32 products may round to TensorFloat-32, whether algorithms have to be
        deterministic, and the default dtype count as they are at the call; autocast does not. A process compiles the
        same call once, if it compiles, and with the same environment variables of the compilers; Triton's cache on disk
        keeps it for the next one. Shared memory is what a program asks for at launch; registers and spills come from
        ptxas for NVIDIA, from the code object for AMD.

    Example:
        >>> import torch, triton_gallery
        >>> x = torch.empty(2**20, dtype=torch.float16, device="meta")
        >>> report = triton_gallery.codegen.inspect(triton_gallery.add, x, x, targets=["sm_90"])
        >>> report.kernels[0].load_bits
        128
    """
    targets = _names(targets)
    if not targets:
        raise ValueError("inspect: targets must name one target or more, got none")
    (outcomes,) = _compile(_pack([(function, args, kwargs, backward)], targets))
    for target, outcome in zip(targets, outcomes, strict=True):
        if isinstance(outcome, str):
            raise RuntimeError(f"inspect: {_name(function)} failed for {target}: {outcome}")
    names = list(dict.fromkeys(k.name for outcome in outcomes for k in outcome))
    return Report(tuple(sorted((k for outcome in outcomes for k in outcome), key=lambda k: names.index(k.name))))


@dataclass(frozen=True, repr=False)
class Listing:
    """Each line of a kernel's source beside what it became, stage by stage; in a notebook or a page, folded away.

    Attributes:
        kernel: the kernel's name.
        target: "sm_90", "gfx942", ...
        source: the lines of the kernel's definition, its decorators included.
        stages: for each stage, "ttir", "ttgir", "ptx" and "sass" or "amdgcn", its lines by the line of the source,
            counted from 0. The line behind the last one has the instructions of SASS that belong to functions which the
            kernel calls: SASS does not say where they were called.
    """

    kernel: str
    target: str
    source: tuple[str, ...]
    stages: dict[str, dict[int, list[str]]]

    def __str__(self) -> str:
        blocks = []
        for i, line in enumerate((*self.source, "functions that it calls")):
            parts = [f"  {kind:8}{text}" for kind, stage in self.stages.items() for text in stage.get(i, ())]
            if parts or i < len(self.source):
                blocks.append("\n".join([line, *parts]))
        return "\n".join(blocks)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def cell(lines: list[str]) -> str:
            return f"<td><pre>{html.escape(chr(10).join(lines))}</pre></td>" if lines else "<td></td>"

        rows = []
        for i, line in enumerate((*self.source, "")):
            cells = [stage.get(i, []) for stage in self.stages.values()]
            if i < len(self.source) or any(cells):
                code = f"<pre>{html.escape(line)}</pre>" if i < len(self.source) else "functions that it calls"
                rows.append(f'<tr><th scope="row">{code}</th>{"".join(map(cell, cells))}</tr>\n')
        head = "".join(f'<th scope="col">{name}</th>' for name in ("source", *map(str.upper, self.stages)))
        title = f"{html.escape(self.kernel)} for {self.target}, line by line"
        return (
            f'<details class="codegen-listing"><summary>{title}</summary>\n'
            f'<div class="codegen-table" tabindex="0" role="region" aria-label="{title}">\n'
            f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody>\n</table>\n</div></details>"
        )


def listing(
    function: Callable,
    /,
    *args,
    target: str = "sm_90",
    kernel: str | None = None,
    stages: str | Iterable[str] | None = None,
    backward: bool = False,
    **kwargs,
) -> Listing:
    """Compile what ``function(*args, **kwargs)`` would launch and show one kernel's source beside what it became.

    Args:
        function: a function that can be imported by name, such as ``triton_gallery.softmax``.
        args: its arguments, as for `inspect`.
        target: a name such as "sm_90" or "gfx942".
        kernel: the kernel's name; the first one when None.
        stages: which stages to show, of "ttir", "ttgir", "ptx", "sass" and "amdgcn"; None shows all that there are
            ("sass" only where nvdisasm knows the target; with Triton 3.8 its loads and stores stand a few lines too
            low).
        backward: compile the gradient's kernels too.
        kwargs: its keyword arguments.

    Returns:
        A `Listing` of that kernel with the stages asked for.

    Raises:
        TypeError: the function cannot be imported by name in another process, or an argument cannot travel there.
        ValueError: there is no such target, kernel or stage, no stage is named, or nothing was launched.
        RuntimeError: the call failed, or a kernel did not compile, with the child process's message; or nvdisasm does
            not know the target of the "sass" asked for.

    Example:
        >>> import torch, triton_gallery
        >>> x = torch.empty(2**20, dtype=torch.float16, device="meta")
        >>> listing = triton_gallery.codegen.listing(triton_gallery.add, x, x, stages=["ttir"])
        >>> [i for i, line in enumerate(listing.source) if "tl.store" in line][0] in listing.stages["ttir"]
        True
    """
    stages = None if stages is None else _names(stages)
    if stages is not None and not stages:
        raise ValueError("listing: stages must name one stage or more, or be None for all, got none")
    ((outcome,),) = _compile(_pack([(function, args, kwargs, backward)], (target,), op="listing"), line_info=True)
    if isinstance(outcome, str):
        raise RuntimeError(f"listing: {_name(function)} failed for {target}: {outcome}")
    found = next((k for k in outcome if kernel in (None, k.name)), None)
    if not outcome:
        raise ValueError(f"listing: {_name(function)} launched no kernel")
    if found is None:
        raise ValueError(f"listing: kernel must be one of {', '.join(k.name for k in outcome)}, got {kernel!r}")
    asm = found.asm
    there = [kind for kind in asm.texts() if kind != "llir"]
    if missing := [kind for kind in stages or () if kind not in there]:
        raise ValueError(f"listing: stages must be among {', '.join(there)}, got {missing[0]!r}")
    if stages is None and "sass" in there:
        try:
            asm["sass"]
        except RuntimeError:  # nvdisasm does not know every target that ptxas knows
            there.remove("sass")
    file, first, source = found.source
    lines = range(first, first + len(source))
    return Listing(
        found.name,
        target,
        source,
        {
            kind: {n - first: texts for n, texts in by_line(kind, asm[kind], file, lines).items()}
            for kind in (stages or there)
        },
    )


# --- the way to the child and back ------------------------------------------------------------------------------------

# The child writes this before its answer: what it imports may print, too.
_ANSWER = b"\nthe outcomes of codegen:\n"

# What steers the compilers, by its name in the environment.
_STEERS = re.compile("TRITON|PTXAS|LLVM|AMDGCN|_MMA_|TMEM")

# What the child answered, by the request and what steered the compilers.
_answers: dict[tuple, bytes] = {}


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        if isinstance(obj, torch.Tensor):
            if obj.is_nested or obj.layout != torch.strided:
                got = "a nested one" if obj.is_nested else f"layout {obj.layout}"
                raise TypeError(f"tensors must be dense (strided), got {got}")
            offset = obj.storage_offset()
            if type(obj) in TENSORS and not obj.is_meta:
                # Memory of somebody else's may begin anywhere.
                offset += obj.untyped_storage().data_ptr() % 16 // obj.element_size()
            return obj.dtype, tuple(obj.shape), obj.stride(), offset
        return None

    def reducer_override(self, obj):
        kind = obj if hasattr(obj, "__qualname__") else type(obj)
        if getattr(kind, "__module__", None) == "__main__":
            raise TypeError(f"{kind.__qualname__} is of __main__, which is another one there; move it to a module")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid):
        dtype, shape, stride, offset = pid
        extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return torch.empty(max(extent, offset), dtype=dtype, device="meta").as_strided(shape, stride, offset)


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _names(names: str | Iterable[str]) -> tuple:
    """The names as a tuple; a single one needs none of its own."""
    return tuple(names) if isinstance(names, Iterable) and not isinstance(names, str | bytes) else (names,)


def _pack(
    calls: list[tuple[Callable, tuple, dict, bool]],
    targets: tuple[str, ...],
    keep_asm: bool = True,
    op: str = "inspect",
) -> bytes:
    """The request to the child: (function, args, kwargs, backward) of each call, the targets, and torch's settings.

    With them go the versions of the functions' files, and of those that these import from, for the cache of `_compile`:
    a pickle has no more than names.
    """
    versions = []
    for target in targets:
        if _parse(target) is None:
            rule = "targets must be names" if op == "inspect" else "target must be a name"
            raise ValueError(f'{op}: {rule} such as "sm_90" or "gfx942", got {target!r}')
    for function, *_, backward in calls:
        if not isinstance(backward, bool):
            raise TypeError(f"{op}: backward must be True or False, got {backward!r}")
        if isinstance(function, KernelInterface):
            while isinstance(function, KernelInterface):
                function = function.fn
            raise TypeError(f"{op}: function must be one that launches kernels, got the kernel {_name(function)}")
        if not callable(function):
            raise TypeError(f"{op}: function must be callable, got {type(function).__name__}")
        named = function
        while isinstance(named, functools.partial):
            named = named.func
        module = getattr(named, "__module__", type(named).__module__)
        versions.append(_versions(module))
        name = f"{module}.{_name(named)}"
        if name.startswith("__main__.") or "<" in name:
            raise TypeError(f"{op}: function must be importable in another process, got {name}; move it to a module")
    settings = allows_tf32(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump((calls, targets, keep_asm, settings, versions))
    except (AttributeError, RuntimeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(f"{op}: function and arguments must travel to another process: {error}") from error
    return buffer.getvalue()


def _versions(module: str) -> dict[str, int]:
    """The files of a module, and of those whose contents it uses, and when they changed; not of what is installed."""
    versions, left = {}, {module}
    while left:
        module = left.pop()
        found = sys.modules.get(module)
        file = getattr(found, "__file__", None)
        if file is None or file in versions or "site-packages" in file or not os.path.exists(file):
            continue
        if module.partition(".")[0] in sys.stdlib_module_names:
            continue
        versions[file] = os.stat(file).st_mtime_ns
        for value in list(vars(found).values()):
            while isinstance(value, KernelInterface):
                value = value.fn
            if isinstance(value, ModuleType):
                left.add(value.__name__)
            elif isinstance(value, FunctionType | type):
                left.add(value.__module__)
    return versions


def _compile(request: bytes, line_info: bool = False) -> list[list[list[Kernel] | str]]:
    """For each call, for each target: the kernels, or the error's text. What failed is tried anew by the next call."""
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        # Line tables make up half of the assembly, and the code is the same.
        "TRITON_DISABLE_LINE_INFO": "0" if line_info else "1",
        # A folder of its own: every entry in it was compiled with ptxas's log kept.
        "TRITON_CACHE_DIR": os.path.join(triton.knobs.cache.dir, "codegen-lines" if line_info else "codegen"),
    }
    env.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns about a coming default where it is not set
    key = request, *sorted(setting for setting in env.items() if _STEERS.search(setting[0]))
    answer = _answers.get(key) or _ask(request, env, "listing" if line_info else "inspect")
    # Each time anew: who asks again gets kernels of their own, which nobody has changed.
    outcomes = pickle.loads(answer)
    if not any(isinstance(outcome, str) for of_call in outcomes for outcome in of_call):
        _answers[key] = answer
    return outcomes


def _ask(request: bytes, env: dict[str, str], op: str) -> bytes:
    """What the child says."""
    try:
        os.getcwd()
    except FileNotFoundError:  # torch cannot be imported from nowhere
        raise RuntimeError(f"{op}: the compiling process needs a working directory, and it is gone") from None
    # Not in PYTHONPATH, which would part a folder at its colon. Python takes no notice of entries that are no text.
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    program = "import json, sys; sys.path = json.loads(sys.argv.pop())"
    program += "; from triton_gallery import codegen; codegen._serve()"
    child = subprocess.run([sys.executable, "-P", "-c", program, path], input=request, env=env, capture_output=True)
    _, found, answer = child.stdout.partition(_ANSWER)
    if child.returncode != 0 or not found:
        lines = child.stderr.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), f"exit status {child.returncode}")
        raise RuntimeError(f"{op}: the compiling process failed: {last}")
    return answer


# --- inside the child -------------------------------------------------------------------------------------------------


class _TargetDriver:
    """As much of a driver as compilation asks for.

    Triton keeps the kernels of one device apart from those of another, so each target is a device of its own.
    """

    def __init__(self, device: int, target: str):
        self.device, self.target = device, _parse(target)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return divmod(self.target.arch, 10) if self.target.backend == "cuda" else (0, 0)


def _parse(target: object) -> GPUTarget | None:
    """The target of this name, or None."""
    if match := re.fullmatch(r"sm_([0-9]{2,3})", str(target)):
        return GPUTarget("cuda", int(match[1]), 32)
    if match := re.fullmatch(r"gfx([0-9]{1,2})[0-9][0-9a-f]", str(target)):
        return GPUTarget("hip", target, 64 if int(match[1]) == 9 else 32)
    return None


def _serve() -> None:
    """Read calls from stdin, compile what they launch, write the outcomes to stdout."""
    # Compilers print to stdout, so the answer gets a descriptor of its own and everything else goes to stderr.
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        request = sys.stdin.buffer.read()
        _, targets, keep_asm, (tf32, is_deterministic, default_dtype), _ = _unpacked(request)
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
        # Not by use_deterministic_algorithms: it imports torch's compiler, for longer than a small kernel takes.
        torch.set_deterministic_debug_mode("error" if is_deterministic else "default")
        torch.set_default_dtype(default_dtype)
        _keep_ptxas_log()
        _collect_launches()
        outcomes = []
        for device, target in enumerate(targets):
            driver = _TargetDriver(device, target)
            # Arguments anew for each target: a call may leave something in them.
            outcomes.append([_run(call, target, driver, keep_asm) for call in _unpacked(request)[0]])
        answer.write(_ANSWER)
        pickle.dump([list(of_call) for of_call in zip(*outcomes, strict=True)], answer)


def _unpacked(request: bytes) -> tuple:
    return _Unpickler(io.BytesIO(request)).load()


def _keep_ptxas_log() -> None:
    """Let the cubin stage store what ptxas said in the kernel's metadata, where Triton's cache keeps it."""
    from triton.backends.nvidia import compiler

    knobs = triton.knobs
    knobs.nvidia.dump_ptxas_log = True
    try:
        has_ptxas = bool(knobs.nvidia.ptxas and knobs.nvidia.ptxas_blackwell)
    except RuntimeError:
        # A build of Triton without NVIDIA's tools still generates PTX, if it is told for which version of them.
        has_ptxas = False
        compiler.get_ptxas = lambda arch: knobs.NvidiaTool("", "12.8")
        knobs.nvidia.mock_ptx_version = "12.8"
    make_cubin = compiler.CUDABackend.make_cubin

    def make_cubin_and_keep_log(self, src, metadata, *args):
        with redirect_stdout(io.StringIO()) as log:
            cubin = make_cubin(self, src, metadata, *args) if has_ptxas else b""
        metadata["ptxas_log"] = log.getvalue()
        return cubin

    compiler.CUDABackend.make_cubin = make_cubin_and_keep_log


def _collect_launches() -> None:
    """Let ``kernel[grid](...)`` compile the kernel and run nothing, as the package's own launches do."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_and_collect(self, *args, grid, warmup, **meta):
        compiled = run(self, *args, grid=grid, warmup=True, **meta)
        if not warmup:
            _launch.compilations.append(compiled)
        return compiled

    def compile_all(self, *args, warmup, **meta):
        _launch.compilations.append(self.warmup(*args, **meta))

    JITFunction.run, Autotuner.run = compile_and_collect, compile_all


def _run(call: tuple, target: str, driver: _TargetDriver, keep_asm: bool) -> list[Kernel] | str:
    function, args, kwargs, backward = call
    triton.runtime.driver.set_active(driver)
    try:
        with _launch.compile_only() as compiled:
            if backward:
                for x in _tensors((args, kwargs)):
                    x.requires_grad_(x.is_floating_point())
                outputs = [x for x in _tensors(function(*args, **kwargs)) if x.requires_grad]
                torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
            else:
                function(*args, **kwargs)
        # An autotuned kernel gives one list with an entry for each of its configurations.
        kernels = [k for item in compiled for k in (item if isinstance(item, list) else [item])]
        return [_describe(k, target, keep_asm) for k in {k.hash: k for k in kernels}.values()]
    except (Exception, SystemExit) as error:
        # Where a kernel calls a function, Triton's error names the call, and its cause what is wrong there.
        while isinstance(error.__cause__, CompilationError):
            error = error.__cause__
        return f"{type(error).__name__}: {error}"


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _describe(kernel, target: str, keep_asm: bool) -> Kernel:
    asm = kernel.asm
    log = getattr(kernel.metadata, "ptxas_log", "")
    read = read_amdgcn(asm["amdgcn"]) if "amdgcn" in asm else read_ptx(asm["ptx"], log)
    kinds = ("ttir", "ttgir", "llir", "ptx", "cubin", "amdgcn") if keep_asm else ()
    return Kernel(
        name=kernel.name,
        target=target,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        shared=kernel.metadata.shared,
        asm=_Assembly((kind, asm[kind]) for kind in kinds if kind in asm),
        source=_source(kernel.src.fn.fn),
        **read,
    )


def _source(function: Callable) -> tuple[str, int, tuple[str, ...]]:
    """The file that defines a function, its first line there, and its text."""
    lines, first = getsourcelines(function)
    return os.path.basename(function.__code__.co_filename), first, tuple(line.rstrip("\n") for line in lines)
