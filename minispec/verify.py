"""Verification: which path of a tree the target accepts, and which token it picks after that path.

A walk starts at the root, where the target picks a token. If a child of the root holds this token, the walk moves to
that child, and the target picks again. The walk ends where no child holds the pick. The picks are the output. So the
target draws exactly as it would without a draft, and draft probabilities never matter. The original speculative
sampling (arXiv 2211.17192, 2302.01318) accepts a draft by the ratio of the target's and the drafter's probabilities;
its output has the same distribution.

Two functions are not exact. `pick_lossy` serves users who set an accept threshold below 1, and accepts more drafts.
`simulate` accepts a given number of drafts, whatever the picks, so that speed can be measured on random weights.

Read next: `model.py`, which computes the logits; `sampling.py` for the pick; `engine.py`, which uses the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.sampling import Wishes, gumbel, largest, law, pick_region, uniform
from minispec.tree import PADDING, DraftTree, depth

# No token has these ids, so the numbers drawn for them are independent of all tokens' noise. A coin is a random number
# in (0, 1).
COIN = -1  # the coin of `pick_lossy`
COUNT = -2  # the coin of `simulate`


class Trees(NamedTuple):
    """The trees to verify: one tree of N nodes for each of B requests; V is the size of the vocabulary."""

    tree: DraftTree  # tokens and parents, [B, N] each
    above: Tensor  # [B, N, N] bool, `tree.ancestors`
    slots: Tensor  # [B] int64
    lens: Tensor  # [B] int64, how many rows of each request are committed; this is also the position of its root
    most: int  # A, the most tokens emitted per request


@dataclass(eq=False)
class Accept:
    """The operator's settings for acceptance; with the defaults the output is exact."""

    thresholds: tuple[float, float] | None = None  # (single, acc) of `pick_lossy`; None: `pick` takes all tokens
    simulated: float | None = None  # the `mean` of `simulate`; None: the verdict stays as it is

    def judge(self, trees: Trees, logits: Tensor, wishes: Wishes | None, host_looks: bool) -> Verdict:
        """Return the verdict on `logits [B, N, V]`.

        wishes: the inputs of the picks; None for a greedy batch, which needs no walk. host_looks: whether the host may
        read values during the walk, to end it early (`PagedKV.host_looks`).
        """
        if wishes is None:
            verdict = verify_greedy(trees, logits)
        else:
            verdict = verify(trees, logits, wishes, self.thresholds, host_looks)
        if self.simulated is None or logits.shape[1] == 1:
            return verdict
        return simulate(trees, verdict, self.simulated)


class Verdict(NamedTuple):
    """The accepted paths and their tokens; entries of `path` and `emitted` from `count` on are garbage in range."""

    path: Tensor  # [B, A] int64 node indices, path[:, 0] = 0
    # The number of emitted tokens, accepted drafts + 1. The name hides tuple.count, which nobody calls.
    count: Tensor  # type: ignore[assignment]  # [B] int64
    emitted: Tensor  # [B, A] int64: the target's pick at node path[:, a]
    bonus: Tensor  # [B] int64 = emitted[count - 1], the next root
    nan: Tensor  # [B] bool: whether an emitted token was picked from logits that contain NaN


def verify_greedy(trees: Trees, logits: Tensor) -> Verdict:
    """Return the verdict of argmax picks on `logits [B, N, V]`, ties to the lowest id, without walking the tree.

    A node is accepted if it and all its ancestors below the root hold the tokens picked at their parents. Siblings are
    distinct, so the accepted nodes form one path, and a node's depth is its index in the path.
    """
    tree, A = trees.tree, trees.most
    picks = largest(logits)
    chosen = tree.tokens == picks.gather(1, tree.parents.clamp(min=0))  # a pick is never -1, so padding never matches
    chosen[:, 0] = True
    level = depth(trees.above)
    accepted = (chosen[:, None, :] | ~trees.above).all(-1) & (level < A)
    path = _by_depth(accepted, level, A)
    # Entries after the path repeat the root's pick. For them the check for NaN reads the root's logits once more, which
    # does no harm.
    emitted = picks.gather(1, path)
    row = torch.arange(len(picks), device=picks.device)[:, None]
    nan = logits[row, path, emitted].isnan().any(-1)  # argmax picks NaN if the logits contain one
    return _verdict(path, accepted.sum(-1), emitted, nan)


def _by_depth(on_path: Tensor, level: Tensor, most: int) -> Tensor:
    """Return `[B, most] int64`, for each depth the node for which `on_path [B, N] bool` is true, or 0.

    level: [B, N] int64, the depth of each node, below `most` for the nodes on the path.
    """
    place = torch.where(on_path, level, most)  # the other nodes go to a last column, which is cut off
    index = torch.arange(level.shape[1], device=level.device).expand_as(level)
    return level.new_zeros(len(level), most + 1).scatter_(1, place, index)[:, :most]


