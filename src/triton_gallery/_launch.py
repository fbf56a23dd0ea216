"""What every launcher shares: argument checks, registration with torch, and the launch itself.

One rule decides where a kernel runs: the device of its tensors. In interpreter mode CPU tensors are welcome; compiled
kernels want a GPU; meta tensors are compiled and not run, which is how ``triton_gallery.codegen`` sees what a user's
call would build.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import BuiltinFunctionType, CellType, FunctionType

import numpy as np
import torch
import triton
import triton.language as tl
from torch.autograd import forward_ad
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRET = triton.knobs.runtime.interpret

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# None, or the list that collects what calls on meta tensors compile: see `compile_only`.
_compiled: list | None = None


# --- argument checks --------------------------------------------------------------------------------------------------


def check_tensor(op: str, name: str, x: object, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Refuse what is not a dense tensor of one of `dtypes` on a device that can run a kernel."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must have one of the dtypes {allowed}, got {got}")
    if x.is_nested:
        raise TypeError(f"{op}: {name} must not be a nested tensor; call .to_padded_tensor() or .unbind() first")
    if x.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {x.layout}; call .to_dense() first")
    device = x.device.type
    if device == "cpu" and not INTERPRET:
        raise ValueError(
            f"{op}: {name} must be on a GPU, got device cpu; move it there, or set TRITON_INTERPRET=1 before importing "
            "triton to run on CPU tensors in the interpreter"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(f"{op}: forward-mode differentiation is not supported; use reverse mode (backward)")
    if device == "meta" and _compiled is None and not is_tracing():
        raise ValueError(f"{op}: {name} must hold data, got a meta tensor")


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors (None is skipped) that live on different devices."""
    present = [(name, x) for name, x in tensors.items() if x is not None]
    first_name, first = present[0]
    for name, x in present[1:]:
        if x.device != first.device:
            raise ValueError(f"{op}: {name} must be on the device of {first_name}, {first.device}, got {x.device}")


# --- registration -----------------------------------------------------------------------------------------------------


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work, whose tensors have no memory of their own."""
    return torch._C._are_functorch_transforms_active()


def is_tracing() -> bool:
    """Whether torch.compile, another tracer or a transform, not the device, will get what is called now."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or is_transformed()
        or torch._C._is_tracing()
    )


def _is_plain(x: torch.Tensor) -> bool:
    """Whether x's memory holds its elements, as no view with a pending sign and no wrapper's does."""
    return (
        type(x) in _TENSORS
        and not x.is_neg()
        and not x._is_zerotensor()
        and not torch._C._functorch.is_legacy_batchedtensor(x)
    )


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def needs_autograd(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd has to record a function of these tensors. In a transform the registered operators see to it."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors) and not is_transformed()


def apply(function: type[torch.autograd.Function], *args):
    """``function.apply(*args)``, also under torch.compile when a tensor stands twice among the arguments."""
    if torch.compiler.is_compiling():
        args = [
            arg.view_as(arg) if isinstance(arg, torch.Tensor) and any(arg is x for x in args[:i]) else arg
            for i, arg in enumerate(args)
        ]
    return function.apply(*args)


def autocast(*tensors: torch.Tensor | None) -> Iterable[torch.Tensor | None]:
    """The tensors as :class:`torch.autocast` casts those of a matrix product; None, float64 and float8 stay."""
    device = next(x.device.type for x in tensors if x is not None)
    if device not in ("cpu", "cuda", "xpu") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x is not None and x.dtype in FLOATS[:3] else x for x in tensors]


