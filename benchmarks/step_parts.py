"""Where the time of one step goes: products, attention, the rest of the blocks, what is around them.

`python -m benchmarks.step_parts` serves one request of the default model with its EAGLE-3 head and times three kinds of
step at batch 1: a plain step and a tree step at a context of 200, and a prefill step of 512 tokens, at the start of a
prompt and at its far end. No profiler runs meanwhile, since it would cost more than what is looked for. Each part is
timed by itself instead, in turn with whole steps. Differences are taken within a turn; medians over the turns in ms:

  whole      from the launch of a step to its tokens on the host, drafting included; scheduler and HTTP are not in it
  products   every linear layer of the step called once more, one after the other, with inputs of the step's shapes;
             those that compiled blocks make themselves, in loops, compiled as well, a block's at once
  attention  what compiled blocks take longer than the same blocks compiled with attention left out (the query is
             handed on in its place); it includes writing keys and values
  blocks     the rest of the blocks, the target's and the head's: norms, rotary, activations, and the calls between
             kernels, which Inductor's code makes in Python
  around     the functions before and after the blocks of target and head, less their LM heads: plans, verification,
             compaction, growing the tree
  rest       the engine's own lines and the few operations there

A part called by itself can be a little faster or slower than within a step, so small parts can come out too small by
some tenths, or negative. Read ratios: the load of the machine stands above the table.

Read next: `minispec/engine.py`, whose steps these are.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bench
from benchmarks import throughput
from minispec import LLM, SamplingParams
from minispec.beam import BeamDrafter
from minispec.buffers import Chunk
from minispec.compiled import Key
from minispec.cpu.int8 import Int8Linear
from minispec.cpu.linear import PackedLinear
from minispec.cpu.spinning import CALM, LOOK
from minispec.drafter import NOTHING
from minispec.engine import Engine
from minispec.load.direct import DirectStep
from minispec.model import Block
from minispec.request import Request
from minispec.tree import PLAIN, Shape

CONTEXT = 200  # tokens before a decode step
PREFILL = 512  # tokens of a prefill step
REPEATS = 30


class Kind(NamedTuple):
    """A kind of step, and the function that runs one on any engine that holds the request."""

    name: str
    step: Callable[[Engine], object]


class Product(NamedTuple):
    """A linear layer as a step calls it."""

    part: str  # "model" or "drafter"
    module: str
    shape: torch.Size
    dtype: torch.dtype


def linears(engine: Engine) -> list[tuple[str, str, nn.Module]]:
    """Return (part, name, module) of every linear layer, packed or not, of the target and the drafter's network."""
    parts = {"model": engine.model, "drafter": engine.drafter.network}
    return [
        (part, name, module)
        for part, network in parts.items()
        if network is not None
        for name, module in network.named_modules()
        if isinstance(module, (nn.Linear, PackedLinear, Int8Linear)) and not name.endswith(".packed")
    ]


def products(engine: Engine, kind: Kind) -> list[Product]:
    """Return every product of one step, in order; the engine must run eagerly, or its modules are never called."""
    found: list[Product] = []
    with ExitStack() as hooks:
        for part, name, module in linears(engine):

            def note(_: nn.Module, args: tuple[Tensor, ...], part: str = part, name: str = name) -> None:
                found.append(Product(part, name, args[0].shape, args[0].dtype))

            hooks.callback(module.register_forward_pre_hook(note).remove)
        kind.step(engine)
    return found


def in_loops(module: nn.Module, x: Tensor) -> bool:
    """Say whether compiled code makes this product by loops of its own."""
    kept = isinstance(module, Int8Linear) or getattr(module, "kept", None) is not None
    return kept and x.shape[:-1].numel() == 1


class SomeLayers(nn.Module):
    """Linear layers of one block."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def products(self, xs: tuple[Tensor, ...], attend: NoAttention) -> tuple[Tensor, ...]:
        """Return what each layer makes of its input; to be compiled, for which `attend` stands for the block."""
        return tuple(layer(x) for layer, x in zip(self.layers, xs, strict=True))


class NoAttention(Key):
    """In place of one layer's attention: hands the query on."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return q [B, Hq, T, D]."""
        return q.clone()


