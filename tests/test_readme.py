"""What README says is so: its code runs, its commands exist, its picture shows the committed record."""

import re
import shutil
import subprocess
from pathlib import Path

import gallery
import pytest

from triton_gallery import benchmark, codegen

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_code_runs(device):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert '"cuda"' in code
    names = {}
    exec(code.replace('"cuda"', repr(device.type)), names)
    assert names["x"].grad.abs().max() > 0


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_commands_exist():
    commands = set(re.findall(r"^    make (\S+)", README, re.MULTILINE))
    assert commands == {"html", "test"}
    for command in commands:
        subprocess.run(["make", "--dry-run", command, "VENV="], cwd=ROOT, check=True, capture_output=True)


def test_targets_are_those_of_the_compilation_tests():
    assert ", ".join(codegen.TARGETS[:-1]) + f" and {codegen.TARGETS[-1]}" in README


def test_picture_shows_the_committed_record():
    ((text, picture),) = re.findall(r"!\[(.*)\]\((.*)\)", README)
    drawn_from = re.search(r"<dc:description>(.*?)</dc:description>", (ROOT / picture).read_text())[1]
    current = benchmark.load(*gallery.README_RECORD)
    assert current.record["gpu"].split()[1] in text
    assert drawn_from == current.provenance(), f"python docs/_ext/gallery.py --picture {picture} draws it anew"
