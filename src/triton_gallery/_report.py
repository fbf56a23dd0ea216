"""A benchmark's record: what makes it complete, and how it reads as a table, a figure, a sentence, CSV and JSON."""

import csv
import html
import importlib
import io
import itertools
import json
import math
import re
import statistics
import sys
import textwrap
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

LARGEST = sys.float_info.max  # an int may be larger
OURS = "triton_gallery"
COPY = "copy of as many bytes"
# What a series may be named beside the providers, whose names these cannot be.
RESERVED = ("peers", "limit", COPY)
FIGURES = ("median", "p20", "p80")
# What `quote` takes in the place of one of the sweep's values.
OVER = {"worst": min, "best": max, "median": statistics.median}
PROVENANCE = ("gpu", "driver", "cuda", "torch", "triton", "package", "commit", "date", "command", "inputs", "text")
TEXT = ("kernels", "launch", "benchmark")
NOT_YET = "not yet measured"

# Okabe and Ito's colours, which every kind of colour vision tells apart; their yellow is too pale on white.
# Ours is drawn first and thick, so that a peer of the same speed stays visible on top of it.
_OUR_STYLE = {"color": "#D55E00", "marker": "o", "linewidth": 4, "markersize": 8}
_OUR_VARIANT_STYLE = {"color": "#D55E00", "marker": "o", "linewidth": 1.5, "markerfacecolor": "white"}
_PEER_STYLES = [
    {"color": color, "marker": marker, "linewidth": 1.5}
    for color, marker in zip(("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"), "s^Dv>P", strict=True)
]
# Those that stand in many figures look the same in all of them.
_WELL_KNOWN = {"torch": 0, "cuDNN": 0, "torch.compile": 1, "FlashAttention-2": 1, "FlexAttention": 2}


def is_ours(provider: str) -> bool:
    """Whether a provider is this package's: "triton_gallery", or a variant whose name begins so."""
    return provider.startswith(OURS)


def is_peer(provider: str) -> bool:
    """Whether a provider does the same work and is not this package's. A copy is no peer: it is what memory allows."""
    return not is_ours(provider) and provider != COPY


def is_study(benchmark: str) -> bool:
    """Whether a benchmark compares variants of a small kernel of the guide, none of which is this package's."""
    return benchmark.startswith("guide-")


