import itertools
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

import triton_gallery as tg
from accuracy import DEVICE, FUZZ, assert_as_accurate_as_torch
from triton_gallery._launch import launch
from triton_gallery.vector_add import _add_any_length_kernel, _add_kernel, _add_row_by_row_kernel, _add_strided_kernel

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]


def random(shape, dtype):
    if dtype.is_floating_point:
        return torch.randn(shape, device=DEVICE).to(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    low, high = (0, 2) if dtype == torch.bool else (0, 200) if dtype == torch.uint8 else (-100, 100)
    return torch.randint(low, high, shape, device=DEVICE).to(dtype)


def assert_matches_torch(x, y, **alpha):
    """Integers equal torch's; floating-point results are as accurate as torch's."""
    inputs = [t.clone() for t in (x, y) if isinstance(t, torch.Tensor)]
    ours, torchs = tg.add(x, y, **alpha), torch.add(x, y, **alpha)
    assert ours.dtype == torchs.dtype and ours.shape == torchs.shape and ours.device == torchs.device
    if torchs.is_floating_point():
        wide = [t.double() if isinstance(t, torch.Tensor) else t for t in (x, y)]
        # Both round alpha * y before they add, so a sum that cancels has an error of alpha * y's last bit.
        epsilon = torch.finfo(torch.float64 if torchs.dtype == torch.float64 else torch.float32).eps
        assert_as_accurate_as_torch(ours, torchs, torch.add(*wide, **alpha), floor=8 * epsilon)
    else:
        assert torch.equal(ours, torchs)
    for t, before in zip([t for t in (x, y) if isinstance(t, torch.Tensor)], inputs, strict=True):
        torch.testing.assert_close(t, before, rtol=0, atol=0, equal_nan=True)


# --- sizes and layouts ---


@pytest.mark.parametrize("n", [1, 2, 3, 127, 128, 1023, 1024, 1025, 2049])
def test_add_matches_torch_at_any_length(n):
    assert_matches_torch(random(n, torch.float32), random(n, torch.float32))
    assert_matches_torch(random(n, torch.float32), random(n, torch.float32), alpha=0.7)


@pytest.mark.parametrize("n", [1, 15, 1000, 1008, 1009, 1023, 1024, 1025, 2047, 2049, 5000])
def test_add_of_any_length(n):
    memory = random(2 * n + 16, torch.float16)
    x, y = memory[:n], memory[n + 16 :]
    assert_matches_torch(x, y)
    assert_matches_torch(x.reshape(1, 1, n).permute(2, 0, 1), y.reshape(1, 1, n).permute(2, 0, 1))  # dense as well


@pytest.mark.parametrize("n", [7, 100, 1024, 2049])
def test_add_of_any_length_writes_nothing_beyond_the_end(n):
    x, y = random(n, torch.float32), random(n, torch.float32)
    out = torch.full((n + 1024,), 7.0, device=DEVICE)
    launch(_add_any_length_kernel, (triton.cdiv(n, 256),), x, y, out, n, BLOCK_SIZE=256)
    assert torch.equal(out[:n], x + y) and (out[n:] == 7).all()


@pytest.mark.parametrize("block_size", [1, 16, 128, 1024])
def test_add_writes_nothing_beyond_the_end(block_size):
    x, y = random(100, torch.float32), random(100, torch.float32)
    memory = torch.full((3, 130), 7.0, device=DEVICE)
    out = memory[1, :100]
    launch(_add_kernel, (triton.cdiv(100, block_size),), x, y, out, 100, BLOCK_SIZE=block_size)
    assert torch.equal(out, x + y)
    assert (memory[0] == 7).all() and (memory[2] == 7).all() and (memory[1, 100:] == 7).all()


LAYOUTS = {
    "0-d": lambda r: (r(), r()),
    "0-d and 1-d": lambda r: (r(), r(5)),
    "one element": lambda r: (r(1, 1), r(1)),
    "a row to every row": lambda r: (r(7, 13), r(13)),
    "a column to every column": lambda r: (r(7, 13), r(7, 1)),
    "a column and a row": lambda r: (r(7, 1), r(13)),
    "a row and a matrix": lambda r: (r(13), r(7, 13)),
    "inner and outer dimensions": lambda r: (r(3, 1, 4), r(2, 1)),
    "channels": lambda r: (r(2, 6, 3, 5), r(6, 1, 1)),
    "channels last": lambda r: (r(2, 6, 3, 5).to(memory_format=torch.channels_last), r(6, 1, 1)),
    "5-d": lambda r: (r(2, 1, 3, 1, 5), r(4, 1, 6, 1)),
    "both transposed": lambda r: (r(5, 7).t(), r(5, 7).t()),
    "one transposed": lambda r: (r(5, 7).t(), r(7, 5)),
    "the other transposed": lambda r: (r(7, 5), r(5, 7).t()),
    "differently permuted": lambda r: (r(3, 4, 5).permute(2, 0, 1), r(4, 3, 5).permute(2, 1, 0)),
    "sliced": lambda r: (r(9, 26)[1:-1, ::2], r(7, 14)[:, 1:]),
    "a slice with an offset": lambda r: (r(130)[3:], r(127)),
    "expanded": lambda r: (r(1, 9).expand(7, 9), r(1, 9).expand(7, 9)),
    "expanded and dense": lambda r: (r(7, 1).expand(7, 9), r(7, 9)),
    "overlapping": lambda r: (r(40).as_strided((9, 8), (3, 1)), r(9, 8)),
    "square tiles": lambda r: (r(70, 100), r(100, 70).t()),
    "square tiles in a batch": lambda r: (r(3, 70, 40), r(40, 3, 70).permute(1, 2, 0)),
    "longer than a tile": lambda r: (r(11, 1100), r(11, 2200)[:, ::2]),
    "odd rows": lambda r: (r(5, 1031), r(1031)),
    "a row and odd rows": lambda r: (r(1031), r(5, 1031)),
    "odd rows and a column": lambda r: (r(3, 2, 1025), r(3, 2, 1)),
    "odd rows and longer ones": lambda r: (r(6, 1031), r(6, 1040)[:, 9:]),
    "columns longer than a tile": lambda r: (r(2100, 3), r(2100, 1)),
    "sizes of one": lambda r: (r(1, 7, 1, 5), r(1, 7, 1, 5).transpose(0, 2)),
    "empty": lambda r: (r(0), r(0)),
    "empty by broadcasting": lambda r: (r(0, 3), r(3)),
    "empty inside": lambda r: (r(4, 0, 3), r(4, 1, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_add_matches_torch_in_any_layout(name):
    x, y = LAYOUTS[name](lambda *shape: random(shape, torch.float32))
    assert_matches_torch(x, y)
    assert_matches_torch(x, y, alpha=-0.3)


@pytest.mark.parametrize("block", [(1, 1), (4, 2), (2, 8), (16, 16)], ids=str)
def test_add_strided_kernel_at_any_block_size(block):
    x, y = random((5, 7), torch.float32), random((5, 1), torch.float32)
    memory = torch.full((3, 35), 7.0, device=DEVICE)
    alpha = torch.tensor(2.0, device=DEVICE, dtype=torch.float64)
    launch(
        _add_strided_kernel, (triton.cdiv(7, block[0]) * triton.cdiv(5, block[1]),),
        x, y, alpha, memory[1], (7, 5), (1, 7), (0, 1), (1, 7),
        X_REPEATS=(False, False), Y_REPEATS=(True, False), COMPUTE_DTYPE=tl.float32,
        INDEX_DTYPE=tl.int32, BLOCK_0=block[0], BLOCK_1=block[1],
    )  # fmt: skip
    assert torch.equal(memory[1].view(5, 7), x + 2 * y)
    assert (memory[0] == 7).all() and (memory[2] == 7).all()


@pytest.mark.parametrize(("n_cols", "block"), [(7, 4), (7, 2), (4, 4)], ids=str)
def test_add_row_by_row_kernel_at_any_block_size(n_cols, block):
    x, y = random((5, n_cols), torch.float32), random((5, 1), torch.float32)
    memory = torch.full((3, 5 * n_cols), 7.0, device=DEVICE)
    launch(
        _add_row_by_row_kernel, (triton.cdiv(5 * n_cols, block),),
        x, y, None, memory[1], 5 * n_cols, n_cols, (1, n_cols), (0, 1),
        X_IS_DENSE=True, Y_IS_DENSE=False, COMPUTE_DTYPE=tl.float32, BLOCK_SIZE=block,
    )  # fmt: skip
    assert torch.equal(memory[1].view(5, n_cols), x + y)
    assert (memory[0] == 7).all() and (memory[2] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float64], ids=str)
def test_add_of_odd_rows_in_any_dtype(dtype):
    x, y = random((3, 1027), dtype), random((1027,), torch.float16 if dtype == torch.float64 else dtype)
    assert_matches_torch(x, y)
    assert_matches_torch(y, x, alpha=True if dtype == torch.bool else 3)


def test_many_short_dimensions_are_put_in_order_first():
    x, y = random((2,) * 20, torch.float32), random((2,) * 20, torch.float32)
    y = y.permute(*reversed(range(20)))
    assert torch.equal(tg.add(x, y), x + y)
    torch.testing.assert_close(tg.add(y, x, alpha=0.5), y + 0.5 * x)


def test_add_of_a_tensor_and_itself():
    x = random((6, 9), torch.float32)
    assert torch.equal(tg.add(x, x), 2 * x)
    assert torch.equal(tg.add(x, x.t().contiguous().t()), 2 * x)


@pytest.mark.parametrize("name", ["both transposed", "channels last", "one transposed", "expanded and dense"])
def test_add_lays_its_output_out_as_torch(name):
    x, y = LAYOUTS[name](lambda *shape: random(shape, torch.float32))
    assert tg.add(x, y).stride() == torch.add(x, y).stride()


def test_add_reaches_addresses_beyond_32_bits():
    torch.utils.deterministic.fill_uninitialized_memory = False  # the gigabytes between the rows are never touched
    try:
        x = torch.empty(3 * 2**30 + 64, dtype=torch.float16, device=DEVICE).as_strided((4, 33), (2**30, 1))
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    x.copy_(torch.randn(4, 33))
    y = random((4, 33), torch.float16)
    assert torch.equal(tg.add(x, y), x + y)
    assert torch.equal(tg.add(y, x, alpha=2), y + 2 * x)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2**31 - 1000, 2**31 + 12345])  # a block more than the first does not fit into 32 bits
def test_add_of_about_2_to_the_31_elements(n):
    x = torch.randint(-100, 100, (n,), dtype=torch.int8, device=DEVICE)
    y = torch.randint(-20, 20, (n,), dtype=torch.int8, device=DEVICE)
    expected = x + y
    assert torch.equal(tg.add(x, y), expected)
    assert torch.equal(tg.add(x, y, alpha=-1), x - y)


# --- dtypes and numbers ---


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_add_matches_torch_in_one_dtype(dtype):
    x, y = random((5, 30), dtype), random((5, 30), dtype)
    assert_matches_torch(x, y)
    assert_matches_torch(x, y[0])
    assert_matches_torch(x, y, alpha=3)


@pytest.mark.parametrize(
    ("x_dtype", "y_dtype"), list(itertools.permutations(FLOATS + INTEGERS, 2)), ids=lambda dtype: str(dtype)[6:]
)
def test_add_promotes_as_torch(x_dtype, y_dtype):
    x, y = random((3, 5), x_dtype), random((3, 5), y_dtype)
    assert_matches_torch(x, y)
    assert_matches_torch(x, y[0, 0])  # a 0-d tensor promotes across categories only
    assert_matches_torch(x[0, 0], y, alpha=2)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("number", [0, 3, -1, 2.5, 0.1, True, math.inf, math.nan, 300, 2**40], ids=str)
@pytest.mark.parametrize("shape", [(2, 5), ()], ids=["2-d", "0-d"])
def test_add_of_a_number_matches_torch(number, dtype, shape):
    assert_matches_torch(random(shape, dtype), number)
    assert_matches_torch(random(shape, dtype), number, alpha=2)


def test_a_tensor_without_dimensions_may_live_on_the_cpu():
    x, number = torch.randn(3, 4, device=DEVICE), torch.tensor(2.0, requires_grad=True)
    for value in (2.0, 2.0, 3.0, -1.5):  # more than one call, as later ones are replayed
        with torch.no_grad():
            number.fill_(value)
        for out in (tg.add(x, number), tg.add(number, x)):
            assert torch.equal(out, x + value) and torch.autograd.grad(out.sum(), number)[0] == 12
    meta = torch.empty(3, 4, device="meta")
    assert tg.add(meta, number).is_meta and tg.add(number, meta).is_meta
    with pytest.raises(ValueError, match="y must be on the device of x, meta, got"):
        tg.add(meta, torch.zeros(1, device=DEVICE))


def test_add_of_a_number_follows_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        assert_matches_torch(torch.arange(5, device=DEVICE), 0.1)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("alpha", [0, 1, 2, -1, 0.1, 1e-3, 1000, math.inf, math.nan], ids=str)
def test_add_scales_by_alpha(alpha, dtype):
    assert_matches_torch(random(50, dtype), random(50, dtype), alpha=alpha)


def test_add_keeps_every_digit_of_a_number():
    # float16 rounds 0.1 down far enough that three times the rounded number is not the float16 next to 0.3.
    x = torch.zeros(3, dtype=torch.float16, device=DEVICE)
    assert torch.equal(tg.add(x, 0.1, alpha=3), torch.full_like(x, 0.3))
    x = torch.zeros(3, dtype=torch.float64, device=DEVICE)
    assert tg.add(x, 0.1).tolist() == [0.1] * 3


def test_add_keeps_every_digit_of_alpha():
    x, y = torch.zeros(3, dtype=torch.float64, device=DEVICE), torch.ones(3, dtype=torch.float64, device=DEVICE)
    assert tg.add(x, y, alpha=0.1).tolist() == [0.1] * 3
    x, y = torch.tensor([1, 2], device=DEVICE), torch.tensor([1, 3], device=DEVICE)
    assert tg.add(x, y, alpha=2**60 + 1).tolist() == [2**60 + 2, 3 * 2**60 + 5]


def test_add_of_bools_is_or_whatever_the_factor():
    x, y = torch.tensor([[True], [False]], device=DEVICE), torch.tensor([True, False], device=DEVICE)
    for alpha in (-1, 0, 2, True):
        assert torch.equal(tg.add(x, y, alpha=alpha), torch.add(x, y, alpha=alpha))


def test_add_of_a_number_too_large_for_the_dtype():
    x = torch.ones(2, dtype=torch.int32, device=DEVICE)
    for number in (1e300, -1e300, float("nan")):
        torch.testing.assert_close(tg.add(x, number), x + number, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_add_wraps_around_as_torch(dtype):
    info = torch.iinfo(dtype)
    x = torch.tensor([info.max, info.min, info.max, 1], dtype=dtype, device=DEVICE)
    y = torch.tensor([1, info.max, info.max, info.max], dtype=dtype, device=DEVICE)
    assert_matches_torch(x, y)
    assert_matches_torch(x, y, alpha=-1)
    assert_matches_torch(x, y, alpha=7)


def test_add_of_what_is_not_finite():
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, 6e4], device=DEVICE)
    for dtype in FLOATS:
        x, y = values.to(dtype)[:, None], values.to(dtype)
        assert_matches_torch(x, y)
        assert_matches_torch(x, y, alpha=-2)
        assert_matches_torch(x.expand(7, 7).contiguous(), y.expand(7, 7).contiguous())


