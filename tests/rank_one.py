"""Rank 1 of the tests: a process that follows the engines which test_parallel.py leads, one after the other.

A line on standard input describes each: where the model's weights are, its sizes, and what its pages are like. Its
clock, its seeds and its memory are not those of rank 0, since nothing may depend on them. While there is a file named
LOOK beside the one in which the ranks met, it looks for NaN in its pages before it reads them, and if there is any, it
writes a file named FOUND. What routers chose for an engine is written to a file named CHOSEN when the engine ends, and
how many captured steps were replayed to a file named REPLAYED. A line may name a step that cannot be captured here.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from capturing import Capture, looking, reads_all
from safetensors.torch import load_file

from minispec.buffers import Sizes
from minispec.cpu.gather import PagedGather
from minispec.cpu.rowwise import PagedChains, RopeTable, keep_rows_apart
from minispec.engine import Engine
from minispec.experts import Experts
from minispec.kv import KVShape, PagedKV
from minispec.load.published import published_tensors
from minispec.load.weights import load_weights
from minispec.model import Model, ModelConfig
from minispec.ranks.link import Elsewhere, Ranks, follow
from minispec.ranks.shards import Shard

LOOK, FOUND, CHOSEN, REPLAYED = "look", "found", "chosen", "replayed"


def split(config: ModelConfig, ranks: Ranks, weights: dict[str, torch.Tensor]) -> Model:
    """Return this rank's part of a model, from its published weights; in bfloat16 its rows are kept apart."""
    shard = Shard(config, ranks.rank, ranks.size, ranks.group)
    dtype = next(iter(weights.values())).dtype
    model = Model.empty(shard.config, dtype, torch.device("cpu"))
    load_weights(published_tensors(model), shard.slices(weights.items()))
    shard.join(model)
    if dtype == torch.bfloat16:
        keep_rows_apart(model)
        model.rope = RopeTable(model, config.context_length)
    return model


def follower(told: dict, ranks: Ranks, sizes: Sizes) -> Engine:
    """Return the engine that a line describes."""
    model = split(ModelConfig(**told["config"]), ranks, load_file(told["weights"]))
    shape = KVShape(model.config.layers, model.config.kv_heads, model.config.head_dim)
    kv = PagedKV(shape, **told["pages"], zeros=model.norm.weight.new_zeros)
    kv.host_looks = not told["fails"]
    apart = model.norm.weight.dtype == torch.bfloat16
    return Engine(model, kv, Elsewhere(sizes), sizes, attend_kind=PagedChains if apart else PagedGather)


def perturb() -> None:
    """Make clock, seeds and memory others than rank 0's."""
    clock = time.perf_counter
    time.perf_counter = lambda: clock() * 3 + 1000
    time.monotonic = lambda: clock() * -2
    random.seed(99)
    torch.manual_seed(98)
    globals()["ballast"] = torch.ones(2**24)


def look(folder: Path) -> None:
    """From now on look for NaN in the pages where that is asked for."""
    inner = PagedGather._rows_and_mask

    def looking(self: PagedGather, blocks: slice, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (folder / LOOK).exists() and bool(self.plan.kv.pool.isnan().any()):
            (folder / FOUND).touch()
        return inner(self, blocks, reach)

    PagedGather._rows_and_mask = looking


def noted(choices: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return `Experts.choose` with a note of every router's scores and of the experts that were chosen by them."""
    inner = Experts.choose

    def choose(self: Experts, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = inner(self, scores)
        choices.append((scores.clone(), chosen))
        return chosen, weights

    return choose


def main() -> None:
    """Follow until standard input ends."""
    file, perturbed = sys.argv[1:]
    if perturbed == "perturbed":
        perturb()
    look(Path(file).parent)
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=1, world_size=2)
    ranks, choices = Ranks(), []
    Experts.choose = noted(choices)
    for line in sys.stdin:
        choices.clear()
        told = json.loads(line)
        with torch.inference_mode(), Capture().emulated(), looking(told["fails"]):
            engine = follower(told, ranks, ranks.same_sizes(None))
            follow(reads_all(engine) if told["fails"] else engine, ranks)
        if engine.graphs:
            replays = sum(graph.replays for graph in engine.graphs.values())
            (Path(file).parent / REPLAYED).write_text(str(replays))
        if choices:
            torch.save(choices, f"{file}.part")
            Path(f"{file}.part").rename(Path(file).parent / CHOSEN)
    dist.destroy_process_group()  # else gloo's threads may abort the process when the interpreter ends


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