def slug(gpu: str) -> str:
    """The name of a GPU's folder of records: "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def validate(record: dict, file: str | None = None) -> None:
    """Refuse a record without complete provenance, or with figures that no measurement gives.

    Args:
        record: a record's content; `records/README.md` describes the format.
        file: how errors name the record; made from its GPU and benchmark when None.

    Raises:
        ValueError: names the record and the key.
    """
    if not isinstance(record, dict):
        raise ValueError(f"record {file or 'of no name'}: must be a dict, got {type(record).__name__}")
    file = file or f"{slug(str(record.get('gpu') or 'unknown-gpu'))}/{record.get('benchmark')}.json"
    for key in ("benchmark", "title", "x", "unit", *PROVENANCE, "rows"):
        value, kind = record.get(key), {"rows": list, "text": dict}.get(key, str)
        if value in (None, "", [], "none", "unknown"):
            raise ValueError(f"record {file}: {key} is missing" + "; set GALLERY_COMMIT" * (key == "commit"))
        if not isinstance(value, kind):
            raise ValueError(f"record {file}: {key} must be a {kind.__name__}, got {value!r}")
    if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", record["commit"]):
        raise ValueError(f"record {file}: commit must be a git commit, got {record['commit']!r}")
    if any(not re.fullmatch(r"[0-9a-f]{16}", str(record["text"].get(part))) for part in TEXT):
        raise ValueError(f"record {file}: text must hold digests of {', '.join(TEXT)}, got {record['text']}")
    if "limit" not in record:
        raise ValueError(f"record {file}: limit is missing; null says that there is none")
    if record["limit"] is not None and not _is_limit(record["limit"]):
        raise ValueError(f"record {file}: limit must have a name and a positive value, got {record['limit']}")
    if not isinstance(record.get("left_out", []), list):
        raise ValueError(f"record {file}: left_out must be a list, got {record['left_out']!r}")
    for entry in record.get("left_out", []):
        if not _is_left_out(entry):
            raise ValueError(f"record {file}: left_out must have x, provider and why, got {entry!r}")
    for row in record["rows"]:
        if not _is_row(row):
            rule = "must have x, provider and 0 < p20 <= median <= p80, and nothing else"
            raise ValueError(f"record {file}: rows {rule}, got {row}")
        if row["provider"] in RESERVED and row["provider"] != COPY:
            raise ValueError(f"record {file}: rows must have providers of other names than peers and limit, got {row}")
        if record.get("x_log") and not isinstance(row["x"], str) and row["x"] <= 0:
            raise ValueError(f"record {file}: rows must have a positive x where x_log is set, got {row}")
    points = [(row["x"], row["provider"]) for row in record["rows"]]
    ours = is_study(record["benchmark"]) or OURS in {provider for _, provider in points}
    if len(set(points)) < len(points) or not ours:
        raise ValueError(f"record {file}: rows must hold {OURS}, and each provider once per x, got {points}")


def _is_limit(limit: object) -> bool:
    try:
        return isinstance(limit["name"], str) and limit["name"] != "" and _is_positive(limit["value"])
    except (KeyError, TypeError):
        return False


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and -LARGEST <= x <= LARGEST


def _is_positive(x: object) -> bool:
    return _is_number(x) and x > 0


def is_place(x: object) -> bool:
    """Whether x can be a value of the sweep: a name, or a number that float64 can hold."""
    return isinstance(x, str) or _is_number(x)


def _is_left_out(entry: object) -> bool:
    try:
        return is_place(entry["x"]) and isinstance(entry["provider"], str) and isinstance(entry["why"], str)
    except (KeyError, TypeError):
        return False


def _is_row(row: object) -> bool:
    try:
        median, p20, p80 = (row[key] for key in FIGURES)
        named = is_place(row["x"]) and isinstance(row["provider"], str) and len(row) == 2 + len(FIGURES)
        return named and all(map(_is_positive, (median, p20, p80))) and p20 <= median <= p80
    except (KeyError, TypeError):
        return False


@dataclass(frozen=True, repr=False)
class Report:
    """A benchmark's result: `record` as `records/README.md` describes it, measured in this process if `live`.

    `changed` names what is no longer the text that was measured: "kernels", "launch" or "benchmark". When the kernels
    or the benchmark changed, the record is outdated. Instead of figures the report says "not yet measured" then, as it
    does without any rows.
    """

    record: dict
    live: bool = False
    changed: frozenset[str] = frozenset()

    @property
    def outdated(self) -> bool:
        """Whether the kernels or the benchmark are others than those measured, or nothing was."""
        return not self.record["rows"] or bool(self.changed & {"kernels", "benchmark"})

    def status(self) -> list[str]:
        """What changed after this was recorded, or that nothing was, as at most one sentence."""
        if not self.record["rows"] and self.live:
            return ["; ".join(["nothing could be measured", *self._left_out()])]
        if not self.record["rows"]:
            return [f"{NOT_YET}: no record is committed; `make record` on a GPU machine measures it"]
        record = f"the record is of {self.record['date']}, commit {self.record['commit']}"
        if self.outdated:
            parts = " and the ".join(part for part in ("kernels", "benchmark") if part in self.changed)
            return [f"{NOT_YET} since the {parts} changed; {record}"]
        return [f"what launches the kernels changed since then, the kernels did not; {record}"] if self.changed else []

    @property
    def xs(self) -> list:
        """The values of x, in the order measured."""
        return list(dict.fromkeys(row["x"] for row in self.record["rows"]))

    @property
    def providers(self) -> list[str]:
        """The providers' names, ours first."""
        return sorted(dict.fromkeys(row["provider"] for row in self.record["rows"]), key=lambda name: name != OURS)

    def series(self, name: str) -> dict:
        """The median at each x of a provider, of "peers" (the best at that x but for ours and a copy) or "limit".

        NaN everywhere if the record is outdated, but for the limit, which is the hardware's. Without any rows it has no
        x either, and a ValueError says so.
        """
        if not self.record["rows"]:
            raise ValueError(f"{self.record['benchmark']}: {self.status()[0]}")
        if name == "limit" and self.record["limit"]:
            return dict.fromkeys(self.xs, self.record["limit"]["value"])
        known = self.providers + ["peers"] + ["limit"] * bool(self.record["limit"])
        if name not in known:
            raise ValueError(f"{self.record['benchmark']}: series must be one of {', '.join(known)}, got {name!r}")
        best = {}
        for row in self.record["rows"]:
            if row["provider"] == name or (name == "peers" and is_peer(row["provider"])):
                best[row["x"]] = max(best.get(row["x"], 0), row["median"])
        return dict.fromkeys(best, math.nan) if self.outdated else best

    def quote(self, series: str, base: str | None, at: str | float) -> str:
        """The number that `triton_gallery.benchmark.quote` describes, or "not yet measured"."""
        if not self.record["rows"]:
            return NOT_YET
        at = str(at)
        values = {str(x): value for x, value in self.series(series).items()}
        if base is not None:
            below = {str(x): value for x, value in self.series(base).items()}
            values = {x: value / below[x] for x, value in values.items() if x in below}
        if not values or at not in OVER | values:
            known = ", ".join([*OVER, *values]) if values else "none"
            raise ValueError(f"{self.record['benchmark']}: {series} must be quoted at one of {known}, got {at!r}")
        if self.outdated:
            return NOT_YET
        value = OVER[at](values.values()) if at in OVER else values[at]
        if base is None:
            return f"{_number(value)} {self.record['unit']}"
        return _percent(value) if base in ("limit", COPY) else _times(value)

    def provenance(self) -> str:
        """One line: where, when and with what this was measured, or that nothing was."""
        r = self.record
        if not r["rows"]:
            return self.status()[0]
        cuda = f"CUDA {r['cuda']}" if r["cuda"][:1].isdigit() else r["cuda"]
        commit = "" if r["commit"] == "unknown" else f" (commit {r['commit']})"
        versions = f"torch {r['torch']}, triton {r['triton']}, triton_gallery {r['package']}{commit}"
        where = f"measured on {r['gpu']}, driver {r['driver']}, {cuda}, {r['date']}"
        return f"{where}, {versions}, {'live' if self.live else 'recorded'}"

    def summary(self) -> str:
        """A few lines: our ratio to each peer, where we are slower, our share of the limit, and what was left out."""
        r = self.record
        lines = [r["title"] + f", on {r['gpu']}" * bool(r["rows"]), *self.status()]
        if self.outdated:
            return "\n  ".join(lines)
        first, *others = self.providers
        ours = self.series(first)
        for peer in others:
            ratios = {x: ours[x] / value for x, value in self.series(peer).items() if x in ours}
            if peer == COPY and ratios:
                lines.append(f"{first} / {peer}: {_range(ratios.values(), _percent)}")
            elif ratios:
                # To the two digits shown: half a percent is within the spread of the timings.
                slower = ", ".join(str(x) for x, ratio in ratios.items() if round(ratio, 2) < 1)
                where = f"slower at {r['x']} {slower}" if slower else "never over 0.5 % slower"
                lines.append(f"{first} / {peer}: {_range(ratios.values(), _times)}; {where}")
        if r["limit"]:
            shares = _range([value / r["limit"]["value"] for value in ours.values()], _percent)
            lines.append(f"{first} / limit: {shares}; {self._limit()[0]}")
        return "\n  ".join(lines + self._left_out())

    __repr__ = summary

    def _limit(self) -> list[str]:
        bound = self.record["limit"]
        return [f"limit: {bound['name']}, {_number(bound['value'])} {self.record['unit']}"] if bound else []

    def _left_out(self) -> list[str]:
        places = {}
        for entry in self.record.get("left_out", []):
            places.setdefault((entry["provider"], entry["why"]), []).append(str(entry["x"]))
        return [f"left out: {provider} at {', '.join(xs)} ({why})" for (provider, why), xs in places.items()]

    def frame(self):
        """The medians as a pandas DataFrame: one row per x, one column per provider.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        pd = _import("pandas")
        index = pd.Index(self.xs, name=self.record["x"])
        # Each by itself: several would be sorted, as numbers and names cannot be.
        columns = {name: pd.Series(self.series(name)).reindex(index) for name in self.providers}
        return pd.DataFrame(columns, index=index)

    def to_csv(self) -> str:
        """Every measured point as CSV text: x, provider, median, p20, p80, unit."""
        text = io.StringIO()
        writer = csv.DictWriter(text, ["x", "provider", *FIGURES, "unit"], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "unit": self.record["unit"]} for row in self.record["rows"])
        return text.getvalue()

    def to_json(self) -> str:
        """The record as JSON text with one row per line, so that a diff shows which points moved."""

        def dump(value) -> str:
            if isinstance(value, list) and value:
                return "[\n    " + ",\n    ".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n  ]"
            return json.dumps(value, ensure_ascii=False)

        return "{\n" + ",\n".join(f'  "{key}": {dump(value)}' for key, value in self.record.items()) + "\n}\n"

    def plot(self) -> object:
        """Draw one pyplot figure: each provider's median and 20–80 % band, ours thick, and the limit dashed.

        Returns:
            An object that pages and notebooks show below the figure, the data as files, and the command behind them;
            None if nothing was measured.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        plt = _import("matplotlib.pyplot")
        r, xs = self.record, self.xs
        figure, ax = plt.subplots(figsize=(8, 4.8), facecolor="white", layout="constrained")
        if self.outdated:
            ax.text(0.5, 0.5, "\n".join(textwrap.wrap(self.status()[0], 60)), ha="center", va="center", size="large")
            ax.set(title=r["title"], xticks=[], yticks=[])
            return Data(self) if r["rows"] else None
        # Values of x that are no numbers ("4096×4096×512") stand side by side, and no line joins them.
        is_scale = all(isinstance(x, (int, float)) for x in xs)
        position = {x: x if is_scale else i for i, x in enumerate(xs)}
        styles = _styles(self.providers)
        for name in self.providers:
            if name == COPY:
                style = {"color": "#333333", "marker": "" if is_scale else "_", "linewidth": 1.5, "markersize": 16}
            else:
                style = styles[name]
            line = "" if not is_scale else ":" if name == COPY else "-"
            rows = [row for row in r["rows"] if row["provider"] == name]
            at = [position[row["x"]] for row in rows]
            median, low, high = ([row[key] for row in rows] for key in FIGURES)
            if is_scale:
                ax.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
            else:
                ax.vlines(at, low, high, color=style["color"])
            ax.plot(at, median, label=name, linestyle=line, **style)
        if r["limit"]:
            ax.axhline(r["limit"]["value"], color="#333333", linestyle="--", linewidth=1.2, label=self._limit()[0])
        if r.get("x_log") and is_scale:
            ax.set_xscale("log", base=2)
        shown = _apart(sorted(xs), r.get("x_log")) if is_scale else xs[:: math.ceil(len(xs) / 12)]
        labels = _ticks(xs)
        is_long = len(str(shown)) > 80 and not labels[0].startswith("$")
        ax.set_xticks([position[x] for x in shown], [labels[xs.index(x)] for x in shown], rotation=30 if is_long else 0)
        ax.minorticks_off()
        if r.get("y_log"):
            ax.set_yscale("log")
        else:
            ax.set_ylim(0, 1.05 * ax.dataLim.ymax)
        # About 76 characters fit into one line in the widest font that a browser may choose.
        title = f"{r['title']}, measured on {r['gpu']}"
        title = title if len(title) <= 76 else title.replace(", measured", ",\nmeasured")
        ax.set(title=title, xlabel=r["x"], ylabel=f"throughput ({r['unit']})")
        ax.grid(color="#dddddd", linewidth=0.6)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return Data(self)

    def _repr_html_(self) -> str:
        r, e = self.record, html.escape
        if self.outdated:
            files = Data(self)._repr_html_() if r["rows"] else ""
            return f"<p><strong>{e(r['title'])}</strong>: {e(self.status()[0])}.</p>\n{files}"
        columns = {name: self.series(name) for name in self.providers}
        body = ""
        for x in self.xs:
            best = max(column[x] for name, column in columns.items() if x in column and name != COPY)
            cells = "".join(
                f"<td>{_cell(column.get(x), math.inf if name == COPY else best)}</td>"
                for name, column in columns.items()
            )
            body += f'<tr><th scope="row">{e(place(x))}</th>{cells}</tr>\n'
        head = "".join(f'<th scope="col">{e(name)}</th>' for name in (r["x"], *columns))
        notes = [*self._limit(), *self._left_out(), self.provenance(), *self.status()]
        # A region that scrolls must be reachable by keyboard, hence the tabindex and the name.
        return (
            f'<div role="region" tabindex="0" aria-label="{e(r["title"])}" style="overflow-x: auto">\n'
            f"<table>\n<caption>{e(r['title'])}, in {e(r['unit'])}; the best of each row in bold</caption>\n"
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>\n"
            + "".join(f"<p>{e(note[0].upper() + note[1:])}.</p>\n" for note in notes)
            + Data(self)._repr_html_()
        )


