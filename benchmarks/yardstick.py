"""Did anything change? Two checkouts compared on one machine: what they answer, what a step runs, how long it takes.

`python -m benchmarks.yardstick CHECKOUT_A CHECKOUT_B` drives both through `LLM` and the server, each in processes and
with a compile cache of its own, which is kept by commit; where B has none yet it begins with a copy of A's, so that a
graph that is the same in both is compiled and autotuned once. What is timed runs alone; equalities and loading are not
timed, and run side by side. It prints every comparison, and exits with status 1 where one fails. Nothing is written to
a checkout: results are kept line by line in the file `--state`, from which a run that was broken off goes on. Checkouts
with uncommitted changes are told apart by these, too.

Equal must be the tokens, and verify steps, of eight prompts for every drafter and of some over a socket of the server,
the names of compiled graphs, `/openapi.json`, the generated tables of docs, and the operations of each kind of step, of
which fewer pass. A difference that is wanted is named by `--ordered NAME=REASON`, or in a file of such lines by
`--expect FILE`; NAME may have wildcards. It is listed with its reason, and does not fail.

Times are of so many decode steps of a batch whose shapes are forced, without prefill. Three processes take turns: A, B,
and A once more as control C, in the order A B C C B A, which makes two pairs each. A setting fails where the median of
B/A exceeds 1.02 and the upper end of the control's interval as well: that of the median of C/A at 95 %, from its order
statistics. Starts of the server are few, so their least are compared, and the interval is A's own range.

`--quick` has all equalities and, on the CPU, the times of plain steps, EAGLE3 and NGRAM at batch 1 and 8: in bfloat16,
and in float32 where bfloat16 is emulated and eight requests' steps take ten times as long.

Read next: `benchmarks/yardstick_probe.py`, which runs in a checkout; `benchmarks/yardstick_lines.py`, the size.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks import parity, start
from benchmarks.yardstick_lines import sizes

HERE = Path(__file__).parent
BOUND = 1.02  # a median up to this passes whatever the control says
DRAFTERS = ("NONE", "NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
LEAST_PAIRS = 20
SCHEMA = json.dumps({"type": "object", "properties": {"name": {"type": "string"}, "text": {"type": "string"}},
                     "required": ["name", "text"]})  # fmt: skip
SHOWN = 8  # lines of a difference


# ---- judging ---------------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """What one comparison came to."""

    name: str
    passed: bool
    said: str  # in a line
    details: Sequence[str] = ()
    differs: bool = False  # whether there is anything to explain
    reason: str | None = None  # why the difference is wanted

    def lines(self) -> Iterator[str]:
        """Yield what to print."""
        word = "ordered" if self.reason else "passes" if self.passed else "FAILS"
        yield f"{word:8}{self.name}: {self.said}" + (f" (ordered: {self.reason})" if self.reason else "")
        yield from (f"          {line}" for line in self.details[:SHOWN])
        if len(self.details) > SHOWN:
            yield f"          and {len(self.details) - SHOWN} more"


def judge_equal(name: str, a: Any, b: Any) -> Finding:
    """Compare two values; lists of tokens are told apart by prompt and position, texts by their lines."""
    if a == b:
        return Finding(name, True, "equal")
    if isinstance(a, str) and isinstance(b, str):
        details = [line for line in difflib.unified_diff(a.splitlines(), b.splitlines(), lineterm="", n=0)][2:]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        details = [f"{index}: {_first_difference(x, y)}" for index, (x, y) in enumerate(zip(a, b, strict=True))
                   if x != y]  # fmt: skip
    else:
        details = [f"A: {a}", f"B: {b}"]
    return Finding(name, False, f"{len(details)} differences", details, differs=True)


def _first_difference(a: Any, b: Any) -> str:
    """Return where two lists differ first, or both values."""
    if not isinstance(a, list) or not isinstance(b, list):
        return f"A {a!r}, B {b!r}"
    where = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"from position {where} on, A {a[where : where + 6]}, B {b[where : where + 6]}"


def judge_multiset(name: str, a: Sequence[Sequence[Any]], b: Sequence[Sequence[Any]]) -> Finding:
    """Compare two multisets, whatever their order."""
    of_a, of_b = Counter(map(tuple, a)), Counter(map(tuple, b))
    details = [f"only in A: {item} x {count}" for item, count in sorted((of_a - of_b).items(), key=str)]
    details += [f"only in B: {item} x {count}" for item, count in sorted((of_b - of_a).items(), key=str)]
    if not details:
        return Finding(name, True, f"equal, {len(a)} of them")
    return Finding(name, False, f"{len(details)} differences", details, differs=True)


def judge_operations(name: str, a: Mapping[str, int] | None, b: Mapping[str, int] | None) -> Finding:
    """Compare the operations of a step by name; fewer in all pass and are listed, as is the same number of others."""
    if a is None or b is None:
        missing = "A" if a is None else "B"
        return Finding(name, False, f"{missing} has no such step", differs=True)
    names = sorted(op for op in {*a, *b} if a.get(op, 0) != b.get(op, 0))
    details = [f"{op}: {a.get(op, 0)} -> {b.get(op, 0)}" for op in names]
    before, after = sum(a.values()), sum(b.values())
    if not details:
        return Finding(name, True, f"equal, {before}")
    return Finding(name, after <= before, f"{before} -> {after}", details, differs=True)


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
    return Finding(name, not (median > BOUND and median > high), said, differs=median > BOUND)


def judge_start(name: str, a: Sequence[float], b: Sequence[float]) -> Finding:
    """Judge starts by the least of each; the interval is the range of A's over its least."""
    ratio, high = min(b) / min(a), max(a) / min(a)
    said = f"least of {len(a)}: A {min(a):.2f} s, B {min(b):.2f} s, B/A {ratio:.3f}, A's own range up to {high:.3f}"
    return Finding(name, not (ratio > BOUND and ratio > high), said, differs=ratio > BOUND)


