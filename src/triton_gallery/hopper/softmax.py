"""Softmax of long rows, in Gluon: a row waits on the chip between the two passes over it.

``tl`` decides by itself what lives in shared memory. Here the kernel decides: it copies a row there chunk by chunk,
takes maximum and sum as the chunks arrive, and writes the result chunk by chunk; as soon as a chunk is written, the
copy of the next row's chunk takes its place, so that memory is never idle. What shared memory cannot hold of a row is
read a second time, from the L2 cache.
"""

import torch

from .._launch import cdiv, launch, num_multiprocessors
from ._gluon import async_copy, async_copy_to_shared, gl, gluon

# What the programs on one multiprocessor may hold in shared memory together; each is charged 1 KiB more.
_SHARED_BYTES = 216 * 1024
# More programs on a multiprocessor do not help.
_MAX_PROGRAMS = 6


@gluon.jit
def _widen(x, DTYPE: gl.constexpr):
    """As in torch, x takes the output's dtype before anything else; the arithmetic is float32."""
    return x.to(DTYPE).to(gl.float32)


@gluon.jit
def _update(x, m, s):
    """Fold a piece of the row into each thread's running maximum m and its sum s of exp(x - m)."""
    new = gl.maximum(m, gl.max(gl.max(x, 2), 0))
    e = gl.exp(x - new[None, :, None])
    return new, s * gl.exp(m - new) + gl.sum(gl.sum(e, 2), 0)


@gluon.jit
def _result(x, row_max, log2_sum, IS_LOG: gl.constexpr):
    """exp(x - row_max) / sum as one power of 2, or its natural logarithm."""
    LOG2_E: gl.constexpr = 1.4426950408889634
    if IS_LOG:
        return x - row_max - log2_sum * (1 / LOG2_E)
    else:
        return gl.exp2((x - row_max) * LOG2_E - log2_sum)


@gluon.jit
def _copy_chunk(chunk, ptrs, mask, MASKED: gl.constexpr):
    if MASKED:
        async_copy_to_shared(chunk, ptrs, mask=mask)
    else:
        async_copy_to_shared(chunk, ptrs)
    async_copy.commit_group()


@gluon.jit
def _store_ends(ptrs, out, vector_cols, numbers, begin, end, VECTOR: gl.constexpr, ALIGNED: gl.constexpr):
    """Store what lies between begin and end: whole vectors at once, and the rest number by number."""
    whole = (vector_cols >= begin) & (vector_cols + VECTOR <= end)
    gl.store(ptrs, out, mask=whole & (numbers >= 0))
    if not ALIGNED:
        cols = vector_cols + numbers
        gl.store(ptrs, out, mask=(cols >= begin) & (cols < end) & ~whole)


