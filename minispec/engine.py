"""One step on the device, told in order: propose, forward, verify, compact, commit.

The drafter proposes trees, and the target reads them in one forward pass. Verification finds the accepted paths.
Compacting moves the rows (keys and values) of each path to directly after the request's committed rows. Then the
drafter takes the accepted paths in.

A slot is the place of a running request in all tables. `launch(slots)` runs one decode step. `prefill(chunks)` runs one
step over known tokens, such as prompts. Both return a `Pending`, and `collect(pending)` waits for the tokens emitted.
Until `collect`, the host waits for no value of the device, unless a request asks for more than tokens (`seams.py`). So
the next step can be launched before this one is collected.

The one idea: a step has static shapes. The batch is padded to one of a few sizes B (slot 0 is padding), a tree to N
nodes (-1 is padding), a prompt chunk to whole query blocks (`attention.py`). So each shape has its compiled graphs, and
nothing is compiled again when lengths, trees or requests change. On CUDA a step can be captured as a CUDA graph, which
is then replayed (`cuda/graphs.py`).

A is the most tokens that a step emits for a request, T the tokens of a prefill step, d the target's hidden size, F the
size of a token's features (hidden states from which a head drafts), V the size of the vocabulary.

Speculative decoding by trees: SpecInfer, arXiv 2305.09781. Read next: `scheduler.py`, which decides who is in a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.attention import AttendKind, Plan, prefill_block, with_windows
from minispec.buffers import Chunk, DecodeBuffers, PrefillBuffers, Prefills, Sizes
from minispec.compiled import CompileFor, Compiler, Small, Step, within_step
from minispec.drafter import Batch, Committed, Draft, Drafter
from minispec.kv import PagedKV
from minispec.late import Late
from minispec.model import Model, Rope
from minispec.request import Request
from minispec.sampling import EVERYTHING, GREEDY, TEMPERED, Needs, SamplingState, largest, pick
from minispec.seams import Asked, AskedStep, Link
from minispec.tree import PADDING, DraftTree, Shape, ancestors, depth
from minispec.verify import Accept, Trees, Verdict

logger = logging.getLogger("minispec")

# The code around the blocks (`_before_blocks`, `_after_blocks`) may be compiled, and steps captured as CUDA graphs, for
# these sets of needs. Each includes the one before it, so a batch takes the first that covers its needs; options that
# no request uses are then neutral.
COMPILED = (GREEDY, TEMPERED, EVERYTHING)


@dataclass
class Pending:
    """A step that was launched, with its outputs on their way to the host."""

    slots: list[int]  # the slot of each request or chunk, in the order of the rows of `outputs`
    outputs: Tensor  # [B, A + 2] int64 on the host: A tokens, how many of them were emitted, 1 if a logit was NaN
    ready: torch.cuda.Event | None  # this event tells when `outputs` is filled; None: `outputs` is filled already
    nodes: int = 1  # N, the nodes of each tree; a prefill step has 1
    launched: float = 0.0  # when the launch began, by `perf_counter`; a decode step's time includes catching up
    # Whether `collect` must still count the rows that this step adds to the backlog. True after a step with looked-up
    # trees alone: a plain step's one row was counted before the step.
    keeps: bool = False
    chunks: Sequence[Chunk] = ()  # the chunks of a prefill step; a decode step has none
    captured: bool = False  # whether the step was the replay of a CUDA graph
    asked: AskedStep | None = None  # ran the step, and holds what requests ask for beyond tokens; None: none asks
    nan: Sequence[int] = ()  # slots with NaN among their logits, which emit nothing; `collect` sets it

    @property
    def most(self) -> int:
        """A, the most tokens that the step emits for a request."""
        return self.outputs.shape[1] - 2

    @property
    def failed(self) -> Mapping[int, str]:
        """Slots that can get no token, and why; ignore their rows of `outputs`."""
        return {} if self.asked is None else self.asked.failed

    @property
    def timed(self) -> bool:
        """Whether the step's time is typical of steps of its shape, so that the policy may learn from it."""
        return self.asked is None or self.asked.timed


# Accepted paths: the fields of `Committed` (`drafter.py`) from `tokens` to `ends`, with T = A.
Path = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]


class Read(NamedTuple):
    """What the target computes from the known tokens of a prefill step."""

    hidden: Tensor  # [T, d], the normed last hidden states
    features: Tensor | None  # [1, T, F], which the drafter takes in; None: it reads no features
    positions: Tensor  # [1, T] int64


