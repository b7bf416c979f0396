"""Log-probabilities and choices, with every kind of drafter: what is told of a token is what the model gave it.

The reference is one causal pass over the whole text, without cache, chunks, trees or a scheduler. What the scheduler
tells must equal it whatever was drafted, cached, retracted or cut, and there must be one entry for each token.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conformance import SUBJECTS, WISHES, Subject, assert_exact, truth
from exactness import Letters, any_ids, finish, next_logits, request, run, submit
from hypothesis import given, settings
from hypothesis import strategies as st

import minispec.asked.scores as logprobs_module
import minispec.asked.steps as asked_module
from minispec.attention import Causal
from minispec.model import Model
from minispec.ngram import NgramDrafter
from minispec.request import Logprobs, Request, RequestError, Scored
from minispec.scheduler import Scheduler
from minispec.serve import parse
from minispec.serve.info import stats_of
from minispec.serve.parse import choice_seed
from minispec.serve.reply import Reply, Served

NAMES = ("none", "ngram", "oracle", "standalone-tree", "eagle-tree", "eagle3-tree", "mtp-tree")
NAMED = (0, 5, 60)


@torch.inference_mode()
def reference(model: Model, ids: Sequence[int]) -> torch.Tensor:
    """Return [T, V] log-probabilities of what follows each token of a text, in fp64 from one causal pass."""
    hidden, _ = model(torch.tensor([ids]), torch.arange(len(ids))[None], Causal())
    logits = model.logits(hidden[0]).double()
    return logits - logits.exp().sum(-1, keepdim=True).log()


def assert_told(model: Model, r: Request) -> None:
    """Compare every score of a finished request with the reference."""
    wish, ids = r.params.logprobs, r.prompt_ids + r.output_ids
    if wish is None:
        assert not r.output_scores and not r.prompt_scores
        return
    first = len(r.prompt_ids) if wish.start is None else wish.start + 1
    at = [*r.prompt_scores, *r.output_scores]
    assert len(r.output_scores) == len(r.output_ids) and len(at) == len(ids) - first, r.rid
    if not at:
        return
    truth = reference(model, ids)[first - 1 : -1]
    assert_near([entry.logprob for entry in at], truth.gather(1, torch.tensor(ids[first:])[:, None])[:, 0])
    assert_near([entry.ids for entry in at], truth[:, list(wish.ids)])
    values = [[value for _, value in entry.top] for entry in at]
    assert_near(values, truth.sort(descending=True).values[:, : wish.top])
    tops = torch.tensor([[other for other, _ in entry.top] for entry in at], dtype=torch.int64)
    assert_near(values, truth.gather(1, tops.view(len(at), -1)))
    for entry, token in zip(at, ids[first:], strict=True):
        assert all(value == entry.logprob for other, value in entry.top if other == token), "not the same float"


def assert_near(told: list, truth: torch.Tensor) -> None:
    """Compare with a tolerance of 1e-4."""
    torch.testing.assert_close(torch.tensor(told, dtype=torch.float64), truth, atol=1e-4, rtol=0)


def asking(subject: Subject, **params: object) -> list[Request]:
    """Return eight requests of which seven ask, each for something else."""
    wishes = [Logprobs(), Logprobs(top=3, start=0), None, Logprobs(top=1, ids=NAMED), Logprobs(ids=(7,), start=5),
              Logprobs(start=0), Logprobs(top=2), Logprobs(top=20, start=37)]  # fmt: skip
    made = subject.requests(**params)
    return [
        request(r.rid, r.prompt_ids, **{**vars(r.params), "logprobs": fitting(wish, len(r.prompt_ids))})
        for r, wish in zip(made, wishes, strict=True)
    ]


def fitting(wish: Logprobs | None, count: int) -> Logprobs | None:
    """Return a wish whose prompt's scores begin within the prompt."""
    if wish is None or wish.start is None or wish.start < count:
        return wish
    return Logprobs(top=wish.top, ids=wish.ids, start=count - 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_token_has_the_model_s_own_score(name: str) -> None:
    subject = SUBJECTS[name]
    scheduler = subject.build(chunk=50, overlap=True)  # a drafter that reads text goes without overlap
    requests, again = asking(subject, max_new_tokens=8), asking(subject, max_new_tokens=8)
    run(scheduler, requests)
    run(scheduler, again)
    for r in (*requests, *again):
        assert_told(subject.model(), r)
    assert any(r.cached_tokens for r in again if r.params.logprobs is not None)
    for r in again:  # rows to be scored were computed again
        wish = r.params.logprobs
        assert wish is None or wish.start is None or r.cached_tokens <= wish.start


@pytest.mark.parametrize(("name", "overlap"), [("none", True), ("standalone-tree", False)])
def test_who_is_retracted_is_told_nothing_twice(name: str, overlap: bool) -> None:
    subject = SUBJECTS[name]
    scheduler = subject.build(pages=12, chunk=16, overlap=overlap)
    requests = asking(subject, **WISHES, max_new_tokens=40)
    run(scheduler, requests)
    for r in requests:
        assert_told(subject.model(), r)
    back = [r for r in requests if r.retractions]
    assert any(r.prompt_scores for r in back), "nobody was retracted who was told of a prompt"


def test_who_is_retracted_within_its_prompt_goes_on_where_it_was() -> None:
    subject = SUBJECTS["none"]
    scheduler = subject.build(chunk=16)
    r = request("r", any_ids(100, random.Random(1)), logprobs=Logprobs(top=1, start=10), max_new_tokens=3)
    submit(scheduler, r)
    for _ in range(3):
        scheduler.step()
    assert len(r.prompt_scores) == 38
    with torch.inference_mode():
        scheduler._send_back(r)
    finish(scheduler)
    assert r.retractions == 1
    assert_told(subject.model(), r)


def test_a_request_that_does_not_ask_pays_nothing_and_one_that_asks_pays_for_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject, rows = SUBJECTS["standalone-tree"], []
    score = logprobs_module._score

    def seen(logits: torch.Tensor, *given: object) -> object:
        rows.append(len(logits))
        return score(logits, *given)

    monkeypatch.setattr(logprobs_module, "_score", seen)
    scheduler = subject.build()
    run(scheduler, subject.requests(max_new_tokens=8))
    assert not rows
    requests = subject.requests(max_new_tokens=8)
    requests[3] = request("asks", requests[3].prompt_ids, max_new_tokens=8, logprobs=Logprobs())
    run(scheduler, requests)
    most = scheduler.sizes.depth + 1
    assert rows and set(rows) == {1, most}, "its first token, then one accepted path a step"


def test_a_long_prompt_never_has_all_its_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "ROWS_AT_ONCE", 10)
    model, rows = SUBJECTS["none"].model(), []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: (rows.append(len(hidden)), logits(hidden))[1])
    scheduler = SUBJECTS["none"].build(chunk=192)
    r = request("long", any_ids(200, random.Random(1)), max_new_tokens=0, logprobs=Logprobs(top=2, start=3))
    run(scheduler, [r])
    monkeypatch.undo()
    assert max(rows) <= 10 and r.finish.kind == "length" and r.output_ids == []
    assert len(r.prompt_scores) == 196
    assert_told(model, r)


