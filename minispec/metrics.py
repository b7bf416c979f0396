"""Counters of a running engine, and the two log lines operators read, in SGLang's words.

Definitions, as in SGLang's log: a decode forward over B requests counts B verify steps; accept len is the tokens
emitted per verify step, the target's own included (1.00 is plain decoding); accept rate is accept len over the size of
a tree, the root included. Tokens that a step emitted beyond a stop are not counted.

Read next: `scheduler.py`, which counts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

logger = logging.getLogger("minispec")


class Load(NamedTuple):
    """How busy the scheduler is after a step."""

    usage: float  # share of pages that requests hold
    running: int  # requests that decode
    queued: int  # requests that wait


@dataclass
class Metrics:
    """Totals since start (or the last flush), and the window since the last decode log line."""

    nodes: int  # N, nodes of a draft tree
    log_interval: int  # decode steps between log lines
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    verify_steps: int = 0
    verified_tokens: int = 0  # tokens emitted by verify steps
    tree_steps: int = 0  # decode forwards with a tree of more than its root
    plain_steps: int = 0
    shapes: Counter[int] = field(default_factory=Counter)  # decode forwards by nodes of a tree
    requests: int = 0
    aborted: int = 0
    retractions: int = 0
    last_throughput: float = 0.0
    step_seconds: float = 0.0  # spent in decode steps on launching and waiting
    host_seconds: float = 0.0  # spent in decode steps on stop rules, text and ending requests
    _window: list[int] = field(default_factory=lambda: [0, 0, 0])  # steps, verify steps, tokens
    _window_start: float = field(default_factory=time.monotonic)
    _last_prefill: float = field(default_factory=time.monotonic)

    @property
    def accept_length(self) -> float:
        """Tokens per verify step since start; 0 before the first."""
        return self.verified_tokens / self.verify_steps if self.verify_steps else 0.0

    def forget_acceptance(self) -> None:
        """Count steps and what they emitted from 0 again, since from here on drafts are accepted otherwise."""
        self.verify_steps = self.verified_tokens = 0

    @property
    def shape_shares(self) -> dict[str, float]:
        """The share of decode forwards by the nodes of their trees, 1 for plain ones; names are numbers, for JSON."""
        return {str(nodes): round(count / self.shapes.total(), 4) for nodes, count in sorted(self.shapes.items())}

    def prefill(self, load: Load, chunks: Sequence[int], *, cached: int, emitted: int, captured: bool) -> None:
        """Count and log one prefill step: prompt tokens computed by chunk, `cached` ones found, `emitted` picked."""
        new = sum(chunks)
        self.generated_tokens += emitted
        self.prompt_tokens += new
        self.cached_tokens += cached
        now = time.monotonic()
        speed, self._last_prefill = new / max(now - self._last_prefill, 1e-9), now
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, "
            "#queue-req: %d, input throughput (token/s): %.2f, cuda graph: %s",
            len(chunks), new, cached, load.usage, load.running, load.queued, speed, captured,
        )  # fmt: skip

    def decode(self, load: Load, *, emitted: list[int], nodes: int, tokens: int, captured: bool) -> None:
        """Count one decode step, `emitted` tokens kept per request, and log every `log_interval` steps."""
        kept = sum(emitted)
        self.verify_steps += len(emitted)
        self.verified_tokens += kept
        self.generated_tokens += kept
        self.shapes[nodes] += 1
        if nodes > 1:
            self.tree_steps += 1
        else:
            self.plain_steps += 1
        window = self._window
        window[0] += 1
        window[1] += len(emitted)
        window[2] += kept
        if window[0] < self.log_interval:
            return
        now = time.monotonic()
        self.last_throughput = window[2] / max(now - self._window_start, 1e-9)
        length = window[2] / max(window[1], 1)
        accept = f"accept len: {length:.2f}, accept rate: {length / self.nodes:.2f}, "
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, %scuda graph: %s, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            load.running, tokens, load.usage, accept if self.nodes > 1 else "", captured, self.last_throughput,
            load.queued,
        )  # fmt: skip
        self._window, self._window_start = [0, 0, 0], now


def loops(tokens: Sequence[int], window: int = 48, period: int = 16) -> bool:
    """Say whether a reply's last `window` tokens repeat with a period of at most `period`.

    Small models loop under greedy decoding, and a loop is easy to draft. So benchmarks state their figures with and
    without such replies.
    """
    tail = list(tokens[-window:])
    return len(tail) == window and any(tail[p:] == tail[:-p] for p in range(1, period + 1))
