"""What pages say about records: where numbers are from, that they are out of date, a tab for each GPU, the history."""

import html
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import gallery
import pytest
import torch

from triton_gallery import _report, _source, benchmark

# A machine that only measures has no Sphinx.
SphinxTestApp = pytest.importorskip("sphinx.testing.util").SphinxTestApp
pytest.importorskip("sphinx_design")
measured = pytest.importorskip("measured")
records = pytest.importorskip("records")

SHIPPED = measured.RECORDS / "nvidia-h200"
NAME, X = "softmax-fp16", 8192


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder of records in place of the package's, with one that is up to date whatever was committed."""
    folder = tmp_path / "records"
    for module in (measured, records):
        monkeypatch.setattr(module, "RECORDS", folder)
    monkeypatch.setattr(benchmark, "_records", lambda: folder)
    commit(folder, made_up("NVIDIA H200"))
    return folder


def made_up(gpu: str, factor: float = 1.0, **changes) -> dict:
    """The committed record of softmax with other figures, as if another GPU had measured the present text."""
    record = json.loads((SHIPPED / f"{NAME}.json").read_text(encoding="utf-8")) | {"gpu": gpu, "title": "Softmax"}
    record["rows"] = [row | {key: factor * row[key] for key in _report.FIGURES} for row in record["rows"]]
    (digest,) = gallery.benchmark_digests(record)
    record["text"] = {**benchmark.kernel_digests(NAME), "benchmark": digest}
    return record | changes


def commit(folder: Path, record: dict) -> None:
    path = folder / _report.slug(record["gpu"]) / f"{record['benchmark']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_report.Report(record).to_json(), encoding="utf-8")


@pytest.fixture
def build(tmp_path):
    """Build a site of one page and return its text, the warnings, what a browser gets, and the site's folder."""

    def build(text: str, *extensions: str) -> tuple[str, str, str, Path]:
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        (site / "conf.py").write_text(f"extensions = {['sphinx_design', *extensions]}\n")
        (site / "index.rst").write_text("Page\n====\n\n" + text)
        app = SphinxTestApp("html", srcdir=site, freshenv=True)
        try:
            app.build()
            page = (Path(app.outdir) / "index.html").read_text(encoding="utf-8")
            build.log = app.status.getvalue()
            return html.unescape(re.sub(r"<[^>]+>", "", page)), app.warning.getvalue(), page, Path(app.outdir)
        finally:
            app.cleanup()

    return build


def quoted(gpu: str, series: str = "triton_gallery", base: str | None = None, at: str = str(X)) -> str:
    return gallery.report(NAME, gpu).quote(series, base, at)


# --- numbers and tables -----------------------------------------------------------------------------------------------

TABLE = f".. measured-table::\n\n   {NAME} at {X}\n\n.. records::\n"


def test_table_shows_ours_beside_the_best_peer_and_where_it_is_from(folder, build):
    text, warnings, page, _ = build(TABLE, "records")
    assert not warnings
    assert quoted("nvidia-h200") in text and f"{quoted('nvidia-h200', 'peers')} (torch.compile)" in text
    median, worst = (quoted("nvidia-h200", "triton_gallery", "peers", at) for at in ("median", "worst"))
    assert f"{median}, {worst}" in text
    assert "Measured on NVIDIA H200, driver" in text
    assert 'href="#record-nvidia-h200-softmax-fp16"' in page and 'id="record-nvidia-h200-softmax-fp16"' in page


def test_table_leaves_out_an_outdated_record_beside_one_that_is_not(folder, build):
    commit(folder, made_up("NVIDIA A100", 0.5))
    outdated = made_up("NVIDIA H200")
    outdated["text"]["kernels"] = "0" * 16
    commit(folder, outdated)
    text, *_ = build(f".. measured-table::\n\n   {NAME} at {X}\n", "measured", "records")
    assert quoted("nvidia-a100") in text and "Measured on NVIDIA A100, driver" in text
    assert "not yet measured" not in text and "NVIDIA H200" not in text


def test_a_phone_shows_the_columns_names_beside_the_numbers():
    style = (gallery.ROOT / "docs" / "_static" / "gallery.css").read_text(encoding="utf-8")
    shown = re.findall(r'table\.results td:nth-child\((\d)\)::before \{\s*content: "(.*)"', style)
    assert shown == [(str(i), name) for i, name in enumerate(measured._COLUMNS[1:], 2)]


