"""The end of a server, in three parts: nothing new, what runs may finish, and what is left is told.

After the first signal the listener stays, so that a load balancer sees a 503 that says why and not a refused
connection. What was accepted before goes on for at most --shutdown-timeout seconds. A second signal ends that wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Sized

from minispec.request import RequestError

logger = logging.getLogger("minispec")

LOOK = 0.02  # seconds between two looks at whether all is done


class Signals:
    """Ctrl-C and SIGTERM: the first asks for an end, the second for an end at once."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.came)

    def came(self) -> None:
        """Take note of a signal."""
        (self.second if self.first.is_set() else self.first).set()


def shutting_down() -> RequestError:
    """Return what new work is answered, and what is left in the end."""
    return RequestError("the server is shutting down", None, 503, "shutting_down")


async def drained(under_way: Sized, seconds: float, at_once: asyncio.Event) -> bool:
    """Wait until nothing is under way; False where time runs out before, or `at_once` is set."""
    end = time.monotonic() + seconds
    logger.info("shutting down: %d requests under way have %g seconds to finish", len(under_way), seconds)
    while under_way and not at_once.is_set() and time.monotonic() < end:
        await asyncio.sleep(LOOK)
    return not under_way
