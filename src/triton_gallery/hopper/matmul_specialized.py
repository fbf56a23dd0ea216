"""Matrix multiplication for Hopper in Gluon: warps with different jobs, placed by hand.

What ``tl`` cannot say and this kernel does: one warp group does nothing but start TMA copies (the *producer*), and one
to three others do nothing but multiply and store (the *consumers*). They meet at barriers in shared memory, two for
each stage of a ring of tiles: `full` trips when a copy has arrived, `empty` when all consumers have used it. The copies
run as far ahead as the ring is long, also into the next output tile while the consumers still store this one.

Tiles are computed in rounds, one for each multiprocessor. Where the last round has few, several programs *share* each
of its tiles. They divide its rows, if K is short. Otherwise each sums over a part of K, and the last of them adds up
what the others leave in memory. It waits for them, who wait for nobody; and as no more than half of the multiprocessors
have a program that waits, there is room for all others, in whatever order they start. (Two such launches at a time
could fill a GPU with programs that wait, if it started later programs before earlier ones, which GPUs do not.)

Blocks of Triton have powers of two as sides. Between one and the next is a wide gap: tiles of 128 columns may need one
more round where tiles of 256 are half empty. So there are tiles of 96 and of 192 columns, of which BLOCK_N make one
block and REST_N, half as many, another, each with a descriptor for b, a place in shared memory, and sums of its own.

From shared memory the matrix unit reads 32-bit numbers (as TensorFloat-32) only along K. It takes those of its left
operand from registers as well, where it does not matter how they lay before. So a may lie across K; and where b does,
and a does not, the consumers compute the transposed product, whose left operand is b.
"""

