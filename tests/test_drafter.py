"""A drafter on the host may return bad trees: they are found before they are uploaded, and no request is lost."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from conformance import truth
from exactness import VOCAB, Oracle, build, mixed_requests, run, tiny_model, truth_of

from minispec.drafter import Draft, HostTrees, Plain, as_drafter
from minispec.serve.info import stats_of

MODEL = tiny_model()
BAD = {  # what a drafter can get wrong, and the words of the log
    "equal siblings": (Draft([1, 5, 5], [-1, 0, 0], 9), "two children of node 0 hold the token 5"),
    "child before parent": (Draft([1, 5, 6], [-1, 2, 0], 9), "node 1 has the parent 2, which does not precede it"),
    "two roots": (Draft([1, 5], [-1, -1], 9), "node 1 has the parent -1, which does not precede it"),
    "rootless": (Draft([1, 5], [0, 0], 9), "the root's parent is 0, not -1"),
    "no id of the target": (Draft([1, VOCAB], [-1, 0], 9), f"node 1 holds the token {VOCAB}, which is not in"),
    "padding as a draft": (Draft([1, -1], [-1, 0], 9), "node 1 holds the token -1, which is not in"),
    "too many nodes": (Draft(list(range(9)), [-1, *range(8)], 9), "9 tokens and 9 parents, where 1 to 8"),
    "a parent short": (Draft([1, 2, 3], [-1, 0], 9), "3 tokens and 2 parents"),
    "empty": (Draft([], [], 9), "0 tokens and 0 parents"),
}


class Liar(Oracle):
    """The oracle, which gives the first of every batch a bad tree."""

    def __init__(self, bad: Draft | None) -> None:
        super().__init__(truth_of(MODEL), name="liar")
        self.bad = bad

    def draft(self, slots: Sequence[int]) -> list[Draft]:
        """Return good trees but for one; without a bad one a tree too few."""
        good = super().draft(slots)
        return good[1:] if self.bad is None else [self.bad, *good[1:]]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tree_is_named_in_the_log_and_costs_nobody_a_token(name: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, words = BAD[name]
    scheduler, requests = build(MODEL, Liar(bad), running=4), mixed_requests(max_new_tokens=12)
    with caplog.at_level(logging.ERROR, "minispec"):
        run(scheduler, requests)
    assert all(r.output_ids == truth(MODEL, r) for r in requests)
    assert scheduler.metrics.verified.accept_length > 1.2, "the good trees beside it are still verified"
    errors = [record.getMessage() for record in caplog.records]
    assert 0 < len(errors) <= 10 and all(f"the drafter liar proposed what is no tree ({words}" in e for e in errors)
    assert scheduler.engine.drafter.refused > len(errors), "a drafter that is always wrong does not flood the log"


def test_trees_for_other_than_the_requests_asked_about_are_refused_whole(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, requests = build(MODEL, Liar(None), running=4), mixed_requests(max_new_tokens=6)
    run(scheduler, requests)
    assert all(r.output_ids == truth(MODEL, r) for r in requests) and not stats_of(scheduler)["tree_steps"]
    assert "trees for" in caplog.text


def test_only_a_drafter_on_the_host_is_wrapped_and_only_once() -> None:
    plain, oracle = Plain(), Oracle(truth_of(MODEL))
    wrapped = as_drafter(oracle, VOCAB)
    assert as_drafter(plain, VOCAB) is plain and isinstance(wrapped, HostTrees) and wrapped.inner is oracle
    assert as_drafter(wrapped, VOCAB) is wrapped


def test_a_tree_is_cut_to_fewer_nodes_and_says_what_it_holds_of_a_text() -> None:
    draft = Draft([9, 1, 2, 3, 4], [-1, 0, 0, 1, 3], match_length=2)
    assert draft.cut(4) == Draft([9, 1, 2, 3], [-1, 0, 0, 1], 2) and draft.cut(9) == draft
    for nodes, held in ((5, 3), (4, 2), (3, 1), (2, 1), (1, 0)):
        assert draft.cut(nodes).holds([1, 3, 4, 7]) == draft.holds([1, 3, 4, 7], nodes) == held, nodes
    assert draft.holds([3, 4]) == 0 and draft.holds([2, 3]) == 1, "3 follows 1, not 2"
    assert (draft.match, draft.cut(1).match, Draft([9, 1], [-1, 0]).match) == (2, 0, 1)
