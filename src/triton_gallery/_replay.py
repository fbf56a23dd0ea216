"""Replays: a call like an earlier one makes new outputs and launches the same kernels, without the Python between."""

import functools
import threading
from collections.abc import Callable, Iterable
from itertools import combinations
from math import copysign
from types import BuiltinFunctionType, CellType, CodeType, FunctionType
from typing import TypeVar

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

_Function = TypeVar("_Function", bound=Callable)


def replayed(function: _Function, varying: int | None = None, tf32: bool = False) -> _Function:
    """`function`, whose later calls with arguments of the same kind go to the kernels without the Python between.

    On a GPU most of what a small call costs is Python: checks, strides, block sizes. All of that follows from shapes,
    strides, dtypes and alignment of the tensors and from the values of the other arguments, so for each such list it
    runs once. What it launched is kept, and a call like it makes new outputs and launches the same on them. Where a
    gradient is needed, what is kept is the :class:`torch.autograd.Function` that was applied, to which arguments, and
    what its operator launched.

    A call takes the usual way when it is traced, when a kernel met a tensor that is no argument, output, `scratch` or
    `table` (one that autocast made, say), and when an output is no dense tensor of its own. `function` must depend on
    nothing but its arguments and the global settings that `_kind` begins with; who changes anything else calls
    `forget_replays`.

    Args:
        function: what is called.
        varying: the position of an argument that may be an int of 64 bits, another one at each call. It must reach
            kernels unchanged, as an argument that they do not specialize on.
        tf32: whether torch's precision of float32 products makes a difference; to ask for it takes a while.
    """
    replays = {}  # kind of the arguments -> a _Replay, or None where there can be none
    recent = {}  # shape of the first argument -> a few calls with one, newest first

    @functools.wraps(function)
    def call(*args, **kwargs):
        if INTERPRET or _is_dynamo_compiling() or recording.tape is not None:
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
        generation = _generation
        if not kwargs and varying in range(len(values)) and _is_int64(values[varying]):
            args = values = (*values[:varying], Varying(values[varying]), *values[varying + 1 :])
        addresses = []
        key = _kind(values, addresses, tf32)
        if key is None:
            result, *how = _record_application(function, args, kwargs)
            remember(generation, place, values, *how)
            return result
        if kwargs:
            key = (key, *kwargs)
        try:
            replay = replays[key]
        except KeyError:
            return record(args, kwargs, key, generation)
        except TypeError:  # an argument that cannot be part of a key
            return function(*args, **kwargs)
        if replay is None or not _can_launch(replay.device):
            return function(*args, **kwargs)
        if replay.chances > 0:
            replay.chances -= 1
            remember(generation, place, values, replay.run, replay.device)
        return replay.run(values, addresses)

    def record(args: tuple, kwargs: dict, key: tuple, generation: int) -> object:
        """What `function` returns, and a _Replay of it under `key`, or None where there can be none."""
        recording.tape = tape = Tape()
        try:
            result = function(*args, **kwargs)
        finally:
            recording.tape = None
        if tape.keep:
            replay = _Replay.of(tape, (*args, *kwargs.values()), result)
            with _caches_lock:
                if generation == _generation:
                    if len(replays) >= _MAX_REPLAYS:
                        replays.clear()
                        recent.clear()
                    # Where two threads record the same, the first one's stays: it may be the one that is remembered
                    # already.
                    replays.setdefault(key, replay)
        return result

    def remember(generation: int, place: tuple, values: tuple, again: Callable | None, device: int | None) -> None:
        """Add a call to those that are recognized; where there are too many, the oldest goes."""
        recognize = None if again is None else _recognizer(values, varying, tf32)
        if recognize is None:
            return
        with _caches_lock:
            if generation != _generation:
                return
            if len(recent) >= _MAX_REPLAYS:
                recent.clear()
            # A new tuple, because another thread may be looking at the old one.
            recent[place] = ((recognize, again, device), *recent.get(place, ()))[:_MAX_RECENT]

    def replay_of(args: tuple) -> _Replay | None:
        """What a call with these arguments and without a gradient replays."""
        with torch.no_grad():
            return replays.get(_kind(args, [], tf32))

    call.replay_of = replay_of
    _caches.append((replays, recent))
    return call


# Bound here, because a name with dots takes half as long again as what it calls.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def _can_launch(device: int) -> bool:
    """Whether `device` is the current one and nobody wants to hear of launches."""
    return torch._C._cuda_getDevice() == device and not (HOOKS[0].calls or HOOKS[1].calls)


