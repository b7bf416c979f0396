"""A draft model from its folder, and whether it fits the target.

Two models fit if each id means the same to both. So their tokenizers are compared, not the sizes of their
vocabularies, which every publisher pads differently.

Read next: `standalone.py`, which drafts with it.
"""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from minispec.load.architectures import read_model_config
from minispec.load.fp8_weights import read_weights
from minispec.load.heads import slice_head
from minispec.load.keys import naming
from minispec.load.published import parts_of, published_tensors, reads
from minispec.load.tokenizer import Tokenizer, load_tokenizer
from minispec.load.weights import load_weights, read_config, tied_as_stored
from minispec.model import Model
from minispec.model_config import ModelError
from minispec.standalone import DraftModel

logger = logging.getLogger("minispec")


def load_draft(
    folder: Path, target: Model, tokenizer: Tokenizer, context_length: int | None, load_format: str = "auto",
    token_map: Tensor | None = None,
) -> DraftModel:  # fmt: skip
    """Return the model in `folder` as a drafter for `target`, in its dtype and on its device.

    tokenizer: the target's. context_length: the one served, None for the target's own. load_format: as for
    `read_weights`. token_map: [Vd] int64, the only target ids to draft; ids that the draft lacks are left out. For a
    target on the meta device the draft has its sizes alone. Raises ModelError naming --speculative-draft-model-path if
    the model is not supported or gives token ids another meaning, and --speculative-token-map if it has none of the
    draft's ids.
    """
    weight = target.embed_tokens.weight
    with naming("--speculative-draft-model-path", folder):
        stated = read_config(folder)
        config = tied_as_stored(read_model_config(stated), folder, load_format)
        vocab_size = _compared(stated.get("tokenizer_digest"), tokenizer, folder)
        model = Model.empty(config, weight.dtype, weight.device)
        tensors = read_weights(folder, load_format, wanted=partial(reads, config), split=partial(parts_of, config))
        load_weights(published_tensors(model), tensors)
    served = context_length or target.config.context_length
    if config.context_length < served:
        logger.info("the draft model is made for %d tokens of the %d served: beyond them it runs on, and may draft "
                    "worse", config.context_length, served)  # fmt: skip
    shared = min(config.vocab_size, vocab_size, target.config.vocab_size)
    if token_map is None:
        return DraftModel(model, shared)
    ids = token_map[token_map < shared].to(weight.device)
    if not len(ids):
        raise ModelError(f"--speculative-token-map has no id below {shared}, so the draft model could draft nothing")
    # An LM head of these ids alone, as FR-Spec has it (arXiv 2502.14856). It is a new module, since the old one's
    # matrix is the embedding where the two are tied.
    rows = slice_head(model, ids)
    model.lm_head = nn.Linear(config.hidden_size, len(ids), bias=False, device="meta", dtype=rows.dtype)
    model.lm_head.weight = nn.Parameter(rows, requires_grad=False)
    return DraftModel(model, shared, ids)


def _compared(digest: str | None, tokenizer: Tokenizer, folder: Path) -> int:
    """Return how many ids the target's tokenizer and the draft share; raises ModelError if one differs in meaning.

    digest: of the tokenizer that the draft was trained with. `minispec.train standalone` writes it in place of a copy
    of the tokenizer; None where the folder states none.
    """
    if digest is not None:
        if digest != tokenizer_digest(tokenizer):
            raise ModelError("its tokenizer_digest is not that of the target's tokenizer")
        return tokenizer.vocab_size
    try:
        own = load_tokenizer(folder)
    except ValueError as error:
        raise ModelError("no tokenizer in it that can be read, so its ids cannot be compared with the "
                         "target's") from error  # fmt: skip
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


def ids_differ(target: Tokenizer, draft: Tokenizer) -> str | None:
    """Return where two tokenizers first give an id different meanings, None where they never do.

    An id that only one of them has is no difference, since the draft proposes no id that the target lacks.
    """
    for token in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.backend.token_bytes(token), draft.backend.token_bytes(token)
        if ours != theirs and ours and theirs:
            return f"id {token} is {ours!r} there and {theirs!r} in the draft"
    return None
