"""Linear layers on a CPU: the weight is reordered once, at load, into the layout the matrix kernel reads.

With a weight as it comes from the file, a product with a few rows is bound by how the weight lies in memory. With the
weight reordered by oneDNN, eight rows cost about what one row costs, so verifying a tree is nearly free on a CPU too.
`pack_linears` replaces the modules after loading, and the model needs no change. Figures are in `docs/log.md`.

A reordered weight has an opaque layout that Inductor cannot take as a graph input. The operator below therefore takes
a handle, which is an ordinary tensor, and looks up the weight by it: one compiled graph still serves all layers.

For one row, which is a plain step of one request, oneDNN spends a fifth of the time on preparing its calls, and nothing
is gained by its layout, since every weight is read once. There compiled code multiplies by the weight as it came from
the file, a loop of Inductor's own that runs together with the norms and activations around it; and for up to four rows,
a small tree, which take little longer. From six rows on such loops are bound by their arithmetic, in float32. So layers
keep that weight too, where memory allows (`room_for_both`). Weights of 8 bits have such loops too (`int8.py`).

The experts of a mixture are packed one by one. Which are multiplied is known in the step alone, so one operator looks
up all of them, and the weights from the file are given up.

Read next: `model.py`, whose nn.Linear modules are replaced here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from minispec.experts import Experts, Product, through_chosen
from minispec.operators import operator

FEW_ROWS = 4  # of a product, up to which loops are faster than oneDNN

# Reordered weights by the id of their module, as long as that lives.
_weights: dict[int | float, Tensor] = {}  # by an int; `Tensor.item` is typed as either

_product: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
_NO_SCALARS: list[float] = []


@operator(
    "packed_linear(Tensor x, Tensor handle, int features, Tensor? bias) -> Tensor",
    lambda x, handle, features, bias: x.new_empty(*x.shape[:-1], features),
    "CPU",
)
def _packed_linear(x: Tensor, handle: Tensor, features: int, bias: Tensor | None) -> Tensor:
    """Return x [..., in] times the packed weight behind `handle` [] int64, [..., features]."""
    # Called more than a hundred times a step: every reshape and every lookup here would cost some 0.1 ms of it.
    return _product(x, _weights[handle.item()], bias, "none", _NO_SCALARS, "")


class PackedLinear(nn.Module):
    """A linear layer whose weight is held in oneDNN's own layout; inference on a CPU only.

    keep: hold it as it came from the file as well, for products of few rows in compiled code.
    """

    handle: Tensor
    kept: Tensor | None
    rounds = True  # whether loops return the dtype of their input

    def __init__(self, linear: nn.Linear, keep: bool = False) -> None:
        super().__init__()
        self.key = id(self)
        self.features = linear.out_features
        _weights[self.key] = _reordered(linear.weight.detach().contiguous())
        weakref.finalize(self, _weights.pop, self.key).atexit = False  # then all weights go anyway
        self.register_buffer("handle", torch.tensor(self.key), persistent=False)
        self.register_buffer("kept", linear.weight.detach() if keep else None, persistent=False)
        self.bias = linear.bias

    @property
    def nbytes(self) -> int:
        """Bytes of the reordered weight, which is no parameter or buffer; oneDNN fills small ones up to its blocks."""
        weight = _weights[self.key]
        return weight.nbytes if weight.is_meta else torch.ops.mkldnn._nbytes(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, plus the bias, [..., out]."""
        if self.kept is not None and torch.compiler.is_compiling() and is_few(x.shape[:-1].numel()):
            out = sums_of_rows(x, self.kept)
            out = out if self.bias is None else out + self.bias
            return (out.to(x.dtype) if self.rounds else out).view(*x.shape[:-1], -1)
        return torch.ops.minispec.packed_linear(x, self.handle, self.features, self.bias)


class PackedHead(PackedLinear):
    """An LM head, whose loops return float32.

    If they returned bfloat16, Inductor would round the logits for some of their readers and not for others.
    """

    rounds = False


class PackedExperts(Experts):
    """The experts of a layer, each of whose matrices is a PackedLinear; inference on a CPU only."""

    handle: Tensor

    def __init__(self, experts: Experts) -> None:
        nn.Module.__init__(self)
        self.per_token, self.renormalises = experts.per_token, experts.renormalises
        # In tuples, which torch.compile does not search for weights.
        self.first, self.second = (tuple(map(packed, stack)) for stack in (experts.gate_up_proj, experts.down_proj))
        _experts[id(self)] = self
        self.register_buffer("handle", torch.tensor(id(self), device="cpu"), persistent=False)

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.minispec.packed_experts(x, chosen, weights, self.handle)

    def now(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Do what `mix` does, once it is known which experts were chosen."""
        return through_chosen(x, chosen, weights, _by(self.first), _by(self.second))


def packed(weight: Tensor) -> PackedLinear:
    """Return a packed layer of a weight [out, in]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return PackedLinear(linear)


def _by(layers: Sequence[PackedLinear]) -> Product:
    """Return the product with an expert's layer; called as a module, it would take a fifth longer."""
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


def is_few(rows: int) -> bool:
    """Return whether a graph is of so few rows, and of no other number."""
    return statically_known_true(rows <= FEW_ROWS)


def sums_of_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., in] times weight [out, in] of any dtype, [rows, out] fp32, in a loop; to be compiled.

    A row has the same bits at every number of rows: its sums are of their own, though all rows share the loop, in which
    each weight is read once.
    """
    count, (features, width) = x.shape[:-1].numel(), weight.shape
    # as_strided has rows and sums stored, in float32. Inductor would compute what is before them, a norm say, once more
    # for each of the outputs, and turn each number of them into float32 once more for each of the weights.
    # An output of the first half and one of the second share a loop, which loads each number of the rows for both.
    rows, halves = x.contiguous().float(), 1 + (features % 2 == 0)
    half = features // halves
    parts = weight.as_strided((halves, half, width), (half * width, width, 1)).float().unbind()
    spread = [rows.as_strided((half, width), (0, 1), i * width) for i in range(count)]
    sums = [(part * row).sum(-1) for row in spread for part in parts]
    return torch.stack(sums).as_strided((count, features), (features, 1))


def _reordered(weight: Tensor) -> Tensor:
    """Return a weight [out, in] in oneDNN's layout; on the meta device, where only sizes are asked for, its copy."""
    return torch.empty_like(weight) if weight.is_meta else torch.ops.mkldnn._reorder_linear_weight(weight, 8)


def can_pack(dtype: torch.dtype) -> bool:
    """True if this build of PyTorch has oneDNN and oneDNN takes `dtype` on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    # Without AVX-512 or AMX oneDNN refuses weights in bfloat16.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def room_for_both(weight_bytes: int, total: int) -> bool:
    """Return whether weights are kept in both layouts on a machine with so many bytes of memory in all."""
    return weight_bytes <= total // 8


def pack_linears(module: nn.Module, keep: bool = False) -> None:
    """Replace every nn.Linear below `module` by a PackedLinear, and experts too; a tied embedding keeps its weight.

    keep: see PackedLinear.
    """
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, (PackedHead if name == "lm_head" else PackedLinear)(child, keep))
        elif isinstance(child, Experts):
            setattr(module, name, PackedExperts(child))
        else:
            pack_linears(child, keep)
