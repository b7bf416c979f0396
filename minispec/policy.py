"""Which shape the next step has: plain, or one of the sizes of tree that the engine was made with.

A tree costs the time of drafting and reading its nodes, and gives the tokens that are accepted. This time and this gain
change with the batch, the length and kind of the texts, and the machine. The one idea is to measure both in the steps
themselves. `Times` holds the times of real steps, `Acceptance` and `Matches` hold what real trees emitted. The policy
takes the shape with the most expected tokens a second over the whole batch.

A request's tree is drafted on the device within the step (by a head; here a draft model counts as a head), or it is
proposed on the host before the step (by a host drafter, or by a lookup beside a head: `lookup.py`). With lookups, each
request verifies the tree that promises more. Then there are also shapes in which the head does not run: every request
verifies the tree looked up for it, or its root alone if there is none (`Shape.of_host`).

A tree proposed on the host exists before the step. So even if the step does not verify this tree, the text shows later
how many tokens the tree would have given. But nobody learns what a head would have drafted in a shape that was not
taken. So now and then a step tries another shape: a probe. All probes together may cost a hundredth of the time. A
change of shape must promise a gain of 3 %, so that noise does not move the engine to and fro. Only a change back to
plain steps needs no such gain, since speculation must never be slower than plain decoding. After steps without the
head, the head first takes in the backlog of these steps (`late.py`). The head's trees must pay for this catching up too
(`Returns`).

`expected` returns the expected tokens of one request in one shape. `before` chooses a step's shape and the host's trees
that the step verifies, and `after` learns from the result. Nothing here knows of tensors. The policy knows two things
of a request: its identity, and whether it wants drafts.

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

GAIN = 1.03  # how much faster another shape must be to replace the one in use
PROBES = 0.01  # the share of decode time that probes may cost
HORIZON = 0.999  # at each step `Policy.spent` and `Policy.probing` are multiplied by this, so that old steps fade
STALE = 100  # a shape that was not measured for so many steps of a kind may be probed
SAMPLES = 15  # a median is taken over so many of the newest times: of a shape, or of catching up
# The length of three lists in `Times`: the newest steps, among which the most used shape is found; this shape's newest
# times, whose median divides the time of another shape; and the newest of these ratios.
AROUND = 9
# After so many trees of the head, a request's own record of acceptance counts too. In the record over all requests the
# same number is the weight of a prior, in observations.
OWN_AFTER = 8
# The weight, in observations, of the record over all requests when it is mixed with a request's own record: few steps
# of one request say little.
OWN_PRIOR = 16
SHORT = 2  # a match of so few tokens may be chance
FIRST_RUN = 8.0  # the length of a run of steps that draft, assumed until a run has ended
FIRST_CHANCE = 0.6  # the chance that a draft is accepted, assumed until a draft was tried
# The factor by which a new observation reduces the weight of older ones: over all requests, and in a request's record.
ALL_KEEP, OWN_KEEP = 0.99, 0.97


class Kind(NamedTuple):
    """What the time of a step depends on beside its shape."""

    batch: int  # B, the number of requests to which the step is padded
    sampled: bool  # whether the step is slower than a greedy one, as `Engine.special` tells
    octave: int  # how many bits the length of the longest text has

    @classmethod
    def of(cls, batch: int, sampled: bool, rows: int) -> Kind:
        """Return the kind of a step whose longest text has `rows` rows; all lengths below 256 are one octave."""
        return cls(batch, sampled, max(rows, 128).bit_length())


class Row(NamedTuple):
    """One request of the next step: here a row is a row of the batch, not of keys and values."""

    request: object  # compared by identity
    # `Draft.match` of the tree that a host drafter proposes; 0 if it has no drafts. None: a head drafts in the step.
    match: int | None = None
    wants: bool = True  # False: the request verifies no drafts, whatever the shape
    # `Draft.match` of the tree looked up for the request beside the head; 0: there is no such tree.
    lookup: int = 0

    @property
    def may_verify(self) -> bool:
        """Whether the step can verify drafts of this request; a head always has drafts."""
        return self.wants and self.match != 0


class Choice(NamedTuple):
    """The shape that was chosen for a step, and why."""

    shape: Shape
    probe: bool = False  # whether the shape was chosen to measure its time
    lookups: Sequence[bool] = ()  # for each row: whether the looked-up tree replaces the head's; empty: in no row


@dataclass(frozen=True)
class Planned:
    """The choice of `before`, and what `after` needs to learn from it."""

    kind: Kind
    choice: Choice
    rows: Mapping[Request, tuple[Row, Draft | None]]  # with each row, the tree that the host offers, verified or not
    of_host: frozenset[Request]  # requests that verify the looked-up tree, not the head's
    # The host's trees to verify, one for each request. If the drafter is a head with lookups, a request that does not
    # verify its looked-up tree has NOTHING here. Other drafters: empty if the host was not asked, or offered no trees.
    drafts: Sequence[Draft]

    def verified(self, request: Request) -> tuple[str | None, int]:
        """Return whose drafts a request verifies ("head": those drafted in the step; None: no drafts), and how many."""
        (row, offered), shape = self.rows[request], self.choice.shape
        if shape == PLAIN or not row.may_verify:
            return None, 0
        if offered is not None and (row.match is not None or request in self.of_host):
            return offered.source, len(offered.tokens[: shape.nodes]) - 1
        return ("head", shape.nodes - 1) if shape.drafts else (None, 0)


class Times:
    """The times of steps by kind and shape: medians of the newest measurements.

    Two shapes are seldom measured in the same minute, and a machine that others use too may be half as fast in the next
    minute. In that minute the most used shape would look slow beside a shape that was measured before. So the time of
    any other shape is kept as a ratio to the newest times of the most used shape.
    """

    def __init__(self) -> None:
        self._samples: dict[Kind, dict[Shape, deque[float]]] = defaultdict(dict)
        self._newest: dict[Kind, deque[Shape]] = defaultdict(lambda: deque(maxlen=AROUND))  # shapes of the newest steps
        self._used: dict[Kind, Shape] = {}  # the most used shape of the newest steps
        # The ratios of the first shape's times to the second's.
        self._multiples: dict[tuple[Kind, Shape, Shape], deque[float]] = defaultdict(lambda: deque(maxlen=AROUND))
        self._steps: dict[Kind, int] = defaultdict(int)  # how many steps of the kind were measured
        self._last: dict[tuple[Kind, Shape], int] = {}  # the number of the step in which the shape was last measured
        self._medians: dict[tuple[object, ...], float] = {}  # cached medians of `_samples` and `_multiples`

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

    def stale(self, kind: Kind, shape: Shape) -> bool:
        """Return whether this shape was not measured in the last STALE steps of the kind."""
        last = self._last.get((kind, shape))
        return last is None or self._steps[kind] - last >= STALE

    def of(self, kind: Kind, shape: Shape) -> float:
        """Return the seconds of a step: measured, or estimated from the nearest kind in which the shape was measured.

        The estimate is scaled by the ratio of a shape that was measured in both kinds. A shape that was never measured
        with this batch size is assumed to be as fast as the kind's fastest shape, so that it is tried.
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
        if key not in self._medians:
            self._medians[key] = statistics.median(values)
        return self._medians[key]


