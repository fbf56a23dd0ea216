"""Large products of float32 matrices for Hopper in Gluon, in full precision: six products of bfloat16 numbers.

The arithmetic is that of `triton_gallery._dot`: a number is the sum of three bfloat16 numbers, and of the nine products
of such parts six are computed. The warps have different jobs, as in `matmul_specialized`, and the matrix unit hardly
waits for what surrounds the six products:

- One matrix, the right one here, is taken apart once, ahead of the product, and its parts lie in memory one behind the
  other. That is 6 bytes for each of its numbers, and no work where they are used.
- Numbers of the left one reach the matrix unit by way of registers, where a consumer takes them apart while the unit is
  at the products of the step before. So from shared memory it reads the right one alone; there is no time for more.
- The six products of a step along K are one chain, and the two consumers take turns to issue theirs. While one of them
  adds the sums of its chain to those in registers, the unit is at the other's.
- Infinity and NaN need care ahead of the last product of a chain: parts of infinity are NaN, and what they reach must
  be dropped. At first nobody cares, so what should have been dropped makes a sum NaN. A program that finds NaN among
  its sums computes all of its tiles anew, with care.

In shared memory the 32 numbers of a row's step are eight pieces of 16 bytes, in an order that differs from row to row,
lest the same pieces of eight rows lie in the same banks. The matrix unit wants pairs of neighbours along K from a
thread, and threads that read those would meet in the same banks again. But a product does not mind in which order K is
counted, as long as both factors agree. So a thread reads two pieces side by side, one at a time, and the parts of the
right matrix are written in the order that this makes.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .._dot import three_bf16
from .._launch import cdiv, launch, num_multiprocessors, scratch
from ._gluon import (
    async_load,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier,
    phase,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .matmul import is_transposed, matrices
from .matmul_plan import sum_parts
from .matmul_specialized import _finish, _halves, _inverse, _operand, _out_tiles, _ring, _tile

BLOCK_M = 64  # rows of one consumer: what one warp group multiplies
NUM_CONSUMERS = 2
BLOCK_K = 32  # numbers along K in a step; the sum over them leaves the matrix unit
_PARTS = 3


@triton.jit(do_not_specialize=["n_rows", "n_x_cols"])
def _take_apart_kernel(
    x_ptr,  # (*batch_shape, n_rows, n_x_cols)
    out_ptr,  # (n_matrices, 3, n_rows, n_cols), bfloat16, contiguous
    n_rows,
    n_cols,  # a multiple of 32
    n_x_cols,
    x_row_stride,
    x_col_stride,
    batch_shape,  # sizes of the batch dimensions, innermost first
    batch_strides,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REORDERED: tl.constexpr,
):
    """Program i writes the three parts of the i-th tile, row by row, and zeros where x ends."""
    gdc_launch_dependents()
    tiles_n = tl.cdiv(n_cols, BLOCK_COLS)
    tiles_m = tl.cdiv(n_rows, BLOCK_ROWS)
    rows = tl.program_id(0) // tiles_n % tiles_m * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]
    cols = tl.program_id(0) % tiles_n * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    batch = (tl.program_id(0) // tiles_n // tiles_m).to(tl.int64)
    # Peel one index after another off the matrix's number.
    rest = batch
    for d in tl.static_range(len(batch_shape)):
        x_ptr += rest % batch_shape[d] * batch_strides[d]
        rest = rest // batch_shape[d]
    x_ptrs = x_ptr + rows * x_row_stride + cols.to(tl.int64) * x_col_stride
    x = tl.load(x_ptrs, mask=(rows < n_rows) & (cols < n_x_cols), other=0.0)
    if REORDERED:
        # The order in which `_left_parts` finds the numbers of a: of 32, a thread has eight side by side.
        x = x.reshape(BLOCK_ROWS, BLOCK_COLS // 32, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5)
        x = x.reshape(BLOCK_ROWS, BLOCK_COLS)
    parts = three_bf16(x)
    for i in tl.static_range(3):
        out_ptrs = out_ptr + ((batch * 3 + i) * n_rows + rows) * n_cols + cols
        tl.store(out_ptrs, parts[i], mask=(rows < n_rows) & (cols < n_cols))


def _taken_apart(x: torch.Tensor, sizes: tuple, strides: tuple, reordered: bool) -> torch.Tensor:
    """The parts of such matrices, (3 * n_matrices, n_rows, n_cols); the batch dimensions are innermost first."""
    n_matrices, (n_rows, n_x_cols) = math.prod(sizes), x.shape[-2:]
    n_cols = cdiv(n_x_cols, BLOCK_K) * BLOCK_K
    parts = scratch((_PARTS * n_matrices, n_rows, n_cols), torch.bfloat16, x.device)
    block_rows, block_cols = (32, 64) if x.stride(-1) == 1 else (64, 32)
    launch(
        _take_apart_kernel,
        (n_matrices * cdiv(n_rows, block_rows) * cdiv(n_cols, block_cols),),
        x, parts, n_rows, n_cols, n_x_cols, *x.stride()[-2:], sizes, strides,
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, REORDERED=reordered, num_warps=4,
    )  # fmt: skip
    return parts


@gluon.jit
def _producer(
    a_desc, b_desc, a_smem, b_smem, full, empty, verdicts, heard, order, n_tiles, K, a_step, b_step, k_step,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, A_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of a and the parts of b in the order in which the consumers want them, perhaps twice."""
    step = 0
    is_wanted = True
    for attempt in range(2):
        if attempt == 1:
            is_wanted = _found_nan(verdicts, heard)
        if is_wanted:
            for i in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
                batch, tile_m, tile_n = _tile(i, order)
                for k in range(batch * k_step, batch * k_step + K, BLOCK_K):
                    stage = step % STAGES
                    mbarrier.wait(empty.index(stage), phase(step, STAGES) ^ 1)
                    mbarrier.expect(
                        full.index(stage), NUM_CONSUMERS * a_desc.block_type.nbytes + 3 * b_desc.block_type.nbytes
                    )
                    for part in gl.static_range(3):
                        async_load(
                            b_desc, [batch * b_step * 3 + part, tile_n * BLOCK_N, k],
                            full.index(stage), b_smem.index(stage * 3 + part),
                        )  # fmt: skip
                    for c in gl.static_range(NUM_CONSUMERS):
                        row = (tile_m * NUM_CONSUMERS + c) * BLOCK_M
                        a_tile = a_smem.index(stage * NUM_CONSUMERS + c)
                        if A_TRANSPOSED:
                            async_load(a_desc, [batch * a_step, k, row], full.index(stage), a_tile)
                        else:
                            async_load(a_desc, [batch * a_step, row, k], full.index(stage), a_tile)
                    step += 1


