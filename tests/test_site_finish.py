"""The extensions that finish pages and figures: bundle, figures, finish, mathml."""

import base64
import colorsys
import hashlib
import re
from pathlib import Path

import bundle
import pytest

# A machine that only measures has no Sphinx.
SphinxTestApp = pytest.importorskip("sphinx.testing.util").SphinxTestApp
figures = pytest.importorskip("figures")
finish = pytest.importorskip("finish")
mathml = pytest.importorskip("mathml")
plt = pytest.importorskip("matplotlib.pyplot")
nodes = pytest.importorskip("docutils.nodes")

HEAD = '<html data-content_root="../">\n<head>\n  <meta charset="utf-8" />\n{}\n</head>\n<body>\n{}\n</body>\n</html>\n'


def sha(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- figures ----------------------------------------------------------------------------------------------------------


def luminance(color: str) -> float:
    """WCAG's, of #rrggbb."""
    rgb = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def hue(color: str) -> float:
    return colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))[0]


# The palette that the gallery draws with
PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]


@pytest.mark.parametrize("color", PALETTE)
def test_dark_ink_is_seen_on_the_page_and_text_on_a_dark_area(color):
    page, text = figures.dark("#ffffff"), figures.dark("#000000")
    assert contrast(page, text) > 12
    assert contrast(figures.dark(color), page) >= 4.5
    assert contrast(figures.dark(color, area=True), text) >= 4.5
    for area in (False, True):
        assert abs(hue(figures.dark(color, area)) - hue(color)) < 0.05


def test_svg_gets_one_rule_for_each_of_its_colours(tmp_path):
    plt.figure()
    plt.plot([0, 1], color="#0072b2")
    plt.fill_between([0, 1], [1, 2], color="#d55e00")
    plt.title("A title")
    plt.savefig(tmp_path / "figure.svg")
    plt.close()
    before = (tmp_path / "figure.svg").read_text()
    after = figures.with_dark_rules(before)
    rules = re.search(r"<style>@media \(prefers-color-scheme: dark\) \{(.*?)</style>", after)[1]
    for kind, color in re.findall(r"(fill|stroke): (#[0-9a-f]{6})", before):
        assert f'[style*="{kind}: {color}"]{{{kind}:{figures.dark(color)}!important}}' in rules
    assert "svg{fill:" in rules and "<metadata>" in before and "<metadata>" not in after
    assert len(after) < len(before) and figures.with_dark_rules(after) == after


def test_white_areas_become_dark_and_white_text_stays():
    text = '<svg matplotlib><rect fill="#ffffff"/><path style="fill: #ffffff"/><g style="fill: #ffffff"/></svg>'
    rules, page = figures.with_dark_rules(text), figures.dark("#ffffff")
    assert f':is(path,use)[style*="fill: #ffffff"]{{fill:{page}!important}}' in rules
    assert f'rect[fill="#ffffff"]{{fill:{page}}}' in rules and ' [style*="fill: #ffffff"]{' not in rules


def test_area_too_narrow_for_text_has_the_colour_of_its_word(tmp_path):
    plt.figure()
    plt.bar([0, 1], [1, 2], width=0.01, color="#0072b2")
    plt.bar([0, 1], [1, 2], width=0.5, color="#d55e00")
    plt.savefig(tmp_path / "figure.svg")
    plt.close()
    rules = figures.with_dark_rules((tmp_path / "figure.svg").read_text())
    assert 'path[style*="fill: #d55e00"]' in rules and 'path[style*="fill: #0072b2"]' not in rules


def test_drawing_of_another_program_stays():
    assert figures.with_dark_rules('<svg><path style="fill: #000000"/></svg>').count("<style>") == 0


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_formula_becomes_mathml_in_one_line():
    formula = mathml.mathml(nodes.math_block("", r"\frac{a}{b}"))
    assert formula.startswith("<math ") and 'display="block"' in formula and "\n" not in formula
    assert "<mfrac><mi>a</mi><mi>b</mi></mfrac>" in formula


def test_index_of_a_letter_with_an_accent_stands_beside_it():
    formula = mathml.mathml(nodes.math("", r"\sum_{i}^{n} \hat{x}_{ij}"))
    assert '<msub><mover accent="true"><mi>x</mi>' in formula and formula.count("<munderover>") == 1


def test_formula_that_is_unknown_is_a_warning(caplog, monkeypatch):
    warnings = []
    monkeypatch.setattr(mathml.logger, "warning", lambda *args, **kwargs: warnings.append((args, kwargs)))
    node = nodes.math("", r"\nosuchthing x")
    mathml.mathml(node)
    ((_, error), where) = warnings[0]
    assert "nosuchthing" in str(error) and where == {"location": node}


