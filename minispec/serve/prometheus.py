"""What /metrics answers: the counters of the scheduler and of HTTP, under SGLang's names, in Prometheus' text form.

Nobody counts for Prometheus. The engine thread adds to the plain lists of `metrics.py`, the event loop to those of
`Seen`, and a scrape makes families of samples of them. Names that SGLang has too mean what they mean there; what it has
no name for begins with `minispec:`. Counters start anew with /flush_cache, which Prometheus takes as a restart.

prometheus-client, the extra `minispec[metrics]`, is imported at the first scrape.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from minispec.metrics import WAIT_BOUNDS, Histogram, Metrics
from minispec.request import RequestError, Update

if TYPE_CHECKING:
    from minispec.scheduler import Scheduler

TOKEN_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)  # seconds from token to token
EXTRA = "minispec[metrics]"


class Seen:
    """What the event loop sees of requests: their waits, as clients have them, and how they were answered."""

    def __init__(self) -> None:
        self.first, self.whole, self.between = Histogram(WAIT_BOUNDS), Histogram(WAIT_BOUNDS), Histogram(TOKEN_BOUNDS)
        self.asked: Counter[tuple[str, str]] = Counter()  # endpoint, method
        self.answered: Counter[tuple[str, str, str]] = Counter()  # endpoint, status, method
        self._last: dict[str, float] = {}  # rid -> when its newest tokens came

    def updates(self, updates: Sequence[Update]) -> None:
        """Take in what a step brought; called once a step."""
        now = time.monotonic()
        for update in updates:
            request = update.request
            if update.ids:
                if (before := self._last.get(request.rid)) is None:
                    self.first.add(now - request.arrived)
                else:
                    self.between.add((now - before) / len(update.ids), len(update.ids))
                self._last[request.rid] = now
            if update.finish is not None:
                self._last.pop(request.rid, None)
                self.whole.add(now - request.arrived)

    def answer(self, endpoint: str, method: str, status: int) -> None:
        """Count an HTTP request and its answer; `endpoint` is a route's pattern, so that there are few."""
        self.asked[endpoint, method] += 1
        self.answered[endpoint, str(status), method] += 1


Labels = dict[str, str]
Timings = tuple[tuple[float, ...], list[int], float]  # a histogram's bounds, counts and sum
Sample = tuple[Labels, float | Timings]
Family = tuple[str, str, str, list[Sample]]  # kind, name, text


def counters(scheduler: Scheduler, load: Mapping[str, Any]) -> list[Family]:
    """Return the scheduler's present families; runs on the engine thread, between two steps. `load`: `info.load_of`."""
    return [*_gauges(scheduler, load), *_totals(scheduler.metrics)]


