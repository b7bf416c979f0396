"""Lookups beside a head: the same tokens whatever bets are taken, a head that is never behind, and lookups for free."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conformance import FEW, WISHES, Subject, Tally, assert_exact, truth
from conftest import slow_unless
from exactness import MIXTURE, VOCAB, WINDOWED, build, check, request, run, tiny_model
from test_beam import MODEL, assert_slow_trees, drafter
from test_trace import assert_told_truly, watched
from trained import sentence, trained_head, trained_like, trained_model

from minispec.beam import BeamDrafter
from minispec.buffers import Sizes
from minispec.config import Config
from minispec.drafter import NOTHING, Batch, Draft, HostTrees, TreeSize
from minispec.engine import Engine
from minispec.late import KEPT_ROWS, Late
from minispec.load.drafters import _texts, make_drafter
from minispec.load.tree_shape import beam_shape, lookup_nodes, trees_by_batch
from minispec.lookup import Lookups
from minispec.ngram import SHARE, Echo, NgramDrafter, NgramOptions
from minispec.policy import Kind, Planned, Policy
from minispec.request import Hints, Request
from minispec.scheduler import Scheduler
from minispec.standalone import DraftModel, StandaloneDrafter
from minispec.tree import PLAIN, Shape

N = 10


def texts(nodes: int = N) -> NgramDrafter:
    return NgramDrafter(NgramOptions(nodes=nodes), limited=True)


def beside(head: BeamDrafter) -> Lookups:
    return Lookups(head, texts(), VOCAB)


PAIRS = {
    "head": Subject(
        lambda model: beside(BeamDrafter(trained_head(), rounds=2, topk=3, nodes=N, smaller=[(2, 5)])),
        model=trained_model,
        text=sentence,
    ),
    "chain": Subject(
        lambda model: beside(BeamDrafter(trained_head(), rounds=3, topk=1, nodes=4)), model=trained_model, text=sentence
    ),
    "standalone": Subject(lambda model: beside(StandaloneDrafter(DraftModel(model, VOCAB), rounds=2, topk=2, nodes=5))),
}


def bet(policy: Policy, takes: Callable[[], bool]) -> None:
    """Let `takes` decide, where the policy would, whether a request takes the looked-up tree."""
    decide, expect = policy._trees, policy.expected

    def trees(shape: Shape, *offered: object) -> dict:
        policy.expected = lambda request, draft, of: 1.5 if draft is None else 1 + takes()
        made = decide(shape, *offered)
        policy.expected = expect
        return made

    policy._trees = trees


def adversary(scheduler: Scheduler, seed: int = 0) -> list[Planned]:
    """Let a seed choose every step's shape and every request's bet; returns the plans that were made."""
    rng, policy, made = random.Random(seed), scheduler.policy, []
    policy.forced = lambda shapes: rng.choice(shapes)
    bet(policy, lambda: rng.random() < 0.5)
    before = policy.before

    def noted(*given: object) -> Planned:
        plan = before(*given)
        made.append(plan)
        return plan

    policy.before = noted
    return made


def repeating(subject: Subject, count: int = 6, **params: object) -> list[Request]:
    """Return requests whose prompts repeat a phrase, half of them with replies of four ids."""
    requests = []
    for i in range(count):
        phrase = subject.text(9, random.Random(i))
        wishes = {**(dict(temperature=0.0), FEW)[i % 2], **params}
        requests.append(request(f"r{i}", phrase * 4, sampling_seed=i, max_new_tokens=30, **wishes))
    return requests


ON_OTHERS = {f"head, {what}": replace(PAIRS["head"], model=partial(trained_like, **switches), tally=Tally(), built=[])
             for what, switches in (("windows", WINDOWED), ("experts", MIXTURE))}  # fmt: skip


@pytest.mark.parametrize("name", slow_unless([*PAIRS, *ON_OTHERS], lambda name: name in PAIRS))
def test_no_bet_changes_a_token(name) -> None:
    subject = (PAIRS | ON_OTHERS)[name]
    for how in (dict(), dict(pages=15)):
        scheduler = subject.build(**how)
        made = adversary(scheduler)
        for again in range(2):  # the second time with prefix hits, where pages are left for any, and every wish
            requests = repeating(subject, **(WISHES if again and not how else {}))
            run(scheduler, requests)
            assert_exact(subject, requests)
        assert how or sum(r.cached_tokens for r in requests) > 50
        assert not how or scheduler.metrics.retractions > 0
        assert {plan.shape.of_host for plan in made} == {True, False}
        both = [{tree is None for tree in plan.verifies.values()} for plan in made if plan.shape.drafts]
        assert {True, False} in both, "no step had both"
        assert scheduler.metrics.verified.steps["lookup"] > 10


def test_a_step_in_which_the_head_drafts_nothing_says_nothing_of_its_trees(monkeypatch) -> None:
    monkeypatch.setattr("minispec.ngram.SHARE", 0.0)  # texts are looked up in themselves alone, so not all find one
    subject, drafted, found = PAIRS["head"], [], [0, 0]
    scheduler = subject.build()
    made = adversary(scheduler)
    learn, before = scheduler.policy._learn, scheduler.policy.before

    def learned(*given: object) -> None:
        drafted.append(made[-1].shape)  # a CPU has no step in flight, so this is the step that is taken in
        learn(*given)

    def chosen(*given: object) -> Planned:
        plan = before(*given)
        if plan.shape.of_host:
            found[0] += len(plan.verifies)
            found[1] += len(plan.offered) - len(plan.verifies)
        return plan

    scheduler.policy._learn, scheduler.policy.before = learned, chosen
    run(scheduler, repeating(subject))
    assert min(found) > 3, "of the requests in steps of lookups some had a tree looked up, and some had none"
    assert len(drafted) > 10
    assert all(shape.drafts for shape in drafted), "a row without a tree counted as one whose drafts were all refused"


@pytest.mark.parametrize("name", ["head", "chain"])
def test_a_trace_has_the_head_s_probabilities_for_its_own_trees_and_none_for_trees_that_were_looked_up(name) -> None:
    subject = PAIRS[name]
    scheduler = subject.build()
    adversary(scheduler)
    requests = watched(repeating(subject), every=1)
    run(scheduler, requests)
    assert_exact(subject, requests)
    found = {True: 0, False: 0}
    for r in requests[::2]:  # the others have a bias, which the slow reader of traces does not know
        assert_told_truly(r, subject.model())
    for r in requests:
        for step in r.trace.steps:
            (*drafted,) = {p is not None for p in step["draft"][1:]}
            assert len(drafted) <= 1, "a tree is looked up or drafted"
            found.update({kind: found[kind] + 1 for kind in drafted})
            assert step["source"] == {(True,): "head", (False,): "lookup", (): None}[tuple(drafted)]
    assert min(found.values()) > 10


# ---- the head is never behind, and each row has its own tree ------------------------------------------------------


def served(
    monkeypatch: pytest.MonkeyPatch, bets: Callable[[], bool], lookup_steps: int, new_tokens: int = 70
) -> list[tuple]:
    """Serve sampled requests of few ids; every step after so many of lookups alone has the head's rounds.

    Checks every row's tree, and returns texts with the trees that the head grew after them. Asserts that steps of
    lookups ran no round and emitted more than the head's trees are deep.
    """
    head = drafter(2, 2, 5, coupled=False)
    scheduler = build(MODEL, Lookups(head, texts(), VOCAB))
    compare: list[tuple] = []
    plans: list[Planned] = []
    propose, grow, before = scheduler.engine.drafter.propose, head.propose, scheduler.policy.before
    steps = itertools.cycle([Shape(N, False)] * lookup_steps + [Shape(N, True)])
    scheduler.policy.forced = lambda shapes: next(steps)
    bet(scheduler.policy, bets)
    rounds, emitted = 0, []

    def chosen(*given):
        plans.append(before(*given))
        return plans[-1]

    def grown(batch: Batch):
        nonlocal rounds
        rounds += 1
        tree = grow(batch)
        slots = {r.slot: r for r in scheduler.running}
        for row, slot in enumerate(batch.slots.tolist()):
            if slot:
                compare.append((slots[slot].ids, tree.tokens[row].tolist(), tree.parents[row].tolist()))
        return tree

    def proposed(batch: Batch):
        tree = propose(batch)
        check(tree)
        own = {request.slot: request for request in plans[-1].offered}
        for row, slot in enumerate(batch.slots.tolist()):
            if slot:
                request = own[slot]
                draft = plans[-1].verifies.get(request)
                found = (tree.tokens[row].tolist(), tree.parents[row].tolist())
                theirs = next((t, p) for ids, t, p in reversed(compare) if ids == request.ids)
                wanted = (draft.tokens, draft.parents) if draft is not None else theirs
                rest = N - len(wanted[0])
                assert found[0][1:] == [*wanted[0], *[-1] * rest][1:] and found[1] == [*wanted[1], *[0] * rest]
        return tree

    monkeypatch.setattr(scheduler.policy, "before", chosen)
    head.propose, scheduler.engine.drafter.propose = grown, proposed
    after = scheduler.policy.after

    def taught(plan, tokens, *times):
        if plan.shape.of_host:
            emitted.extend(map(len, tokens.values()))
        after(plan, tokens, *times)

    scheduler.policy.after = taught
    requests = [
        request(f"r{i}", [3, 8, 21, 34, i] * 3, sampling_seed=i, max_new_tokens=new_tokens, **FEW) for i in range(4)
    ]
    run(scheduler, requests)
    assert all(r.output_ids == truth(MODEL, r) for r in requests)
    assert rounds == sum(plan.shape.drafts for plan in plans) > 3, "a step of lookups ran the head's rounds"
    assert not lookup_steps or max(emitted) > head.depth + 1, "a lookup is cut to the depth of the head's trees"
    return compare


def test_after_steps_of_lookups_the_head_drafts_as_the_slow_reference(monkeypatch) -> None:
    assert_slow_trees(served(monkeypatch, lambda: False, 3), 2, 2, 5)


def test_lookups_that_emit_more_than_the_ring_holds_are_taken_in_before_it_is_too_full(monkeypatch) -> None:
    taken, catch_up = [], Late.catch_up

    def noted(self, slots):
        waiting = list(self.waiting)
        catch_up(self, slots)
        taken.append(sum(waiting) - sum(self.waiting))

    monkeypatch.setattr(Late, "catch_up", noted)
    compare = served(monkeypatch, lambda: False, 25, new_tokens=240)
    assert max(taken) > KEPT_ROWS - N
    assert_slow_trees(compare, 2, 2, 5, every=3)


def test_each_row_of_a_step_has_the_tree_that_it_bets_on(monkeypatch) -> None:
    rng = random.Random(3)
    assert_slow_trees(served(monkeypatch, lambda: rng.random() < 0.5, 0), 2, 2, 5, every=5)


def forgotten_path(patch: pytest.MonkeyPatch) -> None:
    """The ring has nothing of the path that a step of lookups accepted."""
    keep = Late.keep
    patch.setattr(
        Late, "keep", lambda self, slots, rows, *kept: None if rows.shape[1] > 1 else keep(self, slots, rows, *kept)
    )


def features_of_the_next_row(patch: pytest.MonkeyPatch) -> None:
    """The ring has each row's features one place too early."""
    keep = Late.keep
    patch.setattr(
        Late, "keep", lambda self, slots, rows, tokens, features: keep(self, slots, rows, tokens, features.roll(-1, 1))
    )


