"""Speculation in a terminal, step by step: `python -m minispec.explain "PROMPT"`.

This command is for readers of the code. It draws each step as a tree, with the drafter's and the model's probability of
each node, the drafts accepted, the token that the model added, and the time of each part of the step. A table of all
steps comes last. With rich (`pip install 'minispec[explain]'`) the lines are coloured. `--worked-step` prints the
README's step in numbers. It computes in float32, so that the step is the same on every machine.

Read next: `asked/trace.py` for what a trace holds, `engine.py` for the step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.llm import LLM
from minispec.request import Request, SamplingParams, Trace
from minispec.sampling import largest
from minispec.tree import depth
from minispec.verify import Trees, Verdict

Line = list[tuple[str, str]]  # pieces of text with their styles
ACCEPTED, REJECTED, OWN, QUIET, HEAD = "bold green", "dim", "bold cyan", "dim", "bold"
MARKS = {"head": "●", "lookup": "◆", "host": "▲"}  # source of a step's drafts -> what is printed before each
LEGEND = "● drafted by a head or draft model, ◆ looked up in a text, ▲ drafted on the host"
QUESTION = "Why is the sea salty?"  # the prompt of the README's step
PARTS = ("propose", "blocks", "logits", "compact", "commit")  # the parts of a step; `Clock` names the function of each


class Clock:
    """Times each part of a step, by wrapping the function that does it."""

    def __init__(self, llm: LLM) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        engine = llm.scheduler.engine
        owners = ((engine.drafter, "propose"), (engine.model, "run_blocks"), (engine.model, "logits"),
                  (engine.kv, "compact"), (engine.drafter, "commit"))  # fmt: skip
        for part, (owner, name) in zip(PARTS, owners, strict=True):
            setattr(owner, name, self._timed(part, getattr(owner, name), engine.device))

    def _timed(self, part: str, work: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return `work` with a clock around it; on CUDA it waits for the device before and after."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            """Run `work`, and add its seconds to the part's."""
            wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
            wait()
            started = time.perf_counter()
            result = work(*args, **kwargs)
            wait()
            self.seconds[part] += time.perf_counter() - started
            return result

        return timed

    def lap(self) -> dict[str, float]:
        """Return the seconds of each part since the last lap."""
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken


def tree_lines(step: dict[str, Any], piece: Callable[[int], str]) -> list[Line]:
    """Return a step's tree as lines, one for each node and one for the token that the model added."""
    children: list[list[int]] = [[] for _ in step["tokens"]]
    for node, parent in enumerate(step["parents"]):
        if parent >= 0:
            children[parent].append(node)
    accepted, emitted, mark = set(step["accepted"]), step["emitted"], MARKS.get(step["source"], "")
    adds = len(emitted) == len(step["accepted"])  # whether the model's own token was kept; else a stop came before it
    lines: list[Line] = [[(f"{piece(step['tokens'][0])!r}", HEAD), ("  so far", QUIET)]]

    def below(node: int, indent: str) -> None:
        own = adds and node == step["accepted"][-1]
        for i, child in enumerate(children[node]):
            last = i + 1 == len(children[node]) and not own
            style = ACCEPTED if child in accepted else REJECTED
            numbers = f"draft {_percent(step['draft'][child])}, model {_percent(step['target'][child])}"
            branch = indent + ("└─ " if last else "├─ ")
            lines.append([(branch, QUIET), (f"{mark} {piece(step['tokens'][child])!r}", style),
                          (f"  {numbers}", QUIET), ("  accepted" if child in accepted else "", style)])  # fmt: skip
            below(child, indent + ("   " if last else "│  "))
        if own:
            margin = step["margins"][-1]
            lines.append([(indent + "└─ ", QUIET), (f"{piece(emitted[-1])!r}", OWN),
                          (f"  the model's own, ahead by {margin}", QUIET)])  # fmt: skip

    below(0, "")
    return lines


def _percent(probability: float | None) -> str:
    """Return a probability as text, a dash for None."""
    return "–" if probability is None else f"{probability:.1%}"


