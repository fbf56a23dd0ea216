"""The documentation's own extensions: docs/_ext."""

import ast
import contextlib
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import gallery
import inventories
import preflight
import publish
import pytest
import torch

from triton_gallery import __version__
from triton_gallery.benchmark import Report, load, slug

# A machine that only measures has no Sphinx.
SphinxTestApp = pytest.importorskip("sphinx.testing.util").SphinxTestApp
InventoryFile = pytest.importorskip("sphinx.util.inventory").InventoryFile
measured = pytest.importorskip("measured")

EXAMPLES = sorted(gallery.EXAMPLES.glob("[0-9][0-9]-*.py"))

MODULE = '''
import functools

LIMIT = 3

if LIMIT:
    CHOICES: list = [
        1,
        2,
    ]


# far away

# Why it is so,
# in two lines.
@functools.cache
@functools.wraps(
    print
)
def first():
    """Says one."""
    return 1  # one


class Outer:
    # inside
    def method(self):
        def innermost():
            return 2

        return innermost
'''


@pytest.fixture
def src(tmp_path: Path) -> Path:
    package = tmp_path / "src" / "package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("def public():\n    pass\n")
    (package / "module.py").write_text(MODULE)
    (package / "deep" / "other.py").write_text("def there():\n    pass\n")
    return tmp_path / "src"


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "GALLERY_HEADER.rst").write_text("Pages\n=====\n")
    (folder / "01-one.py").write_text('"""One"""\n\n# quote: package.module.LIMIT\n')
    (folder / "02-two.py").write_text('"""Two"""\n')
    return folder


def page(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "07-page.py"
    path.write_text(text)
    return path


# --- quoting ----------------------------------------------------------------------------------------------------------


def test_quote_takes_decorators_and_the_comments_directly_above(src):
    assert gallery.source_of("package.module.first", src) == (
        "# Why it is so,\n# in two lines.\n@functools.cache\n@functools.wraps(\n    print\n)\n"
        'def first():\n    """Says one."""\n    return 1  # one'
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("package.public", "def public():\n    pass"),
        ("package.deep.other.there", "def there():\n    pass"),
        ("package.module.LIMIT", "LIMIT = 3"),
        ("package.module.CHOICES", "CHOICES: list = [\n    1,\n    2,\n]"),
        ("package.module.Outer.method.innermost", "def innermost():\n    return 2"),
    ],
)
def test_quote_finds(src, name, text):
    assert gallery.source_of(name, src) == text


def test_quote_dedents_a_method_and_its_comment(src):
    assert gallery.source_of("package.module.Outer.method", src).startswith("# inside\ndef method(self):\n    def ")


def test_quotes_that_follow_each_other_are_two_blank_lines_apart(src, tmp_path):
    text = "x = 1\n\n# quote: package.module.LIMIT\n# quote: package.public\n\ny = 2\n"
    expected = "x = 1\n\nLIMIT = 3\n\n\ndef public():\n    pass\n\ny = 2\n"
    assert gallery.generate(page(tmp_path, text), src) == expected


def test_a_page_without_quotes_stays_as_it_is(src, tmp_path):
    text = '"""Title"""\n\n# %%\n# We quote: nothing.\nprint("# quote: x")\n'
    assert gallery.generate(page(tmp_path, text), src) == text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package.module.second", "07-page.py:3: quote: package/module.py has no definition second"),
        ("package.module.Outer.first", "07-page.py:3: quote: package/module.py has no definition Outer.first"),
        ("nothing.module.first", "07-page.py:3: quote: no module in src/ holds 'nothing.module.first'"),
        ("first", "07-page.py:3: quote: no module in src/ holds 'first'"),
    ],
)
def test_a_quote_of_nothing_names_page_line_and_name(src, tmp_path, name, message):
    with pytest.raises(gallery.PageError, match=f"^{message}$"):
        gallery.generate(page(tmp_path, f"\n\n# quote: {name}\n"), src)


def test_a_quote_right_below_prose_is_refused(src, tmp_path):
    with pytest.raises(gallery.PageError, match=r"^07-page\.py:3: quote: leave a blank line"):
        gallery.generate(page(tmp_path, "# %%\n# Prose.\n# quote: package.public\n"), src)


# --- measured numbers -------------------------------------------------------------------------------------------------


