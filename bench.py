"""Throughput side by side: plain decoding, drafters, and transformers' generate, in one run on one machine.

`python bench.py` needs no arguments: plain decoding, the default drafter, NGRAM and transformers, greedily, one request
at a time, on sixteen prompts of our own (eight ordinary, eight that ask for copying). It says at once what it will run
and for about how long, prints every result as it is measured, and ends with a table and a sentence. Ctrl-C at any
moment prints the table of what there is. `--full` runs all methods, at batch 1 and 8. `--plot FILE.png` draws it.
`--sweep` measures trees; the command lines of SGLang's bench_speculative.py do too, with that script's settings.

All contestants run every set of prompts in turn, and in the next round in the reverse order (A B B A), so that a noisy
machine is noisy for all. Medians over the rounds are reported; of these the ratios are worth quoting.

What is counted:
  - tokens/s is new tokens over wall time from submission to the last token, prefill included, for every contestant
    alike; decode tokens/s leaves prefill out.
  - Accept length is the tokens that replies keep per verify step, nothing behind a stop counted. "By depth" is the
    share of drafts accepted at each depth, of those steps that reached it; a stop that cuts a step counts as a refusal.
  - "Lookups, tokens" is the share of verify steps whose tree was looked up in texts beside a head that drafts, and the
    share of the tokens that those steps gave.
  - A head or draft model has two rows: alone, and with texts looked up beside it, as it is served on a CPU.
  - A reply loops if its last 48 tokens have a period of 16 or less. Such replies are easy to draft, so the accept
    length is given with and without them.
  - Speed-up is against `none` at the same batch and prompts. GB/s is the weights read per second, which bounds decoding
    at batch 1.
  - Of minispec the batch sizes asked for are compiled and no others, so a batch that has shrunk is padded to them.

Torch is imported after the first line is out. Read next: `benchmarks/throughput.py`, the contestants and their runs;
`benchmarks/plot.py`, the picture.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.plot import Row, draw, objection
from minispec.config import FLAGS, NUMBERS, Config
from minispec.load.flags import config_from_args

if TYPE_CHECKING:
    from benchmarks.throughput import Contestant, Run

PROMPTS = Path(__file__).parent / "benchmarks" / "prompts.jsonl"
METHODS: dict[str, dict[str, Any]] = {  # name -> launch flags; without a path a head is the one that ships
    "none": {"speculative_algorithm": "NONE"},
    "ngram": {"speculative_algorithm": "NGRAM"},
    "eagle3": {"speculative_algorithm": "EAGLE3"},
    "eagle": {"speculative_algorithm": "EAGLE"},
    "eagle-full-vocabulary": {"speculative_algorithm": "EAGLE", "speculative_token_map": "none"},
    "mtp": {"speculative_algorithm": "NEXTN"},
    "mtp-full-vocabulary": {"speculative_algorithm": "NEXTN", "speculative_token_map": "none"},
    "standalone": {"speculative_algorithm": "STANDALONE"},
    "dflash": {"speculative_algorithm": "DFLASH"},
    "dspark": {"speculative_algorithm": "DSPARK"},
}
HEADLESS = ("none", "ngram")  # methods without a head or a tree to shape
THEIRS = ("transformers", "transformers-prompt-lookup")
# For the plan's estimate: tokens/s on two CPU cores at batch 1, prefill included, and seconds until ready.
RATES = {"none": 36.0, "STANDALONE alone": 28.0, "STANDALONE + lookup": 28.0, "transformers": 19.0,
         "transformers-prompt-lookup": 26.0}  # fmt: skip
RATE, IMPORTS, READY, COMPILING = 42.0, 12.0, 8.0, 30.0  # of others; of python; of one contestant and batch, warm, cold
NEW_TOKENS = 32
# The options of SGLang's bench_speculative.py with their defaults; a command line with one of `ASKS` is meant for it.
SCRIPT: dict[str, Any] = {
    "--batch-size": (1, 2, 4, 8, 16), "--steps": (0, 1, 3, 5, 7), "--topk": (0, 1, 2, 4, 8),
    "--num_draft_tokens": (0, 2, 4, 8, 16, 32), "--num-prompts": 16, "--start": 0, "--end": None,
    "--output": "output.jsonl",
}  # fmt: skip
ASKS = {"--num_draft_tokens", "--model-path", *SCRIPT}
SWEEP = {"num_steps": (0, 1, 2, 3), "eagle_topk": (0, 1, 2, 4), "num_draft_tokens": (0, 2, 3, 4, 6)}  # usual lists


class Entrant(NamedTuple):
    """Somebody who is to take part, not loaded yet."""

    name: str
    batches: Sequence[int]
    flags: dict[str, Any] | None  # of launch; None: transformers takes part


class Task(NamedTuple):
    """One timed run: an entrant on one set of prompts."""

    round: int
    batch: int
    prompts: str  # the set's name
    temperature: float
    name: str


@dataclass
class Results:
    """All runs so far; complete at every moment, since Ctrl-C may ask for the table at any."""

    runs: dict[tuple[str, int, str, float], list[Run]] = field(default_factory=dict)
    weight_bytes: int | None = None  # of the target, once it is loaded
    dtype: str = ""
    hardware: str = ""

    def add(self, task: Task, run: Run) -> Row:
        """Take in a run, and return what its row says now."""
        key = (task.name, task.batch, task.prompts, task.temperature)
        self.runs[key] = [*self.runs.get(key, []), run]
        return self.row(*key)

    def row(self, name: str, batch: int, prompts: str, temperature: float) -> Row:
        """Return the medians over the rounds so far."""
        from benchmarks.throughput import accept_length, by_depth

        several = self.runs[name, batch, prompts, temperature]
        base = self.runs.get(("none", batch, prompts, temperature), [])
        decodes = [run.decoded / run.decode_seconds for run in several if run.decode_seconds]
        # Each ratio is taken within a round, so that a machine that is slow for a while is slow for both.
        ratios = [(a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in zip(several, base, strict=False)]
        first = several[0]
        same = [x == y for x, y in zip(first.outputs, base[0].outputs, strict=True)] if base else []
        rounded = lambda value, digits: value if value is None else round(value, digits)  # noqa: E731
        return Row(
            name, batch, prompts, temperature,
            tokens_per_s=round(statistics.median(run.tokens / run.seconds for run in several), 2),
            decode_tokens_per_s=round(statistics.median(decodes), 2) if decodes else None,
            accept_length=accept_length(first.verified),
            accept_length_without_loops=accept_length(first.verified_unlooped),
            accepted_by_depth=by_depth(first.verified),
            speedup=round(statistics.median(ratios), 3) if ratios else None,
            tokens=first.tokens,
            same_as_none=round(sum(same) / len(same), 3) if same else None,
            drafter_ms_per_step=rounded(first.drafter_ms, 3),
            host_ms_per_step=rounded(first.host_ms, 3),
            forwards_per_s=rounded(first.forwards_per_s, 1),
            shapes=first.shapes,
            lookup_shares=first.lookups,
            step_ms=first.step_ms,
        )  # fmt: skip

    def rows(self) -> list[Row]:
        """Return all rows: by batch, prompts and temperature, the fastest first."""
        rows = [self.row(*key) for key in list(self.runs)]
        return sorted(rows, key=lambda row: (row.batch, row.prompts, row.temperature, -row.tokens_per_s))


# ---- what is printed ---------------------------------------------------------------------------------------------


def shown(value: float | None, form: str) -> str:
    """Return a number in this format; nothing for None."""
    return "" if value is None else format(value, form)


COLUMNS: dict[str, Callable[[Row], str]] = {
    "batch": lambda row: str(row.batch),
    "prompts": lambda row: row.prompts,
    "T": lambda row: f"{row.temperature:g}",
    "method": lambda row: row.name,
    "tokens/s": lambda row: shown(row.tokens_per_s, ".1f"),
    "decode tokens/s": lambda row: shown(row.decode_tokens_per_s, ".1f"),
    "speed-up": lambda row: shown(row.speedup, ".2f"),
    "accept length": lambda row: shown(row.accept_length, ".2f"),
    "without loops": lambda row: shown(row.accept_length_without_loops, ".2f"),
    "by depth": lambda row: " ".join(f"{share:.2f}" for share in row.accepted_by_depth[:5]),
    "lookups, tokens": lambda row: "{:.0%}, {:.0%}".format(*row.lookup_shares) if row.lookup_shares else "",
    "same as none": lambda row: shown(row.same_as_none, ".0%"),
    "drafter ms/step": lambda row: shown(row.drafter_ms_per_step, ".2f"),
    "host ms/step": lambda row: shown(row.host_ms_per_step, ".2f"),
    "nodes": lambda row: " ".join(f"{nodes}: {share:.0%}" for nodes, share in (row.shapes or {}).items()),
}


def table(rows: Sequence[Row], weight_bytes: int | None = None) -> str:
    """Return rows as a Markdown table."""
    columns = dict(COLUMNS)
    if weight_bytes:
        columns["GB/s"] = lambda row: shown(row.forwards_per_s and row.forwards_per_s * weight_bytes / 1e9, ".1f")
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence: who is fastest here, for each batch, set of prompts and temperature, and by how much."""
    groups: dict[tuple[int, str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.batch, row.prompts, row.temperature), []).append(row)
    parts = []
    for (batch, prompts, heat), several in groups.items():
        best, *others = sorted(several, key=lambda row: -row.tokens_per_s)
        base = next((row for row in others if row.name == "none"), others[0] if others else None)
        if best.name == "none" or base is None:
            than = f"{best.tokens_per_s / base.tokens_per_s:.2f} times {base.name}" if base else "nobody beside it"
        else:  # within rounds where there are such ratios
            ratio = best.speedup if base.name == "none" and best.speedup else best.tokens_per_s / base.tokens_per_s
            than = f"{ratio:.2f} times {'plain decoding' if base.name == 'none' else base.name}"
        where = f"batch {batch}, {prompts} prompts" + (f", temperature {heat:g}" if heat else "")
        parts.append(f"{'plain decoding' if best.name == 'none' else best.name} at {where} ({than})")
    return f"Fastest here: {'; '.join(parts)}." if parts else "Nothing was measured."


