r"""
Layer norm
==========

A program reads its rows once, normalizes them in registers, and in the backward pass adds up the gradients of weight
and bias over all rows without a lock.

You will learn:

- to keep a row in registers from its first load to its last store, and to take a variance that survives a large mean;
- to derive a backward pass as a vector-Jacobian product, and to see which sums it needs;
- to add across programs with partial sums in a fixed order, so that the gradients repeat bit for bit;
- to write a persistent kernel, whose programs walk over many rows.
"""

# %%
# Every step of its own is a trip to memory
# -----------------------------------------
# Layer norm takes each row of a matrix to mean 0 and variance 1, then scales and shifts every column:
#
# .. math:: y = \hat{x} \cdot w + b, \qquad \hat{x} = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}}
#
# where :math:`\mu` and :math:`\sigma^2` are the mean and the variance of the row, :math:`w` and :math:`b` hold one
# weight and one bias for each of the :math:`N` columns, and :math:`\epsilon` keeps the root away from zero. So the
# numbers of a deep network keep one size, whatever the batch, as each row looks at itself alone. Every layer of a
# transformer does it twice.
#
# An element costs about seven arithmetic operations. In float16 it also costs two bytes to read and two to write, and
# in the time a modern GPU takes to move those four bytes it could do dozens of operations. So the arithmetic is nearly
# free, and what we count is trips to memory.

import torch
import triton_gallery as tg  # before triton: without a GPU it switches the interpreter on
import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

# %%
# Here is the formula in torch, one operation at a time. Each line reads a whole matrix from memory, and all but two
# write one back; the comments count them, in units of :math:`M \times N` elements.


def layer_norm_unfused(x, w, b, eps=1e-5):
    mean = x.mean(dim=1, keepdim=True)  # reads 1
    centered = x - mean  # reads 1, writes 1
    squares = centered * centered  # reads 1, writes 1
    rstd = (squares.mean(dim=1, keepdim=True) + eps).rsqrt()  # reads 1
    x_hat = centered * rstd  # reads 1, writes 1
    scaled = x_hat * w  # reads 1, writes 1
    return scaled + b  # reads 1, writes 1


# %%
# Twelve trips, where two are unavoidable: `x` must come in and `y` must go out.
#
# Two loops over the row save most of the trips
# ---------------------------------------------
# A kernel of our own may read an element and use it for everything at once. The first idea that comes to mind gives
# one program to each row and walks over the row twice. The first loop collects the sum of the elements and the sum of
# their squares, from which both statistics follow:
#
# .. math:: \mu = \tfrac{1}{N} \sum_j x_j, \qquad \sigma^2 = \tfrac{1}{N} \sum_j x_j^2 - \mu^2
#
# The second loop reads the row again and writes `y`. That makes three trips.


@triton.jit
def _two_pass_kernel(
    x_ptr,  # (n_rows, n_cols)
    w_ptr,  # (n_cols,)
    b_ptr,  # (n_cols,)
    y_ptr,  # (n_rows, n_cols)
    n_cols,
    eps,
    BLOCK_SIZE: tl.constexpr,
):
    """Program i owns row i."""
    row_start = tl.program_id(0).to(tl.int64) * n_cols
    sums = tl.zeros((BLOCK_SIZE,), tl.float32)
    squares = tl.zeros((BLOCK_SIZE,), tl.float32)
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + row_start + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        sums += x
        squares += x * x
    mean = tl.sum(sums, axis=0) / n_cols
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / n_cols - mean * mean + eps)
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        mask = cols < n_cols
        x = tl.load(x_ptr + row_start + cols, mask=mask).to(tl.float32)
        y = (x - mean) * rstd * tl.load(w_ptr + cols, mask=mask) + tl.load(b_ptr + cols, mask=mask)
        tl.store(y_ptr + row_start + cols, y, mask=mask)


def layer_norm_two_pass(x, w, b, eps=1e-5):
    y = torch.empty_like(x)
    _two_pass_kernel[(x.shape[0],)](x, w, b, y, x.shape[1], eps, BLOCK_SIZE=1024)
    return y


# %%
# We check both versions on an awkward shape, of which no block size is a divisor. Keep this kernel in mind: it passes
# here, and it has a flaw that we come back to.

M, N = (1151, 8190) if DEVICE.type != "cpu" else (115, 819)
x = torch.randn(M, N, device=DEVICE)
w, b = torch.randn(2, N, device=DEVICE)
expected = torch.nn.functional.layer_norm(x, (N,), w, b)

