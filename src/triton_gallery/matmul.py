"""Matrix multiplication: tiles, the order they are computed in, and an epilogue that costs no trip to memory."""

import functools
import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from . import hopper
from ._arguments import (
    FLOATS,
    LONGEST,
    allows_tf32,
    autocast,
    check_length,
    check_same_device,
    check_tensor,
    got,
    in_shape,
    is_transformed,
    needs_autograd,
    requires_gradient,
)
from ._dot import dot, dot_precision
from ._launch import (
    broadcast,
    cdiv,
    collapse,
    cuda_arch,
    exceeds,
    is_hopper,
    known,
    launch,
    next_power_of_2,
    num_multiprocessors,
    pdl,
    scratch,
)
from ._registration import aligned_batches, apply, differentiable, one_by_one, operator
from ._replay import replayed

_aten = torch.ops.aten
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MAX_GRID_Y = 65535  # programs along the second axis of a grid; along the first there may be 2**31 - 1


@triton.jit
def _grouped_tile(i, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the i-th output tile: down GROUP_M rows of tiles, then one column to the right, and so on."""
    group = i // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    # The last group may have fewer rows of tiles. Without this minimum some programs get tiles below the matrix, and
    # some tiles get no program.
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = i % (GROUP_M * tiles_n)
    return first_m + within % rows, within // rows


@triton.jit
def _wrapped(i, size, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """i % size, in the 64 bits that offsets need, for the BLOCK indices of a tile; the size is a multiple of ALIGN."""
    # A division takes some 20 instructions for each index, and only of matrices smaller than a tile is it needed.
    if size < BLOCK:
        wrapped = i % size
    else:
        wrapped = tl.where(i < size, i, i - size)
    # Said after the cast, in which Triton 3.6 would lose half of it.
    return tl.max_contiguous(tl.multiple_of(wrapped.to(tl.int64), ALIGN), ALIGN)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """The activation named by ACTIVATION, for a result in DTYPE; NaN stays NaN, as in torch."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "leaky_relu":
        x = tl.where(x < 0, 0.01 * x, x)
    elif ACTIVATION == "gelu":
        if DTYPE.primitive_bitwidth > 16:
            x = 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))
        else:
            # The error function takes some forty operations. Formula 7.1.26 of Abramowitz and Stegun takes a third of
            # that for half of 1 - erf(abs(x) / sqrt(2)). Its error of 1e-7 is lost in a result of 16 bits, but for
            # results below 1e-8, which only bfloat16 has: there it grows to some percent of them. Its quotient is a
            # square of 1 / sqrt, an instruction of the GPU; a division has to mind the largest numbers.
            root = tl.rsqrt(1 + 0.23164189 * tl.abs(x))
            t = root * root
            series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
            tail = t * series * tl.exp2(-0.7213475204444817 * x * x)
            x = x * tl.where(x < 0, tail, 1 - tail)
    elif ACTIVATION == "silu":
        x = x / (1 + tl.exp(-x))
    return x


