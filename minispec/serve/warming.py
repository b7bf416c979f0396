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
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minispec.buffers import DecodeBuffers, PrefillBuffers
    from minispec.llm import LLM
    from minispec.load.makers import Makers

logger = logging.getLogger("minispec")

PATIENCE = 2.0  # seconds after the start in which a first request is served before anything is loaded


class Warming:
    """Which steps of a serving engine have their graphs; `turn` makes the next one. Every method runs on its thread."""

    def __init__(self, llm: LLM, wake: Callable[[], None]) -> None:
        """`wake` makes the engine thread call `turn` soon, and may be called from any thread."""
        from minispec.load.files import is_empty  # here, since the server listens before torch is imported
        from minispec.load.warm_up import steps_of

        self.llm, self.engine, self._wake = llm, llm.scheduler.engine, wake
        self.todo = steps_of(self.engine) if llm.compile_later else []
        self.total = len(self.todo)
        self.makers: Makers | None = None
        self.failed = ""  # why steps go on eagerly for good
        self._trial = llm.try_out() if llm.compile_later else iter(())  # times steps and tests the head, in parts
        self._served, self._rest_until = False, time.monotonic() + PATIENCE
        self._threads = 0  # that torch used before the processes were started
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
        """Make the graphs of at most one step, between two steps; returns whether anything was done.

        busy: requests are under way, so after each step they get as long as it took.
        """
        if self.engine.settled:  # what is tried out needs slots and pages, so it waits until nobody else does
            return not busy and next(self._trial, self) is not self
        self._served |= busy
        if not self.todo or self.failed:
            return self._end()
        if time.monotonic() < self._rest_until and (busy or not self._served):
            return False
        self._served = True
        made = self.todo if self.makers is None else [step for step in self.todo if step.name in self.makers.made]
        if not made:
            if self.makers is not None and self.makers.ended:  # without having made everything
                self.failed = self.makers.last_words
            return bool(self.failed)  # which ends it in the next turn
        started = time.monotonic()
        self._make(made[0], started)
        self._rest_until = 2 * time.monotonic() - started
        return True

    def _make(self, step: DecodeBuffers | PrefillBuffers, started: float) -> None:
        """Make a step's graphs, from files."""
        from minispec.load.warm_up import make_graphs

        try:
            made = make_graphs(self.engine, step, compiles=False)
        except Exception as error:
            logger.exception("%s cannot be loaded", step.name)
            self.failed = f"{type(error).__name__}: {error}"
            return
        if made:
            self.todo.remove(step)
            logger.info("compiled %d/%d: %s, %.1f s", self.total - len(self.todo), self.total, step.name,
                        time.monotonic() - started)  # fmt: skip
        elif self.makers is None:
            self._start_makers()
        else:  # a full disk, say
            self.failed = f"{step.name} was compiled, and is in no file"

    def _start_makers(self) -> None:
        import torch

        self.llm.move_weights()  # for these minutes, so that it need not wait for the last graph
        self.makers = self.llm.makers(len(self.todo), self._wake)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(max(1, self._threads // 2))  # or a stream would leave the processes no time at all
        logger.info("processes beside the server compile %d kinds of steps, which run eagerly until then",
                    len(self.todo))  # fmt: skip

    def _end(self) -> bool:
        """Settle the engine, as soon as the processes are gone: until then times of steps are not those to come."""
        import torch

        self.stop()
        if self.makers is not None and not self.makers.ended:
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
        if self.makers is not None:
            self.makers.close()
