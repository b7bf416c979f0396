"""NGRAM: find where the last few tokens occurred before, in any prompt or output, and draft what followed them there.

One trie, shared by all requests, holds every stretch of up to `branch_length` tokens that was seen: each is a path of
nodes from the root of the trie. A suffix of a text is its last few tokens.

The one idea, in `Trie.extend`: the trie has a path for each suffix of up to `branch_length` tokens of a text. The text
keeps the node at the end of each such path. These nodes are called the text's open paths, one for each suffix length. A
new token moves each open path one child down. This inserts every new stretch exactly once, so the count of a node is
the number of times its path occurred. The nodes reached are also the matches of all suffix lengths, found without a
search from the root.

Python objects would cost too much memory, so a node is one index into a few integer arrays that grow with the nodes.
Linear hashing (Litwin, 1980) finds the child for a token. It splits one bucket per new node, so no step rehashes the
whole table. There are two generations of the trie. When the newer one has half of the capacity, it becomes the older
one, which is only read, and the one that was older goes: no node needs to know when it was last used. Drafting several
branches at once from a trie comes from Lookahead (Zhao et al., arXiv 2312.12728). The rules by which branches are
chosen are those of SGLang's NGRAM.

A token takes 60 microseconds to index. So lookups may be limited to a share of the time, beside a head and on a CPU.
Then a dictionary (`Echo`; Saxena, prompt-lookup-decoding, 2023) looks each request's own text up, within a microsecond
and without delay. It looks up texts that are not for the trie too: those of private requests, and predicted outputs.

Read next: `drafter.py` for the protocol, `lookup.py` for lookups beside a head.
"""

from __future__ import annotations

import heapq
import math
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from minispec.corpora import DEPTH, Corpora
from minispec.drafter import NOTHING, Draft, HostDrafter
from minispec.request import Hints

INDEX_PER_STEP = 256  # how many tokens of the line are indexed between two drafts; this takes Python about 15 ms
KEPT_AFTER_RELEASE = 65_536  # how many tokens of ended requests may still wait to be indexed
CROWDED = 64  # so many children of a node, the newest ones, are searched for the likeliest
SHARE = 0.01  # the share of the time between two drafts that limited lookups may take, indexing included
LONGEST_STEP = 0.1  # seconds; if two drafts are further apart, the rest was idle time, which earns no share
KEYS = (3, 2)  # how many of the last tokens an `Echo` must match: first three are tried, then two

ROOT = 0  # the empty path. No child or bucket entry is ever the root, so 0 also means "no node" in every link
MOST = 2**31 - 1  # the largest capacity


@dataclass(frozen=True)
class NgramOptions:
    """The NGRAM flags.

    `Config` checks all but the capacity, which is checked here: the trie must hold at least one path, and a node's
    index has 32 bits.
    """

    min_match: int = 1  # length of the shortest suffix that is looked up
    max_match: int = 12  # length of the longest suffix that is looked up
    min_breadth: int = 1  # BFS: how many children are drafted after a match of max_match tokens
    max_breadth: int = 10  # BFS: about how many after one of min_match tokens; PROB: the most children of a node
    match_type: str = "BFS"  # continuations are chosen by recency (BFS) or by frequency (PROB)
    branch_length: int = 18  # how many tokens the longest path has
    capacity: int = 10_000_000  # the most nodes of both generations of the trie, roots included
    nodes: int = 12  # N, the nodes of a draft, root included

    def __post_init__(self) -> None:
        low = self.branch_length + 1
        if not low <= self.capacity <= MOST:
            raise ValueError(
                f"--speculative-ngram-capacity must be in [{low}, {MOST}] "
                f"(--speculative-ngram-branch-length is {self.branch_length}), got {self.capacity}"
            )


