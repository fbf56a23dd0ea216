"""The reader of compiled kernels, on kernels small enough to know what the compiler must make of them."""

import functools
import importlib
import io
import json
import os
import pickle
import re
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import triton_gallery
from triton_gallery import _assembly, _launch, codegen
from triton_gallery._listing import by_line


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    a = tl.load(a_ptr + rows * BLOCK + cols)
    b = tl.load(b_ptr + rows * BLOCK + cols)
    tl.store(c_ptr + rows * BLOCK + cols, tl.dot(a, b))


@triton.jit
def _copy_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


@triton.jit
def _centre_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, x - tl.max(x, axis=0))


@triton.jit
def _descriptor_kernel(x_desc, out_desc):
    out_desc.store([0, 0], x_desc.load([0, 0]))


def dot(a, b):
    out = torch.empty_like(a, dtype=torch.float32)
    _launch.launch(_dot_kernel, (1,), a, b, out, BLOCK=64)
    return out


def copy(x):
    _launch.launch(_copy_kernel, (1,), x, torch.empty_like(x), BLOCK=1024)


def centre(x):
    _launch.launch(_centre_kernel, (1,), x, torch.empty_like(x), BLOCK=16384, num_warps=1)


def copy_through_descriptor(x):
    descriptors = [TensorDescriptor.from_tensor(t, [64, 64]) for t in (x, torch.empty_like(x))]
    _launch.launch(_descriptor_kernel, (1,), *descriptors)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx, dout):
        copy(dout)
        return dout


def copy_once(x, done):
    """Leaves something in an argument, as whoever keeps a workspace there does."""
    if not done:
        copy(x)
        done.append(1)


def leave(x):
    sys.exit("no more")


def complain(x):
    raise ValueError(f"interpreter {_launch.INTERPRET}, {x.device}, {x.dtype}")


@triton.jit
def _misspelt(x):
    return x.no_such_method()


@triton.jit
def _kernel_of_the_misspelt(x_ptr):
    tl.store(x_ptr, _misspelt(tl.load(x_ptr)))


def misspelt(x):
    _launch.launch(_kernel_of_the_misspelt, (1,), x)


@triton.jit
def _uneven(x):
    return x + tl.sum(tl.arange(0, 7), axis=0)


@triton.jit
def _kernel_of_the_uneven(x_ptr):
    tl.store(x_ptr, _uneven(tl.load(x_ptr)))


def uneven(x):
    _launch.launch(_kernel_of_the_uneven, (1,), x)


def chained(x):
    try:
        {}["head"]
    except KeyError as error:
        raise ValueError("chained: there must be a head") from error


def empty(*shape, dtype=torch.float16):
    return torch.empty(*shape, dtype=dtype, device="meta")


# A call that several tests compile, and where they share what one process keeps of it.
ADD = (triton_gallery.add, *[empty(2**20)] * 2)
in_one_process = pytest.mark.xdist_group("codegen")


def test_child_compiles_whatever_this_process_does():
    with pytest.raises(
        RuntimeError, match=r"complain failed for sm_90: ValueError: interpreter False, meta, torch.int8"
    ):
        codegen.inspect(complain, torch.zeros(3, dtype=torch.int8), targets=["sm_90"])


@in_one_process
def test_add_for_every_target():
    report = codegen.inspect(*ADD)
    assert [k.target for k in report.kernels] == list(codegen.TARGETS)
    for kernel in report.kernels:
        assert kernel.name == "_add_kernel" and kernel.num_warps == 4
        assert 0 < kernel.registers < 64 and kernel.spills == kernel.stack == kernel.shared == 0
        assert kernel.matrix == {} and kernel.tma_loads == kernel.tma_stores == 0 and kernel.warnings == ()
    by_target = {k.target: (k.load_bits, k.store_bits) for k in report.kernels}
    assert by_target["sm_80"] == by_target["sm_90"] == by_target["sm_100"] == (128, 128)
    assert by_target["gfx942"] == (64, 64)  # 1024 elements over 256 threads leave four for each