torch.testing.assert_close(layer_norm_unfused(x, w, b), expected, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(layer_norm_two_pass(x, w, b), expected, rtol=1e-4, atol=1e-4)

# %%
# A row that stays in registers is read once
# ------------------------------------------
# The third trip exists because the first loop forgets the row. A program has registers for tens of thousands of
# elements, more than most rows have. If we load the whole row at once, it is still there when the mean is known, still
# there when the variance is known, and goes out normalized: two trips, and no loop.
#
# This is the package's kernel for most rows of up to 1024 numbers, quoted from its source. Longer rows, and some short
# ones, get others, which we meet below.

# quote: triton_gallery.layer_norm._layer_norm_fwd_kernel

# %%
# Line by line:
#
# - `rows` and `cols` span a tile of `BLOCK_M` rows and `BLOCK_N` columns. `BLOCK_N` is the least power of two that is
#   no smaller than the row's length :math:`N`, so a tile always holds whole rows. With one short row to a program
#   most threads would have nothing to do, so short rows share a tile. In float16, for lengths that are multiples of 4,
#   the package makes tiles of 1024 numbers: a row of 1024, or 16 rows of 64. Where there are many rows of more than 128
#   numbers, tiles have two or four times as many.
# - `COMPUTE_DTYPE` is the dtype of the statistics, that of `rstd`: float32 here, and in the library float64 for float64
#   input. `x` is widened before the first sum, weight and bias where they are used, and only the last store narrows.
# - `weight` and `bias` are needed last, and asked for together with `x`. Why, a section below says.
# - `mean` is :math:`\mu`. Lanes beyond the row's end were loaded as 0, and 0 adds nothing to a sum.
# - `tl.where` puts those lanes back to 0 after the subtraction. They would hold :math:`-\mu` otherwise, and their
#   squares would count in the variance.
# - `var` is :math:`\sigma^2`, the mean of squared distances from the mean. We can afford to wait for `mean` before
#   we take squares, because the row is still in registers. This is the difference from the two loops above, and it
#   costs no trip to memory.
# - `rstd` is :math:`1 / \sqrt{\sigma^2 + \epsilon}`, one number for each row. It is stored together with `mean`
#   for the backward pass. `eps` is declared as float64 because Triton would otherwise hand a Python number over as
#   float32.
# - `weight_ptr`, `bias_ptr` or `mean_ptr` may be `None`. That is known while the kernel is compiled, so the
#   branch costs nothing when it runs. Without a mean, the kernel computes *RMS norm*: it subtracts nothing, and divides
#   each row by the root of the mean of its squares (with :math:`\epsilon` under the root).
# - `n // ALIGN * ALIGN` shows the compiler multiples of 8, 4 or 2, as on page two. Our launcher leaves `ALIGN` at 1.
#
# Five lines launch it. (`num_warps=8` spreads a row over 256 threads; the library chooses by the shape.)


def layer_norm_forward(x, w, b, eps=1e-5, BLOCK_M=1):
    (M, N), y = x.shape, torch.empty_like(x)
    mean, rstd = torch.empty(2, M, device=x.device)
    grid, BLOCK_N = (triton.cdiv(M, BLOCK_M),), triton.next_power_of_2(N)
    _layer_norm_fwd_kernel[grid](x, w, b, y, mean, rstd, M, N, x.stride(0), eps, BLOCK_M, BLOCK_N, num_warps=8)
    return y, mean, rstd


y, mean, rstd = layer_norm_forward(x, w, b)
torch.testing.assert_close(y, expected)

# %%
# Two row sums turn the gradient around
# -------------------------------------
# Training hands us `dy`, the gradient of the loss with respect to `y`, and wants the gradients with respect to
# `x`, `w` and `b`. We take the formula apart from its end.
#
# The last step is :math:`y_{ij} = \hat{x}_{ij} w_j + b_j`. Weight and bias belong to a column and serve every row, so
# their gradients are sums over all rows:
#
# .. math:: db_j = \sum_i dy_{ij}, \qquad dw_j = \sum_i dy_{ij} \, \hat{x}_{ij}
#
# What goes on to :math:`\hat{x}` is :math:`g_{ij} = dy_{ij} \, w_j`. From here on rows do not meet, so we drop the
# index of the row. An element :math:`x_k` acts on its own :math:`\hat{x}_k` directly, and on every :math:`\hat{x}_j` of
# its row through the mean and through :math:`r = 1 / \sqrt{\sigma^2 + \epsilon}`. The last two are
#
# .. math::
#     \frac{\partial \mu}{\partial x_k} = \frac{1}{N}, \qquad
#     \frac{\partial r}{\partial x_k} = -\frac{r^3}{2} \frac{\partial \sigma^2}{\partial x_k} = -\frac{r^2 \hat{x}_k}{N}
#
# since :math:`\partial \sigma^2 / \partial x_k = 2 (x_k - \mu) / N`, and :math:`x_k - \mu = \hat{x}_k / r`. (That
# :math:`\mu` moves with :math:`x_k` adds nothing to the variance: the distances from the mean sum to 0.) The product
# rule, applied to :math:`\hat{x}_j = (x_j - \mu) \, r`, puts them together to the Jacobian of one row, :math:`N`
# numbers wide and :math:`N` high (:math:`\delta_{jk}` is 1 where :math:`j = k` and 0 elsewhere):
#
# .. math::
#     \frac{\partial \hat{x}_j}{\partial x_k} =
#     r \left( \delta_{jk} - \frac{1}{N} - \frac{\hat{x}_j \hat{x}_k}{N} \right)
#
# Nobody stores that matrix. The backward pass wants its product with the vector :math:`g`, a *vector-Jacobian product*,
# and each of the three terms multiplies out to something small:
#
# .. math::
#     dx_k = \sum_j g_j \frac{\partial \hat{x}_j}{\partial x_k}
#     = r \Bigl( g_k - \frac{1}{N} \sum_j g_j - \hat{x}_k \, \frac{1}{N} \sum_j g_j \hat{x}_j \Bigr)
#
# So `dx` needs two sums over the row, the mean of :math:`g` and the mean of :math:`g \hat{x}`, and then every
# element is on its own again. There is geometry behind this. Adding a constant to a row does not change
# :math:`\hat{x}`, and neither does stretching the row away from its mean (but for :math:`\epsilon`). The two
# subtractions remove from :math:`g` the parts that point in these two directions, in which a change of `x` has no
# effect.

# %%
# Partial rows take the place of a lock
# -------------------------------------
# The row sums are easy: a program holds its row. `dw` and `db` are the hard part, because every row adds to the
# same :math:`N` numbers, and the rows are in different programs. Three ways out:
#
# - Atomic additions. They are made in whatever order the programs happen to run, floating-point addition depends on
#   the order, and so two runs differ in their last bits.
# - A lock. Some tens of buffers of :math:`N` numbers each stand ready, and row :math:`i` adds to buffer :math:`i`
#   modulo their number. `tl.atomic_cas(lock, 0, 1)` returns what the lock holds, and writes 1 where that is 0. So a
#   program calls it until it returns 0; then it loads, adds, stores and sets the lock back to 0. That takes one program
#   per row and few registers. But programs queue up, the order of the queue decides the last bits, and without a
#   barrier before the release some threads are still storing when the next program loads: wrong sums that look right.
#   The interpreter, in which programs never meet, cannot show it.
# - Partial sums. A program adds up its own rows and writes the result as one row of a small matrix. When all are done,
#   a second kernel adds the rows of that matrix, in an order that never changes.
#
# We take the third. For it to be cheap the partial rows must be few, so we do not start a program for each row. We
# start as many as fit on the GPU at once, say :math:`P`, and let program :math:`i` walk over tiles :math:`i`, :math:`i
# + P`, :math:`i + 2P` and so on. Such programs are called persistent. Over the whole walk the sums for `dw` and `db`
# stay in float32 registers, and memory sees them once.

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# quote: triton_gallery.layer_norm._layer_norm_bwd_kernel
# quote: triton_gallery.layer_norm._layer_norm_bwd_dwdb_kernel

# %%
# Again line by line:
#
# - The grid has two axes. Axis 1 numbers the programs that share the rows; `tl.num_programs(1)` is :math:`P`. Axis 0
#   cuts very long rows into column blocks, and has length 1 here.
# - `tl.range(..., num_stages=NUM_STAGES)` lets the compiler start the loads of later tiles while an earlier one is
#   being computed.
# - `x_hat` is computed again from `x` and the saved `mean` and `rstd`: a few operations instead of another
#   matrix in memory.
# - `dy` reads 0 in padded lanes. Each sum has `dy` as a factor, so padding adds 0 to all of them. (`x_hat` is the mean
#   times `rstd` there. Only where that overflows, in rows of nearly equal numbers above some 10³⁶, the sum is NaN.)
# - `g_mean` and `gx_mean` are the two row sums, divided by :math:`N`. When a row is cut into column blocks, no
#   program sees all of it. Then a small kernel computes both numbers beforehand, and `row_means_ptr` leads to them.
# - `dw` and `db` are tiles like `x`: within the loop each lane adds to its own number and waits for nobody. The
#   rows of a tile meet once, after the loop.
# - In the second kernel a program owns a few columns. Its lanes add up the partial rows of them, a tile at a time, and
#   meet at the end.
# - `PDL` stands for *programmatic dependent launch*, which NVIDIA's GPUs have from Hopper on. The first kernel calls
#   `gdc_launch_dependents` when it has nothing left to do but store its sums. Then the GPU starts programs of the
#   second one wherever there is room, and those wait in `gdc_wait` until the first kernel has ended. What it saves
#   is the start of the second kernel. Our launcher below leaves it off.
#
# Rows of more than 1024 numbers, up to 10240 of 16 bits or 5120 of 32, take another kernel,
# `_layer_norm_bwd_blocks_kernel`. It sums the same way, but cuts a row into equal blocks, as the forward pass will do
# below. The next power of two may be nearly twice the row; of the blocks only the last is empty in part. A program of
# that kernel has one row at a time, and as few warps as have the registers for it: the fewer, the fewer wait for each
# other at each sum. It takes shorter rows, too: those that begin between multiples of 16 bytes from 32 numbers on, and
# most others from 80 numbers of 16 bits or 513 of 32 bits on. Up to eight of them share a warp. The kernel above keeps
# the other short rows, and some kinds of longer ones (`_in_blocks` in the source has the limits). A few short rows, up
# to four tiles of them, have one program, which gets `dw` and `db` themselves for its partial rows: the second launch
# would take longer than all the rest.
#
# The launcher takes the number of programs as an argument, so that we can play with it, and the way to launch, so that
# we can watch:


def launch(kernel, grid, *args, **meta):
    kernel[grid](*args, **meta)


def layer_norm_backward(dy, x, w, mean, rstd, n_programs, BLOCK_M=1, launch=launch):
    (M, N), dx, dw, db = x.shape, torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)
    dw_partial, db_partial = torch.empty(2, n_programs, N, device=x.device)
    launch(
        _layer_norm_bwd_kernel, (1, n_programs),
        dy, x, w, mean, rstd, None, dx, dw_partial, db_partial, M, N, dy.stride(0), dy.stride(1), x.stride(0),
        BLOCK_M, BLOCK_N=triton.next_power_of_2(N), NUM_STAGES=3, num_warps=16,
    )  # fmt: skip
    launch(
        _layer_norm_bwd_dwdb_kernel, (triton.cdiv(N, 16),),
        dw_partial, db_partial, dw, db, n_programs, N, BLOCK_P=triton.next_power_of_2(n_programs), BLOCK_N=16,
    )  # fmt: skip
    return dx, dw, db


# %%
# Who owns which row? `tg.trace` (page one) runs a launch in the interpreter and records each load and store. We trace
# both kernels on 24 rows of 40 columns, with four programs and tiles of two rows.

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

small, small_dy = torch.randn(2, 24, 40, device=DEVICE)
small_w = torch.randn(40, device=DEVICE)
_, small_mean, small_rstd = layer_norm_forward(small, small_w, small_w)
traces = []


def launch_traced(*args, **meta):
    traces.append(tg.trace(*args, **meta))


layer_norm_backward(small_dy, small, small_w, small_mean, small_rstd, 4, BLOCK_M=2, launch=launch_traced)
first, second = traces
print(first, second, sep="\n\n")

# %%
# The first table shows the three trips: `dy` and `x` are loaded once, `dx` is stored once. The sums are stored once for
# each program, four rows of 40. The second kernel loads these and no row of `x`. In the picture, look at the colours
# of the rows on top: tiles of two rows take turns, and all rows of a colour end up in one row of the middle panel.
# Below, the second kernel goes across: a program of it owns columns and reads all four rows above them.

