"""Which functions of a step run compiled, and when.

The blocks, a drafter's network, and the small functions around them are compiled separately. On CUDA torch.compile
autotunes their kernels and the whole step is captured as a graph (`cuda/graphs.py`). On a CPU they are called
directly (`cpu/direct.py`). `load/build.py` chooses the compiler.

A step that is not `ready` runs all its functions eagerly (`within_step`), so a server answers before its graphs are
made.

Read next: `engine.py`, whose steps these are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Step = Callable[..., Any]  # function(owner, *args); takes and returns tensors, alone or in named tuples
Compiler = Callable[[Step], Step]


def autotuned(function: Step) -> Step:
    """Return `function` compiled for CUDA: a graph for every shape, its kernels the fastest of several."""
    return torch.compile(function, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")


class Key:
    """The one argument that holds all of a function's tensors with fixed addresses.

    It is a layer's attention, a step's buffers or a beam. One check of its identity finds the function's graph
    (`cpu/direct.py`).
    """

    ready = True  # of a step: whether all its graphs are made
    original: Key | None = None  # the key that this one copies, whose tensors and graphs it shares
    few = False  # whether its rows are so few that each number of rows has its own graph
    moving: tuple[Tensor, ...] = ()  # its tensors that may be replaced; a new tuple announces a replacement

    @property
    def any_size(self) -> Sequence[tuple[Tensor, tuple[int, ...]]]:
        """Tensors with the dimensions that may have any length; then the arguments may have any length too."""
        return ()


CompileFor = Callable[[int, int, bool], bool]  # of a batch's size, nodes of trees, and whether any request samples


class Small:
    """Small functions around compiled blocks, which are compiled too if that pays for its time."""

    def __init__(self, *functions: Step) -> None:
        self.eager = self.compiled = functions
        self.choice: CompileFor = lambda batch, nodes, samples: False

    def compile(self, compiler: Compiler, choice: CompileFor) -> None:
        """Compile the functions for the steps that `choice` names."""
        self.compiled, self.choice = tuple(map(compiler, self.eager)), choice

    def of(self, key: Any, samples: bool) -> Sequence[Step]:
        """Return the functions, compiled or not, for a key with `batch` and `nodes`."""
        return self.compiled if self.choice(key.batch, key.nodes, samples) else self.eager


_step = threading.local()  # `eager`: whether compiled functions run eagerly in this thread's step


@contextmanager
def within_step(step: Key) -> Iterator[None]:
    """Within this, run compiled functions if this step is `ready`, else run them eagerly."""
    before, _step.eager = runs_eagerly(), not (step.original or step).ready
    try:
        yield
    finally:
        _step.eager = before


def runs_eagerly() -> bool:
    """Return whether this thread runs a step that is not ready."""
    return getattr(_step, "eager", False)
