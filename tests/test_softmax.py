import importlib
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import strategies as st

import triton_gallery as tg
from accuracy import DEVICE, FUZZ, LAYOUTS, assert_as_accurate_as_torch, assert_lanes_agree, in_turn, laid_out
from triton_gallery import hopper
from triton_gallery._launch import is_hopper

# The package's name `softmax` is the function; this is its module.
module = importlib.import_module("triton_gallery.softmax")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
INF, NAN = math.inf, math.nan
# Interpreter and GPU compute a float32 exponential to two or three units in the last place, torch on the CPU to one.
FLOOR = 5e-7
BOTH = ["softmax", "log_softmax"]
OPS = pytest.mark.parametrize("op", BOTH)
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)
PATHS = pytest.mark.parametrize(
    "path", ["whole_rows", "blocks", "online", "strided", "parts", "strided_parts"], indirect=True
)
# Of tests that take long and that the ways in parts add little to.
THREE_PATHS = pytest.mark.parametrize("path", ["whole_rows", "online", "strided"], indirect=True)
SIZES = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 127, 128, 129, 130]


@pytest.fixture
def path(request, monkeypatch):
    """The name of a path, for `lay`; blocks and parts are so small that short rows have several."""
    if request.param in ("online", "parts"):
        force_online(monkeypatch)
    if request.param == "blocks":
        monkeypatch.setattr(module, "_ONE_BLOCK_COLS", 0)
        monkeypatch.setattr(module, "_block", lambda *args: (16, 4))
    if "parts" in request.param:
        monkeypatch.setattr(module, "_pays_in_parts", lambda *args: True)
        monkeypatch.setattr(module, "_strided_tile", lambda *args: (4, 2, 4))
    return request.param


def record_launches(monkeypatch):
    """The list of kernels that grows with each launch."""
    launched, run_kernel = [], module.launch

    def recording_launch(kernel, *args, **meta):
        launched.append(kernel)
        run_kernel(kernel, *args, **meta)

    monkeypatch.setattr(module, "launch", recording_launch)
    return launched


def force_online(monkeypatch, block_bytes=64):
    monkeypatch.setattr(module, "hopper", SimpleNamespace(load=lambda name: None))
    # Not 0, which the tiles of strided rows are no fraction of.
    monkeypatch.setattr(module, "_ONE_BLOCK_COLS", 1)
    monkeypatch.setattr(module, "_block", lambda *args: None)
    monkeypatch.setattr(module, "_ONLINE_BLOCK_BYTES", block_bytes)


def lay(x, path):
    """x as it is, or in memory where its columns are apart."""
    return torch.stack([x, torch.full_like(x, NAN)], dim=-1)[..., 0] if "strided" in path else x


def ours(op, x, dim=-1, dtype=None):
    return getattr(tg, op)(x, dim, dtype=dtype)


def torchs(op, x, dim=-1, dtype=None):
    return getattr(torch, op)(x, dim, dtype=dtype)


def run(call, op, x, dim, dtype, dy):
    """The output and the gradient of x."""
    x = x.detach().requires_grad_()
    y = call(op, x, dim, dtype)
    return y.detach(), *torch.autograd.grad(y, x, dy)


def check(op, x, dim=-1, dtype=None, dy=None):
    """Output and gradient are as accurate as torch's, and the output is laid out as torch's."""
    out_dtype = dtype or x.dtype
    dy = torch.randn(x.shape, device=x.device).to(out_dtype) if dy is None else dy
    result, expected = run(ours, op, x, dim, dtype, dy), run(torchs, op, x, dim, dtype, dy)
    reference = run(torchs, op, x.double(), dim, None, dy.double())
    assert result[0].stride() == expected[0].stride()
    # float64 has only torch itself for a reference; sums in another order may differ in the last digits.
    floor = 1e-14 if out_dtype == torch.float64 else FLOOR
    # Of a narrower output torch rounds x first, as we do: two roundings, which cancel where one is lucky.
    narrower = out_dtype.itemsize < x.dtype.itemsize
    rounding = torch.finfo(out_dtype).eps / 4 if narrower else 0
    assert_as_accurate_as_torch(result[0], expected[0], reference[0], floor=floor + rounding)
    # The terms of the gradient cancel, all of them in a row of one; what is lost is relative to the terms. Torch and we
    # start from the same rounded output, whose error a short row may cancel by luck. The gradient is at most half of a
    # term, and rounding it costs half an eps.
    dx, dx_expected, dx_reference = (t.double() for t in (result[1], expected[1], reference[1]))
    assert result[1].dtype == x.dtype and result[1].shape == x.shape
    if x.numel():
        terms = dy.double().abs().amax() * (x.shape[dim] if op == "log_softmax" and x.ndim else 1)
        error, torchs_error = (dx - dx_reference).abs().max(), (dx_expected - dx_reference).abs().max()
        assert error <= 3 * torchs_error + (floor + torch.finfo(out_dtype).eps / 4) * terms
    return result


# --- sizes ---


@OPS
@DTYPES
@PATHS
def test_softmax_matches_torch(op, dtype, path, device):
    # Without a GPU every other length, and of what takes long there every sixth.
    is_slow = "parts" in path or dtype in (torch.bfloat16, torch.float64)
    for n_cols in SIZES if device.type != "cpu" else SIZES[::6] if is_slow else SIZES[::2]:
        x = torch.randn(3, n_cols, device=device).mul(3).to(dtype)
        check(op, lay(x, path), dy=lay(torch.randn(3, n_cols, device=device).to(dtype), path))


@pytest.mark.parametrize(("op", "n_rows"), in_turn(BOTH, [1, 2, 7, 8, 9, 63, 64, 65, 130]))
@THREE_PATHS
def test_softmax_matches_torch_at_many_row_counts(op, n_rows, path, device):
    x, dy = torch.randn(2, n_rows, 19, device=device)
    check(op, lay(x, path), dy=lay(dy, path))


