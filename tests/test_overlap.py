"""Steps in flight: with a step launched before the one before it is collected, nothing that a client sees changes.

The checks of conformance.py run again with overlap. Beside them stand the cases that only overlap has: an end that is
learned one step late at every place of an accepted run, an abort while a step is under way, and steps that switch
between trees and plain. Tokens are compared with the sequential reference, ends and counts with the loop at depth 0.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from conformance import (
    CHECKS,
    SUBJECTS,
    WISHES,
    Subject,
    arrival_one_by_one,
    assert_exact,
    retraction,
    seeded_samples,
    truth,
)
from conftest import slow_unless
from exactness import VOCAB, build, request, run, submit

from minispec.buffers import DecodeBuffers
from minispec.corpora import END, Corpus, sort_places
from minispec.engine import Engine
from minispec.lookup import Lookups
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.request import Request
from minispec.scheduler import Scheduler

NAMES = ("none", "standalone-tree", "eagle-tree", "eagle3-tree", "mtp-tree", "trained-chain", "trained-tree")


@dataclass(frozen=True)
class Overlapped(Subject):
    """A subject whose schedulers have a step in flight."""

    def build(self, **how: object) -> Scheduler:
        """Put a scheduler together whose steps overlap."""
        scheduler = super().build(**{"overlap": True, **how})
        assert scheduler.overlap == how.get("overlap", True)
        return scheduler


def overlapped(name: str) -> Overlapped:
    """Return a subject of conformance.py with overlap."""
    return Overlapped(**vars(SUBJECTS[name]))


# Overlap is the host's logic, the same for every drafter on the device. So plain decoding and one drafter have all
# checks, and the others those that take in what a step in flight left: after a retraction, with others arriving, and
# with noise.
OF_ALL = (retraction, arrival_one_by_one, seeded_samples)
QUICK = ("none", "trained-tree")
FEW = (*QUICK, "standalone-tree")  # for ends and switches


@pytest.mark.parametrize(
    ("name", "check"),
    slow_unless(
        [(name, check) for name in NAMES for check in CHECKS if check in OF_ALL or name in QUICK],
        lambda name, check: name in QUICK,
    ),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_tokens_stay_the_same(name: str, check: Callable[[Subject], None]) -> None:
    check(overlapped(name))


def test_a_step_is_launched_before_the_one_before_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, calls = overlapped("none").build(), []
    for name in ("prefill", "launch", "collect"):
        original = getattr(Engine, name)
        monkeypatch.setattr(Engine, name, lambda *given, name=name, original=original, **more: (
            calls.append(name), original(*given, **more))[1])  # fmt: skip
    run(scheduler, [request("r", [1, 2, 3], max_new_tokens=4)])
    assert calls == ["prefill", "launch", "collect", "launch", "collect", "launch", "collect", "collect"]


@pytest.mark.parametrize("name", ["ngram", "oracle"])
def test_a_drafter_that_reads_text_gets_it_before_it_drafts(name: str) -> None:
    assert not SUBJECTS[name].build(overlap=True).overlap


def test_lookups_begin_with_a_corpus_and_the_overlap_is_back_when_the_last_one_is_gone() -> None:
    subject = SUBJECTS["trained-tree"]
    head = subject.drafter(subject.model())
    drafter = Lookups(head, NgramDrafter(NgramOptions(nodes=head.depth + 1), limited=True), VOCAB, awaits_corpus=True)
    scheduler, requests = build(subject.model(), drafter, overlap=True), subject.requests(max_new_tokens=50)[:4]
    assert [size.nodes for size in drafter.trees] == [size.nodes for size in head.trees], "a corpus changes no shape"
    answers = [END, *itertools.chain(*([*r.prompt_ids, *truth(subject.model(), r), END] for r in requests))]
    corpus = Corpus(np.array(answers, np.int32), sort_places(np.array(answers, np.int32)))
    submit(scheduler, *requests)

    def steps(count: int) -> tuple[int, bool]:
        """Return how many looked-up trees were verified in so many steps, and whether a step is in flight."""
        before = scheduler.metrics.verified.steps["lookup"]
        for _ in range(count):
            scheduler.step()
            scheduler.check()
        return scheduler.metrics.verified.steps["lookup"] - before, scheduler._flight is not None

    assert steps(8) == (0, True), "nothing is looked up, and steps overlap"
    drafter.corpora.put("a", corpus)
    found, flies = steps(3)
    assert found and not flies
    drafter.corpora.put("b", corpus)
    drafter.corpora.put("a", None)
    assert steps(1)[1] is False, "one is left"
    drafter.corpora.put("b", None)
    assert steps(2) == (0, True)
    drafter.corpora.put("a", corpus)
    while scheduler.has_work:
        steps(1)
    assert_exact(subject, requests)


def ends(requests: Sequence[Request]) -> list[tuple]:
    """Return what clients are told of each request's end."""
    return [(r.rid, r.finish, r.output_ids, len(r.prompt_ids), r.verified) for r in requests]


