"""The static sizes and tensors of a step: its inputs, its plan for attention (`attention.Plan`), and its outputs.

The one idea: a step is a function of tensors at fixed addresses. The host fills one buffer with one copy. The step
reads this buffer, works on the engine's state, and writes another buffer, which is copied to the host. So on CUDA a
step can be captured once as a CUDA graph and replayed for all requests.

Each shape has its buffers: a decode step of B requests with trees of N nodes, a prefill step of T tokens. A is the most
tokens that a step emits for a request. A row is the keys and values of one token.

Read next: `engine.py`, whose steps run on these.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Self

import torch
from torch import Tensor

from minispec.attention import QUERY_BLOCK, AttendKind, Plan
from minispec.compiled import Key
from minispec.drafter import NOTHING, Draft, Drafter
from minispec.kv import PagedKV
from minispec.tree import PADDING, PLAIN, DraftTree, Shape


@dataclass(frozen=True)
class Sizes:
    """Every static size of an engine, as it follows from flags, model, drafter and device."""

    context_length: int  # the most tokens of a request, prompt and output together
    max_running: int  # the most requests that are decoded together
    chunk_size: int  # the most prompt tokens of a prefill step
    nodes: int  # N, the nodes of a draft tree, root included; of the largest tree if there are several sizes
    depth: int  # the edges on the longest path of a draft tree; a step emits at most A = depth + 1 tokens for a request
    scratch: int  # how many rows drafting writes beyond the committed ones
    batch_sizes: tuple[int, ...]  # the values of B, to which decode steps are padded: the batch buckets
    prefill_sizes: tuple[int, ...]  # the values of T, to which prefill steps are padded
    # The trees of each batch: the largest batch size for which an entry holds, ascending, and the nodes of its trees.
    trees: tuple[tuple[int, tuple[int, ...]], ...] = ()
    own_nodes: int = 1  # nodes of the drafter's own trees, without those that are looked up beside them
    has_lookups: bool = False  # whether there are steps whose trees are all looked up

    @classmethod
    def resolve(
        cls, drafter: Drafter, *, context_length: int, max_running: int, chunk_size: int, batches: Sequence[int] = (),
        trees: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> Sizes:  # fmt: skip
        """Return the sizes of an engine with this drafter.

        batches: batch buckets that replace the powers of two up to the largest of them. trees: that field; empty: each
        batch has trees of all sizes.
        """
        powers = {1 << i for i in range(max_running.bit_length()) if 1 << i > max(batches, default=0)}
        powers |= {batch for batch in batches if batch < max_running}
        largest = -(-chunk_size // QUERY_BLOCK) * QUERY_BLOCK
        drafter_sizes = [size.nodes for size in drafter.trees]
        return cls(
            context_length, max_running, chunk_size, drafter.nodes, drafter.depth, drafter.scratch,
            batch_sizes=tuple(sorted(powers | {max_running})),
            prefill_sizes=tuple(sorted({min(size, largest) for size in (128, 512, largest)})),
            trees=tuple((most, tuple(nodes)) for most, nodes in trees or [(max_running, drafter_sizes)]),
            own_nodes=drafter.own_nodes or drafter.nodes,
            has_lookups=drafter.has_lookups and not drafter.awaits_corpus,
        )  # fmt: skip

    def shapes_of(self, batch: int) -> tuple[Shape, ...]:
        """Return the shapes of this batch size: plain, with the drafter's trees, with looked-up trees alone.

        Trees of either kind ascend in size. Their nodes are those that the table `trees` has for the batch.
        """
        trees = next((nodes for most, nodes in self.trees if batch <= most), ())
        looked_up = trees if self.has_lookups else ()
        return (PLAIN, *(Shape(n, True) for n in trees), *(Shape(n, False) for n in looked_up))

    @property
    def tree_rows(self) -> int:
        """Rows that a decode step may write beyond a request's committed ones."""
        return max(self.nodes, self.scratch)


class Chunk(NamedTuple):
    """A run of known tokens of one request: rows start, start + 1, ... of its slot."""

    slot: int
    tokens: list[int]
    start: int
    last: bool  # whether the chunk ends the known tokens, so that the target picks the next one
    following: int = 0  # the known token after the chunk; 0 after the last chunk
    again: bool = False  # whether the request was retracted, so that the drafter has seen this text before


def write_front(buffer: Tensor, values: Sequence[int]) -> None:
    """Write host values to the front of `buffer [n] int64`; on CUDA from pinned memory, so the host does not wait."""
    staged = torch.tensor(values, dtype=torch.int64, pin_memory=buffer.is_cuda)
    buffer[: len(values)].copy_(staged, non_blocking=True)


