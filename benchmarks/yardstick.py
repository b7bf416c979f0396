"""Did anything change? Two checkouts on one machine: what they answer, and how long their steps take.

`python -m benchmarks.yardstick CHECKOUT_A CHECKOUT_B` runs each checkout's package in processes of its own, prints
every comparison, and exits with status 1 where one fails. Nothing is written to a checkout; compiled code is kept in
the temporary folder, by commit. It takes some ten minutes, and a tenth of that with `--no-times`.

Equal must be the tokens and verify steps of eight prompts for every drafter, in float32 and in shapes that are drawn,
the names of compiled graphs, `/openapi.json`, and the generated tables of docs/flags.md and docs/serving.md.

Times are of decode steps of one and of eight requests in a forced shape, without prefill. Three processes take turns:
A, B, and A once more as control C, in the order A B C C B A, which makes two pairs each. A setting fails where the
median of B/A exceeds 1.02 and the upper end of the control's interval as well: that of the median of C/A at 95 %, from
its order statistics.

The same file is what runs in a checkout (`--probe`, with the checkout as working directory): it reads a JSON object a
line, whose "do" names a method of `Probe`, and writes one a line. Read next: `yardstick_lines.py`, the size.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TextIO

BOUND = 1.02  # a median up to this passes whatever the control says
LEAST_PAIRS = 20
SHOWN = 8  # lines of a difference
DRAFTERS = ("NONE", "NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
TIMED = [(drafter, force) for drafter in ("EAGLE3", "NGRAM") for force in ("plain", "tree")]
PAGES = {  # what is printed -> a module, or a line of Python, that prints it
    "docs/flags.md": ("-m", "minispec.load.flags"), "tables of docs/serving.md": ("-m", "minispec.serve.openapi"),
    "/openapi.json": ("-c", "import json; from minispec.serve.openapi import document as of; "
                            "print(json.dumps(of('0'), indent=1, sort_keys=True))"),
}  # fmt: skip
TEXTS = (
    "List the months of the year and say in a few words what the weather is like in each of them.",
    "Repeat this sentence three times: the lighthouse keeper counted the boats, and the boats counted the stars.",
    "Explain to a child why bread rises.",
    "Write a function in Python that returns the sum of the squares of the first n whole numbers.",
    "A train leaves at nine and travels for three hours at eighty kilometres an hour. How far does it get, and when?",
    "Once upon a time, in a village between two hills, there was a clock that ran backwards. One morning",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen,",
    "Translate into French: good morning, I would like a cup of coffee and two rolls, please.",
)
WISHES: tuple[dict[str, Any], ...] = (  # one for each text
    {}, {}, {"temperature": 0.8, "sampling_seed": 11}, {"min_new_tokens": 20}, {"frequency_penalty": 0.7},
    {"temperature": 1.1, "top_p": 0.9, "top_k": 50, "sampling_seed": 12}, {"speculative": False},
    {"json": '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'},
)  # fmt: skip
COMPARED = 20  # new tokens of each


# ---- judging ---------------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """What one comparison came to."""

    name: str
    passed: bool
    said: str  # in a line
    details: Sequence[str] = ()

    def __str__(self) -> str:
        more = [f"and {len(self.details) - SHOWN} more"] if len(self.details) > SHOWN else []
        lines = [f"{'passes' if self.passed else 'FAILS'}  {self.name}: {self.said}", *self.details[:SHOWN], *more]
        return "\n          ".join(lines)


def judge_equal(name: str, a: Any, b: Any) -> Finding:
    """Compare two values; texts are told apart by their lines, lists by their items."""
    if a == b:
        return Finding(name, True, "equal")
    lines = [value.splitlines() if isinstance(value, str) else [*map(str, value)] for value in (a, b)]
    details = list(difflib.unified_diff(*lines, lineterm="", n=0))[2:]
    return Finding(name, False, f"{len(details)} lines differ", details)


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return an interval that has the median with this probability at least, whatever the distribution.

    Its ends are values of their order; of fewer than six values it has all, and less than that probability.
    """
    ordered, count = sorted(values), len(values)
    below, out = 0.0, 0
    while out < (count - 1) // 2:
        below += math.comb(count, out) / 2**count
        if 2 * below > 1 - level:
            break
        out += 1
    out = max(out - 1, 0)
    return ordered[out], ordered[-1 - out]


