"""Folds the solutions of a page's exercises away.

Below a heading *Solutions*, each section becomes a box that the reader opens. The text itself has ordinary headings, so
a notebook, and a page in another format, shows the solutions as they stand.
"""

from docutils import nodes

TITLE = "Solutions"


def _fold(app, doctree: nodes.document, docname: str) -> None:
    if app.builder.format != "html":
        return
    for section in doctree.findall(nodes.section):
        if section[0].astext() == TITLE:
            for solution in section.children:
                if isinstance(solution, nodes.section):
                    title, *rest = solution.children
                    # A rubric is a heading without a link to itself, and what opens a box may hold no link.
                    heading = nodes.rubric(title.rawsource, "", *title.children, **{"heading-level": 3})
                    opened, body, closed = map(
                        _html, ('<details class="solution"><summary>', "</summary>", "</details>")
                    )
                    solution[:] = [opened, heading, body, *rest, closed]


def _html(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


def setup(app) -> dict:
    # Only now: the tables of contents have taken the titles from where they stood.
    app.connect("doctree-resolved", _fold)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
