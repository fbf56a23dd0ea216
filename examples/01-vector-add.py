"""
Vector addition
===============

We write a first GPU kernel, check it, measure it against the limit of the hardware, and break it on purpose.

You will learn:

- what a program, a block, a mask and a launch grid are
- how a kernel and five lines of Python make a function
- how to tell, before measuring, how fast a kernel can be
- what a forgotten mask does, and how to notice
"""

# %%
# A GPU, or a stand-in for one
# ----------------------------
#
# Every page of this gallery starts with these lines. With a GPU, Triton compiles our kernels for it. Without one, the
# package switches Triton's *interpreter* on: the same kernels then run on the CPU, one NumPy operation after the other.
# That is slow, but the results are the same up to rounding, except in bfloat16 and float8, which the interpreter
# computes wrongly, and in sums of bools. (All numbers of a tensor have one *dtype*: those of float32 have 32 bits, and
# float16, bfloat16 and float8 are shorter and coarser. The functions of `tg` hand the interpreter float32 in place of
# those two; for a kernel that you launch yourself, take other dtypes there.) So this page runs on any machine where
# `triton-gallery` is installed with its extra `examples`. `DEVICE` is where our tensors go: the GPU, or else the CPU.

import torch
import triton_gallery as tg  # before triton: without a GPU it switches the interpreter on
import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

# %%
# An addition is three trips to memory
# ------------------------------------
#
# We want :math:`\text{out}_i = x_i + y_i` for :math:`n` numbers in float32. Before writing anything, let us count
# what the GPU has to do:
#
# - read :math:`x` and :math:`y` and write :math:`\text{out}`: three times 4 bytes per element
# - add once per element
#
# A GPU of today has time for tens of additions while one number arrives from its memory. Ours asks for one addition
# per 12 bytes, so the arithmetic units wait: the kernel is *memory-bound*. Its time is at best about
#
# .. math:: t = \frac{12 \, n \text{ bytes}}{\text{bandwidth of the memory}}
#
# What a data sheet calls the bandwidth no kernel reaches. We take what the fastest of many copies of a large tensor
# reaches, in bytes per second, and that is the limit which this page measures against. (A kernel that reads more than
# it writes may come out a few per cent above.) There is nothing clever to do about an addition; what we learn is how to
# say it.

# %%
# One program, one block
# ----------------------
#
# A GPU is made of *multiprocessors* (NVIDIA's tools say SM), more than a hundred in a large one. Each has *registers*,
# the storage next to its arithmetic units, and some *shared memory*. Behind them are the *L2 cache*, which all of them
# share, and the memory that holds our tensors. The work is done by *threads*, 32 of which (on AMD's MI300 64) move
# together as a *warp*.
#
# A *kernel* is a function that runs there. In Triton it works on *blocks*: `tl.arange(0, 16)` is a block of 16
# integers, `x_ptr + offsets` a block of 16 addresses, counted in elements and not in bytes, and `tl.load` fetches all
# of them at once. How a block spreads over threads is the compiler's business. `@triton.jit` calls the compiler at the
# kernel's first launch. Here is the smallest kernel that adds two vectors.


@triton.jit
def add_16_kernel(x_ptr, y_ptr, out_ptr):
    offsets = tl.arange(0, 16)
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    tl.store(out_ptr + offsets, x + y)


x, y = torch.randn(2, 16, device=DEVICE)
out = torch.empty_like(x)
add_16_kernel[(1,)](x, y, out)
torch.testing.assert_close(out, x + y)

# %%
# `add_16_kernel[(1,)](x, y, out)` launches one *program*, one run of the kernel: how many there are to be stands in the
# brackets. (CUDA, NVIDIA's own way to write kernels, calls the threads that run one program a *thread block*; a block
# is something else here.) A tensor that we pass arrives as a pointer to its first element, hence the names that end in
# `_ptr`; the kernel knows nothing of shapes. `out` was allocated by us, because a kernel returns nothing and writes to
# memory.
#
# Two things keep this kernel from being useful. The length of a block has to be a power of two, and the lengths of real
# vectors seldom are. And one program runs on one of the GPU's many multiprocessors, while the others are idle.

# %%
# Many programs share the work
# ----------------------------
#
# So we launch as many programs as there are blocks. They all run the same code, at the same time or one after
# another, in any order; `tl.program_id(0)` tells each of them which one it is, along the first axis of up to three.
# This is the whole idea, written as a Python loop:


