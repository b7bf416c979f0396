"""The three `attend`s: how queries meet the keys and values of their request. The only file with FlexAttention.

The one idea: every forward pass is a set of query blocks, and every block is a tree. Block r belongs to one slot,
starts at row `starts[r]`, and its W nodes see all rows below the start and, within the block, what `visible[r]` says:
the ancestors in a draft tree, the lower triangle in a chunk of prompt. So one mask serves verification and prefill.

    a decode step: B blocks of N nodes, queries [B, H, N, D]      a prefill step: T / W blocks, queries [1, H, T, D]
    row:   0 ......... starts | 0 1 2 3  <- nodes, at rows starts + 0..W-1
    node 2 sees all of this ->  x . x .  <- visible[r, 2]

  PagedFlex    FlexAttention (arXiv 2412.05496) over the whole pool through a block mask; compiled, on CUDA
  PagedGather  copies a request's rows together and calls scaled_dot_product_attention; eagerly, and compiled on a CPU,
               where a few queries have loops of their own instead, and many the products of `products.py`
  Causal       no cache at all: training, and the independent reference of the tests

`Plan` owns every tensor that describes a step, allocated once per bucket and refilled in place: compiled graphs and
captured ones hold on to these addresses. Block lists are written directly; `create_block_mask` costs milliseconds.

Read next: `drafter.py`, which proposes the trees; `engine.py`, which fills a plan and runs the model on it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from minispec.kv import PagedKV
from minispec.load.packed import FEW_ROWS
from minispec.products import AREA, TILE, WORTH, Products, Tile, attend_at_once, products_pay

QUERY_BLOCK = 128  # the most rows of one query block of FlexAttention

REACH_STEP = 64  # decode steps gather as many rows as their longest request has, rounded up to a multiple of this
FOLD_UP_TO = 32  # nodes of a block up to which gathering makes the queries of a KV head rows of one head

# CUDA's kernels work on tiles of query rows by key rows. With larger ones the sums and the mask do not fit in registers
# and spill into memory; benchmarks/lowering.py compiles the kernels and shows it.
TILE_ROWS, TILE_KEYS = 64, 32

# Writing rows is an operator of its own, so that warm-up on CUDA does not tune it: a tuned kernel that writes into the
# pool is tried out on copies of the pool, gigabytes each time.
_library = torch.library.Library("minispec", "FRAGMENT")
_library.define("write_rows(Tensor(a!) pool, Tensor rows, Tensor new) -> ()")


def _write_rows(pool: Tensor, rows: Tensor, new: Tensor) -> None:
    """Store new [1, Hkv, T, D] in rows [T] of pool [1, Hkv, PAGES * P, D]."""
    pool.index_copy_(2, rows, new)


_library.impl("write_rows", _write_rows, "CompositeExplicitAutograd")
torch.library.register_fake("minispec::write_rows", lambda pool, rows, new: None)


def most_nodes(device: torch.device) -> int:
    """Return the most nodes a tree may have; CUDA's decode kernel takes fewer query rows than a query block has."""
    return QUERY_BLOCK - 1 if device.type == "cuda" else QUERY_BLOCK


def prefill_block(device: torch.device) -> int:
    """Return the width of a prefill step's query blocks, which every prompt chunk fills up with padding.

    CUDA's kernels want whole blocks of 128; on a CPU a quarter of that keeps the padding of short prompts low, the
    usual ones.
    """
    return QUERY_BLOCK if device.type == "cuda" else QUERY_BLOCK // 4


