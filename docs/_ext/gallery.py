"""Generates the gallery's pages from ``examples/``: quotes kernels and fills in measured numbers and cited works.

A line ``# quote: triton_gallery.softmax._softmax_fwd_kernel`` becomes that definition's source text, read from ``src/``
without importing it, with its decorators and the comments directly above. A reference ``:measured:`…``` becomes the
number that the committed record holds. A list item ``# - :cite:`dao2022flash`: a remark`` begins with the work's title,
linked, its authors and its year, from ``docs/refs.bib``. All of it happens before sphinx-gallery runs, so page, script
and notebook hold the same text.

sphinx-gallery executes a page again when the page's text changed. We add what the text cannot show: the modules that
the page quotes, the records it presents, the device, and the versions of torch and triton. A build in which a page was
not executed as it stands, or showed nothing, fails and names the page; a draft (``make html-fast``) says on every page
that it is one.

A chapter of the guide that measures is a script as well, for a run that measures it: the code of its ``.. run::``
blocks, line by line where it stands in the chapter.

    python docs/_ext/gallery.py examples/02-fused-softmax.py     print one generated page
    python docs/_ext/gallery.py --outdated                       list records that are no longer of what is there
    python docs/_ext/gallery.py --picture FILE                   draw the README's record, if it is of what is there
    python docs/_ext/gallery.py --all DEST                       write all of them, and such chapters, into DEST, and
                                                                 remove those there that are no longer
"""

import argparse
import ast
import functools
import hashlib
import io
import json
import os
import re
import sys
import textwrap
import warnings
import zipfile
from collections.abc import Container, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
EXAMPLES = ROOT / "examples"
REFERENCES = ROOT / "docs" / "refs.bib"
GUIDE = ROOT / "docs" / "programming-guide"

# The record in the README's picture, and in that of a link to the site
README_RECORD = "attention-fwd-d128-causal-fp16", "nvidia-h200"

_HEADER = "GALLERY_HEADER.rst"
_PAGES = "[0-9][0-9]-*.py"
_CHAPTERS = "chapter-[0-9].py"
_RUN = re.compile(r"^\.\. run::\n(?P<options>(?: +:.*\n)*)(?P<code>(?:(?: +.*)?\n)+)", re.MULTILINE)
# What sphinx-gallery writes below a page that it executed, and above what a page shows.
_EXECUTED, _SHOWN = "rst-class:: sphx-glr-timing", re.compile(r"rst-class:: sphx-glr-script-out|^\.\. image-sg::", re.M)
_QUOTE = re.compile(r"^# quote:(.*)$", re.MULTILINE)
# Neighbouring quote lines are one match; a reference may continue on the next comment line.
_REFERENCE = re.compile(
    r"^(?P<quotes># quote:.*(?:\n# quote:.*)*)$|:measured:`(?P<measured>[^`]+)`"
    r"|^# - :cite:`(?P<cited>[^`]+)`(?P<remark>.*(?:\n#   .*)*)$",
    re.MULTILINE,
)


class PageError(ValueError):
    """A page asks for something that does not exist; the message begins with the page and the line."""


# --- one page ---------------------------------------------------------------------------------------------------------


def generate(page: Path, src: Path = SRC, keep_references: bool = False) -> str:
    """The text of `page` with quotes expanded and, unless references are kept, numbers and cited works filled in."""
    return _expanded(page.name, page.read_text(encoding="utf-8"), src, keep_references)


def _expanded(name: str, text: str, src: Path, keep_references: bool) -> str:
    def expand(match: re.Match) -> str:
        line = text.count("\n", 0, match.start()) + 1
        try:
            if match["measured"]:
                return match[0] if keep_references else measured(match["measured"])
            if match["cited"]:
                return match[0] if keep_references else _item(cited(match["cited"]) + match["remark"])
            if text[: match.start()].removesuffix("\n").rpartition("\n")[2].startswith("#"):
                raise LookupError("quote: leave a blank line between a comment and the quote below it")
            return "\n\n\n".join(source_of(quoted.strip(), src) for quoted in _QUOTE.findall(match[0]))
        except (LookupError, ValueError, ImportError) as error:
            raise PageError(f"{name}:{line}: {error}") from error

    return _REFERENCE.sub(expand, text)


