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
with something in its place, which nobody is told, and the error is raised at its end (`Lead._contained`). An exception
in the model's own pass leaves the others waiting within it. There is no way back, so it ends the process
(`RanksParted`). A rank that dies ends all.

Read next: `shards.py`, `engine.py`; `follower.py` for the process of the other ranks; docs/scaling.md.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import IO, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from minispec.asked import Allowed, Asking
from minispec.bucket import Bucket, PrefillBucket, Sizes
from minispec.config import TORCHRUN, Config
from minispec.drafter import Batch, Drafter, TreeSize
from minispec.engine import Engine
from minispec.graphs import capture
from minispec.sampling import GREEDY
from minispec.seams import AskedStep, Link
from minispec.shards import from_first
from minispec.tree import DraftTree, Shape
from minispec.verify import Trees, Verdict

logger = logging.getLogger("minispec")

FOREVER = timedelta(days=365)  # the ranks wait for the next call as long as nobody asks for anything
PATIENCE = 3.0  # seconds that rank 0 waits with an error of its own for the news that another rank has died
CALLS = ("stop", "map", "unmap", "reset", "clear", "decode", "prefill", "capture", "settle")  # sent as their indices
SHORT = 32  # integers of a call that go in one message; the rest of a longer one follows in a second


class RanksParted(SystemExit):
    """Rank 0 cannot reach the others, or a step ended halfway on it: there is nothing to go on with, so all end."""

    ends_server = True


# ---- what ranks say to each other between steps ------------------------------------------------------------------


class Ranks:
    """The processes of one model as each of them sees them; `group` is the name of the process group."""

    parted = False  # whether a call or a step has failed on rank 0, so that the others do not listen any more

    def __init__(self) -> None:
        """For a process that has joined a group (`join`)."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None, "this process has joined no group"
        self.group = dist.group.WORLD.group_name

    def call(self, name: str, numbers: Sequence[int] = ()) -> None:
        """Send a call from rank 0 to all others; raises RanksParted where one is gone, and does nothing after that."""
        if self.parted:
            return
        message = [CALLS.index(name), len(numbers), *numbers]
        first = torch.tensor([*message, *[0] * SHORT][:SHORT])
        try:
            dist.broadcast(first, 0)
            if message[SHORT:]:
                dist.broadcast(torch.tensor(message[SHORT:]), 0)
        except RuntimeError as error:
            raise self.part(error) from error

    def part(self, error: Exception) -> RanksParted:
        """Note that an error has parted the ranks, and return what is to be raised for it."""
        logger.debug("the ranks have parted", exc_info=True)
        self.parted = True
        time.sleep(PATIENCE)  # if a rank has died on this machine, who watches it says so better and ends the process
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return RanksParted(f"a step or call failed on rank 0, and the others of --tp-size {self.size} cannot go on "
                           f"without it; start the server again: {said}")  # fmt: skip

    def next_call(self) -> tuple[str, list[int]]:
        """Wait for the next call on another rank than 0; returns its name and numbers."""
        first = torch.zeros(SHORT, dtype=torch.int64)
        dist.broadcast(first, 0)
        index, count, *numbers = first.tolist()
        if count > len(numbers):
            rest = torch.zeros(count - len(numbers), dtype=torch.int64)
            dist.broadcast(rest, 0)
            numbers += rest.tolist()
        return CALLS[index], numbers[:count]

    def same(self, numbers: Sequence[int]) -> list[int]:
        """Return rank 0's integers on every rank; what the others give is not looked at."""
        count = torch.tensor([len(numbers)])
        dist.broadcast(count, 0)
        found = torch.tensor(list(numbers)) if self.rank == 0 else torch.zeros(int(count), dtype=torch.int64)
        dist.broadcast(found, 0)
        return found.tolist()

    def least(self, number: int) -> int:
        """Return the smallest of what the ranks give."""
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def same_sizes(self, sizes: Sizes | None) -> Sizes:
        """Return rank 0's sizes on every rank; the others give None."""
        lists = ([], []) if sizes is None else (sizes.batch_sizes, sizes.prefill_sizes)
        smaller = None if sizes is None else sizes.smaller
        numbers = [] if sizes is None else [getattr(sizes, name) for name in _NUMBERS]
        numbers = self.same([-1 if number is None else int(number) for number in (*numbers, *(smaller or ()))])
        given: dict[str, Any] = {name: None if n == -1 else n for name, n in zip(_NUMBERS, numbers, strict=False)}
        size: list[Any] = [None if n == -1 else n for n in numbers[len(_NUMBERS) :]]
        batches, prefills = (tuple(self.same(values)) for values in lists)
        return Sizes(**given | {"looks_up": bool(given["looks_up"])}, batch_sizes=batches, prefill_sizes=prefills,
                     smaller=TreeSize(*size) if size else None)  # fmt: skip


