"""Softmax of long rows, in Gluon: a row waits on the chip between the two passes over it.

``tl`` decides by itself what lives in shared memory. Here the kernel decides. Rows of up to 52 KiB have a program of
their own each, and longer ones a program for each part (see ``exchange``). A program has few warps, and little shared
memory: so a multiprocessor holds many, and while some wait for memory or for other parts, others compute and write.
"""

from typing import NamedTuple

import torch
from triton.language.extra.cuda import gdc_wait

from .._launch import cdiv, launch, num_multiprocessors
from ._gluon import async_copy, async_copy_to_shared, gl, gluon, opaque
from .exchange import mailboxes, max_parts, receive, receive_soon, send

# Vectors of 16 bytes per thread in a chunk.
_STEPS = 2
# Rows of at most so many bytes, by the size of a number, stay in the registers of tl's kernels; 16-bit rows that it
# cannot load 16 bytes at a time, of fewer.
_MIN_ROW_BYTES = {2: 32 * 1024, 4: 48 * 1024}
_MIN_ODD_ROW_BYTES = 8 * 1024
# Where all rows together have fewer bytes, rows of up to 96 KiB stay there, too, other than unaligned ones of 16 bits.
# Of the others only unaligned rows of one part leave the last row to a second kernel.
_MIN_BYTES = 4 * 1024 * 1024
# The most parts of a row for each multiprocessor, which has room for three times as many.
_MAX_PARTS = 4


class _Plan(NamedTuple):
    max_row_bytes: int
    part_bytes: int | None  # at most; None for whole rows
    shorter_bytes: int | None  # a part may be as short as this, if that makes all parts whole chunks
    num_warps: int


# A single warp waits for nobody but the other parts. Where these would be too many, two share a longer part: measured
# on an H200 and an H100.
_PLANS = (
    _Plan(52 * 1024, None, None, 4),
    _Plan(384 * 1024, 12 * 1024, 8 * 1024, 1),
    _Plan(2**31 - 1, 16 * 1024, 16 * 1024, 2),
)


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
def _copy_part(smem, part_ptr, cols, vectors, numbers, n_vectors, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr):
    """Bring the vectors of a part of a row into shared memory. Each thread meets there what it has copied itself."""
    CHUNK_VECTORS: gl.constexpr = cols.shape[0] * cols.shape[1]
    CHUNK: gl.constexpr = CHUNK_VECTORS * cols.shape[2]
    for c in gl.static_range(N_FULL):
        async_copy_to_shared(smem.index(c), part_ptr + c * CHUNK + cols)
    for c in range(N_FULL, N_CHUNKS):
        # A vector has a number of the part or none, and a mask that says so keeps the copies 16 bytes wide. Its latter
        # half is always true, and gives the first the shape of the chunk.
        mask = (vectors < n_vectors - c * CHUNK_VECTORS) & (numbers >= 0)
        async_copy_to_shared(smem.index(c), part_ptr + c * CHUNK + cols, mask=mask)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _chunk(smem, c, cols, begin, end, IS_WHOLE: gl.constexpr, DTYPE: gl.constexpr):
    """The c-th chunk of a part, with -inf for what is not of the row."""
    x = _widen(smem.index(c).load(cols.type.layout), DTYPE)
    if not IS_WHOLE:
        col = c * (cols.shape[0] * cols.shape[1] * cols.shape[2]) + cols
        x = gl.where((col >= begin) & (col < end), x, -float("inf"))
    return x


@gluon.constexpr_function
def _in_rounds(n_full, unroll, aligned):
    """The first of the whole chunks that a loop takes, so many in each round, and the one behind the last."""
    first = 0 if aligned else 1
    return first, first + max(0, n_full - first) // unroll * unroll