import functools
import math
from typing import NamedTuple

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .._launch import cdiv, launch, num_multiprocessors, scratch
from ..matmul import FLOAT8, _activate
from ._gluon import (
    async_load,
    async_store,
    barrier,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    phase,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .exchange import EMPTY, mailboxes
from .matmul import is_transposed, matrices
from .matmul_plan import SECTOR, memory_us, possible_parts, row_bytes, sum_parts, sum_us

BLOCK_M = 64  # rows of one consumer: what one warp group multiplies
STEP_BYTES = 128  # of each row in a step along K: what TMA copies at most


def _inverse(d: int) -> int:
    """What `_divide` multiplies by to divide by d."""
    return 2**30 // d + 1


@gluon.jit
def _divide(n, d, inverse):
    """n // d and n % d for n below 2**30, without a division: four took 500 cycles, ahead of the first copy."""
    # n * inverse / 2**30 is above n / d, by less than 1: the quotient is right or 1 too large.
    quotient = gl.umulhi(4 * n, inverse)
    rest = n - quotient * d
    is_less = rest < 0
    return quotient - is_less.to(gl.int32), gl.where(is_less, rest + d, rest)


@gluon.jit
def _tile(i, order):
    """The i-th tile of all: its matrix, row and column; what `_grouped_tile` says, without dividing."""
    tiles_m, tiles_n, group_m, per_matrix, per_group, per_column, per_last_column = order
    batch, i = _divide(i, tiles_m * tiles_n, per_matrix)
    group, within = _divide(i, group_m * tiles_n, per_group)
    rows = gl.minimum(tiles_m - group * group_m, group_m)
    tile_n, row = _divide(within, rows, gl.where(rows < group_m, per_last_column, per_column))
    return batch, group * group_m + row, tile_n


@gluon.jit
def _num_tiles(rounds):
    """Of how many tiles this program computes something: one in each full round, and perhaps one in the last."""
    if rounds is None:
        return 1
    else:
        n_rounds, n_last, _, _, _, _ = rounds
        return n_rounds + (gl.program_id(0) < n_last).to(gl.int32)


@gluon.jit
def _tile_and_share(i, rounds, steps, NUM_CONSUMERS: gl.constexpr):
    """The i-th of them; which of its consumers' rows are this program's; and from which step along K to which."""
    if rounds is None:
        return gl.program_id(0), 0, NUM_CONSUMERS, 0, steps
    else:
        n_rounds, _, n_sharing, per_tile, by_rows, share = rounds
        tile = i * gl.num_programs(0) + gl.program_id(0)
        first = 0
        n_working = NUM_CONSUMERS
        begin = 0
        end = steps
        if i == n_rounds:
            of_round, place = _divide(gl.program_id(0), n_sharing, per_tile)
            tile = i * gl.num_programs(0) + of_round
            if by_rows:
                first = place
                n_working = 1
            else:
                begin = place * share
                end = gl.minimum(begin + share, steps)
        return tile, first, n_working, begin, end


@gluon.jit
def _copy_b(desc, smem, full, batch, col, k, TRANSPOSED: gl.constexpr):
    if TRANSPOSED:
        async_load(desc, [batch, col, k], full, smem)
    else:
        async_load(desc, [batch, k, col], full, smem)


@gluon.jit
def _copy(
    a_desc, b_desc, rest_desc, a_smem, b_smem, rest_smem, full, stage, batch, row, col, k, n_working, a_step, b_step,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Start the copies of one step along K to a stage of the ring."""
    b_bytes: gl.constexpr = b_desc.block_type.nbytes + (0 if rest_desc is None else rest_desc.block_type.nbytes)
    all_bytes: gl.constexpr = NUM_CONSUMERS * a_desc.block_type.nbytes + b_bytes
    mbarrier.expect(full.index(stage), all_bytes, pred=n_working == NUM_CONSUMERS)
    if NUM_CONSUMERS > 1:
        mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + b_bytes, pred=n_working == 1)
    _copy_b(b_desc, b_smem.index(stage), full.index(stage), batch * b_step, col, k, B_TRANSPOSED)
    if rest_desc is not None:
        _copy_b(rest_desc, rest_smem.index(stage), full.index(stage), batch * b_step, col + BLOCK_N, k, B_TRANSPOSED)
    for c in gl.static_range(NUM_CONSUMERS):
        a_tile = a_smem.index(stage * NUM_CONSUMERS + c)
        if A_TRANSPOSED:
            a_place = [batch * a_step, k, row + c * BLOCK_M]
        else:
            a_place = [batch * a_step, row + c * BLOCK_M, k]
        async_load(a_desc, a_place, full.index(stage), a_tile, pred=c < n_working)


@gluon.jit
def _producer(
    a_desc, b_desc, rest_desc, a_smem, b_smem, rest_smem, full, empty, order, rounds, K, a_step, b_step, k_step,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, REST_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr, STAGES: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of a and b in the order in which the consumers want them, but for the very first ones."""
    # A program's first tile is a whole one, of one step at least: there is a full round. `_tiles` has copied that step.
    step = 1
    steps = gl.cdiv(K, BLOCK_K)
    for i in range(_num_tiles(rounds)):
        tile, first, n_working, begin, end = _tile_and_share(i, rounds, steps, NUM_CONSUMERS)
        batch, tile_m, tile_n = _tile(tile, order)
        row = (tile_m * NUM_CONSUMERS + first) * BLOCK_M
        col = tile_n * (BLOCK_N + REST_N)
        begin += (i == 0).to(gl.int32)
        for k in range(batch * k_step + begin * BLOCK_K, batch * k_step + end * BLOCK_K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), phase(step, STAGES) ^ 1)
            _copy(
                a_desc, b_desc, rest_desc, a_smem, b_smem, rest_smem, full, stage, batch, row, col, k, n_working,
                a_step, b_step, BLOCK_M, BLOCK_N, NUM_CONSUMERS, A_TRANSPOSED, B_TRANSPOSED,
            )  # fmt: skip
            step += 1


@gluon.jit
def _operand(smem, i, TRANSPOSED: gl.constexpr):
    """The i-th tile of a ring as the matrix that is multiplied."""
    tile = smem.index(i)
    tile = tile.reshape((tile.shape[1], tile.shape[2]))
    if TRANSPOSED:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def _store(desc, ptr, values, smem, batch, row, col, M, N, TRANSPOSED: gl.constexpr):
    """Send values to memory by way of shared memory, once what was there before has left it."""
    tile = smem.reshape((smem.shape[1], smem.shape[2]))
    store_wait(0)
    if TRANSPOSED:
        tile.permute((1, 0)).store(values.to(smem.dtype))
        row, col, M, N = col, row, N, M
    else:
        tile.store(values.to(smem.dtype))
    if desc is not None:
        fence_async_shared()
        async_store(desc, [batch, row, col], smem)
    else:
        # Rows that TMA cannot address: each warp stores along one of them, a number for each thread.
        ALONG: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        rows = (row + gl.arange(0, tile.shape[0], gl.SliceLayout(1, ALONG)))[:, None]
        cols = (col + gl.arange(0, tile.shape[1], gl.SliceLayout(0, ALONG)))[None, :]
        ptrs = ptr + (batch.to(gl.int64) * M + rows) * N + cols
        gl.store(ptrs, tile.load(ALONG), mask=(rows < M) & (cols < N))


@gluon.jit
def _store_part(ptr, acc, batch, row, col, M, N, TRANSPOSED: gl.constexpr):
    """Send sums to memory from the registers: a row of a warp's tile has 32 bytes, a whole sector, for four threads.

    So has a column, for eight threads.
    """
    rows = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))[:, None]
    cols = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))[None, :]
    if TRANSPOSED:
        rows, cols, row, col, M, N = cols, rows, col, row, N, M
    # Rows of parts begin at multiples of four numbers, and what lies behind the N-th is nobody's.
    stride = gl.cdiv(N, 4) * 4
    ptr += (batch.to(gl.int64) * M + row) * stride + col
    gl.store(ptr + rows * stride + cols, acc, mask=(row + rows < M) & (col + cols < stride))


