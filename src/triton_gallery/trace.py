"""Which program of a launch loads and stores which elements.

`trace` runs one launch of a kernel in Triton's interpreter and writes down every access to memory. It works on tensors
of any device, in a process that compiles its kernels as in one that interprets them.

A pointer takes the number of its argument along, in the bits above an address. So an access belongs to one argument
beyond doubt, even if it misses the tensor, or if two arguments share their memory.
"""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends import backends
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton.runtime.jit import JITFunction, KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

from ._arguments import FLOATS, number
from ._launch import interpreter_lock, launch_interpreted
from .codegen import _names

_ADDRESS_BITS = 48  # what a process can address; the bits above are free
_ADDRESS = np.uint64(2**_ADDRESS_BITS - 1)
_DTYPES = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, *FLOATS),
)
_LOADS, _STORES = ("load", "atomic"), ("store", "atomic")
# What a launch may say to the compiler beside the kernel's own arguments, such as num_warps.
_OPTIONS = {
    option.name
    for backend in backends.values()
    for kind in vars(sys.modules[backend.compiler.__module__]).values()
    if is_dataclass(kind)
    for option in fields(kind)
}

# Whether Triton's interpreter fails where a kernel's argument is a bool.
_NO_BOOLS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


# --- what a reader gets -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, eq=False)
class Access:
    """One load, store or atomic operation of one program.

    Attributes:
        kind: "load", "store" or "atomic".
        argument: the name of the kernel's argument that the pointer came from.
        program: the program's ids along the three axes of the grid.
        offsets: for each lane, how many elements behind the argument's first one it points; shaped as the block.
        mask: which lanes are switched on.
        outside: which of those miss every element of the argument. They are not carried out.
    """

    kind: str
    argument: str
    program: tuple[int, int, int]
    offsets: np.ndarray
    mask: np.ndarray
    outside: np.ndarray

    @property
    def hits(self) -> np.ndarray:
        """The offsets that were really touched, as a flat array."""
        return self.offsets[self.mask & ~self.outside]

    def __repr__(self) -> str:
        lanes = f"{self.mask.sum()} of {self.mask.size} lanes on"
        outside = f", {self.outside.sum()} outside" if self.outside.any() else ""
        return f"{self.kind} {self.argument} by program {self.program}: {lanes}{outside}"


