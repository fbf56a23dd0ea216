"""Flash attention backward for Hopper, in Gluon: dQ, dK and dV in one pass over the tiles.

A program has one tile of 128 keys after another, keeps their dK and dV in registers and walks the queries, or shares
them with other programs that walk other queries; one warp group starts TMA copies, two do the arithmetic. dQ is summed
in float32 memory by TMA reductions, whose order is not fixed, so dQ may differ in its last bits between runs (dK and dV
do not). Where that matters, this kernel leaves dQ to `attention_gradients`, which also has the three gradients of rows
past 128 numbers.

Source: Shah et al., FlashAttention-3 (2024), for the order of the products.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .._launch import cdiv, launch, next_power_of_2, num_multiprocessors, padded, scratch, table
from .._launch import descriptor as launch_descriptor
from ..attention import _row_statistics
from ._gluon import (
    TensorDescriptor,
    as_row,
    as_tiles,
    async_load,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    meet,
    opaque,
    phase,
    reduce_add,
    store_wait,
    tma_can_address,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .attention_forward import LOG2_E, schedule
from .attention_gradients import QUERIES_PER_TILE, STATS_LAYOUT, fill_dkdv, fill_dq, heads_of_section
from .attention_rows import (
    allocate,
    columns,
    load_rows,
    parts,
    row_width,
    scale_sums,
    some_rows,
    start_scores,
    start_sums,
    store_rows,
    store_tile,
    wait_sums,
    zero_sums,
)

KEYS_PER_PROGRAM = 128


@gluon.jit
def _query_tiles(kv_tile, n_q_tiles, lower, upper, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr):
    """First query tile of a key tile, and how many there are. Key j is allowed to the queries j - upper to j - lower.

    Without limits each key tile starts elsewhere, so that programs under way at once add to different rows of dQ.
    """
    first = 0
    end = n_q_tiles
    if HAS_UPPER:
        first = gl.minimum(gl.maximum(kv_tile * 128 - upper, 0) // 64, n_q_tiles)
    if HAS_LOWER:
        end = gl.minimum(gl.maximum(kv_tile * 128 + 127 - lower + 64, 0) // 64, n_q_tiles)
    if not (HAS_LOWER or HAS_UPPER):
        first = (kv_tile * 2) % n_q_tiles
        end = first + n_q_tiles
    return first, gl.maximum(end - first, 0)


@gluon.jit
def _item(n_done, schedule_ptr, schedule_width, n_items, HAS_LIMIT: gl.constexpr):
    """The number of the item that this program does after n_done others; negative after its last.

    An item is a key tile of a head, or a part of one: of head after head, and there of tile after tile. Without limits
    whole tiles take equally long, and so do the parts, which come last; so programs take the items in turn. (With
    limits, all key tiles are shared, or none.)
    """
    if HAS_LIMIT:
        item = gl.load(schedule_ptr + gl.program_id(0) * schedule_width + n_done)
    else:
        item = gl.program_id(0) + n_done * gl.num_programs(0)
        item = gl.where(item < n_items, item, -1)
    return item


@gluon.jit
def _work(
    item, n_kv_tiles, n_q_tiles, n_whole, n_parts, lower, upper,
    HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """The key tile and head of an item, the first query tile that meets it, how many do, and which of them are its own.

    With HAS_PARTS, n_parts items share each key tile from the n_whole-th on.
    """
    tile = item
    if HAS_PARTS:
        part = item - n_whole  # of all parts; negative where the item is a whole tile
        tile = gl.where(part < 0, item, n_whole + part // n_parts)
    kv_tile = tile % n_kv_tiles
    first, n = _query_tiles(kv_tile, n_q_tiles, lower, upper, HAS_LOWER, HAS_UPPER)
    begin = 0
    end = n
    if HAS_PARTS:
        if part >= 0:
            begin = part % n_parts * n // n_parts
            end = (part % n_parts + 1) * n // n_parts
    return kv_tile, tile // n_kv_tiles, first, n, begin, end


@gluon.jit
def _wrapped(q_tile, n_q_tiles, HAS_LIMIT: gl.constexpr):
    if not HAS_LIMIT:
        q_tile = gl.where(q_tile >= n_q_tiles, q_tile - n_q_tiles, q_tile)
    return q_tile


@gluon.jit
def _bwd_producer(
    q_desc, dout_desc, k_desc, v_desc, stats_desc, q_smem, dout_smem, k_smem, v_smem, stats_smem,
    kv_full, kv_empty, q_full, dout_full, q_empty, schedule_ptr, schedule_width, n_items, n_kv_tiles, n_q_tiles,
    n_heads, group_size, n_whole, n_parts, lower, upper,
    HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """Copies K and V of one item after another, and for each Q, dO and the row statistics of its query tiles."""
    STAGES: gl.constexpr = q_full.shape[0]
    KV_STAGES: gl.constexpr = kv_full.shape[0]
    HAS_LIMIT: gl.constexpr = HAS_LOWER or HAS_UPPER
    n_kv_heads = n_heads // group_size
    step = 0
    n_done = 0
    item = _item(0, schedule_ptr, schedule_width, n_items, HAS_LIMIT)
    while item >= 0:
        next_item = _item(n_done + 1, schedule_ptr, schedule_width, n_items, HAS_LIMIT)
        kv_tile, kv_head, first, _, begin, end = _work(
            item, n_kv_tiles, n_q_tiles, n_whole, n_parts, lower, upper, HAS_LOWER, HAS_UPPER, HAS_PARTS
        )
        kv_stage = n_done % KV_STAGES
        mbarrier.wait(kv_empty.index(kv_stage), phase(n_done, KV_STAGES) ^ 1)
        mbarrier.expect(kv_full.index(kv_stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        b = kv_head // n_kv_heads
        h = kv_head % n_kv_heads
        load_rows(k_desc, b, h, kv_tile * 128, k_smem, kv_stage, kv_full.index(kv_stage))
        load_rows(v_desc, b, h, kv_tile * 128, v_smem, kv_stage, kv_full.index(kv_stage))
        if n_done == 0:
            # The row statistics, and the zeros to which dQ is added, are written by the kernel before this one.
            gdc_wait()
            gdc_launch_dependents()
        for head in range(kv_head * group_size, (kv_head + 1) * group_size):
            b = head // n_heads
            h = head % n_heads
            for i in range(begin, end):
                stage = step % STAGES
                q_tile = _wrapped(first + i, n_q_tiles, HAS_LIMIT)
                mbarrier.wait(q_empty.index(stage), phase(step, STAGES) ^ 1)
                mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + 2 * stats_desc.block_type.nbytes)
                load_rows(q_desc, b, h, q_tile * 64, q_smem, stage, q_full.index(stage))
                for c in gl.static_range(2):
                    row = as_row(stats_smem.index(2 * stage + c), stats_desc.layout)
                    async_load(stats_desc, [(head * n_q_tiles + q_tile) * 2 + c, 0], q_full.index(stage), row)
                mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
                load_rows(dout_desc, b, h, q_tile * 64, dout_smem, stage, dout_full.index(stage))
                step += 1
        n_done += 1
        item = next_item


@gluon.constexpr_function
def _fits_registers(block_d, block_dv, has_dq):
    """Whether K and V fit in registers as operands of S and dP: a quarter less traffic from shared memory.

    Not without dQ: ptxas of Triton 3.6 was seen to put dS into K's registers then, and the next step's scores were
    wrong.
    """
    return block_d == 64 and block_dv == 64 and has_dq


@gluon.constexpr_function
def _begins_early(block_d, block_dv, has_limit):
    """Whether dQ of a tile is better computed under the next one's softmax than under its dK.

    Measured; with 128 columns there are no registers for it.
    """
    width = max(block_d, block_dv)
    return width < 128 and not (width == 64 and has_limit)


@gluon.jit
def _own_rows(smem, kv_stage, WIDTH: gl.constexpr, CONSUMER: gl.constexpr):
    """This consumer's half of the keys or values."""
    return some_rows(parts(smem, kv_stage, WIDTH), CONSUMER * 64, 64)


