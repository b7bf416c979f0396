"""What a request gets beside its text, in SGLang's form: why it ended, what it cost, log-probabilities, and
the trace of its steps.

SGLang's endpoint /generate and `LLM.generate` return this as `meta_info`. This file does not import torch, since a
server answers before torch is imported.

Read next: `scores.py`, where log-probabilities come from; `serve/logprobs.py` for the forms of OpenAI and vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from minispec.request import ABORT_WANTED, Finish, Request, Scored, Trace


def finish_dict(finish: Finish, length: int) -> dict[str, Any]:
    """Return SGLang's finish_reason object; `length` is the number of tokens generated.

    An abort that somebody asked for has no status code, since it is no failure.
    """
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": length}
    status = None if finish.status == ABORT_WANTED else finish.status
    return {"type": "abort", "message": finish.message, "status_code": status, "err_type": None}


def meta_info(
    request: Request, completion_tokens: int, finish: Finish | None, nodes: int,
    spell: Callable[[int], str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return SGLang's meta_info; it has latency and the fields of speculation once the request is finished.

    `nodes` is N, the nodes of a tree, root included. `spell(id)` returns an id's text, for the log-probabilities.
    """
    info: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": None if finish is None else finish_dict(finish, completion_tokens),
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": completion_tokens,
        "cached_tokens": request.cached_tokens,
        "cached_tokens_details": {"device": request.cached_tokens, "host": 0},
        "weight_version": "default",
        "total_retractions": request.retractions,
    }
    if finish is not None:
        info["e2e_latency"] = (request.finished_at or time.monotonic()) - request.arrived
        info["response_sent_to_client_ts"] = time.time()
        info |= request.verified.meta_info() if request.verified.steps and nodes > 1 else {}
    return info | _logprob_lists(request, completion_tokens, spell)


def _logprob_lists(request: Request, count: int, spell: Callable[[int], str] | None) -> dict[str, Any]:
    """Return SGLang's lists of log-probabilities, for the first `count` output tokens; none if none was asked for.

    Items are [logprob, id, text]; text is null without `spell`. The prompt's items begin at logprob_start_len, and the
    logprob of the first item is null. An aborted request has items for those tokens only that were scored.
    """
    wish = request.params.logprobs
    if wish is None:
        return {}
    start = len(request.prompt_ids) - 1 if wish.start is None else wish.start
    parts: dict[str, tuple[list[int], list[Scored | None]]] = {
        "input": (request.prompt_ids[start:], [None, *request.prompt_scores]),
        "output": (request.output_ids[:count], list(request.output_scores[:count])),
    }

    def item(token: int, logprob: float | None) -> list[Any]:
        return [logprob, token, None if spell is None else spell(token)]

    found: dict[str, Any] = {}
    for name, (ids, scores) in parts.items():
        found[f"{name}_token_logprobs"] = [item(t, at and at.logprob) for t, at in zip(ids, scores, strict=False)]
        if wish.top:
            found[f"{name}_top_logprobs"] = [at and [item(*pair) for pair in at.top] for at in scores]
        if wish.ids:
            named = [at and [item(*pair) for pair in zip(wish.ids, at.ids, strict=True)] for at in scores]
            found[f"{name}_token_ids_logprobs"] = named
    return found


class Telling:
    """What was told of one request's steps, to the client that asked to see them: the field `trace` of /generate.

    An event of a stream tells of all tokens so far where each came from, as it gives all the text so far; but the steps
    are many numbers, so each of them is told once, in the event that has its tokens.
    """

    def __init__(self, request: Request, piece: Callable[[int], str]) -> None:
        """`piece` returns the text of a token alone."""
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
