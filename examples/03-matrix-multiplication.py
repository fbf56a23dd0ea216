"""
Matrix multiplication
=====================

We multiply matrices tile by tile, choose the order of the tiles, and add a bias and an activation on the way out.

You will learn:

- why a matrix product can be limited by arithmetic where an addition is limited by memory
- what a tile buys, and how large it has to be
- why the order in which tiles are computed decides what the L2 cache is good for
- how to fuse a bias and an activation, and what that saves
"""

# %%
# The same start as on every page
# -------------------------------

import torch
import triton_gallery as tg  # before triton: without a GPU it switches the interpreter on
import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

# %%
# A product has work to share
# ---------------------------
#
# For :math:`A` of shape :math:`M \times K` and :math:`B` of shape :math:`K \times N` we want
#
# .. math:: C_{mn} = \sum_{k=0}^{K-1} A_{mk} B_{kn}
#
# Let us count. Each of the :math:`M N` results takes :math:`K` multiplications and :math:`K` additions. Each number of
# the three matrices has to cross the memory bus once, at :math:`s` bytes:
#
# .. math::
#    \text{operations} = 2 M N K \qquad \text{bytes} \ge s \, (M K + K N + M N)
#
# The quotient of the two is the *arithmetic intensity*, in operations per byte. An addition of two vectors has an
# intensity of 1/12 in float32, whatever the length. A product of square matrices has :math:`2 n^3 / (3 s n^2)`, which
# grows with :math:`n`:

for n in (64, 256, 1024, 4096):
    print(f"{n:5}³: {2 * n**3 / (3 * 2 * n * n):7.1f} operations per byte in float16")

# %%
# A GPU has such a quotient, too: its peak rate of arithmetic divided by its bandwidth. With the matrix units of today
# it is a hundred to several hundred operations per byte. Here it is for the GPU of our records, from the rates of a
# large product and of a large copy:

product, copy = (tg.benchmark.load(name).record for name in ("matmul-fp16", "matmul-thin-fp16"))
assert product["gpu"] == copy["gpu"]
quotient = 1000 * product["limit"]["value"] / copy["limit"]["value"]  # TFLOP/s over GB/s
print(f"{product['gpu']}: {quotient:.0f} operations per byte in float16")

# %%
# At a lower intensity memory sets the time, and at a higher one arithmetic does. The *roofline* is this sentence as a
# formula:
#
# .. math:: \text{rate} \le \min(\text{peak}, \ \text{intensity} \times \text{bandwidth})
#
# The intensity at which the two are equal is the *ridge*.
#
# So a product of large matrices *can* run at the peak. It does so if the bytes really cross the bus about once, and
# this is what the page is about. The formula :math:`C_{mn}` taken at its word reads a row of :math:`A` and a column of
# :math:`B` for each result: :math:`2 K s` bytes for :math:`2 K` operations, an intensity of :math:`1 / s`: half an
# operation per byte in float16.

# %%
# A tile pays for its rows and columns once
# -----------------------------------------
#
# The way out is to compute many results from the same rows and columns. A *tile* of :math:`B_M \times B_N` results
# needs :math:`B_M` rows of :math:`A` and :math:`B_N` columns of :math:`B`:
#
# .. math::
#    \text{intensity} = \frac{2 B_M B_N K}{s \, (B_M + B_N) \, K} = \frac{2}{s} \cdot \frac{B_M B_N}{B_M + B_N}
#
# It grows with the side of the tile, and :math:`K` cancels: the rows and columns may be as long as they like.

for block_m, block_n in ((1, 1), (16, 16), (64, 64), (128, 128), (128, 256)):
    intensity = 2 / 2 * block_m * block_n / (block_m + block_n)
    print(f"tile {block_m:3} × {block_n:3}: {intensity:5.1f} operations per byte in float16")

# %%
# The rows and columns do not fit on the chip, and need not: we walk along :math:`K` in steps and add up. Only the sums
# stay, in registers, until the tile is done. In Python:


def matmul_in_tiles(a, b, block_m, block_n, block_k):
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    for m in range(0, M, block_m):  # on the GPU, these two loops are the launch grid
        for n in range(0, N, block_n):
            acc = 0
            for k in range(0, K, block_k):
                acc = acc + a[m : m + block_m, k : k + block_k] @ b[k : k + block_k, n : n + block_n]
            out[m : m + block_m, n : n + block_n] = acc
    return out


a, b = torch.randn(30, 50, device=DEVICE), torch.randn(50, 20, device=DEVICE)
torch.testing.assert_close(matmul_in_tiles(a, b, 16, 16, 32), a @ b)

# %%
# First rung: one tile, all of K at once
# --------------------------------------
#
# We climb to the library's kernel in three steps; two more, further down, are for Hopper alone. The first one has no
# loop at all. A program loads its rows and its columns whole and multiplies them with `tl.dot`, which is what reaches
# the matrix unit. Their common side has to be at least 16 long (which a GPU's compiler demands, and the interpreter
# does not), and the sums come out in float32. (Our tiles are of float16. Of float32 numbers NVIDIA's matrix unit would
# read 10 of the 23 bits behind the point, unless we told `tl.dot` to take `input_precision="ieee"`; the interpreter
# always takes all.) Two blocks of indices, one turned into a column by `[:, None]` and one into a row by `[None, :]`,
# make a two-dimensional block of addresses: element :math:`(m, k)` of a matrix lies at its first element plus :math:`m`
# times the row stride plus :math:`k`.


@triton.jit
def whole_k_kernel(a_ptr, b_ptr, out_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)  # all of them: BLOCK_K >= K
    a_mask, b_mask = (rows[:, None] < M) & (ks[None, :] < K), (ks[:, None] < K) & (cols[None, :] < N)
    a = tl.load(a_ptr + rows[:, None] * K + ks[None, :], mask=a_mask, other=0.0)
    b = tl.load(b_ptr + ks[:, None] * N + cols[None, :], mask=b_mask, other=0.0)
    out_mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], tl.dot(a, b), mask=out_mask)


def whole_k_matmul(a, b):
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid, block_k = (triton.cdiv(M, 32), triton.cdiv(N, 32)), max(16, triton.next_power_of_2(K))
    whole_k_kernel[grid](a, b, out, M, N, K, BLOCK_M=32, BLOCK_N=32, BLOCK_K=block_k)
    return out


a, b = torch.randn(70, 50, device=DEVICE).half(), torch.randn(50, 90, device=DEVICE).half()
torch.testing.assert_close(whole_k_matmul(a, b), a @ b)

# %%
# Masked lanes reach the product, so `other=0.0` matters here: a zero adds nothing to a sum. The kernel is right, and it
# stops working at some :math:`K`. Blocks that are multiplied pass through shared memory, because each thread needs
# numbers that others have loaded, and at some length a program's rows and columns no longer fit there. It also compiles
# again for each power of two.

# %%
# Second rung: walk along K
# -------------------------
#
# With the loop from the Python version, the memory a program needs does not depend on :math:`K` any more. The blocks of
# addresses move on by one step each time. The sums are float32 although the inputs are float16: a sum of thousands of
# products needs the digits. They are rounded to float16 once, at the end; `tl.store` would do so even without `.to`, as
# it did in the first rung.


@triton.jit
def tiled_kernel(a_ptr, b_ptr, out_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)  # row by row: tile i is in row i // tiles_n
    cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * K + ks[None, :]
    b_ptrs = b_ptr + ks[:, None] * N + cols[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (ks[None, :] < K - k), other=0.0)
        b = tl.load(b_ptrs, mask=(ks[:, None] < K - k) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * N
    out_mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)


def tiled_matmul(a, b):
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, 32) * triton.cdiv(N, 32),)
    tiled_kernel[grid](a, b, out, M, N, K, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32)
    return out


torch.testing.assert_close(tiled_matmul(a, b), a @ b)

# %%
# `tg.trace` of page one shows what a single program does. Here is program 4 of a product with :math:`K = 96`, which is
# three steps. In each it loads a block of :math:`A` and one of :math:`B`; its tile it stores once, at the end.

import matplotlib.pyplot as plt
import numpy as np

matrices = torch.randn(64, 96, device=DEVICE).half(), torch.randn(96, 96, device=DEVICE).half()
out = torch.empty(64, 96, dtype=torch.float16, device=DEVICE)
trace = tg.trace(tiled_kernel, (6,), *matrices, out, 64, 96, 96, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32)
torch.testing.assert_close(out, matrices[0] @ matrices[1])

figure, axes = plt.subplots(1, 3, figsize=(8, 3), layout="constrained")
figure.suptitle("What program 4 of 6 touches: a strip of A, a strip of B, and one tile of the result")
panels = {
    "a_ptr": ("A", 64, "column k", "row m"),
    "b_ptr": ("B", 96, "column n", "row k"),
    "out_ptr": ("result", 64, "column n", "row m"),
}
for ax, (argument, (name, n_rows, across, down)) in zip(axes, panels.items(), strict=True):
    mine = [access for access in trace.accesses if access.argument == argument and access.program[0] == 4]
    for step, access in enumerate(mine):
        rows, cols = np.divmod(access.hits, 96)
        box = (cols.min(), rows.min()), np.ptp(cols) + 1, np.ptp(rows) + 1
        label, color = (f"step {step}", "#BBD9EC") if access.kind == "load" else ("tile", "#E69F00")
        ax.add_patch(plt.Rectangle(*box, facecolor=color, edgecolor="white"))
        ax.text(cols.mean() + 0.5, rows.mean() + 0.5, label, ha="center", va="center", color="black", fontsize="small")
    ax.set(title=name, xlabel=across, ylabel=down, xlim=(0, 96), ylim=(n_rows, 0), aspect="equal")
    ax.set(xticks=range(0, 97, 32), yticks=range(0, n_rows + 1, 32))
plt.show()

# %%
# The tile is 32 rows of :math:`A` times 32 columns of :math:`B`, and both are paid for once, for all its 1024 results.

# %%
# Programs are neighbours in time
# -------------------------------
#
# Even the largest tile of the list above stays below the intensity that a matrix unit asks of the memory. What closes
# the gap is the L2 cache. Two programs in the same row of tiles read the same rows of :math:`A`; if they run at the
# same time, the second one finds them in L2. As a rule programs start in the order of their numbers, as many at a time
# as the GPU has room for. Nothing promises it, so a result must never depend on it; but speed may. The map from number
# to tile decides what the running programs have in common, and we are free to choose it.
#
# Let us call what a tile needs of one matrix a *strip*: its rows of :math:`A`, or its columns of :math:`B`, as long as
# :math:`K`. The tiled kernel goes row by row. A *grouped* order goes down a few rows of tiles before it moves one
# column to the right. This is the map that the library uses:

# quote: triton_gallery.matmul._grouped_tile

# %%
# We count what each order needs, first for 12 × 12 tiles of which 16 are computed at a time. Every row of tiles among
# the 16 needs a strip of :math:`A`, and every column a strip of :math:`B`.