@gluon.jit
def _halves(x):
    """The left and the right half of a tile's columns."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _in_fours(x):
    """The numbers of a tile as a vector, of which a thread holds four neighbours, and the next thread the next four.

    That is an order of the numbers for memory, in which all of them stay in the registers where they are.
    """
    x = gl.reshape(x, (x.shape[0] // 16, 2, 8, x.shape[1] // 8, 4, 2))
    return gl.reshape(gl.permute(x, (3, 0, 2, 4, 1, 5)), (x.numel,))


@gluon.jit
def _in_rows(x, ROWS: gl.constexpr):
    """The tile that `_in_fours` made a vector."""
    x = gl.reshape(x, (x.numel // (ROWS * 8), ROWS // 16, 8, 4, 2, 2))
    return gl.reshape(gl.permute(x, (1, 4, 2, 0, 3, 5)), (ROWS, x.numel // ROWS))


@gluon.jit
def _send(sums_ptr, mail_ptr, acc, place):
    """Leave the sums over some steps of a tile to the program that computes its last ones."""
    left, right = _halves(acc)
    left, right = _in_fours(left), _in_fours(right)
    ptrs = sums_ptr + place * acc.numel + gl.arange(0, left.numel, left.type.layout)
    gl.store(ptrs, left)
    gl.store(ptrs + left.numel, right)
    barrier()
    gl.atomic_xchg(mail_ptr + place, 0, sem="release")


@gluon.jit
def _receive(sums_ptr, mail_ptr, left, right, place):
    """Add what `_send` leaves at a place to the two halves of a tile, both in fours."""
    while gl.atomic_add(mail_ptr + place, 0, sem="acquire") == EMPTY:
        pass
    barrier()
    ptrs = sums_ptr + place * (2 * left.numel) + gl.arange(0, left.numel, left.type.layout)
    left += gl.load(ptrs)
    right += gl.load(ptrs + left.numel)
    return left, right


@gluon.jit
def _finish(
    pieces, bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, smem, batch, row, col, M, N, stride_bias,
    ACTIVATION: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Add the bias to the pieces of a tile, apply the activation, and send them to memory."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for piece in gl.static_range(len(pieces)):
        pre = pieces[piece]
        first = col + piece * pre.shape[1]
        if bias_ptr is not None:
            # One number for each thread; all of them are then handed to whoever needs them.
            if TRANSPOSED:
                places = row + gl.arange(0, pre.shape[0], LINE)
                mask = places < M
            else:
                places = first + gl.arange(0, pre.shape[1], LINE)
                mask = places < N
            bias = gl.load(bias_ptr + places.to(gl.int64) * stride_bias, mask=mask, other=0.0).to(gl.float32)
            if TRANSPOSED:
                pre += gl.convert_layout(bias, gl.SliceLayout(1, pre.type.layout))[:, None]
            else:
                pre += gl.convert_layout(bias, gl.SliceLayout(0, pre.type.layout))[None, :]
        if pre_ptr is not None:
            _store(pre_desc, pre_ptr, pre, smem, batch, row, first, M, N, TRANSPOSED)
        out = _activate(pre, ACTIVATION, smem.dtype)
        _store(out_desc, out_ptr, out, smem, batch, row, first, M, N, TRANSPOSED)


@gluon.jit
def _sum_from_registers(
    a_smem, b_smem, rest_smem, full, empty, acc, rest, step, begin, end,
    NUM_CONSUMERS: gl.constexpr, STAGES: gl.constexpr, A_TRANSPOSED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Add up the products of a tile's steps, where the numbers of a reach the matrix unit by way of registers."""
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 1)
    # Of large tiles the other consumer's product takes longer than it takes to read these numbers.
    AHEAD: gl.constexpr = acc.shape[1] < 256
    if AHEAD:
        mbarrier.wait(full.index(step % STAGES), phase(step, STAGES))
        next_a = _operand(a_smem, step % STAGES * NUM_CONSUMERS + CONSUMER, A_TRANSPOSED).load(A_LAYOUT)
    for k in range(begin, end):
        if AHEAD:
            a = next_a
        else:
            mbarrier.wait(full.index(step % STAGES), phase(step, STAGES))
            a = _operand(a_smem, step % STAGES * NUM_CONSUMERS + CONSUMER, A_TRANSPOSED).load(A_LAYOUT)
        token = warpgroup_mma(a, _operand(b_smem, step % STAGES, True), acc, use_acc=k > begin, is_async=True)
        if rest is not None:
            rest_a = gl.convert_layout(a, gl.DotOperandLayout(0, rest.type.layout, 1), assert_trivial=True)
            b = _operand(rest_smem, step % STAGES, True)
            rest_token = warpgroup_mma(rest_a, b, rest, use_acc=k > begin, is_async=True)
        if AHEAD:
            if k + 1 < end:
                mbarrier.wait(full.index((step + 1) % STAGES), phase(step + 1, STAGES))
                next_a = _operand(a_smem, (step + 1) % STAGES * NUM_CONSUMERS + CONSUMER, A_TRANSPOSED).load(A_LAYOUT)
        # The compiler must not give a's registers away while the matrix unit reads them: so a is named, too.
        if rest is not None:
            acc, rest, _ = warpgroup_mma_wait(0, deps=(token, rest_token, a))
        else:
            acc, _ = warpgroup_mma_wait(0, deps=(token, a))
        mbarrier.arrive(empty.index(step % STAGES), count=1)
        step += 1
    if rest is not None:
        return acc, rest
    else:
        return acc


