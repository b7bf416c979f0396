"""Numbers of a row that no other row has a part in: what `--enable-deterministic-inference` puts in place of the rest.

In bfloat16 a sum rounds by the order of its terms. So a request's text can change with what stands beside it, wherever
that moves a term: another number of rows takes another kernel, a longer neighbour moves the ends of blocks, a rejected
sibling shifts the keys of a node. Here each row of a step is computed as if it were alone, with the same operations for
a plain step, a tree, a batch and a prompt:

    linear layers   Inductor's template for all numbers of rows, one too, in eager steps too (`template.py`)
    attention       the path from the root of a tree to a leaf is a chain, as a prompt is. For each chain the rows of
                    its own path are copied together in the order of its text, and multiplied in float32
    norms, rope     a compiled function for eager steps too, and a table
    experts         a router and products that read a token at a time, in one operator

Nothing here is known to the engine or to requests: `load/build.py` makes the parts of an engine of these.

The products of attention are PyTorch's for float32, whose library promises no order of a sum. So at start some are
computed among others and alone, before zeros and without (`reason_against_attention`). Where their bits differ, the
flag is refused.

Read next: `gather.py`, which does the same faster; `template.py`; docs/reliability.md for what is promised.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.attention import Plan, write_rows
from minispec.compiled import Key
from minispec.cpu import template
from minispec.cpu.int4 import Int4Linear
from minispec.cpu.int8 import Int8Linear
from minispec.cpu.linear import PackedLinear, pack_linears
from minispec.cpu.template import Blocks, of_any_rows
from minispec.experts import Experts, Product, through_chosen
from minispec.kv import PagedKV
from minispec.model import Model, RMSNorm, Rope
from minispec.operators import operator

STEP = 64  # chains read as many rows as they need, rounded up to a multiple of this
# A product adds up its terms in pieces. Where there are more than one piece and less than two, the library makes two
# halves of them, whose border moves with their number.
PIECE = 192
LEAST_ROWS = 4  # fewer rows have a kernel of their own
PART = 64  # numbers of a row that a norm adds up together
AREA = 1 << 17  # most queries times rows that they read in one product
NEAR = 3 << 20  # bytes of keys and values that are copied together, so that products find them in a cache


def reach_of(rows: int) -> int:
    """Return how many rows a chain with so many reads; those behind its end are masked and weigh exactly nothing."""
    rounded = -(-rows // STEP) * STEP
    return 2 * PIECE if PIECE < rounded < 2 * PIECE else rounded


class Chain(NamedTuple):
    """A chain of each of B requests: A queries at consecutive positions, and the S rows that they read."""

    requests: slice  # which of a step's
    nodes: Tensor | None  # [B, A] int64, which node of its block each query is, W for nobody; None: all in their order
    rows: Tensor  # [B * S] int64, the rows of the pool; of a chain after the first its last rows alone, [B * A]
    places: Tensor | None  # [B * A] int64, where these come among the rows of the first chain; None: it is the first
    mask: Tensor  # [B, 1, A, S] fp32, added to the scores: 0 or -inf
    queries: slice  # which of a prompt step's queries; of a tree all


class PagedChains:
    """Attention whose sums have one order, whatever the step; see the head of this file."""

    def __init__(self, kv: PagedKV, plan: Plan, layers: int) -> None:
        self.kv, self.plan = kv, plan
        plan.finish = lambda: None  # only FlexAttention reads lists of pages
        self.chains: Sequence[Chain] = ()
        self.handle = torch.tensor(id(self))
        _chains[id(self)] = self
        self._layers = [ChainLayer(kv, at, self) for at in range(layers)]

    def layer(self, index: int) -> ChainLayer:
        """Return the attention of one layer; asked for layer 0, it works out what the step reads and sees."""
        if index == 0:
            self.chains = self._of_prompts() if self.plan.prompts else self._of_trees()
        return self._layers[index]

    def _of_prompts(self) -> list[Chain]:
        """Return a chain for each of the requests of a prompt step, in parts that fit in AREA."""
        chains: list[Chain] = []
        starts, first = self.plan.starts.tolist(), 0
        for slot, same in itertools.groupby(self.plan.slots.tolist()):
            last = first + len(list(same))
            if slot:  # blocks of padding are left out
                chains += self._of_prompt(first, last, starts[first])
            first = last
        return chains

    def _of_prompt(self, first: int, last: int, start: int) -> list[Chain]:
        """Return the parts of a request's chain, which has these blocks; `start` is its first position."""
        width, length = self.plan.width, (last - first) * self.plan.width
        end = self.plan.ends[first:last].amax()
        rows = self._rows_of(slice(first, first + 1), reach_of(start + length), end[None])[0]
        size = max(1, AREA // len(rows) // width) * width
        parts = [(at, min(size, length - at)) for at in range(0, length, size)]
        return [
            Chain(slice(None), None, rows, None,
                  self._mask(torch.arange(start + at, start + at + count)[None], start + at + count),
                  slice(first * width + at, first * width + at + count))
            for at, count in parts
        ]  # fmt: skip

    def _of_trees(self) -> list[Chain]:
        """Return the chains of all trees, of so many requests together as fit in NEAR."""
        reach = [reach_of(start + self.plan.width) for start in self.plan.starts.tolist()]
        most, borders = NEAR // (8 * self.kv.pool.shape[1] * self.kv.pool.shape[3]), [0]
        for at in range(1, len(reach)):
            if (at + 1 - borders[-1]) * max(reach[borders[-1] : at + 1]) > most:
                borders.append(at)
        return [chain for some in map(slice, borders, [*borders[1:], len(reach)]) for chain in self._of_some(some)]

    def _of_some(self, some: slice) -> list[Chain]:
        """Return as many chains as the tree with the most leaves has; a tree with fewer has nobody in the last ones."""
        plan, width = self.plan, self.plan.width
        visible, slot_rows = (plan.whole or plan).visible[some], plan.rows.view(-1, width)[some]
        starts, batch = plan.starts[some], len(slot_rows)
        live = slot_rows >= self.kv.page_size  # padding writes to page 0
        live[:, 0] = True  # even a root beyond the context is a chain, since a product over no rows is none
        seen = (visible & live[:, :, None]).sum(1)  # how many live nodes see each node, itself included
        leaf = live & (seen == 1)
        counts = leaf.sum(1)
        leaves = (~leaf).to(torch.int8).argsort(dim=1, stable=True)[:, : int(counts.max())]  # [B, L]
        length = (visible.sum(-1) * live).gather(1, leaves) * (torch.arange(leaves.shape[1]) < counts[:, None])
        most = int(length.max())
        order = (~visible).to(torch.int8).argsort(dim=-1, stable=True)  # a node's ancestors first, parents first
        path = order.gather(1, leaves[:, :, None].expand(-1, -1, width))[:, :, :most]  # [B, L, A]
        inside = torch.arange(most) < length[..., None]
        path_rows = slot_rows[:, None].expand(-1, path.shape[1], -1).gather(2, path)
        # Nobody reads the request's own root, whose numbers are finite.
        path_rows = torch.where(inside, path_rows, slot_rows[:, :1, None])
        nodes = torch.where(inside, path, width)
        position = starts[:, None] + torch.arange(most)
        end = int(starts.max()) + most
        rows = self._rows_of(some, reach_of(end), starts)
        places = (position + torch.arange(batch)[:, None] * rows.shape[1]).flatten()
        rows = rows.flatten().index_copy(0, places, path_rows[:, 0].flatten())
        mask, whole = self._mask(position, end), slice(width)
        if most == width and leaves.shape[1] == 1 and bool(inside.all()):
            return [Chain(some, None, rows, None, mask, whole)]
        others = [Chain(some, nodes[:, at], path_rows[:, at].flatten(), places, mask, whole)
                  for at in range(1, leaves.shape[1])]  # fmt: skip
        return [Chain(some, nodes[:, 0], rows, None, mask, whole), *others]

    def _rows_of(self, blocks: slice, reach: int, ends: Tensor) -> Tensor:
        """Return the rows [g, S] of the pool that hold the first positions of the blocks' slots.

        From `ends` [g] on they are the slot's row 0: what others left behind there might be no number.
        """
        position, size = torch.arange(reach), self.kv.page_size
        page = (position // size).clamp(max=self.kv.pages_per_slot - 1)
        rows = self.kv.table[self.plan.slots[blocks]][:, page].long() * size + position % size
        return torch.where(position < ends[:, None], rows, rows[:, :1])

    def _mask(self, position: Tensor, end: int) -> Tensor:
        """Return the mask [B, 1, A, S] of queries at `position` [B, A], all before `end`.

        A query sees itself and what is before it.
        """
        ahead = torch.arange(reach_of(end)) - position[..., None]
        sees = ahead <= 0
        if self.plan.first is not None:
            sees &= ahead > -self.plan.sliding
        return torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf)[:, None]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with q [Hkv, B, G, T, D] fp32, scaled, to one layer's rows of the pool; returns the same shape.

        The G query heads that share a KV head are rows of one product.
        """
        kv_heads, batch, group, length, dim = q.shape
        near = keys  # until the first chain's are copied
        last: Tensor | None = None
        both = keys.as_strided((2 * kv_heads, *keys.shape[2:]), keys.stride()[1:])  # values lie right behind their keys
        whole = len(self.chains) == 1 and self.chains[0].nodes is None and not self.plan.prompts
        out = q if whole else q.new_zeros(kv_heads, batch, group, length + 1, dim)  # what nobody asks for comes last
        for chain in self.chains:
            if chain.places is not None:
                near.index_copy_(1, chain.places, both.index_select(1, chain.rows).float())
            elif chain.rows is not last:
                near, last = both.index_select(1, chain.rows).float(), chain.rows  # [2 * Hkv, B * S, D]
            asked, into = q[:, chain.requests], out[:, chain.requests]
            if chain.nodes is None:
                done = _attended(asked[:, :, :, chain.queries], near, chain.mask)
                if whole:
                    return done
                into[:, :, :, chain.queries] = done
            else:
                nodes = chain.nodes[None, :, None, :, None].expand(kv_heads, -1, group, -1, dim)
                asked = asked.gather(3, nodes.clamp(max=length - 1))
                into.scatter_(3, nodes, _attended(asked, near, chain.mask))
        return out[:, :, :, :length].contiguous()


def _attended(q: Tensor, near: Tensor, mask: Tensor) -> Tensor:
    """Attend with q [Hkv, B, G, A, D] to keys and values near [2 * Hkv, B * R, D]; mask [B, 1, A, S], S at most R."""
    (kv_heads, batch, group, count, dim), reach = q.shape, mask.shape[-1]
    keys, values = near.view(2, kv_heads * batch, -1, dim)[:, :, :reach].unbind()
    rows = q.reshape(kv_heads * batch, group * count, dim)
    if group * count < LEAST_ROWS:
        rows = F.pad(rows, (0, 0, 0, LEAST_ROWS - group * count))
    scores = torch.bmm(rows, keys.mT)
    scores[:, : group * count].view(kv_heads, batch, group, count, reach).add_(mask)
    return torch.bmm(torch.softmax(scores, -1), values)[:, : group * count].reshape(q.shape)


class ChainLayer(Key):
    """One layer of PagedChains. Compiled it serves any size."""

    def __init__(self, kv: PagedKV, index: int, chains: PagedChains) -> None:
        self.keys, self.values = kv.layer(index)
        self.handle, self.plan, self.rows = chains.handle, chains.plan, chains.plan.rows

    @property
    def any_size(self) -> Sequence[tuple[Tensor, tuple[int, ...]]]:
        return ((self.rows, (0,)),)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [B, Hkv, T, D] into their rows, then attend with q [B, Hq, T, D] -> [B, Hq, T, D]."""
        write_rows(self.keys, self.values, self.rows, k, v)
        kv_heads, dim = k.shape[1], q.shape[3]
        group = q.shape[1] // kv_heads
        # All that is done to single numbers is done here, where compiled code does it in passing.
        wide = (q.float() * dim**-0.5).unflatten(1, (kv_heads, group)).transpose(0, 1)  # [Hkv, B, G, T, D]
        if q.shape[2] == 1 and group < LEAST_ROWS:
            wide = F.pad(wide, (0, 0, 0, 0, 0, LEAST_ROWS - group))
        out = torch.ops.minispec.attend_chains(wide.contiguous(), self.keys, self.values, self.handle)[:, :, :group]
        return out.to(q.dtype).transpose(0, 1).flatten(1, 2)


_chains: weakref.WeakValueDictionary[int | float, PagedChains] = weakref.WeakValueDictionary()  # by id


@operator(
    "attend_chains(Tensor q, Tensor keys, Tensor values, Tensor handle) -> Tensor",
    lambda q, *_: q.new_empty(q.shape),
    "CPU",
)
def _attend_chains(q: Tensor, keys: Tensor, values: Tensor, handle: Tensor) -> Tensor:
    """Attend with q under the plan behind `handle` [] int64."""
    return _chains[handle.item()].attend(q, keys, values)


# ---- the other parts of a model --------------------------------------------------------------------------------------


class RowNorm(RMSNorm):
    """RMSNorm that adds up a row in the same order in eager code as in compiled code."""

    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        if torch.compiler.is_compiling():
            return normed(x, self.weight, self.eps)
        return of_any_rows(_norm_alone(self.eps), x.reshape(-1, x.shape[-1]), self.weight).view(x.shape)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of the last dimension of x; to be compiled."""
    # Added up in parts: one sum of a long row would be shared out among threads if there is no other row.
    wide, size = x.float(), x.shape[-1]
    parts = wide.square().unflatten(-1, (-1, math.gcd(size, PART))).sum(-1)
    out = wide * torch.rsqrt(parts.sum(-1, keepdim=True) / size + eps)
    return weight * out.to(x.dtype)


@functools.cache
def _norm_alone(eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(lambda x, weight: normed(x, weight, eps), fullgraph=True, dynamic=False)


class RowExperts(Experts):
    """The experts of a layer in the template's blocks. The router's scores are weighed here too, never in a graph."""

    handle: Tensor

    def __init__(self, experts: Experts) -> None:
        nn.Module.__init__(self)
        self.per_token, self.renormalises = experts.per_token, experts.renormalises
        # In tuples, which torch.compile does not search for weights.
        self.first, self.second = (
            tuple(Blocks(weight.detach()) for weight in stack) for stack in (experts.gate_up_proj, experts.down_proj)
        )
        _experts[id(self)] = self
        self.register_buffer("handle", torch.tensor(id(self), device="cpu"), persistent=False)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the mixture's output [..., d] for x [..., d] with the router's scores [..., E]."""
        return torch.ops.minispec.row_experts(x, scores, self.handle)

    def now(self, x: Tensor, scores: Tensor) -> Tensor:
        """Do what `forward` does, once it is known which experts are chosen."""
        return through_chosen(x, *self.choose(scores), _by(self.first), _by(self.second))


def _by(layers: Sequence[Blocks]) -> Product:
    return lambda rows, expert: layers[expert](rows)


_experts: weakref.WeakValueDictionary[int | float, RowExperts] = weakref.WeakValueDictionary()  # by id


@operator("row_experts(Tensor x, Tensor scores, Tensor handle) -> Tensor", lambda x, *_: x.new_empty(x.shape), "CPU")
def _row_experts(x: Tensor, scores: Tensor, handle: Tensor) -> Tensor:
    """Do the work of the experts behind `handle` [] int64."""
    return _experts[handle.item()].now(x, scores)


class RopeTable:
    """The rotary factors of all positions, worked out once: sines in compiled code may differ in the last bit."""

    def __init__(self, model: Model, positions: int) -> None:
        every = Rope.at(torch.arange(positions)[None], model.frequencies, model.norm.weight.dtype, model.rope_factor)
        self.cos, self.sin = (part[0, 0].contiguous() for part in every)

    def __call__(self, positions: Tensor) -> Rope:
        """Return the factors for positions [B, T]; those beyond the table, which only padding has, are the last."""
        at = positions.clamp(max=len(self.cos) - 1)
        return Rope(self.cos[at][:, None], self.sin[at][:, None])


def keep_rows_apart(model: Model) -> None:
    """Replace norms, experts and linear layers of a model; raises ValueError for one that has no such form."""
    sizes = set()
    for name, part in model.named_modules():
        weight = getattr(part, "down_proj" if isinstance(part, Experts) else "weight", None)
        linear = isinstance(part, (nn.Linear, Int8Linear, Experts))
        if not linear or weight is None:
            continue
        sizes.add(weight.shape)
        if weight.shape[-1] % template.INPUTS:
            raise ValueError(f"--enable-deterministic-inference: {name} has {weight.shape[-1]} inputs, and their "
                             f"sum has one order for multiples of {template.INPUTS} alone")  # fmt: skip
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is RMSNorm:
                setattr(module, name, RowNorm(child))
            elif type(child) is Experts:
                setattr(module, name, RowExperts(child))
            elif isinstance(child, Int8Linear):
                child.pack()
                child.alone = False
            elif isinstance(child, Int4Linear):
                child.many_rows = None
    pack_linears(model)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.wide = True
    # Eager code has a graph of a product for each of these, and torch.compile counts them as one function's.
    torch._dynamo.config.recompile_limit += 2 * len(sizes)


@functools.cache
def reason_against_attention(heads: int, kv_heads: int, dim: int) -> str | None:
    """Return why attention of such heads cannot keep rows apart on this machine; None: it can, as far as is seen here.

    Rows are computed among others and with fewer, before zeros and without, and their bits compared.
    """
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    longest, group = 12 * PIECE, heads // kv_heads
    keys, values, q = draw(kv_heads, longest, dim), draw(kv_heads, longest, dim), draw(kv_heads, 128 * group, dim)
    for rows in (1, STEP, PIECE, PIECE + 8, 2 * PIECE, 640, 1088):
        reach = reach_of(rows)
        mask = torch.zeros(longest).masked_fill_(torch.arange(longest) >= rows, -torch.inf)
        weights = torch.softmax(torch.bmm(q, keys.mT) + mask, -1)
        whole = torch.bmm(weights, values)
        for count in (LEAST_ROWS, LEAST_ROWS + 1, 2 * group + 2, 8 * group, 96 * group):
            near = torch.softmax(torch.bmm(q[:, :count], keys[:, :reach].mT) + mask[:reach], -1)
            if not torch.equal(torch.bmm(near, values[:, :reach]), whole[:, :count]):
                return f"PyTorch's products of {count} rows with {reach} keys round otherwise than those of more"
    return None


def round_as_eager(wanted: bool) -> None:
    """Tell Inductor whether to round wherever eager code does, so that both have the same bits."""
    if wanted or "torch._inductor.config" in sys.modules:  # an engine before this one may have wanted it
        from torch._inductor import config

        config.emulate_precision_casts = wanted
