"""How Hopper computes a product of 16-bit or 8-bit matrices: by which kernel, in which tiles, in how many parts.

Three things are decided here, from sizes, strides and alignment alone, so that equal calls give equal bits (unless
`set_tuning` has them decided by trial):

- Large products, and those of few tiles with a long K, go to the kernel that works with TMA and specialized warps, and
  so do most of the smaller ones whose lengths and strides are not all multiples of 16. The pointer kernel takes the
  others: products whose tiles run all at once, thin ones, and of those with a K of up to 256 all but the largest.
- Where there are at most half as many tiles as multiprocessors, a K of 2048 or more may be cut into parts (*split K*):
  a program computes one part of one tile in float32, and a second kernel adds up the parts, always in the same order.
- TMA wants rows that begin at multiples of 16 bytes, and matrices of a batch that lie equally far apart. Others of 16
  bits are copied to ones that do, if that saves more than it costs. Of rows that begin in the middle of a sector of 32
  bytes TMA copies 128 bytes as five sectors, not four. In a large product b, of which most tiles need more than of a,
  is copied for that, too.

The rates below were measured on an H200 or an H100, or fitted to measured times; they only have to put the choices into
the right order. (That of memory is more than a copy reaches.)
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .._launch import cdiv, collapse, launch, next_power_of_2, num_multiprocessors, pdl, scratch
from .._tuning import is_tuning, run_quickest
from ..matmul import FLOAT8, _activate, launch_tiles, load_width, loads_are_wide
from . import load
from .matmul import can_address, is_transposed

_BYTES_PER_US = 4.8e6  # of the whole GPU
_THIN_BYTES_PER_US = 47e3  # what one program of a thin product reads
_SMALL_PER_US = 1.4e6  # multiplications in one program's tile of 64 × 64; of 64 × 32 the same is reckoned
_SUM_US = 0.7  # to start a second kernel
_PART_US = 0.07  # for each part that it adds
_PARTS_BYTES_PER_US = 4.5e6  # written and read
_MAX_PARTS = 32
_PART_K = 768  # what a part of K has at least
_COPY_ROWS = 1536  # so many rows of a make up for a copy of b
SECTOR = 32  # bytes that the caches move at once


@triton.jit(do_not_specialize=["n_parts", "n_rows"])
def _sum_parts_kernel(
    part_ptr,  # (n_parts, n_rows, n_cols)
    bias_ptr,  # (n_cols,) or None
    out_ptr,  # (n_rows, n_cols)
    pre_ptr,  # like out, for the values before the activation, or None
    n_parts,
    n_rows,
    n_cols,
    part_stride,
    part_row_stride,
    out_row_stride,
    stride_bias,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ACTIVATION: tl.constexpr = None,
    PDL: tl.constexpr = False,
):
    """Program i owns the i-th tile, row by row, of activation(the sum of all parts + bias)."""
    tiles_n = tl.cdiv(n_cols, BLOCK_COLS)
    rows = tl.program_id(0) // tiles_n * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]
    cols = tl.program_id(0) % tiles_n * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    part_ptrs = part_ptr + rows * part_row_stride + cols
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    if PDL:
        gdc_wait()
    for first in range(0, n_parts, 8):
        # Unrolled by eight; a part that does not exist adds 0.
        for i in tl.static_range(8):
            end = tl.where(first + i < n_parts, n_cols, 0)
            acc += tl.load(part_ptrs + i * part_stride, mask=mask & (cols < end), other=0.0)
        part_ptrs += tl.cast(8, tl.int64) * part_stride
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols.to(tl.int64) * stride_bias, mask=cols < n_cols, other=0.0).to(tl.float32)
    offsets = rows * out_row_stride + cols
    if pre_ptr is not None:
        tl.store(pre_ptr + offsets, acc.to(pre_ptr.dtype.element_ty), mask=mask)
    out = _activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def sum_parts(
    parts: torch.Tensor,  # (n_parts, n_rows, n_cols)
    bias: torch.Tensor | None,
    out: torch.Tensor,  # (n_rows, n_cols)
    pre: torch.Tensor | None,
    activation: str | None,
) -> None:
    n_parts, n_rows, n_cols = parts.shape
    # Four or sixteen elements for each thread: small outputs need small tiles, or most of the GPU has none.
    tile = 512 if n_rows * n_cols < 2048 * 4 * num_multiprocessors(out.device) else 2048
    block_cols = min(512, next_power_of_2(n_cols))
    block_rows = max(1, tile // block_cols)
    launch(
        _sum_parts_kernel,
        (cdiv(n_rows, block_rows) * cdiv(n_cols, block_cols),),
        parts, bias, out, pre, n_parts, n_rows, n_cols, parts.stride(0), parts.stride(1), out.stride(-2),
        0 if bias is None else bias.stride(0),
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, ACTIVATION=activation, num_warps=4,
        **pdl(out.device),
    )  # fmt: skip


# As Triton knows nothing of the strides, it gives neighbouring numbers to neighbouring threads: the best order for rows
# that cannot be read or written 16 bytes at a time. ALIGN tells it of those that can.
@triton.jit(do_not_specialize=["x_row_stride", "out_row_stride"])
def _copy_rows_kernel(
    x_ptr,  # (*batch_shape, n_rows, n_x_cols)
    out_ptr,  # (n_matrices, n_rows, n_cols); its rows lie equally far apart
    n_rows,
    n_cols,
    n_x_cols,
    x_row_stride,
    x_col_stride,
    out_row_stride,
    batch_shape,  # sizes of the batch dimensions, innermost first
    batch_strides,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ALIGN: tl.constexpr,  # the columns of both, their rows' strides and x's batch strides are multiples of it
):
    """Program i copies the i-th tile, row by row, to a matrix whose rows lie elsewhere, and have zeros where x ends."""
    n_cols, n_x_cols = [n // ALIGN * ALIGN for n in (n_cols, n_x_cols)]
    x_row_stride, out_row_stride = [n // ALIGN * ALIGN for n in (x_row_stride, out_row_stride)]
    tiles_n = tl.cdiv(n_cols, BLOCK_COLS)
    tiles_m = tl.cdiv(n_rows, BLOCK_ROWS)
    rows = tl.program_id(0) // tiles_n % tiles_m * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]
    cols = tl.program_id(0) % tiles_n * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    batch = (tl.program_id(0) // tiles_n // tiles_m).to(tl.int64)
    # Peel one index after another off the matrix's number.
    rest = batch
    for d in tl.static_range(len(batch_shape)):
        x_ptr += rest % batch_shape[d] * (batch_strides[d] // ALIGN * ALIGN)
        rest = rest // batch_shape[d]
    out_ptr += batch * n_rows * out_row_stride
    mask = (rows < n_rows) & (cols < n_cols)
    x_ptrs = x_ptr + rows * x_row_stride + cols.to(tl.int64) * x_col_stride
    x = tl.load(x_ptrs, mask=mask & (cols < n_x_cols), other=0.0)
    tl.store(out_ptr + rows * out_row_stride + cols, x, mask=mask)


def copy_rows(x: torch.Tensor, out: torch.Tensor, sizes: tuple = (1,), strides: tuple = (0,)) -> None:
    """Copy x, or a batch of such matrices: `sizes` and `strides` are those of its dimensions, innermost first."""
    n_rows, n_cols = out.shape[-2:]
    vector = 16 // x.element_size()
    lengths = n_cols, x.shape[-1], x.stride(-2), out.stride(-2), *strides
    block_cols = min(256, next_power_of_2(n_cols))
    block_rows = 2048 // block_cols
    launch(
        _copy_rows_kernel,
        (math.prod(sizes) * cdiv(n_rows, block_rows) * cdiv(n_cols, block_cols),),
        x, out, n_rows, n_cols, x.shape[-1], *x.stride()[-2:], out.stride(-2), sizes, strides,
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        ALIGN=vector if all(length % vector == 0 for length in lengths) else 1, num_warps=4,
    )  # fmt: skip


def in_parts(multiply: Callable, n_parts: int, a, b, bias, out, pre, activation, batch) -> None:
    """Let ``multiply(a, b, bias, out, pre, activation, batch)`` compute the product in n_parts equal parts of K."""
    if n_parts == 1:
        multiply(a, b, bias, out, pre, activation, batch)
        return
    # A part is a matrix of a batch, whose matrices begin so many columns of a, or rows of b, apart.
    (M, N), k = out.shape[-2:], a.shape[-1] // n_parts
    a = a.as_strided((n_parts, M, k), (k * a.stride(-1), *a.stride()[-2:]))
    b = b.as_strided((n_parts, k, N), (k * b.stride(-2), *b.stride()[-2:]))
    parts = scratch((n_parts, M, N), torch.float32, out.device)
    multiply(a, b, None, parts, None, None, ((n_parts,), [a.stride()[:1], b.stride()[:1]]))
    sum_parts(parts, bias, out, pre, activation)


def memory_us(M: int, N: int, K: int, itemsize: int) -> float:
    """How long it takes to read a and b once."""
    return (M * K + K * N) * itemsize / _BYTES_PER_US


def possible_parts(K: int, n_tiles: int, device: torch.device) -> range:
    """Numbers of parts of K, none too short, for which the whole GPU at once has room."""
    most = min(_MAX_PARTS, num_multiprocessors(device) // n_tiles, K // _PART_K) if K >= 2048 else 1
    return range(1, max(1, most) + 1)


def _equal_parts(K: int, n_tiles: int, device: torch.device) -> list[int]:
    """Those of `possible_parts` that have the same number of columns each, a multiple of 16."""
    return [n for n in possible_parts(K, n_tiles, device) if n == 1 or K % (16 * n) == 0]


def sum_us(n_parts: int, n_out: int) -> float:
    """How long it takes to write and add up parts of so many numbers."""
    return 0 if n_parts == 1 else _SUM_US + n_parts * (_PART_US + 8 * n_out / _PARTS_BYTES_PER_US)


def _pointer_config(
    M: int, N: int, K: int, along_k: bool, load_bytes: int, n_matrices: int, itemsize: int, device: torch.device
) -> tuple[int, dict[str, int]]:
    """Parts of K, and blocks, warps and stages of the pointer kernel.

    `along_k` says whether a and b lie along K, and `load_bytes` how many bytes of both can be read at a time.
    """
    n_processors = num_multiprocessors(device)

    def n_tiles(block_m, block_n):
        return n_matrices * cdiv(M, block_m) * cdiv(N, block_n)

    def config(block_m, block_n, step_bytes, num_stages=None, tile_us=None):
        tiles, n_parts = n_tiles(block_m, block_n), 1
        if tile_us is not None and n_matrices == 1:
            # Of whole tiles, so that not every number of rows decides anew.
            rows, cols = cdiv(M, block_m) * block_m, cdiv(N, block_n) * block_n
            least_us = memory_us(rows, cols, K, itemsize)

            def time(n):
                rounds = cdiv(tiles * n, n_processors)
                return max(rounds * tile_us / n, least_us) + sum_us(n, rows * cols)

            n_parts = min(_equal_parts(K, tiles, device), key=time)
        k = K // n_parts
        num_warps = 4
        if load_bytes < 4 and n_matrices == 1:
            # No copy to shared memory is that narrow. A step waits for its loads, so there should be few steps.
            step_bytes, num_stages = 128 * itemsize, 4
            if min(block_m, block_n) > 16:
                block_m, block_n, num_warps = 64, 32, 8
        elif load_bytes < 16:
            # Narrow loads are many: short steps were the quicker ones.
            step_bytes, num_stages = 128 if block_n <= 64 < K else 64, 4
            if block_n == 64 and M > 64 and K <= 256:
                block_m, step_bytes, num_warps = 128, 64, 8
        # The matrix unit takes 32 bytes of each row at a time.
        block_k = max(32 // itemsize, min(step_bytes // itemsize, next_power_of_2(k)))
        # One stage more than fits into 176 KiB pays where K is long; of 64 × 64 it costs one or two per cent elsewhere.
        room = (192 if k * itemsize >= 8192 else 176) * 1024
        num_stages = num_stages or min(6, room // ((block_m + block_n) * step_bytes))
        blocks = dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8)
        return n_parts, dict(**blocks, num_warps=num_warps, num_stages=num_stages)

    # Many short steps along K start a program sooner than few long ones, and of a long K they cost more. Seven or eight
    # stages were mostly slower than six. (float32 has a plan of its own and does not come here.)
    step_bytes = 128 if K < 1536 // itemsize else 256
    if min(M, N) <= 16:
        # Reading the other matrix is the whole cost. One program has as much of it on its way as shared memory holds.
        n_strips = {width: n_matrices * cdiv(max(M, N), width) for width in (32, 64)}
        if n_strips[64] > n_processors:
            width, step_bytes = 128, 256
        elif K >= 8192 and N > 16:
            # Where K was 8192, tiles of 32 columns were no quicker.
            width, step_bytes = 64, 512
        else:
            # The narrower the sooner done; but of a long matrix the matrix unit takes 64 rows at once.
            width = 32 if N > 16 and n_strips[32] <= n_processors else 64
            if N > 16 and along_k and K * itemsize >= 4096:
                step_bytes = 512
        blocks = (width, 16) if N <= 16 else (16, width)
        return config(*blocks, step_bytes, tile_us=width * K * itemsize / _THIN_BYTES_PER_US)
    # Where all tiles run at once, the smallest are the quickest: each reads the least. Of a long K they would read the
    # most together.
    if K < (8192 if min(M, N) <= 64 else 4096) and n_tiles(64, 32) <= n_processors:
        return config(64, 32, step_bytes, tile_us=64 * 32 * K * itemsize / 2 / _SMALL_PER_US)
    # A K of up to 256 is soon read by larger tiles, too.
    if K > 256 and n_tiles(64, 64) <= n_processors:
        # Many short steps are still the quicker ones where a step takes many rows of a matrix, and not a long piece of
        # each.
        short = not along_k and K * itemsize < 4096
        steps = (128, 8) if short else (step_bytes, None)
        return config(64, 64, *steps, tile_us=64 * 64 * K * itemsize / 2 / _SMALL_PER_US)
    is_short = K * itemsize <= 320
    run_at_once = is_short and n_tiles(64, 64) <= n_processors
    if N <= 64 or run_at_once or _fits_in_small_tiles(M, N, K, n_matrices, itemsize, device):
        block_n = 64
    else:
        block_n = 128
    if is_short:
        return config(64, block_n, 64, 6 if K > 64 else 3)
    # Each program has as many stages as shared memory has room for. A short K needs no more than three or four.
    programs = min(3, cdiv(n_tiles(64, block_n), n_processors))
    num_stages = {1: 6, 2: 4, 3: 3} if K > 256 or block_n == 64 else {1: 4, 2: 3, 3: 3}
    return config(64, block_n, 128, num_stages[programs])


def _fits_in_small_tiles(M: int, N: int, K: int, n_matrices: int, itemsize: int, device: torch.device) -> bool:
    """Whether two tiles of 64 × 64 on each multiprocessor make up for a second round of tiles of 64 × 128."""
    n_processors, n_rows = num_multiprocessors(device), n_matrices * cdiv(M, 64)
    return K * itemsize <= 1024 and n_rows * cdiv(N, 128) > n_processors and n_rows * cdiv(N, 64) <= 2 * n_processors


def _is_large(M: int, N: int, K: int, n_matrices: int, itemsize: int, device: torch.device) -> bool:
    """Whether TMA and specialized warps, which take longer to start, are worth it."""
    n_processors = num_multiprocessors(device)
    if K <= 256:
        # The start is most of the time. Tiles that are soon done have to be many.
        n_tiles = n_matrices * cdiv(M, 64) * cdiv(N, 128)
        are_many = n_tiles > 3.5 * n_processors or (n_tiles > 2 * n_processors and n_tiles * K > 360 * n_processors)
        return min(M, N) >= (128 if n_matrices == 1 else 65) and are_many
    if n_matrices == 1:
        # Where few programs take many steps along K, TMA has more of them on their way. Its parts may begin anywhere,
        # so that every K has some.
        n_strips = cdiv(max(M, N), 32)
        if min(M, N) > 64:
            is_long = K * itemsize >= (4800 if cdiv(M, 64) * cdiv(N, 32) <= n_processors else 2800)
        elif min(M, N) > 16:
            is_long = K * itemsize >= 4000
        else:
            is_long = K * itemsize >= 6500 and 2 * n_strips <= n_processors
        if is_long:
            return True
    if min(M, N) <= 64:
        return False
    # Otherwise the pointer kernel is the quicker one as long as it can compute all its tiles at once.
    if itemsize == 2 and _fits_in_small_tiles(M, N, K, n_matrices, itemsize, device):
        return False
    return n_matrices * cdiv(M, 64) * cdiv(N, 64) > n_processors


def _suits_tma(M: int, N: int, K: int, align: int, n_matrices: int, itemsize: int, device: torch.device) -> bool:
    """Whether TMA should be quicker than pointers; `align`, up to 16, divides all lengths and strides."""
    if align == 16:
        return _is_large(M, N, K, n_matrices, itemsize, device)
    is_thin = min(M, N) < 64
    if align * itemsize < 16:
        pays = not is_thin
    elif n_matrices == 1:
        pays = not is_thin and K > 400
    else:
        pays = not is_thin or K > 128
    return pays or _is_large(M, N, K, n_matrices, itemsize, device)


def row_bytes(x: torch.Tensor) -> int:
    """How far the rows of a matrix that TMA can address, or of its transpose, lie apart."""
    return max(x.stride()[-2:]) * x.element_size()


def _is_aligned(x: torch.Tensor, unit: int, sizes: tuple, strides: tuple) -> bool:
    """Whether TMA can address these matrices, and their rows lie a multiple of so many bytes apart."""
    return len(sizes) == 1 and can_address(x, strides[0]) and row_bytes(x) % unit == 0


def _aligned(x: torch.Tensor, unit: int, sizes: tuple = (1,), strides: tuple = (0,)) -> tuple[torch.Tensor, int]:
    """Matrices for which `_is_aligned` holds, x itself or copies, and how far they lie apart.

    `sizes` and `strides` are those of the batch dimensions, innermost first.
    """
    if _is_aligned(x, unit, sizes, strides):
        return x, strides[0]
    if is_transposed(x):
        copies, stride = _aligned(x.mT, unit, sizes, strides)
        return copies.mT, stride
    copies = scratch((math.prod(sizes), *_copied_shape(x)), x.dtype, x.device)[..., : x.shape[-1]]
    copy_rows(x, copies, sizes, strides)
    return copies, copies.stride(0) if any(strides) else 0


def _copied_shape(x: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a copy of x, or of its transpose, if that lies along rows.

    Its rows begin at multiples of 128 bytes, which is more than TMA asks for.
    """
    n_rows, n_cols = x.shape[-2:] if not is_transposed(x) else x.shape[:-3:-1]
    step = 128 // x.element_size()
    return n_rows, cdiv(n_cols, step) * step


