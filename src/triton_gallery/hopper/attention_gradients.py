"""Flash attention backward for Hopper, in Gluon: dQ, dK and dV one after another, each in a fixed order of additions.

`attention_backward` multiplies each pair of tiles once, and for that has to sum dQ in memory. Here nothing is summed in
memory: a program owns rows of one gradient, keeps them in registers and walks all that adds to them, as the forward
does. For three gradients the scores are computed three times, dO Vᵀ twice: eight products of tiles instead of five.
This is the way for rows past 128 numbers, where registers cannot hold dK and dV together, and for dQ of shorter rows
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
    opaque,
    phase,
    store_wait,
    warpgroup_mma_wait,
)
from .attention_forward import L2_BYTES, LOG2_E, _mask
from .attention_rows import (
    allocate,
    load_rows,
    num_pieces,
    parts,
    piece_width,
    row_width,
    scale_sums,
    start_scores,
    start_sums,
    store_rows,
    store_tile,
    wait_sums,
    zero_sums,
)

QUERIES_PER_TILE = 64
STATS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def own_tile(n_tiles, heads_per_section, HAS_LIMIT: gl.constexpr):
    """Which tile of which head (of all batches) this program owns.

    With limits tiles differ in length: within a section of heads, whose other side fits the L2 cache, every head's
    first tile starts first, which is the longest of keys under a causal mask, and short ones fill the gaps at the end.
    """
    program = gl.program_id(0)
    if HAS_LIMIT:
        n_heads = gl.num_programs(0) // n_tiles
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
    tile, n_own, n_walked, lower, upper, ROWS: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr
):
    """The first tile of the other side that the program's rows need, and the end of them."""
    begin = 0
    end = gl.cdiv(n_walked, ROWS)
    if HAS_UPPER:
        end = gl.minimum(gl.cdiv(gl.maximum(gl.minimum((tile + 1) * 128, n_own) + upper, 0), ROWS), end)
    if HAS_LOWER:
        begin = gl.minimum(gl.maximum(tile * 128 + lower, 0) // ROWS, end)
    return begin, end


@gluon.jit
def _gradient_tile(n_tiles, heads_per_section, GRADIENT: gl.constexpr, HAS_LIMIT: gl.constexpr):
    """Which tile of which head this program owns. Under a causal mask the last queries have the longest walk."""
    tile, head = own_tile(n_tiles, heads_per_section, HAS_LIMIT)
    if GRADIENT == "q":
        tile = n_tiles - 1 - tile
    return tile, head


@gluon.jit
def _gradient_producer(
    own_x_desc, own_y_desc, x_desc, y_desc, stats_desc, own_x_smem, own_y_smem, x_smem, y_smem, stats_smem,
    own_full, x_full, x_empty, y_full, y_empty, n_tiles, n_q_tiles, n_own, n_walked, n_own_heads, n_walked_heads,
    heads_per_section, lower, upper,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, GRADIENT: gl.constexpr, HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr,
):  # fmt: skip
    """Copies what the program owns once, then X and Y of one step after another, with the statistics of its queries."""
    X_PIECES: gl.constexpr = num_pieces(BLOCK_D)
    Y_PIECES: gl.constexpr = num_pieces(BLOCK_DV)
    X_STAGES: gl.constexpr = x_full.shape[0]
    Y_STAGES: gl.constexpr = y_full.shape[0]
    ROWS: gl.constexpr = x_smem.shape[3]
    tile, head = _gradient_tile(n_tiles, heads_per_section, GRADIENT, HAS_LOWER or HAS_UPPER)
    batch = head // n_own_heads
    own_head = head % n_own_heads
    Y_BYTES: gl.constexpr = 0 if GRADIENT == "v" else Y_PIECES * own_y_desc.block_type.nbytes
    mbarrier.expect(own_full, 2 * (X_PIECES * own_x_desc.block_type.nbytes + Y_BYTES))
    for c in gl.static_range(2):
        row = tile * 128 + c * 64
        load_rows(own_x_desc, batch, own_head, row, own_x_smem, c, own_full, X_PIECES)
        if GRADIENT != "v":
            load_rows(own_y_desc, batch, own_head, row, own_y_smem, c, own_full, Y_PIECES)
    begin, end = _tiles_to_walk(tile, n_own, n_walked, lower, upper, ROWS, HAS_LOWER, HAS_UPPER)
    # Queries walk one head of keys; keys walk every head of queries that shares them.
    group_size = gl.maximum(n_walked_heads // n_own_heads, 1)
    first_head = own_head // gl.maximum(n_own_heads // n_walked_heads, 1) * group_size
    N_STATS: gl.constexpr = 0 if GRADIENT == "q" else 1 if GRADIENT == "v" else 2  # lse, delta
    step = 0
    for walked_head in range(first_head, first_head + group_size):
        for i in range(begin, end):
            stage = step % X_STAGES
            mbarrier.wait(x_empty.index(stage), phase(step, X_STAGES) ^ 1)
            x_bytes: gl.constexpr = X_PIECES * x_desc.block_type.nbytes + N_STATS * stats_desc.block_type.nbytes
            mbarrier.expect(x_full.index(stage), x_bytes)
            load_rows(x_desc, batch, walked_head, i * ROWS, x_smem, stage, x_full.index(stage), X_PIECES)
            for c in gl.static_range(N_STATS):
                stats_row = ((batch * n_walked_heads + walked_head) * n_q_tiles + i) * 2 + c
                smem = as_row(stats_smem.index(2 * stage + c), stats_desc.layout)
                async_load(stats_desc, [stats_row, 0], x_full.index(stage), smem)
            stage = step % Y_STAGES
            mbarrier.wait(y_empty.index(stage), phase(step, Y_STAGES) ^ 1)
            mbarrier.expect(y_full.index(stage), Y_PIECES * y_desc.block_type.nbytes)
            load_rows(y_desc, batch, walked_head, i * ROWS, y_smem, stage, y_full.index(stage), Y_PIECES)
            step += 1


@gluon.jit
def _gradient_step(
    step, acc, own_x_smem, own_y_smem, x_smem, y_smem, stats_smem, x_full, x_empty, y_full, y_empty,
    own_lse, own_delta, row, tile, n_walked, lower, upper, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, GRADIENT: gl.constexpr, MASK: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """This consumer's rows against one tile: dQ += dS K, dK += dSᵀ Q or dV += Pᵀ dO; P and dS have its rows."""
    X_STAGES: gl.constexpr = x_full.shape[0]
    Y_STAGES: gl.constexpr = y_full.shape[0]
    ROWS: gl.constexpr = x_smem.shape[3]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    x_stage = step % X_STAGES
    y_stage = step % Y_STAGES
    x = parts(x_smem, x_stage, BLOCK_D, num_pieces(BLOCK_D))
    y = parts(y_smem, y_stage, BLOCK_DV, num_pieces(BLOCK_DV))
    # Opaque, so that each step computes the operands' addresses: kept in registers they would push other values out.
    own = opaque(row // 64 % 2)
    own_x = parts(own_x_smem, own, BLOCK_D, num_pieces(BLOCK_D))
    own_y = parts(own_y_smem, own, BLOCK_DV, num_pieces(BLOCK_DV))
    mbarrier.wait(x_full.index(x_stage), phase(step, X_STAGES))
    s_token = start_scores(own_x, x)
    mbarrier.wait(y_full.index(y_stage), phase(step, Y_STAGES))
    if GRADIENT == "v":
        s = warpgroup_mma_wait(0, deps=(s_token,))
    else:
        dp_token = start_scores(own_y, y)
        s = warpgroup_mma_wait(len(y), deps=(s_token,))
    if MASK:
        s = _mask(s, row, tile * ROWS, lower, upper)
    if not EVEN:
        s = gl.where(tile * ROWS + gl.arange(0, ROWS, COLS)[None, :] < n_walked, s, float("-inf"))
    if GRADIENT == "q":
        p = gl.exp2(s * scale_log2 - own_lse[:, None])
    else:
        p = gl.exp2(s * scale_log2 - stats_smem.index(2 * x_stage).load(COLS)[None, :])
    if GRADIENT == "v":
        mbarrier.arrive(x_empty.index(x_stage), count=1)
        weights = p
        right = y
    else:
        dp = warpgroup_mma_wait(0, deps=(dp_token,))
        mbarrier.arrive(y_empty.index(y_stage), count=1)
        if GRADIENT == "q":
            weights = p * (dp - own_delta[:, None])
        else:
            weights = p * (dp - stats_smem.index(2 * x_stage + 1).load(COLS)[None, :])
        right = x
    acc = wait_sums(start_sums(weights.to(x_smem.dtype), right, acc), 0)
    if GRADIENT == "v":
        mbarrier.arrive(y_empty.index(y_stage), count=1)
    else:
        mbarrier.arrive(x_empty.index(x_stage), count=1)
    return acc


@gluon.jit
def _gradient_consumer(
    out_desc, stats_ptr, own_x_smem, own_y_smem, x_smem, y_smem, stats_smem,
    own_full, x_full, x_empty, y_full, y_empty, n_tiles, n_q_tiles, n_own, n_walked, n_own_heads, n_walked_heads,
    heads_per_section, lower, upper, scale, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, GRADIENT: gl.constexpr, HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr, EVEN: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Owns 64 rows of the gradient: keeps them in registers while the other side's tiles pass by."""
    ROWS: gl.constexpr = x_smem.shape[3]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    WIDTH: gl.constexpr = BLOCK_DV if GRADIENT == "v" else BLOCK_D
    tile, head = _gradient_tile(n_tiles, heads_per_section, GRADIENT, HAS_LOWER or HAS_UPPER)
    row = tile * 128 + CONSUMER * 64
    # The statistics of the program's own queries; keys have none.
    own_lse = 0
    own_delta = 0
    if GRADIENT == "q":
        stats_row = (head * n_q_tiles + row // 64).to(gl.int64) * 2
        own_stats_ptr = stats_ptr + stats_row * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        own_lse = gl.load(own_stats_ptr)
        own_delta = gl.load(own_stats_ptr + 64)
    begin, end = _tiles_to_walk(tile, n_own, n_walked, lower, upper, ROWS, HAS_LOWER, HAS_UPPER)
    # Tiles that the lower limit cuts, whole ones, tiles that the upper limit cuts.
    full_begin = begin
    full_end = end
    if HAS_LOWER:
        full_begin = gl.minimum(gl.maximum(gl.cdiv(gl.maximum(row + 63 + lower, 0), ROWS), begin), end)
    if HAS_UPPER:
        full_end = gl.minimum(gl.maximum(gl.maximum(row + upper + 1, 0) // ROWS, full_begin), end)
    bounds = (begin, full_begin, full_end, end)
    acc = zero_sums(64, WIDTH)
    mbarrier.wait(own_full, 0)
    step = 0
    for _ in range(gl.maximum(n_walked_heads // n_own_heads, 1)):
        for part in gl.static_range(0 if HAS_LOWER else 1, 3 if HAS_UPPER else 2):
            for i in range(bounds[part], bounds[part + 1]):
                acc = _gradient_step(
                    step + i - begin, acc, own_x_smem, own_y_smem, x_smem, y_smem, stats_smem,
                    x_full, x_empty, y_full, y_empty, own_lse, own_delta, row, i, n_walked, lower, upper, scale_log2,
                    BLOCK_D, BLOCK_DV, GRADIENT, part != 1, EVEN,
                )  # fmt: skip
        step += end - begin
    if GRADIENT != "v":
        acc = scale_sums(acc, gl.full([64], scale, gl.float32, gl.SliceLayout(1, S_LAYOUT)))
    out_smem = own_y_smem if GRADIENT == "v" else own_x_smem
    PIECES: gl.constexpr = num_pieces(WIDTH)
    store_rows(parts(out_smem, CONSUMER, WIDTH, PIECES), acc)
    fence_async_shared()
    store_tile(out_desc, head // n_own_heads, head % n_own_heads, row, out_smem, CONSUMER, WIDTH, PIECES)
    store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "n_tiles", "n_q_tiles", "n_own", "n_walked", "n_own_heads", "n_walked_heads", "heads_per_section", "lower",
        "upper",
    ]
)  # fmt: skip
def _attention_gradient_hopper_kernel(
    own_x_desc,  # (batch, n_own_heads, n_own, head_dim): q for dQ, k for dK and dV
    own_y_desc,  # likewise, with head_dim_v: dO for dQ, v for dK, not read for dV
    x_desc,  # (batch, n_walked_heads, n_walked, head_dim): k for dQ, q for dK and dV
    y_desc,  # likewise, with head_dim_v: v for dQ, dO for dK and dV
    out_desc,  # the gradient, shaped as own_x (for dV as v)
    stats_ptr,  # (batch * n_heads * n_q_tiles * 2, 64): of each query tile lse in base 2, then delta
    stats_desc,  # the same
    n_tiles,  # of 128 rows
    n_q_tiles,  # of 64 queries
    n_own,
    n_walked,
    n_own_heads,
    n_walked_heads,
    heads_per_section,
    lower,
    upper,
    scale,
    scale_log2,
    ROWS: gl.constexpr,
    BLOCK_D: gl.constexpr,  # columns of q and k that are computed, and
    BLOCK_DV: gl.constexpr,  # of v and dO; each is one of WIDTHS
    X_STAGES: gl.constexpr,
    Y_STAGES: gl.constexpr,
    GRADIENT: gl.constexpr,  # "q", "k" or "v"
    HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr,
    EVEN: gl.constexpr,  # 128 divides the number of keys that queries walk, so that no tile passes their end
):
    """A program owns 128 rows; row i gets what the rows from i + lower to i + upper of the other side add to it."""
    own_x_smem = allocate(2, own_x_desc, num_pieces(BLOCK_D))
    # dV needs no V; it leaves through V's place, for which rows of 256 leave no room but that of K.
    if GRADIENT == "v" and BLOCK_D == BLOCK_DV:
        own_y_smem = own_x_smem
    else:
        own_y_smem = allocate(2, own_y_desc, num_pieces(BLOCK_DV))
    x_smem = allocate(X_STAGES, x_desc, num_pieces(BLOCK_D))
    y_smem = allocate(Y_STAGES, y_desc, num_pieces(BLOCK_DV))
    stats_smem = gl.allocate_shared_memory(gl.float32, [2 * X_STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], BARRIER)
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], BARRIER)
    y_full = gl.allocate_shared_memory(gl.int64, [Y_STAGES, 1], BARRIER)
    y_empty = gl.allocate_shared_memory(gl.int64, [Y_STAGES, 1], BARRIER)
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=2)
    for i in gl.static_range(Y_STAGES):
        mbarrier.init(y_full.index(i), count=1)
        mbarrier.init(y_empty.index(i), count=2)
    # fmt: off
    gl.warp_specialize([
        (_gradient_producer, (
            own_x_desc, own_y_desc, x_desc, y_desc, stats_desc, own_x_smem, own_y_smem, x_smem, y_smem, stats_smem,
            own_full, x_full, x_empty, y_full, y_empty, n_tiles, n_q_tiles, n_own, n_walked, n_own_heads,
            n_walked_heads, heads_per_section, lower, upper,
            BLOCK_D, BLOCK_DV, GRADIENT, HAS_LOWER, HAS_UPPER)),
        (_gradient_consumer, (
            out_desc, stats_ptr, own_x_smem, own_y_smem, x_smem, y_smem, stats_smem,
            own_full, x_full, x_empty, y_full, y_empty, n_tiles, n_q_tiles, n_own, n_walked, n_own_heads,
            n_walked_heads, heads_per_section, lower, upper, scale, scale_log2,
            BLOCK_D, BLOCK_DV, GRADIENT, HAS_LOWER, HAS_UPPER, EVEN, 0)),
        (_gradient_consumer, (
            out_desc, stats_ptr, own_x_smem, own_y_smem, x_smem, y_smem, stats_smem,
            own_full, x_full, x_empty, y_full, y_empty, n_tiles, n_q_tiles, n_own, n_walked, n_own_heads,
            n_walked_heads, heads_per_section, lower, upper, scale, scale_log2,
            BLOCK_D, BLOCK_DV, GRADIENT, HAS_LOWER, HAS_UPPER, EVEN, 1)),
    ], [4, 4], [240, 240])
    # fmt: on


def fill_gradient(
    gradient: str,
    out: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    walked_x: torch.Tensor,
    walked_y: torch.Tensor,
    stats: torch.Tensor,
    stats_desc: TensorDescriptor,
    lower: int | None,
    upper: int | None,
    scale: float,
) -> None:
    """Fill one gradient; TMA must be able to address every tensor.

    Args:
        gradient: "q", or for rows past 128 numbers also "k" or "v".
        x, y: q and dO for "q", otherwise k and v.
        walked_x, walked_y: the other two.
        stats: of each tile of 64 queries the logsumexp in base 2, +inf past the end, then sum(dO * O) - dlse.
        lower, upper: row i of x meets the rows from i + lower to i + upper of walked_x.
    """
    batch, n_heads, n_own, _ = x.shape
    n_walked_heads, n_walked = walked_x.shape[1:3]
    n_tiles = cdiv(n_own, 128)
    n_q_tiles = stats.shape[0] // (2 * batch * max(n_heads, n_walked_heads))
    width, width_v = row_width(x), row_width(y)
    is_even = gradient != "q" or n_walked % 128 == 0
    # Two masks leave no registers for more.
    n_masks = (lower is not None) + (upper is not None) + (not is_even)
    rows = 64 if max(width, width_v) > 128 or n_masks > 1 else 128
    row_bytes = 2 * (width + width_v) * max(1, n_walked_heads // n_heads)
    launch(
        _attention_gradient_hopper_kernel,
        (batch * n_heads * n_tiles,),
        descriptor(x, [1, 1, 64, piece_width(width)]),
        descriptor(y, [1, 1, 64, piece_width(width_v)]),
        descriptor(walked_x, [1, 1, rows, piece_width(width)]),
        descriptor(walked_y, [1, 1, rows, piece_width(width_v)]),
        descriptor(out, [1, 1, 64, piece_width(width_v if gradient == "v" else width)]),
        stats, stats_desc, n_tiles, n_q_tiles, n_own, n_walked, n_heads, n_walked_heads,
        max(1, min(batch * n_heads, L2_BYTES // (n_walked * row_bytes))),
        # A missing limit, and one beyond all rows, is the nearest number that masks nothing.
        -n_own if lower is None else max(lower, -n_own), n_walked if upper is None else min(upper, n_walked),
        scale, scale * LOG2_E,
        ROWS=rows, BLOCK_D=width, BLOCK_DV=width_v, X_STAGES=2,
        Y_STAGES=1 if min(width, width_v) > 192 and gradient != "v" else 2, GRADIENT=gradient,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, EVEN=is_even, num_warps=4,
    )  # fmt: skip
