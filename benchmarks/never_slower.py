"""Is speculation ever slower than plain decoding? One engine a method, plain steps forced in it for comparison.

`python -m benchmarks.never_slower --dataset question.jsonl` (MT-bench's format) measures every cell of a grid: method,
batch, context, temperature. In a cell three contestants take turns on one engine: the engine as it serves, plain steps
forced, and plain steps forced once more, which is the control. Four times they go in the order given and back, on the
same questions each time, on other questions the next time, after a warm-up of 2,000 tokens. The figure is decode
tokens/s, prefill left out, while all requests of the batch run; a ratio is one of medians. The prefix cache stays, so
that long prompts are computed once; the drafter's memory of texts is emptied before every stretch.

A control further than 0.04 from 1 voids its run, and the cell is measured again. A cell falls short below 0.98 less the
control's deviation; it is measured once more, and that counts. At batch 1 and context 256 every shape that the engine
has is forced as well, for the ratio to the best of them. `--load` plays one, eight and one requests at once instead.

Every cell is printed as it is measured, and cells can be chosen by arguments, so that the grid may be run in pieces.

Read next: `minispec/policy.py`, which is measured here.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bench
from minispec import LLM, SamplingParams
from minispec.metrics import Metrics
from minispec.tree import PLAIN, Shape

METHODS = ("eagle3", "ngram", "eagle", "mtp", "standalone")
WHOLE_GRID = ("eagle3", "ngram")  # the others at context 256 and temperature 0
BATCHES, CONTEXTS, TEMPERATURES = (1, 8), (256, 3500), (0.0, 1.0)
HEADED = ("eagle3", "eagle", "mtp", "ngram")  # of whose ratios at batch 1, context 256, the geometric mean is wanted
LEAST, VOID = 0.98, 0.04
WARM_UP = 2000  # tokens
SHORT = min(CONTEXTS)
LONGEST = 4  # times as many tokens as in the mean one request may have

Force = Callable[[Sequence[Shape]], Shape] | None


class Cell(NamedTuple):
    """What is measured together."""

    method: str
    batch: int
    context: int
    temperature: float


class Result(NamedTuple):
    """What a cell gave; speeds are decode tokens/s, medians over the stretches."""

    cell: Cell
    ratio: float  # as served, over plain
    control: float  # plain over plain
    plain: float
    shapes: dict[str, float]  # shares of decode steps by nodes, as served
    best: float | None = None  # as served, over the best fixed shape
    best_shape: int | None = None

    @property
    def void(self) -> bool:
        """Whether the machine was too restless to say anything."""
        return abs(self.control - 1) > VOID

    @property
    def short(self) -> bool:
        """Whether speculation was slower, beyond what plain decoding differs from itself."""
        return self.ratio < LEAST - abs(self.control - 1)

    def line(self) -> str:
        """Return the cell as a line of a Markdown table."""
        best = "" if self.best is None else f"{self.best:.3f} (of {self.best_shape})"
        shapes = " ".join(f"{nodes}: {share:.0%}" for nodes, share in self.shapes.items())
        said = "void" if self.void else "SHORT" if self.short else "holds"
        return (f"| {self.cell.method} | {self.cell.batch} | {self.cell.context} | {self.cell.temperature:g} | "
                f"{self.ratio:.3f} | {self.control:.3f} | {self.plain:.1f} | {best} | {shapes} | {said} |")  # fmt: skip


HEAD = ("| method | batch | context | T | served/plain | control | plain tokens/s | of best shape | shapes | |\n"
        "|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip


class Field:
    """One engine, and stretches of decoding on it."""

    def __init__(self, method: str, args: argparse.Namespace) -> None:
        rows = max(args.batch) * (max(args.context) + args.new_tokens + 512) * 2  # and what the prefix cache keeps
        options: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "model": args.model}
        options |= bench.METHODS[method] | {"decode_log_interval": 10**9, "max_total_tokens": rows}
        tell = lambda line: print(f"  {line}", file=sys.stderr)  # noqa: E731
        self.llm = LLM(max_running_requests=max(args.batch), batches=tuple(args.batch), progress=tell, **options)
        self.args = args
        prompts = itertools.chain(*bench.read_prompts(args.dataset, None).values())
        # The questions as chats, in ids.
        self.texts = [self.llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in prompts]

    def prompts(self, number: int, batch: int, context: int) -> list[list[int]]:
        """Return `batch` prompts of about `context` tokens; by number others in their last 256 tokens.

        What stands before these belongs to a row of the batch and is the same for all numbers, so that the prefix cache
        has it, while every row reads pages of its own.
        """
        front, back = max(0, context - SHORT), min(context, SHORT) - self.args.new_tokens // 2
        return [self._text(row, front) + self._text(number * batch + row, back) for row in range(batch)]

    def _text(self, index: int, length: int) -> list[int]:
        """Return the last `length` tokens of a question with others in front."""
        ids: list[int] = []
        for other in itertools.count(index):
            if len(ids) >= length:
                return ids[len(ids) - length :]
            ids = self.texts[other % len(self.texts)] + ids

    def stretch(self, prompts: Sequence[list[int]], temperature: float, force: Force) -> tuple[float, dict[str, float]]:
        """Return decode tokens/s and shares of shapes of one batch, all of whose requests run until the end.

        The end is when they have so many new tokens in the mean: were each served to an end of its own, steps with
        drafts would have fewer and fewer requests, and plain ones, in which all get on alike, would not.
        """
        scheduler, wanted = self.llm.scheduler, len(prompts) * self.args.new_tokens
        scheduler.engine.drafter.clear()
        metrics = scheduler.metrics = Metrics(scheduler.sizes.nodes, 10**9)
        scheduler.policy.forced = force
        for seed, ids in enumerate(prompts):
            params = SamplingParams(temperature=temperature, max_new_tokens=LONGEST * self.args.new_tokens,
                                    sampling_seed=seed, ignore_eos=True)  # fmt: skip
            request = self.llm.request(ids, params)
            scheduler.validate(request)
            scheduler.submit(request)
        while scheduler.has_work and metrics.verified.tokens.total() < wanted:
            scheduler.step()
        scheduler.policy.forced = None
        speed = metrics.verified.tokens.total() / (metrics.step_seconds + metrics.host_seconds)
        scheduler.abort("")
        while scheduler.has_work:
            scheduler.step()
        scheduler.check()
        return speed, metrics.shape_shares

    def warm_up(self, cell: Cell) -> None:
        """Serve so many tokens of a cell that the policy knows it, of other questions than those that are timed."""
        for number in range(1000, 1000 + -(-self.args.warm_up // (cell.batch * self.args.new_tokens))):
            self.stretch(self.prompts(number, cell.batch, cell.context), cell.temperature, None)

    def measure(self, cell: Cell) -> Result:
        """Measure a cell once."""
        plain: Force = lambda shapes: PLAIN  # noqa: E731
        who: dict[str | int, Force] = {"served": None, "plain": plain, "control": plain}
        if cell.batch == 1 and cell.context == SHORT:
            for shape in self.llm.scheduler.sizes.shapes_of(1):
                if shape.drafts:
                    who[shape.nodes] = lambda shapes, shape=shape: shape
        speeds: dict[str | int, list[float]] = {name: [] for name in who}
        shares: list[dict[str, float]] = []
        for number in range(self.args.rounds):
            prompts = self.prompts(number, cell.batch, cell.context)
            self.stretch(prompts, cell.temperature, plain)  # so that nobody's prompt is computed in what is timed
            for name in (*who, *reversed(who)):
                speed, shapes = self.stretch(prompts, cell.temperature, who[name])
                speeds[name].append(speed)
                shares += [shapes] if name == "served" else []
        medians = {name: statistics.median(of) for name, of in speeds.items()}
        fixed = {name: speed for name, speed in medians.items() if isinstance(name, int)} | {1: medians["plain"]}
        best = max(fixed, key=fixed.__getitem__) if len(fixed) > 1 else None
        return Result(
            cell, medians["served"] / medians["plain"], medians["control"] / medians["plain"], medians["plain"],
            mean_shares(shares), None if best is None else medians["served"] / fixed[best], best,
        )  # fmt: skip

    def load(self) -> Iterator[str]:
        """Yield what became of shapes with one, eight and one requests at once, eight stretches each.

        Before and after the eight at once the questions are the same, since what a tree gives depends on the text.
        """
        for batch in (1, max(self.args.batch), 1):
            played = [self.stretch(self.prompts(number, batch, SHORT), 0.0, None) for number in range(500, 508)]
            shares = mean_shares([shapes for _, shapes in played])
            steps = ", ".join(f"{nodes}: {share:.0%}" for nodes, share in shares.items())
            speed = statistics.median(speed for speed, _ in played)
            yield f"{batch} at once: {speed:.1f} tokens/s, steps by nodes {steps}"


def mean_shares(several: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the means of the shares of shapes, by nodes."""
    names = sorted({name for shares in several for name in shares}, key=int)
    return {name: statistics.mean(shares.get(name, 0.0) for shares in several) for name in names}


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells asked for, all of a method one after the other."""
    for method, batch, context, heat in itertools.product(args.method, args.batch, args.context, args.temperature):
        if method in WHOLE_GRID or (context, heat) == (SHORT, 0.0):
            yield Cell(method, batch, context, heat)


def main() -> None:
    """Print a line for each cell, and what the whole comes to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, default=bench.PROMPTS, help="JSON lines, our own or MT-bench's format")
    parser.add_argument("--method", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--context", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--temperature", nargs="+", type=float, default=list(TEMPERATURES))
    parser.add_argument("--new-tokens", type=int, default=64, help="of a request, in the mean")
    parser.add_argument("--rounds", type=int, default=4, help="times that all contestants go there and back")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="tokens before a cell")
    parser.add_argument("--load", action="store_true", help="one, eight and one requests at once, in place of the grid")
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    if not any(cells(args)):
        parser.error(f"there is no such cell: but for {' and '.join(WHOLE_GRID)} the grid has --context {SHORT} and "
                     "--temperature 0 alone")  # fmt: skip
    results: list[Result] = []
    print(HEAD, flush=True)
    for method, of in itertools.groupby(cells(args), key=lambda cell: cell.method):
        field = Field(method, args)
        if args.load:
            print("\n".join(f"{method}, {line}" for line in field.load()), flush=True)
            continue
        for cell in of:
            results.append(settled(field, cell))
    alone = [r.ratio for r in results if r.cell[1:] == (1, SHORT, 0.0) and r.cell.method in HEADED]
    if alone:
        print(f"geometric mean at batch 1, context 256, T = 0: {math.prod(alone) ** (1 / len(alone)):.3f}")
    short = [r for r in results if r.short or r.void]
    print(f"{len(results)} cells, {len(short)} that do not hold")


def settled(field: Field, cell: Cell) -> Result:
    """Measure a cell, again where the control voids the run or, once, where it falls short; prints each time."""
    repeated, voids = False, 0
    field.warm_up(cell)
    while True:
        result = field.measure(cell)
        print(result.line(), flush=True)
        if result.void and voids < 3:
            voids += 1
        elif result.short and not result.void and not repeated:
            repeated = True
        else:
            return result


if __name__ == "__main__":
    main()
