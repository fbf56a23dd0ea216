"""
Low-memory dropout
==================

We drop elements at random and store no mask: the backward pass draws the same random numbers a second time.

You will learn:

- what a stored mask costs in bytes, in time and in memory that stays occupied
- how a random generator without state works, and why it suits programs that run in any order
- how to turn a probability into a comparison of integers
- which test notices a mask that repeats
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
# A mask is a third passenger
# ---------------------------
#
# Dropout sets each element to zero with probability :math:`p` and scales the others, so that the sum keeps its
# expectation:
#
# .. math::
#    \text{out}_i = \begin{cases} x_i / (1 - p) & u_i \ge p \\ 0 & u_i < p \end{cases}
#    \qquad u_i \text{ uniform in } [0, 1)
#
# A network that is trained like this must not rely on any single number. When it is used, nothing is dropped, and
# thanks to the scale the next layer meets sums of the size that it was trained on.
#
# The gradient of dropout is the same operation with the same :math:`u_i`: where :math:`x_i` was dropped, no gradient
# flows. The usual way to remember which ones those are is a mask, one byte per element, written by the forward and read
# by the backward pass. We count bytes for each element of :math:`s` bytes:
#
# - forward: read :math:`x`, write :math:`\text{out}` (:math:`2s`), and write the mask (1)
# - backward: read the incoming gradient, write the outgoing one (:math:`2s`), and read the mask (1)
#
# Memory is what limits such an operation, as in the addition of page one, so bytes are time: in float16 each pass moves
# 5 bytes with the mask and 4 without it, a quarter more. It costs something else as well. Between the two passes it
# occupies memory, one byte per element and layer, exactly when a training step needs all the memory it can get.

for dtype in (torch.float32, torch.float16):
    s = dtype.itemsize
    print(f"{dtype}: {2 * s} bytes per element and pass without a mask, {2 * s + 1} with: {(2 * s + 1) / (2 * s):.3f}×")

# %%
# In torch this takes four lines. Each of them is a kernel that writes a tensor to memory, and all but the first read
# what the ones before have written. The comments count the bytes for each element.


def dropout_in_steps(x, p):
    u = torch.rand(x.shape, device=x.device)  # writes 4: float32
    keep = u >= p  # reads 4, writes 1
    kept = x * keep  # reads s + 1, writes s
    return kept / (1 - p)  # reads s, writes s


x = torch.randn(10007, device=DEVICE)
torch.manual_seed(1)
out = dropout_in_steps(x, p=0.3)
torch.manual_seed(1)
keep = torch.rand(10007, device=DEVICE) >= 0.3
torch.testing.assert_close(out, torch.where(keep, x / (1 - 0.3), 0.0))

# %%
# The stored mask, for comparison
# -------------------------------
#
# The last two lines fit into one kernel. It is the addition of page one, with a select where that has the sum. The
# random numbers still come from torch.


@triton.jit
def stored_mask_kernel(x_ptr, keep_ptr, out_ptr, n_elements, scale, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    keep = tl.load(keep_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.where(keep, x * scale, 0.0), mask=mask)


def stored_mask_dropout(x, keep, p):
    out = torch.empty_like(x)
    n_elements = x.numel()
    grid = (triton.cdiv(n_elements, 1024),)
    stored_mask_kernel[grid](x, keep, out, n_elements, 1 / (1 - p), BLOCK_SIZE=1024)
    return out


torch.testing.assert_close(stored_mask_dropout(x, keep, p=0.3), out)

# %%
# A random number that depends on where, not on when
# --------------------------------------------------
#
# Could the backward pass draw the same numbers again? Not from a usual generator: it has a state, each draw changes
# the state, and the tenth number exists only after the ninth. Programs that run in any order cannot share such a
# thing.
#
# A *counter-based* generator has no state. It is a function: give it a key (the seed) and a counter (which number), and
# it returns bits that look random. Philox is such a function, and a short one. It treats the counter as four words of
# 32 bits and mixes them ten times. In each round two of the words are multiplied, each by a constant of its own; a
# product has 64 bits, and its upper half, which depends on every bit of the factor, is mixed with the other words and
# the key. This is all of it, in Python:


def philox(key, counter, n_rounds=10):
    c0, c1, c2, c3 = counter % 2**32, counter >> 32, 0, 0
    k0, k1 = key % 2**32, key >> 32
    for _ in range(n_rounds):
        product_0, product_2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (product_2 >> 32) ^ c1 ^ k0, product_2 % 2**32
        c2, c3 = (product_0 >> 32) ^ c3 ^ k1, product_0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


print([hex(word) for word in philox(key=0, counter=0)])
assert philox(key=0, counter=0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)  # published with the generator

# %%
# No mask has to be stored any more
# ---------------------------------
#
# With such a function a mask can be computed wherever it is needed. Every element makes a call and takes its own index
# for the counter. Triton has Philox built in: `tl.randint(seed, offsets)` makes the calls for a whole block of counters
# and returns the first word of each. A word is one of :math:`2^{32}` integers, all equally likely, so we keep the
# elements whose word is at least :math:`p \cdot 2^{32}`. (Triton's documentation calls the words int32, but they come
# as uint32. `.to(tl.uint32, bitcast=True)` changes no bit of either, and makes sure that the comparison takes them
# without a sign. Triton's `tl.rand` would turn the word into a float32 in [0, 1), to be compared with :math:`p`: four
# instructions more for each element, and not all 32 bits.)


@triton.jit
def call_per_element_kernel(x_ptr, out_ptr, n_elements, seed, threshold: tl.uint32, scale, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    draws = tl.randint(seed, offsets).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + offsets, tl.where(draws >= threshold, x * scale, 0.0), mask=mask)


def seeded_dropout(kernel, x, p, seed, **options):
    out = torch.empty_like(x)
    n_elements = x.numel()
    grid = (triton.cdiv(n_elements, 1024),)
    kernel[grid](x, out, n_elements, seed, round(p * 2**32), 1 / (1 - p), BLOCK_SIZE=1024, **options)
    return out


words = torch.tensor([philox(5, counter)[0] for counter in range(10007)], device=DEVICE)
expected = torch.where(words >= round(0.3 * 2**32), x / (1 - 0.3), 0.0)
torch.testing.assert_close(seeded_dropout(call_per_element_kernel, x, p=0.3, seed=5), expected)

# %%
# This is dropout without a mask, and it is right. But of every four words it throws three away.

# %%
# Every word is used twice
# ------------------------
#
# One call gives four words and takes some sixty instructions, six for each round, as a section below counts. A fast
# memory moves numbers sooner than that, so we let eight elements share a call, two to each word. The first of the two
# compares the word with :math:`p \cdot 2^{32}`, the second the word with its halves swapped. Each is a number of 32
# bits as random as any other. Are the two independent? The first 16 bits of a number all but always decide whether it
# is smaller, and there the two share nothing. Only if they equal the first 16 bits of :math:`p \cdot 2^{32}`, once in
# 65536 times, does the other half have a say.


def draws(seed, n):
    for counter in range(triton.cdiv(n, 8)):
        for word in philox(seed, counter):
            yield word
            yield word % 2**16 << 16 | word >> 16


# %%
# Element :math:`i` always gets the same draw. It depends on the seed and on :math:`i` and on nothing else: not on the
# block size, not on the order of the programs, not on whether it is drawn forward or backward.
#
# So a seed is for one use. Two layers with the same seed drop the same places, and so does one layer in each step of
# the training. Who passes a `seed` takes another one for each layer and each step; without it, torch's generator does
# that.

# %%
# The kernel that the library runs
# --------------------------------
#
# To have all four words of each call, it asks for `tl.randint4x(seed, counters)`.

# quote: triton_gallery.dropout._swap_halves
# quote: triton_gallery.dropout._draw_block
# quote: triton_gallery.dropout._dropout_kernel

# %%
# Its launcher turns the probability into a threshold. (For :math:`p = 1` the library's own writes zeros, and just below
# that it takes :math:`2^{32} - 1`, the largest threshold of 32 bits. It also chooses the warps, so that in a large
# tensor each thread has 32 bytes: four warps in float32, two in float16.)


def my_dropout(x, p, seed):
    out = torch.empty_like(x)
    n_elements = x.numel()
    grid = (triton.cdiv(n_elements, 1024),)
    _dropout_kernel[grid](x, out, n_elements, seed, None, round(p * 2**32), 1 / (1 - p), BLOCK_SIZE=1024)
    return out


# %%
# What the hard lines are for
# ---------------------------
#
# - `tl.join(tl.join(a, c), tl.join(b, d))` interleaves the four words. Joining puts two blocks side by side in a new
#   last dimension; read row by row, the result is :math:`a_0, b_0, c_0, d_0, a_1, \ldots`, and the next `tl.join` puts
#   each word's twin behind it: one draw for each element in the order of the elements.
# - `threshold` is :math:`p \cdot 2^{32}`, rounded to an integer. Of the :math:`2^{32}` possible draws just so many
#   are below it, so :math:`P(\text{draw} < \text{threshold})` is :math:`p` to the last of 32 bits. The
#   comparison is unsigned, hence `tl.uint32`: as a signed number, a draw of :math:`2^{31}` or more would be negative.
# - `is_full` parts the last block from the others. A mask that may end between any two elements would have the compiler
#   load number by number, in all blocks. (Where `n_elements` is a multiple of 16 it knows better by itself.)
# - `tl.where(keep, ..., 0.0)` selects. Multiplying by 0 or 1 instead would turn a dropped infinity into NaN.
# - `seed` is an ordinary argument. Were it a `tl.constexpr`, each new seed would compile a new kernel, and without
#   `do_not_specialize` a seed of 1, or a multiple of 16, would, too. `seed_ptr` is for seeds that only the GPU knows,
#   because an earlier kernel made them: the CPU never waits, and a CUDA graph, launches that are recorded once and
#   started again as a whole, draws a new mask each time. It is None here, and the compiler removes the branch.
# - `counters` are 64-bit numbers, since `block_start` is one, and `tl.randint4x` spreads them over two words of
#   Philox's counter. With one word the mask would start again after :math:`2^{35}` elements.
# - `scale: tl.float64` fixes the argument's type. A Python float would arrive as float32, too coarse for float64
#   tensors. `tl.full((), scale, COMPUTE_DTYPE)` is a block without dimensions, a single number, of the type that is
#   computed in; a float64 as it is would make the whole product float64.

# %%
# The mask is what Philox says
# ----------------------------
#
# We compare with the Python version above, element by element, at a length that fills neither the last block nor the
# last group of eight. The kernel with the stored mask, given this one, computes the same values.

p, seed = 0.3, 2**40 + 7
keep = torch.tensor(list(draws(seed, 10007))[:10007], device=DEVICE) >= round(p * 2**32)

out = my_dropout(x, p, seed)
torch.testing.assert_close(out, torch.where(keep, x / (1 - p), 0.0))
torch.testing.assert_close(out, stored_mask_dropout(x, keep, p))
print(f"kept {keep.double().mean().item():.4f} of the elements, expected {1 - p:.4f}")

# %%
# Every call of the generator, on record
# --------------------------------------
#
# Who draws what? We trace two launches on 32 elements, one in blocks of 8 and one in blocks of 16, and watch the
# kernel's variable `counters`. The trace tells which program stores an element and which program asks for a counter.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(2, 1, figsize=(9, 4), sharex=True, layout="constrained")
figure.suptitle("Which program makes which call of Philox, and which elements it serves, for two block sizes")
colors = ["#56B4E9", "#E69F00", "#CC79A7", "#66C2A5"]
traces = {}
for block_size, ax in zip((8, 16), axes, strict=True):
    x = torch.ones(32, device=DEVICE)
    arguments = (x, torch.empty_like(x), 32, seed, None, round(p * 2**32), 1 / (1 - p))
    trace = tg.trace(_dropout_kernel, (32 // block_size,), *arguments, BLOCK_SIZE=block_size, watch="counters")
    traces[block_size] = trace
    for (program, *_), counters in trace.watched["counters"]:
        for counter in counters:
            ax.add_patch(plt.Rectangle((8 * counter, 1), 8, 0.9, facecolor=colors[program], edgecolor="white"))
            ax.text(8 * counter + 4, 1.45, f"counter {counter}", ha="center", va="center", fontsize="small")
    for element, program in enumerate(trace.owner("out_ptr")):
        ax.add_patch(plt.Rectangle((element, 0), 1, 0.9, facecolor=colors[program], edgecolor="white"))
        label = f"{element % 8 // 2}" + "′" * (element % 2)
        ax.text(element + 0.5, 0.45, label, ha="center", va="center", fontsize="small")
    ax.set(title=f"blocks of {block_size}: {trace.n_programs} programs, a colour for each", xlim=(0, 32), ylim=(0, 2))
    ax.set_yticks([0.45, 1.45], ["word", "call"])
axes[1].set(xlabel="element", xticks=range(0, 33, 4))
plt.show()

kept = torch.tensor(list(draws(seed, 32)), device=DEVICE) >= round(p * 2**32)
assert all(torch.equal(trace.arguments["out_ptr"] > 0, kept) for trace in traces.values())
print(traces[8])

# %%
# Eight elements share a call, and two of them a word; a prime (′) marks the one whose halves are swapped. The colours
# differ from picture to picture, since a larger block gives an element to another program; the counters above it do
# not. That is why both launches keep the same elements, and why a backward pass with another block size would, too. The
# table has a line for :math:`x` and a line for the result, and none for a mask.

# %%
# Two seeds, two masks
# --------------------
#
# Here is what the kernel keeps of a 48 × 48 matrix under two seeds, and how the kept fraction of a long vector
# settles. Chance allows it to stray by :math:`\sqrt{p (1 - p) / n}`, its standard deviation; the grey band is four of
# those wide on each side.

figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained", width_ratios=[1, 1, 1.4])
figure.suptitle("Which elements dropout with p = 0.5 keeps under two seeds, and the fraction it keeps")
n = torch.logspace(0, 14, 300, base=2).long().unique()
for seed, color, plot in zip((1, 2), ("#0072B2", "#D55E00"), axes, strict=False):
    mask = my_dropout(torch.ones(48, 48, device=DEVICE), 0.5, seed) > 0
    plot.imshow(mask.cpu(), cmap="gray_r", interpolation="nearest")
    plot.set(title=f"seed {seed}: kept in black", xlabel="column", ylabel="row")
    kept = my_dropout(torch.ones(2**14, device=DEVICE), 0.5, seed).cpu() > 0
    axes[2].plot(n, kept.cumsum(0)[n - 1] / n, color=color, label=f"seed {seed}")
band = 4 * (0.25 / n).sqrt()
axes[2].fill_between(n, 0.5 - band, 0.5 + band, color="#999999", alpha=0.4, label="4 standard deviations")
axes[2].set(title="fraction kept so far", xlabel="elements", ylabel="fraction", xscale="log", ylim=(0, 1))
axes[2].legend(loc="lower right")
plt.show()

# %%
# What autograd has to remember
# -----------------------------
#
# `triton_gallery.dropout` adds what a library needs: any strides (the mask follows the element's index, not its place
# in memory), `training`, a seed from torch's generator when we give none, and gradients. (The same `torch.manual_seed`
# makes another mask than torch's: torch's generator gives us a seed, and the numbers are drawn from that.) Its backward
# pass is one line: dropout of the incoming gradient, with the same seed. Around our own launcher it looks like this:


class MyDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        ctx.p, ctx.seed = p, seed  # two numbers, and no tensor
        return my_dropout(x, p, seed)

    @staticmethod
    def backward(ctx, dout):
        return my_dropout(dout.contiguous(), ctx.p, ctx.seed), None, None


x = torch.randn(10007, device=DEVICE, requires_grad=True)
out = MyDropout.apply(x, 0.3, 5)
(dx,) = torch.autograd.grad(out.sum(), x)
torch.testing.assert_close(dx, torch.where(out != 0, 1 / (1 - 0.3), 0.0))

# %%
# (`contiguous`, because the gradient of a sum is a single number that stands for all, and our kernel would read past
# it.) We ask autograd what it keeps for the library's function, and for torch's:

saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
    x = torch.randn(100, 90, device=DEVICE, requires_grad=True).T
    out = tg.dropout(x, p=0.5)
    print("triton_gallery keeps", sum(t.nbytes for t in saved), "bytes for the backward pass")
    saved.clear()
    torch.nn.functional.dropout(x, p=0.5)
    print("torch keeps         ", sum(t.nbytes for t in saved), "bytes")

(dx,) = torch.autograd.grad(out.sum(), x)
assert torch.equal(dx != 0, out != 0)  # drawn twice, equal both times
torch.manual_seed(1)
first, second = tg.dropout(x), tg.dropout(x)
torch.manual_seed(1)
assert torch.equal(first, tg.dropout(x)) and not torch.equal(first, second)

# %%
# On a GPU torch keeps its mask, one byte for each of the 9000 elements; on a CPU it keeps a factor for each, in the
# dtype of `x`. Ours keeps the seed, eight bytes. On a GPU our seed is a Python number here (under `torch.compile` and
# in a CUDA graph it is a tensor), which this list does not count, so the first line says 0 there.

# %%
# First fewer bytes, then fewer instructions
# ------------------------------------------
#
# Three versions led to the kernel of the library. Between the third and the library's there is room for one more. It
# uses all four words of a call, but each of them once.


@triton.jit
def call_per_four_kernel(x_ptr, out_ptr, n_elements, seed, threshold: tl.uint32, scale, BLOCK_SIZE: tl.constexpr):
    block_start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    a, b, c, d = tl.randint4x(seed, block_start // 4 + tl.arange(0, BLOCK_SIZE // 4))
    draws = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK_SIZE,)).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + offsets, tl.where(draws >= threshold, x * scale, 0.0), mask=mask)


x = torch.randn(10007, device=DEVICE)
words = torch.tensor([philox(5, counter) for counter in range(2502)], device=DEVICE).flatten()[:10007]
expected = torch.where(words >= round(0.3 * 2**32), x / (1 - 0.3), 0.0)
torch.testing.assert_close(seeded_dropout(call_per_four_kernel, x, p=0.3, seed=5), expected)

# %%
# What can we expect of them? In float16 dropout has to move four bytes for each element. A version that moves more has
# at best a share of a copy's rate. (We give the third and the fourth two warps, which the library takes from 2²⁰
# elements on; below, it takes four. All three get 5 as their seed: in the first two of their kernels 1 would be
# compiled in.)

rungs = {
    "steps in torch": dropout_in_steps,
    "stored mask": lambda x, p: stored_mask_dropout(x, torch.rand(x.shape, device=x.device) >= p, p),
    "a call for one": lambda x, p: seeded_dropout(call_per_element_kernel, x, p, seed=5, num_warps=2),
    "a call for four": lambda x, p: seeded_dropout(call_per_four_kernel, x, p, seed=5, num_warps=2),
    "triton_gallery": lambda x, p: tg.dropout(x, p, seed=5),
}
s = 2
for name, n_bytes in zip(rungs, (4 * s + 10, 2 * s + 10, 2 * s, 2 * s, 2 * s), strict=True):
    print(f"{name:16}{n_bytes:2} bytes for each element, at best {2 * s / n_bytes:4.0%} of a copy's rate")


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["n_elements"],
        x_vals=[2**i for i in range(18, 29, 2)],
        x_log=True,
        line_arg="provider",
        line_vals=list(rungs),
        line_names=list(rungs),
        xlabel="elements",
        ylabel="GB/s",
        plot_name="dropout-ladder-fp16",
        args={},
    ),
    title="Dropout with p = 0.5, forward, step by step, float16",
    limit="copy",
)
def bench_dropout_ladder(n_elements, provider):
    x = torch.randn(n_elements, device=DEVICE, dtype=torch.float16)
    return tg.benchmark.gbps(2 * x.nbytes, tg.benchmark.measure(lambda: rungs[provider](x, 0.5)))


ladder = bench_dropout_ladder.run()

# %%

ladder.plot()

# %%

ladder

# %%
# Their bytes leave the first two versions at most what the list says. They reach :measured:`dropout-ladder-fp16: steps
# in torch / limit at 268435456` and :measured:`dropout-ladder-fp16: stored mask / limit at 268435456` of a copy's rate:
# their kernels take longer than their bytes do; which of them, we have not measured. The third moves no byte in vain
# and falls short of a copy all the same, at :measured:`dropout-ladder-fp16: a call for one / limit at 268435456` of its
# rate: some sixty instructions are more than a GPU gets done while four bytes arrive. (Thirty of them are
# multiplications of integers: of the four words only one is wanted, and the compiler leaves out what serves the others
# alone. A multiprocessor starts at most 64 multiplications in a clock cycle, so about two elements. The 132
# multiprocessors of an H200 have some 1.75 thousand million cycles in a second, which makes at most 490 thousand
# million elements. Their four bytes each are a little less than half of a copy's rate. Why it is less still, we have
# not found out.) From here on the bytes stay as they are, and the instructions become fewer, with a quarter of the
# calls (:measured:`dropout-ladder-fp16: a call for four / limit at 268435456`) and then an eighth
# (:measured:`dropout-ladder-fp16: triton_gallery / limit at 268435456`). Once they take less time than the bytes, a
# further step has nothing to gain, and there we stop. With 2²⁰ elements, where starting the kernel takes most of the
# time, the step is within the spread: a call for four is at :measured:`dropout-ladder-fp16: a call for four at
# 1048576`, and a call for eight at :measured:`dropout-ladder-fp16: triton_gallery at 1048576`. (With fewer the library
# has twice the warps, too, so these two cannot be compared.)
#
# At the left end of the chart bytes hardly count. A launch has a price of its own there. The first version pays it four
# times, the second three times, and the last three once.

# %%
# Is drawing as fast as reading?
# ------------------------------
#
# We replaced one byte by arithmetic: ten rounds for every eight elements. Whether that is a good bargain is a question
# for a measurement. We count :math:`2s` bytes per element, what dropout cannot do without, for everyone; a provider
# that moves a mask besides shows a lower rate. No gradient is asked for, so `torch.compile` is free to leave its mask
# out. torch's own kernel writes one always.


def sweep(dtype, name):
    @tg.benchmark.perf_report(
        triton.testing.Benchmark(
            x_names=["n_elements"],
            x_vals=[2**i for i in range(16, 29, 2)],
            x_log=True,
            line_arg="provider",
            line_vals=["triton_gallery", "torch", "torch.compile"],
            line_names=["triton_gallery", "torch", "torch.compile"],
            xlabel="elements",
            ylabel="GB/s",
            plot_name=f"dropout-{name}",
            args={"dtype": dtype},
        ),
        title=f"Dropout with p = 0.5, forward, {str(dtype).removeprefix('torch.')}",
        limit="copy",
    )
    def bench_dropout(n_elements, dtype, provider):
        x = torch.randn(n_elements, device=DEVICE, dtype=dtype)
        torch_dropout = torch.nn.functional.dropout
        compiled = torch.compile(torch_dropout, dynamic=False)
        dropout = {"triton_gallery": tg.dropout, "torch": torch_dropout, "torch.compile": compiled}[provider]
        return tg.benchmark.gbps(2 * x.nbytes, tg.benchmark.measure(lambda: dropout(x, 0.5)))

    return bench_dropout.run()


report_fp32 = sweep(torch.float32, "fp32")
report_fp16 = sweep(torch.float16, "fp16")

# %%

report_fp32.plot()

# %%

report_fp32

# %%

report_fp16.plot()

# %%

report_fp16

# %%
# Both passes, and what lies between them
# ---------------------------------------
#
# The forward pass shows only half of what a mask costs. Both passes together have to move :math:`4s` bytes for each
# element, which we count for everyone. This time all providers have to remember what they
# dropped. Between the passes torch has to keep a mask, a byte for each element, and so does `torch.compile`. We keep a
# seed of eight bytes in all, and pay for it by running the generator in both passes.

s = 2
for name, n_bytes in {"with a seed": 4 * s, "with a mask": 4 * s + 2}.items():
    print(f"{name}: {n_bytes:2} bytes for each element of float16, at best {4 * s / n_bytes:4.0%} of a copy's rate")


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["n_elements"],
        x_vals=[2**20, 2**24, 2**26, 2**28],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile"],
        line_names=["triton_gallery", "torch", "torch.compile"],
        xlabel="elements",
        ylabel="GB/s",
        plot_name="dropout-fwd-bwd-fp16",
        args={},
    ),
    title="Dropout with p = 0.5, forward and backward, float16",
    limit="copy",
)
def bench_both_passes(n_elements, provider):
    x = torch.randn(n_elements, device=DEVICE, dtype=torch.float16, requires_grad=True)
    dout = torch.randn_like(x)
    torch_dropout = torch.nn.functional.dropout
    compiled = torch.compile(torch_dropout, dynamic=False)
    dropout = {"triton_gallery": tg.dropout, "torch": torch_dropout, "torch.compile": compiled}[provider]
    times = tg.benchmark.measure(lambda: torch.autograd.grad(dropout(x, 0.5), x, dout))
    return tg.benchmark.gbps(4 * x.nbytes, times)


report_both = bench_both_passes.run()

# %%

report_both.plot()

# %%

report_both

# %%
# At the left end starting two kernels takes several times as long as moving the bytes. At the right end only bytes and
# instructions count, as in the forward pass: :measured:`dropout-fwd-bwd-fp16: triton_gallery / limit at 268435456` of a
# copy's rate, and :measured:`dropout-fwd-bwd-fp16: triton_gallery / peers at 268435456` the best other's, torch's. Its
# mask explains a part of that: it reaches :measured:`dropout-fwd-bwd-fp16: torch / limit at 268435456` where the bytes
# of a mask leave 80 %. `torch.compile` moves as many bytes as torch. Like our version with a call for each element, it
# draws a number of its own for each.

# %%
# Arithmetic that memory does not notice
# --------------------------------------
#
# A round of Philox is two products, each with an upper and a lower half, four exclusive ors and two additions: ten
# operations. (The compiler makes six instructions of them: an exclusive or of three numbers is one, and the additions,
# the same for all elements, are made once.) Ten rounds for eight elements, the swap, a comparison and a scaling make
# about 16 operations for each element. With eight bytes per element in float32 and four in float16, that is a higher
# intensity than on any page so far, but for products of matrices.

intensities = {"float32": (16 / 8, report_fp32), "float16": (16 / 4, report_fp16)}
points = {}
for name, (intensity, report) in intensities.items():
    rate = report.series("triton_gallery")[2**28]  # in GB/s
    points[f"{name}, $2^{{28}}$ elements"] = (intensity, rate * intensity / 1000)
tg.benchmark.roofline(report_fp32, points, title="Dropout, forward")

# %%
# Both points are at the slope. But these are operations on 32-bit integers, which the matrix unit does not have, and
# their own roof is far below the flat part. With one call for each element, some hundred operations in the place of 16,
# that roof is lower than the slope; the version with a call for each stays below even that, as told above.

# %%
# What the compiler made of it
# ----------------------------

tg.codegen.inspect(tg.dropout, torch.empty(2**20, dtype=torch.float16, device="meta"), seed=1)

# %%
# Loads are wide although each thread makes its random numbers by itself, and no shared memory is used: nothing has to
# move between threads. That is the interleaving at work. In float16 the widest load brings eight numbers, as many as a
# call of Philox serves. In float32, which is not in the table, it brings four, half of what a call serves: two threads
# share the words of a call, and all words pass through shared memory.
#
# Line by line, the ten rounds stand in PTX as pairs of `mul.hi` and `mul.lo` with the two constants from above, beside
# the line that calls `_draw_block`. There they are signed numbers, −766435501 and −845247145.

tg.codegen.listing(tg.dropout, torch.empty(2**20, dtype=torch.float16, device="meta"), seed=1)

# %%
# What we saw
# -----------

for each in (report_fp32, report_fp16, report_both):
    print(each.summary())

# %%
# In float32 a mask is one byte in nine, in float16 one in five, so storing none pays more the narrower the type is.
# (The mask is not all that holds torch back: its kernel is at :measured:`dropout-fp32: torch / limit at 268435456` and
# :measured:`dropout-fp16: torch / limit at 268435456` of a copy, where the mask would leave eight ninths and four
# fifths.) The price is arithmetic: per byte moved, float16 needs twice as many random numbers as float32. With 65536
# elements of float32 we are level with a copy, so the start of a kernel is all there is to see of ours, and run at
# :measured:`dropout-fp32: triton_gallery / torch at 65536` torch's rate (why torch takes longer there we have not
# looked into); with 2²⁸ we reach :measured:`dropout-fp32: triton_gallery / torch at 268435456` in float32 and
# :measured:`dropout-fp16: triton_gallery / torch at 268435456` in float16. In float32 that is :measured:`dropout-fp32:
# triton_gallery / limit at 268435456` of a copy, in float16 :measured:`dropout-fp16: triton_gallery / limit at
# 268435456`.

# %%
# Break it: count within the block
# --------------------------------
#
# The most natural mistake is to number the elements from the start of the *block*. It looks right: each block has a
# well-mixed mask, a picture of one block shows nothing, and the kept fraction strays no further than that of 1024
# draws.


@triton.jit
def repeating_kernel(x_ptr, out_ptr, n_elements, seed, threshold, scale, BLOCK_SIZE: tl.constexpr):
    lanes = tl.arange(0, BLOCK_SIZE)
    offsets = tl.program_id(0) * BLOCK_SIZE + lanes
    mask = offsets < n_elements
    keep = tl.randint(seed, lanes).to(tl.uint32, bitcast=True) >= threshold  # should be offsets
    tl.store(out_ptr + offsets, tl.where(keep, tl.load(x_ptr + offsets, mask=mask) * scale, 0.0), mask=mask)


def repeating_dropout(x, p, seed):
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    repeating_kernel[grid](x, out, x.numel(), seed, round(p * 2**32), 1 / (1 - p), BLOCK_SIZE=1024)
    return out


# %%
# The first of the following checks is the one that everybody writes. With this seed it passes. It would fail for about
# one seed in three, since 16384 elements that share 1024 draws stray four times as far as they should; whoever sees
# that may well try another seed. The second check compares each element with the one 1024 places later. Two independent
# masks of :math:`n` elements have a correlation of about :math:`\pm 1 / \sqrt{n}`.


def check_fraction(dropout, n=2**14, p=0.5):
    kept = (dropout(torch.ones(n, device=DEVICE), p, seed=0) > 0).double().mean().item()
    assert abs(kept - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5, f"kept {kept:.4f}, expected {1 - p:.4f}"


def check_distance(dropout, distance, n=2**14, p=0.5):
    kept = (dropout(torch.ones(n, device=DEVICE), p, seed=0) > 0).double()
    correlation = torch.corrcoef(torch.stack([kept[:-distance], kept[distance:]]))[0, 1].item()
    limit = 4 / (n - distance) ** 0.5
    assert abs(correlation) < limit, f"correlation {correlation:.4f} at distance {distance}, limit {limit:.4f}"


for dropout in (my_dropout, repeating_dropout):
    check_fraction(dropout)
    try:
        check_distance(dropout, 1024)
        print(f"{dropout.__name__}: passed")
    except AssertionError as error:
        print(f"{dropout.__name__}: AssertionError: {error}")

# %%
# In a layer of 1024 features the repeating mask drops the same ones in every row, and no error says so. Random numbers
# need statistical tests, and the distances to test are those that the code knows: two elements of one word, the group
# of eight, the warp, the block. (Here p is 0.3. At 0.5 the threshold has one bit, and of the swapped halves the lower
# one would never decide.)

for distance in (1, 2, 8, 256, 1024):
    check_distance(my_dropout, distance, p=0.3)

# %%
# Exercises
# ---------
#
# 1. Drop whole rows of a matrix, as some networks drop whole channels. What is the index that the draw belongs to,
#    and how many Philox calls does a row need? (Hint: one draw per row; every element of the row compares with the
#    same word.)
# 2. Give each matrix of a batch its own seed, from a tensor of seeds, in one launch. (Hint: `tl.load(seed_ptr +
#    batch)`, and the counter starts from zero in each matrix.)
# 3. Compare only 16 bits: the upper half of each word for one element, the lower half for the next. How far may the
#    share of dropped elements be from :math:`p` then, and how far is it with 32 bits? How many elements would a test
#    have to look at to see either?

# %%
# Solutions
# ---------
#
# They run when this page is built, and each of them checks itself.
#
# Solution 1: whole rows
# ~~~~~~~~~~~~~~~~~~~~~~
#
# The draw belongs to the row, so its index is the row's number, and a call has draws for eight rows, whatever their
# length. An eighth of a call would do for a row. Here each row is a program of its own and makes the call again, which
# costs little beside the row's bytes.


@triton.jit
def drop_rows_kernel(x_ptr, out_ptr, n_cols, seed, threshold: tl.uint32, scale, BLOCK_COLS: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_COLS)
    a, b, c, d = tl.randint4x(seed, row // 8)
    i = row % 8 // 2
    word = tl.where(i < 2, tl.where(i == 0, a, b), tl.where(i == 2, c, d)).to(tl.uint32, bitcast=True)
    draw = tl.where(row % 2 == 0, word, _swap_halves(word))
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols)
    tl.store(out_ptr + row * n_cols + cols, tl.where(draw >= threshold, x * scale, 0.0), mask=cols < n_cols)


x, p = torch.randn(103, 40, device=DEVICE), 0.3
out = torch.empty_like(x)
drop_rows_kernel[(103,)](x, out, 40, 11, round(p * 2**32), 1 / (1 - p), BLOCK_COLS=64)
expected = torch.tensor(list(draws(11, 103))[:103], device=DEVICE)
torch.testing.assert_close(out, torch.where(expected[:, None] >= round(p * 2**32), x / (1 - p), 0.0))

# %%
# Solution 2: a seed for each matrix
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The second axis of the grid is the matrix. It moves the pointers and picks the seed; the counters begin at 0 in each
# matrix, as if it were alone.


@triton.jit
def batched_dropout_kernel(x_ptr, out_ptr, seed_ptr, n, threshold: tl.uint32, scale, BLOCK_SIZE: tl.constexpr):
    block_start, matrix = tl.program_id(0).to(tl.int64) * BLOCK_SIZE, tl.program_id(1).to(tl.int64)
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    counters = block_start // 8 + tl.arange(0, BLOCK_SIZE // 8)
    keep = _draw_block(tl.load(seed_ptr + matrix), counters) >= threshold
    x = tl.load(x_ptr + matrix * n + offsets, mask=offsets < n)
    tl.store(out_ptr + matrix * n + offsets, tl.where(keep, x * scale, 0.0), mask=offsets < n)


x, seeds = torch.randn(3, 30, 50, device=DEVICE), torch.tensor([5, 2**40, 5], device=DEVICE)
out = torch.empty_like(x)
batched_dropout_kernel[(2, 3)](x, out, seeds, 1500, round(p * 2**32), 1 / (1 - p), BLOCK_SIZE=1024)
for matrix, seed, result in zip(x, seeds.tolist(), out, strict=True):
    torch.testing.assert_close(result, my_dropout(matrix, p, seed))
assert torch.equal(out[0] == 0, out[2] == 0) and not torch.equal(out[0] == 0, out[1] == 0)

# %%
# Solution 3: draws of 16 bits
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Of :math:`2^k` draws a whole number lies below the threshold, so the share is a multiple of :math:`2^{-k}`, and half
# of that at most from :math:`p`. With 16 bits 0.1 becomes 6554/65536, six millionths too much. Of :math:`n` elements
# the share that is dropped scatters by :math:`\sqrt{p (1 - p) / n}`, so to see an error of four such deviations takes
# :math:`n = 16 \, p (1 - p) / \text{error}^2` elements.


@triton.jit
def half_words_kernel(x_ptr, out_ptr, n_elements, seed, threshold, scale, BLOCK_SIZE: tl.constexpr):
    block_start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    a, b, c, d = tl.randint4x(seed, block_start // 8 + tl.arange(0, BLOCK_SIZE // 8))
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK_SIZE // 2,)).to(tl.uint32, bitcast=True)
    halves = tl.reshape(tl.join(words >> 16, words & 0xFFFF), (BLOCK_SIZE,)).to(tl.int32)
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements)
    tl.store(out_ptr + offsets, tl.where(halves >= threshold, x * scale, 0.0), mask=offsets < n_elements)


x, p = torch.randn(1000, device=DEVICE), 0.1
out = torch.empty_like(x)
half_words_kernel[(1,)](x, out, 1000, 7, round(p * 2**16), 1 / (1 - p), BLOCK_SIZE=1024)
halves = torch.tensor([draw >> 16 for draw in draws(7, 1000)], device=DEVICE)
torch.testing.assert_close(out, torch.where(halves >= round(p * 2**16), x / (1 - p), 0.0))

for bits in (16, 32):
    error = abs(round(p * 2**bits) / 2**bits - p)
    assert 0 < error <= 2.0 ** -(bits + 1)
    print(f"{bits} bits: {p} is off by {error:.1e}, which {16 * p * (1 - p) / error**2:.0e} elements would show")

# %%
# References
# ----------
#
# The guide's chapter *Related work* lists these works among its own.
#
# - :cite:`srivastava2014dropout`: why dropping elements helps a network to generalize.
# - :cite:`salmon2011random`: Philox, and why counters are enough.
# - :cite:`tritondocs`: the `random numbers of triton.language
#   <https://triton-lang.org/main/python-api/triton.language.html#random-number-generation>`_.

# %%
# Where this page ran
# -------------------

print(tg.benchmark.environment())

# sphinx_gallery_thumbnail_number = 5
