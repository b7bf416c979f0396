"""int8 weights on a CPU: half the bytes of bfloat16, with one scale for each output channel.

A plain step reads every weight once, so its time is mostly the weights' bytes. Here a weight is an 8-bit integer times
the scale of its output channel. A tied embedding reads its rows from the LM head's matrix.

The one idea: a quantized model must be the same numbers at every row count, or a tree step would verify another model
than plain steps decode. So a row has the bits that it has alone, whatever the number of rows. In compiled blocks the
products of decoding are loops of Inductor's own (`packed.sums_of_rows`), which run together with what is around them:
up to four rows share one loop over the weights, and more rows are groups of four. Eagerly, and for the LM head always,
they are PyTorch's kernel `_weight_int8pack_mm`, which computes each row by itself too. Loops and kernel add up in
another order, so they differ by rounding.

A chunk of a prompt has hundreds of rows, for which both would be slow. There a layer's weight is turned into the
activations' dtype, in which its integers are exact, and the scale is applied to the product. That differs by rounding
only. One layer's weight exists at a time.

Read next: `packed.py`, for weights that keep their bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.attention import QUERY_BLOCK, Causal
from minispec.load.packed import sums_of_rows
from minispec.model import Model
from minispec.shards import SplitEmbedding

PROMPT_ROWS = QUERY_BLOCK  # tokens in a row from which on it is a chunk of a prompt; a tree has fewer
LANES = 16  # the kernel reads so many inputs at once and does not look whether there are any left
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

    weight [out, in] int8, its rows filled up with zeros to a multiple of LANES; scale [out] in the activations' dtype.
    loops: whether compiled code has loops in place of the kernel; an LM head, which runs outside of compiled blocks in
    many steps, must have one of them in all.
    """

    def __init__(self, linear: nn.Linear, loops: bool = True) -> None:
        super().__init__()
        self.size, self.loops = linear.in_features, loops
        weight, scale = quantized(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., T, in] times the weight, plus the bias, [..., T, out]; for T < PROMPT_ROWS row by row."""
        if self.size % LANES:
            x = F.pad(x, (0, -self.size % LANES))
        if x.dim() > 1 and x.shape[-2] >= PROMPT_ROWS:
            # Scaled in fp32: scaled in bfloat16, Inductor would take it for a product to run in the decoding kernel.
            out = (F.linear(x, self.weight.to(x.dtype)).float() * self.scale.float()).to(x.dtype)
        elif self.loops and torch.compiler.is_compiling():
            out = (sums_of_rows(x, self.weight) * self.scale.float()).to(x.dtype).view(*x.shape[:-1], -1)
        else:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            out = torch._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class Int8Embedding(nn.Module):
    """An embedding whose rows are those of an int8 LM head."""

    def __init__(self, head: Int8Linear) -> None:
        super().__init__()
        self.size = head.size
        self.register_buffer("weight", head.weight)
        self.register_buffer("scale", head.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of ids tokens [...], in the activations' dtype."""
        return self.weight[tokens][..., : self.size] * self.scale[tokens, None]


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] as (integers [out, in filled up] int8, scale [out] in the weight's dtype).

    Each weight becomes the nearest multiple of its row's scale, from -127 to 127 times.
    """
    features, size = weight.shape
    integers = torch.zeros(features, -(-size // LANES) * LANES, dtype=torch.int8, device=weight.device)
    scale = weight.new_empty(features)
    rows = max(PIECE // size, 1)
    for piece, into, of in zip(weight.split(rows), integers.split(rows), scale.split(rows), strict=True):
        of.copy_(piece.abs().amax(-1).float() / 127)
        of[of == 0] = 1  # a row of zeros
        into[:, :size] = (piece.float() / of[:, None].float()).round().clamp(-127, 127)
    return integers, scale


def quantize(model: Model, ids: list[int]) -> Cost:
    """Replace the model's linear layers, and an embedding tied to one, by int8 ones; return what it cost on `ids`.

    Each layer gives its old weight up before the next one is quantized, so memory exceeds the model's by no more than a
    layer. Whoever needs an old weight, as a draft head may, takes it before.
    """
    assert 0 < len(ids) < PROMPT_ROWS, "what is measured is the kernel of decoding"
    before = _logits(model, ids)
    replace_weights(model)
    after, divergence, same = _logits(model, ids), 0.0, 0
    for old, new in zip(before, after, strict=True):  # by rows, since in fp32 all of them are as large as a layer
        chances, others = (logits.float().log_softmax(-1) for logits in (old, new))
        divergence += float(F.kl_div(others, chances, log_target=True, reduction="sum"))
        same += int(old.argmax() == new.argmax())
    return Cost(divergence / len(ids), same / len(ids), len(ids))


def replace_weights(model: Model) -> None:
    """Replace the layers as `quantize` does, and measure nothing; on the meta device this gives their sizes."""
    _quantize_linears(model)
    if not model.config.tied:
        return
    if isinstance(model.embed_tokens, SplitEmbedding):
        model.embed_tokens.rows = Int8Embedding(model.lm_head.linear)
    else:
        model.embed_tokens = Int8Embedding(model.lm_head)


def _quantize_linears(module: nn.Module, loops: bool = True) -> None:
    """Replace every nn.Linear below `module`; see Int8Linear for `loops`."""
    for name in [name for name, _ in module.named_children()]:  # a list of the layers would keep their weights
        child, within = getattr(module, name), loops and name != "lm_head"
        if isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child, within))
        else:
            _quantize_linears(child, within)


def _logits(model: Model, ids: list[int]) -> Tensor:
    """Return the logits [T, V] after each of `ids`, eagerly."""
    hidden, _ = model(torch.tensor([ids]), torch.arange(len(ids))[None], Causal())
    return model.logits(hidden[0])
