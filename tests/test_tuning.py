"""Choices by trial: who is tried, what is kept, and that every choice computes the same product."""

import fcntl
import json
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from triton.runtime.errors import OutOfResources

import triton_gallery as tg
from accuracy import DEVICE, assert_as_accurate_as_torch
from triton_gallery import _tuning
from triton_gallery._launch import Tape, is_hopper, recording
from triton_gallery._tuning import is_tuning, run_quickest, set_tuning
from triton_gallery.hopper import matmul_plan


@pytest.fixture(autouse=True)
def _tuning_ends():
    yield
    set_tuning(False)


class Machine:
    """A GPU on which each choice takes a known time."""

    def __init__(self, **ms):
        self.ms, self.tried, self.ran = ms, [], []

    def measure(self, fn, rep=100):
        assert recording.tape is None  # what is tried must not be replayed
        before = len(self.ran)
        fn()
        (choice,) = self.ran[before:]
        del self.ran[before:]
        self.tried.append(choice)
        ms = self.ms[choice or "shipped"]
        if isinstance(ms, Exception):
            raise ms
        return (ms,) * 3

    def call(self, words="a call"):
        """The choice that a call comes to."""
        choices = [[name] for name in self.ms if name != "shipped"]
        run_quickest("matmul", words, lambda: choices, self.run, DEVICE)
        return self.ran.pop()

    def run(self, choice):
        self.ran.append(choice and choice[0])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes a `Machine` for a process that has just begun, and enables tuning."""

    def make(folder=tmp_path / "choices", **ms):
        made = Machine(**ms)
        monkeypatch.setattr(_tuning.benchmark, "measure", made.measure)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        set_tuning(True, folder=folder)
        return made

    return make


def test_the_quickest_choice_is_kept_on_disk(machine, tmp_path):
    first = machine(shipped=5.0, slow=7.0, quick=3.0)
    assert first.call() == "quick" and first.tried
    first.tried.clear()
    assert first.call() == "quick" and not first.tried
    assert first.call("another call") == "quick" and first.tried

    (file,) = (tmp_path / "choices").glob("*.json")
    assert file.name.startswith("matmul-nvidia-test-")
    kept = json.loads(file.read_text())
    assert kept == {key: {"choice": ["quick"], "ms": 3.0, "shipped_ms": 5.0} for key in ("a call", "another call")}
    (tmp_path / "new").touch()
    assert file.stat().st_mode == (tmp_path / "new").stat().st_mode  # whom the user lets read new files

    # The next process tries nothing, even where it would find something else.
    second = machine(shipped=1.0, slow=7.0, quick=3.0)
    assert second.call() == "quick" and not second.tried


@pytest.mark.parametrize("ms", [5.0, 4.98, 6.0])
def test_the_shipped_choice_stays_where_no_other_is_clearly_quicker(machine, ms):
    assert machine(shipped=5.0, other=ms).call() is None


def test_the_shipped_choice_may_be_the_only_one(machine):
    assert machine(shipped=5.0).call() is None


def test_the_slow_ones_are_timed_shortly(machine):
    names = [f"choice{i}" for i in range(20)]
    tried = machine(shipped=9.0, **{name: 1.0 + i for i, name in enumerate(names)})
    assert tried.call() == "choice0"
    assert sorted(map(tried.tried.count, names)) == [1] * 16 + [2] * 4 and tried.tried.count(None) == 1


def test_nothing_is_tried_while_a_graph_is_captured(machine, monkeypatch):
    tried = machine(shipped=5.0, quick=3.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(recording, "tape", Tape())
    assert tried.call() is None and not tried.tried
    assert not recording.tape.keep  # so that a later call tries
    monkeypatch.setattr(recording, "tape", None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tried.call() == "quick"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tried.call() == "quick"


@pytest.mark.parametrize("error", [OutOfResources(2, 1, "shared memory"), RuntimeError("PassManager::run failed")])
def test_a_choice_that_cannot_run_is_none(machine, error):
    tried = machine(shipped=5.0, broken=error, quick=3.0)
    assert tried.call() == "quick" and "broken" in tried.tried


def test_the_shipped_choice_has_to_run(machine, monkeypatch, tmp_path):
    tried = machine(shipped=RuntimeError("an illegal memory access"), quick=3.0)
    monkeypatch.setattr(recording, "tape", tape := Tape())
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        tried.call()
    assert recording.tape is tape
    assert not list((tmp_path / "choices").glob("*.json"))


def test_too_little_memory_for_a_trial_is_no_error(machine, tmp_path):
    tried = machine(shipped=torch.OutOfMemoryError("no memory for the flush"), quick=3.0)
    with pytest.warns(UserWarning, match="set_tuning: too little memory to try a call, so the rules choose; "):
        assert tried.call() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tried.call() is None  # and it is not tried at every call
    assert not list((tmp_path / "choices").glob("*.json"))
    assert machine(shipped=5.0, quick=3.0).call() == "quick"


def test_what_another_process_kept_meanwhile_stays(machine, tmp_path):
    tried = machine(shipped=5.0, quick=3.0)
    tried.call()
    (file,) = (tmp_path / "choices").glob("*.json")
    theirs = {"choice": None, "ms": 1.0, "shipped_ms": 1.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"their call": theirs}))
    tried.call("another call")
    assert set(json.loads(file.read_text())) == {"a call", "their call", "another call"}
    assert {path.suffix for path in (tmp_path / "choices").iterdir()} == {".json", ".lock"}
    assert tried.call("their call") is None


def test_of_two_processes_one_tries(machine, tmp_path):
    """The other one waits, and takes what was chosen."""
    machine(shipped=5.0, quick=3.0).call("another call")
    (file,) = (tmp_path / "choices").glob("*.json")
    tried = machine(shipped=5.0, quick=3.0)
    with open(file.with_suffix(".lock"), "a") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = pool.submit(tried.call)
        time.sleep(0.2)
        assert not waiting.done() and not tried.tried
        file.write_text(json.dumps({"a call": {"choice": None, "ms": 1.0, "shipped_ms": 1.0}}))
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert waiting.result() is None and not tried.tried


@pytest.mark.parametrize("found", [{"choice": ["unknown"]}, {"choice": 3}, {}, 3])
def test_a_choice_that_there_is_not_is_tried_anew(machine, tmp_path, found):
    machine(shipped=5.0, quick=3.0).call()
    (file,) = (tmp_path / "choices").glob("*.json")
    file.write_text(json.dumps({"a call": found}))
    tried = machine(shipped=5.0, quick=3.0)
    assert tried.call() == "quick" and tried.tried


UNREADABLE = [("{", "Expecting"), ("[]", "it holds something else than choices"), ("[" * 200_000, "maximum recursion")]


@pytest.mark.parametrize(("text", "reason"), UNREADABLE, ids=["half", "a list", "too deep"])
def test_a_file_that_cannot_be_read_is_made_anew(machine, tmp_path, text, reason):
    machine(shipped=5.0, quick=3.0).call()
    (file,) = (tmp_path / "choices").glob("*.json")
    file.write_text(text)
    tried = machine(shipped=5.0, quick=3.0)
    with pytest.warns(UserWarning, match=rf"set_tuning: cannot read .*{file.name}, so all is tried anew: {reason}"):
        assert tried.call() == "quick"
    assert tried.tried and json.loads(file.read_text())


def test_a_folder_that_cannot_be_written_costs_only_what_is_kept(machine, tmp_path):
    (tmp_path / "file").touch()
    tried = machine(folder=tmp_path / "file", shipped=5.0, quick=3.0)
    with pytest.warns(UserWarning, match="set_tuning: cannot write .*, so choices end with this process: "):
        assert tried.call() == "quick"
    tried.tried.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tried.call() == "quick" and not tried.tried


def test_other_kernels_and_other_versions_have_files_of_their_own(machine, monkeypatch, tmp_path):
    machine(shipped=5.0, quick=3.0).call()
    monkeypatch.setattr(_tuning.triton, "__version__", "99")
    machine(shipped=5.0, quick=3.0).call()
    monkeypatch.setattr(_tuning, "kernel_digests", lambda operation: {"kernels": "other"})
    machine(shipped=5.0, quick=3.0).call()
    monkeypatch.setattr(_tuning, "num_multiprocessors", lambda device: 66)  # a share of a GPU
    machine(shipped=5.0, quick=3.0).call()
    assert len(list((tmp_path / "choices").glob("*.json"))) == 4


def test_nothing_is_chosen_unless_asked_for(machine):
    tried = machine(shipped=5.0, quick=3.0)
    set_tuning(False)
    assert not is_tuning()
    assert tried.call() is None and not tried.tried  # as in another thread that had already asked
    set_tuning(True)
    assert is_tuning()
    set_tuning(False)
    assert not is_tuning()


def test_choices_are_kept_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    set_tuning(True)
    assert _tuning._folder == tmp_path / "triton_gallery"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    set_tuning(True)
    assert _tuning._folder == tmp_path / ".cache" / "triton_gallery"
    set_tuning(True, folder="~/mine")
    assert _tuning._folder == tmp_path / "mine"


def test_refusals():
    with pytest.raises(TypeError, match="set_tuning: enabled must be True or False, got 1"):
        set_tuning(1)
    with pytest.raises(TypeError, match="set_tuning: folder must be a path, got int"):
        set_tuning(True, folder=3)
    for folder in ("~nobody-has-this-name/choices", "a\0b", "a\ud800b", ""):
        with pytest.raises(ValueError, match="set_tuning: folder must be a path that there can be, got"):
            set_tuning(True, folder=folder)
    assert not is_tuning()


def test_a_relative_folder_of_a_lost_directory_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(ValueError, match="set_tuning: folder must be a path that there can be, got 'choices'"):
        set_tuning(True, folder="choices")


def test_products_elsewhere_have_no_choice(monkeypatch, tmp_path):
    """Nothing is tried of matrices in float32 or with rows that TMA cannot address; without a GPU, nothing at all."""
    monkeypatch.setattr(matmul_plan, "run_quickest", lambda *_: pytest.fail("tried"))
    set_tuning(True, folder=tmp_path)
    for a, b in (
        (torch.randn(64, 96, device=DEVICE), torch.randn(96, 64, device=DEVICE)),
        (torch.randn(64, 97, device=DEVICE).half(), torch.randn(97, 64, device=DEVICE).half()),
        *([(torch.randn(64, 96).half(), torch.randn(96, 64).half())] if DEVICE.type == "cpu" else []),
    ):
        torch.testing.assert_close(tg.matmul(a, b), a @ b, atol=2e-2, rtol=2e-2)


# --- products on a Hopper GPU -----------------------------------------------------------------------------------------


def operands(M, N, K, dtype, layouts, n_matrices=None):
    """a and b of these sizes; "t" has a matrix transposed in memory."""
    shape = [] if n_matrices is None else [n_matrices]

    def matrix(n_rows, n_cols, layout):
        sizes = (n_cols, n_rows) if layout == "t" else (n_rows, n_cols)
        x = (torch.randn(*shape, *sizes, device=DEVICE) / 8).to(dtype)
        return x.mT if layout == "t" else x

    return matrix(M, K, layouts[0]), matrix(K, N, layouts[1])


SHAPES = [(304, 528, 64), (16, 1304, 2048), (2000, 32, 4096), (1112, 2048, 512), (272, 1168, 6144), (3000, 1000, 2304)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choices_can_be_kept_and_differ(shape):
    """On any machine: what JSON gives back is what was chosen, and no choice stands twice."""
    pytest.importorskip("triton_gallery.hopper.matmul_specialized")
    M, N, K = shape
    for dtype, n_matrices, reduced in ((torch.float16, 1, False), (torch.bfloat16, 3, False)):
        a, b, out = (
            torch.empty(n_matrices, *sizes, dtype=dtype, device="meta").squeeze(0) for sizes in ((M, K), (K, N), (M, N))
        )
        batch = (n_matrices,), [(M * K,), (K * N,)]
        choices = matmul_plan._choices(a, b, None, out, None, None, reduced, batch)
        texts = [json.dumps(choice) for choice in choices]
        assert 6 <= len(texts) == len(set(texts)) <= 60
        assert [json.loads(text) for text in texts] == choices


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_choice_computes_the_product(shape, layouts):
    check_every_choice(*operands(*shape, torch.float16, layouts))


@pytest.mark.gpu
def test_every_choice_computes_other_products():
    check_every_choice(*operands(300, 520, 1024, torch.bfloat16, "nt", n_matrices=3))
    check_every_choice(*operands(1000, 520, 2048, torch.float8_e4m3fn, "nt"))
    bias = torch.randn(520, device=DEVICE, dtype=torch.bfloat16)
    check_every_choice(*operands(1000, 520, 3072, torch.bfloat16, "nn"), bias=bias, activation="gelu")


def check_every_choice(a, b, bias=None, activation=None):
    batch = ((len(a),), [a.stride()[:1], b.stride()[:1]]) if a.dim() == 3 else ((1,), [(0,), (0,)])
    if not is_hopper(DEVICE):
        pytest.skip("needs a Hopper GPU")
    assert matmul_plan._has_choices(a, b, batch)
    shipped = tg.matmul(a, b, bias=bias, activation=activation)
    exact = tg.matmul(a.double(), b.double(), bias=None if bias is None else bias.double(), activation=activation)
    out = torch.empty_like(shipped)
    tried = []

    def run_each(operation, call, choices, run, device):
        for choice in [*choices(), None]:
            out.fill_(float("nan"))
            run(choice)
            assert_as_accurate_as_torch(out, shipped, exact, floor=1e-3)
            tried.append(choice)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_plan, "run_quickest", run_each)
        patch.setattr(matmul_plan, "is_tuning", lambda: True)
        matmul_plan.multiply(a, b, bias, out, None, activation, False, batch)
    assert len(tried) > 6


@pytest.mark.gpu
def test_a_product_is_tried_once(tmp_path):
    a, b = operands(520, 1032, 1024, torch.float16, "nt")
    if not is_hopper(DEVICE):
        pytest.skip("needs a Hopper GPU")
    shipped = tg.matmul(a, b)
    set_tuning(True, folder=tmp_path)
    results = [tg.matmul(a, b) for _ in range(5)]
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], shipped)
    (file,) = tmp_path.glob("*.json")
    (call,) = json.loads(file.read_text())
    assert call == "520 x 1032 x 1024 nt, float16, rows 2048 and 2048 bytes apart"

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tg.matmul(a, b)
    graph.replay()
    assert torch.equal(captured, results[0])
    gradient = tg.matmul(a.requires_grad_(), b)
    gradient.backward(torch.ones_like(gradient))
    assert len(json.loads(file.read_text())) == 2

    set_tuning(False)
    assert torch.equal(tg.matmul(a.detach(), b), shipped)


@pytest.mark.gpu
def test_what_a_graph_captured_first_is_tried_later(tmp_path):
    a, b = operands(520, 1032, 1024, torch.float16, "nt")
    if not is_hopper(DEVICE):
        pytest.skip("needs a Hopper GPU")
    shipped = tg.matmul(a, b)  # compiled, which a capture cannot do
    set_tuning(True, folder=tmp_path)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tg.matmul(a, b)
    graph.replay()
    assert torch.equal(captured, shipped) and not list(tmp_path.glob("*.json"))
    tg.matmul(a, b)
    assert list(tmp_path.glob("*.json"))