@gluon.jit
def _found_nan(verdicts, heard):
    """Whether any consumer found NaN among its sums: waits until all of them have said it."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(heard, 0)
    return gl.max(verdicts.load(LINE), 0) > 0


@gluon.jit
def _take_turn(CONSUMER: gl.constexpr):
    """Wait until the other consumer has issued its products, lest both rest at the same time."""
    named_barrier("barrier.sync", "9" if CONSUMER == 0 else "10")


@gluon.jit
def _give_turn(CONSUMER: gl.constexpr):
    named_barrier("barrier.arrive", "10" if CONSUMER == 0 else "9")


@gluon.jit
def _left_parts(a_smem, i, LAYOUT: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Three parts of the i-th tile of a, as the matrix unit takes its left factor out of registers."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    if TRANSPOSED:
        a = _operand(a_smem, i, True).load(OPERAND)
    else:
        # Of 32 numbers of a row a thread takes 8 * t to 8 * t + 7. Eight threads, of two rows, read 16 bytes at once.
        PIECES: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]], lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 32],
        )  # fmt: skip
        a = _operand(a_smem, i, False).load(PIECES)
        # They count as what the matrix unit wants of this thread: 2 * t and the next, and those 8, 16 and 24 behind.
        a = a.reshape((64, 4, 2, 2, 2)).permute((0, 2, 3, 1, 4)).reshape((64, 32))
        a = gl.convert_layout(a, OPERAND, assert_trivial=True)
    return three_bf16(a)


@gluon.jit
def _sum(
    a_smem, b_smem, full, empty, step, steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    A_TRANSPOSED: gl.constexpr, CONSUMER: gl.constexpr, CAREFUL: gl.constexpr,
):  # fmt: skip
    """Add up the products of a tile's steps along K."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
    mbarrier.wait(full.index(step % STAGES), phase(step, STAGES))
    a0, a1, a2 = _left_parts(a_smem, step % STAGES * NUM_CONSUMERS + CONSUMER, LAYOUT, A_TRANSPOSED)
    for k in range(steps):
        stage = step % STAGES
        b0 = _operand(b_smem, stage * 3, True)
        b1 = _operand(b_smem, stage * 3 + 1, True)
        b2 = _operand(b_smem, stage * 3 + 2, True)
        _take_turn(CONSUMER)
        # From the smallest products on.
        zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        product = warpgroup_mma(a1, b1, zeros, use_acc=False, is_async=True)
        product = warpgroup_mma(a2, b0, product, is_async=True)
        product = warpgroup_mma(a0, b2, product, is_async=True)
        product = warpgroup_mma(a1, b0, product, is_async=True)
        product = warpgroup_mma(a0, b1, product, is_async=True)
        if not CAREFUL:
            product = warpgroup_mma(a0, b0, product, is_async=True)
        _give_turn(CONSUMER)
        next0, next1, next2 = a0, a1, a2
        if k + 1 < steps:
            # The matrix unit is busy while these numbers are taken apart.
            next_stage = (step + 1) % STAGES
            mbarrier.wait(full.index(next_stage), phase(step + 1, STAGES))
            next0, next1, next2 = _left_parts(a_smem, next_stage * NUM_CONSUMERS + CONSUMER, LAYOUT, A_TRANSPOSED)
        # The compiler must not give a's registers away while the matrix unit reads them: so a is named, too.
        product, a0, _, _ = warpgroup_mma_wait(0, deps=(product, a0, a1, a2))
        if CAREFUL:
            # Where a number is infinite or NaN, so is its first part, and the last product says what becomes of it.
            product = gl.where(product == product, product, 0.0)
            product = warpgroup_mma(a0, b0, product, is_async=True)
            product, _ = warpgroup_mma_wait(0, deps=(product, a0))
        mbarrier.arrive(empty.index(stage), count=1)
        # Added outside the matrix unit, whose own sums are cut, not rounded.
        acc += product
        a0, a1, a2 = next0, next1, next2
        step += 1
    return acc


