"""Attention as matrix products, where PyTorch's own is slow: for trees, and for prompts in bfloat16 without AMX.

A tree has too few queries for products in bfloat16 to pay. Its products are in float32, and between them stands a loop
of Inductor's own (`attend_at_once`).

Without AMX, `scaled_dot_product_attention` multiplies bfloat16 at a fifth of the speed that oneDNN has with AVX-512's
instruction for pairs of bfloat16. So the scores and sums of values of a prompt are products of oneDNN's, with plain
operations between them on tiles of queries that fit in a cache (`Products`).

The one idea is how a prompt's scores keep their precision. oneDNN adds up in float32 and hands the sum back in
bfloat16, whose eight bits are too few for a score: an error of a hundredth would be one of a percent in a weight. But
it can subtract what it is given before it rounds. So the product is made twice, the second time less the first one's
result, and the two numbers together have sixteen bits.

    near = round(q k)      rest = round(q k - near)      score = near + rest

The first product then costs twice, and long prompts still take half to two thirds of the time: docs/log.md has the
figures.

Read next: `attention.py`, which calls this.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 192  # most queries of a tile
AREA = TILE * 8192  # most queries times rows that they read, but for a single query block: it bounds the memory
SCORES = 1 << 20  # most scores of a tile that has all heads; a larger one has a KV head at a time
WORTH = 1 << 17  # scores of a prompt from which on products are faster


class Tile(NamedTuple):
    """Queries that are attended together, of consecutive query blocks of one request."""

    queries: slice
    seen: int  # all of them see every row below this one
    reach: int  # and none sees this row or one behind it


@functools.cache
def products_pay(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products are faster than PyTorch's attention: in bfloat16, with AVX-512's pairs and no AMX."""
    if dtype != torch.bfloat16 or device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16")) and not able.get("amx_bf16")


def attend_at_once(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend in float32 with q [B, H, W, D] to keys and values [B, H, S, D], mask [B, 1, W, S]; to be compiled."""
    shape = q.shape
    rows, keys, values = (part.reshape(shape[0] * shape[1], -1, shape[3]).float() for part in (q, keys, values))
    scores = torch.bmm(rows * shape[3] ** -0.5, keys.mT).view(*shape[:3], -1)
    weights = torch.softmax(scores + mask.float(), -1)
    return torch.bmm(weights.flatten(0, 1), values).view(shape).to(q.dtype)


class Products:
    """The memory that tiles of prompts are computed in, one after the other; for one thread.

    Memory that is asked for anew each time would come page by page from the operating system, which takes longer than
    the products.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, tile: Tile) -> Tensor:
        """Attend with the queries of a tile, of q [Hq, W, D], to keys and values [Hkv, S, D]; returns [Hq, w, D].

        mask [W, S], added to the scores, is read from the tile's row `seen` on. All are bfloat16.
        """
        (heads, _, dim), (kv_heads, _, _) = q.shape, keys.shape
        own, group = mask[tile.queries, tile.seen : tile.reach], heads // kv_heads
        # The queries that share a KV head are rows of one product.
        q = q.view(kv_heads, group, -1, dim)[:, :, tile.queries].reshape(kv_heads, -1, dim)
        keys, values = keys[:, : tile.reach].mT, values[:, : tile.reach]
        at_once = kv_heads if q.shape[0] * q.shape[1] * tile.reach <= SCORES else 1
        out = torch.empty_like(q)
        for first in range(0, kv_heads, at_once):
            part = slice(first, first + at_once)
            weights = self._weights(q[part], keys[part], own)
            torch.bmm(weights, values[part], out=out[part])
        return out.view(heads, -1, dim)

    def _weights(self, q: Tensor, keys: Tensor, own: Tensor) -> Tensor:
        """Return the weights [h, n, S] bf16 of q [h, n, D] over keys [h, D, S]; own [w, s]: the mask's last columns.

        They lie in memory that the next call overwrites.
        """
        size = (*q.shape[:2], keys.shape[2])
        near, rest, scores, weights = self._memory(size)
        scale = q.shape[-1] ** -0.5
        torch.baddbmm(near, q, keys, beta=0, alpha=scale, out=near)
        torch.baddbmm(near, q, keys, beta=-1, alpha=scale, out=rest)
        scores.copy_(near).add_(rest)
        scores.view(-1, len(own), size[-1])[:, :, size[-1] - own.shape[1] :].add_(own)
        torch.softmax(scores, -1, out=weights)
        return near.copy_(weights)

    def _memory(self, size: tuple[int, ...]) -> list[Tensor]:
        """Return two tensors in bfloat16 and two in float32 of this size."""
        kinds = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
        count = torch.Size(size).numel()
        spans = [-(-count * kind.itemsize // 64) * 64 for kind in kinds]
        if len(self._bytes) < sum(spans):
            self._bytes = torch.empty(sum(spans), dtype=torch.uint8)
        parts = self._bytes[: sum(spans)].split(spans)
        return [part.view(kind)[:count].view(size) for part, kind in zip(parts, kinds, strict=True)]
