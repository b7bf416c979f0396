"""Attention over pages and trees, and the plan of a step, which tells attention what each query sees.

A query block holds W queries of one slot: the nodes of a tree, or a part of a prompt chunk. A plan describes all query
blocks of a step. Block i starts at row `starts[i]` of its slot. Its queries see all rows before that one, and those
rows of the block that `visible[i]` allows: the ancestors in a tree, the lower triangle in a chunk. So one mask serves
decode and prefill. H is the number of attention heads and D their size:

    a decode step: B blocks of N nodes, queries [B, H, N, D]      a prefill step: T / W blocks, queries [1, H, T, D]
    row:   0 ......... starts | 0 1 2 3  <- nodes, at rows starts + 0..W-1
    node 2 sees all of this ->  x . x .  <- visible[i, 2]

Layers with a sliding window attend under a part of the plan, which hides all but the newest tokens of a query's text
(`Plan.within`). So the kinds of attention need little code for windows:

  PagedFlex    uses FlexAttention (arXiv 2412.05496) over the whole pool through a block mask; compiled, on CUDA
  PagedGather  computes the same without FlexAttention, on a CPU and in eager steps (`cpu/gather.py`)
  PagedChains  computes the same on a CPU with sums of one order, whatever the step (`cpu/rowwise.py`)
  Causal       has no cache; it serves training, and tests as the independent reference

Read next: `drafter.py`, which proposes the trees; `engine.py`, which fills a plan and runs the model on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from minispec.compiled import Key
from minispec.kv import PagedKV
from minispec.model import Attend, LayerAttend
from minispec.operators import operator

QUERY_BLOCK = 128  # the most rows of one query block of FlexAttention
WORD = 64  # bits of an int64

# CUDA's kernels work on tiles of query rows by key rows. Tiles larger than these spill registers into memory:
# benchmarks/lowering.py compiles the kernels and shows it.
TILE_ROWS, TILE_KEYS = 64, 32
PROCESSORS = 132  # multiprocessors of an H100 or H200


# Writing rows is an operator, so that CUDA's warm-up does not autotune it. Autotuning would copy the pool,
# gigabytes, for each kernel that it tries.
# The operator writes the values too, which `!` does not say: torch.compile copies the second of two tensors that share
# memory if an operator is said to write both. Only attention reads the values, and with the keys, so after this write.
@operator("write_rows(Tensor(a!) keys, Tensor values, Tensor rows, Tensor new) -> ()")
def _store(keys: Tensor, values: Tensor, rows: Tensor, new: Tensor) -> None:
    """Store new [1, 2 * Hkv, T, D], keys and then values, in rows [T] of keys, values [1, Hkv, PAGES * P, D].

    Hkv is the number of KV heads; there are PAGES pages of P rows. The values lie right behind the keys in memory, as
    `PagedKV.layer` returns them, so the two are one tensor of 2 * Hkv heads, which one kernel writes.
    """
    assert values.data_ptr() == keys.data_ptr() + keys.nbytes, "values must lie right behind their keys"
    both = keys.as_strided((1, new.shape[1], *keys.shape[2:]), keys.stride())
    both.index_copy_(2, rows, new)


def most_nodes(device: torch.device) -> int:
    """Return the most nodes of a tree. CUDA's decode kernel takes fewer than 128 query rows, so the most is 127."""
    return QUERY_BLOCK - 1 if device.type == "cuda" else QUERY_BLOCK


def prefill_block(device: torch.device) -> int:
    """Return the width of a prefill step's query blocks: CUDA's kernels need 128, and on a CPU 32 saves padding."""
    return QUERY_BLOCK if device.type == "cuda" else QUERY_BLOCK // 4


