import threading

import pytest
import torch

import triton_gallery as tg
from triton_gallery import _launch
from triton_gallery._launch import _is_dense, _Replay, forget_replays

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
    monkeypatch.setattr(_Replay, "__call__", lambda self, tensors: ran.append(self) or run(self, tensors))
    return ran


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def assert_same(ours, expected):
    for x, y in zip(as_tuple(ours), as_tuple(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_replay_computes_what_the_call_does(name, dtype, device, replays):
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
def test_replays_in_a_graph_and_on_another_stream(device):
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
    monkeypatch.setattr(_launch, "_MAX_REPLAYS", 5)
    for n in range(1, 40):
        x = torch.randn(n, device=device)
        assert torch.equal(tg.add(x, x.flip(0)), x + x.flip(0))
    assert all(len(replays) <= 5 for replays in _launch._replay_caches)


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
