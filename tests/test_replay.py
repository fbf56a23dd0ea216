import ctypes
import gc
import importlib
import threading
import weakref
from contextlib import contextmanager
from types import BuiltinFunctionType

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

import triton_gallery as tg
from triton_gallery import _launch, _replay
from triton_gallery._launch import Tape, Varying, recording, table
from triton_gallery._registration import apply
from triton_gallery._replay import (
    _allocation,
    _compiled,
    _innermost,
    _is_dense,
    _kind,
    _recognizer,
    _Replay,
    forget_replays,
    forward_by,
    replayed,
)

ROWS, COLS = 24, 64
CALLS = {
    "add": lambda x, y: tg.add(x, y),
    "add, scaled": lambda x, y: tg.add(x, y, alpha=-1),
    "add of a transposed matrix": lambda x, y: tg.add(x, y.t().contiguous().t()),
    "softmax": lambda x, y: tg.softmax(x),
    "softmax along the first dimension": lambda x, y: tg.softmax(x, 0),
    "log_softmax in float32": lambda x, y: tg.log_softmax(x, dtype=torch.float32),
    "matmul": lambda x, y: tg.matmul(x, y.t()),
    "matmul, fused": lambda x, y: tg.matmul(x, y.t(), bias=y[:, 0].contiguous(), activation="relu"),
    "batched matmul": lambda x, y: tg.matmul(x.view(2, -1, 16), y.view(2, -1, 16).mT),
    "layer_norm": lambda x, y: tg.layer_norm(x, (COLS,), y[0].contiguous(), y[1].contiguous()),
    "layer_norm without weights": lambda x, y: tg.layer_norm(x, [COLS]),
    "rms_norm": lambda x, y: tg.rms_norm(x, (COLS,), y[0].contiguous()),
    "attention": lambda x, y: tg.attention(*(t.view(1, 4, -1, 16) for t in (x, y, x + y)), is_causal=True),
    "attention of a tensor to itself": lambda x, y: tg.attention(*[(x + y).view(1, 1, -1, 64)] * 3),
    "dropout": lambda x, y: tg.dropout(x, 0.3, seed=9),
    "dropout of a transposed matrix": lambda x, y: tg.dropout(y.t(), 0.3, seed=64),
    "attention and lse": lambda x, y: tg.attention(*(t.view(1, 1, -1, 64) for t in (x, y, x + y)), return_lse=True),
    "attention of one query of each head of a group, and lse": lambda x, y: tg.attention(
        x.flatten()[:1024].view(8, 8, 1, 16),
        *(t.view(8, 2, 6, 16) for t in (y, x + y)),
        enable_gqa=True,
        return_lse=True,
    ),
}


def inputs(device, dtype=torch.float16):
    return torch.randn(ROWS, COLS, device=device).to(dtype), torch.randn(ROWS, COLS, device=device).to(dtype)


@pytest.fixture
def replays(monkeypatch):
    """An entry for each replay that ran."""
    ran = []
    of = _Replay.of

    def counted(*args):
        replay = of(*args)
        if replay is not None:
            run = replay.run
            replay.run = lambda *args: ran.append(None) or run(*args)
        return replay

    monkeypatch.setattr(_Replay, "of", counted)
    return ran


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def assert_same(ours, expected):
    for x, y in zip(as_tuple(ours), as_tuple(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
        assert torch.equal(x, y)


# With what fills memory before it is used, and with what does not: outputs are allocated in two ways.
both_modes = pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "not deterministic"])


@pytest.mark.gpu
@both_modes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_replay_computes_what_the_call_does(name, dtype, deterministic, device, replays):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    call = CALLS[name]
    for x, y in [inputs(device, dtype) for _ in range(3)]:
        # Once from the beginning, then on other numbers as often as it takes to be sure of replays.
        expected = call(x, y)
        forget_replays()
        call(*inputs(device, dtype))
        count = len(replays)
        assert_same(call(x, y), expected)
        # What takes alpha from memory is not replayed.
        assert name in ("add, scaled", "add of a transposed matrix") or len(replays) > count, "no replay ran"


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64])
def test_gradients_are_replayed(head_dim, device, replays):
    def gradients(q, k, v, w, dout):
        q, k, v, w = (t.clone().requires_grad_() for t in (q, k, v, w))
        out = tg.attention(q, k, tg.softmax(v), is_causal=True)
        out = tg.layer_norm(out, (head_dim,), w) + tg.matmul(out, w.expand(head_dim, head_dim))
        return torch.autograd.grad(out, (q, k, v, w), dout)

    def arguments():
        tensors = torch.randn(4, 1, 2, 40, head_dim, device=device).half()
        return *tensors[:3], torch.randn(head_dim, device=device).half(), tensors[3]

    calls = [arguments() for _ in range(4)]
    expected = [gradients(*call) for call in calls]
    forget_replays()
    gradients(*calls[0])
    count = len(replays)
    for call, gradient in zip(calls, expected, strict=True):
        assert_same(gradients(*call), gradient)
    assert len(replays) >= count + 20


@pytest.mark.gpu
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no gradient", "gradient"])
def test_known_calls_check_nothing_again(requires_grad, device, monkeypatch):
    x, y = (t.requires_grad_(requires_grad) for t in inputs(device))
    w = torch.ones(COLS, device=device).half().requires_grad_(requires_grad)
    square = torch.randn(COLS, COLS, device=device).half().requires_grad_(requires_grad)
    q = torch.randn(1, 2, 256, 64, device=device).half().requires_grad_(requires_grad)
    calls = {
        "vector_add": lambda: tg.add(x, y),
        "softmax": lambda: tg.softmax(x),
        "matmul": lambda: tg.matmul(square, square),
        "dropout": lambda: tg.dropout(x),
        "layer_norm": lambda: tg.layer_norm(x, (COLS,), w, w),
        "attention": lambda: tg.attention(q, q, q, is_causal=True),
    }
    for name, call in calls.items():
        for _ in range(4):
            call()

        def fail(*args, name=name):
            raise AssertionError(f"{name} checks its arguments")

        monkeypatch.setattr(importlib.import_module(f"triton_gallery.{name}"), "check_tensor", fail)
        assert call().requires_grad == requires_grad


