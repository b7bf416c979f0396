"""The shapes of trees: rounds, branches and nodes, from what flags say, the target's architecture and the device.

Numbers that flags give hold. Without them the shapes are those that were measured to be fastest, and beside the larger
trees there may be smaller ones, which a step may have instead.

Read next: `drafters.py`, which builds drafters with these shapes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minispec.beam import candidate_count
from minispec.config import BUSHY, CHAIN, CPU_SHAPE, LEARNED, NUMBERS, WIDE, Config
from minispec.dflash import DFlashHead, most_nodes
from minispec.drafter import Drafter

logger = logging.getLogger("minispec")

WEIGHT_BOUND = 128  # with up to so many rows (B * N) a GPU reads weights for longer than it computes (`coarse_batches`)
HOST_NODES = 4  # of the smaller trees of the host on a CPU
LOOKUP_NODES = 8  # of the larger trees where texts are looked up too: what a lookup finds may hold for long
# Keys of --speculative-adaptive-config that tune SGLang's choice: for all batches, and for each.
OVER_ALL = ("ema_alpha", "warmup_batches", "update_interval")
TUNING = ("up_hysteresis", "down_hysteresis", "ceiling_coeff", *OVER_ALL)
# On a CPU, steps/topk/nodes -> rounds and nodes of the smaller tree beside it.
SMALLER = {BUSHY: (2, 5), CHAIN: (1, 2), CPU_SHAPE: (1, 2)}
SEVERAL, WIDE_TREE = 8, (1, 2)  # on CUDA: nodes of the trees of several requests; rounds and nodes of those of many


def tree_shape(config: Config, architecture: str, on_cpu: bool = False) -> tuple[int, int, int]:
    """Return (steps, topk, draft tokens) of a tree grown on the device.

    If none is given: SGLang's choice, by method and the target's architecture; for a head that ships, on a CPU, the
    fastest. With topk 1 the tree is a chain of steps + 1; more nodes than candidates exist are not asked for.
    """
    steps, topk, nodes = (getattr(config, name) for name in NUMBERS)
    if steps is None or topk is None or (nodes is None and topk > 1):
        ships = config.model_path is None and config.speculative_draft_model_path is None
        if on_cpu and ships and config.algorithm in LEARNED:
            return CPU_SHAPE
        bushy = config.algorithm in LEARNED and architecture == "LlamaForCausalLM"
        return BUSHY if bushy else CHAIN
    most = candidate_count(steps, topk) + 1
    return steps, topk, most if nodes is None or topk == 1 else min(nodes, most)


def beam_shape(config: Config, architecture: str, on_cpu: bool) -> dict[str, Any]:
    """Return steps, topk and nodes of a tree grown on the device, and rounds and nodes of the smaller ones beside it.

    With lookups the larger trees have as many nodes as those, if there are as many candidates, and the smaller are what
    the larger would be without. Logs it if the given size is impossible.
    """
    steps, topk, nodes = tree_shape(config, architecture, on_cpu)
    if config.speculative_num_draft_tokens not in (None, nodes):
        why = "the tree is a chain" if topk == 1 else "no more candidates exist"
        logger.warning("--speculative-num-draft-tokens %d becomes %d: with --speculative-num-steps %d and "
                       "--speculative-eagle-topk %d %s", config.speculative_num_draft_tokens, nodes, steps, topk,
                       why)  # fmt: skip
    smaller: list[tuple[int, int]] = []
    if on_cpu:
        smaller = [SMALLER[steps, topk, nodes]] if config.several_sizes and (steps, topk, nodes) in SMALLER else []
    elif config.adapts_from(on_cuda=True) <= WIDE and not config.has_lookups(on_cpu):
        smaller = [size for size in (WIDE_TREE, (steps, SEVERAL)) if size[1] < nodes]
    listed = {rounds for allowed in candidate_steps(config).values() for rounds in allowed}
    if fewer := [rounds for rounds in sorted(listed) if 0 < rounds < steps]:
        smaller = [(fewer[0], min(nodes - 1, candidate_count(fewer[0], topk) + 1))]
    if others := sorted(listed - {0, steps, *fewer[:1]}):
        logger.info("--speculative-adaptive-config: candidate_steps %s are not tried, since trees have two sizes",
                    ", ".join(map(str, others)))  # fmt: skip
    wider = min(lookup_nodes(config, nodes), candidate_count(steps, topk) + 1) if config.has_lookups(on_cpu) else nodes
    return {"rounds": steps, "topk": topk, "nodes": wider, "smaller": [(steps, nodes)] if wider > nodes else smaller}


def block_shape(config: Config, head: DFlashHead, on_cpu: bool) -> dict[str, Any]:
    """Return block, topk, nodes and the nodes of the smaller size of a tree that is drafted as a block.

    A chain takes one token of each row that drafts.
    """
    topk, nodes, trained = config.speculative_eagle_topk or 1, config.speculative_num_draft_tokens, head.block_size
    chain = config.block_nodes or (nodes if topk == 1 else None) or trained + 1 - head.first
    if (block := chain - 1 + head.first) > trained:
        logger.warning("the draft was trained with blocks of %d rows, and is to draft %d: the later ones may be worse",
                       trained, block)  # fmt: skip
    nodes = most_nodes(chain - 1, topk, nodes or chain)
    return {"block": block, "topk": topk, "nodes": nodes, "smaller": smaller_nodes(config, nodes, on_cpu)}


def trees_by_batch(drafter: Drafter, largest: int, on_cpu: bool) -> list[tuple[int, list[int]]]:
    """Return the trees that each batch up to `largest` may have (`Sizes.trees`).

    On CUDA the rows of a step decide its time, and up to WEIGHT_BOUND of them cost little. So a batch has the largest
    trees that stay within these rows, or the smallest there are. A third size is for one request alone: several share
    graphs by size. On a CPU batches of one and two have the larger trees, since a second size gains less than its
    graphs take to compile. Trees proposed on the host come in all sizes that the batch may have: what a lookup finds
    may be short, and in a large batch few requests have one. So do, on CUDA, trees that one pass drafts (`dflash.py`).
    """
    nodes, rounds = [size.nodes for size in drafter.trees], {size.rounds for size in drafter.trees}
    several = drafter.rounds is None or (not on_cpu and rounds == {1})
    bounds = [2 if on_cpu else 1 if index > 1 else WEIGHT_BOUND // nodes[index] for index in range(1, len(nodes))]
    table = [(most, nodes[: index + 1] if several else [nodes[index]])
             for index, most in enumerate([largest, *bounds][: len(nodes)])]  # fmt: skip
    return table[::-1]


def coarse_batches(most: int, nodes: int, captured: int) -> tuple[int, ...]:
    """Return the batch buckets up to `most` for a GPU: fewer than the powers of two where more padding costs no time.

    nodes: N, of a tree. captured: the largest batch whose steps are captured, 0 for none. This batch is a bucket too,
    so no smaller batch is padded to an uncaptured bucket.

    Few buckets make the first start short: each has several graphs, whose autotuning takes about a minute (an
    estimate). In bfloat16 a row costs one operation per byte of weights, and server GPUs since the A100 do at least
    some 150 operations while they read a byte. So up to WEIGHT_BOUND rows a bucket may be four times the one before it,
    else twice. Of five buckets and more the largest may be three times the one before it, since it is rarely filled.
    """
    sizes = [1]
    while sizes[-1] < most:
        wide = 4 * sizes[-1]
        sizes.append(wide if wide * nodes <= WEIGHT_BOUND else 2 * sizes[-1])
    if len(sizes) >= 5 and most <= 3 * sizes[-3]:
        del sizes[-2]
    return tuple(sorted({min(size, most) for size in (*sizes, captured) if size}))


def candidate_steps(config: Config) -> dict[int, frozenset[int]]:
    """Return what --speculative-adaptive-config says: by least batch the rounds that a step may draft; {} without it.

    The other keys of SGLang's file, which say how its own choice is made, are checked and have no effect. Raises
    ValueError naming the flag for a file that is no such file.
    """
    if (path := config.speculative_adaptive_config) is None:
        return {}
    flag, found = f"--speculative-adaptive-config {path}", {}
    try:
        said = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"{flag}: must be a JSON object, got {type(said).__name__}")
    for key, entry in said.items():
        if not key.isdecimal():
            _check_tuning(flag, {key: entry}, OVER_ALL)
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"{flag}: {key} must be an object with candidate_steps, got {entry!r}")
        steps = entry.get("candidate_steps")
        if not isinstance(steps, list) or not steps or not all(type(one) is int and one >= 0 for one in steps):
            raise ValueError(f"{flag}: candidate_steps of {key} must be a list of whole numbers, got {steps!r}")
        _check_tuning(flag, {name: value for name, value in entry.items() if name != "candidate_steps"}, TUNING)
        found[int(key)] = frozenset(steps)
    if not found:
        raise ValueError(f'{flag}: names no batch; as {{"1": {{"candidate_steps": [1, 3]}}}} does')
    return found


def _check_tuning(flag: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raise ValueError unless all keys are known and have numbers."""
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{flag}: unknown key {name!r}; known are whole numbers, {', '.join(TUNING)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{flag}: {name} must be a number, got {value!r}")


def allows(config: Config, steps_of: Mapping[int, int | None]) -> Callable[[int, int], bool] | None:
    """Return whether a batch of so many requests may have trees of so many nodes; None where all may.

    steps_of: the rounds of the drafter's trees by their nodes. A batch below the least one of the file has its entry.
    """
    bounds = sorted(candidate_steps(config).items())
    if not bounds:
        return None

    def allowed(batch: int, nodes: int) -> bool:
        listed = [steps for least, steps in bounds if least <= batch] or [bounds[0][1]]
        return steps_of.get(nodes) in listed[-1]

    return allowed


def lookup_nodes(config: Config, nodes: int) -> int:
    """Return N, the nodes of the larger trees with lookups, beside a drafter whose trees have `nodes`."""
    return max(nodes, LOOKUP_NODES) if config.several_sizes else nodes


def smaller_nodes(config: Config, nodes: int, on_cpu: bool) -> int | None:
    """Return the nodes of smaller trees of the host or of a block; None where they gain nothing: half of eight or more.

    Fewer nodes than that cost a step what a few more do, but on a CPU four are faster than six.
    """
    if nodes < 8 or not config.several_sizes:
        return None
    return HOST_NODES if on_cpu else nodes // 2
