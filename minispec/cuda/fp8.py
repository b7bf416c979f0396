"""fp8: linear layers that multiply numbers of 8 bits on CUDA.

An fp8 number (float8_e4m3fn) has 4 bits of exponent, 3 of mantissa, and ends at 448. A row of numbers becomes fp8 by
one scale, its largest magnitude / 448, which the row is divided by. Weights have a scale for each output channel,
made once; activations one for each token, made at every product. The product of the two is `torch._scaled_mm`.

Read next: `fp8_weights.py`, for checkpoints that are fp8 already; `int8.py`, for 8 bits on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from minispec.model import some
from minispec.model_config import JOINED

logger = logging.getLogger("minispec")

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of the finite fp8 numbers
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a row of zeros is divided by it
MULTIPLE = 16  # the product takes as many inputs and outputs, or a multiple


def rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [N, K] as (numbers [N, K] fp8, scales [N, 1] fp32), so that number times scale is about x.

    In fp32: scale = max |x| / 448 over the row, at least SMALLEST_SCALE; number = x / scale, to the nearest, ties to
    even. On CUDA a division by 448 is a product with its inverse, so a scale's last bit may be another there. A NaN or
    an infinity becomes NaN, and so does every product of its row.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)  # clamp keeps a NaN
    return (wide / scale).to(FP8), scale  # at most 448 and a rounding error, so nothing overflows


class Fp8Linear(nn.Module):
    """A linear layer with weights of 8 bits; inference in bfloat16 only.

    weight [out, in] fp8, weight_scale [out, 1] fp32: parameters, so that a loader finds them by these names.
    """

    one: Tensor  # [] fp32, a scale of 1

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = rowwise(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("one", torch.ones((), device=weight.device), persistent=False)

    def _apply(self, function: Callable[..., Any], recurse: bool = True) -> Self:
        """Move the layer; `to_empty` gives it memory, in which `one` is to be written again."""
        super()._apply(function, recurse)
        self.one.fill_(1.0)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, plus the bias, [..., out].

        The fp8 numbers of x and weight are multiplied and summed in fp32, the sum is multiplied by both scales, the
        bias is added, and the result is rounded to bfloat16. Compiled, it may be rounded only after what follows.

        The product itself is given 1 for both scales. With scales of rows cuBLASLt takes a path of its own on Hopper,
        as slow as bfloat16 by published measurements (docs/cuda.md); the two products below belong to the next kernel.
        """
        # The product asks for the strides of rows one after the other, of a single row too. By way of one dimension, as
        # `contiguous` leaves a single row whatever strides it has.
        numbers, scale = rowwise(x.reshape(-1).view(-1, x.shape[-1]))
        sums = torch._scaled_mm(numbers, self.weight.t(), scale_a=self.one, scale_b=self.one, out_dtype=torch.float32)
        out = sums * scale * self.weight_scale.t()
        out = out if self.bias is None else out + self.bias.float()
        return out.to(torch.bfloat16).view(*x.shape[:-1], -1)


def check_fp8(flag: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError, naming the flag that asks for fp8, unless `device` multiplies it and `dtype` is bfloat16."""
    if dtype != torch.bfloat16:
        raise ValueError(f"{flag} fp8 computes in bfloat16, and --dtype gives {str(dtype).removeprefix('torch.')}; "
                         "allowed: auto, bfloat16")  # fmt: skip
    try:
        with torch.device(device):
            layer = nn.Linear(MULTIPLE, MULTIPLE, bias=False, dtype=dtype)
            Fp8Linear(layer)(torch.ones(1, MULTIPLE, dtype=dtype))
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{flag} fp8: this build of PyTorch ({torch.__version__}) has no product of fp8 rows on this "
                         f"device, on CUDA it takes compute capability 8.9 or more: {said}") from error  # fmt: skip


def can_capture_fp8(device: torch.device) -> bool:
    """Return whether CUDA graphs may hold products of fp8 rows on this GPU.

    On sm_89 PyTorch before 2.12 launches them on the default stream whatever the current one is (its issue 177651).
    """
    return torch.__version__ >= "2.12" or torch.cuda.get_device_capability(device) != (8, 9)


def use_fp8(module: nn.Module, stored: Container[str] = ()) -> None:
    """Replace the linear layers below `module` by fp8 ones of the same weights, where that is possible; log which stay.

    stored: published names of the tensors that are fp8 in a quantized checkpoint, whose other layers stay as they are;
    empty: the checkpoint is not quantized. LM heads stay always. On the meta device there are no weights to quantize,
    and the layers are places for a loader to fill.
    """
    linears = (name for name, part in module.named_modules() if isinstance(part, nn.Linear))
    names, stay = [name for name in linears if name.rpartition(".")[2] != "lm_head"], []
    for name in names:
        owner, _, part = name.rpartition(".")
        linear, around = cast(nn.Linear, module.get_submodule(name)), module.get_submodule(owner)
        published = [f"{owner}.{one}.weight" for one in JOINED.get(part, (part,))]
        fits = linear.in_features % MULTIPLE == 0 == linear.out_features % MULTIPLE
        if fits and (not stored or all(one in stored for one in published)):
            setattr(around, part, Fp8Linear(linear))
        else:
            stay.append(name)
    why = f"; so do {some(stay)}, whose sizes are no multiples of {MULTIPLE} or which the checkpoint has in more bits"
    logger.info("fp8 weights in %d linear layers of the %s; embedding and LM head stay in bfloat16%s",
                len(names) - len(stay), type(module).__name__, why if stay else "")  # fmt: skip
