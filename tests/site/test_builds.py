"""A build that succeeds shows what it says: every page was executed, every link leads somewhere, and the next build is
the same. Some of these tests look at build/html, where `make html` leaves the site.
"""

import filecmp
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import gallery
import pytest
import torch

pytest.importorskip("sphinx_gallery")

ROOT = gallery.ROOT
GENERATED = ("build", ".venv", "_generated", "tutorials", "generated", "node_modules", "__pycache__", ".*_cache")
PAGES = sorted(page.name for page in gallery.EXAMPLES.glob("[0-9][0-9]-*.py"))


@pytest.fixture(scope="module")
def site() -> Path:
    """What `make html` built, when nothing changed since."""
    html = ROOT / "build" / "html"
    built = html / "searchindex.js"
    if not built.exists() or 'class="version-banner draft"' in (html / "index.html").read_text(encoding="utf-8"):
        pytest.skip("SITE NOT TESTED: run `make html` first")
    ignored = set(GENERATED)
    for folder in ("docs", "examples", "src"):
        for path in (ROOT / folder).rglob("*"):
            inside = ignored.isdisjoint(path.relative_to(ROOT).parts)
            if inside and path.is_file() and path.stat().st_mtime > built.stat().st_mtime:
                pytest.skip(f"SITE NOT TESTED: it is older than {path.relative_to(ROOT)}: run `make html` first")
    return html


def sphinx(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Build the site of the checkout in `folder`, in a process of its own."""
    command = [sys.executable, "-m", "sphinx", "-c", ".", "-n", "-W", "-q", *options, "docs", "build/html"]
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "MPLBACKEND": "agg", "GALLERY_COMMAND": "make html"}
    environment.pop("TRITON_GALLERY_RECORDS", None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of this checkout in which nothing was built yet."""
    return shutil.copytree(ROOT, tmp_path / "checkout", symlinks=True, ignore=shutil.ignore_patterns(*GENERATED))


# --- every page was executed ------------------------------------------------------------------------------------------


def test_a_build_that_executes_nothing_fails_and_names_the_pages(checkout):
    done = sphinx(checkout, "-D", "plot_gallery=0")
    assert done.returncode != 0
    for page in PAGES:
        assert f"examples/{page}: the page executed nothing" in done.stderr
    assert "make html-fast" in done.stderr


OUTPUT = "\n.. rst-class:: sphx-glr-script-out\n\n.. rst-class:: sphx-glr-timing\n"


@pytest.mark.parametrize(
    ("text", "checksum", "message"),
    [
        (OUTPUT, True, None),
        (OUTPUT.replace("rst-class:: sphx-glr-script-out", "image-sg:: plot.png"), True, None),
        (OUTPUT, None, "executed nothing"),
        (OUTPUT, False, "is stale: its text changed after it was executed"),
        (OUTPUT.replace("script-out", ""), True, "executed nothing that shows"),
        (OUTPUT.replace("timing", ""), True, "executed nothing that shows"),
    ],
    ids=["printed", "plotted", "not-executed", "stale", "silent", "emptied"],
)
def test_problem(tmp_path, text, checksum, message):
    page = tmp_path / "01-one.py"
    page.write_text("print(1)\n")
    (tmp_path / "01-one.rst").write_text(text)
    if checksum is not None:
        digest = hashlib.md5(page.read_bytes() if checksum else b"print(0)\n").hexdigest()
        (tmp_path / "01-one.py.md5").write_text(digest)
    assert gallery.problem(page, tmp_path) == message


# --- two builds are the same ------------------------------------------------------------------------------------------


def test_packed_again_a_zip_depends_on_its_files_alone(tmp_path):
    for name, order, date in (("a", ["x", "y"], (2020, 1, 1, 0, 0, 0)), ("b", ["y", "x"], (2021, 2, 2, 2, 2, 2))):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as file:
            for member in order:
                file.writestr(zipfile.ZipInfo(member, date), f"the content of {member}")
        gallery.pack(tmp_path / f"{name}.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip") as file:
        assert file.namelist() == ["x", "y"] and file.read("y") == b"the content of y"


MEASURED_TIME = re.compile(rb"\(\d+ minutes [\d.]+ seconds\)|^date +[\d-]+$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="on a GPU a build measures")
def test_two_builds_differ_in_measured_times_alone(site, checkout):
    done = sphinx(checkout)
    assert done.returncode == 0, done.stderr
    again = checkout / "build" / "html"

    def files(folder):
        paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        # What begins with a dot is Sphinx's memory, and not published.
        return {path for path in paths if not path.parts[0].startswith(".")}

    assert files(again) - files(site) == set()
    differing = filecmp.cmpfiles(site, again, sorted(files(again)), shallow=False)[1]
    for path in differing:
        one, two = (MEASURED_TIME.sub(b"", (folder / path).read_bytes()) for folder in (site, again))
        assert one == two, f"{path} differs between two builds"


def test_the_figures_of_every_page_are_found_to_be_drawn_again(site):
    run = pytest.importorskip("run")
    app = SimpleNamespace(doctreedir=site / ".doctrees", srcdir=ROOT / "docs", confdir=ROOT)
    plotting = [
        path.relative_to(app.srcdir).with_suffix("")
        for path in app.srcdir.rglob("*.rst")
        if re.search(r"^\.\. plot::", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(plotting) >= 5
    for page in plotting:
        assert run.figures(app, page.as_posix()), page


# --- every link leads somewhere ---------------------------------------------------------------------------------------


class Links(HTMLParser):
    """What a page offers (ids) and what it asks for (links, images, scripts, style sheets)."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.targets = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.targets.add(value)


def broken_links(folder: Path) -> list[str]:
    pages = {page: Links(page.read_text(encoding="utf-8")) for page in sorted(folder.rglob("*.html"))}
    broken = []
    for page, links in pages.items():
        for target in sorted(links.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            # Only the page for addresses that do not exist has links that begin at the root.
            base = folder if parts.path.startswith("/") else page.parent
            path = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
            anchors = pages[path].ids | {"", "top"} if path in pages else None
            if not path.is_file() or (anchors is not None and unquote(parts.fragment) not in anchors):
                broken.append(f"{page.relative_to(folder)}: {target}")
    return broken


def test_broken_links_are_found(tmp_path):
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"></a><a href="b.html#there"></a><a href="c.html"></a><img src="d.png"><a href="#top"></a>'
        '<a href="https://example.org/x"></a><a href="#nowhere"></a><a href="/b.html"></a><a href="/e.html"></a>'
    )
    assert broken_links(tmp_path.resolve()) == [
        "a.html: #nowhere",
        "a.html: /e.html",
        "a.html: b.html#there",
        "a.html: c.html",
        "a.html: d.png",
    ]


def test_every_link_and_anchor_of_the_site_exists(site):
    assert len(list(site.rglob("*.html"))) >= 20
    assert broken_links(site) == []


def test_every_page_of_the_site_has_a_place_for_the_versions(site):
    for page in PAGES:
        text = (site / "getting-started" / "tutorials" / page).with_suffix(".html").read_text(encoding="utf-8")
        for what in ("banner", "name", "list"):
            assert text.count(f"<!-- version-{what} -->") == text.count(f"<!-- /version-{what} -->") == 1
