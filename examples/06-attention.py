"""
Attention
=========

We compute attention without ever storing its scores, forward and backward, for any lengths and under causal masks.

You will learn:

- what the matrix of scores costs, and how a softmax that arrives in tiles does without it
- how one number per query lets the backward pass compute the probabilities again, tile by tile
- which five matrix products lead back, and which program owns what, so that no sum needs an atomic addition
- which tiles a mask leaves out, and what changes when a single query meets all keys
"""

# %%
# The same start as on every page
# -------------------------------

import math

import torch
import triton_gallery as tg  # before triton: without a GPU it switches the interpreter on
import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

# %%
# The scores outgrow everything else
# ----------------------------------
#
# One head of attention has a query, a key and a value for each of :math:`S` positions, all of them vectors of
# :math:`D` numbers. Stacked, they are the matrices :math:`Q`, :math:`K` and :math:`V`, and
#
# .. math:: O = P V \qquad P = \text{softmax}(\sigma \, Q K^{\mathsf T}) \qquad \sigma = \frac{1}{\sqrt{D}}
#
# with the softmax along each row. In PyTorch this is three lines:


def materialised_attention(q, k, v):
    s = (q * q.shape[-1] ** -0.5) @ k.mT
    p = torch.softmax(s, dim=-1)
    return p @ v


q, k, v = torch.randn(3, 2, 113, 40, device=DEVICE).unbind()  # two heads
torch.testing.assert_close(
    materialised_attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-4
)

# %%
# Let us count, as on the pages before. Each of the two products takes :math:`2 S^2 D` operations, a multiplication and
# an addition for each of :math:`S^2 D` terms, together :math:`4 S^2 D`. The inputs and the output are :math:`4 S D`
# numbers. But the scores and the probabilities are :math:`S^2` numbers each, and each of them is written by one line
# and read by the next: four trips to memory. Here is the account for the sizes that we measure below. There are 16384
# positions in all, so the longer the sequences are, the fewer there are of them.

n_positions, width, head_dim = 16384, 2048, 128
print("                                                operations per byte")
print("    S   q, k, v and out     scores     scores in memory   without them")
for S in (512, 2048, 8192, 16384):
    n_heads = n_positions // S * (width // head_dim)  # of all sequences together
    flops = 4 * n_heads * S * S * head_dim
    io, scores = 2 * 4 * n_heads * S * head_dim, 2 * n_heads * S * S  # bytes in float16
    print(f"{S:5}{io >> 20:12} MiB {scores >> 20:8} MiB{flops / (io + 4 * scores):17.0f}{flops / io:17.0f}")

# %%
# With the scores in memory, four trips of :math:`S^2` numbers with two bytes each, the arithmetic intensity cannot
# exceed :math:`4 S^2 D / 8 S^2 = D / 2` operations per byte, however long the sequence is. That is to the left of the
# *ridge*, the intensity from which on the matrix units of today set the time (page three), so memory would set the
# time. Without the scores it is :math:`4 S^2 D / 8 S D = S / 2`, which passes the ridge from a few hundred positions
# on. Then memory no longer stands in the way. So the first step is never to write the scores down. How near attention
# then comes to the rate of a matrix product is what the rest of the page is about.

# %%
# A sum may change its reference at any time
# ------------------------------------------
#
# The two products could be joined tile by tile, as page three would do it, were it not for the softmax in between. It
# needs the maximum and the sum of a whole row of scores before it can give out the first probability. Page two met the
# way out, the online softmax. Here it carries a third value along. Let us look at one query :math:`q`, with scores
# :math:`s_j = \sigma \, q \cdot k_j` and values :math:`v_j`, in five short steps. (The sum, which page two calls
# :math:`s`, is :math:`\ell` here.)
#
# *One.* Its output is a quotient of two sums, and any number :math:`c` may be taken off all the exponents, since the
# factor :math:`e^{-c}` cancels:
#
# .. math:: o = \frac{\sum_j e^{s_j - c} \, v_j}{\sum_j e^{s_j - c}} = \frac{a}{\ell}
#
# The number :math:`c` is the *reference* of both sums. Nothing says that it must be the maximum of the row.
#
# *Two.* A sum over the first few keys moves from the reference :math:`c` to another one, :math:`c'`, by one factor.
# No key has to be looked at again:
#
# .. math:: \sum_j e^{s_j - c'} = e^{c - c'} \sum_j e^{s_j - c}
#
# *Three.* So we may choose the reference as we go. We take the largest score so far. Then no exponent is above 0, and
# nothing overflows. With :math:`m_t` for the largest score in the first :math:`t` tiles of keys:
#
# .. math:: m_t = \max\bigl(m_{t-1}, \max_{j \in t} s_j\bigr) \qquad r_t = e^{m_{t-1} - m_t} \qquad p_j = e^{s_j - m_t}
#
# Here :math:`j \in t` are the keys of tile :math:`t`. The :math:`p_j` are not probabilities yet: nobody has divided.
#
# *Four.* Both sums move to the new reference, then take up the new tile:
#
# .. math::
#    \ell_t = \ell_{t-1} \, r_t + \sum_{j \in t} p_j \qquad a_t = a_{t-1} \, r_t + \sum_{j \in t} p_j \, v_j
#
# At the start :math:`m_0 = -\infty` and both sums are 0.
#
# *Five.* After the last tile, :math:`o = a / \ell`: a division for each number of the output, and none for each score.
#
# An example, with tiles of two and the scores 1 and 3, then 2 and 5. After the first tile :math:`m = 3` and
# :math:`\ell = e^{-2} + 1`. The second one brings :math:`m = 5`, hence :math:`r = e^{3 - 5}`, and
# :math:`\ell = (e^{-2} + 1) \, e^{-2} + e^{-3} + 1`. Multiplied out this is :math:`e^{-4} + e^{-2} + e^{-3} + e^0`,
# what the four scores minus 5 give at once.
#
# A query keeps :math:`m`, :math:`\ell` and the :math:`D` numbers of :math:`a`. None of this grows with the length of
# the sequence. (The programming guide has a chapter, *From softmax to flash attention*, that gets here one key at a
# time. Its :math:`x` and :math:`s` are our :math:`s` and :math:`\ell`.) Below are the five steps for all queries at
# once. The names are those of the kernels to come: `row_max` is :math:`m`, `row_sum` is :math:`\ell`, `acc` is
# :math:`a` and `rescale` is :math:`r`.


def tiled_attention(q, k, v, block=32):
    scale = q.shape[-1] ** -0.5
    row_max = q.new_full((*q.shape[:-1], 1), -math.inf)
    row_sum, acc = torch.zeros_like(row_max), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for k_tile, v_tile in zip(k.split(block, dim=-2), v.split(block, dim=-2), strict=True):
        s = q @ k_tile.mT * scale
        new_max = torch.maximum(row_max, s.amax(dim=-1, keepdim=True))
        p = torch.exp(s - new_max)
        rescale = torch.exp(row_max - new_max)
        row_sum = row_sum * rescale + p.sum(dim=-1, keepdim=True)
        acc = acc * rescale + p @ v_tile
        row_max = new_max
    return acc / row_sum, (row_max + torch.log(row_sum)).squeeze(-1)


out, lse = tiled_attention(q, k, v)
torch.testing.assert_close(out, materialised_attention(q, k, v), rtol=1e-4, atol=1e-4)

# %%
# The largest temporary, `s`, is now as wide as a tile. The function returns a second value, which costs next to
# nothing: :math:`L = m + \log \ell`, the logarithm of the sum of all exponentials, or *logsumexp*, `lse` in the code.
# It is a maximum and a sum in one number, and it does not depend on the reference:
#
# .. math::
#    L = m + \log \sum_j e^{s_j - m} = \log \sum_j e^{s_j} \qquad
#    P_{ij} = \frac{e^{s_{ij} - m_i}}{\ell_i} = e^{s_{ij} - L_i}
#
# The formula on the right is why we keep it. Whoever has :math:`L` can have any tile of probabilities back for one
# product and one exponential, in any order, without a maximum and without a sum. The backward pass will need exactly
# this.

p = torch.exp(q @ k.mT * q.shape[-1] ** -0.5 - lse[..., None])
torch.testing.assert_close(p @ v, out, rtol=1e-4, atol=1e-4)

# %%
# The loop becomes a kernel
# -------------------------
#
# All of this fits into a small kernel, line by line what `tiled_attention` does. A program owns `BLOCK_M` queries, and
# axis 1 of the grid counts the heads. 40 columns take a block of 64, padded with zeros, which add nothing to a score.
# Keys past the end get a score of :math:`-\infty`, as page two pads a row. The kernel takes contiguous tensors, as many
# keys as queries and values as wide as keys; anything else it would read wrongly, without a word.


