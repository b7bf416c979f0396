"""What one wants to know of a GPU first: whether steps compile, are captured and right, and how fast attention is.

Both stages are made of parts. A part that fails is said and written down, and the next one runs all the same.

Read next: `gpu.py`, the command; `gpu_stages.py`, all other stages.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_stages import (
    LLAMA3,
    SEED,
    Dummy,
    Report,
    Scale,
    compiled_so_far,
    copy_bandwidth,
    median_seconds,
    model_sizes,
    state,
)
from benchmarks.lowered import autotuned
from minispec import LLM, SamplingParams
from minispec.attention import FlexLayer, PagedFlex, Plan
from minispec.cuda.graphs import Recorder
from minispec.engine import Engine
from minispec.kv import KVShape, PagedKV
from minispec.model import Block
from minispec.sampling import Needs

LAYERS = 6  # of the smoke test's target
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "tempered": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.05},
}
FAR = 0.02  # a relative error of attention that no rounding makes


# ---- smoke -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def smoke(report: Report, scale: Scale) -> None:
    """Six layers of Llama-3.1's widths, an EAGLE-3 head, grown trees: compiled, captured, served, replays compared."""
    with Dummy({**LLAMA3, "num_hidden_layers": LAYERS}, scale) as dummy:
        started, lines = time.perf_counter(), []
        llm = dummy.load(1, tell=lambda line: lines.append((time.perf_counter() - started, line)))
        report.add("start", {"seconds": time.perf_counter() - started, "lines": lines, "engine": state(llm)})
        for name, wishes in WISHES.items():
            for what, check in CHECKS.items():
                with report.part(f"{name}, {what}"):
                    report.add(f"{name}, {what}", check(llm.scheduler.engine, partial(reply, llm, scale, wishes)))
    with report.part("lowering"):
        report.add("lowering", lowered(scale))


def reply(llm: LLM, scale: Scale, wishes: dict[str, Any]) -> int:
    """Serve a request in plain steps and steps with trees, in turn at random; returns how many tokens it gave."""
    rng, vocab = random.Random(SEED), llm.model_config.vocab_size
    llm.scheduler.policy.forced = lambda shapes: rng.choice(shapes)
    ids = [rng.randrange(3, vocab) for _ in range(scale.prompt)]
    params = SamplingParams(max_new_tokens=scale.steps, ignore_eos=True, sampling_seed=SEED, **wishes)
    assert llm.scheduler.flush_cache()
    llm.serve([request := llm.request(ids, params)])
    return len(request.output_ids)


def as_it_is(engine: Engine, serve: Callable[[], int]) -> dict[str, Any]:
    """Serve a request; returns how many steps replayed a graph, and how many graphs were made only now."""
    steps, run_here = Counter[str](), engine.run_here

    def counted(step: Any, needs: Any, graph: Any, asked: Any) -> None:
        steps["uncaptured" if graph is None else "captured"] += 1
        run_here(step, needs, graph, asked)

    made, started = compiled_so_far()["graphs"], time.perf_counter()
    with mock.patch.object(engine, "run_here", counted):
        tokens = serve()
    seconds, made = time.perf_counter() - started, compiled_so_far()["graphs"] - made
    return {"tokens": tokens, "seconds": seconds, "steps": steps, "graphs_compiled": made}


