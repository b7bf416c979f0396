"""External corpora: texts of the operator's, in which the newest tokens of every request are looked up.

A corpus is its tokens and one permutation of its places. A place p stands for the context that ends before token p, and
the places are in the order of their contexts, compared from the newest token backwards (a suffix array of the text read
backwards; Manber and Myers, 1993). So the places whose contexts end like a request's text lie side by side, and a
search by halves finds the longest match in some thirty comparisons, however large the corpus is. The order costs four
bytes a token beside the text. A suffix automaton answers without a search, but has up to two nodes a token with a
dictionary each, and Python would take minutes to build it.

Documents end in END, which matches no token. An index is built by a process of its own (`load/corpora.py`), and the
arrays are read from its files. Corpora come and go while requests run: a lookup reads the table of them once.

Read next: `ngram.py`, which asks for drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

END = -1  # ends a document
DEPTH = 32  # by how many tokens of their contexts places are ordered; twelve are often the same in several replies
NEAR = 2048  # so many tokens before and behind the last match are looked through first
FARTHER = 3  # by so many tokens a match elsewhere must be longer than one near the last match
CROWDED = 32  # of the places near the last match so many are compared
SHORTEST = 5  # tokens of the shortest match far from the last one: fewer tokens match somewhere in any large text

Tokens = NDArray[np.int32]


def sort_places(tokens: Tokens) -> Tokens:
    """Return the places 1..n of a text, ordered by the DEPTH tokens before each, the newest first (prefix doubling)."""
    rank = tokens.astype(np.int32) + 1
    order = np.argsort(rank).astype(np.int32)
    length = 1
    while length < DEPTH:
        key = rank.astype(np.int64)
        key <<= 32
        key[length:] += rank[:-length]
        order = np.argsort(key).astype(np.int32)
        key = key[order]
        fresh = np.empty(len(key), bool)
        fresh[0] = False
        np.not_equal(key[1:], key[:-1], out=fresh[1:])
        del key
        rank[order] = np.cumsum(fresh, dtype=np.int32) + 1
        length *= 2
    return order + np.int32(1)


class Corpus:
    """One text with its index. Nothing here changes, so any thread may look up."""

    def __init__(self, tokens: Tokens, places: Tokens) -> None:
        """tokens: [n] int32, END after each document. places: [n] int32, as `sort_places` returns them."""
        self.tokens, self.places = tokens, places

    def find(self, after: Sequence[int], longest: int, near: int | None) -> tuple[int, int]:
        """Return the length of the best match of a text's last tokens and its place; (0, 0) if there is none.

        near: the place of the last match for this text, if it was in this corpus. A text that quotes a document goes on
        quoting it, and in the document two tokens tell the place that in the whole corpus many contexts end with. So a
        match close to that place wins unless another one is longer by FARTHER tokens.
        """
        back = list(after[-longest:])[::-1]
        best = self._longest(back)
        if near is not None and len(back) > 1:
            begin = max(near - NEAR, 0)
            part = self.tokens[begin : near + NEAR]
            here = np.flatnonzero((part[1:] == back[0]) & (part[:-1] == back[1])) + begin + 2
            close = [(self._compare(back, int(at))[0], -abs(int(at) - near), int(at)) for at in here[:CROWDED]]
            if close and max(close)[0] + FARTHER > best[0]:
                return max(close)[0], max(close)[2]
        return best if best[0] >= SHORTEST else (0, 0)

    def after(self, at: int, count: int) -> list[int]:
        """Return the tokens that follow a place, at most `count`, and none of another document."""
        following: list[int] = self.tokens[at : at + count].tolist()
        return following[: following.index(END)] if END in following else following

    def _longest(self, back: list[int]) -> tuple[int, int]:
        """Return the length of the longest match and its place; back: the newest tokens, the newest first."""
        low, high = 0, len(self.places)
        best, where = 0, 0
        while low < high:
            middle = (low + high) // 2
            at = int(self.places[middle])
            match, above = self._compare(back, at)
            if match > best:
                best, where = match, at
            low, high = (middle + 1, high) if above else (low, middle)
        return best, where

    def _compare(self, back: list[int], at: int) -> tuple[int, bool]:
        """Return how many tokens match before place `at`, and whether `back` sorts after that context."""
        here = self.tokens[max(at - len(back), 0) : at][::-1].tolist()
        for match, (wanted, found) in enumerate(zip(back, here, strict=False)):
            if wanted != found:
                return match, match >= DEPTH or wanted > found
        return min(len(back), len(here)), len(back) > len(here)


class Corpora:
    """The corpora by id, and what each request drafts from."""

    def __init__(self) -> None:
        self._all: Mapping[str, Corpus] = {}  # replaced as a whole, so that a lookup needs no lock
        self._limits: dict[int, str | None] = {}  # slot -> the one corpus that its request drafts from; None: none
        self._last: dict[int, tuple[str, int]] = {}  # slot -> the corpus and place of its last match

    def put(self, name: str, corpus: Corpus | None) -> None:
        """Add or replace a corpus; None removes it, for requests that use it too."""
        others = {key: one for key, one in self._all.items() if key != name}
        self._all = others if corpus is None else {**others, name: corpus}

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def __len__(self) -> int:
        return len(self._all)

    def limit(self, slot: int, corpus: str | None) -> None:
        """Let the request of a slot draft from this corpus alone, or from none; without a limit it drafts from all."""
        self._limits[slot] = corpus

    def follow(self, slot: int, text: Sequence[int], count: int, longest: int) -> tuple[list[int], int]:
        """Return what followed the longest match of a text's last tokens, at most `count` tokens, and its length.

        slot: of the request whose text it is. Empty and 0 if no corpus of the request has a match. The corpus of the
        last match keeps the text unless a match of another one is longer by FARTHER tokens, as `Corpus.find` says.
        """
        all_ = self._all
        if not all_:
            return [], 0
        last, best = self._last.get(slot, ("", 0)), (0, False, 0, 0, "")
        for key in all_ if slot not in self._limits else all_.keys() & {self._limits[slot]}:
            stays = key == last[0]
            match, at = all_[key].find(text, longest, last[1] if stays else None)
            best = max(best, (match + (FARTHER - 1) * stays if match else 0, stays, match, at, key))
        _, _, match, at, key = best
        if not match:
            return [], 0
        self._last[slot] = key, at
        return all_[key].after(at, count), match

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._limits.pop(slot, None)
        self._last.pop(slot, None)


def load(folder: Any) -> Corpus:
    """Return the corpus in a folder, its arrays mapped from their files."""
    return Corpus(*(np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in ("tokens", "places")))
