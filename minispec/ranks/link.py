"""Tensor parallelism: one model on several processes, its ranks, of which rank 0 serves and the others follow.

Every rank has a `Shard` of the model and the pages of its own KV heads, under the same page table. Rank 0 is the
ordinary process: scheduler, tokenizer, grammars, sampler and a whole drafter are there alone. The others know nothing
of requests; each has an `Engine` of the same sizes and does what rank 0's engine does, in the same order.

The one idea: what a rank does depends on integers that rank 0 sends, and on nothing else. Between steps these are the
calls: an entry of the page table, or the step to run, written into a tensor of int64 and broadcast. Within a step they
are what the forward pass reads, slots, lengths, roots and trees, and, after it, the verdict, which says which rows
stay. So clocks, free memory, seeds and what a drafter knows cannot part the ranks: only rank 0 looks at them.

    rank 0     call (B, N) | draft, send trees | embed, blocks, head | verify, send verdict | compact | drafter takes in
    rank 1..   call (B, N) | receive trees     | embed, blocks, head | receive verdict      | compact

What a step sends stays on the device, and the collectives are operators of its graph (`shards.py`), so that a captured
step replays them. Calls go over gloo, on the host. Lengths and roots come with every step, so admitting and releasing a
request tells the others nothing but its pages.

What is computed from what all ranks contribute must be the same bits on all: the sum of two is, and so is NCCL's and
gloo's sum of more; but its order may follow the tensor's size, so that with more than two ranks a batch may round
differently than a request alone, as bfloat16 does anyway.

What rank 0 does alone within a step, drafting, picking, verifying, may raise as it may in one process: the step goes on
with something in its place, which nobody is told, and the error is raised at its end (`Lead._contain`). An exception
in the model's own pass leaves the others waiting within it. There is no way back, so it ends the process
(`RanksParted`). A rank that dies ends all.

Read next: `shards.py`, `engine.py`; `load/ranks.py` for how the processes start and meet; docs/scaling.md.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minispec.asked.steps import Allowed, Asking
from minispec.buffers import DecodeBuffers, PrefillBuffers, Sizes
from minispec.cuda.graphs import capture
from minispec.drafter import Batch, Drafter
from minispec.engine import Engine
from minispec.ranks.shards import from_first
from minispec.sampling import GREEDY
from minispec.seams import AskedStep, Link
from minispec.tree import DraftTree, Shape
from minispec.verify import Trees, Verdict

logger = logging.getLogger("minispec")

PATIENCE = 3.0  # seconds that rank 0 waits with an error of its own for the news that another rank has died
CALLS = ("stop", "map", "unmap", "reset", "wipe", "decode", "prefill", "capture", "settle")  # sent as their indices
SHORT = 32  # integers that go in one message, their number the first; the rest of a longer list follows in a second


class RanksParted(SystemExit):
    """Rank 0 cannot reach the other ranks, or a step ended halfway on rank 0. No rank can go on, so all end."""

    ends_server = True


# ---- what ranks say to each other between steps ------------------------------------------------------------------


class Ranks:
    """The processes of one model as each of them sees them; `group` is the name of the process group."""

    parted = False  # whether a call or a step has failed on rank 0, so that the others do not listen any more

    def __init__(self) -> None:
        """For a process that has joined a group (`load/ranks.py`)."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None, "this process has joined no group"
        self.group = dist.group.WORLD.group_name

    def call(self, name: str, numbers: Sequence[int] = ()) -> None:
        """Send a call from rank 0 to all others; raises RanksParted where one is gone, and does nothing after that."""
        if self.parted:
            return
        try:
            self.same((CALLS.index(name), *numbers))
        except RuntimeError as error:
            raise self.part(error) from error

    def part(self, error: Exception) -> RanksParted:
        """Note that an error has parted the ranks, and return what is to be raised for it."""
        logger.debug("the ranks have parted", exc_info=True)
        self.parted = True
        # If a rank on this machine has died, the thread that watches it ends this process, with a clearer message.
        time.sleep(PATIENCE)
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return RanksParted(f"a step or call failed on rank 0, and the others of --tp-size {self.size} cannot go on "
                           f"without it; start the server again: {said}")  # fmt: skip

    def same(self, numbers: Sequence[int] = ()) -> list[int]:
        """Return rank 0's integers on every rank; what the others give is not looked at."""
        given = [len(numbers), *numbers] if self.rank == 0 else []
        first = torch.tensor([*given, *[0] * SHORT][:SHORT])
        dist.broadcast(first, 0)
        count, *found = first.tolist()
        if count > len(found):
            rest = torch.tensor(given[SHORT:] or [0] * (count - len(found)))
            dist.broadcast(rest, 0)
            found += rest.tolist()
        return found[:count]

    def least(self, number: int) -> int:
        """Return the smallest of what the ranks give."""
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def same_sizes(self, sizes: Sizes | None) -> Sizes:
        """Return rank 0's sizes on every rank; the others give None."""
        told = b"" if sizes is None else json.dumps(dataclasses.asdict(sizes)).encode()
        given = json.loads(bytes(self.same(told)))
        lists = {name: tuple(given[name]) for name in ("batch_sizes", "prefill_sizes")}
        return Sizes(**given | lists | {"trees": tuple((most, tuple(nodes)) for most, nodes in given["trees"])})