@pytest.mark.gpu
def test_a_replay_takes_the_seed_of_the_call(device, replays):
    x = torch.randn(64, device=device)
    seeds = (64, 1, 16, 0, -1, 7, 2**31, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)
    expected = []
    for seed in seeds:
        forget_replays()
        expected.append(tg.dropout(x, seed=seed))
    assert torch.equal(expected[4], expected[-1]) and len({str(out.tolist()) for out in expected}) == len(seeds) - 2
    for _ in range(3):
        for seed, out in zip(seeds, expected, strict=True):
            assert torch.equal(tg.dropout(x, seed=seed), out)
    assert len(replays) >= 20
    leaf = x.clone().requires_grad_()
    for seed, out in zip(seeds, expected, strict=True):
        (dx,) = torch.autograd.grad(tg.dropout(leaf, seed=seed), leaf, x)
        assert torch.equal(dx, out)


@pytest.mark.gpu
def test_each_replay_draws_a_seed_as_the_first_call_did(device):
    x = torch.ones(4096, device=device)
    masks = []
    for _ in range(2):
        torch.manual_seed(3)
        masks.append([tg.dropout(x) for _ in range(5)])
        forget_replays()
    assert all(map(torch.equal, *masks))
    assert len({str(mask.tolist()) for mask in masks[0]}) == 5
    state = torch.cuda.get_rng_state(device)
    tg.dropout(x, 0.0), tg.dropout(x, training=False), tg.dropout(x, seed=3)
    assert torch.equal(torch.cuda.get_rng_state(device), state)


@pytest.mark.gpu
def test_the_same_tensor_twice_is_no_other_tensor_twice(device):
    x, y = inputs(device)
    for _ in range(3):
        assert torch.equal(tg.add(x, x), x + x)
        assert torch.equal(tg.add(x, y), x + y)
        torch.testing.assert_close(tg.matmul(x, x.t()), x @ x.t())
        torch.testing.assert_close(tg.matmul(x, y.t()), x @ y.t())


@pytest.mark.gpu
def test_each_kind_of_argument_is_a_call_of_its_own(device):
    x, y = inputs(device)
    flat = torch.randn(ROWS * COLS + 8, device=device).half()
    for _ in range(3):
        for a, b in ((x, y), (x[:, :63], y[:, :63]), (x.t(), y.t()), (x[:5], y[:5]), (x, y[:1]), (x, y[:, :1])):
            assert torch.equal(tg.add(a, b), a + b)
        for offset in range(8):
            a = flat[offset : offset + ROWS * COLS].view(ROWS, COLS)
            assert torch.equal(tg.add(a, a), a + a)
            torch.testing.assert_close(tg.softmax(a), torch.softmax(a, -1))
        for alpha in (1, 1.0, 2, 2.0, 0.5):
            assert torch.equal(tg.add(x, y.float(), alpha=alpha), torch.add(x, y.float(), alpha=alpha))


@pytest.mark.gpu
def test_a_replay_follows_the_float32_precision(device):
    a, b = torch.randn(2, 2, 2, 128, 64, device=device).requires_grad_()
    # With and without a gradient, and the gradients.
    calls = [
        lambda: tg.matmul(a.detach(), b.mT.detach()),
        lambda: tg.attention(a.detach(), b.detach(), b.detach()),
        lambda: torch.autograd.grad(tg.matmul(a, b.mT).sum(), a)[0],
        lambda: torch.autograd.grad(tg.matmul(a, b.mT, activation="gelu").sum(), a)[0],
        lambda: torch.autograd.grad(tg.attention(a, b, b).sum(), a)[0],
    ]
    before = torch.get_float32_matmul_precision()
    try:
        for call in calls:
            results = {}
            for precision in ("highest", "high") * 4:
                torch.set_float32_matmul_precision(precision)
                assert torch.equal(results.setdefault(precision, call()), call())
            assert not torch.equal(results["highest"], results["high"])
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
def test_gradients_and_autocast_after_replays(device):
    x, y = inputs(device, torch.float32)
    for _ in range(3):
        tg.softmax(x), tg.matmul(x, y.t()), tg.layer_norm(x, (COLS,))
    x.requires_grad_()
    assert all(t.requires_grad for t in (tg.softmax(x), tg.matmul(x, y.t()), tg.layer_norm(x, (COLS,))))
    with torch.no_grad():
        assert not tg.softmax(x).requires_grad
    with pytest.raises(ValueError, match="dim must be in"):
        tg.softmax(x, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no gradient", "gradient"])
def test_replays_under_autocast(requires_grad, device):
    x, y = (t.requires_grad_(requires_grad) for t in inputs(device, torch.float32))
    half = x.detach().half().requires_grad_(requires_grad)
    calls = {
        "attention": lambda: tg.attention(*[x.view(1, 2, -1, 64)] * 3),
        "matmul": lambda: tg.matmul(x, y.t()),
        "matmul of halves": lambda: tg.matmul(half, half.t()),
        "softmax": lambda: tg.softmax(half),
        "layer_norm": lambda: tg.layer_norm(half, (COLS,)),
        "dropout": lambda: tg.dropout(half, seed=5),
    }

    def run(name):
        out = calls[name]()
        grads = torch.autograd.grad(out, (x, y, half), torch.ones_like(out), allow_unused=True) if requires_grad else ()
        return [out, *(grad for grad in grads if grad is not None)]

    for name in calls:
        expected = []
        for turn in range(5):
            for i, dtype in enumerate((None, torch.bfloat16, torch.float16)):
                if turn == 0:
                    forget_replays()
                with torch.autocast("cuda", dtype, enabled=dtype is not None):
                    results = run(name)
                expected.append(results)
                assert_same(tuple(results), tuple(expected[i]))
        assert len({str(results[0].dtype) for results in expected}) > 1 or name in ("dropout", "matmul of halves")


@pytest.mark.gpu
@both_modes
def test_replays_in_a_graph_and_on_another_stream(deterministic, device):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    x, y = inputs(device)
    w = torch.ones(COLS, device=device).half()

    def call():
        return tg.layer_norm(tg.softmax(tg.add(x, y)), (COLS,), w)

    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, call())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x.mul_(-1)
        out = call()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, call())


