"""Leads from the pages of the gallery to the guide, by words that a notebook shows as they stand.

A page emphasises a word where it explains it, and the title of a chapter where it points there. On the site such a word
is a link to the glossary, if the glossary has it, and such a title a link to the chapter.
"""

from docutils import nodes
from sphinx.util.nodes import make_refnode

PAGES, CHAPTERS = "getting-started/tutorials/", "programming-guide/"


def _places(env) -> dict[str, tuple[str, str]]:
    """The page and the anchor of each term and each chapter, by their names in small letters."""
    terms = {entry[0].lower(): entry[3:5] for entry in env.domains["std"].get_objects() if entry[2] == "term"}
    titles = {title.astext().lower(): (name, "") for name, title in env.titles.items() if name.startswith(CHAPTERS)}
    return terms | titles


def _link(app, doctree: nodes.document, docname: str) -> None:
    if not docname.startswith(PAGES):
        return
    places = _places(app.env)
    for word in list(doctree.findall(nodes.emphasis)):
        name = " ".join(word.astext().lower().split())
        place = places.get(name) or places.get(name.removesuffix("s"))
        if place:
            word.replace_self(make_refnode(app.builder, docname, *place, word.deepcopy()))


def setup(app) -> dict:
    # Only now every page has been read.
    app.connect("doctree-resolved", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
