"""Links the first use of each term of the glossary, on every page of the guide and of the gallery.

The sources have no mark-up for it, which a notebook would show as it stands; ``:term:`` works as ever. Code, headings,
captions, citations and what is a link already are left alone, and so is the glossary itself.
"""

import re

from docutils import nodes
from findable import _parents
from sphinx import addnodes

PAGES = ("programming-guide/", "getting-started/tutorials/")
_NOT_IN = (nodes.literal, nodes.reference, nodes.citation, nodes.note, addnodes.glossary, addnodes.pending_xref)


def pattern(terms: list[str]) -> re.Pattern:
    """Matches any of the terms, as its own word, in the singular or the plural, also where a sentence begins."""
    words = sorted(terms, key=len, reverse=True)
    # A capital says as much as the rest: PTX is no ptx, and a sentence may begin with any term.
    found = "|".join(f"[{word[0]}{word[0].upper()}]{re.escape(word[1:])}" for word in words).replace(r"\ ", r"\s+")
    return re.compile(rf"(?<![\w-])(?P<term>{found})(?:es|s)?(?![\w-])")


def canonical(found: str, terms: dict) -> str:
    """The term that was found, as the glossary writes it."""
    word = " ".join(found.split())
    return word if word in terms else word[0].lower() + word[1:]


def _terms(env) -> dict[str, tuple[str, str]]:
    """Page and anchor of each term."""
    objects = env.domains.standard_domain.objects
    return {name: place for (kind, name), place in sorted(objects.items()) if kind == "term"}


def _link(app, doctree: nodes.document, docname: str) -> None:
    terms = _terms(app.env)
    if app.builder.format != "html" or not docname.startswith(PAGES) or not terms:
        return
    words, left = pattern(list(terms)), dict(terms)
    for node in list(doctree.findall(lambda node: isinstance(node, nodes.Text | nodes.reference))):
        if isinstance(node, nodes.reference):
            # By hand, with :term:
            if (anchor := node.get("refid") or node.get("refuri", "").partition("#")[2]).startswith("term-"):
                node["classes"].append("term")
                left = {term: place for term, place in left.items() if place[1] != anchor}
            continue
        if not _is_prose(node):
            continue
        parts, end = [], 0
        for match in words.finditer(node.astext()):
            if place := left.pop(canonical(match["term"], terms), None):
                parts += [nodes.Text(node.astext()[end : match.start()]), _reference(app, docname, match[0], *place)]
                end = match.end()
        if parts:
            node.parent.replace(node, [*parts, nodes.Text(node.astext()[end:])])


def _is_prose(text: nodes.Text) -> bool:
    parents = list(_parents(text))
    paragraph = next((node for node in parents if isinstance(node, nodes.paragraph)), None)
    return (
        paragraph is not None
        and "provenance" not in paragraph["classes"]
        and not any(isinstance(node, _NOT_IN) for node in parents)
    )


def _reference(app, docname: str, text: str, page: str, anchor: str) -> nodes.reference:
    uri = f"#{anchor}" if page == docname else f"{app.builder.get_relative_uri(docname, page)}#{anchor}"
    return nodes.reference("", text, refuri=uri, internal=True, classes=["term"])


def _write_again(app, env) -> list[str]:
    """When a term comes or goes, every page that may use it."""
    before, env.linked_terms = getattr(env, "linked_terms", None), _terms(env)
    return [name for name in env.found_docs if name.startswith(PAGES)] if before != env.linked_terms else []


def setup(app) -> dict:
    app.connect("doctree-resolved", _link)
    app.connect("env-updated", _write_again)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