def add_in_blocks(x, y, block_size):
    out = torch.empty_like(x)
    n_programs = -(-len(x) // block_size)  # rounded up, so that the last elements have a program, too
    for program_id in range(n_programs):
        offsets = program_id * block_size + torch.arange(block_size, device=x.device)
        offsets = offsets[offsets < len(x)]  # the last block reaches past the end
        out[offsets] = x[offsets] + y[offsets]
    return out


x, y = torch.randn(2, 27, device=DEVICE)
torch.testing.assert_close(add_in_blocks(x, y, block_size=8), x + y)

# %%
# On the GPU the loop disappears: the launch names the number of programs, its *grid*, and the hardware hands them to
# the multiprocessors. To see who owns what, we let every program write its number to its elements and look at the
# memory. (`tl.constexpr` marks a number that the compiler has to know; why, we see below.)


@triton.jit
def owner_kernel(owner_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(owner_ptr + offsets, tl.program_id(0), mask=offsets < n_elements)


owner = torch.full((32,), -1, dtype=torch.int32, device=DEVICE)
owner_kernel[(4,)](owner, 27, BLOCK_SIZE=8)
print(owner)

# %%
# Four programs with blocks of 8 cover 27 elements and could touch 32. The *mask* `offsets < n_elements` switches off
# five *lanes* of the last program, as the places of a block are called (CUDA calls the threads of a warp so): the -1
# that we had put there still stands.

# %%
# The kernel that the library runs
# --------------------------------
#
# With the program's number, a block size and a mask, the kernel is complete. What follows is not a simplified copy: it
# is the source text of the kernel that `triton_gallery.add` runs for two vectors whose length is a multiple of 16. (It
# has others for other cases, of which more below.)

# quote: triton_gallery.vector_add._add_kernel

# %%
# Around it goes a *launcher*, which allocates the output, counts the programs and launches them.


def my_add(x, y):
    out = torch.empty_like(x)
    n_elements = out.numel()
    grid = (triton.cdiv(n_elements, 1024),)
    _add_kernel[grid](x, y, out, n_elements, BLOCK_SIZE=1024)
    return out


# %%
# Every access of a launch, on record
# -----------------------------------
#
# We need not guess what such a launch does. `tg.trace` runs it in the interpreter, with a GPU or without one, and
# writes down every load and every store: which program, which argument, which elements, which lanes. It takes what
# the launch takes, so it works on any kernel that you write yourself.

x, y = torch.randn(2, 27, device=DEVICE)
out = torch.empty_like(x)
trace = tg.trace(_add_kernel, (4,), x, y, out, 27, BLOCK_SIZE=8)
torch.testing.assert_close(out, x + y, rtol=0, atol=0)
print(trace)

# %%
# This is the cost from the top of the page, counted: each element of three vectors is touched once (`times each`), 12
# bytes for each of 27 sums. The column `outside` counts lanes that were switched on and point to no element of their
# vector, such as past its end. It should be 0, always.
#
# In the picture, look for the staircase: each program has a step of its own, at the same place in all three vectors.
# The last step is cut short. Its hatched lanes lie past the end, and the mask has switched them off. (Code that draws
# may be skipped, here and later. `hits` are the elements that an access touched.)

import matplotlib.pyplot as plt

figure, axes = plt.subplots(3, 1, figsize=(8, 5), sharex=True, sharey=True, layout="constrained")
figure.suptitle("Which program loads and stores which of 27 elements, in blocks of 8")
colors = ["#56B4E9", "#E69F00", "#CC79A7", "#009E73"]
for ax, argument in zip(axes, ("x_ptr", "y_ptr", "out_ptr"), strict=True):
    for access in trace.accesses:
        if access.argument == argument:
            program, off = access.program[0], access.offsets[~access.mask]
            ax.barh([program] * len(access.hits), 1, left=access.hits, color=colors[program], edgecolor="white")
            ax.barh([program] * len(off), 1, left=off, color="white", edgecolor="#555555", hatch="////")
    ax.axvline(27, color="black", linestyle="--", linewidth=1)
    ax.set(title=f"{argument}: {'stores' if argument == 'out_ptr' else 'loads'}", ylabel="program id", yticks=range(4))
axes[0].invert_yaxis()
axes[2].set(xlabel="element; behind the dashed line the vectors have ended", xlim=(0, 32), xticks=range(0, 33, 4))
plt.show()

# %%
# What each line is for
# ---------------------
#
# With :math:`B` for the block size, program :math:`i` owns the elements :math:`iB` to :math:`(i + 1)B - 1`.
#
# - `BLOCK_SIZE: tl.constexpr` is known when the kernel is compiled. It has to be: a block's shape decides how many
#   registers a program needs. Another block size is another compilation, whereas `n_elements` may change from call to
#   call. A few compilations serve all its values, above all one for multiples of 16 and one for the others.
# - `tl.program_id(0)` is :math:`i`. It is a 32-bit number, and :math:`iB` can exceed what 32 bits hold, so we widen
#   it *before* the product. A kernel without that cast works for years, until someone adds more than
#   :math:`2^{31}` numbers.
# - `offsets` is a block of :math:`B` integers, and `mask` a block of :math:`B` truth values. Only the last program
#   has lanes that are switched off; a masked lane reads nothing and writes nothing. What it holds is undefined, which
#   is of no consequence here; page two gives it a value.
# - `tl.load` brings :math:`B` values into registers. Neighbouring lanes read neighbouring addresses, so the hardware
#   joins them into few, wide transactions.
# - `x + y` adds element by element, for numbers of one dtype as in PyTorch. (Not for bools: compiled, True + True is
#   False; in the interpreter, as in torch, it is True.)
# - `triton.cdiv(n_elements, 1024)` divides and rounds up. The grid is a tuple because it may have up to three axes. It
#   may be a function as well, such as `lambda meta: (triton.cdiv(n_elements, meta["BLOCK_SIZE"]),)`, which Triton calls
#   with a dictionary of the kernel's arguments, each by its name. Whoever lets Triton choose the block size needs that.
#
# Why 1024? On NVIDIA's GPUs each program has 128 threads (4 warps of 32) unless the launch asks otherwise, as in
# `num_warps=8`. So a block of 1024 gives each of them 8 elements, that is two loads of 16 bytes, the widest that an
# H200 has, from each input, where the length is a multiple of 16 (below we see why). That is enough to keep the memory
# busy, and few enough for the registers.

# %%
# It agrees with torch, to the last bit
# -------------------------------------
#
# We check at a length that is no multiple of anything nice. The sum of two floats has one correctly rounded result,
# so nothing less than equality will do.

x, y = torch.randn(2, 98431, device=DEVICE)
torch.testing.assert_close(my_add(x, y), x + y, rtol=0, atol=0)
print(f"{triton.cdiv(len(x), 1024)} programs; the last one owns {len(x) % 1024} elements")

# %%
# From a kernel to a function
# ---------------------------
#
# Our launcher trusts its caller: equal shapes, equal dtypes, *contiguous* memory (row after row, without gaps), and
# tensors on the current device. (A launch goes to that one even where its tensors are on another. `with
# torch.cuda.device(x.device):` makes theirs the current one.) `triton_gallery.add` trusts nobody. As `torch.add` it
# takes two tensors, or a tensor and a number; it promotes dtypes (takes the one that torch's rules give for both),
# broadcasts (repeats a row or a column for all), scales by `alpha`, has gradients, and refuses the rest in words. Where
# both tensors have the same shape and dtype, fill their memory without gaps and in the same order, and `alpha` is 1, it
# launches the kernel above, or a variant of it for lengths that are no multiple of 16 (but neither for bool). Otherwise
# one of two others converts, scales, and works out the address of each element from the *strides*, which say how far
# apart neighbours along each dimension lie; a section below is about them. (A large tensor of many short dimensions is
# copied into order first.)

matrix = torch.randn(5, 7, device=DEVICE, requires_grad=True)
row = torch.randn(7, device=DEVICE, dtype=torch.float16, requires_grad=True)
out = tg.add(matrix, row, alpha=0.5)
torch.testing.assert_close(out, torch.add(matrix, row, alpha=0.5))

out.sum().backward()
print("d out / d row =", row.grad.tolist())  # five rows, each with a factor of 0.5

try:
    tg.add(matrix, torch.randn(5, device=DEVICE))
except ValueError as error:
    print("ValueError:", error)

# %%
# How does a kernel of your own get gradients? Autograd does not look into a launch, and to it the result of `my_add`
# has no history. A `torch.autograd.Function` tells it: one function that launches, and one that gets the gradient of
# the output and returns one for each input. (`torch.compile` follows a launch by itself. `torch.library.triton_op`
# makes an operator of it, with a name; its gradient is then registered with `register_autograd`.)


class MyAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return my_add(x, y)

    @staticmethod
    def backward(ctx, d_out):
        return d_out, d_out  # each input moves the output as much as it moves itself


x, y = (torch.randn(1000, device=DEVICE, requires_grad=True) for _ in "xy")
weight = torch.randn(1000, device=DEVICE)
(MyAdd.apply(x, y) * weight).sum().backward()
assert not my_add(x, y).requires_grad
assert torch.equal(x.grad, weight) and torch.equal(y.grad, weight)

# %%
# How close to the limit?
# -----------------------
#
# We measure from 16 KiB to 1 GiB per tensor, against torch's own addition and against what `torch.compile` makes of it.
# The figure of merit is the useful bandwidth: 12 bytes per element, divided by the time. Between any two runs the L2
# cache is flushed, so that every byte has to come from memory. Without a GPU we show a committed record, which says of
# what GPU it is, when it was made, and whether anything has changed since.
#
# A launch returns at once, while the GPU goes on working, so a clock around the call would measure the launch alone.
# `measure` lets the GPU itself take the time between the start and the end of each of many calls, and gives the median
# with the spread. While the GPU empties its cache for the next call, the host, the CPU that launches, gets ahead, and
# its own time does not count. `Benchmark` declares the chart: a point for each of `x_vals`, and a curve for each
# *provider*, that is whose addition it is. `limit="copy"` measures copies beside them: a large one, the dashed line,
# and at each point one of just as many bytes, the dotted line. Our share of the first goes from next to nothing to a
# little more than all of it; the section *What we saw* tells what we know of the reasons.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["n_elements"],
        x_vals=[2**i for i in range(12, 29, 2)],
        x_log=True,
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile"],
        line_names=["triton_gallery", "torch", "torch.compile"],
        xlabel="elements per tensor",
        ylabel="GB/s",
        plot_name="vector-add-fp32",
        args={},
    ),
    title="Addition of two vectors, float32",
    limit="copy",
)
def bench_add(n_elements, provider):
    x, y = torch.randn(2, n_elements, device=DEVICE)
    compiled = torch.compile(torch.add, dynamic=False)
    add = {"triton_gallery": tg.add, "torch": torch.add, "torch.compile": compiled}[provider]
    return tg.benchmark.gbps(3 * x.nbytes, tg.benchmark.measure(lambda: add(x, y)))