def measured(reference: str) -> str:
    """What the committed record says, such as ``2.71×`` for ``softmax-fp16: triton_gallery / torch at 4096``."""
    # Not above: only pages that refer to a record need the package and torch.
    from triton_gallery._report import NOT_YET
    from triton_gallery.benchmark import _parse

    reference = _in_one_line(reference)
    name = reference.partition(":")[0]
    try:
        name, *what = _parse(reference)
        return report(name).quote(*what)
    except (LookupError, ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError) and is_declared(name):
            return NOT_YET
        raise LookupError(f"measured: {reference!r}: {error}") from error


def report(name: str, gpu: str | None = None):
    """The committed record as a report that knows what changed since: the kernels, or the benchmark in its page."""
    from triton_gallery.benchmark import _load

    def changed(record: dict) -> frozenset[str]:
        return frozenset() if record["text"]["benchmark"] in benchmark_digests(record) else frozenset({"benchmark"})

    return _load(name, gpu, changed)


def benchmark_digests(record: dict, examples: Path | None = None, guide: Path | None = None, src: Path = SRC) -> set:
    """The digest of a record's benchmark in each page or chapter that has a function of its name."""
    function = record["inputs"].partition("(")[0]
    texts = [text for text in measuring(examples, guide).values() if f"def {function}(" in text]
    return {_function_digest(text, function, src) for text in texts}


@functools.cache
def _function_digest(text: str, function: str, src: Path) -> str | None:
    from triton_gallery._source import function_digest

    return function_digest(_expanded("", text, src, keep_references=True), function)


def page_of(record: dict) -> str | None:
    """The page or chapter that holds a record's benchmark, as ``make record PAGE=`` names it."""
    function = f"def {record['inputs'].partition('(')[0]}("
    pages = {name: text for name, text in measuring().items() if function in text}
    # Two pages may name a function alike; but a name may be put together on the page.
    return next((name for name, text in pages.items() if record["benchmark"] in text), next(iter(pages), None))


def outdated(names: str = "*") -> Iterator[str]:
    """A line for each record that is no longer of what is there: what changed, and what measures it anew."""
    for path in sorted(SRC.glob(f"triton_gallery/records/*/{names}.json")):
        found = report(path.stem, path.parent.name)
        page = page_of(found.record)
        command = f"make record PAGE={page} on an {found.record['gpu']}"
        remedy = command if page else "no page has this benchmark any more: delete the record"
        for status in found.status():
            yield f"{path.parent.name}/{path.stem}: {status}; {remedy}"


def draw_readme_picture(file: Path) -> None:
    """Draw the README's record, unless it is outdated: then the picture stays, with the provenance in it."""
    found = report(*README_RECORD)
    if found.outdated:
        print(f"{file} stays as it is: {found.status()[0]}")
        return
    import matplotlib.pyplot as plt

    # Without dates and random names, so that the same record gives the same file.
    with plt.rc_context({"svg.hashsalt": "triton-gallery"}):
        found.plot()
        plt.savefig(file, metadata={"Date": None, "Description": found.provenance()})
    plt.close()


def measuring(examples: Path | None = None, guide: Path | None = None) -> dict[str, str]:
    """The code of everything that measures, by the name that ``make record PAGE=`` knows: pages, then chapters."""
    pages, chapters = {}, {}
    for page in sorted((examples or EXAMPLES).glob(_PAGES)):
        pages[page.stem] = page.read_text(encoding="utf-8")
        _refuse_wrong_syntax(f"examples/{page.name}", pages[page.stem])
    for path in sorted((guide or GUIDE).glob("*/*.rst")):
        chapters[path.parent.name] = script(path.read_text(encoding="utf-8"))
        _refuse_wrong_syntax(f"docs/programming-guide/{path.parent.name}/{path.name}", chapters[path.parent.name])
    return pages | {name: text for name, text in chapters.items() if "perf_report(" in text}


@functools.cache
def _refuse_wrong_syntax(name: str, text: str) -> None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{name}:{error.lineno}: {error.msg}") from error


def is_declared(name: str) -> bool:
    """Whether a benchmark has this name, which nobody may have run."""
    return any(f'"{name}"' in text for text in measuring().values())


