"""Errors on purpose: each breaks one thing that exact output depends on, and the check must notice.

A check that still passes under a mutation proves nothing. Each mutation is a monkeypatch of a real function or method.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from exactness import Oracle, build, mixed_requests, reference, run, tiny_model, truth_of

import minispec.engine as engine_module
import minispec.verify as verify_module
from minispec.attention import Plan
from minispec.cpu.gather import PagedGather
from minispec.drafter import Plain
from minispec.kv import PagedKV
from minispec.request import Request
from minispec.scheduler import Scheduler

pytestmark = pytest.mark.slow
MODEL = tiny_model()


def requests_of_the_check() -> list[Request]:
    """Return eight requests that outgrow the check's pool."""
    return mixed_requests(max_new_tokens=50)


@functools.cache
def truth() -> dict[str, list[int]]:
    """Return the reference outputs by rid."""
    scheduler, requests = build(MODEL, Plain()), requests_of_the_check()
    for r in requests:
        scheduler.validate(r)
    return {r.rid: reference(MODEL, r) for r in requests}


def check() -> None:
    """Raise AssertionError unless trees, batches, shared pages and retraction leave the tokens as they are."""
    requests = requests_of_the_check()
    drafter = Oracle(truth_of(MODEL), miss=0.1)
    scheduler = build(MODEL, drafter, pages=15)
    run(scheduler, requests)
    for r in requests:
        assert r.output_ids == truth()[r.rid], f"{r.rid} differs"
    assert scheduler.metrics.retractions > 0 and drafter.branched > 20


def causal_mask(patch: pytest.MonkeyPatch) -> None:
    """Every node sees all nodes before it, ancestors or not."""
    original = Plan.fill
    patch.setattr(Plan, "fill", lambda self, slots, starts, visible, live: original(
        self, slots, starts, torch.ones_like(visible).tril(), live))  # fmt: skip


def index_as_position(patch: pytest.MonkeyPatch) -> None:
    """A node's rotary position is its index in the tree, not its depth."""
    patch.setattr(engine_module, "depth", lambda above: torch.arange(above.shape[1]).expand(above.shape[:2]))


def no_compaction(patch: pytest.MonkeyPatch) -> None:
    """Accepted rows stay where the tree put them."""
    patch.setattr(PagedKV, "compact", lambda self, slots, lens, path, count: None)


def wrong_slots_pages(patch: pytest.MonkeyPatch) -> None:
    """The first two rows of a batch read each other's pages."""
    original = PagedGather._rows_and_mask

    def swapped(self: PagedGather, blocks: slice, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, mask = original(self, blocks, reach)
        return (rows[[1, 0, *range(2, len(rows))]] if len(rows) > 1 else rows), mask

    patch.setattr(PagedGather, "_rows_and_mask", swapped)


def padding_matches(patch: pytest.MonkeyPatch) -> None:
    """Padding nodes carry a real token, the commonest of the outputs, so the target's pick can match them."""
    original = verify_module.verify_greedy
    common = Counter(token for ids in truth().values() for token in ids).most_common(1)[0][0]

    def verify(trees, logits):
        tokens = trees.tree.tokens.masked_fill(trees.tree.tokens == -1, common)
        return original(trees._replace(tree=trees.tree._replace(tokens=tokens)), logits)

    patch.setattr(verify_module, "verify_greedy", verify)


def stale_page_after_retraction(patch: pytest.MonkeyPatch) -> None:
    """A retracted request comes back to its old pages' contents without computing them again."""
    original = Scheduler._seat

    def seat(self, request, ids, path, needed):
        original(self, request, ids, path, needed)
        if request.retractions:
            request.kv_len = len(ids) - 1

    patch.setattr(Scheduler, "_seat", seat)


MUTATIONS = [causal_mask, index_as_position, no_compaction, wrong_slots_pages, padding_matches,
             stale_page_after_retraction]  # fmt: skip


def test_the_check_passes_on_the_code_as_it_is() -> None:
    check()
    assert len(truth()) == 8


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_the_check_notices(mutation, monkeypatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match="differs"):
        check()
