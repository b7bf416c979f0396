"""Drafters: a drafter proposes trees, and it is told which tokens the target committed.

The engine calls one interface, `Drafter`. If a step has trees, the engine asks for them, before the step
(`host_drafts`) or within it (`propose`). The engine also reports every committed token, those of prompt chunks too,
within the step (`commit`) and when it is on the host (`observe`). So there are no separate phases such as the "draft
prefill" and "draft extend" of other engines. Tokens of steps that do not run the drafter are reported later
(`late.py`).

A drafter that works on tensors, inside the step, derives from `Drafter` (`beam.py` with its heads, `standalone.py`).
A drafter that works on lists of tokens, between the steps, derives from `HostDrafter` (`ngram.py`). `HostTrees` makes a
`Drafter` of it, and checks its trees.

`policy.py`, not the drafter, chooses whether a step has trees and of which size. A drafter names the sizes it can
draft. A drafter on the device is told the size before it drafts; the trees of a drafter on the host are cut to it.

Read next: `ngram.py` for a drafter, `engine.py` for the calls, docs/adding-a-drafter.md to write your own.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor, nn

from minispec.attention import AttendKind, Plan
from minispec.compiled import CompileFor, Compiler, Small
from minispec.corpora import Corpora
from minispec.kv import KVShape, PagedKV
from minispec.request import Hints
from minispec.tree import PADDING, DraftTree, problem

logger = logging.getLogger("minispec")


@dataclass(frozen=True)
class Draft:
    """One request's tree as lists, without padding: node 0 is the root, its parent -1; at most N nodes."""

    tokens: list[int]
    parents: list[int]
    # How many of the text's last tokens the drafter recognised; with more of them the tree is a better bet. Trees of
    # equal `match_length` are one class, and the policy learns for each class how many tokens its trees give.
    match_length: int = 0
    # Who proposed the tree, for traces and counts: "lookup" if it was found in a text. Not compared by ==.
    source: str = field(default="host", compare=False)
    corpus: bool = False  # whether that text is of an external corpus

    @property
    def match(self) -> int:
        """The class of match: `match_length`, but at least 1 for a tree with drafts, and 0 for a root alone.

        The classes of trees from an external corpus are negative: there a match of as many tokens holds less often.
        """
        if len(self.tokens) == 1:
            return 0
        return -self.match_length if self.corpus else max(self.match_length, 1)

    def cut(self, nodes: int) -> Draft:
        """Return the first `nodes` nodes, which form a tree, since parents precede children."""
        return replace(self, tokens=self.tokens[:nodes], parents=self.parents[:nodes])

    def holds(self, tokens: Sequence[int], nodes: int | None = None) -> int:
        """Return how many of `tokens`, from the first on, form a path below the root of this tree, cut to `nodes`."""
        end, at = len(self.tokens[:nodes]), 0
        for count, token in enumerate(tokens):
            children = (n for n in range(at + 1, end) if self.tokens[n] == token and self.parents[n] == at)
            at = next(children, 0)
            if not at:
                return count
        return len(tokens)


NOTHING = Draft([PADDING], [-1])  # a root alone; the step writes the root's token


class TreeSize(NamedTuple):
    """The static size of a tree."""

    nodes: int  # N, root included
    depth: int  # the edges on the longest path that the drafter itself makes; a looked-up tree may be deeper
    rounds: int | None = None  # S, the rounds of drafting; None: the trees are not grown in rounds


class Batch(NamedTuple):
    """The device view of the requests of a decode step; slot 0 is padding."""

    slots: Tensor  # [B] int64
    lens: Tensor  # [B] int64, how many rows are committed
    root: Tensor  # [B] int64, the newest token of the text, whose row is not committed yet
    tree: DraftTree  # [B, N] each, the host's trees for this step; padding for a request for which the host has none
    # The two tensors below determine the noise of picks. A token picked at a node of depth d has position lens + d + 1,
    # and a candidate there the noise gumbel(seed, position, id), by its id in the target's vocabulary.
    temperature: Tensor | None = None  # [B] fp32, 0 for greedy requests; None: all requests are greedy
    seed: Tensor | None = None  # [B] int64; None if temperature is None
    # [B, N] fp32, only for a trace: here a drafter that has probabilities writes the log-probability of each node's
    # path from the root.
    scores: Tensor | None = None


