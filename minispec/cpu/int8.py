"""int8 weights on a CPU: a byte a weight, with one scale for each output channel.

A plain step reads every weight once, so its time is mostly the weights' bytes. Here a weight is an 8-bit integer times
the scale of its output channel. A tied embedding reads its rows from the LM head's matrix.

How a product is made depends on its number of rows, and results differ by rounding alone:

    one request's, up to four    loops of Inductor's own over the integers (`linear.sums_of_rows`), in compiled code
    all others                   oneDNN's product with the integers, which the activations' dtype holds exactly; the
                                 scale is applied to the sums (`Int8Linear.pack`, where memory allows)
    where oneDNN cannot, or      below 48 rows PyTorch's kernel `_weight_int8pack_mm`, whose time grows with the rows;
    memory lacks for that        for more the weight turned into the activations' dtype, one layer's at a time

Read next: `linear.py`, for weights that keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.attention import Causal
from minispec.cpu.linear import for_several, is_one, sums_of_row
from minispec.cpu.onednn import Reordered
from minispec.cpu.template import Blocks
from minispec.model import Model
from minispec.operators import operator

LANES = 16  # the kernel reads so many inputs at once and does not look whether there are any left
MANY_ROWS = 48  # from which on turning a weight into the activations' dtype is faster than the kernel
PIECE = 2**20  # weights quantized at once, so that loading needs little memory beside the model
TEXT = (  # what the cost in accuracy is measured on
    "A river begins as water that finds its way downhill. Rain falls on the mountains, gathers in small streams, and "
    "the streams join until they are wide enough to carry boats. Along its banks people have always built towns, "
    "because a river gives them water to drink, fish to eat and a road that needs no paving. In 1807 the first steam "
    "boats made the journey upstream in days instead of weeks, and trade grew quickly. Today, most goods travel by "
    "train or by truck, but the old harbours are still there, and many of them are now parks."
)


class Cost(NamedTuple):
    """What quantization did to the model's distribution over the next token, on `tokens` tokens of a text."""

    divergence: float  # mean KL divergence of the quantized model from the other, in nats a token
    agreement: float  # share of positions with the same first choice, in [0, 1]
    tokens: int


def check_int8(dtype: torch.dtype) -> None:
    """Raise ValueError unless this build of PyTorch multiplies activations of `dtype` by int8 weights on a CPU."""
    try:
        one = torch.ones(1, LANES, dtype=dtype)
        torch._weight_int8pack_mm(one, one.to(torch.int8), one[:, 0])
    except (AttributeError, RuntimeError) as error:
        raise ValueError(f"--quantization int8: this build of PyTorch ({torch.__version__}) has no product of {dtype} "
                         f"and int8 weights on a CPU: {error}") from error  # fmt: skip


