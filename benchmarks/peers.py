"""minispec beside its peers on one machine: llama.cpp, transformers, OpenVINO, and itself of another commit.

`python -m benchmarks.peers --names plain head lookups llama-own --llama-server PATH --dataset question.jsonl` starts
these engines (`engines.py` has all names) and puts every question to all of them, one after the other, and the next
question to the same engines in the reverse order, while the others idle: the machine's mood changes within minutes. It
prints a Markdown table for each set of prompts; docs/measured.md has the newest. An engine that cannot be started is
left out, with a line that says why.

  tokens/s       of a question, from sending it to the last token, prefill and HTTP included: median, least and most
  in all         all tokens over all seconds
  tokens a step  tokens per forward pass after the first token
  same           replies that are the first engine's, to the token
  loop           replies whose end repeats itself, which are easy to draft
  / NAME         speed over that of an engine: the median of the questions' ratios, and that of all together
  first token    of streams, and where one new token is all that is asked for

--batch sends so many questions at once. --prompt-tokens makes all prompts as long as it says.

Read next: `engines.py`, how each one is started and asked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers

import bench
from benchmarks import throughput
from benchmarks.engines import LLAMA, NAMES, Ids, LlamaTree, Peer, Reply, Wish, folder_of, start
from minispec.config import Config
from minispec.cpu.spinning import CALM, LOOK
from minispec.load.build import choose_dtype
from minispec.load.machine import core_count
from minispec.load.tokenizer import Tokenizer, load_tokenizer
from minispec.train.corpus import loops

USUAL = ("plain", "head", "lookups", "ngram", "llama-own", "llama-bf16")
BASES = ("plain", "older-plain", "llama-own", "llama-bf16")  # what others are compared with, if it takes part


class Run(NamedTuple):
    """One engine's answers to the questions of one job, which were asked at once."""

    name: str
    job: tuple[int, int]  # round and number
    seconds: float
    replies: list[Reply]

    @property
    def tokens(self) -> int:
        """All tokens that were answered."""
        return sum(len(reply.ids) for reply in self.replies)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


# ---- asking ----------------------------------------------------------------------------------------------------------


def measure(peers: Sequence[Peer], jobs: Sequence[list[Ids]], wish: Wish, rounds: int, runs: list[Run]) -> None:
    """Put every job to all engines, in turn and in reverse turn; adds to `runs` as it goes."""
    for round_ in range(rounds):
        for peer in peers:
            peer.clear()
        for number, job in enumerate(jobs):
            for peer in peers if (round_ + number) % 2 == 0 else reversed(peers):
                seconds, replies = ask(peer, job, wish, number)
                runs.append(Run(peer.name, (round_, number), seconds, replies))
                which = f"round {round_ + 1} of {rounds}, {number + 1} of {len(jobs)}"
                print(f"{which}: {peer.name} {runs[-1].rate:.1f} tokens/s", file=sys.stderr)


def ask(peer: Peer, job: Sequence[Ids], wish: Wish, seed: int) -> tuple[float, list[Reply]]:
    """Send the prompts of a job together and wait for all replies; returns the seconds as well."""
    one = lambda prompt: peer.ask(prompt, wish, seed)  # noqa: E731
    started = time.perf_counter()
    if len(job) == 1:
        replies = [one(job[0])]
    else:
        with ThreadPoolExecutor(len(job)) as pool:
            replies = list(pool.map(one, job))
    return time.perf_counter() - started, replies


# ---- what the runs say -----------------------------------------------------------------------------------------------


def table(runs: Sequence[Run], bases: Sequence[str]) -> str:
    """Return the engines as a Markdown table, with their speed over that of the bases among them."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    rows = {name: row(mine, next(iter(by_name.values()))) for name, mine in by_name.items()}
    for name, cells in rows.items():
        cells |= {f"/ {base}": ratio(by_name[name], by_name[base]) for base in bases if base in by_name}
    titles = [title for title in next(iter(rows.values())) if any(cells[title] for cells in rows.values())]
    lines = ["| engine | " + " | ".join(titles) + " |", "|---" + "|--:" * len(titles) + "|"]
    lines += [f"| {name} | " + " | ".join(cells[title] for title in titles) + " |" for name, cells in rows.items()]
    return "\n".join(lines)


def row(runs: Sequence[Run], first: Sequence[Run]) -> dict[str, str]:
    """Return an engine's cells by the titles of their columns, an empty one where nothing is known."""
    rates, replies = [run.rate for run in runs], [reply for run in runs for reply in run.replies]
    theirs = {run.job: run.replies for run in first}
    same = sum(a.ids == b.ids for run in runs for a, b in zip(run.replies, theirs.get(run.job, ()), strict=False))
    counted = [reply for reply in replies if reply.steps]
    steps = sum(reply.steps or 0 for reply in counted)
    firsts = [reply.first if reply.first is not None else run.seconds for run in runs for reply in run.replies
              if reply.first is not None or len(reply.ids) == 1]  # fmt: skip
    each = [(r.last - r.first) / (len(r.ids) - 1) for r in replies if r.first and r.last and len(r.ids) > 1]
    return {
        "tokens/s": f"{statistics.median(rates):.1f} [{min(rates):.1f}..{max(rates):.1f}]",
        "in all": f"{total(runs):.1f}",
        "tokens a step": f"{sum(len(reply.ids) - 1 for reply in counted) / steps:.2f}" if steps else "",
        "same": f"{same}/{len(replies)}",
        "loop": str(sum(loops(reply.ids) for reply in replies)),
        "first token, ms: p50, p99": quantiles(firsts),
        "each further one": quantiles(each),
    }