class Plan:
    """The static tensors of one step: whose rows each query block reads, what each node sees, where new rows go.

    The queries are [batch, H, T, D], with T = blocks * width. There are r = batch * blocks query blocks of W = width
    nodes. A plan is allocated once per shape and refilled in place.

    slots   [r] int64          the slot of each block
    starts  [r] int64          the first row of each block's window
    ends    [r] int64          the row after the last one that a block reads
    rows    [r * W] int64      the physical row that each node writes
    visible [r, W, M] bool     which rows of the window each node sees; the window is the M rows from `starts` on
    words   ceil(M / 64) of [r, W] int64   the same for FlexAttention: bit b of word w is row 64 * w + b of the window
    kv_count   [batch, 1, blocks] int32          for FlexAttention: how many pages a block reads through the mask
    kv_index   [batch, 1, blocks, PAGES] int32   which pages these are
    full_count, full_index                       the same for the pages that a block sees whole, without the mask

    By default the window is the block's own rows (M = W). A drafter that grows trees in rounds has a larger window,
    which holds the nodes of earlier rounds too; the block's own rows then begin `offset` rows after `starts` (`fill`).
    `prompts`: whether the blocks hold chunks of prompts, which may belong to several requests.

    For layers with a sliding window a plan has parts, which are plans as well (`within`). A part has another `visible`,
    and `first` [r, W] int32: the first row before the block that each node sees, counted from `starts`, so at most 0.
    """

    first: Tensor | None = None  # None: every node sees all rows before its block
    whole: Plan | None = None  # the plan that this is a part of
    sliding: int  # how many tokens a node of a part sees, itself included

    def __init__(
        self, kv: PagedKV, batch: int, blocks: int, width: int, window: int | None = None, *, prompts: bool = False
    ) -> None:
        assert width <= QUERY_BLOCK and (blocks == 1 or QUERY_BLOCK % width == 0), "nodes must fit in query blocks"
        self.kv, self.batch, self.blocks, self.width, self.window = kv, batch, blocks, width, window or width
        self.prompts = prompts
        self.query_block = QUERY_BLOCK if blocks == 1 else width  # FlexAttention's BLOCK_SIZE of queries
        device, r = kv.pool.device, batch * blocks
        self.slots = torch.zeros(r, dtype=torch.int64, device=device)
        self.starts = torch.zeros(r, dtype=torch.int64, device=device)
        self.visible = torch.zeros(r, width, self.window, dtype=torch.bool, device=device)
        self.words = [torch.zeros(r, width, dtype=torch.int64, device=device) for _ in range(0, self.window, WORD)]
        self.rows = torch.zeros(r * width, dtype=torch.int64, device=device)
        self.ends = torch.ones(r, dtype=torch.int64, device=device)
        # A block lists only its slot's pages, but the lists have PAGES columns: FlexAttention's CPU kernel, which tests
        # run, needs them that long.
        lists: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.kv_count = torch.zeros(batch, 1, blocks, **lists)
        self.kv_index = torch.zeros(batch, 1, blocks, kv.pages, **lists)
        self.full_count = torch.zeros(batch, 1, blocks, **lists)
        self.full_index = torch.zeros(batch, 1, blocks, kv.pages, **lists)
        # Whether there are separate lists of the pages that a block sees whole. With such lists, CUDA's decode kernel
        # would share out all PAGES columns of a list among its multiprocessors. A request's pages are the first few
        # columns, so one multiprocessor would read all of them. Elsewhere the lists are worth it: with them the mask is
        # evaluated on the last pages only.
        self.full_blocks = device.type != "cuda" or blocks > 1
        # What `fill` does last, for the attention under this plan. `PagedGather`, which reads no lists of pages, puts
        # another function here.
        self.finish: Callable[[], None] = self._finish
        self.parts: list[Plan] = []

    def within(self, sliding: int) -> Plan:
        """Return a part of this plan, for layers in which a token sees only the last `sliding` tokens, itself included.

        It shares the tensors that do not depend on `sliding`, and is filled whenever this plan is.
        """
        part = Plan(self.kv, self.batch, self.blocks, self.width, self.window, prompts=self.prompts)
        part.slots, part.starts, part.rows, part.ends = self.slots, self.starts, self.rows, self.ends
        part.sliding, part.whole = sliding, self
        part.first = torch.zeros(self.visible.shape[:2], dtype=torch.int32, device=self.slots.device)
        part.narrow(self.visible)  # this plan may be filled already
        self.parts.append(part)
        return part

    def narrow(self, visible: Tensor) -> None:
        """Fill this part, given what the nodes see in full: visible [r, W, M] bool.

        A node sees one row for each token of its text: first the rows before the block, then its ancestors, parents
        first. So the k-th row that a node sees holds the k-th token of its text, in a tree as in a chunk. The last
        `sliding` of these rows stay visible.
        """
        assert self.first is not None
        count = visible.cumsum(-1)
        self.first.copy_((count[..., -1] - self.sliding).clamp(max=0))
        # Padding, which writes to page 0, loses no row of its block. The place of a padding node may be beyond the rows
        # that are read (`ends`), and attention over no row at all would be NaN.
        padding = self.rows.view(self.first.shape) < self.kv.page_size
        self.visible.copy_(visible & ((count > count[..., -1:] - self.sliding) | padding[..., None]))
        self.finish()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the plan and its parts; the first dimension of each is a multiple of the batch size."""
        own = [*self.words, *(value for value in vars(self).values() if isinstance(value, Tensor))]
        return [*own, *(tensor for part in self.parts for tensor in part.tensors)]

    def fill(self, slots: Tensor, starts: Tensor, visible: Tensor, live: Tensor, offset: int | Tensor = 0) -> None:
        """Describe the next step: slots, starts [r] int64, visible [r, W, M] bool, live [r, W] bool (false: padding).

        Node i writes row starts + offset + i. `offset` may be a tensor [] int64, so that one graph serves every offset.
        Everything is written in place on the device, and the host reads no value.
        """
        self.slots.copy_(slots)
        self.starts.copy_(starts)
        self.visible.copy_(visible)
        positions = starts[:, None] + offset + torch.arange(self.width, device=starts.device)
        self.rows.copy_(self.kv.rows(slots, positions, live))
        # The last live node sets the end, not the number of live nodes: a deep node beyond the context's end is not
        # live, and a live node may come after it.
        used = (live * (offset + torch.arange(1, self.width + 1, device=starts.device))).amax(1)
        self.ends.copy_(starts + used)
        self.finish()
        for part in self.parts:
            part.narrow(self.visible)

    def _finish(self) -> None:
        """Write what FlexAttention reads: the bits of `visible`, and the lists of pages."""
        for word, bits in zip(self.words, self.visible.split(WORD, dim=-1), strict=True):
            word.copy_((bits.long() << torch.arange(bits.shape[-1], device=bits.device)).sum(-1))
        self._list_pages()

    def _list_pages(self) -> None:
        """Write, for each block, which pages it sees whole and which it reads through the mask.

        FlexAttention's own `create_block_mask` would take milliseconds.
        """
        kv, slots, starts, shape = self.kv, self.slots, self.starts, self.kv_count.shape
        whole = starts // kv.page_size if self.full_blocks and self.first is None else torch.zeros_like(starts)
        # The first page that is read through the mask; pages before the sliding windows of all nodes are not read.
        begin = whole if self.first is None else (starts + self.first.amin(1)).clamp(min=0) // kv.page_size
        total = ((self.ends + kv.page_size - 1) // kv.page_size).clamp(max=kv.pages_per_slot)
        table = kv.table[slots]
        column = torch.arange(kv.pages_per_slot, device=starts.device)
        tail = table.gather(1, (begin[:, None] + column).clamp(max=kv.pages_per_slot - 1))
        width = min(kv.pages_per_slot, kv.pages)
        self.kv_count.copy_((total - begin).view(shape))
        self.kv_index[..., :width].copy_(tail[:, :width].view(*shape, width))
        self.full_count.copy_(whole.view(shape))
        self.full_index[..., :width].copy_(table[:, :width].view(*shape, width))


AttendKind = Callable[[PagedKV, Plan, int], Attend]  # arguments: the pages, a plan, the number of layers


def with_windows(kind: AttendKind, windows: Sequence[int]) -> AttendKind:
    """Return a kind of attention whose layers see windows (`ModelConfig.windows`); `kind` itself if there are none."""
    return partial(Windows, kind, windows) if windows else kind


class Windows:
    """Attention of models with sliding windows: for each window length, a given kind of attention over a plan's part.

    Layers that see the whole text get a window as long as any text, so all layers share a graph.
    """

    def __init__(self, kind: AttendKind, windows: Sequence[int], kv: PagedKV, plan: Plan, layers: int) -> None:
        self._kinds = {window: kind(kv, plan.within(window), layers) for window in sorted({*windows})}
        self._windows = windows

    def layer(self, index: int) -> LayerAttend:
        """Return the attention of one layer; a call for layer 0 makes all parts work out what their queries see."""
        if index == 0:
            for kind in self._kinds.values():
                kind.layer(0)
        return self._kinds[self._windows[index]].layer(index)


class PagedFlex:
    """FlexAttention over the paged pool, to be compiled together with the decoder layer around it."""

    def __init__(self, kv: PagedKV, plan: Plan, layers: int) -> None:
        # CUDA's kernels read whole tiles of keys without looking at the pool's end (`IS_DIVISIBLE`).
        tile = min(TILE_KEYS, kv.page_size)
        assert kv.page_size % tile == kv.pool.shape[2] % tile == 0, "a tile of keys must lie within the pool"
        self._layers = [FlexLayer(*kv.layer(index), kv.logical, plan) for index in range(layers)]

    def layer(self, index: int) -> FlexLayer:
        """Return the attention of one layer."""
        return self._layers[index]


class FlexLayer(Key):
    """One layer of PagedFlex. It holds tensors and constants only, so all layers share one compiled graph."""

    def __init__(self, keys: Tensor, values: Tensor, logical: Tensor, plan: Plan) -> None:
        self.keys, self.values, self.logical, self.plan = keys, values, logical, plan

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [B, Hkv, T, D] to the plan's rows, then attend with q [B, Hq, T, D] -> [B, Hq, T, D]."""
        batch, heads, length, dim = q.shape
        kv_heads = k.shape[1]
        write_rows(self.keys, self.values, self.plan.rows, k, v)
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
        """Return whether the query heads of a group, which share a KV head, become rows of one head.

        Then each key is read once. CUDA's decode kernel does this itself if the group's size is a power of two. That
        kernel takes fewer rows than a query block has.
        """
        rows = group * q.shape[2]
        if q.is_cuda:
            return self.plan.blocks == 1 and rows < QUERY_BLOCK and group & (group - 1) != 0
        return self.plan.blocks == 1 and rows <= QUERY_BLOCK

    def _block_mask(self, query_rows: int) -> BlockMask:
        """Wrap the plan's lists in a BlockMask."""
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
        """FlexAttention's mask_mod: return whether query q of sequence b sees the physical row `row`."""
        plan, page_size = self.plan, self.plan.kv.page_size
        width, window = plan.width, plan.window
        # With one block a sequence, slot and start do not depend on q, so CUDA looks up the page once for each key.
        block = b if plan.blocks == 1 else b * plan.blocks + q // plan.query_block
        node = (q % plan.query_block) % width  # the rows of folded heads repeat the nodes
        page = self.logical[plan.slots[block], row // page_size]
        # 32 bits, since a tile of 64-bit indices does not fit in CUDA's registers.
        ahead = page * page_size + row % page_size - plan.starts[block].int()
        # CUDA loads a node's words once for a whole tile. A load for each pair of node and row, such as a byte of
        # `visible`, would take Triton's other layout of the tile, and with it barriers in every turn of the loop.
        word = plan.words[0][block, node]
        for index in range(1, len(plan.words)):
            word = torch.where(ahead < index * WORD, word, plan.words[index][block, node])
        within = (ahead < window) & ((word >> (ahead % WORD)) & 1 != 0)
        seen = (page >= 0) & ((ahead < 0) | within)
        return seen if plan.first is None else seen & (ahead >= plan.first[block, node])

    def _kernel_options(self, q: Tensor, kv_heads: int) -> Any:
        """Return the options that each device's kernel needs; docs/cuda.md and docs/cpu.md list the traps."""
        if not q.is_cuda:
            # A value that is no multiple of the page size turns off the CPU's split-KV kernel. If q is a view, that
            # kernel uses the shape of the underlying buffer where it should use q's, and returns garbage without an
            # error.
            return {"PARTITION_SIZE": 1}
        # Nothing is left to autotuning, which would try the kernels on lists of pages as long as the whole pool.
        keys = min(TILE_KEYS, self.plan.kv.page_size)
        if self.plan.blocks > 1 or q.shape[2] >= QUERY_BLOCK:
            return {"BLOCK_M": TILE_ROWS, "BLOCK_N": keys, "num_warps": 4, "num_stages": 3}
        rows = q.shape[1] * q.shape[2] // kv_heads
        tile = min(TILE_ROWS, max(16, 1 << (rows - 1).bit_length()))
        # The backend is named, so that a shape it cannot serve fails and does not run slowly in the prefill kernel.
        # The keys are split into so many parts that each multiprocessor has two thread blocks. Inductor's own number
        # leaves out the tiles. Sums over each part are written in fp32, so for large trees those would be most of the
        # traffic.
        splits = max(1, 2 * (PROCESSORS // (q.shape[0] * kv_heads)) // -(-rows // tile))
        decode = {"BACKEND": "TRITON_DECODE", "BLOCK_M": tile, "BLOCK_N": keys, "SPLIT_KV": splits}
        # With IS_DIVISIBLE nothing is compared with the pool's end. The mask is then asked for the tile's rows behind
        # the last query too; it takes a row's number modulo the nodes, so it stays within its tensors.
        return {**decode, "IS_DIVISIBLE": True, "num_warps": 4 if tile > 16 else 2, "num_stages": 3}


class Causal:
    """Causal attention over the given tokens, without a cache; for training and as the reference of tests.

    windows: how many tokens each layer sees (`ModelConfig.windows`). window: how many this layer sees; None: all.
    """

    def __init__(self, windows: Sequence[int] = (), window: int | None = None) -> None:
        self.windows, self.window = windows, window

    def layer(self, index: int) -> Causal:
        """Return the attention of one layer, the same for all if none has a window."""
        return Causal(window=self.windows[index]) if self.windows else self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q [B, Hq, T, D] to k, v [B, Hkv, T, D] up to each query's position."""
        gqa = q.shape[1] != k.shape[1]
        if self.window is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril().triu(1 - self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)


def allow_uncompiled() -> None:
    """Let FlexAttention run in code that is not compiled, on fake tensors; it would be compiled for each shape."""
    sys.modules[flex_attention.__module__]._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # type: ignore[attr-defined]


def write_rows(keys: Tensor, values: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k, v [B, Hkv, T, D] in rows [B * T] of a layer's keys, values [1, Hkv, PAGES * P, D]."""
    if keys.is_cuda:
        write_at_once(keys, values, rows, k, v)
    else:
        # Compiled, each is fused with the code that computes the new rows.
        keys.index_copy_(2, rows, _joined(k))
        values.index_copy_(2, rows, _joined(v))


def write_at_once(keys: Tensor, values: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Do the same in one kernel."""
    torch.ops.minispec.write_rows(keys, values, rows, _joined(torch.cat((k, v), dim=1)))


def _joined(new: Tensor) -> Tensor:
    """Return new [B, H, T, D] with the rows of all sequences one after the other: [1, H, B * T, D]."""
    return new.transpose(0, 1).reshape(1, new.shape[1], -1, new.shape[3])


def _pad_group(q: Tensor, kv_heads: int, group: int) -> tuple[Tensor, int]:
    """Add zero heads until each KV head has a power of two of query heads; return q and the new group size."""
    batch, _, length, dim = q.shape
    padded = 1 << (group - 1).bit_length()
    q = q.reshape(batch, kv_heads, group, length, dim)
    return F.pad(q, (0, 0, 0, 0, 0, padded - group)).reshape(batch, kv_heads * padded, length, dim), padded
