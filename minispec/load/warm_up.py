"""What is done with an engine before it serves: all graphs are made, and steps are timed.

Graphs are made by running steps on padding. Such a step serves no request and writes to page 0 and slot 0 alone, so it
may run between two other steps. A server on a CPU makes its graphs while it serves, a step at a time (`warming.py`). In
all other cases the graphs are made first.

Read next: `engine.py`, whose steps these are; `direct.py` for graphs; `makers.py`, processes that make them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from minispec.buffers import DecodeBuffers, PrefillBuffers
from minispec.cpu.linear import own_heads
from minispec.engine import Engine
from minispec.load.direct import from_files, rehearsal
from minispec.load.files import NotMade
from minispec.load.makers import Makers
from minispec.sampling import GREEDY
from minispec.tree import Shape

TIMED_CONTEXT = 512  # committed rows of the slots on which steps are timed


def steps_of(engine: Engine) -> list[DecodeBuffers | PrefillBuffers]:
    """Return every kind of step that has graphs of its own, in the order in which a server that serves compiles them.

    Decode steps for one request come first, then short prompts. `warm_up` takes the reverse order.
    """
    prefills = [*engine.prefills.values()]
    short = [step for step in prefills if step.attend.graph == prefills[0].attend.graph]  # on a CPU all share one graph
    # Steps whose trees are all looked up use the graphs of other steps.
    decodes = [step for step in engine.decodes.values() if not step.shape.of_host]
    decodes.sort(key=lambda step: (step.batch, -step.nodes))
    first = sum(step.batch == engine.sizes.batch_sizes[0] for step in decodes)
    return [*decodes[:first], *short, *decodes[first:], *prefills[len(short) :]]


def shapes(engine: Engine) -> list[str]:
    """Return a name for every graph of blocks and of the code around them, the drafter's included.

    The names are in the order of `steps_of`. Not named here is the second graph of a model in which only some
    blocks have experts.
    """
    return [*dict.fromkeys(name for step in steps_of(engine) for name in graphs_of(engine, step))]


def graphs_of(engine: Engine, step: DecodeBuffers | PrefillBuffers) -> list[str]:
    """Return the names of the graphs that a step runs; a graph may serve several steps."""
    names = [f"target, {step.attend.graph}"]
    if isinstance(step, PrefillBuffers):
        return [*names, *(_head("target", engine.model) if step.blocks > 1 else ()),
                *engine.drafter.attends(step.plan, prefill=True)]  # fmt: skip
    if step.paths is not None:
        names += engine.drafter.attends(step.paths, prefill=False)
    if not engine.small.choice(step.batch, step.nodes):
        drafts = engine.drafter.network if step.nodes > 1 else None
        return [*names, *_head("target", engine.model), *_head("drafter", drafts)]
    return names + _around(engine, step)


def _head(owner: str, network: Any) -> list[str]:
    """Return the name of the graph of a network's LM head in code that is not compiled, if it has one."""
    return [f"LM head of the {owner}, several rows" for head in own_heads(network) if head.own_graph is not None]


def _around(engine: Engine, step: DecodeBuffers) -> list[str]:
    """Return the names of the graphs around the blocks of a step; batches of two and more share them."""
    batch = "one request" if step.batch == 1 else "several requests"
    names = []
    for needs in engine.needs_of(step.batch):
        names += [f"before the target, {step.nodes} nodes a tree", f"after the target, {step.nodes} nodes a tree, "
                  f"{', '.join(sorted(needs)) or 'greedy'}"]  # fmt: skip
        # Without coupling the drafter takes all batches for greedy ones.
        if step.nodes > 1:
            names += engine.drafter.small_graphs(step.nodes, bool(needs) and engine.accept.couples)
    return [f"{name}, {batch}" for name in names]


