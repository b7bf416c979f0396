"""The process of a rank other than 0: it loads its part of the model and does what rank 0 calls.

    python -m minispec.follower        started by rank 0's process, or by the first one of another machine

It is told on standard input which rank it is, and it ends when that ends, however its parent ended. Its first error is
one line, which its parent repeats as it ends all.

Read next: `parallel.py`; `llm.py`, whose `follow` puts the engine together.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from minispec.config import Config
from minispec.parallel import Ranks, end_all, gather, join, open_store, understood

logger = logging.getLogger("minispec")


def main() -> None:
    """Be the rank that standard input describes."""
    config, place = understood(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stdout)
    try:
        from minispec.llm import choose_device

        device = choose_device(config)
        _follow(config, join(place, open_store(place, config.dist_timeout), device, config.dist_timeout))
    except Exception as error:
        logger.debug("the rank ends", exc_info=True)
        end_all(_one_line(error))


def _end_with_parent() -> None:
    """Kill this process, and the compilers that it runs, when standard input ends."""
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def serve_machine(config: Config) -> None:
    """Be the first rank of a machine that does not serve, until machine 0 ends; the others here are started."""
    try:
        from minispec.llm import choose_device

        _follow(config, gather(config, choose_device(config)))
    except Exception as error:
        logger.debug("the rank ends", exc_info=True)
        end_all(_one_line(error))


def _follow(config: Config, ranks: Ranks) -> None:
    from minispec.llm import follow

    follow(config, ranks)


def _one_line(error: BaseException) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    says_all = text and isinstance(error, (ValueError, RuntimeError, OSError))
    return text if says_all else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
