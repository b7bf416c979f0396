"""What a drafter is: anything that proposes a tree and is told what the target made of it.

The engine calls one interface, `Drafter`: it asks for a tree before a step that has one, and tells of every token that
was committed, prompt chunks included (of what plain steps committed, later: `late.py`), so that "draft prefill" and
"draft extend" are no ideas of their own. Plain decoding is the drafter `none`: its tree is the root alone, and nothing
in the engine asks whether decoding is speculative.

A drafter that works on tensors, inside the step, derives from `Drafter` (`beam.py` with its heads, `standalone.py`).
One that works on lists of tokens, between the steps, derives from `HostDrafter` (`ngram.py`). `HostTrees` wraps the
second kind once, so that the engine sees the first, and checks its trees.

Whether a step has a tree, and how large a one, is not the drafter's choice (`policy.py`). A drafter names the sizes
that it can draft; one on the device is told the size before it drafts, one on the host proposes and its tree is cut.

Read next: `ngram.py` for a drafter, `engine.py` for the calls, docs/adding-a-drafter.md for one of your own.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from minispec.attention import AttendKind, PagedAttend, Plan
from minispec.compiled import CompileFor, Compiler
from minispec.kv import KVShape, PagedKV
from minispec.tree import PADDING, DraftTree, problem

logger = logging.getLogger("minispec")


@dataclass(frozen=True)
class Draft:
    """One request's tree as lists, without padding: node 0 is the root, its parent -1; at most N nodes."""

    tokens: list[int]
    parents: list[int]
    match_length: int = 0  # how much of the context the drafter recognised; longer is a better bet

    @property
    def match(self) -> int:
        """The match length, which is at least 1 for whoever drafts anything, and 0 for a root alone."""
        return max(self.match_length, 1) if len(self.tokens) > 1 else 0

    def cut(self, nodes: int) -> Draft:
        """Return the tree of the first `nodes` nodes, which is one since parents come first."""
        return Draft(self.tokens[:nodes], self.parents[:nodes], self.match_length)

    def holds(self, tokens: Sequence[int], nodes: int | None = None) -> int:
        """Return how many of these tokens, the first ones, lie on a path below the root; of the first `nodes` nodes."""
        end, at = len(self.tokens[:nodes]), 0
        for count, token in enumerate(tokens):
            children = (n for n in range(at + 1, end) if self.tokens[n] == token and self.parents[n] == at)
            at = next(children, 0)
            if not at:
                return count
        return len(tokens)

    def emits(self, tokens: Sequence[int], nodes: int | None = None) -> int:
        """Return how many tokens this tree, cut to `nodes`, emits where the target picks `tokens` in turn."""
        return min(self.holds(tokens, nodes) + 1, len(tokens))


NOTHING = Draft([PADDING], [-1])  # a root alone, whose token the step knows


class TreeSize(NamedTuple):
    """The static size of a tree."""

    nodes: int  # N, root included
    depth: int  # longest path in edges
    steps: int | None = None  # rounds of drafting, for a drafter that grows its trees in rounds


class Batch(NamedTuple):
    """The device view of the requests of a decode step; slot 0 is padding."""

    slots: Tensor  # [B] int64
    lens: Tensor  # [B] int64, committed rows
    root: Tensor  # [B] int64, the newest committed token, whose row is not written yet
    tree: DraftTree  # [B, N] each, what the host drafted for this step; padding where it drafted nothing
    # The pick at depth d has position lens + d + 1, and its noise is gumbel(seed, position, target id).
    temperature: Tensor | None = None  # [B] fp32, 0 for greedy requests; None: all are
    seed: Tensor | None = None  # [B] int64, given with temperature
    # [B, N] fp32 where somebody watches: to be filled with each node's log-probability from the root, if there is one.
    scores: Tensor | None = None


class Committed(NamedTuple):
    """What a target forward has just committed: a prompt chunk or a verified path, padded to T tokens."""

    slots: Tensor  # [C] int64, one per chunk or path; 0 is padding
    tokens: Tensor  # [B, T] int64, each row's own token
    following: Tensor  # [B, T] int64, the token AFTER each row's; the root at an end, never a sample mid-prompt
    positions: Tensor  # [B, T] int64
    features: Tensor | None  # [B, T, F], the drafter's taps at each row; None without taps
    ends: Tensor  # [C] int64, the last row of each chunk or path in the flattened [B * T]
    plan: Plan  # where the rows lie and what each sees
    prefill: bool  # chunks of prompts, packed into one row; else verified paths, a row each


# ---- the interface that the engine calls -----------------------------------------------------------------------------


