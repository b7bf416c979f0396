"""The backlog: tokens and features of steps that did not run the drafter, kept until the drafter takes them in.

A drafter with a network computes its rows (keys and values) from tokens and features, which are hidden states of the
target. Plain steps, and steps whose trees all come from lookups, do not run the network, and save tokens and features
here: those of row r at place r modulo 64. The drafter takes in all of a slot's backlog, at most 64 rows, in one pass,
like a chunk of a prompt. A page is shared with other requests only after the drafter's rows in it are written.

The host counts the rows of each slot's backlog. A plain step adds exactly one row, so the next step may be launched
before the plain step ends. A step with looked-up trees adds as many rows as it emits tokens, and the host must know
this number before the next step. A backlog ends at the slot's length, which the device knows.

Read next: `engine.py`, whose steps call `keep` and `before`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from minispec.buffers import Chunk, DecodeBuffers, PrefillBuffers, Prefills
from minispec.compiled import within_step
from minispec.drafter import Committed, Drafter

KEPT_ROWS = 64  # the most rows of a slot's backlog; they must fit into the largest prefill step, of at least 128 rows


class Late:
    """The backlog of all slots: tokens [R, 64] int64 and features [R, 64, F], by slot and row modulo 64.

    R is the number of slots, slot 0 included; F is the width of a token's features. Both tensors are None if the
    drafter takes no committed tokens in (`Drafter.commits`). `features` is also None if the drafter has no taps.
    waiting: how many of each slot's newest rows are in the slot's backlog.
    """

    tokens: Tensor | None = None
    features: Tensor | None = None

    def __init__(self, drafter: Drafter, slots: int, like: Tensor) -> None:
        """like: a vector of the target's hidden size, with its dtype and device."""
        self.drafter, self.waiting = drafter, [0] * slots
        width = len(drafter.taps) * like.numel()  # F
        if drafter.commits:
            self.tokens = torch.zeros(slots, KEPT_ROWS, dtype=torch.int64, device=like.device)
        if drafter.commits and width:
            self.features = torch.zeros(slots, KEPT_ROWS, width, dtype=like.dtype, device=like.device)

    def attach(self, prefills: Prefills, lens: Tensor, root: Tensor) -> None:
        """Set the prefill steps whose buffers `catch_up` uses, and the engine's lengths and roots, both [R]."""
        self.prefills, self.lens, self.root = prefills, lens, root

    def keeps(self, step: DecodeBuffers) -> bool:
        """Return whether a step adds its rows to the backlog, since it does not run a drafter that takes in tokens.

        Paths of more than 64 tokens have no room in the backlog. The drafter takes them in at the end of their step.
        """
        return self.tokens is not None and not step.shape.drafts and step.most <= KEPT_ROWS

    def keep(self, slots: Tensor, rows: Tensor, tokens: Tensor, features: Tensor | None) -> None:
        """Save tokens [B, A] and features [B, A, F] of rows [B, A] of slots [B]; runs inside a step.

        The first of the A rows are the accepted path, the others are padding. Padding must not overwrite the backlog,
        so `before` ensures that the backlog's rows and A further rows are at most 64.
        """
        assert self.tokens is not None, "nothing is kept for a drafter that takes in nothing"
        slots, place = slots[:, None], rows % KEPT_ROWS
        self.tokens[slots, place] = tokens
        if self.features is not None:
            self.features[slots, place] = cast(Tensor, features)

    def before(self, step: DecodeBuffers, slots: Sequence[int]) -> None:
        """Let the drafter catch up on these slots if the step runs it, or if a slot's backlog may lack room."""
        if not self.keeps(step) or any(self.waiting[slot] + step.most > KEPT_ROWS for slot in slots):
            self.catch_up(slots)
        if step.nodes == 1:  # a plain step adds one row a slot, so the rows can be counted before it runs
            self.landed(dict.fromkeys(slots, 1))

    def landed(self, added: Mapping[int, int]) -> None:
        """Count the rows that a step added to the backlogs; `added` has their number by slot."""
        for slot, rows in added.items() if self.tokens is not None else ():
            self.waiting[slot] += rows

    def catch_up(self, slots: Iterable[int]) -> None:
        """Let the drafter take in the backlogs of these slots, as chunks of prompts."""
        behind = [slot for slot in slots if self.waiting[slot]]
        most = max(1, self.prefills.blocks // self.prefills.blocks_of(KEPT_ROWS))  # how many slots fit into one pass
        while behind:
            part, behind = behind[:most], behind[most:]
            step = self.prefills.of(sum(self.prefills.blocks_of(self.waiting[slot]) for slot in part))
            # Token 0 is a placeholder: `_backlog` reads the saved tokens. Here a chunk's start is relative to the
            # slot's length, which the device knows.
            step.upload([Chunk(slot, [0] * self.waiting[slot], -self.waiting[slot], last=False) for slot in part])
            with within_step(step):
                self.drafter.commit(self._backlog(step))
            self.release(part)

    def _backlog(self, step: PrefillBuffers) -> Committed:
        """Return the backlogs of the step's slots in the form in which a prefill step calls `Drafter.commit`."""
        assert self.tokens is not None, "nothing waits for a drafter that takes in nothing"
        slots, ends = step.slots[:, None], self.lens[step.slots]
        rows = step.place(ends + step.starts)
        tokens, following = self.tokens[slots, rows % KEPT_ROWS], self.tokens[slots, (rows + 1) % KEPT_ROWS]
        following = torch.where(rows == ends[:, None] - 1, self.root[step.slots][:, None], following)
        features = None if self.features is None else self.features[slots, rows % KEPT_ROWS].view(1, step.size, -1)
        tokens, following, rows = (part.reshape(1, step.size) for part in (tokens, following, rows))
        return Committed(step.chunk_slots, tokens, following, rows, features, step.ends, step.plan, prefill=True)

    def release(self, slots: Iterable[int]) -> None:
        """Empty the backlogs of these slots."""
        for slot in slots:
            self.waiting[slot] = 0