def test_table_names_what_it_does_not_know(folder, build):
    assert measured.NONE_YET not in build(TABLE, "records")[0]
    text = ".. measured-table::\n\n   softmax-fp16 at 8192\n   nope at 3\n"
    assert "index.rst:7: ERROR: measured-table: nope at 3" in build(text, "measured")[1]
    assert "measured-table: softmax-fp16 at 5" in build(".. measured-table::\n\n   softmax-fp16 at 5\n", "measured")[1]
    shutil.rmtree(folder)
    assert measured.NONE_YET in build(".. measured-table::\n\n   nope at 3\n", "measured")[0]


def test_a_page_with_recorded_numbers_ends_with_where_they_are_from(folder, build):
    text, warnings, _, _ = build(f"It is :measured:`{NAME}: triton_gallery at {X}`.\n\n.. records::\n", "records")
    assert not warnings and f"It is {quoted('nvidia-h200')}." in text
    assert f"Numbers from the records of {NAME}: measured on NVIDIA H200, driver" in text
    assert "The code on this page ran on" not in text


def test_a_caption_tells_where_a_record_is_from(folder, build, monkeypatch):
    pages = gallery.measuring() | {"chapter-7": 'sweep("softmax-fp8", [1, 2])'}
    monkeypatch.setattr(gallery, "measuring", lambda *folders: pages)
    text, warnings, page, _ = build(f":provenance:`{NAME}`\n\n:provenance:`softmax-fp8`\n\n.. records::\n", "records")
    assert not warnings
    assert re.search(rf"Record {NAME}: measured on NVIDIA H200, 2026-[\d-]+, commit \w+\.\n", text)
    assert f'href="#record-nvidia-h200-{NAME}"' in page and "\nNot yet measured.\n" in text
    before = build.log
    commit(folder, made_up("NVIDIA H200", text=made_up("NVIDIA H200")["text"] | {"benchmark": "0" * 16}))
    text = build(f":provenance:`{NAME}`\n\n.. records::\n", "records")[0]
    assert f"Record {NAME}: not yet measured since the benchmark changed" in text
    line = "records of nvidia-h200: 1 of 1 are no longer of what is there; make outdated lists them"
    assert line not in before and line in build.log
    warnings = build(":provenance:`softmax-fp4`\n", "measured")[1]
    assert "index.rst:4: ERROR: provenance: no benchmark is called softmax-fp4" in warnings


def test_what_a_benchmark_has_not_measured_yet_is_no_mistake(folder, monkeypatch):
    monkeypatch.setattr(gallery, "measuring", lambda *folders: {"chapter-7": 'sweep("softmax-fp8", [1, 2])'})
    assert gallery.measured("softmax-fp8: torch at 1") == "not yet measured"
    with pytest.raises(LookupError, match="no record has this name"):
        gallery.measured("softmax-fp4: torch at 1")


def test_a_record_that_cannot_be_read_says_why(monkeypatch):
    def unreadable(name):
        raise PermissionError(13, "Permission denied", f"{name}.json")

    monkeypatch.setattr(gallery, "report", unreadable)
    with pytest.raises(LookupError, match=r"'softmax-fp8: torch at 1': .*Permission denied: 'softmax-fp8.json'"):
        gallery.measured("softmax-fp8: torch at 1")


def test_a_page_of_the_gallery_may_refer_to_what_nobody_has_run(folder, build, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "EXAMPLES", tmp_path)
    page = f"# It is :measured:`softmax-fp8: torch at 1`, or :measured:`{NAME}: torch at {X}`.\n"
    (tmp_path / "index.py").write_text(page, encoding="utf-8")
    text, warnings, _, _ = build("It is not yet measured.\n\n.. records::\n", "records")
    assert not warnings and f"Numbers from the records of {NAME}: measured on NVIDIA H200, driver" in text