class Drafter(ABC):
    """A drafter as the engine sees it. Slots are the engine's; a drafter keeps its state by slot.

    In a decode step the engine calls `host_drafts`, then `propose` and `commit` inside the step, then `observe`.
    """

    name: str
    nodes: int  # N, root included: the static size of its trees, of the larger ones if there are two sizes
    depth: int  # longest path in edges; A = depth + 1 is the most tokens a step emits
    steps: int | None = None  # rounds of drafting, for a drafter that grows its trees in rounds
    smaller: TreeSize | None = None  # the other size, no deeper, that a step may ask for
    topk: int | None = None  # branches of a round
    scratch: int = 0  # draft KV rows needed beyond the committed length
    lookahead: int = 0  # 1 if the draft KV at row i depends on token i + 1, else 0
    taps: tuple[int | str, ...] = ()  # target layers whose INPUT it wants as features
    kv_shape: KVShape = KVShape(0, 0, 0)  # of its own pages, under the target's page table
    network: nn.Module | None = None  # what it drafts with, for whoever packs linear layers
    commits: bool = True  # whether `commit` is to be called: a drafter without state on the device saves the work
    on_host: bool = False  # whether trees come from `host_drafts`, and not from the step itself
    looks_up: bool = False  # whether `host_drafts` offers trees beside those of the step, of which a row takes one

    @property
    def trees(self) -> tuple[TreeSize, ...]:
        """The sizes of its trees, the smaller one first; none for a tree that is its root."""
        larger = TreeSize(self.nodes, self.depth, self.steps)
        return tuple(size for size in (self.smaller, larger) if size is not None and size.nodes > 1)

    @property
    def reads_text(self) -> bool:
        """Whether the next drafts need the tokens of this step on the host, so that steps cannot overlap."""
        return type(self).observe is not Drafter.observe

    def compile(self, compiler: Compiler) -> None:  # noqa: B027  a drafter without a network has nothing to compile
        """Run the network as `compiler` compiles it from now on."""

    def compile_small(self, compiler: Compiler, choice: CompileFor) -> None:  # noqa: B027  nor anything around one
        """Run what surrounds the network as `compiler` compiles it, where `choice` says so."""

    def attach(  # noqa: B027  a drafter without tensors has nothing to allocate
        self, kv: PagedKV, attend_kind: AttendKind, batch_sizes: Sequence[int], chunk_counts: Sequence[int]
    ) -> None:
        """Allocate pages, per-slot state and plans beside the target's, once, before the first step.

        batch_sizes: of the decode steps. chunk_counts: the most chunks that each of the prefill steps holds.
        """

    def attends(self, plan: Plan, prefill: bool) -> list[PagedAttend]:
        """Return the attention of each call of its network: in a prefill step of this plan, or in a decode step.

        In a decode step it is the plan of the accepted paths.
        """
        return []

    def host_drafts(self, slots: Sequence[int]) -> Sequence[Draft]:
        """Do the host's part before a decode step: propose a tree a slot, or none where the step itself drafts.

        The step may come out plain, or with trees cut to fewer nodes, or take another tree for some of the slots.
        """
        return ()

    @abstractmethod
    def propose(self, batch: Batch) -> DraftTree:
        """Return trees of the shape [B, N] of `batch.tree`; the root is given.

        A drafter that `looks_up` finds there the host's trees of the rows that take them, and roots alone elsewhere.
        Runs inside the step: static shapes, no look from the host. N is one of `trees`.

        On CUDA the step is captured once, and this code does not run again: it may keep no number of Python's that
        changes, and what it keeps from step to step is in tensors made by `attach` and written in place.
        """

    def commit(self, new: Committed) -> None:  # noqa: B027  a drafter without state on the device takes nothing in
        """Take in, on the device, what a target forward has committed; for this holds what `propose` says."""

    def observe(  # noqa: B027  a drafter that reads no text learns nothing from it
        self, slot: int, tokens: Sequence[int], again: bool = False
    ) -> None:
        """Take in, on the host, the tokens that were added to a slot's text: those a step emitted, or known ones.

        `again`: a retracted request replays its own text.
        """

    def predict(self, slot: int, tokens: Sequence[int]) -> None:  # noqa: B027  nor from what is expected of it
        """Take in, before anything else of a slot's text, what its output is expected to be like; a hint for drafts."""

    def ignore(self, slot: int) -> None:  # noqa: B027  a drafter that reads no text learns nothing for others
        """Learn nothing from the text of this slot until it is released, since others must not profit from it."""

    def release(self, slot: int) -> None:  # noqa: B027  what is written anew before it is read need not be forgotten
        """Forget a slot: its request ended or was retracted."""

    def clear(self) -> None:  # noqa: B027  a drafter that learns nothing from requests has nothing to forget
        """Forget everything learned from past requests."""