def table(steps: Sequence[dict[str, Any]], laps: Sequence[dict[str, float]]) -> list[list[str]]:
    """Return the rows of the table of all steps, header first and sums last; times are in milliseconds."""
    rows = [["step", "drafted", "accepted", "tokens", "ms", *PARTS]]
    numbers = []
    for step, lap in zip(steps, laps, strict=True):
        drafted, accepted = len(step["tokens"]) - 1, len(step["accepted"]) - 1
        times = [1000 * step["seconds"], *(1000 * lap[part] for part in PARTS)]
        numbers.append([drafted, accepted, len(step["emitted"]), *times])
    shown = lambda values: [str(v) if isinstance(v, int) else f"{v:.1f}" for v in values]  # noqa: E731
    rows += [[str(i + 1), *shown(values)] for i, values in enumerate(numbers)]
    return [*rows, ["all", *shown([sum(column) for column in zip(*numbers, strict=True)])]] if numbers else rows


class Screen:
    """Prints styled lines and a table, with rich if it is installed."""

    def __init__(self) -> None:
        try:
            from rich.console import Console
        except ImportError:
            self.console = None
        else:
            self.console = Console(highlight=False, soft_wrap=True)

    def line(self, *pieces: tuple[str, str]) -> None:
        """Print a line."""
        if self.console is None:
            print("".join(text for text, _ in pieces))
            return
        from rich.text import Text

        self.console.print(Text.assemble(*pieces))

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Print a table with its header first and its sums last; it fits in 80 columns, and no cell is ever cut."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            text = " ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            self.line((text, HEAD if row[0] in ("step", "all") else ""))


def explain(llm: LLM, request: Request, steps: int, screen: Screen) -> None:
    """Serve a request for `steps` decode steps; print each as it happens, and a table of all."""
    trace = request.trace = Trace()
    scheduler, clock, laps = llm.scheduler, Clock(llm), list[Any]()
    piece = lambda token: llm.tokenizer.decode([token], skip_special_tokens=False)  # noqa: E731
    scheduler.validate(request)
    scheduler.submit(request)
    screen.line((LEGEND, QUIET))
    while scheduler.has_work and len(trace.steps) < steps:
        scheduler.step()
        lap = clock.lap()
        if len(trace.steps) == len(laps):
            continue  # a prefill step
        laps.append(lap)
        step = trace.steps[-1]
        parts = ", ".join(f"{part} {1000 * seconds:.1f}" for part, seconds in lap.items() if seconds)
        screen.line(("", ""))
        screen.line((f"step {len(laps)}", HEAD), (f"  {1000 * step['seconds']:.1f} ms: {parts}", QUIET))
        for line in tree_lines(step, piece):
            screen.line(*line)
    scheduler.abort(request.rid)
    screen.line(("", ""))
    screen.line(("output  ", HEAD), (repr(llm.tokenizer.decode(request.output_ids)), ""))
    screen.line(("", ""))
    screen.table(table(trace.steps, laps))
    if laps:
        told = request.verified
        length, tokens, count = told.accept_length, told.tokens.total(), told.steps.total()
        screen.line((f"accept length {length:.2f}: {tokens} tokens in {count} steps", HEAD))


class Worked(NamedTuple):
    """The tree and the verdict of one step over one request."""

    lens: int  # committed rows before it
    tokens: list[int]  # [N]
    parents: list[int]  # [N]
    above: list[list[int]]  # [N, N], 1 if the column's node is the row's node or an ancestor of it
    picks: list[int]  # [N], the target's greedy pick at each node
    path: list[int]  # the nodes kept


def describe(step: Worked, text: Any) -> str:
    """Return a step as a table with a sentence below; `text` gives a token's text in quotes."""
    levels = depth(torch.tensor([step.above], dtype=torch.bool))[0].tolist()
    lines = ["node  parent  token              sees nodes        row  position  target's pick   kept"]
    for node, token in enumerate(step.tokens):
        sees = " ".join(str(other) if on else "." for other, on in enumerate(step.above[node]))
        kept = "yes" if node in step.path else ""
        lines.append(f"{node:>4}  {step.parents[node]:>6}  {text(token):<17}  {sees:<16}  {step.lens + node:>3}  "
                     f"{step.lens + levels[node]:>8}  {text(step.picks[node]):<14}  {kept}".rstrip())  # fmt: skip
    emitted = [step.picks[node] for node in step.path]
    moves = [f"{step.lens + node} to {step.lens + i}" for i, node in enumerate(step.path) if node != i]
    lines += ["", f"emitted: {' '.join(map(text, emitted))}; rows moved: {', '.join(moves) or 'none'}; "
                  f"lens: {step.lens} to {step.lens + len(step.path)}; next root: {text(emitted[-1])}"]  # fmt: skip
    return "\n".join(lines)


