"""Trees: ancestors and depth against loops over parents, and a check that refuses every broken tree."""

from __future__ import annotations

import random

import pytest
import torch
from exactness import chain, check
from test_verify import forest

from minispec.tree import DraftTree, ancestors, depth


def climb(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def test_ancestors_and_depth_agree_with_climbing_the_parents() -> None:
    rng = random.Random(0)
    compared = 0
    for nodes in (1, 2, 3, 5, 8, 9, 17, 33):
        parents = forest(rng, 3, nodes, 50).parents
        known = ancestors(parents)
        assert known.shape == (3, nodes, nodes) and known.dtype == torch.bool
        for b, up in enumerate(parents.tolist()):
            for i in range(nodes):
                path = climb(up, i)
                assert known[b, i].nonzero().flatten().tolist() == sorted(path)
                assert depth(known)[b, i] == len(path) - 1
                compared += 1
    assert compared == 3 * (1 + 2 + 3 + 5 + 8 + 9 + 17 + 33)


def test_ancestors_of_a_chain_are_the_lower_triangle_at_every_length() -> None:
    for nodes in range(1, 70):
        tree = chain(torch.arange(nodes)[None])
        assert torch.equal(ancestors(tree.parents)[0], torch.ones(nodes, nodes).tril().bool())


def test_chain_hangs_padding_below_the_root() -> None:
    tree = chain(torch.tensor([[7, 8, 9], [7, 8, -1], [7, -1, -1], [-1, -1, -1]]))
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, 0, 0], [-1, 0, 0], [-1, 0, 0]]
    check(tree)
    check(chain(torch.tensor([[5], [-1]])))


@pytest.mark.parametrize(
    ("tokens", "parents", "complaint"),
    [
        ([1, 2], [0, 0], "root"),
        ([1, 2, 3], [-1, 2, 0], "precede"),
        ([1, 2, 3], [-1, 1, 0], "precede"),
        ([1, 2, 3], [-1, -1, 0], "precede"),
        ([1, 2, 2], [-1, 0, 0], "same token"),
        ([1, -1, 2], [-1, 0, 1], "padding"),
        ([1, 2, -1], [-1, 0, 1], "below the root"),
        ([1, 2, -2], [-1, 0, 1], "ids"),
    ],
)
def test_check_refuses_a_broken_tree(tokens: list[int], parents: list[int], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check(DraftTree(torch.tensor([tokens]), torch.tensor([parents])))


def test_check_allows_the_same_token_below_different_parents() -> None:
    check(DraftTree(torch.tensor([[1, 2, 3, 4, 4]]), torch.tensor([[-1, 0, 0, 1, 2]])))
