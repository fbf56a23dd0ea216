"""Replays: a call like an earlier one makes new outputs and launches the same kernels, without the Python between."""

import functools
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CellType, FunctionType

import torch
from torch.autograd import forward_ad

from ._arguments import allows_tf32, is_tracing
from ._launch import HOOKS, INTERPRET, TENSORS, Tape, handles, recording, tensor_of

_MAX_REPLAYS = 4096
# For how many lists of addresses a replay keeps what it hands to the driver.
_MAX_PREPARED = 256
# torch.empty_strided for the current GPU, without the dispatcher; generated code of torch.compile uses it.
_empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


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
        if INTERPRET or is_tracing() or recording.tape is not None or torch.is_autocast_enabled():  # for CUDA
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
        if replay is None or torch._C._cuda_getDevice() != replay.device or HOOKS[0].calls or HOOKS[1].calls:
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
        if kind in TENSORS:
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
    recording.tape = tape = Tape()
    try:
        result = function(*args, **kwargs)
    finally:
        recording.tape = None
    if len(replays) >= _MAX_REPLAYS:
        replays.clear()
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    replays[key] = _Replay.of(tape, tensors, result)
    return result


class _Replay:
    """The allocations and launches of one call, with slots for its tensors."""

    @classmethod
    def of(cls, tape: Tape, tensors: list[torch.Tensor], result: object) -> "_Replay | None":
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
            handle = handles.get(handle_key)
            if handle is None or handle[-1] != self.device:
                return None
            run, function, metadata, constants, _ = handle
            template, slots = [*(*grid, 1, 1)[:3], None, function, metadata, None, None, None], []
            for arg in args:
                if (x := tensor_of(arg)) is not None:
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
