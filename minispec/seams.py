"""Where that attaches which only some requests or some machines need: what requests ask, and the ranks of one model.

`engine.py` calls these two and knows nothing of what is behind them. As they stand here they do nothing: no request
asks for more than tokens, and the model is in one process. `steps.py` and `link.py` derive from them, and whoever
puts an engine together sets its `asked` and `link`.

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
    """A step some of whose requests ask for more than tokens: it runs in place of the engine's own, and has answers."""

    failed: dict[int, str]  # slots that can get no token -> why; known when it has run
    timed: bool  # whether it takes no longer than a step must
    numbers: Sequence[int]  # what another process must know to run it

    def run(self, needs: Needs) -> None: ...  # from the engine's pieces
    def to_host(self) -> None: ...  # starts the copy of the answers

    # Give the request of this row or chunk the answers on its prompt, and on the tokens that it has kept of this step.
    def tell_prompt(self, row: int, request: Request) -> None: ...
    def tell(self, row: int, output: Output, ids: Sequence[int], seconds: float) -> None: ...


class Asked:
    """What the requests in an engine's slots ask of steps beyond tokens."""

    def prepare(self, request: Request) -> None:
        """Make ready what a request asks for, on any thread; may take long. Raises RequestError if it cannot be had."""

    def assign(self, request: Request, stop_ids: Iterable[int]) -> None:
        """Note what a request that has its slot asks for."""

    def release(self, slot: int) -> None:
        """Forget a slot."""

    def slows(self, slots: Sequence[int]) -> bool:
        """Return whether answers take time of a step over these slots."""
        return False

    def decode(self, step: DecodeBuffers, slots: Sequence[int]) -> AskedStep | None:
        """Return the decode step that answers the requests in these slots; None where nobody asks."""

    def prefill(self, step: PrefillBuffers, chunks: Sequence[Chunk]) -> AskedStep | None:
        """Return the prefill step that answers the requests of these chunks; None where nobody asks."""


class Link:
    """What the processes of one model tell each other, between steps and within."""

    def tell(self, name: str, numbers: Sequence[int] = ()) -> None:
        """Have the others do the same: what the name says, with these numbers."""

    def led(self, step: DecodeBuffers | PrefillBuffers, asked: AskedStep | None) -> AbstractContextManager[object]:
        """Have the others run this step while this one does, which it does within the context."""
        return nullcontext()

    def begin(
        self, step: DecodeBuffers, lens: Tensor, root: Tensor, tree: DraftTree
    ) -> tuple[Tensor, Tensor, DraftTree]:
        """Return what all begin a decode step with: lens and root [B] and the trees."""
        return lens, root, tree

    def share(self, step: PrefillBuffers) -> None:
        """Have all the same inputs of a prefill step, in place."""

    def verdict(self, verdict: Verdict) -> Verdict:
        """Return the verdict that all act on."""
        return verdict