_NUMBERS = [f.name for f in dataclasses.fields(Sizes) if f.name not in ("batch_sizes", "prefill_sizes", "smaller")]


# ---- the engines -------------------------------------------------------------------------------------------------


class SharedLink(Link):
    """The link of an engine over a shard: within a step all have what rank 0 has."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self.engine, self.ranks = engine, ranks

    def begin(
        self, step: Bucket, lens: Tensor, root: Tensor, tree: DraftTree
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

    def share(self, step: PrefillBucket) -> None:
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
        instead: tuple[tuple[object, str, Callable[..., Any]], ...] = (
            (engine.drafter, "propose", lambda batch: DraftTree(*(part.clone() for part in batch.tree))),
            (engine.drafter, "commit", lambda new: None),
            (engine.accept, "judge", no_verdict),
            (engine, "pick", lambda step, *given: torch.zeros_like(step.lens)),
            (engine.asked, "constrain", nothing_forbidden),
        )
        for owner, name, in_place in instead:
            setattr(owner, name, self._contained(owner, name, in_place))

    def tell(self, name: str, numbers: Sequence[int] = ()) -> None:
        """Have the others do the same."""
        self.ranks.call(name, numbers)

    @contextmanager
    def led(self, step: Bucket | PrefillBucket, asked: AskedStep | None) -> Iterator[None]:
        """Have all ranks run a step.

        What fails of rank 0's own part is raised when the others have done the step too; RanksParted for all else.
        """
        self._leads, self._lost = True, None
        try:
            if isinstance(step, PrefillBucket):
                self.ranks.call("prefill", (step.size, *([] if asked is None else asked.numbers)))
            else:
                self.ranks.call("decode", (step.batch, *step.shape))
            yield
        except Exception as error:  # and the others wait within the step
            raise self.ranks.part(error) from error
        finally:
            self._leads = False
        if self._lost is not None:
            raise self._lost

    def _contained(self, owner: object, name: str, instead: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that only rank 0 calls within a step, such that where it raises the step goes on for all."""
        kind = type(owner)

        def part(*given: Any) -> Any:
            if torch.compiler.is_compiling() or not self._leads:
                return getattr(kind, name)(owner, *given)
            try:
                return getattr(kind, name)(owner, *given)
            except Exception as error:
                self._lost = self._lost or error
                return instead(*given)

        return part


def no_verdict(trees: Trees, *given: object) -> Verdict:
    """Return a verdict of the right shape that keeps the roots and means nothing."""
    path = trees.tree.tokens.new_zeros(len(trees.lens), trees.most)
    none = torch.zeros_like(trees.lens)
    return Verdict(path, torch.ones_like(none), path, none, none.bool())


def nothing_forbidden(logits: Tensor, *given: object) -> Allowed:
    """Return what a step without grammars leaves, for one that goes on for the others alone."""
    return Allowed(torch.zeros_like(logits[..., 0], dtype=torch.int64), logits, {})


class Elsewhere(Drafter):
    """What stands for rank 0's drafter on the other ranks: the sizes of its trees."""

    name, commits = "elsewhere", False

    def __init__(self, sizes: Sizes) -> None:
        self.nodes, self.depth, self.scratch, self.smaller = sizes.nodes, sizes.depth, sizes.scratch, sizes.smaller
        self.looks_up = sizes.looks_up

    def propose(self, batch: Batch) -> DraftTree:
        """Return a tensor for the trees that rank 0 sends."""
        return batch.tree


