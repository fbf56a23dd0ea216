"""Every operation, compiled for GPUs that need not be here: no spills, shared memory that fits, matrix units in use."""

import functools
import re
from dataclasses import dataclass, field

import pytest
import torch
import triton

import triton_gallery
from triton_gallery import codegen

F16, BF16, F32, F64, F8 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
HALF, FLOATS = (F16, BF16), (F16, BF16, F32, F64)

# Bytes of shared memory that one program can have.
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}
# With two of NVIDIA's whose programs have less shared memory, in `make fuzz`.
SMALL = (*codegen.TARGETS, "sm_86", "sm_120")
# Hopper has kernels of its own, which other cases compile.
BUT_HOPPER = tuple(target for target in codegen.TARGETS if target != "sm_90")


@pytest.fixture(autouse=True)
def _kernels_of_the_default_mode(_same_seed_and_nan_filled_memory):
    """The other tests run in torch's deterministic mode, which takes other kernels; one test below asks for it."""
    torch.use_deterministic_algorithms(False)


class T(tuple):
    """A shape whose last two dimensions are swapped in memory."""

    def __new__(cls, *sizes: int):
        return super().__new__(cls, sizes)


@dataclass(frozen=True)
class Case:
    function: str
    shapes: list[tuple[int, ...]]  # of the tensors
    dtypes: tuple[torch.dtype, ...]
    kwargs: dict = field(default_factory=dict)  # a shape among them stands for a tensor
    matrix: bool = False  # matrix instructions must appear
    targets: tuple[str, ...] = codegen.TARGETS
    # Compiled in every run, with its first dtype, for all targets or for these; `make fuzz` compiles all the rest.
    always: bool | tuple[str, ...] = False

    def calls(self):
        """For each dtype a name and a call, with its gradients where it has some."""
        for dtype in self.dtypes:
            args = [_tensor(shape, dtype) for shape in self.shapes]
            kwargs = {k: _tensor(v, dtype) if isinstance(v, tuple) else v for k, v in self.kwargs.items()}
            words = [_word(shape) for shape in self.shapes] + [f"{k}={_word(v)}" for k, v in self.kwargs.items()]
            name = " ".join([self.function, *words, str(dtype).removeprefix("torch.")])
            yield name, (getattr(triton_gallery, self.function), args, kwargs, dtype in FLOATS)


def _word(value: object) -> str:
    sizes = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"T({sizes})" if isinstance(value, T) else sizes


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if isinstance(shape, T):
        return torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device="meta").mT
    return torch.empty(shape, dtype=dtype, device="meta")


