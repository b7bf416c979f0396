"""One step on the device, told in order: propose, forward, verify, compact, commit.

`launch(slots)` runs one decode step for a batch of slots and `prefill(chunks)` computes known tokens; both return a
`Pending`, and `collect(pending)` waits for the tokens they emitted. Between the two nothing crosses to the host.

The one idea: a step has static shapes. The batch is padded to a bucket (slot 0 is padding), the tree to N nodes (-1 is
padding), prompt chunks to whole query blocks, so that each (B, T) is one compiled graph and nothing recompiles when
lengths, trees or requests change. There are two tree sizes, 1 and N: a step in which no tree is worth its cost is a
plain one.

Speculative decoding by trees: SpecInfer, arXiv 2305.09781. Read next: `verify.py`, then `scheduler.py`, which decides
who is in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.attention import QUERY_BLOCK, PagedFlex, PagedGather, Plan, prefill_block
from minispec.drafter import Batch, Committed, DeviceDrafter, Draft, HostDrafter, Payoff
from minispec.kv import PagedKV, upload
from minispec.model import Model
from minispec.request import SamplingParams
from minispec.sampling import Rows, SamplingState, pick
from minispec.tree import PADDING, DraftTree, ancestors, depth
from minispec.verify import Verdict, verify, verify_greedy

TIMED_CONTEXT = 512  # committed rows assumed when warm-up times a plain step against a tree step


class Chunk(NamedTuple):
    """A run of known tokens of one request: rows start, start + 1, ... of its slot."""

    slot: int
    tokens: list[int]
    start: int
    last: bool  # completes what is known, so the token after it is picked
    following: int = 0  # the known token after a chunk that is not the last
    again: bool = False  # replays a retracted request; its own past is nothing new to the drafter


@dataclass
class Pending:
    """A step under way: what it emitted, on its way to the host."""

    slots: list[int]
    emitted: Tensor  # [B, A] int64 on the host
    count: Tensor  # [B] int64 on the host
    ready: torch.cuda.Event | None  # set when the two are filled; None: they are
    nodes: int = 1  # tree size of a decode step
    drafts: Sequence[Draft] = ()
    chunks: Sequence[Chunk] = ()


class Bucket:
    """The static tensors of decode steps of B rows with trees of N nodes."""

    def __init__(self, engine: Engine, batch: int, nodes: int) -> None:
        device = engine.kv.pool.device
        self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.tree = DraftTree(
            torch.full((batch, nodes), PADDING, dtype=torch.int64, device=device),
            torch.zeros(batch, nodes, dtype=torch.int64, device=device),
        )
        self.tree.parents[:, 0] = -1
        self.plan = Plan(engine.kv, batch, 1, nodes)
        self.attend = engine.attend_kind(engine.kv, self.plan, engine.model.config.layers)


class Engine:
    """Model, KV pages, drafter and sampling state of the running slots, and the step over them.

    lens [R] int64: committed rows of each slot, whose KV is written. root [R] int64: the newest committed token, whose
    KV is not. Both change only inside a step.
    """

    def __init__(
        self,
        model: Model,
        kv: PagedKV,
        drafter: HostDrafter | DeviceDrafter,
        *,
        context_length: int,
        batch_sizes: Sequence[int],
        chunk_rows: int,
        compiled: bool,
        thresholds: tuple[float, float] | None = None,
    ) -> None:
        """`thresholds` (single, acc) make acceptance lossy; None leaves output exact."""
        self.model, self.kv, self.drafter, self.thresholds = model, kv, drafter, thresholds
        self.context_length = context_length
        self.attend_kind = PagedFlex if compiled else PagedGather
        device, slots = kv.pool.device, kv.table.shape[0]
        self.device = device
        self.lens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.root = torch.zeros(slots, dtype=torch.int64, device=device)
        self.sampling = SamplingState(slots, model.config.vocab_size, device)
        self.payoff = Payoff()
        self.drafter_seconds = 0.0  # host time spent in a drafter that works on the host
        self.step_seconds: dict[tuple[int, int], float] = {}  # (B, N): measured at warm-up
        self.tree_sizes = sorted({1, drafter.nodes})  # a drafter may decline, or be given up; then a step is plain
        self.buckets = {(b, n): Bucket(self, b, n) for b in batch_sizes for n in self.tree_sizes}
        self.batch_sizes = sorted(batch_sizes)
        chunk_rows = -(-chunk_rows // QUERY_BLOCK) * QUERY_BLOCK
        self.prefill_rows = sorted({min(rows, chunk_rows) for rows in (128, 512, chunk_rows)})
        self.query_block = width = prefill_block(device)
        self.prefill_plans = {rows: Plan(kv, 1, rows // width, width) for rows in self.prefill_rows}
        layers = model.config.layers
        self.prefill_attends = {rows: self.attend_kind(kv, plan, layers) for rows, plan in self.prefill_plans.items()}
        self.causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        self.path_plans: dict[int, Plan] = {}  # by batch: the accepted path as a chain, for a drafter on the device
        if not drafter.on_host:
            drafter.attach(kv, self.attend_kind, batch_sizes)
            self.path_plans = {size: Plan(kv, size, 1, drafter.depth + 1) for size in batch_sizes}

    # ---- slots ---------------------------------------------------------------------------------------------------

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        stop_ids: Iterable[int],
        cached: int,
        again: bool,
    ) -> None:
        """Give a slot to a request of which the first `cached` rows are in mapped pages already."""
        self.sampling.assign(slot, params, seed, prompt_ids, output_ids, stop_ids)
        self.lens[slot] = cached
        if self.drafter.on_host:
            self.drafter.commit(slot, (list(prompt_ids) + list(output_ids))[:cached], again=again)

    def release(self, slot: int) -> None:
        """Take a slot back from a request that ended or was retracted."""
        self.sampling.release(slot)
        self.drafter.release(slot)
        self.lens[slot] = 0

    # ---- a decode step -------------------------------------------------------------------------------------------

    def launch(self, slots: Sequence[int], bucket: Bucket | None = None, draft: bool = True) -> Pending:
        """Decode one step for these slots: verify a tree each, keep the accepted path, emit its tokens.

        `bucket` fixes batch and tree size; without it they are the smallest that fit, and a tree if it pays. Without
        `draft` the step is plain, and a drafter on the device hears nothing of it: its rows and states of these slots
        are invalid from here on.
        """
        bucket, drafts = self._prepare(slots, bucket, draft)
        rows = bucket.slots
        lens, root = self.lens[rows], self.root[rows]
        wishes = None if self.sampling.all_greedy(slots) else self.sampling.rows(rows, slots)
        on_device = not self.drafter.on_host and bucket.plan.width > 1
        if on_device:
            # Under thresholds a coin accepts, not the noise, and no draft may know the noise of what is drawn instead.
            couple = wishes is not None and self.thresholds is None
            noise = (wishes.temperature, wishes.seed) if couple else ()
            tokens, parents = self.drafter.propose(Batch(rows, lens, root, *noise))
        else:
            tokens, parents = bucket.tree
        nodes = tokens.shape[1]
        tokens[:, 0] = root
        above = ancestors(parents)
        positions = lens[:, None] + depth(above)
        tree = DraftTree(tokens.masked_fill(positions >= self.context_length, PADDING), parents)
        bucket.plan.fill(rows, lens, above, tree.tokens != PADDING)
        taps = self.drafter.taps if on_device else ()
        hidden, features = self.model(tree.tokens.clamp(min=0), positions, bucket.attend, taps)
        verdict = self._verify(tree, above, self.model.logits(hidden), wishes, lens)
        if nodes > 1:
            self.kv.compact(rows, lens, verdict.path, verdict.count)
        if on_device:
            self._commit_path(rows, lens, verdict, tree.tokens, features)
        self.sampling.commit(rows, verdict.emitted, verdict.count)
        self.lens[rows] = lens + verdict.count
        self.root[rows] = verdict.bonus
        self.lens[0] = 0  # slot 0 is padding, several rows of it at once
        return self._pending(list(slots), verdict.emitted, verdict.count, nodes=nodes, drafts=drafts)

    def _prepare(self, slots: Sequence[int], bucket: Bucket | None, draft: bool) -> tuple[Bucket, Sequence[Draft]]:
        """Ask a drafter on the host, choose the bucket, and upload slots and trees."""
        drafts: Sequence[Draft] = ()
        if self.drafter.on_host and bucket is None and draft:
            started = time.perf_counter()
            drafts = self.drafter.propose(slots)
            self.drafter_seconds += time.perf_counter() - started
        if bucket is None:
            batch = next(size for size in self.batch_sizes if size >= len(slots))
            pays = draft and (not self.drafter.on_host or self.payoff.worth(drafts, self.time_ratio(batch)))
            bucket = self.buckets[batch, self.drafter.nodes if pays else 1]
        self._upload(bucket, slots, drafts)
        return bucket, drafts

    def _verify(self, tree: DraftTree, above: Tensor, logits: Tensor, wishes: Rows | None, lens: Tensor) -> Verdict:
        """Return the target's verdict; greedy batches, without wishes, need no walk."""
        most = self.drafter.depth + 1 if tree.tokens.shape[1] > 1 else 1
        if wishes is None:
            return verify_greedy(tree, above, logits, most)
        return verify(tree, logits, wishes, lens, most, self.thresholds)

    def _commit_path(
        self, slots: Tensor, lens: Tensor, verdict: Verdict, tokens: Tensor, features: Tensor | None
    ) -> None:
        """Report the accepted path, a chain of A rows from `lens` on, to a drafter on the device."""
        batch, most = verdict.path.shape
        step = torch.arange(most, device=self.device)
        plan = self.path_plans[batch]
        plan.fill(slots, lens, self.causal[:most, :most].expand(batch, -1, -1), step < verdict.count[:, None])
        tokens = tokens.gather(1, verdict.path)
        if features is not None:
            features = features.gather(1, verdict.path[..., None].expand(-1, -1, features.shape[-1]))
        ends = torch.arange(batch, device=self.device) * most + verdict.count - 1
        positions = lens[:, None] + step
        self.drafter.commit(Committed(slots, tokens, verdict.emitted, positions, features, ends, plan, prefill=False))

    def _upload(self, bucket: Bucket, slots: Sequence[int], drafts: Sequence[Draft]) -> None:
        """Write slots and trees, padded, into the bucket's static tensors; node 0 is filled in from `root`."""
        batch, nodes = bucket.tree.tokens.shape
        bucket.slots.copy_(upload([*slots, *[0] * (batch - len(slots))], torch.int64, self.device))
        if not self.drafter.on_host:
            return
        tokens = [[PADDING] * nodes for _ in range(batch)]
        parents = [[-1, *[0] * (nodes - 1)] for _ in range(batch)]
        for row, draft in enumerate(drafts if nodes > 1 else ()):
            tokens[row][: len(draft.tokens)] = draft.tokens
            parents[row][: len(draft.parents)] = draft.parents
        both = upload([tokens, parents], torch.int64, self.device)
        bucket.tree.tokens.copy_(both[0])
        bucket.tree.parents.copy_(both[1])

    def time_ratio(self, batch: int) -> float:
        """Return the measured time of a tree step over a plain one; 1 where nothing was measured."""
        plain = self.step_seconds.get((batch, 1))
        return self.step_seconds[batch, self.drafter.nodes] / plain if plain else 1.0

    # ---- a prefill step ------------------------------------------------------------------------------------------

    def blocks(self, tokens: int) -> int:
        """Return how many query blocks a chunk of this many tokens takes."""
        return -(-tokens // self.query_block)

    @property
    def prefill_blocks(self) -> int:
        """Query blocks of the largest prefill step."""
        return self.prefill_rows[-1] // self.query_block

    def prefill(self, chunks: Sequence[Chunk]) -> Pending:
        """Compute chunks of several requests packed as [1, T], each starting on a query block of its own.

        Emits one token for every chunk that is its request's last, none for the others.
        """
        needed = sum(self.blocks(len(chunk.tokens)) for chunk in chunks) * self.query_block
        rows = next(size for size in self.prefill_rows if size >= needed)
        emitted, count = self._prefill(rows, chunks)
        return self._pending([chunk.slot for chunk in chunks], emitted, count, chunks=chunks)

    def _prefill(self, rows: int, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Run one prefill step of `rows` padded rows; returns emitted [C, 1] and count [C] for C = the query blocks."""
        blocks = rows // self.query_block
        tokens, following = [0] * rows, [0] * rows
        slots, starts, sizes = [0] * blocks, [0] * blocks, [0] * blocks
        ends, last_rows = [(0, 0, 0)] * blocks, [0] * blocks  # per chunk: slot, length after it, picked or not
        block = 0
        for index, chunk in enumerate(chunks):
            first = block * self.query_block
            tokens[first : first + len(chunk.tokens)] = chunk.tokens
            following[first : first + len(chunk.tokens)] = [*chunk.tokens[1:], chunk.following]
            for offset in range(0, len(chunk.tokens), self.query_block):
                slots[block], starts[block] = chunk.slot, chunk.start + offset
                sizes[block] = min(self.query_block, len(chunk.tokens) - offset)
                block += 1
            ends[index] = (chunk.slot, chunk.start + len(chunk.tokens), int(chunk.last))
            last_rows[index] = first + len(chunk.tokens) - 1
        # All uploads come before the forward: after it the host would wait for the device.
        send = lambda values: upload(values, torch.int64, self.device)  # noqa: E731
        tokens_t, after = send([tokens]), send(following)
        starts_t, ends_t, (chunk_slots, lens, picked) = send(starts), send(last_rows), send(ends).unbind(1)
        row = torch.arange(self.query_block, device=self.device)
        plan = self.prefill_plans[rows]
        live = row < send(sizes)[:, None]
        plan.fill(send(slots), starts_t, self.causal.expand(blocks, -1, -1), live)
        positions = (starts_t[:, None] + row).view(1, rows)
        hidden, features = self.model(tokens_t, positions, self.prefill_attends[rows], self.drafter.taps)
        logits = self.model.logits(hidden[0].index_select(0, ends_t))
        host_slots = [chunk.slot for chunk in chunks if chunk.last]
        if self.sampling.all_greedy(host_slots):
            token = logits.argmax(-1)
        else:
            token = pick(logits, self.sampling.rows(chunk_slots, host_slots), lens)
        if not self.drafter.on_host:
            # The pick follows the last row of a last chunk. Added, not assigned: padding repeats row 0.
            after.index_add_(0, ends_t, picked * (token - after[ends_t]))
            new = Committed(chunk_slots, tokens_t, after[None], positions, features, ends_t, plan, prefill=True)
            self.drafter.commit(new)
        self.sampling.commit(chunk_slots, token[:, None], picked)
        self.lens[chunk_slots] = lens
        self.root[chunk_slots] = token
        self.lens[0] = 0
        return token[:, None], picked

    # ---- the end of a step ---------------------------------------------------------------------------------------

    def _pending(self, slots: list[int], emitted: Tensor, count: Tensor, **what: object) -> Pending:
        """Start the copy of what was emitted to the host."""
        if emitted.is_cuda:
            emitted, count = (t.to("cpu", non_blocking=True) for t in (emitted, count))
            ready = torch.cuda.Event()
            ready.record()
            return Pending(slots, emitted, count, ready, **what)
        return Pending(slots, emitted, count, None, **what)

    def collect(self, pending: Pending) -> list[list[int]]:
        """Wait for a step and return the tokens it emitted, one list per slot or chunk; tells the drafter."""
        if pending.ready is not None:
            pending.ready.synchronize()
        counts = pending.count.tolist()
        rows = [row[:count] for row, count in zip(pending.emitted.tolist(), counts, strict=True)][: len(pending.slots)]
        if not self.drafter.on_host:
            return rows
        started = time.perf_counter()
        for chunk in pending.chunks:
            self.drafter.commit(chunk.slot, chunk.tokens, again=chunk.again)
        for slot, row in zip(pending.slots, rows, strict=True):
            self.drafter.commit(slot, row)
        self.drafter_seconds += time.perf_counter() - started
        if pending.nodes > 1:
            for draft, row in zip(pending.drafts, rows, strict=True):
                self.payoff.learn(draft.match_length, len(row))
        return rows

    # ---- warm-up -------------------------------------------------------------------------------------------------

    def warm_up(self, progress: Callable[[str], None], repeats: int = 5) -> None:
        """Run every bucket on padding, largest first, so that all is compiled; then time both tree sizes."""
        shapes = sorted(self.buckets, reverse=True)
        total = len(shapes) + len(self.prefill_rows)
        for done, rows in enumerate(reversed(self.prefill_rows), start=1):
            progress(f"warm-up {done}/{total}: prefill of {rows} tokens")
            self._prefill(rows, [])
        for done, (batch, nodes) in enumerate(shapes, start=len(self.prefill_rows) + 1):
            progress(f"warm-up {done}/{total}: decode, batch {batch}, {nodes} nodes a tree")
            self.launch([], self.buckets[batch, nodes])
        for batch in self.batch_sizes if self.drafter.on_host and len(self.tree_sizes) > 1 else ():
            # In turn, and the least of several: the machine's mood at start must not decide about trees for good.
            times = [[self._step_seconds(batch, nodes) for nodes in self.tree_sizes] for _ in range(repeats)]
            for nodes, several in zip(self.tree_sizes, zip(*times, strict=True), strict=True):
                self.step_seconds[batch, nodes] = min(several)

    def _step_seconds(self, batch: int, nodes: int) -> float:
        """Return the time of one decode step on padding of a usual length."""
        self.lens[0] = min(TIMED_CONTEXT, self.context_length // 2)
        start = time.perf_counter()
        self.launch([], self.buckets[batch, nodes]).count.tolist()  # waits for the device
        return time.perf_counter() - start