@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    a_ptr,  # (*batch_shape, M, K), any strides
    b_ptr,  # (*batch_shape, K, N), any strides
    bias_ptr,  # (N,) or None
    out_ptr,  # (*batch_shape, M, N), contiguous
    pre_ptr,  # like out, for the values before the activation, or None
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_bias,
    batch_shape,  # sizes of the batch dimensions, innermost first
    a_batch_strides,
    b_batch_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr = False,  # K is a multiple of BLOCK_K
    ALIGN_M: tl.constexpr = 1,  # M is a multiple of this
    ALIGN_N: tl.constexpr = 1,
    ALIGN_K: tl.constexpr = 1,
    A_BYTES: tl.constexpr = None,  # pieces of a begin at multiples of so many bytes, unless the compiler sees it
    B_BYTES: tl.constexpr = None,
    A_ALONG_K: tl.constexpr = True,  # whether neighbours in memory are neighbours along K
    B_ALONG_K: tl.constexpr = True,
    MATRIX_AXIS: tl.constexpr = 1,  # the grid's axis that counts matrices; the other one counts tiles
    ACTIVATION: tl.constexpr = None,
    INPUT_PRECISION: tl.constexpr = "ieee",
    MAX_NUM_IMPRECISE_ACC: tl.constexpr = None,
    PDL: tl.constexpr = False,
):
    """Program (i, j), or (j, i), owns the i-th BLOCK_M × BLOCK_N tile of matrix j: out = activation(a @ b + bias)."""
    ACC_DTYPE: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(1 - MATRIX_AXIS)
    tile_m, tile_n = _grouped_tile(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    batch = tl.program_id(MATRIX_AXIS).to(tl.int64)

    # Peel one index after another off the batch's number; a broadcast dimension has stride 0.
    rest = batch
    for d in tl.static_range(len(batch_shape)):
        a_ptr += rest % batch_shape[d] * a_batch_strides[d]
        b_ptr += rest % batch_shape[d] * b_batch_strides[d]
        rest = rest // batch_shape[d]

    # Rows past M and columns past N wrap round to ones that exist: what they yield is not stored, and the loop below
    # needs no mask for them.
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_rows = _wrapped(rows, M, BLOCK_M, ALIGN_M)
    b_cols = _wrapped(cols, N, BLOCK_N, ALIGN_N)
    a_ptrs = a_ptr + a_rows[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + b_cols[None, :] * stride_bn
    if A_BYTES is not None:
        a_ptrs = tl.multiple_of(a_ptrs, [1, A_BYTES] if A_ALONG_K else [A_BYTES, 1])
    if B_BYTES is not None:
        b_ptrs = tl.multiple_of(b_ptrs, [B_BYTES, 1] if B_ALONG_K else [1, B_BYTES])
    K = K // ALIGN_K * ALIGN_K
    N = N // ALIGN_N * ALIGN_N

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_DTYPE)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            # 0 adds nothing to the sum over k.
            a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k, other=0.0)
        if MAX_NUM_IMPRECISE_ACC is None:
            acc = dot(a, b, acc, INPUT_PRECISION)
        else:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=MAX_NUM_IMPRECISE_ACC)
        a_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_ak
        b_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_bk

    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols.to(tl.int64) * stride_bias, mask=cols < N, other=0.0)
        acc += bias.to(ACC_DTYPE)[None, :]
    out_offsets = (batch * M + rows)[:, None] * N + cols[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    if pre_ptr is not None:
        tl.store(pre_ptr + out_offsets, acc.to(pre_ptr.dtype.element_ty), mask=mask)
    out = _activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_parts"])
def _matvec_kernel(
    matrix_ptr,  # (*batch_shape, M, K), any strides
    vector_ptr,  # (*batch_shape, K), any stride
    bias_ptr,  # (M,) or None; None where K has parts
    out_ptr,  # (batch, M), contiguous; or (batch, n_parts, M), the parts' sums
    pre_ptr,  # like out, for the values before the activation, or None
    M,
    K,
    n_parts,
    part_k,  # a multiple of BLOCK_K
    stride_m,
    stride_k,
    stride_vector,
    stride_bias,
    batch_shape,  # sizes of the batch dimensions, innermost first
    matrix_batch_strides,
    vector_batch_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Program i owns BLOCK_M numbers of one product of a matrix and a vector, or one part of their sums."""
    part = tl.program_id(0) % n_parts
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0) // n_parts % tiles_m
    batch = (tl.program_id(0) // n_parts // tiles_m).to(tl.int64)
    rest = batch
    for d in tl.static_range(len(batch_shape)):
        matrix_ptr += rest % batch_shape[d] * matrix_batch_strides[d]
        vector_ptr += rest % batch_shape[d] * vector_batch_strides[d]
        rest = rest // batch_shape[d]
    rows = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = part.to(tl.int64) * part_k + tl.arange(0, BLOCK_K)
    matrix_ptrs = matrix_ptr + rows[:, None] * stride_m + offs_k[None, :] * stride_k
    vector_ptrs = vector_ptr + offs_k * stride_vector
    # A product for each lane, as nothing is used twice: the time goes into reading the matrix.
    acc = tl.zeros((BLOCK_M, BLOCK_K), ACC_DTYPE)
    for k in range(0, part_k, BLOCK_K):
        mask = offs_k < K - k
        x = tl.load(vector_ptrs, mask=mask, other=0.0).to(ACC_DTYPE)
        a = tl.load(matrix_ptrs, mask=(rows < M)[:, None] & mask[None, :], other=0.0).to(ACC_DTYPE)
        acc += a * x[None, :]
        matrix_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_k
        vector_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_vector
    sums = tl.sum(acc, axis=1)
    offsets = (batch * n_parts + part) * M + rows
    _store_activated(sums, bias_ptr, out_ptr, pre_ptr, offsets, rows * stride_bias, rows < M, ACTIVATION)


@triton.jit
def _store_activated(acc, bias_ptr, out_ptr, pre_ptr, offsets, bias_offsets, mask, ACTIVATION: tl.constexpr):
    """out = activation(acc + bias), and the values before the activation to pre."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + bias_offsets, mask=mask, other=0.0).to(acc.dtype)
    if pre_ptr is not None:
        tl.store(pre_ptr + offsets, acc.to(pre_ptr.dtype.element_ty), mask=mask)
    out = _activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "n_parts"])
