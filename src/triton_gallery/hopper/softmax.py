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


@gluon.jit(do_not_specialize=["n_rows"])
def _softmax_resident_fwd_kernel(
    x_ptr,  # (n_rows, n_cols), rows 16-byte aligned
    out_ptr,  # (n_rows, n_cols), contiguous
    n_rows,
    n_vectors,  # n_cols in units of VECTOR, which tells the compiler that rows are 16-byte aligned
    x_row_vectors,  # x_row_stride likewise
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    CHUNK_STEPS: gl.constexpr,  # vectors per thread in a chunk
    N_CHUNKS: gl.constexpr,  # in shared memory
    TAIL_STEPS: gl.constexpr,  # vectors per thread in each piece behind the chunks, or 0 if there are none
    EVEN: gl.constexpr,  # the chunks have no room to spare
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
    OUT: gl.constexpr = out_ptr.dtype.element_ty
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [N_CHUNKS, CHUNK_STEPS, THREADS, VECTOR], SHARED)
    threads = gl.arange(0, THREADS, BY_THREAD)[None, :, None]
    numbers = gl.arange(0, VECTOR, BY_NUMBER)[None, None, :]
    vectors = gl.arange(0, CHUNK_STEPS, BY_STEP)[:, None, None] * THREADS + threads
    cols = vectors * VECTOR + numbers
    # A vector lies inside the row as a whole or not at all, and a mask that says so keeps the accesses 16 bytes wide.
    RAGGED: gl.constexpr = not EVEN
    mask = ((N_CHUNKS - 1) * CHUNK_STEPS * THREADS + vectors < n_vectors) & (numbers >= 0)

    row = gl.program_id(0).to(gl.int64)
    for c in gl.static_range(N_CHUNKS):
        source = x_ptr + row * x_row_vectors * VECTOR + c * CHUNK + cols
        _copy_chunk(ring.index(c), source, mask, RAGGED and c == N_CHUNKS - 1)
    if TAIL_STEPS > 0:
        tail_vectors = gl.arange(0, TAIL_STEPS, BY_STEP)[:, None, None] * THREADS + threads
        tail_cols = tail_vectors * VECTOR + numbers
    while row < n_rows:
        # The lowest finite number, not -inf: then no -inf in x can meet -inf in m, whose difference is NaN.
        m = gl.full([THREADS], -3.4028234663852886e38, gl.float32, BY_THREAD)
        s = gl.zeros([THREADS], gl.float32, BY_THREAD)
        if TAIL_STEPS > 0:
            # While the chunks are on their way.
            for first in range(N_CHUNKS * CHUNK_STEPS * THREADS, n_vectors, TAIL_STEPS * THREADS):
                tail_mask = (first + tail_vectors < n_vectors) & (numbers >= 0)
                tail_ptrs = x_ptr + (row * x_row_vectors + first) * VECTOR + tail_cols
                tail = gl.load(tail_ptrs, mask=tail_mask, other=-float("inf"), eviction_policy="evict_last")
                m, s = _update(_widen(tail, OUT), m, s)
        for c in gl.static_range(N_CHUNKS):
            async_copy.wait_group(N_CHUNKS - 1 - c)
            x = _widen(ring.index(c).load(LAYOUT), OUT)
            if RAGGED and c == N_CHUNKS - 1:
                x = gl.where(mask, x, -float("inf"))
            m, s = _update(x, m, s)
        row_max = gl.max(m, 0)
        log2_sum = gl.log2(gl.sum(s * gl.exp(m - row_max), 0))

        next_row = row + gl.num_programs(0)
        # After the last row the copies bring it again, and nobody reads them.
        x_row_ptr = x_ptr + gl.minimum(next_row, n_rows - 1) * x_row_vectors * VECTOR
        out_row_ptr = out_ptr + row * n_vectors * VECTOR
        for c in gl.static_range(N_CHUNKS):
            out = _result(_widen(ring.index(c).load(LAYOUT), OUT), row_max, log2_sum, IS_LOG)
            if RAGGED and c == N_CHUNKS - 1:
                gl.store(out_row_ptr + c * CHUNK + cols, out.to(OUT), mask=mask)
            else:
                gl.store(out_row_ptr + c * CHUNK + cols, out.to(OUT))
            _copy_chunk(ring.index(c), x_row_ptr + c * CHUNK + cols, mask, RAGGED and c == N_CHUNKS - 1)
        if TAIL_STEPS > 0:
            for first in range(N_CHUNKS * CHUNK_STEPS * THREADS, n_vectors, TAIL_STEPS * THREADS):
                tail_mask = (first + tail_vectors < n_vectors) & (numbers >= 0)
                tail_ptrs = x_ptr + (row * x_row_vectors + first) * VECTOR + tail_cols
                tail = gl.load(tail_ptrs, mask=tail_mask, other=-float("inf"), eviction_policy="evict_first")
                tail_out = _result(_widen(tail, OUT), row_max, log2_sum, IS_LOG)
                gl.store(out_row_ptr + first * VECTOR + tail_cols, tail_out.to(OUT), mask=tail_mask)
        row = next_row
    async_copy.wait_group(0)


def supports(x: torch.Tensor, n_cols: int, row_stride: int) -> bool:
    """Whether the kernel can take these rows, which must be 16-byte aligned, and they are long enough for it to pay."""
    itemsize = x.element_size()
    # Below, tl's kernel keeps the row in registers, which has room for a 32-bit number and not only for half of one.
    at_least = {2: 16 * 1024, 4: 128 * 1024}.get(itemsize)
    return (
        at_least is not None
        and n_cols * itemsize > at_least
        and n_cols * itemsize % 16 == 0
        and row_stride * itemsize % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def forward(x: torch.Tensor, out: torch.Tensor, n_rows: int, n_cols: int, row_stride: int, is_log: bool) -> None:
    """Write the softmax of rows that `supports` accepts, or its logarithm, to out."""
    row_bytes = n_cols * x.element_size()
    vector = 16 // x.element_size()
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
    held_bytes = n_chunks * chunk_bytes
    programs = num_multiprocessors(x.device) * min(_MAX_PROGRAMS, _SHARED_BYTES // held_bytes)
    launch(
        _softmax_resident_fwd_kernel,
        (min(n_rows, programs),),
        x, out, n_rows, n_cols // vector, row_stride // vector,
        VECTOR=vector, CHUNK_STEPS=chunk_steps, N_CHUNKS=n_chunks, TAIL_STEPS=tail_steps,
        EVEN=row_bytes >= held_bytes, IS_LOG=is_log, num_warps=num_warps,
    )  # fmt: skip
