"""What a client waits for over HTTP: time to the first token and per token, with speculation on and off.

`python -m benchmarks.latency` starts two servers of the default model, one that drafts as launched by default and one
that does not. Streaming clients ask both over a real socket: 1, 4 and 8 of them, each sending its next request when the
last one's answer is whole. For each number of clients the servers are asked in the order on, off, off, on, while the
other one idles, so that a noisy machine is noisy for both. `--servers on dp2 tp2` asks one process, two replicas and
two ranks instead: on a CPU these share the same cores and memory, so that shows what the parts cost, and no gain.

  first token   from sending a request to the first event that has a token: queueing and prefill
  per token     (last token - first token) / (tokens - 1) of a request: what a reader sees as speed

p50 and p99 are over requests; with a few dozen of them p99 is close to the slowest. The prefix cache and the drafter's
memory are emptied before each part. docs/measured.md has the newest table.

Read next: `parity.py`, which starts and stops the servers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

import bench
from benchmarks import parity
from benchmarks.start import LOCAL, post

KINDS = {  # servers by name: their flags
    "on": (),
    "off": tuple(parity.drafter_flags("NONE")),
    "dp2": ("--dp-size", "2"),
    "tp2": ("--tp-size", "2"),
}


class Sample(NamedTuple):
    """What one streamed request showed its client."""

    first: float  # seconds from sending it to its first token
    per_token: float | None  # seconds; None for a single token
    tokens: int
    began: float  # on the clock
    ended: float


class Part(NamedTuple):
    """All requests of one stretch: so many clients at one server."""

    clients: int
    server: str  # of KINDS
    samples: list[Sample]


def ask(url: str, prompt: str, new_tokens: int) -> Sample:
    """Stream one greedy chat completion and time its events. Raises RuntimeError where the server does not answer so.

    The number of tokens is the server's own, since an event may bring several.
    """
    body = {"model": "default", "messages": [{"role": "user", "content": prompt}], "max_tokens": new_tokens,
            "temperature": 0, "repetition_penalty": 1,  # the model's folder may have one
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    began = time.perf_counter()
    first, last, tokens = None, began, 0
    with post(f"{url}/v1/chat/completions", body) as answer:
        for line in answer:
            now = time.perf_counter()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if any(choice["delta"].get("content") for choice in event["choices"]):
                first, last = first or now, now
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    if first is None:
        raise RuntimeError("a stream ended without a token")
    return Sample(first - began, (last - first) / (tokens - 1) if tokens > 1 else None, tokens, began, last)


def order(kinds: Sequence[str], clients: Sequence[int], rounds: int) -> list[tuple[int, str]]:
    """Return (clients, server) of all parts: A B C, C B A, and so on for each number of clients."""
    return [(n, kind) for n in clients for i in range(rounds) for kind in (kinds if i % 2 == 0 else kinds[::-1])]


def wait_for_replicas(url: str) -> None:
    """Wait until all replicas of a server are ready, where it has any; it is ready itself as soon as one is."""
    while True:
        with LOCAL.open(f"{url}/server_info", timeout=60) as answer:
            replicas = json.load(answer).get("replicas", ())
        if all(replica["state"] == "ready" for replica in replicas):
            return
        time.sleep(1)


def table(parts: Sequence[Part]) -> str:
    """Return the parts as a Markdown table, those of the same clients and server put together; times in ms."""
    titles = ["clients", "server", "first token p50", "p99", "per token p50", "p99", "tokens/s", "requests"]
    lines = ["| " + " | ".join(titles) + " |", "|--:|---" + "|--:" * 6 + "|"]
    for clients, kind in dict.fromkeys((part.clients, part.server) for part in parts):
        mine = [part for part in parts if (part.clients, part.server) == (clients, kind)]
        samples = [sample for part in mine for sample in part.samples]
        firsts, each = [s.first for s in samples], [s.per_token for s in samples if s.per_token is not None]
        seconds = sum(max(s.ended for s in part.samples) - min(s.began for s in part.samples) for part in mine)
        times = [np.quantile(values, share) * 1e3 for values in (firsts, each or [0.0]) for share in (0.5, 0.99)]
        rate = sum(s.tokens for s in samples) / seconds
        cells = [str(clients), kind, *(f"{one:.0f}" if one >= 100 else f"{one:.1f}" for one in times), f"{rate:.1f}"]
        lines.append("| " + " | ".join([*cells, str(len(samples))]) + " |")
    return "\n".join(lines)


def measure(url: str, clients: int, prompts: Sequence[str], new_tokens: int) -> list[Sample]:
    """Put all prompts to a server, by so many clients."""
    parity.flush(url)
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda prompt: ask(url, prompt, new_tokens), prompts))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", nargs="+", choices=list(KINDS), default=["on", "off"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2, help="parts a server and number of clients; 2 is A B B A")
    parser.add_argument("--dataset", type=Path, default=bench.PROMPTS, help="JSON lines, our own or MT-bench's format")
    parser.add_argument("--limit", type=int, help="prompts of each set, spread over it")
    parser.add_argument("--server-flags", nargs=argparse.REMAINDER, default=[],
                        help="of all servers, a model or a drafter, say; comes last")  # fmt: skip
    return parser.parse_args()


def main() -> None:
    """Run the comparison and print its table."""
    args = parse()
    prompts = [text for texts in bench.read_prompts(args.dataset, args.limit).values() for text in texts]
    turns = order(args.servers, args.clients, args.rounds)
    print(f"{len(args.servers)} servers, then {len(turns)} parts of {len(prompts)} requests, "
          f"{args.new_tokens} new tokens each", flush=True)  # fmt: skip
    parts: list[Part] = []
    with ExitStack() as stack:
        urls = {}
        for kind in args.servers:
            print(f"starting server {kind}", file=sys.stderr)
            flags = ["--max-running-requests", str(max(args.clients)), *args.server_flags, *KINDS[kind]]
            urls[kind] = stack.enter_context(parity.serve(*flags))
            wait_for_replicas(urls[kind])
            ask(urls[kind], "Name three rivers.", 8)
        load = os.getloadavg()[0]
        try:
            for clients, kind in turns:
                samples = measure(urls[kind], clients, prompts, args.new_tokens)
                parts.append(Part(clients, kind, samples))
                print(f"part {len(parts)} of {len(turns)}: {clients} clients, server {kind}: first token "
                      f"{np.median([s.first for s in samples]) * 1e3:.0f} ms", file=sys.stderr)  # fmt: skip
        finally:  # Ctrl-C included
            if parts:
                from benchmarks.throughput import hardware

                print(f"{hardware('cpu')}; load before and after: {load:.1f}, {os.getloadavg()[0]:.1f}; times in ms\n")
                print(table(parts), flush=True)


if __name__ == "__main__":
    main()
