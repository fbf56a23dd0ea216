"""Benchmarks with a GPU that is made up: every figure below is arithmetic, none is a measurement."""

import dataclasses
import functools
import importlib.resources
import json
import math
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import triton_gallery
from triton_gallery import _report, _source, benchmark, codegen
from triton_gallery._arguments import got

RATES = {  # x -> median rate in GB/s
    "triton_gallery": {256: 900.0, 1024: 2000.0, 4096: 3122.4, 16384: 3300.0},
    "torch": {256: 1000.0, 1024: 1600.0, 4096: 1152.0, 16384: 1500.0},
    "torch.compile": {256: 600.0, 1024: 2500.0, 4096: 2800.0},
}


def make_record(**changes):
    rows = [
        {"x": x, "provider": provider, "median": rate, "p20": 0.9 * rate, "p80": 1.1 * rate}
        for provider, rates in RATES.items()
        for x, rate in rates.items()
    ]
    record = {
        "benchmark": "softmax-fp16", "title": "Softmax <of> rows", "x": "row length N", "x_log": True, "y_log": False,
        "unit": "GB/s", "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0",
        "package": "0.1.0", "commit": "abc1234", "date": "2026-11-21", "command": "make record", "inputs": "f(N=x)",
        "text": _source.kernel_digests("softmax-fp16") | {"benchmark": "0123456789abcdef"},
        "limit": {"name": "copy by torch", "value": 4228.0},
        "left_out": [{"x": 16384, "provider": "torch.compile", "why": "OutOfMemoryError: no room"}], "rows": rows,
    }  # fmt: skip
    return record | changes


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A folder in place of the package's records, with one record of each of two GPUs."""
    monkeypatch.setattr(benchmark, "_records", lambda: tmp_path)
    monkeypatch.delenv("TRITON_GALLERY_RECORDS", raising=False)
    for gpu in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB"):
        commit(tmp_path, make_record(gpu=gpu))
    return tmp_path


