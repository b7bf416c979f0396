"""Compiled functions in files, called directly: the bits of torch.compile, for nothing but what they were made for.

The tokens of the direct path are tested in test_engine.py and test_standalone.py, which let nothing through Dynamo
after warm-up. Here every call of a block and of a draft head is made three ways (`three_ways.py`).
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import Oracle, build, forget_graphs, request, run, tiny_model, truth_of
from filelock import FileLock
from test_engine import MODEL, eagle3
from three_ways import ThreeWays
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import InductorError
from torch._subclasses.fake_tensor import FakeTensorMode

from minispec.compiled import Key, NotMade, calling
from minispec.cpu import joined
from minispec.engine import Engine
from minispec.load import files as files_module
from minispec.load.files import DirectStep
from minispec.load.machine import CACHE, _code_folder
from minispec.scheduler import Scheduler
from minispec.tree import Shape

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9]


def engine_of(drafter: Any, **options: Any) -> Scheduler:
    """Return a scheduler over a compiled tiny model, in the shapes of test_engine.py, whose compiled code it reuses."""
    model = tiny_model()
    model.compile_blocks(DirectStep)
    return build(model, drafter, compiled=True, **{"running": 2, "pages": 14, "chunk": 100, **options})


@pytest.mark.slow
def test_every_shape_has_the_bits_of_torch_compile_and_eager_is_near() -> None:
    with torch.inference_mode():
        drafter = eagle3()
    scheduler = engine_of(drafter)
    model = scheduler.engine.model
    target = model.run_block = ThreeWays(model.run_block, attend_at=2)
    head = drafter.run_network = ThreeWays(drafter.run_network, attend_at=3)
    paths = drafter.take_in = ThreeWays(drafter.take_in, attend_at=0)
    scheduler.policy.forced = random.Random(1).choice
    for number in range(2):  # one after the other, so that batches of two need not be compiled
        run(scheduler, [request(f"{number}", [*PROMPT, number], max_new_tokens=14)])
    seen = [{(shape.batch, shape.blocks * shape.width) for shape in ways.seen} for ways in (target, head, paths)]
    assert seen[0] == {(1, 128), (1, 6), (1, 3), (1, 1)}, "a prompt, both trees and a plain step"
    assert seen[1] == {(1, 2)}, "a frontier"
    assert seen[2] == {(1, 128), (1, drafter.depth + 1), (1, 3)}, "a prompt, both paths"


def keys_of(engine: Engine) -> list[Tensor]:
    """Return the tensors through which the target's layers reach their keys."""
    attends = [buffers.attend for buffers in (*engine.prefills.values(), *engine.decodes.values())]
    with torch.inference_mode():  # as steps have it, since layer 0 writes what a step reads
        return [attend.layer(index).keys for attend in attends for index in range(engine.model.config.layers)]


def test_engines_do_not_mix_and_their_memory_goes_with_them() -> None:
    schedulers = [engine_of(Oracle(truth_of(MODEL), nodes=6)) for _ in range(2)]
    models = [scheduler.engine.model for scheduler in schedulers]
    texts = []
    for scheduler in schedulers * 2:
        asked = request("r", PROMPT, max_new_tokens=9)
        run(scheduler, [asked])
        texts.append(asked.output_ids)
    assert texts[0] == texts[1] == texts[2] == texts[3]
    calls = [model.run_block.calls for model in models]
    assert len(calls[0]) == len(calls[1]) and not set(calls[0]) & set(calls[1])
    pages = [weakref.ref(keys) for scheduler in schedulers for keys in keys_of(scheduler.engine)]
    del schedulers, scheduler
    gc.collect()
    assert not any(keys() is not None for keys in pages) and not any(calls), "the models, which live on, hold no pages"
    weights = [weakref.ref(weight) for model in models for weight in model.parameters()]
    del models, calls
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def test_other_sizes_are_refused_and_another_layer_is_itself() -> None:
    scheduler = engine_of(Oracle(truth_of(MODEL), nodes=6))
    engine = scheduler.engine
    run(scheduler, [request("r", PROMPT, max_new_tokens=9)])
    model = engine.model
    with torch.inference_mode():
        attend = engine.decodes[1, Shape(6, True)].attend.layer(0)
        x, rope = torch.randn(1, 6, 72), model.rope(torch.zeros(1, 6, dtype=torch.int64))
        near = model.layers[1](x, rope, attend)
        torch.testing.assert_close(model.run_block(model.layers[1], x, rope, attend), near, atol=1e-3, rtol=1e-3)
        with pytest.raises(AssertionError, match="expected size 6==5|expected size 5==6"):
            model.run_block(model.layers[0], x[:, :5], rope, attend)


