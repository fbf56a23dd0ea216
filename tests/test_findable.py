"""What lets a page be found: its head, its twin in Markdown, redirects, and the link that opens its notebook."""

import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import gallery
import pytest

# A machine that only measures has no Sphinx.
SphinxTestApp = pytest.importorskip("sphinx.testing.util").SphinxTestApp
findable = pytest.importorskip("findable")
pytest.importorskip("notfound")
pytest.importorskip("sphinx_reredirects")

INDEX = """
Site
====

Opening with *words*. The second sentence stays. {long}

.. toctree::
   :caption: Chapters

   guide/page
"""
PAGE = """
A page
======

.. note:: Not this.

It has :math:`a_1 * b_1` and `code`:

.. math:: \\sum_i x_i

.. code-block:: python

   x = a * b_1

.. list-table::
   :header-rows: 1

   * - Head
   * - Cell

.. py:function:: package._kernel(x_ptr, n: int)

   Adds *one*. See :doc:`/index`, `there <https://example.org/a_b.html>`__ and :ref:`here <place>`.

.. _place:

Below
-----

Text.
"""


@pytest.fixture
def build(tmp_path):
    """Build a site of two pages under some of the site's settings."""

    def build(url: str = "", **settings) -> Path:
        site = tmp_path / "site"
        (site / "guide").mkdir(parents=True, exist_ok=True)
        names = ("ogp_image", "redirect_html_template_file")
        ours = runpy.run_path(str(gallery.ROOT / "conf.py"))
        settings = {name: ours[name] for name in names} | {"html_baseurl": url, "project": "Site"} | settings
        settings["redirect_html_template_file"] = str(gallery.ROOT / ours["redirect_html_template_file"])
        settings["html_theme"] = "sphinx_rtd_theme"
        settings["extensions"] = ["findable", "sphinx_reredirects"]
        (site / "conf.py").write_text("\n".join(f"{name} = {value!r}" for name, value in settings.items()))
        (site / "index.rst").write_text(INDEX.format(long="A long one, that goes on and on. " * 9))
        (site / "guide" / "page.rst").write_text(PAGE)
        app = SphinxTestApp("html", srcdir=site, freshenv=True)
        try:
            app.build()
            assert not app.warning.getvalue()
            return Path(app.outdir)
        finally:
            app.cleanup()

    return build


def tags(page: Path) -> dict[str, str]:
    found = re.findall(r'<meta (?:property|name)="([^"]+)" content="([^"]*)"', page.read_text(encoding="utf-8"))
    assert len(dict(found)) == len([name for name, _ in found if name != "viewport"]) + 1
    return dict(found)


# --- the head of a page -----------------------------------------------------------------------------------------------


def test_a_site_without_an_address_describes_its_pages_and_claims_no_address(build):
    out = build()
    home, page = tags(out / "index.html"), tags(out / "guide" / "page.html")
    sentences = "Opening with words. The second sentence stays. "
    assert home["description"].startswith(sentences) and home["description"].endswith("on and on.")
    assert 100 < len(home["description"]) <= findable.LONGEST
    assert page["description"] == page["og:description"] == "It has a_1 * b_1 and code:"
    assert page["og:title"] == "A page" and page["og:site_name"] == "Site"
    assert not any(name.startswith(("og:url", "og:image")) for name in [*home, *page])
    assert {name: tags(out / f"{name}.html")["description"] for name in findable.MADE} == findable.MADE
    assert not (out / "sitemap.xml").exists()


def test_a_site_with_an_address_says_it_to_search_engines_and_to_those_who_show_links(build):
    out = build("https://example.org/site/stable/")
    page = tags(out / "guide" / "page.html")
    assert page["og:url"] == "https://example.org/site/stable/guide/page.html"
    assert page["og:image"] == "https://example.org/site/stable/_static/social.png" and page["og:image:alt"]
    assert (out / "_static" / "social.png").read_bytes().startswith(b"\x89PNG")
    tree = ElementTree.parse(out / "sitemap.xml")
    places = {place.text for place in tree.iter("{http://www.sitemaps.org/schemas/sitemap/0.9}loc")}
    assert places == {f"https://example.org/site/stable/{name}.html" for name in ("index", "guide/page")}


def test_a_site_that_has_no_address_any_more_loses_its_sitemap(build):
    assert (build("https://example.org/") / "sitemap.xml").exists()
    assert not (build() / "sitemap.xml").exists()


def test_the_picture_for_links_needs_no_record(tmp_path, monkeypatch):
    def report(name, gpu):
        raise FileNotFoundError(name)

    monkeypatch.setattr(gallery, "report", report)
    assert findable._picture_shows() is None
    findable.draw_picture(tmp_path / "social.png")
    assert (tmp_path / "social.png").stat().st_size > 1000