@gluon.jit
def _statistics(
    smem, cols, begin, end,
    N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, UNROLL: gl.constexpr, ALIGNED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The maximum of a part of a row, and its sum of exp(x - maximum).

    Whole chunks are walked in rounds of UNROLL. With 0 all are walked one by one and with masks: the least code.
    """
    THREADS: gl.constexpr = cols.shape[1]
    BY_THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, cols.type.layout))
    # The lowest finite number, not -inf: then no -inf in x can meet -inf in m, whose difference is NaN.
    m = gl.full([THREADS], -3.4028234663852886e38, gl.float32, BY_THREAD)
    s = gl.zeros([THREADS], gl.float32, BY_THREAD)
    if UNROLL == 0:
        for c in range(N_CHUNKS):
            m, s = _update(_chunk(smem, c, cols, begin, end, False, DTYPE), m, s)
    else:
        ROUNDS: gl.constexpr = _in_rounds(N_FULL, UNROLL, ALIGNED)
        for first in range(ROUNDS[0], ROUNDS[1], UNROLL):
            for k in gl.static_range(UNROLL):
                m, s = _update(_chunk(smem, first + k, cols, begin, end, True, DTYPE), m, s)
        for c in gl.static_range(N_CHUNKS):
            if c < ROUNDS[0] or c >= ROUNDS[1]:
                m, s = _update(_chunk(smem, c, cols, begin, end, c < N_FULL and (c > 0 or ALIGNED), DTYPE), m, s)
    part_max = gl.max(m, 0)
    return part_max, gl.sum(s * gl.exp(m - part_max), 0)


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


@gluon.jit(do_not_specialize=["n_parts"])
def _softmax_resident_fwd_kernel(
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    out_ptr,  # (n_rows, n_cols), contiguous
    mail_ptr,  # (n_rows, n_parts), or None for whole rows
    n_parts,
    part_lines,  # cache lines in a part of a row; the last part may have fewer
    n_cols,
    x_row_stride,
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    CHUNK_STEPS: gl.constexpr,  # vectors per thread in a chunk
    N_CHUNKS: gl.constexpr,  # chunks of a part
    N_FULL: gl.constexpr,  # of these, those that every part fills
    UNROLL: gl.constexpr,  # whole chunks in a round of a loop: written out one by one, many would take long to compile
    MAX_PARTS: gl.constexpr,
    ALIGNED: gl.constexpr,  # no cache line belongs to two rows
    IS_LOG: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Programs 0 to n_parts - 1 own the parts of row 0, the next n_parts programs those of row 1, and so on.

    Each sends what it has found in its part, and waits for what the others have found.
    """
    # A chunk is (steps, threads, numbers of a vector).
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
    smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [N_CHUNKS, CHUNK_STEPS, THREADS, VECTOR], SHARED)
    threads = gl.arange(0, THREADS, BY_THREAD)[None, :, None]
    numbers = gl.arange(0, VECTOR, BY_NUMBER)[None, None, :]
    vectors = gl.arange(0, CHUNK_STEPS, BY_STEP)[:, None, None] * THREADS + threads
    cols = vectors * VECTOR + numbers

    part = gl.program_id(0) % n_parts
    row = (gl.program_id(0) // n_parts).to(gl.int64)
    part_cols = part_lines * LINE
    # From the cache line in which a part begins, its numbers are those from `begin` to `end`.
    line, begin = _place(row, x_row_stride, LINE, ALIGNED)
    x_row_ptr = x_ptr + line
    first = part * part_cols
    end = begin + gl.minimum(n_cols - first, part_cols)
    _copy_part(smem, x_row_ptr + first, cols, vectors, numbers, gl.cdiv(end, VECTOR), N_CHUNKS, N_FULL)
    row_max, row_sum = _statistics(smem, cols, begin, end, N_CHUNKS, N_FULL, UNROLL, ALIGNED, OUT)
    if mail_ptr is not None:
        gdc_wait()  # until all mailboxes are empty
        row_mail_ptr = mail_ptr + row * n_parts
        send(row_mail_ptr, row_max, row_sum, part)
        maxima, sums, parts, missing = receive_soon(row_mail_ptr, n_parts, MAX_PARTS, num_warps)
        if missing:
            # Programs start in the order of their numbers, but nobody promises that. Should all that run wait for one
            # that cannot start, each does the work of the others and goes on.
            for other in range(n_parts):
                other_first = other * part_cols
                other_end = begin + gl.minimum(n_cols - other_first, part_cols)
                n_vectors = gl.cdiv(other_end, VECTOR)
                _copy_part(smem, x_row_ptr + other_first, cols, vectors, numbers, n_vectors, N_CHUNKS, 0)
                other_max, other_sum = _statistics(smem, cols, begin, other_end, N_CHUNKS, 0, 0, ALIGNED, OUT)
                send(row_mail_ptr, other_max, other_sum, other)
            _copy_part(smem, x_row_ptr + first, cols, vectors, numbers, gl.cdiv(end, VECTOR), N_CHUNKS, 0)
            maxima, sums, parts = receive(row_mail_ptr, n_parts, MAX_PARTS, num_warps)
        row_max = gl.max(maxima, 0)
        row_sum = gl.sum(gl.where(parts < n_parts, sums * gl.exp(maxima - row_max), 0.0), 0)
    log2_sum = gl.log2(row_sum)
    # Rows of x and of the output lie alike in their vectors, if not in their cache lines.
    out_row_ptr = out_ptr + (row * n_cols - begin) // VECTOR * VECTOR + first
    # The compiler is not to see that all was loaded before: kept in registers, it would leave room for few programs.
    again = opaque(part) - part
    ROUNDS: gl.constexpr = _in_rounds(N_FULL, UNROLL, ALIGNED)
    for c in range(ROUNDS[0], ROUNDS[1], UNROLL):
        for k in gl.static_range(UNROLL):
            x = _widen(smem.index(again + c + k).load(LAYOUT), OUT)
            gl.store(out_row_ptr + (c + k) * CHUNK + cols, _result(x, row_max, row_sum, log2_sum, OUT, IS_LOG))
    for c in gl.static_range(N_CHUNKS):
        if c < ROUNDS[0] or c >= ROUNDS[1]:
            x = _widen(smem.index(again + c).load(LAYOUT), OUT)
            out = _result(x, row_max, row_sum, log2_sum, OUT, IS_LOG)
            out_ptrs = out_row_ptr + c * CHUNK + cols
            if c >= N_FULL or (c == 0 and not ALIGNED):
                _store(out_ptrs, out, c * CHUNK_VECTORS + vectors, numbers, begin, end, VECTOR, ALIGNED)
            else:
                gl.store(out_ptrs, out)


class _Cut(NamedTuple):
    """How rows are cut."""

    num_warps: int
    aligned: bool  # no cache line belongs to two rows
    n_parts: int
    part_lines: int
    n_chunks: int  # of a part
    n_full: int  # of these, those that every part fills


def _cut(x: torch.Tensor, n_cols: int, row_stride: int) -> _Cut:
    row_bytes = n_cols * x.element_size()
    plan = next(plan for plan in _PLANS if row_bytes <= plan.max_row_bytes)
    aligned = row_bytes % 128 == 0 and row_stride * x.element_size() % 128 == 0
    # Parts that begin within a cache line may reach into one more.
    more_bytes = 0 if aligned else 128
    chunk_bytes = plan.num_warps * 32 * 16 * _STEPS
    n_parts = 1 if plan.part_bytes is None else cdiv(row_bytes, plan.part_bytes - more_bytes)
    if n_parts > 1 and aligned:
        # A chunk that one part does not fill has masks in all.
        more_parts = range(n_parts, row_bytes // plan.shorter_bytes + 1)
        n_parts = next((n for n in more_parts if row_bytes % (n * chunk_bytes) == 0), n_parts)
    part_lines = cdiv(row_bytes, 128 * n_parts)
    n_parts = cdiv(row_bytes, part_lines * 128)
    last_bytes = row_bytes - (n_parts - 1) * part_lines * 128
    n_chunks = cdiv(min(row_bytes, part_lines * 128) + more_bytes, chunk_bytes)
    return _Cut(plan.num_warps, aligned, n_parts, part_lines, n_chunks, last_bytes // chunk_bytes)


def supported_rows(x: torch.Tensor, n_rows: int, n_cols: int, row_stride: int) -> int:
    """How many rows, from the first, the kernel can take; none where they are too short or too few for it to pay.

    Where a row of x begins between two multiples of 16 bytes, there the row of the output must begin as well.
    """
    row_bytes, size = n_cols * x.element_size(), x.element_size()
    odd = size == 2 and row_bytes % 16 != 0
    if size not in _MIN_ROW_BYTES or n_rows == 1 or row_bytes >= 2**31:
        return 0
    if row_bytes <= (_MIN_ODD_ROW_BYTES if odd else _MIN_ROW_BYTES[size]):
        return 0
    if (row_stride - n_cols) * size % 16 != 0 or x.data_ptr() % 16 != 0:
        return 0
    are_few = n_rows * row_bytes < _MIN_BYTES
    if are_few and not odd and row_bytes <= 2 * _MIN_ROW_BYTES[4]:
        return 0
    n_parts = _cut(x, n_cols, row_stride).n_parts
    if n_parts > _MAX_PARTS * num_multiprocessors(x.device):
        return 0
    # The kernel reads whole vectors of 16 bytes. That of the last row's end may reach past the memory of x, and so may
    # those of other rows, if rows begin less than 16 bytes apart.
    end = ((n_rows - 1) * row_stride + n_cols) * size
    if end % 16 == 0:
        return n_rows
    # The last row takes a second kernel, and its start is most of the time of few rows.
    pays = not are_few or (odd and n_parts == 1)
    return n_rows - 1 if row_stride * size >= 16 and pays else 0


def forward(x: torch.Tensor, out: torch.Tensor, n_rows: int, n_cols: int, row_stride: int, is_log: bool) -> None:
    """Write the softmax of the first `n_rows`, which are supported, or its logarithm, to out."""
    num_warps, aligned, n_parts, part_lines, n_chunks, n_full = _cut(x, n_cols, row_stride)
    in_parts = n_parts > 1
    launch(
        _softmax_resident_fwd_kernel, (n_rows * n_parts,),
        x, out, mailboxes(n_rows, n_parts, x.device) if in_parts else None,
        n_parts, part_lines, n_cols, row_stride,
        VECTOR=16 // x.element_size(), CHUNK_STEPS=_STEPS, N_CHUNKS=n_chunks, N_FULL=n_full,
        UNROLL=2 if in_parts else n_chunks, MAX_PARTS=max_parts(n_parts, num_warps), ALIGNED=aligned, IS_LOG=is_log,
        num_warps=num_warps, launch_pdl=in_parts,
    )  # fmt: skip
