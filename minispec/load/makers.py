"""Processes that make files of compiled functions (`files.py`) for an engine beside them.

A compiler in Python holds the interpreter, so whoever serves or compiles fast needs other processes. Each builds the
same engine, of tensors without meaning (`build.rehearse`), and goes through the same steps in the same order. It makes
each function that is in no file and that no other process is making, so nobody waits. When all functions of a step are
in files, it prints a line. The server has the processor before the processes, and they end with it, however that ends:
each has a pipe from the server as its standard input, and kills itself and its compilers when the pipe closes.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, cast

from minispec.load.machine import end_with_parent, host_memory

MADE = "made: "  # begins the lines that a process prints for steps
HELD = 700 << 20  # bytes that a process holds, which uses one core
# Were it nicer, a stream would be faster meanwhile, and leave it next to nothing once the stream's steps are compiled.
NICENESS = 5

Work = Callable[[], None]  # `warm_up.make_files` with its arguments


def process_count(steps: int) -> int:
    """Return how many processes compile: no more than cores, a quarter of the steps, or what half the memory holds."""
    return max(1, min(len(os.sched_getaffinity(0)), steps // 4, host_memory()[0] // 2 // HELD))


class Makers:
    """The processes, seen from the server."""

    COMMAND = (sys.executable, "-m", "minispec.load.makers")

    def __init__(self, work: Work, count: int) -> None:
        self.made: set[str] = set()  # names of steps
        self.last_words = "it said nothing"
        output, theirs = os.pipe()
        self.processes = [
            subprocess.Popen(self.COMMAND, bufsize=0, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs,
                             process_group=0) for _ in range(count)
        ]  # fmt: skip
        os.close(theirs)
        for process in self.processes:
            with suppress(BrokenPipeError):  # it has ended
                cast(IO[bytes], process.stdin).write(pickle.dumps(work).hex().encode() + b"\n")
        self._listener = threading.Thread(target=self._listen, args=(output,), name="makers", daemon=True)
        self._listener.start()

    def _listen(self, output: int) -> None:
        with open(output, errors="replace") as lines:
            for line in lines:
                if line.startswith(MADE):
                    self.made.add(line.removeprefix(MADE).strip())
                else:
                    self.last_words = line.strip() or self.last_words
        for process in self.processes:
            process.wait()

    @property
    def ended(self) -> bool:
        """Whether all processes have ended, and all that they said was heard."""
        return not self._listener.is_alive()

    def close(self) -> None:
        """End the processes and what they have started; until they are gone, times of steps are not those to come."""
        for process in self.processes:
            cast(IO[bytes], process.stdin).close()
        self._listener.join(10)  # seconds


def main() -> None:
    """Do the work on standard input. What it needs is imported when the process is nice, and ends with the server."""
    os.nice(NICENESS)
    logging.disable(logging.WARNING)  # the server has said it all, and the last line here is why the process ended
    work = bytes.fromhex(sys.stdin.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    pickle.loads(work)()


if __name__ == "__main__":
    main()
