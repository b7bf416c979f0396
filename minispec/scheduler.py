"""Who runs next, with which pages: admission, chunked prefill, decoding, retraction, and the end of requests.

A request waits, is given a slot and pages for what is known of it, is prefilled in chunks, decodes step by step, and
leaves. `step` launches one thing: a prefill step over the chunks of several requests, or a decode step over all running
ones. Where there is both to do they alternate, so that a long prompt slows the others and never stops them.

A step need not be finished before the next one begins: with `overlap`, step k + 1 is launched and then step k is
collected, so that the device works while the host looks at stop rules, makes text and admits requests. The host then
knows lengths and ends one step late. It reserves rows for the longest outcome, and a row of a request that ended
meanwhile is thrown away. Without overlap the two calls are adjacent; there is one loop for both.

Before each decode step `policy.py` says whether it has trees and how large ones, from what is known at that time; what
the step took and emitted is told to it when the step is collected.

Pages: before a decode step every running request must hold rows for one whole tree. When the pool is short the prefix
cache gives up what nobody holds, and then the newest request is retracted: its pages are let go, it waits at the front
of the queue, and its tokens so far are prefilled again. Seed and output stay, so the text is the same. `validate`
refuses prompts that could never fit alone and shortens the output of the rest, so the oldest request always goes on.

Continuous batching: Orca (OSDI 2022); retraction is vLLM's recomputation (arXiv 2309.06180).
Invariant owned here: when idle, free + cached pages are all pages; who drives the scheduler calls `check` then.

Read next: `engine.py` for what a step is, `policy.py` for the choice of its shape, `output.py` for the stop rules,
`seats.py` and `radix.py` for pages, `server.py` for the HTTP in front.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from minispec.buffers import Chunk
from minispec.engine import Engine, Pending
from minispec.metrics import Load, Metrics
from minispec.output import Output, TextMaker
from minispec.policy import Kind, Planned, Policy
from minispec.radix import Node, PrefixCache
from minispec.request import ABORT_WANTED, Finish, Limits, Request, Update
from minispec.seats import Seat, Seats

logger = logging.getLogger("minispec")

NOT_LAUNCHING: tuple[Sequence[Request], int] = ((), -1)
NAN = Finish("abort", message="the model gave NaN in place of logits, so there is no next token", status=500)


@dataclass(frozen=True)
class SchedulerOptions:
    """What an operator may choose of a scheduler."""

    radix: bool = True  # share prefixes between requests
    overlap: bool = False  # launch a step before the one before it is collected, where the drafter reads no text
    decode_log_interval: int = 40  # decode steps between two log lines
    random_seed: int | None = None  # of the seeds drawn for requests without one
    adaptive: bool = False  # choose each step's shape by what it is worth; else the largest tree whenever there is one


@dataclass(frozen=True)
class Flight:
    """A step under way. A request counts only while it still holds the seat that it had at the launch."""

    pending: Pending
    seats: dict[Request, Seat]  # in the order of the step
    cached: int = 0  # prompt tokens that the prefix cache had, of requests whose first chunk this is
    seconds: float = 0.0  # that the launch of a decode step took
    planned: Planned | None = None  # of a decode step
    disturbances: tuple[int, int] = (0, 0)  # graphs compiled and requests retracted before it
    # Slots and pages of requests that left meanwhile: nobody gets the pages before it is known what was written there.
    left: list[tuple[int, list[int]]] = field(default_factory=list)


class Scheduler:
    """The queues and the loop's body. Every method runs on the engine thread, except `validate`."""

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
        pool_rows = (self.kv.pages - 1) * self.kv.page_size
        self.limits = Limits(engine.model.config.vocab_size, self.sizes.context_length, pool_rows,
                             self.sizes.tree_rows, tuple(sorted(eos_ids)))  # fmt: skip
        self.overlap = options.overlap and not engine.drafter.reads_text  # else its next drafts need this step's tokens
        self.metrics = Metrics(self.sizes.nodes, options.decode_log_interval)
        self.waiting: deque[Request] = deque()
        self.parked: dict[Request, list[Request]] = {}  # choices that wait for the prompt of the first of them
        self.outputs: dict[Request, Output] = {}
        self._seeds = random.Random(options.random_seed)
        # What happened and was not handed out yet. A member, so that a step that raises halfway loses no answer.
        self._updates: list[Update] = []
        self._prefilled_last = False
        trees = {size.nodes: size.depth for size in engine.drafter.trees}
        self.policy = Policy(trees, options.adaptive, engine.drafter.looks_up)
        self.restart_times()
        self._landed = 0.0  # when the last step was collected

    def _start_empty(self, share: bool) -> None:
        """Begin with no request in a slot, no step under way, and an empty prefix cache, used only to `share` pages."""
        self.cache = PrefixCache(self.kv.page_size, self.engine.drafter.lookahead, enabled=share)
        self.seats = Seats(self.kv, self.cache, lambda slots: self.engine.late.catch_up(slots))
        self.prefilling: list[Request] = []  # in order of admission
        self.running: list[Request] = []  # in order of admission
        self.free_slots = list(range(self.sizes.max_running, 0, -1))  # slot 0 is padding
        self._flight: Flight | None = None  # the step that was launched and not collected yet
        self._launching = NOT_LAUNCHING  # the requests of a step that is being launched, and `Engine.changes` before it
        # The front of the queue if it lacked pages, how many were available, and the cache's insertions at that time.
        self._refused: tuple[Request, int, int] | None = None

    def restart_times(self) -> None:
        """Forget what steps took, and begin with what `warm_up.time_steps` has measured, if it has."""
        self.policy.restart(self.engine.step_seconds, self.engine.timed_rows)

    # ---- a request arrives -----------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Check a request against model, context and pool, and set its max_new_tokens; raises RequestError (400).

        Any thread may call it. Prepares what the request asks for beyond tokens, which may take long.
        """
        self.limits.check(request)
        self.engine.asked.prepare(request)

    def submit(self, request: Request) -> None:
        """Queue a validated request; draws its seed if it has none.

        A choice whose leader is still to compute the prompt that they share waits for it, to share its pages as well.
        """
        seed = request.params.sampling_seed
        request.seed = self._seeds.getrandbits(62) if seed is None else seed
        self.metrics.requests += 1
        self.outputs[request] = Output(request, self.tokenizer, self.eos_ids)
        leader = request.leader
        if request.max_new_tokens == 0 and not request.asks_of_prompt:
            self._close(request, Finish("length"))
        elif leader in self.outputs and not leader.prompt_done and self._worth_sharing(request):
            self.parked.setdefault(leader, []).append(request)
        else:
            self.waiting.append(request)

    def _worth_sharing(self, request: Request) -> bool:
        """Return whether the first choice will leave anything that another can use: a full page, or an answer."""
        pages = self.cache.enabled and len(request.prompt_ids) > self.kv.page_size
        return bool(pages or request.asks_of_prompt)

    # ---- a step ----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while a call of `step` would do something."""
        return bool(self.outputs or self._updates or self._flight)

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Launch a prefill or decode step, take in the one that is due, and return what that added to whom.

        Due is the step launched here, or with overlap the one before.
        """
        self._admit()
        launched = self._launch()
        due, self._flight = (self._flight, launched) if self.overlap else (launched, None)
        if due is not None:
            self._land(due)
        return self._drain()

    def _drain(self) -> list[Update]:
        """Hand out what has happened."""
        updates, self._updates = self._updates, []
        return updates

    # ---- admit -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give slots and pages to waiting requests, in order, while both last."""
        while self.waiting and self.free_slots:
            request, available = self.waiting[0], len(self.kv.free) + len(self.cache.idle)
            busy = self.running or self.prefilling  # with nobody at work nothing will be freed: try whatever it costs
            if busy and self._refused_already(request, available):
                return
            ids = request.ids
            path = self.cache.match(ids, request.cacheable, request.salt)
            self.cache.hold(path)
            # One page to spare for each that runs, or the newcomer would soon be retracted again.
            spare = len(self.running) + len(self.prefilling)
            needed = self.kv.pages_for(len(ids) + self.sizes.tree_rows) - len(path)
            if not self.seats.obtain(needed + spare) and not (spare == 0 and self.seats.obtain(needed)):
                self.cache.release(path)
                self._refused = (request, available, self.cache.insertions)
                return
            self.waiting.popleft()
            self._seat(request, ids, path, needed)

    def _refused_already(self, request: Request, available: int) -> bool:
        """Return whether another attempt would fail as the last one did, so that no long prompt is hashed at each step.

        Either of two things can make the next attempt succeed: pages became available, or pages entered the prefix
        cache, among which may be the prompt's own prefix, computed meanwhile for another request.
        """
        if self._refused is None or self._refused[0] is not request:
            return False
        return available <= self._refused[1] and self.cache.insertions == self._refused[2]

    def _seat(self, request: Request, ids: list[int], path: list[Node], needed: int) -> None:
        """Give `request` a slot, its cached path and `needed` fresh pages."""
        request.slot = self.free_slots.pop()
        self.seats.take(request, ids, path, needed)
        request.kv_len = len(path) * self.kv.page_size
        if request.retractions == 0:
            request.cached_tokens = request.kv_len
            self.metrics.queue_times.add(time.monotonic() - request.arrived)
        self.engine.assign(request, self.outputs[request].stop_ids)
        self.prefilling.append(request)

    # ---- reserve ---------------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        """Give every running request pages for one whole tree, retracting the newest requests while that fails."""
        if self._flight is not None:
            if all(self._grow(request) for request in self.running if self._goes_on(request)):
                return
            self._land_flight()  # its longest outcome does not fit, but the real one may; this step then runs alone
        for request in list(self.running):
            while request.slot and not self._grow(request):
                newest = max([*self.prefilling, *self.running], key=lambda r: r.arrived)
                self._retract(newest)

    def _grow(self, request: Request) -> bool:
        """Extend a request's pages to its rows, those that its flight may add, and one tree; False if the pool cannot.

        A flight adds no rows beyond the context. Pages that it might have filled and did not stay with the request,
        which will need them soon.
        """
        rows = request.kv_len
        if self._flight is not None and not self._flight.pending.chunks and self._flies(request):
            rows = min(rows + self._flight.pending.most, self.sizes.context_length)
        return self.seats.grow(request, rows + self.sizes.tree_rows)

    def _retract(self, request: Request) -> None:
        """Send a request back, since the pool is full."""
        used = self._send_back(request)
        logger.warning(
            "KV cache pool is full. Retract requests. #retracted_reqs: 1, #freed_pages: %d, #queue-req: %d",
            used,
            len(self.waiting),
        )

    def _send_back(self, request: Request, sound: bool = True) -> int:
        """Send a request back to the front of the queue without its pages; returns how many those were."""
        used = self._leave(request, sound)
        request.retractions += 1
        self.metrics.retractions += 1
        self.waiting.appendleft(request)
        return used

    # ---- launch ----------------------------------------------------------------------------------------------------

    def _launch(self) -> Flight | None:
        """Launch the next step; None where there is nothing to do until the flight under way has landed."""
        if any(request.needs_tokens for request in self.running):
            self._land_flight()
        decoding = [request for request in self.running if self._goes_on(request)]
        # Where there is both to do, in turn: a long prompt slows the others and never stops them.
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
        kind = Kind.of(batch, engine.special(slots), max(request.kv_len for request in seats))
        planned = self.policy.before(kind, self.sizes.shapes_of(batch), list(seats), lambda: engine.host_drafts(slots))
        pending = engine.launch(slots, planned.choice.shape, planned.drafts)
        self._launching = NOT_LAUNCHING
        seconds = time.perf_counter() - started
        self.metrics.step_seconds += seconds
        return Flight(pending, seats, seconds=seconds, planned=planned, disturbances=before)

    def _launch_prefill(self) -> Flight:
        """Launch a prefill step. A request whose prompt it completes runs from here on: its first token has no row."""
        chunks, requests = self._next_chunks()
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

    def _next_chunks(self) -> tuple[list[Chunk], list[Request]]:
        """Cut the next chunks off the prompts, within the chunk size and the query blocks of a step."""
        budget, blocks = self.sizes.chunk_size, self.engine.prefills.blocks
        chunks: list[Chunk] = []
        requests: list[Request] = []
        for request in self.prefilling:
            if budget <= 0 or blocks <= 0:
                break
            ids, start = self.seats[request].ids, request.kv_len
            end = min(len(ids), start + min(budget, blocks * self.engine.prefills.width))
            tokens, last, again = ids[start:end], end == len(ids), request.retractions > 0
            chunks.append(Chunk(request.slot, tokens, start, last, 0 if last else ids[end], again))
            requests.append(request)
            budget -= len(tokens)
            blocks -= self.engine.prefills.blocks_of(len(tokens))
        return chunks, requests

    def _goes_on(self, request: Request) -> bool:
        """Return whether another step is of use to a running request: its flight alone may bring its last token."""
        return len(request.output_ids) + self._flies(request) < request.max_new_tokens

    def _flies(self, request: Request) -> bool:
        """Return whether the flight under way is of this request, and counts."""
        return self._flight is not None and self._flight.seats.get(request) is self.seats[request]

    def _disturbances(self) -> tuple[int, int]:
        """Return how often anything happened so far that makes a step's time say nothing about its shape."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], self.metrics.retractions

    # ---- land ------------------------------------------------------------------------------------------------------

    def _land(self, flight: Flight) -> None:
        """Collect a step and take in what it brought to the requests that still hold their seats."""
        started = time.perf_counter()
        found = self.engine.collect(flight.pending)
        # With a step in flight the device begins a step when it has done the one before.
        began, self._landed = max(flight.pending.launched, self._landed), time.perf_counter()
        waited = self._landed - started
        self._end_failed(flight)
        emitted = {
            request: tokens
            for (request, seat), tokens in zip(flight.seats.items(), found, strict=True)
            if self.seats.get(request) is seat
        }
        if flight.pending.chunks:
            self._after_prefill(flight, emitted)
            return
        self.metrics.step_seconds += waited
        if flight.planned is not None:
            alone = self._disturbances() == flight.disturbances and flight.pending.timed
            seconds = self._landed - began if alone else None
            self.policy.after(flight.planned, emitted, seconds, flight.pending.catching_up)
        if emitted:
            self._after_decode(flight, emitted, flight.seconds + waited)

    def _land_flight(self) -> None:
        """Take in the flight under way, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight)

    def _end_failed(self, flight: Flight) -> None:
        """End the requests that cannot go on after a step: with NaN for logits, or where no token is allowed.

        What was computed of a request with NaN is shared with nobody, and its pages are wiped. If it had drafts, it
        comes back without them first, since a draft may cost a request time, and never its text.
        """
        pending = flight.pending
        for slot, pages in flight.left:
            if slot in pending.nan:
                self.kv.wipe(pages)
            self.kv.give_back(pages)
        for request in [request for request, seat in flight.seats.items() if self.seats.get(request) is seat]:
            if request.slot in pending.nan and pending.nodes > 1 and request.speculative:
                # What a draft gives spreads to all nodes of its tree. Without drafts there may be no NaN.
                request.undrafted = True
                self._send_back(request, sound=False)
                logger.warning("request %s goes on without drafts: there was NaN among its logits", request.rid)
            elif request.slot in pending.nan:
                logger.error("request %s ends: the model gave NaN in place of logits", request.rid)
                self._end(request, NAN, sound=False)
            elif request.slot in pending.failed:
                self._end(request, Finish("abort", message=pending.failed[request.slot]))

    def _after_prefill(self, flight: Flight, emitted: dict[Request, list[int]]) -> None:
        """Take in a prefill step: share the prompts that are complete, and deliver their first tokens."""
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
                self._unpark(request)
                self._deliver(request, tokens, flight)

    def _after_decode(self, flight: Flight, emitted: dict[Request, list[int]], seconds: float) -> None:
        """Take in a decode step, which took so many seconds: deliver, retire, count."""
        started, pending = time.perf_counter(), flight.pending
        kept = []
        for request, tokens in emitted.items():
            request.kv_len += len(tokens)
            kept.append(self._deliver(request, tokens, flight, seconds))
            request.count_step(kept[-1], pending.nodes)
        self.metrics.decode(
            Load(self.seats.usage, len(emitted), len(self.waiting), sum(request.kv_len for request in emitted)),
            emitted=kept,
            of_host=[] if flight.planned is None else [request in flight.planned.of_host for request in emitted],
            nodes=pending.nodes,
            captured=pending.captured,
            seconds=seconds,
        )
        self.metrics.host_seconds += time.perf_counter() - started

    def _deliver(self, request: Request, tokens: Sequence[int], flight: Flight, seconds: float = 0.0) -> int:
        """Append emitted tokens one by one until a stop rule applies; returns how many of them were kept.

        seconds: that the decode step took.
        """
        output, first = self.outputs[request], len(request.output_ids)
        finish = Finish("length") if request.max_new_tokens == 0 else None  # only the prompt was asked about
        for token in tokens if finish is None else ():
            finish = output.append(token)
            if finish:
                break
        ids = request.output_ids[first:]
        if flight.pending.asked is not None:
            flight.pending.asked.tell([*flight.seats].index(request), output, ids, seconds)
        if finish:
            self._end(request, finish, ids)
        else:
            if 0 < request.params.min_new_tokens <= len(request.output_ids):
                self.engine.sampling.stops_allowed(request.slot)
            self._updates.append(Update(request, ids, output.release(False)))
        return len(ids)

    # ---- end -------------------------------------------------------------------------------------------------------

    def _end(self, request: Request, finish: Finish, ids: Sequence[int] = (), sound: bool = True) -> None:
        """Take a request out of wherever it is, and note its end; not `sound`: its own pages may hold NaN."""
        if request.slot:
            self._leave(request, sound)
        elif request.leader is not None and request in (choices := self.parked.get(request.leader, [])):
            choices.remove(request)
        else:
            self.waiting.remove(request)
        self._close(request, finish, ids)

    def _close(self, request: Request, finish: Finish, ids: Sequence[int] = ()) -> None:
        """Mark a request finished and note its last update, with all the text that was held back."""
        request.finish, request.finished_at = finish, time.monotonic()
        self._unpark(request)
        text = self.outputs.pop(request).release(True)
        self._updates.append(Update(request, list(ids), text, finish))

    def _unpark(self, leader: Request) -> None:
        """Queue the other choices, in front, since they arrived with the first one; what it was told is theirs too."""
        choices = self.parked.pop(leader, [])
        for request in choices:
            request.take_over(leader)
        self.waiting.extendleft(reversed(choices))

    @torch.inference_mode()
    def _leave(self, request: Request, sound: bool = True) -> int:
        """Take slot and pages from a request, leaving its full pages to the prefix cache; returns pages given up."""
        (self.running if request in self.running else self.prefilling).remove(request)
        flies = self._flies(request)
        # Rows are valid as far as tokens are known and written: a stop inside a step leaves rows without a token.
        seat = self.seats.leave(request, request.ids[: self._landed_rows(request)], sound)
        if flies and self._flight is not None:
            self._flight.left.append((request.slot, seat.owned()))
        else:
            self.kv.give_back(seat.owned())
        self.engine.release(request.slot)
        self.free_slots.append(request.slot)
        request.slot = request.kv_len = 0
        return len(seat.pages)

    def _landed_rows(self, request: Request) -> int:
        """Return how many rows of a request are sound: those of a chunk under way may turn out to be NaN."""
        if self._flight is not None and self._flies(request):
            for chunk in self._flight.pending.chunks:
                if chunk.slot == request.slot:
                    return chunk.start
        return request.kv_len

    def abort(self, rid_prefix: str) -> list[Update]:
        """End every request whose rid starts with `rid_prefix`, wherever it is; returns their last updates."""
        parked = [request for choices in self.parked.values() for request in choices]
        everyone = [*parked, *self.waiting, *self.prefilling, *self.running]  # the parked before what they wait for
        named = [r for r in everyone if r.rid.startswith(rid_prefix)]
        self.metrics.aborted += len(named)
        for request in named:
            self._end(request, Finish("abort", message="the request was aborted", status=ABORT_WANTED))
        return self._drain()

    def fail(self, error: BaseException) -> list[Update]:
        """End the requests that a step, or a command between two steps, has lost by raising; the others go on.

        Before the step had begun to change anything, these are the requests in it, else all that have a slot.
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
        """End the requests that have a slot after a step raised, with `waiting` all requests; the others stay queued.

        What the step left half done is not looked at: pages, slots, prefix cache and drafter start anew.
        """
        finish = _failure(error)
        queued = set() if waiting else set(self.waiting)
        self.parked = {leader: choices for leader, choices in self.parked.items() if leader in queued}
        queued.update(*self.parked.values())
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
        """Empty prefix cache, drafter and totals; False, and nothing done, while requests are here."""
        if self.waiting or self.prefilling or self.running:
            return False
        self._land_flight()  # no row of it counts any more, but pages come back
        self._refused = None
        self.kv.give_back(self.cache.evict(self.cache.count))
        self.engine.drafter.clear()
        self.engine.drafter_seconds = 0.0
        self.metrics = Metrics(self.sizes.nodes, self.metrics.log_interval)
        return True

    def reconfigure(self, thresholds: tuple[float, float] | None, adaptive: bool) -> None:
        """From the next step on accept by these (single, acc), None: exactly, and choose shapes or not.

        The accept length is counted anew.
        """
        self.engine.set_thresholds(thresholds)
        self.policy.adaptive = adaptive
        self.metrics.forget_acceptance()

    # ---- numbers ---------------------------------------------------------------------------------------------------

    @property
    def _left(self) -> int:
        """How many pages wait for the flight under way, since their requests left meanwhile."""
        return sum(len(pages) for _, pages in self._flight.left) if self._flight is not None else 0

    def check(self) -> None:
        """Assert that every page is in exactly one place and that the prefix cache is consistent."""
        self.seats.check(self._left)

    def stats(self) -> dict[str, Any]:
        """Return current numbers for /server_info, names as SGLang's where it has one."""
        return {
            "kv_pages_total": self.kv.pages - 1,
            "kv_pages_free": len(self.kv.free),
            "kv_pages_cached": self.cache.count,
            "kv_pages_owned": self.seats.owned + self._left,
            "num_running_reqs": len(self.running) + len(self.prefilling),
            "num_queue_reqs": len(self.waiting) + sum(map(len, self.parked.values())),
            "max_total_num_tokens": (self.kv.pages - 1) * self.kv.page_size,
            "max_req_input_len": self.limits.longest_prompt,
            "effective_max_running_requests_per_dp": self.sizes.max_running,
            "speculative_num_steps": self.sizes.steps,
            "speculative_eagle_topk": self.sizes.topk,
            "speculative_num_draft_tokens": self.sizes.nodes,
            "drafter_seconds": self.engine.drafter_seconds,
            **self.metrics.stats(),
        }


def _failure(error: BaseException) -> Finish:
    """Return the end of a request that was in a step that raised."""
    return Finish("abort", message=f"{type(error).__name__} in a step of the engine", status=500)