def plot_roofline(title: str, points: dict[str, tuple[float, float]], bandwidth: dict, peak: dict) -> None:
    """Draw what `triton_gallery.benchmark.roofline` describes; the limits have a name and a value."""
    plt = _import("matplotlib.pyplot")
    figure, ax = plt.subplots(figsize=(8, 4.8), facecolor="white", layout="constrained")
    ridge = peak["value"] * 1000 / bandwidth["value"]
    intensities = [intensity for intensity, _ in points.values()]
    low, high = min(*intensities, ridge) / 4, max(*intensities, ridge) * 4
    slope = f"memory: {bandwidth['name']}, {_number(bandwidth['value'])} GB/s"
    flat = f"arithmetic: {peak['name']}, {_number(peak['value'])} TFLOP/s"
    ax.plot([low, ridge], [low * bandwidth["value"] / 1000, peak["value"]], color="#0072B2", linewidth=2.5, label=slope)
    ax.plot([ridge, high], [peak["value"]] * 2, color="#333333", linewidth=2.5, linestyle="--", label=flat)
    for (label, (intensity, rate)), marker in zip(points.items(), itertools.cycle("oDs^v>P*")):
        share = rate / min(peak["value"], intensity * bandwidth["value"] / 1000)
        what = NOT_YET if math.isnan(rate) else f"{_percent(share)} of the roof"
        style = {"marker": marker, "color": "#D55E00", "markersize": 9, "markeredgecolor": "white", "linestyle": ""}
        ax.plot(intensity, rate, label=f"{label}: {what}", **style)
    ax.set(title=title, xlabel="arithmetic intensity (operations per byte)", ylabel="rate (TFLOP/s)")
    ax.set(xscale="log", yscale="log", xlim=(low, high))
    ax.grid(color="#dddddd", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)


