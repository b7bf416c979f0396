"""What some requests ask of a step beyond its tokens: the masks of a grammar, log-probabilities, a trace.

A step over such a request runs here. It has the same pieces as `Engine.decode` or `Engine.prefill_step`, in the same
order. So the engine's own steps have no branch for any of this, and steps without such requests pay nothing for it. A
grammar changes the step: between the forward pass and the verdict it removes drafts and masks logits, and for this the
trees must be on the host. Log-probabilities and traces only watch. The steps of this file run uncaptured, since their
work depends on what is asked, but they use the compiled blocks.

Answers travel with the step (`Pending.asked`), since its buffers may be refilled before the step is collected.

Read next: `grammar.py`, `scores.py`, `trace.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from minispec.asked.grammar import Constraints, Grammars, mask
from minispec.asked.scores import Question, Questions, Scores, score_known, score_picks
from minispec.asked.trace import SeenStep, look
from minispec.buffers import Chunk, DecodeBuffers, PrefillBuffers
from minispec.engine import Engine
from minispec.kv import upload
from minispec.output import Output
from minispec.request import Logprobs, Request, Scored
from minispec.sampling import Needs
from minispec.seams import Asked, AskedStep
from minispec.tree import PADDING
from minispec.verify import Trees

Step = TypeVar("Step", bound=DecodeBuffers | PrefillBuffers)
Crossed = list[list[list[int]]]  # tensors of a step on the host, as lists


class Allowed(NamedTuple):
    """What grammars allow in a step."""

    tokens: Tensor  # [B, N] tokens of the trees, with padding in place of forbidden drafts
    logits: Tensor  # the logits given, with -inf where a token is forbidden
    failed: dict[int, str]  # slots for which no token is allowed -> why


class Asking(Asked):
    """What the requests in an engine's slots ask for."""

    def __init__(self, engine: Engine, grammars: Grammars | None = None) -> None:
        """`grammars`: None on a rank other than 0, where no request arrives."""
        self.engine, self.grammars = engine, grammars
        self.constraints = Constraints()
        self.requests: dict[int, Request] = {}  # those that ask for more than tokens, by slot

    def prepare(self, request: Request) -> None:
        if self.grammars is not None:
            self.grammars.prepare(request)

    def assign(self, request: Request, stop_ids: Iterable[int]) -> None:
        """Note what a request with a slot asks for."""
        params = request.params
        if params.logprobs is not None or params.grammar is not None or request.trace is not None:
            self.requests[request.slot] = request
            self.constraints.assign(request.slot, request, stop_ids)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self.requests.pop(slot, None)
        self.constraints.release(slot)

    def slows(self, slots: Sequence[int]) -> bool:
        """Return whether masks or log-probabilities slow a step over these slots."""
        asking = [self.requests[slot].params for slot in slots if slot in self.requests]
        return any(params.logprobs is not None or params.grammar is not None for params in asking)

    def reads_text(self, slots: Sequence[int]) -> bool:
        """Return whether one of these slots has a grammar, whose masks depend on all earlier tokens."""
        return any(self.requests[slot].params.grammar is not None for slot in slots if slot in self.requests)

    def decode(self, step: DecodeBuffers, slots: Sequence[int]) -> AskedStep | None:
        """Return the decode step that answers the requests in these slots; None if none asks."""
        asking = {row: self.requests[slot] for row, slot in enumerate(slots) if slot in self.requests}
        questions = [Question(row, r.params.logprobs) for row, r in asking.items() if r.params.logprobs is not None]
        return AskedDecode(self, step, asking, questions) if asking else None

    def prefill(self, step: PrefillBuffers, chunks: Sequence[Chunk]) -> AskedStep | None:
        """Return the prefill step that answers the requests of these chunks; None if none asks."""
        asking, questions, first = {}, [], 0
        for row, chunk in enumerate(chunks):
            request, end = self.requests.get(chunk.slot), chunk.start + len(chunk.tokens)
            if request is not None:
                unscored = request.unscored
                known = range(max(chunk.start, unscored.start), min(end, unscored.stop))
                if known or chunk.last:
                    asking[row] = request
                if (wish := request.params.logprobs) is not None and row in asking:
                    shift = first - chunk.start  # from a row of the text to a row of the step
                    rows = range(known.start + shift, known.stop + shift)
                    questions.append(Question(row, wish, chunk.last, rows))
            first += self.engine.prefills.blocks_of(len(chunk.tokens)) * step.width
        return AskedPrefill(self, step, asking, questions) if asking else None

    def constrain(self, logits: Tensor, trees: Callable[[], Crossed]) -> Allowed:
        """Return what grammars allow of trees; `trees` returns slots, tokens and parents, or slots alone.

        logits: [B, N, V], or [B, V] if `trees` returns slots alone.
        """
        slots, *tree = trees()
        tokens, parents = tree or ([[PADDING]] * len(slots), [[-1]] * len(slots))
        masks = self.constraints.masks([slot for (slot,) in slots], tokens, parents, pinned=logits.is_cuda)
        bits = masks.bits.to(logits.device, non_blocking=logits.is_cuda)
        return Allowed(upload(masks.tokens, torch.int64, logits.device), mask(logits, bits), masks.failed)

    def follow(self, step: PrefillBuffers, numbers: Sequence[int]) -> AskedStep:
        """Return a prefill step that runs the LM head for the same rows as rank 0's step, whose `numbers` are given."""
        picks, *known = numbers
        nothing = Logprobs()
        questions = [Question(0, nothing)] * picks
        questions += [Question(0, nothing, False, range(row, row + 1)) for row in known]
        return AskedPrefill(self, step, {}, questions)


