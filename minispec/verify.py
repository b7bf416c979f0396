"""Verification: which drafted tokens the target would have chosen itself, and what it chooses after them.

The one idea: the target picks a token at the root; if a child holds it, we move there and the target picks again. The
picks on the way are the output. Every emitted token is the target's own, so greedy picks give greedy decoding and
sampled picks give exact samples, whatever the drafter and the shape of the tree; no draft probabilities are needed.
Since siblings hold distinct tokens, the output has the distribution that speculative sampling (arXiv 2211.17192,
2302.01318) gives when it tries the children one after the other and takes each as proposed with probability 1. The
noise of a pick depends on seed, position and token alone (`sampling.gumbel`), so a seeded request gets the same text
with every drafter: this is drafter-invariant decoding (arXiv 2408.07978).

`pick_lossy` is the exception, for users who set an accept threshold below 1: it accepts more and is not exact. And
`simulate` accepts a given number whatever was picked, for the speed of a step without weights that mean anything.

Read next: `model.py`, which makes the logits; `sampling.py` for the pick, `engine.py` for what is done with a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.sampling import Wishes, gumbel, largest, law, pick, uniform
from minispec.tree import PADDING, DraftTree, depth

COIN = -1  # `pick_lossy` draws its coin as the noise of this id, which no token has
COUNT = -2  # and `simulate` its number as the noise of this one


class Trees(NamedTuple):
    """Trees that are to be verified."""

    tree: DraftTree  # [B, N] each
    above: Tensor  # [B, N, N] bool, `tree.ancestors`
    slots: Tensor  # [B] int64
    lens: Tensor  # [B] int64, the position of each root
    most: int  # A, the most tokens emitted per request


@dataclass(eq=False)
class Accept:
    """What an operator may change of acceptance; as it stands, output is exact."""

    thresholds: tuple[float, float] | None = None  # (single, acc) of `pick_lossy`
    simulated: float | None = None  # the mean of `simulate`

    @property
    def couples(self) -> bool:
        """Whether drafts may know the noise of the picks. Under thresholds a coin accepts in place of the noise."""
        return self.thresholds is None

    def judge(self, trees: Trees, logits: Tensor, wishes: Wishes | None, host_looks: bool) -> Verdict:
        """Return the verdict on `logits [B, N, V]`; greedy batches, without wishes, need no walk.

        host_looks: whether the host may look at values on the way. On a CPU that costs nothing.
        """
        if wishes is None:
            verdict = verify_greedy(trees, logits)
        else:
            verdict = verify(trees, logits, wishes, self.thresholds, host_looks)
        if self.simulated is None or logits.shape[1] == 1:
            return verdict
        return simulate(trees, verdict, self.simulated)


class Verdict(NamedTuple):
    """What the target accepted. Entries of `path` and `emitted` at and beyond `count` are unspecified but in range."""

    path: Tensor  # [B, A] int64 node indices, path[:, 0] = 0
    # How many tokens are emitted, accepted drafts + 1. It hides tuple.count, which nobody calls.
    count: Tensor  # type: ignore[assignment]  # [B] int64
    emitted: Tensor  # [B, A] int64: the target's pick at node path[:, a]
    bonus: Tensor  # [B] int64 = emitted[count - 1], the next root
    nan: Tensor  # [B] bool: whether a token that counts was picked from logits with a NaN among them


def verify_greedy(trees: Trees, logits: Tensor) -> Verdict:
    """Return the verdict of argmax picks on `logits [B, N, V]`, ties to the lowest id, without walking the tree.

    A node is accepted if it and all its ancestors below the root hold the tokens picked at their parents. Siblings are
    distinct, so the accepted nodes are one path with one node per depth, and a node's depth is its place in the path.
    """
    tree, A = trees.tree, trees.most
    batch, nodes = tree.tokens.shape
    picks = largest(logits)
    chosen = tree.tokens == picks.gather(1, tree.parents.clamp(min=0))  # a pick is never -1, so padding never matches
    chosen[:, 0] = True
    level = depth(trees.above)
    accepted = (chosen[:, None, :] | ~trees.above).all(-1) & (level < A)
    place = torch.where(accepted, level, A)  # the other nodes go into a last column that is cut off
    index = torch.arange(nodes, device=picks.device).expand(batch, nodes)
    path = torch.zeros(batch, A + 1, dtype=torch.int64, device=picks.device).scatter_(1, place, index)[:, :A]
    emitted = picks.gather(1, path)  # beyond the count that of the root, which counts anyway
    row = torch.arange(batch, device=picks.device)[:, None]
    nan = logits[row, path, emitted].isnan().any(-1)  # NaN is the largest, so where there is one it was picked
    return _verdict(path, accepted.sum(-1), emitted, nan)


def verify(
    trees: Trees, logits: Tensor, wishes: Wishes, thresholds: tuple[float, float] | None = None,
    host_looks: bool = False,
) -> Verdict:  # fmt: skip
    """Return the verdict of `sampling.pick` on `logits [B, N, V]`, walking down from the root for at most A picks.

    The pick at depth d has position lens + d + 1. `wishes` is not changed: the tokens of the path are added to a copy
    of its counts, so penalties are those of plain decoding of the same tokens. Temperature 0 without adjustments gives
    the verdict of `verify_greedy`. With thresholds `pick_lossy` takes the place of `pick`.
    """
    tree, lens, A = trees.tree, trees.lens, trees.most
    batch, nodes, vocab = logits.shape
    flat, first = logits.reshape(batch * nodes, vocab), torch.arange(batch, device=logits.device) * nodes
    counts = None if wishes.counts is None else wishes.counts.clone()
    node, walking = torch.zeros_like(first), torch.ones_like(first, dtype=torch.bool)
    path, emitted = first.new_zeros(batch, A), first.new_zeros(batch, A)
    count, nan = torch.zeros_like(first), torch.zeros_like(walking)
    for a in range(A):
        here, position = wishes._replace(outputs=wishes.outputs + a, counts=counts), lens + a + 1
        at = flat.index_select(0, first + node)
        drafted = tree.tokens.masked_fill(tree.parents != node[:, None], PADDING)
        token = pick(at, here, position) if thresholds is None else pick_lossy(at, here, position, drafted, *thresholds)
        path[:, a], emitted[:, a] = node, token
        nan = nan | at.amax(-1).isnan()  # a walk that has stopped looks at the root again, which counts anyway
        count = count + walking
        if a + 1 == A:
            break
        if counts is not None:
            counts.scatter_add_(1, token[:, None], walking[:, None].to(counts.dtype))
        child = drafted == token[:, None]  # at most one; never padding
        walking = walking & child.any(-1)
        node = child.to(torch.int8).argmax(-1)  # a walk that has stopped is at the root again, and no longer counted
        if host_looks and not walking.any():
            break
    return _verdict(path, count, emitted, nan)


def pick_lossy(logits: Tensor, wishes: Wishes, position: Tensor, drafted: Tensor, single: float, acc: float) -> Tensor:
    """Return `[B] int64`, what SGLang's threshold rule takes at a node with children `drafted [B, N] int64` or -1.

    With q_1, q_2 ... the children's probabilities (`sampling.law`, after all filters) and a coin u, it is the first
    child with q_i > 0 and (u < (q_1 + ... + q_i) / acc or q_i >= single); if there is none, a token is drawn from
    the probabilities of all but the children. `single` lies in [0, 1], `acc` in (0, 1]. At 1 and 1 this samples the
    law exactly, though a seed gives other tokens than with `pick`; lower values favour what was drafted. A greedy
    request gets the token of `pick`, since its law is one-hot.
    """
    q, held = law(logits, wishes), drafted.clamp(min=0)
    mass = q.gather(1, held) * (drafted != PADDING)
    coin = uniform(wishes.seed, position, torch.full((1,), COIN, device=logits.device))
    accepted = (mass > 0) & ((coin < mass.cumsum(1) / acc) | (mass >= single))
    left = q.scatter_add(1, held, -mass)  # exactly 0 at each child: siblings are distinct, so each is subtracted once
    # Nothing is left if the children have all the mass, but their sum was rounded below 1 and the coin lies above it.
    left = torch.where(left.amax(-1, keepdim=True) > 0, left, q)
    drawn = (left.log() + gumbel(wishes.seed, position, logits.shape[1])).argmax(-1)
    chosen = held.gather(1, accepted.to(torch.int8).argmax(-1, keepdim=True)).squeeze(1)  # the first of equal maxima
    return torch.where(accepted.any(-1), chosen, drawn)


def simulate(trees: Trees, verdict: Verdict, mean: float) -> Verdict:
    """Return a verdict that emits `mean` tokens in the mean, whatever the target picked: output is junk, speed is not.

    The path goes to the first of the deepest nodes, and its tokens are emitted, the last one the target's bonus. `mean`
    lies in [1, A]. Its floor or its ceiling is drawn from slot and committed length, so that a captured step draws anew
    at every replay and a run repeats. A path too short for the number drawn is accepted whole, so the mean is lower
    where trees are less than A - 1 deep.
    """
    tree, ancestors, slots, lens, _ = trees
    (batch, nodes), most = tree.tokens.shape, verdict.path.shape[1]
    level = depth(ancestors).masked_fill(tree.tokens == PADDING, -1)
    level[:, 0].zero_()  # at the context's end the root is masked as well
    last = level.argmax(-1)
    above = ancestors.gather(1, last[:, None, None].expand(batch, 1, nodes)).squeeze(1)
    place = torch.where(above, level, most).clamp(max=most)  # the other nodes go into a last column that is cut off
    index = torch.arange(nodes, device=lens.device).expand(batch, nodes)
    path = place.new_zeros(batch, most + 1).scatter_(1, place, index)[:, :most]
    whole = int(mean)
    # Not the floor of mean + coin: that sum is rounded, at times to the next integer.
    coin = uniform(slots, lens, torch.full((1,), COUNT, device=lens.device)).squeeze(1)
    count = torch.minimum(whole + (coin < mean - whole), level.amax(-1) + 1).clamp(max=most)
    child = tree.tokens.gather(1, path.roll(-1, 1))
    inner = torch.arange(1, most + 1, device=lens.device) < count[:, None]
    return verdict._replace(path=path, count=count, emitted=torch.where(inner, child, verdict.bonus[:, None]))


def _verdict(path: Tensor, count: Tensor, emitted: Tensor, nan: Tensor) -> Verdict:
    return Verdict(path, count, emitted, emitted.gather(1, count[:, None] - 1).squeeze(1), nan)