# --- gradients ---


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.startswith(("empty", "expanded", "overlap"))])
def test_add_gradcheck(name):
    x, y = LAYOUTS[name](lambda *shape: random(shape, torch.float64))
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: tg.add(a, b, alpha=0.7), (x, y), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda a, b: tg.add(a, b, alpha=0.7), (x, y), fast_mode=True)


@pytest.mark.parametrize(
    ("x_dtype", "y_dtype"), list(itertools.product(FLOATS, FLOATS)), ids=lambda dtype: str(dtype)[6:]
)
def test_add_grad_has_its_inputs_dtype(x_dtype, y_dtype):
    ours = [random((3, 40), x_dtype).requires_grad_(), random((40,), y_dtype).requires_grad_()]
    torchs = [t.detach().clone().requires_grad_() for t in ours]
    out = tg.add(*ours, alpha=0.5)
    dout = random((3, 40), out.dtype)
    out.backward(dout)
    torch.add(*torchs, alpha=0.5).backward(dout)
    for t, expected in zip(ours, torchs, strict=True):
        torch.testing.assert_close(t.grad, expected.grad)


def test_add_grad_of_one_input_only():
    x, y = random(5, torch.float32).requires_grad_(), random(5, torch.float32)
    tg.add(x, y, alpha=2).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and y.grad is None
    y.requires_grad_()
    tg.add(x.detach(), y, alpha=2).sum().backward()
    assert torch.equal(y.grad, torch.full_like(y, 2))
    z = random(5, torch.float32).requires_grad_()
    tg.add(tg.add(z, 3), torch.arange(5, device=DEVICE)).sum().backward()
    assert torch.equal(z.grad, torch.ones_like(z))


