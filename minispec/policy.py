"""Which shape the next step has: plain, or one of the sizes of tree that the engine was made with.

A tree costs the time of drafting and reading its nodes, and gives the tokens that are accepted. Both change with the
batch, the texts and the machine, so both are averaged in the steps themselves: `Times` has the times of steps, and a
`Mean` the tokens that a kind of tree emitted. The policy takes the shape with the most expected tokens a second over
the whole batch. That is a plain step if no tree pays.

A request's tree is drafted on the device within the step (by a head; here a draft model counts as a head), or it is
proposed on the host before the step (by a host drafter, or by a lookup beside a head: `lookup.py`). With lookups, each
request verifies the tree that promises more. Then there are also shapes in which the head does not run: every request
verifies the tree looked up for it, or its root alone if there is none (`Shape.of_host`).

Even if a step does not verify a tree of the host, the text shows later how many tokens the tree would have given. But
nobody learns what a head would have drafted in a step of another shape. So in such a step the mean of the head's trees
goes a little way back to where it began, which is hopeful, and after some hundred steps these trees are tried again.

A head may say how likely it finds its drafts (`Drafter.confidences`). As it speaks of one place in the text, this tells
more of the next tree than a mean does. Such a tree promises what trees gave that followed like words.

Nothing here knows of tensors. Of a request the policy knows its identity, and whether it wants drafts.

Expected tokens against step times: arXiv 2211.17192. Read next: `scheduler.py`, which asks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minispec.drafter import NOTHING, Draft
from minispec.request import Request
from minispec.tree import PLAIN, Shape

GAIN = 1.03  # how much faster trees must be than the shape in use to replace it, so that noise moves nothing to and fro
# The least weight of the newest observation: in the time of a shape beside others, and in the speed of the machine.
TIME, PACE = 0.02, 0.1
HICCUP = 2.0  # a step that took so many times as long as expected counts as one that took this long
# The least weight of the newest tree in a mean: of the head over all requests, of the head in one request, of a match.
ALL, OWN, MATCH = 0.01, 0.03, 0.03
FIRST = 16  # how many trees of the head the mean counts for with which a record of the head begins
FIRST_MATCH = 4  # the same of a guess on a match
CHANCE = 0.8  # the chance that a head's draft is accepted, assumed until the head was tried, so that it is
SHORT = 2  # a match of so few tokens may be chance
SAID = 8  # for so many steps without drafts a head's confidences count; after that the request's mean does
FORGET = 0.0005  # in each step that does not try a tree, its mean goes this part of the way back to where it began


class Kind(NamedTuple):
    """What the time of a step depends on beside its shape."""

    batch: int  # B, the number of requests to which the step is padded
    sampled: bool = False  # whether the step is slower than a greedy one, as `Engine.special` tells


@dataclass(frozen=True)
class Planned:
    """What `before` chose for a step."""

    kind: Kind
    shape: Shape
    offered: Mapping[Request, Draft | None]  # the tree that the host offers a request, verified or not; None: no tree
    # The tree that a request verifies: one of the host's, or None for the one that the head drafts within the step. A
    # request that is not here verifies its root alone.
    verifies: Mapping[Request, Draft | None]

    @property
    def drafts(self) -> Sequence[Draft]:
        """The host's trees to verify, one for each request, NOTHING if it verifies none; empty if there are none."""
        if all(draft is None for draft in self.offered.values()):
            return ()
        return [self.verifies.get(request) or NOTHING for request in self.offered]

    def verified(self, request: Request) -> tuple[str | None, int]:
        """Return whose drafts a request verifies ("head": those drafted in the step; None: no drafts), and how many."""
        if request not in self.verifies:
            return None, 0
        if (draft := self.verifies[request]) is None:
            return "head", self.shape.nodes - 1
        return draft.source, len(draft.tokens[: self.shape.nodes]) - 1


class Times:
    """The times of steps by kind and shape, as compared with each other: measured at start, and averaged since.

    A machine that others use too may be half as fast in the next minute. Then the shape in use would look slow beside
    one that was measured before. So each batch size has a pace, by which all of its times are multiplied.
    """

    def __init__(self, start: Mapping[tuple[int, Shape], float]) -> None:
        """start: seconds of a greedy step by batch and shape."""
        self._start, self._means = start, dict[tuple[Kind, Shape], Mean]()
        self._paces: dict[int, float] = {batch: 1.0 for batch, _ in start}

    def of(self, kind: Kind, shape: Shape) -> float:
        """Return the time of a step over the pace; a shape never measured is as fast as the fastest, so it is tried."""
        if (kind, shape) in self._means:
            return self._means[kind, shape].value
        if (kind.batch, shape) in self._start:
            return self._start[kind.batch, shape]
        known = [mean.value for (other, _), mean in self._means.items() if other.batch == kind.batch]
        return min(known, default=1.0)

    def add(self, kind: Kind, shape: Shape, seconds: float) -> None:
        """Take in the time of a step."""
        expected = self.of(kind, shape)
        pace = self._paces.setdefault(kind.batch, seconds / expected)
        mean = self._means.setdefault((kind, shape), Mean(expected, FIRST_MATCH))
        ratio = min(seconds / (pace * expected), HICCUP)
        mean.learn(ratio * expected, TIME)
        self._paces[kind.batch] = pace * (1 + PACE * (ratio - 1))


