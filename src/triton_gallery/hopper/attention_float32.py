"""Attention of float32 for Hopper, in Gluon: one kernel, for the forward and for each gradient.

All four are the same walk. A program owns 128 rows of its result and passes the tiles of the other side. It multiplies
its rows with those of a tile to get scores, makes probabilities or their gradients of them, and multiplies these with
rows of the tile again, whose products it adds up in registers. What differs stands in this table:

    result  owns     walks    first products    adds up
    out     queries  keys     Q Kᵀ              P V
    dq      queries  keys     Q Kᵀ and dO Vᵀ    dS K
    dk      keys     queries  K Qᵀ and V dOᵀ    dSᵀ Q
    dv      keys     queries  K Qᵀ              Pᵀ dO
    dkdv    keys     queries  K Qᵀ and V dOᵀ    dSᵀ Q, and Pᵀ dO

The last does the work of two with one product less, where dK and dV have few enough columns.

A product of float32 tiles is six of bfloat16, of three parts of each number, as in `triton_gallery._dot`. Where TF32 is
allowed, it is three of two parts, each of them 8 bits, which are still 5 bits more than TF32 has. Tensors are cut into
parts beforehand. Three take half as much memory again as the number, and the rows of two tiles of 256 columns would not
fit into shared memory. So it holds *pieces* of 64 or 32 columns: own rows come again with each tile, from the L2 cache,
beside the rows that they meet.
"""

import torch

from .._dot import three_bf16
from .._launch import cdiv, launch
from ._gluon import (
    as_matrices,
    async_load,
    descriptor,
    gl,
    gluon,
    mbarrier,
    opaque,
    phase,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .attention_forward import LOG2_E
from .attention_gradients import _bounds, _limits, _tiles_to_walk, heads_of_section, own_tile

OWN_ROWS = gl.constexpr(128)  # of a program; each of two consumers has 64
STAGES = {2: 4, 3: 3}  # by parts: steps whose copies are under way, of 64 columns; twice as many fit of 32
# Of dK and dV in one walk, of 64 columns: registers hold some three, but up to here what spills costs less than a walk.
MAX_PIECES = 3
MAX_PIECES_OF_BOTH = 5
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, SCORES.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, SCORES.value))


@gluon.constexpr_function
def _sums_of(piece):
    """The layout of sums of 64 rows and a piece's columns: a thread has the rows of its scores."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, piece, 16])


@gluon.constexpr_function
def _owns_queries(result):
    return result in ("out", "dq")


@gluon.constexpr_function
def _needs_dp(result):
    return result in ("dq", "dk", "dkdv")


@gluon.jit
def _walk(
    n_tiles, n_own, n_walked, n_heads, n_walked_heads, heads_per_section, lower, upper,
    RESULT: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
):  # fmt: skip
    """The program's first row, its head of all batches, the first head it meets, the tiles of each, how many heads."""
    tile, head = own_tile(gl.program_id(0), gl.num_programs(0), n_tiles, heads_per_section, HAS_LOWER or HAS_UPPER)
    if _owns_queries(RESULT):
        # Under a causal mask the last queries have the longest walk, and go first, as the first keys do.
        tile = n_tiles - 1 - tile
        n_met = 1
        met = head % n_heads // (n_heads // n_walked_heads)
    else:
        n_met = n_walked_heads // n_heads
        met = head % n_heads * n_met
    row = tile * OWN_ROWS
    begin, end = _tiles_to_walk(row, n_own, n_walked, lower, upper, OWN_ROWS, 64, HAS_LOWER, HAS_UPPER)
    return row, head, met, begin, end, n_met


@gluon.jit
def _tile_of(n, begin, end, RESULT: gl.constexpr):
    """The n-th tile of the walk, and how many heads are behind it then: queries meet one head, and keys a group."""
    if _owns_queries(RESULT):
        tile = begin + n
        n_behind = 0
    else:
        tile = begin + n % (end - begin)
        n_behind = n // (end - begin)
    return tile, n_behind