def test_kernels_that_are_compiled_together_have_the_bits_of_kernels_alone(tmp_path, monkeypatch) -> None:
    files_module.prepare()  # so that compiled headers lie in the cache of all tests
    x, key, found = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)), Numbered(), []
    for most, count in ((1, 3), (joined.MOST, 1)):
        monkeypatch.setenv(CACHE, str(tmp_path / str(most)))
        monkeypatch.setattr(joined, "MOST", most)
        forget_graphs()
        with torch.inference_mode():
            found.append(DirectStep(three_kernels)(x, key))
        assert len(list((tmp_path / str(most)).rglob("*.main.cpp"))) == count
    torch.testing.assert_close(found[0], three_kernels(x, key))
    assert torch.equal(*found)


def three_kernels(x: Tensor, key: Key) -> Tensor:
    """Compute something whose loops lie before, between and behind products."""
    return ((x.sin() @ x.T).cos() @ x).exp() / key.number


def test_a_release_that_differs_compiles_kernels_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = AsyncCompile.wait
    monkeypatch.setattr(CppPythonBindingsCodeCache, "suffix_template", "another")
    joined.join_kernels.__wrapped__()
    assert AsyncCompile.wait is wait


# ---- what a file takes for granted -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A module in whose function each kind of fact is baked in: a number, a type, a size, two tensors that are one."""

    def __init__(self, factor: float = 2.0, norm: nn.Module | None = None, size: int = 4,
                 dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
        super().__init__()
        self.factor, self.norm = factor, norm or nn.Identity()
        self.one = self.other = torch.arange(1.0, 1.0 + size, dtype=dtype)

    def step(self, x: Tensor, key: Key, needs: frozenset[str]) -> Tensor:
        """Compute something of all of it."""
        same = 100.0 if self.one is self.other else 0.0
        return self.norm(x * self.factor) + self.one.sum() + same + key.number + len(needs) + EXTRA + added(x)


EXTRA = 0.5


def added(x: Tensor) -> Tensor:
    """Return what is added."""
    return x * 0


class Numbered(Key):
    """A key with a number."""

    def __init__(self, number: int = 7) -> None:
        self.number = number


def two(owner: Scaled) -> Scaled:
    """Return the module with a copy in place of the one tensor that it had twice."""
    owner.other = owner.one.clone()
    return owner


CHANGES: dict[str, tuple[Callable[[], Scaled], Tensor, int, frozenset[str]]] = {
    "nothing": (Scaled, torch.ones(3), 7, frozenset({"a"})),
    "a number of the owner": (lambda: Scaled(3.0), torch.ones(3), 7, frozenset({"a"})),
    "a type below the owner": (lambda: Scaled(norm=nn.Tanh()), torch.ones(3), 7, frozenset({"a"})),
    "a size of the owner's tensor": (lambda: Scaled(size=5), torch.ones(3), 7, frozenset({"a"})),
    "two tensors that were one": (lambda: two(Scaled()), torch.ones(3), 7, frozenset({"a"})),
    "a dtype of the owner's tensor": (lambda: Scaled(dtype=torch.float64), torch.ones(3), 7, frozenset({"a"})),
    "a number of the key": (Scaled, torch.ones(3), 8, frozenset({"a"})),
    "the needs": (Scaled, torch.ones(3), 7, frozenset({"a", "b"})),
    "an argument's size": (Scaled, torch.ones(5), 7, frozenset({"a"})),
    "an argument's dtype": (Scaled, torch.ones(3, dtype=torch.float64), 7, frozenset({"a"})),
}


def called(owner: Scaled, x: Tensor, number: int, needs: frozenset[str], compiles: bool) -> Tensor:
    """Return what the compiled function gives, as a new process would: what is loaded is forgotten."""
    forget_graphs()
    with torch.inference_mode(), calling(compiles=compiles):
        found: Tensor = DirectStep(Scaled.step)(owner, x, Numbered(number), needs)
        torch.testing.assert_close(found, owner.step(x, Numbered(number), needs))
        return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own, in which the function of "nothing" is made."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(folder))
        called(*(part() if callable(part) else part for part in CHANGES["nothing"]), compiles=True)
        yield folder


@pytest.mark.parametrize("what", CHANGES)
def test_a_file_serves_what_it_was_made_for_and_nothing_else(what: str, cache: Path) -> None:
    make, *rest = CHANGES[what]
    if what == "nothing":
        called(make(), *rest, compiles=False)
        return
    with pytest.raises(NotMade, match="Scaled.step"):
        called(make(), *rest, compiles=False)


def test_a_graph_of_this_process_knows_the_options_that_it_was_made_with(cache: Path) -> None:
    make, *rest = CHANGES["nothing"]
    called(make(), *rest, compiles=False)
    with inductor.patch(emulate_precision_casts=True), calling(compiles=False), pytest.raises(NotMade):
        DirectStep(Scaled.step)(make(), rest[0], Numbered(rest[1]), rest[2])


AROUND = ("a global", "a function", "the source", "the lowerings", "PyTorch", "Python", "the threads", "the processor")


@pytest.mark.parametrize("what", AROUND)
def test_a_file_knows_what_was_around_it(what: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, *rest = CHANGES["nothing"]
    files_module.machine.cache_clear()
    files_module._checksum.cache_clear()
    here = sys.modules[__name__]
    changes: dict[str, Callable[[], Any]] = {
        "a global": lambda: monkeypatch.setattr(here, "EXTRA", 0.25),
        "a function": lambda: monkeypatch.setattr(here, "added", lambda x: x * 0),
        "the source": lambda: monkeypatch.setattr(files_module, "_checksum", lambda module: "another"),
        "the lowerings": lambda: monkeypatch.setattr(files_module, "__file__", "/none/load/files.py"),
        "Python": lambda: monkeypatch.setattr(files_module.platform, "python_version", lambda: "3.99"),
        "PyTorch": lambda: monkeypatch.setattr(torch, "__version__", "2.99.0"),
        "the threads": lambda: undone.enter_context(inductor.patch({"cpp.threads": 77})),
        "the processor": lambda: monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512": False}),
    }
    with ExitStack() as undone:
        changes[what]()
        with pytest.raises(NotMade):
            called(make(), *rest, compiles=False)
    files_module.machine.cache_clear()


@pytest.mark.parametrize(
    "what", ["cut", "another byte", "others may write it", "another's", "a folder above", "a link"]
)
def test_a_file_that_is_damaged_or_could_be_anybody_s_never_runs(
    what: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(cache, tmp_path / "cache")
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    (made,) = (tmp_path / "cache" / "minispec").glob(f"*{files_module.ENDING}")
    make, *rest = CHANGES["nothing"]
    called(make(), *rest, compiles=False)
    content = made.read_bytes()
    if what == "cut":
        made.write_bytes(content[:-100])
    elif what == "another byte":
        made.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif what == "others may write it":
        made.chmod(0o666)
    elif what == "another's":
        mine = made.stat()
        theirs = os.stat_result([*mine[:4], 12345, *mine[5:]])
        monkeypatch.setattr(os, "fstat", lambda file: theirs)
    else:
        (tmp_path / "cache").chmod(0o777)
        _code_folder.cache_clear()
        if what != "a folder above":
            (tmp_path / "link").symlink_to(tmp_path / "cache")
            monkeypatch.setenv(CACHE, str(tmp_path / "link"))
    ran: list[Any] = []
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda *args, **options: ran.append(args))
    with pytest.raises(NotMade):
        called(make(), *rest, compiles=False)
    assert not ran and sum(record.name == "minispec" for record in caplog.records) == 1
    assert "made anew" in caplog.text or "can be written by others" in caplog.text


def test_a_file_for_one_gpu_is_not_found_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        x = torch.empty(2, device="cuda")
    names = ["NVIDIA H100", "NVIDIA H200"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names.pop())
    assert files_module.label_of(added, [x]) != files_module.label_of(added, [x])


def test_a_cache_that_cannot_be_written_is_replaced_with_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, how: "minispec-inductor" in str(path))  # root may write everywhere
    called(Scaled(8.0), torch.ones(3), 7, frozenset({"a"}), compiles=True)
    assert caplog.text.count("minispec cannot be written") == 1 and not list(tmp_path.rglob(f"*{files_module.ENDING}"))


def test_of_two_processes_with_one_cache_one_compiles(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server waits for the other one's file; a process beside a server goes on with other functions."""
    shutil.copytree(cache, tmp_path / "cache")
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    make, *rest = CHANGES["nothing"]
    (made,) = (tmp_path / "cache" / "minispec").glob(f"{Scaled.step.__qualname__}-*{files_module.ENDING}")
    made.rename(tmp_path / "made")
    monkeypatch.setattr(files_module, "compile_function", None)
    x, number, needs = rest
    outputs: dict[Any, Any] = {}
    with ThreadPoolExecutor(1) as server, FileLock(made.with_name(f"{made.name.rsplit('.', 2)[0]}.lock")):
        forget_graphs()
        with calling(outputs=outputs):
            DirectStep(Scaled.step)(make(), x, Numbered(number), needs)
        assert [kind for kind, _ in outputs] == [NotMade]
        waits = server.submit(called, make(), *rest, compiles=True)
        time.sleep(0.2)
        assert not waits.done()
        (tmp_path / "made").rename(made)
    waits.result()


def test_without_a_compiler_files_are_loaded_all_the_same(cache: Path, tmp_path: Path) -> None:
    code = "import test_compiled as t; make, *rest = t.CHANGES['nothing']; t.called(make(), *rest, compiles=False)"
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path), CACHE: str(cache),
           "PYTHONPATH": os.pathsep.join(sys.path),
           "OMP_NUM_THREADS": str(torch.get_num_threads())}  # fmt: skip
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_a_full_disk_costs_the_file_alone(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def full(*args: Any, **options: Any) -> None:
        """Have no room."""
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module.tempfile, "NamedTemporaryFile", full)
    called(Scaled(5.0), torch.ones(3), 7, frozenset({"a"}), compiles=True)
    assert "is not kept: OSError: [Errno 28] No space left on device" in caplog.text


def test_what_a_killed_compiler_left_of_a_library_is_made_anew(cache: Path, tmp_path: Path, monkeypatch) -> None:
    (left := tmp_path / "code.main.so").touch()
    compile_function = files_module.compile_function

    def compile_once_more(function: Any, args: Any) -> Any:
        """Raise what Inductor raises for a library that is there and cut."""
        if left.exists():
            raise InductorError(ImportError(f"{left}: file too short"), None)
        return compile_function(function, args)

    monkeypatch.setattr(files_module, "compile_function", compile_once_more)
    called(Scaled(7.0), torch.ones(3), 7, frozenset({"a"}), compiles=True)
    assert not left.exists()


def test_another_machine_takes_what_fits_from_a_folder(cache: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    make, *rest = CHANGES["nothing"]
    for number, (mode, works) in enumerate([(0o755, True), (0o777, False)]):
        monkeypatch.setenv(CACHE, str(tmp_path / f"own{number}"))
        cache.chmod(mode)
        files_module.take_from(cache)
        with nullcontext() if works else pytest.raises(NotMade):
            called(make(), *rest, compiles=False)
    cache.chmod(0o700)
    assert "can be written by others" in caplog.text
