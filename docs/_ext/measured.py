"""Measured numbers in pages, read from the committed records when the page is built.

``:measured:`softmax-fp16: triton_gallery / torch at 4096``` is replaced by what ``triton_gallery.benchmark.quote``
returns, and ``:provenance:`softmax-fp16``` by a link to the record and where it was measured. ``.. measured-table::``
has one line per row, ``softmax-fp16 at 8192``, and shows what was measured there, ours beside the best peer; with
records of several GPUs it has a tab for each that has a record of today's kernels. A reference that no record answers
fails the build and names the page.

A page with such numbers ends with where they come from, and one with ``.. run::`` with where its code ran.
"""

from pathlib import Path

from docutils import nodes
from gallery import EXAMPLES, GUIDE, SRC, is_declared, measured, measured_names, report
from sphinx.addnodes import pending_xref
from sphinx.util.docutils import SphinxDirective, SphinxRole

from triton_gallery._report import COPY, NOT_YET, is_peer, place
from triton_gallery.benchmark import environment, slug

RECORDS = SRC / "triton_gallery" / "records"
NONE_YET = "No measurements are committed yet."

_COLUMNS = ("Measured", "triton_gallery", "best peer", "ratio", "median, lowest", "share of a copy or product")


def gpus(name: str = "*") -> list[str]:
    """The folders that hold a record, the H200's first."""
    found = {path.parent.name for path in RECORDS.glob(f"*/{name}.json")}
    return sorted(found, key=lambda gpu: (gpu != "nvidia-h200", gpu))


def label(gpu: str, name: str) -> str:
    """What :ref: calls a record on the page of benchmarks."""
    return f"record-{gpu}-{name}"


def note_record(env, name: str) -> None:
    """Read the page again when the record changes, or the kernels that it measured."""
    pages = [*EXAMPLES.glob("*.py"), *GUIDE.glob("*/*.rst")]
    for path in [*RECORDS.glob(f"*/{name}.json"), *(SRC / "triton_gallery").glob("**/*.py"), *pages]:
        env.note_dependency(str(path))


class Measured(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list]:
        try:
            text = measured(self.text)
        except LookupError as error:
            return _refused(self, error.args[0])
        name = self.text.partition(":")[0].strip()
        note_record(self.env, name)
        known = {"record": name} if gpus(name) else {}
        return [nodes.inline("", text, **known)], []


class Provenance(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list]:
        note_record(self.env, self.text)
        if not gpus(self.text):
            if not is_declared(self.text):
                return _refused(self, f"provenance: no benchmark is called {self.text}")
            return [nodes.Text(f"{NOT_YET.capitalize()}.")], []
        found = report(self.text)
        origin = "measured on {gpu}, {date}, commit {commit}".format_map(found.record)
        told = nodes.Text(f": {'; '.join(found.status() if found.outdated else [origin])}.")
        return [nodes.Text("Record "), _reference(self.env.current_document.docname, self.text), told], []


def _refused(role: SphinxRole, why: str) -> tuple[list[nodes.Node], list]:
    # Read again next time, so that the build keeps failing until it is mended.
    role.env.note_reread()
    message = role.inliner.reporter.error(why, line=role.lineno)
    return [role.inliner.problematic(role.rawtext, role.rawtext, message)], [message]


