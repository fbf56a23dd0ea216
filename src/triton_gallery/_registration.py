"""The registration of operators with torch: what torch.compile, other tracers, transforms and autograd see."""

import functools
from collections.abc import Callable

import torch
from torch.utils.flop_counter import register_flop_formula

from ._arguments import is_plain, is_tracing, is_transformed, needs_autograd, refuse_forward_mode, refuse_tangents
from ._launch import recording
from ._replay import forward_by, replayed


def apply(function: type[torch.autograd.Function], *args):
    """``function.apply(*args)``, noted for `replayed`."""
    output = function.apply(*args)
    if recording.applications is not None:
        recording.applications.append((function, args, output))
    return output


def operator(
    fake: Callable,
    vmap: Callable | None = None,
    varying: int | None = None,
    tf32: bool = False,
    flops: Callable | None = None,
) -> Callable:
    """Register a launcher as ``torch.ops.triton_gallery.<name>`` without a cost for eager calls.

    Args:
        fake: takes the launcher's arguments and returns empty outputs of the right shape, dtype and strides.
        vmap: the rule for a batch of calls, like the static method `vmap` of :class:`torch.autograd.Function`; without
            one they are made one after another.
        varying: the position of an argument that is another one at each call, as in `replayed`.
        tf32: whether torch's precision of float32 products makes a difference.
        flops: the operations that ``torch.utils.flop_counter`` is to count; takes the shapes of the launcher's tensors
            in their places.

    ``torch.compile`` and other tracers see one opaque operator, and torch resolves what is no plain tensor; an eager
    call goes straight to the launcher, because the dispatcher would cost more host time than the launch. The launcher's
    annotations give the operator's schema.
    """

    def decorate(launcher: Callable) -> Callable:
        name, public_name = launcher.__name__.removeprefix("_"), _public_name(launcher)
        registered = torch.library.custom_op(f"triton_gallery::{name}", launcher, mutates_args=())
        registered.register_fake(fake)
        if flops:
            register_flop_formula(getattr(torch.ops.triton_gallery, name))(lambda *args, **_: flops(*args))
        overload = getattr(torch.ops.triton_gallery, name).default

        @functools.wraps(launcher)
        def launch_or_dispatch(*args):
            # An operator has no rule for the transforms that differentiate, so these calls are not compiled.
            if torch.compiler.is_compiling() and _is_differentiated():
                torch._dynamo.graph_break(msg=f"{public_name}: not compiled inside of torch.func.grad")
            # What is compiled finds the rule of a vmap at the operator, which then takes itself out of the way.
            if torch.compiler.is_compiling() or _dispatch_key_is_excluded(_VMAP):
                return overload(*args)
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            # A gradient that comes in is none of the tensors that the function has checked.
            refuse_tangents(public_name, *tensors, name="an incoming gradient")
            # functionalize knows operators, and no class below.
            if _is_functionalized():
                return overload(*args)
            # The rule of a vmap calls with tensors that autograd, around it, has to follow.
            if is_transformed() or needs_autograd(*tensors):
                return call.transformed.apply(*args)
            return launcher(*args) if all(map(is_plain, tensors)) and not is_tracing() else overload(*args)

        call = replayed(launch_or_dispatch, varying, tf32)
        rule = vmap or functools.partial(one_by_one, call)
        registered.register_vmap(rule)
        call.registered, call.transformed = registered, _transformed(call, rule)
        tensors = [i for i, argument in enumerate(overload._schema.arguments) if "Tensor" in str(argument.type)]
        call.n_inputs = 1 + max(*tensors, varying or 0)
        return call

    return decorate


_VMAP = torch._C.DispatchKey.FuncTorchBatched
_dispatch_key_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def _is_differentiated() -> bool:
    """Whether one of the transforms is ``torch.func.grad``, or another that differentiates."""
    functorch = torch._C._functorch
    levels = functorch.get_interpreter_stack() or ()
    return any(level.key() in (functorch.TransformType.Grad, functorch.TransformType.Jvp) for level in levels)