# --- producer ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_pieces(
    own_desc, walked_desc, own_smem, walked_smem, full, empty, step, batch, own_head, own_row, walked_head, walked_row,
    PIECES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Copies rows that meet, one piece of both a step; without own_desc the walked ones alone."""
    STAGES: gl.constexpr = full.shape[0]
    PIECE: gl.constexpr = walked_desc.block_type.shape[4]
    OWN_BYTES: gl.constexpr = 0 if own_desc is None else own_desc.block_type.nbytes
    for i in gl.static_range(PIECES):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), phase(step, STAGES) ^ 1)
        mbarrier.expect(full.index(stage), PARTS * (OWN_BYTES + walked_desc.block_type.nbytes))
        for part in gl.static_range(PARTS):
            place = stage * PARTS + part
            if own_desc is not None:
                async_load(
                    own_desc, [part, batch, own_head, own_row, i * PIECE], full.index(stage), own_smem.index(place)
                )
            async_load(
                walked_desc,
                [part, batch, walked_head, walked_row, i * PIECE],
                full.index(stage),
                walked_smem.index(place),
            )
        step += 1
    return step


@gluon.jit
def _producer(
    x_desc, y_desc, dx_desc, dy_desc, z_desc, own_smem, walked_smem, full, empty, n_tiles, n_own, n_walked, n_heads,
    n_walked_heads, heads_per_section, lower, upper,
    RESULT: gl.constexpr, PIECES: gl.constexpr, PIECES_V: gl.constexpr, PARTS: gl.constexpr, HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr,
):  # fmt: skip
    row, head, met, begin, end, n_met = _walk(
        n_tiles, n_own, n_walked, n_heads, n_walked_heads, heads_per_section, lower, upper, RESULT, HAS_LOWER, HAS_UPPER
    )
    batch = head // n_heads
    own_head = head % n_heads
    step = 0
    for n in range(n_met * (end - begin)):
        i, n_behind = _tile_of(n, begin, end, RESULT)
        walked_head = met + n_behind
        step = _load_pieces(
            x_desc, y_desc, own_smem, walked_smem, full, empty, step, batch, own_head, row, walked_head, i * 64,
            PIECES, PARTS,
        )  # fmt: skip
        if RESULT == "dkdv":
            step = _load_pieces(
                None, dy_desc, own_smem, walked_smem, full, empty, step, batch, own_head, row, walked_head, i * 64,
                PIECES_V, PARTS,
            )  # fmt: skip
        if _needs_dp(RESULT):
            step = _load_pieces(
                dx_desc, dy_desc, own_smem, walked_smem, full, empty, step, batch, own_head, row, walked_head, i * 64,
                PIECES_V, PARTS,
            )  # fmt: skip
        step = _load_pieces(
            None, z_desc, own_smem, walked_smem, full, empty, step, batch, own_head, row, walked_head, i * 64,
            PIECES if _needs_dp(RESULT) else PIECES_V, PARTS,
        )  # fmt: skip


# --- consumers --------------------------------------------------------------------------------------------------------


@gluon.jit
def _here(x):
    """x, computed at this place: LLVM moves a sum down to its next use, and keeps both terms in registers till then."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _operand(x, PRODUCT: gl.constexpr):
    """A tile of bfloat16 as the left operand of a product, computed at this place too."""
    x = gl.convert_layout(x, gl.DotOperandLayout(0, PRODUCT, 2))
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def _parts_of(smem, stage, consumer, APART: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """The parts of 64 rows of a piece: matrices in shared memory, APART of them apart, the consumer's one first."""
    PIECE: gl.constexpr = smem.shape[5]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, PIECE], gl.bfloat16)
    matrices = as_matrices(smem, STAGES * PARTS * APART, 64, PIECE, LAYOUT)
    first = stage * PARTS * APART + consumer
    if PARTS == 3:
        parts = matrices.index(first), matrices.index(first + APART), matrices.index(first + 2 * APART)
    else:
        parts = matrices.index(first), matrices.index(first + APART)
    return parts


