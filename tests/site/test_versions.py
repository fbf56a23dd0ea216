"""Published versions: two tags and a branch of a small site with the gallery's own templates, scripts and theme."""

import functools
import hashlib
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import gallery
import publish
import pytest

pytest.importorskip("sphinx_rtd_theme")

DOCS = gallery.ROOT / "docs"
URL = "https://gallery.example"
# In the order they are published: `removed` ends with v0.1.0, `added` begins on main and is in v0.2.0, `coming` is not.
VERSIONS = {
    "v0.1.0": ["index", "guide/kept", "guide/removed"],
    "main": ["index", "guide/kept", "guide/added", "guide/coming"],
    "v0.2.0": ["index", "guide/kept", "guide/added"],
}
CONF = f"""
project, release, language = "Triton Gallery", "0", "en"
html_theme, html_baseurl = "sphinx_rtd_theme", "{URL}/stable/"
templates_path = ["{DOCS}/_templates"]
html_static_path = ["static"]
html_css_files = ["gallery.css"]
"""

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="SITE NOT TESTED: no Chromium on this machine")


def build(folder: Path, pages: list[str], *options: str) -> Path:
    source = folder / "source"
    (source / "static").mkdir(parents=True)
    for name in ("gallery.css", "versions.js"):
        shutil.copy(DOCS / "_static" / name, source / "static")
    (source / "conf.py").write_text(CONF)
    for page in pages:
        (source / f"{page}.rst").parent.mkdir(exist_ok=True)
        (source / f"{page}.rst").write_text(f"{page}\n{'=' * len(page)}\n")
    with (source / "index.rst").open("a") as index:
        index.write("\n.. toctree::\n   :glob:\n\n   guide/*\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", *options, source, folder / "html"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "html"


@pytest.fixture(scope="module")
def sites(tmp_path_factory) -> dict[str, Path]:
    return {name: build(tmp_path_factory.mktemp(name), pages) for name, pages in VERSIONS.items()}


@pytest.fixture(scope="module")
def published(sites, tmp_path_factory) -> Path:
    """All three, as readers find them; only for looking at."""
    dest = tmp_path_factory.mktemp("published")
    for name, site in sites.items():
        publish.publish(site, dest, name)
    return dest


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- what publishing changes ------------------------------------------------------------------------------------------


def test_a_version_is_added_and_nothing_else_is_touched(sites, tmp_path):
    before = {}
    for name, site in sites.items():
        publish.publish(site, tmp_path, name)
        after = contents(tmp_path)
        changed = {path for path in before | after if before.get(path) != after.get(path)}
        roots = {path.partition("/")[0] for path in changed}
        assert roots <= {name, "stable", ".nojekyll", "index.html", "versions.html", "versions.js", "versions.json"}
        assert ("stable" in roots) == (name != "main")
        before = after
    assert contents(tmp_path / "stable") == contents(tmp_path / "v0.2.0")


def test_a_tag_is_that_of_the_packages_version():
    for tag, version in (("v0.2.0", "0.2.0"), ("v1.1.0rc1", "1.1.0rc1")):
        publish.check_tag(tag, version)
    # The notebooks install the tag that is `v` and the version.
    with pytest.raises(ValueError, match=r"its tag v1\.1\.0rc1, got v1\.1\.0-rc\.1"):
        publish.check_tag("v1.1.0-rc.1", "1.1.0rc1")
    with pytest.raises(ValueError, match=r"version is 0\.2\.0\.post1, of which no tag is made"):
        publish.check_tag("v0.2.0.post1", "0.2.0.post1")
    for tag in ("v0.2.1", "0.2.0", "v0.2.0.post1", "v0.2.0rc1", "v0.2", "main"):
        with pytest.raises(ValueError, match=f"its tag v0.2.0, got {tag}"):
            publish.check_tag(tag, "0.2.0")


def test_a_tag_whose_publication_was_stopped_can_be_published(sites, tmp_path):
    (tmp_path / "v0.1.0").mkdir()
    publish.publish(sites["v0.1.0"], tmp_path, "v0.1.0")
    assert (tmp_path / "v0.1.0" / "index.html").exists() and (tmp_path / ".nojekyll").exists()


def test_a_published_tag_is_never_written_again(sites, tmp_path):
    publish.publish(sites["v0.1.0"], tmp_path, "v0.1.0")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"v0\.1\.0 is published already"):
        publish.publish(sites["v0.2.0"], tmp_path, "v0.1.0")
    assert contents(tmp_path) == before


