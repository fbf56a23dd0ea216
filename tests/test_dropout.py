import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import strategies as st

import triton_gallery as tg
from accuracy import DEVICE, FUZZ, assert_as_accurate_as_torch
from triton_gallery._launch import launch
from triton_gallery.dropout import _draw_block, _draw_each, _dropout_kernel, _dropout_strided_kernel

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# The reference itself is rounded to float64, so there torch's own error can be 0.
FLOOR = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 0, torch.float64: 1e-15}


# --- the reference: Philox-4x32-10 in NumPy ---


def philox(key, counter):
    """Salmon et al. 2011: ten rounds over four 32-bit words; counter is four arrays, key one 64-bit number."""
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key % 2**32, key // 2**32 % 2**32
    for _ in range(10):
        even, odd = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (odd >> half) ^ c1 ^ np.uint64(k0), odd & low, (even >> half) ^ c3 ^ np.uint64(k1), even & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1)


def draws(seed, indices):
    """The 32 random bits of each element index."""
    indices = np.asarray(indices, dtype=np.uint64)
    counter, zero = indices // np.uint64(8), np.zeros_like(indices)
    words = philox(seed % 2**64, (counter & np.uint64(2**32 - 1), counter >> np.uint64(32), zero, zero))
    place = (indices % np.uint64(8)).astype(np.int64)
    word = np.take_along_axis(words, place[..., None] // 2, axis=-1)[..., 0]
    return np.where(place % 2 == 0, word, word % 2**16 * 2**16 + word // 2**16)


def expected_mask(shape, p, seed, device):
    """True where an element is kept, by its row-major index."""
    kept = draws(seed, np.arange(math.prod(shape))) >= round(p * 2**32)
    return torch.from_numpy(kept).reshape(shape).to(device)


KNOWN_ANSWERS = [  # key, counter, result: the vectors that Random123 publishes for philox4x32 with ten rounds
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        0x299F31D0_A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
known_answers = pytest.mark.parametrize(("key", "counter", "result"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])


@known_answers
def test_the_reference_gives_philoxs_known_answer(key, counter, result):
    assert tuple(philox(key, counter)) == result


@triton.jit
def _philox_kernel(
    words_ptr,  # (6,): the key's low and high half, then the counter
    out_ptr,  # (4,)
):
    """The only program: one Philox call."""
    key = tl.load(words_ptr) + (tl.load(words_ptr + 1) << 32)
    c0 = tl.load(words_ptr + 2).to(tl.uint32)
    c1 = tl.load(words_ptr + 3).to(tl.uint32)
    c2 = tl.load(words_ptr + 4).to(tl.uint32)
    c3 = tl.load(words_ptr + 5).to(tl.uint32)
    a, b, c, d = tl.philox(key, c0, c1, c2, c3)
    tl.store(out_ptr, a.to(tl.int64))
    tl.store(out_ptr + 1, b.to(tl.int64))
    tl.store(out_ptr + 2, c.to(tl.int64))
    tl.store(out_ptr + 3, d.to(tl.int64))


@known_answers
def test_triton_gives_philoxs_known_answer(key, counter, result, device):
    words = torch.tensor([key % 2**32, key // 2**32, *counter], device=device)
    out = torch.empty(4, dtype=torch.int64, device=device)
    launch(_philox_kernel, (1,), words, out)
    assert tuple(out.tolist()) == result


# --- the mask ---


def kept(out):
    return out != 0


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 127, 128, 1023, 1024, 1025, 4099])
def test_dropout_keeps_what_philox_says(n, device):
    out = tg.dropout(torch.ones(n, device=device), 0.4, seed=42)
    assert torch.equal(kept(out), expected_mask((n,), 0.4, 42, device))


@pytest.mark.parametrize("p", [2**-32, 0.1, 0.25, 0.5, 1 / 3, 0.999, 1 - 2**-32])
def test_dropout_compares_all_32_bits(p, device):
    out = tg.dropout(torch.ones(1200, device=device), p, seed=3)
    assert torch.equal(kept(out), expected_mask((1200,), p, 3, device))


def test_dropout_keeps_a_draw_equal_to_p(device):
    words = draws(1, np.arange(64))
    for x in (torch.ones(64, device=device), torch.ones(8, 8, device=device).t()):
        for i in (0, 1, 2, 3, 63):
            assert kept(tg.dropout(x, int(words[i]) / 2**32, seed=1)).reshape(-1)[i]
            assert not kept(tg.dropout(x, (int(words[i]) + 1) / 2**32, seed=1)).reshape(-1)[i]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_dropout_uses_64_bits_of_the_seed(seed, device):
    out = tg.dropout(torch.ones(130, device=device), 0.5, seed=seed)
    assert torch.equal(kept(out), expected_mask((130,), 0.5, seed, device))


@pytest.mark.parametrize("block_size", [8, 64, 512, 2048])
@pytest.mark.parametrize("kernel", ["flat", "strided", "strided groups"])
def test_dropout_mask_does_not_depend_on_the_block_size(kernel, block_size, device):
    n, group = 304, 8 if kernel == "strided groups" else 1
    x, out = torch.randn(n, device=device), torch.empty(n, device=device)
    seed = torch.tensor(11, device=device)
    grid = (triton.cdiv(n, block_size),)
    if kernel == "flat":
        launch(_dropout_kernel, grid, x, out, n, 0, seed, 2**31, 2.0, BLOCK_SIZE=block_size)
    else:
        args = x, out, n // group, 0, seed, (n // group,), *[(group,)] * 2, (1,), 1, 1, 2**31, 2.0
        meta = {"INDEX_DTYPE": tl.int32, "GROUP": group, "ALIGNED": True, "BLOCK_SIZE": block_size}
        launch(_dropout_strided_kernel, grid, *args, **meta)
    assert torch.equal(out, tg.dropout(x, 0.5, seed=11))


@triton.jit
def _draw_kernel(
    seed_ptr,  # one int64
    start_ptr,  # one int64
    block_ptr,  # (BLOCK_SIZE,)
    each_ptr,  # (BLOCK_SIZE,)
    BLOCK_SIZE: tl.constexpr,
):
    """The only program: the draws of BLOCK_SIZE elements, both ways."""
    lanes = tl.arange(0, BLOCK_SIZE)
    seed, start = tl.load(seed_ptr), tl.load(start_ptr)
    counters = start // 8 + tl.arange(0, BLOCK_SIZE // 8)
    tl.store(block_ptr + lanes, _draw_block(seed, counters).to(tl.int64))
    tl.store(each_ptr + lanes, _draw_each(seed, start + lanes).to(tl.int64))


@pytest.mark.parametrize("start", [0, 2**31 - 64, 2**32, 2**35 - 64, 2**35, 2**40 + 128])
def test_dropout_draws_do_not_repeat_beyond_32_bits(start, device):
    block, each = torch.empty(2, 128, dtype=torch.int64, device=device)
    launch(_draw_kernel, (1,), *torch.tensor([9, start], device=device), block, each, BLOCK_SIZE=128)
    expected = torch.from_numpy(draws(9, np.arange(start, start + 128)).astype(np.int64)).to(device)
    assert torch.equal(block, expected)
    assert torch.equal(each, expected)
    if start:
        assert not torch.equal(block, torch.from_numpy(draws(9, np.arange(128)).astype(np.int64)).to(device))


def strided_inputs(device, dtype=torch.float32):
    def r(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    return {
        "0-d": r(),
        "one element": r(1, 1),
        "sizes of one": r(1, 7, 1, 5),
        "transposed": r(13, 9).t(),
        "permuted": r(3, 4, 5, 6).permute(2, 0, 3, 1),
        "5-d": r(2, 3, 2, 3, 5).transpose(1, 4),
        "transposed groups": r(16, 9).t(),
        "permuted groups": r(3, 16, 5, 24).permute(2, 0, 3, 1),
        "every second column of groups": r(11, 48)[:, ::2],
        "columns cut to groups": r(9, 64)[:, 8:32],
        "columns cut between groups": r(9, 64)[:, 3:27],
        "expanded groups": r(7, 1).expand(7, 24),
        "every second column": r(11, 26)[:, ::2],
        "a slice with an offset": r(130)[3:],
        "rows and columns cut": r(9, 17)[1:-1, 2:-3],
        "expanded rows": r(1, 19).expand(7, 19),
        "expanded columns": r(7, 1).expand(7, 19),
        "expanded from 0-d": r().expand(5, 6),
        "overlapping": r(40).as_strided((9, 8), (3, 1)),
        "channels last": r(2, 6, 3, 5).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", strided_inputs("cpu"))
def test_dropout_mask_follows_the_index_not_the_strides(name, device):
    x = strided_inputs(device)[name]
    before = x.clone()
    out = tg.dropout(x, 0.3, seed=8)
    mask = expected_mask(x.shape, 0.3, 8, device)
    torch.testing.assert_close(out, torch.where(mask, x / 0.7, 0.0))
    assert out.stride() == torch.empty_like(x).stride()
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 5), (0, 4)], ids=str)
def test_dropout_of_an_empty_tensor(shape, device):
    x = torch.empty(shape, device=device, requires_grad=True)
    out = tg.dropout(x, 0.5)
    assert out.shape == shape
    out.sum().backward()
    assert x.grad.shape == shape


def test_dropout_writes_nothing_else(device):
    memory = torch.full((3, 130), 7.0, device=device)
    out = memory[1, :127]
    x = torch.randn(127, device=device)
    launch(_dropout_kernel, (1,), x, out, 127, 5, None, 2**31, 2.0, BLOCK_SIZE=1024)
    assert torch.equal(out, tg.dropout(x, 0.5, seed=5))
    assert (memory[0] == 7).all() and (memory[2] == 7).all() and (memory[1, 127:] == 7).all()


def test_dropout_reaches_addresses_beyond_32_bits(device):
    torch.utils.deterministic.fill_uninitialized_memory = False  # the gigabytes between the rows are never touched
    try:
        x = torch.empty(3 * 2**30 + 64, dtype=torch.float16, device=device).as_strided((4, 33), (2**30, 1))
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    x.copy_(torch.randn(4, 33))
    out = tg.dropout(x, 0.5, seed=1)
    assert torch.equal(out, torch.where(expected_mask((4, 33), 0.5, 1, device), x * 2, 0))


# --- values ---


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 2 / 3])
def test_dropout_matches_torch_where_it_keeps(p, dtype, device):
    x = torch.randn(37, 29, device=device, dtype=dtype)
    mask = expected_mask(x.shape, p, 6, device)
    reference = torch.where(mask, x.double() / (1 - p), 0.0)
    torchs = x * mask.to(dtype).div_(1 - p)  # what F.dropout does with the mask it draws
    assert_as_accurate_as_torch(tg.dropout(x, p, seed=6), torchs, reference, floor=FLOOR[dtype])


