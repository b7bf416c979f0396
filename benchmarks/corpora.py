"""External corpora on real text: what they give, and what they cost. Prints Markdown lines.

The documents are the default model's own replies (replies/), as tokens. The model answers the same questions anew,
greedily, one request at a time. `python -m benchmarks.corpora PART ...` measures one or more parts:

    sizes    the model's earlier answers inside more and more tokens of others, in turn with them alone (A-B-B-A)
    beside   the same, and another wording of each question, beside 0, 1 and 4 corpora that have nothing on it, in turn
             with lookups in the prompt alone; once with NGRAM, once beside EAGLE3
    build    a corpus added as an operator adds it, by texts and by file_path: seconds, and decoding meanwhile
    restart  a server (`python -m minispec.server`) that has just started, without and with what an earlier one saved
             when it was ended by SIGTERM, against a warm one
"""

from __future__ import annotations

import argparse
import json
import lzma
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from minispec import LLM, SamplingParams
from minispec.corpora import END, Corpora, Corpus, sort_places
from minispec.load.default_model import ensure_default_model
from minispec.load.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
Ids = list[int]


def replies(tokens: int) -> list[tuple[Ids, Ids]]:
    """Return questions and answers of the shards, as ids: so many tokens, or all there are."""
    found, count = [], 0
    for file in sorted((ROOT / "replies").glob("*.jsonl.xz")):
        for line in lzma.open(file, "rt"):
            row = json.loads(line)
            if "ids" in row and len(row["ids"]) - row["start"] >= 120:
                found.append((row["ids"][: row["start"]], row["ids"][row["start"] :]))
                count += len(row["ids"])
                if count >= tokens:
                    return found
    return found


def corpus(documents: Sequence[Ids], tokens: int = 0) -> Corpus:
    """Return a corpus of documents, each once, and again in turn until there are so many tokens."""
    parts, count = [], 0
    while not parts or count < tokens:
        for document in documents:
            parts.append(np.array([*document, END], np.int32))
            count += len(document)
            if count >= tokens > 0:
                break
    text = np.concatenate(parts)
    return Corpus(text, sort_places(text))


class Run:
    """A model that answers questions, with a table of corpora."""

    def __init__(self, compiled: bool, **flags: object) -> None:
        options = {"max_running_requests": 1, "batches": (1,), "disable_torch_compile": not compiled, **flags}
        options["wait_until_compiled"] = True  # a measurement has no other work beside it
        self.llm = LLM(**options)
        table = self.llm.scheduler.engine.drafter.corpora
        assert isinstance(table, Corpora)
        self.table = table

    def put(self, corpora: dict[str, Corpus]) -> None:
        """Draft from these corpora and no others."""
        for name in [*self.table._all]:
            self.table.put(name, None)
        for name, one in corpora.items():
            self.table.put(name, one)

    def answer(self, questions: Sequence[Ids], length: int = 96, keep: bool = False) -> tuple[float, float, list[Ids]]:
        """Return accept length, tokens a second and the answers; keep: what was learned of earlier ones stays."""
        scheduler = self.llm.scheduler
        assert keep or scheduler.flush_cache()
        m = scheduler.metrics
        before = m.verified.tokens.total(), m.verified.steps.total(), m.step_seconds + m.host_seconds
        requests = [self.llm.request(ids, SamplingParams(temperature=0, max_new_tokens=length)) for ids in questions]
        for request in requests:
            self.llm.serve([request])
        after = m.verified.tokens.total(), m.verified.steps.total(), m.step_seconds + m.host_seconds
        tokens, steps, seconds = (b - a for a, b in zip(before, after, strict=True))
        return tokens / steps, tokens / seconds, [list(request.output_ids) for request in requests]

    def in_turn(self, questions: Sequence[Ids], corpora: dict[str, dict[str, Corpus]]) -> None:
        """Print a line for each set of corpora but the first one, with which each takes turns: A-B-B-A."""
        base, *others = corpora
        for name in others:
            found: dict[str, list[tuple[float, float, list[Ids]]]] = {base: [], name: []}
            for which in (base, name, name, base):
                self.put(corpora[which])
                found[which].append(self.answer(questions))
            same = sum(a == b for a, b in zip(found[base][0][2], found[name][0][2], strict=True))
            lengths, speeds = ([statistics.mean(run[i] for run in runs) for runs in found.values()] for i in (0, 1))
            steps = [1e3 * length / speed for length, speed in zip(lengths, speeds, strict=True)]
            print(f"| {name} | {lengths[1]:.2f} ({lengths[0]:.2f}) | {speeds[1] / speeds[0]:.3f} | {speeds[1]:.1f} | "
                  f"{steps[1]:.2f} ({steps[0]:.2f}) | {same} of {len(questions)} |", flush=True)  # fmt: skip