@triton.jit
def order_kernel(tile_m_ptr, tile_n_ptr, n, tiles_m, tiles_n, GROUP_M: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    # Lanes behind the last tile are masked below; until then they stand at the last one, and divide by no 0.
    tile_m, tile_n = _grouped_tile(tl.minimum(i, n - 1), tiles_m, tiles_n, GROUP_M)
    tl.store(tile_m_ptr + i, tile_m, mask=i < n)
    tl.store(tile_n_ptr + i, tile_n, mask=i < n)


def first_tiles(n, tiles_m, tiles_n, group):
    tile_m, tile_n = torch.empty(2, n, dtype=torch.int32, device=DEVICE)
    block = triton.next_power_of_2(n)
    order_kernel[(1,)](tile_m, tile_n, n, tiles_m, tiles_n, GROUP_M=group, BLOCK=block)
    return list(zip(tile_m.tolist(), tile_n.tolist(), strict=True))


def order(tiles_m, tiles_n, group):
    return first_tiles(tiles_m * tiles_n, tiles_m, tiles_n, group)


def strips(tiles):
    return len({m for m, _ in tiles}), len({n for _, n in tiles})


orders = {"row by row": order(12, 12, 1), "in groups of 4 rows": order(12, 12, 4)}
for name, tiles in orders.items():
    of_a, of_b = strips(tiles[:16])
    print(f"{name}: the first 16 tiles need {of_a} strips of A and {of_b} of B, {of_a + of_b} together")

# %%
# The closer the running tiles are to a square, the fewer strips they need, as with a single tile: the group is a tile
# of tiles, and L2 is its memory. The same count for a GPU that runs 264 programs, two on each of 132 multiprocessors,
# and a result of 128 × 128 tiles, in groups of 8 rows, as our kernel has them:

for group in (1, 8):
    of_a, of_b = strips(first_tiles(264, 128, 128, group))
    print(f"groups of {group}: {of_a} + {of_b} = {of_a + of_b} strips for 264 tiles")

# %%
# In our kernel the new order takes the place of the first three lines. The rest is as before:


@triton.jit
def grouped_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows, cols = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * K + ks[None, :]
    b_ptrs = b_ptr + ks[:, None] * N + cols[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (ks[None, :] < K - k), other=0.0)
        b = tl.load(b_ptrs, mask=(ks[:, None] < K - k) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * N
    out_mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)


# %%
# Which strips does a program load?
# ---------------------------------
#
# The count above trusted our formula. Now we let this kernel run and watch it. `tg.trace` of page one tells us,
# for each of 12 × 12 programs, the tile that it stores and the rows of :math:`A` and columns of :math:`B` that it loads
# for it. We do this for both orders.

a, b = torch.randn(192, 32, device=DEVICE).half(), torch.randn(32, 192, device=DEVICE).half()
traces = {}
for name, group in (("row by row", 1), ("in groups of 4 rows", 4)):
    out = torch.empty(192, 192, dtype=a.dtype, device=DEVICE)
    blocks = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=group)
    trace = tg.trace(grouped_kernel, (144,), a, b, out, 192, 192, 32, **blocks)
    torch.testing.assert_close(out, a @ b)
    traces[name] = trace


def fetched(trace, room=12):
    """How many strips the first 1, 2, 3, ... programs fetch, if a cache has room for the strips used last."""
    cache, n_fetched, history = [], 0, []
    for program in range(trace.n_programs):
        rows = np.flatnonzero(trace.load_counts("a_ptr", program).any(axis=1))
        cols = np.flatnonzero(trace.load_counts("b_ptr", program).any(axis=0))
        assert len(rows) == len(cols) == 16
        for strip in (("A", rows[0]), ("B", cols[0])):
            n_fetched += strip not in cache
            cache = [other for other in cache if other != strip][1 - room :]
            cache.append(strip)
        history.append(n_fetched)
    return history


# %%
# Each square of the picture is a tile, and its number that of the program that stored it; the 16 that come first are
# orange. Compare their outlines: a stripe and a bit in the one case, a square in the other. The curves beside them
# follow the programs one after another through a cache with room for 12 strips, half of what there is. They count the
# strips that have to come from memory.

figure, axes = plt.subplots(1, 3, figsize=(12, 4.6), layout="constrained", width_ratios=[1, 1, 0.9])
figure.suptitle("The order of 12 × 12 tiles, and the strips of A and B that have to come from memory")
styles = {"row by row": ("#0072B2", "--"), "in groups of 4 rows": ("#D55E00", "-")}
for (name, trace), plot in zip(traces.items(), axes, strict=False):
    owner = trace.owner("out_ptr")[::16, ::16]  # every element of a tile has the same owner
    assert (trace.owner("out_ptr") == np.kron(owner, np.ones((16, 16)))).all()
    for (m, n), i in np.ndenumerate(owner):
        assert orders[name][i] == (m, n)
        color = "#E69F00" if i < 16 else "#BBD9EC"
        plot.add_patch(plt.Rectangle((n, m), 1, 1, facecolor=color, edgecolor="white", linewidth=2))
        plot.text(n + 0.5, m + 0.5, str(i), ha="center", va="center", color="black", fontsize="x-small")
    plot.set(title=name, xlim=(0, 12), ylim=(12, 0), aspect="equal")
    plot.set(xlabel="column of tiles (strip of B)", ylabel="row of tiles (strip of A)")
    color, linestyle = styles[name]
    axes[2].plot(range(1, 145), fetched(trace), color=color, linestyle=linestyle, label=name)
axes[2].axhline(24, color="#555555", linestyle=":", linewidth=1.5, label="every strip once")
axes[2].set(title="with a cache for 12 strips", xlabel="programs that have run", ylabel="strips fetched", ylim=(0, 165))
axes[2].legend(loc="upper left")
plt.show()

for room in (8, 12, 14, 20):
    print(f"a cache for {room} strips:", {name: fetched(trace, room)[-1] for name, trace in traces.items()})

# %%
# The kernel does what the formula promised. Row by row, each tile fetches a strip of :math:`B`: when a row of tiles
# begins anew, its first strip has left the cache to make room for the last. In groups, four tiles use a strip of
# :math:`B` while it is there, and the four strips of :math:`A` never leave: :math:`A` is fetched once, and :math:`B`
# once by each of the three groups. That is twice as many strips as there are, against more than six times as many.
#
# But look at the larger caches. With room for 14, that is for all strips of a row of tiles and for two of :math:`A`,
# row by row fetches each strip once, and groups twice as many. With room for 20, both fetch each strip once. So groups
# are for matrices whose rows of tiles do not fit into the cache.

# %%
# The kernel that the library runs
# --------------------------------
#
# The third rung is the kernel that `triton_gallery.matmul` has for every GPU. It adds what a library needs: any
# strides, a batch, 64-bit offsets, a bias and an activation. The loop in its middle is still ours. Its helpers come
# first. One multiplies two tiles as `tl.dot` does, and float32 in a way of its own, which a later section explains.

from triton.language.extra.cuda import gdc_launch_dependents

# quote: triton_gallery._dot.three_bf16
# quote: triton_gallery._dot.dot
# quote: triton_gallery.matmul._activate
# quote: triton_gallery.matmul._wrapped
# quote: triton_gallery.matmul._matmul_kernel

# %%
# Here is a launch on two matrices, without the extras. One `None` is in the place of a bias, the other in that of a
# second output. Behind the sizes and the strides of both matrices stand the bias's stride, 0, and a batch of one
# matrix: its shape, `(1,)`, and the strides of :math:`A` and :math:`B` along it, `(0,)` each.


def my_matmul(a, b, tile=(64, 64, 32), group=8, num_warps=4):
    (M, K), N, (m, n, k) = a.shape, b.shape[1], tile
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, m) * triton.cdiv(N, n),)
    sizes, blocks = (M, N, K, *a.stride(), *b.stride()), dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group)
    options = dict(EVEN_K=K % k == 0, ALIGN_N=16 if N % 16 == 0 else 1, num_warps=num_warps)
    _matmul_kernel[grid](a, b, None, out, None, *sizes, 0, (1,), (0,), (0,), **blocks, **options)
    return out


# %%
# What the hard lines are for
# ---------------------------
#
# - The grid has two axes: along the first `tl.program_id` counts tiles, and along the second the matrices of the batch.
#   (The second ends at 65535. Batches of more matrices exchange the axes, which is what `MATRIX_AXIS` is for.) A batch
#   has any number of dimensions, each with its own stride, so `batch_shape` is a tuple: the loop over it is unrolled
#   when the kernel is compiled, as often as the tuple is long. A stride of 0 repeats a matrix without copying it.
# - `_wrapped(rows, M, ...)` replaces a mask. The last tiles reach past the end, and their surplus rows wrap round to
#   rows that exist: the loads are valid, the products are computed and thrown away by the mask of the store. In the
#   loop, where the time goes, nothing but the end of :math:`K` is left to check. `rows % M` would say the same, but a
#   GPU has no instruction that divides integers. A subtraction is enough, unless the whole matrix has fewer rows than a
#   tile. To let row 0 stand in for all surplus rows would be simpler still, but hundreds of programs would then ask one
#   place in the L2 cache for the same few bytes.
# - `a_rows[:, None] * stride_am + offs_k[None, :] * stride_ak` is where a tile of :math:`A` lies. Element
#   :math:`(m, k)` of any matrix is :math:`m` row strides and :math:`k` column strides behind the first, whether it is
#   dense, cut out of a larger one or transposed, which exchanges the two. A step along :math:`K` is an addition to all
#   of them.
# - `tl.max_contiguous(tl.multiple_of(...))` is a promise. The compiler joins loads into wide ones only if it can prove
#   that addresses follow each other, and wrapping round hides that. If a size is a multiple of 16, which the launcher
#   says with `ALIGN_M` and `ALIGN_N`, runs of 16 stay whole. Without the promise each number of :math:`B` is loaded by
#   itself. Sizes that are multiples of 2, 4 or 8, but not of 16, still allow loads of 4, 8 or 16 bytes in 16-bit
#   matrices. The compiler does not see that, as it looks at each size and stride for a multiple of 16 alone. So more
#   constants tell it. `A_BYTES` and `B_BYTES` are how many bytes at a time the addresses allow, and `A_ALONG_K` and
#   `B_ALONG_K` say whether these follow each other along :math:`K`. `ALIGN_K` and `ALIGN_N`
#   say of what :math:`K` and :math:`N` are multiples, since masks cut there.
# - `EVEN_K` removes the last mask. As a `tl.constexpr` it costs no instruction: one of the two branches is compiled.
# - `acc = dot(a, b, acc, ...)` adds onto the sums. `INPUT_PRECISION` is about float32 alone: "ieee" multiplies it as it
#   is, without the matrix unit on NVIDIA's GPUs, "tf32" lets the matrix unit take 10 bits of the inputs' mantissas,
#   and "bf16x6" is the way of `dot` for Hopper, of which a section below tells. `MAX_NUM_IMPRECISE_ACC` is about
#   float8 alone: after so many products, sums that the matrix unit keeps with fewer bits are added to those in float32.
# - The loop has no barrier and no mention of shared memory. The compiler keeps the tiles of several steps there, so
#   that the copies for the next steps are under way while the matrix unit works on this one: `num_stages` of them where
#   the matrix unit reads shared memory itself, as it does on Blackwell, and on Hopper in tiles of 64 rows or more, one
#   fewer elsewhere. More stages hide more of the memory's latency, and take room from larger tiles. `num_stages` is a
#   matter of the launch, as `num_warps` is; `my_matmul` leaves it at Triton's, 3 on NVIDIA's GPUs.
# - `pre_ptr` is for the gradient: GELU's, for example, needs the sums as they were before the activation. `PDL` is for
#   products in parts, further down.
# - `offs_k`, the rows and the batch are 64-bit numbers before they meet a stride, because a matrix may have more than
#   :math:`2^{31}` elements.

# %%
# It agrees with torch on an awkward shape
# ----------------------------------------
#
# No side is a multiple of anything useful, so every kind of edge occurs. Then the transposed product, for which
# both lie transposed in memory; that takes nothing but other strides. (Two orders of adding differ in the last digits
# of float32, and that can be more than the last digit of a sum near zero. Hence the absolute tolerance.)

a, b = torch.randn(257, 131, device=DEVICE).half(), torch.randn(131, 190, device=DEVICE).half()
torch.testing.assert_close(my_matmul(a, b), a @ b, rtol=1e-3, atol=1e-3)
torch.testing.assert_close(my_matmul(b.T, a.T), (a @ b).T, rtol=1e-3, atol=1e-3)
error = (my_matmul(a, b).double() - a.double() @ b.double()).abs().max().item()
print(f"largest error {error:.1e}, next to half of the last digit of the largest result:", end=" ")
print(f"{(a @ b).abs().max().log2().floor().exp2().item() * 2**-11:.1e}")

