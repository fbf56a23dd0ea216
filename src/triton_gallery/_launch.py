"""The launch of a kernel, and what every launcher shares around it: sizes, scratch memory, descriptors, the device.

One rule decides where a kernel runs: the device of its tensors. In interpreter mode CPU tensors are welcome; compiled
kernels want a GPU; meta tensors are compiled and not run, which is how ``triton_gallery.codegen`` sees what a user's
call would build.
"""

import functools
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRET = triton.knobs.runtime.interpret

# The types whose tensors hold what a kernel can read; other subclasses may stand for something else.
TENSORS = (torch.Tensor, torch.nn.Parameter)


class Varying(int):
    """An argument that no kernel is specialized on, and that a replay takes from the call."""


# --- shapes -----------------------------------------------------------------------------------------------------------


def collapse(shape: Iterable[int], *strides: Iterable[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Sizes and strides, innermost first, with neighbouring dimensions merged wherever all the strides allow it."""
    sizes, merged = [], [[] for _ in strides]
    for size, *steps in reversed(list(zip(shape, *strides, strict=True))):
        if size == 1:
            continue
        if sizes and all(step == m[-1] * sizes[-1] for step, m in zip(steps, merged, strict=True)):
            sizes[-1] *= size
        else:
            sizes.append(size)
            for step, m in zip(steps, merged, strict=True):
                m.append(step)
    # One element has no dimension left; a kernel's tuple of sizes needs one.
    return tuple(sizes or [1]), [tuple(m or [1]) for m in merged]


def known(condition: bool | torch.SymBool) -> bool:
    """A condition on sizes; False where a tracer cannot tell, because they depend on data, as those of x[mask] do."""
    if not (isinstance(condition, torch.SymBool) or torch.compiler.is_compiling()):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def exceeds(size: int | torch.SymInt, limit: int) -> bool:
    """Whether a size is beyond a limit; False where a tracer would have to make it a condition on what it compiles."""
    if not (isinstance(size, torch.SymInt) or torch.compiler.is_compiling()):
        return size > limit
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size > limit)


def broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that two shapes broadcast to, or None where they do not.

    torch.broadcast_shapes takes the host as long as the GPU needs to add two small tensors, and makes torch.export
    take a size that varies for a constant. Sizes that depend on data count as no 1, and as those that they meet.
    """
    if len(first) < len(second):
        first, second = second, first
    shape = list(first)
    for d in range(-len(second), 0):
        if known(shape[d] == 1):
            shape[d] = second[d]
        elif not known(second[d] == 1) and known(second[d] != shape[d]):
            return None
    return tuple(shape)


def alignment(tensors: tuple[torch.Tensor, ...], *sizes: int) -> tuple[bool, int]:
    """Whether rows can be read four numbers (16 bytes of float64) at a time, and ALIGN of their kernel.

    ALIGN divides all lengths and strides: so many numbers, of up to 16 bytes, can be read at a time. Triton sees by
    itself that an argument is a multiple of 16, so ALIGN is more than 1 only where that is not enough.
    """
    vector = 16 // tensors[0].element_size()
    align = math.gcd(vector, *sizes) if all(x.data_ptr() % 16 == 0 for x in tensors) else 1
    return align >= min(4, vector), align if any(size % 16 != 0 for size in sizes) else 1


def index_dtype(n_elements: int) -> tl.dtype:
    """The narrowest dtype that counts n_elements."""
    return tl.int32 if n_elements < 2**31 else tl.int64


# Triton's own two, cdiv and next_power_of_2, may be called from kernels and cost the host a microsecond each.


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


# --- the launch -------------------------------------------------------------------------------------------------------


# What `_fast_key` describes -> the compiled kernel and what its launcher wants beside the arguments.
handles: dict[tuple, tuple] = {}
HOOKS = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)


# a * b + c is one instruction, and one rounding. Triton 3.9 warns where nobody says so, and 3.10 will take two then.
_OPTIONS = {"enable_fp_fusion": True}


def launch(kernel, grid: tuple[int, ...], *args, **meta) -> None:
    """Run ``kernel[grid](*args, **meta)`` on the device of its first tensor argument.

    Args:
        kernel: a ``@triton.jit`` function.
        grid: programs along each axis; none may be 0.
        args: the kernel's arguments in order; tensors and tensor descriptors among them.
        meta: constexprs by name, `num_warps`, `num_stages`.

    A call like an earlier one skips most of what ``kernel[grid]`` does on the host: the compiled kernel is found by a
    key that tells apart all that Triton specializes on, and is launched directly.
    """
    key = _fast_key(kernel, args, meta)
    handle = handles.get(key) if key is not None else None
    if (tape := recording.tape) is not None:
        tape.launches.append((key, grid, args))
    if handle is not None and not (HOOKS[0].calls or HOOKS[1].calls):
        run, function, metadata, constants, device = handle
        if torch._C._cuda_getDevice() == device:
            stream = torch._C._cuda_getCurrentRawStream(device)
            x, y, z = (*grid, 1, 1)[:3]
            run(x, y, z, stream, function, metadata, None, None, None, *args, *constants)
            return

    device = next(tensor_of(arg).device for arg in args if tensor_of(arg) is not None)
    if device.type == "meta":
        with interpreter_lock:
            compilations.append(kernel.warmup(*args, grid=grid, **_OPTIONS, **meta))
        return
    args = [int(arg) if type(arg) is Varying else arg for arg in args]
    with _current(device):
        if INTERPRET:
            launch_interpreted(kernel, grid, args, meta)
            return
        with interpreter_lock:
            compiled = kernel[grid](*args, **_OPTIONS, **meta)
        if key is not None:
            parameters = list(kernel.signature.parameters.values())[len(args) :]
            constants = tuple(meta.get(parameter.name, parameter.default) for parameter in parameters)
            handles[key] = (compiled.run, compiled.function, compiled.packed_metadata, constants, device.index)


def _fast_key(kernel, args: tuple, meta: dict) -> tuple | None:
    """All that decides which binary a launch on an NVIDIA GPU runs, or None where only Triton itself can tell."""
    first = args[0] if type(args[0]) in TENSORS else getattr(args[0], "base", None)
    if INTERPRET or torch.version.hip is not None or first is None or not first.is_cuda:
        return None
    parts = [kernel.fn, first.get_device()]
    for arg in args:
        kind = type(arg)
        if kind in TENSORS:
            parts.append(arg.dtype)
            parts.append(arg.data_ptr() & 15 == 0)
        elif kind is int:
            parts.append(_int_kind(arg))
        elif kind is Varying:
            parts.append(kind)
        elif kind is tuple:
            parts.append(tuple(_int_kind(item) if type(item) is int else type(item) for item in arg))
        elif arg is None or kind is float or kind is bool:
            parts.append(kind)
        elif (specialization := getattr(arg, "specialization", None)) is not None:
            parts.append((kind, specialization))
        else:
            return None
    parts.extend(meta.items())
    return tuple(parts)


def _int_kind(value: int) -> int:
    """Triton compiles a kernel of its own for the number 1, for multiples of 16, and for what needs 64 bits."""
    kind = 1 if value == 1 else 2 if value & 15 == 0 else 3
    return kind if -(2**31) <= value < 2**31 else -kind


def tensor_of(arg: object) -> torch.Tensor | None:
    """The tensor behind an argument: itself, the base of a tensor descriptor (tl's or Gluon's), or None."""
    if isinstance(arg, torch.Tensor):
        return arg
    base = getattr(arg, "base", None)
    return base if isinstance(base, torch.Tensor) else None


def _current(device: torch.device):
    """A context in which `device` is the current one; free when it already is."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    return nullcontext() if module.current_device() == device.index else module.device(device)


# --- memory beside the arguments --------------------------------------------------------------------------------------


class Tape:
    """What one call did on the device, for `_replay`."""

    def __init__(self):
        self.launches = []  # (key of the handle, grid, arguments)
        self.scratch = []
        self.tables = []
        self.keep = True  # False where a later call of the same kind may do something else


class _Recording(threading.local):
    tape: Tape | None = None  # while a call is recorded
    applications: list | None = None  # while one with a gradient is: (torch.autograd.Function, arguments, output)


recording = _Recording()


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty`` for what kernels write and the caller may not get to see."""
    x = torch.empty(shape, dtype=dtype, device=device)
    if (tape := recording.tape) is not None:
        tape.scratch.append(x)
    return x


def table(x: torch.Tensor) -> torch.Tensor:
    """x, which kernels only read and which is the same for all arguments of the same kind."""
    if (tape := recording.tape) is not None:
        tape.tables.append(x)
    return x


def padded(x: torch.Tensor) -> torch.Tensor:
    """Memory shaped as x, whose rows begin at multiples of 16 bytes, as TMA wants them."""
    row = cdiv(x.shape[-1] * x.element_size(), 16) * 16 // x.element_size()
    return x.new_empty(*x.shape[:-1], row)[..., : x.shape[-1]]


# Arguments of `descriptor` without the tensor -> the attributes of a descriptor made from them.
_descriptors: dict[tuple, dict] = {}
# What Triton specializes on in a descriptor -> an object that stands for it, and is quicker to hash.
_specializations: dict[tuple, object] = {}


def descriptor(
    kind: type, x: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block_shape: tuple[int, ...], *layout
):
    """``kind(x, shape, strides, block_shape, *layout)``, where `kind` is tl's tensor descriptor or Gluon's.

    Its checks take the host several microseconds, so they run once for each list of arguments; that x is 16-byte
    aligned the caller has to know.
    """
    key = (kind, x.dtype, shape, strides, block_shape, *layout)
    attributes = _descriptors.get(key)
    if attributes is None:
        if len(_descriptors) >= 4096:
            _descriptors.clear()
        attributes = vars(kind(x, list(shape), list(strides), list(block_shape), *layout))
        attributes["specialization"] = _specializations.setdefault((kind, x.dtype, block_shape, *layout), object())
        _descriptors[key] = {**attributes, "base": None}
    made = object.__new__(kind)
    vars(made).update(attributes, base=x)
    return made


# --- without a GPU ----------------------------------------------------------------------------------------------------


# The interpreter keeps the program that runs in a global variable; what wraps it, as a trace does, holds this, too. So
# does who may compile: meanwhile a trace would put the interpreter's functions in place of the compiler's.
interpreter_lock = threading.RLock()
# A child that began amid another thread's launch would inherit a language that nobody restores, and a lock that nobody
# opens: so it begins between launches.
os.register_at_fork(
    before=interpreter_lock.acquire, after_in_parent=interpreter_lock.release, after_in_child=interpreter_lock.release
)


if triton.__version__.startswith("3.6."):
    # Its interpreter cannot count to an argument of the kernel: NumPy no longer takes an array of one number for an
    # integer.
    def _patch_tensor(tensor: type, scope, patch: Callable = interpreter._patch_lang_tensor) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor


# Globals of the functions that the running launch has prepared the language for: patched it to compute by NumPy.
_patched: set[int] = set()


def _patch_language(fn: Callable, patch: Callable = interpreter._patch_lang) -> interpreter._LangPatchScope:
    """The interpreter does this whenever a kernel calls a function, for a third of its time. Once a launch will do."""
    if id(fn.__globals__) in _patched:
        return interpreter._LangPatchScope()
    scope = patch(fn)
    if not _patched:  # by the launch itself, which restores the language when it ends
        restore = scope.restore
        scope.restore = lambda: (_patched.clear(), restore())
    _patched.add(id(fn.__globals__))
    return scope


interpreter._patch_lang = _patch_language


def launch_interpreted(kernel, grid: tuple[int, ...], args: tuple, meta: dict) -> None:
    """The interpreter has wrong sums in bfloat16 and wrong float8 numbers: such tensors visit it as float32."""
    widened = {}  # data pointer and dtype of such a tensor's storage -> (its memory, a float32 copy of it)

    def widen(x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            return x
        # All of the storage, so that tensors which share it share the copy.
        storage = x.untyped_storage()
        key = (storage.data_ptr(), x.dtype)
        if key not in widened:
            memory = x.detach().as_strided((storage.nbytes() // x.element_size(),), (1,), 0)
            widened[key] = (memory, memory.float())
        return widened[key][1].as_strided(x.shape, x.stride(), x.storage_offset())

    def convert(arg):
        if isinstance(arg, tuple):
            parts = map(convert, arg)
            return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
        if isinstance(arg, TensorDescriptor):
            return TensorDescriptor(widen(arg.base), arg.shape, arg.strides, arg.block_shape, arg.padding)
        return widen(arg) if isinstance(arg, torch.Tensor) else arg

    # NumPy, which computes here, warns of inf - inf, rows of NaN and the like; a GPU does not.
    with interpreter_lock, np.errstate(all="ignore"):
        _ignore_rows_of_nan()
        kernel[grid](*map(convert, args), **meta)
    for memory, wide in widened.values():
        # Only what the kernel wrote goes back: writing an input, even with the same values, would trip autograd's
        # version check.
        if not torch.equal(wide.view(torch.int32), memory.float().view(torch.int32)):
            with torch.inference_mode() if memory.is_inference() else nullcontext():
                memory.copy_(wide)


_filter = None  # the last one that `_ignore_rows_of_nan` added


def _ignore_rows_of_nan() -> None:
    """The filter stays: restoring filters would undo what other threads do to theirs meanwhile.

    It is added once, since with each change Python forgets which warnings it has shown already.
    """
    global _filter
    if _filter not in warnings.filters:
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning, interpreter.__name__)
        _filter = warnings.filters[0]


# None, or the list that collects what calls on meta tensors compile.
compilations: list | None = None


@contextmanager
def compile_only() -> Iterator[list]:
    """Inside, calls on meta tensors compile their kernels for the active driver's target and add them to the list."""
    global compilations
    compilations = []
    try:
        yield compilations
    finally:
        compilations = None


def is_compile_only() -> bool:
    """Whether kernels called on meta tensors are compiled: inside `compile_only`."""
    return compilations is not None


# --- the device -------------------------------------------------------------------------------------------------------


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of `device`; how many programs a persistent kernel starts."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    # The interpreter runs programs one after another; compile-only calls need a plausible count, and use the H200's.
    return 4 if device.type == "cpu" else 132


def cuda_arch(device: torch.device) -> int:
    """The number in sm_90 of the NVIDIA GPU that kernels run on (or are compiled for); 0 for everything else."""
    if device.type == "meta":
        target = triton.runtime.driver.active.get_current_target()
        return target.arch if target.backend == "cuda" else 0
    if INTERPRET or device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = _capability(device)
    return 10 * major + minor


def pdl(device: torch.device) -> dict[str, bool]:
    """Options that let a launch begin before the kernel ahead of it has ended: *programmatic dependent launch*.

    NVIDIA GPUs have it from Hopper on. The kernel ahead says by `gdc_launch_dependents` that it may, and this one waits
    by `gdc_wait` before it reads what the other wrote.
    """
    return {"PDL": True, "launch_pdl": True} if cuda_arch(device) >= 90 else {}


def is_hopper(device: torch.device) -> bool:
    """Whether kernels that use what only sm_90 has can run on (or be compiled for) `device`."""
    return cuda_arch(device) == 90


@functools.cache
def has_fast_memory(device: torch.device) -> bool:
    """Whether a Hopper GPU has an H200's memory, faster than an H100's; compile-only calls stand for an H200."""
    return device.type == "meta" or torch.cuda.get_device_properties(device).total_memory > 100e9


def is_amd(device: torch.device) -> bool:
    """Whether kernels run on (or are compiled for) an AMD GPU."""
    if device.type == "meta":
        return triton.runtime.driver.active.get_current_target().backend == "hip"
    return device.type == "cuda" and torch.version.hip is not None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
