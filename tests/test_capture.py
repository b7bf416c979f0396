"""A step's operations are recorded once and replayed for other requests, as a CUDA graph does it (`capturing.py`).

So whatever a graph would get wrong shows: a number that Python baked in, a tensor that a later step no longer uses, a
table made while recording and zeroed at each replay. Each replay is compared, bit for bit, with the step run afresh
from the same state, for what its requests need and no more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from capturing import Capture, Recording, looking, reads_all, replays_compared, state_of, without_waiting
from conformance import SUBJECTS, assert_exact
from conftest import slow_unless
from exactness import request, run
from torch import Tensor

from benchmarks.gpu_stages import FULL, TOY, Dummy
from minispec import SamplingParams
from minispec.beam import BeamDrafter
from minispec.buffers import PrefillBuffers
from minispec.cuda.graphs import capture
from minispec.engine import COMPILED, Engine
from minispec.kv import PagedKV
from minispec.request import Logprobs, Request
from minispec.sampling import EVERYTHING, GREEDY, TEMPERED, Needs, SamplingState


class Replays:
    """Steps of an engine, each recorded the first time and afterwards run afresh and as a replay, which must agree."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.recordings: dict[tuple[Any, frozenset[str]], Recording] = {}
        self.compared: Counter[Needs] = Counter()  # by what was needed
        for name in ("decode", "prefill_step"):
            setattr(engine, name, self.compare(getattr(engine, name)))

    def compare(self, step: Callable[..., None]) -> Callable[..., None]:
        """Return the step with the comparison around it."""

        def compared(buffers: Any, needs: frozenset[str]) -> None:
            covering = next(covering for covering in COMPILED if needs <= covering)
            if (buffers, covering) not in self.recordings:
                with Recording() as recording:
                    step(buffers, covering)
                self.recordings[buffers, covering] = recording
                return
            before = [tensor.clone() for tensor in state_of(self.engine, needs)]
            step(buffers, needs)
            after = [tensor.clone() for tensor in state_of(self.engine, needs)]
            for tensor, value in zip(state_of(self.engine, needs), before, strict=True):
                tensor.copy_(value)
            self.recordings[buffers, covering].replay()
            for index, (tensor, value) in enumerate(zip(state_of(self.engine, needs), after, strict=True)):
                assert torch.equal(tensor, value), f"{buffers.name}: a replay leaves another state ({index})"
            self.compared[needs] += 1

        return compared


def replayed(name: str, requests: Sequence[Request] = (), simulated: float | None = None, **wishes: object) -> Replays:
    """Serve requests, by default of many lengths; every step but the first of a kind is replayed."""
    subject = SUBJECTS[name]
    scheduler = subject.build(running=2, host_looks=False, pages=60, simulated=simulated)
    engine = reads_all(scheduler.engine)
    rng, steps = random.Random(2), scheduler.metrics.shapes  # plain steps, which keep what is taken in later, too
    scheduler.policy.forced = lambda shapes: rng.choice(shapes) if steps else shapes[-1]
    replays = Replays(engine)
    with torch.inference_mode():
        run(scheduler, requests or subject.requests(max_new_tokens=10, **wishes)[:5], stagger=2)
    return replays


GROWN = ("standalone", "eagle", "eagle3", "mtp", "trained", "dflash", "dspark")
NAMES = ("none", "ngram", "oracle", *(f"{method}-tree" for method in GROWN), "eagle3-chain", "dflash-chain")


FILTERS = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.9}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 0.9}


TEMPERATURE = {"temperature": 0.9}  # a chain draws its noise as a tree does
QUICK = ("none", "ngram", "eagle3-tree", "standalone-tree", "dflash-tree")  # the other heads have the same drafter
CASES = [(name, wishes) for name in NAMES for wishes in ({}, TEMPERATURE) if not wishes or name in QUICK]
CASES += [(name, wishes) for name in ("none", "standalone-tree", "trained-tree") for wishes in (FILTERS, PENALTIES)]


@pytest.mark.parametrize(("name", "wishes"), slow_unless(CASES, lambda name, wishes: name in QUICK),
                         ids=lambda value: value if isinstance(value, str) else [*value, "greedy"][0])  # fmt: skip
def test_a_replayed_step_is_the_step(name: str, wishes: dict) -> None:
    replays = replayed(name, **wishes)
    assert replays.compared.total() > 8
    needed = {0: GREEDY, 1: TEMPERED}.get(len(wishes), EVERYTHING)
    steps = [step for step, needs in replays.recordings if needs == needed]
    nodes = {0 if isinstance(step, PrefillBuffers) else step.nodes for step in steps}
    assert nodes >= {0, SUBJECTS[name].build().sizes.nodes}, "a prefill step and the tree's were replayed"