@in_one_process
def test_source_by_stage():
    report = codegen.inspect(*ADD)
    assert ".target sm_90a" in report.source()
    assert "LDG.E.128" in report.source("_add_kernel", target="sm_80", kind="sass")
    assert "buffer_load_dwordx2" in report.source(target="gfx942", kind="amdgcn")
    assert "tt.load" in report.source(kind="ttir") and "#ttg.blocked" in report.source(kind="ttgir")
    with pytest.raises(ValueError, match="no kernel _sub_kernel for sm_90; the report has _add_kernel for sm_80"):
        report.source("_sub_kernel")
    with pytest.raises(ValueError, match="kind must be one of ttir, ttgir, llir, ptx, sass, got 'amdgcn'"):
        report.source(kind="amdgcn")
    with pytest.raises(ValueError, match="kind must be one of ttir, ttgir, llir, amdgcn, got 'sass'"):
        report.source(target="gfx942", kind="sass")
    with pytest.raises(ValueError, match=r"llir, ptx, sass, got \['ptx'\]"):
        report.source(kind=["ptx"])


@triton.jit
def _double_kernel(x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, 2 * tl.load(x_ptr + offsets))


_tuned_kernel = triton.autotune([triton.Config({"BLOCK": n}) for n in (64, 128)], key=[])(_double_kernel)


def double(x):
    _double_kernel[(1,)](x, BLOCK=32)
    _tuned_kernel[(1,)](x)


CALLS = {
    "misspelt": (misspelt, [empty(8)]),
    "uneven": (uneven, [empty(8)]),
    "chained": (chained, [empty(8)]),
    "dot": (dot, [empty(64, 64)] * 2),
    "aligned": (copy, [empty(2048)]),
    "odd address": (copy, [empty(2048)[1:]]),
    "large": (centre, [empty(16384, dtype=torch.float32)]),
    "descriptor": (copy_through_descriptor, [empty(64, 64)]),
    "nothing": (triton_gallery.add, [empty(0)] * 2),
    "partial": (functools.partial(triton_gallery.add, alpha=2), [empty(64)] * 2),
    "without the package": (double, [empty(128)]),
    "once": (copy_once, [empty(2048), []]),
    "exit": (leave, [empty(8)]),
}


@pytest.fixture(scope="module")
def outcomes():
    """What one child says of all these calls: for each of them and each target, its kernels or what is wrong."""
    calls = [(function, args, {}, False) for function, args in CALLS.values()]
    found = codegen._compile(codegen._pack(calls, codegen.TARGETS))
    return {name: dict(zip(codegen.TARGETS, each, strict=True)) for name, each in zip(CALLS, found, strict=True)}


@in_one_process
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misspelt", r"(?s).*def _misspelt.*no_such_method"),
        ("uneven", r"(?s).*def _uneven.*arange.*power of 2"),
        ("chained", "ValueError: chained: there must be a head"),
    ],
)
def test_what_is_wrong_is_told_where_it_is(outcomes, name, message):
    assert re.match(message, outcomes[name]["sm_90"])


@in_one_process
def test_matrix_instructions_by_family(outcomes):
    families = {target: list(kernel.matrix) for target, (kernel,) in outcomes["dot"].items()}
    assert families == {"sm_80": ["mma"], "sm_90": ["wgmma"], "sm_100": ["tcgen05"], "gfx942": ["mfma"]}
    assert all(kernel.shared > 0 for target, (kernel,) in outcomes["dot"].items() if target != "gfx942")


@in_one_process
@pytest.mark.parametrize(("name", "bits"), [("aligned", 128), ("odd address", 16)])
def test_load_width_follows_alignment(outcomes, name, bits):
    (kernel,) = outcomes[name]["sm_90"]
    assert kernel.load_bits == bits


@in_one_process
def test_spills_are_counted(outcomes):
    (kernel,) = outcomes["large"]["sm_90"]
    assert kernel.registers <= 255 and kernel.spills > 0 and kernel.stack > 0