def worked_step(llm: LLM) -> str:
    """Return the README's step: the first that keeps three tokens whose rows do not follow each other."""
    engine, seen = llm.scheduler.engine, list[Worked]()
    judge = engine.accept.judge

    def watched(trees: Trees, logits: Tensor, *given: Any) -> Verdict:
        """Judge, and note what was judged."""
        verdict, tree = judge(trees, logits, *given), trees.tree
        kept = verdict.path[0, : int(verdict.count[0])].tolist()
        above, picks = trees.above[0].int().tolist(), largest(logits)[0].tolist()
        seen.append(Worked(int(trees.lens[0]), tree.tokens[0].tolist(), tree.parents[0].tolist(), above, picks, kept))
        return verdict

    setattr(engine.accept, "judge", watched)  # noqa: B010
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    answer = llm.generate(ids, SamplingParams(temperature=0.0, max_new_tokens=64))["output_ids"]
    step = next(s for s in seen if len(s.path) == 3 and s.path != [0, 1, 2])
    before = llm.tokenizer.decode([*ids, *answer][: step.lens + 1], skip_special_tokens=True)
    return f"{before}\n\n" + describe(step, lambda token: json.dumps(llm.tokenizer.decode([token]), ensure_ascii=False))


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, load the model, and explain."""
    parser = argparse.ArgumentParser(prog="python -m minispec.explain", description="Watch speculation step by step.")
    parser.add_argument("prompt", nargs="?", help="what the model is asked, or continues with --raw")
    parser.add_argument("--model", help="id, folder or GGUF file; default: the one that the server has")
    parser.add_argument("--algorithm", help="as --speculative-algorithm of the server, whose default is the default")
    parser.add_argument("--draft-model", help="id or folder of the head or draft model, or its GGUF file")
    parser.add_argument("--steps", type=int, default=8, help="decode steps to show (default: 8)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--raw", action="store_true", help="no chat template: the prompt is text to continue")
    parser.add_argument("--compile", action="store_true", help="compile first: minutes, and the times are the server's")
    parser.add_argument("--worked-step", action="store_true", help="only print the README's step in numbers")
    asked = parser.parse_args(argv)
    if asked.worked_step:
        print(worked_step(LLM(
            dtype="float32", device="cpu", disable_torch_compile=True, max_running_requests=1,
            speculative_algorithm="EAGLE3", speculative_num_steps=2, speculative_eagle_topk=4,
            speculative_num_draft_tokens=6,
        )))  # fmt: skip
        return
    if asked.prompt is None:
        parser.error("a prompt must be given, or --worked-step")
    if asked.steps < 1:
        parser.error(f"--steps must be at least 1, got {asked.steps}")
    screen = Screen()
    try:
        on_cuda = torch.cuda.is_available()  # on CUDA a captured step would have no parts to time
        llm = LLM(asked.model, progress=lambda line: screen.line((line, QUIET)), max_running_requests=1,
                  disable_torch_compile=not asked.compile, disable_overlap_schedule=True, disable_cuda_graph=on_cuda,
                  speculative_algorithm=asked.algorithm, speculative_draft_model_path=asked.draft_model)  # fmt: skip
        message = [{"role": "user", "content": asked.prompt}]
        ids = llm.tokenizer.encode(asked.prompt) if asked.raw else llm.tokenizer.encode_chat(message)
        params = SamplingParams(max_new_tokens=None, temperature=asked.temperature, sampling_seed=asked.seed)
        explain(llm, Request("explain", ids, params, begins=not asked.raw), asked.steps, screen)
    except (ValueError, RuntimeError) as error:
        parser.exit(1, f"minispec.explain: error: {error}\n")


if __name__ == "__main__":
    main()
