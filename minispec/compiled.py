"""Which functions of a step run compiled, and when.

The blocks (layers) of the target, a drafter's network, and the small functions around them are compiled separately, on
CUDA and on a CPU alike (`load/files.py`). On CUDA the whole step is captured as a CUDA graph besides
(`cuda/graphs.py`).

Here a graph is what torch.compile makes of a function for one shape. A step is `ready` when all its graphs are made.
Until then it runs all its functions eagerly (`within_step`), so a server can answer before its graphs are made.

Read next: `engine.py`, whose steps these are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

Step = Callable[..., Any]  # function(owner, *args): it takes and returns tensors, alone or in named tuples
Compiler = Callable[[Step], Step]


class Key:
    """The one argument of a compiled function that holds all the function's tensors with fixed addresses.

    A key is a layer's attention, a step's buffers or a beam. The function's graph is found by the identity of the key.
    """

    ready = True  # if the key is a step: whether all its graphs are made
    original: Key | None = None  # if this key is a copy: the key whose tensors and graphs it shares
    few = False  # whether the key's rows are so few that each number of rows has its own graph

    @property
    def of_batch(self) -> Sequence[Tensor]:
        """Tensors of the key with a row, or several, for each of two requests or more; none if there is one request.

        If the key has such tensors, a function's graph takes other batches too. All arguments of the function must have
        such rows as well, except numbers in tensors without dimensions.
        """
        return ()

    @property
    def any_size(self) -> Sequence[tuple[Tensor, tuple[int, ...]]]:
        """Tensors of the key, each with its dimensions that may have any length.

        If the key has such tensors, one graph serves all their lengths, and the lengths of the function's arguments can
        change too. By default a key has none.
        """
        return ()


# Whether to compile for a step: arguments are its batch size and the nodes of its trees.
CompileFor = Callable[[int, int], bool]


class Small:
    """Small functions around compiled blocks. They are compiled too, but only for steps in which compiling pays."""

    def __init__(self, *functions: Step) -> None:
        self.eager = self.compiled = functions
        self.choice: CompileFor = lambda batch, nodes: False

    def compile(self, compiler: Compiler, choice: CompileFor) -> None:
        """Compile the functions for the steps that `choice` names."""
        self.compiled, self.choice = tuple(map(compiler, self.eager)), choice

    def of(self, key: Any) -> Sequence[Step]:
        """Return the functions, compiled or not, for a key that has `batch` and `nodes`."""
        return self.compiled if self.choice(key.batch, key.nodes) else self.eager


class NotMade(RuntimeError):
    """No file has a compiled function, and it was not to be compiled here."""


class Mode(threading.local):
    """How compiled functions run in this thread."""

    eager = False  # as they are
    compiles = True  # whether what is in no file is compiled; else NotMade is raised
    prepared = False  # whether the compiler has been told its settings (`files.prepare`)
    outputs: dict[Any, Any] | None = None  # what they returned in a rehearsal, where none runs twice


mode = Mode()


@contextmanager
def calling(**how: Any) -> Iterator[None]:
    """Within this context compiled functions run so; `how` are members of `Mode`."""
    before = {name: getattr(mode, name) for name in how}
    vars(mode).update(how)
    try:
        yield
    finally:
        vars(mode).update(before)


def within_step(step: Key) -> AbstractContextManager[None]:
    """Within this context compiled functions run compiled if the step is `ready`, else eagerly."""
    return calling(eager=not (step.original or step).ready)