@dataclass(frozen=True, repr=False, eq=False)
class Trace:
    """What the programs of one launch did; prints as a table with a line for each argument that was touched.

    Where a method takes a program, that is its ids along the axes of the grid, or its number: axis 0 counts fastest.
    Where it gives an array for an argument, the array has the argument's shape.

    To name the class: ``from triton_gallery.trace import Trace``.

    Attributes:
        kernel: the kernel's name.
        grid: programs along each of the three axes.
        arguments: the tensors by the names of the kernel's arguments; `x[0]` for a part of a tuple.
        accesses: all loads, stores and atomic operations, in the order in which the interpreter ran them.
        watched: for each name in `watch`, the pairs (program, value) whenever the variable changed.
    """

    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, torch.Tensor]
    accesses: list[Access]
    watched: dict[str, list[tuple[tuple[int, int, int], np.ndarray]]]

    @property
    def n_programs(self) -> int:
        """How many programs the launch had."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def number(self, program: int | tuple) -> int:
        """A program's ids as one number from 0 to `n_programs` - 1."""
        is_tuple = isinstance(program, tuple)
        try:
            ids = tuple(map(operator.index, program if is_tuple else (program,)))
        except TypeError:
            raise TypeError(f"trace: program must be an int or a tuple of ints, got {program!r}") from None
        grid = self.grid if is_tuple else (self.n_programs,)
        if not 1 <= len(ids) <= 3 or not all(0 <= i < n for i, n in zip(ids, grid, strict=False)):
            raise ValueError(f"trace: program must lie in the grid of {self.grid} programs, got {program!r}")
        x, y, z = (*ids, 0, 0)[:3]
        return x + self.grid[0] * (y + self.grid[1] * z)

    def loads(self, argument: str, program: int | tuple | None = None) -> list[Access]:
        """The loads from an argument, atomic operations included; of one program, or of all."""
        return self._select(_LOADS, argument, program)

    def stores(self, argument: str, program: int | tuple | None = None) -> list[Access]:
        """The stores to an argument, atomic operations included; of one program, or of all."""
        return self._select(_STORES, argument, program)

    def load_counts(self, argument: str, program: int | tuple | None = None) -> np.ndarray:
        """How often each element of an argument was loaded."""
        return self._counts(argument, self.loads(argument, program))

    def store_counts(self, argument: str, program: int | tuple | None = None) -> np.ndarray:
        """How often each element of an argument was stored; by several programs is a race, unless it is atomic."""
        return self._counts(argument, self.stores(argument, program))

    def owner(self, argument: str) -> np.ndarray:
        """The number of the program that stored each element of an argument; -1 where none did.

        Where several did it is the one that the interpreter ran last; `store_counts` tells where that was so.
        """
        stores = self.stores(argument)
        owners = np.full(_extent(self.arguments[argument]), -1)
        for access in stores:
            owners[access.hits] = self.number(access.program)
        return owners[_positions(self.arguments[argument])]

    @property
    def outside(self) -> list[Access]:
        """The accesses with lanes that were switched on and missed the tensor; a mask forgot them."""
        return [access for access in self.accesses if access.outside.any()]

    def bytes_loaded(self, argument: str | None = None) -> int:
        """Bytes that all loads asked for, from one argument or from all; a cache may have answered."""
        return self._bytes(_LOADS, argument)

    def bytes_stored(self, argument: str | None = None) -> int:
        """Bytes that all stores wrote, to one argument or to all."""
        return self._bytes(_STORES, argument)

    def _select(self, kinds: tuple[str, ...], argument: str, program: int | tuple | None) -> list[Access]:
        if not isinstance(argument, str) or argument not in self.arguments:
            raise ValueError(f"trace: argument must be one of {', '.join(self.arguments)}, got {argument!r}")
        number = None if program is None else self.number(program)
        return [
            access
            for access in self.accesses
            if access.kind in kinds
            and access.argument == argument
            and (number is None or number == self.number(access.program))
        ]

    def _counts(self, argument: str, accesses: list[Access]) -> np.ndarray:
        counts = np.zeros(_extent(self.arguments[argument]), dtype=np.int64)
        for access in accesses:
            np.add.at(counts, access.hits, 1)
        return counts[_positions(self.arguments[argument])]

    def _bytes(self, kinds: tuple[str, ...], argument: str | None) -> int:
        names = self.arguments if argument is None else [argument]
        return sum(
            access.hits.size * self.arguments[name].element_size()
            for name in names
            for access in self._select(kinds, name, None)
        )

    def __str__(self) -> str:
        table = [("argument", "", "elements", "times each", "bytes", "lanes off", "outside")]
        for name in self.arguments:
            for kind in ("load", "store", "atomic"):
                if found := self._select((kind,), name, None):
                    table.append((name, kind, *self._summary(name, found)))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([f"{self.kernel}: {self.n_programs} program{'s' * (self.n_programs != 1)}", *rows])

    def _summary(self, argument: str, accesses: list[Access]) -> tuple[str, ...]:
        counts = self._counts(argument, accesses)
        times = [str(n) for n in sorted({*counts[counts > 0].tolist()})]
        touched, n_bytes = sum(access.hits.size for access in accesses), self.arguments[argument].element_size()
        return (
            f"{np.count_nonzero(counts)} of {counts.size}",
            " to ".join([times[0], times[-1]][: len(times)]) if times else "0",
            str(touched * n_bytes),
            str(sum(access.mask.size - access.mask.sum() for access in accesses)),
            str(sum(access.outside.sum() for access in accesses)),
        )

    __repr__ = __str__


