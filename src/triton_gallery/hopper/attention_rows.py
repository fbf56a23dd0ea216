"""Rows of a head in the attention kernels for Hopper, whose length need not be a power of two as Triton's shapes are.

The products are over one or two *parts* of the rows: all columns up to a power of two, and the rest of them. A tuple
holds the parts of a tile, or of a sum. In shared memory a tile lies in one *piece*, of the next larger shape; but rows
of 129 to 192 columns lie in three pieces of 64, since 256 would take the room of another tile.
"""

import torch

from .._launch import next_power_of_2
from ._gluon import as_matrices, async_load, async_store, gl, gluon, opaque, warpgroup_mma, warpgroup_mma_wait

WIDTHS = (64, 80, 96, 128, 160, 192, 256)  # powers of two, and sums of two of them


def row_width(x: torch.Tensor) -> int:
    """How many columns of x's rows are computed. TMA fills those past head_dim with zeros."""
    return next(width for width in WIDTHS if x.shape[-1] <= width)


@gluon.constexpr_function
def num_pieces(width):
    """Pieces of a tile."""
    return 3 if 128 < width <= 192 else 1


def piece_width(width: int) -> int:
    """The columns of a piece, which is what one copy brings."""
    return 64 if num_pieces(width) == 3 else next_power_of_2(width)


@gluon.constexpr_function
def _head(width):
    """The columns of the first part: of 96 columns 64, and 32 remain."""
    return 1 << (width.bit_length() - 1)


# --- shared memory ----------------------------------------------------------------------------------------------------


@gluon.jit
def _allocate_pieces(PIECES: gl.constexpr, desc):
    SHAPE: gl.constexpr = [PIECES] + desc.block_type.shape  # noqa: RUF005
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit
def allocate(TILES: gl.constexpr, desc, WIDTH: gl.constexpr):
    """Shared memory for tiles of which WIDTH columns are computed, and whose pieces desc copies.

    Of three pieces the first two lie side by side in one memory, and the third in another.
    """
    if num_pieces(WIDTH) == 3:
        smem = (_allocate_pieces(2 * TILES, desc), _allocate_pieces(TILES, desc))
    else:
        smem = (_allocate_pieces(TILES, desc),)
    return smem


@gluon.jit
def _piece(smem, tile, INDEX: gl.constexpr):
    """A piece of a tile."""
    if len(smem) == 1:
        piece = smem[0].index(tile)
    elif INDEX < 2:
        piece = smem[0].index(2 * tile + INDEX)
    else:
        piece = smem[1].index(tile)
    return piece


@gluon.constexpr_function
def tile_bytes(desc, smem):
    """What the copies of a tile bring."""
    return (2 * len(smem) - 1) * desc.block_type.nbytes


@gluon.jit
def load_rows(desc, batch, head, row, smem, tile, barrier):
    """Start the copies of a tile; `barrier` has to expect `tile_bytes`."""
    for i in gl.static_range(2 * len(smem) - 1):
        async_load(desc, [batch, head, row, i * smem[0].shape[4]], barrier, _piece(smem, tile, i))


