"""``.. run::`` executes Python in a page of the guide and shows the code with what it printed below.

The content is a program; all ``run`` directives of one page share one namespace, from top to bottom. What the code
prints stands below it in a box of its own. ``:hide-code:`` shows only the output. An exception, and so a failing
``assert``, fails the build and names the page and the line; code that is meant to fail catches its exception and
prints it. Kernels may be defined in the content, because ``inspect.getsource`` finds it. Import triton_gallery before
triton. Figures are the business of matplotlib's ``.. plot::``, which has a namespace of its own.
"""

import contextlib
import io
import linecache
import traceback

from docutils import nodes
from docutils.parsers.rst import directives
from gallery import machine
from sphinx.util.docutils import SphinxDirective


class Run(SphinxDirective):
    has_content = True
    option_spec = {"hide-code": directives.flag}  # noqa: RUF012  docutils' form

    def run(self) -> list[nodes.Node]:
        self.assert_has_content()
        source = "\n".join(self.content)
        file, line = f"{self.content.source(0)}:{self.content.offset(0) + 1}", self.content.offset(0)
        try:
            output = self._execute(source, file, line)
        except Exception as error:
            # Read again next time, so that the build keeps failing until it is mended.
            self.env.note_reread()
            frames = traceback.extract_tb(error.__traceback__)
            last = next((f.lineno for f in reversed(frames) if f.filename == file), getattr(error, "lineno", line + 1))
            trace = "".join(traceback.format_exception(error))
            return [
                self.state.document.reporter.error(
                    f"run: {type(error).__name__}: {error}", nodes.literal_block("", trace), line=last
                )
            ]
        shown = []
        if "hide-code" not in self.options:
            shown.append(nodes.literal_block(source, source, language="python", classes=["run-code"]))
        if output:
            shown.append(nodes.literal_block(output, output, language="none", classes=["run-output"]))
        for node in shown:
            self.set_source_info(node)
        return shown

    def _execute(self, source: str, file: str, line: int) -> str:
        namespace = self.env.temp_data.setdefault("run_namespace", {"__name__": "__main__"})
        # Empty lines in front make the line numbers of a traceback those of the page. inspect.getsource, and so
        # @triton.jit, looks for the source in this cache, where None says that there is no file.
        text = "\n" * line + source + "\n"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(text, file, "exec"), namespace)
        return output.getvalue().rstrip()


def setup(app) -> dict:
    app.add_directive("run", Run)
    # Pages are executed again when the device or a version changed.
    app.add_config_value("run_machine", machine(), "env")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
