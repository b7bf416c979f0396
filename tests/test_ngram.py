"""The NGRAM drafter against SGLang's golden vectors, counted substrings, and a slow trie keyed by whole paths."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from exactness import check

from minispec.drafter import Draft
from minispec.ngram import CROWDED, INDEX_PER_STEP, KEPT_AFTER_RELEASE, NgramDrafter, NgramOptions, Trie
from minispec.request import Hints
from minispec.tree import DraftTree

Path = tuple[int, ...]
SMALL = NgramOptions(max_match=3, branch_length=5, max_breadth=4, nodes=8)


# ---- what trees and tries hold, as plain paths


def paths_of(draft: Draft) -> set[Path]:
    """Root-to-node token paths without the root; checks the tree's invariants on the way."""
    check(DraftTree(torch.tensor([draft.tokens]), torch.tensor([draft.parents])))
    assert -1 not in draft.tokens, "a draft holds no padding"
    paths: list[Path] = [()]
    for token, parent in zip(draft.tokens[1:], draft.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def contents(trie: Trie) -> dict[Path, int]:
    """Every path with its count; checks all links and the hash on the way."""
    found: dict[Path, int] = {}
    stack: list[tuple[int, Path]] = [(0, ())]
    while stack:
        node, path = stack.pop()
        before, child = 0, trie._first[node]
        while child:
            token = trie._token[child]
            assert trie._parent[child] == node and trie._previous[child] == before
            assert trie.find(node, token) == child, "the hash and the sibling list disagree"
            assert (*path, token) not in found, "two siblings hold the same token"
            found[*path, token] = trie._count[child]
            stack.append((child, (*path, token)))
            before, child = child, trie._next[child]
    assert len(found) == len(trie) - 1, "a node is unreachable"
    assert len(trie._bucket) == len(trie)
    return found


class SlowText:
    """A text and the paths it holds open, by start."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.held: dict[int, Path] = {}  # start -> path


class SlowTrie:
    """The rules said again with whole paths as keys: a count and a time for each."""

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self.count: dict[Path, int] = {}
        self.time: dict[Path, int] = {}
        self.now = 0

    def children(self, path: Path) -> list[Path]:
        return [p for p in self.count if len(p) == len(path) + 1 and p[:-1] == path]

    def extend(self, text: SlowText, token: int, count: bool = True) -> None:
        text.tokens.append(token)
        size, text.held = len(text.tokens), {}
        for start in range(size - 1, max(-1, size - 1 - self.options.branch_length), -1):
            path = tuple(text.tokens[start:])
            self.count[path] = self.count.get(path, 0) + (path not in self.count or count)
            self.now += 1
            self.time[path] = self.now
            text.held[start] = path

    def draft(self, text: SlowText) -> list[Path]:
        o, drafted, size = self.options, [], len(text.tokens)
        for length in range(min(size, o.max_match), o.min_match - 1, -1):
            if size - length in text.held:
                grow = self.by_recency if o.match_type == "BFS" else self.by_probability
                grow(drafted, text.held[size - length], length)
        return drafted

    def by_recency(self, drafted: list[Path], match: Path, length: int) -> None:
        o = self.options
        scale = (o.max_breadth - o.min_breadth) / (o.max_match - o.min_match + 1)
        level = [((), match)]
        breadth = (o.max_match - length) * scale + o.min_breadth
        while level:
            below = []
            for drawn, path in level:
                newest = sorted(self.children(path), key=lambda p: -self.time[p])
                for child in newest[: max(1, int(breadth))]:
                    if len(drafted) == o.nodes - 1:
                        return
                    if (*drawn, child[-1]) not in drafted:
                        drafted.append((*drawn, child[-1]))
                    below.append(((*drawn, child[-1]), child))
            level, breadth = below, breadth - scale

    def by_probability(self, drafted: list[Path], match: Path, length: int) -> None:
        candidates: list[tuple[float, Path, Path]] = []

        def offer(drawn: Path, path: Path, probability: float) -> None:
            best = sorted(self.children(path), key=lambda p: (-self.count[p], p[-1]))[: self.options.max_breadth]
            total = sum(self.count[p] for p in best)
            candidates.extend((probability * self.count[p] / total, (*drawn, p[-1]), p) for p in best)

        def order(candidate: tuple[float, Path, Path]) -> tuple[float, int, int, int]:
            probability, drawn, _ = candidate
            return -probability, len(drawn), drawn[-1], ([()] + drafted).index(drawn[:-1])

        offer((), match, 1.0)
        while candidates and len(drafted) < self.options.nodes - 1:
            probability, drawn, path = best = min(candidates, key=order)
            candidates.remove(best)
            if drawn not in drafted:
                drafted.append(drawn)
            offer(drawn, path, probability)


def substrings(texts: Sequence[Sequence[int]], longest: int) -> Counter[Path]:
    """How often every stretch of up to `longest` tokens occurs."""
    ends = lambda text, i: range(i + 1, min(len(text), i + longest) + 1)  # noqa: E731
    return Counter(tuple(text[i:j]) for text in texts for i in range(len(text)) for j in ends(text, i))


def drafter_with(options: NgramOptions, texts: Sequence[Sequence[int]]) -> NgramDrafter:
    """A drafter that has indexed these texts, each of a request that has ended."""
    drafter = NgramDrafter(options)
    for text in texts:
        drafter.observe(1, text)
        drafter.tick()
        drafter.release(1)
    return drafter


def drafted(drafter: NgramDrafter, query: Sequence[int]) -> set[Path]:
    """What the trie as it stands drafts after `query`, which is not inserted."""
    return paths_of(drafter.trie.draft(drafter.trie.locate(query[-drafter.options.max_match :]), query[-1]))


def chain(*tokens: int) -> set[Path]:
    return {tokens[: i + 1] for i in range(len(tokens))}


# ---- golden vectors

CORPUS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 44, 55, 66, 77, 88, 99, 100]]


@pytest.mark.parametrize(
    ("match_type", "query", "expected"),
    [
        ("BFS", [1, 2, 3], chain(4, 5, 6) | chain(44, 55, 66, 77)),
        ("PROB", [1, 2, 3], chain(4, 5, 6, 7) | chain(44, 55, 66)),
        ("BFS", [3, 44], chain(55, 66, 77, 88, 99, 100)),  # 44 is the root; here the seed system pads
        ("PROB", [3, 44], chain(55, 66, 77, 88, 99, 100)),
        ("BFS", [3, 6, 999], set()),
        ("PROB", [3, 6, 999], set()),
    ],
)
def test_golden_vectors_of_the_seed_system(match_type: str, query: list[int], expected: set[Path]) -> None:
    drafter = drafter_with(NgramOptions(max_breadth=8, nodes=8, match_type=match_type), CORPUS)
    assert drafted(drafter, query) == expected


# ---- insertion


def test_counts_are_the_occurrences_of_every_stretch_however_texts_are_cut_and_interleaved() -> None:
    rng = random.Random(1)
    for _ in range(20):
        drafter = NgramDrafter(replace(SMALL, branch_length=rng.choice([4, 5, 7])))
        texts = [[rng.randrange(4) for _ in range(rng.randrange(1, 60))] for _ in range(6)]
        done = [0] * len(texts)
        while any(at < len(text) for at, text in zip(done, texts, strict=True)):
            slot = rng.randrange(len(texts))
            size = rng.choice([0, 1, 1, 2, 3, 20])
            drafter.observe(slot, texts[slot][done[slot] : done[slot] + size])
            done[slot] += size
            started = [s for s in range(len(texts)) if done[s]]
            drafter.draft(rng.sample(started, len(started) // 2))
        for _ in range(3):
            drafter.tick()
        expected = substrings(texts, drafter.options.branch_length)
        assert len(expected) > 50
        assert contents(drafter.trie) == expected
        for slot in range(len(texts) + 1):  # the last one never had a text
            drafter.release(slot)


def test_drafts_equal_the_slow_tries_for_interleaved_requests() -> None:
    rng = random.Random(2)
    compared = nonempty = 0
    for round_ in range(40):
        low, high = rng.choice([(1, 1), (1, 3), (2, 3), (3, 3)])
        options = NgramOptions(low, high, rng.choice([1, 2]), rng.choice([2, 4, 6]), ("BFS", "PROB")[round_ % 2],
                               rng.choice([4, 6]), nodes=rng.choice([2, 5, 8, 16]))  # fmt: skip
        drafter, slow = NgramDrafter(options), SlowTrie(options)
        texts: dict[int, SlowText] = {}
        for _ in range(60):
            slot = rng.randrange(3)
            if slot in texts and rng.random() < 0.1:
                drafter.release(slot)
                texts.pop(slot)
                continue
            tokens = [rng.randrange(5) for _ in range(rng.randrange(1, 4))]
            text = texts.setdefault(slot, SlowText())
            drafter.observe(slot, tokens)
            for token in tokens:
                slow.extend(text, token)
            (draft,) = drafter.draft([slot])
            expected = slow.draft(text)
            assert draft.tokens[0] == text.tokens[-1] and len(draft.tokens) <= options.nodes
            assert paths_of(draft) == set(expected)
            assert max(map(len, expected), default=0) <= drafter.depth
            assert drafter.nodes == options.nodes and drafter.depth == min(
                options.nodes - 1, options.branch_length - low
            )
            compared += 1
            nonempty += bool(expected)
    assert compared > 1500 and nonempty > compared // 2


def test_match_length_is_the_longest_suffix_that_drafted() -> None:
    drafter = drafter_with(SMALL, [[1, 2, 3, 4]])
    for query, expected in (([1, 2, 3], 3), ([9, 2, 3], 2), ([9, 9, 3], 1), ([1, 2, 9], 0), ([3, 4], 0)):
        assert drafter.trie.draft(drafter.trie.locate(query), query[-1]).match_length == expected


def test_a_retracted_request_that_replays_its_text_is_counted_once() -> None:
    rng = random.Random(3)
    for cut in (1, 100, 300, 700):  # 300 and 700: parts of the prompt still wait when the request is retracted
        prompt, output = [rng.randrange(6) for _ in range(cut)], [rng.randrange(6) for _ in range(5)]
        drafter = NgramDrafter(SMALL)
        drafter.observe(1, prompt)
        drafter.draft([1])
        drafter.observe(1, output)
        drafter.release(1)
        drafter.observe(2, prompt, again=True)
        drafter.observe(2, output, again=True)
        drafter.draft([2])
        drafter.observe(2, [1, 2])
        for _ in range(8):
            drafter.tick()
        assert contents(drafter.trie) == substrings([[*prompt, *output, 1, 2]], SMALL.branch_length)


def test_text_committed_again_after_its_nodes_are_gone_is_back() -> None:
    drafter = NgramDrafter(SMALL)
    drafter.observe(1, [1, 2, 3])
    drafter.tick()
    drafter.clear()
    drafter.release(1)
    drafter.observe(1, [1, 2, 3], again=True)
    drafter.tick()
    assert contents(drafter.trie) == substrings([[1, 2, 3]], 5)
    drafter.observe(1, [4])
    with pytest.raises(ValueError, match="slot 1.*again"):
        drafter.observe(1, [5], again=True)


# ---- bounded indexing


def indexed(drafter: NgramDrafter) -> int:
    """Tokens indexed so far: each started one path."""
    return sum(count for path, count in contents(drafter.trie).items() if len(path) == 1)


def test_a_step_indexes_at_most_256_prompt_tokens_of_all_requests_together() -> None:
    assert INDEX_PER_STEP == 256
    rng = random.Random(4)
    drafter = NgramDrafter(SMALL)
    for slot in (1, 2, 3):
        drafter.observe(slot, [rng.randrange(9) for _ in range(300)])
    assert indexed(drafter) == 0
    for expected in (256, 512, 768, 900, 900):
        drafter.draft([1, 2, 3])
        assert indexed(drafter) == expected
    drafter.observe(2, [1, 2, 3])  # output: at once
    assert indexed(drafter) == 903


def test_the_newest_tokens_are_looked_up_while_the_prompt_still_waits() -> None:
    drafter = drafter_with(SMALL, [[1, 2, 3, 4]])
    drafter.observe(1, [9] * 1000 + [1, 2])
    (draft,) = drafter.draft([1])
    assert indexed(drafter) < 1000
    assert draft.match_length == 2 and paths_of(draft) == chain(3, 4)
    drafter.observe(1, [3])
    (draft,) = drafter.draft([1])
    assert draft.tokens[0] == 3 and draft.match_length == 3 and paths_of(draft) == chain(4)


def test_what_ended_requests_left_waiting_is_indexed_up_to_a_bound() -> None:
    drafter = NgramDrafter(SMALL)
    drafter.observe(1, list(range(600)))
    drafter.release(1)
    for _ in range(3):
        drafter.tick()
    assert contents(drafter.trie) == substrings([range(600)], 5)
    for _ in range(5):
        drafter.observe(1, [7] * (KEPT_AFTER_RELEASE // 2))
        drafter.release(1)
    assert sum(len(text.waiting) for text in drafter._line) == KEPT_AFTER_RELEASE


def test_what_is_expected_of_an_output_drafts_for_its_request_alone() -> None:
    drafter, expected = NgramDrafter(SMALL), [5, 6, 7, 8]
    drafter.hint(1, Hints(expected))
    for slot in (1, 2):
        drafter.observe(slot, [5, 6])
    assert [paths_of(draft) for draft in drafter.draft([1, 2])] == [chain(7, 8), set()]
    assert sum(contents(drafter.trie).values()) == 2 * 3, "the shared trie has the two prompts"
    drafter.observe(3, [6, 7, 9, 6, 7])  # a longer match of the shared trie wins, an equal one does not
    drafter.draft([1, 3])
    drafter.observe(1, [7])
    assert paths_of(drafter.draft([1])[0]) == chain(8)
    for slot in (2, 3):
        drafter.observe(slot, [1, 5, 6, 9])
    drafter.observe(1, [1, 5, 6])
    paths = paths_of(drafter.draft([1])[0])
    assert (9,) in paths and (7, 8) not in paths, "three tokens matched are more than two"
    drafter.release(1)
    drafter.observe(1, [4, 5, 6])
    assert (8,) not in {path[-1:] for path in paths_of(drafter.draft([1])[0])}, "gone with its request"


def test_clear_empties_the_trie_and_requests_go_on() -> None:
    drafter = drafter_with(SMALL, CORPUS)
    drafter.observe(1, [1, 2, 3])
    assert len(drafter.draft([1])[0].tokens) > 1
    drafter.clear()
    assert contents(drafter.trie) == {}
    assert drafter.draft([1]) == [Draft([3], [-1], 0)]
    drafter.observe(2, [9] * 20)
    drafter.release(2)
    drafter.clear()
    drafter.observe(1, [5, 6, 5])
    assert paths_of(drafter.draft([1])[0]) == chain(6, 5)
    assert contents(drafter.trie) == substrings([[5, 6, 5]], 5)


# ---- eviction


@pytest.mark.parametrize("capacity", [11, 24, 40, 400])
def test_a_full_trie_becomes_the_older_one_which_is_read_too(capacity: int) -> None:
    rng, drafter = random.Random(6), NgramDrafter(replace(SMALL, capacity=capacity))
    turns = older = 0
    for _ in range(200):
        slot, tokens = rng.randrange(1, 4), [rng.randrange(6) for _ in range(rng.randrange(1, 9))]
        before = drafter.trie
        drafter.observe(slot, tokens)
        (draft,) = drafter.draft([slot])
        assert len(drafter.trie) + len(drafter.older) <= capacity
        turned = drafter.trie is not before
        turns += turned
        assert not turned or len(tokens) > 1 or drafter.older is before
        newest = drafter._texts[slot].newest[-SMALL.max_match :]
        trees = [trie.draft(trie.locate(newest), newest[-1]) for trie in (drafter.trie, drafter.older)]
        assert draft.match_length == max(tree.match_length for tree in trees), "the longer match of both"
        older += draft == trees[1] != trees[0]
        for trie in (drafter.trie, drafter.older):
            assert all(count > 0 for count in contents(trie).values())
        if rng.random() < 0.1:
            drafter.release(slot)
    assert turns > 3 and (older > 10) == (capacity > 11), "the smallest has no room for two"


def test_the_likeliest_of_many_children_are_among_the_newest() -> None:
    rng, newest = random.Random(7), dict[int, None]()
    trie = Trie(replace(SMALL, match_type="PROB", max_match=1, branch_length=2, max_breadth=5))
    for _ in range(1000):
        token = 1 + min(rng.randrange(300), rng.randrange(300))
        newest.pop(token, None)
        newest[token] = None
        trie.extend(trie.extend([], 0), token)
    counts = {path[1]: count for path, count in contents(trie).items() if len(path) == 2 and path[0] == 0}
    assert len(counts) > 2 * CROWDED
    best = sorted(list(newest)[-CROWDED:], key=lambda token: (-counts[token], token))[:5]
    assert [trie._token[child] for child in trie.likeliest(trie.find(0, 0))] == best


# ---- flags


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capacity": 18}, r"--speculative-ngram-capacity .*\[19, .*branch-length is 18.*got 18"),
        ({"capacity": 2**31}, r"--speculative-ngram-capacity .*2147483647\].*got 2147483648"),
    ],
)
def test_a_capacity_that_holds_no_path_or_is_too_large_is_refused(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramOptions(**given)


# ---- memory


def test_an_idle_trie_is_small_and_a_node_takes_under_100_bytes() -> None:
    tracemalloc.start()
    try:
        trie = Trie(NgramOptions())
        assert tracemalloc.get_traced_memory()[0] < 10_000
        rng, path = random.Random(8), []
        while len(trie) < 50_000:
            path = trie.extend(path, rng.randrange(50_000))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 30 < held / len(trie) <= 100
