"""What tensor parallelism costs, before a device is bought: the bytes that ranks hold, and those that a step sends.

    python -m benchmarks.plan --model ID_OR_FOLDER --tp 8 [--dtype bfloat16] [--batch 8] [--nodes 6] [--depth 2]

Weights are counted by the constructors that make them, on PyTorch's meta device. Bytes of a collective are those of the
tensor that a rank gives; what goes over a wire is some multiple of it, by algorithm. tests/test_parallel.py compares
both with what is counted in a run.

Read next: docs/scaling.md; `minispec/ranks/shards.py` for who has what.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from minispec.config import Config
from minispec.kv import KVShape
from minispec.load.build import choose_folder
from minispec.load.memory import size_of
from minispec.load.weights import read_config
from minispec.model import Model, ModelConfig
from minispec.ranks.link import SHORT
from minispec.ranks.shards import Shard

WORD = torch.int64.itemsize


class Held(NamedTuple):
    """What a rank holds of the target."""

    heads: int
    kv_heads: int
    weights: int  # bytes
    row: int  # bytes of the keys and values of one token


class Collective(NamedTuple):
    """One kind of collective in a step."""

    what: str
    times: int
    bytes: int  # of the tensor that a rank gives, each time


def held(config: ModelConfig, size: int, dtype: torch.dtype) -> list[Held]:
    """Return what each of `size` ranks holds; raises ValueError where the model cannot be divided so."""
    ranks = []
    for rank in range(size):
        shard = Shard(config, rank, size, "")
        model = Model.empty(shard.config, dtype, torch.device("meta"))
        shard.join(model)
        row = KVShape(config.layers, len(shard.kv_heads), config.head_dim).bytes(1, dtype)
        ranks.append(Held(len(shard.heads), len(shard.kv_heads), size_of(model), row))
    return ranks


def collectives(
    config: ModelConfig, size: int, dtype: torch.dtype, batch: int, nodes: int, depth: int
) -> list[Collective]:
    """Return the collectives of a decode step of `batch` requests with trees of `nodes` nodes, `depth` edges deep."""
    rows = batch * nodes
    stream, vocabulary = rows * config.hidden_size * dtype.itemsize, -(-config.vocab_size // size)
    return [
        Collective("the call, over gloo", 1, SHORT * WORD),
        Collective("slots, lengths, roots, trees", 1, (4 * batch + 2 * rows) * WORD),
        Collective("sum of embeddings", 1, stream),
        Collective("sums behind o and down", 2 * config.layers, stream),
        Collective("logits put side by side", 1, rows * vocabulary * dtype.itemsize),
        Collective("the verdict", 1, (2 * batch * (depth + 1) + 3 * batch) * WORD),
    ]


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return rows as aligned columns, the first to the left."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [str(cell).rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([str(first).ljust(widths[0]), *cells]))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="id or folder; default: the model that is served without one")
    parser.add_argument("--tp", type=int, required=True, help="ranks")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    for name, default, what in (("batch", 8, "requests in a step"), ("nodes", 6, "nodes of a tree, 1 for plain steps"),
                                ("depth", 2, "its longest path")):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    args = parser.parse_args(argv)
    dtype, mib = getattr(torch, args.dtype), 2**20
    folder = choose_folder(Config(model_path=args.model), lambda line: print(line, file=sys.stderr))
    config = ModelConfig.from_hf(read_config(folder))
    try:
        ranks = held(config, args.tp, dtype)
    except ValueError as error:
        sys.exit(f"plan: {error}")
    (alone,) = held(config, 1, dtype)
    print(f"{config.layers} layers, {config.heads} heads over {config.kv_heads}, in {args.dtype}, on {args.tp} ranks")
    print(table([("rank", "heads", "KV heads", "weights, MiB", "share", "KV, bytes a token"), *(
        (i, r.heads, r.kv_heads, f"{r.weights / mib:.1f}", f"{r.weights / alone.weights:.1%}", r.row)
        for i, r in enumerate(ranks))]))  # fmt: skip
    print("\nRank 0 also holds the drafter, and the whole embedding and LM head where a draft head reads them.")
    step = collectives(config, args.tp, dtype, args.batch, args.nodes, args.depth)
    print(f"\nA step of {args.batch} requests with trees of {args.nodes} nodes, depth {args.depth}:")
    print(table([("collective", "times", "bytes", "together"),
                 *((c.what, c.times, c.bytes, c.times * c.bytes) for c in step),
                 ("all", sum(c.times for c in step), "", sum(c.times * c.bytes for c in step))]))  # fmt: skip


if __name__ == "__main__":
    main()