class DecodeBuffers(Key):
    """The tensors of a decode step of B requests with trees of N nodes; it emits at most A tokens per request."""

    # The plan under which a drafter takes in the accepted paths, which the engine sets; None: it takes in none.
    paths: Plan | None = None

    def __init__(self, kv: PagedKV, batch: int, shape: Shape, most: int, attend: tuple[AttendKind, int]) -> None:
        """`attend`: the kind of attention, and how many layers the target has; `most` is A."""
        device, nodes = kv.pool.device, shape.nodes
        self.batch, self.shape, self.nodes = batch, shape, nodes
        self.name = f"decode, batch {batch}, {nodes} nodes a tree"
        self.inputs = torch.zeros(batch * (1 + 2 * nodes), dtype=torch.int64, device=device)
        self.slots, tokens, parents = self.inputs.split((batch, batch * nodes, batch * nodes))
        self.tree = DraftTree(tokens.view(batch, nodes), parents.view(batch, nodes))  # the host's trees
        self.tree.tokens.fill_(PADDING)
        self.tree.parents[:, 0] = -1
        self.plan = Plan(kv, batch, 1, nodes)
        kind, layers = attend
        self.attend = kind(kv, self.plan, layers)
        # [B, A + 2]: the tokens emitted, how many of them count, 1 if a logit was NaN.
        self.most, self.outputs = most, torch.zeros(batch, most + 2, dtype=torch.int64, device=device)

    @property
    def of_batch(self) -> Sequence[Tensor]:
        """The step's own tensors and those of its plans; none if there is one request."""
        if self.batch == 1:
            return ()
        plans = [self.plan] if self.paths is None else [self.plan, self.paths]
        return [self.slots, *self.tree, self.outputs, *(tensor for plan in plans for tensor in plan.tensors)]

    def upload(self, slots: Sequence[int], drafts: Sequence[Draft]) -> None:
        """Write slots and the host's trees, both padded; the step itself puts the root's token into node 0."""
        values = [*slots, *[0] * (self.batch - len(slots))]
        if drafts:
            room = [*drafts, *[NOTHING] * (self.batch - len(drafts))]
            padding = [self.nodes - len(draft.tokens) for draft in room]
            values += chain(*([*d.tokens, *[PADDING] * rest] for d, rest in zip(room, padding, strict=True)))
            values += chain(*([*d.parents, *[0] * rest] for d, rest in zip(room, padding, strict=True)))
        write_front(self.inputs, values)

    def of_the_host(self) -> Self:
        """Return buffers on the same tensors for the step in which all trees are looked up (`Shape.of_host`)."""
        buffers = copy.copy(self)
        buffers.original = self  # the graphs and `ready` of the original serve these too
        buffers.shape, buffers.name = self.shape._replace(drafts=False), f"{self.name}, all the host's"
        return buffers


class PrefillBuffers(Key):
    """The tensors of a prefill step: T tokens in n = T / W query blocks of W rows, so at most n chunks."""

    nodes = 1  # there is no tree

    def __init__(self, kv: PagedKV, size: int, width: int, attend: tuple[AttendKind, int]) -> None:
        """`attend`: the kind of attention, and how many layers the target has; `size` is T, `width` W."""
        device, blocks = kv.pool.device, size // width
        self.size, self.width, self.blocks, self.name = size, width, blocks, f"prefill of {size} tokens"
        self.inputs = torch.zeros(2 * size + 7 * blocks, dtype=torch.int64, device=device)
        parts = self.inputs.split((size, size, *[blocks] * 7))
        self.tokens, self.following = parts[:2]  # [T] each
        self.slots, self.starts, self.sizes = parts[2:5]  # [n] each, by block; a size is the number of rows in use
        # [n] each, by chunk: the chunk's slot, how many committed rows this slot has after the step, 1 if a token is
        # picked after the chunk (else 0), and the index of the chunk's last row among the T rows.
        self.chunk_slots, self.lens, self.picked, self.ends = parts[5:]
        self.plan = Plan(kv, 1, blocks, width, prompts=True)
        kind, layers = attend
        self.attend = kind(kv, self.plan, layers)
        self._row = torch.arange(width, device=device)
        self._causal = (self._row <= self._row[:, None]).expand(blocks, -1, -1)
        # [n, 3]: the token picked after each chunk, 1 if the token counts, 1 if a logit was NaN.
        self.most, self.outputs = 1, torch.zeros(blocks, 3, dtype=torch.int64, device=device)

    def upload(self, chunks: Sequence[Chunk]) -> None:
        """Write the chunks, and padding after them; the chunks must fit."""
        size, width = self.size, self.width
        tokens, following = [0] * size, [0] * size
        by_block: list[tuple[int, int, int]] = []  # slot, start, size: `slots`, `starts`, `sizes`
        by_chunk: list[tuple[int, int, int, int]] = []
        for chunk in chunks:
            first, count = len(by_block) * width, len(chunk.tokens)
            tokens[first : first + count] = chunk.tokens
            following[first : first + count] = [*chunk.tokens[1:], chunk.following]
            by_block += [(chunk.slot, chunk.start + at, min(width, count - at)) for at in range(0, count, width)]
            by_chunk.append((chunk.slot, chunk.start + count, int(chunk.last), first + count - 1))
        by_block += [(0, 0, 0)] * (self.blocks - len(by_block))
        by_chunk += [(0, 0, 0, 0)] * (self.blocks - len(by_chunk))
        columns = chain(*zip(*by_block, strict=True), *zip(*by_chunk, strict=True))
        write_front(self.inputs, [*tokens, *following, *columns])

    def place(self, starts: Tensor) -> Tensor:
        """Fill the plan for blocks that begin at rows `starts [n] int64`; return the positions [n, W] of their rows."""
        self.plan.fill(self.slots, starts, self._causal, self._row < self.sizes[:, None])
        return starts[:, None] + self._row


class Prefills(dict[int, PrefillBuffers]):
    """The prefill steps by T, ascending, all with query blocks of W rows."""

    def __init__(self, kv: PagedKV, sizes: Sequence[int], width: int, attend: tuple[AttendKind, int]) -> None:
        """`attend` and `width` are those of `PrefillBuffers`."""
        super().__init__((size, PrefillBuffers(kv, size, width, attend)) for size in sizes)
        self.width, self.blocks = width, sizes[-1] // width  # the query blocks of the largest step

    def blocks_of(self, tokens: int) -> int:
        """Return how many query blocks a chunk of this many tokens takes."""
        return -(-tokens // self.width)

    def of(self, blocks: int) -> PrefillBuffers:
        """Return the smallest step that has room for `blocks` query blocks."""
        return next(step for size, step in self.items() if size >= blocks * self.width)