@pytest.fixture
def quote(monkeypatch):
    def answer(*what):
        if what != ("triton_gallery", "torch", "4096"):
            raise ValueError(f"no such point: {what}")
        return "2.71×"

    # Whatever is committed
    monkeypatch.setattr(gallery, "report", lambda name: SimpleNamespace(quote=answer))


def test_measured_numbers_are_filled_in_across_a_line_break(quote, tmp_path):
    text = "# It is :measured:`softmax-fp16: triton_gallery /\n#   torch at 4096` faster.\n"
    assert gallery.generate(page(tmp_path, text)) == "# It is 2.71× faster.\n"
    assert gallery.generate(page(tmp_path, text), keep_references=True) == text


def test_an_unknown_measurement_names_page_line_and_reference(quote, tmp_path):
    with pytest.raises(gallery.PageError, match=r"^07-page\.py:2: measured: 'x: torch at 1': no such point: "):
        gallery.generate(page(tmp_path, "\n# :measured:`x: torch at 1`\n"))


# --- cited works ------------------------------------------------------------------------------------------------------

WORKS = """@comment{Not a work.}

@misc{van2001first,
  author        = {van First, Ada Q. and Second, Bea and
                   Third, Cy},
  title         = {A {GPU} in
                   Lines},
  year          = {2001},
  eprint        = {0101.00001},
  archiveprefix = {arXiv},
}

@manual{four,
  author = {{NVIDIA} and One, A. and Two, B. and Three, C.},
  title = {Four},
  year = {2004},
  doi = {10.1/4}
}
"""


@pytest.fixture
def works(tmp_path, monkeypatch):
    path = tmp_path / "refs.bib"
    path.write_text(WORKS, encoding="utf-8")
    monkeypatch.setattr(gallery, "REFERENCES", path)


def test_cited_works_are_filled_in_and_the_lines_broken_anew(works, tmp_path):
    remark = ", ".join(["a remark that goes on"] * 3)
    text = f"# - :cite:`van2001first`: {remark},\n#   {remark}.\n# - :cite:`four`\n# - Other.\n"
    first = "# - `A GPU in Lines <https://arxiv.org/abs/0101.00001>`_, van First, Second and Third, 2001: a remark that"
    generated = gallery.generate(page(tmp_path, text))
    assert generated.startswith(first) and max(map(len, generated.splitlines())) <= 120
    assert f": {remark}, {remark}.\n" in generated.replace("\n#   ", " ")
    assert generated.endswith(".\n# - `Four <https://doi.org/10.1/4>`_, NVIDIA et al., 2004\n# - Other.\n")
    assert gallery.generate(page(tmp_path, text), keep_references=True) == text


def test_an_unknown_work_names_page_line_and_key(works, tmp_path):
    with pytest.raises(gallery.PageError, match=r"^07-page\.py:2: cite: docs/refs\.bib has no entry 'five'$"):
        gallery.generate(page(tmp_path, "\n# - :cite:`five`: no.\n"))


def test_the_bibliography_is_read_as_bibtex_reads_it():
    database = pytest.importorskip("pybtex.database").parse_file(str(gallery.REFERENCES))
    richtext = pytest.importorskip("pybtex.richtext")
    assert len(database.entries) > 40
    for key, entry in database.entries.items():
        names = [" ".join(person.prelast_names + person.last_names) for person in entry.persons["author"]]
        title, first = (str(richtext.Text.from_latex(text)) for text in (entry.fields["title"], names[0]))
        told = gallery.cited(key)
        assert told.startswith(f"`{title} <https://") and told.endswith(f", {entry.fields['year']}")
        assert f">`_, {first}" in told and ("et al." in told) == (len(names) > 3)


def test_every_work_is_cited_somewhere():
    texts = [path.read_text(encoding="utf-8") for path in [*EXAMPLES, *gallery.ROOT.glob("docs/**/*.rst")]]
    keys = re.findall(r":cite(?::\w+)?:`([^`]+)`", "\n".join(texts))
    cited = {key.strip() for group in keys for key in group.split(",")} - {"<key>"}
    assert cited == set(gallery._works(gallery.REFERENCES.read_text(encoding="utf-8")))


# --- words that lead to the guide -------------------------------------------------------------------------------------