def test_add_grad_of_empty_tensors():
    x, y = random((0, 3), torch.float32).requires_grad_(), random((3,), torch.float32).requires_grad_()
    tg.add(x, y).sum().backward()
    assert x.grad.shape == (0, 3) and torch.equal(y.grad, torch.zeros(3, device=DEVICE))


def test_add_needs_no_graph_without_gradients():
    x = random(5, torch.float32).requires_grad_()
    with torch.no_grad():
        assert not tg.add(x, x).requires_grad
    assert not tg.add(x.detach(), 1).requires_grad


def test_add_repeats_bit_for_bit():
    x, y = random((20, 30), torch.float16), random((30,), torch.float32)
    first = tg.add(x, y, alpha=0.3)
    for _ in range(5 if DEVICE.type == "cpu" else 100):
        assert torch.equal(tg.add(x, y, alpha=0.3), first)


# --- integration ---


@pytest.mark.parametrize("name", LAYOUTS)
def test_add_opcheck(name):
    x, y = LAYOUTS[name](lambda *shape: random(shape, torch.float32))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.triton_gallery.add.default, (x, y, 1), test_utils=checks)
    torch.library.opcheck(torch.ops.triton_gallery.add.default, (x, y.half(), 0.5), test_utils=checks)


def test_add_opcheck_in_full():
    x, y = random((4, 5), torch.float32), random((5,), torch.float64)
    torch.library.opcheck(torch.ops.triton_gallery.add.default, (x, y, 0.5))
    torch.library.opcheck(torch.ops.triton_gallery.add.default, (x.t(), x.t(), 1))