@in_one_process
def test_tensor_descriptor_becomes_tma(outcomes):
    kernels = [kernel for target in ("sm_80", "sm_90") for kernel in outcomes["descriptor"][target]]
    assert [(k.tma_loads, k.tma_stores) for k in kernels] == [(0, 0), (1, 1)]
    assert "TMA" in str(codegen.Report(tuple(kernels)))


def test_backward_compiles_the_gradients_kernels():
    (kernel,) = codegen.inspect(_Twice.apply, empty(2048), targets=["sm_90"], backward=True).kernels
    assert kernel.name == "_copy_kernel"


@in_one_process
def test_nothing_launched(outcomes):
    report = codegen.Report(tuple(outcomes["nothing"]["sm_90"]))
    assert report.kernels == () and "no kernel" in str(report) and "no kernel" in report._repr_html_()


@in_one_process
def test_partial_function(outcomes):
    assert outcomes["partial"]["sm_90"][0].name == "_add_strided_kernel"


@in_one_process
def test_kernels_that_are_launched_without_the_package(outcomes):
    kernels = outcomes["without the package"]["sm_90"]
    assert [kernel.name for kernel in kernels] == ["_double_kernel"] * 3
    assert sorted(re.search(r"end = (\d+)", kernel.asm["ttir"])[1] for kernel in kernels) == ["128", "32", "64"]


def test_each_target_has_arguments_of_its_own(outcomes):
    assert all([kernel.name for kernel in found] == ["_copy_kernel"] for found in outcomes["once"].values())


def test_a_function_that_ends_the_process_failed(outcomes):
    assert set(outcomes["exit"].values()) == {"SystemExit: no more"}


def test_settings_of_torch_are_those_of_the_call():
    # One that other tests compile as well.
    q = empty(4, 8, 2048, 64)
    x, before = empty(64, 64, dtype=torch.float32), torch.get_float32_matmul_precision()
    calls = [
        (triton_gallery.matmul, [x, x.mT], {}, False),
        (triton_gallery.attention, [q, q, q], {}, True),
        (triton_gallery.add, [empty(64, dtype=torch.int32), 1.5], {}, False),
    ]

    def kernels(precision, deterministic, dtype):
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_default_dtype(dtype)
        (((product,),), (gradients,), ((total,),)) = codegen._compile(codegen._pack(calls, ("sm_90",)))
        return product.matrix, {kernel.name for kernel in gradients}, total.asm["ttir"]

    try:
        rounded, atomic, single = kernels("high", False, torch.float32)
        whole, repeatable, double = kernels("highest", True, torch.float64)
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert 0 < rounded["wgmma"] < whole["wgmma"]  # a float32 product takes several of parts that are rounded
    assert "_attention_dq_hopper_kernel" in repeatable - atomic
    assert "out_ptr: !tt.ptr<f32>" in single and "out_ptr: !tt.ptr<f64>" in double


@in_one_process
def test_same_call_is_compiled_once(monkeypatch):
    before = codegen.inspect(copy, empty(2048), targets=["sm_90"])
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("a second child was started"))
    assert codegen.inspect(copy, empty(2048), targets=["sm_90"]) == before


def no_child(*args, **options):
    raise ChildProcessError("a child was started")


@in_one_process
@pytest.mark.parametrize("name", ["DISABLE_PTXAS_OPT", "TRITON_F32_DEFAULT", "LLVM_PASS_PLUGIN_PATH"])
def test_same_call_with_other_settings_of_the_compilers_is_compiled_anew(name, monkeypatch):
    codegen.inspect(copy, empty(2048), targets=["sm_90"])
    monkeypatch.setattr(subprocess, "run", no_child)
    monkeypatch.setenv("OTHER", "1")
    assert codegen.inspect(copy, empty(2048), targets=["sm_90"]).kernels
    monkeypatch.setenv(name, "1")
    with pytest.raises(ChildProcessError):
        codegen.inspect(copy, empty(2048), targets=["sm_90"])