def _is_int64(value: object) -> bool:
    return type(value) in (int, Varying) and -(2**63) <= value < 2**63


def _kind(args: Iterable, addresses: list[int], tf32: bool = False) -> tuple | None:
    """What a replay depends on but for the tensors' addresses, which it adds to the list; None if there can be none."""
    if forward_ad._current_level >= 0:
        return None
    grad_enabled = torch.is_grad_enabled()
    key = [tf32 and allows_tf32(), torch._C._get_deterministic_algorithms(), autocast_dtype()]
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
            key += _identity(arg), tuple(arg) if kind is list else arg
    # Tells x, x from x, y: whoever records sees no more than addresses.
    if len(set(addresses)) < len(addresses):
        key += map(addresses.index, addresses)
    return tuple(key)


def _identity(value: object) -> object:
    """What tells values apart that are equal: -0.0 and 0.0, True and 1, also in a tuple or a list."""
    kind = type(value)
    if isinstance(value, float):
        return kind, copysign(1, value)
    return (kind, *map(_identity, value)) if isinstance(value, tuple | list) else kind


_caches: list[tuple[dict, dict]] = []
_caches_lock = threading.Lock()  # for what adds to them
_generation = 0  # how often all was forgotten: what has begun before then is not kept


def forget_replays() -> None:
    """Make every `replayed` function run again, because something else changed that it depends on."""
    global _generation
    with _caches_lock:
        _generation += 1
        for replays, recent in _caches:
            replays.clear()
            recent.clear()


def _record_application(function: Callable, args: tuple, kwargs: dict) -> tuple[object, Callable | None, int | None]:
    """What `function` returns, what does the same again, if all it did is to apply a torch.autograd.Function, and the
    device that must be the current one for that, if there is such a device."""
    outer, recording.applications = recording.applications, []
    try:
        result = function(*args, **kwargs)
        applications = recording.applications
    finally:
        recording.applications = outer
    if len(applications) != 1:
        return result, None, None
    ((applied, arguments, output),) = applications
    # The result is the output, or one of them.
    outputs = (output,) if isinstance(output, torch.Tensor) else output
    n = next((n for n, x in enumerate(outputs) if x is result), None)
    values = (*args, *kwargs.values())
    found = {}
    for i, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor | Varying):
            found[i] = next((j for j, value in enumerate(values) if value is argument), None)
    if n is None or None in found.values():
        return result, None, None
    replay = applied.op.replay_of(arguments) if hasattr(applied, "op") else None
    if replay is not None:
        if replay.chances == _Replay.chances:  # the first call of its kind, which may stay the only one
            return result, None, None
        applied = replay.within(applied, arguments)
        # Each costs a tenth of a microsecond, and autograd does not mind a None too much among the gradients.
        arguments = arguments[: applied.n_inputs]
    # Without what torch puts around it for transforms and default arguments.
    text = _Text(apply=getattr(super(torch.autograd.Function, applied), "apply", applied.apply))
    words = [f"values[{found[i]}]" if i in found else text.name(argument) for i, argument in enumerate(arguments)]
    text.add(f"return apply({', '.join(words)})" + ("" if output is result else f"[{n}]"))
    return result, text.function(), replay and replay.device


def forward_by(run: Callable[[tuple], object], setup: Callable, first_only: bool) -> staticmethod:
    """The method `forward` that gets its outputs from `run`, as `differentiable` wants it."""

    @staticmethod
    def forward(ctx, *inputs):
        outputs = run(inputs)
        setup(ctx, inputs, outputs)
        return outputs[0] if first_only else outputs

    return forward


# --- functions that are written ---------------------------------------------------------------------------------------


class _Text:
    """A function of a call's values, written line by line, because each loop would cost a small call its share.

    What is another object in the next such function has a name, so that few texts are compiled.
    """

    def __init__(self, **names):
        self.lines, self.names = ["def written(values, addresses=None):"], names

    def add(self, *lines: str) -> None:
        self.lines += lines

    def name(self, value: object) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def function(self) -> Callable:
        exec(_compiled("\n    ".join(self.lines)), self.names)
        # Out of its own globals, so that it goes with its last user.
        return self.names.pop("written")


@functools.cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<replay>", "exec")


# --- calls that are recognized ----------------------------------------------------------------------------------------