def test_add_compiles_without_graph_breaks():
    compiled = torch.compile(lambda a, b, alpha: tg.add(a, b, alpha=alpha) * 2, fullgraph=True)
    x, y = random((4, 5), torch.float32).requires_grad_(), random((5,), torch.float32).requires_grad_()
    for alpha in (1, 2, 0.5):
        out = compiled(x, y, alpha)
        torch.testing.assert_close(out, (x + alpha * y) * 2)
        dx, dy = torch.autograd.grad(out.sum(), (x, y))
        torch.testing.assert_close(dx, torch.full_like(dx, 2))
        torch.testing.assert_close(dy, torch.full_like(dy, 8 * alpha))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, 2.5, 1), (x + 2.5) * 2)


def test_add_compiles_with_dynamic_shapes():
    compiled = torch.compile(lambda a, b: tg.add(a, b), fullgraph=True, dynamic=True)
    for rows, cols in ((3, 5), (7, 5), (64, 33)):
        x, y = random((rows, cols), torch.float32), random((cols,), torch.float32)
        torch.testing.assert_close(compiled(x, y), x + y)
        torch.testing.assert_close(compiled(x.t(), x.t()), (2 * x).t())


def test_add_in_autocast_promotes():
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert_matches_torch(random(5, torch.float32), random(5, torch.bfloat16))


