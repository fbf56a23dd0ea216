"""What an operation does with its arguments before a kernel sees them: checks, autocast, and who else may want them."""

import reprlib
from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch.autograd import forward_ad

from ._launch import INTERPRET, TENSORS, is_compile_only

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Python's numbers, and what stands for them while torch.export traces.
INTS = (int, torch.SymInt)
NUMBERS = (*INTS, float, torch.SymFloat)
LONGEST = 2**31 - 2**14  # of 31 bits, so that no block steps past them; beyond, Triton counts in 64


def number(x: object) -> object:
    """The Python number for a NumPy scalar, which torch takes for one, too; anything else as it is."""
    if isinstance(x, (np.integer, np.bool_)):
        return x.item()
    return float(x) if isinstance(x, np.floating) else x


class _FewWords(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print the longest.
        return repr(x) if x.bit_length() < 1000 else f"an int of {x.bit_length()} bits"

    def repr_instance(self, x: object, level: int) -> str:
        is_array = isinstance(x, torch.Tensor | np.ndarray)
        return type(x).__name__ if is_array else super().repr_instance(x, level)


# What a message says arrived: of a tensor its type, of a long text its beginning and its end, of a long sequence its
# beginning.
got = _FewWords().repr


def check_tensor(op: str, name: str, x: object, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Refuse what is not a dense tensor of one of `dtypes` on a device that can run a kernel."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        *allowed, given = (str(dtype).removeprefix("torch.") for dtype in (*dtypes, x.dtype))
        raise TypeError(f"{op}: {name} must have one of the dtypes {', '.join(allowed)}, got {given}")
    if x.is_nested:
        raise TypeError(f"{op}: {name} must not be a nested tensor; call .to_padded_tensor(padding) or .unbind() first")
    if x.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {x.layout}; call .to_dense() first")
    device = x.device.type
    if device == "cpu" and not INTERPRET:
        raise ValueError(
            f"{op}: {name} must be on a GPU, got device cpu; move it there, or set TRITON_INTERPRET=1 before importing "
            "triton to run on CPU tensors in the interpreter"
        )
    refuse_tangents(op, x, name=name)


def check_length(op: str, what: str, length: int) -> None:
    """Refuse a length of 31 bits that blocks would step past."""
    if LONGEST < length < 2**31:
        raise ValueError(
            f"{op}: {what} must not be within 2**14 below 2**31, where blocks are miscounted, got {length}"
        )


def refuse_tangents(op: str, *tensors: torch.Tensor, name: str | None = None) -> None:
    """Refuse tensors that forward-mode differentiation follows: kernels would lose their tangents."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        refuse_forward_mode(op, name)


def refuse_forward_mode(op: str, name: str | None = None) -> NoReturn:
    reason = f", and {name} has a tangent" if name else ""
    raise NotImplementedError(
        f"{op}: forward-mode differentiation is not supported{reason}; use reverse mode (backward, jacrev)"
    )


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors (None is skipped) that live on different devices."""
    present = [(name, x) for name, x in tensors.items() if x is not None]
    first_name, first = present[0]
    for name, x in present[1:]:
        if x.device != first.device:
            raise ValueError(f"{op}: {name} must be on the device of {first_name}, {first.device}, got {x.device}")


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work, whose tensors have no memory of their own."""
    return torch._C._are_functorch_transforms_active()


def is_tracing() -> bool:
    """Whether torch.compile, another tracer or a transform, not the device, will get what is called now."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or is_transformed()
        or torch._C._is_tracing()
    )


def is_plain(x: torch.Tensor) -> bool:
    """Whether x's memory holds its elements, as no view with a pending sign, no meta tensor's and no wrapper's does."""
    return (
        type(x) in TENSORS
        and not x.is_neg()
        and not x._is_zerotensor()
        and (is_compile_only() or not x.is_meta)
        and not torch._C._functorch.is_legacy_batchedtensor(x)
        # What torch.func.vjp returns may be called when the transform, whose wrappers it kept, is over.
        and not torch._C._functorch.is_dead_tensor_wrapper(x)
    )


def requires_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether somebody may ask for the gradient of a function of these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def needs_autograd(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd has to record a function of these tensors now.

    Where torch transforms, compiles, traces or brings a batch of gradients, the registered operators see to it, and in
    inference mode nobody does.
    """
    return requires_gradient(*tensors) and not (
        torch.compiler.is_compiling()
        or is_transformed()
        or torch._C._is_tracing()
        or torch.is_inference_mode_enabled()
        or any(map(is_in_batch_of_gradients, tensors))
    )


def is_in_batch_of_gradients(x: torch.Tensor | None) -> bool:
    """Whether x stands for one gradient of each of a batch: `is_grads_batched=True`, for which torch has a vmap."""
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


def refuse_batch_of_gradients(op: str, *gradients: torch.Tensor | None) -> None:
    """For a gradient that is to be differentiated itself, which torch's vmap would leave without a graph."""
    if any(map(is_in_batch_of_gradients, gradients)):
        raise NotImplementedError(
            f"{op}: with create_graph=True, gradients cannot come in a batch (is_grads_batched=True, vectorize=True)"
        )


def in_shape(x: torch.Tensor, shape: Sequence[int], *, is_saved: bool = False) -> torch.Tensor:
    """A result in another shape; no view of it, as torch's are none, unless it `is_saved` for the backward pass.

    A view of what was made without gradients cannot be changed in place with them, and none can be detached in place.
    But only of a view does autograd see that a change in place is one of the saved tensor as well.
    """
    # torch.jit.trace would take the shape for a constant, and what torch.compile returns is no view anyway.
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return x.reshape(shape)
    if is_saved and torch.is_grad_enabled() and (x.requires_grad or is_transformed()):
        return x.view(shape)
    return torch.ops.aten._unsafe_view(x, shape)


def autocast(*tensors: torch.Tensor | None) -> Iterable[torch.Tensor | None]:
    """The tensors as :class:`torch.autocast` casts those of a matrix product; None, float64 and float8 stay."""
    device = next(x.device.type for x in tensors if x is not None)
    if device not in ("cpu", "cuda", "xpu") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x is not None and x.dtype in FLOATS[:3] else x for x in tensors]


def allows_tf32() -> bool:
    """Whether torch allows float32 products on a GPU to round their factors to TensorFloat-32."""
    # What torch.backends.cuda.matmul.fp32_precision says, by whichever of torch's settings, in a quarter of the time.
    return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


def autocast_dtype() -> torch.dtype | None:
    """The dtype to which :class:`torch.autocast` casts on NVIDIA GPUs now; None where it does not."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
