"""STANDALONE: a whole small model as drafter, with keys and values of its own under the target's page table.

The oldest kind of draft (speculative decoding, arXiv 2211.17192 and 2302.01318) needs no training: any model that reads
the same token ids will do. It sees the text as if it served alone, from the first token on and at true positions.

The model drafts by the same beam as a draft head (`beam.py`), but with lookahead 0: row i holds token i. It computes
from the tokens what a head takes from the target's features, so `commit` goes one row further, to the root:

    row   0 ... lens-1 | lens | lens+1 .. lens+K | lens+K+1 .. lens+2K | ...
          committed      root   first frontier     second frontier

The state kept for a slot is the hidden state at its root, whose logits are the first drafts.

Two models fit if each id means the same to both. So their tokenizers are compared, not the sizes of their
vocabularies, which every publisher pads differently.

Read next: `beam.py` for the trees, `engine.py` for the calls.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minispec.attention import AttendKind, Plan
from minispec.beam import BeamDrafter, Inputs
from minispec.compiled import Compiler
from minispec.drafter import Committed
from minispec.kv import KVShape, PagedKV
from minispec.load.fp8 import read_weights
from minispec.load.tokenizer import Tokenizer, load_tokenizer
from minispec.load.weights import ModelError, load_weights, read_config
from minispec.model import Attend, Model, ModelConfig, Rope, published_tensors

logger = logging.getLogger("minispec")


class DraftModel(nn.Module):
    """A model as the beam sees it: it reads no features of the target and drafts the ids below `vocab_size`."""

    name = "standalone"
    taps: tuple[int | str, ...] = ()
    token_map: Tensor | None = None

    def __init__(self, model: Model, vocab_size: int) -> None:
        super().__init__()
        self.model, self.vocab_size = model, vocab_size
        config = model.config
        self.hidden_size, self.kv_heads, self.head_dim = config.hidden_size, config.kv_heads, config.head_dim

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits [..., vocab_size] of hidden states [..., H]; the LM head's padding is cut off."""
        return self.model.logits(state)[..., : self.vocab_size]


class StandaloneDrafter(BeamDrafter):
    """The drafter around a model: S rounds over K branches, reranked to a tree of N nodes."""

    lookahead = 0
    network: DraftModel

    def __init__(self, network: DraftModel, **shape: Any) -> None:
        """`shape`: what `BeamDrafter` takes by name."""
        super().__init__(network, **shape)
        self.kv_shape = KVShape(network.model.config.layers, network.kv_heads, network.head_dim)
        self.expect(self.longest)

    def expect(self, longest: int) -> None:
        """Be prepared, before `attach`, for paths of so many tokens."""
        super().expect(longest)
        # Rows from the old root on: those of a path, A, and of the new root; or of the root and the frontiers.
        self.scratch = max(self.longest + 1, 1 + self.window)
        device = self.network.model.embed_tokens.weight.device
        self._causal = torch.ones(self.longest, self.longest, dtype=torch.bool, device=device).tril()

    def attach(
        self, kv: PagedKV, attend_kind: AttendKind, batch_sizes: Sequence[int], chunk_counts: Sequence[int]
    ) -> None:
        """Allocate the drafter's own pages, per-slot state, and the plans of rows that end at a root."""
        super().attach(kv, attend_kind, batch_sizes, chunk_counts)
        paths = [(count, length) for count in batch_sizes for length in self.path_lengths]
        shapes = [*paths, *((count, 1) for count in chunk_counts)]
        self._tails = {shape: Plan(self.kv, shape[0], 1, shape[1]) for shape in shapes}  # by requests and rows of each

    def compile(self, compiler: Compiler) -> None:
        self.network.model.compile_blocks(compiler)

    def attends(self, plan: Plan, prefill: bool) -> list[Attend]:
        """Return the attention of what a head has, where paths end at a root, and of the roots after prompt chunks."""
        if prefill:
            return [self._attend(plan), self._attend(self._tails[plan.blocks, 1])]
        return super().attends(self._tails[plan.batch, plan.width], prefill)

    def commit(self, new: Committed) -> None:
        """Write the rows of the tokens just committed and of the root after them; keep the state at the root."""
        root = new.positions.flatten()[new.ends] + 1  # [C], its row and position
        if new.prefill:  # first the prompt's chunk, below the root or the next chunk's first token
            self._run(new.tokens, None, new.positions, new.plan)
            tokens, first = new.following.flatten()[new.ends][:, None], root
        else:  # a path, whose first row is the old root's and was written by the commit before
            tokens, first = new.following, new.positions[:, 0] + 1
        count, width = tokens.shape
        positions = first[:, None] + torch.arange(width, device=first.device)
        plan = self._tails[count, width]
        visible = self._causal[:width, :width].expand(count, -1, -1)
        plan.fill(new.slots, first, visible, live=positions <= root[:, None])
        states = self._run(tokens, None, positions, plan)
        self.state[new.slots] = states[torch.arange(count, device=first.device), root - first]

    def _read(self, tokens: Tensor, positions: Tensor) -> Inputs:
        """Return what the model reads of tokens at positions, both [B, T] int64."""
        # The draft has no embedding for ids that exist only in the target's padding; they get its last one.
        model = self.network.model
        known = tokens.clamp(0, model.config.vocab_size - 1)
        return Inputs(model.embed(known), *model.rope(positions), positions)

    def _through(self, inputs: Inputs, states: Tensor | None, plan: Plan) -> Tensor:
        """Return the hidden states [B, T, H] under a plan; what came before is in the pages, so no state is read."""
        model, rope = self.network.model, Rope(inputs.cos, inputs.sin)
        return model.finish(model.run_blocks(inputs.embedding, rope, self._attend(plan)))[0]


