"""The checks that every drafter must pass, since no drafter may change the output, and the table of drafters.

A check takes a subject, a target with a drafter for it, and raises AssertionError if the tokens are not those of the
sequential reference (`exactness.reference`, which test_exactness.py compares with transformers), or if what it meant to
exercise did not happen. A new drafter is one line in SUBJECTS; without a line it is tested by `pytest
tests/test_exactness.py --drafter module:Class`.

Random heads are never right, so all nodes of their trees are rejected. The trained head and the oracle are mostly
right, so that accepted rows are compacted and further drafts build on them.

Equality proves little about a drafter that hardly drafts. So every step is counted in a `Tally`, and one check serves
texts that repeat themselves and fails where next to no trees were proposed, verified and accepted.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import slow_unless
from exactness import (
    MIXTURE,
    VOCAB,
    WINDOWED,
    Oracle,
    any_ids,
    build,
    mixed_requests,
    next_logits,
    reference,
    request,
    run,
    tiny_model,
    truth_of,
)
from torch import Tensor
from trained import BLOCK, sentence, trained_dflash, trained_dspark, trained_head, trained_like, trained_model

import minispec.verify as verify_module
from minispec.acceptance import Kept
from minispec.beam import BeamDrafter
from minispec.config import Config
from minispec.dflash import DFlashDrafter
from minispec.drafter import Draft, Drafter, HostDrafter, HostTrees, Plain
from minispec.dspark import DSparkDrafter
from minispec.eagle import DraftHead, Eagle3Head, EagleHead, HeadConfig
from minispec.load.drafters import make_drafter
from minispec.load.tokenizer import byte_tokenizer
from minispec.model import Model
from minispec.mtp import MtpHead
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.request import Request
from minispec.scheduler import Scheduler
from minispec.standalone import DraftModel, StandaloneDrafter
from minispec.tree import DraftTree

sharp_model = functools.cache(tiny_model)
mixture_model = functools.cache(functools.partial(tiny_model, **MIXTURE))
windowed_model = functools.cache(functools.partial(tiny_model, **WINDOWED))


@dataclass
class Tally:
    """What became of a drafter's trees, summed over schedulers; roots alone are no trees."""

    asked: int = 0  # trees asked for
    proposed: int = 0  # those of more than a root
    verified: int = 0  # rows of steps that verified trees
    accepted: int = 0  # drafts that these rows accepted

    def __str__(self) -> str:
        return (f"asked for {self.asked:,} trees, proposed {self.proposed:,}; {self.verified:,} rows were verified "
                f"with trees, and accepted {self.accepted:,} drafts")  # fmt: skip

    def __sub__(self, before: Tally) -> Tally:
        return Tally(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def attach(self, scheduler: Scheduler) -> None:
        """Count what this scheduler's drafter proposes and what its steps accept."""
        drafter, decode = scheduler.engine.drafter, scheduler.metrics.decode
        inner = drafter.inner if isinstance(drafter, HostTrees) else None

        def counted(load: object, kept: list[Kept], **more: object) -> None:
            decode(load, kept, **more)
            trees = sum(one.source is not None for one in kept)
            self.verified += trees
            self.accepted += sum(one.accepted for one in kept)
            if inner is None:  # drafted within the step
                self.asked, self.proposed = self.asked + len(kept), self.proposed + trees

        scheduler.metrics.decode = counted
        if inner is not None:
            draft = inner.draft

            def offered(slots: Sequence[int]) -> list[Draft]:
                drafts = draft(slots)
                self.asked += len(drafts)
                self.proposed += sum(len(draft.tokens) > 1 for draft in drafts)
                return drafts

            inner.draft = offered


@dataclass(frozen=True)
class Subject:
    """A target and how to make a drafter for it."""

    drafter: Callable[[Model], Drafter | HostDrafter]
    accept_length: float = 0.0  # what it must exceed when greedy
    drafts: bool = True  # not plain decoding
    accepted: int = 12  # the least drafts to be accepted of texts that repeat themselves, whose replies have 180 tokens
    tally: Tally = dataclasses.field(default_factory=Tally)
    model: Callable[[], Model] = sharp_model
    text: Callable[[int, random.Random], list[int]] = any_ids  # of prompts
    built: list[HostTrees] = dataclasses.field(default_factory=list)  # the host drafters of all schedulers put together

    def build(self, **how: object) -> Scheduler:
        """Put a scheduler together over a fresh drafter."""
        with torch.inference_mode():
            drafter = self.drafter(self.model())
        scheduler = build(self.model(), drafter, **how)
        self.tally.attach(scheduler)
        if isinstance(scheduler.engine.drafter, HostTrees):
            self.built.append(scheduler.engine.drafter)
        return scheduler

    def requests(self, **params: object) -> list[Request]:
        """Return eight mixed requests."""
        return mixed_requests(text=self.text, **params)


def own(name: str) -> Subject:
    """Return the subject of a drafter named as module:Class, made as the server makes it."""
    config = Config(model_path="tiny", speculative_algorithm=name)
    return Subject(lambda model: make_drafter(config, model, Path("tiny"), byte_tokenizer(VOCAB)))


@torch.inference_mode()
def random_head(kind: type[DraftHead], model: Model, **switches: object) -> DraftHead:
    """Return a head of a published kind with random weights."""
    torch.manual_seed(5)
    head = kind.empty(HeadConfig(kind.name, model.config.plain(), **switches), model)
    for name, parameter in head.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.3)
    return head