def test_page_whose_source_is_gone_leaves_the_site(tmp_path):
    (tmp_path / "conf.py").write_text("extensions = ['finish']\nhtml_theme = 'basic'\n")
    (tmp_path / "index.rst").write_text("Site\n====\n\n.. toctree::\n   :glob:\n\n   part/*\n")
    (tmp_path / "part").mkdir()
    for name in ("kept", "gone"):
        (tmp_path / "part" / f"{name}.rst").write_text(f"{name}\n====\n")
    for pages in ({"kept.html", "gone.html"}, {"kept.html"}):
        app = SphinxTestApp("html", srcdir=tmp_path)
        try:
            app.build()
            assert {path.name for path in (Path(app.outdir) / "part").glob("*.html")} == pages
        finally:
            app.cleanup()
        (tmp_path / "part" / "gone.rst").unlink(missing_ok=True)


def test_source_of_a_module_that_nothing_documents_leaves_the_site(tmp_path):
    (tmp_path / "conf.py").write_text("extensions = ['kernels']\nhtml_theme = 'basic'\n")
    for modules in ({"softmax", "vector_add"}, {"softmax"}):
        text = "".join(f".. kernels:: triton_gallery.{name}\n" for name in sorted(modules))
        (tmp_path / "index.rst").write_text(f"Site\n====\n\n{text}")
        app = SphinxTestApp("html", srcdir=tmp_path)
        try:
            app.build()
            assert {path.stem for path in (Path(app.outdir) / "_modules" / "triton_gallery").glob("*.html")} == modules
        finally:
            app.cleanup()


# --- pages ------------------------------------------------------------------------------------------------------------


def test_long_name_breaks_behind_its_parts(tmp_path):
    page = '<span class="pre">_norm_fwd.kernel()</span><span class="pre">0.5</span><span class="pre">a_b c</span>'
    broken = '<span class="pre">_norm_<wbr>fwd.<wbr>kernel()</span>' + page.partition("</span>")[2]
    assert finish.with_breaks(page) == finish.with_breaks(broken) == broken


def test_policy_lists_the_hash_of_what_stands_in_the_page(tmp_path):
    page = HEAD.format("<script>one()</script>", '<script>\ntwo()\n</script><p style="color: &quot;red&quot;"></p>')
    finished = finish.finish(page, tmp_path)
    policy = re.search(r'content="([^"]*)"', finished)[1]
    script_src, style_src = (re.search(rf"{name} ([^;]*);", policy)[1] for name in ("script-src", "style-src"))
    assert set(script_src.split()) == {"'self'", sha("one()"), sha("\ntwo()\n")}
    assert set(style_src.split()) == {"'self'", "'unsafe-hashes'", sha('color: "red"')}
    assert finished.index("Content-Security-Policy") < finished.index("<script>")
    assert finish.finish(finished, tmp_path) == finished


def test_policy_without_scripts_in_the_page_allows_only_files(tmp_path):
    assert "script-src 'self'; style-src 'self';" in finish.finish(HEAD.format("", ""), tmp_path)


def test_a_page_that_is_served_while_it_is_written_has_no_policy(tmp_path):
    assert "Content-Security-Policy" not in finish.finish(HEAD.format("", ""), tmp_path, live=True)


