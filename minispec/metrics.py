"""Counters of a running engine, and the two log lines operators read, in SGLang's words.

Definitions, as in SGLang's log: a decode forward over B requests counts B verify steps; accept len is the tokens
emitted per verify step, the target's own included (1.00 is plain decoding); accept rate is the share of verified drafts
that was accepted. Verified drafts are the nodes of a step's trees without the roots, padding included. Tokens beyond
a stop do not count. Throughputs are tokens over the time in which there was work.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

logger = logging.getLogger("minispec")


class Load(NamedTuple):
    """The scheduler's load after a step."""

    usage: float  # share of pages that requests hold
    running: int  # requests that decode
    queued: int  # requests that wait
    tokens: int = 0  # rows of the requests that decode


STEP_BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 4.0)  # seconds of a step
WAIT_BOUNDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds of a request


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
    on_cuda: bool = False  # whether steps may be CUDA graphs; where none can, log lines do not speak of them
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    verify_steps: int = 0
    verified_tokens: int = 0  # tokens emitted by verify steps
    verified_drafts: int = 0  # nodes of their trees, without the roots
    tree_steps: int = 0  # decode forwards that are not plain
    plain_steps: int = 0
    shapes: Counter[int] = field(default_factory=Counter)  # decode forwards by nodes of a tree
    lookup_rows: int = 0  # verify steps whose tree was looked up and replaced the drafter's
    lookup_tokens: int = 0  # tokens that these emitted
    requests: int = 0
    aborted: int = 0
    retractions: int = 0
    last_throughput: float = 0.0  # these three: of the last window, as logged
    last_accept_length: float = 0.0
    last_accept_rate: float = 0.0
    step_seconds: float = 0.0  # spent on launching decode steps and waiting for them
    host_seconds: float = 0.0  # spent after decode steps on stop rules, text and ending requests
    prefill_steps: int = 0
    captured_steps: int = 0  # decode forwards that a CUDA graph ran
    draft_tokens: int = 0  # nodes of the trees of all requests, without the roots
    kept: Counter[int] = field(default_factory=Counter)  # tokens that a request kept of a step with trees -> how often
    step_times: dict[int, Histogram] = field(default_factory=dict)  # nodes of a step's trees -> seconds of the steps
    queue_times: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))  # from arrival to a slot
    _window: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # steps, verify steps, tokens, drafts
    _window_start: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)  # when the newest step ended, or work came after a rest

    @property
    def accept_length(self) -> float:
        """Tokens per verify step since start; 0 before the first."""
        return self.verified_tokens / self.verify_steps if self.verify_steps else 0.0

    @property
    def accept_rate(self) -> float:
        """Accepted over verified drafts since start; 0 before the first."""
        return (self.verified_tokens - self.verify_steps) / self.verified_drafts if self.verified_drafts else 0.0

    def forget_acceptance(self) -> None:
        """Count verify steps and their tokens from 0 again, since the rule of acceptance has changed."""
        self.verify_steps = self.verified_tokens = self.verified_drafts = self.lookup_rows = self.lookup_tokens = 0

    @property
    def shape_shares(self) -> dict[str, float]:
        """The share of decode forwards by nodes of a tree, 1 for plain ones; keys are strings, for JSON."""
        return {str(nodes): round(count / self.shapes.total(), 4) for nodes, count in sorted(self.shapes.items())}

    @property
    def lookup_shares(self) -> dict[str, float]:
        """The share of verify steps whose tree was looked up, and the share of tokens that these emitted."""
        return {"verify_steps": round(self.lookup_rows / max(self.verify_steps, 1), 4),
                "tokens": round(self.lookup_tokens / max(self.verified_tokens, 1), 4)}  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Return the totals as /server_info names them."""
        return {
            "avg_spec_accept_length": self.accept_length,
            "last_gen_throughput": self.last_throughput,
            "total_retractions": self.retractions,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "verify_steps": self.verify_steps,
            "tree_steps": self.tree_steps,
            "plain_steps": self.plain_steps,
            "speculative_shape_shares": self.shape_shares,
            "speculative_lookup_shares": self.lookup_shares,
            "step_seconds": self.step_seconds,
            "host_seconds": self.host_seconds,
        }

    def arrived(self, idle: bool) -> None:
        """Count a request. `idle`: there was no work before it, so the time since the last step is in no throughput."""
        self.requests += 1
        if idle:
            self._window_start += time.monotonic() - self._last
            self._last = time.monotonic()

    def _graph(self, captured: bool) -> str:
        return f", cuda graph: {captured}" if self.on_cuda else ""

    def prefill(self, load: Load, chunks: Sequence[int], *, cached: int, emitted: int, captured: bool) -> None:
        """Count and log one prefill step: prompt tokens computed, by chunk; `cached` found; `emitted` picked."""
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

    def decode(
        self, load: Load, *, emitted: list[int], nodes: int, captured: bool, seconds: float = 0.0,
        of_host: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        """Count one decode step, `emitted` tokens kept per request, and log every `log_interval` steps.

        seconds: of its launch and of the wait for it. of_host: by request, whether its tree was looked up.
        """
        self.lookup_rows += sum(of_host)
        self.lookup_tokens += sum(count for count, found in zip(emitted, of_host, strict=False) if found)
        kept, drafts = sum(emitted), (nodes - 1) * len(emitted)
        self.captured_steps += captured
        if nodes not in self.step_times:
            self.step_times[nodes] = Histogram(STEP_BOUNDS)
        self.step_times[nodes].add(seconds)
        self.verify_steps += len(emitted)
        self.verified_tokens += kept
        self.verified_drafts += drafts
        self.generated_tokens += kept
        self.shapes[nodes] += 1
        if nodes > 1:
            self.tree_steps += 1
            self.draft_tokens += drafts
            self.kept.update(emitted)
        else:
            self.plain_steps += 1
        window = self._window
        window[0] += 1
        window[1] += len(emitted)
        window[2] += kept
        window[3] += drafts
        now = self._last = time.monotonic()
        if window[0] < self.log_interval:
            return
        self.last_throughput = window[2] / max(now - self._window_start, 1e-9)
        length = self.last_accept_length = window[2] / max(window[1], 1)
        self.last_accept_rate = (window[2] - window[1]) / max(window[3], 1)
        accept = f", accept len: {length:.2f}, accept rate: {self.last_accept_rate:.2f}" if self.nodes > 1 else ""
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f%s%s, gen throughput (token/s): %.2f, "
            "#queue-req: %d",
            load.running, load.tokens, load.usage, accept, self._graph(captured), self.last_throughput, load.queued,
        )  # fmt: skip
        self._window, self._window_start = [0, 0, 0, 0], now