@triton.jit
def load_rows(x_ptr, rows, seq_len, head_dim, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < seq_len)[:, None] & (cols < head_dim)[None, :]
    return tl.load(x_ptr + rows[:, None] * head_dim + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(x_ptr, tile, rows, seq_len, head_dim, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < seq_len)[:, None] & (cols < head_dim)[None, :]
    tl.store(x_ptr + rows[:, None] * head_dim + cols[None, :], tile.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def small_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seq_len, head_dim, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * seq_len  # rows of all heads before this one
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + head * head_dim, rows, seq_len, head_dim, BLOCK_D)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, seq_len, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr + head * head_dim, keys, seq_len, head_dim, BLOCK_D)
        v = load_rows(v_ptr + head * head_dim, keys, seq_len, head_dim, BLOCK_D)
        s = tl.dot(q, k.T, input_precision="ieee") * scale
        s = tl.where(keys[None, :] < seq_len, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, axis=1))
        p = tl.exp(s - new_max[:, None])
        rescale = tl.exp(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    store_rows(out_ptr + head * head_dim, acc / row_sum[:, None], rows, seq_len, head_dim, BLOCK_D)
    tl.store(lse_ptr + head + rows, row_max + tl.log(row_sum), mask=rows < seq_len)


def small_attention(q, k, v):
    (n_heads, seq_len, head_dim), out, lse = q.shape, torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
    sizes, BLOCK_D = (seq_len, head_dim, head_dim**-0.5), triton.next_power_of_2(head_dim)
    grid = (triton.cdiv(seq_len, 32), n_heads)
    small_attention_kernel[grid](q, k, v, out, lse, *sizes, BLOCK_M=32, BLOCK_N=32, BLOCK_D=BLOCK_D)
    return out, lse


for ours, expected in zip(small_attention(q, k, v), (out, lse), strict=True):
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

# %%
# This *is* flash attention. What follows makes it general, with masks, strides and as many keys as we like, and it
# makes it fast. The loop stays.

# %%
# A mask leaves whole tiles out
# -----------------------------
#
# A language model must not look ahead: query :math:`i` may see key :math:`j` only if :math:`j \le i`. Such a *causal*
# mask sets the other scores to :math:`-\infty`, and their probabilities become 0. For half of the matrix all that work
# is for nothing, and with tiles we can skip it. Every mask of this page is a band: query :math:`i` is allowed the keys
# from :math:`i + \text{lower}` to :math:`i + \text{upper}`, where either limit may be missing. Causal means
# :math:`\text{upper} = 0`, and a window of 32 keys before its own adds :math:`\text{lower} = -32`.
#
# For a tile of queries, the tiles of keys then come in up to five groups, one after the other: skipped, masked, full,
# masked, skipped. *Full* means that all queries of the tile are allowed all its keys, so that no mask has to be
# computed. These are the two functions that the kernels use. The first one finds the groups. Among the queries of a
# tile, the last one sees furthest to the right, so it decides where the walk ends; the first one sees least far, so it
# decides where the full tiles end. At the lower limit it is the other way round. The second function is the rule
# itself, element by element, for the masked tiles.

# quote: triton_gallery.attention._tile_bounds
# quote: triton_gallery.attention._is_allowed

# %%
# We let the first function speak: a kernel of five lines calls it for each tile of queries and stores what it says.
# Then we compare with the rule itself, computed in PyTorch for every pair of query and key: nothing in a skipped tile
# may be allowed, and everything in a full one must be.


@triton.jit
def tile_bounds_kernel(bounds_ptr, seq_q, seq_k, lower, upper, BLOCK: tl.constexpr, HAS_LOWER: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    last = tl.minimum(start + BLOCK, seq_q) - 1
    bounds = _tile_bounds(start, last, lower, upper, seq_k, BLOCK, HAS_LOWER, True)
    for i in tl.static_range(4):  # unrolled: the compiler has to know which item of the tuple is meant
        tl.store(bounds_ptr + tl.program_id(0) * 4 + i, bounds[i])


def tile_kinds(seq_q, seq_k, lower, upper, block=16):
    """For each tile of queries and keys: 0 if it is skipped, 1 if masked, 2 if full; `lower` may be None."""
    n_rows, n_cols = triton.cdiv(seq_q, block), triton.cdiv(seq_k, block)
    bounds = torch.empty(n_rows, 4, dtype=torch.int32, device=DEVICE)
    has_lower = lower is not None
    tile_bounds_kernel[(n_rows,)](bounds, seq_q, seq_k, lower or 0, upper, block, has_lower)
    begin, full_begin, full_end, end = bounds.cpu()[:, :, None].unbind(1)
    tile = torch.arange(n_cols)
    kinds = ((tile >= begin) & (tile < end)).int() + ((tile >= full_begin) & (tile < full_end)).int()

    rows, cols = torch.arange(seq_q)[:, None], torch.arange(seq_k)
    allowed = (cols <= rows + upper) & (cols >= rows + (lower if has_lower else -seq_q))
    for (i, j), kind in zip(torch.cartesian_prod(torch.arange(n_rows), tile).tolist(), kinds.flatten(), strict=True):
        piece = allowed[i * block : (i + 1) * block, j * block : (j + 1) * block]
        assert kind == 1 or bool(piece.all() if kind == 2 else not piece.any())
    return kinds


import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

seq_q, seq_k, block = 113, 130, 16
masks = {
    "causal, top-left": (None, 0),
    "causal, bottom-right": (None, seq_k - seq_q),
    "causal, window of 32": (-32, 0),
}
colors = {"skipped": "#FFFFFF", "masked": "#E69F00", "full": "#0072B2"}
figure, axes = plt.subplots(1, 3, figsize=(9, 4.2), sharey=True, layout="constrained")
figure.suptitle("What a mask leaves of the tiles of 113 × 130 scores: computed in full, masked, or skipped")
for ax, (name, (lower, upper)) in zip(axes, masks.items(), strict=True):
    kinds = tile_kinds(seq_q, seq_k, lower, upper, block)
    edges = [range(0, (n + 1) * block, block) for n in reversed(kinds.shape)]
    ax.pcolormesh(*edges, kinds, cmap=ListedColormap(colors.values()), vmin=0, vmax=2, edgecolors="#999999", lw=0.5)
    for limit in {lower, upper} - {None}:
        ax.plot([limit, limit + seq_q], [0, seq_q], color="black", linewidth=1)
    ax.set(title=name, xlabel="key (position)", aspect="equal", xlim=(0, edges[0][-1]), ylim=(edges[1][-1], 0))
    counts = torch.bincount(kinds.flatten(), minlength=3).tolist()
    print(f"{name + ':':22}{', '.join(f'{n} {kind}' for n, kind in zip(counts, colors, strict=True))}")
axes[0].set_ylabel("query (position)")
handles = [Patch(facecolor=color, edgecolor="#999999", label=kind) for kind, color in colors.items()]
figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
plt.show()

# %%
# Only the tiles that a limit, a line here, crosses need a mask, and those at the right end, since 130 keys do not fill
# the ninth tile. With :math:`n` tiles on each side a causal mask leaves :math:`n (n + 1) / 2` of :math:`n^2`. The
# longer the sequence, the closer this comes to one half.
#
# The first two pictures differ in where a query sits among the keys. In the first, query 0 sits at key 0, which is
# torch's rule. In the second, the last query sits at the last key. That is what a model needs when it has a few new
# queries and a cache of old keys.

# %%
# The kernel that the library runs
# --------------------------------
#
# A program owns a tile of queries and walks the keys, as `tiled_attention` does. Other programs own other queries and
# need nothing of it. First come the helpers: which tile is mine, and how to load and store a tile whatever its strides
# are. (The four strides of a tensor arrive as a tuple.) A few names belong to features that we do not need yet: with
# `USE_TMA` a hardware unit copies whole tiles, as on page three, `PRECISION` says how to multiply float32, `ALIGN`
# promises that strides are multiples of it, and `group_size` heads of queries share a head of keys (here it is 1).
# `dot` is `tl.dot` but for float32, which page three takes apart.

# quote: triton_gallery._dot.three_bf16
# quote: triton_gallery._dot.dot
# quote: triton_gallery.attention._tile_and_head
# quote: triton_gallery.attention._tile_ptrs
# quote: triton_gallery.attention._load_tile
# quote: triton_gallery.attention._store_tile

# %%
# And this is the kernel. The argument list is long: eleven of its names are constants that decide what is compiled. The
# loop in the middle is the loop from above. Only `s` and its maxima are still without :math:`\sigma`, and the
# exponentials are powers of 2 instead of :math:`e`.

# quote: triton_gallery.attention._attention_fwd_kernel

# %%
# The launcher turns the causal mask into limits, and computes the scale. It takes values as wide as the keys. How it
# launches is an argument, so that we can watch the kernel below.


def launch(kernel, grid, *args, **meta):
    kernel[grid](*args, **meta)


def my_attention(q, k, v, is_causal=False, BLOCK_M=64, BLOCK_N=32, ALIGN=1, launch=launch, **options):
    (batch, n_heads, seq_q, head_dim), (_, n_kv_heads, seq_k, _) = q.shape, k.shape
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], device=q.device)
    BLOCK_D = triton.next_power_of_2(head_dim)
    n_programs = triton.cdiv(seq_q, BLOCK_M) * batch * n_heads
    heads_per_section = max(1, 32 * 2**20 // (2 * seq_k * head_dim * k.element_size()))
    launch(
        _attention_fwd_kernel, (n_programs,),
        q, k, v, out, lse, seq_q, seq_k, n_heads, n_heads // n_kv_heads, heads_per_section,
        q.stride(), k.stride(), v.stride(), out.stride(),
        0, 0, head_dim**-0.5,  # lower, upper and scale
        HAS_LOWER=False, HAS_UPPER=is_causal, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_D, ALIGN=ALIGN, USE_TMA=False, PRECISION="ieee", **options,
    )  # fmt: skip
    return out, lse


# %%
# What the hard lines are for
# ---------------------------
#
# - `_tile_and_head` decides in which order the work is handed out. A section is as many heads as have keys and values
#   that fit into the L2 cache together. Within one, every head's first tile comes first, then every head's second, and
#   so on; each round finds in the cache what the one before has read. (`my_attention` counts on 32 MiB for them, as the
#   library does. With 512 heads of 512 positions, head dimension 128 and 16 bits, keys and values have 128 MiB
#   together, and one section would bring them from memory again for each tile of queries.)
# - `start` counts from the end: under a causal mask the last queries see the most keys. Long jobs first, short jobs
#   into the gaps, is how any list of jobs ends early on many machines.
# - `scale_log2` holds :math:`\sigma \log_2 e`. The hardware computes :math:`2^x`, and :math:`e^x = 2^{x \log_2 e}`.
#   With the factor inside the scale, the change of base costs nothing. `scale` itself is declared as float64, as on
#   page four.
# - `(s - new_max[:, None]) * scale_log2`: the difference comes first, because it is exactly 0 for the largest score,
#   however large. `s * scale_log2 - new_max`, with a maximum that was scaled before, would be one instruction less, a
#   fused multiply-add. It does not round its product, whereas the product inside `new_max` would have been rounded: a
#   score of :math:`10^{10}` may lie hundreds above or below its own maximum. Hopper's kernels for 16 bits, further
#   down, save the instruction, and are exact for smaller scores only, as the notes of `tg.attention` say.
# - `row_max` begins at the lowest finite number where `tiled_attention` has :math:`-\infty`. The section before the
#   exercises shows why.
# - `for part in tl.static_range(...)` is unrolled when the kernel is compiled. It becomes two loops: one over the full
#   tiles, one over those after them that need a mask. A window has a third in front, over those before them that need
#   one. In the loop over full tiles, `part != 1` is known to be false, and no mask is computed.
# - `row_max` is the maximum of the products :math:`q_i \cdot k_j`, before they are scaled. That is allowed because the
#   scale is positive; `tg.attention` turns a negative one into a negative :math:`Q`.
# - `p.to(out_ptr.dtype.element_ty)` narrows the :math:`p_j` to the inputs' dtype, which the matrix unit takes. They lie
#   between 0 and 1, as probabilities do. `acc` and `row_sum` remain in the dtype of `lse`: float32 here, and in the
#   library float64 if the inputs are.
# - `dot(p.to(...), v_tile, acc * rescale[:, None], ...)` is step four for :math:`a`. The rescaling is a product for
#   each number of `acc`, not for each score, so the wider the tile of keys, the less it weighs.
# - `other=0.0` in `_load_tile`: padded columns of :math:`Q` and :math:`K` add 0 to a score. Padded rows of :math:`V`
#   meet probabilities of 0, but 0 times whatever lies in memory may be NaN, so they have to be 0 as well.
# - `empty` takes care of a query that no key is allowed to. Its output is 0, and its logsumexp :math:`-\infty`.

# %%
# It agrees with torch where no tile fits evenly
# ----------------------------------------------
#
# 113 queries, 130 keys and 40 columns fill neither the last tile of queries, nor the last tile of keys, nor the padded
# 64 columns.

q = torch.randn(2, 2, 113, 40, device=DEVICE)
k, v = torch.randn(2, 2, 2, 130, 40, device=DEVICE)
for is_causal in (False, True):
    out, lse = my_attention(q, k, v, is_causal)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

    s = q @ k.mT * 40**-0.5
    if is_causal:
        s = s.masked_fill(torch.ones(113, 130, dtype=torch.bool, device=DEVICE).triu(1), -math.inf)
    torch.testing.assert_close(lse, torch.logsumexp(s, dim=-1), rtol=1e-4, atol=1e-4)

# %%
# One query on its way along the keys
# -----------------------------------
#
# What did the kernel really do? `tg.trace` (page one) runs a launch in the interpreter and records every load and
# store. It also keeps the values of the variables in `watch`. We trace one head of 96 positions with a causal mask, in
# tiles of 16 queries and 16 keys.

import numpy as np

traces = []


def launch_traced(*args, **meta):
    traces.append(tg.trace(*args, **meta, watch=("row_max", "row_sum", "rescale", "acc")))


q1, k1, v1 = torch.randn(3, 1, 1, 96, 16, device=DEVICE).unbind()
k1 = k1 * torch.linspace(0.5, 2.5, 96, device=DEVICE)[:, None]  # scores of later keys spread wider
out, _ = my_attention(q1, k1, v1, is_causal=True, BLOCK_M=16, BLOCK_N=16, launch=launch_traced)
(trace,) = traces

visited = np.full((6, 6), -1)  # for each tile of queries and tile of keys: when its program came there
tile_owner = trace.owner("out_ptr")[0, 0, ::16, 0]
for row, program in enumerate(tile_owner.tolist()):
    for order, access in enumerate(trace.loads("k", program)):
        visited[row, access.hits[0] // (16 * 16)] = order  # a tile has 16 × 16 elements
kinds = tile_kinds(96, 96, None, 0, block=16).numpy()
assert ((visited >= 0) == (kinds > 0)).all()
print(trace)

# %%
# The table has lines for the inputs, the output and the logsumexp, and none for scores. A tile of keys is loaded up to
# six times: once for each tile of queries that may see it.
#
# On the left of the picture, the number in a tile says when its program computed it, among its own. Orange tiles need a
# mask, as before, and empty ones were never loaded. The last queries have the lowest program number, since the longest
# row starts first. On the right we follow the last query of all through its six tiles. Look for the steps of the
# maximum, and see the factor below each of them.


def of_last_query(name, n):
    """The first n values of a variable in program 0, for the last of its queries."""
    return np.array([value[15] for program, value in trace.watched[name] if program == (0, 0, 0)])[:n]


# One value for each of six tiles; the running values have one more, with which they begin.
row_max, row_sum, rescale, acc = map(of_last_query, ("row_max", "row_sum", "rescale", "acc"), (7, 7, 6, 7))
figure = plt.figure(figsize=(10, 5.4), layout="constrained")
figure.suptitle("Causal attention in tiles: the order of the tiles, and the running values of the last query")
axes = figure.subplot_mosaic([["tiles", "max"], ["tiles", "rescale"], ["tiles", "out"]], width_ratios=[1.15, 1])
ax = axes["tiles"]
ax.pcolormesh(kinds, cmap=ListedColormap(colors.values()), vmin=0, vmax=2, edgecolors="#999999", lw=0.5)
for (row, col), order in np.ndenumerate(visited):
    if order >= 0:
        color = "white" if kinds[row, col] == 2 else "black"
        ax.text(col + 0.5, row + 0.5, str(order), color=color, ha="center", va="center")
places, labels = (
    [i + 0.5 for i in range(6)],
    [f"{16 * i} to {16 * i + 15},\nprogram {n}" for i, n in enumerate(tile_owner)],
)
ax.set(title="when a tile is computed", xlabel="tile of 16 keys", ylabel="queries", aspect="equal", ylim=(6, 0))
ax.set(xticks=places, xticklabels=range(6), yticks=places, yticklabels=labels)
tiles = range(1, 7)
# The kernel's maxima are products; times the scale they are scores.
axes["max"].step(tiles, row_max[1:] * 16**-0.5, where="post", color="#0072B2", marker="o", markersize=4)
axes["max"].set(title="row_max: the reference", ylabel="score (no unit)")
axes["rescale"].bar(tiles, rescale, color="#E69F00", width=0.5)
axes["rescale"].set(title="rescale: what the old sums are multiplied by", ylabel="factor", ylim=(0, 1.05))
axes["out"].plot(tiles, acc[1:, :4] / row_sum[1:, None], color="#009E73", marker="o", markersize=3)
axes["out"].plot([6] * 4, out[0, 0, 95, :4].cpu(), "kx")
axes["out"].set(title="acc / row_sum, and the output", xlabel="tiles of keys seen", ylabel="value (no unit)")
plt.show()

# %%
# The first factor is 0, because `row_max` begins at the lowest finite number, far below any score. That does no harm,
# since nothing was summed before. Where the maximum stays, the factor is 1. Where it takes a step up, everything so far
# shrinks at once, the sum and the accumulator alike. The quotient below is a softmax over the keys seen so far, right
# at any time. After the last tile it is the output, marked by crosses.

# %%
# Five products lead back
# -----------------------
#
# Training asks for the gradients of :math:`Q`, :math:`K` and :math:`V`, and gives us :math:`dO`, the gradient of the
# loss with respect to the output; every :math:`d` is meant like this. So :math:`dS` is the gradient of the matrix of
# scores, and has nothing to do with the number of positions :math:`S`. We go backwards through the formula, one step at
# a time. The last step was :math:`O = P V`, a product of two matrices, so page three tells us both gradients:
#
# .. math:: dV = P^{\mathsf T} \, dO \qquad dP = dO \, V^{\mathsf T}
#
# Before it came the softmax of each row. Page two has its gradient: take off the mean of :math:`dP`, weighted by the
# probabilities, and multiply by them.
#
# .. math:: dS_{ij} = P_{ij} \, (dP_{ij} - \delta_i) \qquad \delta_i = \sum_j P_{ij} \, dP_{ij}
#
# That sum runs over a whole row of two matrices that we do not have. But it is a number we can get for less. Put in
# what :math:`dP_{ij}` is, the dot product of :math:`dO_i` and :math:`v_j`, and take :math:`dO_i` out of the sum:
#
# .. math:: \delta_i = \sum_j P_{ij} \; dO_i \cdot v_j = dO_i \cdot \sum_j P_{ij} \, v_j = dO_i \cdot O_i
#
# It is the dot product of two rows that lie in memory. (Whoever uses the logsumexp, too, sends back a gradient
# :math:`dL`. Since :math:`\partial L_i / \partial s_{ij} = P_{ij}`, there is :math:`\delta_i - dL_i` in the place of
# :math:`\delta_i`, and nothing else changes.) The first step, :math:`s_{ij} = \sigma \, q_i \cdot k_j`, was a product
# again:
#
# .. math:: dQ = \sigma \, dS \, K \qquad dK = \sigma \, dS^{\mathsf T} Q
#
# Together with :math:`Q K^{\mathsf T}`, from which :math:`P_{ij} = e^{s_{ij} - L_i}` is made anew, these are the five
# products: :math:`Q K^{\mathsf T}`, :math:`dP`, :math:`dV`, :math:`dQ` and :math:`dK`. The forward pass has two, so the
# backward pass costs 2.5 times as much arithmetic.
#
# Now for who computes what. :math:`P` and :math:`dS` exist one tile at a time, as before. A tile of :math:`dK` or
# :math:`dV` is a sum over *queries*, and a tile of :math:`dQ` is a sum over *keys*. A program that walks along queries
# can finish :math:`dK` and :math:`dV` on its own, and a program that walks along keys can finish :math:`dQ`, but none
# can do both. Here are both walks for one head:


def tiled_backward(q, k, v, out, lse, dout, block=32):
    scale = q.shape[-1] ** -0.5
    delta = (dout * out).sum(dim=-1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def p_and_ds(rows, cols):
        p = torch.exp(q[rows] @ k[cols].T * scale - lse[rows, None])
        dp = dout[rows] @ v[cols].T
        return p, p * (dp - delta[rows, None])

    query_tiles = torch.arange(len(q), device=q.device).split(block)
    key_tiles = torch.arange(len(k), device=q.device).split(block)
    for cols in key_tiles:  # a program for each owns its dk and dv
        for rows in query_tiles:
            p, ds = p_and_ds(rows, cols)
            dv[cols] += p.T @ dout[rows]
            dk[cols] += ds.T @ q[rows] * scale
    for rows in query_tiles:  # a program for each owns its dq
        for cols in key_tiles:
            _, ds = p_and_ds(rows, cols)
            dq[rows] += ds @ k[cols] * scale
    return dq, dk, dv


q1, k1, v1 = (x[0, 0].clone().requires_grad_() for x in (q, k, v))
dout = torch.randn_like(q1)
expected = torch.autograd.grad(materialised_attention(q1, k1, v1), (q1, k1, v1), dout)
with torch.no_grad():
    gradients = tiled_backward(q1, k1, v1, *tiled_attention(q1, k1, v1), dout)
torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)

# %%
# Two walks, and no atomics
# -------------------------
#
# The outer loops are the launch grids of two kernels. In each of them every number of a gradient belongs to one
# program, which adds to it in registers, tile after tile, and stores it once. No two programs ever write to the same
# address. So no *atomic additions* are needed, which the memory carries out itself, in the order in which they arrive.
# No sum depends on which program happened to be faster: the same inputs give the same bits, in every run. The forward
# pass has this property for the same reason. (A faster kernel gives it up for :math:`dQ`; we come to that.)
#
# The price is that `p_and_ds` runs twice for each tile. The two kernels have seven products, four and three, where
# the formulas have five. We credit five to everybody when we measure.
#
# This is the kernel for :math:`dK` and :math:`dV`. A program owns a tile of keys. Several heads of queries may share
# one head of keys; then the program walks the queries of all of them, one head after the other, and so even that sum
# stays in one place.

# quote: triton_gallery.attention._load_statistics
# quote: triton_gallery.attention._attention_bwd_dkdv_kernel

# %%
# - `s`, `p`, `dp` and `ds` are transposed here, with keys along the first axis. The products for :math:`dV` and
#   :math:`dK` need :math:`P^{\mathsf T}` and :math:`dS^{\mathsf T}` as their left factors, and these then lie in
#   registers as the matrix unit wants them.
# - `bounds` comes from the same `_tile_bounds`, with the roles of queries and keys exchanged. Key :math:`j` is seen by
#   the queries from :math:`j - \text{upper}` to :math:`j - \text{lower}`.
# - `lse_log2` and `delta` reach to the end of the last tile of queries. Behind the last query `lse_log2` is infinite,
#   which makes the probabilities there :math:`2^{-\infty} = 0`. That fails for a key that holds an infinite number, for
#   example :math:`-\infty`, so that it has no weight: infinity times the zeros behind the last query is NaN. So a last
#   tile that the queries do not fill gets a mask, even if there is no causal one.
# - `dk` takes its factor :math:`\sigma` once, after the loop.
#
# The library computes :math:`\delta` and the padded statistics in a small kernel of their own,
# `_attention_bwd_preprocess_kernel`. For us, two lines of PyTorch will do.


def my_dk_dv(q, k, v, out, lse, dout, is_causal=False, BLOCK_M=64, BLOCK_N=32):
    (batch, n_heads, seq_q, head_dim), (_, n_kv_heads, seq_k, _) = q.shape, k.shape
    padding = (0, -seq_q % BLOCK_M)
    delta = torch.nn.functional.pad((dout * out).sum(dim=-1), padding)
    lse_log2 = torch.nn.functional.pad(lse * math.log2(math.e), padding, value=math.inf)
    dk, dv, BLOCK_D = torch.empty_like(k), torch.empty_like(v), triton.next_power_of_2(head_dim)
    n_programs = triton.cdiv(seq_k, BLOCK_N) * batch * n_kv_heads
    _attention_bwd_dkdv_kernel[(n_programs,)](
        q, k, v, dout, lse_log2, delta, dk, dv,
        seq_q, delta.shape[-1], seq_k, n_heads, n_heads // n_kv_heads, batch * n_kv_heads,
        q.stride(), k.stride(), v.stride(), dout.stride(), dk.stride(), dv.stride(),
        0, 0, head_dim**-0.5,  # lower, upper and scale
        HAS_LOWER=False, HAS_UPPER=is_causal, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_D, ALIGN=1, USE_TMA=False, PRECISION="ieee",
    )  # fmt: skip
    return dk, dv


def gradients_of(attention, q, k, v, dout, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*leaves, **options), leaves, dout)


dout = torch.randn_like(q)
for is_causal in (False, True):
    dk, dv = my_dk_dv(q, k, v, *my_attention(q, k, v, is_causal), dout, is_causal)
    _, *expected = gradients_of(torch.nn.functional.scaled_dot_product_attention, q, k, v, dout, is_causal=is_causal)
    torch.testing.assert_close((dk, dv), tuple(expected), rtol=1e-4, atol=1e-4)

# %%
# `_attention_bwd_dq_kernel` is its mirror image, and the second half of `tiled_backward`: a program owns a tile of
# queries and walks the keys between the bounds of the forward pass. Its three products are :math:`Q K^{\mathsf T}`,
# :math:`dP` and :math:`dQ`. With :math:`L` at hand there is no maximum, no sum and no rescaling, so the loop is simpler
# than that of the forward pass.

# %%
# From kernels to a function
# --------------------------
#
# Like torch's `scaled_dot_product_attention`, `triton_gallery.attention` has `is_causal`, `scale` and `enable_gqa`. It
# has a `window`, a `causal_alignment` and `return_lse` besides, and no dropout and no mask of your own. Of a padded
# batch, call it for each sequence, on `k[i:i + 1, :, :n]` and `v[i:i + 1, :, :n]` of its `n` keys; there is no kernel
# for packed sequences of different lengths. It takes any strides, lengths of queries and keys together up to 2³¹ − 2¹⁴,
# and head dimensions up to 256. Between the passes it keeps :math:`Q`, :math:`K`, :math:`V`, :math:`O`, of which
# :math:`\delta` is computed, and one number :math:`L_i` for each query: nothing of :math:`S^2` numbers. The sizes of
# the tiles are a table in its source: as large as registers allow. All three gradients agree with torch's on the
# awkward shape:

for options in ({"is_causal": True}, {"scale": 0.3}):
    ours = gradients_of(tg.attention, q, k, v, dout, **options)
    torchs = gradients_of(torch.nn.functional.scaled_dot_product_attention, q, k, v, dout, **options)
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)

