"""Flash attention backward for Hopper, in Gluon: dQ by one kernel, dK and dV by another, in fixed orders of additions.

`attention_backward` multiplies each pair of tiles once, and for that has to sum dQ in memory. Here nothing is summed in
memory: a program owns rows of its gradients, keeps them in registers and walks all that adds to them, as the forward
does. For that the scores and dO Vᵀ are computed twice: seven products of tiles instead of five. This is the way for
rows past 128 numbers, where the registers of one warp group cannot hold dK and dV together, and for dQ of shorter rows
where each run has to give the same bits.
"""

import torch

from .._launch import cdiv, launch
from ._gluon import (
    TensorDescriptor,
    as_row,
    async_load,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    meet,
    opaque,
    phase,
    store_wait,
    warpgroup_mma_wait,
)
from .attention_forward import L2_BYTES, LOG2_E
from .attention_rows import (
    allocate,
    cut_off,
    load_rows,
    masked,
    parts,
    piece_width,
    row_width,
    scale_sums,
    start_scores,
    start_sums,
    store_rows,
    store_tile,
    tile_bytes,
    wait_sums,
    zero_sums,
)

QUERIES_PER_TILE = 64
STATS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def own_tile(program, n_programs, n_tiles, heads_per_section, HAS_LIMIT: gl.constexpr):
    """Which tile of which head (of all batches) a program owns.

    With limits tiles differ in length: within a section of heads, whose other side fits the L2 cache, every head's
    first tile starts first, which is the longest of keys under a causal mask, and short ones fill the gaps at the end.
    """
    if HAS_LIMIT:
        n_heads = n_programs // n_tiles
        first_head = program // (n_tiles * heads_per_section) * heads_per_section
        n_section_heads = gl.minimum(heads_per_section, n_heads - first_head)
        rank = program - first_head * n_tiles
        tile = rank // n_section_heads
        head = first_head + rank % n_section_heads
    else:
        tile = program % n_tiles
        head = program // n_tiles
    return tile, head


