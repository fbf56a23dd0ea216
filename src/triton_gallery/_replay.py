"""Replays: a call like an earlier one makes new outputs and launches the same kernels, without the Python between."""

import functools
from collections.abc import Callable, Iterable
from operator import itemgetter
from types import BuiltinFunctionType, CellType, FunctionType

import torch
from torch.autograd import forward_ad

from ._arguments import allows_tf32, autocast_dtype, is_plain, is_tracing
from ._launch import HOOKS, INTERPRET, TENSORS, Tape, Varying, cdiv, handles, recording, tensor_of

_MAX_REPLAYS = 4096
# For how many lists of addresses a replay keeps what it hands to the driver.
_MAX_PREPARED = 256
# How many calls whose first tensors have the same shape are recognized without their kind.
_MAX_RECENT = 4
# torch.empty_strided for the current GPU, without the dispatcher; generated code of torch.compile uses it.
_empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
# What tells torch.compile that its inputs are like those it compiled for.
_TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def replayed(function: Callable, varying: int | None = None) -> Callable:
    """`function`, whose later calls with arguments of the same kind go to the kernels without the Python between.

    On a GPU most of what a small call costs is Python: checks, strides, block sizes. All of that follows from shapes,
    strides, dtypes and alignment of the tensors and from the values of the other arguments, so for each such list it
    runs once. What it launched is kept, and a call like it makes new outputs and launches the same on them. Where a
    gradient is needed, what is kept is the :class:`torch.autograd.Function` that was applied, and to which arguments.

    A call takes the usual way when it is traced, when a kernel met a tensor that is no argument, output, `scratch` or
    `table` (one that autocast made, say), and when an output is no dense tensor of its own. `function` must depend on
    nothing but its arguments and the global settings that `_kind` begins with.

    Args:
        function: what is called.
        varying: the position of an argument that may be an int of 64 bits, another one at each call. It must reach
            kernels unchanged, as an argument that they do not specialize on.
    """
    replays = {}  # kind of the arguments -> a _Replay, or None where there can be none
    recent = {}  # shape of the first argument -> a few calls with one, newest first

    @functools.wraps(function)
    def call(*args, **kwargs):
        if INTERPRET or torch.compiler.is_compiling() or recording.tape is not None:
            return function(*args, **kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        try:
            place = (values[0].shape, *kwargs) if kwargs else values[0].shape
            calls = recent.get(place, ())
        except (AttributeError, IndexError, RuntimeError, TypeError):  # no tensor, or none whose shape is known
            return function(*args, **kwargs)
        for recognize, again, device in calls:
            addresses = recognize(values)
            if addresses is not None:
                if device is None or _can_launch(device):
                    return again(values, addresses)
                return function(*args, **kwargs)
        if is_tracing():
            return function(*args, **kwargs)
        if not kwargs and varying in range(len(values)) and _is_int64(values[varying]):
            args = values = (*values[:varying], Varying(values[varying]), *values[varying + 1 :])
        addresses = []
        key = _kind(values, addresses)
        if key is None:
            result, again = _record_application(function, args, kwargs)
            _remember(recent, place, values, varying, again, None)
            return result
        if kwargs:
            key = (key, *kwargs)
        try:
            replay = replays[key]
        except KeyError:
            return _record(function, args, kwargs, replays, key)
        except TypeError:  # an argument that cannot be part of a key
            return function(*args, **kwargs)
        if replay is None or not _can_launch(replay.device):
            return function(*args, **kwargs)
        if replay.chances > 0:
            replay.chances -= 1
            _remember(recent, place, values, varying, replay.__call__, replay.device)
        return replay(values, addresses)

    _caches.append((replays, recent))
    return call


def _can_launch(device: int) -> bool:
    """Whether `device` is the current one and nobody wants to hear of launches."""
    return torch._C._cuda_getDevice() == device and not (HOOKS[0].calls or HOOKS[1].calls)


def _is_int64(value: object) -> bool:
    return type(value) in (int, Varying) and -(2**63) <= value < 2**63


def _kind(args: Iterable, addresses: list[int]) -> tuple | None:
    """What a replay depends on but for the tensors' addresses, which it adds to the list; None if there can be none."""
    if forward_ad._current_level >= 0:
        return None
    grad_enabled = torch.is_grad_enabled()
    key = [allows_tf32(), torch._C._get_deterministic_algorithms(), autocast_dtype()]
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
        elif kind is Varying:
            key.append(kind)
        else:
            key += kind, tuple(arg) if kind is list else arg
    # Tells x, x from x, y: whoever records sees no more than addresses.
    if len(set(addresses)) < len(addresses):
        key += map(addresses.index, addresses)
    return tuple(key)


_caches: list[tuple[dict, dict]] = []


def forget_replays() -> None:
    """Make every `replayed` function run again; for tests that change what it depends on."""
    for replays, recent in _caches:
        replays.clear()
        recent.clear()


def _record(function: Callable, args: tuple, kwargs: dict, replays: dict, key: tuple):
    """What `function` returns, and a _Replay of it under `key`, or None where there can be none."""
    recording.tape = tape = Tape()
    try:
        result = function(*args, **kwargs)
    finally:
        recording.tape = None
    if len(replays) >= _MAX_REPLAYS:
        replays.clear()
    replays[key] = _Replay.of(tape, (*args, *kwargs.values()), result)
    return result


def _record_application(function: Callable, args: tuple, kwargs: dict) -> tuple[object, Callable | None]:
    """What `function` returns, and what does the same again, if all it did is to apply a torch.autograd.Function."""
    outer, recording.applications = recording.applications, []
    try:
        result = function(*args, **kwargs)
        applications = recording.applications
    finally:
        recording.applications = outer
    if len(applications) != 1:
        return result, None
    ((applied, arguments, output),) = applications
    # The result is the output, or one of them.
    outputs = (output,) if isinstance(output, torch.Tensor) else output
    n = next((n for n, x in enumerate(outputs) if x is result), None)
    values = (*args, *kwargs.values())
    slots = []
    for i, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor | Varying):
            slots.append((i, next((j for j, value in enumerate(values) if value is argument), None)))
    if n is None or any(j is None for _, j in slots):
        return result, None
    # Without what torch puts around it for transforms and default arguments.
    apply = getattr(super(torch.autograd.Function, applied), "apply", applied.apply)
    template = [None if i in dict(slots) else argument for i, argument in enumerate(arguments)]
    is_tensor = isinstance(output, torch.Tensor)

    def again(values, addresses):
        arguments = template.copy()
        for i, j in slots:
            arguments[i] = values[j]
        output = apply(*arguments)
        return output if is_tensor else output[n]

    return result, again


