"""How Hopper computes a product of float32 matrices: by which kernel, in which tiles, in how many parts.

Three things are decided here, from sizes, strides and alignment alone, so that equal calls give equal bits:

- Where TensorFloat-32 is allowed, large products go to the kernel that works with TMA and specialized warps. It can
  multiply them if one of the matrices at least lies along K, and all their rows begin at multiples of 16 bytes. Others
  are copied first, if that saves more than it costs.
- In full precision large products go to a kernel of their own, with TMA and specialized warps as well. One matrix is
  taken apart for it, and may lie as it likes; the other one is copied if TMA cannot address it.
- The pointer kernel takes the rest. In full precision each number is taken apart in registers there, so it does not
  matter which way a matrix lies, and odd ones, of which a load has a single number, may be copied, too. For
  TensorFloat-32 the tiles are others where a matrix lies across K.
- Where tiles would leave multiprocessors without work, be they few or the last round not full, K is cut into parts
  (*split K*).

The times were measured on an H200; they only have to put the choices into the right order.
"""

import functools
import math

import torch

from .._launch import cdiv, num_multiprocessors, scratch
from ..matmul import launch_tiles, load_width
from . import load
from .matmul import can_address, is_transposed
from .matmul_plan import copy_rows, in_parts, own_batch, sum_us

_START_US = 4
_TILE_US = 0.7  # to begin and to end 64 × 64 numbers of a result
_BYTES_PER_US = 3.4e6  # of a and b, read once, and of the result
_MAX_PARTS = 16
_PART_K = 128  # what a part of K has at least
_COPY_US = 2  # to start a copy
_COPY_BYTES_PER_US = 3.6e6  # read and written
# How much longer the pointer kernel takes where one matrix, or both, are read one number at a time.
_FULL_NARROW = {1: 1.2, 2: 2.2}
_REDUCED_NARROW = {1: 1.1, 2: 1.6}

# Of the kernel for large products in full precision: columns of a tile, how many microseconds it takes for 32 numbers
# along K, and for a tile beside that.
_BF16X6_TILES = ((128, 0.98, 2.5), (64, 0.64, 1.8))

# Rows and columns of a tile, numbers along K in a step, warps, stages, and in how many microseconds 32 numbers along K
# are done: by a program that has a multiprocessor for itself, and by one of many.
_FULL_TILES = (
    (64, 32, 64, 4, 4, 0.49, 0.37),
    (64, 64, 16, 4, 3, 0.95, 0.57),
    (64, 64, 32, 4, 4, 0.90, 0.53),
    (128, 64, 32, 4, 3, 1.40, 0.92),
)
_FULL_WIDE_TILES = (*_FULL_TILES, (128, 128, 32, 8, 3, 1.90, 1.72))  # of narrower loads the last would spill 300 bytes
_FULL_THIN_TILES = ((16, 32, 64, 4, 4, 0.38, 0.12),)
# Of many small matrices that are read 4 or 8 bytes at a time.
_FULL_NARROW_TILES = _FULL_TILES[1:2]
_REDUCED_TILES = (
    (64, 32, 64, 4, 4, 0.20, 0.15),
    (64, 64, 64, 4, 4, 0.28, 0.25),
    (64, 64, 32, 4, 4, 0.42, 0.21),
)
_REDUCED_THIN_TILES = ((16, 32, 64, 4, 4, 0.20, 0.10),)
# Of matrices that do not lie along K. Tiles of 64 rows would be transposed in registers.
_ACROSS_TILES = ((32, 32, 32, 4, 4, 0.35, 0.115),)


def _memory_us(M: int, N: int, K: int, n_matrices: int) -> float:
    return 4 * n_matrices * (M * K + K * N + M * N) / _BYTES_PER_US