@pytest.mark.gpu
def test_replays_in_many_threads(device):
    x, y = inputs(device)
    expected = {name: as_tuple(call(x, y))[0].clone() for name, call in CALLS.items()}
    failures = []

    def work():
        for _ in range(30):
            for name, call in CALLS.items():
                if not torch.equal(as_tuple(call(x, y))[0], expected[name]):
                    failures.append(name)

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures


@pytest.mark.gpu
def test_replays_are_forgotten_when_there_are_too_many(device, monkeypatch):
    monkeypatch.setattr(_replay, "_MAX_REPLAYS", 5)
    for n in range(1, 40):
        x = torch.randn(n, device=device)
        assert torch.equal(tg.add(x, x.flip(0)), x + x.flip(0))
    assert all(len(cache) <= 5 for caches in _replay._caches for cache in caches)


@pytest.mark.gpu
def test_a_profiler_sees_replayed_launches(device):
    from triton import knobs

    x, y = inputs(device)
    for _ in range(3):
        tg.add(x, y)
    seen = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        tg.add(x, y)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1


def test_dense_tensors():
    x = torch.empty(4, 6)
    assert all(map(_is_dense, (x, x.t(), x.view(2, 2, 6), x[:0], x[1:2], torch.empty(()))))
    assert not any(map(_is_dense, (x[:, :5], x[::2], x[:1].expand(4, 6))))


# --- the pieces of a replay, which need no GPU ------------------------------------------------------------------------


def kind(*args, **options):
    return _kind(args, [], **options)


def test_what_is_another_call_has_another_kind():
    x, y, flat = torch.randn(4, 6), torch.randn(4, 6), torch.randn(25)
    different = [
        (x, x), (x, y), (x, y.half()), (x[:, :5], y), (x.view(6, 4), y), (x.t(), y), (flat[:24], x), (flat[1:], x),
        (x, x, y), (x, y, x), (x, y, y), (x, y, 1), (x, y, 1.0), (x, y, True), (x, y, None), (x, 1, y),
    ]  # fmt: skip
    assert len({kind(*args) for args in different}) == len(different)
    assert kind(x, y, [1, 2]) == kind(y, x, [1, 2]) != kind(x, y, (1, 2))
    before = torch.get_float32_matmul_precision()
    kinds = {kind(x)}
    try:
        torch.use_deterministic_algorithms(False)
        kinds.add(kind(x))
        kinds.add(kind(x, tf32=True))
        torch.set_float32_matmul_precision("high")
        kinds.add(kind(x, tf32=True))
        assert kind(x) in kinds
    finally:
        torch.set_float32_matmul_precision(before)
    for dtype in (torch.float16, torch.bfloat16):
        with cuda_autocast(dtype):
            kinds.add(kind(x))
            recognize = _recognizer((aligned(3),), None)
        with cuda_autocast(torch.float16):
            assert (recognize((aligned(3),)) is not None) == (dtype == torch.float16)
    assert len(kinds) == 5 and kind(x) in kinds


@contextmanager
def cuda_autocast(dtype):
    """torch.autocast("cuda", dtype), which does not begin without a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def test_a_kind_comes_with_the_addresses():
    x, addresses = torch.randn(4, 6), []
    _kind((x, 3, x[1:], torch.empty(0)), addresses)
    assert addresses == [x.data_ptr(), x.data_ptr() + 24, 0]


WITHOUT_PLAIN_MEMORY = {
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "zeros": lambda: torch._efficientzerotensor((3,)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "opaque": lambda: torch.ones(3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.empty(3, device="meta"),
    "with a gradient": lambda: torch.ones(3, requires_grad=True),
    "subclass": lambda: torch.ones(3).as_subclass(type("Other", (torch.Tensor,), {})),
}


@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", WITHOUT_PLAIN_MEMORY)
def test_what_has_no_plain_memory_has_no_kind(name):
    assert kind(torch.ones(3)) is not None
    assert kind(torch.ones(3), WITHOUT_PLAIN_MEMORY[name]()) is None


def test_a_tensor_with_a_gradient_has_a_kind_where_none_is_recorded():
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert kind(x) == kind(x.detach())


def test_outputs_are_allocated_as_torch_would(monkeypatch):
    monkeypatch.setattr(_replay, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    x = torch.empty(4, 6, dtype=torch.float16).t()
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        made = _allocation(x)()
        assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
    assert made.isnan().all(), "memory that torch would have filled"
    with torch.inference_mode():
        assert _allocation(x)().is_inference()


class Launcher:
    """Stands for Triton's: adds what it knows of the kernel, and ends in `launch`."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launch):
        self.launch = launch
        self.calls = []

    def __call__(self, *args):
        self.calls.append(args)
        self.launch(*args[:5], "of the kernel", *args[5:])


class Packing(Launcher):
    """Stands for Triton's from 3.7 on: the kernel's arguments are one."""

    def __call__(self, *args):
        self.calls.append(args)
        self.launch(*args[:9], args[9:])


class Hiding(Launcher):
    """Stands for one that nobody knows."""

    def __call__(self, *args):
        self.calls.append(args)
        self.launch([args])


def test_the_way_to_the_driver_is_walked_once():
    run = Launcher(print)
    assert _innermost(run, [1, 2, 3]) == (print, (1, 2, 3, "of the kernel"))
    # The closure that encodes descriptors, whatever Triton's version calls the rest of it.
    launcher = print

    def encode(*args):
        launcher(*args, "encoded")

    assert _innermost(Launcher(encode), [1, 2, 3]) == (print, (1, 2, 3, "of the kernel", "encoded"))


