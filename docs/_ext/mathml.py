"""Formulas as MathML, which browsers draw and screen readers read without a script.

docutils translates the formulas' TeX. It knows less of TeX than MathJax does: what it does not know fails the build and
names the page and the line.
"""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import accents, tex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)

# A letter, its index and its accent, which docutils takes for the limits of a sum
_ACCENTED = re.compile(
    rf"<munderover>(<(\w+)[^>]*>(?:(?!munderover>).)*?</\2>)((?:(?!munderover>).)*)"
    rf'(<mo stretchy="false"[^>]*>(?:{"|".join(map(re.escape, accents.values()))})</mo>)</munderover>'
)


def mathml(node: nodes.math | nodes.math_block) -> str:
    try:
        formula = tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block))
    except MathError as error:
        logger.warning("math: %s", error, location=node)
        return node.astext()
    # The indentation would be a third of a page's size.
    formula = "".join(line.strip(" ") for line in formula.splitlines())
    return _ACCENTED.sub(r'<msub><mover accent="true">\1\4</mover>\3</msub>', formula)


def _visit_inline(self, node: nodes.math) -> None:
    formula = f'<span class="math">{mathml(node)}</span>'
    self.body.append(f'<span class="together">{formula}{node["after"]}</span>' if "after" in node else formula)
    raise nodes.SkipNode


def _visit_block(self, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", mathml(node), CLASS="math"))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def _hold_punctuation(app, doctree: nodes.document, docname: str) -> None:
    """A formula is a box, behind which a line could break before a full stop as well."""
    if app.builder.format != "html":
        return
    for node in doctree.findall(nodes.math):
        after = node.next_node(descend=False, siblings=True)
        if isinstance(after, nodes.Text) and (signs := re.match(r"[.,;:!?)]+", after)):
            node["after"] = signs[0]
            after.parent.replace(after, nodes.Text(after[signs.end() :]))


def _html_page_context(app, pagename, templatename, context, doctree) -> None:
    if context.get("has_maths_elements"):
        app.add_css_file("vendor/stix-two-math/stix-two-math.css")
        # Or the browser would look at the font when it has drawn the first formula without it.
        app.add_js_file(None, body="document.fonts.load('1em \"STIX Two Math\"')")


def setup(app) -> dict:
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    app.connect("doctree-resolved", _hold_punctuation)
    app.connect("html-page-context", _html_page_context)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
