"""Softmax of long rows, in Gluon: a row stays in shared memory between the two passes over it.

``tl`` decides by itself what lives in shared memory. Here the kernel decides: it copies a row there chunk by chunk, takes
maximum and sum as the chunks arrive, and writes the result chunk by chunk; as soon as a chunk is written, the copy of
the next row's chunk takes its place, so that memory is never idle.
"""

import torch

from .._launch import cdiv, launch, num_multiprocessors
from ._gluon import async_copy, async_copy_to_shared, gl, gluon

_SHARED_BYTES = 225 * 1024  # of the 227 KiB that the programs on a multiprocessor share; each is charged 1 KiB more
_MAX_PROGRAMS = 6  # per multiprocessor; more do not help


@gluon.jit
def _update(x, m, s):
    """Fold a chunk into each thread's running maximum m and its sum s of exp(x - m)."""
    new = gl.maximum(m, gl.max(gl.max(x, 2), 0))
    e = gl.exp(x - new[None, :, None])
    return new, s * gl.exp(m - new) + gl.sum(gl.sum(e, 2), 0)


@gluon.jit(do_not_specialize=["n_rows"])
def _softmax_resident_fwd_kernel(
    x_ptr,  # (n_rows, n_cols), rows 16-byte aligned
    out_ptr,  # (n_rows, n_cols), contiguous
    n_rows,
    n_cols,
    x_row_stride,
    N_CHUNKS: gl.constexpr,
    CHUNK_COLS: gl.constexpr,
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    EVEN: gl.constexpr,  # n_cols == N_CHUNKS * CHUNK_COLS
    IS_LOG: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program i owns rows i, i + num_programs, ...: out = exp(x - max(x)) / sum(exp(x - max(x)))."""
    # A chunk is (vectors per thread, threads, numbers per vector); each thread meets the numbers that it copied.
    THREADS: gl.constexpr = 32 * num_warps
    STEPS: gl.constexpr = CHUNK_COLS // (THREADS * VECTOR)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, VECTOR], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
    BY_STEP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    BY_THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    BY_NUMBER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    steps = gl.arange(0, STEPS, BY_STEP)[:, None, None]
    threads = gl.arange(0, THREADS, BY_THREAD)[None, :, None]
    cols = (steps * THREADS + threads) * VECTOR + gl.arange(0, VECTOR, BY_NUMBER)[None, None, :]
    # Whole vectors are inside the row or outside; a mask that says so keeps the copies 16 bytes wide.
    last_mask = ((N_CHUNKS - 1) * CHUNK_COLS + (steps * THREADS + threads) * VECTOR < n_cols).broadcast_to(cols.shape)

    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [N_CHUNKS, STEPS, THREADS, VECTOR], SHARED)
    row = gl.program_id(0).to(gl.int64)
    for c in gl.static_range(N_CHUNKS):
        _copy_chunk(ring.index(c), x_ptr + row * x_row_stride + c * CHUNK_COLS + cols, last_mask, EVEN or c < N_CHUNKS - 1)
    while row < n_rows:
        # The lowest finite number, not -inf: then no -inf in x can meet -inf in m, whose difference is NaN.
        m = gl.full([THREADS], -3.4028234663852886e38, gl.float32, BY_THREAD)
        s = gl.zeros([THREADS], gl.float32, BY_THREAD)
        for c in gl.static_range(N_CHUNKS):
            async_copy.wait_group(N_CHUNKS - 1 - c)
            m, s = _update(_load_chunk(ring.index(c), last_mask, EVEN or c < N_CHUNKS - 1, out_ptr, LAYOUT), m, s)
        row_max = gl.max(m, 0)
        row_sum = gl.sum(s * gl.exp(m - row_max), 0)
        next_row = row + gl.num_programs(0)
        # After the last row the copies repeat it: what they bring is not read.
        source = x_ptr + gl.minimum(next_row, n_rows - 1) * x_row_stride
        for c in gl.static_range(N_CHUNKS):
            x = _load_chunk(ring.index(c), last_mask, EVEN or c < N_CHUNKS - 1, out_ptr, LAYOUT) - row_max
            out = x - gl.log(row_sum) if IS_LOG else gl.exp(x) * (1 / row_sum)
            out_ptrs = out_ptr + row * n_cols + c * CHUNK_COLS + cols
            if EVEN or c < N_CHUNKS - 1:
                gl.store(out_ptrs, out.to(out_ptr.dtype.element_ty))
            else:
                gl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=last_mask)
            _copy_chunk(ring.index(c), source + c * CHUNK_COLS + cols, last_mask, EVEN or c < N_CHUNKS - 1)
        row = next_row
    async_copy.wait_group(0)
