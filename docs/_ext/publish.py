"""Publishes a built site: adds it to the versions in a folder that any web server, or none, can show.

    python docs/_ext/publish.py build/html DEST 0.2.0
    python docs/_ext/publish.py --check build/html DEST 0.2.0   fails where that would, before there is a site
    python docs/_ext/publish.py --check-tag v0.2.0              fails unless this is the tag of the package's version

A name such as 0.2.0 or v0.2.0 is a tag: once published it is never written again. Any other name is a branch, which is
replaced. Without a name it is the checkout's tag, or its branch. DEST then holds

    0.1.0/ 0.2.0/ main/               the versions
    stable/                           a copy of the newest tag, at an address that stays
    index.html                        leads to the newest tag, or else to main
    404.html                          the newest tag's, if it knew its address
    versions.html versions.js(on)     the list: for readers without scripts, for the pages' scripts, for programs
    .nojekyll                         tells GitHub Pages to serve folders such as _static

A page knows the versions that were there when it was published, and keeps the reader on the same page of another one.
With scripts it learns of later ones from versions.js, because a page opened from a disk may not read JSON.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

_TAG = re.compile(r"v?(\d+(?:\.\d+)*)(?:[-.]?((?:a|b|rc)\.?\d+))?")
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)
_CANONICAL = re.compile(r'(<link rel="canonical" href="[^"]*/)stable(/[^"]*")')
_STABLE = "stable"
# Servers show this page of the root at any address, so its links are complete ones, into stable/, and stay as they are.
# Where the site did not know its address, they begin at the server's root, where no version is.
_NOT_FOUND = "404.html"
_COLAB = "/blob/gh-pages/"
_ROOT = ("versions.json", "versions.js", "versions.html", "index.html", ".nojekyll")


def check(site: Path, dest: Path, name: str) -> list[dict]:
    """The versions in `dest`; refuses what `publish` could not add to them, whatever the site that is still to come."""
    if not _NAME.fullmatch(name) or name in (_STABLE, _NOT_FOUND, *_ROOT):
        raise ValueError(f"{name!r} cannot be a version's name")
    if dest.resolve() in (site.resolve(), *site.resolve().parents) or site.resolve() in dest.resolve().parents:
        raise ValueError(f"{dest} must be a folder of its own, and {site} beside it")
    checkout = Path(__file__).resolve().parents[2]
    if checkout in dest.resolve().parents and checkout / "build" not in dest.resolve().parents:
        raise ValueError(f"{dest} is among the sources; name a folder below build, or one outside of the checkout")
    known = dest / "versions.json"
    try:
        versions = json.loads(known.read_text(encoding="utf-8"))["versions"] if known.exists() else []
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{known} holds no list of versions: {error!r}") from None
    if kind_of(name) == "tag":
        if any(version["name"] == name for version in versions):
            raise ValueError(f"{name} is published already, and a published tag never changes; publish a new one")
        if other := [v["name"] for v in versions if v["name"].removeprefix("v") == name.removeprefix("v")]:
            raise ValueError(f"{name} is published already, as {other[0]}")
    # What a run that somebody stopped has left may go; what anybody else has put there may not.
    listed = {version["name"] for version in versions} | ({_STABLE} if versions else set())
    for folder in (dest / name, dest / _STABLE):
        is_ours = folder.name in listed or (folder / "_static" / "versions.js").exists()
        if folder.exists() and not is_ours and (folder.is_file() or any(folder.iterdir())):
            raise ValueError(f"{folder} is there and holds no version; move it away, or name another folder")
    if not known.exists() and (dest / "index.html").exists():
        raise ValueError(f"{dest} has an index.html and no {known.name}, so it holds no versions; name another folder")
    return versions


def publish(site: Path, dest: Path, name: str) -> None:
    """Add the built `site` to the versions in the folder `dest` as the version `name`."""
    if not (site / "index.html").exists():
        raise ValueError(f"{site} holds no site; make html builds one")
    if 'class="version-banner draft"' in (site / "index.html").read_text(encoding="utf-8"):
        raise ValueError(f"{site} is a draft; make html builds what can be published")
    versions = check(site, dest, name)

    # Beside its place, and moved there when it is complete.
    new = dest / f".{name}.new"
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(site, new, ignore=shutil.ignore_patterns(".*", "plot_directive"))
    pages = sorted(page.relative_to(new).as_posix() for page in new.rglob("*.html") if _is_page(page))
    versions = [version for version in versions if version["name"] != name]
    versions = sorted([*versions, {"name": name, "kind": kind_of(name), "pages": pages}], key=_order)
    newest = versions[0]
    for page in pages:
        text = (new / page).read_text(encoding="utf-8")
        (new / page).write_text(_in_version(text, page, name, versions), encoding="utf-8")
    shutil.rmtree(dest / name, ignore_errors=True)
    new.rename(dest / name)

    if newest["kind"] == "tag" and newest["name"] == name:
        shutil.rmtree(dest / _STABLE, ignore_errors=True)
        shutil.copytree(dest / name, dest / _STABLE)
        not_found = dest / name / _NOT_FOUND
        if not_found.exists() and '="/_static/' not in not_found.read_text(encoding="utf-8"):
            shutil.copy(not_found, dest)
    _write_root(dest, versions)


def _write_root(dest: Path, versions: list[dict]) -> None:
    newest = versions[0]["name"]
    listed = json.dumps({"newest": newest, "versions": versions}, indent=1)
    home = f"{newest}/index.html"
    moved = f'<p>The newest version is <a href="{home}">{newest}</a>.</p>'
    refresh = f'<meta http-equiv="refresh" content="0; url={home}">\n'
    files = {
        "versions.json": listed + "\n",
        "versions.js": f"window.GALLERY_VERSIONS = {listed};\n",
        "versions.html": _root_page("Versions", _list(versions, "index.html", "", None)),
        "index.html": _root_page("Triton Gallery", moved, refresh),
        ".nojekyll": "",
    }
    assert set(files) == set(_ROOT)
    for name, text in files.items():
        (dest / name).write_text(text, encoding="utf-8")


def kind_of(name: str) -> str:
    return "tag" if _TAG.fullmatch(name) else "branch"


def _order(version: dict) -> tuple:
    """Tags first, newest first, a release before all release candidates; of the branches main first."""
    tag = _TAG.fullmatch(version["name"])
    if not tag:
        return (1, version["name"] != "main", version["name"])
    # The 1 at the end puts 1.0.1 before 1.0, whose numbers would otherwise be a beginning of its own.
    numbers = (*(-int(number) for number in tag[1].split(".")), 1)
    letters, number = re.fullmatch(r"([a-z]*)\.?(\d*)", tag[2] or "").groups()
    return (0, bool(tag[2]), numbers, -ord(letters[0]) if letters else 0, -int(number or 0))


def _is_page(path: Path) -> bool:
    return path.name != _NOT_FOUND and "<!-- version-banner -->" in path.read_text(encoding="utf-8")


# --- what stands in a page --------------------------------------------------------------------------------------------


def _in_version(text: str, page: str, name: str, versions: list[dict]) -> str:
    """The page's text with the versions that are known now, and the scripts that learn of others."""
    root = "../" * (page.count("/") + 1)
    newest = versions[0]
    banner = ""
    if newest["kind"] == "tag" and newest["name"] != name:
        what = "an old version" if kind_of(name) == "tag" else "the development version"
        banner = f"This is {what}, {name}. The newest release is {_link(newest, page, root)}."
    scripts = (
        f'<script src="{root}versions.js"></script>'
        f'<script src="{root[3:]}_static/versions.js" data-version="{name}" data-page="{escape(page)}"></script>'
    )
    hidden = "" if banner else " hidden"
    text = _fill(text, "banner", f'<p class="version-banner" role="note" data-banner{hidden}>{banner}</p>{scripts}')
    text = _fill(text, "name", name)
    text = text.replace(f"{_COLAB}{_STABLE}/", f"{_COLAB}{name}/")
    every = f'<p><a href="{root}versions.html">All versions</a></p>'
    text = _fill(text, "list", f"<div data-versions>{_list(versions, page, root, name)}</div>{every}")
    # Where the newest tag lacks a page, the page speaks for itself.
    in_stable = newest["kind"] == "tag" and page in newest["pages"]
    return text if in_stable else _CANONICAL.sub(rf"\g<1>{name}\g<2>", text)


