import importlib
import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import triton_gallery as tg
from accuracy import DEVICE, FUZZ, LAYOUTS, assert_as_accurate_as_torch, assert_lanes_agree, in_turn, laid_out
from triton_gallery import hopper
from triton_gallery._launch import is_hopper

# The package's name `layer_norm` is the function; this is its module.
module = importlib.import_module("triton_gallery.layer_norm")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HALVES = FLOATS[:2]
# Sums of a few hundred float32 terms in another order than torch's.
FLOOR = 3e-7
BOTH = ["layer_norm", "rms_norm"]
NORMS = pytest.mark.parametrize("norm", BOTH)


@pytest.fixture
def small_blocks(monkeypatch):
    """Limits so small that rows of a few dozen elements take the paths of rows of many thousands."""
    monkeypatch.setattr(module, "_FWD_MAX_BYTES", 256)
    monkeypatch.setattr(module, "_ONE_BLOCK_COLS", 32)

    def small_tile(x, n_rows, n_cols, vectorized):
        block_n = module.next_power_of_2(n_cols)
        return 32 // block_n, block_n, 1, 4

    monkeypatch.setattr(module, "_fwd_tile", small_tile)
    monkeypatch.setattr(module, "_FWD_LONG_TILE", 16)
    monkeypatch.setattr(module, "_fwd_block", lambda x, weight, bias, n_rows, *_: (16, 4, n_rows % 2 == 0))
    monkeypatch.setattr(module, "_BWD_TILE", 32)
    monkeypatch.setattr(module, "_DWDB_ROWS", 4)
    monkeypatch.setattr(module, "_DWDB_TILE", 16)


# --- the same call, to us, to torch and to torch in float64 ---


def ours(norm, x, shape, params, eps):
    return getattr(tg, norm)(x, shape, *params, eps=eps)


def torchs(norm, x, shape, params, eps):
    return getattr(F, norm)(x, shape, *params, eps=eps)


def make_params(norm, shape, dtype, device, weight=True, bias=True):
    """Weight and bias as the norm takes them; an absent one is None."""
    w = torch.randn(shape, device=device).to(dtype) if weight else None
    b = torch.randn(shape, device=device).to(dtype) if bias else None
    return [w, b] if norm == "layer_norm" else [w]


def run(call, norm, x, shape, params, eps, dy):
    """The output, then the gradients of x and of each parameter."""
    leaves = [t.detach().requires_grad_() for t in (x, *params) if t is not None]
    rest = iter(leaves[1:])
    y = call(norm, leaves[0], shape, [None if p is None else next(rest) for p in params], eps)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check(norm, x, shape, params, eps=1e-5, dy=None):
    """Output and gradients are as accurate as torch's. Where torch refuses mixed dtypes, its float32 stands in."""
    dy = torch.randn(x.shape, device=x.device).to(x.dtype) if dy is None else dy
    double = [None if p is None else p.double() for p in params]
    reference = run(torchs, norm, x.double(), shape, double, eps, dy.double())
    if all(p is None or p.dtype == x.dtype for p in params):
        expected = run(torchs, norm, x, shape, params, eps, dy)
    else:
        wide = run(torchs, norm, x.float(), shape, [None if p is None else p.float() for p in params], eps, dy.float())
        dtypes = [x.dtype, x.dtype, *(p.dtype for p in params if p is not None)]
        expected = [t.to(dtype) for t, dtype in zip(wide, dtypes, strict=True)]
    result = run(ours, norm, x, shape, params, eps, dy)
    if x.dtype == torch.float64:
        # Here torch is its own reference, and has no error to compare with.
        for mine, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
        return result
    # The mean is rounded to float32, and rstd, at most 1 / sqrt(eps), multiplies what that loses.
    dims = tuple(range(-len(shape), 0))
    centered = x.double() - x.double().mean(dims, keepdim=True) * (norm == "layer_norm")
    rstd = (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
    lost = (x.double().mean(dims, keepdim=True).abs() * rstd).max().item() * 2**-23
    assert_as_accurate_as_torch(result[0], expected[0], reference[0], floor=FLOOR + lost)
    # The terms of dx cancel, almost entirely in rows of one or two elements; what is lost is relative to the terms.
    terms = (dy.double() if params[0] is None else dy * double[0]) * rstd
    floors = [(FLOOR + lost) * max(1, (terms.abs().max() / reference[1].abs().max()).item()), FLOOR, FLOOR]
    if params[0] is not None:
        # dw sums dy times the centered rows, which in rows of one constant are what the mean lost.
        tiny = torch.finfo(torch.float64).tiny
        floors[1] += lost * (dy.double().abs().sum() / reference[2].abs().max().clamp(min=tiny)).item()
    for mine, theirs, exact, floor in zip(result[1:], expected[1:], reference[1:], floors, strict=False):
        assert_as_accurate_as_torch(mine, theirs, exact, factor=3, floor=floor)
    return result


# --- forward and gradients on every kind of shape ---


SHAPES = [
    ((7,), 1),
    ((1,), 1),
    ((5, 1), 1),
    ((1, 130), 1),
    ((37, 33), 1),
    ((3, 5, 8), 1),
    ((3, 5, 8), 2),
    ((2, 3, 4, 5), 2),
    ((2, 3, 4, 5), 4),
]


@NORMS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "n_dims"), SHAPES, ids=str)
def test_norms_match_torch(norm, dtype, shape, n_dims, device):
    x = (torch.randn(shape, device=device) * 2 + 0.5).to(dtype)
    normalized = shape[-n_dims:]
    check(norm, x, normalized, make_params(norm, normalized, dtype, device))


@NORMS
def test_norms_match_torch_at_many_row_lengths(norm, device):
    for n_cols in [*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 130]:
        x = torch.randn(3, n_cols, device=device)
        check(norm, x, (n_cols,), make_params(norm, (n_cols,), x.dtype, device))


@NORMS
def test_norms_match_torch_at_many_row_counts(norm, device, small_blocks):
    # Eight columns make tiles of four rows; from some row count on a program takes several tiles.
    for n_rows in [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 70]:
        x = torch.randn(n_rows, 8, device=device)
        check(norm, x, (8,), make_params(norm, (8,), x.dtype, device))


@NORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@LAYOUTS
def test_rows_that_can_or_cannot_be_read_16_bytes_at_a_time(norm, dtype, n_cols, stride, offset, device):
    layout = n_cols, stride, offset, dtype
    params = make_params(norm, (n_cols,), dtype, device)
    check(norm, laid_out(3, *layout), (n_cols,), params, dy=laid_out(3, *layout))
    check(norm, laid_out(3, *layout), (n_cols,), params)