@functools.cache
def script(chapter: str) -> str:
    """The code of a chapter's ``.. run::`` blocks, each line where it stands; what is only compiled is left out."""
    lines = [""] * (chapter.count("\n") + 1)
    for match in _RUN.finditer(chapter):
        first = chapter.count("\n", 0, match.start("code"))
        if ":compiled:" not in match["options"]:
            code = textwrap.dedent(match["code"]).splitlines()
            lines[first : first + len(code)] = code
    return "\n".join(lines).rstrip() + "\n"


@functools.cache
def cited(key: str) -> str:
    """The work with this key in docs/refs.bib, such as ```Layer Normalization <https://…>`_, Ba and Kiros, 2016``."""
    work = _works(REFERENCES.read_text(encoding="utf-8")).get(key)
    if work is None:
        raise LookupError(f"cite: docs/refs.bib has no entry {key!r}")
    *others, last = [name.partition(",")[0] for name in work["author"].split(" and ")]
    authors = f"{others[0]} et al." if len(others) > 2 else " and ".join(filter(None, [", ".join(others), last]))
    prefixes = {"url": "", "doi": "https://doi.org/", "eprint": "https://arxiv.org/abs/"}
    address = next(prefix + work[field] for field, prefix in prefixes.items() if field in work)
    return f"`{work['title']} <{address}>`_, {authors}, {work['year']}"


@functools.cache
def _works(text: str) -> dict[str, dict[str, str]]:
    # Read by hand, since where pages are measured or only run there need be no library for it.
    entries = re.findall(r"^@\w+\{([\w-]+),\n(.*?)^\}$", text, re.MULTILINE | re.DOTALL)
    fields = re.compile(r"^ *(\w+) *= \{(.*?)\},?$", re.MULTILINE | re.DOTALL)
    return {
        key: {name: " ".join(re.sub(r"[{}]", "", value).split()) for name, value in fields.findall(body)}
        for key, body in entries
    }


def _item(text: str) -> str:
    """A comment that is a list item, in lines as long as the sources'."""
    text = re.sub(r"\n#  ", "", text)
    return textwrap.fill(text, 120, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False)


def measured_names(text: str) -> list[str]:
    """The records that a page refers to, in order."""
    found = [_in_one_line(match["measured"]) for match in _REFERENCE.finditer(text) if match["measured"]]
    return list(dict.fromkeys(reference.partition(":")[0] for reference in found))


def _in_one_line(reference: str) -> str:
    return re.sub(r"\s*\n\s*#?\s*", " ", reference).strip()


def source_of(name: str, src: Path = SRC) -> str:
    """The source text of the definition with the dotted `name`, its decorators and the comments directly above."""
    path, qualified = _split(name, src)
    text = path.read_text(encoding="utf-8")
    node = _parsed(text)
    for part in qualified:
        node = next((child for child in _definitions(node) if part in _names(child)), None)
        if node is None:
            raise LookupError(f"quote: {path.relative_to(src).as_posix()} has no definition {'.'.join(qualified)}")
    lines = text.splitlines()
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
    indent = re.match(r"\s*", lines[start])[0]
    while start > 0 and lines[start - 1].startswith(f"{indent}#"):
        start -= 1
    return textwrap.dedent("\n".join(lines[start : node.end_lineno]))


_parsed = functools.cache(ast.parse)  # most of the time that a page takes would be this