# Requests of one slot after another, so that a graph's neutral entries follow others; min_new_tokens end within one.
KINDS = ({}, {"repetition_penalty": 1.05}, {"temperature": 0.9}, {"min_new_tokens": 4}, FILTERS, PENALTIES,
         {"temperature": 0.8, "min_new_tokens": 5}, {"logit_bias": {7: 2.0}}, {})  # fmt: skip


@pytest.mark.parametrize("name", ["none", "standalone-tree"])
def test_replays_serve_requests_of_every_kind_one_after_the_other_and_beside_each_other(name: str) -> None:
    requests = [request(f"r{i}", [i, 2, 30, i, 2], max_new_tokens=8, sampling_seed=i, **wishes)
                for i, wishes in enumerate(KINDS)]  # fmt: skip
    replays = replayed(name, requests)
    assert_exact(SUBJECTS[name], requests)
    assert {needs for _, needs in replays.recordings} == set(COMPILED)
    assert len(replays.compared) > 5, "more sets of needs than graphs"


def test_a_step_is_replayed_by_the_least_graph_that_serves_its_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that stand for themselves on a CPU: they run the step for the needs that they were captured with."""
    scheduler = SUBJECTS["trained-tree"].build(running=2)
    engine, replays = scheduler.engine, []

    class Graph:
        """Stands for a captured step."""

        def __init__(self, step: Callable[..., None], buffers: Any, needs: frozenset[str]) -> None:
            self.given = (step, buffers, needs)

        def replay(self) -> None:
            """Run the step."""
            step, buffers, needs = self.given
            replays.append(needs)
            step(buffers, needs)

    steps = [(engine.decode, buffers) for buffers in engine.decodes.values()]
    steps += [(engine.prefill_step, buffers) for buffers in engine.prefills.values()]
    engine.graphs = {(buffers, needs): Graph(step, buffers, needs) for step, buffers in steps for needs in COMPILED}
    top_p = {"temperature": 1.0, "top_p": 0.8}
    for wishes, least in (({}, GREEDY), ({"temperature": 1.0}, TEMPERED), (top_p, EVERYTHING),
                          ({"frequency_penalty": 1.0}, EVERYTHING), ({"logprobs": Logprobs()}, None)):  # fmt: skip
        replays.clear()
        requests = SUBJECTS["trained-tree"].requests(max_new_tokens=6, **wishes)[:2]
        run(scheduler, requests)
        assert set(replays) == ({least} if least is not None else set())
        assert_exact(SUBJECTS["trained-tree"], requests)


def test_a_step_whose_capture_fails_runs_uncaptured(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, emulator = SUBJECTS["standalone-tree"].build(running=2, host_looks=False), Capture()
    engine, name = reads_all(scheduler.engine), "decode, batch 2, 8 nodes a tree"
    with torch.inference_mode(), emulator.emulated(), looking(name):
        capture(engine, (1, 2), lambda line: None)
    assert emulator.current == "default", "what comes after runs where it ran before"
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} runs uncaptured, since its capture failed: RuntimeError: operation not permitted when stream is "
        "capturing"
    ]
    steps = {step.name: step for step in (*engine.decodes.values(), engine.prefills[engine.sizes.prefill_sizes[0]])}
    failed = steps.pop(name)
    wanted = {(step, needs) for step in steps.values() for needs in COMPILED
              if needs != TEMPERED or getattr(step, "batch", 1) == 1}  # fmt: skip
    assert {*engine.graphs} == wanted, "several requests have no graph for a temperature alone"
    requests = SUBJECTS["standalone-tree"].requests(max_new_tokens=10)[:4]
    run(scheduler, requests)
    assert_exact(SUBJECTS["standalone-tree"], requests)
    assert scheduler.metrics.shapes[failed.nodes] and sum(graph.replays for graph in engine.graphs.values()) > 3


# ---- errors on purpose ----------------------------------------------------------------------------------------------


def a_number_from_the_host(patch: pytest.MonkeyPatch) -> None:
    """Compaction is told the lengths as numbers."""
    compact = PagedKV.compact
    patch.setattr(PagedKV, "compact", lambda kv, slots, lens, path, count: compact(
        kv, slots, torch.tensor(lens.tolist()), path, count))  # fmt: skip


def a_table_made_at_first_use(patch: pytest.MonkeyPatch) -> None:
    """The state at each slot's last row is kept in a table that the first step makes."""

    def attached(drafter: BeamDrafter, *given: object) -> None:
        attach(drafter, *given)
        drafter.made, drafter.state = drafter.state, None

    def proposed(drafter: BeamDrafter, batch: object) -> object:
        if drafter.state is None:
            drafter.state = torch.zeros_like(drafter.made)
        return propose(drafter, batch)

    attach, propose = BeamDrafter.attach, BeamDrafter.propose
    patch.setattr(BeamDrafter, "attach", attached)
    patch.setattr(BeamDrafter, "propose", proposed)
    patch.setattr(BeamDrafter, "commit", lambda drafter, new: None if drafter.state is None else commit(drafter, new))