def trace(kernel, grid, /, *args, watch: str | tuple[str, ...] = (), **meta) -> Trace:
    """Run ``kernel[grid](*args, **meta)`` in the interpreter and record which program touches which elements.

    Args:
        kernel: a function under ``@triton.jit``.
        grid: programs along up to three axes, or a function of the arguments that returns them.
        args: the kernel's arguments. They are written to, as by the launch itself.
        watch: names of variables inside the kernel, or inside functions that it calls and that stand in the same
            module, whose values are recorded whenever they change; those of a tuple as a tuple.
        meta: the kernel's other arguments by name. Options of the compiler, such as `num_warps`, have no effect.

    Returns:
        A `Trace`.

    Raises:
        TypeError: `kernel` is not a function under ``@triton.jit``, the arguments do not fit it, one of them is nothing
            that a kernel can take, a tensor has a dtype that Triton's interpreter does not know, `grid` is neither a
            tuple nor a function of one or holds something else than ints, or `watch` holds something else than names.
        ValueError: the kernel sets no variable of a name in `watch`, `grid` has more than three axes, none, or a
            negative number of programs, an int does not fit into 64 bits, or a tensor is sparse or holds no data.

    Notes:
        The interpreter runs the programs one after another, axis 2 fastest, and takes some 50 µs for every operation of
        every program: choose small tensors. A lane outside its tensor loads `other` or 0, and stores nothing. The gaps
        of a view are outside of it. Tensors on a GPU are copied to the CPU and back. An error inside the kernel arrives
        as Triton's `InterpreterError`. To load or store through a pointer that was cast to elements of another size is
        such an error; tensors of bfloat16 and float8 reach the kernel as float32. Where a kernel makes a number of a
        pointer, it is not the address. Other threads may call this package meanwhile; what has to be compiled for them
        waits. A kernel from elsewhere must not be compiled in them.

    Example:
        >>> import torch, triton_gallery
        >>> from triton_gallery.vector_add import _add_kernel
        >>> x, out = torch.ones(27), torch.empty(27)
        >>> trace = triton_gallery.trace(_add_kernel, (4,), x, x, out, 27, BLOCK_SIZE=8)
        >>> trace.owner("out_ptr")[-4:]
        array([2, 3, 3, 3])
        >>> trace.stores("out_ptr", program=3)
        [store out_ptr by program (3, 0, 0): 3 of 8 lanes on]
    """
    if type(kernel) not in (JITFunction, InterpretedFunction):
        hint = "; pass what it wraps, its `fn`" if hasattr(kernel, "fn") else ""
        hint = "; Gluon has no interpreter" if isinstance(kernel, JITFunction) else hint
        raise TypeError(f"trace: kernel must be a function under @triton.jit, got {type(kernel).__name__}{hint}")
    if not callable(grid) and not isinstance(grid, tuple | list):
        raise TypeError(f"trace: grid must be a tuple or a function, got {type(grid).__name__}")
    signature = inspect.signature(kernel.fn)
    unknown = sorted(meta.keys() - signature.parameters.keys() - _OPTIONS)
    if unknown:
        raise TypeError(f"trace: {kernel.fn.__name__} has no argument {unknown[0]}")
    try:
        # A kernel may have an argument of the name of an option, which then is its own.
        options = _OPTIONS - signature.parameters.keys()
        bound = signature.bind(*args, **{name: value for name, value in meta.items() if name not in options})
    except TypeError as error:
        raise TypeError(f"trace: the arguments must fit {kernel.fn.__name__}: {error}") from None
    bound.apply_defaults()
    bound.arguments.update(_checked(signature, bound.arguments))
    if callable(grid):
        grid = grid(dict(bound.arguments))
        if not isinstance(grid, tuple | list):
            raise TypeError(f"trace: grid must return a tuple, got {type(grid).__name__}")
    try:
        grid = tuple(map(operator.index, grid))
    except TypeError:
        raise TypeError(f"trace: grid must hold ints, got {grid!r}") from None
    if not 1 <= len(grid) <= 3 or min(grid) < 0:
        raise ValueError(f"trace: grid must hold one to three numbers of programs, none negative, got {grid}")
    names = _names(watch)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"trace: watch must be a name or a tuple of names, got {watch!r}")
    tensors = dict(_tensors(bound.arguments))
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and (lack := _lack(tensor)):
            raise ValueError(f"trace: {name} must be a dense tensor that holds data, got {lack}")
        if isinstance(tensor, torch.Tensor) and tensor.dtype not in _DTYPES:
            raise TypeError(f"trace: {name} must have a dtype that Triton interprets, got {tensor.dtype}")
    recorder = _Recorder(tensors)
    watcher = _Watcher(names, kernel.fn.__globals__)
    function = InterpretedFunction(kernel.fn)
    function.add_pre_run_hook(lambda *host: recorder.meet(dict(zip(bound.arguments, host, strict=True))))
    with ExitStack() as stack:
        stack.enter_context(interpreter_lock)
        if isinstance(kernel, JITFunction):
            stack.enter_context(_interpreter_on())
        stack.enter_context(recorder.attached())
        if names:
            stack.enter_context(watcher.attached())
        # The interpreter counts along all axes, also where one of them is 0.
        launch_interpreted(function, (0,) if 0 in grid else grid, tuple(bound.arguments.values()), {})
    unknown = [name for name in names if not watcher.changes[name]]
    # Where no program runs, no variable is set.
    if unknown and 0 not in grid:
        raise ValueError(f"trace: watch must name variables that the kernel sets, got {', '.join(map(repr, unknown))}")
    return Trace(kernel.fn.__name__, (*grid, 1, 1)[:3], recorder.tensors, recorder.accesses, watcher.changes)


