"""The gallery's pages: each runs as a script and as a notebook, has every section, and declares what its records hold.

The pages run as they do for a reader without a GPU, also where there is one: `make html` and `make record` are what
measures.
"""

import ast
import dis
import functools
import inspect
import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import CodeType
from unittest import mock

import gallery
import pytest
import torch
import triton

import triton_gallery
from triton_gallery._report import COPY
from triton_gallery.benchmark import PerfReport

PAGES = sorted(gallery.EXAMPLES.glob("[0-9][0-9]-*.py"))
# Of the guide, the chapters that measure
CHAPTERS = [path for path in sorted(gallery.GUIDE.glob("*/*.rst")) if path.parent.name in gallery.measuring()]
RECORDS = gallery.SRC / "triton_gallery" / "records"
NOTICE = "triton_gallery: no GPU found; kernels run on CPU tensors in Triton's interpreter."

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def without_gpu() -> dict[str, str]:
    """The environment of a reader without a GPU, who has set nothing but the way to the package."""
    ours = ("TRITON_INTERPRET", "TRITON_GALLERY_RECORDS", "MPLBACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PYTHONPATH": str(gallery.SRC), "CUDA_VISIBLE_DEVICES": ""}


def generated(page: Path, folder: Path) -> Path:
    """The page as readers download it."""
    path = folder / page.name
    path.write_text(gallery.generate(page), encoding="utf-8")
    return path


def notebook_of(script: Path) -> dict:
    """The notebook that sphinx-gallery makes of a downloaded page, under the site's settings."""
    gen_gallery = pytest.importorskip("sphinx_gallery.gen_gallery")
    from sphinx_gallery import notebook, py_source_parser

    settings = runpy.run_path(str(gallery.ROOT / "conf.py"))["sphinx_gallery_conf"]
    settings["first_notebook_cell"] = gallery.first_cell(triton_gallery.__version__)
    assert settings["remove_config_comments"]
    blocks = [
        (label, py_source_parser.remove_config_comments(content), line)
        for label, content, line in py_source_parser.split_code_and_text_blocks(str(script))[1]
    ]
    return notebook.jupyter_notebook(blocks, gen_gallery.DEFAULT_GALLERY_CONF | settings, script.parent)


def test_pages_are_numbered_from_one():
    assert [int(page.name[:2]) for page in PAGES] == list(range(1, len(PAGES) + 1)) and len(PAGES) >= 6


# --- running ----------------------------------------------------------------------------------------------------------


def these(*pages: Path):
    """Each page: these at every change, the others in `make fuzz`. As pages of the site all run at every change."""
    params = [pytest.param(page, marks=[] if page in pages else pytest.mark.slow) for page in PAGES]
    return pytest.mark.parametrize("page", params, ids=[page.stem for page in PAGES])


@these()
def test_page_runs_as_a_script(page, tmp_path):
    script = generated(page, tmp_path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # More threads would count, too, while they wait for each other in a loop.
    environment = without_gpu() | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, script.name]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    # Its share of the processor, which does not depend on what else the machine is doing.
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert run.stderr.count(NOTICE) == 1
    assert "the committed record is shown, measured on NVIDIA H" in run.stdout or "not yet measured" in run.stdout
    assert list(tmp_path.iterdir()) == [script]


DRAW = """
import io, runpy, sys
import matplotlib.pyplot as plt
runpy.run_path(sys.argv[1], run_name="__main__")
for number in plt.get_fignums():
    plt.figure(number).savefig(io.BytesIO(), format="svg")
"""