def spell(seconds: float) -> str:
    """Return a duration as one says it."""
    return f"{max(round(seconds / 10) * 10, 10)} seconds" if seconds < 90 else f"{round(seconds / 60)} minutes"


def bar(total: int) -> Any:
    """Return rich's bar, drawn to stderr until it is stopped; None where rich is not installed.

    What is printed meanwhile comes out above it: to stdout through it only if that is a terminal too.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = SpinnerColumn(), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    drawn = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())
    drawn.add_task("", total=total)
    drawn.start()
    return drawn


class Progress:
    """What is left, on stderr: a bar by rich where that is a terminal, a line for each step elsewhere.

    weights: of each step, its estimated seconds on two CPU cores. The estimate of what is left is scaled by how long
    the steps so far have really taken.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights, self.done, self.started = list(weights), 0, time.monotonic()
        self.bar = bar(len(weights)) if sys.stderr.isatty() else None

    def step(self, what: str) -> None:
        """Say what the next step is, which `finish` ends."""
        self.say(f"{what}; step {self.done + 1} of {len(self.weights)}, about {spell(self.left())} left")

    def say(self, line: str) -> None:
        """Show a line: beside the bar in place of the last one, or below it."""
        if self.bar is None:
            print(line[:110], file=sys.stderr, flush=True)
        else:
            self.bar.update(self.bar.task_ids[0], completed=self.done, description=line)

    def finish(self) -> None:
        """End a step."""
        self.done += 1

    def end(self) -> None:
        """Take the bar away, if there is one."""
        if self.bar is not None:
            self.bar.stop()

    def left(self) -> float:
        """Return the seconds that the steps to come will take."""
        known = sum(self.weights[: self.done])
        pace = (time.monotonic() - self.started) / known if self.done > 1 else 1.0
        return pace * sum(self.weights[self.done :])


