"""PyTorch's graph trees, a row of bench.py on CUDA, as far as a CPU shows them: what is asked of PyTorch, and when.

With graph trees the outputs of a compiled call lie in memory that the calls of the next step overwrite. Here that is
done on purpose: at the beginning of each step everything that blocks and draft networks returned before is made NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conformance import SUBJECTS
from exactness import CPU, build, request, run, tiny_model
from test_llm import CONFIG
from test_memory import OPTIONS, folder_of
from torch import Tensor

import bench
import minispec.llm as llm_module
from benchmarks import throughput
from minispec import LLM, SamplingParams
from minispec.compiled import compile_step
from minispec.drafter import Plain
from minispec.engine import Engine

CUDA = torch.device("cuda")
PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9]


class Compilers:
    """Stands in for torch.compile: notes what is asked for, and which inputs of its graphs are said to stay."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.moving: list[set[str]] = []  # by graph, the inputs that do not stay
        self.compile = torch.compile
        torch._dynamo.reset()  # graphs that other tests left behind would serve
        patch.setattr(torch, "compile", self)

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return the function traced and run eagerly."""
        self.asked.append(options)
        return self.compile(function, fullgraph=True, dynamic=False, backend=self.backend)

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Note the inputs of one graph, and run it as it is."""
        kept = "_dynamo_static_input_type"
        nodes = graph.graph.find_nodes(op="placeholder")
        self.moving.append({n.name.strip("_").lower() for n in nodes if not n.meta["tensor_dict"].get(kept)})
        return graph.forward


def test_the_mode_is_max_autotune_and_all_but_the_activations_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = request("eager", PROMPT, max_new_tokens=5)
    run(build(tiny_model(), Plain(), running=1), [expected])
    compilers = Compilers(monkeypatch)
    compile_step(Plain.propose, CUDA)
    model, given = tiny_model(), {"fullgraph": True, "dynamic": False}
    model.compile_blocks(partial(compile_step, device=CUDA, graph_trees=True))
    assert compilers.asked == [given | {"mode": mode} for mode in ("max-autotune-no-cudagraphs", "max-autotune")]
    found = request("compiled", PROMPT, max_new_tokens=5)
    run(build(model, Plain(), running=1, compiled=True), [found])
    assert found.output_ids == expected.output_ids
    # One graph for all layers: no layer's pages or weights are guarded by their identity. A plain step and a prompt.
    assert len(compilers.moving) == 2 and compilers.moving[1] == {"l_x", "l_rope_cos", "l_rope_sin"}


@pytest.mark.parametrize("name", ["none", "eagle3-tree", "standalone-tree", "mtp-chain"])
def test_nothing_that_a_block_returns_outlives_its_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, texts = SUBJECTS[name], []
    for poisoned in (False, True):
        scheduler = subject.build(running=2, pages=60)
        engine, made, counts = scheduler.engine, [], {"begun": 0, "run": 0}

        def kept(function: Callable[..., Tensor], made: list[Tensor] = made) -> Callable[..., Tensor]:
            def call(*args: Any) -> Tensor:
                made.append(function(*args))
                return made[-1]

            return call

        def counted(step: Callable[..., None], counts: dict[str, int] = counts) -> Callable[..., None]:
            def call(*args: Any) -> None:
                counts["run"] += 1
                step(*args)

            return call

        def begin(made: list[Tensor] = made, counts: dict[str, int] = counts) -> None:
            counts["begun"] += 1
            assert made or counts["begun"] == 1, "the step before ran no block"
            while made:
                made.pop().fill_(torch.nan)

        with monkeypatch.context() as patch:
            if poisoned:
                patch.setattr(engine, "begin_step", begin)
                for step in ("decode", "known"):
                    patch.setattr(engine, step, counted(getattr(engine, step)))
                network = engine.drafter.network
                for owner, what in ((engine.model, "run_block"), (engine.drafter, "run_network"),
                                    (getattr(network, "model", None), "run_block")):  # fmt: skip
                    if hasattr(owner, what):
                        patch.setattr(owner, what, kept(getattr(owner, what)))
            requests = subject.requests(max_new_tokens=6)[:4]
            run(scheduler, requests, stagger=2)
        assert not poisoned or counts["begun"] == counts["run"] > 8, "PyTorch is told once of every step"
        texts.append([r.output_ids for r in requests])
    assert texts[0] == texts[1]


def test_an_engine_with_graph_trees_tells_of_its_steps_and_captures_none(tmp_path, monkeypatch) -> None:
    marks, steps, warm_ups = [], [], []
    monkeypatch.setattr(llm_module, "check_graph_trees", lambda device, compiles: None)
    monkeypatch.setattr(llm_module, "captured_batches", lambda *_: pytest.fail("a step would be captured"))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    for name in ("decode", "known"):
        step = getattr(Engine, name)
        monkeypatch.setattr(Engine, name, lambda *args, step=step: (steps.append(1), step(*args))[1])
    warm_up = Engine.warm_up
    monkeypatch.setattr(Engine, "warm_up", lambda *args: (warm_ups.append(1), warm_up(*args))[1])
    llm = LLM(folder_of(tmp_path / "m", CONFIG), graph_trees=True, **OPTIONS)
    warm = len(steps)
    llm.generate([5, 6, 7], SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(warm_ups) == 2 and len(marks) == len(steps) == warm + 4, "a prompt and three tokens after its first"


def test_on_a_cpu_graph_trees_are_refused(tmp_path, monkeypatch, capsys) -> None:
    said = "graph trees need CUDA graphs, so the device must be cuda; got cpu"
    with pytest.raises(ValueError, match=said):
        LLM(folder_of(tmp_path / "m", CONFIG), graph_trees=True, **OPTIONS)
    with pytest.raises(ValueError, match=said):
        compile_step(Plain.propose, CPU, graph_trees=True)
    monkeypatch.setattr("sys.argv", ["bench.py", "--device", "cpu", "--algorithm", "none", "--graph-trees"])
    with pytest.raises(SystemExit):
        bench.parse()
    assert f"--graph-trees: {said}" in capsys.readouterr().err
    monkeypatch.setattr(llm_module, "choose_device", lambda config: CUDA)
    monkeypatch.setattr("sys.argv", ["bench.py", "--algorithm", "none", "--graph-trees", "--disable-torch-compile"])
    with pytest.raises(SystemExit):
        bench.parse()
    assert "--disable-torch-compile must not be given" in capsys.readouterr().err


def test_the_benchmark_adds_a_row_for_each_method_of_ours(monkeypatch) -> None:
    made = []
    monkeypatch.setattr(throughput, "LLM", lambda **options: made.append(options))
    monkeypatch.setattr(llm_module, "choose_device", lambda config: CUDA)
    monkeypatch.setattr("sys.argv", ["bench.py", "--algorithm", "none", "ngram", "--graph-trees", "--batch", "1"])
    rows = bench.entrants(bench.parse())
    assert [row.name for row in rows] == ["none", "none, graph trees", "ngram", "ngram, graph trees"]
    for row in rows:
        row.load(print)
    assert [options.get("graph_trees", False) for options in made] == [False, True, False, True]
    assert {options["max_total_tokens"] for options in made} == {4096}, "several pools fit beside each other"
    assert {options["batches"] for options in made} == {(1,)}, "the batch sizes asked for alone are compiled"