VECTOR, MATRIX = (4096,), (1024, 1024)
CASES = [
    Case("add", [VECTOR, VECTOR], (*FLOATS, torch.int64), always=True),
    Case("add", [(64, 64), (64, 1)], (F16, F64), {"alpha": 0.5}, always=True),
    Case("add", [(4096, 4096), T(4096, 4096)], FLOATS),
    Case("add", [(4096, 4095), (4095,)], (F16, F64), always=True),
    Case("add", [(4096, 4095), (4096, 1)], (F16,), {"alpha": 0.5}),
    Case("softmax", [(4096, 256)], FLOATS, always=True),
    Case("softmax", [(4096, 777)], (F16, F32)),
    Case("softmax", [(4096, 1000)], (F16,)),
    Case("softmax", [(4096, 3905)], (F16,), always=True),
    Case("softmax", [(4096, 5001)], (F16,)),
    Case("softmax", [(4096, 12281)], (F16,)),
    Case("softmax", [(4096, 24569)], (F16,)),
    Case("softmax", [(4096, 8192)], (F32, F64)),
    Case("softmax", [(4096, 12288)], (F16, F32, F64)),
    Case("softmax", [(4096, 20480)], (F16,), always=True),
    Case("softmax", [(4096, 16382)], (F16,)),
    Case("softmax", [(4096, 16383)], (F16, F32)),
    Case("softmax", [(100, 16383)], (F16,)),
    Case("softmax", [(128, 4096)], (F16,)),
    Case("softmax", [(4096, 16384)], (F16, F32), {"dtype": F64}),
    Case("softmax", [(4096, 24576)], (F16,)),
    Case("softmax", [(4096, 26624)], (F16,), targets=("sm_90",)),
    Case("softmax", [(4096, 32768)], (F16, F32)),
    Case("softmax", [(4096, 49152)], (F16,)),
    Case("softmax", [(4096, 131072)], (F64, F16), always=True),
    Case("softmax", [(4096, 155648)], (F16,)),
    Case("softmax", [(4, 155648)], (F16, F64), always=True),
    Case("softmax", [(8, 100_000)], (F16, F64), {"dim": 0}, always=True),
    Case("softmax", [(1024, 8192)], (F16, F32, F64), {"dim": 0}),
    Case("softmax", [(100_000, 8)], (F16, F64), {"dim": 0}, always=("sm_90",)),
    Case("softmax", [(64, 151936)], (F16,), targets=("sm_90",), always=True),
    Case("softmax", [(1024, 262144)], (F16,)),
    Case("softmax", [(64, 256, 512)], (F16, F64), {"dim": 1}),
    Case("log_softmax", [(4096, 8192)], (F16,), always=("sm_90",)),
    Case("log_softmax", [(4096, 131072)], (F32,)),
    Case("dropout", [VECTOR], FLOATS, {"p": 0.5, "seed": 1}, always=True),
    Case("dropout", [T(1024, 1024)], (F16,), {"p": 0.5}, always=True),
    Case(
        "layer_norm", [(4096, 768)], FLOATS, {"normalized_shape": [768], "weight": (768,), "bias": (768,)}, always=True
    ),
    Case("layer_norm", [(4096, 1024)], (F16,), {"normalized_shape": [1024], "weight": (1024,)}, always=True),
    Case("layer_norm", [(4096, 160)], (F16, F32), {"normalized_shape": [160], "weight": (160,), "bias": (160,)}),
    Case("layer_norm", [(4096, 777)], (F16, F32), {"normalized_shape": [777], "weight": (777,), "bias": (777,)}),
    Case("layer_norm", [(4096, 1536)], FLOATS, {"normalized_shape": [1536], "weight": (1536,), "bias": (1536,)}),
    Case("layer_norm", [(4096, 1537)], (F16, F32), {"normalized_shape": [1537], "weight": (1537,), "bias": (1537,)}),
    Case("layer_norm", [(4096, 2501)], (F16,), {"normalized_shape": [2501], "weight": (2501,), "bias": (2501,)}),
    Case("layer_norm", [(64, 4001)], (F16, F32), {"normalized_shape": [4001], "weight": (4001,), "bias": (4001,)}),
    Case("layer_norm", [(4096, 3072)], (F16, F32), {"normalized_shape": [3072], "weight": (3072,), "bias": (3072,)}),
    Case("layer_norm", [(64, 4096)], (F16, F32), {"normalized_shape": [4096], "weight": (4096,), "bias": (4096,)}),
    Case("layer_norm", [(4096, 6144)], (F16,), {"normalized_shape": [6144], "weight": (6144,), "bias": (6144,)}),
    Case("layer_norm", [(64, 8192)], (F16, F32), {"normalized_shape": [8192], "weight": (8192,), "bias": (8192,)}),
    Case("layer_norm", [(64, 24576)], (F16, F32), {"normalized_shape": [24576], "weight": (24576,), "bias": (24576,)}),
    Case("layer_norm", [(4096, 40960)], (F16,), {"normalized_shape": [40960], "weight": (40960,), "bias": (40960,)}),
    Case("layer_norm", [(4096, 5000)], (F16,), {"normalized_shape": [5000], "weight": (5000,), "bias": (5000,)}),
    Case("layer_norm", [(4096, 5120)], (F16, F32), {"normalized_shape": [5120], "weight": (5120,)}, targets=SMALL),
    Case(
        "layer_norm",
        [(4096, 8001)],
        (F16,),
        {"normalized_shape": [8001], "weight": (8001,), "bias": (8001,)},
        always=True,
    ),
    Case("layer_norm", [(4096, 8192)], (F16, F64), {"normalized_shape": [8192], "weight": (8192,), "bias": (8192,)}),
    Case(
        "layer_norm",
        [(4096, 8192)],
        (F32,),
        {"normalized_shape": [8192], "weight": (8192,)},
        targets=SMALL,
        always=True,
    ),
    Case(
        "layer_norm",
        [(4096, 9216)],
        HALF,
        {"normalized_shape": [9216], "weight": (9216,)},
        targets=SMALL,
        always=("sm_90",),
    ),
    Case(
        "layer_norm",
        [(4096, 12288)],
        HALF,
        {"normalized_shape": [12288], "weight": (12288,), "bias": (12288,)},
        always=("sm_90",),
    ),
    Case("layer_norm", [(4096, 13312)], (F16,), {"normalized_shape": [13312], "weight": (13312,), "bias": (13312,)}),
    Case("layer_norm", [(200, 16384)], (F16,), {"normalized_shape": [16384], "weight": (16384,), "bias": (16384,)}),
    Case("layer_norm", [(64, 16384)], (F32,), {"normalized_shape": [16384], "weight": (16384,), "bias": (16384,)}),
    Case("layer_norm", [(4096, 15872)], (F16,), {"normalized_shape": [15872], "weight": (15872,), "bias": (15872,)}),
    Case("layer_norm", [(4096, 10008)], (F16,), {"normalized_shape": [10008], "weight": (10008,)}, targets=("sm_90",)),
    Case("layer_norm", [(4096, 15873)], (F16,), {"normalized_shape": [15873], "weight": (15873,), "bias": (15873,)}),
    Case(
        "layer_norm",
        [(4096, 15873)],
        (F32,),
        {"normalized_shape": [15873], "weight": (15873,)},
        targets=("sm_90",),
        always=True,
    ),
    Case("layer_norm", [(4096, 24576)], (F16, F32), {"normalized_shape": [24576], "weight": (24576,)}),
    Case("layer_norm", [(4096, 12304)], (F16, F32), {"normalized_shape": [12304]}, targets=("sm_90",)),
    Case("layer_norm", [(4096, 49152)], (F16, F32), {"normalized_shape": [49152], "weight": (49152,)}),
    Case("layer_norm", [(4096, 40999)], (F16,), {"normalized_shape": [40999], "weight": (40999,)}, targets=("sm_90",)),
    Case("layer_norm", [(1024, 65536)], (F64, F16), {"normalized_shape": [65536]}, always=True),
    Case("layer_norm", [(300, 131088)], (F32,), {"normalized_shape": [131088]}, targets=("sm_90",)),
    Case("layer_norm", [(4, 1048576)], (F16,), {"normalized_shape": [1048576]}, targets=("sm_90",)),
    Case("rms_norm", [(4096, 4096)], (F16, F32), {"normalized_shape": [4096], "weight": (4096,)}),
    Case("rms_norm", [(4096, 16384)], (BF16,), {"normalized_shape": [16384], "weight": (16384,)}),
    Case("matmul", [MATRIX, MATRIX], HALF, matrix=True, targets=SMALL, always=BUT_HOPPER),
    Case("matmul", [MATRIX, T(1024, 1024)], (F16,), matrix=True),
    Case("matmul", [MATRIX, MATRIX], (F8,), matrix=True, targets=("sm_90", "sm_100")),
    # Few columns of float8, as they lie and transposed
    *(
        Case("matmul", [(m, 16), shape], (F8,), targets=("sm_90",))
        for m, n in ((64, 64), (1, 256), (8, 256), (256, 1))
        for shape in ((16, n), T(16, n))
    ),
    # Nothing to sum, as for the gradient of a weight from an empty batch; the last rows are no multiple of 128 bytes
    Case("matmul", [T(128, 0), (0, 1000)], (F16,), targets=("sm_90",)),
    Case("matmul", [T(3, 128, 0), (3, 0, 1000)], (F16,), targets=("sm_90",)),
    Case("matmul", [MATRIX, MATRIX], (F32, F64)),
    Case("matmul", [MATRIX, MATRIX], (F16,), {"bias": (1024,), "activation": "gelu"}, matrix=True),
    Case("matmul", [(4096, 4096), T(4096, 4096)], (F32,), matrix=True, targets=("sm_90",), always=True),
    Case("matmul", [T(2048, 2048), (2048, 2048)], (F32,), {"bias": (2048,), "activation": "gelu"}, True, ("sm_90",)),
    Case("matmul", [(2048, 1023), (1023, 2048)], (F32,), matrix=True, targets=("sm_90",)),
    Case("matmul", [(1024, 1024), (1024, 1023)], (F32,), {"bias": (1023,), "activation": "silu"}, True, ("sm_90",)),
    Case("matmul", [(512, 4096), (4096, 512)], (F32,), matrix=True, targets=("sm_90",)),
    Case("matmul", [(8, 4096), (4096, 1000)], (F32,), matrix=True, targets=("sm_90",), always=True),
    Case("matmul", [(999, 1001), (1001, 1003)], (F32,), matrix=True, targets=("sm_90",)),
    Case("matmul", [(300, 1500), T(1500, 300)], (F32,), matrix=True, targets=("sm_90",)),
    Case("matmul", [(64, 500, 500), (64, 500, 512)], (F32,), matrix=True, targets=("sm_90",)),
    Case("matmul", [(300, 66, 66), (300, 66, 66)], (F32,), matrix=True, targets=("sm_90",)),
    *(
        Case("matmul", pair, (F32,), {"precision": "high"}, True, ("sm_90",), always=always)
        for pair, always in (
            ([(4096, 4096), T(4096, 4096)], False),
            ([(2048, 1000), (1000, 1000)], False),
            ([(4096, 4096), T(4096, 1152)], False),
            ([(1024, 1024), T(1024, 1024)], True),
            ([(300, 1500), (1500, 300)], False),
            ([(300, 1500), T(1500, 300)], False),
            ([(8, 4096), (4096, 1000)], False),
            ([(1000, 100, 100), T(1000, 100, 100)], False),
        )
    ),
    Case("matmul", [(2048, 2048), T(2048, 2048)], (F8,), matrix=True, targets=("sm_90",)),
    Case("matmul", [(2048, 2048)] * 2, (F16,), {"bias": (2048,), "activation": "gelu"}, True, ("sm_90",), always=True),
    # Tiles of 256 and of 128 columns that programs share.
    Case("matmul", [(2112, 4096), (4096, 2496)], (BF16,), {"bias": (2496,), "activation": "gelu"}, True, ("sm_90",)),
    Case("matmul", [(1792, 8192), T(8192, 2560)], (F16, F8), matrix=True, targets=("sm_90",)),
    # Tiles of 192 and of 96 columns, for two consumers and for three.
    Case("matmul", [(4096, 4096), (4096, 1152)], (F16,), {"bias": (1152,), "activation": "gelu"}, True, ("sm_90",)),
    Case("matmul", [(4096, 4096), T(4096, 1536)], (BF16,), matrix=True, targets=("sm_90",)),
    Case("matmul", [(96, 14544), T(14544, 8768)], (F16,), matrix=True, targets=("sm_90",)),
    Case("matmul", [(1536, 1536), T(1536, 1536)], (F16,), {"bias": (1536,), "activation": "gelu"}, True, ("sm_90",)),
    Case("matmul", [T(1152, 4608), (4608, 1152)], (F16,), matrix=True, targets=("sm_90",)),
    Case("matmul", [(4095, 4097), (4097, 4099)], (BF16,), matrix=True),
    Case("matmul", [(4096, 4096), (4096,)], (F16, F32, F64), always=True),
    Case("matmul", [(4097,), (4097, 999)], (F16,)),
    Case("matmul", [(8, 128, 64), (8, 64, 128)], (F16,), matrix=True),
    Case("matmul", [(900, 50, 66), (900, 66, 50)], (F16,), matrix=True),
    Case("matmul", [(1000, 100, 100), T(1000, 100, 100)], (F16,), matrix=True),
    Case("matmul", [(500, 196, 196), (500, 196, 64)], (BF16,), matrix=True),
    Case("matmul", [(8, 56, 200), (8, 200, 56)], HALF, matrix=True),
    Case("matmul", [(8, 2047, 2047), T(8, 2047, 2047)], (F16,), matrix=True),
    Case("matmul", [(16, 8192), (8192, 8192)], HALF, matrix=True, targets=("sm_90",)),
    Case("matmul", [(16, 4096), T(4096, 14336)], (F16, F8), matrix=True, targets=("sm_90",)),
    Case("matmul", [(256, 8192), (8192, 256)], (F16,), {"bias": (256,), "activation": "gelu"}, True, ("sm_90",)),
    Case("matmul", [(512, 16384), T(16384, 512)], (F16, F8), matrix=True, targets=("sm_90",), always=True),
    Case("attention", [(4, 8, 2048, 64)] * 3, (F16,), matrix=True, targets=SMALL, always=BUT_HOPPER),
    Case("attention", [(4, 8, 2048, 128)] * 3, (BF16,), {"is_causal": True}, matrix=True, targets=SMALL),
    Case("attention", [(2, 4, 1000, 80)] * 3, (F16,), {"window": 256}, True, ("sm_90", "gfx942")),
    Case("attention", [(2, 4, 1000, 128)] * 3, (F16,), {"window": 256}, matrix=True, targets=("sm_90",)),
    Case("attention", [(2, 4, 1000, 192)] * 2 + [(2, 4, 1000, 128)], (F16,), {"is_causal": True}, True, ("sm_90",)),
    Case("attention", [(2, 4, 1000, 256)] * 3, (F16,), {"window": 256}, matrix=True, targets=("sm_90",)),
    Case(
        "attention",
        [(2, 4, 1000, 128), (2, 2, 1000, 128), (2, 2, 1000, 128)],
        (F16,),
        {"is_causal": True, "enable_gqa": True},
        matrix=True,
        targets=("sm_90",),
        always=True,
    ),
    Case("attention", [(2, 4, 1024, 64)] * 3, (F32,), targets=("sm_86", "sm_90", "sm_120"), always=True),
    Case("attention", [(2, 4, 1024, 128)] * 3, (F32,), {"is_causal": True}, matrix=True, targets=("sm_90",)),
    Case(
        "attention",
        [(2, 4, 1024, 192), (2, 4, 1024, 192), (2, 4, 1024, 128)],
        (F32,),
        {"is_causal": True},
        matrix=True,
        targets=("sm_90",),
    ),
    Case("attention", [(2, 4, 1024, 256)] * 3, (F32,), {"window": 256}, matrix=True, targets=("sm_90",)),
    Case("attention", [(4, 8, 1, 128), (4, 8, 8192, 128), (4, 8, 8192, 128)], (F16,)),
    Case(
        "attention",
        [(4, 8, 1, 64), (4, 8, 8192, 64), (4, 8, 8192, 64)],
        (F32,),
        targets=("sm_90", "gfx942"),
        always=("sm_90",),
    ),
    Case(
        "attention",
        [(1, 2, 16, 128), (1, 2, 8192, 128), (1, 2, 8192, 128)],
        (F32,),
        {"window": 256},
        targets=("sm_90",),
    ),
    # Many short sequences: two programs in a multiprocessor of Hopper, and the backward of a head in one.
    Case("attention", [(512, 8, 49, 64)] * 3, (F16,), targets=SMALL, always=True),
    Case("attention", [(64, 8, 64, 128)] * 3, (F16,), targets=SMALL, always=("sm_90",)),
    Case("attention", [(64, 8, 128, 32)] * 3, (F16,), targets=SMALL),
    # Somewhat longer ones, of which a program of Hopper has all keys of a head.
    Case("attention", [(64, 8, 100, 64)] * 3, (F16,), matrix=True, targets=("sm_90",), always=True),
    Case("attention", [(64, 8, 200, 64)] * 3, (BF16,), {"is_causal": True}, matrix=True, targets=("sm_90",)),
    Case("attention", [(64, 8, 200, 48)] * 3, (F16,), {"window": 60}, matrix=True, targets=("sm_90",)),
    # Programs that share the keys of a query tile, and in the backward pass the queries of a key tile.
    Case(
        "attention",
        [(1, 8, 512, 128), (1, 2, 8192, 128), (1, 2, 8192, 128)],
        (F16,),
        {"is_causal": True, "causal_alignment": "bottom-right", "enable_gqa": True},
        matrix=True,
        targets=("sm_90",),
    ),
    Case(
        "attention", [(1, 4, 16, 256), (1, 4, 8192, 256), (1, 4, 8192, 256)], (BF16,), {"is_causal": True}, always=True
    ),
]

