"""Which shape the next step has: plain, or one of the trees that the engine was made with.

A tree costs the time of its nodes and of drafting them, and gives as many tokens as are accepted. Both change: with the
batch, with the length of the texts, with what the texts are, with the machine. The one idea is to measure both where
they happen. `Times` has what real steps took, `Acceptance` and `Matches` what real trees gave, and the shape with the
most expected tokens a second over the whole batch is taken.

What a tree of the host would have given is known once the text has gone on. A tree of the drafter that was not drafted
teaches nothing. So now and then another shape is tried, a probe, as long as all probes together have cost less than a
hundredth of the time. A change must gain 3 %, so that noise does not move the engine to and fro; only the way back to
plain steps is free, since plain decoding is what speculation must not fall below. Before a drafter with a network
drafts again, it takes in what the steps without it left, and its trees have to pay for that too (`Returns`).

A row's tree comes from the step, from the host, or from whichever of the two promises more (`lookup.py`). In the last
case there are also shapes in which every row takes the host's tree, so that the step drafts nothing (`Shape.of_host`).
`expected` is the question for one row and one shape. `before` chooses a step's shape and the trees of the host that it
verifies, and `after` learns from what came of it. Nothing here knows of tensors, or of a request more than its identity
and whether it wants drafts.

Expected tokens against step times: arXiv 2211.17192. Read next: `scheduler.py`, which asks.
"""

from __future__ import annotations

import statistics
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minispec.drafter import NOTHING, Draft
from minispec.request import Request
from minispec.tree import PLAIN, Shape

GAIN = 1.03  # what a change must gain
PROBES = 0.01  # the share of decode time that probes may cost
HORIZON = 0.999  # how much of the accounts of probes is left after a step
STALE = 100  # steps of a kind after which another shape's numbers are worth a probe
SAMPLES = 15  # step times that a median is taken of, the newest ones
AROUND = 9  # newest steps whose most frequent shape is the one in use, and whose times others are compared with
OWN_AFTER = 8  # tree steps of a request after which its own record counts
OWN_PRIOR = 16  # observations that the engine's record counts as beside it: requests differ less than few steps do
SHORT = 2  # tokens of a text that agree with an older one by chance
FIRST_RUN = 8.0  # steps with trees in a row, before any such run has ended
FIRST_CHANCE = 0.6  # that a draft is accepted, before any was
ALL_KEEP, OWN_KEEP = 0.99, 0.97  # how much an observation counts after the next one, for the engine, for a request


class Kind(NamedTuple):
    """What the time of a step depends on beside its shape."""

    batch: int  # requests that it is padded to
    sampled: bool  # whether any of them is not greedy
    octave: int  # bits of the longest text's length

    @classmethod
    def of(cls, batch: int, sampled: bool, rows: int) -> Kind:
        """Return the kind of a step whose longest text has this many rows; short ones are all alike."""
        return cls(batch, sampled, max(rows, 128).bit_length())


class Row(NamedTuple):
    """One request of the next step."""

    request: object  # whose record counts; compared by identity
    # Tokens of text that the host's tree follows from, 0: it offers none. None: the drafter proposes in the step.
    match: int | None = None
    drafts: bool = True  # False: the request verifies no drafts, whatever the shape
    lookup: int = 0  # the same of a looked-up tree that may take the place of the drafter's; match is None then


class Choice(NamedTuple):
    """The shape that was chosen for a step, and why."""

    shape: Shape
    probe: bool = False  # whether it was taken to learn something
    lookups: Sequence[bool] = ()  # for each row whether it takes the host's tree in place of the step's; none does


@dataclass(frozen=True)
class Planned:
    """What `before` has chosen, and from what."""

    kind: Kind
    choice: Choice
    rows: Mapping[Request, tuple[Row, Draft | None]]  # with the tree that the host offers, verified or not
    of_host: frozenset[Request]  # that take the host's tree in place of the step's
    drafts: Sequence[Draft]  # the host's trees that are verified, one a request, or none where the step drafts all


