"""The process of a rank other than 0: it loads its part of the model and does what rank 0 calls.

    python -m minispec.load.rank        started by rank 0's process, or by the first one of another machine

It is told on standard input which rank it is, and it ends when that ends, however its parent ended. Its first error is
one line, which its parent repeats as it ends all.

Read next: `load/ranks.py`; `load/build.py`, whose `follow` puts the engine together.
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
from typing import TYPE_CHECKING

from minispec.config import Config
from minispec.load.machine import end_with_parent

if TYPE_CHECKING:
    from minispec.load.ranks import RankPlace

logger = logging.getLogger("minispec")


def main() -> None:
    """Be the rank that standard input describes."""
    config, place = pickle.load(sys.stdin.buffer)
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stdout)
    from minispec.load.ranks import RankPlace  # torch takes seconds to import, and the parent may end meanwhile

    be_rank(config, RankPlace(*place))


def be_rank(config: Config, place: RankPlace | None = None) -> None:
    """Meet the others, follow rank 0 until it ends, and end the process with a line if there is an error.

    place: where to meet. Without it this is the first rank of a machine that does not serve, and it starts the others.
    """
    from minispec.load.build import choose_device, follow
    from minispec.load.ranks import end_all, gather, join, open_store

    try:
        device, timeout = choose_device(config), config.dist_timeout
        met = gather(config, device) if place is None else join(place, open_store(place, timeout), device, timeout)
        follow(config, met)
    except Exception as error:
        logger.debug("the rank ends", exc_info=True)
        text = " ".join(str(error).split())
        says_all = text and isinstance(error, (ValueError, RuntimeError, OSError))
        end_all(text if says_all else f"{type(error).__name__}: {text}")


if __name__ == "__main__":
    main()
