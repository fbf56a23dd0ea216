"""Dropout without a mask in memory: the backward pass draws the same random numbers again."""

import functools
import threading

import numpy as np
import torch
import triton
import triton.language as tl

from ._arguments import (
    FLOATS,
    INTS,
    NUMBERS,
    check_same_device,
    check_tensor,
    got,
    is_tracing,
    needs_autograd,
    number,
)
from ._launch import cdiv, collapse, index_dtype, known, launch
from ._registration import apply, differentiable, operator
from ._replay import replayed

_SEED_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_BLOCK_SIZE = 1024


@triton.jit
def _draw_block(seed, counters):
    """32 random bits for each of the elements 8 * c to 8 * c + 7, for all counters c, one after another.

    The eight share the four words of Philox counter c: the first two take word 0, the second of them with its halves
    swapped, the next two word 1, and so on.
    """
    a, b, c, d = tl.randint4x(seed, counters)
    words = tl.join(tl.join(a, c), tl.join(b, d)).to(tl.uint32, bitcast=True)  # (..., 2, 2): in order a, b, c, d
    return tl.reshape(tl.join(words, _swap_halves(words)), (8 * counters.shape[0],))


@triton.jit
def _swap_halves(word):
    return (word << 16) | (word >> 16)


@triton.jit(do_not_specialize=["seed"])
def _dropout_kernel(
    x_ptr,  # (n_elements,)
    out_ptr,  # (n_elements,)
    n_elements,
    seed: tl.int64,
    seed_ptr,  # one int64 that takes the place of seed, or None
    threshold: tl.uint32,  # p * 2**32
    scale: tl.float64,  # 1 / (1 - p)
    BLOCK_SIZE: tl.constexpr,
):
    """Program i owns elements i * BLOCK_SIZE to (i + 1) * BLOCK_SIZE: out = x * scale if draw >= threshold, else 0."""
    COMPUTE_DTYPE: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    block_start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    # A full block does without the mask. That of an odd n_elements would have the compiler load number by number.
    is_full = block_start + BLOCK_SIZE <= n_elements
    x = tl.load(x_ptr + offsets) if is_full else tl.load(x_ptr + offsets, mask=mask)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    # Eight elements share a counter.
    counters = block_start // 8 + tl.arange(0, BLOCK_SIZE // 8)
    keep = _draw_block(seed, counters) >= threshold
    # A select, not a product with 0: a dropped infinity or NaN becomes 0 as well.
    out = tl.where(keep, x.to(COMPUTE_DTYPE) * tl.full((), scale, COMPUTE_DTYPE), 0.0).to(out_ptr.dtype.element_ty)
    if is_full:
        tl.store(out_ptr + offsets, out)
    else:
        tl.store(out_ptr + offsets, out, mask=mask)