@pytest.mark.parametrize("change", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"gsan_enabled": True}])
def test_a_launcher_that_does_more_is_called_itself(change):
    run = Launcher(print)
    vars(run).update(change)
    assert _innermost(run, [1]) == (run, [1])
    assert _innermost(print, [1]) == (print, [1])
    # Nor is it known what other functions do.
    launcher = Launcher(print)
    for launch in (lambda *args: None, lambda *args: launcher(*args)):
        run = Launcher(launch)
        assert _innermost(run, [1]) == (run, [1])


class Driver:
    """Stands for the function in C that all launches end in."""

    def __init__(self):
        self.seen = []

    def __call__(self, *args):
        self.seen.append(args)


@pytest.mark.parametrize("launcher", [Launcher, Packing, Hiding])
@pytest.mark.parametrize("with_descriptor", [False, True])
def test_a_replay_launches_on_the_addresses_of_the_call(with_descriptor, launcher, monkeypatch):
    device, stream, driver = -1, [7], Driver()
    monkeypatch.setattr(_replay, "BuiltinFunctionType", Driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream[0], raising=False)
    monkeypatch.setattr(_replay, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    run = launcher(driver)
    monkeypatch.setitem(_launch.handles, "kernel", (run, "function", "metadata", ("constant",), device))
    tape, x, y, out = Tape(), torch.randn(4, 6), torch.randn(0), torch.empty(4, 6)
    tape.tables.append(torch.arange(3))
    tape.scratch.append(torch.empty(5))
    described = TensorDescriptor(torch.randn(4, 16), [4, 16], [16, 1], [4, 16])
    seed = Varying(24)
    arguments = x, 24, out, None, (1, 2), tape.scratch[0], tape.tables[0], seed
    tape.launches.append(("kernel", (3,), (*arguments, described) if with_descriptor else arguments))
    replay = _Replay.of(tape, (described.base, x, y, seed), out)

    kept = []
    for new_stream, new_x, seed in ((7, x, 1), (7, torch.randn(4, 6), 2), (8, x, 3), (7, x, 24), (7, x, 24)):
        stream[0] = new_stream
        values = described.base, new_x, y, seed
        # Whoever has the addresses already hands them over.
        addresses = [[described.base.data_ptr(), new_x.data_ptr(), 0]] if new_stream == 7 else []
        kept.append(replay.run(values, *addresses))
        # What a walk through the launcher would hand to the driver.
        whole = {Launcher: lambda a: (*a[:5], *a[6:]), Packing: lambda a: (*a[:9], *a[9]), Hiding: lambda a: a[0][0]}
        *launch, constant = whole[launcher](driver.seen[-1])
        beginning, (x_at, n, out_at, nothing, pair, scratch_at, table_at, seen_seed, *made) = launch[:9], launch[9:]
        assert beginning == [3, 1, 1, new_stream, "function", "metadata", None, None, None]
        assert (x_at, n, out_at, nothing, pair) == (new_x.data_ptr(), 24, kept[-1].data_ptr(), None, (1, 2))
        assert table_at == tape.tables[0].data_ptr() and constant == "constant" and seen_seed == seed
        assert scratch_at not in (0, x_at, out_at, tape.scratch[0].data_ptr()) and len(made) == with_descriptor
        for copy in made:
            assert copy.base.data_ptr() == described.base.data_ptr() and copy.shape == described.shape
    assert len({t.data_ptr() for t in kept}) == 5

    # Without a descriptor the launcher is walked through once, for good; unless the arguments get lost on the way.
    assert len(driver.seen) == 5 and len(run.calls) == (5 if with_descriptor else 6 if launcher is Hiding else 1)

    # A tensor that is none of the call's cannot be found at the next one.
    tape.launches.append(("kernel", (3,), (torch.randn(4),)))
    assert _Replay.of(tape, (described.base, x, y, seed), out) is None

    # With its last user it goes, and its tables with it: nothing waits for the garbage collector.
    gone = weakref.ref(replay)
    gc.disable()
    try:
        del replay
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_known_addresses_go_straight_to_the_driver(device):
    x, y = inputs(device)
    q = torch.randn(1, 2, 256, 64, device=device).half()
    for call in (lambda: tg.add(x, y), lambda: tg.layer_norm(x, (COLS,), y[0]), lambda: tg.attention(q, q, q)):
        forget_replays()
        for _ in range(6):
            call()
        (replay,) = (r for replays, _ in _replay._caches for r in replays.values() if r is not None)
        prepared = [launch for calls in replay.prepared.values() if calls for launch in calls]
        launches = prepared if replay.has_descriptors else replay.launches
        # The fallback is right but slow: a Triton that takes it is one that `_innermost` does not know.
        assert launches and all(isinstance(function, BuiltinFunctionType) for function, *_ in launches)


@pytest.mark.gpu
def test_other_addresses_are_other_launches(device, monkeypatch):
    monkeypatch.setattr(_replay, "_MAX_PREPARED", 5)
    tensors = [torch.randn(1, 2, 128, 64, device=device).half() for _ in range(9)]
    expected = [tg.attention(q, q, q).clone() for q in tensors]
    for _ in range(4):
        for q, out in zip(tensors, expected, strict=True):
            assert torch.equal(tg.attention(q, q, q), out)


# --- calls that are recognized, which needs no GPU either -------------------------------------------------------------


def aligned(*shape, dtype=torch.float32):
    x = torch.randn(shape).to(dtype)
    assert x.data_ptr() % 16 == 0
    return x


def test_what_is_another_call_is_not_recognized():
    x, y, flat = aligned(4, 8), aligned(4, 8), aligned(64)
    calls = [
        (x,), (x, y), (x, x), (x, x, y), (x, y, y), (x, y, x), (x, y.half()), (x.half(), y), (flat[:32], x),
        (x[:, :5], y), (x.view(8, 4), y), (x.t(), y), (x, y, 1), (x, y, 1.0), (x, y, True), (x, y, None), (x, 1, y),
        (x, y, (1, 2)), (x, y, (2, 1)), (x, y, "relu"), (x, y, 1000), (x, y, torch.float16),
        (x, torch.nn.Parameter(y, requires_grad=False)),
    ]  # fmt: skip
    for i, call in enumerate(calls):
        recognize = _recognizer(call, None)
        assert recognize(call) == [t.data_ptr() for t in call if isinstance(t, torch.Tensor)]
        assert all(recognize(other) is None for j, other in enumerate(calls) if j != i)
    # Not the same objects, but the same call.
    assert _recognizer((x, y, 1000, (1, 2)), None)((y, x, int("1000"), tuple([1, 2]))) is not None
    assert _recognizer((x, x, y), None)((y, y, x)) is not None


@pytest.mark.parametrize(
    ("value", "equal"),
    [(0.0, -0.0), ((1, 5), (True, 5)), ((1, 5), (1.0, 5)), ((0.0, (1,)), (-0.0, (1,))), ((0, (1,)), (0, (True,)))],
    ids=str,
)
def test_equal_values_that_are_not_the_same_are_told_apart(value, equal):
    x = aligned(4, 8)
    for one, other in ((value, equal), (equal, value)):
        recognize = _recognizer((x, one), None)
        assert recognize((x, one)) is not None and recognize((x, other)) is None
        assert _kind((x, one), []) != _kind((x, other), [])
    assert _kind((x, [1, 5]), []) != _kind((x, [True, 5]), [])
    # Another object of the same value is the same call.
    again = tuple(list(value)) if isinstance(value, tuple) else float(str(value))
    assert _recognizer((x, value), None)((x, again)) is not None


@pytest.mark.parametrize("interpret", [False, True])
def test_the_interpreter_runs_on_no_architecture(interpret, monkeypatch):
    monkeypatch.setattr(_launch, "INTERPRET", interpret)
    monkeypatch.setattr(_launch, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert _launch.cuda_arch(torch.device("cuda", 0)) == (0 if interpret else 90)


def test_memory_that_is_shared_or_not_aligned_is_not_recognized():
    x, y, flat = aligned(4, 8), aligned(4, 8), aligned(40)
    recognize = _recognizer((x, y), None)
    assert recognize((x, y.view(4, 8))) is not None
    assert recognize((x, x.view(4, 8))) is None
    assert recognize((x, flat[4:36].view(4, 8))) is not None
    assert all(recognize((x, flat[i : i + 32].view(4, 8))) is None for i in (1, 2, 3, 5))
    assert _recognizer((x, x.view(4, 8)), None) is None
    assert _recognizer((x, flat[1:33]), None) is None
    assert _recognizer((torch.empty(0), torch.empty(0)), None) is None


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def under_deterministic_mode(see):
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled(), warn_only=True)
    see()


def under_tf32(see):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        see()
    finally:
        torch.set_float32_matmul_precision(before)


def under(context):
    def run(see):
        with context():
            see()

    return run


def in_a_trace(see):
    torch.jit.trace(lambda x: (see(), x + 1)[1], torch.ones(2), check_trace=False)


@pytest.mark.filterwarnings("ignore:.*(deprecated|supported)")
@pytest.mark.parametrize(
    "run",
    [
        under_deterministic_mode,
        under_tf32,
        under(torch.inference_mode),
        under(Mode),
        under(torch._subclasses.FakeTensorMode),
        under(torch.autograd.forward_ad.dual_level),
        under(lambda: torch.autocast("cpu", torch.bfloat16)),
        lambda see: torch.func.vmap(lambda t: (see(), t)[1])(torch.ones(2)),
        lambda see: torch.func.grad(lambda t: (see(), t)[1])(torch.ones(())),
        in_a_trace,
    ],
    ids=[
        "deterministic",
        "tf32",
        "inference",
        "dispatch mode",
        "fake",
        "forward",
        "autocast",
        "vmap",
        "grad",
        "jit",
    ],
)
def test_what_is_set_for_all_calls_is_looked_at(run):
    call = aligned(4, 8), aligned(4, 8)
    recognize = _recognizer(call, None, tf32=True)
    assert recognize(call) is not None
    seen = []
    run(lambda: seen.append(recognize(call)))
    assert seen == [None]


def test_whether_gradients_are_recorded_counts_where_one_would_be():
    x, y = aligned(3), aligned(3).requires_grad_()
    plain, recorded = _recognizer((x,), None), _recognizer((y,), None)
    with torch.no_grad():
        unrecorded = _recognizer((y,), None)
        assert plain((x,)) and unrecorded((y,)) and recorded((y,)) is None
    assert plain((x,)) and unrecorded((y,)) is None and recorded((y,))


def test_only_float32_depends_on_tf32():
    half, single, seen = aligned(8, dtype=torch.float16), aligned(8), []
    calls = [(_recognizer((x,), None, tf32), x) for x, tf32 in ((half, True), (single, False), (single, True))]
    under_tf32(lambda: seen.extend(recognize((x,)) for recognize, x in calls))
    assert seen == [[half.data_ptr()], [single.data_ptr()], None]


@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", WITHOUT_PLAIN_MEMORY)
def test_what_has_no_plain_memory_is_not_recognized(name):
    x, other = aligned(3), WITHOUT_PLAIN_MEMORY[name]()
    assert _recognizer((x,), None)((other,)) is None
    # A gradient is recognized as such; the others never are.
    assert (_recognizer((other,), None) is None) == (name != "with a gradient")


def test_what_may_change_is_not_recognized():
    x = aligned(3)
    for other in ([3], {"dim": 3}, ([3],)):
        assert _recognizer((x, other), None) is None


class NeverSure:
    def __init__(self, *tensors, dynamic_dims_sizes, dynamic_dims_strides):
        pass

    def check(self, *tensors):
        return False


@pytest.mark.parametrize("guards", [None, object, lambda: None, NeverSure], ids=["none", "other", "empty", "unsure"])
def test_without_guards_nothing_is_recognized(guards, monkeypatch):
    monkeypatch.setattr(_replay, "_TensorGuards", guards)
    assert _recognizer((aligned(3),), None) is None


def test_an_argument_that_varies_is_any_int_of_64_bits():
    x = aligned(3)
    recognize = _recognizer((x, Varying(7), 2), 1)
    assert all(recognize((x, seed, 2)) for seed in (7, 8, 0, -1, 2**63 - 1, -(2**63), Varying(9)))
    assert not any(recognize((x, seed, 2)) for seed in (2**63, -(2**63) - 1, 1.0, True, None, x))
    assert not recognize((x, 7, 3))
    assert _recognizer((x, None, 2), 1)((x, 7, 2)) is None


# --- the whole way, on a GPU that is none -----------------------------------------------------------------------------


@pytest.fixture
def fake_gpu(monkeypatch, replays):
    """The launches of a device that the CPU stands for: what reached the driver, one list of arguments each."""
    launched = []
    monkeypatch.setattr(_replay, "INTERPRET", False)
    monkeypatch.setattr(_replay, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    run = Launcher(lambda *args: launched.append(args[10:]))
    monkeypatch.setitem(_launch.handles, "kernel", (run, "function", "metadata", (), -1))
    return launched


def make(function, **options):
    """`function` as it is replayed, and the arguments of the calls that ran it."""
    ran = []

    def counted(*args, **kwargs):
        ran.append(args)
        return function(*args, **kwargs)

    return replayed(counted, **options), ran


def fake_launch(*args):
    if recording.tape is not None:
        recording.tape.launches.append(("kernel", (1,), args))


def doubled(x, n=64):
    out = torch.empty_like(x)
    fake_launch(x, out, n)
    return out


def test_a_third_call_is_recognized(fake_gpu, replays, monkeypatch):
    call, ran = make(doubled)
    kinds = []
    monkeypatch.setattr(_replay, "_kind", lambda *args: kinds.append(args) or _kind(*args))
    for i in range(5):
        x = aligned(64)
        out = call(x)
        assert (len(ran), len(replays), len(kinds)) == (1, i, min(i + 1, 2))
    assert fake_gpu[-1] == (x.data_ptr(), out.data_ptr(), 64)
    call(x, 65), call(x, n=65), call(x, n=65), call(x, 65)
    assert [args[1:] for args in ran] == [(), (65,), ()]
    assert call(x.half()).dtype == torch.float16 and len(ran) == 4


def test_what_began_before_all_was_forgotten_is_not_kept(fake_gpu, replays):
    """Another thread may change what a call depends on, and say so, while the call is on its way."""
    during = [forget_replays]

    def forgetful(x):
        out = doubled(x)
        for function in during:
            function()
        return out

    call, ran = make(forgetful)
    for n in range(1, 4):
        call(aligned(64))
        assert len(ran) == n and not replays
    during.clear()
    for _ in range(4):
        call(aligned(64))
    assert len(ran) == 4


def test_a_gradients_call_that_began_before_all_was_forgotten_is_not_kept(times):
    call, called, _ = times
    for _ in range(3):
        call(aligned(64).requires_grad_(), 1)
    n = len(called)
    call(aligned(64).requires_grad_(), 1)
    assert len(called) == n
    forget_replays()
    call(aligned(64).requires_grad_(), 1)
    assert len(called) > n


def test_a_provisional_call_is_not_kept(fake_gpu, replays):
    def provisional(x):
        if recording.tape is not None:
            recording.tape.keep = len(ran) > 2
        return doubled(x)

    call, ran = make(provisional)
    for _ in range(6):
        call(aligned(64))
    assert len(ran) == 3


def test_many_shapes_are_recognized_and_forgotten(fake_gpu, replays, monkeypatch):
    monkeypatch.setattr(_replay, "_MAX_RECENT", 2)
    call, ran = make(doubled)
    for _ in range(4):
        for n in range(1, 7):
            for dtype in (torch.float16, torch.float32, torch.float64):
                x = aligned(n, dtype=dtype)
                assert call(x).dtype == dtype
    assert len(ran) == 18 and len(replays) == 54
    replays_of_call, recent = _replay._caches[-1]
    assert len(replays_of_call) == 18 and [len(calls) for calls in recent.values()] == [2] * 6
    # Three kinds that take turns do not chase one another out of two places for ever.
    kept = list(recent.values())
    for _ in range(20):
        for n in range(1, 7):
            for dtype in (torch.float16, torch.float32, torch.float64):
                call(aligned(n, dtype=dtype))
        last, kept = kept, list(recent.values())
    assert kept == last and len(ran) == 18
    monkeypatch.setattr(_replay, "_MAX_REPLAYS", 3)
    for n in range(1, 40):
        call(aligned(n)), call(aligned(n))
        assert len(recent) <= 6
    assert len(recent) <= 3
    forget_replays()
    assert not recent and not replays_of_call


def test_a_recognized_call_asks_for_the_device_and_the_hooks(fake_gpu, replays, monkeypatch):
    call, ran = make(doubled)
    x = aligned(64)
    for _ in range(4):
        call(x)
    seen = len(ran), len(replays)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    call(x)
    assert (len(ran), len(replays)) == (seen[0] + 1, seen[1])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1)
    _launch.HOOKS[0].add(print)
    try:
        call(x)
    finally:
        _launch.HOOKS[0].remove(print)
    assert (len(ran), len(replays)) == (seen[0] + 2, seen[1])


def test_an_argument_that_varies_does_not_become_a_constant(fake_gpu, replays):
    def draw(x, seed):
        out = torch.empty_like(x)
        fake_launch(x, out, seed, 64)
        return out

    call, ran = make(draw, varying=1)
    x = aligned(64)
    # The first seed looks like another argument, which stays as it is.
    for seed in (64, 64, 1, -1, 2**63 - 1, 5):
        call(x, seed)
        assert not fake_gpu or fake_gpu[-1][2:] == (seed, 64)
    assert len(ran) == 1 and len(replays) == len(fake_gpu) == 5
    # What is no such number is passed on as it is.
    call(x, 2**63), call(x, None), call(x, True)
    assert [args[1] for args in ran[1:]] == [2**63, None, True]
    # By its name it is an argument like the others.
    for seed in (7, 7, 7, 8, 8):
        call(x, seed=seed)
    assert [launch[2] for launch in fake_gpu[-3:]] == [7, 7, 8]


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, y):
        ctx.factor = factor
        return x * factor, y * factor

    @staticmethod
    def backward(ctx, dx, dy):
        return dx * ctx.factor, None, dy * ctx.factor


