"""Flash attention forward for Hopper, in Gluon: the formulas of ``triton_gallery.attention``, placed by hand.

What ``tl`` cannot say and this kernel does: one warp group does nothing but start TMA copies (the *producer*), one to
three others do the arithmetic (the *consumers*), and all of them meet at barriers in shared memory. A copy, a matrix
product and an exponential are then under way at the same time in one multiprocessor. A program walks a list of tiles
that the host made, so that the short tiles of a causal mask fill the gaps which the long ones leave.

Source: Shah et al., FlashAttention-3 (2024), for overlapping the softmax with the matrix products.
"""

import functools
import heapq
from concurrent.futures import ThreadPoolExecutor

import torch
from triton.language.extra.cuda import gdc_launch_dependents

from .._launch import cdiv, launch, num_multiprocessors, padded, scratch, table
from ..attention import join_splits
from ._gluon import (
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier,
    opaque,
    phase,
    store_wait,
    tma_can_address,
    to_16_bits,
    warpgroup_mma_wait,
)
from .attention_rows import (
    allocate,
    cut_off,
    load_rows,
    masked,
    parts,
    piece_width,
    row_width,
    scale_sums,
    some_rows,
    start_scores,
    start_sums,
    store_rows,
    store_tile,
    tile_bytes,
    wait_sums,
    zero_sums,
)

LOG2_E = 1.4426950408889634
MAX_TILES = gl.constexpr(4096)  # query tiles of one head; a schedule entry is head * MAX_TILES + tile
CONSUMER_ROWS = 64  # query rows of a consumer
L2_BYTES = 33 * 2**20  # what the heads in flight may take of the L2 cache


def supports(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, lower: int | None, upper: int | None
) -> bool:
    """Whether these inputs fit the kernels: 16-bit, rows that TMA can address, a key for each query.

    Query i is allowed the keys from i + lower to i + upper; None stands for no limit.
    """
    most = k.shape[-2] - q.shape[-2] if upper is None else min(k.shape[-2] - q.shape[-2], upper)
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and min(q.numel(), k.numel(), v.numel()) > 0
        and (upper is None or upper >= 0)
        and (lower is None or lower <= most)
        # The running maximum is taken of the unscaled scores.
        and scale > 0
        # A tile's number and its head share one int32 of the schedule.
        and q.shape[-2] <= MAX_TILES.value * 128
        and q.shape[0] * q.shape[1] < 2**31 // MAX_TILES.value
        and all(tma_can_address(x) for x in (q, k, v))
    )