def rows_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A step of lookups counts as one row that waits, as a plain step does."""
    collect = Engine.collect

    def counted(self, pending):
        waiting, keeps = list(self.late.waiting), pending.keeps
        found = collect(self, pending)
        if keeps:
            for slot in pending.slots:
                self.late.waiting[slot] = waiting[slot] + 1
        return found

    patch.setattr(Engine, "collect", counted)


def other_row_s_mask(patch: pytest.MonkeyPatch) -> None:
    """Each row looks whether the one before takes a lookup."""
    where = torch.where
    patch.setattr(
        "minispec.lookup.torch.where",
        lambda taken, a, b: where(taken.roll(1, 0) if taken.shape[-1] == 1 and a.dtype == torch.int64 else taken, a, b),
    )


def shallow_paths(patch: pytest.MonkeyPatch) -> None:
    """Paths are as long as the head's trees are deep."""
    init = Lookups.__init__

    def shallow(self, head, shared, vocab_size):
        init(self, head, shared, vocab_size)
        self.depth = head.depth

    patch.setattr(Lookups, "__init__", shallow)


MUTATIONS = [forgotten_path, features_of_the_next_row, rows_not_counted, other_row_s_mask, shallow_paths]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_mistake_is_seen(mutation, monkeypatch) -> None:
    mutation(monkeypatch)
    rng = random.Random(3)
    mixed = mutation is other_row_s_mask
    with pytest.raises(AssertionError):
        compare = served(monkeypatch, lambda: mixed and rng.random() < 0.5, 0 if mixed else 8, new_tokens=140)
        assert_slow_trees(compare, 2, 2, 5)