# ---- errors on purpose ----------------------------------------------------------------------------------------------


def scores_of_adjusted_logits(patch: pytest.MonkeyPatch) -> None:
    """A temperature changes what is told."""
    score = logprobs_module._score
    patch.setattr(logprobs_module, "_score", lambda logits, *given: score(logits * 1.01, *given))


def scores_off_the_path(patch: pytest.MonkeyPatch) -> None:
    """The rows of a path are taken for its first nodes."""
    score = asked_module.score_picks
    patch.setattr(asked_module, "score_picks", lambda asked, logits, path, emitted: score(
        asked, logits, torch.arange(path.shape[1]).expand_as(path), emitted))  # fmt: skip


def a_prompt_s_scores_twice(patch: pytest.MonkeyPatch) -> None:
    """A retracted request forgets what it was told."""
    patch.setattr(Request, "unscored", property(lambda r: range(
        0 if r.params.logprobs is None or r.params.logprobs.start is None else r.params.logprobs.start,
        0 if r.params.logprobs is None or r.params.logprobs.start is None else len(r.prompt_ids) - 1)))  # fmt: skip


def a_neighbour_s_scores(patch: pytest.MonkeyPatch) -> None:
    """The answers of two requests are exchanged."""
    read = logprobs_module.Scores.read

    def exchanged(self: logprobs_module.Scores, most: int) -> dict:
        told = read(self, most)
        return dict(zip(told, [*list(told.values())[1:], *list(told.values())[:1]], strict=True))

    patch.setattr(logprobs_module.Scores, "read", exchanged)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation", [scores_of_adjusted_logits, scores_off_the_path, a_prompt_s_scores_twice, a_neighbour_s_scores],
    ids=lambda m: m.__name__,
)  # fmt: skip
def test_every_error_shows(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        test_who_is_retracted_within_its_prompt_goes_on_where_it_was()
        test_every_token_has_the_model_s_own_score("standalone-tree")


# ---- the end of a request, wherever it falls in an accepted run -----------------------------------------------------


class Spelled(Letters):
    """The letters, for answers as well."""

    def piece(self, token: int) -> bytes:
        """Return the letter of an id."""
        return self.token_bytes(token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the letters of ids."""
        return b"".join(map(self.token_bytes, ids)).decode()


@functools.cache
def kept_scheduler(name: str, overlap: bool) -> Scheduler:
    """Return a scheduler that serves all examples."""
    return SUBJECTS[name].build(overlap=overlap, eos=())


def answers(scheduler: Scheduler, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the answer to a completion and the events of the same as a stream."""
    job = parse.parse_completion(body, {})
    requests = parse.tokenize(job, None, 256)
    served = Served("m", Spelled())
    whole = Reply(job, requests, served)
    stream = Reply(parse.parse_completion({**body, "stream": True}, {}), requests, served)
    submit(scheduler, *requests)
    events = []
    while scheduler.has_work:
        for update in scheduler.step():
            whole.take(update)
            events += stream.take(update)
    scheduler.check()
    return whole.result(), events


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["standalone-chain", "oracle", "none"]), overlap=st.booleans(), prompt=st.integers(0, 3),
    offset=st.integers(1, 14), end=st.sampled_from(["stop", "id", "eos", "length"]), keep=st.booleans(),
    top=st.integers(0, 3), echo=st.booleans(), limit=st.integers(1, 16),
)  # fmt: skip
def test_text_ids_logprobs_and_usage_end_together(
    name: str, overlap: bool, prompt: int, offset: int, end: str, keep: bool, top: int, echo: bool, limit: int
) -> None:
    subject = SUBJECTS[name]
    ids = subject.text(20 + prompt, random.Random(prompt))
    known = truth(subject.model(), _validated(subject, request("truth", ids, max_new_tokens=16)))
    scheduler, token = kept_scheduler(name, overlap), known[offset - 1]
    scheduler.eos_ids = frozenset({token} if end == "eos" else ())
    body = {"prompt": ids, "temperature": 0, "max_tokens": limit, "logprobs": top, "echo": echo,
            "return_token_ids": True, "no_stop_trim": keep}  # fmt: skip
    body |= {"stop": {"stop": [chr(0x100 + token)]}, "id": {"stop_token_ids": [token]}}.get(end, {})
    first = known.index(token) + 1
    stops = end != "length" and first <= limit
    count = first if stops else limit

    answer, events = answers(scheduler, body)
    choice, letters, echoed = answer["choices"][0], Spelled(), Spelled().decode(ids) if echo else ""
    kept = known[:count]
    assert choice["token_ids"] == kept and answer["usage"]["completion_tokens"] == count
    assert choice["finish_reason"] == ("stop" if stops else "length")
    assert choice["text"] == echoed + letters.decode(kept if keep or not stops else kept[:-1])
    lists = choice["logprobs"]
    shown = [*(ids if echo else []), *kept]
    assert lists["tokens"] == [letters.decode([t]) for t in shown]
    assert lists["text_offset"] == list(range(len(shown)))
    truths = reference(subject.model(), ids + kept)
    expected = [None if i == 0 else float(truths[i - 1, t]) for i, t in enumerate(ids + kept)][-len(shown) :]
    for told, wanted, likeliest in zip(lists["token_logprobs"], expected, lists["top_logprobs"], strict=True):
        assert told == (None if wanted is None else pytest.approx(wanted, abs=1e-4))
        assert likeliest is None if told is None else max(top, 1) <= len(likeliest) <= top + 1
        assert told is None or told in likeliest.values()
    pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    for field, value in lists.items():
        assert sum((piece["logprobs"][field] for piece in pieces if piece["logprobs"]), []) == value
    assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def _validated(subject: Subject, one: Request) -> Request:
    """Return a request with its limits set."""
    kept_scheduler("none", False).validate(one)
    return one


