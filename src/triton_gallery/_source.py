"""What a benchmark's figures depend on, as digests of source text, by which a record knows that it is out of date.

A digest covers code alone: comments, docstrings and layout may change freely. Functions that check arguments, those of
gradients, the choice between kernels, the host code that all operations share, and what one operation's plan takes from
another's lie above what is digested here. All constants of an operation's files count, also those of such functions.
"""

import ast
import functools
import hashlib
import json
from pathlib import Path


def kernel_digests(benchmark: str, package: Path = Path(__file__).parent) -> dict[str, str]:
    """Of the operation that a benchmark measures: "kernels", with all constants, and "launch", what is around them.

    "layer-norm-fwd-fp16" measures ``layer_norm.py``, and what begins with ``layer_norm`` in folders like ``hopper/``.
    Files there that are named for the backward pass count only where the benchmark's name has a "bwd". Where kernels
    use other files of the package, there is a digest "imports" of what they take from those.
    """
    operations = [_stem(path) for path in package.glob("*.py") if _begins(benchmark, _stem(path))]
    return _operation_digests(max(operations, key=len, default=None), "bwd" in benchmark.split("-"), package)


@functools.cache
def _operation_digests(operation: str | None, has_backward: bool, package: Path) -> dict[str, str]:
    kernels, launch, imports = [], [], []
    paths = sorted(package.glob("**/*.py")) if operation else []
    for path in (path for path in paths if _begins(_stem(path), operation)):
        if _stem(path).endswith(_BACKWARD) and not has_backward:
            continue
        module = _parsed(path.read_text(encoding="utf-8"))
        definitions = _definitions(module)
        named = {name for name, nodes in definitions.items() if any(map(_is_kernel, nodes))}
        constants = {name for name, nodes in definitions.items() if all(map(_is_constant, nodes))}
        launchers = {name for name, nodes in definitions.items() if any(_launches(node, named) for node in nodes)}
        # A folder holds kernels, their plans and launches alone; a file beside it gradients and argument checks, too.
        around = _closure(definitions, launchers if path.parent == package else set(definitions)) - named - constants
        place = path.relative_to(package).as_posix()
        needed = _closure(definitions, named)
        kernels.append([place, _text(definitions, needed | constants)])
        imports += _imported(path, module, definitions, needed)
        launch.append([place, _text(definitions, around)])
    return {"kernels": _hash(kernels), "launch": _hash(launch)} | ({"imports": _hash(imports)} if imports else {})


def _imported(path: Path, module: ast.Module, definitions: dict[str, list[ast.stmt]], named: set[str]) -> list:
    """The text of all that the definitions `named` take from other files of the package."""
    used = set().union(*(_names_in(node) for name in named for node in definitions[name]))
    texts = []
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            source = path.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py")
            names = {alias.name for alias in node.names if (alias.asname or alias.name) in used}
            if names and source.exists():
                other = _parsed(source.read_text(encoding="utf-8"))
                found = _definitions(other)
                needed = _closure(found, names)
                texts.append([node.module, _text(found, needed), *_imported(source, other, found, needed)])
    return texts


@functools.cache
def function_digest(source: str, name: str) -> str | None:
    """The digest of a function, which may be defined inside another, and of all it names; None where there is none."""
    definitions = _definitions(_parsed(source))
    holds = {key for key, nodes in definitions.items() if any(_defines(node, name) for node in nodes)}
    return _hash(_text(definitions, _closure(definitions, holds))) if holds else None


# Files with these endings hold what the backward pass alone needs.
_BACKWARD = ("-backward", "-gradients")

_parsed = functools.cache(ast.parse)


def _stem(path: Path) -> str:
    return path.stem.replace("_", "-")


def _begins(name: str, stem: str) -> bool:
    return f"{name}-".startswith(f"{stem}-")


def _definitions(module: ast.Module) -> dict[str, list[ast.stmt]]:
    """What the top level of a module defines, by name; a name may be defined more than once."""
    found = {}
    for node in module.body:
        for target in getattr(node, "targets", [getattr(node, "target", node)]):
            for part in getattr(target, "elts", [target]):
                name = getattr(part, "name", getattr(part, "id", None))
                if name:
                    found.setdefault(name, []).append(node)
    return found


def _is_kernel(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(isinstance(part, ast.Attribute) and part.attr == "jit" for d in decorators for part in ast.walk(d))


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _launches(node: ast.stmt, kernels: set[str]) -> bool:
    return isinstance(node, ast.FunctionDef) and not _is_kernel(node) and bool(kernels & _names_in(node))


def _defines(node: ast.stmt, name: str) -> bool:
    return any(isinstance(part, ast.FunctionDef) and part.name == name for part in ast.walk(node))


def _closure(definitions: dict[str, list[ast.stmt]], roots: set[str]) -> set[str]:
    """The roots and all that they name, directly or through others."""
    found, todo = set(), list(roots)
    while todo:
        name = todo.pop()
        if name in definitions and name not in found:
            found.add(name)
            todo += set().union(*map(_names_in, definitions[name]))
    return found


@functools.cache
def _names_in(node: object) -> set[str]:
    """The names that a piece of code takes from around it; a function's or comprehension's own are none of them."""
    if isinstance(node, ast.Name):
        return {node.id}
    names = set().union(*(_names_in(part) for _, part in _parts(node))) if isinstance(node, ast.AST) else set()
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        # The first iterable is evaluated outside, where its names are not yet the comprehension's.
        own = set().union(*(_names_in(part.target) for part in node.generators))
        return (names - own) | _names_in(node.generators[0].iter)
    return names - _own(node) if isinstance(node, ast.FunctionDef | ast.Lambda) else names


def _own(function: ast.FunctionDef | ast.Lambda) -> set[str]:
    parts = [part for _, part in _parts(function)]
    walked = [part for root in parts if isinstance(root, ast.AST) for part in ast.walk(root)]
    arguments = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
    functions = {part.name for part in walked if isinstance(part, ast.FunctionDef)}
    stored = {part.id for part in walked if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return arguments | functions | stored


def _parts(node: ast.AST) -> list[tuple[str, object]]:
    """The fields of a node that count, one item of a list at a time."""
    parts = []
    for field, value in ast.iter_fields(node):
        values = value if isinstance(value, list) else [value]
        if field == "decorator_list" and not _is_kernel(node):
            continue  # how a function is registered, or a benchmark titled
        if field == "body" and isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            values = values[1:]
        parts += [(field, part) for part in values if part is not None]
    return parts


def _plain(node: object) -> object:
    """A node as lists, alike in all versions of Python: what is empty is left out."""
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):
        # Python 3.12.1 adds an empty text behind a field in a format.
        parts = [part for part in node.values if getattr(part, "value", None) != ""]
        return ["JoinedStr", *map(_plain, parts)]
    return [type(node).__name__, *([field, _plain(part)] for field, part in _parts(node))]


def _text(definitions: dict[str, list[ast.stmt]], names: set[str]) -> list:
    return [[name, *map(_plain, definitions[name])] for name in sorted(names)]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