@gluon.jit
def _consumer(
    bias_ptr, out_ptr, pre_ptr, sums_ptr, mail_ptr, out_desc, pre_desc, a_smem, b_smem, rest_smem, out_smem,
    full, empty, order, rounds, M, N, K, stride_bias,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, REST_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr, STAGES: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    OUT_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr, PARTIAL_SUMS: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Owns BLOCK_M rows of each of the program's tiles."""
    # One instruction multiplies 256 bits of each row of a.
    INSTRUCTION_K: gl.constexpr = 256 // a_smem.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, INSTRUCTION_K])
    if rest_smem is not None:
        REST_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST_N, INSTRUCTION_K])
    # With blocks of 128 and of 64 columns it reads a twice; of 32-bit numbers that took longer than registers do.
    A_IN_REGISTERS: gl.constexpr = INSTRUCTION_K == 8 and (A_TRANSPOSED or REST_N == 64)
    step = 0
    steps = gl.cdiv(K, BLOCK_K)
    for i in range(_num_tiles(rounds)):
        tile, first, n_working, begin, end = _tile_and_share(i, rounds, steps, NUM_CONSUMERS)
        if CONSUMER >= n_working:
            # A consumer without work lets the stages pass.
            for _ in range(begin, end):
                mbarrier.wait(full.index(step % STAGES), phase(step, STAGES))
                mbarrier.arrive(empty.index(step % STAGES), count=1)
                step += 1
        else:
            acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
            if rest_smem is not None:
                rest = gl.zeros([BLOCK_M, REST_N], gl.float32, REST_LAYOUT)
            if A_IN_REGISTERS:
                if rest_smem is not None:
                    acc, rest = _sum_from_registers(
                        a_smem, b_smem, rest_smem, full, empty, acc, rest, step, begin, end,
                        NUM_CONSUMERS, STAGES, A_TRANSPOSED, CONSUMER,
                    )  # fmt: skip
                else:
                    acc = _sum_from_registers(
                        a_smem, b_smem, rest_smem, full, empty, acc, None, step, begin, end,
                        NUM_CONSUMERS, STAGES, A_TRANSPOSED, CONSUMER,
                    )  # fmt: skip
                step += end - begin
            else:
                for k in range(begin, end):
                    stage = step % STAGES
                    a = _operand(a_smem, stage * NUM_CONSUMERS + CONSUMER, A_TRANSPOSED)
                    b = _operand(b_smem, stage, B_TRANSPOSED)
                    mbarrier.wait(full.index(stage), phase(step, STAGES))
                    if PARTIAL_SUMS:
                        zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
                        token = warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
                        acc += warpgroup_mma_wait(0, deps=(token,))
                        mbarrier.arrive(empty.index(stage), count=1)
                    else:
                        token = warpgroup_mma(a, b, acc, use_acc=k > begin, is_async=True)
                        # The products of this step stay in flight; those of the one before are done, as is its stage.
                        if rest_smem is not None:
                            b = _operand(rest_smem, stage, B_TRANSPOSED)
                            rest_token = warpgroup_mma(a, b, rest, use_acc=k > begin, is_async=True)
                            acc, rest = warpgroup_mma_wait(2, deps=(token, rest_token))
                        else:
                            acc = warpgroup_mma_wait(1, deps=(token,))
                        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > begin)
                    step += 1
            # The last product is under way while this is computed.
            batch, tile_m, tile_n = _tile(tile, order)
            row = (tile_m * NUM_CONSUMERS + first + CONSUMER) * BLOCK_M
            col = tile_n * (BLOCK_N + REST_N)
            if not PARTIAL_SUMS and not A_IN_REGISTERS:
                if rest_smem is not None:
                    acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
                else:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)

            if out_smem is None:
                _store_part(out_ptr, acc, batch, row, col, M, N, OUT_TRANSPOSED)
                if rest_smem is not None:
                    _store_part(out_ptr, rest, batch, row, col + BLOCK_N, M, N, OUT_TRANSPOSED)
            elif rest_smem is not None:
                left, right = _halves(acc)
                _finish(
                    (left, right, rest), bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, out_smem.index(CONSUMER),
                    batch, row, col, M, N, stride_bias, ACTIVATION, OUT_TRANSPOSED,
                )  # fmt: skip
            elif sums_ptr is None:
                _finish(
                    (acc,), bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, out_smem.index(CONSUMER), batch, row, col,
                    M, N, stride_bias, ACTIVATION, OUT_TRANSPOSED,
                )  # fmt: skip
            elif end < steps:
                _send(sums_ptr, mail_ptr, acc, gl.program_id(0) * NUM_CONSUMERS + CONSUMER)
            else:
                # In two halves: shared memory has no room for more beside the ring, nor have registers for what
                # arrives.
                left, right = _halves(acc)
                left, right = _in_fours(left), _in_fours(right)
                if begin > 0:
                    _, _, n_sharing, _, _, _ = rounds
                    for other in range(gl.program_id(0) - n_sharing + 1, gl.program_id(0)):
                        place = other * NUM_CONSUMERS + CONSUMER
                        left, right = _receive(sums_ptr, mail_ptr, left, right, place)
                left, right = _in_rows(left, BLOCK_M), _in_rows(right, BLOCK_M)
                _finish(
                    (left, right), bias_ptr, out_ptr, pre_ptr, out_desc, pre_desc, out_smem.index(CONSUMER), batch, row,
                    col, M, N, stride_bias, ACTIVATION, OUT_TRANSPOSED,
                )  # fmt: skip
    store_wait(0)


@gluon.jit
def _ring(desc, SLOTS: gl.constexpr):
    """Shared memory for so many tiles of a descriptor."""
    SHAPE: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [SLOTS, 1, SHAPE[1], SHAPE[2]], desc.layout)