def judge_times(name: str, ratios: Sequence[float], control: Sequence[float]) -> Finding:
    """Judge a setting by the ratios B/A of its pairs, and those C/A of its control."""
    median, (low, high) = statistics.median(ratios), interval(control)
    said = f"median of B/A {median:.3f} of {len(ratios)} pairs, control {low:.3f} to {high:.3f}"
    return Finding(name, not (median > BOUND and median > high), said)


# ---- in a checkout ---------------------------------------------------------------------------------------------------


class Probe:
    """One checkout's engine, and what may be asked of it; all that is internal to a checkout is read here."""

    def load(self, options: dict[str, Any]) -> None:
        """Put an LLM in the place of the one there was."""
        import minispec
        from minispec import LLM, ngram
        from minispec.asked import grammar

        if Path(minispec.__file__).resolve().parent.parent != Path.cwd().resolve():
            raise RuntimeError(f"minispec is imported from {minispec.__file__}, not from {Path.cwd()}")
        self.llm = None
        self.llm = LLM(decode_log_interval=10**9, device="cpu", max_running_requests=8, batches=[1, 8], **options)
        # What the host does for drafts has limits of seconds, with which drafts would differ from run to run.
        ngram.NgramDrafter.seconds = property(lambda drafter: None, lambda drafter, value: None)  # type: ignore
        ngram.SHARE = 1e9
        grammar.time = SimpleNamespace(perf_counter=lambda: 0.0)  # type: ignore

    def force(self, how: str) -> None:
        """Have every step's shape chosen so: "plain", "tree" (the largest), or "any" (drawn)."""
        from minispec.tree import PLAIN

        ways = {"plain": lambda shapes: PLAIN, "tree": max, "any": random.Random(0).choice}
        self.llm.scheduler.policy.forced = ways[how]

    def equal(self) -> dict[str, Any]:
        """Tell what may not differ: tokens of all texts at once in shapes that are drawn, and names of graphs."""
        from minispec import SamplingParams
        from minispec.load.files import loaded
        from minispec.request import Grammar

        params = []
        for wish in WISHES:
            wish = {"temperature": 0.0, "max_new_tokens": COMPARED, "ignore_eos": True, **wish}
            if "json" in wish:
                wish["grammar"] = Grammar("json_schema", wish.pop("json"))
            params.append(SamplingParams(**wish))
        self.force("any")
        answers = self.llm.generate(list(TEXTS), params)
        return {"tokens": [answer["output_ids"] for answer in answers],
                "verify steps": [answer["meta_info"].get("spec_verify_ct", 0) for answer in answers],
                "graphs": dict(Counter(function.__qualname__ for function, _ in loaded))}  # fmt: skip

    def time(self, batch: int, steps: int, force: str) -> float:
        """Return the seconds of so many decode steps of a batch, prefill left out; all calls do the same work."""
        from minispec import SamplingParams

        self.force(force)
        scheduler = self.llm.scheduler
        scheduler.engine.drafter.clear()
        params = SamplingParams(temperature=0.0, max_new_tokens=16 * steps, ignore_eos=True)
        prompts = [list(self.llm.tokenizer.encode(text * 8))[:32] for text in itertools.islice(TEXTS, batch)]
        requests = [self.llm.request(ids, params) for ids in prompts]
        for request in requests:
            scheduler.validate(request)
            scheduler.submit(request)
        while not all(request.output_ids for request in requests):
            scheduler.step()
        scheduler.step()  # what a first step prepares is not timed
        started = time.perf_counter()
        for _ in range(steps):
            scheduler.step()
        seconds = time.perf_counter() - started
        scheduler.abort("")
        while scheduler.has_work:
            scheduler.step()
        return seconds


