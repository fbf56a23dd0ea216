"""Dark and light, wide and narrow, on paper, and quickly there."""

import io
import re

import gallery
import pytest
from PIL import Image, ImageStat

from conftest import KINDS, PAGES, SITE, each_kind, is_alike

TUTORIAL = "getting-started/tutorials/02-fused-softmax.html"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 24, 29)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


# --- dark and light ---------------------------------------------------------------------------------------------------


@each_kind
def test_page_follows_the_system(open_page, page_name):
    page = open_page(page_name)
    assert page.evaluate(BACKGROUND) == LIGHT
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(BACKGROUND) == DARK
    page.reload()
    assert page.evaluate(BACKGROUND) == DARK


def test_choice_of_theme_is_remembered(open_page):
    page = open_page("index.html")
    button = page.locator(".theme-choice")
    for theme, background in (("dark", DARK), ("light", LIGHT), ("auto", LIGHT), ("dark", DARK)):
        button.click()
        assert page.evaluate(BACKGROUND) == background and button.inner_text() == f"Theme: {theme}"
        page.reload()
        assert page.evaluate(BACKGROUND) == background and button.inner_text() == f"Theme: {theme}"
    page.goto(page.url.replace("index.html", TUTORIAL))
    assert page.evaluate(BACKGROUND) == DARK and page.problems == []


def test_chosen_theme_is_there_before_the_first_paint(open_page):
    # Of all scripts only what stands in the page itself has run when its body begins.
    page = open_page(
        "index.html",
        before="""
          localStorage.setItem('theme', 'dark');
          new MutationObserver((_, observer) => {
            if (!document.body) return;
            window.first = [document.documentElement.dataset.mode, typeof jQuery];
            observer.disconnect();
          }).observe(document, {childList: true, subtree: true});
        """,
    )
    assert page.evaluate("window.first") == ["dark", "undefined"]


def test_page_without_scripts_is_whole_and_offers_no_choice(open_page):
    page = open_page(TUTORIAL, java_script_enabled=False, theme="dark")
    assert not page.locator(".theme-choice").is_visible()
    assert page.locator("math").first.is_visible() and page.locator(".on-this-page summary").is_visible()


def test_figures_are_dark_on_dark_pages(open_page):
    page = open_page(TUTORIAL)
    figure = page.locator("img.sphx-glr-single-img").first
    means = {}
    for theme in ("light", "dark", "auto"):
        page.evaluate("theme => document.documentElement.dataset.mode = theme", theme)
        figure.scroll_into_view_if_needed()
        page.wait_for_timeout(200)
        means[theme] = ImageStat.Stat(Image.open(io.BytesIO(figure.screenshot())).convert("L")).mean[0]
    assert means["light"] == means["auto"] > 180 and means["dark"] < 90  # a figure with coloured areas


def test_every_figure_is_an_svg_for_both_palettes(site):
    sources = {
        source for path in site.rglob("*.html") for source in re.findall(r'<img[^>]*\ssrc="([^"]+)"', path.read_text())
    }
    assert sources and [source for source in sources if not source.endswith(".svg")] == []
    figures = [path.read_text() for path in (site / "_images").glob("*.svg")]
    assert figures and all(text.count("prefers-color-scheme: dark") == 1 for text in figures)


# --- wide and narrow --------------------------------------------------------------------------------------------------

WATCH = """
  window.moved = [];
  new PerformanceObserver(list => {
    for (const {value, sources} of list.getEntries())
      window.moved.push([value, ...sources.map(source => source.node?.outerHTML?.slice(0, 80))]);
  }).observe({type: 'layout-shift', buffered: true});
"""


@pytest.mark.parametrize(
    ("page_name", "width"),
    [
        *(pytest.param(name, 360, marks=[pytest.mark.slow] * is_alike(name)) for name in PAGES),
        *((name, 1280) for name in KINDS),
    ],
)
def test_page_opens_well(open_page, server, page_name, width):
    """It fits, nothing moves while it loads, it is light, it asks nobody else and breaks no rule of its policy."""
    page = open_page(page_name, width=width, before=WATCH)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("window.moved") == []
    sizes = page.evaluate(
        "performance.getEntries().filter(e => e.transferSize && !/\\.(svg|png)$/.test(e.name))"
        ".map(e => [e.name.split('/').pop(), e.transferSize, e.decodedBodySize])"
    )
    assert len(sizes) >= 3 and not any(name.startswith(("fontawesome", "lato", "Roboto")) for name, _, _ in sizes)
    sizes.sort(key=lambda entry: -entry[1])
    assert sum(size for _, size, _ in sizes) < 500_000, sizes[:8]
    page.evaluate("document.querySelectorAll('img').forEach(img => img.loading = 'eager')")
    page.wait_for_load_state("networkidle")
    assert page.problems == []
    assert page.requested and all(url.startswith((server, "data:")) for url in page.requested)


