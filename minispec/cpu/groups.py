"""Weights of 8 bits in groups on a CPU: integers, with a float32 scale for each 16 or 32 inputs of an output.

llama.cpp's types of 5, 6 and 8 bits are this: integer * scale, and for two of them plus the group's zero
(`gguf_weights.py`). So nothing is rounded, and a weight takes 9 or 10 bits. How a product is made depends on its rows:

    up to FEW in a graph of its own    a loop of Inductor's own, which reads the integers once for all rows
    all others, and eager code         the weight in the activations' dtype, some outputs at a time

One row takes less time than with 16 bits, and eight about twice as long, since a loop multiplies in float32.

Read next: `linear.py`, whose layers hold these weights; `int4.py`, for weights of 4 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.cpu.int4 import PIECE, Codes
from minispec.cpu.linear import is_below, sums_of_rows
from minispec.operators import operator

FEW = 8  # rows up to which the loop is faster


class Groups(nn.Module):
    """A weight [out, in] of 8 bits: weight [out, in] int8; scale and, for some types, zero [out, groups] fp32."""

    weight: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, features: int, inputs: int, size: int, has_zero: bool, parts: Sequence[str] = ()) -> None:
        """size: of a group. parts: the names in the file of what the weight joins."""
        super().__init__()
        self.parts, scale = parts, torch.empty(features, inputs // size)
        self.register_buffer("weight", torch.empty(features, inputs, dtype=torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("zero", torch.empty_like(scale) if has_zero else None)

    def fill(self, pieces: Iterable[Codes]) -> None:
        """Take the numbers of all outputs, some after the others."""
        at = 0
        for codes, scale, zero in pieces:
            rows = slice(at, at := at + len(codes))
            self.weight[rows], self.scale[rows] = codes, scale
            if self.zero is not None:
                self.zero[rows] = zero

    def forward(self, x: Tensor, wide: bool = False) -> Tensor:
        """Return x [..., in] times the weight, [..., out], in float32 or in the dtype of x."""
        if torch.compiler.is_compiling() and is_below(FEW + 1, x.shape[:-1].numel()):
            count = 1 + (len(self.weight) % 2 == 0)
            kept = (self.weight, self.scale, self.zero)
            halves = (part.chunk(count) if part is not None else [None] * count for part in kept)
            return sums_of_rows(x, [dense(*half) for half in zip(*halves, strict=True)])
        return torch.ops.minispec.linear_in_groups(x, self.weight, self.scale, self.zero)


class Rows(nn.Module):
    """An embedding whose rows are those of a weight in groups, which may be the LM head's."""

    def __init__(self, groups: Groups, dtype: torch.dtype) -> None:
        super().__init__()
        self.groups, self.dtype = groups, dtype

    @property
    def weight(self) -> Tensor:
        """The integers, by which callers know the device."""
        return self.groups.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of ids tokens [...]."""
        at, held = tokens.flatten(), self.groups
        rows = dense(held.weight[at], held.scale[at], None if held.zero is None else held.zero[at])
        return rows.to(self.dtype).view(*tokens.shape, -1)


class Apart(nn.Module):
    """A linear layer whose outputs come from several layers, because the matrices that it joins have other bits."""

    def __init__(self, parts: Iterable[nn.Module], bias: Tensor | None) -> None:
        super().__init__()
        self.parts, self.bias = nn.ModuleList(parts), bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., out] of all parts for x [..., in], plus the bias."""
        out = torch.cat([part(x) for part in self.parts], -1)
        return out if self.bias is None else out + self.bias


def dense(weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return weights [out, in] fp32."""
    groups = weight.view(*scale.shape, -1) * scale[..., None]
    return (groups if zero is None else groups + zero[..., None]).flatten(1)


@operator(
    "linear_in_groups(Tensor x, Tensor weight, Tensor scale, Tensor? zero) -> Tensor",
    lambda x, weight, *_: x.new_empty(*x.shape[:-1], len(weight)),
    "CPU",
)
def _linear_in_groups(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return x [..., in] times the weight, [..., out], in the dtype of x."""
    out, step = x.new_empty(*x.shape[:-1], len(weight)), max(PIECE // weight.shape[1], 1)
    for at in range(0, len(weight), step):
        rows = slice(at, at + step)
        piece = dense(weight[rows], scale[rows], None if zero is None else zero[rows])
        out[..., rows] = F.linear(x, piece.to(x.dtype))
    return out