def own_batch(sizes: tuple, strides: tuple) -> tuple[tuple, tuple]:
    """The batch dimensions of one factor alone; of one matrix that serves them all there is one, with stride 0."""
    if not any(strides) or math.prod(sizes) == 1:
        return (1,), (0,)
    sizes, (strides,) = collapse(sizes[::-1], strides[::-1])
    return sizes, strides


def _copies_pay(a: torch.Tensor, b: torch.Tensor, n_matrices: int, batches: list) -> bool:
    """Whether TMA saves more than the copies cost that it needs; in microseconds, by times on an H200.

    Pointers multiply at 130 to 450 TFLOP/s, by the width of their loads, as if K were 160 longer for what begins and
    ends; number by number at 40 or 80, in whole tiles. A tile takes 55 to 200 numbers along K in a microsecond. TMA
    multiplies at 500 TFLOP/s, in whole tiles, or moves 3.4 TB/s, and takes 300 numbers along K in a microsecond. Copies
    move each number twice.
    """
    (M, K), N = a.shape[-2:], b.shape[-1]
    if K == 0:
        return False
    align = min(load_width(a), load_width(b))
    if align == 1:
        is_across = any(load_width(x) == 1 and x.stride(along_k) != 1 for x, along_k in ((a, -1), (b, -2)))
        rows, cols = (cdiv(n, 64) * 64 if n > 16 else 16 for n in (M, N))
        pointers_us = max(5 + 2 * n_matrices * rows * cols * K / (40e6 if is_across else 80e6), 3.5 + K / 55)
    else:
        rate = {2: 130e6, 4: 190e6}.get(align, 450e6)
        pointers_us = max(2 * n_matrices * M * N * (K + 160) / rate, 4 + K / (170 if align == 2 else 200))
    operations = 2 * n_matrices * cdiv(M, 128) * 128 * cdiv(N, 128) * 128 * (cdiv(K, 64) * 64 + 64)
    n_bytes = 2 * n_matrices * (M * K + K * N + M * N)
    tma_us = max(operations / 500e6, n_bytes / 3.4e6, min(K, 2048) / 300) + 5.5
    n_copied, n_read = 0, 0
    for x, (sizes, strides) in zip((a, b), batches, strict=True):
        n_read += x.shape[-2:].numel() * math.prod(n for n, stride in zip(sizes, strides, strict=True) if stride != 0)
        if not _is_aligned(x, 16, sizes, strides):
            n_copied += math.prod((*sizes, *_copied_shape(x)))
            tma_us += 2.1
    if n_copied > 2 * (n_read + n_matrices * M * N):
        return False  # of matrices that serve several products each there would be a copy for every one
    return pointers_us > tma_us + 4 * n_copied / 3e6