report = bench_add.run()

# %%

report.plot()

# %%
# A page shows the value of a cell's last line, as a notebook does. In a script, `print(report)` prints a summary, and
# `print(report.to_csv())` the numbers.

report

# %%
# When neighbours are elsewhere
# -----------------------------
#
# (A first reading may skip this section; nothing below needs it.)
#
# So far the order of the elements did not matter, as long as it was the same in all three tensors. In `x + y.T` it is
# not. Walking along the rows of :math:`x` jumps from row to row in :math:`y`, where each number then costs a trip for
# the 32 bytes around it. Walking along the columns does the same to :math:`x` and to the sum. The way out is to own a
# square: the 64 rows and 64 columns of a *tile* hold whole pieces of memory of both, and each tensor can be read along
# its own neighbours. They then lie with different lanes; the compiler sees that, and exchanges them by way of shared
# memory.

# quote: triton_gallery.vector_add._load_tile
# quote: triton_gallery.vector_add._add_strided_kernel

# %%
# `cols` is a block of 1 × BLOCK_0 numbers and `rows` one of BLOCK_1 × 1: `[None, :]` and `[:, None]` add a dimension,
# as in NumPy, and their sum has BLOCK_1 × BLOCK_0 numbers. `tl.static_range` is a loop that the compiler writes out.
# `rest` is the tile's number without its first two dimensions: `%` gives the next index, and `//` what is left.
# `ptr.dtype.element_ty` is the dtype of what a pointer points to. `COMPUTE_DTYPE` is the dtype that is computed in, at
# least float32 or int64, and `INDEX_DTYPE` that of indices, 32 bits where they suffice. `alpha_ptr` is None where alpha
# is 1; the compiler knows that, and leaves the product out.
#
# One of a tile's dimensions is that of the sum's neighbours. The other is that of the neighbours in :math:`x` or
# :math:`y`, if they are elsewhere and both dimensions have 32 elements or more, and otherwise the longest that is left.
# All other dimensions are in the program's number, from which each index is peeled off by a division: one for a
# program, where a kernel with a flat block would divide for each element. And a tensor that repeats a number along a
# tile, as a bias does for each row, is loaded as the row or column that it is.
#
# Tiles have one weakness. Of rows of 8191 numbers in float16, which have two bytes each, one in eight begins at a
# multiple of 16 bytes. The compiler cannot count on that, and a tile of such rows moves number by number. Where one
# tensor lies as the sum does, and the other has its neighbours along the rows as well (a slice of a wider matrix, or
# one row for all) or one number for a row, we go back to blocks that walk along the sum's memory, whichever rows they
# are in. As no block is longer than a row, it reaches into two rows at most, and one comparison tells which. (`start`
# is the program's first element, counted in the order of the sum's memory. `IS_DENSE` says that this tensor lies as the
# sum does.)