# %%
# A model that generates text keeps the keys and values of all earlier positions. It often has several heads of queries
# for each head of keys, *grouped-query attention*, to keep that cache small. Here are three new queries against eleven
# keys, the last query at the last key, and eight heads of queries on two of keys. Both have to be asked for, the
# grouping as in torch:

new_q = torch.randn(1, 8, 3, 40, device=DEVICE)
cached_k, cached_v = torch.randn(2, 1, 2, 11, 40, device=DEVICE)
options = {"is_causal": True, "enable_gqa": True}
out = tg.attention(new_q, cached_k, cached_v, causal_alignment="bottom-right", **options)

allowed = torch.ones(3, 11, dtype=torch.bool, device=DEVICE).tril(11 - 3)
print(allowed.int())
expected = torch.nn.functional.scaled_dot_product_attention(
    new_q, cached_k, cached_v, attn_mask=allowed, enable_gqa=True
)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

try:
    tg.attention(new_q, cached_k, cached_v)
except ValueError as error:
    print("ValueError:", error)

# %%
# On Hopper, copying and multiplying have warps of their own
# ----------------------------------------------------------
#
# The kernels above are for NVIDIA's GPUs from the A100 on and for AMD's; they ran on H100s and an H200, and are
# compiled for three others. H100 and H200 are of the type sm_90, for which the library has a second set of kernels.
# They serve what most models train with: float16 or bfloat16, with any mask that leaves each query a key; backward,
# only head dimensions over 16. Short sequences have kernels of their own, further down, and float32 has one, at the end
# of this section. (The notes of `tg.attention` have the limits.) For all else the kernels above stay in charge. Both
# sets compute the same formulas. What changes is who waits for whom. (They are in the folder `hopper`:
# `attention_forward.py`, `attention_backward.py`, `attention_gradients.py`, `attention_heads_backward.py` and
# `attention_float32.py`.)
#
# The matrix unit of Hopper is so fast that the exponentials become a problem. The FlashAttention-3 paper counts: at a
# head dimension of 128 there are 512 matrix operations for each exponential, and in the time of one exponential the
# matrix unit does about 256. So the exponentials take half as long as the products, and at a head dimension of 64 as
# long. A program that first multiplies and then takes exponentials leaves each unit idle while the other works.
# Therefore these kernels are written in Gluon, the lower level of Triton, where one can say which warps do what. (In
# Triton itself, `tl.range(..., warp_specialize=True)` asks the compiler to divide the work of a loop. On Hopper, Triton
# 3.6 and 3.7 do so for few loops: of a product by descriptors, with tiles of 64 rows and four warps, and not with
# larger ones. And the order in which products and exponentials start cannot be said there.)
#
# - The warps part as in the fifth rung of page three: a *producer* starts the copies of :math:`Q`, :math:`K` and
#   :math:`V`, one to three *consumers* own 64 queries each and do the arithmetic, and barriers in shared memory tell
#   each side when a tile has come or may go. Shared memory has two places for tiles of keys, two for tiles of values,
#   and mostly two for those of queries, so that the next ones arrive while these are at work. Up to head dimension 64,
#   one or two consumers keep their queries in registers, so that :math:`Q K^{\mathsf T}` reads only keys from shared
#   memory; three have no registers to spare.
# - The consumers take turns. While one has the matrix unit, another takes its exponentials. And within a consumer, the
#   scores of the next tile are started together with :math:`P V` of this one, so that its own softmax runs under its
#   own product. (`_fwd_step` in `attention_forward.py` is one step of this walk, in some thirty-five lines.)
# - Here the keys are walked from the diagonal backwards. Where query 0 stands at key 0, the 64 queries of a consumer
#   lie within one tile of keys, so only the first tile of its walk can need a mask. It holds at least one key that is
#   allowed to each query, so the mask alone leaves no query without a reference. Other alignments and windows are
#   compiled as another kernel from the same source, which walks from the upper limit to the lower one, with masks at
#   both ends.
# - A mask has its price where it cuts through a tile. Whoever chooses between a score and :math:`-\infty` compares
#   first, and keeps the answer in a *predicate*, a register of one bit. A thread has seven of those, but 64 scores of a
#   tile of 64 :math:`\times` 128. Triton 3.6 compares before the scores have come, and packs the answers into other
#   registers: a tile that is masked like this at both limits of a window takes 991 instructions, and one without a mask
#   439 (head dimension 64, counted in the machine code). So there is nothing to choose at these limits any more. For
#   each score we take how far its key lies inside the limit, a number that is negative where the key is cut off. The
#   sign of this number, set before the bits of infinity, makes :math:`-\infty` there and :math:`+\infty` elsewhere, and
#   the smaller of that and the score is what counts. Along a diagonal of the tile the number is the same, so for each
#   limit a thread computes half as many as it has scores. With both limits a tile takes 706 instructions then, and 574
#   where one alone can cut. (`cut_off` in `attention_rows.py`. The backward kernel of one walk, which comes next, still
#   chooses, since with head dimension 128 it has no registers for these numbers; so do the masks of float32.)
# - A shape is a power of two, and a head dimension like 80 is none. Its rows lie in shared memory as 128 columns: the
#   tensor memory accelerator knows where a row of the tensor ends, and fills in zeros. The products leave them out. The
#   scores are two products, over 64 columns and over 16, added up in the same registers, and the output has two such
#   parts. So 64, 80, 96, 128, 160, 192 or 256 columns are computed, the next larger for every other number, and
#   :math:`V` may have another number of them than :math:`Q` and :math:`K`. Nor do rows of 129 to 192 take the room of
#   256: they lie in three pieces of 64 columns.
# - A program works off a list of tiles, which the launcher makes beforehand: long tiles first within a group of heads
#   whose keys fit into the L2 cache, each to the program that will be free first. Under a causal mask few
#   multiprocessors are then idle at the end, by the launcher's reckoning. In a prototype it was what helped most there;
#   this kernel was not timed without it, and no record holds either.
#
# The backward kernel makes one walk and five products. A program has one tile of 128 keys after another, in turn or,
# with a mask, from such a list, and adds up their :math:`dK` and :math:`dV` in registers. Each tile's share of
# :math:`dQ` goes to memory, to a float32 sum that other programs add to as well, by atomic additions. So :math:`dQ` may
# differ in its last bits from run to run. :math:`dK` and :math:`dV` do not.
#
# Each of two consumers owns 64 of the keys, but :math:`dQ` needs the :math:`dS` of both. If they met for it at each
# tile, they would always be at the same place: both would multiply, and then both would take exponentials. So each
# leaves its :math:`dS` in shared memory and goes on. :math:`dQ` is computed one tile later, when the other one's
# :math:`dS` has long been there, and the two may be up to a tile apart.
#
# With head dimension 128 the sums fill more than half of the registers that a consumer's threads have. By itself, the
# compiler computes the addresses of :math:`K` and :math:`V` once, before the walk, keeps them in registers, and
# *spills* other values to memory at each tile instead. So the kernel hides from it that these addresses stay what they
# are. To compute them again for each tile takes less time than the way to memory.
#
# Without a mask all tiles of keys take the same time, and the last round of them is rarely a full one. In the sweeps
# below, with head dimension 128, there are 2048 tiles of keys for 132 multiprocessors: fifteen full rounds, and 68
# tiles for which 64 multiprocessors would wait. So from 2048 positions on three to seven programs share each of these
# last tiles, each with a part of the queries. (With fewer positions a tile is done too soon for that to pay.) They
# write their :math:`dK` and :math:`dV` in float32, and the kernel that narrows :math:`dQ` at the end adds them up,
# always in the same order. Under a causal mask short tiles come last, and fill the gaps. There, and under a window,
# programs share tiles only where all tiles together are no more than the multiprocessors.
#
# Two more kernels sum nothing in memory. In one of them a program owns 128 queries and keeps their :math:`dQ` in
# registers while it walks along the keys, as the forward kernel does. In the other it owns 64 keys, and the registers
# of one consumer cannot hold :math:`dK` and :math:`dV` of long rows together. So the two divide the work: one computes
# the probabilities, hands them to the other one through shared memory, and adds up :math:`dV`; the other one computes
# :math:`dS` and adds up :math:`dK`. Each of the two walks needs :math:`Q K^{\mathsf T}` and :math:`dP`, which makes
# seven products. They serve rows of more than 128 numbers, and the first of them is a way to the same bits every time.
# Whoever needs those says so in torch's own words: after `torch.use_deterministic_algorithms(True)`, the kernel with
# the one walk leaves :math:`dQ` out, and that of the queries makes it, which is seven products as well. (Without a GPU
# it is the two walks from further up. Short heads, further down, repeat in any case.)