@gluon.jit
def store_tile(desc, batch, head, row, smem, tile, WIDTH: gl.constexpr):
    """Start the copies of WIDTH columns to memory; TMA leaves out what is past the tensor's end."""
    PIECE: gl.constexpr = smem[0].shape[4]
    for i in gl.static_range((WIDTH + PIECE - 1) // PIECE):
        async_store(desc, [batch, head, row, i * PIECE], _piece(smem, tile, i))


@gluon.jit
def columns(smem, tile, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Columns FIRST to FIRST + COLUMNS of a tile."""
    ROWS: gl.constexpr = smem[0].shape[3]
    WIDTH: gl.constexpr = smem[0].shape[4]
    if COLUMNS > WIDTH:
        # Two pieces side by side are what one piece of twice as many columns is.
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], smem[0].dtype)
        view = as_matrices(smem[0], smem[0].shape[0] // 2, ROWS, COLUMNS, LAYOUT).index(tile)
    else:
        view = _piece(smem, tile, FIRST // WIDTH).reshape((ROWS, WIDTH))
        if COLUMNS < WIDTH:
            view = view.slice(FIRST % WIDTH, COLUMNS, dim=1)
    return view


@gluon.jit
def parts(smem, tile, WIDTH: gl.constexpr):
    """The parts of a tile of which WIDTH columns are computed."""
    HEAD: gl.constexpr = _head(WIDTH)
    if HEAD < WIDTH:
        both = (columns(smem, tile, 0, HEAD), columns(smem, tile, HEAD, WIDTH - HEAD))
    else:
        both = (columns(smem, tile, 0, WIDTH),)
    return both


@gluon.jit
def some_rows(tile, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """ROWS rows of each part of a tile."""
    if len(tile) == 2:
        rows = (tile[0].slice(FIRST, ROWS, dim=0), tile[1].slice(FIRST, ROWS, dim=0))
    else:
        rows = (tile[0].slice(FIRST, ROWS, dim=0),)
    return rows


@gluon.jit
def store_rows(tile, sums):
    tile[0].store(sums[0].to(tile[0].dtype))
    if len(tile) == 2:
        tile[1].store(sums[1].to(tile[1].dtype))


# --- masks ------------------------------------------------------------------------------------------------------------


@gluon.jit
def cut_off(s, distance):
    """Scores, but -inf where `distance` is negative.

    Its sign bit before the bits of infinity is -inf there and +inf elsewhere, and the smaller of that and the score is
    left. A choice (`gl.where`) wants a predicate for each score, and a thread has seven predicates. Triton 3.6 makes
    them before the scores have come and packs them into registers, which takes twice as many instructions.

    A score of NaN that is not cut off becomes +inf. Its query's sum, output and lse are NaN all the same, since
    inf - inf is, and with that lse so are its probabilities in the backward pass.
    """
    limit = gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x80000000, 0x7F800000, 0xEA;", "=f,r", [distance], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.minimum(s, limit)


@gluon.jit
def masked(s, row, col, lower, upper, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr):
    """Scores of the rows from `row` and the columns from `col` on, with -inf outside row + lower to row + upper."""
    # Opaque, so that each tile computes its distances: what all tiles share of them would stay in registers.
    rows = opaque(row) + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))[:, None]
    cols = col + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
    if HAS_LOWER:
        s = cut_off(s, cols - (rows + lower))
    if HAS_UPPER:
        s = cut_off(s, rows + upper - cols)
    return s


# --- products ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def start_scores(x, y):
    """Start x yᵀ, over the columns of all parts; the first operand may be in registers."""
    zeros = _zeros(x[0].shape[0], y[0].shape[0])
    token = warpgroup_mma(x[0], y[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    if len(x) == 2:
        token = warpgroup_mma(x[1], y[1].permute((1, 0)), token, is_async=True)
    return token


@gluon.jit
def zero_sums(ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Sums in registers, part by part."""
    HEAD: gl.constexpr = _head(WIDTH)
    if HEAD < WIDTH:
        sums = (_zeros(ROWS, HEAD), _zeros(ROWS, WIDTH - HEAD))
    else:
        sums = (_zeros(ROWS, WIDTH),)
    return sums


@gluon.jit
def _start_part(p, y, sums):
    left = gl.convert_layout(p, gl.DotOperandLayout(0, sums.type.layout, 2))
    return warpgroup_mma(left, y, sums, is_async=True)


@gluon.jit
def start_sums(p, y, sums):
    """Start sums += p y; p is in registers and has 16 bits."""
    if len(y) == 2:
        tokens = (_start_part(p, y[0], sums[0]), _start_part(p, y[1], sums[1]))
    else:
        tokens = (_start_part(p, y[0], sums[0]),)
    return tokens


@gluon.jit
def wait_sums(tokens, N_LATER: gl.constexpr):
    """The sums, while N_LATER products that were started later may go on."""
    if len(tokens) == 2:
        sums = warpgroup_mma_wait(N_LATER, deps=tokens)
    else:
        sums = (warpgroup_mma_wait(N_LATER, deps=tokens),)
    return sums


@gluon.jit
def _scale_part(x, factor):
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def scale_sums(sums, factor):
    """Each row of the sums times its number in `factor`."""
    if len(sums) == 2:
        scaled = (_scale_part(sums[0], factor), _scale_part(sums[1], factor))
    else:
        scaled = (_scale_part(sums[0], factor),)
    return scaled
