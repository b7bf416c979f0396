"""What surrounds the blocks in a decode step, compiled: a handful of functions, no stray operations, the same tokens.

A step's many small operations cost a launch each on CUDA. Compiled, they are a few functions: two around the target's
blocks, three around the drafter's. On a CPU they stay eager, where compiling them gains next to nothing; here they are
compiled by force, counted with PyTorch's profiler, and compared with what they are when run eagerly.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conformance import random_head
from exactness import build, mixed_requests, reference, request, run, tiny_model, trace_only
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile, record_function

from minispec.beam import BeamDrafter
from minispec.cpu.gather import PagedGather
from minispec.drafter import Drafter, Plain
from minispec.eagle import Eagle3Head
from minispec.engine import COMPILED, Engine
from minispec.load.files import DirectStep, tuning
from minispec.model import Block
from minispec.sampling import GREEDY
from minispec.scheduler import Scheduler
from minispec.tree import Shape
from minispec.verify import Accept

MODEL = tiny_model()
PAGES = 1000  # so that nothing else is as large as a layer's keys; of all tests, since they share what is compiled
BLOCK, REGION = "a block or a head", "a small function"
GATHERING = "rows to gather"  # worked out for a step by eager attention, which FlexAttention does not need
VIEWS = {  # operations that start no kernel
    "view", "reshape", "as_strided", "expand", "expand_as", "slice", "select", "unsqueeze", "squeeze", "transpose", "t",
    "split", "split_with_sizes", "unbind", "permute", "alias", "detach", "chunk", "narrow", "view_as", "flatten",
    "empty", "empty_like", "empty_strided", "new_empty", "_reshape_alias", "resolve_conj", "resolve_neg", "lift_fresh",
}  # fmt: skip


def eagle3(steps: int, topk: int, nodes: int) -> BeamDrafter:
    """Return a drafter around a random EAGLE-3 head."""
    return BeamDrafter(random_head(Eagle3Head, MODEL, taps=(1, 2), own_lm_head=True),
                       rounds=steps, topk=topk, nodes=nodes)  # fmt: skip


def forced(drafter: Drafter, **how: object) -> Scheduler:
    """Return a scheduler whose small functions are compiled for batches of one."""
    scheduler = build(MODEL, drafter, host_looks=False, pages=PAGES, **how)
    compiler = DirectStep
    scheduler.engine.compile_small(compiler, lambda batch, nodes: batch == 1)
    return scheduler


def swapped(fresh: Scheduler, scheduler: Scheduler, low: tuple[float, float]) -> list[str]:
    """Serve sampled requests exactly, then under thresholds set after a warm-up; returns what ran compiled then.

    What stands for compiled functions and for captured steps keeps the acceptance of its making, as a graph does.
    """
    engine, ran = scheduler.engine, []

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        made = copy.copy(engine)
        made.accept = Accept()  # as it was when the function was compiled

        def compiled(owner: object, *given: Any) -> Any:
            ran.append(function.__name__)
            return function(made if owner is engine else owner, *given)

        return compiled

    engine.compile_small(compiler, lambda batch, nodes: True)
    served = lambda s, **wish: (  # noqa: E731
        found := mixed_requests(4, max_new_tokens=16, **wish),
        run(s, found),
        [r.output_ids for r in found],
    )[-1]
    sampled = {"temperature": 1.2}
    exact, wanted = served(scheduler, **sampled), served(fresh, **sampled)
    assert exact != wanted and "_after_blocks" in ran, "thresholds so low change tokens"
    engine.graphs = {(step, needs): None for step in engine.decodes.values() for needs in COMPILED}
    scheduler.engine.set_thresholds(low)
    assert {needs for _, needs in engine.graphs} == {GREEDY}, "of decode steps, greedy graphs alone are as they were"
    engine.graphs.clear()
    scheduler.flush_cache()
    ran.clear()
    assert served(scheduler, **sampled) == wanted, "as if it had begun with these thresholds"
    found = list(ran)
    assert served(scheduler, temperature=0.0) == served(fresh, temperature=0.0)
    assert "_after_blocks" in ran[len(found) :], "greedy steps run compiled as before"
    return found


def test_thresholds_swapped_after_a_warm_up_are_those_of_an_engine_that_began_with_them() -> None:
    low = (0.02, 0.3)
    fresh, scheduler = (build(MODEL, eagle3(2, 3, 10), running=4, thresholds=given) for given in (low, None))
    assert "_after_blocks" not in swapped(fresh, scheduler, low), "what is compiled holds the old thresholds"


def test_a_compiled_function_that_goes_on_after_a_swap_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    low = (0.02, 0.3)
    fresh, scheduler = (build(MODEL, eagle3(2, 3, 10), running=4, thresholds=given) for given in (low, None))
    never = property(lambda engine: False, lambda engine, value: None)
    monkeypatch.setattr(Engine, "amended", never, raising=False)
    with pytest.raises(AssertionError, match="as if it had begun"):
        swapped(fresh, scheduler, low)


def within(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose work the profiler lists under a name."""

    def call(*given: Any) -> Any:
        with record_function(name):
            return function(*given)

    return call