# %%
# Which tile is best? A clock can tell
# ------------------------------------
#
# Sizes of tiles, `num_warps` and `num_stages` do not change the result, but for the rounding of sums, and decide about
# the speed. The best ones depend on the GPU and the shape, and `triton.autotune` finds them by trying. It gets a list
# of configurations and a *key*, the names of some arguments. At the first launch with new values of these arguments it
# times all configurations; from then on it takes the fastest. The grid is a function now, since the tuner alone knows
# the sizes. Here it is for the second rung. Without a GPU there is nothing to time, and a stand-in finds all alike.
# (With `TRITON_PRINT_AUTOTUNING=1` in its environment Triton says what it has tried, and for how long.)


def no_clock(run, quantiles):
    run()
    return [0.0] * len(quantiles)


tuned_kernel = triton.autotune(
    configs=[
        triton.Config({"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=2, num_stages=5),
        triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=4, num_stages=4),
        triton.Config({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}, num_warps=8, num_stages=3),
    ],
    key=["M", "N", "K"],
    do_bench=no_clock if triton.knobs.runtime.interpret else None,
)(tiled_kernel)


def tuned_matmul(a, b):
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    tuned_kernel[lambda meta: (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)](a, b, out, M, N, K)
    return out


torch.testing.assert_close(tuned_matmul(a, b), a @ b, rtol=1e-3, atol=1e-3)
print("chosen:", tuned_kernel.best_config.kwargs)

# %%
# The price is paid at the first launch for each key: every configuration is compiled, and run many times. A model whose
# lengths change all the time would tune all the time, unless the key is a rounded length. The library does without. Its
# rules (`_config`, and on Hopper `hopper/matmul_plan.py` and `hopper/matmul_float32.py`) were made from measurements:
# unasked, nothing is tried in a first call, and everybody with the same GPU gets the same kernel, with the same bits.
# (How to ask is told further down, at the products drawn by lot.) There is more about tuning in the guide's chapter
# *"Hello, World!" and the programming model*.

# %%
# From a kernel to a function
# ---------------------------
#
# `triton_gallery.matmul` takes the shapes that `torch.matmul` takes: vectors, batches that broadcast, any strides,
# sizes of zero. It chooses the tile from the shape. A product with a vector uses no number of the matrix twice, so a
# matrix unit would have nothing to do; it takes a small kernel of its own, which reads each number of the matrix once.
# Where there are too few sums for the whole GPU it cuts them into parts. (On Hopper a row of 16-bit or 8-bit numbers
# times a matrix with dense, aligned rows takes the third rung all the same, in tiles of 16 rows, or, in 16 bits, where
# :math:`K` is long and columns are few, the fifth, whose loads suit it better.) And `matmul` is differentiable, for
# which there is no new kernel to write. With :math:`L` for the loss and :math:`G` for its gradient that arrives,
#
# .. math:: \frac{\partial L}{\partial A} = G B^{\mathsf T} \qquad \frac{\partial L}{\partial B} = A^{\mathsf T} G
#
# which are products again, of transposed matrices. Transposing copies nothing: it exchanges two strides.

weights = torch.randn(48, 40, device=DEVICE, requires_grad=True)
bias = torch.randn(40, device=DEVICE, requires_grad=True)
x = torch.randn(2, 9, 48, device=DEVICE, requires_grad=True)

out = tg.matmul(x, weights, bias=bias, activation="gelu")
expected = torch.nn.functional.gelu(x @ weights + bias)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
gradients = torch.autograd.grad(out.sum(), (x, weights, bias))
for ours, torchs in zip(gradients, torch.autograd.grad(expected.sum(), (x, weights, bias)), strict=True):
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)

try:
    tg.matmul(x, weights, activation="swish")
except ValueError as error:
    print("ValueError:", error)

# %%
# The bias and the activation were part of the same launch: the *epilogue*. When the loop ends, the sums are in
# registers and in float32. An addition and a function of each are a few instructions there. As separate operations
# they would read and write all of :math:`C` twice more, and round it twice more:


def count_bytes(M, N, K, s=2):
    product = s * (M * K + K * N + M * N)
    return product, product + 2 * (2 * s * M * N)


for shape in ((4096, 4096, 4096), (4096, 4096, 512)):
    fused, separate = count_bytes(*shape)
    print(f"{shape}: fused {fused / 2**20:.0f} MiB, separate {separate / 2**20:.0f} MiB, {separate / fused:.2f}×")

# %%
# (torch's `addmm` adds the bias within the product. Then one of the two trips remains.)
#
# These are factors of bytes and not of time. A product with a large :math:`K` is limited by arithmetic, whatever it
# moves; but the separate operations are limited by memory, and their time comes on top.

# %%
# On Hopper, tiles travel by themselves
# -------------------------------------
#
# In the kernel above each thread computes addresses and issues copies. NVIDIA's Hopper has an engine for that, the
# *tensor memory accelerator* (TMA). A *tensor descriptor* tells it once where a matrix lies, how large it is and how
# large a box to fetch at a time; then one instruction with the box's place fetches a whole tile, and what lies past the
# end of the matrix arrives as zeros. No address, no mask, no register for either. This is the fourth rung; it asks for
# strides in multiples of 16 bytes:

# quote: triton_gallery.hopper.matmul._matmul_tma_kernel

# %%
# Two things are new besides the descriptors. The kernel is *persistent*: we launch as many programs as there are
# multiprocessors, and each computes one tile after another, so that the start of a tile overlaps the end of the one
# before. And the epilogue splits the tile into halves: each needs half the shared memory and, with an activation, fewer
# registers. (`tl.split` takes a last axis of length 2 apart. So the columns become an axis of two halves, which is
# then moved to the end.) It runs here, too, with four programs. (Its matrices have three dimensions, the first for a
# batch, here of one.)

from triton.tools.tensor_descriptor import TensorDescriptor

a, b = torch.randn(1, 200, 128, device=DEVICE).half(), torch.randn(1, 128, 192, device=DEVICE).half()
out = torch.empty(1, 200, 192, dtype=a.dtype, device=DEVICE)
boxes = ((a, [1, 64, 64]), (b, [1, 64, 128]), (out, [1, 64, 64]))
a_desc, b_desc, out_desc = (TensorDescriptor(x, list(x.shape), list(x.stride()), box) for x, box in boxes)
_matmul_tma_kernel[(4,)](
    a_desc, b_desc, None, out_desc, None, 1, 200, 192, 128, 1, 1, 0,
    A_TRANSPOSED=False, B_TRANSPOSED=False, ACTIVATION=None, MAX_NUM_IMPRECISE_ACC=None,
    BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, GROUP_M=8,
)  # fmt: skip
torch.testing.assert_close(out, a @ b, rtol=1e-3, atol=1e-3)

# %%
# The fifth rung changes who does what. In all kernels so far every warp does everything: it starts copies, waits for
# them, multiplies and stores. In the last one, warps *specialise*: one group of four warps, the *producer*, starts
# copies and nothing else, one to three others, the *consumers*, multiply 64 rows of the tile each and store them, and
# barriers in shared memory tell each side when a tile has come or may go. Copies then go on during an epilogue, until
# all stages are full. `tl` can ask the compiler to part the warps, and cannot say which of them does what, so that
# kernel (`hopper/matmul_specialized.py`) is written in Gluon, the lower-level language that Triton's compiler offers
# beside it. Tiles, order and epilogue are those of this page, but that the rows of tiles are divided into groups of
# about the same size, some 12 where tiles are 128 × 256. The library takes this kernel on Hopper for large products of
# 16-bit numbers, of float8 if :math:`B` lies transposed, and of float32 where fewer bits will do, for products of few
# tiles with a long :math:`K`, and for many smaller ones that the third rung would load in narrow pieces. Where Gluon is
# missing, the kernel above takes what it can of 16-bit numbers and float8. Large products of all bits of float32 have a
# kernel of their own, of which a section below tells. For all else the third rung is there, and for vectors the small
# kernel from above.

# %%
# How close to the matrix unit's limit?
# -------------------------------------
#
# We measure square products and count :math:`2 n^3` operations. The peer is torch, which calls the vendor's library
# (cuBLAS on NVIDIA's GPUs), tuned for each shape over many years. `torch.compile` would call the same library and is
# left out. Large products draw so much power that, as we think, the GPU lowers its clock, and what ran a moment ago
# matters: each provider is measured in three rounds, in alternating order. Inputs are random, since zeros would need
# less power.
#
# A float8 number has half the bits of a float16, and the matrix unit takes two in the place of one, but Hopper's reads
# them only along :math:`K`. So :math:`B` lies transposed in memory. torch offers `torch._scaled_mm` for them, which by
# default, as ours, does not leave its sums to the fewer bits of the matrix unit; its scales are 1 here.

from functools import partial


def sweep(dtype, name):
    what = "TensorFloat-32" if name == "tf32" else str(dtype).removeprefix("torch.")

    @tg.benchmark.perf_report(
        triton.testing.Benchmark(
            x_names=["n"],
            x_vals=[256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192],
            x_log=True,
            line_arg="provider",
            line_vals=["triton_gallery", "torch"],
            line_names=["triton_gallery", "torch._scaled_mm" if name == "fp8" else "torch"],
            xlabel="rows and columns of each matrix",
            ylabel="TFLOP/s",
            plot_name=f"matmul-{name}",
            args={"dtype": dtype},
        ),
        title=f"Product of two square matrices, {what}",
        limit=None if dtype == torch.float32 else f"matmul-{name}",
        rounds=3,
    )
    def bench_matmul(n, dtype, provider):
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        a, b = (torch.randn(n, n, device=DEVICE).to(dtype) for _ in "ab")
        torch_matmul = torch.matmul
        if dtype == torch.float8_e4m3fn:
            b = b.T  # Hopper reads float8 only along K
            one = torch.ones((), device=DEVICE)
            torch_matmul = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        multiply = {"triton_gallery": tg.matmul, "torch": torch_matmul}[provider]
        return tg.benchmark.tflops(2 * n**3, tg.benchmark.measure(lambda: multiply(a, b)))

    report = bench_matmul.run()
    torch.set_float32_matmul_precision("highest")
    return report


report_fp16 = sweep(torch.float16, "fp16")
report_bf16 = sweep(torch.bfloat16, "bf16")
report_fp8 = sweep(torch.float8_e4m3fn, "fp8")

# %%

report_fp16.plot()

# %%

report_fp16

# %%

report_bf16.plot()

# %%

report_bf16

# %%

report_fp8.plot()

# %%

report_fp8

# %%
# Training multiplies three times. From :math:`dC`, the gradient of the product, come :math:`dA = dC \, B^T` and
# :math:`dB = A^T dC`, twice the operations, and one factor of each lies transposed. The library multiplies these, too:


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["n"],
        x_vals=[256, 512, 1024, 2048, 4096, 8192],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "torch"],
        line_names=["triton_gallery", "torch"],
        xlabel="rows and columns of each matrix",
        ylabel="TFLOP/s",
        plot_name="matmul-bwd-bf16",
        args={},
    ),
    title="Both gradients of a product of two square matrices, bfloat16",
    limit="matmul-bf16",
    rounds=3,
)
def bench_matmul_backward(n, provider):
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in "ab")
    c = {"triton_gallery": tg.matmul, "torch": torch.matmul}[provider](a, b)
    dc = torch.randn_like(c)
    times = tg.benchmark.measure(lambda: torch.autograd.grad(c, (a, b), dc, retain_graph=True))
    return tg.benchmark.tflops(4 * n**3, times)


report_backward = bench_matmul_backward.run()

# %%

report_backward.plot()

# %%

report_backward

