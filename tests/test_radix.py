"""The prefix cache against a slow one: a dict from token prefixes to pages, scanned and sorted at every call."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from minispec.radix import Node, PrefixCache

PAGE = 2
Key = tuple[int, ...]


@dataclass
class Slow:
    """The same promises by the book: whole prefixes as keys, holders by request, a clock for recency."""

    lookahead: int
    pages: dict[Key, int] = field(default_factory=dict)  # prefix with its lookahead -> page
    holders: dict[Key, int] = field(default_factory=dict)
    idle_since: dict[Key, tuple[int, int]] = field(default_factory=dict)
    clock: int = 0

    def prefixes(self, ids: list[int]) -> list[Key]:
        """Return the keys of the full pages of `ids`: everything up to the page's end and its lookahead."""
        return [tuple(ids[: end + self.lookahead]) for end in range(PAGE, len(ids) - self.lookahead + 1, PAGE)]

    def match(self, ids: list[int], limit: int) -> list[Key]:
        """Return the keys of a cached run of pages within ids[:limit]."""
        path: list[Key] = []
        for index, key in enumerate(self.prefixes(ids)):
            if key not in self.pages or (index + 1) * PAGE > limit:
                break
            path.append(key)
        return path

    def hold(self, path: list[Key]) -> None:
        """Count a holder."""
        for key in path:
            self.holders[key] = self.holders.get(key, 0) + 1
            self.idle_since.pop(key, None)

    def release(self, path: list[Key]) -> None:
        """Discount a holder; of pages that become idle together the deepest is the oldest."""
        self.clock += 1
        for key in path:
            self.holders[key] -= 1
            if not self.holders[key]:
                self.idle_since[key] = (self.clock, -len(key))

    def insert(self, ids: list[int], pages: list[int], path: list[Key]) -> None:
        """Take the pages that are not known, hold them all."""
        for index, key in enumerate(self.prefixes(ids)[: len(pages)]):
            if index >= len(path):
                self.pages.setdefault(key, pages[index])
                self.hold([key])
                path.append(key)

    def evict(self, wanted: int) -> list[int]:
        """Drop the pages that were idle longest."""
        oldest = sorted(self.idle_since, key=self.idle_since.__getitem__)[:wanted]
        for key in oldest:
            del self.idle_since[key]
        return [self.pages.pop(key) for key in oldest]


def held_pages(cache: PrefixCache) -> set[int]:
    """Return the pages that somebody holds, by walking the tree."""
    nodes, held = list(cache.root.children.values()), set()
    for node in nodes:
        nodes.extend(node.children.values())
        if node.holders:
            held.add(node.page)
    return held


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_equal_the_slow_cache(seed: int, lookahead: int) -> None:
    rng = random.Random(seed)
    cache, slow = PrefixCache(PAGE, lookahead), Slow(lookahead)
    requests: list[tuple[list[Node], list[Key]]] = []
    next_page, matched, evicted = 1, 0, 0
    for _ in range(600):
        action = rng.random()
        if action < 0.5 and len(requests) < 6:  # a request comes: match, hold, compute, insert
            ids = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            limit = rng.choice((len(ids) - 1, len(ids)))
            path, slow_path = cache.match(ids, limit), slow.match(ids, limit)
            assert [node.page for node in path] == [slow.pages[key] for key in slow_path]
            assert len(path) * PAGE <= limit
            matched += len(path)
            cache.hold(path)
            slow.hold(slow_path)
            total = rng.randint(len(path), len(ids) // PAGE)
            pages = [node.page for node in path] + list(range(next_page, next_page + total - len(path)))
            next_page += total - len(path)
            cache.insert(ids, pages, path)
            slow.insert(ids, pages, slow_path)
            assert [node.page for node in path] == [slow.pages[key] for key in slow_path]
            requests.append((path, slow_path))
        elif action < 0.8 and requests:
            path, slow_path = requests.pop(rng.randrange(len(requests)))
            cache.release(path)
            slow.release(slow_path)
        else:
            wanted, held = rng.randint(0, 4), held_pages(cache)
            gone = cache.evict(wanted)
            assert gone == slow.evict(wanted), "not the least recently used first"
            assert not held & set(gone), "a held page was evicted"
            evicted += len(gone)
        cache.check()
        assert cache.count == len(slow.pages) and len(cache.idle) == len(slow.idle_since)
    assert matched > 50 and evicted > 50
    for path, _ in requests:
        cache.release(path)
    assert len(cache.evict(10**6)) == len(slow.pages) and cache.count == 0 and not cache.root.children


def fill(cache: PrefixCache, ids: list[int], first_page: int) -> list[Node]:
    """Insert all full pages of `ids` and return the held path."""
    path: list[Node] = []
    cache.insert(ids, list(range(first_page, first_page + len(ids) // PAGE)), path)
    return path


def test_disabled_cache_keeps_and_finds_nothing() -> None:
    cache = PrefixCache(PAGE, enabled=False)
    assert fill(cache, [1, 2, 3, 4], 7) == [] and cache.match([1, 2, 3, 4], 4) == []
    assert cache.count == 0 and cache.evict(3) == []
    cache.check()


def test_path_released_twice_is_an_error() -> None:
    cache = PrefixCache(PAGE)
    path = fill(cache, [1, 2], 7)
    cache.release(path)
    with pytest.raises(AssertionError, match="twice"):
        cache.release(path)


def broken_count(cache: PrefixCache, path: list[Node]) -> None:
    """A page too many is counted."""
    cache.count += 1


def broken_queue(cache: PrefixCache, path: list[Node]) -> None:
    """A held node stands in the queue."""
    cache.idle[path[0]] = None


def broken_page(cache: PrefixCache, path: list[Node]) -> None:
    """Two nodes share a page."""
    path[1].page = path[0].page


def broken_holders(cache: PrefixCache, path: list[Node]) -> None:
    """A child is held more often than its parent."""
    path[1].holders += 1


@pytest.mark.parametrize("damage", [broken_count, broken_queue, broken_page, broken_holders])
def test_integrity_check_finds_damage(damage) -> None:
    cache = PrefixCache(PAGE)
    path = fill(cache, [1, 2, 3, 4], 7)
    cache.check()
    damage(cache, path)
    with pytest.raises(AssertionError):
        cache.check()