# ---- choices --------------------------------------------------------------------------------------------------------


def choices(prompt: Sequence[int], n: int, **params: Any) -> list[Request]:
    """Return the choices of one prompt, as the schema makes them."""
    body = {"prompt": list(prompt), "n": n, "temperature": 1.0, "seed": 5, "max_tokens": 10, **params}
    return parse.tokenize(parse.parse_completion(body, {}), None, 256)


@pytest.mark.parametrize("name", ["none", "eagle3-tree"])
def test_choices_equal_requests_alone_and_share_the_prompt_s_full_pages(name: str) -> None:
    subject = SUBJECTS[name]
    prompt = subject.text(70, random.Random(3))
    for how in (dict(radix=False), dict(chunk=32, running=2)):
        scheduler = subject.build(**how)
        several = choices(prompt, 4, logprobs=1, echo=True)
        run(scheduler, several)
        assert [r.seed for r in several] == [choice_seed(5, i) for i in range(4)] and several[0].seed == 5
        assert len({tuple(r.output_ids) for r in several}) == 4
        assert_exact(subject, several)
        for r in several:
            assert_told(subject.model(), r)
        shared = 64 if how.get("radix", True) else 0
        assert [r.cached_tokens for r in several] == [0] + [shared] * 3
        assert scheduler.metrics.prompt_tokens == 70 + 3 * (70 - shared)


