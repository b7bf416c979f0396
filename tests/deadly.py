"""A drafter for servers of several processes: by tokens of a text it takes its time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from minispec.drafter import Draft, HostDrafter

PACED, CRAWLING = 6351, 26772  # " slowly" and " crawl" in the default model's vocabulary
STEP, CHUNK = 0.02, 0.15  # seconds that a step takes beside a text that is paced, and a chunk of one that crawls


class Deadly(HostDrafter):
    """Drafts nothing."""

    name, nodes, depth = "deadly", 2, 1

    def __init__(self, *given: object) -> None:
        self.texts: dict[int, list[int]] = {}

    def draft(self, slots: Sequence[int]) -> list[Draft]:
        """Return roots, after a while or never."""
        texts = [self.texts[slot] for slot in slots]
        if any(PACED in text[:80] for text in texts):
            time.sleep(STEP)
        return [Draft([text[-1]], [-1]) for text in texts]

    def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        """Remember the text."""
        text = self.texts.setdefault(slot, [])
        text.extend(tokens)
        if len(tokens) > 1 and CRAWLING in text[:80]:
            time.sleep(CHUNK)

    def release(self, slot: int) -> None:
        """Forget the slot."""
        self.texts.pop(slot, None)
