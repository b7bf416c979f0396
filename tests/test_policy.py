"""The choice of shapes, on simulated clocks; and that forcing another shape at every step changes no token and no tree.

The simulation is independent of the policy: it has true step times and true chances, draws both with noise, and counts
what was delivered. The engine's side is compared with plain decoding and, tree by tree, with the slow reference of
test_beam.py, under an adversary that leaves gaps of every length up to a full ring.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conformance import HALF, SUBJECTS, WISHES, assert_exact, random_head
from exactness import VOCAB, Oracle, build, mixed_requests, reference, request, run, truth_of
from test_beam import assert_slow_trees, record

from minispec.beam import BeamDrafter
from minispec.buffers import PrefillBuffers
from minispec.config import Config
from minispec.drafter import NOTHING, Committed, Draft, Drafter, HostDrafter
from minispec.eagle import Eagle3Head
from minispec.engine import Engine
from minispec.late import KEPT_ROWS, Late
from minispec.load.tree_shape import allows, beam_shape
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.policy import Kind, Policy, Times
from minispec.request import Request, SamplingParams
from minispec.scheduler import Scheduler
from minispec.seats import Seats
from minispec.serve.info import stats_of
from minispec.standalone import DraftModel, StandaloneDrafter
from minispec.tree import PLAIN, Shape

MODEL = SUBJECTS["none"].model()
TREES = {5: 1, 6: 2}
FIVE, SIX = Shape(5, True), Shape(6, True)
SHAPES = (PLAIN, FIVE, SIX)


def sized(nodes: int) -> Shape:
    """Return the shape of a plain step for 1, else of one whose trees the drafter proposes."""
    return Shape(nodes, nodes > 1)


# ---- the policy alone ------------------------------------------------------------------------------------------------


class World:
    """A machine and texts: seconds of a step by batch and nodes, and the chance that a draft is accepted."""

    def __init__(self, seconds: dict[tuple[int, int], float], chance: float, seed: int = 0) -> None:
        self.seconds, self.chance, self.rng = seconds, chance, random.Random(seed)
        self.policy, self.slow = Policy(TREES, adapts_from=1), 1.0
        self.policy.restart({(batch, sized(nodes)): took for (batch, nodes), took in seconds.items()})
        self.clock, self.tokens = 0.0, 0

    def steps(self, count: int, batch: int = 1, requests: Sequence[Request] | None = None) -> list[int]:
        """Play steps of `batch` requests; returns the nodes of the trees in each."""
        requests, taken = requests or some(batch), []
        for _ in range(count):
            planned = self.policy.before(Kind(batch), SHAPES, requests, lambda: ())
            nodes = planned.shape.nodes
            seconds = self.slow * self.seconds[batch, nodes] * self.rng.uniform(0.9, 1.1)
            emitted = {request: [0] * self._emits(nodes) for request in requests}
            self.policy.after(planned, emitted, seconds)
            self.clock += seconds
            self.tokens += sum(map(len, emitted.values()))
            taken.append(nodes)
        return taken

    def _emits(self, nodes: int) -> int:
        accepted = 0
        while accepted < TREES.get(nodes, 0) and self.rng.random() < self.chance:
            accepted += 1
        return 1 + accepted


def some(count: int) -> list[Request]:
    return [Request(f"r{i}", [1], SamplingParams()) for i in range(count)]


FLAT = {(1, 1): 20.0, (1, 5): 24.0, (1, 6): 27.0, (8, 1): 40.0, (8, 5): 75.0, (8, 6): 90.0}


@pytest.mark.parametrize(
    ("chance", "seconds", "best"),
    [
        (0.6, FLAT, 6),  # 1.96 / 27 beats 1.6 / 24 and 1 / 20
        (0.4, {**FLAT, (1, 6): 40.0}, 5),  # 1.4 / 24 beats 1 / 20
        (0.05, FLAT, 1),
        (0.9, {**FLAT, (1, 5): 200.0, (1, 6): 300.0}, 1),
    ],
)
def test_it_converges_to_the_fastest_shape_and_stays(chance: float, seconds: dict, best: int) -> None:
    world = World(seconds, chance)
    world.steps(600)
    clock, tokens = world.clock, world.tokens
    assert (world.steps(2000).count(1) > 1800) == (best == 1)
    depth = TREES.get(best, 0)
    fastest = sum(chance**level for level in range(depth + 1)) / seconds[1, best]
    assert (world.tokens - tokens) / (world.clock - clock) > 0.94 * fastest, "two sizes of tree are nearly level"


def test_shapes_as_good_as_each_other_make_it_change_seldom() -> None:
    world = World({(1, 1): 20.0, (1, 5): 30.0, (1, 6): 1000.0}, chance=0.5)  # 1.5 tokens in 1.5 times the time
    world.steps(500)
    taken = world.steps(2000)
    assert sum(a != b for a, b in zip(taken, taken[1:], strict=False)) < 2000 * 0.05


@pytest.mark.parametrize("chance", [0.0, 0.15, 0.3, 0.45])
def test_trees_that_do_not_pay_are_tried_now_and_then_for_a_fiftieth_of_the_time_at_most(chance: float) -> None:
    world, requests = World({(1, 1): 20.0, (1, 5): 34.0, (1, 6): 40.0}, chance), some(1)
    world.steps(300, requests=requests)
    clock, tokens = world.clock, world.tokens
    taken = world.steps(5000, requests=requests)
    assert 5 < sum(nodes != 1 for nodes in taken)
    lost = world.clock - clock - (world.tokens - tokens) * 20.0  # beyond what plain steps would have taken
    assert lost < 0.02 * (world.clock - clock)


def test_plain_texts_that_become_easy_are_noticed() -> None:
    world, requests = World(FLAT, 0.02), some(1)
    assert world.steps(1500, requests=requests)[-500:].count(1) > 420
    world.chance = 0.9
    world.steps(2000, requests=requests)
    assert world.steps(200, requests=requests).count(1) < 20


def test_load_of_one_eight_and_one_brings_drafts_back() -> None:
    world = World(FLAT, 0.6)
    world.steps(300)
    assert world.steps(300, batch=8)[50:].count(1) > 230, "eight at once are decoded plainly"
    assert world.steps(50)[3:].count(1) < 5, "and one alone has its trees at once, with what was learned before"


def test_a_request_has_a_record_of_its_own_that_begins_with_that_of_all() -> None:
    policy, (good, bad, new, silent) = Policy(TREES, 1), some(4)
    silent.undrafted = True
    before = policy.expected(good, None, SIX)
    assert before > policy.expected(good, None, FIVE) > 1, "a deeper tree is expected to emit more"
    policy.forced = lambda shapes: SIX
    for _ in range(30):
        planned = policy.before(Kind(4), SHAPES, [good, bad, silent], lambda: ())
        assert planned.verified(silent) == (None, 0) and planned.verified(good) == ("head", 5)
        policy.after(planned, {good: [0] * 3, bad: [0], silent: [0]}, None)
    assert policy.expected(good, None, SIX) > 2.5 > 1.5 > policy.expected(bad, None, SIX)
    assert 1.7 < policy.expected(new, None, SIX) < 2.4, "who wants no drafts says nothing of them"


def shares_of_trees(tells: bool) -> list[float]:
    """Return which share of steps has trees where texts are easy, and where they are hard, in stretches of 25 steps.

    tells: whether the head knows where that is, though it finds every draft half as likely as it is.
    """
    world, requests, taken = World(FLAT, 0.0), some(1), {0.9: list[int](), 0.02: list[int]()}
    if tells:
        world.policy.says = lambda request: [world.chance / 2] * 2
    for _ in range(40):
        for world.chance, steps in taken.items():
            steps += world.steps(25, requests=requests)
    return [sum(nodes > 1 for nodes in steps[500:]) / 500 for steps in taken.values()]


def test_a_head_that_says_where_texts_are_hard_drafts_there_seldom() -> None:
    easy, hard = shares_of_trees(tells=True)
    assert easy > 0.7 and hard < 0.3, (easy, hard)
    easy, hard = shares_of_trees(tells=False)
    assert abs(easy - hard) < 0.2, (easy, hard)


def test_a_request_that_wants_no_drafts_is_plain_alone_and_does_not_count_beside_others() -> None:
    policy, (wants, not_) = Policy(TREES, adapts_from=8), some(2)
    not_.undrafted = True
    shape = lambda batch, *requests, offer=(): policy.before(Kind(batch), SHAPES, requests, lambda: offer).shape  # noqa: E731
    assert shape(2, not_) == PLAIN and shape(2, not_, wants) == SIX
    assert shape(2, wants, offer=[NOTHING]) == PLAIN, "no tree to verify"
    policy.restart({(batch, shape): shape.nodes for batch in (4, 8) for shape in SHAPES})
    assert shape(4, wants) == SIX
    assert shape(8, wants) == PLAIN, "wide batches adapt: a tree of six takes six times as long as a plain step"


def test_times_begin_as_measured_and_follow_the_steps() -> None:
    times, greedy, sampled = Times({(1, PLAIN): 20.0, (1, SIX): 30.0}), Kind(1), Kind(1, True)
    assert times.of(sampled, SIX) == times.of(greedy, SIX) == 30.0
    for _ in range(200):
        times.add(sampled, PLAIN, 20.0)
        times.add(sampled, SIX, 40.0)
    assert 1.9 < times.of(sampled, SIX) / times.of(sampled, PLAIN) < 2.1 and times.of(greedy, SIX) == 30.0
    before = times.of(sampled, SIX)
    times.add(sampled, SIX, 40_000.0)
    assert times.of(sampled, SIX) < 1.03 * before, "a hiccup"
    assert times.of(Kind(4), SIX) == 1.0
    times.add(Kind(4), PLAIN, 5.0)
    assert times.of(Kind(4), SIX) == times.of(Kind(4), PLAIN), "so that it is tried"
    times.add(Kind(4), SIX, 10.0)
    assert times.of(Kind(4), SIX) > times.of(Kind(4), PLAIN)


def test_a_slow_minute_is_not_taken_for_a_slow_shape() -> None:
    world, requests = World({(1, 1): 20.0, (1, 5): 200.0, (1, 6): 26.0}, 0.6), some(1)
    for world.slow in (1.0, 2.0, 1.0, 3.0, 1.0):
        world.steps(300, requests=requests)
        assert world.steps(300, requests=requests).count(6) > 280
    worse = World({(1, 1): 20.0, (1, 5): 200.0, (1, 6): 36.0}, 0.3)
    for worse.slow in (1.0, 2.0, 1.0):
        worse.steps(300, requests=requests)
        assert worse.steps(300, requests=requests).count(1) > 270


def test_matches_learn_from_a_guess_that_expects_nothing_of_chance() -> None:
    policy, (one,) = Policy({12: 11, 4: 3, 2: 1}, 1, has_lookups=True), some(1)

    def expected(nodes: int, match: int) -> float:
        return policy.expected(one, Draft([1, 2], [-1, 0], match), Shape(nodes, False))

    assert expected(12, 6) == 3.0 and expected(2, 6) == 2.0 and expected(12, 2) == 1.0
    for _ in range(60):
        policy.follow(one, Draft([1, 2], [-1, 0], 6), [9])
    assert expected(12, 6) < 1.1 and expected(12, 5) == 2.5


# ---- another shape at every step -------------------------------------------------------------------------------------


def eagle3(steps: int = 3, topk: int = 2, nodes: int = 6, smaller: tuple[int, int] = (1, 3)) -> BeamDrafter:
    """Return a drafter with two tree sizes around a random head."""
    return BeamDrafter(HEAD, rounds=steps, topk=topk, nodes=nodes, smaller=[smaller])


with torch.inference_mode():
    HEAD = random_head(Eagle3Head, MODEL, taps=(1, 2), token_map=HALF)

DRAFTERS: dict[str, tuple[Callable[[], Drafter | HostDrafter], dict[str, object]]] = {
    "ngram": (lambda: NgramDrafter(NgramOptions(nodes=8), limited=True), {"smaller": 4}),
    "oracle": (lambda: Oracle(truth_of(MODEL)), {"smaller": 4}),
    "eagle3": (eagle3, {}),
    "standalone": (
        lambda: StandaloneDrafter(DraftModel(MODEL, VOCAB), rounds=3, topk=3, nodes=8, smaller=[(1, 3)]),
        {},
    ),
}


def adversary(seed: int) -> Callable[[Sequence[Shape]], Shape]:
    """Return a choice of shapes that goes on for a while with one and then takes another, after one step or many."""
    rng, left, chosen = random.Random(seed), 0, PLAIN

    def choose(shapes: Sequence[Shape]) -> Shape:
        nonlocal left, chosen
        if left == 0:
            left, chosen = rng.choice((1, 1, 1, 2, 5, 17)), rng.choice(shapes)
        left -= 1
        return chosen if chosen in shapes else shapes[-1]

    return choose


def forced(name: str, seed: int = 0, **how: object) -> Scheduler:
    """Return a scheduler whose every step has a shape that the adversary chose."""
    make, options = DRAFTERS[name]
    with torch.inference_mode():
        scheduler = build(MODEL, make(), **{"adaptive": True, **options, **how})
    scheduler.policy.forced = adversary(seed)
    return scheduler


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("wishes", [{}, WISHES], ids=["greedy", "seeded"])
def test_tokens_stay_the_same_under_forced_shapes(name: str, wishes: dict) -> None:
    subject = SUBJECTS["none"]  # its truths are those of the same weights, remembered between tests
    tight = forced(name, seed=1, pages=15, overlap=True)
    roomy = forced(name, seed=2)
    for scheduler, length in ((tight, 40), (roomy, 16), (roomy, 16)):  # the last with prefix hits
        requests = mixed_requests(max_new_tokens=length, **wishes)
        run(scheduler, requests)
        assert_exact(subject, requests)
    assert tight.metrics.retractions > 0 and roomy.metrics.cached_tokens > 100
    assert len(tight.metrics.shapes | roomy.metrics.shapes) == 3


def test_a_choice_of_its_own_changes_no_token() -> None:
    scheduler = forced("eagle3")
    scheduler.policy.forced = None
    requests = mixed_requests(max_new_tokens=16)
    run(scheduler, requests)
    assert_exact(SUBJECTS["none"], requests)


def serve_with_gaps() -> list[tuple]:
    """Serve texts so long that rings fill up, then a second turn that hits pages of plain steps; returns the trees."""
    scheduler = forced("eagle3", running=2, chunk=32)
    sizes = iter([6, *[1] * 70, 6, 1, 6, 3, *[1] * 9, *[3, 6] * 5])  # 70 plain steps are more than a ring holds
    scheduler.policy.forced = lambda shapes: sized(next(sizes, 1))
    compare = record(scheduler)
    first = [request("a", range(20), max_new_tokens=140), request("b", [7, 8], max_new_tokens=130)]
    run(scheduler, first)
    turn = request("c", [*first[0].prompt_ids, *first[0].output_ids, 5], max_new_tokens=14)
    scheduler.policy.forced = max
    run(scheduler, [turn])
    assert turn.cached_tokens == 144 and turn.output_ids == reference(MODEL, turn)
    return compare


def assert_trees() -> None:
    """Raise AssertionError unless the trees after gaps are the slow reference's."""
    compare = serve_with_gaps()
    large = [one for one in compare if len(one[1]) == 6]
    small = [one for one in compare if len(one[1]) == 3]
    assert_slow_trees(large[:12], 3, 2, 6, head=HEAD)  # the ring was full, and ran over
    assert_slow_trees(large[-11:], 3, 2, 6, head=HEAD)  # on pages of the prefix cache
    assert_slow_trees(small, 1, 2, 3, every=2, head=HEAD)