# In brackets: of the corpora that each takes turns with.
HEAD = "| corpora | accept length | tokens/s: ratio | tokens/s | ms a step | same answers |\n|---|--:|--:|--:|--:|--:|"
WORDED = "Answer in a few sentences: "


def sizes(args: argparse.Namespace) -> None:
    """Measure earlier answers inside more and more tokens of others; trees have a fixed size."""
    run, texts = Run(args.compiled, speculative_algorithm="NGRAM", speculative_num_draft_tokens=12), replies(10**8)
    questions, others = [q for q, _ in texts[: args.questions]], [[*q, *a] for q, a in texts[args.questions :]]
    run.answer(questions[:2])
    own = [[*q, *a] for q, a in zip(questions, run.answer(questions)[2], strict=True)]  # as it answers today
    held: dict[str, dict[str, Corpus]] = {}
    for size in (sum(map(len, own)), *args.sizes):
        started = time.perf_counter()
        made = corpus([*own, *others] if size in args.sizes else own, size)
        took, beside = time.perf_counter() - started, made.places.nbytes / len(made.tokens)
        held[f"{len(made.tokens):,} tokens, sorted in {took:.1f} s, {beside:.0f} bytes a token more"] = {"x": made}
    print(HEAD)
    run.in_turn(questions, {"none": {}, next(iter(held)): next(iter(held.values()))})
    run.in_turn(questions, held)


def beside(args: argparse.Namespace) -> None:
    """Measure relevant and irrelevant corpora; a step has trees where measured times favour them."""
    texts = replies(1_000_000)
    tokenizer = load_tokenizer(ensure_default_model(print))
    others = [[*q, *a] for q, a in texts[args.questions :]]
    apart = {f"other {i}": corpus(others[i::4], 200_000) for i in range(4)}
    one = dict([*apart.items()][:1])
    for method in args.methods:
        run = Run(args.compiled, speculative_algorithm=method)
        questions = [q for q, _ in texts[: args.questions]]
        said = [tokenizer.decode(ids, skip_special_tokens=True).rpartition("user\n")[2] for ids in questions]
        reworded = [tokenizer.encode_chat([{"role": "user", "content": WORDED + text.partition("\nassistant")[0]}])
                    for text in said]  # fmt: skip
        run.answer(questions[:2])
        mine = {"mine": corpus([[*q, *a] for q, a in zip(questions, run.answer(questions)[2], strict=True)])}
        sets: dict[str, dict[str, Corpus]] = {
            "none": {}, "1 irrelevant": one, "4 irrelevant": apart, "its answers": mine,
            "its answers, 1 irrelevant": {**one, **mine}, "its answers, 4 irrelevant": {**apart, **mine},
        }  # fmt: skip
        for what, asked in (("the same questions", questions), ("the same questions in other words", reworded)):
            print(f"\n{method}, {what}\n\n{HEAD}")
            run.in_turn(asked, sets)