half = [torch.randn(1, 1, 300, 64, device=DEVICE, dtype=torch.float16) for _ in range(4)]
torch.use_deterministic_algorithms(True)
first, second = gradients_of(tg.attention, *half), gradients_of(tg.attention, *half)
torch.use_deterministic_algorithms(False)
for name, one, other in zip(("dq", "dk", "dv"), first, second, strict=True):
    assert torch.equal(one, other)
    print(f"{name} repeats bit for bit")

# %%
# float32, too, has a kernel for Hopper, whatever the mask, where sequences are not short. A product of its tiles is six
# products of bfloat16, as on page three, so a small kernel cuts :math:`Q`, :math:`K`, :math:`V` and :math:`dO` into
# their three parts beforehand. (:math:`P` and :math:`dS` are cut where they arise, in registers.) Then a single kernel
# does all the rest. Each launch of it makes one result:
#
# - :math:`O` walks the keys, multiplies :math:`Q K^{\mathsf T}` and adds up :math:`P V`.
# - :math:`dQ` walks the keys, multiplies :math:`Q K^{\mathsf T}` and :math:`dO \, V^{\mathsf T}`, and adds up
#   :math:`dS \, K`.
# - :math:`dK` walks the queries, multiplies :math:`K Q^{\mathsf T}` and :math:`V dO^{\mathsf T}`, and adds up
#   :math:`dS^{\mathsf T} Q`.
# - :math:`dV` walks the queries, multiplies :math:`K Q^{\mathsf T}` and adds up :math:`P^{\mathsf T} dO`.
#
# So the gradients take three, three and two products, eight in the place of five. That buys room: registers hold the
# sums, up to 256 columns of *one* result. With head dimensions up to 128 (or 192 for keys and 128 for values) one
# launch makes :math:`dK` and :math:`dV`, and :math:`K Q^{\mathsf T}` once for both: seven products. (At 128 their sums
# do not quite fit. What the compiler puts into memory costs less than another product.) All additions have a fixed
# order, in every mode.
#
# Shared memory is the other limit. The three parts of 128 rows of 256 columns are 192 KiB, and those of 64 rows to meet
# them 96 KiB, but it has 227 KiB for both. Therefore nothing but a *piece* of 64 columns is there at a time: the rows
# that a program owns come again with each tile, out of the L2 cache, next to the rows that they meet. A piece of both
# is 72 KiB for :math:`6 \cdot 2 \cdot 128 \cdot 64 \cdot 64` operations, 85 for a byte, as many as in a tile of 128
# :math:`\times` 256 of page three; what is added up takes a third of that, 24 KiB for as many. Three such steps are
# under way at a time. Pieces of 32 columns need as many bytes for an operation, but two narrow products in the place of
# one, and are slower. They serve where half of a piece of 64 would be zeros, and these would cost more: for head
# dimensions up to 32, and in three parts from 65 to 96.
#
# `torch.set_float32_matmul_precision("high")` allows products that are less exact: of TensorFloat-32, whose numbers
# have 11 bits (10 behind the point, and the one before it), or of two parts of bfloat16, says torch. We take the
# latter, three products of 16 bits, because that is how this kernel works.

# %%
# First the memory, then the cache, then the waiting
# --------------------------------------------------
#
# How much of the speed is in the formula, and how much in the fine work? We compare four versions of this page with the
# library, and with cuDNN, NVIDIA's library of kernels for deep learning, which torch can call for attention. The first
# one is the three lines of PyTorch, with its scores in memory. The second is the small kernel, in tiles of 32 queries
# and 32 keys. The third is the library's kernel as we launched it above, in tiles of 64 and 32, and the fourth the same
# kernel in tiles of 128 and 64, each of them shared by eight warps, with two stages in the place of three. `ALIGN=8`
# tells the compiler that it may copy eight numbers at a time. All four have to agree with torch in float16, too, on
# lengths that fill no tile.


def small_attention_4d(q, k, v):
    return small_attention(*(x.flatten(0, 1) for x in (q, k, v)))[0].view_as(q)


rungs = {
    "scores in memory": materialised_attention,
    "small kernel, 32 × 32": small_attention_4d,
    "tiles of 64 × 32": lambda q, k, v: my_attention(q, k, v, ALIGN=8)[0],
    "tiles of 128 × 64": lambda q, k, v: my_attention(
        q, k, v, BLOCK_M=128, BLOCK_N=64, ALIGN=8, num_warps=8, num_stages=2
    )[0],
    "cuDNN": torch.nn.functional.scaled_dot_product_attention,
    "triton_gallery": tg.attention,
}
keys, values = k[..., :113, :], v[..., :113, :]  # the small kernel wants as many keys as queries
expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
for name in list(rungs)[:4]:
    out = rungs[name](q.half(), keys.half().contiguous(), values.half().contiguous())
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)

# %%
# These kernels round the probabilities to 16 bits before they meet :math:`V`. What does that cost? Here are the largest
# errors, for the same inputs, against a result in float64:

narrow = [x.half().contiguous() for x in (q, keys, values)]
exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in narrow))
for name in ("scores in memory", "tiles of 64 × 32", "triton_gallery"):
    print(f"{name + ':':18} {(rungs[name](*narrow) - exact).abs().max().item():.1e}")
print(f"{'torch:':18} {(torch.nn.functional.scaled_dot_product_attention(*narrow) - exact).abs().max().item():.1e}")

# %%
# To round the result alone to float16 may cost half of its last bit, which for numbers between 0.5 and 1 is 2.4e-4.
#
# Now the bytes, for 16 heads of 16384 positions. The scores make four trips to memory. With tiles there are no scores,
# but each tile of queries walks along all keys and values of its head, so the tiles together read them many times.

n_heads, S, head_dim = 16, 16384, 128
matrix, flops = 2 * n_heads * S * head_dim, 4 * n_heads * S * S * head_dim  # bytes of one of q, k, v and out
n_bytes = {
    "scores in memory": 4 * matrix + 4 * n_heads * S * S * 2,
    "small kernel, 32 × 32": 2 * matrix + S // 32 * 2 * matrix,
    "tiles of 64 × 32": 2 * matrix + S // 64 * 2 * matrix,
    "tiles of 128 × 64": 2 * matrix + S // 128 * 2 * matrix,
}
for name, size in n_bytes.items():
    print(f"{name + ':':22} {size / 2**30:4.1f} GiB, {flops / size:3.0f} operations per byte")