# ---- what is found, and what it costs -----------------------------------------------------------------------------


def test_an_echo_is_what_followed_the_last_occurrence() -> None:
    rng = random.Random(0)
    for _ in range(300):
        text, echo = [rng.randrange(3) for _ in range(rng.randrange(1, 60))], Echo()
        cut = rng.randrange(len(text))
        echo.extend(text[:cut])
        echo.extend(text[cut:])
        found = echo.draft(echo.text, 6, longest=5)
        places = ((i, key) for key in (3, 2) for i in range(len(text) - 1, key - 1, -1))
        ends = ((i, key) for i, key in places if text[i - key : i] == text[-key:])
        at, key = next(ends, (0, 0))
        if not at:
            assert found == NOTHING
            continue
        match = max(m for m in range(key, 6) if m <= at and text[at - m : at] == text[-m:])
        periodic = text[at:] * 6
        assert found == Draft([text[-1], *periodic[:5]], [-1, 0, 1, 2, 3, 4], match)


def test_the_longest_match_drafts_and_what_is_expected_counts() -> None:
    both = texts(4)
    both.observe(1, [1, 2, 3, 4, 5, 6, 1, 2, 3])
    both.observe(2, [9, 9, 2, 3, 7])
    assert both.draft([1, 2])[0] == Draft([3, 4, 5, 6], [-1, 0, 1, 2], 3)
    both.hint(1, Hints([5, 6, 1, 2, 3, 30, 31]))
    first = both.draft([1])[0]
    assert (first.tokens, first.match) == ([3, 30, 31], 5)
    both.release(1)
    both.observe(1, [5, 6, 1, 2, 3])
    assert both.draft([1])[0].tokens[:2] != [3, 30], "what was expected of one request is not of the next"


