"""Attention: scores that never reach memory, forward and backward, for every length, head dimension and stride."""

import functools
import math
import sys
from typing import Literal, overload

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from . import hopper
from ._arguments import (
    INTS,
    LONGEST,
    NUMBERS,
    allows_tf32,
    autocast,
    check_same_device,
    check_tensor,
    got,
    in_shape,
    is_transformed,
    needs_autograd,
    number,
    refuse_batch_of_gradients,
)
from ._dot import dot, dot_precision, three_bf16
from ._launch import (
    cdiv,
    cuda_arch,
    descriptor,
    exceeds,
    is_amd,
    is_hopper,
    known,
    launch,
    next_power_of_2,
    num_multiprocessors,
    padded,
    pdl,
    scratch,
)
from ._registration import apply, batch_first, differentiable, operator
from ._replay import replayed

_MAX_HEAD_DIM = 256
# Keys and values of the heads that run at the same time should stay in the L2 cache; 32 MiB leave room for the rest.
_L2_BYTES = 32 * 2**20
# The backward's statistics of a query are stored for a whole number of tiles, of whatever size.
_PADDING = 128
_PREPROCESS_ROWS = 32
_PART_ROWS = 32
# Up to how many queries share a reading of K and V, and into how small a share of the keys they are cut at least.
_MAX_SPLIT_QUERIES = 64
_MIN_SPLIT_KEYS = 256


# --- what the kernels share -------------------------------------------------------------------------------------------


@triton.jit
def _tile_and_head(n_tiles, heads_per_section):
    """Which tile of which head (of all batches) this program owns, among n_tiles a head.

    Heads are worked off in sections small enough for the L2 cache. Within one, every head's tile 0 comes first, then
    every head's tile 1, and so on.
    """
    n_heads = tl.num_programs(0) // n_tiles
    first_head = tl.program_id(0) // (n_tiles * heads_per_section) * heads_per_section
    n_section_heads = tl.minimum(heads_per_section, n_heads - first_head)
    rank = tl.program_id(0) - first_head * n_tiles
    return rank // n_section_heads, first_head + rank % n_section_heads


