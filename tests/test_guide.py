"""The programming guide: its chapters measure as pages do, and end with what to read next."""

import os
import re
import subprocess
import sys
from pathlib import Path

import gallery
import pytest

from triton_gallery import _source, benchmark

CHAPTERS = {path.parent.name: path for path in sorted(gallery.GUIDE.glob("*/*.rst"))}
MEASURING = [path for name, path in CHAPTERS.items() if name in gallery.measuring()]

each_chapter = pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=lambda path: path.parent.name)

CHAPTER = """\
Title
=====

.. run::
   :both:

   N = 3

   def work(x):
       return N * x

Text with ``.. run::`` in it.

.. run::
   :compiled:

   never = 1

.. run::

   @tg.benchmark.perf_report(None, title="x")
   def bench_work(x):
       return work(x)
"""


def test_the_script_of_a_chapter_has_each_line_where_it_stands():
    script = gallery.script(CHAPTER).splitlines()
    shown = CHAPTER.splitlines()
    assert [i for i, line in enumerate(script) if line.strip()] == [6, 8, 9, 20, 21, 22]
    assert all(not line or shown[i] == f"   {line}" for i, line in enumerate(script))


def test_chapters_that_measure_are_scripts_beside_the_pages(tmp_path, monkeypatch):
    assert MEASURING and "chapter-5" in gallery.measuring() and "chapter-4" not in gallery.measuring()
    monkeypatch.setattr(sys, "argv", ["gallery.py", "--all", str(tmp_path), "--keep-references"])
    gallery.main()
    names = {path.stem for path in tmp_path.glob("*.py")}
    assert names == set(gallery.measuring())
    assert (tmp_path / "chapter-5.py").read_text(encoding="utf-8") == gallery.measuring()["chapter-5"]


def test_pages_and_chapters_that_are_gone_are_removed_and_nothing_else(tmp_path, monkeypatch):
    for gone in ("99-gone.py", "chapter-4.py", "chapter-9.py"):
        (tmp_path / gone).touch()
    own = {"chapter-5-notes.py", "chapter-9.txt", "chapter-x.py", "notes.py", "9-lives.py"}
    for name in own:
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "argv", ["gallery.py", "--all", str(tmp_path), "--keep-references"])
    gallery.main()
    written = {f"{name}.py" for name in gallery.measuring()} | {"GALLERY_HEADER.rst"}
    assert {path.name for path in tmp_path.iterdir()} == written | own


def test_a_benchmark_in_a_chapter_knows_the_text_of_the_whole_chapter():
    namespace = {"__source__": gallery.script(CHAPTER)}
    exec("def bench_work(x): pass", namespace)
    report = benchmark.PerfReport(namespace["bench_work"], None, "x", None, 1)
    digest = report._digest()
    assert digest == _source.function_digest(gallery.script(CHAPTER), "bench_work") != None  # noqa: E711
    namespace["__source__"] = gallery.script(CHAPTER.replace("N = 3", "N = 4"))
    assert report._digest() not in (digest, None)


DRY_RUN = """
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton

import triton_gallery as tg
from triton_gallery import codegen
from triton_gallery._launch import compile_only

sys.path[:0] = sys.argv[2:]
from test_examples import benchmarks

chapter, folder = Path(sys.argv[1]), Path.cwd()
triton.runtime.driver.set_active(codegen._TargetDriver(90, "sm_90"))
launched = set()

def launch(kernel, grid):
    def compile(*args, **kwargs):
        assert min(grid) > 0, (kernel.__name__, grid)
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
        assert compiled.metadata.shared <= 227 * 1024, (kernel.__name__, kwargs)
        launched.add(kernel.__name__)
    return compile

def measure(call, quantiles=None):
    call()
    return 1.0, 0.9, 1.1

triton.runtime.jit.JITFunction.__getitem__ = launch
torch.cuda.get_device_properties = lambda: SimpleNamespace(multi_processor_count=132)
tg.benchmark.measure = triton.testing.do_bench = triton.testing.do_bench_cudagraph = measure
for report in benchmarks(chapter, folder):
    bench = report.benchmark
    report.fn.__globals__.update(DEVICE="meta", stopwatch=measure, calls_per_ms=measure)
    names = [name for name in bench.line_vals if name != "graph"]  # only a GPU can record one
    for x in bench.x_vals:
        sizes = dict(zip(bench.x_names, x if isinstance(x, tuple) else (x,), strict=True))
        rates = []
        for name in names:
            with compile_only():
                rates.append(report.fn(**sizes, **{bench.line_arg: name}, **bench.args))
        assert any(rates), (bench.plot_name, x)
print(*sorted(launched))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("chapter", MEASURING, ids=lambda path: path.parent.name)
def test_what_a_chapter_measures_compiles_for_hopper(chapter, tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (gallery.SRC, Path(gallery.__file__).parent)))
    command = [sys.executable, "-c", DRY_RUN, str(chapter), str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Every kernel of the chapter takes part.
    text = gallery.script(chapter.read_text(encoding="utf-8"))
    assert done.stdout.split() == sorted(re.findall(r"@triton\.jit.*\n+def (\w+)", text))


@each_chapter
def test_a_chapter_ends_with_what_to_read_next(chapter):
    text = chapter.read_text(encoding="utf-8")
    _, _, end = text.partition("\nWhat to read next\n-----------------\n")
    # The bibliography, and where the page ran, may stand below.
    items = re.findall(r"^- (?:.*\n(?:  .*\n)*)", re.split(r"\n[^\n]+\n[-~]{5,}\n", end)[0], re.MULTILINE)
    assert 2 <= len(items) <= 5, f"{chapter.parent.name}: two to five things to read, got {len(items)}"
    for item in items:
        assert re.search(r":(?:doc|ref|cite:\w+|func|mod):`|`__?(?:\W|$)", item), f"{item!r} leads nowhere"
        assert len(item.split()) >= 8, f"{item!r} does not say why"
    assert ":cite:" in "".join(items)