@triton.jit
def _draw_each(seed, indices):
    """The 32 random bits of each element index: what `_draw_block` gives, for indices in any order."""
    a, b, c, d = tl.randint4x(seed, indices // 8)
    i = indices % 8 // 2
    word = tl.where(i < 2, tl.where(i == 0, a, b), tl.where(i == 2, c, d)).to(tl.uint32, bitcast=True)
    return tl.where(indices % 2 == 0, word, _swap_halves(word))


@triton.jit(do_not_specialize=["seed"])
def _dropout_strided_kernel(
    x_ptr,  # any strides over the groups and their members
    out_ptr,  # any strides over the groups and their members
    n_groups,
    seed: tl.int64,
    seed_ptr,  # one int64 that takes the place of seed, or None
    shape,  # of the groups, in the order of out's memory, innermost first
    x_strides,
    out_strides,
    group_strides,  # of the groups' numbers: group i has the elements GROUP * i to GROUP * (i + 1) in row-major order
    x_step,  # from one member of a group to the next
    out_step,
    threshold: tl.uint32,  # p * 2**32
    scale: tl.float64,  # 1 / (1 - p)
    INDEX_DTYPE: tl.constexpr,
    GROUP: tl.constexpr,  # 8, which share a counter, or 1
    ALIGNED: tl.constexpr,  # x_strides and out_strides are multiples of GROUP
    BLOCK_SIZE: tl.constexpr,
):
    """Program i owns so many groups that they have BLOCK_SIZE elements: dropout for any strides."""
    COMPUTE_DTYPE: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    BLOCK_GROUPS: tl.constexpr = BLOCK_SIZE // GROUP
    groups = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    mask = (groups < n_groups)[None, :]
    x_offsets = tl.zeros((BLOCK_GROUPS,), tl.int64)
    out_offsets = tl.zeros((BLOCK_GROUPS,), tl.int64)
    numbers = tl.zeros((BLOCK_GROUPS,), tl.int64)
    # Division is the costly part, and several times cheaper in 32 bits where they suffice.
    rest = groups.to(INDEX_DTYPE)
    for d in tl.static_range(len(shape)):
        coordinate = (rest % shape[d]).to(tl.int64)
        rest = rest // shape[d]
        x_offsets += coordinate * x_strides[d]
        out_offsets += coordinate * out_strides[d]
        numbers += coordinate * group_strides[d]
    if ALIGNED:
        x_offsets = tl.multiple_of(x_offsets, GROUP)
        out_offsets = tl.multiple_of(out_offsets, GROUP)
    members = tl.arange(0, GROUP)[:, None].to(tl.int64)
    x = tl.load(x_ptr + x_offsets[None, :] + members * x_step, mask=mask).to(COMPUTE_DTYPE)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    if GROUP == 8:
        draws = tl.trans(tl.reshape(_draw_block(seed, numbers), (BLOCK_GROUPS, 8)))
    else:
        draws = _draw_each(seed, numbers)[None, :]
    out = tl.where(draws >= threshold, x * tl.full((), scale, COMPUTE_DTYPE), 0.0)
    tl.store(out_ptr + out_offsets[None, :] + members * out_step, out.to(out_ptr.dtype.element_ty), mask=mask)


def _empty_output(x: torch.Tensor, seed: int, seed_tensor: torch.Tensor | None, p: float) -> torch.Tensor:
    return torch.empty_like(x)


@operator(fake=_empty_output, varying=1)
def _dropout(x: torch.Tensor, seed: int, seed_tensor: torch.Tensor | None, p: float) -> torch.Tensor:
    if p == 1:
        return torch.zeros_like(x)
    out = torch.empty_like(x)
    n_elements = out.numel()
    if n_elements == 0:
        return out
    grid = (cdiv(n_elements, _BLOCK_SIZE),)
    threshold = min(round(p * 2**32), 2**32 - 1)
    scale = 1 / (1 - p)
    if x.is_contiguous():
        # 32 bytes for each thread: with fewer, starting threads weighs more; with more, fewer of them hide the wait.
        # A small tensor does not fill the GPU, and is done sooner with more threads.
        num_warps = 4 if n_elements < 2**20 else max(1, _BLOCK_SIZE * x.element_size() // 1024)
        launch(
            _dropout_kernel, grid, x, out, n_elements, seed, seed_tensor, threshold, scale,
            BLOCK_SIZE=_BLOCK_SIZE, num_warps=num_warps,
        )  # fmt: skip
        return out
    # Groups of eight elements share their random numbers; they lie along the last dimension, if it has whole ones.
    group = 8 if x.ndim and x.shape[-1] % 8 == 0 else 1
    xs, outs = (t.unflatten(-1, (-1, group))[..., 0] if group > 1 else t for t in (x, out))
    row_major = torch.empty(xs.shape, device="meta")
    # Programs walk out's memory, so that neighbouring lanes touch neighbouring addresses.
    order = sorted(range(outs.ndim), key=outs.stride, reverse=True)
    shape, strides = collapse(outs.permute(order).shape, *(t.permute(order).stride() for t in (xs, outs, row_major)))
    launch(
        _dropout_strided_kernel, (cdiv(n_elements, _BLOCK_SIZE),),
        x, out, n_elements // group, seed, seed_tensor, shape, *strides,
        x.stride(-1) if x.ndim else 1, out.stride(-1) if x.ndim else 1, threshold, scale,
        INDEX_DTYPE=index_dtype(n_elements), GROUP=group,
        ALIGNED=all(stride % group == 0 for stride in (*strides[0], *strides[1])), BLOCK_SIZE=_BLOCK_SIZE,
    )  # fmt: skip
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def constants(x, seed, seed_tensor, p):
        return {"p": p}

    @staticmethod
    def setup(ctx, inputs, output):
        _, ctx.seed, seed_tensor, *_ = inputs
        ctx.save_for_backward(seed_tensor)

    @staticmethod
    def backward(ctx, dout):
        # Dropout is linear in x: its gradient is the same dropout, same seed, of dout.
        (seed_tensor,) = ctx.saved_tensors
        if dout.is_sparse:  # as the gradient of an embedding's weight may be
            dout = dout.to_dense()
        return _apply(dout, ctx.seed, seed_tensor, ctx.p), None, None, None


differentiable(_dropout, _Dropout)


def _apply(x: torch.Tensor, seed: int, seed_tensor: torch.Tensor | None, p: float) -> torch.Tensor:
    if needs_autograd(x):
        return apply(_Dropout, x, seed, seed_tensor, p)
    return _dropout(x, seed, seed_tensor, p)


def _resolve(seed: int | torch.Tensor | None, x: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """The seed as a number, or (second) as one int64 in the memory of x's device, which no call waits for."""
    if isinstance(seed, torch.Tensor):
        return 0, seed.to(torch.int64)
    if seed is None:
        # Drawn on the device, so that each replay of a CUDA graph or run of a compiled function draws anew. Made from
        # x: outside of its mode, a FakeTensor takes none but its like.
        return 0, torch.randint_like(x.new_empty((), dtype=torch.int64), 2**63 - 1)
    return seed, None


def _draws_on_host(x: object) -> bool:
    """Whether a seed may be a number of this call alone, which no CUDA graph and no compiled function keeps."""
    return (
        isinstance(x, torch.Tensor)
        and x.is_cuda
        and x.dtype in FLOATS
        and x.layout == torch.strided
        and not (x.is_nested or is_tracing() or torch.cuda.is_current_stream_capturing())
        and x.numel() > 0
    )


_generator_lock = threading.Lock()


def _draw_seed(generator: torch.Generator) -> int:
    """A seed made of the state of a CUDA generator, which moves on as if it had drawn four numbers.

    A kernel that draws the seed on the device would cost a small dropout more time than the dropout itself.
    """
    with _generator_lock:
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
    # SplitMix64: neighbouring states give unrelated seeds.
    x = (generator.initial_seed() + (offset // 4 + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) - 2**63


def _check_seed(seed: object, x: torch.Tensor) -> None:
    if isinstance(seed, torch.Tensor):
        check_tensor("dropout", "seed", seed, _SEED_DTYPES)
        check_same_device("dropout", x=x, seed=seed)
        if seed.numel() != 1:
            raise ValueError(f"dropout: seed must hold one element, got shape {tuple(seed.shape)}")
    elif isinstance(seed, bool) or not (seed is None or isinstance(seed, INTS)):
        raise TypeError(f"dropout: seed must be an int, an integer tensor or None, got {got(seed)}")
    elif seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"dropout: seed must be in [-2**63, 2**64), got {got(seed)}")


@functools.partial(replayed, varying=3)
def _checked_dropout(x: torch.Tensor, p: float, training: bool, seed: int | torch.Tensor | None) -> torch.Tensor:
    check_tensor("dropout", "x", x)
    p = number(p)
    if isinstance(p, bool) or not isinstance(p, NUMBERS):
        raise TypeError(f"dropout: p must be a Python number, got {type(p).__name__}")
    # NaN fails every comparison, so it lands here too.
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p must be in [0, 1], got {got(p)}")
    if not isinstance(training, bool):
        raise TypeError(f"dropout: training must be True or False, got {got(training)}")
    _check_seed(seed, x)
    if not training or p == 0 or known(x.numel() == 0):
        return x
    # Where nothing is left to chance, torch's generator does not move.
    return _apply(x, *_resolve(0 if p == 1 and seed is None else seed, x), float(p))


def dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, *, seed: int | torch.Tensor | None = None
) -> torch.Tensor:
    r"""Zero elements with probability p and scale the others, as :func:`torch.nn.functional.dropout` does.

    .. math:: \text{out}_i = \begin{cases} x_i / (1 - p) & u_i \ge p \\ 0 & u_i < p \end{cases}

    where :math:`u_i`, uniform in [0, 1), is a function of the seed and of the element's index, so no mask is stored:
    the backward pass computes it again.

    Args:
        x: any shape and strides; float16, bfloat16, float32 or float64.
        p: the probability of an element to become 0, in [0, 1].
        training: False returns x itself, as p = 0 does and an x without elements.
        seed: None draws a seed from torch's generator of x's device, which :func:`torch.manual_seed` governs. An int in
            [-2**63, 2**64), or a tensor of one element on x's device, int8 to int64 or uint8, gives the same mask at
            every call.

    Returns:
        A tensor of x's shape, dtype and (where x is dense) strides; for p = 0, outside training or without elements x
        itself.

    Raises:
        TypeError: x is no floating-point tensor, or p, training or seed has another type.
        ValueError: p is outside [0, 1] or NaN; the seed exceeds 64 bits, does not hold one element, or is on another
            device than x; or x lives where no kernel can run.
        NotImplementedError: forward-mode differentiation reaches an argument; reverse mode is supported.

    Notes:
        Element i, counted in row-major order whatever the strides, takes word i % 8 // 2 of the Philox-4x32-10 counter
        i // 8 under the seed as key, and swaps its halves where i is odd; so the mask depends on neither block size nor
        launch nor device. The element is kept where these 32 bits are at least p * 2**32, rounded: p is exact to
        2**-32. Two elements that share a word depend on each other only where the first 16 bits of one equal those of
        p * 2**32, once in 65536 times. The product is computed in float32 (float64 for float64) and rounded once. A
        dropped infinity or NaN gives 0, where torch may give NaN.
        Gradients of any order draw the same mask. A seed in a tensor is read on the device when the kernel runs, so
        nothing waits for it, and with ``seed=None`` each replay of a CUDA graph draws a new mask. Changing an int64
        tensor in place between forward and backward is an error, which autograd reports; a seed of another dtype is
        copied at the call. Under ``torch.func.vmap`` the index counts within a member: with an int every member has
        the same mask, whatever ``randomness`` says. A batch of seeds gives each its own, and so does
        ``randomness="different"`` with ``seed=None``.

    Example:
        >>> import torch, triton_gallery
        >>> x = torch.arange(1.0, 9.0)
        >>> triton_gallery.dropout(x, p=0.5, seed=7)
        tensor([ 2.,  0.,  6.,  8.,  0., 12.,  0., 16.])

    References:
        Srivastava et al., Dropout: a simple way to prevent neural networks from overfitting, JMLR 2014.
        Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
    """
    # A call that will be refused must not move torch's generator.
    if seed is None and training is True and type(p) in (int, float) and 0 < p < 1 and _draws_on_host(x):
        seed = _draw_seed(torch.cuda.default_generators[x.get_device()])
    elif isinstance(seed, int):
        if 2**63 <= seed < 2**64:
            # The 64 bits count: -1 and 2**64 - 1 are the same seed.
            seed -= 2**64
    elif isinstance(seed, np.integer):
        return dropout(x, p, training, seed=int(seed))
    return _checked_dropout(x, p, training, seed)