# %%
# Against torch these are :measured:`matmul-bwd-bf16: triton_gallery / torch at 256` at 256, :measured:`matmul-bwd-bf16:
# triton_gallery / torch at 1024` at 1024 and :measured:`matmul-bwd-bf16: triton_gallery / torch at 8192` at 8192, and
# at worst :measured:`matmul-bwd-bf16: triton_gallery / torch at worst`: about even or a little ahead. (1536,
# where single products lose most, is not in the sweep.)

# %%
# What each rung is worth
# -----------------------
#
# Back to the ladder, now with a clock. Between the second rung and the third, two things changed above all, the tile
# and the order, so we take them one at a time. `my_matmul` has a parameter for each. (Smaller changes come with the
# tile: the third rung's loop has fewer masks, and 64 numbers of :math:`K` in a step for 32.)
#
# - *All of K at once*: tiles of 32 × 32. With :math:`K = 1024` the rows and columns of a program fill 128 KiB of shared
#   memory. Twice that is more than a multiprocessor of Hopper has, and the rung breaks.
# - *A walk along K*: the same tiles, for any :math:`K`.
# - *Large tiles*: 128 × 128, row by row.
# - *Large tiles in groups*: the same with 8 rows of tiles to a group. This is the third rung.
# - *torch*, and the library, which takes the fourth or the fifth rung where it runs on Hopper and the product is large.

rungs = {
    "all of K at once": whole_k_matmul,
    "a walk along K": tiled_matmul,
    "large tiles": lambda a, b: my_matmul(a, b, tile=(128, 128, 64), group=1, num_warps=8),
    "large tiles in groups": lambda a, b: my_matmul(a, b, tile=(128, 128, 64), group=8, num_warps=8),
    "torch": torch.matmul,
    "triton_gallery": tg.matmul,
}
a, b = torch.randn(257, 131, device=DEVICE).half(), torch.randn(131, 190, device=DEVICE).half()
for multiply in rungs.values():
    torch.testing.assert_close(multiply(a, b), a @ b, rtol=1e-3, atol=1e-3)

# %%
# What should we expect? A number on its way to the matrix unit passes two doors: from memory into the L2 cache, and
# from there into a multiprocessor. At both we can count the operations per byte. At the second door the tile decides,
# by the formula from the top of the page. At the first it is the strips that all running programs need together, and
# for these we ask the kernel's own map once more. On each of its 132 multiprocessors an H200 runs ten of the small
# programs at a time and two of the large ones; its registers have no room for another (nor, for a large one, has its
# shared memory).


print("operations per byte at 8192³      from memory   from L2")
for name, tile, programs, group in (
    ("a walk along K", 32, 10 * 132, 1),
    ("large tiles", 128, 2 * 132, 1),
    ("large tiles in groups", 128, 2 * 132, 8),
):
    # For each step along K, a program does 2 tile² operations, and a strip brings 2 tile bytes.
    n_strips = sum(strips(first_tiles(programs, 8192 // tile, 8192 // tile, group)))
    print(f"{name:34}{programs * tile / n_strips:11.0f}{tile / 2:10.0f}")

# %%
# These are the best cases, with all running programs at the same step. The small tiles ask ten times as much of the
# second door as of the first. So by this count it is the second one that holds them back: L2 would have to be ten times
# as fast as memory, and in trials that we come to further down it gave about four times as much. Large tiles widen that
# door, which no order of tiles can do. The order works at the first one. There it is worth most where the strips of a
# row of tiles are many, at the right end of the chart, and where the door is narrow, with a smaller cache or a slower
# memory.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["n"],
        x_vals=[512, 1024, 2048, 4096, 8192, 16384],
        x_log=True,
        line_arg="provider",
        line_vals=list(rungs),
        line_names=list(rungs),
        xlabel="rows and columns of each matrix",
        ylabel="TFLOP/s",
        plot_name="matmul-ladder-fp16",
        args={},
    ),
    title="Product of two square matrices, step by step, float16",
    limit="matmul-fp16",
)
def bench_matmul_ladder(n, provider):
    if provider == "all of K at once" and n > 1024:
        return None
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.float16) for _ in "ab")
    return tg.benchmark.tflops(2 * n**3, tg.benchmark.measure(lambda: rungs[provider](a, b)))


ladder = bench_matmul_ladder.run()

# %%

ladder.plot()

# %%

ladder

# %%
# The walk along :math:`K` lets the ladder reach every size. Speed comes with the large tile (its rate over that of the
# walk at 4096³: :measured:`matmul-ladder-fp16: large tiles / a walk along K at 4096`), in two ways. It needs a quarter
# of the bytes from L2. And on Hopper it gives us another instruction: `wgmma` multiplies 64 rows at a time, so tiles of
# 32 have to make do with the older `mma`. From here on, in large products, rungs differ in how seldom the matrix unit
# has to wait for bytes.
#
# For the order of tiles, we count strips for the 264 large programs that run at a time, and look at the rate in groups
# over that row by row:
#
# - At 2048³ all 256 tiles run at once, so the order cannot change what they need. The rate in groups is
#   :measured:`matmul-ladder-fp16: large tiles in groups / large tiles at 2048` that row by row.
# - At 4096³ the running programs reach all 32 columns in either order, and groups need a few strips more, 48 against
#   41: :measured:`matmul-ladder-fp16: large tiles in groups / large tiles at 4096`.
# - At 8192³ groups need fewer, 41 against 69, but both orders are far to the right of the ridge:
#   :measured:`matmul-ladder-fp16: large tiles in groups / large tiles at 8192`. (This chart has one round only, and
#   clocks drift in between.)
# - At 16384³ a row has 128 tiles. Row by row needs 131 strips, which comes down to 258 operations per byte, the nearest
#   to the ridge of all of these. Groups still need 41, and gain: :measured:`matmul-ladder-fp16: large tiles in groups /
#   large tiles at 16384`.
#
# The count has all programs in step; real ones are not, and what one has fetched may have left the cache when its
# neighbour comes for it. The small tiles fall back as well (:measured:`matmul-ladder-fp16: a walk along K at 4096` at
# 4096³, :measured:`matmul-ladder-fp16: a walk along K at 8192` at 8192³, where each matrix is larger than L2). To
# compare torch and the library, trust the sweep above, which measures them in three rounds, in alternating order.

# %%
# Over the ridge
# --------------
#
# This is the first page whose points can leave the slope of the roofline. The intensity of a square product is
# :math:`2 n^3 / (6 n^2) = n / 3` operations per byte in float16, so each doubling of the sides moves it to the right.

rates = report_fp16.series("triton_gallery")
tg.benchmark.roofline(report_fp16, {f"{n}³": (n / 3, rates[n]) for n in (256, 512, 1024, 2048, 4096, 8192)})

# %%
# Follow the points from the left. The small ones lie far below the roof, and so does the first one behind the ridge:
# they wait for the launch and for their first tiles. At 256³ there are too few tiles as well, and up to 1024³ they have
# to be small. From there on the matrix unit is what limits us. More intensity does not help any more: from the last
# point but one to the last the rate even falls. We think the clock does; no record holds it.

# %%
# Most products are no squares
# ----------------------------
#
# A language model that answers one person multiplies a single row, or a few, by weights of many megabytes. The row has
# as good as no bytes, and each number of the weights serves two operations per row: we are back on the slope, at an
# intensity of about :math:`M`, and reading the weights at the rate of a copy is all that can be asked. The matrix unit
# multiplies 16 rows at least, most of which compute nothing here; that is free as long as we wait for memory. What
# counts is how many bytes a multiprocessor has on its way. Here the weight is dense along :math:`K`, and one row takes
# the small kernel for vectors, which multiplies without the matrix unit and has no rows to waste. From 2 to 16 rows the
# library's tiles for this layer are :math:`16 \times 64` on Hopper, with steps of 256 numbers. Of the four stages that
# the launch asks for, three lie in shared memory at a time, which is up to 96 KiB of the weights.
#
# Here a layer of 4096 outputs and 14336 inputs gets one row, then two, four and so on, and the rate is that of all
# bytes. (From two rows to 256 there are too few tiles for the GPU, 64 of them up to 16 rows, so :math:`K` is cut in
# two, as we do below the table.)


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["M"],
        x_vals=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "torch"],
        line_names=["triton_gallery", "torch"],
        xlabel="rows M",
        ylabel="GB/s",
        plot_name="matmul-thin-fp16",
        args={"N": 4096, "K": 14336},
    ),
    title="Product of M rows and a weight of 4096 × 14336, float16",
    limit="copy",
    rounds=3,
)
def bench_thin_matmul(M, N, K, provider):
    x, weight = (torch.randn(rows, K, device=DEVICE, dtype=torch.float16) for rows in (M, N))
    multiply = {"triton_gallery": tg.matmul, "torch": torch.matmul}[provider]
    n_bytes = x.nbytes + weight.nbytes + 2 * M * N
    return tg.benchmark.gbps(n_bytes, tg.benchmark.measure(lambda: multiply(x, weight.T)))


report_thin = bench_thin_matmul.run()
report_thin.plot()

# %%

report_thin

# %%
# Most of the time of a thin product is that of reading its weight. On the right the curves fall, as they must: with not
# quite 200 rows the intensity passes the ridge, and from there on it is arithmetic that takes the time.
#
# We are ahead of torch or about even at all sizes of the sweep, at :measured:`matmul-thin-fp16: triton_gallery / torch
# at 1` its rate for one row, :measured:`matmul-thin-fp16: triton_gallery / torch at 4` for four and
# :measured:`matmul-thin-fp16: triton_gallery / torch at 32` for 32. The lowest of the sweep is
# :measured:`matmul-thin-fp16: triton_gallery / torch at worst`. One row reaches :measured:`matmul-thin-fp16:
# triton_gallery / limit at 1` of the rate of a large copy. From two rows on tiles of the matrix unit take over, and it
# is :measured:`matmul-thin-fp16: triton_gallery / limit at 2` of the same. What one row shows to be possible is missed
# by a few percent. A part of the rest we think is the flush before each call, which leaves the L2 cache full of numbers
# that still have to be written to memory and take a part of the bandwidth. It cannot be all, since a copy of as many
# bytes suffers as well, but less; of its rate we reach :measured:`matmul-thin-fp16: triton_gallery / copy of as many
# bytes at 2`.
#
# Now let the result be small and :math:`K` long, as in the gradient of a weight. A result of 512 × 512 has 16 tiles of
# 128 × 128, and 116 of 132 multiprocessors would have nothing to do. So we cut :math:`K` into parts (*split K*). Every
# part of every tile has a program, which leaves its sums in memory, in float32, and a second kernel adds up the parts.
# Our kernel can do that as it is: the parts are a batch of products, and their strides are steps along :math:`K`.


def matmul_in_parts(a, b, n_parts):  # the parts are a batch: K is a multiple of n_parts
    (M, K), N = a.shape, b.shape[1]
    step = K // n_parts
    parts = torch.empty(n_parts, M, N, dtype=torch.float32, device=a.device)
    grid = (triton.cdiv(M, 64) * triton.cdiv(N, 64), n_parts)
    sizes, batch = (M, N, step, *a.stride(), *b.stride()), ((n_parts,), (step * a.stride(1),), (step * b.stride(0),))
    blocks = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, EVEN_K=step % 32 == 0)
    _matmul_kernel[grid](a, b, None, parts, None, *sizes, 0, *batch, **blocks)
    return parts.sum(dim=0).to(a.dtype)


a, b = torch.randn(64, 512, device=DEVICE).half(), torch.randn(512, 64, device=DEVICE).half()
torch.testing.assert_close(matmul_in_parts(a, b, 4), a @ b, rtol=1e-3, atol=1e-3)

