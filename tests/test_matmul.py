import importlib
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

import triton_gallery as tg
from accuracy import DEVICE, FUZZ, assert_as_accurate_as_torch, in_turn
from triton_gallery import hopper
from triton_gallery._launch import cdiv, collapse, is_hopper, launch, num_multiprocessors
from triton_gallery.hopper import matmul_plan
from triton_gallery.hopper.matmul import can_address
from triton_gallery.matmul import _config, _grouped_tile, _matmul_kernel, _multiply, launch_tiles

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "leaky_relu": torch.nn.functional.leaky_relu,
}
PRECISIONS = ["highest", "high", "medium"]
# Sums of up to a few hundred products; the order of the additions is ours, not torch's.
FLOOR = {torch.float16: 1e-6, torch.bfloat16: 1e-6, torch.float32: 1e-6, torch.float64: 2e-15}


def named(values):
    return [pytest.param(value, id=str(value).removeprefix("torch.")) for value in values]


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def torch_matmul(a, b, bias=None, activation=None):
    out = torch.matmul(a, b)
    if bias is not None:
        out = out + bias
    return out if activation is None else ACTIVATIONS[activation](out)


def assert_matches_torch(a, b, bias=None, activation=None, **options):
    before = [None if x is None else x.clone() for x in (a, b, bias)]
    ours = tg.matmul(a, b, bias=bias, activation=activation, **options)
    torchs = torch_matmul(a, b, bias, activation)
    wide = [None if x is None else x.double() for x in (a, b, bias)]
    floor = FLOOR[a.dtype]
    if ours.numel() > 0:
        # The terms of a sum may cancel; in a result of few numbers all sums may. Roundings are large beside it then.
        terms = torch_matmul(*(None if x is None else x.abs() for x in wide)).max()
        cancelled = (terms / torch_matmul(*wide).abs().max()).item()
        eps = torch.finfo(torch.promote_types(a.dtype, torch.float32)).eps
        floor += eps / 4 * cancelled if math.isfinite(cancelled) else 0
    assert_as_accurate_as_torch(ours, torchs, torch_matmul(*wide, activation), floor=floor)
    assert ours.is_contiguous()
    for x, old in zip((a, b, bias), before, strict=True):
        assert x is None or torch.equal(x.nan_to_num(), old.nan_to_num())


# --- the order of tiles ---


@triton.jit
def _grouped_tiles_kernel(out_m_ptr, out_n_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    i = tl.arange(0, BLOCK_SIZE)
    tile_m, tile_n = _grouped_tile(tl.minimum(i, tiles_m * tiles_n - 1), tiles_m, tiles_n, GROUP_M)
    tl.store(out_m_ptr + i, tile_m, mask=i < tiles_m * tiles_n)
    tl.store(out_n_ptr + i, tile_n, mask=i < tiles_m * tiles_n)


def grouped_tiles(tiles_m, tiles_n, group):
    """The tiles in their order, as pairs."""
    out = torch.zeros(2, 1024, dtype=torch.int32, device=DEVICE)
    launch(_grouped_tiles_kernel, (1,), *out, tiles_m, tiles_n, GROUP_M=group, BLOCK_SIZE=1024)
    return list(zip(*out[:, : tiles_m * tiles_n].tolist(), strict=True))


@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_grouped_order_covers_every_tile_once(group):
    for tiles_m, tiles_n in [(1, 1), (1, 9), (9, 1), (7, 10), (10, 7), (8, 8), (9, 4), (15, 3), (16, 5), (31, 33)]:
        tiles = grouped_tiles(tiles_m, tiles_n, group)
        assert sorted(tiles) == list(itertools.product(range(tiles_m), range(tiles_n)))


def test_grouped_order_walks_down_a_group_first():
    assert grouped_tiles(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


# --- sizes, strides, batches ---

SIZES = [1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 130]


@pytest.mark.parametrize("M", SIZES)
def test_matmul_matches_torch_at_any_size(M):
    # Every size meets every other one in some position over the three lists.
    for shift in (3, 7):
        i = SIZES.index(M)
        N, K = SIZES[(i + shift) % len(SIZES)], SIZES[(i + 2 * shift) % len(SIZES)]
        assert_matches_torch(random(M, K, dtype=torch.float16), random(K, N, dtype=torch.float16))


@pytest.mark.parametrize("dtype", named(FLOATS))
@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 65, 47), (64, 128, 32), (130, 17, 129)], ids=str)
def test_matmul_matches_torch_in_any_dtype(dtype, sizes):
    M, N, K = sizes
    assert_matches_torch(random(M, K, dtype=dtype), random(K, N, dtype=dtype))


LAYOUTS = {
    "rows": lambda m, n: random(m, n),
    "columns": lambda m, n: random(n, m).t(),
    "every other row": lambda m, n: random(2 * m, n)[::2],
    "every other column": lambda m, n: random(m, 2 * n)[:, ::2],
    "part of a wider matrix": lambda m, n: random(m + 2, n + 3)[1:-1, 2:-1],
    # Of one sign: where all of b is one number, the result would be a sum whose terms cancel.
    "one row for all": lambda m, n: random(1, n).abs().expand(m, n),
    "one column for all": lambda m, n: random(m, 1).expand(m, n),
    "one number for all": lambda m, n: random(1, 1).expand(m, n),
    "overlapping": lambda m, n: random(3 * m + n).as_strided((m, n), (3, 1)),
}


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
def test_matmul_takes_any_strides(a_layout, b_layout):
    assert_matches_torch(LAYOUTS[a_layout](33, 20), LAYOUTS[b_layout](20, 18))