@gluon.jit
def _start_dq(step, row, k_smem, ds_smem, ds_full, kv_stage, CONSUMER: gl.constexpr):
    """Start this consumer's half of dQ, transposed, of the tile at `step`: 64 columns by 64 or 32 queries.

    Before the first tile, where row < 0, it is of whatever lies there, or is just being written; nobody adds that.
    """
    K_COLUMNS: gl.constexpr = k_smem[0].shape[4]
    DQ_COLS: gl.constexpr = 64 if K_COLUMNS == 128 else 32
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLS, 16])
    dq_zeros = gl.zeros([64, DQ_COLS], gl.float32, DQ_LAYOUT)
    if k_smem[0].shape[0] > 1:
        # Opaque, too: without it, dQ was wrong where a mask splits the loop over the queries.
        kv_stage = opaque(kv_stage)
    ds_both = ds_smem.index(step & 1)
    if K_COLUMNS == 128:
        k_half = columns(k_smem, kv_stage, CONSUMER * 64, 64)
        ds_half = ds_both
    else:
        k_half = columns(k_smem, kv_stage, 0, 64)
        ds_half = ds_both.slice(CONSUMER * 32, 32, dim=1)
    mbarrier.wait(ds_full.index(step & 1), phase(step, 2), pred=row >= 0)
    return warpgroup_mma(k_half.permute((1, 0)), ds_half, dq_zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_dq(dq, step, row, dq_smem, dq_desc, ds_empty, CONSUMER: gl.constexpr):
    """Add this half of dQ to the float32 sums from `row` on, unless that is negative, and hand dS back."""
    store_wait(0)
    dq_smem.permute((1, 0)).store(dq)
    fence_async_shared()
    if row >= 0:
        if dq.shape[1] == 64:
            reduce_add(dq_desc, [row, CONSUMER * 64], dq_smem)
        else:
            reduce_add(dq_desc, [row + CONSUMER * 32, 0], dq_smem)
    mbarrier.arrive(ds_empty.index(step & 1), count=1, pred=row >= 0)


@gluon.jit
def _bwd_step(
    step, row, dk, dv, k_own, v_own, k_smem, v_smem, q_smem, dout_smem, stats_smem, ds_smem, dq_smem, dq_desc,
    q_full, dout_full, q_empty, ds_full, ds_empty, kv_stage, head, kv_tile, q_tile, n_q_tiles, seq_kv, lower, upper,
    scale, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_DQ: gl.constexpr, DQ_FIRST: gl.constexpr,
    MASK_LOWER: gl.constexpr, MASK_UPPER: gl.constexpr, EVEN_Q: gl.constexpr, EVEN_KV: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """One tile of 64 queries against this consumer's 64 keys; S, P and dP stand transposed (keys x queries).

    dQ needs the dS of both consumers. It is computed for the tile before this one, which begins at `row`, so that they
    may be a step apart: while one multiplies, the other takes exponentials. The softmax runs under dP, and with
    DQ_FIRST under dQ; dS runs under dV, and dQ leaves under dK. Returns the row of this tile, dK and dV.
    """
    dtype: gl.constexpr = q_smem[0].dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    STAGES: gl.constexpr = q_full.shape[0]
    N_DQ_FIRST: gl.constexpr = 1 if DQ_FIRST else 0
    stage = step % STAGES
    q = parts(q_smem, stage, BLOCK_D)
    dout = parts(dout_smem, stage, BLOCK_DV)

    mbarrier.wait(q_full.index(stage), phase(step, STAGES))
    lse = stats_smem.index(2 * stage).load(COLS)
    if not _fits_registers(BLOCK_D, BLOCK_DV, HAS_DQ):
        # Opaque, so that each step computes the addresses: kept in registers they would push other values out.
        k_own = _own_rows(k_smem, opaque(kv_stage), BLOCK_D, CONSUMER)
        v_own = _own_rows(v_smem, opaque(kv_stage), BLOCK_DV, CONSUMER)
    s_token = start_scores(k_own, q)
    mbarrier.wait(dout_full.index(stage), phase(step, STAGES))
    dp_token = start_scores(v_own, dout)
    if DQ_FIRST:
        dq_token = _start_dq(step - 1, row, k_smem, ds_smem, ds_full, kv_stage, CONSUMER)
    s = warpgroup_mma_wait(len(dv) + N_DQ_FIRST, deps=(s_token,))  # dP has as many parts as dV
    keys = kv_tile * 128 + CONSUMER * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    queries = q_tile * 64 + gl.arange(0, 64, COLS)
    # Choices, not `cut_off`: with 128 columns there are no registers for the distances.
    if MASK_UPPER:
        s = gl.where(keys[:, None] <= queries[None, :] + upper, s, float("-inf"))
    if MASK_LOWER:
        s = gl.where(keys[:, None] >= queries[None, :] + lower, s, float("-inf"))
    if not EVEN_KV:
        s = gl.where(keys[:, None] < seq_kv, s, float("-inf"))
    if not EVEN_Q:
        # Past the end the score is NaN for a key of NaN, which may be one that no query sees. (The choice is on s: with
        # one on p, Triton 3.6 waits for each product before it starts the next.)
        s = gl.where(lse[None, :] == float("inf"), float("-inf"), s)
    p = gl.exp2(s * scale_log2 - lse[None, :])
    delta = stats_smem.index(2 * stage + 1).load(COLS)
    dv_tokens = start_sums(p.to(dtype), dout, dv)
    dp = warpgroup_mma_wait(len(dv) + N_DQ_FIRST, deps=(dp_token,))
    ds = (p * (dp - delta[None, :])).to(dtype)
    if HAS_DQ:
        mbarrier.wait(ds_empty.index(step & 1), phase(step, 2) ^ 1)
        ds_smem.index(step & 1).slice(CONSUMER * 64, 64, dim=0).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(step & 1), count=1)
        if not DQ_FIRST:
            dq_token = _start_dq(step - 1, row, k_smem, ds_smem, ds_full, kv_stage, CONSUMER)
    dk_tokens = start_sums(ds, q, dk)
    if HAS_DQ:
        if not DQ_FIRST:
            dv = wait_sums(dv_tokens, 1 + len(dk))
        dq = warpgroup_mma_wait(len(dk) + (len(dv) if DQ_FIRST else 0), deps=(dq_token,)) * scale
        _add_dq(dq, step - 1, row, dq_smem, dq_desc, ds_empty, CONSUMER)
        row = (head * n_q_tiles + q_tile) * 64
    if DQ_FIRST or not HAS_DQ:
        dv = wait_sums(dv_tokens, len(dk))
    dk = wait_sums(dk_tokens, 0)
    mbarrier.arrive(q_empty.index(stage), count=1)
    return row, dk, dv


@gluon.jit
def _bwd_head(
    step, row, dk, dv, k_own, v_own, k_smem, v_smem, q_smem, dout_smem, stats_smem, ds_smem, dq_smem, dq_desc,
    q_full, dout_full, q_empty, ds_full, ds_empty, kv_stage, head, kv_tile, first, n, begin, end, n_q_tiles, seq_kv,
    lower, upper, scale, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_DQ: gl.constexpr, HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr, HAS_PARTS: gl.constexpr, DIAGONAL_FIRST: gl.constexpr, EVEN_Q: gl.constexpr,
    EVEN_KV: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Of the n query tiles of one head, which begin with the first, those from `begin` to `end`.

    Returns the next step, the row of the last tile, which goes on to the next head, and dK and dV.
    """
    # Where the tiles end that the upper limit cuts, and where those begin that the lower one cuts.
    full_begin = begin
    full_end = end
    if DIAGONAL_FIRST:
        full_begin = 2
    elif HAS_UPPER:
        full_begin = gl.minimum(gl.cdiv(gl.maximum(kv_tile * 128 + 127 - upper, 0), 64) - first, n)
    if HAS_LOWER:
        # A narrow band has no whole tile.
        full_end = gl.minimum(gl.maximum(gl.maximum(kv_tile * 128 - lower + 1, 0) // 64 - first, full_begin), n)
    if HAS_PARTS:
        full_begin = gl.minimum(gl.maximum(full_begin, begin), end)
        full_end = gl.minimum(gl.maximum(full_end, begin), end)
    bounds = (begin, full_begin, full_end, end)
    HAS_LIMIT: gl.constexpr = HAS_LOWER or HAS_UPPER
    DQ_FIRST: gl.constexpr = HAS_DQ and _begins_early(BLOCK_D, BLOCK_DV, HAS_LIMIT)
    for part in gl.static_range(0 if HAS_UPPER else 1, 3 if HAS_LOWER else 2):
        for i in range(bounds[part], bounds[part + 1]):
            row, dk, dv = _bwd_step(
                step + i - begin, row, dk, dv, k_own, v_own, k_smem, v_smem, q_smem, dout_smem, stats_smem, ds_smem,
                dq_smem, dq_desc, q_full, dout_full, q_empty, ds_full, ds_empty, kv_stage, head, kv_tile,
                _wrapped(first + i, n_q_tiles, HAS_LIMIT), n_q_tiles, seq_kv, lower, upper, scale, scale_log2,
                BLOCK_D, BLOCK_DV, HAS_DQ, DQ_FIRST, HAS_LOWER and part != 1, HAS_UPPER and part != 1,
                EVEN_Q, EVEN_KV, CONSUMER,
            )  # fmt: skip
    return step + end - begin, row, dk, dv


@gluon.jit
def _store_gradients(
    dk_desc, dv_desc, batch, head, row, ds_smem, dq_smem, dk, dv, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Store this consumer's rows where dQ and dS were; each consumer then copies one of both to memory."""
    dk_smem = (as_tiles(dq_smem, dk_desc),)
    dv_smem = (as_tiles(ds_smem, dv_desc),)
    store_rows(some_rows(parts(dk_smem, 0, BLOCK_D), CONSUMER * 64, 64), dk)
    store_rows(some_rows(parts(dv_smem, 0, BLOCK_DV), CONSUMER * 64, 64), dv)
    fence_async_shared()
    meet()
    if CONSUMER == 0:
        store_tile(dk_desc, batch, head, row, dk_smem, 0, BLOCK_D)
    else:
        store_tile(dv_desc, batch, head, row, dv_smem, 0, BLOCK_DV)


@gluon.jit
def _store_part(ptr, sums, STRIDE: gl.constexpr):
    """Store 64 rows in float32."""
    for i in gl.static_range(len(sums)):
        rows = gl.arange(0, 64, gl.SliceLayout(1, sums[i].type.layout))
        cols = gl.arange(0, sums[i].shape[1], gl.SliceLayout(0, sums[i].type.layout))
        gl.store(ptr + rows[:, None] * STRIDE + cols[None, :], sums[i])
        ptr += sums[i].shape[1]


@gluon.jit
def _bwd_consumer(
    dk_desc, dv_desc, dq_desc, part_ptr, q_smem, dout_smem, k_smem, v_smem, stats_smem, ds_smem, dq_smem,
    kv_full, kv_empty, q_full, dout_full, q_empty, ds_full, ds_empty, schedule_ptr, schedule_width, n_items,
    n_kv_tiles, n_q_tiles, n_heads, group_size, n_whole, n_parts, seq_kv, lower, upper, scale, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, IS_GROUPED: gl.constexpr, HAS_DQ: gl.constexpr,
    HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, HAS_PARTS: gl.constexpr, DIAGONAL_FIRST: gl.constexpr,
    EVEN_Q: gl.constexpr, EVEN_KV: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Owns 64 keys of each item: keeps their dK and dV in registers while the query tiles of each head pass by."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    KV_STAGES: gl.constexpr = kv_full.shape[0]
    HAS_LIMIT: gl.constexpr = HAS_LOWER or HAS_UPPER
    n_kv_heads = n_heads // group_size
    dq_own = dq_smem.index(CONSUMER)
    step = 0
    n_done = 0
    item = _item(0, schedule_ptr, schedule_width, n_items, HAS_LIMIT)
    while item >= 0:
        kv_tile, kv_head, first, n, begin, end = _work(
            item, n_kv_tiles, n_q_tiles, n_whole, n_parts, lower, upper, HAS_LOWER, HAS_UPPER, HAS_PARTS
        )
        kv_stage = n_done % KV_STAGES
        dk = zero_sums(64, BLOCK_D)
        dv = zero_sums(64, BLOCK_DV)
        k_own = _own_rows(k_smem, kv_stage, BLOCK_D, CONSUMER)
        v_own = _own_rows(v_smem, kv_stage, BLOCK_DV, CONSUMER)
        mbarrier.wait(kv_full.index(kv_stage), phase(n_done, KV_STAGES))
        if _fits_registers(BLOCK_D, BLOCK_DV, HAS_DQ):
            k_own = (k_own[0].load(gl.DotOperandLayout(0, S_LAYOUT, 2)),)
            v_own = (v_own[0].load(gl.DotOperandLayout(0, S_LAYOUT, 2)),)
        # The gradients of the item before this one have left the place of dS and dQ, both of them.
        store_wait(0)
        meet()
        row = -1
        if IS_GROUPED:
            for head in range(kv_head * group_size, (kv_head + 1) * group_size):
                step, row, dk, dv = _bwd_head(
                    step, row, dk, dv, k_own, v_own, k_smem, v_smem, q_smem, dout_smem, stats_smem, ds_smem, dq_own,
                    dq_desc, q_full, dout_full, q_empty, ds_full, ds_empty, kv_stage, head, kv_tile, first, n, begin,
                    end, n_q_tiles, seq_kv, lower, upper, scale, scale_log2, BLOCK_D, BLOCK_DV, HAS_DQ, HAS_LOWER,
                    HAS_UPPER, HAS_PARTS, DIAGONAL_FIRST, EVEN_Q, EVEN_KV, CONSUMER,
                )  # fmt: skip
        else:
            step, row, dk, dv = _bwd_head(
                step, row, dk, dv, k_own, v_own, k_smem, v_smem, q_smem, dout_smem, stats_smem, ds_smem, dq_own,
                dq_desc, q_full, dout_full, q_empty, ds_full, ds_empty, kv_stage, kv_head, kv_tile, first, n, begin,
                end, n_q_tiles, seq_kv, lower, upper, scale, scale_log2, BLOCK_D, BLOCK_DV, HAS_DQ, HAS_LOWER,
                HAS_UPPER, HAS_PARTS, DIAGONAL_FIRST, EVEN_Q, EVEN_KV, CONSUMER,
            )  # fmt: skip
        if HAS_DQ:
            dq_token = _start_dq(step - 1, row, k_smem, ds_smem, ds_full, kv_stage, CONSUMER)
            dq = warpgroup_mma_wait(0, deps=(dq_token,)) * scale
            _add_dq(dq, step - 1, row, dq_own, dq_desc, ds_empty, CONSUMER)
        mbarrier.arrive(kv_empty.index(kv_stage), count=1)
        store_wait(0)
        meet()  # both consumers are past their last read of dS, and their last dQ has left
        dk = scale_sums(dk, gl.full([64], scale, gl.float32, gl.SliceLayout(1, S_LAYOUT)))
        batch = kv_head // n_kv_heads
        own_head = kv_head % n_kv_heads
        key = kv_tile * 128
        if HAS_PARTS:
            part = item - n_whole
            if part >= 0:
                row_ptrs = part_ptr + (part.to(gl.int64) * 128 + CONSUMER * 64) * (BLOCK_D + BLOCK_DV)
                _store_part(row_ptrs, dk, BLOCK_D + BLOCK_DV)
                _store_part(row_ptrs + BLOCK_D, dv, BLOCK_D + BLOCK_DV)
            else:
                _store_gradients(
                    dk_desc, dv_desc, batch, own_head, key, ds_smem, dq_smem, dk, dv, BLOCK_D, BLOCK_DV, CONSUMER
                )
        else:
            _store_gradients(
                dk_desc, dv_desc, batch, own_head, key, ds_smem, dq_smem, dk, dv, BLOCK_D, BLOCK_DV, CONSUMER
            )
        n_done += 1
        item = _item(n_done, schedule_ptr, schedule_width, n_items, HAS_LIMIT)
    store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "schedule_width", "n_items", "n_kv_tiles", "n_q_tiles", "n_heads", "group_size", "n_whole", "n_parts", "seq_kv",
        "lower", "upper",
    ]
)  # fmt: skip
def _attention_bwd_hopper_kernel(
    q_desc,  # (batch, n_heads, seq_q, head_dim)
    dout_desc,  # (batch, n_heads, seq_q, head_dim_v)
    k_desc,  # (batch, n_kv_heads, seq_kv, head_dim)
    v_desc,  # (batch, n_kv_heads, seq_kv, head_dim_v)
    stats_desc,  # (batch * n_heads * n_q_tiles * 2, 64): of each query tile lse in base 2, then delta
    dk_desc,  # (batch, n_kv_heads, seq_kv, head_dim)
    dv_desc,  # (batch, n_kv_heads, seq_kv, head_dim_v)
    dq_desc,  # (batch * n_heads * n_q_tiles * 64, 64 or 128), float32, zero at the start
    part_ptr,  # (items beyond n_whole, 128, BLOCK_D + BLOCK_DV), float32: dK and dV of their parts
    schedule_ptr,  # (programs, schedule_width), int32, with limits: the items of each program, -1 after its last
    schedule_width,
    n_items,
    n_kv_tiles,
    n_q_tiles,
    n_heads,
    group_size,
    n_whole,
    n_parts,
    seq_kv,
    lower,
    upper,
    scale,
    scale_log2,
    BLOCK_D: gl.constexpr,  # columns of q and k that are computed, and
    BLOCK_DV: gl.constexpr,  # of v and dO; each is one of WIDTHS up to 128
    STAGES: gl.constexpr,  # of query tiles
    KV_STAGES: gl.constexpr,  # of key tiles
    IS_GROUPED: gl.constexpr,  # several query heads share a head of keys
    HAS_DQ: gl.constexpr,  # otherwise dq_desc is not used
    HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr,
    HAS_PARTS: gl.constexpr,  # items from n_whole on share key tiles, n_parts each; with limits n_whole is 0
    DIAGONAL_FIRST: gl.constexpr,  # exactly the first two query tiles of every key tile need the upper limit's mask
    EVEN_Q: gl.constexpr,  # no tile of queries passes their end
    EVEN_KV: gl.constexpr,
):
    """An item is a key tile (128 keys) of one head, or a part of one: its dK and dV, and its share of dQ."""
    dtype: gl.constexpr = q_desc.dtype
    q_smem = allocate(STAGES, q_desc, BLOCK_D)
    dout_smem = allocate(STAGES, dout_desc, BLOCK_DV)
    k_smem = allocate(KV_STAGES, k_desc, BLOCK_D)
    v_smem = allocate(KV_STAGES, v_desc, BLOCK_DV)
    stats_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 64], gl.float16)
    ds_smem = gl.allocate_shared_memory(dtype, [2, 128, 64], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)  # noqa: RUF005
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(KV_STAGES):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=2)
    # fmt: off
    gl.warp_specialize([
        (_bwd_producer, (
            q_desc, dout_desc, k_desc, v_desc, stats_desc, q_smem, dout_smem, k_smem, v_smem, stats_smem,
            kv_full, kv_empty, q_full, dout_full, q_empty, schedule_ptr, schedule_width, n_items, n_kv_tiles, n_q_tiles,
            n_heads, group_size, n_whole, n_parts, lower, upper, HAS_LOWER, HAS_UPPER, HAS_PARTS)),
        (_bwd_consumer, (
            dk_desc, dv_desc, dq_desc, part_ptr, q_smem, dout_smem, k_smem, v_smem, stats_smem, ds_smem, dq_smem,
            kv_full, kv_empty, q_full, dout_full, q_empty, ds_full, ds_empty, schedule_ptr, schedule_width, n_items,
            n_kv_tiles, n_q_tiles, n_heads, group_size, n_whole, n_parts, seq_kv, lower, upper, scale, scale_log2,
            BLOCK_D, BLOCK_DV, IS_GROUPED, HAS_DQ, HAS_LOWER, HAS_UPPER, HAS_PARTS,
            DIAGONAL_FIRST, EVEN_Q, EVEN_KV, 0)),
        (_bwd_consumer, (
            dk_desc, dv_desc, dq_desc, part_ptr, q_smem, dout_smem, k_smem, v_smem, stats_smem, ds_smem, dq_smem,
            kv_full, kv_empty, q_full, dout_full, q_empty, ds_full, ds_empty, schedule_ptr, schedule_width, n_items,
            n_kv_tiles, n_q_tiles, n_heads, group_size, n_whole, n_parts, seq_kv, lower, upper, scale, scale_log2,
            BLOCK_D, BLOCK_DV, IS_GROUPED, HAS_DQ, HAS_LOWER, HAS_UPPER, HAS_PARTS,
            DIAGONAL_FIRST, EVEN_Q, EVEN_KV, 1)),
    ], [4, 4], [240, 240])
    # fmt: on