# %%
# The library cuts :math:`K` on Hopper alone (and everywhere in products with a vector). There the parts are one launch:
# each program computes one part of one tile (of float32 perhaps several, one after another). Programs could also add to
# the result in memory, with *atomic* additions, between whose reading and writing no other program gets, and without
# the second kernel; but then the order of the additions, and with it the last bits, would change from run to run. The
# second kernel is launched while the first one still works, and waits on the GPU until it may read (*programmatic
# dependent launch*, the `PDL` of our kernel): then no launch lies between the two.
#
# Large products have the same trouble at their end. Their tiles are computed in rounds, one tile for each
# multiprocessor (the guide says *waves*; the rounds in which we measure are others), and a last round of a few tiles
# takes as long as a full one. So on Hopper several programs may *share* each tile of the last round, where that round
# is at most half full and not the only one. There are two ways.
#
# They can divide the rows of the tile. Each then computes the 64 rows that are otherwise one consumer's, and stores
# them; no sum changes. But half a tile took more than half the time when we tried it. It still needs all columns of
# :math:`B`, which may be why:


def bytes_per_cycle(rows, cols, products_per_cycle=2048):  # of 16-bit numbers, in each multiprocessor of Hopper
    return 2 * (rows + cols) * products_per_cycle / (rows * cols)


for tile in ((128, 256), (192, 128), (64, 256), (64, 128)):
    print("{} × {}: {:.0f} bytes from L2 in each cycle".format(*tile, bytes_per_cycle(*tile)))

# %%
# That is what a tile asks for at the full rate of the matrix unit. What L2 gave at most, in 2,469 trials of tiles and
# products, were some 64 bytes in each cycle of a multiprocessor, and the pieces of 64 rows did not reach the rate of
# whole tiles. (`_ALONE_PER_US` in `hopper/matmul_specialized.py` is the rate that the library reckons with for
# them; no record holds these.)
#
# Or each program sums over a part of :math:`K`. (Batches of products never do, nor do tiles of 96 and 192 columns,
# which we meet below. Tiles of 64 rows are not shared at all.) All but one leave their sums in memory; the last one
# adds those of the others to its own, always in the same order, and stores the tile. Up to four programs share one tile
# in this way. Here are the rounds of tiles of 128 × 256 that some products take, without the price of the sums:


def count_rounds(n, n_programs=132):
    full, last = divmod(triton.cdiv(n, 128) * triton.cdiv(n, 256), n_programs)
    n_sharing = min(4, n_programs // last) if last else 1
    return full + (last > 0), full + (last > 0) / n_sharing


for n in (4352, 5120, 5632, 8192):
    whole, shared = count_rounds(n)
    print(f"{n}³: {whole} rounds, {shared:.2f} where programs share K")

# %%
# At 8192³ the last round has 68 tiles, more than half of 132, and nobody shares.
#
# Here a program waits for others of its launch, which have to run while it does. Nothing promises an order in which
# programs start, but it does not matter here: those that others wait for wait for nobody, and those that wait are too
# few to keep them out, at most half as many as there are multiprocessors. (On page two all programs of a row wait for
# each other, which takes a *cooperative* launch or another way out.) The sums have a price, some microseconds to write
# and to read them. So the library divides :math:`K` where it is long, and rows where it is short: with :math:`K =
# 1024`, the price is more than what a round loses by not sharing.
#
# *Stream-K*, which the references name, goes further: programs get equal parts of all the work, which begin and end
# within tiles. A program may then work on parts of two tiles, of which each has its price.
#
# And then there are sizes like 4095. Only every eighth row of such a matrix begins at a multiple of 16 bytes, so TMA
# cannot address it, and other loads move one number at a time. It pays to copy both matrices to rows that are a little
# longer: that is :math:`2 n^2` numbers in and as many out, against :math:`2 n^3` operations. On Hopper the library does
# this for numbers of 16 and of 32 bits, where it reckons that it takes less time. (For all bits of float32 one copy is
# mostly enough, as a later section tells.) Where not, and for float8, the third rung loads in narrow pieces. The result
# needs no copy. Its tiles leave by ordinary stores, in which each warp writes along a row.
#
# Sizes like 5000 lie between. TMA can address such rows, but every second one begins in the middle of a *sector*, the
# 32 bytes that the caches move at once. Then 128 bytes of a row lie in five sectors, where they could lie in four. In
# large products most tiles are 128 × 256 and read twice as much of :math:`B` as of :math:`A`, so from 1536 rows of
# :math:`A` on the library copies :math:`B` alone.
#
# Of three sweeps that follow, one has a small result and a long :math:`K`, the next one odd sides. The last is about
# the epilogue. It adds a bias, which torch adds within its product, too, and applies GELU, for which torch needs a
# second kernel.

bias = torch.randn(8192, device=DEVICE).half()


def separate(a, b):
    return torch.nn.functional.gelu(torch.addmm(bias[: b.shape[1]], a, b))


sweeps = {
    "matmul-long-fp16": (
        "Product of 512 × K and K × 512, float16",
        "summands K",
        [1024, 2048, 4096, 8192, 16384, 32768, 65536],
        lambda K: ((512, K), (K, 512)),
        {"triton_gallery": tg.matmul, "torch": torch.matmul},
    ),
    "matmul-odd-fp16": (
        "Product of two square matrices with odd sides, float16",
        "rows and columns of each matrix",
        [511, 1023, 2047, 4095, 8191],
        lambda n: ((n, n), (n, n)),
        {
            "triton_gallery": tg.matmul,
            "torch": torch.matmul,
            "torch.compile": torch.compile(torch.matmul, dynamic=False),
        },
    ),
    "matmul-gelu-fp16": (
        "Product of two square matrices, then a bias and GELU, float16",
        "rows and columns of each matrix",
        [512, 1024, 2048, 4096, 8192],
        lambda n: ((n, n), (n, n)),
        {
            "triton_gallery": lambda a, b: tg.matmul(a, b, bias=bias[: b.shape[1]], activation="gelu"),
            "torch": separate,
            "torch.compile": torch.compile(separate, dynamic=False),
        },
    ),
}
a, b = torch.randn(33, 40, device=DEVICE).half(), torch.randn(40, 51, device=DEVICE).half()
_, _, _, _, fused = sweeps["matmul-gelu-fp16"]
torch.testing.assert_close(fused["triton_gallery"](a, b), separate(a, b), rtol=1e-2, atol=1e-2)


def compare(name, title, xlabel, sizes, shapes, providers):
    @tg.benchmark.perf_report(
        triton.testing.Benchmark(
            x_names=["size"],
            x_vals=sizes,
            x_log=True,
            line_arg="provider",
            line_vals=list(providers),
            line_names=list(providers),
            xlabel=xlabel,
            ylabel="TFLOP/s",
            plot_name=name,
            args={},
        ),
        title=title,
        limit="matmul-fp16",
        rounds=3,
    )
    def bench_other_matmuls(size, provider):
        a, b = (torch.randn(shape, device=DEVICE, dtype=torch.float16) for shape in shapes(size))
        (M, K), N = a.shape, b.shape[1]
        return tg.benchmark.tflops(2 * M * N * K, tg.benchmark.measure(lambda: providers[provider](a, b)))

    return bench_other_matmuls.run()


reports = {name: compare(name, *sweep) for name, sweep in sweeps.items()}

# %%
# A small result and a long :math:`K`:

reports["matmul-long-fp16"].plot()

# %%

reports["matmul-long-fp16"]

# %%
# With :math:`K = 1024` and a small result we are at :measured:`matmul-long-fp16: triton_gallery / torch at 1024`
# torch's rate, where a fraction of a microsecond decides. At 2048, 128 tiles of 64 × 32 still run at once. From 4096 on
# :math:`K` is cut. The parts go to memory in float32 and come back, and up to 8192 the tiles are smaller than 128 ×
# 128, so that fewer parts will do. We are at :measured:`matmul-long-fp16: triton_gallery / torch at 4096` where that
# begins, at :measured:`matmul-long-fp16: triton_gallery / torch at 8192` at 8192, and at
# :measured:`matmul-long-fp16: triton_gallery / torch at 65536` at the end. The lowest ratio of the sweep is
# :measured:`matmul-long-fp16: triton_gallery / torch at worst`.
#
# Odd sides, which neither TMA nor wide loads can take as they are:

reports["matmul-odd-fp16"].plot()

# %%

reports["matmul-odd-fp16"]

# %%
# With odd sides the library copies at all sizes of the sweep, and is ahead of torch's product at all of them: at 511³
# our rate is :measured:`matmul-odd-fp16: triton_gallery / torch at 511` torch's and at 4095³
# :measured:`matmul-odd-fp16: triton_gallery / torch at 4095`. `torch.compile` pads, too, where a trial of its own tells
# it that this pays. Here that is at 4095³ and at 8191³, and there it is ahead: our rate is :measured:`matmul-odd-fp16:
# triton_gallery / torch.compile at 4095` and :measured:`matmul-odd-fp16: triton_gallery / torch.compile at 8191` its
# own. At 2047³, which it left as it was, we are at :measured:`matmul-odd-fp16: triton_gallery / torch.compile at 2047`.
# The trial may come out differently each time.
#
# And a bias and GELU on the way out:

reports["matmul-gelu-fp16"].plot()

# %%

reports["matmul-gelu-fp16"]

# %%
# They bring us to :measured:`matmul-gelu-fp16: triton_gallery / peers at 1024` the best other one at 1024³, where a
# launch counts, and to :measured:`matmul-gelu-fp16: triton_gallery / peers at 2048` at 2048³. In larger products the
# trip that they save weighs less: at 4096³ we are at :measured:`matmul-gelu-fp16: triton_gallery / peers at 4096` the
# best other one. At 8192³ it is :measured:`matmul-gelu-fp16: triton_gallery / peers at 8192`, and nothing is left;
# why, we have not found out. While a tile is on its way out the matrix unit waits, so each instruction of the
# activation counts: this one squares the inverse of a root, which the GPU has an instruction for, and needs no
# division.

# %%
# Batches
# -------
#
# A batch is many products of one shape. Enough of them fill the GPU, however small each is. Here large ones come first,
# and then what attention multiplies first, queries by keys: 16 *heads* for each of 8 texts are 128 products of 1024 ×
# 64 by 64 × 1024. They lie as a model has them, the heads of one token side by side. No one stride leads through all
# these matrices, which TMA would need, so the library copies them. (torch copies them, too.) Then 2048 products of
# 128³, which wait for memory, and less convenient sizes: rows of 200 and 1000 bytes, which TMA cannot address, rows of
# 2000, of which every second one begins in the middle of a sector, attention over images in 197 pieces, and odd sides.


def draw_batch(size):
    if size == "heads":
        queries, keys = torch.randn(2, 8, 1024, 16, 64, device=DEVICE, dtype=torch.float16)
        return queries.transpose(1, 2), keys.permute(0, 2, 3, 1)
    n, M, N, K = map(int, size.split("×"))
    return (torch.randn(n, *shape, device=DEVICE, dtype=torch.float16) for shape in ((M, K), (K, N)))


sizes = "16×2048×2048×2048", "heads", "2048×128×128×128", "1000×100×100×100", "32×1000×1000×1000", "64×500×500×500"
sizes += "768×197×64×197", "64×129×129×129", "8×2047×2047×2047"


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["size"],
        x_vals=sizes,
        y_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile"],
        line_names=["triton_gallery", "torch", "torch.compile"],
        xlabel="products × M × N × K",
        ylabel="TFLOP/s",
        plot_name="matmul-batches-fp16",
        args={},
    ),
    title="Batches of products, float16",
    limit="matmul-fp16",
    rounds=3,
)
def bench_batches(size, provider):
    a, b = draw_batch(size)
    compiled = torch.compile(torch.matmul, dynamic=False)
    multiply = {"triton_gallery": tg.matmul, "torch": torch.matmul, "torch.compile": compiled}[provider]
    n_operations = 2 * a.numel() * b.shape[-1]
    return tg.benchmark.tflops(n_operations, tg.benchmark.measure(lambda: multiply(a, b)))


