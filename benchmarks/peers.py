"""minispec beside its peers on one machine: transformers, llama.cpp, and minispec served in several ways.

`python -m benchmarks.peers --llama-server PATH --dataset question.jsonl` starts all engines, asks them in turn, and
prints Markdown tables; docs/measured.md has the newest. Without --llama-server the rows of llama.cpp are left out.

  one stream   16 prompts, 128 new tokens each, greedy: tokens/s from the question to the last token, prefill included,
               and once more without the prompts to which some engine's reply loops, since a loop is easy to draft
  copying      the same for our own prompts that ask for a text to be copied, which is what n-grams are good at
  prefill      real texts of 64, 512 and 4,096 tokens, the same ids to all, no cache: the time to the first token
  eight        eight prompts at once, 128 tokens each whatever they say: tokens/s together

The machine's mood changes within minutes. So every prompt is put to all engines, one after the other, and the next
prompt to the same engines in the reverse order, while the others idle. Ratios are taken within a round, which is all
prompts once; medians over the rounds are printed. The accept length is tokens per forward pass after the first token.

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
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import bench
from benchmarks import throughput
from benchmarks.engines import SLOTS, TITLES, Ids, LlamaTree, Peer, start
from minispec.config import Config
from minispec.cpu.spinning import CALM, LOOK
from minispec.load.build import choose_dtype, choose_folder
from minispec.load.machine import core_count
from minispec.load.tokenizer import Tokenizer, load_tokenizer
from minispec.train.corpus import loops

PREFILLS = {64: 8, 512: 4, 4096: 2}  # tokens of a prompt: how many such prompts
PARTS = ("one", "copying", "prefill", "eight")
PLAIN = ("none", "llama.cpp", "transformers", "llama.cpp-q8_0", "llama.cpp-eight")  # what others are compared with


class Part(NamedTuple):
    """One question to the engines: who is asked what."""

    title: str
    names: tuple[str, ...]
    jobs: list[list[Ids]]  # each job is a list of prompts sent at once
    new_tokens: int
    ignore_eos: bool = False
    prefill: bool = False  # the prompt's tokens are counted, and the time is that of the first token


class Run(NamedTuple):
    """One engine's answer to one job."""

    name: str
    round: int
    job: int
    tokens: int
    seconds: float
    steps: int | None  # forward passes after the first token
    loops: bool  # some reply of the job loops


# ---- asking ----------------------------------------------------------------------------------------------------------


def measure(part: Part, peers: Sequence[Peer], rounds: int) -> list[Run]:
    """Put every job to all engines, in turn and in reverse turn."""
    runs = []
    for peer in peers:
        peer.ask(part.jobs[-1][0][:64], min(part.new_tokens, 8), part.ignore_eos)  # the first call of all is slower
    for round_ in range(rounds):
        for peer in peers:
            peer.clear()
        for number, job in enumerate(part.jobs):
            for peer in peers if (round_ + number) % 2 == 0 else reversed(peers):
                run = ask(part, peer, round_, number, job)
                runs.append(run)
                which = f"{part.title}, round {round_ + 1}, {number + 1} of {len(part.jobs)}"
                print(f"{which}: {TITLES[peer.name]} {run.tokens / run.seconds:.1f} tokens/s", file=sys.stderr)
    return runs


def ask(part: Part, peer: Peer, round_: int, number: int, job: Sequence[Ids]) -> Run:
    """Send the prompts of a job together and wait for all replies."""
    one = lambda prompt: peer.ask(prompt, part.new_tokens, part.ignore_eos)  # noqa: E731
    started = time.perf_counter()
    if len(job) == 1:
        replies = [one(job[0])]
    else:
        with ThreadPoolExecutor(len(job)) as pool:
            replies = list(pool.map(one, job))
    seconds = time.perf_counter() - started
    tokens = sum(map(len, job if part.prefill else (reply.ids for reply in replies)))
    steps = None if any(reply.steps is None for reply in replies) else sum(reply.steps or 0 for reply in replies)
    return Run(peer.name, round_, number, tokens, seconds, steps, any(loops(reply.ids) for reply in replies))