class Committed(NamedTuple):
    """The tokens that a forward pass of the target committed: prompt chunks or accepted paths, padded to T tokens."""

    slots: Tensor  # [C] int64, one for each of C chunks or paths; 0 is padding
    tokens: Tensor  # [B, T] int64, each row's own token
    following: Tensor  # [B, T] int64, the token after each row's own; at the end of the text this is the new root
    positions: Tensor  # [B, T] int64
    features: Tensor | None  # [B, T, F], the target's hidden states at the drafter's taps; None: it has no taps
    ends: Tensor  # [C] int64, the last row of each chunk or path in the flattened [B * T]
    plan: Plan  # which rows these are and what each sees
    prefill: bool  # True: chunks of prompts, packed, B = 1; False: accepted paths, one per batch entry


class Drafter(ABC):
    """The interface that the engine calls. The engine owns the slots; a drafter keeps its state by slot."""

    name: str
    nodes: int  # N, root included: the static size of the drafter's trees, of the largest if there are several sizes
    depth: int  # the edges on the longest path; A = depth + 1 is the most tokens that a step emits for a request
    rounds: int | None = None  # S, the rounds of drafting; None: the trees are not grown in rounds
    own_nodes: int | None = None  # nodes of the largest trees where no text is looked up beside them; None: as `nodes`
    smaller: tuple[TreeSize, ...] = ()  # further sizes of tree, ascending, smaller and no deeper
    topk: int | None = None  # K, the branches of a round; None: there are no rounds
    scratch: int = 0  # how many rows drafting writes beyond the committed ones, in the drafter's own memory
    lookahead: int = 0  # 1 if the drafter's row i depends on token i + 1, else 0
    # Which hidden states of the target the drafter reads as features. A number i stands for the input of layer i; the
    # number of layers stands for the output of the last layer, and `model.FINAL` for that output after the norm.
    taps: tuple[int | str, ...] = ()
    kv_shape: KVShape = KVShape(0, 0, 0)  # the shape of the drafter's own rows, which have the target's page numbers
    network: nn.Module | None = None  # the module that the drafter drafts with; `load/` packs its linear layers
    small = Small()  # the functions around the network; a drafter that has some sets its own in __init__
    commits: bool = True  # whether the engine calls `commit`; False saves the work for a drafter without device state
    corpora: Corpora | None = None  # the external corpora that drafts may come from, if it looks texts up
    # Whether `host_drafts` looks trees up beside those of `propose`; each request verifies one of the two trees.
    has_lookups: bool = False
    awaits_corpus: bool = False  # whether it does so only while an external corpus is loaded

    @property
    def trees(self) -> tuple[TreeSize, ...]:
        """The sizes of the drafter's trees, ascending; empty if its tree is the root alone."""
        largest = TreeSize(self.nodes, self.depth, self.rounds)
        return tuple(size for size in (*self.smaller, largest) if size.nodes > 1)

    @property
    def reads_text(self) -> bool:
        """Whether the next drafts need this step's tokens on the host; if so, steps cannot overlap."""
        return type(self).observe is not Drafter.observe

    def compile(self, compiler: Compiler) -> None:  # noqa: B027  a drafter without a network has nothing to compile
        """Run the network compiled by `compiler` from now on."""

    def compile_small(self, compiler: Compiler, choice: CompileFor) -> None:
        """Let `compiler` compile the code around the network, for the steps that `choice` names."""
        self.small.compile(compiler, choice)

    def expect(self, longest: int) -> None:  # noqa: B027  most drafters take in paths of any length
        """Prepare, before `attach`, for accepted paths of up to `longest` tokens, since looked-up trees may be deep."""

    def attach(  # noqa: B027  a drafter without tensors has nothing to allocate
        self, kv: PagedKV, attend_kind: AttendKind, batch_sizes: Sequence[int], chunk_counts: Sequence[int]
    ) -> None:
        """Allocate the drafter's pages, per-slot state and plans, once, before the first step.

        batch_sizes: the batch sizes of decode steps. chunk_counts: for each size of prefill step, how many
        chunks it may have at most.
        """

    def attend_paths(self, plan: Plan) -> None:  # noqa: B027  most drafters attend to nothing when they take in paths
        """Make the attention for a plan of accepted paths, before it is first filled."""

    def host_drafts(self, slots: Sequence[int]) -> Sequence[Draft]:
        """Propose a tree per slot on the host, before a decode step.

        A drafter that drafts inside the step returns none, unless it `has_lookups`: then it offers trees here as well.
        The step may still be plain, or cut the trees to fewer nodes, or verify other trees for some slots.
        """
        return ()

    @abstractmethod
    def propose(self, batch: Batch) -> DraftTree:
        """Return trees of the shape [B, N] of `batch.tree`; N is one of the sizes in `trees`, the root is `batch.root`.

        If the drafter `has_lookups`, `batch.tree` has a looked-up tree for each request that verifies one, and a root
        alone for the others.

        This runs inside the step: shapes are static, and the host reads no value. On CUDA the step is captured once and
        replayed without this code, so the code must not depend on Python numbers that change. State that outlives a
        step is in tensors that `attach` allocates and this code writes in place.
        """

    def confidences(self, slot: int) -> Sequence[float]:
        """Return, by depth, how likely the drafter finds its newest drafts for a slot; empty if it does not say.

        A number is the chance that the target accepts a draft at this depth if it accepts the one above. This runs on
        the host and must not wait for the device; while steps overlap, the newest drafts may be of either step.
        """
        return ()

    def commit(self, new: Committed) -> None:  # noqa: B027  a drafter without state on the device takes nothing in
        """Take in, on the device, what the target committed. This runs inside the step; see `propose`."""

    def observe(  # noqa: B027  a drafter that reads no text learns nothing from it
        self, slot: int, tokens: Sequence[int], again: bool = False
    ) -> None:
        """Take in, on the host, the tokens added to a slot's text: a prompt's, or those that a step emitted.

        again: whether a retracted request replays its own text.
        """

    def hint(self, slot: int, hints: Hints) -> None:  # noqa: B027  see `observe`
        """Take in what a slot's request says of its drafts; called before `observe`, once for each request."""

    def release(self, slot: int) -> None:  # noqa: B027  state that is overwritten before it is read may stay
        """Forget a slot: its request ended or was retracted."""

    def clear(self) -> None:  # noqa: B027  a drafter that learns nothing from requests has nothing to forget
        """Forget everything learned from past requests."""


