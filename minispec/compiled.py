"""Which functions of a step run compiled, and when.

The blocks (layers) of the target, a drafter's network, and the small functions around them are compiled separately. On
CUDA torch.compile autotunes their kernels, and the whole step is captured as a CUDA graph (`cuda/graphs.py`). On a CPU
compiled functions come from files where there are any (`cpu/files.py`), and are called directly (`cpu/direct.py`).
`load/build.py` chooses the compiler.

Here a graph is what torch.compile makes of a function for one shape. A step is `ready` when all its graphs are made.
Until then it runs all its functions eagerly (`within_step`), so a server can answer before its graphs are made.

Read next: `engine.py`, whose steps these are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Step = Callable[..., Any]  # function(owner, *args): it takes and returns tensors, alone or in named tuples
Compiler = Callable[[Step], Step]


_tuned: set[Step] = set()


def tuned(function: Step) -> Step:
    """Mark a function with an LM head: on CUDA the kernel of this product is searched for, except in float32."""
    _tuned.add(function)
    return function


def autotuned(function: Step, heads: bool = True) -> Step:
    """Return `function` compiled for CUDA, with as much of "max-autotune" as pays. See `shared_by_batches`.

    heads: whether the kernels of LM heads are searched for.

    On an H200 the search found a kernel of Triton's that beat cuBLAS's for LM heads, and none for a large model's block
    with several rows, and it took 4 to 8 seconds a product (docs/log.md). In a block that reads one row, Triton joins
    each product with the operations around it; "coordinate descent" searches the tile sizes of these kernels. Attention
    is never tuned: its kernel is fixed, and a search would run it on block lists as long as the whole pool.
    """
    if function in _tuned:
        return shared_by_batches(_compiled(function, {"max_autotune_gemm": True} if heads else None))
    many, one = _compiled(function, None), _compiled(function, {"coordinate_descent_tuning": True})

    def call(owner: Any, *args: Any) -> Any:
        first = next((arg for arg in args if isinstance(arg, Tensor) and arg.dim() > 1), None)  # [B, N, ...]
        reads_one_row = first is not None and first.shape[:2].numel() == 1
        return (one if reads_one_row else many)(owner, *args)

    return shared_by_batches(call)


def _compiled(function: Step, options: dict[str, Any] | None) -> Step:
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


# Attributes of a tensor by which torch.compile knows that a dimension may have any length; it gives them to the outputs
# of such a graph too.
_MARKS = ("_dynamo_weak_dynamic_indices", "_dynamo_propagated_dynamic_indices", "_has_dynamo_dim_marking")


def shared_by_batches(compiled: Step) -> Step:
    """Return a function of torch.compile with a graph for one request and another for all larger batches.

    This holds for functions whose key names tensors `of_batch`. All others have a graph for every shape; FlexAttention,
    for one, takes no batch of any length. They read some of the same tensors, so the marks are removed after each call.
    """

    def call(owner: Any, *args: Any) -> Any:
        """Call it with the batch marked as a dimension of any length, where the key says so."""
        key = next((arg for arg in (owner, *args) if isinstance(arg, Key)), None)
        if key is None or not key.of_batch:
            return compiled(owner, *args)
        marked = [leaf for leaf in (*key.of_batch, *tree_leaves(args)) if isinstance(leaf, Tensor) and leaf.dim()]
        for tensor in marked:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        result = compiled(owner, *args)
        for leaf in (*marked, *tree_leaves(result)):
            for mark in _MARKS if isinstance(leaf, Tensor) else ():
                vars(leaf).pop(mark, None)
        return result

    return call


class Key:
    """The one argument of a compiled function that holds all the function's tensors with fixed addresses.

    A key is a layer's attention, a step's buffers or a beam. The function's graph is found by the identity of the key
    (`cpu/direct.py`).
    """

    ready = True  # if the key is a step: whether all its graphs are made
    original: Key | None = None  # if this key is a copy: the key whose tensors and graphs it shares
    few = False  # whether the key's rows are so few that each number of rows has its own graph

    @property
    def of_batch(self) -> Sequence[Tensor]:
        """Tensors of the key with a row, or several, for each of two requests or more; none if there is one request.

        If the key has such tensors, CUDA's graph of a function takes other batches too (`shared_by_batches`). All
        arguments of the function must have such rows as well, except numbers in tensors without dimensions.
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


_step = threading.local()  # its member `eager`: whether this thread's step runs compiled functions eagerly


@contextmanager
def within_step(step: Key) -> Iterator[None]:
    """Within this context compiled functions run compiled if the step is `ready`, else eagerly."""
    before, _step.eager = runs_eagerly(), not (step.original or step).ready
    try:
        yield
    finally:
        _step.eager = before


def runs_eagerly() -> bool:
    """Return whether this thread runs a step that is not ready, so that compiled functions run eagerly."""
    return getattr(_step, "eager", False)