@pytest.mark.slow
@these(PAGES[2])
def test_page_draws_its_figures_where_nothing_is_measured(page, tmp_path):
    """Who changes kernels has no records of them, and builds the site all the same."""
    src = shutil.copytree(gallery.ROOT / "src", tmp_path / "src")
    for operation in ("vector_add", "softmax", "matmul", "dropout", "layer_norm", "attention"):
        with (src / "triton_gallery" / f"{operation}.py").open("a", encoding="utf-8") as file:
            file.write("\n_CHANGED = True\n")
    environment = without_gpu() | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(src)}
    command = [sys.executable, "-c", DRAW, generated(page, tmp_path).name]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "not yet measured since the kernels changed" in run.stdout


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """A Python in which `pip install` put the package, beside the libraries that this one has; no checkout in sight."""
    folder = tmp_path_factory.mktemp("installed")
    commands = [
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "env")],
    ]
    for command in commands:
        subprocess.run(command, cwd=gallery.ROOT, check=True, capture_output=True)
    python = folder / "env" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    assert "triton_gallery/py.typed" in zipfile.ZipFile(wheel).namelist()
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, cwd=folder, check=True, capture_output=True)
    # Only now: beside a package of the same version pip would install nothing.
    (site,) = folder.glob("env/lib/*/site-packages")
    (site / "libraries.pth").write_text(f"{Path(torch.__file__).parents[1]}\n{Path(triton.__file__).parents[1]}\n")
    return python


