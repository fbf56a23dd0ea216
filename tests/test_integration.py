"""What torch does with functions besides calling them, done to ours and to torch's own: the results must agree."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functionalize, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import triton_gallery as tg

# Interpreter and GPU divide and take exponentials with other roundings than torch.
TOLERANCE = dict(rtol=1e-4, atol=1e-5)
SEED = 5
WEIGHT = torch.linspace(-1, 1, 40).view(8, 5)


def dropped(x, p=0.5):
    """The dropout that tg.dropout is under SEED, spelt out."""
    return x * tg.dropout(torch.ones(x.shape, device=x.device), p, seed=SEED)


# Our function and torch's, of three tensors (batch, 4, 8), (batch, 4, 8) and (8,), or without the batch.
PAIRS = {
    "add": (lambda x, y, w: tg.add(x, y, alpha=2), lambda x, y, w: torch.add(x, y, alpha=2)),
    "add, broadcast": (lambda x, y, w: tg.add(x, w), lambda x, y, w: x + w),
    "softmax": (lambda x, y, w: tg.softmax(x, 0), lambda x, y, w: torch.softmax(x, 0)),
    "log_softmax": (lambda x, y, w: tg.log_softmax(x), lambda x, y, w: torch.log_softmax(x, -1)),
    "matmul": (lambda x, y, w: tg.matmul(x, y.mT), lambda x, y, w: x @ y.mT),
    "matmul with a vector": (lambda x, y, w: tg.matmul(x, w), lambda x, y, w: x @ w),
    "matmul, fused": (
        lambda x, y, w: tg.matmul(x.mT, y, bias=w, activation="gelu"),
        lambda x, y, w: F.gelu(x.mT @ y + w),
    ),
    "layer_norm": (lambda x, y, w: tg.layer_norm(x, (8,), w, w), lambda x, y, w: F.layer_norm(x, (8,), w, w)),
    "rms_norm": (lambda x, y, w: tg.rms_norm(x, (8,), w, 1e-5), lambda x, y, w: F.rms_norm(x, (8,), w, 1e-5)),
    "dropout": (lambda x, y, w: tg.dropout(x, 0.5, seed=SEED), lambda x, y, w: dropped(x)),
    "attention": (
        lambda x, y, w: tg.attention(x, y, y * w, is_causal=True),
        lambda x, y, w: F.scaled_dot_product_attention(x[None], y[None], (y * w)[None], is_causal=True)[0],
    ),
}
PAIR = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def inputs(device, batch=()):
    return (
        torch.randn(*batch, 4, 8, device=device),
        torch.randn(*batch, 4, 8, device=device),
        torch.randn(8, device=device),
    )


def assert_same(transform, pair, *args):
    ours, theirs = (transform(function)(*args) for function in pair)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def gradients_of(function, args):
    """The function's result for leaves like args, and their gradients."""
    leaves = [arg.detach().clone().requires_grad_() for arg in args]
    result = function(*leaves)
    return result, torch.autograd.grad(result, leaves, result.detach().cos(), allow_unused=True, materialize_grads=True)


# --- torch.func -------------------------------------------------------------------------------------------------------


@PAIR
@pytest.mark.parametrize("in_dims", [(0, 0, None), (0, None, None), (1, 0, None), (None, 0, None)], ids=str)
def test_vmap(pair, in_dims, device):
    x, y, w = inputs(device, (3,))
    x = {None: x[0], 0: x, 1: x.movedim(0, 1)}[in_dims[0]]
    y = y[0] if in_dims[1] is None else y
    assert_same(lambda function: vmap(function, in_dims), pair, x, y, w)


@PAIR
def test_vmap_of_the_weight(pair, device):
    x, y, _ = inputs(device, (3,))
    assert_same(lambda function: vmap(function), pair, x, y, torch.randn(3, 8, device=device))


@PAIR
def test_nested_vmap(pair, device):
    x, y, w = inputs(device, (2, 3))
    assert_same(lambda function: vmap(vmap(function, (0, 0, None)), (0, 0, None)), pair, x, y, w)


@PAIR
def test_gradients_around_a_vmap(pair, device):
    args = inputs(device, (3,))
    ours, theirs = (gradients_of(vmap(function, (0, 0, None)), args) for function in pair)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@PAIR
def test_vmap_over_nothing(pair, device):
    x, y, w = inputs(device, (0,))
    for in_dims in ((0, 0, None), (None, None, 0)):
        args = [t if d == 0 else torch.ones(4, 8, device=device) for t, d in zip((x, y), in_dims, strict=False)]
        # Torch's other backends have no rule for a batch of nothing.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert_same(
                lambda function, d=in_dims: vmap(function, d), pair, *args, w.expand(0, 8) if in_dims[2] == 0 else w
            )


