"""What CUDA compiles, traced on a CPU: each graph has a name, all are made before serving, each does what is wanted.

On a GPU FlexAttention and every function are compiled, on a CPU a few. Here engines on a CPU are compiled as on CUDA,
by backends that make no kernels: `eager` runs what Dynamo traced, and `aot_eager` what AOTAutograd makes of it. The
kernels themselves are the matter of test_cuda_path.py.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_memory
import torch
from capturing import whole
from conformance import random_head
from conftest import slow_unless
from exactness import VOCAB, Traced, build, reference, request, run, tiny_model, trace_only
from test_capture import Replays
from test_config import DOCUMENTED
from torch._dynamo import lookup_backend
from torch.nn.attention import flex_attention
from trained import trained_dflash, trained_model

from minispec.attention import PagedFlex
from minispec.beam import BeamDrafter
from minispec.compiled import NotMade, Step, calling
from minispec.dflash import DFlashDrafter
from minispec.drafter import Drafter, HostDrafter, Plain
from minispec.eagle import Eagle3Head, HeadConfig
from minispec.engine import Engine
from minispec.kv import KVShape, PagedKV
from minispec.load import files
from minispec.load.architectures import read_model_config
from minispec.load.build import resolve_sizes
from minispec.load.files import DirectStep, compile_function
from minispec.load.flags import config_from_args
from minispec.load.tree_shape import beam_shape
from minispec.load.warm_up import rehearse_step, steps_of, warm_up
from minispec.lookup import Lookups
from minispec.model import Model
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.scheduler import Scheduler

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
NODES = 8


def texts(limited: bool = False) -> NgramDrafter:
    """Return a drafter over texts."""
    return NgramDrafter(NgramOptions(nodes=NODES), limited)


def eagle3(model: Model, **how: Any) -> BeamDrafter:
    """Return a random head that drafts in four rounds, so that what lies between rounds runs twice."""
    how = {"rounds": 4, "topk": 2, "nodes": 6, **how}
    return BeamDrafter(random_head(Eagle3Head, model, taps=(1, 2), own_lm_head=True), **how)


DRAFTERS: dict[str, Callable[[Model], Drafter | HostDrafter]] = {
    "none": lambda model: Plain(),
    "ngram": lambda model: texts(),
    "eagle3": eagle3,
    # of two sizes, as those that ship
    "lookups": lambda model: Lookups(eagle3(model, smaller=[(1, 3)]), texts(limited=True), VOCAB),
    "dflash": lambda model: DFlashDrafter(copy.deepcopy(trained_dflash()), block=4, topk=2, nodes=6, smaller=3),
}


class Made:
    """The graphs that were made: how many of each function, and how often they ran."""

    def __init__(self, backend: str, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.backend, self.graphs, self.runs = backend, Counter[str](), 0
        self.compiled = set[Callable[..., Any]]()
        self.of_any_batch: set[str] = set()  # functions of which a graph takes batches of any size
        trace_only(patch, folder)
        patch.setattr(files, "BACKEND", self.compile)
        patch.setattr(files, "compile_function", self.note)
        self.function = ""

    def note(self, function: Step, args: Any) -> Any:
        """Note which function is compiled."""
        self.function = function.__qualname__
        return compile_function(function, args)

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Traced:
        """Compile a graph by a backend that makes no kernels."""
        self.graphs[self.function] += 1
        if any(isinstance(value, torch.SymInt) for value in inputs):
            self.of_any_batch.add(self.function)
        compiled = lookup_backend(self.backend)(graph, inputs)
        self.compiled.add(compiled)
        recorded = whole(compiled)

        def run(*flat: Any) -> Any:
            self.runs += 1
            return recorded(*flat)

        return Traced(run, inputs)

    def assert_of_any_batch(self, several: bool) -> None:
        """Raise unless one graph after the blocks serves all batches, if there are several; attention has its own."""
        assert not {function for function in self.of_any_batch if "forward" in function}
        assert ("Engine._after_blocks" in self.of_any_batch) == several


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """What is compiled from now on, by `eager`."""
    return Made("eager", monkeypatch, tmp_path)


def compiled_as_on_cuda(name: str, running: int, flex: bool = True) -> Scheduler:
    """Return a scheduler whose functions are all compiled when they first run."""
    model = copy.deepcopy(trained_model()) if name == "dflash" else tiny_model()
    with torch.inference_mode():
        drafter = DRAFTERS[name](model)
    scheduler = build(model, drafter, host_looks=False, pages=60, running=running, flex=flex)
    engine = scheduler.engine
    engine.compile_small(DirectStep, lambda batch, nodes: True)
    engine.drafter.compile(DirectStep)
    model.compile_blocks(DirectStep)
    return scheduler


# ---- and does what eager code does -----------------------------------------------------------------------------------

KINDS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.9}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}, {"repetition_penalty": 1.3},
)  # fmt: skip


@pytest.mark.parametrize(("name", "running", "steps"), slow_unless(
    [("none", 4, 15), ("lookups", 1, 30), ("ngram", 2, 15), ("dflash", 1, 15)], lambda name, *_: name == "none"
))  # fmt: skip
def test_after_warm_up_no_graph_is_made_and_tokens_are_those_of_plain_decoding(
    name: str, running: int, steps: int, made: Made
) -> None:
    """Requests of every kind arrive and end one after the other, so batches change, and take plain steps and trees.

    With lookups there are steps of every kind: prefill, plain, the head's trees and those of the host, and the head
    catches up. A head and a draft model are asked the same below, where steps are replayed.
    """
    requests = [request(f"r{i}", [i % 50, 2, 30, i % 50, 2], max_new_tokens=4 + 3 * (i % 6), sampling_seed=i,
                        **KINDS[i % 4]) for i in range(6 * steps // 15)]  # fmt: skip
    scheduler = compiled_as_on_cuda(name, running)
    engine, rng = scheduler.engine, random.Random(4)
    scheduler.policy.forced = lambda shapes: rng.choice(shapes)
    with torch.inference_mode():
        warm_up(engine, lambda line: None)
        made.assert_of_any_batch(running > 1)
        before, begun = made.graphs.copy(), engine.changes
        with calling(compiles=False):
            run(scheduler, requests, stagger=2)
    assert made.graphs == before and engine.changes - begun >= steps
    eager = trained_model() if name == "dflash" else tiny_model()
    assert [r.output_ids for r in requests] == [reference(eager, r) for r in requests]


class Counted(Replays):
    """Replays of steps whose functions are compiled: how many compiled graphs a recording holds, and a step runs."""

    def __init__(self, engine: Engine, made: Made) -> None:
        self.made, self.counts = made, dict[str, set[int]]()
        super().__init__(engine)

    def compare(self, step: Callable[..., None]) -> Callable[..., None]:
        """Count the graphs that the step runs, recorded for the first time and afresh."""

        def counted(buffers: Any, needs: frozenset[str]) -> None:
            before = self.made.runs
            step(buffers, needs)
            self.counts.setdefault(f"{buffers.name}, {sorted(needs)}", set()).add(self.made.runs - before)

        return super().compare(counted)

    def held(self) -> dict[str, int]:
        """Return how many compiled graphs each recording holds."""
        return {f"{buffers.name}, {sorted(needs)}": sum(func in self.made.compiled for func, *_ in recording.operations)
                for (buffers, needs), recording in self.recordings.items()}  # fmt: skip


@pytest.mark.parametrize("name", slow_unless(["none", "eagle3"], lambda name: name == "none"))
def test_a_replay_of_compiled_functions_is_the_step(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a GPU captures them: what AOTAutograd made of each function is recorded, once it is compiled, and replayed.

    AOTAutograd lets no argument share memory with another. No graph is made after warm-up, and the tokens are those of
    plain decoding. With drafters batches are of one request, since each size has graphs of its own. Steps of other
    drafters are recorded uncompiled (test_capture.py): compiled they take minutes.
    """
    made = Made("aot_eager", monkeypatch, tmp_path)
    scheduler = compiled_as_on_cuda(name, 2 if name == "none" else 1)
    engine, rng = scheduler.engine, random.Random(2)
    scheduler.policy.forced = lambda shapes: rng.choice(shapes)
    greedy, sampled = (
        [request(f"{i} {wishes}", [i, 2, 30, i, 2], max_new_tokens=6 + 3 * i, sampling_seed=i, **wishes)
         for i in range(4)] for wishes in ({}, KINDS[2] if name == "eagle3" else {}))  # fmt: skip
    with torch.inference_mode():
        warm_up(engine, lambda line: None)
        replays = Counted(engine, made)
        with calling(compiles=False):
            for requests in (greedy, sampled):
                run(scheduler, requests, stagger=2)
    eager = tiny_model()
    assert [r.output_ids for r in greedy + sampled] == [reference(eager, r) for r in greedy + sampled]
    assert replays.compared.total() > 8
    for recording, graphs in replays.held().items():
        assert replays.counts[recording] == {graphs} and graphs >= engine.model.config.layers, recording


