"""The samples that PyTorch tests its own operations on (OpInfo), through our functions and through torch's."""

import inspect
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import settings
from torch.utils._pytree import tree_leaves

import triton_gallery as tg
from accuracy import DEVICE, assert_as_accurate_as_torch

# The import would freeze the flags of torch.backends and change hypothesis' settings for all tests of the process.
profile = settings.get_current_profile_name()
with mock.patch("torch.backends.disable_global_flags"):
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_utils import noncontiguous_like
settings.load_profile(profile)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
# Three samples of add are larger, and would take the interpreter longer than all the others.
MAX_ELEMENTS = 20_000 if DEVICE.type == "cpu" else 2**31

# torch warns that complex32 is new.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ATTENTION = "nn.functional.scaled_dot_product_attention"


def linear(x, weight, bias=None):
    return tg.matmul(x, weight.mT if weight.ndim > 1 else weight, bias=bias)


OURS = {
    "add": tg.add,
    "softmax": tg.softmax,
    "log_softmax": tg.log_softmax,
    "matmul": tg.matmul,
    "nn.functional.linear": linear,
    "nn.functional.dropout": tg.dropout,
    "nn.functional.layer_norm": tg.layer_norm,
    "nn.functional.rms_norm": tg.rms_norm,
    ATTENTION: tg.attention,
}
OPS = [op for op in op_db if op.name in OURS]


def dtypes(op):
    """What both OpInfo, on this device, and our function support."""
    ours = FLOATS + INTEGERS if op.name == "add" or op.variant_test_name == "with_dtype" else FLOATS
    return [dtype for dtype in ours if dtype in op.supported_dtypes(DEVICE.type)]


def named(op, *dtype):
    name = " ".join([op.formatted_name, *map(str, dtype)]).replace("torch.", "")
    # In the interpreter these take as long as the others, which every run sees.
    is_slow = DEVICE.type == "cpu" and {torch.bfloat16, torch.float64}.intersection(dtype)
    return pytest.param(op, *dtype, id=name, marks=[pytest.mark.slow] if is_slow else [])


CASES = [named(op, dtype) for op in OPS for dtype in dtypes(op)]


class Refusal(NamedTuple):
    reason: str
    most: int
    applies: Callable
    message: str


# Samples that torch takes and ours refuses: why, how many of an operation in one dtype at most, which, and how.
REFUSED = {
    "add": Refusal(
        "torch takes a number for x, too",
        4,
        lambda sample: not isinstance(sample.input, torch.Tensor),
        "add: x must be a torch.Tensor, got (bool|int|float)",
    ),
    ATTENTION: Refusal(
        "ours has no dropout, and no mask but the causal one and the window",
        26,
        lambda sample: "attn_mask" in sample.kwargs or sample.kwargs["dropout_p"] > 0,
        "^attention: (attn_mask must be None, got Tensor|dropout_p must be 0, got 0.5); torch.nn.functional",
    ),
}

# Sums of up to a few hundred terms, in another order than torch's; its float64 is its own reference, without an error.
FLOOR = dict.fromkeys(FLOATS, 1e-6) | {torch.float64: 1e-12}


def tensors(sample):
    return [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]


def samples(op, dtype, device):
    """OpInfo's samples: without gradients, with them, and the larger set of some operations; one of each kind."""
    sets = [op.sample_inputs(str(device), dtype)]
    if dtype.is_floating_point:
        sets.append(op.sample_inputs(str(device), dtype, requires_grad=True))
    if op.reference_inputs_func:
        sets.append(op.reference_inputs(str(device), dtype))
    for some in sets:
        # A set repeats sizes, strides and arguments with other elements.
        kinds = set()
        for sample in some:
            kind = repr(sample.transform(lambda x: (x.shape, x.stride()) if isinstance(x, torch.Tensor) else x))
            if kind not in kinds and all(x.numel() <= MAX_ELEMENTS for x in tensors(sample)):
                kinds.add(kind)
                yield sample


def call(function, sample, **defaults):
    return function(sample.input, *sample.args, **(defaults | sample.kwargs))


def gradients(out, sample, dout):
    inputs = [x for x in tensors(sample) if x.requires_grad]
    return torch.autograd.grad(out, inputs, dout) if inputs else ()


def random_like(out):
    return torch.randn(out.shape, dtype=torch.float64, device=out.device).to(out.dtype)


def run_ours(op, sample, dout):
    """Outputs and gradients of ours: of the sample, and of its twin with NaN between the elements."""
    pairs = [(sample, dout), (sample.noncontiguous(), noncontiguous_like(dout))]
    if DEVICE.type == "cpu" and op.name == ATTENTION and sample.input.requires_grad:
        # A second and more for each; the twin shall do.
        pairs = pairs[1:]
    for x, dy in pairs:
        given = [t.detach() for t in (*tensors(x), dy)]
        before = [t.clone() for t in given]
        out = call(OURS[op.name], x)
        yield out.detach(), gradients(out, x, dy)
        torch.testing.assert_close(given, before, rtol=0, atol=0, equal_nan=True)


