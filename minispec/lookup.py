"""Lookups: find an earlier place where the last tokens occurred, and draft what followed them there.

A lookup runs alone (NGRAM) or beside a head. A head drafts for every text, and a token or two are accepted. Where a
text repeats itself or an earlier text, a lookup is almost always right, for many tokens. So head and lookup both
propose, and for each request the step verifies the tree with the most expected tokens, as `policy.py` estimates them.
The looked-up trees are inputs of the step, and replace the head's trees of their requests. If all trees of a step are
looked up, the step does not run the head, and saves the accepted paths for it (`late.py`).

A lookup has two sources: the request's own text, and a trie that all texts share (`ngram.py`). A lookup that finds
nothing must cost almost nothing. So in the request's own text a dictionary gives the last occurrence of the newest
three or two tokens within a microsecond. Lookups, and the insertion of texts into the trie, take at most 1 % of the
time. NGRAM alone has the same sources and limit on a CPU (`Texts`). Elsewhere, or if flags fix the size of its trees,
it has the trie alone, without a limit of time.

Lookup in the prompt: Saxena, prompt-lookup-decoding (2023); beside a head: SuffixDecoding (arXiv 2411.04975).
Read next: `ngram.py` for the trie, `beam.py` for the head's drafter, `policy.py` for the choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from minispec.attention import AttendKind, PagedAttend, Plan
from minispec.compiled import CompileFor, Compiler
from minispec.drafter import NOTHING, Batch, Committed, Draft, Drafter, HostDrafter, HostTrees, TreeSize
from minispec.kv import PagedKV
from minispec.ngram import NgramDrafter
from minispec.request import Hints
from minispec.tree import PADDING, DraftTree

SHARE = 0.01  # the share of the time between two proposals that lookups may take, indexing included
LONGEST_STEP = 0.1  # seconds; if two proposals are further apart, the rest was idle time, which earns no share
KEYS = (3, 2)  # how many of the last tokens must match: first three are tried, then two


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


class Texts(HostDrafter):
    """Lookups in each request's own text, its predicted output and the trie; the longest match gives the draft."""

    keeps_private = True

    def __init__(self, shared: NgramDrafter) -> None:
        """shared: the drafter over the trie, which from now on indexes only within the time that `draft` gives it."""
        self.shared, self.name, self.nodes, self.depth = shared, shared.name, shared.nodes, shared.depth
        self.shared.seconds, self.corpora = 0.0, shared.corpora
        self._own: dict[int, Echo] = {}
        self._expected: dict[int, Echo] = {}
        self._began = time.perf_counter()  # when `draft` was last called
        self._debt = 0.0  # the seconds that lookups took beyond their share

    def draft(self, slots: Sequence[int]) -> list[Draft]:
        """Return one tree per slot, a root alone where nothing is found, and index waiting tokens in the time left."""
        now = time.perf_counter()
        credit = SHARE * min(now - self._began, LONGEST_STEP) - self._debt
        self._began, self.shared.seconds = now, max(0.0, credit)
        echoes = [self._echo(slot) for slot in slots]
        longest = self.shared.options.max_match
        open_ = [slot for slot, echo in zip(slots, echoes, strict=True) if echo.match < longest]
        shared = dict(zip(open_, self.shared.draft(open_), strict=True))
        drafts = [
            echo if echo.match >= (draft := shared.get(slot, NOTHING)).match_length else draft
            for slot, echo in zip(slots, echoes, strict=True)
        ]
        # Unused time is not saved up. A debt beyond a long step's share comes from a pause of the machine: cut it off.
        self._debt = min(max(time.perf_counter() - now - credit, 0.0), SHARE * LONGEST_STEP)
        return drafts

    def _echo(self, slot: int) -> Draft:
        """Return the draft with the longer match, from the slot's own text or from its predicted output."""
        own, options = self._own[slot], self.shared.options
        draft = own.draft(own.text, self.nodes, options.max_match, options.min_match)
        if slot not in self._expected:
            return draft
        special = self._expected[slot].draft(own.text, self.nodes, options.max_match, options.min_match)
        return special if special.match >= draft.match else draft

    def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        """Take in the next tokens of a slot's text; the time counts as debt."""
        started = time.perf_counter()
        self._own.setdefault(slot, Echo()).extend(tokens)
        self.shared.observe(slot, tokens, again=again)
        self._debt += time.perf_counter() - started

    def hint(self, slot: int, hints: Hints) -> None:
        """Take in what a request says of its drafts; its predicted output is looked up as its own text is."""
        if hints.prediction:
            expected = self._expected[slot] = Echo()
            expected.extend(hints.prediction)
        self.shared.hint(slot, hints._replace(prediction=()))

    def release(self, slot: int) -> None:
        """Forget a slot; what it added to the trie stays."""
        self._own.pop(slot, None)
        self._expected.pop(slot, None)
        self.shared.release(slot)

    def clear(self) -> None:
        self.shared.clear()