commit = BeamDrafter.commit


def a_number_that_python_counts(patch: pytest.MonkeyPatch) -> None:
    """The noise depends on how many steps there were."""
    counted = iter(range(1000))
    wishes = SamplingState.wishes
    patch.setattr(SamplingState, "wishes", lambda *given: (
        lambda made: made._replace(seed=made.seed + next(counted)))(wishes(*given)))  # fmt: skip


def a_tensor_that_moves(patch: pytest.MonkeyPatch) -> None:
    """The newest tokens are kept in a new tensor after every step."""
    clear = Engine._clear_padding

    def moved(engine: Engine) -> None:
        clear(engine)
        engine.root = engine.root.clone()

    patch.setattr(Engine, "_clear_padding", moved)


def a_table_of_counts_made_at_first_use(patch: pytest.MonkeyPatch) -> None:
    """How often each token was output is counted in a table that the first step makes which needs it."""
    wishes = SamplingState.wishes

    def made(state: SamplingState, slots: Tensor, needs: Needs) -> object:
        if "counts" in needs and not hasattr(state, "made"):
            state.made = state.tables["counts"] = state.tables["counts"].clone()
        return wishes(state, slots, needs)

    patch.setattr(SamplingState, "wishes", made)


def counts_kept_by_the_host(patch: pytest.MonkeyPatch) -> None:
    """What was output is counted when the host runs the step, so a replay counts nothing."""
    commit = SamplingState.commit

    def counted(state: SamplingState, *given: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():  # a recording does not see it
            commit(state, *given)

    patch.setattr(SamplingState, "commit", counted)


FAULTS = [("trained-tree", {}, a_number_from_the_host), ("eagle3-tree", {}, a_table_made_at_first_use),
          ("none", {"temperature": 0.9}, a_number_that_python_counts), ("none", {}, a_tensor_that_moves),
          ("none", PENALTIES, a_table_of_counts_made_at_first_use), ("none", PENALTIES, counts_kept_by_the_host),
          ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wishes", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_graph_would_get_wrong_is_seen(
    name: str, wishes: dict, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="another state"):
        replayed(name, **wishes)


@pytest.mark.parametrize("wrong", [False, True])
def test_replays_are_compared_bit_by_bit(wrong: bool) -> None:
    scheduler = SUBJECTS["eagle3-tree"].build(running=1, host_looks=False)
    engine = reads_all(scheduler.engine)
    with torch.inference_mode(), Capture().emulated():
        capture(engine, (1,), lambda line: None)
    if wrong:
        graph = engine.graphs[max(engine.graphs, key=lambda key: (getattr(key[0], "nodes", 0), not key[1]))]
        replay = graph.replay
        graph.replay = lambda: (replay(), engine.kv.pool[0, 0, -1].add_(1e-3))
    serve = partial(run, scheduler, SUBJECTS["eagle3-tree"].requests(max_new_tokens=6)[:1])
    with torch.inference_mode():
        if wrong:
            with pytest.raises(AssertionError, match="a replay leaves another state: [0-9]+ numbers"):
                replays_compared(engine, serve)
        else:
            assert replays_compared(engine, serve) > 2


@pytest.mark.cuda
@torch.inference_mode()
def test_a_gpu_replays_the_step_itself_and_its_host_never_waits_in_a_launch() -> None:
    toy = replace(FULL, sizes=tuple({**TOY, "head_dim": 64}.items()), draft_vocab=256, prompt=100)
    with Dummy(toy) as dummy:
        llm = dummy.load(1, toy.eagle3)
    rng, engine = random.Random(1), llm.scheduler.engine
    llm.scheduler.policy.forced = lambda shapes: rng.choice(shapes)

    def reply(wishes: dict[str, Any]) -> None:
        params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True, **wishes})
        llm.serve([llm.request([rng.randrange(3, 500) for _ in range(100)], params)])

    for wishes in KINDS:
        without_waiting(engine, serve := partial(reply, wishes))
        assert replays_compared(engine, serve) > 10