# ---- the engines -------------------------------------------------------------------------------------------------


class SharedLink(Link):
    """The link of an engine over a shard: within a step all have what rank 0 has."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self.engine, self.ranks = engine, ranks

    def begin(
        self, step: DecodeBuffers, lens: Tensor, root: Tensor, tree: DraftTree
    ) -> tuple[Tensor, Tensor, DraftTree]:
        """Return rank 0's lens, root and trees; slots and reach are written where the engine has them."""
        reach = self.engine.reach
        parts = (step.slots, lens, root, reach[step.slots], tree.tokens.flatten(), tree.parents.flatten())
        sizes = [part.numel() for part in parts]
        slots, lens, root, reached, *flat = from_first(torch.cat(parts), self.ranks.group).split(sizes)
        step.slots.copy_(slots)
        reach[slots] = reached
        # Copies, since no two arguments of a compiled function may lie in one tensor.
        tokens, parents = (part.view(step.batch, step.nodes).clone() for part in flat)
        return lens.clone(), root.clone(), DraftTree(tokens, parents)

    def all_have(self, own: bool) -> bool:
        """Return whether every rank has what this rank has if `own` is true; all ranks call it together."""
        return bool(self.ranks.least(own))

    def share(self, step: PrefillBuffers) -> None:
        """Take over rank 0's inputs."""
        step.inputs.copy_(from_first(step.inputs, self.ranks.group))

    def verdict(self, verdict: Verdict) -> Verdict:
        """Return rank 0's verdict."""
        sizes = [part.numel() for part in verdict]
        parts = from_first(torch.cat([part.flatten() for part in verdict]), self.ranks.group).split(sizes)
        return Verdict(*(part.view(own.shape).to(own.dtype) for part, own in zip(parts, verdict, strict=True)))


