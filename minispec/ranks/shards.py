"""One rank's share of a model: which slices of its matrices it has, and the three layers in which ranks meet.

With tensor parallelism (Megatron-LM, arXiv 1909.08053) every rank has all layers and a part of each matrix. The one
idea: a block of fewer attention heads and a narrower MLP is an ordinary `Block` of a smaller config, so the model's own
code runs on every rank. Only the two products that lead back into the residual stream, o and down, yield a part of a
sum, which the ranks add up (`Summed`). Every rank therefore holds the whole residual stream, the same bits on all. So
do the scores of a mixture's router, and all ranks choose the same experts.

    q, k, v       rows of whole KV groups: a KV head and the query heads that read it
    gate, up      rows, the same for both; of every expert
    router        whole
    o, down       the columns that belong to those rows
    embedding     rows by token id; what a rank lacks is zero, and the ranks add up (`SplitEmbedding`)
    LM head       the same rows; the ranks' logits are put side by side (`SplitHead`)
    norms, bias of o and down    whole

KV groups are spread as evenly as they go: 9 query heads over 3 KV heads are 6/2 and 3/1 on two ranks. With more ranks
than KV heads each KV head is repeated on several ranks, and its query heads are spread over those.

Files hold q, k, v and gate, up apart, so each is sliced by itself, before the block joins them. Layers are replaced
when the weights are there, and before anything is packed or compiled.

Read next: `model.py` for the block, `link.py` for the processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed._functional_collectives  # how the operators below are traced
from torch import Tensor, nn

from minispec.model import Model, ModelConfig
from minispec.model_config import ModelError

# ---- what ranks do together; in compiled code and in captured steps too ------------------------------------------


operators = torch.ops._c10d_functional  # not their Python wrappers, whose tensors no dispatch mode can record


def summed(x: Tensor, group: str) -> Tensor:
    """Return the sum of every rank's x over a process group, by its name; the same bits on all ranks."""
    return operators.wait_tensor(operators.all_reduce(x, "sum", group))


def from_first(x: Tensor, group: str) -> Tensor:
    """Return rank 0's x on every rank; the others give a tensor of its shape and dtype."""
    return operators.wait_tensor(operators.broadcast(x, 0, group))


def side_by_side(x: Tensor, size: int, group: str) -> Tensor:
    """Return the x [..., n] of all `size` ranks as [..., size * n], in the order of ranks."""
    flat = operators.all_gather_into_tensor(x.reshape(-1, x.shape[-1]), size, group)
    return torch.cat(operators.wait_tensor(flat).chunk(size), dim=-1).view(*x.shape[:-1], -1)


# ---- who has what ------------------------------------------------------------------------------------------------


