"""Softmax: a whole row in registers where it fits, running statistics where it does not."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import hopper
from ._arguments import FLOATS, check_length, check_tensor, got, needs_autograd, number
from ._launch import (
    INTERPRET,
    alignment,
    cdiv,
    collapse,
    index_dtype,
    is_hopper,
    launch,
    next_power_of_2,
    num_multiprocessors,
    scratch,
)
from ._registration import apply, batch_first, differentiable, operator
from ._replay import replayed
from ._vectors import inside, load_vectors, row_begin, row_vectors, store_vectors

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)

# One program keeps at most this much of its rows in registers, counted in the dtype of the statistics: half of the
# register file of one multiprocessor. Longer rows are read twice, or on Hopper wait in shared memory.
_MAX_ROW_BYTES = 128 * 1024
# Of 16-bit rows that can be loaded four numbers at a time, or eight, registers hold more columns: forward as
# exponentials, a register each, and backward, where two tensors wait, as they came, two numbers in a register; so do
# those of odd rows (see `_UNALIGNED_BWD`).
PACKED_COLS = 48 * 1024, 32 * 1024
# Longer rows than this (backward, than twice this) have a program of their own, which reads them in blocks of columns.
_ONE_BLOCK_COLS = 1024
# Rows of 16-bit numbers that begin anywhere are moved in vectors of 16 bytes, if they have at least so many numbers and
# are (forward only those in one block) at least so many bytes: fewer are faster one by one.
_SHORTEST_UNALIGNED = 192
_MIN_BYTES_UNALIGNED = 6 * 2**20
# Warps of such a row, or of two, and the most vectors of it that a thread has: the fewer warps share a row, the fewer
# wait for each other. Backward, numbers wait as they came, two in a register.
_UNALIGNED_FWD = {0.5: 5, 1: 5, 2: 5, 4: 5}
_UNALIGNED_BWD = {0.5: 5, 1: 5, 2: 5, 4: 12, 8: 12}
# How much of a longer row one step of an online kernel reads: 16 bytes for each thread of 16 warps.
_ONLINE_BLOCK_BYTES = 8 * 1024
# 72 rows of at least so many blocks are cut into parts; of fewer rows proportionally shorter ones, too, down to a
# quarter of that: measured on an H200. (More rows than half the multiprocessors are not cut.)
_MIN_STEPS_OF_PARTS = 16
# Blocks in one round of the loop over a part, forward; half of that backward, where each has two tensors.
_PART_BLOCKS = 4
# A float32 sum of thousands of numbers, one after another, loses digits: no lane adds up more of a part than this.
_MAX_STEPS_OF_PARTS = 64
# The second walk over a row should find it in the L2 cache: so many bytes of rows may be under way.
_L2_BYTES = 36 * 1024 * 1024


# --- forward kernels --------------------------------------------------------------------------------------------------


@triton.jit
def _exp(x, DTYPE: tl.constexpr):
    """exp(x) for a result in DTYPE."""
    if DTYPE == tl.float32 or DTYPE == tl.float64:
        return tl.exp(x)
    else:
        # The hardware's instruction is exp2. Results under 1e-38, for which tl.exp takes three more, become 0.
        return tl.exp2(x * 1.4426950408889634)


@triton.jit(do_not_specialize=["n_rows"])
def _softmax_fwd_kernel(
    x_ptr,  # (n_rows, n_cols)
    out_ptr,  # (n_rows, n_cols), contiguous
    n_rows,
    n_cols,
    x_row_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ALIGN: tl.constexpr = 1,  # n_cols and strides are multiples of it
    IS_LOG: tl.constexpr = False,
    STATS_DTYPE: tl.constexpr = tl.float32,
):
    """Program i owns rows i * BLOCK_ROWS to (i + 1) * BLOCK_ROWS: out = exp(x - max(x)) / sum(exp(x - max(x)))."""
    # Triton knows multiples of 16 by itself. This shows it those of ALIGN, so that it loads so many numbers at a time.
    n_cols, x_row_stride = [n // ALIGN * ALIGN for n in (n_cols, x_row_stride)]
    # int64 before the product with a stride: a tensor may hold more than 2**31 elements.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    # Padded lanes hold -inf: they never win the maximum, and exp(-inf) adds 0 to the sum.
    x = tl.load(x_ptr + rows * x_row_stride + cols, mask=mask, other=-float("inf"))
    # As in torch, x takes the output's dtype before anything else; the arithmetic is at least float32.
    x = x.to(out_ptr.dtype.element_ty).to(STATS_DTYPE)
    x = x - tl.max(x, axis=1, keep_dims=True)
    numerator = _exp(x, out_ptr.dtype.element_ty)
    denominator = tl.sum(numerator, axis=1, keep_dims=True)
    if IS_LOG:
        out = x - tl.log(denominator)
    else:
        # One division per row, then products.
        out = numerator * (1 / denominator)
    tl.store(out_ptr + rows * n_cols + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_fwd_blocks_kernel(
    x_ptr,  # (n_rows, n_cols)
    out_ptr,  # (n_rows, n_cols), contiguous
    n_cols,
    x_row_stride,
    N_BLOCKS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ALIGN: tl.constexpr = 1,  # n_cols and strides are multiples of it
    IS_LOG: tl.constexpr = False,
    STATS_DTYPE: tl.constexpr = tl.float32,
):
    """Program i owns row i, in blocks of columns that are all full but the last.

    One block would have to be the next power of two, and up to half of its registers would hold nothing.
    """
    n_cols, x_row_stride = [n // ALIGN * ALIGN for n in (n_cols, x_row_stride)]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_COLS)
    x_row_ptr = x_ptr + row * x_row_stride
    out_row_ptr = out_ptr + row * n_cols
    blocks = ()
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_COLS + lanes
        mask = cols < n_cols if k == N_BLOCKS - 1 else None
        blocks += (tl.load(x_row_ptr + cols, mask=mask, other=None if mask is None else -float("inf")),)
    maxima = blocks[0].to(DTYPE).to(STATS_DTYPE)
    for k in tl.static_range(1, N_BLOCKS):
        maxima = tl.maximum(maxima, blocks[k].to(DTYPE).to(STATS_DTYPE))
    row_max = tl.max(maxima, axis=0)
    sums = tl.zeros((BLOCK_COLS,), STATS_DTYPE)
    numerators = ()
    for k in tl.static_range(N_BLOCKS):
        numerator = _exp(blocks[k].to(DTYPE).to(STATS_DTYPE) - row_max, DTYPE)
        sums += numerator
        numerators += (numerator,)
    row_sum = tl.sum(sums, axis=0)
    for k in tl.static_range(N_BLOCKS):
        if IS_LOG:
            out = blocks[k].to(DTYPE).to(STATS_DTYPE) - row_max - tl.log(row_sum)
        else:
            out = numerators[k] * (1 / row_sum)
        cols = k * BLOCK_COLS + lanes
        tl.store(out_row_ptr + cols, out.to(DTYPE), mask=cols < n_cols if k == N_BLOCKS - 1 else None)


@triton.jit
def _normalize_rows(
    x_ptr, out_ptr, rows, n_rows, n_cols, x_row_stride, begin, end, VECTOR: tl.constexpr, BLOCK_COLS: tl.constexpr,
    N_BLOCKS: tl.constexpr, N_FULL: tl.constexpr, IS_LAST_ROW: tl.constexpr, IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):  # fmt: skip
    """The softmax of some rows that begin at the same place in a vector of 16 bytes."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    lanes = tl.arange(0, BLOCK_COLS)
    row_mask = rows < n_rows
    x_row_ptrs = row_vectors(x_ptr, rows, x_row_stride, VECTOR)
    out_row_ptrs = row_vectors(out_ptr, rows, n_cols, VECTOR)
    blocks = ()
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_COLS + lanes
        x = load_vectors(x_row_ptrs, row_mask, cols, begin, end, VECTOR, k < N_FULL, IS_LAST_ROW, -float("inf"))
        blocks += (inside(x.to(DTYPE).to(STATS_DTYPE), cols, begin, end, k > 0 and k < N_FULL, -float("inf")),)
    maxima = blocks[0]
    for k in tl.static_range(1, N_BLOCKS):
        maxima = tl.maximum(maxima, blocks[k])
    row_max = tl.max(maxima, axis=1, keep_dims=True)
    sums = tl.zeros((rows.shape[0], BLOCK_COLS), STATS_DTYPE)
    numerators = ()
    for k in tl.static_range(N_BLOCKS):
        numerator = _exp(blocks[k] - row_max, DTYPE)
        sums += numerator
        numerators += (numerator,)
    row_sum = tl.sum(sums, axis=1, keep_dims=True)
    for k in tl.static_range(N_BLOCKS):
        if IS_LOG:
            out = blocks[k] - row_max - tl.log(row_sum)
        else:
            out = numerators[k] * (1 / row_sum)
        cols = k * BLOCK_COLS + lanes
        store_vectors(out_row_ptrs, out, row_mask, cols, begin, end, VECTOR, k > 0 and k < N_FULL, False)


