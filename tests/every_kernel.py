"""Runs every kernel of the package on awkward inputs, for a tool that watches the process, such as compute-sanitizer.

Prints how often each kernel ran, and fails when one of them did not.
"""

import collections
import importlib
import pkgutil

import torch
import triton

import triton_gallery as tg
from triton_gallery import _launch, _replay
from triton_gallery._replay import forget_replays

F16, F32, F64 = torch.float16, torch.float32, torch.float64
DEVICE = torch.accelerator.current_accelerator(check_available=True)


def random(*shape, dtype=F16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def attention(seq_q, seq_k, head_dim, dtype=F16, heads=(2, 2), head_dim_v=None, **options):
    q = random(2, heads[0], seq_q, head_dim, dtype=dtype)
    k, v = (random(2, heads[1], seq_k, d, dtype=dtype) for d in (head_dim, head_dim_v or head_dim))
    return lambda *x: tg.attention(*x, enable_gqa=True, **options), [q, k, v]


# Functions with the tensors they take; gradients are computed for each where the dtype has them.
CALLS = [
    (tg.add, [random(1008), random(1008)]),
    (tg.add, [random(1001), random(1001)]),
    (lambda x, y: tg.add(x, y, alpha=2), [random(37, 21), random(37, 1, dtype=F32)]),
    (tg.add, [random(3, 1031), random(1031)]),
    (tg.softmax, [random(37, 781)]),
    (tg.log_softmax, [random(5, 129, dtype=F64)]),
    (tg.softmax, [random(37, 1000)]),
    (tg.softmax, [random(1300, 2501)]),
    (tg.softmax, [random(37, 5008)]),
    (tg.softmax, [random(3, 16400)]),
    (tg.softmax, [random(300, 16400)]),
    (tg.softmax, [random(300, 20001)]),
    (tg.softmax, [random(70, 110600)]),
    (tg.softmax, [random(70, 160001)]),
    (tg.softmax, [random(70, 20001, dtype=F64)]),
    (tg.log_softmax, [random(3, 110592)]),
    (tg.softmax, [random(2, 70001, dtype=F32)]),
    (lambda x: tg.softmax(x, 1), [random(3, 301, 33)]),
    (lambda x: tg.softmax(x, 0), [random(3001, 7, dtype=F32)]),
    (lambda x: tg.softmax(x, 0), [random(1901, 37)]),
    (lambda x: tg.softmax(x, 0), [random(9001, 37)]),
    (tg.softmax, [random(5, 300_007)]),
    (lambda x: tg.dropout(x, 0.3), [random(1001)]),
    (lambda x: tg.dropout(x, 0.3, seed=1), [random(3, 33, 65).mT]),
    (lambda x: tg.dropout(x, 0.3, seed=1), [random(3, 64, 65).mT]),
    (lambda x, w, b: tg.layer_norm(x, (781,), w, b), [random(2**21 // 781 + 1, 781), random(781), random(781)]),
    (lambda x, w, b: tg.layer_norm(x, (100,), w, b), [random(9, 100), random(100), random(100)]),
    (lambda x, w: tg.rms_norm(x, (96,), w), [random(70, 96), random(96)]),
    (lambda x, w, b: tg.layer_norm(x, (1000,), w, b), [random(300, 1000), random(1000), random(1000)]),
    (lambda x, w, b: tg.layer_norm(x, (9, 13), w, b), [random(65, 9, 13, dtype=F32), *random(2, 9, 13, dtype=F32)]),
    (lambda x, w: tg.rms_norm(x, (40999,), w), [random(3, 40999), random(40999)]),
    (lambda x: tg.layer_norm(x, (9001,)), [random(5, 9001)]),
    (lambda x, w, b: tg.layer_norm(x, (2064,), w, b), [random(500, 2064), random(2064), random(2064)]),
    (lambda x, w, b: tg.layer_norm(x, (2501,), w, b), [random(500, 2501), random(2501), random(2501)]),
    (lambda x: tg.rms_norm(x, (5136,)), [random(3, 5136)]),
    (lambda x, w: tg.rms_norm(x, (50001,), w), [random(5, 50001), random(50001)]),
    (lambda x, w, b: tg.layer_norm(x, (70000,), w, b), [random(40, 70000), random(70000), random(70000)]),
    (lambda x, w, b: tg.layer_norm(x, (11008,), w, b), [random(300, 11008), random(11008), random(11008)]),
    (lambda x, w: tg.layer_norm(x, (13001,), w), [random(3, 13001, dtype=F64), random(13001, dtype=F64)]),
    (lambda x: tg.rms_norm(x, (12304,)), [random(3, 12304)]),
    (tg.matmul, [random(65, 129), random(129, 33)]),
    (tg.matmul, [random(65, 128), random(128, 48)]),
    (tg.matmul, [random(3, 65, 129, dtype=F32), random(129, 33, dtype=F32)]),
    (tg.matmul, [random(600, 700, dtype=F32), random(700, 650, dtype=F32)]),
    (tg.matmul, [random(1100, 260, dtype=F32), random(260, 1301, dtype=F32)]),
    (lambda a, b, c: tg.matmul(a, b, bias=c, activation="gelu"), [random(255, 130), random(130, 129), random(129)]),
    # No gradients for this one, which torch would compute from the result: initcheck does not see what TMA writes.
    (lambda a, b: tg.matmul(a.detach(), b.detach(), activation="relu"), [random(2048, 192), random(192, 1600)]),
    (tg.matmul, [random(2048, 192, dtype=torch.bfloat16), random(192, 1600, dtype=torch.bfloat16)]),
    (lambda a, b, c: tg.matmul(a, b, bias=c, activation="gelu"), [random(64, 8192), random(8192, 256), random(256)]),
    (tg.matmul, [random(512, 16384), random(512, 16384).t()]),
    # Tiles of two blocks of columns.
    (lambda a, b: tg.matmul(a.detach(), b.detach()), [random(1024, 1040), random(1040, 2240)]),
    # Programs share tiles: a part of K each, and rows.
    (lambda a, b: tg.matmul(a.detach(), b.detach()), [random(2112, 4096), random(4096, 2496)]),
    (lambda a, b: tg.matmul(a.detach(), b.detach()), [random(3, 1024, 1024), random(3, 1024, 1024)]),
    (tg.matmul, [random(70, 5001), random(5001)]),
    (tg.matmul, [random(2, 1, 131), random(2, 131, 67)]),
    (lambda a, b: tg.matmul(a.detach(), b.detach()), [random(1023, 2049), random(2049, 1025)]),
    (tg.matmul, [random(300, 256).to(torch.float8_e5m2), random(400, 256).to(torch.float8_e5m2).t()]),
    attention(70, 131, 40),
    attention(3, 1031, 72, heads=(8, 2), window=(900, 5)),
    attention(131, 70, 33, is_causal=True),
    attention(70, 131, 64, dtype=F32, window=(20, 3)),
    # In parts
    *(
        attention(640, 600, d, dtype=F32, heads=(4, 2), head_dim_v=dv, is_causal=causal)
        for d, dv in ((24, 32), (40, 40), (90, 96), (128, 20), (200, 256))
        for causal in (False, True)
    ),
    attention(65, 64, 80, dtype=F64, heads=(4, 2)),
    attention(256, 256, 256, is_causal=True),
    *(attention(256, 256, d, is_causal=causal) for d in (64, 128) for causal in (False, True)),
    *(attention(300, 333, d, is_causal=causal) for d in (64, 128) for causal in (False, True)),
    attention(300, 333, 128, heads=(4, 2), return_lse=False, causal_alignment="bottom-right", is_causal=True),
    attention(300, 333, 90, heads=(4, 2), window=(90, 5)),
    attention(300, 200, 256, window=(90, None)),
    attention(300, 333, 150, heads=(4, 2)),
    attention(300, 333, 192, head_dim_v=128, is_causal=True),
    *(attention(49, 41, d, heads=(100, 100), is_causal=causal) for d in (64, 100) for causal in (False, True)),
    *(attention(160, 300, d, heads=(95, 95), is_causal=causal) for d in (64, 128) for causal in (False, True)),
    *(attention(s, s, 64, heads=(95, 95), is_causal=causal) for s in (90, 220) for causal in (False, True)),
    attention(200, 150, 40, heads=(95, 95), window=(50, 5)),
    attention(10, 15, 33, heads=(4, 2), window=(3, 5)),
    attention(100, 77, 24, head_dim_v=32),
    attention(49, 41, 64, head_dim_v=128),
    attention(1, 300, 128, heads=(400, 100)),
    attention(40, 700, 128),
]


# Initcheck does not see what TMA writes, so the tensors that kernels for Hopper may write so start as zeros here. That
# they write all of it is what the tests check, on memory filled with NaN.
attention_module = importlib.import_module("triton_gallery.attention")
empty_as = attention_module._empty_as
attention_module._empty_as = lambda *args: empty_as(*args).zero_()
for name in ("attention_forward", "attention_backward", "attention_heads_backward"):
    if (module := tg.hopper.load(name)) is not None:
        module.padded = lambda x: _launch.padded(x).zero_()
for name in ("matmul_plan", "matmul_float32"):
    if (plan := tg.hopper.load(name)) is not None:
        plan.scratch = lambda *args: _launch.scratch(*args).zero_()
_replay._empty_strided = None  # calls that are replayed take the function below instead
empty_strided = torch.empty_strided
torch.empty_strided = lambda *args, **kwargs: empty_strided(*args, **kwargs).zero_()


def run_all() -> None:
    torch.manual_seed(0)
    for function, tensors in CALLS:
        leaves = [x.detach().requires_grad_(x.dtype in (F16, F32, F64)) for x in tensors]
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            # A kernel that this concerns does not ask for that mode as well.
            torch.set_float32_matmul_precision("high" if deterministic else "highest")
            # Without NaN in new memory, or a tool would not see who forgot to write.
            torch.utils.deterministic.fill_uninitialized_memory = False
            out = function(*leaves)
            if out.requires_grad:
                torch.autograd.grad(out, leaves, torch.randn_like(out))
            with torch.no_grad():
                function(*leaves)
    if (tma := tg.hopper.load("matmul")) is not None:
        # Not called where Gluon's kernel can be: it takes its place with Tritons that lack a piece of Gluon.
        a, b, out = random(300, 264), random(264, 400), random(300, 400)
        tma.multiply(a, b, None, out, None, None, False, ((1,), [(0,), (0,)]))
    torch.accelerator.synchronize()


def all_kernels() -> set[str]:
    """The names of all kernels in the package."""
    names = set()
    for info in pkgutil.walk_packages(tg.__path__, f"{tg.__name__}."):
        members = vars(importlib.import_module(info.name))
        names |= {x.fn.__name__ for x in members.values() if isinstance(x, triton.runtime.jit.JITFunction)}
    return {name for name in names if name.endswith("_kernel")}


if __name__ == "__main__":
    launches = collections.Counter()
    hook = triton.knobs.runtime.launch_enter_hook

    def count(metadata):
        launches[metadata.get()["name"]] += 1

    hook.add(count)
    run_all()
    hook.remove(count)
    # Without the hook, calls after the first take the short ways of `_launch` and `_replay`.
    forget_replays()
    for _ in range(3):
        run_all()
    for name in sorted(all_kernels()):
        print(f"{name}: {launches[name]}")
    missing = all_kernels() - set(launches)
    assert not missing, f"these kernels did not run: {', '.join(sorted(missing))}"
