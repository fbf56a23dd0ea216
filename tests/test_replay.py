import threading
from types import BuiltinFunctionType

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

import triton_gallery as tg
from triton_gallery import _launch, _replay
from triton_gallery._launch import Tape
from triton_gallery._replay import _allocation, _innermost, _is_dense, _kind, _Replay, forget_replays

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
    "attention and lse": lambda x, y: tg.attention(*(t.view(1, 1, -1, 64) for t in (x, y, x + y)), return_lse=True),
}


def inputs(device, dtype=torch.float16):
    return torch.randn(ROWS, COLS, device=device).to(dtype), torch.randn(ROWS, COLS, device=device).to(dtype)


@pytest.fixture
def replays(monkeypatch):
    """The replays that ran, one entry each."""
    ran = []
    run = _Replay.__call__
    monkeypatch.setattr(_Replay, "__call__", lambda self, addresses: ran.append(self) or run(self, addresses))
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

    first, second = arguments(), arguments()
    expected = gradients(*second)
    forget_replays()
    gradients(*first)
    count = len(replays)
    assert_same(gradients(*second), expected)
    assert len(replays) >= count + 5


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
    a, b = torch.randn(2, 128, 128, device=device)
    before = torch.get_float32_matmul_precision()
    try:
        results = {}
        for precision in ("highest", "high") * 3:
            torch.set_float32_matmul_precision(precision)
            assert torch.equal(results.setdefault(precision, tg.matmul(a, b)), tg.matmul(a, b))
    finally:
        torch.set_float32_matmul_precision(before)
    assert not torch.equal(results["highest"], results["high"])


@pytest.mark.gpu
def test_gradients_and_autocast_after_replays(device):
    x, y = inputs(device, torch.float32)
    for _ in range(3):
        tg.softmax(x), tg.matmul(x, y.t()), tg.layer_norm(x, (COLS,))
    x.requires_grad_()
    assert all(t.requires_grad for t in (tg.softmax(x), tg.matmul(x, y.t()), tg.layer_norm(x, (COLS,))))
    with torch.no_grad():
        assert not tg.softmax(x).requires_grad
    with torch.autocast("cuda", torch.bfloat16):
        q = x.detach().view(1, 2, -1, 64)
        assert tg.attention(q, q, q).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dim must be in"):
        tg.softmax(x, 2)


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
    assert all(len(replays) <= 5 for replays in _replay._replay_caches)


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


def kind(*args):
    return _kind(args, [])


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
        torch.set_float32_matmul_precision("high")
        kinds.add(kind(x))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(kinds) == 3


def test_a_kind_comes_with_the_addresses():
    x, addresses = torch.randn(4, 6), []
    _kind((x, 3, x[1:], torch.empty(0)), addresses)
    assert addresses == [x.data_ptr(), x.data_ptr() + 24, 0]


@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch._neg_view(torch.ones(3)),
        lambda: torch._efficientzerotensor((3,)),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.ones(3).as_subclass(type("Other", (torch.Tensor,), {})),
    ],
    ids=["negated", "zeros", "sparse", "csr", "nested", "meta", "with a gradient", "subclass"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_has_no_plain_memory_has_no_kind(make):
    assert kind(torch.ones(3)) is not None
    assert kind(torch.ones(3), make()) is None


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


def test_a_replay_launches_on_the_addresses_of_the_call(monkeypatch):
    device, stream, launched = -1, [7], []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream[0], raising=False)
    monkeypatch.setattr(_replay, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    run = Launcher(lambda *args: launched.append(args))
    monkeypatch.setitem(_launch.handles, "kernel", (run, "function", "metadata", ("constant",), device))
    tape, x, y, out = Tape(), torch.randn(4, 6), torch.randn(0), torch.empty(4, 6)
    tape.tables.append(torch.arange(3))
    tape.scratch.append(torch.empty(5))
    described = TensorDescriptor(torch.randn(4, 16), [4, 16], [16, 1], [4, 16])
    arguments = x, 24, out, None, (1, 2), tape.scratch[0], tape.tables[0], described
    tape.launches.append(("kernel", (3,), arguments))
    replay = _Replay.of(tape, [described.base, x, y], out)

    kept = []
    for new_stream, new_x in ((7, x), (7, torch.randn(4, 6)), (8, x), (7, x)):
        stream[0] = new_stream
        kept.append(replay([described.base.data_ptr(), new_x.data_ptr(), 0]))
        *beginning, _, _, _, _, _, x_at, n, out_at, nothing, pair, scratch_at, table_at, made, constant = launched[-1]
        assert beginning == [3, 1, 1, new_stream, "function"]
        assert (x_at, n, out_at, nothing, pair) == (new_x.data_ptr(), 24, kept[-1].data_ptr(), None, (1, 2))
        assert table_at == tape.tables[0].data_ptr() and constant == "constant"
        assert scratch_at not in (0, x_at, out_at, tape.scratch[0].data_ptr())
        assert made.base.data_ptr() == described.base.data_ptr() and made.shape == described.shape
    assert len({t.data_ptr() for t in kept}) == 4

    # A tensor that is none of the call's cannot be found at the next one.
    tape.launches.append(("kernel", (3,), (torch.randn(4),)))
    assert _Replay.of(tape, [described.base, x, y], out) is None


@pytest.mark.gpu
def test_known_addresses_go_straight_to_the_driver(device):
    x, y = inputs(device)
    q = torch.randn(1, 2, 256, 64, device=device).half()
    for call in (lambda: tg.add(x, y), lambda: tg.layer_norm(x, (COLS,), y[0]), lambda: tg.attention(q, q, q)):
        forget_replays()
        for _ in range(6):
            call()
        (replay,) = (r for replays in _replay._replay_caches for r in replays.values() if r is not None)
        launches = [launch for calls in replay.prepared.values() if calls for launch in calls]
        # The fallback is right but slow: a Triton that takes it is one that `_innermost` does not know.
        assert launches and all(isinstance(function, BuiltinFunctionType) for function, _ in launches)


@pytest.mark.gpu
def test_other_addresses_are_other_launches(device, monkeypatch):
    monkeypatch.setattr(_replay, "_MAX_PREPARED", 5)
    tensors = [torch.randn(1, 2, 128, 64, device=device).half() for _ in range(9)]
    expected = [tg.attention(q, q, q).clone() for q in tensors]
    for _ in range(4):
        for q, out in zip(tensors, expected, strict=True):
            assert torch.equal(tg.attention(q, q, q), out)