@OPS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@LAYOUTS
def test_rows_that_can_or_cannot_be_read_16_bytes_at_a_time(op, dtype, n_cols, stride, offset, device):
    layout = n_cols, stride, offset, dtype
    check(op, laid_out(3, *layout), dy=laid_out(3, *layout))
    check(op, laid_out(3, *layout), dy=torch.randn(3, n_cols, device=device).to(dtype))


@pytest.mark.parametrize(("op", "dtype"), in_turn(BOTH, FLOATS[:2]), ids=str)
@pytest.mark.parametrize(
    ("n_rows", "n_cols"),
    [(1, 193), (2, 259), (9, 201), (17, 631), (17, 641), (8, 1025), (3, 2501), (2, 5113), (3, 8191)],
)
def test_rows_that_begin_anywhere(op, dtype, n_rows, n_cols, device, monkeypatch):
    monkeypatch.setattr(module, "_MIN_BYTES_UNALIGNED", 0)
    # The row strides differ from the rows' length by 16 bytes; no kernel may take what lies between for numbers.
    x = torch.full((n_rows + 9, n_cols + 8), NAN, device=device, dtype=dtype)[8:-1, :n_cols]
    dense = torch.empty(n_rows, n_cols, device=device, dtype=dtype)
    assert module._unaligned_tile(x, dense) or n_cols > 5113
    assert module._unaligned_tile(dense, dense, dense)
    assert not module._unaligned_tile(dense.float(), dense.float(), dense)
    x.copy_(torch.randn(n_rows, n_cols, device=device) * 3)
    check(op, x)
    check(op, torch.randn(n_rows, n_cols, device=device).mul(3).to(dtype), dtype=torch.float32)
    for gap in (16, 3):
        # The rows of dy lie further apart than those of y, and begin where these do, or elsewhere.
        dy = torch.full((n_rows, n_cols + gap), NAN, device=device, dtype=dtype)[:, :n_cols]
        check(op, dense.copy_(x), dy=dy.copy_(torch.randn(n_rows, n_cols, device=device)))
    x[0, -1], x[-1, 0] = -INF, INF
    torch.testing.assert_close(ours(op, x), torchs(op, x), equal_nan=True, rtol=1e-2, atol=1e-2)


def test_few_odd_rows_are_faster_one_by_one():
    def fwd(n_rows, n_cols, n_tensors=2):
        x = torch.empty(n_rows, n_cols, device="meta", dtype=torch.float16)
        return module._unaligned_tile(*n_tensors * [x])

    def bwd(n_rows, n_cols):
        return fwd(n_rows, n_cols, 3)

    assert fwd(4096, 781) and fwd(16384, 259) and fwd(2, 1025) and bwd(4096, 781) and bwd(4096, 24569)
    assert not (fwd(2048, 781) or fwd(4096, 259) or fwd(2**20, 191) or fwd(4096, 784) or fwd(4096, 5121))
    assert not (bwd(2048, 781) or bwd(64, 3905) or bwd(4096, 784) or bwd(4096, 24571))