def test_a_call_with_a_gradient_applies_the_same_function(fake_gpu):
    call, ran = make(lambda x, y, factor=3: apply(Scale, y, factor + 1, x)[1])
    for _ in range(4):
        x, y = aligned(64).requires_grad_(), aligned(64)
        out = call(x, y)
        assert torch.equal(out, x * 4) and len(ran) == 1
        (dx,) = torch.autograd.grad(out, x, torch.ones(64))
        assert torch.equal(dx, torch.full((64,), 4.0))
    # Another factor, another gradient, none.
    assert torch.equal(call(x, y, 1), x * 2) and len(ran) == 2
    assert torch.equal(call(x, y, factor=2), x * 3) and len(ran) == 3
    y.requires_grad_()
    call(x, y)
    assert len(ran) == 4
    with torch.no_grad():
        assert not call(x, y).requires_grad and len(ran) == 5


@pytest.mark.parametrize(
    "function",
    [
        lambda x: apply(Scale, x.view_as(x), 3, x)[0],
        lambda x: apply(Scale, x, 3, x)[0].view_as(x),
        lambda x: apply(Scale, apply(Scale, x, 3, x)[0], 1, x)[0],
        lambda x: x * 3,
    ],
    ids=["another argument", "another result", "two of them", "none"],
)
def test_what_does_more_than_to_apply_a_function_runs_again(function, fake_gpu):
    call, ran = make(function)
    x = aligned(64).requires_grad_()
    for _ in range(3):
        assert torch.equal(call(x), x * 3)
    assert len(ran) == 3