report_batches = bench_batches.run()
report_batches.plot()

# %%

report_batches

# %%
# The heads bring us to :measured:`matmul-batches-fp16: triton_gallery / peers at heads` the best other one, and pieces
# of images to :measured:`matmul-batches-fp16: triton_gallery / peers at 768×197×64×197`. With an odd side of 2047 we
# are at :measured:`matmul-batches-fp16: triton_gallery / torch at 8×2047×2047×2047` torch's rate, and at
# :measured:`matmul-batches-fp16: triton_gallery / torch.compile at 8×2047×2047×2047` that of `torch.compile`, which
# pads. Rows of 500 numbers are copied as well, where we are at :measured:`matmul-batches-fp16: triton_gallery / peers
# at 64×500×500×500`. The library does not copy where that would take longer than it saves: rows of 197 numbers are read
# one number at a time, and rows of 100 in pieces of 8 bytes, where we are at :measured:`matmul-batches-fp16:
# triton_gallery / peers at 1000×100×100×100`.
#
# Furthest behind we are with sides of 129, at :measured:`matmul-batches-fp16: triton_gallery / peers at
# 64×129×129×129`, where two copies and a product are three launches of next to no work, and with sides of 1000, at
# :measured:`matmul-batches-fp16: triton_gallery / peers at 32×1000×1000×1000`. Every second row of those begins in the
# middle of a sector. To copy one of the matrices or both made it no quicker when we tried (no record holds that). The
# first batch, sixteen products that would each nearly fill the GPU, is at :measured:`matmul-batches-fp16:
# triton_gallery / peers at 16×2048×2048×2048`, and that of 128³ at :measured:`matmul-batches-fp16: triton_gallery /
# peers at 2048×128×128×128`.

# %%
# Products drawn by lot
# ---------------------
#
# Whoever chooses the sizes can choose kind ones, so here are 48 that nobody chose. Each side is 16 times a power of two
# whose exponent is drawn between 0 and 10, rounded to a multiple of 16. In a quarter of the products both matrices lie
# in memory as they are ("nn"); in the others :math:`B` lies transposed ("nt"), or :math:`A` ("tn"), or both do ("tt").
#
# The rules that choose tiles and parts were made from other products, so they will not always find what is best for
# these. `triton_gallery.set_tuning(True)` has the choice made by trial. The first product of new sizes then times what
# the third and the fifth rung offer for it, and keeps the quickest choice in a file, where later processes find it. We
# measure both. (There is a choice on Hopper GPUs alone, and of float32, and of rows that TMA cannot address, there is
# none. Elsewhere the two are the same.)

import random
import statistics
import tempfile

lots = random.Random(0)
draws = [[16 * round(2 ** lots.uniform(0, 10)) for _ in "MNK"] for _ in range(48)]
layouts = 12 * ("nn", "nt", "tn", "tt")
drawn = {2 * M * N * K / 1e9: (M, N, K, layout) for (M, N, K), layout in zip(draws, layouts, strict=True)}


def draw_matrix(n_rows, n_cols, transposed):
    if transposed == "t":
        return draw_matrix(n_cols, n_rows, "n").T
    return torch.randn(n_rows, n_cols, device=DEVICE, dtype=torch.float16)


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["operations"],
        x_vals=sorted(drawn),
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "triton_gallery, tuned", "torch"],
        line_names=["triton_gallery", "triton_gallery, tuned", "torch"],
        xlabel="billion operations",
        ylabel="TFLOP/s",
        plot_name="matmul-drawn-fp16",
        args={},
    ),
    title="48 products of any shape, float16",
    limit="matmul-fp16",
    rounds=3,
)
def bench_drawn_matmul(operations, provider):
    M, N, K, (a_transposed, b_transposed) = drawn[operations]
    a, b = draw_matrix(M, K, a_transposed), draw_matrix(K, N, b_transposed)
    multiply = torch.matmul if provider == "torch" else tg.matmul
    tg.set_tuning(provider == "triton_gallery, tuned", folder=choices.name)
    multiply(a, b)
    rate = tg.benchmark.tflops(2 * M * N * K, tg.benchmark.measure(lambda: multiply(a, b)))
    tg.set_tuning(False)
    return rate


choices = tempfile.TemporaryDirectory()  # without a folder, they would be kept in ~/.cache
report_drawn = bench_drawn_matmul.run()
report_drawn.plot()

# %%
# The line jumps because neighbours have nothing in common but the number of their operations: a thin product waits for
# memory, and a cube does not. So we look at the quotient.

ours, torchs = report_drawn.series("triton_gallery"), report_drawn.series("torch")
tuned = report_drawn.series("triton_gallery, tuned")
ratios = {operations: ours[operations] / torchs[operations] for operations in drawn}

figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
figure.suptitle(f"Our rate over torch's on the {report_drawn.record['gpu']}: 48 products of any shape, float16")
markers = {"nn": ("#0072B2", "o"), "nt": ("#D55E00", "s"), "tn": ("#009E73", "D"), "tt": ("#CC79A7", "^")}
for layout, (color, marker) in markers.items():
    of_layout = [operations for operations in drawn if drawn[operations][3] == layout]
    ax.scatter(of_layout, [ratios[x] for x in of_layout], color=color, marker=marker, label=layout)
ax.axhline(1, color="#555555", linestyle=":", linewidth=1.5)
# The limits are given, as there may be no point.
ax.set(xscale="log", xlim=(min(drawn) / 2, max(drawn) * 2), xlabel="billion operations")
ax.set(ylabel="triton_gallery / torch")
ax.legend(title="layout")
plt.show()

small, large = ([ratio for x, ratio in ratios.items() if (x < 0.1) == is_small] for is_small in (True, False))
for name, some in (
    ("all", [*ratios.values()]),
    ("below a tenth of a billion operations", small),
    ("from there on", large),
):
    print(f"{name}: {len(some)} products, geometric mean {statistics.geometric_mean(some):.3f}, lowest {min(some):.3f}")
by_trial = [tuned[x] / torchs[x] for x in drawn]
gain = [tuned[x] / ours[x] for x in drawn]
print(f"all, tuned: geometric mean {statistics.geometric_mean(by_trial):.3f}, lowest {min(by_trial):.3f}")
print(f"tuned over not tuned: geometric mean {statistics.geometric_mean(gain):.3f},", end=" ")
print(f"above 1.02 in {sum(g > 1.02 for g in gain)}, highest {max(gain):.3f}")
print("the lowest five, not tuned:")
for operations in sorted(ratios, key=ratios.get)[:5]:
    print("{:6} × {:5} × {:5} {}  {:.3f}".format(*drawn[operations], ratios[operations]))
n_tiles = {x: triton.cdiv(M, 64) * triton.cdiv(N, 64) for x, (M, N, K, _) in drawn.items() if 200 <= K < 1000}
middle = [ratios[x] for x, n in n_tiles.items() if n > 132]
print(f"K of 200 to 1000 and more than 132 tiles of 64 × 64: {len(middle)}, {min(middle):.3f} to {max(middle):.3f}")

# %%

report_drawn

# %%
# Half of these products reach :measured:`matmul-drawn-fp16: triton_gallery / torch at median` torch's rate or more, and
# the lowest is at :measured:`matmul-drawn-fp16: triton_gallery / torch at worst`. Below a tenth of a billion operations
# we are ahead in most; from there on torch is in most. Such a list finds what chosen sizes hide.
#
# The two lowest, and others among the low ones, have tiles for a part of the GPU and much to read, and cuBLAS has a
# tile that fits. A profiler shows the names of its kernels, which speak of 96 × 256 in 4528 × 672 × 12752 and in 8784 ×
# 656 × 1792, of 64 × 80 in 2352 × 256 × 4864, and of 64 × 48 in 2128 × 112 × 4432, all of them in *clusters*: groups of
# programs, to several of which one TMA copy brings a tile at once. (They seem to count the columns of our result
# first.) In 4528 × 672 × 12752, the lowest, a tile of 256 rows and 96 columns makes
# 126 tiles, which leave only 6 of 132 multiprocessors idle and almost nothing of a tile empty. Ours are 108 of 128 ×
# 256: 24 multiprocessors are idle, and three eighths of every third tile are empty. To cut its :math:`K` at other
# places, as Stream-K does, so that all multiprocessors have the same to do, made it slower: they are then at different
# places along :math:`K`, and no longer read what their neighbours have just brought to L2. (That is what we think; no
# record holds it.)
#
# The :math:`K` of 2128 × 112 × 4432 is 16 times a prime number, so it has no equal parts that are multiples of 16.
# Where few tiles have a long :math:`K` the library takes the fifth rung, whose parts may begin anywhere, and which has
# more steps of a long :math:`K` on their way. Among these are thin products, but with up to 16 rows or columns not
# those whose narrow strips already fill half of the GPU.
#
# With a :math:`K` of 200 to 1000 and more tiles of 64 × 64 than there are multiprocessors we are slower than torch in
# more than half of those that were drawn; the last line that is printed above has the range. For such sizes the names
# of cuBLAS's kernels speak of clusters of up to eight programs. Ours ask L2 for each tile as often as there are
# programs that want it, since Triton 3.6 has no way to share a copy. We think that this makes the difference. (No
# record holds that.)
#
# Which tile, and how many parts? For the fifth rung the library reckons how long each choice takes: the multiplications
# of the rounds, what comes from memory, what comes from L2, and the sum of the parts. It takes the quickest. The rates
# that it reckons with were fitted to measured times, of some 18 choices for each of 186 products, until the order came
# out best: on average the choice is half a per cent slower than the quickest of them.
#
# What comes from L2 depends on where rows begin. L2 keeps *lines* of 128 bytes, and TMA copies 128 bytes of a row at a
# time. They are one line if the row begins with a line, as rows of 4096 do, and mostly two if it does not, as in a
# transposed :math:`A` of 7344 rows. The most that L2 gave in these trials was in the second case some two thirds of
# what it gave in the first; counted in whole lines it was about the same. So a product of 7344 × 1040 × 5008 wants
# large tiles, which ask for few lines: those of 192 × 192 took four fifths of the time of those of 128 × 128, though
# these leave fewer multiprocessors idle in their last round. (No record holds that.)
#
# Trials find what the rules miss, also among the third rung's tiles: little on average, more here and there, as printed
# above. The lowest one stays, at :measured:`matmul-drawn-fp16: triton_gallery, tuned / torch at worst`
# torch's rate: none of the tiles that we have is quicker there.

# %%
# Float32 on a matrix unit that takes 16 bits
# -------------------------------------------
#
# float32 is what PyTorch's tensors begin as, and NVIDIA's matrix units do not multiply it. They read it as
# TensorFloat-32, with 10 bits of mantissa in place of 23, which torch allows only where one asks for it. The other way
# goes number by number, through the units that also add and compare, at a fraction of the matrix unit's rate.
#
# There is a third way. A float32 number is exactly the sum of three bfloat16 numbers: the first 8 bits of its
# significand, the next 8 and the last 8, each with an exponent of its own. `three_bf16` takes them apart.

import math

x = torch.tensor([math.pi, 1e-3, -7e30], device=DEVICE)
parts, rest = [], x
for _ in range(3):
    part = (rest.view(torch.int32) & -65536).view(torch.float32)  # the sign, the exponent and the first bits
    assert torch.equal(part.bfloat16().float(), part)
    parts.append(part)
    rest = rest - part
print(*(f"{part[0].item():+.10f}" for part in parts), "make", f"{sum(parts)[0].item():.10f}")
assert torch.equal(sum(parts), x)