# ---- the plan ----------------------------------------------------------------------------------------------------


def read_prompts(path: Path, limit: int | None) -> dict[str, list[str]]:
    """Return {set: prompts} from our own file (fields kind, prompt) or an MT-bench one (the first of its turns).

    limit: prompts of each set, taken at equal distances, since a file may be sorted by subject.
    """
    sets: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        kind, text = (row["kind"], row["prompt"]) if "prompt" in row else (path.stem, row["turns"][0])
        sets.setdefault(kind, []).append(text)
    size = {kind: min(limit or len(prompts), len(prompts)) for kind, prompts in sets.items()}
    return {kind: [all_[i * len(all_) // size[kind]] for i in range(size[kind])] for kind, all_ in sets.items()}


def entrants(args: argparse.Namespace) -> list[Entrant]:
    """Return everybody who was asked for, minispec's first; a head takes part twice, alone and with lookups."""
    trees = {f"speculative_{name}": getattr(args, name) for name in SWEEP}
    ours, theirs = [], []
    for name in args.method:
        if name in THEIRS:
            batches = [batch for batch in args.batch if batch == 1 or name not in THEIRS[1:]]
            theirs.append(Entrant(name, batches, None))
            continue
        flags = METHODS.get(name, {"speculative_algorithm": name})
        if name not in HEADLESS:
            flags = {**trees, "speculative_draft_model_path": args.draft_model_path, **flags}
        rows = {name: flags}
        if name in METHODS and name not in HEADLESS:
            title = flags["speculative_algorithm"] + (", full vocabulary" if "full" in name else "")
            rows = {f"{title} alone": {**flags, "speculative_lookup": False},
                    f"{title} + lookup": {**flags, "speculative_lookup": True}}  # fmt: skip
        ours += [Entrant(row, args.batch, chosen) for row, chosen in rows.items()]
    return ours + theirs


def load(args: argparse.Namespace, one: Entrant, tell: Callable[[str], None]) -> Contestant:
    """Load transformers, or minispec with one drafter, of which its batch sizes alone are compiled."""
    from benchmarks.throughput import Ours, Transformers

    if one.flags is None:
        return Transformers(one.name, their_model(args.model, args.dtype, args.device), one.batches)
    # All contestants are in memory at once, so a pool holds what the prompts need; a text has fewer tokens than bytes.
    texts = [text for prompts in read_prompts(args.dataset, args.limit).values() for text in prompts]
    longest = max(args.context or [len(text.encode()) for text in texts])
    options = {"model": args.model, "dtype": args.dtype, "device": args.device, "progress": tell,
               "disable_torch_compile": args.disable_torch_compile,
               "max_total_tokens": max(one.batches) * (longest + args.new_tokens + 256)}  # fmt: skip
    return Ours(one.name, {**options, **one.flags}, one.batches)


@cache
def their_model(model: str | None, dtype: str, device: str) -> Any:
    """Return the model as transformers loads it, once for all who generate with it."""
    import transformers

    from minispec.load.build import choose_device, choose_dtype, choose_folder

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = Config(model_path=model, dtype=dtype, device=device)
    place = choose_device(config)
    folder = choose_folder(config, lambda line: None)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=choose_dtype(config, place)).to(place)


def tasks(args: argparse.Namespace, everyone: Sequence[Entrant], kinds: Sequence[str]) -> list[Task]:
    """Return all timed runs in their order: everybody in turn, every other round in the reverse order."""
    return [
        Task(round_, batch, kind, heat, one.name)
        for round_, batch, kind, heat in itertools.product(range(args.rounds), args.batch, kinds, args.temperature)
        for one in (everyone if round_ % 2 == 0 else reversed(everyone))
        # transformers draws other noise, so its sampled replies cannot be compared with ours
        if batch in one.batches and not (heat and one.name in THEIRS)
    ]


def kinds_of(args: argparse.Namespace) -> dict[str, tuple[str, int | None]]:
    """Return the names of the sets of prompts, each with the file's own name and the length it is brought to."""
    return {
        kind if tokens is None else f"{kind}, {tokens} tokens": (kind, tokens)
        for kind in read_prompts(args.dataset, args.limit)
        for tokens in args.context or [None]
    }


def estimates(args: argparse.Namespace, everyone: Sequence[Entrant], todo: Sequence[Task]) -> list[float]:
    """Return the seconds that each task takes on two CPU cores, loading its contestant included where it is the first.

    Nothing is compiled anew in these figures; that takes COMPILING seconds more for each contestant and batch.
    """
    sizes = {kind: len(prompts) for kind, prompts in read_prompts(args.dataset, args.limit).items()}
    counts = {name: sizes[kind] for name, (kind, _) in kinds_of(args).items()}
    ready = {one.name: READY * (1 if one.name in THEIRS else len(one.batches)) for one in everyone}
    seconds = []
    for task in todo:
        rate = RATES.get(task.name, RATE) * task.batch**0.6
        seconds.append(ready.pop(task.name, 0.0) + counts[task.prompts] * args.new_tokens / rate)
    if seconds:
        seconds[0] += IMPORTS
    return seconds


def plan(args: argparse.Namespace, everyone: Sequence[Entrant], seconds: Sequence[float]) -> str:
    """Return what is going to be run, and for about how long."""
    counts = [f"{len(prompts)} {kind}" for kind, prompts in read_prompts(args.dataset, args.limit).items()]
    cold = sum(len(one.batches) for one in everyone if one.name not in THEIRS) * COMPILING
    cold = 0 if args.disable_torch_compile else cold
    took = f"about {spell(sum(seconds))} on two CPU cores" + (
        f", {spell(sum(seconds) + cold)} if nothing is compiled yet" if cold else ""
    )
    return (
        f"{', '.join(one.name for one in everyone)}; batch {' and '.join(map(str, args.batch))}; "
        f"{' and '.join(counts)} prompts, {args.new_tokens} new tokens each, temperature "
        f"{' and '.join(f'{heat:g}' for heat in args.temperature)}; {args.rounds} rounds: {took}. "
        "Ctrl-C prints what there is."
    )


# ---- the sweep ---------------------------------------------------------------------------------------------------


def cells(args: argparse.Namespace) -> list[tuple[int, int, int, int]]:
    """Return (batch, steps, branches, draft tokens) of all possible trees of --sweep, and 0, 0, 0 for plain decoding.

    A chain has steps + 1 tokens, and a tree at most steps * branches + 1.
    """
    found = []
    for cell in itertools.product(args.batch, args.num_steps, args.eagle_topk, args.num_draft_tokens):
        steps, topk, nodes = shape = cell[1:]
        fits = nodes == steps + 1 if topk == 1 else nodes <= steps * topk + 1
        if not any(shape) or (all(shape) and nodes > 1 and fits):
            found.append(cell)
    return found


def measure_cell(args: argparse.Namespace, cell: tuple[int, int, int, int]) -> dict[str, int | float]:
    """Return the line of one cell: its tree alone, at every step, without lookups."""
    from benchmarks.throughput import WARM_UP, accept_length, encode

    batch, steps, topk, nodes = cell
    tree = {"speculative_num_steps": steps, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes,
            "speculative_draft_model_path": args.draft_model_path, "speculative_lookup": False}  # fmt: skip
    flags = {**METHODS[args.method[0]], **tree} if steps else METHODS["none"]
    flags = {**args.launch, **flags, "record_step_time": True}
    one = load(args, Entrant("sweep", [batch], flags), lambda line: print(line, file=sys.stderr))
    one.ignore_eos = args.ignore_eos
    sets = [text for prompts in read_prompts(args.dataset, args.limit).values() for text in prompts]
    count = max(batch, args.num_prompts or len(sets))
    chats = encode((sets * -(-count // len(sets)))[: args.num_prompts and count], one.llm.tokenizer)
    one.run(encode(WARM_UP, one.llm.tokenizer), batch, 8, 0.0)
    runs = [one.run(chats, batch, args.new_tokens, args.temperature[0]) for _ in range(args.rounds)]
    times = sorted(one.llm.scheduler.metrics.recorded[batch])
    seconds = times[len(times) // 5]  # the 20th percentile, as there
    length = accept_length(runs[0].verified) or 1.0
    return {
        "batch_size": batch, "steps": steps, "topk": topk, "num_draft_tokens": nodes, "acc_length": round(length, 3),
        "step_time": round(seconds, 5), "speed": round(length / seconds, 3),
        "completion_tokens": runs[0].tokens / len(chats),
    }  # fmt: skip


def sweep(args: argparse.Namespace) -> None:
    """Measure all cells that the file of --sweep does not have yet, and add a line of JSON for each.

    The fields are those of SGLang's bench_speculative.py: step_time in seconds is the 20th percentile of decode steps
    with `batch_size` requests, speed is acc_length / step_time, completion_tokens the mean of a reply.
    """
    args.sweep.touch()
    lines = [json.loads(line) for line in args.sweep.read_text().splitlines()]
    done = {tuple(line[name] for name in ("batch_size", "steps", "topk", "num_draft_tokens")) for line in lines}
    todo = [cell for cell in cells(args)[args.start : args.end] if cell not in done]
    print(f"{len(todo)} cells to measure; {len(done)} in {args.sweep} already", file=sys.stderr)
    for cell in todo:
        line = json.dumps(measure_cell(args, cell))
        print(line, flush=True)
        with args.sweep.open("a") as file:
            file.write(line + "\n")
        gc.collect()  # an LLM is in cycles, and the next one needs its memory


# ---- the command -------------------------------------------------------------------------------------------------


def shipped(args: argparse.Namespace) -> list[str]:
    """Return the methods to run without --algorithm; with --full all that need no head or whose head ships."""
    if args.full:
        names = [name for name in METHODS if "full" not in name]
        with_head = lambda name: Config(model_path=args.model, **METHODS[name]).draft_path is not None  # noqa: E731
        found = [name for name in names if name in HEADLESS or with_head(name)]
    else:
        found = list(dict.fromkeys(["none", Config(model_path=args.model).algorithm.lower(), "ngram"]))
    theirs = THEIRS if args.full else THEIRS[:1]
    return found + (list(theirs) if 0 in args.temperature else [])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all methods, at batch 1 and 8; with transformers' lookup")
    parser.add_argument("--model", help="Hugging Face id, folder or GGUF file; default: the default model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--disable-torch-compile", action="store_true", help="run eagerly: a quick look at acceptance")
    parser.add_argument(
        "--algorithm", "--method", dest="method", nargs="+", metavar="NAME",
        help=f"of {', '.join((*METHODS, *THEIRS))}, or module:Class; default: none, the default drafter, ngram and "
        "transformers",
    )  # fmt: skip
    parser.add_argument("--draft-model-path", help="the head or draft model of all methods that take one")
    parser.add_argument(
        "--num-steps", type=int, nargs="+", help="rounds of drafting; with the next two, as the launch flags"
    )
    parser.add_argument("--eagle-topk", type=int, nargs="+", help="branches of a round")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", help="nodes of a tree, root included")
    parser.add_argument(
        "--sweep", type=Path, metavar="FILE.jsonl",
        help="instead measure every tree that the lists of the three flags above allow, at each --batch, and add a "
        "line of JSON for each; what the file has already is not measured again",
    )  # fmt: skip
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0], help="one table row each; 0 is greedy")
    parser.add_argument("--batch", nargs="+", type=int, help="default: 1, with --full 1 and 8")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help=f"of a reply, default {NEW_TOKENS}")
    parser.add_argument("--rounds", type=int, default=2, help="timed runs of each; medians are reported")
    parser.add_argument("--dataset", type=Path, default=PROMPTS, help="JSON lines, our own or MT-bench's format")
    parser.add_argument("--limit", type=int, help="prompts of each set, spread over it")
    parser.add_argument("--context", nargs="+", type=int, help="lengthen prompts to so many tokens, a set each")
    parser.add_argument("--json", type=Path, help="write one JSON object here")
    parser.set_defaults(launch={}, start=0, end=None, num_prompts=None, ignore_eos=False)  # those of `as_script`
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw tokens/s, acceptance and step times here")
    return parser


def as_script(argv: Sequence[str]) -> argparse.Namespace:
    """Return our arguments for a command line of SGLang's bench_speculative.py: a sweep with that script's settings.

    Its own options come first in the parser, and what it does not know are launch flags of the server.
    """
    script = argparse.ArgumentParser(prog="bench.py", allow_abbrev=False)
    for flag, usual in SCRIPT.items():
        kind = {"nargs": "+", "type": int} if isinstance(usual, tuple) else {"type": str if flag == "--output" else int}
        script.add_argument(flag, flag.replace("_", "-"), default=usual, **kind)
    asked, rest = script.parse_known_args(argv)
    config = config_from_args(rest)
    given = {f.name: value for f in FLAGS if (value := getattr(config, f.name)) != f.default}
    args = parser().parse_args([])
    args.model, args.draft_model_path = given.pop("model_path", None), given.pop("speculative_draft_model_path", None)
    args.method = [given.pop("speculative_algorithm", "EAGLE").lower()]
    for name in ("dtype", "device", "disable_torch_compile"):
        setattr(args, name, given.pop(name, getattr(args, name)))
    args.launch = {name: value for name, value in given.items() if name not in NUMBERS}
    args.sweep, args.batch, args.num_prompts = Path(asked.output), asked.batch_size, asked.num_prompts
    args.num_steps, args.eagle_topk, args.num_draft_tokens = asked.steps, asked.topk, asked.num_draft_tokens
    args.start, args.end, args.new_tokens, args.rounds, args.ignore_eos = asked.start, asked.end, 512, 1, True
    return args


def parse() -> argparse.Namespace:
    """Read the command line; one with a spelling of `SCRIPT` is that of SGLang's script."""
    commands = parser()
    words = [word.partition("=")[0] for word in sys.argv[1:]]
    args = as_script(sys.argv[1:]) if any(word in ASKS for word in words) else commands.parse_args()
    args.batch = args.batch or ([1, 8] if args.full else [1])
    drafter = Config(model_path=args.model).algorithm.lower()
    args.method = args.method or ([drafter] if args.sweep else shipped(args))
    unknown = [name for name in args.method if name not in METHODS and name not in THEIRS and ":" not in name]
    if unknown:
        commands.error(f"--algorithm {unknown[0]}: must be of {', '.join((*METHODS, *THEIRS))}, or module:Class")
    check_trees(commands, args)
    if args.plot and (said := objection(args.plot)):
        commands.exit(2, f"bench.py: error: --plot {said}\n")
    return args


def check_trees(commands: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in the lists of --sweep; without it make one number of each. Ends the program where either cannot be."""
    for name, usual in SWEEP.items():
        given, flag = getattr(args, name), "--" + name.replace("_", "-")
        if not args.sweep and given and len(given) > 1:
            commands.error(f"{flag} {' '.join(map(str, given))}: must be one number, but for --sweep")
        setattr(args, name, (given or usual) if args.sweep else given and given[0])
    heads = [name for name in METHODS if name not in HEADLESS]
    if args.sweep and (len(args.method) != 1 or args.method[0] not in heads):
        commands.error(f"--algorithm {' '.join(args.method)}: with --sweep must be one of {', '.join(heads)}")


class Bench:
    """One run of the command: the plan, who is loaded, and what was measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.results = args, Results()
        self.entrants = {one.name: one for one in entrants(args)}
        self.todo = tasks(args, list(self.entrants.values()), list(kinds_of(args)))
        self.seconds = estimates(args, list(self.entrants.values()), self.todo)
        self.progress = Progress(self.seconds)
        self.loaded: dict[str, Contestant] = {}

    def run(self) -> None:
        """Measure everything; each contestant is loaded right before its first run."""
        self.progress.step("importing torch, reading the prompts")
        sets = self._read()
        # Theirs come first: loading transformers' model registers pytree nodes, which would invalidate our graphs.
        for name in [name for name in self.entrants if name in THEIRS]:
            self._load(name)
        for task in self.todo:
            if task.name not in self.loaded:
                self._load(task.name)
            self.progress.step(f"round {task.round + 1} of {self.args.rounds}: {task.name}, batch {task.batch}, "
                               f"{task.prompts}")  # fmt: skip
            one = self.loaded[task.name]
            run = one.run(sets[task.prompts], task.batch, self.args.new_tokens, task.temperature)
            row = self.results.add(task, run)
            self.progress.finish()
            print(self._line(task, run, row), flush=True)

    def _line(self, task: Task, run: Run, row: Row) -> str:
        """Return what a run gave, in one line."""
        speed = f"{run.tokens / run.seconds:6.1f} tokens/s"
        ratio = f", {row.speedup:.2f} of plain" if row.speedup and row.name != "none" else ""
        length = f", accept length {row.accept_length:.2f}" if row.accept_length and row.name != "none" else ""
        heat = f", temperature {task.temperature:g}" if task.temperature else ""
        where = f"round {task.round + 1}, batch {task.batch}, {task.prompts}{heat}"
        return f"{where}: {task.name:<19} {speed}{ratio}{length}"

    def _read(self) -> dict[str, list[list[int]]]:
        """Return all sets of prompts as ids, and note the machine."""
        from benchmarks.throughput import WARM_UP, encode, hardware
        from minispec.load.build import choose_device, choose_folder
        from minispec.load.tokenizer import load_tokenizer

        config = Config(model_path=self.args.model, device=self.args.device)
        tokenizer = load_tokenizer(choose_folder(config, self.progress.say))
        self.results.hardware = hardware(choose_device(config).type)
        self.warm_up = encode(WARM_UP, tokenizer)
        whole, some = read_prompts(self.args.dataset, None), read_prompts(self.args.dataset, self.args.limit)
        return {
            name: encode(some[kind], tokenizer, tokens, whole[kind])
            for name, (kind, tokens) in kinds_of(self.args).items()
        }

    def _load(self, name: str) -> None:
        """Load a contestant and run its batch sizes once, on other prompts."""
        from minispec.load.weights import read_tensors

        self.progress.step(f"loading {name}")
        one = load(self.args, self.entrants[name], lambda line: self.progress.say(f"loading {name}: {line}"))
        for batch in one.batches:
            one.run(self.warm_up, batch, 8, 0.0)
        self.loaded[name] = one
        if self.results.weight_bytes is None and (llm := getattr(one, "llm", None)) is not None:
            dtype = llm.scheduler.kv.pool.dtype
            numbers = sum(tensor.numel() for _, tensor in read_tensors(llm.folder, "auto"))
            self.results.weight_bytes, self.results.dtype = numbers * dtype.itemsize, str(dtype)

    def report(self) -> str:
        """Return the table of all that was measured and the sentence after it, and write --json."""
        args, results = self.args, self.results
        rows, versions = results.rows(), {name: version(name) for name in ("torch", "transformers")}
        versions = {"python": platform.python_version(), **versions}
        if args.json and rows:
            flags = {**{name: str(value) for name, value in vars(args).items()}, "dtype": results.dtype}
            whole = {"hardware": results.hardware, "versions": versions, "flags": flags}
            args.json.write_text(json.dumps({**whole, "results": [asdict(row) for row in rows]}, indent=1) + "\n")
        where = f"{results.hardware}; {versions}; {results.dtype}, {args.new_tokens} new tokens, {args.rounds} rounds"
        return "\n".join([where, table(rows, results.weight_bytes), verdict(rows)] if rows else [verdict(rows)])

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """Print what there is and end, from within whatever the main thread was doing, a compilation say.

        As a signal handler it must not raise, since compilers catch what is raised in them, and it must not print,
        since the main thread may be printing; so it writes to the file and leaves without unwinding.
        """
        if self.progress.bar is not None:
            os.write(2, b"\r\x1b[K\x1b[?25h")  # the bar's line is cleared and the cursor, which it hides, shown
        said = f"\nInterrupted; {self.progress.done} of {len(self.todo)} runs were done.\n{self.report()}\n".encode()
        while said:
            said = said[os.write(1, said) :]
        os._exit(128 + number)


def main() -> None:
    """Run the benchmark."""
    args = parse()
    if args.sweep:
        sweep(args)
        return
    bench = Bench(args)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, bench.interrupted)
    print(plan(bench.args, list(bench.entrants.values()), bench.seconds), flush=True)
    try:
        bench.run()
    finally:
        bench.progress.end()
    print(bench.report(), flush=True)
    if args.plot and (rows := bench.results.rows()):
        draw(rows, args.plot, bench.results.hardware)


if __name__ == "__main__":
    main()
