"""The page of all records, the files behind every figure and table, and a tab for each GPU.

``.. records::`` shows every committed record, a tab for each folder of ``records/``: a summary, then for each benchmark
its figure, its table, its files, and how its numbers changed from commit to commit, as far as git knows. Both go by the
pages that measure them, and by where in its page each does. A report in a page of the gallery gets a tab for every
other GPU that has a record of the same benchmark.

Reports carry their data as ``data:`` links, because a notebook has nowhere to put files. The site publishes them as
``_static/records/<gpu>/<benchmark>.json`` and ``.csv``, and the links lead there.
"""

import io
import json
import re
import subprocess
import urllib.parse
from html import escape
from pathlib import Path

from docutils import nodes
from gallery import measuring, page_of, report
from measured import NONE_YET, RECORDS, gpus, label, list_table, note_record, tab_set
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from triton_gallery._report import NOT_YET, Report, is_ours, is_study, place, slug
from triton_gallery.benchmark import _read

logger = logging.getLogger(__name__)
_DATA = re.compile(r'<a download="[^"]*" href="data:(?:text/csv|application/json);[^"]*">[^<]*</a>')
_JSON = re.compile(r'href="data:application/json;charset=utf-8,([^"]*)"')
NO_HISTORY = "The history of these numbers is not available: this site was built without the history of its sources."


# --- the history of a record ------------------------------------------------------------------------------------------


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(RECORDS), *arguments], check=True, capture_output=True, text=True).stdout


def last_commit() -> str:
    """The last commit that changed a record; empty where git does not know."""
    try:
        return _git("log", "-1", "--format=%h", "--", ".").strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def history(gpu: str, name: str) -> list[dict]:
    """A record at each commit that changed its figures, the oldest first; empty where git does not know."""
    path = f"{gpu}/{name}.json"
    try:
        if _git("rev-parse", "--is-shallow-repository").strip() != "false":
            return []
        commits = _git("log", "--reverse", "--format=%h", "--", path).split()
    except (OSError, subprocess.CalledProcessError):
        return []
    kept = []
    for commit in [*commits, None]:
        try:
            text = _git("show", f"{commit}:./{path}") if commit else (RECORDS / path).read_text(encoding="utf-8")
            record = json.loads(text)
        except (subprocess.CalledProcessError, ValueError):  # a commit that removed it, or holds half of it
            continue
        if not kept or record["rows"] != kept[-1]["rows"]:
            kept.append(record)
    return kept


def _history(gpu: str, name: str) -> list[str]:
    """Our numbers with the ratio to the best peer, or the first variant's: a row for each x, a column a commit."""
    reports = [Report(record) for record in history(gpu, name)]
    if not reports:
        return [NO_HISTORY]
    reports.reverse()
    unit = reports[0].record["unit"]
    head = [escape(reports[0].record["x"]), *(f"{r.record['date']}<br>{escape(r.record['commit'])}" for r in reports)]
    lines = ["<tr>" + "".join(f'<th scope="col">{cell}</th>' for cell in head) + "</tr>"]
    for x in reports[0].xs:
        # A number in another unit than the newest keeps its own.
        cells = "".join(f"<td>{_cell(r, x).replace(f' {unit}', '')}</td>" for r in reports)
        lines.append(f'<tr><th scope="row">{escape(place(x))}</th>{cells}</tr>')
    # A region that scrolls must be reachable by keyboard, also while it is folded up.
    region = f'<div role="region" tabindex="0" aria-label="{escape(reports[0].record["title"])}, at each commit">'
    caption = f"<caption>In {escape(unit)}, and the ratio to the best peer; the newest first</caption>"
    table = f"<table>{caption}<thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>"
    return [".. raw:: html", "", f'   <div class="output_html">{region}{table}</div></div>']


def _cell(found, x) -> str:
    name = found.providers[0]
    if x not in found.series(name):
        return "–"
    ratio = f" ({found.quote(name, 'peers', str(x))})" if is_ours(name) and x in found.series("peers") else ""
    return found.quote(name, None, str(x)) + ratio


# --- the page of all records ------------------------------------------------------------------------------------------