def test_a_seed_with_a_gradient(fake_gpu):
    call, ran = make(lambda x, seed: apply(Scale, x, seed, x)[0], varying=1)
    x = aligned(64).requires_grad_()
    for seed in (64, 1, -1, 3):
        out = call(x, seed)
        assert torch.equal(out, x * seed)
        assert torch.equal(torch.autograd.grad(out, x, torch.ones(64))[0], torch.full((64,), float(seed)))
    assert len(ran) == 1


def test_tables_live_as_long_as_a_call_that_reads_them(fake_gpu):
    made = []

    def with_table(x):
        out, numbers = torch.empty_like(x), table(torch.arange(3))
        made.append(weakref.ref(numbers))
        fake_launch(x, out, numbers)
        return out

    call, ran = make(with_table)
    for _ in range(3):
        call(aligned(64))
    # As when there are too many.
    _replay._caches[-1][0].clear()
    gc.collect()
    call(aligned(64))
    assert len(ran) == 1 and fake_gpu[-1][2] == made[0]().data_ptr()
    forget_replays()
    gc.collect()
    assert made[0]() is None


def test_other_shapes_are_not_other_texts(fake_gpu, replays):
    call, _ = make(doubled)
    gradient, _ = make(lambda x, factor: apply(Scale, x, factor, x)[0])
    n_texts = []
    for i in range(2, 20):
        for _ in range(3):
            call(aligned(i, 4), i), gradient(aligned(i).requires_grad_(), i)
        n_texts.append(_compiled.cache_info().currsize)
    assert len(replays) == 36 and len(set(n_texts)) == 1