@pytest.mark.parametrize(("norm", "dtype"), in_turn(BOTH, FLOATS[:3]), ids=str)
@pytest.mark.parametrize(
    ("n_rows", "n_cols"), [(3, 40), (64, 48), (65, 44), (33, 80), (43, 96), (9, 160), (17, 192), (5, 384), (7, 768)]
)
def test_short_rows_lie_in_three_blocks(norm, dtype, n_rows, n_cols, device):
    x = torch.randn(n_rows, n_cols, device=device).to(dtype) + 1
    assert module._fwd_tile(x, n_rows, n_cols, True)[2] == 3
    check(norm, x, (n_cols,), make_params(norm, (n_cols,), dtype, device))


@pytest.mark.parametrize(("n_rows", "n_cols"), [(1, 48), (2, 40), (5, 33), (8, 46), (1, 16)])
@pytest.mark.parametrize("block_m", [1, 2])
def test_rows_in_blocks_are_moved_once_and_nothing_else_is_touched(n_rows, n_cols, block_m):
    x, out = torch.randn(2, n_rows, n_cols)
    weight, bias = torch.randn(2, n_cols)
    mean, rstd = torch.randn(2, n_rows)
    calls = tg.trace(
        module._layer_norm_fwd_blocks_kernel, (-(-n_rows // block_m),), x, weight, bias, out, mean, rstd, n_rows,
        n_cols, n_cols, 1e-5, BLOCK_M=block_m, BLOCK_N=16, N_BLOCKS=-(-n_cols // 16), AHEAD=n_cols % 2 == 0, ALIGN=1,
    )  # fmt: skip
    assert not calls.outside and (calls.load_counts("x_ptr") == 1).all()
    assert all((calls.store_counts(name) == 1).all() for name in ("y_ptr", "mean_ptr", "rstd_ptr"))


@pytest.mark.parametrize(("norm", "dtype"), in_turn(BOTH, FLOATS[:3]), ids=str)
@pytest.mark.parametrize(
    ("n_rows", "n_cols", "is_few"),
    # Shorter rows, and those of 32 bits, have the same kernels where they are few.
    [
        *[(1, 129, False), (2, 135, False), (8, 131, False), (37, 130, False), (50, 133, False)],
        *((*size, is_few) for size in [(9, 261), (5, 1023), (1, 1031), (3, 2051)] for is_few in (False, True)),
    ],
)
def test_rows_that_begin_anywhere(norm, dtype, n_rows, n_cols, is_few, device, monkeypatch):
    monkeypatch.setattr(module, "_DWDB_TILE", 65536)  # few programs for the interpreter
    monkeypatch.setattr(module, "_MIN_UNALIGNED", math.inf if is_few else 0)
    takes = module._in_blocks(n_cols, True, torch.empty(n_rows, n_cols, dtype=dtype))
    assert (takes is not None) == (not is_few and dtype != torch.float32 and n_cols > 256)
    assert module._in_blocks(n_cols, False, *[torch.empty(n_rows, n_cols, dtype=dtype)] * 2)

    def among_nans(padding):
        # The row strides differ by multiples of 16 bytes; no kernel may take what lies between the rows for numbers.
        x = torch.full((n_rows + 2, n_cols + padding), math.nan, device=device, dtype=dtype)[1:-1, :n_cols]
        return x.copy_(torch.randn(n_rows, n_cols, device=device) + 0.5)

    params = make_params(norm, (n_cols,), dtype, device)
    check(norm, among_nans(8), (n_cols,), params, dy=among_nans(16))
    check(norm, torch.randn(n_rows, n_cols, device=device).to(dtype), (n_cols,), params)


@NORMS
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("n_cols", [1, 7, 24, 32, 169, 512, 768, 1024])
def test_few_short_rows_have_one_program_for_their_gradients(norm, dtype, n_cols, device, monkeypatch):
    def no_partials(*args):
        raise AssertionError("partial sums")

    params = make_params(norm, (n_cols,), dtype, device)
    x = torch.randn(9, n_cols, device=device).to(dtype)
    n_tiles = 4 if n_cols % (16 // x.element_size()) == 0 else 2
    most = n_tiles * module._bwd_blocks(x, n_cols, n_tiles == 4)[0]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_partials", no_partials)
        check(norm, x[:most], (n_cols,), params)
        check(norm, x[:1], (n_cols,), [None] * len(params))
    if most < len(x):
        check(norm, x[: most + 1], (n_cols,), params)


@pytest.mark.parametrize(
    ("n_rows", "n_cols"), [(1, 33), (2, 35), (8, 71), (9, 64), (16, 37), (37, 121), (50, 133), (33, 130), (7, 200)]
)
def test_rows_that_begin_anywhere_are_stored_once_and_nothing_else_is_touched(n_rows, n_cols):
    dy, x, out = torch.randn(3, n_rows, n_cols).half()
    weight, bias = torch.randn(2, n_cols).half()
    mean, rstd = torch.randn(2, n_rows)
    partials = torch.empty(2, 16, n_cols)
    aligned = n_cols % 8 == 0
    blocks = {
        "VECTOR": 8, "BLOCK_M": 2, "BLOCK_N": 64, "N_BLOCKS": -(-(n_cols if aligned else n_cols + 7) // 64),
        "N_FULL": n_cols // 64, "NUM_STAGES": 1,
    }  # fmt: skip
    backward = tg.trace(
        module._layer_norm_bwd_blocks_kernel, (16,), dy, x, weight, mean, rstd, out, *partials, n_rows, n_cols,
        n_cols, n_cols, ALIGNED=aligned, **blocks,
    )  # fmt: skip
    assert not backward.outside
    assert all((backward.load_counts(name) >= 1).all() for name in ("x_ptr", "dy_ptr", "mean_ptr", "rstd_ptr"))
    assert all((backward.store_counts(name) == 1).all() for name in ("dx_ptr", "dw_partial_ptr", "db_partial_ptr"))
    if not aligned:
        forward = tg.trace(
            module._layer_norm_fwd_unaligned_kernel, (16,), x, weight, bias, out, mean, rstd, n_rows, n_cols, n_cols,
            1e-5, **blocks,
        )  # fmt: skip
        assert not forward.outside and (forward.load_counts("x_ptr") >= 1).all()
        assert all((forward.store_counts(name) == 1).all() for name in ("y_ptr", "mean_ptr", "rstd_ptr"))


@pytest.mark.parametrize(("norm", "dtype"), in_turn(BOTH, FLOATS), ids=str)
@pytest.mark.parametrize("n_cols", [15, 16, 17, 31, 32, 33, 40, 64, 65, 130, 200])
def test_long_rows_match_torch(norm, dtype, n_cols, device, small_blocks):
    x = (torch.randn(5, n_cols, device=device) * 2 + 0.5).to(dtype)
    check(norm, x, (n_cols,), make_params(norm, (n_cols,), dtype, device))


@NORMS
@pytest.mark.parametrize("n_cols", [5117, 8187])
def test_rows_on_a_gpu_of_few_multiprocessors(norm, n_cols, device, monkeypatch):
    # Fewer than there are places in a vector at which such a row may begin.
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 4)
    x = torch.randn(3, n_cols, device=device).half()
    check(norm, x, (n_cols,), make_params(norm, (n_cols,), x.dtype, device))


@pytest.mark.parametrize("n_cols", [8192, 16385, 32768])
def test_long_rows_match_torch_with_the_shipped_blocks(n_cols, device, monkeypatch):
    monkeypatch.setattr(module, "_DWDB_TILE", 65536)  # few programs for the interpreter
    x = torch.randn(2, n_cols, device=device)
    check("layer_norm", x, (n_cols,), make_params("layer_norm", (n_cols,), x.dtype, device))


@pytest.mark.gpu
@NORMS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "n_cols", [2049, 2064, 8193, 12_287, 12_304, 14_336, 24_575, 24_576, 24_577, 32_768, 49_152, 49_168]
)
def test_rows_in_registers_and_longer_match_torch(norm, dtype, n_cols, device):
    x = torch.randn(40, n_cols + 8, device=device).add(3).to(dtype)[:, :-8]
    check(norm, x, (n_cols,), make_params(norm, (n_cols,), dtype, device))


@pytest.mark.gpu
@NORMS
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_rows_too_long_for_all_multiprocessors(norm, dtype, device):
    x = torch.randn(2, 4_194_304, device=device).add(3).to(dtype)
    check(norm, x, (4_194_304,), make_params(norm, (4_194_304,), dtype, device))


@pytest.mark.gpu
@NORMS
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize(
    ("n_rows", "n_cols"),
    [
        *[(1, 65_552), (40, 49_168), (700, 65_536), (300, 131_088), (90, 300_000), (3, 1_048_592), (2, 1_600_000)],
        # Rows that begin between two multiples of 16 bytes.
        *[(1603, 15_873), (1000, 24_577), (700, 40_999), (333, 65_540), (40, 131_071), (1, 40_999), (3, 200_008)],
    ],
)
def test_rows_on_several_multiprocessors_match_torch(norm, dtype, n_rows, n_cols, device):
    if not is_hopper(device):
        pytest.skip("these kernels are Hopper's")
    x = torch.randn(n_rows, n_cols + 32, device=device).add(3).to(dtype)[:, 16:-16]
    assert hopper.load("layer_norm_forward").plan_forward(x, None, None)
    assert hopper.load("layer_norm_backward").plan_backward(x, x, None) or n_cols > 1_000_000
    params = make_params(norm, (n_cols,), dtype, device)
    check(norm, x, (n_cols,), params)
    if n_rows > 4:
        x[0, -1], x[1, 0] = math.nan, math.inf
        x[2] += 1e3
        y = ours(norm, x[:2], (n_cols,), params, 1e-5)
        # On a GPU torch's RMS norm makes a row with an infinity NaN throughout, if its length is odd.
        expected = torchs(norm, x[:2].cpu(), (n_cols,), [None if p is None else p.cpu() for p in params], 1e-5)
        torch.testing.assert_close(y.cpu(), expected, equal_nan=True, rtol=1e-2, atol=1e-2)
        check(norm, x[2:].clone(), (n_cols,), params)


@pytest.mark.parametrize("fast", [True, False], ids=["H200", "H100"])
def test_from_where_on_rows_lie_in_parts_is_up_to_the_memory(fast, monkeypatch):
    kernels = pytest.importorskip("triton_gallery.hopper.layer_norm_forward", exc_type=ImportError)
    monkeypatch.setattr(kernels, "has_fast_memory", lambda device: fast)
    for n_cols, in_parts in ((24_576, False), (24_584, fast), (40_960, fast), (40_968, True)):
        x = torch.empty(4096, n_cols, device="meta", dtype=torch.float16)
        assert (kernels.plan_forward(x, None, None) is not None) == in_parts


@pytest.mark.parametrize(
    ("n_rows", "n_cols", "dtype", "in_blocks"),
    [
        (2**20, 20, torch.float16, False),
        (2**19, 72, torch.float16, False),
        (2**18, 80, torch.float16, True),
        (2, 256, torch.float16, True),
        (2**12, 384, torch.float16, False),
        (2**14, 384, torch.float16, True),
        (2, 520, torch.float16, True),
        (2**16, 512, torch.float32, False),
        (2, 516, torch.float32, True),
        (8192, 2052, torch.float16, False),
    ],
    ids=str,
)
def test_which_kernel_short_rows_have_for_their_gradients(n_rows, n_cols, dtype, in_blocks):
    x = torch.empty(n_rows, n_cols, device="meta", dtype=dtype)
    assert (module._in_blocks(n_cols, False, x, x) is not None) == in_blocks
    kernels = hopper.load("layer_norm_backward")
    # A program of rows in parts has one at a time.
    assert kernels is None or kernels.plan_backward(x, x, None) is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_parts_cover_each_row(dtype, direction):
    kernels = hopper.load(f"layer_norm_{direction}")
    lengths = {*range(8193, 24_577, 14), *range(24_577, 1_400_000, 61), *range(24_592, 1_400_000, 16 * 61)}
    # Equal parts would leave less than a vector for the last one.
    lengths |= {62_497, 62_498, 62_499, 63_505, 256_033, 256_034, 256_035}
    for n_cols in lengths:
        x = torch.empty(4096, n_cols, device="meta", dtype=dtype)
        vector = 16 // x.element_size()
        plan = kernels.plan_forward(x, None, None) if direction == "forward" else kernels.plan_backward(x, x, None)
        bytes_at_once = 132 * (12 * 4 if direction == "forward" else 12 * 2) * 1024  # of all programs on an H200
        if direction == "forward" and vector == 8 and n_cols % 8 == 0 and n_cols <= 24_576:
            assert plan is None  # tl's kernel has the row in registers
            continue
        if plan is None:
            # There is no room for so many groups that all rows of each begin at the same place in a vector.
            assert n_cols * x.element_size() > 0.95 * bytes_at_once / (vector // math.gcd(n_cols, vector))
            continue
        if direction == "forward":
            room, max_programs = plan.n_chunks * 1024 // x.element_size(), 12 * 132
        else:
            room, max_programs = plan.n_chunks * 2048 // x.element_size(), 12 // plan.n_chunks * 132
        if plan.n_parts > 1 or not plan.aligned:
            late = 0 if n_cols % vector == 0 else vector - 1  # what a row may begin late by in its first vector
            assert plan.part_cols % 16 == 0 and plan.part_cols + late <= room
            assert plan.n_parts * plan.max_groups <= max_programs
        assert n_cols <= plan.n_parts * plan.part_cols
        assert n_cols - (plan.n_parts - 1) * plan.part_cols >= vector
        # All rows of a group of programs begin at the same place in a vector.
        assert plan.max_groups * n_cols % vector == 0


def test_lanes_agree_on_the_mean_of_parts():
    calls = []
    for n_cols in (32_769, 49_160):
        x, weight = (torch.empty(shape, device="meta", dtype=torch.float16) for shape in ((1000, n_cols), (n_cols,)))
        calls.append((tg.layer_norm, [x, n_cols, weight, weight], {}, False))
    for (kernels,) in tg.codegen._compile(tg.codegen._pack(calls, ("sm_90",))):
        (kernel,) = [kernel for kernel in kernels if kernel.name == "_layer_norm_parts_fwd_kernel"]
        assert_lanes_agree(kernel.asm["sass"])


@pytest.mark.gpu
@NORMS
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("n_cols", [2064, 3072, 5120, 5136, 8192, 8208, 12288, 16384])
def test_rows_that_wait_between_two_walks_match_torch(norm, dtype, n_cols, device):
    x = (torch.randn(300, n_cols, device=device) + 0.5).to(dtype)  # several rows for each program
    params = make_params(norm, (n_cols,), dtype, device)
    check(norm, x, (n_cols,), params)
    check(norm, x[1:], (n_cols,), [None if p is None else p.float() for p in params])


@pytest.mark.gpu
@NORMS
@pytest.mark.parametrize(("dtype", "n_cols"), [(torch.float32, 62_497), (torch.float16, 256_033)], ids=str)
def test_last_numbers_of_a_row_count_once(norm, dtype, n_cols, device):
    # Equal parts would leave one number for the last.
    x = torch.randn(9, n_cols, device=device).to(dtype)
    x[:, -1] = 1000
    check(norm, x, (n_cols,), make_params(norm, (n_cols,), dtype, device))


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no_weight"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("n_cols", [16, 77], ids=["short", "long"])
def test_layer_norm_without_weight_or_bias(weight, bias, n_cols, device, small_blocks):
    x = torch.randn(9, n_cols, device=device)
    check("layer_norm", x, (n_cols,), make_params("layer_norm", (n_cols,), x.dtype, device, weight, bias))


@pytest.mark.parametrize("n_cols", [16, 77], ids=["short", "long"])
def test_rms_norm_without_weight(n_cols, device, small_blocks):
    x = torch.randn(9, n_cols, device=device)
    check("rms_norm", x, (n_cols,), [None])


@NORMS
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("n_cols", [33, 2000, 6000])
def test_norms_take_float32_params_with_16_bit_x(norm, dtype, n_cols, device):
    x = torch.randn(6, n_cols, device=device).to(dtype)
    y, dx, *dparams = check(norm, x, (n_cols,), make_params(norm, (n_cols,), torch.float32, device))
    assert y.dtype == dx.dtype == dtype and all(d.dtype == torch.float32 for d in dparams)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_rms_norm_takes_a_weight_of_any_dtype(dtype, weight_dtype, device):
    x, weight = torch.randn(6, 33, device=device).to(dtype), torch.randn(33, device=device).to(weight_dtype)
    y = tg.rms_norm(x, 33, weight)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    expected = F.rms_norm(x.double(), (33,), weight.double(), eps).to(dtype)
    torch.testing.assert_close(y, expected)


@NORMS
def test_norms_accept_an_int_and_a_list(norm, device):
    x = torch.randn(2, 3, 4, device=device)
    function = getattr(tg, norm)
    assert torch.equal(function(x, 4), function(x, (4,)))
    assert torch.equal(function(x, [3, 4]), function(x, torch.Size((3, 4))))
    assert torch.equal(function(x, (numpy.int64(4),)), function(x, (4,)))


@NORMS
def test_norms_take_a_negative_eps_as_torch_does(norm, device):
    x = torch.randn(6, 33, device=device)
    x[2] = 1e-3  # a variance below 0.5: the root of a negative number
    result, expected = getattr(tg, norm)(x, 33, eps=-0.5), getattr(F, norm)(x, (33,), eps=-0.5)
    assert expected[2].isnan().all()
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rms_norm_default_eps_is_torchs(dtype, device):
    # Squares so small that eps decides the result.
    x = torch.full((1, 4), 1e-4, device=device).to(dtype)
    torch.testing.assert_close(tg.rms_norm(x, 4), F.rms_norm(x, (4,)))


def test_layer_norm_keeps_eps_in_float64(device):
    # 0.1 is not a float32: rounding eps on its way to the kernel would show at 1e-9.
    x = torch.randn(3, 17, device=device, dtype=torch.float64) * 0.1
    for fn, expected in [(tg.layer_norm, F.layer_norm), (tg.rms_norm, F.rms_norm)]:
        torch.testing.assert_close(fn(x, 17, eps=0.1), expected(x, (17,), eps=0.1), rtol=1e-14, atol=1e-14)


# --- strides ---


def strided_inputs(device):
    base = torch.randn(8, 6, 10, device=device)
    return {
        "every second row": base.view(48, 10)[::2],
        "part of each row": base.view(48, 10)[:, 3:9],
        "every second column": base.view(48, 10)[:, ::2],
        "rows that no single stride reaches": base[:, 1:4],
        "transposed": base.view(48, 10).t(),
        "permuted": base.permute(2, 0, 1),
        "expanded rows": base[0, 0].expand(7, 10),
        "expanded columns": base[0, 0, :, None].expand(10, 5),
        "reversed storage order": base.permute(1, 0, 2),
    }


@NORMS
@pytest.mark.parametrize("name", strided_inputs("cpu"))
def test_norms_match_torch_on_strided_input(norm, name, device):
    x = strided_inputs(device)[name]
    shape = (x.shape[-1],)
    y, *_ = check(norm, x, shape, make_params(norm, shape, x.dtype, device))
    assert y.is_contiguous()


@pytest.mark.parametrize("name", strided_inputs("cpu"))
def test_layer_norm_matches_torch_on_strided_gradients(name, device):
    dy = strided_inputs(device)[name]
    shape = (dy.shape[-1],)
    x = torch.randn(dy.shape, device=device)
    check("layer_norm", x, shape, make_params("layer_norm", shape, x.dtype, device), dy=dy)


def test_layer_norm_takes_the_expanded_gradient_of_sum(device, small_blocks):
    for n_cols in (16, 77):
        x = torch.randn(9, n_cols, device=device)
        dy = torch.ones((), device=device).expand(x.shape)
        params = make_params("layer_norm", (n_cols,), x.dtype, device)
        leaves = [t.clone().requires_grad_() for t in (x, *params)]
        tg.layer_norm(leaves[0], n_cols, *leaves[1:]).sum().backward()
        expected = check("layer_norm", x, (n_cols,), params, dy=dy)
        for leaf, grad in zip(leaves, expected[1:], strict=True):
            assert torch.equal(leaf.grad, grad)


def test_rows_are_viewed_where_strides_allow(device):
    x = torch.randn(4, 6, 10, device=device)
    viewed = [x, x[1:], x.view(24, 10)[::3], x[:, :, 2:7], x[:, 0], x[0, 0].expand(4, 10), x.view(24, 10)[:, :1]]
    for t in viewed:
        assert module._rows(t, t.shape[-1]).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    for t in (x.transpose(0, 2), x[..., ::2], x[:, 1:3]):
        rows = module._rows(t, t.shape[-1])
        assert rows.stride(1) == 1 and torch.equal(rows, t.reshape(-1, t.shape[-1]))


@NORMS
@pytest.mark.parametrize("n_cols", [33, 300])
def test_norms_reach_addresses_beyond_32_bits(norm, n_cols, device, small_blocks):
    torch.utils.deterministic.fill_uninitialized_memory = False  # the gigabytes between the rows are never touched
    try:
        memory = torch.empty(2**31 + 600, dtype=torch.float16, device=device)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    x = memory.as_strided((3, n_cols), (2**30, 1)).copy_(torch.randn(3, n_cols))
    dy = memory.as_strided((3, n_cols), (2**30, 1), n_cols).copy_(torch.randn(3, n_cols))
    check(norm, x, (n_cols,), make_params(norm, (n_cols,), x.dtype, device), dy=dy)


@pytest.mark.gpu
def test_norms_of_more_than_2_to_the_31_elements(device):
    x = torch.randn(2**16, 2**15 + 8, device=device, dtype=torch.float16)
    y = tg.layer_norm(x, x.shape[1:])
    x.requires_grad_()
    (dx,) = torch.autograd.grad(tg.layer_norm(x, x.shape[1:]), x, y)
    for rows in (slice(0, 3), slice(-3, None)):
        check("layer_norm", x[rows].detach(), x.shape[1:], (None, None), dy=y[rows])
        part = x[rows].detach().requires_grad_()
        expected = tg.layer_norm(part, x.shape[1:])
        assert torch.equal(y[rows], expected)
        assert torch.equal(dx[rows], torch.autograd.grad(expected, part, y[rows])[0])


def test_layer_norm_takes_strided_params(device):
    x = torch.randn(5, 12, device=device)
    params = [torch.randn(24, device=device)[::2], torch.randn(1, device=device).expand(12)]
    check("layer_norm", x, (12,), params)
    x = torch.randn(5, 3, 4, device=device)
    check("layer_norm", x, (3, 4), [torch.randn(4, 3, device=device).t(), torch.randn(3, 4, device=device)])


# --- zero-size ---


@NORMS
@pytest.mark.parametrize(("shape", "n_dims"), [((0,), 1), ((0, 5), 1), ((3, 0), 1), ((2, 0, 4), 1), ((2, 0, 4), 2)])
def test_norms_of_nothing(norm, shape, n_dims, device):
    normalized = shape[-n_dims:]
    x = torch.randn(shape, device=device, requires_grad=True)
    params = [p.requires_grad_() for p in make_params(norm, normalized, x.dtype, device)]
    y = ours(norm, x, normalized, params, 1e-5)
    assert y.shape == x.shape and y.dtype == x.dtype
    grads = torch.autograd.grad(y.sum(), [x, *params])
    assert grads[0].shape == x.shape
    assert all(torch.equal(g, torch.zeros_like(p)) for g, p in zip(grads[1:], params, strict=True))


# --- values ---


@pytest.mark.parametrize("mean", [1e3, -1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_layer_norm_with_a_large_mean(mean, dtype, device, small_blocks):
    for n_cols in (16, 130):
        x = (torch.randn(20, n_cols, device=device) + mean).to(dtype)
        check("layer_norm", x, (n_cols,), [None, None])


def test_long_rows_whose_parts_differ(device, small_blocks):
    # The first block says nothing about the rest: neither its mean nor its variance.
    x = torch.randn(4, 130, device=device)
    x[:, 16:] += 1e4
    x[:, 64:] *= 1e-2
    check("layer_norm", x, (130,), [None, None])


@NORMS
@pytest.mark.parametrize("n_cols", [6, 77], ids=["short", "long"])
def test_nan_and_infinity_stay_in_their_row(norm, n_cols, device, small_blocks):
    x = torch.randn(6, n_cols, device=device)
    x[1, 2] = math.nan
    x[2, 0] = math.inf
    x[3, n_cols - 1] = -math.inf
    x[4, 0], x[4, 1] = math.inf, -math.inf
    params = make_params(norm, (n_cols,), x.dtype, device)
    dy = torch.randn(x.shape, device=device)
    result = run(ours, norm, x, (n_cols,), params, 1e-5, dy)
    # On the CPU: torch's RMS norm kernel for GPUs spreads an infinity to its whole row.
    expected = run(torchs, norm, x.cpu(), (n_cols,), [None if p is None else p.cpu() for p in params], 1e-5, dy.cpu())
    expected = [t.to(device) for t in expected]
    for mine, theirs in zip(result[:1] + result[2:], expected[:1] + expected[2:], strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-5, atol=1e-5)
    clean = [0, 5]
    torch.testing.assert_close(result[1][clean], expected[1][clean], rtol=1e-5, atol=1e-5)
    assert not result[1][1:5].isfinite().all(dim=1).any()


@NORMS
def test_norms_of_constant_rows(norm, device, small_blocks):
    for n_cols in (8, 77):
        x = torch.tensor([0.0, 3.0, -1e4], device=device)[:, None].repeat(1, n_cols)
        result = ours(norm, x, n_cols, [None] * (2 if norm == "layer_norm" else 1), 1e-5)
        torch.testing.assert_close(result, torchs(norm, x, (n_cols,), [None], 1e-5), rtol=1e-5, atol=1e-5)


@NORMS
def test_eps_may_be_a_large_int(norm, device):
    x = torch.randn(3, 8, device=device)
    params = [None] * (2 if norm == "layer_norm" else 1)
    torch.testing.assert_close(ours(norm, x, 8, params, 2**64), torchs(norm, x, (8,), params, 2**64))


@NORMS
def test_second_derivative_of_rows_without_elements(norm, device):
    for shape, normalized in (((3, 0), (0,)), ((0, 3), (0, 3))):
        x = torch.zeros(shape, device=device, requires_grad=True)
        y = ours(norm, x, normalized, [None] * (2 if norm == "layer_norm" else 1), 1e-5)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.sum(), x)
        assert ddx.shape == shape


def test_float16_sums_do_not_overflow(device):
    x = torch.full((2, 64), 60000.0, device=device, dtype=torch.float16)
    x[:, ::2] = -60000.0
    torch.testing.assert_close(tg.layer_norm(x, 64), x.sign())
    torch.testing.assert_close(tg.rms_norm(x, 64), x.sign())


# --- derivatives ---


@NORMS
@pytest.mark.parametrize("n_cols", [5, 11], ids=["short", "long"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_norms_gradcheck(norm, n_cols, affine, device, small_blocks):
    x = torch.randn(2, n_cols, device=device, dtype=torch.float64, requires_grad=True)
    params = make_params(norm, (n_cols,), torch.float64, device, weight=affine, bias=affine)
    leaves = [x, *(p.requires_grad_() for p in params if p is not None)]

    def function(x, *params):
        return getattr(tg, norm)(x, n_cols, *params, eps=1e-3)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_layer_norm_gradients_of_some_inputs(wanted, device):
    x, dy = torch.randn(2, 9, 12, device=device)
    inputs = [x, *make_params("layer_norm", (12,), x.dtype, device)]
    leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    tg.layer_norm(leaves[0], 12, *leaves[1:]).backward(dy)
    expected = run(ours, "layer_norm", x, (12,), inputs[1:], 1e-5, dy)[1:]
    for i, leaf in enumerate(leaves):
        assert (leaf.grad is not None) == (i in wanted)
        assert i not in wanted or torch.equal(leaf.grad, expected[i])


@NORMS
def test_second_derivative_of_losses_that_are_not_linear(norm, device):
    def second(function, *leaves):
        weights = torch.arange(6, dtype=torch.float64, device=device)
        loss = (function(*leaves) * weights).square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    x, w = (torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in ((4, 6), (6,)))
    ours, torchs = (lambda x, *w, f=f: f(x, (6,), *w) for f in (getattr(tg, norm), getattr(F, norm)))
    torch.testing.assert_close(second(ours, x, w), second(torchs, x, w))
    torch.testing.assert_close(second(ours, x), second(torchs, x))


@pytest.mark.parametrize("subtract_mean", [True, False], ids=["layer_norm", "rms_norm"])
def test_third_derivative(subtract_mean, device):
    def third(function):
        x = torch.linspace(-1, 2, 5, dtype=torch.float64, device=device).requires_grad_()
        y = function(x).pow(3).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y

    def formula(x):
        x = x - x.mean() if subtract_mean else x
        return x / (x.square().mean() + 1e-5).sqrt()

    norm = tg.layer_norm if subtract_mean else tg.rms_norm
    torch.testing.assert_close(third(lambda x: norm(x, 5, eps=1e-5)), third(formula))


def test_second_derivative_of_some_gradients(device):
    x, w, b = (torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in ((4, 6), (6,), (6,)))
    dy = torch.randn_like(x)

    def second(function, *leaves):
        first = torch.autograd.grad(function(x, (6,), w, b), leaves, dy, create_graph=True)
        # The second sum is there for gradients that depend on nothing.
        loss = sum(g.square().sum() for g in first) + sum(leaf.sum() for leaf in leaves)
        return torch.autograd.grad(loss, leaves)

    for leaves in ((x, w, b), (x, b), (w,), (w, b), (b,)):
        torch.testing.assert_close(second(tg.layer_norm, *leaves), second(F.layer_norm, *leaves))


def test_layer_norm_second_derivative_in_16_bits(device):
    x, dy, v = torch.randn(3, 4, 10, device=device).half()
    weight = torch.randn(10, device=device)
    grads = []
    for function in (tg.layer_norm, lambda x, n, w: F.layer_norm(x.float(), (n,), w).to(x.dtype)):
        leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(leaf, 10, w), leaf, dy, create_graph=True)
        grads.append(torch.autograd.grad(dx, (leaf, w), v))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_gradients_of_weight_and_bias_have_their_shape(shape, device):
    x, w, b = torch.randn(4, *shape, device=device), *torch.randn(2, *shape, device=device).requires_grad_()
    dw, db = torch.autograd.grad(tg.layer_norm(x, shape, w, b).sum(), (w, b))
    assert dw.shape == db.shape == shape
    # Where the kernel's output has it, too, no view of it is made.
    assert dw._is_view() == db._is_view() == (len(shape) > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("n_cols", [1024, 65_536])
def test_rows_of_equal_numbers_give_the_bias(dtype, n_cols, device):
    # Of powers of two, sums and means are exact. What is left of x is multiplied by an rstd of 316.
    x, bias = (
        torch.full((512, n_cols), 2048.0, dtype=dtype, device=device),
        torch.randn(n_cols, device=device).to(dtype),
    )
    assert torch.equal(tg.layer_norm(x, n_cols, torch.ones_like(bias), bias), bias.expand_as(x))


@NORMS
@pytest.mark.parametrize("n_cols", [24, 77, 8208, 16_400], ids=["short", "long", "in shared memory", "in parts"])
def test_gradients_repeat_bit_for_bit(norm, n_cols, device, request):
    if n_cols < 8192:
        request.getfixturevalue("small_blocks")
    elif DEVICE.type == "cpu":
        pytest.skip("these kernels are for Hopper")
    n_rows = 20 if DEVICE.type == "cpu" else 2000
    x, dy = torch.randn(2, n_rows, n_cols, device=device).bfloat16()
    params = make_params(norm, (n_cols,), x.dtype, device)
    first = run(ours, norm, x, (n_cols,), params, 1e-5, dy)
    for _ in range(2 if DEVICE.type == "cpu" else 100):
        again = run(ours, norm, x, (n_cols,), params, 1e-5, dy)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_weight_gradients_are_summed_in_float32(device):
    # In bfloat16 a sum of ones stops growing at 256.
    x, dy = torch.zeros(2, 300, 4, device=device, dtype=torch.bfloat16)
    bias = torch.zeros(4, device=device, dtype=torch.bfloat16, requires_grad=True)
    tg.layer_norm(x, 4, None, bias).backward(dy + 1)
    assert torch.equal(bias.grad, torch.full_like(bias, 300))


@NORMS
def test_inputs_and_gradients_stay_unmodified(norm, device):
    x, dy = torch.randn(2, 9, 20, device=device).bfloat16()
    tensors = [x, dy, *make_params(norm, (20,), x.dtype, device)]
    copies, versions = [t.clone() for t in tensors], [t._version for t in tensors]
    run(ours, norm, x, (20,), tensors[2:], 1e-5, dy)
    assert all(torch.equal(t, copy) for t, copy in zip(tensors, copies, strict=True))
    assert [t._version for t in tensors] == versions


# --- refusals ---


REFUSED = {
    "no tensor": (lambda x: ([1.0], 1), TypeError, "x must be a torch.Tensor, got list"),
    "integers": (lambda x: (x.int(), 4), TypeError, "x must have one of the dtypes .*, got int32"),
    "another length": (lambda x: (x, 5), ValueError, r"normalized_shape must be the sizes of .* \(3, 4\), got \(5,\)"),
    "leading dims": (lambda x: (x, (3,)), ValueError, r"normalized_shape must be the sizes of .* \(3, 4\), got \(3,\)"),
    "too many dims": (
        lambda x: (x, (2, 3, 4)),
        ValueError,
        r"normalized_shape must be .*, got \(2, 3, 4\)",
    ),
    "no dims": (lambda x: (x, ()), ValueError, r"normalized_shape must be the sizes of .*, got \(\)"),
    "0-d x": (lambda x: (x[0, 0], ()), ValueError, r"normalized_shape must be the sizes of .*, got \(\)"),
    "a fraction": (lambda x: (x, 4.0), TypeError, "normalized_shape must be an int or a sequence of ints, got 4.0"),
    "fractions": (lambda x: (x, (4.0,)), TypeError, r"normalized_shape must be an int or .* ints, got \(4.0,\)"),
    "a string": (lambda x: (x, "4"), TypeError, "normalized_shape must be an int or a sequence of ints, got '4'"),
    "an array": (lambda x: (x, numpy.array([4])), TypeError, "normalized_shape must be an int .*, got ndarray$"),
    "arrays": (lambda x: (x, [numpy.ones(2)]), TypeError, r"normalized_shape must be an int .* ints, got \[ndarray\]$"),
    "weight in its place": (lambda x: (x, x[0]), TypeError, ".* ints, got Tensor; weight comes after it$"),
    "a 0-d meta tensor": (lambda x: (x, torch.tensor(4, device="meta")), TypeError, ".* ints, got Tensor"),
    "a type": (lambda x: (x, int), TypeError, "normalized_shape must be an int or .* ints, got <class 'int'>"),
    "a huge number": (lambda x: (x, (10**5000,)), ValueError, r"normalized_shape .* got \(an int of 16610 bits,\)"),
    "nothing in it": (lambda x: (x, (4, None)), TypeError, r"normalized_shape must be .* ints, got \(4, None\)"),
    "a NumPy fraction": (lambda x: (x, (numpy.float32(4),)), TypeError, r"normalized_shape must be .* ints, got \("),
    "a NumPy bool": (lambda x: (x[:, :1], (numpy.True_,)), TypeError, r"normalized_shape must be .* ints, got \("),
    "a 0-d array": (lambda x: (x, numpy.array(4.0)), TypeError, "normalized_shape must be an int .* got ndarray"),
    "bytes": (lambda x: (x, b"\x04"), TypeError, r"normalized_shape must be an int .* ints, got b'"),
    "tensors": (lambda x: (x, [torch.ones(2)]), TypeError, r"normalized_shape must be .* ints, got \[Tensor\]$"),
    "a position": (lambda x: (x, -1), ValueError, r"normalized_shape must be the sizes of .* \(3, 4\), got \(-1,\)"),
    "2-d weight": (lambda x: (x, 4, x), ValueError, r"weight must have shape \(4,\), got \(3, 4\)"),
    "scalar weight": (lambda x: (x, 4, 2.0), TypeError, "weight must be a torch.Tensor, got float"),
}
EPS = {
    "bool": (True, TypeError, "eps must be a Python number, got bool"),
    "NaN eps": (math.nan, ValueError, "eps must be a number, got nan"),
    "huge eps": (10**400, ValueError, "eps must fit into float64, got an int of 1329 bits"),
    "tensor eps": (torch.ones(()), TypeError, "eps must be a Python number, got Tensor"),
}


@NORMS
def test_norms_take_numbers_of_numpy(norm, device):
    x = torch.randn(3, 4, device=device)
    for eps in (numpy.float16(0.5), numpy.float32(0.5), numpy.float64(0.5), numpy.int64(2)):
        assert torch.equal(getattr(tg, norm)(x, 4, eps=eps), getattr(tg, norm)(x, 4, eps=eps.item()))
    for shape in (numpy.int64(4), numpy.array(4), torch.tensor(4), (numpy.int32(4),), [torch.tensor(4)]):
        assert torch.equal(getattr(tg, norm)(x, shape), getattr(tg, norm)(x, 4))
    with pytest.raises(ValueError, match=f"{norm}: eps must be a number, got nan"):
        getattr(tg, norm)(x, 4, eps=numpy.float32("nan"))


@NORMS
@pytest.mark.parametrize("name", REFUSED)
def test_norms_refuse(norm, name, device):
    args, error, message = REFUSED[name]
    with pytest.raises(error, match=f"{norm}: {message}"):
        getattr(tg, norm)(*args(torch.randn(3, 4, device=device)))


@NORMS
@pytest.mark.parametrize("name", EPS)
def test_norms_refuse_eps(norm, name, device):
    eps, error, message = EPS[name]
    with pytest.raises(error, match=f"{norm}: {message}"):
        getattr(tg, norm)(torch.randn(3, 4, device=device), 4, eps=eps)


def test_layer_norm_refuses_params_that_torch_refuses(device):
    x = torch.randn(3, 4, device=device)
    with pytest.raises(TypeError, match="weight must have the dtype float32 where x has float32, got float16"):
        tg.layer_norm(x, 4, torch.ones(4, device=device).half())
    with pytest.raises(TypeError, match="weight must have the dtype float32 where x has float32, got int32"):
        tg.layer_norm(x, 4, torch.ones(4, device=device).int())
    with pytest.raises(TypeError, match="must have the dtype float16 or float32 where x has float16, got bfloat16"):
        tg.layer_norm(x.half(), 4, None, torch.ones(4, device=device).bfloat16())
    with pytest.raises(ValueError, match=r"layer_norm: bias must have shape \(4,\), got \(3,\)"):
        tg.layer_norm(x, 4, None, torch.ones(3, device=device))


@pytest.mark.gpu
@NORMS
def test_norms_refuse_a_weight_on_another_device(norm, device):
    with pytest.raises(ValueError, match=f"{norm}: weight must be on"):
        getattr(tg, norm)(torch.randn(3, 4, device=device), 4, torch.ones(4))


# --- with the rest of torch ---


@NORMS
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_norms_compile_without_graph_breaks(norm, dynamic, device):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def compiled(x, *params):
        return getattr(tg, norm)(x * 2, x.shape[-1], *params) + 1

    for shape in [(4, 12), (7, 20)]:
        x = torch.randn(shape, device=device)
        params = make_params(norm, shape[1:], x.dtype, device)
        grads = []
        for function in (compiled, lambda x, *p: getattr(tg, norm)(x * 2, x.shape[-1], *p) + 1):
            leaves = [t.clone().requires_grad_() for t in (x, *params)]
            y = function(*leaves)
            grads.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        for compiled_result, eager_result in zip(*grads, strict=True):
            torch.testing.assert_close(compiled_result, eager_result)
        torch.testing.assert_close(compiled(x, *params), grads[0][0].detach())


@pytest.mark.parametrize("subtract_mean", [True, False], ids=["layer_norm", "rms_norm"])
def test_opcheck(subtract_mean, device):
    x, dy = torch.randn(2, 6, 10, device=device)
    weight, bias = torch.randn(2, 10, device=device)
    ops = torch.ops.triton_gallery
    forward = (x.half(), weight, bias if subtract_mean else None, 10, 1e-5, subtract_mean, torch.float16)
    torch.library.opcheck(ops.layer_norm_fwd.default, forward)
    _, mean, rstd = ops.layer_norm_fwd(x, weight, None, 10, 1e-5, subtract_mean, torch.float32)
    for dtypes in [(torch.float32, torch.float32), (None, None)]:
        torch.library.opcheck(ops.layer_norm_bwd.default, (dy, x, weight, mean, rstd, 10, *dtypes))


def test_layer_norm_has_no_eps_of_its_own_for_none(device):
    x = torch.randn(3, 4, device=device)
    with pytest.raises(TypeError, match="layer_norm: eps must be a Python number, got NoneType"):
        tg.layer_norm(x, 4, eps=None)
    assert torch.equal(tg.rms_norm(x, 4), tg.rms_norm(x, 4, eps=torch.finfo(torch.float32).eps))


@NORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_autocast_on_a_gpu_that_is_not_here_gives_torchs_dtype(norm, dtype):
    before = torch.is_autocast_enabled("cuda")
    # torch.autocast would switch itself off where there is no GPU.
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            x, weight = (torch.empty(*shape, device="cuda", dtype=dtype) for shape in ((4, 32), (32,)))
            assert getattr(tg, norm)(x, 32, weight).dtype == getattr(F, norm)(x, (32,), weight).dtype
    finally:
        torch.set_autocast_enabled("cuda", before)


@pytest.mark.gpu
@NORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_autocast_gives_torchs_dtype(norm, dtype, device):
    x, weight = torch.randn(4, 32, device=device, dtype=dtype), torch.randn(32, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y, expected = getattr(tg, norm)(x, 32, weight.to(dtype)), getattr(F, norm)(x, (32,), weight.to(dtype))
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected)


def test_row_counts_share_compilations():
    from triton_gallery import codegen

    def call(n_rows):
        weight = torch.empty(1024, device="meta", dtype=torch.float16)
        return (
            tg.layer_norm,
            (torch.empty(n_rows, 1024, device="meta", dtype=torch.float16), 1024, weight, weight),
            {},
            True,
        )

    row_counts = [1, 2, 3, 15, 16, 17, 31, 32, 100, 128, 255, 500, 512, 1000, 1024, 1031, *range(4090, 4106)]
    outcomes = codegen._compile(codegen._pack([call(n) for n in row_counts], ("sm_90",)))
    compiled = {(kernel.name, kernel.asm["ptx"]) for (kernels,) in outcomes for kernel in kernels}
    names = [name for name, _ in compiled]
    assert len(row_counts) == 32 and set(map(names.count, names)) <= {1, 2, 3}


# --- fuzz ---


@st.composite
def fuzzed(draw):
    """A shape, how many of its dimensions are normalized, a dtype, and steps that make a strided view."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    steps = st.integers(1, 3)
    if DEVICE.type != "cpu" and draw(st.booleans()):  # rows for each kernel, where that takes no minutes
        shape = [min(size, 4) for size in shape[:-1]] + [shape[-1] + draw(st.sampled_from([300, 9000, 40_000]))]
        steps = st.sampled_from([1, 1, 1, 2])
    return (
        shape,
        draw(st.integers(1, len(shape))),
        draw(st.sampled_from(FLOATS)),
        draw(st.lists(steps, min_size=len(shape), max_size=len(shape))),
        draw(st.permutations(range(len(shape)))),
        draw(st.booleans()),
    )


@NORMS
@FUZZ
def test_norms_on_fuzzed_inputs(norm, request, fuzz):
    if DEVICE.type == "cpu":  # elsewhere rows are long enough for blocks as they are
        request.getfixturevalue("small_blocks")

    def run(case):
        shape, n_dims, dtype, steps, order, affine = case
        base = torch.randn([shape[d] * steps[d] for d in order], device=DEVICE).to(dtype)
        x = base.permute([order.index(d) for d in range(len(shape))])[tuple(slice(None, None, step) for step in steps)]
        assert x.shape == tuple(shape)
        normalized = tuple(shape[-n_dims:])
        if x.numel():
            check(norm, x, normalized, make_params(norm, normalized, dtype, DEVICE, affine, affine), eps=1e-3)
        else:
            assert getattr(tg, norm)(x, normalized).shape == x.shape

    fuzz(run, case=fuzzed())