class Plan:
    """The static tensors of one bucket: whose rows each query block reads, what each node sees, where new rows go.

    batch and blocks: the queries are [batch, H, T, D] with T = blocks * width; r = batch * blocks query blocks.
    slots [r] int64, starts [r] int64, visible [r, W, M] bool, rows [r * W] int64, and ends [r] int64, the row after the
    last one that a block reads. For FlexAttention, kv_count [batch, 1, blocks] and
    kv_index [batch, 1, blocks, PAGES] int32 list the pages a block reads under the mask, full_count and full_index
    those it sees whole. `visible` speaks of the M rows from `starts` on: the nodes themselves (M = W, the default), or
    a window that holds nodes of earlier calls too (a drafter growing its tree level by level). prompts: whether the
    blocks are chunks of prompts, of any number of requests.
    """

    def __init__(
        self, kv: PagedKV, batch: int, blocks: int, width: int, window: int | None = None, *, prompts: bool = False
    ) -> None:
        assert width <= QUERY_BLOCK and (blocks == 1 or QUERY_BLOCK % width == 0), "nodes must fit in query blocks"
        self.kv, self.batch, self.blocks, self.width, self.window = kv, batch, blocks, width, window or width
        self.prompts = prompts
        self.query_block = QUERY_BLOCK if blocks == 1 else width  # rows of a block in FlexAttention's eyes
        device, r = kv.pool.device, batch * blocks
        self.slots = torch.zeros(r, dtype=torch.int64, device=device)
        self.starts = torch.zeros(r, dtype=torch.int64, device=device)
        self.visible = torch.zeros(r, width, self.window, dtype=torch.bool, device=device)
        self.rows = torch.zeros(r * width, dtype=torch.int64, device=device)
        self.ends = torch.ones(r, dtype=torch.int64, device=device)
        # PAGES columns, of which only a request's are written: the CPU kernel wants the lists to cover the pool.
        lists: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.kv_count = torch.zeros(batch, 1, blocks, **lists)
        self.kv_index = torch.zeros(batch, 1, blocks, kv.pages, **lists)
        self.full_count = torch.zeros(batch, 1, blocks, **lists)
        self.full_index = torch.zeros(batch, 1, blocks, kv.pages, **lists)
        # With full blocks the CUDA decode kernel would split the whole pool instead of the request's pages, and one
        # multiprocessor would walk a sequence alone. Elsewhere full blocks save the mask on all but the last pages.
        self.full_blocks = device.type != "cuda" or blocks > 1
        self.listed = True  # whether anybody reads the lists

    @property
    def name(self) -> str:
        """What tells its shape from others."""
        if self.prompts:
            return f"prefill of {self.batch * self.blocks * self.width} rows"
        window = "" if self.window == self.width else f" in a window of {self.window}"
        return f"batch {self.batch}, {self.width} nodes each{window}"

    def fill(self, slots: Tensor, starts: Tensor, visible: Tensor, live: Tensor, offset: int | Tensor = 0) -> None:
        """Describe the next step: slots, starts [r] int64, visible [r, W, M] bool, live [r, W] bool (others: padding).

        Node i writes to row starts + offset + i; offset may be [] int64, so that one graph serves every offset.
        Everything is written in place on the device, without a look at any value from the host.
        """
        self.slots.copy_(slots)
        self.starts.copy_(starts)
        self.visible.copy_(visible)
        positions = starts[:, None] + offset + torch.arange(self.width, device=starts.device)
        self.rows.copy_(self.kv.rows(slots, positions, live))
        # To the last live node, not their number: a node past the context's end may stand before a live one.
        used = (live * (offset + torch.arange(1, self.width + 1, device=starts.device))).amax(1)
        self.ends.copy_(starts + used)
        if self.listed:
            self._list_pages(slots, starts)

    def _list_pages(self, slots: Tensor, starts: Tensor) -> None:
        """Write the block lists: for each block the pages it sees whole, and those it reads under the mask."""
        kv, shape = self.kv, self.kv_count.shape
        whole = starts // kv.page_size if self.full_blocks else torch.zeros_like(starts)
        total = ((self.ends + kv.page_size - 1) // kv.page_size).clamp(max=kv.pages_per_slot)
        table = kv.table[slots]
        column = torch.arange(kv.pages_per_slot, device=starts.device)
        tail = table.gather(1, (whole[:, None] + column).clamp(max=kv.pages_per_slot - 1))
        width = min(kv.pages_per_slot, kv.pages)
        self.kv_count.copy_((total - whole).view(shape))
        self.kv_index[..., :width].copy_(tail[:, :width].view(*shape, width))
        self.full_count.copy_(whole.view(shape))
        self.full_index[..., :width].copy_(table[:, :width].view(*shape, width))


class PagedFlex:
    """FlexAttention over the paged pool; made to be compiled together with the block around it."""

    def __init__(self, kv: PagedKV, plan: Plan, layers: int) -> None:
        self._layers = [FlexLayer(*kv.layer(index), kv.logical, plan) for index in range(layers)]
        self.graph = plan.name

    def layer(self, index: int) -> FlexLayer:
        """Return the attention of one layer."""
        return self._layers[index]


class FlexLayer:
    """One layer of PagedFlex. Holds tensors and constants only, so that all layers share one compiled graph."""

    def __init__(self, keys: Tensor, values: Tensor, logical: Tensor, plan: Plan) -> None:
        self.keys, self.values, self.logical, self.plan = keys, values, logical, plan

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [B, Hkv, T, D] into their rows, then attend with q [B, Hq, T, D] -> [B, Hq, T, D]."""
        batch, heads, length, dim = q.shape
        kv_heads = k.shape[1]
        _write(self.keys, self.plan.rows, k)
        _write(self.values, self.plan.rows, v)
        group = heads // kv_heads
        fold = self._folds(q, group)
        if fold:
            q = q.reshape(batch, kv_heads, group * length, dim)
        elif q.is_cuda and group & (group - 1):
            q, group = _pad_group(q, kv_heads, group)
        out = flex_attention(
            q,
            self.keys,
            self.values,
            block_mask=self._block_mask(q.shape[2]),
            enable_gqa=not fold and group > 1,
            kernel_options=self._kernel_options(q, kv_heads),
        )
        if out.shape[1] != heads and not fold:
            out = out.view(batch, kv_heads, group, length, dim)[:, :, : heads // kv_heads]
        return out.reshape(batch, heads, length, dim)

    def _folds(self, q: Tensor, group: int) -> bool:
        """Do the queries that share a KV head become rows of one head, so that each key is read once?

        CUDA's decode kernel does that itself for a group of a power of two, and takes less than a query block of rows.
        """
        rows = group * q.shape[2]
        if q.is_cuda:
            return self.plan.blocks == 1 and rows < QUERY_BLOCK and group & (group - 1) != 0
        return self.plan.blocks == 1 and rows <= QUERY_BLOCK

    def _block_mask(self, query_rows: int) -> BlockMask:
        """Wrap the plan's lists; costs microseconds, being built from tensors that exist."""
        plan, page_size = self.plan, self.plan.kv.page_size
        return BlockMask(
            seq_lengths=(query_rows, self.keys.shape[2]),
            kv_num_blocks=plan.kv_count,
            kv_indices=plan.kv_index,
            full_kv_num_blocks=plan.full_count if plan.full_blocks else None,
            full_kv_indices=plan.full_index if plan.full_blocks else None,
            q_num_blocks=None,
            q_indices=None,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=(plan.query_block, page_size),
            mask_mod=self._visible,
        )

    def _visible(self, b: Tensor, h: Tensor, q: Tensor, row: Tensor) -> Tensor:
        """FlexAttention's mask_mod: may query q of sequence b see the physical row `row`?"""
        plan, page_size = self.plan, self.plan.kv.page_size
        width, window = plan.width, plan.window
        block = b * plan.blocks + q // plan.query_block
        node = (q % plan.query_block) % width  # folded heads repeat the nodes
        page = self.logical[plan.slots[block], row // page_size]
        # 32 bits, since a tile of 64-bit indices does not fit in CUDA's registers.
        ahead = page * page_size + row % page_size - plan.starts[block].int()
        # The clamp is compulsory: the table is read before `&` is applied.
        within = (ahead < window) & plan.visible[block, node, ahead.clamp(0, window - 1)]
        return (page >= 0) & ((ahead < 0) | within)

    def _kernel_options(self, q: Tensor, kv_heads: int) -> Any:
        """What each device's kernel must be told; see docs/architecture.md for what goes wrong otherwise."""
        if not q.is_cuda:
            # Any value that does not divide the page: the CPU's split-KV kernel reads the shape of the buffer behind
            # a view of q and returns garbage, silently.
            return {"PARTITION_SIZE": 1}
        # Nothing is left to autotuning, which would try the kernels on block lists as long as the whole pool.
        keys = min(TILE_KEYS, self.plan.kv.page_size)
        if self.plan.blocks > 1 or q.shape[2] >= QUERY_BLOCK:
            return {"BLOCK_M": TILE_ROWS, "BLOCK_N": keys, "num_warps": 4, "num_stages": 3}
        rows = q.shape[1] * q.shape[2] // kv_heads
        tile = min(TILE_ROWS, max(16, 1 << (rows - 1).bit_length()))
        # Named, so that an unsuitable shape fails loudly instead of running slowly in the prefill kernel.
        decode = {"BACKEND": "TRITON_DECODE", "BLOCK_M": tile, "BLOCK_N": keys}
        return {**decode, "num_warps": 4 if tile > 16 else 2, "num_stages": 3}


class Strip(NamedTuple):
    """Queries that are attended together: those of a decode step, or of one request's chunk in a prefill step."""

    queries: slice  # which of the T queries
    rows: Tensor  # [g, S] int64, the rows of the pool that each of g blocks of queries reads
    mask: Tensor  # [g, 1, queries of a block, S] in the pool's dtype, added to the scores: 0 or -inf
    tiles: Sequence[Tile] = ()  # of the queries of one request, where `products.py` attends


class PagedGather:
    """The same pool, plan and visibility without FlexAttention: rows copied together, then SDPA or what is faster.

    What each query reads and sees is worked out once a step, and all layers share it. Of a decode step it is a `Strip`
    that lies where it is, so that compiled code has it for an input, with as many rows as the longest request has,
    rounded up. A prefill step has a strip a request, however many those are, so compiled code calls an operator that it
    does not look into.
    """

    def __init__(self, kv: PagedKV, plan: Plan, layers: int) -> None:
        self.kv, self.plan = kv, plan
        self.multiplies = products_pay(kv.pool.dtype, kv.pool.device)
        # Do the queries that share a KV head become rows of one head, so that each key is read once?
        self.folds = not plan.prompts and (plan.width <= FOLD_UP_TO or self.multiplies)
        # Are a request's blocks of a prefill step attended together? Whose they are, the host learns by a look.
        self.merges = plan.prompts and kv.host_looks
        self.products: Products | None = None  # for the requests of a prefill step that are long enough
        if self.merges and self.multiplies:
            self.products = _products.setdefault(kv, Products())
        self.strips: list[Strip] = []
        if plan.prompts:
            key = next(_keys)
            _gathers[key] = self
            self.handle = torch.tensor(key)
            self.graph = "prompts of any length"
            self._layers: Sequence[GatherLayer | PromptLayer] = [PromptLayer(kv, at, self) for at in range(layers)]
            return
        # Is it one request's tree of few nodes? That has a graph of its own on a CPU, of loops in place of products.
        self.few = plan.batch == 1 and plan.width <= FEW_ROWS
        several = "several sequences" if plan.batch > 1 else "one sequence"
        count = "one row" if plan.width == 1 else f"{plan.width} rows"
        folded = ", folded" if self.folds else ""
        short = self.few or plan.width == 1
        self.graph = f"{several} of {count}" if short else f"{several} of any length{folded}"
        self._layers = [GatherLayer(*kv.layer(index), self) for index in range(layers)]
        # What the layers read lies at the front of these, which are made with the first step.
        self._rows: Tensor | None = None
        self._mask: Tensor | None = None

    def layer(self, index: int) -> GatherLayer | PromptLayer:
        """Return the attention of one layer; asked for layer 0, it works out what the step reads and sees."""
        if index == 0:
            self.strips = self._strips()
            if not self.plan.prompts:
                self._place(self.strips[0])
        return self._layers[index]

    def _place(self, strip: Strip) -> None:
        """Write a decode step's strip to where the layers have it; they are told of a new reach."""
        if self._rows is None or self._mask is None:  # what is not used of it costs nothing
            most = self.kv.pages_per_slot * self.kv.page_size
            self._rows = strip.rows.new_empty(self.plan.batch * most)
            self._mask = strip.mask.new_empty(self.plan.batch * self.plan.width * most)
        layers = cast(list[GatherLayer], self._layers)
        first = layers[0]
        if not first.moving or first.read.shape != strip.rows.shape:
            read = self._rows[: strip.rows.numel()].view(strip.rows.shape)
            mask = self._mask[: strip.mask.numel()].view(strip.mask.shape)
            moving = (read, mask)
            for layer in layers:
                layer.read, layer.mask, layer.moving = read, mask, moving
        first.read.copy_(strip.rows)
        first.mask.copy_(strip.mask)

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
            tiles.append(Tile(queries, min(starts[some]), max(ends[some])))
        return tiles

    def _reach(self) -> int:
        """Return how many rows to read of every slot."""
        most = self.kv.pages_per_slot * self.kv.page_size
        rows = int(self.plan.ends.max()) if self.kv.host_looks else self._mapped_pages() * self.kv.page_size
        return min(max(1, -(-rows // REACH_STEP)) * REACH_STEP, most)

    def _mapped_pages(self) -> int:
        """Return the most pages any slot has, as the host mapped them; for padding, those that hold the nodes."""
        return max(self.kv.pages_for(self.plan.window), *self.kv.mapped)

    def _strip(self, blocks: slice, reach: int) -> Strip:
        """Return the strip of some blocks, all of which read the first `reach` rows of their slots."""
        plan, width = self.plan, self.plan.width
        rows, mask = self._rows_and_mask(blocks, reach)
        mask = torch.zeros(mask.shape, dtype=self.kv.pool.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        queries = slice(0, width) if not plan.prompts else slice(blocks.start * width, blocks.stop * width)
        return Strip(queries, rows, mask[:, None])

    def _rows_and_mask(self, blocks: slice, reach: int) -> tuple[Tensor, Tensor]:
        """Return the rows to read [g, S] int64 and who sees them [g, queries, S] bool.

        Blocks that are merged count as one, of all their queries, since they are of one request.

        A row that no live query of its block may see is replaced by the block's row 0, which all of them see. Masking
        alone would not keep it out: in float16 it may hold an overflow, of padding in page 0 or of a page's former
        owner, and a weight of 0 times infinity is NaN.
        """
        plan, page_size = self.plan, self.kv.page_size
        position = torch.arange(reach, device=plan.starts.device)
        ahead = position - plan.starts[blocks, None]
        inside = ahead.clamp(0, plan.window - 1)[:, None, :].expand(-1, plan.width, -1)
        within = (ahead < plan.window)[:, None, :] & plan.visible[blocks].gather(2, inside)
        mask, slots, ends = (ahead < 0)[:, None, :] | within, plan.slots[blocks], plan.ends[blocks, None]
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


def _gathered(
    q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor, multiplies: bool = False
) -> Tensor:
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


def _few_queries(q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """Do for q [B, H, W, D] what `_gathered` does, in loops that Inductor makes for a CPU; H need not be folded.

    rows [B, S] int64, mask [B, 1, W, S]. For a few queries no matrix product is worth being called. Heads that share a
    KV head are sums of their own in one loop, so that each key and each value is read once a node.
    """
    (batch, heads, width, dim), kv_heads = q.shape, keys.shape[1]
    group = heads // kv_heads
    # Stored, which as_strided sees to: Inductor would turn each query by its position again for each of the keys.
    queries = q.reshape(batch, kv_heads, group, width, dim)
    queries = queries.as_strided(queries.shape, queries.stride()).float() * dim**-0.5
    queries = queries.permute(2, 1, 0, 3, 4)[..., None, :]  # [G, Hkv, B, W, 1, D]
    near = keys[0][:, rows].float()[:, :, None]  # [Hkv, B, 1, S, D], never stored
    scores = torch.stack([(query * near).sum(-1) for query in queries.unbind()])  # [G, Hkv, B, W, S]
    scores = scores + mask[:, 0].float()
    weights = (scores - scores.amax(-1, keepdim=True)).exp()  # divided by their sum at the end, once for all values
    # Values are copied together first. Where Inductor looks up their places within the sum, it takes one number each of
    # 32 rows at a time, which is five times slower than 32 numbers of one row.
    near = values.index_select(2, rows.view(-1)).view(kv_heads, batch, 1, -1, dim)
    near = near.as_strided(near.shape, near.stride()).float()
    out = torch.stack([(weight[..., None] * near).sum(3) for weight in weights.unbind()], 2)  # [Hkv, B, G, W, D]
    out = out / weights.sum(-1).permute(1, 2, 0, 3)[..., None]
    return out.transpose(0, 1).reshape(q.shape).to(q.dtype)


class GatherLayer:
    """One layer of PagedGather in decode steps. No number in it depends on the plan's size or on a reach.

    So compiled it serves any size. `read` [B, S] int64 and `mask` [B, 1, N, S] are a strip's, and others when the
    longest request has grown by REACH_STEP.
    """

    read: Tensor
    mask: Tensor

    def __init__(self, keys: Tensor, values: Tensor, gather: PagedGather) -> None:
        self.keys, self.values, self.plan = keys, values, gather.plan
        self.rows, self.folds, self.few, self.multiplies = gather.plan.rows, gather.folds, gather.few, gather.multiplies
        self.moving: tuple[Tensor, ...] = ()  # read and mask; see `compiled.py`

    @property
    def any_size(self) -> tuple[tuple[Tensor, tuple[int, ...]], ...]:
        """See `compiled.py`."""
        if self.few:
            return (self.read, (1,)), (self.mask, (3,))
        return (self.rows, (0,)), (self.read, (0, 1)), (self.mask, (0, 2, 3))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [B, Hkv, T, D] into their rows, then attend with q [B, Hq, T, D] -> [B, Hq, T, D]."""
        _write(self.keys, self.rows, k)
        _write(self.values, self.rows, v)
        (batch, heads, length, dim), kv_heads, mask = q.shape, k.shape[1], self.mask
        in_graph = torch.compiler.is_compiling() and not q.is_cuda
        if (length == 1 or self.few) and in_graph:
            return _few_queries(q, self.keys, self.values, self.read, mask)
        if self.folds:
            q, mask = q.reshape(batch, kv_heads, -1, dim), mask.repeat(1, 1, heads // kv_heads, 1)
        out = _gathered(q, self.keys, self.values, self.read, mask, in_graph and self.multiplies)
        return out.reshape(batch, heads, length, dim)


class PromptLayer:
    """One layer of PagedGather in prefill steps; compiled it serves any size, too."""

    def __init__(self, kv: PagedKV, index: int, gather: PagedGather) -> None:
        self.keys, self.values = kv.layer(index)
        self.gather, self.plan = gather, gather.plan
        self.rows = gather.plan.rows
        self.any_size = ((self.rows, (0,)),)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [1, Hkv, T, D] into their rows, then attend with q [1, Hq, T, D] -> [1, Hq, T, D]."""
        _write(self.keys, self.rows, k)
        _write(self.values, self.rows, v)
        if torch.compiler.is_compiling():
            return torch.ops.minispec.attend_rows(q, self.keys, self.values, self.gather.handle)
        return self.gather.attend(q, self.keys, self.values)


# In compiled code a prefill step's attention is an operator: how many requests there are is then no shape of a graph.
_library.define("attend_rows(Tensor q, Tensor keys, Tensor values, Tensor handle) -> Tensor")
_keys = itertools.count()
_gathers: weakref.WeakValueDictionary[int | float, PagedGather] = weakref.WeakValueDictionary()  # by `handle`
_products: weakref.WeakKeyDictionary[PagedKV, Products] = weakref.WeakKeyDictionary()  # one for all plans


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, handle: Tensor) -> Tensor:
    """Return `PagedGather.attend` of the step behind `handle` [] int64."""
    return _gathers[handle.item()].attend(q, keys, values)


def _attend_rows_shape(q: Tensor, keys: Tensor, values: Tensor, handle: Tensor) -> Tensor:
    """Return an empty tensor as `PagedGather.attend` returns one, which is all that tracing needs to know."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


_library.impl("attend_rows", _attend_rows, "CPU")
torch.library.register_fake("minispec::attend_rows", _attend_rows_shape)


AttendKind = Callable[[PagedKV, Plan, int], PagedFlex | PagedGather]  # of a plan and so many layers


def compiled_attention(kv: PagedKV, plan: Plan, layers: int) -> PagedFlex | PagedGather:
    """Return the kind of attention that is faster in compiled code: FlexAttention, but on a CPU gathering.

    There FlexAttention asks its mask for every pair of query and key. docs/log.md has the times of both.
    """
    if plan.starts.is_cuda:
        return PagedFlex(kv, plan, layers)
    plan.listed = False
    return PagedGather(kv, plan, layers)


class Causal:
    """Plain causal attention over the tokens given, with no cache; for training and as the reference of tests."""

    def layer(self, index: int) -> Causal:
        """Return the attention of one layer, the same for all."""
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q [B, Hq, T, D] to k, v [B, Hkv, T, D] at and before each position."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _write(pool: Tensor, rows: Tensor, new: Tensor) -> None:
    """Store new [B, Hkv, T, D] in rows [B * T] of pool [1, Hkv, PAGES * P, D]."""
    new = new.transpose(0, 1).reshape(1, new.shape[1], -1, new.shape[3])
    if pool.is_cuda:
        torch.ops.minispec.write_rows(pool, rows, new)
    else:
        pool.index_copy_(2, rows, new)  # fused with what computes the rows


def _pad_group(q: Tensor, kv_heads: int, group: int) -> tuple[Tensor, int]:
    """Add zero heads so that each KV head serves a power of two of them; returns q and the new group."""
    batch, _, length, dim = q.shape
    padded = 1 << (group - 1).bit_length()
    q = q.reshape(batch, kv_heads, group, length, dim)
    return F.pad(q, (0, 0, 0, 0, 0, padded - group)).reshape(batch, kv_heads * padded, length, dim), padded