class Records(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        if not gpus():
            return [nodes.note("", nodes.paragraph("", NONE_YET))]
        names = {gpu: [path.stem for path in sorted((RECORDS / gpu).glob("*.json"))] for gpu in gpus()}
        reports = {gpu: {name: report(name, gpu) for name in names[gpu]} for gpu in names}
        tabs, docnames = {}, sorted(self.env.found_docs)
        # First the GPU with the most figures of today's kernels.
        for gpu, found in sorted(reports.items(), key=lambda item: -_num_current(item[1])):
            pages = {_docname(page, docnames): of_page for page, of_page in _by_page(found).items()}
            lines = _summary(gpu, pages)
            for docname, of_page in pages.items():
                lines += ["", f".. rubric:: {_page_title(docname)}", "   :heading-level: 2", ""]
                for name, one in of_page.items():
                    note_record(self.env, name)
                    lines += self._one(gpu, name, one)
            tabs[gpu] = (next(iter(found.values())).record["gpu"], lines)
        return self.parse_text_to_nodes("\n".join(tab_set(tabs)))

    def _one(self, gpu: str, name: str, found) -> list[str]:
        table = _published(found._repr_html_(), self.env.current_document.docname)
        title = found.record["title"]
        lines = ["", f".. _{label(gpu, name)}:", "", f".. rubric:: {title}", "   :heading-level: 3", ""]
        if not found.outdated:
            lines += [f".. image:: /{draw(Path(self.env.srcdir), found)}", f"   :alt: {alt(found)}", ""]
        lines += [
            ".. raw:: html",
            "",
            *(f"   {line}" for line in f'<div class="output_html">{table}</div>'.split("\n")),
            "",
        ]
        lines += [".. dropdown:: At each commit", ""]
        return lines + [f"   {line}".rstrip() for line in _history(gpu, name)]


def _num_current(found: dict) -> int:
    return sum(not one.outdated for one in found.values())


def _by_page(found: dict) -> dict[str | None, dict]:
    """The reports of each page that measures, in the order of the pages and of their benchmarks; those of none last."""
    texts = measuring()
    pages = {page: {} for page in [*texts, None]}

    def place_in_page(name):
        function = found[name].record["inputs"].partition("(")[0]
        return texts.get(page_of(found[name].record), "").find(f"def {function}("), name

    for name in sorted(found, key=place_in_page):
        pages[page_of(found[name].record)][name] = found[name]
    return {page: of_page for page, of_page in pages.items() if of_page}


def _docname(page: str | None, docnames: list[str]) -> str | None:
    """The document of what ``make record PAGE=`` calls so."""
    return next((docname for docname in docnames if page and f"/{page}/" in f"/{docname}/"), None)


def _page_title(docname: str | None) -> str:
    return f":doc:`/{docname}`" if docname else "Measured by no page any more"


def _summary(gpu: str, pages: dict[str | None, dict]) -> list[str]:
    rows = [("Measured", "ratio to the best peer: lowest", "median", "highest", "on")]
    for docname, of_page in pages.items():
        rows.append((_page_title(docname), "", "", "", ""))
        for name, one in of_page.items():
            title = f":ref:`{one.record['title']} <{label(gpu, name)}>`"
            # In the one column with room for these words.
            title, ratios = f"{title}: {NOT_YET}" if one.outdated else title, ("", "", "")
            # What a page or a chapter compares with one another are no peers.
            has_peers = len(one.providers) > 1 and "-ladder-" not in name and not is_study(name)
            if has_peers and not one.outdated:
                ratios = (one.quote("triton_gallery", "peers", at) for at in ("worst", "median", "best"))
            rows.append((title, *ratios, one.record["date"]))
    return list_table(rows, "measured", "summary")


def alt(found) -> str:
    """What a figure shows, for those who do not see it."""
    r = found.record
    return f"{r['title']}, on {r['gpu']}: the throughput of {', '.join(found.providers)} by {r['x']}"


_drawn: dict[Path, dict] = {}  # in this process: the page of all records shows each figure again


def draw(srcdir: Path, found) -> str:
    """Draw a record's figure; its path below the folder of sources. The same record gives the same file."""
    import matplotlib.pyplot as plt

    path = f"_generated/records/{slug(found.record['gpu'])}/{found.record['benchmark']}.svg"
    file = srcdir / path
    if _drawn.get(file) == found.record:
        return path
    _drawn[file] = found.record
    picture = io.StringIO()
    with plt.rc_context({"svg.hashsalt": path, "svg.fonttype": "none", "font.family": "sans-serif"}):
        found.plot()
        # pyplot's own function draws the figure once more, as pixels.
        plt.gcf().savefig(picture, format="svg", metadata={"Date": None})
        plt.close()
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text(encoding="utf-8") != picture.getvalue():
        file.write_text(picture.getvalue(), encoding="utf-8")
    return path


# --- reports in the gallery's pages -----------------------------------------------------------------------------------


def shown_in(html: str) -> dict | None:
    """The record of the report in a piece of HTML, which carries it as data."""
    match = _JSON.search(html)
    return json.loads(urllib.parse.unquote(match[1])) if match else None


def _published(html: str, docname: str, live_to: Path | None = None) -> str:
    """The HTML of a report with links to the site's files; those of a report measured in this build are written now."""
    record = shown_in(html)
    place = f"{slug(record['gpu'])}/{record['benchmark']}"
    committed = RECORDS / f"{place}.json"
    if live_to and not (committed.exists() and json.loads(committed.read_text(encoding="utf-8")) == record):
        place += "-live"
        publish(live_to, place, Report(record))
    url = "../" * docname.count("/") + f"_static/records/{place}"
    kinds = iter(("csv", "json"))
    return _DATA.sub(lambda match: re.sub('href="[^"]*"', f'href="{url}.{next(kinds)}"', match[0]), html)


def publish(outdir: Path, place: str, found) -> None:
    """Write a record as JSON and CSV to where the site's links lead."""
    folder = outdir / "_static" / "records"
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    (folder / f"{place}.json").write_text(found.to_json(), encoding="utf-8")
    (folder / f"{place}.csv").write_text(found.to_csv(), encoding="utf-8")


def _doctree_read(app, doctree) -> None:
    docname = app.env.current_document.docname
    for node in list(doctree.findall(nodes.raw)):
        record = shown_in(node.astext()) if node.get("format") == "html" else None
        if record is None:
            continue
        text = _published(node.astext(), docname, Path(app.outdir))
        shown = nodes.raw("", text, format="html")
        others = [report(record["benchmark"], gpu) for gpu in gpus(record["benchmark"])]
        others = [other for other in others if other.record["gpu"] != record["gpu"]]
        if "<table" not in text or not others:
            node.replace_self(shown)
            continue
        tabs = {record["gpu"]: [shown]}
        for other in others:
            table = _published(f'<div class="output_html">{other._repr_html_()}</div>', docname)
            tabs[other.record["gpu"]] = [nodes.raw("", table, format="html")]
            if not other.outdated:
                image = nodes.image("", uri=f"/{draw(Path(app.srcdir), other)}", alt=alt(other))
                tabs[other.record["gpu"]].insert(0, image)
        node.replace_self(_tab_nodes(tabs))


def _tab_nodes(tabs: dict[str, list[nodes.Node]]) -> nodes.Node:
    from sphinx_design.shared import create_component

    items = []
    for title, content in tabs.items():
        # In step with the tabs of measured tables
        synced = {"sync_group": "tab", "sync_id": slug(title)}
        head = nodes.rubric(title, title, classes=["sd-tab-label"], **synced)
        body = create_component("tab-content", classes=["sd-tab-content"], children=content)
        item = create_component("tab-item", classes=["sd-tab-item"], children=[head, body], selected=False)
        items.append(item)
    return create_component("tab-set", classes=["sd-tab-set"], children=items)


def _build_finished(app, exception) -> None:
    if exception or app.builder.format != "html":
        return
    for folder in sorted({path.parent for path in RECORDS.glob("*/*.json")}):
        paths = sorted(folder.glob("*.json"))
        for path in paths:
            publish(Path(app.outdir), f"{folder.name}/{path.stem}", Report(_read(path)))
        n_old = sum(bool(report(path.stem, folder.name).status()) for path in paths)
        if n_old:
            # No mistake, but whoever builds the site for readers should know.
            text = "records of %s: %d of %d are no longer of what is there; make outdated lists them"
            logger.info(text, folder.name, n_old, len(paths))


def _state(app, config) -> None:
    # Pages are read again when a record appears or goes, and when the history grows.
    config.records_state = " ".join([*sorted(f"{p.parent.name}/{p.name}" for p in RECORDS.glob("*/*")), last_commit()])


def setup(app) -> dict:
    app.setup_extension("measured")
    app.add_config_value("records_state", "", "env")
    app.add_directive("records", Records)
    app.connect("config-inited", _state)
    # Before Sphinx collects the images of a page.
    app.connect("doctree-read", _doctree_read, priority=400)
    app.connect("build-finished", _build_finished)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
