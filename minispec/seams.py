"""Interfaces for what only some requests or machines need: answers beyond tokens, and ranks.

Ranks are processes that share one model. `engine.py` calls `Asked` and `Link` and knows nothing of what implements
them. The classes here do nothing: they serve requests that ask for tokens alone, and a model in one process.
`asked/steps.py` and `ranks/link.py` derive from them, and `load/build.py` attaches the derived objects as
`Engine.asked` and `Engine.link`.

Read next: `engine.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from minispec.buffers import Chunk, DecodeBuffers, PrefillBuffers
from minispec.output import Output
from minispec.request import Request
from minispec.sampling import Needs
from minispec.tree import DraftTree
from minispec.verify import Verdict


class AskedStep(Protocol):
    """A step for requests that ask for more than tokens. It replaces the engine's own step, and holds the answers."""

    failed: dict[int, str]  # slots that can get no token -> why; known after the run
    timed: bool  # whether the step's time is typical of steps of its shape
    numbers: Sequence[int]  # what the other ranks must know to run the step

    def run(self, needs: Needs) -> None: ...  # runs the step, which is made of the engine's functions
    def to_host(self) -> None: ...  # queues the copy of the answers to the host

    def tell_prompt(self, row: int, request: Request) -> None: ...  # hands over the answers on the prompt of this chunk
    # Hands over the answers on the tokens `ids`, which the request of this row kept from the step. seconds: the step's
    # time. source: whose drafts the request verified.
    def tell(self, row: int, output: Output, ids: Sequence[int], seconds: float, source: str | None) -> None: ...


class Asked:
    """What the requests in an engine's slots ask of steps beyond tokens."""

    def prepare(self, request: Request) -> None:
        """Prepare what a request asks for, on any thread; this may take long. Raises RequestError if it fails."""

    def assign(self, request: Request, stop_ids: Iterable[int]) -> None:
        """Note what a request with a slot asks for."""

    def release(self, slot: int) -> None:
        """Forget a slot."""

    def slows(self, slots: Sequence[int]) -> bool:
        """Return whether a step over these slots is slower because of its answers."""
        return False

    def reads_text(self, slots: Sequence[int]) -> bool:
        """Return whether a step over these slots needs the last step's tokens on the host before its launch."""
        return False

    def decode(self, step: DecodeBuffers, slots: Sequence[int]) -> AskedStep | None:
        """Return the decode step that answers the requests in these slots; None if none asks."""

    def prefill(self, step: PrefillBuffers, chunks: Sequence[Chunk]) -> AskedStep | None:
        """Return the prefill step that answers the requests of these chunks; None if none asks."""


class Link:
    """What the ranks of one model tell each other, between steps and within them."""

    def tell(self, name: str, numbers: Sequence[int] = ()) -> None:
        """Have the other ranks make the call `name` with these numbers."""

    def all_have(self, own: bool) -> bool:
        """Return whether every rank has what this rank has if `own` is true."""
        return own

    def led(
        self, step: DecodeBuffers | PrefillBuffers, asked: AskedStep | None, captured: bool
    ) -> AbstractContextManager[object]:
        """Return a context in which this rank runs the step while the others run it too, captured as here or not."""
        return nullcontext()

    def begin(
        self, step: DecodeBuffers, lens: Tensor, root: Tensor, tree: DraftTree
    ) -> tuple[Tensor, Tensor, DraftTree]:
        """Return the same lens and root [B] and the same trees on all ranks, for the beginning of a decode step."""
        return lens, root, tree

    def share(self, step: PrefillBuffers) -> None:
        """Give all ranks the same inputs of a prefill step; the buffers are written in place."""

    def verdict(self, verdict: Verdict) -> Verdict:
        """Return the verdict that all ranks act on."""
        return verdict
