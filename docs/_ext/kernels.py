"""Documents ``@triton.jit`` kernels: their signature, their docstring, and a list of all kernels of a module.

To autodoc a kernel is an object without a signature, and in interpreter mode without a docstring too. Both are taken
from the Python function inside. ``.. kernels:: triton_gallery.softmax`` documents every kernel that the module
defines, in the order of the source.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable

from docutils import nodes
from gallery import SRC
from sphinx.util.docstrings import prepare_docstring
from sphinx.util.docutils import SphinxDirective
from triton.runtime.jit import KernelInterface


def function_of(obj: object) -> Callable | None:
    """The Python function inside a kernel, under autotuning and heuristics if need be; None for anything else."""
    if not isinstance(obj, KernelInterface):
        return None
    while isinstance(obj, KernelInterface):
        obj = obj.fn
    return obj


def signature_of(function: Callable) -> str:
    """The parameters as the source writes them, so that types keep their usual names: ``tl.constexpr``."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    return f"({ast.unparse(node.args)})"


def _process_signature(app, what, name, obj, options, args, retann):
    function = function_of(obj)
    return (signature_of(function), "") if function else None


def _process_docstring(app, what, name, obj, options, lines) -> None:
    function = function_of(obj)
    if function:
        # Kernel docstrings are plain text: an asterisk or a bar in a formula is no markup.
        lines[:] = [re.sub(r"([*|\\])", r"\\\1", line) for line in prepare_docstring(function.__doc__ or "")]


class Kernels(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        path = SRC.joinpath(*module.split(".")).with_suffix(".py")
        if not path.is_file():
            raise self.error(f"kernels: no module {module} in {SRC.name}/")
        self.env.note_dependency(str(path))
        text = "\n".join(f".. autofunction:: {module}::{name}\n" for name in kernels_in(path.read_text("utf-8")))
        return self.parse_text_to_nodes(text)


def kernels_in(source: str) -> list[str]:
    """The names of all functions in `source` that a decorator turns into a kernel."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if any(re.search(r"\bjit\b", ast.unparse(d)) for d in f.decorator_list)]


def setup(app) -> dict:
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("kernels", Kernels)
    app.connect("autodoc-process-signature", _process_signature)
    # Before napoleon, with priority 500, reads the docstring.
    app.connect("autodoc-process-docstring", _process_docstring, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