class Acceptance:
    """How often a draft was accepted lately, if its parent was accepted, by size of tree and depth."""

    def __init__(self, keep: float) -> None:
        """`keep`: the factor by which a new observation reduces the weight of older ones."""
        self.keep, self.steps = keep, 0
        self._tried: dict[tuple[int, int], float] = defaultdict(float)  # by nodes of the tree and depth
        self._held: dict[tuple[int, int], float] = defaultdict(float)  # how many of the tried drafts were accepted

    def learn(self, nodes: int, depth: int, accepted: int) -> None:
        """Count a tree with so many nodes and this depth, `accepted` of whose drafts were accepted."""
        self.steps += 1
        for level in range(1, min(depth, accepted + 1) + 1):
            for key in ((nodes, level), (0, level)):  # 0: all sizes together
                self._tried[key] = self.keep * self._tried[key] + 1
                self._held[key] = self.keep * self._held[key] + (accepted >= level)

    def chance(self, nodes: int, level: int, prior: float, weight: float) -> float:
        """Return the chance of acceptance at depth `level`; the prior counts as `weight` observations."""
        key = (nodes, level)
        return (self._held.get(key, 0.0) + weight * prior) / (self._tried.get(key, 0.0) + weight)


class Matches:
    """The mean number of tokens that trees proposed on the host emit, by size and class of match (`Draft.match`).

    Such a tree comes from a host drafter, or from a lookup beside a head. A tree that was not verified counts with the
    tokens that it would have emitted. The mean begins with a guess, which counts as `guess_weight` observations; later
    the newest counts as `rate`. Trees give one token or all of theirs, so a mean of few would often promise too much,
    and the policy takes the trees that promise most.
    """

    rate = 0.03  # the least weight of the newest observation in the mean
    guess_weight = 4

    def __init__(self) -> None:
        # By nodes of the tree and class of match: the mean, and its number of observations with those of the guess.
        self._means: dict[tuple[int, int], tuple[float, int]] = {}

    def expected(self, nodes: int, match: int) -> float:
        """Return the mean number of tokens that such a tree emits; a guess until one of its class was seen."""
        return self._mean(nodes, match)[0] if match else 1.0

    def learn(self, nodes: int, match: int, emitted: int) -> None:
        """Add the tokens that a tree emitted to the mean."""
        mean, seen = self._mean(nodes, match)
        self._means[nodes, match] = mean + max(self.rate, 1 / (seen + 1)) * (emitted - mean), seen + 1

    def _mean(self, nodes: int, match: int) -> tuple[float, int]:
        worth = 0.5 if match > 0 else 0.2  # of each token beyond SHORT
        guess = min(1.0 + worth * max(abs(match) - SHORT, 0), float(nodes))
        return self._means.get((nodes, match), (guess, self.guess_weight))