def test_sections_stand_beside_the_text_where_there_is_room(open_page):
    page = open_page(TUTORIAL, width=1440)
    sections = page.locator(".on-this-page nav")
    assert sections.is_visible() and sections.get_by_role("link").count() > 10
    text, beside = page.locator("h1").bounding_box(), page.locator(".on-this-page").bounding_box()
    assert text["x"] + text["width"] < beside["x"] and beside["x"] + beside["width"] <= 1440
    sections.get_by_role("link", name="What we saw").click()
    assert page.url.endswith("#what-we-saw")
    page.set_viewport_size({"width": 1280, "height": 800})
    assert not sections.is_visible()
    page.locator(".on-this-page summary").click()
    assert sections.is_visible()


@pytest.mark.parametrize("width", [390, 820, 1024])
@pytest.mark.parametrize("page_name", ["index.html", "getting-started/benchmarks.html"])
def test_numbers_are_in_sight_beside_the_menu(open_page, page_name, width):
    table = open_page(page_name, width=width).locator("table.measured").first
    assert table.evaluate("table => table.scrollWidth <= table.parentElement.clientWidth")


def test_a_finger_sees_how_to_copy(open_page):
    page = open_page(TUTORIAL, width=390, has_touch=True, is_mobile=True)
    assert page.locator("button.copybtn").first.evaluate("button => getComputedStyle(button).opacity") == "1"


def test_page_prints_in_black_on_white_without_the_navigation(open_page):
    page = open_page(TUTORIAL, theme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    # The theme leaves a printed body transparent.
    assert page.evaluate(BACKGROUND.replace("document.body", "document.querySelector('.wy-nav-content')")) == LIGHT
    for hidden in (".wy-nav-side", ".theme-choice", ".on-this-page", ".copybtn", ".rst-footer-buttons"):
        assert not page.locator(hidden).first.is_visible(), hidden
    page.set_viewport_size({"width": 700, "height": 1000})  # A4 with margins
    assert page.evaluate("[...document.querySelectorAll('pre')].every(pre => pre.scrollWidth <= pre.clientWidth)")
    assert page.pdf().startswith(b"%PDF")


def test_page_of_records_prints_all_tabs(open_page):
    page = open_page("getting-started/benchmarks.html")
    tabs, folds = page.locator(".sd-tab-content"), page.locator(".sd-dropdown")
    assert tabs.count() > 1 and not tabs.last.is_visible() and folds.first.is_visible()
    page.emulate_media(media="print")
    assert all(tab.is_visible() for tab in tabs.all()) and not any(fold.is_visible() for fold in folds.all())


# --- what a page is made of -------------------------------------------------------------------------------------------


def test_thumbnails_have_captions_in_sight(open_page):
    page = open_page("index.html", width=360)
    cards = page.locator(".sphx-glr-thumbcontainer")
    assert cards.count() == len(list(gallery.EXAMPLES.glob("[0-9][0-9]-*.py")))
    for card in cards.all():
        picture, title, promise = (card.locator(part) for part in ("img", ".sphx-glr-thumbnail-title", ".promise"))
        assert promise.is_visible() and len(promise.inner_text()) > 40
        assert picture.bounding_box()["y"] < title.bounding_box()["y"] < promise.bounding_box()["y"]


def test_every_piece_of_code_can_be_copied(open_page):
    page = open_page(TUTORIAL)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    code = page.locator("div:not(.sphx-glr-script-out) > div.highlight:has(> pre)")
    assert page.locator("div.highlight button.copybtn").count() == code.count() > 10
    first = code.first
    first.hover()
    first.locator("button.copybtn").click()
    assert page.evaluate("navigator.clipboard.readText()").strip() == first.locator("pre").inner_text().strip()


@pytest.mark.parametrize("page_name", [name for name in PAGES if "/tutorials/0" in name])
def test_names_in_a_tutorials_code_link_to_their_documentation(page_name):
    text = (SITE / page_name).read_text()
    assert re.search(r'<a class="sphx-glr-backref[^"]*" href="\.\./\.\./python-api/\w+\.html#triton_gallery\.', text)


def test_formulas_are_drawn_in_the_sites_font(open_page):
    """One each of the letters, numbers and signs of all pages, put into one of them: a page has thousands of some."""
    token = re.compile(r"<(?:mi|mo|mn|mtext)\b[^>]*>[^<]+</\w+>")
    tokens = {match for name in PAGES for match in token.findall((SITE / name).read_text())}
    assert len(tokens) > 100
    page = open_page(TUTORIAL)
    page.evaluate("html => document.querySelector('math').innerHTML = html", "".join(sorted(tokens)))
    session = page.context.new_cdp_session(page)
    session.send("DOM.enable")
    session.send("CSS.enable")
    root = session.send("DOM.getDocument")["root"]["nodeId"]
    first = session.send("DOM.querySelector", {"nodeId": root, "selector": "math"})["nodeId"]
    found = session.send("DOM.querySelectorAll", {"nodeId": first, "selector": "mi, mo, mn, mtext"})["nodeIds"]
    assert len(found) == len(tokens)
    fonts = {
        font["familyName"]
        for node in found
        for font in session.send("CSS.getPlatformFontsForNode", {"nodeId": node})["fonts"]
    }
    assert fonts == {"STIX Two Math"}
