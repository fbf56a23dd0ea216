"""Flash attention backward for Hopper, in Gluon, of short heads: a program owns all keys of one head after another.

Then nobody else adds to a query's gradient, so that dQ is complete after one step, and leaves in 16 bits, in an order
that is always the same. ``attention_backward`` sums it in float32 memory, which for up to 256 keys is much of its time.
The scores' statistics are computed on the way, and the next head's keys arrive while this one's are at work.
"""

import torch

from .._launch import cdiv, launch, num_multiprocessors, padded
from ._gluon import (
    async_load,
    async_store,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    meet,
    phase,
    store_wait,
    tma_can_address,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .attention_forward import LOG2_E
from .attention_rows import cut_off, masked, row_width, start_scores, start_sums, wait_sums, zero_sums

_SIDE = gl.constexpr(64)  # rows and columns of all tiles
_SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of a tile in registers
_PAIR_KEYS = 128  # of two key tiles


@gluon.jit
def _tile(smem, i):
    return smem.index(i).reshape((_SIDE, _SIDE))


@gluon.jit
def _heads_producer(
    q_desc, out_desc, dout_desc, k_desc, v_desc, q_smem, out_smem, dout_smem, k_smem, v_smem,
    q_full, q_empty, kv_full, kv_empty, n_heads, n_all_heads, n_q_tiles, n_few, PAIRS: gl.constexpr,
):  # fmt: skip
    """Copies K and V of one pair of key tiles after another, and for each Q and dO of one query tile after another.

    With the first pair goes O, too.
    """
    STAGES: gl.constexpr = q_full.shape[0]
    TILE_BYTES: gl.constexpr = q_desc.block_type.nbytes
    step = 0
    kv_step = 0
    for head in range(gl.program_id(0), n_all_heads, gl.num_programs(0)):
        b = head // n_heads
        h = head % n_heads
        for pair in gl.static_range(PAIRS):
            kv_stage = kv_step % 2
            mbarrier.wait(kv_empty.index(kv_stage), phase(kv_step, 2) ^ 1)
            mbarrier.expect(kv_full.index(kv_stage), 4 * TILE_BYTES)
            for i in gl.static_range(2):
                row = (2 * pair + i) * _SIDE
                async_load(k_desc, [b, h, row, 0], kv_full.index(kv_stage), k_smem.index(2 * kv_stage + i))
                async_load(v_desc, [b, h, row, 0], kv_full.index(kv_stage), v_smem.index(2 * kv_stage + i))
            for q_tile in range(0 if pair == 0 else n_few, n_q_tiles):
                stage = step % STAGES
                full = q_full.index(stage)
                mbarrier.wait(q_empty.index(stage), phase(step, STAGES) ^ 1)
                mbarrier.expect(full, (3 if pair == 0 else 2) * TILE_BYTES)
                async_load(q_desc, [b, h, q_tile * _SIDE, 0], full, q_smem.index(stage))
                if pair == 0:
                    async_load(out_desc, [b, h, q_tile * _SIDE, 0], full, out_smem.index(stage))
                async_load(dout_desc, [b, h, q_tile * _SIDE, 0], full, dout_smem.index(stage))
                step += 1
            kv_step += 1


# Not by TMA, whose copies of such rows have to begin at multiples of 16 bytes: elsewhere, an H200 reported an illegal
# instruction.
@gluon.jit
def _load_lse(lse_ptr, head, q_tile, n_all_heads, seq_q):
    rows = q_tile * _SIDE + gl.arange(0, _SIDE, gl.BlockedLayout([1], [32], [4], [0]))
    mask = (rows < seq_q) & (head < n_all_heads)
    return gl.load(lse_ptr + head.to(gl.int64) * seq_q + rows, mask=mask, other=float("-inf"))


@gluon.jit
def _store_statistics(lse, out, dout, to_lse, to_delta):
    """What `_row_statistics` has for the other kernels: lse in powers of two, and delta, of each query."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    to_delta.store(gl.sum(out.load(LAYOUT).to(gl.float32) * dout.load(LAYOUT).to(gl.float32), 1))
    # +inf makes the probabilities 0 of a query without keys, and past the end.
    lse_log2 = gl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    two_units = gl.maximum(lse_log2, -lse_log2) * 2.384185791015625e-07
    to_lse.store(lse_log2 + gl.where(two_units > 4, two_units, 0.0))


@gluon.jit
def _probabilities(
    s, lse, key, query, seq_kv, lower, upper, scale_log2, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr
):  # fmt: skip
    """Of keys x queries, of which `key` and `query` are the first."""
    # What is the lower limit to queries is the upper one to keys.
    s = masked(s, key, query, -upper, -lower, HAS_UPPER, HAS_LOWER)
    s = cut_off(s, seq_kv - 1 - key - gl.arange(0, _SIDE, gl.SliceLayout(1, _SQUARE))[:, None])
    # Past the last query the score is NaN for a key of NaN, which may be one that no query sees.
    s = gl.where(lse[None, :] == float("inf"), float("-inf"), s)
    return gl.exp2(s * scale_log2 - lse[None, :])


@gluon.jit
def _heads_step(
    dk, dv, lse, q, out, dout, k_own, v_own, k_smem, stats_smem, ds_smem, dq_smem, dq_sums, first_kv, first_ds,
    stats_place, dq_desc, b, h, q_tile, seq_kv, lower, upper, scale, scale_log2, HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr, PAIR: gl.constexpr, IS_LAST: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """64 queries against the 64 keys of each consumer; S, P and dP stand transposed (keys x queries).

    Of dQ each computes half of the columns, over the keys of both. Unless this pair of key tiles IS_LAST for these
    queries, it waits in dq_sums for the next.
    """
    dtype: gl.constexpr = k_smem.dtype
    COLS: gl.constexpr = gl.SliceLayout(0, _SQUARE)
    lse_log2 = stats_smem.index(stats_place)
    delta = stats_smem.index(stats_place + 1)
    s_token = start_scores((k_own,), (q,))
    if PAIR == 0:
        _store_statistics(lse, out, dout, lse_log2, delta)
    dp_token = start_scores((v_own,), (dout,))
    s = warpgroup_mma_wait(1, deps=(s_token,))
    p = _probabilities(
        s, lse_log2.load(COLS), (2 * PAIR + CONSUMER) * _SIDE, q_tile * _SIDE, seq_kv, lower, upper, scale_log2,
        HAS_LOWER, HAS_UPPER,
    )  # fmt: skip
    dv_tokens = start_sums(p.to(dtype), (dout,), dv)
    dp = warpgroup_mma_wait(1, deps=(dp_token,))
    ds = (p * (dp - delta.load(COLS)[None, :])).to(dtype)
    _tile(ds_smem, first_ds + CONSUMER).store(ds)
    fence_async_shared()
    meet()
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    if PAIR == 0:
        dq = gl.zeros([_SIDE, 32], gl.float32, DQ_LAYOUT)
    else:
        dq = dq_sums.index(2 * q_tile + CONSUMER).load(DQ_LAYOUT)
    for i in gl.static_range(2):
        k_half = _tile(k_smem, first_kv + i).slice(CONSUMER * 32, 32, dim=1)
        dq = warpgroup_mma(
            _tile(ds_smem, first_ds + i).permute((1, 0)), k_half, dq, use_acc=PAIR > 0 or i > 0, is_async=True
        )
    dk_tokens = start_sums(ds, (q,), dk)
    dv = wait_sums(dv_tokens, 1)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    if IS_LAST:
        store_wait(0)  # the last step's dQ has left
        dq_smem.index(CONSUMER).reshape((_SIDE, 32)).store((dq * scale).to(dtype))
        fence_async_shared()
        async_store(dq_desc, [b, h, q_tile * _SIDE, CONSUMER * 32], dq_smem.index(CONSUMER))
    else:
        dq_sums.index(2 * q_tile + CONSUMER).store(dq)
    return wait_sums(dk_tokens, 0), dv


@gluon.jit
def _heads_consumer(
    dq_desc, dk_desc, dv_desc, lse_ptr, q_smem, out_smem, dout_smem, k_smem, v_smem, stats_smem, ds_smem, dq_smem,
    dq_sums, q_full, q_empty, kv_full, kv_empty, n_heads, n_all_heads, n_q_tiles, n_few, seq_q, seq_kv, lower, upper,
    scale, scale_log2, PAIRS: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Keeps dK and dV of 64 keys in registers while the head's queries pass by."""
    STAGES: gl.constexpr = q_full.shape[0]
    step = 0
    kv_step = 0
    lse = _load_lse(lse_ptr, gl.program_id(0), 0, n_all_heads, seq_q)
    for head in range(gl.program_id(0), n_all_heads, gl.num_programs(0)):
        b = head // n_heads
        h = head % n_heads
        for pair in gl.static_range(PAIRS):
            kv_stage = kv_step % 2
            first_kv = 2 * kv_stage
            dk = zero_sums(_SIDE, _SIDE)
            dv = zero_sums(_SIDE, _SIDE)
            mbarrier.wait(kv_full.index(kv_stage), phase(kv_step, 2))
            k_own = _tile(k_smem, first_kv + CONSUMER).load(gl.DotOperandLayout(0, _SQUARE, 2))
            v_own = _tile(v_smem, first_kv + CONSUMER).load(gl.DotOperandLayout(0, _SQUARE, 2))
            # The first n_few query tiles see the first pair only.
            bounds = (0, n_few if PAIRS == 2 else n_q_tiles, n_q_tiles)
            for part in gl.static_range(1 if PAIRS == 2 and not HAS_UPPER else pair, PAIRS):
                for q_tile in range(bounds[part], bounds[part + 1]):
                    stage = step % STAGES
                    own_lse = lse
                    if pair == 0:
                        is_last = q_tile + 1 == n_q_tiles
                        next_head = gl.where(is_last, head + gl.num_programs(0), head)
                        lse = _load_lse(lse_ptr, next_head, gl.where(is_last, 0, q_tile + 1), n_all_heads, seq_q)
                    mbarrier.wait(q_full.index(stage), phase(step, STAGES))
                    dk, dv = _heads_step(
                        dk, dv, own_lse, _tile(q_smem, stage), _tile(out_smem, stage), _tile(dout_smem, stage),
                        k_own, v_own, k_smem, stats_smem, ds_smem, dq_smem, dq_sums, first_kv, 2 * (step % 2),
                        (4 * q_tile if PAIRS == 2 else 0) + 2 * CONSUMER, dq_desc, b, h, q_tile, seq_kv, lower, upper,
                        scale, scale_log2, HAS_LOWER, HAS_UPPER, pair, pair == PAIRS - 1 or part == 0, CONSUMER,
                    )  # fmt: skip
                    mbarrier.arrive(q_empty.index(stage), count=1)
                    step += 1
            # The gradients leave through the place of K and V, after both consumers' last dQ.
            meet()
            place = first_kv + CONSUMER
            _tile(k_smem, place).store((dk[0] * scale).to(k_smem.dtype))
            _tile(v_smem, place).store(dv[0].to(v_smem.dtype))
            fence_async_shared()
            async_store(dk_desc, [b, h, (2 * pair + CONSUMER) * _SIDE, 0], k_smem.index(place))
            async_store(dv_desc, [b, h, (2 * pair + CONSUMER) * _SIDE, 0], v_smem.index(place))
            store_wait(0)
            mbarrier.arrive(kv_empty.index(kv_stage), count=1)
            kv_step += 1


@gluon.jit(do_not_specialize=["n_heads", "n_all_heads", "n_q_tiles", "n_few", "seq_q", "seq_kv", "lower", "upper"])
def _attention_bwd_heads_kernel(
    q_desc,  # (batch, n_heads, seq_q, head_dim), as out, dout and dq
    out_desc,
    dout_desc,
    dq_desc,
    k_desc,  # (batch, n_heads, seq_kv, head_dim), as v, dk and dv
    v_desc,
    dk_desc,
    dv_desc,
    lse_ptr,  # (batch, n_heads, seq_q)
    n_heads,
    n_all_heads,  # of all batches
    n_q_tiles,
    n_few,  # the first so many query tiles see no key of the second pair
    seq_q,
    seq_kv,
    lower,
    upper,
    scale,
    scale_log2,
    PAIRS: gl.constexpr,  # of key tiles: 2 for more than 128 keys
    STAGES: gl.constexpr,
    HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr,
):
    """Program i owns the heads i, i + programs, and so on."""
    dtype: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = q_desc.layout
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, _SIDE, _SIDE], LAYOUT)
    out_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, _SIDE, _SIDE], LAYOUT)
    dout_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, _SIDE, _SIDE], LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [4, 1, 1, _SIDE, _SIDE], LAYOUT)
    v_smem = gl.allocate_shared_memory(dtype, [4, 1, 1, _SIDE, _SIDE], LAYOUT)
    ds_smem = gl.allocate_shared_memory(dtype, [4, 1, 1, _SIDE, _SIDE], LAYOUT)
    dq_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, _SIDE, 32], dq_desc.layout)
    # Of each query tile and consumer, where a second pair of key tiles goes on with them.
    N_KEPT: gl.constexpr = 4 if PAIRS == 2 else 1
    stats_smem = gl.allocate_shared_memory(gl.float32, [4 * N_KEPT, _SIDE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    SUMS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    dq_sums = gl.allocate_shared_memory(gl.float32, [2 * N_KEPT if PAIRS == 2 else 1, _SIDE, 32], SUMS_LAYOUT)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    # fmt: off
    gl.warp_specialize([
        (_heads_producer, (
            q_desc, out_desc, dout_desc, k_desc, v_desc, q_smem, out_smem, dout_smem, k_smem, v_smem,
            q_full, q_empty, kv_full, kv_empty, n_heads, n_all_heads, n_q_tiles, n_few, PAIRS)),
        (_heads_consumer, (
            dq_desc, dk_desc, dv_desc, lse_ptr, q_smem, out_smem, dout_smem, k_smem, v_smem, stats_smem, ds_smem,
            dq_smem, dq_sums, q_full, q_empty, kv_full, kv_empty, n_heads, n_all_heads, n_q_tiles, n_few, seq_q,
            seq_kv, lower, upper, scale, scale_log2, PAIRS, HAS_LOWER, HAS_UPPER, 0)),
        (_heads_consumer, (
            dq_desc, dk_desc, dv_desc, lse_ptr, q_smem, out_smem, dout_smem, k_smem, v_smem, stats_smem, ds_smem,
            dq_smem, dq_sums, q_full, q_empty, kv_full, kv_empty, n_heads, n_all_heads, n_q_tiles, n_few, seq_q,
            seq_kv, lower, upper, scale, scale_log2, PAIRS, HAS_LOWER, HAS_UPPER, 1)),
    ], [4, 4], [240, 240])
    # fmt: on


def supports(dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether heads are short, each with its own keys, and half of the multiprocessors or more have one.

    Of few keys there may be many queries, if programs have about equal numbers of heads.
    """
    n_heads, n_programs = q.shape[0] * q.shape[1], num_multiprocessors(q.device)
    is_short = max(q.shape[2], k.shape[2]) <= 2 * _PAIR_KEYS
    is_even = 3 * n_heads >= 2 * cdiv(n_heads, n_programs) * n_programs
    return (
        dlse is None
        and q.shape[1] == k.shape[1]
        and (is_short or (k.shape[2] <= _PAIR_KEYS and is_even))
        and row_width(q) == row_width(v) == _SIDE.value
        and 2 * n_heads >= n_programs
        and tma_can_address(out)
    )


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    lower: int | None,
    upper: int | None,
    scale: float,
) -> None:
    """As `attention_backward.backward`, for inputs that `supports` lets through."""
    batch, n_heads, seq_q, _ = q.shape
    seq_kv = k.shape[2]
    n_q_tiles = cdiv(seq_q, 64)
    pairs = cdiv(seq_kv, _PAIR_KEYS)
    tma_dq, tma_dk, tma_dv = (x if tma_can_address(x) else padded(x) for x in (dq, dk, dv))
    tile = [1, 1, 64, 64]
    launch(
        _attention_bwd_heads_kernel,
        (min(batch * n_heads, num_multiprocessors(q.device)),),
        descriptor(q, tile), descriptor(out, tile), descriptor(dout, tile), descriptor(tma_dq, [1, 1, 64, 32]),
        descriptor(k, tile), descriptor(v, tile), descriptor(tma_dk, tile), descriptor(tma_dv, tile), lse,
        n_heads, batch * n_heads, n_q_tiles, 0 if upper is None else min(n_q_tiles, max(0, (_PAIR_KEYS - upper) // 64)),
        seq_q, seq_kv, max(lower or 0, -seq_q), min(upper or 0, seq_kv), scale, scale * LOG2_E,
        PAIRS=pairs, STAGES=4 - pairs,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, num_warps=4,
    )  # fmt: skip
    for target, x in ((tma_dq, dq), (tma_dk, dk), (tma_dv, dv)):
        if target is not x:
            x.copy_(target)