def run_in_float64(op, sample, dout):
    """Output and gradients of torch's function in float64."""
    wide = sample.transform(lambda x: x.double() if isinstance(x, torch.Tensor) else x)
    for x, original in zip(tensors(wide), tensors(sample), strict=True):
        x.requires_grad_(original.requires_grad)
    # Without an eps, rms_norm takes that of the dtype it computes in, for 16 bits as for float32.
    is_narrow = op.name == "nn.functional.rms_norm" and sample.input.dtype != torch.float64
    out = call(op, wide, **({"eps": torch.finfo(torch.float32).eps} if is_narrow else {}))
    return out.detach(), gradients(out, wide, dout.double())


def gradient_terms(op, sample, dout):
    """How large the terms are that a gradient sums: they may cancel, all of them in a row of one."""
    terms = dout.double()
    if op.name == ATTENTION:
        terms = terms * math.prod(t.detach().double().abs().amax() for t in sample.args)
    elif op.name == "nn.functional.layer_norm":
        n_dims, eps = len(sample.args[0]), sample.kwargs.get("eps", 1e-5)
        rows = sample.input.detach().double().flatten(-n_dims)
        variance = (rows - rows.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
        terms = terms.flatten(-n_dims) * (variance + eps).rsqrt()
    return terms.flatten()


def check(op, sample):
    """Ours is as accurate as torch's, and equal for integers."""
    expected = call(op, sample)
    dout = random_like(expected)
    if not expected.is_floating_point():
        for out, _ in run_ours(op, sample, dout):
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
        return
    expected_grads = gradients(expected, sample, dout)
    reference, reference_grads = run_in_float64(op, sample, dout)
    for out, grads in run_ours(op, sample, dout):
        assert_as_accurate_as_torch(out, expected.detach(), reference, floor=FLOOR[out.dtype])
        for mine, theirs, exact in zip(grads, expected_grads, reference_grads, strict=True):
            assert mine.shape == theirs.shape
            # Errors count relative to the terms too, which stand beside the gradient here.
            terms = gradient_terms(op, sample, dout).to(mine.dtype)
            three = [torch.cat([x.flatten(), terms.to(x.dtype)]) for x in (mine, theirs, exact)]
            assert_as_accurate_as_torch(*three, factor=3, floor=FLOOR[mine.dtype])


def test_every_function_has_samples():
    assert {op.name for op in OPS} == set(OURS)


@pytest.mark.parametrize("op, dtype", [case for case in CASES if case.values[0].name != "nn.functional.dropout"])
def test_samples(op, dtype, device):
    n_run = n_refused = 0
    refusal = REFUSED.get(op.name)
    # Where the interpreter takes them one after another, all of float32, and some of the other floats.
    step = {torch.float16: 3, torch.bfloat16: 3, torch.float64: 2}.get(dtype, 1) if device.type == "cpu" else 1
    for sample in itertools.islice(samples(op, dtype, device), None, None, step):
        if refusal and refusal.applies(sample):
            with pytest.raises((TypeError, ValueError), match=refusal.message):
                call(OURS[op.name], sample)
            n_refused += 1
        else:
            check(op, sample)
            n_run += 1
    assert n_run > 0
    assert n_refused <= (refusal.most if refusal else 0)


@pytest.mark.parametrize("op, dtype", [case for case in CASES if case.values[0].name == "nn.functional.dropout"])
def test_samples_of_dropout(op, dtype, device):
    n_kept = n_dropped = 0
    for sample in samples(op, dtype, device):
        expected = call(op, sample)
        dout = random_like(expected)
        p = sample.kwargs.get("p", 0.5) if sample.kwargs.get("training", True) else 0
        scale = 1 / (1 - p) if p < 1 else 0
        for out, grads in run_ours(op, sample, dout):
            assert out.dtype == expected.dtype and out.device == expected.device
            kept = out != 0
            for x, result in (sample.input, out), *((dout, dx) for dx in grads):
                assert torch.equal(result, torch.where(kept, x.detach().double() * scale, 0).to(dtype))
            if p in (0, 1):
                assert torch.equal(out, expected)
            else:
                n_kept, n_dropped = n_kept + kept.sum(), n_dropped + (~kept).sum()
    assert n_kept > 0 and n_dropped > 0


@pytest.mark.parametrize("op", [named(op) for op in OPS if op.supported_dtypes(DEVICE.type) - set(dtypes(op))])
def test_other_dtypes_are_refused(op, device):
    for dtype in op.supported_dtypes(device.type) - set(dtypes(op)):
        sample = next(iter(op.sample_inputs(str(device), dtype)))
        got = str(dtype).removeprefix("torch.")
        with pytest.raises(TypeError, match=rf"^\w+: \w+ must have one of the dtypes .*, got {got}$"):
            call(OURS[op.name], sample)


def test_what_torch_refuses_is_refused(device):
    errors = [(op, error) for op in OPS if op.error_inputs_func for error in op.error_inputs(str(device))]
    assert errors
    for op, error in errors:
        with pytest.raises(error.error_type):
            call(op, error.sample_input)
        arguments = "|".join(inspect.signature(OURS[op.name]).parameters)
        with pytest.raises((TypeError, ValueError), match=rf"^\w+: ({arguments}) must"):
            call(OURS[op.name], error.sample_input)
