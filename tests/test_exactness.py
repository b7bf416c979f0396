"""The spine of the suite: whatever the drafter, batch, chunking, cache and memory, plain decoding's tokens come out.

The checks and the drafters are in conformance.py. Here every drafter is put through every check, and the reference that
the checks rely on is compared with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from conformance import (
    CHECKS,
    SUBJECTS,
    WISHES,
    Subject,
    chunked_prompts,
    own,
    retraction,
    seeded_samples,
    texts_that_repeat_are_drafted_for,
    truth,
)
from conftest import TALLY, pytest_terminal_summary
from exactness import VOCAB, Oracle, mixed_requests, run, truth_of
from transformers import LlamaConfig, LlamaForCausalLM

import minispec.verify as verify_module
from minispec.drafter import Draft
from minispec.load.published import published_tensors
from minispec.model import Model
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.request import Request

# One drafter grows the trees of all heads, so of the heads two are put through every check in the quick run, and the
# others through those that depend on what a head keeps of its own: after a retraction, by chunks, and with noise.
WHOLE = ("none", "ngram", "oracle", "standalone-tree", "trained-tree", "dflash-tree")
OF_ALL = (retraction, chunked_prompts, seeded_samples)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every check for every subject, or for the one that --drafter names, with no case marked slow."""
    if "subject" in metafunc.fixturenames:
        named = metafunc.config.getoption("--drafter")
        subjects = {named: own(named)} if named else SUBJECTS
        cases = [
            pytest.param(subject, check, id=f"{name}-{check.__name__}",
                         marks=() if named or name in WHOLE or check in OF_ALL else pytest.mark.slow)
            for name, subject in subjects.items() for check in CHECKS
        ]  # fmt: skip
        metafunc.parametrize(("subject", "check"), cases)


def test_tokens_stay_the_same(
    subject: Subject, check: Callable[[Subject], None], record_property: Callable[[str, object], None]
) -> None:
    before = replace(subject.tally)
    try:
        check(subject)
    finally:
        record_property(TALLY, astuple(subject.tally - before))


class Rare(NgramDrafter):
    """NGRAM, which has something to say only now and then."""

    def draft(self, slots: Sequence[int]) -> list[Draft]:
        """Return roots alone, but for one time in twenty."""
        self.times = getattr(self, "times", 0) + 1
        drafts = super().draft(slots)
        return drafts if self.times % 20 == 0 else [Draft(draft.tokens[:1], [-1]) for draft in drafts]


def test_a_drafter_that_hardly_drafts_does_not_pass() -> None:
    subject = Subject(lambda model: Rare(NgramOptions(nodes=8)))
    with pytest.raises(AssertionError, match=r"fewer than an eighth of the trees asked for were there: asked for "):
        texts_that_repeat_are_drafted_for(subject)
    assert subject.tally.asked > 60 > 2 * subject.tally.proposed


class Knowing(Oracle):
    """A drafter that knows whole texts, and drafts how they go on as a chain, every token moved on by an offset."""

    known: ClassVar[list[list[int]]] = []
    offset: ClassVar[int] = 0

    def draft(self, slots: Sequence[int]) -> list[Draft]:
        """Return a chain per slot."""
        return [self._chain(self.texts[slot]) for slot in slots]

    def _chain(self, text: list[int]) -> Draft:
        whole = next((known for known in self.known if known[: len(text)] == text), text)
        drafts = [(token + self.offset) % VOCAB for token in whole[len(text) : len(text) + self.depth]]
        return Draft([text[-1], *drafts], list(range(-1, len(drafts))), match_length=1)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """The texts that `texts_that_repeat_are_drafted_for` makes."""

    class Listener(Oracle):
        def release(self, slot: int) -> None:
            heard.append(self.texts.get(slot, []))
            super().release(slot)

    heard: list[list[int]] = []
    texts_that_repeat_are_drafted_for(Subject(lambda model: Listener(truth_of(model))))
    return heard


@pytest.mark.parametrize("nodes", [2, 8, 24])
def test_a_drafter_that_is_always_right_passes_whatever_its_depth(
    nodes: int, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Knowing, "known", texts)
    subject = Subject(lambda model: Knowing(truth_of(model), nodes))
    texts_that_repeat_are_drafted_for(subject)
    assert subject.tally.asked <= 6 * math.ceil(30 / nodes), "six replies of 30 tokens"


