"""What tests of kernels share: the device, tests with made-up inputs, and how close to torch is close enough."""

import math
import re

import pytest
import torch

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

# A test with inputs that hypothesis makes up: a few, always the same; in `make fuzz` many, and new ones each time.
FEW = 8
_MANY = [pytest.mark.slow, pytest.mark.timeout(3600)]
FUZZ = pytest.mark.parametrize(
    "fuzz", [FEW, *(pytest.param(50, marks=_MANY, id=f"50-{i}") for i in range(16))], indirect=True
)


def in_turn(some, others):
    """Pairs of values for two parameters, in which each meets every other one; `make fuzz` takes the rest, too."""
    return [
        pytest.param(a, b, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, a in enumerate(some)
        for j, b in enumerate(others)
    ]


# Rows that can be read 16 bytes at a time though 16 does not divide their lengths, and rows that narrowly cannot.
LAYOUTS = pytest.mark.parametrize(
    ("n_cols", "stride", "offset"),
    [
        (1000, 1000, 0),
        (1032, 1040, 8),
        (1008, 1016, 0),
        (1000, 1004, 0),
        (1000, 1007, 0),
        (1000, 1000, 1),
        (5000, 5000, 0),
    ],
)


def laid_out(n_rows, n_cols, stride, offset, dtype):
    """Random rows so far apart, the first of which begins at so many elements."""
    memory = torch.randn(offset + n_rows * stride, device=DEVICE).to(dtype)
    return memory[offset:].view(n_rows, stride)[:, :n_cols]


def assert_lanes_agree(sass):
    """What a warp sums up has to be the same in each thread to the last bit, where more than one of them uses it.

    A warp sums up by a butterfly: each thread adds what another one sends. Were the addition one instruction with the
    product in front of it, that would be a * b + c in one thread, c * d + b' in another.
    """
    sent, n_added = set(), 0
    for line in sass.splitlines():
        if not (instruction := re.search(r"\*/ +(?:@!?\w+ )?([A-Z][\w.]+) (.*);", line)):
            continue
        name, operands = instruction[1], re.findall(r"\b(?:R\d+|PT)\b", instruction[2])
        if name == "SHFL.BFLY":
            sent.add(operands[1])
            continue
        is_added = bool(sent & set(operands[1:]))
        assert not (is_added and name.startswith("FFMA")), line
        n_added += is_added and name == "FADD"
        sent -= set(operands[:1])
    assert n_added >= 5


def assert_as_accurate_as_torch(ours, torchs, reference, *, factor=2.0, floor=1e-7):
    """Our error against a float64 reference is at most `factor` times torch's own, plus a stated floor.

    The error is the largest difference, relative to the largest magnitude of the reference. NaN and infinities must
    stand in the same places as in the reference rounded to the dtype.
    """
    assert ours.dtype == torchs.dtype and ours.shape == torchs.shape and ours.device == torchs.device
    expected = reference.to(ours.dtype)
    finite = expected.isfinite()
    torch.testing.assert_close(ours[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True)
    if not finite.any():
        return
    scale = reference[finite].abs().max().clamp(min=torch.finfo(torch.float64).tiny)

    def error(x):
        return ((x[finite].double() - reference[finite].double()).abs().max() / scale).item()

    ours_error, torchs_error = error(ours), error(torchs)
    eps = torch.finfo(ours.dtype).eps
    # Rounding the exact result would err by eps / 2: that torch erred by less in a few numbers is its luck. And its
    # attention reads what lies between the rows of some strided inputs: NaN is no error to compare with.
    torchs_error = eps if math.isnan(torchs_error) else max(torchs_error, eps / 4)
    # `not <=` instead of `>`: a NaN error fails too.
    if not ours_error <= factor * torchs_error + floor:
        raise AssertionError(
            f"error {ours_error:.2e} against float64, torch's own is {torchs_error:.2e}, floor {floor:.0e}"
        )
