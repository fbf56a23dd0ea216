"""Softmax of long rows, in Gluon: a row waits on the chip between the two passes over it.

``tl`` decides by itself what lives in shared memory. Here the kernel decides. Rows of up to 40 KiB, which come here if
they cannot be loaded 16 bytes at a time, have a program of their own each. Longer ones are cut into parts (see
``exchange``), and a program holds its part of two or three rows: while one is written, maximum and sum of the next are
known already. As soon as a piece is written, the copy of a later row's takes its place, so that memory is never idle.
"""

from typing import NamedTuple

import torch

from .._launch import cdiv, has_fast_memory, launch, num_multiprocessors
from ..softmax import PACKED_COLS
from ._gluon import async_copy, async_copy_to_shared, gl, gluon
from .exchange import at_a_time, mailboxes, max_parts, receive, registers_for, send

# Vectors of 16 bytes per thread in a chunk.
_STEPS = 2
# Rows of more 16-bit numbers lie in parts on an H200. Shorter ones stay in registers, if they can be loaded 16 bytes at
# a time.
_LONG_16_BIT = 26 * 1024
# Fewer bytes than this, all rows together, are read twice in less time than the parts need to agree.
_MIN_BYTES_OF_PARTS = 4 * 1024 * 1024


class _Plan(NamedTuple):
    max_row_bytes: int
    part_bytes: int | None  # None for whole rows
    num_warps: int
    stages: int  # rows of which a program holds a part
    programs: int  # on a multiprocessor, at most


# Short parts of one warp, which waits for nobody but the other parts, as long as these are not too many: measured on an
# H200.
_PLANS = (
    _Plan(40 * 1024, None, 4, 1, 6),
    _Plan(256 * 1024, 8 * 1024, 1, 2, 12),
    _Plan(1024 * 1024, 8 * 1024, 2, 3, 8),
    _Plan(2**31 - 1, 16 * 1024, 4, 3, 4),
)
# Shared memory of a multiprocessor; of this each program is charged 1 KiB, and what a reduction over its warps takes.
_SHARED_BYTES = 228 * 1024
_OVERHEAD_BYTES = 1024 + 256


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


