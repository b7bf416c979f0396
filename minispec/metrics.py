"""Counters of a running engine, and the two log lines operators read, in SGLang's words.

What is accepted is counted in `acceptance.py`. A throughput is tokens divided by the time in which there was work.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minispec.acceptance import Kept, Verified

logger = logging.getLogger("minispec")


class Load(NamedTuple):
    """The scheduler's load after a step."""

    usage: float  # share of pages that requests hold
    running: int  # requests that decode
    queued: int  # requests that wait
    tokens: int = 0  # rows of the requests that decode


RECORDED = 1000  # how many of the newest step times are kept for each number of requests, where they are
STEP_BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 4.0)  # seconds of a step
WAIT_BOUNDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds a request waits


class Histogram:
    """How many values are at or below each bound and above the one before, and the sum of all values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass
class Metrics:
    """Totals since start (or the last flush), and the window since the last decode log line."""

    nodes: int  # N, nodes of a draft tree
    log_interval: int  # decode steps between log lines
    on_cuda: bool = False  # whether steps may be CUDA graphs; if not, log lines do not mention graphs
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    verified: Verified = field(default_factory=Verified)
    shapes: Counter[int] = field(default_factory=Counter)  # decode forwards by nodes of a tree
    requests: int = 0
    aborted: int = 0
    retractions: int = 0
    last: Verified = field(default_factory=Verified)  # counts of the last whole window, as logged
    last_throughput: float = 0.0  # of the same window, in tokens a second
    step_seconds: float = 0.0  # spent on launching decode steps and waiting for them
    host_seconds: float = 0.0  # spent after decode steps on stop rules, text and ending requests
    prefill_steps: int = 0
    captured_steps: int = 0  # decode forwards that a CUDA graph ran
    step_times: dict[int, Histogram] = field(default_factory=dict)  # nodes of a step's trees -> seconds of the steps
    # With SGLANG_RECORD_STEP_TIME the seconds of the newest decode steps by number of requests, else None.
    recorded: dict[int, deque[float]] | None = None
    queue_times: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))  # from arrival to a slot
    _window: Verified = field(default_factory=Verified)
    _window_start: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)  # when the newest step ended, or when work came after a rest

    @property
    def shape_shares(self) -> dict[str, float]:
        """The share of decode forwards by nodes of a tree (key "1": plain steps); keys are strings, for JSON."""
        return {str(nodes): round(count / self.shapes.total(), 4) for nodes, count in sorted(self.shapes.items())}

    def arrived(self, idle: bool) -> None:
        """Count a request. `idle`: there was no work before it, so the time since the last step is in no throughput."""
        self.requests += 1
        if idle:
            self._window_start += time.monotonic() - self._last
            self._last = time.monotonic()

    def _graph(self, captured: bool) -> str:
        return f", cuda graph: {captured}" if self.on_cuda else ""

    def prefill(self, load: Load, chunks: Sequence[int], *, cached: int, emitted: int, captured: bool) -> None:
        """Count and log one prefill step.

        chunks: how many tokens of each chunk were computed. cached: how many were found in the prefix cache. emitted:
        how many tokens requests got.
        """
        new = sum(chunks)
        self.prefill_steps += 1
        self.generated_tokens += emitted
        self.prompt_tokens += new
        self.cached_tokens += cached
        now = time.monotonic()
        speed, self._last = new / max(now - self._last, 1e-9), now
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, "
            "#queue-req: %d, input throughput (token/s): %.2f%s",
            len(chunks), new, cached, load.usage, load.running, load.queued, speed, self._graph(captured),
        )  # fmt: skip

    def decode(self, load: Load, kept: Sequence[Kept], *, nodes: int, captured: bool, seconds: float = 0.0) -> None:
        """Count one decode step, and write a log line every `log_interval` steps.

        kept: what the step gave each request. seconds: the time spent on launching the step and on waiting for it.
        """
        for one in kept:
            self.verified.add(one)
            self._window.add(one)
            self.generated_tokens += one.tokens
        self.captured_steps += captured
        if nodes not in self.step_times:
            self.step_times[nodes] = Histogram(STEP_BOUNDS)
        self.step_times[nodes].add(seconds)
        if self.recorded is not None:
            self.recorded.setdefault(len(kept), deque(maxlen=RECORDED)).append(seconds)
        self.shapes[nodes] += 1
        now = self._last = time.monotonic()
        if self.shapes.total() % self.log_interval:
            return
        self.last, self._window = self._window, Verified()
        self.last_throughput = self.last.tokens.total() / max(now - self._window_start, 1e-9)
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f%s%s, gen throughput (token/s): %.2f, "
            "#queue-req: %d",
            load.running, load.tokens, load.usage, self.last.log() if self.nodes > 1 else "", self._graph(captured),
            self.last_throughput, load.queued,
        )  # fmt: skip
        self._window_start = now