class Trie:
    """Paths of tokens with their counts. A trie knows nothing of requests, and only grows.

    `extend` returns the open paths of a text, which the caller keeps: entry w - 1 is the node of the suffix of length
    w, or 0 if there is none.
    """

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        fresh = lambda: array("i", [0])  # noqa: E731  the root's entry
        self._token, self._parent = fresh(), fresh()
        self._count = array("q", [0])  # how many times the path occurred; in 32 bits it could overflow within days
        # The children of a node are a list, newest first: the node's first child, and each child's two neighbours.
        self._first, self._next, self._previous = fresh(), fresh(), fresh()
        # A hash table (parent, token) -> node with as many buckets as nodes; a bucket's nodes are chained.
        self._bucket, self._chain = fresh(), fresh()
        self._mask = 0
        self._by_node = (self._token, self._parent, self._count, self._first, self._next, self._previous, self._chain)

    def __len__(self) -> int:
        return len(self._token)

    def extend(self, path: Sequence[int], token: int, count: bool = True) -> list[int]:
        """Insert every stretch that ends with `token`, the next token of the text with the open paths `path`.

        Returns the text's new open paths. If the stretches were counted before, pass `count` as False: then nodes that
        are in the trie already keep their count.
        """
        return [self._descend(node, token, count) for node in (ROOT, *path[: self.options.branch_length - 1])]

    def _descend(self, parent: int, token: int, count: bool) -> int:
        """Find or create the child for `token`, count it, and make it the newest sibling."""
        child = self.find(parent, token)
        if not child:
            child, count = self._create(parent, token), True
        self._to_front(parent, child)
        self._count[child] += count
        return child

    def _create(self, parent: int, token: int) -> int:
        """Return a new node, hashed but not yet among its siblings."""
        node, bucket = len(self), self._home(parent, token)
        for entries in self._by_node:
            entries.append(0)
        self._token[node], self._parent[node] = token, parent
        self._chain[node], self._bucket[bucket] = self._bucket[bucket], node
        self._split()
        return node

    def _to_front(self, parent: int, child: int) -> None:
        """Make `child`, new or known, the first of its siblings."""
        first = self._first[parent]
        if first == child:
            return
        before, after = self._previous[child], self._next[child]
        if before:  # the child is listed already, behind another one
            self._next[before] = after
            if after:
                self._previous[after] = before
        self._previous[child], self._next[child] = 0, first
        if first:
            self._previous[first] = child
        self._first[parent] = child

    # ---- children by token: linear hashing

    def find(self, parent: int, token: int) -> int:
        """Return the child of `parent` for `token`, or 0."""
        node = self._bucket[self._home(parent, token)]
        while node and (self._token[node] != token or self._parent[node] != parent):
            node = self._chain[node]
        return node

    def _home(self, parent: int, token: int) -> int:
        """Return the bucket of a key: the low bits of its hash, one bit fewer if that bucket is not made yet."""
        bucket = hash((parent, token)) & self._mask
        return bucket if bucket < len(self._bucket) else bucket & (self._mask >> 1)

    def _split(self) -> None:
        """Add one bucket, and move into it the nodes that now belong there; all of them come from one other bucket."""
        added = len(self._bucket)
        self._bucket.append(0)
        self._mask = (1 << added.bit_length()) - 1
        source = added & (self._mask >> 1)
        node, self._bucket[source] = self._bucket[source], 0
        while node:
            after = self._chain[node]
            home = added if hash((self._parent[node], self._token[node])) & self._mask == added else source
            self._chain[node], self._bucket[home] = self._bucket[home], node
            node = after

    # ---- matching and selection

    def locate(self, tokens: Sequence[int]) -> list[int]:
        """Return the open paths after `tokens`, as `extend` would, but change nothing; 0 where there is no node.

        The trie holds the suffixes of every stretch that it holds. So if one suffix is missing, all longer ones are.
        """
        path = [0] * len(tokens)
        for length in range(1, len(tokens) + 1):
            node = ROOT
            for token in tokens[-length:]:
                node = self.find(node, token)
                if not node:
                    return path
            path[length - 1] = node
        return path

    def draft(self, path: Sequence[int], root: int) -> Draft:
        """Return the tree that follows a text with these open paths and `root` as its last token."""
        longest = min(len(path), self.options.max_match)
        lengths = range(longest, self.options.min_match - 1, -1)
        matches = [length for length in lengths if path[length - 1] and self._first[path[length - 1]]]
        tree = _Growth(root, self.options.nodes)
        grow = self._by_recency if self.options.match_type == "BFS" else self._by_probability
        for length in matches:  # the longest first, since it is the most specific
            if tree.full:
                break
            grow(tree, path[length - 1], length)
        return Draft(tree.tokens, tree.parents, matches[0] if matches else 0, "lookup")

    def _by_recency(self, tree: _Growth, match: int, length: int) -> None:
        """Add continuations level by level, newest first; the breadth falls by `scale` per level, down to 1.

        The breadth is the number of children that are taken from a node. A longer match starts with a smaller breadth,
        so its tree gets deeper.
        """
        o = self.options
        scale = (o.max_breadth - o.min_breadth) / (o.max_match - o.min_match + 1)
        queue = deque([(0, match, (o.max_match - length) * scale + o.min_breadth)])
        while queue and not tree.full:
            parent, node, breadth = queue.popleft()
            child, room = self._first[node], max(1, int(breadth))
            while child and room and not tree.full:
                queue.append((tree.add(parent, self._token[child]), child, breadth - scale))
                child, room = self._next[child], room - 1

    def _by_probability(self, tree: _Growth, match: int, length: int) -> None:
        """Add continuations by their estimated probability, highest first; ties by depth, then token id.

        A child's share is its count over the counts of its parent's `max_breadth` likeliest children. The probability
        of a continuation is the product of the shares on its path.
        """
        token, count = self._token, self._count
        heap: list[tuple[float, int, int, int, int]] = []

        def open_node(parent: int, node: int, depth: int, probability: float) -> None:
            best = self.likeliest(node)
            total = sum(count[child] for child in best)
            for child in best:
                heapq.heappush(heap, (-probability * count[child] / total, depth, token[child], parent, child))

        open_node(0, match, 1, 1.0)
        while heap and not tree.full:
            negative, depth, of, parent, node = heapq.heappop(heap)
            open_node(tree.add(parent, of), node, depth + 1, -negative)

    def likeliest(self, parent: int) -> list[int]:
        """Return the `max_breadth` most frequent children of the newest ones, ties by token id."""
        children: list[int] = []
        child, most = self._first[parent], self.options.max_breadth
        while child and len(children) < max(CROWDED, most):
            children.append(child)
            child = self._next[child]
        return heapq.nsmallest(most, children, key=lambda node: (-self._count[node], self._token[node]))