def explained(findings: Sequence[Finding], orders: Mapping[str, str]) -> list[Finding]:
    """Return the findings, those that differ and were ordered with their reason, and one for each order of nothing."""
    used, told = set[str](), []
    for finding in findings:
        order = next((name for name in orders if finding.differs and fnmatch.fnmatch(finding.name, name)), None)
        if order is not None:
            used.add(order)
            finding = finding._replace(passed=True, reason=orders[order])
        told.append(finding)
    unused = [name for name in orders if name not in used]
    return [*told, *(Finding(f"order {name!r}", True, f"nothing differs; it was to be: {orders[name]}")
                     for name in unused)]  # fmt: skip


# ---- what is measured ------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """What is timed: an LLM and a batch on it."""

    name: str
    options: Mapping[str, Any]  # of the LLM; settings with the same follow each other
    batch: int
    steps: int
    force: str = "tree"
    wish: Mapping[str, Any] = {}
    asking: int = 0  # requests that have the wish
    replay: bool = False


def options_of(drafter: str, dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    """Return an LLM's options."""
    return {"speculative_algorithm": drafter, "dtype": dtype, "device": "cpu", "max_running_requests": 8,
            "batches": [1, 8], "max_total_tokens": 8192, **more}  # fmt: skip


def settings(quick: bool, cuda: bool, bfloat16: bool = True) -> list[Setting]:
    """Return what is timed, those of one LLM side by side; `bfloat16` says whether the CPU has its products."""
    found: list[Setting] = []
    if quick:  # plain steps are those of an LLM that looks texts up, since loading another takes two minutes
        dtype, many = ("bfloat16", 6) if bfloat16 else ("float32", 2)
        return [Setting(f"{drafter} {dtype}{' plain' if force == 'plain' else ''}, batch {batch}",
                        options_of(drafter, dtype), batch, steps, force)
                for drafter, force in (("EAGLE3", "tree"), ("NGRAM", "plain"), ("NGRAM", "tree"))
                for batch, steps in ((1, 8), (8, many))]  # fmt: skip

    def both(name: str, options: Mapping[str, Any], wish: Mapping[str, Any] = {}, force: str = "tree") -> None:  # noqa: B006
        for batch, steps in ((1, 12), (8, 6)):
            asking = batch if wish else 0
            found.append(Setting(f"{name}, batch {batch}", options, batch, steps, force, wish, asking))

    for drafter in ("NONE", "EAGLE3", "NGRAM"):
        both(f"{drafter} bfloat16", options_of(drafter))
        if drafter == "EAGLE3":
            options, json_wish = options_of(drafter), {"json": SCHEMA}
            both("EAGLE3 bfloat16 sampled", options, {"temperature": 0.8, "sampling_seed": 5})
            both("EAGLE3 bfloat16 log-probabilities", options, {"logprobs": 2})
            both("EAGLE3 bfloat16 grammar", options, json_wish)
            found.append(Setting("EAGLE3 bfloat16 log-probabilities, one of 8", options, 8, 8, "tree", {"logprobs": 2},
                                 1))  # fmt: skip
            found.append(Setting("EAGLE3 bfloat16 grammar, one of 8", options, 8, 8, "tree", json_wish, 1))
            both("EAGLE3 bfloat16 plain steps", options, force="plain")
    for drafter in ("NONE", "EAGLE3"):
        both(f"{drafter} float32", options_of(drafter, "float32"))
        both(f"{drafter} int8", options_of(drafter, quantization="int8"))
        both(f"{drafter} bfloat16 eager", options_of(drafter, disable_torch_compile=True))
        both(f"{drafter} bfloat16 two ranks", options_of(drafter, tp_size=2))
    eager = options_of("EAGLE3", disable_torch_compile=True, speculative_lookup=False)
    found += [Setting(f"EAGLE3 bfloat16 replay, batch {batch}", eager, batch, 8, replay=True) for batch in (1, 8)]
    if cuda:
        for drafter in ("NONE", "EAGLE3", "NGRAM"):
            both(f"{drafter} bfloat16 CUDA", options_of(drafter, device="cuda"))
    return sorted(found, key=lambda setting: [s.options for s in found].index(setting.options))


class Side:
    """One of the two checkouts: A, B, or A once more as C."""

    def __init__(self, letter: str, folder: Path, scratch: Path) -> None:
        self.letter, self.folder = letter, folder
        # By commit, so that a later comparison with the same checkout need not compile it again.
        self.cache, self.log = scratch.parent / f"yardstick-{self.identity}.cache", scratch / f"{letter}.log"

    @property
    def identity(self) -> str:
        """The commit, and a digest of what is not committed."""
        git = ["git", "-C", str(self.folder)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        change = subprocess.run([*git, "diff", "HEAD"], capture_output=True, check=True).stdout
        return commit[:12] + (f"+{hashlib.sha256(change).hexdigest()[:8]}" if change else "")

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its processes."""
        return os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(self.cache), "PYTHONDONTWRITEBYTECODE": "1"}

    def compiled(self, options: Mapping[str, Any]) -> Path:
        """Return a file that is there if all graphs of an LLM with these options are in the cache."""
        named = json.dumps(options, sort_keys=True).encode()
        return self.cache / f"loaded-{hashlib.sha256(named).hexdigest()[:12]}"

    def output(self, module: str) -> str:
        """Return what a module of its prints."""
        ran = subprocess.run([sys.executable, "-m", module], cwd=self.folder, env=self.environment, check=True,
                             capture_output=True, text=True)  # fmt: skip
        return ran.stdout


class Child:
    """A process that runs the probe in a checkout."""

    def __init__(self, side: Side) -> None:
        self.side = side
        with side.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "yardstick_probe.py")], cwd=side.folder, env=side.environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """Have it do something; raises RuntimeError with what went wrong there."""
        self.tell(do, **given)
        return self.hear(do)

    def tell(self, do: str, **given: Any) -> None:
        """Have it begin something, whose answer `hear` waits for."""
        self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self.process.stdin.flush()

    def hear(self, do: str) -> dict[str, Any]:
        """Return the answer to what it was told to do."""
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the process ended; {self.side.log} has its last words"}
        if "error" in answer:
            raise RuntimeError(f"{self.side.letter} ({self.side.folder}), {do}: {answer['error']}")
        return answer


@contextmanager
def children(sides: Sequence[Side]) -> Iterator[list[Child]]:
    """Start a process in each checkout, and end them."""
    running = [Child(side) for side in sides]
    try:
        yield running
    finally:
        for child in running:
            child.process.stdin.close()
            try:
                child.process.wait(30)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


class State:
    """What is known already, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path, self.known, self._writing = path, dict[str, Any](), threading.Lock()
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    key, value = json.loads(line)
                except ValueError:
                    continue  # a line that was broken off
                self.known[key] = value

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what is known by this key, made now if it is not, as it will be read from the file."""
        if key in self.known:
            return self.known[key]
        tell(key)
        line = json.dumps([key, make()])
        with self._writing, self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")  # the line before may have been broken off
        self.known[key] = json.loads(line)[1]
        return self.known[key]


BEGAN = time.monotonic()


def tell(line: str) -> None:
    """Say how far this is."""
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {line}", file=sys.stderr, flush=True)


# ---- equalities ------------------------------------------------------------------------------------------------------


def look(side: Side, state: State) -> dict[str, Any]:
    """Return what one checkout answers: of each drafter, over a socket, and as tables."""
    keys = {drafter: f"equal {side.letter} {drafter}" for drafter in DRAFTERS}
    if any(key not in state.known for key in (*keys.values(), f"hello {side.letter}")):
        with children([side]) as (child,):
            state.once(f"hello {side.letter}", lambda: child.ask("hello"))
            for drafter, key in keys.items():

                def one(drafter: str = drafter) -> dict[str, Any]:
                    child.ask("load", options=options_of(drafter, "float32", uncompiled=True))
                    return child.ask("equal")

                state.once(key, one)
    hello = state.known[f"hello {side.letter}"]
    served = state.once(f"served {side.letter}", lambda: answers(side))
    tables = {page: state.once(f"table {side.letter} {page}", lambda module=module: side.output(module))
              for page, module in hello["generators"].items()}  # fmt: skip
    return {"hello": hello, "drafters": {d: state.known[key] for d, key in keys.items()}, "served": served,
            "tables": tables}  # fmt: skip


def answers(side: Side) -> dict[str, Any]:
    """Return what the server of a checkout says over a socket: /openapi.json, and tokens of a few requests."""
    flags = ["--disable-torch-compile", "--dtype", "float32", "--device", "cpu", "--max-total-tokens", "8192"]
    greedy = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    prompt = "Name three rivers of Europe and three of Asia."
    chat = {"model": "default", "messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "seed": 3}
    with start.server(flags, {start.CACHE: str(side.cache)}, side.folder) as process:
        process.wait_until_ready()
        chats = f"{process.url}/v1/chat/completions"
        with start.LOCAL.open(f"{process.url}/openapi.json", timeout=60) as answer:
            document = json.dumps(json.load(answer), indent=1, sort_keys=True)
        asked = {"text": [prompt, prompt[:20]], "sampling_params": greedy}
        several = parity.post(f"{process.url}/generate", asked)
        spoken = parity.post(chats, {**chat, "temperature": 0.7})
        with start.post(chats, {**chat, "temperature": 0, "stream": True}) as answer:
            streamed = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    return {
        "openapi": document,
        "tokens": [*(one["output_ids"] for one in several), spoken["choices"][0]["message"]["content"],
                   "".join(part["choices"][0]["delta"].get("content") or "" for part in streamed if part["choices"])],
    }  # fmt: skip


def equalities(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what came of comparing what two checkouts answer."""
    for drafter in DRAFTERS:
        of_a, of_b = a["drafters"][drafter], b["drafters"][drafter]
        yield judge_equal(f"tokens, {drafter}", of_a["tokens"], of_b["tokens"])
        yield judge_equal(f"verify steps, {drafter}", of_a["verified"], of_b["verified"])
        yield judge_multiset(f"shapes, {drafter}", of_a["shapes"], of_b["shapes"])
        for step in sorted({*of_a["operations"], *of_b["operations"]}):
            yield judge_operations(f"operations, {drafter}, {step} step", of_a["operations"].get(step),
                                   of_b["operations"].get(step))  # fmt: skip
    yield judge_equal("tokens, server", a["served"]["tokens"], b["served"]["tokens"])
    yield judge_equal("/openapi.json", a["served"]["openapi"], b["served"]["openapi"])
    for page in sorted({*a["tables"], *b["tables"]}):
        yield judge_equal(f"tables of {page}", a["tables"].get(page), b["tables"].get(page))


# ---- times -----------------------------------------------------------------------------------------------------------


def time_all(sides: Sequence[Side], wanted: Sequence[Setting], pairs: int, state: State) -> Iterator[Finding]:
    """Time A, B and the control C in every setting, an LLM for each set of options; yields two findings for each."""
    key = lambda setting: f"times {setting.name}, {pairs} pairs"  # noqa: E731
    for _, group in groupby(wanted, key=lambda setting: setting.options):
        of = list(group)
        traced = [f"files {side.letter}" for side in sides[:2] if is_default(of[0].options)]
        if any(name not in state.known for name in (*map(key, of), *traced)):
            with children(sides) as three:
                for together in in_turn(three, of[0].options):  # loading is not timed
                    tell(f"loading {of[0].name.rpartition(',')[0]} in {' and '.join(c.side.letter for c in together)}")
                    for child in together:
                        child.tell("load", options=of[0].options)
                    for child in together:
                        child.hear("load")
                        child.side.compiled(of[0].options).touch()
                for name, child in zip(traced, three, strict=False):
                    state.once(name, lambda child=child: child.ask("files")["files"])
                for setting in of:
                    state.once(key(setting), lambda setting=setting: take_turns(three, setting, pairs))
        for setting in of:
            found = state.known[key(setting)]
            yield judge_equal(f"tokens, {setting.name}", *as_far_as_both(*found["tokens"]))
            yield judge_times(f"time, {setting.name}", *found["ratios"])


def in_turn(children: Sequence[Child], options: Mapping[str, Any]) -> list[list[Child]]:
    """Return who loads an LLM together: one for each compile cache and whoever finds all there, and then the others."""
    first, others = list[Child](), list[Child]()
    for child in children:
        waits = child.side.cache in {other.side.cache for other in first}
        (others if waits and not child.side.compiled(options).exists() else first).append(child)
    return [first, others] if others else [first]


def as_far_as_both(a: Sequence[list[int]], b: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Cut each request's tokens to those that A and B both have: autotuning rounds drafts, and so what steps accept.

    Raises ValueError for a request without a token on one side.
    """
    lengths = [min(map(len, both)) for both in zip(a, b, strict=True)]
    if 0 in lengths:
        raise ValueError("a request of a timed setting gave no token")
    first, second = ([each[:length] for each, length in zip(side, lengths, strict=True)] for side in (a, b))
    return first, second


def is_default(options: Mapping[str, Any]) -> bool:
    """Return whether an LLM is the one whose decode step is looked at: the default drafter's, compiled."""
    return options == options_of("EAGLE3", options["dtype"])


def take_turns(three: Sequence[Child], setting: Setting, pairs: int) -> dict[str, Any]:
    """Return the ratios B/A and C/A of so many pairs, and the tokens of A and B."""
    given: dict[str, Any] = {"batch": setting.batch, "steps": setting.steps}
    if not setting.replay:
        given |= {"wish": setting.wish, "asking": setting.asking, "force": setting.force}
    do = "replay" if setting.replay else "time"
    tokens = [child.ask(do, **given)["tokens"] for child in three]  # untimed
    ratios: list[list[float]] = [[], []]
    for turn in range(pairs):
        order = three if turn % 2 == 0 else three[::-1]
        seconds = {child: child.ask(do, **given)["seconds"] for child in order}
        base = seconds[three[0]]
        for found, child in zip(ratios, three[1:], strict=True):
            found.append(seconds[child] / base)
    return {"ratios": ratios, "tokens": tokens[:2]}


def starts(sides: Sequence[Side], runs: int, state: State) -> Iterator[Finding]:
    """Time both servers' starts with empty caches, in turn: first answer, all compiled, a stream's longest silence."""
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(runs):
        for side in sides[:2] if turn % 2 == 0 else sides[1::-1]:
            for name, value in state.once(f"start {side.letter} {turn}", lambda side=side: one_start(side)).items():
                found.setdefault(name, {"A": [], "B": []})[side.letter].append(value)
    for name, of in found.items():
        yield judge_start(f"start, {name}", of["A"], of["B"])


def one_start(side: Side) -> dict[str, float]:
    """Measure a cold start, one with the cache it left, and a stream beside compiling, in seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        cache, other = Path(scratch) / "cache", Path(scratch) / "other"
        cold = start.start(cache, (), 900, side.folder)
        warm = start.start(cache, (), 900, side.folder)
        stream = start.stream(other, (), 900, side.folder)
    late = math.inf  # of what was not compiled in time
    return {"first answer": cold.first_answer, "all compiled": cold.compiled or late,
            "first answer, warm": warm.first_answer, "all compiled, warm": warm.compiled or late,
            "longest silence of a stream": stream.silence}  # fmt: skip


# ---- the report ------------------------------------------------------------------------------------------------------


def read_orders(ordered: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """Return the reasons by name; raises ValueError for a line that is not NAME=REASON."""
    lines = [*ordered, *(line for file in files for line in file.read_text(encoding="utf-8").splitlines())]
    orders = {}
    for line in filter(None, map(str.strip, lines)):
        if line.startswith("#"):
            continue
        name, _, reason = map(str.strip, line.partition("="))
        if not name or not reason:
            raise ValueError(f"--ordered and lines of --expect must be NAME=REASON, got {line!r}")
        orders[name] = reason
    return orders


def print_sizes(sides: Sequence[Side], state: State) -> None:
    """Print how much there is to read in A and B."""
    for side in sides[:2]:
        step = state.known.get(f"files {side.letter}", ())
        for part, size in sizes(side.folder / "minispec", step).items():
            print(f"{side.letter}, {part}: {size if size.files else 'not looked at, as the default LLM was not timed'}")


def main() -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="A, and B which is compared with it")
    parser.add_argument("--quick", action="store_true", help="all equalities, and the times that matter most")
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS, help=f"of a setting; below {LEAST_PAIRS} no verdict")
    parser.add_argument("--starts", type=int, default=2, help="starts of each checkout, not with --quick")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="of the settings, those that match; none: no times")
    parser.add_argument("--ordered", action="append", default=[], metavar="NAME=REASON", help="a wanted difference")
    parser.add_argument("--expect", action="append", default=[], type=Path, metavar="FILE", help="lines of NAME=REASON")
    parser.add_argument("--state", type=Path, help="results so far; by default in the temporary folder, by commits")
    args = parser.parse_args()
    try:
        orders = read_orders(args.ordered, args.expect)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for folder in args.checkouts:
        if not (folder / "minispec").is_dir():
            parser.error(f"CHECKOUT must be a folder with minispec/ in it, got {folder}")
        if args.state is not None and args.state.resolve().is_relative_to(folder.resolve()):
            parser.error(f"--state must lie outside the checkouts, got {args.state}")
    a, b = (folder.resolve() for folder in args.checkouts)
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HERE.glob("yardstick*.py")))).hexdigest()[:8]
    name = "-".join(("yardstick", *(Side("", folder, Path()).identity for folder in (a, b)), code))
    path = args.state or Path(tempfile.gettempdir()) / f"{name}.jsonl"
    scratch = path.with_suffix(".scratch")
    scratch.mkdir(parents=True, exist_ok=True)
    sides = [Side(letter, folder, scratch) for letter, folder in (("A", a), ("B", b), ("C", a))]
    state = State(path)
    print(f"A {a} at {sides[0].identity}\nB {b} at {sides[1].identity}\nstate {path}", flush=True)
    return compare(sides, args, orders, state)


def compare(sides: Sequence[Side], args: argparse.Namespace, orders: Mapping[str, str], state: State) -> int:
    """Make all comparisons, print them, and return the exit status."""
    a, b = sides[:2]
    if a.cache.exists() and not b.cache.exists():
        shutil.copytree(a.cache, b.cache, ignore=shutil.ignore_patterns("loaded-*"))
    # Nothing is timed here. Each has half of the cores, since threads of two that share them wait for each other.
    threads = str(max((os.cpu_count() or 2) // 2, 1))
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": threads}), ThreadPoolExecutor(2) as both:
        seen = list(both.map(lambda side: look(side, state), sides[:2]))
    findings = [*equalities(*seen)]
    for finding in explained(findings, orders):
        if not finding.passed:
            tell("\n".join(finding.lines()))
    wanted = settings(args.quick, seen[0]["hello"]["cuda"], seen[0]["hello"]["bfloat16"])
    if args.only is not None:
        wanted = [setting for setting in wanted if any(fnmatch.fnmatch(setting.name, name) for name in args.only)]
    for finding in time_all(sides, wanted, args.pairs, state):
        tell("\n".join(finding.lines()))
        findings.append(finding)
    if not args.quick and args.only is None:
        findings += starts(sides, args.starts, state)
    findings = explained(findings, orders)
    for finding in findings:
        print("\n".join(finding.lines()))
    print_sizes(sides, state)
    failed = [finding.name for finding in findings if not finding.passed]
    ordered = sum(finding.reason is not None for finding in findings)
    if args.pairs < LEAST_PAIRS:
        print(f"{args.pairs} pairs are too few for a verdict on times; {LEAST_PAIRS} are the least")
    print(f"{len(findings)} comparisons, {ordered} ordered differences, {len(failed)} failed"
          + (f": {'; '.join(failed)}" if failed else ""))  # fmt: skip
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