def test_a_benchmark_of_the_guide_compares_variants_with_one_another(folder, build):
    record = made_up("NVIDIA H200") | {"benchmark": "guide-test", "title": "A study"}
    names = {"triton_gallery": "wide", "torch": "narrow"}
    kept = [row for row in record["rows"] if row["provider"] in names]
    record["rows"] = [row | {"provider": names[row["provider"]]} for row in kept]
    with pytest.raises(ValueError, match="rows must hold triton_gallery"):
        _report.validate(record | {"benchmark": "softmax-fp8"})
    _report.validate(record)
    found = _report.Report(record)
    assert found.providers == ["wide", "narrow"] and "\n  wide / narrow: " in found.summary()
    commit(folder, record | {"text": record["text"] | {"kernels": benchmark.kernel_digests("guide-test")["kernels"]}})
    text, warnings, _, _ = build(".. records::\n", "records")
    assert not warnings and text.count("A study") and "ratio to the best peer" in text
    assert records._cell(found, X) == found.quote("wide", None, str(X))


def test_a_page_with_code_ends_with_where_it_ran(folder, build):
    text, _, _, _ = build(".. run::\n\n   x = 1\n", "run", "measured")
    assert re.search(r"The code on this page ran on .*, torch .*, triton .*, commit .*, \d{4}-\d\d-\d\d\.", text)


def test_on_a_gpu_with_records_of_its_own_a_link_leads_to_them(folder, build, monkeypatch):
    commit(folder, made_up("NVIDIA Example", 2.0))
    monkeypatch.setattr(benchmark, "_gpu_name", lambda: "NVIDIA Example")
    monkeypatch.setattr(benchmark, "_device", lambda: torch.device("cpu"))
    text, warnings, page, _ = build(f":provenance:`{NAME}`\n\n.. records::\n", "records")
    assert not warnings and "measured on NVIDIA Example" in text
    assert f'href="#record-nvidia-example-{NAME}"' in page.partition("measured on")[0]


@pytest.mark.parametrize("part", ["kernels", "benchmark"])
def test_no_page_shows_a_number_whose_text_changed(folder, build, part):
    ours, role = quoted("nvidia-h200"), f"It is :measured:`{NAME}: triton_gallery at {X}` fast.\n\n"
    texts = [made_up("NVIDIA H200")["text"] | changed for changed in ({}, {part: "0" * 16})]
    pages = []
    for n_figures, text in ((1, texts[0]), (0, texts[1])):
        commit(folder, made_up("NVIDIA H200", text=text))
        shown, warnings, page, _ = build(role + TABLE, "records")
        assert not warnings
        assert page.count(f"{NAME}.svg") == n_figures
        pages.append(shown)
    before, after = pages
    assert ours in before and "not yet measured" not in before
    assert "It is not yet measured fast." in after and ours not in after
    assert f"not yet measured since the {part} changed" in after
    assert gallery.measured(f"{NAME}: triton_gallery / torch at worst") == "not yet measured"


def test_outdated_names_what_measures_a_record_anew(monkeypatch):
    monkeypatch.setattr(benchmark, "kernel_digests", lambda name, **options: {"kernels": "0" * 16})
    line = next(line for line in gallery.outdated("vector-add-fp32") if line.startswith("nvidia-h200/"))
    assert line.startswith("nvidia-h200/vector-add-fp32: not yet measured since the kernels changed;")
    assert line.endswith("; make record PAGE=01-vector-add on an NVIDIA H200")
    monkeypatch.setattr(benchmark, "kernel_digests", lambda name, **options: {})
    assert not list(gallery.outdated("vector-add-fp32"))


def test_numbers_stay_with_a_note_when_only_the_launch_changed(folder, build):
    commit(folder, made_up("NVIDIA H200", text=made_up("NVIDIA H200")["text"] | {"launch": "0" * 16}))
    text, _, _, _ = build(TABLE, "records")
    assert quoted("nvidia-h200") in text and "hat launches the kernels changed since then" in text


# --- a second GPU -----------------------------------------------------------------------------------------------------


def test_a_folder_more_is_a_tab_more(folder, build):
    one = build(TABLE, "records")[2]
    assert one.count('class="sd-tab-set') == 1  # the page of all records has tabs always
    commit(folder, made_up("NVIDIA B200", factor=2.0))
    text, warnings, two, outdir = build(TABLE, "records")
    assert not warnings
    assert two.count('class="sd-tab-set') == 2 and two.count("\nNVIDIA B200</label>") == 2
    assert (
        quoted("nvidia-b200") in text
        and quoted("nvidia-h200") in text
        and quoted("nvidia-b200") != quoted("nvidia-h200")
    )
    assert (outdir / "_static" / "records" / "nvidia-b200" / f"{NAME}.csv").is_file()
    # Without scripts it is a radio button that chooses.
    assert len(re.findall(r'<input[^>]*type="radio"', two)) == 4