@gluon.jit
def _out_tiles(ptr, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Shared memory for so many tiles on their way to the result."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, ROWS, COLS], ptr.dtype.element_ty)
    return gl.allocate_shared_memory(ptr.dtype.element_ty, [SLOTS, 1, ROWS, COLS], LAYOUT)


@gluon.jit
def _tiles(
    a_desc, b_desc, rest_desc, bias_ptr, out_ptr, pre_ptr, sums_ptr, mail_ptr, out_desc, pre_desc, order, rounds, M, N,
    K, a_step, b_step, k_step, stride_bias,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, REST_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr, STAGES: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    OUT_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr, PARTIAL_SUMS: gl.constexpr, OUT_COLS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Divides the program's warps: one group copies the tiles, the others multiply them."""
    # The kernel after this one may make itself ready from now on.
    gdc_launch_dependents()
    a_smem = _ring(a_desc, STAGES * NUM_CONSUMERS)
    b_smem = _ring(b_desc, STAGES)
    out_smem: gl.constexpr = None
    rest_smem: gl.constexpr = None
    if OUT_COLS > 0:
        if OUT_TRANSPOSED:
            out_smem = _out_tiles(out_ptr, NUM_CONSUMERS, OUT_COLS, BLOCK_M)
        else:
            out_smem = _out_tiles(out_ptr, NUM_CONSUMERS, BLOCK_M, OUT_COLS)
    if REST_N > 0:
        rest_smem = _ring(rest_desc, STAGES)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(full.index(0), count=1)
    # The copies, which begin at once, have to find the barrier ready.
    fence_async_shared()
    tile, first, n_working, begin, _ = _tile_and_share(0, rounds, gl.cdiv(K, BLOCK_K), NUM_CONSUMERS)
    batch, tile_m, tile_n = _tile(tile, order)
    # The kernel before this one has to be done: what it writes is read here, and what it reads is written only later.
    gdc_wait()
    # The first copies are on their way while the other barriers are made and the warps part.
    _copy(
        a_desc, b_desc, rest_desc, a_smem, b_smem, rest_smem, full, 0, batch,
        (tile_m * NUM_CONSUMERS + first) * BLOCK_M, tile_n * (BLOCK_N + REST_N), batch * k_step + begin * BLOCK_K,
        n_working, a_step, b_step, BLOCK_M, BLOCK_N, NUM_CONSUMERS, A_TRANSPOSED, B_TRANSPOSED,
    )  # fmt: skip
    mbarrier.init(empty.index(0), count=NUM_CONSUMERS)
    for stage in gl.static_range(1, STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=NUM_CONSUMERS)
    # A tuple kept in a variable would lose its constexprs, so the arguments are spelt out.
    # fmt: off
    if NUM_CONSUMERS == 1:
        gl.warp_specialize([
            (_producer, (
                a_desc, b_desc, rest_desc, a_smem, b_smem, rest_smem, full, empty, order, rounds, K, a_step, b_step,
                k_step, BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, B_TRANSPOSED)),
            (_consumer, (
                bias_ptr, out_ptr, pre_ptr, sums_ptr, mail_ptr, out_desc, pre_desc, a_smem, b_smem, rest_smem,
                out_smem, full, empty, order, rounds, M, N, K, stride_bias,
                BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, B_TRANSPOSED,
                OUT_TRANSPOSED, ACTIVATION, PARTIAL_SUMS, 0)),
        ], [4], [REGISTERS])
    elif NUM_CONSUMERS == 2:
        gl.warp_specialize([
            (_producer, (
                a_desc, b_desc, rest_desc, a_smem, b_smem, rest_smem, full, empty, order, rounds, K, a_step, b_step,
                k_step, BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, B_TRANSPOSED)),
            (_consumer, (
                bias_ptr, out_ptr, pre_ptr, sums_ptr, mail_ptr, out_desc, pre_desc, a_smem, b_smem, rest_smem,
                out_smem, full, empty, order, rounds, M, N, K, stride_bias,
                BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, B_TRANSPOSED,
                OUT_TRANSPOSED, ACTIVATION, PARTIAL_SUMS, 0)),
            (_consumer, (
                bias_ptr, out_ptr, pre_ptr, sums_ptr, mail_ptr, out_desc, pre_desc, a_smem, b_smem, rest_smem,
                out_smem, full, empty, order, rounds, M, N, K, stride_bias,
                BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, B_TRANSPOSED,
                OUT_TRANSPOSED, ACTIVATION, PARTIAL_SUMS, 1)),
        ], [4, 4], [REGISTERS, REGISTERS])
    else:
        gl.warp_specialize([
            (_producer, (
                a_desc, b_desc, rest_desc, a_smem, b_smem, rest_smem, full, empty, order, rounds, K, a_step, b_step,
                k_step, BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, B_TRANSPOSED)),
            (_consumer, (
                bias_ptr, out_ptr, pre_ptr, sums_ptr, mail_ptr, out_desc, pre_desc, a_smem, b_smem, rest_smem,
                out_smem, full, empty, order, rounds, M, N, K, stride_bias,
                BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, B_TRANSPOSED,
                OUT_TRANSPOSED, ACTIVATION, PARTIAL_SUMS, 0)),
            (_consumer, (
                bias_ptr, out_ptr, pre_ptr, sums_ptr, mail_ptr, out_desc, pre_desc, a_smem, b_smem, rest_smem,
                out_smem, full, empty, order, rounds, M, N, K, stride_bias,
                BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, B_TRANSPOSED,
                OUT_TRANSPOSED, ACTIVATION, PARTIAL_SUMS, 1)),
            (_consumer, (
                bias_ptr, out_ptr, pre_ptr, sums_ptr, mail_ptr, out_desc, pre_desc, a_smem, b_smem, rest_smem,
                out_smem, full, empty, order, rounds, M, N, K, stride_bias,
                BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, B_TRANSPOSED,
                OUT_TRANSPOSED, ACTIVATION, PARTIAL_SUMS, 2)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])
    # fmt: on


@gluon.jit(
    do_not_specialize=[
        "tiles_m", "tiles_n", "group_m", "per_matrix", "per_group", "per_column", "per_last_column", "n_rounds",
        "n_last", "n_sharing", "per_tile", "by_rows", "share", "M", "N", "K", "a_step", "b_step",
    ]
)  # fmt: skip
def _matmul_specialized_kernel(
    a_desc,  # (n_matrices or 1, M, K), or (..., K, M) when A_TRANSPOSED
    b_desc,  # (n_matrices or 1, K, N), or (..., N, K) when B_TRANSPOSED
    rest_desc,  # of the same matrix, for REST_N columns; or None
    bias_ptr,  # (N,) or None
    out_ptr,  # (n_matrices, M, N)
    pre_ptr,  # like out, for the values before the activation, or None
    sums_ptr,  # (n_programs, NUM_CONSUMERS, BLOCK_M * BLOCK_N), float32; or None, where nobody can share K
    mail_ptr,  # (n_programs, NUM_CONSUMERS): EMPTY, until the sums are there
    out_desc,  # of out and pre; None where TMA cannot address their rows, which then lie side by side
    pre_desc,
    tiles_m,  # tiles in a column of tiles
    tiles_n,  # and in a row
    group_m,  # rows of tiles that are computed together
    per_matrix,  # inverses of the tiles of a matrix, of a group, and of a column of a group and of the last one
    per_group,
    per_column,
    per_last_column,
    n_rounds,  # full rounds
    n_last,  # programs with work in the last one, which is not full
    n_sharing,  # how many of them share a tile
    per_tile,  # the inverse of that
    by_rows,  # whether they divide its rows, one consumer's for each; or else K
    share,  # so many steps along K for each
    M,
    N,
    K,
    a_step,  # 1, or 0 where one a serves the whole batch
    b_step,
    stride_bias,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    REST_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
    OUT_TRANSPOSED: gl.constexpr,  # out and pre are (n_matrices, N, M), and the bias is (M,)
    ACTIVATION: gl.constexpr,
    PARTIAL_SUMS: gl.constexpr,
    OUT_COLS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Program i owns tiles i, i + n_programs, ... of NUM_CONSUMERS * BLOCK_M rows: out = activation(a @ b + bias).

    If the last round of tiles is not full, n_sharing programs compute each of them.
    """
    order = tiles_m, tiles_n, group_m, per_matrix, per_group, per_column, per_last_column
    rounds = n_rounds, n_last, n_sharing, per_tile, by_rows, share
    _tiles(
        a_desc, b_desc, rest_desc, bias_ptr, out_ptr, pre_ptr, sums_ptr, mail_ptr, out_desc, pre_desc, order, rounds,
        M, N, K, a_step, b_step, 0, stride_bias, BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES,
        A_TRANSPOSED, B_TRANSPOSED, OUT_TRANSPOSED, ACTIVATION, PARTIAL_SUMS, OUT_COLS, REGISTERS,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "tiles_m", "tiles_n", "group_m", "per_matrix", "per_group", "per_column", "per_last_column", "M", "N", "part_k",
    ]
)  # fmt: skip
def _matmul_parts_kernel(
    a_desc,  # (1, M, K), or (1, K, M) when A_TRANSPOSED
    b_desc,  # (1, K, N), or (1, N, K) when B_TRANSPOSED
    rest_desc,  # of the same matrix, for REST_N columns; or None
    out_ptr,  # (n_parts, M, N), float32
    tiles_m,
    tiles_n,
    group_m,
    per_matrix,
    per_group,
    per_column,
    per_last_column,
    M,
    N,
    part_k,  # columns of a in one part; what the last part has beyond K, TMA fills with zeros
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    REST_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
    OUT_TRANSPOSED: gl.constexpr,
    PARTIAL_SUMS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """The same for parts of a product that `_sum_parts_kernel` adds up: out[i] is what the i-th part of K gives.

    Each program owns one tile of one part.
    """
    order = tiles_m, tiles_n, group_m, per_matrix, per_group, per_column, per_last_column
    _tiles(
        a_desc, b_desc, rest_desc, None, out_ptr, None, None, None, None, None, order, None, M, N, part_k, 0, 0,
        part_k, 0, BLOCK_M, BLOCK_N, REST_N, BLOCK_K, NUM_CONSUMERS, STAGES, A_TRANSPOSED, B_TRANSPOSED,
        OUT_TRANSPOSED, None, PARTIAL_SUMS, 0, REGISTERS,
    )  # fmt: skip


# Consumers, columns of a tile, stages (or as many as there is room for beside a result of float32), and how many 16-bit
# multiplications a multiprocessor does in a microsecond. Of all rates, these and those below put the measured times of
# 18 plans for each of 186 products into the best order.
_TILES = (
    (2, 256, 4, 3.7e6),
    (3, 192, 4, 3.6e6),
    (2, 192, 5, 3.5e6),
    (3, 128, 5, 3.4e6),
    (2, 128, 6, 3.4e6),
    (3, 96, 5, 2.9e6),
    (2, 96, 7, 2.6e6),
    (1, 128, 8, 2.6e6),
    (1, 64, 8, 1.8e6),
)
_PART_TILES = [tile for tile in _TILES if tile[0] < 3]  # of parts of K; three consumers were of little use there
_ALONE_PER_US = 2.25e6  # multiplications of one consumer in a microsecond, while the others rest
_LINES_PER_US = 140e3  # of 128 bytes, that the L2 cache sends to all multiprocessors
_LINES_TO_ONE_PER_US = 1.4e3  # and to one of them
_MAX_SHARING = 4  # programs that may divide K
_SHARED_BYTES = 226 * 1024  # for what is on its way in or out, beside the barriers
_TILE_US = 0.27  # of a batch, to begin and to end a tile
_SHARING_US = 8  # what it costs them to hand on their sums
_PARTS_US = 1  # what parts cost beside `sum_us`


def _blocks(n_cols: int) -> tuple[int, int]:
    """The columns of a tile's one or two blocks."""
    block_n = 1 << (n_cols.bit_length() - 1)
    return block_n, n_cols - block_n


class Plan(NamedTuple):
    """How a product is computed."""

    n_consumers: int
    n_cols: int  # of a tile
    n_parts: int  # of K, which a second kernel adds up
    n_sharing: int  # programs that share each tile of the last round
    by_rows: bool  # whether they divide its rows, or else K


def _count_tiles(M: int, N: int, n_matrices: int, n_consumers: int, n_cols: int) -> int:
    return n_matrices * cdiv(M, n_consumers * BLOCK_M) * cdiv(N, n_cols)


def plans(
    M: int, N: int, K: int, n_matrices: int, itemsize: int, partial_sums: bool, device: torch.device
) -> list[Plan]:
    """All that there are for a product."""
    n_places = num_multiprocessors(device)

    def possible_sharing(n_consumers, n_cols):
        """Numbers of programs that may share a tile of the last round, and whether they divide its rows or K."""
        n_tiles = _count_tiles(M, N, n_matrices, n_consumers, n_cols)
        n_last = n_tiles % n_places
        # Without a full round before it smaller tiles are quicker, or parts of K, which all multiprocessors add up.
        if n_last == 0 or n_tiles < n_places:
            return
        if 1 < n_consumers <= n_places // n_last:
            yield n_consumers, True
        if n_consumers > 1 and n_matrices == 1 and _blocks(n_cols)[1] == 0:
            # Sums are handed on of one block only. Eight steps for each on average, so that none is without any.
            for n_sharing in range(2, min(_MAX_SHARING, n_places // n_last, K * itemsize // (8 * STEP_BYTES)) + 1):
                yield n_sharing, False

    # A second accumulator leaves no registers for more than 128 columns, and there is none for a second block.
    tiles, part_tiles = (
        [tile[:2] for tile in tiles if not partial_sums or tile[1] in (64, 128)] for tiles in (_TILES, _PART_TILES)
    )
    found = [Plan(*tile, 1, 1, False) for tile in tiles]
    found += [Plan(*tile, 1, *sharing) for tile in tiles for sharing in possible_sharing(*tile)]
    if n_matrices == 1:
        for tile in part_tiles:
            n_parts = possible_parts(K, _count_tiles(M, N, 1, *tile), device)
            found += [Plan(*tile, n, 1, False) for n in n_parts if n > 1]
    return found


@functools.lru_cache(4096)
def _plan(
    M: int,
    N: int,
    K: int,
    n_matrices: int,
    itemsize: int,
    partial_sums: bool,
    lines: tuple[float, float],
    device: torch.device,
) -> Plan:
    """The one that should be the quickest; `lines` is what `_lines` says of a and of b."""
    n_places = num_multiprocessors(device)
    all_memory_us = n_matrices * memory_us(M, N, K, itemsize)
    is_batch = n_matrices > 1 and K * itemsize >= 256  # the tiles of a shorter K are soon done, whichever they are
    if is_batch:
        all_memory_us += memory_us(n_matrices * M, 0, N, 2)
    rates = {tile[:2]: tile[3] for tile in _TILES}

    def time(plan):
        n_consumers, n_cols, n_parts, n_sharing, by_rows = plan
        part_k = cdiv(K * itemsize, n_parts * STEP_BYTES) * STEP_BYTES / 2
        rate = rates[n_consumers, n_cols]
        if partial_sums and n_consumers < 3:
            # While a consumer adds to its sums it multiplies nothing, and there is but one other.
            rate *= 0.9
        lines_of_step = n_consumers * BLOCK_M * lines[0] + n_cols * lines[1]
        tile_us = max(
            n_consumers * BLOCK_M * n_cols * part_k / rate,
            part_k * 2 / STEP_BYTES * lines_of_step / _LINES_TO_ONE_PER_US,
        )
        n_tiles = _count_tiles(M, N, n_matrices, n_consumers, n_cols)
        cache_us = n_tiles * cdiv(K * itemsize, STEP_BYTES) * lines_of_step / _LINES_PER_US
        n_rounds = n_tiles // n_places
        after_us = 0
        if by_rows:
            busy_us = n_rounds * tile_us + BLOCK_M * n_cols * part_k / _ALONE_PER_US
        elif n_sharing > 1:
            busy_us = (n_rounds + 1 / n_sharing) * tile_us
            after_us = _SHARING_US
        else:
            busy_us = cdiv(n_tiles * n_parts, n_places) * tile_us
            after_us = sum_us(n_parts, M * N) + (_PARTS_US if n_parts > 1 else 0)
        if is_batch:
            # Many small products take as long as memory does; the smaller the last tile, the sooner it leaves then.
            busy_us += cdiv(n_tiles, n_places) * _TILE_US
            return max(busy_us, cache_us, all_memory_us + tile_us)
        return max(busy_us, cache_us, all_memory_us) + after_us

    return min(plans(M, N, K, n_matrices, itemsize, partial_sums, device), key=time)


def _lines(x: torch.Tensor) -> float:
    """What 128 bytes of a row cost the L2 cache, in its lines: two, unless the row begins with one. The mean of rows.

    Of rows that begin inside of a sector it is five sectors as well, not four.
    """
    n_bytes = row_bytes(x)
    return 2 - math.gcd(n_bytes, STEP_BYTES) / STEP_BYTES if n_bytes % SECTOR == 0 else 2.2


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    pre: torch.Tensor | None,
    activation: str | None,
    reduced: bool,
    batch: tuple,
    plan: tuple | None = None,
) -> None:
    """What `hopper.matmul.multiply` does, with this module's kernel; out and pre may have any number of columns.

    `plan` is one of `plans`; None means the one that should be the quickest.
    """
    (n_matrices,), ((a_stride,), (b_stride,)) = batch
    # Of float32 only a may lie across K. Where b does, the transposed product is computed.
    out_transposed = a.dtype == torch.float32 and not is_transposed(b)
    if out_transposed:
        a, b, a_stride, b_stride = b.mT, a.mT, b_stride, a_stride
    (M, K), N = a.shape[-2:], b.shape[-1]
    partial_sums = a.dtype in FLOAT8 and not reduced
    if plan is None:
        plan = _plan(M, N, K, n_matrices, a.element_size(), partial_sums, (_lines(a), _lines(b)), a.device)
    n_consumers, n_cols, n_parts, n_sharing, by_rows = plan
    block_k = STEP_BYTES // a.element_size()
    block_n, rest_n = _blocks(n_cols)
    tiles_m, tiles_n = cdiv(M, BLOCK_M * n_consumers), cdiv(N, n_cols)
    a_transposed, b_transposed = is_transposed(a), is_transposed(b)

    def describe(x, stride, rows, cols, transposed):
        return descriptor(matrices(x, n_matrices, stride), [1, cols, rows] if transposed else [1, rows, cols])

    descriptors = (
        describe(a, a_stride, BLOCK_M, block_k, a_transposed),
        describe(b, b_stride, block_k, block_n, b_transposed),
        describe(b, b_stride, block_k, rest_n, b_transposed) if rest_n else None,
    )
    # The only consumer has nobody to work while it stores, so it does that at once.
    out_cols = block_n if n_consumers == 1 else block_n // 2
    out_bytes = 0 if n_parts > 1 else n_consumers * BLOCK_M * out_cols * out.element_size()
    stages = next(stages for *tile, stages, _ in _TILES if tile == [n_consumers, n_cols])
    config = dict(
        BLOCK_N=block_n, REST_N=rest_n, NUM_CONSUMERS=n_consumers,
        STAGES=min(stages, (_SHARED_BYTES - out_bytes) // (STEP_BYTES * (n_consumers * BLOCK_M + n_cols))),
        REGISTERS=160 if n_consumers == 3 else 240, BLOCK_M=BLOCK_M, BLOCK_K=block_k,
        A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed, OUT_TRANSPOSED=out_transposed,
        PARTIAL_SUMS=partial_sums, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    if n_parts > 1:
        part_k = cdiv(K, n_parts * block_k) * block_k
        n_parts = cdiv(K, part_k)
    n_tiles = n_matrices * n_parts * tiles_m * tiles_n
    n_programs = min(num_multiprocessors(a.device), n_tiles)
    # Groups of about the same size, for the rows to be read while they are in L2.
    group_m = cdiv(tiles_m, max(1, round(tiles_m / (12 if block_n == 256 else 8))))
    divisors = tiles_m * tiles_n, group_m * tiles_n, group_m, tiles_m % group_m or group_m
    order = tiles_m, tiles_n, group_m, *map(_inverse, divisors)
    if n_parts > 1:
        # Rows that begin at multiples of 16 bytes.
        n_rows, n_row = out.shape[-2:]
        parts = scratch((n_parts, n_rows, cdiv(n_row, 4) * 4), torch.float32, out.device)[..., :n_row]
        launch(
            _matmul_parts_kernel, (n_programs,),
            *descriptors, parts, *order, M, N, part_k,
            **config,
        )  # fmt: skip
        sum_parts(parts, bias, out, pre, activation)
        return
    out_desc, pre_desc = (
        descriptor(
            matrices(x, n_matrices, x.shape[-2] * x.stride(-2)),
            [1, out_cols, BLOCK_M] if out_transposed else [1, BLOCK_M, out_cols],
        )
        if x is not None and x.stride(-2) * x.element_size() % 16 == 0
        else None
        for x in (out, pre)
    )
    if n_sharing > 1 and not by_rows:
        sums = scratch((n_programs, n_consumers, BLOCK_M, block_n), torch.float32, a.device)
        mail = mailboxes(n_programs, n_consumers, a.device)
    elif n_consumers > 1 and rest_n == 0:
        # Nobody looks there. They save a compiled kernel for products that divide no K.
        start = out.as_strided((4,), (1,))
        sums, mail = start.view(torch.float32), start.view(torch.int64)
    else:
        sums = mail = None
    launch(
        _matmul_specialized_kernel, (n_programs,),
        *descriptors, bias, out, pre, sums, mail, out_desc, pre_desc, *order,
        n_tiles // n_programs, n_tiles % n_programs * n_sharing, n_sharing, _inverse(n_sharing), int(by_rows),
        cdiv(cdiv(K, block_k), n_sharing), M, N, K, int(a_stride > 0), int(b_stride > 0),
        0 if bias is None else bias.stride(0),
        OUT_COLS=out_cols, ACTIVATION=activation, **config,
    )  # fmt: skip
