"""Operators of our own, `torch.ops.minispec.NAME`: functions that torch.compile calls and does not look into.

Such a function writes in place, decides by values, must give a float's last bit as eager code does, or finds by a
handle what a graph cannot hold.

Read next: `kv.py` and `sampling.py`, which have such operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

# At the low level: torch.library.custom_op would cost some 20 microseconds more per call, and a step on a CPU calls
# operators some 120 times.
_library = torch.library.Library("minispec", "DEF")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def operator(
    schema: str, fake: Callable[..., Any] = lambda *_: None, dispatch_key: str = "CompositeExplicitAutograd"
) -> Callable[[_Function], _Function]:
    """Make an operator of the function below.

    schema: `name(Tensor(a!) x, int n) -> Tensor` as PyTorch writes it; `(a!)` marks what is written. fake: returns an
    empty tensor of the result's shape, where there is a result. dispatch_key: "CPU" for an operator of that device
    alone.
    """

    def register(function: _Function) -> _Function:
        """Register the function, and return it as it is."""
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, function, dispatch_key)
        torch.library.register_fake(f"minispec::{name}", fake)
        return function

    return register