IS_3_9 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)

# (a part of the case's name, target) -> how many bytes a kernel may spill with any Triton from 3.6 to 3.9, and why.
EXPECTED_SPILLS: dict[tuple[str, str], tuple[int, str]] = {
    **{
        ("softmax 100000x8 dim=0 float64", target): (12, "a value of 8 bytes and one of 4, with Triton 3.6 alone")
        for target in ("sm_80", "sm_90", "sm_100")
    },
    ("softmax 1024x8192 dim=0 float64", "sm_80"): (4, "half of a number, with Triton 3.9 alone"),
    ("softmax 4096x3905", "sm_100"): (100, "ptxas sets itself a limit of 80 registers, with Triton 3.9 alone"),
    ("softmax 4096x5001", "sm_90"): (24, "chunks of a whole row, with Triton 3.9 alone"),
    ("softmax 4096x5001", "sm_100"): (100, "the same as with 3905"),
    ("softmax 4096x16382 float16", "sm_80"): (100, "a row of both inputs; more warps are slower"),
    ("softmax 4096x16382 float16", "sm_90"): (80, "the same"),
    ("softmax 4096x16382 float16", "sm_100"): (36, "the same, with Triton 3.6 alone"),
    ("softmax 100x16383 float16", "sm_80"): (40, "the same"),
    ("softmax 100x16383 float16", "sm_90"): (64, "the same"),
    ("softmax 100x16383 float16", "sm_100"): (80, "the same"),
    ("softmax 4096x32768 float16", "sm_80"): (84, "the same"),
    ("softmax 4096x32768 float16", "sm_90"): (76, "the same"),
    ("softmax 4096x32768 float16", "sm_100"): (100, "the same, with Triton 3.6 alone"),
    ("layer_norm 4096x2501", "sm_90"): (4, "a value, with Triton 3.8 alone"),
    ("layer_norm 4096x2501", "sm_100"): (56, "dw and db of five blocks, with Triton 3.9 alone"),
    ("layer_norm 4096x5120", "sm_86"): (8, "five blocks of a row, with Triton 3.6 alone"),
    ("layer_norm 4096x8001", "sm_80"): (4, "a value or some, for more warps at a time"),
    ("layer_norm 4096x8001", "sm_90"): (12, "the same"),
    ("layer_norm 4096x8001", "sm_100"): (12, "the same"),
    ("layer_norm 4096x12288", "sm_90"): (48, "sums of three chunks, with Triton 3.9 alone"),
    ("layer_norm 4096x13312", "sm_90"): (12, "a value or some of three chunks"),
    ("layer_norm 4096x15872", "sm_90"): (20, "sums of three chunks, with Triton 3.9 alone"),
    ("layer_norm 4096x15873", "sm_90"): (40, "five values of a part, forward; ten with Triton 3.9"),
    ("layer_norm 4096x24576", "sm_90"): (24, "the same, backward, with Triton 3.9 alone"),
    **{
        (f"layer_norm {shape}", "sm_90"): (20, "the same, with Triton 3.9 alone")
        for shape in ("64x24576", "200x16384", "4096x40960")
    },
    ("layer_norm 4096x40999", "sm_90"): (58, "the same, and sums of four chunks"),
    ("layer_norm 4096x49152", "sm_90"): (24, "the same as with 24576"),
    ("layer_norm 4096x49152", "sm_100"): (8, "two values of 32 warps, with Triton 3.9 alone"),
    ("rms_norm 4096x16384", "sm_90"): (20, "five values, with Triton 3.9 alone"),
    **{
        (f"matmul {shapes}", "sm_90"): (8, "two values outside of the loop over K, with Triton 3.9 alone")
        for shapes in (
            *("2048x2048", "2112x4096", "1792x8192", "16x8192", "512x16384", "96x14544"),
            *("4096x4096 4096x1152", "4096x4096 T(4096x1536)"),
        )
    },
    ("matmul 4095x4097 4097x4099 bfloat16", "sm_90"): (8, "the same, with every Triton"),
    ("matmul 4096x4096 T(4096x1152)", "sm_90"): (36, "left operands in registers, next to 192 sums; Triton 3.9 alone"),
    **{
        (f"matmul {shapes}", "sm_90"): (12, "the thread's number and a value or two; 8 before Triton 3.9")
        for shapes in ("4096x4096 T(4096x4096) float32", "T(2048x2048) 2048x2048", "512x4096 4096x512")
    },
    ("matmul 2048x1023 1023x2048", "sm_90"): (24, "the same, where the transposed product leaves without TMA"),
    ("matmul 500x196x196", "sm_90"): (8, "the same, with Triton 3.7 alone, where rows leave without TMA"),
    ("matmul 8x2047x2047", "sm_90"): (8, "the same"),
    ("matmul 64x500x500", "sm_90"): (
        300,
        "parts of a float32 tile of 128 × 64, some 80 since Triton 3.7; tiles of 64 × 64 are slower all the same",
    ),
    ("matmul 1024x1024 1024x1024 float64", "sm_100"): (12, "a value of 8 bytes and one of 4"),
    ("matmul 4096x4096 4096 float64", "sm_90"): (8, "a value of 8 bytes, with Triton 3.9 alone"),
    ("matmul 4096x4096 4096 float64", "sm_100"): (8, "the same"),
    ("matmul 1024x1024 1024x1024", "sm_120"): (12, "three values: ptxas sets itself a limit of 80 registers"),
    ("matmul 16x4096 T(4096x14336)", "sm_90"): (32, "a few of the addresses of four stages"),
    ("attention 4x8x2048x128", "sm_90"): (112, "dk and dv fill the consumers' registers; what a loop keeps makes room"),
    ("attention 4x8x2048x64", "sm_90"): (48, "the same with fewer columns, with Triton 3.9 alone"),
    ("attention 4x8x1x128", "sm_90"): (32, "the same kernel"),
    ("attention 1x4x16x256", "sm_100"): (32, "a few values of the backward pass, with Triton 3.6 alone"),
    ("attention 2x4x1000x128 2x4x1000x128", "sm_90"): (320, "the same kernel, and masks at both ends of a walk"),
    ("attention 2x4x1000x80", "sm_90"): (188, "the same with fewer columns; 24 before Triton 3.9"),
    ("attention 2x4x1000x128 2x2x1000x128", "sm_90"): (
        360,
        "the same kernel, a loop over the heads of a group and a share of the queries; some 180 before Triton 3.9",
    ),
    ("attention 1x8x512x128", "sm_90"): (360, "the same"),
    ("attention 2x4x1000x192", "sm_90"): (16, "addresses of the forward pass, where a causal walk may be ragged"),
    ("attention 2x4x1000x256", "sm_90"): (112, "forward and dq, masks at both ends; 60 before Triton 3.8"),
    ("attention 1x4x16x256", "sm_90"): (20, "dq, one mask, a ragged end; with Triton 3.8 and 3.9"),
    ("attention 4x8x1x64", "sm_90"): (
        608,
        "the parts of a float32 tile, some 370 bytes before Triton 3.9; larger tiles are faster all the same",
    ),
    **{
        (f"attention {shape}", target): (size, "the backward of a head: with more warps it is slower all the same")
        for shape, sizes in {
            "512x8x49x64": {"sm_80": 160, "sm_86": 88, "sm_90": 20, "sm_120": 168},
            "64x8x64x128": {"sm_80": 556, "sm_86": 544, "sm_90": 452, "sm_100": 112, "sm_120": 324},
            "64x8x128x32": {"sm_80": 152, "sm_86": 176, "sm_120": 80, "gfx942": 344},
        }.items()
        for target, size in sizes.items()
    },
    **{
        (f"attention {shape}", "sm_90"): (56, "queries in registers of the forward pass, with Triton 3.9 alone")
        for shape in ("512x8x49", "64x8x100x64")
    },
    ("attention 64x8x200x48", "sm_90"): (76, "as below; 48 before Triton 3.8"),
    ("attention 64x8x200x64", "sm_90"): (64, "addresses of three loops over the queries, since Triton 3.8"),
    ("attention 4x8x2048x64", "sm_80"): (12, "three values of the forward pass, with Triton 3.9 alone"),
    ("attention 2x4x1024x64", "sm_86"): (12, "ptxas sets itself a limit of 80 registers"),
    ("attention 1x2x16x128", "sm_90"): (1520, "the same, with rows twice as long, and the loops of a window"),
    ("attention 2x4x1024x64", "sm_90"): (1152 if IS_3_9 else 32, "sums of dk and dv; Triton 3.9 copies left operands"),
    ("attention 2x4x1024x128", "sm_90"): (2560 if IS_3_9 else 976, "the same of twice as many columns"),
    ("attention 2x4x1024x192", "sm_90"): (3264 if IS_3_9 else 1832, "dk of 192 columns beside dv of 128"),
    ("attention 2x4x1024x256", "sm_90"): (3072 if IS_3_9 else 688, "sums of 256 columns, most of all dk"),
    ("matmul 8x4096 4096x1000 float32", "sm_90"): (64, "the three parts of tiles with 64 numbers along K"),
}

