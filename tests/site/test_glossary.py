"""The built site: a term's first use on a page of the guide or of the gallery leads to the glossary."""

import functools
import re
from pathlib import Path

import pytest
import terms
from bs4 import BeautifulSoup, NavigableString

from conftest import PAGES

GLOSSARY = "programming-guide/chapter-3/programming-model.html"
READ = [name for name in PAGES if re.match(r"programming-guide/|getting-started/tutorials/\d\d-", name)]
NO_PROSE = "code, pre, figcaption, h1, h2, h3, h4, .admonition, .glossary, .provenance, .citation"


def body(site: Path, name: str):
    return BeautifulSoup((site / name).read_text(encoding="utf-8"), "html.parser").find(itemprop="articleBody")


@functools.cache
def glossary(site: Path) -> dict[str, str]:
    """Each term's anchor."""
    entries = body(site, GLOSSARY).select("dl.glossary dt")
    return {next(entry.stripped_strings): entry["id"] for entry in entries}


def first_uses(page, anchors: dict[str, str]) -> dict[str, str | None]:
    """For each term that the prose uses, in order, where its first use leads."""
    names, found, words = {anchor: name for name, anchor in anchors.items()}, {}, terms.pattern(list(anchors))
    skipped = {id(string) for element in page.select(NO_PROSE) for string in element.find_all(string=True)}
    for string in page.find_all(string=True):
        if type(string) is not NavigableString or id(string) in skipped or not string.find_parent("p"):
            continue
        link = string.find_parent("a")
        target = (link.get("href") or "").partition("#")[2] if link else None
        if target in names:
            found.setdefault(names[target], target)
        elif link is None:
            for match in words.finditer(string):
                found.setdefault(terms.canonical(match["term"], anchors), None)
    return found


def test_the_glossary_has_its_terms(site):
    anchors = glossary(site)
    assert len(anchors) >= 30 and {"program", "PTX", "launch grid", "memory-bound"} <= anchors.keys()


@pytest.mark.parametrize("page_name", READ)
def test_the_first_use_of_a_term_leads_to_the_glossary(site, page_name):
    anchors = glossary(site)
    found = first_uses(body(site, page_name), anchors)
    assert len(found) >= 5 and "kernel" in found
    assert not {term: target for term, target in found.items() if target != anchors[term]}


def test_a_first_use_without_a_link_is_found():
    anchors = {"warp": "term-warp", "L2 cache": "term-L2-cache", "kernel": "term-kernel"}
    page = BeautifulSoup(
        "<h2>A warp</h2><p><code>warp</code> Kernels and a <a href='x.html#term-warp'>warp</a>, in the L2\ncache.</p>"
        "<p><a href='x.html#term-kernel'>kernel</a></p>",
        "html.parser",
    )
    assert first_uses(page, anchors) == {"kernel": None, "warp": "term-warp", "L2 cache": None}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_term_looks_like_its_sentence_with_dots_below(open_page, theme):
    page = open_page("getting-started/tutorials/02-fused-softmax.html", theme=theme)
    link, around = page.eval_on_selector(
        "[itemprop=articleBody] a.term",
        "link => [link, link.closest('p')].map(e => getComputedStyle(e)).map(s => [s.color, s.textDecorationStyle])",
    )
    assert link[0] == around[0] and link[1] == "dotted"
