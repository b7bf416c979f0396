"""Which tree is fastest on this machine, and whether a table of step times could have predicted it.

`python -m benchmarks.shapes` drafts with EAGLE-3 (or `--algorithm`) in several shapes, steps/topk/draft tokens, at
batch 1 and greedily. For each shape it times the parts of a step on padding, at the length that the texts have when
they are half generated: t(1), a plain step; t(N), verifying a tree of N nodes; and S t_draft, the S rounds of drafting
with the drafter's commit. Then it generates with all shapes and plain decoding in turn, times the parts once more, and
prints the speed-up of decoding beside the prediction

    accept length / ((t(N) + S t_draft) / t(1))

(which follows arXiv 2211.17192). The two agree within 10 % where nothing else costs time.

Read next: `bench.py`, whose runs these are.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import bench
from benchmarks import throughput
from minispec.engine import Engine

SHAPES = ("1/1/2", "2/1/3", "3/1/4", "4/1/5", "1/4/5", "2/2/5", "2/4/8", "3/4/8", "5/4/8", "5/8/32")


class Stopwatch:
    """Calls a function and adds up the time it took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any) -> Any:
        """Call it and return what it returns."""
        started = time.perf_counter()
        try:
            return self.function(*args)
        finally:
            self.seconds += time.perf_counter() - started


@torch.inference_mode()
def step_times(engine: Engine, context: int, repeats: int) -> list[tuple[float, float, float]]:
    """Return (plain step, verifying a tree, drafting it) in ms, several times, at batch 1 on padding of `context`."""
    drafter = engine.drafter
    watches = [Stopwatch(drafter.propose), Stopwatch(drafter.commit)]
    step = Stopwatch(lambda nodes: engine.collect(engine.launch([], nodes, ())))
    drafter.propose, drafter.commit = watches
    times = []
    for _ in range(repeats):
        seconds = []
        for nodes in (1, engine.sizes.nodes):
            engine.lens[:1].fill_(context)
            for watch in (*watches, step):
                watch.seconds = 0.0
            step(nodes)
            seconds.append(step.seconds)
        draft = sum(watch.seconds for watch in watches)
        times.append((seconds[0] * 1e3, (seconds[1] - draft) * 1e3, draft * 1e3))
    del drafter.propose, drafter.commit  # so that the class's own methods are called again
    return times


def contestants(args: argparse.Namespace) -> list[throughput.Ours]:
    """Load plain decoding and every shape."""
    options = {"model": args.model, "dtype": args.dtype, "device": "cpu"}
    everyone = [throughput.Ours("none", {**options, **bench.METHODS["none"]}, [1])]
    for shape in args.shape:
        steps, topk, nodes = map(int, shape.split("/"))
        tree = {
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": nodes,
            "speculative_draft_model_path": args.draft_model_path,
        }
        everyone.append(throughput.Ours(shape, {**options, **bench.METHODS[args.algorithm], **tree}, [1]))
    return everyone


def table(rows: Sequence[bench.Row], times: dict[str, list[tuple[float, float, float]]]) -> str:
    """Return the shapes as a Markdown table, the fastest first."""
    plain = next(row for row in rows if row.name == "none")
    lines = ["| shape | accept length | t(1) ms | t(N) ms | S t_draft ms | predicted | measured | measured/predicted |",
             "|---" * 8 + "|"]  # fmt: skip
    for row in sorted(rows, key=lambda r: -(r.decode_tokens_per_s or 0.0)):
        if row is plain:
            continue
        once, verify, draft = map(statistics.median, zip(*times[row.name], strict=True))
        predicted = row.accept_length / ((verify + draft) / once)
        measured = row.decode_tokens_per_s / plain.decode_tokens_per_s
        cells = [row.accept_length, once, verify, draft, predicted, measured, measured / predicted]
        lines.append(f"| {row.name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines)


def measure(args: argparse.Namespace, everyone: Sequence[throughput.Ours], chats: list[list[int]]) -> list[bench.Row]:
    """Run everybody on all prompts, every other round in the reverse order."""
    results = bench.Results()
    for round_ in range(args.rounds):
        for one in everyone if round_ % 2 == 0 else reversed(everyone):
            task = bench.Task(round_, 1, "all", 0.0, one.name)
            row = results.add(task, one.run(chats, 1, args.new_tokens, 0.0))
            print(f"round {round_ + 1}: {row.name}: {row.tokens_per_s:.1f} tokens/s", file=sys.stderr)
    return results.rows()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--algorithm", default="eagle3", choices=[m for m in bench.METHODS if m not in bench.HEADLESS])
    parser.add_argument("--draft-model-path")
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="steps/topk/draft tokens")
    parser.add_argument("--dataset", type=Path, default=bench.PROMPTS)
    parser.add_argument("--limit", type=int, default=4, help="prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15, help="of the timed steps")
    args = parser.parse_args()
    everyone = contestants(args)
    sets = bench.read_prompts(args.dataset, args.limit)
    chats = {"all": throughput.encode([p for prompts in sets.values() for p in prompts], everyone[0].llm.tokenizer)}
    for one in everyone:
        one.run(throughput.encode(throughput.WARM_UP, one.llm.tokenizer), 1, 8, 0.0)
    context = round(statistics.mean(map(len, chats["all"])) + args.new_tokens / 2)
    time_all = lambda: {one.name: step_times(one.llm.scheduler.engine, context, args.repeats) for one in everyone[1:]}  # noqa: E731
    before, rows, after = time_all(), measure(args, everyone, chats["all"]), time_all()
    times = {name: before[name] + after[name] for name in before}
    dtype = everyone[0].llm.scheduler.kv.pool.dtype
    print(f"{throughput.hardware('cpu')}, {dtype}, {args.algorithm}, step times at a context of {context}")
    print(table(rows, times))


if __name__ == "__main__":
    main()
