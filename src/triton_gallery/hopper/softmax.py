"""Softmax of long rows, in Gluon: a row waits on the chip between the two passes over it.

``tl`` decides by itself what lives in shared memory. Here the kernel decides: it copies a row there chunk by chunk,
takes maximum and sum as the chunks arrive, and writes the result chunk by chunk; as soon as a chunk is written, the
copy of the next row's chunk takes its place, so that memory is never idle. Rows of more than 88 KiB are cut into parts:
see ``exchange``.
"""

import torch

from .._launch import cdiv, launch, num_multiprocessors
from ._gluon import async_copy, async_copy_to_shared, gl, gluon
from .exchange import at_a_time, exchange, mailboxes, max_parts

# What the programs on one multiprocessor may hold in shared memory together; each is charged 1 KiB more.
_SHARED_BYTES = 216 * 1024
# Vectors of 16 bytes per thread in a chunk.
_STEPS = 2
# More programs on a multiprocessor do not help.
_MAX_PROGRAMS = 6
# Longer rows are cut into parts, of which a multiprocessor has room for _MAX_PROGRAMS.
_MAX_ROW_BYTES = 88 * 1024
_MAX_PART_BYTES = 32 * 1024
# Fewer bytes than this, all rows together, are read twice in less time than the parts need to agree.
_MIN_BYTES_OF_PARTS = 4 * 1024 * 1024


@gluon.jit
def _widen(x, DTYPE: gl.constexpr):
    """As in torch, x takes the output's dtype before anything else; the arithmetic is float32."""
    return x.to(DTYPE).to(gl.float32)


@gluon.jit
def _update(x, m, s):
    """Fold a piece of the row into each thread's running maximum m and its sum s of exp(x - m)."""
    LOG2_E: gl.constexpr = 1.4426950408889634
    new = gl.maximum(m, gl.max(gl.max(x, 2), 0))
    e = gl.exp2((x - new[None, :, None]) * LOG2_E)
    return new, s * gl.exp2((m - new) * LOG2_E) + gl.sum(gl.sum(e, 2), 0)


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
def _copy_chunk(chunk, ptrs, vectors, numbers, n_left, exists, MASKED: gl.constexpr):
    """Start the copy of a chunk of a row, if that row exists."""
    # The latter two are always true, and give the first the shape of the chunk.
    mask = exists & (vectors >= 0) & (numbers >= 0)
    if MASKED:
        # A vector has a part in the row or none, and a mask that says so keeps the copies 16 bytes wide.
        mask = mask & (vectors < n_left)
    async_copy_to_shared(chunk, ptrs, mask=mask)
    async_copy.commit_group()


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
def _place(row, row_stride, LINE: gl.constexpr, ALIGNED: gl.constexpr):
    """Where the cache line starts in which a row begins, counted from the tensor's start, and where in it that is."""
    start = row * row_stride
    if ALIGNED:
        return start // LINE * LINE, 0
    else:
        return start // LINE * LINE, (start % LINE).to(gl.int32)


@gluon.jit
def _join(maxima, sums, parts, n_parts):
    """The maximum and the sum of a row of which each part brings its own."""
    row_max = gl.max(maxima, 0)
    return row_max, gl.sum(gl.where(parts < n_parts, sums * gl.exp(maxima - row_max), 0.0), 0)