@dataclass(frozen=True)
class Data:
    """The files behind a figure or a table, and how to make them again, as pages and notebooks show it."""

    report: Report

    def __str__(self) -> str:
        return f"data of {self.report.record['benchmark']}, made by {self.report.record['command']}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        r, e = self.report.record, html.escape
        files = {"csv": ("text/csv", self.report.to_csv()), "json": ("application/json", self.report.to_json())}
        links = " · ".join(
            f'<a download="{e(r["benchmark"])}.{kind}" href="data:{mime};charset=utf-8,{urllib.parse.quote(text)}">'
            f"{'The outdated' if self.report.outdated else 'Download'} {kind.upper()}</a>"
            for kind, (mime, text) in files.items()
        )
        return f"<p>{links} · made by <code>{e(r['command'])}</code> at commit {e(r['commit'])}</p>\n"


def _import(name: str) -> ModuleType:
    """A module that only figures and tables need, and that comes with an extra of the package."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        hint = f"pip install {name.partition('.')[0]} installs it"
        raise ModuleNotFoundError(f"{error.name} is not installed; {hint}", name=error.name) from None


def place(x: int | float | str) -> str:
    """A value of the sweep as tables show it."""
    return f"{x:,}" if isinstance(x, int) else f"{x:.4g}" if isinstance(x, float) else x


def _cell(value: float | None, best: float) -> str:
    if value is None:
        return "–"
    return f"<strong>{_number(value, ',')}</strong>" if value == best else _number(value, ",")


def _styles(providers: list[str]) -> dict[str, dict]:
    """A style for each provider."""
    well_known = {name: _WELL_KNOWN.get(name.removesuffix(" deterministic")) for name in providers}
    others = iter(style for i, style in enumerate(_PEER_STYLES) if i not in well_known.values())
    styles = {}
    for name in providers:
        if is_ours(name):
            styles[name] = _OUR_STYLE if name == OURS else _OUR_VARIANT_STYLE
        elif well_known[name] is not None:
            styles[name] = _PEER_STYLES[well_known[name]]
        elif name != COPY:
            styles[name] = next(others, {"color": "#777777", "marker": "."})
    return styles


def _apart(xs: list, is_log: bool) -> list:
    """Those of the ascending xs whose labels have room on the axis, the first and the last among them."""
    places = {x: math.log(x) if is_log else x for x in xs}
    labels = dict(zip(xs, _ticks(xs), strict=True))

    def has_room(x, before) -> bool:
        # Five digits, or a power of two, take about a fifteenth of the axis, and each digit more a fiftieth.
        more = 0 if labels[x].startswith("$") else max(0, len(labels[x]) - 5)
        return places[x] - places[before] >= (0.065 + 0.02 * more) * (places[xs[-1]] - places[xs[0]])

    shown = xs[:1]
    for x in xs[1:]:
        if has_room(x, shown[-1]):
            shown.append(x)
    if shown[-1] != xs[-1]:
        # The label before gives way; the last one says how far the sweep goes.
        while len(shown) > 1 and not has_room(xs[-1], shown[-1]):
            shown.pop()
        shown.append(xs[-1])
    return shown


def _ticks(xs: list) -> list[str]:
    """Labels of the x axis; large powers of two read best as such."""
    if all(isinstance(x, int) and x > 0 and x & (x - 1) == 0 for x in xs) and max(xs) > 2**17:
        return [f"$2^{{{x.bit_length() - 1}}}$" for x in xs]
    return [place(x) if isinstance(x, float) else str(x) for x in xs]


def _range(values, text: Callable[[float], str]) -> str:
    return f"{text(min(values))} to {text(max(values))}, median {text(statistics.median(values))}"


def _number(value: float, thousands: str = "") -> str:
    """A positive number with at least three digits: 3122, 45.6, 0.912."""
    return f"{value:{thousands}.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _times(ratio: float) -> str:
    """A ratio: 2.71×."""
    return f"{ratio:.2f}×"


def _percent(share: float) -> str:
    """A share: 88 %."""
    return f"{100 * share:.0f} %"
