"""What a head reads, tested on a target with a head that was trained for it, so that every error costs acceptance.

Each mutation must give a tree that differs from the slow reference's, and those that cost much acceptance must show
this as well. The prompts of the trees are noisy and cut into chunks of four, so that what the target would have said at
a chunk's end is often not what the prompt says.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
from exactness import build, mixed_requests, run
from test_beam import (
    assert_slow_trees,
    position_off_by_one,
    record,
    siblings_see_each_other,
    stale_rows,
    token_i_instead_of_the_next,
)
from trained import sentence, trained_head, trained_model

from minispec.beam import BeamDrafter
from minispec.engine import Engine
from minispec.scheduler import Scheduler

CHAIN, TREE = (3, 1, 4), (3, 3, 8)  # steps, topk, nodes


def served(shape: tuple[int, int, int], noise: float, noted: bool = False) -> tuple[Scheduler, list[tuple]]:
    """Serve eight texts of the language; returns the scheduler for its counts and, if they are noted, the trees."""
    steps, topk, nodes = shape
    with torch.inference_mode():
        scheduler = build(trained_model(), BeamDrafter(trained_head(), rounds=steps, topk=topk, nodes=nodes), chunk=4)
    trees = record(scheduler) if noted else []
    text: Callable[[int, random.Random], list[int]] = functools.partial(sentence, noise=noise)
    run(scheduler, mixed_requests(text=text, max_new_tokens=24))
    return scheduler, trees


def acceptance() -> float:
    """Return the share of drafted tokens that is accepted, in chains."""
    return (served(CHAIN, noise=0.1)[0].metrics.verified.accept_length - 1) / CHAIN[0]


def assert_trees() -> None:
    """Raise AssertionError unless the trees are the slow reference's."""
    _, trees = served(TREE, noise=0.4, noted=True)
    assert_slow_trees(trees, *TREE, every=3, head=trained_head(), model=trained_model())


def test_the_head_is_good_and_its_trees_are_the_slow_reference_s() -> None:
    assert acceptance() > 0.8
    assert_trees()


def layers_one_early(patch: pytest.MonkeyPatch) -> None:
    """Layer outputs are read as layer inputs: every tap is one layer early."""
    original = BeamDrafter.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.taps = tuple(tap - 1 for tap in self.taps)

    patch.setattr(BeamDrafter, "__init__", init)


def d2t_as_ids(patch: pytest.MonkeyPatch) -> None:
    """The file's offsets are taken for target ids."""
    patch.setattr(BeamDrafter, "_to_target", lambda self, ids: self.network.token_map[ids] - ids)


def sample_at_a_chunk_s_end(patch: pytest.MonkeyPatch) -> None:
    """The pair at a chunk's end holds what the target would have said, not the prompt's next token."""
    original = Engine.prefill

    def prefill(self, chunks):
        said = original(self, chunks).outputs
        wrong = [c if c.last else c._replace(following=int(said[i, 0])) for i, c in enumerate(chunks)]
        return original(self, wrong)

    patch.setattr(Engine, "prefill", prefill)


MUTATIONS = {  # and the acceptance that each leaves at most
    layers_one_early: 0.7,
    token_i_instead_of_the_next: 0.6,
    stale_rows: 0.6,
    d2t_as_ids: 0.1,
    position_off_by_one: None,  # this language hardly asks where things are
    sample_at_a_chunk_s_end: None,
    siblings_see_each_other: None,  # a chain has none
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_every_error_shows(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    if (most := MUTATIONS[mutation]) is not None:
        assert acceptance() < most
    with pytest.raises(AssertionError):
        assert_trees()