def _by_pointers(
    n_parts: int, config: dict[str, int], a, b, bias, out, pre, activation, reduced: bool, batch: tuple
) -> None:
    in_parts(
        lambda *arguments: launch_tiles(*arguments, reduced, config), n_parts, a, b, bias, out, pre, activation, batch
    )


def _by_tma(plan: tuple | None, a, b, bias, out, pre, activation, reduced: bool, batch: tuple) -> None:
    specialized = load("matmul_specialized")
    if specialized is None:
        load("matmul").multiply(a, b, bias, out, pre, activation, reduced, batch)
        return
    if batch[0] == (1,) and a.dtype not in FLOAT8 and a.shape[-2] >= _COPY_ROWS:
        b, _ = _aligned(b, SECTOR)
    specialized.multiply(a, b, bias, out, pre, activation, reduced, batch, plan)


def _by_rules(a, b, bias, out, pre, activation, reduced: bool, batch: tuple) -> None:
    (M, N), K = out.shape[-2:], a.shape[-1]
    n_matrices = out.numel() // (M * N)
    tma, specialized = load("matmul"), load("matmul_specialized")
    align = min(load_width(a), load_width(b))
    load_bytes = align * a.element_size()
    if tma.supports(a, b, batch) and (specialized or tma.can_store(out)):
        if _suits_tma(M, N, K, align, n_matrices, a.element_size(), a.device):
            _by_tma(None, a, b, bias, out, pre, activation, reduced, batch)
            return
    elif specialized and a.dtype not in FLOAT8:
        batches = [own_batch(batch[0], strides) for strides in batch[1]]
        if _copies_pay(a, b, n_matrices, batches):
            (a, a_stride), (b, b_stride) = (_aligned(x, 16, *own) for x, own in zip((a, b), batches, strict=True))
            batch = (n_matrices,), [(a_stride,), (b_stride,)]
            specialized.multiply(a, b, bias, out, pre, activation, reduced, batch)
            return
    along_k = a.stride(-1) == b.stride(-2) == 1
    n_parts, config = _pointer_config(M, N, K, along_k, load_bytes, n_matrices, a.element_size(), a.device)
    _by_pointers(n_parts, config, a, b, bias, out, pre, activation, reduced, batch)


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
    arguments = a, b, bias, out, pre, activation, reduced, batch
    if not (is_tuning() and _has_choices(a, b, batch)):
        _by_rules(*arguments)
        return

    def run(choice):
        if choice is None:
            _by_rules(*arguments)
        elif choice[0] == "pointers":
            _by_pointers(*choice[1:], *arguments)
        else:
            _by_tma(choice[1:], *arguments)

    run_quickest("matmul", _in_words(*arguments), lambda: _choices(*arguments), run, a.device)