class Times:
    """What steps took, by kind and shape: the median of the newest.

    Times of two shapes are seldom of the same minute, and a machine that others use as well may be half as fast in the
    next one. The shape in use would then look slow beside one that was measured before. So a shape that is not in use
    has, as a multiple of the one in use, what it had whenever the two were measured one after the other.
    """

    def __init__(self) -> None:
        self._samples: dict[Kind, dict[Shape, deque[float]]] = defaultdict(dict)
        self._newest: dict[Kind, deque[Shape]] = defaultdict(lambda: deque(maxlen=AROUND))  # of the newest steps
        self._used: dict[Kind, Shape] = {}  # the shape of most of them
        self._multiples: dict[tuple[Kind, Shape, Shape], deque[float]] = defaultdict(lambda: deque(maxlen=AROUND))
        self._steps: dict[Kind, int] = defaultdict(int)  # steps of the kind
        self._last: dict[tuple[Kind, Shape], int] = {}  # the one of them in which this shape was last measured
        self._medians: dict[tuple[object, ...], float] = {}  # of samples and multiples, until there is a newer one

    def add(self, kind: Kind, shape: Shape, seconds: float) -> None:
        """Take in the time of a step."""
        of, used = self._samples[kind], self._used.setdefault(kind, shape)
        newest = self._newest[kind]
        newest.append(shape)
        if used != shape:
            multiple = seconds / statistics.median(list(of[used])[-AROUND:])
            self._multiples[kind, shape, used].append(multiple)
            self._multiples[kind, used, shape].append(1 / multiple)
            self._medians.pop((kind, shape, used), None)
            self._medians.pop((kind, used, shape), None)
            self._used[kind] = statistics.mode(newest)
        of.setdefault(shape, deque(maxlen=SAMPLES)).append(seconds)
        self._medians.pop((kind, shape), None)
        self._steps[kind] += 1
        self._last[kind, shape] = self._steps[kind]

    def clear(self) -> None:
        """Forget all times."""
        for known in vars(self).values():
            known.clear()

    def stale(self, kind: Kind, shape: Shape) -> bool:
        """Return whether this shape was not measured in many steps of the kind."""
        last = self._last.get((kind, shape))
        return last is None or self._steps[kind] - last >= STALE

    def of(self, kind: Kind, shape: Shape) -> float:
        """Return the seconds of a step: measured, or carried over from the nearest kind in which it was measured.

        There it is scaled by what a shape measured in both takes more or less here. Of what nobody knows, a step takes
        the time of any other, so that it is tried.
        """
        here = self._samples.get(kind, {})
        if shape in here:
            used = self._used[kind]
            if (kind, shape, used) not in self._multiples:
                return self._median((kind, shape), here[shape])
            multiple = self._median((kind, shape, used), self._multiples[kind, shape, used])
            return multiple * self._median((kind, used), here[used])
        near = [other for other, of in self._samples.items() if shape in of and other.batch == kind.batch]
        if not near:
            return min((self._median((kind, of), times) for of, times in here.items()), default=1.0)
        other = min(near, key=lambda k: (abs(k.octave - kind.octave), k.sampled != kind.sampled))
        both = [m for m in here if m in self._samples[other]]
        scale = self.of(kind, both[0]) / self.of(other, both[0]) if both else 1.0
        return scale * self.of(other, shape)

    def _median(self, key: tuple[object, ...], values: Sequence[float]) -> float:
        """Return the median of what lies at a key."""
        if key not in self._medians:
            self._medians[key] = statistics.median(values)
        return self._medians[key]


class Acceptance:
    """How often a draft was accepted where the one above it was, lately, by depth."""

    def __init__(self, keep: float) -> None:
        """`keep`: how much an observation counts after the next one."""
        self.keep, self.steps = keep, 0
        self._tried: dict[tuple[int, int], float] = defaultdict(float)  # by nodes of the tree and depth
        self._held: dict[tuple[int, int], float] = defaultdict(float)

    def learn(self, nodes: int, depth: int, accepted: int) -> None:
        """Take in a tree of this size, of whose longest path so many drafts were accepted."""
        self.steps += 1
        for level in range(1, min(depth, accepted + 1) + 1):
            for key in ((nodes, level), (0, level)):  # 0: of all sizes together
                self._tried[key] = self.keep * self._tried[key] + 1
                self._held[key] = self.keep * self._held[key] + (accepted >= level)

    def chance(self, nodes: int, level: int, prior: float, weight: float) -> float:
        """Return the chance at this depth; the prior counts as many observations as `weight` says."""
        key = (nodes, level)
        return (self._held.get(key, 0.0) + weight * prior) / (self._tried.get(key, 0.0) + weight)


