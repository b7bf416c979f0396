"""Compiled functions on a CPU, called without asking Dynamo each time.

torch.compile finds its graph anew at every call. It checks what the graph takes for granted and gathers the graph's
inputs from the arguments: some 100 microseconds a layer, a fifth of a plain step. But between two steps of one shape
nothing of that changes except the activations: weights, keys and values and the plan's tensors stay where they are.

The one idea: ask once for every layer and plan. At the first call for them, `files.py` has a compiled function
that is right for them, in this process, in a file or made anew. Every later call goes there. The function reads its
tensors from the arguments at each call and checks none of them, but Inductor's code refuses other sizes and strides.

One argument, the key, stands for all that stays (`compiled.Key`): a layer's attention under one plan, or a step's
buffers. What was found for it ends with it. If it names tensors of `any_size`, one graph serves all keys of its kind,
whatever these sizes and those of the arguments, so that compiling takes a fraction of the time.

A step that is not `ready` compiles nothing (`compiled.py`). Its graphs are made by running it on padding.

Read next: `model.py`, `beam.py` and `engine.py`, whose functions are compiled here.
"""

from __future__ import annotations

import os
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from minispec.compiled import Key, Step, runs_eagerly
from minispec.cpu.files import Loaded, find


def prepare() -> None:
    """Import Inductor ahead of the first graph, and set the options that all processes with one cache must share.

    These options are part of the key under which Inductor caches a graph.
    """
    # This cache keeps the results of traced operations for later traces; here every function is traced only once.
    torch._dynamo.config.fake_tensor_cache_enabled = False
    os.environ.setdefault("TORCH_WARM_POOL", "0")  # a pool of processes that compile for CUDA only
    from torch._inductor import compile_fx, config, cpp_builder, cpu_vec_isa  # noqa: F401

    # If this were unset, the key would lack it, and a process could load code made for another number of threads.
    config.cpp.threads = torch.get_num_threads()
    # A compiler that knows the newest vector instructions knows the older ones too. Otherwise Inductor would test each
    # kind by compiling a long file, fifteen seconds in all.
    newest = [cpp_builder.get_cpp_compiler(), "-mavx512bf16", "-mamx-bf16", "-E", "-x", "c++", os.devnull]
    if config.cpp.vec_isa_ok is None and subprocess.run(newest, capture_output=True, check=False).returncode == 0:
        config.cpp.vec_isa_ok = True


class _Noted(threading.local):
    """Whether this thread may compile a function that no file holds."""

    compiles = True


_noted = _Noted()


@contextmanager
def from_files() -> Iterator[None]:
    """Within this context a function that no file holds is not compiled: `NotMade` is raised."""
    _noted.compiles = False
    try:
        yield
    finally:
        _noted.compiles = True


loaded: dict[Step, list[Loaded]] = {}  # the graphs of this process, by function; all engines share them


class DirectStep:
    """A function compiled for inference on a CPU; see the head of this file."""

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
        calls, given = self.calls.setdefault(key.original or key, {}), _given(args)
        call = calls.get(given)
        if call is None:
            call = calls[given] = self._find((owner, *args), key, given)
        return call(owner, *args)

    def _find(self, args: Sequence[Any], key: Key, given: tuple) -> Step:
        """Return the compiled function for a key: one that is loaded already, or that of a file, or a new one."""
        graphs = loaded.setdefault(self.function, [])
        if (found := next((graph for graph in graphs if graph.fits(args)), None)) is None:
            with any_size(args[1:], key):
                found = find(self.function, args, f"{given} {_shapes(args, bool(key.any_size))}", _noted.compiles)
            graphs.append(found)
        return found.call


@contextmanager
def any_size(args: Sequence[Any], key: Key) -> Iterator[None]:
    """Within this context a graph that is traced for `key` gets symbols for the batch size and the lengths.

    `key.any_size` names the dimensions of the key's tensors that get symbols. Of each argument these are dimension 0
    and 1, as in x [B, T, d], or 0 and 2, as in the rotary factors [B, 1, T, D]. If the key has few rows (`key.few`), no
    dimension of the arguments gets one. A dimension of size one stays a constant of the graph.
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

    # Do not specialise: sizes that are equal in this trace may differ in later calls, and a size of one may grow.
    with cast(Any, _config).patch(use_duck_shape=False, backed_size_oblivious=True):
        yield


def _given(args: Sequence[Any]) -> tuple:
    """Return what decides which graph serves these arguments: sets, and which arguments and members are None."""
    return tuple([
        tuple([member is None for member in arg]) if isinstance(arg, tuple)
        else tuple(sorted(arg)) if isinstance(arg, frozenset) else arg is None
        for arg in args
    ])  # fmt: skip


def _shapes(args: Sequence[Any], any_size: bool) -> list[str]:
    """Return the shapes of the arguments, for the name of a file; without those that `any_size` leaves open."""
    tensors = [member for arg in args for member in (arg if isinstance(arg, tuple) else (arg,))
               if isinstance(member, Tensor)]  # fmt: skip
    if not any_size:
        return [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors]
    return [f"{tensor.dtype} {tensor.dim()} {tensor.shape[-1] if tensor.dim() > 2 else ''}" for tensor in tensors]
