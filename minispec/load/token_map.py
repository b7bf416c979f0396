"""Draft vocabularies: which of the target's tokens a head may draft, as one table from draft ids to target ids.

Most of a text is made of few tokens. A draft head that scores only those reads a fraction of the LM head's matrix. A
token outside the table cannot be drafted, but the output stays right. In FR-Spec (arXiv 2502.14856) a file lists the
most frequent tokens; an EAGLE-3 head has a table of its own.

Read next: `heads.py`, which slices the target's LM head by such a table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """Return the target ids [Vd] int64 of a token map file, most frequent first.

    The file is a .json list, a .safetensors file of one 1-D tensor, or a .pt/.bin list or tensor, and nothing in it is
    executed. Raises ValueError naming --speculative-token-map, what was found and what is allowed.
    """
    try:
        content = _read(path)
        ids = content.flatten() if isinstance(content, Tensor) else torch.tensor(content)
    except Exception as error:
        raise ValueError(f"--speculative-token-map {path}: not readable as a list of ids: {error}") from error
    if ids.dtype not in (torch.int16, torch.int32, torch.int64) or not 0 < ids.numel() <= vocab_size:
        raise ValueError(f"--speculative-token-map {path}: must hold 1 to {vocab_size} integer ids, "
                         f"got {ids.numel()} of {ids.dtype}")  # fmt: skip
    ids = ids.long()
    if problem := map_problem(ids, vocab_size):
        raise ValueError(f"--speculative-token-map {path}: {problem}")
    return ids


def map_problem(ids: Tensor, vocab_size: int) -> str | None:
    """Return what is wrong with target ids [Vd] int64; siblings in a tree must be distinct tokens of the target."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        return f"ids must lie in [0, {vocab_size - 1}], got {low} to {high}"
    return "an id stands in it twice" if ids.unique().numel() != ids.numel() else None


def _read(path: Path) -> Any:
    """Return what a token map file holds."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        (tensor,) = load_file(path).values()
        return tensor
    return torch.load(path, map_location="cpu", weights_only=True)
