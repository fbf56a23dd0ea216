"""Lets intersphinx link to other projects without a network.

A build must not download other projects' inventories, and a stored copy would be a megabyte that nobody reads. So
``docs/_inventories/<project>.txt`` lists the objects that our pages and docstrings mention: a line ``url`` with the
documentation's address, then groups of a line ``<domain>:<type> <page>#<anchor>`` (``$`` stands for the object's name)
and the names. At build time each list becomes an inventory file for intersphinx. A name that a docstring refers to and
that is missing here fails the build; add it to its group.
"""

import zlib
from pathlib import Path

LISTS = Path(__file__).resolve().parents[1] / "_inventories"


def read(text: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The address, and (name, domain:type, page#anchor) of every object in a list."""
    url, kind, target, objects = "", "", "", []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "url":
            url = words[1]
        elif ":" in words[0]:
            kind, target = words
        else:
            objects += [(name, kind, target.replace("$", name)) for name in words]
    return url, objects


def write(path: Path, project: str, objects: list[tuple[str, str, str]]) -> None:
    """Write an inventory in Sphinx's format, version 2."""
    header = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# The rest is compressed using zlib.\n"
    body = "".join(f"{name} {kind} 1 {target} -\n" for name, kind, target in sorted(objects))
    path.write_bytes(header.encode() + zlib.compress(body.encode()))


def _config_inited(app, config) -> None:
    folder = Path(app.srcdir) / "_generated" / "inventories"
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(LISTS.glob("*.txt")):
        url, objects = read(source.read_text(encoding="utf-8"))
        inventory = folder / f"{source.stem}.inv"
        write(inventory, source.stem, objects)
        config.intersphinx_mapping[source.stem] = (url, str(inventory))


def setup(app) -> dict:
    app.setup_extension("sphinx.ext.intersphinx")
    # Before intersphinx checks its mapping, with priority 800.
    app.connect("config-inited", _config_inited, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