def test_a_version_has_one_name(sites, tmp_path):
    publish.publish(sites["v0.1.0"], tmp_path, "v0.1.0")
    with pytest.raises(ValueError, match=r"^0\.1\.0 is published already, as v0\.1\.0$"):
        publish.publish(sites["v0.1.0"], tmp_path, "0.1.0")


def test_what_others_have_put_there_stays(sites, tmp_path):
    site, dest = shutil.copytree(sites["main"], tmp_path / "checkout" / "html"), tmp_path / "dest"
    for folder in (tmp_path, tmp_path / "checkout", site, site / "versions"):
        with pytest.raises(ValueError, match=r"must be a folder of its own, and .*html beside it"):
            publish.publish(site, folder, "checkout")
    sources = Path(publish.__file__).parents[1]
    with pytest.raises(ValueError, match=r"docs is among the sources; name a folder below build, or one outside"):
        publish.publish(site, sources, "main")
    for name, own in (("docs", "docs/notes"), ("main", "stable/notes"), ("docs", "index.html")):
        file = dest / own
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
        with pytest.raises(ValueError, match="holds no version"):
            publish.publish(site, dest, name)
        assert list(contents(dest)) == [own] and file.read_text() == "mine"
        shutil.rmtree(dest)


def test_a_branch_is_replaced(sites, tmp_path):
    publish.publish(sites["main"], tmp_path, "main")
    publish.publish(sites["v0.1.0"], tmp_path, "v0.1.0")
    tag = contents(tmp_path / "v0.1.0")
    publish.publish(sites["v0.2.0"], tmp_path, "main")
    assert not (tmp_path / "main" / "guide" / "coming.html").exists()
    assert contents(tmp_path / "v0.1.0") == tag
    listed = json.loads((tmp_path / "versions.json").read_text())["versions"]
    assert [version["name"] for version in listed] == ["v0.1.0", "main"]
    assert "guide/coming.html" not in listed[1]["pages"] and "guide/added.html" in listed[1]["pages"]


def test_an_old_release_that_comes_late_does_not_become_the_newest(sites, tmp_path):
    publish.publish(sites["v0.2.0"], tmp_path, "v0.2.0")
    before = contents(tmp_path / "stable")
    publish.publish(sites["v0.1.0"], tmp_path, "v0.1.1")
    assert contents(tmp_path / "stable") == before
    assert json.loads((tmp_path / "versions.json").read_text())["newest"] == "v0.2.0"


def test_the_page_for_what_is_not_found_lies_at_the_root_as_it_was_built(sites, tmp_path):
    for name, site in sites.items():
        with_page = shutil.copytree(site, tmp_path / "sites" / name)
        text = (site / "index.html").read_text().replace("index", name)
        (with_page / "404.html").write_text(text)
        publish.publish(with_page, tmp_path / "published", name)
        newest = "v0.1.0" if name == "main" else name
        expected = (tmp_path / "sites" / newest / "404.html").read_text()
        assert (tmp_path / "published" / "404.html").read_text() == expected
    listed = json.loads((tmp_path / "published" / "versions.json").read_text())["versions"]
    assert not any("404.html" in version["pages"] for version in listed)


def test_without_an_address_no_page_for_what_is_not_found_lies_at_the_root(sites, tmp_path):
    with_page = shutil.copytree(sites["v0.1.0"], tmp_path / "site")
    (with_page / "404.html").write_text('<link rel="stylesheet" href="/_static/gallery.css" />')
    publish.publish(with_page, tmp_path / "published", "v0.1.0")
    assert (tmp_path / "published" / "v0.1.0" / "404.html").exists()
    assert not (tmp_path / "published" / "404.html").exists()


def test_colab_opens_the_notebooks_of_the_version(sites, tmp_path):
    site = shutil.copytree(sites["v0.1.0"], tmp_path / "site")
    page = site / "index.html"
    page.write_text(page.read_text().replace("<body", '<a href="https://x/blob/gh-pages/stable/a.ipynb"></a><body', 1))
    publish.publish(site, tmp_path / "published", "main")
    text = (tmp_path / "published" / "main" / "index.html").read_text()
    assert "https://x/blob/gh-pages/main/a.ipynb" in text and "gh-pages/stable" not in text