@triton.jit
def _tile_bounds(
    first, last, lower, upper, length, BLOCK: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr
):
    """Which tiles of BLOCK columns the rows first..last of the score matrix need: (begin, full_begin, full_end, end).

    Row i is allowed the columns j with i + lower <= j <= i + upper and 0 <= j < length. In the tiles from full_begin to
    full_end all of them are allowed to all rows; the others from begin to end need a mask; the rest is skipped.
    """
    begin = 0
    full_begin = 0
    end = length
    full_end = length
    if HAS_LOWER:
        begin = tl.maximum(first + lower, 0)
        full_begin = tl.maximum(last + lower, 0)
    if HAS_UPPER:
        end = tl.maximum(tl.minimum(last + upper + 1, length), 0)
        full_end = tl.maximum(tl.minimum(first + upper + 1, length), 0)
    begin = begin // BLOCK
    end = tl.maximum(tl.cdiv(end, BLOCK), begin)
    full_begin = tl.minimum(tl.cdiv(full_begin, BLOCK), end)
    full_end = tl.maximum(full_end // BLOCK, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def _is_allowed(rows, cols, lower, upper, length, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr):
    """The mask of one tile of scores: the rule of `_tile_bounds`, element by element."""
    allowed = (cols < length)[None, :]
    if HAS_LOWER:
        allowed = allowed & (cols[None, :] >= rows[:, None] + lower)
    if HAS_UPPER:
        allowed = allowed & (cols[None, :] <= rows[:, None] + upper)
    return allowed


@triton.jit
def _tile_ptrs(x_ptr, strides, batch, head, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to the (BLOCK, BLOCK_D) tile of x[batch, head] that begins with row start; offsets have 64 bits.

    With ALIGN > 1 the last stride is 1 and the others are multiples of ALIGN. Saying so lets the compiler move ALIGN
    elements at a time, and keeps one compiled kernel for all lengths.
    """
    head_offset = batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    row_offsets = (start + tl.arange(0, BLOCK)).to(tl.int64) * strides[2]
    cols = tl.arange(0, BLOCK_D)
    if ALIGN > 1:
        ptrs = x_ptr + tl.multiple_of(head_offset, ALIGN) + tl.multiple_of(row_offsets, ALIGN)[:, None] + cols[None, :]
    else:
        ptrs = x_ptr + head_offset + row_offsets[:, None] + cols.to(tl.int64)[None, :] * strides[3]
    return ptrs


@triton.jit
def _load_tile(
    x,  # (batch, heads, length, head_dim): a pointer, or a tensor descriptor when USE_TMA
    strides,
    batch,
    head,
    start,
    length,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Rows start to start + BLOCK of x[batch, head] as a (BLOCK, BLOCK_D) tile, with zeros past the tensor's end."""
    if USE_TMA:
        # The tensor memory accelerator copies the box and fills with zeros by itself.
        tile = x.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_D)
    else:
        ptrs = _tile_ptrs(x, strides, batch, head, start, BLOCK, BLOCK_D, ALIGN)
        mask = (start + tl.arange(0, BLOCK) < length)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
        # Zeros, since these lanes reach matrix products: a padded column adds 0 to a score, a padded value 0 to a sum.
        tile = tl.load(ptrs, mask=mask, other=0.0)
    return tile


@triton.jit
def _load_statistics(x, batch_head, n_cols, start, BLOCK: tl.constexpr, USE_TMA: tl.constexpr):
    """Entries start to start + BLOCK of x[batch_head], which is a row of n_cols."""
    if USE_TMA:
        tile = x.load([batch_head, start]).reshape(BLOCK)
    else:
        tile = tl.load(x + batch_head.to(tl.int64) * n_cols + start + tl.arange(0, BLOCK))
    return tile


@triton.jit
def _store_tile(
    x_ptr,  # (batch, heads, length, head_dim)
    tile,  # (BLOCK, BLOCK_D)
    strides,
    batch,
    head,
    start,
    length,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """x[batch, head, start:start + BLOCK] = tile, as far as the tensor reaches."""
    ptrs = _tile_ptrs(x_ptr, strides, batch, head, start, BLOCK, BLOCK_D, ALIGN)
    mask = (start + tl.arange(0, BLOCK) < length)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    tl.store(ptrs, tile.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_batches", "n_heads", "length", "strides", "part_strides"])
def _parts_kernel(
    x_ptr,  # (n_batches, n_heads, length, head_dim), float32
    parts_ptr,  # (PARTS * n_batches, n_heads, length, head_dim), bfloat16
    n_batches,
    n_heads,
    length,
    strides,
    part_strides,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A program cuts BLOCK rows of a head into what `three_bf16` makes of them: the first PARTS of the three parts."""
    n_tiles = tl.cdiv(length, BLOCK)
    start = tl.program_id(0) % n_tiles * BLOCK
    batch = tl.program_id(0) // n_tiles // n_heads
    head = tl.program_id(0) // n_tiles % n_heads
    parts = three_bf16(_load_tile(x_ptr, strides, batch, head, start, length, HEAD_DIM, BLOCK, BLOCK_D, ALIGN, False))
    for part in tl.static_range(PARTS):
        to = batch + part * n_batches
        _store_tile(parts_ptr, parts[part], part_strides, to, head, start, length, HEAD_DIM, BLOCK, BLOCK_D, 8)


# --- forward ----------------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "seq_q", "seq_k", "n_heads", "group_size", "heads_per_section", "lower", "upper",
        "q_strides", "k_strides", "v_strides", "out_strides",
    ]
)  # fmt: skip
def _attention_fwd_kernel(
    q,  # (batch, n_heads, seq_q, head_dim): a pointer, or a tensor descriptor when USE_TMA; so are k and v
    k,  # (batch, n_heads // group_size, seq_k, head_dim)
    v,  # (batch, n_heads // group_size, seq_k, head_dim_v)
    out_ptr,  # (batch, n_heads, seq_q, head_dim_v)
    lse_ptr,  # (batch, n_heads, seq_q), contiguous; its dtype is that of the statistics
    seq_q,
    seq_k,
    n_heads,
    group_size,
    heads_per_section,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    lower,
    upper,
    scale: tl.float64,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns BLOCK_M queries of one head and walks the keys: out = softmax(q k^T scale) v, and its lse."""
    n_tiles = tl.cdiv(seq_q, BLOCK_M)
    tile, batch_head = _tile_and_head(n_tiles, heads_per_section)
    # Under a causal mask the last queries see the most keys: they start first, short tiles fill the gaps at the end.
    start = (n_tiles - 1 - tile) * BLOCK_M
    batch = batch_head // n_heads
    head = batch_head % n_heads
    kv_head = head // group_size
    rows = start + tl.arange(0, BLOCK_M)
    STATS_DTYPE: tl.constexpr = lse_ptr.dtype.element_ty
    # exp(x) is exp2(x * log2(e)); the hardware has exp2, and the factor joins the scale.
    scale_log2 = tl.full((), scale * 1.4426950408889634, STATS_DTYPE)

    q_tile = _load_tile(q, q_strides, batch, head, start, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGN, USE_TMA)
    # Finite, not -inf: a row whose first tile is all masked would compute -inf - (-inf) = NaN.
    LOWEST: tl.constexpr = -1.7976931348623157e308 if STATS_DTYPE == tl.float64 else -3.4028234663852886e38
    row_max = tl.full((BLOCK_M,), LOWEST, STATS_DTYPE)
    row_sum = tl.zeros((BLOCK_M,), STATS_DTYPE)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), STATS_DTYPE)

    last = tl.minimum(start + BLOCK_M, seq_q) - 1
    bounds = _tile_bounds(start, last, lower, upper, seq_k, BLOCK_N, HAS_LOWER, HAS_UPPER)
    # Part 0: the masked tiles before the full ones, which only a lower limit makes; 1: the full ones; 2: the masked
    # ones after them.
    for part in tl.static_range(0 if HAS_LOWER else 1, 3):
        for tile in range(bounds[part], bounds[part + 1]):
            start_n = tile * BLOCK_N
            k_tile = _load_tile(
                k, k_strides, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGN, USE_TMA
            )
            s = dot(q_tile, k_tile.T, None, PRECISION)
            if part != 1:
                cols = start_n + tl.arange(0, BLOCK_N)
                s = tl.where(_is_allowed(rows, cols, lower, upper, seq_k, HAS_LOWER, HAS_UPPER), s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            # The difference first, which is exactly 0 for the maximum itself. A fused multiply-add of the scaled scores
            # would not round the product as the maximum was rounded: 1e30 would miss its own maximum by 1e22.
            p = tl.exp2((s - new_max[:, None]) * scale_log2)
            # What was summed relative to the old maximum becomes relative to the new one.
            rescale = tl.exp2((row_max - new_max) * scale_log2)
            row_sum = row_sum * rescale + tl.sum(p, 1)
            row_max = new_max
            v_tile = _load_tile(
                v, v_strides, batch, kv_head, start_n, seq_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, ALIGN, USE_TMA
            )
            acc = dot(p.to(out_ptr.dtype.element_ty), v_tile, acc * rescale[:, None], PRECISION)

    # A row with no allowed key has summed nothing: its output is 0, its lse is log(0) = -inf.
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    out = tl.where(empty[:, None], 0.0, acc / row_sum[:, None])
    _store_tile(out_ptr, out, out_strides, batch, head, start, seq_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, ALIGN)
    lse = tl.where(empty, float("-inf"), (row_max * scale_log2 + tl.log2(row_sum)) * 0.6931471805599453)
    tl.store(lse_ptr + batch_head.to(tl.int64) * seq_q + rows, lse, mask=rows < seq_q)


# --- forward, few queries ---------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "seq_q", "seq_k", "n_kv_heads", "group_size", "n_splits", "lower", "upper",
        "q_strides", "k_strides", "v_strides",
    ]
)  # fmt: skip
def _attention_split_kernel(
    q_ptr,  # (batch, n_heads, seq_q, head_dim)
    k_ptr,  # (batch, n_kv_heads, seq_k, head_dim)
    v_ptr,  # (batch, n_kv_heads, seq_k, head_dim_v)
    split_out_ptr,  # (batch, n_heads, seq_q, n_splits, head_dim_v), float32; so are the next two
    split_max_ptr,  # (batch, n_heads, seq_q, n_splits)
    split_sum_ptr,  # (batch, n_heads, seq_q, n_splits)
    seq_q,
    seq_k,
    n_kv_heads,
    group_size,
    n_splits,
    lower,
    upper,
    q_strides,
    k_strides,
    v_strides,
    scale: tl.float64,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """A program owns a share of the keys of one head, for all queries of all heads that share it."""
    if PDL:
        # The kernel that joins the splits may make itself ready.
        gdc_launch_dependents()
    split = tl.program_id(0) % n_splits
    batch_kv_head = tl.program_id(0) // n_splits
    batch = batch_kv_head // n_kv_heads
    kv_head = batch_kv_head % n_kv_heads
    # The queries of the first head of the group, then those of the second, and so on.
    lanes = tl.arange(0, BLOCK_M)
    rows = lanes % seq_q
    heads = kv_head * group_size + lanes // seq_q
    q_offsets = batch.to(tl.int64) * q_strides[0] + heads.to(tl.int64) * q_strides[1] + rows.to(tl.int64) * q_strides[2]
    dims = tl.arange(0, BLOCK_D)
    q_mask = (lanes < group_size * seq_q)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q_ptr + q_offsets[:, None] + dims.to(tl.int64)[None, :] * q_strides[3], mask=q_mask, other=0.0)
    scale_log2 = tl.full((), scale * 1.4426950408889634, tl.float32)
    row_max = tl.full((BLOCK_M,), -3.4028234663852886e38, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    begin, _, _, end = _tile_bounds(0, seq_q - 1, lower, upper, seq_k, BLOCK_N, HAS_LOWER, HAS_UPPER)
    n_tiles = tl.cdiv(end - begin, n_splits)
    first = begin + split * n_tiles
    for tile in tl.range(first, tl.minimum(first + n_tiles, end), num_stages=STAGES):
        start_n = tile * BLOCK_N
        k_tile = _load_tile(k_ptr, k_strides, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGN, False)
        s = dot(q_tile, k_tile.T, None, PRECISION)
        allowed = _is_allowed(rows, start_n + tl.arange(0, BLOCK_N), lower, upper, seq_k, HAS_LOWER, HAS_UPPER)
        s = tl.where(allowed, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp2((s - new_max[:, None]) * scale_log2)
        rescale = tl.exp2((row_max - new_max) * scale_log2)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max
        v_tile = _load_tile(
            v_ptr, v_strides, batch, kv_head, start_n, seq_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, ALIGN, False
        )
        acc = dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], PRECISION)

    offsets = (batch_kv_head.to(tl.int64) * (group_size * seq_q) + lanes) * n_splits + split
    mask = lanes < group_size * seq_q
    tl.store(split_max_ptr + offsets, row_max, mask=mask)
    tl.store(split_sum_ptr + offsets, row_sum, mask=mask)
    dims = tl.arange(0, BLOCK_DV)
    out_mask = mask[:, None] & (dims < HEAD_DIM_V)[None, :]
    tl.store(split_out_ptr + offsets[:, None] * HEAD_DIM_V + dims[None, :], acc, mask=out_mask)


@triton.jit(do_not_specialize=["seq_q", "n_heads", "n_splits", "out_strides"])
def _attention_join_kernel(
    split_out_ptr,  # (batch, n_heads, seq_q, n_splits, head_dim_v), float32; so are the next two
    split_max_ptr,  # (batch, n_heads, seq_q, n_splits)
    split_sum_ptr,  # (batch, n_heads, seq_q, n_splits), or None: the sums are 1, and the maxima are the splits' lse
    out_ptr,  # (batch, n_heads, seq_q, head_dim_v)
    lse_ptr,  # (batch, n_heads, seq_q), contiguous
    seq_q,
    n_heads,
    n_splits,
    out_strides,
    scale: tl.float64,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Program i owns query i of all: it joins what the splits have found, as they joined their tiles."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_DV)
    scale_log2 = tl.full((), scale * 1.4426950408889634, tl.float32)
    row_max = tl.full((), -3.4028234663852886e38, tl.float32)
    row_sum = tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    for first in range(0, n_splits, BLOCK_SPLITS):
        splits = first + tl.arange(0, BLOCK_SPLITS)
        offsets = row * n_splits + splits
        split_max = tl.load(split_max_ptr + offsets, mask=splits < n_splits, other=-3.4028234663852886e38)
        split_sum = tl.where(splits < n_splits, 1.0, 0.0)
        if split_sum_ptr is not None:
            split_sum = tl.load(split_sum_ptr + offsets, mask=splits < n_splits, other=0.0)
        mask = (splits < n_splits)[:, None] & (dims < HEAD_DIM_V)[None, :]
        split_out = tl.load(split_out_ptr + offsets[:, None] * HEAD_DIM_V + dims[None, :], mask=mask, other=0.0)
        new_max = tl.maximum(row_max, tl.max(split_max, 0))
        weights = tl.exp2((split_max - new_max) * scale_log2)
        rescale = tl.exp2((row_max - new_max) * scale_log2)
        row_sum = row_sum * rescale + tl.sum(split_sum * weights, 0)
        acc = acc * rescale + tl.sum(split_out * weights[:, None], 0)
        row_max = new_max
    # As above: a row with no allowed key.
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    out = tl.where(empty, 0.0, acc / row_sum)
    batch = row // (n_heads * seq_q)
    out_offset = batch * out_strides[0] + row // seq_q % n_heads * out_strides[1] + row % seq_q * out_strides[2]
    tl.store(out_ptr + out_offset + dims * out_strides[3], out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM_V)
    lse = (row_max * scale_log2 + tl.log2(row_sum)) * 0.6931471805599453
    tl.store(lse_ptr + row, tl.where(empty, float("-inf"), lse))


# --- backward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _row_statistics(
    out,  # (BLOCK_M, BLOCK_DV)
    dout,  # as out
    lse_ptr,
    dlse_ptr,
    offsets,  # (BLOCK_M,): where the rows' numbers lie behind these two pointers
    mask,
):
    """What the backward needs of each row: its lse in powers of two, and delta = sum(dout * out) - dlse."""
    STATS_DTYPE: tl.constexpr = lse_ptr.dtype.element_ty
    lse = tl.load(lse_ptr + offsets, mask=mask, other=float("-inf"))
    # Rows with no allowed key, and rows past the end: with +inf their probabilities exp2(s - inf) are 0 in the
    # backward, where -inf would make them NaN. Nothing depends on their lse.
    empty = lse == float("-inf")
    delta = tl.sum(out.to(STATS_DTYPE) * dout.to(STATS_DTYPE), 1)
    if dlse_ptr is not None:
        delta = tl.where(empty, 0.0, delta - tl.load(dlse_ptr + offsets, mask=mask, other=0.0))
    lse_log2 = tl.where(empty, float("inf"), lse * 1.4426950408889634)
    # Where numbers of its size lie 2 or more apart, its roundings may have lowered it by more than such a step, which
    # would make a probability more than 1, and soon infinite. (The main kernel's scores have roundings of their own.)
    TWO_UNITS: tl.constexpr = 4.440892098500626e-16 if STATS_DTYPE == tl.float64 else 2.384185791015625e-07
    lse_log2 += tl.where(tl.abs(lse_log2) * TWO_UNITS > 4, tl.abs(lse_log2) * TWO_UNITS, 0.0)
    return lse_log2, delta


@triton.jit(
    do_not_specialize=[
        "seq_q", "seq_k", "n_kv_heads", "group_size", "lower", "upper", "q_strides", "k_strides", "v_strides",
        "out_strides", "dout_strides", "dq_strides", "dk_strides", "dv_strides",
    ]
)  # fmt: skip
def _attention_bwd_short_kernel(
    q_ptr,  # (batch, n_kv_heads * group_size, seq_q, head_dim)
    k_ptr,  # (batch, n_kv_heads, seq_k, head_dim)
    v_ptr,  # (batch, n_kv_heads, seq_k, head_dim_v)
    out_ptr,  # (batch, n_kv_heads * group_size, seq_q, head_dim_v)
    dout_ptr,  # as out
    lse_ptr,  # (batch, n_kv_heads * group_size, seq_q), contiguous
    dlse_ptr,  # as lse, or None
    dq_ptr,  # as q
    dk_ptr,  # as k
    dv_ptr,  # as v
    seq_q,
    seq_k,
    n_kv_heads,
    group_size,
    lower,
    upper,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    dout_strides,
    dq_strides,
    dk_strides,
    dv_strides,
    scale: tl.float64,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,  # of q, k, v and dout
    OUT_ALIGN: tl.constexpr,  # of out, dq, dk and dv
):
    """A program owns a head of at most BLOCK keys, and has all scores of BLOCK queries at once: nothing is walked."""
    batch = tl.program_id(0) // n_kv_heads
    kv_head = tl.program_id(0) % n_kv_heads
    rows = tl.arange(0, BLOCK)
    allowed = _is_allowed(rows, rows, lower, upper, seq_k, HAS_LOWER, HAS_UPPER) & (rows < seq_q)[:, None]
    scale_f32 = tl.full((), scale, tl.float32)
    scale_log2 = tl.full((), scale * 1.4426950408889634, tl.float32)
    k = _load_tile(k_ptr, k_strides, batch, kv_head, 0, seq_k, HEAD_DIM, BLOCK, BLOCK_D, ALIGN, False)
    v = _load_tile(v_ptr, v_strides, batch, kv_head, 0, seq_k, HEAD_DIM_V, BLOCK, BLOCK_DV, ALIGN, False)
    dk = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK, BLOCK_DV), tl.float32)
    for member in range(group_size):
        head = kv_head * group_size + member
        q = _load_tile(q_ptr, q_strides, batch, head, 0, seq_q, HEAD_DIM, BLOCK, BLOCK_D, ALIGN, False)
        out = _load_tile(out_ptr, out_strides, batch, head, 0, seq_q, HEAD_DIM_V, BLOCK, BLOCK_DV, OUT_ALIGN, False)
        dout = _load_tile(dout_ptr, dout_strides, batch, head, 0, seq_q, HEAD_DIM_V, BLOCK, BLOCK_DV, ALIGN, False)
        offsets = (batch * n_kv_heads * group_size + head).to(tl.int64) * seq_q + rows
        lse_log2, delta = _row_statistics(out, dout, lse_ptr, dlse_ptr, offsets, rows < seq_q)
        p = tl.exp2(tl.dot(q, k.T) * scale_log2 - lse_log2[:, None])
        p = tl.where(allowed, p, 0.0)
        dv = tl.dot(p.to(dout.dtype).T, dout, dv)
        ds = (p * (tl.dot(dout, v.T) - delta[:, None])).to(q.dtype)
        dk = tl.dot(ds.T, q, dk)
        dq = tl.dot(ds, k) * scale_f32
        _store_tile(dq_ptr, dq, dq_strides, batch, head, 0, seq_q, HEAD_DIM, BLOCK, BLOCK_D, OUT_ALIGN)
    _store_tile(dk_ptr, dk * scale_f32, dk_strides, batch, kv_head, 0, seq_k, HEAD_DIM, BLOCK, BLOCK_D, OUT_ALIGN)
    _store_tile(dv_ptr, dv, dv_strides, batch, kv_head, 0, seq_k, HEAD_DIM_V, BLOCK, BLOCK_DV, OUT_ALIGN)