@pytest.mark.parametrize("url", ["", "https://example.org", "https://example.org/a/"])
def test_settings_follow_the_address(monkeypatch, url):
    monkeypatch.setenv("GALLERY_URL", url)
    settings = runpy.run_path(str(gallery.ROOT / "conf.py"))
    assert settings["html_baseurl"] == (url and f"{url.rstrip('/')}/stable/")


@pytest.mark.parametrize(("url", "prefix"), [("", "/"), ("https://example.org/a/stable/", "/a/stable/")])
def test_the_page_for_missing_pages_finds_its_files_from_anywhere(build, url, prefix):
    text = (build(url) / "404.html").read_text(encoding="utf-8")
    assert f'href="{prefix}_static/' in text and 'href="_static/' not in text


# --- Markdown ---------------------------------------------------------------------------------------------------------


def test_every_page_has_a_twin_in_markdown(build):
    out = build()
    text = (out / "guide" / "page.md").read_text(encoding="utf-8")
    for piece in (
        "# A page\n",
        "It has $a_1 * b_1$ and ",
        "$$\n\\sum_i x_i\n$$\n",
        "```python\nx = a * b_1\n```",
        "| Head |\n| --- |\n| Cell |",
        "`package._kernel(x_ptr, n: int)`",
        "Adds *one*. See [Site](../index.md), [there](https://example.org/a_b.html) and [here](#place)",
        "## Below\n\nText.",
    ):
        assert piece in text, piece
    assert "¶" not in text and "<" not in text
    page = (out / "guide" / "page.html").read_text(encoding="utf-8")
    assert '<link rel="alternate" type="text/markdown" href="page.md" />' in page


def test_a_formula_that_gets_lost_fails_the_build():
    page = '<div itemprop="articleBody"><span class="math">x</span></div>'
    assert findable.markdown(page, ["x^2"]) == "$x^2$\n"
    with pytest.raises(Exception, match="shows 1 formulas and its source has 2"):
        findable.markdown(page, ["x^2", "y"])


def test_llms_txt_lists_the_pages_with_what_they_are_about(build):
    text = (build() / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith(f"# Site\n\n> {findable.ABOUT}\n\n## Chapters\n")
    assert "- [A page](guide/page.md): It has a_1 * b_1 and code:" in text


# --- pages that moved -------------------------------------------------------------------------------------------------


def test_a_page_that_moved_leads_to_its_new_place(build):
    text = (build(redirects={"old/page": "../guide/page.html"}) / "old" / "page.html").read_text(encoding="utf-8")
    assert '<meta http-equiv="refresh" content="0; url=../guide/page.html">' in text
    assert '<a href="../guide/page.html">' in text and "<script" not in text


def test_pages_that_moved_are_redirected():
    git = ["git", "-C", str(gallery.ROOT)]
    try:
        shallow = subprocess.run(
            [*git, "rev-parse", "--is-shallow-repository"], check=True, capture_output=True, text=True
        )
        command = [
            *git,
            "log",
            "--no-renames",
            "--diff-filter=D",
            "--name-only",
            "--format=",
            "--",
            "docs/*.rst",
            "examples/*.py",
        ]
        gone = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git history")
    if shallow.stdout.strip() == "true":
        pytest.skip("no git history")
    redirects = runpy.run_path(str(gallery.ROOT / "conf.py"))["redirects"]
    for path in {path for path in gone if not (gallery.ROOT / path).exists()}:
        name = path.removeprefix("docs/").removesuffix(".rst")
        if path.startswith("examples/"):
            name = f"getting-started/tutorials/{Path(path).stem}"
        assert name in redirects, f"conf.py: redirects lacks {name}, a page that was at that place"


# --- Colab ------------------------------------------------------------------------------------------------------------

BODY = """
<div class="sphx-glr-download-link-note admonition note"><p class="admonition-title">Note</p>
<p><a href="#end">Go to the end</a> to download the full example code.</p>
</div>
<div class="sphx-glr-download sphx-glr-download-jupyter docutils container">
<p><a class="reference download internal" download="" href="../../_downloads/0a1/01-add.ipynb">Download</a></p></div>
"""


@pytest.mark.parametrize("repository", [None, "someone/gallery"])
def test_a_notebook_opens_in_colab_where_the_repository_is_known(monkeypatch, repository):
    monkeypatch.delenv("GALLERY_REPOSITORY", raising=False)
    if repository:
        monkeypatch.setenv("GALLERY_REPOSITORY", repository)
    context = {"body": BODY}
    gallery._open_in_colab(SimpleNamespace(), "page", "page.html", context, None)
    url = "https://colab.research.google.com/github/someone/gallery/blob/gh-pages/stable/_downloads/0a1/01-add.ipynb"
    assert context["body"].count(f'<a class="reference external" href="{url}">Open in Colab</a>') == (
        2 if repository else 0
    )
    if not repository:
        assert context["body"] == BODY
    page_without = {"body": "<p>Text</p>"}
    gallery._open_in_colab(SimpleNamespace(), "page", "page.html", page_without, None)
    assert page_without["body"] == "<p>Text</p>"
