"""The paged pool against a plain dict of rows: tables, the free list, padding, and the copy that keeps a path."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from minispec.kv import KVShape, PagedKV

PAGES = 24


def make(page: int = 4, rows: int = 30, slots: int = 4, dtype: torch.dtype = torch.float32) -> PagedKV:
    """Return a small pool of which every element is different, so that every row is recognised."""
    kv = PagedKV(
        KVShape(3, 2, 2),
        pages=PAGES,
        page_size=page,
        slots=slots,
        rows_per_slot=rows,
        zeros=partial(torch.zeros, dtype=dtype),
    )
    kv.pool.copy_(torch.arange(kv.pool.numel()).view_as(kv.pool))
    return kv


def seat(kv: PagedKV, rng: random.Random, slots: list[int], rows: int) -> dict[int, list[int]]:
    """Give each slot random pages for `rows` rows, mapped in two calls as a growing request does."""
    rng.shuffle(kv.free)
    held = {}
    for slot in slots:
        pages = kv.allocate(kv.pages_for(rows))
        kv.map(slot, 0, pages[:2])
        kv.map(slot, 2, pages[2:])
        held[slot] = pages
    return held


def test_allocated_pages_are_distinct_and_return_to_the_free_list() -> None:
    kv = make()
    assert sorted(kv.free) == list(range(1, PAGES)), "all but the trash page are free"
    one, two = kv.allocate(5), kv.allocate(PAGES - 6)
    assert sorted(one + two) == list(range(1, PAGES)) and kv.free == []
    assert kv.allocate(0) == []
    with pytest.raises(AssertionError, match="1 pages, 0 free"):
        kv.allocate(1)
    kv.give_back(one)
    assert sorted(kv.free) == sorted(one)
    assert set(kv.allocate(5)) == set(one)


def test_refused_calls_change_nothing() -> None:
    kv = make()
    free = list(kv.free)
    for call, message in ((lambda: kv.allocate(PAGES), "free"), (lambda: kv.give_back([3, 0]), "trash")):
        with pytest.raises(AssertionError, match=message):
            call()
    assert kv.free == free


def test_table_and_its_inverse_agree_after_any_maps_and_unmaps() -> None:
    kv, rng = make(rows=24, slots=5), random.Random(0)
    held: dict[int, list[int]] = {slot: [] for slot in range(1, 5)}
    seen = 0
    for _ in range(200):
        slot = rng.randrange(1, 5)
        if held[slot] and rng.random() < 0.3:
            kv.unmap(slot)
            kv.give_back(held.pop(slot))
            held[slot] = []
        else:
            count = min(rng.randint(0, 3), len(kv.free), kv.pages_per_slot - len(held[slot]))
            pages = kv.allocate(count)
            kv.map(slot, len(held[slot]), pages)
            held[slot] += pages
        for owner, pages in held.items():
            assert kv.table[owner].tolist() == pages + [0] * (kv.pages_per_slot - len(pages))
            inverse = {page: logical for logical, page in enumerate(pages)}
            assert kv.logical[owner].tolist() == [inverse.get(page, -1) for page in range(PAGES)]
            seen += len(pages)
    assert seen > 100
    assert not kv.table[0].any() and (kv.logical[0] == -1).all(), "slot 0 is padding"


def test_layers_are_views_of_one_pool() -> None:
    kv = make()
    for layer in range(3):
        for offset, view in enumerate(kv.layer(layer)):
            assert view.shape == (1, 2, PAGES * 4, 2)
            assert view.data_ptr() == kv.pool[2 * layer + offset].data_ptr()


def test_rows_follow_the_table_and_padding_lies_in_the_trash_page() -> None:
    kv, rng = make(), random.Random(1)
    held = seat(kv, rng, [1, 3], 27)
    positions = torch.tensor([[0, 3, 4, 26], [5, 9, 11, 12], [0, 1, 2, 3]])
    live = torch.tensor([[True, True, True, True], [True, False, True, False], [False] * 4])
    rows = kv.rows(torch.tensor([3, 1, 0]), positions, live)
    assert rows.shape == (12,) and rows.dtype == torch.int64
    for index, row in enumerate(rows.tolist()):
        block, node = divmod(index, 4)
        if live[block, node]:
            page, offset = divmod(int(positions[block, node]), 4)
            assert row == held[(3, 1)[block]][page] * 4 + offset
        else:
            assert 0 <= row < 4


def random_path(rng: random.Random, nodes: int, most: int) -> tuple[list[int], int]:
    """Return a random root-to-node path through a random tree, filled up with any nodes, and its length."""
    parents = [-1, *(rng.randrange(node) for node in range(1, nodes))]
    node, path = rng.randrange(nodes), []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    count = min(len(path), most)
    return (path[:count] + [rng.randrange(nodes) for _ in range(most)])[:most], count


def compacted(kv: PagedKV, pages: list[int], length: int, path: list[int]) -> Tensor:
    """Return the pool with one slot's path moved, row by row."""
    pool = kv.pool.clone()
    at = lambda row: pages[row // kv.page_size] * kv.page_size + row % kv.page_size  # noqa: E731
    for step, node in enumerate(path):
        pool[:, :, at(length + step)] = kv.pool[:, :, at(length + node)]
    return pool


@pytest.mark.parametrize("page", [4, 16])
def test_compact_equals_a_copy_row_by_row(page: int) -> None:
    rng, moved = random.Random(page), 0
    for _ in range(60):
        kv = make(page=page, rows=40)
        held = seat(kv, rng, [1, 2, 3], 40 if page == 16 else 28)
        nodes, most = rng.randint(1, 12), rng.randint(1, 6)
        slots = rng.sample([1, 2, 3], rng.randint(1, 3))
        lens = [rng.randint(0, 28 - nodes) for _ in slots]
        paths = [random_path(rng, nodes, most) for _ in slots]
        want = kv.pool.clone()
        for slot, length, (path, count) in zip(slots, lens, paths, strict=True):
            after = compacted(kv, held[slot], length, path[:count])
            changed = after != kv.pool
            want[changed] = after[changed]
            moved += int(changed.any())
        # Two rows of padding, as a batch bucket has.
        kv.compact(
            torch.tensor([*slots, 0, 0]),
            torch.tensor([*lens, 0, 0]),
            torch.tensor([*(path for path, _ in paths), [0] * most, [0] * most]),
            torch.tensor([*(count for _, count in paths), 1, 0]),
        )
        assert torch.equal(kv.pool[:, :, page:], want[:, :, page:])
    assert moved > 20