palette = ListedColormap(["#0072B2", "#E69F00", "#009E73", "#CC79A7"])
pictures = {
    "dx: which program of the first kernel stores it": (first.owner("dx_ptr"), "row"),
    "partial sums of dw: a row for each program of the first kernel": (first.owner("dw_partial_ptr"), "program"),
    "dw: which program of the second kernel stores it": (second.owner("dw_ptr")[None], ""),
}
fig, axes = plt.subplots(3, 1, figsize=(8, 6), sharex=True, layout="constrained", height_ratios=(12, 4, 1.2))
fig.suptitle("Layer norm backward: who owns which rows, which partial sums and which columns")
for ax, (title, (owner, label)) in zip(axes, pictures.items(), strict=True):
    ax.pcolormesh(owner, cmap=palette, vmin=0, vmax=3, edgecolors="white", linewidth=0.5)
    step = max(1, len(owner) // 6)
    ax.set(title=title, ylabel=label, yticks=[i + 0.5 for i in range(0, len(owner), step)], ylim=(len(owner), 0))
    ax.set_yticklabels(range(0, len(owner), step))
axes[2].set(xlabel="column", yticks=[])
legend = [plt.Rectangle((0, 0), 1, 1, color=palette(i)) for i in range(4)]
fig.legend(legend, [f"program {i}" for i in range(4)], loc="outside lower center", ncols=4, frameon=False)
plt.show()

assert (first.load_counts("x_ptr") == 1).all() and (second.load_counts("dw_partial_ptr") == 1).all()

# %%
# Every row of `x` is loaded by one program, once, and every partial sum is read once: no row was missed and none was
# counted twice.
#
# Now the gradients on the awkward shape, against torch's, and then once more with the same number of programs and with
# another one:

dy = torch.randn(M, N, device=DEVICE)
leaves = [t.clone().requires_grad_() for t in (x, w, b)]
expected_grads = torch.autograd.grad(torch.nn.functional.layer_norm(leaves[0], (N,), *leaves[1:]), leaves, dy)

grads = layer_norm_backward(dy, x, w, mean, rstd, n_programs=16)
for grad, expected_grad in zip(grads, expected_grads, strict=True):
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-4)

again = layer_norm_backward(dy, x, w, mean, rstd, n_programs=16)
others = layer_norm_backward(dy, x, w, mean, rstd, n_programs=5)
assert all(torch.equal(first, second) for first, second in zip(grads, again, strict=True))
print("16 programs, twice: the gradients repeat bit for bit")
print(" 5 programs: dw has the same bits:", torch.equal(grads[1], others[1]))

# %%
# The order of the additions decides the last bits. It depends on the number of programs and on nothing that varies from
# run to run. The library takes this number from the shape and from the GPU's multiprocessors, so another GPU, or
# another number of rows, may give other last bits.
#
# What do the partial rows cost? They are written and read once, `dw` and `db`, four bytes per element. The passes
# over `x`, `dy` and `dx` move two bytes per element each in float16:

n_rows, n_cols, n_programs = 4096, 4096, 2 * 132  # twice as many as an H200 has multiprocessors
extra, useful = 2 * 2 * n_programs * n_cols * 4, 3 * n_rows * n_cols * 2
print(f"partial rows add {extra / useful:.0%} to the traffic of the backward pass")

# %%
# The partial rows are 8 MiB however many rows `x` has: the more there are, the less it matters. And 8 MiB may well be
# in the L2 cache when the second kernel reads them.
#
# The public function
# -------------------
# `triton_gallery.layer_norm` takes the arguments of `torch.nn.functional.layer_norm`, any shape and stride, and has
# gradients, second ones included. It picks the tile from the length of the rows, their number and dtype.
# `triton_gallery.rms_norm` is the same without mean and bias.

x3 = torch.randn(3, 5, 40, device=DEVICE, requires_grad=True)
w3, b3 = (torch.randn(5, 40, device=DEVICE, requires_grad=True) for _ in range(2))
y3 = tg.layer_norm(x3, (5, 40), w3, b3)
(dx3,) = torch.autograd.grad(y3.square().sum(), x3)

torch.testing.assert_close(tg.rms_norm(x3, (5, 40), w3), torch.nn.functional.rms_norm(x3, (5, 40), w3))
torch_y3 = torch.nn.functional.layer_norm(x3, (5, 40), w3, b3)
torch.testing.assert_close(y3, torch_y3)
torch.testing.assert_close(dx3, *torch.autograd.grad(torch_y3.square().sum(), x3), rtol=1e-4, atol=1e-4)

# %%
# A longer row lies in several blocks
# -----------------------------------
# Blocks are powers of two and rows are not. A row of 8704 elements would take a block of 16384 and leave nearly half of
# its registers empty, while a program with fewer registers has room for a neighbour on its multiprocessor, and two
# programs have more loads under way than one. So the package holds a row of more than 1024 elements in several blocks,
# here five of 2048, of which only the last has empty lanes. The same kernel takes several short rows to a program, from
# 33 numbers on, if they are a multiple of 4 long and fill up to three quarters of the next power of two: one of 96
# elements lies in three blocks of 32.

# quote: triton_gallery.layer_norm._load_kept
# quote: triton_gallery.layer_norm._layer_norm_fwd_blocks_kernel

# %%
# It takes the steps of the first kernel. New is only how it holds the row:
#
# - `blocks` is a tuple that grows by a block in each round of a loop. `tl.static_range` unrolls the loop while the
#   kernel is compiled, so the number of blocks is fixed, and `k == N_BLOCKS - 1` is known. Only the last block is
#   loaded with a mask for its columns.
# - `total += ...` adds up the blocks lane by lane, and one `tl.sum` after the loop crosses the lanes. So the warps meet
#   once for the mean and once for the variance, however many blocks there are.
# - `blocks[k].to(COMPUTE_DTYPE)` stands there three times: for the mean, for the variance and for the result. By the
#   text the row waits as it came from memory. The compiler sees three times the same conversion and makes it once, so
#   that float32 numbers wait in the registers.
# - `AHEAD` says when weight and bias are loaded: before the sums, as in the first kernel, or when they are needed. They
#   take as many registers as the row, each, so only some shapes can afford it. The library decides by the length, the
#   number of rows and the dtypes (`_fwd_block`).
# - `_load_kept` asks the caches to keep what it loads. All programs read the same weight and bias, while each row is
#   read once.


def layer_norm_in_blocks(x, w, b, eps=1e-5, BLOCK_N=2048):
    (M, N), y = x.shape, torch.empty_like(x)
    mean, rstd = torch.empty(2, M, device=x.device)
    _layer_norm_fwd_blocks_kernel[(M,)](
        x, w, b, y, mean, rstd, M, N, x.stride(0), eps,
        BLOCK_M=1, BLOCK_N=BLOCK_N, N_BLOCKS=triton.cdiv(N, BLOCK_N), AHEAD=False, ALIGN=1, num_warps=8,
    )  # fmt: skip
    return y, mean, rstd


for n_cols, BLOCK_N in ((8704, 2048), (2049, 2048), (96, 32)):
    x_wide, (w_wide, b_wide) = torch.randn(3, n_cols, device=DEVICE), torch.randn(2, n_cols, device=DEVICE)
    y_wide, mean_wide, _ = layer_norm_in_blocks(x_wide, w_wide, b_wide, BLOCK_N=BLOCK_N)
    torch.testing.assert_close(y_wide, torch.nn.functional.layer_norm(x_wide, (n_cols,), w_wide, b_wide))
    torch.testing.assert_close(mean_wide, x_wide.mean(dim=1))

# %%
# A row that no program can hold
# ------------------------------
# A row of a million elements does not fit into the registers of one program. Then, unless several programs share it (a
# section below says how), the statistics have to be collected on the way, as in the two loops above. But these subtract
# two large numbers, and where the mean is large little is left of the difference (the section *A large mean breaks the
# short formula* shows it). So every lane follows Welford's recurrence over the elements that it meets, with :math:`m`
# the mean and :math:`S` the sum of squared distances so far, both 0 at first:
#
# .. math:: m_k = m_{k-1} + \frac{x_k - m_{k-1}}{k}, \qquad S_k = S_{k-1} + (x_k - m_{k-1})(x_k - m_k)
#
# and at the end Chan's formula joins lanes of :math:`n_l` elements each:
#
# .. math:: \mu = \frac{1}{N} \sum_l n_l m_l, \qquad \sigma^2 = \frac{1}{N} \sum_l \bigl( S_l + n_l (m_l - \mu)^2 \bigr)

# quote: triton_gallery.layer_norm._layer_norm_fwd_long_kernel

# %%
# Both formulas stand there nearly as above:
#
# - `mean` and `m2` are :math:`m` and :math:`S`, a pair for each lane. In block after block all lanes are at the same
#   :math:`k`, which is `start // BLOCK_N + 1`. So :math:`1 / k` is one division for the whole block.
# - `tl.where` makes the distance 0 where a lane of the last block has no element: neither `mean` nor `m2` moves then.
# - `count` is :math:`n_l`. Lanes that the last block leaves empty have met one element less.
# - The row is read twice. The first loop asks the caches to keep it (`evict_last`), the second says that it is done
#   with each block (`evict_first`).
#
# The backward pass cuts such rows into column blocks, unless here, too, several programs share them. We launch the
# kernel on rows with a large mean, and the public function on the same:


def layer_norm_long(x, eps=1e-5, BLOCK_N=4096):
    (M, N), y = x.shape, torch.empty_like(x)
    mean, rstd = torch.empty(2, M, device=x.device)
    _layer_norm_fwd_long_kernel[(M,)](
        x, None, None, y, mean, rstd, N, x.stride(0), eps, BLOCK_N=BLOCK_N, ALIGN=1, num_warps=8
    )
    return y


