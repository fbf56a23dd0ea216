"""Softmax backward of long rows, in Gluon: parts of a row on several multiprocessors.

A row is cut into parts, one for each program: see ``exchange``. Each adds up its share of the row's sum, and with the
sum of all parts writes its share of the gradient. In between its numbers wait in shared memory, where the next rows
arrive meanwhile.
"""

import torch

from .._launch import cdiv, launch, num_multiprocessors
from .._vectors import rows_begin_alike
from ._gluon import async_copy, gl, gluon
from .exchange import at_a_time, mailboxes, max_parts, receive, send
from .layer_norm_rows import (
    Plan,
    clear,
    copy_two,
    count_groups,
    cut,
    find_ends,
    load_two_ends,
    row_begin,
    row_ptr,
    store_chunk,
    sum_by_vector,
)

# A part is a warp's: this much of a row of y, and of dy, in chunks of so many vectors of 16 bytes for each thread.
_PART_BYTES = 4 * 1024
_STEPS = 2
# Rows in shared memory: one that is written, one that is added up, one on its way; and programs of a multiprocessor.
_STAGES = 3
_PROGRAMS = 9


@gluon.jit
def _summand(y, dy, IS_LOG: gl.constexpr):
    return dy if IS_LOG else dy * y


@gluon.jit
def _gradient(y, dy, row_sum, IS_LOG: gl.constexpr):
    return dy - gl.exp(y) * row_sum if IS_LOG else y * (dy - row_sum)


@gluon.jit
def _load_chunk(y_smem, dy_smem, place, LAYOUT: gl.constexpr):
    return y_smem.index(place).load(LAYOUT).to(gl.float32), dy_smem.index(place).load(LAYOUT).to(gl.float32)


@gluon.jit
def _part_sum(
    y_smem, dy_smem, slot, y_ends, dy_ends, cols,
    VECTOR: gl.constexpr, N_CHUNKS: gl.constexpr, ALIGNED: gl.constexpr, IS_LOG: gl.constexpr,
):  # fmt: skip
    """What a part adds to a row's sum. Outside of its whole vectors, y and dy are 0."""
    LAYOUT: gl.constexpr = cols.type.layout
    total = gl.zeros([cols.shape[0]], gl.float32, LAYOUT)
    for c in gl.static_range(N_CHUNKS):
        y, dy = _load_chunk(y_smem, dy_smem, slot * N_CHUNKS + c, LAYOUT)
        total += _summand(y, dy, IS_LOG)
    if not ALIGNED:
        total = sum_by_vector(total, VECTOR) + _summand(y_ends.to(gl.float32), dy_ends, IS_LOG)
    return gl.sum(total, 0)


