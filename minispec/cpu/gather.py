"""Attention by gathering: a request's rows are copied together, and PyTorch's attention, or a faster one, reads them.

It reads the same pool, plan and visibility as `PagedFlex`, without FlexAttention, whose CPU kernel asks its mask for
every pair of query and key. A CPU always runs it, compiled or not, and CUDA where nothing is compiled. In compiled code
on a CPU requests with one query each have loops in place of matrix products, and others the products of `products.py`.

What each query reads and sees is worked out once a step, and all layers share it. Of a decode step it is a `Strip`
whose tensors stay where they are, so that compiled code has them for inputs, with as many rows as the longest request
has, rounded up. For one request with a small tree the plan itself writes the strip when it is filled, as part of the
compiled code around the blocks. A prefill step has a strip a request, however many those are, so compiled code calls an
operator that it does not look into.

Read next: `products.py`, `compiled.Key` for `any_size`; docs/log.md has the times.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.attention import Plan, write_rows
from minispec.compiled import Key
from minispec.cpu.products import AREA, TILE, WORTH, Products, Tile, attend_at_once, products_pay
from minispec.kv import PagedKV
from minispec.operators import operator

REACH_STEP = 64  # decode steps gather as many rows as their longest request has, rounded up to a multiple of this
FEW = 12  # nodes of one request's tree up to which the plan writes what is read, and any CPU has `attend_at_once`
FOLD_UP_TO = 32  # nodes of a block up to which the queries of a KV head become rows of one head


class Strip(NamedTuple):
    """Queries that are attended together: those of a decode step, or of one request's chunk in a prefill step."""

    queries: slice  # which of the T queries
    rows: Tensor  # [g, S] int64, the rows of the pool that each of g blocks of queries reads
    mask: Tensor  # [g, 1, queries of a block, S] in the pool's dtype, added to the scores: 0 or -inf
    tiles: Sequence[Tile] = ()  # of the queries of one request, where `products.py` attends


