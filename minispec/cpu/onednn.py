"""oneDNN's products on a CPU: a weight in oneDNN's own layout, for float32, older processors and experts.

Such a weight has an opaque layout that Inductor cannot take as a graph's input. The operator below therefore takes a
handle, which is an ordinary tensor, and looks up the weight by it: one compiled graph still serves all layers.

The experts of a mixture are packed one by one. Which are multiplied is known in the step alone, so one operator looks
up all of them, and the weights from the file are given up.

Read next: `linear.py`, which says who multiplies when.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minispec.experts import Experts, Product, through_chosen
from minispec.operators import operator

# Reordered weights by the id of their module, as long as that lives.
_weights: dict[int | float, Tensor] = {}  # by an int; `Tensor.item` is typed as either

_product: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
_NO_SCALARS: list[float] = []


@operator(
    "packed_linear(Tensor x, Tensor handle, int features) -> Tensor",
    lambda x, handle, features: x.new_empty(*x.shape[:-1], features),
    "CPU",
)
def _packed_linear(x: Tensor, handle: Tensor, features: int) -> Tensor:
    """Return x [..., in] times the packed weight behind `handle` [] int64, [..., features]."""
    # Called more than a hundred times a step: every reshape and every lookup here would cost some 0.1 ms of it.
    return _product(x, _weights[handle.item()], None, "none", _NO_SCALARS, "")


class Reordered(nn.Module):
    """A weight [out, in] in oneDNN's layout."""

    handle: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.key, self.features = id(self), len(weight)
        _weights[self.key] = _reordered(weight.contiguous())
        weakref.finalize(self, _weights.pop, self.key).atexit = False  # then all weights go anyway
        self.register_buffer("handle", torch.tensor(self.key), persistent=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the reordered weight, which is no parameter or buffer; oneDNN fills small ones up to its blocks."""
        weight = _weights[self.key]
        return weight.nbytes if weight.is_meta else torch.ops.mkldnn._nbytes(weight)

    def forward(self, x: Tensor, wide: bool = False) -> Tensor:
        """Return x [..., in] times the weight, [..., out], in the dtype of x: oneDNN has no wider sums to give."""
        return torch.ops.minispec.packed_linear(x, self.handle, self.features)


class PackedExperts(Experts):
    """The experts of a layer, each of whose matrices is in oneDNN's layout; inference on a CPU only."""

    handle: Tensor

    def __init__(self, experts: Experts) -> None:
        nn.Module.__init__(self)
        self.per_token, self.renormalises = experts.per_token, experts.renormalises
        # In tuples, which torch.compile does not search for weights.
        self.first, self.second = (
            tuple(Reordered(weight.detach()) for weight in stack) for stack in (experts.gate_up_proj, experts.down_proj)
        )
        _experts[id(self)] = self
        self.register_buffer("handle", torch.tensor(id(self), device="cpu"), persistent=False)

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.minispec.packed_experts(x, chosen, weights, self.handle)

    def now(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Do what `mix` does, once it is known which experts were chosen."""
        return through_chosen(x, chosen, weights, _by(self.first), _by(self.second))


def _by(layers: Sequence[Reordered]) -> Product:
    """Return the product with an expert's matrix; called as a module, it would take a fifth longer."""
    return lambda rows, expert: _product(rows, _weights[layers[expert].key], None, "none", _NO_SCALARS, "")


_experts: weakref.WeakValueDictionary[int | float, PackedExperts] = weakref.WeakValueDictionary()  # by id


@operator(
    "packed_experts(Tensor x, Tensor chosen, Tensor weights, Tensor handle) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    "CPU",
)
def _packed_experts(x: Tensor, chosen: Tensor, weights: Tensor, handle: Tensor) -> Tensor:
    """Do the work of the experts behind `handle` [] int64."""
    return _experts[handle.item()].now(x, chosen, weights)


def _reordered(weight: Tensor) -> Tensor:
    """Return a weight [out, in] in oneDNN's layout; on the meta device, where only sizes are asked for, its copy."""
    return torch.empty_like(weight) if weight.is_meta else torch.ops.mkldnn._reorder_linear_weight(weight, 8)


def can_reorder(dtype: torch.dtype) -> bool:
    """Return whether this build of PyTorch has oneDNN and oneDNN takes `dtype` on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    # Without AVX-512 or AMX oneDNN refuses weights in bfloat16.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