@triton.jit(do_not_specialize=["n_q_tiles", "n_heads", "seq_q"])
def _attention_bwd_hopper_prepare_kernel(
    out_ptr,  # (batch, n_heads, seq_q, head_dim_v)
    dout_ptr,  # (batch, n_heads, seq_q, head_dim_v)
    lse_ptr,  # (batch, n_heads, seq_q)
    dlse_ptr,  # (batch, n_heads, seq_q), or None
    stats_ptr,  # (batch * n_heads * n_q_tiles, 2, 64)
    dq_sum_ptr,  # (batch * n_heads * n_q_tiles * 64, BLOCK_D)
    out_strides,  # of batch, head and row
    dout_strides,
    n_q_tiles,
    n_heads,
    seq_q,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_DQ_SUM: tl.constexpr,
):
    """Program i, counted from the end, owns query tile i: delta = sum(O * dO) - dlse of each row; dQ's sums become 0.

    From the end, because what the main kernel reads first is then what the cache saw last.
    """
    # The main kernel may make itself ready, and copy its first keys, from now on.
    gdc_launch_dependents()
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    head = tile // n_q_tiles
    rows = (tile % n_q_tiles) * 64 + tl.arange(0, 64)
    cols = tl.arange(0, BLOCK_DV)[None, :]
    row_mask = rows < seq_q
    mask = row_mask[:, None] & (cols < HEAD_DIM_V)
    b = head // n_heads
    h = head % n_heads
    out_ptrs = out_ptr + b * out_strides[0] + h * out_strides[1] + rows[:, None] * out_strides[2] + cols
    dout_ptrs = dout_ptr + b * dout_strides[0] + h * dout_strides[1] + rows[:, None] * dout_strides[2] + cols
    out = tl.load(out_ptrs, mask=mask, other=0.0)
    dout = tl.load(dout_ptrs, mask=mask, other=0.0)
    lse_log2, delta = _row_statistics(out, dout, lse_ptr, dlse_ptr, head * seq_q + rows, row_mask)
    stats_ptrs = stats_ptr + tile * 128 + tl.arange(0, 64)
    tl.store(stats_ptrs, lse_log2)
    tl.store(stats_ptrs + 64, delta)
    if HAS_DQ_SUM:
        dq_sum_ptrs = dq_sum_ptr + (tile * 64 + tl.arange(0, 64))[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        tl.store(dq_sum_ptrs, tl.zeros((64, BLOCK_D), tl.float32))


@triton.jit
def _sum_parts(part_ptr, n_parts, out_ptr, out_row_stride, row, n_rows, COLS: tl.constexpr, STRIDE: tl.constexpr):
    """Write 16 rows of a gradient: the sum of n_parts parts, in their order. part_ptr is at the first part's rows."""
    rows = tl.arange(0, 16)[:, None]
    cols = tl.arange(0, triton.next_power_of_2(COLS))[None, :]
    total = tl.zeros((16, triton.next_power_of_2(COLS)), tl.float32)
    for i in range(n_parts):
        total += tl.load(part_ptr + (i * 128 + rows) * STRIDE + cols, mask=cols < COLS, other=0.0)
    mask = (row + rows < n_rows) & (cols < COLS)
    tl.store(out_ptr + (row + rows) * out_row_stride + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _narrow_dq(
    tile, dq_sum_ptr, dq_ptr, dq_strides, n_q_tiles, n_heads, seq_q, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write dQ of a query tile, the tiles of all heads counted through, in its own dtype."""
    head = tile // n_q_tiles
    rows = (tile % n_q_tiles) * 64 + tl.arange(0, 64)
    cols = tl.arange(0, BLOCK_D)[None, :]
    dq = tl.load(dq_sum_ptr + (tile * 64 + tl.arange(0, 64))[:, None] * BLOCK_D + cols)
    head_ptr = dq_ptr + (head // n_heads) * dq_strides[0] + (head % n_heads) * dq_strides[1]
    dq_ptrs = head_ptr + rows[:, None] * dq_strides[2] + cols
    tl.store(dq_ptrs, dq.to(dq_ptr.dtype.element_ty), mask=(rows < seq_q)[:, None] & (cols < HEAD_DIM))


@triton.jit(
    do_not_specialize=[
        "n_tiles", "n_q_tiles", "n_heads", "seq_q", "n_whole", "n_parts", "n_kv_tiles", "n_kv_heads", "seq_kv",
    ]
)  # fmt: skip
def _attention_bwd_hopper_finish_kernel(
    dq_sum_ptr,  # (n_tiles * 64, BLOCK_D), float32
    dq_ptr,  # (batch, n_heads, seq_q, head_dim)
    part_ptr,  # (shared key tiles, n_parts, 128, WIDTH + WIDTH_V), float32: dK, then dV
    dk_ptr,  # (batch, n_kv_heads, seq_kv, head_dim)
    dv_ptr,  # (batch, n_kv_heads, seq_kv, head_dim_v)
    dq_strides,  # of batch, head and row
    dk_strides,
    dv_strides,
    n_tiles,  # of queries, of all heads
    n_q_tiles,
    n_heads,
    seq_q,
    n_whole,  # key tiles before the shared ones
    n_parts,
    n_kv_tiles,
    n_kv_heads,
    seq_kv,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    """The first n_tiles programs own a query tile each, and narrow its dQ, the last tile first.

    The others own 16 rows of a shared key tile each, and sum the parts of dK and dV.
    """
    gdc_wait()
    program = tl.program_id(0)
    if program < n_tiles:
        tile = (n_tiles - 1 - program).to(tl.int64)
        _narrow_dq(tile, dq_sum_ptr, dq_ptr, dq_strides, n_q_tiles, n_heads, seq_q, HEAD_DIM, BLOCK_D)
    elif HAS_PARTS:
        shared = (program - n_tiles) // 8
        own_row = (program - n_tiles) % 8 * 16
        head = (n_whole + shared) // n_kv_tiles
        row = ((n_whole + shared) % n_kv_tiles).to(tl.int64) * 128 + own_row
        b = (head // n_kv_heads).to(tl.int64)
        h = (head % n_kv_heads).to(tl.int64)
        STRIDE: tl.constexpr = WIDTH + WIDTH_V
        part_ptr += ((shared * n_parts).to(tl.int64) * 128 + own_row) * STRIDE
        dk_ptr += b * dk_strides[0] + h * dk_strides[1]
        dv_ptr += b * dv_strides[0] + h * dv_strides[1]
        _sum_parts(part_ptr, n_parts, dk_ptr, dk_strides[2], row, seq_kv, HEAD_DIM, STRIDE)
        _sum_parts(part_ptr + WIDTH, n_parts, dv_ptr, dv_strides[2], row, seq_kv, HEAD_DIM_V, STRIDE)


@functools.cache
def _shares(
    n_tiles: int, n_steps: int, group_size: int, n_columns: int, n_limits: int, n_processors: int
) -> tuple[int, int]:
    """How many key tiles are an item each, and into how many parts each of the others is divided.

    Args:
        n_tiles: key tiles.
        n_steps: the most query tiles that a key tile meets in a head of its group.
        n_columns: of K and V together.
        n_limits: with one of the two, a tile meets half as many on average, and short tiles come last.
    """
    n_shared = n_tiles if n_tiles <= n_processors else n_tiles % n_processors if n_limits == 0 else 0
    # A few tiles at the end were not worth dividing when each tile had a program of its own, which the hardware started
    # wherever there was room. Now they are their programs' last items; that has not been measured.
    if n_shared < min(n_tiles, n_processors // 4):
        return n_tiles, 1

    step_us = 0.8 + n_columns / 160

    def time(n_parts):
        """In steps. A program begins and ends in the time of two."""
        longest = group_size * cdiv(n_steps, n_parts) + 2
        rounds = n_shared * n_parts / n_processors
        steps = max(longest, rounds * (longest / 2 + 1)) if n_limits == 1 else math.ceil(rounds) * longest
        # Parts are mostly still in the cache when they are read.
        sum_us = 1 + n_shared * n_parts * KEYS_PER_PROGRAM * n_columns * 8 / 3.8e6
        return steps + (0 if n_parts == 1 else sum_us / step_us)

    n_parts = min(range(1, min(32, n_steps) + 1), key=time)
    return (n_tiles, 1) if n_parts == 1 else (n_tiles - n_shared, n_parts)


def _schedule_for(n_kv_heads, n_kv_tiles, n_q_tiles, n_parts, lower, upper, heads_per_section, n_programs, device):
    """The items of each program, where limits make them unequal; None where programs take them in turn."""
    if lower is None and upper is None:
        return None
    n_steps = []
    for key in range(0, n_kv_tiles * KEYS_PER_PROGRAM, KEYS_PER_PROGRAM):
        first = 0 if upper is None else max(0, key - upper) // QUERIES_PER_TILE
        last = n_q_tiles if lower is None else (key + KEYS_PER_PROGRAM - 1 - lower) // QUERIES_PER_TILE + 1
        n = max(0, min(last, n_q_tiles) - first)
        n_steps += [(i + 1) * n // n_parts - i * n // n_parts for i in range(n_parts)]
    return table(schedule(tuple(n_steps), n_kv_heads, heads_per_section, n_programs, len(n_steps), device))


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
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
    """Fill dQ, dK and dV, for inputs and limits that `attention_forward.supports` accepts.

    Args:
        dout: gradient of the output; TMA must be able to address it.
        dlse: gradient of lse, contiguous.
        out, lse: what the forward computed.
        dq, dk, dv: the gradients' memory; rows of head_dim contiguous numbers.
    """
    batch, n_heads, seq_q, head_dim = q.shape
    _, n_kv_heads, seq_kv, head_dim_v = v.shape
    width, width_v = row_width(q), row_width(v)
    block_d, block_dv = next_power_of_2(width), next_power_of_2(width_v)
    sums_dq = max(width, width_v) <= 128 and not torch.are_deterministic_algorithms_enabled()
    # An even number: a key tile's diagonal crosses two query tiles. Rows past the end count for nothing.
    n_q_tiles = 2 * cdiv(seq_q, 2 * QUERIES_PER_TILE)
    n_kv_tiles = cdiv(seq_kv, KEYS_PER_PROGRAM)
    n_tiles = batch * n_heads * n_q_tiles
    # About what Q, dO and the float32 sums of dQ take.
    heads_per_section = heads_of_section(batch * n_kv_heads, n_heads // n_kv_heads, seq_q * 4 * (block_d + block_dv))
    stats = scratch((n_tiles * 2, QUERIES_PER_TILE), torch.float32, q.device)
    dq_sum = scratch(((n_tiles if sums_dq else 1) * QUERIES_PER_TILE, block_d), torch.float32, q.device)
    launch(
        _attention_bwd_hopper_prepare_kernel,
        (n_tiles,),
        out, dout, lse, dlse, stats, dq_sum, out.stride()[:3], dout.stride()[:3], n_q_tiles, n_heads, seq_q,
        HEAD_DIM_V=head_dim_v, BLOCK_D=block_d, BLOCK_DV=block_dv, HAS_DQ_SUM=sums_dq,
        num_warps=8 if block_dv == 256 else 4,
    )  # fmt: skip
    stats_desc = launch_descriptor(
        TensorDescriptor, stats, tuple(stats.shape), stats.stride(), (1, QUERIES_PER_TILE), STATS_LAYOUT
    )
    tma_dk, tma_dv = (x if tma_can_address(x) else padded(x) for x in (dk, dv))
    if max(width, width_v) <= 128:
        n_key_tiles = batch * n_kv_heads * n_kv_tiles
        n_steps = n_q_tiles
        if lower is not None and upper is not None:
            n_steps = min(n_steps, cdiv(upper - lower + KEYS_PER_PROGRAM, QUERIES_PER_TILE) + 1)
        n_whole, n_parts = _shares(
            n_key_tiles, n_steps, n_heads // n_kv_heads, width + width_v,
            (lower is not None) + (upper is not None), num_multiprocessors(q.device),
        )  # fmt: skip
        n_shared = n_key_tiles - n_whole
        n_items = n_whole + n_shared * n_parts
        is_narrow = max(width, width_v) == 64
        n_programs = min(n_items, num_multiprocessors(q.device))
        items = _schedule_for(
            batch * n_kv_heads, n_kv_tiles, n_q_tiles, n_parts, lower, upper, heads_per_section, n_programs, q.device
        )
        dkdv_parts = scratch((n_shared * n_parts, KEYS_PER_PROGRAM, width + width_v), torch.float32, q.device)
        launch(
            _attention_bwd_hopper_kernel,
            (n_programs,),
            descriptor(q, [1, 1, QUERIES_PER_TILE, block_d]),
            descriptor(dout, [1, 1, QUERIES_PER_TILE, block_dv]),
            descriptor(k, [1, 1, KEYS_PER_PROGRAM, block_d]),
            descriptor(v, [1, 1, KEYS_PER_PROGRAM, block_dv]),
            stats_desc,
            descriptor(tma_dk, [1, 1, KEYS_PER_PROGRAM, block_d]),
            descriptor(tma_dv, [1, 1, KEYS_PER_PROGRAM, block_dv]),
            descriptor(dq_sum, [64, 64] if block_d == 128 else [32, 64]),
            dkdv_parts, stats if items is None else items, 0 if items is None else items.shape[1], n_items, n_kv_tiles,
            n_q_tiles, n_heads, n_heads // n_kv_heads, n_whole, n_parts, seq_kv, max(lower or 0, -seq_q),
            min(upper or 0, seq_kv), scale, scale * LOG2_E,
            BLOCK_D=width, BLOCK_DV=width_v, STAGES=3 if is_narrow else 2, KV_STAGES=2 if is_narrow and sums_dq else 1,
            IS_GROUPED=n_heads > n_kv_heads, HAS_DQ=sums_dq,
            HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, HAS_PARTS=n_shared > 0,
            DIAGONAL_FIRST=upper == 0 and seq_kv <= seq_q, EVEN_Q=seq_q % (2 * QUERIES_PER_TILE) == 0,
            EVEN_KV=seq_kv % KEYS_PER_PROGRAM == 0, num_warps=4, launch_pdl=True,
        )  # fmt: skip
        if sums_dq or n_shared:
            n_dq_tiles = n_tiles if sums_dq else 0
            launch(
                _attention_bwd_hopper_finish_kernel,
                (n_dq_tiles + n_shared * KEYS_PER_PROGRAM // 16,),
                dq_sum, dq, dkdv_parts, tma_dk, tma_dv, dq.stride()[:3], tma_dk.stride()[:3], tma_dv.stride()[:3],
                n_dq_tiles, n_q_tiles, n_heads, seq_q, n_whole, n_parts, n_kv_tiles, n_kv_heads, seq_kv,
                HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, BLOCK_D=block_d, WIDTH=width, WIDTH_V=width_v,
                HAS_PARTS=n_shared > 0, num_warps=4, launch_pdl=True,
            )  # fmt: skip
    else:
        fill_dkdv(tma_dk, tma_dv, q, dout, k, v, stats, stats_desc, lower, upper, scale)
    tma_dq = dq
    if not sums_dq:
        tma_dq = dq if tma_can_address(dq) else padded(dq)
        fill_dq(tma_dq, q, dout, k, v, stats, lower, upper, scale)
    for target, x in ((tma_dq, dq), (tma_dk, dk), (tma_dv, dv)):
        if target is not x:
            x.copy_(target)
