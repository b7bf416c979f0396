"""What steps keep for a drafter that works on the device and has no part in them: newest tokens, and the taps on them.

A drafter with a network computes its rows from the target's features. A plain step tells it nothing, since that would
cost most of what a plain step saves, nor does a step whose trees are all the host's. The one idea: the step leaves
tokens and features here, by row modulo 64, and the drafter takes them in later, all at once, as it takes in the chunk
of a prompt. So a return to its trees costs one pass over at most 64 rows a slot, and no row of a drafter is ever
missing in a page that others may read.

The host counts the rows that wait: a plain step adds exactly one, so steps may be under way meanwhile; one with trees
adds what it has emitted, which the host must know before the next one. Where they begin follows on the device from the
slot's length.

Read next: `engine.py`, whose `catch_up` empties the ring.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

ROWS = 64  # of a slot; no more than the largest prefill step has, which is 128 at least


class Ring:
    """Tokens [R, 64] int64 and features [R, 64, F] by slot and row modulo 64.

    waiting: for each slot how many rows, the newest ones, the drafter has not taken in yet.
    """

    def __init__(self, slots: int, width: int, like: Tensor) -> None:
        """`width` is F, 0 for a drafter that reads no features; dtype and device are those of `like`."""
        self.tokens = torch.zeros(slots, ROWS, dtype=torch.int64, device=like.device)
        self.features = torch.zeros(slots, ROWS, width, dtype=like.dtype, device=like.device) if width else None
        self.waiting = [0] * slots

    def keep(self, slots: Tensor, rows: Tensor, tokens: Tensor, features: Tensor | None) -> None:
        """Keep the tokens [B, A] and the features [B, A, F] of rows [B, A] of slots [B]; runs inside a step.

        Rows that do not count may be among them, behind the others, if those that wait and A together are at most 64.
        """
        slots, place = slots[:, None], rows % ROWS
        self.tokens[slots, place] = tokens
        if self.features is not None:
            self.features[slots, place] = cast(Tensor, features)

    def read(self, slots: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tokens of rows [n, W] of slots [n], those of the rows after them, and the features [n, W, F]."""
        place = rows % ROWS
        features = None if self.features is None else self.features[slots[:, None], place]
        return self.tokens[slots[:, None], place], self.tokens[slots[:, None], (rows + 1) % ROWS], features