# --- recording --------------------------------------------------------------------------------------------------------


@dataclass
class _Recorder:
    """Stands between the interpreter and memory."""

    tensors: dict[str, torch.Tensor]
    accesses: list[Access] = field(default_factory=list)

    def meet(self, arguments: dict) -> None:
        """Learn where the arguments lie on the CPU, just before the first program runs."""
        self.host = list(_tensors(arguments))
        self.tags = {id(tensor): tag for tag, (_, tensor) in enumerate(self.host, start=1)}
        # An empty tensor lies nowhere. In the middle of all addresses its offsets have room to both sides.
        self.bases = [tensor.data_ptr() or 1 << (_ADDRESS_BITS - 1) for _, tensor in self.host]
        self.elements = [_elements(tensor) for _, tensor in self.host]

    @contextmanager
    def attached(self) -> Iterator[None]:
        builder = interpreter.interpreter_builder
        patches = {name: functools.partial(getattr(self, name), getattr(builder, name)) for name in _OPERATIONS}
        convert = functools.partial(self.convert, interpreter._implicit_cvt)
        with patch.multiple(builder, **patches), patch.object(interpreter, "_implicit_cvt", convert):
            yield

    def convert(self, convert: Callable, arg):
        """The interpreter's own conversion of an argument; a pointer gets its argument's number."""
        value = convert(arg)
        if tag := self.tags.get(id(arg)):
            value.handle.data[...] = tag << _ADDRESS_BITS | self.bases[tag - 1]
        return value

    def create_masked_load(self, load: Callable, ptrs, mask, *rest, **options):
        return load(*self._record("load", ptrs, mask), *rest, **options)

    def create_masked_store(self, store: Callable, ptrs, value, mask, *rest):
        ptrs, mask = self._record("store", ptrs, mask)
        return store(ptrs, value, mask, *rest)

    def create_atomic_rmw(self, rmw: Callable, op, ptrs, value, mask, *rest):
        ptrs, mask = self._record("atomic", ptrs, mask)
        return rmw(op, ptrs, value, mask, *rest)

    def create_atomic_cas(self, cas: Callable, ptrs, expected, *rest):
        ptrs, mask = self._record("atomic", ptrs, TensorHandle(np.ones(ptrs.data.shape, dtype=bool), tl.int1))
        return cas(ptrs, expected, *rest) if mask.data.all() else expected

    def _record(self, kind: str, ptrs: TensorHandle, mask) -> tuple[TensorHandle, TensorHandle]:
        """Note an access, and return what of it may be carried out."""
        # Triton 3.7 hands over the mask of a descriptor as a bare array.
        on = np.asarray(mask.data if isinstance(mask, TensorHandle) else mask, dtype=bool)
        addresses = (ptrs.data & _ADDRESS).astype(np.int64)
        tags = ptrs.data >> np.uint64(_ADDRESS_BITS)
        outside = np.zeros_like(on)
        for tag in np.unique(tags):
            if not tag:
                continue  # an address that the kernel has from somewhere else
            (name, tensor), elements = self.host[tag - 1], self.elements[tag - 1]
            element = ptrs.get_element_ty()
            if max(1, element.primitive_bitwidth // 8) != tensor.element_size():
                rule = f"{name} ({tensor.dtype} in the interpreter) must keep the size of its elements"
                raise ValueError(f"trace: a pointer to {rule}, got one to {element}")
            offsets = (addresses - self.bases[tag - 1]) // tensor.element_size()
            lanes = on & (tags == tag)
            inside = (offsets >= 0) & (offsets < elements.size)
            inside[inside] = elements[offsets[inside]]
            missed = lanes & ~inside
            program = interpreter.interpreter_builder.grid_idx
            self.accesses.append(Access(kind, name, program, offsets, lanes, missed))
            outside |= missed
        return TensorHandle(addresses.astype(np.uint64), ptrs.dtype), TensorHandle(on & ~outside, tl.int1)


_OPERATIONS = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")


@dataclass
class _Watcher:
    """Follows variables of the kernel, line by line, as a debugger does."""

    names: tuple[str, ...]
    namespace: dict
    changes: dict[str, list] = field(init=False)

    def __post_init__(self):
        self.changes = {name: [] for name in self.names}

    @contextmanager
    def attached(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self.called)
        try:
            yield
        finally:
            sys.settrace(before)

    def called(self, frame, event, arg):
        names = [name for name in self.names if name in frame.f_code.co_varnames]
        return functools.partial(self.stepped, names, {}) if frame.f_globals is self.namespace and names else None

    def stepped(self, names: list[str], seen: dict, frame, event, arg):
        variables = frame.f_locals
        for name in names:
            if name in variables and variables[name] is not seen.get(name, self):
                seen[name] = variables[name]
                self.changes[name].append((interpreter.interpreter_builder.grid_idx, _value(variables[name])))
        return functools.partial(self.stepped, names, seen)


def _value(variable) -> np.ndarray | tuple:
    if isinstance(variable, tl.tensor):
        data = variable.handle.data.reshape(variable.shape)
        # A pointer's number of an argument is ours.
        return data & _ADDRESS if variable.dtype.is_ptr() else data.copy()
    if isinstance(variable, tuple | tl.tuple):
        return tuple(map(_value, variable))
    return np.asarray(variable.value if isinstance(variable, tl.constexpr) else variable)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _checked(signature: inspect.Signature, arguments: dict) -> dict:
    """The arguments that the interpreter can take; NumPy's numbers as Python's."""
    checked = {}
    for name, value in arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"trace: a kernel must name its arguments, this one has *{name}")
        value = number(value)
        if "constexpr" not in str(parameter.annotation):
            _check_value(name, value)
        checked[name] = value
    return checked


