"""Throughput side by side: plain decoding, each drafter, and transformers' generate, in one run on one machine.

`python bench.py` needs no arguments: it runs the default model with every method that ships for it on sixteen prompts
of our own (eight ordinary, eight that ask for copying), greedily, with 96 new tokens, at batch 1 and 8. Every
contestant runs every set of prompts in turn, round after round, so that a noisy machine is noisy for all. The medians
over the rounds are reported; of these the ratios are worth quoting.

What is counted:
  - tokens/s is new tokens over wall time from submission to the last token, prefill included, for every contestant
    alike; decode tokens/s leaves prefill out.
  - Accept length is 1 + accepted drafts per verify step. The last step of a reply is left out, since a stop may have
    cut it. "By depth" is the share of drafts accepted at each depth, of those steps that reached it.
  - A reply loops if its last 48 tokens have a period of 16 or less. Such replies are easy to draft, so the accept
    length is given with and without them.
  - Speed-up is against `none` at the same batch and prompts. GB/s is the weights read per second, which bounds decoding
    at batch 1.

Before every timed run the prefix cache and the drafter's memory are emptied; the warm-up uses other prompts.

Read next: `minispec/llm.py`, the interface used here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from minispec import LLM, SamplingParams
from minispec.compiled import check_graph_trees
from minispec.config import Config
from minispec.llm import choose_device, choose_dtype, choose_folder
from minispec.load.tokenizer import Tokenizer
from minispec.load.weights import read_tensors
from minispec.metrics import loops
from minispec.request import Request

PROMPTS = Path(__file__).parent / "benchmarks" / "prompts.jsonl"
WARM_UP = ["Name three rivers.", "Say hello to the class in one sentence."]
METHODS: dict[str, dict[str, Any]] = {  # name -> launch flags; without a path a head is the one that ships
    "none": {"speculative_algorithm": "NONE"},
    "ngram": {"speculative_algorithm": "NGRAM"},
    "eagle3": {"speculative_algorithm": "EAGLE3"},
    "eagle": {"speculative_algorithm": "EAGLE"},
    "eagle-full-vocabulary": {"speculative_algorithm": "EAGLE", "speculative_token_map": "none"},
    "mtp": {"speculative_algorithm": "NEXTN"},
    "mtp-full-vocabulary": {"speculative_algorithm": "NEXTN", "speculative_token_map": "none"},
    "standalone": {"speculative_algorithm": "STANDALONE"},
}
HEADLESS = ("none", "ngram")  # methods without a head or a tree to shape
THEIRS = ("transformers", "transformers-prompt-lookup")


@dataclass
class Run:
    """One timed run over one set of prompts."""

    tokens: int
    seconds: float
    decode_seconds: float | None = None  # without prefill
    decoded: int = 0  # tokens that decode steps gave
    accepted: list[int] | None = None  # item i: steps that accepted exactly i drafts, without replies' last steps
    accepted_unlooped: list[int] | None = None  # the same for replies that do not loop
    drafter_ms: float | None = None  # host time of the drafter per decode step
    host_ms: float | None = None  # host time of stop rules and text per decode step
    forwards_per_s: float | None = None
    outputs: tuple[tuple[int, ...], ...] = ()


class Contestant(Protocol):
    """Anything that generates from lists of token ids."""

    name: str
    batches: Sequence[int]

    def run(self, prompts: Sequence[list[int]], batch: int, new_tokens: int, temperature: float) -> Run:
        """Generate for all prompts, `batch` at a time."""
        ...


class Ours:
    """minispec with one drafter."""

    def __init__(self, name: str, options: dict[str, Any], batches: Sequence[int]) -> None:
        self.name, self.batches = name, batches
        self.llm = LLM(max_running_requests=max(batches), **options)

    def run(self, prompts: Sequence[list[int]], batch: int, new_tokens: int, temperature: float) -> Run:
        """Generate through the scheduler, groups of `batch` requests at a time; request i has seed i."""
        scheduler = self.llm.scheduler
        assert scheduler.flush_cache(), "a benchmark starts on an idle engine"
        requests = [
            self.llm.request(
                ids, SamplingParams(temperature=temperature, max_new_tokens=new_tokens, sampling_seed=seed)
            )
            for seed, ids in enumerate(prompts)
        ]
        start = time.perf_counter()
        for i in range(0, len(requests), batch):
            self.llm.serve(requests[i : i + batch])
        seconds = time.perf_counter() - start
        m = scheduler.metrics
        steps = max(m.tree_steps + m.plain_steps, 1)
        return Run(
            sum(len(r.output_ids) for r in requests), seconds, m.step_seconds + m.host_seconds, m.verified_tokens,
            accepted(requests), accepted([r for r in requests if not loops(r.output_ids)]),
            scheduler.engine.drafter_seconds / steps * 1e3, m.host_seconds / steps * 1e3,
            steps / (m.step_seconds + m.host_seconds or 1.0), tuple(tuple(r.output_ids) for r in requests),
        )  # fmt: skip


def accepted(requests: Sequence[Request]) -> list[int]:
    """Return how many verify steps accepted exactly i drafts, without each reply's last step."""
    counts: Counter[int] = Counter()
    for request in requests:
        counts.update(dict(enumerate(request.accept_histogram)))
        if request.last_step:
            counts[request.last_step - 1] -= 1
    return [counts[i] for i in range(max(counts, default=-1) + 1)]