@pytest.mark.parametrize(
    ("n_rows", "n_cols"), [(1, 33), (2, 35), (8, 71), (16, 37), (17, 121), (50, 133), (33, 130), (7, 201)]
)
def test_rows_that_begin_anywhere_are_stored_once_and_nothing_else_is_touched(n_rows, n_cols):
    x, out = torch.randn(2, n_rows, n_cols).half()
    programs = -(-n_rows // 16) * 8
    trace = tg.trace(
        module._softmax_fwd_unaligned_kernel, (programs,), x, out, n_rows, n_cols, n_cols, VECTOR=8, BLOCK_ROWS=2,
        BLOCK_COLS=64, N_BLOCKS=-(-(n_cols + 7) // 64), N_FULL=n_cols // 64,
    )  # fmt: skip
    assert not trace.outside and (trace.load_counts("x_ptr") >= 1).all() and (trace.store_counts("out_ptr") == 1).all()
    y, dy, dx = torch.randn(3, n_rows, n_cols).half()
    trace = tg.trace(
        module._softmax_bwd_unaligned_kernel, (programs,), y, dy, dx, n_rows, n_cols, n_cols, n_cols, VECTOR=8,
        BLOCK_ROWS=2, BLOCK_COLS=64, N_BLOCKS=-(-(n_cols + 7) // 64), N_FULL=n_cols // 64, IS_LOG=False,
        STATS_DTYPE=tl.float32,
    )  # fmt: skip
    assert not trace.outside and (trace.store_counts("dx_ptr") == 1).all()
    assert all((trace.load_counts(name) >= 1).all() for name in ("y_ptr", "dy_ptr"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_softmax_around_the_longest_row_in_registers(dtype, device):
    limit = module._MAX_ROW_BYTES // (8 if dtype == torch.float64 else 4)
    for n_cols in (limit // 2 + 1, limit, limit + 1, *module.PACKED_COLS, module.PACKED_COLS[0] + 8):
        check("softmax", torch.randn(2, n_cols, device=device).mul(3).to(dtype))


@OPS
@pytest.mark.parametrize("n_cols", [14_340, 16_384, 24_576, 33_000])
def test_gradient_of_rows_that_are_read_twice(op, n_cols, device, monkeypatch):
    monkeypatch.setattr(module, "is_hopper", lambda device: True)
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 0)
    monkeypatch.setattr(hopper, "load", lambda name: None)
    launched = record_launches(monkeypatch)
    check(op, torch.randn(3, n_cols, device=device).mul(3).half())
    assert module._softmax_bwd_twice_kernel in launched


@OPS
@pytest.mark.parametrize("n_cols", [2049, 4104, 8193, 8200, 13_313, 16_383, 20_000])
def test_gradient_of_rows_in_blocks(op, n_cols, device, monkeypatch):
    launched = record_launches(monkeypatch)
    check(op, torch.randn(3, n_cols, device=device).mul(3).half())
    assert module._softmax_bwd_blocks_kernel in launched


# Whole rows in shared memory, and rows in parts.
CHIP_COLUMNS = [
    *(8201, 8204, 20_496, 32_776, 41_393, 70_000, 106_490, 106_496, 106_504),
    *(110_592, 114_688, 131_072, 150_001, 155_640, 155_648, 155_649),
    *(170_001, 262_144),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_programs_that_hold_rows_fit_a_multiprocessor(dtype):
    module = pytest.importorskip("triton_gallery.hopper.softmax", exc_type=ImportError)
    x = torch.empty(1, dtype=dtype, device="meta")
    for n_cols in (*range(4097, 200_000, 251), 32_767, 40_960, 262_144, 524_289, 1_048_576, 2_097_151):
        for row_stride in (n_cols, n_cols + 64):
            cut = module._cut(x, n_cols, row_stride)
            row_bytes, part_bytes = n_cols * x.element_size(), cut.part_lines * 128
            assert (cut.n_parts - 1) * part_bytes < row_bytes <= cut.n_parts * part_bytes
            # What begins within a cache line has up to 126 bytes of the one before it.
            chunk_bytes = cut.num_warps * 32 * 16 * module._STEPS
            longest = min(row_bytes, part_bytes) + (0 if cut.aligned else 126)
            assert cut.n_full <= cut.n_chunks == -(-longest // chunk_bytes)
            # Each program is charged 1 KiB, and a reduction over its warps takes some more.
            room = 228 * 1024 // (cut.n_chunks * chunk_bytes + 1024 + 256)
            assert room >= (4 if cut.n_parts == 1 else 3 * module._MAX_PARTS)


@pytest.mark.gpu
@OPS
def test_who_waits_for_programs_that_do_not_start_does_their_work(op, device, monkeypatch):
    if not is_hopper(device):
        pytest.skip("these kernels are Hopper's")
    kernels = hopper.load("softmax")
    x = torch.randn(4, 65_536, device=device).mul(3).half()
    cut = kernels._cut(x, 65_536, 65_536)
    launch, n_started = kernels.launch, cut.n_parts + 3
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **kw: launch(kernel, (n_started,), *args, **kw))
    out = torch.full_like(x, 7)
    kernels.forward(x, out, 4, 65_536, 65_536, op == "log_softmax")
    written = out.flatten()[: 65_536 + 3 * cut.part_lines * 64]
    torch.testing.assert_close(written, torchs(op, x).flatten()[: written.numel()])
    assert (out.flatten()[written.numel() :] == 7).all()


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("n_cols", CHIP_COLUMNS)
def test_long_rows_that_stay_on_the_chip(op, dtype, n_cols, device):
    if not is_hopper(device):
        pytest.skip("these kernels are Hopper's")
    # More rows than programs: each program has several, one after another.
    wide = torch.randn(800 if n_cols < 70_000 else 300, n_cols + 24, device=device).mul(3).to(dtype)
    x = wide[:, 16:-8]
    in_registers = n_cols <= 12_288 if dtype == torch.float32 else n_cols % 8 == 0 and n_cols <= 16_384
    if not in_registers:
        assert hopper.load("softmax").supported_rows(x, len(x), n_cols, n_cols + 24) >= len(x) - 1
    check(op, x)
    x[1] = -INF
    x[2, -1], x[3, 0], x[4, n_cols // 2] = NAN, INF, -INF
    x[5, :-1] = -INF
    x[6] *= 3e3
    y, reference = ours(op, x), torchs(op, x.double())
    assert_as_accurate_as_torch(y, torchs(op, x), reference, floor=FLOOR)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_parts_of_gradients_fit_a_multiprocessor(dtype):
    module = pytest.importorskip("triton_gallery.hopper.softmax_backward", exc_type=ImportError)
    for n_cols in (*range(16_385, 200_000, 251), 131_072, 131_073, 262_144, 1_000_000):
        x = torch.empty(300, n_cols, dtype=dtype, device="meta")
        aligned, n_parts, part_cols, n_chunks, max_groups = module.plan_backward(x, x, x)
        vector, chunk_bytes = 16 // dtype.itemsize, module._STEPS * 32 * 16
        assert aligned == (n_cols % vector == 0) and part_cols % 16 == 0
        assert (n_parts - 1) * part_cols + vector <= n_cols <= n_parts * part_cols
        # What begins within a vector has numbers of another row before it.
        assert (part_cols + (0 if aligned else vector - 1)) * dtype.itemsize <= n_chunks * chunk_bytes
        held = 2 * module._STAGES * n_chunks * chunk_bytes
        assert module._PROGRAMS * (held + 1024 + 256) <= 228 * 1024
        assert 0 < max_groups * n_parts <= module._PROGRAMS * 132


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize(
    "shape", [(1500, 16_392), (1000, 20_001), (600, 50_257), (300, 131_072), (40, 131_071), (3, 1_100_000)], ids=str
)
def test_gradients_of_long_rows(op, dtype, shape, device):
    if not is_hopper(device):
        pytest.skip("these kernels are Hopper's")
    x, (n_rows, n_cols) = torch.randn(shape, device=device).mul(3).to(dtype), shape
    dy = torch.randn(n_rows, n_cols + 32, device=device).to(dtype)[:, 16:-16]
    # Of the longest row the programs must all find room, and not every GPU of this kind has 132 multiprocessors.
    assert hopper.load("softmax_backward").plan_backward(x, dy, x) or n_cols > 1_000_000
    first = check(op, x, dy=dy)[1]
    assert all(torch.equal(run(ours, op, x, -1, None, dy)[1], first) for _ in range(20))


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("shape", [(70, 50_000), (40, 70_001), (7, 300_000), (3, 1_000_008), (2, 2_000_001)], ids=str)
def test_few_rows_on_several_multiprocessors(op, dtype, shape, device):
    if not is_hopper(device):
        pytest.skip("these kernels are Hopper's")
    x = torch.randn(shape, device=device).mul(3).to(dtype)
    x[0, : shape[1] // 2] = -INF  # whole parts
    assert hopper.load("softmax").supported_rows(x, *shape, shape[1]) >= shape[0] - 1
    check(op, x)


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_rows_too_long_for_all_multiprocessors(op, dtype, device):
    check(op, torch.randn(2, 5_000_001, device=device).mul(3).to(dtype))


@pytest.mark.gpu
def test_parts_wait_for_each_other_on_many_streams_and_in_graphs(device):
    if not is_hopper(device):
        pytest.skip("these kernels are Hopper's")
    xs = [torch.randn(32, 131_072, device=device).half() for _ in range(8)]
    expected = [tg.softmax(x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(tg.softmax(x))
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tg.softmax(xs[0])
    for x, right in zip(xs, expected, strict=True):
        xs[0].copy_(x)
        graph.replay()
        assert torch.equal(y, right)


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize("n_rows", [64, 700])
def test_long_strided_rows_keep_their_digits(op, n_rows, device):
    for _ in range(10 if n_rows == 64 else 1):
        x = torch.randn(n_rows, 150_004, 2, device=device).half()[..., 0]
        check(op, x, dtype=torch.float32)
        check(op, x, dtype=torch.float32, dy=torch.randn(n_rows, 150_004, 2, device=device)[..., 0])


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("shape", [(4, 9000), (300, 9002), (300, 40_000), (4, 150_000)], ids=str)
def test_long_rows_with_a_float64_result(op, dtype, shape, device):
    check(op, torch.randn(shape, device=device).to(dtype), dtype=torch.float64)


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize("n_rows", [1, 2, 301, 304])
def test_the_last_row_ends_with_the_memory(op, n_rows, device):
    check(op, torch.randn(n_rows, 20_001, device=device).mul(3).half())
    check(op, torch.randn(n_rows, 20_007, device=device).mul(3).half()[:, :-6])


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize("step", [1, 3, 8])
def test_rows_that_overlap(op, step, device):
    check(op, torch.randn(20_001 + 300 * step, device=device).mul(3).half().unfold(0, 20_001, step))


def test_which_rows_wait_on_the_chip():
    kernels = pytest.importorskip("triton_gallery.hopper.softmax", exc_type=ImportError)
    for dtype, n_rows, n_cols, supported in (
        (torch.float16, 4096, 16_384, False),
        (torch.float16, 4096, 16_392, True),
        (torch.float16, 4096, 4096, False),
        (torch.float16, 4096, 4100, True),
        (torch.float16, 100, 16_392, False),
        (torch.float16, 100, 16_388, True),
        (torch.float16, 10, 32_772, True),
        (torch.float16, 11, 32_772, False),  # the last row ends between two multiples of 16 bytes
        (torch.float16, 10, 32_784, False),
        (torch.float16, 10, 49_160, True),
        (torch.float32, 4096, 12_288, False),
        (torch.float32, 4096, 12_292, True),
        (torch.float64, 4096, 12_292, False),
    ):
        x = torch.empty(n_rows, n_cols, device="meta", dtype=dtype)
        assert kernels.supported_rows(x, n_rows, n_cols, n_cols) == (n_rows if supported else 0)


def test_rows_that_overlap_are_not_read_past_their_memory():
    module = pytest.importorskip("triton_gallery.hopper.softmax", exc_type=ImportError)
    supported = {
        step: module.supported_rows(torch.empty(20_001 + 8 * 300 + 7, device="meta").half(), 300, 20_001, step)
        for step in (1, 9)
    }
    assert supported == {1: 0, 9: 299}


@pytest.mark.parametrize(("op", "dtype"), in_turn(BOTH, [torch.float16, torch.float64]), ids=str)
@pytest.mark.parametrize("path", ["parts", "strided_parts"])
def test_parts_of_long_rows(op, dtype, path, device, monkeypatch):
    monkeypatch.setattr(module, "_MIN_STEPS_OF_PARTS", 3)
    force_online(monkeypatch, 64 * dtype.itemsize)
    one_tile = module._strided_tile(200, 400, False, dtype, True)
    monkeypatch.setattr(
        module, "_strided_tile", lambda n_rows, n_cols, *args: one_tile if n_cols == 400 else (4, 32, 4)
    )
    launched = record_launches(monkeypatch)
    for n_rows, n_cols in ((1, 500), (2, 577)):
        x = torch.randn(n_rows, n_cols + 3, device=device).mul(3).to(dtype)[:, 1:-2]
        x[0, :200] = -INF  # parts with nothing in them
        x = lay(x, path)
        check(op, x)
        assert {module._softmax_parts_fwd_kernel, module._softmax_parts_bwd_kernel} < set(launched)
        x[0] = -INF
        x[-1, -1] = NAN
        torch.testing.assert_close(ours(op, x), torchs(op, x), equal_nan=True)
        launched.clear()
    ours(op, lay(torch.randn(200, 400, device=device).to(dtype), path))
    assert module._softmax_parts_fwd_kernel not in launched


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_few_long_rows_of_a_vocabulary(op, dtype, device):
    for n_rows, n_cols in ((1, 128_256), (7, 151_937), (8, 50_257), (3, 60_000), (66, 131_072), (1, 20_000_001)):
        check(op, torch.randn(n_rows, n_cols, device=device).mul(3).to(dtype))


def test_fewer_rows_are_cut_into_parts_the_shorter_they_are():
    def shortest(n_rows):
        return min(n for n in range(1, 40) if module._pays_in_parts(n_rows, 4096 * n, 4096, torch.device("meta")))

    assert [shortest(n) for n in (1, 18, 36, 66)] == [4, 4, 8, 15]
    assert not module._pays_in_parts(67, 10**7, 4096, torch.device("meta"))


@pytest.mark.parametrize("n_cols", [70_003, pytest.param(3_000_003, marks=pytest.mark.gpu)])
def test_log_softmax_of_a_long_row(n_cols, device):
    check("log_softmax", torch.randn(1, n_cols, device=device))


@PATHS
def test_each_path_has_its_kernels(path, device, monkeypatch):
    launched = []
    monkeypatch.setattr(module, "launch", lambda kernel, *args, **meta: launched.append(kernel))
    x, dy = (lay(torch.randn(4, 40, device=device), path) for _ in range(2))
    run(ours, "softmax", x, -1, None, dy)
    if "parts" in path:
        names = ["parts_stats", "parts_fwd", "parts_sum", "parts_bwd"]
    else:
        names = {
            "whole_rows": ["fwd", "bwd"],
            "blocks": ["fwd_blocks", "bwd_blocks"],
            "online": ["online_fwd", "online_bwd"],
            "strided": ["strided_fwd", "strided_bwd"],
        }[path]
    assert launched == [getattr(module, f"_softmax_{name}_kernel") for name in names]


# --- shapes and strides ---


@OPS
@pytest.mark.parametrize("shape", [(9,), (1, 1, 1), (6, 1), (1, 6), (2, 3, 4), (3, 1, 5, 1), (2, 3, 2, 3, 4)], ids=str)
def test_softmax_along_every_dim(op, shape, device):
    x = torch.randn(shape, device=device)
    for dim in range(-len(shape), len(shape)):
        check(op, x, dim)


@OPS
@pytest.mark.parametrize("dim", [0, -1])
@DTYPES
def test_softmax_of_a_0d_tensor(op, dim, dtype, device):
    check(op, torch.tensor(3.5, device=device, dtype=dtype), dim)


@OPS
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 4), (0, 0)], ids=str)
def test_softmax_of_nothing(op, shape, device):
    for dim in range(len(shape)):
        check(op, torch.empty(shape, device=device), dim)


def strided_inputs(device, dtype=torch.float32):
    def r(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    return {
        "transposed": r(13, 9).t(),
        "permuted": r(3, 4, 5, 6).permute(2, 0, 3, 1),
        "heads before positions": r(2, 7, 3, 5).transpose(1, 2),
        "5-d": r(2, 3, 2, 3, 5).transpose(1, 4),
        "every second column": r(11, 26)[:, ::2],
        "a slice with an offset": r(130)[3:],
        "rows and columns cut": r(9, 17)[1:-1, 2:-3],
        "expanded rows": r(1, 19).expand(7, 19),
        "expanded columns": r(7, 1).expand(7, 19),
        "expanded from 0-d": r().expand(5, 6),
        "overlapping": r(40).as_strided((9, 8), (3, 1)),
        "channels last": r(2, 6, 3, 5).to(memory_format=torch.channels_last),
        "many rows apart": r(70, 3, 4).permute(0, 2, 1)[:, 1:],
    }


@OPS
@pytest.mark.parametrize("name", strided_inputs("cpu"))
def test_softmax_matches_torch_on_strided_input(op, name, device):
    x = strided_inputs(device)[name]
    for dim in range(x.ndim):
        check(op, x, dim)


@OPS
@pytest.mark.parametrize("name", strided_inputs("cpu"))
def test_softmax_matches_torch_on_strided_gradients(op, name, device):
    dy = strided_inputs(device)[name]
    x = torch.randn(dy.shape, device=device)
    for dim in range(x.ndim):
        check(op, x, dim, dy=dy)


@OPS
def test_softmax_takes_the_expanded_gradient_of_sum(op, device):
    x, weight = torch.randn(2, 5, 33, device=device)
    grads = []
    for function in (ours, torchs):
        leaf = x.clone().requires_grad_()
        y = function(op, leaf)
        (y.sum() + y.mean(0).sum() + (y.sum(1) * weight[:, 0]).sum()).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_softmax_copies_no_strided_input(device, monkeypatch):
    pointers = []
    monkeypatch.setattr(module, "launch", lambda kernel, grid, x, *args, **meta: pointers.append(x.data_ptr()))
    inputs = strided_inputs(device)
    for x in inputs.values():
        for dim in range(x.ndim):
            tg.softmax(x, dim)
    assert pointers == [x.data_ptr() for x in inputs.values() for _ in range(x.ndim)]


@THREE_PATHS
def test_softmax_reaches_addresses_beyond_32_bits(path, device):
    torch.utils.deterministic.fill_uninitialized_memory = False  # the gigabytes between the numbers are never touched
    try:
        memory = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    # Rows far apart, or columns far apart, by a stride that itself fits into 32 bits.
    x = memory.as_strided((33, 3), (1, 2**30)) if "strided" in path else memory.as_strided((3, 33), (2**30, 1))
    x.copy_(torch.randn(x.shape))
    check("softmax", x)


@PATHS
def test_softmax_writes_nothing_else(path, device):
    x, dy = (lay(torch.randn(5, 33, device=device), path) for _ in range(2))
    y = torch.softmax(x, -1)
    memory = torch.full((3, 5, 33), 7.0, device=device)
    module._launch_rows((x,), memory[1], 1, False, x.dtype)
    torch.testing.assert_close(memory[1], y)
    assert (memory[::2] == 7).all()
    module._launch_rows((y, dy), memory[1], 1, False, x.dtype)
    torch.testing.assert_close(memory[1], y * (dy - (dy * y).sum(1, keepdim=True)))
    assert (memory[::2] == 7).all()


# --- dtypes ---


@OPS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@THREE_PATHS
def test_softmax_converts_to_dtype(op, dtype, x_dtype, path, device):
    x = lay(torch.randn(3, 40, device=device).to(x_dtype), path)
    check(op, x, dtype=dtype, dy=lay(torch.randn(3, 40, device=device).to(dtype), path))


@pytest.mark.parametrize(("dtype", "number"), [(torch.float16, 2048), (torch.bfloat16, 256)], ids=str)
def test_softmax_rounds_to_a_narrower_dtype_first(dtype, number, device):
    # It and the next are one number.
    x = torch.tensor([number, number + 1.0], device=device)
    assert tg.softmax(x, dtype=dtype).tolist() == [0.5, 0.5]


@OPS
@pytest.mark.parametrize("x_dtype", INTEGERS, ids=str)
@DTYPES
def test_softmax_of_integers_with_dtype(op, x_dtype, dtype, device):
    x = torch.randint(0, 7, (4, 9), device=device).to(x_dtype)
    torch.testing.assert_close(ours(op, x, 0, dtype), torchs(op, x, 0, dtype))


# --- values ---

ROWS = {
    "-inf everywhere": [-INF] * 40,
    "-inf but one": [-INF] * 39 + [1.0],
    "-inf in the first blocks": [-INF] * 35 + [3.0, 2.0, -1.0, 0.0, -INF],
    "-inf in the last blocks": [5.0, 4.0] + [-INF] * 38,
    "+inf": [1.0] * 20 + [INF] + [2.0] * 19,
    "+inf twice": [INF] + [0.0] * 38 + [INF],
    "both infinities": [-INF] * 20 + [INF] * 20,
    "NaN first": [NAN] + [1.0] * 39,
    "NaN last": [1.0] * 39 + [NAN],
    "NaN everywhere": [NAN] * 40,
    "NaN among -inf": [-INF] * 17 + [NAN] + [-INF] * 22,
    "all equal": [7.0] * 40,
    "all very negative": [-1e4] * 40,
    "ascending": [-1e4 + 500.0 * i for i in range(40)],
    "descending": [1e4 - 500.0 * i for i in range(40)],
    "±1e4": [1e4, -1e4] * 20,
    "zeros of both signs": [0.0, -0.0] * 20,
}


@pytest.mark.parametrize(("op", "dtype"), in_turn(BOTH, FLOATS), ids=str)
@PATHS
def test_softmax_of_extreme_rows(op, dtype, path, device):
    # All in one tensor: a row must not disturb its neighbours.
    x = lay(torch.tensor(list(ROWS.values()), device=device).to(dtype), path)
    expected = torchs(op, x)
    assert_as_accurate_as_torch(ours(op, x), expected, torchs(op, x.double()), floor=FLOOR)
    assert torch.equal(ours(op, x).isnan(), expected.isnan())


@OPS
@PATHS
def test_softmax_at_the_ends_of_the_dtype(op, path, device):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
        rows = [[low] * 40, [high] * 40, [low, high] * 20, [high] + [low] * 39, [low] * 39 + [-INF], [low] * 39 + [0.0]]
        x = lay(torch.tensor(rows, device=device, dtype=dtype), path)
        torch.testing.assert_close(ours(op, x), torchs(op, x))


@OPS
@PATHS
def test_gradient_of_extreme_rows(op, path, device):
    x = lay(torch.tensor(list(ROWS.values()), device=device), path)
    dy = lay(torch.randn(x.shape, device=device), path)
    torch.testing.assert_close(run(ours, op, x, -1, None, dy), run(torchs, op, x, -1, None, dy), equal_nan=True)


def test_padding_does_not_win_over_negative_rows(device):
    x = torch.full((2, 5), -200.0, device=device)
    assert torch.equal(tg.softmax(x), torch.full_like(x, 0.2))


def test_long_sums_are_float32(device):
    # In float16 the sum of the exponentials would stop growing at 2048.
    x = torch.zeros(1, 5000, dtype=torch.float16, device=device)
    assert torch.equal(tg.softmax(x), torch.full_like(x, 1 / 5000))
    assert torch.equal(tg.log_softmax(x), torch.full_like(x, -math.log(5000)))


# --- gradients ---


@OPS
@THREE_PATHS
def test_softmax_gradcheck(op, path, device):
    x = torch.randn(1, 9, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ours(op, lay(x, path)), x)
    assert torch.autograd.gradgradcheck(lambda x: ours(op, lay(x, path)), x)


@OPS
def test_softmax_gradcheck_along_other_dims(op, device):
    for shape, dim in [((), 0), ((2, 3, 2), 1)]:
        x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, dim=dim: ours(op, x, dim), x)
        assert torch.autograd.gradgradcheck(lambda x, dim=dim: ours(op, x, dim), x)


@OPS
def test_third_derivative_matches_torch(op, device):
    x, *weights = torch.randn(3, 9, dtype=torch.float64, device=device).split(1)
    thirds = []
    for function in (ours, torchs):
        leaf = x.clone().requires_grad_()
        value = function(op, leaf)
        for weight in (*weights, weights[0].square()):
            (value,) = torch.autograd.grad(value, leaf, weight.requires_grad_(), create_graph=True)
        thirds.append(value.detach())
    torch.testing.assert_close(*thirds)


@OPS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_second_derivative_in_16_bits(op, dtype, device):
    x, dy, ddx = torch.randn(3, 4, 33, device=device).to(dtype)
    results = []
    for function, kind in ((ours, dtype), (torchs, dtype), (torchs, torch.float64)):
        leaves = [t.to(kind).requires_grad_() for t in (x, dy)]
        (dx,) = torch.autograd.grad(function(op, leaves[0]), leaves[0], leaves[1], create_graph=True)
        results.append(torch.autograd.grad(dx, leaves, ddx.to(kind)))
    for mine, theirs, reference in zip(*results, strict=True):
        assert_as_accurate_as_torch(mine, theirs, reference, factor=3, floor=torch.finfo(dtype).eps / 2)


@OPS
@THREE_PATHS
def test_results_repeat_bit_for_bit(op, path, device):
    x, dy = (lay(torch.randn(9, 45, device=device), path) for _ in range(2))
    first = run(ours, op, x, -1, None, dy)
    for _ in range(5 if device.type == "cpu" else 100):
        assert all(map(torch.equal, run(ours, op, x, -1, None, dy), first))


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((9001, 37), 0),
        ((16384, 1024), 0),
        ((1500, 300), 0),
        ((300, 20_001), 1),
        ((64, 300_000), 1),
        ((2, 3_000_001), 1),
    ],
)
def test_large_results_repeat_bit_for_bit(op, shape, dim, device):
    x, dy = torch.randn(2, *shape, device=device).half()
    first = run(ours, op, x, dim, None, dy)
    for _ in range(100):
        assert all(map(torch.equal, run(ours, op, x, dim, None, dy), first))


@OPS
@THREE_PATHS
def test_inputs_and_gradients_stay_unmodified(op, path, device):
    x, dy = (lay(torch.randn(4, 21, device=device, dtype=torch.float16), path) for _ in range(2))
    before = [t.clone() for t in (x, dy)]
    versions = x._version, dy._version
    run(ours, op, x, -1, None, dy)
    assert torch.equal(x, before[0]) and torch.equal(dy, before[1]) and versions == (x._version, dy._version)


def test_no_graph_without_a_gradient(device):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    with torch.no_grad():
        assert tg.softmax(x).grad_fn is None
    assert tg.softmax(x.detach()).grad_fn is None
    assert tg.softmax(x).grad_fn is not None


# --- refusals ---


@OPS
@pytest.mark.parametrize(
    ("shape", "dim", "text"),
    [
        ((2, 3), 5, r"dim must be in \[-2, 1\], got 5"),
        ((2, 3), -3, r"dim must be in \[-2, 1\], got -3"),
        ((), 1, r"dim must be in \[-1, 0\], got 1"),
        ((2, 3), 10**5000, r"dim must be in \[-2, 1\], got an int of 16610 bits"),
    ],
    ids=["too large", "too small", "0-d", "huge"],
)
def test_softmax_refuses_a_dim_that_x_lacks(op, shape, dim, text, device):
    with pytest.raises(ValueError, match=f"^{op}: {text}$"):
        ours(op, torch.ones(shape, device=device), dim)


@OPS
@pytest.mark.parametrize("dim", [0.0, None, (0, 1), True, np.True_, np.arange(1)], ids=repr)
def test_softmax_refuses_a_dim_that_is_no_int(op, dim, device):
    with pytest.raises(TypeError, match=f"^{op}: dim must be an int, got {type(dim).__name__}$"):
        ours(op, torch.ones(2, 3, device=device), dim)


@OPS
def test_softmax_takes_a_dim_of_numpy(op, device):
    x = torch.randn(2, 3, device=device)
    for dim in (np.int64(0), np.uint8(1), np.int32(-2)):
        assert torch.equal(ours(op, x, dim), ours(op, x, int(dim)))
    with pytest.raises(ValueError, match=f"^{op}: dim must be in .*, got 5$"):
        ours(op, x, np.int64(5))


@OPS
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_softmax_refuses_integers_without_dtype(op, dtype, device):
    x = torch.ones(2, 3, device=device, dtype=dtype)
    with pytest.raises(TypeError, match=f"^{op}: x must be floating-point, got {dtype}; pass dtype=torch.float32"):
        ours(op, x)


@OPS
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, "float32", np.ones(2), [torch.float32]], ids=str)
def test_softmax_refuses_a_dtype_that_is_not_floating_point(op, dtype, device):
    got = "ndarray" if isinstance(dtype, np.ndarray) else re.escape(repr(dtype))
    with pytest.raises(TypeError, match=f"^{op}: dtype must be None or one of .*, got {got}$"):
        ours(op, torch.ones(2, 3, device=device), dtype=dtype)


@OPS
def test_softmax_refuses_what_is_no_dense_tensor(op, device):
    with pytest.raises(TypeError, match=f"^{op}: x must be a torch.Tensor, got list$"):
        ours(op, [1.0, 2.0])
    with pytest.raises(TypeError, match=f"^{op}: x must have one of the dtypes .*, got complex64$"):
        ours(op, torch.ones(3, device=device, dtype=torch.complex64))
    with pytest.raises(TypeError, match=f"^{op}: x must be a dense .* tensor, got layout torch.sparse_coo"):
        ours(op, torch.ones(3, 3, device=device).to_sparse())


# --- torch's transforms, and compilation ---


@OPS
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_softmax_compiles_without_graph_breaks(op, dynamic, device):
    torch._dynamo.reset()

    def eager(x):
        return ours(op, x * 2, dim=1) + 1

    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for shape in [(4, 12, 3), (7, 20, 3)]:
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(compiled(x), eager(x))
        grads = []
        for function in (compiled, eager):
            leaf = x.clone().requires_grad_()
            grads += torch.autograd.grad(function(leaf).square().sum(), leaf)
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("is_log", [False, True], ids=["softmax", "log_softmax"])
def test_opcheck(is_log, device):
    x, dy = torch.randn(2, 4, 6, 5, device=device)
    ops = torch.ops.triton_gallery
    for dtype in (torch.float32, torch.float16):
        torch.library.opcheck(ops.softmax_fwd.default, (x.transpose(0, 1), 2, dtype, is_log))
        y = ops.softmax_fwd(x, 1, dtype, is_log)
        torch.library.opcheck(ops.softmax_bwd.default, (y, dy.to(dtype), 1, torch.float32, is_log))


def test_checkpoint_and_saved_tensor_hooks(device):
    x, dy = torch.randn(2, 4, 9, device=device)
    expected = run(torchs, "softmax", x, -1, None, dy)[1]
    leaf = x.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(tg.softmax, leaf, use_reentrant=False).backward(dy)
    torch.testing.assert_close(leaf.grad, expected)
    # A hook may hand the output back in another layout.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.t().contiguous(), lambda t: t.t()):
        y = tg.softmax(leaf)
    torch.testing.assert_close(torch.autograd.grad(y, leaf, dy)[0], expected)


@pytest.mark.gpu
@OPS
@DTYPES
def test_autocast_gives_torchs_dtype(op, dtype, device):
    x = torch.randn(4, 33, device=device, dtype=dtype)
    with torch.autocast(device.type, torch.bfloat16):
        for asked in (None, torch.float16):
            y, expected = ours(op, x, -1, asked), torchs(op, x, -1, asked)
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected)


@pytest.mark.slow
def test_row_counts_share_compilations():
    row_counts = [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 100, 128, 255, 500, 512, *range(4090, 4102)]
    ways = {"whole rows": (1000, -1), "online": (65536, -1), "strided": (40, 0)}

    def call(n_rows, n_cols, dim):
        shape = (n_rows, n_cols) if dim == -1 else (n_cols, n_rows)
        return tg.softmax, (torch.empty(shape, device="meta", dtype=torch.float16), dim), {}, True

    calls = [call(n_rows, *way) for way in ways.values() for n_rows in row_counts]
    outcomes = iter(tg.codegen._compile(tg.codegen._pack(calls, ("sm_90",))))
    assert len(row_counts) == 32
    for way in ways:
        compiled = {(kernel.name, kernel.asm["ptx"]) for _ in row_counts for kernel in next(outcomes)[0]}
        names = [name for name, _ in compiled]
        assert set(map(names.count, names)) <= {1, 2, 3}, way


@pytest.mark.slow
def test_row_lengths_share_compilations():
    calls = [
        (tg.softmax, (torch.empty(4096, n, device="meta", dtype=torch.float16),), {}, True) for n in range(993, 1025)
    ]
    outcomes = tg.codegen._compile(tg.codegen._pack(calls, ("sm_90",)))
    names = [name for name, _ in {(kernel.name, kernel.asm["ptx"]) for (kernels,) in outcomes for kernel in kernels}]
    # Multiples of 16, other multiples of 8, of 4 and of 2, and odd lengths, which have kernels of their own, for four
    # and for five blocks.
    assert {name: names.count(name) for name in names} == {
        "_softmax_fwd_kernel": 4,
        "_softmax_fwd_unaligned_kernel": 2,
        "_softmax_bwd_kernel": 4,
        "_softmax_bwd_unaligned_kernel": 2,
    }


def test_single_rows_are_read_16_bytes_at_a_time():
    rows = [torch.empty(n_cols, device="meta", dtype=torch.float16) for n_cols in (4096, 2**24)]
    outcomes = tg.codegen._compile(tg.codegen._pack([(tg.softmax, [x], {}, True) for x in rows], ("sm_90",)))
    assert [{kernel.load_bits for kernel in kernels} for (kernels,) in outcomes] == [{128}, {128}]


def test_parts_meet_in_one_order():
    shapes = {(9001, n_rows): 0 for n_rows in (37, 4096, 3)} | {(1, 1_000_001): -1}
    calls = [(tg.softmax, [torch.empty(shape, device="meta"), dim], {}, False) for shape, dim in shapes.items()]
    for (kernels,) in tg.codegen._compile(tg.codegen._pack(calls, ("sm_90",))):
        (kernel,) = [kernel for kernel in kernels if kernel.name == "_softmax_parts_fwd_kernel"]
        assert_lanes_agree(kernel.asm["sass"])


# --- fuzz ---


@st.composite
def fuzzed(draw):
    """A shape, a dim, dtypes, steps and an order that make a strided view, and whether rows are long."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    steps = st.integers(1, 3)
    if DEVICE.type != "cpu" and draw(st.booleans()):  # rows for each kernel, where that takes no minutes
        shape = [min(size, 4) for size in shape]
        shape[draw(st.integers(0, len(shape) - 1))] += draw(st.sampled_from([300, 9000, 150_000]))
        steps = st.sampled_from([1, 1, 1, 2])
    return (
        shape,
        draw(st.integers(-len(shape), len(shape) - 1)),
        draw(st.sampled_from(FLOATS)),
        draw(st.sampled_from([None, *FLOATS])),
        draw(st.lists(steps, min_size=len(shape), max_size=len(shape))),
        draw(st.permutations(range(len(shape)))),
        draw(st.sampled_from([1.0, 30.0])),
        draw(st.booleans()),
    )


@OPS
@FUZZ
def test_softmax_on_fuzzed_inputs(op, monkeypatch, device, fuzz):
    def run(case):
        shape, dim, dtype, out_dtype, steps, order, scale, long_rows = case
        x = torch.randn([size * step for size, step in zip(shape, steps, strict=True)], device=device)
        x = x.mul(scale).to(dtype)[tuple(slice(None, None, step) for step in steps)].permute(order)
        with monkeypatch.context() as patch:
            if long_rows:
                force_online(patch)
            check(op, x, dim, out_dtype)

    fuzz(run, case=fuzzed())
