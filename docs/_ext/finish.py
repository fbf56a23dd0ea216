"""The last touch to each finished page, where the theme and sphinx-gallery leave something to be wished for.

- A Content-Security-Policy: nothing from any other host, and no script or style in the page but those that stand in it
  when it is built, each by its hash.
- Images say their size, so that nothing moves when they arrive.
- Figures lead to themselves alone.
- Scripts wait until the page is shown.
- Wide tables scroll in boxes of their own before, and without, the theme's script.
- Long names break behind a dot or an underscore.
- Roles and texts for screen readers, and the thumbnails' captions as text.

A page that is finished already comes out as it went in, and one whose source is gone is removed.
"""

import base64
import hashlib
import html
import re
from pathlib import Path

import imagesize

_CHARSET = '<meta charset="utf-8" />'
_POLICY = re.compile(r'\n  <meta http-equiv="Content-Security-Policy" content="[^"]*">')
_INLINE_SCRIPT = re.compile(r"<script(?![^>]*\ssrc=)[^>]*>(.+?)</script>", re.DOTALL)
_INLINE_STYLE = re.compile(r"<style[^>]*>(.+?)</style>", re.DOTALL)
_BREAK = re.compile(r"(?<=\w)[._](?=[A-Za-z])")
_STYLE_ATTRIBUTE = re.compile(r'<[a-z][^<>]*\sstyle="([^"]*)"')