@triton.jit(do_not_specialize=["seq_q", "padded_seq_q", "n_heads", "out_strides", "dout_strides"])
def _attention_bwd_preprocess_kernel(
    out_ptr,  # (batch, n_heads, seq_q, head_dim_v)
    dout_ptr,  # (batch, n_heads, seq_q, head_dim_v)
    lse_ptr,  # (batch, n_heads, seq_q), contiguous
    dlse_ptr,  # (batch, n_heads, seq_q), contiguous, or None
    delta_ptr,  # (batch, n_heads, padded_seq_q), contiguous
    lse_log2_ptr,  # (batch, n_heads, padded_seq_q), contiguous
    seq_q,
    padded_seq_q,  # a multiple of every BLOCK_M
    n_heads,
    out_strides,
    dout_strides,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """A program owns BLOCK_M queries of one head: delta = sum(dout * out) - dlse, and the lse in powers of two."""
    n_tiles = padded_seq_q // BLOCK_M
    start = tl.program_id(0) % n_tiles * BLOCK_M
    batch_head = tl.program_id(0) // n_tiles
    batch = batch_head // n_heads
    head = batch_head % n_heads
    rows = start + tl.arange(0, BLOCK_M)
    offsets = batch_head.to(tl.int64) * seq_q + rows
    padded_offsets = batch_head.to(tl.int64) * padded_seq_q + rows

    out = _load_tile(out_ptr, out_strides, batch, head, start, seq_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, ALIGN, False)
    dout = _load_tile(dout_ptr, dout_strides, batch, head, start, seq_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, ALIGN, False)
    lse_log2, delta = _row_statistics(out, dout, lse_ptr, dlse_ptr, offsets, rows < seq_q)
    tl.store(delta_ptr + padded_offsets, delta)
    tl.store(lse_log2_ptr + padded_offsets, lse_log2)


@triton.jit(
    do_not_specialize=[
        "seq_q", "padded_seq_q", "seq_k", "n_heads", "group_size", "heads_per_section", "lower", "upper",
        "q_strides", "k_strides", "v_strides", "dout_strides", "dk_strides", "dv_strides",
    ]
)  # fmt: skip
def _attention_bwd_dkdv_kernel(
    q,  # (batch, n_heads, seq_q, head_dim): a pointer, or a tensor descriptor when USE_TMA; so are the next five
    k,  # (batch, n_heads // group_size, seq_k, head_dim)
    v,  # (batch, n_heads // group_size, seq_k, head_dim_v)
    dout,  # (batch, n_heads, seq_q, head_dim_v)
    lse_log2,  # (batch * n_heads, padded_seq_q), contiguous
    delta,  # (batch * n_heads, padded_seq_q), contiguous
    dk_ptr,  # as k
    dv_ptr,  # as v
    seq_q,
    padded_seq_q,
    seq_k,
    n_heads,
    group_size,
    heads_per_section,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,
    dv_strides,
    lower,
    upper,
    scale: tl.float64,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns BLOCK_N keys of one head and walks the queries: dv = p^T dout, dk = ds^T q scale."""
    n_tiles = tl.cdiv(seq_k, BLOCK_N)
    n_kv_heads = n_heads // group_size
    # The first keys are seen by the most queries under a causal mask, and they do start first.
    tile, batch_kv_head = _tile_and_head(n_tiles, heads_per_section)
    start = tile * BLOCK_N
    batch = batch_kv_head // n_kv_heads
    kv_head = batch_kv_head % n_kv_heads
    cols = start + tl.arange(0, BLOCK_N)
    DTYPE: tl.constexpr = dk_ptr.dtype.element_ty
    STATS_DTYPE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    scale_log2 = tl.full((), scale * 1.4426950408889634, STATS_DTYPE)

    k_tile = _load_tile(k, k_strides, batch, kv_head, start, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGN, USE_TMA)
    v_tile = _load_tile(v, v_strides, batch, kv_head, start, seq_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, ALIGN, USE_TMA)
    dk = tl.zeros((BLOCK_N, BLOCK_D), STATS_DTYPE)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), STATS_DTYPE)

    # Key j is allowed to the queries with j - upper <= i <= j - lower: the same rule with the limits swapped.
    last = tl.minimum(start + BLOCK_N, seq_k) - 1
    bounds = _tile_bounds(start, last, -upper, -lower, seq_q, BLOCK_M, HAS_UPPER, HAS_LOWER)
    # Every query head of the group reads these keys, so this program adds up the gradients of them all in turn.
    for member in range(group_size):
        head = kv_head * group_size + member
        batch_head = batch * n_heads + head
        for part in tl.static_range(0 if HAS_UPPER else 1, 3):
            for tile in range(bounds[part], bounds[part + 1]):
                start_m = tile * BLOCK_M
                q_tile = _load_tile(
                    q, q_strides, batch, head, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGN, USE_TMA
                )
                lse_tile = _load_statistics(lse_log2, batch_head, padded_seq_q, start_m, BLOCK_M, USE_TMA)
                # Keys along the first axis: p and ds then already lie as the products for dv and dk need them.
                s = dot(k_tile, q_tile.T, None, PRECISION)
                p = tl.exp2(s * scale_log2 - lse_tile[None, :])
                if part != 1:
                    rows = start_m + tl.arange(0, BLOCK_M)
                    allowed = _is_allowed(rows, cols, lower, upper, seq_k, HAS_LOWER, HAS_UPPER)
                    # Past the end p is NaN for a key of NaN, which may be one that no query sees.
                    p = tl.where((allowed & (rows < seq_q)[:, None]).T, p, 0.0)
                dout_tile = _load_tile(
                    dout, dout_strides, batch, head, start_m, seq_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, ALIGN, USE_TMA
                )
                dv = dot(p.to(DTYPE), dout_tile, dv, PRECISION)
                dp = dot(v_tile, dout_tile.T, None, PRECISION)
                delta_tile = _load_statistics(delta, batch_head, padded_seq_q, start_m, BLOCK_M, USE_TMA)
                ds = p * (dp - delta_tile[None, :])
                dk = dot(ds.to(DTYPE), q_tile, dk, PRECISION)

    dk *= tl.full((), scale, STATS_DTYPE)
    _store_tile(dk_ptr, dk, dk_strides, batch, kv_head, start, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGN)
    _store_tile(dv_ptr, dv, dv_strides, batch, kv_head, start, seq_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, ALIGN)


@triton.jit(
    do_not_specialize=[
        "seq_q", "padded_seq_q", "seq_k", "n_heads", "group_size", "heads_per_section", "lower", "upper",
        "q_strides", "k_strides", "v_strides", "dout_strides", "dq_strides",
    ]
)  # fmt: skip
def _attention_bwd_dq_kernel(
    q,  # (batch, n_heads, seq_q, head_dim): a pointer, or a tensor descriptor when USE_TMA; so are the next five
    k,  # (batch, n_heads // group_size, seq_k, head_dim)
    v,  # (batch, n_heads // group_size, seq_k, head_dim_v)
    dout,  # (batch, n_heads, seq_q, head_dim_v)
    lse_log2,  # (batch * n_heads, padded_seq_q), contiguous
    delta,  # (batch * n_heads, padded_seq_q), contiguous
    dq_ptr,  # as q
    seq_q,
    padded_seq_q,
    seq_k,
    n_heads,
    group_size,
    heads_per_section,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dq_strides,
    lower,
    upper,
    scale: tl.float64,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns BLOCK_M queries of one head and walks the keys: dq = ds k scale."""
    n_tiles = tl.cdiv(seq_q, BLOCK_M)
    tile, batch_head = _tile_and_head(n_tiles, heads_per_section)
    start = (n_tiles - 1 - tile) * BLOCK_M
    batch = batch_head // n_heads
    head = batch_head % n_heads
    kv_head = head // group_size
    rows = start + tl.arange(0, BLOCK_M)
    STATS_DTYPE: tl.constexpr = tl.float64 if dq_ptr.dtype.element_ty == tl.float64 else tl.float32
    scale_log2 = tl.full((), scale * 1.4426950408889634, STATS_DTYPE)

    q_tile = _load_tile(q, q_strides, batch, head, start, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGN, USE_TMA)
    dout_tile = _load_tile(dout, dout_strides, batch, head, start, seq_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, ALIGN, USE_TMA)
    lse_tile = _load_statistics(lse_log2, batch_head, padded_seq_q, start, BLOCK_M, USE_TMA)
    delta_tile = _load_statistics(delta, batch_head, padded_seq_q, start, BLOCK_M, USE_TMA)
    dq = tl.zeros((BLOCK_M, BLOCK_D), STATS_DTYPE)

    last = tl.minimum(start + BLOCK_M, seq_q) - 1
    bounds = _tile_bounds(start, last, lower, upper, seq_k, BLOCK_N, HAS_LOWER, HAS_UPPER)
    for part in tl.static_range(0 if HAS_LOWER else 1, 3):
        for tile in range(bounds[part], bounds[part + 1]):
            start_n = tile * BLOCK_N
            k_tile = _load_tile(
                k, k_strides, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGN, USE_TMA
            )
            v_tile = _load_tile(
                v, v_strides, batch, kv_head, start_n, seq_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, ALIGN, USE_TMA
            )
            s = dot(q_tile, k_tile.T, None, PRECISION)
            dp = dot(dout_tile, v_tile.T, None, PRECISION)
            p = tl.exp2(s * scale_log2 - lse_tile[:, None])
            if part != 1:
                cols = start_n + tl.arange(0, BLOCK_N)
                p = tl.where(_is_allowed(rows, cols, lower, upper, seq_k, HAS_LOWER, HAS_UPPER), p, 0.0)
            ds = p * (dp - delta_tile[:, None])
            dq = dot(ds.to(dq_ptr.dtype.element_ty), k_tile, dq, PRECISION)
    dq *= tl.full((), scale, STATS_DTYPE)
    _store_tile(dq_ptr, dq, dq_strides, batch, head, start, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGN)


# --- what to launch ---------------------------------------------------------------------------------------------------


# BLOCK_M, BLOCK_N, num_warps and num_stages of the kernels, by the padded head_dim that they serve up to. As large as
# registers allow without spills; several warps share a tile's rows, so that the accumulators fit into them.
_TILES = {
    "16-bit, Hopper": {
        64: {"fwd": (128, 128, 8, 2), "dkdv": (64, 128, 8, 2), "dq": (128, 64, 8, 2)},
        128: {"fwd": (128, 128, 8, 2), "dkdv": (64, 128, 8, 2), "dq": (128, 64, 8, 2)},
        256: {"fwd": (128, 64, 8, 2), "dkdv": (32, 64, 8, 2), "dq": (64, 64, 8, 2)},
    },
    "16-bit, Blackwell": {  # accumulators live in tensor memory, which has no room for two of head_dim 256
        64: {"fwd": (128, 128, 8, 2), "dkdv": (64, 128, 8, 2), "dq": (128, 64, 8, 2)},
        128: {"fwd": (128, 128, 8, 2), "dkdv": (64, 128, 8, 1), "dq": (128, 64, 8, 2)},
        256: {"fwd": (128, 64, 8, 2), "dkdv": (32, 16, 8, 1), "dq": (64, 64, 8, 1)},
    },
    "16-bit": {
        64: {"fwd": (128, 64, 4, 3), "dkdv": (32, 128, 8, 2), "dq": (64, 64, 8, 2)},
        128: {"fwd": (128, 64, 8, 2), "dkdv": (32, 64, 8, 1), "dq": (64, 64, 8, 2)},
        256: {"fwd": (64, 32, 8, 2), "dkdv": (32, 32, 8, 1), "dq": (64, 32, 8, 1)},
    },
    "16-bit, AMD": {
        64: {"fwd": (128, 64, 4, 1), "dkdv": (64, 64, 4, 1), "dq": (64, 64, 4, 1)},
        128: {"fwd": (128, 64, 4, 1), "dkdv": (32, 64, 4, 1), "dq": (64, 32, 4, 1)},
        256: {"fwd": (64, 32, 4, 1), "dkdv": (16, 32, 4, 1), "dq": (64, 32, 4, 1)},
    },
    "float32": {
        64: {"fwd": (64, 32, 8, 1), "dkdv": (32, 32, 8, 1), "dq": (64, 32, 8, 1)},
        128: {"fwd": (32, 32, 8, 1), "dkdv": (32, 32, 8, 1), "dq": (16, 32, 8, 1)},
        256: {"fwd": (16, 32, 8, 1), "dkdv": (16, 16, 8, 1), "dq": (16, 32, 8, 1)},
    },
    # Fewer than 64 rows, and so no instructions that read an operand from shared memory by themselves: where six
    # products take the place of one, Triton 3.6 was seen to let those read past their tiles (compute-sanitizer:
    # out-of-range shared address; without it, wrong numbers).
    "float32, Hopper": {
        16: {"fwd": (32, 32, 4, 2), "dkdv": (32, 32, 2, 1), "dq": (32, 32, 4, 1)},
        32: {"fwd": (32, 32, 4, 2), "dkdv": (32, 32, 2, 1), "dq": (16, 64, 4, 1)},
        64: {"fwd": (32, 64, 4, 2), "dkdv": (64, 32, 4, 1), "dq": (32, 64, 4, 1)},
        128: {"fwd": (32, 32, 4, 1), "dkdv": (32, 32, 4, 1), "dq": (32, 32, 4, 1)},
        256: {"fwd": (32, 32, 4, 1), "dkdv": (16, 16, 8, 1), "dq": (16, 32, 8, 1)},
    },
    "float32, AMD": {  # with 8 warps a thread would have half the registers
        128: {"fwd": (64, 32, 4, 1), "dkdv": (32, 32, 4, 1), "dq": (32, 32, 4, 1)},
        256: {"fwd": (32, 16, 4, 1), "dkdv": (16, 16, 4, 1), "dq": (16, 16, 4, 1)},
    },
    "float64": {
        128: {"fwd": (16, 16, 4, 1), "dkdv": (16, 16, 4, 1), "dq": (16, 16, 4, 1)},
        256: {"fwd": (16, 16, 4, 1), "dkdv": (16, 16, 8, 1), "dq": (16, 16, 8, 1)},
    },
    "float64, AMD": {256: {"fwd": (16, 16, 4, 1), "dkdv": (16, 16, 4, 1), "dq": (16, 16, 4, 1)}},
    # Small tiles, so that short sequences still have skipped, masked and full ones.
    "interpreter": {256: {"fwd": (64, 32, 4, 1), "dkdv": (32, 64, 4, 1), "dq": (64, 32, 4, 1)}},
}

# num_warps of the backward in one kernel, by the padded head_dim that they serve up to, and by BLOCK, as measured on an
# H200. The fewer, the less they wait for each other. What is not in the table has no room in registers.
_SHORT_WARPS = {
    32: {16: 1, 32: 1, 64: 2, 128: 8},
    64: {16: 2, 32: 2, 64: 4},
    128: {16: 1, 32: 2, 64: 4},
}


def _config(
    kernel: str, block_d: int, block_dv: int, dtype: torch.dtype, device: torch.device, use_tma: bool, precision: str
) -> dict[str, int]:
    """The launch options of one kernel ("fwd", "dkdv" or "dq"); nothing is tuned at the first call."""
    widest = max(block_d, block_dv)
    if device.type == "cpu":
        kind = "interpreter"
    else:
        kind = {torch.float32: "float32", torch.float64: "float64"}.get(dtype, "16-bit")
        if is_amd(device):
            kind += ", AMD"
        elif precision == "bf16x6":
            kind += ", Hopper"
        elif use_tma:
            # Only for descriptors: pointers take the registers that these larger tiles need.
            kind += ", Hopper" if is_hopper(device) else ", Blackwell"
    tiles = next(tiles for largest, tiles in _TILES[kind].items() if widest <= largest)
    return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), tiles[kernel], strict=True))