def test_choices_that_wait_are_aborted_and_fail_with_the_first_and_outlive_it() -> None:
    scheduler, rng = SUBJECTS["none"].build(chunk=16), random.Random(4)

    def begin() -> list[Request]:
        several = choices(any_ids(70, rng), 3, seed=None)
        submit(scheduler, *several)
        scheduler.step()
        assert stats_of(scheduler)["num_queue_reqs"] == 2 and len(scheduler.prefilling) == 1
        return several

    several = begin()
    assert len({r.seed for r in several}) == 3
    scheduler.abort(several[1].rid)
    scheduler.abort(several[0].rid)
    assert [r.finish and r.finish.kind for r in several] == ["abort", "abort", None]
    finish(scheduler)
    assert several[2].finish.kind == "length"
    several = begin()
    assert len(scheduler.abort("")) == 3 and not scheduler.has_work
    several = begin()
    scheduler.fail_all(RuntimeError("made to fail"))
    assert [r.finish.status for r in several] == [500] * 3 and not scheduler.has_work
    scheduler.check()


def test_a_choice_s_seed_is_the_documented_one() -> None:
    assert choice_seed(7, 0) == 7 and choice_seed(None, 3) is None
    assert choice_seed(7, 2) == (7 + 2 * 0x9E3779B97F4A7C15) % 2**64 - 2**64 * ((7 + 2 * 0x9E3779B97F4A7C15) >> 63 & 1)
    for seed in (2**63 - 1, -(2**63)):
        assert len({choice_seed(seed, i) for i in range(16)}) == 16
        assert all(-(2**63) <= choice_seed(seed, i) < 2**63 for i in range(16))


