"""Products of float32 tiles on the units that multiply matrices of bfloat16, as exact as float32 can show.

A float32 number is the sum of three bfloat16 numbers, so a product is the sum of nine. The three smallest are at the
edge of what float32 shows of it; the others are "bf16x6", as Triton calls it, too.
"""

import torch
import triton
import triton.language as tl

from ._launch import is_amd, is_hopper


def dot_precision(x: torch.Tensor, reduced: bool) -> str:
    """How `dot` multiplies tiles of x; `reduced` says that float32 may lose 13 of its 24 bits in each product.

    "ieee" multiplies number by number, or on AMD's matrix units, which take float32 as it is. "bf16x6" is for Hopper,
    where it was measured.
    """
    if x.dtype != torch.float32 or is_amd(x.device):
        return "ieee"
    return "tf32" if reduced else "bf16x6" if is_hopper(x.device) else "ieee"


@triton.jit
def three_bf16(x):
    """Three bfloat16 numbers with 8 of the 24 bits of x each, whose sum is x; fewer of them for numbers below 1e-33.

    Of infinity and NaN the first has all, and the others are NaN.
    """
    # Some of the bits that tell NaN from infinity would be cut off. A sum that is NaN has them all.
    x += 0.0
    # What bfloat16 has no room for is cut off. Rounding could make the largest numbers infinite.
    first = (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    rest = x - first
    second = (rest.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return first.to(tl.bfloat16), second.to(tl.bfloat16), (rest - second).to(tl.bfloat16)


@triton.jit
def dot(a, b, c, PRECISION: tl.constexpr):
    """c + a @ b, or a @ b where c is None; PRECISION is "bf16x6" or what else ``tl.dot`` takes."""
    if PRECISION == "bf16x6":
        a0, a1, a2 = three_bf16(a)
        b0, b1, b2 = three_bf16(b)
        # From the smallest products on.
        rest = tl.dot(a1, b1)
        rest = tl.dot(a2, b0, rest)
        rest = tl.dot(a0, b2, rest)
        rest = tl.dot(a1, b0, rest)
        rest = tl.dot(a0, b1, rest)
        # Where a number is infinite or NaN, so is its first part, and the last product says what becomes of it.
        product = tl.dot(a0, b0, tl.where(rest == rest, rest, 0.0))
        # Added outside the matrix unit, whose own sums are cut, not rounded.
        result = product if c is None else c + product
    elif c is None:
        result = tl.dot(a, b, input_precision=PRECISION)
    else:
        result = tl.dot(a, b, c, input_precision=PRECISION, out_dtype=c.dtype)
    return result
