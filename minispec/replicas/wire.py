"""What crosses between the door and a replica: requests there, updates back, as numbers, strings, lists and dicts.

A request crosses as it stands. One that comes from a replica that has died has output already, and goes on as if it had
just been retracted: its tokens are prefilled again, and `Output` walks them to find the state of text, stop rules and
held-back characters, of which the first `released` were handed out. Penalties, min_tokens and a grammar are made of
the tokens as well. So nothing is sent twice, and nothing but the tokens need be known.

Read next: `replica.py` and `workers.py`, the two ends.
"""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any, cast

from minispec.request import Finish, Grammar, Logprobs, Request, SamplingParams, Scored, Trace, Update
from minispec.serve.message import OneCall

# What the scheduler counts of a request. It crosses both ways, so that counts go on elsewhere.
COUNTS = ("cached_tokens", "verify_steps", "drafted_tokens", "accepted_drafts", "accept_histogram", "undrafted",
          "last_step", "retractions")  # fmt: skip
PLAIN_FIELDS = ("rid", "prompt_ids", "salt", "max_new_tokens", "output_ids", "released", *COUNTS)
PARAMS = [f.name for f in fields(SamplingParams) if f.name not in ("logprobs", "grammar", "sampling_seed")]

Values = dict[str, Any]  # plain ones


# ---- to a replica ------------------------------------------------------------------------------------------------


def packed(request: Request) -> Values:
    """Return a request as it stands, with the seed that it was given at the door."""
    params, logprobs, grammar = request.params, request.params.logprobs, request.params.grammar
    return {
        **{name: getattr(request, name) for name in PLAIN_FIELDS},
        "params": {name: _plain(getattr(params, name)) for name in PARAMS} | {"sampling_seed": request.seed},
        "logprobs": None if logprobs is None else {"top": logprobs.top, "ids": logprobs.ids, "start": logprobs.start},
        "grammar": None if grammar is None else (grammar.kind, grammar.text, grammar.origin),
        "ends": None if request.ends is None else cast(OneCall, request.ends).packed(),
        "prediction": list(request.prediction),
        "leader": None if request.leader is None else request.leader.rid,
        "scores": [_of_score(scored) for scored in request.output_scores],
        "prompt_scores": [_of_score(scored) for scored in request.prompt_scores],
        "trace": None if request.trace is None else (request.trace.ends, request.trace.steps),
    }


def unpacked(values: Values, known: dict[str, Request]) -> Request:
    """Return the request; `known`: those among which its leader may be, by rid."""
    logprobs, grammar, trace = values["logprobs"], values["grammar"], values["trace"]
    params = SamplingParams(
        **values["params"],
        logprobs=None if logprobs is None else Logprobs(**logprobs),
        grammar=None if grammar is None else Grammar(*grammar),
    )
    request = Request(values["rid"], values["prompt_ids"], params)
    for name in PLAIN_FIELDS:
        setattr(request, name, values[name])
    request.ends = None if values["ends"] is None else OneCall.unpacked(values["ends"])
    request.prediction, request.leader = values["prediction"], known.get(values["leader"])
    request.output_scores = [Scored(*scored) for scored in values["scores"]]
    request.prompt_scores = [Scored(*scored) for scored in values["prompt_scores"]]
    request.trace = None if trace is None else Trace(*trace)
    return request


def _plain(value: Any) -> Any:
    """Return a value of a parameter without types of its own."""
    return dict(value) if hasattr(value, "items") else value


def _of_score(scored: Scored) -> tuple[Any, ...]:
    return tuple(scored)


# ---- and back ----------------------------------------------------------------------------------------------------


class Told:
    """How much of a request's progress the door knows, so that an update tells the rest."""

    def __init__(self, request: Request) -> None:
        self.request, self.ids, self.prompt = request, len(request.output_ids), len(request.prompt_scores)
        self.steps = 0 if request.trace is None else len(request.trace.steps)

    def update(self, update: Update) -> Values:
        """Return an update, and what it says of the request, as plain values; the engine may be a step ahead of it."""
        request, finish, first = self.request, update.finish, self.ids
        self.ids += len(update.ids)
        values: Values = {
            "rid": request.rid, "ids": update.ids, "text": update.text,
            "finish": None if finish is None else (finish.kind, finish.matched, finish.message, finish.status),
            "counts": [getattr(request, name) for name in COUNTS],
        }  # fmt: skip
        if request.params.logprobs is not None:
            values["scores"] = [_of_score(scored) for scored in request.output_scores[first : self.ids]]
            values["prompt_scores"] = [_of_score(scored) for scored in request.prompt_scores[self.prompt :]]
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
    request.output_scores += [Scored(*scored) for scored in values.get("scores", ())]
    request.prompt_scores += [Scored(*scored) for scored in values.get("prompt_scores", ())]
    if request.trace is not None:
        ends, steps = values["trace"]
        request.trace.ends += ends
        request.trace.steps += steps
    finish = None if values["finish"] is None else Finish(*values["finish"])
    if finish is not None:
        request.finish, request.finished_at = finish, time.monotonic()
    return Update(request, values["ids"], values["text"], finish)