def test_dropout_p_0_keeps_all(device):
    x = torch.randn(100, device=device)
    assert tg.dropout(x, 0) is x
    # So close to 0 that the threshold rounds to it: the kernel runs and keeps everything.
    assert torch.equal(tg.dropout(x, 2**-40, seed=1), x)


def test_dropout_p_1_drops_all(device):
    x = torch.tensor([1.0, -0.0, math.inf, math.nan], device=device, requires_grad=True)
    out = tg.dropout(x, 1)
    assert torch.equal(out, torch.zeros(4, device=device))
    out.backward(torch.full((4,), math.nan, device=device))
    assert torch.equal(x.grad, torch.zeros(4, device=device))


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_dropout_p_close_to_1_stays_finite(transposed, device):
    x = torch.ones(30, 40, device=device)
    out = tg.dropout(x.t() if transposed else x, 1 - 2**-50, seed=1)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_dropout_of_what_is_not_finite(value, device):
    x = torch.full((200,), value, device=device)
    mask = expected_mask(x.shape, 0.5, 2, device)
    out = tg.dropout(x, 0.5, seed=2)
    torch.testing.assert_close(out, torch.where(mask, x, 0.0), equal_nan=True)


def test_dropout_outside_training_returns_x(device):
    x = torch.randn(5, device=device, requires_grad=True)
    assert tg.dropout(x, 0.5, training=False) is x
    assert tg.dropout(x, 1.0, training=False) is x