# What a kernel can take besides tensors and tuples of all these.
_VALUES = int, float, type(None), tl.constexpr, tl.dtype, KernelInterface, TensorDescriptor


def _check_value(name: str, value: object) -> None:
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            _check_value(f"{name}[{i}]", part)
    elif isinstance(value, bool) and _NO_BOOLS:
        version = triton.__version__
        raise TypeError(
            f"trace: {name} must not be a bool, which the interpreter of Triton {version} cannot read; pass an int"
        )
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"trace: {name} must fit into 64 bits, got {value:#x}")
    elif not isinstance(value, (*_VALUES, torch.Tensor)):
        raise TypeError(
            f"trace: {name} must be a tensor, a number, None or a tuple of these, got {type(value).__name__}; only a "
            "tl.constexpr can be something else"
        )


def _tensors(arguments: dict) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments, with their names."""
    for name, arg in arguments.items():
        if isinstance(arg, tuple):
            yield from _tensors({f"{name}[{i}]": part for i, part in enumerate(arg)})
        elif isinstance(arg, TensorDescriptor):
            yield name, arg.base
        elif isinstance(arg, torch.Tensor):
            yield name, arg


def _lack(tensor: torch.Tensor) -> str | None:
    """What a tensor is that has no memory of its own, or None."""
    if hasattr(tensor, "fake_mode"):
        return "a FakeTensor"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "a nested tensor" if tensor.is_nested else f"one of layout {tensor.layout}"
    if tensor.is_meta:
        return "a meta tensor"
    if tensor.is_neg():
        return "a view whose signs are pending"
    try:
        has_memory = tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):
        has_memory = False  # a tensor of zeros that torch keeps no memory for, one with a mask, a transform's
    return None if has_memory or tensor.numel() == 0 else "one without memory"


def _positions(tensor: torch.Tensor) -> np.ndarray:
    """For each element of a tensor, how many elements behind the first one it lies in memory."""
    positions = np.zeros(tuple(tensor.shape), dtype=np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        positions += (np.arange(size) * stride).reshape([-1 if d == axis else 1 for d in range(tensor.dim())])
    return positions


def _extent(tensor: torch.Tensor) -> int:
    return int(_positions(tensor).max(initial=-1)) + 1


def _elements(tensor: torch.Tensor) -> np.ndarray:
    """Which places in memory, from a tensor's first element on, hold an element: not the gaps between its rows."""
    elements = np.zeros(_extent(tensor), dtype=bool)
    elements[_positions(tensor)] = True
    return elements