@gluon.jit(do_not_specialize=["n_rows", "n_cols", "x_row_stride"])
def _softmax_resident_fwd_kernel(
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    out_ptr,  # (n_rows, n_cols), contiguous
    n_rows,
    n_cols,
    x_row_stride,
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    CHUNK_STEPS: gl.constexpr,  # vectors per thread in a chunk
    N_CHUNKS: gl.constexpr,  # in shared memory
    TAIL_STEPS: gl.constexpr,  # vectors per thread in each piece behind the chunks, or 0 if there are none
    ALIGNED: gl.constexpr,  # every row begins and ends between two vectors
    IS_LOG: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program i owns rows i, i + num_programs, ...: out = exp(x - max(x)) / sum(exp(x - max(x)))."""
    # A piece of the row is (steps, threads, numbers of a vector): each thread meets what it has copied itself.
    THREADS: gl.constexpr = 32 * num_warps
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, VECTOR], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
    BY_STEP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    BY_THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    BY_NUMBER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    CHUNK: gl.constexpr = CHUNK_STEPS * THREADS * VECTOR
    # The first chunk can have a beginning to mask, and one of the last two the end.
    LAST: gl.constexpr = N_CHUNKS - 1 if ALIGNED else N_CHUNKS - 2
    OUT: gl.constexpr = out_ptr.dtype.element_ty
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [N_CHUNKS, CHUNK_STEPS, THREADS, VECTOR], SHARED)
    threads = gl.arange(0, THREADS, BY_THREAD)[None, :, None]
    numbers = gl.arange(0, VECTOR, BY_NUMBER)[None, None, :]
    # Where each vector begins, in a chunk and in a piece of the tail.
    vector_cols = (gl.arange(0, CHUNK_STEPS, BY_STEP)[:, None, None] * THREADS + threads) * VECTOR
    cols = vector_cols + numbers
    if TAIL_STEPS > 0:
        tail_vector_cols = (gl.arange(0, TAIL_STEPS, BY_STEP)[:, None, None] * THREADS + threads) * VECTOR
        tail_cols = tail_vector_cols + numbers

    row = gl.program_id(0).to(gl.int64)
    # A row is read from the vector in which it begins; its numbers are then those from `begin` to `end`.
    x_row_ptr = x_ptr + row * x_row_stride // VECTOR * VECTOR
    begin = 0 if ALIGNED else (row * x_row_stride % VECTOR).to(gl.int32)
    for c in gl.static_range(N_CHUNKS):
        # A vector has a part in the row or none: a mask that says so keeps the copies 16 bytes wide.
        mask = (vector_cols < begin + n_cols - c * CHUNK) & (numbers >= 0)
        _copy_chunk(ring.index(c), x_row_ptr + c * CHUNK + cols, mask, c >= LAST)
    while row < n_rows:
        end = begin + n_cols
        # The lowest finite number, not -inf: then no -inf in x can meet -inf in m, whose difference is NaN.
        m = gl.full([THREADS], -3.4028234663852886e38, gl.float32, BY_THREAD)
        s = gl.zeros([THREADS], gl.float32, BY_THREAD)
        if TAIL_STEPS > 0:
            # While the chunks are on their way.
            for first in range(N_CHUNKS * CHUNK, end, TAIL_STEPS * THREADS * VECTOR):
                tail_mask = (tail_vector_cols < end - first) & (numbers >= 0)
                tail_ptrs = x_row_ptr + first // VECTOR * VECTOR + tail_cols
                tail = gl.load(tail_ptrs, mask=tail_mask, other=-float("inf"), eviction_policy="evict_last")
                if not ALIGNED:
                    tail = gl.where(tail_cols < end - first, tail, -float("inf"))
                m, s = _update(_widen(tail, OUT), m, s)
        for c in gl.static_range(N_CHUNKS):
            async_copy.wait_group(N_CHUNKS - 1 - c)
            x = _widen(ring.index(c).load(LAYOUT), OUT)
            if c >= LAST or (c == 0 and not ALIGNED):
                x = gl.where((cols >= begin - c * CHUNK) & (cols < end - c * CHUNK), x, -float("inf"))
            m, s = _update(x, m, s)
        row_max = gl.max(m, 0)
        log2_sum = gl.log2(gl.sum(s * gl.exp(m - row_max), 0))

        out_row_ptr = out_ptr + row * n_cols // VECTOR * VECTOR
        this_row_ptr = x_row_ptr
        # After the last row the copies bring it again, and nobody reads them.
        row += gl.num_programs(0)
        next_row = gl.minimum(row, n_rows - 1)
        x_row_ptr = x_ptr + next_row * x_row_stride // VECTOR * VECTOR
        next_begin = 0 if ALIGNED else (next_row * x_row_stride % VECTOR).to(gl.int32)
        for c in gl.static_range(N_CHUNKS):
            out = _result(_widen(ring.index(c).load(LAYOUT), OUT), row_max, log2_sum, IS_LOG).to(OUT)
            out_ptrs = out_row_ptr + c * CHUNK + cols
            if c >= LAST or (c == 0 and not ALIGNED):
                _store_ends(out_ptrs, out, vector_cols, numbers, begin - c * CHUNK, end - c * CHUNK, VECTOR, ALIGNED)
            else:
                gl.store(out_ptrs, out)
            mask = (vector_cols < next_begin + n_cols - c * CHUNK) & (numbers >= 0)
            _copy_chunk(ring.index(c), x_row_ptr + c * CHUNK + cols, mask, c >= LAST)
        if TAIL_STEPS > 0:
            for first in range(N_CHUNKS * CHUNK, end, TAIL_STEPS * THREADS * VECTOR):
                tail_mask = (tail_vector_cols < end - first) & (numbers >= 0)
                tail_ptrs = this_row_ptr + first // VECTOR * VECTOR + tail_cols
                tail = gl.load(tail_ptrs, mask=tail_mask, other=-float("inf"), eviction_policy="evict_first")
                tail_out = _result(_widen(tail, OUT), row_max, log2_sum, IS_LOG).to(OUT)
                tail_out_ptrs = out_row_ptr + first // VECTOR * VECTOR + tail_cols
                _store_ends(tail_out_ptrs, tail_out, tail_vector_cols, numbers, 0, end - first, VECTOR, ALIGNED)
        begin = next_begin
    async_copy.wait_group(0)


def supports(x: torch.Tensor, n_cols: int, row_stride: int) -> bool:
    """Whether the kernel can take these rows, and they are long enough for it to pay.

    In rows that are not 16-byte aligned, input and output must begin at the same place between two multiples.
    """
    itemsize = x.element_size()
    # Below, tl's kernel keeps the row in registers, which has room for a 32-bit number and not only for half of one.
    at_least = {2: 16 * 1024, 4: 128 * 1024}.get(itemsize)
    return (
        at_least is not None
        and n_cols * itemsize > at_least
        and (row_stride - n_cols) * itemsize % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def forward(x: torch.Tensor, out: torch.Tensor, n_rows: int, n_cols: int, row_stride: int, is_log: bool) -> None:
    """Write the softmax of rows that `supports` accepts, or its logarithm, to out."""
    vector = 16 // x.element_size()
    aligned = n_cols % vector == 0
    # An unaligned row can begin at the end of a vector.
    row_bytes = (n_cols if aligned else n_cols + vector - 1) * x.element_size()
    tail_steps = 0
    # Chunks of 4 KiB; of 8 KiB where there would be many.
    if row_bytes <= 32 * 1024:
        num_warps, chunk_steps = 4, 2
    elif row_bytes <= _SHARED_BYTES:
        num_warps, chunk_steps = 8, 1 if row_bytes <= 128 * 1024 else 2
    else:
        num_warps, chunk_steps, tail_steps = 16, 1, 4
    chunk_bytes = num_warps * 32 * 16 * chunk_steps
    n_chunks = cdiv(min(row_bytes, _SHARED_BYTES), chunk_bytes)
    programs = num_multiprocessors(x.device) * min(_MAX_PROGRAMS, _SHARED_BYTES // (n_chunks * chunk_bytes))
    launch(
        _softmax_resident_fwd_kernel,
        (min(n_rows, programs),),
        x, out, n_rows, n_cols, row_stride,
        VECTOR=vector, CHUNK_STEPS=chunk_steps, N_CHUNKS=n_chunks, TAIL_STEPS=tail_steps,
        ALIGNED=aligned, IS_LOG=is_log, num_warps=num_warps,
    )  # fmt: skip
