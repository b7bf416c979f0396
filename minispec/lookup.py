"""Lookups: find an earlier place where the last tokens occurred, and draft what followed them there.

A head drafts for every text, and a token or two are accepted. Where a text repeats itself or an earlier text, a lookup
is almost always right, for many tokens. So head and lookup both propose, and for each request the step verifies the
tree with the most expected tokens, as `policy.py` estimates them. The looked-up trees are inputs of the step, and
replace the head's trees of their requests. If all trees of a step are looked up, the step does not run the head, and
saves the accepted paths for it (`late.py`).

A lookup that finds nothing must cost almost nothing, so lookups take at most 1 % of the time (`NgramDrafter.limited`).
Lookups beside a head: SuffixDecoding (arXiv 2411.04975).
Read next: `ngram.py` for the trie, `beam.py` for the head's drafter, `policy.py` for the choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from minispec.corpora import Corpora
from minispec.drafter import NOTHING, Batch, Draft, Drafter, HostTrees, TreeSize
from minispec.ngram import NgramDrafter
from minispec.tree import PADDING, DraftTree


class Lookups(Drafter):
    """A drafter with a network, and lookups beside it, one tree for each request.

    Trees have one or two sizes, and the larger ones have N nodes, so that a looked-up tree may be a chain of N. In a
    step of the larger size, trees of the network with fewer than N nodes are padded.
    """

    has_lookups = True

    def __init__(self, head: Drafter, shared: NgramDrafter, vocab_size: int, awaits_corpus: bool = False) -> None:
        """shared: the drafter over texts. Its `nodes` are N, if they are more than those of the network's trees.

        awaits_corpus: whether texts are looked up only while an external corpus is loaded. Until then steps may
        overlap; and they have the network's shapes, so there is none in which all trees are looked up.
        """
        assert shared.nodes >= head.nodes or awaits_corpus, "lookups have at least as many nodes as other trees"
        assert shared.limited, "a lookup that finds nothing costs almost nothing"
        self.head, self.texts, self.awaits_corpus = head, HostTrees(shared, vocab_size), awaits_corpus
        self.nodes, self.depth = max(shared.nodes, head.nodes), max(shared.nodes - 1, head.depth)
        self.corpora: Corpora = shared.corpora
        head.expect(self.depth + 1)
        # What one of the two does without the other is that one's own method.
        self.attach, self.commit = head.attach, head.commit  # type: ignore[method-assign]
        self.compile, self.compile_small = head.compile, head.compile_small  # type: ignore[method-assign]
        self.attend_paths, self.confidences = head.attend_paths, head.confidences  # type: ignore[method-assign]
        self.observe, self.hint = self.texts.observe, self.texts.hint  # type: ignore[method-assign]
        self.name, self.rounds, self.topk, self.network = head.name, head.rounds, head.topk, head.network
        self.taps, self.scratch, self.lookahead, self.kv_shape = head.taps, head.scratch, head.lookahead, head.kv_shape
        largest = head.trees[-1]
        widened = [] if largest.nodes == self.nodes else [largest._replace(nodes=self.nodes)]
        self._sizes = tuple([*head.trees[-1:], *widened] if widened else head.trees)
        self._grown = {size.nodes: size.nodes for size in head.trees} | {self.nodes: largest.nodes}

    @property
    def trees(self) -> tuple[TreeSize, ...]:
        """The sizes of trees, the smaller first; `TreeSize.depth` is that of the network's trees, not of a lookup's."""
        return self._sizes

    @property
    def reads_text(self) -> bool:
        return not self.awaits_corpus or len(self.corpora) > 0

    def host_drafts(self, slots: Sequence[int]) -> Sequence[Draft]:
        return self.texts.host_drafts(slots) if self.reads_text else [NOTHING] * len(slots)

    def propose(self, batch: Batch) -> DraftTree:
        """Return the lookup's tree for each row that has one, and the network's tree for the others."""
        host = batch.tree
        rows, nodes = host.tokens.shape
        grown = self._grown[nodes]
        if rows == 1 and grown == nodes and not self.awaits_corpus:  # with a looked-up tree the step would not draft
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

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self.head.release(slot)
        self.texts.release(slot)

    def clear(self) -> None:
        """Forget everything learned from past requests."""
        self.head.clear()
        self.texts.clear()