def test_ngram_keeps_to_its_share_of_the_time_unless_its_trees_are_given() -> None:
    def made(**flags: object) -> HostTrees:
        return make_drafter(Config(speculative_algorithm="NGRAM", **flags), tiny_model(), Path("m"), None)

    assert made().inner.limited
    assert not made(speculative_num_draft_tokens=8).inner.limited
    assert not made(speculative_adaptive=False).inner.limited
    sizes = Sizes.resolve(made(), context_length=64, max_running=8, chunk_size=128,
                          trees=trees_by_batch(made(), 8, on_cpu=True))  # fmt: skip
    one, both = (PLAIN, Shape(4, True)), (PLAIN, Shape(4, True), Shape(12, True))
    assert [sizes.shapes_of(batch) for batch in (1, 2, 4, 8)] == [both, both, one, one]


@pytest.mark.parametrize(
    ("sizes", "rounds", "on_cpu", "table"),
    [((2, 8, 32), 5, False, [(1, [32]), (16, [8]), (48, [2])]), ((2, 8), 5, False, [(16, [8]), (48, [2])]),
     ((6, 12), None, False, [(10, [6, 12]), (48, [6])]), ((16,), 1, False, [(48, [16])]), ((), None, False, []),
     ((8, 16), 1, False, [(8, [8, 16]), (48, [8])]),
     ((2, 8), 3, True, [(2, [8]), (48, [2])]), ((4, 12), None, True, [(2, [4, 12]), (48, [4])])],
)  # fmt: skip
def test_a_batch_has_the_largest_trees_whose_rows_cost_a_gpu_little(sizes, rounds, on_cpu, table) -> None:
    drafter = SimpleNamespace(trees=[TreeSize(n, n - 1, rounds if n > 2 else 1) for n in sizes], rounds=rounds)
    assert trees_by_batch(drafter, 48, on_cpu) == table