# torch.compile calls it and takes the answer for a constant. This is ``torch.compiler.assume_constant_result``, without
# its import of torch._dynamo.
_is_differentiated._dynamo_marked_constant = True


def _is_functionalized() -> bool:
    """Whether the innermost transform is ``torch.func.functionalize``."""
    functorch = torch._C._functorch
    return is_transformed() and functorch.peek_interpreter_stack().key() == functorch.TransformType.Functionalize


def _public_name(op: Callable) -> str:
    name = op.__name__.removeprefix("_").removesuffix("_bwd").removesuffix("_fwd")
    names = {"layer_norm": "layer_norm or rms_norm", "matmul_and_pre": "matmul", "softmax": "softmax or log_softmax"}
    return names.get(name, name)


def _transformed(op: Callable, rule: Callable) -> type:
    """The operator for the transforms of ``torch.func``.

    They want a class of this form, which costs every call 15 µs; so eager calls use others.
    """

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return op(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *grads):
            # Only a gradient's operator has none of its own.
            name = _public_name(op)
            where = "torch.nn.functional's"
            if name == "attention":
                where += " under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
            raise NotImplementedError(
                f"{name}: torch.func can differentiate it once; for a second derivative use {where}"
            )

        @staticmethod
        def jvp(ctx, *tangents):
            refuse_forward_mode(_public_name(op))

        vmap = staticmethod(rule)

    return Transformed


def differentiable(op: Callable, function: type[torch.autograd.Function], first_only: bool = False) -> None:
    """Let `function` apply `op`, and what traces and transforms differentiate `op` as `function`.

    Args:
        op: what `operator` made.
        function: with the method `backward` and two that prepare its `ctx`. `constants` takes the inputs and gives the
            attributes that are the same whenever the inputs are of the same kind; `setup` takes the same as torch's
            `setup_context` and does the rest. Of the inputs, it may find none behind the last tensor.
        first_only: autograd sees the first output alone, because each costs the host more than a microsecond.
    """

    def setup_context(ctx, inputs, output):
        for name, value in function.constants(*inputs).items():
            setattr(ctx, name, value)
        function.setup(ctx, inputs, output)

    function.op, function.n_inputs, function.first_only = op, op.n_inputs, first_only
    function.forward = forward_by(lambda inputs: op(*inputs), setup_context, first_only)
    op.registered.register_autograd(function.backward, setup_context=setup_context)
    op.transformed.setup_context = staticmethod(setup_context)
    op.transformed.backward = staticmethod(function.backward)


def one_by_one(op: Callable, info, in_dims: tuple, *args) -> tuple:
    """The rule of vmap that always works: a call for each member of the batch."""
    pairs = list(zip(args, in_dims, strict=True))
    if info.batch_size == 0:
        # One call with something in place of the members says what shapes and dtypes there are none of.
        members = (arg if d is None else arg.new_zeros(arg.shape[:d] + arg.shape[d + 1 :]) for arg, d in pairs)
        return torch.utils._pytree.tree_map(lambda x: x.new_empty(0, *x.shape), op(*members)), 0
    results = [op(*(arg if d is None else arg.select(d, i) for arg, d in pairs)) for i in range(info.batch_size)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results, strict=True))), 0


def batch_first(x: torch.Tensor | None, dim: int | None, batch_size: int) -> torch.Tensor | None:
    """x with the dimension `dim` of a vmap in front; expanded there when x is the same for the whole batch."""
    if x is None:
        return None
    return x.expand(batch_size, *x.shape) if dim is None else x.movedim(dim, 0)


def aligned_batches(tensors: tuple[torch.Tensor, ...], in_dims: tuple) -> list[torch.Tensor]:
    """Each tensor with its batch dimension in front, and behind it so many dimensions that they broadcast as before."""
    ndim = max(x.ndim - (d is not None) for x, d in zip(tensors, in_dims, strict=True))

    def align(x, d):
        if d is None:
            return x
        x = x.movedim(d, 0)
        return x.reshape(x.shape[0], *(1,) * (ndim + 1 - x.ndim), *x.shape[1:])

    return [align(x, d) for x, d in zip(tensors, in_dims, strict=True)]