# %%
# The first line and the third are nearly equal: both come to about 64 operations per byte, once as half of the head
# dimension and once as the number of queries in a tile. The small kernel even moves twice as much. What changes after
# the first version is *where* the bytes come from. Scores come from memory. Keys and values come from the L2 cache, as
# long as what the programs of a round read is still there in the next one. Only larger tiles make the bytes fewer.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["seq_len"],
        x_vals=[512, 2048, 8192, 16384],
        x_log=True,
        line_arg="provider",
        line_vals=list(rungs),
        line_names=list(rungs),
        xlabel="sequence length",
        ylabel="TFLOP/s",
        plot_name="attention-ladder-fp16",
        args={"head_dim": 128},
    ),
    title="Attention forward, step by step, D = 128, float16",
    limit="matmul-fp16",
    rounds=2,
)
def bench_attention_ladder(seq_len, head_dim, provider):
    shape = (16384 // seq_len, 2048 // head_dim, seq_len, head_dim)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.float16) for _ in "qkv")
    # Tells torch's own function which kernel to take, and nothing to the others.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        times = tg.benchmark.measure(lambda: rungs[provider](q, k, v))
    return tg.benchmark.tflops(4 * 16384 * 2048 * seq_len, times)


ladder = bench_attention_ladder.run()

# %%

ladder.plot()

# %%

ladder

# %%
# With its scores in memory, attention cannot get beyond 64 operations for each byte that a copy moves, however long the
# sequence is. That is far below the dashed line, and the three lines of PyTorch do not even get there: with 16384
# positions they reach :measured:`attention-ladder-fp16: scores in memory at 16384`.
#
# The small kernel makes none of these trips, and still, on an H200, it is faster than these lines at one of four
# lengths only. Its rate over theirs is :measured:`attention-ladder-fp16: small kernel, 32 × 32 / scores in memory at
# 512` at 512 positions, :measured:`attention-ladder-fp16: small kernel, 32 × 32 / scores in memory at 2048` at 2048 and
# :measured:`attention-ladder-fp16: small kernel, 32 × 32 / scores in memory at 16384` at 16384. At 8192 they fall to
# :measured:`attention-ladder-fp16: scores in memory at 8192`; why, we have not looked into. From 2048 positions on its
# own rate hardly changes. What it saves is the memory of the scores. For its rate it depends on the cache instead, and
# the smaller the tile, the more it asks of that, and the smaller are the pieces that it hands to the matrix unit.
# Hopper's own instruction, `wgmma`, multiplies 64 rows at least, so tiles of 32 have to make do with an older one. And
# what happens once for a tile of keys, its loads and the wait for them, serves no more than 32 queries. Speed comes
# with the tile, above all: with 64 queries, and tiles of keys as long as before, it is
# :measured:`attention-ladder-fp16: tiles of 64 × 32 / small kernel, 32 × 32 at 16384` as fast at 16384 positions.
# (Smaller changes come with it: full tiles compute no mask, and the scale joins the exponent.)
#
# The fourth version asks the cache for half as much and waits half as often, and still, on an H200, it is slower at all
# four lengths. Its rate over the third one's is :measured:`attention-ladder-fp16: tiles of 128 × 64 / tiles of 64 × 32
# at 512` at 512 positions, :measured:`attention-ladder-fp16: tiles of 128 × 64 / tiles of 64 × 32 at 2048` at 2048,
# :measured:`attention-ladder-fp16: tiles of 128 × 64 / tiles of 64 × 32 at 8192` at 8192 and
# :measured:`attention-ladder-fp16: tiles of 128 × 64 / tiles of 64 × 32 at 16384` at 16384. So fewer bytes are not
# enough by themselves. Larger programs have a price, too. Their registers leave room for one on a multiprocessor where
# the third version has three, we gave them two stages, eight warps instead of four meet at every tile of keys, and
# there is less other work to turn to.
#
# What remains is waiting: products and exponentials take turns. On Hopper the last step of the library is the division
# of labour that the section above describes, which lets both units work at the same time. It also has tiles of 128
# keys, copies by TMA, and an instruction less for each score. What each of these gains in this kernel we have not
# measured. In a prototype the early start of the next scores helped much, and the turns little. (No record holds that.)

# %%
# At the rate of a matrix product?
# --------------------------------
#
# We measure at a fixed number of positions, 16384, and a fixed width of 2048 for all heads together, in float16. The
# sequences grow from 512 positions to 16384, and their number shrinks. The operations that we divide by the time are
# :math:`4 S^2 D` for each head of the forward pass, 2.5 times as much for the backward pass, and half of that under a
# causal mask, whatever a kernel really computes. The peers are cuDNN's attention and FlashAttention-2, by name, so that
# torch does not choose for us. (The latter was written for Ampere. FlashAttention-3, which was written for Hopper, does
# not come with torch and is not measured.) A backward pass is `torch.autograd.grad` on a graph that is kept, for all
# alike, with torch's default setting: no determinism asked for. The limit is torch's product of large matrices.
#
# A GPU that runs at the limit of its power changes its clock from second to second. So each point is measured twice,
# the second time with the providers in reverse order.

import contextlib

BACKENDS = {
    "cuDNN": torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
    "FlashAttention-2": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
}


def bench_attention(seq_len, direction, head_dim, is_causal, provider):
    shape = (16384 // seq_len, 2048 // head_dim, seq_len, head_dim)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.float16, requires_grad=direction == "bwd") for _ in "qkv")

    if provider == "triton_gallery":
        attention, backend = tg.attention, contextlib.nullcontext()
    else:
        attention = torch.nn.functional.scaled_dot_product_attention
        backend = torch.nn.attention.sdpa_kernel(BACKENDS[provider])
    flops = 4 * 16384 * 2048 * seq_len / (2 if is_causal else 1)
    with backend:
        if direction == "fwd":
            times = tg.benchmark.measure(lambda: attention(q, k, v, is_causal=is_causal))
            return tg.benchmark.tflops(flops, times)
        out, dout = attention(q, k, v, is_causal=is_causal), torch.randn(shape, device=DEVICE, dtype=torch.float16)
    times = tg.benchmark.measure(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    return tg.benchmark.tflops(2.5 * flops, times)


def sweep(direction, head_dim, is_causal):
    name = {"fwd": "forward", "bwd": "backward"}[direction] + (", causal" if is_causal else "")
    return tg.benchmark.perf_report(
        triton.testing.Benchmark(
            x_names=["seq_len"],
            x_vals=[512, 1024, 2048, 4096, 8192, 16384],
            x_log=True,
            line_arg="provider",
            line_vals=["triton_gallery", *BACKENDS],
            line_names=["triton_gallery", *BACKENDS],
            xlabel="sequence length",
            ylabel="TFLOP/s",
            plot_name=f"attention-{direction}-d{head_dim}{'-causal' if is_causal else ''}-fp16",
            args={"direction": direction, "head_dim": head_dim, "is_causal": is_causal},
        ),
        title=f"Attention {name}, head dimension {head_dim}, float16",
        limit="matmul-fp16",
        rounds=2,
    )(bench_attention)


reports = {}
for direction in ("fwd", "bwd"):
    for head_dim in (64, 128):
        for is_causal in (False, True):
            reports[direction, head_dim, is_causal] = sweep(direction, head_dim, is_causal).run()

# %%
# The forward pass at head dimension 128, without a mask:

reports["fwd", 128, False].plot()

# %%

reports["fwd", 128, False]

# %%
# The same, causal:

reports["fwd", 128, True].plot()

# %%

reports["fwd", 128, True]

# %%
# The backward pass at head dimension 128:

reports["bwd", 128, False].plot()

# %%

reports["bwd", 128, False]

# %%
# And causal:

reports["bwd", 128, True].plot()

# %%

reports["bwd", 128, True]

# %%
# The forward pass at head dimension 64:

reports["fwd", 64, False].plot()

# %%

reports["fwd", 64, False]

# %%
# And causal:

reports["fwd", 64, True].plot()

# %%

reports["fwd", 64, True]

# %%
# The backward pass at head dimension 64:

reports["bwd", 64, False].plot()

# %%

reports["bwd", 64, False]

# %%
# And causal:

reports["bwd", 64, True].plot()

# %%

reports["bwd", 64, True]

# %%
# Other head dimensions, windows, float32
# ---------------------------------------
#
# Here are 4 sequences of 4096 positions, causal, and as many heads as make a width of about 2048. The operations count
# without columns of zeros, of which there are the more the further a head dimension is below 64:


def bench_head_dims(head_dim, direction, provider):
    shape = (4, round(2048 / head_dim), 4096, head_dim)
    return bench_equal(shape, head_dim, torch.float16, direction, provider)


def bench_equal(shape, head_dim_v, dtype, direction, provider, is_causal=True):
    batch, n_heads, seq_len, head_dim = shape
    q, k = (torch.randn(shape, device=DEVICE, dtype=dtype) for _ in "qk")
    v = torch.randn(*shape[:-1], head_dim_v, device=DEVICE, dtype=dtype)
    for x in (q, k, v):
        x.requires_grad_(direction == "bwd")
    attention, backend = torch.nn.functional.scaled_dot_product_attention, contextlib.nullcontext()
    if provider == "triton_gallery":
        attention = tg.attention
    elif provider in BACKENDS:
        backend = torch.nn.attention.sdpa_kernel(BACKENDS[provider])
    one_column = 2 * batch * n_heads * seq_len**2 // (1 + is_causal)  # operations of a product
    with backend:
        if direction == "fwd":
            times = tg.benchmark.measure(lambda: attention(q, k, v, is_causal=is_causal))
            return tg.benchmark.tflops(one_column * (head_dim + head_dim_v), times)
        out = attention(q, k, v, is_causal=is_causal)
    dout = torch.randn_like(out)
    times = tg.benchmark.measure(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    return tg.benchmark.tflops(one_column * (3 * head_dim + 2 * head_dim_v), times)


def head_dims(direction, name):
    return tg.benchmark.perf_report(
        triton.testing.Benchmark(
            x_names=["head_dim"],
            x_vals=[16, 32, 48, 64, 80, 96, 128, 160, 192, 256],
            x_log=True,
            line_arg="provider",
            line_vals=["triton_gallery", *BACKENDS],
            line_names=["triton_gallery", *BACKENDS],
            xlabel="head dimension",
            ylabel="TFLOP/s",
            plot_name=f"attention-{direction}-head-dims-fp16",
            args={"direction": direction},
        ),
        title=f"Attention {name}, causal, 4096 positions, float16",
        limit="matmul-fp16",
        rounds=2,
    )(bench_head_dims)


report_head_dims = head_dims("fwd", "forward").run()
report_head_dims.plot()

# %%

report_head_dims

# %%
# The backward pass has three ways here. At a head dimension of 16 it takes the two kernels from further up, whose tiles
# have 16 columns and no zeros; then the kernel with one walk; and past 128 the two walks on Hopper:

report_head_dims_bwd = head_dims("bwd", "backward").run()
report_head_dims_bwd.plot()

# %%

report_head_dims_bwd

# %%
# *Multi-head latent attention*, with which DeepSeek's models keep their cache small, has queries and keys of 192
# numbers and values of 128. These are 16384 positions in 16 heads, causal, cut into sequences. (torch has no kernel of
# FlashAttention-2 for rows of two lengths.)


def latent(direction, name):
    return tg.benchmark.perf_report(
        triton.testing.Benchmark(
            x_names=["seq_len"],
            x_vals=[1024, 4096, 16384],
            x_log=True,
            line_arg="provider",
            line_vals=["triton_gallery", *BACKENDS],
            line_names=["triton_gallery", *BACKENDS],
            xlabel="sequence length",
            ylabel="TFLOP/s",
            plot_name=f"attention-{direction}-latent-fp16",
            args={"direction": direction},
        ),
        title=f"Attention {name}, causal, head dimensions 192 and 128, float16",
        limit="matmul-fp16",
        rounds=2,
    )(bench_latent)


def bench_latent(seq_len, direction, provider):
    return bench_equal((16384 // seq_len, 16, seq_len, 192), 128, torch.float16, direction, provider)


report_latent = latent("fwd", "forward").run()
report_latent.plot()

# %%

report_latent

# %%

report_latent_bwd = latent("bwd", "backward").run()
report_latent_bwd.plot()

# %%

report_latent_bwd

# %%
# Most language models of today group their queries, as the model with a cache above does. Here 32 heads share the keys
# and values of 8, as in Llama 3, again with 16384 positions and a causal mask. The operations are those of 32 heads. No
# key is copied for it: a program reads those of its group. Each point is measured four times, because the
# longest calls heat the GPU.


def grouped(direction, name):
    return tg.benchmark.perf_report(
        triton.testing.Benchmark(
            x_names=["seq_len"],
            x_vals=[1024, 4096, 16384],
            x_log=True,
            line_arg="provider",
            line_vals=["triton_gallery", *BACKENDS],
            line_names=["triton_gallery", *BACKENDS],
            xlabel="sequence length",
            ylabel="TFLOP/s",
            plot_name=f"attention-{direction}-grouped-fp16",
            args={"direction": direction},
        ),
        title=f"Attention {name}, causal, 32 heads of queries and 8 of keys, float16",
        limit="matmul-fp16",
        rounds=4,
    )(bench_grouped)


def bench_grouped(seq_len, direction, provider):
    batch, head_dim = 16384 // seq_len, 128
    q, k, v = (
        torch.randn(batch, n_heads, seq_len, head_dim, device=DEVICE, dtype=torch.float16) for n_heads in (32, 8, 8)
    )
    for x in (q, k, v):
        x.requires_grad_(direction == "bwd")
    attention, backend = torch.nn.functional.scaled_dot_product_attention, contextlib.nullcontext()
    if provider == "triton_gallery":
        attention = tg.attention
    else:
        backend = torch.nn.attention.sdpa_kernel(BACKENDS[provider])
    one_product = batch * 32 * seq_len**2 * head_dim  # its operations, for half of the scores
    with backend:
        if direction == "fwd":
            times = tg.benchmark.measure(lambda: attention(q, k, v, is_causal=True, enable_gqa=True))
            return tg.benchmark.tflops(2 * one_product, times)
        out = attention(q, k, v, is_causal=True, enable_gqa=True)
    dout = torch.randn_like(out)
    times = tg.benchmark.measure(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    return tg.benchmark.tflops(5 * one_product, times)


report_grouped = grouped("fwd", "forward").run()
report_grouped.plot()

# %%

report_grouped

# %%

report_grouped_bwd = grouped("bwd", "backward").run()
report_grouped_bwd.plot()

# %%

report_grouped_bwd

# %%
# Against cuDNN, which is the faster of the two others, the forward pass is at
# :measured:`attention-fwd-grouped-fp16: triton_gallery / cuDNN at 1024` for 1024 positions and at
# :measured:`attention-fwd-grouped-fp16: triton_gallery / cuDNN at 16384` for 16384; the backward pass at
# :measured:`attention-bwd-grouped-fp16: triton_gallery / cuDNN at 1024` and
# :measured:`attention-bwd-grouped-fp16: triton_gallery / cuDNN at 16384`.

# %%
# What do the same bits every time cost? This is the backward pass with head dimension 128 and a causal mask once more,
# in torch's default mode and in its deterministic one. (We keep torch from filling new memory with NaN, as it does in
# that mode to show who reads what nobody wrote.)


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["seq_len"],
        x_vals=[512, 1024, 2048, 4096, 8192, 16384],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "triton_gallery deterministic", "cuDNN", "FlashAttention-2 deterministic"],
        line_names=["triton_gallery", "triton_gallery deterministic", "cuDNN", "FlashAttention-2 deterministic"],
        xlabel="sequence length",
        ylabel="TFLOP/s",
        plot_name="attention-bwd-deterministic-fp16",
        args={},
    ),
    title="Attention backward, causal, head dimension 128, float16, in two modes",
    limit="matmul-fp16",
    rounds=2,
)
def bench_deterministic(seq_len, provider):
    name, _, mode = provider.partition(" ")
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(mode == "deterministic")
    try:
        return bench_attention(seq_len, "bwd", 128, True, name)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


report_deterministic = bench_deterministic.run()
report_deterministic.plot()

# %%

report_deterministic

# %%
# Next, a window: 16 heads of 16384 positions, where a query sees itself and so many keys before it. torch's attention
# would need the mask in memory. Its FlexAttention takes a function in the place of a mask, compiles it into a kernel
# and skips the tiles that the mask leaves empty. The operations count for allowed pairs alone.

from torch.nn.attention.flex_attention import create_block_mask, flex_attention

flex = torch.compile(flex_attention, dynamic=False)


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["window"],
        x_vals=[128, 256, 512, 1024, 2048, 4096, 8192],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "FlexAttention"],
        line_names=["triton_gallery", "FlexAttention"],
        xlabel="keys before its own that a query sees",
        ylabel="TFLOP/s",
        plot_name="attention-window-fp16",
        args={},
    ),
    title="Attention forward with a window, 16384 positions, head dimension 128, float16",
    limit="matmul-fp16",
    rounds=2,
)
def bench_window(window, provider):
    S = 16384
    q, k, v = (torch.randn(1, 16, S, 128, device=DEVICE, dtype=torch.float16) for _ in "qkv")
    if provider == "triton_gallery":
        times = tg.benchmark.measure(lambda: tg.attention(q, k, v, window=(window, 0)))
    else:
        mask = create_block_mask(lambda b, h, i, j: (j <= i) & (i - j <= window), None, None, S, S, device=DEVICE)
        times = tg.benchmark.measure(lambda: flex(q, k, v, block_mask=mask))
    n_pairs = (window + 1) * S - window * (window + 1) // 2
    return tg.benchmark.tflops(4 * 16 * n_pairs * 128, times)


report_window = bench_window.run()
report_window.plot()

# %%

report_window

# %%
# And the backward pass with the same windows:

import torch._functorch.config

# A compiled backward pass may overwrite what the forward pass saved; then the graph could be used only once.
torch._functorch.config.donated_buffer = False


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["window"],
        x_vals=[128, 512, 2048, 8192],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "FlexAttention"],
        line_names=["triton_gallery", "FlexAttention"],
        xlabel="keys before its own that a query sees",
        ylabel="TFLOP/s",
        plot_name="attention-bwd-window-fp16",
        args={},
    ),
    title="Attention backward with a window, 16384 positions, head dimension 128, float16",
    limit="matmul-fp16",
    rounds=2,
)
def bench_window_backward(window, provider):
    S = 16384
    q, k, v, dout = (torch.randn(1, 16, S, 128, device=DEVICE, dtype=torch.float16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    if provider == "triton_gallery":
        out = tg.attention(q, k, v, window=(window, 0))
    else:
        mask = create_block_mask(lambda b, h, i, j: (j <= i) & (i - j <= window), None, None, S, S, device=DEVICE)
        out = flex(q, k, v, block_mask=mask)
    n_pairs = (window + 1) * S - window * (window + 1) // 2
    times = tg.benchmark.measure(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    return tg.benchmark.tflops(10 * 16 * n_pairs * 128, times)


report_window_bwd = bench_window_backward.run()
report_window_bwd.plot()

# %%

report_window_bwd

# %%
# The narrower the window, the more of the work lies in tiles that are partly masked, and the lower both rates are. With
# 128 keys we are at :measured:`attention-bwd-window-fp16: triton_gallery / FlexAttention at 128` FlexAttention's rate,
# with 8192 at :measured:`attention-bwd-window-fp16: triton_gallery / FlexAttention at 8192`.

# %%
# And float32, in the setting that torch begins with, without TensorFloat-32. cuDNN and FlashAttention-2 do not take it,
# so torch chooses among what it has. Both passes have head dimension 64 and 32 heads:


def float32_sweep(direction, name):
    return tg.benchmark.perf_report(
        triton.testing.Benchmark(
            x_names=["seq_len"],
            x_vals=[512, 1024, 2048, 4096],
            x_log=True,
            line_arg="provider",
            line_vals=["triton_gallery", "torch"],
            line_names=["triton_gallery", "torch"],
            xlabel="sequence length",
            ylabel="TFLOP/s",
            plot_name=f"attention-{direction}-causal-fp32",
            args={"direction": direction},
        ),
        title=f"Attention {name}, causal, head dimension 64, float32",
        rounds=2,
    )(bench_float32)


def bench_float32(seq_len, direction, provider):
    return bench_equal((4096 // seq_len, 32, seq_len, 64), 64, torch.float32, direction, provider)


report_fp32 = float32_sweep("fwd", "forward").run()
report_fp32.plot()

# %%

report_fp32

# %%

report_fp32_bwd = float32_sweep("bwd", "backward").run()
report_fp32_bwd.plot()

# %%

report_fp32_bwd

# %%
# And by head dimension, of 2048 queries that see all 2048 keys. After `torch.set_float32_matmul_precision("high")` our
# kernel takes two parts of each number in the place of three:


def float32_head_dims(direction, name):
    return tg.benchmark.perf_report(
        triton.testing.Benchmark(
            x_names=["head_dim"],
            x_vals=[32, 64, 96, 128, 192, 256],
            x_log=True,
            line_arg="provider",
            line_vals=["triton_gallery", "triton_gallery, high", "torch"],
            line_names=["triton_gallery", "triton_gallery, high", "torch"],
            xlabel="head dimension",
            ylabel="TFLOP/s",
            plot_name=f"attention-{direction}-head-dims-fp32",
            args={"direction": direction},
        ),
        title=f"Attention {name}, full, 2048 queries, float32",
        rounds=2,
    )(bench_float32_head_dims)


def bench_float32_head_dims(head_dim, direction, provider):
    function, _, precision = provider.partition(", ")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision or before)
    try:
        return bench_equal((2, 16, 2048, head_dim), head_dim, torch.float32, direction, function, is_causal=False)
    finally:
        torch.set_float32_matmul_precision(before)


report_fp32_head_dims = float32_head_dims("fwd", "forward").run()
report_fp32_head_dims.plot()

# %%

report_fp32_head_dims

# %%

report_fp32_head_dims_bwd = float32_head_dims("bwd", "backward").run()
report_fp32_head_dims_bwd.plot()

# %%

report_fp32_head_dims_bwd

# %%
# One query, all keys
# -------------------
#
# When a language model writes, it adds one word at a time. Then there is a single query in each head, and the keys of
# all words so far. Let us count. With :math:`g` heads of queries to a head of keys, each of the latter takes :math:`4 g
# S D` operations for :math:`4 S D` bytes of :math:`K` and :math:`V` in float16. That is :math:`g` per byte, 1 or 4 in
# the sweep below, so the limit is the memory's, not the matrix unit's. With one sequence the kernel for many queries is
# at its worst. Its tile of 128 queries holds one, which costs little. But 32 heads make 32 tiles, and with a program to
# each most of an H200's 132 multiprocessors have nothing to do.
#
# So the keys are shared out: each program walks along a part of them, a *split*, and writes what it has found, its sums
# and its maximum. The rule by which a row joined its tiles holds for splits as well, and a second kernel joins them.
# One program serves all heads of a group, or the keys would be read once for each: its tile of queries holds all
# queries of all these heads. The second kernel has little to do. To make its start cheap as well, its programs may
# begin while the last ones of the first kernel still run, and wait for them by the two calls of page five:

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# quote: triton_gallery.attention._attention_split_kernel
# quote: triton_gallery.attention._attention_join_kernel

# %%
# A lane is a query: `lanes // seq_q` says of which head of the group, `lanes % seq_q` at which position. The tile has
# 16 lanes at least, the fewest that a matrix unit takes, and 4 queries fill a quarter of it.
#
# The library takes this way for up to 64 queries in a group (16 in float32, whose products take more registers) and 512
# keys or more. How many splits are best depends on how full the last round of programs is, which `_num_splits`
# estimates. Where heads share nothing and are many, more than 66 on an H200, there are no splits: the kernel for many
# queries has programs for half of the GPU or more then, and that most of its tile is empty costs nothing beside reading
# the keys. (A few more than 66 may be too few to keep the memory busy; we have not measured that.)
#
# On Hopper heads that do share keys get there, too, when many sequences are served at once. To the kernel for many
# queries, one query of each head of a group looks like a few queries of one head: the same memory, with another shape.
# So it reads each key once, with no splits and nothing to join. Where these queries fill no more than 64 rows, of at
# most 192 numbers, it has only one consumer, smaller steps, and half of the registers and shared memory. Two such
# programs fit into a multiprocessor (three of 64 numbers), so that an H200 has room for 264 at a time. That helps when
# there are, say, 160 heads of keys. With room for 132 programs, 28 would have to wait, and would then read alone, too
# few to keep the memory busy. Now all of them read from the start, and finish at about the same time, because what each
# waits for is the memory that all share. `keeps_memory_busy` says whether the last round has programs enough, or so
# many came before it that it counts little; where neither is so, keys that heads share are split as above.
#
# In the sweep, 32 heads of queries share 8 or 32 heads of keys, with head dimension 128. What counts is the bytes of
# :math:`K` and :math:`V`, each once.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["batch", "kv_heads", "seq_k"],
        x_vals=[
            (1, 8, 4096),
            (1, 8, 32768),
            (16, 8, 4096),
            (20, 8, 4096),
            (64, 8, 2048),
            (1, 32, 32768),
            (16, 32, 4096),
        ],
        line_arg="provider",
        line_vals=["triton_gallery", *BACKENDS],
        line_names=["triton_gallery", *BACKENDS],
        xlabel="batch × key heads × keys",
        ylabel="GB/s",
        plot_name="attention-decode-fp16",
        args={},
    ),
    title="Attention of one query, float16",
    limit="copy",
)
def bench_decode(batch, kv_heads, seq_k, provider):
    q = torch.randn(batch, 32, 1, 128, device=DEVICE, dtype=torch.float16)
    k, v = torch.randn(2, batch, kv_heads, seq_k, 128, device=DEVICE, dtype=torch.float16)
    if provider == "triton_gallery":
        attention, backend = tg.attention, contextlib.nullcontext()
    else:
        attention = torch.nn.functional.scaled_dot_product_attention
        backend = torch.nn.attention.sdpa_kernel(BACKENDS[provider])
    with backend:
        times = tg.benchmark.measure(lambda: attention(q, k, v, enable_gqa=True))
    return tg.benchmark.gbps(k.nbytes + v.nbytes, times)


decode_report = bench_decode.run()

# %%

decode_report.plot()

# %%

decode_report

# %%
# One sequence of 32768 positions, with a head of keys for each head of queries, has 512 MiB of keys and values, and
# comes close to a copy's rate: :measured:`attention-decode-fp16: triton_gallery / limit at 1×32×32768` of it. So do 64
# sequences of 2048 positions with shared heads, which have as much: :measured:`attention-decode-fp16: triton_gallery /
# limit at 64×8×2048`. Sixteen sequences of 4096 have half as much and reach :measured:`attention-decode-fp16:
# triton_gallery / limit at 16×8×4096`; one of them has 16 MiB, for which, we think, two launches and the first wait for
# memory weigh most, and reaches :measured:`attention-decode-fp16: triton_gallery / limit at 1×8×4096`, or
# :measured:`attention-decode-fp16: triton_gallery / copy of as many bytes at 1×8×4096` of a copy of as many bytes. The
# last shape has 512 heads that share nothing, and with :measured:`attention-decode-fp16: triton_gallery / limit at
# 16×32×4096` of the limit it is as fast as a copy. One sequence of 32768 with shared heads reaches
# :measured:`attention-decode-fp16: triton_gallery / limit at 1×8×32768`, or :measured:`attention-decode-fp16:
# triton_gallery / copy of as many bytes at 1×8×32768` of a copy of as many bytes; why no more, we have not looked into.
#
# With one sequence of 4096 positions we run at :measured:`attention-decode-fp16: triton_gallery / cuDNN at 1×8×4096`
# cuDNN's rate. Everywhere else the two are about even, at worst at :measured:`attention-decode-fp16: triton_gallery /
# cuDNN at worst`. Twenty sequences of 4096 positions have the 160 heads of keys from above, and are as near to the
# limit as sixteen, which have 128: :measured:`attention-decode-fp16: triton_gallery / limit at 20×8×4096`.

# %%
# A piece of a prompt, all keys
# -----------------------------
#
# Long prompts are read in pieces, and a prompt may continue one whose keys are in the cache. Then some hundred queries
# meet all keys. That is more than the tile of lanes above can hold, and still too few for the kernel for many queries:
# 128 queries in each of 32 heads are 32 tiles, as before. On Hopper this kernel, too, can share out the keys. Where
# there are at most half as many tiles of queries as multiprocessors, and enough keys, several programs walk a part of
# the keys each. They write their part of the output in float32, with the part's own logsumexp :math:`L_i`, and the same
# second kernel joins them. The weight of part :math:`i` is :math:`e^{L_i - L}`, so :math:`L_i` takes the place of the
# part's maximum, and 1 that of its sum. (There are no splits with a window to the left, nor with a causal mask that
# begins with query 0 at key 0, whose first tiles have few keys. A mask that ends with the last query at the last key
# leaves each tile most of the cache.)
#
# The sweep has 32 heads of queries, which share 8 heads of 32768 keys, and no mask. With 16 queries the lanes are just
# full. From 32 on the kernel for Hopper has them, with four programs to a tile up to 128 queries and two with 256. 512
# queries are 128 tiles, which need no help.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["seq_q"],
        x_vals=[16, 32, 64, 128, 256, 512, 1024, 2048],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", *BACKENDS],
        line_names=["triton_gallery", *BACKENDS],
        xlabel="queries",
        ylabel="TFLOP/s",
        plot_name="attention-fwd-prompt-fp16",
        args={},
    ),
    title="Attention of some queries and 32768 keys, float16",
    limit="matmul-fp16",
    rounds=2,
)
def bench_prompt(seq_q, provider):
    q = torch.randn(1, 32, seq_q, 128, device=DEVICE, dtype=torch.float16)
    k, v = torch.randn(2, 1, 8, 32768, 128, device=DEVICE, dtype=torch.float16)
    if provider == "triton_gallery":
        attention, backend = tg.attention, contextlib.nullcontext()
    else:
        attention = torch.nn.functional.scaled_dot_product_attention
        backend = torch.nn.attention.sdpa_kernel(BACKENDS[provider])
    with backend:
        times = tg.benchmark.measure(lambda: attention(q, k, v, enable_gqa=True))
    return tg.benchmark.tflops(4 * 32 * seq_q * 32768 * 128, times)