CALLS = {name: (call, case) for case in CASES for name, call in case.calls()}


def _batch(name: str, target: str) -> str:
    """What one process compiles: all cases of a target, but for Hopper's largest kernels."""
    function = name.split()[0]
    return f"{target} {function}" if target == "sm_90" and function in ("attention", "matmul") else target


# With these every kernel is compiled for every GPU that has it: `test_every_run_compiles_each_kernel`.
ALWAYS = {
    (next(case.calls())[0], target)
    for case in CASES
    for target in case.targets
    if target in codegen.TARGETS and target in (case.targets if case.always is True else case.always or ())
}


@pytest.fixture(scope="session")
def compiled(request):
    """For a batch, each selected case's kernels or error."""

    @functools.cache
    def for_batch(batch: str) -> dict[str, list[codegen.Kernel] | str]:
        params = [item.callspec.params for item in request.session.items if "compiled" in item.fixturenames]
        params = [p for p in params if _batch(**p) == batch]
        calls = [CALLS[p["name"]][0] for p in params]
        outcomes = codegen._compile(codegen._pack(calls, (params[0]["target"],), keep_asm=False))
        return {p["name"]: outcome for p, (outcome,) in zip(params, outcomes, strict=True)}

    return for_batch


def check(kernels: list[codegen.Kernel] | str, target: str, allowed_spills: int) -> None:
    assert isinstance(kernels, list), kernels
    for kernel in kernels:
        assert kernel.registers is not None, "ptxas is missing"
        assert kernel.spills <= allowed_spills, f"{kernel.name} spills {kernel.spills} bytes per thread"
        assert kernel.shared <= SHARED_LIMIT[target], f"{kernel.name} asks for {kernel.shared} bytes of shared memory"
        assert not any("serialized" in warning for warning in kernel.warnings), f"{kernel.name}: {kernel.warnings}"