class _Growth:
    """A draft under construction: parents precede children, and siblings hold distinct tokens."""

    def __init__(self, root: int, limit: int) -> None:
        self.tokens, self.parents, self.limit = [root], [-1], limit
        self._known: dict[tuple[int, int], int] = {}

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.limit

    def add(self, parent: int, token: int) -> int:
        """Find or add the node for `token` below `parent`; the caller must check `full` first."""
        node = self._known.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node


class Echo:
    """One text, and for each two or three successive tokens of it the index after their last occurrence."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The text's last tokens are not indexed yet, since nothing follows them."""
        known = len(self.text)
        self.text += tokens
        for key in KEYS:
            for at in range(max(known, key), len(self.text)):
                self._behind[tuple(self.text[at - key : at])] = at

    def draft(self, after: Sequence[int], nodes: int, longest: int, shortest: int = 1) -> Draft:
        """Return the chain that followed the last tokens of `after`, at most `nodes` nodes; a root alone if none match.

        longest, shortest: lengths of a match; a longer match counts as `longest`, a shorter one as none. If `after` is
        this text and the chain reaches the text's end, the chain is repeated, since the text looks periodic.
        """
        places = ((self._behind.get(tuple(after[-key:])), key) for key in KEYS)
        at, match = next(((at, key) for at, key in places if at is not None), (0, 0))
        if not at or nodes < 2:
            return NOTHING
        most = min(longest, at, len(after))
        while match < most and self.text[at - match - 1] == after[-match - 1]:
            match += 1
        if match < shortest:
            return NOTHING
        tokens = self.text[at : at + nodes - 1]
        if after is self.text:
            period = len(tokens)
            tokens = [tokens[i % period] for i in range(nodes - 1)]
        return Draft([after[-1], *tokens], list(range(-1, len(tokens))), match, "lookup")