@pytest.mark.parametrize(
    ("x", "y", "in_dims"),
    [
        (torch.ones(3, dtype=torch.float64), torch.ones(3, 4), (0, 0)),
        (torch.tensor([100]), torch.tensor([[100]], dtype=torch.int8), (0, 0)),
        (torch.ones(3), torch.ones((), dtype=torch.float64), (0, None)),
        (torch.ones((), dtype=torch.int64), torch.ones(2, 3, dtype=torch.float16), (None, 1)),
    ],
)
def test_vmap_promotes_as_the_calls_it_stands_for(x, y, in_dims, device):
    ours, theirs = (vmap(f, in_dims)(x.to(device), y.to(device)) for f in (tg.add, torch.add))
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_vmap_over_numbers(device):
    x = torch.randn(5, device=device)
    for transform in (vmap, lambda f: vmap(grad(f))):
        ours, theirs = (transform(lambda x, f=f: f(x, 0)) for f in (tg.softmax, torch.softmax))
        torch.testing.assert_close(ours(x), theirs(x), **TOLERANCE)


@PAIR
def test_grad(pair, device):
    def gradient(function):
        return grad(lambda *args: function(*args).square().sum(), argnums=(0, 1, 2))

    assert_same(gradient, pair, *inputs(device))


@PAIR
def test_a_pullback_after_its_transform(pair, device):
    args = inputs(device)

    def pulled_back(function):
        result, pullback = torch.func.vjp(function, *args)
        # What the transform wrapped is dead by now.
        with torch.no_grad():
            return pullback(result.cos())

    assert_same(lambda function: lambda: pulled_back(function), pair)


def test_a_pullback_of_dropout_with_a_drawn_seed(device):
    x = torch.randn(4, 8, device=device)
    result, pullback = torch.func.vjp(tg.dropout, x)
    torch.testing.assert_close(pullback(x)[0], result)


@PAIR
def test_gradients_of_each_sample(pair, device):
    def gradients(function):
        return vmap(grad(lambda *args: function(*args).square().sum(), argnums=(0, 2)), (0, 0, None))

    assert_same(gradients, pair, *inputs(device, (3,)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own attention in a batch of gradients
@PAIR
def test_jacobian(pair, device):
    assert_same(lambda function: jacrev(function), pair, *inputs(device))


@pytest.mark.parametrize("name", ["add", "softmax", "log_softmax", "matmul", "matmul, fused", "dropout"])
def test_gradient_of_a_gradient(name, device):
    def second(function):
        def first(*args):
            return grad(lambda *args: function(*args).square().sum())(*args).square().sum()

        return grad(first)

    assert_same(second, PAIRS[name], *inputs(device))


@pytest.mark.parametrize(("name", "named"), [("layer_norm", "layer_norm or rms_norm"), ("attention", "attention")])
def test_gradient_of_a_gradient_that_is_not_there_says_so(name, named, device):
    def first(x, y, w):
        return grad(lambda x: PAIRS[name][0](x, y, w).square().sum())(x).square().sum()

    with pytest.raises(NotImplementedError, match=f"^{named}: torch.func can differentiate it once"):
        grad(first)(*inputs(device))


@PAIR
def test_forward_mode_is_refused(pair, device):
    x, y, w = inputs(device)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation is not supported"):
        jvp(lambda x: pair[0](x, y, w), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=r"not supported, and [axq] has a tangent; use reverse mode"):
            pair[0](dual, y, w)
        torch.testing.assert_close(pair[0](x, y, w), pair[1](x, y, w), **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in PAIRS if name not in ("add", "add, broadcast")])
def test_forward_mode_in_an_incoming_gradient_is_refused(name, device):
    x, y, w = inputs(device)
    x.requires_grad_()
    with torch.autograd.forward_ad.dual_level():
        out = PAIRS[name][0](x, y, w)
        dual = torch.autograd.forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        op = r"^[a-z_]+( or [a-z_]+)?(?<!_fwd)(?<!_bwd)(?<!_pre)"
        message = op + ": forward-mode .* not supported, and an incoming gradient has a tangent"
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad(out, x, dual)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_flops_of_matmul_are_counted(activation, device):
    from torch.utils.flop_counter import FlopCounterMode

    a = torch.randn(3, 8, 5, device=device, requires_grad=True)
    b = torch.randn(5, 7, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = tg.matmul(a, b, activation=activation)
        torch.autograd.grad(out.sum(), (a, b))
    assert counter.get_total_flops() == 3 * (2 * 3 * 8 * 5 * 7)


def test_flops_of_attention_are_those_that_torch_counts(device):
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    leaves = [torch.randn(s, device=device, requires_grad=True) for s in ((2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 8))]
    shapes = (2, 4, 6, 16), (2, 4, 9, 16), (2, 4, 9, 8)  # torch 2.11 counts only for equal numbers of heads
    with FlopCounterMode(display=False) as counter:
        out = tg.attention(*leaves, enable_gqa=True)
    assert counter.get_total_flops() == sdpa_flop_count(*shapes)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out.sum(), leaves)
    assert counter.get_total_flops() == sdpa_backward_flop_count(tuple(out.shape), *shapes)


@PAIR
def test_hessian_says_what_is_not_there(pair, device):
    x, y, w = inputs(device)
    with pytest.raises(
        NotImplementedError,
        match=r"^[a-z_]+( or [a-z_]+)?(?<!_fwd)(?<!_bwd): forward-mode differentiation is not supported",
    ):
        hessian(lambda x: pair[0](x, y, w).square().sum())(x)


@PAIR
def test_functionalize(pair, device):
    assert_same(lambda function: functionalize(function), pair, *inputs(device))


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_dropout_draws_as_vmap_is_told(randomness, device):
    x = torch.ones(3, 200, device=device)
    drop = vmap(lambda x: tg.dropout(x, 0.5), randomness=randomness)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="random"):
            drop(x)
    else:
        first, second, third = drop(x)
        assert torch.equal(first, second) == torch.equal(first, third) == (randomness == "same")


