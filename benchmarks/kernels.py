"""How many kernels a decode step of Llama-3.1-8B launches on CUDA, counted on a machine without a GPU.

The engine is the one that the flags below give, as `load/build.py` builds it, on fake tensors. So all that CUDA
compiles is lowered with the options that CUDA has: the blocks of target and draft head, and the code before and after
them. A captured step launches what its graphs launch, and the operations between them.

Counted are Triton's kernels, the libraries' matrix products and ATen's operations, each as one, though some of the
latter (sort, topk) are several kernels. This project's operators count as the ATen operations they are made of.

`python -m benchmarks.kernels` counts plain steps and steps with an EAGLE-3 tree of 5/8/32, alone and at the largest
batch that is captured, greedy and with all filters and penalties, and ends with status 1 where a step launches more
than its budget. It also counts a plain step with fp8 weights, and with each option of Inductor that the GPU benchmark
tries (`gpu_stages.OPTIONS`).

Needs what `lowering.py` needs. Read next: `lowered.py`, which keeps the code.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from benchmarks.fake_gpu import H200, fake_module, unavailable
from benchmarks.gpu_stages import LLAMA3, OPTIONS, patched
from benchmarks.lowered import Launches, Lowerings, autotuned
from minispec.beam import BeamDrafter
from minispec.buffers import DecodeBuffers, PrefillBuffers
from minispec.compiled import Step
from minispec.config import Config
from minispec.cuda.fp8 import use_fp8
from minispec.drafter import Drafter
from minispec.eagle import Eagle3Head, HeadConfig
from minispec.engine import COMPILED, Engine
from minispec.load import build
from minispec.load.tree_shape import beam_shape
from minispec.model import Model
from minispec.sampling import GREEDY, Needs

PAGES = 8191  # of the pools: no other tensor of a step has a multiple of this prime
DRAFT_VOCAB = 32000  # ids of the draft head, as published heads have
TREE = {"speculative_num_steps": 5, "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 32}
PLAIN_MOST, EAGLE3_MOST, SAMPLED_MOST = 480, 790, 1.35  # the budgets: kernels a step; times those of the greedy step


class EagleBuild(build.Outline):
    """The parts of an engine with an EAGLE-3 head of published sizes, on the meta device."""

    def draft(self, target: Model) -> Drafter:
        """Return the drafter around a head without weights."""
        if self.config.algorithm == "NONE":
            return super().draft(target)
        sizes, ids = replace(self.model_config, layers=1), torch.empty(DRAFT_VOCAB, dtype=torch.int64, device="meta")
        taps = (2, self.model_config.layers // 2, self.model_config.layers - 3)
        head = Eagle3Head.empty(HeadConfig("eagle3", sizes, taps, token_map=ids), target)
        return BeamDrafter(head, **beam_shape(self.config, self.model_config.architecture, on_cpu=False))


class Steps:
    """An engine on fake tensors, and the graphs of its steps."""

    def __init__(self, fp8: bool = False, **flags: Any) -> None:
        """fp8: whether weights are quantized. flags: fields of `Config`."""
        self.lowerings, self.functions, self.fp8, self.flags = Lowerings(), dict[int, str](), fp8, flags

    @contextmanager
    def lowered(self) -> Iterator[Engine]:
        """Return the engine; within this context its functions are compiled as far as their code."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            (folder / "config.json").write_text(json.dumps(LLAMA3))
            stack.enter_context(self.lowerings.kept())
            memory = (H200.total_memory, H200.total_memory)
            stack.enter_context(mock.patch.object(torch.cuda, "mem_get_info", lambda *_: memory))
            stack.enter_context(mock.patch.object(torch.cuda, "empty_cache", lambda: None))
            stack.enter_context(mock.patch.object(build, "DirectStep", lambda step: self._named(step, autotuned(step))))
            config = Config(model_path=str(folder), load_format="dummy", device="cuda", **self.flags)
            made = build.Build(config, lambda line: None)
            made.lead()
            outline = EagleBuild(made)
            parts = outline.parts()
            stack.enter_context(FakeTensorMode())
            for network in filter(None, (parts.network, parts.drafter.network)):
                fake_module(network, made.dtype)
            if self.fp8:
                use_fp8(parts.network)
            self.engine = outline.engine_of(parts, PAGES)
            self.captured = build.captured_batches(config, parts.sizes)
            yield self.engine

    def _named(self, step: Step, compiled: Step) -> Step:
        """Return a compiled function that notes which graphs its calls make."""

        def call(*given: Any) -> Any:
            before = len(self.lowerings.graphs)
            counts = isinstance(_get_current_dispatch_mode(), Launches)  # under which torch.compile makes no graph
            with _pop_mode_temporarily() if counts else nullcontext():
                result = compiled(*given)
            self.functions |= {id(graph): step.__qualname__ for graph in self.lowerings.graphs[before:]}
            return result

        return call

    def launches(self, step: DecodeBuffers | PrefillBuffers, needs: Needs = GREEDY) -> Counter[str]:
        """Return what one step launches: how often, by graph's function or, outside of graphs, by operation."""
        run: Callable[..., None] = self.engine.prefill_step if isinstance(step, PrefillBuffers) else self.engine.decode
        self.lowerings.ran.clear()
        with Launches() as outside:
            run(step, needs)
        found = Counter(outside.names)
        for graph in self.lowerings.ran:
            found[self.functions[id(graph)]] += len(graph.launches)
        return found


