"""STANDALONE: a whole small model as drafter, with its own keys and values under the target's page table.

This is the oldest kind of drafter (speculative decoding, arXiv 2211.17192 and 2302.01318). It needs no training: any
model with the same token ids will do.

The model drafts by the same beam as a head (`beam.py`), but its row i holds token i (lookahead 0). A head's row i holds
the pair of state i and token i + 1 (lookahead 1), so a head reads the root in row lens - 1. The model needs one more
row, that of the root, which `commit` writes.

    row   0 ... lens-1 | lens | lens+1 .. lens+K | lens+K+1 .. lens+2K | ...
          committed      root   first frontier     second frontier

The state of a slot is the model's hidden state at the root, whose logits give the first drafts.

Read next: `beam.py` for the trees, `engine.py` for the calls, `draft_models.py` for which models fit each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minispec.attention import AttendKind, Plan, with_windows
from minispec.beam import BeamDrafter, Inputs
from minispec.compiled import Compiler
from minispec.drafter import Committed
from minispec.kv import KVShape, PagedKV
from minispec.model import Model


class DraftModel(nn.Module):
    """A model as the network of a beam. It reads no features of the target, and drafts ids below `vocab_size`.

    token_map: [Vd] int64, the target ids that it may draft, one for each row of its LM head; None: all below
    `vocab_size`.
    """

    name = "standalone"
    taps: tuple[int | str, ...] = ()

    def __init__(self, model: Model, vocab_size: int, token_map: Tensor | None = None) -> None:
        super().__init__()
        self.model, self.token_map = model, token_map
        self.vocab_size = vocab_size if token_map is None else len(token_map)
        config = model.config
        self.hidden_size, self.kv_heads, self.head_dim = config.hidden_size, config.kv_heads, config.head_dim

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits [..., vocab_size] of hidden states [..., H]; higher ids are never drafted."""
        return self.model.logits(state)[..., : self.vocab_size]


class StandaloneDrafter(BeamDrafter):
    """The drafter around a model: S rounds of K branches, whose best N - 1 drafts and the root form a tree."""

    lookahead = 0
    network: DraftModel

    def __init__(self, network: DraftModel, **shape: Any) -> None:
        """shape: the keyword arguments of `BeamDrafter`."""
        super().__init__(network, **shape)
        self.kv_shape = KVShape(network.model.config.layers, network.kv_heads, network.head_dim)
        self.expect(self.depth + 1)

    def expect(self, longest: int) -> None:
        """Make room for accepted paths of `longest` tokens; to be called before `attach`."""
        self.longest = max(longest, self.depth + 1)  # A, the tokens of the longest path that `commit` takes in
        # Rows from the root on: `commit` writes a path of A rows and the new root, `propose` needs root and frontiers.
        self.scratch = max(self.longest + 1, 1 + self.window)
        device = self.network.model.embed_tokens.weight.device
        self._causal = torch.ones(self.longest, self.longest, dtype=torch.bool, device=device).tril()

    def attach(
        self, kv: PagedKV, attend_kind: AttendKind, batch_sizes: Sequence[int], chunk_counts: Sequence[int]
    ) -> None:
        """Allocate what a head needs, and the plans for `commit`, whose rows end at a root."""
        windows = self.network.model.config.windows(kv.pages_per_slot * kv.page_size)
        super().attach(kv, with_windows(attend_kind, windows), batch_sizes, chunk_counts)
        lengths = sorted({min(size.nodes, self.longest) for size in self.trees} | {self.longest})  # of padded paths
        paths = [(count, length) for count in batch_sizes for length in lengths]
        shapes = [*paths, *((count, 1) for count in chunk_counts)]
        self._tails = {shape: Plan(self.kv, shape[0], 1, shape[1]) for shape in shapes}  # by requests, and rows of each
        for plan in self._tails.values():
            self._attend(plan)  # made already, since an attention may change what `Plan.fill` does

    def compile(self, compiler: Compiler) -> None:
        self.network.model.compile_blocks(compiler)

    def attend_paths(self, plan: Plan) -> None:
        super().attend_paths(self._tails[plan.batch, plan.width])

    def commit(self, new: Committed) -> None:
        """Write the rows of the tokens just committed and of the root after them; keep the state at the root."""
        root = new.positions.flatten()[new.ends] + 1  # [C], its row and position
        if new.prefill:  # the chunk's rows first, then the row after it: the root, or the next chunk's first token
            self._run(new.tokens, new.positions, new.plan)
            tokens, first = new.following.flatten()[new.ends][:, None], root
        else:  # the path without its first row, which is the old root's: the previous commit wrote it
            tokens, first = new.following, new.positions[:, 0] + 1
        count, width = tokens.shape
        positions = first[:, None] + torch.arange(width, device=first.device)
        plan = self._tails[count, width]
        visible = self._causal[:width, :width].expand(count, -1, -1)
        plan.fill(new.slots, first, visible, live=positions <= root[:, None])
        states = self._run(tokens, positions, plan)
        self.state[new.slots] = states[torch.arange(count, device=first.device), root - first]

    def _run(self, tokens: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        """Return the hidden states [B, T, H] at tokens and positions, both [B, T] int64, under a plan."""
        return self._through(self._read(tokens, positions), None, plan)

    def _read(self, tokens: Tensor, positions: Tensor) -> Inputs:
        """Return the model's inputs for tokens [B, T] int64 at positions [B, T] int64."""
        # An id that only the target has gets the draft model's last embedding; padding (-1) gets its first.
        model = self.network.model
        known = tokens.clamp(0, model.config.vocab_size - 1)
        return Inputs(model.embed(known), model.rope(positions), positions)

    def _through(self, inputs: Inputs, states: Tensor | None, plan: Plan) -> Tensor:
        """Return the hidden states [B, T, H] under a plan; `states` is not read, since the pages hold the context."""
        model = self.network.model
        return model.finish(model.run_blocks(inputs.embedding, inputs.rope, self._attend(plan)))[0]