# --- tracing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@PAIR
def test_export(pair, dynamic, strict, device):
    class Module(torch.nn.Module):
        def forward(self, x, y, w):
            return pair[0](x, y, w)

    batch = {0: torch.export.Dim.DYNAMIC}
    shapes = {"x": batch, "y": batch, "w": None} if dynamic else None
    program = torch.export.export(Module(), inputs(device, (3,)), dynamic_shapes=shapes, strict=strict)
    assert any("triton_gallery" in str(node.target) for node in program.graph.nodes)
    args = inputs(device, (5 if dynamic else 3,))
    torch.testing.assert_close(program.module()(*args), pair[1](*args), **TOLERANCE)


def test_export_takes_no_size_for_a_constant(device):
    class Module(torch.nn.Module):
        def forward(self, x, w):
            return tg.add(x, w)

    batch = torch.export.Dim("batch", min=2, max=64)
    args = inputs(device, (3,))[::2]
    program = torch.export.export(Module(), args, dynamic_shapes={"x": {0: batch}, "w": None})
    x = torch.randn(8, 4, 8, device=device)  # as many as w has
    torch.testing.assert_close(program.module()(x, args[1]), x + args[1])


OF_ANY_SIZE = {
    "add": (lambda x: tg.add(x, x), lambda x: x + x, (3, 8), 0),
    "softmax": (lambda x: tg.softmax(x, -1), lambda x: x.softmax(-1), (3, 8), 1),
    "layer_norm": (lambda x: tg.layer_norm(x, 8), lambda x: F.layer_norm(x, (8,)), (3, 8), 0),
    "matmul, batch": (lambda x: tg.matmul(x, x.new_ones(8, 6)), lambda x: x @ x.new_ones(8, 6), (3, 5, 8), 0),
    "matmul, rows": (lambda x: tg.matmul(x, x.new_ones(8, 6)), lambda x: x @ x.new_ones(8, 6), (3, 5, 8), 1),
    **{
        f"attention, {what}": (
            lambda x: tg.attention(x, x, x), lambda x: F.scaled_dot_product_attention(x, x, x), (2, 4, 10, 16), dim,
        )
        for what, dim in (("heads", 1), ("positions", 2))
    },
}  # fmt: skip


@pytest.mark.parametrize(("function", "expected", "shape", "dim"), OF_ANY_SIZE.values(), ids=OF_ANY_SIZE)
def test_export_sets_no_bound_to_a_size(function, expected, shape, dim, device):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    sizes = ({dim: torch.export.Dim("n", min=2)},)
    program = torch.export.export(Module(), (torch.randn(shape, device=device),), dynamic_shapes=sizes)
    x = torch.randn(*shape[:dim], 7, *shape[dim + 1 :], device=device)
    torch.testing.assert_close(program.module()(x), expected(x), **TOLERANCE)


