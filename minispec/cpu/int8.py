"""int8 weights on a CPU: half the bytes of bfloat16, with one scale for each output channel.

A plain step reads every weight once, so its time is mostly the weights' bytes. Here a weight is an 8-bit integer times
the scale of its output channel. A tied embedding reads its rows from the LM head's matrix.

The one idea: a quantized model must be the same numbers at every row count, or a tree step would verify another model
than plain steps decode. So a row has the bits that it has alone, whatever the number of rows. In compiled blocks the
products of decoding are loops of Inductor's own (`linear.sums_of_rows`), which run together with what is around them:
up to four rows share one loop over the weights, and more rows are groups of four. The LM head's are compiled by
themselves, since it is called from compiled and from eager code. Where nothing is compiled, products are PyTorch's
kernel `_weight_int8pack_mm`, which computes each row by itself too. Loops and kernel add up in another order, so they
differ by rounding.

A chunk of a prompt has many rows, for which both would be slow. There a layer's weight is turned into the
activations' dtype, in which its integers are exact, and the scale is applied to the product. That differs by rounding
only. One layer's weight exists at a time.

Read next: `linear.py`, for weights that keep their bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.attention import QUERY_BLOCK, Causal
from minispec.compiled import Compiler, Key, runs_eagerly
from minispec.cpu.linear import sums_of_rows
from minispec.model import Model
from minispec.operators import operator

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


def prompt_rows(nodes: int) -> int:
    """Return from how many tokens in a row on a layer takes them for a chunk of a prompt, and not for a tree.

    nodes: of a tree, which must be fewer. No prefill step has fewer tokens, so short prompts take longer if it is a
    whole query block, as for large trees.
    """
    least = QUERY_BLOCK // 2
    return least if nodes < least else QUERY_BLOCK


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
    prompt_rows: tokens in a row from which on it is a chunk of a prompt; see the function of that name.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, prompt_rows: int = QUERY_BLOCK) -> None:
        super().__init__()
        self.size, self.prompt_rows = linear.in_features, prompt_rows
        weight, scale = quantized(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., T, in] times the weight, plus the bias, [..., T, out]; row by row unless it is a prompt's."""
        if self.size % LANES:
            x = F.pad(x, (0, -self.size % LANES))
        if x.dim() > 1 and x.shape[-2] >= self.prompt_rows:
            # Scaled in fp32: scaled in bfloat16, Inductor would take it for a product to run in the decoding kernel.
            out = (F.linear(x, self.weight.to(x.dtype)).float() * self.scale.float()).to(x.dtype)
        else:
            out = self.by_rows(x)
        return out if self.bias is None else out + self.bias

    def by_rows(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, [..., out]; each row has the bits that it has alone."""
        return self.in_loops(x) if torch.compiler.is_compiling() else self.in_kernel(x)

    def in_loops(self, x: Tensor) -> Tensor:
        """Do it in loops, to be compiled."""
        return (sums_of_rows(x, self.weight) * self.scale.float()).to(x.dtype).view(*x.shape[:-1], -1)

    def in_kernel(self, x: Tensor) -> Tensor:
        """Do it in PyTorch's kernel."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return torch._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], -1)


class HeadRows(Key):
    """The key of one of an LM head's two graphs, of one row or of any other number, and the newest rows x [T, in]."""

    def __init__(self, alone: bool) -> None:
        self.alone = alone

    def take(self, x: Tensor) -> HeadRows:
        """Return this with new rows."""
        self.x, self.moving = x, (x,)
        return self

    @property
    def any_size(self) -> Sequence[tuple[Tensor, tuple[int, ...]]]:
        return () if self.alone else ((self.x, (0,)),)


class Int8Head(Int8Linear):
    """An LM head: the same loops, wherever it is called from.

    In some steps what calls it is compiled, in others not, and either way a row must have the same bits. So it is
    compiled by itself, and what is compiled around it takes it for one operation.
    """

    def __init__(self, linear: nn.Linear, prompt_rows: int = QUERY_BLOCK) -> None:
        super().__init__(linear, prompt_rows)
        _heads[id(self)] = self
        self.register_buffer("handle", torch.tensor(id(self), device="cpu"), persistent=False)
        self.alone, self.several = HeadRows(alone=True), HeadRows(alone=False)
        self.run: Callable[[Int8Head, HeadRows], Tensor] | None = None
        self.has_both = False  # whether both graphs are there

    def by_rows(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, [..., out]; each row has the bits that it has alone."""
        return torch.ops.minispec.int8_head(x.contiguous(), self.handle, len(self.weight))

    def now(self, x: Tensor) -> Tensor:
        """Do it in the compiled loops, unless the step runs eagerly."""
        if self.run is None or runs_eagerly():
            return self.in_kernel(x)
        rows = x.view(-1, x.shape[-1])
        if not self.has_both:  # a step that is ready may ask about any number of rows, where somebody wants logprobs
            self.run(self, self.several.take(rows.new_zeros(2, rows.shape[1])))
            self.run(self, self.alone.take(rows.new_zeros(1, rows.shape[1])))
            self.has_both = True
        graph = self.alone if len(rows) == 1 else self.several
        return self.run(self, graph.take(rows)).view(*x.shape[:-1], -1)


def _head_in_loops(head: Int8Head, rows: HeadRows) -> Tensor:
    """Return an LM head's products of the rows, [T, out]."""
    # That this is asked gives one row a graph of its own: the other would take it for the first of four.
    return head.in_loops(rows.x[:1] if rows.alone else rows.x)


_heads: weakref.WeakValueDictionary[int | float, Int8Head] = weakref.WeakValueDictionary()  # by id


@operator(
    "int8_head(Tensor x, Tensor handle, int features) -> Tensor",
    lambda x, handle, features: x.new_empty(*x.shape[:-1], features),
    "CPU",
)
def _int8_head(x: Tensor, handle: Tensor, features: int) -> Tensor:
    """Return the logits [..., features] of the LM head behind `handle` [] int64."""
    return _heads[handle.item()].now(x)


class Int8Embedding(nn.Module):
    """An embedding whose rows are those of an int8 LM head."""

    weight: Tensor
    scale: Tensor

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


def quantize(model: Model, ids: list[int], prompt_rows: int = QUERY_BLOCK) -> Cost:
    """Replace the model's linear layers, and an embedding tied to one, by int8 ones; return what it cost on `ids`.

    Each layer gives its old weight up before the next one is quantized, so memory exceeds the model's by no more than a
    layer. Whoever needs an old weight, as a draft head may, takes it before.
    """
    before = _logits(model, ids)
    replace_weights(model, prompt_rows)
    after, divergence, same = _logits(model, ids), 0.0, 0
    for old, new in zip(before, after, strict=True):  # by rows, since in fp32 all of them are as large as a layer
        chances, others = (logits.float().log_softmax(-1) for logits in (old, new))
        divergence += float(F.kl_div(others, chances, log_target=True, reduction="sum"))
        same += int(old.argmax() == new.argmax())
    return Cost(divergence / len(ids), same / len(ids), len(ids))


def replace_weights(model: Model, prompt_rows: int = QUERY_BLOCK) -> None:
    """Replace the layers as `quantize` does, and measure nothing; on the meta device this gives their sizes."""
    _quantize_linears(model, prompt_rows)
    if model.config.tied:  # by type, since among several ranks other layers are around the two
        head = next(part for part in model.modules() if isinstance(part, Int8Head))
        name = next(name for name, part in model.named_modules() if isinstance(part, nn.Embedding))
        model.set_submodule(name, Int8Embedding(head))


def compile_head(model: Model, compiler: Compiler) -> None:
    """From now on run an int8 LM head as `compiler` compiles it, in steps that run compiled."""
    for module in model.modules():
        if isinstance(module, Int8Head):
            module.run = compiler(_head_in_loops)


def _quantize_linears(module: nn.Module, prompt_rows: int, kind: type[Int8Linear] = Int8Linear) -> None:
    """Replace every nn.Linear below `module`."""
    for name in [name for name, _ in module.named_children()]:  # a list of the layers would keep their weights
        child, within = getattr(module, name), Int8Head if name == "lm_head" else kind
        if isinstance(child, nn.Linear):
            setattr(module, name, within(child, prompt_rows))
        else:
            _quantize_linears(child, prompt_rows, within)


def _logits(model: Model, ids: list[int]) -> Tensor:
    """Return the logits [T, V] after each of `ids`, eagerly."""
    hidden, _ = model(torch.tensor([ids]), torch.arange(len(ids))[None], Causal(model.config.windows(len(ids))))
    return model.logits(hidden[0])
