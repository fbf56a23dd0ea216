"""The trace of a launch, on kernels small enough to know which element belongs to whom."""

import os
import subprocess
import sys
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

import triton_gallery as tg
from triton_gallery import _launch
from triton_gallery._launch import launch_interpreted
from triton_gallery.trace import _DTYPES, _NO_BOOLS, Trace


@triton.jit
def _copy_kernel(x_ptr, out_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n_elements), mask=offsets < n_elements)


@triton.jit
def _move_kernel(x_ptr, STEP: tl.constexpr):
    x_ptr += tl.program_id(0) * STEP
    tl.store(x_ptr, 1)


@triton.jit
def _unmasked_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) + 1)


@triton.jit
def _rows_kernel(x_ptr, out_ptr, n_rows, row_stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        total += _doubled(tl.load(x_ptr + row * row_stride + cols))
    tl.store(out_ptr + tl.program_id(0), total.sum(axis=0))


@triton.jit
def _doubled(x):
    twice = x * 2
    return twice


@triton.jit
def _count_kernel(counter_ptr, lock_ptr):
    tl.atomic_add(counter_ptr, 1)
    tl.atomic_cas(lock_ptr, 0, 1)


@triton.jit
def _grid_kernel(out_ptr):
    place = tl.program_id(0) + 2 * tl.program_id(1) + 6 * tl.program_id(2)
    tl.store(out_ptr + place, place)


@triton.jit
def _descriptor_kernel(x_desc, out_desc, start):
    out_desc.store([0, 0], x_desc.load([start, 0]))


@triton.jit
def _tuple_kernel(pair, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(pair[1] + offsets, tl.load(pair[0] + offsets))


@triton.jit
def _doubled_kernel(pair, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(pair[1] + offsets, 2 * tl.load(pair[0] + offsets))


@triton.jit
def _named_kernel(pair, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(pair.out + offsets, 2 * tl.load(pair.x + offsets))


@triton.jit
def _cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr.to(tl.pointer_type(DTYPE)) + offsets)
    tl.store(out_ptr.to(tl.pointer_type(DTYPE)) + offsets, x)


@triton.jit
def _max_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.max(tl.load(x_ptr + tl.arange(0, BLOCK)), axis=0))


@triton.jit
def _both_kernel(x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    both = (x, 2 * x)
    tl.store(x_ptr + tl.arange(0, BLOCK), both[1])


def traced_copy(device, n=27) -> tuple[Trace, torch.Tensor, torch.Tensor]:
    x, out = torch.randn(n, device=device), torch.full((n,), torch.nan, device=device)
    return tg.trace(_copy_kernel, (triton.cdiv(n, 8),), x, out, n, BLOCK=8, num_warps=1), x, out


def test_trace_tells_who_touched_what(device):
    trace, x, out = traced_copy(device)
    assert torch.equal(out, x)
    np.testing.assert_array_equal(trace.owner("out_ptr"), np.arange(27) // 8)
    np.testing.assert_array_equal(trace.load_counts("x_ptr", program=3), np.arange(27) >= 24)
    np.testing.assert_array_equal(trace.store_counts("out_ptr"), np.ones(27))
    assert trace.n_programs == 4 and trace.grid == (4, 1, 1) and trace.kernel == "_copy_kernel"
    assert [access.program[0] for access in trace.accesses] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert trace.bytes_loaded() == trace.bytes_loaded("x_ptr") == 27 * 4 == trace.bytes_stored()
    assert trace.bytes_loaded("out_ptr") == 0 and not trace.loads("out_ptr") and not trace.outside


def test_trace_tells_the_lanes(device):
    trace, *_ = traced_copy(device)
    (last,) = trace.stores("out_ptr", program=(3,))
    np.testing.assert_array_equal(last.offsets, np.arange(24, 32))
    np.testing.assert_array_equal(last.mask, np.arange(24, 32) < 27)
    np.testing.assert_array_equal(last.hits, [24, 25, 26])
    assert repr(last) == "store out_ptr by program (3, 0, 0): 3 of 8 lanes on"


def test_trace_prints_a_table(device):
    assert str(traced_copy(device)[0]).splitlines() == [
        "_copy_kernel: 4 programs",
        "argument         elements  times each  bytes  lanes off  outside",
        "x_ptr     load   27 of 27  1           108    5          0",
        "out_ptr   store  27 of 27  1           108    5          0",
    ]


def test_a_kernel_is_compiled_or_interpreted_as_before(device):
    trace, x, out = traced_copy(device)
    out.zero_()
    if tg.benchmark._device() or triton.knobs.runtime.interpret:
        _copy_kernel[(4,)](x, out, 27, BLOCK=8)
        assert torch.equal(out, x)
    assert len(trace.accesses) == 8


def test_lanes_outside_are_told_and_not_carried_out(device):
    memory = torch.zeros(2, 32, device=device)
    x, out = memory[:, :20]
    trace = tg.trace(_unmasked_kernel, (4,), x, out, BLOCK=8)
    assert [(access.kind, access.program[0], access.outside.sum()) for access in trace.outside] == [
        ("load", 2, 4),
        ("store", 2, 4),
        ("load", 3, 8),
        ("store", 3, 8),
    ]
    assert torch.equal(out, torch.ones_like(out)) and not memory[1, 20:].any()
    assert (trace.owner("out_ptr") == np.arange(20) // 8).all()


@triton.jit
def _neighbours_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets - 1))


def test_an_empty_tensor_has_no_place_to_touch(device):
    x, out = torch.empty(0, device=device), torch.ones(4, device=device)
    for tensors, n_outside in (((x, out), [4, 0]), ((out, x), [1, 4])):
        load, store = tg.trace(_neighbours_kernel, (1,), *tensors, BLOCK=4).accesses
        assert (load.argument, store.argument) == ("x_ptr", "out_ptr") and load.offsets.tolist() == [-1, 0, 1, 2]
        assert [access.outside.sum() for access in (load, store)] == n_outside


def test_what_only_looks_like_a_tensor_is_refused(device):
    with pytest.raises(TypeError, match=r"trace: x_ptr must be a tensor, a number, .* got TensorWrapper"):
        tg.trace(_copy_kernel, (1,), triton.reinterpret(torch.ones(8), tl.int32), torch.ones(8), 8, BLOCK=8)


def test_gaps_between_rows_are_outside(device):
    x, out = torch.randn(5, 16, device=device)[:, :8], torch.empty(2, device=device)
    assert not tg.trace(_rows_kernel, (2,), x, out, 5, 16, BLOCK=8).outside
    torch.testing.assert_close(out, torch.stack([2 * x[0::2].sum(), 2 * x[1::2].sum()]))
    trace = tg.trace(_rows_kernel, (2,), x, out, 5, 12, BLOCK=8)
    assert [int(access.outside.sum()) for access in trace.loads("x_ptr")] == [0, 8, 0, 4, 4]
    assert trace.load_counts("x_ptr").shape == (5, 8)


def test_arguments_that_share_memory_are_told_apart(device):
    x = torch.arange(16.0, device=device)
    trace = tg.trace(_copy_kernel, (2,), x, x, 16, BLOCK=8)
    assert trace.load_counts("x_ptr").sum() == 16 and trace.load_counts("out_ptr").sum() == 0
    assert trace.store_counts("x_ptr").sum() == 0 and trace.store_counts("out_ptr").sum() == 16


def test_numbers_of_programs_count_axis_0_fastest(device):
    out = torch.zeros(24, dtype=torch.int32, device=device)
    trace = tg.trace(_grid_kernel, lambda args: (2, 3, 4), out)
    np.testing.assert_array_equal(trace.owner("out_ptr"), np.arange(24))
    np.testing.assert_array_equal(np.flatnonzero(trace.store_counts("out_ptr", program=(1, 2, 3))), [23])
    np.testing.assert_array_equal(out.cpu(), np.arange(24))


@pytest.mark.parametrize("program", [4, -1, (4,), (0, 1), (0, 0, 0, 0)], ids=str)
def test_programs_outside_the_grid_are_refused(program, device):
    trace, _, _ = traced_copy(device)
    with pytest.raises(ValueError, match=r"program must lie in the grid of \(4, 1, 1\) programs, got"):
        trace.loads("x_ptr", program=program)


@pytest.mark.parametrize("program", ["a", 1.5, [0, 0, 0], ("a",), (0.0, 0, 0), np.arange(2)], ids=str)
def test_programs_that_are_none_are_refused(program, device):
    trace, _, _ = traced_copy(device)
    with pytest.raises(TypeError, match="trace: program must be an int or a tuple of ints, got"):
        trace.loads("x_ptr", program=program)
    with pytest.raises(TypeError, match="trace: program must be an int or a tuple of ints, got"):
        trace.number(program)


def test_a_program_is_its_ids_or_its_number(device):
    trace, _, _ = traced_copy(device)
    (store,) = trace.stores("out_ptr", program=3)
    for program in (np.int64(3), (3,), (np.int64(3), 0, 0)):
        assert trace.stores("out_ptr", program) == [store] and trace.number(program) == 3
    with pytest.raises(ValueError, match=r"program must lie in the grid of \(4, 1, 1\) programs, got \(\)"):
        trace.loads("x_ptr", program=())
    with pytest.raises(ValueError, match=r"program must lie in the grid of \(4, 1, 1\) programs, got \(4, 0, 0\)"):
        trace.number((4, 0, 0))


@pytest.mark.parametrize(
    ("grid", "error", "message"),
    [
        (("a",), TypeError, r"trace: grid must hold ints, got \('a',\)"),
        ((4.0,), TypeError, r"trace: grid must hold ints, got \(4.0,\)"),
        (lambda args: 4, TypeError, "trace: grid must return a tuple, got int"),
        ((), ValueError, r"trace: grid must hold one to three numbers of programs, none negative, got \(\)"),
        ((1, 1, 1, 1), ValueError, "trace: grid must hold one to three"),
        ((-1,), ValueError, "trace: grid must hold one to three"),
    ],
    ids=["text", "float", "function", "none", "four", "negative"],
)
def test_grids_that_are_none_are_refused(grid, error, message, device):
    out = torch.zeros(24, dtype=torch.int32, device=device)
    with pytest.raises(error, match=message):
        tg.trace(_grid_kernel, grid, out)


@pytest.mark.timeout(20)
def test_a_grid_without_programs_takes_no_time(device):
    out = torch.zeros(2, 3, 4, dtype=torch.int32, device=device)
    trace = tg.trace(_grid_kernel, (2**40, 0), out)
    assert trace.n_programs == 0 and trace.grid == (2**40, 0, 1) and (trace.store_counts("out_ptr") == 0).all()


def test_a_grid_of_numpys_numbers(device):
    x, out = torch.arange(8.0, device=device), torch.empty(8, device=device)
    trace = tg.trace(_copy_kernel, (np.int64(2),), x, out, 8, BLOCK=np.int64(4))
    assert trace.grid == (2, 1, 1) and "2 programs" in repr(trace)
    assert torch.equal(out, x)


def test_a_watched_tuple_is_a_tuple_of_values(device):
    x = torch.arange(4.0, device=device)
    trace = tg.trace(_both_kernel, (1,), x, BLOCK=4, watch="both")
    (_, (first, second)) = trace.watched["both"][0]
    np.testing.assert_array_equal(first, [0, 1, 2, 3])
    np.testing.assert_array_equal(second, [0, 2, 4, 6])


def test_atomics_are_loads_and_stores(device):
    counter, lock = torch.zeros(2, 3, dtype=torch.int32, device=device)
    trace = tg.trace(_count_kernel, (5,), counter, lock)
    assert counter.tolist() == [5, 0, 0] and lock.tolist() == [1, 0, 0]
    assert trace.load_counts("counter_ptr").tolist() == trace.store_counts("lock_ptr").tolist() == [5, 0, 0]
    assert trace.loads("lock_ptr")[0].kind == "atomic"


def test_an_atomic_outside_is_not_carried_out(device):
    memory = torch.zeros(8, dtype=torch.int32, device=device)
    trace = tg.trace(_count_kernel, (2,), memory[:4], memory[4:4])
    assert memory.tolist() == [2, 0, 0, 0, 0, 0, 0, 0] and len(trace.outside) == 2


def test_descriptors_are_traced(device):
    x, out = torch.randn(40, 16, device=device), torch.zeros(32, 16, device=device)
    boxes = [TensorDescriptor(t, list(t.shape), list(t.stride()), [32, 16]) for t in (x, out)]
    trace = tg.trace(_descriptor_kernel, (1,), *boxes, 16)
    assert torch.equal(out[:24], x[16:]) and not out[24:].any()
    np.testing.assert_array_equal(trace.load_counts("x_desc")[:, 0], np.arange(40) >= 16)
    assert trace.bytes_loaded() == 24 * 16 * 4 and trace.bytes_stored("out_desc") == 32 * 16 * 4


def test_parts_of_a_tuple_have_names(device):
    x, out = torch.arange(8, device=device), torch.zeros(8, dtype=torch.int64, device=device)
    trace = tg.trace(_tuple_kernel, (1,), (x, out), BLOCK=8)
    assert torch.equal(x, out) and list(trace.arguments) == ["pair[0]", "pair[1]"]
    assert trace.load_counts("pair[0]").all() and trace.store_counts("pair[1]").all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(
    ("kernel", "pair"),
    [(_doubled_kernel, lambda *parts: parts), (_named_kernel, namedtuple("Pair", "x out"))],
    ids=["tuple", "namedtuple"],
)
def test_numbers_of_few_bits_are_right_in_a_tuple(kernel, pair, dtype, device):
    x = torch.randn(8, device=device).to(dtype)
    out = torch.zeros(8, device=device).to(dtype)
    trace = tg.trace(kernel, (1,), pair(x, out), BLOCK=8)
    assert torch.equal(out.float(), (2 * x.float()).to(dtype).float())
    assert trace.bytes_stored("pair[1]") == out.nbytes


def test_a_pointer_that_is_cast_keeps_the_size_of_its_elements(device):
    x, out = torch.randn(8, device=device), torch.zeros(8, device=device)
    trace = tg.trace(_cast_kernel, (1,), x, out, BLOCK=8, DTYPE=tl.int32)
    assert torch.equal(x, out) and trace.bytes_loaded() == 32
    rule = r"trace: a pointer to x_ptr \(torch.float32 in the interpreter\) must keep the size of its elements"
    with pytest.raises(InterpreterError, match=f"{rule}, got one to int16"):
        tg.trace(_cast_kernel, (1,), x, out, BLOCK=8, DTYPE=tl.int16)
    with pytest.raises(InterpreterError, match=rule):
        tg.trace(_cast_kernel, (1,), x.bfloat16(), out.bfloat16(), BLOCK=8, DTYPE=tl.int16)


def test_a_launch_warns_of_no_nan(device):
    x, out = torch.full((2, 8), torch.nan, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tg.trace(_max_kernel, (1,), x, out, BLOCK=8)
    assert out[0].isnan()


FORK = """
import multiprocessing, sys, threading, time
import torch, triton_gallery as tg
from triton_gallery import _launch

def launch():
    with _launch.interpreter_lock:
        is_launching.set()
        time.sleep(1)

tg.softmax(torch.ones(4))
is_launching = threading.Event()
threading.Thread(target=launch).start()
is_launching.wait()
fork = multiprocessing.get_context("fork")
child = fork.Process(target=lambda: sys.exit(tg.softmax(torch.ones(4)).sum().item() != 1))
child.start()
child.join(60)
code = child.exitcode
child.kill()
assert code == 0, code
"""


@pytest.mark.skipif(not _launch.INTERPRET, reason="a matter of the interpreter")
def test_a_child_that_begins_while_others_launch():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not _launch.INTERPRET, reason="a matter of the interpreter")
def test_a_launch_prepares_the_language_once_and_leaves_it_as_it_was(device, monkeypatch):
    language, prepared = (tl.load, tl.store, tl.reduce, tl.max), []
    prepare = interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda place, *args: (prepared.append(place), prepare(place, *args))
    )
    x, out = torch.randn(2, 8, device=device)
    _max_kernel[(1,)](x, out, BLOCK=8)  # the first launch changes what functions see
    counts = []
    for n_programs in (1, 5):
        prepared.clear()
        _max_kernel[(n_programs,)](x, out, BLOCK=8)  # each program calls tl.max, and that another function
        counts.append(len(prepared))
    assert counts[0] == counts[1] and (tl.load, tl.store, tl.reduce, tl.max) == language
    with pytest.raises(InterpreterError):
        _max_kernel[(1,)](x, out, BLOCK=7)
    assert (tl.load, tl.store, tl.reduce, tl.max) == language and not _launch._patched


def test_a_launch_lets_python_remember_what_it_warned_of(device):
    x = torch.ones(4, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            tg.add(x, x)
            warnings.warn("said once for each line", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["said once for each line"]


def test_a_launch_leaves_the_filters_of_other_threads():
    class Kernel:
        def __getitem__(self, grid):
            return lambda: other.__enter__()  # as a thread may do while a kernel runs

    with warnings.catch_warnings():
        warnings.resetwarnings()
        other = warnings.catch_warnings()
        launch_interpreted(Kernel(), (1,), (), {})
        other.__exit__()
        assert [module.pattern for _, _, _, module, _ in warnings.filters] == ["triton.runtime.interpreter"]


def test_bfloat16_counts_two_bytes(device):
    x = torch.randn(27, device=device).bfloat16()
    out = torch.empty_like(x)
    trace = tg.trace(_copy_kernel, (4,), x, out, 27, BLOCK=8)
    assert torch.equal(x, out) and trace.bytes_loaded() == 54


@triton.jit
def _two_outputs_kernel(x_ptr, left_ptr, right_ptr, row_stride, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + offsets)
    tl.store(left_ptr + tl.program_id(0) * row_stride + offsets, x)
    tl.store(right_ptr + tl.program_id(0) * row_stride + offsets, -x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_that_take_turns_in_memory_are_all_written(dtype, device):
    x, packed = torch.randn(3, 4, device=device).to(dtype), torch.zeros(3, 8, device=device, dtype=dtype)
    tg.trace(_two_outputs_kernel, (3,), x, packed[:, :4], packed[:, 4:], 8, BLOCK=4)
    assert torch.equal(packed, torch.cat([x, -x], 1))


def test_traces_and_calls_in_several_threads(device):
    def trace(_):
        return len(traced_copy(device)[0].accesses)

    def call(i):
        x = torch.randn(3, 2**i + 1, device=device)  # compiled for each
        torch.testing.assert_close(tg.softmax(x), torch.softmax(x, -1))
        return 8

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(function, i) for i in range(10) for function in (trace, call)]
        assert [future.result() for future in futures] == [8] * 20


def test_watched_variables_are_recorded_whenever_they_change(device):
    x, out = torch.randn(5, 8, device=device), torch.empty(2, device=device)
    trace = tg.trace(_rows_kernel, (2,), x, out, 5, 8, BLOCK=8, watch=("total", "twice", "row"))
    sums = [np.zeros(8), x[0], x[0] + x[2], x[0] + x[2] + x[4], np.zeros(8), x[1], x[1] + x[3]]
    programs = [0, 0, 0, 0, 1, 1, 1]
    for (program, value), expected, number in zip(trace.watched["total"], sums, programs, strict=True):
        assert program == (number, 0, 0)
        np.testing.assert_allclose(value, 2 * np.asarray(torch.as_tensor(expected).cpu()), rtol=1e-5)
    assert [int(row) for _, row in trace.watched["row"]] == [0, 2, 4, 1, 3]
    for (_, value), row in zip(trace.watched["twice"], (0, 2, 4, 1, 3), strict=True):
        np.testing.assert_array_equal(value, 2 * x[row].cpu())


@pytest.mark.parametrize("watch", [(), "offsets"], ids=["nothing", "a variable"])
def test_a_grid_of_no_programs_touches_nothing(watch, device):
    x, out = torch.ones(8, device=device), torch.zeros(8, device=device)
    trace = tg.trace(_copy_kernel, (2, 0), x, out, 8, BLOCK=8, watch=watch)
    assert trace.grid == (2, 0, 1) and not trace.accesses and not any(trace.watched.values())
    assert not out.any()


def test_watching_leaves_a_debugger_in_place(device):
    before = sys.gettrace()
    x = torch.zeros(8, device=device)
    tg.trace(_copy_kernel, (1,), x, x, 8, BLOCK=8, watch="offsets")
    assert sys.gettrace() is before


def test_trace_refuses_what_is_no_kernel(device):
    x = torch.zeros(8, device=device)
    tuned = triton.autotune([triton.Config({"BLOCK": 8})], key=[])(_copy_kernel)
    with pytest.raises(TypeError, match=r"kernel must be a function under @triton\.jit, got Autotuner; pass what it"):
        tg.trace(tuned, (1,), x, x, 8)
    with pytest.raises(TypeError, match="grid must be a tuple or a function, got int"):
        tg.trace(_copy_kernel, 1, x, x, 8, BLOCK=8)
    with pytest.raises(
        TypeError, match="trace: the arguments must fit _copy_kernel: missing a required argument: 'BLOCK'"
    ):
        tg.trace(_copy_kernel, (1,), x, x, 8)
    with pytest.raises(TypeError, match="trace: _copy_kernel has no argument BLOK"):
        tg.trace(_copy_kernel, (1,), x, x, 8, BLOCK=8, BLOK=8)
    tg.trace(_copy_kernel, (1,), x, x, 8, BLOCK=8, num_warps=2, num_stages=1, waves_per_eu=1)
    with pytest.raises(ValueError, match="watch must name variables that the kernel sets, got 'total'"):
        tg.trace(_copy_kernel, (1,), x, x, 8, BLOCK=8, watch=("offsets", "total"))
    with pytest.raises(ValueError, match="argument must be one of x_ptr, out_ptr, got 'y_ptr'"):
        tg.trace(_copy_kernel, (1,), x, x, 8, BLOCK=8).owner("y_ptr")
    with pytest.raises(ValueError, match=r"argument must be one of x_ptr, out_ptr, got \['x_ptr'\]"):
        tg.trace(_copy_kernel, (1,), x, x, 8, BLOCK=8).loads(["x_ptr"])


def test_trace_refuses_a_kernel_in_gluon(device):
    # Not above: another test wants a process that has not imported it.
    from triton.experimental import gluon

    x = torch.zeros(8, device=device)
    with pytest.raises(TypeError, match=r"a function under @triton\.jit, got GluonJITFunction; Gluon has no interp"):
        tg.trace(gluon.jit(_copy_kernel.fn), (1,), x, x, 8, BLOCK=8)


@pytest.mark.parametrize("watch", [3, None, ("offsets", 3)], ids=str)
def test_trace_refuses_names_that_are_none(watch, device):
    x = torch.zeros(8, device=device)
    with pytest.raises(TypeError, match="trace: watch must be a name or a tuple of names, got"):
        tg.trace(_copy_kernel, (1,), x, x, 8, BLOCK=8, watch=watch)


def test_trace_refuses_tensors_without_memory_of_their_own(device):
    x = torch.zeros(8, device=device)
    with pytest.raises(ValueError, match="trace: out_ptr must be a dense tensor that holds data, got a meta tensor"):
        tg.trace(_copy_kernel, (1,), x, x.to("meta"), 8, BLOCK=8)
    with pytest.raises(ValueError, match="trace: x_ptr must be a dense tensor that holds data, got a FakeTensor"):
        tg.trace(_copy_kernel, (1,), FakeTensorMode().from_tensor(x), x, 8, BLOCK=8)
    with pytest.raises(ValueError, match="x_ptr must be a dense tensor that holds data, got one of layout"):
        tg.trace(_copy_kernel, (1,), x.to_sparse(), x, 8, BLOCK=8)
    with pytest.raises(ValueError, match="x_ptr must be a dense tensor that holds data, got a view whose signs are"):
        tg.trace(_copy_kernel, (1,), torch._neg_view(x), x, 8, BLOCK=8)
    with pytest.raises(ValueError, match="x_ptr must be a dense tensor that holds data, got one without memory"):
        tg.trace(_copy_kernel, (1,), torch._efficientzerotensor(8, device=device), x, 8, BLOCK=8)
    freed = torch.zeros(8, device=device)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="out_ptr must be a dense tensor that holds data, got one without memory"):
        tg.trace(_copy_kernel, (1,), x, freed, 8, BLOCK=8)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fnuz], ids=str)
def test_trace_refuses_dtypes_that_triton_does_not_interpret(dtype, device):
    x = torch.zeros(8, device=device)
    with pytest.raises(TypeError, match=f"trace: x_ptr must have a dtype that Triton interprets, got {dtype}"):
        tg.trace(_copy_kernel, (1,), x.to(dtype), x, 8, BLOCK=8)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_trace_takes_every_dtype_that_triton_interprets(dtype, device):
    x = torch.tensor([0, 1, 1, 0], device=device).to(dtype)
    out = torch.zeros_like(x)
    tg.trace(_copy_kernel, (1,), x, out, 4, BLOCK=8)
    assert torch.equal(out.float(), x.float())


def test_a_watched_pointer_is_an_address(device):
    x = torch.zeros(8)
    trace = tg.trace(_move_kernel, (2,), x, 4, watch="x_ptr")
    assert [int(address) for _, address in trace.watched["x_ptr"]] == [x.data_ptr()] * 3 + [x.data_ptr() + 16]


COMPILE_TRACE_COMPILE = """
import sys
sys.path.insert(0, {tests!r})
import torch
import triton_gallery as tg
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import test_trace

assert type(test_trace._rows_kernel).__name__ == "JITFunction"

def compiled():
    signature = dict(x_ptr="*fp32", out_ptr="*fp32", n_rows="i32", row_stride="i32", BLOCK="constexpr")
    source = ASTSource(test_trace._rows_kernel, signature, dict(BLOCK=8))
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]

before = compiled()
x, out = torch.randn(5, 8), torch.empty(2)
trace = tg.trace(test_trace._rows_kernel, (2,), x, out, 5, 8, BLOCK=8, watch="twice")
torch.testing.assert_close(out, torch.stack([2 * x[0::2].sum(), 2 * x[1::2].sum()]))
assert trace.load_counts("x_ptr").sum() == 40 and len(trace.watched["twice"]) == 5
assert not triton.knobs.runtime.interpret and compiled() == before and "tt.reduce" in before
"""


# Gluon takes over functions of tl when it is imported: not, please, while the interpreter has others in their place.
TRACE_FIRST = """
import inspect
import sys
sys.path.insert(0, {tests!r})
import torch
import triton_gallery as tg
import test_trace

assert "triton.experimental.gluon" not in sys.modules
tg.trace(test_trace._rows_kernel, (2,), torch.randn(5, 8), torch.empty(2), 5, 8, BLOCK=8)
from triton.experimental.gluon import language as gl
assert "_semantic" in inspect.signature(gl.exp2).parameters
"""


AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, {tests!r})
import torch
import triton_gallery as tg
import triton
import test_trace
from triton_gallery import _launch, codegen