def _short_config(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, int] | None:
    """The launch options of the backward in one kernel; None where heads are too much for a program."""
    block = max(16, next_power_of_2(max(q.shape[2], k.shape[2])))
    widest = max(_block_d(q.shape[3]), _block_d(v.shape[3]))
    num_warps = next((warps.get(block) for largest, warps in _SHORT_WARPS.items() if widest <= largest), None)
    if num_warps is None or q.element_size() != 2:
        return None
    # One program walks all heads of a group. Where it is much that each does, and programs are few, others share more.
    if q.shape[1] // k.shape[1] * block * widest > 16 * 1024:
        if k.shape[0] * k.shape[1] < num_multiprocessors(q.device) // 3:
            return None
    return dict(BLOCK=block, num_warps=num_warps, num_stages=1)


def _alignment(*tensors: torch.Tensor) -> int:
    """How many neighbouring elements can be moved at a time, in every row of every tensor: up to 16 bytes' worth."""
    itemsize = tensors[0].element_size()
    align = 16 // itemsize
    for x in tensors:
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            return 1
        strides = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
        align = math.gcd(align, x.data_ptr() // itemsize, *strides)
    return align


def _use_tma(*tensors: torch.Tensor) -> bool:
    """Whether TMA can load tiles of the tensors, and should: 16-bit elements, rows on 16-byte boundaries.

    From 120 on, a Blackwell has neither tensor memory nor instructions that read both operands from shared memory: what
    TMA brings there goes through registers all the same, and was seen to need more of them than what pointers load.
    """
    return (
        90 <= cuda_arch(tensors[0].device) < 120
        and tensors[0].element_size() == 2
        and _alignment(*tensors) == 8
        and all(x.numel() > 0 for x in tensors)
        and all(stride > 0 for x in tensors for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    )


def _for_tma(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """On Hopper, 16-bit tensors that TMA cannot load as copies that it can; otherwise the tensors themselves.

    Hopper's matrix instruction reads V from shared memory, and where V arrives there through registers, as it does from
    unaligned rows, Triton 3.6 was seen to let it read past its tile (compute-sanitizer: invalid shared read).
    """
    if not is_hopper(tensors[0].device) or tensors[0].element_size() != 2:
        return tensors

    return tuple(x if x.numel() == 0 or _use_tma(x) else padded(x).copy_(x) for x in tensors)


def _descriptor(x: torch.Tensor, *block: int) -> TensorDescriptor:
    """Tells the tensor memory accelerator where x lies, and how large the boxes of its last dimensions are."""
    # The stride of a dimension of size 1 means nothing, and need not be the multiple of 16 bytes that is asked for.
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]
    block_shape = (*(1 for _ in x.shape[len(block) :]), *block)
    return descriptor(TensorDescriptor, x, tuple(x.shape), (*strides, 1), block_shape)


def _block_d(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def _heads_per_section(n_heads: int, seq_len: int, row_bytes: int) -> int:
    return max(1, min(n_heads, _L2_BYTES // max(1, seq_len * row_bytes)))


def _clamp(seq_q: int, seq_k: int, lower: int | None, upper: int | None) -> tuple[int, int]:
    """The limits as kernels take them: 0 when there is none, and within what the lengths make a difference for."""
    return tuple(0 if limit is None else max(-seq_q, min(limit, seq_k)) for limit in (lower, upper))


def _that_cut(seq_q: int, seq_k: int, lower: int | None, upper: int | None) -> tuple[int | None, int | None]:
    """The limits, but None for one that keeps no query from any key: no mask is the fastest.

    A causal mask stays: where query 0 sees key 0 alone, one key is no reason to compile a kernel for it.
    """
    return (
        None if lower is None or lower <= 1 - seq_q else lower,
        None if upper is None or upper >= max(1, seq_k - 1) else upper,
    )


def _precision(q: torch.Tensor, v: torch.Tensor, align: int) -> str:
    """What torch's settings ask of float32 products; TF32 is left to aligned rows, for the reason at `_for_tma`.

    Where rows are not aligned, or those of v wider or narrower than those of q, addresses take the registers that six
    products in the place of one would need.
    """
    precision = dot_precision(q, reduced=align == 4 and allows_tf32())
    is_even = align == 4 and _block_d(q.shape[-1]) == _block_d(v.shape[-1])
    return "ieee" if precision == "bf16x6" and not is_even else precision


def _num_parts(q: torch.Tensor, v: torch.Tensor, align: int, lower: int | None, upper: int | None) -> int:
    """Into how many of bfloat16 float32 numbers are cut for the kernel for sm_90, which multiplies these, or 0.

    Three have all bits of a number; where TF32 is allowed, two do, whose products have more digits. Where sequences are
    short, programs in smaller tiles are done before it pays, unless `_precision` has nothing for them but products
    number by number.
    """
    if dot_precision(q, reduced=False) != "bf16x6" or hopper.load("attention_float32") is None:
        return 0
    (n_heads, seq_q, head_dim), (n_kv_heads, seq_k, head_dim_v) = q.shape[1:], v.shape[1:]
    widest = max(_block_d(head_dim), _block_d(head_dim_v))
    # How often a row has to be used. With as many queries as keys it is a third of their number, so, as measured on an
    # H200, it pays from about 110 positions on for rows of 32 numbers, and from 24 for 256.
    min_uses = 8 if _precision(q, v, align) == "ieee" else 40 - widest // 8
    # What the query in the middle is allowed stands for all.
    first = 0 if lower is None else max(0, seq_q // 2 + lower)
    last = seq_k if upper is None else min(seq_k, seq_q // 2 + upper + 1)
    n_keys = max(0, last - first)
    pays = n_heads * seq_q * n_keys >= min_uses * (n_heads * seq_q + 2 * n_kv_heads * seq_k)
    return (2 if allows_tf32() else 3) if pays else 0


def _parts(x: torch.Tensor, n_parts: int) -> torch.Tensor:
    """The first n_parts of three_bf16 of each number of x, in rows that TMA can load: (n_parts, *x.shape)."""
    batch, n_heads, length, head_dim = x.shape
    rows = scratch((n_parts, batch, n_heads, length, cdiv(head_dim, 8) * 8), torch.bfloat16, x.device)
    parts = rows[..., :head_dim]
    launch(
        _parts_kernel,
        (cdiv(length, _PART_ROWS) * batch * n_heads,),
        x, parts, batch, n_heads, length, x.stride(), parts.stride()[1:],
        HEAD_DIM=head_dim, BLOCK=_PART_ROWS, BLOCK_D=_block_d(head_dim), ALIGN=_alignment(x), PARTS=n_parts,
        num_warps=4,
    )  # fmt: skip
    return parts


def _fits_hopper(q, k, v, scale: float, lower: int | None, upper: int | None) -> bool:
    """Whether the kernels for sm_90 can take over."""
    if not is_hopper(q.device):
        return False
    forward = hopper.load("attention_forward")
    return forward is not None and forward.supports(q, k, v, scale, lower, upper)


def _empty_as(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Memory shaped as x but for head_dim, which is innermost; its other dimensions are in x's order."""
    # Outermost first, sorted by hand: two strides change places only where it is known that they have to. As in
    # `torch.empty_like`, an expanded dimension, whose stride is 0, stays where it is.
    order, strides = [0, 1, 2], x.stride()
    for last in (1, 2):
        for i in range(last, 0, -1):
            outer, inner = strides[order[i - 1]], strides[order[i]]
            if not (known(outer > 0) and known(outer < inner)):
                break
            order[i - 1], order[i] = order[i], order[i - 1]
    if order == [0, 1, 2]:
        return x.new_empty(*x.shape[:3], head_dim)
    out = x.new_empty(*(x.shape[d] for d in order), head_dim)
    return out.permute(*(order.index(d) for d in range(3)), 3)


def _empty_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, lower: int | None, upper: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    stats_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty_as(q, v.shape[-1]), scratch(q.shape[:-1], stats_dtype, q.device)


def _vmap(op, n_tensors, info, in_dims, *args):
    """The batch of a vmap and the tensors' own become one."""
    tensors = [batch_first(x, d, info.batch_size) for x, d in zip(args[:n_tensors], in_dims, strict=False)]
    outputs = op(*(None if x is None else x.flatten(0, 1) for x in tensors), *args[n_tensors:])
    return tuple(x.unflatten(0, tensors[0].shape[:2]) for x in outputs), 0


def _flops_forward(q, k, v, *_):
    # As torch counts its own attention: masks save nothing.
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


@operator(fake=_empty_forward, vmap=lambda *args: _vmap(_attention_fwd, 3, *args), tf32=True, flops=_flops_forward)
def _attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, lower: int | None, upper: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _empty_forward(q, k, v, scale, lower, upper)
    if out.numel() == 0:
        return out, lse
    outputs = out, lse
    lower, upper = _that_cut(q.shape[2], k.shape[2], lower, upper)
    q, k, v = _for_tma(q, k, v)
    fits_hopper = _fits_hopper(q, k, v, scale, lower, upper)
    is_one_query = fits_hopper and q.shape[2] == 1 and lower is None
    if is_one_query and upper is not None:
        # To a single query, the upper limit is where the keys end.
        k, v, upper = k[:, :, : upper + 1], v[:, :, : upper + 1], None
    n_splits = _num_splits(q, k)
    if is_one_query:
        # One query of each head of a group: they are as many queries of one head, which reads the keys once for all.
        queries = (*k.shape[:2], q.shape[1] // k.shape[1])
        q, out, lse = q.view(*queries, -1), out.view(*queries, -1), lse.view(queries)
        if hopper.load("attention_forward").keeps_memory_busy(q, v):
            n_splits = 0
    if n_splits > 0:
        _launch_splits(q, k, v, out, lse, scale, lower, upper, n_splits)
        return outputs
    if fits_hopper:
        hopper.load("attention_forward").forward(q, k, v, out, lse, lower, upper, scale)
        return outputs
    batch, n_heads, seq_q, head_dim = q.shape
    _, n_kv_heads, seq_k, head_dim_v = v.shape
    block_d, block_dv = _block_d(head_dim), _block_d(head_dim_v)
    align = _alignment(q, k, v, out)
    if (n_parts := _num_parts(q, v, align, lower, upper)) > 0:
        parts = (_parts(x, n_parts) for x in (q, k, v))
        hopper.load("attention_float32").forward(*parts, out, lse, lower, upper, scale)
        return out, lse
    use_tma = _use_tma(q, k, v)
    precision = _precision(q, v, align)
    config = _config("fwd", block_d, block_dv, q.dtype, q.device, use_tma, precision)
    sources = q, k, v
    if use_tma:
        blocks = (config["BLOCK_M"], block_d), (config["BLOCK_N"], block_d), (config["BLOCK_N"], block_dv)
        sources = [_descriptor(x, *block) for x, block in zip(sources, blocks, strict=True)]
    launch(
        _attention_fwd_kernel,
        (cdiv(seq_q, config["BLOCK_M"]) * batch * n_heads,),
        *sources, out, lse, seq_q, seq_k, n_heads, n_heads // n_kv_heads,
        _heads_per_section(batch * n_heads, seq_k, (head_dim + head_dim_v) * k.element_size()),
        q.stride(), k.stride(), v.stride(), out.stride(), *_clamp(seq_q, seq_k, lower, upper), scale,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v,
        BLOCK_D=block_d, BLOCK_DV=block_dv, ALIGN=align, USE_TMA=use_tma, PRECISION=precision, **config,
    )  # fmt: skip
    return out, lse


def _num_splits(q: torch.Tensor, k: torch.Tensor) -> int:
    """Among how many programs to share the keys of a head, where queries are few; 0 for the kernels of many queries.

    Few queries, as when a language model writes word after word, take no time but that of reading K and V. So heads
    that share those are served together, and as many programs read as keep the memory busy.
    """
    batch, n_heads, seq_q, _ = q.shape
    n_kv_heads, seq_k = k.shape[1:3]
    # Products of 32-bit numbers take more registers; there is no room for more than 16 queries.
    most_queries = 16 if q.element_size() == 4 else _MAX_SPLIT_QUERIES
    if n_heads // n_kv_heads * seq_q > most_queries or q.dtype == torch.float64 or seq_k < 2 * _MIN_SPLIT_KEYS:
        return 0
    n_places = 2 * num_multiprocessors(q.device)
    n_readers = batch * n_kv_heads
    if n_heads == n_kv_heads and 4 * n_readers > n_places:
        return 0

    def time(n_splits):
        """Rounds of programs, in units of one with all keys. Each start costs, and more so where all begin anew."""
        rounds = cdiv(n_readers * n_splits, n_places)
        return (rounds + 0.3 * (rounds > 1)) / n_splits + 0.01 * n_splits / cdiv(n_places, n_readers)

    most = min(seq_k // _MIN_SPLIT_KEYS, 4 * cdiv(n_places, n_readers))
    return min(range(1, most + 1), key=time)


def _launch_splits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scale: float,
    lower: int | None, upper: int | None, n_splits: int,
) -> None:  # fmt: skip
    """First each split of the keys by itself, then what they add up to."""
    batch, n_heads, seq_q, head_dim = q.shape
    _, n_kv_heads, seq_k, head_dim_v = v.shape
    block_d, block_dv = _block_d(head_dim), _block_d(head_dim_v)
    group_size = n_heads // n_kv_heads
    align = _alignment(k, v)
    split_out = scratch((batch, n_heads, seq_q, n_splits, head_dim_v), torch.float32, q.device)
    split_max, split_sum = (scratch((batch, n_heads, seq_q, n_splits), torch.float32, q.device) for _ in range(2))
    block_m = max(16, next_power_of_2(group_size * seq_q))
    # K and V of a step take 32 KiB, and two more steps are on their way; AMD's GPUs have 64 KiB for all. Of 32 bits no
    # more than 32 keys, as above.
    is_wide = k.element_size() == 4
    block_n = max(16, min(32 if is_wide else 128, 16 * 1024 // (max(block_d, block_dv) * k.element_size())))
    launch(
        _attention_split_kernel,
        (batch * n_kv_heads * n_splits,),
        q, k, v, split_out, split_max, split_sum, seq_q, seq_k, n_kv_heads, group_size, n_splits,
        *_clamp(seq_q, seq_k, lower, upper), q.stride(), k.stride(), v.stride(), scale,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_DV=block_dv, ALIGN=align,
        PRECISION=_precision(q, v, align), STAGES=1 if is_amd(q.device) else 3,
        PDL="PDL" in pdl(q.device), num_warps=8 if is_wide or block_m * block_dv > 8192 else 4,
    )  # fmt: skip
    join_splits(split_out, split_max, split_sum, out, lse, scale)


def join_splits(
    split_out: torch.Tensor,  # (batch, n_heads, seq_q, n_splits, head_dim_v)
    split_max: torch.Tensor,  # (batch, n_heads, seq_q, n_splits), as the next
    split_sum: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> None:
    """Fill out and lse from what programs found that shared the keys; the kernel describes the arguments."""
    batch, n_heads, seq_q, n_splits, head_dim_v = split_out.shape
    launch(
        _attention_join_kernel,
        (batch * n_heads * seq_q,),
        split_out, split_max, split_sum, out, lse, seq_q, n_heads, n_splits, out.stride(), scale,
        HEAD_DIM_V=head_dim_v, BLOCK_DV=_block_d(head_dim_v), BLOCK_SPLITS=16, num_warps=2, **pdl(out.device),
    )  # fmt: skip


def _empty_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, scale: float, lower: int | None, upper: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _empty_as(q, q.shape[-1]), _empty_as(k, k.shape[-1]), _empty_as(v, v.shape[-1])


def _flops_backward(dout, dlse, q, k, v, *_):
    # The scores again, dQ and dK from them, and dP and dV.
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


@operator(fake=_empty_backward, vmap=lambda *args: _vmap(_attention_bwd, 7, *args), tf32=True, flops=_flops_backward)
def _attention_bwd(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, scale: float, lower: int | None, upper: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq, dk, dv = _empty_backward(dout, dlse, q, k, v, out, lse, scale, lower, upper)
    if lse.numel() == 0:
        # No query, and no number of query heads to share keys among.
        return dq, dk.zero_(), dv.zero_()
    # A vmap may bring it expanded.
    lse = lse.contiguous()
    lower, upper = _that_cut(q.shape[2], k.shape[2], lower, upper)
    batch, n_heads, seq_q, head_dim = q.shape
    _, n_kv_heads, seq_k, head_dim_v = v.shape
    q, k, v, dout = _for_tma(q, k, v, dout)
    dlse = None if dlse is None else dlse.contiguous()
    short = _short_config(q, k, v)
    fits_hopper = _fits_hopper(q, k, v, scale, lower, upper) and max(head_dim, head_dim_v) > 16
    heads = hopper.load("attention_heads_backward") if fits_hopper else None
    if heads is not None and heads.supports(dlse, q, k, v, out):
        # In tiles of 64 rows and columns: of fewer, the kernel in ``tl`` computes less that is zero.
        if short is None or seq_k > (48 if max(head_dim, head_dim_v) > 32 else 64):
            heads.backward(dout, q, k, v, out, lse, dq, dk, dv, lower, upper, scale)
            return dq, dk, dv
    if short is None and fits_hopper:
        hopper.load("attention_backward").backward(dout, dlse, q, k, v, out, lse, dq, dk, dv, lower, upper, scale)
        return dq, dk, dv
    if dout.stride(-1) != 1:
        # The gradient of a sum is one number with strides 0: a copy lets the kernels load whole rows.
        dout = dout.contiguous()
    block_d, block_dv = _block_d(head_dim), _block_d(head_dim_v)
    align = _alignment(q, k, v, out, dout, dq, dk, dv)
    if short is not None:
        launch(
            _attention_bwd_short_kernel,
            (batch * n_kv_heads,),
            q, k, v, out, dout, lse, dlse, dq, dk, dv, seq_q, seq_k, n_kv_heads, n_heads // n_kv_heads,
            *_clamp(seq_q, seq_k, lower, upper), q.stride(), k.stride(), v.stride(), out.stride(), dout.stride(),
            dq.stride(), dk.stride(), dv.stride(), scale,
            HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v,
            BLOCK_D=block_d, BLOCK_DV=block_dv, ALIGN=_alignment(q, k, v, dout),
            OUT_ALIGN=_alignment(out, dq, dk, dv), **short,
        )  # fmt: skip
        return dq, dk, dv
    padded_seq_q = cdiv(seq_q, _PADDING) * _PADDING
    delta, lse_log2 = (scratch((batch * n_heads, padded_seq_q), lse.dtype, lse.device) for _ in range(2))
    launch(
        _attention_bwd_preprocess_kernel,
        (padded_seq_q // _PREPROCESS_ROWS * batch * n_heads,),
        out, dout, lse, dlse, delta, lse_log2, seq_q, padded_seq_q, n_heads, out.stride(), dout.stride(),
        HEAD_DIM_V=head_dim_v, BLOCK_M=_PREPROCESS_ROWS, BLOCK_DV=block_dv, ALIGN=align, num_warps=4,
    )  # fmt: skip
    if (n_parts := _num_parts(q, v, align, lower, upper)) > 0:
        parts = (_parts(x, n_parts) for x in (dout, q, k, v))
        hopper.load("attention_float32").backward(*parts, lse_log2, delta, dq, dk, dv, lower, upper, scale)
        return dq, dk, dv
    use_tma = _use_tma(q, k, v, dout)
    row_bytes = (head_dim + head_dim_v) * q.element_size()
    precision = _precision(q, v, align)
    strides = q.stride(), k.stride(), v.stride(), dout.stride()
    constants = dict(
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v,
        BLOCK_D=block_d, BLOCK_DV=block_dv, ALIGN=align, USE_TMA=use_tma, PRECISION=precision,
    )  # fmt: skip

    def sources(config):
        if not use_tma:
            return q, k, v, dout, lse_log2, delta
        m, n = config["BLOCK_M"], config["BLOCK_N"]
        return (
            _descriptor(q, m, block_d), _descriptor(k, n, block_d), _descriptor(v, n, block_dv),
            _descriptor(dout, m, block_dv), _descriptor(lse_log2, m), _descriptor(delta, m),
        )  # fmt: skip

    if dk.numel() > 0:
        config = _config("dkdv", block_d, block_dv, dk.dtype, q.device, use_tma, precision)
        launch(
            _attention_bwd_dkdv_kernel,
            (cdiv(seq_k, config["BLOCK_N"]) * batch * n_kv_heads,),
            *sources(config), dk, dv, seq_q, padded_seq_q, seq_k, n_heads, n_heads // n_kv_heads,
            _heads_per_section(batch * n_kv_heads, seq_q, row_bytes * n_heads // n_kv_heads),
            *strides, dk.stride(), dv.stride(), *_clamp(seq_q, seq_k, lower, upper), scale,
            **constants, **config,
        )  # fmt: skip
    if dq.numel() > 0:
        config = _config("dq", block_d, block_dv, dq.dtype, q.device, use_tma, precision)
        launch(
            _attention_bwd_dq_kernel,
            (cdiv(seq_q, config["BLOCK_M"]) * batch * n_heads,),
            *sources(config), dq, seq_q, padded_seq_q, seq_k, n_heads, n_heads // n_kv_heads,
            _heads_per_section(batch * n_heads, seq_k, row_bytes),
            *strides, dq.stride(), *_clamp(seq_q, seq_k, lower, upper), scale,
            **constants, **config,
        )  # fmt: skip
    return dq, dk, dv


# --- autograd and the public function ---------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def constants(q, k, v, *options):
        return {"options": options}

    @staticmethod
    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        differentiated = torch.is_grad_enabled() and not is_transformed()
        if differentiated:
            refuse_batch_of_gradients("attention", dout, dlse)
        backward = _AttentionBackward.apply if differentiated else _attention_bwd
        return *backward(dout, dlse, q, k, v, out, lse, *ctx.options), None, None, None


differentiable(_attention_fwd, _Attention)


class _AttentionBackward(torch.autograd.Function):
    """The backward pass as a function of its own, so that differentiating it again gives a readable error."""

    @staticmethod
    def forward(ctx, *args):
        return _attention_bwd(*args)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "attention: the gradient is not differentiable a second time; for double backward use "
            "torch.nn.functional.scaled_dot_product_attention under "
            "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        )


# What type checkers see: lse is returned where it is asked for.
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    window: int | tuple[int | None, int | None] | None = None, causal_alignment: str = "top-left",
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    window: int | tuple[int | None, int | None] | None = None, causal_alignment: str = "top-left",
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@functools.partial(replayed, tf32=True)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    causal_alignment: str = "top-left",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Softmax attention as :func:`torch.nn.functional.scaled_dot_product_attention`, without the scores in memory.

    .. math:: \text{out}_i = \sum_{j \in A_i} p_{ij} \, v_j, \qquad
        p_{ij} = e^{s_{ij} - \text{lse}_i}, \quad s_{ij} = \text{scale} \cdot q_i \cdot k_j, \quad
        \text{lse}_i = \log \sum_{j \in A_i} e^{s_{ij}}

    A query sits at position :math:`t_i = i` among the keys, or at :math:`t_i = i + \text{seq_k} - \text{seq_q}` with
    bottom-right alignment. The keys :math:`A_i` allowed to it are all keys; with `is_causal` those with
    :math:`j \le t_i`; with ``window=(left, right)`` those with :math:`t_i - \text{left} \le j \le t_i + \text{right}`.
    With both, both rules hold.

    Args:
        q: (..., heads, seq_q, head_dim); float16, bfloat16, float32 or float64. Leading dimensions may be missing.
        k: (..., heads, seq_k, head_dim), dtype and device of q; head_dim from 1 to 256.
        v: (..., heads, seq_k, head_dim_v), as k; head_dim_v, from 1 to 256 too, may differ from head_dim.
        attn_mask: None alone, for callers of torch's function; `is_causal` and `window` are the masks that there are.
            Of a padded batch, call the function for each sequence: on ``k[i, :, :n]`` and ``v[i, :, :n]`` of n keys.
        dropout_p: 0 alone, likewise.
        is_causal: whether a query is kept from the keys after its position.
        scale: factor of the scores; 1 / sqrt(head_dim) when None. One below 1.2e-38 in magnitude counts as 0, but for
            float64.
        enable_gqa: allow k and v, equally many, fewer heads than q, whose number must be a multiple: each serves a
            group of neighbouring query heads. Without it, the heads broadcast as the other leading dimensions do.
        window: how many keys before and after its position a query sees besides the one at it: (left, right), or one
            number for both; None in place of a number means no limit on that side.
        causal_alignment: "top-left" (query 0 sits at key 0, as in torch) or "bottom-right" (the last query sits at the
            last key, as decoding with a cache needs). The two differ only where seq_q and seq_k do.
        return_lse: return the logarithm of each row's sum of exponentials, too.

    Returns:
        (..., heads, seq_q, head_dim_v), dtype of q, in memory like q with the last dimension innermost
        (contiguous, where q's leading dimensions are not one in memory); with `return_lse` also lse, (..., heads,
        seq_q), in natural logarithm, float32 (float64 for float64).

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not supported, or dtypes that differ.
        ValueError: a mask or dropout, shapes that do not fit together, a head_dim or head_dim_v beyond 1 to 256, a
            seq_q + seq_k over 2**31 - 2**14, a scale that is not finite or (but for float64) beyond 2e38, a negative
            window, an unknown alignment, or tensors on different devices or where no kernel can run.
        NotImplementedError: forward-mode differentiation reaches an argument, a gradient is differentiated again, or
            ``create_graph=True`` meets a batch of gradients.

    Notes:
        A query with no allowed key gets the output 0, the lse -inf and the gradient 0. Scores, softmax statistics and
        sums are float32 (float64 for float64); the probabilities are rounded to v's dtype before they meet v. float32
        products follow :func:`torch.set_float32_matmul_precision`, as in :func:`matmul`, but that "high" may mean
        three products of bfloat16 on Hopper, which are more exact than one of TF32.

        Memory beyond the outputs is one number a query for the forward and two for the backward, the float32 gradient
        of q that Hopper's kernels keep (see below), and, of float32 on Hopper, mostly 1.5 times what q, k and v take,
        and in the backward what the gradient of the output takes, too: the parts of bfloat16 that its products are made
        of (two thirds of that with "high"). To it come splits, where up to 64 queries (16 in float32, none in float64)
        share 512 keys or more and heads are few or shared, as in decoding: several programs share the keys, and each
        needs room for a float32 copy of the output. (On Hopper one query in each of many heads needs none, in 16 bits
        and without a limit to the left.) There splits also serve more queries, in 16 bits, where their tiles fill at
        most half of the GPU (but not with a limit to the left, nor with a causal mask that begins with query 0 at key
        0), and in the backward pass of rows of up to 128 numbers several programs may share a tile of 128 keys, each
        with a float32 copy of its gradients. 16-bit tensors are copied on Hopper where their rows do not begin at
        multiples of 16 bytes, where their last dimension is not dense, or where they are expanded (keys that a whole
        batch shares then take room for each member, and so does the gradient of a sum); and so may the output and the
        gradients be.

        On Hopper, float32 has a kernel of its own, but for short sequences and few queries. Inputs of 16 bits take
        kernels of their own there, if the mask leaves each query a key, a sequence has no more than 2**19 queries, and
        all sequences together have fewer than 2**19 heads of queries; and so does their backward pass where the larger
        head_dim is more than 16, but for short sequences. (Their forward keeps a table for each shape until the process
        ends, of 4 bytes for each tile of 64 to 192 queries of a head, and under a mask their backward another, of 4
        bytes for every 128 keys of a head or for each part of these.) With rows of up to 128 numbers the backward keeps
        the gradient of q in float32 and adds it up in no fixed order, but for short sequences.
        :func:`torch.use_deterministic_algorithms` selects kernels whose sums have one: with these, and in every other
        case, forward and backward repeat bit for bit.

        Short sequences in 16 bits have a backward pass of one kernel, without memory beside the gradients: up to 64
        queries and keys with a larger head_dim of up to 128, or 128 of them with one of up to 32, unless many heads of
        q share one of k and sequences are few. On Hopper so have up to 256 of them with head_dims up to 64, the larger
        over 16, if the mask leaves each query a key, no heads share keys, heads are at least half as many as there are
        multiprocessors, and lse has no gradient; and so have more queries of up to 128 keys, if besides the heads fill
        the multiprocessors about evenly.

        A query whose scores are all -inf gets 0, like one that may see no key. Infinity or NaN in a value that a query
        may not see can reach it all the same, and not always where it does in torch: tiles are multiplied whole, and 0
        times infinity is NaN. Two defects are known, both of extreme numbers: on Hopper, a query whose scores exceed
        3e8 in magnitude in float16, or 3e9 in bfloat16, may get infinity, NaN or 0; and scores from 1e6 on leave the
        gradients no digit: from 1.2e7 on they are mostly too small, and from 1e9 on they may be infinite.

        Both outputs are differentiable, once, and kept for the backward pass, which refuses to run when one was changed
        in place. (After :func:`torch.compile` it does not see that, unless the inputs have four dimensions: the
        gradients are wrong then.) Under :class:`torch.autocast` the inputs are cast as torch casts them.

    Example:
        >>> import torch, triton_gallery
        >>> q, k, v = torch.randn(3, 1, 4, 10, 8).unbind()
        >>> triton_gallery.attention(q, k, v, is_causal=True).shape
        torch.Size([1, 4, 10, 8])

    References:
        Tri Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, 2023.
        https://arxiv.org/abs/2307.08691
    """
    for name, given, neutral in (("attn_mask", attn_mask, None), ("dropout_p", number(dropout_p), 0)):
        if given is not neutral and not (isinstance(given, NUMBERS) and given == neutral):
            hint = "torch.nn.functional.scaled_dot_product_attention has it"
            raise ValueError(f"attention: {name} must be {neutral}, got {got(given)}; {hint}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor("attention", name, x)
    check_same_device("attention", q=q, k=k, v=v)
    given = {"k": k.dtype, "v": v.dtype}
    q, k, v = autocast(q, k, v)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            found = f"{x.dtype}" if x.dtype == given[name] else f"{given[name]}, {x.dtype} after autocast"
            raise TypeError(f"attention: {name} must have q's dtype {q.dtype}, got {found}; convert one with .to()")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"attention: {name} must be True or False, got {got(flag)}")
    q, k, v, shape = _as_4d(q, k, v, enable_gqa)
    scale = _checked_scale(scale, q.shape[-1])
    lower, upper = _limits(q.shape[2], k.shape[2], is_causal, window, causal_alignment)
    if q.dtype != torch.float64:
        # The kernels scale in float32, for powers of 2.
        if abs(scale) > 2e38:
            raise ValueError(f"attention: scale must be within 2e38 unless the tensors are float64, got {scale}")
        if abs(scale) < torch.finfo(torch.float32).tiny:
            scale = 0.0
    if scale <= 0:
        # The kernels take the largest score before they scale it, which only a positive factor allows.
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    if needs_autograd(q, k, v):
        out, lse = apply(_Attention, q, k, v, scale, lower, upper)
    else:
        out, lse = _attention_fwd(q, k, v, scale, lower, upper)
    if len(shape) != 4:
        out = in_shape(out, shape, is_saved=True)
        lse = in_shape(lse, shape[:-1], is_saved=True) if return_lse else lse
    return (out, lse) if return_lse else out


def _as_4d(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """q, k, v as (batch, heads, seq, head_dim), views where strides allow, and the output's shape before that."""
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if x.dim() < 2:
            raise ValueError(
                f"attention: {name} must have at least 2 dimensions, (seq, head_dim), got {tuple(x.shape)}"
            )
        if not 1 <= x.shape[-1] <= _MAX_HEAD_DIM:
            raise ValueError(f"attention: {name} must have a head_dim from 1 to {_MAX_HEAD_DIM}, got {x.shape[-1]}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"attention: k must have q's head_dim {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"attention: v must have k's length {k.shape[-2]}, got {v.shape[-2]}")
    # The kernels count positions, and distances between them, in 32 bits; blocks reach beyond the last one.
    if exceeds(q.shape[-2] + k.shape[-2], LONGEST):
        raise ValueError(
            "attention: q and k must not be longer together than 2**31 - 2**14, beyond which positions are miscounted, "
            f"got {q.shape[-2]} and {k.shape[-2]}"
        )
    heads = {name: x.shape[-3] if x.dim() > 2 else 1 for name, x in named.items()}
    if enable_gqa:
        divides = heads["q"] % heads["k"] == 0 if heads["k"] else heads["q"] == 0
        if heads["k"] != heads["v"] or not divides:
            raise ValueError(
                "attention: k and v must have equally many heads, and q a multiple of that, with enable_gqa=True, "
                f"got {heads['q']}, {heads['k']} and {heads['v']} heads"
            )
        n_heads, n_kv_heads = heads["q"], heads["k"]
    else:
        n_heads = _broadcast(named, -3)
        # One head of keys and values for all queries is the smallest group there is; no need to repeat it.
        n_kv_heads = 1 if known(heads["k"] == 1) and known(heads["v"] == 1) else n_heads
    batch_shape = tuple(_broadcast(named, d) for d in range(-max(x.dim() for x in named.values()), -3))
    batch = math.prod(batch_shape)

    def flat(x, n):
        shape = (*batch_shape, n, *x.shape[-2:])
        # Mostly x is what is wanted, and a view would be a step of the backward pass, too.
        return x if len(shape) == 4 and x.shape == shape else x.expand(shape).reshape(batch, n, *x.shape[-2:])

    shape = (*batch_shape, n_heads, q.shape[-2], v.shape[-1])
    # As many leading dimensions as the inputs had.
    shape = shape[-max(x.dim() for x in named.values()) :]
    return flat(q, n_heads), flat(k, n_kv_heads), flat(v, n_kv_heads), shape


def _broadcast(named: dict[str, torch.Tensor], dim: int) -> int:
    """The common size of dimension `dim`, where a missing one counts as 1."""
    size = 1
    for x in named.values():
        if x.dim() >= -dim and not known(x.shape[dim] == 1):
            if not known(size == 1) and known(size != x.shape[dim]):
                shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
                hint = "; set enable_gqa=True if q has several heads for each head of k and v" if dim == -3 else ""
                raise ValueError(f"attention: the leading dimensions of q, k and v must broadcast, got {shapes}{hint}")
            size = x.shape[dim]
    return size


def _checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(head_dim)
    scale = number(scale)
    if isinstance(scale, bool) or not isinstance(scale, NUMBERS):
        raise TypeError(f"attention: scale must be a number or None, got {type(scale).__name__}")
    if isinstance(scale, int) and abs(scale) > sys.float_info.max:
        raise ValueError(f"attention: scale must fit into float64, got {got(scale)}")
    # Infinity and NaN alone; torch.compile cannot trace math.isfinite of a number that it treats as dynamic.
    if scale - scale != 0:
        raise ValueError(f"attention: scale must be finite, got {scale}")
    return float(scale)


def _limits(
    seq_q: int, seq_k: int, is_causal: bool, window: int | tuple[int | None, int | None] | None, causal_alignment: str
) -> tuple[int | None, int | None]:
    """(lower, upper): query i is allowed the keys from i + lower to i + upper; None for no limit."""
    if not isinstance(causal_alignment, str) or causal_alignment not in ("top-left", "bottom-right"):
        arrived = got(causal_alignment)
        raise ValueError(f"attention: causal_alignment must be 'top-left' or 'bottom-right', got {arrived}")
    sides = [number(n) for n in (window if isinstance(window, (tuple, list)) else (window, window))]
    if len(sides) != 2 or any(isinstance(n, bool) or not isinstance(n, (*INTS, type(None))) for n in sides):
        raise TypeError(f"attention: window must be a number of keys, a pair (left, right) or None, got {got(window)}")
    if any(n is not None and n < 0 for n in sides):
        raise ValueError(f"attention: window must not be negative (None stands for no limit), got {got(window)}")
    left, right = sides
    if is_causal:
        right = 0
    # What the position of query 0 is; numbers beyond 2**31 mean no more than that, and would not fit the operator.
    offset = seq_k - seq_q if causal_alignment == "bottom-right" else 0
    lower = None if left is None else offset - min(left, 2**31)
    upper = None if right is None else offset + min(right, 2**31)
    return lower, upper
