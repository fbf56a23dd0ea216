import functools
import importlib
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import triton_gallery as tg
from accuracy import DEVICE, FUZZ, assert_as_accurate_as_torch
from triton_gallery import hopper

# The package's name `attention` is the function; this is its module.
module = importlib.import_module("triton_gallery.attention")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)
INF, NAN = math.inf, math.nan
# What each mask is called, and the arguments that ask for it.
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal bottom-right": {"is_causal": True, "causal_alignment": "bottom-right"},
    "window": {"window": (7, 20)},
    "causal window": {"window": (33, None), "is_causal": True},
    "window bottom-right": {"window": (20, 3), "causal_alignment": "bottom-right"},
}
MASK = pytest.mark.parametrize("mask", MASKS)


def allowed(seq_q, seq_k, is_causal=False, window=None, causal_alignment="top-left", device="cpu"):
    """The mask spelt out: whether query i may see key j."""
    position = torch.arange(seq_q, device=device)[:, None] + (
        seq_k - seq_q if causal_alignment == "bottom-right" else 0
    )
    key = torch.arange(seq_k, device=device)[None, :]
    left, right = window if isinstance(window, tuple) else (window, window)
    mask = torch.ones(seq_q, seq_k, dtype=torch.bool, device=device)
    if is_causal:
        mask &= key <= position
    if left is not None:
        mask &= key >= position - left
    if right is not None:
        mask &= key <= position + right
    return mask