# quote: triton_gallery.vector_add._load_row_by_row


def draw(*shape):
    return torch.randn(shape, device=DEVICE, dtype=torch.float16)


layouts = {
    "alike": lambda: (draw(8192, 8192), draw(8192, 8192)),
    "row": lambda: (draw(8192, 8192), draw(8192)),
    "column": lambda: (draw(8192, 8192), draw(8192, 1)),
    "transposed": lambda: (draw(8192, 8192), draw(8192, 8192).T),
    "heads": lambda: (draw(8, 1024, 32, 128), draw(8, 32, 1024, 128).transpose(1, 2)),
    "channels-last": lambda: (draw(32, 256, 56, 56), draw(32, 56, 56, 256).permute(0, 3, 1, 2)),
    "odd-row": lambda: (draw(8192, 8191), draw(8191)),
    "odd-transposed": lambda: (draw(8191, 8193), draw(8193, 8191).T),
}

# %%
# The second of these tensors is, in turn, one like the first, a row or a column for all, a transposed one, one whose
# heads and tokens have changed places, and an image whose channels lie side by side. Then sizes are odd. What counts
# are the bytes of both tensors as they lie in memory, and of their sum.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["layout"],
        x_vals=list(layouts),
        line_arg="provider",
        line_vals=["triton_gallery", "torch", "torch.compile"],
        line_names=["triton_gallery", "torch", "torch.compile"],
        xlabel="how the second tensor lies",
        ylabel="GB/s",
        plot_name="vector-add-layouts-fp16",
        args={},
    ),
    title="Addition of tensors that lie in memory in other ways, float16",
    limit="copy",
)
def bench_layouts(layout, provider):
    x, y = layouts[layout]()
    compiled = torch.compile(torch.add, dynamic=False)
    add = {"triton_gallery": tg.add, "torch": torch.add, "torch.compile": compiled}[provider]
    n_bytes = x.element_size() * (x.numel() + y.numel() + x.numel())
    return tg.benchmark.gbps(n_bytes, tg.benchmark.measure(lambda: add(x, y)))