@pytest.mark.parametrize("sizes", [(34, 38, 66), (36, 44, 68), (40, 24, 72)], ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_matmul_reads_in_twos_fours_and_eights(sizes, layout):
    M, N, K = sizes
    for batch in ((), (3,)):
        a = (
            random(*batch, M, K, dtype=torch.float16)
            if layout[0] == "n"
            else random(*batch, K, M, dtype=torch.float16).mT
        )
        b = (
            random(*batch, K, N, dtype=torch.float16)
            if layout[1] == "n"
            else random(*batch, N, K, dtype=torch.float16).mT
        )
        assert_matches_torch(a, b)
        assert_matches_torch(a, b, random(N, dtype=torch.float16), "relu")


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul_takes_transposed_matrices_with_wide_loads(transpose_a, transpose_b):
    a = random(64, 96, dtype=torch.float16).t() if transpose_a else random(96, 64, dtype=torch.float16)
    b = random(80, 64, dtype=torch.float16).t() if transpose_b else random(64, 80, dtype=torch.float16)
    assert_matches_torch(a, b)


BATCHES = {
    "one batch": ((3, 5, 7), (3, 7, 4)),
    "a matrix for all": ((3, 5, 7), (7, 4)),
    "a matrix for all, two batch dimensions": ((2, 3, 5, 7), (7, 4)),
    "a matrix for all on the left": ((5, 7), (3, 7, 4)),
    "sizes of one": ((1, 5, 7), (3, 7, 4)),
    "sizes of one on the right": ((3, 5, 7), (1, 7, 4)),
    "more dimensions on the right": ((3, 5, 7), (1, 1, 7, 4)),
    "two broadcast ways": ((2, 1, 5, 7), (3, 7, 4)),
    "crossed": ((4, 1, 2, 5, 7), (3, 1, 7, 4)),
    "vector and vector": ((7,), (7,)),
    "matrix and vector": ((5, 7), (7,)),
    "vector and matrix": ((7,), (7, 4)),
    "batch and vector": ((2, 3, 5, 7), (7,)),
    "vector and batch": ((7,), (2, 3, 7, 4)),
    "one by one": ((1,), (1,)),
    "no rows": ((0, 7), (7, 4)),
    "no columns": ((5, 7), (7, 0)),
    "no products": ((5, 0), (0, 4)),
    "no products in a batch": ((2, 5, 0), (0, 4)),
    "no products of vectors": ((0,), (0,)),
    "no matrices": ((0, 5, 7), (7, 4)),
    "no matrices by broadcasting": ((0, 5, 7), (1, 7, 4)),
    "one product": ((5, 1), (1, 4)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_matmul_broadcasts_as_torch(name):
    a_shape, b_shape = BATCHES[name]
    a, b = random(*a_shape), random(*b_shape)
    assert_matches_torch(a, b)
    assert_matches_torch(a, b, random(*b_shape[1:][-1:]), "gelu")


@pytest.mark.parametrize(
    ("dtype", "sizes"), in_turn(FLOATS, [(1, 1), (3, 31), (70, 31), (1, 20_001), (3, 4096), (70, 4096)]), ids=str
)
def test_products_with_a_vector(dtype, sizes):
    rows, K = sizes

    def compare(a, b, bias=None, activation=None):
        if dtype != torch.float64:
            assert_matches_torch(a, b, bias, activation)
        else:  # torch itself is the reference, and adds up thousands of numbers in another order
            out = tg.matmul(a, b, bias=bias, activation=activation)
            torch.testing.assert_close(out, torch_matmul(a, b, bias, activation), rtol=1e-11, atol=1e-11)

    for matrix in (
        random(rows, K, dtype=dtype),
        random(K, rows, dtype=dtype).t(),
        random(rows, 2 * K, dtype=dtype)[:, ::2],
    ):
        vector = random(2 * K, 1, dtype=dtype)[::2]
        compare(matrix, vector, random(1, dtype=dtype), "leaky_relu")
        compare(vector.t(), matrix.t(), random(rows, dtype=dtype))
    batch = random(2, 1, rows, K, dtype=dtype).expand(2, 3, rows, K)
    compare(batch, random(3, K, 1, dtype=dtype))
    compare(random(K, dtype=dtype), batch.mT)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (3, 1, 2, 0)], ids=str)
def test_matmul_takes_batches_in_any_memory_order(order):
    # Such as attention's queries, cut out of (batch, seq, heads, head_dim): no single stride leads through the batch.
    a = random(*(torch.Size([3, 4, 5, 6])[d] for d in order)).permute(*torch.tensor(order).argsort().tolist())
    assert a.shape == (3, 4, 5, 6)
    assert_matches_torch(a, random(6, 7))
    assert_matches_torch(a, random(3, 1, 6, 7))
    assert_matches_torch(a, a.mT)


def test_more_matrices_than_the_second_axis_of_a_grid_can_count(monkeypatch):
    monkeypatch.setattr(importlib.import_module("triton_gallery.matmul"), "_MAX_GRID_Y", 5)
    a, b = random(2, 3, 133, 20), random(3, 20, 70)  # of several tiles
    assert_matches_torch(a, b)


def test_matmul_writes_nothing_beyond_the_end():
    a, b = random(33, 20), random(20, 18)
    for block_m, block_n in [(16, 16), (64, 32)]:
        memory = torch.full((3, 33 * 18 + 100), 7.0, device=DEVICE)
        out = memory[1, : 33 * 18].view(33, 18)
        grid = (triton.cdiv(33, block_m) * triton.cdiv(18, block_n),)
        launch(
            _matmul_kernel, grid, a, b, None, out, None, 33, 18, 20, 20, 1, 18, 1, 0, (1,), (0,), (0,),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=16, GROUP_M=2,
        )  # fmt: skip
        torch.testing.assert_close(out, a @ b)
        assert (memory[0] == 7).all() and (memory[2] == 7).all() and (memory[1, 33 * 18 :] == 7).all()


def test_matmul_reaches_beyond_32_bit_offsets():
    torch.utils.deterministic.fill_uninitialized_memory = False  # 4 GiB stay untouched, so on a CPU they cost nothing
    try:
        memory = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    a = memory.as_strided((2, 33), (2**31, 1))
    a.copy_(torch.randn(2, 33))
    b = random(33, 2, dtype=torch.float16)
    # Against a dense copy: torch's own product refuses such a stride on a GPU.
    dense = a.clone(memory_format=torch.contiguous_format)
    torch.testing.assert_close(tg.matmul(a, b), dense @ b)
    torch.testing.assert_close(tg.matmul(b, a), b @ dense)
    torch.testing.assert_close(tg.matmul(a[:, None], b), dense[:, None] @ b)
    torch.testing.assert_close(tg.matmul(a.t(), b.t()), dense.t() @ b.t())


def test_configs_are_few():
    for wide, itemsize in itertools.product((False, True), (1, 2, 4, 8)):
        configs = {
            tuple(_config(M, 4096, 1, itemsize, wide, torch.device("meta")).values()) for M in (*range(1, 300), 4096)
        }
        assert len(configs) <= 3


@pytest.mark.parametrize("K", [16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("N", [16, 64, 128, 256, 512, 1024, 1536, 4096, 6144, 11008, 14336, 32000])
@pytest.mark.parametrize("load_bytes", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 16])
@pytest.mark.parametrize("along_k", [False, True])
def test_plans_on_hopper_are_few(along_k, load_bytes, N, K):
    """Whatever the number of rows, twelve compilations of all kernels together."""
    meta = torch.device("meta")
    specialized = pytest.importorskip("triton_gallery.hopper.matmul_specialized")
    compiled = {"pointer": set(), "specialized": set(), "parts": set()}
    for M in (*range(1, 18), *range(31, 300, 16), *range(300, 5000, 180), 8192, 9000, 16384):
        if matmul_plan._is_large(M, N, K, 1, 2, meta):
            *tile, n_parts, _, _ = specialized._plan(M, N, K, 1, 2, False, (1, 1), meta)
            compiled["specialized" if n_parts == 1 else "parts"].add(tuple(tile))
        else:
            n_parts, config = matmul_plan._pointer_config(M, N, K, along_k, load_bytes, 1, 2, meta)
            compiled["pointer"].add((n_parts > 1, *config.values()))
    assert len(compiled["pointer"]) <= 4 and len(compiled["specialized"]) <= 9 and len(compiled["parts"]) <= 5
    assert sum(map(len, compiled.values())) <= 12


@pytest.mark.parametrize("K", [1, 17, 130, 2000, 4097, 8200, 16400])
def test_there_is_a_plan_on_hopper_for_every_shape(K):
    meta = torch.device("meta")
    specialized = pytest.importorskip("triton_gallery.hopper.matmul_specialized")
    for M, N in itertools.product((1, 16, 17, 64, 130, 700, 3001), repeat=2):
        for along_k in (False, True):
            for load_bytes in (2, 4, 16):
                n_parts, _ = matmul_plan._pointer_config(M, N, K, along_k, load_bytes, 1, 2, meta)
                assert n_parts == 1 or K % (16 * n_parts) == 0
        for itemsize, partial_sums, lines in ((2, False, (1.875, 1)), (2, False, (1, 1)), (1, True, (1.5, 1.75))):
            assert specialized._plan(M, N, K, 1, itemsize, partial_sums, lines, meta).n_parts >= 1


@pytest.mark.parametrize(("n_cols", "lines"), [(4096, 1), (4128, 1.5), (7344, 1.75), (1000, 2.2)])
def test_rows_cost_the_lines_that_they_touch(n_cols, lines):
    specialized = pytest.importorskip("triton_gallery.hopper.matmul_specialized")
    x = torch.empty(64, n_cols, device="meta", dtype=torch.float16)
    assert specialized._lines(x) == specialized._lines(x.mT) == lines


def test_rows_that_share_lines_want_larger_tiles():
    specialized = pytest.importorskip("triton_gallery.hopper.matmul_specialized")

    def rows_and_columns(lines):
        plan = specialized._plan(7344, 1040, 5008, 1, 2, False, (lines, lines), torch.device("meta"))
        return plan.n_consumers * specialized.BLOCK_M, plan.n_cols

    # For 7344 × 1040 × 5008 "tn" the second choice was the quicker one on an H200, by a fifth.
    assert rows_and_columns(1) == (128, 128) and rows_and_columns(1.75) == (192, 192)


def test_row_counts_share_compilations():
    row_counts = [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 127, 128, 129, 200, 255, 256, 384]
    row_counts += [500, 700, 1000, 1024, 1536, 2048, 4096, 8192]
    b = torch.empty(16384, 512, device="meta", dtype=torch.float16)
    calls = [(tg.matmul, (torch.empty(M, 16384, device="meta", dtype=torch.float16), b), {}, False) for M in row_counts]
    outcomes = tg.codegen._compile(tg.codegen._pack(calls, ("sm_90",)))
    compiled = {(kernel.name, kernel.asm["ptx"]) for (kernels,) in outcomes for kernel in kernels}
    names = [name for name, _ in compiled]
    assert len(row_counts) == 32 and set(map(names.count, names)) <= {1, 2, 3, 4}


@pytest.mark.gpu
def test_matmul_compiles_at_most_three_times_for_32_row_counts():
    _matmul_kernel.device_caches.clear()
    b = random(4097, 513, dtype=torch.float16)
    for M in (*range(1, 26), 100, 257, 1000, 1024, 2000, 4000, 4096):
        tg.matmul(random(M, 4097, dtype=torch.float16), b)
    assert sum(len(cache[0]) for cache in _matmul_kernel.device_caches.values()) <= 3


# --- long K, in parts; odd matrices, as copies ---


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("dtype", named([torch.float16, torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("n_parts", [2, 3, 7])
def test_parts_of_k_add_up(n_parts, dtype, activation):
    a, b, bias = random(37, 16 * n_parts, dtype=dtype), random(16 * n_parts, 70, dtype=dtype), random(70, dtype=dtype)
    expected = torch_matmul(*(x.double() for x in (a, b)), bias.double())
    for a_layout in (a, a.t().contiguous().t()):
        out, pre = torch.empty(37, 70, dtype=dtype, device=DEVICE), torch.empty(37, 70, dtype=dtype, device=DEVICE)

        def multiply(*arguments):
            launch_tiles(*arguments, reduced=False)

        batch = (1,), [(0,), (0,)]
        matmul_plan.in_parts(multiply, n_parts, a_layout, b, bias, out, pre, activation, batch)
        assert_as_accurate_as_torch(pre, torch_matmul(a, b, bias), expected, floor=FLOOR[dtype])
        activated = expected if activation is None else ACTIVATIONS[activation](expected)
        assert_as_accurate_as_torch(out, torch_matmul(a, b, bias, activation), activated, floor=FLOOR[dtype])


def test_possible_parts_fill_the_gpu_once():
    meta = torch.device("meta")  # 132 multiprocessors
    assert list(matmul_plan.possible_parts(8192, 16, meta)) == list(range(1, 9))
    assert list(matmul_plan.possible_parts(65536, 4, meta)) == list(range(1, 33))
    assert list(matmul_plan.possible_parts(16384, 36, meta)) == [1, 2, 3]
    for K, n_tiles in ((2047, 1), (1024, 1), (65536, 67), (65536, 200), (0, 1)):
        assert list(matmul_plan.possible_parts(K, n_tiles, meta)) == [1]


@pytest.mark.parametrize("sizes", [(33, 65), (1, 7), (64, 64), (5, 513)], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_copies_for_tma_hold_the_same_numbers(sizes, transposed):
    x = random(sizes[0], sizes[1] + 1, dtype=torch.float16)[:, 1:]
    x = x.t() if transposed else x
    copy, _ = matmul_plan._aligned(x, 16)
    assert torch.equal(copy[0], x) and can_address(copy, 0) and not can_address(x, 0)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_copies_for_tma_of_a_batch(transposed):
    batches = {
        "odd": random(6, 5, 33, dtype=torch.float16),
        "heads": random(2, 5, 3, 40, dtype=torch.float16).transpose(1, 2),
        "shared": random(5, 33, dtype=torch.float16).expand(4, 5, 33),
        "shared by some": random(3, 1, 5, 33, dtype=torch.float16).expand(3, 2, 5, 33),
    }
    for name, x in batches.items():
        sizes, (strides,) = collapse(x.shape[:-2], x.stride()[:-2])
        own = matmul_plan.own_batch(sizes, strides)
        first = x[(0,) * (x.dim() - 2)]
        copies, stride = matmul_plan._aligned(first.mT if transposed else first, 16, *own)
        copies = copies.mT if transposed else copies
        if name == "shared":
            assert stride == 0 and torch.equal(copies[0], first)
        else:
            assert stride == copies.stride(0) and can_address(copies, stride)
            assert torch.equal(copies, x.flatten(0, -3))


@pytest.mark.parametrize("n_cols", [1, 8, 264, 1000])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_copies_for_tma_begin_with_a_sector(n_cols, transposed):
    x = random(70, 1000, dtype=torch.float16)[:, :n_cols]
    x = x.t() if transposed else x
    assert matmul_plan._aligned(x, 16)[0] is x
    copy, _ = matmul_plan._aligned(x, matmul_plan.SECTOR)
    assert torch.equal(copy[0], x) and can_address(copy, 0) and matmul_plan.row_bytes(copy) % 32 == 0
    assert matmul_plan._aligned(copy, matmul_plan.SECTOR)[0] is copy


def test_a_large_product_copies_b_for_its_sectors(monkeypatch):
    taken = []
    stub = SimpleNamespace(multiply=lambda *arguments: taken.append(arguments))
    monkeypatch.setattr(matmul_plan, "load", {"matmul": hopper.load("matmul"), "matmul_specialized": stub}.get)

    def b_of(a, b):
        out = torch.empty(len(a), b.shape[1], device=DEVICE)
        matmul_plan.multiply(a, b, None, out, None, None, False, ((1,), [(0,), (0,)]))
        return taken.pop()[1]

    a, b = random(1536, 264, dtype=torch.float16), random(264, 1032, dtype=torch.float16)
    for x in (b, b.t().contiguous().t()):
        copy = b_of(a, x)
        assert torch.equal(copy[0], x) and matmul_plan.row_bytes(copy) % 32 == 0 and copy is not x
        assert b_of(a[:-1], x) is x  # too few rows to make up for it
    even = random(264, 1040, dtype=torch.float16)
    assert b_of(a, even) is even
    a, b = random(1536, 272).to(torch.float8_e4m3fn), random(1040, 272).to(torch.float8_e4m3fn).t()
    assert b_of(a, b) is b


# K that is cut into parts or not; thin, small and large; rows that TMA can address, and rows that it cannot.
ON_HOPPER = [
    (1, 4096, 14336),
    (16, 1024, 8192),
    (5, 20480, 2048),
    (1024, 16, 8192),
    (33, 4096, 4096),
    (64, 256, 16384),
    (100, 14336, 1024),
    (256, 256, 8192),
    (512, 512, 16384),
    (768, 768, 16384),
    (128, 4096, 16384),
    (1280, 1280, 1280),
    (1023, 1025, 2049),
    (2000, 130, 4097),
    (512, 1001, 8192),
    (511, 511, 511),
    (384, 2048, 4096),
    (700, 3072, 16384),
    (64, 1001, 16384),
    (1600, 1000, 1112),
]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("sizes", ON_HOPPER, ids=str)
def test_matmul_matches_torch_whatever_the_plan(sizes, layout):
    M, N, K = sizes
    a = random(M, K, dtype=torch.float16) if layout[0] == "n" else random(K, M, dtype=torch.float16).t()
    b = random(K, N, dtype=torch.float16) if layout[1] == "n" else random(N, K, dtype=torch.float16).t()
    assert_matches_torch(a, b)
    # Calls like the one before take the short way.
    for _ in range(3):
        assert_matches_torch(a.clone(), b.clone(), random(N, dtype=torch.float16) * K**0.5, "gelu")
    first = tg.matmul(a, b)
    assert all(torch.equal(first, tg.matmul(a, b)) for _ in range(20))


# Batches of one stride and of two, with rows that are read 16 bytes at a time, 8, 4 and 2.
BATCHES_ON_HOPPER = {
    "aligned": lambda r: (r(6, 512, 256), r(6, 256, 384)),
    "short K": lambda r: (r(700, 128, 128), r(700, 128, 96)),
    "heads": lambda r: (r(2, 512, 6, 64).transpose(1, 2), r(2, 512, 6, 64).permute(0, 2, 3, 1)),
    "large heads": lambda r: (r(2, 1024, 16, 128).transpose(1, 2), r(2, 1024, 16, 128).permute(0, 2, 3, 1)),
    "one matrix for some": lambda r: (r(4, 3, 512, 515), r(4, 1, 515, 512)),
    "one matrix for all": lambda r: (r(3, 515, 512).mT, r(515, 500)),
    "in fours": lambda r: (r(12, 500, 500), r(12, 500, 500)),
    "few in fours": lambda r: (r(3, 100, 196), r(3, 196, 100)),
    "in twos": lambda r: (r(12, 514, 258), r(12, 258, 514)),
    "few in twos": lambda r: (r(5, 50, 66), r(5, 66, 98)),
    "odd": lambda r: (r(9, 513, 515), r(9, 515, 517)),
    "a odd, b not": lambda r: (r(90, 197, 197), r(90, 197, 64)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("name", BATCHES_ON_HOPPER)
@pytest.mark.parametrize("dtype", named([torch.float16, torch.float32]))
def test_batches_match_torch_whatever_the_plan(dtype, name, layout):
    a, b = BATCHES_ON_HOPPER[name](lambda *shape: random(*shape, dtype=dtype))
    a = a if layout[0] == "n" else a.mT.contiguous().mT
    b = b if layout[1] == "n" else b.mT.contiguous().mT
    assert_matches_torch(a, b)
    for _ in range(3):
        assert_matches_torch(a.clone(), b.clone(), random(b.shape[-1], dtype=dtype) * 20, "gelu")


def test_a_narrow_matrix_leaves_a_wide_one_its_loads():
    pairs = [((96, 96), (96, 10)), ((50, 514), (514, 1024)), ((50, 97), (97, 1024)), ((96, 10), (10, 10))]
    calls = [
        (tg.matmul, tuple(torch.empty(shape, device="meta", dtype=torch.float16) for shape in pair), {}, False)
        for pair in pairs
    ]
    outcomes = tg.codegen._compile(tg.codegen._pack(calls, ("sm_90",)))
    assert [kernel.load_bits for (kernels,) in outcomes for kernel in kernels] == [128, 128, 128, 32]


def test_loads_across_k_are_as_wide_as_the_lengths_allow():
    calls = []
    for M, N in ((49, 513), (50, 514), (52, 516), (56, 520), (48, 528)):
        a, b = (torch.empty((300, cols), device="meta", dtype=torch.float16) for cols in (M, N))
        calls.append((tg.matmul, (a.mT, b), {}, False))
    outcomes = tg.codegen._compile(tg.codegen._pack(calls, ("sm_90",)))
    assert [kernel.load_bits for (kernels,) in outcomes for kernel in kernels] == [16, 32, 64, 128, 128]


def test_which_batches_are_copied_for_tma():
    def pays(a, b):
        batch = collapse(a.shape[:-2], a.stride()[:-2], b.stride()[:-2])
        batches = [matmul_plan.own_batch(batch[0], strides) for strides in batch[1]]
        return matmul_plan._copies_pay(a, b, a.shape[:-2].numel(), batches)

    def meta(*shape):
        return torch.empty(shape, dtype=torch.float16, device="meta")

    assert pays(meta(8, 2047, 2047), meta(8, 2047, 2047))
    assert pays(meta(8, 47, 2047), meta(8, 2047, 2047))
    assert pays(meta(17, 4001), meta(17, 4001).mT) and not pays(meta(17, 401), meta(17, 401).mT)
    # Two rows are not worth a copy of a large matrix.
    assert not pays(meta(2, 4097), meta(4097, 50257)) and not pays(meta(2, 4098), meta(4098, 50258))
    assert pays(meta(64, 500, 500), meta(64, 500, 500))
    assert not pays(meta(1000, 100, 100), meta(1000, 100, 100))
    assert pays(meta(64, 129, 129), meta(64, 129, 129)) and not pays(meta(16, 129, 129), meta(16, 129, 129))
    heads, keys = meta(4, 2048, 32, 128).transpose(1, 2), meta(4, 2048, 32, 128).permute(0, 2, 3, 1)
    assert pays(heads, keys)
    # The large matrices lie well; to copy the heads takes longer than it saves.
    assert not pays(meta(4, 32, 2048, 2048), heads)
    assert not pays(meta(2, 500, 0), meta(2, 0, 500))
    # The copies would have 42 GB, for factors and a result of less than 1 GB.
    assert not pays(
        meta(100, 1, 128, 8191).expand(100, 100, 128, 8191), meta(1, 100, 8191, 128).expand(100, -1, -1, -1)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(256, 256, 8192), (1023, 1025, 2049)], ids=str)
def test_gradients_whatever_the_plan(sizes):
    M, N, K = sizes
    a, b = random(M, K, dtype=torch.bfloat16), random(K, N, dtype=torch.bfloat16)
    bias, dout = random(N, dtype=torch.bfloat16), random(M, N, dtype=torch.bfloat16)
    grads = []
    for function in (lambda *x: tg.matmul(*x[:2], bias=x[2], activation="gelu"), lambda *x: torch_matmul(*x, "gelu")):
        leaves = [x.clone().requires_grad_() for x in (a, b, bias)]
        grads.append(torch.autograd.grad(function(*leaves), leaves, dout))
    leaves = [x.double().requires_grad_() for x in (a, b, bias)]
    exact = torch.autograd.grad(torch_matmul(*leaves, "gelu"), leaves, dout.double())
    for mine, theirs, reference in zip(*grads, exact, strict=True):
        assert_as_accurate_as_torch(mine, theirs, reference, factor=3, floor=1e-3)


# --- values ---


def test_matmul_keeps_nan_and_infinity_in_their_rows_and_columns():
    a, b = random(70, 20), random(20, 70)
    a[0, 3] = a[69, 5] = float("nan")
    a[30, 2] = float("inf")
    b[4, 1], b[7, 68] = float("inf"), float("nan")
    assert_matches_torch(a, b)


def test_nan_of_any_bits_stays_nan():
    a, b = torch.randn(70, 64, device=DEVICE), torch.randn(64, 80, device=DEVICE)
    a.view(torch.int32)[3, 5] = 0x7F800001
    out = tg.matmul(a, b)
    assert out[3].isnan().all() and out[torch.arange(70, device=DEVICE) != 3].isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_pass_nan_and_infinity_as_torch(activation):
    a = torch.tensor([[-float("inf")], [float("inf")], [float("nan")], [-0.0], [1e4], [-1e4], [-90.0]], device=DEVICE)
    assert_matches_torch(a, torch.ones(1, 1, device=DEVICE), None, activation)


@pytest.mark.parametrize("dtype", named(FLOATS))
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_matmul_epilogue_matches_torch(activation, dtype):
    a, b = random(33, 20, dtype=dtype), random(20, 70, dtype=dtype)
    assert_matches_torch(a, b, random(70, dtype=dtype), activation)


@pytest.mark.parametrize("shape", [(), (1,), (9,)], ids=str)
def test_matmul_broadcasts_the_bias(shape):
    assert_matches_torch(random(4, 7), random(7, 9), random(*shape))
    assert_matches_torch(random(3, 4, 7), random(7, 9), random(*shape))


def test_matmul_takes_a_strided_bias():
    assert_matches_torch(random(4, 7), random(7, 9), random(9, 3)[:, 1])
    assert_matches_torch(random(4, 7), random(7, 9), random(27)[::3])


def test_matmul_rounds_once():
    # 2048 + 1 is no float16, and 2049 - 2048 is 1 only if the product was never rounded to one.
    a = torch.tensor([[2048.0, 1.0]], device=DEVICE).half()
    b, bias = torch.ones(2, 1, device=DEVICE).half(), torch.tensor([-2048.0], device=DEVICE).half()
    assert tg.matmul(a, b, bias=bias).item() == 1


def test_matmul_repeats_bit_for_bit():
    a, b = random(70, 130, dtype=torch.float16), random(130, 70, dtype=torch.float16)
    first = tg.matmul(a, b, activation="gelu")
    assert all(
        torch.equal(tg.matmul(a, b, activation="gelu"), first) for _ in range(5 if DEVICE.type == "cpu" else 100)
    )


# --- precision ---


@pytest.fixture
def float32_precision():
    """Sets torch's precision of float32 products for one test."""
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", [None, *PRECISIONS])
@pytest.mark.parametrize("setting", PRECISIONS)
def test_float32_follows_the_precision(precision, setting, float32_precision):
    float32_precision(setting)
    a, b = random(65, 130), random(130, 33)
    error = (tg.matmul(a, b, precision=precision) - a.double() @ b.double()).abs().max() / 130**0.5
    # TensorFloat-32 keeps 10 bits behind the point, float32 23; the interpreter rounds nothing to TensorFloat-32.
    assert error <= (4e-6 if (precision or setting) == "highest" else 8e-3)


@pytest.mark.gpu
def test_float32_follows_the_setting_of_the_backend(float32_precision):
    # torch's newer way to say so; after it, the getter of the older one raises.
    a, b = random(512, 512), random(512, 512)
    errors = {}
    for setting in ("ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = setting
        errors[setting] = (tg.matmul(a, b) - a.double() @ b.double()).abs().max()
    assert errors["ieee"] < 1e-3 < errors["tf32"]


def test_the_setting_of_the_backend_raises_nothing(float32_precision):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    x = random(4, 16)
    for function in (tg.softmax, lambda x: tg.matmul(x, x.mT), lambda x: tg.attention(x, x, x)):
        assert function(x).isfinite().all()


@pytest.mark.gpu
def test_float32_uses_fewer_bits_only_when_asked(float32_precision):
    float32_precision("highest")
    a, b = random(512, 512), random(512, 512)
    exact = a.double() @ b.double()
    error = {p: (tg.matmul(a, b, precision=p) - exact).abs().max().item() for p in (None, *PRECISIONS)}
    assert error[None] == error["highest"] < 1e-3
    if torch.version.hip is None:
        assert error["highest"] < error["high"] / 10


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(
    "sizes",
    [
        (17, 1000, 64), (8, 1024, 512), (640, 16, 333), (512, 512, 8192), (1001, 999, 1003), (1536, 1600, 640),
        (300, 300, 1500), (20, 1000, 1000), (510, 514, 518), (10, 1000, 1000), (2048, 256, 256),
    ],
)  # fmt: skip
def test_float32_is_as_accurate_whatever_the_plan(sizes, layout, float32_precision):
    float32_precision("highest")
    M, N, K = sizes
    a = random(M, K) if layout[0] == "n" else random(K, M).t()
    b = random(K, N) if layout[1] == "n" else random(N, K).t()
    assert_matches_torch(a, b)
    assert_matches_torch(a.expand(2, M, K), b, random(N) * K**0.5, "gelu")
    assert torch.equal(tg.matmul(a, b), tg.matmul(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(
    "sizes",
    [
        (1000, 1000, 1000), (2048, 576, 1152), (4096, 1152, 4608), (300, 300, 1500), (64, 4096, 4096), (8, 4096, 4096),
        (257, 259, 261), (20, 1000, 900), (200, 200, 8200), (128, 256, 0), (12, 500, 512, 500), (300, 66, 66, 66),
        (40, 77, 64, 77), (500, 100, 100, 100),
    ],
    ids=str,
)  # fmt: skip
def test_tensorfloat32_is_accurate_whatever_the_plan(sizes, layout):
    *batch, M, N, K = sizes
    a = random(*batch, M, K) if layout[0] == "n" else random(*batch, K, M).mT
    b = random(*batch, K, N) if layout[1] == "n" else random(*batch, N, K).mT
    bias = random(N)
    exact = a.double() @ b.double()
    ours = tg.matmul(a, b, precision="high")
    assert torch.equal(ours, tg.matmul(a, b, precision="high"))
    largest = exact.abs().max()
    assert (ours - exact).abs().max() <= 3e-3 * largest
    both = tg.matmul(a, b, bias=bias, activation="gelu", precision="high")
    expected = torch.nn.functional.gelu(exact + bias)
    assert (both - expected).abs().max() <= 4e-3 * largest + 1e-6
    one_for_all = tg.matmul(a[:1] if batch else a.expand(3, M, K), b, precision="high")
    expected = (exact if not batch else a[:1].double() @ b.double()).expand_as(one_for_all)
    assert (one_for_all - expected).abs().max() <= 3e-3 * expected.abs().max()


@pytest.fixture
def bf16x6(specialized):
    return pytest.importorskip("triton_gallery.hopper.matmul_bf16x6")


def run_bf16x6(module, a, b, bias=None, activation=None, *, left=0, block_n=128, n_parts=1, save_pre=False):
    """The product by the kernel for large ones in full precision, which takes the other matrix than the left apart."""
    batch, (M, N) = a.shape[:-2], (a.shape[-2], b.shape[-1])
    out = torch.empty(*batch, M, N, device=DEVICE)
    pre = torch.empty_like(out) if save_pre else None
    x, y = (a, b) if left == 0 else (b.mT, a.mT)
    right_batch = ((y.shape[0],), (y.stride(0),)) if batch and y.stride(0) else ((1,), (0,))
    stride = x.stride(0) if batch else 0
    module.multiply(x, y, bias, out, pre, activation, stride, right_batch, block_n, n_parts, left == 1)
    return out, pre


@pytest.mark.gpu
@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("block_n", [128, 64])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("sizes", [(256, 256, 64), (300, 203, 516), (131, 1100, 36), (2600, 1100, 260)], ids=str)
def test_bf16x6_is_as_accurate_as_torch(bf16x6, sizes, layout, block_n, left):
    M, N, K = sizes
    # TMA wants rows of the left matrix that begin at multiples of 16 bytes.
    ld_m, ld_n = (cdiv(n, 4) * 4 for n in (M, N))
    a = random(M, K) if layout[0] == "n" else random(K, ld_m).t()[:M]
    b = random(K, ld_n)[:, :N] if layout[1] == "n" else random(N, K).t()
    exact, bias = a.double() @ b.double(), random(N)
    before = exact + bias
    for n_parts in (1, 2, 5):
        options = dict(left=left, block_n=block_n, n_parts=n_parts)
        out, _ = run_bf16x6(bf16x6, a, b, **options)
        assert_as_accurate_as_torch(out, a @ b, exact, floor=1e-6)
        assert all(torch.equal(run_bf16x6(bf16x6, a, b, **options)[0], out) for _ in range(5))
        out, pre = run_bf16x6(bf16x6, a, b, bias, "gelu", save_pre=True, **options)
        assert_as_accurate_as_torch(pre, torch.addmm(bias, a, b), before, floor=1e-6)
        assert (out - torch.nn.functional.gelu(before)).abs().max() <= 1e-5 * before.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("left", [0, 1])
def test_bf16x6_takes_batches(bf16x6, left):
    a, b = random(5, 300, 132), random(5, 132, 260)
    for x, y in ((a, b), (a[:1].expand(5, -1, -1), b), (a, b[:1].expand(5, -1, -1)), (a[:, :, 4:100], b[:, 4:100])):
        out, _ = run_bf16x6(bf16x6, x, y, left=left)
        assert_as_accurate_as_torch(out, x @ y, x.double() @ y.double(), floor=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("n_parts", [1, 3])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_bf16x6_with_infinity_and_nan(bf16x6, activation, n_parts, left):
    """A program that finds NaN computes its tiles anew: there are more tiles than programs, so some compute two."""
    a, b = random(3000, 256), random(256, 1500)
    clean = tg.matmul(a, b, activation=activation)
    a[3, 5], a[400, 7], a[2999, 0] = float("inf"), -float("inf"), float("nan")
    b[7, 9], b[200, 800], b[5, 1499] = float("nan"), float("inf"), 0  # 0 * inf is NaN
    a[600, 3], b[3, 30] = 3e38, 3e38
    out, _ = run_bf16x6(bf16x6, a, b, activation=activation, left=left, n_parts=n_parts)
    expected = torch_matmul(a, b, activation=activation)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4, equal_nan=True)
    rows = [i for i in range(3000) if i not in (3, 400, 2999, 600)]
    cols = [i for i in range(1500) if i not in (9, 800, 1499, 30)]
    part = run_bf16x6(bf16x6, *random(2, 256, 256).unbind(), left=left)[0]
    assert part.isfinite().all() and out[rows][:, cols].isfinite().all()
    torch.testing.assert_close(out[rows][:, cols], clean[rows][:, cols], rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, torch.finfo(torch.float32).max])
def test_bf16x6_keeps_all_bits(bf16x6, size):
    x = (torch.rand(256, 256, device=DEVICE) / 2 + 0.5) * size
    x[0, 0] = size
    one = torch.eye(256, device=DEVICE)
    for a, b, exact in ((x, one, x), (-one, x, -x), (one.t(), x.t(), x.t())):
        for left in (0, 1):
            assert torch.equal(run_bf16x6(bf16x6, a, b, left=left)[0], exact)
    whole = torch.randint(-500, 500, (256, 256), device=DEVICE).float()
    assert torch.equal(run_bf16x6(bf16x6, whole, whole)[0].double(), whole.double() @ whole.double())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2048, 1536), (1536, 1024)), ((1023, 1025), (1025, 1027)), ((6, 700, 300), (300, 500)),
        ((16384, 64), (64, 256)), ((512, 4096), (4096, 512)),
        ((16, 500, 512), (16, 512, 520)), ((40, 513, 129), (40, 129, 511)),
    ],
    ids=str,
)  # fmt: skip
def test_large_products_in_full_precision(bf16x6, a, b, monkeypatch):
    calls = []
    multiply = bf16x6.multiply
    monkeypatch.setattr(bf16x6, "multiply", lambda *x: (calls.append(x), multiply(*x)))
    a, b = random(*a), random(*b)
    bias = random(b.shape[-1])
    assert_matches_torch(a, b, bias, "silu")
    assert calls
    a, b = a.requires_grad_(), b.requires_grad_()
    out = tg.matmul(a, b)
    dout = torch.randn_like(out)
    exact = torch.autograd.grad(a.double() @ b.double(), (a, b), dout.double())
    for ours, theirs, reference in zip(
        torch.autograd.grad(out, (a, b), dout), torch.autograd.grad(a @ b, (a, b), dout), exact, strict=True
    ):
        assert_as_accurate_as_torch(ours, theirs, reference, factor=3, floor=1e-6)


def test_who_is_taken_apart():
    plan = pytest.importorskip("triton_gallery.hopper.matmul_float32")

    def left(a, b):
        rows = [(x, (1,), (0,)) for x in (a, b.mT)]
        return min((plan._preparations(rows, i) for i in (0, 1)), key=lambda way: way[2])[:2]

    def meta(*shape):
        return torch.empty(shape, device="meta")

    # The smaller one, and of two as large the one that lies across K.
    assert left(meta(4096, 1024), meta(1024, 512)) == (0, False)
    assert left(meta(512, 1024), meta(1024, 4096)) == (1, False)
    assert left(meta(1024, 1024), meta(1024, 1024)) == (0, False)
    assert left(meta(1024, 1024).mT, meta(1024, 1024).mT) == (1, False)
    # The other one, if TMA cannot address this one; the larger one is copied, if it can address neither.
    assert left(meta(4096, 1023), meta(1023, 4096)) == (1, False)
    assert left(meta(4096, 1023), meta(1023, 511)) == (0, True)


def test_float32_plans_cut_k_into_equal_parts():
    plan = pytest.importorskip("triton_gallery.hopper.matmul_float32")
    meta = torch.device("meta")
    names = ("_FULL_TILES", "_FULL_THIN_TILES", "_REDUCED_TILES", "_REDUCED_THIN_TILES", "_ACROSS_TILES")
    for M, N, K in itertools.product((2, 64, 700), (16, 130, 3001), (0, 1, 100, 1000, 1001, 8192)):
        for name in names:
            _, n_parts, _ = plan._pointer_plan(M, N, K, 1, getattr(plan, name), meta)
            assert K % n_parts == 0 and K // n_parts % math.gcd(K, 16) == 0
            assert n_parts == 1 or K // n_parts >= 128
            assert plan._pointer_plan(M, N, K, 3, getattr(plan, name), meta)[1] == 1
    # A matrix that serves some of the products would be copied for each.
    x = torch.empty(4, 1, 64, 64, device="meta").expand(4, 3, 64, 64)
    assert plan._copy_us(x, *matmul_plan.own_batch((3, 4), (0, 4096))) == math.inf
    assert plan._copy_us(x, *matmul_plan.own_batch((3, 4), (0, 0))) < math.inf


def test_who_is_copied_for_tensorfloat32():
    plan = pytest.importorskip("triton_gallery.hopper.matmul_float32")

    def copied(a, b):
        return plan._are_copied([(x, (1,), (0,)) for x in (a, b.mT)])

    def meta(*shape):
        return torch.empty(shape, device="meta")

    a, b = meta(1000, 2000), meta(2000, 500)
    along, across = meta(500, 2000).mT, meta(2000, 1000).mT
    # One of the two may lie across K, but not both: then the smaller one is copied.
    assert copied(a, b) == copied(a, along) == copied(across, along) == [False, False]
    assert copied(across, b) == [False, True] and copied(b.mT, across.mT) == [True, False]
    # TMA wants rows that begin at multiples of 16 bytes.
    assert copied(meta(1000, 2001)[:, :2000], b) == [True, False]
    assert copied(a, meta(2000, 501)[:, :500]) == copied(across, meta(2000, 501)) == [False, True]


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, torch.finfo(torch.float32).max])
def test_float32_keeps_all_its_bits(size, float32_precision):
    float32_precision("highest")
    x = (torch.rand(64, 64, device=DEVICE) / 2 + 0.5) * size
    x[0, 0] = size
    one = torch.eye(64, device=DEVICE)
    assert torch.equal(tg.matmul(x, one), x) and torch.equal(tg.matmul(-one, x), -x)
    whole = torch.randint(-1000, 1000, (64, 64), device=DEVICE).float()
    assert torch.equal(tg.matmul(whole, whole).double(), whole.double() @ whole.double())


NEEDS_FLOAT8 = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability() < (8, 9),
    reason="this GPU has no products of float8_e4m3fn",
)


@NEEDS_FLOAT8
@pytest.mark.parametrize("precision", [None, *PRECISIONS])
@pytest.mark.parametrize("dtypes", [*itertools.product(FLOAT8, FLOAT8)], ids=lambda d: "-".join(str(x)[13:] for x in d))
def test_float8_matches_the_dequantised_product(dtypes, precision):
    a, b = random(33, 160).to(dtypes[0]), random(70, 160).to(dtypes[1]).t()
    bias = random(70, dtype=torch.bfloat16)
    ours = tg.matmul(a, b, bias=bias, activation="silu", precision=precision)
    wide = [x.to(torch.bfloat16) for x in (a, b)]
    reference = torch_matmul(a.double(), b.double(), bias.double(), "silu")
    # Sums with fewer bits, where they are allowed, are still finer than bfloat16.
    assert_as_accurate_as_torch(ours, torch_matmul(*wide, bias, "silu"), reference, floor=1e-6)


@NEEDS_FLOAT8
@pytest.mark.parametrize("dtype", named(FLOAT8))
def test_float8_is_exact_at_the_ends_of_its_range(dtype):
    info = torch.finfo(dtype)
    values = torch.tensor([info.max, info.min, info.tiny, info.tiny * info.eps, 0.0, 1.0], device=DEVICE).to(dtype)
    ours = tg.matmul(values[:, None], torch.ones(1, 3, device=DEVICE).to(dtype))
    assert torch.equal(ours, values.to(torch.bfloat16)[:, None].expand(6, 3))


@NEEDS_FLOAT8
@pytest.mark.parametrize("layout", [*itertools.product("rc", "rc")], ids="".join)
def test_float8_takes_any_layout(layout):
    a = random(64, 96) if layout[0] == "r" else random(96, 64).t()
    b = random(96, 80) if layout[1] == "r" else random(80, 96).t()
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    torchs = a.to(torch.bfloat16) @ b.to(torch.bfloat16)
    assert_as_accurate_as_torch(tg.matmul(a, b), torchs, a.double() @ b.double(), floor=1e-6)


# --- gradients ---


def assert_gradients_match_torch(a, b, bias=None, activation=None, dout=None):
    """Gradients as accurate as torch's, of a loss that weighs every element of the result differently."""
    tensors = [x for x in (a, b, bias) if x is not None]

    def gradients(function, *tensors, dtype=None):
        leaves = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in tensors]
        out = function(*leaves)
        incoming = weights.to(out.dtype) if dout is None else dout(out)
        return torch.autograd.grad(out, leaves, incoming)

    weights = torch.randn_like(torch_matmul(a, b), dtype=torch.float64)

    def ours(a, b, bias=None):
        return tg.matmul(a, b, bias=bias, activation=activation)

    def torchs(a, b, bias=None):
        return torch_matmul(a, b, bias, activation)

    references = gradients(torchs, *tensors, dtype=torch.float64)
    # What an activation got, and its gradient on the way to the products, are rounded to the dtype; that torch's
    # roundings cancel in a few numbers is its luck.
    floor = 3 * FLOOR[a.dtype] + (torch.finfo(a.dtype).eps / 2 if activation else 0)
    for mine, other, reference in zip(gradients(ours, *tensors), gradients(torchs, *tensors), references, strict=True):
        assert_as_accurate_as_torch(mine, other, reference, factor=3, floor=floor)


@pytest.mark.parametrize("name", BATCHES)
def test_matmul_grad_of_any_shape(name):
    a_shape, b_shape = BATCHES[name]
    assert_gradients_match_torch(random(*a_shape), random(*b_shape))
    assert_gradients_match_torch(random(*a_shape), random(*b_shape), random(*b_shape[1:][-1:]), "silu")


@pytest.mark.parametrize("dtype", named(FLOATS))
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_matmul_grad_of_the_epilogue(activation, dtype):
    a, b = random(33, 20, dtype=dtype), random(20, 70, dtype=dtype)
    assert_gradients_match_torch(a, b, random(70, dtype=dtype), activation)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matmul_grad_of_any_strides(layout):
    assert_gradients_match_torch(LAYOUTS[layout](33, 20), LAYOUTS[layout](20, 18))


@pytest.mark.parametrize(
    "dout",
    [
        lambda out: torch.ones((), device=out.device, dtype=out.dtype).expand_as(out),  # what .sum().backward() sends
        lambda out: torch.arange(out.shape[-1], device=out.device, dtype=out.dtype).expand_as(out),
        lambda out: torch.arange(out.numel(), device=out.device).to(out.dtype).view(out.mT.shape).mT,
    ],
    ids=["one number", "one row", "transposed"],
)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_matmul_grad_takes_any_incoming_gradient(dout, activation):
    assert_gradients_match_torch(random(5, 7), random(7, 4), random(4), activation, dout)
    assert_gradients_match_torch(random(3, 5, 7), random(3, 7, 4), random(4), activation, dout)


def test_matmul_grad_leaves_the_incoming_gradient_alone():
    a, b = random(5, 7).requires_grad_(), random(7, 4)
    dout = random(5, 4)
    before = dout.clone()
    tg.matmul(a, b, activation="relu").backward(dout)
    assert torch.equal(dout, before)


@pytest.mark.parametrize("wants", [*itertools.product((True, False), repeat=3)][:-1], ids=str)
def test_matmul_computes_only_the_gradients_asked_for(wants):
    tensors = [x.requires_grad_(want) for x, want in zip((random(5, 7), random(7, 4), random(4)), wants, strict=True)]
    tg.matmul(tensors[0], tensors[1], bias=tensors[2], activation="silu").sum().backward()
    assert [x.grad is not None for x in tensors] == list(wants)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "activation"),
    [
        *[((3, 4), (4, 2), activation) for activation in (None, *ACTIVATIONS)],
        ((2, 2, 3), (3, 2), "gelu"),
        ((2, 1, 2, 3), (2, 3, 1), None),
        ((2, 2, 3), (2, 3, 2), "silu"),
        ((3,), (3, 2), "silu"),
    ],
)
def test_matmul_gradcheck(a_shape, b_shape, activation):
    a, b = (random(*shape, dtype=torch.float64).requires_grad_() for shape in (a_shape, b_shape))
    bias = random(b_shape[-1], dtype=torch.float64).requires_grad_()

    def function(a, b, bias):
        return tg.matmul(a, b, bias=bias, activation=activation)

    assert torch.autograd.gradcheck(function, (a, b, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (a, b, bias), fast_mode=True)


def test_matmul_skips_autograd_without_gradients():
    a, b = random(5, 7).requires_grad_(), random(7, 4)
    assert tg.matmul(a, b).requires_grad and not tg.matmul(a.detach(), b).requires_grad
    with torch.no_grad():
        assert not tg.matmul(a, b).requires_grad


# --- refusals ---


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, b: tg.matmul([1.0], b), TypeError, "matmul: a must be a torch.Tensor, got list"),
        (lambda a, b: tg.matmul(a, b.int()), TypeError, "matmul: b must have one of the dtypes"),
        (lambda a, b: tg.matmul(a.to_sparse(), b), TypeError, "matmul: a must be a dense"),
        (lambda a, b: tg.matmul(a[0, 0], b), ValueError, "matmul: a must have at least one dimension"),
        (lambda a, b: tg.matmul(a, b.half()), TypeError, "matmul: b must have a's dtype, float32, got float16"),
        (lambda a, b: tg.matmul(a.to(torch.float8_e5m2), b.half()), TypeError, "matmul: b must have a's dtype"),
        (lambda a, b: tg.matmul(b, b), ValueError, r"a.shape\[-1\] must equal b.shape\[-2\], got shapes \(4, 3\) and"),
        (lambda a, b: tg.matmul(a, b[0]), ValueError, r"a.shape\[-1\] must equal b.shape\[-1\], got shapes \(2, 4\)"),
        (lambda a, b: tg.matmul(a.expand(2, 2, 4), b.expand(3, 4, 3)), ValueError, "matmul: the batch dimensions"),
        (lambda a, b: tg.matmul(a, b, activation="tanh"), ValueError, 'activation must be None, "relu".*got .tanh'),
        (lambda a, b: tg.matmul(a, b, activation=["relu"]), ValueError, 'activation must be None, "relu".*got ..relu'),
        (lambda a, b: tg.matmul(a, b, precision="low"), ValueError, "matmul: precision must be None, .*got 'low'"),
        (lambda a, b: tg.matmul(a, b, precision=np.ones(2)), ValueError, "matmul: precision must .*got ndarray"),
        (lambda a, b: tg.matmul(a, b, activation=a[0]), ValueError, "matmul: activation must be None, .*got Tensor$"),
        (lambda a, b: tg.matmul(a, b, bias=1.0), TypeError, "matmul: bias must be a torch.Tensor, got float"),
        (lambda a, b: tg.matmul(a, b, bias=b[0].half()), TypeError, "bias must have the result's dtype, float32, got"),
        (lambda a, b: tg.matmul(a, b, bias=a[0]), ValueError, r"broadcasts to \(3,\), got \(4,\)"),
        (lambda a, b: tg.matmul(a, b, bias=b[:1]), ValueError, r"broadcasts to \(3,\), got \(1, 3\)"),
        (
            lambda a, b: tg.matmul(a.to(torch.float8_e5m2).requires_grad_(), b.to(torch.float8_e5m2)),
            TypeError,
            "matmul: a must not require a gradient in float8_e5m2",
        ),
        (
            lambda a, b: tg.matmul(a.to(torch.float8_e5m2), b.to(torch.float8_e4m3fn).requires_grad_()),
            TypeError,
            "matmul: b must not require a gradient in float8_e4m3fn",
        ),
        (lambda a, b: tg.matmul(a, b.to("meta")), ValueError, "matmul: b must be on the device of a, .*, got meta"),
    ],
)  # fmt: skip
def test_matmul_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call(random(2, 4), random(4, 3))


