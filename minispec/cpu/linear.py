"""Linear layers on a CPU: how a layer's weight lies in memory, and who multiplies by it.

With a weight as it comes from the file, a product with a few rows is bound by how the weight lies in memory. In blocks
it is not: eight rows cost little more than one, so verifying a tree is nearly free on a CPU too. `pack_linears`
replaces the modules after loading, and the model needs no change. docs/log.md has the figures.

    bfloat16 with AMX or AVX512_BF16   Inductor's template over a blocked weight (`template.py`)
    all others                         oneDNN's product over a weight in oneDNN's layout (`onednn.py`)

One row, a plain step of one request, reads every weight once. There compiled code multiplies by the weight as it came
from the file, in a loop of Inductor's own that runs together with the norms and activations around it, in less time
than either. So layers keep that weight too, where memory allows (`room_for_both`). Eager steps multiply by it as well,
since the template is compiled code. Weights of 8 bits have such loops too (`int8.py`).

Read next: `model.py`, whose nn.Linear modules are replaced here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.compiled import Compiler, Key, Step
from minispec.cpu import template
from minispec.cpu.onednn import PackedExperts, Reordered, can_reorder
from minispec.cpu.template import Blocks
from minispec.experts import Experts


class PackedLinear(nn.Module):
    """A linear layer whose weight is held in a layout for several rows; inference on a CPU only.

    keep: hold it as it came from the file as well, for one row in compiled code, and for eager code where the template
    has the others. compiled: whether the template may have them; it is compiled code.
    """

    kept: Tensor | None
    rounds = True  # whether all products return the dtype of their input

    def __init__(
        self, linear: nn.Linear, keep: bool = False, compiled: bool = True, several: nn.Module | None = None
    ) -> None:
        """several: what multiplies, if that is made already; the layer's weight is then left alone."""
        super().__init__()
        weight = linear.weight.detach()
        self.features, self.bias = linear.out_features, linear.bias
        # Whether sums are rounded here and not by the product: a sum with the bias is rounded once.
        self.wide = not self.rounds or self.bias is not None
        self.several = for_several(weight, compiled) if several is None else several
        self.register_buffer("kept", weight if keep else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, plus the bias, [..., out]."""
        out = self._product(x)
        out = out if self.bias is None else out + self.bias
        return out.to(x.dtype) if self.rounds else out

    def _product(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, in float32 or in the dtype of x."""
        if self.kept is None:
            return self.several(x, self.wide)
        if not torch.compiler.is_compiling():
            return F.linear(x, self.kept) if isinstance(self.several, Blocks) else self.several(x, False)
        return sums_of_row(x, self.kept) if is_one(x.shape[:-1].numel()) else self.several(x, self.wide)


class PackedHead(PackedLinear):
    """An LM head, whose compiled products return float32.

    If they returned bfloat16, Inductor would round the logits for some of their readers and not for others. Large
    batches and prompts read it in code that is not compiled, so there the product has a graph of its own.
    """

    rounds = False
    own_graph: Step | None = None

    def compile_alone(self, compiler: Compiler) -> None:
        """Compile the product of several rows for callers that are not compiled, if it is one that is compiled."""
        if isinstance(self.several, Blocks) and self.kept is not None:
            self.own_graph, self._keys = compiler(PackedHead._of_rows), dict[int, AnyRows]()

    def _product(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()
        if self.own_graph is None or self.kept is None or torch.compiler.is_compiling() or rows == 1:
            return super()._product(x)
        key = self._keys.get(rows) or self._keys.setdefault(rows, AnyRows(self.kept))
        out: Tensor = self.own_graph(self, x.reshape(1, rows, -1), key)
        return out.view(*x.shape[:-1], -1)

    def _of_rows(self, x: Tensor, rows: AnyRows) -> Tensor:
        return super()._product(x)


class AnyRows(Key):
    """The key of a number of rows, all of which share one graph."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def any_size(self) -> Sequence[tuple[Tensor, tuple[int, ...]]]:
        return ((self.weight, ()),)


def for_several(weight: Tensor, compiled: bool = True) -> Blocks | Reordered:
    """Return a weight [out, in] in the layout for products of several rows; `compiled` is that of PackedLinear."""
    return Blocks(weight) if compiled and template.fits(weight) else Reordered(weight)


def own_heads(module: nn.Module | None) -> list[PackedHead]:
    """Return the LM heads of a network, which may have a graph of their own (`PackedHead.compile_alone`)."""
    return [part for part in module.modules() if isinstance(part, PackedHead)] if module is not None else []


def is_one(rows: int) -> bool:
    """Return whether a graph is of one row, and of no other number."""
    return is_below(2, rows)


def is_below(bound: int, rows: int) -> bool:
    """Return whether a graph is of numbers of rows below `bound` only."""
    if isinstance(rows, int):
        return rows < bound
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # here: a start need not wait for sympy

    return statically_known_true(rows < bound)


def sums_of_row(x: Tensor, weight: Tensor) -> Tensor:
    """Return one row x [..., in] times weight [out, in] of any dtype, [..., out] fp32, in a loop; to be compiled."""
    features, width = weight.shape
    # An output of the first half and one of the second share a loop, which loads each number of the row for both.
    halves = 1 + (features % 2 == 0)
    half = features // halves
    return sums_of_rows(x, weight.as_strided((halves, half, width), (half * width, width, 1)).float().unbind())


def sums_of_rows(x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return a few rows x [..., in] times a weight, [..., out] fp32, in one loop; to be compiled.

    parts: the weight [out, in] fp32, in as many equal parts as outputs are to share a loop.
    """
    (half, width), rows, features = parts[0].shape, x.shape[:-1].numel(), len(parts) * len(parts[0])
    # as_strided has the rows and the sums stored, in float32. Inductor would compute what is before them, a norm say,
    # once more for each of the outputs, and turn each number of a row into float32 once more for each of the weights.
    stored = x.contiguous().float()
    spread = [stored.as_strided((half, width), (0, 1), row * width) for row in range(rows)]
    sums = torch.stack([(part * row).sum(-1) for row in spread for part in parts])
    return sums.as_strided((rows * features,), (1,)).view(*x.shape[:-1], features)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether weights of `dtype` have a layout for several rows here."""
    return template.reason_against(dtype) is None or can_reorder(dtype)


def room_for_both(weight_bytes: int, total: int) -> bool:
    """Return whether weights are kept in both layouts on a machine with so many bytes of memory in all."""
    return weight_bytes <= total // 8


def pack_linears(module: nn.Module, keep: bool = False, compiled: bool = True) -> None:
    """Replace every nn.Linear below `module` by a PackedLinear, and experts too; a tied embedding keeps its weight.

    keep, compiled: see PackedLinear.
    """
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, (PackedHead if name == "lm_head" else PackedLinear)(child, keep, compiled))
        elif type(child) is Experts:
            setattr(module, name, PackedExperts(child) if can_reorder(child.down_proj.dtype) else child)
        else:
            pack_linears(child, keep, compiled)