def accept_length(histogram: Sequence[int] | None) -> float | None:
    """Return tokens per verify step."""
    steps = sum(histogram or ())
    return 1 + sum(i * n for i, n in enumerate(histogram)) / steps if histogram and steps else None


def by_depth(histogram: Sequence[int] | None) -> list[float]:
    """Return the share of drafts accepted at each depth, of the steps that reached it."""
    reached = [sum(histogram[d:]) for d in range(len(histogram))] if histogram else []
    return [round(deeper / here, 3) for here, deeper in zip(reached, reached[1:], strict=False) if here]


class Transformers:
    """transformers' own greedy generate, plain or with prompt lookup."""

    def __init__(self, name: str, model: Any, pad: int, batches: Sequence[int], **options: Any) -> None:
        self.name, self.batches, self.model, self.pad, self.options = name, batches, model, pad, options

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
                **self.options,
            )  # fmt: skip
            outputs += [trim(row[width:].tolist(), self.model.generation_config.eos_token_id) for row in made]
        return Run(sum(map(len, outputs)), time.perf_counter() - start, outputs=tuple(map(tuple, outputs)))


def trim(ids: list[int], eos: int | list[int]) -> list[int]:
    """Cut an output after its first end-of-sequence token, since what follows is padding."""
    ends = [i for i, token in enumerate(ids) if token in (eos if isinstance(eos, list) else [eos])]
    return ids[: ends[0] + 1] if ends else ids


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


def contestants(args: argparse.Namespace) -> list[Contestant]:
    """Load every contestant that was asked for; those of minispec come first in the list."""
    options = {"model": args.model, "dtype": args.dtype, "device": args.device}
    options["disable_torch_compile"] = args.disable_torch_compile
    if args.context:  # on a CPU the pool holds 4,096 rows a request unless told otherwise
        options["max_total_tokens"] = max(args.batch) * (max(args.context) + args.new_tokens + 256)
    elif choose_device(Config(device=args.device)).type == "cuda":  # the first pool would leave no room for the others
        options["max_total_tokens"] = max(args.batch) * 4096
    theirs: list[Contestant] = []
    if names := [name for name in args.method if name.startswith("transformers")]:
        # Loaded before our graphs are compiled: loading registers pytree nodes, which would invalidate them.
        config = Config(model_path=args.model, dtype=args.dtype, device=args.device)
        device = choose_device(config)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            choose_folder(config, print), dtype=choose_dtype(config, device)
        ).to(device)
        pad = model.generation_config.pad_token_id or 0
        for name in names:
            lookup = {"prompt_lookup_num_tokens": 10} if name.endswith("lookup") else {}
            batches = [b for b in args.batch if b == 1 or not lookup]
            theirs.append(Transformers(name, model, pad, batches, **lookup))
    trees = {
        "speculative_num_steps": args.num_steps,
        "speculative_eagle_topk": args.eagle_topk,
        "speculative_num_draft_tokens": args.num_draft_tokens,
    }
    ours: list[Contestant] = []
    for name in args.method:
        if name in THEIRS:
            continue
        flags = METHODS[name] if name in METHODS else {"speculative_algorithm": name}
        if name not in HEADLESS:
            flags = {**trees, "speculative_draft_model_path": args.draft_model_path, **flags}
        ours.append(Ours(name, {**options, **flags}, args.batch))
        if args.graph_trees:
            ours.append(Ours(f"{name}, graph trees", {**options, **flags, "graph_trees": True}, args.batch))
    return ours + theirs


