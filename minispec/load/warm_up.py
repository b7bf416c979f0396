"""What is done with an engine before it serves: all graphs are made, and steps are timed.

Graphs are made by running steps on padding. Such a step serves no request and writes to page 0 and slot 0 alone, so it
may run between two other steps. A server on a CPU makes its graphs while it serves, a step at a time (`warming.py`). In
all other cases the graphs are made first.

Read next: `engine.py`, whose steps these are; `files.py` for graphs; `makers.py`, processes that make them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Any

import torch

from minispec.buffers import DecodeBuffers, PrefillBuffers
from minispec.compiled import NotMade, calling
from minispec.engine import Engine
from minispec.load.files import has_compiler
from minispec.load.makers import MADE, Makers
from minispec.sampling import GREEDY, Needs
from minispec.tree import Shape

TIMED_CONTEXT = 512  # committed rows of the slots on which steps are timed


def steps_of(engine: Engine) -> list[DecodeBuffers | PrefillBuffers]:
    """Return every kind of step that has graphs of its own, in the order in which a server makes them.

    Decode steps for one request come first, then prompts.
    """
    # Steps whose trees are all looked up use the graphs of other steps.
    decodes = [step for step in engine.decodes.values() if not step.shape.of_host]
    decodes.sort(key=lambda step: (step.batch, -step.nodes))
    first = sum(step.batch == engine.sizes.batch_sizes[0] for step in decodes)
    return [*decodes[:first], *engine.prefills.values(), *decodes[first:]]


def warm_up(engine: Engine, progress: Callable[[str], None], start: Callable[[int], Makers] | None = None) -> None:
    """Run every kind of step on padding, so that all is compiled.

    start: starts processes that make files for so many steps (`Build.makers`), if a file is missing. Without it all is
    compiled here, which takes long. If it is stopped, the cache has the graphs that are made.
    """
    steps, makers = steps_of(engine), None
    compiles = engine.device.type == "cuda" or has_compiler()
    with ExitStack() as stack:
        for number, step in enumerate(steps, 1):
            progress(f"warm-up {number}/{len(steps)}: {step.name}")
            if start is not None and not make_graphs(engine, step, compiles=False):
                makers = makers or stack.enter_context(closing(start(len(steps) + 1 - number)))
                makers.wait(step.name)
            make_graphs(engine, step, compiles=compiles)


def rehearse_step(engine: Engine, step: DecodeBuffers | PrefillBuffers) -> bool:
    """Make files of what a step runs, in an engine of `build.rehearse`; False if another process makes some of them."""
    outputs: dict[tuple, object] = {}
    return make_graphs(engine, step, outputs=outputs) and all(made is not NotMade for made, _ in outputs)


def make_files(rehearsal: Callable[[], AbstractContextManager[Engine]], threads: int) -> None:
    """Make the files of all steps, beside other processes that do; prints a line for each step that is complete."""
    torch.set_num_threads(threads)
    with rehearsal() as engine:
        todo = steps_of(engine)
        while todo:
            for step in list(todo):
                if rehearse_step(engine, step):
                    todo.remove(step)
                    print(f"{MADE}{step.name}", flush=True)
            time.sleep(0.1 if todo else 0)  # what is left is being made by others


@torch.inference_mode()
def make_graphs(engine: Engine, step: DecodeBuffers | PrefillBuffers, **how: Any) -> bool:
    """Make the graphs that a step lacks, by running it on padding, and set it `ready`, which is returned.

    how: members of `compiled.Mode`. With compiles=False graphs are taken from files; where one is in no file, or after
    an exception, the step runs eagerly, as before.
    """
    wants: Sequence[Needs] = (GREEDY,)
    if isinstance(step, DecodeBuffers) and engine.small.choice(step.batch, step.nodes):
        wants = engine.needs_of(step.batch)
    step.ready = True  # for this run
    try:
        if engine.device.type == "cpu" or "outputs" not in how:  # fake tensors hold no values
            step.upload([], ()) if isinstance(step, DecodeBuffers) else step.upload([])
        with calling(**how):
            for needs in wants:
                engine.run(step, needs)
    except BaseException as error:
        step.ready = False
        if not isinstance(error, NotMade):
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