class Plain(Drafter):
    """The drafter `none`: it proposes nothing, so its tree is the root alone."""

    name, nodes, depth, commits = "none", 1, 0, False

    def propose(self, batch: Batch) -> DraftTree:
        return batch.tree


OLDER = {"draft": "propose", "observe": "commit"}  # the methods of a `HostDrafter` and their former names


class HostDrafter(ABC):
    """A drafter that works on lists of tokens, between the steps: derive from it, and set `nodes` and `depth`.

    A class that has the methods under their former names, `propose` and `commit`, works for one more version.
    """

    name: str
    nodes: int  # N, root included: the most nodes of a tree
    depth: int  # the edges on the longest path; A = depth + 1 is the most tokens that a step emits for a request

    corpora: Corpora | None = None  # as `Drafter.corpora`
    # Whether it gives nothing of a request with `Hints.private` to others. If not, it never hears of such requests.
    keeps_private = False

    def __init_subclass__(cls) -> None:
        """Let `draft` and `observe` call methods that the class has under their former names."""
        super().__init_subclass__()
        lacking = [new for new in OLDER if getattr(getattr(cls, new), "__isabstractmethod__", False)]
        for new in (older := [new for new in lacking if hasattr(cls, OLDER[new])]):
            setattr(cls, new, lambda self, *given, _old=OLDER[new], **named: getattr(self, _old)(*given, **named))
        if older:
            logger.warning("the drafter %s has methods under former names, which work for one more version: %s",
                           cls.__name__, ", ".join(f"{OLDER[new]} is {new} now" for new in older))  # fmt: skip

    @abstractmethod
    def draft(self, slots: Sequence[int]) -> list[Draft]:
        """Return one tree per slot; its first token is the newest token of the slot's text."""

    @abstractmethod
    def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        """Take in the tokens added to a slot's text; again: whether a retracted request replays its own text."""

    def hint(self, slot: int, hints: Hints) -> None:  # noqa: B027  a drafter may ignore hints
        """Take in what a slot's request says of its drafts; called before `observe`, once for each request."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Forget a slot: its request ended or was retracted."""

    def clear(self) -> None:  # noqa: B027  a drafter that keeps nothing of ended requests has nothing to forget
        """Forget everything learned from past requests."""