def beams(head: Callable[[Model], DraftHead], **options: object) -> dict[str, Subject]:
    """Return the subjects of a head, by what their names end in: a chain and a tree."""
    make = lambda steps, topk, nodes: lambda model: BeamDrafter(head(model), rounds=steps, topk=topk, nodes=nodes)  # noqa: E731
    return {"chain": Subject(make(3, 1, 4), **options), "tree": Subject(make(3, 3, 8), **options)}


def standalone(steps: int, topk: int, nodes: int, **options: object) -> Subject:
    """Return the subject of a model that drafts for itself."""
    return Subject(lambda model: StandaloneDrafter(DraftModel(model, VOCAB), rounds=steps, topk=topk, nodes=nodes),
                   **options)  # fmt: skip


def block(accept_length: float, **shape: int) -> Subject:
    """Return the subject of a network that drafts a block in one pass."""
    return Subject(lambda model: DFlashDrafter(trained_dflash(), **shape), model=trained_model, text=sentence,
                   accept_length=accept_length)  # fmt: skip


def spark(accept_length: float, **shape: Any) -> Subject:
    """Return the subject of a DSpark network."""
    return Subject(lambda model: DSparkDrafter(trained_dspark(), **shape), model=trained_model, text=sentence,
                   accept_length=accept_length)  # fmt: skip


HALF = torch.arange(0, VOCAB, 2)  # a draft vocabulary, target ids
HEADS: dict[str, dict[str, Subject]] = {
    "eagle": beams(lambda model: random_head(EagleHead, model, fc_bias=True), accepted=0),
    "eagle3": beams(lambda model: random_head(Eagle3Head, model, taps=(1, 2), token_map=HALF), accepted=0),
    "mtp": beams(lambda model: random_head(MtpHead, model), accepted=0),
    "trained": beams(lambda model: trained_head(), model=trained_model, text=sentence, accept_length=2.5),
}
SUBJECTS: dict[str, Subject] = {
    "none": Subject(lambda model: Plain(), drafts=False, accepted=0),
    "ngram": Subject(lambda model: NgramDrafter(NgramOptions(nodes=8))),
    "oracle": Subject(lambda model: Oracle(truth_of(model)), accept_length=1.5),
    "standalone-chain": standalone(3, 1, 4, accept_length=3.0),
    "standalone-tree": standalone(3, 3, 8, accept_length=2.0),
    # The chain has more rows than the network was trained with: with fewer the pool of `retraction` is not short.
    "dflash-chain": block(1.9, block=BLOCK + 2, nodes=BLOCK + 2),
    "dflash-tree": block(2.0, block=BLOCK, nodes=10, topk=3),
    # All five rows draft; a chain of rows beyond them keeps the pool of `retraction` short.
    "dspark-chain": spark(1.9, block=BLOCK + 1, nodes=BLOCK + 2),
    "dspark-tree": spark(2.0, block=BLOCK - 1, nodes=10, topk=3, threshold=0.3),
    **{f"{name}-{shape}": subject for name, shapes in HEADS.items() for shape, subject in shapes.items()},
}


def subjects_with(sharp: Callable[[], Model], **switches: Any) -> dict[str, Subject]:
    """Return all subjects on a model with switches of its config; `sharp` makes it of random weights."""
    models = {sharp_model: sharp, trained_model: functools.partial(trained_like, **switches)}
    return {name: dataclasses.replace(subject, model=models[subject.model], tally=Tally(), built=[])
            for name, subject in SUBJECTS.items()}  # fmt: skip


# ---- the truth ----------------------------------------------------------------------------------------------------

_known: dict[tuple[object, ...], list[int]] = {}


def truth(model: Model, request: Request, stop_ids: Sequence[int] = ()) -> list[int]:
    """Return the reference output of a request that was validated, remembered between checks."""
    params = dataclasses.replace(request.params, max_new_tokens=None)
    key = (id(model), tuple(request.prompt_ids), repr(params), request.seed, tuple(stop_ids))
    known = _known.get(key, [])
    if len(known) < request.max_new_tokens and not (known and known[-1] in stop_ids):
        known = _known[key] = reference(model, request, stop_ids)
    return known[: request.max_new_tokens]


