"""What a drafter is: anything that proposes a tree and is told what the target made of it.

A drafter is a class with the attributes and the calls of a protocol below. The engine asks for a tree before every
target forward and reports after EVERY one, prefill chunks included, so "draft prefill" and "draft extend" are no ideas
of their own. Plain decoding is the drafter `none`: its tree is the root alone, and nothing in the engine asks whether
decoding is speculative.

Drafters come in two kinds. One works on token lists on the host (`on_host`, like `ngram.py`): it may decline a step,
and `Payoff` decides whether the trees it offers are worth their cost. The other works on the device, inside the step
(`beam.py` and its heads, `standalone.py`).

Read next: `ngram.py` for a drafter, `engine.py` for the calls, docs/adding-a-drafter.md for one of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from minispec.attention import Plan
from minispec.kv import PagedKV
from minispec.tree import DraftTree


@dataclass(frozen=True)
class Draft:
    """One request's tree as lists, without padding: node 0 is the root, its parent -1; at most N nodes."""

    tokens: list[int]
    parents: list[int]
    match_length: int = 0  # how much of the context the drafter recognised; longer is a better bet


class Batch(NamedTuple):
    """The device view of the rows of a decode step; slot 0 is padding."""

    slots: Tensor  # [B] int64
    lens: Tensor  # [B] int64, committed rows
    root: Tensor  # [B] int64, the newest committed token, whose row is not written yet
    # The pick at depth d has position lens + d + 1, and its noise is gumbel(seed, position, target id).
    temperature: Tensor | None = None  # [B] fp32, 0 for greedy rows; None: all are
    seed: Tensor | None = None  # [B] int64, given with temperature


class Committed(NamedTuple):
    """What a target forward has just committed: a prompt chunk or a verified path, padded to T rows."""

    slots: Tensor  # [C] int64, one per chunk or path; 0 is padding
    tokens: Tensor  # [B, T] int64, each row's own token
    following: Tensor  # [B, T] int64, the token AFTER each row's; the root at an end, never a sample mid-prompt
    positions: Tensor  # [B, T] int64
    features: Tensor | None  # [B, T, F], the drafter's taps at each row; None without taps
    ends: Tensor  # [C] int64, the last row of each chunk or path in the flattened [B * T]
    plan: Plan  # where the rows lie and what each sees
    prefill: bool  # chunks of prompts, packed into one row; else verified paths, a row each


class Drafter(Protocol):
    """What both kinds have. Slots are the engine's; a drafter keeps its state by slot."""

    name: str
    nodes: int  # N, root included: the static size of every tree
    depth: int  # longest path in edges; A = depth + 1 is the most tokens a step emits
    scratch: int  # draft KV rows needed beyond the committed length
    lookahead: int  # 1 if the draft KV at row i depends on token i + 1, else 0
    taps: tuple[int | str, ...]  # target layers whose INPUT it wants as features
    on_host: bool  # which of the two protocols below it follows

    def release(self, slot: int) -> None:
        """Forget a slot: its request ended or was retracted."""
        ...

    def clear(self) -> None:
        """Forget everything learned from past requests."""
        ...


class HostDrafter(Drafter, Protocol):
    """A drafter that works on token lists, between the steps."""

    def propose(self, slots: Sequence[int]) -> list[Draft]:
        """Return one tree per slot; the first token of each is the newest committed one."""
        ...

    def commit(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        """Take in the tokens just committed to a slot's text; `again` when a retracted request replays its own."""
        ...


class DeviceDrafter(Drafter, Protocol):
    """A drafter that works on tensors, inside the step: static shapes, nothing crosses to the host."""

    head: Any  # the module it drafts with, a head or a whole model
    kv_shape: tuple[int, int, int]  # of its own pages: layers, kv_heads, head_dim

    def compile_head(self, **options: Any) -> None:
        """Run the module through torch.compile from now on."""
        ...

    def attach(self, kv: PagedKV, attend_kind: Any, batch_sizes: Sequence[int]) -> None:
        """Allocate pages and per-slot state beside the target's, once, before the first step."""
        ...

    def propose(self, batch: Batch) -> DraftTree:
        """Return trees [B, N]; the root is given."""
        ...

    def commit(self, new: Committed) -> None:
        """Take in what a target forward has committed."""
        ...


class Plain:
    """The drafter `none`: no proposal, a tree of one node."""

    name = "none"
    nodes, depth, scratch, lookahead = 1, 0, 0, 0
    taps: tuple[int | str, ...] = ()
    on_host = True

    def propose(self, slots: Sequence[int]) -> list[Draft]:
        """Return the root alone; the engine knows its token."""
        return [Draft([-1], [-1]) for _ in slots]

    def commit(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        """Learn nothing."""

    def release(self, slot: int) -> None:
        """Keep nothing."""

    def clear(self) -> None:
        """Keep nothing."""


@dataclass
class Payoff:
    """Whether a batch's trees are worth a tree step: expected tokens against measured step times.

    A match of length w has an expected emission, a running mean over what such matches emitted lately, starting from
    an optimistic prior. A tree step pays when the emissions of the batch, over the plain step's one token a row,
    exceed the ratio of the two step times. A length that keeps being refused drifts back to its prior, and so is tried
    again: texts change.
    """

    rate: float = 0.1  # weight of the newest observation
    drift: float = 0.01  # how fast a refused length returns to its prior
    expected: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def prior(match_length: int) -> float:
        """Return the emission assumed of a match of this length before anything is known."""
        return 1.0 + 0.5 * match_length

    def worth(self, drafts: Sequence[Draft], time_ratio: float) -> bool:
        """Return whether to take a tree step; time_ratio is the tree step's time over the plain step's."""
        lengths = [draft.match_length if len(draft.tokens) > 1 else 0 for draft in drafts]
        if not any(lengths):
            return False
        if sum(self._of(w) for w in lengths) >= time_ratio * len(lengths):
            return True
        for w in set(lengths) - {0}:
            self.expected[w] = self._of(w) + self.drift * (self.prior(w) - self._of(w))
        return False

    def learn(self, match_length: int, emitted: int) -> None:
        """Take in what a tree of this match length emitted."""
        if match_length:
            mean = self._of(match_length)
            self.expected[match_length] = mean + self.rate * (emitted - mean)

    def _of(self, match_length: int) -> float:
        return self.expected.get(match_length, self.prior(match_length)) if match_length else 1.0
