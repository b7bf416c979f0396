"""Seats: the pages that requests hold while they have a slot. Some belong to the request, others to the prefix cache.

A request's seat begins with the cached pages of its known tokens. Fresh pages follow, for its other known tokens and
for one tree. When the prompt is complete, and again when the request leaves, the seat's full pages enter the prefix
cache, where other requests can read them.

Invariant owned here: each page but page 0 is free, in the cache, or owned by one seat. If a request leaves during a
step, the scheduler keeps its pages (`Flight.left`) until that step's results are on the host.

Read next: `radix.py` for the cache, `scheduler.py` for when requests get pages and give them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minispec.kv import PagedKV
from minispec.radix import Node, PrefixCache
from minispec.request import Request


class Seat:
    """A request's pages in the order of its text; the first ones belong to a path in the prefix cache."""

    def __init__(self, ids: list[int], path: list[Node]) -> None:
        self.ids = ids  # the tokens known at admission; those that are not cached are prefilled
        self.path = path  # nodes of the prefix cache that the seat holds; pages[i] is the page of path[i]
        self.pages = [node.page for node in path]

    def owned(self) -> list[int]:
        """Return the pages that are the request's own, not the cache's."""
        return self.pages[len(self.path) :]


class Seats(dict[Request, Seat]):
    """The seats of all requests that have a slot."""

    def __init__(self, kv: PagedKV, cache: PrefixCache, catch_up: Callable[[Sequence[int]], None]) -> None:
        """`catch_up(slots)` lets the drafter compute the rows that it lacks in these slots, before pages are shared."""
        super().__init__()
        self.kv, self.cache, self.catch_up = kv, cache, catch_up

    @property
    def available(self) -> int:
        """How many pages are free or can be evicted."""
        return len(self.kv.free) + len(self.cache.idle)

    def obtain(self, count: int) -> bool:
        """Ensure that `count` pages are free, if need be by evicting cached ones; False if there are too few."""
        if count > self.available:
            return False
        short = count - len(self.kv.free)
        if short > 0:
            self.kv.give_back(self.cache.evict(short))
        return True

    def take(self, request: Request, ids: list[int], path: list[Node], fresh: int) -> None:
        """Give a request with a slot its seat: a held path of the cache and `fresh` free pages (see `obtain`)."""
        seat = self[request] = Seat(ids, path)
        seat.pages += self.kv.allocate(fresh)
        self.kv.map(request.slot, 0, seat.pages)

    def grow(self, request: Request, rows: int) -> bool:
        """Extend a request's pages to hold `rows` rows; False if the pool has too few pages."""
        pages = self[request].pages
        missing = self.kv.pages_for(rows) - len(pages)
        if missing <= 0:
            return True
        if not self.obtain(missing):
            return False
        added = self.kv.allocate(missing)
        self.kv.map(request.slot, len(pages), added)
        pages += added
        return True

    def share(self, request: Request, known: Sequence[int]) -> None:
        """Enter the full pages of `known` into the prefix cache; `known` are the tokens whose rows are written.

        If another request has entered a page with the same tokens meanwhile, the slot reads that page from now on, and
        the request's own copy goes back to the free list.
        """
        seat, slot = self[request], request.slot
        first, full = len(seat.path), len(known) // self.kv.page_size
        if self.cache.enabled and full > first:  # a page in the cache must have the drafter's rows
            self.catch_up([slot])
        self.cache.insert(known, seat.pages[:full], seat.path, request.salt)
        cached = [node.page for node in seat.path[first:]]
        copies = [own for own, page in zip(seat.pages[first:], cached, strict=False) if own != page]
        if copies:
            seat.pages[first : len(seat.path)] = cached
            self.kv.give_back(copies)
            self.kv.unmap(slot)
            self.kv.map(slot, 0, seat.pages)

    def leave(self, request: Request, known: Sequence[int], sound: bool) -> list[int]:
        """Take a request's seat away, and enter the full pages of `known` into the cache.

        Returns the pages that the request still owns, which the caller frees. sound: False if they may hold NaN; then
        they are wiped, and not shared.
        """
        if sound:
            self.share(request, known)
        else:
            self.kv.wipe(self[request].owned())
        seat = self.pop(request)
        self.cache.release(seat.path)
        self.kv.unmap(request.slot)
        return seat.owned()

    @property
    def owned(self) -> int:
        """How many pages all seats own."""
        return sum(len(seat.owned()) for seat in self.values())

    @property
    def usage(self) -> float:
        """The share of pages that requests hold; pages that are only cached count as free."""
        return 1 - self.available / max(self.kv.pages - 1, 1)

    def check(self, left: int) -> None:
        """Assert that every page is in one place and that the cache is consistent.

        left: how many pages of requests that left are kept until the step in flight has landed.
        """
        self.cache.check()
        total, free, owned = self.kv.pages - 1, len(self.kv.free), self.owned + left
        assert free + self.cache.count + owned == total, f"{free} free, {self.cache.count} cached, {owned} of {total}"
        assert len(set(self.kv.free)) == free, "a page is free twice"
        for seat in self.values():
            assert seat.pages[: len(seat.path)] == [node.page for node in seat.path], "a copy of a cached page is kept"