prompt_report = bench_prompt.run()

# %%

prompt_report.plot()

# %%

prompt_report

# %%
# cuDNN takes the same time for 16 queries and for 256, as it would with a program to each tile. FlashAttention-2 shares
# out the keys, too. With 16 queries, which fill a tile of lanes here, we run at :measured:`attention-fwd-prompt-fp16:
# triton_gallery / FlashAttention-2 at 16` its rate. With 32 and 64 three quarters and half of our tile of 128 are empty
# (the second consumer hands back all tiles of keys but one unused), and we run at :measured:`attention-fwd-prompt-fp16:
# triton_gallery / FlashAttention-2 at 32` and :measured:`attention-fwd-prompt-fp16: triton_gallery / FlashAttention-2
# at 64`. With 128 queries no row is empty, and four programs to a tile occupy 128 of the 132 multiprocessors of an
# H200: we run at :measured:`attention-fwd-prompt-fp16: triton_gallery / FlashAttention-2 at 128` the rate of
# FlashAttention-2 and :measured:`attention-fwd-prompt-fp16: triton_gallery / cuDNN at 128` that of cuDNN. From 512 on
# cuDNN has programs enough, too, and what remains is the difference between the kernels. (FlashAttention-2 reaches
# less at 512 than at 256 and at 1024; why, we have not looked into.)

# %%
# Short sequences, many at a time
# -------------------------------
#
# A vision model may attend within windows of :math:`7 \times 7` positions, a text encoder reads captions of 77 tokens,
# and a batch has thousands of these. At the top of the page we counted :math:`S / 2` operations per byte of the forward
# pass. With :math:`S = 49` that is left of the ridge, and the memory sets the limit. What keeps a kernel from it are
# rows with nothing in them, and being idle between one tile and the next.
#
# On Hopper the forward pass of few queries is the kernel with one consumer from above: no row of a second one is empty,
# and of the two or three programs in a multiprocessor one copies while the others compute. Its steps have 64 keys, or
# 32 where there are no more or where rows have more than 128 numbers. All this holds where there are heads enough to
# keep the memory busy. Then, with head dimensions up to 64, it has the sequences that are shorter than 128 without a
# mask, and with a causal one those of up to 448 (but not from 97 to 128, where one tile of 128 is quicker). It also has
# sequences whose last tile of 128 rows would be empty by half or more, up to 704 positions with head dimensions up to
# 64, and up to 320 with head dimensions up to 192 (under a causal mask, up to 128). Where there is a window there are
# two consumers. `_suits_one_consumer` has the rule, from measurements.
#
# A short head is soon done, and what comes next should be there by then. Keys and values of the next head come early
# anyway, since their tiles have two places in shared memory each. With one place for queries, the copy of the next ones
# would begin when the last scores of this head are done, and every head would wait for memory. So they have two as
# well.
#
# For the backward pass of up to 64 positions (128 up to head dimension 32) we can forget most of what this page is
# about. (On Hopper yet another kernel, further down, mostly takes those from 49 on with head dimensions up to 64, and
# from 65 on with up to 32.) All scores of a head fit into one program, so there is no walk, :math:`p` and :math:`ds`
# are computed once, and the five products of the formulas are five lines. :math:`\delta` is at hand, without a kernel
# of its own; so is the whole sum for :math:`dQ`, so the same inputs give the same bits. On all GPUs the library takes
# this kernel for 16-bit numbers with head dimensions up to 128. One program walks all heads of queries that share one
# of keys. If these are many, and the batch so small that few other programs run, the kernels of long sequences stay
# faster.

# quote: triton_gallery.attention._row_statistics
# quote: triton_gallery.attention._attention_bwd_short_kernel

# %%
# Only products with :math:`P^{\mathsf T}` and :math:`dS^{\mathsf T}` need an operand that lies the wrong way round, and
# shared memory turns it. How many warps are best is a table in the source, from measurements: `_SHORT_WARPS`. The fewer
# they are, the less they wait for each other, and the more programs fit into a multiprocessor, until the registers of a
# warp no longer suffice.
#
# On Hopper a third kernel serves what lies between the short and the long: up to 256 keys, with head dimensions from 17
# to 64. It is chosen where each head of queries has its own keys, there are at least half as many heads as
# multiprocessors, and nobody asks for the logsumexp's gradient. There may be up to 256 queries as well, or more of them
# with up to 128 keys, if programs have about equally many heads. For each number of :math:`dQ` the kernel with one walk
# moves 14 bytes with up to 128 keys: a float32 zero, what is added to it, what is read to be narrowed, and 2 bytes at
# last. (With up to 256 keys it adds twice.) One number of each of the eight matrices that have to be moved, :math:`Q`,
# :math:`K`, :math:`V`, :math:`O`, :math:`dO` and three gradients, is 16 bytes. For a long sequence the sums are little
# beside its products, of which a short one has few. Here a program owns all keys of a head again, so that :math:`dQ` is
# complete when the program has passed them, leaves in 16 bits, and repeats bit for bit.
#
# - Two consumers own 64 keys each. :math:`dQ` needs :math:`dS` of all keys, so each of them leaves its part in shared
#   memory, waits for the other, and computes half of the columns.
# - :math:`\delta` is computed on the way: :math:`O` comes with :math:`Q` and :math:`dO`, and no other kernel has to
#   read it.
# - A program serves one head after another. While the consumers are at one, the producer copies the keys and values
#   that come next: those of the next head or, with more than 128 keys, the other half of this one's.
# - More than 128 keys take two rounds past the same queries. What the first round has of :math:`dQ` waits in shared
#   memory, in float32, and the second starts from it. For 256 queries that is 64 KiB, and the end of the room.
#
# The sweep has 65536 positions in 8 heads, with head dimension 64 and no mask. What counts is the bytes of each input
# and output, once: four matrices forward, eight backward.


def short_sequences(direction, name):
    return tg.benchmark.perf_report(
        triton.testing.Benchmark(
            x_names=["seq_len"],
            x_vals=[16, 32, 49, 64, 77, 100, 128, 160, 197, 256],
            x_log=True,
            line_arg="provider",
            line_vals=["triton_gallery", *BACKENDS],
            line_names=["triton_gallery", *BACKENDS],
            xlabel="sequence length",
            ylabel="GB/s",
            plot_name=f"attention-{direction}-short-fp16",
            args={"direction": direction},
        ),
        title=f"Attention {name} of short sequences, float16",
        limit="copy",
    )(bench_short)