def _fill(text: str, what: str, content: str) -> str:
    start, end = f"<!-- version-{what} -->", f"<!-- /version-{what} -->"
    before, _, rest = text.partition(start)
    return before + start + content + end + rest.partition(end)[2]


def _list(versions: list[dict], page: str, root: str, current: str | None) -> str:
    groups = []
    for title, kind in (("Tags", "tag"), ("Branches", "branch")):
        links = [_link(version, page, root, current) for version in versions if version["kind"] == kind]
        if links:
            groups.append(f"<dl><dt>{title}</dt>{''.join(f'<dd>{link}</dd>' for link in links)}</dl>")
    return "".join(groups)


def _link(version: dict, page: str, root: str, current: str | None = None) -> str:
    target = page if page in version["pages"] else "index.html"
    mark = ' aria-current="true"' if version["name"] == current else ""
    return f'<a href="{root}{version["name"]}/{escape(target)}"{mark}>{version["name"]}</a>'


def _root_page(title: str, body: str, head: str = "") -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{head}<title>{title}</title>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""


# --- the command ------------------------------------------------------------------------------------------------------


def name_of_checkout() -> str:
    """The tag that is checked out, or else the branch."""
    for command in ("git describe --tags --exact-match", "git symbolic-ref --short HEAD"):
        done = shutil.which("git") and subprocess.run(command.split(), capture_output=True, text=True)
        if done and done.returncode == 0:
            return done.stdout.strip().replace("/", "-")
    raise ValueError("neither a tag nor a branch is checked out; give the version a name: make publish VERSION=...")