class MeasuredTable(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        if not gpus():
            return [nodes.note("", nodes.paragraph("", NONE_YET))]
        tabs = {}
        for row, (_, offset) in zip(self.content, self.content.items, strict=True):
            name, x = (part.strip() for part in row.partition(" at ")[::2])
            try:
                if not gpus(name):
                    raise LookupError(f"no record is called {name}")
                found = {gpu: report(name, gpu) for gpu in gpus(name)}
                if all(x not in map(str, one.xs) for one in found.values()):
                    raise LookupError(f"no record of {name} has {x}")
                # An outdated record has no figures: it is shown only where no GPU has others.
                current = {gpu: one for gpu, one in found.items() if not one.outdated}
                for gpu, one in (current or found).items():
                    tabs.setdefault(gpu, []).append((name, *_row(one, label(gpu, name), x)))
            except (LookupError, ValueError, OSError) as error:
                self.env.note_reread()
                return [self.state.document.reporter.error(f"measured-table: {row}: {error}", line=offset + 1)]
            note_record(self.env, name)
        return self.parse_text_to_nodes("\n".join(_tabs({gpu: _table(tabs[gpu]) for gpu in gpus() if gpu in tabs})))


def _row(found, target: str, x: str) -> tuple[tuple[str, ...], str, str]:
    r, ours = found.record, found.series("triton_gallery")
    value = next((value for value in found.xs if str(value) == x), x)
    cells = [f":ref:`{r['title']} <{target}>`, {r['x']} {place(value)}", *[""] * 5]
    if found.outdated:
        cells[1] = NOT_YET
    elif x not in map(str, ours):
        cells[1] = "left out"
    else:
        cells[1] = found.quote("triton_gallery", None, x)
        if x in map(str, found.series("peers")):
            cells[2] = f"{found.quote('peers', None, x)} ({_best_peer(found, x)})"
            cells[3], median, lowest = (found.quote("triton_gallery", "peers", at) for at in (x, "median", "worst"))
            cells[4] = f"{median}, {lowest}"
        if r["limit"]:
            cells[5] = found.quote("triton_gallery", COPY if COPY in found.providers else "limit", x)
    return tuple(cells), r["gpu"], found.provenance()


def _best_peer(found, x: str) -> str:
    peers = [row for row in found.record["rows"] if str(row["x"]) == x and is_peer(row["provider"])]
    return max(peers, key=lambda row: row["median"])["provider"]


def _table(rows: list[tuple]) -> tuple[str, list[str]]:
    lines = list_table([_COLUMNS, *(cells for _, cells, *_ in rows)], "measured", "results")
    origins = {}
    for name, _, _, origin in rows:
        origins.setdefault(origin, []).append(name)
    for origin, names in origins.items():
        told = f"{', '.join(names)}: {origin}." if len(origins) > 1 else f"{origin[0].upper()}{origin[1:]}."
        lines += ["", ".. rst-class:: provenance", "", told]
    return rows[0][2], lines


def list_table(rows: list[tuple[str, ...]], *classes: str) -> list[str]:
    """A table in reStructuredText whose first row is its head."""
    lines = [".. list-table::", "   :header-rows: 1", f"   :class: {' '.join(classes)}", ""]
    for cells in rows:
        lines += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(cells)]
    return lines


def _tabs(tabs: dict[str, tuple[str, list[str]]]) -> list[str]:
    """A tab for each GPU, which works without scripts; with one GPU, its content alone."""
    if len(tabs) == 1:
        return next(iter(tabs.values()))[1]
    return tab_set(tabs)


def tab_set(tabs: dict[str, tuple[str, list[str]]]) -> list[str]:
    """reStructuredText of tabs, from the title and the lines of each."""
    lines = [".. tab-set::", ""]
    for gpu, (title, content) in tabs.items():
        lines += [f"   .. tab-item:: {title}", f"      :sync: {gpu}", ""]
        lines += [f"      {line}".rstrip() for line in content] + [""]
    return lines


# --- the end of a page ------------------------------------------------------------------------------------------------


def _doctree_read(app, doctree) -> None:
    docname = app.env.current_document.docname
    notes = []
    if any("run-code" in node["classes"] for node in doctree.findall(nodes.literal_block)):
        notes.append([nodes.Text(f"The code on this page ran on {_here()}.")])
    origins = {}
    for name in _names(app, docname, doctree):
        found = report(name)
        origins.setdefault("; ".join([found.provenance(), *found.status()]), []).append(name)
    for origin, names in origins.items():
        notes.append([nodes.Text("Numbers from the records of ")])
        for i, name in enumerate(names):
            notes[-1] += [nodes.Text(", " if i else ""), _reference(docname, name)]
        notes[-1].append(nodes.Text(f": {origin}."))
    sections = list(doctree.findall(nodes.section))
    if notes and sections:
        sections[0].extend(nodes.paragraph("", "", *note, classes=["provenance"]) for note in notes)


def _names(app, docname: str, doctree) -> list[str]:
    """The records that a page refers to in its text, or names in its code."""
    names = [node["record"] for node in doctree.findall(nodes.inline) if "record" in node]
    example = EXAMPLES / f"{Path(docname).name}.py"
    text = (example if example.exists() else Path(app.env.doc2path(docname))).read_text(encoding="utf-8")
    names += measured_names(text) if example.exists() else []
    names += [path.stem for path in sorted(RECORDS.glob("*/*.json")) if f'"{path.stem}"' in text]
    # A page may refer to a benchmark that nobody has run.
    return [name for name in dict.fromkeys(names) if gpus(name)]


def _reference(docname: str, name: str) -> nodes.Node:
    target = label(slug(report(name).record["gpu"]), name)
    options = {"refdomain": "std", "reftype": "ref", "reftarget": target, "refexplicit": True, "refwarn": True}
    return pending_xref("", nodes.inline("", name, classes=["std", "std-ref"]), refdoc=docname, **options)


def _here() -> str:
    found = environment()
    gpu = f"{found['gpu']}, driver {found['driver']}" if found["driver"] != "none" else "no GPU, in the interpreter"
    return f"{gpu}, torch {found['torch']}, triton {found['triton']}, commit {found['commit']}, {found['date']}"


def setup(app) -> dict:
    app.add_role("measured", Measured())
    app.add_role("provenance", Provenance())
    app.add_directive("measured-table", MeasuredTable)
    app.connect("doctree-read", _doctree_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