@gluon.jit
def _product(a, b, PRODUCT: gl.constexpr, KEEP_INFINITY: gl.constexpr):
    """a @ b of tiles in parts, added up as `triton_gallery._dot.dot` does: six products of three parts, three of two.

    Without KEEP_INFINITY, NaN may come of an infinite number: for what such a number makes NaN in another place.
    """
    N_COLUMNS: gl.constexpr = b[0].shape[1]
    zeros = gl.zeros([64, N_COLUMNS], gl.float32, PRODUCT)
    if len(a) == 3:
        token = warpgroup_mma(a[1], b[1], zeros, use_acc=False, is_async=True)
        token = warpgroup_mma(a[2], b[0], token, is_async=True)
        token = warpgroup_mma(a[0], b[2], token, is_async=True)
        token = warpgroup_mma(a[1], b[0], token, is_async=True)
    else:
        token = warpgroup_mma(a[1], b[0], zeros, use_acc=False, is_async=True)
    token = warpgroup_mma(a[0], b[1], token, is_async=True)
    if KEEP_INFINITY:
        rest = warpgroup_mma_wait(0, deps=(token,))
        token = gl.where(rest == rest, rest, 0.0)
    return warpgroup_mma_wait(0, deps=(warpgroup_mma(a[0], b[0], token, is_async=True),))


@gluon.jit
def _scores(
    own_smem, walked_smem, full, empty, step,
    PIECES: gl.constexpr, PARTS: gl.constexpr, KEEP_INFINITY: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """The products of this consumer's rows with those of a tile, over all columns, and the next step."""
    STAGES: gl.constexpr = full.shape[0]
    s = gl.zeros([64, 64], gl.float32, SCORES)
    for _ in range(PIECES):
        stage = step % STAGES
        x = _parts_of(own_smem, stage, CONSUMER, 2, PARTS, STAGES)
        y = _parts_of(walked_smem, stage, 0, 1, PARTS, STAGES)
        y_transposed = (y[0].permute((1, 0)), y[1].permute((1, 0)))
        if PARTS == 3:
            y_transposed = y_transposed + (y[2].permute((1, 0)),)  # noqa: RUF005
        mbarrier.wait(full.index(stage), phase(step, STAGES))
        s += _product(x, y_transposed, SCORES, KEEP_INFINITY)
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return s, step


@gluon.jit
def _add_products(sums, factor, p, walked_smem, full, empty, step, PARTS: gl.constexpr, KEEP_INFINITY: gl.constexpr):
    """sums * factor + p @ z, of a piece of z a step, and the next step; a factor of None is 1."""
    STAGES: gl.constexpr = full.shape[0]
    SUMS: gl.constexpr = _sums_of(walked_smem.shape[5])
    p0, p1, p2 = three_bf16(p)
    if PARTS == 3:
        operands = _operand(p0, SUMS), _operand(p1, SUMS), _operand(p2, SUMS)
    else:
        operands = _operand(p0, SUMS), _operand(p1, SUMS)
    if factor is not None:
        factor = gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
    added = ()
    for i in gl.static_range(len(sums)):
        # Opaque, so that each step computes its addresses: kept in registers they would push other values out.
        stage = opaque(step % STAGES)
        mbarrier.wait(full.index(stage), phase(step, STAGES))
        product = _product(operands, _parts_of(walked_smem, stage, 0, 1, PARTS, STAGES), SUMS, KEEP_INFINITY)
        mbarrier.arrive(empty.index(stage), count=1)
        scaled = sums[i] if factor is None else sums[i] * factor
        added = added + (_here(scaled + product),)  # noqa: RUF005
        step += 1
    return added, step


@gluon.jit
def _zero_sums(PIECES: gl.constexpr, PIECE: gl.constexpr):
    sums = ()
    for _ in gl.static_range(PIECES):
        sums = sums + (gl.zeros([64, PIECE], gl.float32, _sums_of(PIECE)),)  # noqa: RUF005
    return sums


@gluon.jit
def _store(sums, factor, is_empty, out_ptr, strides, head, n_heads, row, n_own, N_COLUMNS: gl.constexpr):
    """Stores rows of a head of all batches: sums * factor, or 0 where is_empty; None stands for 1, and for nowhere."""
    PIECE: gl.constexpr = sums[0].shape[1]
    SUMS: gl.constexpr = _sums_of(PIECE)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    out_ptr += (head // n_heads).to(gl.int64) * strides[0] + (head % n_heads).to(gl.int64) * strides[1]
    for i in gl.static_range(len(sums)):
        result = sums[i] if factor is None else sums[i] * factor
        if is_empty is not None:
            result = gl.where(is_empty, 0.0, result)
        cols = i * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, SUMS))
        ptrs = out_ptr + rows.to(gl.int64)[:, None] * strides[2] + cols.to(gl.int64)[None, :] * strides[3]
        gl.store(ptrs, result, mask=(rows < n_own)[:, None] & (cols < N_COLUMNS)[None, :])


