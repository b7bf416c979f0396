"""Weights of 4 bits on a CPU: codes from 0 to 15, with a scale and a zero for each 32 inputs of an output.

A weight is (code - 8) * scale + zero. This is the format of PyTorch's product of 4 bits, whose scales and zeros are
bfloat16. llama.cpp's Q4_0, Q4_1 and Q4_K multiply out to it (`gguf_weights.py`). How a product is made depends on its
number of rows:

    below 128, compiled   Inductor's template with its kernel for 4 bits, by a lowering in `template.py`
    below 128, eager      ATen's `_weight_int4pack_mm_for_cpu`: each row has the same bits as by the template
    more, or any number   the weight in the activations' dtype, one layer's at a time

Read next: `groups.py`, for a file's weights of more bits; `gguf_weights.py`, which fills these layers from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minispec.cpu.linear import is_below
from minispec.cpu.template import GROUP
from minispec.model import Model

MANY_ROWS = 128  # from which on a weight is turned into the activations' dtype
BLOCK = 64  # outputs that ATen packs together: a byte has one of the first half of them, and one of the second
PIECE = 2**20  # weights that are worked on at once
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a group's range, that 4 bits may cover


class Codes(NamedTuple):
    """A weight [out, in]: codes [out, in] from 0 to 15; scale and zero [out, in / 32] fp32."""

    codes: Tensor
    scale: Tensor
    zero: Tensor


class Int4Linear(nn.Module):
    """A linear layer with weights of 4 bits; inference on a CPU only.

    weight [out, in / 2] uint8, as ATen packs it; scales [in / 32, out, 2] bf16: scale and zero.
    """

    weight: Tensor
    scales: Tensor
    many_rows: int | None = MANY_ROWS  # None: the rows of a prompt have the bits of all others, and take longer

    def __init__(self, linear: nn.Linear, parts: Sequence[str] = ()) -> None:
        """Take a layer's size, bias and device; `fill` gives the new layer its numbers.

        parts: the names in a file of what the weight joins.
        """
        super().__init__()
        self.parts = parts
        self.features, self.bias = linear.out_features, linear.bias
        with torch.device(linear.weight.device):
            weight = torch.empty(linear.out_features, linear.in_features // 2, dtype=torch.uint8)
            scales = torch.empty(linear.in_features // GROUP, linear.out_features, 2, dtype=torch.bfloat16)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)

    def fill(self, pieces: Iterable[Codes]) -> None:
        """Take the numbers of all outputs, some after the others."""
        codes, scale, zero = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        self.weight.copy_(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1))
        # The zero makes good for what the rounding of the scale did to the group's mean.
        rounded, mean = scale.bfloat16(), codes.view(*scale.shape, GROUP).float().mean(-1) - 8
        self.scales[..., 0] = rounded.T
        self.scales[..., 1] = (zero + (scale - rounded.float()) * mean).T

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, plus the bias, [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        if self.many_rows is None or is_below(self.many_rows, rows.shape[0]):
            out = torch.ops.minispec.int4_linear(rows, self.weight, self.scales)
        else:
            step = self.features if torch.compiler.is_compiling() else _outputs_at_once(x.shape[-1])
            pieces = zip(self.weight.split(step), self.scales.split(step, 1), strict=True)
            out = torch.cat([rows @ dense(*piece).to(x.dtype) for piece in pieces], -1)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], self.features)


def dense(weight: Tensor, scales: Tensor) -> Tensor:
    """Return a weight of 4 bits as [in, out] fp32."""
    groups, features, _ = scales.shape
    blocks = weight.view(features // BLOCK, groups, GROUP, BLOCK // 2)
    # as_strided has scales and zeros stored apart, since Inductor would read every second number one by one.
    apart = scales.permute(2, 0, 1).contiguous().as_strided((2, groups, features), (groups * features, features, 1))
    scale, zero = apart.float().view(2, groups, features // BLOCK, 2, BLOCK // 2).transpose(1, 2)
    halves = [(codes.float() - 8) * scale[:, :, None, half] + zero[:, :, None, half]
              for half, codes in enumerate((blocks & 15, blocks >> 4))]  # fmt: skip
    return torch.stack(halves, 3).permute(1, 2, 0, 3, 4).reshape(groups * GROUP, features)


def _outputs_at_once(inputs: int) -> int:
    """Return how many outputs of a weight are worked on at once, so that little memory is needed beside it."""
    return max(PIECE // inputs // BLOCK, 1) * BLOCK


def fits(features: int, inputs: int) -> bool:
    """Return whether a weight [features, inputs] can have 4 bits."""
    return features % BLOCK == 0 and inputs % GROUP == 0


def quantize_to_int4(model: Model) -> None:
    """Replace the linear layers of a model's blocks; each gives its old weight up before the next one is made."""
    for path, linear in list(model.layers.named_modules(prefix="layers")):
        if not isinstance(linear, nn.Linear) or not fits(linear.out_features, linear.in_features):
            continue
        weight, new = linear.weight.detach(), Int4Linear(linear)
        if not weight.is_meta:
            new.fill(nearest(piece.float()) for piece in weight.split(_outputs_at_once(linear.in_features)))
        model.set_submodule(path, new)


def nearest(weight: Tensor) -> Codes:
    """Return a weight [out, in] fp32 in 4 bits, by least squared error.

    A scale that cuts off the ends of a group may be better for what lies between. Of some scales the best is taken,
    each with the line of least squares through its codes.
    """
    groups = weight.view(len(weight), -1, GROUP)
    least, most, centre = groups.amin(-1, True), groups.amax(-1, True), groups.mean(-1, True)
    best: list[Tensor] = []
    for share in SHARES:
        step = ((most - least) * share / 15).clamp(min=torch.finfo(torch.float32).tiny)
        codes = ((groups - (most + least) / 2) / step + 7.5).round().clamp(0, 15)
        apart = codes - codes.mean(-1, True)
        scale = ((groups - centre) * apart).sum(-1, True) / apart.square().sum(-1, True).clamp(min=1)
        zero = centre - scale * (codes.mean(-1, True) - 8)
        error = ((codes - 8) * scale + zero - groups).square().sum(-1, True)
        now = [error, scale, zero, codes]
        better = error < best[0] if best else error.new_ones((), dtype=torch.bool)
        best = [torch.where(better, new, old) for new, old in zip(now, best or now, strict=True)]
    _, scale, zero, codes = best
    return Codes(codes.to(torch.uint8).flatten(1), scale[..., 0], zero[..., 0])