def share(count: int, size: int, rank: int, unit: int = 1) -> range:
    """Return the part of `count` things that a rank of `size` has, as even as whole units allow, larger parts first."""
    units, rest = divmod(count // unit, size)
    first = rank * units + min(rank, rest)
    return range(first * unit, (first + units + (rank < rest)) * unit)


@dataclass(frozen=True)
class Shard:
    """What rank `rank` of `size` has of a model of these sizes; see the head of this file."""

    whole: ModelConfig
    rank: int
    size: int
    group: str  # name of the process group

    def __post_init__(self) -> None:
        c = self.whole
        # Every rank needs a head: of KV groups of its own, or of one that as many ranks share as any other.
        allowed = [n for n in range(1, c.heads + 1) if n <= c.kv_heads or n % c.kv_heads == 0]
        if self.size not in allowed:
            raise ValueError(f"--tp-size {self.size}: the model has {c.heads} attention heads over {c.kv_heads} KV "
                             "heads, and whole KV groups go to a rank, or several ranks share one; allowed: "
                             f"{', '.join(map(str, allowed))}")  # fmt: skip
        narrowest = min(c.intermediate_size, c.expert_size if c.sparse else c.intermediate_size)
        if self.size > narrowest or self.size > c.vocab_size:
            raise ValueError(f"--tp-size {self.size}: its MLP of {narrowest} or its vocabulary of {c.vocab_size} has "
                             "less than a row for each")  # fmt: skip

    @property
    def repeats(self) -> int:
        """How many ranks have a KV head."""
        return max(self.size // self.whole.kv_heads, 1)

    @property
    def kv_heads(self) -> range:
        """The KV heads."""
        return share(self.whole.kv_heads, self.size // self.repeats, self.rank // self.repeats)

    @property
    def heads(self) -> range:
        """The query heads."""
        own, group = self.kv_heads, self.whole.heads // self.whole.kv_heads
        part = share(group, self.repeats, self.rank % self.repeats)  # of the group of a KV head
        return range(own.start * group + part.start, (own.stop - 1) * group + part.stop)

    def inner(self, width: int) -> range:
        """Return the rows of gate and up, of `width` each: whole multiples of 16 where that can be, as kernels like."""
        return share(width, self.size, self.rank, 16 if width % 16 == 0 and width >= 16 * self.size else 1)

    @property
    def vocabulary(self) -> range:
        """The token ids of embedding and LM head: the same number on every rank, the last ones may lie beyond V."""
        rows = -(-self.whole.vocab_size // self.size)
        return range(self.rank * rows, (self.rank + 1) * rows)

    @property
    def config(self) -> ModelConfig:
        """The sizes of this rank's model, its vocabulary included."""
        return replace(
            self.whole, heads=len(self.heads), kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner(self.whole.intermediate_size)),
            expert_size=len(self.inner(self.whole.expert_size)), vocab_size=len(self.vocabulary),
        )  # fmt: skip

    # ---- from the files ----------------------------------------------------------------------------------------

    def slices(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's slice of each tensor of a whole model, under its published name; raises ModelError."""
        yield from ((name, self.slice(name, tensor)) for name, tensor in tensors)

    def slice(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's slice of one published tensor, a view where it can be; raises ModelError for its shape."""
        part, _, kind = name.rpartition(".")
        along = self._along(part.rpartition(".")[2], ".experts." in part)
        if along is None or (along[0] == 1 and kind != "weight"):
            return tensor  # a norm, a router; the bias of o and down, which is added once; scales of output channels
        dim, rows, count = along
        if tensor.dim() <= dim or tensor.shape[dim] != count:
            raise ModelError(f"the weights are not those that config.json describes; wrong shapes: {name} "
                             f"{list(tensor.shape)}, where dimension {dim} must be {count}")  # fmt: skip
        found = tensor.narrow(dim, min(rows.start, count), max(min(rows.stop, count) - rows.start, 0))
        missing = len(rows) - found.shape[dim]
        return torch.cat((found, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else found

    def _along(self, part: str, of_expert: bool) -> tuple[int, range, int] | None:
        """Return by which dimension a published module is sliced, the indices there, and how many there are in all."""
        c, dim = self.whole, self.whole.head_dim
        width = c.expert_size if of_expert else c.intermediate_size
        inner = self.inner(width)
        heads, kv_heads = (range(own.start * dim, own.stop * dim) for own in (self.heads, self.kv_heads))
        table = {
            "q_proj": (0, heads, c.heads * dim), "k_proj": (0, kv_heads, c.kv_heads * dim),
            "v_proj": (0, kv_heads, c.kv_heads * dim), "o_proj": (1, heads, c.heads * dim),
            "gate_proj": (0, inner, width), "up_proj": (0, inner, width), "down_proj": (1, inner, width),
            "embed_tokens": (0, self.vocabulary, c.vocab_size),
            "lm_head": (0, self.vocabulary, c.vocab_size),
        }  # fmt: skip
        return table.get(part)

    def join(self, model: Model) -> None:
        """Replace the layers of a model of `config` in which the ranks meet; its config speaks of all ids from then on.

        To be called when the weights are loaded and before they are packed.
        """
        for block in cast(Iterable[Any], model.layers):
            last = "experts" if block.sparse else "down_proj"
            block.o_proj = Summed(block.o_proj, self)
            setattr(block, last, Summed(getattr(block, last), self))
        model.embed_tokens = SplitEmbedding(model.embed_tokens, self)  # type: ignore[assignment]  # is called, and no more
        model.lm_head = SplitHead(model.lm_head, self)  # type: ignore[assignment]
        model.config = replace(self.config, vocab_size=self.whole.vocab_size)


# ---- the layers --------------------------------------------------------------------------------------------------


class Summed(nn.Module):
    """A layer that gives every rank a part of a sum: the ranks' parts are added up, then the bias.

    It is a linear layer of which a rank has some of the inputs, or experts of which it has some of the inner width.
    """

    def __init__(self, layer: nn.Module, shard: Shard) -> None:
        super().__init__()
        self.layer, self.bias, self.group = layer, getattr(layer, "bias", None), shard.group
        layer.bias = None  # type: ignore[assignment]  # as nn.Linear has it without one

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the whole layer's output [..., out] for this rank's part of x [..., in], or for x and scores."""
        out = summed(self.layer(*inputs), self.group)
        return out if self.bias is None else out + self.bias


class SplitEmbedding(nn.Module):
    """An embedding of which every rank has the rows of some ids."""

    def __init__(self, rows: nn.Embedding, shard: Shard) -> None:
        super().__init__()
        self.rows, self.first, self.group = rows, shard.vocabulary.start, shard.group

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.rows.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of tokens [...] int64; all ranks but one add zeros, so the sum is exact."""
        index, count = tokens - self.first, len(self.rows.weight)
        mine = (index >= 0) & (index < count)
        return summed(self.rows(index.clamp(0, count - 1)).masked_fill(~mine[..., None], 0), self.group)


class SplitHead(nn.Module):
    """An LM head of which every rank has the rows of some ids."""

    def __init__(self, linear: nn.Linear, shard: Shard) -> None:
        super().__init__()
        self.linear, self.size, self.group, self.vocab_size = linear, shard.size, shard.group, shard.whole.vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of normed hidden states [..., d], on every rank."""
        return side_by_side(self.linear(hidden), self.size, self.group)[..., : self.vocab_size]