def keeps_memory_busy(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether memory has enough to do, to the end, when each program has few queries, and all keys.

    Reading those takes all the time then. When fewer than two thirds as many programs are left as there are
    multiprocessors, their copies cannot use all of the memory's rate, and they take as long as so many would.
    """
    n_tiles = q.shape[0] * q.shape[1] * cdiv(q.shape[2], CONSUMER_ROWS)
    n_sms = num_multiprocessors(q.device)
    n_last = n_tiles % (n_sms * _programs_per_sm(q, v))
    idle = max(0, 2 * n_sms // 3 - n_last) if n_last else 0
    return 10 * idle < n_tiles


def _programs_per_sm(q, v):
    """For few queries: as many as shared memory and registers have room for."""
    width = max(row_width(q), row_width(v))
    return 3 if width == 64 else 2 if width <= 192 else 1


def _suits_one_consumer(q, v, is_causal):
    """Whether programs of 64 queries, several on each multiprocessor, are quicker than those of 128 or more.

    They are for few queries, and for somewhat more where the last tile of 128 would be half empty. At head_dim 64, of
    few keys, they are also where the causal mask or the end of the only tile leaves less to multiply.
    """
    seq_q, seq_kv, width = q.shape[2], v.shape[2], max(row_width(q), row_width(v))
    if width > 192 or (width > 128 and is_causal) or not keeps_memory_busy(q, v):
        return False
    suits = 0 < seq_q % 128 <= 64 and seq_q <= (704 if width == 64 else 320)
    if width == 64 and max(seq_q, seq_kv) <= 448:
        suits = suits or (not 96 < seq_q <= 128 if is_causal else seq_q < 128)
    return suits


def _in_turn(n_tiles, n_heads, n_programs, head_stride):
    """The schedule of equal tiles: each program takes the next one."""
    heads, tiles = (torch.arange(n, device="cpu") for n in (n_heads, n_tiles))
    tiles = heads[:, None] * head_stride + tiles
    rounds = cdiv(tiles.numel(), n_programs) + 1
    padded_tiles = torch.nn.functional.pad(tiles.flatten(), (0, rounds * n_programs - tiles.numel()), value=-1)
    return padded_tiles.view(rounds, n_programs).T.to(torch.int32).contiguous()


def _longest_first(n_steps, n_heads, heads_in_flight, n_programs, head_stride):
    """The schedule of unequal tiles: within a group of heads the longest go first, each to the program free first.

    In turn, the tiles of a causal mask would leave 7 to 39 % of an H200 idle, counted in tiles, at page six's lengths.
    """
    lists = [[] for _ in range(n_programs)]
    free_at = [(0.0, program) for program in range(n_programs)]
    for first in range(0, n_heads, heads_in_flight):
        heads = range(first, min(n_heads, first + heads_in_flight))
        tiles = [(tile, head) for head in heads for tile in range(len(n_steps))]
        for tile, head in sorted(tiles, key=lambda entry: -n_steps[entry[0]]):
            time, program = heapq.heappop(free_at)
            lists[program].append(head * head_stride + tile)
            # 0.6 of a step is what starting and ending a tile costs.
            heapq.heappush(free_at, (time + n_steps[tile] + 0.6, program))
    width = max(map(len, lists)) + 1
    rows = [tiles + [-1] * (width - len(tiles)) for tiles in lists]
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


@functools.cache  # of any size: a CUDA graph may hold the address of any of them
def schedule(
    n_steps: tuple[float, ...],
    n_heads: int,
    heads_in_flight: int,
    n_programs: int,
    head_stride: int,
    device: torch.device,
) -> torch.Tensor:
    """An int32 table (programs, width): the tiles of each program as head * head_stride + tile, −1 after the last.

    Args:
        n_steps: how long each tile of a head takes: as so many tiles of the other side.
        heads_in_flight: of how many heads the other side stays in L2; where tiles are unequal, a group of these ends
            first.
    """
    n_tiles = len(n_steps)
    n_programs = min(n_programs, n_tiles * n_heads)
    if min(n_steps) == max(n_steps):
        entries = _in_turn(n_tiles, n_heads, n_programs, head_stride)
    else:
        entries = _longest_first(n_steps, n_heads, heads_in_flight, n_programs, head_stride)
    # torch.compile, when it prepares a CUDA graph, takes what its thread allocates for a part of the graph.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(entries.to, device).result()


def _schedule_for(n_heads, rows, seq_q, seq_kv, lower, upper, block_n, is_ragged, head_dim, n_programs, device):
    n_kv_tiles = [
        min(cdiv(min((tile + 1) * rows, seq_q) + upper, block_n), cdiv(seq_kv, block_n))
        - max(tile * rows + lower, 0) // block_n
        for tile in range(cdiv(seq_q, rows))
    ]
    if min(n_kv_tiles) == max(n_kv_tiles):
        # However many they are: a sequence that grows word by word takes few tables.
        n_kv_tiles = [8] * len(n_kv_tiles)
    if is_ragged:
        # The last tile is the sooner done, the fewer consumers have rows of it.
        n_kv_tiles[-1] *= 0.7
    heads_in_flight = 1
    while heads_in_flight < 64 and heads_in_flight * 2 * seq_kv * head_dim * 4 <= L2_BYTES:
        heads_in_flight *= 2
    return table(schedule(tuple(n_kv_tiles), n_heads, heads_in_flight, n_programs, MAX_TILES.value, device))


@gluon.jit
def _wait_turn(CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    """Consumers take turns to start their matrix products: while one multiplies, another takes exponentials."""
    if NUM_CONSUMERS == 1:
        return
    if CONSUMER == 0:
        named_barrier("barrier.sync", "9")
    elif CONSUMER == 1:
        named_barrier("barrier.sync", "10")
    else:
        named_barrier("barrier.sync", "11")


@gluon.jit
def _pass_turn(CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    if NUM_CONSUMERS == 1:
        return
    if CONSUMER == NUM_CONSUMERS - 1:
        named_barrier("barrier.arrive", "9")
    elif CONSUMER == 0:
        named_barrier("barrier.arrive", "10")
    else:
        named_barrier("barrier.arrive", "11")


@gluon.jit
def _kv_tiles(
    tile, seq_q, seq_kv, lower, upper, n_splits, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr,
    IS_BAND: gl.constexpr, IS_SPLIT: gl.constexpr,
):  # fmt: skip
    """The first key tile that a query tile needs, and the end of them; with IS_SPLIT, of this program's share."""
    begin = 0
    end = gl.cdiv(seq_kv, BLOCK_N)
    if IS_CAUSAL:
        end = gl.minimum(gl.cdiv((tile + 1) * ROWS, BLOCK_N), end)
    if IS_BAND:
        begin = gl.maximum(tile * ROWS + lower, 0) // BLOCK_N
        end = gl.minimum(gl.cdiv(gl.minimum((tile + 1) * ROWS, seq_q) + upper, BLOCK_N), end)
    if IS_SPLIT:
        split = gl.program_id(0) % n_splits
        n = end - begin
        end = begin + (split + 1) * n // n_splits
        begin += split * n // n_splits
    return begin, end


@gluon.jit
def _batch_and_head(head, heads_inverse, n_heads):
    """The batch of a head, counted through all batches, and its number there: a division, in fewer instructions.

    (head + 1/2) / n_heads is at least 1/2 / n_heads away from all integers, and float32 is as exact as that for all
    numbers of heads that `supports` lets through.
    """
    batch = ((head.to(gl.float32) + 0.5) * heads_inverse).to(gl.int32)
    return batch, head - batch * n_heads


@gluon.jit
def _copy_kv_tile(desc, batch, head, row, smem, full, empty, step):
    """Wait until the consumers have left the stage, then start the copy; its arrival trips the `full` barrier."""
    STAGES: gl.constexpr = full.shape[0]
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), phase(step, STAGES) ^ 1)
    mbarrier.expect(full.index(stage), tile_bytes(desc, smem))
    load_rows(desc, batch, head, row, smem, stage, full.index(stage))


