"""Matrix multiplication for Hopper: tiles come and go by TMA, and a program computes one output tile after another.

A tensor descriptor tells the tensor memory accelerator (TMA) where a matrix lies. One instruction then copies a whole
tile into shared memory, in the order of bytes that the matrix unit reads, with no register or address per element.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._launch import cdiv, descriptor, launch, num_multiprocessors
from ..matmul import FLOAT8, _activate, _grouped_tile


@triton.jit(do_not_specialize=["n_matrices", "M", "N", "K", "a_step", "b_step"])
def _matmul_tma_kernel(
    a_desc,  # (n_matrices or 1, M, K), or (..., K, M) when A_TRANSPOSED
    b_desc,  # (n_matrices or 1, K, N), or (..., N, K) when B_TRANSPOSED
    bias_ptr,  # (N,) or None
    out_desc,  # (n_matrices, M, N)
    pre_desc,  # like out, for the values before the activation, or None
    n_matrices,
    M,
    N,
    K,
    a_step,  # 1, or 0 where one a serves the whole batch
    b_step,
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
    """Program i owns output tiles i, i + n_programs, i + 2 * n_programs, ...: out = activation(a @ b + bias)."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    n_tiles = n_matrices * tiles_m * tiles_n
    # Flattened into one loop over the steps of all tiles, so that the next tile's copies start during the epilogue.
    for i in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), flatten=True):
        batch = i // (tiles_m * tiles_n)
        tile_m, tile_n = _grouped_tile(i % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            # What lies past the end of a matrix arrives as 0, which adds nothing.
            if A_TRANSPOSED:
                a = a_desc.load([batch * a_step, k, row]).reshape(BLOCK_K, BLOCK_M).T
            else:
                a = a_desc.load([batch * a_step, row, k]).reshape(BLOCK_M, BLOCK_K)
            if B_TRANSPOSED:
                b = b_desc.load([batch * b_step, col, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                b = b_desc.load([batch * b_step, k, col]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=MAX_NUM_IMPRECISE_ACC)

        # The tile leaves in two halves: they need half the shared memory and, with an activation, fewer registers.
        left, right = tl.split(acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1))
        for half in tl.static_range(2):
            pre = left if half == 0 else right
            first = col + half * (BLOCK_N // 2)
            if bias_ptr is not None:
                cols = first + tl.arange(0, BLOCK_N // 2)
                bias = tl.load(bias_ptr + cols.to(tl.int64) * stride_bias, mask=cols < N, other=0.0)
                pre += bias.to(tl.float32)[None, :]
            if pre_desc is not None:
                pre_desc.store([batch, row, first], pre.to(pre_desc.dtype).reshape(1, BLOCK_M, BLOCK_N // 2))
            out = _activate(pre, ACTIVATION, out_desc.dtype)
            out_desc.store([batch, row, first], out.to(out_desc.dtype).reshape(1, BLOCK_M, BLOCK_N // 2))


def is_transposed(x: torch.Tensor) -> bool:
    """Whether x is contiguous along its last dimension but one, and not along the last."""
    return x.stride(-1) != 1 and x.stride(-2) == 1


def can_address(x: torch.Tensor, batch_stride: int) -> bool:
    """TMA wants one dimension contiguous, the other strides in steps of 16 bytes, and a start at such a step."""
    inner, outer = (-2, -1) if is_transposed(x) else (-1, -2)
    return (
        x.stride(inner) == 1
        and x.stride(outer) >= x.shape[inner]
        and all(stride * x.element_size() % 16 == 0 for stride in (x.stride(outer), batch_stride))
        and x.data_ptr() % 16 == 0
    )


def supports(a: torch.Tensor, b: torch.Tensor, batch: tuple) -> bool:
    """Whether TMA can bring these matrices to the matrix unit.

    `batch` is what `collapse` gives for the batch dimensions: their sizes, then the strides of a and of b.
    """
    sizes, strides = batch
    if len(sizes) > 1:
        return False
    a_stride, b_stride = (stride[0] if sizes[0] > 1 else 0 for stride in strides)
    if a.dtype in FLOAT8:
        # The matrix unit reads float8 only along K.
        fits = not is_transposed(a) and is_transposed(b)
    else:
        fits = a.dtype in (torch.float16, torch.bfloat16)
    # TMA does not know matrices without any element.
    return fits and a.shape[-1] > 0 and can_address(a, a_stride) and can_address(b, b_stride)


def can_store(out: torch.Tensor) -> bool:
    """Whether this module's kernel can write to out: in tiles of 64 rows and columns or more, by TMA."""
    return min(out.shape[-2:]) >= 64 and out.shape[-1] * out.element_size() % 16 == 0


# Rows and columns of a tile, its warps and stages, and the share of the first tile's rate that it reaches: smaller
# tiles read their inputs more often, but let a small product use the whole GPU.
_TILES = ((128, 256, 8, 3, 1.0), (128, 128, 8, 4, 0.85), (64, 128, 4, 4, 0.65))


def _config(M: int, N: int, n_matrices: int, partial_sums: bool, n_programs: int) -> dict[str, int]:
    """The tile that takes the least time: the number of rounds until all tiles are done, times that of one."""

    def time(tile):
        block_m, block_n, _, _, rate = tile
        rounds = cdiv(n_matrices * cdiv(M, block_m) * cdiv(N, block_n), n_programs)
        return rounds * block_m * block_n / rate

    # A second accumulator for partial sums leaves no registers for the largest tile.
    block_m, block_n, num_warps, num_stages, _ = min(_TILES[partial_sums:], key=time)
    return dict(BLOCK_M=block_m, BLOCK_N=block_n, GROUP_M=8, num_warps=num_warps, num_stages=num_stages)


def matrices(x: torch.Tensor, n_matrices: int, batch_stride: int) -> torch.Tensor:
    """x as (n_matrices, rows, columns) with contiguous last dimension; (1, ...) where one matrix serves them all."""
    if is_transposed(x):
        x = x.mT
    if n_matrices == 1 or batch_stride == 0:
        # The stride of a dimension of size 1 means nothing, but is checked.
        return x.as_strided((1, *x.shape[-2:]), (16, *x.stride()[-2:]))
    return x.as_strided((n_matrices, *x.shape[-2:]), (batch_stride, *x.stride()[-2:]))


def _descriptor(x: torch.Tensor, *block: int) -> TensorDescriptor:
    return descriptor(TensorDescriptor, x, tuple(x.shape), x.stride(), (1, *block))


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
    """Write the product to out, and the values before the activation to pre, if `supports` and `can_store` say yes."""
    (n_matrices,), ((a_stride,), (b_stride,)) = batch
    M, N, K = *out.shape[-2:], a.shape[-1]
    partial_sums = a.dtype in FLOAT8 and not reduced
    n_programs = num_multiprocessors(a.device)
    config = _config(M, N, n_matrices, partial_sums, n_programs)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], 128 // a.element_size()
    n_tiles = n_matrices * cdiv(M, block_m) * cdiv(N, block_n)
    a_transposed, b_transposed = is_transposed(a), is_transposed(b)
    out_desc, pre_desc = (
        None if x is None else _descriptor(matrices(x, n_matrices, M * N), block_m, block_n // 2) for x in (out, pre)
    )
    launch(
        _matmul_tma_kernel,
        (min(n_programs, n_tiles),),
        _descriptor(matrices(a, n_matrices, a_stride), *((block_k, block_m) if a_transposed else (block_m, block_k))),
        _descriptor(matrices(b, n_matrices, b_stride), *((block_n, block_k) if b_transposed else (block_k, block_n))),
        bias, out_desc, pre_desc,
        n_matrices, M, N, K, int(a_stride > 0), int(b_stride > 0), 0 if bias is None else bias.stride(0),
        A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed,
        ACTIVATION=activation,
        MAX_NUM_IMPRECISE_ACC=block_k if partial_sums else None,
        BLOCK_K=block_k,
        **config,
    )  # fmt: skip
