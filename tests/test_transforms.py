"""The transforms of torch.func, against torch's own functions under the same transform."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacrev, jvp, vmap

import triton_gallery as tg

# Interpreter and GPU divide and take exponentials with other roundings than torch.
TOLERANCE = dict(rtol=1e-4, atol=1e-5)
SEED = 5


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
def test_grad(pair, device):
    def gradient(function):
        return grad(lambda *args: function(*args).square().sum(), argnums=(0, 1, 2))

    assert_same(gradient, pair, *inputs(device))


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


@pytest.mark.parametrize("name", ["layer_norm", "attention"])
def test_gradient_of_a_gradient_that_is_not_there_says_so(name, device):
    def first(x, y, w):
        return grad(lambda x: PAIRS[name][0](x, y, w).square().sum())(x).square().sum()

    with pytest.raises(NotImplementedError, match=r"triton_gallery\.\w+_bwd has no derivative"):
        grad(first)(*inputs(device))


@PAIR
def test_forward_mode_is_refused(pair, device):
    x, y, w = inputs(device)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation is not supported"):
        jvp(lambda x: pair[0](x, y, w), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode differentiation is not supported"):
            pair[0](dual, y, w)
        torch.testing.assert_close(pair[0](x, y, w), pair[1](x, y, w), **TOLERANCE)


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
