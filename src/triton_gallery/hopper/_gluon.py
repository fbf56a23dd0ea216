"""What the Hopper kernels share: Gluon's pieces under one name, tensor descriptors, barriers.

Gluon is experimental and renames things between Triton versions. Importing this module fails where a piece is missing;
then `triton_gallery.hopper.load` returns None and the ``tl`` kernels do the work.
"""

import functools
import math

import torch
import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import _launch

__all__ = [
    "TensorDescriptor",
    "as_matrices",
    "as_row",
    "as_tiles",
    "async_copy",
    "async_copy_to_shared",
    "async_load",
    "async_store",
    "barrier",
    "descriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "meet",
    "named_barrier",
    "opaque",
    "phase",
    "reduce_add",
    "store_wait",
    "tma_can_address",
    "to_16_bits",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# Triton 3.9 has new names for the copies.
async_copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
# Triton 3.7 has a new name for the barrier of all threads that run a function.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_ELEMENTS = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
_ADD = ir.DESCRIPTOR_REDUCE_KIND.ADD
_MOVES_CONVERSIONS = gl.constexpr(triton.__version__.startswith("3.8."))


def tma_can_address(x: torch.Tensor) -> bool:
    """TMA wants a contiguous last dimension, 16-byte strides and a 16-byte aligned start."""
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    aligned = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
    return aligned and x.stride(-1) == 1 and x.data_ptr() % 16 == 0


@functools.cache
def _layout(dtype: torch.dtype, block_shape: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), _ELEMENTS[dtype])


def descriptor(x: torch.Tensor, block_shape: list[int]) -> TensorDescriptor:
    """A tensor descriptor of x for tiles of `block_shape`, with the layout that the matrix unit reads."""
    shape, block_shape = tuple(x.shape), tuple(block_shape)
    # The stride of a dimension of size 1 is never used, but the descriptor checks it.
    strides = tuple(stride if size > 1 else 16 for stride, size in zip(x.stride()[:-1], shape, strict=False))
    layout = _layout(x.dtype, block_shape)
    return _launch.descriptor(TensorDescriptor, x, shape, (*strides, 1), block_shape, layout)


@builtin
def reduce_add(desc, coordinates, smem, _semantic=None):
    """Add a float32 tile in shared memory to memory; the copy engine does the additions, in no fixed order."""
    handles = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(_ADD, desc.handle, handles, smem.handle)


@builtin
def as_row(smem, layout, _semantic=None):
    """A 1-D piece of shared memory seen as one row, which is what a copy of one row wants."""
    layout = getattr(layout, "value", layout)
    return _semantic.memdesc_reinterpret(smem, smem.dtype, [1, smem.shape[0]], layout)


@builtin
def as_tiles(smem, desc, _semantic=None):
    """Shared memory seen as so many tiles of what desc copies as it has room for."""
    tile = desc.block_type
    count = math.prod(smem.type.shape) * smem.dtype.primitive_bitwidth // (8 * tile.nbytes)
    return _semantic.memdesc_reinterpret(smem, desc.dtype, [count, *tile.shape], desc.layout)


@builtin
def as_matrices(smem, count, rows, columns, layout, _semantic=None):
    """Shared memory seen as so many matrices of rows x columns; it has as many bytes."""
    shape = [getattr(n, "value", n) for n in (count, rows, columns)]
    return _semantic.memdesc_reinterpret(smem, smem.dtype, shape, getattr(layout, "value", layout))


@gluon.jit
def named_barrier(INSTRUCTION: gl.constexpr, BARRIER: gl.constexpr):
    """`barrier.sync` waits for, and `barrier.arrive` announces, 256 threads: two warp groups.

    Their short forms `bar.sync` and `bar.arrive` promise that all threads of a warp meet at the same instruction; here
    nothing is promised.
    """
    # Without a tensor argument, each thread runs the instruction once.
    gl.inline_asm_elementwise(
        INSTRUCTION + " " + BARRIER + ", 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def meet():
    """Two consumers, of one warp group each, wait for each other."""
    named_barrier("barrier.sync", "9")


@gluon.jit
def phase(step, STAGES: gl.constexpr):
    """The parity of a stage's barrier at `step`: it flips each time the ring of stages comes round."""
    return (step // STAGES) & 1


@gluon.jit
def opaque(x):
    """x, in a way that the compiler does not see through.

    Without it, LLVM computes a matrix operand's address once for both sides of a branch, ahead of the branch, and the
    machine code then reads a wrong place in all warps but the first (seen with Triton 3.6.0).
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def to_16_bits(x, DTYPE: gl.constexpr, HERE: gl.constexpr = False):
    """x, float32, rounded to DTYPE.

    `x.to` leaves the place to LLVM. It may move the rounding behind a loop; behind several loops it does, and the
    machine code then takes pairs of numbers apart and joins them again. With HERE the rounding is an instruction that
    LLVM leaves where it is, and always with Triton 3.8, which moves it even into the next step of the same loop. It is
    in ptxas's way, too: where nothing would have moved, it costs a hundredth of the time.
    """
    if not (HERE or _MOVES_CONVERSIONS):
        y = x.to(DTYPE)
    elif DTYPE == gl.float16:
        y = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, True, 2)
    else:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, True, 2)
    return y
