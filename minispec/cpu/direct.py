"""Compiled functions on a CPU, called without asking Dynamo each time.

torch.compile finds its graph anew at every call. It checks what the graph takes for granted and gathers the graph's
inputs from the arguments: some 100 microseconds a layer, a fifth of a plain step. But between two steps of one shape
nothing of that changes except the activations: weights, keys and values and the plan's tensors stay where they are.

The one idea: ask once for every layer and plan. The first call goes through torch.compile, which compiles where it must
and checks its guards; the backend below notes which compiled graph it ran, and on which tensors. Every later call runs
that graph on those tensors, with the new activations in place of the old ones. It has no way to recompile: the graph
itself refuses inputs of other sizes and strides.

One argument, the key, stands for all that stays (`compiled.Key`): a layer's attention under one plan, or a step's
buffers. The notes on it end with it. If it names tensors of `any_size`, one graph serves all keys of its kind, whatever
these sizes and those of the arguments, so that compiling takes a fraction of the time. If it has `moving` tensors,
others may take their places between calls, of other sizes too.

A step that is not `ready` compiles nothing (`compiled.py`). Its graphs are made by running it on padding, one graph a
run: where a second is lacking, the run ends (`one_graph`).

Read next: `model.py`, `beam.py` and `engine.py`, whose functions are compiled here.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from minispec.compiled import Key, Step, runs_eagerly


class Ran(NamedTuple):
    """What the backend noted: a compiled graph, the tensors and sizes it ran on, and what it returned."""

    graph: Callable[..., Sequence[Tensor]]
    inputs: Sequence[Tensor | int]
    outputs: Sequence[Tensor]
    sizes: Sequence[tuple[int, int, int]]  # of inputs that are numbers: the input, a tensor among them, its dimension


class _Noted(threading.local):
    """What a call through torch.compile tells the backend below, what the backend tells it, and what both are told."""

    ran: Ran | None = None  # the newest, for the call under way to take away
    left = math.inf  # graphs that may be made
    cached_only = False  # whether a graph that Inductor's cache lacks is refused
    lacked = False  # whether one was


_noted = _Noted()


class NotCached(RuntimeError):
    """A graph is not in Inductor's cache, and was to be taken from there."""


class OneMade(RuntimeError):
    """One graph was made, as was wanted, and another may be lacking."""


@contextmanager
def one_graph(cached_only: bool) -> Iterator[None]:
    """Within this, make one graph on a CPU at most; where another may be lacking, OneMade is raised.

    cached_only: take it from Inductor's cache; one that is not there raises NotCached at the end. A graph of the cache
    takes half a second, one that must be compiled ten or twenty.
    """
    _noted.left, _noted.cached_only, _noted.lacked = 1, cached_only, False
    try:
        yield
    except Exception as error:  # Dynamo has wrapped what the backend raised
        if _noted.lacked:
            raise NotCached("a graph is not in Inductor's cache") from error
        raise
    finally:
        _noted.left, _noted.cached_only = math.inf, False


def prepare() -> None:
    """Import Inductor, for which the first graph would wait, and tell it what every process of ours must agree on.

    What is told is part of the key that it looks graphs up by, so all who share its cache call this.
    """
    # Every function is traced once, so what the operations of one trace tell the next is not worth keeping.
    torch._dynamo.config.fake_tensor_cache_enabled = False
    os.environ.setdefault("TORCH_WARM_POOL", "0")  # processes that compile for CUDA alone
    from torch._inductor import compile_fx, config, cpp_builder, cpu_vec_isa  # noqa: F401

    # Unset, it would be missing from the key, and code be made for another number of threads.
    config.cpp.threads = torch.get_num_threads()
    # A compiler that knows the newest instructions knows all. Unless told so, Inductor compiles a long file for each
    # kind, which takes fifteen seconds.
    newest = [cpp_builder.get_cpp_compiler(), "-mavx512bf16", "-mamx-bf16", "-E", "-x", "c++", os.devnull]
    if config.cpp.vec_isa_ok is None and subprocess.run(newest, capture_output=True, check=False).returncode == 0:
        config.cpp.vec_isa_ok = True
    compiler_known()


@functools.cache
def compiler_known() -> threading.Thread:
    """Return the thread that asks which vector instructions compiler and processor have; the first call starts it.

    The first graph would wait for that. It is other processes that work, beside the loading of a model. With an empty
    cache they compile for ten seconds.
    """
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    thread = threading.Thread(target=valid_vec_isa_list, name="compiler", daemon=True)
    thread.start()
    return thread


