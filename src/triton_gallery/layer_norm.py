"""Layer norm and RMS norm: statistics of a row in registers, and gradients of the weights without locks."""

import math
import sys
from collections.abc import Sequence
from operator import index
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import hopper
from ._arguments import (
    FLOATS,
    INTS,
    NUMBERS,
    check_length,
    check_same_device,
    check_tensor,
    got,
    is_transformed,
    needs_autograd,
    number,
    refuse_batch_of_gradients,
)
from ._launch import (
    alignment,
    cdiv,
    cuda_arch,
    is_hopper,
    launch,
    next_power_of_2,
    num_multiprocessors,
    pdl,
    scratch,
)
from ._registration import apply, differentiable, one_by_one, operator
from ._replay import replayed
from ._vectors import inside, load_vectors, row_begin, row_vectors, rows_begin_alike, store_vectors

# Rows of up to this many elements (of float64 half as many) stay in the registers of one program; so do longer ones of
# up to this many bytes, if they are read four numbers at a time, or eight, and are not cut into parts. What neither
# takes is read twice.
_FWD_MAX_COLS = 24576
_FWD_MAX_BYTES = 98304
# Longer rows than this have a program of their own, which reads them in blocks of columns.
_ONE_BLOCK_COLS = 1024
_FWD_LONG_TILE = 4096
# From so many numbers on, 16-bit rows that begin anywhere are moved in vectors of 16 bytes.
_MIN_UNALIGNED = 2**21
# Vectors of a row that a thread keeps in its registers.
_MAX_BLOCKS = 5
_BWD_TILE = 4096
# Partial rows of dw and db that one program adds up at a time, and how many numbers of them.
_DWDB_ROWS = 1024
_DWDB_TILE = 8192


