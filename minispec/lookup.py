"""Texts looked up at next to no cost: as NGRAM, and as a second opinion beside a drafter with a network.

A head guesses at every text and is right for a token or two. Where a text repeats itself, or another text that was
seen, the words before say nearly for certain what follows, and for many tokens. The one idea: both propose, and row by
row the better bet is verified, the tree with the most expected tokens, as `policy.py` says. The trees of the host lie
in the step's inputs, and the step takes them in place of the head's where there are any. If every request takes the
host's, the head has no part in the step, and takes in the accepted paths before it drafts again (`late.py`).

Looking up must cost next to nothing while it finds nothing. So of a request's own text a dictionary tells where its
newest three or two tokens occurred last, which is a step of a microsecond; and the trie that all texts share
(`ngram.py`) is filled at its leisure, within a hundredth of the time. NGRAM alone does the same on a CPU (`Texts`),
unless flags give numbers: then it drafts whatever that costs, and knows every text as soon as it is there.

Lookup in the prompt: Saxena, prompt-lookup-decoding (2023); beside a head: SuffixDecoding (arXiv 2411.04975).
Read next: `ngram.py` for the trie, `beam.py` for the drafter beside it, `policy.py` for the choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from minispec.attention import AttendKind, PagedAttend, Plan
from minispec.beam import BeamDrafter
from minispec.compiled import CompileFor, Compiler
from minispec.drafter import NOTHING, Batch, Committed, Draft, Drafter, HostDrafter, HostTrees, TreeSize
from minispec.kv import PagedKV
from minispec.ngram import NgramDrafter
from minispec.tree import PADDING, DraftTree

SHARE = 0.01  # of the time between two steps, what lookups may take of it, indexing included
LONGEST_STEP = 0.1  # seconds; what lies between two steps beyond that was no step
KEYS = (3, 2)  # tokens that must agree for a place in a text to be looked at: better three, but two may do


class Echo:
    """One text, and for any two or three tokens of it the place behind their last occurrence."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens. The newest ones have nothing behind them yet and are not entered."""
        known = len(self.text)
        self.text += tokens
        for key in KEYS:
            for at in range(max(known, key), len(self.text)):
                self._behind[tuple(self.text[at - key : at])] = at

    def draft(self, after: Sequence[int], nodes: int, longest: int, shortest: int = 1) -> Draft:
        """Return the chain of at most `nodes` nodes that followed the last tokens of `after`; a root if nothing did.

        longest, shortest: tokens of a match; a longer one counts as `longest`, and a shorter one is none. Where a chain
        would leave the text, the text is periodic as far as one can see, and the chain goes on as if it were.
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
        return Draft([after[-1], *tokens], list(range(-1, len(tokens))), match)


class Texts(HostDrafter):
    """Each request's own text, what is expected of it, and the trie of all texts; the longest match drafts."""

    def __init__(self, shared: NgramDrafter) -> None:
        """`shared`: the drafter over the trie, which from here on indexes within its share of the time only."""
        self.shared, self.name, self.nodes, self.depth = shared, shared.name, shared.nodes, shared.depth
        self.shared.seconds = 0.0
        self._own: dict[int, Echo] = {}
        self._expected: dict[int, Echo] = {}
        self._began = time.perf_counter()  # the last proposals
        self._debt = 0.0  # seconds taken beyond the share

    def propose(self, slots: Sequence[int]) -> list[Draft]:
        """Return one tree per slot, roots where nothing is found, and index a little of what was said before."""
        now = time.perf_counter()
        credit = SHARE * min(now - self._began, LONGEST_STEP) - self._debt
        self._began, self.shared.seconds = now, max(0.0, credit)
        echoes = [self._echo(slot) for slot in slots]
        longest = self.shared.options.max_match
        open_ = [slot for slot, echo in zip(slots, echoes, strict=True) if echo.match < longest]
        shared = dict(zip(open_, self.shared.propose(open_), strict=True))
        drafts = [
            echo if echo.match >= (draft := shared.get(slot, NOTHING)).match else draft
            for slot, echo in zip(slots, echoes, strict=True)
        ]
        # What is not used is not saved up, and a debt that long was a pause of the machine.
        self._debt = min(max(time.perf_counter() - now - credit, 0.0), SHARE * LONGEST_STEP)
        return drafts

    def _echo(self, slot: int) -> Draft:
        """Return the better of what the slot's own text and what is expected of it say."""
        own, options = self._own[slot], self.shared.options
        draft = own.draft(own.text, self.nodes, options.max_match, options.min_match)
        if slot not in self._expected:
            return draft
        special = self._expected[slot].draft(own.text, self.nodes, options.max_match, options.min_match)
        return special if special.match >= draft.match else draft

    def commit(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        """Take in the next tokens of a slot's text."""
        started = time.perf_counter()
        self._own.setdefault(slot, Echo()).extend(tokens)
        self.shared.commit(slot, tokens, again=again)
        self._debt += time.perf_counter() - started

    def predict(self, slot: int, tokens: Sequence[int]) -> None:
        """Take in what a slot's output is expected to be like; only this slot is drafted from it."""
        expected = self._expected[slot] = Echo()
        expected.extend(tokens)

    def release(self, slot: int) -> None:
        """Forget a slot; what it added to the trie stays."""
        self._own.pop(slot, None)
        self._expected.pop(slot, None)
        self.shared.release(slot)

    def clear(self) -> None:
        self.shared.clear()


class Lookups(Drafter):
    """A drafter with a network, and the trees of `Texts` for the rows that take them.

    Its larger trees have N nodes for what a lookup finds, which may be one chain of them. If the network's trees have
    fewer nodes, they are padded to N.
    """

    looks_up = True

    def __init__(self, head: BeamDrafter, shared: NgramDrafter, vocab_size: int) -> None:
        """`shared` says with its number of nodes what N is, at least as many as the network's trees have."""
        assert shared.nodes >= head.nodes, "lookups have at least as many nodes as other trees"
        self.head, self.texts = head, HostTrees(Texts(shared), vocab_size)
        self.nodes, self.depth = shared.nodes, shared.nodes - 1
        head.expect(self.nodes)
        self.name, self.steps, self.topk, self.network = head.name, head.steps, head.topk, head.network
        self.taps, self.scratch, self.lookahead, self.kv_shape = head.taps, head.scratch, head.lookahead, head.kv_shape
        largest = head.trees[-1]
        widened = [] if largest.nodes == self.nodes else [largest._replace(nodes=self.nodes)]
        self._sizes = tuple([*head.trees, *widened][-2:])
        self._grown = {size.nodes: size.nodes for size in head.trees} | {self.nodes: largest.nodes}
        self.smaller = self._sizes[0] if len(self._sizes) > 1 else None

    @property
    def trees(self) -> tuple[TreeSize, ...]:
        """The sizes of trees, the smaller one first, and how deep the network's own are in them."""
        return self._sizes

    def attach(
        self, kv: PagedKV, attend_kind: AttendKind, batch_sizes: Sequence[int], chunk_counts: Sequence[int]
    ) -> None:
        self.head.attach(kv, attend_kind, batch_sizes, chunk_counts)

    def compile(self, compiler: Compiler) -> None:
        self.head.compile(compiler)

    def compile_small(self, compiler: Compiler, choice: CompileFor) -> None:
        self.head.compile_small(compiler, choice)

    def attends(self, plan: Plan, prefill: bool) -> list[PagedAttend]:
        return self.head.attends(plan, prefill)

    def host_drafts(self, slots: Sequence[int]) -> Sequence[Draft]:
        return self.texts.host_drafts(slots)

    def propose(self, batch: Batch) -> DraftTree:
        """Return the host's tree for each row that has one, and the network's for the others."""
        host = batch.tree
        grown = self._grown[host.tokens.shape[1]]
        tree = self.head.propose(batch._replace(tree=DraftTree(host.tokens[:, :grown], host.parents[:, :grown])))
        room = (0, host.tokens.shape[1] - grown)
        taken = host.tokens[:, 1:2] != PADDING
        return DraftTree(torch.where(taken, host.tokens, F.pad(tree.tokens, room, value=PADDING)),
                         torch.where(taken, host.parents, F.pad(tree.parents, room)))  # fmt: skip

    def commit(self, new: Committed) -> None:
        self.head.commit(new)

    def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        self.texts.observe(slot, tokens, again)

    def predict(self, slot: int, tokens: Sequence[int]) -> None:
        self.texts.predict(slot, tokens)

    def ignore(self, slot: int) -> None:
        self.texts.ignore(slot)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self.head.release(slot)
        self.texts.release(slot)

    def clear(self) -> None:
        """Forget what past requests taught."""
        self.head.clear()
        self.texts.clear()