@gluon.jit
def _own_tiles(
    bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, verdicts, step, order,
    n_tiles, M, N, K, stride_bias,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, A_TRANSPOSED: gl.constexpr, OUT_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
    CONSUMER: gl.constexpr, CAREFUL: gl.constexpr,
):  # fmt: skip
    """Compute a consumer's rows of all of the program's tiles, note which of them have NaN, and count the steps."""
    steps = gl.cdiv(K, BLOCK_K)
    for i in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        acc = _sum(
            a_smem, b_smem, full, empty, step, steps, BLOCK_M, BLOCK_N, NUM_CONSUMERS, STAGES, A_TRANSPOSED, CONSUMER,
            CAREFUL,
        )  # fmt: skip
        step += steps
        if not CAREFUL:
            # A row's sum is NaN where one of its numbers is. (Were they asked one by one, they would lie in other
            # registers, and each step along K took 5 % longer.)
            sums = gl.sum(acc, 1)
            verdict = verdicts.slice(CONSUMER * BLOCK_M, BLOCK_M)
            verdict.store(verdict.load(sums.type.layout) | (sums != sums).to(gl.int32))
        batch, tile_m, tile_n = _tile(i, order)
        _finish(
            _halves(acc), bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, out_smem.index(CONSUMER), batch,
            (tile_m * NUM_CONSUMERS + CONSUMER) * BLOCK_M, tile_n * BLOCK_N, M, N, stride_bias, ACTIVATION,
            OUT_TRANSPOSED,
        )  # fmt: skip
    return step