class Parts:
    """An engine's step, of which compiled blocks and the functions around them can be timed."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.ms = engine, {"blocks": 0.0, "around": 0.0}
        drafter = engine.drafter
        # Owner, attribute, position of `attend` among the arguments, and the function that is compiled.
        self.places = [
            (engine.model, "run_block", 3, Block.forward),
            (drafter, "run_network", 4, type(drafter.network).forward),
            (drafter, "take_in", 1, BeamDrafter._take_in),
        ]
        self.as_it_is = [getattr(owner, name) for owner, name, *_ in self.places]
        self.bare = [self._without_attention(*place[2:]) for place in self.places]
        for small in (engine.small, drafter.small):
            small.eager, small.compiled = (
                tuple(self._timed(function, "around") for function in functions)
                for functions in (small.eager, small.compiled)
            )

    def _without_attention(self, position: int, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the function compiled alike, with attention left out."""
        compiled, stands_for = DirectStep(function), {}

        def call(*args: Any) -> Tensor:
            other = stands_for.setdefault(args[position], NoAttention())
            return compiled(*args[:position], other, *args[position + 1 :])

        return call

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the function, which adds its time to a part."""

        def call(*args: Any) -> Any:
            started = time.perf_counter()
            out = function(*args)
            self.ms[part] += (time.perf_counter() - started) * 1e3
            return out

        return call

    def step(self, kind: Kind, functions: Sequence[Callable[..., Tensor]]) -> dict[str, float]:
        """Run one step with these compiled functions; returns the ms of the whole, of blocks and of what is around."""
        for (owner, name, *_), function in zip(self.places, functions, strict=True):
            setattr(owner, name, self._timed(function, "blocks"))
        self.ms = dict.fromkeys(self.ms, 0.0)
        whole = time_ms(lambda: kind.step(self.engine))
        return {"whole": whole, **self.ms}

    def products(self, listed: Sequence[Product]) -> Callable[[], None]:
        """Return a function that calls the linear layers of a step."""
        modules = {(part, name): module for part, name, module in linears(self.engine)}
        calls = [(modules[p.part, p.module], torch.randn(p.shape).to(p.dtype)) for p in listed]
        alone = [(module.forward, x) for module, x in calls if not in_loops(module, x)]
        of_block, inputs = DirectStep(SomeLayers.products), []
        together = itertools.groupby(
            ((p, call) for p, call in zip(listed, calls, strict=True) if in_loops(*call)),
            key=lambda pair: (pair[0].part, pair[0].module.rpartition(".")[0]),
        )
        for _, pairs in together:
            layers, xs = zip(*(call for _, call in pairs), strict=True)
            inputs.append((SomeLayers(layers), xs, NoAttention()))

        def again() -> None:
            for forward, x in alone:
                forward(x)
            for given in inputs:
                of_block(*given)

        return again


def time_ms(function: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e3


@torch.inference_mode()
def measure(parts: Parts, kind: Kind, listed: Sequence[Product]) -> dict[str, float]:
    """Return the median ms of every part of a kind of step."""
    within = parts.products([p for p in listed if in_block(p)])
    heads = parts.products([p for p in listed if not in_block(p)])
    rows: list[dict[str, float]] = []
    for _ in range(REPEATS + 2):
        step, bare = parts.step(kind, parts.as_it_is), parts.step(kind, parts.bare)["blocks"]
        in_blocks, in_heads = time_ms(within), time_ms(heads)
        rows.append({
            "whole": step["whole"],
            "products": in_blocks + in_heads,
            "attention": step["blocks"] - bare,
            "blocks": bare - in_blocks,
            "around": step["around"] - in_heads,
            "rest": step["whole"] - step["blocks"] - step["around"],
        })  # fmt: skip
    return {part: statistics.median(row[part] for row in rows[2:]) for part in rows[0]}


def in_block(product: Product) -> bool:
    """Return whether a compiled block makes a product: all but LM heads, which functions around the blocks make."""
    return "lm_head" not in product.module


def kinds(slot: int, ids: Sequence[int], starts: Sequence[int]) -> list[Kind]:
    """Return the steps to be timed, on a slot that holds the request `ids`."""

    def decode(engine: Engine, shape: Shape | None) -> None:
        engine.lens[slot : slot + 1].fill_(CONTEXT)
        trees = max(engine.sizes.shapes_of(engine.batch_of(1)))
        engine.collect(engine.launch([slot], shape or trees, [NOTHING]))

    def prefill(engine: Engine, start: int) -> None:
        chunk = Chunk(slot, list(ids[start : start + PREFILL]), start, last=True)
        engine.collect(engine.prefill([chunk]))

    return [
        Kind(f"plain, context {CONTEXT}", lambda engine: decode(engine, PLAIN)),
        Kind(f"tree, context {CONTEXT}", lambda engine: decode(engine, None)),
        *(
            Kind(f"prefill of {PREFILL} tokens from row {start}", lambda engine, start=start: prefill(engine, start))
            for start in starts
        ),
    ]


def occupy(llm: LLM, ids: Sequence[int]) -> Request:
    """Prefill a request, so that its slot has pages with real keys and values in them; returns it."""
    request = llm.request(list(ids), SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True))
    llm.scheduler.validate(request)
    llm.scheduler.submit(request)
    while request not in llm.scheduler.running:
        llm.scheduler.step()
    llm.scheduler.step()
    return request


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return the parts of every kind of step as a Markdown table."""
    columns = ("whole", "products", "attention", "blocks", "around", "rest")
    lines = ["| step | " + " | ".join(columns) + " | products / whole |", "|---" * (len(columns) + 2) + "|"]
    for name, row in rows.items():
        cells = [f"{row[column]:.2f}" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {row['products'] / row['whole']:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", help="as the server's flag")
    parser.add_argument("--prefill-start", type=int, nargs="*", default=[0, 7 * PREFILL], help="first row of a prefill")
    parser.add_argument("--tree", help="rounds, branches and nodes of a tree, as 2/3/4; by default the head's own")
    args = parser.parse_args()
    length = max(CONTEXT, *(start + PREFILL for start in args.prefill_start), 0)
    options = {"dtype": args.dtype, "speculative_algorithm": "EAGLE3", "max_running_requests": 1, "device": "cpu",
               "speculative_lookup": False, "max_total_tokens": length + 256}  # fmt: skip
    options |= {"quantization": args.quantization} if args.quantization else {}
    flags = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    options |= dict(zip(flags, map(int, args.tree.split("/")), strict=True)) if args.tree else {}
    eager = LLM(args.model, disable_torch_compile=True, **options)
    texts = [text for texts in bench.read_prompts(bench.PROMPTS, None).values() for text in texts]
    ids = throughput.encode(texts[:1], eager.tokenizer, length, texts)[0][:length]
    request = occupy(eager, ids)
    steps = kinds(request.slot, ids, args.prefill_start)
    with torch.inference_mode():
        listed = {kind.name: products(eager.scheduler.engine, kind) for kind in steps}
    llm = LLM(args.model, **options)
    slot = occupy(llm, ids).slot
    assert slot == request.slot, "both engines give their first request the same slot"
    time.sleep((CALM + 4) * LOOK)  # after compiling threads still sleep where they wait
    parts, load = Parts(llm.scheduler.engine), os.getloadavg()
    rows = {kind.name: measure(parts, kind, listed[kind.name]) for kind in steps}
    sizes = llm.scheduler.sizes
    shape = f"{sizes.steps}/{sizes.topk}/{sizes.nodes}"
    loads = " and ".join(f"{one[0]:.1f}" for one in (load, os.getloadavg()))
    print(f"{throughput.hardware('cpu')}, torch {torch.__version__}, {llm.scheduler.kv.pool.dtype}, "
          f"{args.quantization or 'no'} quantization, trees of {shape}; load before and after {loads}")  # fmt: skip
    print(table(rows))


if __name__ == "__main__":
    main()