# --- a function and its operator --------------------------------------------------------------------------------------


def floats(address, n):
    return torch.frombuffer((ctypes.c_float * n).from_address(address), dtype=torch.float32)


def by_operator(op, function, n_inputs, first_only=False):
    """What `differentiable` does, without torch's registration."""

    def setup(ctx, inputs, output):
        vars(ctx).update(function.constants(*inputs))
        function.setup(ctx, inputs, output)

    function.op, function.n_inputs, function.first_only = op, n_inputs, first_only
    function.forward = forward_by(lambda inputs: op(*inputs), setup, first_only)


@pytest.fixture
def times(fake_gpu, monkeypatch):
    """Multiplies each element by itself and a number, on the GPU that is none; as it is replayed, and what ran it."""

    def driver(x, out, n, number):
        fake_gpu.append((x, out, n, number))
        floats(out, n).copy_(floats(x, n).square() * number)

    run = Launcher(lambda *args: driver(*args[10:]))
    monkeypatch.setitem(_launch.handles, "kernel", (run, "function", "metadata", (), -1))

    def compute(x, number):
        out = x.square() * number
        fake_launch(x, out, x.numel(), number)
        return out

    op, ran = make(compute, varying=1)

    class Times(torch.autograd.Function):
        @staticmethod
        def constants(x, number):
            return {"shape": x.shape}

        @staticmethod
        def setup(ctx, inputs, output):
            x, ctx.number = inputs
            ctx.save_for_backward(x)
            ctx.needed = ctx.needs_input_grad

        @staticmethod
        def backward(ctx, dout):
            assert ctx.needs_input_grad == ctx.needed == (True, False)
            return 2 * ctx.number * ctx.saved_tensors[0] * dout.expand(ctx.shape), None

    by_operator(op, Times, 2)
    call, called = make(lambda x, number: apply(Times, x, number), varying=1)
    return call, called, ran


