"""What lets people and programs find a page: descriptions, a picture for links, a sitemap, and every page as Markdown.

Beside ``page.html`` stands ``page.md``, made from the finished page, and ``llms.txt`` lists them all. The sitemap, and
the address and the picture in each page's head, need to know where the site will be: from the variable GALLERY_URL.
"""

import html
import re
import sys
import textwrap
import urllib.parse
from pathlib import Path

from bs4 import BeautifulSoup
from docutils import nodes
from markdownify import MarkdownConverter
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.ext.viewcode import OUTPUT_DIRNAME

PICTURE = "_static/social.png"
ABOUT = "Triton kernels with torch's semantics, and an executable gallery that teaches how each one is written."
# Pages that Sphinx makes itself, which have no text to describe them by
MADE = {
    "404": "There is no such page.",
    "genindex": "Every function, kernel and term of Triton Gallery, in alphabetical order.",
    "search": "Search the pages, functions and kernels of Triton Gallery.",
}
LONGEST = 200  # characters of a description
# What is of no use outside a browser
CHROME = ".headerlink, .sphx-glr-download-link-note, button, input, script, style"


# --- the head of a page -----------------------------------------------------------------------------------------------


def description(doctree: nodes.document) -> str:
    """The first sentences of a page, or of what it documents, as far as a line of search results goes."""
    beside = (nodes.Admonition, nodes.table, nodes.footnote, nodes.citation)
    for paragraph in doctree.findall(nodes.paragraph):
        parents = [parent for parent in _parents(paragraph) if not isinstance(parent, addnodes.desc)]
        if not any(isinstance(parent, beside) for parent in parents):
            break
    else:
        return ""
    # A citation stands behind a blank, unlike the brackets of code.
    text = re.sub(r"\s+\[[^\]]*\]", "", " ".join(paragraph.astext().split()))
    sentences = re.split(r"(?<=[.!?]) ", text)
    while len(sentences) > 1 and len(" ".join(sentences)) > LONGEST:
        sentences.pop()
    return textwrap.shorten(" ".join(sentences), LONGEST, placeholder=" …")


def _parents(node: nodes.Node):
    while node := node.parent:
        yield node


def _describe(app, pagename, templatename, context, doctree) -> None:
    text = description(doctree) if doctree is not None else MADE.get(pagename)
    if pagename.startswith(f"{OUTPUT_DIRNAME}/"):
        text = f"The source of Triton Gallery: {context['title']}."
    if text:
        context["metatags"] = (
            f'{context.get("metatags", "")}<meta name="description" content="{html.escape(text)}" />\n'
        )
        context["meta"] = {**(context.get("meta") or {}), "og:description": text}


def _page_context(app, pagename, templatename, context, doctree) -> None:
    tags = context.get("metatags", "")
    if not app.config.html_baseurl:
        # Addresses that are not absolute mean nothing to whoever shows a link.
        tags = re.sub(r'<meta property="og:(url|image[^"]*)" [^>]*>\n?', "", tags)
    if doctree is not None:
        tags += f'<link rel="alternate" type="text/markdown" href="{Path(pagename).name}.md" />\n'
    context["metatags"] = tags


def _picture_shows():
    """The report of the record in the picture; None where there is no such record yet."""
    from gallery import README_RECORD, report

    try:
        return report(*README_RECORD)
    except FileNotFoundError:
        return None
    except ValueError as error:
        sys.exit(str(error))  # one line, where Sphinx would print fifty


