"""Which replica gets a prompt: the one that holds most of its beginning, unless that one is too busy.

A replica's prefix cache (`radix.py`) is worth most to the next turn of a conversation or the same system prompt. The
door cannot see those caches, so it remembers what it has sent where. Text is known by whole pages, each by a hash of
itself and of all before it. What is remembered of a replica is bounded by the pages it has, least recently used first,
as the cache itself forgets. A wrong guess costs time and never a text. Cache-aware routing as in SGLang's router
(arXiv 2312.07104).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

SLACK, RATIO = 4, 1.5  # requests, and times the least that any replica has: who has more than both is too busy


class Routing:
    """What replicas hold, by number, as far as the door has seen it; `pages` bounds what is kept of each."""

    def __init__(self, page_size: int, pages: int) -> None:
        self.page_size, self.pages = page_size, pages
        self._held: dict[int, OrderedDict[int, None]] = {}

    def prefixes(self, ids: Sequence[int], salt: str = "") -> list[int]:
        """Return a hash for each prefix of whole pages, the shortest first; texts of two salts have none in common."""
        hashes, before = [], hash(salt)
        for end in range(self.page_size, len(ids) + 1, self.page_size):
            before = hash((before, *ids[end - self.page_size : end]))
            hashes.append(before)
        return hashes

    def choose(self, prefixes: Sequence[int], loads: Mapping[int, int]) -> int:
        """Return the number of a replica, of those that `loads` gives with the requests that each has."""
        least = min(loads, key=lambda number: (loads[number], number))
        shared = {number: self._shared(number, prefixes) for number in loads}
        best = max(loads, key=lambda number: (shared[number], -loads[number], -number))
        if shared[best] and loads[best] <= max(SLACK, RATIO * loads[least]):
            return best
        return least

    def _shared(self, number: int, prefixes: Sequence[int]) -> int:
        """Return how many pages of a text a replica is believed to hold."""
        held: Mapping[int, None] = self._held.get(number, {})
        return next((count for count, prefix in enumerate(prefixes) if prefix not in held), len(prefixes))

    def sent(self, number: int, prefixes: Sequence[int]) -> None:
        """Note that a replica holds a text from now on."""
        held = self._held.setdefault(number, OrderedDict())
        for prefix in reversed(prefixes):  # so that the deepest page is the first to be forgotten
            held[prefix] = None
            held.move_to_end(prefix)
        while len(held) > self.pages:
            held.popitem(last=False)

    def forget(self, number: int) -> None:
        """Note that a replica holds nothing any more."""
        self._held.pop(number, None)