def commit(folder, record):
    file = folder / _report.slug(record["gpu"]) / f"{record['benchmark']}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(benchmark.Report(record).to_json(), encoding="utf-8")
    return file


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU on which `measure` returns what the timed function returns."""
    found = {key: make_record()[key] for key in _report.PROVENANCE if key not in ("command", "inputs", "text")}
    monkeypatch.delenv("TRITON_GALLERY_RECORDS", raising=False)
    monkeypatch.setattr(benchmark, "_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(benchmark, "_gpu_name", lambda: found["gpu"])
    monkeypatch.setattr(benchmark, "environment", lambda: benchmark.Environment(found, python="3.12"))
    monkeypatch.setattr(benchmark, "measure", lambda fn: fn())
    monkeypatch.setattr(benchmark, "limit", lambda kind: {"name": kind, "value": 4228.0})
    monkeypatch.setattr(benchmark, "_copy", lambda n_bytes: lambda: (n_bytes * 1e-6 / 4000, 1e-3, 1e3))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    return found


def no_gpu(monkeypatch):
    monkeypatch.setattr(benchmark, "_device", lambda: None)


def make_benchmark(**changes):
    options = {
        "x_names": ["N"], "x_vals": [256, 1024], "x_log": True, "line_arg": "provider",
        "line_vals": ["triton_gallery", "torch"], "line_names": ["triton_gallery", "torch"], "ylabel": "GB/s",
        "xlabel": "row length N", "plot_name": "softmax-fp16", "args": {"M": 8},
    }  # fmt: skip
    return triton.testing.Benchmark(**options | changes)


def bench_softmax(M, N, provider):
    ms = {"triton_gallery": 1.0, "torch": 2.0}[provider]
    return benchmark.gbps(M * N * 1e6, benchmark.measure(lambda: (ms, ms / 2, ms * 2)))


# --- measuring --------------------------------------------------------------------------------------------------------


def test_gbps_and_tflops_turn_fast_times_into_the_high_quantile():
    assert benchmark.gbps(8e6, (2.0, 1.0, 4.0)) == pytest.approx((4.0, 2.0, 8.0))
    assert benchmark.tflops(8e9, (2.0, 1.0, 4.0)) == pytest.approx((4.0, 2.0, 8.0))
    assert benchmark.gbps(np.int64(8e6), (np.float32(2), 1, 4)) == pytest.approx((4.0, 2.0, 8.0))


TIMES = "times must be a median, a 20 % and an 80 % quantile above 0, as measure returns them"
COUNT = "must be a finite number that is not negative"


@pytest.mark.parametrize(
    ("rate", "count", "times", "message"),
    [
        (benchmark.gbps, 1e9, (1.0, 0.0, 1.0), f"gbps: {TIMES}, got (1.0, 0.0, 1.0)"),
        (benchmark.gbps, 1e9, (1.0, 1.0), f"gbps: {TIMES}, got (1.0, 1.0)"),
        (benchmark.gbps, 1e9, (1.0, "a", 1.0), f"gbps: {TIMES}, got (1.0, 'a', 1.0)"),
        (benchmark.gbps, 1e9, (1.0, True, 1.0), f"gbps: {TIMES}, got (1.0, True, 1.0)"),
        (benchmark.gbps, 1e9, (3.0, 2.0, 1.0), f"gbps: {TIMES}, got (3.0, 2.0, 1.0)"),
        (benchmark.gbps, 1e9, (1.0, 1.0, math.inf), f"gbps: {TIMES}, got (1.0, 1.0, inf)"),
        (benchmark.tflops, 1e9, 1.0, f"tflops: {TIMES}, got 1.0"),
        (benchmark.gbps, -1, (1.0, 1.0, 1.0), f"gbps: n_bytes {COUNT}, got -1"),
        (benchmark.gbps, math.inf, (1.0, 1.0, 1.0), f"gbps: n_bytes {COUNT}, got inf"),
        (benchmark.tflops, "a", (1.0, 1.0, 1.0), f"tflops: flops {COUNT}, got 'a'"),
        pytest.param(benchmark.tflops, 10**5000, (1.0, 1.0, 1.0), f"tflops: flops {COUNT}, got an int of", id="long"),
        (benchmark.gbps, 1e9, (1.0, 1.0, 10**5000), f"gbps: {TIMES}, got (1.0, 1.0, an int of 16610 bits)"),
        (benchmark.gbps, 1e9, (1.0, 1e-320, 1.0), "gbps: times must be long enough for a rate that float64 can hold"),
    ],
)
def test_gbps_and_tflops_refuse(rate, count, times, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rate(count, times)


@triton.jit
def copy_kernel(x_ptr, out_ptr, KEEP: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, eviction_policy="evict_last" if KEEP else "")
    tl.store(out_ptr + offsets, x)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2**20, 2**22])
def test_measure_finds_nothing_in_the_cache_that_a_call_asked_it_to_keep(n, device):
    x = torch.randn(n, device=device).half()
    out = torch.empty_like(x)
    plain, kept = (
        benchmark.measure(functools.partial(copy_kernel[(n // 1024,)], x, out, KEEP=keep, BLOCK_SIZE=1024))[0]
        for keep in (False, True)
    )
    assert kept > 0.9 * plain


@pytest.mark.parametrize("timer", [lambda: benchmark.measure(lambda: None), lambda: benchmark.limit("copy")])
def test_timing_without_a_gpu_is_refused(timer, monkeypatch):
    no_gpu(monkeypatch)
    with pytest.raises(RuntimeError, match="timings in the interpreter say nothing"):
        timer()


def test_run_writes_a_record_that_loads_again(fake_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_GALLERY_RECORDS", str(tmp_path))
    monkeypatch.setenv("GALLERY_COMMAND", "make record")
    report = benchmark.perf_report(make_benchmark(), title="Softmax", limit="copy")(bench_softmax).run()
    assert report.live and report.provenance().endswith("live")
    assert report.series("triton_gallery") == {256: 2048.0, 1024: 8192.0}
    rates = {"median": 2048, "p20": 1024, "p80": 4096}
    assert report.record["rows"][0] == {"x": 256, "provider": "triton_gallery"} | rates
    monkeypatch.setattr(benchmark, "_records", lambda: tmp_path)
    loaded = benchmark.load("softmax-fp16")
    assert loaded.record == report.record and not loaded.live
    assert loaded.record["inputs"] == "bench_softmax(N=x, M=8), torch.manual_seed(0), 1 round(s)"
    assert loaded.record["command"] == "make record"
    assert [file.name for file in (tmp_path / "nvidia-h200").iterdir()] == ["softmax-fp16.json"]
    text = (tmp_path / "nvidia-h200" / "softmax-fp16.json").read_text(encoding="utf-8")
    assert sum('"median"' in line for line in text.splitlines()) == len(report.record["rows"]) == 6


def test_a_copy_of_as_many_bytes_stands_beside_the_peers_and_is_none(fake_gpu):
    import matplotlib.pyplot as plt

    report = benchmark.perf_report(make_benchmark(), title="Softmax", limit="copy")(bench_softmax).run()
    assert report.providers == ["triton_gallery", "torch", _report.COPY]
    assert report.series(_report.COPY) == {256: 4000.0, 1024: 4000.0}
    assert report.series("peers") == report.series("torch") == {256: 1024.0, 1024: 4096.0}
    with pytest.raises(ValueError, match=r"softmax-fp16: series must be one of triton_gallery, .*, got ''"):
        report.quote("triton_gallery", "", "256")
    assert (
        report.quote("triton_gallery", _report.COPY, "256")
        == report.quote("triton_gallery", _report.COPY, 256)
        == "51 %"
    )
    assert "triton_gallery / copy of as many bytes: 51 % to 205 %, median 128 %\n" in report.summary()
    table = report._repr_html_()
    assert "<strong>2,048</strong>" in table and "<strong>4,000" not in table
    plt.close("all")
    report.plot()
    assert [line.get_linestyle() for line in plt.gca().get_lines()] == ["-", "-", ":", "--"]
    plt.close("all")


def test_names_stand_side_by_side_on_an_axis_of_powers_too(fake_gpu):
    import matplotlib.pyplot as plt

    sizes = {"x_names": ["M", "N"], "x_vals": [(1, 2), (3, 4)], "args": {}}
    benchmark.perf_report(make_benchmark(**sizes), title="Softmax")(bench_softmax).run().plot()
    assert plt.gca().get_xscale() == "linear"
    plt.close("all")


def test_a_copy_that_has_no_room_is_left_out(fake_gpu, monkeypatch):
    def refuse(n_bytes):
        raise torch.OutOfMemoryError("CUDA is full")

    monkeypatch.setattr(benchmark, "_copy", refuse)
    report = benchmark.perf_report(make_benchmark(), title="Softmax", limit="copy")(bench_softmax).run()
    assert "left out: copy of as many bytes at 256, 1024 (OutOfMemoryError: CUDA is full)" in report.summary()


def test_run_writes_nothing_unless_asked_and_needs_no_commit_then(fake_gpu, records):
    before = sorted(records.rglob("*"))
    fake_gpu["commit"] = "unknown"
    report = benchmark.perf_report(make_benchmark(), title="Softmax")(bench_softmax).run()
    assert sorted(records.rglob("*")) == before
    assert report.record["limit"] is None and "commit" not in report.provenance()


def test_run_refuses_a_record_of_an_unknown_commit_before_it_measures(fake_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_GALLERY_RECORDS", str(tmp_path))
    fake_gpu["commit"] = "unknown"
    with pytest.raises(ValueError, match=r"nvidia-h200/softmax-fp16\.json: commit is missing; set GALLERY_COMMIT"):
        benchmark.perf_report(make_benchmark(), title="Softmax")(lambda **sizes: pytest.fail("measured")).run()


def test_run_refuses_a_folder_that_cannot_be_written_to_before_it_measures(fake_gpu, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_GALLERY_RECORDS", str(tmp_path / "file"))

    def bench(M, N, provider):
        pytest.fail("measured")

    with pytest.raises(OSError, match=r"softmax-fp16: TRITON_GALLERY_RECORDS must name a folder .* directory: '.*file"):
        benchmark.perf_report(make_benchmark(), title="Softmax")(bench).run()
    monkeypatch.setenv("TRITON_GALLERY_RECORDS", "~nobody-of-that-name/records")
    with pytest.raises(OSError, match=r"softmax-fp16: TRITON_GALLERY_RECORDS must name a folder .* home directory"):
        benchmark.perf_report(make_benchmark(), title="Softmax")(bench).run()


def test_run_writes_records_to_the_home_of_its_user(fake_gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRITON_GALLERY_RECORDS", "~/x")
    benchmark.perf_report(make_benchmark(), title="Softmax")(bench_softmax).run()
    assert (tmp_path / "home" / "x" / "nvidia-h200" / "softmax-fp16.json").is_file()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA is full\nsecond line"), RuntimeError("CUDA is full")])
def test_run_leaves_out_a_peer_that_fails_and_says_why(error, fake_gpu):
    def bench(M, N, provider):
        if provider == "torch" and N == 1024:
            raise error
        return bench_softmax(M, N, provider)

    report = benchmark.perf_report(make_benchmark(), title="Softmax", rounds=3)(bench).run()
    assert report.series("torch") == {256: 1024.0} and 1024 in report.series("triton_gallery")
    reason = f"torch at 1024 ({type(error).__name__}: CUDA is full)"
    assert reason in report.summary() and reason in report._repr_html_()


def test_run_leaves_out_a_provider_that_does_not_apply(fake_gpu):
    def bench(M, N, provider):
        return None if N == 256 else bench_softmax(M, N, provider)

    report = benchmark.perf_report(make_benchmark(), title="Softmax", rounds=2)(bench).run()
    assert report.xs == [1024] and len(report.record["left_out"]) == 2


def test_run_refuses_a_function_that_gives_no_rate_of_ours(fake_gpu):
    def bench(M, N, provider):
        return None if provider == "triton_gallery" else bench_softmax(M, N, provider)

    with pytest.raises(ValueError, match="softmax-fp16: bench must return a rate of triton_gallery at some x, got No"):
        benchmark.perf_report(make_benchmark(), title="Softmax")(bench).run()
    study = make_benchmark(plot_name="guide-x")
    assert benchmark.perf_report(study, title="Softmax")(bench).run().providers == ["torch"]


def test_run_fails_when_our_own_provider_fails(fake_gpu):
    def bench(M, N, provider):
        raise torch.OutOfMemoryError("CUDA is full")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        benchmark.perf_report(make_benchmark(), title="Softmax")(bench).run()
    assert caught.value.__notes__ == ["softmax-fp16: triton_gallery failed at x = 256"]


def test_run_does_not_hide_a_mistake_in_the_benchmark(fake_gpu):
    def bench(M, N, provider):
        return {"triton_gallery": (1.0, 1.0, 1.0)}[provider]

    with pytest.raises(KeyError):
        benchmark.perf_report(make_benchmark(), title="Softmax")(bench).run()


def test_run_keeps_going_when_the_limit_cannot_be_measured(fake_gpu, monkeypatch):
    def refuse(kind):
        raise RuntimeError("no float8 on this GPU")

    monkeypatch.setattr(benchmark, "limit", refuse)
    report = benchmark.perf_report(make_benchmark(), title="Softmax", limit="copy")(bench_softmax).run()
    assert report.record["limit"] is None and "limit at any (RuntimeError: no float8" in report.summary()


def test_rounds_alternate_the_order_and_take_the_median(fake_gpu):
    calls = []

    def bench(M, N, provider):
        calls.append(provider)
        rate = float(len(calls)) ** 2
        return rate, rate - 0.5, rate + 0.5

    report = benchmark.perf_report(make_benchmark(x_vals=[256]), title="Softmax", rounds=3)(bench).run()
    # The first size is measured twice, and counts once.
    assert calls == 2 * ["triton_gallery", "torch", "torch", "triton_gallery", "triton_gallery", "torch"]
    # Of the last six calls, triton_gallery had the first, fourth and fifth; torch the second, third and sixth.
    assert report.series("triton_gallery") == {256: 100.0} and report.series("torch") == {256: 81.0}
    assert report.record["rows"][0]["p20"] == 99.5 and report.record["rows"][0]["p80"] == 100.5


def test_every_provider_gets_the_same_random_inputs(fake_gpu):
    seen = {}

    def bench(M, N, provider):
        seen[provider, N] = torch.randn(4).tolist()
        return 1.0, 1.0, 1.0

    benchmark.perf_report(make_benchmark(), title="Softmax")(bench).run()
    assert seen["triton_gallery", 256] == seen["torch", 256]


@pytest.mark.parametrize(
    "point", [3.0, (1.0, 2.0), (0.0, 1.0, 1.0), (2.0, 3.0, 1.0), (math.nan,) * 3, "abc", (10**400,) * 3], ids=got
)
def test_run_refuses_what_is_no_rate(point, fake_gpu):
    def bench(M, N, provider):
        return point

    message = f"softmax-fp16: bench must return a median, a quantile .* for triton_gallery it gave {got(point)}"
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        benchmark.perf_report(make_benchmark(), title="Softmax")(bench).run()


def test_a_peer_that_does_not_fit_is_left_out(fake_gpu):
    def bench(M, N, provider):
        if provider == "torch" or refused == "all":
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
        return 1.0, 1.0, 1.0

    refused = "torch"
    report = benchmark.perf_report(make_benchmark(), title="Softmax")(bench).run()
    assert "left out: torch at 256, 1024 (OutOfResources: out of resource: shared memory" in report.summary()
    refused, study = "all", {"plot_name": "guide-x", "line_names": ["a", "torch"]}
    report = benchmark.perf_report(make_benchmark(**study), title="Softmax")(bench).run()
    assert "nothing could be measured; left out: a at 256, 1024 (OutOfResources" in report.summary()


def test_several_sizes_per_x(fake_gpu):
    seen = []

    def bench(M, N, K, provider):
        seen.append((M, N, K))
        return 1.0, 1.0, 1.0

    sizes = make_benchmark(x_names=["M", "N", "K"], x_vals=[64, (8, 16, 32)], args={}, x_log=False)
    report = benchmark.perf_report(sizes, title="Products")(bench).run()
    assert set(seen) == {(64, 64, 64), (8, 16, 32)} and report.xs == [64, "8×16×32"]
    report.plot()


@pytest.mark.parametrize(
    ("x_vals", "xs"),
    [
        (2 ** np.arange(8, 10), [256, 512]),
        (range(256, 513, 256), [256, 512]),
        ([np.int64(256), 512], [256, 512]),
        (np.array([[8, 16], [32, 64]]), ["8×16", "32×64"]),
        ([(np.int64(8), 16)], ["8×16"]),
    ],
    ids=["array", "range", "list", "rows", "tuple"],
)
def test_sizes_of_numpy_become_pythons(x_vals, xs, fake_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_GALLERY_RECORDS", str(tmp_path))
    kinds = set()

    def bench(M, N, provider):
        kinds.update({type(M), type(N)})
        return 1.0, 1.0, 1.0

    sizes = make_benchmark(x_names=["M", "N"], x_vals=x_vals, args={})
    report = benchmark.perf_report(sizes, title="Softmax")(bench).run()
    assert report.xs == xs and kinds == {int}
    (file,) = tmp_path.glob("*/softmax-fp16.json")
    assert json.loads(file.read_text(encoding="utf-8"))["rows"] == report.record["rows"]


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({"ylabel": "ms"}, {}, ValueError, "ylabel must be one of GB/s, TFLOP/s, calls/ms, got 'ms'"),
        ({"line_names": ["ours", "torch"]}, {}, ValueError, "line_names must name each value"),
        ({"line_vals": ["triton_gallery"]}, {}, ValueError, "line_names must name each value"),
        ({"line_names": ["triton_gallery"] * 2}, {}, ValueError, "no two alike, one 'triton_gallery', got"),
        ({"x_names": []}, {}, TypeError, "x_names must be a list of one name or more, got []"),
        ({"x_names": "N"}, {}, TypeError, "x_names must be a list of one name or more, got 'N'"),
        ({"x_names": None}, {}, TypeError, "x_names must be a list of one name or more, got None"),
        ({"x_vals": "ab"}, {}, TypeError, "x_vals must be a list, got str"),
        ({"x_vals": []}, {}, ValueError, "x_vals must hold one value or more, no two alike, got []"),
        ({"x_vals": [256, 256]}, {}, ValueError, "no two alike, got [256, 256]"),
        ({"x_vals": [256, 256.0]}, {}, ValueError, "no two alike, got [256, 256.0]"),
        ({"x_vals": [(8, 16), "8×16"]}, {}, ValueError, "no two alike, got [[8, 16], '8×16']"),
        ({"xlabel": 5}, {}, TypeError, "perf_report: xlabel must be a str, got int"),
        ({"ylabel": np.zeros(2)}, {}, TypeError, "perf_report: ylabel must be a str, got ndarray"),
        ({"x_log": np.True_}, {}, TypeError, "perf_report: x_log must be True or False, got np.True_"),
        ({"y_log": 1}, {}, TypeError, "perf_report: y_log must be True or False, got 1"),
        ({}, {"rounds": True}, ValueError, "rounds must be an int of at least 1, got True"),
        ({"x_vals": ["a", "a b"]}, {}, ValueError, "have no blanks, and must not be worst, best, median, got 'a b'"),
        ({"x_vals": [""]}, {}, ValueError, "x_vals that are names must have no blanks"),
        ({"x_vals": ["best"]}, {}, ValueError, "must not be worst, best, median, got 'best'"),
        ({"x_vals": [(1, 2)]}, {}, ValueError, "a number or 1, one for each x_name, got [[1, 2]]"),
        ({"x_vals": [0], "x_log": True}, {}, ValueError, "x_vals must be positive where x_log is set, got [0]"),
        ({"args": None}, {}, TypeError, "args must be a dict, got NoneType"),
        ({}, {"limit": "matmul-fp16"}, ValueError, "for GB/s limit must be one of None, copy, got 'matmul-fp16'"),
        ({"ylabel": "calls/ms"}, {"limit": "copy"}, ValueError, "for calls/ms limit must be one of None, got 'copy'"),
        ({}, {"rounds": 0}, ValueError, "rounds must be an int of at least 1, got 0"),
        ({}, {"rounds": 1.5}, ValueError, "rounds must be an int of at least 1, got 1.5"),
        ({}, {"limit": ["copy"]}, ValueError, "limit must be one of None, copy, got ['copy']"),
        ({"plot_name": None}, {}, TypeError, "plot_name must be a str, got NoneType"),
        ({"plot_name": "../mine"}, {}, ValueError, "plot_name must name a file, without folders, got '../mine'"),
        ({"plot_name": ".."}, {}, ValueError, "plot_name must name a file, without folders, got '..'"),
        ({"plot_name": "/mine"}, {}, ValueError, "plot_name must name a file, without folders, got '/mine'"),
        ({"plot_name": ""}, {}, ValueError, "plot_name must name a file, without folders, got ''"),
        ({"plot_name": "a\0"}, {}, ValueError, r"plot_name must be printable and of at most 250 bytes, as names"),
        ({"plot_name": "ä" * 126}, {}, ValueError, "plot_name must be printable and of at most 250 bytes, as names"),
        ({"line_names": [_report.OURS, "limit"]}, {}, ValueError, "line_names must hold none of peers, limit, copy"),
        ({"line_names": [_report.OURS, _report.COPY]}, {}, ValueError, "none of peers, limit, copy of as many bytes"),
        ({"x_vals": (n for n in [256])}, {}, TypeError, "x_vals must be a list, got generator"),
        ({"x_vals": 256}, {}, TypeError, "x_vals must be a list, got int"),
        ({"x_vals": np.array(256)}, {}, TypeError, "x_vals must be a list, got ndarray"),
        ({"x_vals": b"ab"}, {}, TypeError, "x_vals must be a list, got bytes"),
        ({"x_vals": [1j]}, {}, TypeError, "hold numbers that float64 can hold, names, or tuples of these, got [1j]"),
        ({"x_vals": [math.nan]}, {}, TypeError, "x_vals must hold numbers that float64 can hold, names, or tuples"),
        (
            {"x_vals": [True]},
            {},
            TypeError,
            "hold numbers that float64 can hold, names, or tuples of these, got [True]",
        ),
        ({"x_vals": [(8, 10**5000)]}, {}, TypeError, "or tuples of these, got [[8, an int of 16610 bits]]"),
        ({"x_vals": [(0,)], "x_log": True}, {}, ValueError, "x_vals must be positive where x_log is set, got [[0]]"),
        ({"x_names": ["N", "N"]}, {}, ValueError, "x_names, line_arg and args must be arguments, no two alike, got"),
        ({"line_arg": "N"}, {}, ValueError, "x_names, line_arg and args must be arguments, no two alike, got"),
        ({"args": {1: 2}}, {}, ValueError, "x_names, line_arg and args must be arguments, no two alike, got"),
        ({"line_names": None}, {}, TypeError, "line_names and line_vals must be lists, got NoneType and list"),
        ({"line_names": ["triton_gallery", 3]}, {}, TypeError, "line_arg and what line_names holds must be str, got 3"),
        ({"line_arg": 3}, {}, TypeError, "line_arg and what line_names holds must be str, got 3"),
    ],
)
def test_perf_report_refuses(changes, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        benchmark.perf_report(make_benchmark(**changes), title="Softmax", **options)


@pytest.mark.parametrize("fn", [None, functools.partial(print)], ids=["none", "partial"])
def test_perf_report_refuses_to_decorate_what_is_no_function(fn):
    with pytest.raises(TypeError, match=f"must be a function, got {type(fn).__name__}"):
        benchmark.perf_report(make_benchmark(), title="Softmax")(fn)


def test_perf_report_refuses_a_function_of_other_arguments():
    message = "bench must take the arguments N, provider, M: missing a required argument: 'rows'"
    with pytest.raises(TypeError, match=message):

        @benchmark.perf_report(make_benchmark(), title="Softmax")
        def bench(rows, provider, **sizes):
            """Its first size has another name."""


def test_perf_report_refuses_a_list_of_benchmarks():
    with pytest.raises(TypeError, match=r"must be one triton\.testing\.Benchmark, got list"):
        benchmark.perf_report([make_benchmark()], title="Softmax")


@pytest.mark.parametrize("tensors", [torch.zeros(2), 3], ids=["tensor", "number"])
def test_measure_refuses_what_is_no_list_of_tensors(tensors):
    with pytest.raises(TypeError, match=f"grad_to_none must be a list of tensors, got {type(tensors).__name__}"):
        benchmark.measure(print, grad_to_none=tensors)


def test_measure_refuses_a_list_of_other_things():
    with pytest.raises(TypeError, match="grad_to_none must be a list of tensors, got int in it"):
        benchmark.measure(print, grad_to_none=[torch.zeros(1), 1])


@pytest.mark.parametrize("rep", [0, -1.0, math.inf, math.nan, True, "10", None, 10**5000], ids=got)
def test_measure_refuses_what_is_no_time(rep):
    with pytest.raises(
        ValueError, match=re.escape(f"measure: rep must be a number of milliseconds above 0, got {got(rep)}")
    ):
        benchmark.measure(print, rep=rep)


def test_measure_refuses_what_cannot_be_called():
    with pytest.raises(TypeError, match="measure: fn must be callable, got float"):
        benchmark.measure(1.0)


def test_limit_refuses():
    with pytest.raises(TypeError, match="limit: kind must be a str, got list"):
        benchmark.limit(["copy"])
    with pytest.raises(ValueError, match=r"limit: kind must be one of copy, matmul-fp16, .*, got 'matmul'"):
        benchmark.limit("matmul")


# --- records ----------------------------------------------------------------------------------------------------------


def test_load_refuses_what_is_no_name():
    with pytest.raises(TypeError, match="load: name must be a str, got NoneType"):
        benchmark.load(None)
    for gpu in (np.array(["nvidia-h200"] * 2), 1):
        with pytest.raises(TypeError, match=f"load: gpu must be a str, got {type(gpu).__name__}"):
            benchmark.load("softmax-fp16", gpu)


@pytest.mark.parametrize("name", ["a" * 300, "../nvidia-h200/softmax-fp16", "nvidia-h200/softmax-fp16", "", "."])
def test_load_finds_no_record_of_a_name_that_none_can_have(name):
    with pytest.raises(FileNotFoundError, match=f"benchmark {re.escape(name)}: no record has this name"):
        benchmark.load(name)


def test_run_without_a_gpu_loads_the_committed_record(records, monkeypatch, capsys):
    no_gpu(monkeypatch)
    text = make_record()["text"] | {"benchmark": _source.function_digest(Path(__file__).read_text(), "bench_softmax")}
    commit(records, make_record(text=text))
    report = benchmark.perf_report(make_benchmark(), title="Softmax")(bench_softmax).run()
    assert report.record == make_record(text=text) and not report.live and not report.changed
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "committed record is shown, measured on NVIDIA H200" in printed


def test_run_without_gpu_and_record_says_so_in_place_of_figures(records, monkeypatch, capsys):
    import matplotlib.pyplot as plt

    no_gpu(monkeypatch)
    report = benchmark.perf_report(make_benchmark(plot_name="softmax-fp64"), title="Softmax")(bench_softmax).run()
    words = "not yet measured: no record is committed; `make record` on a GPU machine measures it"
    assert capsys.readouterr().out == f"softmax-fp64: nothing to measure, {benchmark._without_gpu()}; {words}.\n"
    assert report.summary() == f"Softmax\n  {words}"
    # Neither figure nor table leads to files that do not exist.
    assert report._repr_html_() == f"<p><strong>Softmax</strong>: {words}.</p>\n" and report.plot() is None
    (text,) = plt.gca().texts
    assert text.get_text().replace("\n", " ") == words
    plt.close("all")
    with pytest.raises(ValueError, match=f"softmax-fp64: {words}"):
        report.series("triton_gallery")
    assert report.quote("triton_gallery", "torch", "best") == "not yet measured" and report.provenance() == words
    assert report.frame().empty


def test_run_without_a_gpu_refuses_to_write_records(records, monkeypatch):
    no_gpu(monkeypatch)
    monkeypatch.setenv("TRITON_GALLERY_RECORDS", str(records))
    why = re.escape(benchmark._without_gpu())
    with pytest.raises(RuntimeError, match=f"softmax-fp16: TRITON_GALLERY_RECORDS is set, but {why}"):
        benchmark.perf_report(make_benchmark(), title="Softmax")(bench_softmax).run()


@pytest.mark.parametrize(
    ("committed", "present", "chosen"),
    [
        (["NVIDIA A100", "NVIDIA H200"], "NVIDIA A100", "NVIDIA A100"),
        (["NVIDIA A100", "NVIDIA H200"], "NVIDIA B200", "NVIDIA H200"),
        (["NVIDIA A100", "NVIDIA H200"], None, "NVIDIA H200"),
        (["NVIDIA A100"], None, "NVIDIA A100"),
    ],
)
def test_load_prefers_the_gpu_at_hand(committed, present, chosen, records, fake_gpu, monkeypatch):
    shutil.rmtree(records / "nvidia-h200")
    shutil.rmtree(records / "nvidia-a100-sxm4-80gb")
    for gpu in committed:
        commit(records, make_record(gpu=gpu))
    if present is None:
        no_gpu(monkeypatch)
    fake_gpu["gpu"] = present
    assert benchmark.load("softmax-fp16").record["gpu"] == chosen


def test_load_names_the_gpus_that_there_are(records):
    with pytest.raises(FileNotFoundError, match=r"softmax-fp16: gpu must be one of nvidia-.*, got 'nvidia-h300'"):
        benchmark.load("softmax-fp16", "nvidia-h300")


def test_load_refuses_a_record_in_another_ones_place(records):
    (records / "nvidia-h200" / "softmax-fp16.json").write_text(json.dumps(make_record(benchmark="add-fp16")))
    message = r"nvidia-h200/softmax-fp16.json: must be of this benchmark and GPU, got add-fp16 on NVIDIA H200"
    with pytest.raises(ValueError, match=message):
        benchmark.load("softmax-fp16", "nvidia-h200")


def test_load_prefers_a_record_of_the_kernels_that_are_there(records, monkeypatch):
    no_gpu(monkeypatch)
    shutil.rmtree(records / "nvidia-a100-sxm4-80gb")
    text = {**make_record()["text"], "kernels": "0" * 16}
    commit(records, make_record(gpu="NVIDIA H200", text=text))
    commit(records, make_record(gpu="NVIDIA H100"))
    monkeypatch.setattr(benchmark, "kernel_digests", lambda name, **options: make_record()["text"])
    assert benchmark.load("softmax-fp16").record["gpu"] == "NVIDIA H100"
    assert benchmark.load("softmax-fp16", "nvidia-h200").outdated
    commit(records, make_record(gpu="NVIDIA H100", text=text))
    assert benchmark.load("softmax-fp16").record["gpu"] == "NVIDIA H200"


@pytest.mark.parametrize("key", ["benchmark", "title", "x", "unit", *_report.PROVENANCE, "rows", "limit"])
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_validate_refuses_a_missing_key(key, how):
    record = make_record(**{key: ""})
    if how == "absent":
        del record[key]
    elif key == "limit":
        record["limit"] = {"name": "copy by torch"}
    with pytest.raises(ValueError, match=rf"record nvidia-h200/softmax-fp16\.json: {key} (is missing|must)"):
        benchmark.validate(record, "nvidia-h200/softmax-fp16.json")


ROW = {"x": 1, "provider": "triton_gallery", "median": 2.0, "p20": 1.0, "p80": 4.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "unknown"},
        {"commit": "main"},
        {"driver": "unknown"},
        {"limit": {"name": "copy", "value": float("nan")}},
        {"rows": [{"x": 1, "provider": "triton_gallery", "median": 2.0, "p20": 3.0, "p80": 4.0}]},
        {"rows": [{"x": 1, "provider": "triton_gallery", "median": float("nan"), "p20": 1.0, "p80": 4.0}]},
        {"rows": [{"x": 1, "provider": "triton_gallery", "median": 2.0, "p20": 1.0}]},
        {"rows": [{"x": 1, "provider": "torch", "median": 2.0, "p20": 1.0, "p80": 4.0}]},
        {"rows": 2 * [{"x": 1, "provider": "triton_gallery", "median": 2.0, "p20": 1.0, "p80": 4.0}]},
        {"rows": 3},
        {"rows": {"x": 1}},
        {"rows": [3]},
        {"rows": [{"x": [1], "provider": "triton_gallery", "median": 2.0, "p20": 1.0, "p80": 4.0}]},
        {"rows": [{"x": 1, "provider": 3, "median": 2.0, "p20": 1.0, "p80": 4.0}]},
        {"rows": [{"x": 1, "provider": "triton_gallery", "median": "fast", "p20": 1.0, "p80": 4.0}]},
        {"rows": [{"x": float("nan"), "provider": "triton_gallery", "median": 2.0, "p20": 1.0, "p80": 4.0}]},
        {"rows": [{"x": 1, "provider": "triton_gallery", "median": 2.0, "p20": True, "p80": 4.0}]},
        {"rows": [{"x": 1, "provider": "triton_gallery", "median": 2.0, "p20": 1.0, "p80": 10**400}]},
        {"rows": [ROW, ROW | {"provider": "peers"}]},
        {"rows": [ROW, ROW | {"provider": "limit"}]},
        {"rows": [ROW | {"why": "slow"}]},
        {"rows": [ROW | {"x": 0}]},
        {"left_out": 5},
        {"left_out": ["torch"]},
        {"left_out": [{"x": 1, "provider": "torch"}]},
        {"left_out": [{"x": 1, "provider": 3, "why": "slow"}]},
        {"left_out": [{"x": 1, "provider": "torch", "why": None}]},
        {"left_out": [{"x": [1], "provider": "torch", "why": "slow"}]},
        {"limit": 0},
        {"limit": {"name": "copy", "value": True}},
        {"limit": 3},
        {"limit": {"name": "copy", "value": "fast"}},
        {"text": "0" * 16},
        {"commit": 1234567},
        {"gpu": 3},
        {"benchmark": 3},
    ],
    ids=str,
)
def test_validate_refuses_what_no_measurement_gives(changes):
    with pytest.raises(ValueError, match=rf"record .*\.json: {next(iter(changes))} (is missing|must)"):
        benchmark.validate(make_record(**changes))


@pytest.mark.parametrize("record", [3, [], "{}", None], ids=repr)
def test_validate_refuses_what_is_no_record(record):
    with pytest.raises(ValueError, match=rf"record h200/x\.json: must be a dict, got {type(record).__name__}"):
        benchmark.validate(record, "h200/x.json")
    with pytest.raises(ValueError, match="record of no name: must be a dict"):
        benchmark.validate(record)


def test_validate_accepts_a_complete_record():
    benchmark.validate(make_record())
    benchmark.validate(make_record(limit=None, commit="abc1234-dirty"))
    benchmark.validate(make_record(rows=[ROW | {"x": 0}, ROW | {"provider": _report.COPY}], x_log=False))


def test_load_refuses_an_incomplete_record(records):
    file = commit(records, make_record(date=""))
    with pytest.raises(ValueError, match=rf"record {file.parent.name}/{file.name}: date is missing"):
        benchmark.load("softmax-fp16")


def test_committed_records_are_complete():
    folder = Path(str(importlib.resources.files("triton_gallery") / "records"))
    assert (folder / "README.md").is_file()
    for file in folder.glob("*/*.json"):
        text = file.read_text(encoding="utf-8")
        record = json.loads(text)
        benchmark.validate(record, str(file))
        assert (file.parent.name, file.stem) == (_report.slug(record["gpu"]), record["benchmark"])
        assert text == benchmark.Report(record).to_json(), f"{file} was not written by triton_gallery"


# --- a record whose text changed --------------------------------------------------------------------------------------

TEXT = {"kernels": "0" * 16, "launch": "1" * 16, "benchmark": "2" * 16}
SENTENCE = "not yet measured since the {} changed; the record is of 2026-11-21, commit abc1234"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (["kernels"], "kernels"),
        (["benchmark"], "benchmark"),
        (["kernels", "launch", "benchmark"], "kernels and the benchmark"),
    ],
)
def test_outdated_figures_are_shown_nowhere(parts, words):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    report = benchmark.Report(make_record(), changed=frozenset(parts))
    sentence = SENTENCE.format(words)
    assert report.quote("triton_gallery", "torch", "4096") == report.quote("limit", None, "best") == "not yet measured"
    assert report.summary() == f"Softmax <of> rows, on NVIDIA H200\n  {sentence}"
    shown = re.sub('href="[^"]*"', "", report._repr_html_())
    assert sentence in shown and "<table" not in shown and "3,300" not in shown and "The outdated CSV" in shown
    plt.close("all")
    report.plot()
    (ax,) = plt.gcf().axes
    assert not ax.lines and " ".join(ax.texts[0].get_text().split()) == sentence
    plt.close("all")


def test_what_kernels_import_belongs_to_them():
    record, digests = make_record(), _source.kernel_digests("attention-fwd-fp16")
    record["text"] = digests | {"benchmark": "0123456789abcdef"}
    assert benchmark._changed(record, digests) == set()
    record["text"]["imports"] = "0" * 16
    assert benchmark._changed(record, digests) == {"kernels"}


def test_figures_are_shown_with_a_note_when_only_the_launch_changed():
    report = benchmark.Report(make_record(), changed=frozenset(["launch"]))
    assert report.quote("triton_gallery", None, "4096") == "3122 GB/s" and "3,300" in report._repr_html_()
    assert "What launches the kernels changed since then, the kernels did not" in report._repr_html_()


@pytest.mark.parametrize("part", ["kernels", "launch"])
def test_load_compares_the_record_with_the_kernels_at_hand(records, part):
    shutil.rmtree(records / "nvidia-a100-sxm4-80gb")
    assert benchmark.load("softmax-fp16").changed == frozenset()
    commit(records, make_record(text=make_record()["text"] | {part: TEXT[part]}))
    assert benchmark.load("softmax-fp16").changed == {part}
    assert (benchmark.quote("softmax-fp16: torch at 4096") == "not yet measured") == (part == "kernels")


def test_run_without_a_gpu_compares_the_record_with_the_benchmark_at_hand(records, monkeypatch, capsys):
    no_gpu(monkeypatch)
    report = benchmark.perf_report(make_benchmark(), title="Softmax")(bench_softmax).run()
    assert report.changed == {"benchmark"} and report.outdated
    assert SENTENCE.format("benchmark") in capsys.readouterr().out
    # A notebook's cell has no file that could be compared.
    names = {"benchmark": benchmark}
    exec("def bench_softmax(M, N, provider):\n    return None", names)
    assert not benchmark.perf_report(make_benchmark(), title="Softmax")(names["bench_softmax"]).run().changed


def test_load_takes_the_records_of_the_gpu_that_is_named(records):
    assert benchmark.load("softmax-fp16", "nvidia-a100-sxm4-80gb").record["gpu"] == "NVIDIA A100-SXM4-80GB"


# --- reading a report -------------------------------------------------------------------------------------------------


def test_plot_says_what_where_and_in_which_units(records):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    benchmark.load("softmax-fp16").plot()
    (number,) = plt.get_fignums()
    (ax,) = plt.figure(number).axes
    assert ax.get_title() == "Softmax <of> rows, measured on NVIDIA H200"
    assert ax.get_xlabel() == "row length N" and ax.get_ylabel() == "throughput (GB/s)" and ax.get_xscale() == "log"
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines) == [*RATES, "limit: copy by torch, 4228 GB/s"]
    assert lines["torch.compile"].get_xydata().tolist() == [list(point) for point in RATES["torch.compile"].items()]
    assert lines["limit: copy by torch, 4228 GB/s"].get_linestyle() == "--"
    drawn = [lines[name] for name in RATES]
    assert len({line.get_color() for line in drawn}) == len({line.get_marker() for line in drawn}) == 3
    assert all(lines["triton_gallery"].get_linewidth() > line.get_linewidth() for line in drawn[1:])
    assert len(ax.collections) == 3, "one band per provider"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["256", "1024", "4096", "16384"]
    assert {line.get_linestyle() for line in drawn} == {"-"}
    plt.close("all")


def test_a_provider_looks_the_same_beside_others():
    one = _report._styles(["triton_gallery", "triton_gallery deterministic", "cuDNN", "FlashAttention-2 deterministic"])
    two = _report._styles(["scores in memory", "large tiles", "cuDNN", "triton_gallery", "FlashAttention-2"])
    assert one["cuDNN"] == two["cuDNN"] and one["triton_gallery"] == two["triton_gallery"]
    assert one["FlashAttention-2 deterministic"] == two["FlashAttention-2"]
    for styles in (one, two):
        assert len({(style["color"], style["linewidth"]) for style in styles.values()}) == len(styles)


@pytest.mark.parametrize(
    ("xs", "is_log", "shown"),
    [
        ([256, 512, 4096, 6144, 8192, 8320, 16384], True, [256, 512, 4096, 6144, 8192, 16384]),
        ([256, 512, 4096, 6144, 8192, 8320, 16384], False, [256, 4096, 6144, 8192, 16384]),
        ([32000, 50257, 128256, 152064, 256000], True, [32000, 50257, 128256, 256000]),
        ([2**i for i in range(12, 29, 2)], True, [2**i for i in range(12, 29, 2)]),
        ([256, 4096, 16000, 16384], False, [256, 4096, 16384]),
        ([7], True, [7]),
    ],
)
def test_labels_of_the_axis_stand_apart(xs, is_log, shown):
    assert _report._apart(xs, is_log) == shown


def test_plot_joins_no_shapes(records):
    import matplotlib.pyplot as plt

    report = benchmark.load("softmax-fp16")
    rows = [row | {"x": f"{row['x']}×8"} for row in report.record["rows"]]
    dataclasses.replace(report, record=report.record | {"rows": rows, "x_log": False}).plot()
    ax = plt.gcf().axes[0]
    drawn = [line for line in ax.lines if line.get_label() in RATES]
    assert len(drawn) == 3 and {line.get_linestyle() for line in drawn} == {"None"}
    # The spread of each point is a stroke of its own.
    assert [len(strokes.get_segments()) for strokes in ax.collections] == [len(points) for points in RATES.values()]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["256×8", "1024×8", "4096×8", "16384×8"]
    plt.close("all")


def commit_limits(records, gpu="NVIDIA H200"):
    """Records of a copy at 5000 GB/s and a product at 800 TFLOP/s: the ridge is at 160 operations per byte."""
    commit(records, make_record(benchmark="vector-add-fp32", gpu=gpu, limit={"name": "copy by torch", "value": 5000.0}))
    for kind, value in (("fp16", 800.0), ("fp8", 1600.0)):
        limit = {"name": "torch.matmul 8192³", "value": value}
        commit(records, make_record(benchmark=f"matmul-{kind}", gpu=gpu, unit="TFLOP/s", limit=limit))


def test_roofline_of_a_record(records):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    commit_limits(records)
    measured = benchmark.load("softmax-fp16")
    report = dataclasses.replace(measured, record=measured.record | {"limit": None})
    benchmark.roofline(report, {"slow": (2.0, 4.0), "fast": (400.0, 600.0)})
    (axes,) = pyplot.gcf().axes
    assert axes.get_title() == "Softmax <of> rows: roofline of the NVIDIA H200"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("arithmetic intensity (operations per byte)", "rate (TFLOP/s)")
    slope, flat, slow, fast = axes.lines
    assert slope.get_xdata()[1] == flat.get_xdata()[0] == 160 and list(flat.get_ydata()) == [800, 800]
    assert all(y == pytest.approx(5 * x) for x, y in slope.get_xydata())
    assert slow.get_label() == "slow: 40 % of the roof" and fast.get_label() == "fast: 75 % of the roof"
    assert slow.get_xydata().tolist() == [[2, 4]] and fast.get_marker() != slow.get_marker()
    pyplot.close("all")

    benchmark.roofline(report, {"fast": (400.0, 600.0)}, title="Products", peak="matmul-fp8")
    (axes,) = pyplot.gcf().axes
    assert axes.get_title() == "Products: roofline of the NVIDIA H200" and axes.lines[0].get_xdata()[1] == 320
    pyplot.close("all")

    # A product that was measured in the same run is the better limit, if it is of that kind; and so is a copy.
    own = {"benchmark": "matmul-odd-fp16", "unit": "TFLOP/s", "limit": {"name": "torch.matmul 8192³", "value": 700.0}}
    product = dataclasses.replace(measured, record=measured.record | own)
    benchmark.roofline(product, {"fast": (400.0, 600.0)})
    benchmark.roofline(product, {"fast": (400.0, 600.0)}, peak="matmul-fp8")
    flats = [pyplot.figure(number).axes[0].lines[1].get_ydata()[0] for number in pyplot.get_fignums()]
    assert flats == [700, 1600]
    pyplot.close("all")
    benchmark.roofline(measured, {"slow": (2.0, 1.0)})
    slope = pyplot.gcf().axes[0].lines[0]
    assert all(y == pytest.approx(x * measured.record["limit"]["value"] / 1000) for x, y in slope.get_xydata())
    assert measured.record["limit"]["value"] != 5000
    pyplot.close("all")


def test_roofline_shows_no_rate_of_an_outdated_record(records):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    commit_limits(records)
    report = dataclasses.replace(benchmark.load("softmax-fp16"), changed=frozenset({"kernels"}))
    rates = report.series("triton_gallery")
    assert rates and all(math.isnan(rate) for rate in rates.values())
    benchmark.roofline(report, {"slow": (2.0, next(iter(rates.values())))})
    (axes,) = pyplot.gcf().axes
    assert axes.lines[-1].get_label() == "slow: not yet measured"
    pyplot.close("all")


def test_roofline_of_a_live_report_has_the_limits_of_this_run(fake_gpu):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    benchmark.roofline(benchmark.Report(make_record(), live=True), {"a": (1.0, 1.0)})
    slope, flat, _ = pyplot.gca().lines
    assert "copy, 4228 GB/s" in slope.get_label() and "matmul-fp16, 4228 TFLOP/s" in flat.get_label()
    pyplot.close("all")


@pytest.mark.parametrize(
    ("points", "options", "message"),
    [
        ({}, {}, "points must have a positive intensity and rate"),
        ({"a": (1.0, 0.0)}, {}, "points must have a positive intensity and rate"),
        ({"a": (1.0, 10**400)}, {}, "points must have a positive intensity and rate"),
        ({"a": (math.nan, 1.0)}, {}, "points must have a positive intensity and rate, got {'a': (nan, 1.0)}"),
        ({"a": 1.0}, {}, "points must have a positive intensity and rate, got {'a': 1.0}"),
        ({"a": (1.0, -(10**5000))}, {}, "positive intensity and rate, got {'a': (1.0, an int of 16610 bits)}"),
        ({"a": (1.0, 1.0)}, {"peak": ["copy"]}, "peak must be one of matmul-fp16, matmul-bf16, matmul-fp8, got ["),
        ({"a": (1.0, 1.0)}, {"peak": "copy"}, "peak must be one of matmul-fp16, matmul-bf16, matmul-fp8, got 'copy'"),
    ],
)
def test_roofline_refuses(points, options, message, records):
    with pytest.raises(ValueError, match=re.escape(message)):
        benchmark.roofline(benchmark.load("softmax-fp16"), points, **options)


def test_roofline_refuses_other_types(records):
    rule = "roofline: report must be a benchmark.Report, such as load gives"
    for report, kind in (("softmax-fp16", "builtins.str"), (codegen.Report(()), "triton_gallery.codegen.Report")):
        with pytest.raises(TypeError, match=f"{rule}, got {kind}"):
            benchmark.roofline(report, {"a": (1.0, 1.0)})
    with pytest.raises(TypeError, match="roofline: title must be a str, got Tensor"):
        benchmark.roofline(benchmark.load("softmax-fp16"), {"a": (1.0, 1.0)}, title=torch.zeros(2))
    with pytest.raises(TypeError, match="roofline: points must be a dict, got list"):
        benchmark.roofline(benchmark.load("softmax-fp16"), [(1.0, 1.0)])


def test_roofline_refuses_what_was_not_measured(records, monkeypatch):
    no_gpu(monkeypatch)
    report = benchmark.perf_report(make_benchmark(plot_name="softmax-new"), title="Softmax")(
        lambda N, provider, M: 1.0
    ).run()
    with pytest.raises(ValueError, match="roofline: report must be measured; softmax-new is "):
        benchmark.roofline(report, {"a": (1.0, 1.0)})


def test_roofline_takes_the_fastest_copy_of_that_gpu(records):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    commit_limits(records)
    commit(records, make_record(benchmark="vector-add-fp32", limit={"name": "copy by torch", "value": 4000.0}))
    report = dataclasses.replace(benchmark.load("matmul-fp16"), changed=frozenset())
    benchmark.roofline(report, {"slow": (2.0, 4.0)})
    slope = pyplot.gcf().axes[0].lines[0]
    assert all(y == pytest.approx(x * 4.228) for x, y in slope.get_xydata())  # that of softmax-fp16
    pyplot.close("all")


def test_roofline_without_limits_of_that_gpu(records):
    commit_limits(records, gpu="NVIDIA A100-SXM4-80GB")
    with pytest.raises(FileNotFoundError, match="nvidia-h200"):
        benchmark.roofline(benchmark.load("softmax-fp16"), {"a": (1.0, 1.0)})


def test_places_of_a_sweep():
    shown = [_report.place(x) for x in (16384, 0.000311296, 858.411237376, "2 × 3")]
    assert shown == ["16,384", "0.0003113", "858.4", "2 × 3"]


def test_html_table(records):
    html = benchmark.load("softmax-fp16")._repr_html_()
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', html)
    assert rows[0] == ("256", "<td>900</td><td><strong>1,000</strong></td><td>600</td>")
    assert rows[3] == ("16,384", "<td><strong>3,300</strong></td><td>1,500</td><td>–</td>")
    assert html.count("<strong>") == 4 and "overflow-x: auto" in html
    assert "Softmax &lt;of&gt; rows" in html and "<of>" not in html
    assert "Limit: copy by torch, 4228 GB/s." in html
    assert (
        "Measured on NVIDIA H200, driver 580.1, CUDA 13.0, 2026-11-21, torch 2.11.0, triton 3.6.0, "
        "triton_gallery 0.1.0 (commit abc1234), recorded." in html
    )


def test_downloads_hold_every_point(records):
    report = benchmark.load("softmax-fp16")
    links = re.findall(r'<a download="(.*?)" href="data:(.*?),(.*?)">', report._repr_html_())
    assert [(name, kind) for name, kind, _ in links] == [
        ("softmax-fp16.csv", "text/csv;charset=utf-8"),
        ("softmax-fp16.json", "application/json;charset=utf-8"),
    ]
    csv_text, json_text = (urllib.parse.unquote(data) for _, _, data in links)
    assert json.loads(json_text) == report.record and json_text == report.to_json()
    assert csv_text.splitlines()[0] == "x,provider,median,p20,p80,unit"
    assert len(csv_text.splitlines()) == 1 + len(report.record["rows"])


def test_frame(records):
    frame = benchmark.load("softmax-fp16").frame()
    assert list(frame.columns) == list(RATES) and frame.index.name == "row length N"
    assert frame.loc[1024, "torch"] == 1600 and frame.isna().sum().sum() == 1


def test_frame_of_numbers_and_names_where_a_provider_was_left_out():
    places = [("triton_gallery", 64), ("triton_gallery", "8×16"), ("a", 64), ("b", "8×16")]
    rows = [ROW | {"provider": provider, "x": x} for provider, x in places]
    frame = benchmark.Report(make_record(rows=rows)).frame()
    assert list(frame.index) == [64, "8×16"] and frame.index.name == "row length N"
    assert frame.isna().values.tolist() == [[False, False, True], [False, True, False]]


def test_figures_and_frames_name_what_they_need(records, monkeypatch):
    commit_limits(records)
    report = benchmark.load("softmax-fp16")
    for name in ("matplotlib.pyplot", "matplotlib", "pandas"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("matplotlib", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    for draw in (report.plot, lambda: benchmark.roofline(report, {"a": (1.0, 1.0)})):
        with pytest.raises(
            ModuleNotFoundError, match=r"matplotlib\S* is not installed; pip install matplotlib installs"
        ):
            draw()
    with pytest.raises(ModuleNotFoundError, match="pandas is not installed; pip install pandas installs it"):
        report.frame()
    assert "2.71×" in report.summary() and "<table>" in report._repr_html_()


def test_summary_tells_losses_too(records):
    lines = benchmark.load("softmax-fp16").summary().splitlines()
    assert lines == [
        "Softmax <of> rows, on NVIDIA H200",
        "  triton_gallery / torch: 0.90× to 2.71×, median 1.73×; slower at row length N 256",
        "  triton_gallery / torch.compile: 0.80× to 1.50×, median 1.12×; slower at row length N 1024",
        "  triton_gallery / limit: 21 % to 78 %, median 61 %; limit: copy by torch, 4228 GB/s",
        "  left out: torch.compile at 16384 (OutOfMemoryError: no room)",
    ]


@pytest.mark.parametrize(("rate", "where"), [(0.994, "slower at row length N 1"), (0.996, "never over 0.5 % slower")])
def test_summary_counts_a_loss_from_the_second_digit(rate, where):
    rows = [
        {"x": 1, "provider": p, "median": r, "p20": r, "p80": r} for p, r in (("triton_gallery", rate), ("torch", 1.0))
    ]
    assert where in benchmark.Report(make_record(rows=rows)).summary()


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("softmax-fp16: triton_gallery at 4096", "3122 GB/s"),
        ("softmax-fp16: triton_gallery at worst", "900 GB/s"),
        ("softmax-fp16: triton_gallery at best", "3300 GB/s"),
        ("softmax-fp16: triton_gallery at median", "2561 GB/s"),
        ("softmax-fp16: triton_gallery / torch at 4096", "2.71×"),
        ("softmax-fp16: triton_gallery / torch.compile at worst", "0.80×"),
        ("softmax-fp16: triton_gallery / limit at 4096", "74 %"),
        ("softmax-fp16: triton_gallery / limit at best", "78 %"),
        ("softmax-fp16: limit at 4096", "4228 GB/s"),
        ("softmax-fp16: peers at 1024", "2500 GB/s"),
        ("softmax-fp16: triton_gallery / peers at 4096", "1.12×"),  # the best peer there is torch.compile
        ("softmax-fp16: triton_gallery / peers at 16384", "2.20×"),  # torch.compile is left out there
        ("softmax-fp16: triton_gallery / peers at worst", "0.80×"),
        ("softmax-fp16: triton_gallery / peers at best", "2.20×"),
        ("softmax-fp16: triton_gallery / peers at median", "1.01×"),
    ],
)
def test_quote(reference, text, records):
    assert benchmark.quote(reference) == text


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("softmax-fp64: torch at 4096", FileNotFoundError, "benchmark softmax-fp64: no record has this name"),
        ("softmax-fp16: cudnn at 4096", ValueError, "one of triton_gallery, torch, torch.compile, peers, limit, got"),
        ("softmax-fp16: torch / cudnn at 4096", ValueError, "got 'cudnn'"),
        ("softmax-fp16: torch at 512", ValueError, "one of worst, best, median, 256, 1024, 4096, 16384, got '512'"),
        ("softmax-fp16: torch / torch.compile at 16384", ValueError, "256, 1024, 4096, got '16384'"),
        ("softmax-fp16: torch", ValueError, "reference must read '<benchmark>: <series> [/ <series>] at"),
        ("softmax-fp16 torch at 4096", ValueError, "got 'softmax-fp16 torch at 4096'"),
        (3, TypeError, "quote: reference must be a str, got int"),
    ],
)
def test_quote_refuses(reference, error, message, records):
    with pytest.raises(error, match=re.escape(message)):
        benchmark.quote(reference)


def test_quoted_numbers_have_three_digits():
    assert [_report._number(value) for value in (3122.4, 99.96, 45.64, 0.9123)] == ["3122", "100.0", "45.6", "0.912"]


# --- the environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interpret", "what"), [(True, "kernels run in the interpreter"), (False, "no kernel can run")]
)
def test_environment_without_a_gpu_says_whether_kernels_run(interpret, what, monkeypatch):
    monkeypatch.setattr(benchmark, "_device", lambda: None)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
    assert benchmark.environment()["gpu"] == f"none: {what}"


def test_environment_names_versions_and_commit(monkeypatch):
    monkeypatch.setenv("GALLERY_COMMIT", "0123ABC")
    text = str(benchmark.environment())
    for expected in (torch.__version__, triton.__version__, triton_gallery.__version__, "0123abc"):
        assert expected in text
    assert re.search(r"^date +20\d\d-\d\d-\d\d$", text, re.MULTILINE)


def test_commit_of_a_checkout_and_of_an_installed_package(tmp_path, monkeypatch):
    def git(*args):
        options = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *options, *args], check=True, capture_output=True)

    package = tmp_path / "src" / "triton_gallery"
    (package / "records").mkdir(parents=True)
    source = package / "benchmark.py"
    source.write_text("one")
    monkeypatch.setattr(benchmark, "__file__", str(source))
    found = benchmark._commit.__wrapped__
    git("init")
    (tmp_path / "README.md").write_text("another project's checkout, where the package is not tracked")
    git("add", "README.md")
    git("commit", "-m", "one")
    assert found() == "unknown"
    git("add", ".")
    git("commit", "-m", "two")
    clean = found()
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    (package / "records" / "new.json").write_text("{}")
    (tmp_path / "README.md").write_text("changed")
    assert found() == clean, "neither a new record nor prose changes what was measured"
    source.write_text("two")
    assert found() == f"{clean}-dirty"


def test_import_loads_neither_kernels_nor_plotting_nor_a_device():
    code = (
        "import sys, triton_gallery.benchmark, torch;"
        "print({'matplotlib', 'pandas', 'torch._dynamo'} & set(sys.modules), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() False"
    for module in (benchmark, _report, _source):
        imported = re.findall(r"^from \.(\w*) import", Path(module.__file__).read_text(), re.MULTILINE)
        assert set(imported) <= {"_arguments", "_report", "_source"}


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_measure_orders_its_quantiles_and_flushes_the_cache(device):
    x = torch.randn(2**22, device=device)  # 16 MiB in and out stay in a large L2 unless it is flushed
    median, fast, slow = benchmark.measure(lambda: x.neg())
    assert 0 < fast <= median <= slow
    assert benchmark.gbps(2 * x.nbytes, (median, fast, slow))[0] < benchmark.limit("copy")["value"] * 1.1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", benchmark.LIMITS)
def test_limit_is_measured_once(kind, device):
    if kind == "matmul-fp8" and torch.version.cuda and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 products on this GPU")
    assert benchmark.limit(kind)["value"] > 1
    assert benchmark.limit(kind) is benchmark.limit(kind)


@pytest.mark.gpu
def test_run_on_a_gpu_writes_a_complete_record(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_GALLERY_RECORDS", str(tmp_path))
    if benchmark.environment()["commit"] == "unknown":
        monkeypatch.setenv("GALLERY_COMMIT", "0" * 7)

    def bench(M, N, provider):
        x = torch.randn(M, N, device=device)
        if provider == "torch" and N == 1024:
            torch.empty(2**50, device=device)
        add = triton_gallery.add if provider == "triton_gallery" else torch.add
        return benchmark.gbps(3 * x.nbytes, benchmark.measure(lambda: add(x, x)))

    report = benchmark.perf_report(make_benchmark(), title="Sum", limit="copy", rounds=2)(bench).run()
    assert list(report.series("torch")) == [256] and list(report.series("triton_gallery")) == [256, 1024]
    (file,) = tmp_path.glob("*/softmax-fp16.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    benchmark.validate(record)
    assert "OutOfMemoryError" in record["left_out"][0]["why"]


def test_a_file_that_is_no_record_is_named(records):
    (records / "nvidia-h200" / "softmax-fp16.json").write_text('{"benchmark"')
    with pytest.raises(ValueError, match=r"^record nvidia-h200/softmax-fp16\.json: not valid JSON: "):
        benchmark.load("softmax-fp16")