def draw_picture(path: Path) -> None:
    """What a link to the site shows where links show pictures: a record, so that it cannot go stale."""
    import matplotlib.pyplot as plt

    if found := _picture_shows():
        found.plot()
    figure = plt.gcf()
    figure.set_size_inches(12, 6.3)
    figure.suptitle("Triton Gallery", fontsize=32, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


# --- every page as Markdown -------------------------------------------------------------------------------------------


class _Markdown(MarkdownConverter):
    class Options(MarkdownConverter.DefaultOptions):
        heading_style = "atx"
        bullets = "-"
        escape_asterisks = escape_underscores = escape_misc = False

        @staticmethod
        def code_language_callback(pre) -> str:
            box = pre.find_parent(class_=re.compile("^highlight-"))
            names = re.findall(r"highlight-(\w+)", " ".join(box["class"])) if box else []
            return {"default": "python", "none": "text"}.get(names[0], names[0].lower()) if names else ""


def markdown(page: str, formulas: list[str]) -> str:
    """The text of a finished page. Its formulas are given as TeX, in their order."""
    body = BeautifulSoup(page, "html.parser").find(itemprop="articleBody")
    for extra in body.select(CHROME):
        extra.decompose()
    places = body.select(".math")
    if len(places) != len(formulas):
        raise ExtensionError(f"markdown: a page shows {len(places)} formulas and its source has {len(formulas)}")
    for place, formula in zip(places, formulas, strict=True):
        place.replace_with(f"\n\n$$\n{formula.strip()}\n$$\n\n" if place.name == "div" else f"${formula.strip()}$")
    for link in body.select("a.term"):
        link.unwrap()
    for signature in body.select("dt.sig"):
        code = BeautifulSoup("<code></code>", "html.parser")
        code.code.string = re.sub(r"\s+", " ", signature.get_text()).strip()
        signature.clear()
        signature.append(code)
    for link in body.select("a[href]"):
        # Between the pages of the site, from one twin to the other.
        if not re.match(r"[a-z]+:|#", link["href"]):
            link["href"] = re.sub(r"\.html(?=#|$)", ".md", link["href"])
    text = _Markdown().convert_soup(body)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _formulas(doctree: nodes.document) -> list[str]:
    return [node.astext() for node in doctree.findall(lambda node: isinstance(node, nodes.math | nodes.math_block))]


def index(app, descriptions: dict[str, str]) -> str:
    """``llms.txt``: every page's twin with what it is about, in the order of the site's navigation."""
    lines = [f"# {app.config.project}", "", f"> {ABOUT}", ""]
    for toctree in app.env.get_doctree(app.config.root_doc).findall(addnodes.toctree):
        lines += [f"## {toctree['caption']}", ""]
        for docname in _with_children(app.env, toctree["includefiles"]):
            about = f": {descriptions[docname]}" if descriptions.get(docname) else ""
            lines.append(f"- [{app.env.titles[docname].astext()}]({docname}.md){about}")
        lines.append("")
    return "\n".join(lines)


def _with_children(env, docnames: list[str]) -> list[str]:
    found = []
    for docname in docnames:
        found += [docname, *_with_children(env, env.toctree_includes.get(docname, []))]
    return found


def _build_finished(app, exception) -> None:
    if exception or app.builder.name != "html":
        return
    outdir, descriptions = Path(app.outdir), {}
    draw_picture(outdir / PICTURE)
    for docname in sorted(app.env.found_docs):
        page = (outdir / f"{docname}.html").read_text(encoding="utf-8")
        described = BeautifulSoup(page[: page.find("</head>")], "html.parser").find("meta", {"name": "description"})
        descriptions[docname] = described["content"] if described else ""
        text = markdown(page, _formulas(app.env.get_doctree(docname)))
        (outdir / f"{docname}.md").write_text(text, encoding="utf-8")
    (outdir / "llms.txt").write_text(index(app, descriptions), encoding="utf-8")
    if not app.config.html_baseurl:
        # Of an earlier build, which knew an address.
        (outdir / "sitemap.xml").unlink(missing_ok=True)


def _config(app, config) -> None:
    config.ogp_site_url = config.html_baseurl
    if found := _picture_shows():
        providers = dict.fromkeys(row["provider"] for row in found.record["rows"])
        config.ogp_image_alt = f"{found.record['title']}: the rates of {', '.join(providers)}"
    # The page for missing pages is shown at any depth.
    config.notfound_urls_prefix = urllib.parse.urlparse(config.html_baseurl).path or "/"
    if config.html_baseurl:
        app.setup_extension("sphinx_sitemap")
        config.sitemap_url_scheme = "{link}"
        config.sitemap_excludes = [*(f"{name}.html" for name in MADE), f"{OUTPUT_DIRNAME}/*"]


def setup(app) -> dict:
    app.setup_extension("notfound.extension")
    app.setup_extension("sphinxext.opengraph")
    app.connect("config-inited", _config, priority=400)
    app.connect("html-page-context", _describe, priority=400)
    # After sphinxext.opengraph, with priority 500, has written its tags.
    app.connect("html-page-context", _page_context, priority=600)
    # From the pages as readers get them.
    app.connect("build-finished", _build_finished, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