def test_trees_after_a_return_are_the_slow_reference_s() -> None:
    assert_trees()


def test_what_waits_in_the_ring_is_told_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of slots with more rows than a query block, where one wrong row among many changes no tree."""
    told: list[tuple[int, int, int, int]] = []  # slot, position, its token, the token after it
    served: dict[int, Request] = {}
    backlog = Late._backlog

    def noted(self: Late, buffers: PrefillBuffers) -> Committed:
        new = backlog(self, buffers)
        served.update({one.slot: one for one in scheduler.running})
        live = (torch.arange(buffers.width) < buffers.sizes[:, None]).flatten()
        of_row = buffers.slots.repeat_interleave(buffers.width)
        rows = torch.stack((of_row, new.positions[0], new.tokens[0], new.following[0]), dim=1)
        told.extend(map(tuple, rows[live].tolist()))
        return new

    monkeypatch.setattr(Late, "_backlog", noted)
    scheduler = forced("eagle3", running=2)
    sizes = iter([6, *[1] * 45, 6, 6, *[1] * 20, 6])
    scheduler.policy.forced = lambda shapes: sized(next(sizes, 6))
    both = [request("a", range(20), max_new_tokens=90), request("b", [7, 8], max_new_tokens=90)]
    run(scheduler, both)
    assert len(told) >= 2 * (45 + 20)
    for slot, position, token, after in told:
        assert served[slot].ids[position : position + 2] == [token, after], f"row {position} of slot {slot}"


def a_row_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The ring keeps a row in the next one's place."""
    keep = Late.keep
    patch.setattr(Late, "keep", lambda self, slots, rows, *what: keep(self, slots, rows + 1, *what))