def _split(name: str, src: Path) -> tuple[Path, list[str]]:
    """The file of the longest prefix of `name` that is a module, and the rest of the name."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        module = src.joinpath(*parts[:n])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path.is_file():
                return path, parts[n:]
    raise LookupError(f"quote: no module in {src.name}/ holds {name!r}")


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """What `node` defines, `if` and `try` blocks included, without descending into functions and classes."""
    for child in ast.iter_child_nodes(node):
        if _names(child):
            yield child
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _definitions(child)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


# --- all pages --------------------------------------------------------------------------------------------------------


def write_all(dest: Path, examples: Path = EXAMPLES, src: Path = SRC, keep_references: bool = False) -> list[Path]:
    """Write every generated page into `dest`, where changed, and remove pages that have no example any more."""
    dest.mkdir(parents=True, exist_ok=True)
    pages = sorted(examples.glob(_PAGES))
    for page in pages:
        _write(dest / page.name, generate(page, src, keep_references))
    if (examples / _HEADER).exists():
        _write(dest / _HEADER, (examples / _HEADER).read_text(encoding="utf-8"))
    _remove_others(dest, _PAGES, {page.stem for page in pages})
    return pages


def _remove_others(dest: Path, pattern: str, names: Container[str]) -> None:
    """Remove what an earlier run wrote into `dest` and this one did not."""
    for path in dest.glob(pattern):
        if path.stem not in names:
            path.unlink()


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def machine() -> str:
    """What every output depends on: the device, and the versions of torch and triton."""
    import torch
    import triton

    gpu = torch.accelerator.current_accelerator(check_available=True)
    device = torch.get_device_module(gpu).get_device_name() if gpu else "no GPU"
    return f"{device}, torch {torch.__version__}, triton {triton.__version__}, {triton.knobs.runtime.interpret=}"


def fingerprint(page: Path, src: Path = SRC) -> str:
    """Changes with whatever the page's output depends on and its text does not show."""
    from triton_gallery import __version__
    from triton_gallery.benchmark import _read

    digest = hashlib.sha256(f"{machine()} {first_cell(__version__)}".encode())
    # What all pages print with, and the limits, which a roofline may take from any record.
    package = src / "triton_gallery"
    tools = [package / f"{name}.py" for name in ("benchmark", "codegen", "trace")]
    shared = [*tools, *package.glob("_*.py"), *package.glob("hopper/_*.py")]
    for file in sorted(file for file in shared if file.exists()):
        digest.update(file.read_bytes())
    for record in sorted(package.glob("records/*/*.json")):
        digest.update(repr(_read(record).get("limit")).encode())
    modules = {_split(name.strip(), src)[0] for name in _QUOTE.findall(page.read_text(encoding="utf-8"))}
    for module in sorted(modules):
        # With the kernels for one GPU, such as hopper/softmax.py.
        for file in sorted({module, *module.parent.glob(f"**/{module.stem}*.py")}):
            digest.update(file.read_bytes())
        # layer_norm.py is measured by the records layer-norm-*.json.
        for record in sorted(src.glob(f"*/records/*/{module.stem.replace('_', '-')}*.json")):
            digest.update(record.read_bytes())
    return digest.hexdigest()


# --- notebooks --------------------------------------------------------------------------------------------------------


def first_cell(version: str) -> str:
    """The first cell of every notebook: it installs the package that the page was written for, where it is missing."""
    repository = os.environ.get("GALLERY_REPOSITORY")
    ref = os.environ.get("GALLERY_REF") or f"v{version}"
    source = f" @ git+https://github.com/{repository}@{ref}" if repository else f"=={version}"
    return f"""\
# This notebook goes with triton-gallery {version} and installs it where it is missing. Kernels run on the GPU; without
# one, the import switches Triton's interpreter on, and they run on CPU tensors.
from importlib import metadata

try:
    installed = metadata.version("triton-gallery")
except metadata.PackageNotFoundError:
    installed = None
if installed != "{version}":
    %pip install --quiet "triton-gallery[examples]{source}"

import triton_gallery

print("GPU:", triton_gallery.benchmark.environment()["gpu"])"""


def _open_in_colab(app, pagename, templatename, context, doctree) -> None:
    # The published site is the repository's branch gh-pages, and Colab opens notebooks that lie on GitHub.
    repository = os.environ.get("GALLERY_REPOSITORY")
    notebook = re.search(r'href="(?:\.\./)*(_downloads/\w+/\d\d-[\w-]+\.ipynb)"', context.get("body", ""))
    if not repository or not notebook:
        return
    url = f"https://colab.research.google.com/github/{repository}/blob/gh-pages/stable/{notebook[1]}"
    link = f'<a class="reference external" href="{url}">Open in Colab</a>'
    begin = '<div class="sphx-glr-download sphx-glr-download-jupyter docutils container">'
    at_the_end = begin.replace("jupyter", "colab") + f"\n<p>{link}</p>\n</div>\n{begin}"
    at_the_top = re.compile(r'(<div class="sphx-glr-download-link-note.*?)</p>\s*</div>', re.DOTALL)
    body = context["body"].replace(begin, at_the_end, 1)
    context["body"] = at_the_top.sub(rf"\g<1> · {link}</p></div>", body, count=1)