class HostTrees(Drafter):
    """A `HostDrafter` as a `Drafter`: its trees are checked, and uploaded with the step.

    A tree that breaks the invariant of `tree.py` would index tensors wrongly or break exactness. Such a tree is
    dropped, with an error in the log that names the drafter, and its request decodes plainly in that step.
    """

    commits = False

    def __init__(self, inner: HostDrafter, vocab_size: int, smaller: int | None = None) -> None:
        """smaller: the number of nodes to which trees may be cut; None if they are never cut."""
        self.inner, self.vocab_size = inner, vocab_size
        self.name, self.nodes, self.depth, self.corpora = inner.name, inner.nodes, inner.depth, inner.corpora
        self.smaller = () if smaller is None else (TreeSize(smaller, min(inner.depth, smaller - 1)),)
        self.refused = 0  # how many trees broke the invariant since the start
        self._ignored: set[int] = set()  # slots whose text the drafter never sees; they get no drafts

    def host_drafts(self, slots: Sequence[int]) -> list[Draft]:
        """Return the drafter's trees, with a root alone in place of each broken one."""
        heard = [slot for slot in slots if slot not in self._ignored]
        offered = self.inner.draft(heard)
        if len(offered) != len(heard):
            self._refuse(f"{len(offered)} trees for {len(heard)} requests")
            offered = []
        drafts = dict.fromkeys(slots, NOTHING)
        for slot, draft in zip(heard, offered, strict=False):
            if wrong := problem(draft.tokens, draft.parents, self.nodes, self.vocab_size):
                self._refuse(wrong)
            else:
                drafts[slot] = draft
        return [drafts[slot] for slot in slots]

    def _refuse(self, wrong: str) -> None:
        """Count a fault of the drafter, and log it, but seldom if there are many: they must not flood the log."""
        self.refused += 1
        if self.refused <= 10 or self.refused % 1000 == 0:
            logger.error("the drafter %s proposed what is no tree (%s), so its request decodes plainly in this step; "
                         "refused so far: %d", self.name, wrong, self.refused)  # fmt: skip

    def propose(self, batch: Batch) -> DraftTree:
        return batch.tree

    def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        if slot not in self._ignored:
            self.inner.observe(slot, tokens, again=again)

    def hint(self, slot: int, hints: Hints) -> None:
        if hints.private and not self.inner.keeps_private:
            self._ignored.add(slot)
        else:
            self.inner.hint(slot, hints)

    def release(self, slot: int) -> None:
        """Release the slot; its text may be read again."""
        if slot not in self._ignored:
            self.inner.release(slot)
        self._ignored.discard(slot)

    def clear(self) -> None:
        self.inner.clear()


def as_drafter(drafter: Drafter | HostDrafter, vocab_size: int, smaller: int | None = None) -> Drafter:
    """Return a `HostDrafter` wrapped for the engine, or a `Drafter` as it is; smaller: see `HostTrees`."""
    return HostTrees(drafter, vocab_size, smaller) if isinstance(drafter, HostDrafter) else drafter