def bench_short(seq_len, direction, provider):
    shape = (65536 // seq_len, 8, seq_len, 64)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.float16, requires_grad=direction == "bwd") for _ in "qkv")
    if provider == "triton_gallery":
        attention, backend = tg.attention, contextlib.nullcontext()
    else:
        attention = torch.nn.functional.scaled_dot_product_attention
        backend = torch.nn.attention.sdpa_kernel(BACKENDS[provider])
    with backend:
        if direction == "fwd":
            return tg.benchmark.gbps(4 * q.nbytes, tg.benchmark.measure(lambda: attention(q, k, v)))
        out, dout = attention(q, k, v), torch.randn(shape, device=DEVICE, dtype=torch.float16)
    times = tg.benchmark.measure(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    return tg.benchmark.gbps(8 * q.nbytes, times)


report_short = short_sequences("fwd", "forward").run()
report_short.plot()

# %%

report_short

# %%

report_short_bwd = short_sequences("bwd", "backward").run()
report_short_bwd.plot()

# %%

report_short_bwd

# %%
# Forward, our rate over cuDNN's is :measured:`attention-fwd-short-fp16: triton_gallery / cuDNN at 16` with 16
# positions, :measured:`attention-fwd-short-fp16: triton_gallery / cuDNN at 64` with 64,
# :measured:`attention-fwd-short-fp16: triton_gallery / cuDNN at 77` with 77, :measured:`attention-fwd-short-fp16:
# triton_gallery / cuDNN at 160` with 160 and :measured:`attention-fwd-short-fp16: triton_gallery / cuDNN at 256` with
# 256. With 16, three quarters of the tile's rows are empty, and we are at :measured:`attention-fwd-short-fp16:
# triton_gallery / limit at 16` of the limit; with 64 at :measured:`attention-fwd-short-fp16: triton_gallery / limit at
# 64`. With 128 a head is a single full tile of queries and one of keys, so that a consumer has nothing to do under its
# products. There we are at :measured:`attention-fwd-short-fp16: triton_gallery / cuDNN at 128` of cuDNN and
# :measured:`attention-fwd-short-fp16: triton_gallery / limit at 128` of the limit. We are furthest from it with 197, at
# :measured:`attention-fwd-short-fp16: triton_gallery / limit at 197`; and with 256, where no row is empty, we are at
# :measured:`attention-fwd-short-fp16: triton_gallery / limit at 256`. Why, we have not measured.
#
# Backward, the kernel that walks nowhere runs at :measured:`attention-bwd-short-fp16: triton_gallery / cuDNN at 16` and
# :measured:`attention-bwd-short-fp16: triton_gallery / cuDNN at 32` cuDNN's rate with 16 and 32 positions, and at
# :measured:`attention-bwd-short-fp16: triton_gallery / limit at 16` of the limit with 16. (The tile is full in both
# cases.) From 49 on it is the kernel with all keys of a head: :measured:`attention-bwd-short-fp16: triton_gallery /
# cuDNN at 49` with 49, :measured:`attention-bwd-short-fp16: triton_gallery / cuDNN at 77` with 77,
# :measured:`attention-bwd-short-fp16: triton_gallery / cuDNN at 128` with 128, :measured:`attention-bwd-short-fp16:
# triton_gallery / cuDNN at 197` with 197 and :measured:`attention-bwd-short-fp16: triton_gallery / cuDNN at 256` with
# 256. It is nearest to the limit where both consumers have 64 keys and one round suffices, with 128 positions:
# :measured:`attention-bwd-short-fp16: triton_gallery / limit at 128`. Furthest from it are 197, as in the forward pass:
# :measured:`attention-bwd-short-fp16: triton_gallery / limit at 197`.

# %%
# Right of the ridge, thanks to what is not written
# -------------------------------------------------
#
# At the top of the page we counted :math:`S / 2` operations per byte for the forward pass without scores in memory. The
# backward pass has :math:`10 S^2 D` operations. It reads :math:`Q`, :math:`K`, :math:`V`, :math:`O` and :math:`dO`, and
# writes three gradients: eight matrices of :math:`S D` numbers, which makes :math:`10 S^2 D / 16 S D = 5 S / 8`.

report = reports["fwd", 128, False]
forward, backward = (reports[direction, 128, False].series("triton_gallery") for direction in ("fwd", "bwd"))
points = {f"forward, S = {S}": (S / 2, forward[S]) for S in (512, 2048, 16384)}
points |= {f"backward, S = {S}": (5 * S / 8, backward[S]) for S in (512, 2048, 16384)}
tg.benchmark.roofline(report, points, title="Attention, head dimension 128, float16")

# %%
# All points are to the right of the ridge, where slope and flat part meet, and the shortest forward pass is nearest to
# it: there the matrix unit sets the limit. With the scores in memory forward passes would be at 64 operations per byte
# at best, however long the sequence, and backward passes, which find :math:`P` in memory and need four products, with
# seven trips of :math:`S^2` numbers, at :math:`8 S^2 D / 14 S^2`, some 73: on the slope, where the roof itself is lower
# than what long sequences reach here.

# %%
# What the compiler made of it
# ----------------------------
#
# The forward pass for four GPUs. The accumulator, the scores and the statistics of a tile have to fit into registers
# (on Blackwell the sums of products have a memory of their own), while shared memory holds the queries and the tiles of
# keys and values that are on their way.

q_meta, k_meta, v_meta = torch.empty(3, 1, 16, 4096, 128, dtype=torch.float16, device="meta")
tg.codegen.inspect(tg.attention, q_meta, k_meta, v_meta, is_causal=True)

# %%
# On sm_90 the row is that of the Gluon kernel: its warps include the producer's, its loads are TMA copies, and its
# products are `wgmma`, which a whole group of warps issues together. (It has two stages; the column shows what the
# launch asks for.) The other rows are the kernel quoted above: `mma` on Ampere's matrix units, `tcgen05` on
# Blackwell's, `mfma` on AMD's.
#
# The machine code of this kernel is long, so its listing ends with TTGIR. A layout says which thread holds
# what. The two `tl.dot` of the loop leave their sums in the layout `#mma`; on the way from one to the other, the
# probabilities change theirs by `ttg.convert_layout`, an exchange between threads wherever one does not hold what the
# next product expects of it.

tg.codegen.listing(tg.attention, q_meta, k_meta, v_meta, is_causal=True, target="sm_80", stages=("ttir", "ttgir"))

# %%
# What we saw
# -----------

print(reports["fwd", 128, False].summary())
print(reports["fwd", 128, True].summary())
print(decode_report.summary())
print(prompt_report.summary())
print(report_short.summary())
print(report_short_bwd.summary())

# %%
# What follows is about an H200. A part of the curves' shape can be told beforehand. Without a mask, the arithmetic is
# the same for each pair of query and key, so the curve should be nearly flat. What bends it at the left, we think, is
# the fixed cost of a tile, its loads at the start and its stores at the end, which a short walk pays for more often. At
# 16384 positions all our curves of these sweeps without a mask are below their best, and so are cuDNN's of the forward
# pass. With head dimension 64 ours of the forward pass comes to :measured:`attention-fwd-d64-fp16: triton_gallery at
# 16384` after :measured:`attention-fwd-d64-fp16: triton_gallery at best`, with 128 to
# :measured:`attention-fwd-d128-fp16: triton_gallery at 16384` after :measured:`attention-fwd-d128-fp16: triton_gallery
# at best`, and there cuDNN's to :measured:`attention-fwd-d128-fp16: cuDNN at 16384` after
# :measured:`attention-fwd-d128-fp16: cuDNN at best`. In the sweep of the versions, by the same calls, the two have
# :measured:`attention-ladder-fp16: triton_gallery at 16384` and :measured:`attention-ladder-fp16: cuDNN at 16384` at
# this length, and both are less far below their best there. Our rate over cuDNN's is
# :measured:`attention-fwd-d128-fp16: triton_gallery / cuDNN at 16384` in one sweep and
# :measured:`attention-ladder-fp16: triton_gallery / cuDNN at 16384` in the other. We think that the fall is the clock
# of a GPU at the limit of its power; we have not measured it.
#
# Under a causal mask half of each tile on the diagonal counts in our figures. The backward pass computes these tiles in
# full. With :math:`n` tiles on each side, :math:`n (n + 1) / 2` tiles are computed for :math:`n^2 / 2` that count, a
# surplus of :math:`1 / n`. The forward pass with head dimension 128 leaves out the quarter of such a tile that its
# upper 64 queries do not see, and has half the surplus:

for seq_len in (512, 1024, 4096, 16384):
    surplus = 128 / seq_len
    print(f"{seq_len:5} positions: {surplus:5.1%} more than is credited, forward {surplus / 2:5.1%}")

# %%
# So every causal curve begins low, and lower than that: walks are half as long, too, and we think that what a tile
# costs at its start and its end weighs more. At 16384 positions nothing of the difference is left. It has even turned,
# in all four pairs of curves: with head dimension 128 the backward pass reaches
# :measured:`attention-bwd-d128-causal-fp16: triton_gallery at 16384` with a mask and
# :measured:`attention-bwd-d128-fp16: triton_gallery at 16384` without, the forward pass
# :measured:`attention-fwd-d128-causal-fp16: triton_gallery at 16384` and :measured:`attention-fwd-d128-fp16:
# triton_gallery at 16384`, and with 64 the backward pass :measured:`attention-bwd-d64-causal-fp16: triton_gallery at
# 16384` and :measured:`attention-bwd-d64-fp16: triton_gallery at 16384`, the forward pass
# :measured:`attention-fwd-d64-causal-fp16: triton_gallery at 16384` and :measured:`attention-fwd-d64-fp16:
# triton_gallery at 16384`; why, we have not measured. Our rate over cuDNN's is
#
# - forward with head dimension 128 and 4096 positions :measured:`attention-fwd-d128-fp16: triton_gallery / cuDNN at
#   4096` without a mask and :measured:`attention-fwd-d128-causal-fp16: triton_gallery / cuDNN at 4096` with one
# - forward, the lowest of each sweep: with head dimension 64 :measured:`attention-fwd-d64-fp16: triton_gallery / cuDNN
#   at worst` without a mask and :measured:`attention-fwd-d64-causal-fp16: triton_gallery / cuDNN at worst` with one;
#   with 128 :measured:`attention-fwd-d128-fp16: triton_gallery / cuDNN at worst` without and
#   :measured:`attention-fwd-d128-causal-fp16: triton_gallery / cuDNN at worst` with one
# - backward with a mask, where the longest tiles are handed out first, at worst
#   :measured:`attention-bwd-d128-causal-fp16: triton_gallery / cuDNN at worst` with head dimension 128 and
#   :measured:`attention-bwd-d64-causal-fp16: triton_gallery / cuDNN at worst` with 64
# - backward without a mask from :measured:`attention-bwd-d128-fp16: triton_gallery / cuDNN at worst` to
#   :measured:`attention-bwd-d128-fp16: triton_gallery / cuDNN at best` with head dimension 128, and from
#   :measured:`attention-bwd-d64-fp16: triton_gallery / cuDNN at worst` to :measured:`attention-bwd-d64-fp16:
#   triton_gallery / cuDNN at best` with 64
#
# With head dimensions of 80, 96, 160 and 192, whose products have two parts, the forward pass is at
# :measured:`attention-fwd-head-dims-fp16: triton_gallery / cuDNN at 80`,
# :measured:`attention-fwd-head-dims-fp16: triton_gallery / cuDNN at 96`,
# :measured:`attention-fwd-head-dims-fp16: triton_gallery / cuDNN at 160` and
# :measured:`attention-fwd-head-dims-fp16: triton_gallery / cuDNN at 192` cuDNN's, with 256 at
# :measured:`attention-fwd-head-dims-fp16: triton_gallery / cuDNN at 256`. From 160 on there is no room for tiles of 128
# keys, and these have 64. The backward passes with 160, 192 and 256 are at
# :measured:`attention-bwd-head-dims-fp16: triton_gallery / cuDNN at 160`,
# :measured:`attention-bwd-head-dims-fp16: triton_gallery / cuDNN at 192` and
# :measured:`attention-bwd-head-dims-fp16: triton_gallery / cuDNN at 256`: seven products instead of five, but no sums
# in memory.
#
# Latent attention has room for 128 keys. With 4096 positions its forward pass runs at
# :measured:`attention-fwd-latent-fp16: triton_gallery / cuDNN at 4096` cuDNN's. Its backward pass runs at
# :measured:`attention-bwd-latent-fp16: triton_gallery / cuDNN at 4096`, at worst at
# :measured:`attention-bwd-latent-fp16: triton_gallery / cuDNN at worst`. cuDNN's is much quicker there than with 192
# numbers throughout, and ours is not.
#
# In the deterministic mode seven products take the place of five where the head dimension is 128. It reaches
# :measured:`attention-bwd-deterministic-fp16: triton_gallery deterministic / triton_gallery at 4096` the rate of the
# default with 4096 positions, at worst :measured:`attention-bwd-deterministic-fp16: triton_gallery deterministic /
# triton_gallery at worst`, and with 4096 positions :measured:`attention-bwd-deterministic-fp16: triton_gallery
# deterministic / cuDNN at 4096` the rate of cuDNN in its default mode, at worst
# :measured:`attention-bwd-deterministic-fp16: triton_gallery deterministic / cuDNN at worst`. With 512 positions
# the deterministic mode is quicker than our default, at :measured:`attention-bwd-deterministic-fp16: triton_gallery
# deterministic / triton_gallery at 512` of its rate; from 1024 on the default is quicker. (The summary below has the
# ratios of this default to all others, also to the deterministic ones.)
#
# With a window of 1024 keys we are at :measured:`attention-window-fp16: triton_gallery / FlexAttention at 1024`
# FlexAttention's rate.
#
# In float32 a product of tiles is six of bfloat16. The forward pass runs at :measured:`attention-fwd-causal-fp32:
# triton_gallery / torch at worst` to :measured:`attention-fwd-causal-fp32: triton_gallery / torch at best` the rate of
# torch's own kernel, and the backward pass at :measured:`attention-bwd-causal-fp32: triton_gallery / torch at worst` to
# :measured:`attention-bwd-causal-fp32: triton_gallery / torch at best`. The longer the sequence, the less the cutting
# takes, which grows with it, beside products that grow with its square. By head dimension, forward it is
# :measured:`attention-fwd-head-dims-fp32: triton_gallery / torch at worst` to :measured:`attention-fwd-head-dims-fp32:
# triton_gallery / torch at best`, and backward :measured:`attention-bwd-head-dims-fp32: triton_gallery / torch at
# worst` to :measured:`attention-bwd-head-dims-fp32: triton_gallery / torch at best`. The backward pass counts five
# products and makes seven, or eight beyond 128 columns, which alone would leave it five sevenths or five eighths of the
# forward pass's rate. Up to 192 columns it has more, with 256 less. (The forward pass may spend longer on its
# exponentials, and on rescaling its sums; that has not been measured.) In two parts 96 columns are computed as 128.
# torch's curve is that of the setting it begins with. (In "high" its kernel kept its rate when we tried; no record
# holds that.) In "high" we are forward at :measured:`attention-fwd-head-dims-fp32: triton_gallery, high / torch at
# worst` to :measured:`attention-fwd-head-dims-fp32: triton_gallery, high / torch at best` of it, backward at
# :measured:`attention-bwd-head-dims-fp32: triton_gallery, high / torch at worst` to
# :measured:`attention-bwd-head-dims-fp32: triton_gallery, high / torch at best`.
#
# Below about a hundred positions, or under a causal mask about two hundred, cutting does not pay; for wide rows the
# bound is lower. There, and where queries are few, `_attention_fwd_kernel` and its companions cut what they have
# loaded, in small tiles, again for each tile.
#
# In 16 bits the limit is a hard one: a matrix product has no exponentials to wait for. Head dimension 64 has twice as
# many of them for the same operations, which should keep its curves further from the limit. The backward pass has five
# products for each exponential where the forward pass has two. But it has more tiles to keep at a time, in registers
# and shared memory, and :math:`dQ` has to travel to memory and back.
#
# What holds the forward pass back at head dimension 64? On an H200, with 2048 positions and no mask, we once let the
# kernel read the multiprocessor's clock. For 64 queries and 128 keys a consumer needs some 2640 cycles. Three of them
# are at work, so such a tile takes 880. The products need 512 of these, and the exponentials as many: neither unit is
# full. The consumers hardly ever wait for their turn, nor long for keys. What takes the time is their own instructions,
# one after the other. For about 420 cycles a consumer hands products to the matrix unit (the last are then still at
# work), and most of the rest is the softmax: five instructions for each score, and each of the four schedulers has only
# three warps to choose the next one from. Nothing of it decides alone. Without its exponentials the kernel took about a
# twentieth less time, without the maximum and what follows from it a thirteenth, without :math:`P V` a seventh, and
# without any softmax not quite a quarter. And what might have helped did not. A fourth consumer leaves registers for
# only 64 keys at a time. A second tile of scores, computed ahead, leaves registers for only two consumers. To rescale
# only where the maximum has grown by much costs a branch. All were slower or no faster. (No record holds these.)
#
# These are the other sweeps:

for sweep_of, report in reports.items():
    if sweep_of not in (("fwd", 128, False), ("fwd", 128, True)):
        print(report.summary())
for report in (
    report_head_dims,
    report_head_dims_bwd,
    report_latent,
    report_latent_bwd,
    report_grouped,
    report_grouped_bwd,
    report_deterministic,
    report_window,
    report_window_bwd,
    report_fp32,
    report_fp32_bwd,
    report_fp32_head_dims,
    report_fp32_head_dims_bwd,
):
    print(report.summary())

# %%
# Break it: a first tile with nothing in it
# -----------------------------------------
#
# Here is `tiled_attention` with a mask. It begins, as in the derivation, at a maximum of :math:`-\infty`, and we try it
# on a causal mask and on a causal mask with a window.


def masked_attention(q, k, v, allowed, first_max=-math.inf, fill=-math.inf, block=32):
    row_max = q.new_full((len(q), 1), first_max)
    row_sum, acc = torch.zeros_like(row_max), torch.zeros_like(q)
    for k_tile, v_tile, allowed_tile in zip(k.split(block), v.split(block), allowed.split(block, dim=1), strict=True):
        s = torch.where(allowed_tile, q @ k_tile.T * q.shape[-1] ** -0.5, fill)
        new_max = torch.maximum(row_max, s.amax(dim=1, keepdim=True))
        p = torch.exp(s - new_max)
        rescale = torch.exp(row_max - new_max)
        row_sum = row_sum * rescale + p.sum(dim=1, keepdim=True)
        acc = acc * rescale + p @ v_tile
        row_max = new_max
    return acc / row_sum


def check(attention, allowed):
    s = (q1 @ k1.T * q1.shape[-1] ** -0.5).masked_fill(~allowed, -math.inf)
    expected = torch.softmax(s, dim=1).nan_to_num(0) @ v1  # a query with no key at all: 0
    try:
        torch.testing.assert_close(attention, expected, rtol=1e-4, atol=1e-4)
        print("passed")
    except AssertionError as error:
        print(f"{attention.isnan().sum()} of {attention.numel()} numbers are NaN;", *str(error).splitlines()[2:4])


q1, k1, v1 = q[0, 0], k[0, 0, :113], v[0, 0, :113]
causal = torch.ones(113, 113, dtype=torch.bool, device=DEVICE).tril()
window = causal.triu(-16)  # and the 16 keys before its own
check(masked_attention(q1, k1, v1, causal), causal)
check(masked_attention(q1, k1, v1, window), window)

# %%
# A causal mask passes, and that is the trap: every query sees key 0, so its first tile is never empty. With a window,
# query 100 sees nothing in the tile of keys 0 to 31. Its maximum remains :math:`-\infty`, and
# :math:`-\infty - (-\infty)` is NaN, in `p` as in `rescale`. No later tile heals a NaN. Skipping tiles does not save
# us, either: a program begins at the first tile that *some* query of its own needs, and for its last query that tile
# may be empty.
#
# The remedy of the shipped kernel is a finite start. Then an empty tile gives :math:`e^{-\infty} = 0`, and the first
# real score rescales by 0 what was 0 already.

lowest = torch.finfo(torch.float32).min
check(masked_attention(q1, k1, v1, window, first_max=lowest), window)

# %%
# Another popular remedy is to fill with a large negative number, and not with :math:`-\infty`. It passes, too, until a
# query has no key at all: 113 queries, 90 keys, the last query at the last key.

check(masked_attention(q1, k1, v1, window, fill=-1e6), window)
k1, v1 = k1[:90], v1[:90]
late = torch.ones(113, 90, dtype=torch.bool, device=DEVICE).tril(90 - 113)
out = masked_attention(q1, k1, v1, late, first_max=lowest, fill=-1e6)
check(out, late)
print("query 0 got the mean of all values:", torch.allclose(out[0], v1.mean(dim=0), rtol=1e-4, atol=1e-5))

# %%
# All scores of that query are equal, and the softmax of equal numbers is uniform. The result is finite and plausible
# and mixes in every value that the mask should have hidden. With :math:`-\infty` instead, the sum is 0, and the
# division gives NaN, unless the code checks for it, as the kernel does with `empty`. So a test of masks needs a window
# and a query without keys. The library passes both:

late_out = tg.attention(q1[None], k1[None], v1[None], is_causal=True, causal_alignment="bottom-right")[0]
check(late_out, late)
k1, v1 = k[0, 0, :113], v[0, 0, :113]
check(tg.attention(q1[None], k1[None], v1[None], is_causal=True, window=16)[0], window)

# %%
# Exercises
# ---------
#
# 1. `_attention_join_kernel` joins splits by their maxima and sums or, where each split is an attention of its own, by
#    their results and logsumexps. Show the latter in PyTorch, with `tg.attention(..., return_lse=True)` on two
#    halves of the keys. (Hint: the results are averaged, with the softmax of their logsumexps as weights.)
# 2. What if `start` in `_attention_fwd_kernel` counted from the beginning? Suppose four multiprocessors, eight tiles of
#    queries under a causal mask, and for each tile of queries as many units of time as it has tiles of keys. Draw who
#    works on what, in both orders, on paper or in Python. The work is the same; how long does each order take?
# 3. Give the loops in PyTorch a bias of :math:`-\beta (i - j)` on the scores, for causal masks, as the ALiBi method has
#    it. Which line changes? The backward pass needs that line, too. Why does nothing else in it change, and why is
#    :math:`\delta` the same as before? What would the kernels need?
# 4. Write a kernel for :math:`dQ`, in the manner of `small_attention_kernel` and with its helpers: a program owns a
#    tile of queries, has their :math:`L` and :math:`\delta`, and walks the keys. (Hint: `p_and_ds` and the last loop of
#    `tiled_backward` are the plan. How many running values does the loop carry now?)

# %%
# Solutions
# ---------
#
# They run when this page is built, and each of them checks itself.
#
# Solution 1: a long cache in two parts
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Each part gives an average of its values and the logarithm of the weight that this average has. The softmax of the
# logarithms turns them into shares.

q_new, k_cache, v_cache = (torch.randn(2, 3, length, 40, device=DEVICE) for length in (1, 500, 500))
outs, lses = zip(
    *(
        tg.attention(q_new, k_part, v_part, return_lse=True)
        for k_part, v_part in zip(k_cache.chunk(2, dim=2), v_cache.chunk(2, dim=2), strict=True)
    ),
    strict=True,
)
shares = torch.softmax(torch.stack(lses), dim=0)
joined = (shares[..., None] * torch.stack(outs)).sum(dim=0)
torch.testing.assert_close(joined, tg.attention(q_new, k_cache, v_cache), rtol=1e-4, atol=1e-4)

# %%
# Solution 2: long tiles first
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Tile :math:`i` of eight takes :math:`i + 1` units of time. Whoever is free takes the next one from the list.


def work_off(lengths, n_workers=4):
    """When each worker is done, and a picture: a row for each worker, a letter for each unit of time."""
    free, rows = [0] * n_workers, [""] * n_workers
    for letter, length in zip("abcdefgh", lengths, strict=True):
        worker = free.index(min(free))
        free[worker] += length
        rows[worker] += letter * length
    return max(free), rows


short_first, long_first = work_off(range(1, 9)), work_off(range(8, 0, -1))
for name, (end, rows) in {"short tiles first": short_first, "long tiles first": long_first}.items():
    print(f"{name}: {end} units", *rows, sep="\n  ")
assert (short_first[0], long_first[0]) == (12, 9) and sum(range(1, 9)) == 4 * 9

# %%
# Solution 3: a bias that falls with the distance
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# One line changes: the one that makes `s`. (In the kernels, full tiles need the columns as well, or the rows in the
# kernel for :math:`dK` and :math:`dV`, which are now computed for masked ones only. The scale is applied later, so the
# bias has to be divided by it, and in the kernel for :math:`dK` and :math:`dV` it has to be transposed.) The backward
# pass makes `s` again and needs that line for the same probabilities. The bias depends on no input, so :math:`\partial
# s / \partial q` and everything behind it is as before; and :math:`\delta_i = dO_i \cdot O_i` follows from :math:`O = P
# V` alone, whatever :math:`P` was made of. Here are the loops of this page with the line, against autograd. Forward,
# the loop now counts its keys and has the causal mask; backward, one walk does for two, since nobody has to own a tile.


def biased_scores(q, k, first_key, beta):
    i, j = torch.arange(len(q), device=q.device)[:, None], first_key + torch.arange(len(k), device=q.device)
    s = q @ k.T * q.shape[-1] ** -0.5 - beta * (i - j)  # the line
    return s.masked_fill(j > i, -math.inf)


def biased_attention(q, k, v, beta, block=32):
    row_max, row_sum = q.new_full((len(q), 1), torch.finfo(q.dtype).min), q.new_zeros(len(q), 1)
    acc = torch.zeros_like(q)
    for first in range(0, len(k), block):
        s = biased_scores(q, k[first : first + block], first, beta)
        new_max = torch.maximum(row_max, s.amax(dim=1, keepdim=True))
        p, rescale = torch.exp(s - new_max), torch.exp(row_max - new_max)
        row_sum, acc, row_max = (
            row_sum * rescale + p.sum(1, keepdim=True),
            acc * rescale + p @ v[first:][:block],
            new_max,
        )
    return acc / row_sum, row_max + torch.log(row_sum)


def biased_backward(q, k, v, out, lse, dout, beta, block=32):
    delta, dq, dk, dv = (dout * out).sum(dim=1, keepdim=True), *map(torch.zeros_like, (q, k, v))
    for first in range(0, len(k), block):
        keys = slice(first, first + block)
        p = torch.exp(biased_scores(q, k[keys], first, beta) - lse)
        ds = p * (dout @ v[keys].T - delta) * q.shape[-1] ** -0.5
        dv[keys], dk[keys] = p.T @ dout, ds.T @ q
        dq += ds @ k[keys]
    return dq, dk, dv


leaves = [torch.randn(113, 40, device=DEVICE, requires_grad=True) for _ in range(3)]
dout = torch.randn(113, 40, device=DEVICE)
expected = torch.softmax(biased_scores(leaves[0], leaves[1], 0, beta=0.1), dim=1) @ leaves[2]
with torch.no_grad():
    out, lse = biased_attention(*leaves, beta=0.1)
    gradients = biased_backward(*leaves, out, lse, dout, beta=0.1)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, dout), rtol=1e-4, atol=1e-4)