def follow(engine: Engine, ranks: Ranks) -> None:
    """Be another rank's engine: do what rank 0 calls, in order, until it says stop."""
    engine.link, asking = SharedLink(engine, ranks), Asking(engine)
    setattr(engine.accept, "judge", no_verdict)  # noqa: B010  to be overwritten with rank 0's

    def prefill(numbers: Sequence[int]) -> None:
        size, *asked = numbers
        step = engine.prefills[size]
        engine.run(step, GREEDY, asking.follow(step, asked) if asked else None)

    does: dict[str, Callable[[list[int]], object]] = {
        "map": lambda n: engine.kv.map(n[0], n[1], n[2:]),
        "unmap": lambda n: engine.kv.unmap(*n),
        "reset": lambda n: engine.kv.reset(),
        "clear": lambda n: engine.kv.clear(n),
        "decode": lambda n: engine.run(engine.buckets[n[0], Shape(n[1], bool(n[2]))], GREEDY),
        "prefill": prefill,
        "capture": lambda n: capture(engine, n, logger.debug), "settle": lambda n: engine.settle(),
    }  # fmt: skip
    while (call := ranks.next_call())[0] != "stop":
        name, numbers = call
        does[name](numbers)


# ---- meeting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankPlace:
    """Where a process stands among the ranks, and where they meet: a file that all can open, or HOST:PORT."""

    rank: int
    size: int
    local: int  # its number on its machine, and that of its device
    meeting: str


def gather(config: Config, device: torch.device) -> Ranks:
    """Start the other ranks of this machine, unless torchrun has, and meet all; returns them.

    The processes started here end with this one, and if one of them dies first, `end_all` ends this one. Raises
    ValueError or RuntimeError with one sentence where ranks cannot meet.
    """
    rank, timeout = config.first_rank(), config.dist_timeout
    if dist.is_initialized():
        raise ValueError(f"--tp-size {config.tp_size}: this process is a rank of another model, and can be that of one")
    if TORCHRUN in os.environ:
        _take_device(device, int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(_backend(device), timeout=FOREVER)
        return Ranks()
    here = config.tp_size // config.nnodes
    _count_devices(device, here)
    # On one machine a file in memory, which every process here opens by its number: nothing is left of it, however they
    # end, and it may be read as long as they live, since NCCL looks up there later what it has not met yet.
    files: tuple[int, ...] = () if config.dist_init_addr else (os.memfd_create("minispec-ranks"),)
    place = RankPlace(rank, config.tp_size, 0, config.dist_init_addr or f"/proc/self/fd/{files[0]}")
    store = open_store(place, timeout)
    for local in range(1, here):
        RankProcess(config, replace(place, rank=rank + local, local=local), files)
    return join(place, store, device, timeout)


def open_store(place: RankPlace, timeout_s: float) -> dist.Store:
    """Return the store at which the ranks meet; rank 0 opens it where it is an address. Raises ValueError."""
    host, _, port = place.meeting.rpartition(":")
    if not host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here, and nobody else need reach them
        return dist.FileStore(place.meeting, place.size)
    # Looked at first, since PyTorch says what is wrong with an address in twenty lines of its own.
    _try_to_listen(host, int(port), timeout_s) if place.rank == 0 else _wait_for(host, int(port), timeout_s)
    try:
        return dist.TCPStore(host, int(port), place.size, is_master=place.rank == 0, wait_for_workers=False,
                             timeout=timedelta(seconds=timeout_s))  # fmt: skip
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"--dist-init-addr {place.meeting}: the ranks cannot meet there: {said[:200]}") from None


def _try_to_listen(host: str, port: int, timeout_s: float) -> None:
    """Raise ValueError unless who connects to this address gets here; on machine 0."""
    try:
        both = socket.has_dualstack_ipv6()
        with socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET,
                                  dualstack_ipv6=both) as here:  # fmt: skip
            here.settimeout(timeout_s)
            with socket.create_connection((host, port), timeout_s) as there, here.accept()[0]:
                there.close()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = ("machine 0 cannot listen there: the port is taken; choose another one, on all machines" if taken else
               f"machine 0 cannot be reached there; give an address of its own: {error}")  # fmt: skip
        raise ValueError(f"--dist-init-addr {host}:{port}: {why}") from None