@gluon.jit
def _tiles_to_walk(
    row, n_rows, n_walked, lower, upper,
    OWN_ROWS: gl.constexpr, ROWS: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
):  # fmt: skip
    """The first tile of the other side that OWN_ROWS rows from `row` on need, and the end of them."""
    begin = 0
    end = gl.cdiv(n_walked, ROWS)
    if HAS_UPPER:
        end = gl.minimum(gl.cdiv(gl.maximum(gl.minimum(row + OWN_ROWS, n_rows) + upper, 0), ROWS), end)
    if HAS_LOWER:
        begin = gl.minimum(gl.maximum(row + lower, 0) // ROWS, end)
    return begin, end


@gluon.jit
def _bounds(row, begin, end, lower, upper, ROWS: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr):
    """Where the tiles begin that the lower limit cuts for 64 rows, then whole ones, then those that the upper cuts."""
    full_begin = begin
    full_end = end
    if HAS_LOWER:
        full_begin = gl.minimum(gl.maximum(gl.cdiv(gl.maximum(row + 63 + lower, 0), ROWS), begin), end)
    if HAS_UPPER:
        full_end = gl.minimum(gl.maximum(gl.maximum(row + upper + 1, 0) // ROWS, full_begin), end)
    return begin, full_begin, full_end, end


# --- dQ ---------------------------------------------------------------------------------------------------------------


@gluon.jit
def _dq_tile(n_tiles, heads_per_section, HAS_LIMIT: gl.constexpr):
    """Which query tile of which head this program owns. Under a causal mask the last queries have the longest walk."""
    tile, head = own_tile(gl.program_id(0), gl.num_programs(0), n_tiles, heads_per_section, HAS_LIMIT)
    return n_tiles - 1 - tile, head


@gluon.jit
def _dq_producer(
    q_desc, dout_desc, k_desc, v_desc, q_smem, dout_smem, k_smem, v_smem,
    own_full, k_full, k_empty, v_full, v_empty, n_tiles, seq_q, seq_kv, n_heads, n_kv_heads, heads_per_section,
    lower, upper,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
):  # fmt: skip
    """Copies the program's Q and dO once, then K and V of one step after another."""
    K_STAGES: gl.constexpr = k_full.shape[0]
    V_STAGES: gl.constexpr = v_full.shape[0]
    ROWS: gl.constexpr = k_smem[0].shape[3]
    tile, head = _dq_tile(n_tiles, heads_per_section, HAS_LOWER or HAS_UPPER)
    batch = head // n_heads
    own_head = head % n_heads
    mbarrier.expect(own_full, 2 * (tile_bytes(q_desc, q_smem) + tile_bytes(dout_desc, dout_smem)))
    for c in gl.static_range(2):
        row = tile * 128 + c * 64
        load_rows(q_desc, batch, own_head, row, q_smem, c, own_full)
        load_rows(dout_desc, batch, own_head, row, dout_smem, c, own_full)
    begin, end = _tiles_to_walk(tile * 128, seq_q, seq_kv, lower, upper, 128, ROWS, HAS_LOWER, HAS_UPPER)
    kv_head = own_head // (n_heads // n_kv_heads)
    for i in range(begin, end):
        step = i - begin
        stage = step % K_STAGES
        mbarrier.wait(k_empty.index(stage), phase(step, K_STAGES) ^ 1)
        mbarrier.expect(k_full.index(stage), tile_bytes(k_desc, k_smem))
        load_rows(k_desc, batch, kv_head, i * ROWS, k_smem, stage, k_full.index(stage))
        stage = step % V_STAGES
        mbarrier.wait(v_empty.index(stage), phase(step, V_STAGES) ^ 1)
        mbarrier.expect(v_full.index(stage), tile_bytes(v_desc, v_smem))
        load_rows(v_desc, batch, kv_head, i * ROWS, v_smem, stage, v_full.index(stage))


@gluon.jit
def _dq_step(
    step, dq, q_smem, dout_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, lse, delta, row, tile, seq_kv,
    lower, upper, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, MASK_LOWER: gl.constexpr, MASK_UPPER: gl.constexpr,
    EVEN_KV: gl.constexpr,
):  # fmt: skip
    """This consumer's queries against one tile of keys: dQ += dS K."""
    K_STAGES: gl.constexpr = k_full.shape[0]
    V_STAGES: gl.constexpr = v_full.shape[0]
    ROWS: gl.constexpr = k_smem[0].shape[3]
    COLS: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    k_stage = step % K_STAGES
    v_stage = step % V_STAGES
    k = parts(k_smem, k_stage, BLOCK_D)
    v = parts(v_smem, v_stage, BLOCK_DV)
    # Opaque, so that each step computes the operands' addresses: kept in registers they would push other values out.
    own = opaque(row // 64 % 2)
    q = parts(q_smem, own, BLOCK_D)
    dout = parts(dout_smem, own, BLOCK_DV)
    mbarrier.wait(k_full.index(k_stage), phase(step, K_STAGES))
    s_token = start_scores(q, k)
    mbarrier.wait(v_full.index(v_stage), phase(step, V_STAGES))
    dp_token = start_scores(dout, v)
    s = warpgroup_mma_wait(len(v), deps=(s_token,))
    if MASK_LOWER or MASK_UPPER:
        s = masked(s, row, tile * ROWS, lower, upper, MASK_LOWER, MASK_UPPER)
    if not EVEN_KV:
        s = cut_off(s, seq_kv - 1 - tile * ROWS - gl.arange(0, ROWS, COLS)[None, :])
    p = gl.exp2(s * scale_log2 - lse[:, None])
    dp = warpgroup_mma_wait(0, deps=(dp_token,))
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    ds = p * (dp - delta[:, None])
    dq = wait_sums(start_sums(ds.to(k_smem[0].dtype), k, dq), 0)
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    return dq


@gluon.jit
def _dq_consumer(
    dq_desc, stats_ptr, q_smem, dout_smem, k_smem, v_smem, own_full, k_full, k_empty, v_full, v_empty,
    n_tiles, n_q_tiles, seq_q, seq_kv, n_heads, heads_per_section, lower, upper, scale, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    EVEN_KV: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Owns 64 queries: keeps their dQ in registers while the tiles of keys pass by."""
    ROWS: gl.constexpr = k_smem[0].shape[3]
    OWN: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    tile, head = _dq_tile(n_tiles, heads_per_section, HAS_LOWER or HAS_UPPER)
    row = tile * 128 + CONSUMER * 64
    own_stats_ptr = stats_ptr + (head * n_q_tiles + row // 64).to(gl.int64) * 128 + gl.arange(0, 64, OWN)
    lse = gl.load(own_stats_ptr)
    delta = gl.load(own_stats_ptr + 64)
    begin, end = _tiles_to_walk(tile * 128, seq_q, seq_kv, lower, upper, 128, ROWS, HAS_LOWER, HAS_UPPER)
    bounds = _bounds(row, begin, end, lower, upper, ROWS, HAS_LOWER, HAS_UPPER)
    dq = zero_sums(64, BLOCK_D)
    mbarrier.wait(own_full, 0)
    for part in gl.static_range(0 if HAS_LOWER else 1, 3 if HAS_UPPER else 2):
        for i in range(bounds[part], bounds[part + 1]):
            dq = _dq_step(
                i - begin, dq, q_smem, dout_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, lse, delta, row, i,
                seq_kv, lower, upper, scale_log2, BLOCK_D, BLOCK_DV, HAS_LOWER and part != 1, HAS_UPPER and part != 1,
                EVEN_KV,
            )  # fmt: skip
    dq = scale_sums(dq, gl.full([64], scale, gl.float32, OWN))
    store_rows(parts(q_smem, CONSUMER, BLOCK_D), dq)
    fence_async_shared()
    store_tile(dq_desc, head // n_heads, head % n_heads, row, q_smem, CONSUMER, BLOCK_D)
    store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "n_tiles", "n_q_tiles", "seq_q", "seq_kv", "n_heads", "n_kv_heads", "heads_per_section", "lower", "upper",
    ]
)  # fmt: skip
def _attention_dq_hopper_kernel(
    q_desc,  # (batch, n_heads, seq_q, head_dim)
    dout_desc,  # (batch, n_heads, seq_q, head_dim_v)
    k_desc,  # (batch, n_kv_heads, seq_kv, head_dim)
    v_desc,  # (batch, n_kv_heads, seq_kv, head_dim_v)
    dq_desc,  # as q
    stats_ptr,  # (batch * n_heads * n_q_tiles * 2, 64): of each query tile lse in base 2, then delta
    n_tiles,  # of 128 queries
    n_q_tiles,  # of 64 queries
    seq_q,
    seq_kv,
    n_heads,
    n_kv_heads,
    heads_per_section,
    lower,
    upper,
    scale,
    scale_log2,
    BLOCK_D: gl.constexpr,  # columns of q and k that are computed, and
    BLOCK_DV: gl.constexpr,  # of v and dO; each is one of WIDTHS
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr,
    EVEN_KV: gl.constexpr,  # 128 divides the number of keys, so that no tile passes their end
):
    """A program owns 128 queries; query i gets what the keys from i + lower to i + upper add to it."""
    q_smem = allocate(2, q_desc, BLOCK_D)
    dout_smem = allocate(2, dout_desc, BLOCK_DV)
    k_smem = allocate(K_STAGES, k_desc, BLOCK_D)
    v_smem = allocate(V_STAGES, v_desc, BLOCK_DV)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BARRIER)
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    # fmt: off
    gl.warp_specialize([
        (_dq_producer, (
            q_desc, dout_desc, k_desc, v_desc, q_smem, dout_smem, k_smem, v_smem,
            own_full, k_full, k_empty, v_full, v_empty, n_tiles, seq_q, seq_kv, n_heads, n_kv_heads,
            heads_per_section, lower, upper, BLOCK_D, BLOCK_DV, HAS_LOWER, HAS_UPPER)),
        (_dq_consumer, (
            dq_desc, stats_ptr, q_smem, dout_smem, k_smem, v_smem, own_full, k_full, k_empty, v_full, v_empty,
            n_tiles, n_q_tiles, seq_q, seq_kv, n_heads, heads_per_section, lower, upper, scale, scale_log2,
            BLOCK_D, BLOCK_DV, HAS_LOWER, HAS_UPPER, EVEN_KV, 0)),
        (_dq_consumer, (
            dq_desc, stats_ptr, q_smem, dout_smem, k_smem, v_smem, own_full, k_full, k_empty, v_full, v_empty,
            n_tiles, n_q_tiles, seq_q, seq_kv, n_heads, heads_per_section, lower, upper, scale, scale_log2,
            BLOCK_D, BLOCK_DV, HAS_LOWER, HAS_UPPER, EVEN_KV, 1)),
    ], [4, 4], [240, 240])
    # fmt: on


# --- dK and dV --------------------------------------------------------------------------------------------------------


@gluon.jit
def _dkdv_producer(
    k_desc, v_desc, q_desc, dout_desc, stats_desc, k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem,
    own_full, q_full, q_empty, dout_full, dout_empty, n_tiles, n_q_tiles, seq_q, seq_kv, n_heads, n_kv_heads,
    heads_per_section, lower, upper,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
):  # fmt: skip
    """Copies the program's K and V once, then Q and dO of one step after another, with the statistics of their rows."""
    STAGES: gl.constexpr = q_full.shape[0]
    tile, kv_head = own_tile(gl.program_id(0), gl.num_programs(0), n_tiles, heads_per_section, HAS_LOWER or HAS_UPPER)
    batch = kv_head // n_kv_heads
    own_head = kv_head % n_kv_heads
    mbarrier.expect(own_full, tile_bytes(k_desc, k_smem) + tile_bytes(v_desc, v_smem))
    load_rows(k_desc, batch, own_head, tile * 64, k_smem, 0, own_full)
    load_rows(v_desc, batch, own_head, tile * 64, v_smem, 0, own_full)
    begin, end = _tiles_to_walk(tile * 64, seq_kv, seq_q, lower, upper, 64, 64, HAS_LOWER, HAS_UPPER)
    # Keys walk every head of queries that shares them.
    group_size = n_heads // n_kv_heads
    step = 0
    for head in range(own_head * group_size, (own_head + 1) * group_size):
        for i in range(begin, end):
            stage = step % STAGES
            stats_row = ((batch * n_heads + head) * n_q_tiles + i) * 2
            mbarrier.wait(q_empty.index(stage), phase(step, STAGES) ^ 1)
            mbarrier.expect(q_full.index(stage), tile_bytes(q_desc, q_smem) + stats_desc.block_type.nbytes)
            load_rows(q_desc, batch, head, i * 64, q_smem, stage, q_full.index(stage))
            lse_row = as_row(lse_smem.index(stage), stats_desc.layout)
            async_load(stats_desc, [stats_row, 0], q_full.index(stage), lse_row)
            mbarrier.wait(dout_empty.index(stage), phase(step, STAGES) ^ 1)
            mbarrier.expect(dout_full.index(stage), tile_bytes(dout_desc, dout_smem) + stats_desc.block_type.nbytes)
            load_rows(dout_desc, batch, head, i * 64, dout_smem, stage, dout_full.index(stage))
            delta_row = as_row(delta_smem.index(stage), stats_desc.layout)
            async_load(stats_desc, [stats_row + 1, 0], dout_full.index(stage), delta_row)
            step += 1


@gluon.jit
def _probabilities(
    s, lse_smem, p_smem, q_full, q_empty, p_full, p_empty, step, row, tile, lower, upper, scale_log2,
    MASK_LOWER: gl.constexpr, MASK_UPPER: gl.constexpr, EVEN_Q: gl.constexpr,
):  # fmt: skip
    """P of a tile's scores, once they are there; the other consumer gets it in float32."""
    STAGES: gl.constexpr = q_full.shape[0]
    stage = step % STAGES
    lse = lse_smem.index(stage).load(gl.SliceLayout(0, s.type.layout))
    mbarrier.arrive(q_empty.index(stage), count=1)
    if MASK_LOWER or MASK_UPPER:
        s = masked(s, row, tile * 64, lower, upper, MASK_LOWER, MASK_UPPER)
    if not EVEN_Q:
        # Past the end the score is NaN for a key of NaN, which may be one that no query sees. (The choice is on s: with
        # one on p, Triton 3.6 waits for each product before it starts the next.)
        s = gl.where(lse[None, :] == float("inf"), float("-inf"), s)
    p = gl.exp2(s * scale_log2 - lse[None, :])
    mbarrier.wait(p_empty.index(step % 2), phase(step, 2) ^ 1)
    p_smem.index(step % 2).store(p)
    mbarrier.arrive(p_full.index(step % 2), count=1)
    return p


@gluon.jit
def _start_s(k_smem, q_smem, q_full, step, BLOCK_D: gl.constexpr):
    STAGES: gl.constexpr = q_full.shape[0]
    k = parts(k_smem, opaque(0), BLOCK_D)  # so that each step computes its addresses, as for dQ
    mbarrier.wait(q_full.index(step % STAGES), phase(step, STAGES))
    return start_scores(k, parts(q_smem, step % STAGES, BLOCK_D))


@gluon.jit
def _start_dv(p, dv, dout_smem, dout_full, step, BLOCK_DV: gl.constexpr):
    STAGES: gl.constexpr = dout_full.shape[0]
    mbarrier.wait(dout_full.index(step % STAGES), phase(step, STAGES))
    return start_sums(p, parts(dout_smem, step % STAGES, BLOCK_DV), dv)


@gluon.jit
def _dv_of_head(
    step, dv, k_smem, q_smem, dout_smem, lse_smem, p_smem, q_full, q_empty, dout_full, dout_empty, p_full, p_empty,
    row, begin, end, lower, upper, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    EVEN_Q: gl.constexpr,
):  # fmt: skip
    """dV += Pᵀ dO over the tiles of one head. The softmax of a tile runs under the sum of the tile before."""
    STAGES: gl.constexpr = q_full.shape[0]
    dtype: gl.constexpr = q_smem[0].dtype
    s = warpgroup_mma_wait(0, deps=(_start_s(k_smem, q_smem, q_full, step, BLOCK_D),))
    p = _probabilities(
        s, lse_smem, p_smem, q_full, q_empty, p_full, p_empty, step, row, begin, lower, upper, scale_log2,
        HAS_LOWER, HAS_UPPER, EVEN_Q,
    ).to(dtype)  # fmt: skip
    bounds = _bounds(row, begin, end, lower, upper, 64, HAS_LOWER, HAS_UPPER)
    for part in gl.static_range(0 if HAS_LOWER else 1, 3 if HAS_UPPER else 2):
        for i in range(gl.maximum(bounds[part], begin + 1), bounds[part + 1]):
            now = step + i - begin
            s_token = _start_s(k_smem, q_smem, q_full, now, BLOCK_D)
            dv_tokens = _start_dv(p, dv, dout_smem, dout_full, now - 1, BLOCK_DV)
            s = warpgroup_mma_wait(len(dv), deps=(s_token,))
            p = _probabilities(
                s, lse_smem, p_smem, q_full, q_empty, p_full, p_empty, now, row, i, lower, upper, scale_log2,
                HAS_LOWER and part != 1, HAS_UPPER and part != 1, EVEN_Q,
            )  # fmt: skip
            dv = wait_sums(dv_tokens, 0)
            # Not before: Triton 3.8 would put it into the registers that this product is reading, and serialise all.
            p = p.to(dtype)
            mbarrier.arrive(dout_empty.index((now - 1) % STAGES), count=1)
    last = step + end - begin - 1
    dv = wait_sums(_start_dv(p, dv, dout_smem, dout_full, last, BLOCK_DV), 0)
    mbarrier.arrive(dout_empty.index(last % STAGES), count=1)
    return dv


@gluon.jit
def _start_dp(v_smem, dout_smem, dout_full, step, BLOCK_DV: gl.constexpr):
    STAGES: gl.constexpr = dout_full.shape[0]
    v = parts(v_smem, opaque(0), BLOCK_DV)
    mbarrier.wait(dout_full.index(step % STAGES), phase(step, STAGES))
    return start_scores(v, parts(dout_smem, step % STAGES, BLOCK_DV))


@gluon.jit
def _ds(dp, delta_smem, p_smem, dout_full, dout_empty, p_full, p_empty, step):
    """dS of a tile, of dP and of the other consumer's P."""
    STAGES: gl.constexpr = dout_full.shape[0]
    stage = step % STAGES
    delta = delta_smem.index(stage).load(gl.SliceLayout(0, dp.type.layout))
    mbarrier.arrive(dout_empty.index(stage), count=1)
    mbarrier.wait(p_full.index(step % 2), phase(step, 2))
    p = p_smem.index(step % 2).load(dp.type.layout)
    mbarrier.arrive(p_empty.index(step % 2), count=1)
    return p * (dp - delta[None, :])


@gluon.jit
def _start_dk(ds, dk, q_smem, step, STAGES: gl.constexpr, BLOCK_D: gl.constexpr):
    # The scores that P was made of have read this stage of Q, so it has arrived.
    return start_sums(ds, parts(q_smem, step % STAGES, BLOCK_D), dk)


@gluon.jit
def _dk_of_head(
    step, dk, v_smem, q_smem, dout_smem, delta_smem, p_smem, q_empty, dout_full, dout_empty, p_full, p_empty,
    begin, end, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
):  # fmt: skip
    """dK += dSᵀ Q over the tiles of one head. As in `_dv_of_head`, dS of a tile is made under the sum before."""
    STAGES: gl.constexpr = dout_full.shape[0]
    dtype: gl.constexpr = q_smem[0].dtype
    dp = warpgroup_mma_wait(0, deps=(_start_dp(v_smem, dout_smem, dout_full, step, BLOCK_DV),))
    ds = _ds(dp, delta_smem, p_smem, dout_full, dout_empty, p_full, p_empty, step).to(dtype)
    for now in range(step + 1, step + end - begin):
        dp_token = _start_dp(v_smem, dout_smem, dout_full, now, BLOCK_DV)
        dk_tokens = _start_dk(ds, dk, q_smem, now - 1, STAGES, BLOCK_D)
        dp = warpgroup_mma_wait(len(dk), deps=(dp_token,))
        ds = _ds(dp, delta_smem, p_smem, dout_full, dout_empty, p_full, p_empty, now).to(dtype)
        dk = wait_sums(dk_tokens, 0)
        mbarrier.arrive(q_empty.index((now - 1) % STAGES), count=1)
    last = step + end - begin - 1
    dk = wait_sums(_start_dk(ds, dk, q_smem, last, STAGES, BLOCK_D), 0)
    mbarrier.arrive(q_empty.index(last % STAGES), count=1)
    return dk


@gluon.jit
def _dkdv_consumer(
    dk_desc, dv_desc, k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, p_smem,
    own_full, q_full, q_empty, dout_full, dout_empty, p_full, p_empty, n_tiles, seq_q, seq_kv, n_heads, n_kv_heads,
    heads_per_section, lower, upper, scale, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    EVEN_Q: gl.constexpr, GRADIENT: gl.constexpr,
):  # fmt: skip
    """Keeps one gradient of the program's 64 keys in registers while the query tiles of each head pass by."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDTH: gl.constexpr = BLOCK_DV if GRADIENT == "v" else BLOCK_D
    tile, kv_head = own_tile(gl.program_id(0), gl.num_programs(0), n_tiles, heads_per_section, HAS_LOWER or HAS_UPPER)
    row = tile * 64
    begin, end = _tiles_to_walk(row, seq_kv, seq_q, lower, upper, 64, 64, HAS_LOWER, HAS_UPPER)
    sums = zero_sums(64, WIDTH)
    mbarrier.wait(own_full, 0)
    if end > begin:
        for i in range(n_heads // n_kv_heads):
            step = i * (end - begin)
            if GRADIENT == "v":
                sums = _dv_of_head(
                    step, sums, k_smem, q_smem, dout_smem, lse_smem, p_smem,
                    q_full, q_empty, dout_full, dout_empty, p_full, p_empty, row, begin, end, lower, upper, scale_log2,
                    BLOCK_D, BLOCK_DV, HAS_LOWER, HAS_UPPER, EVEN_Q,
                )  # fmt: skip
            else:
                sums = _dk_of_head(
                    step, sums, v_smem, q_smem, dout_smem, delta_smem, p_smem,
                    q_empty, dout_full, dout_empty, p_full, p_empty, begin, end, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
    if GRADIENT == "k":
        sums = scale_sums(sums, gl.full([64], scale, gl.float32, gl.SliceLayout(1, S_LAYOUT)))
    own_smem = v_smem if GRADIENT == "v" else k_smem
    meet()  # the other consumer is past its last read of it
    store_rows(parts(own_smem, 0, WIDTH), sums)
    fence_async_shared()
    desc = dv_desc if GRADIENT == "v" else dk_desc
    store_tile(desc, kv_head // n_kv_heads, kv_head % n_kv_heads, row, own_smem, 0, WIDTH)
    store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "n_tiles", "n_q_tiles", "seq_q", "seq_kv", "n_heads", "n_kv_heads", "heads_per_section", "lower", "upper",
    ]
)  # fmt: skip
def _attention_dkdv_hopper_kernel(
    k_desc,  # (batch, n_kv_heads, seq_kv, head_dim)
    v_desc,  # (batch, n_kv_heads, seq_kv, head_dim_v)
    q_desc,  # (batch, n_heads, seq_q, head_dim)
    dout_desc,  # (batch, n_heads, seq_q, head_dim_v)
    stats_desc,  # (batch * n_heads * n_q_tiles * 2, 64): of each query tile lse in base 2, then delta
    dk_desc,  # as k
    dv_desc,  # as v
    n_tiles,  # of 64 keys
    n_q_tiles,  # of 64 queries
    seq_q,
    seq_kv,
    n_heads,
    n_kv_heads,
    heads_per_section,
    lower,
    upper,
    scale,
    scale_log2,
    BLOCK_D: gl.constexpr,  # columns of q and k that are computed, and
    BLOCK_DV: gl.constexpr,  # of v and dO; each is one of WIDTHS
    STAGES: gl.constexpr,
    HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr,
    EVEN_Q: gl.constexpr,  # 64 divides the number of queries, so that no tile passes their end
):
    """A program owns 64 keys; key i gets what the queries from i + lower to i + upper add to it.

    One consumer computes the probabilities and keeps dV; it hands them, in float32, to the other one, which keeps dK.
    """
    k_smem = allocate(1, k_desc, BLOCK_D)
    v_smem = allocate(1, v_desc, BLOCK_DV)
    q_smem = allocate(STAGES, q_desc, BLOCK_D)
    dout_smem = allocate(STAGES, dout_desc, BLOCK_DV)
    STATS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 64], STATS)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 64], STATS)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
    p_smem = gl.allocate_shared_memory(gl.float32, [2, 64, 64], P_LAYOUT)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    dout_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(dout_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=1)
    # fmt: off
    gl.warp_specialize([
        (_dkdv_producer, (
            k_desc, v_desc, q_desc, dout_desc, stats_desc, k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem,
            own_full, q_full, q_empty, dout_full, dout_empty, n_tiles, n_q_tiles, seq_q, seq_kv, n_heads, n_kv_heads,
            heads_per_section, lower, upper, BLOCK_D, BLOCK_DV, HAS_LOWER, HAS_UPPER)),
        (_dkdv_consumer, (
            dk_desc, dv_desc, k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, p_smem,
            own_full, q_full, q_empty, dout_full, dout_empty, p_full, p_empty, n_tiles, seq_q, seq_kv, n_heads,
            n_kv_heads, heads_per_section, lower, upper, scale, scale_log2,
            BLOCK_D, BLOCK_DV, HAS_LOWER, HAS_UPPER, EVEN_Q, "v")),
        (_dkdv_consumer, (
            dk_desc, dv_desc, k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, p_smem,
            own_full, q_full, q_empty, dout_full, dout_empty, p_full, p_empty, n_tiles, seq_q, seq_kv, n_heads,
            n_kv_heads, heads_per_section, lower, upper, scale, scale_log2,
            BLOCK_D, BLOCK_DV, HAS_LOWER, HAS_UPPER, EVEN_Q, "k")),
    ], [4, 4], [240, 240])
    # fmt: on


# --- launchers --------------------------------------------------------------------------------------------------------


def fill_dq(
    dq: torch.Tensor,
    q: torch.Tensor,
    dout: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    stats: torch.Tensor,
    lower: int | None,
    upper: int | None,
    scale: float,
) -> None:
    """Fill dQ; TMA must be able to address every tensor.

    Args:
        stats: of each tile of 64 queries the logsumexp in base 2, +inf past the end, then sum(dO * O) - dlse.
        lower, upper: query i meets the keys from i + lower to i + upper.
    """
    batch, n_heads, seq_q, _ = q.shape
    n_kv_heads, seq_kv = k.shape[1:3]
    n_tiles = cdiv(seq_q, 128)
    width, width_v = row_width(q), row_width(v)
    is_even = seq_kv % 128 == 0
    # Two masks leave no registers for more.
    n_masks = (lower is not None) + (upper is not None) + (not is_even)
    rows = 64 if max(width, width_v) > 128 or n_masks > 1 else 128
    launch(
        _attention_dq_hopper_kernel,
        (batch * n_heads * n_tiles,),
        descriptor(q, [1, 1, 64, piece_width(width)]),
        descriptor(dout, [1, 1, 64, piece_width(width_v)]),
        descriptor(k, [1, 1, rows, piece_width(width)]),
        descriptor(v, [1, 1, rows, piece_width(width_v)]),
        descriptor(dq, [1, 1, 64, piece_width(width)]),
        stats, n_tiles, stats.shape[0] // (2 * batch * n_heads), seq_q, seq_kv, n_heads, n_kv_heads,
        heads_of_section(batch * n_heads, 1, seq_kv * 2 * (width + width_v)),
        *_limits(lower, upper, seq_q, seq_kv), scale, scale * LOG2_E,
        BLOCK_D=width, BLOCK_DV=width_v, K_STAGES=2, V_STAGES=1 if min(width, width_v) > 192 else 2,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, EVEN_KV=is_even, num_warps=4,
    )  # fmt: skip


def fill_dkdv(
    dk: torch.Tensor,
    dv: torch.Tensor,
    q: torch.Tensor,
    dout: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    stats: torch.Tensor,
    stats_desc: TensorDescriptor,
    lower: int | None,
    upper: int | None,
    scale: float,
) -> None:
    """Fill dK and dV, as `fill_dq` does dQ; query i meets the keys from i + lower to i + upper."""
    batch, n_heads, seq_q, _ = q.shape
    n_kv_heads, seq_kv = k.shape[1:3]
    n_tiles = cdiv(seq_kv, 64)
    width, width_v = row_width(q), row_width(v)
    # What is the lower limit to queries is the upper one to keys.
    lower, upper = (None if limit is None else -limit for limit in (upper, lower))
    launch(
        _attention_dkdv_hopper_kernel,
        (batch * n_kv_heads * n_tiles,),
        descriptor(k, [1, 1, 64, piece_width(width)]),
        descriptor(v, [1, 1, 64, piece_width(width_v)]),
        descriptor(q, [1, 1, 64, piece_width(width)]),
        descriptor(dout, [1, 1, 64, piece_width(width_v)]),
        stats_desc,
        descriptor(dk, [1, 1, 64, piece_width(width)]),
        descriptor(dv, [1, 1, 64, piece_width(width_v)]),
        n_tiles, stats.shape[0] // (2 * batch * n_heads), seq_q, seq_kv, n_heads, n_kv_heads,
        heads_of_section(batch * n_kv_heads, n_heads // n_kv_heads, seq_q * 2 * (width + width_v)),
        *_limits(lower, upper, seq_kv, seq_q), scale, scale * LOG2_E,
        BLOCK_D=width, BLOCK_DV=width_v, STAGES=2 if max(width, width_v) > 192 else 3,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, EVEN_Q=seq_q % QUERIES_PER_TILE == 0, num_warps=4,
    )  # fmt: skip


def heads_of_section(n_heads: int, group_size: int, head_bytes: int) -> int:
    """How many heads work at the same time, so that what they walk fits the L2 cache.

    Args:
        group_size: heads that a program walks, one after the other. Programs being at different places, about half of
            them are in use at a time.
        head_bytes: what one of those takes.
    """
    return max(1, min(n_heads, L2_BYTES // (head_bytes * cdiv(group_size, 2))))


def _limits(lower: int | None, upper: int | None, n_own: int, n_walked: int) -> tuple[int, int]:
    """A missing limit, and one beyond all rows, is the nearest number that masks nothing."""
    return -n_own if lower is None else max(lower, -n_own), n_walked if upper is None else min(upper, n_walked)
