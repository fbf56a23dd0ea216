"""What layer norm and softmax's gradient share on Hopper: rows, or their parts, waiting in shared memory in chunks.

All columns of a part count from the vector of 16 bytes in which it begins; its numbers are those from `begin` to `end`.
"""

import math
from typing import NamedTuple

import torch

from .._launch import cdiv
from ._gluon import async_copy, async_copy_to_shared, gl, gluon


@gluon.jit
def row_begin(row, row_stride, VECTOR: gl.constexpr, ALIGNED: gl.constexpr):
    """Where in its first vector of 16 bytes a row begins."""
    if ALIGNED:
        return 0
    else:
        return (row * row_stride % VECTOR).to(gl.int32)


@gluon.jit
def row_ptr(ptr, row, row_stride, VECTOR: gl.constexpr):
    """The vector of 16 bytes in which a row begins."""
    return ptr + row * row_stride // VECTOR * VECTOR


@gluon.jit
def whole_vectors(cols, begin, end, VECTOR: gl.constexpr, ALIGNED: gl.constexpr):
    """Which columns lie in vectors that are all of a part. In this form masks keep copies and stores 16 bytes wide."""
    vectors = cols // VECTOR * VECTOR
    if ALIGNED:
        return vectors < end
    else:
        return (vectors >= begin) & (vectors + VECTOR <= end)