def test_images_say_their_size_and_the_later_ones_wait(tmp_path):
    (tmp_path / "a.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="72pt" height="36pt"></svg>')
    page = '<img src="a.svg"><img alt="" src="a.svg"><img src="a.svg" width="5"><img src="https://x/y.png">'
    finished = finish.with_image_sizes(page, tmp_path)
    assert finished.startswith(
        '<img width="96" height="48" src="a.svg"><img width="96" height="48" loading="lazy" alt='
    )
    assert finished.endswith('<img src="a.svg" width="5"><img src="https://x/y.png">')


def test_figures_are_links_and_thumbnails_are_not():
    thumbnail = '<div class="sphx-glr-thumbcontainer"><img alt="" src="x.svg" /></div>'
    page = thumbnail + '<figure>\n<img alt="A" src="../a.svg" />\n</figure><img src="b.svg" class = "single"/>'
    finished = finish.with_links_on_figures(page)
    assert finished == thumbnail + (
        '<figure>\n<a class="figure" href="../a.svg"><img alt="A" src="../a.svg" /></a>\n</figure>'
        '<a class="figure" href="b.svg"><img src="b.svg" class = "single"/></a>'
    )
    assert finish.with_links_on_figures(finished) == finished


def test_thumbnail_is_a_link_with_a_caption():
    card = (
        '<div class="sphx-glr-thumbcontainer" tooltip="A promise."><img alt="" src="x.svg" />\n'
        '<p><a class="reference internal" href="x.html"><span class="doc">Title</span></a></p>\n'
        '  <div class="sphx-glr-thumbnail-title">Title</div>\n</div>'
    )
    assert finish.with_captions(card * 2) == 2 * (
        '<div class="sphx-glr-thumbcontainer"><img alt="" src="x.svg" />\n'
        '<p class="sphx-glr-thumbnail-title"><a href="x.html">Title</a></p>\n<p class="promise">A promise.</p>\n</div>'
    )


def test_no_style_is_left_for_a_search_to_trip_over():
    table = '<div style="overflow-x: auto"><table><colgroup><col style="width: 22.0%" /></colgroup></table></div>'
    assert finish.with_roles(table) == "<div><table><colgroup><col /></colgroup></table></div>"
    label = '<label aria-controls="a-content" class="sd-tab-label" for="a">A</label>'
    assert finish.with_roles(label) == '<label class="sd-tab-label" for="a">A</label>'


def test_tables_have_boxes_without_the_script_too():
    page = '<table class="measured docutils">\n1</table><table><tr></tr></table><table class="docutils">\n2</table>'
    box = '<div class="wy-table-responsive"><table class="{}docutils">\n{}</table></div>'
    boxed = box.format("measured ", 1) + "<table><tr></tr></table>" + box.format("", 2)
    assert finish.with_boxes(page) == boxed == finish.with_boxes(boxed)


def test_signature_is_no_list_of_definitions():
    signature = '<dl>\n<dd><em class="sig-param">x</em>,</dd>\n<dd><em class="sig-param">y</em>,</dd>\n</dl>'
    lists = "<dl>\n<dt>a</dt>\n<dd>b</dd>\n</dl>"
    finished = finish.with_roles(signature + lists)
    assert finished.endswith(lists) and finished.count("<dd>") == 1 and finished.count('<span class="sig-line">') == 2


def test_page_loads_one_bundle_of_each_kind(tmp_path):
    (tmp_path / "css").mkdir()
    (tmp_path / "css" / "theme.css").write_text("a { background: url(fonts/x.woff2), url('y.png'), url(data:z) }")
    (tmp_path / "late.css").write_text('b { background: url("w.png") }')
    style = '  <link rel="stylesheet" type="text/css" href="../_static/{}?v=1" />\n'
    script = '  <script defer src="../_static/{}?v=1"></script>\n'
    head = style.format("css/theme.css") + "  <title>T</title>\n" + style.format("sphinx-design.min.css")
    head += style.format("late.css") + "".join(map(script.format, ("a.js", "searchtools.js", "design-tabs.js")))
    written = {}

    def write(suffix: str, names: list[str]) -> str:
        written[suffix] = names
        return f"bundle-1.{suffix}"

    page = bundle.bundled(HEAD.format(head, "text"), write)
    assert written == {"css": ["css/theme.css", "late.css"], "js": ["a.js"]}
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == [
        "../_static/bundle-1.css",
        "../_static/bundle-1.js",
        "../_static/searchtools.js?v=1",
    ]
    assert bundle.bundled(page, write) == page
    bundle.bundled(HEAD.format(head, '<div class="sd-tab-set">'), write)
    assert written["css"][1] == "sphinx-design.min.css" and written["js"] == ["a.js", "design-tabs.js"]
    text = bundle.contents(tmp_path, ["css/theme.css", "late.css"])
    assert text.startswith("/* css/theme.css late.css */\n")
    assert """url(css/fonts/x.woff2), url('css/y.png'), url(data:z)""" in text and 'url("w.png")' in text


def test_of_a_page_whose_source_is_gone_nothing_is_left(tmp_path):
    for source in ("index.rst", "gone.rst", "gone.too.rst"):
        (tmp_path / source).write_text(f":orphan:\n\n{source}\n{9 * '='}\n")
    settings = {"extensions": ["finish"], "html_copy_source": True}

    def build() -> set[str]:
        app = SphinxTestApp("html", srcdir=tmp_path, confoverrides=settings)
        app.build()
        app.cleanup()
        return {path.relative_to(app.outdir).as_posix() for path in app.outdir.rglob("*gone*")}

    (tmp_path / "conf.py").touch()
    built = build()
    assert {"gone.html", "_sources/gone.rst.txt", "gone.too.html"} <= built
    markdown = tmp_path / "_build" / "html" / "gone.md"
    markdown.touch()
    (tmp_path / "gone.rst").unlink()
    assert build() == {name for name in built if "gone.too" in name}
