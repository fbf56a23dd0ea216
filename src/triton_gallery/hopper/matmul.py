"""Matrix multiplication on Hopper: tiles come and go by TMA, and each program stays to compute one tile after another.

A tensor descriptor tells the tensor memory accelerator (TMA) where a matrix lies. One instruction then copies a whole tile
into shared memory, in the order of bytes that the matrix unit reads, without a register or an address per element.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._launch import launch, num_multiprocessors
from ..matmul import _activate, _grouped_tile

# Rows and columns of a tile, its warps and stages, and the share of the best tile's rate that it reaches. Small tiles read
# their inputs more often, but let a small product occupy the whole GPU.
_TILES = (
    (128, 256, 8, 3, 1.0),
    (128, 128, 8, 4, 0.85),
    (64, 128, 4, 4, 0.65),
    (64, 64, 4, 4, 0.4),
)


@triton.jit(do_not_specialize=["M", "N", "K"])
def _matmul_tma_kernel(
    a_desc,  # (batch, M, K), or (batch, K, M) when A_TRANSPOSED
    b_desc,  # (batch, K, N), or (batch, N, K) when B_TRANSPOSED
    bias_ptr,  # (N,) or None
    out_desc,  # (batch, M, N)
    pre_desc,  # like out, for the values before the activation, or None
    n_matrices,
    M,
    N,
    K,
    stride_bias,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MAX_NUM_IMPRECISE_ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Program i owns output tiles i, i + programs, i + 2 * programs, ...: out = activation(a @ b + bias)."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    n_steps = tl.cdiv(K, BLOCK_K)
    # Flattened into one loop over all steps of all tiles, the next tile's first copies start under this one's epilogue.
    for i in tl.range(tl.program_id(0), n_matrices * tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        batch = i // (tiles_m * tiles_n)
        tile_m, tile_n = _grouped_tile(i % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(n_steps):
            # What lies past the end of a matrix arrives as 0.
            if A_TRANSPOSED:
                a = a_desc.load([batch, step * BLOCK_K, row]).reshape(BLOCK_K, BLOCK_M).T
            else:
                a = a_desc.load([batch, row, step * BLOCK_K]).reshape(BLOCK_M, BLOCK_K)
            if B_TRANSPOSED:
                b = b_desc.load([batch, col, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T
            else:
                b = b_desc.load([batch, step * BLOCK_K, col]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=MAX_NUM_IMPRECISE_ACC)
        if bias_ptr is not None:
            cols = col + tl.arange(0, BLOCK_N)
            bias = tl.load(bias_ptr + cols.to(tl.int64) * stride_bias, mask=cols < N, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if pre_desc is not None:
            pre_desc.store([batch, row, col], acc.to(pre_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
        out = _activate(acc, ACTIVATION)
        out_desc.store([batch, row, col], out.to(out_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
