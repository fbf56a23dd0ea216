"""The built site: each page says where its numbers are from, and links their files."""

import json
import re
from html import escape, unescape
from pathlib import Path

import gallery
import pytest

EXAMPLES = sorted(gallery.EXAMPLES.glob("[0-9][0-9]-*.py"))
RECORDS = sorted((gallery.SRC / "triton_gallery" / "records").glob("*/*.json"))
GUIDE = sorted((gallery.ROOT / "docs").glob("**/*.rst"))
GUIDE = [path for path in GUIDE if "_generated" not in path.parts and "tutorials" not in path.parts]
NAMES = "|".join(path.stem for path in RECORDS)
# Two backticks in front of a role are a page that tells of it.
MEASURED = re.compile(rf'(?<!`):measured:`|^\.\. measured-table::|"(?:{NAMES})"', re.MULTILINE)


def text_of(page: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", page))


def read(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_page_of_the_gallery_ends_with_where_it_ran(site, example):
    end = text_of(read(site, f"getting-started/tutorials/{example.stem}")).rpartition("Where this page ran")[2]
    for key, value in {"gpu": r"\S+", "driver": r"\S+", "torch": r"2\.", "triton": r"3\.", "date": r"\d{4}-"}.items():
        assert re.search(rf"^{key} +{value}", end, re.MULTILINE), f"{key} is not told; `make html` executes the pages"
    assert re.search(r"^commit +([0-9a-f]{7}|unknown)", end, re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_figure_and_table_links_its_data_and_the_command(site, example):
    name = f"getting-started/tutorials/{example.stem}"
    page = read(site, name)
    names = [path.stem for path in RECORDS if gallery.page_of(json.loads(path.read_text("utf-8"))) == example.stem]
    links = re.findall(r'<a download="([^"]*)" href="([^"]*)">[^<]*</a>', page)
    # Each benchmark has a figure, and a table for each GPU, or one where its kernels have changed on all of them.
    tables = {name: 1 if gallery.report(name).outdated else names.count(name) for name in names}
    shown = [name for name, n_tables in tables.items() for _ in range(1 + n_tables)]
    files = [f"{name}.{suffix}" for name in shown for suffix in ("csv", "json")]
    assert names and sorted(file for file, _ in links) == sorted(files) and "data:text" not in page
    for _, link in links:
        assert ((site / name).parent / link).is_file(), link
    assert len(re.findall(r"made by <code>make \w+[^<]*</code> at commit", page)) == len(shown)


@pytest.mark.parametrize("source", GUIDE, ids=lambda path: path.stem)
def test_a_page_of_the_guide_with_numbers_or_code_says_where_they_are_from(site, source):
    text, name = (
        source.read_text(encoding="utf-8"),
        source.relative_to(gallery.ROOT / "docs").with_suffix("").as_posix(),
    )
    page = text_of(read(site, name))
    if re.search(r"^\.\. run::$(?!\n   :hide-code:)", text, re.MULTILINE):
        assert re.search(r"The code on this page ran on .*, torch .*, triton .*, commit .*, \d{4}-", page)
    if MEASURED.search(text):
        assert re.search(r"[Mm]easured on .*, driver .*, \d{4}-\d\d-\d\d, torch .*, triton .*\(commit \w+\)", page)


def test_the_page_of_benchmarks_has_every_record(site):
    page = read(site, "getting-started/benchmarks")
    for path in RECORDS:
        gpu, record = path.parent.name, json.loads(path.read_text(encoding="utf-8"))
        assert f'id="record-{gpu}-{path.stem}"' in page and f"\n{record['gpu']}</label>" in page
        published = site / "_static" / "records" / gpu
        assert json.loads((published / path.name).read_text(encoding="utf-8")) == record
        assert (published / f"{path.stem}.csv").read_text(encoding="utf-8").startswith("x,provider,median")
        assert f'href="../_static/records/{gpu}/{path.name}"' in page


def test_no_page_shows_numbers_of_a_text_that_changed(site):
    tables = {page: page.read_text(encoding="utf-8").split("<caption>")[1:] for page in site.rglob("*.html")}
    for path in RECORDS:
        found = gallery.report(path.stem, path.parent.name)
        if not found.outdated:
            continue
        # Another GPU's record, of today's kernels, has the same title: what follows the table tells them apart.
        caption = f"{escape(found.record['title'])}, in {found.record['unit']}"
        for page, shown in tables.items():
            for table in shown:
                if table.startswith(caption):
                    measured = re.search(r"<p>M(easured on .*?)\.</p>", table)
                    assert f"m{measured[1]}" != found.provenance(), f"{page}: {path.stem} is out of date"
        assert found.status()[0] in text_of(read(site, "getting-started/benchmarks"))
