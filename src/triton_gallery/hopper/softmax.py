"""Softmax of long rows, in Gluon: a row waits on the chip between the two passes over it.

``tl`` decides by itself what lives in shared memory. Here the kernel decides: it copies a row there chunk by chunk,
takes maximum and sum as the chunks arrive, and writes the result chunk by chunk; as soon as a chunk is written, the
copy of the next row's chunk takes its place, so that memory is never idle. What shared memory cannot hold of a row
stays in registers as it was loaded, and what does not fit there either is read a second time, from the L2 cache.
"""

import torch

from .._launch import cdiv, launch, num_multiprocessors
from ._gluon import async_copy, async_copy_to_shared, gl, gluon

# What the programs on one multiprocessor may hold in shared memory together; each is charged 1 KiB more.
_SHARED_BYTES = 216 * 1024
# Vectors of 16 bytes per thread in a chunk, and in each of the pieces that registers have room for.
_STEPS = 2
_MAX_KEPT = 6
# The same in a piece that is read twice.
_LONG_STEPS = 4
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
def _result(x, row_max, row_sum, log2_sum, DTYPE: gl.constexpr, IS_LOG: gl.constexpr):
    """exp(x - row_max) / row_sum in DTYPE, or its natural logarithm."""
    LOG2_E: gl.constexpr = 1.4426950408889634
    if IS_LOG:
        out = x - row_max - log2_sum * (1 / LOG2_E)
    elif DTYPE == gl.float32:
        out = gl.exp(x - row_max) * (1 / row_sum)
    else:
        # One operation less. It costs some of the last of float32's bits, which a 16-bit result does not have.
        out = gl.exp2((x - row_max) * LOG2_E - log2_sum)
    return out.to(DTYPE)


@gluon.jit
def _copy_chunk(chunk, ptrs, vectors, numbers, n_left, MASKED: gl.constexpr):
    if MASKED:
        # A vector has a part in the row or none, and a mask that says so keeps the copies 16 bytes wide.
        async_copy_to_shared(chunk, ptrs, mask=(vectors < n_left) & (numbers >= 0))
    else:
        async_copy_to_shared(chunk, ptrs)
    async_copy.commit_group()


@gluon.jit
def _load_piece(x_row_ptr, vectors, numbers, end, VECTOR: gl.constexpr, FULL: gl.constexpr, POLICY: gl.constexpr):
    """A piece of the row, and -inf behind the row's end."""
    cols = vectors * VECTOR + numbers
    if FULL:
        return gl.load(x_row_ptr + cols, eviction_policy=POLICY)
    else:
        mask = (vectors * VECTOR < end) & (numbers >= 0)
        x = gl.load(x_row_ptr + cols, mask=mask, other=-float("inf"), eviction_policy=POLICY)
        return gl.where(cols < end, x, -float("inf"))


@gluon.jit
def _store(ptrs, out, vectors, numbers, begin, end, VECTOR: gl.constexpr, ALIGNED: gl.constexpr):
    """Store what lies between begin and end: whole vectors at once, and what is left of a row number by number."""
    cols = vectors * VECTOR
    if ALIGNED:
        gl.store(ptrs, out, mask=(cols < end) & (numbers >= 0))
    else:
        whole = (cols >= begin) & (cols + VECTOR <= end)
        gl.store(ptrs, out, mask=whole & (numbers >= 0))
        gl.store(ptrs, out, mask=(cols + numbers >= begin) & (cols + numbers < end) & ~whole)


@gluon.jit
def _place(row, row_vectors, rest, VECTOR: gl.constexpr, ALIGNED: gl.constexpr):
    """The vector in which a row begins, and where in it; all vectors count from the tensor's start."""
    if ALIGNED:
        return row * row_vectors, 0
    else:
        return row * row_vectors + row * rest // VECTOR, (row * rest % VECTOR).to(gl.int32)