def cache_is_empty() -> bool:
    """Return whether Inductor's cache has no graph at all, so that it need not be asked for any."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return not any((Path(cache_dir()) / name).is_dir() for name in ("aotautograd", "fxgraph"))


def _lacking(*args: Any, **options: Any) -> NoReturn:
    """Stand for Inductor's compiler, which is called where its cache has no answer."""
    _noted.lacked = True
    raise NotCached


def _inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Sequence[Tensor]]:
    """A backend for torch.compile: its own, with a note of every call. Dynamo keeps it, so it must keep no tensor."""
    sizes = _sizes(graph)  # before compiling, which takes the graph apart
    _noted.left -= 1
    inductor: Any = lookup_backend("inductor")  # unlike other backends it takes options
    compiled = inductor(graph, inputs, **({"inner_compile": _lacking} if _noted.cached_only else {}))

    def run(*flat: Tensor | int) -> Sequence[Tensor]:
        outputs = compiled(*flat)
        _noted.ran = Ran(compiled, flat, outputs, sizes)
        return outputs

    return run


def _sizes(graph: torch.fx.GraphModule) -> list[tuple[int, int, int]]:
    """Return for each input of a graph that is a number which input's size it is: (input, tensor, dimension).

    Other numbers are strides and offsets of views, which stay the same for a key.
    """
    examples = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    numbers = [(place, value.node.expr) for place, value in enumerate(examples) if isinstance(value, torch.SymInt)]
    dimensions = [  # Dynamo may have found two numbers to be the same one: then both are the first tensor's
        (place, dimension, size.node.expr)
        for place, value in enumerate(examples) if isinstance(value, Tensor)
        for dimension, size in enumerate(cast(Sequence[Any], value.shape)) if isinstance(size, torch.SymInt)
    ]  # fmt: skip
    sized = {size: (place, dimension) for place, dimension, size in reversed(dimensions)}
    return [(number, *sized[symbol]) for number, symbol in numbers if symbol in sized]


class DirectStep:
    """A function compiled for inference on a CPU; see the head of this file.

    The owner and every tensor that is not an argument must stay the same objects as long as the key lives.
    """

    def __init__(self, function: Step) -> None:
        self.function = function
        self.traced = torch.compile(function, backend=_inductor, fullgraph=True, dynamic=False)
        self.calls: weakref.WeakKeyDictionary[Key, dict[tuple, DirectCall]] = weakref.WeakKeyDictionary()
        self._at: int | None = None  # where the key is among the arguments

    def __call__(self, owner: Any, *args: Any) -> Any:
        """Return function(owner, *args); what the function writes is written in place."""
        if runs_eagerly():
            return self.function(owner, *args)
        if self._at is None:
            self._at = next(at for at, arg in enumerate(args) if isinstance(arg, Key))
        key: Key = args[self._at]
        calls, given = self.calls.setdefault(key.original or key, {}), _given(args)
        call = calls.get(given)
        if call is not None:
            return call(owner, args, key.moving)
        if _noted.left < 1:
            raise OneMade
        _noted.ran = None
        with any_size(args, key):
            out = self.traced(owner, *args)
        ran, _noted.ran = _noted.ran, None
        if ran is not None:  # None where torch.compile is told to run eagerly
            calls[given] = DirectCall(owner, args, ran, out, key.moving)
        return out


@contextmanager
def any_size(args: Sequence[Any], key: Key) -> Iterator[None]:
    """Within this, a graph that is traced for such a key takes other batch sizes and lengths as well.

    Of the key's tensors it says which dimensions those are. Of the arguments they are 0 and 1, as in x [B, T, d], or 2,
    as in the rotary factors [B, 1, T, D]; none where there are few rows. A size of one stays a constant of the graph.
    """
    if not key.any_size:
        yield
        return
    marked = list(key.any_size)
    if not key.few:
        members = [member for arg in args for member in (arg if isinstance(arg, tuple) else (arg,))]
        marked += [(member, (0, 2 if member.dim() == 4 else 1)) for member in members if isinstance(member, Tensor)]
    for tensor, dimensions in marked:
        torch._dynamo.maybe_mark_dynamic(tensor, [at for at in dimensions if tensor.shape[at] != 1])
    from torch.fx.experimental import _config  # here, since importing it takes a while

    # Two sizes that happen to be equal now need not be so later, and a computed one that is one now need not stay so.
    with cast(Any, _config).patch(use_duck_shape=False, backed_size_oblivious=True):
        yield