def _recognizer(values: tuple, varying: int | None, tf32: bool = False) -> Callable[[tuple], list[int] | None] | None:
    """A function that gives the addresses of the tensors in a call like this one, and None for every other.

    It takes a fraction of the time of `_kind` and tells apart all that `_kind` does. What torch.compile guards its
    inputs by compares types, dtypes, devices, sizes, strides, gradients and dispatch keys: those of the tensor (a
    pending sign, no memory) as well as those that are set for all (by autocast, a transform or a tracer). Where that
    is not to be had, and for tensors that are not aligned or share their memory, there is no such function. That of
    ``softmax(x)`` reads, but for names::

        if len(values) != 1 or forward_ad._current_level >= 0 or n_dispatch_modes() > 0: return None
        v0, = values
        try:
            a0 = v0.data_ptr()
            if a0 & 15 or v0.is_nested: return None
        except (AttributeError, RuntimeError): return None
        if check(v0) and is_deterministic() is False: return [a0]
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
    allowed = allows_tf32() if tf32 and any(x.dtype == torch.float32 for x in tensors) else None
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
    text = _Text(
        check=check, forward_ad=forward_ad, n_dispatch_modes=torch._C._len_torch_dispatch_stack, is_int64=_is_int64,
        identity=_identity, is_grad_enabled=torch.is_grad_enabled, allows_tf32=allows_tf32,
        is_deterministic=torch._C._get_deterministic_algorithms, autocast_dtype=autocast_dtype,
    )  # fmt: skip
    text.add(
        f"if len(values) != {len(values)} or forward_ad._current_level >= 0 or n_dispatch_modes() > 0: return None",
        f"{', '.join(f'v{i}' for i in range(len(values)))}, = values",
    )
    for i, other in others:
        c = text.name(other)
        # Only a tuple and a zero have an equal of their type that is another value.
        twofold = isinstance(other, tuple) or (isinstance(other, float) and other == 0)
        differs = f"identity(v{i}) != {text.name(_identity(other))}" if twofold else f"type(v{i}) is not type({c})"
        text.add(f"if v{i} is not {c} and ({differs} or v{i} != {c}): return None")
    text.add(*(f"if v{i} is not v{j}: return None" for i, j in twice))
    text.add("try:")
    for i in once:
        # The guards end the process where a tensor has no sizes or strides: without storage, and nested.
        text.add(f"    a{i} = v{i}.data_ptr()", f"    if a{i} & 15 or v{i}.is_nested: return None")
    text.add("except (AttributeError, RuntimeError): return None")
    same = [f"check({', '.join(f'v{i}' for i in once)})", f"is_deterministic() is {deterministic}"]
    same += [f"is_grad_enabled() is {grad_enabled}"] if grad_enabled is not None else []
    same += [f"allows_tf32() is {allowed}"] if allowed is not None else []
    same += [f"autocast_dtype() is {text.name(autocasts_to)}"] if autocasts_to is not None else []
    same += [f"is_int64(v{varying})"] if varies else []
    same += [f"a{i} != a{j}" for i, j in combinations(once, 2)]
    text.add(f"if {' and '.join(same)}: return [{', '.join(f'a{dict(twice).get(i, i)}' for i in places)}]")
    return text.function()


# --- one replay -------------------------------------------------------------------------------------------------------


class _Replay:
    """The allocations and launches of one call, with slots for its tensors; `run` does them again."""

    # How often a call that was not recognized is remembered anew: it may be one that never will be.
    chances = 8
    function: type[torch.autograd.Function] | None = None  # what `within` made

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
        self.launches, self.prepared, self.has_descriptors = [], {}, False
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
        self.run = self._written(values, result, outputs, scratch, tape.tables)
        return self

    def _written(self, values: tuple, result: object, outputs: list, scratch: list, tables: list) -> Callable:
        """The function that does it all again.

        That of ``add(x, y)`` reads, but for names::

            a0, a1, = addresses or (values[0].data_ptr(), values[1].data_ptr(), )
            x0 = empty()
            p0 = x0.data_ptr()
            stream = current_stream(device)
            launch(8, 1, 1, stream, function, metadata, None, None, None, a0, a1, p0, 8192, 1024, )
            return x0
        """
        # The tables live as long as the function that knows their addresses.
        text = _Text(device=self.device, current_stream=torch._C._cuda_getCurrentRawStream, tables=tables)
        given = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        pointers = _joined(f"values[{i}].data_ptr()" for i in given)
        text.add(f"{_joined(f'a{i}' for i in given)} = addresses or ({pointers})")
        # What nobody gets to see is one allocation; CUDA's own begin at multiples of 256 bytes, too.
        sizes = [cdiv(x.numel() * x.element_size(), 256) * 256 for x in scratch]
        block = [torch.empty(sum(sizes), dtype=torch.uint8, device=x.device) for x in scratch[:1]]
        for i, x in enumerate(outputs + block):
            text.add(f"x{i} = {text.name(_allocation(x))}()", f"p{i} = x{i}.data_ptr()")
        text.add("stream = current_stream(device)")
        # What each slot reads.
        words = [f"a{i}" for i in given] + [f"p{i}" for i in range(len(outputs))]
        words += [f"p{len(outputs)} + {text.name(sum(sizes[:i]))}" for i in range(len(sizes))]
        words += [*(text.name(x.data_ptr()) for x in tables), "stream"]
        words += [f"values[{i}]" for i, value in enumerate(values) if type(value) is Varying]
        if self.has_descriptors:
            # Not a method, which would keep its replay alive, and the replay its text.
            prepared = functools.partial(_prepared, self.launches, self.prepared)
            text.add(f"for launch, args in {text.name(prepared)}(({_joined(words)})): launch(*args)")
        else:
            self.launches = [_straight(run, template) for run, template in self.launches]
            text.add(*(f"{text.name(function)}({_spelled(args, words, text)})" for function, args in self.launches))
        made = _joined(f"x{i}" for i in range(len(outputs)))
        text.add("return x0" if isinstance(result, torch.Tensor) else f"return {text.name(type(result))}(({made}))")
        return text.function()

    def within(self, function: type[torch.autograd.Function], inputs: tuple) -> type[torch.autograd.Function]:
        """`function`, with this replay in place of its operator, and what is the same at each call in its class."""
        if self.function is None:
            # What autograd makes for a call, `ctx`, is an object of this class.
            backward_class = function._backward_cls
            backward_class = type(backward_class.__name__, (backward_class,), function.constants(*inputs))
            forward = forward_by(self.run, function.setup, function.first_only)
            # Without the metaclass's __init__, which would make that class itself.
            namespace = {"forward": forward, "_backward_cls": backward_class}
            self.function = type.__new__(type(function), function.__name__, (function,), namespace)
        return self.function


def _prepared(launches: list, prepared: dict, pool: tuple) -> list[tuple[Callable, list]]:
    """The launches on these addresses, shorter ones when they come back: descriptors of them are encoded once."""
    calls = prepared.get(pool)
    if calls:
        return calls
    calls = []
    for run, template in launches:
        args = template.copy()
        for i, slot in enumerate(template):
            if type(slot) is not _Slot:
                continue
            args[i] = pool[slot]
            if slot.described is not None:
                kind, attributes = slot.described
                args[i] = made = object.__new__(kind)
                vars(made).update(attributes, base=_Address(pool[slot]))
        calls.append((run, args))
    if pool in prepared:
        prepared[pool] = calls = [_innermost(run, args) for run, args in calls]
    else:
        if len(prepared) >= _MAX_PREPARED:
            prepared.clear()
        prepared[pool] = None
    return calls


class _Slot(int):
    """The place in a replay's pool from which an argument comes."""

    described: tuple[type, dict] | None = None  # the descriptor that the argument is, but for the address


def _straight(run: Callable, template: list) -> tuple[Callable, Iterable]:
    """`_innermost` of a launch without descriptors, unless a slot gets lost on the way."""
    function, args = _innermost(run, template)
    return (function, args) if _slots(args) == _slots(template) else (run, template)


def _slots(args: Iterable) -> list[_Slot]:
    """The slots among the arguments, those of the kernel in a tuple of their own, as Triton 3.7 and later want them."""
    flat = [part for arg in args for part in (arg if type(arg) is tuple else (arg,))]
    return sorted(arg for arg in flat if type(arg) is _Slot)


def _spelled(args: Iterable, words: list[str], text: _Text) -> str:
    """The arguments of a launch in a text."""
    spelled = []
    for arg in args:
        if type(arg) is tuple and _slots(arg):
            spelled.append(f"({_spelled(arg, words, text)})")
        else:
            spelled.append(words[arg] if type(arg) is _Slot else text.name(arg))
    return _joined(spelled)


def _joined(words: Iterable[str]) -> str:
    """The words between commas, with one at the end, which makes a tuple of a single word, too."""
    return "".join(f"{word}, " for word in words)


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
