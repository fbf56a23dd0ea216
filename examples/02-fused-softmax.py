"""
Fused softmax
=============

We normalize the rows of a matrix without writing another matrix in between to memory, rows of any length included.

You will learn:

- why a chain of fast operations is slow, and what fusing them saves, counted in bytes
- how a program reduces a row, and what its padding has to hold
- why a softmax subtracts the maximum
- how the online softmax finds maximum and sum in one walk, and how programs that share a row agree on both
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
# Five operations make eight trips to memory
# ------------------------------------------
#
# Softmax turns a row of numbers into positive numbers that sum to 1, and keeps their order:
#
# .. math:: \text{out}_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}} \qquad m = \max_j x_j
#
# In PyTorch's elementary operations it reads like the formula:


def unfused_softmax(x):
    m = x.max(dim=1, keepdim=True).values
    difference = x - m
    numerator = difference.exp()
    denominator = numerator.sum(dim=1, keepdim=True)
    return numerator / denominator


x = torch.randn(4, 7, device=DEVICE)
torch.testing.assert_close(unfused_softmax(x), torch.softmax(x, dim=1))

# %%
# Each line is a kernel of its own. A kernel cannot hand anything to the next one except through memory, so each line
# reads whole matrices and most lines write one. For a matrix of :math:`M \times N` numbers, and leaving out the few
# numbers per row that `m` and `denominator` hold:

trips = {
    "max": ("read x", 1),
    "subtract": ("read x, write difference", 2),
    "exp": ("read difference, write numerator", 2),
    "sum": ("read numerator", 1),
    "divide": ("read numerator, write out", 2),
}
for operation, (what, count) in trips.items():
    print(f"{operation:10}{what:36}{count} × M × N")
total = sum(count for _, count in trips.values())
print(f"{'together':46}{total} × M × N, of which the result needs 2: a factor of {total / 2:.0f}")

# %%
# The arithmetic is next to nothing: a comparison, a subtraction, an exponential, an addition and a product for each
# number. As on page one, memory decides. The least that any softmax can move is one reading of :math:`x` and one
# writing of the result. So if we find a way to keep the rest on the chip, the trips alone promise the factor above.

# %%
# One program reads a row once
# ----------------------------
#
# Every row is independent of all others, and a row of a few thousand numbers fits into the registers of one program.
# That is the plan, here as a loop over what will be the programs:


def softmax_by_rows(x):
    out = torch.empty_like(x)
    for i in range(len(x)):
        row = x[i]  # the only reading
        numerator = (row - row.max()).exp()
        out[i] = numerator / numerator.sum()  # the only writing
    return out


torch.testing.assert_close(softmax_by_rows(x), torch.softmax(x, dim=1))

# %%
# Our first attempt at a kernel leaves the maximum out. Mathematically it cancels, and without it there is one thing
# less to do. New on this page is `tl.sum`, which adds up a block across all threads of the program. A block's length
# is a power of two and a row's is not, so the lanes behind the row's end must not count. They are masked, and `other=`
# says what a masked lane holds: :math:`-\infty`, and :math:`e^{-\infty} = 0`.


@triton.jit
def naive_softmax_kernel(x_ptr, out_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf"))
    numerator = tl.exp(x.to(tl.float32))
    tl.store(out_ptr + row * n_cols + cols, numerator / tl.sum(numerator), mask=mask)


def naive_softmax(x):
    out = torch.empty_like(x)
    n_rows, n_cols = x.shape
    naive_softmax_kernel[(n_rows,)](x, out, n_cols, BLOCK_COLS=triton.next_power_of_2(n_cols))
    return out


x = torch.randn(23, 781, device=DEVICE)
torch.testing.assert_close(naive_softmax(x), torch.softmax(x, dim=1))

# %%
# Two trips instead of eight, and it agrees with torch. Now we add 100 to every number, which changes nothing in the
# result, as :math:`e^{100}` is a factor of numerator and denominator alike.

for name, softmax in [("torch", lambda x: torch.softmax(x, dim=1)), ("naive", naive_softmax)]:
    print(f"{name}:", [f"{value:.6f}" for value in softmax(x + 100)[0, :4].tolist()])
print(f"the largest x with a finite exponential: {math.log(torch.finfo(torch.float32).max):.1f} in float32, ", end="")
print(f"{math.log(torch.finfo(torch.float16).max):.1f} in float16")

# %%
# Infinity divided by infinity. (Without a GPU it is NumPy that computes, and a script or notebook shows its warning; a
# GPU says nothing.) Nothing keeps the scores inside a language model below such limits. Subtracting the maximum is what
# makes softmax *safe*: then no exponent is above 0, no exponential above 1, and the sum is at least 1, since one of its
# terms is :math:`e^0`. In a kernel that already holds the row it costs no byte.

# %%
# The kernel that the library runs
# --------------------------------
#
# This is the safe kernel, as `triton_gallery.softmax` runs it on rows of up to 1024 columns (but for large matrices
# with an odd number of columns, of which below). A program owns a *tile* of whole rows. (The hardware's own exponential
# is that of two; `_exp` tells why it matters.)

# quote: triton_gallery.softmax._exp
# quote: triton_gallery.softmax._softmax_fwd_kernel

# %%
# The launcher picks the tile. Here it has one row; in the library's, rows of up to 512 columns have company.


def my_softmax(x):
    out = torch.empty_like(x)
    n_rows, n_cols = x.shape
    BLOCK_COLS = triton.next_power_of_2(n_cols)
    _softmax_fwd_kernel[(n_rows,)](x, out, n_rows, n_cols, x.stride(0), BLOCK_ROWS=1, BLOCK_COLS=BLOCK_COLS)
    return out


# %%
# A tile of four short rows is easier to look at. We trace a launch on 10 rows of 12 columns, as on page one, and draw
# the blocks of the three programs below each other, lane by lane.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

x = torch.randn(10, 12, device=DEVICE)
out = torch.empty_like(x)
trace = tg.trace(_softmax_fwd_kernel, (3,), x, out, *x.shape, x.stride(0), BLOCK_ROWS=4, BLOCK_COLS=16)
torch.testing.assert_close(out, torch.softmax(x, dim=1))
print(trace)

lanes = np.concatenate([np.where(access.mask, access.program[0], -1) for access in trace.loads("x_ptr")])
figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
figure.suptitle("The lanes of three programs, each with a tile of 4 × 16, on 10 rows of 12 columns")
palette = ListedColormap(["#DDDDDD", "#56B4E9", "#E69F00", "#CC79A7"])
axes.pcolormesh(lanes, cmap=palette, vmin=-1, vmax=2, edgecolors="white", linewidth=1)
for (row, col), program in np.ndenumerate(lanes):
    axes.text(col + 0.5, row + 0.5, "−∞" if program < 0 else str(program), ha="center", va="center", fontsize="small")
axes.add_patch(plt.Rectangle((0, 0), 12, 10, fill=False, edgecolor="black", linewidth=2))
axes.set(xlabel="column", ylabel="row", xticks=range(0, 17, 2), yticks=range(0, 13, 2), ylim=(12, 0))
plt.show()

# %%
# The number in a lane is that of its program. Inside the frame, the matrix, each number is loaded once and stored once:
# the two trips, and no third. The grey lanes are the price of powers of two. They read nothing and hold
# :math:`-\infty`, to the right of the matrix because 12 is not 16, below it because three tiles have room for 12 rows.
# Two of the last program's rows hold nothing else. They come to :math:`-\infty - (-\infty)`, which is NaN, and the mask
# keeps that from being stored.

# %%
# What the hard lines are for
# ---------------------------
#
# - `rows` is a column of numbers and `cols` a row of numbers: `[:, None]` and `[None, :]` give a block a second
#   dimension, as in NumPy. Added, they broadcast to the addresses of a whole tile of `BLOCK_ROWS` by `BLOCK_COLS`.
# - `x_row_stride` is how far apart two rows lie in memory. It is not always `n_cols`: a slice such as `x[:, :781]` of
#   a wider matrix has the stride of the whole.
# - `other=-float("inf")` is the neutral element of what follows. It loses against every number in the maximum, and
#   adds 0 to the sum. The section *Break it* shows what another choice does.
# - `x.to(...)` twice: first to the dtype of the result, which is what torch's argument `dtype` means, then to
#   float32. A number in float16 has 11 bits, so beside a sum of 1024 a term of 1/4 vanishes. float32 costs
#   no byte of memory. It takes a register for each number, where two in float16 would share one, and for such rows
#   there are enough.
# - `tl.max(x, axis=1, keep_dims=True)` is :math:`m`, one number for each row of the tile. Threads reduce what they
#   hold, threads of a warp exchange registers, and warps meet in shared memory; Triton writes all three steps.
# - `_exp` takes the hardware's exponential, which is fast and may be off in the last digits of float32. Where the
#   result has 16 bits, it asks for it directly, by `tl.exp2`.
# - `numerator * (1 / denominator)` divides once per row and multiplies once per number. Products are much cheaper.
# - `if IS_LOG` is decided when the kernel is compiled. `triton_gallery.log_softmax` is the same text with another
#   ending, and neither pays for the other.
# - `do_not_specialize` keeps the compiler from making a kernel of its own for a number of rows that is 1, or a
#   multiple of 16. It would gain nothing. For `n_cols` it gains much: a multiple of 16 allows wide loads.
# - `n // ALIGN * ALIGN` shows the compiler a multiple of `ALIGN`. A multiple of 8, such as 1000, is enough for loads of
#   16 bytes from float16, but Triton itself asks about 16 alone. The library says 8, 4 or 2 (in float32 4 or 2),
#   whichever is the largest that divides lengths and strides; the default of 1 says nothing.
# - `num_warps` is not in the kernel but a matter of the launch: over how many warps a tile spreads. The longer the row,
#   the more warps it takes to keep each thread's share small. The library's tile of 1024 numbers takes two in
#   float16, and in float32 often four; longer rows, in the kernels below, take 1 to 16, and 32 in one kernel of the
#   gradient, from small tables that were measured; page three has a clock choose.

# %%
# It agrees with torch on an awkward shape
# ----------------------------------------
#
# 781 columns leave nearly a quarter of each block empty, and 211 is a prime. We add 100 here, too, and cover all of
# one row but a single number with :math:`-\infty`, which is how attention masks what a position must not see.

x = torch.randn(211, 781, device=DEVICE) + 100
x[7, 1:] = -math.inf
torch.testing.assert_close(my_softmax(x), torch.softmax(x, dim=1))
print("row 7 begins with", my_softmax(x[:8])[7, :4].tolist())

# %%
# Maximum and sum in one walk
# ---------------------------
#
# How long may a row be? A multiprocessor of an H100 or an H200 has 65536 registers of 32 bits, and a program cannot
# have more than all of them. A longer row does not fit, and the compiler *spills* what is left over to memory, the very
# thing that we set out to avoid. So a program has to walk along such a row, a block at a time. The safe softmax seems
# to need three walks: for the maximum, for the sum, which needs the maximum, and for the result.
#
# The *online* softmax makes it two. Let :math:`m_k` be the maximum of the first :math:`k` numbers, and :math:`s_k` the
# sum of their exponentials relative to it. When the next number arrives, the old sum moves to the new maximum by one
# factor:
#
# .. math:: m_k = \max(m_{k-1}, x_k) \qquad s_k = s_{k-1} \, e^{m_{k-1} - m_k} + e^{x_k - m_k}
#
# from :math:`m_0 = -\infty` and :math:`s_0 = 0` on, because :math:`e^{x_j - m_{k-1}} e^{m_{k-1} - m_k} = e^{x_j - m_k}`
# for each term of the old sum. In Python:


def online_statistics(row):
    m, s, history = -math.inf, 0.0, []
    for x_k in row:
        m_new = max(m, x_k)
        s = s * math.exp(m - m_new) + math.exp(x_k - m_new)
        m = m_new
        history.append((m, s))
    return history


row = (torch.randn(64, generator=torch.Generator().manual_seed(2)) + torch.linspace(-1.5, 1.5, 64)).tolist()
history = online_statistics(row)
safe_m = max(row)
safe_s = sum(math.exp(x_k - safe_m) for x_k in row)
print(f"online: m = {history[-1][0]:.6f}, s = {history[-1][1]:.6f}")
print(f"safe:   m = {safe_m:.6f}, s = {safe_s:.6f}")
assert math.isclose(history[-1][1], safe_s)

# %%
# The picture shows that row and both statistics as the walk goes on. Whenever a number exceeds all before it, the
# maximum takes a step up and the sum is scaled down before the new term, 1, is added: the curve may fall there or still
# rise. At the end both are what the safe softmax computes.

figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 4.4), sharex=True, layout="constrained")
figure.suptitle("The online softmax of one row: each new maximum rescales the sum")
seen = range(1, len(row) + 1)
top.plot(seen, row, "o", color="#999999", markersize=4, label="$x_k$")
top.step(seen, [m for m, _ in history], where="post", color="#0072B2", label="running maximum $m_k$")
top.set_ylabel("value")
top.legend(loc="lower right")
bottom.step(seen, [s for _, s in history], where="post", color="#D55E00", label="running sum $s_k$")
bottom.axhline(safe_s, color="#009E73", linestyle="--", label="sum of the safe softmax")
bottom.set(xlabel="numbers seen", ylabel="sum (no unit)")
bottom.legend(loc="lower right")
plt.show()

# %%
# A kernel for rows of any length
# -------------------------------
#
# In the kernel it is not one walker but thousands. Every lane of the block keeps a maximum and a sum of its own, over
# the columns that fall to it: lane :math:`l` sees columns :math:`l`, :math:`l + B`, :math:`l + 2B` and so on, with
# :math:`B` for the length of a block. Only at the end of the row do the lanes meet. Their sums are moved to the
# common maximum by the same factor as before, and added.

# quote: triton_gallery.softmax._online_start
# quote: triton_gallery.softmax._online_update
# quote: triton_gallery.softmax._online_finish
# quote: triton_gallery.softmax._normalize
# quote: triton_gallery.softmax._softmax_online_fwd_kernel

# %%
# Its launcher starts a fixed number of programs, each of which takes one row after another.


def my_online_softmax(x, n_programs=8):
    out = torch.empty_like(x)
    n_rows, n_cols = x.shape
    grid = (min(n_rows, n_programs),)
    _softmax_online_fwd_kernel[grid](x, out, n_rows, n_cols, x.stride(0), BLOCK_COLS=1024)
    return out


x = torch.randn(41, 7811, device=DEVICE) + 100
x[7, :3000] = -math.inf  # two blocks with nothing in them, and a part of the third
torch.testing.assert_close(my_online_softmax(x), torch.softmax(x, dim=1))

# %%
# Both walks can be seen in a trace of one program, here on a single row of 100 numbers in blocks of 16. This time we
# ask for variables, too: `watch` names those whose value is recorded whenever it changes.

x = torch.linspace(-2, 2, 100, device=DEVICE)[None] + torch.randn(1, 100, device=DEVICE)
out = torch.empty_like(x)
trace = tg.trace(_softmax_online_fwd_kernel, (1,), x, out, *x.shape, 100, BLOCK_COLS=16, watch=("m", "row_max"))
torch.testing.assert_close(out, torch.softmax(x, dim=1))
maxima = np.array([m for _, m in trace.watched["m"]][-7:])  # one row for each block of the first walk
(_, row_max), *_ = trace.watched["row_max"]
assert maxima.max() == row_max == x.max().item()

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), layout="constrained")
figure.suptitle("The online kernel on one row: two walks, and a running maximum for each of 16 lanes")
for step, access in enumerate(trace.accesses):
    color = "#D55E00" if access.kind == "store" else "#0072B2" if step < 7 else "#56B4E9"
    left.barh([step] * len(access.hits), 1, left=access.hits, color=color, edgecolor="white", linewidth=0.3)
left.set(title="what is touched when", xlabel="column", ylabel="load or store, in order of time")
left.set(yticks=range(0, 21, 5), ylim=(21, -1))
for place, (label, color) in enumerate((("first walk", "#0072B2"), ("second", "#56B4E9"), ("store", "#D55E00"))):
    left.text(99, 0.5 + 1.5 * place, label, color=color, ha="right", weight="bold")
right.step(range(1, 8), maxima, where="post", color="#0072B2", linewidth=1, alpha=0.6)
right.axhline(row_max.item(), color="#D55E00", linestyle="--", label="row_max, where the lanes meet")
right.set(title="m, lane by lane", xlabel="blocks seen", ylabel="running maximum (as x, no unit)")
right.legend(loc="upper left")
right.set_ylim(top=row_max * 1.3)
plt.show()

# %%
# On the left, time runs down. The first walk only loads. The second loads the same blocks again, which is what the L2
# cache has to answer, and stores each of them at once. On the right are the sixteen running maxima. None of them falls,
# and none looks at its neighbours: lanes need no communication until the dashed line, where `_online_finish` takes the
# largest.

# %%
# How it differs from the Python loop
# -----------------------------------
#
# - `_online_update` takes one exponential where the formula has two. The new maximum is the old one or :math:`x_k`,
#   so one of the two exponents is 0, and the other is minus the distance: :math:`-|x_k - m_{k-1}|`. `tl.where` puts
#   the result where it belongs.
# - `_online_start` begins with the lowest finite number and not with :math:`-\infty`. A mask may fill whole blocks
#   with :math:`-\infty`, and :math:`-\infty - (-\infty)` is not 0 but NaN, which no later number would heal. Row 7
#   above is there to try it.
# - `eviction_policy` is a wish to the caches, of which the L2 cache, which all programs share, matters here.
#   `evict_last` in the first walk says: keep this, we come back for it. `evict_first` in the second says: drop this
#   first. Where rows are aligned, the compiler makes asynchronous copies of these loads: copies to shared memory, which
#   nobody waits for until the numbers are needed. There Triton 3.6 and 3.7 drop the wish. What helps in any case is
#   that few rows are under way: as long as all of them fit into the cache, the second walk costs a wait but no trip,
#   and memory sees two again. An A100's multiprocessor has room for two programs of this kernel in float16, as a
#   section below counts. Where the rows of so many would push each other out, the library starts one for each
#   multiprocessor, and lets it loop (but not on Hopper, the generation of the H100 and the H200; that section tells
#   why).
# - `tl.range(..., num_stages=4)` has four *stages*: while one block is computed, the next three are on their way, so
#   that memory need not wait for arithmetic. (The column *stages* of the tables is what the launch asks for, for loops
#   that name no number of their own.)
# - `row` is a 64-bit number, and so are the products with it.
# - `cache_modifier=".cs"` says of the result that nobody reads it soon, so that it need not take the place of rows in
#   the caches.
#
# This walk is the heart of flash attention: page six carries a third running value along, the output itself.

# %%
# A row that waits on the chip
# ----------------------------
#
# (This section is about Hopper, but for the paragraph on *unaligned* rows and *vectors*, which later sections need. A
# first reading may skip the rest.)
#
# The L2 cache is a hope: it keeps a row for the second walk if nothing else needs the room. There is a surer place.
# Each multiprocessor of Hopper (the H100 and the H200) has 228 KiB of *shared memory*, of which a program may have 227,
# to fill and to empty as it likes: room for 116,000 float16 numbers. `tl` uses it behind the scenes and has no words
# for it. Gluon, the lower-level language that Triton's compiler offers beside it, has some, and the library's kernel
# for long rows on Hopper (`hopper/softmax.py`) is written in it.
#
# That kernel cuts a row into chunks of 1 to 4 KiB and starts the copies of all of them into shared memory at once. When
# they have arrived, it folds them into the running statistics, as above: `m` and `s` once more, for each thread. Then
# it walks along the chunks a second time, in shared memory, and writes the result. So no number crosses the chip's
# border more often than once in and once out. The programs are small, and a multiprocessor holds many: while some wait
# or reckon, the copies of others are under way.
#
# A row whose length is no multiple of 8 (of 4 in float32) begins anywhere; we call such lengths *unaligned*. But 16
# bytes at once, from here on a *vector*, have to begin at a multiple of 16. This kernel reads from the start of the
# *cache line* in which the row begins, the 128 bytes that a cache keeps together, and leaves out what belongs to the
# row before. So all its copies are 16 bytes wide, and the 512 bytes that a warp copies at once are four whole lines,
# not three and parts of two. Its stores are 16 bytes wide, too, but for both ends of a row. Such rows of 16 bits that
# do not take this kernel, shorter ones and those on other GPUs, have one in `tl` that does much the same, if not even 2
# divides their length: from 1025 to 5113 numbers, and from 192 to 1024 where the matrix has 6 MiB or more. Page five
# explains how. The others are loaded 4 or 2 numbers at a time where that divides the length, and number by number where
# it does not.
#
# Rows of up to 52 KiB have a program each, and a multiprocessor has room for at least four. All longer rows that come
# here are cut into parts of up to 12 KiB, or 16 KiB where there would be too many of them; and of somewhat less where
# that makes all parts a number of whole chunks, so that no thread has to ask where its part ends. All parts of a row
# work at the same time. They meet in the middle of their work, which a section below is about.

# %%
# A row in blocks
# ---------------
#
# The tile of the safe kernel has the next power of two of columns. A row of 5120 gets 8192 lanes. Three eighths of them
# hold nothing, and take registers and instructions like the others. So from 1025 columns on the library cuts a row into
# blocks, all full but the last.

# quote: triton_gallery.softmax._softmax_fwd_blocks_kernel

# %%
# `tl.static_range` is a loop that the compiler writes out, and `blocks` a Python tuple that grows in it: each block is
# a value of its own, in registers of its own. The lanes meet twice for each row, however many blocks there are, for the
# maximum and for the sum; until then each looks at its own column of the blocks alone. What waits in between are the
# exponentials, a register each. (The numbers as they were loaded would take half a register each in float16, and a
# second exponential. But where the text asks for that, the compiler sees that both exponentials are equal, and computes
# one.)


def my_softmax_in_blocks(x):
    out = torch.empty_like(x)
    n_rows, n_cols = x.shape
    # Whoever changes one 1024 changes both: only the last block has a mask.
    meta = {"N_BLOCKS": triton.cdiv(n_cols, 1024), "BLOCK_COLS": 1024}
    _softmax_fwd_blocks_kernel[(n_rows,)](x, out, n_cols, x.stride(0), **meta)
    return out


x = torch.randn(7, 2781, device=DEVICE) + 100
torch.testing.assert_close(my_softmax_in_blocks(x), torch.softmax(x, dim=1))

# %%
# From kernels to a function
# --------------------------
#
# `triton_gallery.softmax` chooses. Rows of up to 32768 columns, 16384 in float64 and 49152 of 16 bits that can be
# loaded four at a time, stay in registers, from 1025 on in blocks; longer ones take the online kernel. On Hopper the
# kernel with the chunks takes the place of both for most long rows. (`supported_rows` in `hopper/softmax.py` has the
# rule.) Other kernels serve rows that are not dense, as the classes of an image's pixels are not, or that lie at uneven
# distances, and rows that are few and long. Sections below tell of them.

images = torch.randn(2, 21, 9, 11, device=DEVICE, dtype=torch.float16)
scores = tg.softmax(images, dim=1, dtype=torch.float32)  # class probabilities of each pixel
torch.testing.assert_close(scores, torch.softmax(images, dim=1, dtype=torch.float32))
torch.testing.assert_close(tg.log_softmax(images, dim=1), torch.log_softmax(images, dim=1))

try:
    tg.softmax(images, dim=4)
except ValueError as error:
    print("ValueError:", error)

# %%
# Which kernels a call takes we can ask without the GPU in question, as a compiler is enough to answer (more of that
# further down). For float16, on an A100 and on an H200:

shapes = (4096, 1024), (4096, 1025), (4096, 4096), (4096, 20000), (4096, 65536), (4, 65536)
for shape in shapes:
    x_meta = torch.empty(shape, dtype=torch.float16, device="meta")
    kernels = tg.codegen.inspect(tg.softmax, x_meta, targets=["sm_80", "sm_90"]).kernels
    for gpu, target in (("A100", "sm_80"), ("H200", "sm_90")):
        names = [kernel.name for kernel in kernels if kernel.target == target]
        print(f"{shape} {gpu}: {', '.join(names)}")

# %%
# The gradient is fused as well. With :math:`y` for the result, an :math:`x_i` acts on every :math:`y_j` of its row: on
# :math:`y_i` by its own exponential, and on all of them by the sum. Together it is :math:`\partial y_j / \partial x_i =
# y_j (\delta_{ij} - y_i)`, where :math:`\delta_{ij}` is 1 for :math:`i = j` and else 0. Multiplied with :math:`dy_j`,
# which arrives from above, and summed over :math:`j`, it becomes
#
# .. math:: dx_i = y_i \left( dy_i - \sum_j dy_j \, y_j \right)
#
# That is a reduction over the row and a pass over its elements, so its kernels look like those above: they read
# :math:`y` and :math:`dy` and write :math:`dx`, three trips in all, up to 16384 columns (8192 in float64), and up to
# 32768 of float16 and bfloat16 where all rows begin at a multiple of 8 bytes: their numbers wait for the sum as they
# were loaded, two in a register. On Hopper longer rows wait in parts on several multiprocessors, if there are two or
# more of them. Others are read twice, the second time from the L2 cache while they fit there. (Rows of an odd length,
# and some others on Hopper, have kernels of their own, of which the measurement below tells.) Only :math:`y` has to be
# kept for it, not :math:`x`.
#
# For :math:`y = \log \text{softmax}(x)` it is :math:`\partial y_j / \partial x_i = \delta_{ij} - e^{y_i}`, and so
#
# .. math:: dx_i = dy_i - e^{y_i} \sum_j dy_j
#
# The sum needs no :math:`y`, and :math:`y` is again all that has to be kept. A classifier's loss is :math:`-y_t` of the
# right class :math:`t`, the *cross-entropy*. Then :math:`dy` is -1 at :math:`t` and 0 elsewhere, and :math:`dx` is the
# softmax, less 1 at :math:`t`.
#
# This is the kernel for rows of up to 2048 columns, of both functions:

# quote: triton_gallery.softmax._summand
# quote: triton_gallery.softmax._gradient
# quote: triton_gallery.softmax._softmax_bwd_kernel

# %%
# We launch it with one row to a program. (Page one shows how a function of one's own tells torch its gradient.)


def my_softmax_backward(y, dy):
    dx = torch.empty_like(y)
    _softmax_bwd_kernel[(y.shape[0],)](
        y, dy, dx, *y.shape, y.stride(0), dy.stride(0),
        BLOCK_ROWS=1, BLOCK_COLS=triton.next_power_of_2(y.shape[1]), ALIGN=1, IS_LOG=False, STATS_DTYPE=tl.float32,
    )  # fmt: skip
    return dx


x = torch.randn(6, 781, device=DEVICE, requires_grad=True)
dy = torch.randn_like(x)
y = tg.softmax(x)
(dx,) = torch.autograd.grad(y, x, dy)
torch.testing.assert_close(dx, my_softmax_backward(y.detach(), dy))
torch.testing.assert_close(dx, y * (dy - (dy * y).sum(dim=1, keepdim=True)))
torch.testing.assert_close(dx, torch.autograd.grad(torch.softmax(x, dim=1), x, dy)[0])
(dx,) = torch.autograd.grad(tg.log_softmax(x), x, dy)
torch.testing.assert_close(dx, dy - y * dy.sum(dim=1, keepdim=True))
torch.testing.assert_close(dx, torch.autograd.grad(torch.log_softmax(x, dim=1), x, dy)[0])

# %%
# How close to the limit?
# -----------------------
#
# We give every provider 4096 rows, in float16, from 256 columns to 131072, with four lengths in between that are no
# powers of two. All of them are credited with the two trips that nobody can do without. The unfused version is the one
# from the top of this page; it shows what five kernels cost. torch's own softmax is fused, too, and `torch.compile`
# writes its own.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[256, 512, 781, 1024, 2048, 3905, 4096, 8192, 16384, 16401, 32768, 41393, 65536, 131072],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile", "unfused"],
        line_names=["triton_gallery", "torch", "torch.compile", "unfused"],
        xlabel="row length N",
        ylabel="GB/s",
        plot_name="softmax-fp16",
        args={"M": 4096},
    ),
    title="Softmax of 4096 rows, float16",
    limit="copy",
)
def bench_softmax(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.float16)
    compiled = torch.compile(torch.softmax, dynamic=False)
    softmax = {
        "triton_gallery": lambda: tg.softmax(x, dim=1),
        "torch": lambda: torch.softmax(x, dim=1),
        "torch.compile": lambda: compiled(x, dim=1),
        "unfused": lambda: unfused_softmax(x),
    }[provider]
    return tg.benchmark.gbps(2 * x.nbytes, tg.benchmark.measure(softmax))


report = bench_softmax.run()

# %%

report.plot()

# %%

report

# %%
# The gradient has three trips to be credited with, two readings and one writing. We run the forward pass once, keep its
# graph, and time `torch.autograd.grad` on it.

# A compiled backward pass may overwrite what the forward pass saved; then the graph could be used only once.
import torch._functorch.config

torch._functorch.config.donated_buffer = False


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[256, 781, 1024, 2048, 3905, 4096, 8192, 12000, 16384, 20000, 32768, 65536],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile"],
        line_names=["triton_gallery", "torch", "torch.compile"],
        xlabel="row length N",
        ylabel="GB/s",
        plot_name="softmax-bwd-fp16",
        args={"M": 4096},
    ),
    title="Softmax of 4096 rows, backward pass, float16",
    limit="copy",
)
def bench_softmax_backward(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.float16, requires_grad=True)
    compiled = torch.compile(torch.softmax, dynamic=False)
    softmax = {"triton_gallery": tg.softmax, "torch": torch.softmax, "torch.compile": compiled}[provider]
    y, dy = softmax(x, dim=1), torch.randn_like(x)
    times = tg.benchmark.measure(lambda: torch.autograd.grad(y, x, dy, retain_graph=True))
    return tg.benchmark.gbps(3 * x.nbytes, times)


report_backward = bench_softmax_backward.run()

# %%

report_backward.plot()

# %%

report_backward

# %%
# On an H200 we are ahead of both where the length is no power of two. At the powers from 1024 to 32768 the rate of
# `torch.compile` jumps up: at 1024 columns we are at
# :measured:`softmax-bwd-fp16: triton_gallery / torch.compile at 1024` of its rate, at 2048 at
# :measured:`softmax-bwd-fp16: triton_gallery / torch.compile at 2048`, at 4096 at
# :measured:`softmax-bwd-fp16: triton_gallery / torch.compile at 4096`, at 8192 at
# :measured:`softmax-bwd-fp16: triton_gallery / torch.compile at 8192`, at 16384 at
# :measured:`softmax-bwd-fp16: triton_gallery / torch.compile at 16384` and at 32768 at
# :measured:`softmax-bwd-fp16: triton_gallery / torch.compile at 32768`.
#
# Up to 14336 columns ours has a row in registers until it knows the sum; from 2048 on `torch.compile` has kernels that
# walk a row twice, and the second walk finds it in a cache. How can two walks be quicker than one? The loads of the
# first carry the hint `evict_last`. When we gave ours the hint, although they read nothing twice, they were about as
# quick. Then we let the last flush before each call read memory instead of writing zeros to it. Now, up to 12288
# columns, neither the hint nor a second walk gained anything to speak of. So at these lengths the lead of
# `torch.compile` comes from the flush. We think that is because it leaves the cache full of zeros that are still to be
# written to memory: the guide's chapter *What makes a kernel fast* has a section on how cold a cache is. Where kernels
# run one after the other, as in a program, the hint gained next to nothing, and at some sizes it slowed the kernel that
# reads what the one before wrote. So these kernels do without.
#
# From 14337 to 24576 columns two walks are quicker whatever the flush leaves. A row that waits takes so many registers
# there that a multiprocessor has room for few threads. A thread that keeps nothing but its sum needs so few that there
# can be 2048 of them, as many as a multiprocessor takes, and the more of them wait for memory, the more of it is on its
# way. So here ours walks twice as well (`_softmax_bwd_twice_kernel`), the second time mostly along what its own
# multiprocessor keeps in its *L1 cache*, and again from 32769 to 49152. (It does so on Hopper, with 16-bit rows that
# all begin at a multiple of 8 bytes, if they are more than the multiprocessors.) In between, 32768 columns included,
# one walk was the quicker one. No record holds these trials, nor those of the paragraph before.
#
# Rows of an odd length are moved in whole vectors, as they are forward, and walked once
# (`_softmax_bwd_unaligned_kernel`): 16-bit rows from 192 to 24569 numbers, where the matrix has 6 MiB or more. Backward
# a vector waits in four registers, as it came, not in eight. So a thread can hold up to 12 of each input, and four
# warps are enough for a row of 12281 numbers. At 3905 columns we reach :measured:`softmax-bwd-fp16: triton_gallery /
# copy of as many bytes at 3905` of a copy's rate, at 4096 :measured:`softmax-bwd-fp16: triton_gallery / copy of as many
# bytes at 4096`.
#
# Longer rows lie in parts on several multiprocessors, as they do forward. At 65536 we reach
# :measured:`softmax-bwd-fp16: triton_gallery / copy of as many bytes at 65536` of a copy's rate. There `torch.compile`
# has :measured:`softmax-bwd-fp16: torch.compile / copy of as many bytes at 65536`, which is about what five trips
# leave: both inputs read twice.
#
# A language model ends in a row of scores for each token, as long as its vocabulary, and its loss is a `log_softmax` of
# that row. These are 4096 tokens in bfloat16, forward and backward, five trips together: the vocabularies of Llama 2,
# GPT-2 (whose length is odd), Llama 3, Qwen 2.5 and Gemma.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[32000, 50257, 128256, 152064, 256000],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile"],
        line_names=["triton_gallery", "torch", "torch.compile"],
        xlabel="row length N",
        ylabel="GB/s",
        plot_name="softmax-log-fwd-bwd-bf16",
        args={"M": 4096},
    ),
    title="Logarithm of the softmax of 4096 rows, both passes, bfloat16",
    limit="copy",
)
def bench_log_softmax(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(torch.log_softmax, dynamic=False)
    log_softmax = {"triton_gallery": tg.log_softmax, "torch": torch.log_softmax, "torch.compile": compiled}[provider]
    dy = torch.randn_like(x)
    times = tg.benchmark.measure(lambda: torch.autograd.grad(log_softmax(x, dim=1), x, dy))
    return tg.benchmark.gbps(5 * x.nbytes, times)


report_log = bench_log_softmax.run()

# %%

report_log.plot()

# %%

report_log

# %%
# At the shortest vocabulary we run at :measured:`softmax-log-fwd-bwd-bf16: triton_gallery / peers at 32000` the rate of
# the faster of the two others, and at the longest at :measured:`softmax-log-fwd-bwd-bf16: triton_gallery / peers at
# 256000`. With the odd length each row begins somewhere else in its vectors. It is at
# :measured:`softmax-log-fwd-bwd-bf16: triton_gallery / copy of as many bytes at 50257` of a copy's rate. Its rows lie
# in parts both ways. So do those of the next longer one, 128256, which is at :measured:`softmax-log-fwd-bwd-bf16:
# triton_gallery / copy of as many bytes at 128256`; those of 32000 wait in registers backward, and it is at
# :measured:`softmax-log-fwd-bwd-bf16: triton_gallery / copy of as many bytes at 32000`.

# %%
# Eight trips, three trips, two
# -----------------------------
#
# Between the unfused version and the library's stand the kernels of this page. We know how many trips to memory each
# of them makes, so we can say before measuring what share of a copy's rate it can reach. A copy makes two.
#
# - *Unfused*: eight trips, so a quarter of the rate.
# - *Naive, row in registers*: two trips, all of the rate. But it overflows.
# - *Safe, row in registers*: two trips as well. The maximum costs a reduction in registers and not a single byte, so
#   this curve should lie on the naive one. With 128 threads, a row of 32768 columns is 256 numbers for each of them,
#   and a thread has 255 registers at most. The compiler spills there, and we leave longer rows out.
# - *Safe, in blocks*: the same trips. At 5120 and 12288 columns, no powers of two, no lane is idle.
# - *Online, two walks*: two readings and one writing, if each row has a program of its own. Then about a thousand rows
#   are under way together: a thread of this kernel takes some 55 registers, so that a multiprocessor has room for nine
#   programs of 128 threads. Short ones wait in the L2 cache for their second walk; long ones have left it when the walk
#   comes back. Three trips, two thirds of the rate.
# - *The library's*: two trips again, as long as the chip has room for a row.
#
# First each of them has to agree with torch, in float16. The tolerance is for the unfused version, which rounds to
# float16 after every step; the others do so once.

rungs = {
    "unfused": unfused_softmax,
    "naive, row in registers": naive_softmax,
    "safe, row in registers": my_softmax,
    "safe, in blocks": my_softmax_in_blocks,
    "online, two walks": lambda x: my_online_softmax(x, n_programs=len(x)),
    "triton_gallery": lambda x: tg.softmax(x, dim=1),
}
x = torch.randn(23, 2781, device=DEVICE, dtype=torch.float16)
for rung in rungs.values():
    torch.testing.assert_close(rung(x), torch.softmax(x, dim=1), rtol=1e-2, atol=1e-7)


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 4096, 5120, 12288, 16384, 32768, 65536, 131072],
        x_log=True,
        line_arg="provider",
        line_vals=list(rungs),
        line_names=list(rungs),
        xlabel="row length N",
        ylabel="GB/s",
        plot_name="softmax-ladder-fp16",
        args={"M": 4096},
    ),
    title="Softmax of 4096 rows, step by step, float16",
    limit="copy",
)
def bench_softmax_ladder(M, N, provider):
    if provider.startswith(("naive", "safe")) and N > 32768:
        return None
    x = torch.randn(M, N, device=DEVICE, dtype=torch.float16)
    return tg.benchmark.gbps(2 * x.nbytes, tg.benchmark.measure(lambda: rungs[provider](x)))


ladder = bench_softmax_ladder.run()

# %%

ladder.plot()

# %%

ladder

# %%
# Where rows are long, the trips explain most of the chart. The great step is the first, to fuse at all: eight trips
# become two. None of the others can win as much, and each of them mends what the one before leaves open. The maximum
# makes the result right for all numbers. The online walk takes rows that no registers can hold, and pays with a third
# trip: at 65536 columns it reaches :measured:`softmax-ladder-fp16: online, two walks / limit at 65536` of a copy's
# rate. The library saves that trip again, because it keeps a row where the second walk finds it, and reaches
# :measured:`softmax-ladder-fp16: triton_gallery / limit at 65536`.
#
# At 5120 columns blocks without idle lanes are worth little, :measured:`softmax-ladder-fp16: safe, in blocks / safe,
# row in registers at 5120`: there are registers for the idle ones, too. At 12288 they are worth
# :measured:`softmax-ladder-fp16: safe, in blocks / safe, row in registers at 12288`. At 32768 they have too few
# threads: with 128 of them this rung spills. The library has these rows in parts, and is
# :measured:`softmax-ladder-fp16: triton_gallery / safe, in blocks at 32768` as fast.
#
# Three expectations were wrong. The unfused version stays at :measured:`softmax-ladder-fp16: unfused / limit at 131072`
# of a copy's rate at the right end, where eight trips leave a quarter. Timed one by one on an H200, two of its five
# operations are why: the subtraction and the division take a column beside the matrix, one number for each row, and
# torch's kernel for that reached two fifths of a copy's rate. (The maximum, which comes with its place, reached three
# fifths, and the other two nearly all.) And at 4096 columns the naive curve and the safe one do meet; at 16384 the
# naive kernel reaches :measured:`softmax-ladder-fp16: naive, row in registers / safe, row in registers at 16384` the
# other's rate, although it takes no maximum. But it takes `tl.exp`, which in machine code is three instructions more
# for each number than the `_exp` of a 16-bit result, and it divides each number by the sum, which is two more than the
# product by a reciprocal that is taken once in a row. Of programs of 128 threads with so many registers each, a
# multiprocessor has room for few, and there is little for the instructions to hide behind. All in all it has a third
# more of them. Whether that explains the whole difference, we have not measured.
#
# And short rows do stay in the L2 cache for their second walk, but the online kernel does not gain from it what we
# expected: at 4096 columns it reaches
# :measured:`softmax-ladder-fp16: online, two walks / safe, row in registers at 4096` the safe kernel's rate. The
# second walk cannot begin before the first has ended, and costs a wait of its own.

# %%
# Fusing moves the point to the right
# -----------------------------------
#
# A softmax takes about five operations for a number: a comparison, a subtraction, an exponential, an addition and a
# product. Fused, these share two trips of two bytes, an intensity of 5/4. Unfused they share eight trips, 5/16. Both
# are far to the left of the ridge, where memory sets the time, so the roof above the unfused version is four times
# lower. (The flat roof is that of the matrix unit, which a softmax cannot use. The nearest roof of its own is that of
# exponentials: a multiprocessor takes 16 in a clock cycle, which is some four times as many as memory delivers numbers
# for.)

ops = 5 / 4 / 1000  # of a rate in GB/s, which credits everyone with two trips, makes one in TFLOP/s
ours, unfused = report.series("triton_gallery"), report.series("unfused")
points = {f"fused, N = {N}": (5 / 4, ours[N] * ops) for N in (256, 1024, 8192)}
tg.benchmark.roofline(report, points | {"unfused, N = 8192": (5 / 16, unfused[8192] * ops)})

# %%
# The unfused point has a distance to its roof as well, and it would not help to close it: the roof there is lower than
# the fused point of the same length. One can make five kernels better and better, and lose to one that moves less.

# %%
# Rows that lie across memory
# ---------------------------
#
# So far the numbers of a row were neighbours in memory. Along the first of two dimensions they are not: one number of
# each row lies next to that of the next row, and the row itself runs across memory in long strides. The classes of an
# image's pixels lie so, and the scores of attention heads, if one asks along the heads. To copy the matrix into a
# better order, and the result back, would cost four more trips. A tile makes that needless: if a program loads *many*
# rows side by side, what it reads at once is as dense as in any other kernel. Only the reduction runs along the other
# axis, and every number's place takes some arithmetic, since the rows may be spread over several dimensions:

# quote: triton_gallery.softmax._row_offsets
# quote: triton_gallery.softmax._softmax_strided_fwd_kernel

# %%
# Besides memory, two things decide how fast this is.
#
# - `INDEX_DTYPE`: a division of 64-bit integers takes several times as many instructions as one of 32-bit integers, and
#   there is one for each dimension of rows but the last: none in a matrix, one in a batch of images. So rows are
#   numbered in 32 bits where there are fewer than :math:`2^{31}`.
# - The shape of the tile. Memory is read in pieces as long as the tile is wide: 16 rows of float16 are 32 bytes, the
#   least that memory hands out, and 64 rows a cache line. So a tile should be wide. It should be high as well, as all
#   columns of its rows have to wait in registers, up to 64 numbers in each thread: eight blocks of eight. So 64 columns
#   take tiles of 64 rows and two warps, and 2048 columns tiles of 16 rows and 16 warps. Few columns need few warps,
#   which have less to tell each other; with up to 32 of them a single warp has a tile for itself.
#
# The sweep keeps the number of elements at :math:`2^{24}`, or close to it, and goes from 8 columns to 65536. Beyond
# 2048 columns rows are cut into parts, as in the next section.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["N", "M"],
        x_vals=[(8, 2097152), (21, 786432), (64, 262144), (256, 65536), (1024, 16384), (4096, 4096), (65536, 256)],
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile"],
        line_names=["triton_gallery", "torch", "torch.compile"],
        xlabel="columns × rows",
        ylabel="GB/s",
        plot_name="softmax-across-fp16",
        args={},
    ),
    title="Softmax along the first dimension, float16",
    limit="copy",
)
def bench_softmax_across(N, M, provider):
    x = torch.randn(N, M, device=DEVICE, dtype=torch.float16)
    compiled = torch.compile(torch.softmax, dynamic=False)
    softmax = {
        "triton_gallery": lambda: tg.softmax(x, dim=0),
        "torch": lambda: torch.softmax(x, dim=0),
        "torch.compile": lambda: compiled(x, dim=0),
    }[provider]
    return tg.benchmark.gbps(2 * x.nbytes, tg.benchmark.measure(softmax))


report_across = bench_softmax_across.run()

# %%

report_across.plot()

# %%

report_across

# %%
# At 21 columns, as many as a well-known set of photographs has classes, we reach
# :measured:`softmax-across-fp16: triton_gallery / torch at 21×786432` torch's rate, and at 65536 columns
# :measured:`softmax-across-fp16: triton_gallery / torch at 65536×256`, as torch is left with
# :measured:`softmax-across-fp16: torch at 65536×256` there. That is no measure of us. A copy of as many bytes is: with
# 8, 21 and 64 columns we stay close to it, at
# :measured:`softmax-across-fp16: triton_gallery / copy of as many bytes at 8×2097152`,
# :measured:`softmax-across-fp16: triton_gallery / copy of as many bytes at 21×786432` and
# :measured:`softmax-across-fp16: triton_gallery / copy of as many bytes at 64×262144` of its rate. Then tiles become
# narrow, and we fall behind: :measured:`softmax-across-fp16: triton_gallery / copy of as many bytes at 1024×16384` at
# 1024 columns. The last two shapes have rows in parts. They are read twice, take two launches, and reach
# :measured:`softmax-across-fp16: triton_gallery / copy of as many bytes at 4096×4096` and
# :measured:`softmax-across-fp16: triton_gallery / copy of as many bytes at 65536×256`. Of the ways for rows to lie in
# memory that this page measures, across it is the one that we serve worst.
#
# `torch.compile` is the one to beat here. In float16, a tile of 8 rows would use 16 bytes of each 32 that memory hands
# out, so ours has 16 or more where there are more than 8 rows. What else decides, we have not measured. At 1024 columns
# we run at :measured:`softmax-across-fp16: triton_gallery / torch.compile at 1024×16384` its rate, with 21 at
# :measured:`softmax-across-fp16: triton_gallery / torch.compile at 21×786432`, and in parts at
# :measured:`softmax-across-fp16: triton_gallery / torch.compile at 4096×4096` and :measured:`softmax-across-fp16:
# triton_gallery / torch.compile at 65536×256`.

# %%
# Many short rows, and few long ones
# ----------------------------------
#
# The matrices of the first sweep all have 4096 rows. A program owns whole rows, so their number and length decide how
# much work there is for a program, and for how many programs. Two more sweeps go to the ends. In the first one rows are
# short and many: 131072 of them, as when a router picks experts for each token of a batch, or attention looks at a
# small window.
#
# What should we expect? A program of the library takes 1024 numbers there, whatever the length: 32 rows of 32 numbers,
# or a single one of 1024. A thread loads eight numbers at once, so four threads hold a row of 32, and a warp has to
# exchange registers only among these four. (With one row in each program most threads would have nothing to do.)
# Memory still sees two trips. The shorter the rows, the more the launch weighs: at 32 columns the matrix has 8 MiB,
# which a GPU moves in a few microseconds.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[32, 64, 128, 256, 512, 1024],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile"],
        line_names=["triton_gallery", "torch", "torch.compile"],
        xlabel="row length N",
        ylabel="GB/s",
        plot_name="softmax-short-fp16",
        args={"M": 131072},
    ),
    title="Softmax of 131072 short rows, float16",
    limit="copy",
)
def bench_short_softmax(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.float16)
    compiled = torch.compile(torch.softmax, dynamic=False)
    softmax = {
        "triton_gallery": lambda: tg.softmax(x, dim=1),
        "torch": lambda: torch.softmax(x, dim=1),
        "torch.compile": lambda: compiled(x, dim=1),
    }[provider]
    return tg.benchmark.gbps(2 * x.nbytes, tg.benchmark.measure(softmax))


report_short = bench_short_softmax.run()

# %%

report_short.plot()

# %%

report_short

# %%
# The library runs one kernel at all six lengths, with tiles of one size. At 1024 columns it is the kernel and the tile
# of the first sweep, with 32 times as many rows. Where the two charts differ there, it is by what starting and filling
# the GPU takes, and not by anything in the kernel: :measured:`softmax-fp16: triton_gallery / limit at 1024` of a large
# copy's rate there, :measured:`softmax-short-fp16: triton_gallery / limit at 1024` here. Towards short rows the matrix
# shrinks and what starting costs does not. A copy of as many bytes, the dotted line, has to start as well, and with it
# we are about level: :measured:`softmax-short-fp16: triton_gallery / copy of as many bytes at 32` of its rate at 32
# columns, :measured:`softmax-short-fp16: triton_gallery / copy of as many bytes at 256` at 256, and at worst
# :measured:`softmax-short-fp16: triton_gallery / copy of as many bytes at worst`. 131072 rows of 32 numbers run at
# :measured:`softmax-short-fp16: triton_gallery at 32`, and 4096 rows of 1024, which are as many numbers, at
# :measured:`softmax-fp16: triton_gallery at 1024`. That rows are short costs nothing by itself. Our lead over
# `torch.compile` is :measured:`softmax-short-fp16: triton_gallery / torch.compile at 32` at 32 columns,
# :measured:`softmax-short-fp16: triton_gallery / torch.compile at 64` at 64 and
# :measured:`softmax-short-fp16: triton_gallery / torch.compile at 128` at 128, and is about none from 256 on.

# %%
# At the other end rows are long, or few, or both, as the logits that a language model writes for the next word of each
# of a handful of users. There the plan of one program for a row meets two limits:
#
# - *Fewer rows than multiprocessors.* An H200 has 132 of them. 64 rows keep 64 of them busy, and a single row
#   one. Those that work have the memory to themselves, but each can have only so many bytes on their way at a time.
# - *Rows longer than a multiprocessor has room for.* A row of 262144 numbers takes 512 KiB, more than shared memory and
#   registers together. What has no place is read a second time, and where it is found then decides what that costs. All
#   rows under way share the L2 cache; 64 rows of 2 MiB are too much for it, and most of the second reading is a third
#   trip to memory.
#
# The way around the first limit is to cut a row into parts, each with a program of its own. A first kernel takes the
# maximum and the sum of each part, the second joins them, by the formula with which `_online_finish` joins lanes, and
# writes the result. So even a single row keeps the GPU busy. The price is a second launch, for no part can be written
# before all have been read, and a second reading of the row. A program loads `N_BLOCKS` blocks before it looks at the
# first of them: so their loads are under way together, and a lane, which meets as many numbers at a time, takes their
# maximum first and then corrects its sum once for all of them, not once for each:

# quote: triton_gallery.softmax._online_update_by_blocks
# quote: triton_gallery.softmax._softmax_parts_stats_kernel
# quote: triton_gallery.softmax._softmax_parts_fwd_kernel

# %%
# These kernels serve rows across memory, too, which is why a part belongs to a tile of rows: where rows are dense and
# evenly spaced, `BLOCK_ROWS` is 1. Parts that are not there read the lowest number and the sum 0, and change nothing.
#
# Can parts get around the second limit as well? Each part would have to stay on its multiprocessor between the two
# kernels, and nothing stays there from one launch to the next. So it must be *one* launch, in which the programs of a
# row tell each other what they have found. On Hopper the library does that, with the kernel of the chunks. Each program
# takes the maximum and the sum of its part, writes the two into memory as a single number of 64 bits, into a *mailbox*
# for each part, and reads those of all other parts, again and again until the last one has come. (Before, a small
# kernel has filled the mailboxes with NaNs that no arithmetic makes, so a message is told from none. The large kernel
# does not wait for the small one to end: its copies are under way by then.) Then every program knows the row's
# statistics and writes its part, which never left the multiprocessor (`hopper/exchange.py`). An answer takes its time,
# in which other programs of the multiprocessor work.
#
# This is easy to say, and a danger. A program that waits does not make room for another. Were some parts of a row still
# queueing for a place while the others, which have all the places, wait for them, they would do so for ever. There are
# two remedies. A *cooperative* launch starts all programs of a grid together, or fails; then there can be only as many
# programs as have room at a time, and each takes its part of one row, then the same part of another. The gradient does
# that (`hopper/softmax_backward.py`), and has the next rows' copies under way meanwhile. The forward kernel has a
# program for each part, many more than have room. GPUs start programs in the order of their numbers, and of the parts
# of one row there is room for all, so nobody should wait in vain. But this order is nobody's promise. So a program that
# has looked into the mailboxes 8192 times in vain takes the statistics of all parts itself. That is slow, and should
# never happen; there is a test that starts only some of the programs.
#
# Forward, the library takes this one launch for two rows or more of over 52 KiB, if a row has no more than four parts
# for each multiprocessor. With 16 KiB in each and 132 multiprocessors, that ends a little beyond 8 MiB. The gradient
# takes it for two rows or more that neither registers nor the kernel with two walks take, of up to a little more than 4
# MiB. (Forward, where all rows together have less than 4 MiB, it takes those of over 96 KiB, and unaligned ones of 16
# bits, and the last of them has to end at a multiple of 16 bytes.) Two launches are for these:
#
# - few rows, at most one for every two multiprocessors (66 on an H200), that neither registers nor the one launch take.
#   Up to 18 of them must have 32 KiB each; with more rows that limit grows, to 117 KiB at 66. Such rows are a single
#   one, rows of less than 4 MiB together whose last one does not end as it should, longer rows, float64, a matrix that
#   does not begin at a multiple of 16 bytes or in which the distance from a row's end to the next row is no such
#   multiple, other GPUs
# - rows across memory of more than 2048 columns, or 1024 in float64 and in the gradient
# - dense rows of more than 1024 that lie at uneven distances, as in a slice of each matrix of a batch
#
# All others take the online kernel, or one of those for rows that a multiprocessor can hold.

# %%
# Now the sweep. The third shape has 64 rows, the last a single one.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["M", "N"],
        x_vals=[(512, 131072), (256, 262144), (64, 1048576), (32, 262144), (1, 16777216)],
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile"],
        line_names=["triton_gallery", "torch", "torch.compile"],
        xlabel="rows × columns",
        ylabel="GB/s",
        plot_name="softmax-long-fp16",
        args={},
    ),
    title="Softmax of few and very long rows, float16",
    limit="copy",
)
def bench_long_softmax(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.float16)
    compiled = torch.compile(torch.softmax, dynamic=False)
    softmax = {
        "triton_gallery": lambda: tg.softmax(x, dim=1),
        "torch": lambda: torch.softmax(x, dim=1),
        "torch.compile": lambda: compiled(x, dim=1),
    }[provider]
    return tg.benchmark.gbps(2 * x.nbytes, tg.benchmark.measure(softmax))


report_long = bench_long_softmax.run()

# %%

report_long.plot()

# %%

report_long

# %%
# The first four shapes take the one launch, with 32 to 128 parts in a row. The first reaches
# :measured:`softmax-long-fp16: triton_gallery / copy of as many bytes at 512×131072` of the rate of a copy of as many
# bytes, the third :measured:`softmax-long-fp16: triton_gallery / copy of as many bytes at 64×1048576`, and the fourth,
# whose 16 MiB are over soonest, :measured:`softmax-long-fp16: triton_gallery / copy of as many bytes at 32×262144`.
# What may keep them from all of it, though we have not measured each by itself, is the launch that empties the
# mailboxes, the beginning, when nothing can be written yet, and the end, when nothing is left to read; and where a row
# has many parts, the wait for the last of them.
#
# The last shape, a single row of 32 MiB, takes the two launches, and two
# readings of which the L2 cache may answer the second. It reaches
# :measured:`softmax-long-fp16: triton_gallery / copy of as many bytes at 1×16777216` of such a copy's rate. torch gives
# a row to what Triton would call one program and is left with :measured:`softmax-long-fp16: torch at 1×16777216`.
# `torch.compile` cuts the row as well, and we run at
# :measured:`softmax-long-fp16: triton_gallery / torch.compile at 1×16777216` its rate.
#
# Last, the rows of one step of a language model that writes: one for each of the texts that it works on, each as long
# as the vocabulary. Most of these have so few bytes that, we think, starting and meeting take more time than they do.
# Both passes:


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["M", "N"],
        x_vals=[(m, n) for n in (32000, 50257, 128256) for m in (1, 8, 16, 64)],
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile"],
        line_names=["triton_gallery", "torch", "torch.compile"],
        xlabel="rows × columns",
        ylabel="GB/s",
        y_log=True,
        plot_name="softmax-few-bf16",
        args={},
    ),
    title="Softmax of one to 64 rows of a vocabulary, both passes, bfloat16",
    limit="copy",
)
def bench_few_rows(M, N, provider):
    x = torch.randn(M, N, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(torch.softmax, dynamic=False)
    softmax = {"triton_gallery": tg.softmax, "torch": torch.softmax, "torch.compile": compiled}[provider]
    dy = torch.randn_like(x)
    times = tg.benchmark.measure(lambda: torch.autograd.grad(softmax(x, dim=1), x, dy))
    return tg.benchmark.gbps(5 * x.nbytes, times)


report_few = bench_few_rows.run()

# %%

report_few.plot()

# %%

report_few

# %%
# Rows of 32000 stay in registers. Of the longer ones a single row takes two launches each way, and several take one,
# behind the small one that empties the mailboxes. We are at :measured:`softmax-few-bf16: triton_gallery / peers at
# 1×50257` the rate of the faster of the two others for one row of GPT-2's vocabulary, at :measured:`softmax-few-bf16:
# triton_gallery / peers at 64×128256` for 64 rows of Llama 3's, and nowhere below :measured:`softmax-few-bf16:
# triton_gallery / peers at worst`. A copy of as many bytes is one launch and ours are two to four. They reach between
# :measured:`softmax-few-bf16: triton_gallery / copy of as many bytes at worst` and :measured:`softmax-few-bf16:
# triton_gallery / copy of as many bytes at best` of its rate.

# %%
# What the compiler made of it
# ----------------------------
#
# At 8192 columns a program of 4 warps holds one row, in 8 blocks. A warp of NVIDIA's has 32 threads, so each thread
# holds 64 numbers; a warp of AMD's has 64, and each holds 32.

x = torch.empty(4096, 8192, dtype=torch.float16, device="meta")
tg.codegen.inspect(tg.softmax, x)

# %%
# The registers confirm the plan: they hold the row and little else, and nothing spills. Shared memory is a few bytes,
# one number from each warp. And on NVIDIA's GPUs the widest load is 128 bits, eight numbers at once, since 8192 is a
# multiple of 8; on AMD's, 256 threads share a block of 1024, four numbers each. (With 781 columns a row may begin at
# any even address, and where there are many, such rows take a kernel whose stores are narrow at both ends.) Long rows
# take another kernel: on Hopper the one with the chunks, here on 8 KiB of a row, after the small one that empties the
# mailboxes; elsewhere the online one, whose shared memory, on NVIDIA's GPUs, is a waiting room for the
# blocks that are on their way.

long_x = torch.empty(4096, 131072, dtype=torch.float16, device="meta")
long_report = tg.codegen.inspect(tg.softmax, long_x)
long_report

# %%
# From such a line of the table follows how many programs a multiprocessor can hold at a time, its *occupancy*. Its
# registers, threads and shared memory are shared out among them, and what runs out first decides. For the online kernel
# on an A100, which has 65536 registers, 2048 threads and 164 KiB of shared memory on each multiprocessor, 1 KiB of it
# taken for each program:

online = next(kernel for kernel in long_report.kernels if kernel.target == "sm_80")
threads = 32 * online.num_warps
room = {
    "registers": 65536 // (online.registers * threads),
    "threads": 2048 // threads,
    "shared memory": 164 * 1024 // (online.shared + 1024),
}
print(f"programs of {threads} threads that have room:", room)

# %%
# So programs beyond these would not run sooner, they would queue, and there are never more rows under way than those.
# The online kernel's programs loop over rows, which makes it a *persistent kernel*, so that there can be fewer: the
# library launches two for each multiprocessor, or one where their rows would push each other out of the L2 cache. (On
# Hopper it is one for each row then, whose loop ends at once: on an H200 a third trip to memory turned out to cost less
# than having few rows under way.)

# %%
# Line by line, the reductions are the ones to follow. `tl.max` is one operation in TTIR. In PTX it has become a chain
# of `max` within the thread, then `shfl`, by which the threads of a warp exchange registers, then a store to shared
# memory, a `bar.sync`, and the same again among the warps. SASS does not know from where a function was called, so it
# has all of them under "functions that it calls".

tg.codegen.listing(tg.softmax, x)

# %%
# What we saw
# -----------

for each in (report, report_backward, report_log, report_across, report_short, report_long, report_few):
    print(each.summary())

# %%
# With 4096 rows there are two regions. On the left matrices are small: starting a kernel takes longer than the work, so
# this end says more about starting than about softmax. On the right the bytes decide. Memory moves :math:`x` and the
# result and nothing else, as long as a row fits on the chip, so the rate to compare with is that of a copy. The unfused
# version can reach a quarter of the copy's rate at best, once its matrices outgrow the L2 cache: this was clear before
# anything was measured.
#
# What was not clear: at 8192 columns we reach :measured:`softmax-fp16: triton_gallery / copy of as many bytes at 8192`
# of the rate of a copy of as many bytes and :measured:`softmax-fp16: triton_gallery / peers at 8192` that of the best
# other provider, and at 65536 :measured:`softmax-fp16: triton_gallery / copy of as many bytes at 65536` and
# :measured:`softmax-fp16: triton_gallery / peers at 65536`, where a row lies in 16 parts. With 131072 columns, in 32
# parts, it is :measured:`softmax-fp16: triton_gallery / copy of as many bytes at 131072` of a copy and
# :measured:`softmax-fp16: triton_gallery / peers at 131072` of the best other provider. The gradient is the exception:
# at some powers of two `torch.compile` is ahead, and at worst ours runs at
# :measured:`softmax-bwd-fp16: triton_gallery / torch.compile at worst` its rate.
#
# Unaligned rows, which the kernel with the chunks reads by whole cache lines, lose little: with 16401 columns we
# reach :measured:`softmax-fp16: triton_gallery / copy of as many bytes at 16401` of a copy of as many bytes, with 16384
# :measured:`softmax-fp16: triton_gallery / copy of as many bytes at 16384`. At 3905 columns, moved in whole vectors by
# `tl`, it is :measured:`softmax-fp16: triton_gallery / copy of as many bytes at 3905`. The lowest share is
# :measured:`softmax-fp16: triton_gallery / copy of as many bytes at worst`, at 781 columns, in the same kernel. Rows in
# parts are at :measured:`softmax-fp16: triton_gallery / copy of as many bytes at 32768` with 32768 columns and with
# 41393 at :measured:`softmax-fp16: triton_gallery / copy of as many bytes at 41393`. Where the matrix ends
# between two multiples of 16 bytes, the kernel with the chunks leaves its last row to another one, in a launch of its
# own; that of `tl` loads this row number by number. And all of this works if a row of the result begins as far behind a
# multiple of 16 bytes as the row of the input does. Rows cut out of a wider matrix need not. Up to 32768 columns (49152
# where numbers can be loaded four at a time) these are read in blocks, longer ones by the online kernel, whose loads
# then move fewer than eight numbers at a time.

# %%
# Break it: pad with zeros
# ------------------------
#
# What if the padding reads 0, as for a sum? The exponentials of padded lanes would count, so let us suppose that
# somebody noticed this and masked them, and then was content.


@triton.jit
def zero_padded_softmax_kernel(x_ptr, out_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0)  # should be -inf
    numerator = tl.where(mask, tl.exp(x - tl.max(x)), 0.0)
    tl.store(out_ptr + row * n_cols + cols, numerator * (1 / tl.sum(numerator)), mask=mask)


def zero_padded_softmax(x):
    out = torch.empty_like(x)
    n_rows, n_cols = x.shape
    zero_padded_softmax_kernel[(n_rows,)](x, out, n_cols, BLOCK_COLS=triton.next_power_of_2(n_cols))
    return out


def check(softmax, x):
    try:
        torch.testing.assert_close(softmax(x), torch.softmax(x, dim=1))
        print("passed")
    except AssertionError as error:
        print("AssertionError:", *str(error).splitlines()[:4], sep="\n    ")


x = torch.randn(23, 781, device=DEVICE)
check(zero_padded_softmax, x)
check(zero_padded_softmax, x - 200)
check(zero_padded_softmax, (x - 200)[:, :512].contiguous())

# %%
# Random numbers around 0 pass, as among 781 of them at least one is positive, and the zeros do not win. Rows around
# -200 fail. There the maximum comes from the padding, all exponentials underflow to 0, and their sum is 0: 1 / 0 is
# infinite, and 0 times that is NaN. The same rows pass once they are 512 long, because there is no padding. So it takes
# a length that is no power of two *and* a row of large negative numbers to see the mistake. The log-likelihoods of
# whole sentences, often hundreds below zero, are such rows.
#
# Softmax offers a check that needs no reference at all. Its result does not change when a row is shifted:

for name, softmax in [("our kernel", my_softmax), ("zero-padded", zero_padded_softmax)]:
    for shift in (-1000, -200, 200, 1000):
        verdict = "unchanged" if torch.allclose(softmax(x + shift), softmax(x), rtol=1e-3) else "changed"
        print(f"{name}, shifted by {shift}: {verdict}")

# %%
# Exercises
# ---------
#
# 1. Launch `_softmax_fwd_kernel` with four rows in each program. What is the grid, and which line keeps the last
#    program from writing behind the end of a matrix of 1823 rows?
# 2. Write a kernel for the *logsumexp* :math:`m + \log s` of each row, which writes one number per row. How many bytes
#    does it move, and what does `torch.logsumexp` do with a row of :math:`-\infty`?
# 3. Let `_online_start` begin with `-float("inf")`. Which lengths of a row of random numbers now give NaN, and which do
#    not? (Hint: the padding of a block is :math:`-\infty`, too. Which lanes never see anything else?)
# 4. `my_softmax(x.t())` is wrong. Give the kernel a stride for the columns, and say why it is now right, but slow.

# %%
# Solutions
# ---------
#
# They run when this page is built, and each of them checks itself.
#
# Solution 1: four rows in each program
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# 1823 rows make 456 tiles of four, the last with three rows. `rows < n_rows`, a part of `mask`, keeps the fourth from
# being loaded and stored. The trace shows it, too: no lane is outside.

x = torch.randn(1823, 81, device=DEVICE)
out = torch.empty_like(x)
grid = (triton.cdiv(1823, 4),)
trace = tg.trace(_softmax_fwd_kernel, grid, x, out, *x.shape, x.stride(0), BLOCK_ROWS=4, BLOCK_COLS=128)
torch.testing.assert_close(out, torch.softmax(x, dim=1))
(last,) = trace.stores("out_ptr", program=455)
assert trace.n_programs == 456 and last.mask.any(axis=1).tolist() == [True, True, True, False] and not trace.outside

# %%
# Solution 2: logsumexp
# ~~~~~~~~~~~~~~~~~~~~~
#
# It reads the matrix and writes one number per row, half the bytes of a softmax. The logsumexp of a row of
# :math:`-\infty` is :math:`-\infty`, the logarithm of an empty sum. Subtracting that maximum would give NaN, so such a
# row subtracts 0.


@triton.jit
def logsumexp_kernel(x_ptr, out_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf"))
    m = tl.max(x, axis=0)
    m = tl.where(m == -float("inf"), 0.0, m)
    tl.store(out_ptr + row, m + tl.log(tl.sum(tl.exp(x - m), axis=0)))


x = torch.randn(23, 781, device=DEVICE) + 100
x[7] = -math.inf
out = torch.empty(23, device=DEVICE)
trace = tg.trace(logsumexp_kernel, (23,), x, out, 781, BLOCK_COLS=1024)
torch.testing.assert_close(out, torch.logsumexp(x, dim=1))
assert trace.bytes_loaded() == x.nbytes and trace.bytes_stored() == 23 * 4 and out[7] == -math.inf

# %%
# Solution 3: a start at minus infinity
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A lane that sees nothing but padding keeps :math:`m = -\infty`, and :math:`-\infty - (-\infty)` is NaN. In a row as
# long as the block or longer, every lane sees a number in the first round, and is safe from then on. So the rows that
# fail are those shorter than a block.


@triton.jit
def row_sum_kernel(x_ptr, sum_ptr, n_cols, START: tl.constexpr, BLOCK_COLS: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    m, s = tl.full((BLOCK_COLS,), START, tl.float32), tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        x = tl.load(x_ptr + start + cols, mask=start + cols < n_cols, other=-float("inf"))
        m, s = _online_update(m, s, x, tl.float32)
    tl.store(sum_ptr + tl.arange(0, 1), _online_finish(m, s)[1])


def row_sum(x, start):
    out = torch.empty(1, device=DEVICE)
    row_sum_kernel[(1,)](x, out, len(x), START=start, BLOCK_COLS=16)
    return out.item()


lengths = range(1, 40)
assert [n for n in lengths if math.isnan(row_sum(x[0, :n], -math.inf))] == list(range(1, 16))
assert not any(math.isnan(row_sum(x[0, :n], torch.finfo(torch.float32).min)) for n in lengths)

# %%
# Solution 4: a stride for the columns
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# `my_softmax` passes one stride, the distance of rows, and takes for granted that columns are neighbours.
# `torch.empty_like` takes over the strides of x for the result, too, so we ask for a contiguous one. With both strides
# and that it is right. It is slow because the numbers of a row now lie far apart: a warp's 32 loads of 4 bytes hit 32
# different lines of the cache, and of each 32 bytes that travel it uses 4. What saves some of the rest is that the
# programs of neighbouring rows, which run at the same time, find theirs in the L2 cache.


@triton.jit
def strided_softmax_kernel(x_ptr, out_ptr, n_cols, row_stride, col_stride, BLOCK_COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS).to(tl.int64)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * row_stride + cols * col_stride, mask=mask, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * n_cols + cols, numerator / tl.sum(numerator, axis=0), mask=mask)


x = torch.randn(81, 37, device=DEVICE).t()
out = torch.empty(x.shape, device=DEVICE)
strided_softmax_kernel[(37,)](x, out, 81, *x.stride(), BLOCK_COLS=128)
torch.testing.assert_close(out, torch.softmax(x, dim=1))
assert not torch.allclose(my_softmax(x), out)

# %%
# References
# ----------
#
# The guide's chapter *Related work* lists these works among its own.
#
# - :cite:`milakov2018online`: one walk for both statistics.
# - :cite:`blanchard2021softmax`: what subtracting the maximum does to rounding errors.
# - :cite:`dao2022flash`: where the online softmax leads.

# %%
# Where this page ran
# -------------------

print(tg.benchmark.environment())

# sphinx_gallery_thumbnail_number = 4
