"""Whether graphs that are called directly have the bits of torch.compile, for every shape of the default model.

`python -m benchmarks.bits` serves one and two requests of the default model in float32 with its EAGLE-3 head, in every
shape that an engine for two has. Every call of a block and of the head is made three ways, each on keys and values as
they were before: eagerly, through torch.compile, which checks its guards and gathers what a graph reads anew, and
directly, as it is served. The last two must agree in every bit, of the output and of what is written to the pages, and
eager is to be within 1e-5 of the largest number. It prints a line for each shape with the largest distance from eager,
and ends with status 1 where bits differ, eager is farther away, or a shape of the target was never called.

tests/test_compiled.py does the same with a tiny model. Read next: `minispec/load/direct.py`.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bench
from benchmarks import throughput
from minispec import LLM, SamplingParams
from minispec.attention import Plan
from minispec.cpu.gather import GatherLayer, PromptLayer
from minispec.load.direct import DirectStep, any_size
from minispec.load.files import prepare

BOUND = 1e-5  # of the largest number, in float32
NEW_TOKENS = 16


class PlanShape(NamedTuple):
    """What tells the shapes of one function from one another."""

    batch: int
    blocks: int
    width: int
    window: int

    @classmethod
    def of(cls, plan: Plan) -> PlanShape:
        """Return a plan's."""
        return cls(plan.batch, plan.blocks, plan.width, plan.window)

    def __str__(self) -> str:
        window = "" if self.window == self.width else f" in a window of {self.window}"
        return f"{self.batch} x {self.blocks} blocks of {self.width} rows{window}"


class ThreeWays:
    """A step that is run directly, through Dynamo and eagerly, on the same keys and values.

    seen: by shape, the largest distance from eager of any direct call, over the largest number.
    """

    def __init__(self, step: DirectStep, attend_at: int) -> None:
        prepare()  # for torch.compile, as for the step
        self.step, self.attend_at = step, attend_at
        self.reference = torch.compile(step.function, fullgraph=True, dynamic=False)
        self.seen: dict[PlanShape, float] = {}

    def __call__(self, owner: Any, *args: Any) -> Tensor:
        """Return what the direct call does, after comparing; raises AssertionError where it is not torch.compile's."""
        attend: GatherLayer | PromptLayer = args[self.attend_at]
        direct = bool(self.step.calls.get(attend))
        ways = [partial(way, owner, *args) for way in (self.step.function, self.reference, self.step)]
        results = []
        for way in ways:
            for pool in (attend.keys, attend.values):
                pool[:, :, attend.plan.rows] = 77.0
            with any_size(args, attend):  # the same graphs for both: those of few rows have other products
                out = way()
            results.append((*_defined(attend, out, attend.keys, attend.values), out))
        (*eager, _), (*reference, _), (*got, out) = results
        shape = PlanShape.of(attend.plan)
        assert all(torch.equal(a, b) for a, b in zip(got, reference, strict=True)), f"{shape}: torch.compile's bits"
        pairs = zip(got, eager, strict=True)
        distance = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if a.numel())
        assert distance <= BOUND, f"{shape}: {distance:.1e} from eager"
        if direct:
            self.seen[shape] = max(distance, self.seen.get(shape, 0.0))
        return out


def _defined(attend: GatherLayer | PromptLayer, out: Tensor, *pools: Tensor) -> tuple[Tensor, ...]:
    """Return copies of what is not of padding, whose nodes share the trash page: any of them may be written last."""
    page_size = attend.plan.kv.page_size
    live = attend.plan.rows >= page_size
    return out.flatten(0, 1)[live], *(pool[:, :, page_size:].clone() for pool in pools)


@torch.inference_mode()
def main() -> int:
    """Compare, and print the table."""
    torch._dynamo.config.recompile_limit = 64  # the graphs for one shape each are many
    llm = LLM(speculative_algorithm="EAGLE3", speculative_lookup=False, dtype="float32", max_running_requests=2,
              device="cpu")  # fmt: skip
    engine, policy = llm.scheduler.engine, llm.scheduler.policy
    target = engine.model.run_block = ThreeWays(engine.model.run_block, attend_at=2)
    head = engine.drafter.run_network = ThreeWays(engine.drafter.run_network, attend_at=3)
    paths = engine.drafter.take_in = ThreeWays(engine.drafter.take_in, attend_at=0)
    policy.forced = random.Random(0).choice
    texts = [text for texts in bench.read_prompts(bench.PROMPTS, None).values() for text in texts]
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    for size in engine.sizes.prefill_sizes:
        ids = throughput.encode(texts[:2], llm.tokenizer, size, texts)
        for count in (1, 1, 2):  # twice alone, since a shape's first call goes through torch.compile
            llm.scheduler.flush_cache()  # or pages of a shorter prompt would leave less to compute
            llm.generate([row[: size - size // 8] for row in ids[:count]], params)
            print(f"{count} requests of up to {size} tokens agree", file=sys.stderr, flush=True)
    for name, ways in (("target", target), ("frontiers", head), ("committed tokens", paths)):
        for shape, distance in sorted(ways.seen.items()):
            print(f"{name}, {shape}: torch.compile's bits, at most {distance:.1e} from eager")
    steps = (*engine.decodes.values(), *engine.prefills.values())
    missing = {PlanShape.of(step.plan) for step in steps} - set(target.seen)
    for shape in sorted(missing):
        print(f"target, {shape}: never called")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
