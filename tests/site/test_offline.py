"""The site asks no other host for anything, and works from a folder."""

import re
import shutil
from html.parser import HTMLParser

import pytest

from conftest import SITE, each_page

# What these name is loaded when the page is shown; <a> waits for the reader, and <link rel="canonical"> for nobody.
LOADED = {"script", "img", "iframe", "source", "video", "audio", "embed", "object", "form", "input", "use"}
LOADED_LINKS = {"stylesheet", "icon", "shortcut", "preload", "prefetch", "modulepreload", "manifest", "preconnect"}
OTHER_HOST = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)


class _Loads(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.urls, self.policies, self.before_policy = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = {name: value or "" for name, value in attrs}
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy":
            self.policies.append(attrs["content"])
        if tag in LOADED or (tag == "link" and LOADED_LINKS & set(attrs.get("rel", "").split())):
            urls = [attrs.get(name, "") for name in ("src", "href", "action", "data", "poster")]
            self.urls += [url for url in (*urls, *attrs.get("srcset", "").split(",")) if url]
            if not self.policies:
                self.before_policy.append(tag)


@each_page
def test_page_loads_only_its_own_sites_files(page_name):
    loads = _Loads((SITE / page_name).read_text())
    assert loads.urls
    assert [url for url in loads.urls if OTHER_HOST.match(url.strip())] == []


def test_styles_load_only_their_own_sites_files(site):
    styles = list(site.rglob("*.css"))
    assert styles
    for style in styles:
        urls = re.findall(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)", style.read_text())
        assert [url for pair in urls for url in pair if OTHER_HOST.match(url)] == [], style


@each_page
def test_policy_is_strict_and_stands_before_what_it_rules(page_name):
    loads = _Loads((SITE / page_name).read_text())
    assert len(loads.policies) == 1 and loads.before_policy == []
    policy = dict(rule.strip().split(" ", 1) for rule in loads.policies[0].split(";"))
    assert policy["default-src"] == "'none'"
    assert not re.search(r"unsafe-inline|unsafe-eval|http|\*", loads.policies[0])
    assert re.fullmatch(r"'self'( 'sha256-[\w+/]{43}=')*", policy["script-src"])


def test_policy_stops_what_it_does_not_list(open_page):
    page = open_page("index.html")
    page.evaluate(
        """() => {
          const script = document.body.appendChild(document.createElement('script'));
          script.textContent = 'window.injected = true';
          document.body.insertAdjacentHTML('beforeend', '<p style="color: red" onclick="window.injected = true"></p>');
          document.body.lastElementChild.click();
          document.body.insertAdjacentHTML('beforeend', '<img src="http://localhost:9/tracker.gif">');
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.injected") is None
    stopped = " ".join(page.problems)
    for rule in ("script-src-elem", "style-src-attr", "script-src-attr", "img-src"):
        assert f"policy {rule}" in stopped


@pytest.fixture(scope="module")
def folder(site, tmp_path_factory):
    """What a reader has who unpacked the zipped site."""
    place = tmp_path_factory.mktemp("unpacked")
    archive = shutil.make_archive(str(place / "site"), "zip", site)
    shutil.unpack_archive(archive, place / "a folder")
    return place / "a folder"


def test_zipped_site_works_from_a_folder(open_page, folder):
    page = open_page((folder / "getting-started" / "tutorials" / "02-fused-softmax.html").as_uri())
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px \"STIX Two Math\"'))")
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("link", name="Triton Gallery").first.click()
    page.wait_for_url("**/index.html*")
    assert page.evaluate("document.documentElement.dataset.mode") == "dark"
    assert page.evaluate("[...document.images].every(img => !img.complete || img.naturalWidth > 0)")
    assert page.problems == [] and all(url.startswith((folder.as_uri(), "data:")) for url in page.requested)


def test_search_works_from_a_folder(open_page, folder):
    page = open_page((folder / "index.html").as_uri())
    page.get_by_role("textbox", name="Search docs").fill("softmax")
    page.keyboard.press("Enter")
    results = page.locator("#search-results li a")
    results.nth(3).wait_for()  # they come one after another
    results.first.click()
    page.wait_for_load_state()
    assert "softmax" in page.inner_text("#content").lower()


def test_search_works_under_the_policy(open_page):
    page = open_page("search.html?q=softmax")
    page.locator("#search-results li p.context").nth(3).wait_for()
    assert page.problems == []
