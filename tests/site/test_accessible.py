"""What a reader with a keyboard, a screen reader or a magnifier meets."""

import json
import shutil
import subprocess

import pytest
from conftest import CHROMIUM, KINDS, PAGES, SITE, each_kind, each_page

RESULTS = "search.html?q=softmax"


@pytest.mark.parametrize("page_name", [*PAGES, RESULTS])
def test_axe_finds_nothing_serious(open_page, node_modules, page_name):
    axe = (node_modules / "axe-core" / "axe.min.js").read_text()
    for width in (360, 1280):
        page = open_page(page_name, width=width)
        if page_name == RESULTS:
            page.locator("#search-results li p.context").first.wait_for()
        page.evaluate(axe)
        for theme in ("light", "dark"):
            page.evaluate("theme => document.documentElement.dataset.mode = theme", theme)
            found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
            bad = [
                f"{rule['id']}: {node['html'][:160]} {node['failureSummary']}"
                for rule in found
                for node in rule["nodes"][:3]
                if rule["impact"] in ("serious", "critical")
            ]
            assert bad == [], f"at {width} pixels, {theme}"
