"""Who runs next, with which pages: admission, chunked prefill, decoding, retraction, and the end of requests.

A request waits, gets a slot and pages (its seat), is prefilled in chunks, decodes step by step, and leaves. `step`
launches a prefill step over the chunks of several requests, or a decode step over all running ones. If there is work
for both, prefill and decode steps alternate, so a long prompt slows other requests but never stops them.

A launched step is called a flight. When the host collects the step's tokens, the flight lands. With `overlap`, step
k + 1 is launched before step k is collected, so the device works while the host applies stop rules, makes text and
admits requests. The host then learns one step late how long texts are and which have ended. It reserves rows for the
longest outcome, and drops a flight's tokens for requests that ended meanwhile.

Pages: before a decode step every running request must hold rows for one whole tree. If the pool is short even after
the prefix cache gave up pages that nobody holds, the newest request is retracted: it gives up its pages, waits at the
front of the queue, and its tokens are prefilled again. It keeps seed and output, so its text is the same. `validate`
refuses prompts that could never fit alone and bounds the output of the rest, so the oldest request always goes on.

Continuous batching: Orca (OSDI 2022); retraction is vLLM's recomputation (arXiv 2309.06180).
Invariant owned here: if no request is left, every page is free or in the prefix cache. In that state callers of `step`
run `check`.

Read next: `engine.py` for what a step is, `policy.py` for the choice of its shape, `output.py` for the stop rules,
`seats.py` and `radix.py` for pages, `server.py` for the HTTP in front.
"""

from __future__ import annotations

import logging
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from minispec.acceptance import Kept
from minispec.buffers import Chunk
from minispec.engine import Engine, Pending
from minispec.metrics import Load, Metrics
from minispec.output import Output, TextMaker
from minispec.policy import Kind, Planned, Policy
from minispec.radix import Node, PrefixCache
from minispec.request import ABORTED, Finish, Limits, Request, Update
from minispec.seats import Seat, Seats

logger = logging.getLogger("minispec")

NOT_LAUNCHING: tuple[Sequence[Request], int] = ((), -1)
NAN = Finish("abort", message="the model gave NaN in place of logits, so there is no next token", status=500)


@dataclass(frozen=True)
class SchedulerOptions:
    """A scheduler's options."""

    radix: bool = True  # whether requests share the pages of equal beginnings, through the prefix cache
    # Whether a step is launched before the last one is collected; ignored if the drafter reads text.
    overlap: bool = False
    strict_max_tokens: bool = False  # whether a request for more tokens than the context has left is an error
    decode_log_interval: int = 40  # how many decode steps lie between two log lines
    random_seed: int | None = None  # seeds the generator that draws the seeds of requests without one
    # The smallest batch for which the policy chooses each step's shape by speed. Smaller ones have the largest trees.
    adapts_from: float = math.inf
    allows: Callable[[int, int], bool] | None = None  # which nodes a batch may draft; None: any
    greedy: bool = False  # whether every request's temperature counts as 0
    record_times: bool = False  # whether the times of the newest steps are kept, by batch


@dataclass(frozen=True)
class Flight:
    """A step that was launched and is not collected yet."""

    pending: Pending
    # The step's requests, in order. When the flight lands, a request gets tokens only if it still holds this seat.
    seats: dict[Request, Seat]
    # How many tokens the prefix cache had of the requests whose first chunk is in this prefill step.
    cached: int = 0
    seconds: float = 0.0  # how long the host took to launch a decode step
    planned: Planned | None = None  # the policy's choice for a decode step; None: a prefill step
    disturbances: tuple[int, int] = (0, 0)  # how many graphs were compiled and requests retracted before the launch
    # Slots and own pages of requests that left since the launch. The pages are given back when the flight lands: only
    # then is it known whether they hold NaN.
    left: list[tuple[int, list[int]]] = field(default_factory=list)