@pytest.mark.gpu
def test_add_in_a_cuda_graph_and_without_waiting():
    x, y = random((64, 30), torch.float32), random((30,), torch.float32)
    tg.add(x, y, alpha=0.5), tg.add(x, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tg.add(x, y, alpha=0.5), tg.add(x, x), tg.add(x, 3.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flat, strided = tg.add(x, x), tg.add(x, y, alpha=0.5)
    x.copy_(random((64, 30), torch.float32))
    graph.replay()
    torch.testing.assert_close(flat, x + x)
    torch.testing.assert_close(strided, x + 0.5 * y)


@pytest.mark.parametrize(
    "number",
    [np.float16(0.5), np.float32(0.1), np.float64(0.1), np.int64(3), np.uint8(200), np.uint64(2**63)],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.uint8], ids=str)
def test_add_takes_numbers_of_numpy(number, dtype):
    x, y = random((5, 7), dtype), random((5, 7), dtype)
    assert torch.equal(tg.add(x, number), tg.add(x, number.item()))
    if dtype.is_floating_point or isinstance(number, np.integer):
        alpha = min(number.item(), 2**63 - 1)
        assert torch.equal(tg.add(x, y, alpha=type(number)(alpha)), tg.add(x, y, alpha=alpha))
    else:
        with pytest.raises(TypeError, match="add: alpha must be an int when the result is"):
            tg.add(x, y, alpha=number)


# --- refusals ---


def test_add_refuses_shapes_that_do_not_broadcast():
    with pytest.raises(ValueError, match=r"add: x and y must have shapes that broadcast, got \(3,\) and \(4,\)"):
        tg.add(torch.ones(3, device=DEVICE), torch.ones(4, device=DEVICE))


def test_add_refuses_what_is_no_tensor():
    with pytest.raises(TypeError, match=r"add: x must be a torch.Tensor, got float"):
        tg.add(1.0, torch.ones(3, device=DEVICE))
    with pytest.raises(TypeError, match=r"add: y must be a torch.Tensor or a Python number, got list"):
        tg.add(torch.ones(3, device=DEVICE), [1.0])
    with pytest.raises(TypeError, match=r"add: y must be a torch.Tensor or a Python number, got complex"):
        tg.add(torch.ones(3, device=DEVICE), 1j)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_add_refuses_other_dtypes(dtype):
    with pytest.raises(TypeError, match="add: x must have one of the dtypes"):
        tg.add(torch.ones(3, device=DEVICE).to(dtype), torch.ones(3, device=DEVICE))
    with pytest.raises(TypeError, match="add: y must have one of the dtypes"):
        tg.add(torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE).to(dtype))