@functools.lru_cache(4096)
def _pointer_plan(
    M: int, N: int, K: int, n_matrices: int, tiles: tuple, device: torch.device
) -> tuple[float, int, dict[str, int]]:
    """How long the quickest way should take by one of these tiles, its parts of K, and its blocks, warps and stages."""
    n_processors = num_multiprocessors(device)
    # Parts begin where rows do: at the same alignment, as far as the compiler knows it.
    unit = math.gcd(K, 16)
    most = min(_MAX_PARTS, K // _PART_K) if n_matrices == 1 else 1
    all_parts = [n for n in range(1, max(1, most) + 1) if K % (n * unit) == 0]
    found = []
    for block_m, block_n, block_k, num_warps, num_stages, alone_us, among_us in tiles:
        if block_m < block_n and M > N:
            block_m, block_n = block_n, block_m
        n_tiles = n_matrices * cdiv(M, block_m) * cdiv(N, block_n)
        for n_parts in all_parts:
            steps = cdiv(K, n_parts * block_k) * block_k / 32
            rounds = cdiv(n_tiles * n_parts, n_processors)
            among_others_us = rounds * (steps * among_us + _TILE_US * block_m * block_n / 64**2)
            us = max(steps * alone_us, among_others_us, _memory_us(M, N, K, n_matrices)) + sum_us(n_parts, M * N)
            config = dict(
                BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8, num_warps=num_warps, num_stages=num_stages
            )
            found.append((_START_US + us, n_parts, config))
    return min(found, key=lambda plan: plan[0])


@functools.lru_cache(4096)
def _bf16x6_plan(M: int, N: int, K: int, n_matrices: int, device: torch.device) -> tuple[float, int, int]:
    """How long `matmul_bf16x6` should take at best, less what comes before it; columns of a tile, parts of K."""
    n_processors = num_multiprocessors(device)
    found = []
    for block_n, step_us, tile_us in _BF16X6_TILES:
        n_tiles = n_matrices * cdiv(M, 128) * cdiv(N, block_n)
        for n_parts in range(1, max(1, min(_MAX_PARTS, K // _PART_K) if n_matrices == 1 else 1) + 1):
            rounds = cdiv(n_tiles * n_parts, n_processors)
            busy_us = rounds * (cdiv(K, n_parts * 32) * step_us + tile_us)
            us = max(busy_us, _memory_us(M, N, K, n_matrices)) + sum_us(n_parts, M * N)
            found.append((_START_US + us, block_n, n_parts))
    return min(found)


def _apart_us(x: torch.Tensor, sizes: tuple, strides: tuple) -> float:
    """How long it takes to take matrices apart: 4 bytes of each number are read and 6 written."""
    return _copy_us(x, sizes, strides) * 10 / 8


def _preparations(rows: list[tuple[torch.Tensor, tuple, tuple]], left: int) -> tuple[int, bool, float]:
    """What comes before `matmul_bf16x6`, if this matrix is the left one: whether it is copied, and how long all takes.

    Of two ways that take as long, the one with the left matrix along K should be chosen, so the other one is longer.
    """
    x, sizes, strides = rows[left]
    copied = len(sizes) > 1 or not can_address(x, strides[0])
    ahead_us = _apart_us(*rows[1 - left]) + (_copy_us(*rows[left]) if copied else 0)
    return left, copied, ahead_us + (0.1 if is_transposed(x) else 0)


def _are_copied(rows: list[tuple[torch.Tensor, tuple, tuple]]) -> list[bool]:
    """Which matrices are copied for TMA: those that it cannot address, and of two that lie across K the smaller one."""
    copied = [len(sizes) > 1 or not can_address(x, strides[0]) for x, sizes, strides in rows]
    if not any(copied) and all(is_transposed(x) for x, _, _ in rows):
        a_us, b_us = (_copy_us(*x) for x in rows)
        copied = [a_us <= b_us, a_us > b_us]
    return copied


def _copy_us(x: torch.Tensor, sizes: tuple, strides: tuple) -> float:
    if 0 in strides and sizes != (1,):
        return math.inf  # a matrix that serves some of the products would be copied for each of them
    return _COPY_US + 8 * math.prod(sizes) * x.shape[-2:].numel() / _COPY_BYTES_PER_US


def _copied(x: torch.Tensor, sizes: tuple, strides: tuple) -> tuple[torch.Tensor, int]:
    """Dense copies, with zeros up to a multiple of 32 columns, and how far they lie apart: 0, if one serves all."""
    n_rows, n_cols = x.shape[-2:]
    copies = scratch((math.prod(sizes), n_rows, cdiv(n_cols, 32) * 32), x.dtype, x.device)
    copy_rows(x, copies, sizes, strides)
    return copies, copies.stride(0) if any(strides) else 0


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    pre: torch.Tensor | None,
    activation: str | None,
    reduced: bool,
    batch: tuple,
) -> None:
    """Write activation(a @ b + bias) to out, and the values before the activation to pre.

    `batch` is what `collapse` gives for the batch dimensions: their sizes, then the strides of a and of b.
    """
    (M, N), K = out.shape[-2:], a.shape[-1]
    n_matrices = out.numel() // (M * N)
    is_thin = min(M, N) <= 16
    widths = [load_width(x) for x in (a, b)]
    if is_thin:
        tiles = _REDUCED_THIN_TILES if reduced else _FULL_THIN_TILES
    elif not reduced:
        if min(widths) == 16:
            tiles = _FULL_WIDE_TILES
        else:
            tiles = _FULL_NARROW_TILES if n_matrices > 1 and min(widths) < 4 else _FULL_TILES
    else:
        tiles = _REDUCED_TILES if a.stride(-1) == b.stride(-2) == 1 else _ACROSS_TILES
    pointers_us, n_parts, config = _pointer_plan(M, N, K, n_matrices, tiles, a.device)
    pointers_us *= (_REDUCED_NARROW if reduced else _FULL_NARROW).get(widths.count(1), 1)
    if reduced and min(widths) in (4, 8):
        # Lengths that are no multiples of 16 cost some 15 % more than the table's, which are.
        pointers_us += 0.15 * (pointers_us - _START_US)

    # Both with rows along K, each with the batch dimensions that are its own.
    rows = [(x, *own_batch(batch[0], strides)) for x, strides in zip((a, b.mT), batch[1], strict=True)]
    specialized = load("matmul_specialized") if reduced and K > 0 else None
    if specialized is not None:
        operations = 2 * n_matrices * cdiv(M, 128) * 128 * cdiv(N, 128) * 128 * (K + 64)
        # A long K is cut into parts where there are few tiles.
        least_us = (K if K < 2048 else 1024) / 150
        tma_us = max(operations / 380e6, _memory_us(M, N, K, n_matrices), least_us) + 5.5
        are_copied = _are_copied(rows)
        if tma_us + sum(_copy_us(*x) for x, copied in zip(rows, are_copied, strict=True) if copied) < pointers_us:
            (a, a_stride), (b, b_stride) = (
                _copied(*x) if copied else (x[0], x[2][0]) for x, copied in zip(rows, are_copied, strict=True)
            )
            batch = (n_matrices,), [(a_stride,), (b_stride,)]
            specialized.multiply(a[..., :K], b[..., :K].mT, bias, out, pre, activation, reduced, batch)
            return
    elif not reduced and not is_thin and n_matrices * M * N * K >= 2**23:
        # Smaller ones would be done before their preparations are.
        bf16x6 = load("matmul_bf16x6") if K >= 16 else None
        if bf16x6 is not None:
            left, copied, ahead_us = min((_preparations(rows, left) for left in (0, 1)), key=lambda way: way[2])
            sizes = (M, N) if left == 0 else (N, M)
            us, block_n, n_k_parts = _bf16x6_plan(*sizes, K, n_matrices, a.device)
            if ahead_us + us < pointers_us:
                x, stride = _copied(*rows[left]) if copied else (rows[left][0], rows[left][2][0])
                right, *right_batch = rows[1 - left]
                bf16x6.multiply(
                    x[..., :K], right.mT, bias, out, pre, activation, stride, right_batch, block_n, n_k_parts, left == 1
                )
                return
        if 1 in widths:
            padded_k = cdiv(K, 32) * 32
            copied_us, *plan = _pointer_plan(M, N, padded_k, n_matrices, _FULL_TILES, a.device)
            if copied_us + sum(_copy_us(*x) for x in rows) < pointers_us:
                (a, a_stride), (b, b_stride) = (_copied(*x) for x in rows)
                b = b.mT
                batch = (n_matrices,), [(a_stride,), (b_stride,)]
                n_parts, config = plan
    tiles_of = functools.partial(launch_tiles, reduced=reduced, config=config)
    in_parts(tiles_of, n_parts, a, b, bias, out, pre, activation, batch)
