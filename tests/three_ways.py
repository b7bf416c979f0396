"""A step that is run three ways, eagerly, through torch.compile and directly, whose bits are compared."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.attention import Plan
from minispec.cpu.gather import GatherLayer, PromptLayer
from minispec.load.files import DirectStep, any_size, prepare

BOUND = 1e-5  # of the largest number, in float32


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