report_layouts = bench_layouts.run()
report_layouts.plot()

# %%

report_layouts

# %%
# Alike, it is the simple kernel that runs. Of the rate of a copy of as many bytes we reach
# :measured:`vector-add-layouts-fp16: triton_gallery / copy of as many bytes at row` where the second tensor is one row,
# and :measured:`vector-add-layouts-fp16: triton_gallery / copy of as many bytes at transposed` where it is transposed.
# torch's addition makes no squares and is left with :measured:`vector-add-layouts-fp16: torch / copy of as many bytes
# at transposed` there. With one row or one column for all, torch is at :measured:`vector-add-layouts-fp16: torch / copy
# of as many bytes at row` and :measured:`vector-add-layouts-fp16: torch / copy of as many bytes at column`, although no
# neighbours are elsewhere; why, we have not looked into. `torch.compile` writes a kernel for each of these sums. (We
# take it that it makes tiles, too, and have not read them.) We are at :measured:`vector-add-layouts-fp16:
# triton_gallery / torch.compile at transposed` its rate for the transposed tensor, at
# :measured:`vector-add-layouts-fp16: triton_gallery / torch.compile at channels-last` where the channels come last, at
# :measured:`vector-add-layouts-fp16: triton_gallery / torch.compile at heads` with heads, and at
# :measured:`vector-add-layouts-fp16: triton_gallery / torch.compile at odd-row` with a row for all those of 8191
# numbers. Both sizes odd and one tensor transposed, a tile is all that is left, and number by number we are at
# :measured:`vector-add-layouts-fp16: triton_gallery / torch.compile at odd-transposed`.

# %%
# What is under way at the same time
# ----------------------------------
#
# How much of the rate of large vectors is due to the many programs, and how much to the size of their blocks? We go
# back to the start and climb once more, in steps. All versions move the same 12 bytes per element. They differ in how
# many bytes are *under way*, asked for and not yet there, and that decides how fast bytes arrive:
#
# .. math:: \text{rate} = \frac{\text{bytes under way}}{\text{time of one trip}}
#
# This is *Little's law*, known from queues. A trip to memory takes hundreds of clock cycles, however little it brings.
# In that time, which we read off the loop below, the memory of an H200 could move about 2 MiB. Two thirds of what an
# addition moves are loads, and nobody waits for stores. So a kernel that wants all of the bandwidth has to have about
# 1.4 MiB of loads under way, at all times, and more, since a trip takes longer when memory is busy.
#
# - *One program, one block*: the library's kernel in a single program, with a block as long as the vector. The block
#   has to fit into registers. Each of the program's 128 threads has at most 255 of them: room for 8192 numbers of `x`
#   and as many of `y`, and not for twice that.
# - *One program, a loop*: the program walks along the vector in blocks of 1024, so the vector may have any length. This
#   is our Python loop, brought to the GPU. It needs a kernel of its own.