# --- tuning -----------------------------------------------------------------------------------------------------------


def _has_choices(a: torch.Tensor, b: torch.Tensor, batch: tuple) -> bool:
    return a.is_cuda and load("matmul_specialized") is not None and load("matmul").supports(a, b, batch)


def _choices(a, b, bias, out, pre, activation, reduced: bool, batch: tuple) -> list[list]:
    """What may be quicker than `_by_rules`: arguments of `_by_pointers` or a plan for `_by_tma`."""
    (M, N), K, ((n_matrices,), _) = out.shape[-2:], a.shape[-1], batch
    n_processors, itemsize = num_multiprocessors(a.device), a.element_size()
    partial_sums = a.dtype in FLOAT8 and not reduced
    plans = load("matmul_specialized").plans(M, N, K, n_matrices, itemsize, partial_sums, a.device)
    choices = [["by TMA", *plan] for plan in plans]
    if not (loads_are_wide(a) and loads_are_wide(b)):
        return choices
    if min(M, N) <= 32:
        tiles = [(width, 16) if N <= 32 else (16, width) for width in (32, 64, 128)]
    else:
        tiles = [(64, 32), (64, 64), (64, 128), (128, 64), (128, 128)]
    for block_m, block_n in tiles:
        n_tiles = n_matrices * cdiv(M, block_m) * cdiv(N, block_n)
        if n_tiles > 4 * n_processors:  # all of them together would read too much
            continue
        parts = _equal_parts(K, n_tiles, a.device) if n_matrices == 1 else [1]
        for n_parts in sorted({parts[0], parts[len(parts) // 2], parts[-1]}):
            for step_bytes in (64, 128, 256):
                block_k = step_bytes // itemsize
                # A short K takes short steps, a long one long ones.
                if K <= 256 if step_bytes == 64 else block_k <= K // n_parts:
                    config = dict(
                        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8,
                        num_warps=8 if block_m * block_n >= 128 * 64 else 4,
                        num_stages=min(6, 176 * 1024 // ((block_m + block_n) * step_bytes)),
                    )  # fmt: skip
                    choices.append(["pointers", n_parts, config])
    return choices


def _in_words(a, b, bias, out, pre, activation, reduced: bool, batch: tuple) -> str:
    """All that the choices depend on, and all that makes much of a difference to their times."""
    (M, N), K, ((n_matrices,), strides) = out.shape[-2:], a.shape[-1], batch
    layouts = "".join("t" if is_transposed(x) else "n" for x in (a, b))
    dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys((a.dtype, b.dtype)))
    words = [f"{M} x {N} x {K} {layouts}", dtypes, f"rows {row_bytes(a)} and {row_bytes(b)} bytes apart"]
    if n_matrices > 1:
        words.append(f"{n_matrices} matrices, {' and '.join(str(stride[0]) for stride in strides)} numbers apart")
    also = {"bias": bias is not None, f"{activation}": activation, "both outputs": pre is not None}
    also |= {"short sums": reduced and a.dtype in FLOAT8}
    return ", ".join(words + [word for word, holds in also.items() if holds])
