"""What all tests share: tests marked `cuda` are skipped without a CUDA device, files of tests without the packages that
they import, and a fixture has the default model."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two workers whose OpenMP pools wait for each other are slower than one. Before torch is imported; servers that the
    # tests start inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# With an empty cache Inductor compiles a long file for each kind of vector instructions that the processor has, twelve
# seconds in each process, to see whether the compiler knows them. One that knows the newest knows all; what compiles
# for a server says the same (`minispec.load.files.prepare`).
if (
    shutil.which("g++")
    and not subprocess.run(
        ["g++", "-mavx512bf16", "-mamx-bf16", "-E", "-x", "c++", os.devnull], capture_output=True, check=False
    ).returncode
):
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch

from minispec.config import Config
from minispec.cpu import template
from minispec.load.default_model import DefaultModelError, ensure_default_model
from minispec.model import Block

# Every shape of an engine is a graph of the same functions, and a worker runs the engines of many tests. What loads a
# model for a user raises the limit by the shapes of its engine (`Build`); most tests make their engines without it.
torch._dynamo.config.recompile_limit = 64
template.lower()  # as `files.prepare` does: some tests call torch.compile themselves


def slow_unless(cases: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Return the cases of a parametrization; those for which `quick` is False are marked slow."""
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*values, marks=() if quick(*values) else pytest.mark.slow) for values in several]


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Return as soon as a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def free_port() -> int:
    """Return a port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


NO_MODEL = "the default model cannot be had"
# Packages that a machine may lack and still run the tests of the core, those marked `cuda` among them.
OPTIONAL = ("gguf", "hypothesis", "llguidance", "openai", "prometheus_client", "pydantic", "pydantic_core",
            "ray", "xdist")  # fmt: skip
TALLY = "tally"  # the property in which a test reports what became of a drafter's trees
LONGEST = ("test_graphs.py", "test_served.py", "test_exactness.py", "test_warming.py", "test_gpu_benchmark.py",
           "test_windows.py", "test_served_methods.py", "test_replicas.py", "test_raylets.py", "test_experts.py",
           "test_overlap.py", "test_engine.py", "test_cuda_path.py", "test_rowwise.py", "test_compiled.py",
           "test_reliability.py", "test_attention.py", "test_small.py", "test_launch_commands.py")  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--drafter module:Class` runs test_exactness.py on a drafter of one's own, docs/adding-a-drafter.md."""
    parser.addoption("--drafter", help="module:Class of a drafter to run the exactness suite on")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests lacked the default model; with --drafter, what became of its trees.

    The fewer trees were proposed, verified and accepted, the less was tested.
    """
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_MODEL in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"Tests skipped since {NO_MODEL}: {len(skipped)}.")
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    counts = [value for report in reports for name, value in report.user_properties if name == TALLY]
    if counts and config.getoption("--drafter"):
        from conformance import Tally

        total = Tally(*map(sum, zip(*counts, strict=True)))
        terminalreporter.write_line(f"{config.getoption('--drafter')} was {total}.")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """With `-n`, give a worker whole files: one server, or one compiled model, serves all tests of a file."""
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "loadscope"
        config.option.loadscopereorder = False  # the order below, not the number of tests, says what begins first
        # A worker that dies ends the run with the name of its test: one started in its place would wait for ever for
        # whole files, which pytest-xdist has given out already.
        config.option.maxworkerrestart = "0"


class TestFile(pytest.Module):
    """A file of tests. Where it imports a package of `OPTIONAL` that is not installed, it is skipped with its name."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Return the tests; where MINISPEC_CI is set, nothing is skipped."""
        try:
            return super().collect()
        except self.CollectError as error:
            lacking = (getattr(error.__cause__, "name", None) or "").partition(".")[0]
            if lacking not in OPTIONAL or os.environ.get("MINISPEC_CI"):
                raise
            pytest.skip(f"{self.path.name}: {lacking} is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Collect files of tests as `TestFile` says."""
    return TestFile.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let workers begin with the files that take minutes, so that none ends alone; skip what needs a GPU."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def default_model_is_lacking(error: DefaultModelError) -> NoReturn:
    """Fail a test that needs the default model where MINISPEC_CI is set, and skip it elsewhere."""
    if os.environ.get("MINISPEC_CI"):
        pytest.fail(f"MINISPEC_CI is set, and the default model cannot be had: {error}", pytrace=False)
    pytest.skip(f"{NO_MODEL}: {error}")


@pytest.fixture(scope="module", autouse=True)
def shared_models_stay_eager() -> Iterator[None]:
    """See that a file compiles copies of the models in `trained.SHARED`, which other files run eagerly."""
    yield
    for model in sys.modules["trained"].SHARED if "trained" in sys.modules else ():
        assert model.run_block is Block.forward, "a test has compiled a model that all tests share"


@pytest.fixture(autouse=True)
def no_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow machine look up and mask as many drafts as a fast one; both are bounded by measured times."""
    monkeypatch.setattr("minispec.ngram.SHARE", 1e9)
    monkeypatch.setattr("minispec.asked.grammar.DRAFT_SECONDS", 60.0)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The converted default model, made once per machine; where it cannot be had, see `default_model_is_lacking`."""
    try:
        return ensure_default_model(lambda line: None)
    except DefaultModelError as error:
        default_model_is_lacking(error)


@pytest.fixture(scope="session")
def tiny(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model whose greedy text is the script of test_server.py, again and again."""
    from test_server import script, scripted  # here: it imports what a machine may lack
    from transformers import AutoTokenizer

    ids = script(AutoTokenizer.from_pretrained(demo_folder))
    return scripted(demo_folder, tmp_path_factory.mktemp("models") / "tiny", [*ids, ids[0]])


@pytest.fixture(scope="module")
def served(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server of the tiny model, a `Running`, with the options of all and those that the module names in SERVED."""
    from test_server import Running, options, ready

    with ready(Running(Config(**options(tiny, **getattr(request.module, "SERVED", {}))))) as running:
        yield running


@pytest.fixture
def timeless(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the policy of the server find all steps equally fast, so that which trees it takes depends on no clock."""
    times = SimpleNamespace(of=lambda kind, shape: 1.0, add=lambda kind, shape, seconds: None)
    monkeypatch.setattr(served.server.engine.llm.scheduler.policy, "times", times)