def shipped(args: argparse.Namespace) -> list[str]:
    """Return the methods to run without --algorithm: those that need no head, and those whose head ships."""
    names = [name for name in METHODS if "full" not in name]
    found = [
        name for name in names
        if name in HEADLESS or Config(model_path=args.model, **METHODS[name]).draft_path is not None
    ]  # fmt: skip
    return found + (list(THEIRS) if 0 in args.temperature else [])


def measure(args: argparse.Namespace, everyone: Sequence[Contestant], sets: dict[str, list[list[int]]]) -> list[dict]:
    """Run everyone on every set, round after round; returns a table row per contestant, batch, temperature and set."""
    runs: dict[tuple[str, int, str, float], list[Run]] = {}
    for round_, batch, (kind, prompts), heat in product(
        range(args.rounds), args.batch, sets.items(), args.temperature
    ):
        for one in everyone:
            if batch not in one.batches or (heat and one.name in THEIRS):
                continue  # transformers draws other noise, so its sampled replies cannot be compared with ours
            run = one.run(prompts, batch, args.new_tokens, heat)
            runs.setdefault((one.name, batch, kind, heat), []).append(run)
            what = f"round {round_ + 1}: {one.name}, batch {batch}, {kind}, temperature {heat:g}"
            print(f"{what}: {run.tokens / run.seconds:.1f} token/s", file=sys.stderr)
    rows = []
    for (name, batch, kind, heat), several in runs.items():
        base = runs.get(("none", batch, kind, heat))
        speed = statistics.median(run.tokens / run.seconds for run in several)
        decodes = [run.decoded / run.decode_seconds for run in several if run.decode_seconds]
        decode = statistics.median(decodes) if decodes else None
        # Each ratio is taken within a round, so that a machine that is slow for a while is slow for both.
        ratio = (
            statistics.median(
                (a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in zip(several, base, strict=True)
            )
            if base
            else None
        )
        same = [x == y for x, y in zip(several[0].outputs, base[0].outputs, strict=True)] if base else []
        rows.append(
            {
                "name": name,
                "batch": batch,
                "prompts": kind,
                "temperature": heat,
                "tokens_per_s": round(speed, 2),
                "decode_tokens_per_s": decode and round(decode, 2),
                "accept_length": accept_length(several[0].accepted),
                "accept_length_without_loops": accept_length(several[0].accepted_unlooped),
                "accepted_by_depth": by_depth(several[0].accepted),
                "speedup": ratio and round(ratio, 3),
                "tokens": several[0].tokens,
                "same_as_none": round(sum(same) / len(same), 3) if same else None,
                "drafter_ms_per_step": several[0].drafter_ms and round(several[0].drafter_ms, 3),
                "host_ms_per_step": several[0].host_ms and round(several[0].host_ms, 3),
                "forwards_per_s": several[0].forwards_per_s and round(several[0].forwards_per_s, 1),
            }
        )
    return rows


def table(rows: Sequence[dict], weight_bytes: int) -> str:
    """Return the results as a Markdown table."""
    titles = ["batch", "prompts", "T", "method", "tokens/s", "decode tokens/s", "speed-up", "accept length",
              "without loops", "by depth", "same as none", "GB/s", "drafter ms/step", "host ms/step"]  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    show = lambda value, form: "" if value is None else format(value, form)  # noqa: E731
    for row in sorted(rows, key=lambda r: (r["batch"], r["prompts"], r["temperature"])):
        rate = row["forwards_per_s"]
        cells = [
            str(row["batch"]), row["prompts"], f"{row['temperature']:g}", row["name"], f"{row['tokens_per_s']:.1f}",
            show(row["decode_tokens_per_s"], ".1f"), show(row["speedup"], ".2f"), show(row["accept_length"], ".2f"),
            show(row["accept_length_without_loops"], ".2f"),
            " ".join(f"{share:.2f}" for share in row["accepted_by_depth"][:5]), show(row["same_as_none"], ".0%"),
            show(rate and rate * weight_bytes / 1e9, ".1f"), show(row["drafter_ms_per_step"], ".2f"),
            show(row["host_ms_per_step"], ".2f"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hugging Face id or folder; default: the default model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--disable-torch-compile", action="store_true", help="run eagerly: a quick look at acceptance")
    parser.add_argument(
        "--algorithm", "--method", dest="method", nargs="+", metavar="NAME",
        help=f"of {', '.join((*METHODS, *THEIRS))}, or module:Class; default: all that ship for the model",
    )  # fmt: skip
    parser.add_argument(
        "--graph-trees", action="store_true",
        help='on CUDA, a second row for each method: torch.compile(mode="max-autotune") with the CUDA graphs that '
        "PyTorch makes of every compiled call, in place of our captured steps",
    )  # fmt: skip
    parser.add_argument("--draft-model-path", help="the head or draft model of all methods that take one")
    parser.add_argument("--num-steps", type=int, help="rounds of drafting; with the next two, as the launch flags")
    parser.add_argument("--eagle-topk", type=int, help="branches of a round")
    parser.add_argument("--num-draft-tokens", type=int, help="nodes of a tree, root included")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0], help="one table row each; 0 is greedy")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2, help="timed runs of each; medians are reported")
    parser.add_argument("--dataset", type=Path, default=PROMPTS, help="JSON lines, our own or MT-bench's format")
    parser.add_argument("--limit", type=int, help="prompts of each set, spread over it")
    parser.add_argument("--context", nargs="+", type=int, help="lengthen prompts to so many tokens, a set each")
    parser.add_argument("--json", type=Path, help="write one JSON object here")
    args = parser.parse_args()
    args.method = args.method or shipped(args)
    unknown = [name for name in args.method if name not in METHODS and name not in THEIRS and ":" not in name]
    if unknown:
        parser.error(f"--algorithm {unknown[0]}: must be of {', '.join((*METHODS, *THEIRS))}, or module:Class")
    if args.graph_trees:
        try:
            check_graph_trees(choose_device(Config(device=args.device)), not args.disable_torch_compile)
        except ValueError as error:
            parser.error(f"--graph-trees: {error}")
    return args