SIZES_AS_NUMBERS = {
    "layer_norm": (lambda x: tg.layer_norm(x, x.shape[-1]), lambda x: F.layer_norm(x, x.shape[-1:])),
    "rms_norm": (lambda x: tg.rms_norm(x, x.shape[-1], eps=1e-5), lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5)),
    "add, number": (lambda x: tg.add(x, x.shape[0]), lambda x: x + x.shape[0]),
    "add, alpha": (lambda x: tg.add(x, x, alpha=1 / x.shape[0]), lambda x: x + x / x.shape[0]),
    "dropout": (lambda x: tg.dropout(x, seed=x.shape[0]), lambda x: tg.dropout(x, seed=len(x))),
}


@pytest.mark.parametrize("pair", SIZES_AS_NUMBERS.values(), ids=SIZES_AS_NUMBERS)
def test_export_takes_sizes_as_numbers(pair, device):
    class Module(torch.nn.Module):
        def forward(self, x):
            return pair[0](x)

    sizes = dict.fromkeys(range(2), torch.export.Dim.DYNAMIC)
    program = torch.export.export(Module(), (torch.randn(4, 8, device=device),), dynamic_shapes=(sizes,))
    x = torch.randn(6, 10, device=device)
    torch.testing.assert_close(program.module()(x), pair[1](x), **TOLERANCE)


# Of a tensor (n, 16), whose n is known when the mask that selected its rows is.
SELECTED = {
    "add, a row": (lambda x: tg.add(x, x.new_ones(1, 16)), lambda x: x + x.new_ones(1, 16)),
    "add, a column": (lambda x: tg.add(x, x[:, :1]), lambda x: x + x[:, :1]),
    "softmax": (lambda x: tg.softmax(x, 0), lambda x: torch.softmax(x, 0)),
    "matmul": (lambda x: tg.matmul(x, x.mT), lambda x: x @ x.mT),
    "matmul, n matrices": (lambda x: tg.matmul(*[x.view(-1, 4, 4)] * 2), lambda x: x.view(-1, 4, 4) @ x.view(-1, 4, 4)),
    "matmul, n by one": (lambda x: tg.matmul(x[:, None], x.new_ones(16, 4)), lambda x: x[:, None] @ x.new_ones(16, 4)),
    "layer_norm": (lambda x: tg.layer_norm(x, 16), lambda x: F.layer_norm(x, (16,))),
    "attention, n batches": (
        lambda x: tg.attention(*[x.view(-1, 2, 2, 4)] * 3, is_causal=True),
        lambda x: F.scaled_dot_product_attention(*[x.view(-1, 2, 2, 4)] * 3, is_causal=True),
    ),
    "attention, n batches between": (
        lambda x: tg.attention(*[x.view(2, -1, 2, 4).transpose(0, 1)] * 3),
        lambda x: F.scaled_dot_product_attention(*[x.view(2, -1, 2, 4).transpose(0, 1)] * 3),
    ),
    "attention, n heads": (
        lambda x: tg.attention(*[x.view(-1, 2, 8)] * 3),
        lambda x: F.scaled_dot_product_attention(*[x.view(-1, 2, 8)] * 3),
    ),
    "attention, n keys": (
        lambda x: tg.attention(x.new_ones(1, 3, 16), x[None], x[None]),
        lambda x: (x.new_ones(1, 3, 16) @ x.mT / 4).softmax(-1) @ x,
    ),
}  # fmt: skip


@pytest.mark.parametrize("pair", SELECTED.values(), ids=SELECTED)
def test_sizes_that_depend_on_data(pair, device):
    class Module(torch.nn.Module):
        def forward(self, x, mask):
            return pair[0](x[mask])

    x = torch.randn(10, 16, device=device)
    masks = [torch.arange(10, device=device) % n == 0 for n in (2, 3)]
    program = torch.export.export(Module(), (x, masks[0]))
    torch.testing.assert_close(program.module()(x, masks[1]), pair[1](x[masks[1]]), **TOLERANCE)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
        for mask in masks:
            ours = gradients_of(lambda x, mask=mask: compiled(x, mask), [x])
            expected = gradients_of(lambda x, mask=mask: pair[1](x[mask]), [x])
            torch.testing.assert_close(ours, expected, **TOLERANCE)


@PAIR
def test_compiled_vmap(pair, device):
    torch._dynamo.reset()
    args = inputs(device, (3,))
    compiled = torch.compile(vmap(pair[0], (0, 0, None)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        gradients_of(compiled, args), gradients_of(vmap(pair[1], (0, 0, None)), args), **TOLERANCE
    )


@PAIR
def test_compiled_grad(pair, device):
    """A graph ends before it: an operator has no rule for such transforms."""
    torch._dynamo.reset()

    def gradient(function):
        return grad(lambda *args: function(*args).square().sum(), argnums=(0, 1, 2))

    compiled = torch.compile(gradient(pair[0]), backend="aot_eager")
    args = inputs(device)
    torch.testing.assert_close(compiled(*args), gradient(pair[1])(*args), **TOLERANCE)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"not compiled inside of torch\.func\.grad"):
        torch.compile(gradient(pair[0]), fullgraph=True, backend="aot_eager")(*args)