x_long = torch.randn(2, 70_001, device=DEVICE) + 1000
exact = torch.nn.functional.layer_norm(x_long.double(), (70_001,))
for y_long in (layer_norm_long(x_long), tg.layer_norm(x_long, 70_001)):
    torch.testing.assert_close(y_long.double(), exact, rtol=0, atol=1e-3)

# %%
# What a trip is worth
# --------------------
# On the way to the forward pass of the library we wrote three of our own. They make twelve trips, three and two. Let us
# see what each of them gains, in float16. First we make sure that all four agree there, too.

rungs = {
    "steps in torch": layer_norm_unfused,
    "two loops": layer_norm_two_pass,
    "row in registers": lambda x, w, b: layer_norm_forward(x, w, b)[0],
    "triton_gallery": lambda x, w, b: tg.layer_norm(x, w.shape, w, b),
}
for forward in rungs.values():
    torch.testing.assert_close(forward(x.half(), w.half(), b.half()).float(), expected, rtol=1e-2, atol=3e-2)


def sweep(plot_name, lengths, providers):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=list(lengths),
        line_arg="provider",
        line_vals=list(providers),
        line_names=list(providers),
        ylabel="GB/s",
        xlabel="row length N",
        plot_name=plot_name,
        args={"M": 4096},
    )


@tg.benchmark.perf_report(
    sweep("layer-norm-fwd-ladder-fp16", [1024, 2048, 4096, 8192, 9216, 12288], rungs),
    title="Layer norm of 4096 rows, forward, step by step, float16",
    limit="copy",
)
def bench_forward_ladder(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.float16)
    w, b = torch.randn(2, N, device=DEVICE, dtype=torch.float16)
    return tg.benchmark.gbps(2 * x.nbytes, tg.benchmark.measure(lambda: rungs[provider](x, w, b)))


ladder = bench_forward_ladder.run()

# %%

ladder.plot()

# %%

ladder

# %%
# Twelve trips in place of two leave at most a sixth of a copy's rate, once a matrix is larger than the L2 cache; here
# it is :measured:`layer-norm-fwd-ladder-fp16: steps in torch / limit at 12288`. Four of the seven steps take a column
# or a row beside the matrix, and such a step, timed alone on an H200, reached two fifths of a copy's rate. Three trips
# to memory would leave two thirds. The two loops do better on short rows, because the second loop still finds the row
# in a cache: of the rate of a copy of as many bytes they reach :measured:`layer-norm-fwd-ladder-fp16: two loops / copy
# of as many bytes at 2048` at 2048 columns, :measured:`layer-norm-fwd-ladder-fp16: two loops / copy of as many bytes at
# 8192` at 8192, and about two thirds only at 12288, :measured:`layer-norm-fwd-ladder-fp16: two loops / copy of as many
# bytes at 12288`. A row in registers reaches :measured:`layer-norm-fwd-ladder-fp16: row in registers / copy of as many
# bytes at 8192` at 8192. Each round of a loop waits for loads of its own, where a program that asks for the whole row
# at once waits once. All the same, the loops are the faster ones at 1024 columns,
# :measured:`layer-norm-fwd-ladder-fp16: two loops / row in registers at 1024`, and by a little at 2048,
# :measured:`layer-norm-fwd-ladder-fp16: two loops / row in registers at 2048`. There the trips do not decide; we
# suppose it is the tile of our third kernel, a single row for 8 warps. At 9216 columns, which get a tile of 16384, the
# tile costs it more than its lead: it is at :measured:`layer-norm-fwd-ladder-fp16: row in registers / copy of as many
# bytes at 9216` of a copy there.
#
# From the row in registers to the library no trip is saved. What changes are the tile, its warps and, from 8192 columns
# on, when weight and bias are loaded: our kernel keeps both in registers through the sums, and the library asks for
# them after the sums there (the section about a handful of rows says why). We have not timed these changes one by one.
# A row of 1024 columns is little work for a program of 8 warps, so the library takes four warps and gives them four
# rows. A row of 9216 leaves almost half of our block of 16384 empty, and one of 12288 a quarter. The library takes five
# blocks of 2048 for the one, with half a block left over, and three of 4096 for the other, with nothing:
# :measured:`layer-norm-fwd-ladder-fp16: triton_gallery / row in registers at 9216` and
# :measured:`layer-norm-fwd-ladder-fp16: triton_gallery / row in registers at 12288`. At 8192, where the block of the
# row in registers has no empty lane, little is gained, :measured:`layer-norm-fwd-ladder-fp16: triton_gallery / row in
# registers at 8192`.

# %%
# Three ways to one sum
# ---------------------
# The backward pass has a ladder of its own, because there the difficulty is another one: the sums for `dw` and `db`. We
# start with the formulas in torch, which sum whole matrices. The statistics are float32, and so is all that they touch.
# The comments count the bytes for each element of a float16 matrix.


def layer_norm_backward_unfused(dy, x, w, mean, rstd):
    centered = x - mean[:, None]  # 2 + 4
    x_hat = centered * rstd[:, None]  # 4 + 4
    g = dy * w  # 2 + 2
    g_mean = g.mean(dim=1, keepdim=True)  # 2
    gx_mean = (g * x_hat).mean(dim=1, keepdim=True)  # 6 + 4, then 4
    dx = (g - g_mean - x_hat * gx_mean) * rstd[:, None]  # 2 + 2, 4 + 4, 6 + 4, 4 + 4
    return dx.to(x.dtype), (dy * x_hat).sum(dim=0), dy.sum(dim=0)  # 4 + 2; 6 + 4, then 4; 2


# %%
# That makes 86 bytes where six would do. The second version has a program for each row, which computes its `dx` in one
# go and adds its share to `dw` and `db` by atomic additions, the first of the three ways out above.


@triton.jit
def _atomic_bwd_kernel(
    dy_ptr,  # (n_rows, n_cols)
    x_ptr,  # (n_rows, n_cols)
    w_ptr,  # (n_cols,)
    mean_ptr,  # (n_rows,)
    rstd_ptr,  # (n_rows,)
    dx_ptr,  # (n_rows, n_cols)
    dw_ptr,  # (n_cols,), float32, zero before the launch
    db_ptr,  # (n_cols,), float32, zero before the launch
    n_cols,
    BLOCK_N: tl.constexpr,
):
    """Program i owns row i of dx, and adds its share to dw and db."""
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    dy = tl.load(dy_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    g = dy * tl.load(w_ptr + cols, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + row)
    x_hat = (x - tl.load(mean_ptr + row)) * rstd
    dx = (g - tl.sum(g, axis=0) / n_cols - x_hat * tl.sum(g * x_hat, axis=0) / n_cols) * rstd
    tl.store(dx_ptr + row * n_cols + cols, dx, mask=mask)
    tl.atomic_add(dw_ptr + cols, dy * x_hat, mask=mask)
    tl.atomic_add(db_ptr + cols, dy, mask=mask)


def layer_norm_backward_atomic(dy, x, w, mean, rstd):
    (M, N), dx = x.shape, torch.empty_like(x)
    dw, db = torch.zeros(2, N, device=x.device)
    BLOCK_N = triton.next_power_of_2(N)
    _atomic_bwd_kernel[(M,)](dy, x, w, mean, rstd, dx, dw, db, N, BLOCK_N=BLOCK_N, num_warps=8)
    return dx, dw.to(w.dtype), db.to(w.dtype)


# %%
# The third version is `layer_norm_backward` from above, with 264 programs, twice as many as an H200 has
# multiprocessors; from 4096 columns on only half of them have room at a time, which is one thing that the library does
# better. All three have to agree with torch.

backward_rungs = {
    "steps in torch": layer_norm_backward_unfused,
    "atomic additions": layer_norm_backward_atomic,
    "partial rows": lambda *inputs: layer_norm_backward(*inputs, n_programs=2 * 132),
}
for backward in backward_rungs.values():
    for grad, expected_grad in zip(backward(dy, x, w, mean, rstd), expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-4)


@tg.benchmark.perf_report(
    sweep("layer-norm-bwd-ladder-fp16", [1024, 2048, 4096, 6144, 8192], [*backward_rungs, "triton_gallery"]),
    title="Layer norm of 4096 rows, backward, step by step, float16",
    limit="copy",
)
def bench_backward_ladder(M, N, provider):
    x, dy = torch.randn(2, M, N, device=DEVICE, dtype=torch.float16)
    w, b = torch.randn(2, N, device=DEVICE, dtype=torch.float16)
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    y, (_, mean, rstd) = tg.layer_norm(leaves[0], (N,), *leaves[1:]), layer_norm_forward(x, w, b)

    def backward():
        if provider == "triton_gallery":
            return torch.autograd.grad(y, leaves, dy, retain_graph=True)
        return backward_rungs[provider](dy, x, w, mean, rstd)

    return tg.benchmark.gbps(3 * x.nbytes, tg.benchmark.measure(backward))


backward_ladder = bench_backward_ladder.run()

# %%

backward_ladder.plot()

# %%

backward_ladder

# %%
# One kernel in place of many saves nearly all of the 86 bytes. But atomic additions bring new ones: two float32 numbers
# for each element, eight bytes where the rest is six. They go to the L2 cache, which adds those for one address one
# after the other, and here every address gets 4096 of them. With partial rows a program adds up some 16 rows in its
# registers before it sends anything. Less has to travel, nobody waits for anybody, and the result has the same bits
# every time. At 4096 columns it has :measured:`layer-norm-bwd-ladder-fp16: partial rows / atomic additions at 4096` the
# rate of the atomic additions.
#
# The last step has several parts. Our tile is one row and 16 warps, whatever the length. The library's kernel holds a
# row in blocks and picks rows, warps and the number of programs by the length, and its second kernel starts early
# (`PDL`). We have not timed these one by one; together, at 1024 columns, they are worth another
# :measured:`layer-norm-bwd-ladder-fp16: triton_gallery / partial rows at 1024`.

# %%
# At the speed of a copy?
# -----------------------
# The forward pass must read and write :math:`M \times N` elements, the backward pass must read two such matrices and
# write one. We divide these bytes by the time. Every provider gets the same random float16 inputs, and the L2 cache is
# flushed before each call. The limit is a plain copy, which also reads and writes all it touches. (Forward, 1024 takes
# the first kernel and all other lengths the one with blocks. The gradient takes one with blocks of its own, which is
# not quoted here, and on Hopper beyond 10240 one whose rows wait in shared memory, and beyond 12288 those in parts.)

LENGTHS = range(1024, 15873, 512)
PROVIDERS = ["triton_gallery", "torch", "torch.compile"]


def provided(provider):
    """The layer norm of one provider, as a function of x, w and b."""
    if provider == "triton_gallery":
        return lambda x, w, b: tg.layer_norm(x, w.shape, w, b)

    def in_torch(x, w, b):
        return torch.nn.functional.layer_norm(x, w.shape, w, b)

    return torch.compile(in_torch, dynamic=False) if provider == "torch.compile" else in_torch


@tg.benchmark.perf_report(
    sweep("layer-norm-fwd-fp16", LENGTHS, PROVIDERS),
    title="Layer norm, forward pass of 4096 rows, float16",
    limit="copy",
    rounds=3,
)
def bench_forward(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.float16)
    w, b = torch.randn(2, N, device=DEVICE, dtype=torch.float16)
    fn = provided(provider)
    return tg.benchmark.gbps(2 * x.nbytes, tg.benchmark.measure(lambda: fn(x, w, b)))


forward_report = bench_forward.run()

# %%

forward_report.plot()

# %%

forward_report

# %%
# For the backward pass we run the forward pass once, keep its graph, and time `torch.autograd.grad` on it, for all
# providers alike. No time goes into adding to an existing `.grad`.

# A compiled backward pass may overwrite what the forward pass saved; then the graph could be used only once.
import torch._functorch.config

torch._functorch.config.donated_buffer = False


@tg.benchmark.perf_report(
    sweep("layer-norm-bwd-fp16", LENGTHS, PROVIDERS),
    title="Layer norm, backward pass of 4096 rows, float16",
    limit="copy",
)
def bench_backward(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.float16, requires_grad=True)
    w, b = (torch.randn(N, device=DEVICE, dtype=torch.float16, requires_grad=True) for _ in range(2))
    y, dy = provided(provider)(x, w, b), torch.randn(M, N, device=DEVICE, dtype=torch.float16)
    times = tg.benchmark.measure(lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True))
    return tg.benchmark.gbps(3 * x.nbytes, times)