@gluon.jit(do_not_specialize=["n_rows", "n_parts"])
def _softmax_resident_bwd_kernel(
    y_ptr,  # (n_rows, n_cols), 16-byte aligned
    dy_ptr,  # (n_rows, n_cols), 16-byte aligned
    dx_ptr,  # (n_rows, n_cols), contiguous; its rows, and those of dy, begin where in a vector those of y do
    mail_ptr,  # (n_rows, n_parts)
    n_rows,
    n_parts,
    part_cols,  # columns of a part; the last one may have fewer
    n_cols,
    y_row_stride,
    dy_row_stride,
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    CHUNK_STEPS: gl.constexpr,  # vectors per thread in a chunk
    N_CHUNKS: gl.constexpr,  # chunks of a part
    N_FULL: gl.constexpr,  # of these, those that every part fills
    STAGES: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    ALIGNED: gl.constexpr,  # all rows begin with a vector; if not, those of a program begin at the same place in one
    IS_LOG: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Programs i * n_parts to (i + 1) * n_parts - 1 own rows i, i + n_groups, ..., one part each.

    dx = y * (dy - sum(dy * y)), or dy - exp(y) * sum(dy) for the logarithm. What a part adds to the sum of a row is
    sent before the row ahead of it is written, and asked for after that: so the other parts' have had the time of a
    whole row to come.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [num_warps], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CHUNK: gl.constexpr = CHUNK_STEPS * 32 * num_warps * VECTOR
    y_smem = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    cols = gl.arange(0, CHUNK, LAYOUT)
    part = gl.program_id(0) % n_parts
    row = (gl.program_id(0) // n_parts).to(gl.int64)
    n_groups = gl.num_programs(0) // n_parts
    # From the vector in which a part begins, its numbers are those from `begin` to `end`.
    first = part * part_cols
    begin = row_begin(row, y_row_stride, VECTOR, ALIGNED)
    end = begin + gl.minimum(n_cols - first, part_cols)
    y_ptr += first
    dy_ptr += first
    dx_ptr += first
    clear(y_smem, cols, STAGES, N_CHUNKS, N_FULL, ALIGNED)
    clear(dy_smem, cols, STAGES, N_CHUNKS, N_FULL, ALIGNED)
    for k in gl.static_range(STAGES - 1):
        copy_two(
            y_smem, dy_smem, k, y_ptr, dy_ptr, y_row_stride, dy_row_stride, cols, begin, end, row + k * n_groups,
            n_rows, VECTOR, N_CHUNKS, N_FULL, ALIGNED,
        )  # fmt: skip
    # What is loaded one by one is asked for two rows ahead of its gradient.
    ends, of_part = find_ends(cols, begin, end, VECTOR)
    ENDS: gl.constexpr = ends.type.layout
    y_ends = gl.zeros([CHUNK // VECTOR], y_ptr.dtype.element_ty, ENDS)
    dy_ends = gl.zeros([CHUNK // VECTOR], gl.float32, ENDS)
    next_y_ends, next_dy_ends = y_ends, dy_ends
    if not ALIGNED:
        y_ends, dy_ends = load_two_ends(y_ptr, dy_ptr, row, n_rows, y_row_stride, dy_row_stride, ends, of_part, VECTOR)
        next_y_ends, next_dy_ends = load_two_ends(
            y_ptr, dy_ptr, row + n_groups, n_rows, y_row_stride, dy_row_stride, ends, of_part, VECTOR
        )
    async_copy.wait_group(STAGES - 2)
    part_sum = _part_sum(y_smem, dy_smem, 0, y_ends, dy_ends, cols, VECTOR, N_CHUNKS, ALIGNED, IS_LOG)
    send(mail_ptr + row * n_parts, part_sum, part_sum, part)
    step = 0
    while row < n_rows:
        next_row = row + n_groups
        ahead = row + (STAGES - 1) * n_groups
        copy_two(
            y_smem, dy_smem, (step + STAGES - 1) % STAGES, y_ptr, dy_ptr, y_row_stride, dy_row_stride, cols, begin, end,
            ahead, n_rows, VECTOR, N_CHUNKS, N_FULL, ALIGNED,
        )  # fmt: skip
        ahead_y_ends, ahead_dy_ends = next_y_ends, next_dy_ends
        if not ALIGNED:
            ahead_y_ends, ahead_dy_ends = load_two_ends(
                y_ptr, dy_ptr, next_row + n_groups, n_rows, y_row_stride, dy_row_stride, ends, of_part, VECTOR
            )
        async_copy.wait_group(STAGES - 2)
        if next_row < n_rows:
            part_sum = _part_sum(
                y_smem, dy_smem, (step + 1) % STAGES, next_y_ends, next_dy_ends, cols, VECTOR, N_CHUNKS, ALIGNED, IS_LOG
            )
            send(mail_ptr + next_row * n_parts, part_sum, part_sum, part)
        sums, _, parts = receive(mail_ptr + row * n_parts, n_parts, MAX_PARTS, num_warps)
        row_sum = gl.sum(gl.where(parts < n_parts, sums, 0.0), 0)
        dx_part_ptr = row_ptr(dx_ptr, row, n_cols, VECTOR)
        for c in gl.static_range(N_CHUNKS):
            y, dy = _load_chunk(y_smem, dy_smem, step % STAGES * N_CHUNKS + c, LAYOUT)
            dx = _gradient(y, dy, row_sum, IS_LOG)
            store_chunk(dx_part_ptr, dx, c, cols, begin, end, VECTOR, N_FULL, ALIGNED)
        if not ALIGNED:
            dx_ends = _gradient(y_ends.to(gl.float32), dy_ends, row_sum, IS_LOG)
            gl.store(dx_part_ptr + ends, dx_ends.to(dx_ptr.dtype.element_ty), mask=of_part)
        y_ends, dy_ends = next_y_ends, next_dy_ends
        next_y_ends, next_dy_ends = ahead_y_ends, ahead_dy_ends
        row = next_row
        step += 1
    async_copy.wait_group(0)


def plan_backward(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> Plan | None:
    """How to cut these rows; None where the kernel cannot take them, or does not pay."""
    (n_rows, n_cols), size = y.shape, y.element_size()
    vector = 16 // size
    if size > 4 or n_rows == 1 or n_cols * size >= 2**31:
        return None
    if not rows_begin_alike(vector, n_cols, y, dy, dx):
        return None
    aligned = n_cols % vector == 0
    # Parts of aligned rows are whole cache lines; Triton moves whole vectors where it sees a multiple of 16.
    late, unit = (0, 64) if aligned else (vector - 1, 16)
    n_parts, part_cols = cut(n_cols, (_PART_BYTES // size - late) // unit * unit, unit, vector)
    n_chunks = cdiv(part_cols + late, _STEPS * 32 * vector)
    max_groups = count_groups(_PROGRAMS * num_multiprocessors(y.device), n_parts, n_cols, vector)
    return Plan(aligned, n_parts, part_cols, n_chunks, max_groups) if max_groups > 0 else None


def backward(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, is_log: bool, plan: Plan) -> None:
    """Write the gradient dx of softmax, or of its logarithm, whose result is y."""
    n_rows, n_cols = y.shape
    aligned, n_parts, part_cols, n_chunks, max_groups = plan
    vector = 16 // y.element_size()
    launch(
        _softmax_resident_bwd_kernel, (min(n_rows, max_groups) * n_parts,),
        y, dy, dx, mailboxes(n_rows, n_parts, y.device),
        n_rows, n_parts, part_cols, n_cols, y.stride(0), dy.stride(0),
        VECTOR=vector, CHUNK_STEPS=_STEPS, N_CHUNKS=n_chunks,
        N_FULL=(n_cols - (n_parts - 1) * part_cols) // (_STEPS * 32 * vector), STAGES=_STAGES,
        MAX_PARTS=max_parts(n_parts, 1), ALIGNED=aligned, IS_LOG=is_log, num_warps=1, **at_a_time(_PROGRAMS, 1),
    )  # fmt: skip