def _longer(first: Draft, second: Draft) -> Draft:
    return second if second.match_length > first.match_length else first


@dataclass(eq=False)
class _Text:
    """A request's text as the drafter sees it."""

    own: Echo | None  # the text, if it is looked up by itself too
    expected: Echo | None = None  # the request's predicted output
    private: bool = False  # whether the text never enters the trie, and drafts nothing from there
    newest: list[int] = field(default_factory=list)  # the last tokens, which are looked up
    path: list[int] = field(default_factory=list)  # the open paths of the part that is indexed
    waiting: deque[int] = field(default_factory=deque)  # the tokens that are not indexed yet
    replayed: int = 0  # how many of `waiting`, from its front, were counted before the request was retracted
    fresh: bool = False  # whether the newest tokens are new, and not repeated after a retraction
    drafted: bool = False  # whether a draft was asked for; tokens committed after that are output
    released: bool = False  # whether the request has left its slot


class NgramDrafter(HostDrafter):
    """The drafter over one shared trie.

    Output is indexed as it is committed, and prompts wait in line: a step indexes at most INDEX_PER_STEP of their
    tokens, first come first served. If lookups are `limited`, all tokens wait in line until there is time. Until the
    whole text of a request is indexed, the text's newest tokens are looked up from the root of the trie. Tokens that an
    ended request left in line are still indexed, up to KEPT_AFTER_RELEASE.

    The longest match gives the tree. Of equal matches a predicted output (`Hints`) comes first, since it was given for
    this text, then the request's own text, the trie, and external corpora.
    """

    name, keeps_private = "ngram", True
    corpora: Corpora

    def __init__(self, options: NgramOptions, limited: bool = False) -> None:
        """limited: whether lookups take at most SHARE of the time, and each request's own text is looked up first."""
        self.options, self.limited, self.nodes = options, limited, options.nodes
        self.depth = min(options.nodes - 1, options.branch_length - options.min_match)
        self.trie, self.older, self.corpora = Trie(options), Trie(options), Corpora()
        self._texts: dict[int, _Text] = {}  # by slot
        self._line: deque[_Text] = deque()  # the texts that have tokens waiting
        self._began = time.perf_counter()  # when `draft` was last called
        self._debt = 0.0  # the seconds that limited lookups took beyond their share

    def draft(self, slots: Sequence[int]) -> list[Draft]:
        """Do one step's indexing, then return one tree per slot; raises KeyError for a slot without tokens."""
        now = time.perf_counter()
        credit = SHARE * min(now - self._began, LONGEST_STEP) - self._debt if self.limited else math.inf
        self._began = now
        self.tick(now + credit)
        drafts = [self._draft(slot, self._texts[slot]) for slot in slots]
        # Unused time is not saved up. A debt beyond a long step's share comes from a pause of the machine: cut it off.
        self._debt = min(max(time.perf_counter() - now - credit, 0.0), SHARE * LONGEST_STEP)
        return drafts

    def _draft(self, slot: int, text: _Text) -> Draft:
        """Return the tree of the longest match."""
        text.drafted, root, o = True, text.newest[-1], self.options
        newest, best = text.newest[-o.max_match :], Draft([root], [-1])
        for echo, after in ((text.expected, text.newest), (text.own, text.own.text if text.own else [])):
            if echo is not None:
                best = _longer(best, echo.draft(after, o.nodes, o.max_match, o.min_match))
        if best.match_length == o.max_match and self.limited:
            return best
        followed = not text.waiting and len(text.path) >= len(newest)  # or `path` lacks what is looked up
        for trie in () if text.private else (self.trie, self.older):
            path = text.path if followed and trie is self.trie else trie.locate(newest)
            best = _longer(best, trie.draft(path, root))
        tokens, match = self.corpora.follow(slot, text.newest, self.nodes - 1, DEPTH)
        if not tokens or match <= best.match_length:
            return best
        match = min(match, o.max_match)  # longer ones are one class
        return Draft([root, *tokens], list(range(-1, len(tokens))), match, "lookup", corpus=True)

    def _text(self, slot: int) -> _Text:
        return self._texts.setdefault(slot, _Text(Echo() if self.limited else None))

    def hint(self, slot: int, hints: Hints) -> None:
        """Take in what a request says of its drafts: no other slot gets drafts from a private or a predicted text."""
        text = self._text(slot)
        if hints.private:
            text.private, text.own = True, Echo()
        if hints.private or hints.corpus is not None:
            self.corpora.limit(slot, hints.corpus)
        if hints.prediction:
            text.expected = Echo()
            text.expected.extend(hints.prediction)

    def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        """Take in the next tokens of a slot's text, even those whose rows the prefix cache had.

        A retracted request, one that went back to the queue, commits its text once more in its next slot. `again` marks
        tokens that were committed before, so that they are not counted twice. Raises ValueError if such tokens follow
        new ones.
        """
        if not tokens:
            return
        started, text = time.perf_counter(), self._text(slot)
        if again and text.fresh:
            raise ValueError(f"slot {slot}: tokens committed again must precede all new ones")
        text.fresh = not again
        text.newest = [*text.newest, *tokens][-max(self.options.max_match, DEPTH) :]
        if text.own is not None:
            text.own.extend(tokens)
        if text.drafted and not (text.waiting or again or self.limited or text.private):
            for token in tokens:
                self._index(text, token)
        elif not text.private:
            text.replayed += len(tokens) if again else 0
            if not text.waiting:
                self._line.append(text)
            text.waiting.extend(tokens)
        self._debt += time.perf_counter() - started

    def _index(self, text: _Text, token: int, count: bool = True) -> None:
        """Index the next token of a text, in a new generation of the trie if this one has no room for its nodes."""
        o, size = self.options, len(self.trie)
        half = max(o.capacity // 2, o.branch_length + 1)
        if size + o.branch_length > half:
            self.trie, self.older = Trie(o), self.trie if size + half <= o.capacity else Trie(o)
            for one in (*self._texts.values(), *self._line):
                one.path = []
        text.path = self.trie.extend(text.path, token, count)

    def tick(self, until: float = math.inf) -> None:
        """Index at most INDEX_PER_STEP waiting tokens, and stop at the time `until`, by `perf_counter`."""
        for _ in range(INDEX_PER_STEP):
            if not self._line or time.perf_counter() >= until:
                return
            text = self._line[0]
            self._index(text, text.waiting.popleft(), count=not text.replayed)
            text.replayed = max(0, text.replayed - 1)
            if not text.waiting:
                self._line.popleft()

    def release(self, slot: int) -> None:
        """Forget a slot whose request ended or was retracted; its text stays in the trie."""
        self.corpora.release(slot)
        text = self._texts.pop(slot, None)
        if text is not None and text.waiting:
            text.released = True
            if sum(len(text.waiting) for text in self._line if text.released) > KEPT_AFTER_RELEASE:
                self._line.remove(text)

    def clear(self) -> None:
        """Empty the trie and the line. Texts in slots stay; only the tokens that they get after this are indexed."""
        self.trie, self.older = Trie(self.options), Trie(self.options)
        self._line.clear()
        for text in self._texts.values():
            text.path, text.waiting, text.replayed = [], deque(), 0
