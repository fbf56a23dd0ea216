"""Leads from the pages of the gallery to the guide, by words that a notebook shows as they stand.

A page emphasises the title of a chapter where it points there, and on the site that is a link to the chapter. Words
that the glossary explains are the business of terms.py.
"""

from docutils import nodes
from sphinx.util.nodes import make_refnode

PAGES, CHAPTERS = "getting-started/tutorials/", "programming-guide/"


def _link(app, doctree: nodes.document, docname: str) -> None:
    if not docname.startswith(PAGES):
        return
    chapters = {title.astext(): name for name, title in app.env.titles.items() if name.startswith(CHAPTERS)}
    for words in list(doctree.findall(nodes.emphasis)):
        if chapter := chapters.get(" ".join(words.astext().split())):
            words.replace_self(make_refnode(app.builder, docname, chapter, "", words.deepcopy()))


def setup(app) -> dict:
    # Only now every page has been read.
    app.connect("doctree-resolved", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