@gluon.jit
def _cut_off(x, other, row, col, n_walked, lower, upper, HAS_LIMIT: gl.constexpr):
    """x of a tile, but `other` past the last column, and where rows from `row` on do not meet columns from `col` on."""
    cols = col + gl.arange(0, 64, COLUMNS)
    kept = (cols < n_walked)[None, :]
    if HAS_LIMIT:
        distance = cols[None, :] - (row + gl.arange(0, 64, ROWS))[:, None]
        kept = kept & (distance >= lower) & (distance <= upper)
    return gl.where(kept, x, other)


@gluon.jit
def _consumer(
    out_ptr, dv_ptr, lse_ptr, delta_ptr, own_smem, walked_smem, full, empty, n_tiles, n_own, n_walked, n_padded,
    n_heads, n_walked_heads, heads_per_section, lower, upper, out_strides, dv_strides, scale, scale_log2,
    RESULT: gl.constexpr, PIECES: gl.constexpr, PIECES_V: gl.constexpr, PARTS: gl.constexpr, N_COLUMNS: gl.constexpr,
    N_COLUMNS_V: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Owns 64 rows of the result: keeps their sums in registers while the tiles of the other side pass by."""
    row, head, met, begin, end, n_met = _walk(
        n_tiles, n_own, n_walked, n_heads, n_walked_heads, heads_per_section, lower, upper, RESULT, HAS_LOWER, HAS_UPPER
    )
    row += CONSUMER * 64
    _, full_begin, full_end, _ = _bounds(row, begin, end, lower, upper, 64, HAS_LOWER, HAS_UPPER)
    full_end = gl.minimum(full_end, n_walked // 64)
    rows = row + gl.arange(0, 64, ROWS)
    NEEDS_DP: gl.constexpr = _needs_dp(RESULT)
    HAS_LIMIT: gl.constexpr = HAS_LOWER or HAS_UPPER

    PIECE: gl.constexpr = walked_smem.shape[5]
    sums = _zero_sums(PIECES if NEEDS_DP else PIECES_V, PIECE)
    dv_sums = _zero_sums(PIECES_V, PIECE)
    if RESULT == "out":
        row_max = gl.full([64], -3.4028234663852886e38, gl.float32, ROWS)
        row_sum = gl.zeros([64], gl.float32, ROWS)
    elif RESULT == "dq":
        lse = gl.load(lse_ptr + head.to(gl.int64) * n_padded + rows)[:, None]
        delta = gl.load(delta_ptr + head.to(gl.int64) * n_padded + rows)[:, None]
    step = 0
    for n in range(n_met * (end - begin)):
        i, n_behind = _tile_of(n, begin, end, RESULT)
        is_cut = (i < full_begin) | (i >= full_end)
        s, step = _scores(own_smem, walked_smem, full, empty, step, PIECES, PARTS, RESULT != "dq", CONSUMER)
        if RESULT == "out":
            if is_cut:
                s = _cut_off(s, float("-inf"), row, i * 64, n_walked, lower, upper, HAS_LIMIT)
            # As in the `tl` kernel, which says why it is the difference that is scaled.
            new_max = gl.maximum(row_max, gl.max(s, 1))
            p = gl.exp2((s - new_max[:, None]) * scale_log2)
            rescale = gl.exp2((row_max - new_max) * scale_log2)
            row_sum = row_sum * rescale + gl.sum(p, 1)
            row_max = new_max
            sums, step = _add_products(sums, rescale, p, walked_smem, full, empty, step, PARTS, True)
        else:
            if not _owns_queries(RESULT):
                walked_head = head // n_heads * n_walked_heads + met + n_behind
                # Opaque, so that the addresses are not kept for all tiles.
                tile_stats = walked_head.to(gl.int64) * n_padded + opaque(i * 64)
                lse = gl.load(lse_ptr + tile_stats + gl.arange(0, 64, COLUMNS))[None, :]
            p = gl.exp2(s * scale_log2 - lse)
            if is_cut:
                # What is cut off may be NaN.
                p = _cut_off(p, 0.0, row, i * 64, n_walked, lower, upper, HAS_LIMIT)
            if RESULT == "dkdv":
                dv_sums, step = _add_products(dv_sums, None, p, walked_smem, full, empty, step, PARTS, True)
            if NEEDS_DP:
                dp, step = _scores(own_smem, walked_smem, full, empty, step, PIECES_V, PARTS, False, CONSUMER)
                if not _owns_queries(RESULT):
                    delta = gl.load(delta_ptr + tile_stats + gl.arange(0, 64, COLUMNS))[None, :]
                p *= dp - delta
            sums, step = _add_products(sums, None, p, walked_smem, full, empty, step, PARTS, not NEEDS_DP)

    if RESULT == "out":
        is_empty = row_sum == 0.0
        row_sum = gl.where(is_empty, 1.0, row_sum)
        lse = gl.where(is_empty, float("-inf"), (row_max * scale_log2 + gl.log2(row_sum)) * 0.6931471805599453)
        gl.store(lse_ptr + head.to(gl.int64) * n_own + rows, lse, mask=rows < n_own)
        is_empty = gl.convert_layout(is_empty, gl.SliceLayout(1, _sums_of(PIECE)))[:, None]
        factor = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, _sums_of(PIECE)))[:, None]
    else:
        is_empty = None
        factor = scale if NEEDS_DP else None
    _store(sums, factor, is_empty, out_ptr, out_strides, head, n_heads, row, n_own, N_COLUMNS)
    if RESULT == "dkdv":
        _store(dv_sums, None, None, dv_ptr, dv_strides, head, n_heads, row, n_own, N_COLUMNS_V)


@gluon.jit(
    do_not_specialize=[
        "n_tiles", "n_own", "n_walked", "n_padded", "n_heads", "n_walked_heads", "heads_per_section", "lower", "upper",
        "out_strides", "dv_strides",
    ]
)  # fmt: skip
def _attention_float32_hopper_kernel(
    x_desc,  # own rows of the first product, in parts: (PARTS, batch, n_heads, n_own, head_dim), bfloat16
    y_desc,  # the rows that they meet: (PARTS, batch, n_walked_heads, n_walked, head_dim)
    dx_desc,  # own rows of dP, or None
    dy_desc,  # the rows that they meet, or None
    z_desc,  # the rows whose products are added up
    out_ptr,  # (batch, n_heads, n_own, N_COLUMNS), float32
    dv_ptr,  # (batch, n_heads, n_own, N_COLUMNS_V), float32, for "dkdv", whose out_ptr is that of dK, or None
    lse_ptr,  # (batch * n_heads, n_own), filled, for "out"; else of queries, in base 2: (batch * heads, n_padded)
    delta_ptr,  # (batch * heads, n_padded), of queries, or None for "out"; "dv" does not need it either
    n_tiles,  # of 128 own rows
    n_own,
    n_walked,
    n_padded,
    n_heads,  # that own rows
    n_walked_heads,
    heads_per_section,
    lower,
    upper,
    out_strides,
    dv_strides,
    scale,
    scale_log2,
    RESULT: gl.constexpr,  # a row of the module's table
    PIECES: gl.constexpr,  # in rows of q and k, of as many columns as a tile of the descriptors
    PIECES_V: gl.constexpr,  # in those of v and dO
    PARTS: gl.constexpr,  # 2 or 3
    N_COLUMNS: gl.constexpr,
    N_COLUMNS_V: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr,
):
    """A program owns 128 rows of the result; row i meets the rows from i + lower to i + upper of the other side."""
    own_smem = gl.allocate_shared_memory(gl.bfloat16, [PARTS * STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    walked_smem = gl.allocate_shared_memory(gl.bfloat16, [PARTS * STAGES] + y_desc.block_type.shape, y_desc.layout)  # noqa: RUF005
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    # fmt: off
    gl.warp_specialize([
        (_producer, (
            x_desc, y_desc, dx_desc, dy_desc, z_desc, own_smem, walked_smem, full, empty, n_tiles, n_own, n_walked,
            n_heads, n_walked_heads, heads_per_section, lower, upper, RESULT, PIECES, PIECES_V, PARTS,
            HAS_LOWER, HAS_UPPER)),
        (_consumer, (
            out_ptr, dv_ptr, lse_ptr, delta_ptr, own_smem, walked_smem, full, empty, n_tiles, n_own, n_walked,
            n_padded, n_heads, n_walked_heads, heads_per_section, lower, upper, out_strides, dv_strides, scale,
            scale_log2, RESULT, PIECES, PIECES_V, PARTS, N_COLUMNS, N_COLUMNS_V, HAS_LOWER, HAS_UPPER, 0)),
        (_consumer, (
            out_ptr, dv_ptr, lse_ptr, delta_ptr, own_smem, walked_smem, full, empty, n_tiles, n_own, n_walked,
            n_padded, n_heads, n_walked_heads, heads_per_section, lower, upper, out_strides, dv_strides, scale,
            scale_log2, RESULT, PIECES, PIECES_V, PARTS, N_COLUMNS, N_COLUMNS_V, HAS_LOWER, HAS_UPPER, 1)),
    ], [4, 4], [240, 240])
    # fmt: on


# --- launchers --------------------------------------------------------------------------------------------------------


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
    """Fill out and lse; query i meets the keys from i + lower to i + upper.

    Args:
        q, k, v: in two or three parts, (parts, batch, heads, length, columns), bfloat16, in rows that TMA can address.
    """
    _fill("out", out, [(q, k)], v, lse, None, lower, upper, scale, v.shape[-1])


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse_log2: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    lower: int | None,
    upper: int | None,
    scale: float,
) -> None:
    """Fill the gradients; the other arguments are those of `forward`.

    Args:
        dout, q, k, v: in parts.
        lse_log2: of each query the logsumexp in base 2, (batch * heads, padded length), +inf past the end.
        delta: sum(dO * O) - dlse of each query, as lse_log2.
    """
    limits = lower, upper, scale, v.shape[-1]
    _fill("dq", dq, [(q, k), (dout, v)], k, lse_log2, delta, *limits)
    pieces = cdiv(q.shape[-1], 64), cdiv(v.shape[-1], 64)
    if sum(pieces) <= MAX_PIECES_OF_BOTH and max(pieces) <= MAX_PIECES:
        _fill("dkdv", dk, [(k, q), (v, dout)], q, lse_log2, delta, *limits, dv)
    else:
        _fill("dk", dk, [(k, q), (v, dout)], q, lse_log2, delta, *limits)
        _fill("dv", dv, [(k, q)], dout, lse_log2, delta, *limits)


def _fill(
    result: str, out: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]], values: torch.Tensor,
    lse: torch.Tensor, delta: torch.Tensor | None, lower: int | None, upper: int | None, scale: float, head_dim_v: int,
    dv: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """One row of the module's table: `pairs` are own rows and those that they meet, `values` what is added up."""
    batch, n_heads, n_own, n_columns = out.shape
    n_parts, _, n_walked_heads, n_walked, head_dim = pairs[0][1].shape
    if not _owns_queries(result):
        # What is the lower limit to queries is the upper one to keys.
        lower, upper = (None if limit is None else -limit for limit in (upper, lower))
    rows = OWN_ROWS.value, 64
    widest = max(head_dim, head_dim_v)
    # Pieces of 64 columns are faster, but where half of the only one is zeros, or in three parts half of the second.
    piece = 32 if widest <= 32 or (64 < widest <= 96 and n_parts == 3) else 64
    tiles = [descriptor(x, [1, 1, 1, n, piece]) for pair in pairs for x, n in zip(pair, rows, strict=True)]
    n_tiles = cdiv(n_own, OWN_ROWS.value)
    row_bytes = 2 * n_parts * (head_dim + head_dim_v)
    launch(
        _attention_float32_hopper_kernel,
        (batch * n_heads * n_tiles,),
        *tiles, *[None] * (4 - len(tiles)), descriptor(values, [1, 1, 1, 64, piece]), out, dv, lse, delta,
        n_tiles, n_own, n_walked, lse.shape[-1], n_heads, n_walked_heads,
        heads_of_section(batch * n_heads, max(1, n_walked_heads // n_heads), n_walked * row_bytes),
        *_limits(lower, upper, n_own, n_walked), out.stride(), (out if dv is None else dv).stride(),
        scale, scale * LOG2_E,
        RESULT=result, PIECES=cdiv(head_dim, piece), PIECES_V=cdiv(head_dim_v, piece), PARTS=n_parts,
        N_COLUMNS=n_columns, N_COLUMNS_V=head_dim_v, STAGES=STAGES[n_parts] * 64 // piece,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None,
        num_warps=4,
    )  # fmt: skip
