"""What one step costs by batch, tree, context and size of the pool, and whether anything recompiles while serving.

`python benchmarks/steps.py` times decode steps of the default model through the engine, compiled. It then serves 200
steps of requests that come and go, and prints how many graphs were compiled in that time, which must be 0. Finally it
starts a server and prints how long /health takes to answer while a prompt of 4,096 tokens is prefilled.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
import urllib.request

import parity
import torch

from minispec import LLM, SamplingParams
from minispec.request import Request


def step_ms(llm: LLM, batch: int, context: int, tree: bool, repeats: int) -> float:
    """Return the median time of a decode step for `batch` requests of `context` tokens."""
    scheduler = llm.scheduler
    scheduler.flush_cache()
    rng = random.Random(batch * context)
    for i in range(batch):
        ids = [rng.randrange(100, 20000) for _ in range(context)]
        request = Request(f"{i}", ids, SamplingParams(temperature=0.0, max_new_tokens=None, ignore_eos=True))
        scheduler.validate(request)
        scheduler.submit(request)
    scheduler.policy.forced = lambda shapes: shapes[-1 if tree else 0]
    while len(scheduler.running) < batch:
        scheduler.step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - start)
    scheduler.abort("")
    scheduler.policy.forced = None
    return statistics.median(times) * 1e3


def recompiles(llm: LLM, steps: int) -> tuple[int, int]:
    """Serve changing requests for `steps` steps; returns (graphs compiled meanwhile, number of batch sizes seen)."""
    graphs = lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]  # noqa: E731
    scheduler, rng, before, sizes = llm.scheduler, random.Random(1), graphs(), set()
    for step in range(steps):
        if rng.random() < 0.3 and len(scheduler.waiting) < 4:
            ids = [rng.randrange(100, 120) for _ in range(rng.choice((3, 40, 130, 700)))]
            params = SamplingParams(temperature=rng.choice((0.0, 1.0)), max_new_tokens=rng.randint(1, 40))
            request = Request(f"s{step}", ids, params)
            scheduler.validate(request)
            scheduler.submit(request)
        if rng.random() < 0.02:
            scheduler.abort(f"s{rng.randrange(step + 1)}")
        scheduler.step()
        sizes.add(len(scheduler.running))
    while scheduler.has_work:
        scheduler.step()
    scheduler.step()  # an idle step checks the pages
    return graphs() - before, len(sizes)


def health_ms() -> list[float]:
    """Return the answer times of /health, in ms, during a prefill of 4,096 tokens."""
    waits = []
    with parity.serve() as url:
        body = {"input_ids": [100 + i % 1000 for i in range(4096)], "sampling_params": {"max_new_tokens": 1}}
        thread = threading.Thread(target=parity.post, args=(url + "/generate", body))
        thread.start()
        while thread.is_alive():
            start = time.perf_counter()
            with urllib.request.urlopen(url + "/health", timeout=20) as answer:
                json.load(answer)
            waits.append((time.perf_counter() - start) * 1e3)
            time.sleep(0.02)
    return waits


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    options = {"speculative_algorithm": "NGRAM", "dtype": args.dtype, "decode_log_interval": 10**6}
    small = LLM(max_total_tokens=8 * 4096, **options)
    print(f"torch {torch.__version__}, {small.scheduler.kv.pool.dtype}, {torch.get_num_threads()} threads")
    print("| batch | context | plain ms | tree ms | ratio |\n|---|---|---|---|---|")
    for batch in (1, 2, 4, 8):
        for context in (128, 512, 2048):
            plain, tree = (step_ms(small, batch, context, tree, args.repeats) for tree in (False, True))
            print(f"| {batch} | {context} | {plain:.1f} | {tree:.1f} | {tree / plain:.2f} |", flush=True)
    compiled, sizes = recompiles(small, 200)
    print(f"200 steps over {sizes} batch sizes: {compiled} graphs compiled")
    large = LLM(max_total_tokens=8 * 8 * 4096, **options)
    for tree in (False, True):
        pairs = [
            (step_ms(small, 4, 512, tree, args.repeats), step_ms(large, 4, 512, tree, args.repeats)) for _ in range(3)
        ]
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"pool eight times larger, batch 4, {'tree' if tree else 'plain'}: {ratio:.2f} of the time")
    waits = health_ms()
    print(f"/health during a 4,096-token prefill: median {statistics.median(waits):.0f}, most {max(waits):.0f} ms")


if __name__ == "__main__":
    main()