def warm_up(engine: Engine, progress: Callable[[str], None], start: Callable[[int], Makers] | None = None) -> None:
    """Run every kind of step on padding, so that all is compiled: on a CPU largest first, on CUDA one request's first.

    start: starts processes that make files for so many steps (`Build.makers`). Without it all is compiled here. This
    takes long. If it is stopped, the cache has the graphs that are made.
    """
    steps, total, begun = steps_of(engine), len(shapes(engine)), set[str]()
    if engine.device.type == "cuda":
        progress(f"compiling {total} graphs; fewer batch sizes in --cuda-graph-bs start sooner")
    else:
        steps.reverse()
    lacking = [step for step in steps if start is None or not make_graphs(engine, step, compiles=False)]
    with nullcontext() if start is None or not lacking else start(len(lacking)) as makers:
        for step in steps:
            if makers is not None and step in lacking:
                makers.wait(step.name)
            begun.update(graphs_of(engine, step))
            progress(f"warm-up {len(begun)}/{total}: {step.name}")
            if step in lacking:
                make_graphs(engine, step)


def rehearse_step(engine: Engine, step: DecodeBuffers | PrefillBuffers) -> bool:
    """Make files of what a step runs, in an engine of `build.rehearse`; False if another process makes some of them."""
    with rehearsal() as mode:
        _run_on_padding(engine, step, uploads=engine.device.type != "cuda")  # fake tensors hold no values
        return not mode.lacks


def _run_on_padding(engine: Engine, step: DecodeBuffers | PrefillBuffers, uploads: bool = True) -> None:
    """Run a step that serves no request: it writes to page 0 and slot 0 alone, so it may run between two others."""
    if isinstance(step, PrefillBuffers):
        if uploads:
            step.upload([])
        engine.run(step, GREEDY)
        return
    if uploads:
        step.upload([], ())
    for needs in engine.needs_of(step.batch) if engine.small.choice(step.batch, step.nodes) else (GREEDY,):
        engine.run(step, needs)


@torch.inference_mode()
def make_graphs(engine: Engine, step: DecodeBuffers | PrefillBuffers, compiles: bool = True) -> bool:
    """Make the graphs that a step lacks, and set it `ready`, which is returned.

    compiles: False takes them from files. Where one is in no file, or after an exception, the step runs eagerly, as
    before.
    """
    step.ready = True  # for this run
    try:
        with nullcontext() if compiles else from_files():
            _run_on_padding(engine, step)
    except NotMade:
        step.ready = False
    except BaseException:
        step.ready = False
        raise
    return step.ready


def time_steps(engine: Engine, batch: int) -> None:
    """Time the decode steps of a batch size, captured or not, as they will run, on slots with pages of their own.

    Padding would give wrong times: all its rows lie in one page, which stays in the processor's caches. No other step
    may run meanwhile.
    """
    kv, timed = engine.kv, engine.sizes.shapes_of(batch)
    rows = min(TIMED_CONTEXT, engine.sizes.context_length // 2)
    pages = min(kv.pages_for(rows + engine.sizes.tree_rows), len(kv.free) // batch)
    rows = min(rows, pages * kv.page_size - engine.sizes.tree_rows)
    if rows < 1 or len(timed) == 1:
        return
    slots, taken = range(1, batch + 1), kv.allocate(pages * batch)
    for index, slot in enumerate(slots):
        kv.map(slot, 0, taken[index * pages : (index + 1) * pages])
    # Shapes are timed in turn, and the least of several times counts, since a slow moment of the machine at start must
    # not decide how large trees are.
    times = [[step_seconds(engine, slots, shape, rows) for shape in timed] for _ in range(3)]
    engine.step_seconds |= {(batch, s): min(t) for s, t in zip(timed, zip(*times, strict=True), strict=True)}
    for slot in slots:
        kv.unmap(slot)
        engine.lens[slot : slot + 1].zero_()
    kv.give_back(taken[::-1])


def step_seconds(engine: Engine, slots: Sequence[int], shape: Shape, rows: int) -> float:
    """Return the time of one decode step for slots with `rows` rows each; the tokens that it emits are dropped."""
    buffers = engine.decodes[engine.batch_of(len(slots)), shape]
    engine.lens[1 : len(slots) + 1].fill_(rows)
    start = time.perf_counter()
    buffers.upload(slots, ())
    engine.run(buffers, GREEDY)
    engine.collect(engine.pending([], buffers))  # waits for the device
    return time.perf_counter() - start