def test_a_replay_stands_in_for_the_operator_of_a_function(times, fake_gpu, replays, monkeypatch):
    call, called, ran = times
    kinds = []
    monkeypatch.setattr(_replay, "_kind", lambda *args: kinds.append(args) or _kind(*args))
    nodes = set()
    for i in range(5):
        x = aligned(64).requires_grad_()
        out = call(x, 3 + i)
        assert torch.equal(out, x.square() * (3 + i))
        (dx,) = torch.autograd.grad(out, x, torch.ones(64))
        assert torch.equal(dx, 2 * (3 + i) * x)
        nodes.add(type(out.grad_fn).__name__)
        # Twice the call and its operator, and then the operator's replay is looked up.
        assert (len(called), len(ran), len(replays), len(kinds)) == (min(i + 1, 2), 1, i, min(3 * i + 3, 6))
        assert i == 0 or fake_gpu[-1] == (x.data_ptr(), out.data_ptr(), 64, 3 + i)
    # The backward pass does not look like another function's, and has its constants from its class.
    assert nodes == {"TimesBackward"}
    assert out.grad_fn.shape == (64,) and vars(out.grad_fn).keys() == {"number", "needed"}
    # Without a gradient the operator itself is called.
    with torch.no_grad():
        assert not call(x, 3).requires_grad and len(called) == 3


def test_a_function_asks_for_the_device_and_the_hooks(times, replays, monkeypatch):
    call, called, ran = times
    x = aligned(64).requires_grad_()
    for _ in range(3):
        call(x, 2)
    seen = len(replays)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    assert torch.equal(call(x, 2), 2 * x.square())
    assert (len(called), len(ran), len(replays)) == (3, 2, seen)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1)
    _launch.HOOKS[1].add(print)
    try:
        assert torch.equal(call(x, 2), 2 * x.square())
    finally:
        _launch.HOOKS[1].remove(print)
    assert (len(called), len(ran), len(replays)) == (4, 3, seen)
    call(x, 2)
    assert (len(called), len(replays)) == (4, seen + 1)


def test_what_autograd_does_with_a_replayed_function(times, replays):
    call, called, _ = times
    for i in range(4):
        x = aligned(64).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            out = call(x, 5)
        assert out.grad_fn._raw_saved_tensors[0].data.dtype == torch.float64
        (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        torch.testing.assert_close(dx, 10 * x)
        torch.testing.assert_close(torch.autograd.grad(dx.sum(), x)[0], torch.full((64,), 10.0))
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            out = call(x, 5)
        assert "traceback_" in out.grad_fn.metadata
        x.data.add_(0), call(x, 5).sum().backward()
        torch.testing.assert_close(x.grad, 10 * x)
        out = call(x, 5)
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        assert len(called) == 2 and len(replays) == 4 * i + 3


def test_a_function_that_is_not_recognized_runs_its_operator(times, fake_gpu, replays):
    call, called, ran = times
    for _ in range(3):
        x = aligned(65)[1:].requires_grad_()
        out = call(x, 2)
        assert torch.equal(out, 2 * x.square())
    # Not aligned: the call is not recognized, its operator has a kind.
    assert (len(called), len(ran), len(replays)) == (3, 1, 2)
    # A class is as slow to make as ten calls.
    assert len(type(out.grad_fn)._forward_cls.__subclasses__()) == 1


def test_functions_in_many_threads(times):
    call, called, _ = times
    failures = []

    def work(number):
        for i in range(300):
            x = torch.full((16,), float(number)).requires_grad_()
            out = call(x, i)
            (dx,) = torch.autograd.grad(out.sum(), x)
            if not (torch.equal(out, i * x.square()) and torch.equal(dx, 2 * i * x)):
                failures.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures and len(called) < 100  # of 1800: a few until one is remembered


def test_a_thread_that_records_what_is_remembered_already(times, monkeypatch):
    call, called, _ = times
    recording_too, go_on = threading.Event(), threading.Event()
    late = threading.Thread(target=lambda: call(aligned(64).requires_grad_(), 1))
    launch_now, (run, *rest) = fake_launch, _launch.handles["kernel"]

    def launch(*args):
        if threading.current_thread() is late:
            recording_too.set()
            go_on.wait(60)
        launch_now(*args)

    def replay(*args):
        go_on.set()
        late.join()
        run.launch(*args)

    monkeypatch.setitem(globals(), "fake_launch", launch)
    monkeypatch.setitem(_launch.handles, "kernel", (Launcher(replay), *rest))
    late.start()
    assert recording_too.wait(60)
    for _ in range(6):
        x = aligned(64).requires_grad_()
        assert torch.equal(call(x, 1), x.square())
    assert not late.is_alive() and len(called) < 5  # the late one, one that recorded, one that was remembered


def test_autograd_sees_the_first_output_alone_where_it_shall(fake_gpu):
    op, _ = make(lambda x, factor: (doubled(x), doubled(x)))

    class First(torch.autograd.Function):
        @staticmethod
        def constants(x, factor):
            return {}

        @staticmethod
        def setup(ctx, inputs, output):
            ctx.save_for_backward(output[1])
            ctx.n_inputs = len(inputs)

        @staticmethod
        def backward(ctx, dout):
            assert ctx.needs_input_grad == (True, False)[: ctx.n_inputs]
            return dout * ctx.saved_tensors[0], None

    by_operator(op, First, 1, first_only=True)
    call, called = make(lambda x: apply(First, x, 2))
    for i in range(4):
        x = aligned(64).requires_grad_()
        out = call(x)
        assert out.shape == (64,) and len(out.grad_fn.saved_tensors) == 1 and len(called) == min(i + 1, 2)
        if i:
            launched = [launch[1] for launch in fake_gpu[-2:]]
            assert launched == [out.data_ptr(), out.grad_fn.saved_tensors[0].data_ptr()]
        # A replay leaves out what stands behind the last tensor; its gradient may still be given, as None.
        assert out.grad_fn.n_inputs == (2 if i < 2 else 1)
        out.backward(torch.ones(64))
        assert x.grad is not None