def assert_exact(subject: Subject, requests: Sequence[Request], stop_ids: Sequence[int] = ()) -> None:
    """Compare every request with its reference; every tree of a drafter on the host must have been one."""
    assert not any(drafter.refused for drafter in subject.built), "a tree broke the rules; the log says which"
    for r in requests:
        assert r.output_ids and r.output_ids == truth(subject.model(), r, stop_ids), f"{r.rid} differs"


# ---- the checks ---------------------------------------------------------------------------------------------------


def greedy_alone_and_in_a_batch_of_eight(subject: Subject) -> None:
    """Greedy ids are the reference's, and drafts that should be accepted are."""
    for running in (1, 8):
        requests = subject.requests()[: 4 * running]
        scheduler = subject.build(running=running)
        run(scheduler, requests)
        assert_exact(subject, requests)
    assert scheduler.metrics.verified.accept_length > subject.accept_length


def chunked_prompts(subject: Subject) -> None:
    """Chunks of one token, of less than a query block and of no round number."""
    for chunk, count in ((1, 3), (32, 8), (50, 8)):
        requests = subject.requests(max_new_tokens=8)[:count]
        run(subject.build(chunk=chunk, running=4), requests)
        assert_exact(subject, requests)


def prefix_hits_and_a_second_turn(subject: Subject) -> None:
    """What the cache restores is what was computed."""
    scheduler = subject.build()
    run(scheduler, subject.requests())
    again = subject.requests()
    run(scheduler, again)
    assert_exact(subject, again)
    assert sum(r.cached_tokens for r in again) > 100
    first = again[1]
    turn = request("turn", first.prompt_ids + first.output_ids + [3, 1, 4])
    run(scheduler, [turn])
    assert_exact(subject, [turn])
    assert turn.cached_tokens >= len(first.prompt_ids) // 16 * 16 > 0


def prompts_that_differ_around_a_page_s_end(subject: Subject) -> None:
    """With pages of 64 rows: token 64 lies in the second page, and a head's row 63 depends on it."""
    first = subject.text(131, random.Random(8))
    scheduler = subject.build(page_size=64, pages=24)
    run(scheduler, [request("first", first, max_new_tokens=4)])
    for differ in (63, 64, 65, 128, 129):
        other = request(f"{differ}", [*first[:differ], (first[differ] + 2) % VOCAB, *first[differ + 1 :]],
                        max_new_tokens=8)  # fmt: skip
        run(scheduler, [other])
        assert_exact(subject, [other])
        assert other.cached_tokens == (differ - scheduler.engine.drafter.lookahead) // 64 * 64


def retraction(subject: Subject) -> None:
    """A pool that eight requests outgrow; nothing is sent twice or lost."""
    requests = subject.requests(max_new_tokens=40)
    scheduler = subject.build(pages=15)
    texts = run(scheduler, requests)
    assert_exact(subject, requests)
    assert scheduler.metrics.retractions > 0, "the pool was never short"
    assert all(len(texts[r]) == len(r.output_ids) for r in requests)


def arrival_one_by_one(subject: Subject) -> None:
    """Batches of changing size, prefill steps between decode steps."""
    requests = subject.requests(max_new_tokens=16)
    run(subject.build(running=3), requests, stagger=3)
    assert_exact(subject, requests)


WISHES = dict(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3,
              presence_penalty=0.2, logit_bias={5: 1.5, 7: -3.0})  # fmt: skip


def seeded_samples(subject: Subject) -> None:
    """A seed gives the same text whoever drafts, alone, in a batch and in a pool too small."""
    for wishes, how in (
        (dict(temperature=1.0), dict(pages=15)),
        (WISHES, dict()),
        (WISHES, dict(running=1, chunk=32)),
        ({**WISHES, "temperature": 0.0}, dict()),
    ):
        requests = subject.requests(**wishes, max_new_tokens=12)[: 4 * how.get("running", 2)]
        run(subject.build(**how), requests)
        assert_exact(subject, requests)


def requests_of_every_kind_in_one_batch(subject: Subject) -> None:
    """Each row has its own parameters and stop ids."""
    kinds = [dict(), WISHES, dict(temperature=1.0, min_new_tokens=5), dict(repetition_penalty=1.5),
             dict(top_k=3, temperature=1.0), dict(temperature=0.7, top_p=0.5), dict(logit_bias={1: 100.0}),
             dict(max_new_tokens=1)]  # fmt: skip
    eos = (4, 9, 17, 30)
    requests = [request(f"k{i}", [i, 2, 3, i, 2], **{"sampling_seed": 11, **kind}) for i, kind in enumerate(kinds)]
    run(subject.build(eos=eos), requests)
    assert_exact(subject, requests, eos)
    assert {r.finish.kind for r in requests} == {"stop", "length"}