def verify(
    trees: Trees, logits: Tensor, wishes: Wishes, thresholds: tuple[float, float] | None = None,
    host_looks: bool = False,
) -> Verdict:  # fmt: skip
    """Return the verdict of `sampling.pick` on `logits [B, N, V]`, walking down from the root for at most A picks.

    The token picked at depth d has position lens + d + 1. The walk counts its picks in a copy of `wishes.counts`, so
    penalties equal those of plain decoding. With thresholds `pick_lossy` replaces `pick`.
    """
    tree, lens, A = trees.tree, trees.lens, trees.most
    batch, nodes, vocab = logits.shape
    row = torch.arange(batch, device=logits.device)
    flat, first = logits.reshape(batch * nodes, vocab), row * nodes
    counts = None if wishes.counts is None else wishes.counts.clone()
    node, walking = torch.zeros_like(first), torch.ones_like(first, dtype=torch.bool)
    path, emitted = first.new_zeros(batch, A), first.new_zeros(batch, A)
    count, nan = torch.zeros_like(first), torch.zeros_like(walking)
    for a in range(A):
        here, position = wishes._replace(outputs=wishes.outputs + a, counts=counts), lens + a + 1
        at = flat.index_select(0, first + node)
        drafted = tree.tokens.masked_fill(tree.parents != node[:, None], PADDING)
        if thresholds is None:
            token = pick_region(at, here, position)
        else:
            token = pick_lossy(at, here, position, drafted, *thresholds)
        path[:, a], emitted[:, a] = node, token
        nan = nan | at.amax(-1).isnan()  # a walk that has stopped reads the root again, which was checked already
        count = count + walking
        if a + 1 == A:
            break
        if counts is not None:
            counts.index_put_((row, token), walking.to(counts.dtype), accumulate=True)  # compiled, it copies nothing
        child = drafted == token[:, None]  # true for at most one node, and never for padding
        walking = walking & child.any(-1)
        node = child.to(torch.int8).argmax(-1)  # 0, the root, for a walk that has stopped
        if host_looks and not walking.any():
            break
    return _verdict(path, count, emitted, nan)


def pick_lossy(logits: Tensor, wishes: Wishes, position: Tensor, drafted: Tensor, single: float, acc: float) -> Tensor:
    """Return `[B] int64`, the token that SGLang's threshold rule takes at one node of each tree; logits [B, V].

    drafted [B, N] int64: the tokens of the node's children, -1 elsewhere. The law is the target's distribution after
    all filters (`sampling.law`). Let q_1, q_2 ... be the children's probabilities under it, and u a coin, uniform in
    (0, 1). The rule takes the first child with q_i > 0 and (u < (q_1 + ... + q_i) / acc or q_i >= single). If no child
    passes, the rule draws from the law without the children. `single` lies in [0, 1], `acc` in (0, 1]. At 1 and 1 the
    rule samples the law exactly, but a seed gives other tokens than with `pick`; lower values favour the drafts. A
    greedy request gets the token of `pick`: its law is one-hot.
    """
    q, held = law(logits, wishes), drafted.clamp(min=0)
    mass = q.gather(1, held) * (drafted != PADDING)
    coin = uniform(wishes.seed, position, torch.full((1,), COIN, device=logits.device))
    accepted = (mass > 0) & ((coin < mass.cumsum(1) / acc) | (mass >= single))
    left = q.scatter_add(1, held, -mass)  # exactly 0 at each child: siblings are distinct, so each is subtracted once
    # If the children hold all the mass, nothing is left to draw from. Even then rounding can keep every child from
    # passing; the token is then drawn from all of q.
    left = torch.where(left.amax(-1, keepdim=True) > 0, left, q)
    drawn = (left.log() + gumbel(wishes.seed, position, logits.shape[1])).argmax(-1)
    chosen = held.gather(1, accepted.to(torch.int8).argmax(-1, keepdim=True)).squeeze(1)  # the first of equal maxima
    return torch.where(accepted.any(-1), chosen, drawn)


def simulate(trees: Trees, verdict: Verdict, mean: float) -> Verdict:
    """Return a verdict that emits `mean` tokens on average, whatever the target picked. The text is junk.

    `mean` lies in [1, A]. The path leads to the first of the deepest nodes; its first count - 1 drafts and the target's
    bonus are emitted. A coin decides whether `count` is the floor or the ceiling of `mean`. The coin depends on slot
    and length alone. Lengths grow, so each replay of a captured step has other coins; a second run has the same coins
    again. A tree of depth D emits at most D + 1 tokens, so shallow trees lower the mean.
    """
    tree, ancestors, slots, lens, most = trees
    batch, nodes = tree.tokens.shape
    level = depth(ancestors).masked_fill(tree.tokens == PADDING, -1)
    level[:, 0].zero_()  # at the end of the context the root's token is PADDING too
    last = level.argmax(-1)
    above = ancestors.gather(1, last[:, None, None].expand(batch, 1, nodes)).squeeze(1)
    path = _by_depth(above & (level < most), level, most)
    whole = int(mean)
    # Not the floor of mean + coin: that sum may be rounded up to the next integer.
    coin = uniform(slots, lens, torch.full((1,), COUNT, device=lens.device)).squeeze(1)
    count = torch.minimum(whole + (coin < mean - whole), level.amax(-1) + 1).clamp(max=most)
    child = tree.tokens.gather(1, path.roll(-1, 1))
    inner = torch.arange(1, most + 1, device=lens.device) < count[:, None]
    return verdict._replace(path=path, count=count, emitted=torch.where(inner, child, verdict.bonus[:, None]))


def _verdict(path: Tensor, count: Tensor, emitted: Tensor, nan: Tensor) -> Verdict:
    return Verdict(path, count, emitted, emitted.gather(1, count[:, None] - 1).squeeze(1), nan)