def exposition(replicas: Sequence[Sequence[Family] | None], seen: Seen, model: str) -> tuple[bytes, str]:
    """Return the body of /metrics and its content type; RequestError 404 where the extra is not installed.

    replicas: the `counters` of each, None for one that does not answer. Of several, each has its number as dp_rank.
    """
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    except ImportError:
        raise RequestError(f"/metrics needs the extra {EXTRA} (prometheus-client)", None, 404, "no_metrics") from None

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    common = {"model_name": model, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
    several = len(replicas) > 1
    parts: list[tuple[Labels, Iterable[Family]]] = [
        ({}, _clients(seen)),
        *(({"dp_rank": str(rank)} if several else {}, own or ()) for rank, own in enumerate(replicas)),
    ]
    made: dict[str, Any] = {}  # prometheus-client's families; one without samples is left out
    for place, families in parts:
        for kind, name, text, samples in families:
            for labels, value in samples:
                every = {**common, **place, **labels}
                if name not in made:
                    made[name] = kinds[kind](name, text, labels=list(every))
                if isinstance(value, tuple):
                    bounds, counts, total = value
                    buckets = list(zip([*map(repr, bounds), "+Inf"], accumulate(counts), strict=True))
                    made[name].add_metric(list(every.values()), buckets, total)
                else:
                    made[name].add_metric(list(every.values()), value)
    registry: Any = SimpleNamespace(collect=made.values)
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _one(kind: str, name: str, text: str, value: float | Timings) -> Family:
    return kind, name, text, [({}, value)]


def _gauges(scheduler: Scheduler, load: Mapping[str, Any]) -> Iterator[Family]:
    m = scheduler.metrics
    values = {
        "num_running_reqs": ("Requests with a slot.", load["num_running_reqs"]),
        "num_queue_reqs": ("Requests that wait for a slot.", load["num_waiting_reqs"]),
        "num_used_tokens": ("Rows of KV that requests hold.", load["num_used_tokens"]),
        "max_total_num_tokens": ("Rows of the KV pool.", load["max_total_num_tokens"]),
        "token_usage": ("Share of the KV pool that requests hold.", load["token_usage"]),
        "gen_throughput": ("Tokens per second, over the last logged window.", load["gen_throughput"]),
        "cache_hit_rate": ("Share of prompt tokens that the prefix cache had.", load["cache_hit_rate"]),
    }
    if m.nodes > 1:
        values |= {
            "spec_accept_length": ("Tokens per verify step, the target's own included, over the last logged window.",
                                   m.last.accept_length),
            "spec_accept_rate": ("Accepted over verified drafts, over the last logged window.", m.last.accept_rate),
            "spec_num_draft_tokens": ("Nodes of a tree, root included, and looked-up trees left out.",
                                      scheduler.sizes.own_nodes),
            "spec_num_steps": ("Rounds of drafting; 0 for a drafter without.", scheduler.engine.drafter.rounds or 0),
        }  # fmt: skip
    yield from (_one("gauge", "sglang:" + name, text, value) for name, (text, value) in values.items())


def _totals(m: Metrics) -> Iterator[Family]:
    values = {
        "sglang:prompt_tokens_total": ("Tokens of prompts, cached ones included.", m.prompt_tokens + m.cached_tokens),
        "sglang:cached_tokens_total": ("Tokens of prompts that the prefix cache had.", m.cached_tokens),
        "sglang:generation_tokens_total": ("Tokens generated.", m.generated_tokens),
        "sglang:num_requests_total": ("Requests.", m.requests),
        "sglang:num_aborted_requests_total": ("Requests that were aborted.", m.aborted),
        "sglang:num_retracted_requests_total": ("Times a request was sent back to the queue.", m.retractions),
        "sglang:cuda_graph_passes_total": ("Decode forwards that a CUDA graph ran.", m.captured_steps),
        "sglang:spec_verify_calls_total": ("Verify steps, one for each request in them.", m.verified.steps.total()),
        "minispec:prefill_steps_total": ("Prefill forwards.", m.prefill_steps),
    }
    yield from (_one("counter", name, text, value) for name, (text, value) in values.items())
    modes = {"prefill_compute": m.prompt_tokens, "prefill_cache": m.cached_tokens, "decode": m.generated_tokens}
    yield ("counter", "sglang:realtime_tokens_total", "Tokens by what was done for them.",
           [({"mode": mode}, value) for mode, value in modes.items()])  # fmt: skip
    yield ("counter", "minispec:decode_steps_total", "Decode forwards by the nodes of their trees; 1 is a plain step.",
           [({"nodes": str(nodes)}, m.shapes[nodes]) for nodes in sorted({1, m.nodes, *m.shapes})])  # fmt: skip
    if m.nodes > 1:
        for name, (text, samples) in m.verified.series().items():
            yield "counter", f"minispec:{name}", text, [*samples]
    yield _one("histogram", "sglang:queue_time_seconds", "From a request's arrival to its slot.",
               _timings(m.queue_times))  # fmt: skip
    yield ("histogram", "minispec:decode_step_seconds", "Launching a decode step and waiting for it, by tree size.",
           [({"nodes": str(nodes)}, _timings(times)) for nodes, times in sorted(m.step_times.items())])  # fmt: skip


def _clients(seen: Seen) -> Iterator[Family]:
    waits = {
        "time_to_first_token_seconds": ("From a request's arrival to its first token.", seen.first),
        "inter_token_latency_seconds": ("From token to token; those of one step share its time.", seen.between),
        "e2e_request_latency_seconds": ("From a request's arrival to its end.", seen.whole),
    }
    for name, (text, histogram) in waits.items():
        yield _one("histogram", "sglang:" + name, text, _timings(histogram))
    yield (
        "counter",
        "sglang:http_requests_total",
        "HTTP requests.",
        [({"endpoint": endpoint, "method": method}, count) for (endpoint, method), count in seen.asked.items()],
    )
    yield ("counter", "sglang:http_responses_total", "HTTP answers.",
           [({"endpoint": endpoint, "status_code": status, "method": method}, count)
            for (endpoint, status, method), count in seen.answered.items()])  # fmt: skip


def _timings(histogram: Histogram) -> Timings:
    return tuple(histogram.bounds), list(histogram.counts), histogram.total
