"""What is done with an engine before it serves: all graphs are made, and steps are timed.

Graphs are made by running steps on padding. Such a step serves no request and writes to page 0 and slot 0 alone, so it
may run between two other steps. A server on a CPU loads its graphs while it serves, a step at a time (`warming.py`). In
all other cases the graphs are made first.

Read next: `engine.py`, whose steps these are; `files.py` for graphs; `makers.py`, processes that make them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from minispec.buffers import DecodeBuffers, PrefillBuffers
from minispec.compiled import NotMade, calling
from minispec.engine import Engine
from minispec.load.files import has_compiler
from minispec.load.makers import MADE, Makers
from minispec.sampling import GREEDY, Needs
from minispec.tree import Shape

Step = DecodeBuffers | PrefillBuffers

TIMED_CONTEXT = 512  # committed rows of the slots on which steps are timed


def steps_of(engine: Engine) -> list[Step]:
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

    start: that of `load_graphs`. Without it all is compiled here, which takes long. If it is stopped, the cache has the
    graphs that are made.
    """
    todo = steps_of(engine)
    count, compiles = len(todo), engine.device.type == "cuda" or has_compiler()
    with suppress(NotMade):  # what the processes have not made is compiled here
        for name in load_graphs(engine, todo, start) if start is not None else ():
            if name:
                progress(f"warm-up {count - len(todo)}/{count}: {name}")
            else:
                time.sleep(0.1)
    for number, step in enumerate(todo, count + 1 - len(todo)):
        progress(f"warm-up {number}/{count}: {step.name}")
        make_graphs(engine, step, compiles=compiles)


def load_graphs(engine: Engine, todo: list[Step], start: Callable[[int], Makers]) -> Iterator[str]:
    """Load from files what steps lack, and take each step that is `ready` off `todo`.

    start: starts processes that make files for so many steps (`Build.makers`), if a file is missing. Yields the name of
    each step, and "" while none can be loaded. Raises NotMade if the processes have ended and a file is still missing.
    """
    makers: Makers | None = None
    try:
        while todo:
            ended = makers is not None and makers.ended
            step = next((step for step in todo if makers is None or step.name in makers.made), None)
            if step is not None and make_graphs(engine, step, compiles=False):
                todo.remove(step)
                yield step.name
            elif makers is None:
                makers = start(len(todo))
            elif step is not None or ended:  # a full disk, say
                raise NotMade(f"{step.name} was compiled, and is in no file" if step else makers.last_words)
            else:
                yield ""
    finally:
        if makers is not None:
            makers.close()


def rehearse_step(engine: Engine, step: Step) -> bool:
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
def make_graphs(engine: Engine, step: Step, **how: Any) -> bool:
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
