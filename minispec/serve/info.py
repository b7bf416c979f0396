"""What a server says of itself: its memory, its load, and the digest of what decides its tokens.

`QUESTIONS` are what a server asks an engine between two steps, by name, so that they can be asked of another process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minispec.config import Config
from minispec.serve import prometheus

if TYPE_CHECKING:
    from minispec.llm import LLM
    from minispec.scheduler import Scheduler


def memory_stats(llm: LLM) -> dict[str, Any]:
    """Return what memory is taken: by part in bytes, and in SGLang's form, in GiB."""
    parts, gib = dataclasses.asdict(llm.memory), lambda *names: round(sum(parts[n] or 0 for n in names) / 2**30, 3)
    scheduler = llm.scheduler
    return {"memory_bytes": parts, "memory_usage": {
        "weight": gib("target_weights", "draft_weights"), "kvcache": gib("target_kv_pool", "draft_kv_pool"),
        "graph": None if parts["graphs_and_workspace"] is None else gib("graphs_and_workspace"),
        "token_capacity": scheduler.limits.pool_rows,
    }}  # fmt: skip


def stats_of(scheduler: Scheduler) -> dict[str, Any]:
    """Return current numbers for /server_info, totals since the start or the last flush.

    A number that SGLang gives too has SGLang's name.
    """
    kv, sizes, drafter, m = scheduler.kv, scheduler.sizes, scheduler.engine.drafter, scheduler.metrics
    recorded = {str(batch): list(seconds) for batch, seconds in (m.recorded or {}).items()}
    return {
        "kv_pages_total": kv.pages - 1,
        "kv_pages_free": len(kv.free),
        "kv_pages_cached": scheduler.cache.count,
        "kv_pages_owned": scheduler.seats.owned + scheduler.left,
        "num_running_reqs": len(scheduler.running) + len(scheduler.prefilling),
        "num_queue_reqs": len(scheduler.waiting),
        "max_total_num_tokens": scheduler.limits.pool_rows,
        "max_req_input_len": scheduler.limits.longest_prompt,
        "effective_max_running_requests_per_dp": sizes.max_running,
        "speculative_num_steps": drafter.rounds,
        "speculative_eagle_topk": drafter.topk,
        "speculative_num_draft_tokens": sizes.own_nodes,
        "speculative_lookup_num_draft_tokens": sizes.nodes if sizes.has_lookups else None,
        "drafter_seconds": scheduler.engine.drafter_seconds,
        **({} if m.recorded is None else {"step_time_dict": recorded}),
        "avg_spec_accept_length": m.verified.accept_length,
        "last_gen_throughput": m.last_throughput,
        "total_retractions": m.retractions,
        "prompt_tokens": m.prompt_tokens,
        "cached_tokens": m.cached_tokens,
        "generated_tokens": m.generated_tokens,
        "verify_steps": m.verified.steps.total(),
        "tree_steps": m.shapes.total() - m.shapes[1],
        "plain_steps": m.shapes[1],
        "speculative_shape_shares": m.shape_shares,
        "speculative_lookup_shares": m.verified.lookup_shares,
        "step_seconds": m.step_seconds,
        "host_seconds": m.host_seconds,
    }


def load_of(scheduler: Scheduler) -> dict[str, Any]:
    """Return the entry of /v1/loads, under SGLang's names; totals are since the start or the last flush."""
    stats, kv = stats_of(scheduler), scheduler.kv
    used = kv.pages - 1 - scheduler.seats.available
    computed, cached = stats["prompt_tokens"], stats["cached_tokens"]
    load = {
        "num_running_reqs": stats["num_running_reqs"], "num_waiting_reqs": stats["num_queue_reqs"],
        "num_used_tokens": used * kv.page_size, "max_total_num_tokens": stats["max_total_num_tokens"],
        "max_running_requests": scheduler.sizes.max_running, "token_usage": used / max(kv.pages - 1, 1),
        "gen_throughput": stats["last_gen_throughput"], "cache_hit_rate": cached / max(computed + cached, 1),
    }  # fmt: skip
    if scheduler.sizes.nodes > 1:
        rate = scheduler.metrics.verified.accept_rate
        load["speculative"] = {"accept_length": stats["avg_spec_accept_length"], "accept_rate": rate}
    return load


def _reconfigure(llm: LLM, thresholds: tuple[float, float] | None, adaptive: bool | None) -> None:
    """Set thresholds (as `Engine.set_thresholds`) and, as the flag does, `adaptive`; count acceptance anew."""
    from minispec.acceptance import Verified  # here and below, since the server listens before torch is imported

    config = dataclasses.replace(llm.config, speculative_adaptive=adaptive)
    scheduler = llm.scheduler
    scheduler.engine.set_thresholds(thresholds)
    scheduler.policy.adapts_from = config.adapts_from(scheduler.engine.device.type == "cuda")
    scheduler.metrics.verified = Verified()


def _stats(llm: LLM) -> dict[str, Any]:
    """Return an engine's numbers; with --speculative-adaptive, as in SGLang, the steps in use, 0 for plain ones."""
    from minispec.tree import Shape

    stats, scheduler = {**stats_of(llm.scheduler), **memory_stats(llm)}, llm.scheduler
    if llm.config.speculative_adaptive and scheduler.engine.drafter.rounds is not None:
        steps = {Shape(size.nodes, True): size.rounds for size in scheduler.engine.drafter.trees}
        stats["speculative_num_steps"] = steps.get(scheduler.policy.shape, 0)
    return stats


QUESTIONS: dict[str, Callable[..., Any]] = {
    "stats": _stats,
    "load": lambda llm: load_of(llm.scheduler),
    "counters": lambda llm: prometheus.counters(llm.scheduler, load_of(llm.scheduler)),
    "flush": lambda llm: llm.scheduler.flush_cache(),
    "reconfigure": _reconfigure,
}


def fingerprint(config: Config, numbers: str) -> str:
    """Return a digest of what decides which tokens a seed gives: versions, model, `Facts.numbers`, and no drafter."""
    names = """model_path revision tokenizer_path load_format quantization chat_template random_seed context_length
        sampling_defaults tp_size enable_deterministic_inference""".split()
    parts = [version(), importlib.metadata.version("torch"), config.thresholds, numbers,
             *(getattr(config, name) for name in names)]  # fmt: skip
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def version() -> str:
    """Return the version of this package, if it is installed."""
    try:
        return importlib.metadata.version("minispec")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
