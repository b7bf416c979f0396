"""A server of one rank or several that notes, while somebody looks, how much of its steps goes into collectives.

    python -m benchmarks.watched FOLDER server FLAGS...      in place of python -m minispec.server
    python -m benchmarks.watched FOLDER follower             what it starts in place of minispec.follower

While there is a file named `look` in FOLDER, every step runs under PyTorch's profiler, and every rank keeps its notes
there in rank-N.json: the seconds of its steps, and of each the seconds in collectives. These are the operators of
`minispec/shards.py`, in compiled code too; to wait in one for a rank that is behind counts as well. On CUDA they are of
the host alone, which waits for nothing, so only the steps' seconds say something there.

Read next: `scaling.py`, which starts these servers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LOOK = "look"
COLLECTIVES = ("_c10d_functional::", "c10d::", "c10d_functional::")


def watched(run: Callable[..., bool], folder: Path, rank: Callable[[Any], int]) -> Callable[..., bool]:
    """Return `Engine._run`, which notes what a step takes while somebody looks; `rank` tells whose engine it is."""
    asked, notes = folder / LOOK, {"steps": [], "collectives": []}

    def noted(self: Any, *given: Any) -> bool:
        if not asked.exists():
            return run(self, *given)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
            began = time.perf_counter()
            captured = run(self, *given)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            notes["steps"].append(time.perf_counter() - began)
        events = [event for event in seen.key_averages() if event.key.startswith(COLLECTIVES)]
        notes["collectives"].append(sum(event.self_cpu_time_total for event in events) / 1e6)
        part = folder / f"rank-{rank(self)}.part"
        part.write_text(json.dumps(notes))
        part.replace(part.with_suffix(".json"))
        return captured

    return noted


def main() -> None:
    """Be the server, or a rank that it has started."""
    folder, kind, *flags = sys.argv[1:]
    from minispec import follower, parallel, server
    from minispec.engine import Engine

    parallel.Child.COMMAND = (sys.executable, "-m", "benchmarks.watched", folder, "follower")
    rank = lambda engine: getattr(getattr(engine, "ranks", None), "rank", 0)  # noqa: E731  an engine alone is rank 0
    Engine._run = watched(Engine._run, Path(folder), rank)  # the leader's own calls it when it has sent the call
    if kind == "follower":
        follower.main()
        os._exit(0)
    server.main(flags)


if __name__ == "__main__":
    main()