def a_position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The drafter takes rows in as if they stood one further."""
    backlog = Late._backlog
    patch.setattr(Late, "_backlog", lambda self, buffers: (
        lambda new: new._replace(positions=new.positions + 3))(backlog(self, buffers)))  # fmt: skip


def taps_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """The ring keeps the features of the step before."""
    keep, old = Late.keep, {}

    def late(self: Late, slots: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor) -> None:
        before = old.get(features.shape, features)
        old[features.shape] = features
        keep(self, slots, rows, tokens, before)

    patch.setattr(Late, "keep", late)


def a_ring_that_overflows(patch: pytest.MonkeyPatch) -> None:
    """The drafter does not catch up when the ring is full, only before trees, and takes in what is left there."""
    launch = Engine.launch

    def launched(self: Engine, slots: Sequence[int], shape: Shape, drafts: Sequence[object]) -> object:
        for slot in slots if shape == PLAIN else ():
            self.late.waiting[slot] = min(self.late.waiting[slot], KEPT_ROWS - 1)
        return launch(self, slots, shape, drafts)

    patch.setattr(Engine, "launch", launched)


def pages_without_draft_rows(patch: pytest.MonkeyPatch) -> None:
    """The drafter does not catch up before pages enter the prefix cache."""
    share = Seats.share

    def shared(self: Seats, *given: object) -> None:
        self.catch_up = lambda slots: None
        share(self, *given)

    patch.setattr(Seats, "share", shared)


MUTATIONS = [a_row_off_by_one, a_position_off_by_one, taps_of_the_step_before, a_ring_that_overflows,
             pages_without_draft_rows]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_every_error_shows(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match="after"):
        assert_trees()


# ---- requests that want no drafts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["oracle", "standalone"])
def test_a_request_may_opt_out(name: str) -> None:
    make, options = DRAFTERS[name]
    with torch.inference_mode():
        scheduler = build(MODEL, make(), **options)
    alone = request("alone", range(9), speculative=False)
    run(scheduler, [alone])
    assert stats_of(scheduler)["tree_steps"] == 0 and set(alone.verified.steps) == {None}
    beside, other = request("beside", range(9), speculative=False), request("other", range(5), max_new_tokens=40)
    run(scheduler, [beside, other])
    assert stats_of(scheduler)["tree_steps"] > 5 and other.verified.accepted.total() > 0
    assert dict(beside.verified.steps) == {None: 23} and not beside.verified.drafted[None]
    assert_exact(SUBJECTS["none"], [alone, beside, other])


def test_a_file_bounds_the_rounds_by_batch_and_plain_steps_are_always_allowed(tmp_path: Path) -> None:
    file = tmp_path / "adaptive.json"
    options = dict(model_path="x", speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_eagle_topk=1,
                   speculative_adaptive=True, speculative_adaptive_config=str(file))  # fmt: skip

    def allowed(said: object, batch: int) -> list[int]:
        file.write_text(said if isinstance(said, str) else json.dumps(said))
        config = Config(**options)
        shape = beam_shape(config, "LlamaForCausalLM", on_cpu=True)
        assert (shape["nodes"], shape["smaller"]) == (4, [(1, 2)])
        policy = Policy({2: 1, 4: 3}, 1)
        policy.allows = allows(config, {4: 3, 2: 1})
        seen: list[Shape] = []
        policy.forced = lambda shapes: (seen.extend(shapes), PLAIN)[1]
        requests = [Request(str(i), [1], SamplingParams()) for i in range(batch)]
        shapes = (PLAIN, Shape(2, True), Shape(4, True), Shape(4, False))
        policy.before(Kind(batch), shapes, requests, lambda: ())
        assert seen[0] == PLAIN and seen[-1] == Shape(4, False), "looked-up trees have no rounds"
        return [shape.nodes - 1 for shape in seen[1:-1]]

    steps = {"1": [1, 3, 7], "4": [1], "6": [0]}
    said = {"ema_alpha": 0.2, **{least: {"candidate_steps": few, "up_hysteresis": 0.0} for least, few in steps.items()}}
    assert [allowed(said, batch) for batch in (1, 3, 4, 6)] == [[1, 3], [1, 3], [1], []]
    for wrong, why in (
        ("[", "Expecting"),
        ({}, "names no batch"),
        ([], "must be a JSON object"),
        ({"1": {}}, "candidate_steps of 1"),
        ({"1": {"candidate_steps": [-1]}}, "candidate_steps of 1"),
        ({"alpha": 1}, "unknown key 'alpha'"),
        ({"ema_alpha": "x"}, "ema_alpha must be a number"),
    ):
        with pytest.raises(ValueError, match=f"^--speculative-adaptive-config .*{why}"):
            allowed(wrong, 1)