def operator(fake: Callable, replay: bool = True, vmap: Callable | None = None) -> Callable:
    """Register a launcher as ``torch.ops.triton_gallery.<name>`` without a cost for eager calls.

    Args:
        fake: takes the launcher's arguments and returns empty outputs of the right shape, dtype and strides.
        replay: whether the launcher is also `replayed`.
        vmap: the rule for a batch of calls, like the static method `vmap` of :class:`torch.autograd.Function`; without
            one they are made one after another.

    ``torch.compile`` and other tracers see one opaque operator, and torch resolves what is no plain tensor; an eager
    call goes straight to the launcher, because the dispatcher would cost more host time than the launch. The launcher's
    annotations give the operator's schema.
    """

    def decorate(launcher: Callable) -> Callable:
        name = launcher.__name__.removeprefix("_")
        registered = torch.library.custom_op(f"triton_gallery::{name}", launcher, mutates_args=())
        registered.register_fake(fake)
        overload = getattr(torch.ops.triton_gallery, name).default

        @functools.wraps(launcher)
        def launch_or_dispatch(*args):
            # What is compiled finds the rule of a vmap at the operator, which then takes itself out of the way.
            if torch.compiler.is_compiling() or _dispatch_key_is_excluded(_VMAP):
                return overload(*args)
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            # The rule of a vmap calls with tensors that autograd, around it, has to follow.
            if is_transformed() or needs_autograd(*tensors):
                return call.transformed.apply(*args)
            return launcher(*args) if all(map(_is_plain, tensors)) and not is_tracing() else overload(*args)

        call = replayed(launch_or_dispatch) if replay else launch_or_dispatch
        rule = vmap or functools.partial(one_by_one, call)
        registered.register_vmap(rule)
        call.registered, call.transformed = registered, _transformed(call, rule)
        return call

    return decorate


_VMAP = torch._C.DispatchKey.FuncTorchBatched
_dispatch_key_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def _transformed(op: Callable, rule: Callable) -> type:
    """The operator for the transforms of ``torch.func``.

    They want a class of this form, which costs every call 15 µs; so eager calls use others.
    """

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return op(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *grads):
            raise NotImplementedError(f"triton_gallery.{op.__name__.removeprefix('_')} has no derivative")

        vmap = staticmethod(rule)

    return Transformed


def differentiable(op: Callable, function: type) -> None:
    """Let what traces and transforms differentiate `op` as `function`, by its methods `setup` and `backward`."""
    op.registered.register_autograd(function.backward, setup_context=function.setup)
    op.transformed.setup_context = staticmethod(function.setup)
    op.transformed.backward = staticmethod(function.backward)


def one_by_one(op: Callable, info, in_dims: tuple, *args) -> tuple:
    """The rule of vmap that always works: a call for each member of the batch."""
    results = []
    for i in range(info.batch_size):
        results.append(op(*(arg if d is None else arg.select(d, i) for arg, d in zip(args, in_dims, strict=True))))
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results, strict=True))), 0


def batch_first(x: torch.Tensor | None, dim: int | None, batch_size: int) -> torch.Tensor | None:
    """x with the dimension `dim` of a vmap in front; expanded there when x is the same for the whole batch."""
    if x is None:
        return None
    return x.expand(batch_size, *x.shape) if dim is None else x.movedim(dim, 0)


def aligned_batches(tensors: tuple[torch.Tensor, ...], in_dims: tuple) -> list[torch.Tensor]:
    """Each tensor with its batch dimension in front, and behind it so many dimensions that they broadcast as before."""
    ndim = max(x.ndim - (d is not None) for x, d in zip(tensors, in_dims, strict=True))

    def align(x, d):
        if d is None:
            return x
        x = x.movedim(d, 0)
        return x.reshape(x.shape[0], *(1,) * (ndim + 1 - x.ndim), *x.shape[1:])

    return [align(x, d) for x, d in zip(tensors, in_dims, strict=True)]


def allows_tf32() -> bool:
    """Whether torch allows float32 products on a GPU to round their factors to TensorFloat-32."""
    # What torch.backends.cuda.matmul.fp32_precision says, by whichever of torch's settings, in a quarter of the time.
    return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


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


def broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that two shapes broadcast to, or None where they do not.

    torch.broadcast_shapes takes the host as long as the GPU needs to add two small tensors, and makes torch.export
    take a size that varies for a constant.
    """
    if len(first) < len(second):
        first, second = second, first
    shape = list(first)
    for d in range(-len(second), 0):
        if shape[d] == 1:
            shape[d] = second[d]
        elif second[d] != 1 and second[d] != shape[d]:
            return None
    return tuple(shape)


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


# What `_fast_key` describes -> the compiled kernel and what its launcher wants before the arguments.
_handles: dict[tuple, tuple] = {}
_HOOKS = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)


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
    handle = _handles.get(key) if key is not None else None
    if (tape := _recording.tape) is not None:
        tape.launches.append((key, grid, args))
    if handle is not None and not (_HOOKS[0].calls or _HOOKS[1].calls):
        run, function, metadata, constants, device = handle
        if torch._C._cuda_getDevice() == device:
            stream = torch._C._cuda_getCurrentRawStream(device)
            x, y, z = (*grid, 1, 1)[:3]
            run(x, y, z, stream, function, metadata, None, None, None, *args, *constants)
            return

    device = next(_tensor(arg).device for arg in args if _tensor(arg) is not None)
    if device.type == "meta":
        _compiled.append(kernel.warmup(*args, grid=grid, **meta))
        return
    with _current(device):
        if INTERPRET:
            _launch_interpreted(kernel, grid, args, meta)
            return
        compiled = kernel[grid](*args, **meta)
        if key is not None:
            parameters = list(kernel.signature.parameters.values())[len(args) :]
            constants = tuple(meta.get(parameter.name, parameter.default) for parameter in parameters)
            _handles[key] = (compiled.run, compiled.function, compiled.packed_metadata, constants, device.index)


def _fast_key(kernel, args: tuple, meta: dict) -> tuple | None:
    """All that decides which binary a launch on an NVIDIA GPU runs, or None where only Triton itself can tell."""
    first = args[0] if type(args[0]) in _TENSORS else getattr(args[0], "base", None)
    if INTERPRET or torch.version.hip is not None or first is None or not first.is_cuda:
        return None
    parts = [kernel.fn, first.get_device()]
    for arg in args:
        kind = type(arg)
        if kind in _TENSORS:
            parts.append(arg.dtype)
            parts.append(arg.data_ptr() & 15 == 0)
        elif kind is int:
            parts.append(_int_kind(arg))
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


# --- replays ----------------------------------------------------------------------------------------------------------

_MAX_REPLAYS = 4096
# For how many lists of addresses a replay keeps what it hands to the driver.
_MAX_PREPARED = 256
# torch.empty_strided for the current GPU, without the dispatcher; generated code of torch.compile uses it.
_empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class _Tape:
    def __init__(self):
        self.launches = []  # (key of the handle, grid, arguments)
        self.scratch = []
        self.tables = []


class _Recording(threading.local):
    tape: _Tape | None = None  # while a call is recorded


_recording = _Recording()


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty`` for what kernels write and the caller may not get to see."""
    x = torch.empty(shape, dtype=dtype, device=device)
    if (tape := _recording.tape) is not None:
        tape.scratch.append(x)
    return x


def table(x: torch.Tensor) -> torch.Tensor:
    """x, which kernels only read and which is the same for all arguments of the same kind."""
    if (tape := _recording.tape) is not None:
        tape.tables.append(x)
    return x


def replayed(function: Callable) -> Callable:
    """`function`, whose later calls with arguments of the same kind go to the kernels without the Python between.

    On a GPU most of what a small call costs is Python: checks, strides, block sizes. All of that follows from shapes,
    strides, dtypes and alignment of the tensors and from the values of the other arguments, so for each such list it
    runs once. What it launched is kept, and a call like it makes new outputs and launches the same on them.

    A call takes the usual way when it needs a gradient, is traced or under autocast, when a kernel met a tensor that is
    no argument, output, `scratch` or `table`, and when an output is no dense tensor of its own. `function` must depend
    on nothing but its arguments and the two global settings that `_kind` begins with.
    """
    replays = {}  # kind of the arguments -> a _Replay, or None where there can be none

    @functools.wraps(function)
    def call(*args, **kwargs):
        if INTERPRET or is_tracing() or _recording.tape is not None or torch.is_autocast_enabled():  # for CUDA
            return function(*args, **kwargs)
        addresses = []
        key = _kind((*args, *kwargs.values()) if kwargs else args, addresses)
        if key is None:
            return function(*args, **kwargs)
        if kwargs:
            key = (key, *kwargs)
        try:
            replay = replays[key]
        except KeyError:
            return _record(function, args, kwargs, replays, key)
        except TypeError:  # an argument that cannot be part of a key
            return function(*args, **kwargs)
        if replay is None or torch._C._cuda_getDevice() != replay.device or _HOOKS[0].calls or _HOOKS[1].calls:
            return function(*args, **kwargs)
        return replay(addresses)

    _replay_caches.append(replays)
    return call