@triton.jit(do_not_specialize=["n_rows"])
def _softmax_fwd_unaligned_kernel(
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    out_ptr,  # (n_rows, n_cols), contiguous; its rows begin where in a vector those of x do
    n_rows,
    n_cols,
    x_row_stride,
    VECTOR: tl.constexpr,  # numbers in 16 bytes
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    N_BLOCKS: tl.constexpr,  # of columns
    N_FULL: tl.constexpr,  # of these, those that every row fills, but for what the first lacks ahead of it
    IS_LOG: tl.constexpr = False,
    STATS_DTYPE: tl.constexpr = tl.float32,
):
    """Program i * VECTOR + j owns the BLOCK_ROWS rows j, j + VECTOR, ... from row i * VECTOR * BLOCK_ROWS on.

    They all begin at the same place in a vector of 16 bytes, and are moved in whole vectors.
    """
    place = tl.program_id(0) % VECTOR
    first = (tl.program_id(0) // VECTOR).to(tl.int64) * (VECTOR * BLOCK_ROWS) + place
    begin = row_begin(place.to(tl.int64), x_row_stride, VECTOR, False)
    rows = first + tl.arange(0, BLOCK_ROWS) * VECTOR
    last = n_rows - 1
    _normalize_rows(
        x_ptr, out_ptr, rows, last, n_cols, x_row_stride, begin, begin + n_cols, VECTOR, BLOCK_COLS, N_BLOCKS, N_FULL,
        False, IS_LOG, STATS_DTYPE,
    )  # fmt: skip
    if last >= first and last < first + VECTOR * BLOCK_ROWS and last % VECTOR == place:
        _normalize_rows(
            x_ptr, out_ptr, last + tl.arange(0, BLOCK_ROWS).to(tl.int64), n_rows, n_cols, x_row_stride, begin,
            begin + n_cols, VECTOR, BLOCK_COLS, N_BLOCKS, N_FULL, True, IS_LOG, STATS_DTYPE,
        )  # fmt: skip


@triton.jit
def _online_start(SHAPE: tl.constexpr, DTYPE: tl.constexpr):
    """Each lane's running maximum m and sum s before it has seen a number."""
    # The lowest finite number, not -inf: then no -inf in x can meet -inf in m, whose difference is NaN.
    LOWEST: tl.constexpr = -1.7976931348623157e308 if DTYPE == tl.float64 else -3.4028234663852886e38
    return tl.full(SHAPE, LOWEST, DTYPE), tl.zeros(SHAPE, DTYPE)


@triton.jit
def _online_update(m, s, x, DTYPE: tl.constexpr):
    """Fold x into each lane's running maximum m and its sum s of exp(x - m), for a result in DTYPE."""
    # The new maximum is m or x, so one of exp(m - new) and exp(x - new) is 1 and the other is e.
    e = _exp(-tl.abs(x - m), DTYPE)
    s = tl.where(x > m, s * e + 1, s + e)
    return tl.maximum(m, x), s


@triton.jit
def _online_update_by_blocks(m, s, blocks, DTYPE: tl.constexpr):
    """Fold several numbers into each lane's m and s at a time: they share the new maximum, and one correction of s."""
    new = m
    for k in tl.static_range(len(blocks)):
        new = tl.maximum(new, blocks[k])
    s *= _exp(m - new, DTYPE)
    for k in tl.static_range(len(blocks)):
        s += _exp(blocks[k] - new, DTYPE)
    return new, s


@triton.jit
def _online_finish(m, s):
    """Merge the lanes of axis 0: the row's maximum, and its sum of exp(x - maximum)."""
    row_max = tl.max(m, axis=0, keep_dims=True)
    # Every thread of a warp adds its own product to what another sends. Were the two one instruction, the own product
    # would not be rounded and the other would, and the threads' sums would differ in their last bits. A choice between
    # the product and 0 keeps them apart.
    s = tl.where(s != 0, s * tl.exp(m - row_max), 0.0)
    return row_max, tl.sum(s, axis=0, keep_dims=True)


@triton.jit
def _normalize(x, row_max, row_sum, DTYPE: tl.constexpr, IS_LOG: tl.constexpr):
    """The softmax in DTYPE, or its logarithm, of numbers x of a row with these statistics."""
    if IS_LOG:
        return x - row_max - tl.log(row_sum)
    else:
        return _exp(x - row_max, DTYPE) * (1 / row_sum)


@triton.jit(do_not_specialize=["n_rows"])
def _softmax_online_fwd_kernel(
    x_ptr,  # (n_rows, n_cols)
    out_ptr,  # (n_rows, n_cols), contiguous
    n_rows,
    n_cols,
    x_row_stride,
    BLOCK_COLS: tl.constexpr,
    ALIGN: tl.constexpr = 1,  # n_cols and strides are multiples of it
    IS_LOG: tl.constexpr = False,
    STATS_DTYPE: tl.constexpr = tl.float32,
):
    """Program i owns rows i, i + num_programs, ... and walks each twice: for max and sum, then to write the result."""
    n_cols, x_row_stride = [n // ALIGN * ALIGN for n in (n_cols, x_row_stride)]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_COLS)
    row = tl.program_id(0).to(tl.int64)
    while row < n_rows:
        x_ptrs = x_ptr + row * x_row_stride + cols
        out_ptrs = out_ptr + row * n_cols + cols
        # Every lane keeps statistics of its own; the lanes meet once per row, not once per block.
        m, s = _online_start((BLOCK_COLS,), STATS_DTYPE)
        for start in tl.range(0, n_cols, BLOCK_COLS, num_stages=4):
            mask = start + cols < n_cols
            x = tl.load(x_ptrs + start, mask=mask, other=-float("inf"), eviction_policy="evict_last")
            m, s = _online_update(m, s, x.to(DTYPE).to(STATS_DTYPE), DTYPE)
        row_max, row_sum = _online_finish(m, s)
        # The second walk finds in the L2 cache what the first one has read, if there is room.
        for start in tl.range(0, n_cols, BLOCK_COLS, num_stages=4):
            mask = start + cols < n_cols
            x = tl.load(x_ptrs + start, mask=mask, other=-float("inf"), eviction_policy="evict_first")
            out = _normalize(x.to(DTYPE).to(STATS_DTYPE), row_max, row_sum, DTYPE, IS_LOG)
            tl.store(out_ptrs + start, out.to(DTYPE), mask=mask, cache_modifier=".cs")
        row += tl.num_programs(0)


@triton.jit
def _row_offsets(rows, sizes, strides):
    """Offset of each row's first element: peel one index after another off the row's number, innermost first."""
    offsets = tl.zeros(rows.shape, tl.int64)
    for d in tl.static_range(len(sizes) - 1):
        offsets += (rows % sizes[d]).to(tl.int64) * strides[d]
        rows = rows // sizes[d]
    return offsets + rows.to(tl.int64) * strides[len(sizes) - 1]


@triton.jit
def _softmax_strided_fwd_kernel(
    x_ptr,  # any strides over `sizes` and the columns
    out_ptr,  # any strides over `sizes` and the columns
    n_rows,
    n_cols,
    sizes,  # sizes of the row dimensions, innermost first; their product is n_rows
    x_row_strides,
    out_row_strides,
    x_col_stride,
    out_col_stride,
    INDEX_DTYPE: tl.constexpr,  # of the rows' numbers
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    N_BLOCKS: tl.constexpr,  # of columns
    IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):
    """Program i owns rows i * BLOCK_ROWS to (i + 1) * BLOCK_ROWS, in any memory layout."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    # Columns run down the tile and rows across it: in most such tensors neighbouring rows are neighbours in memory.
    rows = tl.program_id(0).to(INDEX_DTYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    lanes = tl.arange(0, BLOCK_COLS)[:, None].to(tl.int64)
    x_ptrs = x_ptr + _row_offsets(rows, sizes, x_row_strides)
    blocks = ()
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_COLS + lanes
        mask = (rows < n_rows) & (cols < n_cols)
        blocks += (tl.load(x_ptrs + cols * x_col_stride, mask=mask, other=-float("inf")),)
    # Each lane meets its own numbers of all blocks first; only then do the lanes meet.
    maxima = blocks[0].to(DTYPE).to(STATS_DTYPE)
    for k in tl.static_range(1, N_BLOCKS):
        maxima = tl.maximum(maxima, blocks[k].to(DTYPE).to(STATS_DTYPE))
    row_max = tl.max(maxima, axis=0, keep_dims=True)
    sums = tl.zeros((BLOCK_COLS, BLOCK_ROWS), STATS_DTYPE)
    numerators = ()
    for k in tl.static_range(N_BLOCKS):
        numerators += (_exp(blocks[k].to(DTYPE).to(STATS_DTYPE) - row_max, DTYPE),)
        sums += numerators[k]
    row_sum = tl.sum(sums, axis=0, keep_dims=True)
    out_ptrs = out_ptr + _row_offsets(rows, sizes, out_row_strides)
    for k in tl.static_range(N_BLOCKS):
        if IS_LOG:
            out = blocks[k].to(DTYPE).to(STATS_DTYPE) - row_max - tl.log(row_sum)
        else:
            out = numerators[k] * (1 / row_sum)
        cols = k * BLOCK_COLS + lanes
        tl.store(out_ptrs + cols * out_col_stride, out.to(DTYPE), mask=(rows < n_rows) & (cols < n_cols))


@triton.jit
def _softmax_parts_stats_kernel(
    x_ptr,  # any strides over `sizes` and the columns
    out_ptr,  # for its dtype alone
    part_max_ptr,  # (n_rows, n_parts)
    part_sum_ptr,  # (n_rows, n_parts)
    n_rows,
    n_cols,
    n_parts,
    part_cols,  # columns of a part; the last one may have fewer
    sizes,  # sizes of the row dimensions, innermost first; their product is n_rows
    x_row_strides,
    x_col_stride,
    INDEX_DTYPE: tl.constexpr,  # of the rows' numbers
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    N_BLOCKS: tl.constexpr,  # of columns, in one round of the loop
    STATS_DTYPE: tl.constexpr,
):
    """Program i * n_parts + j owns part j of the rows of tile i: their maxima, and sums of exp(x - maximum)."""
    part = (tl.program_id(0) % n_parts).to(tl.int64)
    rows = (tl.program_id(0) // n_parts).to(INDEX_DTYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    lanes = part * part_cols + tl.arange(0, BLOCK_COLS)[:, None]
    end = tl.minimum(n_cols, (part + 1) * part_cols)
    x_ptrs = x_ptr + _row_offsets(rows, sizes, x_row_strides)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    m, s = _online_start((BLOCK_COLS, BLOCK_ROWS), STATS_DTYPE)
    for start in range(0, part_cols, N_BLOCKS * BLOCK_COLS):
        blocks = ()
        for k in tl.static_range(N_BLOCKS):
            cols = start + k * BLOCK_COLS + lanes
            mask = (rows < n_rows) & (cols < end)
            x = tl.load(x_ptrs + cols * x_col_stride, mask=mask, other=-float("inf"), eviction_policy="evict_last")
            blocks += (x.to(DTYPE).to(STATS_DTYPE),)
        m, s = _online_update_by_blocks(m, s, blocks, DTYPE)
    part_max, part_sum = _online_finish(m, s)
    offsets = rows * n_parts + part
    tl.store(part_max_ptr + offsets, part_max, mask=rows < n_rows)
    tl.store(part_sum_ptr + offsets, part_sum, mask=rows < n_rows)


@triton.jit
def _softmax_parts_fwd_kernel(
    x_ptr,  # any strides over `sizes` and the columns
    out_ptr,  # any strides over `sizes` and the columns
    part_max_ptr,  # (n_rows, n_parts)
    part_sum_ptr,  # (n_rows, n_parts)
    n_rows,
    n_cols,
    n_parts,
    part_cols,  # columns of a part; the last one may have fewer
    sizes,  # sizes of the row dimensions, innermost first; their product is n_rows
    x_row_strides,
    out_row_strides,
    x_col_stride,
    out_col_stride,
    INDEX_DTYPE: tl.constexpr,  # of the rows' numbers
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    N_BLOCKS: tl.constexpr,  # of columns, in one round of the loop
    BLOCK_PARTS: tl.constexpr,
    IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):
    """Program i * n_parts + j writes part j of the rows of tile i, by the statistics of all parts."""
    part = (tl.program_id(0) % n_parts).to(tl.int64)
    rows = (tl.program_id(0) // n_parts).to(INDEX_DTYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    lowest, zero = _online_start((BLOCK_PARTS, BLOCK_ROWS), STATS_DTYPE)
    m, s = lowest, zero
    for first in range(0, n_parts, BLOCK_PARTS):
        parts = first + tl.arange(0, BLOCK_PARTS)[:, None]
        mask = (rows < n_rows) & (parts < n_parts)
        part_max = tl.load(part_max_ptr + rows * n_parts + parts, mask=mask, other=lowest)
        part_sum = tl.load(part_sum_ptr + rows * n_parts + parts, mask=mask, other=zero)
        new = tl.maximum(m, part_max)
        m, s = new, s * tl.exp(m - new) + part_sum * tl.exp(part_max - new)
    row_max, row_sum = _online_finish(m, s)
    lanes = part * part_cols + tl.arange(0, BLOCK_COLS)[:, None]
    end = tl.minimum(n_cols, (part + 1) * part_cols)
    x_ptrs = x_ptr + _row_offsets(rows, sizes, x_row_strides)
    out_ptrs = out_ptr + _row_offsets(rows, sizes, out_row_strides)
    for start in range(0, part_cols, N_BLOCKS * BLOCK_COLS):
        blocks = ()
        for k in tl.static_range(N_BLOCKS):
            cols = start + k * BLOCK_COLS + lanes
            mask = (rows < n_rows) & (cols < end)
            x = tl.load(x_ptrs + cols * x_col_stride, mask=mask, other=-float("inf"), eviction_policy="evict_first")
            blocks += (x,)
        for k in tl.static_range(N_BLOCKS):
            cols = start + k * BLOCK_COLS + lanes
            out = _normalize(blocks[k].to(DTYPE).to(STATS_DTYPE), row_max, row_sum, DTYPE, IS_LOG)
            tl.store(out_ptrs + cols * out_col_stride, out.to(DTYPE), mask=(rows < n_rows) & (cols < end))


# --- backward kernels -------------------------------------------------------------------------------------------------


@triton.jit
def _summand(y, dy, IS_LOG: tl.constexpr):
    """What the backward pass sums over a row."""
    return dy if IS_LOG else dy * y


@triton.jit
def _gradient(y, dy, row_sum, IS_LOG: tl.constexpr):
    return dy - tl.exp(y) * row_sum if IS_LOG else y * (dy - row_sum)


@triton.jit(do_not_specialize=["n_rows"])
def _softmax_bwd_kernel(
    y_ptr,  # (n_rows, n_cols), the forward's output
    dy_ptr,  # (n_rows, n_cols)
    dx_ptr,  # (n_rows, n_cols), contiguous
    n_rows,
    n_cols,
    y_row_stride,
    dy_row_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ALIGN: tl.constexpr,  # n_cols and strides are multiples of it
    IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):
    """Program i owns rows i * BLOCK_ROWS to (i + 1) * BLOCK_ROWS: dx = y * (dy - sum(dy * y))."""
    n_cols, y_row_stride, dy_row_stride = [n // ALIGN * ALIGN for n in (n_cols, y_row_stride, dy_row_stride)]
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    # Padded lanes hold 0, which adds nothing to the sum.
    y = tl.load(y_ptr + rows * y_row_stride + cols, mask=mask, other=0.0).to(STATS_DTYPE)
    dy = tl.load(dy_ptr + rows * dy_row_stride + cols, mask=mask, other=0.0).to(STATS_DTYPE)
    row_sum = tl.sum(_summand(y, dy, IS_LOG), axis=1, keep_dims=True)
    dx = _gradient(y, dy, row_sum, IS_LOG)
    tl.store(dx_ptr + rows * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_bwd_blocks_kernel(
    y_ptr,  # (n_rows, n_cols), the forward's output
    dy_ptr,  # (n_rows, n_cols)
    dx_ptr,  # (n_rows, n_cols), contiguous
    n_cols,
    y_row_stride,
    dy_row_stride,
    N_BLOCKS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ALIGN: tl.constexpr,  # n_cols and strides are multiples of it
    IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):
    """Program i owns row i, in blocks of columns that are all full but the last."""
    n_cols, y_row_stride, dy_row_stride = [n // ALIGN * ALIGN for n in (n_cols, y_row_stride, dy_row_stride)]
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_COLS)
    y_row_ptr = y_ptr + row * y_row_stride
    dy_row_ptr = dy_ptr + row * dy_row_stride
    dx_row_ptr = dx_ptr + row * n_cols
    # Until the sum is known, 16-bit numbers wait in registers as they came, two in each.
    ys = ()
    dys = ()
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_COLS + lanes
        mask = cols < n_cols if k == N_BLOCKS - 1 else None
        ys += (tl.load(y_row_ptr + cols, mask=mask, other=None if mask is None else 0.0),)
        dys += (tl.load(dy_row_ptr + cols, mask=mask, other=None if mask is None else 0.0),)
    sums = tl.zeros((BLOCK_COLS,), STATS_DTYPE)
    for k in tl.static_range(N_BLOCKS):
        sums += _summand(ys[k].to(STATS_DTYPE), dys[k].to(STATS_DTYPE), IS_LOG)
    row_sum = tl.sum(sums, axis=0)
    for k in tl.static_range(N_BLOCKS):
        dx = _gradient(ys[k].to(STATS_DTYPE), dys[k].to(STATS_DTYPE), row_sum, IS_LOG)
        cols = k * BLOCK_COLS + lanes
        tl.store(dx_row_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < n_cols if k == N_BLOCKS - 1 else None)


@triton.jit
def _differentiate_rows(
    y_ptr, dy_ptr, dx_ptr, rows, n_rows, n_cols, y_row_stride, dy_row_stride, begin, end, VECTOR: tl.constexpr,
    BLOCK_COLS: tl.constexpr, N_BLOCKS: tl.constexpr, N_FULL: tl.constexpr, IS_LAST_ROW: tl.constexpr,
    IS_LOG: tl.constexpr, STATS_DTYPE: tl.constexpr,
):  # fmt: skip
    """The gradient of some rows that begin at the same place in a vector of 16 bytes."""
    lanes = tl.arange(0, BLOCK_COLS)
    row_mask = rows < n_rows
    y_row_ptrs = row_vectors(y_ptr, rows, y_row_stride, VECTOR)
    dy_row_ptrs = row_vectors(dy_ptr, rows, dy_row_stride, VECTOR)
    dx_row_ptrs = row_vectors(dx_ptr, rows, n_cols, VECTOR)
    ys = ()
    dys = ()
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_COLS + lanes
        ys += (load_vectors(y_row_ptrs, row_mask, cols, begin, end, VECTOR, k < N_FULL, IS_LAST_ROW, 0.0),)
        dys += (load_vectors(dy_row_ptrs, row_mask, cols, begin, end, VECTOR, k < N_FULL, IS_LAST_ROW, 0.0),)
    sums = tl.zeros((rows.shape[0], BLOCK_COLS), STATS_DTYPE)
    for k in tl.static_range(N_BLOCKS):
        summand = _summand(ys[k].to(STATS_DTYPE), dys[k].to(STATS_DTYPE), IS_LOG)
        sums += inside(summand, k * BLOCK_COLS + lanes, begin, end, k > 0 and k < N_FULL, 0.0)
    row_sum = tl.sum(sums, axis=1, keep_dims=True)
    for k in tl.static_range(N_BLOCKS):
        dx = _gradient(ys[k].to(STATS_DTYPE), dys[k].to(STATS_DTYPE), row_sum, IS_LOG)
        cols = k * BLOCK_COLS + lanes
        store_vectors(dx_row_ptrs, dx, row_mask, cols, begin, end, VECTOR, k > 0 and k < N_FULL, False)


@triton.jit(do_not_specialize=["n_rows"])
def _softmax_bwd_unaligned_kernel(
    y_ptr,  # (n_rows, n_cols), the forward's output, 16-byte aligned
    dy_ptr,  # (n_rows, n_cols), 16-byte aligned
    dx_ptr,  # (n_rows, n_cols), contiguous; its rows, and those of dy, begin where in a vector those of y do
    n_rows,
    n_cols,
    y_row_stride,
    dy_row_stride,
    VECTOR: tl.constexpr,  # numbers in 16 bytes
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    N_BLOCKS: tl.constexpr,  # of columns
    N_FULL: tl.constexpr,  # of these, those that every row fills, but for what the first lacks ahead of it
    IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):
    """Program i * VECTOR + j owns the BLOCK_ROWS rows j, j + VECTOR, ... from row i * VECTOR * BLOCK_ROWS on."""
    place = tl.program_id(0) % VECTOR
    first = (tl.program_id(0) // VECTOR).to(tl.int64) * (VECTOR * BLOCK_ROWS) + place
    begin = row_begin(place.to(tl.int64), y_row_stride, VECTOR, False)
    end = begin + n_cols
    rows = first + tl.arange(0, BLOCK_ROWS) * VECTOR
    last = n_rows - 1
    _differentiate_rows(
        y_ptr, dy_ptr, dx_ptr, rows, last, n_cols, y_row_stride, dy_row_stride, begin, end, VECTOR, BLOCK_COLS,
        N_BLOCKS, N_FULL, False, IS_LOG, STATS_DTYPE,
    )  # fmt: skip
    if last >= first and last < first + VECTOR * BLOCK_ROWS and last % VECTOR == place:
        _differentiate_rows(
            y_ptr, dy_ptr, dx_ptr, last + tl.arange(0, BLOCK_ROWS).to(tl.int64), n_rows, n_cols, y_row_stride,
            dy_row_stride, begin, end, VECTOR, BLOCK_COLS, N_BLOCKS, N_FULL, True, IS_LOG, STATS_DTYPE,
        )  # fmt: skip


@triton.jit
def _softmax_bwd_twice_kernel(
    y_ptr,  # (n_rows, n_cols), the forward's output
    dy_ptr,  # (n_rows, n_cols)
    dx_ptr,  # (n_rows, n_cols), contiguous
    n_cols,
    y_row_stride,
    dy_row_stride,
    N_BLOCKS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ALIGN: tl.constexpr,  # n_cols and strides are multiples of it
    IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):
    """Program i owns row i and reads it twice, the second time from the L1 cache, or what that cannot hold from L2.

    Threads that keep nothing but a sum need so few registers that a multiprocessor holds as many as it can, and the
    more of them wait for memory, the better it is used.
    """
    n_cols, y_row_stride, dy_row_stride = [n // ALIGN * ALIGN for n in (n_cols, y_row_stride, dy_row_stride)]
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_COLS)
    y_row_ptr = y_ptr + row * y_row_stride
    dy_row_ptr = dy_ptr + row * dy_row_stride
    dx_row_ptr = dx_ptr + row * n_cols
    sums = tl.zeros((BLOCK_COLS,), STATS_DTYPE)
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_COLS + lanes
        mask = cols < n_cols if k == N_BLOCKS - 1 else None
        other = None if mask is None else 0.0
        y = tl.load(y_row_ptr + cols, mask=mask, other=other, eviction_policy="evict_last")
        dy = tl.load(dy_row_ptr + cols, mask=mask, other=other, eviction_policy="evict_last")
        sums += _summand(y.to(STATS_DTYPE), dy.to(STATS_DTYPE), IS_LOG)
    row_sum = tl.sum(sums, axis=0)
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_COLS + lanes
        mask = cols < n_cols if k == N_BLOCKS - 1 else None
        other = None if mask is None else 0.0
        y = tl.load(y_row_ptr + cols, mask=mask, other=other, eviction_policy="evict_first")
        dy = tl.load(dy_row_ptr + cols, mask=mask, other=other, eviction_policy="evict_first")
        dx = _gradient(y.to(STATS_DTYPE), dy.to(STATS_DTYPE), row_sum, IS_LOG)
        tl.store(dx_row_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _softmax_online_bwd_kernel(
    y_ptr,  # (n_rows, n_cols), the forward's output
    dy_ptr,  # (n_rows, n_cols)
    dx_ptr,  # (n_rows, n_cols), contiguous
    n_rows,
    n_cols,
    y_row_stride,
    dy_row_stride,
    BLOCK_COLS: tl.constexpr,
    ALIGN: tl.constexpr,  # n_cols and strides are multiples of it
    IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):
    """Program i owns rows i, i + num_programs, ... and walks each twice: for the sum, then to write the gradient."""
    n_cols, y_row_stride, dy_row_stride = [n // ALIGN * ALIGN for n in (n_cols, y_row_stride, dy_row_stride)]
    cols = tl.arange(0, BLOCK_COLS)
    row = tl.program_id(0).to(tl.int64)
    while row < n_rows:
        y_ptrs = y_ptr + row * y_row_stride + cols
        dy_ptrs = dy_ptr + row * dy_row_stride + cols
        dx_ptrs = dx_ptr + row * n_cols + cols
        sums = tl.zeros((BLOCK_COLS,), STATS_DTYPE)
        for start in tl.range(0, n_cols, BLOCK_COLS, num_stages=3):
            mask = start + cols < n_cols
            y = tl.load(y_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_last").to(STATS_DTYPE)
            dy = tl.load(dy_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_last").to(STATS_DTYPE)
            sums += _summand(y, dy, IS_LOG)
        row_sum = tl.sum(sums, axis=0)
        for start in tl.range(0, n_cols, BLOCK_COLS, num_stages=3):
            mask = start + cols < n_cols
            y = tl.load(y_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first").to(STATS_DTYPE)
            dy = tl.load(dy_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first").to(STATS_DTYPE)
            dx = _gradient(y, dy, row_sum, IS_LOG)
            tl.store(dx_ptrs + start, dx.to(dx_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
        row += tl.num_programs(0)


@triton.jit
def _softmax_strided_bwd_kernel(
    y_ptr,  # any strides over `sizes` and the columns
    dy_ptr,  # any strides over `sizes` and the columns
    dx_ptr,  # any strides over `sizes` and the columns
    n_rows,
    n_cols,
    sizes,  # sizes of the row dimensions, innermost first; their product is n_rows
    y_row_strides,
    dy_row_strides,
    dx_row_strides,
    y_col_stride,
    dy_col_stride,
    dx_col_stride,
    INDEX_DTYPE: tl.constexpr,  # of the rows' numbers
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    N_BLOCKS: tl.constexpr,  # of columns
    IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):
    """Program i owns rows i * BLOCK_ROWS to (i + 1) * BLOCK_ROWS, in any memory layout."""
    rows = tl.program_id(0).to(INDEX_DTYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    lanes = tl.arange(0, BLOCK_COLS)[:, None].to(tl.int64)
    y_ptrs = y_ptr + _row_offsets(rows, sizes, y_row_strides)
    dy_ptrs = dy_ptr + _row_offsets(rows, sizes, dy_row_strides)
    ys = ()
    dys = ()
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_COLS + lanes
        mask = (rows < n_rows) & (cols < n_cols)
        ys += (tl.load(y_ptrs + cols * y_col_stride, mask=mask, other=0.0),)
        dys += (tl.load(dy_ptrs + cols * dy_col_stride, mask=mask, other=0.0),)
    sums = tl.zeros((BLOCK_COLS, BLOCK_ROWS), STATS_DTYPE)
    for k in tl.static_range(N_BLOCKS):
        sums += _summand(ys[k].to(STATS_DTYPE), dys[k].to(STATS_DTYPE), IS_LOG)
    row_sum = tl.sum(sums, axis=0, keep_dims=True)
    dx_ptrs = dx_ptr + _row_offsets(rows, sizes, dx_row_strides)
    for k in tl.static_range(N_BLOCKS):
        dx = _gradient(ys[k].to(STATS_DTYPE), dys[k].to(STATS_DTYPE), row_sum, IS_LOG)
        cols = k * BLOCK_COLS + lanes
        mask = (rows < n_rows) & (cols < n_cols)
        tl.store(dx_ptrs + cols * dx_col_stride, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_parts_sum_kernel(
    y_ptr,  # any strides over `sizes` and the columns
    dy_ptr,  # any strides over `sizes` and the columns
    part_sum_ptr,  # (n_rows, n_parts)
    n_rows,
    n_cols,
    n_parts,
    part_cols,  # columns of a part; the last one may have fewer
    sizes,  # sizes of the row dimensions, innermost first; their product is n_rows
    y_row_strides,
    dy_row_strides,
    y_col_stride,
    dy_col_stride,
    INDEX_DTYPE: tl.constexpr,  # of the rows' numbers
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    N_BLOCKS: tl.constexpr,  # of columns, in one round of the loop
    IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):
    """Program i * n_parts + j owns part j of the rows of tile i: their sums of dy * y."""
    part = (tl.program_id(0) % n_parts).to(tl.int64)
    rows = (tl.program_id(0) // n_parts).to(INDEX_DTYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    lanes = part * part_cols + tl.arange(0, BLOCK_COLS)[:, None]
    end = tl.minimum(n_cols, (part + 1) * part_cols)
    y_ptrs = y_ptr + _row_offsets(rows, sizes, y_row_strides)
    dy_ptrs = dy_ptr + _row_offsets(rows, sizes, dy_row_strides)
    sums = tl.zeros((BLOCK_COLS, BLOCK_ROWS), STATS_DTYPE)
    for start in range(0, part_cols, N_BLOCKS * BLOCK_COLS):
        ys = ()
        dys = ()
        for k in tl.static_range(N_BLOCKS):
            cols = start + k * BLOCK_COLS + lanes
            mask = (rows < n_rows) & (cols < end)
            ys += (tl.load(y_ptrs + cols * y_col_stride, mask=mask, other=0.0, eviction_policy="evict_last"),)
            dys += (tl.load(dy_ptrs + cols * dy_col_stride, mask=mask, other=0.0, eviction_policy="evict_last"),)
        for k in tl.static_range(N_BLOCKS):
            sums += _summand(ys[k].to(STATS_DTYPE), dys[k].to(STATS_DTYPE), IS_LOG)
    tl.store(part_sum_ptr + rows * n_parts + part, tl.sum(sums, axis=0, keep_dims=True), mask=rows < n_rows)


@triton.jit
def _softmax_parts_bwd_kernel(
    y_ptr,  # any strides over `sizes` and the columns
    dy_ptr,  # any strides over `sizes` and the columns
    dx_ptr,  # any strides over `sizes` and the columns
    part_sum_ptr,  # (n_rows, n_parts)
    n_rows,
    n_cols,
    n_parts,
    part_cols,  # columns of a part; the last one may have fewer
    sizes,  # sizes of the row dimensions, innermost first; their product is n_rows
    y_row_strides,
    dy_row_strides,
    dx_row_strides,
    y_col_stride,
    dy_col_stride,
    dx_col_stride,
    INDEX_DTYPE: tl.constexpr,  # of the rows' numbers
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    N_BLOCKS: tl.constexpr,  # of columns, in one round of the loop
    BLOCK_PARTS: tl.constexpr,
    IS_LOG: tl.constexpr,
    STATS_DTYPE: tl.constexpr,
):
    """Program i * n_parts + j writes part j of the rows of tile i, by the sums of all parts."""
    part = (tl.program_id(0) % n_parts).to(tl.int64)
    rows = (tl.program_id(0) // n_parts).to(INDEX_DTYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    sums = tl.zeros((BLOCK_PARTS, BLOCK_ROWS), STATS_DTYPE)
    for first in range(0, n_parts, BLOCK_PARTS):
        parts = first + tl.arange(0, BLOCK_PARTS)[:, None]
        mask = (rows < n_rows) & (parts < n_parts)
        sums += tl.load(part_sum_ptr + rows * n_parts + parts, mask=mask, other=0.0)
    row_sum = tl.sum(sums, axis=0, keep_dims=True)
    lanes = part * part_cols + tl.arange(0, BLOCK_COLS)[:, None]
    end = tl.minimum(n_cols, (part + 1) * part_cols)
    y_ptrs = y_ptr + _row_offsets(rows, sizes, y_row_strides)
    dy_ptrs = dy_ptr + _row_offsets(rows, sizes, dy_row_strides)
    dx_ptrs = dx_ptr + _row_offsets(rows, sizes, dx_row_strides)
    for start in range(0, part_cols, N_BLOCKS * BLOCK_COLS):
        ys = ()
        dys = ()
        for k in tl.static_range(N_BLOCKS):
            cols = start + k * BLOCK_COLS + lanes
            mask = (rows < n_rows) & (cols < end)
            ys += (tl.load(y_ptrs + cols * y_col_stride, mask=mask, other=0.0, eviction_policy="evict_first"),)
            dys += (tl.load(dy_ptrs + cols * dy_col_stride, mask=mask, other=0.0, eviction_policy="evict_first"),)
        for k in tl.static_range(N_BLOCKS):
            cols = start + k * BLOCK_COLS + lanes
            dx = _gradient(ys[k].to(STATS_DTYPE), dys[k].to(STATS_DTYPE), row_sum, IS_LOG)
            mask = (rows < n_rows) & (cols < end)
            tl.store(dx_ptrs + cols * dx_col_stride, dx.to(dx_ptr.dtype.element_ty), mask=mask)


# --- launchers --------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """How rows lie in memory: those of each input, and last those of the output."""

    n_rows: int
    n_cols: int
    sizes: tuple[int, ...]
    row_strides: list[tuple[int, ...]]
    col_strides: list[int]

    @property
    def index_dtype(self) -> tl.dtype:
        # The last tile of rows may end behind the last row.
        return index_dtype(self.n_rows + 2048)


def _launch_rows(
    inputs: tuple[torch.Tensor, ...], out: torch.Tensor, dim: int, is_log: bool, dtype: torch.dtype
) -> None:
    """Launch the kernels that suit the rows along `dim`: forward for one input, backward for two."""
    is_forward = len(inputs) == 1
    shape, *strides = (list(s) or [1] for s in (out.shape, *(t.stride() for t in (*inputs, out))))
    n_cols = shape.pop(dim)
    n_rows = out.numel() // n_cols
    col_strides = [s.pop(dim) for s in strides]
    sizes, row_strides = collapse(shape, *strides)
    if n_rows == 1:
        # No other row says how far apart they are. Were it 1, the compiler would not see that a row can be aligned.
        row_strides = [(n_cols,)] * len(strides)
    rows = _Rows(n_rows, n_cols, sizes, row_strides, col_strides)
    meta = {"IS_LOG": is_log, "STATS_DTYPE": tl.float64 if dtype == torch.float64 else tl.float32}
    dense_cols = n_cols == 1 or all(stride == 1 for stride in col_strides)

    if len(rows.sizes) > 1 or not dense_cols:
        block_rows, block_cols, num_warps = _strided_tile(n_rows, n_cols, dense_cols, dtype, is_forward)
        if n_cols > (1 if dense_cols else 8) * block_cols:
            _launch_parts(inputs, out, rows, block_rows, block_cols, num_warps, meta)
            return
        kernel = _softmax_strided_fwd_kernel if is_forward else _softmax_strided_bwd_kernel
        launch(
            kernel, (cdiv(n_rows, block_rows),),
            *inputs, out, n_rows, n_cols, rows.sizes, *rows.row_strides, *col_strides,
            INDEX_DTYPE=rows.index_dtype, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
            N_BLOCKS=cdiv(n_cols, block_cols), num_warps=num_warps, **meta,
        )  # fmt: skip
        return

    row_strides = [strides[0] for strides in rows.row_strides]
    # The kernel for Hopper keeps its statistics in float32.
    if is_forward and dtype != torch.float64 and is_hopper(out.device):
        resident = hopper.load("softmax")
        n_first = resident.supported_rows(*inputs, n_rows, n_cols, row_strides[0]) if resident is not None else 0
        if n_first > 0:
            resident.forward(*inputs, out, n_first, n_cols, row_strides[0], is_log)
        if n_first == n_rows:
            return
        if n_first > 0:
            inputs, out = (_row(*inputs, n_first, n_cols, row_strides[0]),), _row(out, n_first, n_cols, n_cols)
            n_rows = 1
            rows = rows._replace(n_rows=1)

    args = (*inputs, out, n_rows, n_cols, *row_strides[:-1])
    tensors = [
        x.as_strided((n_rows, n_cols), (stride, 1)) for x, stride in zip((*inputs, out), row_strides, strict=True)
    ]
    if (tile := _unaligned_tile(*tensors)) is not None:
        vector, block_rows, block_cols, num_warps = tile
        kernel = _softmax_fwd_unaligned_kernel if is_forward else _softmax_bwd_unaligned_kernel
        launch(
            kernel, (cdiv(n_rows, vector * block_rows) * vector,), *args,
            VECTOR=vector, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, N_BLOCKS=cdiv(n_cols + vector - 1, block_cols),
            N_FULL=n_cols // block_cols, num_warps=num_warps, **meta,
        )  # fmt: skip
        return
    vectorized, meta["ALIGN"] = alignment(inputs, n_cols, *row_strides[:-1])
    if n_cols <= len(inputs) * _ONE_BLOCK_COLS:
        # Short rows share a program, which keeps more loads in flight that way.
        block_rows, block_cols, num_warps = _tile(inputs, n_rows, n_cols, dtype, vectorized)
        kernel = _softmax_fwd_kernel if is_forward else _softmax_bwd_kernel
        launch(
            kernel, (cdiv(n_rows, block_rows),), *args, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
            num_warps=num_warps, **meta,
        )  # fmt: skip
        return
    twice = None if is_forward or not vectorized else _block_read_twice(inputs[0], n_rows, n_cols, dtype)
    if block := twice or _block(inputs, n_rows, n_cols, dtype, vectorized):
        block_cols, num_warps = block
        if is_forward:
            kernel = _softmax_fwd_blocks_kernel
        else:
            kernel = _softmax_bwd_twice_kernel if twice else _softmax_bwd_blocks_kernel
        launch(
            kernel, (n_rows,), *inputs, out, n_cols, *row_strides[:-1],
            N_BLOCKS=cdiv(n_cols, block_cols), BLOCK_COLS=block_cols, num_warps=num_warps, **meta,
        )  # fmt: skip
        return

    if not is_forward and is_hopper(out.device) and (resident := hopper.load("softmax_backward")) is not None:
        if (plan := resident.plan_backward(*tensors)) is not None:
            resident.backward(*tensors, is_log, plan)
            return

    block_cols = _ONLINE_BLOCK_BYTES // inputs[0].element_size()
    if _pays_in_parts(n_rows, n_cols, block_cols, out.device):
        _launch_parts(inputs, out, rows, 1, block_cols, 16, meta)
        return
    n_processors = num_multiprocessors(out.device)
    row_bytes = n_cols * sum(x.element_size() for x in inputs)
    if 2 * n_processors * row_bytes <= _L2_BYTES:
        n_programs = min(n_rows, 2 * n_processors)
    elif is_hopper(out.device):
        # The trip to memory costs less than waiting for few rows: seen on an H200.
        n_programs = n_rows
    else:
        n_programs = min(n_rows, n_processors)
    kernel = _softmax_online_fwd_kernel if is_forward else _softmax_online_bwd_kernel
    launch(kernel, (n_programs,), *args, BLOCK_COLS=block_cols, num_warps=16, **meta)


def _pays_in_parts(n_rows: int, n_cols: int, block_cols: int, device: torch.device) -> bool:
    """Whether a program for each row would leave multiprocessors idle for longer than a second launch takes."""
    n_steps = n_cols / block_cols
    return 2 * n_rows <= num_multiprocessors(device) and n_steps >= _MIN_STEPS_OF_PARTS * max(0.25, n_rows / 72)


def _launch_parts(
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    rows: _Rows,
    block_rows: int,
    block_cols: int,
    num_warps: int,
    meta: dict,
) -> None:
    """Cut each row into parts, one for each program: first for their statistics, then for the result."""
    n_tiles = cdiv(rows.n_rows, block_rows)
    # As many parts as keep the GPU busy, and so many that none is too long for its sum.
    n_parts = max(1, 32 // num_warps * num_multiprocessors(out.device) // n_tiles)
    n_parts = max(n_parts, cdiv(rows.n_cols, _MAX_STEPS_OF_PARTS * block_cols))
    part_cols = cdiv(cdiv(rows.n_cols, n_parts), block_cols) * block_cols
    n_parts = cdiv(rows.n_cols, part_cols)
    stats_dtype = torch.float64 if meta["STATS_DTYPE"] == tl.float64 else torch.float32
    stats = [scratch((rows.n_rows, n_parts), stats_dtype, out.device) for _ in range(3 - len(inputs))]
    args = *stats, rows.n_rows, rows.n_cols, n_parts, part_cols, rows.sizes
    strides = *rows.row_strides[:-1], *rows.col_strides[:-1]
    grid = (n_tiles * n_parts,)
    is_log = {"IS_LOG": meta["IS_LOG"]}
    options = {
        "INDEX_DTYPE": rows.index_dtype, "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols,
        "N_BLOCKS": min(_PART_BLOCKS // len(inputs), part_cols // block_cols), "STATS_DTYPE": meta["STATS_DTYPE"],
        "num_warps": num_warps,
    }  # fmt: skip
    if len(inputs) == 1:
        kernel = _softmax_parts_fwd_kernel
        launch(_softmax_parts_stats_kernel, grid, *inputs, out, *args, *strides, **options)
    else:
        kernel = _softmax_parts_bwd_kernel
        launch(_softmax_parts_sum_kernel, grid, *inputs, *args, *strides, **options, **is_log)
    strides = *rows.row_strides, *rows.col_strides
    launch(kernel, grid, *inputs, out, *args, *strides, BLOCK_PARTS=1024 // block_rows, **options, **is_log)


def _row(x: torch.Tensor, i: int, n_cols: int, row_stride: int) -> torch.Tensor:
    return x.as_strided((1, n_cols), (row_stride, 1), x.storage_offset() + i * row_stride)


def _tile(
    inputs: tuple[torch.Tensor, ...], n_rows: int, n_cols: int, dtype: torch.dtype, vectorized: bool
) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program for short rows: measured on an H100; float64 goes by its registers."""
    block_cols = next_power_of_2(n_cols)
    n_numbers = max(1024, block_cols)
    is_backward, wide = len(inputs) == 2, inputs[0].element_size() >= 4
    is_few = n_rows * block_cols < 2**20
    if dtype == torch.float64:
        num_warps = 4 if n_numbers * len(inputs) <= 2048 else 8
    elif not vectorized and block_cols <= 256 and (is_few or is_backward or block_cols <= 128):
        # Numbers that are loaded one by one: a program has half as many of them.
        n_numbers = 512
        num_warps = 4 if is_few or block_cols <= 32 else len(inputs) * (2 if wide else 1)
    elif is_backward:
        num_warps = 4
    else:
        num_warps = 4 if wide and (is_few or block_cols <= 256) else 2
    return n_numbers // block_cols, block_cols, num_warps


def _block(
    inputs: tuple[torch.Tensor, ...], n_rows: int, n_cols: int, dtype: torch.dtype, vectorized: bool
) -> tuple[int, int] | None:
    """(columns of a block, warps) for a row in registers; None for rows that are longer.

    Measured on an H100, and forward on an H200 where rows are not packed, or have 20481 to 26624 numbers; float64 goes
    by its registers.
    """
    is_backward, wide = len(inputs) == 2, dtype == torch.float64
    packed = vectorized and inputs[0].element_size() == 2 and not wide
    longest = PACKED_COLS[is_backward] if packed else _MAX_ROW_BYTES // (len(inputs) * (8 if wide else 4))
    if n_cols > longest:
        return None
    # Numbers that cannot be loaded four at a time take a register each, so they are spread over more threads.
    if is_backward:
        if packed:
            return (1024, 4) if n_cols <= 8192 else (2048, 8)
        if inputs[0].element_size() == 2:
            return 1024, 8 if 8192 < n_cols <= 13 * 1024 else 4
        return (1024, 4) if n_cols <= (4096 if wide else 8192) else (2048, 16)
    if wide:
        return 1024, 4 if n_cols <= 4096 else 8 if n_cols <= 8192 else 16
    if not packed:
        return (1024, 4 if n_cols <= 4096 else 8) if n_cols <= 16384 else (2048, 16)
    if n_cols <= 8192:
        # Where few programs share a multiprocessor, each is the sooner done the more warps it has.
        is_few = n_rows <= 4 * num_multiprocessors(inputs[0].device)
        return 1024, 2 if n_cols <= 4096 and not is_few else 4
    return (2048, 8) if n_cols <= 26 * 1024 else (2048, 16)


def _block_read_twice(y: torch.Tensor, n_rows: int, n_cols: int, dtype: torch.dtype) -> tuple[int, int] | None:
    """(columns of a block, warps) for rows that the backward pass reads twice; None for others.

    Measured on an H100 and on an H200, there also with a cache that holds nothing that memory does not have yet.
    """
    if y.element_size() != 2 or dtype == torch.float64 or not is_hopper(y.device):
        return None
    # Where every row has a multiprocessor of its own, the second reading takes longer than what it saves.
    if n_rows > num_multiprocessors(y.device) and (14336 < n_cols <= 24576 or 32768 < n_cols <= 49152):
        return 8192, 32
    return None


def _unaligned_tile(*tensors: torch.Tensor) -> tuple[int, int, int, int] | None:
    """(numbers in 16 bytes, rows, columns of a block, warps) for rows that begin anywhere: measured on an H200.

    Takes the inputs, one forward and two backward, and the output. None where all rows begin with a vector of 16 bytes,
    where the kernels cannot take them, or where others are as fast.
    """
    n_rows, n_cols = tensors[0].shape
    vector = 16 // min(x.element_size() for x in tensors)
    # Two numbers at a time, or four, are as fast and do without the shift.
    if vector != 8 or n_cols < _SHORTEST_UNALIGNED or n_cols % 2 == 0:
        return None
    if any(x.data_ptr() % 16 != 0 or (x.stride(0) - n_cols) % vector != 0 or x.stride(0) < vector for x in tensors):
        return None
    is_backward = len(tensors) == 3
    if is_backward and any(x.element_size() != 2 for x in tensors):
        return None
    is_small = n_rows * n_cols * tensors[0].element_size() < _MIN_BYTES_UNALIGNED
    if is_small and (is_backward or n_cols <= _ONE_BLOCK_COLS):
        return None
    for warps_per_row, max_vectors in (_UNALIGNED_BWD if is_backward else _UNALIGNED_FWD).items():
        block_cols = int(32 * warps_per_row) * vector
        if n_cols + vector - 1 <= max_vectors * block_cols:
            return vector, max(1, int(1 / warps_per_row)), block_cols, max(1, int(warps_per_row))
    return None


def _strided_tile(
    n_rows: int, n_cols: int, dense_cols: bool, dtype: torch.dtype, is_forward: bool
) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile: measured on an H200. Longer rows than its caller has tiles for have parts."""
    if dense_cols:
        block_cols = min(next_power_of_2(n_cols), _ONE_BLOCK_COLS)
        # A sum over few columns wants few warps: where a warp has all of them, it needs no other.
        n_elements, num_warps = (512, 1) if block_cols <= 32 else (4096, 4) if block_cols <= 256 else (8192, 8)
        return (2, block_cols, 8) if n_cols > block_cols else (n_elements // block_cols, block_cols, num_warps)
    # A thread has eight numbers of a tile. The more neighbouring rows, the longer the piece of memory that is read at
    # once; the fewer, the more columns fit into registers.
    tiles = {16: (128, 1), 32: (64, 1), 64: (64, 2), 128: (64, 4), 256: (32, 4), 512: (32, 8), 1024: (16, 8)}
    if is_forward and dtype != torch.float64:
        tiles[2048] = (16, 16)
    tiles[8192] = (64, 4)
    block_rows, num_warps = next((tile for limit, tile in tiles.items() if n_cols <= limit), (64, 8))
    if dtype == torch.float64:
        block_rows //= 2
    if n_rows <= 8:
        block_rows = min(block_rows, 8)
    return block_rows, 256 * num_warps // block_rows, num_warps


def _empty_output(x: torch.Tensor, dim: int, dtype: torch.dtype, is_log: bool) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _vmap_fwd(info, in_dims, x, dim, *options):
    x = batch_first(x, in_dims[0], info.batch_size)
    # A batch of numbers has a row in each.
    return _softmax_fwd(x if x.ndim > 1 else x[:, None], dim + 1, *options).view(x.shape), 0


@operator(fake=_empty_output, vmap=_vmap_fwd)
def _softmax_fwd(x: torch.Tensor, dim: int, dtype: torch.dtype, is_log: bool) -> torch.Tensor:
    check_length("log_softmax" if is_log else "softmax", "the length of x along dim", x.shape[dim] if x.ndim else 1)
    out = _empty_output(x, dim, dtype, is_log)
    if INTERPRET and dtype == torch.bfloat16:
        x = x.to(dtype)  # which kernels do themselves, but the interpreter shows them out as float32
    if out.numel() > 0:
        _launch_rows((x,), out, dim, is_log, dtype)
    return out


def _empty_gradient(y: torch.Tensor, dy: torch.Tensor, dim: int, dtype: torch.dtype, is_log: bool) -> torch.Tensor:
    return torch.empty(y.shape, dtype=dtype, device=y.device)


def _vmap_bwd(info, in_dims, y, dy, dim, *options):
    y, dy = (batch_first(t, d, info.batch_size) for t, d in zip((y, dy), in_dims, strict=False))
    if y.ndim == 1:
        return _softmax_bwd(y[:, None], dy[:, None], 1, *options).squeeze(1), 0
    return _softmax_bwd(y, dy, dim + 1, *options), 0


@operator(fake=_empty_gradient, vmap=_vmap_bwd)
def _softmax_bwd(y: torch.Tensor, dy: torch.Tensor, dim: int, dtype: torch.dtype, is_log: bool) -> torch.Tensor:
    dx = _empty_gradient(y, dy, dim, dtype, is_log)
    if dx.numel() > 0:
        _launch_rows((y, dy), dx, dim, is_log, y.dtype)
    return dx


# --- autograd ---------------------------------------------------------------------------------------------------------


class _Softmax(torch.autograd.Function):
    @staticmethod
    def constants(x, dim, dtype, is_log):
        return {"dim": dim, "x_dtype": x.dtype, "is_log": is_log}

    @staticmethod
    def setup(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        if needs_autograd(y, dy):
            return _SoftmaxGrad.apply(y, dy, ctx.dim, ctx.x_dtype, ctx.is_log), None, None, None
        return _softmax_bwd(y, dy, ctx.dim, ctx.x_dtype, ctx.is_log), None, None, None


class _SoftmaxGrad(torch.autograd.Function):
    """The backward pass as a function of its own, so that it can be differentiated again, by torch's operations."""

    @staticmethod
    def constants(y, dy, dim, x_dtype, is_log):
        return {"dim": dim, "is_log": is_log}

    @staticmethod
    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, ddx):
        y, dy = ctx.saved_tensors
        stats_dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
        p, g, h = (t.to(stats_dtype) for t in (y, dy, ddx))

        def row_sum(t):
            return t.sum(ctx.dim, keepdim=True)

        if ctx.is_log:
            p = p.exp()
            for_y, for_dy = -h * p * row_sum(g), h - row_sum(h * p)
        else:
            for_y, for_dy = h * (g - row_sum(g * p)) - g * row_sum(h * p), p * (h - row_sum(h * p))
        return for_y.to(y.dtype), for_dy.to(dy.dtype), None, None, None


differentiable(_softmax_fwd, _Softmax)
differentiable(_softmax_bwd, _SoftmaxGrad)


# --- public functions -------------------------------------------------------------------------------------------------


def _apply(op: str, x: torch.Tensor, dim: int, dtype: torch.dtype | None, is_log: bool) -> torch.Tensor:
    check_tensor(op, "x", x, FLOATS + _INTEGERS)
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in FLOATS):
        raise TypeError(f"{op}: dtype must be None or one of {', '.join(map(str, FLOATS))}, got {got(dtype)}")
    if dtype is None and x.dtype not in FLOATS:
        raise TypeError(f"{op}: x must be floating-point, got {x.dtype}; pass dtype=torch.float32 to convert it first")
    dim = number(dim)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{op}: dim must be an int, got {type(dim).__name__}")
    n_dims = max(x.ndim, 1)
    if not -n_dims <= dim < n_dims:
        raise ValueError(f"{op}: dim must be in [{-n_dims}, {n_dims - 1}], got {got(dim)}")
    dim %= n_dims
    if dtype is None:
        dtype = torch.float32 if _autocasts(x) else x.dtype
    if x.dtype not in FLOATS:
        x = x.to(dtype)
    if needs_autograd(x):
        return apply(_Softmax, x, dim, dtype, is_log)
    return _softmax_fwd(x, dim, dtype, is_log)