def _matvec_join_kernel(
    part_ptr,  # (batch, n_parts, M)
    bias_ptr,  # (M,) or None
    out_ptr,  # (batch, M), contiguous
    pre_ptr,  # like out, for the values before the activation, or None
    M,
    n_parts,
    stride_bias,
    BLOCK_M: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Program i adds up the parts of BLOCK_M numbers of one product."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    batch = (tl.program_id(0) // tiles_m).to(tl.int64)
    rows = (tl.program_id(0) % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_PARTS, BLOCK_M), part_ptr.dtype.element_ty)
    for first in range(0, n_parts, BLOCK_PARTS):
        parts = first + tl.arange(0, BLOCK_PARTS)
        mask = (parts < n_parts)[:, None] & (rows < M)[None, :]
        acc += tl.load(part_ptr + (batch * n_parts + parts)[:, None] * M + rows[None, :], mask=mask, other=0.0)
    sums = tl.sum(acc, axis=0)
    _store_activated(sums, bias_ptr, out_ptr, pre_ptr, batch * M + rows, rows * stride_bias, rows < M, ACTIVATION)


def _config(M: int, N: int, n_matrices: int, itemsize: int, wide: bool, device: torch.device) -> dict[str, int]:
    """Block sizes, warps and stages: few choices, so that many shapes mean few compilations.

    `wide` says that loads of 16 bytes are possible, in which one address serves several elements.
    """
    if wide:
        # 64 bytes of K in each row of a tile. The tiles in flight then fit into 64 KiB, the least shared memory there
        # is among the GPUs that Triton knows.
        block_k = max(16, 64 // itemsize)
    else:
        # Every element has an address of its own in registers, and there must be room for them.
        block_k = 32 if itemsize <= 2 else 16
    if min(M, N) <= 16:
        # One matrix is thin, and reading the other one is the whole cost: small tiles make many programs to read it.
        block_m, block_n = (16, 64) if M <= N else (64, 16)
        return dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8, num_warps=4, num_stages=4)
    block_m, block_n = (128, 128) if wide else (64, 128)
    n_tiles = n_matrices * cdiv(M, block_m) * cdiv(N, block_n)
    if itemsize > (4 if wide else 2) or n_tiles < num_multiprocessors(device):
        # Smaller tiles where numbers and addresses fill the registers, or large ones leave multiprocessors idle.
        block_n = 64 if itemsize <= 2 else 32
        return dict(BLOCK_M=64, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8, num_warps=4, num_stages=3)
    return dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8, num_warps=8, num_stages=3)


def load_width(x: torch.Tensor) -> int:
    """The largest power of 2, up to 16, that divides all lengths and strides.

    So many neighbours in memory can be read together, as far as 16 bytes go.
    """
    inner = -1 if x.stride(-1) == 1 else -2
    if x.stride(inner) != 1 or x.data_ptr() % 16 != 0:
        return 1
    batch_strides = (stride for size, stride in zip(x.shape[:-2], x.stride()[:-2], strict=True) if size > 1)
    return math.gcd(16, x.shape[inner], x.stride(-3 - inner), *batch_strides)


def loads_are_wide(x: torch.Tensor) -> bool:
    """Whether neighbours can be read 16 bytes at a time, and the compiler sees it: it looks for multiples of 16."""
    return load_width(x) == 16


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    # A product of two float8 numbers can overflow float16; bfloat16 has float32's range.
    return torch.bfloat16 if dtype in FLOAT8 else dtype


def _is_reduced(dtype: torch.dtype, precision: str | None) -> bool:
    """Whether float32 may be shortened to TensorFloat-32, or sums of float8 have fewer bits; others have no choice."""
    if precision is None and dtype == torch.float32:
        return allows_tf32()
    return precision in ("high", "medium") and dtype in (torch.float32, *FLOAT8)


