"""Who takes part in a benchmark of throughput, and one timed run of theirs over one set of prompts.

`Ours` is minispec with one drafter, `Transformers` its `generate`; both take lists of token ids, so that tokens are
counted alike. Before every run the prefix cache and the drafter's memory are emptied. Request i has seed i.

Read next: `bench.py`, which runs them in turn; `minispec/llm.py`, the interface used here.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minispec import LLM, SamplingParams
from minispec.acceptance import Verified
from minispec.load.tokenizer import Tokenizer
from minispec.request import Request
from minispec.train.corpus import loops

WARM_UP = ["Name three rivers.", "Say hello to the class in one sentence."]


@dataclass
class Run:
    """One timed run over one set of prompts."""

    tokens: int
    seconds: float
    decode_seconds: float | None = None  # without prefill
    decoded: int = 0  # tokens that decode steps gave
    verified: Verified | None = None  # what verify steps gave
    verified_unlooped: Verified | None = None  # the same for replies that do not loop
    drafter_ms: float | None = None  # host time of the drafter per decode step
    host_ms: float | None = None  # host time of stop rules and text per decode step
    forwards_per_s: float | None = None
    outputs: tuple[tuple[int, ...], ...] = ()
    shapes: dict[str, float] | None = None  # shares of decode steps by the nodes of their trees
    lookups: tuple[float, float] | None = None  # shares of verify steps whose tree was looked up, and of their tokens
    step_ms: dict[str, float] | None = None  # mean of a decode step, launch and wait, by the nodes of its trees


class Ours:
    """minispec with one drafter."""

    def __init__(self, name: str, options: dict[str, Any], batches: Sequence[int]) -> None:
        self.name, self.batches = name, batches
        given = {"max_running_requests": max(batches), **options}
        self.llm, self.ignore_eos = LLM(batches=tuple(batches), **given), False

    def run(self, prompts: Sequence[list[int]], batch: int, new_tokens: int, temperature: float) -> Run:
        """Generate through the scheduler, groups of `batch` requests at a time; request i has seed i."""
        scheduler = self.llm.scheduler
        assert scheduler.flush_cache(), "a benchmark starts on an idle engine"
        requests = [
            self.llm.request(
                ids,
                SamplingParams(
                    temperature=temperature, max_new_tokens=new_tokens, sampling_seed=seed, ignore_eos=self.ignore_eos
                ),
            )
            for seed, ids in enumerate(prompts)
        ]
        start = time.perf_counter()
        for i in range(0, len(requests), batch):
            self.llm.serve(requests[i : i + batch])
        seconds = time.perf_counter() - start
        m = scheduler.metrics
        steps, shares = max(m.shapes.total(), 1), m.verified.lookup_shares
        return Run(
            sum(len(r.output_ids) for r in requests), seconds, m.step_seconds + m.host_seconds,
            m.verified.tokens.total(), m.verified,
            verified([r for r in requests if not loops(r.output_ids)]),
            scheduler.engine.drafter_seconds / steps * 1e3, m.host_seconds / steps * 1e3,
            steps / (m.step_seconds + m.host_seconds or 1.0), tuple(tuple(r.output_ids) for r in requests),
            m.shape_shares,
            (shares["verify_steps"], shares["tokens"]) if scheduler.sizes.has_lookups else None,
            {str(n): round(times.total / sum(times.counts) * 1e3, 3) for n, times in sorted(m.step_times.items())},
        )  # fmt: skip


def verified(requests: Sequence[Request]) -> Verified:
    """Return what the verify steps of these requests gave together."""
    total = Verified()
    for request in requests:
        for name, counts in vars(request.verified).items():
            getattr(total, name).update(counts)
    return total


def accept_length(counts: Verified | None) -> float | None:
    """Return tokens per verify step; None without any."""
    return counts.accept_length if counts is not None and counts.steps else None


def by_depth(counts: Verified | None) -> list[float]:
    """Return the share of drafts accepted at each depth, of the steps that reached it; a cut counts as a refusal."""
    depths = Counter[int]() if counts is None else counts.depths
    reached = [sum(n for deep, n in depths.items() if deep >= depth) for depth in range(max(depths, default=-1) + 1)]
    return [round(deeper / here, 3) for here, deeper in zip(reached, reached[1:], strict=False)]


class Transformers:
    """transformers' own greedy generate, with prompt lookup where its name ends so."""

    def __init__(self, name: str, model: Any, batches: Sequence[int]) -> None:
        self.name, self.batches, self.model = name, batches, model
        self.pad = model.generation_config.pad_token_id or 0
        self.options = {"prompt_lookup_num_tokens": 10} if name.endswith("lookup") else {}

    @torch.inference_mode()
    def run(self, prompts: Sequence[list[int]], batch: int, new_tokens: int, temperature: float) -> Run:
        """Generate with left-padded batches."""
        outputs, start = [], time.perf_counter()
        for i in range(0, len(prompts), batch):
            group = prompts[i : i + batch]
            width = max(map(len, group))
            ids = torch.tensor([[self.pad] * (width - len(p)) + p for p in group], device=self.model.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group], device=self.model.device)
            made = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=self.pad,
                repetition_penalty=1.0, **self.options,  # not the folder's, as minispec is asked here
            )  # fmt: skip
            outputs += [trim(row[width:].tolist(), self.model.generation_config.eos_token_id) for row in made]
        return Run(sum(map(len, outputs)), time.perf_counter() - start, outputs=tuple(map(tuple, outputs)))


Contestant = Ours | Transformers


def trim(ids: list[int], eos: int | list[int]) -> list[int]:
    """Cut an output after its first end-of-sequence token, since what follows is padding."""
    ends = [i for i, token in enumerate(ids) if token in (eos if isinstance(eos, list) else [eos])]
    return ids[: ends[0] + 1] if ends else ids


def encode(
    prompts: Sequence[str], tokenizer: Tokenizer, tokens: int | None = None, others: Sequence[str] = ()
) -> list[list[int]]:
    """Return each prompt as a chat; with `tokens`, text of `others` is put in front to make it about that long.

    Every chat begins with a different text, so that no two of them share a prefix.
    """
    chat = lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])  # noqa: E731
    chats = [chat(prompt) for prompt in prompts]
    for number, ids in enumerate(chats):
        if tokens and (room := tokens - len(ids)) > 0:
            first = number * len(others) // len(prompts)
            around = tokenizer.encode("\n\n".join([*others[first:], *others[:first]]), False)
            filler = (around * (room // len(around) + 1))[:room]
            chats[number] = chat(tokenizer.decode(filler) + "\n\n" + prompts[number])
    return chats


def hardware(device: str) -> str:
    """Return the processor, cores, threads and GPU that this runs on, in one line."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{gpu}"
