#!/usr/bin/env python3
"""Renews constraints.txt: the versions it names stay, what is missing is added, and all get the hashes of their wheels.

To renew a package delete its line first; to renew all, empty the file. A hash that is listed stays while its version
does: torch has one for each build, with CUDA and without, and one machine sees only one of the two.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
HEADER = """\
# The exact versions that a fresh `make` installs, and the only files that it accepts: wheels for Linux. `.ci/lock.py`
# renews this file.
"""


def requirements() -> list[str]:
    """What the package, its extras and its build ask for; editables, which an editable build needs too; and pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    asked = itertools.chain(project["build-system"]["requires"], project["project"]["dependencies"], *extras)
    return ["pip", "editables", *(name for name in asked if not name.startswith(project["project"]["name"]))]


def locked() -> dict[str, tuple[str, set[str]]]:
    """Package: version and hashes, as the file has them."""
    lines = LOCK.read_text().replace("\\\n", " ").splitlines()
    entries = (re.match(r"([\w.-]+)==(\S+)", line) for line in lines)
    return {e[1]: (e[2], set(re.findall(r"sha256:(\w+)", e.string))) for e in entries if e}


def resolve(python: str, machine: str, pins: dict) -> list[dict]:
    """What pip would install there; it downloads no more than it needs to know that."""
    tags = [f"manylinux_2_{minor}" for minor in range(39, 4, -1)] + ["manylinux2014", "manylinux2010", "linux"]
    platforms = itertools.chain(*(("--platform", f"{tag}_{machine}") for tag in tags))
    with tempfile.TemporaryDirectory() as folder:
        versions, report = Path(folder, "versions.txt"), Path(folder, "report.json")
        versions.write_text("".join(f"{name}=={version}\n" for name, (version, _) in pins.items()))
        options = f"--quiet --dry-run --ignore-installed --only-binary=:all: --python-version {python}".split()
        paths = ("--constraint", versions, "--target", folder, "--report", report)
        command = [sys.executable, "-m", "pip", "install", *options, *platforms, *paths, *requirements()]
        subprocess.run(command, check=True)
        return json.loads(report.read_text())["install"]


def main() -> None:
    pins = locked()
    for python, machine in itertools.product(PYTHONS, MACHINES):
        print(f"Python {python} on {machine}", flush=True)
        for package in resolve(python, machine, pins):
            name, version = package["metadata"]["name"], package["metadata"]["version"].partition("+")[0]
            pins.setdefault(name, (version, set()))[1].add(package["download_info"]["archive_info"]["hashes"]["sha256"])
    entries = (
        f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{hash}" for hash in sorted(hashes)) + "\n"
        for name, (version, hashes) in sorted(pins.items(), key=lambda entry: entry[0].lower())
        if hashes
    )
    LOCK.write_text(HEADER + "".join(entries))


if __name__ == "__main__":
    main()