def test_what_failed_is_tried_anew(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    with pytest.raises(RuntimeError, match=r"inspect: copy failed for sm_80: NotADirectoryError: .*cache"):
        codegen.inspect(copy, empty(2048), targets="sm_80")
    cache.unlink()
    assert codegen.inspect(copy, empty(2048), targets="sm_80").kernels


def tell_path(x):
    raise ValueError(json.dumps(sys.path))


def test_child_looks_for_modules_where_this_process_does(tmp_path, monkeypatch):
    path = [str(tmp_path / "a:b"), "", "relative", *sys.path]
    monkeypatch.setattr(sys, "path", path)
    with pytest.raises(RuntimeError, match=re.escape(f"ValueError: {json.dumps(path)}")):
        codegen.inspect(tell_path, empty(8), targets="sm_80")


def test_child_needs_a_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(RuntimeError, match="inspect: the compiling process needs a working directory, and it is gone"):
        codegen.inspect(copy, empty(4096), targets="sm_80")


def test_tensors_keep_their_layout():
    memory = torch.zeros(1000)
    views = [memory, memory[3:].as_strided((5, 4), (7, 0)), memory[1:1], torch.zeros(0, 3), torch.tensor(1.0)]
    request = codegen._pack([(copy, (views,), {}, False)], ("sm_90",))
    ((_, (arrived,), _, _),), *_ = codegen._Unpickler(codegen.io.BytesIO(request)).load()
    for view, copied in zip(views, arrived, strict=True):
        assert copied.device.type == "meta" and copied.dtype == view.dtype and copied.shape == view.shape
        assert copied.stride() == view.stride() and copied.storage_offset() == view.storage_offset()


@pytest.mark.parametrize("target", ["sm90", "sm_9", "sm_९०", "cuda", "gfx9", "h200", 90])
def test_refuses_an_unknown_target(target):
    with pytest.raises(ValueError, match=f'inspect: targets must be names such as "sm_90" or "gfx942", got {target!r}'):
        codegen.inspect(copy, empty(2048), targets=[target])


@in_one_process
def test_one_target_needs_no_list():
    request = codegen._pack([(copy, (empty(2048),), {}, False)], ("sm_90",))
    assert codegen.inspect(copy, empty(2048), targets="sm_90").kernels == tuple(codegen._compile(request)[0][0])
    with pytest.raises(ValueError, match='inspect: targets must be names such as "sm_90" or "gfx942", got \'cuda\''):
        codegen.inspect(copy, empty(2048), targets="cuda")
    with pytest.raises(ValueError, match='inspect: targets must be names such as "sm_90" or "gfx942", got b\'sm_90\''):
        codegen.inspect(copy, empty(2048), targets=b"sm_90")
    with pytest.raises(ValueError, match='inspect: targets must be names such as "sm_90" or "gfx942", got 90'):
        codegen.inspect(copy, empty(2048), targets=90)
    with pytest.raises(ValueError, match="inspect: targets must name one target or more, got none"):
        codegen.inspect(copy, empty(2048), targets=[])


@in_one_process
def test_who_asks_again_gets_kernels_of_their_own():
    (kernel,) = codegen.inspect(copy, empty(2048), targets="sm_90").kernels
    ptx = kernel.asm["ptx"]
    kernel.asm.clear()
    kernel.matrix["mma"] = 3
    (again,) = codegen.inspect(copy, empty(2048), targets="sm_90").kernels
    assert again.asm["ptx"] == ptx and again.matrix == {}


def test_kernels_ask_for_fused_products_and_sums():
    class Kernel:
        def warmup(self, *args, **options):
            return options

    with _launch.compile_only() as options:
        _launch.launch(Kernel(), (1,), empty(2048))
    assert options[0]["enable_fp_fusion"] is True  # Triton 3.9 warns of its default, and 3.10 has another


def test_a_kernel_is_not_what_launches_it():
    kernel = triton_gallery.vector_add._add_kernel
    for given in (kernel, triton.autotune([triton.Config({})], key=[])(kernel)):
        with pytest.raises(TypeError, match="inspect: function must be one that launches kernels, got the kernel _add"):
            codegen.inspect(given, empty(2048))


def test_refuses_a_function_without_an_importable_name():
    with pytest.raises(
        TypeError, match=r"function must be importable in another process, got test_codegen\..*<lambda>"
    ):
        codegen.inspect(lambda x: x, empty(2048))
    with pytest.raises(TypeError, match="importable in another process, got test_codegen"):
        codegen.inspect(functools.partial(lambda x: x), empty(2048))
    with pytest.raises(TypeError, match="function must be callable, got NoneType"):
        codegen.inspect(None, empty(2048))


def test_refuses_arguments_that_cannot_travel():
    with pytest.raises(TypeError, match="must travel to another process"):
        codegen.inspect(copy, lambda: 1)
    with pytest.raises(TypeError, match=r"tensors must be dense \(strided\), got layout torch.sparse_coo"):
        codegen.inspect(copy, torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"tensors must be dense \(strided\), got a nested one"):
        codegen.inspect(copy, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    with pytest.raises(TypeError, match=r"must travel to another process: .*storage"):
        codegen.inspect(copy, torch._efficientzerotensor((3, 4)))
    with pytest.raises(TypeError, match="inspect: backward must be True or False, got 'no'"):
        codegen.inspect(copy, empty(2048), backward="no")


def test_a_function_that_belongs_to_no_module_is_no_obstacle(monkeypatch):
    monkeypatch.setitem(globals(), "made", eval("lambda: None", {}))
    assert made.__module__ is None  # noqa: F821
    assert codegen.inspect(copy, empty(2048)).kernels


def test_child_that_dies_is_reported():
    with pytest.raises(RuntimeError, match="the compiling process failed: exit status 3"):
        codegen.inspect(os._exit, 3)
    with pytest.raises(RuntimeError, match="the compiling process failed: exit status 0"):
        codegen.inspect(os._exit, 0)


def test_warp_size_follows_the_family():
    assert [codegen._parse(t).warp_size for t in ("sm_80", "gfx90a", "gfx942", "gfx1100", "gfx1250")] == [
        32,
        64,
        64,
        32,
        32,
    ]


def test_report_as_text_and_html():
    kernel = codegen.Kernel(
        "_f<1>", "sm_90", 8, 3, None, None, None, 1024, 128, None, 0, 0, {"wgmma": 2}, (), {}, ("", 0, ())
    )
    lines = str(codegen.Report((kernel,))).splitlines()
    assert lines[0].split("  ")[0] == "kernel" and "1,024" in lines[1] and "2 wgmma" in lines[1]
    assert "registers" not in lines[0] and "warnings" not in lines[0]  # columns without an entry are left out
    text = codegen.Report((kernel,))._repr_html_()
    assert text.startswith('<div class="codegen-table"') and '<th scope="row">_<wbr>f&lt;1&gt;</th>' in text


def test_serialised_wgmma_is_named():
    log = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x"
    read = _assembly.read_ptx("", log)
    assert read["warnings"] == (log.partition(": ")[2],) and read["registers"] is None


@pytest.mark.parametrize(
    ("instruction", "bits"),
    [
        ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", 128),
        ("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.b64 {%rd1, %rd2}, [%rd3], %rd4;", 128),
        ("ld.global.v8.b32 { %r1 }, [ %rd1 + 0 ];", 256),
        ("ld.global.b16 { %rs1 }, [ %rd1 + 0 ];", 16),
        ("ld.relaxed.gpu.global.f32 %f1, [%rd1];", 32),
        ("ld.global .u32 %r1, [%rd1]; ld.global.u8 %rs1, [%rd1];", 8),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", 128),
        ("cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 4, 4;", 32),
        ("ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5]; ld.param.b64 %rd1, [p];", None),
    ],
)
def test_width_of_a_load_in_ptx(instruction, bits):
    assert _assembly.read_ptx(instruction, "")["load_bits"] == bits


def test_rows_that_tma_gathers_and_scatters_are_counted():
    ptx = """
        cp.async.bulk.tensor.2d.tile::gather4.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {}], [%r2];
        cp.async.bulk.tensor.2d.tile::scatter4.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2];
    """
    read = _assembly.read_ptx(ptx, "")
    assert read["tma_loads"] == read["tma_stores"] == 1


@pytest.mark.parametrize(
    ("instruction", "bits"),
    [
        ("global_load_dwordx4 v[0:3], v0, s[0:1]", 128),
        ("buffer_load_dword v1, off, s[0:3], 0", 32),
        ("global_load_ushort v1, v0, s[0:1]", 16),
        ("global_load_short_d16_hi v1, v0, s[0:1]", 16),
        ("global_load_sbyte v1, v0, s[0:1]", 8),
        ("global_load_d16_b16 v1, v0, s[0:1]", 16),
        ("global_load_d16_hi_u8 v1, v0, s[0:1]", 8),
        ("buffer_load_b128 v[0:3], off, s[0:3], 0", 128),
        ("s_load_dwordx4 s[0:3], s[4:5], 0x0; scratch_load_dword v1, off", None),
    ],
)
def test_width_of_a_load_in_amdgcn(instruction, bits):
    assert _assembly.widest_amd("load", instruction) == bits


@pytest.mark.slow
def test_without_ptxas_the_ptx_is_still_read(tmp_path):
    request = codegen._pack([(copy, (empty(2048),), {}, False)], ("sm_90", "sm_100"))
    program = (
        "import triton; triton.knobs.NvidiaTool.from_path = staticmethod(lambda path: None)\n"
        "from triton_gallery import codegen; codegen._serve()"
    )
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    child = subprocess.run([sys.executable, "-c", program], input=request, env=env, stdout=subprocess.PIPE, check=True)
    ((*outcomes,),) = pickle.loads(child.stdout.partition(codegen._ANSWER)[2])
    for (kernel,) in outcomes:
        assert kernel.load_bits == 128 and kernel.registers is None and kernel.spills is None


# --- line by line ---


def at(listing, text):
    """The only line of the source that contains `text`."""
    (i,) = [i for i, line in enumerate(listing.source) if text in line]
    return i


@in_one_process
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_listing_puts_instructions_beside_their_line(target):
    listing = codegen.listing(triton_gallery.softmax, empty(4096, 1024), target=target)
    assert (listing.kernel, listing.target) == ("_softmax_fwd_kernel", target)
    machine = {"sm_90": "ptx", "gfx942": "amdgcn"}[target]
    load, store, maximum = at(listing, "tl.load("), at(listing, "tl.store("), at(listing, "tl.max(")
    found = {kind: {i: " ".join(lines) for i, lines in stage.items()} for kind, stage in listing.stages.items()}
    assert "tt.load" in found["ttir"][load] and "load" in found["ttgir"][load]
    assert "tt.store" in found["ttir"][store]
    assert ("ld.global" if machine == "ptx" else "buffer_load") in found[machine][load]
    assert ("st.global" if machine == "ptx" else "buffer_store") in found[machine][store]
    assert "#blocked = #ttg.blocked<" in found["ttgir"][0]
    # What a reduction from Triton's library became belongs to the line that calls it.
    assert "tt.reduce" in found["ttir"][maximum]
    assert ("max" if machine == "ptx" else "v_max") in found[machine][maximum]
    assert not any("tl.load" in line or "loc(" in line for stage in found.values() for line in stage.values())
    if target == "sm_90" and not triton.knobs.nvidia.ptxas:
        return
    if target == "sm_90" and not triton.__version__.startswith("3.8."):  # whose assembler is told other lines
        assert "LDG" in found["sass"][load] and "STG" in found["sass"][store]
        assert "SHFL" in found["sass"][len(listing.source)]


@in_one_process
def test_listing_loses_no_instruction():
    listing = codegen.listing(*ADD, stages=["ptx"])
    (lines,) = listing.stages.values()
    instructions = [line for texts in lines.values() for line in texts]
    body = codegen.inspect(*ADD).source().partition("{")[2]
    written = [line.strip() for line in body.splitlines()]
    names = [line.split()[0] for line in written if line.endswith(";") and not line.startswith(".")]
    assert sorted(line.split()[0] for line in instructions if line.endswith(";")) == sorted(names)


@pytest.mark.slow
def test_inspect_finds_modules_of_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text("import triton_gallery\n\n\ndef twice(x):\n    return triton_gallery.add(x, x)\n")
    code = "import torch, triton_gallery, mine; x = torch.empty(64, device='meta')"
    code += "; print(triton_gallery.codegen.inspect(mine.twice, x, targets=['sm_80']).kernels[0].name)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.strip() == "_add_kernel", result.stderr


@pytest.mark.slow
def test_neither_what_the_child_prints_nor_an_entry_of_the_path_that_is_no_text_matters(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('hello', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert codegen.inspect(copy, empty(3, 5), targets="sm_80").kernels[0].name == "_copy_kernel"


@pytest.mark.slow
def test_a_module_that_changed_is_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited.py"
    text = "import triton_gallery\n\n\ndef call(x):\n    return triton_gallery.{}\n"
    file.write_text(text.format("add(x, x)"))
    edited = importlib.import_module("edited")
    assert codegen.inspect(edited.call, empty(64), targets="sm_80").kernels[0].name == "_add_kernel"
    file.write_text(text.format("dropout(x, 0.5, seed=1)"))
    importlib.reload(edited)
    assert codegen.inspect(edited.call, empty(64), targets="sm_80").kernels[0].name == "_dropout_kernel"


def test_versions_are_those_of_all_modules_that_a_module_uses(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "far.py").write_text("import triton\n\n\n@triton.jit\ndef kernel(x_ptr):\n    pass\n")
    (tmp_path / "near.py").write_text("from far import kernel\n\n\ndef wrapper():\n    kernel[(1,)]()\n")
    (tmp_path / "mine.py").write_text("import os\nimport near\n")
    importlib.import_module("mine")
    versions = codegen._versions("mine")
    assert {os.path.basename(file) for file in versions if str(tmp_path) in file} == {"mine.py", "near.py", "far.py"}
    assert not any("site-packages" in file or file == os.__file__ for file in versions)


def test_what_cannot_travel_to_the_compiling_process_is_refused():
    with pytest.raises(
        TypeError, match="inspect: function and arguments must travel to another process: cannot pickle"
    ):
        codegen.inspect(triton_gallery.add, empty(64), (n for n in range(3)), targets=["sm_80"])
    mine = type("Mine", (), {"__module__": "__main__"})
    for argument in (mine, mine()):
        with pytest.raises(TypeError, match="Mine is of __main__, which is another one there; move it to a module"):
            codegen.inspect(triton_gallery.add, empty(64), argument, targets=["sm_80"])


def test_memory_may_begin_anywhere():
    """A copy on its way to the compiling process tells where its tensors lie to 16 bytes, as a view does."""
    memory = torch.zeros(8, dtype=torch.float16)
    x = torch.from_numpy(memory.numpy()[3:])
    assert memory.data_ptr() % 16 == 0 and x.storage_offset() == 0
    (x,) = codegen._unpacked(_pickled((x,)))
    assert x.is_meta and x.storage_offset() == 3


def _pickled(value) -> bytes:
    buffer = io.BytesIO()
    codegen._Pickler(buffer).dump(value)
    return buffer.getvalue()


def test_listing_tells_files_apart_whose_names_end_alike():
    place = '\t//## File "/somewhere/{}", line {}\n        /*{:04x}*/                   {} ;\n'
    text = place.format("norm.py", 12, 0, "MINE") + place.format("helpers_norm.py", 13, 16, "THEIRS")
    found = by_line("sass", text, "norm.py", range(10, 20))
    assert found[12] == ["MINE"] and found[20] == ["THEIRS"]


@in_one_process
def test_listing_as_text_and_html():
    listing = codegen.listing(*ADD, stages=["ttir"])
    text, html = str(listing), listing._repr_html_()
    assert text.splitlines()[0] == listing.source[0] == "@triton.jit"
    assert "  ttir    tt.store" in text
    assert html.startswith("<details") and html.count("<tr>") == len(listing.source) + 1
    assert "!tt.ptr&lt;" in html and "/home" not in html


@in_one_process
def test_listing_takes_stages_from_a_generator():
    assert codegen.listing(*ADD, stages=(kind for kind in ["ttir"])).stages.keys() == {"ttir"}


@in_one_process
def test_listing_takes_the_name_of_one_stage():
    assert codegen.listing(*ADD, stages="ttir").stages.keys() == {"ttir"}
    with pytest.raises(ValueError, match=r"listing: stages must be among ttir, ttgir, ptx.*, got 3"):
        codegen.listing(*ADD, stages=3)
    with pytest.raises(ValueError, match="listing: stages must name one stage or more, or be None for all, got none"):
        codegen.listing(*ADD, stages=[])


def test_listing_refuses_what_inspect_does_by_its_own_name():
    with pytest.raises(ValueError, match='listing: target must be a name such as "sm_90" or "gfx942", got \'cuda\''):
        codegen.listing(copy, empty(2048), target="cuda")
    with pytest.raises(ValueError, match=r"listing: target must be a name .*, got \['sm_90'\]"):
        codegen.listing(copy, empty(2048), target=["sm_90"])
    with pytest.raises(TypeError, match="listing: function must be callable, got NoneType"):
        codegen.listing(None, empty(2048))
    with pytest.raises(TypeError, match="listing: function must be importable in another process"):
        codegen.listing(lambda x: x, empty(2048))
    with pytest.raises(TypeError, match="listing: function and arguments must travel to another process"):
        codegen.listing(copy, (n for n in range(3)))
    with pytest.raises(TypeError, match=r"another process: tensors must be dense \(strided\), got layout"):
        codegen.listing(copy, torch.eye(3).to_sparse())
    with pytest.raises(RuntimeError, match="listing: the compiling process failed: exit status 3"):
        codegen.listing(os._exit, 3)


@in_one_process
def test_listing_refuses():
    with pytest.raises(ValueError, match="listing: add launched no kernel"):
        codegen.listing(triton_gallery.add, empty(0), empty(0))
    with pytest.raises(ValueError, match=r"kernel must be one of _add_kernel, got '_sub_kernel'"):
        codegen.listing(*ADD, kernel="_sub_kernel")
    with pytest.raises(ValueError, match=r"stages must be among ttir, ttgir, amdgcn, got 'ptx'"):
        codegen.listing(triton_gallery.softmax, empty(4096, 1024), target="gfx942", stages=["ttir", "ptx"])
    with pytest.raises(RuntimeError, match=r"listing: add failed for sm_90: .*broadcast"):
        codegen.listing(triton_gallery.add, empty(64), empty(63))


@in_one_process
def test_listing_goes_without_the_machine_code_that_nvdisasm_cannot_read():
    # Newer toolkits dropped this target; with an older one there is something to disassemble.
    stages = codegen.listing(*ADD, target="sm_70").stages
    if "sass" in stages:
        pytest.skip("this nvdisasm reads machine code of sm_70")
    assert list(stages) == ["ttir", "ttgir", "ptx"]
    with pytest.raises(RuntimeError, match="sass: nvdisasm cannot read the cubin: nvdisasm fatal"):
        codegen.listing(*ADD, target="sm_70", stages=["ptx", "sass"])
