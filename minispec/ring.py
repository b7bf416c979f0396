"""What plain steps keep for a drafter that works on the device: the newest tokens of each slot, and the taps on them.

A drafter with a network computes its rows from the target's features, and a plain step tells it nothing, since that
would cost most of what a plain step saves. The one idea: the step leaves tokens and features here, by row modulo 64,
and the drafter takes them in later, all at once, as it takes in the chunk of a prompt. So a return to trees costs one
pass over at most 64 rows a slot, and no row of a drafter is ever missing in a page that others may read.

The host counts the rows that wait, since a plain step adds exactly one. Where they begin follows on the device from the
slot's length, so steps may be under way meanwhile.

Read next: `engine.py`, whose `catch_up` empties the ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64  # of a slot; no more than a query block of any device has


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
        """Keep the token [B] and the features [B, F] of row rows [B] of each slot; runs inside a step."""
        place = rows % ROWS
        self.tokens[slots, place] = tokens
        if self.features is not None:
            self.features[slots, place] = features

    def read(self, slots: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tokens of rows [n, W] of slots [n], those of the rows after them, and the features [n, W, F]."""
        place = rows % ROWS
        features = None if self.features is None else self.features[slots[:, None], place]
        return self.tokens[slots[:, None], place], self.tokens[slots[:, None], (rows + 1) % ROWS], features
