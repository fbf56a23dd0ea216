"""Vector addition: the first kernel, and what it takes to make it a torch function."""

import math

import torch
import triton
import triton.language as tl

from ._arguments import FLOATS, INTS, NUMBERS, check_same_device, check_tensor, got, needs_autograd, number
from ._launch import broadcast, cdiv, collapse, index_dtype, known, launch, next_power_of_2
from ._registration import aligned_batches, apply, differentiable, operator
from ._replay import replayed

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_BLOCK_SIZE = 1024


@triton.jit
def _add_kernel(
    x_ptr,  # (n_elements,)
    y_ptr,  # (n_elements,)
    out_ptr,  # (n_elements,)
    n_elements,
    BLOCK_SIZE: tl.constexpr,
):
    """Program i owns elements i * BLOCK_SIZE to (i + 1) * BLOCK_SIZE: out = x + y."""
    # int64 before the product: a tensor may hold more than 2**31 elements.
    block_start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    # The last block may reach past the end; masked lanes neither load nor store.
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def _add_any_length_kernel(
    x_ptr,  # (n_elements,)
    y_ptr,  # (n_elements,)
    out_ptr,  # (n_elements,)
    n_elements,
    BLOCK_SIZE: tl.constexpr,
):
    """As `_add_kernel`, for an n_elements that is no multiple of 16.

    Its mask may cut through 16 bytes, for which the compiler would load number by number, everywhere. So the last
    program alone has one.
    """
    block_start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    if block_start + BLOCK_SIZE <= n_elements:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) + tl.load(y_ptr + offsets))
    else:
        mask = offsets < n_elements
        x = tl.load(x_ptr + offsets, mask=mask)
        y = tl.load(y_ptr + offsets, mask=mask)
        tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def _load_tile(ptr, indices, sizes, strides, REPEATS: tl.constexpr):
    """Load a tile; where a row or a column repeats one number, load that one."""
    offsets = tl.zeros((1, 1), tl.int64)
    mask = tl.full((1, 1), True, tl.int1)
    for d in tl.static_range(2):
        if not REPEATS[d]:
            # int64 before the product: a tensor may hold more than 2**31 elements.
            offsets = offsets + indices[d].to(tl.int64) * strides[d]
            mask = mask & (indices[d] < sizes[d])
    return tl.load(ptr + offsets, mask=mask)


