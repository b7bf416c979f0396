"""What a second process costs or gives on one machine: the same requests to one process, to two ranks, to two replicas.

    python -m benchmarks.scaling [--clients 1 4] [--rounds 2] [--new-tokens 48] [--only one tp2] [--server-flags ...]

Every contestant is a command line of the server (`CONTESTANTS`). All are started, on one model, and asked in turn, A B
C C B A, while the others idle: streaming clients, each of which sends its next request when the last one's answer is
whole. The prefix cache and the drafter's memory are emptied before each part. What is printed are medians over parts of
tokens a second, and over requests of the time to the first token and per token.

Afterwards each server of ranks is asked again while its steps are profiled (`watched.py`): the table says what a step
takes on each rank and which share of that it spends in collectives, in waiting for the other rank too. A share of a
profiled step is what it is for; its time is some per cent longer than that of others.

On a CPU all contestants share the same cores and the same memory, so this shows what the parts cost and no gain.
Contestants whose flags this version lacks are left out.

Read next: `latency.py`, which has the client; docs/scaling.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import bench
from benchmarks import parity, throughput, watched
from benchmarks.latency import READY_S, Sample, ask
from benchmarks.plan import table
from minispec.config import Config

CONTESTANTS = {  # name: flags
    "one": (),
    "tp2": ("--tp-size", "2"),
    "dp2": ("--dp-size", "2"),
}


class Contestant(NamedTuple):
    """A server that is ready."""

    name: str
    url: str
    folder: Path  # of what its ranks note


class Part(NamedTuple):
    """All requests of one stretch: so many clients at one server."""

    name: str
    clients: int
    samples: list[Sample]

    @property
    def rate(self) -> float:
        """Tokens a second, of all clients together."""
        first, last = min(s.began for s in self.samples), max(s.ended for s in self.samples)
        return sum(s.tokens for s in self.samples) / (last - first)


class Notes(NamedTuple):
    """What a rank has noted of its steps."""

    name: str
    rank: int
    steps: list[float]  # seconds
    collectives: list[float]  # seconds of each step

    @property
    def share(self) -> float:
        """The share of all steps' time that went into collectives."""
        return sum(self.collectives) / sum(self.steps)


def known() -> dict[str, tuple[str, ...]]:
    """Return the contestants whose flags there are."""
    flags = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Config)}
    return {name: given for name, given in CONTESTANTS.items() if flags.issuperset(given[::2])}


def order(names: Sequence[str], clients: Sequence[int], rounds: int) -> list[tuple[int, str]]:
    """Return (clients, name) of all parts: A B C, C B A, and so on for each number of clients."""
    return [(n, name) for n in clients for i in range(rounds) for name in (names if i % 2 == 0 else names[::-1])]


def serve_part(contestant: Contestant, clients: int, prompts: Sequence[str], new_tokens: int) -> Part:
    """Ask one server everything."""
    parity.flush(contestant.url)
    with ThreadPoolExecutor(clients) as pool:
        return Part(contestant.name, clients, list(pool.map(lambda p: ask(contestant.url, p, new_tokens), prompts)))


def look(contestant: Contestant, clients: int, prompts: Sequence[str], new_tokens: int) -> list[Notes]:
    """Ask a server while its ranks note what they do; returns their notes, none where nobody notes anything."""
    asked = contestant.folder / watched.LOOK
    asked.touch()
    try:
        serve_part(contestant, clients, prompts, new_tokens)
    finally:
        asked.unlink()
    found = sorted(contestant.folder.glob("rank-*.json"))
    return [Notes(contestant.name, rank, **json.loads(path.read_text())) for rank, path in enumerate(found)]


def wait_for_replicas(url: str) -> None:
    """Wait until all replicas of a server are ready, where it has any; it is ready itself as soon as one is."""
    while True:
        with urllib.request.urlopen(f"{url}/server_info") as answer:
            replicas = json.load(answer).get("replicas", ())
        if all(replica["state"] == "ready" for replica in replicas):
            return
        time.sleep(1)