backward_report = bench_backward.run()

# %%

backward_report.plot()

# %%

backward_report

# %%
# Both passes are left of the ridge
# ---------------------------------
# We said that the arithmetic is nearly free. The roofline shows how nearly. The forward pass has about seven operations
# for four bytes; the backward pass has about thirteen, for the two sums, for `dx` and for the shares of `dw` and `db`,
# and moves six bytes.

points = {}
for name, report, intensity in (("forward", forward_report, 7 / 4), ("backward", backward_report, 13 / 6)):
    rates = report.series("triton_gallery")
    points |= {f"{name}, N = {n}": (intensity, rates[n] * intensity / 1000) for n in (1024, 8192)}
tg.benchmark.roofline(forward_report, points, title="Layer norm of 4096 rows, float16")

# %%
# Up to the slope is all that can be won, and the long rows are most of the way there. Fewer operations would move the
# points to the left, and leave the slope above them where it is. (The flat roof is that of the matrix unit, which a
# layer norm cannot use. Its own, that of float32 additions, is some twenty times lower, and its ridge is still to the
# right of both passes.)
#
# A handful of rows
# -----------------
# A language model that answers has a row for each text it is writing: one, or some dozens. Of so few rows the bytes no
# longer decide. A kernel has to start, and whatever it asks memory for is some hundreds of nanoseconds on its way, one
# number or a thousand. So what counts is how often a program waits for something before it can ask for the next.
#
# It has to wait for `x` before it has the sums, and for the sums before it can write. It need not wait for weight and
# bias in between, since they do not depend on the sums. That is why the kernel at the top of the page asks for both
# together with `x`. In the text this is a matter of taste; in the machine code it is not, as the compiler moves no load
# across the barriers of a sum. In longer rows, which take the kernel with blocks, weight and bias loaded early wait in
# registers for as long as the row does. In rows of up to 6144 numbers of 16 bits there is room for that, or of up to
# 2048 if weight and bias are float32. Longer rows would have fewer neighbours on their multiprocessor, which costs more
# than it saves, unless there are so few that all programs run at once. Then the library loads early, too, in rows of up
# to 64 KiB (32 KiB where there are more rows than multiprocessors). Few rows of more than 10240 numbers and up to 64
# KiB it also spreads over more threads.
#
# Here are rows of 4096 bfloat16 numbers, from one of them to a thousand. We count the bytes of the weight and the bias
# as well: for one row they are half of all.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["M"],
        x_vals=[1, 4, 16, 64, 128, 256, 512, 1024],
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=PROVIDERS,
        line_names=PROVIDERS,
        ylabel="GB/s",
        xlabel="number of rows",
        plot_name="layer-norm-few-bf16",
        args={"N": 4096},
    ),
    title="Layer norm, forward pass of few rows of 4096, bfloat16",
    limit="copy",
    rounds=3,
)
def bench_few_rows(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.bfloat16)
    w, b = torch.randn(2, N, device=DEVICE, dtype=torch.bfloat16)
    fn = provided(provider)
    return tg.benchmark.gbps(2 * x.nbytes + w.nbytes + b.nbytes, tg.benchmark.measure(lambda: fn(x, w, b)))


few_report = bench_few_rows.run()

# %%

few_report.plot()

# %%

few_report

