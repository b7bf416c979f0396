"""External corpora on real text: what they give, and what they cost. Prints Markdown lines.

The texts are the default model's own replies (replies/), and their documents are tokens as they were made. The model
answers the same questions anew, greedily, with NGRAM, one request at a time, and the corpus has its earlier answers.
`python -m benchmarks.corpora` takes some five minutes on two cores; `--sizes` says inside how many tokens of others.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from minispec import LLM, SamplingParams
from minispec.corpora import END, Corpus, sort_places
from minispec.load.default_model import ensure_default_model
from minispec.load.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent


def replies(count: int | None) -> list[tuple[list[int], list[int]]]:
    """Return questions and greedy answers of the shards, as ids."""
    found = []
    for file in sorted((ROOT / "replies").glob("*.jsonl.xz")):
        for line in lzma.open(file, "rt"):
            row = json.loads(line)
            if "ids" in row and len(row["ids"]) - row["start"] >= 120:
                found.append((row["ids"][: row["start"]], row["ids"][row["start"] :]))
            if count is not None and len(found) >= count:
                return found
    return found


def corpus(documents: list[list[int]], tokens: int) -> Corpus:
    """Return a corpus of documents, taken in turn until there are so many tokens."""
    parts, count = [], 0
    for document in documents * (1 + tokens // sum(map(len, documents))):
        parts.append(np.array([*document, END], np.int32))
        count += len(document)
        if count >= tokens:
            break
    text = np.concatenate(parts)
    return Corpus(text, sort_places(text))


def run(llm: LLM, questions: list[list[int]], length: int = 96) -> tuple[float, float, float, list[list[int]]]:
    """Return accept length, tokens a second, the median of a step in ms, and the answers."""
    scheduler = llm.scheduler
    assert scheduler.flush_cache()
    scheduler.metrics.recorded = {}
    requests = [llm.request(ids, SamplingParams(temperature=0, max_new_tokens=length)) for ids in questions]
    for request in requests:
        llm.serve([request])
    m = scheduler.metrics
    speed = m.verified.tokens.total() / (m.step_seconds + m.host_seconds)
    step = statistics.median(m.recorded[1]) * 1e3 if m.recorded else 0.0
    return m.verified.accept_length, speed, step, [list(r.output_ids) for r in requests]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[10**5, 10**6], help="tokens of others")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--disable-torch-compile", action="store_true")
    args = parser.parse_args()
    # Trees of a fixed size, so that accept lengths compare; the policy has no part in them.
    llm = LLM(speculative_algorithm="NGRAM", speculative_num_draft_tokens=12, max_running_requests=1, batches=(1,),
              disable_torch_compile=args.disable_torch_compile)  # fmt: skip
    table = llm.scheduler.engine.drafter.corpora
    assert table is not None
    everything = replies(None)
    mine, others = everything[: args.questions], [[*q, *a] for q, a in everything[args.questions :]]
    questions = [question for question, _ in mine]
    run(llm, questions[:2])
    cold = run(llm, questions)
    own = [[*question, *answer] for question, answer in zip(questions, cold[3], strict=True)]  # its answers of today
    print("| corpus | accept length | tokens/s | step, ms | built in, s |\n|---|--:|--:|--:|--:|")
    print(f"| none | {cold[0]:.2f} | {cold[1]:.1f} | {cold[2]:.1f} | |", flush=True)
    same: list[int] = []  # in bfloat16 near-ties may change a token
    for size in [0, *args.sizes]:
        started = time.perf_counter()
        table.put("x", corpus([*own, *others], size or sum(map(len, own))))
        built = time.perf_counter() - started
        now = run(llm, questions)
        print(f"| {len(table._all['x'].tokens)} tokens | {now[0]:.2f} | {now[1]:.1f} | {now[2]:.1f} | {built:.1f} |",
              flush=True)  # fmt: skip
        same.append(sum(a == b for a, b in zip(now[3], cold[3], strict=True)))
    print(f"\nanswers of {len(questions)} that stay the same: {', '.join(map(str, same))}")
    table.put("x", None)
    llm.scheduler.policy.adapts_from = 1  # from here on a step has trees only where they are worth their time
    for count in (1, 4):  # A-B-B-A against no corpus
        for i in range(count):
            table.put(f"other{i}", corpus(others[i::count], 200_000))
        kept = dict(table._all)
        speeds: dict[str, list[float]] = {"none": [], "corpora": []}
        lengths: dict[str, float] = {}
        for which in ("none", "corpora", "corpora", "none"):
            table._all = kept if which == "corpora" else {}
            length, speed, *_ = run(llm, questions)
            speeds[which].append(speed)
            lengths[which] = length
        ratio = sum(speeds["corpora"]) / sum(speeds["none"])
        print(f"\n{count} irrelevant corpora of 200,000 tokens: accept length {lengths['corpora']:.2f} against "
              f"{lengths['none']:.2f}, tokens/s {ratio:.3f} of those without", flush=True)  # fmt: skip
        table._all = {}
    tokenizer = load_tokenizer(ensure_default_model(print))
    texts = [tokenizer.decode(ids) for ids in others[: 10**6 // (sum(map(len, others)) // len(others))]]
    before = run(llm, questions)[1]
    took: list[float] = []

    def build() -> None:
        """Add a million tokens as a client would."""
        started = time.perf_counter()
        print(f"\n{llm.corpora.add('million', texts, None)[1]} tokens are added ", end="", flush=True)
        took.append(time.perf_counter() - started)

    thread = threading.Thread(target=build)
    thread.start()
    during = []
    while thread.is_alive():
        during.append(run(llm, questions[:2])[1])
    llm.corpora.remove("million")
    after = run(llm, questions)[1]
    speed = statistics.median(during) / ((before + after) / 2)
    print(f"in {took[0]:.1f} s; meanwhile there are {speed:.3f} of the tokens/s before and after")


if __name__ == "__main__":
    main()