class Mean:
    """A mean that begins with a guess, which counts as some observations; the newest counts at least as `rate`."""

    def __init__(self, guess: float, weight: float) -> None:
        self.value, self._seen = guess, weight

    def learn(self, value: float, rate: float) -> None:
        """Take in an observation."""
        self._seen = min(self._seen + 1, 1 / rate)
        self.value += (value - self.value) / self._seen

    def forget(self, guess: float) -> None:
        """Go a part of the way back to the guess."""
        self.value += FORGET * (guess - self.value)


class Policy:
    """Chooses the shape of every step, and learns from every step."""

    def __init__(
        self, trees: Mapping[int, int], adapts_from: float, has_lookups: bool = False,
        allows: Callable[[int, int], bool] | None = None,
        says: Callable[[Request], Sequence[float]] = lambda request: (),
    ) -> None:  # fmt: skip
        """`trees`: the depth of each size of tree, by nodes.

        adapts_from: the smallest batch whose shapes are chosen. Smaller ones have the largest tree, if any drafts.
        has_lookups: whether a request takes either a looked-up tree or the head's. allows: whether a batch of so many
        requests may draft trees of so many nodes; None: any may. says: returns `Drafter.confidences` of a request. The
        attribute `forced` is for tests and benchmarks: if set, this function chooses the shape of each step in which
        some request wants drafts.
        """
        self.trees, self.adapts_from, self.has_lookups, self.allows = dict(trees), adapts_from, has_lookups, allows
        self.times = Times({})
        self.forced: Callable[[Sequence[Shape]], Shape] | None = None
        self.shape = max((Shape(nodes, True) for nodes in self.trees), default=PLAIN)  # the shape in use
        # By nodes of a tree: the tokens that the head's trees emitted, guessed at first, over all requests, in each.
        self._guess = {nodes: sum(CHANCE**level for level in range(depth + 1)) for nodes, depth in self.trees.items()}
        self._all = {nodes: Mean(guess, FIRST) for nodes, guess in self._guess.items()}
        self._own: weakref.WeakKeyDictionary[Request, dict[int, Mean]] = weakref.WeakKeyDictionary()
        self._matches: dict[tuple[int, int], Mean] = {}  # the same of the host's trees, by nodes and class of match
        self.says = says
        # For each request the tokens that the head expected at its newest tree, by depth, and how many steps ago.
        self._hopes: weakref.WeakKeyDictionary[Request, tuple[list[float], int]] = weakref.WeakKeyDictionary()
        self._hoped: dict[tuple[int, int], Mean] = {}  # what the head's next trees gave, by nodes and twice the tokens
        # For each request the tree that `follow` follows, with the tokens that the text has gained since.
        self._open: weakref.WeakKeyDictionary[Request, tuple[Draft, list[int]]] = weakref.WeakKeyDictionary()

    def restart(self, seconds: Mapping[tuple[int, Shape], float]) -> None:
        """Forget all times, and begin with `seconds`, measured for each batch and shape."""
        self.times = Times(seconds)

    def before(
        self, kind: Kind, shapes: Sequence[Shape], requests: Sequence[Request], offer: Callable[[], Sequence[Draft]]
    ) -> Planned:
        """Choose the shape of the next step, one of `shapes`, and which tree each request verifies.

        offer: returns the trees of `Drafter.host_drafts` for these requests; not called if the step is sure to be
        plain.
        """
        if self.allows is not None:
            shapes = [s for s in shapes if not s.drafts or self.allows(len(requests), s.nodes)]
        wanting = [request for request in requests if request.speculative]
        forced = None if self.forced is None or not wanting else self.forced(shapes)
        sure = forced == PLAIN or not wanting or len(shapes) == 1
        drafts: Sequence[Draft | None] = () if sure else offer()
        offered = dict(zip(requests, drafts or [None] * len(requests), strict=True))
        plans = {} if sure else {s: self._trees(s, offered) for s in ([forced] if forced else shapes)}
        shape = PLAIN if sure else forced or self._best(kind, plans, len(requests))
        trees = plans.get(shape, {})
        looked_up = Shape(shape.nodes, False)
        if looked_up in shapes and self.has_lookups and len(trees) == len(requests) and None not in trees.values():
            shape = looked_up  # all trees are, so the head need not run
        return Planned(kind, shape, offered, trees)

    def _trees(self, shape: Shape, offered: Mapping[Request, Draft | None]) -> dict[Request, Draft | None]:
        """Return the trees that a step of this shape would verify, as `Planned.verifies`."""
        trees: dict[Request, Draft | None] = {}
        for request, draft in offered.items() if shape != PLAIN else ():
            found = draft if draft is not None and draft.match else None
            drafted = shape.drafts and (draft is None or self.has_lookups)  # whether the head drafts for the request
            if found and drafted and self.expected(request, found, shape) <= self.expected(request, None, shape):
                found = None
            if request.speculative and (found or drafted):
                trees[request] = found
        return trees

    def _best(self, kind: Kind, plans: Mapping[Shape, Mapping[Request, Draft | None]], requests: int) -> Shape:
        """Return the shape with the most expected tokens a second; a request without a tree gets one token."""
        if not any(plans.values()):
            return PLAIN
        if kind.batch < self.adapts_from:
            return max(plans)
        speeds = {}
        for shape, trees in plans.items():
            tokens = requests + sum(self.expected(*tree, shape) - 1 for tree in trees.items())
            speeds[shape] = tokens / self.times.of(kind, shape)
        stay = self.shape if self.shape in speeds else PLAIN
        best = max(speeds, key=speeds.__getitem__)
        self.shape = best if best == PLAIN or speeds[best] > GAIN * speeds[stay] else stay
        return self.shape

    def expected(self, request: Request, draft: Draft | None, shape: Shape) -> float:
        """Return the tokens that a tree of the host, or None for the head's, is expected to emit, at least 1."""
        if draft is not None:
            return self._match(shape.nodes, draft.match).value
        if (hoped := self._hope(request, shape.nodes, SAID)) is not None:
            return hoped.value
        own = self._own.get(request, self._all)
        return own.get(shape.nodes, self._all[shape.nodes]).value

    def _match(self, nodes: int, match: int) -> Mean:
        """Return the mean of trees with such a match; the first guess expects nothing of a match that may be chance."""
        if (nodes, match) not in self._matches:
            worth = 0.5 if match > 0 else 0.2  # of each token beyond SHORT
            guess = min(1.0 + worth * max(abs(match) - SHORT, 0), float(nodes))
            self._matches[nodes, match] = Mean(guess, FIRST_MATCH)
        return self._matches[nodes, match]

    def _hope(self, request: Request, nodes: int, steps: float) -> Mean | None:
        """Return the mean of the head's trees that followed such hopes; None if the hopes are older than `steps`."""
        hopes, age = self._hopes.get(request, ([], 0))
        if not hopes or age > steps:
            return None
        hope = round(2 * hopes[self.trees[nodes]])
        return self._hoped.setdefault((nodes, hope), Mean(hope / 2, FIRST_MATCH))

    def after(self, planned: Planned, emitted: Mapping[Request, Sequence[int]], seconds: float | None) -> None:
        """Learn the time of a step and the tokens that it emitted.

        seconds: None if this time included other work, as compiling or waiting for pages.
        """
        if seconds is not None:
            self.times.add(planned.kind, planned.shape, seconds)
        untried = [nodes for nodes in self.trees if planned.shape != Shape(nodes, True)]
        for nodes in untried:
            self._all[nodes].forget(self._guess[nodes])
        for request, tokens in emitted.items():
            if (draft := planned.offered[request]) is not None:
                self.follow(request, draft, tokens)
            own = self._own.setdefault(request, {})
            if planned.verified(request)[0] == "head":
                self._learn(own, planned.shape.nodes, len(tokens))
                if (hoped := self._hope(request, planned.shape.nodes, math.inf)) is not None:
                    hoped.learn(len(tokens), MATCH)
            self._hear(request, self.says(request) if planned.shape.drafts else ())
            for nodes in own.keys() & untried:
                own[nodes].forget(self._all[nodes].value)

    def _hear(self, request: Request, chances: Sequence[float]) -> None:
        """Note what the head said of a request's drafts, by depth; the deepest chance stands for those below."""
        hopes, age = self._hopes.get(request, ([], 0))
        if chances:
            reached, hopes, age = 1.0, [1.0], -1
            for level in range(max(self.trees.values())):
                reached *= chances[min(level, len(chances) - 1)]
                hopes.append(hopes[-1] + reached)
        if hopes:
            self._hopes[request] = hopes, age + 1

    def _learn(self, own: dict[int, Mean], nodes: int, tokens: int) -> None:
        """Learn how many tokens the head's tree of so many nodes emitted, in a request and over all."""
        if nodes not in own:
            own[nodes] = Mean(self._all[nodes].value, FIRST)
        own[nodes].learn(tokens, OWN)
        self._all[nodes].learn(tokens, ALL)

    def follow(self, request: Request, draft: Draft, tokens: Sequence[int]) -> None:
        """Learn how many tokens the host's tree for a step gave, or would have given, from the tokens emitted.

        Verified or not, a tree shows how many tokens it gives once the text has left the tree's paths. Until then this
        one tree of the request is followed, and trees offered meanwhile are ignored.
        """
        draft, seen = self._open.pop(request, (draft, []))
        if not draft.match:
            return
        seen = [*seen, *tokens]
        if draft.holds(seen) == len(seen):
            self._open[request] = (draft, seen)
            return
        for nodes in self.trees:
            self._match(nodes, draft.match).learn(min(draft.holds(seen, nodes) + 1, len(seen)), MATCH)