@pytest.mark.filterwarnings("ignore")  # torch's own: of tracing, that sizes become constants
@pytest.mark.parametrize("name", ["add", "softmax", "matmul", "matmul, fused", "layer_norm", "attention"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["constant", "parameter"])
def test_jit_trace(name, requires_grad, device, tmp_path):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(8, device=device), requires_grad)

        def forward(self, x, y):
            return PAIRS[name][0](x, y, self.w)

    x, y, _ = inputs(device, (3,))
    module = Module()
    torch.jit.trace(module, (x, y), check_trace=False).save(tmp_path / "traced.pt")
    x, y, _ = inputs(device, (3,))
    result = torch.jit.load(tmp_path / "traced.pt")(x, y)
    torch.testing.assert_close(result, PAIRS[name][1](x, y, module.w), **TOLERANCE)
    assert result.requires_grad is (requires_grad and name not in ("add", "softmax", "matmul"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(8, 5), (8,)], ids=str)
def test_a_traced_product_takes_other_batches(shape, device):
    w = torch.randn(shape, device=device)
    traced = torch.jit.trace(lambda x: tg.matmul(x, w), torch.randn(2, 3, 8, device=device), check_trace=False)
    x = torch.randn(4, 7, 8, device=device)
    torch.testing.assert_close(traced(x), x @ w, **TOLERANCE)


def test_a_number_that_varies_is_compiled_once_more_and_no_oftener(device):
    torch.compiler.reset()
    compiled = torch.compile(tg.add, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 8, device=device)
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in (0.25, 0.5, 3.75, 1e-3, -2.5):
            assert torch.equal(compiled(x, number), x + number)


IN_A_BRANCH = PAIRS | {
    # torch allows no branch to keep a view of its inputs for the gradients, as x @ y.mT does.
    "matmul": (lambda x, y, w: tg.matmul(x, y), lambda x, y, w: x @ y),
    "matmul, fused": (
        lambda x, y, w: tg.matmul(x, y, bias=w, activation="gelu"),
        lambda x, y, w: F.gelu(x @ y + w),
    ),
}


@pytest.mark.parametrize("pair", IN_A_BRANCH.values(), ids=IN_A_BRANCH)
def test_compiled_control_flow(pair, device):
    def choose(x, y, w):
        return torch.cond(x.sum() > 0, pair[0], lambda x, y, w: pair[0](x, y, w) * 2, (x, y, w))

    torch.compiler.reset()
    compiled = torch.compile(choose, fullgraph=True, backend="aot_eager")
    args = [torch.randn(shape, device=device) for shape in ((8, 8), (8, 8), (8,))]
    for x in (args[0].abs(), -args[0].abs()):
        expected = gradients_of(lambda *args: pair[1](*args) * (1 if args[0].sum() > 0 else 2), [x, *args[1:]])
        torch.testing.assert_close(gradients_of(compiled, [x, *args[1:]]), expected, **TOLERANCE)


TWICE = {
    "add": (lambda x: tg.add(x, x), lambda x: x + x),
    "matmul": (lambda x: tg.matmul(x, x), lambda x: x @ x),
    "layer_norm": (lambda x: tg.layer_norm(x, x.shape, x, x), lambda x: F.layer_norm(x, x.shape, x, x)),
    "attention": (lambda x: tg.attention(x, x, x), lambda x: F.scaled_dot_product_attention(x, x, x)),
}