@gluon.jit
def _statistics(
    ring, slot, cols, begin, end,
    N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The maximum of a part of a row, and its sum of exp(x - maximum)."""
    STEPS: gl.constexpr = cols.shape[0]
    THREADS: gl.constexpr = cols.shape[1]
    CHUNK: gl.constexpr = STEPS * THREADS * cols.shape[2]
    BY_THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, cols.type.layout))
    # The lowest finite number, not -inf: then no -inf in x can meet -inf in m, whose difference is NaN.
    m = gl.full([THREADS], -3.4028234663852886e38, gl.float32, BY_THREAD)
    s = gl.zeros([THREADS], gl.float32, BY_THREAD)
    for c in gl.static_range(N_CHUNKS):
        x = _widen(ring.index(slot * N_CHUNKS + c).load(cols.type.layout), DTYPE)
        if c >= N_FULL or (c == 0 and not ALIGNED):
            x = gl.where((c * CHUNK + cols >= begin) & (c * CHUNK + cols < end), x, -float("inf"))
        m, s = _update(x, m, s)
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
    STAGES: gl.constexpr,  # rows of which there is room for a part; at least 2 where there are parts
    MAX_PARTS: gl.constexpr,
    ALIGNED: gl.constexpr,  # no cache line belongs to two rows
    IS_LOG: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Programs 0 to n_parts - 1 own row 0, one part each, the next n_parts programs row 1, and so on.

    Such a group goes on with the row that lies as many rows further as there are groups. What a part has found of a row
    is sent before the row ahead of it is written, and asked for after that: so the other parts' have had the time of a
    whole row to come.
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
    SLOTS: gl.constexpr = STAGES * N_CHUNKS
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [SLOTS, CHUNK_STEPS, THREADS, VECTOR], SHARED)
    threads = gl.arange(0, THREADS, BY_THREAD)[None, :, None]
    numbers = gl.arange(0, VECTOR, BY_NUMBER)[None, None, :]
    vectors = gl.arange(0, CHUNK_STEPS, BY_STEP)[:, None, None] * THREADS + threads
    cols = vectors * VECTOR + numbers

    part = gl.program_id(0) % n_parts
    row = (gl.program_id(0) // n_parts).to(gl.int64)
    n_groups = gl.num_programs(0) // n_parts
    first = part * part_lines * LINE
    part_cols = gl.minimum(n_cols - first, part_lines * LINE)
    # From the cache line in which a part begins, its numbers are those from `begin` to `begin + part_cols`.
    for k in gl.static_range(STAGES):
        ahead = row + k * n_groups
        line, begin = _place(ahead, x_row_stride, LINE, ALIGNED)
        n_vectors = gl.cdiv(begin + part_cols, VECTOR)
        for c in gl.static_range(N_CHUNKS):
            ptrs = x_ptr + line + first + c * CHUNK + cols
            n_left = n_vectors - c * CHUNK_VECTORS
            _copy_chunk(ring.index(k * N_CHUNKS + c), ptrs, vectors, numbers, n_left, ahead < n_rows, c >= N_FULL)
        async_copy.commit_group()
    begin = _place(row, x_row_stride, LINE, ALIGNED)[1]
    if mail_ptr is not None:
        async_copy.wait_group(STAGES - 1)
        part_max, part_sum = _statistics(ring, 0, cols, begin, begin + part_cols, N_CHUNKS, N_FULL, ALIGNED, OUT)
        send(mail_ptr + row * n_parts, part_max, part_sum, part)
    step = 0
    while row < n_rows:
        slot = step % STAGES
        next_row = row + n_groups
        next_begin = _place(next_row, x_row_stride, LINE, ALIGNED)[1]
        if mail_ptr is None:
            async_copy.wait_group(STAGES - 1)
            row_max, row_sum = _statistics(ring, slot, cols, begin, begin + part_cols, N_CHUNKS, N_FULL, ALIGNED, OUT)
        else:
            if next_row < n_rows:
                async_copy.wait_group(STAGES - 2)
                next_slot, next_end = (step + 1) % STAGES, next_begin + part_cols
                next_max, next_sum = _statistics(
                    ring, next_slot, cols, next_begin, next_end, N_CHUNKS, N_FULL, ALIGNED, OUT
                )
                send(mail_ptr + next_row * n_parts, next_max, next_sum, part)
            maxima, sums, parts = receive(mail_ptr + row * n_parts, n_parts, MAX_PARTS, num_warps)
            row_max, row_sum = _join(maxima, sums, parts, n_parts)
        log2_sum = gl.log2(row_sum)

        ahead = row + STAGES * n_groups
        line, ahead_begin = _place(ahead, x_row_stride, LINE, ALIGNED)
        n_vectors = gl.cdiv(ahead_begin + part_cols, VECTOR)
        # Rows of x and of the output lie alike in their vectors, if not in their cache lines.
        out_row_ptr = out_ptr + (row * n_cols - begin) // VECTOR * VECTOR + first
        for c in gl.static_range(N_CHUNKS):
            start = c * CHUNK_VECTORS
            chunk = ring.index(slot * N_CHUNKS + c)
            out = _result(_widen(chunk.load(LAYOUT), OUT), row_max, row_sum, log2_sum, OUT, IS_LOG)
            out_ptrs = out_row_ptr + c * CHUNK + cols
            if c >= N_FULL or (c == 0 and not ALIGNED):
                _store(out_ptrs, out, start + vectors, numbers, begin, begin + part_cols, VECTOR, ALIGNED)
            else:
                gl.store(out_ptrs, out)
            ptrs = x_ptr + line + first + c * CHUNK + cols
            _copy_chunk(chunk, ptrs, vectors, numbers, n_vectors - start, ahead < n_rows, c >= N_FULL)
        async_copy.commit_group()
        row, begin = next_row, next_begin
        step += 1
    async_copy.wait_group(0)


class _Cut(NamedTuple):
    """How rows are cut, and how many groups of programs, each with a row at a time, there is room for."""

    plan: _Plan
    aligned: bool  # no cache line belongs to two rows
    n_parts: int
    part_lines: int
    n_chunks: int  # of a part
    n_full: int  # of these, those that every part fills
    programs: int  # on a multiprocessor
    max_groups: int


def _cut(x: torch.Tensor, n_cols: int, row_stride: int) -> _Cut:
    row_bytes = n_cols * x.element_size()
    plan = next(plan for plan in _PLANS if row_bytes <= plan.max_row_bytes)
    aligned = row_bytes % 128 == 0 and row_stride * x.element_size() % 128 == 0
    # Parts that begin within a cache line may reach into one more.
    more_bytes = 0 if aligned else 128
    n_parts = 1 if plan.part_bytes is None else cdiv(row_bytes, plan.part_bytes - more_bytes)
    part_lines = cdiv(row_bytes, 128 * n_parts)
    n_parts = cdiv(row_bytes, part_lines * 128)
    last_bytes = row_bytes - (n_parts - 1) * part_lines * 128
    chunk_bytes = plan.num_warps * 32 * 16 * _STEPS
    n_chunks = cdiv(min(row_bytes, part_lines * 128) + more_bytes, chunk_bytes)
    programs = min(plan.programs, _SHARED_BYTES // (plan.stages * n_chunks * chunk_bytes + _OVERHEAD_BYTES))
    max_groups = programs * num_multiprocessors(x.device) // n_parts
    return _Cut(plan, aligned, n_parts, part_lines, n_chunks, last_bytes // chunk_bytes, programs, max_groups)


def supported_rows(x: torch.Tensor, n_rows: int, n_cols: int, row_stride: int) -> int:
    """How many rows, from the first, the kernel can take; none where they are too short or too few for it to pay.

    Where a row of x begins between two multiples of 16 bytes, there the row of the output must begin as well.
    """
    row_bytes = n_cols * x.element_size()
    # Below, tl's kernel keeps the row in registers. Where it cannot load 16 bytes at a time, this one is soon faster.
    long = 2 * (_LONG_16_BIT if has_fast_memory(x.device) else PACKED_COLS[0])
    at_least = {2: long if row_bytes % 16 == 0 else 8 * 1024, 4: 128 * 1024}.get(x.element_size())
    if at_least is None or n_rows == 1 or not at_least < row_bytes < 2**31:
        return 0
    if (row_stride - n_cols) * x.element_size() % 16 != 0 or x.data_ptr() % 16 != 0:
        return 0
    cut = _cut(x, n_cols, row_stride)
    if cut.max_groups == 0 or (cut.n_parts > 1 and n_rows * row_bytes < _MIN_BYTES_OF_PARTS):
        return 0
    # The kernel reads whole vectors of 16 bytes. That of the last row's end may reach past the memory of x, and so may
    # those of other rows, if rows begin less than 16 bytes apart.
    end = ((n_rows - 1) * row_stride + n_cols) * x.element_size()
    if end % 16 == 0:
        return n_rows
    return n_rows - 1 if row_stride * x.element_size() >= 16 else 0


def forward(x: torch.Tensor, out: torch.Tensor, n_rows: int, n_cols: int, row_stride: int, is_log: bool) -> None:
    """Write the softmax of the first `n_rows`, which are supported, or its logarithm, to out."""
    plan, aligned, n_parts, part_lines, n_chunks, n_full, programs, max_groups = _cut(x, n_cols, row_stride)
    in_parts = n_parts > 1
    launch(
        _softmax_resident_fwd_kernel,
        (min(n_rows, max_groups) * n_parts,),
        x, out, mailboxes(n_rows, n_parts, x.device) if in_parts else None,
        n_rows, n_parts, part_lines, n_cols, row_stride,
        VECTOR=16 // x.element_size(), CHUNK_STEPS=_STEPS, N_CHUNKS=n_chunks, N_FULL=n_full,
        STAGES=plan.stages, MAX_PARTS=max_parts(n_parts, plan.num_warps), ALIGNED=aligned, IS_LOG=is_log,
        num_warps=plan.num_warps, **(at_a_time if in_parts else registers_for)(programs, plan.num_warps),
    )  # fmt: skip
