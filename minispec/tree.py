"""Draft trees: several proposed continuations of one text, flattened into rows the target reads in a single forward.

The one idea: a tree is two integer arrays, the token of each node and the index of its parent. Everything else (who
may attend to whom, at which position a node stands) follows from the parents by tensor operations of static shape, so
it works in a compiled graph. Plain decoding is the tree with one node, a prompt chunk is a chain. Tree attention comes
from SpecInfer (arXiv 2305.09781); choosing which tree to draft is the business of a drafter.

Invariant 1, owned here: parents precede children, siblings hold distinct tokens, padding nodes hold -1.

Read next: `verify.py` for what the target makes of a tree, `attention.py` for the mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PADDING = -1  # the token of a node that is not there; no pick of the target ever equals it


class DraftTree(NamedTuple):
    """One tree per batch row; node 0 is the root, the newest committed token, whose KV is not written yet."""

    tokens: Tensor  # [B, N] int64; padding nodes hold -1
    parents: Tensor  # [B, N] int64; -1 for the root, 0 for padding nodes, else an index below the node's own


def chain(tokens: Tensor) -> DraftTree:
    """Return the tree without branches over `tokens [B, N] int64`; -1 may pad its end."""
    before = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
    # A padded root stays a root: only nodes after it move below node 0.
    return DraftTree(tokens, torch.where((tokens == PADDING) & (before >= 0), 0, before))


def ancestors(parents: Tensor) -> Tensor:
    """Return `[B, N, N] bool` from `parents [B, N] int64`: entry [b, i, j] says that j is i or an ancestor of i.

    Pointer doubling: after round k a node knows its 2^k nearest ancestors-or-self and points 2^k levels up, so
    ceil(log2 N) rounds do for any shape, chains included.
    """
    batch, nodes = parents.shape
    known = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, nodes, nodes)
    up = parents.clamp(min=0)  # the root points at itself
    for _ in range((nodes - 1).bit_length()):
        known = known | known.gather(1, up[:, :, None].expand(batch, nodes, nodes))
        up = up.gather(1, up)
    return known


def depth(ancestors: Tensor) -> Tensor:
    """Return `[B, N] int64`, the number of edges above each node, from `ancestors [B, N, N]`."""
    return ancestors.sum(-1) - 1


def check(tree: DraftTree) -> None:
    """Raise AssertionError where `tree` breaks invariant 1. Reads the tensors on the host: for tests and debugging."""
    assert tree.tokens.shape == tree.parents.shape, f"shapes differ: {tree.tokens.shape}, {tree.parents.shape}"
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        assert parents[0] == -1, f"row {row}: the root's parent is {parents[0]}, not -1"
        siblings: set[tuple[int, int]] = set()
        for node in range(1, len(tokens)):
            token, parent = tokens[node], parents[node]
            where = f"row {row}, node {node} (token {token}, parent {parent})"
            if token == PADDING:
                assert parent == 0, f"{where}: padding must hang below the root"
                continue
            assert token >= 0, f"{where}: tokens are ids or {PADDING}"
            assert 0 <= parent < node, f"{where}: parents precede children"
            assert parent == 0 or tokens[parent] != PADDING, f"{where}: the parent is padding"
            assert (parent, token) not in siblings, f"{where}: a sibling holds the same token"
            siblings.add((parent, token))