# Processes of pytest-xdist share nothing: all cases of one batch belong to one of them.
@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(
            n,
            t,
            marks=[
                pytest.mark.xdist_group(_batch(n, t)),
                *[pytest.mark.slow] * ((n, t) not in ALWAYS),
            ],
        )
        for n, (_, case) in CALLS.items()
        for t in case.targets
    ],
)
def test_compiles_within_limits(compiled, name, target):
    allowed = max((size for (part, t), (size, _) in EXPECTED_SPILLS.items() if part in name and t == target), default=0)
    kernels = compiled(_batch(name, target))[name]
    check(kernels, target, allowed)
    _, case = CALLS[name]
    if case.matrix:
        assert any(kernel.matrix for kernel in kernels)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", SMALL)
def test_every_run_compiles_each_kernel(target):
    def kernels(names):
        calls = [CALLS[name][0] for name in names]
        outcomes = codegen._compile(codegen._pack(calls, (target,), keep_asm=False))
        return {kernel.name for (kernels,) in outcomes for kernel in kernels}

    names = [name for name, (_, case) in CALLS.items() if target in case.targets]
    # A run has none of the last two GPUs, and compiles their kernels for others.
    always = {name for name, t in ALWAYS if t == target or target not in codegen.TARGETS}
    assert kernels(names) == kernels(name for name in names if name in always)


