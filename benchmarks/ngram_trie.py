"""What the NGRAM trie costs: bytes a node, and microseconds per request and step (one lookup, two tokens committed).

The trie is filled with synthetic text up to a number of nodes, which is also its capacity, so that every new node
evicts one. It is measured in this state ("full") and with spare capacity ("room"), for both match types and two draft
sizes. The text draws from a vocabulary of 49,152. Half of its tokens are common words by Zipf's law, half are favourite
successors of the token before, and now and then it quotes itself, so that common tokens have thousands of successors.

Run: python benchmarks/ngram_trie.py [--nodes 1000000 10000000] [--steps 400] [--seed 0]
"""

from __future__ import annotations

import argparse
import itertools
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minispec.ngram import INDEX_PER_STEP, NgramDrafter, NgramOptions  # noqa: E402

VOCAB = 49_152
REQUESTS = 8
EMITTED = 2  # tokens committed per request and step


def text(seed: int) -> Iterator[int]:
    """Yield tokens without end."""
    rng = random.Random(seed)
    cumulative = list(itertools.accumulate(1 / (rank + 1) for rank in range(VOCAB)))
    ids = range(VOCAB)
    said: list[int] = []
    while True:
        if len(said) > 1000 and rng.random() < 0.003:
            start = rng.randrange(len(said) - 200)
            fresh = said[start : start + rng.randrange(20, 200)]
        else:
            ranks = rng.choices(ids, cum_weights=cumulative, k=64)
            fresh = []
            for rank in ranks:
                common = rng.random() < 0.5
                last = fresh[-1] if fresh else 0
                fresh.append(rank if common else (rank * 7919 + last * 104_729 + 17) % VOCAB)
        if len(said) < 2_000_000:
            said += fresh
        yield from fresh


def cpu_name() -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def fill(drafter: NgramDrafter, tokens: Iterator[int], nodes: int) -> float:
    """Insert text until the trie has `nodes` nodes; return microseconds per node."""
    start, before = time.perf_counter(), len(drafter.trie)
    path: list[int] = []
    while len(drafter.trie) < nodes:
        path = drafter.trie.extend(path, next(tokens))
    drafter.trie.close(path)
    return (time.perf_counter() - start) / max(1, nodes - before) * 1e6


def index_prompts(drafter: NgramDrafter, tokens: Iterator[int]) -> float:
    """Give every slot a prompt; return the median milliseconds of a step's indexing."""
    for slot in range(REQUESTS):
        drafter.commit(slot, list(itertools.islice(tokens, 2 * INDEX_PER_STEP)))
    times = []
    for _ in range(2 * REQUESTS):
        start = time.perf_counter()
        drafter.tick()
        times.append(time.perf_counter() - start)
    drafter.propose(range(REQUESTS))
    return statistics.median(times) * 1e3


def steps(drafter: NgramDrafter, tokens: Iterator[int], count: int) -> tuple[list[float], float]:
    """Run decode steps; return sorted microseconds per request and step, and the mean draft size without the root."""
    times, drafted = [], 0
    for _ in range(count):
        for slot in range(REQUESTS):
            emitted = list(itertools.islice(tokens, EMITTED))
            start = time.perf_counter()
            (draft,) = drafter.propose([slot])
            drafter.commit(slot, emitted)
            times.append((time.perf_counter() - start) * 1e6)
            drafted += len(draft.tokens) - 1
    return sorted(times), drafted / len(times)


def measure(nodes: int, count: int, seed: int) -> None:
    """Print the table for one trie size."""
    tokens = text(seed)
    drafter = NgramDrafter(NgramOptions(capacity=nodes))
    filled = fill(drafter, tokens, nodes)
    per_node = drafter.trie.nbytes / nodes
    indexing = index_prompts(drafter, tokens)
    print(f"\n{nodes:,} nodes: {per_node:.1f} bytes a node, {drafter.trie.nbytes / 2**20:.0f} MiB; filled at "
          f"{filled:.2f} us a node; {INDEX_PER_STEP} prompt tokens a step take {indexing:.1f} ms")  # fmt: skip
    print("| match | N | capacity | drafted | median us | p90 us | p99 us | max us |")
    print("|---" * 8 + "|")
    for spare, match_type, tree in itertools.product((0, 1_000_000), ("BFS", "PROB"), (12, 32)):
        options = replace(drafter.options, match_type=match_type, nodes=tree, capacity=nodes + spare)
        drafter.trie.options = options
        times, drafted = steps(drafter, tokens, count)
        at = [times[int(len(times) * share)] for share in (0.5, 0.9, 0.99)] + [times[-1]]
        row = [match_type, tree, "room" if spare else "full", f"{drafted:.1f}", *(f"{value:.0f}" for value in at)]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{cpu_name()}; Python {platform.python_version()}, {platform.system()}; {REQUESTS} requests, "
          f"{EMITTED} tokens a step")  # fmt: skip
    for nodes in args.nodes:
        measure(nodes, args.steps, args.seed)


if __name__ == "__main__":
    main()
