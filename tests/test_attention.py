"""PagedFlex and PagedGather against attention written from its description: for each node, a loop over what it sees.

The reference shares nothing with `attention.py`: it keeps every slot's keys and values as a plain list of rows, writes
them into the pool by its own page arithmetic, walks parents one by one to find a node's ancestors, and takes the
softmax in fp64. All rows that a node must not see hold large finite garbage, so that a mask which is wrong in a single
place shows. FlexAttention runs compiled in three shapes on the CPU and eagerly in all; the wide compiled sweep needs
CUDA, where alone chunks of prompts go through it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import minispec.attention as attention_module
from benchmarks.gpu_stages import by_bytes
from minispec.attention import QUERY_BLOCK, AttendKind, Causal, FlexLayer, PagedFlex, Plan, with_windows
from minispec.cpu import gather as gather_module
from minispec.cpu import products as products_module
from minispec.cpu.gather import GatherLayer, PagedGather, PromptLayer
from minispec.cpu.products import TILE, Products, Tile, attend_at_once
from minispec.kv import KVShape, PagedKV
from minispec.load.files import any_size

GROUPS = (1, 3, 4, 7, 8)  # query heads per KV head
TREES = (1, 2, 3, 8, 17, 33, 64)
GARBAGE = 30.0  # stands where nobody may look: finite, and far from every value
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest output
LAYERS = 2


@dataclass
class Block:
    """One query block: its nodes stand at rows start, start + 1, ...; sees[i] lists the nodes that node i sees."""

    slot: int
    start: int
    sees: list[list[int]]
    live: list[bool]


class World:
    """A paged pool and, beside it, what each slot truly holds: texts[layer][slot] = keys, values [rows, Hkv, D]."""

    def __init__(
        self,
        group: int,
        *,
        page: int = 16,
        rows: int = 192,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        slots: int = 4,
        seed: int = 0,
    ) -> None:
        self.group, self.page, self.dim, self.rows_per_slot, self.slots = group, page, dim, rows, slots
        self.kv_heads = 2
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kv = PagedKV(
            KVShape(LAYERS, self.kv_heads, dim), pages=slots * -(-rows // page) + 2, page_size=page, slots=slots + 1,
            rows_per_slot=rows, zeros=partial(torch.zeros, dtype=dtype, device=device),
        )  # fmt: skip
        self.windows: Sequence[int] = ()  # how many tokens each layer sees; all, unless a test says otherwise
        self.texts: list[dict[int, tuple[Tensor, Tensor]]] = []
        self.pages: dict[int, list[int]] = {}

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return random numbers in the pool's dtype and on its device."""
        numbers = scale * torch.randn(*shape, generator=self.generator)
        return numbers.to(self.kv.pool.dtype).to(self.kv.pool.device)

    def deal(self, lengths: dict[int, int], shared: bool = False) -> None:
        """Give every slot new random pages and a new text; all else is garbage. `shared`: 1 and 2 share a page."""
        free = self.random.sample(range(1, self.kv.pages), self.kv.pages - 1)
        each = -(-self.rows_per_slot // self.page)
        self.pages = {slot: [free.pop() for _ in range(each)] for slot in range(1, self.slots + 1)}
        self.kv.pool.copy_(self.draw(*self.kv.pool.shape, scale=GARBAGE))
        text = lambda rows: tuple(self.draw(rows, self.kv_heads, self.dim) for _ in "kv")  # noqa: E731
        self.texts = [{slot: text(rows) for slot, rows in lengths.items()} for _ in range(LAYERS)]
        if shared:
            assert min(lengths[1], lengths[2]) >= self.page
            self.pages[2][0] = self.pages[1][0]
            for texts in self.texts:
                for one, two in zip(texts[1], texts[2], strict=True):
                    two[: self.page] = one[: self.page]
        for slot, pages in self.pages.items():
            self.kv.unmap(slot)
            self.kv.map(slot, 0, pages)
        for layer, texts in enumerate(self.texts):
            for slot, text in texts.items():
                for row in range(lengths[slot]):
                    self.put(self.kv.pool, layer, slot, row, text[0][row], text[1][row])

    def put(self, pool: Tensor, layer: int, slot: int, row: int, key: Tensor, value: Tensor) -> None:
        """Lay one row of a slot where its pages say."""
        physical = self.pages[slot][row // self.page] * self.page + row % self.page
        pool[2 * layer, :, physical] = key
        pool[2 * layer + 1, :, physical] = value


def random_tree(world: World, nodes: int, slot: int, start: int) -> Block:
    """Return a random tree; now and then its last nodes are padding, or its deep ones past the context's end."""
    used = nodes if world.random.random() < 0.5 else world.random.randint(1, nodes)
    deepest = nodes if world.random.random() < 0.5 else world.random.randint(0, 3)
    parents = [-1, *(world.random.randrange(i) if i < used else 0 for i in range(1, nodes))]
    sees = [ancestry(parents, i) for i in range(nodes)]
    return Block(slot, start, sees, [i < used and len(sees[i]) <= deepest + 1 for i in range(nodes)])


def ancestry(parents: list[int], node: int) -> list[int]:
    """Return a node and its ancestors, walking up."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path


def chunk_blocks(slot: int, start: int, size: int, width: int = QUERY_BLOCK) -> list[Block]:
    """Return the query blocks of a chunk of prompt, the last one padded."""
    blocks = []
    for first in range(0, size, width):
        live = [first + i < size for i in range(width)]
        blocks.append(Block(slot, start + first, [list(range(i + 1)) for i in range(width)], live))
    return blocks


def padding_block(width: int) -> Block:
    """Return what fills a bucket: slot 0, no live node."""
    return Block(0, 0, [[0]] * width, [False] * width)


def padding_tree(nodes: int) -> Block:
    """Return what fills a batch of trees: slot 0, a root that counts as live."""
    return Block(0, 0, [[0]] * nodes, [i == 0 for i in range(nodes)])


def fill(plan: Plan, blocks: list[Block]) -> None:
    """Describe the blocks to the plan."""
    width = plan.width
    visible = torch.zeros(len(blocks), width, width, dtype=torch.bool)
    for index, block in enumerate(blocks):
        for node, seen in enumerate(block.sees):
            visible[index, node, seen] = True
    device = plan.starts.device
    plan.fill(
        torch.tensor([block.slot for block in blocks], device=device),
        torch.tensor([block.start for block in blocks], device=device),
        visible.to(device),
        torch.tensor([block.live for block in blocks], device=device),
    )


def expected(
    world: World, blocks: list[Block], layer: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, dict[tuple[int, int], Tensor]]:
    """Return the pool after the step, and attention [Hq, D] fp64 of each live node by (block, node).

    q, k, v [r, H, W, D], one row per query block.
    """
    pool = world.kv.pool.clone()
    texts = {slot: [list(part) for part in text] for slot, text in world.texts[layer].items()}
    for r, block in enumerate(blocks):
        for node, live in enumerate(block.live):
            if not live or block.slot == 0:
                continue
            row = block.start + node
            world.put(pool, layer, block.slot, row, k[r, :, node], v[r, :, node])
            for part, new in zip(texts[block.slot], (k, v), strict=True):
                part.extend([None] * (row + 1 - len(part)))
                part[row] = new[r, :, node]
    outs = {}
    for r, block in enumerate(blocks):
        for node, live in enumerate(block.live):
            if live and block.slot:
                rows = [*range(block.start), *(block.start + seen for seen in sorted(block.sees[node]))]
                rows = rows[-world.windows[layer] :] if world.windows else rows
                keys, values = (torch.stack([part[row] for row in rows]).double() for part in texts[block.slot])
                outs[r, node] = attention_of(q[r, :, node].double(), keys, values, world.group)
    return pool, outs


def attention_of(q: Tensor, keys: Tensor, values: Tensor, group: int) -> Tensor:
    """Return softmax(q k / sqrt(D)) v of one query [Hq, D] over keys, values [S, Hkv, D], head by head."""
    heads = []
    for head in range(q.shape[0]):
        weight = torch.softmax(keys[:, head // group] @ q[head] / q.shape[1] ** 0.5, 0)
        heads.append(weight @ values[:, head // group])
    return torch.stack(heads)


Call = Callable[..., Tensor]


def eager(layer: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run one layer as it is."""
    return layer(q, k, v)


def check(world: World, plan: Plan, attend: Any, call: Call, blocks: list[Block]) -> None:
    """Run one layer on random queries and compare outputs and every row of the pool with the reference."""
    layer = world.random.randrange(LAYERS)
    r, width, heads = len(blocks), plan.width, world.kv_heads * world.group
    q = world.draw(r, heads, width, world.dim, scale=2.0)
    k, v = world.draw(r, world.kv_heads, width, world.dim), world.draw(r, world.kv_heads, width, world.dim)
    pool, outs = expected(world, blocks, layer, q, k, v)
    fill(plan, blocks)
    attend.layer(0)  # PagedGather works out rows and mask at the first layer
    # Blocks of one sequence lie one after the other: [batch, H, blocks * W, D].
    packed = (t.view(plan.batch, plan.blocks, -1, width, world.dim).transpose(1, 2).flatten(2, 3) for t in (q, k, v))
    out = call(attend.layer(layer), *(t.contiguous() for t in packed))
    assert out.shape == (plan.batch, heads, plan.blocks * width, world.dim) and out.isfinite().all()
    out = out.view(plan.batch, heads, plan.blocks, width, world.dim).transpose(1, 2).reshape(r, heads, width, world.dim)
    assert torch.equal(world.kv.pool[:, :, world.page :], pool[:, :, world.page :]), "wrong rows written"
    assert len(outs) > 0
    scale = max(float(want.abs().max()) for want in outs.values())
    error = max(float((out[r, :, node].double() - want).abs().max()) for (r, node), want in outs.items())
    assert error < TOLERANCE[out.dtype] * scale, f"error {error:.2e} at scale {scale:.2f}"


def tree_scene(world: World, nodes: int, batch: int, padded: bool = True) -> list[Block]:
    """Deal new pages and lengths, and return a batch of random trees over them, the last row padding."""
    slots = world.random.sample(range(1, world.slots + 1), batch - padded)
    most = world.rows_per_slot - nodes
    lengths = {slot: world.random.randint(1, most) for slot in range(1, world.slots + 1)}
    lengths[1], lengths[2] = max(lengths[1], world.page), max(lengths[2], world.page + 1)
    world.deal(lengths, shared=world.random.random() < 0.5)
    return [*(random_tree(world, nodes, s, lengths[s]) for s in slots), *[padding_tree(nodes)] * padded]


def prefill_scene(world: World, blocks: int, width: int = QUERY_BLOCK) -> list[Block]:
    """Deal new pages and lengths, and return packed chunks: some start late, all end inside a page or a block."""
    lengths = {slot: world.random.choice((0, 5, world.page, 3 * world.page - 1)) for slot in range(1, world.slots + 1)}
    world.deal(lengths)
    out: list[Block] = []
    for slot in world.random.sample(range(1, world.slots + 1), world.slots):
        room = (blocks - len(out)) * width
        most = min(room, world.rows_per_slot - lengths[slot])
        if most > 0 and len(out) < blocks - (world.random.random() < 0.5):
            out += chunk_blocks(slot, lengths[slot], world.random.randint(1, most), width)
    return out + [padding_block(width)] * (blocks - len(out))


# ---- every shape, without compiling ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "dtype"),
    [*((group, torch.float32) for group in GROUPS), (3, torch.bfloat16), (8, torch.bfloat16)],
    ids=str,
)
def test_gather_matches_the_reference_for_trees(group: int, dtype: torch.dtype) -> None:
    for page in (16, 64):
        world = World(group, page=page, dtype=dtype, seed=group)
        for nodes in TREES:
            plan = Plan(world.kv, 3, 1, nodes)
            check(world, plan, PagedGather(world.kv, plan, LAYERS), eager, tree_scene(world, nodes, 3))


@pytest.mark.parametrize(("group", "merges"), [*((group, True) for group in GROUPS), (3, False), (8, False)])
def test_gather_matches_the_reference_for_packed_chunks(group: int, merges: bool) -> None:
    """A request's blocks are attended together on a CPU, and each by itself on CUDA."""
    world = World(group, rows=400, seed=group)
    plan = Plan(world.kv, 1, 4, QUERY_BLOCK, prompts=True)
    for _ in range(2):
        attend = PagedGather(world.kv, plan, LAYERS)
        assert attend.merges
        attend.merges = merges
        check(world, plan, attend, eager, prefill_scene(world, 4))


@pytest.mark.parametrize(
    ("group", "at_once"),
    [*((group, "all heads") for group in GROUPS), (3, "a head"), (8, "a head"), (1, "a head and block"),
     (7, "a head and block")],
)  # fmt: skip
def test_products_match_the_reference_for_packed_chunks(
    group: int, at_once: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the processor, which decides in an engine, and however short the prompts."""
    monkeypatch.setattr(gather_module, "WORTH", 0)
    if at_once != "all heads":
        monkeypatch.setattr(products_module, "SCORES", 0)
    if at_once == "a head and block":  # as for a context of a hundred thousand tokens
        monkeypatch.setattr(gather_module, "AREA", 0)
    world = World(group, rows=400, dtype=torch.bfloat16, seed=group)
    plan = Plan(world.kv, 1, 16, 32, prompts=True)
    attend = PagedGather(world.kv, plan, LAYERS)
    attend.products, tiles = Products(), []
    true_attend = Products.attend
    monkeypatch.setattr(Products, "attend", lambda *args: tiles.append(args[-1]) or true_attend(*args))
    for _ in range(2):
        check(world, plan, attend, eager, prefill_scene(world, 16, width=32))
    sizes = {tile.queries.stop - tile.queries.start for tile in tiles}
    if at_once == "a head and block":
        assert sizes == {32}
    else:
        assert len(sizes) > 1 and max(sizes) <= TILE and any(tile.seen for tile in tiles), "a tile of each kind"


def test_scores_of_products_are_as_precise_as_those_of_one_attention_call() -> None:
    """Rounded once to bfloat16, scores of some tens are wrong by tenths, and weights by a tenth of themselves."""
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (4.0 * torch.randn(heads, 200, 64, generator=generator) for heads in (6, 2, 2))
    q, keys, values = (part.to(torch.bfloat16) for part in (q, keys, values))
    mask = torch.zeros(200, 200, dtype=torch.bfloat16).masked_fill_(~torch.ones(200, 200).tril().bool(), -torch.inf)
    given = (q[None], keys[None], values[None])
    exact = F.scaled_dot_product_attention(*(x.double() for x in given), attn_mask=mask.double(), enable_gqa=True)[0]
    usual = F.scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True)[0]
    products = Products()
    tiles = [Tile(slice(0, 128), 0, 128), Tile(slice(128, 200), 128, 200)]
    of_prompts = torch.cat([products.attend(q, keys, values, mask, tile) for tile in tiles], dim=1)
    every = (part.repeat_interleave(3, dim=0)[None] for part in (keys, values))
    of_trees = attend_at_once(q[None], *every, mask[None, None])[0]
    *errors, allowed = ((each.double() - exact).abs().mean() for each in (of_prompts, of_trees, usual))
    assert max(errors) < 1.3 * allowed, f"mean errors {errors}, where one call has {allowed:.1e}"


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("group", GROUPS)
def test_flex_masks_match_the_reference_in_every_ratio(group: int) -> None:
    """Uncompiled FlexAttention: what the kernels are told, apart from how they do it."""
    world = World(group, seed=group)
    for nodes in (1, 8, 64):
        plan = Plan(world.kv, 3, 1, nodes)
        check(world, plan, PagedFlex(world.kv, plan, LAYERS), eager, tree_scene(world, nodes, 3))


def poison_what_nobody_sees(world: World, blocks: list[Block]) -> None:
    """Map only the pages that the blocks need, and put infinity in all rows that no live node of any block sees."""
    seen = torch.zeros(world.kv.pool.shape[2], dtype=torch.bool)
    for slot, pages in world.pages.items():
        own = [block for block in blocks if block.slot == slot]
        rows = max((block.start + at + 1 for block in own for at, live in enumerate(block.live) if live), default=0)
        seen[[pages[row // world.page] * world.page + row % world.page for row in range(rows)]] = True
        world.kv.unmap(slot)
        world.kv.map(slot, 0, pages[: -(-rows // world.page)])
    world.kv.pool[:, :, ~seen] = float("inf")


def test_gather_lets_nothing_through_from_rows_that_no_query_sees() -> None:
    """In float16 padding and former owners of a page may leave an overflow, and 0 times infinity is NaN."""
    world = World(3, rows=400, dtype=torch.float16)
    for nodes in TREES:
        plan, blocks = Plan(world.kv, 3, 1, nodes), tree_scene(world, nodes, 3)
        poison_what_nobody_sees(world, blocks)
        check(world, plan, PagedGather(world.kv, plan, LAYERS), eager, blocks)
    plan, blocks = Plan(world.kv, 1, 4, QUERY_BLOCK, prompts=True), prefill_scene(world, 4)
    poison_what_nobody_sees(world, blocks)
    check(world, plan, PagedGather(world.kv, plan, LAYERS), eager, blocks)


def test_dead_node_before_a_live_one_hides_no_page() -> None:
    """Node 2 lies past the context's end, node 3 is alive and opens a page: compiled kernels read listed pages only."""
    world = World(3)
    start = 2 * world.page - 3
    world.deal(dict.fromkeys(range(1, world.slots + 1), start))
    plan = Plan(world.kv, 1, 1, 4)
    fill(plan, [Block(1, start, [[0], [0, 1], [0, 1, 2], [0, 3]], [True, True, False, True])])
    assert int(plan.full_count + plan.kv_count) == 3


# ---- sliding windows ---------------------------------------------------------------------------------------------


def sliding(window: int, group: int = 3, **options: Any) -> World:
    """Return a world in whose layer 0 a query sees so many tokens, and in layer 1 all."""
    world = World(group, **options)
    world.windows = (window, world.rows_per_slot)
    return world


def check_windows(world: World, plan: Plan, kind: AttendKind, scene: Callable[[], list[Block]]) -> None:
    """Check scenes of one shape until both layers had some."""
    attend = with_windows(kind, world.windows)(world.kv, plan, LAYERS)
    for _ in range(6):
        check(world, plan, attend, eager, scene())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kind", [PagedGather, PagedFlex])
@pytest.mark.parametrize("window", [1, 2, 21, 100])
def test_a_window_cuts_what_the_nodes_of_a_tree_see_by_their_depth(window: int, kind: AttendKind) -> None:
    """Also within the tree, where the window is shorter than a path."""
    world = sliding(window, seed=window)
    for nodes in (1, 8, 33):
        plan = Plan(world.kv, 3, 1, nodes)
        check_windows(world, plan, kind, lambda nodes=nodes: tree_scene(world, nodes, 3))


@pytest.mark.parametrize(
    ("window", "by"),
    [(1, "gather, merged"), (1, "products"), (21, "gather, merged"), (21, "gather, by block"), (21, "products"),
     (100, "gather, by block"), (100, "products")],
)  # fmt: skip
def test_a_window_cuts_what_the_rows_of_chunks_see(window: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "WORTH", 0)
    world = sliding(window, rows=400, dtype=torch.bfloat16 if by == "products" else torch.float32, seed=window)

    def kind(kv: PagedKV, plan: Plan, layers: int) -> PagedGather:
        attend = PagedGather(kv, plan, layers)
        attend.merges, attend.products = by != "gather, by block", Products() if by == "products" else None
        return attend

    check_windows(world, Plan(world.kv, 1, 16, 32, prompts=True), kind, lambda: prefill_scene(world, 16, width=32))


def test_a_beam_s_later_rounds_see_the_window_too() -> None:
    """Round 2 of two branches: its nodes lie in rows 2 and 3 of the scratch, and each sees one row of round 1."""
    world = sliding(3)
    plan = Plan(world.kv, 1, 1, 2, window=4)
    part = plan.within(3)
    visible = torch.tensor([[[True, False, True, False], [True, False, False, True]]])
    plan.fill(torch.tensor([1]), torch.tensor([9]), visible, torch.ones(1, 2, dtype=torch.bool), offset=2)
    assert part.first is not None and part.first.tolist() == [[-1, -1]] and torch.equal(part.visible, visible)
    assert part.rows is plan.rows


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kind", [PagedGather, PagedFlex])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_is_found(off: int, kind: AttendKind) -> None:
    world = sliding(21)
    plan, scene = Plan(world.kv, 3, 1, 8), lambda: tree_scene(world, 8, 3)
    check_windows(world, plan, kind, scene)
    plan.parts[0].sliding += off
    attend = with_windows(kind, (21 + off, world.rows_per_slot))(world.kv, plan, LAYERS)
    with pytest.raises(AssertionError, match="error"):
        for _ in range(6):
            check(world, plan, attend, eager, scene())


@pytest.mark.parametrize("sliding", [None, 1, 70], ids=["all", "window 1", "window 70"])
@pytest.mark.parametrize(("nodes", "window"), [(1, None), (64, None), (65, None), (128, None), (8, 200), (8, 64)])
def test_the_mask_of_words_is_that_of_bytes(nodes: int, window: int | None, sliding: int | None) -> None:
    world, queries = World(3, page=16, rows=512, seed=nodes), torch.arange(nodes)
    whole = Plan(world.kv, 4, 1, nodes, window)
    plan = whole if sliding is None else whole.within(sliding)
    layer = PagedFlex(world.kv, plan, 1).layer(0)
    starts = (256, 255, 511 - (window or nodes), 0)  # at a page's border, before one, at the context's end, padding
    world.deal({slot: starts[slot - 1] for slot in range(1, 5)})
    width, drawn = plan.window, torch.Generator().manual_seed(nodes)
    own = torch.eye(nodes, width, dtype=torch.bool)
    visible = own | (torch.rand(4, nodes, width, generator=drawn) < 0.5)
    visible[0], visible[3] = True, own  # the first node of a window, the last one, and each beside a word's border
    live = torch.ones(4, nodes, dtype=torch.bool)
    live[1, nodes // 2 :], live[3, 1:] = False, False
    whole.fill(torch.tensor([1, 2, 3, 0]), torch.tensor(starts), visible, live)
    rows = torch.arange(world.kv.pool.shape[2])
    shape = torch.arange(4)[:, None, None], queries[:, None], rows
    given = (shape[0], None, *shape[1:])
    found, wanted = layer._visible(*given), by_bytes(layer, *given)
    assert torch.equal(found, wanted) and 0 < int(found.sum()) < found.numel()
    assert len(plan.words) == -(-width // 64)


def test_pages_behind_all_windows_are_not_listed_for_flex_attention() -> None:
    world = sliding(21)
    world.deal(dict.fromkeys(range(1, world.slots + 1), 100))
    plan = Plan(world.kv, 1, 1, 2)
    part = plan.within(21)
    fill(plan, [Block(1, 100, [[0], [0, 1]], [True, True])])  # its rows from 80 on are seen, in pages of 16
    assert int(part.kv_count) == 2 and int(part.full_count) == 0
    assert part.kv_index.flatten()[:2].tolist() == world.pages[1][5:7]


@pytest.mark.parametrize("group", GROUPS)
def test_causal_matches_the_reference(group: int) -> None:
    world = World(group)
    q, k, v = (world.draw(1, heads, 20, world.dim) for heads in (2 * group, 2, 2))
    for window, attend in ((20, Causal()), *((window, Causal((window, 20))) for window in (1, 7, 20))):
        out = attend.layer(0)(q, k, v)
        for i in range(20):
            keys, values = (t[0, :, max(0, i + 1 - window) : i + 1].transpose(0, 1).double() for t in (k, v))
            want = attention_of(q[0, :, i].double(), keys, values, group)
            torch.testing.assert_close(out[0, :, i].double(), want, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(attend.layer(1)(q, k, v), Causal()(q, k, v))


# ---- compiled ----------------------------------------------------------------------------------------------------


@contextmanager
def one_graph() -> Iterator[Call]:
    """Yield a compiled layer call; after it, assert that one graph served all calls."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(eager, fullgraph=True, dynamic=False)

    def call(layer: FlexLayer | GatherLayer | PromptLayer, *given: Tensor) -> Tensor:
        with any_size(given, layer):
            return compiled(layer, *given)

    yield call
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])


def check_compiled(
    world: World, plan: Plan, scene: Callable[[], list[Block]], repeats: int, kind: AttendKind = PagedFlex
) -> None:
    """Check several scenes of one shape: one graph, whatever the layer, lengths, pages and trees."""
    attend = kind(world.kv, plan, LAYERS)
    with one_graph() as call:
        check(world, plan, attend, call, scene())
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(repeats):
                check(world, plan, attend, call, scene())


@pytest.mark.slow
def test_compiled_flex_matches_the_reference_for_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shape, 27 query rows a KV head, which are folded: a graph costs 12 s. The eager sweep has the others.

    The rows are written by CUDA's operator: compiled code must read the values after it, which its schema does not say.
    """
    monkeypatch.setattr(attention_module, "write_rows", attention_module.write_at_once)
    world = World(3, page=16, dtype=torch.float32, rows=256)
    plan = Plan(world.kv, 4, 1, 9)
    check_compiled(world, plan, lambda: tree_scene(world, 9, 4), repeats=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "multiplies"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)], ids=str
)
def test_compiled_gather_matches_the_reference(
    dtype: torch.dtype, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CPU serves trees and chunks with; the operator must see every step's own lengths.

    multiplies: as on a processor where products pay, whatever this one is.
    """
    monkeypatch.setattr(gather_module, "products_pay", lambda dtype, device: multiplies)
    world = World(3, rows=400, dtype=dtype)
    for nodes in (2, 64) if dtype == torch.float32 else (8, 40) if multiplies else (8,):
        scene = lambda nodes=nodes: tree_scene(world, nodes, 4)  # noqa: E731
        check_compiled(world, Plan(world.kv, 4, 1, nodes), scene, 3, PagedGather)
    plan = Plan(world.kv, 1, 3, QUERY_BLOCK, prompts=True)
    check_compiled(world, plan, lambda: prefill_scene(world, 3), 4, PagedGather)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "batch", "nodes", "dtype"),
    [
        (3, 1, 1, torch.bfloat16),
        (1, 3, 1, torch.float32),
        (3, 1, 4, torch.bfloat16),
        (7, 1, 3, torch.float16),
    ],
    ids=str,
)
def test_compiled_gather_of_few_queries_matches_the_reference(
    group: int, batch: int, nodes: int, dtype: torch.dtype
) -> None:
    """One query a request in loops, or few of one request in products; no row that a query may not see tells."""
    world = World(group, rows=400, dtype=dtype)
    plan = Plan(world.kv, batch, 1, nodes)

    def scene() -> list[Block]:
        blocks = tree_scene(world, nodes, batch, padded=batch > 1)
        if dtype == torch.float16:
            poison_what_nobody_sees(world, blocks)
        return blocks

    check_compiled(world, plan, scene, 4, PagedGather)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["few", "several", "prompts", "flex"])
def test_compiled_layers_with_and_without_a_window_share_a_graph(of: str) -> None:
    world = sliding(21, rows=256 if of == "flex" else 400)
    kind = with_windows(PagedFlex if of == "flex" else PagedGather, world.windows)
    if of == "prompts":
        plan, scene = Plan(world.kv, 1, 3, QUERY_BLOCK, prompts=True), lambda: prefill_scene(world, 3)
    else:
        batch, nodes = (1, 3) if of == "few" else (4, 9)
        plan, scene = Plan(world.kv, batch, 1, nodes), lambda: tree_scene(world, nodes, batch, padded=batch > 1)
    check_compiled(world, plan, scene, 6, kind)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nodes", [1, 2, 8, 17, 33, 64])
@pytest.mark.parametrize("group", GROUPS)
def test_compiled_flex_matches_the_reference_for_trees_on_cuda(group: int, nodes: int, dtype: torch.dtype) -> None:
    world = World(group, page=64, rows=512, dim=64, dtype=dtype, device="cuda")
    plan = Plan(world.kv, 4, 1, nodes)
    check_compiled(world, plan, lambda: tree_scene(world, nodes, 4), repeats=3)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("group", GROUPS)
def test_compiled_flex_matches_the_reference_for_chunks_on_cuda(group: int, page: int, dtype: torch.dtype) -> None:
    world = World(group, page=page, rows=640, dim=64, dtype=dtype, device="cuda")
    plan = Plan(world.kv, 1, 4, QUERY_BLOCK, prompts=True)
    check_compiled(world, plan, lambda: prefill_scene(world, 4), repeats=2)


@pytest.mark.cuda
@pytest.mark.parametrize("group", GROUPS)
def test_gather_matches_the_reference_on_cuda(group: int) -> None:
    world = World(group, page=64, rows=512, dim=64, device="cuda")
    for nodes in TREES:
        plan = Plan(world.kv, 3, 1, nodes)
        check(world, plan, PagedGather(world.kv, plan, LAYERS), eager, tree_scene(world, nodes, 3))


# ---- the check itself --------------------------------------------------------------------------------------------


def causal_mask(fill: Callable, plan: Plan, slots: Tensor, starts: Tensor, visible: Tensor, live: Tensor) -> None:
    """Every node sees all nodes before it."""
    fill(plan, slots, starts, torch.ones_like(visible).tril(), live)


def wrong_slot(fill: Callable, plan: Plan, slots: Tensor, starts: Tensor, visible: Tensor, live: Tensor) -> None:
    """Blocks read each other's pages; new rows still go to their own."""
    fill(plan, slots, starts, visible, live)
    rows = plan.rows.clone()
    fill(plan, slots.roll(1), starts, visible, live)
    plan.rows.copy_(rows)


def stale_pages(fill: Callable, plan: Plan, slots: Tensor, starts: Tensor, visible: Tensor, live: Tensor) -> None:
    """Tables of before the last page was replaced."""
    for slot in set(slots.tolist()) - {0}:
        last = int(plan.kv.table[slot, 0])
        plan.kv.logical[slot, last] = -1
        other = (last + 1) % plan.kv.pages or 1
        plan.kv.table[slot, 0] = other
        plan.kv.logical[slot, other] = 0
    fill(plan, slots, starts, visible, live)


def short_of_a_row(fill: Callable, plan: Plan, slots: Tensor, starts: Tensor, visible: Tensor, live: Tensor) -> None:
    """The newest committed row is taken for the tree's first."""
    fill(plan, slots, starts, visible, live)
    plan.starts.sub_(1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kind", [PagedGather, PagedFlex])
@pytest.mark.parametrize("mutation", [causal_mask, wrong_slot, stale_pages, short_of_a_row])
def test_the_check_finds_every_mutation(mutation: Callable, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, seed=5)
    plan = Plan(world.kv, 3, 1, 8)
    attend = kind(world.kv, plan, LAYERS)
    check(world, plan, attend, eager, tree_scene(world, 8, 3))
    true_fill = Plan.fill
    monkeypatch.setattr(Plan, "fill", lambda plan, *step: mutation(true_fill, plan, *step))
    with pytest.raises(AssertionError):
        check(world, plan, attend, eager, tree_scene(world, 8, 3))