# --- Sphinx -----------------------------------------------------------------------------------------------------------


def _commit_is_known() -> bool:
    """Whether a record could say what it measured. Otherwise pages show their figures, and none is kept."""
    from triton_gallery.benchmark import environment

    return environment()["commit"] != "unknown"


def _claim(app) -> None:
    """Two builds would write into each other's pages: the second one ends at once."""
    from filelock import FileLock, Timeout

    source, _ = _folders(app)
    source.parent.mkdir(parents=True, exist_ok=True)
    # A process gives it back when it ends, however it does.
    app.claim = FileLock(source.parent / ".lock")
    try:
        app.claim.acquire(timeout=0)
    except Timeout:
        sys.exit("another build of this checkout is under way: try again when it has ended")


def _release(app, *_) -> None:
    app.claim.release()


def _builder_inited(app, examples: Path = EXAMPLES, src: Path = SRC) -> None:
    import torch
    import triton

    if torch.accelerator.is_available() and not triton.knobs.runtime.interpret and _commit_is_known():
        # What the pages measure is kept beside the site; `make record` is what changes the committed records.
        os.environ.setdefault("TRITON_GALLERY_RECORDS", str(ROOT / "build" / "records"))
    _report_exits()
    source, gallery = _folders(app)
    if " " in str(app.srcdir):
        sys.exit(f"the path of the checkout must have no space, which sphinx-gallery warns of: {app.srcdir}")
    cache = Path(triton.knobs.cache.dir)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"Triton's cache cannot be made: {error}; name another folder in TRITON_CACHE_DIR")
    try:
        measuring(examples)
        pages = write_all(source, examples, src)
    except PageError as error:
        # Not an ExtensionError: Sphinx would print this one line amid fifty of its own stack.
        sys.exit(f"examples/{error}")
    except ValueError as error:
        sys.exit(str(error))
    names = {page.stem for page in pages}
    for stale in gallery.glob("[0-9][0-9]-*"):
        if stale.name.partition(".")[0] not in names:
            stale.unlink()
    store = source.parent / "fingerprints.json"
    try:
        old = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
    except ValueError:
        # Somebody stopped a build while it wrote this. Then every page counts as changed.
        old = {}
    try:
        new = {page.stem: fingerprint(page, src) for page in pages}
    except ValueError as error:
        sys.exit(str(error))
    for name in names:
        if new[name] != old.get(name) or problem(source / f"{name}.py", gallery):
            # sphinx-gallery keeps a page's output as long as this checksum is that of the page's text.
            (gallery / f"{name}.py.md5").unlink(missing_ok=True)
            # Where the page raised, this says so, and would go on to in place of the next figure, which is no PNG.
            (gallery / "images" / "thumb" / f"sphx_glr_{name}_thumb.png").unlink(missing_ok=True)
    _write(store, json.dumps(new, indent=1))


def _config_inited(app, config) -> None:
    from triton_gallery import __version__

    config.sphinx_gallery_conf["first_notebook_cell"] = first_cell(__version__)


def _folders(app) -> list[Path]:
    """Where the generated pages are, and where sphinx-gallery puts what becomes of them."""
    return [Path(app.srcdir) / app.config.sphinx_gallery_conf[key] for key in ("examples_dirs", "gallery_dirs")]


def problem(page: Path, gallery: Path) -> str | None:
    """Why the folder `gallery` does not show what executing the generated `page` gives, or None."""
    checksum, text = gallery / f"{page.name}.md5", gallery / f"{page.stem}.rst"
    if not checksum.exists() or not text.exists():
        return "executed nothing"
    if checksum.read_text(encoding="utf-8") != hashlib.md5(page.read_text(encoding="utf-8").encode()).hexdigest():
        return "is stale: its text changed after it was executed"
    output = text.read_text(encoding="utf-8")
    return None if _EXECUTED in output and _SHOWN.search(output) else "executed nothing that shows"