# --- in a process that compiles ---------------------------------------------------------------------------------------


@contextmanager
def _interpreter_on() -> Iterator[None]:
    """Let functions that were made for the compiler run in the interpreter; afterwards all is as it was.

    The interpreter replaces parts of `triton.language`, and does not put all of them back by itself.
    """
    # Triton imports Gluon when it first asks for an argument's type, and Gluon takes over the functions that it finds.
    triton.runtime.jit.mangle_type(0)
    types = [value for value in vars(tl.core).values() if isinstance(value, type)]
    types = {value for value in types if value.__module__ == tl.core.__name__}
    before = [(place, dict(vars(place))) for place in (tl, tl.core, tl.math, *types)]
    interpreted = functools.cache(InterpretedFunction)

    def call(self, *args, **kwargs):
        return interpreted(self.fn)(*args, **kwargs)

    knobs = ExitStack()
    knobs.enter_context(triton.knobs.runtime.scope())
    try:
        triton.knobs.runtime.interpret = True
        for name, value in vars(tl.tensor).copy().items():
            if isinstance(value, JITFunction):  # x.sum() is tl.sum(x)
                setattr(tl.tensor, name, functools.partialmethod(interpreted(value.fn)))
        with patch.object(JITFunction, "__call__", call):
            yield
    finally:
        knobs.close()
        for place, contents in before:
            for name in vars(place).keys() - contents.keys():
                delattr(place, name)
            for name, value in contents.items():
                if vars(place).get(name) is not value:
                    setattr(place, name, value)