@contextmanager
def started(names: Sequence[str], flags: Sequence[str]) -> Iterator[list[Contestant]]:
    """Start the servers, one after the other; stop them at the end."""
    with ExitStack() as stack:
        found = []
        for name in names:
            print(f"starting {name}", file=sys.stderr)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="minispec-scaling-"))
            module = ("benchmarks.watched", folder, "server")
            url = stack.enter_context(parity.serve(*CONTESTANTS[name], *flags, timeout_s=READY_S, module=module))
            wait_for_replicas(url)
            ask(url, "Name three rivers.", 8)
            found.append(Contestant(name, url, Path(folder)))
        yield found


def speeds(parts: Sequence[Part]) -> str:
    """Return the parts as a table, those of the same clients and server put together; times in ms."""
    rows = []
    for name, clients in sorted({(part.name, part.clients) for part in parts}, key=lambda key: (key[1], key[0])):
        mine = [part for part in parts if (part.name, part.clients) == (name, clients)]
        samples = [sample for part in mine for sample in part.samples]
        each = [s.per_token for s in samples if s.per_token is not None] or [0.0]
        rows.append((f"{name}, {clients} clients", f"{median(part.rate for part in mine):.1f}",
                     f"{median(s.first for s in samples) * 1e3:.0f}", f"{median(each) * 1e3:.1f}", len(samples)))
    return table([("", "tokens/s", "first token", "per token", "requests"), *rows])


def shares(notes: Sequence[Notes]) -> str:
    """Return where the time of profiled steps goes as a table; times in ms."""
    rows = [(f"{n.name}, rank {n.rank}", len(n.steps), f"{median(n.steps) * 1e3:.1f}",
             f"{median(n.collectives) * 1e3:.1f}", f"{n.share:.1%}") for n in notes]  # fmt: skip
    return table([("", "steps", "step", "in collectives", "share"), *rows])


def measure(
    contestants: Sequence[Contestant], args: argparse.Namespace, prompts: Sequence[str], tell: Callable[[Part], None]
) -> list[Notes]:
    """Ask all servers everything, in turn; then once more while they note what they do."""
    by_name = {contestant.name: contestant for contestant in contestants}
    for clients, name in order(list(by_name), args.clients, args.rounds):
        tell(serve_part(by_name[name], clients, prompts, args.new_tokens))
    return [notes for contestant in contestants for notes in look(contestant, args.clients[-1], prompts, 16)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(known()), default=list(known()), help="contestants")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2, help="parts a server and number of clients; 2 is A B B A")
    parser.add_argument("--dataset", type=Path, default=bench.PROMPTS, help="JSON lines, our own or MT-bench's format")
    parser.add_argument("--limit", type=int, help="prompts of each set, spread over it")
    parser.add_argument("--json", type=Path, help="write all samples and notes here")
    parser.add_argument("--server-flags", nargs=argparse.REMAINDER, default=[], help="of all servers, comes last")
    args = parser.parse_args(argv)
    prompts = [text for texts in bench.read_prompts(args.dataset, args.limit).values() for text in texts]
    flags, load = ["--max-running-requests", str(max(args.clients)), *args.server_flags], os.getloadavg()[0]
    parts: list[Part] = []

    def tell(part: Part) -> None:
        parts.append(part)
        print(f"{part.name}, {part.clients} clients: {part.rate:.1f} tokens/s", file=sys.stderr)

    with started(args.only, flags) as contestants:
        notes = measure(contestants, args, prompts, tell)
    print(f"{throughput.hardware('cpu')}; load before and after: {load:.1f}, {os.getloadavg()[0]:.1f}; "
          f"{len(prompts)} requests of {args.new_tokens} tokens a part; times in ms\n")  # fmt: skip
    print(speeds(parts), shares(notes), sep="\n\nSteps under a profiler:\n\n")
    if args.json:
        args.json.write_text(json.dumps({"parts": [part._asdict() for part in parts],
                                         "notes": [note._asdict() for note in notes]}) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