def _kind(args: Iterable, addresses: list[int]) -> tuple | None:
    """What a replay depends on but for the tensors' addresses, which it adds to the list; None if there can be none."""
    if forward_ad._current_level >= 0:
        return None
    grad_enabled = torch.is_grad_enabled()
    key = [allows_tf32(), torch._C._get_deterministic_algorithms()]
    for arg in args:
        kind = type(arg)
        if kind in _TENSORS:
            if (grad_enabled and arg.requires_grad) or arg.is_neg():
                return None
            try:
                address = arg.data_ptr()
                key += arg.shape, arg.stride(), arg.dtype, arg.get_device(), address & 15
            except RuntimeError:  # sparse, nested, or a batch of gradients, which has no memory of its own
                return None
            if address == 0 and arg.numel() > 0:  # a tensor of zeros without memory
                return None
            addresses.append(address)
        elif isinstance(arg, torch.Tensor):
            return None
        else:
            key += kind, tuple(arg) if kind is list else arg
    # Tells x, x from x, y: whoever records sees no more than addresses.
    if len(set(addresses)) < len(addresses):
        key += map(addresses.index, addresses)
    return tuple(key)


_replay_caches: list[dict] = []


def forget_replays() -> None:
    """Make every `replayed` function run again; for tests that change what it depends on."""
    for replays in _replay_caches:
        replays.clear()


def _record(function: Callable, args: tuple, kwargs: dict, replays: dict, key: tuple):
    """What `function` returns, and a _Replay of it under `key`, or None where there can be none."""
    _recording.tape = tape = _Tape()
    try:
        result = function(*args, **kwargs)
    finally:
        _recording.tape = None
    if len(replays) >= _MAX_REPLAYS:
        replays.clear()
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    replays[key] = _Replay.of(tape, tensors, result)
    return result


class _Replay:
    """The allocations and launches of one call, with slots for its tensors."""

    @classmethod
    def of(cls, tape: _Tape, tensors: list[torch.Tensor], result: object) -> "_Replay | None":
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        addresses = {x.data_ptr() for x in outputs}
        new = outputs + [x for x in tape.scratch if x.data_ptr() not in addresses]
        pool = tensors + new + tape.tables
        # The tape keeps all that kernels met alive, so equal addresses mean the same memory. What is new must be new.
        places = {x.data_ptr(): i for i, x in enumerate(pool) if x.numel() > 0}
        given = {x.data_ptr() for x in tensors if x.numel() > 0}
        distinct = len(places) == len(given) + sum(x.numel() > 0 for x in pool[len(tensors) :])
        if not tape.launches or not distinct or not all(_is_dense(x) for x in outputs):
            return None
        self = cls()
        self.device = pool[0].get_device()
        self.kind, self.n_outputs = type(result), len(outputs)
        self.new = [_allocation(x) for x in new]
        self.tables = tape.tables
        self.launches = []
        for handle_key, grid, args in tape.launches:
            handle = _handles.get(handle_key)
            if handle is None or handle[-1] != self.device:
                return None
            run, function, metadata, constants, _ = handle
            template, slots = [*(*grid, 1, 1)[:3], None, function, metadata, None, None, None], []
            for arg in args:
                if (x := _tensor(arg)) is not None:
                    place = places.get(x.data_ptr())
                    if place is None:
                        return None
                    slots.append((len(template), place, None if x is arg else (type(arg), {**vars(arg), "base": None})))
                template.append(arg if x is None else None)
            self.launches.append((run, (*template, *constants), slots))
        self.prepared = {}
        return self

    def __call__(self, addresses: list[int]):
        new = [allocate() for allocate in self.new]
        key = (torch._C._cuda_getCurrentRawStream(self.device), *addresses, *[x.data_ptr() for x in new])
        for function, args in self.prepared.get(key) or self._prepare(*key):
            function(*args)
        return new[0] if self.kind is torch.Tensor else self.kind(new[: self.n_outputs])

    def _prepare(self, stream: int, *addresses: int) -> list[tuple[Callable, tuple]]:
        """The calls that launch the kernels on this stream and these addresses; shorter ones when both come back."""
        pool = *addresses, *(x.data_ptr() for x in self.tables)
        calls = []
        for run, template, slots in self.launches:
            args = list(template)
            args[3] = stream
            for i, place, described in slots:
                args[i] = pool[place]
                if described is not None:
                    kind, attributes = described
                    args[i] = made = object.__new__(kind)
                    vars(made).update(attributes, base=_Address(pool[place]))
            calls.append((run, args))
        key = stream, *addresses
        if key in self.prepared:
            self.prepared[key] = calls = [_innermost(run, args) for run, args in calls]
        else:
            if len(self.prepared) >= _MAX_PREPARED:
                self.prepared.clear()
            self.prepared[key] = None
        return calls


class _Address(int):
    """An address in place of a descriptor's tensor."""

    data_ptr = int.__int__


