"""One style sheet and one script for a page, where extensions and theme bring twenty files.

On a slow line each file costs a trip. Pages that load the same files share a bundle, named after them; its first line
lists them, so that a build which rewrites no page still brings it up to date.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

# What not every page needs: a file, and the text in a page that does
NEEDED_WITH = {
    "sphinx-design.min.css": 'class="sd-',
    "design-tabs.js": 'class="sd-tab-',
    "sg-tags.js": "sphx-glr-tag",
    "sg_gallery-binder.css": "binder-badge",
    "sg_gallery-dataframe.css": "dataframe",
    "_sphinx_javascript_frameworks_compat.js": "highlightSearchWords",
}
_FILE = re.compile(r'\s*<(?:link|script)[^>]*\s(?:href|src)="[^":]*?_static/([^"?]*)[^>]*>(?:</script>)?')
# Only plain ones: a script with data of its own looks for it in its own element. And not the search: an earlier script
# asks whether it is there, which a browser answers with an error when it comes later in the same file.
_PLAIN = {
    "css": re.compile(r'\s*<link rel="stylesheet" type="text/css" href="([^":]*?_static/)([^"?]*)[^"]*" />'),
    "js": re.compile(r'\s*<script defer src="([^":]*?_static/)(?!searchtools)([^"?]*)[^"]*"></script>'),
}
_TAGS = {
    "css": '\n  <link rel="stylesheet" type="text/css" href="{}" />',
    "js": '\n  <script defer src="{}"></script>',
}
_BUNDLE = re.compile(r'(_static/bundle-\w+\.(?:css|js))(?:\?v=\w+)?"')


def bundled(page: str, write: Callable[[str, list[str]], str]) -> str:
    """The page with one bundle of each kind; `write` takes suffix and files, and returns the bundle's name."""
    head, begin, body = page.partition("<body")
    head = _FILE.sub(lambda match: match[0] if NEEDED_WITH.get(match[1], "") in body else "", head)
    for suffix, pattern in _PLAIN.items():
        found = list(pattern.finditer(head))
        names = [match[2] for match in found]
        if not found or names[0].startswith("bundle-"):
            continue
        tag = _TAGS[suffix].format(found[0][1] + write(suffix, names))
        head = head[: found[0].start()] + tag + pattern.sub("", head[found[0].start() :])
    return head + begin + body


def contents(static: Path, names: list[str]) -> str:
    """The files in one, after a line with their names; addresses in a style sheet stay right."""
    parts = [f"/* {' '.join(names)} */"]
    for name in names:
        folder = "/".join(name.split("/")[:-1])
        text = (static / name).read_text(encoding="utf-8")
        if name.endswith(".css"):
            text = re.sub(r'url\(\s*(["\']?)(?!["\'/#]|\w+:)', rf"url(\1{folder + '/' if folder else ''}", text)
            text = text.replace('@charset "UTF-8";', "")
        parts.append(text if name.endswith(".css") else f"{text}\n;")
    return "\n".join(parts)


def _build_finished(app, exception) -> None:
    if exception or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"

    def write(suffix: str, names: list[str]) -> str:
        name = f"bundle-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:8]}.{suffix}"
        (static / name).write_text(f"/* {' '.join(names)} */", encoding="utf-8")
        return name

    pages = {path: bundled(path.read_text(encoding="utf-8"), write) for path in Path(app.outdir).rglob("*.html")}
    used = {name for text in pages.values() for name in _BUNDLE.findall(text)}
    versions = {}
    for path in static.glob("bundle-*"):
        if f"_static/{path.name}" not in used:
            path.unlink()
            continue
        text = contents(static, path.read_text(encoding="utf-8").partition("\n")[0].split()[1:-1])
        path.write_text(text, encoding="utf-8")
        versions[f"_static/{path.name}"] = hashlib.sha256(text.encode()).hexdigest()[:8]
    for path, text in pages.items():
        text = _BUNDLE.sub(lambda match: f'{match[1]}?v={versions[match[1]]}"', text)
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app) -> dict:
    # After what else writes pages, with priority 500, and after finish.py.
    app.connect("build-finished", _build_finished, priority=800)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