# %%
# One row takes us :measured:`layer-norm-few-bf16: copy of as many bytes / triton_gallery at 1` the time of a copy of as
# many bytes. A copy waits for memory once, a layer norm for two sums as well, in which all threads of a program take
# part; that may be the difference. Against the best other provider we are at :measured:`layer-norm-few-bf16:
# triton_gallery / peers at worst` at worst and at :measured:`layer-norm-few-bf16: triton_gallery / peers at best` at
# best.
#
# Rows that outgrow a multiprocessor
# ----------------------------------
# Our curve of the forward pass ends where a row still stays in one program from its first load to its last store. How
# does it go on? In the next sweep all matrices have about the same size, 256 MiB, so a launch weighs next to nothing.
# Only the rows grow from point to point, from 32 KiB to 512 KiB, and become fewer: 8192 of them at the left end, 512 at
# the right.
#
# At some length a program has to let go of the row that it has read. Then it reads the row twice, once for the
# statistics and once for the result, and what that costs is up to the L2 cache, which all rows under way share. As long
# as it holds them, the second reading does not reach the memory, and two trips are still two. When they outgrow it,
# there is a third trip, which leaves two thirds of a copy's rate. If there are two programs on each of 132
# multiprocessors, rows of 65536 numbers take 33 MiB together and rows of 131072 take 66 MiB. An H200's L2 cache has 60.
#
# On Hopper the library does not let go. A row of more than 24576 numbers (on an H100 of 40960, if they have 16 bits)
# lies in parts on several multiprocessors, up to 6 MiB of it on an H200. The programs of the parts tell each other what
# they have found: page two explains how they can, and what a danger that is. Here the launch is a *cooperative* one,
# and a program has its part of one row after another. It holds its parts of three rows at a time. What it has found of
# a row it sends *before* it writes the previous row, so that the answers have the time of a whole row to come. On page
# two they exchange a maximum and a sum, here a mean and a sum of squared distances, and Chan's formula from above,
# which joined the lanes of a program, joins programs. A part has up to 4 KiB, and its program a single warp, of which a
# multiprocessor holds twelve. That leaves each of them a twelfth of the registers, and there it keeps weight and bias:
# all of its rows share them. To load both again for each row would ask the L2 cache for two more numbers with each
# number of `x`.
#
# The order of the first loads counts, too. A program asks for its part of the first row, then for the weight, the
# second row, the bias and the third row. If it asked for the three rows first, weight and bias would come last. Nothing
# could be written before all rows are there, and no further row would be asked for before one is written: the memory
# would stand still meanwhile.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[16384, 24576, 32768, 49152, 65536, 131072, 262144],
        x_log=True,
        line_arg="provider",
        line_vals=PROVIDERS,
        line_names=PROVIDERS,
        ylabel="GB/s",
        xlabel="row length N",
        plot_name="layer-norm-long-fp16",
        args={"n_elements": 2**27},
    ),
    title="Layer norm, forward pass of long rows, float16",
    limit="copy",
)
def bench_long_rows(n_elements, N, provider):
    x = torch.randn(n_elements // N, N, device=DEVICE, dtype=torch.float16)
    w, b = torch.randn(2, N, device=DEVICE, dtype=torch.float16)
    fn = provided(provider)
    return tg.benchmark.gbps(2 * x.nbytes, tg.benchmark.measure(lambda: fn(x, w, b)))


long_report = bench_long_rows.run()

# %%

long_report.plot()

# %%

long_report

# %%
# The bytes that are counted are the same at every point. What changes is where a row is when it is needed for the
# second time. Up to 24576 numbers one program keeps it in registers. With 24576, of which 256 threads hold 96 each, we
# reach :measured:`layer-norm-long-fp16: triton_gallery / copy of as many bytes at 24576` of a copy's rate. Longer rows
# lie in parts on several multiprocessors: with 32768 numbers it is
# :measured:`layer-norm-long-fp16: triton_gallery / copy of as many bytes at 32768`, with 65536
# :measured:`layer-norm-long-fp16: triton_gallery / copy of as many bytes at 65536`, and
# :measured:`layer-norm-long-fp16: triton_gallery / copy of as many bytes at 262144` at the right end, where 128
# programs wait for the last of them in each row. (An H100, whose memory is slower, is quicker with up to 40960 numbers
# in registers, those of 1024 threads.)
#
# To read twice need not cost a trip. `torch.compile` does so at every length here. At 16384 columns we run at
# :measured:`layer-norm-long-fp16: triton_gallery / torch.compile at 16384` its rate, and at 32768 at
# :measured:`layer-norm-long-fp16: triton_gallery / torch.compile at 32768`. But at 24576, which is no power of two, it
# has :measured:`layer-norm-long-fp16: torch.compile / copy of as many bytes at 24576` of a copy's rate. From 49152
# columns on its curve is below two thirds of a copy, which is less than a third trip would leave, and up to 65536 the
# cache should hold the rows under way. Why, we have not found out.

# %%
# The shapes of training
# ----------------------
# In training, a row is a token of the batch, and its length is the width of the model. Where the model is small, a
# batch has tens of thousands of tokens. So we measure the backward pass once more, on the widths of transformers from
# small to very large, and in bfloat16, in which most of them are trained. The last shape is for those who normalize
# over several dimensions at once, such as the channels, height and width of an image.
#
# - 32768 × 768: a row lies in three blocks of 256, without a gap, and a single warp has all of it.
# - 16384 × 4096: a row is four blocks of 1024, without a gap.
# - 8192 × 5120: five blocks, where a tile of one block would have 8192 lanes.
# - 4096 × 12288: on Hopper, rows wait in shared memory, and a program has a multiprocessor to itself.
# - 2048 × 65536: a row lies in 16 parts on several multiprocessors (on Hopper; elsewhere it takes five trips, of which
#   three are credited).
#
# The more rows a program adds up, the less its partial row weighs.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["M", "N"],
        x_vals=[(32768, 768), (16384, 4096), (8192, 5120), (4096, 12288), (2048, 65536)],
        line_arg="provider",
        line_vals=PROVIDERS,
        line_names=PROVIDERS,
        ylabel="GB/s",
        xlabel="rows × columns",
        plot_name="layer-norm-bwd-shapes-bf16",
        args={},
    ),
    title="Layer norm, backward pass, shapes of training, bfloat16",
    limit="copy",
)
def bench_training_shapes(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w, b = (torch.randn(N, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    y, dy = provided(provider)(x, w, b), torch.randn(M, N, device=DEVICE, dtype=torch.bfloat16)
    times = tg.benchmark.measure(lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True))
    return tg.benchmark.gbps(3 * x.nbytes, times)


shapes_report = bench_training_shapes.run()

# %%

shapes_report.plot()

# %%

shapes_report

# %%
# Nearest to a copy of as many bytes are 4096 columns, at :measured:`layer-norm-bwd-shapes-bf16: triton_gallery / copy
# of as many bytes at 16384×4096` of its rate; with 5120 it is :measured:`layer-norm-bwd-shapes-bf16: triton_gallery /
# copy of as many bytes at 8192×5120`, and with 65536, in parts, :measured:`layer-norm-bwd-shapes-bf16: triton_gallery
# / copy of as many bytes at 2048×65536`. Farthest are 12288 columns, with one program on each
# multiprocessor, at :measured:`layer-norm-bwd-shapes-bf16: triton_gallery / copy of as many bytes at 4096×12288`.
# Against the best other provider, the lowest of the five ratios is :measured:`layer-norm-bwd-shapes-bf16:
# triton_gallery / peers at worst`.
#
# Many language models of today normalize without a mean and a bias. RMS norm runs in the same kernels, with these parts
# left out. Here are both passes of it, five trips together, on the widths of such models.


def rms_norm_rate(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(N, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(M, N, device=DEVICE, dtype=torch.bfloat16)
    in_torch = torch.nn.functional.rms_norm
    compiled = torch.compile(in_torch, dynamic=False)
    rms_norm = {"triton_gallery": tg.rms_norm, "torch": in_torch, "torch.compile": compiled}[provider]
    times = tg.benchmark.measure(lambda: torch.autograd.grad(rms_norm(x, (N,), w), (x, w), dy))
    return tg.benchmark.gbps(5 * x.nbytes, times)


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["M", "N"],
        x_vals=[(32768, 1024), (16384, 2048), (16384, 4096), (8192, 5120), (8192, 8192), (4096, 16384)],
        line_arg="provider",
        line_vals=PROVIDERS,
        line_names=PROVIDERS,
        ylabel="GB/s",
        xlabel="rows × columns",
        plot_name="layer-norm-rms-fwd-bwd-bf16",
        args={},
    ),
    title="RMS norm, forward and backward pass, bfloat16",
    limit="copy",
)
def bench_rms_norm(M, N, provider):
    return rms_norm_rate(M, N, provider)


rms_report = bench_rms_norm.run()

# %%

rms_report.plot()

# %%

rms_report

# %%
# At worst we are at :measured:`layer-norm-rms-fwd-bwd-bf16: triton_gallery / peers at worst` of the best other
# provider's rate, and at :measured:`layer-norm-rms-fwd-bwd-bf16: triton_gallery / copy of as many bytes at worst` of
# that of a copy.
#
# The heads of attention
# ----------------------
# Some models normalize once more, inside of attention: each head's queries and keys, before the scores are taken (*QK
# norm*). A row is then one head of one token, mostly of 64 to 256 numbers, and there are very many of them. A row of
# 160 numbers in a block of 256 leaves three of eight lanes with nothing to ask memory for; in three blocks of 64 it
# leaves one of six. And a thread that loads a *vector* of 16 bytes has eight of 256 numbers, so that 32 threads have to
# meet for each sum of such a row, which takes five exchanges between two of them. With a vector of each of the three
# blocks, eight threads have the whole row, and three exchanges are enough.
#
# Here are both passes of a million such rows, those of 32768 tokens with 32 heads.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[32, 48, 64, 80, 96, 128, 160, 192, 256],
        line_arg="provider",
        line_vals=PROVIDERS,
        line_names=PROVIDERS,
        ylabel="GB/s",
        xlabel="row length N",
        plot_name="layer-norm-heads-fwd-bwd-bf16",
        args={"M": 2**20},
    ),
    title="RMS norm of a million short rows, forward and backward pass, bfloat16",
    limit="copy",
)
def bench_heads(M, N, provider):
    return rms_norm_rate(M, N, provider)


heads_report = bench_heads.run()

# %%

heads_report.plot()

# %%

heads_report

# %%
# With 128 numbers both passes together run at :measured:`layer-norm-heads-fwd-bwd-bf16: triton_gallery / copy of as
# many bytes at 128` of the rate of a copy, with 160 at :measured:`layer-norm-heads-fwd-bwd-bf16: triton_gallery / copy
# of as many bytes at 160`, and with 32 at :measured:`layer-norm-heads-fwd-bwd-bf16: triton_gallery / copy of as many
# bytes at 32`. The lowest share is :measured:`layer-norm-heads-fwd-bwd-bf16: triton_gallery / copy of as many bytes at
# worst`, with 48 numbers: in three blocks of 16 forward, and backward in a tile of 64 columns, a quarter of it empty.
# Against the best other provider, the lowest ratio is :measured:`layer-norm-heads-fwd-bwd-bf16: triton_gallery / peers
# at worst`.