def _allocation(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes tensors like x."""
    layout = tuple(x.shape), x.stride()
    # In deterministic mode torch fills what it allocates, which the quicker function does not.
    if _empty_strided is None or torch.are_deterministic_algorithms_enabled():
        return functools.partial(torch.empty_strided, *layout, dtype=x.dtype, device=x.device)
    return functools.partial(_empty_strided, *layout, x.dtype)


def _innermost(run: Callable, args: list) -> tuple[Callable, tuple]:
    """The function in C that a call of Triton's launcher ends in, and the arguments that reach it.

    On the way there it encodes the tensor descriptors, which takes microseconds for each. Where it is not known to do
    the same at every call, the answer is the launcher itself.
    """
    caught = []

    def catch(*arguments):
        caught.append(arguments)

    try:
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
            return run, args
        innermost, launch = run.launch, catch
        if isinstance(innermost, FunctionType):
            # What encodes descriptors is a closure around the function in C: the same, around another one.
            wrapper = innermost
            cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
            innermost = cells["launcher"].cell_contents
            cells["launcher"] = CellType(catch)
            launch = FunctionType(wrapper.__code__, wrapper.__globals__, closure=tuple(cells.values()))
        if not isinstance(innermost, BuiltinFunctionType):
            return run, args
        launcher = object.__new__(type(run))
        vars(launcher).update(vars(run), launch=launch)
        launcher(*args)
        return innermost, caught[0]
    except (AttributeError, IndexError, KeyError, TypeError):
        return run, args


def _is_dense(x: torch.Tensor) -> bool:
    """Whether x's elements lie side by side, in any order."""
    steps = [(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    return x.numel() == 0 or (0 not in steps and 1 + sum(steps) == x.numel())


# --- descriptors ------------------------------------------------------------------------------------------------------


# Arguments of `descriptor` without the tensor -> the attributes of a descriptor made from them.
_descriptors: dict[tuple, dict] = {}
# What Triton specializes on in a descriptor -> a number for it.
_specializations: dict[tuple, int] = {}


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
        attributes["specialization"] = _specializations.setdefault(
            (kind, x.dtype, block_shape, *layout), len(_specializations)
        )
        _descriptors[key] = {**attributes, "base": None}
    made = object.__new__(kind)
    vars(made).update(attributes, base=x)
    return made


def _tensor(arg: object) -> torch.Tensor | None:
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


_interpreter = threading.Lock()  # it keeps the program that runs in a global variable


def _launch_interpreted(kernel, grid: tuple[int, ...], args: tuple, meta: dict) -> None:
    """The interpreter has wrong sums in bfloat16 and wrong float8 numbers: such tensors visit it as float32."""
    widened = {}  # data pointer and extent of such a tensor -> (its memory, a float32 copy of it)

    def widen(x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            return x
        steps = zip(x.shape, x.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps) if x.numel() else 0
        key = (x.data_ptr(), extent)
        if key not in widened:
            memory = x.detach().as_strided((extent,), (1,))
            widened[key] = (memory, memory.float())
        return widened[key][1].as_strided(x.shape, x.stride(), 0)

    def convert(arg):
        if isinstance(arg, TensorDescriptor):
            return TensorDescriptor(widen(arg.base), arg.shape, arg.strides, arg.block_shape, arg.padding)
        return widen(arg) if isinstance(arg, torch.Tensor) else arg

    # NumPy, which computes here, warns of inf - inf and the like; a GPU does not.
    with _interpreter, np.errstate(all="ignore"):
        kernel[grid](*map(convert, args), **meta)
    for memory, wide in widened.values():
        # Only what the kernel wrote goes back: writing an input, even with the same values, would trip autograd's
        # version check.
        if not torch.equal(wide.view(torch.int32), memory.float().view(torch.int32)):
            memory.copy_(wide)


@contextmanager
def compile_only() -> Iterator[list]:
    """Inside, calls on meta tensors compile their kernels for the active driver's target and add them to the list."""
    global _compiled
    _compiled = []
    try:
        yield _compiled
    finally:
        _compiled = None


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
    if device.type != "cuda" or torch.version.hip is not None:
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


def is_amd(device: torch.device) -> bool:
    """Whether kernels run on (or are compiled for) an AMD GPU."""
    if device.type == "meta":
        return triton.runtime.driver.active.get_current_target().backend == "hip"
    return device.type == "cuda" and torch.version.hip is not None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
