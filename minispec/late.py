"""What steps without the head keep for it, and how the head catches up.

A drafter with a network computes its rows from the target's features. A plain step does not run the head, since that
would cost most of what a plain step saves, nor does a step whose trees are all the host's. These steps save their
tokens and features here, by row modulo 64. Before the head drafts again it processes this backlog, all at once, like a
chunk of a prompt. So a return to its trees costs one pass over at most 64 rows a slot, and no row of a drafter is ever
missing in a page that others may read.

The host counts the rows that wait: a plain step adds exactly one, so steps may be under way meanwhile; one with trees
adds what it has emitted, which the host must know before the next one. Where they begin follows on the device from the
slot's length.

Read next: `engine.py`, whose steps keep and catch up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from minispec.buffers import Chunk, DecodeBuffers, PrefillBuffers, Prefills
from minispec.compiled import within_step
from minispec.drafter import Committed, Drafter

KEPT_ROWS = 64  # of a slot; no more than the largest prefill step has, which is 128 at least


class Late:
    """Tokens [R, 64] int64 and features [R, 64, F] by slot and row modulo 64; None for a drafter that takes in nothing.

    waiting: for each slot how many rows, the newest ones, the drafter has not taken in yet.
    """

    tokens: Tensor | None = None
    features: Tensor | None = None

    def __init__(self, drafter: Drafter, slots: int, like: Tensor) -> None:
        """`like` has the target's width, dtype and device."""
        self.drafter, self.waiting = drafter, [0] * slots
        width = len(drafter.taps) * like.numel()  # F
        if drafter.commits:
            self.tokens = torch.zeros(slots, KEPT_ROWS, dtype=torch.int64, device=like.device)
        if drafter.commits and width:
            self.features = torch.zeros(slots, KEPT_ROWS, width, dtype=like.dtype, device=like.device)

    def attach(self, prefills: Prefills, lens: Tensor, root: Tensor) -> None:
        """Tell through which steps the drafter catches up, and where the engine has lengths and roots [R]."""
        self.prefills, self.lens, self.root = prefills, lens, root

    def keeps(self, step: DecodeBuffers) -> bool:
        """Return whether a step leaves its rows here, since the drafter has no part in it."""
        return self.tokens is not None and not step.shape.drafts and step.most <= KEPT_ROWS

    def keep(self, slots: Tensor, rows: Tensor, tokens: Tensor, features: Tensor | None) -> None:
        """Keep the tokens [B, A] and the features [B, A, F] of rows [B, A] of slots [B]; runs inside a step.

        The rows of an accepted path come first, then padding. The padding is overwritten later, and until then it must
        not fall on rows that wait: `before` sees to it that those that wait and A are at most 64 together.
        """
        assert self.tokens is not None, "nothing is kept for a drafter that takes in nothing"
        slots, place = slots[:, None], rows % KEPT_ROWS
        self.tokens[slots, place] = tokens
        if self.features is not None:
            self.features[slots, place] = cast(Tensor, features)

    def before(self, step: DecodeBuffers, slots: Sequence[int]) -> None:
        """Make ready for a decode step: catch up where it drafts, or where one of the slots has no room for its rows.

        Then all slots of the step catch up in one pass.
        """
        if not self.keeps(step) or any(self.waiting[slot] + step.most > KEPT_ROWS for slot in slots):
            self.catch_up(slots)
        if step.nodes == 1:  # it adds one row a slot, which is known before it has run
            self.landed(dict.fromkeys(slots, 1))

    def landed(self, added: Mapping[int, int]) -> None:
        """Count the rows that a step has left here, by slot."""
        for slot, rows in added.items() if self.tokens is not None else ():
            self.waiting[slot] += rows

    def catch_up(self, slots: Iterable[int]) -> None:
        """Let the drafter take in what waits of these slots, as chunks of prompts."""
        behind = [slot for slot in slots if self.waiting[slot]]
        most = max(1, self.prefills.blocks // self.prefills.blocks_of(KEPT_ROWS))  # slots of one pass
        while behind:
            part, behind = behind[:most], behind[most:]
            step = self.prefills.of(sum(self.prefills.blocks_of(self.waiting[slot]) for slot in part))
            # The tokens are here. Where a chunk begins is told from where the slot's rows end.
            step.upload([Chunk(slot, [0] * self.waiting[slot], -self.waiting[slot], last=False) for slot in part])
            with within_step(step):
                self.drafter.commit(self._backlog(step))
            self.release(part)

    def _backlog(self, step: PrefillBuffers) -> Committed:
        """Return what waits of the slots in a prefill step's inputs as such a step would tell it."""
        assert self.tokens is not None, "nothing waits for a drafter that takes in nothing"
        slots, ends = step.slots[:, None], self.lens[step.slots]
        rows = step.place(ends + step.starts)
        tokens, following = self.tokens[slots, rows % KEPT_ROWS], self.tokens[slots, (rows + 1) % KEPT_ROWS]
        following = torch.where(rows == ends[:, None] - 1, self.root[step.slots][:, None], following)
        features = None if self.features is None else self.features[slots, rows % KEPT_ROWS].view(1, step.size, -1)
        tokens, following, rows = (part.reshape(1, step.size) for part in (tokens, following, rows))
        return Committed(step.chunk_slots, tokens, following, rows, features, step.ends, step.plan, prefill=True)

    def release(self, slots: Iterable[int]) -> None:
        """Forget what waits of these slots."""
        for slot in slots:
            self.waiting[slot] = 0