# %%
# Rows that begin anywhere
# ------------------------
# A thread loads a vector of 16 bytes at once, but only from an address that is a multiple of 16. A row of 8191
# float16 numbers is 16382 bytes long, so the second row begins two bytes before such an address, the third one four,
# and only the ninth begins at one again. Who takes such a row from its first number must load each number by itself,
# with eight times as many instructions. Nor can they be loaded ahead of time: an asynchronous copy moves four bytes at
# least. (As on page two, we call lengths that are no multiple of 8, or of 4 in float32, *unaligned*.)
#
# So the package starts with the vector in which the row begins. The one in which a row ends and the next begins is
# loaded for both, and each sets to 0 what is not its own before it counts. Of the result, whole vectors are stored at
# once, and what is left at the two ends number by number. Here is how blocks of columns are loaded and stored:

# quote: triton_gallery._vectors.load_vectors
# quote: triton_gallery._vectors.inside
# quote: triton_gallery._vectors.store_vectors

# %%
# That would do for a softmax. Layer norm has a weight, and adds up the weight's gradient: a lane must meet the same
# columns in all rows, wherever they begin. Rows that are eight apart (or four or two, where the length is a multiple of
# 2 or 4) begin at the same place in a vector. So the package makes the number of programs :math:`P` a multiple of eight
# (or four, or two). Program :math:`i` takes rows :math:`i`, :math:`i + P`, :math:`i + 2 P` and so on, as it does
# anyway. They all begin at the same place in a vector, and it loads the weight once, moved to that place. The vector in
# which the very last row ends may reach past the end of `x`; this row is loaded number by number.
#
# Parts of rows on Hopper copy only whole vectors to shared memory. What is left at the ends is loaded number by number,
# two rows ahead, by the first threads of a program; it joins the sums when the lanes meet.
#
# All of this takes instructions, too, and pays only where there are enough numbers: forward in unaligned rows of 257 to
# 8184 16-bit numbers, if `x` has two million numbers or more. Multiples of 4, and beyond 1024 multiples of 2, are as
# quick in the plain kernels. These read 4 or 2 numbers at a time where that divides the length, and other rows number
# by number. Backward it pays in nearly all unaligned rows of 32 numbers or more that registers hold. On Hopper longer
# rows lie in parts, if `x` is large or other kernels would read it twice. (`_in_blocks` in the source, and
# `plan_forward` and `plan_backward` of Hopper's kernels have the limits.)
#
# Here are a forward and a backward pass together, over 128 MiB whatever the length.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[777, 2501, 5001, 8191, 15873, 24577, 65537],
        x_log=True,
        line_arg="provider",
        line_vals=PROVIDERS,
        line_names=PROVIDERS,
        ylabel="GB/s",
        xlabel="row length N",
        plot_name="layer-norm-odd-fwd-bwd-fp16",
        args={"n_elements": 2**26},
    ),
    title="Layer norm, forward and backward pass, rows of odd lengths, float16",
    limit="copy",
)
def bench_odd_rows(n_elements, N, provider):
    shapes = [(n_elements // N, N), (n_elements // N, N), (N,), (N,)]
    dy, *leaves = (torch.randn(shape, device=DEVICE, dtype=torch.float16) for shape in shapes)
    x, fn = leaves[0], provided(provider)
    for leaf in leaves:
        leaf.requires_grad_()
    return tg.benchmark.gbps(5 * x.nbytes, tg.benchmark.measure(lambda: torch.autograd.grad(fn(*leaves), leaves, dy)))


odd_report = bench_odd_rows.run()

# %%

odd_report.plot()

# %%

odd_report

# %%
# It does not make up for everything: masks, and the numbers at the ends, take time that a row of 8192 numbers does not
# need. A row of 8191 may begin within a vector, and then needs a fifth block. The backward pass takes one; the forward
# pass cuts the row into parts instead. Both together run at :measured:`layer-norm-odd-fwd-bwd-fp16: triton_gallery /
# copy of as many bytes at 8191` of a copy's rate, with 777 at :measured:`layer-norm-odd-fwd-bwd-fp16: triton_gallery /
# copy of as many bytes at 777`, and with 5001 at :measured:`layer-norm-odd-fwd-bwd-fp16: triton_gallery / copy of as
# many bytes at 5001`. Against the best other provider, the lowest ratio of the sweep is
# :measured:`layer-norm-odd-fwd-bwd-fp16: triton_gallery / peers at worst`. Who can choose a length still chooses a
# multiple of 8.
#
# The registers are the budget
# ----------------------------
# The whole design rests on rows and sums that stay in registers, so we ask the compiler how many it used. On NVIDIA's
# GPUs a thread has at most 255 of them, and at most 128 where a program has 16 warps, because a multiprocessor has
# 65536 registers and such a program 512 threads. A spill would mean that something went to memory after all.

x_meta = torch.empty(4096, 8192, dtype=torch.float16, device="meta")
w_meta = torch.empty(8192, dtype=torch.float16, device="meta")
tg.codegen.inspect(
    tg.layer_norm, x_meta, 8192, w_meta, w_meta, backward=True, targets=("sm_80", "sm_90", "sm_100", "gfx942")
)

# %%
# At this length the forward kernel and the first one of the backward pass are those with blocks, of which four hold a
# row. (The third of the table adds up the partial rows.) The backward kernel holds `x`, `dy`, the weight and the sums
# for `dw` and `db`, all in float32, and uses the registers to match. On NVIDIA's GPUs it has shared memory as well:
# that is where the loads of later rows wait, as 16-bit numbers, which the pipelined loop started ahead of time.
#
# Here is the kernel from the top of the page line by line, at 1024 columns, where a tile has four rows. The line with
# `tl.where` became a select for each number, `FSEL` in SASS, and no branch.

x_short, w_short = torch.empty(4096, 1024, dtype=torch.float16, device="meta"), w_meta[:1024]
tg.codegen.listing(tg.layer_norm, x_short, 1024, w_short, w_short)

# %%
# Where the time goes
# -------------------

reports = forward_report, few_report, long_report, backward_report, shapes_report, rms_report, heads_report, odd_report
for each in reports:
    print(each.summary())

# %%
# Some of this follows from the bytes. Short rows make small tensors, which take only a few microseconds; starting the
# work and waiting for the first load weigh more than the transfer. The dotted line, a copy of as many bytes, has to
# wait in the same way: the forward pass stays close to it, and the backward pass, with two launches, further below.
#
# With longer rows the rate should rise. The curve of the backward pass does, but on an H200 for a step where a new
# block begins: from :measured:`layer-norm-bwd-fp16: triton_gallery at 6144` at 6144 it goes to
# :measured:`layer-norm-bwd-fp16: triton_gallery at 6656` at 6656, where a fourth block of 2048 is mostly empty, and to
# :measured:`layer-norm-bwd-fp16: triton_gallery at 8192` at 8192, where it is full. There the loop also has three
# stages instead of four. Which of the two makes the step we have not measured; a fifth block makes none: with it there
# are :measured:`layer-norm-bwd-fp16: triton_gallery at 8704` at 8704, and a little more from there to 10240. The
# forward curve has small steps, too, where the blocks or the number of warps change, or weight and bias are no longer
# loaded early.
#
# Beyond 10240 a row of 16 bits and its sums no longer fit into registers. On Hopper `x`, `dy` and the weight wait in
# shared memory instead (`hopper/layer_norm_backward.py`, in Gluon), from where they can be read twice, and registers
# hold the sums alone. Up to 12288 columns of 16 bits a row is made of chunks of 4096 there, and lies on one
# multiprocessor. Longer rows, and those of more than 8192 32-bit numbers, are cut into parts, as in the forward pass.
# This time the programs of a row tell each other their shares of the two sums that each element of `dx` needs. Each
# change of kernel is a step down in the curve: from :measured:`layer-norm-bwd-fp16: triton_gallery at 10240` at 10240
# it goes to :measured:`layer-norm-bwd-fp16: triton_gallery at 10752` at 10752, and from :measured:`layer-norm-bwd-fp16:
# triton_gallery at 12288` at 12288 to :measured:`layer-norm-bwd-fp16: triton_gallery at 12800` at 12800, where parts
# begin. With these it rises to :measured:`layer-norm-bwd-fp16: triton_gallery at 15360` at 15360, and ends a step
# lower, at :measured:`layer-norm-bwd-fp16: triton_gallery at 15872`. (On an H100, whose memory is slower, the steps all
# but vanish behind the bytes.) On other GPUs, and on Hopper where a row has more than 3 MiB, rows are cut into column
# blocks, and the row sums need a pass of their own over `x` and `dy`: five trips instead of three.
#
# With 8192 columns we reach, as shares of the rates of a copy of as many bytes and of the best other provider:
#
# - forward :measured:`layer-norm-fwd-fp16: triton_gallery / copy of as many bytes at 8192` and
#   :measured:`layer-norm-fwd-fp16: triton_gallery / peers at 8192`; the lowest ratio of the whole sweep is
#   :measured:`layer-norm-fwd-fp16: triton_gallery / peers at worst`
# - backward :measured:`layer-norm-bwd-fp16: triton_gallery / copy of as many bytes at 8192` and
#   :measured:`layer-norm-bwd-fp16: triton_gallery / peers at 8192`; the lowest ratio of the whole sweep is
#   :measured:`layer-norm-bwd-fp16: triton_gallery / peers at worst`
#
# All of this is the GPU's time. A backward pass also takes the host some time, which no record holds: it walks through
# autograd, allocates and launches one to three kernels. Where rows are short and few, that may well be longer than the
# GPU's part.
#
# At most lengths the strongest forward pass beside ours is that of `torch.compile`, which makes a kernel for each. At
# 1024 columns ours runs at :measured:`layer-norm-fwd-fp16: triton_gallery / torch.compile at 1024` its rate. On an
# H200, from 8192 on, the two are close or level at multiples of 2048: we run at :measured:`layer-norm-fwd-fp16:
# triton_gallery / torch.compile at 8192` its rate at 8192, at :measured:`layer-norm-fwd-fp16: triton_gallery /
# torch.compile at 10240` at 10240, at :measured:`layer-norm-fwd-fp16: triton_gallery / torch.compile at 12288` at 12288
# and at :measured:`layer-norm-fwd-fp16: triton_gallery / torch.compile at 14336` at 14336. In between we are ahead, at
# :measured:`layer-norm-fwd-fp16: triton_gallery / torch.compile at 9216` its rate at 9216 and at
# :measured:`layer-norm-fwd-fp16: triton_gallery / torch.compile at 13824` at 13824. What makes that we have not found
# out. On an H100 the two are level at most lengths from 6144 to 10240, and at some of them `torch.compile` is a little
# ahead. Rows that wait in shared memory, as softmax's do, are no answer: on an H200 we tried programs of one row and of
# two, and programs that stay and keep weight and bias in registers, and from 8192 columns on all were slower than this
# kernel.
#
# A large mean breaks the short formula
# -------------------------------------
# Back to the kernel with two loops. Its variance is :math:`\tfrac{1}{N} \sum x^2 - \mu^2`, which is correct
# mathematics. We give it the same data moved by 1000, which must not change the result:

shifted = x + 1000
exact = torch.nn.functional.layer_norm(shifted.double(), (N,), w.double(), b.double()).float()
try:
    torch.testing.assert_close(layer_norm_two_pass(shifted, w, b), exact, rtol=0, atol=1e-2)
except AssertionError as error:
    print("\n".join(str(error).splitlines()[:4]))
else:
    raise RuntimeError("the short formula survived a mean of 1000; this section needs a harder example")

# %%
# Both terms are close to a million, and neighbouring float32 numbers of that size are 1/16 apart. Their difference
# should be 1, and every rounding on the way weighs a good part of it. For a larger mean the difference can be
# negative, and its root NaN. A check on `torch.randn` alone never sees this. The shipped kernel subtracts first and
# squares then:

torch.testing.assert_close(layer_norm_forward(shifted, w, b)[0], exact, rtol=0, atol=1e-2)

# %%
# Exercises
# ---------
# 1. Copy the forward kernel and replace the line with `tl.where` by `x = x - mean[:, None]`. For which row lengths does
#    the check still pass, on rows with a mean of 1 and to within 1e-4? *Hint: how many lanes are padded when N is 512,
#    and how many when it is 513?*
# 2. Pass `None` for mean and bias to `_layer_norm_fwd_kernel`, and for the mean and the partial sums of `db` to
#    `_layer_norm_bwd_kernel`. Compare with `torch.nn.functional.rms_norm`, with the same `eps` (its default differs).
#    Which of the two directions is no longer taken out of the gradient, and why? *Hint: does adding a constant to a row
#    still leave the result unchanged?*
# 3. On a GPU, measure `layer_norm_backward` for 4096 rows of 4096 elements with 33, 132, 264 and 1024 programs.
#    Explain both ends of the curve with the bytes of the partial rows and the number of multiprocessors. Without a GPU,
#    count both, and say which end should be slow, and why.

# %%
# Solutions
# ---------
# They run when this page is built, and each of them checks itself.
#
# Solution 1: padding in the variance
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# It passes for powers of two (and just below a large one: a single padded lane beside 8191 numbers changes the result
# by less than we tolerate). Each padded lane adds :math:`\mu^2` to the sum of squares. With :math:`N` = 512 there is
# none. With 513 there are 511, as good as one for each number, and unless the mean is 0, the variance is far off.


@triton.jit
def _careless_kernel(x_ptr, y_ptr, n_cols, eps, BLOCK_N: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0)
    x = x - tl.sum(x, axis=0) / n_cols
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    tl.store(y_ptr + row * n_cols + cols, x * rstd, mask=mask)


for n_cols in (512, 513, 1023, 1024):
    careless = torch.randn(5, n_cols, device=DEVICE) + 1
    y = torch.empty_like(careless)
    _careless_kernel[(5,)](careless, y, n_cols, 1e-5, BLOCK_N=triton.next_power_of_2(n_cols))
    passes = torch.allclose(y, torch.nn.functional.layer_norm(careless, (n_cols,)), rtol=1e-4, atol=1e-4)
    print(f"{n_cols} columns: {'passes' if passes else 'fails'}")
    assert passes == (n_cols in (512, 1024))

# %%
# Solution 2: RMS norm
# ~~~~~~~~~~~~~~~~~~~~
# Without a mean, adding a constant to a row changes the result, so that direction is no longer taken out of the
# gradient: `g_mean` is gone. Stretching the row still changes nothing, and `gx_mean` stays.

x_rms, dy_rms, w_rms = x[:20].contiguous(), torch.randn(20, N, device=DEVICE), torch.randn(N, device=DEVICE)
y, dx, dw = torch.empty_like(x_rms), torch.empty_like(x_rms), torch.empty_like(w_rms)
rstd_rms, dw_partial, BLOCK_N = (
    torch.empty(20, device=DEVICE),
    torch.empty(4, N, device=DEVICE),
    triton.next_power_of_2(N),
)
launch(_layer_norm_fwd_kernel, (20,), x_rms, w_rms, None, y, None, rstd_rms, 20, N, N, 1e-5, 1, BLOCK_N, num_warps=8)
launch(
    _layer_norm_bwd_kernel, (1, 4), dy_rms, x_rms, w_rms, None, rstd_rms, None, dx, dw_partial, None, 20, N, N, 1, N,
    1, BLOCK_N=BLOCK_N, NUM_STAGES=3, num_warps=16,
)  # fmt: skip
leaves = [t.clone().requires_grad_() for t in (x_rms, w_rms)]
expected = torch.nn.functional.rms_norm(leaves[0], (N,), leaves[1], 1e-5)
torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
expected_dx, expected_dw = torch.autograd.grad(expected, leaves, dy_rms)
torch.testing.assert_close(dx, expected_dx, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(dw_partial.sum(dim=0), expected_dw, rtol=1e-4, atol=1e-4)

# %%
# Solution 3: how many programs
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# With 33 programs three quarters of the 132 multiprocessors of an H200 have nothing to do. With 1024, four rows for
# each, the partial sums move two thirds of the bytes that all the rest does, and the second kernel has four times as
# many rows to add up as with 264. Of 264 programs only 132 have room at a time at this length: the second half starts
# when the first has ended, with twice as many partial rows as 132 programs write, and we expect no gain from them. (A
# part of that time is our launcher's fault: it loads all 1024 partial rows at once, in one tile of 1024 × 16 for `dw`
# and one for `db`, and the registers of four warps cannot hold both.) Without a GPU we count, and check that the result
# does not depend on the number but for rounding.

import functools

for n_programs in (33, 132, 264, 1024):
    partial, rest = 2 * 2 * n_programs * 4096 * 4, 3 * 4096 * 4096 * 2
    line = f"{n_programs:4} programs: partial sums move {partial / rest:7.1%} of what the rest moves"
    if DEVICE.type != "cpu" and not triton.knobs.runtime.interpret:
        big_dy, big_x = torch.randn(2, 4096, 4096, device=DEVICE).half()
        big_w, big_mean, big_rstd = (torch.ones(4096, device=DEVICE) for _ in range(3))
        inputs = (big_dy, big_x, big_w.half(), big_mean, big_rstd, n_programs)
        times = tg.benchmark.measure(functools.partial(layer_norm_backward, *inputs))
        line += f"; median {times[0] * 1000:.0f} µs"
    print(line)

few, many = (layer_norm_backward(dy, x, w, mean, rstd, n_programs=n)[1] for n in (3, 64))
torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-4)

# %%
# References
# ----------
# The guide's chapter *Related work* lists these works among its own.
#
# - :cite:`ba2016layernorm`: the operation, and what it does for training.
# - :cite:`zhang2019rmsnorm`: the same without a mean.
# - :cite:`welford1962note`: the recurrence for mean and variance in one walk.
# - :cite:`chan1983variance`: how such walks are joined, and what is lost by the textbook's formula.

# %%
# Where this page ran
# -------------------

print(tg.benchmark.environment())

# sphinx_gallery_thumbnail_number = 4
