"""DSpark: DFlash's block, in which each draft follows from the token before it.

A row of a DFlash block (`dflash.py`) cannot know what the row before it picks. DSpark has the same pass over the block,
and two small heads after it. p is the token before a draft, h the state of the draft's row after the last norm:

    Markov head        the row's logits += W2 W1[p], a low-rank table of which token follows which
    confidence head    sigmoid(w . [h; W1[p]] + b), how likely the target accepts the draft

So a tree grows row by row, without a further pass: the children of a node are the likeliest tokens of its row after the
node's own token. A chain takes the likeliest token of each row. Like every drafter here it adds the noise of the
target's picks first (`couple`).

Where the bonus's row drafts, a block of S rows drafts S tokens; else S - 1, as in DFlash:

    row                       lens   lens+1  lens+2  lens+3
    holds                     bonus   mask    mask    mask
    drafts the position      lens+1  lens+2  lens+3  lens+4     `from_anchor`: DeepSeek's and SpecForge's networks
    or                          -    lens+1  lens+2  lens+3     speculators', unless they say otherwise

A node whose confidence is below a threshold is no draft, and has none below it. Its place in the tree is padding, as
the shape of a step is chosen before anything is drafted. `policy.py` chooses it, and takes into account what the
network said of each request's drafts in the step before (`confidences`): where drafts are unsure, trees are smaller.

Paper: DSpark, arXiv 2607.05147. Letters as in `dflash.py`; R is the rank of the Markov head, P a number of paths.

Read next: `load/dspark_heads.py`, which reads checkpoints; docs/block-drafters.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.attention import AttendKind
from minispec.beam import likeliest, rerank
from minispec.dflash import DFlashConfig, DFlashDrafter, DFlashHead, Pass, likeliest_paths
from minispec.drafter import Batch
from minispec.kv import PagedKV
from minispec.model import Model
from minispec.tree import PADDING, DraftTree


@dataclass(frozen=True, eq=False)
class DSparkConfig(DFlashConfig):
    """The sizes of a DSpark network."""

    rank: int = 256  # R
    from_anchor: bool = True  # whether the bonus's row drafts the first token
    confidence: int = 0  # how many numbers the confidence head reads: d + R, or d for states alone; 0: there is none


class DSparkHead(DFlashHead):
    """The network: DFlash's with a Markov head, and perhaps a confidence head."""

    name = "dspark"

    def __init__(self, config: DSparkConfig, target: Model) -> None:
        super().__init__(config, target)
        self.first, shape = int(not config.from_anchor), config.layer
        self.markov_head = nn.ModuleDict({
            "markov_w1": nn.Embedding(shape.vocab_size, config.rank),
            "markov_w2": nn.Linear(config.rank, self.draft_vocab, bias=False),
        })  # fmt: skip
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.confidence, 1)}) if config.confidence else None
        self.knows_pair = config.confidence > shape.hidden_size

    def before(self, tokens: Tensor) -> Tensor:
        """Return W1[p] [..., R] for tokens p [...], which are ids of the target."""
        return self.markov_head["markov_w1"](tokens)

    def following(self, before: Tensor) -> Tensor:
        """Return W2 W1[p] [..., Vd], which is added to logits, from W1[p] [..., R]."""
        return self.markov_head["markov_w2"](before)

    def confidence(self, state: Tensor, before: Tensor) -> Tensor:
        """Return the logits [...] of acceptance, from states [..., d] of the network's output and W1[p] [..., R]."""
        assert self.confidence_head is not None
        read = self.norm(state).expand(*before.shape[:-1], -1)
        read = torch.cat((read, before), dim=-1) if self.knows_pair else read
        return self.confidence_head["proj"](read).squeeze(-1).float()


class DSparkDrafter(DFlashDrafter):
    """The drafter around a DSpark network; see `DFlashDrafter` for the sizes of trees."""

    network: DSparkHead

    def __init__(self, network: DSparkHead, *, threshold: float = 0.0, **shape: Any) -> None:
        """threshold: the least confidence of a draft; 0 drafts the whole block. shape: as of `DFlashDrafter`."""
        super().__init__(network, **shape)
        assert threshold == 0 or network.confidence_head is not None, "nothing to compare with the threshold"
        self.threshold = threshold

    def attach(
        self, kv: PagedKV, attend_kind: AttendKind, batch_sizes: Sequence[int], chunk_counts: Sequence[int]
    ) -> None:
        """Allocate what a block needs, and room for the confidences, [R, S] fp32 by slot; negative: none."""
        super().attach(kv, attend_kind, batch_sizes, chunk_counts)
        device = kv.pool.device
        self._said = torch.full((kv.table.shape[0], self.depth), -1.0, device=device)
        # Each step copies all of them to the host, where they may be read at any time without waiting for the device.
        self._told = self._said.cpu().pin_memory() if device.type == "cuda" else self._said

    def propose(self, batch: Batch) -> DraftTree:
        """Draft as `DFlashDrafter` does, and keep how confident the network is of each request's likeliest path."""
        tree, said = self._draft(batch)
        if said is not None:
            self._said[batch.slots] = F.pad(said, (0, self.depth - said.shape[1]), value=-1.0)
            if self._told is not self._said:
                self._told.copy_(self._said, non_blocking=True)
        return tree

    def confidences(self, slot: int) -> Sequence[float]:
        return [chance for chance in self._told[slot].tolist() if chance >= 0]

    def _close(self, step: Pass, batch: Batch, states: Tensor) -> tuple[DraftTree, Tensor | None]:  # type: ignore[override]
        """Return the tree of the likeliest paths, and the confidences [B, depth] along the first draft of each row.

        states [B, S, d]: the network's output. The confidences are None if the network has no head for them.
        """
        network, noise = self.network, batch if self.coupled else None
        states = states[:, network.first : network.first + step.depth]
        base = network.logits(states)
        said: list[Tensor] = []  # not `list[Tensor]()`, which Dynamo cannot trace

        def children(row: int, last: Tensor) -> tuple[Tensor, Tensor]:
            """Return scores and ids of the likeliest tokens of a row after each of the tokens before it."""
            before = network.before(last)
            logits = base[:, row, None] + network.following(before)
            scores, ids = likeliest(logits, self.topk, noise, batch.lens[:, None] + row + 1, network.token_map)
            if network.confidence_head is not None:
                confidence = network.confidence(states[:, row, None], before).sigmoid()
                sure = confidence >= self.threshold
                scores = scores.masked_fill(~sure[..., None], -torch.inf)
                said.append((confidence * sure)[:, 0])
            return scores, ids

        found = likeliest_paths(batch.root, step.depth, step.nodes - 1, children)
        # A path that goes on behind an unsure draft has the score -inf too.
        found = found._replace(tokens=found.tokens.masked_fill(found.scores.isinf(), PADDING))
        tree = rerank(found, batch.root, step.nodes, batch.scores)
        tree = DraftTree(tree.tokens, tree.parents.masked_fill(tree.tokens == PADDING, 0))
        return tree, torch.stack(said, dim=1) if said else None