def the_last_row_of_context_and_pool(subject: Subject) -> None:
    """Text runs to where there is no more room, and no further."""
    scheduler = subject.build(running=2)
    full = request("context", subject.text(220, random.Random(2)), max_new_tokens=None)
    run(scheduler, [full])
    assert len(full.prompt_ids) + len(full.output_ids) == 256 and full.finish.kind == "length"
    assert_exact(subject, [full])
    several = [request(f"p{i}", [i, 5, 6] * 6, max_new_tokens=None) for i in range(4)]
    run(subject.build(pages=6, running=4), several)
    assert all(r.finish.kind == "length" and len(r.output_ids) > 40 for r in several)


FEW = dict(temperature=1.0, logit_bias=dict.fromkeys((3, 8, 21, 34), 100.0))  # these ids alone, in a changing order


def texts_that_repeat_are_drafted_for(subject: Subject) -> None:
    """Prompts that repeat a phrase, and replies of four ids or of one word: a drafter that drafts now has met a test.

    What drafts from texts finds nothing in random ones, and whatever it does then has passed all checks above. Trees
    are counted as a share, since a drafter that is always right is asked for few.
    """
    before = dataclasses.replace(subject.tally)
    requests = []
    for i in range(6):
        phrase = subject.text(9, random.Random(i))
        wishes = (dict(temperature=0.0), FEW)[i % 2]
        requests.append(request(f"again{i}", phrase * 4, sampling_seed=i, max_new_tokens=30, **wishes))
    run(subject.build(), requests)
    assert_exact(subject, requests)
    tally = subject.tally - before
    if subject.drafts:
        assert 8 * tally.proposed >= tally.asked > 0, f"fewer than an eighth of the trees asked for were there: {tally}"
        assert 2 * tally.verified >= tally.proposed, f"fewer than half of the trees were verified: {tally}"
    assert tally.accepted >= subject.accepted, f"fewer than {subject.accepted} drafts were accepted: {tally}"


CHECKS: tuple[Callable[[Subject], None], ...] = (
    greedy_alone_and_in_a_batch_of_eight, chunked_prompts, prefix_hits_and_a_second_turn,
    prompts_that_differ_around_a_page_s_end, retraction, arrival_one_by_one, seeded_samples,
    requests_of_every_kind_in_one_batch, the_last_row_of_context_and_pool, texts_that_repeat_are_drafted_for,
)  # fmt: skip


def checks_of(subjects: dict[str, Subject], quick: Sequence[Callable[[Subject], None]]) -> list[Any]:
    """Return the parameters (name, check) of these subjects' tests; checks that are not `quick` are marked slow.

    Every subject has all checks on the ordinary models, in test_exactness.py. Here two that notice most have them all.
    Each of the others has the first check and two more in turn, so that every check meets several drafters.
    """
    first, *more = CHECKS
    cases = [(name, check) for name in ("oracle", "standalone-tree") for check in CHECKS]
    for turn, name in enumerate(name for name in subjects if name not in ("oracle", "standalone-tree")):
        cases += [(name, check) for check in (first, *(more[(2 * turn + i) % len(more)] for i in range(2)))]
    return slow_unless(cases, lambda name, check: check in quick)


class Heard(Oracle):
    """An oracle that remembers the text for which it drafted last."""

    def draft(self, slots: Sequence[int]) -> list[Draft]:
        """Return a random tree per slot."""
        (self.heard,) = (list(self.texts[slot]) for slot in slots)
        return super().draft(slots)


def nodes_have_the_logits_of_their_own_paths(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare every node of every tree of a reply with the text that ends in it, read without a cache."""
    compared: list[float] = []
    oracle, inner = Heard(truth_of(model), nodes=8), verify_module.verify_greedy

    def verify(trees: Any, logits: Tensor) -> Any:
        tree: DraftTree = trees.tree
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        paths: list[list[int]] = []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            paths.append([*(paths[parent] if node else oracle.heard[:-1]), token])
            if token >= 0:
                compared.append(float((logits[0, node] - next_logits(model, paths[node])).abs().max()))
        return inner(trees, logits)

    monkeypatch.setattr(verify_module, "verify_greedy", verify)
    run(build(model, oracle, running=1), [request("r", [3, 1, 4, 1, 5, 9, 2, 6], max_new_tokens=80)])
    assert len(compared) > 100 and max(compared) < 1e-4 and oracle.branched > 5
