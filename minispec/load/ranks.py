"""How the processes of one model, its ranks, find each other: one starts the others of its machine, and all meet.

Ranks meet at a file where all are on one machine, else at an address on machine 0 (--dist-init-addr), or as torchrun
has them meet. When they have met they are a process group, and `link.py` says what they do in it. A process that
has started others watches them: if one of them dies it ends itself, and when it ends, they do.

Read next: `link.py`; `rank.py` for the process that is started; docs/scaling.md.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import IO, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist

from minispec.config import TORCHRUN, Config
from minispec.ranks.link import Ranks

logger = logging.getLogger("minispec")

FOREVER = timedelta(days=365)  # the ranks wait for the next call as long as nobody asks for anything


# ---- meeting -----------------------------------------------------------------------------------------------------


class RankPlace(NamedTuple):
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
        RankProcess(config, place._replace(rank=rank + local, local=local), files)
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
    """Raise ValueError unless this address leads to this machine, which is machine 0."""
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

    COMMAND = (sys.executable, "-m", "minispec.load.rank")

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
    """Return the pickle of a config and a place that `rank.main` reads."""
    return pickle.dumps((config, tuple(place)))  # a plain tuple: to read it takes no import of torch
