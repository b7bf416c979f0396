"""Compiling beside a server that serves already: processes make files of compiled functions, and the engine loads them.

On a CPU compiling takes minutes, and meanwhile the engine serves eagerly, at two thirds of the speed. Compiling in the
server's own process would stop it for ten seconds at a time, since a compiler in Python holds the interpreter.

Each process builds the same engine, whose layers all share one layer of meaningless weights (`build.rehearse`). It is
told one kind of step after the other (`steps_of`), and prints a line when the step's functions are in files
(`cpu/files.py`). Then the engine thread loads them by the same function (`make_graphs`), between two steps of its own,
in some tenths of a second. While files have all that is asked for, no process is started.

The processes run at a lower priority than the server (NICENESS), and end when the server ends, in whatever way: when
its standard input, a pipe from the server, closes, a process kills itself and the compilers that it started.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from minispec.buffers import DecodeBuffers, PrefillBuffers
    from minispec.config import Config
    from minispec.llm import LLM

logger = logging.getLogger("minispec")

MADE = "made: "  # begins the lines that a process prints for steps
HELD = 700 << 20  # bytes that a process holds, which uses one core
# At a lower priority than this they would get next to no time beside a stream whose own steps are compiled.
NICENESS = 5


class CompilerTask(NamedTuple):
    """What makes two engines have the same graphs."""

    config: Config
    pages: int
    threads: int


def process_count(steps: int) -> int:
    """Return how many processes compile: no more than cores, a quarter of the steps, or what half the memory holds."""
    from minispec.load.machine import host_memory

    return max(1, min(len(os.sched_getaffinity(0)), steps // 4, host_memory()[0] // 2 // HELD))


# ---- in the server ---------------------------------------------------------------------------------------------------


class CompilerProcess:
    """The process that compiles, seen from the server."""

    COMMAND = (sys.executable, "-m", "minispec.serve.warming")

    def __init__(self, recipe: CompilerTask, wake: Callable[[], None]) -> None:
        """`wake` is called, by a thread, whenever there is news."""
        self.told: list[str] = []  # names of steps
        self.made: set[str] = set()
        self.ended, self.last_words = False, "it said nothing"
        self._wake = wake
        self.process = subprocess.Popen(
            self.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, process_group=0, env=os.environ | {"TORCH_WARM_POOL": "0"},
        )  # fmt: skip
        self._send(pickle.dumps(recipe))
        threading.Thread(target=self._listen, name="warming", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether it waits to be told a step."""
        return not self.ended and self.made.issuperset(self.told)

    def tell(self, step: str) -> None:
        """Have a step compiled."""
        self.told.append(step)
        self._send(f"{step}\n".encode())

    def _send(self, what: bytes) -> None:
        with suppress(BrokenPipeError):  # `_listen` sees that the process has ended
            given = cast(IO[bytes], self.process.stdin)
            given.write(what)
            given.flush()

    def _listen(self) -> None:
        for raw in cast(IO[bytes], self.process.stdout):
            line = raw.decode(errors="replace").strip()
            if line.startswith(MADE):
                self.made.add(line.removeprefix(MADE))
                self._wake()
            elif line:
                self.last_words = line
        self.process.wait()
        self.ended = True
        self._wake()

    def stop(self) -> None:
        """End the process and what it has started."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Warming:
    """Which steps of a serving engine have their graphs; `turn` makes the next one. Every method runs on its thread."""

    def __init__(self, llm: LLM, wake: Callable[[], None]) -> None:
        """`wake` makes the engine thread call `turn` soon, and may be called from any thread."""
        from minispec.load.warm_up import steps_of  # here, since the server listens before torch is imported

        self.llm, self.engine, self._wake = llm, llm.scheduler.engine, wake
        self.todo = deque(steps_of(self.engine) if llm.compile_later else ())
        self.total = len(self.todo)
        self.untold: deque[str] = deque()  # names of steps that no process was told yet
        self.children: list[CompilerProcess] = []
        self.failed = ""  # why steps go on eagerly for good
        self._trial = llm.try_out() if llm.compile_later else iter(())  # times steps and tests the head, in parts
        self._missed = False  # whether there was no file of what a process had compiled
        self._rest_until = 0.0
        self._threads = 0  # that torch used before the processes were started

    @property
    def state(self) -> str:
        """What /health says of it; any thread may ask."""
        if not self.llm.compiled:
            return "eager"
        done = self.total - len(self.todo)
        if done == self.total:
            return "compiled"
        if not done and not self.children:
            return "eager"
        return f"{'incomplete' if self.failed else 'warming'} {done}/{self.total}"

    def turn(self, busy: bool) -> bool:
        """Make the graphs of at most one step, between two steps; returns whether anything was done.

        busy: requests are under way, so after each step they get as long as it took, and nothing is compiled here.
        """
        if self.engine.settled:  # what is tried out needs slots and pages, so it waits until nobody else does
            return not busy and next(self._trial, self) is not self
        self._tell_children()
        if not self.todo or self.failed:
            return self._end()
        if (step := self._next()) is None:
            return False
        if busy and (self._missed or time.monotonic() < self._rest_until):
            return False
        started = time.monotonic()
        self._make(step, started)
        self._rest_until = 2 * time.monotonic() - started
        return True

    def _tell_children(self) -> None:
        """Tell processes that wait what to compile next; one that ended too early is the end of compiling."""
        for child in self.children:
            if child.ended and not self.failed and (self.untold or not child.made.issuperset(child.told)):
                self.failed = child.last_words
            if child.idle and self.untold:
                child.tell(self.untold.popleft())

    def _next(self) -> DecodeBuffers | PrefillBuffers | None:
        """Return the first step whose graphs can be made: any, or one that a process has compiled."""
        made = set().union(*(child.made for child in self.children))
        return next((step for step in self.todo if not self.children or step.name in made), None)

    def _make(self, step: DecodeBuffers | PrefillBuffers, started: float) -> None:
        """Make a step's graphs, from files unless what a process had compiled was in none."""
        from minispec.cpu.files import NotMade
        from minispec.load.warm_up import make_graphs

        try:
            make_graphs(self.engine, step, compiles=self._missed)
        except NotMade as error:
            if not self.children:
                self._start_children()
            else:
                self._missed = True
                logger.warning("%s: %s; it will be compiled here, while nobody waits", step.name, error)
        except Exception as error:
            logger.exception("%s cannot be compiled", step.name)
            self.failed = f"{type(error).__name__}: {error}"
        else:
            self.todo.remove(step)
            logger.info("compiled %d/%d: %s, %.1f s", self.total - len(self.todo), self.total, step.name,
                        time.monotonic() - started)  # fmt: skip

    def _start_children(self) -> None:
        import torch

        self.llm.move_weights()  # for these minutes, so that it need not wait for the last graph
        self._threads = torch.get_num_threads()
        recipe = CompilerTask(self.llm.config, self.engine.kv.pages, self._threads)
        self.untold.extend(step.name for step in self.todo)
        self.children = [CompilerProcess(recipe, self._wake) for _ in range(process_count(len(self.todo)))]
        torch.set_num_threads(max(1, self._threads // 2))  # or a stream would leave the processes no time at all
        self._tell_children()
        logger.info("processes beside the server compile %d kinds of steps, which run eagerly until then",
                    len(self.todo))  # fmt: skip

    def _end(self) -> bool:
        """Settle the engine, as soon as the processes are gone: until then times of steps are not those to come."""
        import torch

        self.stop()
        if not all(child.ended for child in self.children):
            return False  # they call `wake` when they have ended
        if self.failed:
            logger.error("%d of %d kinds of steps stay eager, since compiling failed: %s", len(self.todo), self.total,
                         self.failed)  # fmt: skip
        if self._threads:
            torch.set_num_threads(self._threads)
        self.engine.settle()
        return True

    def stop(self) -> None:
        """End the processes, if there are any."""
        for child in self.children:
            child.stop()


# ---- in the process beside it ----------------------------------------------------------------------------------------


def main() -> None:
    """Compile steps of the recipe on standard input, by the names that follow it there; prints a line for each."""
    os.nice(NICENESS)
    logging.disable(logging.WARNING)  # the server has said it all, and the last line here is why the process ended
    recipe: CompilerTask = pickle.load(sys.stdin.buffer)
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(names,), daemon=True).start()
    compile_steps(recipe, names)


def _read(names: queue.SimpleQueue[str]) -> None:
    """Pass on lines until the pipe from the server closes, then kill this process and the compilers that it runs."""
    for line in sys.stdin.buffer:
        names.put(line.decode().rstrip("\n"))
    os.killpg(0, signal.SIGKILL)


def compile_steps(recipe: CompilerTask, names: queue.SimpleQueue[str]) -> None:
    """Compile steps as they are named, for good."""
    import torch

    from minispec.load.build import rehearse
    from minispec.load.warm_up import make_graphs, steps_of

    torch.set_num_threads(recipe.threads)
    engine = rehearse(recipe.config, recipe.pages)
    steps = {step.name: step for step in steps_of(engine)}
    while True:
        name = names.get()
        make_graphs(engine, steps[name])
        print(f"{MADE}{name}", flush=True)


if __name__ == "__main__":
    main()
