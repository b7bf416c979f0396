"""The prefix cache: a radix tree from pages of tokens to page ids, so that a known prefix is not computed again.

Each node is one cached page. Its key is the page's P tokens and the next `lookahead` tokens (0 or 1). The key has the
next token for drafters whose row i depends on token i + 1, since a page that is found must hold valid rows of the
drafter too. Requests share pages only under the same salt, a string. Radix caching of prompts comes from SGLang (arXiv
2312.07104).

A node is either held by running requests or idle. Idle nodes are in one queue, in the order of their release. Paths are
released deepest page first, so a child always precedes its parent in the queue. Eviction takes nodes from the front.

Invariants owned here: only full pages enter; a page in the cache is never written again; held nodes are never evicted.
This file deals in page ids and does not know what a page holds.

Read next: `seats.py`, which holds paths, inserts pages and gives pages back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# A page's tokens and the lookahead tokens; the key of a text's first page begins with the salt, if there is one.
Key = tuple[int | str, ...]


class Node:
    """One cached page: its id, its key among the parent's children, and how many requests hold it."""

    __slots__ = ("children", "holders", "key", "page", "parent")

    def __init__(self, key: Key, page: int, parent: Node | None) -> None:
        self.key, self.page, self.parent = key, page, parent
        self.children: dict[Key, Node] = {}
        self.holders = 0


class PrefixCache:
    """Pages of prompts and outputs by their tokens, evicted least recently used first."""

    def __init__(self, page_size: int, lookahead: int = 0, enabled: bool = True) -> None:
        self.page_size, self.lookahead, self.enabled = page_size, lookahead, enabled
        self.root = Node((), 0, None)
        self.idle: dict[Node, None] = {}  # ordered: least recently used first
        self.count = 0  # pages in the cache, held or idle
        self.insertions = 0  # how many pages ever entered; while this number is the same, no prompt can match more

    def _key(self, ids: Sequence[int], page: int, salt: str) -> Key | None:
        """Return the key of page number `page` of `ids`; None if `ids` is too short for the page and its lookahead.

        Only the first page's key begins with the salt, since all other pages of a text are below its first page.
        """
        start, end = page * self.page_size, (page + 1) * self.page_size + self.lookahead
        if end > len(ids):
            return None
        return (salt, *ids[start:end]) if salt and page == 0 else tuple(ids[start:end])

    def match(self, ids: Sequence[int], limit: int, salt: str = "") -> list[Node]:
        """Return the longest cached path of pages within ids[:limit] under this salt, in the order of the text."""
        path: list[Node] = []
        node = self.root
        while self.enabled and (len(path) + 1) * self.page_size <= limit:
            key = self._key(ids, len(path), salt)
            child = node.children.get(key) if key else None
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def hold(self, path: Sequence[Node]) -> None:
        """Keep these nodes from eviction until they are released."""
        for node in path:
            node.holders += 1
            self.idle.pop(node, None)

    def release(self, path: Sequence[Node]) -> None:
        """Release a held path; nodes that nobody else holds become idle, as the most recently used ones."""
        for node in reversed(path):  # in this order a child precedes its parent in the queue
            node.holders -= 1
            assert node.holders >= 0, "a path was released twice"
            if node.holders == 0:
                self.idle[node] = None

    def insert(self, ids: Sequence[int], pages: Sequence[int], path: list[Node], salt: str = "") -> None:
        """Extend the held `path` in place by the further full pages of `ids`; pages[i] holds the i-th page's rows.

        These pages must hold the drafter's rows too. After the call pages[i] belongs to the cache, unless the cache had
        a page with the same tokens before. In that case `path` gets the cache's page, and pages[i] still belongs to the
        caller.
        """
        if not self.enabled:
            return
        node = path[-1] if path else self.root
        for index in range(len(path), len(pages)):
            key = self._key(ids, index, salt)
            if key is None:
                return
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, pages[index], node)
                self.count += 1
                self.insertions += 1
            self.hold([child])
            path.append(child)
            node = child

    def evict(self, wanted: int) -> list[int]:
        """Drop up to `wanted` idle pages, least recently used first, and return their ids."""
        pages: list[int] = []
        for node in list(itertools.islice(self.idle, wanted)):  # next(iter()) would rescan deleted entries each time
            assert not node.children, "an idle parent stood before its child"
            assert node.parent is not None, "the root is never idle"
            del self.idle[node], node.parent.children[node.key]
            pages.append(node.page)
        self.count -= len(pages)
        return pages

    def check(self) -> None:
        """Assert that counts, idle queue and tree agree. This walks the whole tree."""
        nodes = [self.root]
        for node in nodes:
            nodes.extend(node.children.values())
        cached = nodes[1:]
        assert len(cached) == self.count, f"{len(cached)} nodes, {self.count} counted"
        assert len({node.page for node in cached}) == len(cached), "a page is in the cache twice"
        assert {n for n in cached if n.holders == 0} == set(self.idle), "idle queue and holders disagree"
        above = [(n, n.parent) for n in cached if n.parent not in (None, self.root)]
        assert all(p is not None and p.holders >= n.holders for n, p in above), "a child is held alone"
