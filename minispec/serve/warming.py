"""Compiling beside a server that serves already: processes make files (`load/makers.py`), the engine loads them.

On a CPU compiling takes minutes, and meanwhile the engine serves eagerly, at two thirds of the speed. Compiling in the
server's own process would stop it for ten seconds at a time, since a compiler in Python holds the interpreter. So the
engine thread loads what the processes have made between two steps of its own, in some tenths of a second. While all
that is asked for is in files, no process is started.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import torch

from minispec.compiled import NotMade
from minispec.llm import LLM
from minispec.load.files import is_empty
from minispec.load.makers import Makers
from minispec.load.warm_up import load_graphs, steps_of

logger = logging.getLogger("minispec")

PATIENCE = 2.0  # seconds after the start in which a first request is served before anything is loaded
PAUSE = 0.2  # seconds after which to look again for what the processes have made


class Warming:
    """Which steps of a serving engine have their graphs; `turn` makes the next one. Every method runs on its thread."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.scheduler.engine
        self.todo = steps_of(self.engine) if llm.compile_later else []
        self.total = len(self.todo)
        self.failed = False  # whether steps that lack graphs go on eagerly for good
        self._makers: Makers | None = None
        self._parts = self._work() if llm.compile_later else iter(())
        self._served, self._rest_until = False, time.monotonic() + (0 if is_empty() else PATIENCE)

    @property
    def state(self) -> str:
        """What /health says of it; any thread may ask."""
        done = self.total - len(self.todo)
        if not self.llm.compiled or (self.todo and not done and self._makers is None):
            return "eager"
        return f"{'incomplete' if self.failed else 'warming'} {done}/{self.total}" if self.todo else "compiled"

    @property
    def pause(self) -> float | None:
        """How many seconds an idle engine waits before the next turn, if the last one did nothing; None: for ever."""
        return PAUSE if self.todo and not self.failed else None

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

        Yields whether anything was done.
        """
        threads = torch.get_num_threads()
        try:
            for name in load_graphs(self.engine, self.todo, self._start_makers):
                if name:
                    logger.info("compiled %d/%d: %s", self.total - len(self.todo), self.total, name)
                yield bool(name)
        except Exception as error:
            self.failed = True
            logger.error("%d of %d kinds of steps stay eager, since compiling failed: %s", len(self.todo), self.total,
                         error, exc_info=not isinstance(error, NotMade))  # fmt: skip
        torch.set_num_threads(threads)
        self.engine.settle()
        yield True
        for _ in self.llm.try_out():
            yield True

    def _start_makers(self, steps: int) -> Makers:
        self.llm.move_weights()  # for these minutes, so that it need not wait for the last graph
        self._makers = self.llm.makers(steps)
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # or a stream would leave the processes no time
        logger.info("processes beside the server compile %d kinds of steps, which run eagerly until then", steps)
        return self._makers

    def stop(self) -> None:
        """End the processes, if there are any."""
        if self._makers is not None:
            self._makers.close()