def _given(args: Sequence[Any]) -> tuple:
    """Return what decides which graph serves these arguments: sets, and which arguments and members are None."""
    return tuple([
        tuple([member is None for member in arg]) if isinstance(arg, tuple)
        else arg if isinstance(arg, frozenset) else arg is None
        for arg in args
    ])  # fmt: skip


class DirectCall:
    """The compiled graph of a function for one key, with all its inputs but the arguments."""

    def __init__(self, owner: Any, args: Sequence[Any], ran: Ran, out: Any, moving: tuple[Tensor, ...]) -> None:
        self.owner, self.graph, self.inputs, self.moving = owner, ran.graph, list(ran.inputs), moving
        # Where the moving tensors lie among the inputs, in their order, and the numbers that are sizes of theirs.
        self.moves = [[place for place, given in enumerate(ran.inputs) if given is tensor] for tensor in moving]
        assert all(self.moves), "a moving tensor reaches the graph as another one, which would stay while it moves"
        self.sizes = [size for size in ran.sizes if any(size[1] in places for places in self.moves)]
        self.order, self.shape = _places(ran.outputs, out)
        members = [member for arg in args if isinstance(arg, tuple) for member in arg]
        assert all(member is None or isinstance(member, Tensor) for member in members), "a tuple holds tensors only"
        assert not any(isinstance(arg, (bool, int, float, str)) for arg in args), "a number would stay what it was"
        tensors = [  # index of the argument, index within it if it is a tuple, tensor
            (index, member, tensor)
            for index, arg in enumerate(args)
            for member, tensor in (enumerate(arg) if isinstance(arg, tuple) else [(None, arg)])
            if isinstance(tensor, Tensor)
        ]
        assert len({id(tensor) for *_, tensor in tensors}) == len(tensors), "one tensor stands for two arguments"
        # An argument that the function does not read is no input of the graph.
        self.places = [
            (place, index, member)
            for place, given in enumerate(ran.inputs)
            for index, member, tensor in tensors
            if given is tensor
        ]
        for place, *_ in self.places:
            self.inputs[place] = None  # type: ignore[call-overload]  # this call's activations need not be kept
        memory = {tensor.untyped_storage().data_ptr() for *_, tensor in tensors}
        fixed = [tensor for tensor in self.inputs if isinstance(tensor, Tensor)]  # the others are sizes
        assert not any(tensor.untyped_storage().data_ptr() in memory for tensor in fixed), (
            "an argument reaches the graph as another tensor, which would stay while the argument changes"
        )

    def __call__(self, owner: Any, args: Sequence[Any], moving: tuple[Tensor, ...]) -> Any:
        """Run the graph on these arguments."""
        assert owner is self.owner, "this key belongs to another module"
        if moving is not self.moving:
            self._move(moving)
        inputs = self.inputs.copy()
        for place, index, member in self.places:
            value = args[index]
            inputs[place] = value if member is None else value[member]
        outputs = self.graph(*inputs)
        if self.shape is None:
            return outputs[0]
        return tree_unflatten([None if place is None else outputs[place] for place in self.order], self.shape)

    def _move(self, moving: tuple[Tensor, ...]) -> None:
        """From now on have these in place of the moving tensors, which may have other sizes."""
        for places, tensor in zip(self.moves, moving, strict=True):
            for place in places:
                self.inputs[place] = tensor
        for number, place, dimension in self.sizes:
            self.inputs[number] = cast(Tensor, self.inputs[place]).shape[dimension]
        self.moving = moving


def _places(outputs: Sequence[Tensor], out: Any) -> tuple[list[int | None], TreeSpec | None]:
    """Return where the leaves of what a function returned lie among its graph's outputs (None: None), and its shape.

    The shape is None where a function returns one tensor.
    """
    leaves, shape = tree_flatten(out)
    places = {id(tensor): place for place, tensor in enumerate(outputs)}
    assert all(leaf is None or id(leaf) in places for leaf in leaves), "the graph returns what the function returns"
    return [None if leaf is None else places[id(leaf)] for leaf in leaves], None if isinstance(out, Tensor) else shape