def _autocasts(x: torch.Tensor) -> bool:
    """Whether torch.autocast makes this a float32 operation; it does so on GPUs and not on the CPU."""
    device = x.device.type
    return device in ("cuda", "xpu") and x.dtype != torch.float64 and torch.is_autocast_enabled(device)


@replayed
def softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    r"""Normalize along one dimension, as :func:`torch.softmax` does.

    .. math:: \text{out}_i = \frac{e^{x_i - \max_j x_j}}{\sum_k e^{x_k - \max_j x_j}}

    Args:
        x: any shape and strides; float16, bfloat16, float32, float64, and with dtype given bool, uint8 or a signed
            integer dtype.
        dim: the dimension along which the numbers of each row sum to 1.
        dtype: convert x to this floating-point dtype first; while it is loaded, unless it holds integers.

    Returns:
        A contiguous tensor of x's shape, in `dtype` where it is given and in x's dtype otherwise (float32 for 16-bit x
        under GPU autocast, as in torch).

    Raises:
        TypeError: x is no tensor, its dtype is not supported, dtype is not floating-point, or dim is not an int.
        ValueError: x has no dimension dim, lives where no kernel can run, or dim's length is within 2**14 below 2**31,
            where blocks are miscounted.
        NotImplementedError: forward-mode differentiation reaches an argument; reverse mode is supported.

    Notes:
        Maximum and sum are float32 (float64 for float64). A row with a NaN or +inf, or of -inf alone, becomes NaN, as
        in torch. The result repeats bit for bit; how many rows there are may change the last bits of each. The
        gradient has kernels of its own and can be differentiated again.

        Up to 32768 columns (16384 for float64, 49152 of a 16-bit dtype whose rows are 8-byte aligned) a row is read
        once and stays on the chip; longer ones are read twice, the second time from the L2 cache while it fits there.
        (Backward these are 16384, 8192 and 32768 columns, and 24569 of 16 bits if their number is odd, all rows
        together have 6 MiB, and the incoming gradient is 16-byte aligned, as are the distances from a row's end to the
        next row. On Hopper 8-byte aligned 16-bit rows of 14337 to 24576 and of 32769 to 49152 columns, if there are
        more of them than multiprocessors, are read twice, too, the second time mostly from the L1 cache.) On Hopper
        longer 16-bit or float32 rows are read once, too, if there are two or more, with up to 8 MiB each (on an H200),
        if x is 16-byte aligned and so is the distance from a row's end to the next row (and where all rows together
        have less than 4 MiB, the end of the last one): they lie in parts on several multiprocessors, which exchange
        their maxima and sums. (Backward these are 4 MiB each, down to an eighth of that where a row's length is no
        multiple of 16 bytes, if the incoming gradient is so aligned and the numbers of x, of the result and of it are
        of one width.) Of the others, a few rows of 32 KiB or more are cut into parts that are read twice, to keep the
        whole GPU busy. Rows that are not dense in memory, as with any dim but the last, are read where they lie, in
        tiles, and twice beyond 2048 columns (1024 for float64, in the backward pass, and for rows that are dense and
        lie at uneven distances).

    Example:
        >>> import torch, triton_gallery
        >>> triton_gallery.softmax(torch.tensor([0.0, 0.0, 0.0, 0.0]))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])

    References:
        Milakov and Gimelshein, *Online normalizer calculation for softmax*, https://arxiv.org/abs/1805.02867
    """
    return _apply("softmax", x, dim, dtype, False)