@triton.jit
def loop_add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    for start in range(0, n_elements, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = offsets < n_elements
        x = tl.load(x_ptr + offsets, mask=mask)
        y = tl.load(y_ptr + offsets, mask=mask)
        tl.store(out_ptr + offsets, x + y, mask=mask)


def add_in_a_loop(x, y):
    out = torch.empty_like(x)
    loop_add_kernel[(1,)](x, y, out, len(x), BLOCK_SIZE=1024)
    return out


# %%
# - *Many programs, blocks of 32*: the kernel of the library with a block size that is too small. All multiprocessors
#   work, but a program has 32 elements, and each of its four warps loads the same ones.
# - *Many programs, blocks of 1024*: `my_add`, which the library should equal, since it launches the same kernel.


def add_with_blocks(x, y, block_size):
    out = torch.empty_like(x)
    _add_kernel[(triton.cdiv(len(x), block_size),)](x, y, out, len(x), BLOCK_SIZE=block_size)
    return out


rungs = {
    "one program, one block": lambda x, y: add_with_blocks(x, y, triton.next_power_of_2(len(x))),
    "one program, a loop": add_in_a_loop,
    "many programs, blocks of 32": lambda x, y: add_with_blocks(x, y, 32),
    "many programs, blocks of 1024": my_add,
    "triton_gallery": tg.add,
}
x, y = torch.randn(2, 4321, device=DEVICE)
for add in rungs.values():
    torch.testing.assert_close(add(x, y), x + y, rtol=0, atol=0)

# %%
# An H200 has 132 multiprocessors. Each has room for 2048 threads, that is for 16 of our programs. So we can count,
# before measuring, how many bytes of :math:`x` and :math:`y` are under way at best:

at_once = {
    "one program, one block": (1, 8192),
    "one program, a loop": (1, 1024),
    "many programs, blocks of 32": (132 * 16, 32),
    "many programs, blocks of 1024": (132 * 16, 1024),
}
for name, (programs, block_size) in at_once.items():
    under_way = programs * block_size * 2 * 4 / 1024
    print(f"{name:31}{programs:4} × {block_size:4} × 2 × 4 bytes = {under_way:6.0f} KiB")

# %%
# Only the last line comes to 1.4 MiB, and to far more. Two versions cannot follow to the end of the sweep: a block ends
# where registers do, and the loop, at :math:`2^{24}` elements, where our patience does. The table says of both that
# they do not apply there.


@tg.benchmark.perf_report(
    triton.testing.Benchmark(
        x_names=["n_elements"],
        x_vals=[2**i for i in (10, 13, 16, 20, 24, 28)],
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=list(rungs),
        line_names=list(rungs),
        xlabel="elements per tensor",
        ylabel="GB/s",
        plot_name="vector-add-ladder-fp32",
        args={},
    ),
    title="Addition of two vectors, step by step, float32",
    limit="copy",
)
def bench_add_ladder(n_elements, provider):
    longest = {"one program, one block": 2**13, "one program, a loop": 2**24}
    if n_elements > longest.get(provider, n_elements):
        return None
    x, y = torch.randn(2, n_elements, device=DEVICE)
    return tg.benchmark.gbps(3 * x.nbytes, tg.benchmark.measure(lambda: rungs[provider](x, y)))


ladder = bench_add_ladder.run()

# %%

ladder.plot()

# %%

ladder

# %%
# The rate has a logarithmic axis here, because the steps multiply. On the far left all versions are alike, since a
# launch takes longer than the work. To the right they part, by the bytes that they have under way. The loop levels off
# early: it waits for each block before it asks for the next, so a longer vector means more trips, and not more on each.
# At :math:`2^{24}` elements it moves :measured:`vector-add-ladder-fp32: one program, a loop at 16777216`. Blocks of 32
# put every multiprocessor to work. 66 times as many bytes are under way as in the loop, and the rate is
# :measured:`vector-add-ladder-fp32: many programs, blocks of 32 / one program, a loop at 16777216` the loop's, so bytes
# under way are not all there is to it: a program also has to start and to end, here for 32 elements. (How long that
# takes we have not measured.) They reach :measured:`vector-add-ladder-fp32: many programs, blocks of 32 / limit at
# 268435456` of a copy's rate at :math:`2^{28}` elements. With blocks of 1024 each thread has four wide loads under way,
# and memory itself is the limit at last, at :measured:`vector-add-ladder-fp32: many programs, blocks of 1024 / limit at
# 268435456`. The final step brings no speed: what the library adds to `my_add` happens before the launch.
#
# We can turn the formula round, too. The loop moves 12 KiB in each round, and a round is one trip and the few
# instructions around it. So its rate tells about how long a trip takes, and two thirds of the limit how much could be
# loaded in that time:

loop = ladder.series("one program, a loop")[2**24]
if loop == loop:  # measured
    trip = 12 * 1024 / loop  # bytes over GB/s: nanoseconds
    loads = 2 / 3 * ladder.record["limit"]["value"]
    print(f"a trip takes {trip:.0f} ns, in which memory could load {trip * loads / 2**20:.1f} MiB")

# %%
# Under the roofline
# ------------------
#
# That an addition is limited by memory can be drawn. The horizontal axis of the picture is the *arithmetic intensity*,
# operations per byte, and its vertical axis the rate of arithmetic. No kernel gets far above the *roofline*: on its
# slope memory sets the time, on its flat part the arithmetic units do, and the *ridge* is where the two meet. An
# addition of float32 numbers stands at 1/12 operation per byte. Only smaller numbers move it to the right, or more to
# do in the same kernel, as in the first exercise.

rates = report.series("triton_gallery")  # in GB/s; divided by 12 bytes and by 1000, in TFLOP/s
tg.benchmark.roofline(report, {f"$2^{{{n}}}$ elements": (1 / 12, rates[2**n] / 12 / 1000) for n in (16, 20, 28)})

# %%
# Look at how far left the points are: at the flat part there are some two thousand times more operations to be had than
# an addition has use for. (It is the rate at which the matrix unit multiplies float16 matrices, and that unit does
# nothing else. The roof of float32 additions is some twenty times lower on an H200, and still some ninety times what we
# use.) Only the distance to the slope counts, and large vectors close it.

# %%
# What the compiler made of it
# ----------------------------
#
# We can ask for the machine code without having the GPU. The next line compiles what a call of `tg.add` would launch
# for four kinds of GPU: NVIDIA's A100 (`sm_80`), H100 and H200 (`sm_90`) and B200 (`sm_100`), and AMD's MI300
# (`gfx942`). A tensor on the `meta` device has a shape and no data.

x = torch.empty(2**20, device="meta")
tg.codegen.inspect(tg.add, x, x)

# %%
# The widest load moves 128 bits, four float32 at a time. No load of an H200 is wider, and we did not ask for it: the
# compiler saw that the addresses of a block follow each other, that the tensors start at a multiple of 16 bytes, and
# that `n_elements` is a multiple of 16, so that the mask never cuts such a group in two. (Where `n_elements` is no
# multiple of 16, all programs would load number by number. For this case `tg.add` has the variant, in which the last
# program alone has a mask.) Registers suffice, without *spills* to memory, and shared memory, where the threads
# of a program exchange data, is not needed: no element depends on another. (Stages are for loops, and come with page
# two.)
#
# The way from the source to these instructions has four stops, and at each of them the compiler says which line of the
# source an instruction came from. *TTIR* is our kernel with the types written out: blocks are still blocks. *TTGIR*
# says in `#blocked` which thread holds which elements of a block; here begins the GPU. *PTX* is what one thread does,
# in NVIDIA's assembly for all its GPUs, and *SASS* what the multiprocessor of this one executes. (LLVM's own
# representation, between the second and the third, is left out.) Look for `tl.load`, and follow it from stop to stop;
# they stand beside the line on the web page and below it in a terminal.

tg.codegen.listing(tg.add, x, x)

# %%
# What we saw
# -----------

print(report.summary())

# %%
# Small vectors are bound by neither memory nor arithmetic: a launch takes its time whatever the kernel does, so the
# rate grows in proportion to the size. A copy of as many bytes, the dotted line, has to be launched as well, and all
# providers follow it from end to end, within some per cent. They move the same bytes; that alone would not be enough,
# as blocks of 32 have shown, but with enough of them under way it is memory that sets the time. A kernel this plain
# cannot win by computing less. The first gain of later pages is to move less: softmax, next, keeps in registers what
# separate operations write to memory and read again.
#
# On the GPU of the record, ours runs at :measured:`vector-add-fp32: triton_gallery / limit at 268435456` of the copy's
# rate with 2²⁸ elements. (A sum reads two tensors and writes one, a copy reads as much as it writes; we take that for
# the reason of values above 100 %, and have not measured it.) With 4096 elements the start of a kernel decides, some
# microseconds in which the GPU has nothing of ours to do. There we are at :measured:`vector-add-fp32: triton_gallery /
# torch at 4096` torch's rate and at :measured:`vector-add-fp32: triton_gallery / torch.compile at 4096` that of
# `torch.compile`: at this length the spreads of all three overlap, and a few per cent say nothing.

# %%
# Break it: forget the mask
# -------------------------
#
# What does the mask protect? Here is the kernel without it, on a thousand elements. The three vectors are cut out of
# longer buffers, as a tensor often is cut out of the memory that its framework manages.


@triton.jit
def unmasked_add_kernel(x_ptr, y_ptr, out_ptr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) + tl.load(y_ptr + offsets))


