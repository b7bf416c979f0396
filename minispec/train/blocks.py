"""Training a DFlash or DSpark network: blocks are drafted from random tokens, all blocks of a batch in one pass.

A block stands where a server would draft one. Its anchor a is the position of the bonus, the newest token:

    row j of the block     embedding of x[a] (j = 0) or of the mask; position a + j; learns the target's p(x[a + j])
    attention              the context rows 0 .. a - 1 of its reply, made of the target's features, and its own block

Row 0 learns nothing. Of a DSpark network whose bonus's row drafts, row j learns p(x[a + j + 1]), and the Markov head is
given the reply's own token before that. The confidence head learns 1 - TV, the share that the row's and the target's
distributions have in common (TV is their total variation distance).

The anchors of a reply are drawn anew in every epoch, since neighbouring blocks teach nearly the same and each costs S
rows. A draft counts only if all drafts before it are right, so early rows weigh more:

    decay    exp(-(j - 1) / gamma), as the paper has it
    dpace    how many tokens row j adds to the expected length, at the network's present probabilities q of the
             tokens: the sum over m >= j of q'1 * ... * q'm, with q' = (q + 1) / 2 (D-PACE, arXiv 2605.18810)

The module that is trained is the module that is served (`dflash.py`, `dspark.py`); only its attention is another.
Letters: T rows of all replies, A blocks of S rows, D of which draft, n tokens that are learned, F, d and Vd as in
`rounds.py`.

Read next: `trainer.py` for the updates, `rounds.py` for how other heads learn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.dflash import DFlashHead
from minispec.dspark import DSparkHead
from minispec.model import Block, LayerAttend
from minispec.train.corpus import TrainingReply
from minispec.train.export import BlockRecipe
from minispec.train.rounds import SoftCrossEntropy, Teacher, rows_at_once
from minispec.train.trainer import Trainer

GAMMA = {16: 7.0, 10: 5.0}  # of the decay, by S, as the paper has it; for other sizes S / 2
SHARE = 3  # reply tokens a block drafts with other blocks: one anchor for every S / SHARE tokens
WEIGHTS = ("decay", "dpace")


@dataclass
class Packed:
    """Blocks of several replies, one after the other."""

    tokens: Tensor  # [1, A * S] int64, the bonus and the masks of each block
    positions: Tensor  # [1, A * S] int64
    features: Tensor  # [1, T, F]
    places: Tensor  # [1, T] int64, the positions of the context rows
    visible: list[Tensor]  # by reply [a * S, t + a * S] bool: which of its context and block rows each block row sees
    target: Tensor  # [n, d] the target's final state at the token before each one that is learned
    choice: Tensor  # [n] int64, the target's greedy choice after these states
    teacher: Tensor  # [A, D] int64, the row of `target` for each row of a block
    labels: Tensor  # [A, D] int64, the token that stands in the reply
    before: Tensor  # [A, D] int64, the token before it
    real: Tensor  # [A, D] bool, whether there is one: the reply may end within the block


def draw_anchors(reply: TrainingReply, block: int, rng: random.Random) -> list[int]:
    """Return the anchors of a reply, at random: tokens of the reply with at least one after them."""
    every = range(reply.start, len(reply.ids) - 1)
    return sorted(rng.sample(every, max(1, len(every) * SHARE // block)))


def pack(
    head: DFlashHead, replies: Sequence[TrainingReply], features: Sequence[tuple[Tensor, Tensor]],
    anchors: Sequence[Sequence[int]],
) -> Packed:  # fmt: skip
    """Return the blocks at these anchors, one list for each reply.

    features: by reply the streams [t, F], whose last d columns are the target's final state, and its choices [t].
    """
    device, rows = features[0][0].device, torch.arange(head.block_size)
    hidden, parts = head.hidden_size, []
    offset = 0
    for reply, (streams, choices), chosen in zip(replies, features, anchors, strict=True):
        ids, count = torch.tensor(reply.ids), len(reply.ids)
        places = torch.tensor(chosen)[:, None] + rows  # [a, S]
        tokens = torch.full_like(places, head.mask_token)
        tokens[:, 0] = ids[places[:, 0]]
        learned = places[:, head.first :] + 1 - head.first
        inside = learned.clamp(max=count - 1)
        parts.append(
            (tokens, places, torch.arange(count), inside - 1 - reply.start + offset, ids[inside], ids[inside - 1],
             learned < count, streams[reply.start : -1, -hidden:], choices[reply.start : -1])
        )  # fmt: skip
        offset += count - 1 - reply.start
    tokens, places, context, teacher, labels, before, real, target, choice = (
        torch.cat(part).to(device) for part in zip(*parts, strict=True)
    )
    return Packed(
        tokens.view(1, -1), places.view(1, -1), torch.cat([streams for streams, _ in features])[None], context[None],
        [_visible(len(r.ids), torch.tensor(a), head).to(device) for r, a in zip(replies, anchors, strict=True)],
        target, choice, teacher, labels, before, real,
    )  # fmt: skip


def _visible(length: int, anchors: Tensor, head: DFlashHead) -> Tensor:
    """Return which rows [a * S, t + a * S] each block row of a reply sees: the context before its anchor, its block."""
    size = head.block_size
    context = (torch.arange(length) < anchors[:, None]).repeat_interleave(size, dim=0)
    block = torch.ones(size, size)
    within = torch.block_diag(*[block.tril() if head.causal else block] * len(anchors)).bool()
    return torch.cat((context, within), dim=1)


class Contexts:
    """The attention of all blocks of a batch, to the context rows of their replies and within each block."""

    def __init__(self, head: DFlashHead, batch: Packed, taps: slice) -> None:
        """taps: the network's columns of the features."""
        self.head, self.visible = head, batch.visible
        self.context, self.rope = head.fuse(batch.features[..., taps]), head.rope(batch.places)

    def layer(self, index: int) -> LayerAttend:
        """Return the attention of one layer, after projecting the context for it."""
        _, keys, values = cast(Block, self.head.layers[index]).project(self.context, self.rope)
        return partial(self._attend, keys, values)

    def _attend(self, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q [1, Hq, A * S, D] to the context's keys and values [1, Hkv, T, D] and to the blocks' k, v."""
        keys, q, k = (x.to(v.dtype) for x in (keys, q, k))  # under autocast the rotary embedding widens them
        blocks = [len(mask) for mask in self.visible]
        contexts = [mask.shape[1] - len(mask) for mask in self.visible]
        cut = [x.split(sizes, dim=2) for x, sizes in ((q, blocks), (keys, contexts), (values, contexts), (k, blocks),
                                                      (v, blocks))]  # fmt: skip
        return torch.cat([
            F.scaled_dot_product_attention(
                query, torch.cat((far_k, near_k), 2), torch.cat((far_v, near_v), 2), attn_mask=mask,
                enable_gqa=query.shape[1] != near_k.shape[1],
            )
            for query, far_k, far_v, near_k, near_v, mask in zip(*cut, self.visible, strict=True)
        ], dim=2)  # fmt: skip


def states_of(head: DFlashHead, batch: Packed, taps: slice) -> Tensor:
    """Return the states [A, D, d] of the rows that draft."""
    states = head(head.embed(batch.tokens), head.rope(batch.positions), Contexts(head, batch, taps))
    return states.view(-1, head.block_size, states.shape[-1])[:, head.first :]


def drafted(head: DFlashHead, batch: Packed, states: Tensor) -> Tensor:
    """Return the logits [A * D, Vd] of the rows that draft, from their states [A, D, d]."""
    logits = head.logits(states)
    if isinstance(head, DSparkHead):
        logits = logits + head.following(head.before(batch.before))
    return logits.flatten(0, 1)


# ---- what is learned ------------------------------------------------------------------------------------------------


def decay(size: int) -> Tensor:
    """Return the paper's weights [S - 1] of the drafts of a block of S = `size` rows."""
    return torch.exp(-torch.arange(size - 1) / GAMMA.get(size, size / 2))


def dpace(q: Tensor, real: Tensor) -> Tensor:
    """Return D-PACE's weights [A, D] from the probabilities q of the tokens; rows that are not `real` have none."""
    reached = ((q + 1) / 2).cumprod(1) * real
    return reached.flip(1).cumsum(1).flip(1)


def losses(head: DFlashHead, batch: Packed, taps: slice, teacher: Teacher, weights: str) -> tuple[Tensor, Tensor]:
    """Return the loss and, detached, how often each row's first choice was the target's: [D, 2] hits and anchors.

    The loss is the soft cross-entropy, a weighted mean over the rows at which the target's choice is in the draft
    vocabulary, to which a confidence head adds its own with the same weights; weights: one of `WEIGHTS`. Hits and
    anchors count only if all earlier rows hit.
    """
    states = states_of(head, batch, taps)
    logits = drafted(head, batch, states)
    place, rows = teacher.place[batch.choice], batch.teacher
    known = batch.real & (place[rows] >= 0)
    if weights == WEIGHTS[1]:
        label = teacher.place[batch.labels].flatten()
        q = logits.detach().float().log_softmax(-1).gather(1, label.clamp(min=0)[:, None]).squeeze(1).exp()
        weight = dpace((q * (label >= 0)).view_as(rows), batch.real)
    else:
        weight = decay(rows.shape[1] + 1).to(rows.device).expand_as(rows)
    weight = weight * known
    weight = weight / weight.sum().clamp(min=1e-9)
    wanted = teacher(batch.target)
    loss, best = SoftCrossEntropy.apply(logits, wanted, rows.flatten(), weight.flatten())
    if isinstance(head, DSparkHead) and head.confidence_head is not None:
        said = head.confidence(states, head.before(batch.before)).flatten()
        common = in_common(logits.detach(), wanted, rows.flatten())
        loss = loss + F.binary_cross_entropy_with_logits(said, common, weight.flatten(), reduction="sum")
    hit = (best.view_as(rows) == place[rows]) & batch.real
    alive = F.pad(hit.long().cumprod(1)[:, :-1], (1, 0), value=1).bool() & batch.real
    return loss, torch.stack([(hit & alive).sum(0), alive.sum(0)], dim=1)


def in_common(logits: Tensor, wanted: Tensor, teacher: Tensor) -> Tensor:
    """Return 1 - TV [n] of each row of logits [n, Vd] and the row of `wanted` that `teacher` [n] names."""
    pieces = zip(*(x.split(rows_at_once(logits.device, logits.shape[1])) for x in (logits, teacher)), strict=True)
    return torch.cat([1 - (part.float().softmax(-1) - wanted[row]).abs().sum(-1) / 2 for part, row in pieces])


@torch.no_grad()
def accepted(
    head: DFlashHead, reply: TrainingReply, features: tuple[Tensor, Tensor], taps: slice, teacher: Teacher, depth: int
) -> list[int]:
    """Return for each anchor of a greedy reply how many drafts of a chain of `depth`, at most D, are accepted."""
    every = range(reply.start, len(reply.ids) - 1)
    batch = pack(head, [reply], [features], [every])
    best = drafted(head, batch, states_of(head, batch, taps)).argmax(-1).view_as(batch.teacher)
    hits = (best == teacher.place[batch.choice][batch.teacher])[: max(0, len(every) + 1 - depth), :depth]
    return hits.long().cumprod(1).sum(1).tolist()


class BlockTrainer(Trainer):
    """The trainer of a DFlash or DSpark network."""

    recipe: BlockRecipe
    head: DFlashHead

    @property
    def depths(self) -> list[int]:
        """The lengths of chains for which the accept length is worth telling; the last is a whole block's."""
        most = self.recipe.rounds
        return [*(depth for depth in super().depths if depth < most), most]

    def _losses(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the loss on the replies of these indices, at anchors drawn for this update, and the hits by depth."""
        rng = random.Random(f"{self.recipe.seed}/anchors/{self.step}")
        replies = [self.replies[i] for i in chosen]
        anchors = [draw_anchors(reply, self.recipe.block_size, rng) for reply in replies]
        batch = pack(self.head, replies, self.features.several(chosen), anchors)
        return losses(self.head, batch, self.taps, self.teacher, self.recipe.weights)

    def _accepted(self, index: int, rounds: int) -> list[int]:
        reply, features = self.replies[index], self.features.of(index)
        return accepted(self.head, reply, features, self.taps, self.teacher, rounds)