def test_expected_spills_name_cases():
    for part, target in EXPECTED_SPILLS:
        assert target in SHARED_LIMIT and any(part in name for name in CALLS), part


def compiled_for_sm_80(inputs):
    """(operation, tensor, kernel) of each kernel for these and for their gradients, less the one that sums columns."""
    calls = []
    for op, x in inputs:
        rest = {"add": [x], "layer_norm": [x.shape[-1], *[_tensor(x.shape[1:], x.dtype)] * 2]}.get(op, [])
        calls.append((getattr(triton_gallery, op), [x, *rest], {}, True))
    for (op, x), (kernels,) in zip(inputs, codegen._compile(codegen._pack(calls, ("sm_80",))), strict=True):
        check(kernels, "sm_80", 4)
        yield from ((op, x, kernel) for kernel in kernels if kernel.name != "_layer_norm_bwd_dwdb_kernel")


# Not for Hopper, which has kernels of its own for long rows.
@pytest.mark.parametrize(
    ("halves", "floats"),
    [((1000, 10_008), (5004,)), pytest.param((1032, 60_008), (1004,), marks=pytest.mark.slow)],
    ids=str,
)
def test_rows_of_multiples_of_16_bytes_are_moved_16_bytes_at_a_time(halves, floats):
    """Triton itself asks of a number whether it is a multiple of 16, not whether it is one of 8."""
    rows = [_tensor((4096, n), F16) for n in halves] + [_tensor((4096, n), F32) for n in floats]
    between = _tensor((4096 * 1000 + 1,), F16)[1:].view(4096, 1000)
    inputs = [(op, x) for op in ("softmax", "layer_norm") for x in rows]
    for _, x, kernel in compiled_for_sm_80([*inputs, ("softmax", between)]):
        if x is between and "fwd" in kernel.name:
            assert kernel.load_bits == 16, kernel
        else:
            assert kernel.load_bits == 128, kernel
            assert not re.search(r"(ld|st)\.global\S*\.[bu]16\b", kernel.asm["ptx"]), kernel


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(261, 8001), (781, 2501)], ids=str)
def test_rows_and_vectors_of_any_length_are_moved_16_bytes_at_a_time(lengths):
    inputs = [("layer_norm", _tensor((16384, n), F16)) for n in lengths]
    inputs += [("softmax", _tensor((16384, n), F16)) for n in (781, 2501)]
    inputs += [("layer_norm", _tensor((4096, 779), F32)), ("add", _tensor((2**20 + 1,), F16))]
    for _, x, kernel in compiled_for_sm_80(inputs):
        if "bwd" in kernel.name or x.dtype != F32:
            assert kernel.load_bits == kernel.store_bits == 128, kernel