class Lookups(Drafter):
    """A drafter with a network, and lookups of `Texts` beside it, one tree for each request.

    Trees have one or two sizes, and the larger ones have N nodes, so that a looked-up tree may be a chain of N. In a
    step of the larger size, trees of the network with fewer than N nodes are padded.
    """

    has_lookups = True

    def __init__(self, head: Drafter, shared: NgramDrafter, vocab_size: int) -> None:
        """shared: the drafter over the trie. Its `nodes` are N, at least the nodes of the network's trees."""
        assert shared.nodes >= head.nodes, "lookups have at least as many nodes as other trees"
        self.head, self.texts = head, HostTrees(Texts(shared), vocab_size)
        self.nodes, self.depth, self.corpora = shared.nodes, shared.nodes - 1, shared.corpora
        head.expect(self.nodes)
        self.name, self.rounds, self.topk, self.network = head.name, head.rounds, head.topk, head.network
        self.taps, self.scratch, self.lookahead, self.kv_shape = head.taps, head.scratch, head.lookahead, head.kv_shape
        largest = head.trees[-1]
        widened = [] if largest.nodes == self.nodes else [largest._replace(nodes=self.nodes)]
        self._sizes = tuple([*head.trees, *widened][-2:])
        self._grown = {size.nodes: size.nodes for size in head.trees} | {self.nodes: largest.nodes}
        self.smaller = self._sizes[0] if len(self._sizes) > 1 else None

    @property
    def trees(self) -> tuple[TreeSize, ...]:
        """The sizes of trees, the smaller first; `TreeSize.depth` is that of the network's trees, not of a lookup's."""
        return self._sizes

    def attach(
        self, kv: PagedKV, attend_kind: AttendKind, batch_sizes: Sequence[int], chunk_counts: Sequence[int]
    ) -> None:
        self.head.attach(kv, attend_kind, batch_sizes, chunk_counts)

    def compile(self, compiler: Compiler) -> None:
        self.head.compile(compiler)

    def compile_small(self, compiler: Compiler, choice: CompileFor) -> None:
        self.head.compile_small(compiler, choice)

    def attends(self, plan: Plan, prefill: bool) -> dict[str, PagedAttend]:
        return self.head.attends(plan, prefill)

    def small_graphs(self, nodes: int, samples: bool) -> list[str]:
        return self.head.small_graphs(self._grown[nodes], samples)

    def host_drafts(self, slots: Sequence[int]) -> Sequence[Draft]:
        return self.texts.host_drafts(slots)

    def propose(self, batch: Batch) -> DraftTree:
        """Return the lookup's tree for each row that has one, and the network's tree for the others."""
        host = batch.tree
        rows, nodes = host.tokens.shape
        grown = self._grown[nodes]
        if rows == 1 and grown == nodes:  # with a looked-up tree the step would not draft
            return self.head.propose(batch)
        scores = None if batch.scores is None else batch.scores[:, :grown]
        cut = DraftTree(host.tokens[:, :grown], host.parents[:, :grown])
        tree = self.head.propose(batch._replace(tree=cut, scores=scores))
        room = (0, nodes - grown)
        taken = host.tokens[:, 1:2] != PADDING
        if scores is not None:
            scores.masked_fill_(taken, torch.nan)  # these scores are of the network's tree, which the row does not take
        return DraftTree(torch.where(taken, host.tokens, F.pad(tree.tokens, room, value=PADDING)),
                         torch.where(taken, host.parents, F.pad(tree.parents, room)))  # fmt: skip

    def commit(self, new: Committed) -> None:
        self.head.commit(new)

    def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        self.texts.observe(slot, tokens, again)

    def hint(self, slot: int, hints: Hints) -> None:
        self.texts.hint(slot, hints)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self.head.release(slot)
        self.texts.release(slot)

    def clear(self) -> None:
        """Forget everything learned from past requests."""
        self.head.clear()
        self.texts.clear()