# ---- reading a draft model ----------------------------------------------------------------------------------------


def load_draft(
    folder: Path, target: Model, tokenizer: Tokenizer, context_length: int | None, load_format: str = "auto"
) -> DraftModel:
    """Return the model in `folder` as a drafter for `target`, in its dtype and on its device.

    tokenizer: the target's. context_length: the one served, None for the target's own. load_format: as for
    `read_weights`. For a target on the meta device the draft has its sizes alone. Raises ModelError naming
    --speculative-draft-model-path if the model is not supported or gives token ids another meaning.
    """
    weight = target.embed_tokens.weight
    try:
        stated = read_config(folder)
        config = ModelConfig.from_hf(stated)
        vocab_size = _compared(stated.get("tokenizer_digest"), tokenizer, folder)
        model = Model.empty(config, weight.dtype, weight.device)
        if not weight.is_meta:
            load_weights(published_tensors(model), read_weights(folder, load_format, wanted=model.reads))
    except KeyError as error:
        raise ModelError(f"--speculative-draft-model-path {folder}: config.json lacks {error}") from error
    except ValueError as error:
        raise ModelError(f"--speculative-draft-model-path {folder}: {error}") from error
    served = context_length or target.config.context_length
    reach = min(config.context_length, config.sliding_window or config.context_length)
    if reach < served:
        logger.info("the draft model is made for %d tokens of the %d served: beyond them it runs on, and may draft "
                    "worse", reach, served)  # fmt: skip
    return DraftModel(model, min(config.vocab_size, vocab_size, target.config.vocab_size))


def _compared(digest: str | None, tokenizer: Tokenizer, folder: Path) -> int:
    """Return how many ids the target's tokenizer and the draft share; raises ModelError if one differs in meaning.

    digest: of the tokenizer that the draft was trained with. `minispec.train standalone` writes it in place of a copy
    of the tokenizer; None where the folder states none.
    """
    if digest is not None:
        if digest != tokenizer_digest(tokenizer):
            raise ModelError("its tokenizer_digest is not that of the target's tokenizer")
        return tokenizer.vocab_size
    own = _own_tokenizer(folder)
    if difference := ids_differ(tokenizer, own):
        raise ModelError(f"its tokenizer is not the target's: {difference}")
    return min(own.vocab_size, tokenizer.vocab_size)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a fingerprint of what every id means."""
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        text = tokenizer.backend.token_bytes(token)
        digest.update(len(text).to_bytes(4, "big") + text)
    return digest.hexdigest()


def _own_tokenizer(folder: Path) -> Tokenizer:
    """Return the draft's tokenizer; raises ModelError where it has none."""
    try:
        return load_tokenizer(folder)
    except ValueError as error:
        problem = "no tokenizer in it that can be read, so its ids cannot be compared with the target's"
        raise ModelError(problem) from error


def ids_differ(target: Tokenizer, draft: Tokenizer) -> str | None:
    """Return where two tokenizers first give an id different meanings, None where they never do.

    An id that only one of them has is no difference, since the draft proposes no id that the target lacks.
    """
    for token in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.backend.token_bytes(token), draft.backend.token_bytes(token)
        if ours != theirs and ours and theirs:
            return f"id {token} is {ours!r} there and {theirs!r} in the draft"
    return None
