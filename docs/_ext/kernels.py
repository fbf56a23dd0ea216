"""Documents Triton kernels: their signature, their docstring, and a list of all kernels of a module.

``.. kernels:: triton_gallery.softmax`` documents every kernel that the module defines, in the order of the source. It
reads the source and imports nothing, so a kernel for another GPU or another version of Triton has its place too.

Each function and each kernel links to its source, on a page that viewcode makes of the module. viewcode would import
the module to find it; three handlers spare it that, and lead back from a kernel to where it is documented.
"""

import ast
import re
from pathlib import Path

from docutils import nodes
from gallery import SRC
from sphinx.ext.viewcode import OUTPUT_DIRNAME
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docstrings import prepare_docstring
from sphinx.util.docutils import SphinxDirective

from triton_gallery._source import _is_kernel


def kernels_in(source: str) -> list[ast.FunctionDef]:
    """All functions in `source` that ``triton.jit`` or ``gluon.jit`` turns into a kernel."""
    return [node for node in ast.parse(source).body if _is_kernel(node)]


def docstring_of(docstring: str | None) -> list[str]:
    """The lines as plain text: an asterisk or a bar in a kernel's formula is no markup."""
    return [re.sub(r"([*|\\])", r"\\\1", line) for line in prepare_docstring(docstring or "")]


class Kernels(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        path = _path_of(module)
        if not path.is_file():
            raise self.error(f"kernels: no module {module} in {SRC.name}/")
        self.env.note_dependency(str(path))
        lines = []
        for node in kernels_in(path.read_text(encoding="utf-8")):
            # The parameters as the source writes them, so that types keep their usual names: tl.constexpr.
            lines += [f".. py:function:: {node.name}({ast.unparse(node.args)})", f"   :module: {module}", ""]
            lines += [f"   {line}" for line in docstring_of(ast.get_docstring(node, clean=False))] + [""]
        return self.parse_text_to_nodes("\n".join(lines))


def _path_of(module: str) -> Path:
    return SRC.joinpath(*module.split(".")).with_suffix(".py")


def _find_source(app, module: str) -> tuple[str, dict] | None:
    if not _path_of(module).is_file():
        return None
    analyzer = ModuleAnalyzer.for_file(_path_of(module), module)
    analyzer.find_tags()
    return analyzer.code, analyzer.tags


def _follow_imported(app, module: str, name: str) -> str | None:
    # A public function is documented as the package's, and viewcode finds its module.
    return module if name.startswith("_") else None


def _source_context(app, pagename, templatename, context, doctree) -> None:
    """On the page of a module, what viewcode leaves wrong.

    It takes all functions for the package's, if the first one is, when it links back to them; and puts each function
    into a block inside of ``<pre>``, where HTML has no blocks.
    """
    if not pagename.startswith(f"{OUTPUT_DIRNAME}/triton_gallery/"):
        return
    module, known = pagename.removeprefix(f"{OUTPUT_DIRNAME}/").replace("/", "."), app.env.get_domain("py").objects

    def link(match: re.Match) -> str:
        return match[0] if match[0].strip('#"') in known else f'#{module}.{match[1]}"'

    body = re.sub(r'#triton_gallery\.([\w.]+)"', link, context["body"])
    before, code, after = re.fullmatch("(.*<pre>)(.*)(</pre>.*)", body, re.DOTALL).groups()
    context["body"] = before + code.replace("<div ", "<span ").replace("</div>", "</span>") + after


def _remove_sources(app, exception) -> None:
    if exception or app.builder.format != "html":
        return
    # Sphinx leaves in the site the page that it once made of a module that nothing documents any more.
    known = {"index", *(module.replace(".", "/") for module in getattr(app.env, "_viewcode_modules", ()))}
    folder = Path(app.outdir, OUTPUT_DIRNAME)
    for page in folder.rglob("*.html"):
        if page.relative_to(folder).with_suffix("").as_posix() not in known:
            page.unlink()


def setup(app) -> dict:
    app.setup_extension("sphinx.ext.viewcode")
    app.add_directive("kernels", Kernels)
    app.connect("viewcode-find-source", _find_source)
    app.connect("viewcode-follow-imported", _follow_imported)
    app.connect("html-page-context", _source_context)
    app.connect("build-finished", _remove_sources)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