def test_add_refuses_sparse_tensors():
    with pytest.raises(TypeError, match="add: x must be a dense"):
        tg.add(torch.eye(3, device=DEVICE).to_sparse(), torch.ones(3, device=DEVICE))


@pytest.mark.parametrize("alpha", [None, "1", 1j, torch.tensor(2.0), np.True_, np.ones(1)], ids=repr)
def test_add_refuses_an_alpha_that_is_no_number(alpha):
    with pytest.raises(TypeError, match=r"add: alpha must be (a Python number|an int or a float when)"):
        tg.add(torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE), alpha=alpha)


def test_add_refuses_an_alpha_of_another_category():
    ints, floats = torch.arange(3, device=DEVICE), torch.ones(3, device=DEVICE)
    with pytest.raises(TypeError, match=r"add: alpha must be an int when the result is torch.int64, got 0.5"):
        tg.add(ints, ints, alpha=0.5)
    with pytest.raises(TypeError, match=r"add: alpha must be an int or a float when the result is torch.float32"):
        tg.add(floats, floats, alpha=True)
    with pytest.raises(TypeError, match=r"add: alpha must be an int when the result is torch.int64, got True"):
        tg.add(ints, ints, alpha=True)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**5000], ids=["2**64", "-2**63 - 1", "10**5000"])
def test_add_refuses_integers_beyond_64_bits(number):
    ints = torch.arange(3, device=DEVICE)
    with pytest.raises(ValueError, match=r"add: y must be in \[-2\*\*63, 2\*\*64\)"):
        tg.add(ints, number)
    with pytest.raises(ValueError, match=r"add: alpha must be in \[-2\*\*63, 2\*\*63\)"):
        tg.add(ints, ints, alpha=number)


def test_add_refuses_a_tensor_elsewhere():
    with pytest.raises(ValueError, match="add: y must"):
        tg.add(torch.ones(3, device=DEVICE), torch.ones(3, device="meta"))


# --- fuzz ---


@st.composite
def operands(draw):
    """Two views that broadcast: some dimensions missing or of size 1, permuted, stepped or expanded, at some offset."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    result = []
    for _ in range(2):
        sizes = [draw(st.sampled_from([size, size, 1])) for size in shape][draw(st.integers(0, len(shape))) :]
        strides, span = [0] * len(sizes), 1
        for d in draw(st.permutations(range(len(sizes)))):
            strides[d] = span * draw(st.sampled_from([0, 1, 1, 1, 2]))
            span += max(sizes[d] - 1, 0) * strides[d]
        offset = draw(st.integers(0, 3))
        dtype = draw(st.sampled_from(FLOATS + INTEGERS))
        result.append(random(offset + span, dtype).as_strided(sizes, strides, offset))
    return result


@FUZZ
def test_add_on_fuzzed_inputs(fuzz):
    def check(xy, alpha):
        assert_matches_torch(*xy, alpha=alpha)

    fuzz(check, xy=operands(), alpha=st.sampled_from([1, 1, 2, -3, 0]))