def report_in_page(record: dict) -> str:
    html = "\n".join(f"   {line}" for line in _report.Report(record)._repr_html_().split("\n"))
    return f".. raw:: html\n\n   <div class='output_html'>\n{html}\n   </div>\n\n.. records::\n"


def test_a_report_in_a_page_gets_a_tab_for_each_other_gpu(folder, build):
    page = report_in_page(made_up("NVIDIA H200"))
    assert build(page, "records")[2].count('class="sd-tab-set') == 1
    commit(folder, made_up("NVIDIA B200", factor=2.0))
    _, warnings, shown, outdir = build(page, "records")
    assert not warnings and shown.count('class="sd-tab-set') == 2
    assert shown.count('data-sync-group="tab" data-sync-id="nvidia-b200"') == 2  # they follow each other
    first = shown[shown.index('class="sd-tab-set') :]
    assert first.index("NVIDIA H200</label>") < first.index("NVIDIA B200</label>")
    assert 'alt="Softmax, on NVIDIA B200: the throughput of triton_gallery' in first
    assert len(list(outdir.glob("_images/*.svg"))) == 2


def test_a_gpu_that_could_not_measure_a_point_says_so(folder, build):
    smaller = made_up("NVIDIA T4")
    smaller["rows"] = [row for row in smaller["rows"] if row["x"] < X or (row["x"], row["provider"]) == (X, "torch")]
    alone = made_up("NVIDIA L4", limit=None)
    alone["rows"] = [row for row in alone["rows"] if row["provider"] == "triton_gallery"]
    for record in (smaller, alone):
        commit(folder, record)
    text, warnings, _, _ = build(TABLE, "records")
    assert not warnings and text.count("left out") == 1


# --- files ------------------------------------------------------------------------------------------------------------


def linked(page: str) -> list[str]:
    return re.findall(r'<a download="[^"]*" href="([^"]*)">', page)


def test_tables_link_to_files_that_hold_their_numbers(folder, build):
    text, _, page, outdir = build(report_in_page(made_up("NVIDIA H200")), "records")
    assert "data:" not in page and "make record PAGE=02-fused-softmax" in text
    files = [outdir / link for link in linked(page)]
    assert {file.suffix for file in files} == {".csv", ".json"} and len(files) == 4
    record = json.loads((folder / "nvidia-h200" / f"{NAME}.json").read_text(encoding="utf-8"))
    for file in files:
        expected = _report.Report(record)
        held = expected.to_csv() if file.suffix == ".csv" else expected.to_json()
        assert file.read_text(encoding="utf-8") == held


def test_what_was_measured_in_this_build_is_published_beside_the_record(folder, build):
    live = made_up("NVIDIA H200", factor=3.0)
    _, _, page, outdir = build(report_in_page(live), "records")
    path = outdir / "_static" / "records" / "nvidia-h200" / f"{NAME}-live.json"
    assert json.loads(path.read_text(encoding="utf-8")) == live
    assert linked(page)[1].endswith("-live.json") and linked(page)[3].endswith(f"/{NAME}.json")


# --- history ----------------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(folder):
    git(folder, "init", "--quiet")
    for factor, number in ((1.0, "aaaaaaa"), (1.0, "aaaaaaa"), (2.0, "bbbbbbb")):
        commit(folder, made_up("NVIDIA H200", factor=factor, commit=number))
        (folder / "other").write_text(f"{number}{len(list(folder.iterdir()))}")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--allow-empty", "--message", number)
    return folder


def test_history_has_a_column_for_each_commit_that_changed_the_numbers(repository, build):
    text, warnings, page, _ = build(".. records::\n", "records")
    assert not warnings and records.NO_HISTORY not in text
    kept = records.history("nvidia-h200", NAME)
    assert [record["commit"] for record in kept] == ["aaaaaaa", "bbbbbbb"]
    assert all(f"{record['date']}<br>{record['commit']}" in page for record in kept)
    old, new = (_report.Report(record).quote("triton_gallery", None, str(X)) for record in kept)
    (old, unit), (new, _) = old.split(), new.split()
    assert old != new and 0 < text.index(f"{new} (") < text.index(f"{old} (")  # the newest first
    assert f"In {unit}, and the ratio to the best peer" in text
    # What is measured and not yet committed is the newest.
    commit(repository, made_up("NVIDIA H200", factor=4.0, commit="ccccccc"))
    assert [record["commit"] for record in records.history("nvidia-h200", NAME)][-1] == "ccccccc"


