"""The built site, a server for it and a browser. Without them these tests are skipped, and say what is missing."""

import contextlib
import functools
import gzip
import http.server
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "html"
MODULES = Path(__file__).parent / "node_modules"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
# Pages of sources are alike; of these, one.
PAGES = [name for name in PAGES if not re.match(r"_modules/triton_gallery/(?!softmax\.)", name)]
# One page of each kind
KINDS = (
    "index.html",
    "getting-started/tutorials/01-vector-add.html",
    "programming-guide/chapter-4/softmax-to-attention.html",
    "python-api/softmax.html",
    "search.html",
)


def is_alike(name: str) -> bool:
    """Whether it is the page of a function, other than the one among the kinds: `make audit` looks at these."""
    return name not in KINDS and bool(re.match(r"python-api/(?!index|benchmark|codegen|trace)", name))


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

each_page = pytest.mark.parametrize("page_name", PAGES or ["index.html"])
each_kind = pytest.mark.parametrize("page_name", KINDS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A laptop may lack what these tests need. Where nobody would notice that they were skipped, they fail."""
    report = yield
    if report.skipped and os.environ.get("GALLERY_SITE_REQUIRED") and "SITE NOT TESTED" in str(report.longrepr):
        report.outcome, report.longrepr = "failed", report.longrepr[-1]
    return report


@pytest.fixture(scope="session", autouse=True)
def site() -> Path:
    """The folder of the built site."""
    if not PAGES:
        pytest.skip("SITE NOT TESTED: there is no build/html, run `make html` first")
    return SITE


@pytest.fixture(scope="session")
def server(site):
    """The address of a server that compresses, as servers of static sites do."""
    handler = functools.partial(_Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://localhost:{running.server_port}/"
        running.shutdown()


@functools.cache
def _compressed(path: Path) -> bytes:
    return gzip.compress(path.read_bytes(), mtime=0)


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if path.suffix not in {".html", ".css", ".js", ".svg", ".txt", ".json"} or not path.is_file():
            return super().do_GET()
        body = _compressed(path)
        self.send_response(200)
        headers = {"Type": f"{self.guess_type(path)}; charset=utf-8", "Encoding": "gzip", "Length": len(body)}
        for name, value in headers.items():
            self.send_header(f"Content-{name}", str(value))
        self.end_headers()
        # A browser that leaves a page hangs up.
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def browser(site):
    if CHROMIUM is None:
        pytest.skip("SITE NOT TESTED: no Chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api", reason="SITE NOT TESTED: playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def open_page(browser, server):
    """Opens a page, by its name in the site or its address; ``page.problems`` lists what went wrong."""
    contexts = []

    def failed(page, request):
        # Whoever leaves a page takes back what it still waits for.
        if request.failure != "net::ERR_ABORTED":
            page.problems.append(f"{request.url}: {request.failure}")

    def open_page(name: str, width: int = 1280, theme: str = "light", before: str = "", **options):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme, **options)
        contexts.append(context)
        # A policy tells of what it stopped by an event.
        context.add_init_script(
            "document.addEventListener('securitypolicyviolation', e => console.error('policy', e.violatedDirective))"
        )
        context.add_init_script(before)
        page = context.new_page()
        page.problems, page.requested = [], []
        page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: page.requested.append(request.url))
        page.on("requestfailed", lambda request: failed(page, request))
        page.goto(name if "://" in name else server + name, wait_until="load")
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def node_modules() -> Path:
    if not MODULES.is_dir():
        pytest.skip("SITE NOT TESTED: run `npm ci --ignore-scripts` in tests/site")
    return MODULES
