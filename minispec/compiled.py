"""A block or a draft head compiled, and on a CPU called without asking Dynamo each time.

torch.compile finds its graph anew at every call. It checks what the graph takes for granted and gathers the graph's
inputs from the arguments: some 100 microseconds a layer, a fifth of a plain step. But between two steps of one shape
nothing of that changes except the activations: weights, keys and values and the plan's tensors stay where they are.

The one idea: ask once for every layer and plan. The first call goes through torch.compile, which compiles where it must
and checks its guards; the backend below notes which compiled graph it ran, and on which tensors. Every later call runs
that graph on those tensors, with the new activations in place of the old ones. It has no way to recompile: the graph
itself refuses inputs of other sizes and strides.

`attend` stands for layer and plan, since there is one object of it for each pair, and the notes on it end with it.

Read next: `model.py` and `beam.py`, whose functions are compiled here.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend

Step = Callable[..., Tensor]  # function(module, *args); one of the arguments is named `attend`
Compiler = Callable[[Step], Step]


def compile_step(function: Step, device: torch.device) -> Step:
    """Return `function` compiled for inference on `device`, one graph for every shape.

    On a CPU, the module and every tensor that is not an argument must stay the same objects as long as `attend` lives.
    """
    if device.type == "cuda":  # autotuned kernels; on a CPU autotuning finds nothing to choose from
        return torch.compile(function, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    return DirectStep(function)


class Ran(NamedTuple):
    """What the backend noted: a compiled graph, the tensors it ran on, and what it returned."""

    graph: Callable[..., Sequence[Tensor]]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


_noted = threading.local()  # .ran: the newest Ran of this thread, for the call under way to take away


def _inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """A backend for torch.compile: its own, with a note of every call. Dynamo keeps it, so it must keep no tensor."""
    compiled = lookup_backend("inductor")(graph, inputs)

    def run(*flat: Tensor) -> Sequence[Tensor]:
        outputs = compiled(*flat)
        _noted.ran = Ran(compiled, flat, outputs)
        return outputs

    return run


class DirectStep:
    """A function compiled for a CPU; see the head of this file."""

    def __init__(self, function: Step) -> None:
        self.function = function
        self.traced = torch.compile(function, backend=_inductor, fullgraph=True, dynamic=False)
        self._attend = list(inspect.signature(function).parameters).index("attend") - 1  # among the arguments
        self.calls: weakref.WeakKeyDictionary[Any, DirectCall] = weakref.WeakKeyDictionary()

    def __call__(self, module: nn.Module, *args: Any) -> Tensor:
        """Return function(module, *args); keys and values are written in place."""
        call = self.calls.get(args[self._attend])
        if call is not None:
            return call(module, args)
        _noted.ran = None
        out = self.traced(module, *args)
        ran, _noted.ran = _noted.ran, None
        if ran is not None:  # None where torch.compile is told to run eagerly
            assert len(ran.outputs) == 1 and ran.outputs[0] is out, "the graph returns what the function returns"
            self.calls[args[self._attend]] = DirectCall(module, args, ran)
        return out


class DirectCall:
    """The compiled graph of one layer under one plan, with all its inputs but the arguments."""

    def __init__(self, module: nn.Module, args: Sequence[Any], ran: Ran) -> None:
        self.module, self.graph, self.inputs = module, ran.graph, list(ran.inputs)
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
        fixed = [tensor for tensor in self.inputs if tensor is not None]
        assert not any(tensor.untyped_storage().data_ptr() in memory for tensor in fixed), (
            "an argument reaches the graph as another tensor, which would stay while the argument changes"
        )

    def __call__(self, module: nn.Module, args: Sequence[Any]) -> Tensor:
        """Run the graph on these arguments."""
        assert module is self.module, "this `attend` belongs to another module"
        inputs = self.inputs.copy()
        for place, index, member in self.places:
            value = args[index]
            inputs[place] = value if member is None else value[member]
        return self.graph(*inputs)[0]