class Scheduler:
    """The queues of requests, and `step`, which the engine thread's loop calls.

    Every method runs on the engine thread, except `validate`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextMaker,
        eos_ids: frozenset[int],
        options: SchedulerOptions,
    ) -> None:
        self.engine, self.kv, self.tokenizer, self.eos_ids = engine, engine.kv, tokenizer, eos_ids
        self.sizes = engine.sizes
        self._start_empty(options.radix)
        self.limits = Limits(
            engine.model.config.vocab_size, self.sizes.context_length, (self.kv.pages - 1) * self.kv.page_size,
            self.sizes.tree_rows, tuple(sorted(eos_ids)), options.strict_max_tokens,
        )  # fmt: skip
        self._may_overlap = options.overlap
        self.metrics = Metrics(self.sizes.nodes, options.decode_log_interval, engine.device.type == "cuda",
                               recorded={} if options.record_times else None)  # fmt: skip
        self.waiting: deque[Request] = deque()
        self.outputs: dict[Request, Output] = {}  # of every request that has not ended
        self.greedy = options.greedy
        self._seeds = random.Random(options.random_seed)
        # Updates that were not returned yet. They are kept here, so that a step that raises halfway loses none.
        self._updates: list[Update] = []
        self._prefilled_last = False  # whether the newest step was a prefill step
        trees = {size.nodes: size.depth for size in engine.drafter.trees}
        self.policy = Policy(trees, options.adapts_from, engine.drafter.has_lookups, options.allows,
                             lambda request: engine.drafter.confidences(request.slot))  # fmt: skip
        self.policy.restart(engine.step_seconds)
        self._landed = 0.0  # when the last step was collected, by `perf_counter`

    def _start_empty(self, share: bool) -> None:
        """Begin with no request in a slot, no flight and an empty prefix cache, which stays empty without `share`."""
        self.cache = PrefixCache(self.kv.page_size, self.engine.drafter.lookahead, enabled=share)
        self.seats = Seats(self.kv, self.cache, lambda slots: self.engine.late.catch_up(slots))
        self.prefilling: list[Request] = []  # in order of admission
        self.running: list[Request] = []  # in order of admission
        self.free_slots = list(range(self.sizes.max_running, 0, -1))  # slot 0 is padding
        self._flight: Flight | None = None
        self._launching = NOT_LAUNCHING  # the requests of a step that is being launched, and `Engine.changes` before it
        # The request that found too few pages, how many pages were available at that time, and how many had ever
        # entered the cache. The request is tried again when more are available, or when further ones have entered:
        # these may hold a prefix of its prompt.
        self._refused: tuple[Request | None, int, int] = (None, 0, 0)

    # ---- a request arrives -----------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Check a request against model, context and pool, and set its max_new_tokens; raises RequestError (400).

        Any thread may call it. It also prepares what the request asks for beyond tokens, which may take long.
        """
        self.limits.check(request)
        self.engine.asked.prepare(request)

    def submit(self, request: Request) -> None:
        """Queue a validated request; draws its seed if it has none."""
        if self.greedy:
            request.params = replace(request.params, temperature=0.0)
        seed = request.params.sampling_seed
        request.seed = self._seeds.getrandbits(62) if seed is None else seed
        self.metrics.arrived(idle=not self.has_work)
        self.outputs[request] = Output(request, self.tokenizer, self.eos_ids)
        if request.max_new_tokens == 0 and not request.unscored:
            self._close(request, Finish("length"))
        else:
            self.waiting.append(request)

    @property
    def overlap(self) -> bool:
        """Whether the next step is launched before the one before it lands; drafts from text need all tokens."""
        return self._may_overlap and not self.engine.drafter.reads_text

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do something."""
        return bool(self.outputs or self._updates or self._flight)

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Launch a step; land it or, with overlap, the one before; return what the landed step added to requests."""
        overlap = self.overlap  # asked once, since another thread may load a corpus at any time
        if not overlap:
            self._land_flight()
        self._admit()
        launched = self._launch()
        due, self._flight = (self._flight, launched) if overlap else (launched, None)
        if due is not None:
            self._land(due)
        return self._drain()

    def _drain(self) -> list[Update]:
        updates, self._updates = self._updates, []
        return updates

    def _admit(self) -> None:
        """Give slots and pages to waiting requests, in order, as long as there are slots and pages."""
        while self.free_slots and (request := next((r for r in self.waiting if not self._follows(r)), None)):
            available, entered = self.seats.available, self.cache.insertions
            others = len(self.running) + len(self.prefilling)  # if there are none, nobody will free pages: try anyway
            refused, available_then, entered_then = self._refused
            if others and request is refused and available <= available_then and entered == entered_then:
                return  # another attempt would fail too, and hash a long prompt once more
            if request.leader is not None:
                request.prompt_scores += request.leader.prompt_scores[len(request.prompt_scores) :]
            ids = request.ids
            path = self.cache.match(ids, request.cacheable, request.salt)
            self.cache.hold(path)
            needed = self.kv.pages_for(len(ids) + self.sizes.tree_rows) - len(path)
            # One page is left for each of the others. Without these pages the new request would soon be retracted.
            if not self.seats.obtain(needed + others):
                self.cache.release(path)
                self._refused = (request, available, entered)
                return
            self.waiting.remove(request)
            self._seat(request, ids, path, needed)

    def _follows(self, request: Request) -> bool:
        """Return whether a request must wait for what its leader computes: a full page, or scores of the prompt.

        If a client wants several answers (choices) to one prompt, the first choice is the leader of the others.
        """
        if request.leader not in self.outputs or request.leader.prompt_done:
            return False
        return bool(request.unscored) or (self.cache.enabled and len(request.prompt_ids) > self.kv.page_size)

    def _seat(self, request: Request, ids: list[int], path: list[Node], needed: int) -> None:
        """Give `request` a slot, its cached path and `needed` fresh pages."""
        request.slot = self.free_slots.pop()
        self.seats.take(request, ids, path, needed)
        request.kv_len = len(path) * self.kv.page_size
        if request.retractions == 0:
            request.cached_tokens = request.kv_len
            self.metrics.queue_times.add(time.monotonic() - request.arrived)
        self.prefilling.append(request)
        try:
            self.engine.assign(request, self.outputs[request].stop_ids)
        except Exception as error:  # what is wrong in this request alone ends no other one
            if self.engine.is_lost(error):
                raise
            logger.exception("request %s cannot be set up and ends", request.rid)
            self._end(request, _failure(error))

    def _reserve(self) -> None:
        """Give every running request pages for one whole tree, retracting the newest requests while that fails."""
        if self._flight is not None:
            if all(self._grow(request) for request in self.running if self._goes_on(request)):
                return
            self._land_flight()  # the longest outcome of the flight does not fit, but its real outcome may fit
        for request in list(self.running):
            while request.slot and not self._grow(request):
                newest = max([*self.prefilling, *self.running], key=lambda r: r.arrived)
                pages = len(self.seats[newest].pages)
                self._send_back(newest)
                logger.warning(
                    "KV cache pool is full. Retract requests. #retracted_reqs: 1, #freed_pages: %d, #queue-req: %d",
                    pages,
                    len(self.waiting),
                )

    def _grow(self, request: Request) -> bool:
        """Extend a request's pages to hold its rows, what its flight may add, and one tree; False if there are too few.

        A flight adds no rows beyond the context. The request keeps pages that the flight did not fill, for later steps.
        """
        rows = request.kv_len
        if self._flight is not None and not self._flight.pending.chunks and self._flies(request):
            rows = min(rows + self._flight.pending.most, self.sizes.context_length)
        return self.seats.grow(request, rows + self.sizes.tree_rows)

    def _send_back(self, request: Request, sound: bool = True) -> None:
        """Send a request to the front of the queue and take its pages."""
        self._leave(request, sound)
        request.retractions += 1
        self.metrics.retractions += 1
        self.waiting.appendleft(request)

    def _launch(self) -> Flight | None:
        """Launch the next step; None if there is nothing to do before the flight lands."""
        if self.engine.asked.reads_text([request.slot for request in self.running]):
            self._land_flight()
        decoding = [request for request in self.running if self._goes_on(request)]
        self._prefilled_last = bool(self.prefilling and not (decoding and self._prefilled_last))
        if self._prefilled_last:
            return self._launch_prefill()
        self._reserve()
        seats = {request: self.seats[request] for request in self.running if self._goes_on(request)}
        if not seats:
            return None
        self._launching = list(seats), self.engine.changes
        started = time.perf_counter()
        engine, slots, before = self.engine, [request.slot for request in seats], self._disturbances()
        batch = engine.batch_of(len(slots))
        kind = Kind(batch, engine.special(slots))
        planned = self.policy.before(kind, self.sizes.shapes_of(batch), list(seats), lambda: engine.host_drafts(slots))
        pending = engine.launch(slots, planned.shape, planned.drafts)
        self._launching = NOT_LAUNCHING
        seconds = time.perf_counter() - started
        self.metrics.step_seconds += seconds
        return Flight(pending, seats, seconds=seconds, planned=planned, disturbances=before)

    def _launch_prefill(self) -> Flight:
        """Launch a prefill step. A request whose prompt this step completes counts as running from here on."""
        chunks = self._next_chunks()
        requests = self.prefilling[: len(chunks)]
        self._launching = requests, self.engine.changes
        fresh = [r for r in requests if r.kv_len == len(self.seats[r].path) * self.kv.page_size]
        cached = sum(r.kv_len for r in fresh)
        flight = Flight(self.engine.prefill(chunks), {r: self.seats[r] for r in requests}, cached)
        self._launching = NOT_LAUNCHING
        for request, chunk in zip(requests, chunks, strict=True):
            request.kv_len = chunk.start + len(chunk.tokens)
            if chunk.last:
                self.prefilling.remove(request)
                self.running.append(request)
        return flight

    def _next_chunks(self) -> list[Chunk]:
        """Cut the next chunks off the first prompts, within the chunk size and the query blocks of a step."""
        budget, blocks = self.sizes.chunk_size, self.engine.prefills.blocks
        chunks: list[Chunk] = []
        for request in self.prefilling:
            if budget <= 0 or blocks <= 0:
                break
            ids, start = self.seats[request].ids, request.kv_len
            end = min(len(ids), start + min(budget, blocks * self.engine.prefills.width))
            tokens, last, again = ids[start:end], end == len(ids), request.retractions > 0
            chunks.append(Chunk(request.slot, tokens, start, last, 0 if last else ids[end], again))
            budget -= len(tokens)
            blocks -= self.engine.prefills.blocks_of(len(tokens))
        return chunks

    def _goes_on(self, request: Request) -> bool:
        """Return whether a running request may need another step after the flight, which gives at least one token."""
        return len(request.output_ids) + self._flies(request) < request.max_new_tokens

    def _flies(self, request: Request) -> bool:
        """Return whether the flight has this request with its present seat."""
        return self._flight is not None and self._flight.seats.get(request) is self.seats[request]

    def _disturbances(self) -> tuple[int, int]:
        """Return how many graphs were compiled and requests retracted so far: both spoil the time of a step."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # which a start need not wait for
        return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0, self.metrics.retractions

    def _land(self, flight: Flight) -> None:
        """Collect a step, and deliver its tokens to the requests that still hold their seats."""
        started = time.perf_counter()
        found = self.engine.collect(flight.pending)
        # With overlap the device begins a step when the one before is done.
        began, self._landed = max(flight.pending.launched, self._landed), time.perf_counter()
        waited = self._landed - started
        self._end_failed(flight)
        emitted = {
            request: tokens
            for (request, seat), tokens in zip(flight.seats.items(), found, strict=True)
            if self.seats.get(request) is seat
        }
        if flight.planned is None:
            self._after_prefill(flight, emitted)
            return
        self.metrics.step_seconds += waited
        alone = self._disturbances() == flight.disturbances and flight.pending.timed
        seconds = self._landed - began if alone else None
        # The policy learns from all emitted tokens, even from those after a stop: they too show what trees are worth.
        self.policy.after(flight.planned, emitted, seconds)
        if emitted:
            self._after_decode(flight, flight.planned, emitted, flight.seconds + waited)

    def _land_flight(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight)

    def _end_failed(self, flight: Flight) -> None:
        """End the requests that cannot go on after a step: those with NaN logits, or for which no token is allowed.

        The pages of a request with NaN are wiped, never shared. If the request had drafts, it is queued again and goes
        on without drafts: a draft may cost a request time, but never its text.
        """
        pending = flight.pending
        for slot, pages in flight.left:
            if slot in pending.nan:
                self.kv.wipe(pages)
            self.kv.give_back(pages)
        for request in [request for request, seat in flight.seats.items() if self.seats.get(request) is seat]:
            if request.slot in pending.nan and pending.nodes > 1 and request.speculative:
                # NaN in one draft reaches all nodes of its tree, since attention multiplies masked values by 0, and
                # 0 * NaN is NaN. Without drafts the logits may hold no NaN at all.
                request.undrafted = True
                self._send_back(request, sound=False)
                logger.warning("request %s goes on without drafts: there was NaN among its logits", request.rid)
            elif request.slot in pending.nan:
                logger.error("request %s ends: the model gave NaN in place of logits", request.rid)
                self._end(request, NAN, sound=False)
            elif request.slot in pending.failed:
                self._end(request, Finish("abort", message=pending.failed[request.slot]))

    def _after_prefill(self, flight: Flight, emitted: dict[Request, list[int]]) -> None:
        """Land a prefill step: share the prompts that are complete, and deliver their first tokens."""
        self.metrics.prefill(
            Load(self.seats.usage, len(self.running), len(self.waiting)),
            [len(chunk.tokens) for chunk in flight.pending.chunks],
            cached=flight.cached,
            emitted=sum(map(len, emitted.values())),
            captured=flight.pending.captured,
        )
        for request, tokens in emitted.items():
            if flight.pending.asked is not None:
                flight.pending.asked.tell_prompt([*flight.seats].index(request), request)
            if tokens:
                self.seats.share(request, self.seats[request].ids)
                request.prompt_done = True
                self._deliver(request, tokens, flight)

    def _after_decode(
        self, flight: Flight, planned: Planned, emitted: dict[Request, list[int]], seconds: float
    ) -> None:
        """Land a decode step that took `seconds`: deliver its tokens, which may end requests, and count them."""
        started, pending = time.perf_counter(), flight.pending
        kept = []
        for request, tokens in emitted.items():
            request.kv_len += len(tokens)
            source, drafted = planned.verified(request)
            count = self._deliver(request, tokens, flight, seconds, source)
            kept.append(Kept(count, source, drafted, min(len(tokens) - 1, count)))
            request.verified.add(kept[-1])
        self.metrics.decode(
            Load(self.seats.usage, len(emitted), len(self.waiting), sum(request.kv_len for request in emitted)),
            kept,
            nodes=pending.nodes,
            captured=pending.captured,
            seconds=seconds,
        )
        self.metrics.host_seconds += time.perf_counter() - started

    def _deliver(
        self, request: Request, tokens: Sequence[int], flight: Flight, seconds: float = 0.0, source: str | None = None
    ) -> int:
        """Append emitted tokens one by one until a stop rule applies; returns how many were kept.

        seconds: the time of the decode step. source: whose drafts it verified (`Planned.verified`).
        """
        output, first = self.outputs[request], len(request.output_ids)
        finish = Finish("length") if request.max_new_tokens == 0 else None  # 0: the request asks about its prompt only
        for token in tokens if finish is None else ():
            try:
                finish = output.append(token)
            except Exception as error:  # of this request's text alone
                logger.exception("request %s has no text and ends", request.rid)
                finish = _failure(error)
            if finish:
                break
        ids = request.output_ids[first:]
        if flight.pending.asked is not None:
            flight.pending.asked.tell([*flight.seats].index(request), output, ids, seconds, source)
        if finish:
            self._end(request, finish, ids)
        else:
            if 0 < request.params.min_new_tokens <= len(request.output_ids):
                self.engine.sampling.stops_allowed(request.slot)
            self._updates.append(Update(request, ids, output.release(False)))
        return len(ids)

    def _end(self, request: Request, finish: Finish, ids: Sequence[int] = (), sound: bool = True) -> None:
        """Remove a request from queue or slot, and note its end; sound: False if its own pages may hold NaN."""
        if request.slot:
            self._leave(request, sound)
        else:
            self.waiting.remove(request)
        self._close(request, finish, ids)

    def _close(self, request: Request, finish: Finish, ids: Sequence[int] = ()) -> None:
        """Mark a request finished and add its last update, with all text that was held back."""
        request.finish, request.finished_at = finish, time.monotonic()
        text = self.outputs.pop(request).release(True)
        self._updates.append(Update(request, list(ids), text, finish))

    @torch.inference_mode()
    def _leave(self, request: Request, sound: bool) -> None:
        """Take slot and pages from a request, and enter its full pages into the prefix cache."""
        (self.running if request in self.running else self.prefilling).remove(request)
        flies = self._flies(request)
        # Tokens that a step emitted after a stop were dropped, so they are not in `ids`, and their rows are not shared.
        owned = self.seats.leave(request, request.ids[: self._landed_rows(request)], sound)
        if flies and self._flight is not None:
            self._flight.left.append((request.slot, owned))
        else:
            self.kv.give_back(owned)
        self.engine.release(request.slot)
        self.free_slots.append(request.slot)
        request.slot = request.kv_len = 0

    def _landed_rows(self, request: Request) -> int:
        """Return how many rows of a request have landed; rows of a chunk in flight may turn out to hold NaN."""
        if self._flight is not None and self._flies(request):
            for chunk in self._flight.pending.chunks:
                if chunk.slot == request.slot:
                    return chunk.start
        return request.kv_len

    def abort(self, rid_prefix: str) -> list[Update]:
        """End every request whose rid starts with `rid_prefix`, wherever it is; returns their last updates."""
        named = [r for r in [*self.waiting, *self.prefilling, *self.running] if r.rid.startswith(rid_prefix)]
        self.metrics.aborted += len(named)
        for request in named:
            self._end(request, ABORTED)
        return self._drain()

    def fail(self, error: BaseException) -> list[Update]:
        """After an exception in a step, or in a command between two steps, end the requests that cannot go on.

        If the step had not begun to change slots (`Engine.changes`), only the step's requests end. Else `fail_all`
        ends all requests that have a slot.
        """
        (requests, changes), self._launching = self._launching, NOT_LAUNCHING
        if changes == self.engine.changes:
            try:
                for request in requests:
                    self._end(request, _failure(error))
                return self._drain()
            except Exception:
                logger.exception("the requests of a step cannot be ended by themselves")
        return self.fail_all(error)

    @torch.inference_mode()
    def fail_all(self, error: BaseException, waiting: bool = False) -> list[Update]:
        """After an exception, end all requests that have a slot, and the choices that wait for one of them.

        If `waiting`, end the queued requests and their choices too. All slots (the drafter's too), all pages and the
        prefix cache are emptied, since the step may have left them half changed.
        """
        finish = _failure(error)
        queued = {r for r in self.waiting if not (waiting or (r.leader and r.leader.slot and self._follows(r)))}
        for request in [r for r in self.outputs if r not in queued]:
            request.slot = request.kv_len = 0
            self._close(request, finish)
        self.waiting = deque(r for r in self.waiting if r in queued)
        self._start_empty(self.cache.enabled)
        self.engine.restart()
        return self._drain()

    # ---- between two steps -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def flush_cache(self) -> bool:
        """Empty prefix cache and drafter, and begin all counts anew; if there are requests, only return False."""
        if self.waiting or self.prefilling or self.running:
            return False
        self._land_flight()  # gives back the pages of requests that left; no request is here to take its tokens
        self.kv.give_back(self.cache.evict(self.cache.count))
        self.engine.drafter.clear()
        self.engine.drafter_seconds = 0.0
        recorded: dict[int, deque[float]] | None = None if self.metrics.recorded is None else {}
        self.metrics = Metrics(self.sizes.nodes, self.metrics.log_interval, self.metrics.on_cuda, recorded=recorded)
        return True

    @property
    def left(self) -> int:
        """How many pages, of requests that left since the launch, are kept until the flight lands."""
        return sum(len(pages) for _, pages in self._flight.left) if self._flight is not None else 0

    def check(self) -> None:
        """Assert that every page is in exactly one place and that the prefix cache is consistent."""
        self.seats.check(self.left)


def _failure(error: BaseException) -> Finish:
    return Finish("abort", message=f"{type(error).__name__} in a step of the engine", status=500)