# ---- what the runs say -----------------------------------------------------------------------------------------------


def rates(runs: Sequence[Run], name: str, skip: Collection[int] = ()) -> list[float]:
    """Return an engine's tokens per second in each round, without the jobs to skip."""
    mine = [run for run in runs if run.name == name and run.job not in skip]
    rounds = sorted({run.round for run in mine})
    share = [[run for run in mine if run.round == round_] for round_ in rounds]
    return [sum(run.tokens for run in some) / sum(run.seconds for run in some) for some in share]


def ratio(runs: Sequence[Run], name: str, base: str, skip: Collection[int] = ()) -> float:
    """Return the median over the rounds of one engine's speed over another's in the same round."""
    pairs = zip(rates(runs, name, skip), rates(runs, base, skip), strict=True)
    return statistics.median(mine / other for mine, other in pairs)


def accept_length(runs: Sequence[Run], name: str, skip: Collection[int] = ()) -> float | None:
    """Return the tokens per forward pass after the first token of each reply; None where the engine does not tell.

    For jobs of one prompt.
    """
    mine = [run for run in runs if run.name == name and run.job not in skip and run.steps]
    return sum(run.tokens - 1 for run in mine) / sum(run.steps or 0 for run in mine) if mine else None


def looping(runs: Sequence[Run]) -> set[int]:
    """Return the jobs to which any engine's reply loops, in any round."""
    return {run.job for run in runs if run.loops}


def table(part: Part, runs: Sequence[Run], skip: Collection[int] = ()) -> str:
    """Return the engines of a part as a Markdown table, with their speed over that of each plain engine among them."""
    names = [name for name in part.names if any(run.name == name for run in runs)]
    bases = [name for name in PLAIN if name in names]
    columns = ["tokens/s", *(f"/ {TITLES[base]}" for base in bases)]
    columns += ["time to first token, ms"] if part.prefill else ["accept length"]
    lines = ["| engine | " + " | ".join(columns) + " |", "|---" + "|--:" * len(columns) + "|"]
    for name in names:
        cells = [f"{statistics.median(rates(runs, name, skip)):.1f}"]
        cells += [f"{ratio(runs, name, base, skip):.2f}" for base in bases]
        if part.prefill:
            cells.append(f"{statistics.median(run.seconds for run in runs if run.name == name) * 1e3:.0f}")
        else:
            accepted = accept_length(runs, name, skip)
            cells.append("" if accepted is None else f"{accepted:.2f}")
        lines.append(f"| {TITLES[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sections(part: Part, runs: Sequence[Run]) -> Iterator[str]:
    """Yield the tables of a part with their headings: everything, and what is left without loops."""
    asked = {run.job for run in runs}
    yield f"### {part.title}\n\n{table(part, runs)}"
    skip = looping(runs)
    if not part.prefill and not part.ignore_eos and skip and skip < asked:
        yield f"### {part.title}, without the {len(skip)} of {len(asked)} that loop\n\n{table(part, runs, skip)}"


# ---- the questions ---------------------------------------------------------------------------------------------------


def questions(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Part]:
    """Return the parts of a run, with their prompts as ids."""
    served = ("none", "eagle3", "eagle3-chain", "ngram", "none-int8")
    llamas = ("llama.cpp", "llama.cpp-q8_0", "llama.cpp-eagle3")
    given, own = (bench.read_prompts(path, None) for path in (args.dataset, bench.PROMPTS))
    others = [text for prompts in {**given, **own}.values() for text in prompts]
    short = bench.read_prompts(args.dataset, args.limit)
    ordinary = [text for kind, prompts in short.items() if kind != "copying" for text in prompts]
    copying = bench.read_prompts(bench.PROMPTS, args.limit)["copying"]
    single = lambda texts: [[ids] for ids in throughput.encode(texts, tokenizer)]  # noqa: E731
    n = args.new_tokens
    parts = {
        "one": [Part(f"One stream, {len(ordinary)} prompts, {n} new tokens",
                     ("transformers", "transformers-lookup", *llamas, *served), single(ordinary), n)],
        "copying": [Part(f"One stream, {len(copying)} prompts that ask for copying, {n} new tokens",
                         ("transformers-lookup", "llama.cpp", "none", "ngram"), single(copying), n)],
        "prefill": [
            Part(f"Prefill of {size} tokens, {count} texts", ("llama.cpp", "llama.cpp-q8_0", "none", "none-int8"),
                 [[ids] for ids in texts(others, tokenizer, size, min(count, args.limit))], 1, prefill=True)
            for size, count in PREFILLS.items()
        ],
        "eight": [Part(f"{SLOTS} streams at once, {n} new tokens each", ("llama.cpp-eight", "none"),
                       list(groups(throughput.encode(ordinary, tokenizer))), n, ignore_eos=True)],
    }  # fmt: skip
    return [part for name in args.part for part in parts[name]]


def texts(others: Sequence[str], tokenizer: Tokenizer, size: int, count: int) -> list[Ids]:
    """Return chats of exactly `size` tokens, each beginning with another text, cut off at their ends."""
    first = [others[i * len(others) // count] for i in range(count)]
    return [ids[:size] for ids in throughput.encode(first, tokenizer, size + 64, others)]


def groups(prompts: Sequence[Ids]) -> Iterator[list[Ids]]:
    """Yield the prompts eight at a time; the last are filled up from the first."""
    for start_ in range(0, len(prompts), SLOTS):
        group = list(prompts[start_ : start_ + SLOTS])
        yield [group[i % len(group)] for i in range(SLOTS)]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hugging Face id or folder; default: the default model")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, built in its source tree")
    parser.add_argument("--llama-source", type=Path, help="that source tree; default: the one around the server")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "minispec-peers"),
                        help="folder for the files that llama.cpp reads, converted once")  # fmt: skip
    parser.add_argument("--dataset", type=Path, default=bench.PROMPTS, help="JSON lines, our own or MT-bench's format")
    parser.add_argument("--limit", type=int, default=16, help="most prompts of a part, spread over the dataset")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=TITLES, default=list(TITLES), metavar="ENGINE",
                        help=f"of {', '.join(TITLES)}")  # fmt: skip
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, help="write all runs here")
    return parser.parse_args()