# ---- allowed tokens and salts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "standalone-tree"])
def test_only_allowed_tokens_are_picked(name: str) -> None:
    subject, allowed = SUBJECTS[name], [3, 9, 17, 40]
    prompt = subject.text(20, random.Random(1))
    greedy = request("greedy", prompt, allowed_token_ids=allowed, max_new_tokens=8, logprobs=Logprobs(top=1))
    biased = request("biased", prompt, allowed_token_ids=allowed, max_new_tokens=8, logit_bias={9: 100, 5: 100})
    drawn = request("drawn", prompt, allowed_token_ids=allowed, max_new_tokens=40, temperature=2.0, top_p=0.95,
                    sampling_seed=1)  # fmt: skip
    run(subject.build(), [greedy, biased, drawn])
    ids = list(prompt)
    for token in greedy.output_ids:
        logits = next_logits(subject.model(), ids)
        assert token == max(allowed, key=lambda t: float(logits[t]))
        ids.append(token)
    assert biased.output_ids == [9] * 8 and set(drawn.output_ids) <= set(allowed) and len(set(drawn.output_ids)) > 1
    assert_told(subject.model(), greedy)  # of the logits as they were, so the likeliest is mostly another token
    assert any(r.top[0][0] not in allowed for r in greedy.output_scores)


def test_what_leaves_nothing_to_pick_is_refused_by_name() -> None:
    scheduler = SUBJECTS["none"].build(eos=(4,))
    fine = request("r", [1], allowed_token_ids=[4, 5], min_new_tokens=2, stop_token_ids=[6])
    scheduler.validate(fine)
    for wrong in (dict(allowed_token_ids=[4, 5], min_new_tokens=1, stop_token_ids=[5]), dict(allowed_token_ids=[61]),
                  dict(allowed_token_ids=[])):  # fmt: skip
        with pytest.raises(RequestError, match="allowed_token_ids"):
            scheduler.validate(request("r", [1], **wrong))
    for wrong, name in ((Logprobs(start=1), "logprob_start_len"), (Logprobs(ids=(61,)), "token_ids_logprob")):
        with pytest.raises(RequestError, match=name):
            scheduler.validate(request("r", [1], logprobs=wrong))


def test_salted_text_is_found_under_its_salt_alone_and_teaches_nobody() -> None:
    subject = SUBJECTS["ngram"]
    scheduler = subject.build()
    drafter = scheduler.engine.drafter.inner
    assert isinstance(drafter, NgramDrafter)
    prompt, cached = any_ids(50, random.Random(2)) * 2, []
    for salt in ("a", "b", "a", "", "b", ""):
        r = request("r", prompt, max_new_tokens=40)
        r.salt = salt
        run(scheduler, [r])
        cached.append(r.cached_tokens > 0)
        assert r.verified.drafted.total() > 0, "its own text repeats itself"
        assert_exact(subject, [r])
        if len(cached) == 3:
            assert len(drafter.trie) == 1 and not drafter._texts and not drafter._line, "salted text was learnt"
    assert cached == [False, False, True, False, True, True]
    drafter.draft([])
    assert len(drafter.trie) > 1
    together = [request(f"{i}", prompt, max_new_tokens=6) for i in range(4)]
    together[1].salt = together[2].salt = "c"
    run(scheduler, together)
    assert_exact(subject, together)


def test_the_numbers_of_a_request_are_checked_once() -> None:
    for wrong, name in (({"top": 21}, "top_logprobs"), ({"top": -1}, "top_logprobs"), ({"ids": "x"}, "token_ids"),
                        ({"ids": [1] * 129}, "token_ids"), ({"start": -1}, "logprob_start_len")):  # fmt: skip
        with pytest.raises(RequestError, match=name):
            Logprobs(**wrong)
    assert Scored(-1.0, [], []).logprob == -1.0