def test_order_of_versions():
    names = ["feature", "main", "0.9.0", "v0.10.0", "v1", "1.0rc2", "v1.0.1", "1.0rc10", "1.0b1", "v1.1.0-rc.1"]
    ordered = sorted(({"name": name} for name in names), key=publish._order)
    expected = ["v1.0.1", "v1", "v0.10.0", "0.9.0", "v1.1.0-rc.1", "1.0rc10", "1.0rc2", "1.0b1", "main", "feature"]
    assert [version["name"] for version in ordered] == expected


def test_the_workflow_publishes_to_where_it_may():
    workflow = (gallery.ROOT / ".github/workflows/gallery.yml").read_text()
    ((site, dest),) = re.findall(r'publish\.py (\S+) (\S+) "\$GITHUB_REF_NAME"', workflow)
    assert publish.check(gallery.ROOT / site, gallery.ROOT / dest, "main") == []


@pytest.mark.parametrize(
    "name", ["stable", "", "..", "a/b", "-x", ".hidden", 'x"y', "versions.json ", "index.html", "404.html"]
)
def test_refuses_a_name(sites, tmp_path, name):
    with pytest.raises(ValueError, match="cannot be a version's name"):
        publish.publish(sites["main"], tmp_path, name)
    assert not any(tmp_path.iterdir())


def test_refuses_a_draft_and_a_folder_without_a_site(tmp_path):
    draft = build(tmp_path, ["index", "guide/kept"], "-A", "draft=1")
    assert "This is a draft" in (draft / "guide" / "kept.html").read_text()
    with pytest.raises(ValueError, match="is a draft"):
        publish.publish(draft, tmp_path / "dest", "main")
    with pytest.raises(ValueError, match="holds no site"):
        publish.publish(tmp_path, tmp_path / "dest", "main")


