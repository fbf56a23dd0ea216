"""Figures as SVG that are right on a light and on a dark page.

matplotlib draws every figure once, dark ink on white. When the site is finished each SVG gets rules for dark pages.
Black and white change places; a coloured line or marker becomes bright enough for a dark page; a coloured area becomes
deep enough for the text on it, which is light now, unless all areas of its colour are too narrow for text. Hues stay. A
browser applies the rules to an ``<img>`` by the ``color-scheme`` of the page around it, and to a file opened alone by
the reader's system.
"""

import math
import re
from pathlib import Path

import matplotlib
from sphinx_gallery.scrapers import matplotlib_scraper

# Lightness of a dark page and of its text in OKLab, gallery.css's --page and --text
_PAGE, _TEXT = 0.205, 0.91
_MARK = "<style>@media (prefers-color-scheme: dark) {"


def scraper(block, block_vars, gallery_conf) -> str:
    """sphinx-gallery's scraper, with SVG that is the same in every build."""
    with matplotlib.rc_context({"svg.hashsalt": "triton-gallery"}):
        return matplotlib_scraper(block, block_vars, gallery_conf, format="svg", metadata={"Date": None})


def dark(color: str, area: bool = False) -> str:
    """What ``#rrggbb`` becomes on a dark page, as ink or as an area that may have text on it."""
    r, g, b = (_linear(int(color[i : i + 2], 16) / 255) for i in (1, 3, 5))
    # OKLab, in which equal steps of lightness look equally large: https://bottosson.github.io/posts/oklab/
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    light = 0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short
    a = 1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short
    b = 0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short
    if math.hypot(a, b) < 0.05:
        # Greys lean to the text's side, and all have the trace of blue that the page has.
        light, a, b = _TEXT - (_TEXT - _PAGE) * light**1.5, a - 0.003, b - 0.01
    else:
        light = 0.3 + 0.25 * light if area else 0.4 + 0.47 * light
    long = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (light - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _encoded(min(max(c, 0), 1))):02x}" for c in linear)


def _linear(c: float) -> float:
    return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4


def _encoded(c: float) -> float:
    return 12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055


def with_dark_rules(svg: str) -> str:
    """The SVG with rules for its colours. Text in black has no colour of its own in matplotlib's SVG: it inherits."""
    if _MARK in svg or "matplotlib" not in svg:
        return svg
    rules = [f"svg{{fill:{dark('#000000')}}}"]
    for kind, color in sorted(set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", svg))):
        # White text lies on an area, and stays white.
        what = ":is(path,use)" if (kind, color) == ("fill", "#ffffff") else ""
        rules.append(f'{what}[style*="{kind}: {color}"]{{{kind}:{dark(color)}!important}}')
        if kind == "fill" and dark(color) != dark(color, area=True) and _width(svg, color) > 5:
            # A marker is a <use>, an area a <path>.
            rules.append(f'path[style*="{kind}: {color}"]{{{kind}:{dark(color, area=True)}!important}}')
    # The ground of a hatched area has no style.
    for color in sorted(set(re.findall(r'<rect[^>]* fill="(#[0-9a-f]{6})"', svg))):
        rules.append(f'rect[fill="{color}"]{{fill:{dark(color)}}}')
    # What matplotlib says about itself and the date is no part of the figure, and nobody sees a thousandth of a point.
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    return re.sub(r"(<svg[^>]*>)", rf"\1\n {_MARK} {' '.join(rules)} }}</style>", svg, count=1)


def _width(svg: str, color: str) -> float:
    """Of the widest area of a colour, in points."""
    widths = [0.0]
    for path in re.findall(rf'<path d="(M[^"]*)"[^>]*style="[^"]*fill: {color}', svg):
        numbers = [float(number) for number in re.findall(r"-?\d[\d.]*", path)]
        widths.append(min(max(along) - min(along) for along in (numbers[::2], numbers[1::2])))
    return max(widths)


def _build_finished(app, exception) -> None:
    if exception or app.builder.format != "html":
        return
    for path in sorted(Path(app.outdir).rglob("*.svg")):
        text = path.read_text(encoding="utf-8")
        if (finished := with_dark_rules(text)) != text:
            path.write_text(finished, encoding="utf-8")


def setup(app) -> dict:
    # Before finish.py reads the figures' sizes.
    app.connect("build-finished", _build_finished, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