def test_history_passes_over_commits_without_the_record(repository):
    file = repository / "nvidia-h200" / f"{NAME}.json"
    text = file.read_text()
    for broken in (None, text[:50]):
        file.unlink() if broken is None else file.write_text(broken)
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "--message", "broken")
    file.write_text(text)
    git(repository, "commit", "--quiet", "--all", "--message", "whole again")
    assert [record["commit"] for record in records.history("nvidia-h200", NAME)] == ["aaaaaaa", "bbbbbbb"]


@pytest.mark.parametrize("how", ["shallow", "none"])
def test_history_says_when_there_is_none(repository, build, tmp_path, monkeypatch, how):
    if how == "shallow":
        clone = tmp_path / "clone"
        subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{repository}", str(clone)], check=True)
        for module in (measured, records):
            monkeypatch.setattr(module, "RECORDS", clone)
        monkeypatch.setattr(benchmark, "_records", lambda: clone)
    else:
        shutil.rmtree(repository / ".git")
    text, warnings, _, _ = build(".. records::\n", "records")
    assert not warnings and records.NO_HISTORY in text


# --- the committed records --------------------------------------------------------------------------------------------


def test_every_committed_record_is_of_a_page_and_in_the_table_of_the_home_page():
    home = (gallery.ROOT / "docs" / "index.rst").read_text(encoding="utf-8")
    rows = re.findall(r"^   ([\w-]+) at \S+$", home, re.MULTILINE)
    names = {path.stem for path in measured.RECORDS.glob("*/*.json")}
    # A ladder compares the versions of a page with one another: it has no place among the peers.
    assert sorted(rows) == sorted(name for name in names if "-ladder-" not in name and not _report.is_study(name))
    for path in measured.RECORDS.glob("*/*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert gallery.page_of(record), f"{path.name}: no page has {record['inputs'].partition('(')[0]}"


def in_git(*arguments):
    return subprocess.run(["git", "-C", gallery.ROOT, *arguments], capture_output=True)


@pytest.fixture
def whole_history():
    if shutil.which("git") is None:
        pytest.skip("git is not here")
    if in_git("rev-parse", "--is-shallow-repository").stdout.strip() != b"false":
        pytest.skip("the history is not here, or not all of it")


def test_the_commit_of_every_record_is_in_the_history(whole_history):
    named = {json.loads(path.read_text(encoding="utf-8"))["commit"] for path in measured.RECORDS.glob("*/*.json")}
    for path in gallery.ROOT.glob("tests/records/*/*-environment.csv"):
        named |= set(re.findall(r"^commit,(.+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert named and not [name for name in named if in_git("merge-base", "--is-ancestor", name, "HEAD").returncode]


def test_every_record_is_of_the_text_of_its_commit(whole_history, tmp_path):
    """Whoever measures may name a commit that is not what was measured, or change how digests are made afterwards."""
    paths = ("src/triton_gallery", "examples", "docs/programming-guide")
    for path in measured.RECORDS.glob("*/*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        tree = tmp_path / record["commit"]
        if not tree.exists():
            packed = io.BytesIO(in_git("archive", record["commit"], *paths).stdout)
            tarfile.open(fileobj=packed).extractall(tree, filter="data")
        package = tree / "src" / "triton_gallery"
        digests = _source.kernel_digests(path.stem, package)
        pages = gallery.benchmark_digests(record, tree / "examples", tree / "docs" / "programming-guide", tree / "src")
        text = dict(record["text"])
        assert text.pop("benchmark") in pages, path
        assert {"kernels", "launch"} <= set(text), path
        assert text == digests, path


def test_the_same_record_draws_the_same_file(folder, tmp_path):
    found = gallery.report(NAME, "nvidia-h200")
    paths = [tmp_path / "a", tmp_path / "b"]
    texts = [(path / records.draw(path, found)).read_text(encoding="utf-8") for path in paths]
    assert texts[0] == texts[1] and str(sys.version_info.major) in texts[0]
