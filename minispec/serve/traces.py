"""A request's decoding, told to the client that asked to see it: the field `trace` of /generate.

An event of a stream tells of all tokens so far where each came from, as it gives all the text so far; but the steps are
many numbers, so each of them is told once, in the event that has its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minispec.request import Request, Trace

Piece = Callable[[int], str]  # the text of a token alone


class Telling:
    """What was told of one request."""

    def __init__(self, request: Request, piece: Piece) -> None:
        self.trace, self.piece = request.trace or Trace(), piece
        self.origins: list[int] = []
        self.told = 0  # steps

    def upto(self, count: int) -> dict[str, Any]:
        """Return the trace of the first `count` tokens, with the steps that were not told yet.

        The engine may be ahead of this event, so a step whose tokens are not among those waits for the next.
        """
        self.origins += [0] * (count - len(self.origins))
        steps = []
        for step in self.trace.steps[self.told :]:
            at, emitted = step["at"], step["emitted"]
            if at + len(emitted) > count:
                break
            for depth in range(1, len(step["accepted"])):
                self.origins[at + depth - 1] = depth
            steps.append({**step, "texts": list(map(self.piece, step["tokens"])),
                          "emitted_texts": list(map(self.piece, emitted))})  # fmt: skip
        self.told += len(steps)
        return {"origins": list(self.origins[:count]), "ends": self.trace.ends[:count], "steps": steps}
