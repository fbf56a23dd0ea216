"""Turns what `make evidence` found on a GPU into the tables that the page *How we test* shows.

python tests/evidence.py build/evidence tests/records
"""

import csv
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from triton_gallery import benchmark

SRC = Path(__file__).parent.parent / "src" / "triton_gallery"
TOOLS = {
    "memcheck": "reads and writes outside of what was allocated, misaligned addresses",
    "racecheck": "two threads at one place of shared memory without a barrier between them",
    "initcheck": "reads of memory that nobody has written",
    "synccheck": "barriers that some threads never reach",
}
_RACE = re.compile(r"between (?P<kind>\w+) access at (?P<kernel>\w+)\S* in (?P<file>\w+\.py):(?P<line>\d+)")
_AT = re.compile(r"^=========     at (?P<kernel>.*?)(\+0x\w+)?( in .*)?$")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors|hazards)")


def tests(reports: list[Path]) -> list[list]:
    """Passed, failed and skipped tests and fuzzed inputs, for each file of tests.

    Of a test that was run again, what a later report says counts.
    """
    cases = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            # Where a module cannot be imported, its name is that of the case; who was stopped in a test names none.
            if module := case.get("classname") or case.get("name"):
                cases[module, case.get("name")] = case
    counts: dict[str, Counter] = {}
    for (module, _), case in cases.items():
        count = counts.setdefault(module.rpartition("test_")[2], Counter())
        outcome = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
        count["failed" if outcome in ("failure", "error") else outcome] += 1
        for prop in case.iter("property"):
            count["inputs"] += int(prop.get("value")) if prop.get("name") == "inputs" else 0
    columns = ("passed", "failed", "skipped", "inputs")
    rows = [[name, *(count[c] for c in columns)] for name, count in sorted(counts.items())]
    if not sum(row[1] for row in rows):
        raise SystemExit("evidence: no report of pytest holds a test that passed")
    total = ["all", *(sum(row[i] for row in rows) for i in range(1, 1 + len(columns)))]
    return [["Tests of", "Passed", "Failed", "Skipped", "Inputs that Hypothesis drew"], *rows, total]


def sanitizer(folder: Path) -> list[list]:
    """For each tool what it watched and what it found: in our kernels, in what Triton adds to them, in torch's."""
    rows = [["Tool", "Looks for", "Kernels", "Launches", "In our kernels", "In what Triton adds", "In torch's kernels"]]
    for tool, purpose in TOOLS.items():
        path = folder / f"{tool}.log"
        if not path.exists():
            raise SystemExit(f"evidence: {path} is missing")
        log = path.read_text(errors="replace")
        launches = {name: int(n) for name, n in re.findall(r"^(_\w+_kernel): (\d+)$", log, re.MULTILINE)}
        summary = _SUMMARY.search(log)
        if not launches or not summary or "Target application returned an error" in log:
            raise SystemExit(f"evidence: {tool}.log does not end as it should")
        found = Counter()
        for line in log.splitlines():
            if race := _RACE.search(line):
                found["triton" if race["kind"] == "Read" and _is_dispatch(**race.groupdict()) else "ours"] += 1
            elif (at := _AT.match(line)) and tool != "racecheck":
                found["ours" if at["kernel"].rpartition(" ")[2] in launches else "torch"] += 1
        if sum(found.values()) < int(summary[1]):
            raise SystemExit(f"evidence: {tool} found {summary[1]}, and its log shows {sum(found.values())}")
        rows.append(
            [tool, purpose, len(launches), sum(launches.values())] + [found[k] for k in ("ours", "triton", "torch")]
        )
    return rows


def _is_dispatch(kernel: str, file: str, line: str, **_) -> bool:
    """Whether a finding is in the code that Triton puts in front of a kernel with warp groups, not in its body."""
    (path,) = (path for path in SRC.rglob(file) if f"def {kernel}(" in path.read_text())
    return path.read_text().splitlines()[int(line) - 1].startswith("def _")


def write(path: Path, rows: list[list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    found, records = map(Path, sys.argv[1:])
    environment = benchmark.environment()
    if environment["driver"] == "none":
        raise SystemExit("evidence: there is no GPU that could have been tested on")
    folder = records / benchmark.slug(environment["gpu"])
    for name, rows in {"tests": tests(sorted(found.glob("*.xml"))), "sanitizer": sanitizer(found)}.items():
        write(folder / f"{name}.csv", rows)
        write(folder / f"{name}-environment.csv", [[key, value] for key, value in environment.items()])