class Returns:
    """The cost of drafting again after steps that did not draft: the time in which the head takes in its backlog.

    This time is spent once before a run of steps that draft, so it is divided by the mean length of the newest runs. A
    step whose trees are all looked up does not draft.
    """

    rate = 0.1  # the weight of the newest run in the mean

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))  # by batch size
        self._steps: dict[int, float] = defaultdict(lambda: FIRST_RUN)  # mean length of a run in steps, by batch size
        self._run, self._behind = 0, False  # steps of the present run; whether the newest step did not draft

    def add(self, batch: int, choice: Choice, seconds: float) -> None:
        """Count a step, and the seconds of catching up before it. Probes neither extend nor end a run."""
        drafts = choice.shape.drafts
        if drafts and self._behind:
            self._seconds[batch].append(seconds)
        self._behind = not drafts
        if choice.probe:
            return
        if drafts:
            self._run += 1
        elif self._run:
            self._steps[batch] += self.rate * (self._run - self._steps[batch])
            self._run = 0

    def of(self, batch: int, shape: Shape) -> float:
        """Return the seconds of catching up to add to the time of the next step if it has this shape."""
        if not shape.drafts or not self._behind or batch not in self._seconds:
            return 0.0
        return statistics.median(self._seconds[batch]) / self._steps[batch]