@pytest.mark.parametrize("name", slow_unless(FEW, lambda name: name in QUICK))
def test_stops_at_every_offset(name: str) -> None:
    subject = overlapped(name)
    prompt = subject.text(20, random.Random(4))
    whole = request("truth", prompt, max_new_tokens=24)
    subject.build().validate(whole)
    known = truth(subject.model(), whole)
    first_seen = [k for k in range(1, 16) if known[k] not in known[:k]]
    told = []
    for overlap in (True, False):
        strings = [request(f"t{k}", prompt, stop=[chr(0x100 + known[k])], min_new_tokens=k) for k in range(1, 16)]
        lengths = [request(f"l{k}", prompt, max_new_tokens=k) for k in range(1, 16)]
        stops = [request(f"s{k}", prompt, stop_token_ids=[known[k]]) for k in first_seen]
        requests = [*strings, *lengths, *stops]
        texts = run(subject.build(overlap=overlap), requests)
        told.append((ends(requests), list(texts.values())))
    assert told[0] == told[1]
    for k, (matched, cut) in enumerate(zip(strings, lengths, strict=True), 1):
        assert matched.output_ids == known[: k + 1] and matched.finish.kind == "stop"
        assert cut.output_ids == known[:k] and cut.finish.kind == "length"
    for k, stopped in zip(first_seen, stops, strict=True):
        assert stopped.output_ids == known[: k + 1] and stopped.finish.matched == known[k]
    assert len(first_seen) > 3


@pytest.mark.parametrize("name", slow_unless(FEW, lambda name: name in QUICK))
def test_aborts_in_flight_leave_the_others_alone(name: str) -> None:
    subject, rng = overlapped(name), random.Random(5)
    scheduler = subject.build(running=4, pages=60)
    requests = subject.requests(max_new_tokens=20, **WISHES) + subject.requests(max_new_tokens=20)
    for index, r in enumerate(requests):
        r.rid = f"{index:02}"
        submit(scheduler, r)
    aborted = set()
    while scheduler.has_work:
        scheduler.step()
        scheduler.check()
        flight = scheduler._flight
        if flight is not None and len(aborted) < 6 and rng.random() < 0.4:
            victim = rng.choice(list(flight.seats))  # its slot goes to the next in the queue while its step is on
            if victim.finish is None:
                scheduler.abort(victim.rid)
                aborted.add(victim)
    assert len(aborted) == 6 and all(r.finish.kind == "abort" for r in aborted)
    assert_exact(subject, [r for r in requests if r not in aborted])
    for r in aborted:
        assert r.output_ids == truth(subject.model(), r)[: len(r.output_ids)]


@pytest.mark.parametrize("name", slow_unless(("eagle3-tree", *FEW[1:]), lambda name: name in QUICK))
@pytest.mark.parametrize("wishes", [{}, WISHES], ids=["greedy", "seeded"])
def test_switches_between_trees_and_plain_steps_in_flight(name: str, wishes: dict) -> None:
    rng, subject = random.Random(6), overlapped(name)
    for how in (dict(), dict(pages=15)):
        requests, scheduler = subject.requests(max_new_tokens=16, **wishes), subject.build(**how)
        scheduler.policy.forced = rng.choice
        run(scheduler, requests)
        assert_exact(subject, requests)
        assert len(scheduler.metrics.shapes) > 1


# ---- errors on purpose ----------------------------------------------------------------------------------------------


def rows_without_seats(patch: pytest.MonkeyPatch) -> None:
    """A row counts although its request has left its seat meanwhile."""
    land = Scheduler._land

    def landed(self: Scheduler, flight: object) -> None:
        for one in flight.seats:
            flight.seats[one] = self.seats.get(one)
        land(self, flight)

    patch.setattr(Scheduler, "_land", landed)


def pages_for_one_step_only(patch: pytest.MonkeyPatch) -> None:
    """No rows are reserved for what the step in flight may add."""
    patch.setattr("minispec.engine.Pending.most", property(lambda self: 0))


def an_old_step_s_tokens(patch: pytest.MonkeyPatch) -> None:
    """The host's copy of a step's tokens is the buffer that the next step overwrites."""
    pending = Engine.pending

    def shared(self: Engine, slots: list[int], step: DecodeBuffers, *asked: object, **what: object) -> object:
        made = pending(self, slots, step, *asked, **what)
        made.outputs = step.outputs
        return made

    patch.setattr(Engine, "pending", shared)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [rows_without_seats, pages_for_one_step_only, an_old_step_s_tokens],
                         ids=lambda m: m.__name__)  # fmt: skip
def test_every_error_shows(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    subject = overlapped("standalone-tree")
    with pytest.raises((AssertionError, ValueError, KeyError)):
        for how in (dict(), dict(pages=15), dict(pages=12)):
            requests = subject.requests(max_new_tokens=40)
            run(subject.build(**how), requests)
            assert_exact(subject, requests)
