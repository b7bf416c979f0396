"""What crosses between the door and a replica, as Ray pickles it: requests there, updates back.

A request crosses as it stands. One that comes from a replica that has died has output already, and goes on as if it had
just been retracted: its tokens are prefilled again, and `Output` walks them to find the state of text, stop rules and
held-back characters, of which the first `released` were handed out. Penalties, min_tokens and a grammar are made of
the tokens as well. So nothing is sent twice, and nothing but the tokens need be known.

Read next: `replica.py` and `workers.py`, the two ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minispec.acceptance import Verified
from minispec.request import Request, Update

# What the scheduler counts of a request. It crosses back, so that counts go on elsewhere.
COUNTS = ("cached_tokens", "undrafted", "retractions")

Values = dict[str, Any]


def packed(requests: Sequence[Request]) -> list[Request]:
    """Return copies to be pickled together, with the seeds of the door; a leader that is not among them is dropped."""
    copies = {
        request: replace(request, params=replace(request.params, sampling_seed=request.seed), compiled_grammar=None)
        for request in requests
    }
    for copy in copies.values():
        copy.leader = copy.leader and copies.get(copy.leader)
    return list(copies.values())


class Told:
    """How much of a request's progress the door knows, so that an update tells the rest."""

    def __init__(self, request: Request) -> None:
        self.request, self.ids, self.prompt = request, len(request.output_ids), len(request.prompt_scores)
        self.steps = 0 if request.trace is None else len(request.trace.steps)

    def update(self, update: Update) -> Values:
        """Return an update, and what it says of the request; the engine may be a step ahead of it."""
        request, first = self.request, self.ids
        self.ids += len(update.ids)
        values: Values = {
            "rid": request.rid, "ids": update.ids, "text": update.text, "finish": update.finish,
            "counts": [getattr(request, name) for name in COUNTS],
            "verified": Verified(*map(Counter, vars(request.verified).values())),  # sent while the engine counts on
        }  # fmt: skip
        if request.params.logprobs is not None:
            values["scores"] = request.output_scores[first : self.ids]
            values["prompt_scores"] = request.prompt_scores[self.prompt :]
            self.prompt += len(values["prompt_scores"])
        if request.trace is not None:
            steps = [s for s in request.trace.steps[self.steps :] if s["at"] + len(s["emitted"]) <= self.ids]
            values["trace"] = request.trace.ends[first : self.ids], steps
            self.steps += len(steps)
        return values


def taken(request: Request, values: Values) -> Update:
    """Take an update into the door's own request, as the scheduler would have; returns it for whoever waits for it."""
    request.output_ids += values["ids"]
    request.released += len(values["text"])
    for name, value in zip(COUNTS, values["counts"], strict=True):
        setattr(request, name, value)
    request.verified = values["verified"]
    request.output_scores += values.get("scores", ())
    request.prompt_scores += values.get("prompt_scores", ())
    if request.trace is not None:
        ends, steps = values["trace"]
        request.trace.ends += ends
        request.trace.steps += steps
    finish = values["finish"]
    if finish is not None:
        request.finish, request.finished_at = finish, time.monotonic()
    return Update(request, values["ids"], values["text"], finish)
