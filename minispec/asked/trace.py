"""Watching a step: its trees, the probabilities of each node by drafter and target, and the accepted nodes.

The one idea: a watched step runs the operations of any other step and a few more after them (`look`), so its output is
the same, token for token. A step with a watched request runs in `steps.py`, uncaptured.

Read next: `steps.py`, which looks; `serve/reply.py` for what clients see.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.sampling import gumbel
from minispec.tree import PADDING, DraftTree
from minispec.verify import Verdict


class SeenStep(NamedTuple):
    """What was seen of a step, a row for each request, on the device or copied to the host."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64
    drafted: Tensor  # [B, N] fp32, the drafter's log-probability of the path from the root to each node; NaN: none
    target: Tensor  # [B, N] fp32, the target's log-probability of each node's token after its parent
    path: Tensor  # [B, A] int64
    count: Tensor  # type: ignore[assignment]  # [B] int64; it hides tuple.count, which nobody calls
    picked: Tensor  # [B, A] fp32, log-probability of each emitted token
    margin: Tensor  # [B, A] fp32, lead of the best token over the second, in logit + noise, unfiltered

    def to_host(self) -> SeenStep:
        """Return a copy on the host, which on CUDA is complete when `Pending.ready` is."""
        return SeenStep(*(tensor.to("cpu", non_blocking=True) for tensor in self))

    def step(self, row: int, emitted: list[int]) -> dict[str, Any]:
        """Return what was seen of one request, ready for JSON; `emitted` are the tokens that it kept.

        Nodes are numbered without padding. `draft` and `target` are probabilities of a node's token after its parent's
        token: None at the root, and in `draft` also if the drafter has none. `accepted` are the nodes of the accepted
        path, from the root on; nodes behind a stop are left out.
        """
        tokens, above = self.tokens[row].tolist(), self.parents[row].tolist()
        real = [node for node, token in enumerate(tokens) if token != PADDING or node == 0]
        place = {node: index for index, node in enumerate(real)}
        scores, target = self.drafted[row].tolist(), self.target[row].tolist()
        draft = [None if node == 0 else _ratio(scores[node], scores[above[node]] if above[node] else 0.0)
                 for node in real]  # fmt: skip
        count = min(int(self.count[row]), len(emitted) + 1)
        return {
            "tokens": [tokens[node] for node in real],
            "parents": [place.get(above[node], -1) for node in real],
            "draft": draft,
            "target": [None if node == 0 else _ratio(target[node], 0.0) for node in real],
            "accepted": [place[node] for node in self.path[row, :count].tolist()],
            "emitted": emitted,
            "logprobs": [_rounded(value) for value in self.picked[row, : len(emitted)].tolist()],
            "margins": [_rounded(value) for value in self.margin[row, : len(emitted)].tolist()],
        }


def look(
    tree: DraftTree, drafted: Tensor, logits: Tensor, verdict: Verdict,
    noise: tuple[Tensor, Tensor] | None, lens: Tensor,
) -> SeenStep:  # fmt: skip
    """Return what is seen of trees [B, N], with `drafted [B, N]` as in `SeenStep`, logits [B, N, V] and lens [B].

    noise: temperatures and seeds, as `SamplingState.noise` returns them; None for a greedy batch.
    """
    batch, most = verdict.path.shape
    row = torch.arange(batch, device=logits.device)[:, None]
    known = logits.float().log_softmax(-1)
    target = known[row, tree.parents.clamp(min=0), tree.tokens.clamp(min=0)]
    score = logits[row, verdict.path].float()
    if noise is not None:
        temperature, seed = noise
        position = lens[:, None] + torch.arange(1, most + 1, device=logits.device)
        score = score + temperature[:, None, None] * gumbel(
            seed[:, None].expand(batch, most), position, logits.shape[-1]
        )
    best = score.topk(2, dim=-1).values
    picked = known[row, verdict.path, verdict.emitted]
    return SeenStep(*tree, drafted, target, verdict.path, verdict.count, picked, best[..., 0] - best[..., 1])


def _ratio(score: float, above: float) -> float | None:
    """Return exp(score - above): a node's probability, from its and its parent's logarithm; None if one is missing."""
    return None if math.isnan(score) or math.isinf(above) else _rounded(math.exp(min(score - above, 0.0)))


def _rounded(value: float) -> float | None:
    """Return a number rounded for JSON; None if it is not finite."""
    return round(value, 5) if math.isfinite(value) else None