@gluon.jit
def _consumer(
    bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, verdicts, heard, order,
    n_tiles, M, N, K, stride_bias,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, A_TRANSPOSED: gl.constexpr, OUT_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Owns BLOCK_M rows of each of the program's tiles."""
    if CONSUMER == 1:
        # The first turn is the other one's.
        _give_turn(CONSUMER)
    step = _own_tiles(
        bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, verdicts,
        gl.to_tensor(0), order, n_tiles, M, N, K, stride_bias, BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES,
        A_TRANSPOSED, OUT_TRANSPOSED, ACTIVATION, CONSUMER, False,
    )  # fmt: skip
    mbarrier.arrive(heard, count=1)
    if _found_nan(verdicts, heard):
        # What was stored must have arrived before other values are sent to the same place; `store_wait` only says that
        # it has left shared memory.
        gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        _own_tiles(
            bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, verdicts,
            step, order, n_tiles, M, N, K, stride_bias, BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED,
            OUT_TRANSPOSED, ACTIVATION, CONSUMER, True,
        )  # fmt: skip
    if CONSUMER == 0:
        _take_turn(CONSUMER)
    store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tiles_m", "tiles_n", "group_m", "per_matrix", "per_group", "per_column", "per_last_column", "n_tiles", "M",
        "N", "K", "a_step", "b_step", "k_step",
    ]
)  # fmt: skip
def _matmul_bf16x6_kernel(
    a_desc,  # (n_matrices or 1, M, K), or (..., K, M) when A_TRANSPOSED
    b_desc,  # (3 * n_matrices or 3, N, K), bfloat16: the parts of each matrix, whose rows lie along K
    bias_ptr,  # (N,) or None
    out_ptr,  # (n_matrices, M, N)
    pre_ptr,  # like out, for the values before the activation, or None
    out_desc,  # of out and pre; None where TMA cannot address their rows, which then lie side by side
    pre_desc,
    tiles_m,  # tiles in a column of tiles
    tiles_n,  # and in a row
    group_m,  # rows of tiles that are computed together
    per_matrix,  # inverses of the tiles of a matrix, of a group, and of a column of a group and of the last one
    per_group,
    per_column,
    per_last_column,
    n_tiles,  # of all matrices
    M,
    N,
    K,  # of each matrix
    a_step,  # 1, or 0 where one a serves the whole batch
    b_step,
    k_step,  # how far the next matrix's columns of a lie: 0, or K where K is cut into parts
    stride_bias,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    OUT_TRANSPOSED: gl.constexpr,  # out and pre are (n_matrices, N, M), and the bias is (M,)
    ACTIVATION: gl.constexpr,
):
    """Program i owns tiles i, i + n_programs, ... of NUM_CONSUMERS * BLOCK_M rows: out = activation(a @ b + bias)."""
    gdc_launch_dependents()
    order = tiles_m, tiles_n, group_m, per_matrix, per_group, per_column, per_last_column
    a_smem = _ring(a_desc, STAGES * NUM_CONSUMERS)
    b_smem = _ring(b_desc, STAGES * 3)
    # A tile leaves in two halves.
    if OUT_TRANSPOSED:
        out_smem = _out_tiles(out_ptr, NUM_CONSUMERS, BLOCK_N // 2, BLOCK_M)
    else:
        out_smem = _out_tiles(out_ptr, NUM_CONSUMERS, BLOCK_M, BLOCK_N // 2)
    verdicts = gl.allocate_shared_memory(
        gl.int32, [NUM_CONSUMERS * BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    verdicts.store(gl.zeros([NUM_CONSUMERS * BLOCK_M], gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    heard = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=NUM_CONSUMERS)
    mbarrier.init(heard, count=NUM_CONSUMERS)
    fence_async_shared()
    # The kernel before this one has to be done: what it writes is read here, and what it reads is written only later.
    gdc_wait()
    # A tuple kept in a variable would lose its constexprs, so the arguments are spelt out.
    # fmt: off
    gl.warp_specialize([
        (_producer, (
            a_desc, b_desc, a_smem, b_smem, full, empty, verdicts, heard, order, n_tiles, K, a_step, b_step, k_step,
            BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED)),
        (_consumer, (
            bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, verdicts, heard,
            order, n_tiles, M, N, K, stride_bias,
            BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, OUT_TRANSPOSED, ACTIVATION, 0)),
        (_consumer, (
            bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, verdicts, heard,
            order, n_tiles, M, N, K, stride_bias,
            BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, OUT_TRANSPOSED, ACTIVATION, 1)),
    ], [4, 4], [240, 240])
    # fmt: on


def multiply(
    a: torch.Tensor,  # (..., M, K), which TMA can address
    b: torch.Tensor,  # (..., K, N), any strides
    bias: torch.Tensor | None,
    out: torch.Tensor,
    pre: torch.Tensor | None,
    activation: str | None,
    a_stride: int,
    b_batch: tuple[tuple, tuple],
    block_n: int,
    n_parts: int = 1,
    out_transposed: bool = False,
) -> None:
    """Write activation(a @ b + bias) to out, and the values before the activation to pre.

    `a_stride` is how far the matrices of a lie apart, and `b_batch` has the sizes and strides of b's own batch
    dimensions, innermost first. K is summed up in `n_parts` parts, of which there may be several for one matrix only.
    With `out_transposed` out and pre take the transposed product.
    """
    (M, K), N = a.shape[-2:], b.shape[-1]
    n_matrices = out.numel() // (M * N)
    a_transposed = is_transposed(a)
    b_parts = _taken_apart(b.mT, *b_batch, not a_transposed)
    tiles_m, tiles_n = cdiv(M, BLOCK_M * NUM_CONSUMERS), cdiv(N, block_n)
    # Parts of K are matrices that begin elsewhere along K.
    part_k = cdiv(K, n_parts * BLOCK_K) * BLOCK_K
    n_parts = cdiv(K, part_k)
    n_tiles = n_matrices * n_parts * tiles_m * tiles_n
    group_m = cdiv(tiles_m, max(1, round(tiles_m / 8)))
    divisors = tiles_m * tiles_n, group_m * tiles_n, group_m, tiles_m % group_m or group_m
    result = scratch((n_parts, *out.shape[-2:]), out.dtype, out.device) if n_parts > 1 else out
    ends = (None, None, None) if n_parts > 1 else (bias, pre, activation)

    def describe(x):
        if x is None or x.stride(-2) * x.element_size() % 16 != 0:
            return None
        x = matrices(x, x.numel() // (M * N), x.shape[-2] * x.stride(-2))
        return descriptor(x, [1, block_n // 2, BLOCK_M] if out_transposed else [1, BLOCK_M, block_n // 2])

    launch(
        _matmul_bf16x6_kernel, (min(num_multiprocessors(a.device), n_tiles),),
        descriptor(matrices(a, n_matrices, a_stride), [1, BLOCK_K, BLOCK_M] if a_transposed else [1, BLOCK_M, BLOCK_K]),
        descriptor(b_parts, [1, block_n, BLOCK_K]),
        ends[0], result, ends[1], describe(result), describe(ends[1]),
        tiles_m, tiles_n, group_m, *map(_inverse, divisors), n_tiles, M, N, part_k if n_parts > 1 else K,
        int(a_stride > 0), int(any(b_batch[1])), part_k if n_parts > 1 else 0, 0 if bias is None else bias.stride(0),
        BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=BLOCK_K, NUM_CONSUMERS=NUM_CONSUMERS,
        STAGES=4 if block_n == 128 else 6, A_TRANSPOSED=a_transposed, OUT_TRANSPOSED=out_transposed,
        ACTIVATION=ends[2], num_warps=4, launch_pdl=True,
    )  # fmt: skip
    if n_parts > 1:
        sum_parts(result, bias, out, pre, activation)