class Int8Linear(nn.Module):
    """A linear layer with weights of 8 bits; inference on a CPU only.

    weight [out, in] int8; scale [out] in the activations' dtype.
    """

    weight: Tensor
    scale: Tensor
    rounds = True  # whether all products return the dtype of their input

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantized(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.packed: Blocks | Reordered | None = None
        self.alone = True  # whether one row has a loop of its own, and eager code PyTorch's kernel

    def pack(self, compiled: bool = True) -> None:
        """Keep the integers in a layout for several rows too, in the activations' dtype."""
        self.packed = for_several(self.weight.to(self.scale.dtype), compiled)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, plus the bias, [..., out]."""
        compiling = torch.compiler.is_compiling()
        if self.alone and compiling and is_one(x.shape[:-1].numel()):
            out = sums_of_row(x, self.weight) * self.scale.float()
        elif self.packed is not None and (compiling or isinstance(self.packed, Reordered) or not self.alone):
            out = self.packed(x, True) * self.scale
        else:
            out = torch.ops.minispec.int8_linear(x, self.weight, self.scale)
        out = out if self.bias is None else out + self.bias
        return out.to(x.dtype) if self.rounds else out


class Int8Head(Int8Linear):
    """An LM head, whose loops return float32, for the reason in `linear.PackedHead`."""

    rounds = False


@operator(
    "int8_linear(Tensor x, Tensor weight, Tensor scale) -> Tensor",
    lambda x, weight, scale: x.new_empty(*x.shape[:-1], len(weight)),
    "CPU",
)
def _int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x [..., in] times weight [out, in] int8 times scale [out], [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) < MANY_ROWS and rows.shape[1] % LANES == 0:
        out = torch._weight_int8pack_mm(rows.contiguous(), weight, scale)
    else:
        if rows.dtype == torch.float16:  # whose range ends below what sums of integers reach before they are scaled
            rows = rows.float()
        out = (F.linear(rows, weight.to(rows.dtype)).float() * scale.float()).to(x.dtype)
    return out.view(*x.shape[:-1], -1)


class Int8Embedding(nn.Module):
    """An embedding whose rows are those of an int8 LM head."""

    weight: Tensor
    scale: Tensor

    def __init__(self, head: Int8Linear) -> None:
        super().__init__()
        self.register_buffer("weight", head.weight)
        self.register_buffer("scale", head.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of ids tokens [...], in the activations' dtype."""
        return self.weight[tokens] * self.scale[tokens].unsqueeze(-1)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] as (integers [out, in] int8, scale [out] in the weight's dtype).

    Each weight becomes the nearest multiple of its row's scale, from -127 to 127 times.
    """
    integers, scale = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight))
    rows = max(PIECE // weight.shape[1], 1)
    for piece, into, of in zip(weight.split(rows), integers.split(rows), scale.split(rows), strict=True):
        of.copy_(piece.abs().amax(-1).float() / 127)
        of[of == 0] = 1  # a row of zeros
        into[:] = (piece.float() / of[:, None].float()).round().clamp(-127, 127)
    return integers, scale


def quantize(model: Model, ids: list[int], replace: Callable[[Model], None]) -> Cost:
    """Have `replace` quantize a model in place, as `replace_weights` does; return what it cost on `ids`.

    Each layer gives its old weight up before the next one is quantized, so memory exceeds the model's by no more than a
    layer. Whoever needs an old weight, as a draft head may, takes it before.
    """
    before = _logits(model, ids)
    replace(model)
    after, divergence, same = _logits(model, ids), 0.0, 0
    for old, new in zip(before, after, strict=True):  # by rows, since in fp32 all of them are as large as a layer
        chances, others = (logits.float().log_softmax(-1) for logits in (old, new))
        divergence += float(F.kl_div(others, chances, log_target=True, reduction="sum"))
        same += int(old.argmax() == new.argmax())
    return Cost(divergence / len(ids), same / len(ids), len(ids))


def replace_weights(model: Model) -> None:
    """Replace the model's linear layers, and an embedding tied to one, by int8 ones.

    On the meta device this gives their sizes.
    """
    _quantize_linears(model)
    if model.config.tied:  # by type, since among several ranks other layers are around the two
        head = next(part for part in model.modules() if isinstance(part, Int8Head))
        name = next(name for name, part in model.named_modules() if isinstance(part, nn.Embedding))
        model.set_submodule(name, Int8Embedding(head))


def pack_integers(model: Model, compiled: bool = True) -> None:
    """Keep the integers of every int8 layer in a layout for several rows too; `compiled` is that of PackedLinear."""
    for module in model.modules():
        if isinstance(module, Int8Linear):
            module.pack(compiled)


def _quantize_linears(module: nn.Module, kind: type[Int8Linear] = Int8Linear) -> None:
    """Replace every nn.Linear below `module`."""
    for name in [name for name, _ in module.named_children()]:  # a list of the layers would keep their weights
        child, within = getattr(module, name), Int8Head if name == "lm_head" else kind
        if isinstance(child, nn.Linear):
            setattr(module, name, within(child))
        else:
            _quantize_linears(child, within)


def _logits(model: Model, ids: list[int]) -> Tensor:
    """Return the logits [T, V] after each of `ids`, eagerly."""
    hidden, _ = model(torch.tensor([ids]), torch.arange(len(ids))[None], Causal(model.config.windows(len(ids))))
    return model.logits(hidden[0])