class Matches:
    """What trees of the host gave, by size and by how much of the text they followed from.

    A length of match has a running mean over what such trees emitted or would have, beginning with a guess.
    """

    rate = 0.1  # weight of the newest observation

    def __init__(self) -> None:
        self._mean: dict[tuple[int, int], float] = {}

    def guess(self, nodes: int, match: int) -> float:
        """Return the emission assumed of a tree before anything is known."""
        return min(1.0 + 0.5 * max(match - SHORT, 0), float(nodes))

    def expected(self, nodes: int, match: int) -> float:
        """Return what such a tree emits."""
        return self._mean.get((nodes, match), self.guess(nodes, match)) if match else 1.0

    def learn(self, nodes: int, match: int, emitted: int) -> None:
        """Take in what a tree emitted."""
        if match:
            mean = self.expected(nodes, match)
            self._mean[nodes, match] = mean + self.rate * (emitted - mean)


class Returns:
    """What it costs to draft again after steps without: the time in which the drafter takes in what they have left.

    It is paid once for a whole run of steps that draft, so a step bears a share of it: one over the mean length of such
    runs lately. Steps whose trees are all the host's do not draft.
    """

    rate = 0.1  # weight of the newest run

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))  # by batch
        self._median: dict[int, float] = {}  # of them
        self._steps: dict[int, float] = defaultdict(lambda: FIRST_RUN)  # of a run in the mean, by batch
        self._run, self._behind = 0, False  # steps of the run under way; whether the newest step was a plain one

    def add(self, batch: int, choice: Choice, seconds: float) -> None:
        """Take in a step, and how long the drafter took before it. Probes are no part of a run, and end none."""
        drafts = choice.shape.drafts
        if drafts and self._behind:
            self._seconds[batch].append(seconds)
            self._median[batch] = statistics.median(self._seconds[batch])
        self._behind = not drafts
        if choice.probe:
            return
        if drafts:
            self._run += 1
        elif self._run:
            self._steps[batch] += self.rate * (self._run - self._steps[batch])
            self._run = 0

    def of(self, batch: int, shape: Shape) -> float:
        """Return the seconds that the next step has to bear if it has this shape."""
        if not shape.drafts or not self._behind or batch not in self._median:
            return 0.0
        return self._median[batch] / self._steps[batch]