def operations(engine: Engine, nodes: int) -> tuple[Counter[str], int]:
    """Return what one decode step runs outside of blocks and small functions, and its largest allocation in bytes."""
    model, drafter = engine.model, engine.drafter
    model.run_block = within(BLOCK, model.run_block)
    engine.small.compiled = [within(REGION, function) for function in engine.small.compiled]
    if isinstance(drafter, BeamDrafter):
        drafter.run_network = within(BLOCK, drafter.run_network)
        drafter.take_in = within(BLOCK, drafter.take_in)
        drafter.small.compiled = [within(REGION, function) for function in drafter.small.compiled]
    buffers = engine.decodes[1, Shape(nodes, nodes > 1)]
    strips = mock.patch.object(PagedGather, "_strips", within(GATHERING, PagedGather._strips))
    with strips, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        engine.decode(buffers, GREEDY)
    top: Counter[str] = Counter()

    def walk(events: list[Any]) -> Iterator[str]:
        for event in events:
            if event.name in (BLOCK, REGION, GATHERING):
                yield event.name
            elif event.name.startswith(("aten::", "minispec::")):
                yield event.name.partition("::")[2]
            else:
                yield from walk(event.cpu_children)

    top.update(walk([event for event in found.events() if event.cpu_parent is None]))
    for name in (*VIEWS, GATHERING):
        top.pop(name, None)
    return top, max(abs(event.self_cpu_memory_usage) for event in found.events())


# Running requests, nodes, most operations, kinds of small functions.
STEPS = [(lambda: eagle3(3, 3, 8), 2, 8, 60, 5), (Plain, 1, 1, 25, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "running", "nodes", "most", "kinds"), STEPS, ids=["eagle3-3/3/8", "plain"])
def test_a_step_is_a_handful_of_launches(
    drafter: Callable[[], Drafter],
    running: int,
    nodes: int,
    most: int,
    kinds: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace_only(monkeypatch, tmp_path)  # what is counted lies around the functions
    with torch.inference_mode():
        scheduler = forced(drafter(), running=running)
        engine = scheduler.engine
        run(scheduler, [request("r", [3, 14, 15, 9, 2, 6], max_new_tokens=12)])  # compiles, and then calls directly
        engine.decodes[1, Shape(nodes, nodes > 1)].upload([1], ())
        functions = [*engine.small.compiled, *(engine.drafter.small.compiled if kinds > 2 else ())]
        assert len(functions) == kinds and all(len(function.calls) > 0 for function in functions)
        found, largest = operations(engine, nodes)
    calls = found.pop(BLOCK)
    assert calls == 3 + (3 if nodes > 1 else 0), "three layers; two rounds after the root's, and the accepted path"
    assert found[REGION] == 2 + (3 if nodes > 1 else 0)
    print(f"{nodes} nodes: {found.total()} operations outside, small functions included: {dict(found)}")
    assert found.total() <= most, dict(found)
    layer = engine.kv.pool.numel() // 6 * 4
    assert largest < layer / 2, "nothing of the size of a layer's keys and values is allocated"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 3, 8), (1, 1, 2)], ids=lambda shape: "/".join(map(str, shape)))
def test_tokens_and_trees_are_those_of_the_eager_functions(
    shape: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shape[1] == 1:
        trace_only(monkeypatch, tmp_path)  # the tree's are compiled by Inductor
    with torch.inference_mode():
        drafter = eagle3(*shape)
    scheduler = forced(drafter, running=2)
    engine, compared = scheduler.engine, Counter()

    def compare(compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            state = [engine.lens, engine.root, engine.sampling._ints, *engine.kv.pools]
            before = [tensor.clone() for tensor in state]
            expected = torch.utils._pytree.tree_leaves(eager(*given))
            after = [tensor.clone() for tensor in state]
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
            out = compiled(*given)
            for a, b in zip(expected, torch.utils._pytree.tree_leaves(out), strict=True):
                assert (a is None) == (b is None)
                if a is not None and a.numel():
                    assert a.stride() == b.stride() and torch.allclose(a, b, rtol=1e-5, atol=1e-5)
            assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
            compared[eager.__name__] += 1
            return out

        return call

    for owner in (engine, drafter):
        small = owner.small
        small.compiled = [compare(*pair) for pair in zip(small.compiled, small.eager, strict=True)]
    requests = mixed_requests(count=3, max_new_tokens=10)
    run(scheduler, requests, stagger=12)
    assert all(r.output_ids == reference(MODEL, r) for r in requests)
    rounds = {1: set(), 2: {"_close"}}.get(shape[0], {"_round", "_close"})  # a tree of one round has no close
    assert {"_before_blocks", "_after_blocks", "_open"} | rounds == set(compared)
    assert min(compared.values()) > 3


def test_on_cuda_a_layers_products_of_one_row_alone_are_tuned() -> None:
    """Tuning makes a start long: products of several rows and LM heads gain nothing by it, and attention is given."""
    with FakeTensorMode():
        one, two, several = (torch.zeros(*sizes, 8, device="cuda") for sizes in ((1, 1), (1, 2), (2, 1)))
    assert tuning(Block.forward, (None, one)) and not tuning(Engine._after_blocks, (None, one))
    assert not any(tuning(Block.forward, (None, x)) for x in (two, several, torch.zeros(1, 1, 8)))
