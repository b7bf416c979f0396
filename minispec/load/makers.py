"""Processes that make files of compiled functions (`files.py`) for an engine beside them.

A compiler in Python holds the interpreter, so whoever serves or compiles fast needs other processes. What they do is in
`making.py`. When all functions of a step are in files, a process prints a line. The server has the processor before
them, and they end with it, however that ends: each has a pipe from the server as its standard input.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, NamedTuple, cast

from minispec.config import Config
from minispec.load.machine import host_memory

MADE = "made: "  # begins the lines that a process prints for steps
HELD = 700 << 20  # bytes that a process holds, which uses one core


class Task(NamedTuple):
    """What makes two engines have the same graphs."""

    config: Config
    pages: int
    threads: int


def process_count(steps: int) -> int:
    """Return how many processes compile: no more than cores, a quarter of the steps, or what half the memory holds."""
    return max(1, min(len(os.sched_getaffinity(0)), steps // 4, host_memory()[0] // 2 // HELD))


class Makers:
    """The processes, seen from the server."""

    COMMAND = (sys.executable, "-m", "minispec.load.making")

    def __init__(self, task: Task, count: int, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called, by a thread, whenever there is news."""
        self.made: set[str] = set()  # names of steps
        self.last_words = "it said nothing"
        self._wake, self._news, self._listening = wake, threading.Condition(), count
        self.processes = [self._start(task) for _ in range(count)]

    def _start(self, task: Task) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, process_group=0)  # fmt: skip
        threading.Thread(target=self._listen, args=(process,), name="makers", daemon=True).start()
        with suppress(BrokenPipeError):  # `_listen` sees that the process has ended
            given = cast(IO[bytes], process.stdin)
            given.write(pickle.dumps(task))
            given.flush()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        for raw in cast(IO[bytes], process.stdout):
            line = raw.decode(errors="replace").strip()
            if line.startswith(MADE):
                self._tell(line.removeprefix(MADE))
            elif line:
                self.last_words = line
        process.wait()
        self._tell()

    def _tell(self, *made: str) -> None:
        """Tell whoever waits that a step is made, or that a process has ended."""
        with self._news:
            self.made.update(made)
            if not made:
                self._listening -= 1
            self._news.notify_all()
        self._wake()

    @property
    def ended(self) -> bool:
        """Whether all processes have ended."""
        return not self._listening

    def wait(self, step: str) -> None:
        """Wait until a step's files are made, or all processes have ended."""
        with self._news:
            self._news.wait_for(lambda: step in self.made or self.ended)

    def close(self) -> None:
        """End the processes and what they have started."""
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