def _wait_for(host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody answers at an address; raises ValueError where nobody does in time."""
    until = time.monotonic() + timeout_s
    while (left := until - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), left).close()
            return
        except OSError as error:
            said = str(error)
            time.sleep(min(0.1, left))
    raise ValueError(f"--dist-init-addr {host}:{port}: nobody answered in {timeout_s:g} s (--dist-timeout); start "
                     f"machine 0 first, and see that it is reachable from here: {said}")  # fmt: skip


def join(place: RankPlace, store: dist.Store, device: torch.device, timeout_s: float) -> Ranks:
    """Meet the other ranks, and return them; raises RuntimeError where some do not come in time."""
    _take_device(device, place.local)
    store.add("present", 1)
    until = time.monotonic() + timeout_s
    while (present := store.add("present", 0)) < place.size:
        if time.monotonic() > until:
            raise RuntimeError(f"--tp-size {place.size}: only {present} ranks met within {timeout_s:g} s "
                               "(--dist-timeout); start every machine, with the same --dist-init-addr")  # fmt: skip
        time.sleep(0.05)
    dist.init_process_group(_backend(device), store=store, rank=place.rank, world_size=place.size, timeout=FOREVER)
    return Ranks()


def _take_device(device: torch.device, local: int) -> None:
    """Let "cuda" be this rank's own device in this thread."""
    if device.type == "cuda":
        _count_devices(device, local + 1)
        torch.cuda.set_device(local)


def _count_devices(device: torch.device, ranks: int) -> None:
    """Raise ValueError where this machine has fewer GPUs than ranks, each of which needs its own."""
    if device.type == "cuda" and (count := torch.cuda.device_count()) < ranks:
        raise ValueError(f"--tp-size: {ranks} ranks on this machine need a GPU each, and it has {count}; give fewer, "
                         "or more machines (--nnodes)")  # fmt: skip


def _backend(device: torch.device) -> str:
    """Return who carries tensors: calls go over gloo, steps over NCCL where they are on CUDA."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


# ---- the processes of one machine --------------------------------------------------------------------------------


def end_all(message: str) -> NoReturn:
    """End this process, whatever its threads wait for, with one line; the ranks that it has started end with it."""
    sys.stderr.write(f"minispec: error: {message}\n")
    sys.stderr.flush()
    os._exit(1)


class RankProcess:
    """Another rank's process on this machine, seen from the one that started it."""

    COMMAND = (sys.executable, "-m", "minispec.follower")

    def __init__(self, config: Config, place: RankPlace, files: Sequence[int] = ()) -> None:
        """Start it; it has these open files too, under the same numbers."""
        self.rank, self.last_words = place.rank, "it said nothing"
        self.process = subprocess.Popen(
            self.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
            pass_fds=files, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        )  # fmt: skip
        # Standard input stays open: when it ends, this process has ended, and the other one follows it.
        given = cast(IO[bytes], self.process.stdin)
        given.write(described(config, place))
        given.flush()
        threading.Thread(target=self._watch, name=f"rank {self.rank}", daemon=True).start()

    def _watch(self) -> None:
        """Pass on what the process says until it ends, which it should not."""
        for raw in cast(IO[bytes], self.process.stdout):
            if line := raw.decode(errors="replace").strip():
                self.last_words = line
                logger.info("rank %d: %s", self.rank, line)
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else self.last_words.removeprefix("minispec: error: ")
        end_all(f"rank {self.rank} (process {self.process.pid}) has ended, and the others cannot go on without it; "
                f"start the server again: {how}")  # fmt: skip


def described(config: Config, place: RankPlace) -> bytes:
    """Return a line that tells a process which rank it is."""
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init and f.name != "notes"}
    return json.dumps({"config": given, "place": dataclasses.asdict(place)}).encode() + b"\n"


def understood(line: bytes) -> tuple[Config, RankPlace]:
    """Return what `described` has written."""
    told = json.loads(line)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in told["config"].items()}
    return Config(**cast(dict[str, Any], given)), RankPlace(**told["place"])
