"""DFlash: a small network that drafts a whole block of tokens in one pass.

An autoregressive head (`eagle.py`) needs a pass for each depth of its tree. DFlash reads the newest token, which is
called the bonus here, and after it a mask token in each place to be filled. One pass predicts the tokens of all these
places:

    row         0 ... lens-1 |  lens  lens+1  lens+2  lens+3
    holds          context   |  bonus  mask    mask    mask
    predicts                 |    -   lens+1  lens+2  lens+3        each mask row predicts the token at its own position

A context row holds keys and values that come from the target's features (hidden states) alone: in layer l they are the
projections of c = hidden_norm(fc features). So `commit` writes them once for each committed token. The row of the bonus
is no context row yet, since the target has not read the bonus. Block rows are scratch: the next `commit` writes over
them.

Each row sees all rows of the block, unless the checkpoint says that attention is causal. Row j can infer which tokens
are likely in row j - 1, but not which one is picked there. So a row has the same logits for all paths of a tree, and
the probability of a path is the product of its tokens' probabilities. A tree has, besides its root, a node for each of
the N - 1 likeliest paths of all lengths: the last token of the path (DDTree, arXiv 2604.12989). A path is never
likelier than its beginning, so its beginning is among these paths too, and the nodes form a tree.

Paper: DFlash, arXiv 2602.06036. Letters: B is the number of requests, S the rows of a block, N the nodes of a tree, K
the tokens that a tree may take from a row, F the width of the features, d the hidden size, Vd the number of tokens that
can be drafted.

Read next: `dspark.py`, in which a row knows the token before it; `load/dflash_heads.py`, which reads checkpoints;
docs/block-drafters.md for how this differs from EAGLE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from minispec.attention import AttendKind, Plan, with_windows, write_rows
from minispec.beam import Candidates, likeliest, rerank
from minispec.compiled import Compiler, Key, Small
from minispec.drafter import Batch, Committed, Drafter, TreeSize
from minispec.eagle import DraftHead, HeadConfig
from minispec.kv import KVShape, PagedKV
from minispec.model import Attend, Block, LayerAttend, Model, RMSNorm, Rope
from minispec.tree import DraftTree


@dataclass(frozen=True, eq=False)
class DFlashConfig(HeadConfig):
    """The sizes of a DFlash network; `layer.layers` is how many layers it has, and `layer` the sizes of each."""

    block_size: int = 16  # the S that the network was trained with
    mask_token: int = 0  # the target's id whose embedding stands where a token is to be drafted
    causal: bool = False  # whether a row of the block sees only itself and the rows before


class DFlashHead(DraftHead):
    """The network; it uses the target's embedding and LM head unless its config says that it has its own."""

    name = "dflash"
    first = 1  # the row that drafts the first token: row 0 holds the bonus, which is known
    window: int | None = None  # the newest rows that a row of the block sees, the block's included; None: all

    def __init__(self, config: DFlashConfig, target: Model) -> None:
        super().__init__(config, target)
        shape = config.layer
        self.block_size, self.mask_token, self.causal = config.block_size, config.mask_token, config.causal
        self.fc = nn.Linear(len(config.taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.run_block: Callable[[Block, Tensor, Rope, LayerAttend], Tensor] = Block.forward

    @property
    def layer(self) -> Block:  # type: ignore[override]  # other heads have one layer
        return cast(Block, self.layers[0])

    def fuse(self, features: Tensor) -> Tensor:
        """Return c [B, T, d], from which each layer computes its context rows, from features [B, T, F]."""
        return self.hidden_norm(self.fc(features))

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:  # type: ignore[override]
        """Return the states [B, S, d] of blocks whose embeddings are x [B, S, d]."""
        for index, block in enumerate(self.layers):
            x = self.run_block(cast(Block, block), x, rope, attend.layer(index))
        return x

    def logits(self, state: Tensor) -> Tensor:
        return super().logits(self.norm(state))


# ---- a tree from the rows of a block --------------------------------------------------------------------------------


def most_nodes(rows: int, topk: int, limit: int) -> int:
    """Return the most nodes, up to `limit`, of a tree from K = `topk` tokens in each of `rows` rows."""
    return min(limit, 1 + sum(min(limit, topk**depth) for depth in range(1, rows + 1)))


# For a row and the last tokens [B, P] of P paths: log-probabilities fp32 and target ids of the row's K likeliest tokens
# after each, [B, P, K] both, or [B, 1, K] if they are the same after all.
Children = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def likeliest_paths(root: Tensor, rows: int, count: int, children: Children) -> Candidates:
    """Return the likeliest paths of each length up to `rows`, at most `count` for each, as candidates for a tree.

    root [B] int64: the token before the first row.
    """
    known, found = 0, []
    path = torch.zeros_like(root[:, None], dtype=torch.float32)  # the root's score
    index, last = torch.full_like(root[:, None], -1), root[:, None]  # the root is no candidate
    for row in range(rows):
        scores, tokens = children(row, last)
        longer = path[..., None] + scores
        path, flat = longer.flatten(1).topk(min(count, longer[0].numel()), dim=1)
        last = tokens.expand_as(longer).flatten(1).gather(1, flat)
        found.append((last, path, index.gather(1, flat // scores.shape[-1])))
        index = torch.arange(known, known + path.shape[1], device=path.device).expand_as(flat)
        known += path.shape[1]
    return Candidates(*(torch.cat(parts, dim=1) for parts in zip(*found, strict=True)))


class Pass(Key):
    """The static tensors of a pass that drafts trees of N nodes for B requests."""

    def __init__(self, plan: Plan, nodes: int, network: DFlashHead) -> None:
        batch, width, device = plan.batch, plan.width, plan.slots.device
        self.batch, self.nodes, self.plan = batch, nodes, plan
        self.depth = min(nodes - 1, width - network.first)  # how many rows the tree is made of
        self.masks = torch.full((batch, width - 1), network.mask_token, device=device)
        self.live = torch.ones(batch, width, dtype=torch.bool, device=device)
        everything = torch.ones(width, width, dtype=torch.bool, device=device)
        self.visible = everything.tril() if network.causal else everything

    @property
    def of_batch(self) -> Sequence[Tensor]:
        return () if self.batch == 1 else [self.masks, self.live, *self.plan.tensors]


class DFlashDrafter(Drafter):
    """The drafter around a DFlash network: one pass over a block of S rows gives a chain, or a tree, of N nodes.

    A second, smaller size of tree has fewer nodes and the same pass, since fewer rows would change what all rows
    predict. `_open` and `_close` run before and after the network, and may be compiled.
    """

    rounds = 1
    topk: int

    def __init__(
        self, network: DFlashHead, *, block: int, nodes: int, topk: int = 1, smaller: int | None = None,
        coupled: bool = True,
    ) -> None:  # fmt: skip
        """block: S. topk: K. smaller: the nodes of the smaller size; None: there is one size.

        coupled: whether to draft with the noise of the target's picks; if not, drafts are the likeliest tokens.
        """
        drafts = block - network.first
        assert 1 < nodes <= most_nodes(drafts, topk, nodes), "more nodes than paths"
        assert smaller is None or 1 < smaller < nodes, "the smaller tree is the smaller one"
        self.network: DFlashHead = network
        self.name, self.taps, self.block, self.topk, self.coupled = network.name, network.taps, block, topk, coupled
        self.nodes, self.depth = nodes, min(drafts, nodes - 1)
        self.smaller = () if smaller is None else (TreeSize(smaller, min(drafts, smaller - 1), self.rounds),)
        self.scratch = block
        self.kv_shape = KVShape(len(network.layers), network.kv_heads, network.head_dim)
        self.small = Small(type(self)._open, type(self)._close)

    def attach(
        self, kv: PagedKV, attend_kind: AttendKind, batch_sizes: Sequence[int], chunk_counts: Sequence[int]
    ) -> None:
        """Allocate the drafter's own pages, and a plan for the block at each batch size."""
        self.kv = kv.sibling(self.kv_shape)
        self._attends: dict[int, Attend] = {}  # by B
        self._passes: dict[tuple[int, ...], Pass] = {}  # by B and N
        window = self.network.window
        kind = with_windows(attend_kind, () if window is None else [window] * self.kv_shape.layers)
        for batch in batch_sizes:
            plan = Plan(self.kv, batch, 1, self.block)
            self._attends[batch] = kind(self.kv, plan, self.kv_shape.layers)
            self._passes |= {(batch, size.nodes): Pass(plan, size.nodes, self.network) for size in self.trees}

    def compile(self, compiler: Compiler) -> None:
        self.network.run_block = compiler(Block.forward)

    def propose(self, batch: Batch) -> DraftTree:
        """Draft one tree per request; writes scratch rows from row `lens` on in the drafter's own pages."""
        return cast(DraftTree, self._draft(batch))

    def _draft(self, batch: Batch) -> Any:
        """Run the pass over the block; return what `_close` makes of it."""
        step, watched = self._passes[tuple(batch.tree.tokens.shape)], batch.scores is not None
        batch = batch._replace(tree=None)  # type: ignore[arg-type]  # the host's trees are not read
        open_, close = self.small.eager if watched else self.small.of(step)
        embedding, rope = open_(self, step, batch)
        return close(self, step, batch, self.network(embedding, rope, self._attends[step.batch]))

    def _open(self, step: Pass, batch: Batch) -> tuple[Tensor, Rope]:
        """Fill the block's plan; return the embeddings [B, S, d] and rotary factors of its rows."""
        step.plan.fill(batch.slots, batch.lens, step.visible.expand(step.batch, -1, -1), step.live)
        tokens = torch.cat((batch.root[:, None], step.masks), dim=1)
        positions = batch.lens[:, None] + torch.arange(self.block, device=tokens.device)
        return self.network.embed(tokens), self.network.rope(positions)

    def _close(self, step: Pass, batch: Batch, states: Tensor) -> DraftTree:
        """Return the tree of the likeliest paths; states [B, S, d]: the network's output."""
        first, noise = self.network.first, batch if self.coupled else None
        logits = self.network.logits(states[:, first : first + step.depth])
        positions = batch.lens[:, None] + torch.arange(1, step.depth + 1, device=states.device)
        scores, tokens = likeliest(logits, self.topk, noise, positions, self.network.token_map)
        candidates = likeliest_paths(
            batch.root, step.depth, step.nodes - 1, lambda row, last: (scores[:, row, None], tokens[:, row, None])
        )
        return rerank(candidates, batch.root, step.nodes, batch.scores)

    def commit(self, new: Committed) -> None:
        """Write the context rows of the tokens just committed, from the target's features."""
        context, rope = self.network.fuse(cast(Tensor, new.features)), self.network.rope(new.positions)
        for index, block in enumerate(self.network.layers):
            _, k, v = cast(Block, block).project(context, rope)
            write_rows(*self.kv.layer(index), new.plan.rows, k, v)