def _gallery_written(app) -> None:
    source, gallery = _folders(app)
    problems = ((page.name, problem(page, gallery)) for page in sorted(source.glob(_PAGES)))
    failed = [f"examples/{name}: the page {why}" for name, why in problems if why]
    # A page that raised is for sphinx-gallery to report, when the build ends.
    raised = app.config.sphinx_gallery_conf.get("failing_examples")
    if failed and not raised and not app.config.html_context.get("draft"):
        sys.exit("\n".join([*failed, "A build that does not execute is a draft: make html-fast"]))
    for path in gallery.glob("*.zip"):
        pack(path)


def pack(path: Path) -> None:
    """Write the zip file `path` again so that its bytes depend on its files' bytes alone, not on their dates."""
    packed = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w") as new:
        for name in sorted(old.namelist()):
            new.writestr(zipfile.ZipInfo(name), old.read(name), zipfile.ZIP_DEFLATED)
    if path.read_bytes() != packed.getvalue():
        path.write_bytes(packed.getvalue())


def _report_exits() -> None:
    """Make a page that ends the process one that raised: sphinx-gallery would let it end the build, as a success."""
    from sphinx_gallery import gen_rst

    execute = getattr(gen_rst, "_exec_and_get_memory", None)
    if execute is None or hasattr(execute, "__wrapped__"):
        return

    @functools.wraps(execute)
    def execute_to_the_end(*args, **kwargs):
        try:
            return execute(*args, **kwargs)
        except SystemExit as error:
            raise RuntimeError(f"the page ended the process: {error!r}") from error

    gen_rst._exec_and_get_memory = execute_to_the_end


def seed(gallery_conf: dict, page: str) -> None:
    """sphinx-gallery calls this before each page, so that two builds show the same."""
    import torch

    torch.manual_seed(0)
    # A GPU divides by zero without a word; NumPy's would show where Triton is installed on this machine.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")


def _forget_faults(app, *_) -> None:
    # A page's fault is reported when the page is read. The next build would read only what changed, and say nothing of
    # it; without this file it reads everything. (While somebody writes, each change is a build.) A build that somebody
    # stops does not get to its end.
    if app._warncount and not app.config.html_context.get("live"):
        (Path(app.doctreedir) / "environment.pickle").unlink(missing_ok=True)


def setup(app) -> dict:
    app.connect("builder-inited", _claim, priority=4)
    # Before sphinx-gallery, which reads the generated pages in its own handler with the default priority, 500.
    app.connect("builder-inited", _builder_inited, priority=5)
    # Before sphinx-gallery completes its settings, with priority 10.
    app.connect("config-inited", _config_inited, priority=5)
    app.connect("html-page-context", _open_in_colab)
    app.connect("builder-inited", _gallery_written, priority=900)
    app.connect("write-started", _forget_faults)
    app.connect("build-finished", _forget_faults, priority=999)
    app.connect("build-finished", _release, priority=1000)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def main() -> None:
    parser = argparse.ArgumentParser(description="Print or write the gallery's generated pages.")
    parser.add_argument("page", nargs="?", type=Path, help="print this page of examples/")
    parser.add_argument("--all", metavar="DEST", type=Path, help="write every page into the folder DEST")
    keep = "leave :measured: references as they stand, for a run that measures what they refer to"
    parser.add_argument("--keep-references", action="store_true", help=keep)
    parser.add_argument("--outdated", action="store_true", help="list the records that are no longer of what is there")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw the README's record, if it is not outdated")
    args = parser.parse_args()
    if (args.page is not None) + (args.all is not None) + args.outdated + (args.picture is not None) != 1:
        parser.error("give one page, or --all DEST, or --outdated, or --picture FILE")
    sys.path.insert(0, str(SRC))
    try:
        if args.outdated:
            lines = list(outdated())
            print(*lines, sep="\n", end="\n" if lines else "")
        elif args.picture:
            draw_readme_picture(args.picture)
        elif args.all:
            write_all(args.all, keep_references=args.keep_references)
            chapters = {name: text for name, text in measuring().items() if not (EXAMPLES / f"{name}.py").exists()}
            for name, text in chapters.items():
                _write(args.all / f"{name}.py", text)
            _remove_others(args.all, _CHAPTERS, chapters)
        else:
            sys.stdout.write(generate(args.page, keep_references=args.keep_references))
    except PageError as error:
        sys.exit(f"examples/{error}")
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
