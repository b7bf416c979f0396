"""The life of requests when something goes wrong: failing steps, aborts, and what must not be lost then."""

from __future__ import annotations

import pytest
from conformance import truth
from exactness import Oracle, build, mixed_requests, reference, request, run, submit, tiny_model, truth_of
from test_faults import raise_once

from minispec.drafter import Plain
from minispec.output import Output
from minispec.request import RequestError, Update
from minispec.sampling import GREEDY
from minispec.scheduler import Scheduler
from minispec.serve.info import stats_of

MODEL = tiny_model()


def drive(scheduler: Scheduler) -> list[Update]:
    """Step to the end as the server does: a step that raises fails the requests in it."""
    updates: list[Update] = []
    for _ in range(3000):
        if not scheduler.has_work:
            scheduler.check()
            return updates
        try:
            updates += scheduler.step()
        except RuntimeError as error:
            updates += scheduler.fail(error)
            scheduler.check()
    raise AssertionError("the scheduler does not come to an end")


PLACES = [("engine", "launch"), ("engine", "collect"), ("engine", "prefill"), ("engine", "assign"),
          ("kv", "map"), ("metrics", "decode"), ("cache", "insert"), ("kv", "unmap")]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_step_that_raises_answers_everyone_and_keeps_the_queue(place, at, monkeypatch) -> None:
    scheduler = build(MODEL, Oracle(truth_of(MODEL)), running=3, pages=30)
    owner, name = place
    requests = mixed_requests(max_new_tokens=6)
    submit(scheduler, *requests)
    raise_once(getattr(scheduler, owner), name, monkeypatch, at=at)
    updates = drive(scheduler)
    ends = [u.request for u in updates if u.finish]
    assert sorted(r.rid for r in ends) == sorted(r.rid for r in requests), "somebody was never answered, or twice"
    kinds = [r.finish.kind for r in requests]
    assert 1 <= kinds.count("abort") <= 3, "only the requests with a slot are in the step"
    for r in requests:
        if r.finish.kind != "abort":
            assert r.output_ids == truth(MODEL, r)
    assert len(scheduler.free_slots) == 3
    again = mixed_requests(max_new_tokens=6)
    run(scheduler, again)
    assert all(r.output_ids == truth(MODEL, r) for r in again)


def test_an_end_reached_before_another_request_of_the_step_raises_is_delivered(monkeypatch) -> None:
    scheduler = build(MODEL, Plain(), running=2)
    first, second = request("a", [1, 2, 3], max_new_tokens=3), request("b", [4, 5, 6], max_new_tokens=9)
    submit(scheduler, first, second)
    original = Output.append

    def append(self, token):
        if self.request is second and len(second.output_ids) == 2:
            raise RuntimeError("injected")
        return original(self, token)

    monkeypatch.setattr(Output, "append", append)
    updates = drive(scheduler)
    assert first.finish.kind == "length" and second.finish.kind == "abort"
    assert [u.request.rid for u in updates if u.finish] == ["a", "b"]
    assert sum(len(u.ids) for u in updates if u.request is first) == 3


def test_abort_reaches_requests_in_queue_prefill_and_decode() -> None:
    scheduler = build(MODEL, Plain(), running=2, chunk=16)
    requests = [request("run", [1, 2], max_new_tokens=50), request("fill", list(range(60)) * 2), request("wait", [3])]
    submit(scheduler, *requests)
    for _ in range(3):
        scheduler.step()
    run_, fill, wait = requests
    assert run_ in scheduler.running and fill in scheduler.prefilling and wait in scheduler.waiting
    scheduler.abort("")
    assert not scheduler.has_work and all(r.finish.kind == "abort" for r in requests)
    scheduler.check()
    assert stats_of(scheduler)["kv_pages_owned"] == 0 and scheduler.flush_cache()