class Policy:
    """Chooses the shape of every step, and learns from every step."""

    def __init__(
        self, trees: Mapping[int, int], adapts_from: float, looks_up: bool = False,
        allows: Callable[[int, int], bool] | None = None,
    ) -> None:  # fmt: skip
        """`trees`: the depth of each size of tree, by nodes.

        adapts_from: the smallest batch whose shapes are chosen. Smaller ones have the largest tree, if any drafts.
        looks_up: whether a row takes either a looked-up tree or the head's. allows: whether a batch of so many requests
        may draft trees of so many nodes; None: any may. The attribute `forced` is for tests and
        benchmarks: if set, this function chooses the shape of each step in which some request wants drafts.
        """
        self.trees, self.adapts_from, self.looks_up, self.allows = dict(trees), adapts_from, looks_up, allows
        self.times, self.matches, self.everyone = Times(), Matches(), Acceptance(ALL_KEEP)
        self.returns = Returns()
        self.forced: Callable[[Sequence[Shape]], Shape] | None = None
        self.spent = self.probing = 0.0  # decayed sums: the seconds of all decode steps, and the part that probes cost
        self._own: weakref.WeakKeyDictionary[object, Acceptance] = weakref.WeakKeyDictionary()  # each request's record
        # For each request the tree that `follow` follows, with the tokens that the text has gained since.
        self._open: weakref.WeakKeyDictionary[object, tuple[Draft, list[int]]] = weakref.WeakKeyDictionary()
        self._shape = max((Shape(nodes, True) for nodes in self.trees), default=PLAIN)  # the shape in use
        self._probed = 0  # how many probes there were since the start
        self._after_probe = False  # whether the newest step was a probe
        self._pace = 0.0  # expected seconds a token, over the whole batch, with the shape in use
        self._chances: dict[int, list[float]] = {}  # the results of `_all_chances`, kept until `everyone` learns

    def before(
        self, kind: Kind, shapes: Sequence[Shape], requests: Sequence[Request], offer: Callable[[], Sequence[Draft]]
    ) -> Planned:
        """Choose the shape of the next step, one of `shapes`, and which of the host's trees it verifies.

        offer: returns the trees of `Drafter.host_drafts` for these requests; not called if the step is sure to be
        plain.
        """
        if self.allows is not None:
            shapes = [s for s in shapes if not s.drafts or s == PLAIN or self.allows(len(requests), s.nodes)]
        fixed = self.decided(shapes) if any(r.speculative for r in requests) else PLAIN
        drafts = () if fixed == PLAIN else offer()
        offered: Sequence[Draft | None] = drafts or [None] * len(requests)
        rows = {r: (self._row(r, draft), draft) for r, draft in zip(requests, offered, strict=True)}
        known = [row for row, _ in rows.values()]
        if fixed is None:
            choice = self.choose(kind, shapes, known)
        else:
            choice = self.with_lookups(Choice(fixed), known)
        of_host = frozenset(r for r, takes in zip(requests, choice.lookups, strict=False) if takes)
        if self.looks_up:
            drafts = [d if d is not None and r in of_host else NOTHING for r, d in zip(requests, offered, strict=True)]
        return Planned(kind, choice, rows, of_host, drafts)

    def _row(self, request: Request, draft: Draft | None) -> Row:
        """Describe a request and the tree that the host offers for it."""
        wanted = request.speculative
        if draft is None or not self.looks_up:
            return Row(request, None if draft is None else draft.match, wanted)
        return Row(request, None, wanted, lookup=draft.match)

    def after(
        self, planned: Planned, emitted: Mapping[Request, Sequence[int]], seconds: float | None,
        catching_up: float = 0.0,
    ) -> None:  # fmt: skip
        """Learn the time of a step and the tokens that it emitted.

        seconds: None if this time included other work. catching_up: the seconds in which the drafter caught up first.
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
            self.matches.learn(nodes, draft.match, draft.emits(seen, nodes))

    @property
    def nodes(self) -> int:
        """The nodes of trees in the shape in use; 1 if steps are plain."""
        return self._shape.nodes if self._shape.drafts else 1

    def restart(self, seconds: Mapping[tuple[int, Shape], float], rows: int) -> None:
        """Forget all times, and begin with `seconds`, measured for each batch and shape on texts of `rows` rows."""
        self.times = Times()
        for (batch, shape), taken in seconds.items():
            self.times.add(Kind.of(batch, False, rows), shape, taken)

    def expected(self, row: Row, shape: Shape) -> float:
        """Return the tokens that a step of this shape is expected to emit for a row, at least 1."""
        if shape == PLAIN or not row.wants:
            return 1.0
        if row.match is not None:
            return self.matches.expected(shape.nodes, row.match)
        found = self.matches.expected(shape.nodes, row.lookup)
        return found if shape.of_host else max(found, self._drafted(row, shape.nodes))

    def _drafted(self, row: Row, nodes: int) -> float:
        """Return the expected tokens of a row from a tree of the head."""
        own, total, reached = self._own.get(row.request), 1.0, 1.0
        for level, chance in enumerate(self._all_chances(nodes), start=1):
            if own is not None and own.steps >= OWN_AFTER:
                chance = own.chance(0, level, chance, OWN_PRIOR)
            reached *= chance
            total += reached
        return total

    def _all_chances(self, nodes: int) -> list[float]:
        """Return, for each depth of a tree with so many nodes, the chance of acceptance over all requests."""
        if nodes not in self._chances:
            levels = range(1, self.trees[nodes] + 1)
            pooled = [self.everyone.chance(0, level, FIRST_CHANCE, OWN_AFTER) for level in levels]
            self._chances[nodes] = [
                self.everyone.chance(nodes, level, prior, OWN_AFTER)
                for level, prior in zip(levels, pooled, strict=True)
            ]
        return self._chances[nodes]

    def decided(self, shapes: Sequence[Shape]) -> Shape | None:
        """Return the shape of the next step if it does not depend on the drafts, else None."""
        if self.forced is not None:
            return self.forced(shapes)
        return PLAIN if len(shapes) == 1 else None

    def choose(self, kind: Kind, shapes: Sequence[Shape], rows: Sequence[Row]) -> Choice:
        """Choose one of `shapes` for the next step, and each row's tree."""
        if not any(row.may_verify for row in rows):
            return Choice(PLAIN)
        if kind.batch < self.adapts_from:
            return self.with_lookups(Choice(max(shapes)), rows)
        return self.with_lookups(self._best(kind, shapes, rows), rows)

    def with_lookups(self, choice: Choice, rows: Sequence[Row]) -> Choice:
        """Complete a choice with the tree that each row verifies; if all are looked up, the shape drafts nothing."""
        shape = choice.shape
        if shape == PLAIN or not any(row.lookup for row in rows):
            return choice
        found = tuple([self._takes_lookup(row, shape) for row in rows])
        return choice._replace(shape=Shape(shape.nodes, False) if all(found) else shape, lookups=found)

    def _takes_lookup(self, row: Row, shape: Shape) -> bool:
        """Return whether a row verifies the tree that was looked up for it, and not the head's."""
        if not row.lookup or not row.wants:
            return False
        return shape.of_host or self.matches.expected(shape.nodes, row.lookup) > self._drafted(row, shape.nodes)

    def _best(self, kind: Kind, shapes: Sequence[Shape], rows: Sequence[Row]) -> Choice:
        """Return the shape with the most expected tokens a second, or a probe."""
        speeds = {s: sum(self.expected(row, s) for row in rows) / self._seconds(kind, s) for s in shapes}
        stay = self._shape if self._shape in speeds else PLAIN
        best = max(shapes, key=speeds.__getitem__)
        if best != stay and speeds[best] > speeds[stay] * (1.0 if best == PLAIN else GAIN):
            stay = best
        self._shape, self._pace = stay, 1.0 / speeds[stay]
        probe = self._probe(kind, shapes, len(rows))
        return Choice(stay) if probe is None else Choice(probe, True)

    def _seconds(self, kind: Kind, shape: Shape) -> float:
        """Return the time of a step, catching up included.

        A shape whose trees are all looked up counts as no slower than the shape with as many nodes in which the head
        drafts.
        """
        seconds = self.times.of(kind, shape)
        seconds = min(seconds, self.times.of(kind, Shape(shape.nodes, True))) if shape.of_host else seconds
        return seconds + self.returns.of(kind.batch, shape)

    def _probe(self, kind: Kind, shapes: Sequence[Shape], rows: int) -> Shape | None:
        """Return another shape to try; None if no shape's time is stale, or if probes have cost enough.

        The cost of a probe is estimated as if the probe emitted one token a row, as plain steps do.
        """
        others = [s for s in shapes if s != self._shape and not s.of_host and self.times.stale(kind, s)]
        if not others:
            return None
        probe = others[self._probed % len(others)]
        cost = self.times.of(kind, probe) - rows * self._pace
        return probe if self.probing + max(cost, 0.0) <= PROBES * self.spent else None

    def landed(self, kind: Kind, choice: Choice, seconds: float, *, emitted: int, catching_up: float = 0.0) -> None:
        """Add the time of a step to times and accounts; catching_up: the seconds in which the drafter caught up first.

        Do not call it for a step that compiled something or waited for pages.
        """
        self.times.add(kind, choice.shape, seconds)
        if self.forced is not None:
            return  # a forced step is no choice, and earns no probes
        self.returns.add(kind.batch, choice, catching_up)
        self.spent = HORIZON * self.spent + seconds + catching_up
        self.probing *= HORIZON
        if choice.probe or self._after_probe:  # catching up for a probe, or for the step after it, is a cost of probing
            self.probing += catching_up
        if choice.probe:
            self.probing += max(seconds - emitted * self._pace, 0.0)
            self._probed += 1
        self._after_probe = choice.probe

    def learn(self, row: Row, nodes: int, emitted: int) -> None:
        """Learn how many tokens the head's tree of so many nodes emitted for a row."""
        if not row.wants:
            return
        self._chances.clear()
        self.everyone.learn(nodes, self.trees[nodes], emitted - 1)
        if (own := self._own.get(row.request)) is None:
            own = self._own[row.request] = Acceptance(OWN_KEEP)
        own.learn(nodes, self.trees[nodes], emitted - 1)