def test_the_name_is_the_tag_or_the_branch_that_is_checked_out(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    git("init")
    git("commit", "--allow-empty", "--message", "x")
    git("switch", "--create", "fix/it")
    assert publish.name_of_checkout() == "fix-it"
    git("switch", "--detach")
    with pytest.raises(ValueError, match=r"neither a tag nor a branch is checked out; .* make publish VERSION="):
        publish.name_of_checkout()
    git("tag", "v1.2.0")
    assert publish.name_of_checkout() == "v1.2.0"


# --- what a reader finds, without scripts -----------------------------------------------------------------------------


class Menu(HTMLParser):
    """The versions' menu of a page: groups of (name, address), and the banner when it shows."""

    def __init__(self, text: str):
        super().__init__()
        self.groups, self.banner, self.current, self._open, self._href = {}, None, None, [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "p" and "version-banner" in (attrs.get("class") or "") and "hidden" not in attrs:
            self.banner = ""
            self._open.append("banner")
        elif tag in ("dt", "dd"):
            self._open.append(tag)
        elif tag == "a":
            self._href = attrs.get("href")
            self.current = self._href if "aria-current" in attrs else self.current

    def handle_endtag(self, tag):
        if self._open and tag in ("p", "dt", "dd"):
            self._open.pop()

    def handle_data(self, data):
        inside = self._open[-1] if self._open else None
        if inside == "banner":
            self.banner += data
        elif inside == "dt":
            self.groups[data] = []
        elif inside == "dd":
            list(self.groups.values())[-1].append((data, self._href))


def targets(menu: Menu, page: Path, root: Path) -> dict[str, str]:
    """Where each version's link leads, as a path below the root; it must exist."""
    found = {}
    for name, href in (link for group in menu.groups.values() for link in group):
        target = (page.parent / unquote(urlsplit(href).path)).resolve()
        assert target.is_file(), f"{page}: {href} leads nowhere"
        found[name] = target.relative_to(root.resolve()).as_posix()
    return found


def test_the_menu_lists_tags_and_branches_and_keeps_the_page(published):
    page = published / "v0.2.0" / "guide" / "kept.html"
    menu = Menu(page.read_text())
    assert {title: [name for name, _ in group] for title, group in menu.groups.items()} == {
        "Tags": ["v0.2.0", "v0.1.0"],
        "Branches": ["main"],
    }
    assert targets(menu, page, published) == {name: f"{name}/guide/kept.html" for name in VERSIONS}
    assert menu.current == "../../v0.2.0/guide/kept.html"
    assert menu.banner is None


def test_a_version_without_the_page_opens_at_its_first(published):
    page = published / "v0.2.0" / "guide" / "added.html"
    assert targets(Menu(page.read_text()), page, published)["v0.1.0"] == "v0.1.0/index.html"


def test_development_versions_and_old_ones_that_come_late_say_so(sites, tmp_path):
    for name in ("v0.2.0", "v0.1.0", "main"):
        publish.publish(sites[name], tmp_path, name)
    banners = {name: Menu((tmp_path / name / "index.html").read_text()).banner for name in VERSIONS}
    assert banners["v0.2.0"] is None
    assert banners["v0.1.0"] == "This is an old version, v0.1.0. The newest release is v0.2.0."
    assert banners["main"] == "This is the development version, main. The newest release is v0.2.0."


def test_every_page_leads_to_the_list_that_is_always_current(published):
    for page in (published / "v0.1.0" / "guide" / "kept.html", published / "v0.1.0" / "search.html"):
        (link,) = re.findall(r'<a href="([./]*versions\.html)">All versions</a>', page.read_text())
        menu = Menu((page.parent / link).read_text())
        assert targets(menu, published / "versions.html", published) == {
            name: f"{name}/index.html" for name in VERSIONS
        }


def test_canonical_links(published):
    def canonical(path):
        return re.findall(r'<link rel="canonical" href="([^"]*)"', (published / path).read_text())

    for name in VERSIONS:
        assert canonical(f"{name}/guide/kept.html") == [f"{URL}/stable/guide/kept.html"]
    assert canonical("main/guide/coming.html") == [f"{URL}/main/guide/coming.html"]


def test_the_root_leads_to_main_until_there_is_a_tag(sites, tmp_path):
    publish.publish(sites["main"], tmp_path, "main")
    assert 'content="0; url=main/index.html"' in (tmp_path / "index.html").read_text()
    assert not (tmp_path / "stable").exists()
    publish.publish(sites["v0.1.0"], tmp_path, "v0.1.0")
    assert 'content="0; url=v0.1.0/index.html"' in (tmp_path / "index.html").read_text()


# --- what a reader finds, with scripts --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["file", "http"])
def address(request, published):
    """The address of the published folder: on the disk, and from a server."""
    if request.param == "file":
        yield published.as_uri()
        return
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=published)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def look(url: str) -> Menu:
    """The page after its scripts ran; a message of theirs is an error."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--enable-logging=stderr"]
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", url], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    return Menu(done.stdout)


@needs_browser
def test_an_old_version_learns_of_newer_ones(address, published):
    # Published first, its files name no other version.
    assert "v0.2.0" not in (published / "v0.1.0" / "guide" / "kept.html").read_text()
    menu = look(f"{address}/v0.1.0/guide/kept.html")
    page = published / "v0.1.0" / "guide" / "kept.html"
    assert targets(menu, page, published) == {name: f"{name}/guide/kept.html" for name in VERSIONS}
    assert list(menu.groups) == ["Tags", "Branches"] and menu.current == "../../v0.1.0/guide/kept.html"
    assert menu.banner == "This is an old version, v0.1.0. The newest release is v0.2.0."


@needs_browser
def test_the_newest_version_has_no_banner_and_a_removed_page_has_somewhere_to_go(address, published):
    assert look(f"{address}/v0.2.0/index.html").banner is None
    assert look(f"{address}/stable/index.html").banner is None
    page = published / "v0.1.0" / "guide" / "removed.html"
    menu = look(f"{address}/v0.1.0/guide/removed.html")
    assert targets(menu, page, published)["v0.2.0"] == "v0.2.0/index.html"


@needs_browser
def test_a_branch_published_before_the_tag_learns_that_it_is_development(address):
    assert "development version, main" in look(f"{address}/main/search.html").banner


@needs_browser
def test_the_root_opens_the_newest_tag(address):
    assert look(f"{address}/index.html").current == "../v0.2.0/index.html"
