"""The digests by which a record knows the text that it measured."""

from pathlib import Path

import pytest

from triton_gallery import _source

MODULE = '''"""About."""

import torch
import triton
import triton.language as tl

LIMIT = 3
_TILES = {"a": (1, 2)}


@triton.jit
def _helper(x):
    return x + 1


@triton.jit(do_not_specialize=["n"])
def _kernel(x_ptr, n, BLOCK: tl.constexpr):
    """Adds one."""
    # why
    tl.store(x_ptr, _helper(tl.load(x_ptr)))


def _config(n):
    return _TILES["a"]


@registered(fake=_unrelated)
def _launch(x):
    _kernel[(1,)](x, x.numel(), *_config(x))


def _unrelated(x):
    return x


def softmax(x):
    if x.ndim == 0:
        raise ValueError("softmax: x must have a dimension")
    return _launch(x)
'''


def digests(folder, module=MODULE, special="x = 1\n", benchmark="softmax-fp16"):
    (folder / "hopper").mkdir(exist_ok=True)
    (folder / "softmax.py").write_text(module)
    (folder / "hopper" / "softmax.py").write_text(special)
    (folder / "matmul.py").write_text(special)
    _source._operation_digests.cache_clear()
    return _source.kernel_digests(benchmark, folder)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("    # why\n", "    # because\n\n", set()),
        ('"""Adds one."""', '"""Adds 1."""', set()),
        ('    """Adds one."""\n', "", set()),
        ("x.ndim == 0", "x.ndim == 1", set()),
        ("def _unrelated(x):\n    return x", "def _unrelated(x):\n    return -x", set()),
        ("registered(fake=_unrelated)", "registered()", set()),
        ("import torch\n", "import torch\nimport math\n", set()),
        ("x + 1", "x + 1.0", {"kernels"}),
        ("x + 1", "1 + x", {"kernels"}),
        ("def _helper(x):", "def _helper(x, y=1):", {"kernels"}),
        ('do_not_specialize=["n"]', "", {"kernels"}),
        ("LIMIT = 3", "LIMIT = 4", {"kernels"}),
        ("(1, 2)}", "(1, 4)}", {"kernels"}),
        ('_TILES["a"]', '_TILES["b"]', {"launch"}),
        ("[(1,)]", "[(2,)]", {"launch"}),
    ],
)
def test_what_counts_as_a_change(tmp_path, old, new, changed):
    assert old in MODULE
    before, after = digests(tmp_path), digests(tmp_path, MODULE.replace(old, new, 1))
    assert {part for part in before if before[part] != after[part]} == changed


def test_kernels_for_one_gpu_count_and_those_of_another_operation_do_not(tmp_path):
    before = digests(tmp_path)
    assert digests(tmp_path, special="x = 2\n")["kernels"] != before["kernels"]
    (tmp_path / "hopper" / "softmax_rows.py").write_text("x = 1\n")
    assert digests(tmp_path)["kernels"] != before["kernels"]
    (tmp_path / "hopper" / "softmax_rows.py").unlink()
    assert digests(tmp_path, benchmark="softmax") == before
    assert digests(tmp_path, benchmark="matmul-fp16") != before
    assert digests(tmp_path, benchmark="softmaxes") == digests(tmp_path, benchmark="nothing")


def test_kernels_of_a_gradient_count_where_it_is_measured(tmp_path):
    before = digests(tmp_path)
    assert digests(tmp_path, benchmark="softmax-bwd-fp16") == digests(tmp_path, benchmark="softmax-fwd-bwd") == before
    (tmp_path / "hopper" / "softmax_backward.py").write_text("x = 1\n")
    assert digests(tmp_path) == digests(tmp_path, benchmark="softmax-fwd-fp16") == before
    measured = digests(tmp_path, benchmark="softmax-bwd-fp16")
    assert measured["kernels"] != before["kernels"]


def test_what_kernels_import_counts_as_theirs(tmp_path):
    module = MODULE.replace("import torch\n", "from ._shared import double, host\n", 1).replace("x + 1", "double(x)")
    shared = (
        "from ._deeper import two\n\n\n@triton.jit\ndef double(x):\n    return x * two\n\n\ndef host():\n    return 1\n"
    )
    (tmp_path / "_shared.py").write_text(shared)
    (tmp_path / "_deeper.py").write_text("two = 2\nthree = 3\n")
    before = digests(tmp_path, module)
    (tmp_path / "_shared.py").write_text(shared.replace("return 1", "return 2"))
    (tmp_path / "_deeper.py").write_text("two = 2\nthree = 4\n")
    assert digests(tmp_path, module) == before
    (tmp_path / "_deeper.py").write_text("two = 2.0\nthree = 3\n")
    assert digests(tmp_path, module)["imports"] != before["imports"]
    (tmp_path / "_deeper.py").write_text("two = 2\nthree = 3\n")
    (tmp_path / "_shared.py").write_text(shared.replace("x * two", "x + x"))
    assert digests(tmp_path, module)["imports"] != before["imports"]


@pytest.mark.parametrize(
    "name",
    ["vector-add-fp32", "softmax-fp16", "matmul-fp8", "dropout-fp16", "layer-norm-bwd-fp16", "attention-fwd"],
)
def test_every_operation_has_its_own_digest(name):
    found = _source.kernel_digests(name)
    nothing, other = _source.kernel_digests("nothing"), _source.kernel_digests("softmax-fp16")
    assert all(found[part] != nothing[part] for part in nothing)
    assert (found == other) == (name == "softmax-fp16")


PAGE = """
SIZES = [m + k + p for m, k, p in [(1, 0, p) for p in p]]
OTHER = [2]
m = [7]
p = [9]
n = [4]
call = [5]

def inputs(n):
    return n

def sweep(dtype):
    @report(title="x")
    def bench(n):
        def call():
            return inputs(n), SIZES
        return call()
    return bench.run()

def plot():
    return OTHER
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("[2]", "[3]", True),
        ("[4]", "[6]", True),  # the functions' n is their own
        ("[5]", "[6]", True),  # and so is a function inside them
        ("[7]", "[8]", True),  # and a comprehension's m
        ('title="x"', 'title="y"', True),
        ("return OTHER", "return 1", True),
        ("(1, 0, p)", "(3, 0, p)", False),
        ("[9]", "[10]", False),  # what a comprehension walks along is not its own, whatever it is called
        ("return n\n", "return -n\n", False),
        ("inputs(n), SIZES", "SIZES, inputs(n)", False),
    ],
)
def test_a_benchmark_is_its_function_and_what_it_names(old, new, same):
    before, after = (_source.function_digest(text, "bench") for text in (PAGE, PAGE.replace(old, new, 1)))
    assert (before == after) == same and before is not None


def test_a_benchmark_that_is_not_there_has_no_digest():
    assert _source.function_digest(PAGE, "nothing") is None


def test_digests_are_alike_in_all_versions_of_python():
    # What one version of Python recorded, another one reads.
    text = (
        'def f(x: int, *, y=1.0):\n    """Doc."""\n    return [f"{x!r:>{y}} and {{}}" for _ in (1, True, None, "a")]\n'
    )
    assert _source.function_digest(text, "f") == "ea69e25d4d2e9646"


def test_the_package_holds_nothing_else():
    """What an editor or a patch left behind would be in every wheel."""
    files = [file for file in Path(_source.__file__).parent.rglob("*.*") if "__pycache__" not in file.parts]
    assert {file.suffix for file in files if file.is_file()} == {".py", ".json", ".md", ".typed"}