@pytest.mark.parametrize("pair", TWICE.values(), ids=TWICE)
def test_one_tensor_as_several_arguments(pair, device):
    x = torch.randn(8, 8, device=device)
    expected = gradients_of(pair[1], [x])
    torch.testing.assert_close(gradients_of(pair[0], [x]), expected, **TOLERANCE)
    compiled = torch.compile(pair[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients_of(compiled, [x]), expected, **TOLERANCE)


# --- autograd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@PAIR
def test_checkpoint(pair, use_reentrant, device):
    args = inputs(device, (2,))
    leaves = [arg.requires_grad_() for arg in args]
    result = checkpoint(pair[0], *leaves, use_reentrant=use_reentrant)
    result.backward(result.detach().cos())
    expected, grads = gradients_of(pair[0], args)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    for leaf, expected in zip(leaves, grads, strict=True):
        torch.testing.assert_close(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, expected, rtol=0, atol=0)


@PAIR
def test_a_saved_tensor_that_changed_is_an_error(pair, device):
    args = [arg.requires_grad_() for arg in inputs(device)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda _: None):
        pair[0](*args)
    result = pair[0](*args)
    changed = [arg for arg in args if arg.data_ptr() in saved]
    with torch.no_grad():
        for arg in changed:
            arg.add_(1)
    if changed:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
    else:
        result.sum().backward()


def _lse(x):
    return tg.attention(x, x, x, return_lse=True)[1]


def _matmul(activation, columns=slice(None), batch=(8, 5)):
    """A product of every rank with the same second factor."""

    def call(x):
        return tg.matmul(x, WEIGHT[:, columns].expand(*batch).to(x.device), activation=activation)

    return call, [(8,), (3, 8), (2, 3, 8), (2, 1, 3, 8)]


CHANGED = {
    "softmax": (tg.softmax, [(3, 8), (2, 3, 8)]),
    "layer_norm": (lambda x: tg.layer_norm(x, (8,)), [(3, 8), (2, 3, 8)]),
    **{f"matmul, {name}": _matmul(name) for name in (None, "relu", "leaky_relu", "gelu")},
    "matmul, relu, by a vector": _matmul("relu", 0, (8,)),
    "matmul, relu, by matrices": _matmul("relu", batch=(2, 8, 5)),
    "attention": (lambda x: tg.attention(x, x, x), [(5, 8), (2, 5, 8), (1, 2, 5, 8), (1, 2, 1, 5, 8)]),
    "attention's lse": (_lse, [(5, 8), (2, 5, 8), (1, 2, 5, 8), (1, 2, 1, 5, 8)]),
}


@pytest.mark.parametrize("way", ["autograd", "grad", "vmap of grad", "grad of vmap", "autograd around vmap"])
@pytest.mark.parametrize(("function", "shapes"), CHANGED.values(), ids=CHANGED)
def test_a_result_that_changed_is_an_error_or_makes_no_difference(function, shapes, way, device):
    def loss(x, in_place, function=function):
        out = function(x)
        out = out.add_(1) if in_place else out + 1
        return out.square().sum()

    def gradient(x, in_place):
        if way == "vmap of grad":
            return vmap(lambda x: grad(loss)(x, in_place))(torch.stack([x, 2 * x]))
        if way == "grad of vmap":
            return grad(lambda x: vmap(lambda x: loss(x, in_place))(torch.stack([x, 2 * x])).sum())(x)
        if way == "grad":
            return grad(loss)(x, in_place)
        x = x.requires_grad_()
        if way == "autograd":
            return torch.autograd.grad(loss(x, in_place), x)[0]
        return torch.autograd.grad(loss(torch.stack([x, 2 * x]), in_place, vmap(function)), x)[0]

    for shape in shapes:
        x = torch.randn(shape, device=device)
        expected = gradient(x.clone(), False)
        try:
            changed = gradient(x.clone(), True)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            torch.testing.assert_close(changed, expected, **TOLERANCE)


@PAIR
def test_batches_of_gradients(pair, device):
    args = [arg.requires_grad_() for arg in inputs(device)]

    def jacobian(function):
        result = function(*args)
        batch = torch.eye(result.numel(), device=device).view(-1, *result.shape)
        return torch.autograd.grad(
            result, args, batch, is_grads_batched=True, allow_unused=True, materialize_grads=True
        )

    torch.testing.assert_close(jacobian(pair[0]), jacobian(pair[1]), **TOLERANCE)


@PAIR
def test_batches_of_gradients_that_are_differentiated_again(pair, device):
    def penalty(function):
        torch.manual_seed(0)
        args = [arg.requires_grad_() for arg in inputs(device)]
        result = function(*args)
        batch = torch.eye(result.numel(), device=device).view(-1, *result.shape)
        grads = torch.autograd.grad(result, args, batch, True, True, is_grads_batched=True, allow_unused=True)
        sum(grad.square().sum() for grad in grads if grad is not None).add(result.sum()).backward()
        return [arg.grad for arg in args]

    # torch 2.14 has no second derivatives of its other kernels.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = penalty(pair[1])
    try:
        result = penalty(pair[0])
    except NotImplementedError as error:
        assert "create_graph=True, gradients cannot come in a batch" in str(error) or "again" in str(error)
    else:
        torch.testing.assert_close(result, expected, **TOLERANCE)


@PAIR
def test_inference_mode(pair, device):
    args = inputs(device)
    with torch.inference_mode():
        torch.testing.assert_close(pair[0](*args), pair[1](*args), **TOLERANCE)


# --- tensors that are more than their memory --------------------------------------------------------------------------


@PAIR
def test_inference_mode_with_gradients_enabled(pair, device):
    args = inputs(device)
    leaf = args[0].clone().requires_grad_()
    with torch.inference_mode(), torch.enable_grad():
        result = pair[0](leaf, *args[1:])
    assert result.is_inference() and not result.requires_grad
    torch.testing.assert_close(result, pair[1](*args), **TOLERANCE)


RESULTS = {
    **PAIRS,
    "matmul of a batch": (lambda x, y, w: tg.matmul(x[None], y.mT), None),
    "attention of a batch": (lambda x, y, w: tg.attention(x[None, None, None], y[None, None, None], y), None),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_no_views(name, device):
    """As torch's are not. A view of what was made without gradients cannot be changed with them."""
    with torch.no_grad():
        result = RESULTS[name][0](*inputs(device))
    result += torch.ones(result.shape, device=device, requires_grad=True)
    assert result.requires_grad and not result.detach_().requires_grad


@PAIR
def test_a_view_with_a_pending_sign(pair, device):
    def negative(x):
        view = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert view.is_neg()
        return view

    args = inputs(device, (2,))
    torch.testing.assert_close(pair[0](*map(negative, args)), pair[1](*args), **TOLERANCE)
    expected = gradients_of(pair[1], args)
    torch.testing.assert_close(gradients_of(lambda *args: pair[0](*map(negative, args)), args), expected, **TOLERANCE)
    # As the incoming gradient.
    leaves = [arg.requires_grad_() for arg in args]
    result = pair[0](*leaves)
    grads = torch.autograd.grad(result, leaves, negative(result.detach().cos()), allow_unused=True, materialize_grads=1)
    torch.testing.assert_close(grads, expected[1], **TOLERANCE)


class Named(torch.Tensor):
    """A subclass that adds nothing."""


class Wrapper(torch.Tensor):
    """A subclass without memory of its own: `inner` has it, and operators run on that."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, Wrapper) else x

        out = func(*torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {}))
        return torch.utils._pytree.tree_map(lambda x: Wrapper(x) if isinstance(x, torch.Tensor) else x, out)


@PAIR
def test_subclasses_of_tensor(pair, device):
    args = inputs(device)
    expected = pair[1](*args)
    torch.testing.assert_close(torch.Tensor(pair[0](*(arg.as_subclass(Named) for arg in args))), expected, **TOLERANCE)
    torch.testing.assert_close(pair[0](*map(Wrapper, args)).inner, expected, **TOLERANCE)
    _, grads = gradients_of(pair[0], map(Wrapper, args))
    torch.testing.assert_close([grad.inner for grad in grads], list(gradients_of(pair[1], args)[1]), **TOLERANCE)


FUNCTION = pytest.mark.parametrize(
    "function",
    [
        *(ours for ours, _ in PAIRS.values()),
        *(lambda x, y, w, number=number: tg.add(x, number) for number in (2, 2.5, True)),
        lambda x, y, w: tg.dropout(x),
        lambda x, y, w: tg.dropout(x, 1.0),
    ],
    ids=[*PAIRS, "add 2", "add 2.5", "add True", "dropout without a seed", "dropout of all"],
)


@FUNCTION
def test_meta_tensors_have_no_more_than_shapes(function, device):
    metas = inputs("meta")
    result, grads = gradients_of(function, metas)
    expected, _ = gradients_of(function, inputs(device))
    assert result.is_meta and result.dtype == expected.dtype
    assert result.shape == expected.shape and result.stride() == expected.stride()
    assert all(x.is_meta and x.shape == meta.shape for x, meta in zip(grads, metas, strict=True))


@FUNCTION
def test_fake_tensors_outside_of_their_mode(function, device):
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in inputs(device)]
    result, grads = gradients_of(function, fakes)
    expected, _ = gradients_of(function, inputs(device))
    assert isinstance(result, FakeTensor) and result.shape == expected.shape and result.dtype == expected.dtype
    assert all(isinstance(x, FakeTensor) and x.shape == fake.shape for x, fake in zip(grads, fakes, strict=True))


@PAIR
def test_nested_tensors_are_refused(pair, device):
    _, y, w = inputs(device)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([y, y[:2]], layout=layout)
        with pytest.raises(TypeError, match="nested"):
            pair[0](nested, y, w)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: tg.softmax(x), "softmax: the length of x along dim must not be within"),
        (lambda x: tg.layer_norm(x, x.shape[-1:]), "layer_norm: the product of normalized_shape must not be within"),
        (lambda x: tg.matmul(x, x.mT), r"matmul: a.shape\[-1\] must not be within"),
    ],
    ids=["softmax", "layer_norm", "matmul"],
)
def test_lengths_that_would_be_miscounted_are_refused(function, message, device):
    x = torch.ones((), device=device).expand(2, 2**31 - 3)
    with pytest.raises(ValueError, match=message):
        function(x)


# --- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@PAIR
def test_no_call_waits_for_the_device(pair, device):
    args = inputs(device, (2,))
    gradients_of(pair[0], args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients_of(pair[0], args)
        pair[0](*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@PAIR
def test_gradients_in_a_cuda_graph(pair, device):
    leaves = [arg.requires_grad_() for arg in inputs(device, (2,))]

    def step():
        result = pair[0](*leaves)
        return result, torch.autograd.grad(result.square().sum(), leaves, allow_unused=True, materialize_grads=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 128])
def test_attention_compiled_into_cuda_graphs(head_dim, device):
    torch._dynamo.reset()

    def function(x, w):
        q, k, v = (x @ w).view(2, 150, 3, 2, head_dim).permute(2, 0, 3, 1, 4)
        return tg.attention(q, k, v, is_causal=True).sum(1)

    compiled = torch.compile(function, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(2, 150, 64, device=device, dtype=torch.float16, requires_grad=True)
        w = torch.randn(64, 6 * head_dim, device=device, dtype=torch.float16).div(8).requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(x, w)
        grads = [g.clone() for g in torch.autograd.grad(out, (x, w), torch.ones_like(out))]
        expected = function(x, w)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
        torch.testing.assert_close(
            grads, list(torch.autograd.grad(expected, (x, w), torch.ones_like(out))), rtol=0.02, atol=0.1
        )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 2048, 2048), (2112, 4096, 2496)], ids=["whole tiles", "shared tiles"])
def test_matmul_compiled_into_cuda_graphs(shape, device):
    """What a first call allocates and keeps would be memory of the graph."""
    torch._dynamo.reset()
    M, K, N = shape
    compiled = torch.compile(lambda a, b: tg.matmul(a, b, activation="relu"), mode="reduce-overhead")
    for _ in range(4):
        a = torch.randn(M, K, device=device, dtype=torch.float16)
        b = torch.randn(K, N, device=device, dtype=torch.float16)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(a, b), tg.matmul(a, b, activation="relu"), rtol=0, atol=0)


@pytest.mark.gpu
@PAIR
def test_another_stream(pair, device):
    args = inputs(device, (2,))
    expected = gradients_of(pair[0], args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # What comes before takes long: a kernel that did not wait for it on this stream would read zeros.
        late = [torch.zeros_like(arg) for arg in args]
        torch.cuda._sleep(20_000_000)
        for x, arg in zip(late, args, strict=True):
            x.copy_(arg)
        result = gradients_of(pair[0], late)
    torch.cuda.synchronize()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@PAIR
def test_another_device_than_the_current_one(pair):
    args = inputs("cuda:0", (2,))
    others = [arg.to("cuda:1") for arg in args]
    result, grads = gradients_of(pair[0], args)
    for _ in range(3):  # the second call with the same shapes is a replay, where the device is the current one
        there, grads_there = gradients_of(pair[0], others)
        with torch.no_grad():
            without_grad = pair[0](*others)
            with torch.cuda.device(1):
                on_current = pair[0](*others)
        assert torch.cuda.current_device() == 0
        for x in (there, without_grad, on_current):
            assert x.device == torch.device("cuda:1")
            torch.testing.assert_close(x.cpu(), result.cpu(), rtol=0, atol=0)
        for x, y in zip(grads_there, grads, strict=True):
            torch.testing.assert_close(x.cpu(), y.cpu(), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["add", "matmul", "layer_norm", "attention"])
def test_tensors_on_two_devices_are_refused(name):
    x, y, w = inputs("cuda:0", (2,))
    with pytest.raises(ValueError, match="must be on the device of"):
        PAIRS[name][0](x, y.to("cuda:1"), w.to("cuda:1"))


@PAIR
def test_threads(pair, device):
    args = inputs(device, (2,))
    expected = gradients_of(pair[0], args)
    results = [None] * 4

    def work(i):
        for _ in range(3):
            results[i] = gradients_of(pair[0], args)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_the_interpreter_cannot_be_switched_on_when_triton_is_there():
    code = "import os, triton; os.environ['TRITON_INTERPRET'] = '1'; import triton_gallery"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "TRITON_INTERPRET was set after triton had been imported" in done.stderr