def main() -> None:
    """Run the benchmark."""
    args = parse()
    transformers.utils.logging.set_verbosity_error()
    everyone = contestants(args)
    ours = next(one for one in everyone if isinstance(one, Ours))
    tokenizer, device = ours.llm.tokenizer, ours.llm.scheduler.kv.pool.device.type
    for one in everyone:
        for batch in one.batches:
            one.run(encode(WARM_UP, tokenizer), batch, 8, 0.0)
    whole = read_prompts(args.dataset, None)
    sets = {
        kind if tokens is None else f"{kind}, {tokens} tokens": encode(prompts, tokenizer, tokens, whole[kind])
        for kind, prompts in read_prompts(args.dataset, args.limit).items()
        for tokens in args.context or [None]
    }
    rows = measure(args, everyone, sets)
    weights = sum(tensor.numel() for _, tensor in read_tensors(ours.llm.folder, "auto"))
    weight_bytes = weights * ours.llm.scheduler.kv.pool.dtype.itemsize
    report = {
        "hardware": hardware(device),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__
        },
        "flags": {**{k: str(v) for k, v in vars(args).items()}, "dtype": str(ours.llm.scheduler.kv.pool.dtype)},
        "results": rows,
    }  # fmt: skip
    print(f"{report['hardware']}; {report['versions']}; {report['flags']['dtype']}, {args.new_tokens} new tokens")
    print(table(rows, weight_bytes))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