buffers = torch.zeros(3, 2048, device=DEVICE)
x, y, out = buffers[:, :1000]
buffers[:2, :1000].normal_()  # x and y
neighbours = buffers[2, 1000:]  # the memory right behind `out`; somebody else's, as far as this kernel is concerned
neighbours.fill_(7)

unmasked_add_kernel[(1,)](x, y, out, BLOCK_SIZE=1024)
torch.testing.assert_close(out, x + y)
print("the result is right")

try:
    torch.testing.assert_close(neighbours, torch.full_like(neighbours, 7))
except AssertionError as error:
    print("the neighbours are not:", *str(error).splitlines()[:4], sep="\n")

# %%
# The result is right, and 24 elements that belong to someone else are lost. Nothing was reported: not by the
# compiler, not by the hardware, not by the check against torch. In a real program these 24 elements might be another
# layer's weights, and the loss curve would tell, days later. So a test of a kernel needs a guard zone around the
# output and a size that is not a multiple of the block, and it needs both.
#
# A trace finds the mistake without a guard zone. It knows where each argument ends, counts the lanes that miss it, and
# does not let them through:

neighbours.fill_(7)
trace = tg.trace(unmasked_add_kernel, (1,), x, y, out, BLOCK_SIZE=1024)
print(trace)
assert [access.outside.sum() for access in trace.outside] == [24, 24, 24]
torch.testing.assert_close(neighbours, torch.full_like(neighbours, 7))