@gluon.jit
def _fwd_producer(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    seq_q, seq_kv, lower, upper, n_heads, group_size, n_splits, schedule_ptr, schedule_width,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_CONSUMERS: gl.constexpr, IS_CAUSAL: gl.constexpr,
    IS_BAND: gl.constexpr, IS_SPLIT: gl.constexpr,
):  # fmt: skip
    """Copies Q once per tile, and K and V tile by tile from the last one backwards."""
    Q_STAGES: gl.constexpr = q_full.shape[0] // NUM_CONSUMERS
    step = 0
    entry_ptr = schedule_ptr + (gl.program_id(0) // n_splits if IS_SPLIT else gl.program_id(0)) * schedule_width
    n_done = 0
    entry = gl.load(entry_ptr)
    while entry >= 0:
        next_entry = gl.load(entry_ptr + n_done + 1)
        tile = entry % MAX_TILES
        batch = (entry // MAX_TILES) // n_heads
        head = (entry // MAX_TILES) % n_heads
        kv_head = head // group_size
        TILE_ROWS: gl.constexpr = BLOCK_M * NUM_CONSUMERS
        begin, end = _kv_tiles(
            tile, seq_q, seq_kv, lower, upper, n_splits, TILE_ROWS, BLOCK_N, IS_CAUSAL, IS_BAND, IS_SPLIT
        )
        # The first K goes before Q: it need not wait for the previous tile to end.
        _copy_kv_tile(k_desc, batch, kv_head, (end - 1) * BLOCK_N, k_smem, k_full, k_empty, step)
        for c in gl.static_range(NUM_CONSUMERS):
            q_place = n_done % Q_STAGES * NUM_CONSUMERS + c
            mbarrier.wait(q_empty.index(q_place), phase(n_done, Q_STAGES) ^ 1)
            mbarrier.expect(q_full.index(q_place), tile_bytes(q_desc, q_smem))
            row = tile * TILE_ROWS + c * BLOCK_M
            load_rows(q_desc, batch, head, row, q_smem, q_place, q_full.index(q_place))
        for j in range(1, end - begin):
            # K runs one tile ahead of V, as the consumers' products do.
            _copy_kv_tile(k_desc, batch, kv_head, (end - 1 - j) * BLOCK_N, k_smem, k_full, k_empty, step + 1)
            _copy_kv_tile(v_desc, batch, kv_head, (end - j) * BLOCK_N, v_smem, v_full, v_empty, step)
            step += 1
        _copy_kv_tile(v_desc, batch, kv_head, begin * BLOCK_N, v_smem, v_full, v_empty, step)
        step += 1
        n_done += 1
        entry = next_entry


@gluon.jit
def _fwd_step(
    q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, p, acc, row_max, row_sum, scale_log2,
    row, tile, lower, upper,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, V_ROWS: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
    MASK_LOWER: gl.constexpr, MASK_UPPER: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Start S = Q Kᵀ of the next tile and acc += P V of this one together; the softmax of S runs under P V.

    With MASK_LOWER or MASK_UPPER, the tile may hold keys outside that limit of the queries from `row` on.
    """
    BLOCK_N: gl.constexpr = k_smem[0].shape[3]
    STAGES: gl.constexpr = k_full.shape[0]
    next_stage = (step + 1) % STAGES
    stage = step % STAGES
    v = some_rows(parts(v_smem, stage, BLOCK_DV), 0, V_ROWS)
    k = parts(k_smem, next_stage, BLOCK_D)
    mbarrier.wait(k_full.index(next_stage), phase(step + 1, STAGES))
    _wait_turn(CONSUMER, NUM_CONSUMERS)
    s_token = start_scores(q, k)
    mbarrier.wait(v_full.index(stage), phase(step, STAGES))
    acc_tokens = start_sums(p, v, acc)
    _pass_turn(CONSUMER, NUM_CONSUMERS)
    s = warpgroup_mma_wait(len(acc), deps=(s_token,))
    mbarrier.arrive(k_empty.index(next_stage), count=1)
    if MASK_LOWER or MASK_UPPER:
        s = masked(s, row, tile * BLOCK_N, lower, upper, MASK_LOWER, MASK_UPPER)
    # exp(x - m) as exp2: log2(e) is folded into the scale, so that x * scale - m is one fused multiply-add.
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    p_f32 = gl.exp2(s * scale_log2 - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + gl.sum(p_f32, 1)
    acc = wait_sums(acc_tokens, 0)
    mbarrier.arrive(v_empty.index(stage), count=1)
    return to_16_bits(p_f32, k_smem[0].dtype), scale_sums(acc, rescale), new_max, row_sum


@gluon.jit
def _fwd_consumer(
    out_desc, lse_ptr, split_out_ptr, q_smem, k_smem, v_smem, out_smem,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    seq_q, seq_kv, lower, upper, n_heads, n_splits, schedule_ptr, schedule_width, scale_log2,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr, IS_CAUSAL: gl.constexpr, IS_BAND: gl.constexpr, HANDS_BACK: gl.constexpr,
    DIAGONAL_FIRST: gl.constexpr, EVEN_KV: gl.constexpr, OUT_IN_Q: gl.constexpr, IS_SPLIT: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Owns BLOCK_M query rows of each tile; unless IS_BAND, only the first key tile it meets can need a mask."""
    dtype: gl.constexpr = out_desc.dtype
    # With two consumers the diagonal tile is 128 x 128: the upper one's rows see its first half only.
    HALF: gl.constexpr = DIAGONAL_FIRST and NUM_CONSUMERS == 2 and CONSUMER == 0 and BLOCK_N == 2 * BLOCK_M
    FIRST_N: gl.constexpr = BLOCK_N // 2 if HALF else BLOCK_N
    FIRST_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST_N, 16])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    STAGES: gl.constexpr = k_full.shape[0]
    Q_STAGES: gl.constexpr = q_full.shape[0] // NUM_CONSUMERS
    # Measured: up to a twentieth quicker. Three consumers have no registers for it; with wider rows it gained nothing.
    Q_IN_REGISTERS: gl.constexpr = max(BLOCK_D, BLOCK_DV) == 64 and NUM_CONSUMERS < 3
    step = 0
    n_done = 0
    if NUM_CONSUMERS > 1 and CONSUMER == NUM_CONSUMERS - 1:
        named_barrier("barrier.arrive", "9")  # the first turn is consumer 0's
    heads_inverse = 1.0 / n_heads
    entry_ptr = schedule_ptr + (gl.program_id(0) // n_splits if IS_SPLIT else gl.program_id(0)) * schedule_width
    entry = gl.load(entry_ptr)
    while entry >= 0:
        next_entry = gl.load(entry_ptr + n_done + 1)
        tile = entry % MAX_TILES
        head = entry // MAX_TILES
        TILE_ROWS: gl.constexpr = BLOCK_M * NUM_CONSUMERS
        begin, end = _kv_tiles(
            tile, seq_q, seq_kv, lower, upper, n_splits, TILE_ROWS, BLOCK_N, IS_CAUSAL, IS_BAND, IS_SPLIT
        )
        n = end - begin
        row = tile * TILE_ROWS + CONSUMER * BLOCK_M
        acc = zero_sums(BLOCK_M, BLOCK_DV)
        q_place = n_done % Q_STAGES * NUM_CONSUMERS + CONSUMER
        q = parts(q_smem, q_place, BLOCK_D)
        mbarrier.wait(q_full.index(q_place), phase(n_done, Q_STAGES))
        if Q_IN_REGISTERS:
            q = (q[0].load(gl.DotOperandLayout(0, S_LAYOUT, 2)),)
        if HANDS_BACK:
            # Key tiles that this consumer does not need are handed back unused: those that lie wholly above its rows,
            # or, where it has no rows because the queries have come to their end, all but one.
            if IS_CAUSAL:
                n_own = gl.minimum(gl.cdiv(row + BLOCK_M, BLOCK_N), n)
            else:
                n_own = gl.where(row < seq_q, n, 1)
            for _ in range(n_own, n):
                stage = step % STAGES
                mbarrier.wait(k_full.index(stage), phase(step, STAGES))
                _wait_turn(CONSUMER, NUM_CONSUMERS)
                _pass_turn(CONSUMER, NUM_CONSUMERS)
                mbarrier.arrive(k_empty.index(stage), count=1)
                mbarrier.wait(v_full.index(stage), phase(step, STAGES))
                mbarrier.arrive(v_empty.index(stage), count=1)
                step += 1
            n = n_own
            end = begin + n_own

        # The first tile: the diagonal under a causal mask, or else the ragged end of the keys.
        stage = step % STAGES
        k = some_rows(parts(k_smem, stage, BLOCK_D), 0, FIRST_N)
        mbarrier.wait(k_full.index(stage), phase(step, STAGES))
        _wait_turn(CONSUMER, NUM_CONSUMERS)
        s_token = start_scores(q, k)
        _pass_turn(CONSUMER, NUM_CONSUMERS)
        s = warpgroup_mma_wait(0, deps=(s_token,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        col = (end - 1) * BLOCK_N
        if IS_CAUSAL:
            s = masked(s, row, col, lower, 0, False, True)
        if IS_BAND:
            s = masked(s, row, col, lower, upper, True, True)
        if not EVEN_KV:
            s = cut_off(s, seq_kv - 1 - col - gl.arange(0, FIRST_N, gl.SliceLayout(0, FIRST_LAYOUT))[None, :])
        # Finite, so that -inf - (-inf) makes no NaN: a query may meet its first key, or its first score that is finite,
        # in a later tile.
        first_max = gl.maximum(gl.max(s, 1) * scale_log2, -3.4028234663852886e38)
        p_f32 = gl.exp2(s * scale_log2 - first_max[:, None])
        row_sum = gl.convert_layout(gl.sum(p_f32, 1), ROWS)
        row_max = gl.convert_layout(first_max, ROWS)
        # A band has three loops. LLVM moves only what is rounded in the same way before each of them: one P is enough.
        p_first = to_16_bits(p_f32, dtype, HERE=IS_BAND)

        if HALF:
            # P of the half tile has another shape than P of a whole one, so its step stands before the loop.
            if n > 1:
                p, acc, row_max, row_sum = _fwd_step(
                    q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, p_first, acc, row_max, row_sum,
                    scale_log2, row, 0, lower, upper, BLOCK_D, BLOCK_DV, FIRST_N, NUM_CONSUMERS, False, False, CONSUMER,
                )  # fmt: skip
                step += 1
                for _ in range(2, n):
                    p, acc, row_max, row_sum = _fwd_step(
                        q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, p, acc, row_max, row_sum, scale_log2,
                        row, 0, lower, upper, BLOCK_D, BLOCK_DV, BLOCK_N, NUM_CONSUMERS, False, False, CONSUMER,
                    )  # fmt: skip
                    step += 1
                if not OUT_IN_Q:
                    mbarrier.arrive(q_empty.index(q_place), count=1)
                acc = _last_pv(v_smem, v_full, v_empty, step, p, acc, BLOCK_DV, BLOCK_N)
            else:
                if not OUT_IN_Q:
                    mbarrier.arrive(q_empty.index(q_place), count=1)
                acc = _last_pv(v_smem, v_full, v_empty, opaque(step), p_first, acc, BLOCK_DV, FIRST_N)
        else:
            p = p_first
            if IS_BAND:
                # Backwards: tiles that the upper limit cuts (in a narrow band the lower one, too), whole tiles, and
                # those that the lower limit cuts.
                full_end = gl.maximum(gl.minimum((row + upper + 1) // BLOCK_N, end - 1), begin)
                last_row = gl.minimum(row + BLOCK_M, seq_q) - 1
                full_begin = gl.minimum(gl.cdiv(gl.maximum(last_row + lower, 0), BLOCK_N), full_end)
                full_begin = gl.maximum(full_begin, begin)
                for kv_tile in range(end - 1, full_end, -1):
                    p, acc, row_max, row_sum = _fwd_step(
                        q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, p, acc, row_max, row_sum, scale_log2,
                        row, kv_tile - 1, lower, upper, BLOCK_D, BLOCK_DV, BLOCK_N, NUM_CONSUMERS, True, True, CONSUMER,
                    )  # fmt: skip
                    step += 1
                n = full_end - full_begin + 1
            for _ in range(1, n):
                p, acc, row_max, row_sum = _fwd_step(
                    q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, p, acc, row_max, row_sum, scale_log2,
                    row, 0, lower, upper, BLOCK_D, BLOCK_DV, BLOCK_N, NUM_CONSUMERS, False, False, CONSUMER,
                )  # fmt: skip
                step += 1
            if IS_BAND:
                for kv_tile in range(full_begin, begin, -1):
                    p, acc, row_max, row_sum = _fwd_step(
                        q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, p, acc, row_max, row_sum, scale_log2,
                        row, kv_tile - 1, lower, upper, BLOCK_D, BLOCK_DV, BLOCK_N, NUM_CONSUMERS, True, False,
                        CONSUMER,
                    )  # fmt: skip
                    step += 1
            if not OUT_IN_Q:
                mbarrier.arrive(q_empty.index(q_place), count=1)
            acc = _last_pv(v_smem, v_full, v_empty, step, p, acc, BLOCK_DV, BLOCK_N)
        step += 1

        rows = row + gl.arange(0, BLOCK_M, ROWS)
        own_rows = head.to(gl.int64) * seq_q + rows
        if IS_SPLIT:
            own_rows = own_rows * n_splits + gl.program_id(0) % n_splits
        lse = (row_max + gl.log2(row_sum)) * 0.6931471805599453  # ln 2: back to the natural logarithm
        gl.store(lse_ptr + own_rows, lse, mask=rows < seq_q)
        # The sum is 0 where every score is -inf: as for a query without keys, the output is 0 and lse is -inf.
        acc = scale_sums(acc, gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum))
        if IS_SPLIT:
            _store_split(split_out_ptr, own_rows, rows < seq_q, acc, HEAD_DIM_V)
        else:
            store_wait(0)
            out_place = q_place if OUT_IN_Q else CONSUMER
            store_rows(parts(out_smem, out_place, BLOCK_DV), acc)
            fence_async_shared()
            batch, own_head = _batch_and_head(head, heads_inverse, n_heads)
            store_tile(out_desc, batch, own_head, row, out_smem, out_place, BLOCK_DV)
        if OUT_IN_Q:
            store_wait(0)
            mbarrier.arrive(q_empty.index(q_place), count=1)
        n_done += 1
        entry = next_entry
    store_wait(0)


@gluon.jit
def _store_split(out_ptr, own_rows, row_mask, acc, HEAD_DIM_V: gl.constexpr):
    """Store a program's share of the output in float32."""
    first = 0
    for i in gl.static_range(len(acc)):
        cols = first + gl.arange(0, acc[i].shape[1], gl.SliceLayout(0, acc[i].type.layout))[None, :]
        rows = gl.convert_layout(own_rows, gl.SliceLayout(1, acc[i].type.layout))[:, None]
        mask = gl.convert_layout(row_mask, gl.SliceLayout(1, acc[i].type.layout))[:, None] & (cols < HEAD_DIM_V)
        gl.store(out_ptr + rows * HEAD_DIM_V + cols, acc[i], mask=mask)
        first += acc[i].shape[1]


@gluon.jit
def _last_pv(v_smem, v_full, v_empty, step, p, acc, BLOCK_DV: gl.constexpr, V_ROWS: gl.constexpr):
    STAGES: gl.constexpr = v_full.shape[0]
    stage = step % STAGES
    v = some_rows(parts(v_smem, stage, BLOCK_DV), 0, V_ROWS)
    mbarrier.wait(v_full.index(stage), phase(step, STAGES))
    acc = wait_sums(start_sums(p, v, acc), 0)
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc


@gluon.jit(
    do_not_specialize=["seq_q", "seq_kv", "lower", "upper", "n_heads", "group_size", "n_splits", "schedule_width"]
)
def _attention_fwd_hopper_kernel(
    q_desc,  # (batch, n_heads, seq_q, head_dim)
    k_desc,  # (batch, n_kv_heads, seq_kv, head_dim)
    v_desc,  # (batch, n_kv_heads, seq_kv, head_dim_v)
    out_desc,  # (batch, n_heads, seq_q, head_dim_v)
    lse_ptr,  # (batch, n_heads, seq_q, n_splits), float32
    split_out_ptr,  # (batch, n_heads, seq_q, n_splits, head_dim_v), float32, instead of out if IS_SPLIT
    schedule_ptr,  # (programs / n_splits, schedule_width), int32
    seq_q,
    seq_kv,
    lower,
    upper,
    n_heads,
    group_size,
    n_splits,
    schedule_width,
    scale_log2,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,  # columns of q and k that are computed, and
    BLOCK_DV: gl.constexpr,  # of v and out; each is one of WIDTHS
    NUM_CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,  # of keys and values, and
    Q_STAGES: gl.constexpr,  # of queries: so many tiles have room
    OUT_IN_Q: gl.constexpr,  # for want of room the output leaves through the place of the queries
    IS_CAUSAL: gl.constexpr,  # upper is 0, and there is no lower limit
    IS_BAND: gl.constexpr,  # other limits: query i sees the keys from i + lower to i + upper
    HANDS_BACK: gl.constexpr,  # a consumer may need fewer key tiles than the others of its program
    DIAGONAL_FIRST: gl.constexpr,  # every query tile's last key tile holds its diagonal
    EVEN_KV: gl.constexpr,
    IS_SPLIT: gl.constexpr,  # the keys of a query tile are shared by n_splits programs
    HEAD_DIM_V: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Program i owns the tiles that row i / n_splits of the schedule lists, each NUM_CONSUMERS x BLOCK_M query rows."""
    # The kernel after this one, such as the one that joins splits, may make itself ready from now on.
    gdc_launch_dependents()
    q_smem = allocate(Q_STAGES * NUM_CONSUMERS, q_desc, BLOCK_D)
    k_smem = allocate(STAGES, k_desc, BLOCK_D)
    v_smem = allocate(STAGES, v_desc, BLOCK_DV)
    if OUT_IN_Q:
        out_smem = q_smem
    else:
        out_smem = allocate(NUM_CONSUMERS, out_desc, BLOCK_DV)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * NUM_CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * NUM_CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(Q_STAGES * NUM_CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NUM_CONSUMERS)
        mbarrier.init(v_empty.index(i), count=NUM_CONSUMERS)
    # A tuple kept in a variable would lose its constexprs, so the arguments are spelt out.
    # fmt: off
    if NUM_CONSUMERS == 1:
        gl.warp_specialize([
            (_fwd_producer, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                seq_q, seq_kv, lower, upper, n_heads, group_size, n_splits, schedule_ptr, schedule_width,
                BLOCK_M, BLOCK_N, NUM_CONSUMERS, IS_CAUSAL, IS_BAND, IS_SPLIT)),
            (_fwd_consumer, (
                out_desc, lse_ptr, split_out_ptr, q_smem, k_smem, v_smem, out_smem,
                q_full, q_empty, k_full, k_empty, v_full, v_empty,
                seq_q, seq_kv, lower, upper, n_heads, n_splits, schedule_ptr, schedule_width, scale_log2,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, NUM_CONSUMERS, IS_CAUSAL, IS_BAND, HANDS_BACK,
                DIAGONAL_FIRST, EVEN_KV, OUT_IN_Q, IS_SPLIT, HEAD_DIM_V, 0)),
        ], [4], [REGISTERS])
    elif NUM_CONSUMERS == 2:
        gl.warp_specialize([
            (_fwd_producer, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                seq_q, seq_kv, lower, upper, n_heads, group_size, n_splits, schedule_ptr, schedule_width,
                BLOCK_M, BLOCK_N, NUM_CONSUMERS, IS_CAUSAL, IS_BAND, IS_SPLIT)),
            (_fwd_consumer, (
                out_desc, lse_ptr, split_out_ptr, q_smem, k_smem, v_smem, out_smem,
                q_full, q_empty, k_full, k_empty, v_full, v_empty,
                seq_q, seq_kv, lower, upper, n_heads, n_splits, schedule_ptr, schedule_width, scale_log2,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, NUM_CONSUMERS, IS_CAUSAL, IS_BAND, HANDS_BACK,
                DIAGONAL_FIRST, EVEN_KV, OUT_IN_Q, IS_SPLIT, HEAD_DIM_V, 0)),
            (_fwd_consumer, (
                out_desc, lse_ptr, split_out_ptr, q_smem, k_smem, v_smem, out_smem,
                q_full, q_empty, k_full, k_empty, v_full, v_empty,
                seq_q, seq_kv, lower, upper, n_heads, n_splits, schedule_ptr, schedule_width, scale_log2,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, NUM_CONSUMERS, IS_CAUSAL, IS_BAND, HANDS_BACK,
                DIAGONAL_FIRST, EVEN_KV, OUT_IN_Q, IS_SPLIT, HEAD_DIM_V, 1)),
        ], [4, 4], [REGISTERS, REGISTERS])
    else:
        gl.warp_specialize([
            (_fwd_producer, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                seq_q, seq_kv, lower, upper, n_heads, group_size, n_splits, schedule_ptr, schedule_width,
                BLOCK_M, BLOCK_N, NUM_CONSUMERS, IS_CAUSAL, IS_BAND, IS_SPLIT)),
            (_fwd_consumer, (
                out_desc, lse_ptr, split_out_ptr, q_smem, k_smem, v_smem, out_smem,
                q_full, q_empty, k_full, k_empty, v_full, v_empty,
                seq_q, seq_kv, lower, upper, n_heads, n_splits, schedule_ptr, schedule_width, scale_log2,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, NUM_CONSUMERS, IS_CAUSAL, IS_BAND, HANDS_BACK,
                DIAGONAL_FIRST, EVEN_KV, OUT_IN_Q, IS_SPLIT, HEAD_DIM_V, 0)),
            (_fwd_consumer, (
                out_desc, lse_ptr, split_out_ptr, q_smem, k_smem, v_smem, out_smem,
                q_full, q_empty, k_full, k_empty, v_full, v_empty,
                seq_q, seq_kv, lower, upper, n_heads, n_splits, schedule_ptr, schedule_width, scale_log2,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, NUM_CONSUMERS, IS_CAUSAL, IS_BAND, HANDS_BACK,
                DIAGONAL_FIRST, EVEN_KV, OUT_IN_Q, IS_SPLIT, HEAD_DIM_V, 1)),
            (_fwd_consumer, (
                out_desc, lse_ptr, split_out_ptr, q_smem, k_smem, v_smem, out_smem,
                q_full, q_empty, k_full, k_empty, v_full, v_empty,
                seq_q, seq_kv, lower, upper, n_heads, n_splits, schedule_ptr, schedule_width, scale_log2,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, NUM_CONSUMERS, IS_CAUSAL, IS_BAND, HANDS_BACK,
                DIAGONAL_FIRST, EVEN_KV, OUT_IN_Q, IS_SPLIT, HEAD_DIM_V, 2)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])
    # fmt: on


def _num_splits(n_tiles: int, n_kv_tiles: int, device: torch.device) -> int:
    """Among how many programs to share the keys of a query tile, where tiles leave half of the GPU without work."""
    most = min(num_multiprocessors(device) // n_tiles, n_kv_tiles)

    def time(n):
        """In key tiles. To begin a second kernel takes as long as some of them, and so does reading what it joins."""
        return cdiv(n_kv_tiles, n) + (0 if n == 1 else 4 + n_tiles * n / 32)

    return min(range(1, max(1, most) + 1), key=time)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lower: int | None,
    upper: int | None,
    scale: float,
) -> None:
    """Fill `out` and its float32 logsumexp, for inputs and limits that `supports` accepts."""
    batch, n_heads, seq_q, _ = q.shape
    n_kv_heads, seq_kv = k.shape[1:3]
    width, width_v = row_width(q), row_width(v)
    is_causal = lower is None and upper == 0
    is_unlimited = lower is None and upper is None
    is_band = not (is_causal or is_unlimited)
    # For more keys there is no room in shared memory, or no registers beside a wide output or the masks of a band.
    block_n = 64 if width > 192 or width_v > 128 or (width > 128 and is_band) else 128
    out_in_q = max(width, width_v) > 128 and width_v <= width
    even_kv = seq_kv % block_n == 0
    # Three consumers feed the matrix unit better at head_dim 64, but make coarser tiles, which may have more rows than
    # there are queries, and have no registers to spare for masks in the loop or of a ragged end.
    fits_three = cdiv(seq_q, 192) * 192 <= 1.2 * cdiv(seq_q, 128) * 128 and not (is_causal and seq_q < 2048)
    n_consumers = 3 if width == width_v == 64 and even_kv and not is_band and fits_three else 2
    registers = 240 if n_consumers == 2 else 160
    n_programs, options = num_multiprocessors(q.device), {}
    if not is_band and _suits_one_consumer(q, v, is_causal):
        n_consumers, per_sm = 1, _programs_per_sm(q, v)
        n_programs *= per_sm
        registers, options = {2: (200, {"maxnreg": 128}), 3: (136, {"maxnreg": 80})}[per_sm]
        block_n = 32 if max(width, width_v) > 128 or seq_kv <= 32 else 64
        even_kv = False  # one compiled kernel for all lengths
    # The next tile's queries arrive while this one's are at work, where there is room. (Neither the masks of a band nor
    # three consumers leave registers for their addresses: where they meet many keys, this costs more than it saves.)
    no_room = max(width, width_v) > 192 or (width > 128 and (block_n == 128 or not out_in_q))
    no_registers = is_band or (n_consumers == 3 and not is_causal and seq_kv > 1024)
    q_stages = 1 if no_room or no_registers else 2
    rows = n_consumers * CONSUMER_ROWS
    n_splits = 1
    if lower is None and not is_causal:
        least_keys = seq_kv if upper is None else min(seq_kv, min(seq_q, rows) + upper)
        n_splits = _num_splits(batch * n_heads * cdiv(seq_q, rows), cdiv(least_keys, block_n), q.device)
    # No limit, and one beyond all keys, is the largest number that makes no difference.
    lower = -seq_q if lower is None else max(lower, -seq_q)
    upper = seq_kv if upper is None else min(upper, seq_kv)
    # Causal queries past the last key meet no diagonal: their last key tile is one that they see whole.
    diagonal_first = is_causal and cdiv(seq_q, block_n) <= cdiv(seq_kv, block_n)
    # Of many key tiles, a consumer alone takes as long as three.
    is_ragged = n_consumers == 3 and not is_causal and 0 < seq_q % rows <= rows - CONSUMER_ROWS and seq_kv <= 1536
    hands_back = block_n % rows != 0 if is_causal else is_ragged or seq_q <= CONSUMER_ROWS < rows
    tiles = _schedule_for(
        batch * n_heads, rows, seq_q, seq_kv, lower, upper, block_n, is_ragged, q.shape[-1], n_programs, q.device
    )
    target = out if tma_can_address(out) else padded(out)
    split_out, split_lse = out, lse
    if n_splits > 1:
        split_out = scratch((batch, n_heads, seq_q, n_splits, v.shape[-1]), torch.float32, q.device)
        split_lse = scratch((batch, n_heads, seq_q, n_splits), torch.float32, q.device)
    launch(
        _attention_fwd_hopper_kernel,
        (tiles.shape[0] * n_splits,),
        descriptor(q, [1, 1, CONSUMER_ROWS, piece_width(width)]),
        descriptor(k, [1, 1, block_n, piece_width(width)]),
        descriptor(v, [1, 1, block_n, piece_width(width_v)]),
        descriptor(target, [1, 1, CONSUMER_ROWS, piece_width(width if out_in_q else width_v)]),
        split_lse, split_out, tiles, seq_q, seq_kv, lower, upper, n_heads, n_heads // n_kv_heads, n_splits,
        tiles.shape[1], scale * LOG2_E,
        BLOCK_M=CONSUMER_ROWS, BLOCK_N=block_n, BLOCK_D=width, BLOCK_DV=width_v, NUM_CONSUMERS=n_consumers, STAGES=2,
        Q_STAGES=q_stages, OUT_IN_Q=out_in_q, IS_CAUSAL=is_causal, IS_BAND=is_band,
        HANDS_BACK=hands_back, DIAGONAL_FIRST=diagonal_first, EVEN_KV=even_kv, IS_SPLIT=n_splits > 1,
        HEAD_DIM_V=v.shape[-1], REGISTERS=registers, num_warps=4, **options,
    )  # fmt: skip
    if n_splits > 1:
        join_splits(split_out, split_lse, None, out, lse, 1.0)
    elif target is not out:
        out.copy_(target)