def _empty_output(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None, precision: str | None
) -> torch.Tensor:
    batch_shape = broadcast(a.shape[:-2], b.shape[:-2])
    if batch_shape is None:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"matmul: the batch dimensions of a and b must broadcast, got shapes {shapes}")
    shape = (*batch_shape, a.shape[-2], b.shape[-1])
    return torch.empty(shape, dtype=_result_dtype(a.dtype), device=a.device)


def _vmap(op, info, in_dims, a, b, bias, *options):
    if in_dims[2] is not None:
        return one_by_one(op, info, in_dims, a, b, bias, *options)
    return op(*aligned_batches((a, b), in_dims[:2]), bias, *options), 0


def _flops(a, b, *_):
    return 2 * math.prod(broadcast(a[:-2], b[:-2])) * a[-2] * a[-1] * b[-1]


@operator(fake=_empty_output, vmap=lambda *args: _vmap(_matmul, *args), tf32=True, flops=_flops)
def _matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None, precision: str | None
) -> torch.Tensor:
    out = _empty_output(a, b, bias, activation, precision)
    _multiply(a, b, bias, activation, precision, out, None)
    return out


def _empty_outputs(*args) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_output(*args), _empty_output(*args)


@operator(fake=_empty_outputs, vmap=lambda *args: _vmap(_matmul_and_pre, *args), tf32=True, flops=_flops)
def _matmul_and_pre(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None, precision: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the values before the activation as well."""
    out, pre = _empty_outputs(a, b, bias, activation, precision)
    _multiply(a, b, bias, activation, precision, out, pre)
    return out, pre


def _multiply(
    a: torch.Tensor,  # (..., M, K)
    b: torch.Tensor,  # (..., K, N)
    bias: torch.Tensor | None,  # (N,)
    activation: str | None,
    precision: str | None,
    out: torch.Tensor,  # (..., M, N)
    pre: torch.Tensor | None,  # (..., M, N): the values before the activation, where they are wanted
) -> None:
    for what, length in (("a.shape[-2]", a.shape[-2]), ("a.shape[-1]", a.shape[-1]), ("b.shape[-1]", b.shape[-1])):
        check_length("matmul", what, length)
    for name, x in (("a", a), ("b", b)):
        if x.dtype == torch.float8_e4m3fn and 0 < (arch := cuda_arch(x.device)) < 89:
            raise ValueError(
                f"matmul: {name} must not be float8_e4m3fn on NVIDIA GPUs before compute capability 8.9, got one of "
                f"{arch // 10}.{arch % 10}"
            )
    if out.numel() == 0:
        return
    if (n_matrices := out.shape[:-2].numel()) >= 2**31:
        raise ValueError(f"matmul: the batch of a and b must have fewer than 2**31 matrices, got {n_matrices}")
    reduced = _is_reduced(a.dtype, precision)
    batch_shape = out.shape[:-2]
    if batch_shape:
        batch_strides = (x.expand(*batch_shape, *x.shape[-2:]).stride()[:-2] for x in (a, b))
        batch = collapse(batch_shape, *batch_strides)
    else:
        batch = (1,), [(0,), (0,)]
    has_hopper_kernels = is_hopper(a.device) and a.element_size() <= 2
    # Those read a matrix well that lies across the vector, if its rows are aligned.
    reads_rows = has_hopper_kernels and b.stride(-1) == 1 and loads_are_wide(a) and loads_are_wide(b)
    if out.shape[-1] == 1 or (out.shape[-2] == 1 and not reads_rows):
        _multiply_vector(a, b, bias, activation, out, pre, batch)
        return
    if has_hopper_kernels:
        hopper.load("matmul_plan").multiply(a, b, bias, out, pre, activation, reduced, batch)
    elif is_hopper(a.device) and a.dtype == torch.float32:
        hopper.load("matmul_float32").multiply(a, b, bias, out, pre, activation, reduced, batch)
    else:
        launch_tiles(a, b, bias, out, pre, activation, batch, reduced)


def _multiply_vector(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    pre: torch.Tensor | None,
    batch: tuple,  # sizes of the batch dimensions, and the strides of a and of b along them
) -> None:
    """What `_multiply` does where a has one row or b one column: a matrix unit would have nothing to use twice."""
    (M, N), K = out.shape[-2:], a.shape[-1]
    n_matrices = out.numel() // (M * N)
    sizes, (a_strides, b_strides) = batch
    stride_bias = 0 if bias is None else bias.stride(0)
    if N == 1:
        matrix, vector, strides, stride_bias = a, b, (*a.stride()[-2:], b.stride(-2)), 0
        batch_strides = a_strides, b_strides
    else:
        matrix, vector, strides = b, a, (b.stride(-1), b.stride(-2), a.stride(-1))
        batch_strides = b_strides, a_strides
    rows = max(M, N)
    is_across = strides[1] != 1 and rows > 1
    # Whether 16 bytes can be read at a time. Where they cannot, other tiles are faster: measured on an H200.
    is_wide = (rows if is_across else K) % 16 == 0
    if is_across:
        n_elements, block_k, num_warps = (4096, 64, 8) if is_wide else (4096, 8, 4)
    else:
        n_elements, block_k, num_warps = (8192, 1024, 4) if is_wide else (2048, 256, 8)
    if a.element_size() == 8:
        n_elements = min(n_elements, 4096)
    block_k = max(8, min(block_k, next_power_of_2(K)))
    block_m = min(n_elements // block_k, next_power_of_2(rows))
    # Few rows leave room for more along K.
    if rows < n_elements // block_k:
        block_k = max(8, min(n_elements // block_m, next_power_of_2(K)))
    n_programs = cdiv(rows, block_m) * n_matrices
    # A product of few rows is cut along K, so that the whole GPU reads.
    n_parts = max(1, min(4 * num_multiprocessors(a.device) // n_programs, K // block_k))
    part_k = cdiv(cdiv(K, n_parts), block_k) * block_k
    n_parts = max(1, cdiv(K, max(1, part_k)))
    acc = torch.float64 if out.dtype == torch.float64 else torch.float32
    acc_dtype = tl.float64 if acc == torch.float64 else tl.float32
    options = dict(BLOCK_M=block_m, BLOCK_K=block_k, ACC_DTYPE=acc_dtype, num_warps=num_warps)
    args = rows, K, n_parts, part_k, *strides
    grid = (n_programs * n_parts,)
    if n_parts == 1:
        launch(
            _matvec_kernel, grid, matrix, vector, bias, out, pre, *args, stride_bias, sizes, *batch_strides,
            ACTIVATION=activation, **options,
        )  # fmt: skip
        return
    parts = scratch((n_matrices, n_parts, rows), acc, a.device)
    launch(
        _matvec_kernel, grid, matrix, vector, None, parts, None, *args, 0, sizes, *batch_strides,
        ACTIVATION=None, **options,
    )  # fmt: skip
    launch(
        _matvec_join_kernel, (cdiv(rows, 64) * n_matrices,),
        parts, bias, out, pre, rows, n_parts, stride_bias,
        BLOCK_M=64, BLOCK_PARTS=32, ACTIVATION=activation, num_warps=4,
    )  # fmt: skip


def launch_tiles(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    pre: torch.Tensor | None,
    activation: str | None,
    batch: tuple,  # sizes of the batch dimensions, and the strides of a and of b along them
    reduced: bool,
    config: dict[str, int] | None = None,
) -> None:
    """Launch `_matmul_kernel`, with the blocks of `config` or those of `_config`."""
    (M, N), K = out.shape[-2:], a.shape[-1]
    n_matrices = out.numel() // (M * N)
    way = dot_precision(a, reduced)
    # What the compiler does not see by itself: the widths between one number and 16.
    widths = [load_width(x) for x in (a, b)]
    narrow = [width for width in widths if 1 < width < 16]
    hints = {}
    if narrow:
        a_bytes, b_bytes = (min(width * a.element_size(), 16) if width in narrow else None for width in widths)
        hints = dict(A_BYTES=a_bytes, B_BYTES=b_bytes, A_ALONG_K=a.stride(-1) == 1, B_ALONG_K=b.stride(-2) == 1)

    def multiple(size):
        return max(n for n in (1, 16, *narrow) if size % n == 0)

    if config is None:
        wide = loads_are_wide(a) and loads_are_wide(b)
        config = _config(M, N, n_matrices, a.element_size(), wide, a.device)
    grid = cdiv(M, config["BLOCK_M"]) * cdiv(N, config["BLOCK_N"]), n_matrices
    matrix_axis = 1 if n_matrices <= _MAX_GRID_Y else 0
    launch(
        _matmul_kernel,
        grid if matrix_axis == 1 else grid[::-1],
        a, b, bias, out, pre, M, N, K, *a.stride()[-2:], *b.stride()[-2:], 0 if bias is None else bias.stride(0),
        batch[0], *batch[1],
        **config,
        EVEN_K=K % config["BLOCK_K"] == 0,
        # Only where a runs along M, and b along N, do wide loads need to know of what these are multiples. Narrower
        # ones need it of K, where masks cut them, and stores of N.
        ALIGN_M=multiple(M) if a.stride(-2) == 1 else 1,
        ALIGN_N=multiple(N) if b.stride(-1) == 1 or narrow else 1,
        ALIGN_K=multiple(K) if narrow else 1,
        **hints,
        MATRIX_AXIS=matrix_axis,
        ACTIVATION=activation,
        PDL="PDL" in pdl(a.device),
        INPUT_PRECISION=way,
        # Hopper's matrix unit keeps sums of float8 products in fewer than 24 bits: add 128 at a time in float32.
        MAX_NUM_IMPRECISE_ACC=min(128, config["BLOCK_K"]) if a.dtype in FLOAT8 and not reduced else None,
    )  # fmt: skip


def _silu_backward(dout: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward(dout, pre)
    # torch knows no derivative of its one-kernel form.
    sigmoid = pre.sigmoid()
    return dout * (sigmoid * (1 + pre * (1 - sigmoid)))


# The gradient through each activation, from the incoming gradient and a saved tensor: the result itself where the
# activation is two straight lines, the values before the activation for the others.
_ACTIVATION_BACKWARD = {
    "relu": lambda dout, out: _aten.threshold_backward(dout, out, 0),
    "leaky_relu": lambda dout, out: _aten.leaky_relu_backward(dout, out, 0.01, True),
    "gelu": lambda dout, pre: _aten.gelu_backward(dout, pre),
    "silu": _silu_backward,
}
_SAVES_PRE = ("gelu", "silu")


class _Matmul(torch.autograd.Function):
    @staticmethod
    def constants(a, b, bias, activation, precision):
        shapes = a.shape, b.shape, None if bias is None else bias.shape
        return {"activation": activation, "precision": precision, "shapes": shapes}

    @staticmethod
    def setup(ctx, inputs, output):
        a, b, *_ = inputs
        ctx.set_materialize_grads(False)
        saved = output if isinstance(output, torch.Tensor) else output[1]
        # A factor is for the gradient of the other one: with a frozen weight, a may go.
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None, None if ctx.activation is None else saved)

    @staticmethod
    def backward(ctx, dout, dpre=None):
        a, b, saved = ctx.saved_tensors
        if dout is not None:
            through = dout if ctx.activation is None else _ACTIVATION_BACKWARD[ctx.activation](dout, saved)
            dpre = through if dpre is None else dpre + through
        da = db = dbias = None
        if dpre is not None:
            if ctx.needs_input_grad[0]:
                da = _product_of_shape(dpre, b.mT, ctx.shapes[0], ctx.precision)
            if ctx.needs_input_grad[1]:
                db = _product_of_shape(a.mT, dpre, ctx.shapes[1], ctx.precision)
            if ctx.needs_input_grad[2]:
                dbias = dpre.sum_to_size(ctx.shapes[2])
        return da, db, dbias, None, None


class _MatmulAndPre(_Matmul):
    """Where the values before the activation are saved they are an output: a second derivative flows through them."""


differentiable(_matmul, _Matmul)
differentiable(_matmul_and_pre, _MatmulAndPre)


def _product_of_shape(a, b, shape, precision):
    """a @ b, summed over the batch dimensions that `shape` lacks."""
    if len(shape) == 2 and max(a.dim(), b.dim()) > 2:
        batch = broadcast(a.shape[:-2], b.shape[:-2])
        length = math.prod(batch) * a.shape[-1]
        if not exceeds(length, LONGEST):
            # The batch becomes part of the dimension that the product sums over: its sums are rounded once. (torch has
            # no `flatten` for a batch of incoming gradients.)
            a = a.expand(*batch, *a.shape[-2:]).movedim(-2, 0).reshape(a.shape[-2], length)
            b = b.expand(*batch, *b.shape[-2:]).reshape(length, b.shape[-1])
    return _differentiable(a, b, None, None, precision).sum_to_size(shape)


def _differentiable(a, b, bias, activation, precision):
    arguments = a, b, bias, activation, precision
    if needs_autograd(a, b, bias):
        result = apply(_MatmulAndPre if activation in _SAVES_PRE else _Matmul, *arguments)
    else:
        may_be_differentiated = is_transformed() or requires_gradient(a, b, bias)
        result = (_matmul_and_pre if may_be_differentiated and activation in _SAVES_PRE else _matmul)(*arguments)
    return result if isinstance(result, torch.Tensor) else result[0]


@functools.partial(replayed, tf32=True)
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    r"""Multiply two matrices, or batches of them, as :func:`torch.matmul` does; add a bias and apply an activation.

    .. math:: \text{out} = f(a \, b + \text{bias})

    Args:
        a: shape (..., M, K) or (K,), any strides; float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2.
        b: shape (..., K, N) or (K,), any strides, of a's dtype; the two float8 dtypes mix. Batch dimensions broadcast.
        bias: added to every row: shape (N,), (1,) or (), in the dtype of the result; one number where b is a vector.
        activation: None, "relu", "gelu" (with the error function, not the approximation by tanh; where the result has
            16 bits, within 1e-6 of it before it is rounded to them), "silu" or "leaky_relu" (slope 0.01).
        precision: "highest" multiplies all bits of float32 numbers; "high" and "medium" let the GPU shorten them to
            TensorFloat-32, which has 10 bits of mantissa. None follows torch's setting, by
            :func:`torch.set_float32_matmul_precision` or ``torch.backends.cuda.matmul.fp32_precision``. For float8,
            "high" and "medium" let the matrix unit keep its sums with fewer bits; None means "highest". The other
            dtypes ignore it.

    Returns:
        A contiguous tensor of shape (..., M, N), without M where a is a vector and without N where b is one. Its dtype
        is a's; for float8 it is bfloat16, because a product of two float8 numbers can overflow float16.

    Raises:
        TypeError: an argument is no tensor, its dtype is not supported or does not match, or it is float8 and requires
            a gradient.
        ValueError: shapes do not match, the devices differ or cannot run a kernel, activation or precision is none of
            the names above, the dtype is float8_e4m3fn on an NVIDIA GPU before compute capability 8.9, M, N or K is
            within 2**14 below 2**31, where blocks are miscounted, or a batch has 2**31 matrices.
        NotImplementedError: forward-mode differentiation reaches an argument; reverse mode is supported.

    Notes:
        Sums are kept in float32 (float64 for float64); bias and activation are applied to them before the one rounding.
        Every call adds in the same order, so results repeat bit for bit for tensors that lie alike in memory (with
        :func:`~triton_gallery.set_tuning`, once they have been tried). When a gradient is needed, "gelu" and "silu"
        store the values before the activation as well; the other activations are differentiated from the result, which
        must not be changed in place before.
        Gradients of any order are matrix products by the same kernels. Where sums are cut into parts, as in products of
        few tiles, and in float32 also where the last round of a large one would leave much of the GPU idle, each part
        needs room for a copy of the result in the dtype of the sums. On Hopper programs may share the last tiles of a
        large product, which takes up to 17 MiB, and products copy matrices first where that is quicker: in 16 bits
        those whose rows do not begin at multiples of 16 bytes, and batches in which no one stride leads from matrix to
        matrix, and from 1536 rows of a on also a single b whose rows do not begin at multiples of 32 bytes. For
        TensorFloat-32 it is the first two of these, and the smaller one of two matrices of which neither lies along K.
        For "highest" large products of float32 take 6 bytes for each number of one matrix, and copy the other one if
        its rows do not begin at multiples of 16 bytes or no one stride leads through its batch; some smaller ones copy
        both, if one can only be read number by number. Under :class:`torch.autocast` a, b and bias are cast as torch
        casts them.
        AMD GPUs multiply float32 as it is. Hopper, for "highest", takes each number apart into three of bfloat16 (but
        in products with a vector) and adds up the six products that float32 can show; of numbers below 1e-33 fewer bits
        count, and below 1e-40 none. A large product with infinity or NaN among its numbers or its sums takes about
        twice as long.

    Example:
        >>> import torch, triton_gallery
        >>> triton_gallery.matmul(torch.eye(2), torch.tensor([[1.0, -2.0], [3.0, 4.0]]), activation="relu")
        tensor([[1., 0.],
                [3., 4.]])
    """
    a, b, bias = _checked_operands(a, b, bias)
    if activation is not None and (not isinstance(activation, str) or activation not in _ACTIVATION_BACKWARD):
        names = ", ".join(f'"{name}"' for name in _ACTIVATION_BACKWARD)
        raise ValueError(f"matmul: activation must be None, {names}, got {got(activation)}")
    if precision is not None and (not isinstance(precision, str) or precision not in ("highest", "high", "medium")):
        raise ValueError(f'matmul: precision must be None, "highest", "high" or "medium", got {got(precision)}')
    is_saved = activation is not None and activation not in _SAVES_PRE
    # A vector is a matrix of one row or one column, as long as the product is computed.
    rows = a if a.dim() > 1 else a.unsqueeze(0)
    columns = b if b.dim() > 1 else b.unsqueeze(1)
    if bias is not None:
        bias = _expand_bias(bias, columns.shape[-1])
    if (
        rows.dim() > 2
        and known(math.prod(columns.shape[:-2]) == 1)
        and columns.dim() <= rows.dim()
        and not exceeds(math.prod(rows.shape[:-1]), LONGEST)
        and _is_one_matrix(rows)
    ):
        # The same b for the whole batch: the batch is more rows of one matrix.
        flat = _differentiable(rows.flatten(0, -2), columns.reshape(columns.shape[-2:]), bias, activation, precision)
        out = in_shape(flat, (*rows.shape[:-1], flat.shape[-1]), is_saved=is_saved)
    else:
        out = _differentiable(rows, columns, bias, activation, precision)
    if a.dim() > 1 and b.dim() > 1:
        return out
    *batch, M, N = out.shape
    shape = (*batch, *([M] if a.dim() > 1 else []), *([N] if b.dim() > 1 else []))
    return in_shape(out, shape, is_saved=is_saved)


def _is_one_matrix(a: torch.Tensor) -> bool:
    """Whether one stride leads from row to row through the whole batch, so that flattening it copies nothing."""
    return known(a.numel() > 0) and len(collapse(a.shape[:-1], a.stride()[:-1])[0]) == 1


def _checked_operands(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """a, b and bias as autocast wants them, after all checks but those of bias's shape."""
    for name, x in (("a", a), ("b", b)):
        check_tensor("matmul", name, x, FLOATS + FLOAT8)
        if x.dim() == 0:
            raise ValueError(f"matmul: {name} must have at least one dimension, got none; use * to scale by a number")
    if bias is not None:
        check_tensor("matmul", "bias", bias)
    check_same_device("matmul", a=a, b=b, bias=bias)
    given = a.dtype, b.dtype
    if a.dtype not in FLOAT8:
        a, b, bias = autocast(a, b, bias)
    if a.dtype != b.dtype and not (a.dtype in FLOAT8 and b.dtype in FLOAT8):
        expected, found = (
            _name(x.dtype) + ("" if x.dtype == before else " after autocast")
            for x, before in zip((a, b), given, strict=True)
        )
        raise TypeError(f"matmul: b must have a's dtype, {expected}, got {found}; convert one with .to()")
    for name, x in (("a", a), ("b", b)):
        if x.dtype in FLOAT8 and torch.is_grad_enabled() and x.requires_grad:
            raise TypeError(
                f"matmul: {name} must not require a gradient in {_name(x.dtype)}; convert it to a wider dtype"
            )
    axis = -2 if b.dim() > 1 else -1
    if a.shape[-1] != b.shape[axis]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"matmul: a.shape[-1] must equal b.shape[{axis}], got shapes {shapes}")
    if bias is not None and bias.dtype != _result_dtype(a.dtype):
        dtype = _name(_result_dtype(a.dtype))
        raise TypeError(
            f"matmul: bias must have the result's dtype, {dtype}, got {_name(bias.dtype)}; convert it with .to()"
        )
    return a, b, bias


def _expand_bias(bias: torch.Tensor, N: int) -> torch.Tensor:
    if bias.dim() > 1 or (bias.numel() != 1 and bias.numel() != N):
        hint = "; with one column, or a vector b, it is one number" if N == 1 else ""
        raise ValueError(f"matmul: bias must have a shape that broadcasts to ({N},), got {tuple(bias.shape)}{hint}")
    return bias.expand(N)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