def trace(_):  # for a while
    tg.trace(test_trace._rows_kernel, (2,), torch.randn(400, 8), torch.empty(2), 400, 8, BLOCK=8)

def call(i):
    tg.softmax(torch.empty(3, 2**i + 1, device="meta"))  # a kernel for each length

triton.runtime.driver.set_active(codegen._TargetDriver(0, "sm_90"))
with _launch.compile_only() as compiled, ThreadPoolExecutor(4) as pool:
    for future in [pool.submit(function, i) for i in range(2, 10) for function in (trace, call)]:
        future.result()
assert len(compiled) == 8
"""


@pytest.mark.parametrize(
    "script", [COMPILE_TRACE_COMPILE, TRACE_FIRST, AT_ONCE], ids=["in between", "first", "at once"]
)
def test_trace_works_in_a_process_that_compiles(tmp_path, script):
    script = script.format(tests=os.path.dirname(__file__))
    settings = {"TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | settings | {"PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@triton.jit
def _kernel_with_options(out_ptr, value, num_warps: tl.constexpr = 7, num_stages: tl.constexpr = 5):
    tl.store(out_ptr, value + 10 * num_warps + 100 * num_stages)


def test_a_kernel_may_have_arguments_named_like_options(device):
    for given, expected in ({}, 571), ({"num_warps": 4}, 541), ({"num_stages": 1, "num_ctas": 1}, 171):
        out = torch.zeros(1, device=device)
        tg.trace(_kernel_with_options, (1,), out, 1, **given)
        assert out.item() == expected


def test_a_number_of_numpy_is_a_number(device):
    for value in np.int64(3), np.float32(3):
        out = torch.zeros(1, device=device)
        tg.trace(_kernel_with_options, (1,), out, value)
        assert out.item() == 573


@pytest.mark.parametrize("value", [np.ones(3), [1.0], "a", {}, (1, [2]), Fraction(1, 2), len, bytearray(8)], ids=str)
def test_trace_refuses_what_no_kernel_takes(value, device):
    name = r"value\[1\]" if isinstance(value, tuple) else "value"
    with pytest.raises(TypeError, match=f"trace: {name} must be a tensor, a number, None or a tuple of these, got"):
        tg.trace(_kernel_with_options, (1,), torch.zeros(1, device=device), value)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_trace_refuses_ints_of_more_than_64_bits(value, device):
    with pytest.raises(ValueError, match=f"trace: value must fit into 64 bits, got {value:#x}"):
        tg.trace(_kernel_with_options, (1,), torch.zeros(1, device=device), value)
    tg.trace(_kernel_with_options, (1,), torch.zeros(1, device=device), value - 1 if value > 0 else value + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_the_inference_mode_are_written(dtype, device):
    with torch.inference_mode():
        out = torch.zeros(1, dtype=dtype, device=device)
    tg.trace(_kernel_with_options, (1,), out, 1)
    assert out.item() != 0


def test_traces_and_accesses_are_equal_to_themselves_alone(device):
    first, second = (tg.trace(_kernel_with_options, (1,), torch.zeros(1, device=device), 1) for _ in range(2))
    assert first == first and first != second
    assert first.accesses[-1] in first.accesses and second.accesses[-1] not in first.accesses


def test_a_bool_is_a_number_or_refused(device):
    out = torch.zeros(1, device=device)
    if _NO_BOOLS:
        with pytest.raises(TypeError, match=r"trace: value must not be a bool, which the interpreter of Triton 3\."):
            tg.trace(_kernel_with_options, (1,), out, True)
    else:
        tg.trace(_kernel_with_options, (1,), out, True)
        assert out.item() == 571


@triton.jit
def _kernel_with_a_list(out_ptr, *values):
    tl.store(out_ptr, 1)


def test_trace_refuses_a_kernel_that_does_not_name_its_arguments(device):
    with pytest.raises(TypeError, match=r"trace: a kernel must name its arguments, this one has \*values"):
        tg.trace(_kernel_with_a_list, (1,), torch.zeros(1, device=device), 1, 2)
