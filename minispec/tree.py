"""Draft trees: several proposed continuations of one text, which the target reads in one forward pass.

A tree is two integer arrays: the token of each node and the index of its parent. Node 0 is the root: the newest token
of the text, whose keys and values are not computed yet. The ancestors and the depth of each node follow from the
parents by tensor operations of static shape, so a graph of these operations can be compiled. Plain decoding is a tree
of one node, and a chunk of a prompt is a chain: a tree in which no node has two children. Tree attention comes from
SpecInfer (arXiv 2305.09781).

This file owns the invariant of trees: parents precede children, siblings hold distinct tokens, padding nodes hold -1.
B is the number of requests of a step and N the number of nodes of a tree, both padded.

Read next: `verify.py`, which accepts a path of a tree; `attention.py` for the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PADDING = -1  # the token of a padding node; no pick of the target ever equals it


class Shape(NamedTuple):
    """The shape of a decode step: how large its trees are, and who proposes them.

    Shapes compare as tuples: of the shapes that a batch size has, `max` is the one with the largest trees that the
    drafter proposes.
    """

    nodes: int  # N, root included; 1 in a plain step
    drafts: bool  # whether the drafter proposes the trees; if not, and nodes > 1, all are looked up on the host

    @property
    def of_host(self) -> bool:
        """Whether all trees are looked up in text, on the host; a request without such a tree verifies its root."""
        return self.nodes > 1 and not self.drafts


PLAIN = Shape(1, False)


class DraftTree(NamedTuple):
    """One tree per request; node 0 is the root."""

    tokens: Tensor  # [B, N] int64; padding nodes hold -1
    parents: Tensor  # [B, N] int64; -1 for the root, 0 for padding nodes, else a smaller index than the node's own


def ancestors(parents: Tensor) -> Tensor:
    """Return `[B, N, N] bool` from `parents [B, N] int64`: entry [b, i, j] is true if j is i or an ancestor of i.

    This is pointer doubling: after k rounds a node knows its ancestors fewer than 2^k levels up, itself included, and
    points to the ancestor 2^k levels up, or to the root if there is none. So ceil(log2 N) rounds are enough for any
    tree.
    """
    batch, nodes = parents.shape
    known = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, nodes, nodes)
    up = parents.clamp(min=0)  # the root points at itself
    for _ in range((nodes - 1).bit_length()):
        known = known | known.gather(1, up[:, :, None].expand(batch, nodes, nodes))
        up = up.gather(1, up)
    return known


def depth(ancestors: Tensor) -> Tensor:
    """Return `[B, N] int64`, the number of edges between each node and the root, from `ancestors [B, N, N]`."""
    return ancestors.sum(-1) - 1


def problem(tokens: Sequence[int], parents: Sequence[int], nodes: int, vocab_size: int) -> str | None:
    """Return what breaks the invariant in one request's tree, given as lists without padding; None if nothing does.

    The tree must also have at most `nodes` nodes, and ids below `vocab_size`. Node 0's token is not checked: the engine
    writes the root's token there.
    """
    if not 0 < len(tokens) <= nodes or len(parents) != len(tokens):
        return f"{len(tokens)} tokens and {len(parents)} parents, where 1 to {nodes} of both are allowed"
    if parents[0] != -1:
        return f"the root's parent is {parents[0]}, not -1"
    children: set[tuple[int, int]] = set()
    for node in range(1, len(tokens)):
        token, parent = tokens[node], parents[node]
        if not 0 <= token < vocab_size:
            return f"node {node} holds the token {token}, which is not in [0, {vocab_size - 1}]"
        if not 0 <= parent < node:
            return f"node {node} has the parent {parent}, which does not precede it"
        if (parent, token) in children:
            return f"two children of node {parent} hold the token {token}"
        children.add((parent, token))
    return None
