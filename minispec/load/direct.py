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

Read next: `model.py`, `beam.py` and `engine.py`, whose functions are compiled here; `warm_up.py`, which runs them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from minispec.compiled import Key, Step, eagerly, runs_eagerly
from minispec.load.files import Loaded, NotMade, described, find

# Attributes of a tensor by which Dynamo knows that a dimension may have any length.
MARKS = ("_dynamo_weak_dynamic_indices", "_dynamo_propagated_dynamic_indices", "_has_dynamo_dim_marking")


class _Mode(threading.local):
    """How this thread calls compiled functions."""

    compiles = True  # whether it makes what is in no file
    outputs: dict[Any, Any] | None = None  # what functions gave in a rehearsal; None: this is none
    lacks = False  # whether a function of the rehearsal is in no file yet, since another process makes it


_mode = _Mode()


@contextmanager
def from_files() -> Iterator[None]:
    """Within this, what is in no file is not compiled; NotMade is raised in its place."""
    _mode.compiles = False
    try:
        yield
    finally:
        _mode.compiles = True


@contextmanager
def rehearsal() -> Iterator[_Mode]:
    """Within this, functions get files and never run: all but the first of a graph's calls return what it returned.

    That one runs eagerly. What another process is making is left to it, and `lacks` of the result says so. So tensors
    may be fake, and nothing waits.
    """
    _mode.outputs, _mode.lacks = {}, False
    try:
        yield _mode
    finally:
        _mode.outputs = None


loaded: dict[Step, list[Loaded]] = {}  # the graphs of this process, by function; all engines share them


class DirectStep:
    """A function compiled for inference; see the head of this file."""

    def __init__(self, function: Step) -> None:
        self.function = function
        self.calls: weakref.WeakKeyDictionary[Key, dict[tuple, Step]] = weakref.WeakKeyDictionary()
        self._at: int | None = None  # where the key is among the arguments

    def __call__(self, owner: Any, *args: Any) -> Any:
        """Return function(owner, *args); what the function writes is written in place."""
        if runs_eagerly():
            return self.function(owner, *args)
        if self._at is None:
            self._at = next(at for at, arg in enumerate(args) if isinstance(arg, Key))
        key: Key = args[self._at]
        if _mode.outputs is not None:
            return self._rehearse((owner, *args), key, _mode.outputs)
        calls, given = self.calls.setdefault(key.original or key, {}), _given(args)
        call = calls.get(given)
        if call is None:
            call = calls[given] = self._find((owner, *args), key).call
        return call(owner, *args)

    def _find(self, args: Sequence[Any], key: Key, rehearses: bool = False) -> Loaded:
        """Return the compiled function for a key: one that is loaded already, or that of a file, or a new one."""
        graphs = loaded.setdefault(self.function, [])
        if (found := next((graph for graph in graphs if graph.fits(args)), None)) is None:
            with any_size(args[1:], key):
                name = f"{_given(args[1:])} {_shapes(args)}"
                found = find(self.function, args, name, _mode.compiles, rehearses)
            graphs.append(found)
        return found

    def _rehearse(self, args: Sequence[Any], key: Key, outputs: dict[Any, Any]) -> Any:
        try:
            at = (id(self._find(args, key, rehearses=True)), str(_shapes(args)))
        except NotMade:
            at, _mode.lacks = (id(self), f"{_given(args[1:])} {_shapes(args)}"), True
        if at not in outputs:
            with eagerly():
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
    members = [member for member in tree_leaves(args) if isinstance(member, Tensor)]
    marked: list[tuple[Tensor, tuple[int, ...]]] = []
    how = {}
    if key.of_batch:
        marked = [(tensor, (0,)) for tensor in (*key.of_batch, *members) if tensor.dim()]
    elif key.any_size:
        marked = [*key.any_size, *((m, (0, 2 if m.dim() == 4 else 1)) for m in members if not key.few)]
        # Two sizes that happen to be equal now need not be so later, and one that is one now need not stay so.
        how = {"use_duck_shape": False, "backed_size_oblivious": True}
    if not marked:
        yield
        return
    from torch.fx.experimental import _config  # here, since importing it takes a while

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


def _shapes(args: Sequence[Any]) -> list[Any]:
    """Return what is known of the arguments' tensors, without the sizes that `any_size` leaves open."""
    return [described(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
