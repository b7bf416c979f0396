"""What a server checks a request by before it hands the request on: limits, tokenizer, and what compiles grammars.

It needs no weights, so a process whose model is elsewhere checks requests as the scheduler does. Everything here is
constant: any thread may ask, and none waits for a step.

Read next: `front.py`, which makes one for each kind of process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from minispec.request import Limits, Request

if TYPE_CHECKING:
    from minispec.load.tokenizer import Tokenizer


class Intake(NamedTuple):
    """Checks requests against `limits`, and has ready what they ask for."""

    limits: Limits
    tokenizer: Tokenizer
    prepare: Callable[[Request], None]  # that of `Grammars`, or of an engine's `Asked`

    def validate(self, request: Request) -> None:
        """Do what `Scheduler.validate` does."""
        self.limits.check(request)
        self.prepare(request)