def test_products_of_even_sizes_are_read_as_wide_as_those_allow():
    bits = {102: 32, 100: 64, 104: 128}
    pairs = [[_tensor((8, n, n), F16) for _ in "ab"] for n in bits]
    pairs = [pair for a, b in pairs for pair in ((a, b), (a, b.mT), (a.mT, b))]
    calls = [(triton_gallery.matmul, pair, {}, False) for pair in pairs]
    for (a, _), (kernels,) in zip(pairs, codegen._compile(codegen._pack(calls, ("sm_80",))), strict=True):
        assert [kernel.load_bits for kernel in kernels] == [bits[len(a[0])]]


def attention_that_repeats(*args, **kwargs):
    torch.use_deterministic_algorithms(True)
    return triton_gallery.attention(*args, **kwargs)


MASKS = ({}, {"is_causal": True}, {"window": 256})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernels_of_the_deterministic_mode_compile_within_limits(dtype):
    cases = [(d, mask) for d in (64, 128) for mask in MASKS]
    calls = [(attention_that_repeats, [_tensor((2, 4, 1000, d), dtype)] * 3, mask, True) for d, mask in cases]
    # dk and dv fill the consumers' registers, as above, and masks want some. With Triton 3.9 a value or two is spilled
    # elsewhere.
    allowed = {(128, "is_causal"): 128, (128, "window"): 192}
    for (_, args, kwargs, _), (kernels,) in zip(
        calls, codegen._compile(codegen._pack(calls, ("sm_90",), keep_asm=False)), strict=True
    ):
        check(kernels, "sm_90", allowed.get((args[0].shape[-1], *kwargs), 8))
        assert {"_attention_bwd_hopper_kernel", "_attention_dq_hopper_kernel"} <= {k.name for k in kernels}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4, 640, 64), (64, 8, 128, 64)], ids=str)