def test_a_batch_is_no_part_of_a_length_that_would_be_miscounted():
    """Each of two products has a length that counts right, and both together, as rows or as a sum, would not."""
    a, b = torch.ones((), device=DEVICE).expand(2, 2**30 - 100, 1), torch.ones(1, 0, device=DEVICE, requires_grad=True)
    out = tg.matmul(a, b)
    assert out.shape == (2, 2**30 - 100, 0)
    out.sum().backward()
    assert b.grad.shape == b.shape


def test_more_matrices_than_a_grid_has_programs_are_refused():
    a = torch.ones((), device=DEVICE).expand(2**31, 0, 1)
    assert tg.matmul(a, a.mT[:1]).shape == (2**31, 0, 0)
    a = torch.ones((), device="meta").expand(2**31, 1, 1)
    with pytest.raises(ValueError, match=r"matmul: the batch .* must have fewer than 2\*\*31 matrices, got 2147"):
        _multiply(a, a, None, None, None, a, None)


@pytest.mark.gpu
def test_matmul_refuses_tensors_on_two_devices():
    with pytest.raises(ValueError, match="matmul: b must be on"):
        tg.matmul(random(2, 4), torch.randn(4, 3))


# --- torch ---


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_matmul_compiles_without_graph_breaks(activation):
    function = torch.compile(
        lambda a, b, bias: tg.matmul(a, b, bias=bias, activation=activation) * 2, fullgraph=True, backend="aot_eager"
    )
    for a_shape, b_shape in [((5, 7), (7, 4)), ((3, 5, 7), (7, 4)), ((3, 5, 7), (3, 7, 4)), ((7,), (7, 4))]:
        tensors = [random(*shape).requires_grad_() for shape in (a_shape, b_shape, (4,))]
        out = function(*tensors)
        torch.testing.assert_close(out, 2 * torch_matmul(*tensors, activation))
        expected = torch.autograd.grad(2 * torch_matmul(*tensors, activation).sum(), tensors)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), tensors), expected)