def _package_version() -> str:
    init = Path(__file__).resolve().parents[2] / "src" / "triton_gallery" / "__init__.py"
    return re.search(r'^__version__ = "(.+)"$', init.read_text(encoding="utf-8"), re.MULTILINE)[1]


def check_tag(name: str, version: str) -> None:
    """Refuse a tag that is not the one of the package's version, which the notebooks of this version install."""
    if not _TAG.fullmatch(f"v{version}"):
        raise ValueError(f"the package's version is {version}, of which no tag is made; write it as 0.2.0 or 0.2.0rc1")
    if name != f"v{version}":
        raise ValueError(f"the package's version is {version}, and its tag v{version}, got {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Add a built site to the versions in a folder.")
    parser.add_argument("site", type=Path, nargs="?", help="what make html built")
    parser.add_argument("dest", type=Path, nargs="?", help="the folder that holds all versions")
    parser.add_argument("version", nargs="?", help="its name; without one, the checkout's tag or branch")
    parser.add_argument("--check", action="store_true", help="only check that the version could be added")
    parser.add_argument("--check-tag", metavar="TAG", help="only check that it is the tag of the package's version")
    args = parser.parse_args()
    if not args.check_tag and args.dest is None:
        parser.error("site and dest are missing")
    try:
        if args.check_tag:
            return check_tag(args.check_tag, _package_version())
        name = args.version or name_of_checkout()
        if kind_of(name) == "tag":
            check_tag(f"v{name.removeprefix('v')}", _package_version())
        (check if args.check else publish)(args.site, args.dest, name)
    except (ValueError, OSError) as error:
        sys.exit(f"publish: {error}")
    if not args.check:
        print(f"published {name} in {args.dest}: {(args.dest / 'index.html').resolve().as_uri()}")


if __name__ == "__main__":
    main()
