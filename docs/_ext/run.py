"""``.. run::`` executes Python in a page of the guide and shows the code with what it printed below.

The content is a program; all ``run`` directives of one page share one namespace, from top to bottom. What the code
prints stands below it in a box of its own. ``:hide-code:`` shows only the output. An exception, and so a failing
``assert``, fails the build and names the page and the line; code that is meant to fail catches its exception and
prints it. Kernels may be defined in the content, because ``inspect.getsource`` finds it. Import triton_gallery before
triton.

``:compiled:`` runs the code in a second process, where Triton's interpreter is off, so that kernels can be compiled for
a GPU that is not here. These blocks share a namespace of their own. ``:both:`` runs it here and there, which is for
kernels that are run and looked at; it shows what was printed here.

Figures are the business of matplotlib's ``.. plot::``, which finds what the page defined above it by
``from page import name``. They are drawn whenever the page is read, because what they show is not in the page alone.
"""

import contextlib
import functools
import io
import linecache
import multiprocessing
import os
import sys
import traceback
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from gallery import SRC, machine, script
from sphinx.util.docutils import SphinxDirective


class Run(SphinxDirective):
    has_content = True
    option_spec = dict.fromkeys(("hide-code", "compiled", "both"), directives.flag)

    def run(self) -> list[nodes.Node]:
        self.assert_has_content()
        source = "\n".join(self.content)
        file, line = f"{self.content.source(0)}:{self.content.offset(0) + 1}", self.content.offset(0)
        # What a page shows depends on the whole package.
        for path in SRC.glob("triton_gallery/**/*.py"):
            self.env.note_dependency(str(path))
        output, failure = self._execute(source, file, line)
        if failure:
            # Read again next time, so that the build keeps failing until it is mended.
            self.env.note_reread()
            message, trace, last = failure
            return [self.state.document.reporter.error(f"run: {message}", nodes.literal_block("", trace), line=last)]
        shown = []
        if "hide-code" not in self.options:
            shown.append(nodes.literal_block(source, source, language="python", classes=["run-code"]))
        if output:
            shown.append(nodes.literal_block(output, output, language="none", classes=["run-output"]))
        for node in shown:
            self.set_source_info(node)
        return shown

    def _execute(self, source: str, file: str, line: int) -> tuple[str, tuple[str, str, int] | None]:
        if "compiled" in self.options:
            return self._execute_in(True, source, file, line)
        output, failure = self._execute_in(False, source, file, line)
        if "both" in self.options and not failure:
            failure = self._execute_in(True, source, file, line)[1]
        return output, failure

    def _script(self) -> str:
        return script(Path(self.env.doc2path(self.env.current_document.docname)).read_text(encoding="utf-8"))

    def _execute_in(self, compiled: bool, source: str, file: str, line: int) -> tuple[str, tuple[str, str, int] | None]:
        # temp_data lives as long as one page is read.
        started = self.env.temp_data.setdefault("run_started", set())
        page = None if compiled in started else self._script()
        started.add(compiled)
        if compiled:
            return _compiling_process().submit(execute, source, file, line, page).result()
        return execute(source, file, line, page)


def execute(source: str, file: str, line: int, page: str | None) -> tuple[str, tuple[str, str, int] | None]:
    """Run a part of a page: what it printed, and when it raised, the error's message, its trace and the page's line.

    With the first part comes all the code of the page, by which a benchmark knows whether it changed.
    """
    if page is not None:
        import torch  # not above: the second process switches the interpreter off first

        sys.modules["page"] = types.ModuleType("page")
        sys.modules["page"].__source__ = page
        torch.manual_seed(0)
    # Empty lines in front make the line numbers of a traceback those of the page. inspect.getsource, and so
    # @triton.jit, looks for the source in this cache, where None says that there is no file.
    text = "\n" * line + source + "\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    output, failure = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(text, file, "exec"), vars(sys.modules["page"]))
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = next((f.lineno for f in reversed(frames) if f.filename == file), getattr(error, "lineno", line + 1))
        failure = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), last
    return output.getvalue().rstrip(), failure


@functools.cache
def _compiling_process() -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_switch_interpreter_off)


def _switch_interpreter_off() -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    # Triton 3.9 warns about a coming default where it is not set.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def figures(app, docname: str) -> list[Path]:
    """Where matplotlib keeps the figures of a page: below its path from the folder of conf.py."""
    page = os.path.relpath(Path(app.srcdir) / docname, app.confdir)
    return list((Path(app.doctreedir).parent / "plot_directive").glob(f"{page}-*"))


def _forget_figures(app, docname: str, source: list[str]) -> None:
    # matplotlib keeps a figure as long as it is younger than the page.
    for figure in figures(app, docname):
        figure.unlink()


def setup(app) -> dict:
    app.add_directive("run", Run)
    app.connect("source-read", _forget_figures)
    # Pages are executed again when the device or a version changed.
    app.add_config_value("run_machine", machine(), "env")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