def counted(drafts: bool, batch: int | None = 1, fp8: bool = False) -> dict[str, Counter[str]]:
    """Return what the decode steps of a batch size launch, by needs: "greedy" and "sampled", with all that is captured.

    batch: None for the largest that is captured.
    """
    steps = Steps(fp8, speculative_algorithm="EAGLE3", **TREE) if drafts else Steps(fp8, speculative_algorithm="NONE")
    with steps.lowered() as engine:
        batch = batch or max(steps.captured)
        shape = max(engine.sizes.shapes_of(batch), key=lambda shape: shape.nodes)
        step = engine.decodes[batch, shape]
        return {name: steps.launches(step, needs) for name, needs in (("greedy", GREEDY), ("sampled", COMPILED[-1]))}


def over_budget(drafts: bool, found: Mapping[str, Counter[str]]) -> list[str]:
    """Return in words which steps launch more than they may."""
    greedy, sampled = (found[name].total() for name in ("greedy", "sampled"))
    most = EAGLE3_MOST if drafts else PLAIN_MOST
    over = [f"{greedy} kernels, at most {most}"] if greedy > most else []
    return over + ([f"{sampled / greedy:.2f} times as many if sampled, at most {SAMPLED_MOST}"]
                   if sampled > SAMPLED_MOST * greedy else [])  # fmt: skip


def main() -> None:
    """Print what each step launches."""
    if why := unavailable():
        sys.exit(why)
    wrong = 0
    for drafts, batch, what in (
        *((drafts, batch, "") for drafts in (False, True) for batch in (1, None)),
        *((False, 1, what) for what in ("fp8", *OPTIONS)),
    ):
        with patched(OPTIONS.get(what, {})):
            found = counted(drafts, batch, fp8=what == "fp8")
        for needs, launched in found.items():
            print(f"{'EAGLE-3 5/8/32' if drafts else 'plain'}, batch {batch or 'largest'}, {needs} {what}: "
                  f"{launched.total()} kernels; {dict(launched.most_common())}", flush=True)  # fmt: skip
        for fault in over_budget(drafts, found) if not what else ():
            wrong += 1
            print(f"  over: {fault}", flush=True)
    sys.exit(f"{wrong} budgets are exceeded" if wrong else 0)


if __name__ == "__main__":
    main()