@gluon.jit(do_not_specialize=["n_rows", "rest"])
def _softmax_resident_fwd_kernel(
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    out_ptr,  # (n_rows, n_cols), contiguous
    n_rows,
    n_vectors,  # n_cols in units of VECTOR, which tells the compiler that aligned rows are
    x_row_vectors,  # x_row_stride likewise
    rest,  # what both leave over
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    CHUNK_STEPS: gl.constexpr,  # vectors per thread in a chunk
    N_CHUNKS: gl.constexpr,  # in shared memory
    N_FULL: gl.constexpr,  # of these, those that every row fills
    PIECE_STEPS: gl.constexpr,  # vectors per thread in each piece behind the chunks
    N_KEPT: gl.constexpr,  # pieces in registers, or 0 if there are too many
    N_KEPT_FULL: gl.constexpr,  # of these, those that every row fills
    IS_LONGER: gl.constexpr,  # the row goes on behind what is kept
    ALIGNED: gl.constexpr,  # rest is 0: no vector belongs to two rows
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
    CHUNK_VECTORS: gl.constexpr = CHUNK_STEPS * THREADS
    CHUNK: gl.constexpr = CHUNK_VECTORS * VECTOR
    OUT: gl.constexpr = out_ptr.dtype.element_ty
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [N_CHUNKS, CHUNK_STEPS, THREADS, VECTOR], SHARED)
    threads = gl.arange(0, THREADS, BY_THREAD)[None, :, None]
    numbers = gl.arange(0, VECTOR, BY_NUMBER)[None, None, :]
    vectors = gl.arange(0, CHUNK_STEPS, BY_STEP)[:, None, None] * THREADS + threads
    cols = vectors * VECTOR + numbers
    BEHIND: gl.constexpr = N_CHUNKS * CHUNK_VECTORS
    PIECE: gl.constexpr = PIECE_STEPS * THREADS
    piece_vectors = gl.arange(0, PIECE_STEPS, BY_STEP)[:, None, None] * THREADS + threads

    n_cols = n_vectors * VECTOR + rest
    row = gl.program_id(0).to(gl.int64)
    # From the vector in which the row begins, its numbers are those from `begin` to `end`.
    x_vector, begin = _place(row, x_row_vectors, rest, VECTOR, ALIGNED)
    x_row_ptr = x_ptr + x_vector * VECTOR
    for c in gl.static_range(N_CHUNKS):
        n_left = gl.cdiv(begin + n_cols, VECTOR) - c * CHUNK_VECTORS
        _copy_chunk(ring.index(c), x_row_ptr + c * CHUNK + cols, vectors, numbers, n_left, c >= N_FULL)
    kept = ()
    for k in gl.static_range(N_KEPT):
        vectors_k = BEHIND + k * PIECE + piece_vectors
        kept += (_load_piece(x_row_ptr, vectors_k, numbers, begin + n_cols, VECTOR, k < N_KEPT_FULL, "evict_first"),)
    while row < n_rows:
        end = begin + n_cols
        # The lowest finite number, not -inf: then no -inf in x can meet -inf in m, whose difference is NaN.
        m = gl.full([THREADS], -3.4028234663852886e38, gl.float32, BY_THREAD)
        s = gl.zeros([THREADS], gl.float32, BY_THREAD)
        if IS_LONGER:
            # While the chunks are on their way.
            for first in range(BEHIND, gl.cdiv(end, VECTOR), PIECE):
                piece = _load_piece(x_row_ptr, first + piece_vectors, numbers, end, VECTOR, False, "evict_last")
                m, s = _update(_widen(piece, OUT), m, s)
        for c in gl.static_range(N_CHUNKS):
            async_copy.wait_group(N_CHUNKS - 1 - c)
            x = _widen(ring.index(c).load(LAYOUT), OUT)
            if c >= N_FULL or (c == 0 and not ALIGNED):
                x = gl.where((c * CHUNK + cols >= begin) & (c * CHUNK + cols < end), x, -float("inf"))
            m, s = _update(x, m, s)
        for k in gl.static_range(N_KEPT):
            m, s = _update(_widen(kept[k], OUT), m, s)
        row_max = gl.max(m, 0)
        row_sum = gl.sum(s * gl.exp(m - row_max), 0)
        log2_sum = gl.log2(row_sum)

        next_row = row + gl.num_programs(0)
        # After the last row the copies bring it again, and nobody reads them.
        next_vector, next_begin = _place(gl.minimum(next_row, n_rows - 1), x_row_vectors, rest, VECTOR, ALIGNED)
        next_row_ptr = x_ptr + next_vector * VECTOR
        out_vector, _ = _place(row, n_vectors, rest, VECTOR, ALIGNED)
        out_row_ptr = out_ptr + out_vector * VECTOR
        next_kept = ()
        for k in gl.static_range(N_KEPT):
            vectors_k = BEHIND + k * PIECE + piece_vectors
            kept_out = _result(_widen(kept[k], OUT), row_max, row_sum, log2_sum, OUT, IS_LOG)
            kept_ptrs = out_row_ptr + vectors_k * VECTOR + numbers
            if k < N_KEPT_FULL:
                gl.store(kept_ptrs, kept_out)
            else:
                _store(kept_ptrs, kept_out, vectors_k, numbers, 0, end, VECTOR, ALIGNED)
            next_end = next_begin + n_cols
            next_kept += (
                _load_piece(next_row_ptr, vectors_k, numbers, next_end, VECTOR, k < N_KEPT_FULL, "evict_first"),
            )
        kept = next_kept
        for c in gl.static_range(N_CHUNKS):
            start = c * CHUNK_VECTORS
            out = _result(_widen(ring.index(c).load(LAYOUT), OUT), row_max, row_sum, log2_sum, OUT, IS_LOG)
            if c >= N_FULL or (c == 0 and not ALIGNED):
                _store(out_row_ptr + c * CHUNK + cols, out, start + vectors, numbers, begin, end, VECTOR, ALIGNED)
            else:
                gl.store(out_row_ptr + c * CHUNK + cols, out)
            n_left = gl.cdiv(next_begin + n_cols, VECTOR) - start
            _copy_chunk(ring.index(c), next_row_ptr + c * CHUNK + cols, vectors, numbers, n_left, c >= N_FULL)
        if IS_LONGER:
            for first in range(BEHIND, gl.cdiv(end, VECTOR), PIECE):
                piece = _load_piece(x_row_ptr, first + piece_vectors, numbers, end, VECTOR, False, "evict_first")
                piece_out = _result(_widen(piece, OUT), row_max, row_sum, log2_sum, OUT, IS_LOG)
                piece_ptrs = out_row_ptr + (first + piece_vectors) * VECTOR + numbers
                _store(piece_ptrs, piece_out, first + piece_vectors, numbers, 0, end, VECTOR, ALIGNED)
        row, x_row_ptr, begin = next_row, next_row_ptr, next_begin
    async_copy.wait_group(0)