def test_a_drafter_that_is_always_wrong_does_not_pass(texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Knowing, "known", texts)
    monkeypatch.setattr(Knowing, "offset", 1)
    with pytest.raises(AssertionError, match="fewer than 12 drafts were accepted"):
        texts_that_repeat_are_drafted_for(Subject(lambda model: Knowing(truth_of(model), 8)))


def test_the_last_line_of_a_run_on_one_s_own_drafter_adds_the_trees_of_all_checks_up() -> None:
    reports = [SimpleNamespace(user_properties=[(TALLY, counts)]) for counts in ([1000, 20, 3, 4], [10, 2, 1, 0])]
    lines: list[str] = []
    reporter = SimpleNamespace(stats={"passed": reports[:1], "failed": reports[1:]}, write_line=lines.append)
    for named in ("my:Drafter", None):
        pytest_terminal_summary(reporter, SimpleNamespace(getoption=lambda flag, named=named: named))
    (line,) = lines
    assert line == ("my:Drafter was asked for 1,010 trees, proposed 22; 4 rows were verified with trees, and accepted "
                    "4 drafts.")  # fmt: skip


def as_transformers_has_it(model: Model) -> LlamaForCausalLM:
    """Return transformers' model with these weights."""
    c = model.config
    other = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, head_dim=c.head_dim,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        rms_norm_eps=c.norm_eps, max_position_embeddings=c.context_length, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    ))  # fmt: skip
    weights = published_tensors(model)
    other.load_state_dict({n if n.startswith("lm_head") else f"model.{n}": t for n, t in weights.items()})
    return other.eval()


@pytest.mark.parametrize("name", ["none", "trained-tree"])
def test_the_reference_is_what_transformers_generates(name: str) -> None:
    subject = SUBJECTS[name]
    other, scheduler = as_transformers_has_it(subject.model()), subject.build()
    for r in mixed_requests(text=subject.text):
        scheduler.validate(r)
        ids = torch.tensor([r.prompt_ids])
        made = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
                              pad_token_id=0)  # fmt: skip
        assert made[0, ids.shape[1] :].tolist() == truth(subject.model(), r)


@pytest.mark.parametrize("name", ["none", "ngram", "oracle", "mtp-tree"])
def test_lossy_thresholds_leave_greedy_requests_exact_and_a_seed_its_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = SUBJECTS[name]

    def serve(thresholds: tuple[float, float] | None) -> tuple[list[Request], float]:
        requests = subject.requests(**WISHES | {"temperature": 1.0})
        for r in requests[::2]:
            r.params = replace(r.params, temperature=0.0)
        scheduler = subject.build(thresholds=thresholds)
        drafter, batches = scheduler.engine.drafter, []
        inner = drafter.propose
        drafter.propose = lambda batch: batches.append(batch) or inner(batch)
        run(scheduler, requests)
        if drafter.network is not None:  # a draft may know the noise of a pick, not of what is drawn after a coin
            assert any(batch.temperature is not None for batch in batches) == (thresholds is None)
        return requests, scheduler.metrics.verified.accept_length

    (exact, _), (lossy, accepted), (again, _) = serve(None), serve((0.02, 0.1)), serve((0.02, 0.1))
    for r, other, same in zip(exact, lossy, again, strict=True):
        assert r.output_ids == truth(subject.model(), r) and other.output_ids == same.output_ids
        assert r.params.temperature > 0 or other.output_ids == r.output_ids
    differ = [r.rid for r, other in zip(exact, lossy, strict=True) if r.output_ids != other.output_ids]
    assert bool(differ) == (name != "none") or name.startswith("ngram")
    if name == "oracle":  # it drafts the likeliest tokens
        assert accepted > serve(None)[1]

    def never(*given: object) -> None:
        raise AssertionError("the lossy rule ran")

    monkeypatch.setattr(verify_module, "pick_lossy", never)
    serve(None)
    with pytest.raises(AssertionError, match="the lossy rule ran"):
        serve((1.0, 0.9))
