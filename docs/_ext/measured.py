"""Measured numbers in ``.rst`` pages, read from the committed records when the page is built.

``:measured:`softmax-fp16: triton_gallery / torch at 4096``` is replaced by what ``triton_gallery.benchmark.quote``
returns. ``.. measured-table::`` has one line per row, ``softmax-fp16 at 8192``, and shows what was measured there,
ours beside the best peer, and where the numbers come from. A reference that no record answers fails the build and
names the page.
"""

from docutils import nodes
from gallery import SRC, measured
from sphinx.util.docutils import SphinxDirective, SphinxRole

RECORDS = SRC / "triton_gallery" / "records"
NONE_YET = "No measurements are committed yet."

_COLUMNS = ("Measured", "at", "triton_gallery", "best peer", "ratio", "lowest ratio", "share of the limit")


def _note_records(env, name: str) -> None:
    for path in RECORDS.glob(f"*/{name}.json"):
        env.note_dependency(str(path))


class Measured(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list]:
        try:
            text = measured(self.text)
        except LookupError as error:
            # Read again next time, so that the build keeps failing until it is mended.
            self.env.note_reread()
            message = self.inliner.reporter.error(error.args[0], line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]
        _note_records(self.env, self.text.partition(":")[0].strip())
        return [nodes.Text(text)], []


class MeasuredTable(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        if not any(RECORDS.glob("*/*.json")):
            return [nodes.note("", nodes.paragraph("", NONE_YET))]
        rows, provenance = [_COLUMNS], {}
        for row, (_, offset) in zip(self.content, self.content.items, strict=True):
            name, _, x = row.partition(" at ")
            try:
                cells, origin = _row(name.strip(), x.strip())
            except (LookupError, ValueError, OSError) as error:
                self.env.note_reread()
                return [self.state.document.reporter.error(f"measured-table: {row}: {error}", line=offset + 1)]
            rows.append(cells)
            provenance[origin] = None
            _note_records(self.env, name.strip())
        lines = [".. list-table::", "   :header-rows: 1", "   :class: measured", ""]
        for cells in rows:
            lines += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(cells)]
        lines += ["", *(f".. rst-class:: provenance\n\n{origin}\n" for origin in provenance)]
        return self.parse_text_to_nodes("\n".join(lines))


def _row(name: str, x: str) -> tuple[tuple[str, ...], str]:
    from triton_gallery.benchmark import load, quote

    report = load(name)

    def at(series: str, where: str = x) -> str:
        return quote(f"{name}: {series} at {where}")

    ours = at("triton_gallery")
    has_limit = report.record["limit"] is not None
    cells = (
        report.record["title"],
        f"{report.record['x']} = {int(x):,}",
        ours,
        f"{at('peers')} ({_best_peer(report, x)})",
        at("triton_gallery / peers"),
        at("triton_gallery / peers", "worst"),
        at("triton_gallery / limit") if has_limit else "",
    )
    return cells, report.provenance()


def _best_peer(report, x: str) -> str:
    peers = [row for row in report.record["rows"] if str(row["x"]) == x and row["provider"] != "triton_gallery"]
    return max(peers, key=lambda row: row["median"])["provider"]


def setup(app) -> dict:
    app.add_role("measured", Measured())
    app.add_directive("measured-table", MeasuredTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