def serve(commands: TextIO, answers: TextIO) -> None:
    """Do what each line says, and answer with a line; an error is an answer, and ends this."""
    probe = Probe()
    for line in commands:
        command = json.loads(line)
        try:
            answer = {"is": getattr(probe, command.pop("do"))(**command)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
        if "error" in answer:
            return


class Side:
    """A process in one of the two checkouts. Use it as a context, at whose end the process ends."""

    def __init__(self, letter: str, folder: Path) -> None:
        self.letter, self.folder = letter, folder
        git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
        self.commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        cache = Path(tempfile.gettempdir()) / f"yardstick-{self.commit}"
        self.environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}

    def __enter__(self) -> Side:
        words = [sys.executable, str(Path(__file__).resolve()), "--probe"]
        self.process = subprocess.Popen(words, cwd=self.folder, env=self.environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, do: str, **given: Any) -> Any:
        """Have the process do something; raises RuntimeError with what went wrong there."""
        self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise RuntimeError(f"{self.letter} ({self.folder}), {do}: {answer['error']}")
        return answer["is"]

    def printed(self, words: Sequence[str]) -> str:
        """Return what Python prints in the checkout."""
        return subprocess.run([sys.executable, *words], cwd=self.folder, env=self.environment, check=True,
                              capture_output=True, text=True).stdout  # fmt: skip


# ---- the comparisons -------------------------------------------------------------------------------------------------


def equalities(a: Side, b: Side, drafters: Sequence[str]) -> Iterator[Finding]:
    """Yield what came of comparing what two checkouts print and answer."""
    for page, words in PAGES.items():
        yield judge_equal(page, a.printed(words), b.printed(words))
    with a, b:
        for drafter in drafters:
            options = {"speculative_algorithm": drafter, "dtype": "float32", "compile_later": True}
            found: list[Mapping[str, Any]] = []
            for side in (a, b):
                side.ask("load", options=options | {"max_total_tokens": 8192})
                found.append(side.ask("equal"))
            for name in found[0]:
                yield judge_equal(f"{name}, {drafter}", found[0][name], found[1][name])


def times(sides: Sequence[Side], dtype: str, pairs: int) -> Iterator[Finding]:
    """Yield what came of timing A, B and the control C."""
    for drafter, group in itertools.groupby(TIMED, key=lambda one: one[0]):
        with ExitStack() as running:
            for side in sides:
                running.enter_context(side)
                options = {"speculative_algorithm": drafter, "dtype": dtype, "max_total_tokens": 8192}
                side.ask("load", options=options)
            for (_, force), batch in itertools.product(list(group), (1, 8)):
                given = {"batch": batch, "steps": 8, "force": force}
                ratios: list[list[float]] = [[], []]
                for side in sides:
                    side.ask("time", **given)  # untimed
                for turn in range(pairs):
                    seconds = {s.letter: s.ask("time", **given) for s in (sides if turn % 2 == 0 else sides[::-1])}
                    ratios[0].append(seconds["B"] / seconds["A"])
                    ratios[1].append(seconds["C"] / seconds["A"])
                yield judge_times(f"time, {drafter} {dtype} {force}, batch {batch}", *ratios)


def main() -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="A, and B which is compared with it")
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS, choices=DRAFTERS, help="whose tokens are compared")
    parser.add_argument("--dtype", default="bfloat16", help="of what is timed; float32 where bfloat16 is emulated")
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS, help=f"of a setting; below {LEAST_PAIRS} no verdict")
    parser.add_argument("--no-times", action="store_true", help="equalities alone")
    args = parser.parse_args()
    from benchmarks.yardstick_lines import sizes

    for folder in args.checkouts:
        if not (folder / "minispec").is_dir():
            parser.error(f"CHECKOUT must be a folder with minispec/ in it, got {folder}")
    a, b = (folder.resolve() for folder in args.checkouts)
    sides = [Side(letter, folder) for letter, folder in (("A", a), ("B", b), ("C", a))]
    found = equalities(sides[0], sides[1], args.drafters)
    failed = []
    for finding in found if args.no_times else itertools.chain(found, times(sides, args.dtype, args.pairs)):
        print(finding, flush=True)
        failed += [] if finding.passed else [finding.name]
    for side in sides[:2]:
        for part, size in sizes(side.folder / "minispec").items():
            print(f"{side.letter} at {side.commit}, {part}: {size}")
    if not args.no_times and args.pairs < LEAST_PAIRS:
        print(f"{args.pairs} pairs are too few for a verdict on times; {LEAST_PAIRS} are the least")
    print(f"failed: {'; '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    if sys.argv[1:] == ["--probe"]:
        sys.path[0] = os.getcwd()
        with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
            os.dup2(2, 1)  # so that whatever else prints does not disturb the answers
            serve(sys.stdin, out)
    else:
        sys.exit(main())