class Engine:
    """Model, KV pages, drafter and sampling state of the running slots, and the step over them.

    R is the number of slots, slot 0 included. lens [R] int64: how many rows of each slot are committed, that is, hold
    keys and values of the request's text. root [R] int64: the newest token of each text, whose row is not computed yet.
    A step changes lens and root; `assign` and `release` set lens.
    """

    # Only if the target is split over several devices (ranks): unsplit copies of those weights that the drafter reads.
    unsplit: Model | None = None

    def __init__(
        self,
        model: Model,
        kv: PagedKV,
        drafter: Drafter,
        sizes: Sizes,
        *,
        attend_kind: AttendKind,
        accept: Accept | None = None,
    ) -> None:
        self.model, self.kv, self.drafter, self.sizes, self.accept = model, kv, drafter, sizes, accept or Accept()
        device, slots = kv.pool.device, kv.table.shape[0]
        self.device = device
        self.settled = False  # whether all graphs are made; then no compilation disturbs the times of steps
        self._when_settled: list[Callable[[], None]] = []
        self.lens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.root = torch.zeros(slots, dtype=torch.int64, device=device)
        self.sampling = SamplingState(slots, model.config.vocab_size, device)
        # [R]: only nodes less deep than this are verified. 1: the request wants no drafts, only the root is verified.
        self.reach = torch.full((slots,), sizes.context_length, dtype=torch.int64, device=device)
        self.asked, self.link = Asked(), Link()  # both do nothing (`seams.py`) until `load/build.py` replaces them
        self.drafter_seconds = 0.0  # the seconds that the drafter took on the host, between steps
        # The seconds of a step by batch size and shape, which `load/warm_up.py` measures.
        self.step_seconds: dict[tuple[int, Shape], float] = {}
        self.small = Small(Engine._before_blocks, Engine._after_blocks)  # compiles the two for some steps
        # The captured steps; `cuda/graphs.py` adds them.
        self.graphs: dict[tuple[DecodeBuffers | PrefillBuffers, Needs], torch.cuda.CUDAGraph] = {}
        self.amended = False  # whether `set_thresholds` changed the thresholds since the start
        # How many steps have begun to change what slots hold. If this number is the same after an exception as before
        # the step, the failed step changed nothing.
        self.changes = 0
        attend = (with_windows(attend_kind, model.config.windows(sizes.context_length)), model.config.layers)
        self.decodes: dict[tuple[int, Shape], DecodeBuffers] = {}
        for batch in sizes.batch_sizes:
            # Shapes with looked-up trees alone come last. Each uses the tensors of an earlier shape, which has as many
            # nodes but takes its trees from the drafter.
            for shape in sizes.shapes_of(batch):
                self.decodes[batch, shape] = (
                    self.decodes[batch, Shape(shape.nodes, True)].of_the_host() if shape.of_host
                    else DecodeBuffers(kv, batch, shape, self._most(shape.nodes), attend)
                )  # fmt: skip
        self.prefills = Prefills(kv, sizes.prefill_sizes, prefill_block(device), attend)
        self.late = Late(drafter, slots, model.norm.weight)
        self.late.attach(self.prefills, self.lens, self.root)
        drafter.attach(kv, attend_kind, sizes.batch_sizes, [size // self.prefills.width for size in self.prefills])
        # The attention plans under which the drafter takes in accepted paths, as chains of tokens; by batch size and A.
        paths = {(batch, self._most(shape.nodes)) for batch, shape in self.decodes if shape.drafts and drafter.commits}
        plans = {(batch, most): Plan(kv, batch, 1, most) for batch, most in sorted(paths)}
        for buffers in self.decodes.values():
            buffers.paths = plans.get((buffers.batch, buffers.most)) if buffers.nodes > 1 else None
        for plan in plans.values():
            # The plan must not be filled before that: the attention may replace the function that `fill` calls last
            # (`Plan.finish`).
            drafter.attend_paths(plan)

    def compile_small(self, compiler: Compiler, choice: CompileFor) -> None:
        """Compile the code before and after the blocks of target and drafter, for the steps that `choice` names."""
        self.small.compile(compiler, choice)
        self.drafter.compile_small(compiler, choice)

    def set_thresholds(self, thresholds: tuple[float, float] | None) -> None:
        """Accept sampled drafts by these thresholds of `verify.pick_lossy` from the next step on; None: exactly.

        Compiled and captured code keeps the thresholds of the start. So after the first change sampled decode steps
        replay no CUDA graph, and their code around the blocks runs uncompiled.
        """
        if thresholds == self.accept.thresholds:
            return
        self.accept.thresholds, self.amended = thresholds, True
        self.graphs = {(buffers, needs): graph for (buffers, needs), graph in self.graphs.items()
                       if not needs or isinstance(buffers, PrefillBuffers)}  # fmt: skip

    # ---- slots ---------------------------------------------------------------------------------------------------

    def assign(self, request: Request, stop_ids: Iterable[int]) -> None:
        """Set up a request's slot. The first `kv_len` rows of its text were found in the prefix cache.

        No step will compute these rows, so the drafter is told their tokens here. `stop_ids` are all ids that end the
        request.
        """
        slot, r = request.slot, request
        self.sampling.assign(slot, r.params, r.seed, r.prompt_ids, r.output_ids, stop_ids)
        self.asked.assign(r, stop_ids)
        self.lens[slot : slot + 1].fill_(r.kv_len)
        self.reach[slot : slot + 1].fill_(self.sizes.context_length if r.speculative else 1)
        self.drafter.hint(slot, r.hints)
        if r.kv_len:
            self.drafter.observe(slot, r.ids[: r.kv_len], again=r.retractions > 0)

    def release(self, slot: int) -> None:
        """Take a slot back from a request that ended or was retracted."""
        self.sampling.release(slot)
        self.asked.release(slot)
        self.lens[slot : slot + 1].zero_()
        self.late.release([slot])
        self.drafter.release(slot)  # last, since a user's drafter may raise

    def restart(self) -> None:
        """Empty all slots and pages after a step raised halfway.

        Pages in use are wiped, since nobody knows what was written there. If the drafter raised, it may raise again
        here. Such an error is only logged, since no state of a drafter changes a token.
        """
        self.kv.wipe(sorted(set(range(1, self.kv.pages)).difference(self.kv.free)))
        self.kv.reset()
        for slot in range(self.kv.table.shape[0]):
            try:
                self.release(slot)
            except Exception:
                logger.exception("the drafter %s cannot let go of a request", self.drafter.name)

    def is_lost(self, error: BaseException) -> bool:
        """Return whether the device is lost: after an error of CUDA all later calls fail too."""
        if self.device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
            try:  # a CUDA error may have another type, if a library or a kernel's launch raised it
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return True
        return isinstance(error, torch.AcceleratorError)

    # ---- a decode step -------------------------------------------------------------------------------------------

    def batch_of(self, count: int) -> int:
        """Return the batch size to which a step of `count` requests is padded."""
        return next(size for size in self.sizes.batch_sizes if size >= count)

    def host_drafts(self, slots: Sequence[int]) -> Sequence[Draft]:
        """Return the drafter's trees for the next step, one per slot; empty if it proposes none on the host."""
        started = time.perf_counter()
        drafts = self.drafter.host_drafts(slots)
        self.drafter_seconds += time.perf_counter() - started
        return drafts

    def launch(self, slots: Sequence[int], shape: Shape, drafts: Sequence[Draft]) -> Pending:
        """Launch one decode step for these slots: verify one tree per slot, keep the accepted path, emit its tokens.

        shape: one of `Sizes.shapes_of` for this batch. drafts: the host's trees (`Planned.drafts`), cut to N nodes
        here. If the step's drafter is a head, a request whose draft is NOTHING verifies the head's tree.
        """
        buffers = self.decodes[self.batch_of(len(slots)), shape]
        started = time.perf_counter()
        # If one of the next two lines raises, only the step's requests are lost, since nothing has changed yet.
        buffers.upload(slots, [draft.cut(buffers.nodes) for draft in drafts])
        asked = self.asked.decode(buffers, slots)
        self.changes += 1
        self.late.before(buffers, slots)
        captured = self.run(buffers, self.sampling.needs(slots), asked)
        keeps = buffers.nodes > 1 and self.late.keeps(buffers)
        return self.pending(list(slots), buffers, asked, captured=captured, keeps=keeps, launched=started)

    def needs_of(self, batch: int) -> Sequence[Needs]:
        """Return the sets of needs for which decode steps of this batch size are compiled and captured.

        On CUDA several requests have no set for a temperature alone: its graphs take longer to make than they save,
        some 3 % of the kernels of a plain step.
        """
        return COMPILED if batch == 1 or self.kv.host_looks else (GREEDY, EVERYTHING)

    def special(self, slots: Sequence[int]) -> bool:
        """Return whether a step over these slots is slower than a greedy one: it samples, or gives more than tokens."""
        return bool(self.sampling.needs(slots)) or self.asked.slows(slots)

    def run(self, step: DecodeBuffers | PrefillBuffers, needs: Needs, asked: AskedStep | None = None) -> bool:
        """Run a step, or replay a CUDA graph for its needs or more if there is one; return whether one was replayed."""
        graphs = (self.graphs.get((step, covering)) for covering in COMPILED if needs <= covering)
        graph = None if asked is not None else next(filter(None, graphs), None)
        with self.link.led(step, asked, graph is not None), within_step(step):
            self.run_here(step, needs, graph, asked)
        return graph is not None

    def run_here(
        self, step: DecodeBuffers | PrefillBuffers, needs: Needs, graph: torch.cuda.CUDAGraph | None,
        asked: AskedStep | None,
    ) -> None:  # fmt: skip
        """Run a step on this rank alone: as the replay of its graph if that is given, else uncaptured."""
        if asked is not None:
            asked.run(needs)
        elif graph is not None:
            graph.replay()
        elif isinstance(step, PrefillBuffers):
            self.prefill_step(step, needs)
        else:
            self.decode(step, needs)

    def decode(self, buffers: DecodeBuffers, needs: Needs) -> None:
        """Run the decode step that these buffers describe, and write its outputs."""
        before, after = parts = self.parts_of(buffers, needs)
        if parts is not self.small.eager:
            needs = next(covering for covering in self.needs_of(buffers.batch) if needs <= covering)
        lens, root, drafted = self.begin(buffers, needs)
        tree, above, embedding, rope = before(self, buffers, lens, root, drafted)
        streams = self.model.run_blocks(embedding, rope, buffers.attend, self.drafter.taps)
        self.hand_over(buffers, after(self, buffers, lens, tree, above, streams, needs))

    def parts_of(self, buffers: DecodeBuffers, needs: Needs) -> Sequence[Step]:
        """Return `_before_blocks` and `_after_blocks`, compiled if `compile_small` chose this step."""
        return self.small.eager if needs and self.amended else self.small.of(buffers)

    def begin(
        self, buffers: DecodeBuffers, needs: Needs, told: Tensor | None = None
    ) -> tuple[Tensor, Tensor, DraftTree | None]:
        """Return what a decode step begins with: lens and root [B], and the trees [B, N] to verify.

        None in place of the trees: they are `buffers.tree` itself. told: `Batch.scores`.
        """
        lens, root = self.lens[buffers.slots], self.root[buffers.slots]
        drafted = buffers.tree
        if buffers.shape.drafts:
            # A drafter may know the noise of the picks, unless coins accept drafts.
            knows = "temperature" in needs and self.accept.thresholds is None
            temperature, seed = self.sampling.noise(buffers.slots) if knows else (None, None)
            batch = Batch(buffers.slots, lens, root, buffers.tree, temperature, seed, told)
            drafted = self.drafter.propose(batch)
        elif buffers.shape.of_host:
            # This step runs the graphs of the shape whose trees the drafter proposes, which take trees as an input of
            # their own. A clone, since they get the buffers' tree too, and must not get one tensor as two inputs.
            drafted = DraftTree(*(part.clone() for part in buffers.tree))
        lens, root, drafted = self.link.begin(buffers, lens, root, drafted)
        return lens, root, None if drafted is buffers.tree else drafted

    def _before_blocks(
        self, buffers: DecodeBuffers, lens: Tensor, root: Tensor, drafted: DraftTree | None
    ) -> tuple[DraftTree, Tensor, Tensor, Rope]:
        """Fill the step's plan from the trees; return trees, `tree.ancestors`, embeddings [B, N, d], rotary factors.

        The arguments are what `begin` returned. Nodes too deep for the request or the context become padding.
        """
        tokens, parents = buffers.tree if drafted is None else drafted
        tokens = torch.cat((root[:, None], tokens[:, 1:]), dim=1)
        above = ancestors(parents)
        positions = lens[:, None] + depth(above)
        end = (lens + self.reach[buffers.slots]).clamp(max=self.sizes.context_length)
        tokens = tokens.masked_fill(positions >= end[:, None], PADDING)
        buffers.plan.fill(buffers.slots, lens, above, tokens != PADDING)
        known = tokens.clamp(min=0)
        # The parents are copied: a compiled function may not return its argument.
        return DraftTree(tokens, parents.clone()), above, self.model.embed(known), self.model.rope(positions)

    def _after_blocks(
        self, buffers: DecodeBuffers, lens: Tensor, tree: DraftTree, above: Tensor, streams: Sequence[Tensor],
        needs: Needs,
    ) -> Path | None:  # fmt: skip
        """Verify the trees, keep the accepted paths, and write the outputs; streams: what `Model.run_blocks` returned.

        Returns the paths for a drafter on the device; None after a plain step, or if the drafter takes in no paths.
        """
        logits, features = self.logits(streams)
        trees = Trees(tree, above, buffers.slots, lens, buffers.most)
        return self.keep(buffers, trees, self.judge(trees, logits, needs), features, needs)

    def logits(self, streams: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the target's logits [B, N, V] at every node, and the drafter's features [B, N, F]."""
        hidden, features = self.model.finish(streams, self.drafter.taps)
        return self.model.logits(hidden), features

    def judge(self, trees: Trees, logits: Tensor, needs: Needs) -> Verdict:
        """Return which drafts are accepted; logits [B, N, V]."""
        wishes = self.sampling.wishes(trees.slots, needs) if needs else None
        looks = self.kv.host_looks and not torch.compiler.is_compiling()
        return self.link.verdict(self.accept.judge(trees, logits, wishes, looks))

    def keep(
        self, buffers: DecodeBuffers, trees: Trees, verdict: Verdict, features: Tensor | None, needs: Needs
    ) -> Path | None:
        """Keep the accepted paths, and write the outputs; features [B, N, F]. Returns what `_after_blocks` returns."""
        tokens, slots, lens, nodes = trees.tree.tokens, trees.slots, trees.lens, buffers.nodes
        if nodes > 1:
            self.kv.compact(slots, lens, verdict.path, verdict.count)
        elif self.late.keeps(buffers):
            self.late.keep(slots, lens[:, None], tokens, features)
        self.sampling.commit(slots, verdict.emitted, verdict.count, "counts" in needs)
        self.lens[slots] = lens + verdict.count
        self.root[slots] = verdict.bonus
        self._clear_padding()
        # Written whole. As three views of one tensor the outputs would overlap for all that torch.compile knows.
        buffers.outputs.copy_(torch.cat((verdict.emitted, verdict.count[:, None], verdict.nan[:, None]), dim=1))
        return self._path(buffers, lens, verdict, tokens, features) if nodes > 1 and self.drafter.commits else None

    def hand_over(self, buffers: DecodeBuffers, path: Path | None) -> None:
        """Give the accepted paths to a drafter on the device, or to its backlog if the step did not run the drafter."""
        if path is None:
            return
        assert buffers.paths is not None
        new = Committed(buffers.slots, *path, buffers.paths, prefill=False)
        if self.late.keeps(buffers):
            self.late.keep(new.slots, new.positions, new.tokens, new.features)
        else:
            self.drafter.commit(new)

    def _path(
        self, buffers: DecodeBuffers, lens: Tensor, verdict: Verdict, tokens: Tensor, features: Tensor | None
    ) -> Path:
        """Return the accepted paths as chains of A rows from `lens` on, and fill the drafter's plan for the chains."""
        assert buffers.paths is not None
        batch, most = verdict.path.shape
        step = torch.arange(most, device=self.device)
        visible = (step <= step[:, None]).expand(batch, -1, -1)
        buffers.paths.fill(buffers.slots, lens, visible, step < verdict.count[:, None])
        if features is not None:
            features = features.gather(1, verdict.path[..., None].expand(-1, -1, features.shape[-1]))
        ends = torch.arange(batch, device=self.device) * most + verdict.count - 1
        return tokens.gather(1, verdict.path), verdict.emitted, lens[:, None] + step, features, ends

    def _most(self, nodes: int) -> int:
        """Return A, the most tokens that a step with trees of this many nodes emits for a request."""
        return min(nodes, self.drafter.depth + 1)

    # ---- a prefill step ------------------------------------------------------------------------------------------

    def prefill(self, chunks: Sequence[Chunk]) -> Pending:
        """Launch a prefill step over chunks of several requests, packed as [1, T]. Each chunk starts a query block.

        The step emits one token for each chunk that is its request's last, and none for other chunks.
        """
        buffers = self.prefills.of(sum(self.prefills.blocks_of(len(chunk.tokens)) for chunk in chunks))
        buffers.upload(chunks)
        asked = self.asked.prefill(buffers, chunks)  # before a change, as in `launch`
        self.changes += 1
        captured = self.run(buffers, self.sampling.needs([chunk.slot for chunk in chunks if chunk.last]), asked)
        return self.pending([chunk.slot for chunk in chunks], buffers, asked, chunks=chunks, captured=captured)

    def prefill_step(self, buffers: PrefillBuffers, needs: Needs) -> None:
        """Run the prefill step that these buffers describe, and write its outputs."""
        read = self.read(buffers)
        logits = self.model.logits(read.hidden.index_select(0, buffers.ends))
        self.keep_prefill(buffers, read, self.pick(buffers, logits, needs), logits, needs)

    def read(self, buffers: PrefillBuffers) -> Read:
        """Run the target's blocks over the known tokens."""
        self.link.share(buffers)
        positions = buffers.place(buffers.starts).view(1, -1)
        hidden, features = self.model(buffers.tokens[None], positions, buffers.attend, self.drafter.taps)
        return Read(hidden[0], features, positions)

    def pick(self, buffers: PrefillBuffers, logits: Tensor, needs: Needs) -> Tensor:
        """Return the tokens [n] that the target picks after the chunks, from logits [n, V]."""
        if not needs:
            return largest(logits)
        return pick(logits, self.sampling.wishes(buffers.chunk_slots, needs), buffers.lens)

    def keep_prefill(self, buffers: PrefillBuffers, read: Read, token: Tensor, logits: Tensor, needs: Needs) -> None:
        """Commit the known tokens and the one picked after each last chunk, and write the outputs."""
        slots, picked = buffers.chunk_slots, buffers.picked
        if self.drafter.commits:
            # The token after a last chunk's last row is the one just picked. `picked` is 1 for last chunks, else 0.
            # Padding chunks have end 0 and `picked` 0, so they add 0 to row 0. An assignment would overwrite that row.
            after = buffers.following.index_add(0, buffers.ends, picked * (token - buffers.following[buffers.ends]))
            self.drafter.commit(Committed(slots, buffers.tokens[None], after[None], read.positions, read.features,
                                          buffers.ends, buffers.plan, prefill=True))  # fmt: skip
        self.sampling.commit(slots, token[:, None], picked, "counts" in needs)
        self.lens[slots] = buffers.lens
        self.root[slots] = token
        self._clear_padding()
        buffers.outputs.copy_(torch.stack((token, picked, logits.amax(-1).isnan()), dim=1))

    # ---- the end of a step ---------------------------------------------------------------------------------------

    def _clear_padding(self) -> None:
        """Set the length of slot 0 back to 0, since the padding of the batch has changed it."""
        # `lens[0] = 0` would copy a number from the host, and on CUDA the host would wait for the whole step.
        self.lens[:1].zero_()

    def pending(
        self, slots: list[int], step: DecodeBuffers | PrefillBuffers, asked: AskedStep | None = None, **what: Any
    ) -> Pending:
        """Queue the copy of a step's outputs to the host; the next step runs after it, so it may overwrite them."""
        outputs = step.outputs
        on_host, ready = outputs.to("cpu", non_blocking=True, copy=True), None
        if asked is not None:
            asked.to_host()
        if outputs.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        return Pending(slots, on_host, ready, step.nodes, asked=asked, **what)

    def collect(self, pending: Pending) -> list[list[int]]:
        """Wait for a step, tell the drafter the step's tokens, and return those emitted, a list per slot or chunk.

        A slot with NaN among its logits emits nothing, and `pending.nan` names it.
        """
        if pending.ready is not None:
            pending.ready.synchronize()
        rows = pending.outputs[: len(pending.slots)].tolist()
        found = [[] if row[-1] else row[: row[-2]] for row in rows]
        pending.nan = [slot for slot, row in zip(pending.slots, rows, strict=True) if row[-1]]
        if pending.keeps:
            self.late.landed({slot: len(tokens) for slot, tokens in zip(pending.slots, found, strict=True)})
        started = time.perf_counter()
        for chunk in pending.chunks:
            self.drafter.observe(chunk.slot, chunk.tokens, again=chunk.again)
        for slot, tokens in zip(pending.slots, found, strict=True):
            self.drafter.observe(slot, tokens)
        self.drafter_seconds += time.perf_counter() - started
        return found

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call `call` once all graphs are made: now if they are made already, else in `settle`."""
        if self.settled:
            call()
        else:
            self._when_settled.append(call)

    @torch.inference_mode()
    def settle(self) -> None:
        """Note that all graphs are made, and make the calls that `when_settled` put off."""
        self.link.tell("settle")
        self.settled, calls, self._when_settled = True, self._when_settled, []
        for call in calls:
            call()