@gluon.jit
def copy_chunk(
    smem, slot, x_part_ptr, c: gl.constexpr, cols, begin, end, row, n_rows,
    VECTOR: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Start the copy of the whole vectors of chunk c of a part of a row, if that row exists."""
    cols = c * cols.shape[0] + cols
    mask = (row < n_rows) & (cols >= 0)  # the second is always true, and gives the first the shape of the chunk
    if c >= N_FULL or (c == 0 and not ALIGNED):
        mask = mask & whole_vectors(cols, begin, end, VECTOR, ALIGNED)
    async_copy_to_shared(smem.index(slot), x_part_ptr + cols, mask=mask)


@gluon.jit
def copy_two(
    x_smem, dy_smem, slot, x_part_ptr, dy_part_ptr, x_row_stride, dy_row_stride, cols, begin, end, row, n_rows,
    VECTOR: gl.constexpr, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Start the copies of a part of a row of two tensors, x and dy, if that row exists."""
    x_part_ptr = row_ptr(x_part_ptr, row, x_row_stride, VECTOR)
    dy_part_ptr = row_ptr(dy_part_ptr, row, dy_row_stride, VECTOR)
    for c in gl.static_range(N_CHUNKS):
        copy_chunk(x_smem, slot * N_CHUNKS + c, x_part_ptr, c, cols, begin, end, row, n_rows, VECTOR, N_FULL, ALIGNED)
        copy_chunk(dy_smem, slot * N_CHUNKS + c, dy_part_ptr, c, cols, begin, end, row, n_rows, VECTOR, N_FULL, ALIGNED)
    async_copy.commit_group()


@gluon.jit
def clear(
    smem, cols, STAGES: gl.constexpr, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr
):  # fmt: skip
    """Fill with 0 the chunks that parts may leave gaps in: it stays wherever no copy writes."""
    for k in gl.static_range(STAGES):
        for c in gl.static_range(N_CHUNKS):
            if c >= N_FULL or (c == 0 and not ALIGNED):
                zeros = gl.full([cols.shape[0]], 0.0, smem.dtype, cols.type.layout)
                smem.index(k * N_CHUNKS + c).store(zeros)


@gluon.jit
def one_by_one(cols, ALIGNED: gl.constexpr):
    """The columns in the order in which threads move what all rows share: one by one where vectors do not fit it.

    Then neighbours are moved by neighbouring threads. A thread that moved eight by itself would touch as many sectors
    of memory with each.
    """
    if ALIGNED:
        return cols
    else:
        return gl.arange(0, cols.shape[0], gl.BlockedLayout([1], [32], cols.type.layout.warps_per_cta, [0]))


@gluon.jit
def in_part(cols, begin, end, VECTOR: gl.constexpr, ALIGNED: gl.constexpr):
    """Which columns are a part's."""
    if ALIGNED:
        # Whole vectors, and a mask that says so keeps loads and stores 16 bytes wide.
        return cols // VECTOR * VECTOR < end
    else:
        return (cols >= begin) & (cols < end)


@gluon.jit
def load_shared(ptr, cols, begin, end, VECTOR: gl.constexpr, N_CHUNKS: gl.constexpr, ALIGNED: gl.constexpr):
    """Load the part of weight or bias that belongs to a part of all rows, chunk by chunk; nothing without either."""
    chunks = ()
    if ptr is not None:
        for c in gl.static_range(N_CHUNKS):
            apart = c * cols.shape[0] + one_by_one(cols, ALIGNED)
            chunks += (gl.load(ptr + apart, mask=in_part(apart, begin, end, VECTOR, ALIGNED), other=0.0),)
    return chunks


@gluon.jit
def store_chunk(
    part_ptr, out, c: gl.constexpr, cols, begin, end,
    VECTOR: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Store the whole vectors of chunk c of a part."""
    cols = c * cols.shape[0] + cols
    mask = None
    if c >= N_FULL or (c == 0 and not ALIGNED):
        mask = whole_vectors(cols, begin, end, VECTOR, ALIGNED)
    gl.store(part_ptr + cols, out.to(part_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def find_ends(cols, begin, end, VECTOR: gl.constexpr):
    """The columns of a part outside its whole vectors, one for each of the first threads; and which threads have one.

    What lies there is loaded, computed and stored by itself.
    """
    i = gl.arange(0, cols.shape[0] // VECTOR, gl.BlockedLayout([1], [32], cols.type.layout.warps_per_cta, [0]))
    ends = gl.where(i < VECTOR, i, end // VECTOR * VECTOR + i - VECTOR)
    of_part = (ends >= begin) & (ends < end) & ((i >= VECTOR) | (begin > 0)) & (i < 2 * VECTOR)
    return ends, of_part


@gluon.jit
def load_ends(part_ptr, ends, mask):
    """The numbers at the ends of a part, and 0 for all other threads."""
    return gl.load(part_ptr + ends, mask=mask, other=0.0)


@gluon.jit
def load_two_ends(
    x_part_ptr, dy_part_ptr, row, n_rows, x_row_stride, dy_row_stride, ends, of_part, VECTOR: gl.constexpr
):  # fmt: skip
    """The numbers of two tensors, x and dy, at the ends of a part of a row, if that row exists."""
    mask = of_part & (row < n_rows)
    x = load_ends(row_ptr(x_part_ptr, row, x_row_stride, VECTOR), ends, mask)
    dy = load_ends(row_ptr(dy_part_ptr, row, dy_row_stride, VECTOR), ends, mask)
    return x, dy.to(gl.float32)


@gluon.jit
def sum_by_vector(x, VECTOR: gl.constexpr):
    """The sums of the vectors of a chunk."""
    sums = gl.sum(x.reshape([x.shape[0] // VECTOR, VECTOR]), 1)
    return gl.convert_layout(sums, gl.BlockedLayout([1], [32], x.type.layout.warps_per_cta, [0]))


class Plan(NamedTuple):
    """How rows are cut, and how many groups of programs, each with a row at a time, there is room for."""

    aligned: bool  # all rows begin with a vector of 16 bytes
    n_parts: int
    part_cols: int
    n_chunks: int  # of a part
    max_groups: int


def cut(n_cols: int, max_cols: int, unit: int, vector: int) -> tuple[int, int]:
    """Into how many parts to cut a row, and their columns: equal multiples of `unit`, but for the last part.

    None is shorter than a vector. One that began and ended within the same vector would have two threads for each of
    its numbers in `find_ends`.
    """
    n_parts = cdiv(n_cols, max_cols)
    while True:
        part_cols = cdiv(n_cols, unit * n_parts) * unit
        n_last = (n_cols - 1) % part_cols + 1
        if n_last >= vector or part_cols >= n_cols:
            return cdiv(n_cols, part_cols), part_cols
        n_parts += 1


def pays(x: torch.Tensor, aligned: bool, long: int, long_unaligned: int, n_bytes: int) -> bool:
    """Whether rows of x are so long, or so long and so many, that the kernels here are the faster ones."""
    return x.shape[1] > long or (not aligned and x.shape[1] > long_unaligned and x.nbytes >= n_bytes)


def count_groups(max_programs: int, n_parts: int, n_cols: int, vector: int) -> int:
    """How many groups there is room for, if all rows of each are to begin at the same place in a vector."""
    period = vector // math.gcd(n_cols, vector)
    return max_programs // n_parts // period * period
