"""Compiling beside a server that serves already: processes make files (`load/makers.py`), the engine loads them.

On a CPU compiling takes minutes, and meanwhile the engine serves eagerly, at two thirds of the speed. Compiling in the
server's own process would stop it for ten seconds at a time, since a compiler in Python holds the interpreter. So the
engine thread loads what the processes have made between two steps of its own, in some tenths of a second. While all
that is asked for is in files, no process is started.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import torch

from minispec.llm import LLM
from minispec.load.files import is_empty
from minispec.load.makers import Makers
from minispec.load.warm_up import make_graphs, steps_of

logger = logging.getLogger("minispec")

PATIENCE = 2.0  # seconds after the start in which a first request is served before anything is loaded


class Warming:
    """Which steps of a serving engine have their graphs; `turn` makes the next one. Every method runs on its thread."""

    def __init__(self, llm: LLM, wake: Callable[[], None]) -> None:
        """`wake` makes the engine thread call `turn` soon, and may be called from any thread."""
        self.llm, self.engine, self._wake = llm, llm.scheduler.engine, wake
        self.todo = steps_of(self.engine) if llm.compile_later else []
        self.total = len(self.todo)
        self.makers: Makers | None = None
        self.failed = ""  # why steps go on eagerly for good
        self._parts = self._work() if llm.compile_later else iter(())
        self._served, self._rest_until = False, time.monotonic() + PATIENCE
        if self.todo:
            timer = threading.Timer(PATIENCE, wake)
            timer.daemon = True
            timer.start()
            if is_empty():
                self._start_makers()

    @property
    def state(self) -> str:
        """What /health says of it; any thread may ask."""
        done = self.total - len(self.todo)
        if not self.llm.compiled or (self.todo and not done and self.makers is None):
            return "eager"
        return f"{'incomplete' if self.failed else 'warming'} {done}/{self.total}" if self.todo else "compiled"

    def turn(self, busy: bool) -> bool:
        """Do the next part of the work, between two steps; returns whether anything was done.

        busy: requests are under way, so after each part they get as long as it took.
        """
        self._served |= busy
        started = time.monotonic()
        if (started < self._rest_until and (busy or not self._served)) or (busy and self.engine.settled):
            return False  # what is tried out needs slots and pages, so it waits until nobody else does
        self._served = True
        done = next(self._parts, False)
        self._rest_until = 2 * time.monotonic() - started
        return done

    def _work(self) -> Iterator[bool]:
        """Make the graphs of a step in each part, settle the engine, and time steps and test the head.

        Yields whether anything was done. Else the processes call `wake` when there is.
        """
        while self.todo and not self.failed:
            ended = self.makers is None or self.makers.ended.is_set()
            step = next((step for step in self.todo if self.makers is None or step.name in self.makers.made), None)
            if step is None:
                if self.makers is not None and ended:  # without having made everything
                    self.failed = self.makers.last_words
                yield ended
                continue
            started = time.monotonic()
            try:
                made = make_graphs(self.engine, step, compiles=False)
            except Exception as error:
                logger.exception("%s cannot be loaded", step.name)
                self.failed = f"{type(error).__name__}: {error}"
                break
            if made:
                self.todo.remove(step)
                logger.info("compiled %d/%d: %s, %.1f s", self.total - len(self.todo), self.total, step.name,
                            time.monotonic() - started)  # fmt: skip
            elif self.makers is None:
                self._start_makers()
            else:  # a full disk, say
                self.failed = f"{step.name} was compiled, and is in no file"
            yield True
        self.stop()
        while self.makers is not None and not self.makers.ended.is_set():
            yield False  # until they are gone, times of steps are not those to come
        if self.failed:
            logger.error("%d of %d kinds of steps stay eager, since compiling failed: %s", len(self.todo), self.total,
                         self.failed)  # fmt: skip
        if self.makers is not None:
            torch.set_num_threads(self._threads)
        self.engine.settle()
        yield True
        for _ in self.llm.try_out():
            yield True

    def _start_makers(self) -> None:
        self.llm.move_weights()  # for these minutes, so that it need not wait for the last graph
        self.makers = self.llm.makers(len(self.todo), self._wake)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(max(1, self._threads // 2))  # or a stream would leave the processes no time at all
        logger.info("processes beside the server compile %d kinds of steps, which run eagerly until then",
                    len(self.todo))  # fmt: skip

    def stop(self) -> None:
        """End the processes, if there are any."""
        if self.makers is not None:
            self.makers.close()