class Answered(AskedStep, Generic[Step]):
    """The common part of both kinds of step."""

    def __init__(self, asking: Asking, step: Step, who: dict[int, Request], questions: Sequence[Question]) -> None:
        """`who`: the requests that ask, by row or chunk."""
        self.asking, self.engine, self.step, self.failed = asking, asking.engine, step, {}
        self.masked = any(request.params.grammar is not None for request in who.values())
        self.questions = Questions(questions, step.slots.device) if questions else None
        self.timed = all(request.trace is None for request in who.values())  # watching takes extra time
        self.numbers = self.questions.numbers if self.questions else []
        self.scores: Scores | None = None
        self.seen: SeenStep | None = None

    def to_host(self) -> None:
        """Start the copies to the host."""
        self.scores = None if self.scores is None else self.scores.to_host()
        self.seen = None if self.seen is None else self.seen.to_host()

    @cached_property
    def told(self) -> dict[int, tuple[list[Scored], list[Scored]]]:
        """The scores of known tokens and of picks, by row or chunk; the step's copies must be complete."""
        return {} if self.scores is None else self.scores.read(self.step.most)

    def tell_prompt(self, row: int, request: Request) -> None:
        if row in self.told:
            request.prompt_scores += self.told[row][0]

    def tell(self, row: int, output: Output, ids: Sequence[int], seconds: float, source: str | None) -> None:
        """Give a request its answers on the tokens `ids` that it kept of this step; source: that of `metrics.Kept`."""
        request = output.request
        if row in self.told:
            request.output_scores += self.told[row][1][: len(ids)]
        if request.trace is not None:
            request.trace.ends += output.ends[len(request.trace.ends) :]
            if self.seen is not None:
                at = len(request.output_ids) - len(ids)
                step = self.seen.step(row, list(ids))
                request.trace.steps.append({"at": at, "seconds": round(seconds, 6), "source": source, **step})

    def allow(self, logits: Tensor, trees: Callable[[], Crossed]) -> tuple[Tensor, Tensor]:
        """Return the tokens [B, N] of trees without the drafts that grammars forbid, and masked logits."""
        allowed = self.asking.constrain(logits, trees)
        self.failed |= allowed.failed
        return allowed.tokens, allowed.logits


class AskedDecode(Answered[DecodeBuffers]):
    """`Engine.decode` for requests that ask."""

    def run(self, needs: Needs) -> None:
        """Run the step, and keep the answers here."""
        engine, step = self.engine, self.step
        watched = None if self.timed else torch.full((step.batch, step.nodes), torch.nan, device=engine.device)
        lens, root, drafted = engine.begin(step, needs, watched)
        before, _ = engine.parts_of(step, needs)
        tree, above, embedding, rope = before(engine, step, lens, root, drafted)
        crossing = to_host(step.slots[:, None], *tree) if self.masked else None
        streams = engine.model.run_blocks(embedding, rope, step.attend, engine.drafter.taps)
        logits, features = engine.logits(streams)
        tokens, allowed = (tree.tokens, logits) if crossing is None else self.allow(logits, crossing)
        trees = Trees(tree._replace(tokens=tokens), above, step.slots, lens, step.most)
        verdict = engine.judge(trees, allowed, needs)
        if watched is not None:
            noise = engine.sampling.noise(step.slots) if "temperature" in needs else None
            self.seen = look(trees.tree, watched, logits, verdict, noise, lens)
        path = engine.keep(step, trees, verdict, features, needs)
        if self.questions is not None:
            self.scores = score_picks(self.questions, logits, verdict.path, verdict.emitted)
        engine.hand_over(step, path)


class AskedPrefill(Answered[PrefillBuffers]):
    """`Engine.prefill_step` for requests that ask."""

    def run(self, needs: Needs) -> None:
        """Run the step, and keep the answers here."""
        engine, step = self.engine, self.step
        # Only a last chunk is followed by a pick. Slot 0, which has no grammar, replaces the slots of other chunks.
        ends = to_host((step.chunk_slots * step.picked)[:, None]) if self.masked else None
        read = engine.read(step)
        logits = engine.model.logits(read.hidden.index_select(0, step.ends))
        allowed = logits if ends is None else self.allow(logits, ends)[1]
        token = engine.pick(step, allowed, needs)
        if self.questions is not None:
            rows = (read.hidden, step.following)
            self.scores = score_known(self.questions, (logits, token), rows, engine.model.logits)
        engine.keep_prefill(step, read, token, allowed, needs)


def to_host(*parts: Tensor) -> Callable[[], Crossed]:
    """Start a copy of `[B, ..] int64` tensors to the host; return a function that waits and returns them as lists.

    The device runs what is launched after this call while the host waits and works on the lists.
    """
    packed = torch.cat(parts, dim=1)
    on_host, ready = packed.to("cpu", non_blocking=packed.is_cuda), None
    if packed.is_cuda:
        ready = torch.cuda.Event()
        ready.record()

    def arrived() -> Crossed:
        if ready is not None:
            ready.synchronize()
        return [part.tolist() for part in on_host.split([part.shape[1] for part in parts], dim=1)]

    return arrived
