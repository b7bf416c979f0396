"""A step that does not end: /health says so after a timeout, and at twice the timeout the process ends.

Nothing in Python can interrupt a kernel that waits for ever, and a server that answers nobody looks alive from outside.
So at the timeout /health turns 503 and the stacks of all threads go to stderr; at twice the timeout every client gets
an error event, and the process ends with 1, so that its supervisor starts it again.

What hangs may hold the interpreter, and then no thread of Python runs. So the last resort needs none:
`faulthandler.dump_traceback_later` waits in a thread of C, dumps the stacks and ends the process. To set that timer
takes about 0.1 ms, so only the first step after a quarter of the timeout sets it, for a quarter longer. While
torch.compile compiles, which may take minutes, nothing is watched.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("minispec")

SLACK = 0.25  # of the timeout: for so long steps go on without setting the timer anew
LAST_WORDS = 10.0  # seconds for error events, once the end is near


class Watchdog:
    """Watches what runs within `with watchdog:` on one thread, which also calls `start` and `rest`."""

    def __init__(self, seconds: float, end: Callable[[], object] = lambda: None) -> None:
        """`seconds`: the timeout, 0 for none. `end` is called by another thread at twice that; see `LAST_WORDS`."""
        self.seconds, self._end = seconds, end
        self._began: float | None = None  # when what is watched now began
        self._set: float | None = None  # when the timer was set, None where it is not
        self._hears = False  # whether Dynamo, once it is imported, tells when it compiles
        self._paused = False  # whether something is compiled within what is watched

    def start(self) -> None:
        """Begin to watch: as soon as PyTorch is there, and nothing but requests to do."""
        if not self.seconds:
            return
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def __enter__(self) -> None:
        if not self.seconds:
            return
        if not self._hears and (callback := sys.modules.get("torch._dynamo.callback")) is not None:
            callback.on_compile_start(lambda *_: self._pause())
            callback.on_compile_end(lambda *_: self._go_on())
            self._hears = True
        now = time.monotonic()
        if self._set is None or now - self._set > SLACK * self.seconds:
            faulthandler.dump_traceback_later((2 + SLACK) * self.seconds, exit=True, file=sys.stderr)
            self._set = now
        self._began = now

    def __exit__(self, *error: object) -> None:
        self._began = None

    def rest(self) -> None:
        """Unset the timer, since nothing is watched for a while."""
        self._began = None
        if self._set is not None:
            faulthandler.cancel_dump_traceback_later()
            self._set = None

    @property
    def late(self) -> bool:
        """Whether what runs now has run for longer than the timeout; any thread may ask."""
        began = self._began
        return began is not None and time.monotonic() - began > self.seconds

    def _pause(self) -> None:
        self._paused = self._began is not None
        self.rest()

    def _go_on(self) -> None:
        if self._paused:
            self._paused = False
            self.__enter__()

    def _look(self) -> None:
        """Sleep until something may be late, say so once if it is, and end the process if it stays so."""
        said: float | None = None
        while True:
            began = self._began
            due = (began or time.monotonic()) + self.seconds * (1 if began is None or began != said else 2)
            if (wait := due - time.monotonic()) > 0:
                time.sleep(min(wait, self.seconds))
            elif began != said:
                said = began
                logger.critical("a step has taken longer than --watchdog-timeout %g; all stacks follow", self.seconds)
                faulthandler.dump_traceback(sys.stderr)
            else:
                faulthandler.dump_traceback_later(LAST_WORDS, exit=True, file=sys.stderr)
                logger.critical("it has not ended in twice that time, so the process ends")
                self._end()
                return