# --- calls that are recognized ----------------------------------------------------------------------------------------


def _remember(
    recent: dict, place: tuple, values: tuple, varying: int | None, again: Callable | None, device: int | None
) -> None:
    """Add a call to those that are recognized; where there are too many, the oldest goes."""
    recognize = None if again is None else _recognizer(values, varying)
    if recognize is not None:
        if len(recent) >= _MAX_REPLAYS:
            recent.clear()
        # A new tuple, because another thread may be looking at the old one.
        recent[place] = ((recognize, again, device), *recent.get(place, ()))[:_MAX_RECENT]


# Bound here, because a name with dots takes half as long again as what it calls.
_is_grad_enabled = torch.is_grad_enabled
_is_deterministic = torch._C._get_deterministic_algorithms
_n_dispatch_modes = torch._C._len_torch_dispatch_stack


def _recognizer(values: tuple, varying: int | None) -> Callable[[tuple], list[int] | None] | None:
    """A function that gives the addresses of the tensors in a call like this one, and None for every other.

    It takes a fraction of the time of `_kind` and tells apart all that `_kind` does. What torch.compile guards its
    inputs by compares types, dtypes, devices, sizes, strides, gradients and dispatch keys: those of the tensor (a
    pending sign, no memory) as well as those that are set for all (by autocast, a transform or a tracer). Where that
    is not to be had, and for tensors that are not aligned or share their memory, there is no such function.
    """
    places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    tensors = [values[i] for i in places]
    # A tensor that stands twice among the arguments is guarded once.
    once = [i for i in places if not any(values[i] is values[j] for j in places if j < i)]
    twice = [(i, j) for i in places if i not in once for j in once if values[i] is values[j]]
    varies = varying in range(len(values)) and type(values[varying]) is Varying
    others = [(i, v) for i, v in enumerate(values) if i not in places and not (varies and i == varying)]
    grad_enabled = torch.is_grad_enabled() if any(x.requires_grad for x in tensors) else None
    deterministic = torch._C._get_deterministic_algorithms()
    tf32 = allows_tf32() if any(x.dtype == torch.float32 for x in tensors) else None
    autocasts_to = autocast_dtype()  # whether it does at all the guards see
    try:
        hash(tuple(others))  # what has none may change
        addresses = [x.data_ptr() for x in tensors]
        guarded = [values[i] for i in once]
        if forward_ad._current_level >= 0 or any(x.is_nested or not is_plain(x) for x in guarded):
            return None
        if any(address == 0 and x.numel() > 0 for x, address in zip(tensors, addresses, strict=True)):
            return None
        check = _TensorGuards(*guarded, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if check(*guarded) is not True:
            return None
    except (AttributeError, RuntimeError, TypeError):
        return None
    if any(address & 15 for address in addresses) or len(set(addresses)) < len(once):
        return None
    n_values, n_once = len(values), len(once)
    pick, pick_once = (itemgetter(*p) if len(p) > 1 else itemgetter(slice(p[0], p[0] + 1)) for p in (places, once))

    def recognize(values: tuple) -> list[int] | None:
        if len(values) != n_values or forward_ad._current_level >= 0 or _n_dispatch_modes() > 0:
            return None
        for i, other in others:
            value = values[i]
            if value is not other and (type(value) is not type(other) or value != other):
                return None
        for i, j in twice:
            if values[i] is not values[j]:
                return None
        addresses = []
        try:
            for x in pick(values):
                address = x.data_ptr()
                # The guards end the process where a tensor has no sizes or strides: without storage, and nested.
                if address & 15 or x.is_nested:
                    return None
                addresses.append(address)
        except (AttributeError, RuntimeError):
            return None
        is_same = (
            check(*pick_once(values))
            and (grad_enabled is None or _is_grad_enabled() is grad_enabled)
            and _is_deterministic() is deterministic
            and (tf32 is None or allows_tf32() is tf32)
            and (autocasts_to is None or autocast_dtype() is autocasts_to)
            and (not varies or _is_int64(values[varying]))
            and (n_once == 1 or len(set(addresses)) == n_once)
        )
        return addresses if is_same else None

    return recognize


# --- one replay -------------------------------------------------------------------------------------------------------


class _Replay:
    """The allocations and launches of one call, with slots for its tensors."""

    @classmethod
    def of(cls, tape: Tape, values: tuple, result: object) -> "_Replay | None":
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        addresses = {x.data_ptr() for x in outputs}
        scratch = [x for x in tape.scratch if x.data_ptr() not in addresses]
        pool = tensors + outputs + scratch + tape.tables
        # The tape keeps all that kernels met alive, so equal addresses mean the same memory. What is new must be new.
        places = {x.data_ptr(): i for i, x in enumerate(pool) if x.numel() > 0}
        given = {x.data_ptr() for x in tensors if x.numel() > 0}
        distinct = len(places) == len(given) + sum(x.numel() > 0 for x in pool[len(tensors) :])
        if not tape.launches or not distinct or not all(_is_dense(x) for x in outputs):
            return None
        self = cls()
        self.device = pool[0].get_device()
        self.kind, self.n_outputs = type(result), len(outputs)
        self.new = [_allocation(x) for x in outputs]
        # What nobody gets to see is one allocation; CUDA's own begin at multiples of 256 bytes, too.
        sizes = [cdiv(x.numel() * x.element_size(), 256) * 256 for x in scratch]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        if scratch:
            self.new.append(_allocation(torch.empty(sum(sizes), dtype=torch.uint8, device=pool[0].device)))
        self.kept = tape.tables
        self.tables = [x.data_ptr() for x in tape.tables]
        self.varying = next((i for i, value in enumerate(values) if type(value) is Varying), None)
        self.launches, self.prepared, self.has_descriptors = [], {}, False
        # How often a call that was not recognized is remembered anew: it may be one that never will be.
        self.chances = 8
        for handle_key, grid, args in tape.launches:
            handle = handles.get(handle_key)
            if handle is None or handle[-1] != self.device:
                return None
            run, function, metadata, constants, _ = handle
            # Behind the addresses of the pool come the stream and the argument that varies.
            template = [*(*grid, 1, 1)[:3], _Slot(len(pool)), function, metadata, None, None, None]
            for arg in args:
                x = tensor_of(arg)
                if x is not None and x.data_ptr() not in places:
                    return None
                if type(arg) is Varying:
                    template.append(_Slot(len(pool) + 1))
                elif x is None:
                    template.append(arg)
                else:
                    slot = _Slot(places[x.data_ptr()])
                    if x is not arg:
                        slot.described = type(arg), {**vars(arg), "base": None}
                        self.has_descriptors = True
                    template.append(slot)
            self.launches.append((run, [*template, *constants]))
        if self.has_descriptors:
            self.launches = [(run, template, _slots(template), None) for run, template in self.launches]
        else:
            self.launches = [_with_slots(run, template) for run, template in self.launches]
        return self

    def __call__(self, values: tuple, addresses: list[int]):
        new = [allocate() for allocate in self.new]
        made = [x.data_ptr() for x in new]
        if self.offsets:
            scratch = made.pop()
            made += [scratch + offset for offset in self.offsets]
        pool = [*addresses, *made, *self.tables, torch._C._cuda_getCurrentRawStream(self.device)]
        if self.varying is not None:
            pool.append(values[self.varying])
        for function, template, slots, packed in self._prepared(pool) if self.has_descriptors else self.launches:
            args = template
            if slots:
                args = template.copy()
                for i, place in slots:
                    args[i] = pool[place]
            if packed is not None:
                args[packed:] = (tuple(args[packed:]),)
            function(*args)
        return new[0] if self.kind is torch.Tensor else self.kind(new[: self.n_outputs])

    def _prepared(self, pool: list[int]) -> list[tuple]:
        """The launches on these addresses, shorter ones when they come back: descriptors of them are encoded once."""
        key = tuple(pool)
        calls = self.prepared.get(key)
        if calls:
            return calls
        calls = []
        for run, template, slots, _ in self.launches:
            args = template.copy()
            for i, slot in slots:
                args[i] = pool[slot]
                if slot.described is not None:
                    kind, attributes = slot.described
                    args[i] = made = object.__new__(kind)
                    vars(made).update(attributes, base=_Address(pool[slot]))
            calls.append((run, args, (), None))
        if key in self.prepared:
            self.prepared[key] = calls = [(*_innermost(run, args), (), None) for run, args, _, _ in calls]
        else:
            if len(self.prepared) >= _MAX_PREPARED:
                self.prepared.clear()
            self.prepared[key] = None
        return calls


class _Slot(int):
    """The place in a replay's pool from which an argument comes."""

    described: tuple[type, dict] | None = None  # the descriptor that the argument is, but for the address


def _with_slots(run: Callable, template: list) -> tuple[Callable, list, list[tuple[int, _Slot]], int | None]:
    """A launch without descriptors: the innermost function, its arguments, which of them to fill in, and from where on
    they are one tuple, as Triton 3.7 and later want the kernel's."""
    function, args = _innermost(run, template)
    packed = None
    if type(args[-1]) is tuple and any(type(arg) is _Slot for arg in args[-1]):
        packed = len(args) - 1
        args = (*args[:packed], *args[packed])
    if _slots(args) and sorted(slot for _, slot in _slots(args)) == sorted(slot for _, slot in _slots(template)):
        return function, list(args), _slots(args), packed
    return run, template, _slots(template), None


def _slots(args: Iterable) -> list[tuple[int, _Slot]]:
    return [(i, arg) for i, arg in enumerate(args) if type(arg) is _Slot]


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