# %%
# A product of two such sums has nine terms. With :math:`x_0` the largest part of :math:`x`, and each part at least 128
# times as large as the next,
#
# .. math:: x y \approx x_0 y_0 + (x_0 y_1 + x_1 y_0) + (x_0 y_2 + x_1 y_1 + x_2 y_0)
#
# leaves out three terms. Together they are some two thirds of :math:`2^{-24} x y` on average, where rounding one
# product errs by :math:`2^{-24} x y` at most, and never more than nearly eight times that. All have the sign of
# :math:`x y`, since parts are cut and not rounded. So six products of bfloat16 tiles make one of float32 (*bf16x6*).
# Each is exact, the unit adds them in float32, and `dot` begins with the smallest. Six products at the rate of bfloat16
# are quicker than one without the matrix unit.
#
# The sums need care. The matrix unit cuts off what a sum of 24 bits has no room for, where other units round, and a
# long row of cut sums drifts. So `dot` lets it add along one block of :math:`K` and adds the blocks up outside. And
# infinity minus its first part, itself, is NaN, and so are its other parts. The small terms that these reach are
# dropped, since the largest term knows what the result is.
#
# On Hopper the library multiplies float32 matrices like this, unless TensorFloat-32 is allowed. (Products with a vector
# go number by number.) How exact is it? We compare with float64, and with torch, which multiplies number by number:

a, b = torch.randn(2, 256, 256, device=DEVICE)
exact = a.double() @ b.double()
for name, out in (("triton_gallery", tg.matmul(a, b)), ("torch", a @ b)):
    error = (out - exact).abs().max() / exact.abs().max()
    print(f"{name + ':':15} the largest error is {error.item():.1e} of the largest sum")

# %%
# Without a GPU both go number by number. (Triton's interpreter gets products of bfloat16 tiles wrong, "bf16x6" among
# them, so do not try that there.) On an H200 our error was smaller than torch's (no record holds that); we think
# because fewer sums are rounded. Numbers below :math:`10^{-33}` are an exception, as their smallest parts would be
# below what bfloat16 can hold; of those fewer bits count. The sweep is that of the other dtypes, against torch in the
# same setting:

report_fp32 = sweep(torch.float32, "fp32")
report_fp32.plot()

# %%

report_fp32

# %%
# In float32, which torch multiplies number by number, six products of bfloat16 bring :measured:`matmul-fp32:
# triton_gallery / torch at 4096` torch's rate at 4096³, and :measured:`matmul-fp32: triton_gallery / torch at 1024` at
# 1024³. The rate at 4096³ is :measured:`matmul-fp32: triton_gallery at 4096`. The matrix unit does six times as much
# for it, which is about what the sweep of bfloat16 has, :measured:`matmul-bf16: triton_gallery at 4096`. So taking
# numbers apart costs hardly anything here.
#
# With the third rung and its `dot` it would. Each of its programs takes its tiles of both matrices apart, the same
# numbers over and over for one tile of :math:`C` after another, and meanwhile the unit rests. So on Hopper large
# products have a kernel of their own (`hopper/matmul_bf16x6.py`), with specialised warps as the fifth rung:
#
# - One matrix is taken apart once, by a small kernel ahead of the product. It writes 6 bytes for every number, and TMA
#   brings the parts to shared memory as any other tile.
# - The other one stays as it is, but is copied if TMA cannot address it. Its numbers reach the matrix unit by way of
#   registers, and there a consumer takes them apart, while the unit is at the products of the step before. (Were both
#   taken apart ahead, the unit would read both from shared memory, six times. By our count that would take all that
#   shared memory delivers in this time.)
# - The two consumers take turns. One issues its six products in one chain; when the chain is done, it adds the sums to
#   those in its registers, and the unit is at the other one's chain already.
# - Nobody looks for infinity. What `dot` drops stays in the sum and makes it NaN. A program that finds NaN among its
#   sums in the end computes its tiles once more, and this time drops what has to be dropped. Such products take twice
#   as long or a little more, and all others lose nothing. (No record holds that.)
#
# Small products stay with the third rung, which is done with them before the other kernel would have taken a matrix
# apart and begun. Their tiles are few, and a step along :math:`K`, with loads, six products and their sums, takes a
# lone program half a microsecond or more. So the :math:`K` of many of them is cut into parts, as far down as 128
# numbers: at 256³ we are at :measured:`matmul-fp32: triton_gallery / torch at 256`. At 512³ there are 128 tiles of 64 ×
# 32, one for nearly each multiprocessor, and nothing is cut: :measured:`matmul-fp32: triton_gallery / torch at 512`.
# Large products are cut, too, where that fills the last round: at 3072³ there are 576 tiles, which would take five
# rounds of 132, and two halves of each take nine rounds half as long. (`_pointer_plan` and `_bf16x6_plan` in
# `hopper/matmul_float32.py` reckon which kernel, which tiles and how many parts are quickest.)
#
# Where TensorFloat-32 is allowed nothing has to be taken apart: the matrix unit reads all 32 bits, and ignores the last
# 13. That is at half the rate of 16-bit numbers. The kernel with specialised warps changes little: 128 bytes of a row
# are 32 numbers, and beside a result of 32 bits some of its tiles have room for one stage less. But in shared memory
# the unit reads 32-bit numbers only along :math:`K`, and in this sweep :math:`B` does not lie so. (In `x @ weight.T`, a
# linear layer's product, both matrices do.) There is another way in. The left factor may come out of registers, and
# into registers a thread loads any number it likes. So from 512³ on the kernel computes :math:`C^T = B^T A^T`. Its left
# factor is :math:`B^T`, which goes through registers. Its right one is :math:`A^T`, of which the unit reads the
# columns; those are :math:`A`'s rows, and lie along :math:`K`. A tile of :math:`C^T` is turned over on its way out
# through shared memory. Where neither matrix lies along :math:`K`, as in the gradient of a weight, :math:`x^T dy`, the
# smaller one is copied first. The smaller products of the sweep take the third rung, in tiles of 32 × 32, which warps
# multiply out of registers.

report_tf32 = sweep(torch.float32, "tf32")
report_tf32.plot()

# %%

report_tf32

# %%
# Up to 2048³ we are even with torch or ahead, at :measured:`matmul-tf32: triton_gallery / torch at 512` its rate at
# 512³, :measured:`matmul-tf32: triton_gallery / torch at 1536` at 1536³ and :measured:`matmul-tf32: triton_gallery /
# torch at 2048` at 2048³; at 3072³ it is :measured:`matmul-tf32: triton_gallery / torch at 3072`. At 4096³ and beyond
# torch is ahead. The lowest of the sweep is :measured:`matmul-tf32: triton_gallery / torch at worst`.

# %%
# What the compiler made of it
# ----------------------------
#
# For each GPU the same source becomes different instructions: `mma.sync`, in which a warp multiplies, on Ampere;
# `wgmma`, in which four warps multiply straight out of shared memory, on Hopper; `tcgen05`, with sums in a memory of
# their own, on Blackwell; and `mfma` on AMD's. On Hopper this shape takes the kernel with specialised warps.

n = 4096
a, b = torch.empty(2, n, n, dtype=torch.float16, device="meta")
tg.codegen.inspect(tg.matmul, a, b)

# %%
# The sums fill the registers. In the first line, which has tiles of 128 × 128 and 256 threads, they are 64 of a
# thread's registers. With a tile of 128 × 256 on Hopper the 256 threads that multiply hold 128 sums each, half of what
# a thread can have. (The table's number for Hopper is what all threads start with. Then those that only start copies
# hand over most of theirs.) This is why a tile cannot grow for ever. Nothing is spilled to memory. (The column of
# stages shows what the launch asks for; the kernel for Hopper places its stages itself, and has four.)
#
# Here is the kernel of the table's first line, line by line, for Ampere and a product of 1024³, for which tiles are 64
# × 64 and a program has four warps. In TTIR, `tl.dot` is one operation on whole tiles. TTGIR gives its operands a
# layout of their own, `#ttg.dot_op`, and its sums another, `#mma`. In PTX `ldmatrix` brings the operands from shared
# memory in that layout, and `mma.sync` multiplies 16 × 16 by 16 × 8 numbers at a time.

a, b = torch.empty(2, 1024, 1024, dtype=torch.float16, device="meta")
tg.codegen.listing(tg.matmul, a, b, target="sm_80")

# %%
# What we saw
# -----------

for report in (report_fp16, report_bf16, report_fp8, report_fp32, report_tf32):
    print(report.summary())

# %%
# Small products show what comes before and behind the loop. As times, the first rates are

for n in (256, 512, 1024):
    print(f"{n}³: {2 * n**3 / report_fp16.series('triton_gallery')[n] * 1e-6:.1f} µs")

# %%
# That is by our clock, which starts ahead of the kernel's start on the GPU. A profiler counts the kernel alone: the
# smaller the product, the smaller is the kernel's part of these times. (No record holds that.) For 512³ the library
# takes small tiles of 64 × 32, of which all 128 run at once. Each reads little, and our rate there is
# :measured:`matmul-fp16: triton_gallery / torch at 512` torch's. How far a step goes along :math:`K` matters, too,
# since the first product waits for the first step to arrive. (`_pointer_config` in `hopper/matmul_plan.py` has the
# limits.)
#
# And where does the time inside of a kernel go? Not all of it into products. Before, barriers are made, the warps part,
# and the first tile comes from memory; behind, the result leaves. So a program of the fifth rung does what it can at
# the same time: it starts its first copies as soon as one barrier is there, and makes the others meanwhile. And it
# never divides to find its tile, which would cost several hundred cycles: the host passes an inverse of each divisor to
# multiply by.
#
# In the middle it matters how full the rounds are: when 132 multiprocessors have 144 tiles to compute, 120 of them wait
# in the second round for the other 12. At 768³ there are 144 tiles of 64 × 64, so the library takes 72 of 64 × 128, by
# the fifth rung's kernel, and our rate is :measured:`matmul-fp16: triton_gallery / torch at 768` torch's, in bfloat16
# :measured:`matmul-bf16: triton_gallery / torch at 768`. At 1536³ there would be 144 tiles of 128 × 128. The library
# takes 128 of 192 × 96 instead, which is one round, and we are at :measured:`matmul-fp16: triton_gallery / torch at
# 1536`. At 1024³ only small tiles of 64 × 128, 128 of them, give nearly all multiprocessors work, and we are at
# :measured:`matmul-fp16: triton_gallery / torch at 1024` in float16 and at :measured:`matmul-bf16: triton_gallery /
# torch at 1024` in bfloat16.
#
# cuBLAS chooses among many more tiles than we do: the name of its kernel for 1536³ speaks of 192 × 96, too (whichever
# of the two counts our columns), and of clusters of two programs.
# Triton's blocks are powers of two, so that our 96 columns are two blocks, of 64 and of 32, each with sums of its own,
# and 192 are 128 and 64. Such tiles serve many products whose matrices have three times a power of two as columns: at
# 3072³, 256 tiles of 192 × 192 make two rounds. Clusters, which Gluon has since Triton 3.7, take longer to start; of
# what we tried they helped most where few multiprocessors read much. (No record holds that.)
#
# Small tiles have one more trouble: shared memory. Hopper's matrix unit multiplies 64 rows at a time, and for each 64
# rows it reads their numbers of :math:`A` and all of the tile's numbers of :math:`B` from there, where a copy has
# written them before. Shared memory moves 128 bytes in a cycle. Let us count the cycles of a step of 64 numbers along
# :math:`K`, for the matrix unit and for shared memory:


def cycles_of_a_step(rows, *blocks, step=64):  # of 16-bit numbers; blocks of columns
    products = rows * sum(blocks) * step / 2048
    bytes_read = sum(rows // 64 * (64 + cols) for cols in blocks) * step * 2
    bytes_written = (rows + sum(blocks)) * step * 2
    return products, (bytes_read + bytes_written) / 128


for rows, *blocks in ((128, 256), (192, 128, 64), (192, 128), (192, 64, 32), (192, 96), (128, 128), (64, 128)):
    products, moves = cycles_of_a_step(rows, *blocks)
    print(f"{rows} × {' + '.join(map(str, blocks))}: {products:.0f} to multiply, {moves:.0f} to move")

# %%
# Our 64 + 32 columns read the numbers of :math:`A` twice, once for each block; the 96 of cuBLAS, in one block, do not.
# Only with 256 columns does shared memory keep up, just so; to the others it would set a limit. That is a count,
# and the clock does not bear all of it out, as we shall see; but smaller tiles are slower. So a product with few tiles
# has to choose between idle multiprocessors and slow ones, and it is the finer choice that cuBLAS has.
#
# What a step really takes, the multiprocessor's own clock can say. We once let the fifth rung's kernel read it before
# its loop and behind it, on an H200. A step of the largest tile took the cycles that the matrix unit needs and no more.
# One of 192 × 128 took a few more, but fewer than our count says for shared memory; one of 128 × 128 took a tenth more
# than the matrix unit needs, and one of 64 × 128 three quarters more. What changed from product to product was the
# length of a cycle: the more multiprocessors are at work, the slower the clock, by about a tenth from 32 of them to
# 128. So to employ the idle ones gains less than their number says. At 1536³, then in tiles of 192 × 128, the loop took
# three quarters of the time between a program's first instruction and its last. The rest is the way of the first tile
# from memory, and that of the result back. (No record holds these.)
#
# Large products are limited by the matrix unit, and it seems by the power that it may draw. Our rate over torch's is
#
# - in float16 :measured:`matmul-fp16: triton_gallery / torch at 2048` at 2048³,
#   :measured:`matmul-fp16: triton_gallery / torch at 3072` at 3072³,
#   :measured:`matmul-fp16: triton_gallery / torch at 4096` at 4096³,
#   :measured:`matmul-fp16: triton_gallery / torch at 6144` at 6144³ and
#   :measured:`matmul-fp16: triton_gallery / torch at 8192` at 8192³
# - in bfloat16 :measured:`matmul-bf16: triton_gallery / torch at 2048`,
#   :measured:`matmul-bf16: triton_gallery / torch at 3072`,
#   :measured:`matmul-bf16: triton_gallery / torch at 4096`,
#   :measured:`matmul-bf16: triton_gallery / torch at 6144` and
#   :measured:`matmul-bf16: triton_gallery / torch at 8192`
# - in float8 :measured:`matmul-fp8: triton_gallery / torch._scaled_mm at 2048`,
#   :measured:`matmul-fp8: triton_gallery / torch._scaled_mm at 3072`, the highest of these,
#   :measured:`matmul-fp8: triton_gallery / torch._scaled_mm at 4096`,
#   :measured:`matmul-fp8: triton_gallery / torch._scaled_mm at 6144` and
#   :measured:`matmul-fp8: triton_gallery / torch._scaled_mm at 8192`; the lowest of its sweep, at 1536³, is
#   :measured:`matmul-fp8: triton_gallery / torch._scaled_mm at worst`
#
# The limit line is the fastest of many runs of torch's own product of 8192³. Clocks change from run to run, and a
# median of another size comes close to it, as that of 4096³ in float16 at :measured:`matmul-fp16: triton_gallery /
# limit at 4096`, or may pass it. In float8 it is the quicker product whose sums have fewer bits, which neither curve
# uses.

# %%
# Break it: forget the short group
# --------------------------------
#
# The order of tiles has one line that looks unnecessary: the minimum. When the rows of tiles are no multiple of the
# group, the last group is shorter. Let us leave that out.


@triton.jit
def unclamped_tile(i, tiles_n, GROUP_M: tl.constexpr):
    group = i // (GROUP_M * tiles_n)
    within = i % (GROUP_M * tiles_n)
    return group * GROUP_M + within % GROUP_M, within // GROUP_M


@triton.jit
def unclamped_kernel(a_ptr, b_ptr, out_ptr, M, N, K, BLOCK: tl.constexpr, GROUP_M: tl.constexpr):
    tile_m, tile_n = unclamped_tile(tl.program_id(0), tl.cdiv(N, BLOCK), GROUP_M)
    rows, cols = tile_m * BLOCK + tl.arange(0, BLOCK), tile_n * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK):
        a_mask, b_mask = (rows[:, None] < M) & (ks[None, :] < K - k), (ks[:, None] < K - k) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + k + ks[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + (k + ks[:, None]) * N + cols[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc)
    out_mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)


def check(tiles_m, tiles_n, block=16, group=8):
    a = torch.randn(tiles_m * block, 32, device=DEVICE).half()
    b = torch.randn(32, tiles_n * block, device=DEVICE).half()
    out = torch.full((tiles_m * block, tiles_n * block), torch.nan, dtype=a.dtype, device=DEVICE)
    unclamped_kernel[(tiles_m * tiles_n,)](a, b, out, *out.shape, 32, BLOCK=block, GROUP_M=group)
    written = out.unflatten(0, (tiles_m, block)).unflatten(2, (tiles_n, block)).isfinite().all(3).all(1).sum()
    print(f"{tiles_m} × {tiles_n} tiles: {written} of {tiles_m * tiles_n} were written")
    torch.testing.assert_close(out, a @ b)


check(8, 7)
try:
    check(10, 7)
except AssertionError as error:
    print("AssertionError:", *str(error).splitlines()[:4], sep="\n")

# %%
# With 8 rows of tiles all is well, as with every multiple of 8, and the sizes that one tries first are such. With 10,
# the last group numbers its tiles as if it had 8 rows: some programs compute tiles below the matrix, whose stores are
# masked, and the tiles on the right are nobody's. What stands there is whatever the memory held before. We had put NaN
# there. In memory that is used again it may be the right result of an earlier call, and then the check against torch
# passes, too. So we also test the order by itself, for many shapes: every tile of the matrix must occur, once. (To
# count different tiles is not enough. Those of the broken order are all different, but some lie below the matrix.)

for tiles_m, tiles_n, group in ((10, 7, 8), (9, 9, 4), (1, 5, 8), (3, 11, 2)):
    every_tile = [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    assert sorted(order(tiles_m, tiles_n, group)) == every_tile

# %%
# Exercises
# ---------
#
# 1. With 264 programs running at a time and 32 rows and 32 columns of tiles, which group size needs the fewest strips?
#    Use `first_tiles` and `strips`, and compare with :math:`\sqrt{264}`. Why are groups of 8 worse than none here?
# 2. Add the row sums of the result to `tiled_kernel`, as a second output. Each program knows only its own columns: how
#    do the parts come together? (Hint: a first version may write one column of partial sums per column of tiles, and
#    let torch add them up. Why is this better than an atomic addition, if results have to repeat?)
# 3. For :math:`M = 1` the intensity is about one operation per byte, and of the 16 rows that the matrix unit multiplies
#    it wastes 15. Write the kernel as a sum over a block of :math:`K \times N`, without `tl.dot`, and count its bytes.
#    (Hint: `tl.sum(a[:, None] * b, axis=0)`, where `a` has been widened to float32 before. Why?)

# %%
# Solutions
# ---------
#
# They run when this page is built, and each of them checks itself.
#
# Solution 1: the best group
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A group of :math:`g` rows and 264 tiles need :math:`g` strips of :math:`A` and about :math:`264 / g` of :math:`B`. The
# sum is smallest where both are equal, at :math:`g = \sqrt{264} \approx 16.2`. Groups of 8 would need 33 columns. There
# are 32, so the last 8 tiles are of the next group, with 8 strips of :math:`A` more. Row by row, the running tiles are
# nine rows.

needed = {group: sum(strips(first_tiles(264, 32, 32, group))) for group in range(1, 33)}
best = [group for group, n in needed.items() if n == min(needed.values())]
print(f"{min(needed.values())} strips with groups of {best}; {needed[8]} with 8, {needed[1]} with 1")
assert 16 in best and needed[8] > needed[1]

# %%
# Solution 2: row sums on the way
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Each program adds up the columns of its own tile and writes the result into the column of partial sums that belongs to
# its column of tiles; no two programs write the same number. An atomic addition
# would need no second step, but it adds in whatever order the programs finish, and a floating-point sum depends on the
# order. `torch.sum` always takes the same one. What is added up are the sums in float32, before `out` rounds them, so
# we compare with a product in float32; the row sums of `out` differ more.


@triton.jit
def row_sums_kernel(a_ptr, b_ptr, out_ptr, sums_ptr, M, N, K, BLOCK: tl.constexpr):
    tiles_n = tl.cdiv(N, BLOCK)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    rows, cols, ks = tile_m * BLOCK + tl.arange(0, BLOCK), tile_n * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK):
        a_mask, b_mask = (rows[:, None] < M) & (ks[None, :] < K - k), (ks[:, None] < K - k) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + k + ks[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + (k + ks[:, None]) * N + cols[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc)
    out_mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    # Columns past the end are sums of zeros, and add nothing.
    tl.store(sums_ptr + rows * tiles_n + tile_n, tl.sum(acc, axis=1), mask=rows < M)


a, b = torch.randn(70, 50, device=DEVICE).half(), torch.randn(50, 90, device=DEVICE).half()
out, sums = torch.empty(70, 90, dtype=a.dtype, device=DEVICE), torch.empty(70, 3, device=DEVICE)
row_sums_kernel[(9,)](a, b, out, sums, 70, 90, 50, BLOCK=32)
torch.testing.assert_close(out, a @ b)
torch.testing.assert_close(sums.sum(dim=1), (a.float() @ b.float()).sum(dim=1), rtol=1e-3, atol=1e-2)

# %%
# Solution 3: a single row
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# A program owns a block of columns and walks along :math:`K`. Together they move all of :math:`B` once, :math:`s K N`
# bytes, for :math:`2 K N` operations: memory sets the time, and the matrix unit could not help. (Few columns make few
# programs, and to keep a GPU busy each block of columns needs several, with a part of :math:`K` each.) Each of the four
# programs below reads the whole row of :math:`A`, which is little. `a` is widened first, or each product and each
# block's sum would be rounded to float16.


@triton.jit
def vector_matrix_kernel(a_ptr, b_ptr, out_ptr, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    cols, ks = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + k + ks, mask=ks < K - k, other=0.0).to(tl.float32)
        mask = (ks[:, None] < K - k) & (cols[None, :] < N)
        b = tl.load(b_ptr + (k + ks[:, None]) * N + cols[None, :], mask=mask, other=0.0)
        acc += tl.sum(a[:, None] * b, axis=0)
    tl.store(out_ptr + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < N)


a, b = torch.randn(1, 300, device=DEVICE).half(), torch.randn(300, 500, device=DEVICE).half()
out = torch.empty(1, 500, dtype=a.dtype, device=DEVICE)
trace = tg.trace(vector_matrix_kernel, (4,), a, b, out, 500, 300, BLOCK_N=128, BLOCK_K=64)
torch.testing.assert_close(out, a @ b, rtol=1e-2, atol=1e-2)
assert trace.bytes_loaded("b_ptr") == b.nbytes and trace.bytes_loaded("a_ptr") == 4 * a.nbytes

# %%
# References
# ----------
#
# The guide's chapter *Related work* lists these works among its own.
#
# - :cite:`goto2008anatomy`: tiles for every level of the memory, on CPUs.
# - :cite:`osama2023streamk`: no round at all, but equal parts of the work for everyone.
# - :cite:`cutlass`: `Efficient GEMM in CUDA
#   <https://docs.nvidia.com/cutlass/latest/media/docs/cpp/efficient_gemm.html>`_ shows the same hierarchy on GPUs, and
#   the swizzled order of tiles.
# - :cite:`williams2009roofline`: the two limits, and the chart.
# - :cite:`ptx`: the `section on tensors <https://docs.nvidia.com/cuda/parallel-thread-execution/index.html#tensors>`_
#   describes the tensor memory accelerator.

# %%
# Where this page ran
# -------------------

print(tg.benchmark.environment())

# sphinx_gallery_thumbnail_number = 3