# %%
# Solution 4: a kernel for dQ
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# One value runs along, the sum itself. :math:`L` knows the whole row already, so nothing is rescaled and nothing
# divided. Keys past the end are masked as before. It looks as if their rows of zeros could add nothing, but their score
# of 0 may lie so far above :math:`L` that the exponential is infinite, and infinity times 0 is NaN.


@triton.jit
def small_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, seq_len, head_dim, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * seq_len
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + head * head_dim, rows, seq_len, head_dim, BLOCK_D)
    dout = load_rows(dout_ptr + head * head_dim, rows, seq_len, head_dim, BLOCK_D)
    lse = tl.load(lse_ptr + head + rows, mask=rows < seq_len, other=0.0)
    delta = tl.load(delta_ptr + head + rows, mask=rows < seq_len, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, seq_len, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr + head * head_dim, keys, seq_len, head_dim, BLOCK_D)
        v = load_rows(v_ptr + head * head_dim, keys, seq_len, head_dim, BLOCK_D)
        p = tl.exp(tl.dot(q, k.T, input_precision="ieee") * scale - lse[:, None])
        p = tl.where(keys[None, :] < seq_len, p, 0.0)
        ds = p * (tl.dot(dout, v.T, input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_rows(dq_ptr + head * head_dim, dq * scale, rows, seq_len, head_dim, BLOCK_D)


q, k, v, dout = torch.randn(4, 2, 113, 40, device=DEVICE).unbind()
out, lse = small_attention(q, k, v)
delta, dq = (dout * out).sum(dim=-1), torch.empty_like(q)
sizes, blocks = (113, 40, 40**-0.5), dict(BLOCK_M=32, BLOCK_N=32, BLOCK_D=64)
small_dq_kernel[triton.cdiv(113, 32), 2](q, k, v, dout, lse, delta, dq, *sizes, **blocks)
torch.testing.assert_close(dq, gradients_of(materialised_attention, q, k, v, dout)[0], rtol=1e-4, atol=1e-4)

# %%
# References
# ----------
#
# The guide's chapter *Related work* lists these works among its own.
#
# - :cite:`vaswani2017attention`: the formula.
# - :cite:`milakov2018online`: changing the reference of a sum.
# - :cite:`rabe2021memory`: attention without the matrix of scores.
# - :cite:`dao2022flash`: the same, tile by tile on one chip, with the backward pass.
# - :cite:`dao2023flash2`: one program for each tile of queries, and fewer operations that are no products.
# - :cite:`deepseek2024v2`: latent attention, with keys longer than values.
# - :cite:`press2022alibi`: the bias of the third exercise.
# - :cite:`shah2024flash3`: producers, consumers, and softmax under products on Hopper.

# %%
# Where this page ran
# -------------------

print(tg.benchmark.environment())

# sphinx_gallery_thumbnail_number = 4
