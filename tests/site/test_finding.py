"""The built site: its pages are found by search and by programs, and can be taken away."""

import json
import os
import re
import zipfile
from html import unescape
from pathlib import Path

import gallery
import pytest

import triton_gallery

EXAMPLES = sorted(gallery.EXAMPLES.glob("[0-9][0-9]-*.py"))


def documents(site: Path) -> list[str]:
    """The pages with a text of their own, without what Sphinx makes."""
    return sorted(path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.md"))


def description(site: Path, name: str) -> str:
    page = (site / f"{name}.html").read_text(encoding="utf-8")
    (found,) = re.findall(r'<meta name="description" content="([^"]*)"', page)
    return unescape(found)


def test_every_page_has_a_description_of_its_own(site):
    names = [*documents(site), "404", "search", "genindex"]
    found = {name: description(site, name) for name in names}
    assert len(names) > 25 and len(set(found.values())) == len(found)
    assert {name: text for name, text in found.items() if not 20 <= len(text) <= 200} == {}


def test_every_page_has_a_twin_that_llms_txt_lists(site):
    sources = {
        path.relative_to(site / "_sources").as_posix().partition(".")[0] for path in site.glob("_sources/**/*.txt")
    }
    assert set(documents(site)) == sources
    listed = re.findall(
        r"^- \[[^\]]+\]\(([^)]+)\.md\): .", (site / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(set(documents(site)) - {"index"})


def test_every_kernel_leads_to_its_source_and_back(site):
    found = 0
    for page in (site / "python-api").glob("*.html"):
        signatures = re.findall(
            r'<dt class="sig[^>]* id="(triton_gallery[\w.]*?\.(_\w+))"\s*>(.*?)</dt>',
            page.read_text(encoding="utf-8"),
            re.DOTALL,
        )
        for anchor, name, signature in signatures:
            (link,) = re.findall(r'href="([^"#]+)#' + name + r'"><span class="viewcode-link">', signature)
            source = (page.parent / link).resolve()
            back = f'href="{os.path.relpath(page, source.parent)}#{anchor}"'
            text = source.read_text(encoding="utf-8")
            assert back in text and re.search(f'id="{name}"', text), anchor
            found += 1
    assert found > 100


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_twin_holds_code_formulas_and_figures(site, example):
    text = (site / "getting-started" / "tutorials" / f"{example.stem}.md").read_text(encoding="utf-8")
    assert text.count("```python") > 10 and "@triton.jit" in text and "$$\n" in text and "](../../_images/" in text
    assert not re.search(r"</?(div|span|p|math|svg)\b", text)
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", prose):
        assert (site / "getting-started" / "tutorials" / link).exists(), link


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("layer_norm", "python-api/layer_norm.html"),
        ("triton_gallery.attention", "python-api/attention.html"),
        ("matmul", "getting-started/tutorials/03-matrix-multiplication.html"),
        ("_softmax_fwd_kernel", "python-api/softmax.html"),
        ("_matmul_specialized_kernel", "python-api/matmul.html"),
        ("Welford recurrence", "getting-started/tutorials/05-layer-norm.html"),
        ("occupancy registers", "programming-guide/chapter-5/performance.html"),
    ],
)
def test_search_finds(open_page, words, page):
    opened = open_page(f"search.html?q={words.replace(' ', '+')}")
    opened.wait_for_selector("#search-results ul.search li a")
    opened.locator(".search-summary", has_text="finished").wait_for()
    links = opened.eval_on_selector_all("#search-results ul.search li > a", "links => links.map(a => a.href)")
    assert [link for link in links[:5] if page in link], links[:5]


def test_search_shows_words(open_page):
    opened = open_page("search.html?q=softmax")
    opened.locator(".search-summary", has_text="finished").wait_for()
    opened.locator("#search-results li p.context").nth(4).wait_for()
    passages = opened.locator("#search-results li p.context").all_inner_texts()
    assert any("We normalize the rows" in text for text in passages) and any(
        "torch.softmax" in text for text in passages
    )
    assert not [text for text in passages if "download the full" in text or "∑" in text]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_page_links_its_script_and_its_notebook(site, example):
    page = (site / "getting-started" / "tutorials" / f"{example.stem}.html").read_text(encoding="utf-8")
    links = {kind: re.findall(rf'href="([^"]*/{example.stem}\.{kind})"', page) for kind in ("py", "ipynb", "zip")}
    folder = site / "getting-started" / "tutorials"
    assert all(found and (folder / found[0]).is_file() for found in links.values()), links
    notebook = json.loads((folder / links["ipynb"][0]).read_text(encoding="utf-8"))
    first = "".join(notebook["cells"][0]["source"])
    assert notebook["cells"][0]["cell_type"] == "code" and first == gallery.first_cell(triton_gallery.__version__)


def test_all_examples_can_be_had_at_once(site):
    page = (site / "getting-started" / "tutorials" / "index.html").read_text(encoding="utf-8")
    for kind, ending in (("python", ".py"), ("jupyter", ".ipynb")):
        (link,) = re.findall(rf'href="([^"]*/tutorials_{kind}\.zip)"', page)
        with zipfile.ZipFile(site / "getting-started" / "tutorials" / link) as archive:
            assert {f"{example.stem}{ending}" for example in EXAMPLES} <= set(archive.namelist())
