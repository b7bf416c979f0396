"""Which functions of a step run compiled, and when.

The blocks, a drafter's network, and the small functions around them are compiled apart. On CUDA torch.compile autotunes
their kernels and the whole step is captured as a graph (`graphs.py`). On a CPU they are called directly (`direct.py`).
Which compiler an engine has is decided where it is put together (`load/build.py`).

A step that is not `ready` runs all its functions as they are (`within_step`), so a server answers before its graphs
are made.

Read next: `engine.py`, whose steps these are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Step = Callable[..., Any]  # function(owner, *args) of tensors, alone or in named tuples; returns the like
Compiler = Callable[[Step], Step]


def autotuned(function: Step) -> Step:
    """Return `function` compiled for CUDA: a graph for every shape, its kernels the fastest of several."""
    return torch.compile(function, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")


class Key:
    """The argument of a compiled function that stands for all tensors which stay where they are between its calls.

    A function has one: a layer's attention, a step's buffers, a beam. `direct.py` says what it does with the rest.
    """

    ready = True  # of a step: whether all its graphs are there
    original: Key | None = None  # the key of which this is a copy but for a few values, with its tensors and graphs
    few = False  # whether there are so few rows that each number of them has a graph of its own
    moving: tuple[Tensor, ...] = ()  # its tensors that may be replaced; a new tuple announces a replacement

    @property
    def any_size(self) -> Sequence[tuple[Tensor, tuple[int, ...]]]:
        """Its tensors with dimensions that may have any length; then the arguments' lengths may be any, too."""
        return ()


CompileFor = Callable[[int, int, bool], bool]  # of a batch's size, nodes of trees, and whether any request samples


class Small:
    """Small functions around compiled blocks, which are compiled themselves where that pays for its time."""

    def __init__(self, *functions: Step) -> None:
        self.eager = self.compiled = functions
        self.choice: CompileFor = lambda batch, nodes, samples: False

    def compile(self, compiler: Compiler, choice: CompileFor) -> None:
        """From now on use what `compiler` makes of the functions where `choice` says so."""
        self.compiled, self.choice = tuple(map(compiler, self.eager)), choice

    def of(self, key: Any, samples: bool) -> Sequence[Step]:
        """Return the functions for a key, which has `batch` and `nodes`, compiled or not."""
        return self.compiled if self.choice(key.batch, key.nodes, samples) else self.eager


_step = threading.local()  # of a thread: whether the compiled functions of its step run as they are, `eager`


@contextmanager
def within_step(step: Key) -> Iterator[None]:
    """Within this, run what is compiled if all graphs of this step are there (`ready`), else all of it eagerly."""
    before, _step.eager = runs_eagerly(), not (step.original or step).ready
    try:
        yield
    finally:
        _step.eager = before


def runs_eagerly() -> bool:
    """Return whether a step runs that is not ready."""
    return getattr(_step, "eager", False)
