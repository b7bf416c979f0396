"""Threads that wait for each other spin only while they have the cores to themselves.

GNU's OpenMP lets a waiting thread spin for some 15 ms before it sleeps. On quiet cores that makes steps faster. Beside
a busy process the spinning thread holds the core that the awaited thread needs, and work in parallel took up to 36
times as long (docs/log.md).

The library reads GOMP_SPINCOUNT once, when it is loaded. But its threads hardly spin while there are more of them than
cores. So `Spinning` looks five times a second at what other processes do on these cores, and while they are busy it
keeps a team of idle threads. A process that works only while this one is idle takes nothing away. So a look does not
count while our threads are idle, and two busy looks are not enough, since a turn of ours may begin and end in them.
GOMP_SPINCOUNT or OMP_WAIT_POLICY in the environment is the user's own decision.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Set
from pathlib import Path

import torch

logger = logging.getLogger("minispec")

SLASH = Path("/")
LOOK = 0.2  # seconds between two looks
IDLE = 0.1  # cores that we use, below which our threads have nothing to wait for
BUSY = 0.5  # cores that others take from our threads, from which on a look counts as busy
RECENT = 5  # looks, of which more busy ones than ENDS have threads sleep
ENDS = 2  # busy looks that a turn of ours may have, in which it begins and ends
# So many calm looks have threads spin again. Sleeping doubles a step, spinning in vain does far more.
CALM = 50
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


class Team(threading.Thread):
    """A thread and threads of OpenMP's that do nothing until `ended` is set, and count as threads of the process."""

    def __init__(self, size: int) -> None:
        super().__init__(name="idle team", daemon=True)
        self.size, self.ended = size, threading.Event()

    def run(self) -> None:
        """Work in parallel once, which makes the threads, and wait."""
        torch.get_num_threads()  # PyTorch sets a thread's number when it first asks, and would undo the next line
        ctypes.CDLL(None).omp_set_num_threads(self.size)
        torch.zeros(2**18).exp_()
        self.ended.wait()


class Spinning(threading.Thread):
    """Looks at what others do on our cores, and decides whether our threads spin."""

    def __init__(self, threads: int, cores: Set[int], root: Path = SLASH) -> None:
        """`threads`: how many of ours work together. `root` stands for /, so that tests can lay out a machine."""
        super().__init__(name="spinning", daemon=True)
        self.threads, self.cores, self.root = threads, cores, root
        self.team: Team | None = None  # while our threads do not spin
        self._recent: deque[bool] = deque(maxlen=RECENT)  # which of the newest looks were busy
        self._calm, self._said = 0, False  # calm looks since threads sleep, or since others last had them sleep

    def run(self) -> None:
        """Look again and again."""
        before = self._clocks()
        while True:
            time.sleep(LOOK)
            now = self._clocks()
            passed, ours, others = (new - old for new, old in zip(now, before, strict=True))
            self.decide(ours / passed, others / passed)
            before = now

    def _clocks(self) -> tuple[float, float, float]:
        """Return the time, and for how many seconds our cores have worked for us and for others."""
        return time.monotonic(), time.process_time(), self.used_by_others()

    def used_by_others(self) -> float:
        """Return for how many seconds since boot our cores have worked for others, or were kept from this machine."""
        ticks = 0
        for line in (self.root / "proc/stat").read_text("ascii").splitlines():
            name, *counts = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in self.cores:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counts[:8])
                ticks += user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()

    def decide(self, ours: float, others: float) -> None:
        """Have our threads spin or sleep, by how many cores we and others have used since the last look."""
        busy = others - (len(self.cores) - self.threads) > BUSY
        if busy and ours < IDLE:
            self._recent.clear()
            return
        self._recent.append(busy)
        if busy and sum(self._recent) > ENDS:
            self._calm = 0
            if self.team is None:
                self._sleep(others)
        elif not busy and self.team is not None:
            self._calm += 1
            if self._calm == CALM:
                self.team.ended.set()
                self.team = None
                logger.info("other processes have left the cores: waiting threads spin again")

    def _sleep(self, others: float) -> None:
        self.team = Team(len(self.cores) - self.threads + 2)
        self.team.start()
        logger.log(logging.INFO if self._said else logging.WARNING,
                   "other processes use %.1f of %d cores (those that compile for it too): threads that wait "
                   "for each other sleep from now on, since spinning would hold the cores up; GOMP_SPINCOUNT or "
                   "OMP_WAIT_POLICY in the environment decides otherwise", others, len(self.cores))  # fmt: skip
        self._said = True


def spin_alone() -> None:
    """Let the threads of this process spin only while they have its cores to themselves.

    Nobody looks at the cores where a variable decides, where threads never wait, where there are more of them than
    cores, or less than half as many: others would have to keep the other half busy.
    """
    if not hasattr(os, "sched_getaffinity") or not (SLASH / "proc/stat").is_file():
        return
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    decided = any(name in os.environ for name in VARIABLES) or not hasattr(ctypes.CDLL(None), "omp_set_num_threads")
    looked_at = any(isinstance(thread, Spinning) for thread in threading.enumerate())
    if 1 < threads <= len(cores) <= 2 * threads and not decided and not looked_at:
        Spinning(threads, cores).start()
