"""The paged KV pool: pages of P rows, a page table per slot, and the copy that keeps an accepted path.

Row r of a request is the keys and values of its r-th token. A slot's table maps logical pages, numbered in the order of
the text, to physical pages of the pool. So a request grows without moving its rows, and two requests share a prefix by
sharing pages. Paged attention: Kwon et al., arXiv 2309.06180.

    slot 3, P = 64, lens = 150          table[3] = [17,  4, 90,  0, 0 ...]
    rows   0..63  committed             page 17  (maybe shared, then read only)
    rows  64..127 committed             page  4
    rows 128..149 committed, 150.. draft tree or garbage   page 90

Invariants owned here:
  - Page 0 is the trash page: it is in no free list and belongs to no request. Slot 0 is padding. Padding writes to
    page 0, so no code branches for padding, and no output is computed from that page.
  - Rows at or beyond a slot's length (`lens`) are garbage, except in the step that writes them. A query of that step
    reads the new rows that its mask allows.

Read next: `attention.py`, which reads these rows, and `radix.py`, which shares pages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.operators import operator


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host values as a tensor on a device; on CUDA from pinned memory, so the host waits for no running step."""
    on_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=on_cuda).to(device, non_blocking=on_cuda)


# An operator, so that compiled code moves rows in place and does not copy the pool.
@operator("move_rows(Tensor(a!) table, Tensor source, Tensor target) -> ()")
def _move_rows(table: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy rows source [n] of table [rows, D] to rows target [n]; all rows are read before any is written."""
    table.index_copy_(0, target, table.index_select(0, source))


class KVShape(NamedTuple):
    """The shape of a row: keys and values of `kv_heads` attention heads in each layer."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes(self, rows: int, dtype: torch.dtype) -> int:
        """Return the bytes that `rows` rows take, keys and values together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * rows * dtype.itemsize


class PagedKV:
    """Pages for every layer's keys and values under one page table.

    R is the number of slots, slot 0 included, L that of layers, PAGES that of pages, page 0 included. Hkv is the number
    of KV heads, D their size, and in this file M is the most pages of a slot.

    pool    [2L, Hkv, PAGES * P, D]  keys of layer i at 2i, values at 2i + 1
    table   [R, M] int32             physical page of each logical page of a slot; 0 beyond the slot's pages
    logical [R, PAGES] int32         the inverse of the table; -1 for pages that the slot does not have
    """

    def __init__(
        self, shape: KVShape, *, pages: int, page_size: int, slots: int, rows_per_slot: int,
        zeros: Callable[..., Tensor],
    ) -> None:  # fmt: skip
        """Allocate `pages` pages, the trash page among them.

        zeros(*sizes) returns zeros in the dtype of the rows, on the device of the pool and the tables.
        """
        # Zeros, since even rows that were never written must hold no NaN; see `wipe`.
        self.zeros = zeros
        self.pool = zeros(2 * shape.layers, shape.kv_heads, pages * page_size, shape.head_dim)
        device = self.pool.device
        self.page_size, self.pages = page_size, pages
        # Whether the host may read values within a step. On a CPU that costs nothing and saves work. On CUDA the host
        # would wait for the device, and in a captured step it cannot read at all.
        self.host_looks = device.type == "cpu"
        self.pages_per_slot = -(-rows_per_slot // page_size)
        self.table = torch.zeros(slots, self.pages_per_slot, dtype=torch.int32, device=device)
        self.logical = torch.full((slots, pages), -1, dtype=torch.int32, device=device)
        self.mapped = [0] * slots  # the number of logical pages of each slot, on the host
        self.free: list[int] = []  # a stack, since the page freed last is likeliest to be in the processor's cache
        self.pools = [self.pool]  # the target's pool; `sibling` adds the drafter's
        # Called before tables or pages change, with the name of the changing method and its numbers, so that the other
        # ranks (processes that hold a share of the model) make the same change.
        self.tell: Callable[[str, Sequence[int]], None] = lambda method, numbers: None
        self.reset()

    def reset(self) -> None:
        """Return all pages to the free list and clear all tables."""
        self.tell("reset", ())
        self.free[:] = range(self.pages - 1, 0, -1)
        self.mapped[:] = [0] * len(self.mapped)
        self.table.zero_()
        self.logical.fill_(-1)

    def sibling(self, shape: KVShape) -> PagedKV:
        """Return pages for a drafter's layers: separate memory under the same table, free list and row numbers."""
        other = copy.copy(self)
        other.pool = self.zeros(2 * shape.layers, shape.kv_heads, self.pool.shape[2], shape.head_dim)
        self.pools.append(other.pool)
        return other

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return views of one layer's keys and values, each [1, Hkv, PAGES * P, D]."""
        # Compiled graphs take these views as inputs. A graph that indexed the pool itself would copy it at each step.
        return self.pool[2 * index].unsqueeze(0), self.pool[2 * index + 1].unsqueeze(0)

    def pages_for(self, rows: int) -> int:
        """Return how many pages hold `rows` rows."""
        return -(-rows // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages off the free list, which must hold that many."""
        assert count <= len(self.free), f"asked for {count} pages, {len(self.free)} free"
        pages = [self.free.pop() for _ in range(count)]
        # Nobody looks for NaN in the drafter's pages, but one text's NaN would spoil the drafts of the next text in the
        # same pages. The target's pages are wiped as soon as a NaN is found (`wipe`). In float16, whose range is small,
        # they may hold an infinity that nobody noticed, and 0 * infinity is NaN.
        if self.pool.dtype == torch.float16:
            self.wipe(pages)
        else:
            self._zero(pages, self.pools[1:])
        return pages

    def wipe(self, pages: Sequence[int]) -> None:
        """Write zeros to pages that hold NaN, and to page 0, where padding writes, in the pools of target and drafter.

        Attention multiplies the values of masked rows by 0, and 0 * NaN is NaN. So the next request with one of these
        pages would get NaN as well.
        """
        self.tell("wipe", pages)
        self._zero([0, *pages], self.pools)

    def _zero(self, pages: Sequence[int], pools: Sequence[Tensor]) -> None:
        if not pages or not pools:
            return
        index = upload(pages, torch.int64, self.pool.device)
        for pool in pools:
            pool.view(*pool.shape[:2], self.pages, -1).index_fill_(2, index, 0)

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages to the free list."""
        assert 0 not in pages, "page 0 is the trash page"
        self.free.extend(pages)

    def map(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Make `pages` the logical pages first, first + 1, ... of `slot`."""
        if not pages:
            return
        self.tell("map", (slot, first, *pages))
        physical = upload(pages, torch.int32, self.table.device)
        order = torch.arange(first, first + len(pages), dtype=torch.int32, device=self.table.device)
        self.table[slot, first : first + len(pages)] = physical
        self.logical[slot, physical.long()] = order
        self.mapped[slot] = max(self.mapped[slot], first + len(pages))

    def unmap(self, slot: int) -> None:
        """Clear the table of `slot`; the caller gives the pages back."""
        self.tell("unmap", (slot,))
        self.table[slot].zero_()
        self.logical[slot].fill_(-1)
        self.mapped[slot] = 0

    def rows(self, slots: Tensor, positions: Tensor, live: Tensor) -> Tensor:
        """Return the physical rows [r * W] int64 of the logical rows `positions` [r, W] of `slots` [r].

        Where `live` [r, W] is false, the result is a row of the trash page.
        """
        page = (positions // self.page_size).clamp(max=self.pages_per_slot - 1)
        offset = positions % self.page_size
        physical = self.table[slots].gather(1, page).long() * self.page_size + offset
        spread = torch.arange(live.numel(), device=live.device).view_as(live) % self.page_size
        return torch.where(live, physical, spread).flatten()

    def compact(self, slots: Tensor, lens: Tensor, path: Tensor, count: Tensor) -> None:
        """Move tree rows lens + path[a] to rows lens + a for a < count, in one copy for all layers.

        slots, lens, count [B] int64, path [B, A] int64. All sources are read before any row is written.
        """
        step = torch.arange(path.shape[1], device=path.device).expand_as(path)
        live = step < count[:, None]
        source = self.rows(slots, lens[:, None] + path, live)
        target = self.rows(slots, lens[:, None] + step, live)
        # The pool is indexed as one table of rows over all layers and heads. If an inner dimension were indexed, CUDA
        # would split the copy wherever offsets exceed 2 GiB: some 64 launches for a pool that fills the device.
        layers, heads, rows, dim = self.pool.shape
        every = torch.arange(layers * heads, device=path.device)[:, None] * rows
        source, target = (every + source).flatten(), (every + target).flatten()
        torch.ops.minispec.move_rows(self.pool.view(-1, dim), source, target)