def test_no_tokens_wanted_is_answered_at_once() -> None:
    scheduler = build(MODEL, Plain())
    nothing = request("nothing", [1, 2], max_new_tokens=0)
    submit(scheduler, nothing)
    assert scheduler.has_work
    (update,) = scheduler.step()
    assert update.finish.kind == "length" and update.ids == [] and not scheduler.has_work


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [([], {}, "prompt"), ([61], {}, "input_ids"), ([-1], {}, "input_ids"), ([1] * 256, {}, "prompt"),
     ([1], {"logit_bias": {61: 1.0}}, "logit_bias")],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(prompt, params, field) -> None:
    with pytest.raises(RequestError) as refused:
        build(MODEL, Plain()).validate(request("x", prompt, **params))
    assert refused.value.param == field and refused.value.status == 400


def test_min_new_tokens_costs_the_batch_nothing_once_it_is_reached() -> None:
    scheduler = build(MODEL, Plain(), eos=(4,))
    patient = request("patient", [1, 2, 3], max_new_tokens=12, min_new_tokens=3)
    submit(scheduler, patient)
    seen = []
    while scheduler.has_work:
        scheduler.step()
        if patient.slot:
            seen.append((len(patient.output_ids), scheduler.engine.sampling.needs([patient.slot]) == GREEDY))
    assert all(greedy == (count >= 3) for count, greedy in seen) and len(seen) > 4


def test_a_long_queue_is_not_hashed_at_every_step(monkeypatch) -> None:
    scheduler = build(MODEL, Plain(), pages=8, running=4)
    submit(scheduler, *(request(f"q{i}", [i, *range(40)], max_new_tokens=40) for i in range(4)))
    matches = []
    original = scheduler.cache.match
    monkeypatch.setattr(scheduler.cache, "match", lambda *args: matches.append(1) or original(*args))
    steps = 0
    while scheduler.has_work:
        scheduler.step()
        steps += 1
    assert steps > 100 and len(matches) < 30


def test_a_request_refused_for_pages_is_admitted_as_soon_as_its_prefix_is_cached() -> None:
    """The front of the queue lacks pages while its prefix is being computed for another; afterwards few are enough."""
    scheduler, prefix = build(MODEL, Plain(), pages=11, chunk=32), [3 * i % 61 for i in range(96)]
    first, second = request("first", [*prefix, 1, 2, 3, 4]), request("second", [*prefix, 9])
    submit(scheduler, first, second)
    while not first.output_ids:
        scheduler.step()
        assert second in scheduler.waiting and scheduler._refused[0] is second, "the pool was to be too small for both"
    scheduler.step()
    assert second.slot and second.cached_tokens == len(prefix), "the front of the queue was not matched again"
    drive(scheduler)
    assert all(r.output_ids == reference(MODEL, r) for r in (first, second))


@pytest.mark.parametrize("speculative", [False, True])
def test_prompts_prefilled_together_share_their_pages_from_then_on(speculative: bool) -> None:
    """Two equal prompts, two continuations, in a pool that cannot hold the prompt twice to their ends."""
    drafter = Oracle(truth_of(MODEL)) if speculative else Plain()
    scheduler, prompt = build(MODEL, drafter, pages=18, chunk=256), [5 * i % 61 for i in range(100)]
    twins = [request(f"t{i}", prompt, temperature=1.0, sampling_seed=i, max_new_tokens=50) for i in range(2)]
    submit(scheduler, *twins)
    updates = scheduler.step()
    assert len(updates) == 2 and scheduler.running == twins, "both were to be prefilled in one step"
    scheduler.check()
    (first, second), stats = (scheduler.seats[r].pages for r in twins), stats_of(scheduler)
    assert first[:6] == second[:6] and not set(first[6:]) & set(second[6:])
    assert stats["kv_pages_cached"] == 6 and stats["kv_pages_owned"] == len(first[6:]) + len(second[6:])
    for r in twins:
        table, pages = scheduler.kv.table[r.slot], scheduler.seats[r].pages
        assert table[: len(pages)].tolist() == pages and not table[len(pages) :].any()
        inverse = {page: logical for logical, page in enumerate(pages)}
        assert scheduler.kv.logical[r.slot].tolist() == [inverse.get(page, -1) for page in range(scheduler.kv.pages)]
    drive(scheduler)
    assert scheduler.metrics.retractions == 0, "the pages of a copy were missing"
    assert twins[0].output_ids != twins[1].output_ids and all(r.output_ids == truth(MODEL, r) for r in twins)