@replayed
def log_softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    r"""Logarithm of :func:`softmax`, as :func:`torch.log_softmax`, without the loss of the small probabilities.

    .. math:: \text{out}_i = x_i - \max_j x_j - \log \sum_k e^{x_k - \max_j x_j}

    Args:
        x: any shape and strides; float16, bfloat16, float32, float64, and with dtype given bool, uint8 or a signed
            integer dtype.
        dim: the dimension along which the exponentials of each row sum to 1.
        dtype: convert x to this floating-point dtype first; while it is loaded, unless it holds integers.

    Returns:
        A contiguous tensor of x's shape, in `dtype` where it is given and in x's dtype otherwise (float32 for 16-bit x
        under GPU autocast, as in torch).

    Raises:
        TypeError: x is no tensor, its dtype is not supported, dtype is not floating-point, or dim is not an int.
        ValueError: x has no dimension dim, lives where no kernel can run, or dim's length is within 2**14 below 2**31,
            where blocks are miscounted.
        NotImplementedError: forward-mode differentiation reaches an argument; reverse mode is supported.

    Notes:
        The kernels are those of :func:`softmax` with another last line, and what is noted there holds here.

    Example:
        >>> import torch, triton_gallery
        >>> triton_gallery.log_softmax(torch.tensor([0.0, 0.0, 0.0, 0.0]))
        tensor([-1.3863, -1.3863, -1.3863, -1.3863])
    """
    return _apply("log_softmax", x, dim, dtype, True)
