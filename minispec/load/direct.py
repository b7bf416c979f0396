"""Compiled functions, found once for each layer and plan, and called without asking Dynamo each time.

torch.compile finds its graph anew at every call. It checks what the graph takes for granted and gathers the graph's
inputs from the arguments: some 100 microseconds a layer, a fifth of a plain step on a CPU. But between two steps of one
shape only the activations change: weights, keys and values and the plan's tensors stay where they are.

The one idea: ask once for every layer and plan. At the first call for them, `files.py` has a compiled function that is
right for them, in a file or made anew. Every later call goes there. The function reads its tensors from the arguments
and checks none of them, but Inductor's code refuses other sizes and strides.

One argument, the key, stands for all that stays (`compiled.Key`): a layer's attention under one plan, or a step's
buffers. What was found for it ends with it. If it names tensors of `any_size` or `of_batch`, one graph serves all keys
of its kind, whatever these sizes and those of the arguments, so that compiling takes a fraction of the time.

A rehearsal makes what steps need and runs next to nothing, so tensors may be fake. A function gets its file and runs
eagerly once; each later call for its graph returns what it returned then.

Read next: `model.py`, `beam.py` and `engine.py`, whose functions are compiled here; `warm_up.py`, which runs them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from minispec.compiled import Key, NotMade, Step, calling, mode
from minispec.load.files import Loaded, described, find

# Attributes of a tensor by which Dynamo knows that a dimension may have any length.
MARKS = ("_dynamo_weak_dynamic_indices", "_dynamo_propagated_dynamic_indices", "_has_dynamo_dim_marking")

loaded: dict[Step, list[Loaded]] = {}  # the graphs of this process, by function; all engines share them


class DirectStep:
    """A function compiled for inference; see the head of this file."""

    def __init__(self, function: Step) -> None:
        self.function = function
        self.calls: weakref.WeakKeyDictionary[Key, dict[tuple, Step]] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any) -> Any:
        """Return function(*args), the owner first; what the function writes is written in place."""
        if mode.eager:
            return self.function(*args)
        key = next(arg for arg in args if isinstance(arg, Key))
        if mode.outputs is not None:
            return self._rehearse(args, key, mode.outputs)
        calls, given = self.calls.setdefault(key.original or key, {}), _given(args)
        call = calls.get(given)
        if call is None:
            call = calls[given] = self._find(args, key).call
        return call(*args)

    def _find(self, args: Sequence[Any], key: Key) -> Loaded:
        """Return the compiled function for a key: one that is loaded already, or that of a file, or a new one."""
        graphs = loaded.setdefault(self.function, [])
        if (found := next((graph for graph in graphs if graph.fits(args)), None)) is None:
            with any_size(args[1:], key):
                found = find(self.function, args, _name(args))
            graphs.append(found)
        return found

    def _rehearse(self, args: Sequence[Any], key: Key, outputs: dict[Any, Any]) -> Any:
        at: tuple[Any, str]
        try:
            at = (id(self._find(args, key)), _name(args))
        except NotMade:  # another process makes it
            at = (NotMade, f"{self.function} {_name(args)}")
        if at not in outputs:
            with calling(eager=True):
                outputs[at] = self.function(*args)
        # A function that runs returns a tensor of its own each time, and what is compiled behind it may rely on that.
        return tree_map_only(Tensor, Tensor.clone, outputs[at])


@contextmanager
def any_size(args: Sequence[Any], key: Key) -> Iterator[None]:
    """Within this, a graph that is traced for such a key takes other batch sizes and lengths as well.

    Of the key's tensors it says which dimensions those are. With `of_batch` it is dimension 0 of the arguments. With
    `any_size` they are 0 and 1, as in x [B, T, d], or 2, as in the rotary factors [B, 1, T, D]; none where there are
    few rows. A size of one stays a constant of the graph. Others read some of these tensors too, so marks are removed.
    """
    from torch.fx.experimental import _config  # here, since importing it takes a while

    members = [member for member in tree_leaves(args) if isinstance(member, Tensor)]
    marked: list[tuple[Tensor, tuple[int, ...]]] = []
    how = {}
    if key.of_batch:
        marked = [(tensor, (0,)) for tensor in (*key.of_batch, *members) if tensor.dim()]
    elif key.any_size:
        marked = [*key.any_size, *((m, (0, 2 if m.dim() == 4 else 1)) for m in members if not key.few)]
        # Two sizes that happen to be equal now need not be so later, and one that is one now need not stay so.
        how = {"use_duck_shape": False, "backed_size_oblivious": True}
    for tensor, dimensions in marked:
        torch._dynamo.maybe_mark_dynamic(tensor, [at for at in dimensions if tensor.shape[at] != 1])
    try:
        with cast(Any, _config).patch(**how):
            yield
    finally:
        for tensor, _ in marked:
            for mark in MARKS:
                vars(tensor).pop(mark, None)


def _given(args: Sequence[Any]) -> tuple:
    """Return what decides which graph serves these arguments: sets, and which arguments and members are None."""
    return tuple([
        tuple([member is None for member in arg]) if isinstance(arg, tuple)
        else tuple(sorted(arg)) if isinstance(arg, frozenset) else arg is None
        for arg in args
    ])  # fmt: skip


def _name(args: Sequence[Any]) -> str:
    """Return what `_given` says, and what is known of the arguments' tensors but for sizes that `any_size` opens."""
    return f"{_given(args)} {[described(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]}"