class Policy:
    """Chooses the shape of every step, and learns from every step."""

    def __init__(self, trees: Mapping[int, int], adaptive: bool, looks_up: bool = False) -> None:
        """`trees`: the depth of each size of tree, by nodes. Not `adaptive`: the largest tree whenever there is one.

        looks_up: whether the host's trees stand beside those of the step, of which a row takes one.
        forced: for tests and benchmarks, a choice in place of all rules, from the shapes that the step may have.
        """
        self.trees, self.adaptive, self.looks_up = dict(trees), adaptive, looks_up
        self.times, self.matches, self.everyone = Times(), Matches(), Acceptance(ALL_KEEP)
        self.returns = Returns()
        self.forced: Callable[[Sequence[Shape]], Shape] | None = None
        self.forced_lookup: Callable[[], bool] | None = None  # and whether a row takes the tree that was looked up
        self.spent = self.probing = 0.0  # aged seconds of decode steps, and of them what probes cost
        self._own: weakref.WeakKeyDictionary[object, Acceptance] = weakref.WeakKeyDictionary()
        # The host's tree that waits until the text has gone on far enough to tell what it gives, and the text since.
        self._open: weakref.WeakKeyDictionary[object, tuple[Draft, list[int]]] = weakref.WeakKeyDictionary()
        self._shape = max((Shape(nodes, True) for nodes in self.trees), default=PLAIN)  # the one in use
        self._probed = 0  # probes since the start
        self._after_probe = False
        self._pace = 0.0  # expected seconds of a token with the shape in use
        self._chances: dict[int, list[float]] = {}  # of the engine, by nodes, until it learns

    def before(
        self, kind: Kind, shapes: Sequence[Shape], requests: Sequence[Request], offer: Callable[[], Sequence[Draft]]
    ) -> Planned:
        """Choose the shape of the next step, one of `shapes`, and which of the host's trees it verifies.

        offer: asks the host for a tree a request, none where the step drafts; called only where trees may be verified.
        """
        decided = self.decided(shapes) if any(r.speculative for r in requests) else PLAIN
        drafts = () if decided == PLAIN else offer()
        offered: Sequence[Draft | None] = drafts or [None] * len(requests)
        rows = {r: (self._row(r, draft), draft) for r, draft in zip(requests, offered, strict=True)}
        known = [row for row, _ in rows.values()]
        if decided is None:
            choice = self.choose(kind, shapes, known)
        else:
            choice = self.with_lookups(Choice(decided), known)
        of_host = frozenset(r for r, takes in zip(requests, choice.lookups, strict=False) if takes)
        if self.looks_up:
            drafts = [d if d is not None and r in of_host else NOTHING for r, d in zip(requests, offered, strict=True)]
        return Planned(kind, choice, rows, of_host, drafts)

    def _row(self, request: Request, draft: Draft | None) -> Row:
        """Return what is to be known of a request and of the tree that the host offers for it."""
        wanted = request.speculative
        if draft is None or not self.looks_up:
            return Row(request, None if draft is None else draft.match, wanted)
        return Row(request, None, wanted, lookup=draft.match)

    def after(
        self, planned: Planned, emitted: Mapping[Request, Sequence[int]], seconds: float | None,
        catching_up: float = 0.0,
    ) -> None:  # fmt: skip
        """Learn what a step took and emitted.

        seconds: None where something else took its time as well. catching_up: the drafter's seconds before the step.
        """
        if seconds is not None:
            tokens = sum(map(len, emitted.values()))
            self.landed(planned.kind, planned.choice, seconds, emitted=tokens, catching_up=catching_up)
        for request, given in emitted.items():
            row, draft = planned.rows[request]
            if draft is not None:
                self.follow(request, draft, given)
            if row.match is None and planned.choice.shape.drafts and request not in planned.of_host:
                self.learn(row, planned.choice.shape.nodes, len(given))

    def follow(self, request: object, draft: Draft, tokens: Sequence[int]) -> None:
        """Take in the tree that the host offered for a step, whatever was verified, and the tokens that came out.

        A tree that was verified in part, or not at all, says as much as one that was verified, once the text has gone
        on far enough. Of each request one tree waits; trees offered before it is decided are not looked at.
        """
        draft, seen = self._open.pop(request, (draft, []))
        if not draft.match:
            return
        seen = [*seen, *tokens]
        if draft.holds(seen) == len(seen):
            self._open[request] = (draft, seen)
            return
        for nodes in self.trees:
            self.matches.learn(nodes, draft.match, draft.emits(seen, nodes))

    def restart(self, seconds: Mapping[tuple[int, Shape], float], rows: int) -> None:
        """Forget what steps took, and begin with measured seconds by batch and shape, of texts with so many rows."""
        self.times.clear()
        for (batch, shape), taken in seconds.items():
            self.times.add(Kind.of(batch, False, rows), shape, taken)

    def expected(self, row: Row, shape: Shape) -> float:
        """Return the tokens that a step of this shape is expected to emit for a row, at least 1."""
        if shape == PLAIN or not row.drafts:
            return 1.0
        if row.match is not None:
            return self.matches.expected(shape.nodes, row.match)
        found = self.matches.expected(shape.nodes, row.lookup)
        return found if shape.of_host else max(found, self._drafted(row, shape.nodes))

    def _drafted(self, row: Row, nodes: int) -> float:
        """Return the tokens expected of a tree that the step drafts."""
        own, total, reached = self._own.get(row.request), 1.0, 1.0
        for level, chance in enumerate(self._all_chances(nodes), start=1):
            if own is not None and own.steps >= OWN_AFTER:
                chance = own.chance(0, level, chance, OWN_PRIOR)
            reached *= chance
            total += reached
        return total

    def _all_chances(self, nodes: int) -> list[float]:
        """Return the engine's chance at each depth of a tree of this size."""
        if nodes not in self._chances:
            levels = range(1, self.trees[nodes] + 1)
            pooled = [self.everyone.chance(0, level, FIRST_CHANCE, OWN_AFTER) for level in levels]
            self._chances[nodes] = [
                self.everyone.chance(nodes, level, prior, OWN_AFTER)
                for level, prior in zip(levels, pooled, strict=True)
            ]
        return self._chances[nodes]

    def decided(self, shapes: Sequence[Shape]) -> Shape | None:
        """Return the shape of the next step if it does not depend on what there is to verify, else None."""
        if self.forced is not None:
            return self.forced(shapes)
        return PLAIN if len(shapes) == 1 else None

    def choose(self, kind: Kind, shapes: Sequence[Shape], rows: Sequence[Row]) -> Choice:
        """Return the shape of the next step, one of `shapes`, which stand as `Sizes.shapes_of` has them."""
        if not any(row.drafts and row.match != 0 for row in rows):
            return Choice(PLAIN)
        if not self.adaptive:
            return self.with_lookups(Choice(max(shapes)), rows)
        return self.with_lookups(self._best(kind, shapes, rows), rows)

    def with_lookups(self, choice: Choice, rows: Sequence[Row]) -> Choice:
        """Return a choice of a shape with that of each row's tree; if all are the host's, the step drafts nothing."""
        shape = choice.shape
        if shape == PLAIN or not any(row.lookup for row in rows):
            return choice
        takes: Callable[[Row], bool] = lambda row: (  # noqa: E731
            self.forced_lookup() if self.forced_lookup is not None
            else self.matches.expected(shape.nodes, row.lookup) > self._drafted(row, shape.nodes)
        )  # fmt: skip
        found = tuple([bool(row.lookup) and row.drafts and (shape.of_host or takes(row)) for row in rows])
        return choice._replace(shape=Shape(shape.nodes, False) if all(found) else shape, lookups=found)

    def _best(self, kind: Kind, shapes: Sequence[Shape], rows: Sequence[Row]) -> Choice:
        """Return the shape with the most expected tokens a second, or another one to learn of."""
        speeds = {s: sum(self.expected(row, s) for row in rows) / self._seconds(kind, s) for s in shapes}
        stay = self._shape if self._shape in speeds else PLAIN
        best = max(shapes, key=speeds.__getitem__)
        if best != stay and speeds[best] > speeds[stay] * (1.0 if best == PLAIN else GAIN):
            stay = best
        self._shape, self._pace = stay, 1.0 / speeds[stay]
        probe = self._probe(kind, shapes, len(rows))
        return Choice(stay) if probe is None else Choice(probe, True)

    def _seconds(self, kind: Kind, shape: Shape) -> float:
        """Return the time of a step; one for which nothing is drafted takes no more than the same with drafting."""
        seconds = self.times.of(kind, shape)
        seconds = min(seconds, self.times.of(kind, Shape(shape.nodes, True))) if shape.of_host else seconds
        return seconds + self.returns.of(kind.batch, shape)

    def _probe(self, kind: Kind, shapes: Sequence[Shape], rows: int) -> Shape | None:
        """Return another shape to try, None where nothing is to be learned or probes have cost enough.

        What one will cost is estimated as if it emitted what plain steps do, one token for each of the rows.
        """
        others = [s for s in shapes if s != self._shape and not s.of_host and self.times.stale(kind, s)]
        if not others:
            return None
        probe = others[self._probed % len(others)]
        cost = self.times.of(kind, probe) - rows * self._pace
        return probe if self.probing + max(cost, 0.0) <= PROBES * self.spent else None

    def landed(self, kind: Kind, choice: Choice, seconds: float, *, emitted: int, catching_up: float = 0.0) -> None:
        """Take in how long a step took for its tokens, and the drafter before it for what plain steps had left.

        Not to be called for a step that compiled something or waited for pages.
        """
        self.times.add(kind, choice.shape, seconds)
        if self.forced is not None:
            return  # what was not chosen earns no probes
        self.returns.add(kind.batch, choice, catching_up)
        self.spent = HORIZON * self.spent + seconds + catching_up
        self.probing *= HORIZON
        if choice.probe or self._after_probe:  # the return from a probe is its cost too
            self.probing += catching_up
        if choice.probe:
            self.probing += max(seconds - emitted * self._pace, 0.0)
            self._probed += 1
        self._after_probe = choice.probe

    def learn(self, row: Row, nodes: int, emitted: int) -> None:
        """Take in how many tokens a tree of this size, which the step has drafted, has emitted for a row."""
        if not row.drafts:
            return
        self._chances.clear()
        self.everyone.learn(nodes, self.trees[nodes], emitted - 1)
        if (own := self._own.get(row.request)) is None:
            own = self._own[row.request] = Acceptance(OWN_KEEP)
        own.learn(nodes, self.trees[nodes], emitted - 1)