def test_emphasised_titles_are_links_on_the_site(tmp_path):
    ours = "getting-started/tutorials/01-page"
    files = {
        "conf.py": 'extensions = ["guide"]',
        "index.rst": "Site\n====\n\n.. toctree::\n   :glob:\n\n   */*\n   */*/*\n\n*A long chapter*\n",
        f"{ours}.rst": "Page\n====\n\nA *rose* and *A long\nchapter*.\n",
        "programming-guide/chapter.rst": "A long chapter\n==============\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    app = SphinxTestApp("html", srcdir=tmp_path, freshenv=True)
    try:
        app.build()
        assert not app.warning.getvalue()
        pages = {name: (Path(app.outdir) / f"{name}.html").read_text(encoding="utf-8") for name in (ours, "index")}
    finally:
        app.cleanup()
    title = '<a class="reference internal" href="../../programming-guide/chapter.html"><em>A long\nchapter</em></a>'
    assert f"<p>A <em>rose</em> and {title}.</p>" in pages[ours]
    assert "<p><em>A long chapter</em></p>" in pages["index"]


# --- all pages --------------------------------------------------------------------------------------------------------


def test_write_all_writes_what_changed_and_removes_stale_pages(examples, src, tmp_path):
    dest = tmp_path / "generated"
    dest.mkdir()
    (dest / "03-old.py").write_text("")
    (dest / "kept.txt").write_text("")
    gallery.write_all(dest, examples, src)
    assert sorted(path.name for path in dest.iterdir()) == ["01-one.py", "02-two.py", "GALLERY_HEADER.rst", "kept.txt"]
    assert (dest / "01-one.py").read_text() == '"""One"""\n\nLIMIT = 3\n'

    for path in dest.iterdir():
        os.utime(path, (1, 1))
    (src / "package" / "module.py").write_text("LIMIT = 4\n")
    gallery.write_all(dest, examples, src)
    assert [path.name for path in dest.iterdir() if path.stat().st_mtime != 1] == ["01-one.py"]
    assert (dest / "01-one.py").read_text() == '"""One"""\n\nLIMIT = 4\n'


def test_fingerprint_follows_the_quoted_module_and_its_records(examples, src):
    def prints():
        return [gallery.fingerprint(examples / name, src) for name in ("01-one.py", "02-two.py")]

    one, two = prints()
    (src / "package" / "deep" / "other.py").write_text("")
    assert prints() == [one, two]
    (src / "package" / "module.py").write_text("LIMIT = 3  # still\n")
    changed = prints()
    assert changed[0] != one and changed[1] == two
    (src / "package" / "records" / "gpu").mkdir(parents=True)
    (src / "package" / "records" / "gpu" / "module-fp16.json").write_text("{}")
    assert prints()[0] != changed[0]


@pytest.mark.parametrize("name", ["trace.py", "_report.py", "hopper/_gluon.py", "records/gpu/vector-add-fp32.json"])
def test_fingerprint_follows_what_every_page_prints_with(examples, src, name):
    before = gallery.fingerprint(examples / "01-one.py", src)
    (src / "triton_gallery" / name).parent.mkdir(parents=True)
    record = Path(gallery.__file__).parents[2] / "src/triton_gallery/records/nvidia-h200/vector-add-fp32.json"
    (src / "triton_gallery" / name).write_text(record.read_text() if name.endswith(".json") else "x = 1")
    assert gallery.fingerprint(examples / "01-one.py", src) != before


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_page_quotes_what_exists(path):
    ast.parse(gallery.generate(path, keep_references=True))


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_GALLERY_RECORDS", "")  # or on a GPU the extension would set it, for later tests too
    folders = {"examples_dirs": "_generated/examples", "gallery_dirs": "tutorials"}
    return SimpleNamespace(srcdir=tmp_path / "docs", config=SimpleNamespace(sphinx_gallery_conf=folders))


def test_only_the_page_whose_module_changed_is_executed_again(app, examples, src):
    (app.srcdir / "tutorials").mkdir(parents=True)
    gallery._builder_inited(app, examples, src)

    # sphinx-gallery leaves a page's output and a checksum; 03 is a page that no longer exists.
    tutorials = app.srcdir / "tutorials"
    for page in (app.srcdir / "_generated" / "examples").glob("0*.py"):
        (tutorials / f"{page.name}.md5").write_text(hashlib.md5(page.read_bytes()).hexdigest())
        (tutorials / f"{page.stem}.rst").write_text(
            ".. rst-class:: sphx-glr-script-out\n\n.. rst-class:: sphx-glr-timing\n"
        )
    outputs = {tutorials / name for name in ("01-one.py.md5", "02-two.py.md5", "03-old.rst", "index.rst")}
    for path in outputs:
        path.touch()
    thumbnails = tutorials / "images" / "thumb"
    thumbnails.mkdir(parents=True)
    for name in ("01-one", "02-two"):
        (thumbnails / f"sphx_glr_{name}_thumb.png").touch()

    def left():
        gallery._builder_inited(app, examples, src)
        return {path.name for path in outputs if path.exists()}

    assert left() == {"01-one.py.md5", "02-two.py.md5", "index.rst"}
    (src / "package" / "module.py").write_text("LIMIT = 3  # still\n")
    assert left() == {"02-two.py.md5", "index.rst"}
    # That of a page that raised would stay in place of the one to come.
    assert [path.name for path in thumbnails.iterdir()] == ["sphx_glr_02-two_thumb.png"]
    # A draft wrote the page without its output, and then its text became again what had been executed.
    (tutorials / "02-two.rst").write_text("")
    assert left() == {"index.rst"}


def test_a_record_that_cannot_be_read_ends_the_build_in_one_line(app, examples, src):
    folder = src / "triton_gallery" / "records" / "nvidia-h200"
    folder.mkdir(parents=True)
    (folder / "softmax-fp16.json").write_text('{"limit": ')
    with pytest.raises(SystemExit, match=r"^record nvidia-h200/softmax-fp16\.json: not valid JSON: Expecting value"):
        gallery._builder_inited(app, examples, src)


def test_half_written_fingerprints_count_as_changed(app, examples, src):
    gallery._builder_inited(app, examples, src)
    store = app.srcdir / "_generated" / "fingerprints.json"
    whole = store.read_text()
    store.write_text(whole[: len(whole) // 2])
    gallery._builder_inited(app, examples, src)
    assert store.read_text() == whole


def test_a_fault_is_reported_until_it_is_mended(tmp_path):
    connect = "def setup(app):\n    import gallery\n    app.connect('build-finished', gallery._forget_faults)\n"
    (tmp_path / "conf.py").write_text(connect)
    (tmp_path / "index.rst").write_text("Site\n====\n\n.. toctree::\n\n   page\n")
    warnings = []
    for title in ("A page\n====\n", None, "A page\n======\n", None):
        if title:
            (tmp_path / "page.rst").write_text(title)
        app = SphinxTestApp("html", srcdir=tmp_path)
        try:
            app.build()
            warnings.append(app.warning.getvalue().count("Title underline too short"))
        finally:
            app.cleanup()
    assert warnings == [1, 1, 0, 0]


def test_a_fault_is_reported_after_a_build_that_somebody_stopped(tmp_path):
    (tmp_path / "conf.py").write_text("""
import gallery

def stop(app, *_):
    if app.config.html_title == "stop":
        raise KeyboardInterrupt

def setup(app):
    app.connect("write-started", gallery._forget_faults)
    app.connect("html-page-context", stop)
""")
    (tmp_path / "index.rst").write_text("A page\n====\n")
    warnings = []
    for title in ("stop", "go on"):
        app = SphinxTestApp("html", srcdir=tmp_path, confoverrides={"html_title": title})
        try:
            with pytest.raises(KeyboardInterrupt) if title == "stop" else contextlib.nullcontext():
                app.build()
            warnings.append(app.warning.getvalue().count("Title underline too short"))
        finally:
            app.cleanup()
    assert warnings == [1, 1]


def test_a_record_without_a_benchmark_names_no_page(monkeypatch):
    lost = Report(
        gallery.report(*gallery.README_RECORD).record | {"inputs": "nobench(x=x)"}, changed=frozenset({"benchmark"})
    )
    monkeypatch.setattr(gallery, "report", lambda *_: lost)
    assert {line.rpartition("; ")[2] for line in gallery.outdated("softmax-fp16")} == {
        "no page has this benchmark any more: delete the record"
    }


def test_the_readmes_picture_is_drawn_only_from_a_record_that_is_not_outdated(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    found = gallery.report(*gallery.README_RECORD)
    for picture in (first, second):
        monkeypatch.setattr(gallery, "report", lambda *_: Report(found.record))
        gallery.draw_readme_picture(picture)
    assert first.read_bytes() == second.read_bytes() and found.provenance() in first.read_text()
    monkeypatch.setattr(gallery, "report", lambda *_: Report(found.record, changed=frozenset({"kernels"})))
    first.write_text("as it was")
    gallery.draw_readme_picture(first)
    assert first.read_text() == "as it was" and "stays as it is: not yet measured" in capsys.readouterr().out


def test_a_bad_quote_ends_the_build_in_one_line(app, examples, src):
    (examples / "02-two.py").write_text("# quote: package.module.nope\n")
    with pytest.raises(SystemExit, match=r"^examples/02-two\.py:1: quote: package/module\.py has no definition nope$"):
        gallery._builder_inited(app, examples, src)


def test_command_line_prints_a_page(examples, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gallery.py", str(examples / "02-two.py")])
    gallery.main()
    assert capsys.readouterr().out == '"""Two"""\n'


def test_command_line_says_in_one_line_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gallery.py", str(page(tmp_path, "# quote: triton_gallery.softmax.nope\n"))])
    with pytest.raises(
        SystemExit, match=r"^examples/07-page\.py:1: quote: triton_gallery/softmax\.py has no definition"
    ):
        gallery.main()


def test_command_line_says_in_one_line_what_cannot_be_read_or_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for arguments in ([str(tmp_path)], ["--all", str(tmp_path / "file")]):
        monkeypatch.setattr(sys, "argv", ["gallery.py", *arguments])
        with pytest.raises(SystemExit, match=rf"^\[Errno .*{arguments[-1]}'$"):
            gallery.main()


def test_second_build_of_a_checkout_ends_at_once(tmp_path):
    folders = {"examples_dirs": "_generated/examples", "gallery_dirs": "tutorials"}
    config = SimpleNamespace(sphinx_gallery_conf=folders)
    first, second = (SimpleNamespace(srcdir=tmp_path, config=config) for _ in "12")
    gallery._claim(first)
    with pytest.raises(SystemExit, match=r"^another build of this checkout is under way"):
        gallery._claim(second)
    gallery._release(first)
    gallery._claim(second)
    gallery._release(second)


# --- in a small site --------------------------------------------------------------------------------------------------


@pytest.fixture
def build(tmp_path):
    """Build a site of one page and return the page's text and the warnings."""

    def build(text: str, *extensions: str) -> tuple[str, str]:
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        (site / "conf.py").write_text(f"extensions = {list(extensions)}\nnitpicky = True\n")
        (site / "index.rst").write_text("Page\n====\n\n" + text)
        app = SphinxTestApp("text", srcdir=site, freshenv=True)
        try:
            app.build()
            return app.env.get_doctree("index").astext(), app.warning.getvalue()
        finally:
            app.cleanup()

    return build


def test_run_shows_code_and_output_and_shares_a_namespace(build):
    text, warnings = build(
        ".. run::\n\n   x = 6\n\n.. run::\n   :hide-code:\n\n   print(f'x is {x * 7}')\n\n.. run::\n\n   y = 1\n", "run"
    )
    assert not warnings
    assert "x = 6" in text and "x is 42" in text and "print" not in text and "y = 1" in text


def test_run_executes_a_kernel_defined_in_the_page(build):
    text, warnings = build(
        """
.. run::

   import torch
   import triton_gallery
   import triton
   import triton.language as tl

   @triton.jit
   def _double_kernel(x_ptr, out_ptr, BLOCK_SIZE: tl.constexpr):
       offsets = tl.arange(0, BLOCK_SIZE)
       tl.store(out_ptr + offsets, 2 * tl.load(x_ptr + offsets))

   x = torch.arange(4.0, device=torch.accelerator.current_accelerator(check_available=True) or "cpu")
   out = torch.empty_like(x)

.. run::

   _double_kernel[(1,)](x, out, BLOCK_SIZE=4)
   print(out.tolist())
""",
        "run",
    )
    assert not warnings
    assert "[0.0, 2.0, 4.0, 6.0]" in text


def test_run_compiled_is_another_process_without_the_interpreter(build):
    asks = "import triton\n   x = 3\n   print('interpreted', triton.knobs.runtime.interpret)"
    compiled = f".. run::\n   :compiled:\n\n   {asks}\n"
    text, warnings = build(
        f".. run::\n\n   x = 2\n\n{compiled}\n.. run::\n\n   from page import x\n   print('x is', x)\n", "run"
    )
    assert not warnings
    assert "interpreted False" in text and "x is 2" in text


def test_run_both_is_in_each_of_the_two_processes_and_shown_once(build):
    asks = "import triton\n   print('interpreted', triton.knobs.runtime.interpret)\n   x = 3"
    text, warnings = build(
        f".. run::\n   :both:\n\n   {asks}\n\n.. run::\n   :compiled:\n\n   print('there', x)\n\n"
        ".. run::\n\n   print('here', x)\n",
        "run",
    )
    assert not warnings
    # On a GPU neither process interprets.
    assert text.count("\ninterpreted ") == 1 and "there 3" in text and "here 3" in text
    _, warnings = build(".. run::\n   :both:\n\n   import triton\n   assert triton.knobs.runtime.interpret\n", "run")
    assert "index.rst:8: ERROR: run: AssertionError" in warnings


def test_figures_are_drawn_again_when_their_page_is_read(tmp_path):
    import run

    figures = tmp_path / "html" / "plot_directive" / "docs" / "guide"
    figures.mkdir(parents=True)
    for name in ("page-1.svg", "page-2.svg", "other-1.svg"):
        (figures / name).touch()
    app = SimpleNamespace(doctreedir=tmp_path / "html" / ".doctrees", srcdir=tmp_path / "docs", confdir=tmp_path)
    run._forget_figures(app, "guide/page", [""])
    assert [path.name for path in figures.iterdir()] == ["other-1.svg"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\n   assert x == 2, 'no'", "index.rst:7: ERROR: run: AssertionError: no"),
        ("x = 1\n   x = = 2", "index.rst:7: ERROR: run: SyntaxError"),
        ("x = 1\n   raise SystemExit(0)", "index.rst:7: ERROR: run: SystemExit: 0"),
    ],
    ids=["assert", "syntax", "exit"],
)
def test_run_that_fails_names_page_and_line(build, code, message):
    _, warnings = build(f".. run::\n\n   {code}\n", "run")
    assert message in warnings


def test_kernels_lists_signature_and_docstring_without_importing(build):
    text, warnings = build(".. kernels:: triton_gallery.vector_add\n", "kernels")
    assert "tl.constexpr" in warnings  # the site's conf.py ignores the types of kernel arguments
    assert "triton_gallery.vector_add._add_kernel(x_ptr, " in text and "BLOCK_SIZE: tl.constexpr" in text
    assert "Program i owns elements i * BLOCK_SIZE to (i + 1) * BLOCK_SIZE" in text


def test_kernels_of_an_unknown_module_name_the_page(build):
    _, warnings = build(".. kernels:: triton_gallery.nope\n", "kernels")
    assert "index.rst:4: ERROR: kernels: no module triton_gallery.nope in src/" in warnings


def test_measured_role(build, quote):
    text, warnings = build("It is :measured:`softmax-fp16: triton_gallery / torch at 4096` faster.\n", "measured")
    assert "It is 2.71× faster." in text
    # The page of all records, to which it links, is not in this small site.
    label = f"record-{slug(load('softmax-fp16').record['gpu'])}-softmax-fp16"
    assert warnings.count("WARNING") == warnings.count(f"undefined label: '{label}'") == 1
    _, warnings = build("\nIt is :measured:`x: torch at 4` faster.\n", "measured")
    assert "index.rst:5: ERROR: measured: 'x: torch at 4': no such point" in warnings


# --- solutions --------------------------------------------------------------------------------------------------------

SOLVED = """
Exercises
---------

1. What is 6 × 7?

Solutions
---------

Try first.

Solution 1: a product
~~~~~~~~~~~~~~~~~~~~~

It is 42.

References
----------

Solution 1: not one of them
~~~~~~~~~~~~~~~~~~~~~~~~~~~

None.
"""


@pytest.mark.parametrize("builder", ["html", "text"])
def test_solutions_are_folded_in_html_alone(builder, tmp_path):
    (tmp_path / "conf.py").write_text("extensions = ['solutions']\n")
    (tmp_path / "index.rst").write_text("Page\n====\n" + SOLVED)
    app = SphinxTestApp(builder, srcdir=tmp_path, freshenv=True)
    try:
        app.build()
        pages = [path.read_text(encoding="utf-8") for path in Path(app.outdir).glob("index.*")]
        assert not app.warning.getvalue() and len(pages) == 1
    finally:
        app.cleanup()
    assert "It is 42." in pages[0] and pages[0].count("<details") == (builder == "html")
    if builder == "html":
        heading = '<details class="solution"><summary><h3 class="rubric">Solution 1: a product'
        before, found, folded = pages[0].partition(heading)
        inside, _, after = folded.partition("</details>")
        assert found and "It is 42." in inside and "References" in after and 'id="solution-1-a-product"' in before


# --- inventories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(inventories.LISTS.glob("*.txt")), ids=lambda path: path.stem)
def test_inventory_lists_objects_that_exist_and_reads_back(path, tmp_path):
    url, objects = inventories.read(path.read_text())
    assert url.startswith("https://") and url.endswith("/")
    names = [name for name, _, _ in objects]
    assert len(names) == len(set(names))
    for name in names:
        module = name if name in sys.modules else name.rpartition(".")[0] or "builtins"
        assert module == name or hasattr(_import(module), name.rpartition(".")[2]), name
    inventories.write(tmp_path / "x.inv", path.stem, objects)
    loaded = InventoryFile.loads((tmp_path / "x.inv").read_bytes(), uri=url)
    assert {name for kind in loaded.data.values() for name in kind} == set(names)


def _import(name: str):
    """The module or, where the name is a class in one, that class."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module, _, attribute = name.rpartition(".")
        return getattr(_import(module), attribute)


# --- preflight --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["site", "tests", "outdated"])
def test_preflight_accepts_this_environment(kind):
    assert preflight.problem(kind) is None


def test_preflight_refuses_to_measure_in_the_interpreter(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: "cuda")
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    assert preflight.problem("gpu").startswith("TRITON_INTERPRET is set")


@pytest.mark.parametrize(("kind", "message"), [("tests", "the tests of torch.compile need g++"), ("site", "to launch")])
def test_preflight_asks_for_compilers_where_there_is_a_gpu(kind, message, monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: "cuda")
    monkeypatch.setenv("PATH", "")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert preflight.problem(kind).startswith(message)


def test_preflight_tells_which_torch_finds_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    assert preflight.problem("gpu") == f"torch {torch.__version__} finds no GPU to measure on"


def test_preflight_names_an_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert preflight.problem("python").startswith(f"Python 3.11 or newer is needed, and {sys.executable} is 3.9;")


@pytest.mark.parametrize(
    ("versions", "pin", "message"),
    [
        ({"torch": "2.10.0+cu128"}, None, "torch 2.11 or newer is needed"),
        ({"triton": "3.5.1"}, None, "triton 3.6 or newer is needed"),
        ({"triton": "3.7.0"}, "triton==3.6.0; platform_system == 'Linux'", "torch 2.11.0 goes with triton 3.6.0"),
    ],
    ids=["old-torch", "old-triton", "wrong-pair"],
)
def test_preflight_names_a_wrong_torch_or_triton(monkeypatch, versions, pin, message):
    from importlib import metadata

    installed = {"torch": "2.11.0", "triton": "3.6.0", **versions}
    monkeypatch.setattr(metadata, "version", lambda name: installed.get(name, "1.0"))
    monkeypatch.setattr(metadata, "requires", lambda name: [pin] if pin else [])
    assert preflight.problem("site").startswith(message)


def test_preflight_names_what_is_too_new(monkeypatch):
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", lambda name: {"torch": "2.11", "triton": "3.6"}.get(name, "99.0"))
    assert preflight.problem("tests").startswith("pytest older than 9.2 is needed, and ")


@pytest.mark.parametrize(
    ("module", "pin", "message"),
    [
        (SimpleNamespace(__version__="3.6.0+rocm7.1"), "pytorch-triton-rocm==3.6.0", None),
        (SimpleNamespace(__version__="3.7.0"), "triton-rocm==3.6.0", "torch 2.11.0 goes with triton 3.6.0"),
        (SimpleNamespace(__version__="3.5.0"), "triton-rocm==3.5.0", "triton 3.6 or newer is needed"),
        (None, None, "triton is not installed for"),
    ],
    ids=["rocm", "wrong-pair", "old", "none"],
)
def test_preflight_takes_triton_by_another_name(module, pin, message, monkeypatch):
    from importlib import metadata

    def version(name):
        if name == "triton":
            raise metadata.PackageNotFoundError(name)
        return "2.11.0"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: [pin] if pin else [])
    monkeypatch.setitem(sys.modules, "triton", module)
    found = preflight.problem("tests")
    assert found is None if message is None else found.startswith(message)


def test_preflight_names_what_launches_lack(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_path", lambda *names: str(tmp_path))
    assert "Python.h, which is missing" in preflight.problem("gpu")
    (tmp_path / "Python.h").touch()
    assert preflight.problem("gpu") is None
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "needs a C compiler" in preflight.problem("site")


@pytest.mark.parametrize(("arguments", "got"), [([], "nothing"), (["sites"], "sites"), (["gpu", "2"], "gpu 2")])
def test_preflight_names_what_it_can_be_asked(arguments, got):
    run = subprocess.run([sys.executable, preflight.__file__, *arguments], capture_output=True, text=True)
    kinds = "python, site, serve, tests, lint, outdated, gpu"
    assert run.returncode == 1 and run.stderr == f"preflight: name one of {kinds}, got {got}\n"


# --- publishing -------------------------------------------------------------------------------------------------------


def test_publish_can_be_asked_before_there_is_a_site(tmp_path):
    def ask(name):
        command = [sys.executable, publish.__file__, "--check", tmp_path / "html", tmp_path / "site", name]
        return subprocess.run(command, capture_output=True, text=True)

    for name in (__version__, f"v{__version__}", "main"):
        done = ask(name)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())
    assert ask("v99.0").stderr.endswith(f"and its tag v{__version__}, got v99.0\n")
    assert ask("stable").stderr == "publish: 'stable' cannot be a version's name\n"


@pytest.mark.parametrize(
    ("versions", "message"),
    [("{", "no list of versions: JSONDecodeError"), ("[1]", "no list of versions: TypeError"), (None, "[Errno")],
    ids=["half", "list", "file"],
)
def test_publish_says_in_one_line_what_it_cannot_add_to(versions, message, tmp_path, monkeypatch):
    site, dest = tmp_path / "html", tmp_path / "site"
    site.mkdir()
    (site / "index.html").touch()
    if versions is None:
        dest.touch()
    else:
        dest.mkdir()
        (dest / "versions.json").write_text(versions)
    monkeypatch.setattr(sys, "argv", ["publish.py", str(site), str(dest), "main"])
    with pytest.raises(SystemExit, match=re.escape(message)) as exit:
        publish.main()
    assert str(dest) in exit.value.code and exit.value.code.startswith("publish: ") and "\n" not in exit.value.code


# --- the glossary's terms ---------------------------------------------------------------------------------------------

TERMS = """
Glossary
--------

.. glossary::

   warp
      Threads. Another warp.

   launch grid
      The number of programs.

   PTX
      Assembly.

A warp is a term\\ :sup:`1`.
"""

USES = """
A page about a warp
===================

``warp`` and `a warp <https://example.org>`_ and warp-level, PTXs. Two *Warps*, one warp; a launch
grid; ptx, PTX.

.. note:: No launch grids here.
"""


def test_terms_are_linked_at_their_first_use_in_prose(tmp_path):
    bs4 = pytest.importorskip("bs4")
    (tmp_path / "site" / "programming-guide").mkdir(parents=True)
    pages = {"programming-guide/page": USES, "index": f"Home\n====\n\n{TERMS}", "other": USES}
    for name, text in pages.items():
        (tmp_path / "site" / f"{name}.rst").write_text(text)
    (tmp_path / "site" / "conf.py").write_text("extensions = ['terms']\nhtml_theme = 'basic'\n")
    app = SphinxTestApp("html", srcdir=tmp_path / "site", freshenv=True)
    try:
        app.build()
    finally:
        app.cleanup()

    def links(name):
        page = bs4.BeautifulSoup((Path(app.outdir) / f"{name}.html").read_text(encoding="utf-8"), "html.parser")
        return [(link.get_text(), link["href"]) for link in page.select("a.term")]

    up = "../index.html#term-"
    expected = [("PTXs", f"{up}PTX"), ("Warps", f"{up}warp"), ("launch\ngrid", f"{up}launch-grid")]
    assert links("programming-guide/page") == expected
    # Neither where terms are explained nor outside the guide and the gallery.
    assert links("index") == links("other") == []
