"""Rows that begin anywhere, moved 16 bytes at a time.

A thread loads a *vector* of 16 bytes at once, from an address that is a multiple of 16. A row that is no whole number
of vectors long begins and ends inside one. Such vectors are loaded whole, for the row that ends there and for the row
that begins there, and each takes its own numbers out of them. Rows that are a multiple of VECTOR apart begin at the
same place in a vector; a program takes only rows that do.
"""

import torch
import triton
import triton.language as tl


def rows_begin_alike(vector: int, n_cols: int, *tensors: torch.Tensor) -> bool:
    """Whether row i of n_cols numbers begins at the same place in a vector in all of these and in what is made of them.

    A vector is so many numbers, which must be as wide in all of them. One in which a row ends must hold nothing but
    that row and the next.
    """
    return all(
        x.element_size() == tensors[0].element_size()
        and x.data_ptr() % 16 == 0
        and x.stride(1) == 1
        and (x.stride(0) - n_cols) % vector == 0
        and (x.stride(0) == 0 or x.stride(0) >= vector)
        for x in tensors
    )


@triton.jit
def row_begin(row, row_stride, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Where in its first vector a row begins."""
    if ALIGNED:
        return 0
    else:
        return (row * row_stride % VECTOR).to(tl.int32)


@triton.jit
def row_vectors(ptr, rows, row_stride, VECTOR: tl.constexpr):
    """The vectors in which rows begin."""
    return ptr + (rows * row_stride // VECTOR * VECTOR)[:, None]


@triton.jit
def load_vectors(
    row_ptrs,
    row_mask,
    cols,
    begin,
    end,
    VECTOR: tl.constexpr,
    IS_FULL: tl.constexpr,
    IS_LAST_ROW: tl.constexpr,
    other,
):
    """Load a block of columns, counted from the vectors in which rows begin; `other` for vectors of other rows."""
    mask = row_mask[:, None]
    if IS_LAST_ROW:
        # The vector in which the last row ends may reach past the memory of x.
        mask = mask & ((cols >= begin) & (cols < end))[None, :]
    elif not IS_FULL:
        # A vector has a part in the row or none, and a mask that says so keeps the loads 16 bytes wide.
        mask = mask & (cols // VECTOR * VECTOR < end)[None, :]
    return tl.load(row_ptrs + cols[None, :], mask=mask, other=other)


@triton.jit
def inside(x, cols, begin, end, IS_FULL: tl.constexpr, other):
    """A block with `other` for all that is not of its row: nothing promises what lies there."""
    if not IS_FULL:
        x = tl.where(((cols >= begin) & (cols < end))[None, :], x, other)
    return x


@triton.jit
def store_vectors(
    row_ptrs,
    out,
    row_mask,
    cols,
    begin,
    end,
    VECTOR: tl.constexpr,
    IS_FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store a block of columns: whole vectors at once, and what rows have of their first and last one by one."""
    out = out.to(row_ptrs.dtype.element_ty)
    mask = row_mask[:, None]
    if not IS_FULL:
        vectors = cols // VECTOR * VECTOR
        whole = (vectors >= begin) & (vectors + VECTOR <= end)
        if not ALIGNED:
            rest = (cols >= begin) & (cols < end) & ~whole
            tl.store(row_ptrs + cols[None, :], out, mask=mask & rest[None, :])
        mask = mask & whole[None, :]
    tl.store(row_ptrs + cols[None, :], out, mask=mask)