def total(runs: Sequence[Run]) -> float:
    """Return all tokens over all seconds."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def ratio(runs: Sequence[Run], base: Sequence[Run]) -> str:
    """Return the median of the ratios of speed in the jobs that both had, and the ratio of these together."""
    mine, other = ({run.job: run for run in some} for some in (runs, base))
    both = [job for job in mine if job in other]
    if not both:
        return ""
    median = statistics.median(mine[job].rate / other[job].rate for job in both)
    return f"{median:.2f} ({total([mine[job] for job in both]) / total([other[job] for job in both]):.2f})"


def quantiles(seconds: Sequence[float]) -> str:
    """Return median and 99th percentile in ms."""
    return ", ".join(f"{1e3 * value:.4g}" for value in np.quantile(seconds, (0.5, 0.99))) if seconds else ""


# ---- the questions ---------------------------------------------------------------------------------------------------


def questions(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, list[list[Ids]]]:
    """Return the jobs of each set of prompts; the last job is filled up from the first prompts."""
    whole, some = (bench.read_prompts(args.dataset, limit) for limit in (None, args.limit))
    sets = {}
    for kind in [kind for kind in some if kind in (args.kind or some)]:
        length = args.prompt_tokens
        ids = throughput.encode(some[kind], tokenizer, length and length + 64, whole[kind])
        starts = range(0, len(ids), args.batch)
        sets[kind] = [[ids[(at + i) % len(ids)][:length] for i in range(args.batch)] for at in starts]
    if not sets:
        raise SystemExit(f"--kind {' '.join(args.kind)}: {args.dataset} has {', '.join(some)}")
    return sets


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--names", nargs="+", choices=NAMES, default=USUAL, metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument("--over", nargs="+", choices=NAMES, default=BASES, metavar="NAME",
                        help=f"whose speed the others are compared with; default: {', '.join(BASES)}")  # fmt: skip
    parser.add_argument("--model", help="Hugging Face id, folder or GGUF file; default: the default model")
    parser.add_argument("--dataset", type=Path, default=bench.PROMPTS, help="JSON lines, our own or MT-bench's format")
    parser.add_argument("--kind", nargs="+", help="sets of our own format: ordinary, copying; default: all")
    parser.add_argument("--limit", type=int, help="most prompts of a set, spread over it; default: all")
    parser.add_argument("--prompt-tokens", type=int, help="lengthen all prompts, by others, to so many tokens")
    parser.add_argument("--batch", type=int, default=1, help="questions at once")
    parser.add_argument("--new-tokens", type=int, default=128, help="most of a reply")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy; else a question's seed is its number"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="have all replies go on to the last token")
    parser.add_argument("--stream", action="store_true", help="ask for streams, for the time of the first token")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--older", type=Path, metavar="CHECKOUT", help="another checkout of minispec, for older-NAME")
    parser.add_argument("--older-python", type=Path, default=Path(sys.executable), help="its Python; default: this one")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, with llama-quantize beside it")
    parser.add_argument("--llama-source", type=Path, help="its source tree, for heads and for models that are no GGUF "
                        "file; default: the one around the server")  # fmt: skip
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "minispec-peers"),
                        help="folder for the files that llama.cpp reads, made once")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write all answers here")
    parser.add_argument("--server-flags", nargs=argparse.REMAINDER, default=[],
                        help="of all our servers; comes last")  # fmt: skip
    return parser.parse_args(argv)


def header(args: argparse.Namespace) -> str:
    """Return the machine, the versions and what is asked for, in one line."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    if any(name in LLAMA for name in args.names) and args.llama_server:
        versions += f", llama.cpp {LlamaTree.find(args.llama_server, args.llama_source, args.work).version()}"
    dtype = str(choose_dtype(Config(model_path=args.model), torch.device("cpu"))).removeprefix("torch.")
    return (f"{throughput.hardware('cpu')}; {versions}; {dtype}; {args.batch} at once, at most {args.new_tokens} new "
            f"tokens, temperature {args.temperature:g}, {args.rounds} rounds")  # fmt: skip


def main() -> None:
    """Run the comparison and print it."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped as well
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(core_count())
    tokenizer = load_tokenizer(folder_of(args))
    sets, wish = questions(args, tokenizer), Wish(args.new_tokens, args.temperature, args.ignore_eos, args.stream)
    peers, left_out, report = [], [], []
    with ExitStack() as stack:
        for name in args.names:
            print(f"starting {name}", file=sys.stderr)
            try:
                peers.append(start(name, args, stack))
            except (ImportError, OSError, RuntimeError, ValueError) as error:
                left_out.append(f"{name} is left out: {(str(error).splitlines() or [repr(error)])[-1]}")
                print(left_out[-1], file=sys.stderr)
        print("\n".join([header(args), *left_out]), flush=True)
        time.sleep((CALM + 10) * LOOK)  # after others have started, threads still sleep where they wait
        warm_up = throughput.encode(throughput.WARM_UP, tokenizer)
        for peer in peers:  # the first calls are slower
            for ids in warm_up:
                ask(peer, [ids] * args.batch, wish, 0)
        for kind, jobs in sets.items():
            runs: list[Run] = []
            load = os.getloadavg()[0]
            try:
                measure(peers, jobs, wish, args.rounds, runs)
            finally:  # Ctrl-C included
                print(f"\n{kind}, {len(jobs)} times {args.batch}; load before and after: {load:.1f}, "
                      f"{os.getloadavg()[0]:.1f}\n\n{table(runs, args.over) if runs else ''}", flush=True)  # fmt: skip
            report.append({"prompts": kind, "runs": [run._asdict() for run in runs]})
    if args.json:
        args.json.write_text(json.dumps({"header": header(args), "left_out": left_out, "sets": report}) + "\n")


if __name__ == "__main__":
    main()