def test_flags_bound_the_trees_that_a_gpu_gives_to_batches() -> None:
    def smaller(**flags: object) -> list[tuple[int, int]]:
        return beam_shape(Config(model_path="x", speculative_algorithm="EAGLE3", **flags), "LlamaForCausalLM", False)[
            "smaller"
        ]

    given = {"speculative_num_steps": 5, "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 32}
    assert smaller() == [(1, 2)] and smaller(**given) == [(1, 2), (5, 8)]
    assert smaller(**given | {"speculative_num_draft_tokens": 6}) == [(1, 2)]
    assert smaller(**given, speculative_adaptive=False) == smaller(**given, simulate_acc_len=2.0) == []
    assert smaller(speculative_num_steps=1, speculative_eagle_topk=1, speculative_num_draft_tokens=2) == []
    head = BeamDrafter(trained_head(), rounds=2, topk=3, nodes=N, smaller=[(1, 2), (2, 8)])
    assert Lookups(head, texts(), VOCAB, awaits_corpus=True).trees == head.trees, "corpora that may come change no size"


def test_what_a_lookup_would_have_given_is_known_when_the_text_has_gone_on() -> None:
    policy, one, learned = Policy({4: 3}, True), object.__new__(Request), []
    policy._match = lambda nodes, match: SimpleNamespace(learn=lambda tokens, _: learned.append((nodes, match, tokens)))
    tree = Draft([5, 1, 2, 3], [-1, 0, 1, 2], 3)
    for offered, tokens in ((NOTHING, [4]), (tree, [1]), (NOTHING, [2])):
        policy.follow(one, offered, tokens)
    assert not learned
    policy.follow(one, NOTHING, [9, 9])
    assert learned == [(4, 3, 3)]
    policy.follow(one, tree, [1, 2, 3])
    policy.follow(one, NOTHING, [8])
    assert learned[1:] == [(4, 3, 4)], "the whole tree and the target's own token"
    policy.follow(one, tree, [7])
    assert learned[2:] == [(4, 3, 1)]


def test_indexing_stays_within_its_share_and_the_rest_waits(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("minispec.ngram.SHARE", SHARE)
    monkeypatch.setattr("time.perf_counter", lambda: clock.__setitem__(0, clock[0] + 1e-5) or clock[0])
    both = texts()
    both.observe(1, list(range(50)) * 100)
    for _ in range(100):
        both.observe(1, [7])
        before = clock[0]
        both.draft([1])
        assert clock[0] - before < SHARE * 0.02 + 1e-4
        clock[0] += 0.02
    assert 2000 < len(both._texts[1].waiting) < 4500, "some was indexed, and not all at once"


def test_the_policy_takes_the_better_bet_and_spares_the_head_where_all_are_lookups() -> None:
    policy, requests = Policy({5: 2, 10: 2}, adapts_from=1, has_lookups=True), repeating(PAIRS["chain"], 2)
    shapes = (PLAIN, Shape(5, True), Shape(10, True), Shape(5, False), Shape(10, False))
    policy.restart({(2, shape): took for shape, took in zip(shapes, (1.0, 1.2, 1.3, 1.05, 1.15), strict=True)})

    def taken(*matches: int) -> tuple[Shape, list[bool | None]]:
        """Return the shape, and for each request whether it takes the looked-up tree; None: it verifies no tree."""
        offered = [Draft([1, 2], [-1, 0], match) if match else NOTHING for match in matches]
        plan = policy.before(Kind(2), shapes, requests, lambda: offered)
        return plan.shape, [plan.verifies[r] is not None if r in plan.verifies else None for r in requests]

    assert taken(12, 0) == (Shape(10, True), [True, False])
    assert taken(12, 11) == (Shape(10, False), [True, True])
    for _ in range(50):
        policy.follow(requests[0], Draft([1, 2], [-1, 0], 12), [9])
    assert taken(12, 12)[1] == [False, False]
    requests[0].undrafted = True
    assert taken(11, 0)[1] == [None, False]


def test_texts_are_looked_up_where_that_is_asked_for_beside_what_drafts_on_the_device() -> None:
    numbers = dict(speculative_num_steps=2, speculative_eagle_topk=4, speculative_num_draft_tokens=6)
    asked = Config(speculative_lookup=True)
    assert asked.has_lookups(True) and asked.has_lookups(False)
    assert not Config(speculative_lookup=False).has_lookups(True)
    assert Config().has_lookups(True) and not Config().has_lookups(False) and not Config(**numbers).has_lookups(True)
    assert not Config(speculative_algorithm="NGRAM", speculative_lookup=True).has_lookups(True)
    assert Config(**numbers).may_look_up and not Config(**numbers, speculative_lookup=False).may_look_up
    assert not Config(speculative_algorithm="NGRAM").may_look_up, "it looks up by itself"
    assert lookup_nodes(Config(**numbers), 6) == 6 and lookup_nodes(asked, 6) == 8
    assert not Config(speculative_ngram_capacity=1000, speculative_lookup=True).notes, "they act beside a head"
    assert Config(speculative_ngram_capacity=1000, speculative_lookup=False).notes


@pytest.mark.parametrize(("least", "found"), [(1, 2), (2, 2), (3, 0), (5, 0)])
def test_min_match_bounds_what_a_request_s_own_text_gives(least: int, found: int) -> None:
    config = Config(speculative_algorithm="NGRAM", speculative_ngram_min_match_window_size=least, device="cpu")
    drafter = _texts(config, tiny_model())
    assert drafter.limited
    drafter.observe(1, [1, 2, 3, 4, 9, 2, 3])
    assert drafter.draft([1])[0].match == found
    drafter.hint(1, Hints([7, 2, 3, 8]))
    assert drafter.draft([1])[0].match == found, "what is expected is bounded too"
    drafter.observe(2, [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5])
    assert drafter.draft([2])[0].match == 5 >= least