def materialised(q, k, v, mask, scale=None):
    """Attention by the book: every score in memory. Returns the output and the logsumexp."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    s = (q @ k.mT * scale).masked_fill(~mask, -INF)
    lse = s.logsumexp(-1)
    seen = mask.any(-1)[:, None]
    p = torch.where(mask, (s - lse[..., None].masked_fill(~seen, 0)).exp(), 0)
    return p @ v, lse


def torchs(q, k, v, mask, scale=None):
    """What torch makes of it in the same dtype; rows with no allowed key are left out of its softmax."""
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | ~mask.any(-1)[:, None], scale=scale, enable_gqa=True)
    return out.masked_fill(~mask.any(-1)[:, None], 0)


def inputs(shape_q, shape_k, dtype=torch.float32, device="cpu", head_dim_v=None):
    shape_v = (*shape_k[:-1], head_dim_v or shape_k[-1])
    return [torch.randn(shape, device=device).to(dtype) for shape in (shape_q, shape_k, shape_v)]


def with_gradients(call, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = call(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


# What is granted beyond a multiple of torch's own error, relative to the largest value. float32: torch subtracts each
# row's maximum once, we rescale what was summed whenever it grows. float64 has only another order of sums for a
# reference.
FLOOR = {torch.float16: 2e-4, torch.bfloat16: 2e-3, torch.float32: 1e-6, torch.float64: 5e-15}


def gradient_terms(q, k, v, mask, scale, dout):
    """Upper bounds of what dq, dk and dv are sums of: their terms cancel, all of them in a row with one key."""
    scale = abs(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    n_kv_heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    p = materialised(
        q, k, torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1), mask, scale
    )[0]
    dp = dout.abs() @ v.mT.abs()
    ds = p * (dp + (p * dp).sum(-1, keepdim=True)) * scale

    def per_kv_head(x):
        return x.unflatten(1, (n_kv_heads, repeats)).sum(2)

    return ds @ k.abs(), per_kv_head(ds.mT @ q.abs()), per_kv_head(p.mT @ dout.abs())


def check(q, k, v, scale=None, dout=None, alike=False, **mask_kwargs):
    """Output and gradients against float64: as accurate as torch's own, but for a floor.

    `alike` says that the terms of a sum may all be the same number. Then its roundings all go the same way, and the
    floor is the bound on the error of a sum of n terms, n roundings.
    """
    mask = allowed(q.shape[2], k.shape[2], **mask_kwargs, device=q.device)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], device=q.device).to(q.dtype) if dout is None else dout

    def ours(q, k, v):
        return tg.attention(q, k, v, scale=scale, enable_gqa=True, **mask_kwargs)

    result = with_gradients(ours, q, k, v, dout)
    # Dense copies: on a GPU torch's own kernels were seen to give NaN, or to fault, on some of the strides we accept.
    dense = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v, dout)]
    expected = with_gradients(functools.partial(torchs, mask=mask, scale=scale), *dense)
    wide = [x.double() for x in (q, k, v)]
    reference = with_gradients(lambda *x: materialised(*x, mask, scale)[0], *wide, dout.double())
    floor = FLOOR[q.dtype]
    if alike:
        n_terms = max(q.shape[2] * q.shape[1] // k.shape[1], k.shape[2], q.shape[3])
        floor = 4 * floor + n_terms * torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps / 2
    # The terms of the output cancel, too, where it is the mean of many values.
    cancelled = materialised(*wide[:2], wide[2].abs(), mask, scale)[0].max() / reference[0].abs().max()
    cancelled = cancelled.item() if cancelled.isfinite() else 1
    assert_as_accurate_as_torch(result[0], expected[0], reference[0], floor=floor * cancelled)
    terms = gradient_terms(*wide, mask, scale, dout.double())
    for x, theirs, exact, size in zip(result[1:], expected[1:], reference[1:], terms, strict=True):
        assert x.dtype == theirs.dtype and x.shape == theirs.shape
        error, torchs_error = (x - exact).abs().max(), (theirs - exact).abs().max()
        assert error <= 3 * torchs_error + floor * size.max()
    return result


# --- dtypes, head dimensions, lengths ---


@DTYPES
@pytest.mark.parametrize("head_dim", [1, 8, 40, 64, 80, 128, 256])
def test_attention_matches_torch(dtype, head_dim, device):
    q, k, v = inputs((1, 2, 67, head_dim), (1, 2, 70, head_dim), dtype, device)
    check(q, k, v, is_causal=head_dim != 64)


@pytest.mark.parametrize(
    ("seq_q", "seq_k"),
    [(1, 1), (1, 130), (130, 1), (2, 3), (17, 15), (32, 31), (33, 64), (63, 65), (64, 64), (127, 96), (129, 130)],
)
@MASK
def test_attention_of_any_lengths(seq_q, seq_k, mask, device):
    q, k, v = inputs((1, 1, seq_q, 16), (1, 1, seq_k, 16), torch.float32, device)
    check(q, k, v, **MASKS[mask])


# The kernels for Hopper add up dQ in memory, unless each run has to give the same bits.
BOTH_WAYS = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])


@pytest.mark.gpu
@BOTH_WAYS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seq_q", "seq_k"), [(1, 130), (64, 300), (129, 257), (132, 122), (300, 128), (385, 64), (640, 640), (2100, 2176)]
)
def test_kernels_for_hopper_of_any_lengths(seq_q, seq_k, is_causal, head_dim, deterministic, device):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    q, k, v = inputs((1, 6, seq_q, head_dim), (1, 6, seq_k, head_dim), torch.float16, device)
    check(q, k, v, is_causal=is_causal)
    check(q, k[:, :2], v[:, :2], is_causal=is_causal)


@pytest.mark.gpu
@BOTH_WAYS
@pytest.mark.parametrize(
    "head_dims",
    [
        (5, 5),
        (40, 160),
        (64, 100),
        (72, 72),
        (80, 96),
        (96, 40),
        (96, 256),
        (192, 96),
        (192, 128),
        (192, 180),
        (200, 200),
    ],
    ids=str,
)
@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"window": (40, 7)}], ids=str)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(129, 257), (300, 290), (640, 640)])
def test_kernels_for_hopper_of_any_head_dim(head_dims, kwargs, seq_q, seq_k, deterministic, device):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    head_dim, head_dim_v = head_dims
    q, k, v = inputs((1, 4, seq_q, head_dim), (1, 2, seq_k, head_dim), torch.bfloat16, device, head_dim_v)
    check(q, k, v, **kwargs)


@pytest.mark.gpu
@BOTH_WAYS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(0, 3), (1, 0), (63, 0), (64, 64), (200, 0), (129, 300), (None, 5), (300, None)])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(100, 700), (700, 700), (513, 450)])
def test_kernels_for_hopper_of_any_window(head_dim, window, seq_q, seq_k, deterministic, device):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    q, k, v = inputs((1, 2, seq_q, head_dim), (1, 2, seq_k, head_dim), torch.float16, device)
    check(q, k, v, window=window)
    check(q, k, v, window=window, causal_alignment="bottom-right")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head_dims", [(64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256)], ids=str
)
@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"window": (100, 7)}], ids=str)
def test_programs_for_hopper_that_own_several_tiles(head_dims, kwargs, device):
    head_dim, head_dim_v = head_dims
    q, k, v = inputs((2, 20, 1030, head_dim), (2, 20, 1030, head_dim), torch.float16, device, head_dim_v)
    check(q, k, v, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", [(64, 64), (72, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "kwargs", [{}, {"window": (None, 5)}, {"is_causal": True, "causal_alignment": "bottom-right"}], ids=str
)
def test_programs_for_hopper_that_share_a_query_tile(head_dims, kwargs, device):
    forward = importlib.import_module("triton_gallery.hopper.attention_forward")
    assert forward._num_splits(18, 40, torch.device(device)) > 1
    head_dim, head_dim_v = head_dims
    q, k, v = inputs((1, 6, 300, head_dim), (1, 2, 5000, head_dim), torch.float16, device, head_dim_v)
    check(q, k, v, **kwargs)
    # All scores of one program are -inf.
    q, k[:, :, 2500:] = q.abs(), float("-inf")
    if "window" not in kwargs:
        out, lse = tg.attention(q, k, v, enable_gqa=True, return_lse=True)
        fewer, fewer_lse = tg.attention(q, k[:, :, :2500], v[:, :, :2500], enable_gqa=True, return_lse=True)
        torch.testing.assert_close(out, fewer, rtol=2e-3, atol=1e-4)
        torch.testing.assert_close(lse, fewer_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", [(64, 64), (72, 96), (128, 128)], ids=str)
@pytest.mark.parametrize("n_kv_heads", [20, 4])
@BOTH_WAYS
@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"window": (500, None)}, {"window": (300, 60)}], ids=str)
def test_programs_for_hopper_that_share_a_key_tile(head_dims, n_kv_heads, kwargs, deterministic, device):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    n_processors = module.num_multiprocessors(torch.device(device))
    shares = importlib.import_module("triton_gallery.hopper.attention_backward")._shares
    n_limits = 2 if kwargs == {"window": (300, 60)} else len(kwargs)
    n_tiles, n_steps = 9 * n_kv_heads, 9 if n_limits == 2 else 18
    n_whole, n_parts = shares(n_tiles, n_steps, 20 // n_kv_heads, 256, n_limits, n_processors)
    # Under a mask, many tiles are not shared.
    assert (n_whole < n_tiles and n_parts > 1) == (n_limits == 0 or n_tiles < n_processors)
    head_dim, head_dim_v = head_dims
    q, k, v = inputs((1, 20, 1030, head_dim), (1, n_kv_heads, 1030, head_dim), torch.float16, device, head_dim_v)
    dout = torch.randn(1, 20, 1030, head_dim_v, device=device).half()
    first, second = (check(q, k, v, dout=dout, **kwargs) for _ in "12")
    # dK and dV repeat bit for bit.
    assert all(torch.equal(x, y) for x, y in zip(first[2:], second[2:], strict=True))


@pytest.mark.gpu
def test_many_heads(device):
    q, k, v = inputs((1, 50_000, 9, 136), (1, 50_000, 9, 136), torch.float16, device)
    check(q, k, v)


# --- few queries and keys: the backward of a head in one program ---


def observed_launches(where, monkeypatch):
    """A list to which each launch by the functions of a module adds its kernel and its options."""
    launches, launch = [], where.launch

    def observed(kernel, *args, **meta):
        launches.append((kernel, meta))
        launch(kernel, *args, **meta)

    monkeypatch.setattr(where, "launch", observed)
    return launches


@pytest.mark.parametrize(
    ("window", "cuts"), [((4, 8), (False, False)), ((3, 8), (True, False)), ((4, 7), (False, True))], ids=str
)
def test_limits_that_cut_nothing_are_none(window, cuts, device, monkeypatch):
    launches = observed_launches(module, monkeypatch)
    q, k, v = inputs((1, 2, 5, 16), (1, 2, 9, 16), device=device)
    with_gradients(functools.partial(tg.attention, window=window), q, k, v, torch.ones_like(q))
    masks = {(meta["HAS_LOWER"], meta["HAS_UPPER"]) for _, meta in launches if "HAS_LOWER" in meta}
    assert masks == {cuts}


def test_equal_tiles_are_taken_in_turn():
    """The schedule of equal tiles, which is made at once, is that of any tiles."""
    forward = importlib.import_module("triton_gallery.hopper.attention_forward")
    for n_tiles, n_heads, n_programs in ((1, 7, 3), (3, 10, 30), (4, 33, 8), (2, 66, 132)):
        in_turn = forward._in_turn(n_tiles, n_heads, n_programs, 9)
        assert torch.equal(in_turn, forward._longest_first([8] * n_tiles, n_heads, 4, n_programs, 9))


@pytest.mark.parametrize("n_parts", [1, 3])
@pytest.mark.parametrize(("lower", "upper"), [(None, 0), (-300, None), (-500, 70)], ids=str)
def test_each_part_of_a_key_tile_is_an_item_of_one_program(lower, upper, n_parts):
    backward = importlib.import_module("triton_gallery.hopper.attention_backward")
    n_heads, n_kv_tiles, n_q_tiles, n_programs = 7, 9, 18, 13
    rest = (n_parts, lower, upper, 2, n_programs, torch.device("cpu"))
    schedule = backward._schedule_for(n_heads, n_kv_tiles, n_q_tiles, *rest)
    assert schedule.shape[0] == n_programs and bool((schedule[:, -1] < 0).all())
    programs = [[item for item in row if item >= 0] for row in schedule.tolist()]
    found = [item for items in programs for item in items]
    assert sorted(found) == list(range(n_heads * n_kv_tiles * n_parts))

    def n_pairs(item):
        """How many pairs of a query tile and this key tile have one that is allowed; a part has its share of them."""
        key = item // n_parts % n_kv_tiles * 128
        distances = [(key - 64 * tile - 63, key + 127 - 64 * tile) for tile in range(n_q_tiles)]
        n = sum((lower is None or b >= lower) and (upper is None or a <= upper) for a, b in distances)
        return (item % n_parts + 1) * n // n_parts - item % n_parts * n // n_parts

    loads = [sum(map(n_pairs, items)) for items in programs]
    assert max(loads) - min(loads) <= max(map(n_pairs, found))


def test_key_tiles_without_limits_are_taken_in_turn():
    backward = importlib.import_module("triton_gallery.hopper.attention_backward")
    assert backward._schedule_for(7, 9, 18, 1, None, None, 2, 132, torch.device("cpu")) is None


@pytest.mark.parametrize("n_kv_tiles", [(8, 8), (2, 1)], ids=["equal", "unequal"])
def test_a_schedule_is_made_on_the_host(n_kv_tiles):
    forward = importlib.import_module("triton_gallery.hopper.attention_forward")
    with torch.device("meta"):
        schedule = forward.schedule.__wrapped__(n_kv_tiles, 2, 1, 4, 10, torch.device("cpu"))
    assert sorted(schedule.flatten().tolist())[-4:] == [0, 1, 10, 11]


@MASK
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "group", "head_dims"),
    [
        (1, 1, 1, (16, 16)),
        (17, 15, 3, (40, 24)),
        (49, 49, 1, (32, 32)),
        (33, 64, 2, (64, 128)),
        (64, 2, 1, (100, 72)),
        (5, 32, 4, (1, 5)),
        (128, 77, 1, (24, 32)),
    ],
    ids=str,
)
def test_short_sequences(seq_q, seq_k, group, head_dims, mask, device, monkeypatch):
    launches = observed_launches(module, monkeypatch)
    head_dim, head_dim_v = head_dims
    q, k, v = inputs((2, 2 * group, seq_q, head_dim), (2, 2, seq_k, head_dim), torch.float16, device, head_dim_v)
    check(q, k, v, **MASKS[mask])
    assert module._attention_bwd_short_kernel in [kernel for kernel, _ in launches]


@pytest.mark.gpu
@MASK
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "head_dim"),
    [
        (49, 49, 64),
        (77, 77, 64),
        (64, 120, 40),
        (128, 128, 64),
        (700, 90, 64),
        (130, 145, 48),
        (20, 250, 64),
        (197, 197, 64),
        (250, 129, 64),
        (256, 256, 64),
    ],
    ids=str,
)
def test_programs_for_hopper_that_own_all_keys_of_a_head(seq_q, seq_k, head_dim, mask, device, monkeypatch):
    launches = observed_launches(hopper.load("attention_heads_backward"), monkeypatch)
    # Two or three heads for each multiprocessor of an H200; their rows lie between those of other heads.
    q, k, v = (torch.randn(25, n, 12, head_dim, device=device).half().transpose(1, 2) for n in (seq_q, seq_k, seq_k))
    dout = torch.randn(25, 12, seq_q, head_dim, device=device).half()
    first, second = (check(q, k, v, dout=dout, **MASKS[mask]) for _ in "12")
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    # (A query without keys is left to the other kernels.)
    assert bool(launches) == allowed(seq_q, seq_k, **MASKS[mask], device=device).any(-1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("seq_len", [70, 200])
def test_programs_for_hopper_keep_heads_and_keys_apart(seq_len, value, device, monkeypatch):
    launches = observed_launches(hopper.load("attention_heads_backward"), monkeypatch)
    q, k, v = inputs((300, 1, seq_len - 6, 64), (300, 1, seq_len, 64), torch.float16, device)
    dout = torch.randn_like(q)
    call = functools.partial(tg.attention, is_causal=True)
    clean = with_gradients(call, q, k, v, dout)
    k[:, :, -6:] = value  # no query sees these
    v[7], q[150] = value, value
    others = [i for i in range(300) if i not in (7, 150)]
    _, _, dk, dv = with_gradients(call, q, k, v, dout)
    for gradient, expected in zip((dk, dv), clean[2:], strict=True):
        torch.testing.assert_close(gradient[others], expected[others], rtol=0, atol=0)
    assert (dk[others][:, :, -6:] == 0).all() and (dv[others][:, :, -6:] == 0).all()
    assert launches


def test_few_programs_do_not_walk_many_heads():
    def config(batch, heads, seq_len, head_dim):
        q, k = (torch.empty(batch, n, seq_len, head_dim, dtype=torch.float16, device="meta") for n in (heads, 1))
        return module._short_config(q, k, k)

    assert config(8, 16, 64, 128) is None and config(8, 8, 64, 64) is None
    assert config(64, 16, 64, 128) == dict(BLOCK=64, num_warps=4, num_stages=1)
    assert config(8, 4, 49, 64) == config(1, 1, 64, 64) == dict(BLOCK=64, num_warps=4, num_stages=1)


def test_short_sequences_of_any_strides(device):
    q, k, v = (torch.randn(40, 3, 2, 16, device=device).half().permute(1, 2, 0, 3) for _ in "qkv")
    check(q, k.mT.contiguous().mT, v.flip(2)[:, :, ::2].repeat_interleave(2, 2), is_causal=True)
    check(q, k[:, :1], v[:, :1], dout=torch.ones(1, 1, 1, 1, device=device).half().expand(3, 2, 40, 16), scale=0.3)


# --- few queries: the keys are split among programs ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("n_splits", "seq_q", "group", "head_dim", "head_dim_v"),
    [(1, 1, 1, 64, 64), (2, 3, 4, 40, 24), (5, 20, 3, 16, 16), (20, 5, 3, 130, 256)],
)
def test_splits_of_the_keys(n_splits, dtype, seq_q, group, head_dim, head_dim_v, device, monkeypatch):
    monkeypatch.setattr(module, "_num_splits", lambda *args: n_splits)
    q, k, v = inputs((2, 2 * group, seq_q, head_dim), (2, 2, 150, head_dim), dtype, device, head_dim_v)
    # In the interpreter, all masks with the small tiles of one dtype.
    has_time = device.type != "cpu" or (dtype == torch.float32 and head_dim < 100)
    for kwargs in list(MASKS.values())[: None if has_time else 1]:
        mask = allowed(seq_q, 150, **kwargs, device=device)
        out, lse = tg.attention(q, k, v, enable_gqa=True, return_lse=True, **kwargs)
        exact, exact_lse = materialised(q.double(), k.double(), v.double(), mask)
        assert_as_accurate_as_torch(out, torchs(q, k, v, mask), exact, floor=FLOOR[dtype])
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_splits_of_strided_keys_with_a_negative_scale(device, monkeypatch):
    monkeypatch.setattr(module, "_num_splits", lambda *args: 3)
    q, k, v = (torch.randn(1, n, 8, 4, device=device).permute(0, 3, 1, 2) for n in (4, 90, 90))
    check(q, k, v, scale=-0.3)
    check(q, k.mT.contiguous().mT, v[:, :, ::2].repeat_interleave(2, 2), is_causal=True)


@pytest.mark.parametrize("size", [1e4, 1e5, 1e6, 2.0**40])
def test_splits_of_large_scores_join_exactly(size, device, monkeypatch):
    monkeypatch.setattr(module, "_num_splits", lambda *args: 3)
    q, k = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, 1, 90, 16, device=device)
    v = torch.randn(1, 1, 90, 16, device=device)
    # The scores of two keys in different splits differ by a little, and both are exact in float32.
    step = max(1.0, size * 2.0**-23)
    q[..., 0], k[..., 0], scale = 1, size, 0.3 / step
    k[:, :, :, 0] -= 1000 * step
    k[:, :, 5, 0], k[:, :, 80, 0] = size, size - step
    out, lse = tg.attention(q, k, v, scale=scale, return_lse=True)
    everything = torch.ones(1, 90, dtype=torch.bool, device=device)
    exact, exact_lse = materialised(q.double(), k.double(), v.double(), everything, scale)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=0)


def test_splits_join_by_their_logsumexps(device):
    q, k, v = inputs((1, 2, 5, 16), (1, 2, 40, 16), torch.float32, device)
    parts = [tg.attention(q, k[:, :, keys], v[:, :, keys], return_lse=True) for keys in (slice(13), slice(13, 40))]
    expected = [x.clone() for x in tg.attention(q, k, v, return_lse=True)]
    # One query sees no key of the first part, and another one no key at all.
    (first_out, first_lse), (second_out, second_lse) = parts
    for i, seen in ((1, parts[1]), (2, (torch.zeros_like(q), torch.full_like(first_lse, -INF)))):
        first_out[:, :, i], first_lse[:, :, i] = 0, -INF
        expected[0][:, :, i], expected[1][:, :, i] = seen[0][:, :, i], seen[1][:, :, i]
    second_out[:, :, 2], second_lse[:, :, 2] = 0, -INF
    out, lse = torch.empty_like(q), torch.empty_like(first_lse)
    module.join_splits(*(torch.stack(x, 3) for x in zip(*parts, strict=True)), None, out, lse, 1.0)
    torch.testing.assert_close((out, lse), tuple(expected))


def test_few_queries_split_the_keys(device):
    n = module.num_multiprocessors(device)
    q, k = torch.empty(1, 8, 1, 64, device=device).half(), torch.empty(1, 2, 8192, 64, device=device).half()
    assert module._num_splits(q, k) == min(n, 8192 // module._MIN_SPLIT_KEYS)
    assert module._num_splits(q, k[:, :, :500]) == 0  # few keys
    assert module._num_splits(q.expand(1, 8, 16, 64), k) > 0 == module._num_splits(q.expand(1, 8, 17, 64), k)
    q, k = q.float(), k.float()  # which take more room
    assert module._num_splits(q.expand(1, 8, 4, 64), k) > 0 == module._num_splits(q.expand(1, 8, 5, 64), k)
    assert module._num_splits(q.double(), k.double()) == 0
    assert module._num_splits(q[:, :2].expand(n, 2, 1, 64), k.expand(n, 2, 8192, 64)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim"),
    [(1, 32, 8, 1, 5000, 128), (3, 16, 16, 1, 4097, 64), (2, 16, 2, 8, 1024, 128), (1, 8, 1, 1, 20_000, 256)],
)
def test_a_few_queries_of_long_sequences(batch, heads, kv_heads, seq_q, seq_k, head_dim, mask, device):
    q, k, v = inputs((batch, heads, seq_q, head_dim), (batch, kv_heads, seq_k, head_dim), torch.float16, device)
    assert module._num_splits(q, k) > 1
    check(q, k, v, **MASKS[mask])


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dims"),
    [
        (20, 32, 8, 1, 1000, (128, 128)),
        (95, 16, 4, 1, 640, (64, 64)),
        (95, 2, 2, 160, 300, (64, 64)),
        (60, 2, 2, 300, 20, (128, 96)),
        (60, 4, 2, 190, 1000, (80, 80)),
        (100, 6, 6, 49, 49, (32, 32)),
        (60, 8, 8, 64, 64, (128, 128)),
        (100, 3, 1, 1, 513, (192, 128)),
        (100, 8, 1, 1, 77, (72, 96)),
        (100, 2, 1, 1, 300, (256, 256)),
        (9, 10, 10, 64, 1, (96, 64)),
    ],
    ids=str,
)
def test_a_few_queries_of_many_sequences(batch, heads, kv_heads, seq_q, seq_k, head_dims, mask, device, monkeypatch):
    head_dim, head_dim_v = head_dims
    shapes = (batch, heads, seq_q, head_dim), (batch, kv_heads, seq_k, head_dim)
    q, k, v = inputs(*shapes, torch.float16, device, head_dim_v)
    launches = observed_launches(importlib.import_module("triton_gallery.hopper.attention_forward"), monkeypatch)
    check(q, k, v, **MASKS[mask])
    if mask == "full" and max(head_dims) <= 192:
        assert {meta["NUM_CONSUMERS"] for _, meta in launches} == {1}


@pytest.mark.gpu
def test_programs_that_keep_memory_busy(device):
    def keeps_memory_busy(n_heads, head_dim=64):
        x = torch.empty(1, n_heads, 1, head_dim, device=device).half()
        return importlib.import_module("triton_gallery.hopper.attention_forward").keeps_memory_busy(x, x)

    n = module.num_multiprocessors(device)
    assert all(map(keeps_memory_busy, (n, 2 * n, 3 * n, 4 * n)))
    assert not any(map(keeps_memory_busy, (1, n // 2, 3 * n + 1)))  # the last of these is alone in the second round
    assert keeps_memory_busy(n + n // 4) and not keeps_memory_busy(n + n // 4, head_dim=256)


@MASK
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_attention_masks_in_other_dtypes(mask, dtype, device):
    q, k, v = inputs((1, 1, 100, 16), (1, 1, 90, 16), dtype, device)
    check(q, k, v, **MASKS[mask])


@pytest.mark.parametrize("window", [0, 1, 5, 31, 32, 64, 1000, (0, 0), (0, None), (None, 0), (None, 7), (2**40, 3)])
@pytest.mark.parametrize("causal_alignment", ["top-left", "bottom-right"])
def test_attention_windows(window, causal_alignment, device):
    q, k, v = inputs((1, 1, 90, 8), (1, 1, 105, 8), torch.float32, device)
    check(q, k, v, window=window, causal_alignment=causal_alignment)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 24), (40, 8), (1, 130), (65, 1)])
def test_v_may_have_another_head_dim(head_dim, head_dim_v, device):
    q, k, v = inputs((1, 2, 40, head_dim), (1, 2, 70, head_dim), torch.float32, device, head_dim_v)
    check(q, k, v, is_causal=True)


@pytest.mark.parametrize("scale", [0.3, 1, -0.2, 0.0, 0])
def test_attention_scales(scale, device):
    q, k, v = inputs((1, 2, 40, 8), (1, 2, 70, 8), torch.float32, device)
    check(q, k, v, scale=scale, window=(11, 4))


def test_scales_too_small_for_float32_count_as_0(device):
    q, k, v = inputs((1, 1, 9, 8), (1, 1, 12, 8), torch.float32, device)
    check(q, k, v, scale=1e-46)
    check(q.double(), k.double(), v.double(), scale=1e-46)


def test_compiled_attention_takes_scales_that_vary(device):
    compiled = torch.compile(lambda q, s: tg.attention(q, q, q, scale=s), fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 2, 4, 8, device=device)
    for scale in (0.5, 0.25, -1.0):
        expected = F.scaled_dot_product_attention(q, q, q, scale=scale)
        torch.testing.assert_close(compiled(q, scale), expected, rtol=1e-4, atol=1e-5)


def test_scale_keeps_all_digits_in_float64(device):
    q, k, v = inputs((1, 1, 20, 8), (1, 1, 30, 8), torch.float64, device)
    check(q, k, v, scale=0.1)


# --- heads, batches, leading dimensions ---


def test_four_dimensions_need_no_views(device):
    q, k, v = (torch.randn(1, 2, 5, 8, device=device, requires_grad=True) for _ in range(3))
    out = tg.attention(q, k, v)
    steps = [step for step, _ in out.grad_fn.next_functions if step is not None]
    # No step of the backward pass lies between attention's and the inputs.
    assert len(steps) == 3 and all(step.variable is x for step, x in zip(steps, (q, k, v), strict=True))


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 2), (6, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_heads_share_keys(n_heads, n_kv_heads, mask, device):
    q, k, v = inputs((2, n_heads, 40, 8), (2, n_kv_heads, 50, 8), torch.float32, device)
    check(q, k, v, **MASKS[mask])


def test_sections_of_heads_cover_every_tile(device, monkeypatch):
    # Two heads fit, the last section has one; with it the programs' order differs from that of the heads.
    monkeypatch.setattr(module, "_L2_BYTES", 2 * 70 * 16 * 4)
    q, k, v = inputs((1, 5, 70, 8), (1, 5, 70, 8), torch.float32, device)
    check(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("shape_q", "shape_k", "shape_v"),
    [
        ((9, 8), (12, 8), (12, 8)),
        ((3, 9, 8), (3, 12, 8), (3, 12, 5)),
        ((2, 3, 4, 9, 8), (2, 3, 4, 12, 8), (2, 3, 4, 12, 8)),
        ((2, 4, 9, 8), (1, 1, 12, 8), (1, 1, 12, 8)),
        ((2, 4, 9, 8), (12, 8), (12, 8)),
        ((9, 8), (2, 3, 12, 8), (12, 8)),
        ((3, 1, 9, 8), (1, 2, 12, 8), (3, 2, 12, 8)),
        ((2, 1, 3, 9, 8), (5, 1, 12, 8), (5, 3, 12, 8)),
    ],
    ids=str,
)
def test_leading_dimensions_broadcast_as_torchs(shape_q, shape_k, shape_v, device):
    q, k, v = (torch.randn(shape, device=device, dtype=torch.float64) for shape in (shape_q, shape_k, shape_v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v)
        dout = torch.randn_like(expected)
        expected = with_gradients(F.scaled_dot_product_attention, q, k, v, dout)
    torch.testing.assert_close(with_gradients(tg.attention, q, k, v, dout), expected)


@pytest.mark.parametrize(
    ("shape_q", "shape_k"),
    [
        ((0, 2, 5, 8), (0, 2, 7, 8)),
        ((2, 0, 5, 8), (2, 0, 7, 8)),
        ((2, 2, 0, 8), (2, 2, 7, 8)),
        ((2, 2, 5, 8), (2, 2, 0, 8)),
        ((2, 2, 0, 8), (2, 2, 0, 8)),
        ((1, 0, 2, 5, 8), (1, 0, 2, 7, 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", ["full", "causal bottom-right"])
def test_attention_of_nothing(shape_q, shape_k, mask, device):
    q, k, v = inputs(shape_q, shape_k, torch.float32, device)
    dout = torch.randn(shape_q, device=device)
    out, dq, dk, dv = with_gradients(functools.partial(tg.attention, **MASKS[mask]), q, k, v, dout)
    # Where there are queries there are no keys, and the other way round: nothing to see, nothing to learn.
    for x, like in ((out, q), (dq, q), (dk, k), (dv, v)):
        torch.testing.assert_close(x, torch.zeros_like(like))
    assert (tg.attention(q, k, v, return_lse=True)[1] == -INF).all()


@pytest.mark.parametrize("n_kv_heads", [0, 2])
def test_no_query_heads_for_the_keys(n_kv_heads, device):
    q, k, v = inputs((2, 0, 5, 8), (2, n_kv_heads, 7, 8), torch.float32, device)
    _, dq, dk, dv = with_gradients(functools.partial(tg.attention, enable_gqa=True), q, k, v, torch.randn_like(q))
    for x, like in ((dq, q), (dk, k), (dv, v)):
        torch.testing.assert_close(x, torch.zeros_like(like))


# --- memory layout ---


LAYOUTS = {
    "contiguous": lambda x: x,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns apart": lambda x: torch.stack([x, torch.full_like(x, NAN)], -1)[..., 0],
    "rows last": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: F.pad(x, (3, 2, 1, 1), value=NAN)[..., 1:-1, 3:-2],
    "every second row": lambda x: torch.stack([x, torch.full_like(x, NAN)], 3).flatten(2, 3)[:, :, ::2],
    "unaligned": lambda x: F.pad(x.flatten(), (1, 0), value=NAN)[1:].view(x.shape),
    "expanded heads": lambda x: x[:, :1].expand(x.shape),
    "expanded rows": lambda x: x[:, :, :1].expand(x.shape),
    "expanded columns": lambda x: x[..., :1].expand(x.shape),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_attention_takes_any_strides(name, which, head_dim, device):
    if device.type == "cpu" and head_dim == 64:
        pytest.skip("the interpreter cannot run the kernels for Hopper")
    torch.use_deterministic_algorithms(head_dim != 64)
    q, k, v = inputs((2, 2, 35, head_dim), (2, 2, 40, head_dim), torch.float16, device)
    arguments = {"q": q, "k": k, "v": v, "dout": torch.randn_like(q)}
    arguments[which] = LAYOUTS[name](arguments[which])
    check(**arguments, is_causal=True)


def test_each_tensor_has_its_own_strides(device):
    q, k, v = inputs((2, 2, 35, 16), (2, 2, 40, 16), torch.float16, device)
    check(
        LAYOUTS["heads inside"](q), LAYOUTS["rows last"](k), LAYOUTS["sliced"](v), dout=LAYOUTS["every second row"](q)
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_output_and_gradients_keep_the_order_of_dimensions(order, device):
    x = torch.empty(2, 1, 5, 8, device=device).expand(2, 3, 5, 8)
    for like in (x, x.transpose(1, 2), x.transpose(0, 1)):
        assert tg.attention(like, like, like).stride() == torch.empty_like(like).stride()

    def ordered(x):
        x = x.permute(*order, 3).contiguous()
        return x.permute(*(order.index(d) for d in range(3)), 3)

    q, k, v = map(ordered, inputs((2, 3, 5, 8), (2, 3, 7, 8), torch.float32, device))
    for x, like in zip(with_gradients(tg.attention, q, k, v, torch.randn_like(q)), (q, q, k, v), strict=True):
        assert x.stride() == like.stride()


@pytest.mark.parametrize("head_dim_v", [8, 5])
def test_output_and_gradients_are_laid_out_as_the_inputs(head_dim_v, device):
    q, k, v = inputs((2, 3, 5, 8), (2, 3, 7, 8), torch.float32, device, head_dim_v)
    dout = torch.randn(2, 3, 5, head_dim_v, device=device)
    out, dq, dk, dv = with_gradients(tg.attention, LAYOUTS["heads inside"](q), k, v, dout)
    assert out.transpose(1, 2).is_contiguous() and dq.transpose(1, 2).is_contiguous()
    assert dk.is_contiguous() and dv.is_contiguous()


def test_expanded_gradient_of_sum(device):
    q, k, v = (x.requires_grad_() for x in inputs((1, 2, 40, 8), (1, 2, 50, 8), torch.float64, device))
    gradients = torch.autograd.grad(tg.attention(q, k, v, is_causal=True).sum(), (q, k, v))
    mask = allowed(40, 50, is_causal=True, device=device)
    expected = torch.autograd.grad(materialised(q, k, v, mask)[0].sum(), (q, k, v))
    # A sum over v's columns is a constant times the probabilities' sum, 1: dq and dk are rounding errors around 0.
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)


def test_strided_inputs_are_not_copied(device, monkeypatch):
    seen = []
    launch = module.launch
    monkeypatch.setattr(
        module, "launch", lambda kernel, grid, *args, **meta: (seen.append(args), launch(kernel, grid, *args, **meta))
    )
    q, k, v = (LAYOUTS["rows last"](x) for x in inputs((1, 2, 35, 16), (1, 2, 40, 16), torch.float64, device))
    tg.attention(q, k, v)
    assert [x.data_ptr() for x in seen[0][:3]] == [x.data_ptr() for x in (q, k, v)]


def test_attention_writes_nothing_else(device, monkeypatch):
    memory = torch.full((10_000,), 7.0, device=device)
    taken = []

    def guarded(x, head_dim):
        # Each output lies inside the memory with a guard zone on both sides.
        size = x.numel() // x.shape[-1] * head_dim
        start = (taken[-1][1] if taken else 0) + 100
        taken.append((start, start + size))
        return memory[start : start + size].view(*x.shape[:-1], head_dim)

    monkeypatch.setattr(module, "_empty_as", guarded)
    q, k, v = inputs((1, 2, 33, 5), (1, 2, 41, 5), torch.float32, device)
    with_gradients(tg.attention, q, k, v, torch.randn_like(q))
    outside = torch.ones_like(memory, dtype=torch.bool)
    for start, end in taken:
        outside[start:end] = False
    assert len(taken) == 4 and (memory[outside] == 7).all()


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    stride = 2**31 // 64
    memory = torch.empty(70 * stride + 64, dtype=torch.float16, device=device)
    q, k, v = inputs((1, 1, 70, 64), (1, 1, 70, 64), torch.float16, device)
    far = memory.as_strided((1, 1, 70, 64), (1, 1, stride, 1))
    far.copy_(k)
    torch.testing.assert_close(tg.attention(q, far, v), tg.attention(q, k, v), rtol=0, atol=0)


# --- tensor descriptors ---


@pytest.fixture
def descriptors(monkeypatch):
    """Loads by tensor descriptors, as on GPUs with a tensor memory accelerator; the interpreter knows them too."""
    if torch.accelerator.is_available():
        pytest.skip("the GPU decides by itself")
    monkeypatch.setattr(module, "cuda_arch", lambda device: 90)
    made = []
    make = module._descriptor
    monkeypatch.setattr(module, "_descriptor", lambda *args: made.append(args) or make(*args))
    return made


@MASK
@pytest.mark.parametrize("head_dim", [40, 64])
def test_descriptors_give_the_same(descriptors, mask, head_dim, device):
    q, k, v = inputs((2, 2, 67, head_dim), (2, 1, 70, head_dim), torch.float16, device)
    check(LAYOUTS["heads inside"](q), k, LAYOUTS["heads inside"](v), **MASKS[mask])
    assert len(descriptors) == 3 + 6 + 6


@pytest.mark.parametrize("name", ["rows last", "unaligned", "expanded heads", "sliced"])
def test_descriptors_are_left_alone_where_they_cannot_address(descriptors, name, device):
    q, k, v = inputs((1, 2, 67, 40), (1, 2, 70, 40), torch.float16, device)
    check(q, LAYOUTS[name](k), v)
    assert not descriptors


@pytest.mark.gpu
@MASK
@pytest.mark.parametrize(
    "head_dims",
    [(1, 1), (32, 20), (5, 33), (65, 90), (128, 128), (20, 128), (192, 64), (90, 192), (193, 256), (256, 256)],
    ids=str,
)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(100, 67), (129, 300), (640, 600)])
def test_float32_in_parts(seq_q, seq_k, head_dims, mask, device, monkeypatch):
    monkeypatch.setattr(module, "_num_parts", lambda *_: 3)
    q, k, v = inputs((2, 4, seq_q, head_dims[0]), (2, 2, seq_k, head_dims[0]), torch.float32, device, head_dims[1])
    check(q, k, v, **MASKS[mask])
    check(LAYOUTS["heads inside"](q), LAYOUTS["rows last"](k), LAYOUTS["unaligned"](v), **MASKS[mask])


@pytest.mark.gpu
@MASK
@pytest.mark.parametrize("head_dims", [(32, 20), (40, 40), (96, 96), (128, 200), (256, 256)], ids=str)
def test_float32_in_two_parts_is_closer_than_tf32(head_dims, mask, device, monkeypatch):
    monkeypatch.setattr(module, "_num_parts", lambda *_: 2)
    monkeypatch.setitem(FLOOR, torch.float32, 5e-5)  # TF32 is off by 1e-3
    q, k, v = inputs((2, 4, 300, head_dims[0]), (2, 2, 333, head_dims[0]), torch.float32, device, head_dims[1])
    check(q, k, v, **MASKS[mask])


@pytest.mark.gpu
def test_a_key_of_weight_0_in_parts_has_the_gradient_of_torch(device, monkeypatch):
    monkeypatch.setattr(module, "_num_parts", lambda *_: 3)
    for seq_q in (5, 300):
        test_a_key_of_weight_0_has_the_gradient_of_torch(torch.float32, 64, False, seq_q, device)


@pytest.mark.gpu
def test_a_query_of_nan_in_parts_reaches_no_key_that_it_may_not_see(device, monkeypatch):
    monkeypatch.setattr(module, "_num_parts", lambda *_: 3)
    q, k, v = (x.requires_grad_() for x in inputs((1, 2, 256, 64), (1, 2, 256, 64), torch.float32, device))
    with torch.no_grad():
        q[0, 0, 17, 0] = math.nan
    (dv,) = torch.autograd.grad(tg.attention(q, k, v, is_causal=True).sum(), v)
    assert dv[0, 0, :18].isnan().all() and dv[0, 0, 18:].isfinite().all() and dv[0, 1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_in_parts_that_are_none(value, device, monkeypatch):
    monkeypatch.setattr(module, "_num_parts", lambda *_: 3)
    q, k, v = inputs((1, 2, 100, 40), (1, 2, 130, 40), torch.float32, device)
    v[0, 1, 7, 3] = value
    out = tg.attention(q, k, v)
    assert torch.equal(out[0, 1, :, 3].isnan(), torch.full((100,), math.isnan(value), device=device))
    assert not out[0, 1, :, 3].isfinite().any()
    out[0, 1, :, 3] = 0
    assert out.isfinite().all()
    k[0, 0, 5, 0] = math.nan
    assert tg.attention(q, k, v)[0, 0].isnan().all()


def test_float32_is_cut_into_parts_where_they_are_used_often(monkeypatch):
    monkeypatch.setattr(module, "dot_precision", lambda q, reduced: "tf32" if reduced else "bf16x6")

    def in_parts(seq_q, seq_k, head_dim, head_dim_v=None, align=4, lower=None, upper=None):
        q, v = (torch.empty(1, 2, n, head_dim, device="meta") for n in (seq_q, seq_k))
        return module._num_parts(q, v[..., : head_dim_v or head_dim], align, lower, upper)

    assert in_parts(128, 128, 32) and not in_parts(100, 100, 32)
    assert in_parts(80, 80, 128) and not in_parts(64, 64, 128)
    assert in_parts(32, 32, 256) and not in_parts(16, 16, 256)
    assert not in_parts(4, 8192, 64) and not in_parts(8192, 4, 64) and not in_parts(512, 0, 64)
    # A mask leaves fewer products for each row.
    assert in_parts(4096, 4096, 64) == 3 and not in_parts(200, 20_000, 64, upper=0)
    assert in_parts(160, 160, 128, upper=0) and not in_parts(128, 128, 128, upper=0)
    assert in_parts(4096, 4096, 128, lower=-128, upper=0) and not in_parts(4096, 4096, 128, lower=-64, upper=0)
    monkeypatch.setattr(module, "allows_tf32", lambda: True)
    assert in_parts(4096, 4096, 64) == 2 and in_parts(4096, 4096, 64, align=1) == 2 and not in_parts(64, 64, 64)
    monkeypatch.undo()
    monkeypatch.setattr(module, "dot_precision", lambda q, reduced: "tf32" if reduced else "bf16x6")
    # Products number by number are far slower.
    assert in_parts(64, 64, 64, 30) and in_parts(64, 64, 64, align=1) and not in_parts(8, 8, 64, align=1)


# --- values ---


@MASK
@DTYPES
def test_logsumexp(mask, dtype, device):
    q, k, v = inputs((1, 2, 70, 8), (1, 2, 50, 8), dtype, device)
    lse = tg.attention(q, k, v, return_lse=True, **MASKS[mask])[1]
    expected = materialised(q.double(), k.double(), v.double(), allowed(70, 50, **MASKS[mask], device=device))[1]
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and lse.shape == q.shape[:-1]
    torch.testing.assert_close(lse, expected.to(lse.dtype), rtol=1e-6, atol=2e-6)


def test_logsumexp_is_differentiable(device):
    q, k, v = (x.requires_grad_() for x in inputs((1, 2, 40, 8), (1, 2, 50, 8), torch.float64, device))
    mask = allowed(40, 50, is_causal=True, device=device)
    dout, dlse = torch.randn(1, 2, 40, 8, device=device).double(), torch.randn(1, 2, 40, device=device).double()
    ours = torch.autograd.grad(tg.attention(q, k, v, is_causal=True, return_lse=True), (q, k, v), (dout, dlse))
    torch.testing.assert_close(ours, torch.autograd.grad(materialised(q, k, v, mask), (q, k, v), (dout, dlse)))
    # The logsumexp alone, so that the output gets no gradient at all; that of the sum is expanded, and v has no part
    # in it.
    ours = torch.autograd.grad(tg.attention(q, k, v, is_causal=True, return_lse=True)[1].sum(), (q, k, v))
    expected = torch.autograd.grad(materialised(q, k, v, mask)[1].sum(), (q, k), materialize_grads=True)
    torch.testing.assert_close(ours, (*expected, torch.zeros_like(v)))


@BOTH_WAYS
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "head_dim"),
    [(40, 50, 16), *(pytest.param(150, 170, d, marks=pytest.mark.gpu) for d in (64, 128, 256))],
)
def test_logsumexp_is_differentiable_in_16_bits(seq_q, seq_k, head_dim, deterministic, device):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    tensors = inputs((1, 4, seq_q, head_dim), (1, 2, seq_k, head_dim), torch.bfloat16, device)
    dout, dlse = torch.randn(1, 4, seq_q, head_dim, device=device).bfloat16(), torch.randn(1, 4, seq_q, device=device)
    leaves = [x.requires_grad_() for x in tensors]
    outputs = tg.attention(*leaves, is_causal=True, enable_gqa=True, return_lse=True)
    ours = torch.autograd.grad(outputs, leaves, (dout, dlse))
    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(
        materialised(*wide, allowed(seq_q, seq_k, is_causal=True, device=device)), wide, (dout.double(), dlse.double())
    )
    for x, exact in zip(ours, expected, strict=True):
        torch.testing.assert_close(x.double(), exact, rtol=0, atol=0.02 * exact.abs().max().item())


@DTYPES
@pytest.mark.parametrize("seq_k", [1, 40, 64])
def test_queries_with_no_allowed_key(dtype, seq_k, device):
    q, k, v = inputs((1, 2, 130, 8), (1, 2, seq_k, 8), dtype, device)
    kwargs = {"is_causal": True, "causal_alignment": "bottom-right", "return_lse": True}
    blind = 130 - seq_k
    # Not even a NaN reaches them.
    assert (tg.attention(q, k, torch.full_like(v, NAN), **kwargs)[0][:, :, :blind] == 0).all()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = tg.attention(q, k, v, **kwargs)
    assert (out[:, :, :blind] == 0).all() and (lse[:, :, :blind] == -INF).all() and lse[:, :, blind:].isfinite().all()
    dout = torch.zeros_like(out)
    dout[:, :, :blind] = 1
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert (dq[:, :, :blind] == 0).all() and (dk == 0).all() and (dv == 0).all()


def test_nobody_may_see_anything(device):
    q, k, v = inputs((1, 1, 30, 8), (1, 1, 70, 8), torch.float32, device)
    # The last 30 of 100 queries under bottom-right alignment, whose window of 10 keys ends before the first of them.
    far = torch.cat([torch.randn(1, 1, 170, 8, device=device), q], 2)
    out, lse = tg.attention(far, k, v, window=(10, 0), return_lse=True)
    assert (out[:, :, 80:] == 0).all() and (lse[:, :, 80:] == -INF).all()
    assert out[:, :, :80].abs().amin(-1).gt(0).all()


@DTYPES
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_logits(dtype, size, device):
    q, k, v = inputs((1, 1, 70, 8), (1, 1, 100, 8), dtype, device)
    q[..., 0], k[..., 0] = 100, size / 100
    mask = torch.ones(70, 100, dtype=torch.bool, device=device)
    out, lse = tg.attention(q, k, v, scale=1.0, return_lse=True)
    expected, expected_lse = materialised(q.double(), k.double(), v.double(), mask, 1.0)
    # A float32 logit of 1e4 is off by 1e4 * 2**-24, and so is each probability's exponent.
    floor = FLOOR[dtype] if dtype == torch.float64 else FLOOR[dtype] + 2e-3
    assert_as_accurate_as_torch(out, torchs(q, k, v, mask, 1.0), expected, floor=floor)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0)


def test_keys_without_weight_come_first(device):
    q, k, v = inputs((1, 1, 40, 8), (1, 1, 100, 8), torch.float32, device)
    q[..., 0] = 1
    k[:, :, :70, 0] = -INF  # two whole tiles of scores of -inf
    mask = torch.ones(40, 100, dtype=torch.bool, device=device)
    out, lse = tg.attention(q, k, v, return_lse=True)
    expected, expected_lse = materialised(q.double(), k.double(), v.double(), mask)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"window": (150, 20)}], ids=["no mask", "causal", "window"])
def test_keys_without_weight_come_last(mask, device):
    # In 16 bits, where Hopper has a kernel of its own, which meets the last keys first.
    q, k, v = inputs((1, 8, 200, 64), (1, 8, 200, 64), torch.float16, device)
    q[..., 0] = 1
    k[:, :, 128:, 0] = -INF
    out, lse = tg.attention(q, k, v, return_lse=True, **mask)
    expected, expected_lse = materialised(q.double(), k.double(), v.double(), allowed(200, 200, **mask, device=device))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", [{}, {"window": (30, 20)}], ids=["no mask", "window"])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 8), (torch.float16, 64), (torch.float16, 192)])
def test_scores_of_minus_infinity_alone_count_as_no_key(dtype, head_dim, mask, device):
    q, k, v = inputs((1, 2, 200, head_dim), (1, 2, 200, head_dim), dtype, device)
    q[..., 0], k[..., 0] = 0, -1
    q[:, :, 77, 0] = INF
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tg.attention(*leaves, return_lse=True, **mask)
    others = [i for i in range(200) if i != 77]
    assert (out[:, :, 77] == 0).all() and (lse[:, :, 77] == -INF).all()
    assert out[:, :, others].isfinite().all() and lse[:, :, others].isfinite().all()
    _, _, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    # Each of the other queries shares out a gradient of 1.
    torch.testing.assert_close(dv.double().sum(2), torch.full_like(dv[:, :, 0], 199).double(), rtol=2e-3, atol=0)


def test_float64_has_room_for_its_own_scores(device):
    q = torch.full((1, 1, 4, 16), 1e20, dtype=torch.float64, device=device)
    k = -q * torch.tensor([3, 1, 2, 4], device=device)[:, None]
    v = torch.randn(1, 1, 4, 16, dtype=torch.float64, device=device)
    out, lse = tg.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, v[:, :, 1:2].expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, -4e40))


@pytest.mark.parametrize("seq_q", [1, 5, 64, 70])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "deterministic"),
    [
        (torch.float32, 8, True),
        (torch.float16, 64, True),
        (torch.float16, 64, False),
        (torch.float16, 128, False),
        (torch.float16, 192, True),
    ],
)
def test_a_key_of_weight_0_has_the_gradient_of_torch(dtype, head_dim, deterministic, seq_q, device):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # No 0, whose product with a key of -inf is NaN.
    q = torch.rand(1, 1, seq_q, head_dim, device=device, dtype=dtype) + 0.5
    k, v = torch.rand(2, 1, 1, 9, head_dim, device=device, dtype=dtype)
    k[0, 0, 2] = -INF
    leaves = [x.requires_grad_() for x in (k, v)]
    grads = torch.autograd.grad(tg.attention(q, k, v).sum(), leaves)
    everything = torch.ones(seq_q, 9, dtype=torch.bool, device=device)
    expected = torch.autograd.grad(materialised(q.double(), k.double(), v.double(), everything)[0].sum(), leaves)
    for ours, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=10 * FLOOR[dtype], atol=10 * FLOOR[dtype])


def test_a_query_without_keys_passes_nothing_on(device):
    q, k, v = inputs((1, 1, 6, 8), (1, 1, 3, 8), torch.float32, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tg.attention(q, k, v, is_causal=True, causal_alignment="bottom-right", return_lse=True)
    loss = out.sum() + torch.logaddexp(lse, lse.detach()).sum()  # NaN for a gradient where lse is -inf
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, leaves))


HUGE = {f"{size:g}": [size * (1 + i / 23) for i in range(24)] for size in (1e8, 1e10, 1e20, 1e30)}
# For these two, with fused multiply-adds as on a GPU, all roundings go the same way.
HUGE["fused"] = [195900000.0, 12314999808.0]


@pytest.mark.parametrize("scores", HUGE.values(), ids=HUGE)
def test_gradients_of_huge_products_of_two_numbers_are_finite(scores, device):
    for score in scores:
        q, k, v = (torch.zeros(1, 1, 4, 8, device=device) for _ in "qkv")
        q[..., 0], k[:, :, 3, 0] = 1, score
        v.requires_grad_()
        out = tg.attention(q, k, v)
        (dv,) = torch.autograd.grad(out.sum(), [v])
        assert dv.isfinite().all() and (dv <= 4.0001).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e6, 8e6, 1.1e7])
def test_gradients_of_large_products_of_two_numbers_keep_their_size(size, dtype, device):
    # Each query sees one key, so its probability is 1. That numbers of this size lie 1 apart may cost two bits.
    n, scale = 8, size / 2000
    q, k, v = (torch.zeros(1, 1, rows, 64, device=device, dtype=dtype) for rows in (n, 1, 1))
    q[0, 0, :, 0], k[..., 0] = torch.linspace(1250, 2000, n).round(), 1
    q, v = q.transpose(1, 2).reshape(n, 1, 1, 64), v.expand(n, 1, 1, 64).clone().requires_grad_()
    out = tg.attention(q, k.expand(n, 1, 1, 64), v, scale=scale)
    (dv,) = torch.autograd.grad(out.sum(), [v])
    assert (dv >= 0.25).all() and (dv <= 4).all()


@pytest.mark.parametrize("head_dim", [8, 16, 64, 128])
def test_one_key_takes_all(head_dim, device):
    q, k, v = inputs((1, 1, 40, head_dim), (1, 1, 100, head_dim), torch.float32, device)
    q[..., 0], k[..., 0] = 1, 0
    k[:, :, 77, 0] = 1e30
    torch.testing.assert_close(tg.attention(q, k, v), v[:, :, 77:78].expand(-1, -1, 40, -1))


@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_stays_in_its_row(value, device):
    q, k, v = inputs((1, 2, 40, 8), (1, 2, 50, 8), torch.float32, device)
    clean = tg.attention(q, k, v)
    q[0, 1, 17, 3] = value
    out = tg.attention(q, k, v)
    assert out[0, 1, 17].isnan().all()
    out[0, 1, 17] = clean[0, 1, 17]
    torch.testing.assert_close(out, clean, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", [{"is_causal": True}, {"window": (30, 0)}, {"window": (90, 3)}], ids=str)
def test_nan_in_a_key_reaches_who_may_see_it(mask, dtype, device):
    head_dims = (8, 128, 200) if dtype == torch.float16 and device.type == "cuda" else (8,)
    left, right = mask.get("window", (70, 0))
    for head_dim in head_dims:
        q, k, v = inputs((1, 1, 70, head_dim), (1, 1, 70, head_dim), dtype, device)
        clean = tg.attention(q, k, v, **mask)
        k[0, 0, 20, 3] = NAN
        out = tg.attention(q, k, v, **mask)
        for query in range(70):
            if query - left <= 20 <= query + right:
                assert out[0, 0, query].isnan().all(), query
            else:
                torch.testing.assert_close(out[0, 0, query], clean[0, 0, query], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_key_that_nobody_sees_gets_no_gradient(value, dtype, device):
    q, k, v = inputs((1, 1, 5, 8), (1, 1, 70, 8), dtype, device)
    k[..., 6:, :] = value
    _, dk, dv = with_gradients(functools.partial(tg.attention, is_causal=True), q, k, v, torch.ones_like(q))[1:]
    assert dk[..., :5, :].isfinite().all() and (dk[..., 5:, :] == 0).all() and (dv[..., 5:, :] == 0).all()


# --- gradients ---


@pytest.mark.parametrize("mask", ["full", "causal bottom-right", "window"])
def test_gradcheck(mask, device):
    q, k, v = (x.requires_grad_() for x in inputs((1, 2, 5, 3), (1, 1, 6, 3), torch.float64, device, 2))
    kwargs = {"enable_gqa": True, "return_lse": mask == "full", **MASKS[mask]}
    torch.autograd.gradcheck(functools.partial(tg.attention, **kwargs), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
def test_gradients_of_some_inputs(wanted, device):
    tensors = dict(zip("qkv", inputs((1, 1, 20, 8), (1, 1, 30, 8), torch.float64, device), strict=True))
    for name in wanted:
        tensors[name].requires_grad_()
    leaves = [tensors[name] for name in wanted]
    dout = torch.randn(1, 1, 20, 8, device=device, dtype=torch.float64)
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*tensors.values()), leaves, dout)
    torch.testing.assert_close(torch.autograd.grad(tg.attention(*tensors.values()), leaves, dout), expected)


# Three tiles of keys or more, as a sum of two shares is the same in either order; and a backward in one program.
@pytest.mark.parametrize(
    ("head_dim", "seq_q", "seq_k"),
    [(16, 70, 80), (40, 70, 80), *(pytest.param(d, 700, 800, marks=pytest.mark.gpu) for d in (64, 128, 200))],
)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_results_repeat_bit_for_bit(mask, head_dim, seq_q, seq_k, device):
    q, k, v = inputs((1, 4, seq_q, head_dim), (1, 2, seq_k, head_dim), torch.float16, device)
    dout = torch.randn_like(q)
    call = functools.partial(tg.attention, enable_gqa=True, **MASKS[mask])
    first = with_gradients(call, q, k, v, dout)
    for _ in range(2 if device.type == "cpu" else 100):
        assert all(torch.equal(a, b) for a, b in zip(first, with_gradients(call, q, k, v, dout), strict=True))


def test_inputs_and_gradients_stay_unmodified(device):
    q, k, v = inputs((1, 2, 40, 8), (1, 2, 50, 8), torch.bfloat16, device)
    tensors = [q, k, v, torch.randn_like(q)]
    before, versions = [x.clone() for x in tensors], [x._version for x in tensors]
    with_gradients(functools.partial(tg.attention, is_causal=True), *tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert [x._version for x in tensors] == versions


def test_no_graph_without_a_gradient(device):
    q, k, v = inputs((1, 1, 5, 8), (1, 1, 6, 8), torch.float32, device)
    assert tg.attention(q, k, v).grad_fn is None
    with torch.no_grad():
        assert tg.attention(q.requires_grad_(), k, v).grad_fn is None


def test_second_derivative_is_refused(device):
    q, k, v = (x.requires_grad_() for x in inputs((1, 1, 5, 8), (1, 1, 6, 8), torch.float64, device))
    (dq,) = torch.autograd.grad(tg.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(
        NotImplementedError, match=r"attention: the gradient is not differentiable a second time; .*MATH"
    ):
        dq.sum().backward()


def test_checkpoint(device):
    q, k, v = (x.requires_grad_() for x in inputs((1, 1, 20, 8), (1, 1, 30, 8), torch.float64, device))
    expected = torch.autograd.grad(tg.attention(q, k, v).square().sum(), (q, k, v))
    out = torch.utils.checkpoint.checkpoint(tg.attention, q, k, v, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, rtol=0, atol=0)


# --- refusals ---


def qkv(shape_q=(2, 4, 9, 8), shape_k=(2, 4, 12, 8), shape_v=None, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in (shape_q, shape_k, shape_v or shape_k)]


HALF = torch.zeros(2, 4, 12, 8, dtype=torch.float16)
REFUSED = {
    "q of ints": (qkv(dtype=torch.int64), {}, TypeError, "q must have one of the dtypes"),
    "a list": ([[1.0], *qkv()[1:]], {}, TypeError, "q must be a torch.Tensor, got list"),
    "sparse k": ([qkv()[0], qkv()[1].to_sparse(), qkv()[2]], {}, TypeError, "k must be a dense"),
    "k of another dtype": (
        [qkv()[0], HALF, qkv()[2]],
        {},
        TypeError,
        r"k must have q's dtype torch.float32, got torch.float16",
    ),
    "v of another dtype": (
        [*qkv()[:2], HALF],
        {},
        TypeError,
        r"v must have q's dtype torch.float32, got torch.float16",
    ),
    "1-d q": (qkv((8,)), {}, ValueError, r"q must have at least 2 dimensions, \(seq, head_dim\), got \(8,\)"),
    "head_dim 0": (qkv((2, 4, 9, 0), (2, 4, 12, 0)), {}, ValueError, "q must have a head_dim from 1 to 256, got 0"),
    "head_dim 257": (
        qkv((1, 1, 9, 257), (1, 1, 9, 257)),
        {},
        ValueError,
        "q must have a head_dim from 1 to 256, got 257",
    ),
    "k's head_dim": (qkv((2, 4, 9, 6)), {}, ValueError, "k must have q's head_dim 6, got 8"),
    "v's length": (qkv(shape_v=(2, 4, 11, 8)), {}, ValueError, "v must have k's length 12, got 11"),
    "batches": (
        qkv((3, 4, 9, 8)),
        {},
        ValueError,
        r"leading dimensions of q, k and v must broadcast, got q \(3, 4, 9, 8\)",
    ),
    "heads": (qkv((2, 8, 9, 8)), {}, ValueError, "must broadcast, .*set enable_gqa=True"),
    "heads that do not divide": (
        qkv((2, 6, 9, 8)),
        {"enable_gqa": True},
        ValueError,
        "a multiple .* got 6, 4 and 4 heads",
    ),
    "heads of v": (qkv((2, 8, 9, 8), shape_v=(2, 2, 12, 8)), {"enable_gqa": True}, ValueError, "got 8, 4 and 2 heads"),
    "scale of text": (qkv(), {"scale": "1"}, TypeError, "scale must be a number or None, got str"),
    "scale of bool": (qkv(), {"scale": True}, TypeError, "scale must be a number or None, got bool"),
    "scale of NaN": (qkv(), {"scale": NAN}, ValueError, "scale must be finite, got nan"),
    "infinite scale": (qkv(), {"scale": INF}, ValueError, "scale must be finite, got inf"),
    "scale beyond float32": (
        qkv(),
        {"scale": 1e39},
        ValueError,
        "scale must be within 2e38 unless the tensors are float64, got 1e",
    ),
    "mask": (
        qkv(),
        {"attn_mask": torch.ones(1, 1)},
        ValueError,
        "attn_mask must be None, got Tensor; torch.nn.functional.s",
    ),
    "dropout": (qkv(), {"dropout_p": 0.1}, ValueError, "dropout_p must be 0, got 0.1; torch.nn.functional.scaled_dot_"),
    "huge scale": (qkv(), {"scale": 10**400}, ValueError, "scale must fit into float64, got an int of 1329 bits"),
    "dropout of a tensor": (qkv(), {"dropout_p": torch.zeros(2)}, ValueError, "dropout_p must be 0, got Tensor; torch"),
    "complex dropout": (qkv(), {"dropout_p": 0j}, ValueError, "dropout_p must be 0, got 0j; torch"),
    "is_causal of int": (qkv(), {"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
    "enable_gqa of None": (qkv(), {"enable_gqa": None}, TypeError, "enable_gqa must be True or False, got None"),
    "return_lse of int": (qkv(), {"return_lse": 0}, TypeError, "return_lse must be True or False, got 0"),
    "alignment": (qkv(), {"causal_alignment": "left"}, ValueError, "must be 'top-left' or 'bottom-right', got 'left'"),
    "alignment of numbers": (qkv(), {"causal_alignment": np.ones(2)}, ValueError, "'bottom-right', got ndarray"),
    "window of three": (qkv(), {"window": (1, 2, 3)}, TypeError, r"window must be .*pair .*got \(1, 2, 3\)"),
    "window of floats": (qkv(), {"window": 1.0}, TypeError, "window must be a number of keys, .*got 1.0"),
    "window of bool": (qkv(), {"window": (True, 1)}, TypeError, r"window must be .*got \(True, 1\)"),
    "negative window": (qkv(), {"window": (-1, 0)}, ValueError, r"window must not be negative .*got \(-1, 0\)"),
    "huge window": (qkv(), {"window": -(10**5000)}, ValueError, "window must not be .*got an int of 16610 bits"),
    "a mask in place of is_causal": (
        (*qkv(), None, 0.0, torch.ones(2, 2)),
        {},
        TypeError,
        "is_causal must be True or False, got Tensor$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses(name, device):
    tensors, kwargs, error, message = REFUSED[name]
    tensors = [x.to(device) if isinstance(x, torch.Tensor) else x for x in tensors]
    with pytest.raises(error, match=f"^attention: .*{message}"):
        tg.attention(*tensors, **kwargs)


def test_attention_takes_numbers_of_numpy(device):
    q, k, v = inputs((1, 2, 9, 8), (1, 2, 12, 8), torch.float32, device)
    for scale in (np.float32(0.25), np.float64(0.25), np.int64(2)):
        assert torch.equal(tg.attention(q, k, v, scale=scale), tg.attention(q, k, v, scale=scale.item()))
    for window in (np.int64(3), (np.int32(3), None), [np.int64(3), 2]):
        plain = tuple(map(int, window)) if isinstance(window, list) else (3, None) if isinstance(window, tuple) else 3
        assert torch.equal(tg.attention(q, k, v, window=window), tg.attention(q, k, v, window=plain))
    with pytest.raises(ValueError, match="attention: scale must be finite, got nan"):
        tg.attention(q, k, v, scale=np.float32("nan"))
    with pytest.raises(ValueError, match=r"attention: window must not be negative .*got np.int64\(-1\)"):
        tg.attention(q, k, v, window=np.int64(-1))
    with pytest.raises(TypeError, match="attention: scale must be a number or None, got bool"):
        tg.attention(q, k, v, scale=np.True_)


def test_attention_refuses_another_device(device):
    q, k, v = inputs((1, 1, 5, 8), (1, 1, 6, 8), torch.float32, device)
    with pytest.raises(ValueError, match="attention: k must"):
        tg.attention(q, k.to("meta"), v)


# --- integration ---


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "dynamic"])
def test_attention_compiles_without_graph_breaks(dynamic, device):
    def loss(q, k, v):
        out, lse = tg.attention(q * 1, k, v, is_causal=True, window=(9, 0), enable_gqa=True, return_lse=True)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seq_q, seq_k in ((20, 30), (25, 31)):
        q, k, v = (x.requires_grad_() for x in inputs((2, 4, seq_q, 8), (2, 2, seq_k, 8), torch.float64, device))
        ours, expected = compiled(q, k, v), loss(q, k, v)
        torch.testing.assert_close(ours, expected)
        gradients = torch.autograd.grad(ours, (q, k, v)), torch.autograd.grad(expected, (q, k, v))
        torch.testing.assert_close(*gradients)


def test_opcheck(device):
    q, k, v = inputs((1, 4, 9, 8), (1, 2, 12, 8), torch.float32, device)
    q = LAYOUTS["heads inside"](q)
    for lower, upper in ((None, None), (-3, 0)):
        torch.library.opcheck(torch.ops.triton_gallery.attention_fwd.default, (q, k, v, 0.3, lower, upper))
        out, lse = torch.ops.triton_gallery.attention_fwd(q, k, v, 0.3, lower, upper)
        for dlse in (None, torch.randn_like(lse)):
            backward = torch.randn_like(out), dlse, q, k, v, out, lse, 0.3, lower, upper
            torch.library.opcheck(torch.ops.triton_gallery.attention_bwd.default, backward)


def test_a_dtype_that_autocast_changed_is_told_as_it_arrived(device):
    q, k = torch.ones(1, 1, 4, 8, dtype=torch.float64, device=device), torch.ones(1, 1, 4, 8, device=device)
    message = "k must have q's dtype torch.float64, got torch.float32, torch.bfloat16 after autocast; convert"
    with torch.autocast(device.type, torch.bfloat16), pytest.raises(TypeError, match=message):
        tg.attention(q, k, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_autocast_gives_torchs_dtype(dtype, device):
    q, k, v = inputs((1, 1, 9, 8), (1, 1, 12, 8), dtype, device)
    with torch.autocast(device.type, torch.bfloat16):
        out, expected = tg.attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.004)


@pytest.mark.parametrize(
    ("head_dim", "with_gradients"),
    [(16, False), pytest.param(40, True, marks=pytest.mark.slow), pytest.param(64, True, marks=pytest.mark.slow)],
)
def test_lengths_share_compilations(head_dim, with_gradients):
    lengths = [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 100, 128, 255, 500, 512, *range(4090, 4102)]

    def x(seq_len):
        return torch.empty(2, 4, seq_len, head_dim, device="meta", dtype=torch.float16)

    calls = [
        (tg.attention, (x(seq_q), x(seq_k), x(seq_k)), {"is_causal": True}, with_gradients)
        for seq_q, seq_k in zip(lengths, reversed(lengths), strict=True)
    ]
    outcomes = tg.codegen._compile(tg.codegen._pack(calls, ("sm_80",)))
    compiled = {(kernel.name, kernel.asm["ptx"]) for (kernels,) in outcomes for kernel in kernels}
    names = [name for name, _ in compiled]
    # Few queries take tiles of 16, 32 or 64 of them.
    n_tiles = names.count("_attention_split_kernel")
    assert len(lengths) == 32 and n_tiles <= 3 and len(names) == len(set(names)) + n_tiles - 1


# --- fuzz ---


@st.composite
def fuzzed(draw):
    """Sizes, a mask, a dtype and a layout for each tensor."""
    group, n_kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 2)]))
    side = st.none() | st.integers(0, 70)
    seq, head_dim = st.integers(1, 75), st.integers(1, 20)
    if DEVICE.type != "cpu":  # what the kernels for Hopper take, as well
        seq, head_dim = st.integers(1, 600), head_dim | st.sampled_from([32, 64, 80, 96, 128, 160, 192, 256])
    head_dims = draw(st.tuples(head_dim, head_dim) | head_dim.map(lambda d: (d, d)))
    return {
        "shape_q": (draw(st.integers(1, 2)), group * n_kv_heads, draw(seq), head_dims[0]),
        "n_kv_heads": n_kv_heads,
        "seq_k": draw(seq),
        "head_dim_v": head_dims[1],
        "deterministic": draw(st.booleans()),
        "dtype": draw(st.sampled_from(FLOATS)),
        "layouts": draw(st.tuples(*[st.sampled_from(list(LAYOUTS))] * 4)),
        "mask": {
            "is_causal": draw(st.booleans()),
            "window": draw(st.none() | st.tuples(side, side)),
            "causal_alignment": draw(st.sampled_from(["top-left", "bottom-right"])),
        },
    }


@FUZZ
def test_attention_on_fuzzed_inputs(device, fuzz):
    def run(case):
        batch, _, _, head_dim = case["shape_q"]
        shape_k = (batch, case["n_kv_heads"], case["seq_k"], head_dim)
        q, k, v = inputs(case["shape_q"], shape_k, case["dtype"], device, case["head_dim_v"])
        dout = torch.randn(*case["shape_q"][:-1], case["head_dim_v"], device=device).to(case["dtype"])
        q, k, v, dout = (LAYOUTS[name](x) for name, x in zip(case["layouts"], (q, k, v, dout), strict=True))
        # Not in this mode, the kernels for Hopper take the backward where they can.
        torch.use_deterministic_algorithms(case["deterministic"], warn_only=True)
        # Some layouts repeat one row.
        check(q, k, v, dout=dout, alike=True, **case["mask"])

    fuzz(run, case=fuzzed())


@pytest.mark.parametrize("longer", ["q", "k"])
def test_lengths_whose_positions_would_be_miscounted(longer):
    short, long = torch.empty(1, 1, 4, 8, device="meta"), torch.empty(1, 1, 2**31 - 2**14 - 3, 8, device="meta")
    q, k = (long, short) if longer == "q" else (short, long)
    with pytest.raises(ValueError, match=r"q and k must not be longer together .*miscounted, got"):
        tg.attention(q, k, k)