@triton.jit
def _add_strided_kernel(
    x_ptr,  # any strides over `shape`
    y_ptr,  # any strides over `shape`
    alpha_ptr,  # one element; or None, which stands for 1
    out_ptr,  # any dense strides over `shape`
    shape,  # sizes of the dimensions, first the two of a tile
    x_strides,
    y_strides,
    out_strides,
    X_REPEATS: tl.constexpr,  # whether x's strides along the dimensions of a tile are 0, as where x is broadcast
    Y_REPEATS: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    INDEX_DTYPE: tl.constexpr,
    BLOCK_0: tl.constexpr,
    BLOCK_1: tl.constexpr,
):
    """Program i owns the i-th tile of BLOCK_1 × BLOCK_0 elements: out = x + alpha * y.

    A tile has the innermost dimension of out and one other, that of the neighbours in x or y where they are elsewhere.
    The compiler lets each tensor's neighbouring elements go to neighbouring lanes, and carries them where they are
    added.
    """
    # cdiv in a form that stays within 32 bits, as a size plus a block might not.
    tiles_0 = (shape[0] - 1) // BLOCK_0 + 1
    tiles_1 = (shape[1] - 1) // BLOCK_1 + 1
    tile_0 = (tl.program_id(0) % tiles_0).to(INDEX_DTYPE)
    tile_1 = (tl.program_id(0) // tiles_0 % tiles_1).to(INDEX_DTYPE)
    # Peel one index after another off the tile's number; a broadcast dimension has stride 0.
    rest = (tl.program_id(0) // tiles_0 // tiles_1).to(tl.int64)
    for d in tl.static_range(2, len(shape)):
        index = rest % shape[d]
        rest = rest // shape[d]
        x_ptr += index * x_strides[d]
        y_ptr += index * y_strides[d]
        out_ptr += index * out_strides[d]
    cols = tile_0 * BLOCK_0 + tl.arange(0, BLOCK_0)[None, :]
    rows = tile_1 * BLOCK_1 + tl.arange(0, BLOCK_1)[:, None]
    x = _load_tile(x_ptr, (cols, rows), shape, x_strides, X_REPEATS).to(COMPUTE_DTYPE)
    y = _load_tile(y_ptr, (cols, rows), shape, y_strides, Y_REPEATS).to(COMPUTE_DTYPE)
    if alpha_ptr is not None:
        y *= tl.load(alpha_ptr).to(COMPUTE_DTYPE)
    mask = (cols < shape[0]) & (rows < shape[1])
    out = tl.broadcast_to((x + y).to(out_ptr.dtype.element_ty), mask.shape)
    offsets = cols.to(tl.int64) * out_strides[0] + rows.to(tl.int64) * out_strides[1]
    tl.store(out_ptr + offsets, out, mask=mask)


@triton.jit
def _load_row_by_row(ptr, start, offsets, n_cols, strides, mask, IS_DENSE: tl.constexpr):
    """Load elements `start + offsets` of a matrix, counted row by row; they lie in one row or in two."""
    if IS_DENSE:
        ptrs = ptr + start + offsets
    else:
        row = start // n_cols
        cols = (start - row * n_cols).to(tl.int32) + offsets
        is_next = cols >= n_cols
        cols = tl.where(is_next, cols - n_cols, cols).to(tl.int64)
        ptrs = ptr + cols * strides[0] + (row + is_next) * strides[1]
    return tl.load(ptrs, mask=mask)


@triton.jit
def _add_elements(
    x_ptr, y_ptr, alpha_ptr, out_ptr, start, offsets, n_cols, x_strides, y_strides, mask,
    X_IS_DENSE: tl.constexpr, Y_IS_DENSE: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
):  # fmt: skip
    x = _load_row_by_row(x_ptr, start, offsets, n_cols, x_strides, mask, X_IS_DENSE).to(COMPUTE_DTYPE)
    y = _load_row_by_row(y_ptr, start, offsets, n_cols, y_strides, mask, Y_IS_DENSE).to(COMPUTE_DTYPE)
    if alpha_ptr is not None:
        y *= tl.load(alpha_ptr).to(COMPUTE_DTYPE)
    tl.store(out_ptr + start + offsets, (x + y).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_row_by_row_kernel(
    x_ptr,  # (n_rows, n_cols), any strides
    y_ptr,  # (n_rows, n_cols), any strides
    alpha_ptr,  # one element; or None, which stands for 1
    out_ptr,  # (n_rows, n_cols), contiguous
    n_elements,
    n_cols,
    x_strides,  # along columns and rows
    y_strides,
    X_IS_DENSE: tl.constexpr,  # whether x lies as out does
    Y_IS_DENSE: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # at most n_cols
):
    """Program i owns elements i * BLOCK_SIZE to (i + 1) * BLOCK_SIZE of out: out = x + alpha * y.

    Where rows are odd, tiles of them can be read and written only number by number, and out's memory by 16 bytes.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = start + offsets < n_elements
    # As in `_add_any_length_kernel`, the last program alone needs it.
    if start + BLOCK_SIZE <= n_elements:
        _add_elements(
            x_ptr, y_ptr, alpha_ptr, out_ptr, start, offsets, n_cols, x_strides, y_strides, None,
            X_IS_DENSE, Y_IS_DENSE, COMPUTE_DTYPE,
        )  # fmt: skip
    else:
        _add_elements(
            x_ptr, y_ptr, alpha_ptr, out_ptr, start, offsets, n_cols, x_strides, y_strides, mask,
            X_IS_DENSE, Y_IS_DENSE, COMPUTE_DTYPE,
        )  # fmt: skip


def _empty_output(x: torch.Tensor, y: torch.Tensor, alpha: torch.types.Number) -> torch.Tensor:
    """The output's memory, laid out as the first of x and y that has the full shape; contiguous when neither has."""
    shape = x.shape if _have_shape(x.shape, y) else broadcast(x.shape, y.shape)
    if shape is None:
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise ValueError(f"add: x and y must have shapes that broadcast, got {shapes}")
    dtype = x.dtype if x.dtype == y.dtype else torch.result_type(x, y)
    if isinstance(alpha, float) and not dtype.is_floating_point:
        raise TypeError(f"add: alpha must be an int when the result is {dtype}, got {alpha}")
    if isinstance(alpha, bool) and dtype != torch.bool:
        kinds = "an int or a float" if dtype.is_floating_point else "an int"
        raise TypeError(f"add: alpha must be {kinds} when the result is {dtype}, got {alpha}")
    for t in (x, y):
        if _have_shape(shape, t):
            return torch.empty_like(t, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=x.device)


def _have_shape(shape: tuple[int, ...], x: torch.Tensor) -> bool:
    # torch.export would take an outer size that equals an inner one, which == looks at, for a constant.
    return x.ndim == len(shape) and all(known(m == n) for m, n in zip(x.shape, shape, strict=True))


def _vmap(info, in_dims, x, y, alpha):
    # Whether a tensor has dimensions counts for the dtype of a sum, and that of the batch is none of them.
    shapes = (t.shape if d is None else t.shape[:d] + t.shape[d + 1 :] for t, d in zip((x, y), in_dims, strict=False))
    members = (torch.empty(shape, dtype=t.dtype, device="meta") for t, shape in zip((x, y), shapes, strict=True))
    dtype = torch.result_type(*members)
    if torch.result_type(x, y) != dtype:
        x, y = x.to(dtype), y.to(dtype)
    return _add(*aligned_batches((x, y), in_dims[:2]), alpha), 0


@operator(fake=_empty_output, vmap=_vmap)
def _add(x: torch.Tensor, y: torch.Tensor, alpha: torch.types.Number) -> torch.Tensor:
    out = _empty_output(x, y, alpha)
    n_elements = out.numel()
    if n_elements == 0:
        return out
    flat = x.stride() == y.stride() == out.stride() and x.shape == y.shape
    if flat and alpha == 1 and x.dtype == y.dtype and x.dtype != torch.bool:
        # Same dense layout: the order of the elements does not matter, so memory is walked from end to end.
        kernel = _add_kernel if n_elements % 16 == 0 else _add_any_length_kernel
        launch(kernel, (cdiv(n_elements, _BLOCK_SIZE),), x, y, out, n_elements, BLOCK_SIZE=_BLOCK_SIZE)
        return out
    # From the outermost dimension of out's memory to the innermost.
    order = sorted(range(out.ndim), key=out.stride, reverse=True)
    strides = (t.expand(out.shape).permute(order).stride() for t in (x, y, out))
    shape, strides = collapse(out.permute(order).shape, *strides)
    row_by_row = _go_row_by_row(shape, strides)
    if not row_by_row:
        shape, (x_strides, y_strides, out_strides), (block_0, block_1, num_warps) = _tile(shape, strides)
        if block_0 * block_1 < 128 and n_elements >= 2**20:
            # Many short dimensions would leave programs next to nothing: they are put in order first.
            return _add(*(torch.empty_like(out, dtype=t.dtype).copy_(t.expand(out.shape)) for t in (x, y)), alpha)
    if out.dtype == torch.bool:
        # Or, whatever the number: x + alpha * y would be 0 for True, True and -1.
        alpha = bool(alpha)
    if alpha == 1:
        alpha = None
    else:
        # A one-element tensor keeps all of alpha's digits, where a kernel argument would round it to float32.
        dtype = torch.float64 if out.is_floating_point() else torch.int64
        alpha = torch.full((), alpha, dtype=dtype, device=out.device)
    compute_dtype = _compute_dtype(out.dtype)
    if row_by_row:
        x_strides, y_strides, out_strides = strides
        launch(
            _add_row_by_row_kernel, (cdiv(n_elements, _BLOCK_SIZE),),
            x, y, alpha, out, n_elements, shape[0], x_strides, y_strides,
            X_IS_DENSE=x_strides == out_strides, Y_IS_DENSE=y_strides == out_strides, COMPUTE_DTYPE=compute_dtype,
            BLOCK_SIZE=_BLOCK_SIZE,
        )  # fmt: skip
        return out
    launch(
        _add_strided_kernel, (cdiv(shape[0], block_0) * cdiv(shape[1], block_1) * math.prod(shape[2:]),),
        x, y, alpha, out, shape, x_strides, y_strides, out_strides,
        X_REPEATS=_repeats(x_strides), Y_REPEATS=_repeats(y_strides), COMPUTE_DTYPE=compute_dtype,
        INDEX_DTYPE=index_dtype(max(shape) + 1024), BLOCK_0=block_0, BLOCK_1=block_1, num_warps=num_warps,
    )  # fmt: skip
    return out


def _go_row_by_row(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> bool:
    """Whether tiles of these rows would be moved number by number, and blocks that walk along out's memory need not.

    One of x and y lies as out does, and the other has its neighbours along the rows as well, or one number for a row.
    """
    if len(shape) != 2 or shape[0] % 16 == 0 or not _BLOCK_SIZE <= shape[0] < 2**30:
        return False
    return strides[2] in strides[:2] and all(s[0] <= 1 for s in strides)


def _tile(
    shape: tuple[int, ...], strides: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]], tuple[int, int, int]]:
    """Shape and strides with the dimensions of a tile first; its sizes along those, and its warps.

    A square has 4096 elements, other tiles 2048 (1024 of a single row): of those tried on an H200, about the quickest.
    """
    if len(shape) == 1:
        shape, strides = (*shape, 1), [(*s, 0) for s in strides]
    # One dimension is that of out's neighbours. If x or y has its own along another one, a square tile serves both;
    # otherwise the longest other one leaves the fewest tiles.
    others = range(1, len(shape))
    across = [d for d in others if min(shape[0], shape[d]) >= 32 and any(s[d] == 1 < s[0] for s in strides)]
    if across:
        second, tile = across[0], (64, 64, 8)
    else:
        second = max(others, key=lambda d: shape[d])
        block_0 = min(256 if shape[second] > 1 else 1024, next_power_of_2(shape[0]))
        tile = block_0, min(2048 // block_0, next_power_of_2(shape[second])), 4
    order = 0, second, *(d for d in others if d != second)
    return tuple(shape[d] for d in order), [tuple(s[d] for d in order) for s in strides], tile


def _repeats(strides: tuple[int, ...]) -> tuple[bool, bool]:
    return strides[0] == 0, strides[1] == 0


def _number_tensor(number: float, x: torch.Tensor) -> torch.Tensor:
    """A 0-d tensor that promotes with x as the Python number does, and keeps the number's digits where it can."""
    if x.is_floating_point():
        dtype = torch.float64
    elif isinstance(number, float):
        dtype = torch.get_default_dtype()
    else:
        dtype = torch.bool if isinstance(number, bool) and x.dtype == torch.bool else torch.int64
        number = number - 2**64 if number >= 2**63 else number
    if dtype.is_floating_point and abs(number) > torch.finfo(dtype).max:
        number = math.copysign(math.inf, number)
    # Made from x: outside of its mode, a FakeTensor takes none but its like.
    if torch.compiler.is_compiling():
        # new_full would compile anew for each number.
        y = x.new_ones((), dtype=dtype).mul(number)
    else:
        y = x.new_full((), number, dtype=dtype)
    # Beside dimensions, a 0-d tensor never widens within its category; beside another 0-d tensor it would.
    same_category = x.dtype != torch.bool and x.is_floating_point() == y.is_floating_point()
    return y.to(x.dtype) if x.ndim == 0 and same_category else y


def _on_one_device(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y. One without dimensions that lives on the CPU comes to the other's device, as in torch."""
    if y.ndim == 0 and y.device.type == "cpu":
        return x, y.to(x.device)
    if x.ndim == 0 and x.device.type == "cpu":
        return x.to(y.device), y
    return x, y


def _compute_dtype(dtype: torch.dtype) -> tl.dtype:
    if dtype == torch.float64:
        return tl.float64
    return tl.float32 if dtype.is_floating_point else tl.int64


class _Add(torch.autograd.Function):
    @staticmethod
    def constants(x, y, alpha):
        return {"alpha": alpha}

    @staticmethod
    def setup(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dout):
        # Autograd sums over broadcast dimensions and casts to the dtype of the input.
        dx = dout if ctx.needs_input_grad[0] else None
        dy = (dout if ctx.alpha == 1 else dout * ctx.alpha) if ctx.needs_input_grad[1] else None
        return dx, dy, None


differentiable(_add, _Add)


@replayed
def add(x: torch.Tensor, y: torch.Tensor | float, *, alpha: float = 1) -> torch.Tensor:
    r"""Add two tensors, the second one scaled, as :func:`torch.add` does.

    .. math:: \text{out} = x + \alpha \, y

    Args:
        x: any shape; float16, bfloat16, float32, float64, uint8, a signed integer dtype or bool.
        y: a tensor whose shape broadcasts with x's, or a Python number. Beside a tensor on a GPU, one without
            dimensions may live on the CPU.
        alpha: the factor of y; an int when the result's dtype is an integer, a bool only when it is bool.

    Returns:
        A tensor of the broadcast shape, in the dtype that :func:`torch.result_type` gives for x and y. It lies in
        memory like the first of x and y that has this shape, or is contiguous where neither has.

    Raises:
        TypeError: x is no tensor, y neither tensor nor number, a dtype is not supported, or alpha is no number, or one
            that the result's dtype does not take.
        ValueError: the shapes do not broadcast, the tensors live on different devices or where no kernel can run, or an
            int is outside of [-2**63, 2**64) as y, of [-2**63, 2**63) as alpha.
        NotImplementedError: forward-mode differentiation reaches an argument; reverse mode is supported.

    Notes:
        An alpha or a number that the result's dtype cannot hold wraps around in an integer and becomes infinity in
        float32, where torch refuses some. The sum of two tensors of one dtype is rounded once. A number, alpha, alpha
        times y, and tensors of mixed dtypes are first rounded to the dtype computed in (float32; float64 for
        float64, int64 for integers), and then the sum to the result's dtype; so alpha times y may become infinity where
        the sum would not. (Next to a tensor without dimensions, a number is rounded to that tensor's dtype first.)
        The gradients are those of the formula, summed over broadcast dimensions. Two tensors of the same dense layout
        are walked from end to end; broadcasting, strides, mixed dtypes, bool and alpha take a kernel that works in
        tiles, of 64 by 64 elements where neighbours in one tensor's memory are none in the other's, as in ``x + y.T``
        (if both dimensions have 32 elements or more). Rows of 1024 elements or more, in a number that 16 does not
        divide, are walked from end to end as well if one tensor lies as the sum does and the other's neighbours are
        those along the rows, or one number serves a row.

    Example:
        >>> import torch, triton_gallery
        >>> triton_gallery.add(torch.ones(3), torch.arange(3.0), alpha=2)
        tensor([1., 3., 5.])
    """
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.device != y.device:
        x, y = _on_one_device(x, y)
    check_tensor("add", "x", x, FLOATS + _INTEGERS)
    y, alpha = number(y), number(alpha)
    if isinstance(y, NUMBERS):
        if isinstance(y, INTS) and not -(2**63) <= y < 2**64:
            raise ValueError(f"add: y must be in [-2**63, 2**64) when it is an int, got {got(y)}")
        y = _number_tensor(y, x)
    elif not isinstance(y, torch.Tensor):
        raise TypeError(f"add: y must be a torch.Tensor or a Python number, got {type(y).__name__}")
    check_tensor("add", "y", y, FLOATS + _INTEGERS)
    check_same_device("add", x=x, y=y)
    if not isinstance(alpha, NUMBERS):
        raise TypeError(f"add: alpha must be a Python number, got {type(alpha).__name__}")
    if isinstance(alpha, INTS) and not -(2**63) <= alpha < 2**63:
        raise ValueError(f"add: alpha must be in [-2**63, 2**63) when it is an int, got {got(alpha)}")
    if needs_autograd(x, y):
        return apply(_Add, x, y, alpha)
    return _add(x, y, alpha)
