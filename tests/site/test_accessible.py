"""What a reader with a keyboard, a screen reader or a magnifier meets."""

import json
import os
import shutil
import subprocess

import pytest

from conftest import CHROMIUM, KINDS, PAGES, each_kind, is_alike

RESULTS = "search.html?q=softmax"
LOOKS = [(width, theme) for width in (360, 1280) for theme in ("light", "dark")]
# Every page in one look, by turns. `make audit` sees one page of each kind in all looks, and those that are alike.
LOOKED_AT = [
    pytest.param(name, look, marks=[pytest.mark.slow] * (j != i % len(LOOKS)))
    for i, name in enumerate((*KINDS, RESULTS))
    for j, look in enumerate(LOOKS)
]
LOOKED_AT += [
    pytest.param(name, LOOKS[i % len(LOOKS)], marks=[pytest.mark.slow] * is_alike(name))
    for i, name in enumerate(PAGES)
    if name not in KINDS
]
# Words of code, letters of formulas and rows of tables are alike, and a page has up to 20,000: the first are enough.
THIN_OUT = """() => {
  const beyond = (n, selector, where = document) => [...where.querySelectorAll(selector)].slice(n);
  for (const e of beyond(3, 'pre')) e.textContent = e.textContent;
  for (const e of beyond(0, 'pre')) [...e.childNodes].slice(150).forEach(node => node.remove());
  for (const e of beyond(5, 'math')) e.replaceChildren();
  for (const e of beyond(20, 'table')) e.remove();
  for (const table of beyond(0, 'table')) for (const e of beyond(5, 'tr', table)) e.remove();
}"""


@pytest.mark.parametrize(("page_name", "look"), LOOKED_AT)
def test_axe_finds_nothing_serious(open_page, node_modules, page_name, look):
    width, theme = look
    page = open_page(page_name, width=width, theme=theme)
    if page_name == RESULTS:
        page.locator("#search-results li p.context").first.wait_for()
    if page_name not in KINDS:
        page.evaluate(THIN_OUT)
    page.evaluate((node_modules / "axe-core" / "axe.min.js").read_text())
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    bad = [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary']}"
        for rule in found
        for node in rule["nodes"][:3]
        if rule["impact"] in ("serious", "critical")
    ]
    assert bad == []


# Of a group of radio buttons, such as tabs are, Tab reaches the chosen one, and arrows the others.
TABBABLE = """() => [
  ...document.querySelectorAll('a[href], button, input, summary:not([tabindex="-1"]), [tabindex="0"]'),
].filter(
  e => e.type !== 'hidden' && e.checkVisibility({visibilityProperty: true}) && (e.type !== 'radio' || e.checked))"""


@pytest.mark.parametrize(
    ("page_name", "width"),
    [
        pytest.param(name, width, marks=[pytest.mark.slow] * (j != i % 2))
        for i, name in enumerate(KINDS)
        for j, width in enumerate((360, 1440))
    ],
)
def test_keyboard_reaches_everything_and_shows_where_it_is(open_page, page_name, width):
    page = open_page(page_name, width=width)
    page.evaluate(
        f"""() => {{
          window.expected = ({TABBABLE})();
          window.reached = new Map();
          document.addEventListener('focusin', ({{target: e}}) => {{
            const s = getComputedStyle(e);
            reached.set(e, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0);
          }});
        }}"""
    )
    page.keyboard.press("Tab")
    skip_link = page.evaluate("document.activeElement.className")
    for _ in range(page.evaluate("expected.length") + 4):
        page.keyboard.press("Tab")
    assert skip_link == "skip-link"
    assert page.evaluate("expected.filter(e => !reached.has(e)).map(e => e.outerHTML.slice(0, 120))") == []
    shown = "expected.filter(e => !reached.get(e)).map(e => e.outerHTML.slice(0, 120))"
    assert page.evaluate(shown) == [], "no focus ring"


def test_skip_link_leads_past_the_navigation(open_page):
    page = open_page("index.html")
    page.keyboard.press("Tab")
    assert page.locator(".skip-link").is_visible() and page.locator(".skip-link").bounding_box()["y"] >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('#content').contains(document.activeElement)")


def test_menu_of_a_phone_opens_and_closes_by_keyboard(open_page):
    page = open_page("index.html", width=360)
    menu, entry = page.get_by_role("button", name="Menu"), page.get_by_role("link", name="Installation").first
    assert not entry.is_visible()
    menu.press("Enter")
    entry.wait_for()
    assert menu.get_attribute("aria-expanded") == "true"
    page.keyboard.press("Escape")
    assert menu.get_attribute("aria-expanded") == "false" and menu.evaluate("e => e === document.activeElement")


# The validator's table of MathML is older than MathML Core, where every element has these attributes.
THEIRS = (
    "Attribute “displaystyle” not allowed on element “mfrac”",
    "Attribute “scriptlevel” not allowed on element “mfrac”",
)


def test_html_is_valid(site, node_modules):
    java = shutil.which("java")
    if java is None:
        pytest.skip("SITE NOT TESTED: no Java for the HTML validator")
    jar = node_modules / "vnu-jar" / "build" / "dist" / "vnu.jar"
    command = [java, "-jar", jar, "--errors-only", "--format", "json", *(site / name for name in PAGES)]
    messages = json.loads(subprocess.run(command, capture_output=True, text=True).stderr)["messages"]
    errors = {f"{m['url'].partition('/html/')[2]}:{m.get('lastLine')}: {m['message']}" for m in messages}
    assert sorted(error for error in errors if not any(text in error for text in THEIRS)) == []


LEAST = {"performance": 0.95, "accessibility": 0.98, "best-practices": 0.98, "seo": 0.98}


@pytest.mark.slow
@each_kind
def test_lighthouse(server, node_modules, page_name, record_property):
    """Slow: what it says about speed is true only on a machine that does nothing else."""
    if CHROMIUM is None:
        pytest.skip("SITE NOT TESTED: no Chromium on this machine")
    command = ["node", node_modules / "lighthouse" / "cli" / "index.js", server + page_name, "--quiet", "--output=json"]
    command += ["--chrome-flags=--headless --no-sandbox", f"--only-categories={','.join(LEAST)}"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CHROME_PATH": CHROMIUM})
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout)
    scores = {name: category["score"] for name, category in report["categories"].items()}
    record_property("scores", scores)
    print(page_name, scores)
    poor = [name for name, audit in report["audits"].items() if audit["score"] is not None and audit["score"] < 0.9]
    assert all(scores[name] >= least for name, least in LEAST.items()), (scores, poor)