# --- forward ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm_fwd_kernel(
    x_ptr,  # (n_rows, n_cols)
    weight_ptr,  # (n_cols,) or None
    bias_ptr,  # (n_cols,) or None
    y_ptr,  # (n_rows, n_cols)
    mean_ptr,  # (n_rows,), or None for RMS norm, which subtracts no mean
    rstd_ptr,  # (n_rows,)
    n_rows,
    n_cols,
    x_row_stride,
    eps: tl.float64,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr = 1,  # n_cols and strides are multiples of it
):
    """Program i owns rows i * BLOCK_M to (i + 1) * BLOCK_M: y = (x - mean) / sqrt(var + eps) * weight + bias."""
    COMPUTE_DTYPE: tl.constexpr = rstd_ptr.dtype.element_ty
    # Triton knows multiples of 16 by itself. This shows it those of ALIGN, so that it loads so many numbers at a time.
    n_cols, x_row_stride = [n // ALIGN * ALIGN for n in (n_cols, x_row_stride)]
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    row_mask = rows < n_rows
    col_mask = cols < n_cols
    mask = row_mask[:, None] & col_mask[None, :]
    # Padded lanes read 0, which adds nothing to the sums.
    x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0)
    # Asked for after the sums, weight and bias would make the program wait for memory a second time.
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0)
    x = x.to(COMPUTE_DTYPE)
    if mean_ptr is not None:
        mean = tl.sum(x, axis=1) / n_cols
        tl.store(mean_ptr + rows, mean, mask=row_mask)
        # After the subtraction padded lanes would hold -mean: without the mask they would count in the variance.
        x = tl.where(mask, x - mean[:, None], 0.0)
    var = tl.sum(x * x, axis=1) / n_cols
    rstd = tl.rsqrt(var + tl.full((), eps, COMPUTE_DTYPE))
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= weight.to(COMPUTE_DTYPE)[None, :]
    if bias_ptr is not None:
        y += bias.to(COMPUTE_DTYPE)[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_kept(ptr, cols, mask):
    """Columns of weight or bias. All rows share them, so the caches are asked to keep them."""
    return tl.load(ptr + cols, mask=mask, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm_fwd_blocks_kernel(
    x_ptr,  # (n_rows, n_cols)
    weight_ptr,  # (n_cols,) or None
    bias_ptr,  # (n_cols,) or None
    y_ptr,  # (n_rows, n_cols)
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    n_rows,
    n_cols,
    x_row_stride,
    eps: tl.float64,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    N_BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr,  # whether weight and bias are loaded with x, and wait for the sums in registers
    ALIGN: tl.constexpr,  # n_cols and strides are multiples of it
):
    """Program i owns rows i * BLOCK_M to (i + 1) * BLOCK_M, in blocks of columns that are all full but the last.

    One block would have to be the next power of two, and up to half of its registers would hold nothing.
    """
    COMPUTE_DTYPE: tl.constexpr = rstd_ptr.dtype.element_ty
    n_cols, x_row_stride = [n // ALIGN * ALIGN for n in (n_cols, x_row_stride)]
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # A single row of a program is always there. Without a mask long rows take fewer registers.
    row_mask = rows < n_rows if BLOCK_M > 1 else tl.full((BLOCK_M,), True, tl.int1)
    lanes = tl.arange(0, BLOCK_N)
    x_row_ptrs = x_ptr + rows[:, None] * x_row_stride
    y_row_ptrs = y_ptr + rows[:, None] * n_cols
    blocks = ()
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_N + lanes
        mask = row_mask[:, None] & (cols < n_cols)[None, :] if k == N_BLOCKS - 1 else row_mask[:, None]
        blocks += (tl.load(x_row_ptrs + cols[None, :], mask=mask, other=0.0),)
    weights = ()
    biases = ()
    if AHEAD:
        for k in tl.static_range(N_BLOCKS):
            cols = k * BLOCK_N + lanes
            mask = cols < n_cols if k == N_BLOCKS - 1 else None
            if weight_ptr is not None:
                weights += (_load_kept(weight_ptr, cols, mask),)
            if bias_ptr is not None:
                biases += (_load_kept(bias_ptr, cols, mask),)
    mean = tl.zeros((BLOCK_M,), COMPUTE_DTYPE)
    if mean_ptr is not None:
        total = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE_DTYPE)
        for k in tl.static_range(N_BLOCKS):
            total += blocks[k].to(COMPUTE_DTYPE)
        mean = tl.sum(total, axis=1) / n_cols
        tl.store(mean_ptr + rows, mean, mask=row_mask)
    m2 = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE_DTYPE)
    for k in tl.static_range(N_BLOCKS):
        x = blocks[k].to(COMPUTE_DTYPE) - mean[:, None]
        if k == N_BLOCKS - 1:
            x = tl.where((k * BLOCK_N + lanes < n_cols)[None, :], x, 0.0)
        m2 += x * x
    rstd = tl.rsqrt(tl.sum(m2, axis=1) / n_cols + tl.full((), eps, COMPUTE_DTYPE))
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_N + lanes
        mask = cols < n_cols if k == N_BLOCKS - 1 else None
        y = (blocks[k].to(COMPUTE_DTYPE) - mean[:, None]) * rstd[:, None]
        if weight_ptr is not None:
            weight = weights[k] if AHEAD else _load_kept(weight_ptr, cols, mask)
            y *= weight.to(COMPUTE_DTYPE)[None, :]
        if bias_ptr is not None:
            bias = biases[k] if AHEAD else _load_kept(bias_ptr, cols, mask)
            y += bias.to(COMPUTE_DTYPE)[None, :]
        y_mask = row_mask[:, None] if mask is None else row_mask[:, None] & mask[None, :]
        tl.store(y_row_ptrs + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=y_mask)


@triton.jit
def _layer_norm_fwd_long_kernel(
    x_ptr,  # (n_rows, n_cols)
    weight_ptr,  # (n_cols,) or None
    bias_ptr,  # (n_cols,) or None
    y_ptr,  # (n_rows, n_cols)
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    n_cols,
    x_row_stride,
    eps: tl.float64,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,  # n_cols and strides are multiples of it
):
    """Program i owns row i and walks it twice, block by block: once for the statistics, once for y."""
    COMPUTE_DTYPE: tl.constexpr = rstd_ptr.dtype.element_ty
    n_cols, x_row_stride = [n // ALIGN * ALIGN for n in (n_cols, x_row_stride)]
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    x_row_ptr = x_ptr + row * x_row_stride
    # Lane j follows Welford's recurrence over elements j, j + BLOCK_N, ...: no lane waits for another inside the loop.
    mean = tl.zeros((BLOCK_N,), COMPUTE_DTYPE)
    m2 = tl.zeros((BLOCK_N,), COMPUTE_DTYPE)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + lanes
        mask = cols < n_cols
        # The caches are asked to keep the row until the second walk.
        x = tl.load(x_row_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(COMPUTE_DTYPE)
        if mean_ptr is not None:
            delta = tl.where(mask, x - mean, 0.0)
            mean += delta * (1 / tl.full((), start // BLOCK_N + 1, COMPUTE_DTYPE))
            m2 += delta * (x - mean)
        else:
            m2 += x * x
    if mean_ptr is not None:
        # Chan's formula joins the lanes: each brings its own spread, and the distance of its mean from the row's.
        count = (n_cols - lanes + BLOCK_N - 1) // BLOCK_N
        row_mean = tl.sum(mean * count, axis=0) / n_cols
        m2 += (mean - row_mean) * (mean - row_mean) * count
        tl.store(mean_ptr + row, row_mean)
    rstd = tl.rsqrt(tl.sum(m2, axis=0) / n_cols + tl.full((), eps, COMPUTE_DTYPE))
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + lanes
        mask = cols < n_cols
        x = tl.load(x_row_ptr + cols, mask=mask, eviction_policy="evict_first").to(COMPUTE_DTYPE)
        if mean_ptr is not None:
            x -= row_mean
        y = x * rstd
        if weight_ptr is not None:
            y *= _load_kept(weight_ptr, cols, mask).to(COMPUTE_DTYPE)
        if bias_ptr is not None:
            y += _load_kept(bias_ptr, cols, mask).to(COMPUTE_DTYPE)
        tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_shared(ptr, cols, begin, end, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a block of what all rows of a program share, moved to where they begin in a vector."""
    if ALIGNED:
        return tl.load(ptr + cols, mask=cols // VECTOR * VECTOR < end, other=0.0)
    else:
        return tl.load(ptr + (cols - begin), mask=(cols >= begin) & (cols < end), other=0.0)


@triton.jit
def _normalize_rows(
    x_ptr, weights, biases, y_ptr, mean_ptr, rstd_ptr, rows, n_rows, n_cols, x_row_stride, eps, begin, end,
    VECTOR: tl.constexpr, BLOCK_N: tl.constexpr, N_BLOCKS: tl.constexpr, N_FULL: tl.constexpr,
    IS_LAST_ROW: tl.constexpr,
):  # fmt: skip
    """Write y, mean and rstd of some rows of a program."""
    COMPUTE_DTYPE: tl.constexpr = rstd_ptr.dtype.element_ty
    lanes = tl.arange(0, BLOCK_N)
    row_mask = rows < n_rows
    x_row_ptrs = row_vectors(x_ptr, rows, x_row_stride, VECTOR)
    y_row_ptrs = row_vectors(y_ptr, rows, n_cols, VECTOR)
    blocks = ()
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_N + lanes
        blocks += (load_vectors(x_row_ptrs, row_mask, cols, begin, end, VECTOR, k < N_FULL, IS_LAST_ROW, 0.0),)
    mean = tl.zeros(rows.shape, COMPUTE_DTYPE)
    if mean_ptr is not None:
        total = tl.zeros((rows.shape[0], BLOCK_N), COMPUTE_DTYPE)
        for k in tl.static_range(N_BLOCKS):
            total += inside(blocks[k].to(COMPUTE_DTYPE), k * BLOCK_N + lanes, begin, end, k > 0 and k < N_FULL, 0.0)
        mean = tl.sum(total, axis=1) / n_cols
        tl.store(mean_ptr + rows, mean, mask=row_mask)
    m2 = tl.zeros((rows.shape[0], BLOCK_N), COMPUTE_DTYPE)
    for k in tl.static_range(N_BLOCKS):
        x = blocks[k].to(COMPUTE_DTYPE) - mean[:, None]
        x = inside(x, k * BLOCK_N + lanes, begin, end, k > 0 and k < N_FULL, 0.0)
        m2 += x * x
    rstd = tl.rsqrt(tl.sum(m2, axis=1) / n_cols + tl.full((), eps, COMPUTE_DTYPE))
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    for k in tl.static_range(N_BLOCKS):
        y = (blocks[k].to(COMPUTE_DTYPE) - mean[:, None]) * rstd[:, None]
        if len(weights) > 0:
            y *= weights[k].to(COMPUTE_DTYPE)[None, :]
        if len(biases) > 0:
            y += biases[k].to(COMPUTE_DTYPE)[None, :]
        cols = k * BLOCK_N + lanes
        store_vectors(y_row_ptrs, y, row_mask, cols, begin, end, VECTOR, k > 0 and k < N_FULL, False)


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm_fwd_unaligned_kernel(
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    weight_ptr,  # (n_cols,) or None
    bias_ptr,  # (n_cols,) or None
    y_ptr,  # (n_rows, n_cols), its rows beginning where in a vector those of x do
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    n_rows,
    n_cols,
    x_row_stride,
    eps: tl.float64,
    VECTOR: tl.constexpr,  # numbers in 16 bytes; n_programs * n_cols is a multiple of it
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    N_BLOCKS: tl.constexpr,  # of columns
    N_FULL: tl.constexpr,  # of these, those that every row fills, but for what the first lacks ahead of it
    NUM_STAGES: tl.constexpr,
):
    """Program i owns rows i, i + n_programs, ..., BLOCK_M of them at a time."""
    program = tl.program_id(0).to(tl.int64)
    n_programs = tl.num_programs(0)
    begin = row_begin(program, x_row_stride, VECTOR, False)
    end = begin + n_cols
    weights = ()
    biases = ()
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_N + tl.arange(0, BLOCK_N)
        if weight_ptr is not None:
            weights += (_load_shared(weight_ptr, cols, begin, end, VECTOR, False),)
        if bias_ptr is not None:
            biases += (_load_shared(bias_ptr, cols, begin, end, VECTOR, False),)
    tile = tl.arange(0, BLOCK_M).to(tl.int64) * n_programs
    last = n_rows - 1
    for start in tl.range(program, last, n_programs * BLOCK_M, num_stages=NUM_STAGES):
        _normalize_rows(
            x_ptr, weights, biases, y_ptr, mean_ptr, rstd_ptr, start + tile, last, n_cols, x_row_stride, eps,
            begin, end, VECTOR, BLOCK_N, N_BLOCKS, N_FULL, False,
        )  # fmt: skip
    if last % n_programs == program:
        _normalize_rows(
            x_ptr, weights, biases, y_ptr, mean_ptr, rstd_ptr, last + tile, n_rows, n_cols, x_row_stride, eps,
            begin, end, VECTOR, BLOCK_N, N_BLOCKS, N_FULL, True,
        )  # fmt: skip


# --- backward ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm_bwd_kernel(
    dy_ptr,  # (n_rows, n_cols)
    x_ptr,  # (n_rows, n_cols)
    weight_ptr,  # (n_cols,) or None
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    row_means_ptr,  # (2, n_rows), or None when a block covers the whole row
    dx_ptr,  # (n_rows, n_cols)
    dw_partial_ptr,  # (n_programs, n_cols), for one program dw itself, or None
    db_partial_ptr,  # (n_programs, n_cols), for one program db itself, or None
    n_rows,
    n_cols,
    dy_row_stride,
    dy_col_stride,
    x_row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ALIGN: tl.constexpr = 1,  # n_cols and strides are multiples of it
    PDL: tl.constexpr = False,
):
    """Program (j, i) owns columns j * BLOCK_N to (j + 1) * BLOCK_N of every n_programs-th tile of BLOCK_M rows.

    dx = (g - mean(g) - x_hat * mean(g * x_hat)) * rstd with g = dy * weight and x_hat = (x - mean) * rstd; row i of the
    partial sums takes the program's share of dw = sum(dy * x_hat) and db = sum(dy).
    """
    COMPUTE_DTYPE: tl.constexpr = rstd_ptr.dtype.element_ty
    n_cols, x_row_stride, dy_row_stride = [n // ALIGN * ALIGN for n in (n_cols, x_row_stride, dy_row_stride)]
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < n_cols
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(COMPUTE_DTYPE)
    # Each lane sums its own column over the loop; rows of the tile meet after it.
    dw = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE_DTYPE)
    db = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE_DTYPE)
    program = tl.program_id(1).to(tl.int64)
    for start in tl.range(program * BLOCK_M, n_rows, tl.num_programs(1) * BLOCK_M, num_stages=NUM_STAGES):
        # int64 in the interpreter, too, whose `start` is a Python number.
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(COMPUTE_DTYPE)
        # dy = 0 in padded lanes: every sum below has it as a factor.
        dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :] * dy_col_stride, mask=mask, other=0.0)
        dy = dy.to(COMPUTE_DTYPE)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
        x_hat = x * rstd
        if mean_ptr is not None:
            x_hat = (x - tl.load(mean_ptr + rows, mask=row_mask, other=0.0)[:, None]) * rstd
        g = dy
        if weight_ptr is not None:
            g = dy * weight[None, :]
        if row_means_ptr is None:
            gx_mean = tl.sum(g * x_hat, axis=1)[:, None] / n_cols
        else:
            gx_mean = tl.load(row_means_ptr + rows, mask=row_mask, other=0.0)[:, None]
        dx = g - x_hat * gx_mean
        if mean_ptr is not None:
            if row_means_ptr is None:
                g_mean = tl.sum(g, axis=1)[:, None] / n_cols
            else:
                g_mean = tl.load(row_means_ptr + n_rows + rows, mask=row_mask, other=0.0)[:, None]
            dx -= g_mean
        dx *= rstd
        tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * x_hat
        db += dy
    if PDL:
        gdc_launch_dependents()
    if dw_partial_ptr is not None:
        tl.store(dw_partial_ptr + program * n_cols + cols, tl.sum(dw, axis=0), mask=col_mask)
    if db_partial_ptr is not None:
        tl.store(db_partial_ptr + program * n_cols + cols, tl.sum(db, axis=0), mask=col_mask)


@triton.jit
def _backpropagate_rows(
    dy_ptr, x_ptr, weights, mean_ptr, rstd_ptr, dx_ptr, dw, db, rows, n_rows, n_cols, dy_row_stride, x_row_stride,
    begin, end, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr, N_BLOCKS: tl.constexpr, N_FULL: tl.constexpr,
    ALIGNED: tl.constexpr, IS_LAST_ROW: tl.constexpr,
):  # fmt: skip
    """Write dx of some rows of a program. Returns dw and db, with what these rows add to them."""
    COMPUTE_DTYPE: tl.constexpr = rstd_ptr.dtype.element_ty
    SHAPE: tl.constexpr = (rows.shape[0], BLOCK_N)
    lanes = tl.arange(0, BLOCK_N)
    row_mask = rows < n_rows
    x_row_ptrs = row_vectors(x_ptr, rows, x_row_stride, VECTOR)
    dy_row_ptrs = row_vectors(dy_ptr, rows, dy_row_stride, VECTOR)
    dx_row_ptrs = row_vectors(dx_ptr, rows, n_cols, VECTOR)
    rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
    mean = tl.zeros((rows.shape[0], 1), COMPUTE_DTYPE)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)[:, None]
    xs = ()
    dys = ()
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_N + lanes
        xs += (load_vectors(x_row_ptrs, row_mask, cols, begin, end, VECTOR, k < N_FULL, IS_LAST_ROW, 0.0),)
        # Where dy is 0, a lane adds nothing to any sum below.
        dys += (load_vectors(dy_row_ptrs, row_mask, cols, begin, end, VECTOR, k < N_FULL, IS_LAST_ROW, 0.0),)
    gx_sums = tl.zeros(SHAPE, COMPUTE_DTYPE)
    g_sums = tl.zeros(SHAPE, COMPUTE_DTYPE)
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_N + lanes
        x = inside(xs[k].to(COMPUTE_DTYPE) - mean, cols, begin, end, ALIGNED or (k > 0 and k < N_FULL), 0.0)
        g = inside(dys[k].to(COMPUTE_DTYPE), cols, begin, end, ALIGNED or (k > 0 and k < N_FULL), 0.0)
        if len(weights) > 0:
            g *= weights[k].to(COMPUTE_DTYPE)[None, :]
        gx_sums += g * x
        g_sums += g
    gx_mean = tl.sum(gx_sums, axis=1)[:, None] * rstd / n_cols
    g_mean = tl.zeros((rows.shape[0], 1), COMPUTE_DTYPE)
    if mean_ptr is not None:
        g_mean = tl.sum(g_sums, axis=1)[:, None] / n_cols
    new_dw = ()
    new_db = ()
    for k in tl.static_range(N_BLOCKS):
        x_hat = (xs[k].to(COMPUTE_DTYPE) - mean) * rstd
        dy = dys[k].to(COMPUTE_DTYPE)
        g = dy
        if len(weights) > 0:
            g *= weights[k].to(COMPUTE_DTYPE)[None, :]
        dx = (g - g_mean - x_hat * gx_mean) * rstd
        cols = k * BLOCK_N + lanes
        store_vectors(dx_row_ptrs, dx, row_mask, cols, begin, end, VECTOR, (ALIGNED or k > 0) and k < N_FULL, ALIGNED)
        new_dw += (dw[k] + dy * x_hat,)
        new_db += (db[k] + dy,)
    return new_dw, new_db


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm_bwd_blocks_kernel(
    dy_ptr,  # (n_rows, n_cols), 16-byte aligned
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    weight_ptr,  # (n_cols,) or None
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    dx_ptr,  # (n_rows, n_cols); its rows, and those of dy, begin where in a vector those of x do
    dw_partial_ptr,  # (n_programs, n_cols) or None
    db_partial_ptr,  # (n_programs, n_cols) or None
    n_rows,
    n_cols,
    dy_row_stride,
    x_row_stride,
    VECTOR: tl.constexpr,  # numbers in 16 bytes; n_programs * n_cols is a multiple of it
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    N_BLOCKS: tl.constexpr,  # of columns
    N_FULL: tl.constexpr,  # of these, those that every row fills, but for what the first lacks ahead of it
    ALIGNED: tl.constexpr,  # all rows begin with a vector
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Program i owns rows i, i + n_programs, ..., BLOCK_M of them at a time, and row i of the partial sums.

    The same sums as in `_layer_norm_bwd_kernel`, over blocks of columns: one block would have to be the next power of
    two, and up to half of its registers would hold nothing.
    """
    COMPUTE_DTYPE: tl.constexpr = rstd_ptr.dtype.element_ty
    lanes = tl.arange(0, BLOCK_N)
    program = tl.program_id(0).to(tl.int64)
    n_programs = tl.num_programs(0)
    begin = row_begin(program, x_row_stride, VECTOR, ALIGNED)
    end = begin + n_cols
    weights = ()
    dw = ()
    db = ()
    for k in tl.static_range(N_BLOCKS):
        if weight_ptr is not None:
            weights += (_load_shared(weight_ptr, k * BLOCK_N + lanes, begin, end, VECTOR, ALIGNED),)
        dw += (tl.zeros((BLOCK_M, BLOCK_N), COMPUTE_DTYPE),)
        db += (tl.zeros((BLOCK_M, BLOCK_N), COMPUTE_DTYPE),)
    tile = tl.arange(0, BLOCK_M).to(tl.int64) * n_programs
    last = n_rows if ALIGNED else n_rows - 1
    for start in tl.range(program, last, n_programs * BLOCK_M, num_stages=NUM_STAGES):
        dw, db = _backpropagate_rows(
            dy_ptr, x_ptr, weights, mean_ptr, rstd_ptr, dx_ptr, dw, db, start + tile, last, n_cols, dy_row_stride,
            x_row_stride, begin, end, VECTOR, BLOCK_N, N_BLOCKS, N_FULL, ALIGNED, False,
        )  # fmt: skip
    if not ALIGNED:
        if last % n_programs == program:
            dw, db = _backpropagate_rows(
                dy_ptr, x_ptr, weights, mean_ptr, rstd_ptr, dx_ptr, dw, db, last + tile, n_rows, n_cols,
                dy_row_stride, x_row_stride, begin, end, VECTOR, BLOCK_N, N_BLOCKS, N_FULL, ALIGNED, True,
            )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    first = program * n_cols - begin
    for k in tl.static_range(N_BLOCKS):
        cols = k * BLOCK_N + lanes
        mask = (cols >= begin) & (cols < end)
        if dw_partial_ptr is not None:
            tl.store(dw_partial_ptr + first + cols, tl.sum(dw[k], axis=0), mask=mask)
        if db_partial_ptr is not None:
            tl.store(db_partial_ptr + first + cols, tl.sum(db[k], axis=0), mask=mask)


@triton.jit
def _layer_norm_bwd_row_means_kernel(
    dy_ptr,  # (n_rows, n_cols)
    x_ptr,  # (n_rows, n_cols)
    weight_ptr,  # (n_cols,) or None
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    row_means_ptr,  # (2, n_rows)
    n_rows,
    n_cols,
    dy_row_stride,
    dy_col_stride,
    x_row_stride,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,  # n_cols and strides are multiples of it
):
    """Program i owns row i: mean(g * x_hat) and mean(g) of a row too long for one block, with g = dy * weight."""
    COMPUTE_DTYPE: tl.constexpr = rstd_ptr.dtype.element_ty
    n_cols, x_row_stride, dy_row_stride = [n // ALIGN * ALIGN for n in (n_cols, x_row_stride, dy_row_stride)]
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    gx_sum = tl.zeros((BLOCK_N,), COMPUTE_DTYPE)
    g_sum = tl.zeros((BLOCK_N,), COMPUTE_DTYPE)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < n_cols
        x_hat = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(COMPUTE_DTYPE)
        if mean_ptr is not None:
            x_hat -= mean
        g = tl.load(dy_ptr + row * dy_row_stride + cols * dy_col_stride, mask=mask, other=0.0).to(COMPUTE_DTYPE)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(COMPUTE_DTYPE)
        gx_sum += g * x_hat
        g_sum += g
    tl.store(row_means_ptr + row, tl.sum(gx_sum, axis=0) * rstd / n_cols)
    tl.store(row_means_ptr + n_rows + row, tl.sum(g_sum, axis=0) / n_cols)


@triton.jit(do_not_specialize=["n_partials"])
def _layer_norm_bwd_dwdb_kernel(
    dw_partial_ptr,  # (n_partials, n_cols) or None
    db_partial_ptr,  # (n_partials, n_cols) or None
    dw_ptr,  # (n_cols,) or None
    db_ptr,  # (n_cols,) or None
    n_partials,
    n_cols,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Program j owns columns j * BLOCK_N to (j + 1) * BLOCK_N: the sum of all partial rows, in one fixed order."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_P, BLOCK_N), (db_partial_ptr if dw_partial_ptr is None else dw_partial_ptr).dtype.element_ty)
    db = dw
    if PDL:
        gdc_wait()
    for start in range(0, n_partials, BLOCK_P):
        partials = start + tl.arange(0, BLOCK_P).to(tl.int64)
        offsets = partials[:, None] * n_cols + cols[None, :]
        mask = (partials < n_partials)[:, None] & (cols < n_cols)[None, :]
        if dw_ptr is not None:
            dw += tl.load(dw_partial_ptr + offsets, mask=mask, other=0.0)
        if db_ptr is not None:
            db += tl.load(db_partial_ptr + offsets, mask=mask, other=0.0)
    if dw_ptr is not None:
        tl.store(dw_ptr + cols, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < n_cols)
    if db_ptr is not None:
        tl.store(db_ptr + cols, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty), mask=cols < n_cols)


# --- launchers --------------------------------------------------------------------------------------------------------


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fwd_tile(x: torch.Tensor, n_rows: int, n_cols: int, vectorized: bool) -> tuple[int, int, int, int]:
    """(rows, columns of a block, blocks, warps) of a program for short rows.

    Measured on an H100, but float64 and three blocks on an H200.
    """
    block_n = next_power_of_2(n_cols)
    if x.dtype == torch.float64:
        return 2048 // block_n, block_n, 1, 4
    if vectorized and block_n >= 64 and n_cols <= block_n // 4 * 3:
        # Three quarters of the block, and a thread has two vectors of each of them.
        block_n //= 4
        return 64 * 2 * 16 // x.element_size() // block_n, block_n, 3, 2
    n_numbers = n_rows * block_n
    if not vectorized:
        # Numbers that are loaded one by one: a warp has few of them to wait for, or of long rows a thread has.
        if block_n <= 256:
            return 512 // block_n, block_n, 1, 4 if block_n <= 64 and n_numbers < 2**19 else 1
        return (1, block_n, 1, block_n // 256) if n_numbers <= 2**20 else (2048 // block_n, block_n, 1, 4)
    wide = x.dtype == torch.float32
    if n_numbers <= 2**20 or (n_numbers < 2**22 and not wide):
        # Few programs, which are the sooner done the smaller they are.
        return 1024 // block_n, block_n, 1, 2 if block_n <= 128 and not wide else 4
    tile, num_warps = (1024, 2) if block_n <= 128 else (2048, 2) if block_n <= 512 or wide else (4096, 4)
    return tile // block_n, block_n, 1, num_warps


def _fwd_block(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, n_rows: int, n_cols: int, vectorized: bool
) -> tuple[int, int, bool]:
    """(columns of a block, warps, whether weight and bias are loaded ahead) for a row in registers.

    Measured on an H100, rows of more than 10240 numbers on an H200, too, and on that alone float64, many 16-bit
    rows with a weight and a bias of 32 bits, and those of which it cannot load four numbers at a time.
    """
    n_processors = num_multiprocessors(x.device)
    many_rows = n_rows > 4 * n_processors
    row_bytes = n_cols * x.element_size()
    # Many rows that ask for more than two other numbers of their own width with each.
    wide = many_rows and x.element_size() == 2 and sum(t.element_size() for t in (weight, bias) if t is not None) > 4
    if x.dtype == torch.float64:
        return (512, 2, False) if n_cols < 2048 else (1024, 8, False) if n_cols <= 12288 else (2048, 16, False)
    if not vectorized:
        if n_cols <= 5120:
            return 512, 4, True
        return (1024, 8, n_rows <= 2 * n_processors) if n_cols <= 12288 else (2048, 16, False)
    if n_cols > 24576:
        # AMD's warps have 64 threads, and a program no more than 1024.
        return 8192, 32 if cuda_arch(x.device) else 16, False
    if n_cols <= (8192 if wide else 5120) and row_bytes <= 16 * 1024:
        block_n, num_warps = (512, 2) if n_cols < 2048 else (1024, 4)
    elif n_cols <= 10240 or (12288 < n_cols <= 14848 and many_rows):
        block_n, num_warps = 2048, 8
    else:
        block_n, num_warps = 4096, 16 if n_rows <= 2 * n_processors and row_bytes <= 64 * 1024 else 8
    # What is loaded ahead takes registers, and so the room of other programs. Short rows leave enough of both; for
    # longer ones it pays if all programs run at once, and for the longest if each has a multiprocessor of its own.
    if n_rows <= 16 // num_warps * n_processors:
        ahead = row_bytes <= (64 if n_rows <= n_processors else 32) * 1024
    else:
        ahead = x.element_size() == 2 and n_cols <= (2048 if wide else 6144)
    return block_n, num_warps, ahead


def _bwd_blocks(x: torch.Tensor, n_cols: int, vectorized: bool) -> tuple[int, int, int, int, int]:
    """(rows, columns, warps, programs per multiprocessor, stages) of a program in the backward pass."""
    tile = _BWD_TILE // 4 if x.dtype == torch.float64 else _BWD_TILE
    block_n = next_power_of_2(n_cols)
    if vectorized and block_n == 2 * tile:
        # Three stages take 128 KiB of shared memory in float32, and a program on these GPUs has 99.
        return 1, block_n, 16, 1, 2 if cuda_arch(x.device) in (86, 89, 120, 121) else 3
    block_n = min(block_n, tile)
    if x.dtype == torch.float64:
        return tile // block_n, block_n, 8, 2, 3
    if not vectorized:
        # 16-bit numbers that are loaded one by one cannot be loaded ahead of time. More and smaller programs, which
        # wait at the same time, are up to three times as fast as stages, and faster for float32, too: on an H200.
        if block_n <= 32:
            return 2048 // block_n, block_n, 4, 2, 1
        block_m = max(1, tile // (4 if block_n <= 128 else 2) // block_n)
        num_warps, programs = (2, 4) if block_n <= 1024 else (4, 3 if block_n <= 2048 else 2)
        return block_m, block_n, num_warps, programs, 1
    if block_n <= 512:
        # Four small programs on a multiprocessor: up to a quarter faster than two large ones, on an H100.
        return 1024 // block_n, block_n, 2, 4, 3
    narrow = x.element_size() == 2
    return tile // block_n, block_n, 4 if narrow else 8, 2, 4 if narrow and block_n == 1024 else 3


class _InBlocks(NamedTuple):
    """How a kernel is launched that keeps rows in registers and moves them in vectors of 16 bytes."""

    vector: int  # numbers in 16 bytes
    block_m: int
    block_n: int
    n_blocks: int
    num_warps: int
    stages: int
    programs_per_sm: int
    options: dict[str, int]

    def max_programs(self, x: torch.Tensor) -> int:
        """How many run at a time, so that rows that far apart begin at the same place in a vector."""
        period = self.vector // math.gcd(x.shape[1], self.vector)
        return max(1, self.programs_per_sm * num_multiprocessors(x.device) // period) * period

    def n_programs(self, x: torch.Tensor) -> int:
        """How many of them share the rows of x."""
        period = self.vector // math.gcd(x.shape[1], self.vector)
        return min(self.max_programs(x), cdiv(x.shape[0], self.block_m * period) * period)


def _in_blocks(n_cols: int, forward: bool, *tensors: torch.Tensor) -> _InBlocks | None:
    """What suits rows of these tensors: measured on an H200, and on an H100 from where on it pays forward.

    None where other kernels must take them, or are as fast.

    A row has as few warps as leave each thread at most five vectors of it, for which the registers suffice: warps that
    share a row wait for each other.
    """
    vector = 16 // min(x.element_size() for x in tensors)
    if vector == 2 or not rows_begin_alike(vector, n_cols, *tensors):
        return None
    aligned = n_cols % vector == 0
    if forward:
        # Fewer numbers, of whatever rows, are faster one by one, and so are those of 32 bits. Others are as fast four
        # at a time, and in longer rows two at a time.
        pays = vector == 8 and n_cols % (4 if n_cols <= 1024 else 2) != 0 and tensors[0].numel() >= _MIN_UNALIGNED
        shortest, longest = 257, 8192 - vector if pays else 0
    else:
        # Aligned rows that are short also fit into one block. That is faster up to 512 columns of 32 bits; of 16 bits
        # up to 72, and from 257 to 512 where rows are few.
        few = n_cols > 256 and tensors[0].numel() < 2**22
        shortest, longest = 32 if not aligned else 513 if vector == 4 or few else 80, 10240
        if vector == 8 and not aligned and n_cols % 4 == 0 and 1024 < n_cols <= _BWD_TILE:
            return None  # here they are faster four at a time
    if not shortest <= n_cols <= longest:
        return None
    # The least that a row takes is half of a warp forward, and backward a quarter, or an eighth for three blocks.
    least = 0.5 if forward else 0.125 if aligned and n_cols <= 96 else 0.25
    for warps_per_row in (w for w in (0.125, 0.25, 0.5, 1, 2, 4, 8) if w >= least):
        block_n = int(32 * warps_per_row) * vector
        n_blocks = cdiv(n_cols if aligned else n_cols + vector - 1, block_n)
        if n_blocks <= _MAX_BLOCKS:
            break
    else:
        return None
    options = {}
    if forward:
        # As many warps at a time as the registers suffice for.
        num_warps = max(4 if n_blocks == _MAX_BLOCKS else 2, warps_per_row)
        n_warps, stages = (8, 4) if n_blocks == _MAX_BLOCKS else (12, 3)
        if warps_per_row == 8:
            n_warps = 16 if cuda_arch(tensors[0].device) else 8
            options = {"maxnreg": 128} if n_warps == 16 else {}
    else:
        num_warps = max(1, warps_per_row)
        n_warps, stages = 8, 4 if n_blocks <= 3 and warps_per_row > 1 else 3
        if warps_per_row in (1, 2) or (aligned and warps_per_row == 4):
            # Fewer programs leave fewer partial rows to add up.
            n_warps, stages = 4, 4 if warps_per_row < 4 else 5
    block_m = int(num_warps / warps_per_row)
    return _InBlocks(vector, block_m, block_n, n_blocks, num_warps, stages, n_warps // num_warps, options)


def _for_hopper(direction: str, device: torch.device):
    """The kernels for Hopper, "forward" or "backward", or None where they cannot run."""
    return hopper.load(f"layer_norm_{direction}") if is_hopper(device) else None


def _rows(x: torch.Tensor, n_cols: int, col_strides: tuple[int, ...] = (1,)) -> torch.Tensor:
    """x as a matrix of n_cols columns: a view wherever its strides allow one, otherwise a copy."""
    rows = x.reshape(-1, n_cols)
    return rows if rows.stride(1) in col_strides or n_cols == 1 else rows.contiguous()


def _empty_outputs(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n_cols: int,
    eps: float,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_rows = x.numel() // n_cols if n_cols else 0
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    mean = scratch((n_rows if subtract_mean else 0,), _compute_dtype(x), x.device)
    rstd = scratch((n_rows,), _compute_dtype(x), x.device)
    return y, mean, rstd


def _vmap_fwd(info, in_dims, x, weight, bias, *options):
    if any(d is not None for d in in_dims[1:3]):
        return one_by_one(_layer_norm_fwd, info, in_dims, x, weight, bias, *options)
    y, *stats = _layer_norm_fwd(x.movedim(in_dims[0], 0), weight, bias, *options)
    return (y, *(t.reshape(info.batch_size, t.numel() // max(1, info.batch_size)) for t in stats)), 0


@operator(fake=_empty_outputs, vmap=_vmap_fwd)
def _layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n_cols: int,
    eps: float,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns y, and the mean (empty for RMS norm) and rstd of each row."""
    check_length("layer_norm" if subtract_mean else "rms_norm", "the product of normalized_shape", n_cols)
    y, mean, rstd = _empty_outputs(x, weight, bias, n_cols, eps, subtract_mean, out_dtype)
    n_rows = rstd.numel()
    if n_rows == 0:
        return y, mean, rstd
    rows = _rows(x, n_cols)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    arguments = rows, weight, bias, y, mean if subtract_mean else None, rstd
    vectorized, align = alignment((rows,), n_cols, rows.stride(0))
    if plan := _in_blocks(n_cols, True, rows):
        launch(
            _layer_norm_fwd_unaligned_kernel, (plan.n_programs(rows),), *arguments,
            n_rows, n_cols, rows.stride(0), eps,
            VECTOR=plan.vector, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, N_BLOCKS=plan.n_blocks,
            N_FULL=n_cols // plan.block_n, NUM_STAGES=plan.stages, num_warps=plan.num_warps, **plan.options,
        )  # fmt: skip
    elif n_cols <= _ONE_BLOCK_COLS:
        block_m, block_n, n_blocks, num_warps = _fwd_tile(x, n_rows, n_cols, vectorized)
        kernel, in_blocks = _layer_norm_fwd_kernel, {}
        if n_blocks > 1:
            kernel, in_blocks = _layer_norm_fwd_blocks_kernel, {"N_BLOCKS": n_blocks, "AHEAD": True}
        launch(
            kernel, (cdiv(n_rows, block_m),), *arguments, n_rows, n_cols, rows.stride(0), eps,
            BLOCK_M=block_m, BLOCK_N=block_n, **in_blocks, ALIGN=align, num_warps=num_warps,
        )  # fmt: skip
    elif (kernels := _for_hopper("forward", x.device)) and (plan := kernels.plan_forward(rows, weight, bias)):
        kernels.forward(*arguments, eps, plan)
    elif n_cols * x.element_size() <= _FWD_MAX_BYTES and (vectorized or n_cols <= _FWD_MAX_COLS):
        block_n, num_warps, ahead = _fwd_block(x, weight, bias, n_rows, n_cols, vectorized)
        launch(
            _layer_norm_fwd_blocks_kernel, (n_rows,), *arguments, n_rows, n_cols, rows.stride(0), eps,
            BLOCK_M=1, BLOCK_N=block_n, N_BLOCKS=cdiv(n_cols, block_n), AHEAD=ahead, ALIGN=align, num_warps=num_warps,
        )  # fmt: skip
    else:
        block_n = (1 if n_cols <= 32768 else 2) * _FWD_LONG_TILE * 2 // x.element_size()
        launch(
            _layer_norm_fwd_long_kernel, (n_rows,), *arguments, n_cols, rows.stride(0), eps,
            BLOCK_N=block_n, ALIGN=align, num_warps=8 if n_cols <= 24576 else 16,
        )  # fmt: skip
    return y, mean, rstd


def _empty_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    n_cols: int,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.empty(n_cols if dw_dtype else 0, dtype=dw_dtype, device=x.device)
    db = torch.empty(n_cols if db_dtype else 0, dtype=db_dtype, device=x.device)
    return dx, dw, db


def _partials(
    n_programs: int, n_cols: int, rstd: torch.Tensor, dw_dtype: torch.dtype | None, db_dtype: torch.dtype | None
) -> list[torch.Tensor | None]:
    """A row for each program to add up its share of dw in, and one for db; None for what is not asked for."""
    return [scratch((n_programs, n_cols), rstd.dtype, rstd.device) if dtype else None for dtype in (dw_dtype, db_dtype)]


def _sum_partials(
    dw_partial: torch.Tensor | None,
    db_partial: torch.Tensor | None,
    dw: torch.Tensor,
    db: torch.Tensor,
    max_programs: int,  # the most that there are on this GPU, so that all numbers of rows share a compilation
) -> None:
    partial = db_partial if dw_partial is None else dw_partial
    if partial is None:
        return
    n_partials, n_cols = partial.shape
    block_p = min(_DWDB_ROWS, next_power_of_2(max_programs))
    # Numbers that are loaded one by one take more registers.
    block_n = max(8, _DWDB_TILE // (1 if n_cols % 16 == 0 else 2) // block_p)
    launch(
        _layer_norm_bwd_dwdb_kernel, (cdiv(n_cols, block_n),),
        dw_partial, db_partial, None if dw_partial is None else dw, None if db_partial is None else db,
        n_partials, n_cols, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=8,
        **pdl(partial.device),
    )  # fmt: skip


@operator(fake=_empty_gradients)
def _layer_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    n_cols: int,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx, and dw and db as rows of n_cols elements (empty where the dtype is None: not asked for)."""
    if n_cols >= 2**31:
        raise ValueError(f"layer_norm or rms_norm: rows of 2**31 numbers or more have no gradient, got {n_cols}")
    dx, dw, db = _empty_gradients(dy, x, weight, mean, rstd, n_cols, dw_dtype, db_dtype)
    n_rows = rstd.numel()
    if n_rows == 0:
        return dx, dw.zero_(), db.zero_()
    x, dy = _rows(x, n_cols), _rows(dy, n_cols, col_strides=(0, 1))
    weight = None if weight is None else weight.contiguous()
    # A vmap may bring them expanded.
    mean, rstd = mean.contiguous() if mean.numel() else None, rstd.contiguous()
    shapes_and_strides = (n_rows, n_cols, dy.stride(0), dy.stride(1), x.stride(0))

    vectorized, align = alignment((dy, x), n_cols, dy.stride(0), x.stride(0))
    block_m, block_n, num_warps, programs_per_sm, stages = _bwd_blocks(x, n_cols, vectorized)
    # One program for a few short rows has dw and db for itself: a second launch takes longer than it does.
    in_one = n_cols <= min(block_n, _ONE_BLOCK_COLS) and n_rows <= (4 if stages > 1 else 2) * block_m

    if not in_one and (plan := _in_blocks(n_cols, False, x, dy)):
        n_programs = plan.n_programs(x)
        dw_partial, db_partial = _partials(n_programs, n_cols, rstd, dw_dtype, db_dtype)
        launch(
            _layer_norm_bwd_blocks_kernel, (n_programs,),
            dy, x, weight, mean, rstd, dx, dw_partial, db_partial, n_rows, n_cols, dy.stride(0), x.stride(0),
            VECTOR=plan.vector, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, N_BLOCKS=plan.n_blocks,
            N_FULL=n_cols // plan.block_n, ALIGNED=n_cols % plan.vector == 0, NUM_STAGES=plan.stages,
            num_warps=plan.num_warps, PDL="PDL" in pdl(x.device),
        )  # fmt: skip
        _sum_partials(dw_partial, db_partial, dw, db, plan.max_programs(x))
        return dx, dw, db

    if (kernels := _for_hopper("backward", x.device)) and (plan := kernels.plan_backward(dy, x, weight)):
        n_groups = min(n_rows, plan.max_groups)
        dw_partial, db_partial = _partials(n_groups, n_cols, rstd, dw_dtype, db_dtype)
        kernels.backward(dy, x, weight, mean, rstd, dx, dw_partial, db_partial, n_groups, plan)
        _sum_partials(dw_partial, db_partial, dw, db, plan.max_groups)
        return dx, dw, db

    n_col_blocks = cdiv(n_cols, block_n)
    row_means = None
    if n_col_blocks > 1:
        row_means = scratch((2, n_rows), rstd.dtype, x.device)
        launch(
            _layer_norm_bwd_row_means_kernel, (n_rows,),
            dy, x, weight, mean, rstd, row_means, *shapes_and_strides,
            BLOCK_N=block_n // 2, ALIGN=align, num_warps=8,
        )  # fmt: skip
    # As many programs as fit on the GPU at once, and no more: each of them adds a partial row.
    max_programs = programs_per_sm * num_multiprocessors(x.device)
    n_programs = 1 if in_one else min(max(1, max_programs // n_col_blocks), cdiv(n_rows, block_m))
    if in_one:
        dw_partial, db_partial = dw if dw_dtype else None, db if db_dtype else None
    else:
        dw_partial, db_partial = _partials(n_programs, n_cols, rstd, dw_dtype, db_dtype)
    launch(
        _layer_norm_bwd_kernel, (n_col_blocks, n_programs),
        dy, x, weight, mean, rstd, row_means, dx, dw_partial, db_partial, *shapes_and_strides,
        BLOCK_M=block_m, BLOCK_N=block_n, ALIGN=align, NUM_STAGES=stages, num_warps=num_warps,
        PDL="PDL" in pdl(x.device),
    )  # fmt: skip
    if not in_one:
        _sum_partials(dw_partial, db_partial, dw, db, max_programs)
    return dx, dw, db


# --- autograd ---------------------------------------------------------------------------------------------------------


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def constants(x, weight, bias, n_cols, eps, subtract_mean, out_dtype):
        bias_shape, bias_dtype = (None, None) if bias is None else (bias.shape, bias.dtype)
        return {"n_cols": n_cols, "eps": eps, "bias_shape": bias_shape, "bias_dtype": bias_dtype}

    @staticmethod
    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2], *output[1:])

    @staticmethod
    def backward(ctx, dy, *_):
        x, weight, mean, rstd = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dw_dtype, db_dtype = weight.dtype if needs_dw else None, ctx.bias_dtype if needs_db else None
        if torch.is_grad_enabled() and not is_transformed():
            refuse_batch_of_gradients("layer_norm or rms_norm", dy)
            grads = _LayerNormBackward.apply(dy, x, weight, mean, rstd, ctx.n_cols, dw_dtype, db_dtype, ctx.eps)
        else:
            grads = _layer_norm_bwd(dy, x, weight, mean, rstd, ctx.n_cols, dw_dtype, db_dtype)
        dx, dw, db = grads
        return (
            dx if needs_dx else None,
            _as_shape(dw, weight.shape) if needs_dw else None,
            _as_shape(db, ctx.bias_shape) if needs_db else None,
            None, None, None, None,
        )  # fmt: skip


def _as_shape(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    # A view takes the host longer than an allocation does.
    return x if len(shape) == 1 else x.view(shape)


differentiable(_layer_norm_fwd, _LayerNorm, first_only=True)


class _LayerNormBackward(torch.autograd.Function):
    """The backward pass for `create_graph=True`: second derivatives go through its formula in torch operations."""

    @staticmethod
    def forward(ctx, dy, x, weight, mean, rstd, n_cols, dw_dtype, db_dtype, eps):
        ctx.save_for_backward(dy, x, weight)
        ctx.n_cols, ctx.eps, ctx.subtract_mean = n_cols, eps, mean.numel() > 0
        ctx.wanted = (True, dw_dtype is not None, db_dtype is not None)
        return _layer_norm_bwd(dy, x, weight, mean, rstd, n_cols, dw_dtype, db_dtype)

    @staticmethod
    def backward(ctx, *grads):
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, which end where they begin: dy may itself have been computed from x.
            inputs = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
            outputs = _gradients_in_torch(*inputs, ctx.n_cols, ctx.eps, ctx.subtract_mean)
            pairs = [
                (out.to(g.dtype), g)
                for out, g, wanted in zip(outputs, grads, ctx.wanted, strict=True)
                if wanted and out.requires_grad
            ]
        needed = [i for i in range(3) if ctx.needs_input_grad[i]]
        results = [None] * 9
        if not pairs:
            return tuple(results)
        outputs, grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            outputs, [inputs[i] for i in needed], grads, create_graph=create_graph, allow_unused=True
        )
        for i, grad in zip(needed, found, strict=True):
            results[i] = grad
        return tuple(results)


def _gradients_in_torch(dy, x, weight, n_cols, eps, subtract_mean):
    """What `_layer_norm_bwd_kernel` computes, from x alone and differentiable."""
    compute_dtype = _compute_dtype(x)
    shape = x.numel() // max(1, n_cols), n_cols
    rows, dy = x.reshape(shape).to(compute_dtype), dy.reshape(shape).to(compute_dtype)
    if subtract_mean:
        rows = rows - rows.mean(1, keepdim=True)
    rstd = (rows.square().mean(1, keepdim=True) + eps).rsqrt()
    x_hat = rows * rstd
    g = dy if weight is None else dy * weight.reshape(-1).to(compute_dtype)
    dx = g - x_hat * (g * x_hat).mean(1, keepdim=True)
    if subtract_mean:
        dx = dx - g.mean(1, keepdim=True)
    return (dx * rstd).view(x.shape), (dy * x_hat).sum(0), dy.sum(0)


# --- public functions -------------------------------------------------------------------------------------------------


def _is_no_size(size):
    if isinstance(size, torch.Tensor | np.ndarray):
        # One number alone is an int to torch, if it is at hand.
        return size.ndim > 0 or "int" not in str(size.dtype) or getattr(size, "is_meta", False)
    return isinstance(size, bool | np.bool_) or not (isinstance(size, INTS) or hasattr(type(size), "__index__"))


def _normalize(op, x, normalized_shape, weight, bias, eps):
    check_tensor(op, "x", x)
    normalized_shape = number(normalized_shape)
    sizes = normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,)
    if isinstance(sizes, str | bytes | bytearray) or any(map(_is_no_size, sizes)):
        arrived = got(normalized_shape)
        if isinstance(normalized_shape, torch.Tensor):
            arrived += "; weight comes after it"
        raise TypeError(f"{op}: normalized_shape must be an int or a sequence of ints, got {arrived}")
    normalized_shape = tuple(size if isinstance(size, INTS) else index(size) for size in sizes)
    if not normalized_shape or tuple(x.shape[-len(normalized_shape) :]) != normalized_shape:
        shapes = f"x of shape {tuple(x.shape)}, got {got(normalized_shape)}"
        raise ValueError(f"{op}: normalized_shape must be the sizes of the last dimensions (at least one) of {shapes}")
    # torch's autocast runs layer norm in float32, and RMS norm since 2.12: here x is read as it is, and only the output
    # is float32.
    half = x.dtype in (torch.float16, torch.bfloat16)
    autocast = x.device.type in ("cuda", "xpu") and torch.is_autocast_enabled(x.device.type)
    widens = half and autocast and (op == "layer_norm" or torch.__version__ >= "2.12")
    out_dtype = torch.float32 if widens else x.dtype
    if op == "rms_norm" or autocast:
        affine_dtypes = FLOATS
    else:
        affine_dtypes = (x.dtype, torch.float32) if half else (x.dtype,)
    for name, param in (("weight", weight), ("bias", bias)):
        if param is None:
            continue
        if isinstance(param, torch.Tensor) and param.dtype not in affine_dtypes:
            *allowed, of_x, given = (str(dtype)[6:] for dtype in (*affine_dtypes, x.dtype, param.dtype))
            raise TypeError(f"{op}: {name} must have the dtype {' or '.join(allowed)} where x has {of_x}, got {given}")
        check_tensor(op, name, param)
        if tuple(param.shape) != normalized_shape:
            raise ValueError(f"{op}: {name} must have shape {normalized_shape}, got {tuple(param.shape)}")
    check_same_device(op, x=x, weight=weight, bias=bias)
    if eps is None and op == "rms_norm":
        eps = torch.finfo(_compute_dtype(x)).eps
    eps = number(eps)
    if isinstance(eps, bool) or not isinstance(eps, NUMBERS):
        hint = "; RMS norm has no bias" if op == "rms_norm" and isinstance(eps, torch.Tensor) and eps.ndim > 0 else ""
        raise TypeError(f"{op}: eps must be a Python number, got {type(eps).__name__}{hint}")
    # NaN alone differs from itself; torch.compile cannot trace math.isnan of a number that it treats as dynamic.
    if eps != eps:
        raise ValueError(f"{op}: eps must be a number, got {eps}")
    if isinstance(eps, int) and abs(eps) > sys.float_info.max:
        raise ValueError(f"{op}: eps must fit into float64, got {got(eps)}")
    eps, subtract_mean = float(eps), op == "layer_norm"
    arguments = x, weight, bias, math.prod(x.shape[-len(normalized_shape) :]), eps, subtract_mean, out_dtype
    return apply(_LayerNorm, *arguments) if needs_autograd(x, weight, bias) else _layer_norm_fwd(*arguments)[0]


@replayed
def layer_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    r"""Normalize over the last dimensions to mean 0 and variance 1, as :func:`torch.nn.functional.layer_norm` does.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot \text{weight} + \text{bias}

    Args:
        x: any shape with at least one dimension; float16, bfloat16, float32 or float64.
        normalized_shape: the sizes of the last dimensions, over which mean and variance are taken together.
        weight: a factor for each normalized position, of shape `normalized_shape`; in x's dtype, or float32 when x has
            16 bits, and under GPU autocast in any dtype that x may have. None means 1.
        bias: what is added at each normalized position, like `weight`. None means 0.
        eps: keeps the square root away from 0.

    Returns:
        A contiguous tensor of x's shape and dtype (float32 for 16-bit x under GPU autocast, as in torch).

    Raises:
        TypeError: an argument is no tensor or number, or a dtype is not supported.
        ValueError: shapes or devices do not match, eps is NaN or an int beyond float64, x lives where no kernel can
            run, or a row's length is within 2**14 below 2**31, where blocks are miscounted; and in the backward pass,
            rows have 2**31 numbers or more.
        NotImplementedError: forward-mode differentiation reaches an argument, a transform of ``torch.func``
            differentiates a second time, or ``create_graph=True`` meets a batch of gradients.

    Notes:
        The variance is the mean of squared distances from the mean, divided by n and not n - 1. Mean, variance and all
        sums are float32 (float64 for float64), and the squares are taken after the mean is subtracted, so a large mean
        costs no accuracy. Where these squares sum up to more than float32 holds, a row becomes 0 or NaN. The gradients
        are deterministic: the same inputs on the same GPU give the same bits. (How many rows there are may change the
        last bits of each.) Derivatives of the second order and beyond are supported by autograd, through torch
        operations, and not by the transforms of ``torch.func``.

        Rows of any length work (with a gradient below 2**31): up to 24576 elements (12288 in float64) stay in
        registers, and up to 96 KiB of a row that can be read four numbers at a time; longer ones are read twice. The
        gradients keep up to 10240 elements of 16 bits there, 5120 of float32 (8192 if that is a multiple of 16 bytes),
        and 2048 of float64. On Hopper, longer rows stay on the chip and are read once, up to 6 MiB of a row forward (or
        of the weight, where it is wider) and 3 MiB backward on an H200, and up to an eighth of that where a row's
        length is no multiple of 16 bytes and x has 16 MiB (backward 32 MiB); for this they must not be float64. But for
        these, all this is for x and an incoming gradient that are of one width and whose rows begin at multiples of 16
        bytes; the gradients of others keep up to 4096 elements (1024 in float64), and may be read number by number.

    Example:
        >>> import torch, triton_gallery
        >>> triton_gallery.layer_norm(torch.tensor([[1.0, 2.0, 3.0, 6.0]]), 4)
        tensor([[-1.0690, -0.5345,  0.0000,  1.6036]])

    References:
        Ba, Kiros and Hinton, `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.
    """
    return _normalize("layer_norm", x, normalized_shape, weight, bias, eps)


@replayed
def rms_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    r"""Divide by the root of the mean square over the last dimensions, as :func:`torch.nn.functional.rms_norm` does.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot \text{weight}

    Args:
        x: any shape with at least one dimension; float16, bfloat16, float32 or float64.
        normalized_shape: the sizes of the last dimensions, over which the mean square is taken.
        weight: a factor for each normalized position, of shape `normalized_shape`, in any dtype that x may have. None
            means 1.
        eps: keeps the square root away from 0. None means the machine epsilon of the dtype computed in, float32 or
            float64.

    Returns:
        A contiguous tensor of x's shape and dtype (float32 for 16-bit x under GPU autocast from torch 2.12 on, as in
        torch).

    Raises:
        TypeError: an argument is no tensor or number, or a dtype is not supported.
        ValueError: shapes or devices do not match, eps is NaN or an int beyond float64, x lives where no kernel can
            run, or a row's length is within 2**14 below 2**31, where blocks are miscounted; and in the backward pass,
            rows have 2**31 numbers or more.
        NotImplementedError: forward-mode differentiation reaches an argument, a transform of ``torch.func``
            differentiates a second time, or ``create_graph=True`` meets a batch of gradients.

    Notes:
        The kernels are those of :func:`layer_norm`, with the mean left in: float32 sums (float64 for float64), rows of
        any length (with a gradient below 2**31), deterministic gradients, higher derivatives by autograd.

    Example:
        >>> import torch, triton_gallery
        >>> triton_gallery.rms_norm(torch.tensor([[1.0, 2.0, 3.0, 6.0]]), 4)
        tensor([[0.2828, 0.5657, 0.8485, 1.6971]])

    References:
        Zhang and Sennrich, `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.
    """
    return _normalize("rms_norm", x, normalized_shape, weight, None, eps)