@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"window": 100}], ids=str)
def test_operands_kept_in_registers_stay(kwargs, shape):
    """K and V of a program are, for all steps; ptxas was seen to put another operand into their registers."""
    call = (triton_gallery.attention, [_tensor(shape, F16)] * 3, kwargs, True)
    ((kernels,),) = codegen._compile(codegen._pack([call], ("sm_90",)))
    names = ("_attention_bwd_hopper_kernel", "_attention_bwd_heads_kernel")
    (kernel,) = [kernel for kernel in kernels if kernel.name in names]
    lines = re.findall(r"/\*[0-9a-f]+\*/\s+(.*?);", kernel.asm["sass"])
    # S and dP are the products with an operand in registers and another that is not transposed.
    operands = [re.match(r"HGMMA\S+ R\d+, R(\d+), gdesc\[UR\d+\],", line) for line in lines]
    kept = {int(match[1]) + i for match in operands if match for i in range(4)}
    assert len(kept) == 32
    writes = [match for line in lines if (match := re.match(r"(?:@!?\w+ )?(\S+) R(\d+)", line))]
    for register in kept:
        opcodes = {match[1] for match in writes if int(match[2]) == register and not match[1].startswith("ST")}
        # Loaded once, and never written again; or, by Triton 3.9, copied there from another place in every step.
        is_copied = IS_3_9 and any("MOV" in opcode for opcode in opcodes)
        assert is_copied or all(opcode.startswith("LDSM") for opcode in opcodes)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4, 640), (64, 8, 64)], ids=str)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_all_widths_of_rows_have_room(is_causal, shape):
    widths = (64, 80, 96, 128, 160, 192, 256)
    rows = [[_tensor((*shape, d), F16) for d in (a, a, b)] for a in widths for b in widths]
    calls = [(triton_gallery.attention, tensors, {"is_causal": is_causal}, False) for tensors in rows]
    for _, tensors, (kernels,) in zip(
        calls, rows, codegen._compile(codegen._pack(calls, ("sm_90",), keep_asm=False)), strict=True
    ):
        (kernel,) = kernels
        name = f"{tensors[0].shape[-1]} and {tensors[2].shape[-1]} columns"
        assert kernel.name == "_attention_fwd_hopper_kernel"
        assert kernel.shared <= SHARED_LIMIT["sm_90"], name
        # Where one consumer leaves room for another program or two, they fit, each with a KiB that the GPU keeps.
        if kernel.num_warps == 8 and max(x.shape[-1] for x in tensors) <= 192:
            n_programs = 3 if tensors[0].shape[-1] == tensors[2].shape[-1] == 64 else 2
            assert n_programs * (kernel.shared + 1024) <= 228 * 1024, name


def test_attention_on_hopper_masks_without_choices_and_rounds_in_pairs():
    """Many choices want many predicates; a pair that is rounded number by number is taken apart and joined again."""
    masks = ({}, {"is_causal": True}, {"window": 256})
    # Of lengths that fill their tiles. Rows of 256 have gradients by dQ and dK/dV.
    calls = [(triton_gallery.attention, [_tensor((2, 4, 1024, d), F16)] * 3, m, True) for d in (64, 256) for m in masks]
    most = {"fwd": 24, "dq": 0, "dkdv": 0}  # in the forward kernel there are some of the rows' sums
    choices = {name: [] for name in (*most, "bwd")}
    for (*_, mask, _), (kernels,) in zip(calls, codegen._compile(codegen._pack(calls, ("sm_90",))), strict=True):
        for kernel in kernels:
            name = kernel.name.removeprefix("_attention_").removesuffix("_hopper_kernel")
            if name in choices:
                choices[name].append(len(re.findall(r"selp\.f32", kernel.asm["ptx"])))
            # Under a window LLVM still rounds one by one, behind the loops, but ptxas joins those in pairs.
            if name == "fwd" and "window" not in mask:
                assert not re.search(r"cvt\.rn\.f16\.f32", kernel.asm["ptx"]), mask
    assert {name: len(found) for name, found in choices.items()} == {"fwd": 6, "dq": 3, "dkdv": 3, "bwd": 3}
    assert all(max(choices[name]) <= n for name, n in most.items()), choices
    assert max(choices["bwd"]) > 64, choices  # this one does choose


WIDTHS = (64, 128, 192, 256)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dims", [(a, b) for a in WIDTHS for b in WIDTHS] + [(32, 32), (96, 96)], ids=str)
def test_machine_code_reads_no_register_that_nothing_wrote(head_dims, is_causal):
    """`wgmma` finds a tile by two words. The upper one is a constant, or a sum of it, a carry and zero."""
    q, v = (_tensor((2, 4, 1024, d), F32) for d in head_dims)
    call = (triton_gallery.attention, [q, q, v], {"is_causal": is_causal}, True)
    ((kernels,),) = codegen._compile(codegen._pack([call], ("sm_90",)))
    sums = 0
    for kernel in kernels:
        written = {"RZ": "RZ", "URZ": "URZ"}
        for line in re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ +)?(.*?) ;", kernel.asm["sass"].replace(".reuse", "")):
            if match := re.match(r"U?IADD3\.X \w+, (\w+), (-?0x[0-9a-f]+), U?RZ", line):
                constant = int(match[2], 16) % 2**32
                # How the tile is swizzled, and how far its groups of rows are apart
                if constant >> 30 and constant % 2**30 < 2**14:
                    sums += 1
                    assert re.search(r"\b[SU]?RZ$", written[match[1]]), f"{kernel.name}: {written[match[1]]}; {line}"
            if match := re.match(r"(\S+) (U?R)(\d+)", line):
                for i in range(2 if match[1] == "CS2R" else 1):
                    written[f"{match[2]}{int(match[3]) + i}"] = line
    assert sums
