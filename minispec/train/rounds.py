"""The rounds of drafting that a head is trained on, simulated from every token of a reply at once.

A head reads true features only at the first drafted token; from the second on it reads its own state. A head trained
on true features alone therefore meets its own states for the first time when it serves, and drafts badly at depth. So
every update simulates S rounds of drafting, with the true tokens and with the head's own states ("training-time test",
EAGLE-3, arXiv 2503.01840):

    round s, anchor i:   embedding of x[i+1+s], state of round s-1 at i      learns the target's p(x[i+2+s])
    attention:           the true rows 0..i of round 0, and of each later round its own row alone

Of the rows of a later round each anchor thus sees only its own, a diagonal. So `Unrolled` needs in round s one product
with the rows of round 0 and s products per anchor, and no mask over the rows of all rounds.

Sizes in this file: T rows of all packed replies, n anchors of a round, F width of the features, d hidden size of the
target, V and Vd vocabulary and draft vocabulary, Hq and Hkv attention heads of queries and of keys, D their size.

Read next: `trainer.py`, which makes updates of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minispec.eagle import DraftHead
from minispec.train.corpus import TrainingReply

DECAY = 0.8  # weight of each round relative to the one before


@dataclass(frozen=True)
class Segment:
    """One reply in a packed batch: its rows in the first round, and where its anchors begin.

    Row r holds the feature of token r and the embedding of token r + 1. Anchors are the rows from which a token of the
    reply is drafted. The first is the one that reads the reply's first token, which the target itself chose; the last
    is the one that drafts the reply's last token. Each round has one anchor less.
    """

    rows: int
    first: int

    def anchors(self, round_: int) -> int:
        """Return how many anchors a round has."""
        return max(0, self.rows - self.first - round_)


class Padded:
    """Where the rows of a group of segments, one behind the other, stand when all are padded to the longest.

    A segment that is alone in its group is not padded, and nothing is copied.
    """

    def __init__(self, begin: int, sizes: Sequence[int], device: torch.device) -> None:
        """`begin`: the group's first row; sizes: how many rows each segment has."""
        self.shape = (len(sizes), max(sizes))
        self.rows = slice(begin, begin + sum(sizes))
        self.alone = len(sizes) == 1
        if not self.alone:
            place, length = torch.arange(self.shape[1]), torch.tensor(sizes)[:, None]
            first = begin + length.cumsum(0) - length
            last = (first + length - 1).clamp(min=0)
            self.source = torch.minimum(first + place, last).flatten().to(device)
            self.real = (place < length).flatten().nonzero()[:, 0].to(device)

    def pad(self, x: Tensor) -> Tensor:
        """Return the group's rows of x [H, T, D] as [G, H, R, D]; a padded place repeats a row."""
        if self.alone:
            return x[None, :, self.rows]
        return x.index_select(1, self.source).unflatten(1, self.shape).transpose(0, 1)

    def cut(self, x: Tensor) -> Tensor:
        """Return the rows [H, n, D] of x [G, H, R, D] without the padded ones, one segment behind the other."""
        return x[0] if self.alone else x.transpose(0, 1).flatten(1, 2).index_select(1, self.real)


class Unrolled:
    """The attention of the training-time test, a `LayerAttend` that is called once per round and keeps its rows.

    On CUDA a group of segments is computed together, since what takes time there is the number of launches. The later
    rounds are computed a second time in the backward pass. Kept, their scores of every anchor with every row are tens
    of gigabytes for an update of 32,768 tokens.
    """

    GROUP = {"cuda": 64}  # segments of a group, by type of device; elsewhere 1
    RECOMPUTED_ON = ("cuda",)  # types of devices

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        count = self.GROUP.get(device.type, 1)
        self.groups = [segments[i : i + count] for i in range(0, len(segments), count)]
        self.first = [torch.tensor([segment.first for segment in group], device=device) for group in self.groups]
        self.rows: list[list[tuple[Tensor, Tensor]]] = []  # by round and group: [G, Hkv, R, D], then [G, Hkv, n, D]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q [1, Hq, T, D] to k, v [1, Hkv, T, D] over the rows of all segments, or their n anchors."""
        q, k = q.to(v.dtype), k.to(v.dtype)
        number = len(self.rows)
        sizes = [[s.anchors(number) if number else s.rows for s in group] for group in self.groups]
        begins = accumulate(map(sum, sizes), initial=0)
        places = [Padded(begin, size, q.device) for begin, size in zip(begins, sizes, strict=False)]
        self.rows.append([(place.pad(k[0]), place.pad(v[0])) for place in places])
        outs = [place.cut(self._attend(group, place.pad(q[0]))) for group, place in enumerate(places)]
        return torch.cat(outs, dim=1)[None]

    def _attend(self, group: int, query: Tensor) -> Tensor:
        """Return the attention [G, Hq, n, D] of a group's queries in the newest round."""
        # The rows of the rounds so far, as they are now: when this is computed again there are more.
        (keys, values), *own = (rows[group] for rows in self.rows)
        if not own:
            gqa = query.shape[1] != keys.shape[1]
            return F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=gqa)
        given = (self.first[group], query, keys, values, own)
        if query.device.type in self.RECOMPUTED_ON:
            return checkpoint(_anchored, *given, use_reentrant=False, preserve_rng_state=False)
        return _anchored(*given)


