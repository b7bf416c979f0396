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
    """Every path with its count; checks all links, the hash, the pins' meaning and the ring of leaves on the way."""
    found: dict[Path, int] = {}
    open_leaves, stack = set(), [(0, ())]
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
        if node and not trie._first[node] and not trie._pins[node]:
            open_leaves.add(node)
    assert len(found) == len(trie) - 1, "a node is unreachable"
    ring, at = [], trie._newer[0]
    while at:
        assert trie._newer[trie._older[at]] == at
        ring.append(at)
        at = trie._newer[at]
    assert len(ring) == len(set(ring)) and set(ring) == open_leaves
    assert len(trie._bucket) == len(trie) <= trie.options.capacity
    return found


class SlowText:
    """A text and the paths it holds open, by start."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.held: dict[int, Path] = {}  # start -> path


class SlowTrie:
    """The rules said again with whole paths as keys: a count, a time and pins for each."""

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self.count: dict[Path, int] = {}
        self.time: dict[Path, int] = {}
        self.pins: Counter[Path] = Counter()
        self.leaves: list[Path] = []  # evictable, oldest first
        self.now = 0

    def children(self, path: Path) -> list[Path]:
        return [p for p in self.count if len(p) == len(path) + 1 and p[:-1] == path]

    def extend(self, text: SlowText, token: int, count: bool = True) -> None:
        text.tokens.append(token)
        size, held = len(text.tokens), text.held
        text.held = {}
        for start in range(size - 1, max(-1, size - 1 - self.options.branch_length), -1):
            path = tuple(text.tokens[start:])
            if start != size - 1 and start not in held:
                continue  # this path ended for want of room
            fresh = path not in self.count
            if fresh and len(self.count) + 1 >= self.options.capacity and not self.evict():
                continue
            if path in self.leaves:
                self.leaves.remove(path)
            self.count[path] = self.count.get(path, 0) + (fresh or count)
            self.now += 1
            self.time[path] = self.now
            self.pins[path] += 1
            text.held[start] = path
        self.close(held)

    def close(self, held: dict[int, Path]) -> None:
        for start in sorted(held, reverse=True):
            path = held[start]
            self.pins[path] -= 1
            if not self.pins[path] and not self.children(path):
                self.leaves.append(path)

    def evict(self) -> bool:
        if not self.leaves:
            return False
        path = self.leaves.pop(0)
        del self.count[path], self.time[path]
        parent = path[:-1]
        if parent and not self.children(parent) and not self.pins[parent]:
            self.leaves.insert(0, parent)
        return True

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
        assert not any(drafter.trie._pins)


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
                slow.close(texts.pop(slot).held)
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
    assert not any(drafter.trie._pins)
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


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_a_full_trie_evicts_as_the_slow_one_and_no_open_path_dangles(match_type: str) -> None:
    rng = random.Random(6)
    evicted = starved = 0
    for capacity in (6, 7, 9, 12, 16, 25, 40, 80, 160):
        options = replace(SMALL, capacity=capacity, match_type=match_type)
        trie, slow = Trie(options), SlowTrie(options)
        slots: list[tuple[list[int], SlowText]] = [([], SlowText()) for _ in range(3)]
        for _ in range(400):
            at = rng.randrange(len(slots))
            path, text = slots[at]
            if rng.random() < 0.05:
                trie.close(path)
                slow.close(text.held)
                slots[at] = ([], SlowText())
            else:
                token, count = rng.randrange(6), rng.random() < 0.8
                before = set(slow.count)
                path = trie.extend(path, token, count)
                slow.extend(text, token, count)
                slots[at] = (path, text)
                evicted += len(before - set(slow.count))
                starved += 0 in path
                assert paths_of(trie.draft(path, token)) == set(slow.draft(text))
            assert contents(trie) == slow.count
            assert [bool(p) for p in slots[at][0]] == [
                len(slots[at][1].tokens) - w in slots[at][1].held for w in range(1, len(slots[at][0]) + 1)
            ]
    assert evicted > 1000 and starved > 100


def test_the_remembered_likeliest_children_are_the_true_ones() -> None:
    rng = random.Random(7)
    trie = Trie(replace(SMALL, match_type="PROB", max_match=1, branch_length=2, capacity=260, max_breadth=5))
    remembered = compared = 0
    for _ in range(6000):
        path = trie.extend([], 0)
        path = trie.extend(path, 1 + min(rng.randrange(300), rng.randrange(300)))
        trie.close(path)
        parent = trie.find(0, 0)
        if rng.random() < 0.3:
            remembered += parent in trie._likeliest
            best = [trie._token[child] for child in trie.likeliest(parent)]
            counts = {path[1]: count for path, count in contents(trie).items() if len(path) == 2 and path[0] == 0}
            assert best == sorted(counts, key=lambda token: (-counts[token], token))[:5]
            compared += len(counts) > CROWDED
    assert remembered > 500 and compared > 1000


# ---- flags


def test_branch_length_bounds_how_far_a_match_continues() -> None:
    for length in (4, 5, 9):
        options = replace(SMALL, branch_length=length, nodes=20)
        drafter = drafter_with(options, [range(10)])
        assert drafted(drafter, [0]) == chain(*range(1, length))
        assert drafter.depth == length - 1


def test_nodes_bound_the_draft_root_included() -> None:
    for nodes in (1, 2, 4):
        drafter = drafter_with(replace(SMALL, nodes=nodes), [range(10)])
        assert drafted(drafter, [0]) == chain(*range(1, nodes))
        assert (drafter.nodes, drafter.depth) == (nodes, nodes - 1)


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
    assert 40 < held / len(trie) <= 100