# ---- few enough to wait for ------------------------------------------------------------------------------------------


def documented(*dropped: str) -> list[str]:
    """Return the flags of the documented command for Llama 3.1 and EAGLE-3, without the flags dropped."""
    named = (command.argv for command in DOCUMENTED if "EAGLE3" in command.argv)
    flags = next(flags for flags in named if "meta-llama/Llama-3.1-8B-Instruct" in flags)
    named = zip(flags[::2], flags[1::2], strict=False)
    return [word for flag, value in named if flag not in dropped for word in (flag, value)]


NUMBERS = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
GRAPHS = ("--cuda-graph-max-bs", "--mem-fraction")
LLAMA = {**test_memory.LLAMA, "max_position_embeddings": 131072}


def graphs_on_an_h100(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how many graphs of each function a command has, from the rehearsal of an engine without memory."""
    test_memory.gpu(monkeypatch, 80, 80)
    config, device = config_from_args(flags), torch.device("meta")
    shape = read_model_config(LLAMA)
    with torch.inference_mode():
        model = Model.empty(shape, torch.bfloat16, device)
        head = Eagle3Head.empty(HeadConfig("eagle3", shape.plain(), (2, 16, 29), torch.arange(32000)), model)
        drafter = BeamDrafter(head, **beam_shape(config, shape.architecture, on_cpu=False))
        limits = {"context_length": shape.context_length, "max_running": 48, "chunk_size": 2048}
        sizes = resolve_sizes(config, torch.device("cuda"), limits, drafter)
        rows = shape.context_length + sizes.tree_rows
        kv = PagedKV(KVShape(shape.layers, shape.kv_heads, shape.head_dim), pages=100, page_size=64, slots=49,
                     rows_per_slot=rows, zeros=model.norm.weight.new_zeros)  # fmt: skip
        engine = Engine(model, kv, drafter, sizes, attend_kind=PagedFlex)
        engine.compile_small(DirectStep, lambda batch, nodes: True)
        model.compile_blocks(DirectStep)
        drafter.compile(DirectStep)
        found = set[tuple[str, str]]()

        def note(function: Step, args: Any, label: str) -> None:
            """Note what is asked for, as if another process made it."""
            found.add((function.__qualname__, label))
            raise NotMade

        monkeypatch.setattr(files, "find", note)
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # it knows no meta device
        for step in steps_of(engine):
            rehearse_step(engine, step)
    return Counter(function for function, _ in found)


def test_the_documented_command_has_at_most_fifty_graphs_with_its_numbers_or_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dropped in ((*NUMBERS, *GRAPHS), GRAPHS):
        counts = graphs_on_an_h100(documented(*dropped), monkeypatch)
        print(counts.total(), counts)
        assert 40 < counts.total() <= 50