def policy(page: str) -> str:
    """What a page may load and run. 'self' is its own site, and from a folder its own files."""
    scripts = {_hash(text) for text in _INLINE_SCRIPT.findall(page)}
    styles = {_hash(text) for text in _INLINE_STYLE.findall(page)}
    attributes = {_hash(html.unescape(text)) for text in _STYLE_ATTRIBUTE.findall(page)}
    hashed = ["'unsafe-hashes'", *attributes] if attributes else []  # its name notwithstanding: only what is listed
    rules = {
        "default-src": ["'none'"],
        "script-src": ["'self'", *sorted(scripts)],
        "style-src": ["'self'", *sorted({*hashed, *styles})],
        "img-src": ["'self'", "data:"],
        "font-src": ["'self'", "data:"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "base-uri": ["'none'"],
    }
    return "; ".join(" ".join((name, *sources)) for name, sources in rules.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def with_policy(page: str) -> str:
    page = _POLICY.sub("", page)
    meta = f'\n  <meta http-equiv="Content-Security-Policy" content="{policy(page)}">'
    return page.replace(_CHARSET, _CHARSET + meta, 1)


def with_image_sizes(page: str, folder: Path) -> str:
    """Every image of the site with its width and height; all but the first are loaded when they come near."""
    seen = 0

    def sized(match: re.Match) -> str:
        nonlocal seen
        seen += 1
        tag, source = match[0], re.search(r'\ssrc="([^":]+)"', match[0])
        if source is None or " width=" in tag or not (folder / source[1]).is_file():
            return tag
        width, height = imagesize.get(folder / source[1])
        lazy = ' loading="lazy"' if seen > 1 else ""
        return tag.replace("<img", f'<img width="{round(width)}" height="{round(height)}"{lazy}', 1)

    return re.sub(r"<img\s[^>]*>", sized, page)


def with_waiting_scripts(page: str) -> str:
    page = re.sub(r'<script(?![^>]*\sdefer)([^>]*\ssrc=")', r"<script defer\1", page)
    # A module waits for the scripts above it, and jQuery is one of those.
    return re.sub(r"<script>(?=\s*jQuery)", '<script type="module">', page)


def with_boxes(page: str) -> str:
    return re.sub(
        r'(?<!<div class="wy-table-responsive">)<table class="[^"]*\bdocutils\b.*?</table>',
        r'<div class="wy-table-responsive">\g<0></div>',
        page,
        flags=re.DOTALL,
    )


def with_roles(page: str) -> str:
    """Roles and elements that say what a thing is."""
    page = page.replace('class="caption" role="heading">', 'class="caption" role="heading" aria-level="2">')
    if '<footer role="contentinfo">' not in page:
        page = page.replace("<footer>", '<footer role="contentinfo">').replace('<div role="contentinfo">', "<div>")
    # docutils writes this line and the theme one like it.
    page = page.replace('<meta name="viewport" content="width=device-width, initial-scale=1" />', "", 1)
    # A search reads pages, and would trip over the policy for each style in them. Columns find their widths by what is
    # in them, and the other style is for notebooks: here the style sheet has it.
    page = re.sub(r'<col style="width: [^"]*" />', "<col />", page).replace(' style="overflow-x: auto"', "")
    # sphinx-design's tabs are radio buttons, and their labels control nothing by themselves.
    page = re.sub(r'(<label(?=[^>]*sd-tab-label)[^>]*?) aria-controls="[^"]*"', r"\1", page)
    # A list with links among its items is none, and neither is one of definitions without terms.
    page = page.replace(' role="doc-biblioentry"', "").replace('<div role="list" class=', "<div class=")
    return re.sub(r'<dl>\n((?:<dd><em class="sig-param">.*?</dd>\n)+)</dl>', _signature, page)


def with_breaks(page: str) -> str:
    """Long names that break behind a dot or an underscore; and addresses that are told from other links, for paper."""
    page = re.sub(r'(?<=<span class="pre">)[\w.()]+(?=</span>)', lambda m: _BREAK.sub(r"\g<0><wbr>", m[0]), page)
    return re.sub(r'(<a class="reference external)(" href="([^"]*)">\3</a>)', r"\1 address\2", page)


def _signature(match: re.Match) -> str:
    lines = match[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")
    return f'<span class="sig-lines">\n{lines}</span>'


def with_captions(page: str) -> str:
    """Thumbnails whose title is the link, above the page's promise.

    sphinx-gallery lays a link without text over the picture and keeps the promise for a tooltip, which a finger never
    sees.
    """
    return re.sub(
        r'<div class="sphx-glr-thumbcontainer" tooltip="([^"]*)">(<img[^>]*>)\s*'
        r'<p><a class="reference internal" href="([^"]*)">.*?</p>\s*'
        r'<div class="sphx-glr-thumbnail-title">(.*?)</div>',
        r'<div class="sphx-glr-thumbcontainer">\2\n'
        r'<p class="sphx-glr-thumbnail-title"><a href="\3">\4</a></p>\n<p class="promise">\1</p>',
        page,
        flags=re.DOTALL,
    )


def with_links_on_figures(page: str) -> str:
    """Figures that lead to themselves alone, where a finger makes them larger; a thumbnail leads to its page."""
    page = re.sub(r'<a class="figure" href="[^"]*">(<img[^>]*>)</a>', r"\1", page)
    figure = r'(?<!"sphx-glr-thumbcontainer">)<img\s[^>]*?\bsrc="([^":]+\.svg)"[^>]*>'
    return re.sub(figure, r'<a class="figure" href="\1">\g<0></a>', page)


def finish(page: str, folder: Path, live: bool = False) -> str:
    """The page, which lies in `folder`, with all of it; without the policy where a server adds a script of its own."""
    page = with_image_sizes(with_captions(with_boxes(with_roles(with_waiting_scripts(page)))), folder)
    page = with_breaks(with_links_on_figures(page))
    return page if live else with_policy(page)


def _build_finished(app, exception) -> None:
    if exception or app.builder.format != "html":
        return
    for path in sorted(Path(app.outdir).rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        if (finished := finish(text, path.parent, app.config.html_context.get("live", False))) != text:
            path.write_text(finished, encoding="utf-8")


def _remove_pages(app, env, added, changed, removed) -> list:
    # Sphinx forgets a page whose source is gone, and leaves in the site what was written of it.
    if app.builder.format == "html":
        for name in removed:
            for path in (f"{name}.html", f"{name}.md", f"_sources/{name}.rst.txt"):
                Path(app.outdir, path).unlink(missing_ok=True)
    return []


def _sign(app) -> None:
    # The theme has set a sign of its font of icons. A screen reader reads the link's title.
    app.config.html_permalinks_icon = '<span aria-hidden="true">#</span>'


def setup(app) -> dict:
    app.connect("builder-inited", _sign)
    app.connect("env-get-outdated", _remove_pages)
    # After what else writes pages, with priority 500.
    app.connect("build-finished", _build_finished, priority=700)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