@these(PAGES[0])
def test_page_runs_as_a_notebook_where_the_package_is_installed(page, installed, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat

    nb = nbformat.reads(json.dumps(notebook_of(generated(page, tmp_path))), as_version=4)
    nb.cells.append(nbformat.v4.new_code_cell("print(triton_gallery.__file__)"))
    # A kernel of that very Python, whichever others the machine has.
    kernel = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = [str(installed), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    for name, folder in {"JUPYTER_PATH": "jupyter", "JUPYTER_RUNTIME_DIR": "runtime", "IPYTHONDIR": "ipython"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    environment = {name: value for name, value in without_gpu().items() if name != "PYTHONPATH"}
    client = nbclient.NotebookClient(nb, timeout=60, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)

    cells = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert "GPU: none: kernels run in the interpreter" in "".join(output.text for output in cells[0].outputs)
    assert cells[-1].outputs[0].text.startswith(str(installed.parents[1]))
    data = [(cell.source, output.data) for cell in cells for output in cell.outputs if "data" in output]
    figures = [source for source, kinds in data if "image/png" in kinds]
    shown = [kinds["text/html"] for _, kinds in data if "text/html" in kinds]
    declared = re.search(r"^# sphinx_gallery_thumbnail_number = (\d+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert declared and ".plot()" in figures[int(declared[1]) - 1], "the thumbnail is not the benchmark's figure"
    reports = [report for report in shown if "<table" in report or "not yet measured" in report]
    assert [report for report in reports if "easured on NVIDIA H" in report or "not yet measured" in report]
    for source, kinds in data:
        if re.search(r"\.plot\(\)$", source) and "text/html" in kinds:
            assert "made by <code>make " in kinds["text/html"] and ".json" in kinds["text/html"]


def test_a_notebook_installs_the_version_that_it_was_written_for(monkeypatch):
    for name in ("GALLERY_REPOSITORY", "GALLERY_REF"):
        monkeypatch.delenv(name, raising=False)
    assert '%pip install --quiet "triton-gallery[examples]==1.2.3"' in gallery.first_cell("1.2.3")
    monkeypatch.setenv("GALLERY_REPOSITORY", "someone/gallery")
    assert '"triton-gallery[examples] @ git+https://github.com/someone/gallery@v1.2.3"' in gallery.first_cell("1.2.3")
    monkeypatch.setenv("GALLERY_REF", "abc1234")
    assert '"triton-gallery[examples] @ git+https://github.com/someone/gallery@abc1234"' in gallery.first_cell("1.2.3")


@pytest.mark.parametrize(("version", "installs"), [("0.0.0", True), (triton_gallery.__version__, False)])
def test_a_notebook_installs_what_is_missing_only(version, installs, monkeypatch, capsys):
    code = gallery.first_cell(version).replace("%pip install --quiet ", "commands += [").replace('"\n\n', '"]\n\n')
    monkeypatch.setattr(metadata, "version", lambda name: triton_gallery.__version__)
    commands = []
    exec(code, {"commands": commands})
    assert commands == [f"triton-gallery[examples]=={version}"] * installs
    assert capsys.readouterr().out.startswith("GPU: ")


def test_a_notebook_needs_nothing_that_the_package_does_not_declare(tmp_path):
    project = tomllib.loads((gallery.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["examples"]]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in declared}
    texts = [gallery.generate(page, keep_references=True) for page in PAGES]
    texts += [path.read_text(encoding="utf-8") for path in (gallery.SRC / "triton_gallery").rglob("*.py")]
    imported = set()
    for statement in (statement for text in texts for statement in ast.parse(text).body):
        if isinstance(statement, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
            imported.add(statement.module.partition(".")[0])
    assert imported - sys.stdlib_module_names - {"triton_gallery"} <= names


# --- what a page has to hold ------------------------------------------------------------------------------------------

# Headings name ideas, so a section is known by what it does.
SECTIONS = {
    "kernel": r"^# quote: triton_gallery\.",
    "check": r"\bassert_close\(",
    "benchmark": r"\btg\.benchmark\.perf_report\($",
    "what the compiler made of it": r"\btg\.codegen\.inspect\(",
    "what we saw": r"\bprint\(\w+\.summary\(\)\)",
    "break it": r"\bexcept AssertionError\b",
    "exercises": r"^# 1\. (?s:.)*^# 2\. (?s:.)*^# 3\. ",
    "references": r"^# - :cite:`",
}


@each_page
def test_page_opens_with_title_promise_and_goals(page):
    title, underline, rest = ast.get_docstring(ast.parse(page.read_text(encoding="utf-8"))).split("\n", 2)
    assert underline == "=" * len(title)
    assert re.fullmatch(r"\n[^.]+\.\n\nYou will learn:\n\n(- [^\n]+(\n  [^\n]+)*\n?){1,4}", rest)


@each_page
def test_page_has_its_sections_in_order(page):
    text = page.read_text(encoding="utf-8")
    before_the_kernel = text.partition("\n# quote: ")[0]
    assert re.search(r"\bbytes\b", before_the_kernel) and ":math:`" in before_the_kernel
    position = 0
    for section, mark in SECTIONS.items():
        match = re.compile(mark, re.MULTILINE).search(text, position)
        assert match, f"{page.name} has no section '{section}' after line {text.count(chr(10), 0, position) + 1}"
        position = match.start()
    assert "Hint" in text[text.index("\n# 1. ") :]
    assert ast.unparse(ast.parse(text).body[-1]) == "print(tg.benchmark.environment())"


@each_page
def test_page_has_no_paragraph_that_would_be_code(page):
    # An empty line ends a text, and code goes on: what follows without # %% is code.
    above, comment = r"^(?:#(?: .*)?|[^#\n].*)\n\n+", r"(?:#(?! %%| quote:| sphinx_gallery).*\n)+"
    stray = re.compile(rf"{above}({comment})(?=\n|\Z)", re.MULTILINE)
    assert not stray.findall(page.read_text(encoding="utf-8"))


@each_page
def test_page_has_a_heading_for_every_section(page):
    headings = re.findall(r"^# (.+)\n# -{3,}$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) == len(set(headings)) >= 11
    assert headings[-1] == "Where this page ran"


@each_page
def test_each_exercise_has_a_solution_that_checks_itself(page):
    exercises, _, solutions = page.read_text(encoding="utf-8").partition("\n# Solutions\n# ---------\n")
    numbers = re.findall(r"^# (\d)\. ", exercises[exercises.rindex("\n# 1. ") :], re.MULTILINE)
    parts = re.split(r"^# Solution (\d): .+\n# ~{3,}$", solutions.partition("\n# References\n")[0], flags=re.MULTILINE)
    assert parts[1::2] == numbers
    for number, part in zip(numbers, parts[2::2], strict=True):
        assert re.search(r"^\s*assert |^\s*torch\.testing\.assert_close\(", part, re.MULTILINE), f"solution {number}"


# A rate, a time or a factor of speed, such as 3122 GB/s, 12 µs, 2.7× faster, 3 times as fast or 20 % slower.
TYPED_SPEED = re.compile(
    r"\d\s*([kMGTP]i?B|[GTP]?FLOP)(/s|S|s\b| per second)"
    r"|\d\s*([mµun]s|(milli|micro|nano)?seconds)\b"
    r"|\d\s*(×|x|times|%|percent)\s+(as\s+)?(fast|slow|quick)"
    r"|\b(speed-?up|faster|slower) (of|by)( a factor of)? \d",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    "text",
    ["at 3122 GB/s", "4.8 TB/s", "700 TFLOP/s", "989 TFLOPS", "12 µs", "2.7× faster", "2 times as fast", "5% slower"],
)
def test_typed_speed_is_recognised(text):
    assert TYPED_SPEED.search(text)


@each_page
def test_no_speed_is_typed_by_hand(page):
    # References are kept: what they turn into is measured.
    prose = re.sub(r"\s*\n#\s*", " ", gallery.generate(page, keep_references=True))
    assert not [prose[match.start() - 30 : match.end() + 10] for match in TYPED_SPEED.finditer(prose)]


# --- prose in a notebook ----------------------------------------------------------------------------------------------

# What Markdown shows as it stands, after sphinx-gallery has converted all that it can.
LEFTOVERS = {
    "directive, comment or target": r"^[ \t]*\.\. ",
    "literal block": r"::[ \t]*$",
    "role": r":[a-z][\w:+.-]*:`|`:[a-z][\w:+.-]*:",
    "double backticks": r"``",
    "option or field": r"^[ \t]*:[a-z][\w -]*:(?!`)",
    "substitution": r"(?<![\w|])\|[^\s|](?:[^|\n]*[^\s|])?\|(?![\w|])",
    "simple table": r"^[ \t]*[=-]{2,}(?:[ \t]+[=-]{2,})+[ \t]*$",
    "grid table": r"^[ \t]*\+[-=+]{2,}\+[ \t]*$",
    "footnote or citation": r"\[[^\]\n]+\]_",
    "reference": r"`__?(?!\w)|(?<![\w`])[A-Za-z]\w*__?(?=[\s.,;:)]|$)",
    "underline of a heading": r"^[ \t]*([=~^\"'#*+-])\1{3,}[ \t]*$",
    "escape": r"\\[\s`*_]",
    "formula with a blank line": r"\\begin\{align\}(?:(?!\\end\{align\})(?s:.))*\n[ \t]*\n(?s:.)*?\\end\{align\}",
}


def leftovers(markdown: str) -> list[str]:
    """The names of what is left of reStructuredText, outside code and formulas."""
    found = [name for name, mark in LEFTOVERS.items() if "formula" in name and re.search(mark, markdown)]
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\\begin\{align\}.*?\\end\{align\}|\$[^$]+\$", "M", text, flags=re.DOTALL)
    # A role in front of, or a reference behind, a piece of code must stay visible: only what is inside goes.
    text = re.sub(r"(?<!`)`(?!`)[^`]+`(?!`)", "`C`", text)
    return found + [name for name, mark in LEFTOVERS.items() if re.search(mark, text, re.MULTILINE)]


@pytest.mark.parametrize(
    ("rst", "left"),
    [
        ("Of :math:`n` rows, `x_ptr` and `a | b | c` in *one*:\n\n- `A paper <https://x.org/a_b>`_, 2019", []),
        ("A formula:\n\n.. math:: |x|_2 = \\sum_i\n   x_i\n\n.. note:: And a note.", []),
        ("Code::\n\n    x = 1", ["literal block"]),
        (".. code-block:: python\n\n   x = {'a': '``'}\n\nEnd.", []),
        (".. tip:: Do.", ["directive, comment or target"]),
        (".. literalinclude:: x.py\n   :lines: 3", ["directive, comment or target", "option or field"]),
        ("- item\n\n  .. math:: x", ["directive, comment or target"]),
        ("Call :func:`f`.", ["role"]),
        ("Call ``f``.", ["double backticks"]),
        ("See |name|.", ["substitution"]),
        ("== ==\na  b\n== ==", ["simple table"]),
        ("+--+\n|ab|\n+--+", ["substitution", "grid table"]),
        ("As shown [1]_.", ["footnote or citation"]),
        ("See `there`_ and `here`__.", ["reference"]),
        ("See there_.", ["reference"]),
        ("Text.\nHeading\n-------", ["underline of a heading"]),
        ("`x`\\ s", ["escape"]),
        (".. math::\n\n   a\n\n   b", ["formula with a blank line"]),
    ],
)
def test_leftovers_of_a_conversion_are_recognised(rst, left, tmp_path):
    script = tmp_path / "page.py"
    script.write_text(f'r"""\n{rst}\n"""\n', encoding="utf-8")
    _, cell = notebook_of(script)["cells"]
    assert leftovers("".join(cell["source"])) == left


@each_page
def test_prose_survives_the_conversion_to_a_notebook(page, tmp_path):
    cells = notebook_of(generated(page, tmp_path))["cells"]
    prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert {text: left for text in prose if (left := leftovers(text))} == {}
    assert not any("sphinx_gallery" in "".join(cell["source"]) for cell in cells)


# --- records ----------------------------------------------------------------------------------------------------------


def variables(code: CodeType, instructions: tuple[str, ...]) -> set[str]:
    """The global names that `code` and the functions in it touch with these instructions."""
    inner = [variables(constant, instructions) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {i.argval for i in dis.get_instructions(code) if i.opname in instructions}.union(*inner)


def benchmarks(page: Path, folder: Path) -> list[PerfReport]:
    """The benchmarks that a page runs, in order. Of the page, only what they are made of is executed."""
    script = folder / f"{page.stem}.py"
    if page.suffix == ".py":
        text = gallery.generate(page, keep_references=True)
    else:
        text = gallery.script(page.read_text(encoding="utf-8"))
    script.write_text(text, encoding="utf-8")
    statements = ast.parse(script.read_text(encoding="utf-8")).body
    codes = [compile(ast.Module([statement], []), str(script), "exec") for statement in statements]
    binds = [variables(code, ("STORE_NAME", "STORE_GLOBAL")) for code in codes]
    uses = [variables(code, ("LOAD_NAME", "LOAD_GLOBAL")) for code in codes]

    run = {i for i, s in enumerate(statements) if re.search(r"\bperf_report\(|\.run\(\)", ast.unparse(s))}
    size = 0
    while len(run) > size:
        size = len(run)
        # A function that declares a benchmark may be called further down.
        makers = set().union(*(binds[i] for i in run if isinstance(statements[i], ast.FunctionDef)))
        run |= {i for i, names in enumerate(uses) if names & makers}
    size = 0
    while len(run) > size:
        size = len(run)
        needed = set().union(*(uses[i] for i in run))
        run |= {i for i, names in enumerate(binds) if names & needed}

    found, namespace = [], {"__name__": page.stem}
    with mock.patch.object(PerfReport, "run", lambda self: found.append(self) or mock.MagicMock()):
        for i in sorted(run):
            exec(codes[i], namespace)
    return found


def test_wrong_syntax_is_told_with_its_page_or_chapter_and_its_line(tmp_path):
    page, chapter = tmp_path / "01-add.py", tmp_path / "chapter-1" / "add.rst"
    page.write_text("x = 1\n\ndef (\n")
    chapter.parent.mkdir()
    with pytest.raises(ValueError, match=r"^examples/01-add.py:3: invalid syntax"):
        gallery.measuring(tmp_path, tmp_path)
    page.write_text("x = 1\n")
    chapter.write_text("Text\n\n.. run::\n\n   x = 1\n   def (\n")
    with pytest.raises(ValueError, match=r"^docs/programming-guide/chapter-1/add.rst:6: invalid syntax"):
        gallery.measuring(tmp_path, tmp_path)


def test_benchmarks_are_found_without_running_the_page(tmp_path):
    page = tmp_path / "07-page.py"
    page.write_text(
        """
import triton
import triton_gallery as tg
raise_an_error
SIZES = [1, 2]
def sweep(name):
    @tg.benchmark.perf_report(
        triton.testing.Benchmark(["n"], SIZES, "p", ["a"], ["triton_gallery"], name, {}, ylabel="GB/s"), title=name
    )
    def bench(n, p):
        return no_such_name
    return bench.run()
def sweep_both():
    return [sweep(name) for name in "ab"]
reports = sweep_both()
reports[0].plot()
undefined(SIZES)
"""
    )
    found = [report.benchmark for report in benchmarks(page, tmp_path)]
    assert [(bench.plot_name, bench.x_vals) for bench in found] == [("a", [1, 2]), ("b", [1, 2])]


@pytest.fixture(scope="session")
def declared(tmp_path_factory):
    return functools.cache(lambda page: benchmarks(page, tmp_path_factory.mktemp("declared")))


@pytest.mark.xdist_group("declared")
@pytest.mark.parametrize("page", PAGES + CHAPTERS, ids=lambda page: page.stem)
def test_record_holds_what_the_page_declares(page, declared):
    reports = declared(page)
    assert reports, f"{page.name} runs no benchmark"
    for report in reports:
        name = report.benchmark.plot_name
        paths = sorted(RECORDS.glob(f"*/{name}.json"), key=lambda path: path.parent.name != "nvidia-h200")
        assert paths, f"{page.name} has a benchmark without a record, {name}; `make record` writes it"
        where = paths[0].relative_to(gallery.ROOT)
        record, header = json.loads(paths[0].read_text(encoding="utf-8")), report._header()
        keys = ("benchmark", "title", "x", "x_log", "y_log", "unit", "inputs")
        assert {key: record[key] for key in keys} == {key: header[key] for key in keys}, where
        assert (record["limit"] is None) == (report.limit is None), where
        xs = ["×".join(map(str, x)) if isinstance(x, list | tuple) else x for x in report.benchmark.x_vals]
        points = [(point["x"], point["provider"]) for point in record["rows"] + record.get("left_out", [])]
        # A record of before there were copies at each point has none.
        copies = [COPY] * (report.limit == "copy" and COPY in {provider for _, provider in points})
        declared = [(x, name) for x in xs for name in report.benchmark.line_names + copies]
        assert sorted(points, key=str) == sorted(declared, key=str), where


@pytest.mark.xdist_group("declared")
def test_every_record_belongs_to_a_page(declared):
    names = {report.benchmark.plot_name for page in PAGES + CHAPTERS for report in declared(page)}
    assert {path.stem for path in RECORDS.glob("*/*.json")} == names


# --- a page that fails ------------------------------------------------------------------------------------------------

SETTINGS = """
import sys
sys.path.insert(0, "docs/_ext")
extensions = ["gallery", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["_generated"]
sphinx_gallery_conf = {
    "examples_dirs": "_generated/examples",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"/\\d\\d-",
    "write_computation_times": False,
}
"""

PAGE = '''"""
Page
====

One sentence.
"""

import triton_gallery as tg
import triton

LINES = {{"line_arg": "p", "line_vals": ["triton_gallery"], "line_names": ["triton_gallery"]}}
BENCHMARK = triton.testing.Benchmark(["n"], [1], plot_name="unheard-of", args={{}}, ylabel="GB/s", **LINES)

# %%
# Text.

{}
'''
SHOWN = "print('shown')"


@pytest.fixture
def build(tmp_path):
    """Build a site of two pages, the second of which holds the given lines, as `make html` does."""
    pytest.importorskip("sphinx_gallery")

    def build(lines: str) -> subprocess.CompletedProcess:
        (tmp_path / "docs" / "_ext").mkdir(parents=True)
        (tmp_path / "examples").mkdir()
        # A copy, because the extension looks for pages and sources around itself.
        shutil.copy(gallery.__file__, tmp_path / "docs" / "_ext")
        shutil.copy(gallery.REFERENCES, tmp_path / "docs")
        (tmp_path / "src").symlink_to(gallery.SRC)
        (tmp_path / "conf.py").write_text(SETTINGS)
        (tmp_path / "docs" / "index.rst").write_text("Site\n====\n\n.. toctree::\n\n   tutorials/index\n")
        (tmp_path / "examples" / "GALLERY_HEADER.rst").write_text("Tutorials\n=========\n")
        (tmp_path / "examples" / "01-good.py").write_text(PAGE.format(SHOWN))
        (tmp_path / "examples" / "02-other.py").write_text(PAGE.format(lines))
        command = [sys.executable, "-m", "sphinx", "-c", ".", "-n", "-W", "--keep-going", "docs", "html"]
        return subprocess.run(command, cwd=tmp_path, env=without_gpu(), capture_output=True, text=True)

    return build


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("# quote: triton_gallery.softmax.nope", "examples/02-other.py:17: quote: triton_gallery/softmax.py has no"),
        pytest.param(
            "# It is :measured:`unknown: torch at 1`.",
            "examples/02-other.py:17: measured: 'unknown: torch at 1'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "# - :cite:`nobody2000`: no.",
            "examples/02-other.py:17: cite: docs/refs.bib has no entry 'nobody2000'",
            marks=pytest.mark.slow,
        ),
        ("assert 1 + 1 == 3, 'arithmetic'", "AssertionError: arithmetic"),
        ("assert 1 + 1 == 2", "examples/02-other.py: the page executed nothing that shows"),
        pytest.param(
            "raise SystemExit(0)", "RuntimeError: the page ended the process: SystemExit(0)", marks=pytest.mark.slow
        ),
    ],
    ids=["quote", "number", "work", "assertion", "silent", "exit"],
)
def test_a_page_that_fails_ends_the_build_and_is_named(build, lines, message):
    run = build(lines)
    assert run.returncode != 0
    assert message in run.stderr and "02-other.py" in run.stderr
    assert "executed nothing" not in run.stderr.replace(message, "")
    assert "01-good.py" not in run.stderr


UNHEARD_OF = """
report = tg.benchmark.perf_report(BENCHMARK, title="x")(lambda n, p: 1).run()
report.plot()

# %%

report"""


@pytest.mark.parametrize("lines", [SHOWN, UNHEARD_OF], ids=["printing", "measured by nobody"])
def test_pages_that_succeed_end_the_build_well(build, lines):
    run = build(lines)
    assert run.returncode == 0, run.stderr


# --- the checklist for who adds one -----------------------------------------------------------------------------------

CONTRIBUTING = gallery.ROOT / "docs" / "contributing.rst"


def test_the_checklist_names_every_section_and_tests_that_exist():
    text = CONTRIBUTING.read_text(encoding="utf-8")
    flat = re.sub(r"\s+", " ", text)
    assert [section for section in SECTIONS if f"*{section}*" not in flat] == []
    named = re.findall(r"^     - ``(test_\w+)``$", text, re.MULTILINE)
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert len(named) >= 12 and [name for name in named if f"def {name}(" not in tests] == []
    # And the other way round: what is asked of each page is on the list.
    ours = Path(__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"^@each_page\ndef (test_\w+)", ours, re.MULTILINE)) <= set(named)


def test_commands_that_contributors_are_told_exist():
    makefile = (gallery.ROOT / "Makefile").read_text(encoding="utf-8")
    for command in set(re.findall(r"(?:``|\$ )(?:\w+=\S+ )?make ([\w-]+)", CONTRIBUTING.read_text(encoding="utf-8"))):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), f"make {command}"


def test_every_public_function_has_its_page():
    index = (gallery.ROOT / "docs" / "python-api" / "index.rst").read_text(encoding="utf-8")
    functions = [name for name in triton_gallery.__all__ if inspect.isfunction(getattr(triton_gallery, name))]
    assert len(functions) >= 8
    for name in functions:
        page = gallery.ROOT / "docs" / "python-api" / f"{name}.rst"
        assert f".. autofunction:: triton_gallery.{name}\n" in page.read_text(encoding="utf-8")
        assert re.search(rf":func:`~?triton_gallery\.{name}`", index) and f"\n   {name}\n" in index


def test_every_kernel_is_in_the_documentation():
    pages = "".join(path.read_text(encoding="utf-8") for path in (gallery.ROOT / "docs" / "python-api").glob("*.rst"))
    for path in (gallery.SRC / "triton_gallery").rglob("*.py"):
        name = ".".join(path.relative_to(gallery.SRC).with_suffix("").parts)
        jitted = re.findall(
            r"^@(?:triton|gluon)\.jit.*\n(?:.*\n)*?def (_\w+_kernel)\(", path.read_text(encoding="utf-8"), re.M
        )
        assert not jitted or f".. kernels:: {name}\n" in pages, f"no page lists the kernels of {name}: {jitted}"
