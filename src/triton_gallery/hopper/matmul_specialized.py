"""Matrix multiplication for Hopper in Gluon: warps with different jobs, placed by hand.

What ``tl`` cannot say and this kernel does: one warp group does nothing but start TMA copies (the *producer*), and two
or three others do nothing but multiply and store (the *consumers*). They meet at barriers in shared memory, two for
each stage of a ring of tiles: `full` trips when a copy has arrived, `empty` when all consumers have used it. The copies
run as far ahead as the ring is long, also into the next output tile while the consumers still store this one.
"""

import torch

from .._launch import cdiv, launch, num_multiprocessors
from ..matmul import _activate, _grouped_tile
from ._gluon import (
    async_load,
    async_store,
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
from .matmul import FLOAT8, is_transposed, matrices
from .matmul_plan import in_parts, possible_parts, time_us

BLOCK_M = 64  # rows of one consumer: what one warp group multiplies


@gluon.jit
def _producer(
    a_desc, b_desc, a_smem, b_smem, full, empty, n_tiles, tiles_m, tiles_n, K, a_step, b_step,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of a and b in the order in which the consumers want them."""
    step = 0
    for i in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        batch = i // (tiles_m * tiles_n)
        tile_m, tile_n = _grouped_tile(i % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row = tile_m * (BLOCK_M * NUM_CONSUMERS)
        col = tile_n * BLOCK_N
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), phase(step, STAGES) ^ 1)
            mbarrier.expect(full.index(stage), NUM_CONSUMERS * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            if B_TRANSPOSED:
                async_load(b_desc, [batch * b_step, col, k], full.index(stage), b_smem.index(stage))
            else:
                async_load(b_desc, [batch * b_step, k, col], full.index(stage), b_smem.index(stage))
            for c in gl.static_range(NUM_CONSUMERS):
                a_tile = a_smem.index(stage * NUM_CONSUMERS + c)
                if A_TRANSPOSED:
                    async_load(a_desc, [batch * a_step, k, row + c * BLOCK_M], full.index(stage), a_tile)
                else:
                    async_load(a_desc, [batch * a_step, row + c * BLOCK_M, k], full.index(stage), a_tile)
            step += 1


@gluon.jit
def _store(desc, values, smem, batch, row, col):
    """Send values to memory by way of shared memory, once the copy before has left it."""
    store_wait(0)
    smem.reshape((values.shape[0], values.shape[1])).store(values.to(desc.dtype))
    fence_async_shared()
    async_store(desc, [batch, row, col], smem)


@gluon.jit
def _consumer(
    bias_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, n_tiles, tiles_m, tiles_n, N, K, stride_bias,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr, PARTIAL_SUMS: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Owns BLOCK_M rows of each of the program's tiles."""
    # One instruction multiplies 256 bits of each row of a.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 256 // a_smem.dtype.primitive_bitwidth]
    )
    smem = out_smem.index(CONSUMER)
    step = 0
    for i in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        batch = i // (tiles_m * tiles_n)
        tile_m, tile_n = _grouped_tile(i % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row = tile_m * (BLOCK_M * NUM_CONSUMERS) + CONSUMER * BLOCK_M
        col = tile_n * BLOCK_N
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            if A_TRANSPOSED:
                a = a_smem.index(stage * NUM_CONSUMERS + CONSUMER).reshape((BLOCK_K, BLOCK_M)).permute((1, 0))
            else:
                a = a_smem.index(stage * NUM_CONSUMERS + CONSUMER).reshape((BLOCK_M, BLOCK_K))
            if B_TRANSPOSED:
                b = b_smem.index(stage).reshape((BLOCK_N, BLOCK_K)).permute((1, 0))
            else:
                b = b_smem.index(stage).reshape((BLOCK_K, BLOCK_N))
            mbarrier.wait(full.index(stage), phase(step, STAGES))
            if PARTIAL_SUMS:
                zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
                token = warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
                acc += warpgroup_mma_wait(0, deps=(token,))
                mbarrier.arrive(empty.index(stage), count=1)
            else:
                token = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
                # One product stays in flight; the one before it is done, and so is its stage.
                acc = warpgroup_mma_wait(1, deps=(token,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        if not PARTIAL_SUMS:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)

        # In two halves, because shared memory has no room for more beside the ring.
        left, right = gl.split(gl.permute(gl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        for half in gl.static_range(2):
            pre = left if half == 0 else right
            first = col + half * (BLOCK_N // 2)
            if bias_ptr is not None:
                # One number for each thread; all of them are then handed to whoever needs them.
                cols = first + gl.arange(0, BLOCK_N // 2, gl.BlockedLayout([1], [32], [4], [0]))
                bias = gl.load(bias_ptr + cols.to(gl.int64) * stride_bias, mask=cols < N, other=0.0).to(gl.float32)
                pre += gl.convert_layout(bias, gl.SliceLayout(0, pre.type.layout))[None, :]
            if pre_desc is not None:
                _store(pre_desc, pre, smem, batch, row, first)
            _store(out_desc, _activate(pre, ACTIVATION, out_desc.dtype), smem, batch, row, first)
    store_wait(0)


@gluon.jit(do_not_specialize=["n_matrices", "M", "N", "K", "a_step", "b_step"])
def _matmul_specialized_kernel(
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
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PARTIAL_SUMS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Program i owns tiles i, i + n_programs, ... of NUM_CONSUMERS * BLOCK_M rows: out = activation(a @ b + bias)."""
    A_SLOTS: gl.constexpr = [STAGES * NUM_CONSUMERS]
    B_SLOTS: gl.constexpr = [STAGES]
    OUT_SLOTS: gl.constexpr = [NUM_CONSUMERS]
    a_smem = gl.allocate_shared_memory(a_desc.dtype, A_SLOTS + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, B_SLOTS + b_desc.block_type.shape, b_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, OUT_SLOTS + out_desc.block_type.shape, out_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=NUM_CONSUMERS)
    tiles_m = gl.cdiv(M, BLOCK_M * NUM_CONSUMERS)
    tiles_n = gl.cdiv(N, BLOCK_N)
    n_tiles = n_matrices * tiles_m * tiles_n
    # A tuple kept in a variable would lose its constexprs, so the arguments are spelt out.
    # fmt: off
    if NUM_CONSUMERS == 2:
        gl.warp_specialize([
            (_producer, (
                a_desc, b_desc, a_smem, b_smem, full, empty, n_tiles, tiles_m, tiles_n, K, a_step, b_step,
                BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, GROUP_M, A_TRANSPOSED, B_TRANSPOSED)),
            (_consumer, (
                bias_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, n_tiles, tiles_m, tiles_n, N, K,
                stride_bias, BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, GROUP_M, A_TRANSPOSED, B_TRANSPOSED,
                ACTIVATION, PARTIAL_SUMS, 0)),
            (_consumer, (
                bias_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, n_tiles, tiles_m, tiles_n, N, K,
                stride_bias, BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, GROUP_M, A_TRANSPOSED, B_TRANSPOSED,
                ACTIVATION, PARTIAL_SUMS, 1)),
        ], [4, 4], [REGISTERS, REGISTERS])
    else:
        gl.warp_specialize([
            (_producer, (
                a_desc, b_desc, a_smem, b_smem, full, empty, n_tiles, tiles_m, tiles_n, K, a_step, b_step,
                BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, GROUP_M, A_TRANSPOSED, B_TRANSPOSED)),
            (_consumer, (
                bias_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, n_tiles, tiles_m, tiles_n, N, K,
                stride_bias, BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, GROUP_M, A_TRANSPOSED, B_TRANSPOSED,
                ACTIVATION, PARTIAL_SUMS, 0)),
            (_consumer, (
                bias_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, n_tiles, tiles_m, tiles_n, N, K,
                stride_bias, BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, GROUP_M, A_TRANSPOSED, B_TRANSPOSED,
                ACTIVATION, PARTIAL_SUMS, 1)),
            (_consumer, (
                bias_ptr, out_desc, pre_desc, a_smem, b_smem, out_smem, full, empty, n_tiles, tiles_m, tiles_n, N, K,
                stride_bias, BLOCK_M, BLOCK_N, BLOCK_K, NUM_CONSUMERS, STAGES, GROUP_M, A_TRANSPOSED, B_TRANSPOSED,
                ACTIVATION, PARTIAL_SUMS, 2)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])
    # fmt: on


# Consumers, columns of a tile, stages, the share of the first tile's rate that it reaches, and whether there is room in
# shared memory for a float32 tile on its way out.
_TILES = (
    (2, 256, 4, 1.0, False),
    (3, 128, 5, 0.95, False),
    (2, 128, 6, 0.88, True),
    (2, 64, 6, 0.6, True),
)
_PER_US = 3e6  # 16-bit multiplications of one multiprocessor with the first tile


def _config(
    M: int, N: int, K: int, n_matrices: int, itemsize: int, partial_sums: bool, device: torch.device
) -> tuple[int, dict[str, int]]:
    """Parts of K, and the tile, that take the least time."""

    def n_tiles(tile):
        n_consumers, block_n = tile[:2]
        return n_matrices * cdiv(M, n_consumers * BLOCK_M) * cdiv(N, block_n)

    def time(choice):
        tile, n_parts = choice
        n_consumers, block_n, _, rate, _ = tile
        tile_us = n_consumers * BLOCK_M * block_n * K * itemsize / 2 / (_PER_US * rate)
        return time_us(n_tiles(tile), tile_us, n_parts, M * N, device)

    choices = [
        (tile, n_parts)
        for tile in _TILES[partial_sums:]  # a second accumulator leaves no registers for 256 columns
        for n_parts in (possible_parts(K, n_tiles(tile), device) if tile[-1] and n_matrices == 1 else (1,))
    ]
    (n_consumers, block_n, stages, *_), n_parts = min(choices, key=time)
    registers = 240 if n_consumers == 2 else 160
    return n_parts, dict(BLOCK_N=block_n, NUM_CONSUMERS=n_consumers, STAGES=stages, REGISTERS=registers)


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
    """What `hopper.matmul.multiply` does, with this module's kernel."""
    (M, N), K = out.shape[-2:], a.shape[-1]
    partial_sums = a.dtype in FLOAT8 and not reduced
    n_parts, config = _config(M, N, K, batch[0][0], a.element_size(), partial_sums, a.device)
    in_parts(
        lambda *arguments: _launch(*arguments, partial_sums, config),
        n_parts, 4,  # TMA stores rows that begin at multiples of 16 bytes
        a, b, bias, out, pre, activation, batch,
    )  # fmt: skip


def _launch(a, b, bias, out, pre, activation, batch, partial_sums, config) -> None:
    (n_matrices,), ((a_stride,), (b_stride,)) = batch
    (M, N), K = out.shape[-2:], a.shape[-1]
    n_programs = num_multiprocessors(a.device)
    block_n, block_k = config["BLOCK_N"], 128 // a.element_size()
    n_tiles = n_matrices * cdiv(M, BLOCK_M * config["NUM_CONSUMERS"]) * cdiv(N, block_n)
    a_transposed, b_transposed = is_transposed(a), is_transposed(b)
    out_desc, pre_desc = (
        None if x is None else descriptor(matrices(x, n_matrices, M * x.stride(-2)), [1, BLOCK_M, block_n // 2])
        for x in (out, pre)
    )
    a_block = [1, block_k, BLOCK_M] if a_transposed else [1, BLOCK_M, block_k]
    b_block = [1, block_n, block_k] if b_transposed else [1, block_k, block_n]
    launch(
        _matmul_specialized_kernel,
        (min(n_programs, n_tiles),),
        descriptor(matrices(a, n_matrices, a_stride), a_block),
        descriptor(matrices(b, n_matrices, b_stride), b_block),
        bias, out_desc, pre_desc,
        n_matrices, M, N, K, int(a_stride > 0), int(b_stride > 0), 0 if bias is None else bias.stride(0),
        BLOCK_M=BLOCK_M,
        BLOCK_K=block_k,
        GROUP_M=8,
        A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed,
        ACTIVATION=activation,
        PARTIAL_SUMS=partial_sums,
        **config,
        num_warps=4,
    )  # fmt: skip