def header(args: argparse.Namespace) -> str:
    """Return the machine, the versions and what is computed in, in one line."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    if args.llama_server:
        versions += f", llama.cpp {LlamaTree.find(args.llama_server, args.llama_source, args.work).version()}"
    dtype = str(choose_dtype(Config(model_path=args.model), torch.device("cpu"))).removeprefix("torch.")
    return f"{throughput.hardware('cpu')}; {versions}; {dtype} but where a row says otherwise"


def main() -> None:
    """Run the comparison and print it."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped as well
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(core_count())
    tokenizer = load_tokenizer(choose_folder(Config(model_path=args.model), print))
    parts = questions(args, tokenizer)
    wanted = [name for name in TITLES if name in args.only and any(name in part.names for part in parts)]
    with ExitStack() as stack:
        peers, left_out = start(args, wanted, stack)
        print(header(args))
        time.sleep((CALM + 10) * LOOK)  # after others have started, threads still sleep where they wait
        report = []
        for part in parts:
            load = os.getloadavg()[0]
            runs = measure(part, [peer for peer in peers if peer.name in part.names], args.rounds)
            if not runs:
                continue
            for text in sections(part, runs):
                print(f"\n{text}", flush=True)
            loads = load, os.getloadavg()[0]
            print("\nLoad before and after: {:.1f}, {:.1f}.".format(*loads), flush=True)
            report.append({"part": part.title, "load": loads, "runs": [run._asdict() for run in runs]})
    print("".join(f"\nLeft out: {line}" for line in left_out))
    if args.json:
        args.json.write_text(json.dumps({"header": header(args), "parts": report, "left_out": left_out}) + "\n")


if __name__ == "__main__":
    main()