class Lead(SharedLink):
    """Rank 0's link: before it runs a step or changes the page table, it sends the others the call."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        """Let the other ranks follow this engine from now on; they must be in `follow`."""
        super().__init__(engine, ranks)
        self._leads = False  # whether a step is under way, in which the others wait for what is done here
        self._lost: Exception | None = None  # what rank 0's own part of that step has raised
        engine.link, engine.kv.tell = self, ranks.call
        self._contain(engine.drafter, "propose", lambda batch: DraftTree(*(part.clone() for part in batch.tree)))
        self._contain(engine.drafter, "commit", lambda new: None)
        self._contain(engine.accept, "judge", no_verdict)
        self._contain(engine, "pick", lambda step, *given: torch.zeros_like(step.lens))
        self._contain(engine.asked, "constrain", lambda logits, *given: Allowed(  # as without grammars
            torch.zeros_like(logits[..., 0], dtype=torch.int64), logits, {}))  # fmt: skip

    def tell(self, name: str, numbers: Sequence[int] = ()) -> None:
        """Have the other ranks make the same call."""
        self.ranks.call(name, numbers)

    @contextmanager
    def led(self, step: DecodeBuffers | PrefillBuffers, asked: AskedStep | None, captured: bool) -> Iterator[None]:
        """Have all ranks run a step, captured on all or on none: NCCL may treat captured buffers in its own way.

        What fails of rank 0's own part is raised when the others have done the step too; RanksParted for all else.
        """
        self._leads, self._lost = True, None
        try:
            if isinstance(step, PrefillBuffers):
                self.ranks.call("prefill", (captured, step.size, *([] if asked is None else asked.numbers)))
            else:
                self.ranks.call("decode", (captured, step.batch, *step.shape))
            yield
        except Exception as error:  # and the others wait within the step
            raise self.ranks.part(error) from error
        finally:
            self._leads = False
        if self._lost is not None:
            raise self._lost

    def _contain(self, owner: object, name: str, instead: Callable[..., Any]) -> None:
        """Wrap a method that only rank 0 calls within a step, such that where it raises the step goes on for all."""
        kind = type(owner)

        def part(*given: Any) -> Any:
            if torch.compiler.is_compiling() or not self._leads:
                return getattr(kind, name)(owner, *given)
            try:
                return getattr(kind, name)(owner, *given)
            except Exception as error:
                self._lost = self._lost or error
                return instead(*given)

        setattr(owner, name, part)


def no_verdict(trees: Trees, *given: object) -> Verdict:
    """Return a verdict of the right shape that keeps the roots and means nothing."""
    path = trees.tree.tokens.new_zeros(len(trees.lens), trees.most)
    none = torch.zeros_like(trees.lens)
    return Verdict(path, torch.ones_like(none), path, none, none.bool())


class Elsewhere(Drafter):
    """What stands for rank 0's drafter on the other ranks: the sizes of its trees."""

    name, commits = "elsewhere", False

    def __init__(self, sizes: Sizes) -> None:
        self.nodes, self.depth = sizes.nodes, sizes.depth

    def propose(self, batch: Batch) -> DraftTree:
        """Return a tensor for the trees that rank 0 sends."""
        return batch.tree


def follow(engine: Engine, ranks: Ranks) -> None:
    """Be another rank's engine: do what rank 0 calls, in order. A server's rank ends with rank 0's process."""
    engine.link, asking = SharedLink(engine, ranks), Asking(engine)
    setattr(engine.accept, "judge", no_verdict)  # noqa: B010  to be overwritten with rank 0's

    def run(step: DecodeBuffers | PrefillBuffers, captured: int, asked: AskedStep | None = None) -> None:
        engine.run_here(step, GREEDY, engine.graphs[step, GREEDY] if captured else None, asked)

    def prefill(numbers: Sequence[int]) -> None:
        captured, size, *asked = numbers
        step = engine.prefills[size]
        run(step, captured, asking.follow(step, asked) if asked else None)

    does: dict[str, Callable[[list[int]], object]] = {
        "map": lambda n: engine.kv.map(n[0], n[1], n[2:]),
        "unmap": lambda n: engine.kv.unmap(*n),
        "reset": lambda n: engine.kv.reset(),
        "wipe": lambda n: engine.kv.wipe(n),
        "decode": lambda n: run(engine.decodes[n[1], Shape(n[2], bool(n[3]))], n[0]),
        "prefill": prefill,
        "capture": lambda n: capture(engine, n, logger.debug), "settle": lambda n: engine.settle(),
    }  # fmt: skip
    index, *numbers = ranks.same()
    while CALLS[index] != "stop":
        does[CALLS[index]](numbers)
        index, *numbers = ranks.same()