# --- seeds ---


def test_dropout_without_a_seed_follows_manual_seed(device):
    x = torch.ones(200, device=device)
    torch.manual_seed(5)
    first, second = tg.dropout(x), tg.dropout(x)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(tg.dropout(x), first)
    assert torch.equal(tg.dropout(x), second)


def test_dropout_repeats_with_the_generators_state(device):
    x = torch.ones(200, device=device)
    torch.rand(5, device=device)
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    state = module.get_rng_state()
    first, after = tg.dropout(x), torch.rand(5, device=device)
    module.set_rng_state(state)
    assert torch.equal(tg.dropout(x), first)
    assert torch.equal(torch.rand(5, device=device), after)


def test_dropout_that_drops_nothing_leaves_the_generator_alone(device):
    x = torch.ones(3, device=device)
    torch.manual_seed(5)
    expected = torch.rand(4, device=device)
    torch.manual_seed(5)
    tg.dropout(x, 0.5, training=False), tg.dropout(x, 0.0), tg.dropout(x, 0.5, seed=3)
    assert tg.dropout(x, 1.0).count_nonzero() == 0 and tg.dropout(x[:0], 0.5).numel() == 0
    assert torch.equal(torch.rand(4, device=device), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_dropout_takes_a_seed_from_memory(dtype, device):
    x = torch.randn(150, device=device)
    expected = tg.dropout(x, 0.5, seed=77)
    seeds = torch.tensor([5, 77, 6], dtype=dtype, device=device)
    assert torch.equal(tg.dropout(x, 0.5, seed=seeds[1]), expected)
    assert torch.equal(tg.dropout(x, 0.5, seed=seeds[1:2]), expected)
    assert not torch.equal(tg.dropout(x, 0.5, seed=seeds[2]), expected)


def test_dropout_refuses_a_seed_changed_before_backward(device):
    x, seed = torch.randn(10, device=device, requires_grad=True), torch.tensor(1, device=device)
    out = tg.dropout(x, 0.5, seed=seed)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- statistics; 2**17 draws, so that 4 standard deviations are about 1 % ---

N = 2**17


def assert_uncorrelated(a, b):
    """The correlation of two independent samples of n is within 4 / sqrt(n) of 0."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    correlation = (a * b).mean() / (a.std() * b.std())
    assert abs(correlation.item()) < 4 / math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.02, 0.5, 0.9])
def test_dropout_keeps_the_expected_fraction(p, device):
    mask = kept(tg.dropout(torch.ones(N, device=device), p, seed=1)).double()
    assert abs(mask.mean().item() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / N)
    lanes = mask.view(-1, 8).mean(0)  # each half of each word of a Philox result by itself
    assert (lanes - (1 - p)).abs().max().item() < 4 * math.sqrt(p * (1 - p) / (N / 8))
    blocks = mask.view(-1, 1024).sum(1)  # and each block: a binomial's variance
    assert abs(blocks.var().item() / (1024 * p * (1 - p)) - 1) < 4 * math.sqrt(2 / (N / 1024))


def test_dropout_draws_of_neighbours_are_independent(device):
    mask = kept(tg.dropout(torch.ones(N, device=device), 0.5, seed=1))
    for lag in (1, 2, 3, 4, 5, 8, 32, 128, 1023, 1024, 4096):
        assert_uncorrelated(mask[:-lag], mask[lag:])
    lanes = mask.view(-1, 8)
    for i in range(8):
        for j in range(i):
            assert_uncorrelated(lanes[:, i], lanes[:, j])


def test_dropout_masks_of_different_seeds_are_independent(device):
    x = torch.ones(N // 4, device=device)
    masks = [kept(tg.dropout(x, 0.5, seed=seed)) for seed in (0, 1, 2, 3, 2**32, 2**33, -1)]
    masks += [kept(tg.dropout(x, 0.5)) for _ in range(3)]
    for i in range(len(masks)):
        for j in range(i):
            assert_uncorrelated(masks[i], masks[j])


# --- gradients ---


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_grad_has_the_mask_of_the_forward_pass(dtype, device):
    x = torch.randn(40, 30, device=device, dtype=dtype, requires_grad=True)
    dout = torch.randn(40, 30, device=device, dtype=dtype)
    out = tg.dropout(x, 0.4)  # a drawn seed: the backward pass must have kept it
    out.backward(dout)
    reference = torch.where(kept(out), dout.double() / 0.6, 0.0)
    torchs = dout * kept(out).to(dtype).div_(0.6)
    assert_as_accurate_as_torch(x.grad, torchs, reference, factor=3, floor=FLOOR[dtype])


@pytest.mark.parametrize("name", strided_inputs("cpu"))
def test_dropout_grad_from_strided_inputs(name, device):
    x = strided_inputs(device)[name].detach().requires_grad_()
    mask = expected_mask(x.shape, 0.3, 8, device)
    (dx,) = torch.autograd.grad(tg.dropout(x, 0.3, seed=8).sum(), x)  # the gradient that arrives is expanded
    torch.testing.assert_close(dx, torch.where(mask, 1 / 0.7, 0.0))
    dout = torch.randn_like(x.transpose(0, -1)).transpose(0, -1) if x.ndim else torch.randn_like(x)
    before = dout.clone()
    (dx,) = torch.autograd.grad(tg.dropout(x, 0.3, seed=8), x, dout)
    torch.testing.assert_close(dx, torch.where(mask, dout / 0.7, 0.0))
    assert torch.equal(dout, before)


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_gradcheck(p, device):
    x = torch.randn(4, 3, device=device, dtype=torch.float64, requires_grad=True)
    for fn in (lambda a: tg.dropout(a, p, seed=4), lambda a: tg.dropout(a.t(), p, seed=4)):
        assert torch.autograd.gradcheck(fn, (x,))
        assert torch.autograd.gradgradcheck(fn, (x,))


def test_dropout_double_backward_draws_the_same_mask(device):
    x = torch.randn(50, device=device, requires_grad=True)
    out = tg.dropout(x, 0.5)
    (dx,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(ddx, torch.where(kept(out), 8.0, 0.0))  # out = 2 x, so d²(out²)/dx² = 8


def test_dropout_saves_the_seed_and_no_mask(device):
    saved = []
    x = torch.randn(300, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        tg.dropout(x, 0.5, seed=torch.tensor(3, device=device))
        tg.dropout(x, 0.5, seed=3)
        tg.dropout(x, 0.5)
    assert saved and all(t.numel() == 1 and t.dtype == torch.int64 for t in saved)


def test_dropout_needs_no_graph_without_gradients(device):
    x = torch.randn(10, device=device, requires_grad=True)
    with torch.no_grad():
        assert not tg.dropout(x).requires_grad
    assert not tg.dropout(x.detach()).requires_grad


def test_dropout_repeats_bit_for_bit(device):
    x = torch.randn(500, device=device)
    first = tg.dropout(x, 0.3, seed=1)
    for _ in range(5 if device.type == "cpu" else 100):
        assert torch.equal(tg.dropout(x, 0.3, seed=1), first)


def test_dropout_under_activation_checkpointing(device):
    x = torch.randn(100, device=device, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda a: tg.dropout(a, 0.5), x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(kept(out), kept(x.grad))


# --- integration ---


@pytest.mark.parametrize("name", ["a slice with an offset", "permuted", "expanded rows", "0-d"])
def test_dropout_opcheck(name, device):
    x = strided_inputs(device)[name]
    for seed in ((3, None), (0, torch.tensor(3, device=device))):
        torch.library.opcheck(torch.ops.triton_gallery.dropout.default, (x, *seed, 0.25))
        torch.library.opcheck(torch.ops.triton_gallery.dropout.default, (x, *seed, 1.0))


def test_dropout_compiles_without_graph_breaks(device):
    compiled = torch.compile(lambda a, seed: tg.dropout(a, 0.3, seed=seed) * 2, fullgraph=True)
    x = torch.randn(6, 9, device=device, requires_grad=True)
    for seed in (5, 6, 7, torch.tensor(8, device=device)):
        out = compiled(x, seed)
        torch.testing.assert_close(out, tg.dropout(x, 0.3, seed=seed) * 2)
        (dx,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(kept(out), kept(dx))


def test_dropout_compiles_with_dynamic_shapes(device):
    compiled = torch.compile(lambda a, p: tg.dropout(a, p, seed=1), fullgraph=True, dynamic=True)
    for n, p in ((5, 0.5), (7, 0.5), (130, 0.25), (64, 0.75)):
        x = torch.randn(n, 3, device=device)
        torch.testing.assert_close(compiled(x, p), tg.dropout(x, p, seed=1))
        torch.testing.assert_close(compiled(x.t(), p), tg.dropout(x.t(), p, seed=1))


def test_dropout_compiled_without_a_seed_draws_anew(device):
    compiled = torch.compile(lambda a: tg.dropout(a, 0.5), fullgraph=True)
    x = torch.ones(200, device=device, requires_grad=True)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    (dx,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(first, dx)


def test_dropout_in_autocast_keeps_its_dtype(device):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert tg.dropout(torch.ones(3, device=device)).dtype == torch.float32


@pytest.mark.gpu
def test_dropout_draws_a_new_mask_at_each_graph_replay(device):
    x = torch.ones(4096, device=device)
    tg.dropout(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn, fixed = tg.dropout(x), tg.dropout(x, seed=3)
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(drawn.clone())
        assert torch.equal(fixed, tg.dropout(x, seed=3))
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.gpu
def test_dropout_never_waits_for_the_device(device):
    x = torch.randn(100, 50, device=device, requires_grad=True)
    seed = torch.tensor(3, device=device)
    for t in (x, x.t()):
        tg.dropout(t, seed=seed).sum().backward()  # compiled before, so that the calls below only launch
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in (x, x.t()):
            tg.dropout(t).sum().backward()
            tg.dropout(t, seed=3)
            tg.dropout(t, seed=seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_dropout_of_more_than_2_to_the_31_elements(device):
    n = 2**31 + 12345
    x = torch.ones(n, dtype=torch.float16, device=device)
    out = tg.dropout(x, 0.5, seed=4)
    tail = torch.from_numpy(draws(4, np.arange(n - 2000, n)) >= 2**31).to(device)
    assert torch.equal(kept(out[-2000:]), tail)
    assert abs(kept(out).double().mean().item() - 0.5) < 4 * 0.5 / math.sqrt(n)


def test_dropout_takes_numbers_of_numpy(device):
    x = torch.randn(150, device=device)
    expected = tg.dropout(x, 0.25, seed=77)
    for p in (np.float16(0.25), np.float32(0.25), np.float64(0.25)):
        for seed in (77, np.int64(77), np.uint8(77)):
            assert torch.equal(tg.dropout(x, p, seed=seed), expected)
    assert torch.equal(tg.dropout(x, seed=np.uint64(2**64 - 1)), tg.dropout(x, seed=-1))
    assert torch.equal(tg.dropout(x, np.int64(1)), torch.zeros_like(x))
    with pytest.raises(ValueError, match=r"dropout: p must be in \[0, 1\], got 1.5"):
        tg.dropout(x, np.float32(1.5))


# --- refusals ---


@pytest.mark.parametrize("p", [-0.1, 1.0000001, 2, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_refuses_p_outside_0_to_1(p, training, device):
    with pytest.raises(ValueError, match=r"dropout: p must be in \[0, 1\], got"):
        tg.dropout(torch.ones(3, device=device), p, training)


@pytest.mark.parametrize("p", [True, None, "0.5", torch.tensor(0.5), np.True_, np.ones(1)], ids=repr)
def test_dropout_refuses_p_of_another_type(p, device):
    with pytest.raises(TypeError, match="dropout: p must be a Python number"):
        tg.dropout(torch.ones(3, device=device), p)


@pytest.mark.parametrize("training", [1, None, "yes"], ids=str)
def test_dropout_refuses_training_of_another_type(training, device):
    with pytest.raises(TypeError, match="dropout: training must be True or False"):
        tg.dropout(torch.ones(3, device=device), 0.5, training)


@pytest.mark.parametrize("seed", [True, 1.0, "1", [1]], ids=str)
def test_dropout_refuses_a_seed_of_another_type(seed, device):
    with pytest.raises(TypeError, match="dropout: seed must be an int, an integer tensor or None"):
        tg.dropout(torch.ones(3, device=device), seed=seed)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**5000], ids=["2**64", "-2**63 - 1", "10**5000"])
def test_dropout_refuses_a_seed_beyond_64_bits(seed, device):
    with pytest.raises(ValueError, match=r"dropout: seed must be in \[-2\*\*63, 2\*\*64\), got"):
        tg.dropout(torch.ones(3, device=device), seed=seed)


@pytest.mark.parametrize("seed", [torch.tensor(0.5), torch.tensor(True)], ids=["float", "bool"])
def test_dropout_refuses_a_tensor_seed_of_another_dtype(seed, device):
    with pytest.raises(TypeError, match="dropout: seed must have one of the dtypes"):
        tg.dropout(torch.ones(3, device=device), seed=seed.to(device))


@pytest.mark.parametrize("shape", [(2,), (0,)], ids=str)
def test_dropout_refuses_several_seeds(shape, device):
    with pytest.raises(ValueError, match="dropout: seed must hold one element"):
        tg.dropout(torch.ones(3, device=device), seed=torch.zeros(shape, dtype=torch.int64, device=device))


@pytest.mark.gpu
def test_dropout_refuses_a_seed_on_another_device(device):
    with pytest.raises(ValueError, match="dropout: seed must be on"):
        tg.dropout(torch.ones(3, device=device), seed=torch.tensor(1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_dropout_refuses_other_dtypes(dtype, device):
    with pytest.raises(TypeError, match="dropout: x must have one of the dtypes"):
        tg.dropout(torch.ones(3, device=device).to(dtype))


def test_dropout_refuses_what_is_no_tensor():
    with pytest.raises(TypeError, match=r"dropout: x must be a torch.Tensor, got list"):
        tg.dropout([1.0, 2.0])


@pytest.mark.parametrize("p", [2, math.nan, -0.5, 1.5], ids=str)
def test_dropout_that_refuses_p_draws_no_seed(p, monkeypatch, device):
    module = sys.modules["triton_gallery.dropout"]
    monkeypatch.setattr(module, "_draws_on_host", lambda x: True)
    monkeypatch.setattr(module, "_draw_seed", lambda generator: pytest.fail("a seed was drawn"))
    with pytest.raises(ValueError, match="dropout: p must be in"):
        tg.dropout(torch.ones(3, device=device), p)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["integer", "sparse", "nested"])
def test_dropout_that_refuses_x_draws_no_seed(kind, device):
    x = torch.ones(3, device=device)
    x = {"integer": x.int(), "sparse": x.to_sparse(), "nested": torch.nested.nested_tensor([x])}[kind]
    state = torch.cuda.get_rng_state(device)
    with pytest.raises(TypeError, match="dropout: x must"):
        tg.dropout(x)
    assert torch.equal(torch.cuda.get_rng_state(device), state)


def test_dropout_takes_a_sparse_gradient(device):
    weight = torch.randn(7, 4, device=device, requires_grad=True)
    rows = torch.tensor([2, 5], device=device)
    grads = []
    for sparse in (True, False):
        out = F.embedding(rows, tg.dropout(weight, 0.25, seed=1), sparse=sparse)
        grads += torch.autograd.grad(out.square().sum(), weight)
    assert torch.equal(*grads) and grads[0].layout == torch.strided


# --- fuzz ---


@st.composite
def strided_tensors(draw):
    """Shape, strides, offset and the memory they span: dimensions permuted, stepped or expanded."""
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    steps = [draw(st.sampled_from([0, 1, 1, 2])) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    strides, span = [0] * len(shape), 1
    for d in order:
        strides[d] = span * steps[d]
        span += (shape[d] - 1) * strides[d]
    return shape, strides, draw(st.integers(0, 3)), span


@FUZZ
def test_dropout_on_fuzzed_inputs(fuzz):
    def check(layout, dtype, p, seed):
        shape, strides, offset, span = layout
        x = torch.randn(offset + span, device=DEVICE).to(dtype).as_strided(shape, strides, offset)
        out = tg.dropout(x, p, seed=seed)
        mask = expected_mask(x.shape, p, seed, DEVICE) if p < 1 else torch.zeros_like(x, dtype=torch.bool)
        wide = x.double() if dtype == torch.float64 else x.float()
        scale = torch.tensor(1 / (1 - p) if p < 1 else 0.0, dtype=wide.dtype, device=DEVICE)
        assert torch.equal(out, torch.where(mask, wide * scale, 0).to(dtype))

    seeds = st.integers(-(2**63), 2**64 - 1)
    fuzz(check, layout=strided_tensors(), dtype=st.sampled_from(FLOATS), p=st.floats(0, 1), seed=seeds)
