"""The spine: whatever the drafter, batch, chunking, cache and memory, the tokens are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_beam
from exactness import Oracle, build, mixed_requests, reference, request, run, tiny_model, truth_of

import minispec.verify as verify_module
from minispec.beam import BeamDrafter
from minispec.drafter import Plain
from minispec.ngram import NgramDrafter, NgramOptions

MODEL = tiny_model()


def drafter_named(name: str):
    """Return a fresh drafter."""
    return {
        "none": Plain,
        "ngram": lambda: NgramDrafter(NgramOptions(nodes=8)),
        "ngram-prob": lambda: NgramDrafter(NgramOptions(nodes=6, match_type="PROB")),
        "oracle": lambda: Oracle(truth_of(MODEL)),
    }[name]()


ALL = ("none", "ngram", "ngram-prob", "oracle")


LONG = 60  # tokens; growing by this much, eight requests outgrow a pool of fourteen pages


@pytest.fixture(scope="module")
def greedy_truth() -> dict[str, list[int]]:
    """The reference outputs of the mixed requests, by rid, LONG tokens each."""
    scheduler = build(MODEL, Plain())
    requests = mixed_requests(max_new_tokens=LONG)
    for r in requests:
        scheduler.validate(r)
    return {r.rid: reference(MODEL, r) for r in requests}


def assert_all_equal(requests, truth) -> None:
    """Compare every request with its reference, and make sure there was something to compare."""
    assert len(requests) == len(truth) and all(truth.values())
    for r in requests:
        assert r.output_ids == truth[r.rid][: r.max_new_tokens], f"{r.rid} differs"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("running", [1, 8])
def test_greedy_equals_the_reference(name, running, greedy_truth) -> None:
    requests = mixed_requests()
    scheduler = build(MODEL, drafter_named(name), running=running)
    run(scheduler, requests)
    assert_all_equal(requests, greedy_truth)
    if name == "oracle":
        assert scheduler.metrics.accept_length > 1.5 and scheduler.engine.drafter.branched > 20


@pytest.mark.parametrize("name", ALL)
def test_chunks_of_any_size_change_nothing(name, greedy_truth) -> None:
    for chunk in (1, 32, 50):
        requests = mixed_requests()
        run(build(MODEL, drafter_named(name), chunk=chunk, running=4), requests)
        assert_all_equal(requests, greedy_truth)


@pytest.mark.parametrize("name", ALL)
def test_a_warm_prefix_cache_changes_nothing(name, greedy_truth) -> None:
    scheduler = build(MODEL, drafter_named(name))
    run(scheduler, mixed_requests())
    again = mixed_requests()
    run(scheduler, again)
    assert_all_equal(again, greedy_truth)
    assert sum(r.cached_tokens for r in again) > 100
    first = again[1]
    second_turn = request("turn", first.prompt_ids + first.output_ids + [3, 1, 4])
    run(scheduler, [second_turn])
    assert second_turn.cached_tokens >= len(first.prompt_ids) // 16 * 16 > 0
    assert second_turn.output_ids == reference(MODEL, second_turn)


@pytest.mark.parametrize("name", ALL)
def test_retraction_changes_nothing(name, greedy_truth) -> None:
    requests = mixed_requests(max_new_tokens=LONG)
    scheduler = build(MODEL, drafter_named(name), pages=15, page_size=16, running=8)
    texts = run(scheduler, requests)
    assert_all_equal(requests, greedy_truth)
    assert scheduler.metrics.retractions > 0, "the pool was never short"
    assert all(len(texts[r]) == len(r.output_ids) for r in requests), "a text was sent twice or lost"


@pytest.mark.parametrize("name", ALL)
def test_arrival_one_by_one_changes_nothing(name, greedy_truth) -> None:
    requests = mixed_requests()
    run(build(MODEL, drafter_named(name), running=3), requests, stagger=3)
    assert_all_equal(requests, greedy_truth)


WISHES = dict(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3,
              presence_penalty=0.2, logit_bias={5: 1.5, 7: -3.0})  # fmt: skip


@pytest.mark.parametrize("wishes", [dict(temperature=1.0), WISHES, {**WISHES, "temperature": 0.0}])
def test_a_seed_gives_the_same_text_with_every_drafter(wishes) -> None:
    truth: dict[str, list[int]] = {}
    for name in ALL:
        for running, pages in ((1, 200), (8, 200), (8, 15)):
            requests = mixed_requests(**wishes, max_new_tokens=16)
            run(build(MODEL, drafter_named(name), running=running, pages=pages), requests)
            if not truth:
                truth = {r.rid: reference(MODEL, r) for r in requests}
            assert_all_equal(requests, truth)
    assert len({tuple(ids) for ids in truth.values()}) == len(truth)


def test_requests_of_every_kind_share_a_batch() -> None:
    kinds = [dict(), WISHES, dict(temperature=1.0, min_new_tokens=5), dict(repetition_penalty=1.5), dict(top_k=3),
             dict(temperature=0.7, top_p=0.5), dict(logit_bias={1: 100.0}), dict(max_new_tokens=1)]  # fmt: skip
    eos = (4, 9, 17, 30)
    kinds = [{**kind, **({"temperature": 1.0} if "top_k" in kind else {}), "sampling_seed": 11} for kind in kinds]
    for name in ALL:
        requests = [request(f"k{i}", [i, 2, 3, i, 2], **kind) for i, kind in enumerate(kinds)]
        run(build(MODEL, drafter_named(name), eos=eos), requests)
        for r in requests:
            assert r.output_ids == reference(MODEL, r, eos), r.rid
        assert {r.finish.kind for r in requests} == {"stop", "length"}


@pytest.mark.parametrize("name", [*ALL, "beam"])
def test_lossy_thresholds_leave_greedy_requests_exact_and_a_seed_its_text(name, monkeypatch) -> None:
    def serve(thresholds, running=8):
        requests = mixed_requests(**WISHES | {"temperature": 1.0})
        for r in requests[::2]:
            r.params = replace(r.params, temperature=0.0)
        if name == "beam":
            drafter = BeamDrafter(test_beam.HEADS["toy"], steps=3, topk=3, nodes=8)
            batches, inner = [], drafter.propose
            drafter.propose = lambda batch: batches.append(batch) or inner(batch)
        else:
            drafter = drafter_named(name)
        scheduler = build(MODEL, drafter, running=running, thresholds=thresholds)
        run(scheduler, requests)
        if name == "beam":  # a draft may know the noise of a pick, not of what is drawn after a coin
            assert any(batch.temperature is not None for batch in batches) == (thresholds is None)
        return requests, scheduler.metrics.accept_length

    (exact, _), (lossy, accepted), (again, _) = serve(None), serve((0.02, 0.1)), serve((0.02, 0.1))
    for r, other, same in zip(exact, lossy, again, strict=True):
        assert r.output_ids == reference(MODEL, r) and other.output_ids == same.output_ids
        assert r.params.temperature > 0 or other.output_ids == r.output_ids
    differ = [r.rid for r, other in zip(exact, lossy, strict=True) if r.output_ids != other.output_ids]
    assert bool(differ) == (name != "none") or name.startswith("ngram")
    if name == "oracle":  # it drafts the likeliest tokens
        assert accepted > serve(None)[1]

    def never(*given):
        raise AssertionError("the lossy rule ran")

    monkeypatch.setattr(verify_module, "pick_lossy", never)
    serve(None)
    with pytest.raises(AssertionError, match="the lossy rule ran"):
        serve((1.0, 0.9))


def test_generation_runs_to_the_last_row_of_context_and_pool() -> None:
    for name in ALL:
        scheduler = build(MODEL, drafter_named(name), running=2)
        full = request("context", [1, 2, 3] * 20, max_new_tokens=None)
        run(scheduler, [full])
        assert len(full.prompt_ids) + len(full.output_ids) == 256 and full.finish.kind == "length"
        tight = build(MODEL, drafter_named(name), pages=6, running=4)
        several = [request(f"p{i}", [i, 5, 6] * 6, max_new_tokens=None) for i in range(4)]
        run(tight, several)
        assert all(r.finish.kind == "length" and len(r.output_ids) > 40 for r in several)
        assert full.output_ids[:24] == reference(MODEL, request_like(full, 24))


def request_like(r, count: int):
    """Return a copy of a request that ends after `count` tokens."""
    other = request(r.rid, r.prompt_ids)
    other.max_new_tokens = count
    return other