def supported_rows(x: torch.Tensor, n_rows: int, n_cols: int, row_stride: int) -> int:
    """How many rows, from the first, the kernel can take; none where they are too short for it to pay.

    Where a row of x begins between two multiples of 16 bytes, there the row of the output must begin as well.
    """
    itemsize = x.element_size()
    # Below, tl's kernel keeps the row in registers, which has room for a 32-bit number and not only for half of one.
    at_least = {2: 16 * 1024, 4: 128 * 1024}.get(itemsize)
    if at_least is None or not at_least < n_cols * itemsize < 2**31:
        return 0
    if (row_stride - n_cols) * itemsize % 16 != 0 or x.data_ptr() % 16 != 0:
        return 0
    # The kernel reads whole vectors of 16 bytes. That of the last row's end may reach past the memory of x.
    end = ((n_rows - 1) * row_stride + n_cols) * itemsize
    return n_rows if end % 16 == 0 else n_rows - 1


def forward(x: torch.Tensor, out: torch.Tensor, n_rows: int, n_cols: int, row_stride: int, is_log: bool) -> None:
    """Write the softmax of the first `n_rows`, which are supported, or its logarithm, to out."""
    vector = 16 // x.element_size()
    n_vectors, rest = divmod(n_cols, vector)
    aligned = rest == 0
    # Other rows can begin at the end of a vector.
    row_bytes = (n_cols if aligned else n_cols + vector - 1) * x.element_size()
    num_warps = _num_warps(row_bytes)
    chunk_bytes = piece_bytes = num_warps * 32 * 16 * _STEPS
    n_chunks = min(cdiv(row_bytes, chunk_bytes), _SHARED_BYTES // chunk_bytes)
    n_kept = max(0, cdiv(row_bytes - n_chunks * chunk_bytes, piece_bytes))
    is_longer = n_kept > _MAX_KEPT
    if is_longer:
        n_kept = 0
    n_full = n_cols * x.element_size() // chunk_bytes
    programs = num_multiprocessors(x.device) * min(_MAX_PROGRAMS, _SHARED_BYTES // (n_chunks * chunk_bytes))
    launch(
        _softmax_resident_fwd_kernel,
        (min(n_rows, programs),),
        x, out, n_rows, n_vectors, row_stride // vector, rest,
        VECTOR=vector, CHUNK_STEPS=_STEPS, N_CHUNKS=n_chunks, N_FULL=min(n_chunks, n_full),
        PIECE_STEPS=_LONG_STEPS if is_longer else _STEPS, N_KEPT=n_kept,
        N_KEPT_FULL=min(n_kept, max(0, n_full - n_chunks)), IS_LONGER=is_longer,
        ALIGNED=aligned, IS_LOG=is_log, num_warps=num_warps,
    )  # fmt: skip


def _num_warps(row_bytes: int) -> int:
    """Warps of a program; more of them where it has the multiprocessor to itself."""
    return 4 if row_bytes <= 40 * 1024 else 8 if row_bytes <= 128 * 1024 else 16