def without_waiting(engine: Engine, serve: Callable[[], int]) -> dict[str, int]:
    """Serve a request captured and uncaptured; on a GPU it is an error if the host waits for the device in a launch."""

    def launch(original: Callable[..., Any], *given: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    guarded = {name: partial(launch, getattr(engine, name)) for name in ("launch", "prefill")}
    with mock.patch.multiple(engine, **(guarded if engine.device.type == "cuda" else {"graphs": engine.graphs})):
        tokens = serve()
        with mock.patch.object(engine, "graphs", {}):
            return {"captured": tokens, "uncaptured": serve()}


def state_of(engine: Engine, needs: Needs) -> list[Tensor]:
    """Return every tensor that a step of these needs may change and a later one may read, without page 0.

    Page 0 is never read. Outputs that nobody needs counted are counted where a graph of more needs is replayed.
    """
    sampling, late = engine.sampling, engine.late
    steps = [*engine.decodes.values(), *engine.prefills.values()]
    kept = [late.tokens, late.features, getattr(engine.drafter, "state", None)]
    return [
        engine.lens, engine.root, *(tensor for tensor in kept if isinstance(tensor, Tensor)),
        *(pool[:, :, engine.kv.page_size :] for pool in engine.kv.pools),
        sampling._floats, sampling._ints, *(step.outputs for step in steps),
        *(table for name, table in sampling.tables.items() if name in needs or name != "counts"),
    ]  # fmt: skip


def replays_compared(engine: Engine, serve: Callable[[], object]) -> dict[str, int]:
    """Serve a request with each captured step run twice from the same state, as a replay and uncaptured.

    Returns how many were equal; raises AssertionError, naming the step, where a bit of the state differs.
    """
    equal, original = 0, engine.run_here

    def run_here(step: Any, needs: Any, graph: Any, asked: Any) -> None:
        nonlocal equal
        if graph is None:
            return original(step, needs, graph, asked)
        before = [tensor.clone() for tensor in state_of(engine, needs)]
        original(step, needs, graph, asked)
        after = [tensor.clone() for tensor in state_of(engine, needs)]
        for tensor, value in zip(state_of(engine, needs), before, strict=True):
            tensor.copy_(value)
        original(step, needs, None, asked)
        for index, (tensor, value) in enumerate(zip(state_of(engine, needs), after, strict=True)):
            differ = int((tensor != value).sum())
            assert not differ, f"{step.name}: a replay leaves another state: {differ} numbers of tensor {index}"
        equal += 1
        return None

    with mock.patch.object(engine, "run_here", run_here):
        serve()
    return {"equal": equal}


CHECKS: dict[str, Callable[[Engine, Callable[[], int]], dict[str, Any]]] = {
    "served": as_it_is, "launched without waiting": without_waiting, "replays": replays_compared,
}  # fmt: skip


def lowered(scale: Scale) -> dict[str, list[str]] | str:
    """Return what benchmarks/lowering.py finds wrong with blocks that this device's Inductor compiles, by shape."""
    from torch._inductor.graph import GraphLowering

    from benchmarks import lowering
    from benchmarks.lowered import Graph

    if scale.device != "cuda":
        return "this is no GPU; python -m benchmarks.lowering lowers for one"
    cells, faults = [lowering.Cell(4, 1, 128), lowering.Cell(4, 32, 128), lowering.Cell(4, 128, 128, prefill=True)], {}
    for cell in cells:
        sources: list[str] = []
        with (
            mock.patch.object(GraphLowering, "save_output_code", staticmethod(sources.append)),
            torch._inductor.config.patch(force_disable_caches=True),
        ):
            autotuned(Block.forward)(*lowering.make_layer(cell))
        faults[f"{cell.nodes} nodes"] = lowering.faults_of(cell, Graph(sources[-1], [1]))
    assert not any(faults.values()), faults
    return faults


# ---- attention ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def attention(report: Report, scale: Scale) -> None:
    """Attention alone, by nodes and context: the time of a layer, and what it must read over what a copy moves."""
    sizes = model_sizes(LLAMA3, scale)
    shape, page, longest = KVShape(sizes.layers, sizes.kv_heads, sizes.head_dim), 64, max(scale.contexts)
    new = {"dtype": getattr(torch, scale.dtype), "device": scale.device}
    rows = longest + max(scale.nodes)
    kv = PagedKV(shape, pages=2 + rows // page, page_size=page, slots=2, rows_per_slot=rows,
                 zeros=partial(torch.zeros, **new))  # fmt: skip
    torch.manual_seed(SEED)
    kv.pool.normal_()
    kv.map(1, 0, kv.allocate(kv.pages_for(rows)))
    copied = copy_bandwidth(scale)
    report.add("copy", copied)
    call: Callable[..., Tensor] = autotuned(_attend) if scale.compiled else _attend
    for nodes in scale.nodes:
        plan = Plan(kv, 1, 1, nodes)
        q, k, v = (torch.randn(1, heads, nodes, sizes.head_dim, **new)
                   for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads))  # fmt: skip
        run = partial(_all_layers, call, PagedFlex(kv, plan, sizes.layers), sizes.layers, (q, k, v))
        graph: Callable[[], object] | None = None  # one for all contexts, as a step has
        for context in scale.contexts:
            name = f"{nodes} nodes, context {context}"
            if name in report:
                continue
            with report.part(name):
                _fill(plan, context)
                error = _error(kv, plan, context, q, run())
                if graph is None:
                    graph = Recorder(torch.device("cuda")).record(run).replay if scale.device == "cuda" else run
                seconds = median_seconds(graph, scale.device)
                read = shape.bytes(context + nodes, kv.pool.dtype)
                report.add(name, {
                    "ms_a_layer": seconds / sizes.layers * 1e3, "bytes_a_layer": read / sizes.layers,
                    "share_of_copy": read / seconds / copied["bytes_per_s"], "relative_error": error,
                })  # fmt: skip
                assert error < FAR, f"attention differs from plain attention by {error:.3f}"


def _attend(layer: FlexLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return layer(q, k, v)


def _all_layers(call: Callable[..., Tensor], attend: PagedFlex, layers: int, given: tuple[Tensor, ...]) -> Tensor:
    """Attend in all layers, so that keys and values come from memory and not from a cache; returns the last result."""
    return [call(attend.layer(index), *given) for index in range(layers)][-1]


def _fill(plan: Plan, context: int) -> None:
    """Describe a chain of nodes after so many rows of slot 1."""
    device, nodes = plan.slots.device, plan.width
    chain = torch.ones(1, nodes, nodes, dtype=torch.bool, device=device).tril()
    slot, start = (torch.full((1,), value, dtype=torch.int64, device=device) for value in (1, context))
    plan.fill(slot, start, chain, chain[:, -1])


def _error(kv: PagedKV, plan: Plan, context: int, q: Tensor, found: Tensor) -> float:
    """Return how far the last layer's result is from plain attention over the same rows in float32, relative to it."""
    position = torch.arange(context + plan.width, device=q.device)[None]
    rows = kv.rows(plan.slots, position, torch.ones_like(position, dtype=torch.bool))
    keys, values = (part[:, :, rows].float() for part in kv.layer(kv.pool.shape[0] // 2 - 1))
    seen = torch.cat((plan.visible.new_ones(1, plan.width, context), plan.visible), dim=2)
    truth = F.scaled_dot_product_attention(q.float(), keys, values, attn_mask=seen, enable_gqa=True)
    return float((found.float() - truth).norm() / truth.norm())