def test_matmul_compiles_with_dynamic_shapes():
    function = torch.compile(lambda a, b: tg.matmul(a, b), fullgraph=True, dynamic=True, backend="aot_eager")
    for M, N, K in ((3, 5, 7), (7, 5, 9), (64, 33, 2)):
        a, b = random(M, K), random(K, N)
        torch.testing.assert_close(function(a, b), a @ b)


def test_matmul_opcheck():
    operator = torch.ops.triton_gallery.matmul.default
    a, b, bias = random(2, 5, 7), random(2, 7, 4), random(4)
    torch.library.opcheck(operator, (a, b, bias, "gelu", None))
    torch.library.opcheck(operator, (a, b.mT.contiguous().mT, None, None, "high"))
    torch.library.opcheck(operator, (a[:0], b[:0], None, None, None))
    operator = torch.ops.triton_gallery.matmul_and_pre.default
    torch.library.opcheck(operator, (a, b, bias, "gelu", None))


@pytest.mark.parametrize("d", [1, 2, 3, 7, 8, 132, 4096, 2**20 + 1, 2**29])
def test_inverses_divide(d):
    specialized = pytest.importorskip("triton_gallery.hopper.matmul_specialized")
    numbers = {n for k in (0, 1, 2, 1000, 2**30 // d) for n in range(k * d - 1, k * d + 2)} | {2**30 - 1}
    n = np.array([n for n in numbers if 0 <= n < 2**30], dtype=np.uint32)
    # As `_divide` computes it, with as many bits.
    quotient = ((n * np.uint32(4)).astype(np.uint64) * np.uint32(specialized._inverse(d)) >> np.uint64(32)).astype(
        np.int32
    )
    rest = n.astype(np.int32) - quotient * np.int32(d)
    assert np.array_equal(quotient - (rest < 0), n // d)


@pytest.mark.parametrize("a_dtype", named([torch.float32, torch.float16]))
@pytest.mark.parametrize("b_dtype", named([torch.float32, torch.float16]))
def test_autocast_gives_torchs_dtype(a_dtype, b_dtype):
    a, b, bias = random(9, 9, dtype=a_dtype).requires_grad_(), random(9, 9, dtype=b_dtype).requires_grad_(), random(9)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out, expected = tg.matmul(a, b, bias=bias), torch.nn.functional.linear(a, b.mT, bias)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    out.sum().backward()
    assert a.grad.dtype == a_dtype and b.grad.dtype == b_dtype


@NEEDS_FLOAT8
def test_autocast_leaves_float8_and_its_bias_alone():
    a, b, bias = (
        random(16, 16).to(torch.float8_e4m3fn),
        random(16, 16).to(torch.float8_e4m3fn).t(),
        random(16).bfloat16(),
    )
    expected = tg.matmul(a, b, bias=bias)
    with torch.autocast(DEVICE.type, torch.float16):
        assert torch.equal(tg.matmul(a, b, bias=bias), expected)


@pytest.mark.parametrize(
    ("wanted", "kept"), [((0,), [(8, 3)]), ((1,), [(4, 8)]), ((0, 1), [(4, 8), (8, 3)]), ((2,), [])]
)
def test_matmul_keeps_what_the_gradients_need(wanted, kept):
    leaves = [random(*shape).requires_grad_(i in wanted) for i, shape in enumerate(((4, 8), (8, 3), (3,)))]
    shapes = []
    for _ in range(4):  # later calls take the short way
        shapes.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
            out = tg.matmul(leaves[0], leaves[1], bias=leaves[2])
        assert shapes == kept
        out.backward(torch.ones_like(out))
    product = torch.matmul(*leaves[:2]) + leaves[2]
    expected = torch.autograd.grad(product.sum(), [leaves[i] for i in wanted])
    for i, gradient in zip(wanted, expected, strict=True):
        torch.testing.assert_close(leaves[i].grad, 4 * gradient, rtol=1e-4, atol=1e-4)


def test_autocast_leaves_float64_alone():
    a, b = random(3, 4, dtype=torch.float64), random(4, 5, dtype=torch.float64)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        torch.testing.assert_close(tg.matmul(a, b), a @ b)
        with pytest.raises(TypeError, match=r"b must have a's dtype, bfloat16 after autocast, got float64; convert"):
            tg.matmul(a.float(), b)
        with pytest.raises(TypeError, match=r"b must have a's dtype, float64, got bfloat16 after autocast; convert"):
            tg.matmul(a, b.float())


@pytest.mark.gpu
def test_matmul_runs_in_a_cuda_graph_and_on_another_stream():
    a, b = random(256, 512, dtype=torch.float16), random(512, 256, dtype=torch.float16)
    expected = tg.matmul(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = tg.matmul(a, b)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(on_stream, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tg.matmul(a, b)
    a.neg_()
    graph.replay()
    assert torch.equal(captured, -expected)


# --- the kernels for Hopper ---


@pytest.fixture(params=["matmul", "matmul_specialized"])
def tma(request, monkeypatch):
    """A module with a TMA kernel; the interpreter runs the first one, with tiles small enough for it."""
    if DEVICE.type == "cpu" and request.param != "matmul":
        pytest.skip("Gluon kernels need a GPU")
    if DEVICE.type != "cpu" and not is_hopper(DEVICE):
        pytest.skip("needs a Hopper GPU")
    module = hopper.load(request.param)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, "_TILES", ((32, 64, 4, 3, 1.0), (16, 32, 4, 4, 0.9)))
    return module


def batch_of(a, b):
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    strides = [x.expand(*shape, *x.shape[-2:]).stride()[:-2] for x in (a, b)]
    return shape, collapse(shape, *strides)


def run_tma(tma, a, b, bias=None, activation=None, save_pre=False, reduced=False, plan=()):
    shape, batch = batch_of(a, b)
    dtype = torch.bfloat16 if a.dtype in FLOAT8 else a.dtype
    out, pre = torch.empty(2, *shape, a.shape[-2], b.shape[-1], dtype=dtype, device=DEVICE)
    tma.multiply(a, b, bias, out, pre if save_pre else None, activation, reduced, batch, *plan)
    return out, pre


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((70, 80), (80, 96)),
        ((1, 8), (8, 8)),
        ((200, 136), (136, 72)),
        ((3, 70, 80), (3, 80, 96)),
        ((70, 80), (3, 80, 96)),
        ((3, 70, 80), (80, 96)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", named([torch.float16, torch.bfloat16]))
def test_tma_kernel_matches_torch(tma, a_shape, b_shape, dtype):
    a, b, bias = random(*a_shape, dtype=dtype), random(*b_shape, dtype=dtype), random(b_shape[-1], dtype=dtype)
    wide = [x.double() for x in (a, b, bias)]
    out, _ = run_tma(tma, a, b)
    assert_as_accurate_as_torch(out, a @ b, wide[0] @ wide[1], floor=1e-6)
    out, pre = run_tma(tma, a, b, bias, "gelu", save_pre=True)
    assert_as_accurate_as_torch(out, torch_matmul(a, b, bias, "gelu"), torch_matmul(*wide, "gelu"), floor=1e-6)
    assert_as_accurate_as_torch(pre, torch_matmul(a, b, bias), torch_matmul(*wide), floor=1e-6)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_tma_kernel_takes_transposed_matrices(tma, transpose_a, transpose_b):
    a = random(80, 72, dtype=torch.float16).t() if transpose_a else random(72, 80, dtype=torch.float16)
    b = random(96, 80, dtype=torch.float16).t() if transpose_b else random(80, 96, dtype=torch.float16)
    out, _ = run_tma(tma, a, b)
    assert_as_accurate_as_torch(out, a @ b, a.double() @ b.double(), floor=1e-6)
    out, _ = run_tma(tma, a[8:64, 16:72], b[16:72, 8:])
    assert_as_accurate_as_torch(out, a[8:64, 16:72] @ b[16:72, 8:], a[8:64, 16:72].double() @ b[16:72, 8:].double())


@pytest.mark.parametrize("reduced", [False, True])
def test_tma_kernel_takes_float8(tma, reduced):
    a, b = random(70, 272).to(torch.float8_e4m3fn), random(96, 272).to(torch.float8_e5m2).t()
    out, _ = run_tma(tma, a, b, reduced=reduced)
    assert_as_accurate_as_torch(out, a.bfloat16() @ b.bfloat16(), a.double() @ b.double(), floor=1e-6)


def random_product(M, N, K, layout):
    """a, b and a bias in float16; a "t" in the layout for each matrix that lies transposed."""
    bias = random(N, dtype=torch.float16)
    a = random(K, M, dtype=torch.float16).t() if layout[0] == "t" else random(M, K, dtype=torch.float16)
    b = random(N, K, dtype=torch.float16).t() if layout[1] == "t" else random(K, N, dtype=torch.float16)
    return a, b, bias


@pytest.fixture
def specialized(monkeypatch):
    module = hopper.load("matmul_specialized") if is_hopper(DEVICE) else None
    if module is None:
        pytest.skip("needs a Hopper GPU")
    # Without its memory, as tests change what it depends on.
    monkeypatch.setattr(module, "_plan", module._plan.__wrapped__)
    return module


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_every_tile_of_the_tma_kernels_matches_torch(tma, layout, monkeypatch):
    if hasattr(tma, "_plan"):
        # Without its memory, as this changes what it depends on.
        monkeypatch.setattr(tma, "_plan", tma._plan.__wrapped__)
    a, b, bias = random_product(1000, 776, 520, layout)
    for tile in tma._TILES:
        monkeypatch.setattr(tma, "_TILES", (tile,))
        out, _ = run_tma(tma, a, b)
        assert_as_accurate_as_torch(out, a @ b, a.double() @ b.double(), floor=1e-6)
        out, pre = run_tma(tma, a, b, bias, "gelu", save_pre=True)
        wide = [x.double() for x in (a, b, bias)]
        assert_as_accurate_as_torch(out, torch_matmul(a, b, bias, "gelu"), torch_matmul(*wide, "gelu"), floor=1e-6)
        assert_as_accurate_as_torch(pre, torch_matmul(a, b, bias), torch_matmul(*wide), floor=1e-6)
        first, _ = run_tma(tma, a, b)
        assert all(torch.equal(run_tma(tma, a, b)[0], first) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_every_tile_stores_rows_that_tma_cannot_address(specialized, layout, monkeypatch):
    a, b, bias = random_product(1001, 777, 520, layout)
    wide = [x.double() for x in (a, b, bias)]
    a, b = (matmul_plan._aligned(x, 16)[0].squeeze(0) for x in (a, b))
    for tile in specialized._TILES:
        monkeypatch.setattr(specialized, "_TILES", (tile,))
        out, pre = run_tma(specialized, a, b, bias, "gelu", save_pre=True)
        assert_as_accurate_as_torch(out, torch_matmul(a, b, bias, "gelu"), torch_matmul(*wide, "gelu"), floor=1e-6)
        assert_as_accurate_as_torch(pre, torch_matmul(a, b, bias), torch_matmul(*wide), floor=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", [(1, 272, 14096), (2, 1152, 5968), (16, 16, 8208), (40, 17, 4112), (505, 48, 9008)])
def test_thin_product_with_a_long_k(shape, layout):
    a, b, bias = random_product(*shape, layout)
    assert_matches_torch(a, b, bias, "gelu")
    assert_gradients_match_torch(a, b, bias, None)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_every_tile_of_parts_that_do_not_divide_k(specialized, layout):
    a, b, bias = random_product(300, 265, 9000, layout)
    wide = [x.double() for x in (a, b, bias)]
    a, b = (matmul_plan._aligned(x, 16)[0].squeeze(0) for x in (a, b))
    for tile in specialized._PART_TILES:
        for n_parts in (2, 3, 5):
            plan = [specialized.Plan(*tile[:2], n_parts, 1, False)]
            out, pre = run_tma(specialized, a, b, bias, "gelu", save_pre=True, plan=plan)
            assert_as_accurate_as_torch(out, torch_matmul(a, b, bias, "gelu"), torch_matmul(*wide, "gelu"), floor=1e-6)
            assert_as_accurate_as_torch(pre, torch_matmul(a, b, bias), torch_matmul(*wide), floor=1e-6)
            assert all(torch.equal(run_tma(specialized, a, b, bias, "gelu", plan=plan)[0], out) for _ in range(5))


# For each tile sizes of more than one round, of which the last one has few.
SHARED = {
    (2, 256): (2304, 2240, 2056),
    (3, 192): (2112, 2493, 2056),
    (2, 192): (2176, 1531, 2056),
    (3, 128): (2112, 1560, 2200),
    (2, 128): (2176, 1023, 2056),
    (3, 96): (2112, 1243, 2056),
    (2, 96): (2176, 763, 2056),
}


def plans_that_share(specialized, tile, *sizes):
    """All with this tile, of which two to four programs divide rows or K; tiles of two blocks of columns only rows."""
    if num_multiprocessors(DEVICE) != 132:
        pytest.skip("the sizes are for 132 multiprocessors")
    plans = [plan for plan in specialized.plans(*sizes, DEVICE) if plan[:2] == tile and plan.n_sharing > 1]
    along_k = [(2, False), (3, False), (4, False)] if tile[1].bit_count() == 1 else []
    assert [plan[3:] for plan in plans] == [(tile[0], True), *along_k]
    return plans


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("tile", SHARED)
def test_every_tile_that_programs_share(specialized, tile, layout):
    M, N, K = SHARED[tile]
    a, b, bias = random_product(M, N, K, layout)
    wide = [x.double() for x in (a, b, bias)]
    expected, before = torch_matmul(*wide, "gelu"), torch_matmul(*wide)
    a, b = (matmul_plan._aligned(x, 16)[0].squeeze(0) for x in (a, b))
    for plan in plans_that_share(specialized, tile, M, N, K, 1, 2, False):
        out, pre = run_tma(specialized, a, b, bias, "gelu", save_pre=True, plan=[plan])
        assert_as_accurate_as_torch(out, torch_matmul(a, b, bias, "gelu"), expected, floor=1e-6)
        assert_as_accurate_as_torch(pre, torch_matmul(a, b, bias), before, floor=1e-6)
        assert all(torch.equal(run_tma(specialized, a, b, bias, "gelu", plan=[plan])[0], out) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tile", "reduced"), [((3, 128), False), ((3, 128), True), ((2, 128), False), ((2, 128), True), ((2, 192), True)]
)
def test_every_tile_that_programs_share_in_float8(specialized, tile, reduced):
    M, N, K = SHARED[tile][0], SHARED[tile][1] // 8 * 8, 2 * SHARED[tile][2] // 16 * 16
    a, b = random(M, K).to(torch.float8_e4m3fn), random(N, K).to(torch.float8_e5m2).t()
    expected = a.double() @ b.double()
    for plan in plans_that_share(specialized, tile, M, N, K, 1, 1, not reduced):
        out, _ = run_tma(specialized, a, b, reduced=reduced, plan=[plan])
        assert_as_accurate_as_torch(out, a.bfloat16() @ b.bfloat16(), expected, floor=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tt"])
@pytest.mark.parametrize("tile", [*SHARED, (1, 128), (1, 64)])
def test_every_plan_of_tensorfloat32(specialized, tile, layout):
    small = 300, 261, 1560
    plans = [(small, specialized.Plan(*tile, n_parts, 1, False)) for n_parts in ((1, 3) if tile[0] < 3 else (1,))]
    if tile in SHARED:
        sizes = SHARED[tile]
        plans += [(sizes, plan) for plan in plans_that_share(specialized, tile, *sizes, 1, 4, False)]
    for (M, N, K), plan in plans:
        if layout == "nn":
            # The kernel computes the transposed product; TMA wants rows of multiples of 16 bytes.
            M, N = N, M
        a, b, bias = (x.float() for x in random_product(M, N, K, layout))
        before = a.double() @ b.double() + bias
        out, pre = run_tma(specialized, a, b, bias, "gelu", save_pre=True, reduced=True, plan=[plan])
        # The numbers of these matrices have 10 bits, which is all that counts.
        for found, exact in ((out, torch.nn.functional.gelu(before)), (pre, before)):
            assert (found - exact).abs().max() <= 3e-5 * exact.abs().max()
        again = [run_tma(specialized, a, b, bias, "gelu", reduced=True, plan=[plan])[0] for _ in range(10)]
        assert all(torch.equal(x, out) for x in again)


@pytest.mark.gpu
def test_shared_tiles_on_two_streams_and_in_a_graph(specialized):
    """Calls at the same time have sums of their own."""
    M, N, K = 2112, 2496, 8192
    if specialized._plan(M, N, K, 1, 2, False, (1, 1), DEVICE)[3:] != (3, False):
        pytest.skip("the size is for 132 multiprocessors")
    products = [random_product(M, N, K, "nn")[:2] for _ in range(2)]
    expected = [tg.matmul(a, b) for a, b in products]
    streams = [torch.cuda.Stream() for _ in products]
    results = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (a, b) in zip(streams, products, strict=True):
            with torch.cuda.stream(stream):
                results.append(tg.matmul(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[i % 2]) for i, out in enumerate(results))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [tg.matmul(a, b) for a, b in products]
    for _ in range(5):
        for out in outs:
            out.zero_()
        graph.replay()
        assert all(map(torch.equal, outs, expected))


def test_who_shares_a_tile_has_a_part_of_it():
    specialized = pytest.importorskip("triton_gallery.hopper.matmul_specialized")
    meta = torch.device("meta")
    shared = {False: 0, True: 0}
    for M, N, K in itertools.product((192, 1000, 1792, 2304, 4100, 5120), (128, 2496, 2560, 5120), (1032, 4096, 9000)):
        for itemsize, partial_sums in ((2, False), (1, False), (1, True)):
            plan = specialized._plan(M, N, K, 1, itemsize, partial_sums, (1, 1), meta)
            n_consumers, n_cols, n_parts, n_sharing, by_rows = plan
            if n_sharing > 1:
                shared[by_rows] += 1
                n_tiles = cdiv(M, n_consumers * specialized.BLOCK_M) * cdiv(N, n_cols)
                assert n_parts == 1 and 0 < n_tiles % 132 * n_sharing <= 132
                if by_rows:
                    assert n_sharing == n_consumers
                else:
                    steps = cdiv(K * itemsize, 128)
                    assert n_tiles > 132 and cdiv(steps, n_sharing) * (n_sharing - 1) < steps
    assert min(shared.values()) > 10
    # What other tests and the sanitizer take for such products.
    assert specialized._plan(2112, 2496, 4096, 1, 2, False, (1, 1), meta)[3:] == (3, False)
    assert specialized._plan(2112, 2496, 8192, 1, 2, False, (1, 1), meta)[3:] == (3, False)
    assert specialized._plan(1024, 1024, 1024, 3, 2, False, (1, 1), meta)[3:] == (2, True)
    assert specialized._plan(1792, 2560, 8192, 1, 2, False, (1, 1), meta) == (2, 128, 1, 4, False)
    assert specialized._plan(1792, 2560, 8192, 1, 1, True, (1, 1), meta) == (2, 128, 1, 4, False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", named([torch.float16, torch.bfloat16]))
@pytest.mark.parametrize("activation", [None, "silu"])
def test_large_matmul_grad(activation, dtype):
    a, b, bias = random(2, 1024, 2048, dtype=dtype), random(2048, 1536, dtype=dtype), random(1536, dtype=dtype)
    assert_matches_torch(a, b, bias, activation)
    assert_gradients_match_torch(a, b, bias, activation)
    assert_gradients_match_torch(a, random(2, 2048, 1536, dtype=dtype), bias, activation)


def test_tma_kernel_is_chosen_where_it_can_run():
    def supports(a, b):
        _, batch = batch_of(a, b)
        return hopper.load("matmul").supports(a, b, batch)

    def empty(*shape, dtype=torch.float16):
        return torch.empty(shape, dtype=dtype, device="meta")

    a, b = empty(2048, 2048), empty(2048, 2048)
    assert supports(a, b) and supports(a.t(), b) and supports(a, b.t())
    assert supports(a.expand(3, 2048, 2048), empty(3, 2048, 2048))
    assert supports(empty(2, 3, 2048, 2048), empty(2, 3, 2048, 2048))
    assert not supports(a[:, 1:2001], b[:2000, :]) and not supports(a, b[:, 1:2001])
    assert not supports(empty(2048, 4096)[:, ::2], b)
    assert not supports(a[:1].expand(2048, 2048), b)
    assert not supports(empty(2, 3, 2048, 2048), empty(3, 2, 2048, 2048).transpose(0, 1))
    assert not supports(empty(2048, 2048, dtype=torch.float32), empty(2048, 2048, dtype=torch.float32))
    can_store = hopper.load("matmul").can_store
    assert supports(a[:16], b) and not can_store(empty(16, 2048)) and not can_store(empty(2048, 48))
    assert can_store(empty(64, 72)) and not can_store(empty(64, 68)) and can_store(empty(64, 68, dtype=torch.float32))
    a, b = empty(2048, 2048, dtype=torch.float8_e4m3fn), empty(2048, 2048, dtype=torch.float8_e4m3fn)
    assert supports(a, b.t()) and not supports(a, b) and not supports(a.t(), b.t())


# --- anything ---


@st.composite
def operands(draw):
    """Two matrices or batches of random sizes, layouts and dtype."""
    # On a GPU also sizes that a large product needs.
    size = st.integers(0, 40) if DEVICE.type == "cpu" else st.integers(0, 40) | st.integers(100, 300)
    M, N, K = draw(size), draw(size), draw(size)
    batch = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(FLOATS))

    def operand(rows, columns):
        own = [draw(st.sampled_from((d, 1))) for d in batch]
        own = own[draw(st.integers(0, len(own))) :]
        order = draw(st.permutations(range(len(own) + 2)))
        step = draw(st.sampled_from((1, 1, 2)))
        sizes = [*own, rows, columns]
        x = random(*(sizes[d] for d in order[:-1]), sizes[order[-1]] * step, dtype=dtype)[..., ::step]
        return x.permute(*torch.tensor(order).argsort().tolist())

    return operand(M, K), operand(K, N)


@FUZZ
def test_matmul_on_fuzzed_inputs(fuzz):
    def check(ab, activation):
        a, b = ab
        bias = random(b.shape[-1], dtype=a.dtype)
        assert_matches_torch(a, b, bias, activation)
        assert_gradients_match_torch(a, b, bias, activation)

    fuzz(check, ab=operands(), activation=st.sampled_from([None, *ACTIVATIONS]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradient_of_a_matrix_that_a_batch_shares_is_rounded_once(dtype, device):
    w = torch.ones(4, 8, dtype=dtype, device=device, requires_grad=True)
    x = torch.full((2, 8, 16), 500.0, dtype=dtype, device=device)
    x[1] *= -1
    out = tg.matmul(w, x)
    # Each sample's share is beyond float16.
    (grad,) = torch.autograd.grad(out, w, torch.full_like(out, 10.0))
    assert (grad == 0).all()


@pytest.mark.parametrize("shared", ["a", "b"])
def test_gradient_of_a_matrix_that_a_batch_shares(shared, device):
    x, w, dy = (torch.randn(*shape, device=device) for shape in ((5, 7, 6), (6, 3), (7, 5, 3)))
    x = x.transpose(0, 1)  # its batch does not become rows without a copy
    a, b = (x, w) if shared == "b" else (w.mT, x.mT)
    a, b, dy = a.detach().requires_grad_(), b.detach().requires_grad_(), dy if shared == "b" else dy.mT
    for incoming, batched in ((dy, False), (torch.stack((dy, -dy)), True)):
        results = [
            torch.autograd.grad(f(a, b), (a, b), incoming, is_grads_batched=batched) for f in (tg.matmul, torch.matmul)
        ]
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