# %%
# Exercises
# ---------
#
# When a kernel of yours is wrong, the guide's chapter *Finding what is wrong* has the tools.
#
# 1. Write a kernel for :math:`x \cdot y + z`. Count its bytes first, and let `tg.trace` confirm them. How much faster
#    is it than `x * y` followed by `+ z`, when both are memory-bound? (Hint: the two steps move 24 bytes per element
#    together.)
# 2. Launch `_add_kernel` with `BLOCK_SIZE=1000` on vectors of 1000 numbers, and read the last line of the error. What
#    has to change, and what does not?
# 3. For `x` and `y` of 5000 numbers, `my_add(x[::2], y[::2])` returns something wrong. Say what it returns, then give
#    the kernel a stride for each tensor and check it. (Hint: the address of element :math:`i` is the pointer plus
#    :math:`i` times the stride. The output of `torch.empty_like` has no gaps.)

# %%
# Solutions
# ---------
#
# They run when this page is built, and each of them checks itself.
#
# Solution 1: multiply and add in one kernel
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The kernel reads three vectors and writes one, 16 bytes per element. The two steps move 24, so at best the one kernel
# takes two thirds of their time.


@triton.jit
def multiply_add_kernel(x_ptr, y_ptr, z_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    product = tl.load(x_ptr + offsets, mask=mask) * tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, product + tl.load(z_ptr + offsets, mask=mask), mask=mask)


x, y, z = torch.randn(3, 10007, device=DEVICE)
out = torch.empty_like(x)
trace = tg.trace(multiply_add_kernel, (triton.cdiv(10007, 1024),), x, y, z, out, 10007, BLOCK_SIZE=1024)
torch.testing.assert_close(out, x * y + z)
assert trace.bytes_loaded() + trace.bytes_stored() == 16 * 10007

# %%
# Solution 2: a block of 1000
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The length of a block must be a power of two: its elements are dealt out to threads, whose number is such a power,
# too. The vectors may stay as they are: a block of 1024 takes them, with a mask.

from triton.errors import TritonError

try:
    _add_kernel[(1,)](x, y, out, 1000, BLOCK_SIZE=1000)
except TritonError as error:
    message = str(error)
    print(message.splitlines()[-1])
assert "power of 2" in message

# %%
# Solution 3: strides
# ~~~~~~~~~~~~~~~~~~~
#
# `x[::2]` shares its memory with `x`, two elements apart. The kernel knows nothing of that and reads neighbours, so it
# returns the first halves of `x` and `y` added up. A trace notices: every other lane points between two elements of its
# argument, which is outside. With a stride the kernel goes where the elements are.


@triton.jit
def strided_add_kernel(x_ptr, y_ptr, out_ptr, n_elements, x_stride, y_stride, out_stride, BLOCK_SIZE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = i < n_elements
    x, y = tl.load(x_ptr + i * x_stride, mask=mask), tl.load(y_ptr + i * y_stride, mask=mask)
    tl.store(out_ptr + i * out_stride, x + y, mask=mask)


def strided_add(x, y):
    out = torch.empty(len(x), device=x.device)
    strides = (t.stride(0) for t in (x, y, out))
    strided_add_kernel[(triton.cdiv(len(x), 1024),)](x, y, out, len(x), *strides, BLOCK_SIZE=1024)
    return out


x, y = torch.randn(2, 5000, device=DEVICE)
torch.testing.assert_close(my_add(x[::2], y[::2]), x[:2500] + y[:2500])
torch.testing.assert_close(strided_add(x[::2], y[::2]), x[::2] + y[::2])

trace = tg.trace(_add_kernel, (3,), x[::2], y[::2], torch.empty(2500, device=DEVICE), 2500, BLOCK_SIZE=1024)
print(trace)
assert sum(access.outside.sum() for access in trace.loads("x_ptr")) == 1250

# %%
# References
# ----------
#
# The guide's chapter *Related work* lists these works among its own.
#
# - :cite:`tillet2019triton`: where blocks and programs come from.
# - :cite:`williams2009roofline`: why we count bytes before we measure.
# - :cite:`tritondocs`: its `list of functions <https://triton-lang.org/main/python-api/triton.language.html>`_ is what
#   a kernel may call.

# %%
# Where this page ran
# -------------------

print(tg.benchmark.environment())

# sphinx_gallery_thumbnail_number = 2
