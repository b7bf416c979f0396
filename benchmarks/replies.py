"""How fast replies to train on are made: `python -m benchmarks.replies --way before`, and `--way now`.

The same prompts and parameters both ways, with the default model on a CPU; each way is a process of its own, since what
the C library does with freed memory is a matter of the process. Prints a line of JSON: reply tokens a CPU second,
prefill included, starting and compiling not. OMP_NUM_THREADS=1 gives the figures of one core.

    before    32 requests at once, greedy ones first and the rest by temperature
    now       as `minispec.train` does: 64 at once, in `runs_alike`; small pages, and freed memory is kept

Read next: `minispec/train/corpus.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from minispec import LLM, SamplingParams
from minispec.load.machine import keep_freed_memory
from minispec.train.__main__ import ENGINE, LONG
from minispec.train.corpus import SAMPLED, runs_alike
from minispec.train.prompts import collect

NEW_TOKENS = 128  # of the longest reply
LONG_SHARE = 0.05  # of prompts beyond LONG tokens


def main() -> None:
    """Run one way and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replies", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=512, help="prompts (default 512)")
    parser.add_argument("--way", choices=("before", "now"), required=True)
    options = parser.parse_args()
    print(json.dumps(measure(options.way, options.count)))


def measure(way: str, count: int) -> dict[str, object]:
    """Generate the replies one way; returns its figures."""
    now = way == "now"
    options = ENGINE["cpu"] if now else {"max_running_requests": 32}
    llm = LLM(speculative_algorithm="NONE", device="cpu", **options)
    rng, prompts = random.Random(0), []
    for conversation in collect(2 * count, 0):
        ids = llm.tokenizer.encode_chat(conversation.messages)
        if len(ids) < LONG or rng.random() < LONG_SHARE:
            prompts.append(ids)
    prompts = prompts[:count]
    heat = [round(rng.uniform(0.7, 1.0), 2) if rng.random() < SAMPLED else 0.0 for _ in prompts]
    if now:
        keep_freed_memory()
        runs = runs_alike([len(ids) for ids in prompts], heat)
    else:
        runs = [sorted(range(count), key=heat.__getitem__)]
    tokens, cpu, wall = 0, time.process_time(), time.perf_counter()
    for run in runs:
        params = [SamplingParams(temperature=heat[i], max_new_tokens=NEW_TOKENS, sampling_seed=i) for i in run]
        tokens += sum(len(result["output_ids"]) for result in llm.generate([prompts[i] for i in run], params))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    figures = {"prompt_tokens": sum(map(len, prompts)), "reply_tokens": tokens, "cpu_seconds": round(cpu, 1),
               "seconds": round(wall, 1), "tokens_per_cpu_second": round(tokens / cpu, 1)}  # fmt: skip
    return {"way": way, "prompts": count} | figures


if __name__ == "__main__":
    main()