class PagedGather:
    """The rows that each request's queries read, copied together; see the head of this file."""

    def __init__(self, kv: PagedKV, plan: Plan, layers: int) -> None:
        self.kv, self.plan = kv, plan
        plan.finish = lambda: None  # only FlexAttention reads lists of pages
        self.most = kv.pages_per_slot * kv.page_size  # the rows of a slot
        self.multiplies = products_pay(kv.pool.dtype, kv.pool.device)
        # Do the queries that share a KV head become rows of one head, so that each key is read once?
        self.folds = not plan.prompts and (plan.width <= FOLD_UP_TO or self.multiplies)
        # Are a request's blocks of a prefill step attended together? Whose they are, the host learns by a look.
        self.merges = plan.prompts and kv.host_looks
        # For the requests of a prefill step that are long enough.
        self.products = _products.setdefault(kv, Products()) if self.merges and self.multiplies else None
        self.strips: list[Strip] = []
        # Is it one request's tree of few nodes? That has a graph of its own on a CPU.
        self.few = not plan.prompts and plan.batch == 1 and plan.width <= FEW
        if plan.prompts:
            _gathers[id(self)] = self
            self.handle = torch.tensor(id(self))
            self._layers: Sequence[GatherLayer | PromptLayer] = [PromptLayer(kv, at, self) for at in range(layers)]
            return
        self._layers = [GatherLayer(*kv.layer(index), self) for index in range(layers)]
        # What the layers read lies at the front of these, which are made with the first step.
        self._rows: Tensor | None = None
        self._mask: Tensor | None = None
        if self.few:
            self._make()  # already now, since compiled code writes them
            plan.finish = self._write

    def layer(self, index: int) -> GatherLayer | PromptLayer:
        """Return the attention of one layer; asked for layer 0, it works out what the step reads and sees."""
        if index == 0 and self.few:
            self._place(self._reach())
        elif index == 0:
            self.strips = self._strips()
            if not self.plan.prompts:
                rows, mask = self.strips[0].rows, self.strips[0].mask
                read, sees = self._place(rows.shape[1])
                read.copy_(rows)
                sees.copy_(mask)
        return self._layers[index]

    def _place(self, reach: int) -> tuple[Tensor, Tensor]:
        """Return the strip of a decode step with `reach` rows, which the layers read; tell them if `reach` is new."""
        layers = cast(list[GatherLayer], self._layers)
        first, batch = layers[0], self.plan.batch
        if "read" not in vars(first) or first.read.shape[1] != reach:
            all_rows, all_masks = self._make()
            read, shape = all_rows[: batch * reach].view(batch, reach), (batch, 1, self.plan.width, reach)
            # Contiguous, unless compiled code writes masks for all rows of the slot.
            mask = all_masks[..., :reach] if self.few else all_masks.view(-1)[: math.prod(shape)].view(shape)
            for layer in layers:
                layer.read, layer.mask = read, mask
        return first.read, first.mask

    def _make(self) -> tuple[Tensor, Tensor]:
        """Return the memory for the rows and masks of a decode step; on a CPU its unused part costs nothing."""
        if self._rows is None or self._mask is None:
            batch, width = self.plan.batch, self.plan.width
            self._rows = self.plan.slots.new_empty(batch * self.most)
            self._mask = self.kv.pool.new_empty(batch, 1, width, self.most)
        return self._rows, self._mask

    def _write(self) -> None:
        """Write the strip of one request with a small tree, as the plan is filled.

        Compiled code writes it for all rows that a slot can have. How many are read is no shape of its graph then.
        """
        reach = self.most if torch.compiler.is_compiling() else self._reach()
        (all_rows, all_masks), (rows, mask) = self._make(), self._rows_and_mask(slice(0, 1), reach)
        all_rows[:reach].copy_(rows[0])
        all_masks[0, 0, :, :reach].copy_(torch.where(mask[0], 0.0, -torch.inf))

    def _strips(self) -> list[Strip]:
        """Return what is attended together in this step."""
        plan = self.plan
        if not self.merges:
            return [self._strip(slice(0, plan.batch * plan.blocks), self._reach())]
        slots, starts, ends = plan.slots.tolist(), plan.starts.tolist(), plan.ends.tolist()
        strips, first = [], 0
        for slot, same in itertools.groupby(slots):
            last = first + len(list(same))
            if slot:  # blocks of padding are left out
                tiles = self._tiles(starts[first:last], ends[first:last]) if self.products else ()
                strips.append(self._strip(slice(first, last), max(ends[first:last]))._replace(tiles=tiles))
            first = last
        return strips

    def _tiles(self, starts: Sequence[int], ends: Sequence[int]) -> list[Tile]:
        """Return the tiles of one request's blocks, which start and end at these rows."""
        width, tiles = self.plan.width, []
        count = max(1, min(TILE, AREA // max(ends)) // width)
        for first in range(0, len(starts), count):
            some = slice(first, first + count)
            queries = slice(first * width, (first + len(starts[some])) * width)
            seen = min(starts[some]) if self.plan.first is None else 0
            tiles.append(Tile(queries, seen, max(ends[some])))
        return tiles

    def _reach(self) -> int:
        """Return how many rows to read of every slot."""
        rows = int(self.plan.ends.max()) if self.kv.host_looks else self._mapped_pages() * self.kv.page_size
        return min(max(1, -(-rows // REACH_STEP)) * REACH_STEP, self.most)

    def _mapped_pages(self) -> int:
        """Return the most pages any slot has, as the host mapped them; for padding, those that hold the nodes."""
        return max(self.kv.pages_for(self.plan.window), *self.kv.mapped)

    def _strip(self, blocks: slice, reach: int) -> Strip:
        """Return the strip of some blocks, all of which read the first `reach` rows of their slots."""
        width, (rows, mask) = self.plan.width, self._rows_and_mask(blocks, reach)
        mask = torch.zeros(mask.shape, dtype=self.kv.pool.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        return Strip(slice(blocks.start * width, blocks.stop * width), rows, mask[:, None])

    def _rows_and_mask(self, blocks: slice, reach: int) -> tuple[Tensor, Tensor]:
        """Return the rows to read [g, S] int64 and who sees them [g, queries, S] bool.

        Blocks that are merged count as one, of all their queries, since they are of one request.

        A row that no live query of its block may see is replaced by the block's row 0, which is the request's own.
        Masking alone would not keep it out: in float16 it may hold an overflow, of padding in page 0 or of a page's
        former owner, and a weight of 0 times infinity is NaN.
        """
        plan, page_size = self.plan, self.kv.page_size
        position = torch.arange(reach, device=plan.starts.device)
        ahead = position - plan.starts[blocks, None]
        inside = ahead.clamp(0, plan.window - 1)[:, None, :].expand(-1, plan.width, -1)
        within = (ahead < plan.window)[:, None, :] & plan.visible[blocks].gather(2, inside)
        mask, slots, ends = (ahead < 0)[:, None, :] | within, plan.slots[blocks], plan.ends[blocks, None]
        if plan.first is not None:
            mask = mask & (ahead[:, None, :] >= plan.first[blocks, :, None])
        if self.merges:
            mask, slots, ends = mask.view(1, -1, reach), slots[:1], ends.amax(0, keepdim=True)
        rows = self.kv.table[slots][:, position // page_size].long() * page_size + position % page_size
        return torch.where(mask.any(1) & (position < ends), rows, rows[:, :1]), mask

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with a prefill step's q [1, Hq, T, D] to one layer's rows of the pool -> [1, Hq, T, D].

        The result lies in memory as [1, T, Hq, D]; padding has zeros.
        """
        batch, heads, length, dim = q.shape
        out = q.new_zeros(batch, length, heads, dim).transpose(1, 2)
        for strip in self.strips:
            if self.products is not None and strip.tiles and heads * strip.mask.numel() >= WORTH:
                near = [pool[0].index_select(1, strip.rows[0]) for pool in (keys, values)]
                part = q[0, :, strip.queries].contiguous()
                for tile in strip.tiles:
                    done = self.products.attend(part, near[0], near[1], strip.mask[0, 0], tile)
                    out[0, :, strip.queries][:, tile.queries] = done
                continue
            count = len(strip.rows)
            part = q[:, :, strip.queries].reshape(heads, count, -1, dim).transpose(0, 1)
            part = _gathered(part, keys, values, strip.rows, strip.mask).transpose(0, 1)
            out[:, :, strip.queries] = part.reshape(1, heads, -1, dim)
        return out


def _gathered(q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor, multiplies: bool = False) -> Tensor:
    """Attend with q [g, H, W, D] to a strip's rows of the pool [1, Hkv, PAGES * P, D] -> [g, H, W, D].

    H is Hkv where queries are folded, which they must be where `products.py` multiplies, else Hq.
    """
    (count, reach), kv_heads, index = rows.shape, keys.shape[1], rows.view(-1)
    keys, values = keys.index_select(2, index), values.index_select(2, index)
    keys, values = (both.view(kv_heads, count, reach, -1).transpose(0, 1) for both in (keys, values))
    if multiplies:
        return attend_at_once(q, keys, values, mask)
    gqa = q.shape[1] != kv_heads
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=gqa)


def _one_query(q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """Do for q [B, H, 1, D] what `_gathered` does, in loops that Inductor makes for a CPU; H need not be folded.

    rows [B, S] int64, mask [B, 1, 1, S]. For one query no matrix product is worth being called. Heads that share a KV
    head are sums of their own in one loop, so that each key and each value is read once.
    """
    (batch, heads, _, dim), kv_heads = q.shape, keys.shape[1]
    group = heads // kv_heads
    # Stored in float32, which as_strided sees to: Inductor would turn and scale the query again for each of the keys.
    queries = q.reshape(batch, kv_heads, group, dim).float() * dim**-0.5
    queries = queries.as_strided(queries.shape, queries.stride())
    queries = queries.permute(2, 1, 0, 3)[..., None, :]  # [G, Hkv, B, 1, D]
    near = keys[0][:, rows].float()  # [Hkv, B, S, D], never stored
    scores = torch.stack([(query * near).sum(-1) for query in queries.unbind()])  # [G, Hkv, B, S]
    scores = scores + mask[:, 0, 0].float()
    weights = (scores - scores.amax(-1, keepdim=True)).exp()  # divided by their sum at the end, once for all values
    # Values are copied together first. Where Inductor looks up their places within the sum, it takes one number each of
    # 32 rows at a time, which is five times slower than 32 numbers of one row.
    near = values.index_select(2, rows.view(-1)).view(kv_heads, batch, -1, dim)
    near = near.as_strided(near.shape, near.stride()).float()
    out = torch.stack([(weight[..., None] * near).sum(2) for weight in weights.unbind()], 2)  # [Hkv, B, G, D]
    out = out / weights.sum(-1).permute(1, 2, 0)[..., None]
    return out.transpose(0, 1).reshape(q.shape).to(q.dtype)


class GatherLayer(Key):
    """One layer of PagedGather in decode steps. No number in it depends on the plan's size or on a reach.

    So compiled it serves any size. `read` [B, S] int64 and `mask` [B, 1, N, S] are a strip's, and others when the
    longest request has grown by REACH_STEP.
    """

    read: Tensor
    mask: Tensor

    def __init__(self, keys: Tensor, values: Tensor, gather: PagedGather) -> None:
        self.keys, self.values, self.plan = keys, values, gather.plan
        self.rows, self.folds, self.few, self.multiplies = gather.plan.rows, gather.folds, gather.few, gather.multiplies

    @property
    def any_size(self) -> Sequence[tuple[Tensor, tuple[int, ...]]]:
        """The rows that are read, and those that are written where queries are not few."""
        if self.few:
            return (self.read, (1,)), (self.mask, (3,))
        return (self.rows, (0,)), (self.read, (0, 1)), (self.mask, (0, 2, 3))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [B, Hkv, T, D] into their rows, then attend with q [B, Hq, T, D] -> [B, Hq, T, D]."""
        write_rows(self.keys, self.values, self.rows, k, v)
        (batch, heads, length, dim), kv_heads, mask = q.shape, k.shape[1], self.mask
        in_graph = torch.compiler.is_compiling() and not q.is_cuda
        if length == 1 and in_graph:
            return _one_query(q, self.keys, self.values, self.read, mask)
        if self.folds:
            q, mask = q.reshape(batch, kv_heads, -1, dim), mask.repeat(1, 1, heads // kv_heads, 1)
        out = _gathered(q, self.keys, self.values, self.read, mask, in_graph and (self.few or self.multiplies))
        return out.reshape(batch, heads, length, dim)


class PromptLayer(Key):
    """One layer of PagedGather in prefill steps; compiled it serves any size, too."""

    def __init__(self, kv: PagedKV, index: int, gather: PagedGather) -> None:
        self.keys, self.values = kv.layer(index)
        self.gather, self.plan = gather, gather.plan
        self.rows = gather.plan.rows

    @property
    def any_size(self) -> Sequence[tuple[Tensor, tuple[int, ...]]]:
        return ((self.rows, (0,)),)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [1, Hkv, T, D] into their rows, then attend with q [1, Hq, T, D] -> [1, Hq, T, D]."""
        write_rows(self.keys, self.values, self.rows, k, v)
        if torch.compiler.is_compiling():
            return torch.ops.minispec.attend_rows(q, self.keys, self.values, self.gather.handle)
        return self.gather.attend(q, self.keys, self.values)


_gathers: weakref.WeakValueDictionary[int | float, PagedGather] = weakref.WeakValueDictionary()  # by id
_products: weakref.WeakKeyDictionary[PagedKV, Products] = weakref.WeakKeyDictionary()  # one for all plans


# In compiled code a prefill step's attention is an operator: how many requests there are is then no shape of a graph.
@operator(
    "attend_rows(Tensor q, Tensor keys, Tensor values, Tensor handle) -> Tensor",
    lambda q, *_: q.new_empty(q.transpose(1, 2).shape).transpose(1, 2),
    "CPU",
)
def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, handle: Tensor) -> Tensor:
    """Attend with q in the rows of the plan behind `handle` [] int64; laid out as `PagedGather.attend` returns it."""
    return _gathers[handle.item()].attend(q, keys, values)