class Plain(Drafter):
    """The drafter `none`: no proposal, a tree of one node."""

    name, nodes, depth, commits = "none", 1, 0, False

    def propose(self, batch: Batch) -> DraftTree:
        return batch.tree


# ---- drafters that work on lists of tokens ---------------------------------------------------------------------------


class HostDrafter(ABC):
    """A drafter that works on lists of tokens, between the steps: derive from it, and set `nodes` and `depth`."""

    name: str
    nodes: int  # N, root included: the most nodes of a tree
    depth: int  # longest path in edges; A = depth + 1 is the most tokens a step emits

    @abstractmethod
    def propose(self, slots: Sequence[int]) -> list[Draft]:
        """Return one tree per slot; the first token of each is the newest committed one."""

    @abstractmethod
    def commit(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        """Take in the tokens just committed to a slot's text; `again` when a retracted request replays its own."""

    def predict(self, slot: int, tokens: Sequence[int]) -> None:  # noqa: B027  a drafter may do without the hint
        """Take in, before anything else of a slot's text, what its output is expected to be like."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Forget a slot: its request ended or was retracted."""

    def clear(self) -> None:  # noqa: B027  a drafter that learns nothing beyond its requests has nothing to forget
        """Forget everything learned from past requests."""


class HostTrees(Drafter):
    """The engine's view of a `HostDrafter`: its trees are checked, and uploaded with the step.

    A tree that breaks the rules of `tree.py` would index tensors wrongly or break exactness. It is dropped with an
    error in the log that names the drafter, and its request decodes plainly in that step, so nobody loses an answer.
    """

    on_host, commits = True, False

    def __init__(self, inner: HostDrafter, vocab_size: int, smaller: int | None = None) -> None:
        """`smaller`: the nodes of the smaller size to which its trees may be cut."""
        self.inner, self.vocab_size = inner, vocab_size
        self.name, self.nodes, self.depth = inner.name, inner.nodes, inner.depth
        self.smaller = None if smaller is None else TreeSize(smaller, min(inner.depth, smaller - 1))
        self.refused = 0  # trees that broke the rules, since the start
        self._ignored: set[int] = set()  # slots whose text the drafter never sees, and drafts nothing for

    def host_drafts(self, slots: Sequence[int]) -> list[Draft]:
        """Ask the drafter, and return its trees, roots alone in place of what is no tree."""
        heard = [slot for slot in slots if slot not in self._ignored]
        offered = self.inner.propose(heard)
        if len(offered) != len(heard):
            self._refuse(f"{len(offered)} trees for {len(heard)} requests")
            offered = []
        checked = {slot: self._checked(draft) for slot, draft in zip(heard, offered, strict=False)}
        return [checked.get(slot, NOTHING) for slot in slots]

    def _checked(self, draft: Draft) -> Draft:
        """Return the tree, or its root alone if it breaks a rule."""
        wrong = problem(draft.tokens, draft.parents, self.nodes, self.vocab_size)
        if wrong is None:
            return draft
        self._refuse(wrong)
        return NOTHING

    def _refuse(self, wrong: str) -> None:
        """Count what the drafter did wrong and log it; one that is always wrong must not flood the log."""
        self.refused += 1
        if self.refused <= 10 or self.refused % 1000 == 0:
            logger.error("the drafter %s proposed what is no tree (%s), so its request decodes plainly in this step; "
                         "refused so far: %d", self.name, wrong, self.refused)  # fmt: skip

    def propose(self, batch: Batch) -> DraftTree:
        return batch.tree

    def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        if slot not in self._ignored:
            self.inner.commit(slot, tokens, again=again)

    def predict(self, slot: int, tokens: Sequence[int]) -> None:
        if slot not in self._ignored:
            self.inner.predict(slot, tokens)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        if slot not in self._ignored:
            self.inner.release(slot)
        self._ignored.discard(slot)

    def ignore(self, slot: int) -> None:
        self._ignored.add(slot)

    def clear(self) -> None:
        self.inner.clear()


def as_drafter(drafter: Drafter | HostDrafter, vocab_size: int, smaller: int | None = None) -> Drafter:
    """Return what the engine takes: a `HostDrafter` in its wrapping, a `Drafter` as it is.

    smaller: the nodes to which trees of the host may be cut, where a step may have fewer than all.
    """
    return HostTrees(drafter, vocab_size, smaller) if isinstance(drafter, HostDrafter) else drafter
