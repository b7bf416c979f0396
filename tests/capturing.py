"""A CUDA graph on a CPU: the operations of a step, recorded once and replayed, and `torch.cuda`'s capture around them.

A graph holds kernels and addresses. What a recording holds is the same in PyTorch's terms: every operation with the
very tensors that it read and wrote. A replay runs them again, and writes each result into the tensor that held it the
first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from minispec.engine import Engine
from minispec.sampling import Needs


def memory(value: object) -> set[int]:
    """Return where the tensors in an operation's arguments or results lie."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}


class Recording(TorchDispatchMode):
    """The operations of a step, in order, with the tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], tuple, dict, list[Tensor | None]]] = []
        self.replays = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that are compiled already run compiled here; their graphs are noted by `whole`."""
        return True

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        """Run one operation and note it."""
        kwargs = kwargs or {}
        if func.namespace == "aten":  # in inference mode some come whole
            with self:
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.note(func, args, kwargs)

    def note(self, func: Callable[..., Any], args: tuple, kwargs: dict) -> object:
        """Run an operation and note it with its results.

        A view, and what was written in place, lie where an argument lies: to run the operation again is enough.
        """
        out, given = func(*args, **kwargs), memory((args, kwargs))
        made = (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        fresh = [None if memory(leaf) & given else leaf for leaf in made]
        self.operations.append((func, args, kwargs, fresh))
        return out

    def replay(self) -> None:
        """Run the operations again, on the tensors of the first time."""
        self.replays += 1
        for func, args, kwargs, fresh in self.operations:
            out = func(*args, **kwargs)
            if getattr(func, "namespace", None) == "_c10d_functional":  # it waits for the tensor of the first time
                out = torch.ops._c10d_functional.wait_tensor(out)
            for old, new in zip(fresh, (x for x in tree_leaves(out) if isinstance(x, Tensor)), strict=True):
                if old is not None:  # a graph may give one number expanded, which no copy is written over
                    old.untyped_storage().copy_(new.untyped_storage())


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that a recording notes as one operation, as a compiled graph is one to torch.compile."""

    def call(*args: Any) -> Any:
        mode = _get_current_dispatch_mode()
        if not isinstance(mode, Recording):
            return function(*args)
        with _disable_current_modes():
            return mode.note(function, args, {})

    return call


class Capture:
    """Stands for `torch.cuda` while steps are captured. A capture that fails leaves behind what CUDA's leaves behind.

    Its end raises a second error, its stream stays the current one, and its pool cannot be recorded to again.
    """

    def __init__(self) -> None:
        self.current, self.pools, self.stuck = "default", 0, set()

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> int:
        """Return a new pool."""
        self.pools += 1
        return self.pools

    @contextmanager
    def graph(self, graph: Recording, pool: int, stream: object, capture_error_mode: str) -> Iterator[None]:
        """Record into a graph."""
        if pool in self.stuck:
            raise RuntimeError("already recording to mempool_id")
        self.current, before = stream, self.current
        try:
            with graph:
                yield
        except Exception:
            self.stuck.add(pool)
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904  as CUDA does
        self.current = before

    @contextmanager
    def emulated(self) -> Iterator[None]:
        """Let steps be captured on a CPU within this context."""
        stand_ins = {
            "CUDAGraph": Recording, "Stream": lambda device: mock.Mock(), "current_stream": mock.Mock(),
            "stream": self.stream, "graph": self.graph, "graph_pool_handle": self.graph_pool_handle,
        }  # fmt: skip
        with mock.patch.multiple(torch.cuda, **stand_ins):
            yield


@contextmanager
def looking(name: str) -> Iterator[None]:
    """Let the step of this name look at a value at its end, so that it can be run and not be captured."""
    hand_over = Engine.hand_over

    def looks(engine: Engine, buffers: Any, path: Any) -> None:
        hand_over(engine, buffers, path)
        if buffers.name == name:
            buffers.outputs[0, 0].item()

    with mock.patch.object(Engine, "hand_over", looks):
        yield


def reads_all(engine: Engine) -> Engine:
    """Return an engine whose PagedGather reads all that a slot can have, as a captured step must."""
    engine.kv.mapped[0] = engine.kv.pages_per_slot
    return engine


def state_of(engine: Engine, needs: Needs) -> list[Tensor]:
    """Return every tensor that a step of these needs may change and a later one may read, without page 0.

    Page 0 is never read. Outputs that nobody needs counted are counted where a graph of more needs is replayed.
    """
    sampling, late = engine.sampling, engine.late
    steps = [*engine.decodes.values(), *engine.prefills.values()]
    kept = [late.tokens, late.features, getattr(engine.drafter, "state", None)]
    return [
        engine.lens, engine.root, *(tensor for tensor in kept if isinstance(tensor, Tensor)),
        *(pool[:, :, engine.kv.page_size :] for pool in engine.kv.pools),
        sampling._floats, sampling._ints, *(step.outputs for step in steps),
        *(table for name, table in sampling.tables.items() if name in needs or name != "counts"),
    ]  # fmt: skip


def without_waiting(engine: Engine, serve: Callable[[], object]) -> None:
    """Serve a request captured and uncaptured; on a GPU it is an error if the host waits for the device in a launch."""

    def launch(original: Callable[..., Any], *given: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    guarded = {name: partial(launch, getattr(engine, name)) for name in ("launch", "prefill")}
    with mock.patch.multiple(engine, **(guarded if engine.device.type == "cuda" else {"graphs": engine.graphs})):
        serve()
        with mock.patch.object(engine, "graphs", {}):
            serve()


def replays_compared(engine: Engine, serve: Callable[[], object]) -> int:
    """Serve a request with each captured step run twice from the same state, as a replay and uncaptured.

    Returns how many were equal; raises AssertionError, naming the step, where a bit of the state differs.
    """
    equal, original = 0, engine.run_here

    def run_here(step: Any, needs: Any, graph: Any, asked: Any) -> None:
        nonlocal equal
        if graph is None:
            return original(step, needs, graph, asked)
        before = [tensor.clone() for tensor in state_of(engine, needs)]
        original(step, needs, graph, asked)
        after = [tensor.clone() for tensor in state_of(engine, needs)]
        for tensor, value in zip(state_of(engine, needs), before, strict=True):
            tensor.copy_(value)
        original(step, needs, None, asked)
        for index, (tensor, value) in enumerate(zip(state_of(engine, needs), after, strict=True)):
            differ = int((tensor != value).sum())
            assert not differ, f"{step.name}: a replay leaves another state: {differ} numbers of tensor {index}"
        equal += 1
        return None

    with mock.patch.object(engine, "run_here", run_here):
        serve()
    return equal