@gluon.jit(do_not_specialize=["n_rows", "n_parts"])
def _softmax_resident_fwd_kernel(
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    out_ptr,  # (n_rows, n_cols), contiguous
    mail_ptr,  # (n_rows, n_parts), or None for whole rows
    n_rows,
    n_parts,
    part_lines,  # cache lines in a part of a row; the last part may have fewer
    n_cols,
    x_row_stride,
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    CHUNK_STEPS: gl.constexpr,  # vectors per thread in a chunk
    N_CHUNKS: gl.constexpr,  # chunks of a part
    N_FULL: gl.constexpr,  # of these, those that every part fills
    MAX_PARTS: gl.constexpr,
    ALIGNED: gl.constexpr,  # no cache line belongs to two rows
    IS_LOG: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Programs 0 to n_parts - 1 own row 0, one part each, the next n_parts programs row 1, and so on.

    Such a group goes on with the row that lies as many rows further as there are groups.
    """
    # A chunk is (steps, threads, numbers of a vector): each thread meets what it has copied itself.
    THREADS: gl.constexpr = 32 * num_warps
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, VECTOR], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
    BY_STEP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    BY_THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    BY_NUMBER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    CHUNK_VECTORS: gl.constexpr = CHUNK_STEPS * THREADS
    CHUNK: gl.constexpr = CHUNK_VECTORS * VECTOR
    LINE: gl.constexpr = 8 * VECTOR
    OUT: gl.constexpr = out_ptr.dtype.element_ty
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [N_CHUNKS, CHUNK_STEPS, THREADS, VECTOR], SHARED)
    threads = gl.arange(0, THREADS, BY_THREAD)[None, :, None]
    numbers = gl.arange(0, VECTOR, BY_NUMBER)[None, None, :]
    vectors = gl.arange(0, CHUNK_STEPS, BY_STEP)[:, None, None] * THREADS + threads
    cols = vectors * VECTOR + numbers

    part = gl.program_id(0) % n_parts
    row = (gl.program_id(0) // n_parts).to(gl.int64)
    first = part * part_lines * LINE
    part_cols = gl.minimum(n_cols - first, part_lines * LINE)
    # From the cache line in which a part begins, its numbers are those from `begin` to `end`.
    x_line, begin = _place(row, x_row_stride, LINE, ALIGNED)
    x_row_ptr = x_ptr + x_line + first
    for c in gl.static_range(N_CHUNKS):
        n_left = gl.cdiv(begin + part_cols, VECTOR) - c * CHUNK_VECTORS
        _copy_chunk(ring.index(c), x_row_ptr + c * CHUNK + cols, vectors, numbers, n_left, True, c >= N_FULL)
    while row < n_rows:
        end = begin + part_cols
        # The lowest finite number, not -inf: then no -inf in x can meet -inf in m, whose difference is NaN.
        m = gl.full([THREADS], -3.4028234663852886e38, gl.float32, BY_THREAD)
        s = gl.zeros([THREADS], gl.float32, BY_THREAD)
        for c in gl.static_range(N_CHUNKS):
            async_copy.wait_group(N_CHUNKS - 1 - c)
            x = _widen(ring.index(c).load(LAYOUT), OUT)
            if c >= N_FULL or (c == 0 and not ALIGNED):
                x = gl.where((c * CHUNK + cols >= begin) & (c * CHUNK + cols < end), x, -float("inf"))
            m, s = _update(x, m, s)
        row_max = gl.max(m, 0)
        row_sum = gl.sum(s * gl.exp(m - row_max), 0)
        if mail_ptr is not None:
            maxima, sums, parts = exchange(
                mail_ptr + row * n_parts, row_max, row_sum, part, n_parts, MAX_PARTS, num_warps
            )
            row_max, row_sum = _join(maxima, sums, parts, n_parts)
        log2_sum = gl.log2(row_sum)

        next_row = row + gl.num_programs(0) // n_parts
        next_line, next_begin = _place(next_row, x_row_stride, LINE, ALIGNED)
        next_row_ptr = x_ptr + next_line + first
        # Rows of x and of the output lie alike in their vectors, if not in their cache lines.
        out_row_ptr = out_ptr + (row * n_cols - begin) // VECTOR * VECTOR + first
        for c in gl.static_range(N_CHUNKS):
            start = c * CHUNK_VECTORS
            out = _result(_widen(ring.index(c).load(LAYOUT), OUT), row_max, row_sum, log2_sum, OUT, IS_LOG)
            if c >= N_FULL or (c == 0 and not ALIGNED):
                _store(out_row_ptr + c * CHUNK + cols, out, start + vectors, numbers, begin, end, VECTOR, ALIGNED)
            else:
                gl.store(out_row_ptr + c * CHUNK + cols, out)
            n_left = gl.cdiv(next_begin + part_cols, VECTOR) - start
            ptrs = next_row_ptr + c * CHUNK + cols
            _copy_chunk(ring.index(c), ptrs, vectors, numbers, n_left, next_row < n_rows, c >= N_FULL)
        row, x_row_ptr, begin = next_row, next_row_ptr, next_begin
    async_copy.wait_group(0)


def supported_rows(x: torch.Tensor, n_rows: int, n_cols: int, row_stride: int) -> int:
    """How many rows, from the first, the kernel can take; none where they are too short or too few for it to pay.

    Where a row of x begins between two multiples of 16 bytes, there the row of the output must begin as well.
    """
    row_bytes = n_cols * x.element_size()
    # Below, tl's kernel keeps the row in registers. Where it cannot load 16 bytes at a time, this one is soon faster.
    at_least = {2: 40 * 1024 if row_bytes % 16 == 0 else 8 * 1024, 4: 128 * 1024}.get(x.element_size())
    if at_least is None or n_rows == 1 or not at_least < row_bytes < 2**31:
        return 0
    if (row_stride - n_cols) * x.element_size() % 16 != 0 or x.data_ptr() % 16 != 0:
        return 0
    if row_bytes > _MAX_ROW_BYTES:
        n_parts = cdiv(row_bytes, _MAX_PART_BYTES)
        if n_rows * row_bytes < _MIN_BYTES_OF_PARTS or n_parts > _MAX_PROGRAMS * num_multiprocessors(x.device):
            return 0
    # The kernel reads whole vectors of 16 bytes. That of the last row's end may reach past the memory of x, and so may
    # those of other rows, if rows begin less than 16 bytes apart.
    end = ((n_rows - 1) * row_stride + n_cols) * x.element_size()
    if end % 16 == 0:
        return n_rows
    return n_rows - 1 if row_stride * x.element_size() >= 16 else 0


def forward(x: torch.Tensor, out: torch.Tensor, n_rows: int, n_cols: int, row_stride: int, is_log: bool) -> None:
    """Write the softmax of the first `n_rows`, which are supported, or its logarithm, to out."""
    vector = 16 // x.element_size()
    row_bytes = n_cols * x.element_size()
    in_parts = row_bytes > _MAX_ROW_BYTES
    n_parts = cdiv(row_bytes, _MAX_PART_BYTES) if in_parts else 1
    part_lines = cdiv(row_bytes, 128 * n_parts)
    n_parts = cdiv(row_bytes, part_lines * 128)
    last_bytes = row_bytes - (n_parts - 1) * part_lines * 128
    aligned = row_bytes % 128 == 0 and row_stride * x.element_size() % 128 == 0
    # Rows that begin within a cache line may reach into one more.
    part_bytes = (part_lines * 128 if in_parts else row_bytes) + (0 if aligned else 128 - x.element_size())
    num_warps = 4 if part_bytes <= 40 * 1024 else 8
    chunk_bytes = num_warps * 32 * 16 * _STEPS
    n_chunks = cdiv(part_bytes, chunk_bytes)
    programs = num_multiprocessors(x.device) * min(_MAX_PROGRAMS, _SHARED_BYTES // (n_chunks * chunk_bytes))
    launch(
        _softmax_resident_fwd_kernel,
        (min(n_rows, programs // n_parts) * n_parts,),
        x, out, mailboxes(n_rows, n_parts, x.device) if in_parts else None,
        n_rows, n_parts, part_lines, n_cols, row_stride,
        VECTOR=vector, CHUNK_STEPS=_STEPS, N_CHUNKS=n_chunks, N_FULL=min(n_chunks, last_bytes // chunk_bytes),
        MAX_PARTS=max_parts(n_parts, num_warps), ALIGNED=aligned, IS_LOG=is_log, num_warps=num_warps,
        **(at_a_time(_MAX_PROGRAMS, num_warps) if in_parts else {}),
    )  # fmt: skip