def build(args: argparse.Namespace) -> None:
    """Measure building as an operator has it done."""
    run, texts = Run(args.compiled, speculative_algorithm="NGRAM"), replies(10**8)
    questions, library = [q for q, _ in texts[:2]], run.llm.corpora  # the corpus has no answer to them
    tokenizer = load_tokenizer(ensure_default_model(print))
    speed = lambda: run.answer(questions)[1]  # noqa: E731
    for _ in range(3):
        speed()
    for size, by_file in [(10**6, False)] + [(size, True) for size in args.sizes if size > 10**6]:
        lines = [tokenizer.decode([*q, *a]) for q, a in texts[2:]]
        count, wanted = 0, []
        while count < size:
            for text, (q, a) in zip(lines, texts[2:], strict=True):
                wanted.append(text)
                count += len(q) + len(a)
                if count >= size:
                    break
        how = "by file_path" if by_file else "by documents"
        beside, idle, during = list[float](), [speed()], list[float]()
        with tempfile.TemporaryDirectory() as folder:
            library.root = folder
            if by_file:
                Path(folder, "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in wanted))
            given = ("big", None, "texts.jsonl") if by_file else ("big", wanted, None)
            started = time.perf_counter()
            count = library.add(*given)[1]
            alone = time.perf_counter() - started
            library.remove("big")
            for _ in range(0 if by_file else 3):
                started = time.perf_counter()
                with ThreadPoolExecutor(1) as pool:
                    adding = pool.submit(library.add, *given)
                    adding.add_done_callback(lambda _, at=started, to=beside: to.append(time.perf_counter() - at))
                    while not adding.done():
                        during.append(speed())
                library.remove("big")
                idle += [speed(), speed()]
        print(f"{count:,} tokens {how} are there after {alone:.1f} s", flush=True)
        if during:
            rates = statistics.median(during), statistics.median(idle)
            print(f"beside decoding after {min(beside):.1f} to {max(beside):.1f} s; {rates[0]:.1f} tokens/s "
                  f"meanwhile and {rates[1]:.1f} else: {rates[0] / rates[1]:.3f}", flush=True)  # fmt: skip


class Server:
    """A real server on a port of its own, until it is told to end as an operator tells it."""

    def __init__(self, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        given = ["--port", port, "--log-level", "error", "--max-running-requests", "1", *flags]
        self.process = subprocess.Popen([sys.executable, "-m", "minispec.server", *given], cwd=ROOT)
        self.at = f"http://127.0.0.1:{port}"
        while self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.at}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError("the server did not start")

    def answer(self, questions: Sequence[Ids]) -> tuple[float, float]:
        """Return accept length and tokens a second over HTTP, prompts included."""
        tokens, steps, began = 0, 0, time.perf_counter()
        for ids in questions:
            body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 96}}
            asked = urllib.request.Request(f"{self.at}/generate", json.dumps(body).encode(),
                                           {"Content-Type": "application/json"})  # fmt: skip
            with urllib.request.urlopen(asked, timeout=120) as answer:
                told = json.load(answer)["meta_info"]
            tokens, steps = tokens + told["completion_tokens"], steps + told["spec_verify_ct"]
        return (tokens - len(questions)) / steps, tokens / (time.perf_counter() - began)

    def end(self) -> None:
        """Send SIGTERM, and wait."""
        self.process.terminate()
        self.process.wait(60)


def restart(args: argparse.Namespace) -> None:
    """Measure a cold server, a warm one, and one that starts with what the warm one saved when it was ended."""
    questions, compiled = [q for q, _ in replies(100_000)[: args.questions]], "--wait-until-compiled"
    how = compiled if args.compiled else "--disable-torch-compile"
    print("| server | accept length | tokens/s |\n|---|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        turns = (
            ("cold", "warm: the same questions again", "warm, once more"),
            ("restarted with what was saved", "again"),
        )
        for names in turns:
            server = Server("--speculative-algorithm", "NGRAM", "--speculative-ngram-learned-folder", folder, how)
            for name in names:
                length, speed = server.answer(questions)
                print(f"| {name} | {length:.2f} | {speed:.1f} |", flush=True)
            server.end()


PARTS = {"sizes": sizes, "beside": beside, "build": build, "restart": restart}


def main() -> None:
    """Measure the parts that are named, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10**5, 10**6], help="tokens of others")
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--methods", nargs="*", default=["NGRAM", "EAGLE3"])
    parser.add_argument("--disable-torch-compile", dest="compiled", action="store_false")
    args = parser.parse_args()
    for part in args.parts:
        PARTS[part](args)


if __name__ == "__main__":
    main()