def _anchored(
    first: Tensor, query: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return the attention [G, Hq, n, D] of segments' anchors, the first of which are the rows `first` [G].

    query [G, Hq, n, D]; keys, values [G, Hkv, R, D] of round 0; own: those [G, Hkv, m, D] of each round since, m >= n,
    of which every anchor sees its own row.
    """
    heads, count, dim = query.shape[1:]
    kv_heads, rows = keys.shape[1:3]
    shared = heads // kv_heads
    query = query.unflatten(1, (kv_heads, shared)) / math.sqrt(dim)
    scores = query.flatten(2, 3) @ keys.transpose(2, 3)
    scores = scores.unflatten(2, (shared, count)).float()
    row = torch.arange(rows, device=keys.device)
    later = row > (first[:, None] + row[:count])[..., None]
    scores = scores.masked_fill(later[:, None, None], -torch.inf)
    mine = [(k[:, :, None, :count], v[:, :, None, :count]) for k, v in own]
    diagonal = [(query * k).sum(-1, dtype=torch.float32)[..., None] for k, _ in mine]
    weight = torch.cat((scores, *diagonal), dim=-1).softmax(-1).to(values.dtype)
    out = (weight[..., :rows].flatten(2, 3) @ values).unflatten(2, (shared, count))
    for s, (_, v) in enumerate(mine):
        out = out + weight[..., rows + s, None] * v
    return out.flatten(1, 2)


@dataclass
class Round:
    """What one round of a batch reads and learns: the first round reads all rows, all learn at their n anchors."""

    tokens: Tensor  # [1, n] int64, in the first round [1, T], whose embeddings are read
    positions: Tensor  # like the tokens
    keep: Tensor  # anchors of the next round among this round's
    teacher: Tensor  # [n] rows of the batch's teacher


@dataclass
class Packed:
    """Several replies packed one after the other into one sequence."""

    segments: list[Segment]
    features: Tensor  # [1, T, F] of the rows
    target: Tensor  # [n, d] the target's final state at the token before each one that is learned
    choice: Tensor  # [n] int64, the target's greedy choice after these states
    learn: Tensor  # [n] int64, the first round's anchors among the rows
    rounds: list[Round]


def pack(
    replies: Sequence[TrainingReply], features: Sequence[tuple[Tensor, Tensor]], hidden: int, rounds: int
) -> Packed:
    """Return a batch of replies and their features [T, F]; the last `hidden` columns are the target's final state."""
    device = features[0][0].device
    segments = [Segment(len(reply.ids) - 2, reply.start - 1) for reply in replies]
    tokens = torch.tensor([token for reply in replies for token in reply.ids[1:-1]])
    positions = torch.cat([torch.arange(s.rows) for s in segments])
    last = torch.cat([torch.arange(s.rows) == s.rows - 1 for s in segments])
    learn = torch.cat([torch.arange(s.rows) >= s.first for s in segments]).nonzero()[:, 0]
    made, read, anchors, teacher = list[Round](), torch.arange(len(tokens)), learn, torch.arange(len(learn))
    for _ in range(rounds):
        keep = (~last[anchors]).nonzero()[:, 0]
        parts = (tokens[read][None], positions[read][None], keep, teacher)
        made.append(Round(*(part.to(device) for part in parts)))
        read = anchors = anchors[keep] + 1  # the same drafts, one token on
        teacher = teacher[keep] + 1
    return Packed(
        segments,
        torch.cat([streams[:-2] for streams, _ in features])[None],
        torch.cat([streams[r.start : -1, -hidden:] for r, (streams, _) in zip(replies, features, strict=True)]),
        torch.cat([choices[r.start : -1] for r, (_, choices) in zip(replies, features, strict=True)]),
        learn.to(device),
        made,
    )


def unroll(head: DraftHead, batch: Packed, taps: slice) -> Iterator[tuple[Round, Tensor]]:
    """Yield each round and the head's states [n, d] at its anchors; `taps` are the head's columns of the features."""
    attend = Unrolled(batch.segments, batch.features.device)
    state = head.fuse(batch.features[..., taps])
    for number, round_ in enumerate(batch.rounds):
        rope = head.rope(round_.positions)
        state = head(head.embed(round_.tokens), state, rope, attend, round_.positions)
        if number == 0:
            state = state[:, batch.learn]
        yield round_, state[0]
        state = state[:, round_.keep]


class Teacher:
    """The target's distribution over the draft vocabulary; `place` [V] maps target ids to draft ids, others to -1."""

    def __init__(self, weight: Tensor, ids: Tensor, vocab_size: int) -> None:
        self.weight = weight  # [Vd, d]
        self.place = torch.full((vocab_size,), -1, dtype=torch.int64, device=ids.device)
        self.place[ids] = torch.arange(len(ids), device=ids.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the probabilities [n, Vd] fp32, renormalised over the draft vocabulary, after states [n, d]."""
        return F.linear(hidden, self.weight).float().softmax(-1)


def rows_at_once(device: torch.device, width: int) -> int:
    """Return how many rows of `width` logits the loss reads at a time: on a CPU so few that they stay in its cache.

    On CUDA as many as are 256 MiB in fp32, since there each piece is a dozen launches, however few rows it has.
    """
    return max(64, 2**26 // width) if device.type == "cuda" else 64


class SoftCrossEntropy(torch.autograd.Function):
    """The cross-entropy of logits against the teacher's distribution, with its gradient computed in the same pass.

    As separate operations this costs more than the matrix product before it. So some rows of vocabulary size are read
    at a time, and no logits are kept in fp32.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, teacher: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, summed with `weight` [n], and the best draft id [n] of logits [n, Vd].

        wanted: [m, Vd] the teacher's probabilities; row i of the logits is compared with row teacher[i] of these.
        """
        gradient, best = torch.empty_like(logits), torch.empty_like(teacher)
        total = weight.new_zeros(())
        rows = rows_at_once(logits.device, logits.shape[1])
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            z, p, w = logits[part].float(), wanted[teacher[part]], weight[part, None]
            best[part] = z.argmax(-1)
            z = z - z.logsumexp(-1, keepdim=True)
            total -= (p * z * w).sum()
            gradient[part] = z.exp_().sub_(p).mul_(w)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits."""
        return ctx.saved_tensors[0] * upstream, None, None, None


def losses(
    head: DraftHead, batch: Packed, taps: slice, teacher: Teacher, feature_weight: float
) -> tuple[Tensor, Tensor]:
    """Return the loss and, detached, how often the head's first choice was the target's: [S, 2] hits and anchors.

    The loss is the soft cross-entropy of each round, a mean over the anchors at which the target's choice is in the
    draft vocabulary. Hits and anchors count only if all earlier rounds hit: their ratio is the acceptance at a depth
    that was reached.
    """
    wanted = teacher(batch.target)
    place = teacher.place[batch.choice]
    total = wanted.new_zeros(())
    hits, alive = [], torch.ones_like(place, dtype=torch.bool)
    for s, (round_, state) in enumerate(unroll(head, batch, taps)):
        known = (place[round_.teacher] >= 0).float()
        weight = DECAY**s * known / known.sum().clamp(min=1)
        loss, best = SoftCrossEntropy.apply(head.logits(state), wanted, round_.teacher, weight)
        total = total + loss
        if feature_weight:
            imitate = F.smooth_l1_loss(state.float(), batch.target[round_.teacher].float(), reduction="none").mean(-1)
            total = total + feature_weight * DECAY**s * imitate.mean()
        hit = best == place[round_.teacher]
        hits.append(torch.stack([(hit & alive).sum(), alive.sum()]))
        alive = (alive & hit)[round_.keep]
    return total, torch.stack(hits)


@torch.no_grad()
def accepted(head: DraftHead, batch: Packed, taps: slice, teacher: Teacher) -> list[int]:
    """Return for each anchor how many drafts are accepted, for one reply at temperature 0: the target's choices."""
    place, rounds = teacher.place[batch.choice], unroll(head, batch, taps)
    hits = [(head.logits(state).argmax(-1) == place[round_.teacher]).tolist() for round_, state in rounds]
    return [(*hit, False).index(False) for hit in zip(*hits, strict=False)]  # of the anchors that every round has


def replay(counts: Sequence[int]) -> tuple[int, int]:
    """Return the tokens emitted and the verify steps that a server would need, drafting chains along a greedy reply.

    counts: how many drafts are accepted, by anchor, but for those at which the reply's end would cut the chain short.
    """
    emitted = steps = 0
    while emitted < len(counts):
        emitted, steps = emitted + counts[emitted] + 1, steps + 1
    return emitted, steps
