"""Answers: the scheduler's updates in, stream events or one JSON answer out. Pure functions, no sockets and no engine.

Read next: `streams.py`, which sends these bytes; `message.py` for what a chat's text is made into.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minispec.asked.answers import Telling, meta_info
from minispec.replies.formats import PLAIN_FORMATS, Formats
from minispec.request import ABORT_WANTED, Finish, Request, RequestError, Update
from minispec.serve import logprobs
from minispec.serve.message import Change, Message
from minispec.serve.parse import Job, dump

if TYPE_CHECKING:
    from minispec.load.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(error: RequestError) -> dict[str, Any]:
    """Return OpenAI's error object, the body of every failure."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message[:2000], "type": kind, "param": error.param, "code": error.code}}


def sse(event: Any) -> bytes:
    """Return one server-sent event, named by its type if it has one."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return name.encode() + b"data: " + dump(event) + b"\n\n"


@dataclass(frozen=True)
class Served:
    """What answers tell of the server."""

    model: str
    tokenizer: Tokenizer  # that spells tokens
    fingerprint: str | None = None  # of all that decides which tokens come out
    nodes: int = 1  # N, nodes of a draft tree
    stream_interval: int = 1  # tokens between two events, where the request does not say
    cache_report: bool = False
    formats: Formats = PLAIN_FORMATS
    seed: int | None = None  # of a request without one; None: it is drawn


class Reply:
    """The answer to one job while it grows: `take` every update, send what it returns, or ask `result` at the end.

    Deltas are pieces of the same text that `result` holds, so concatenated they are equal to it.
    """

    end = DONE  # of a stream

    def __init__(self, job: Job, requests: Sequence[Request], served: Served) -> None:
        self.job, self.requests, self.served = job, list(requests), served
        self.intervals = [own or served.stream_interval for own in job.intervals]
        count = len(self.requests)
        self.created = int(time.time())
        self.id = job.rids[0] if count == 1 else job.rids[0].removesuffix("-0")
        self.spelling = logprobs.Spelling(served.tokenizer, job.report.as_ids)
        self.texts: list[str] = [self._echoed(i) for i in range(count)]
        self.lists: dict[int, logprobs.CompletionLists] = {}  # of a completion's choices
        self.messages = [Message(job.wish, served.formats, r.thinking) for r in self.requests]  # of a conversation
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.finishes: list[Finish | None] = [None] * count
        self.sent = [(0, 0)] * count  # characters and tokens already in events
        self.traces = [Telling(request, self.spelling.text) for request in self.requests]
        self._index = {id(request): i for i, request in enumerate(self.requests)}

    def opening(self) -> list[dict[str, Any]]:
        """Return the events that open a stream: the assistant's role, in a chat."""
        if not self.job.talks:
            return []
        role = {"delta": {"role": "assistant", "content": ""}}
        first, *others = (self._chunk(i, role, None) for i in range(len(self.requests)))
        return [{**first, **self._prompt_ids(0)}, *others]

    @property
    def done(self) -> bool:
        return all(finish is not None for finish in self.finishes)

    def take(self, update: Update) -> list[dict[str, Any]]:
        """Add one update and return the events to send now, if streaming; RequestError if the request has failed.

        An abort that was asked for ends a native prompt with the text so far, and its siblings go on, as in SGLang.
        OpenAI's schema has no finish_reason for it, so there it is a RequestError too.
        """
        i = self._index[id(update.request)]
        finish = update.finish
        if finish is not None and finish.kind == "abort":
            if finish.status != ABORT_WANTED or self.job.dialect != "generate":
                raise RequestError(finish.message, None, finish.status, finish.code)
        self.texts[i] += update.text
        self.ids[i] += update.ids
        self.finishes[i] = finish
        if self.job.talks:
            self.messages[i].feed(update.text)
            if finish is not None:
                self.messages[i].finish(finish.kind == "length")
        if not self.job.stream or (finish is None and len(self.ids[i]) - self.sent[i][1] < self.intervals[i]):
            return []
        return self._events(i)

    def closing(self) -> list[dict[str, Any]]:
        """Return the events that close a stream: what speculation gave and the usage, where asked for."""
        details, unsaid = self._spec_details(), {"usage": None} if self.job.stream_options.include_usage else {}
        last = [{**details, **unsaid}] if details else []
        last += [{"usage": self.usage()}] if self.job.stream_options.include_usage else []
        return [{**self._head(stream=True), "choices": [], **part} for part in last]

    def failure(self, error: RequestError) -> list[dict[str, Any]]:
        """Return the events of a stream that ends with an error."""
        return [error_body(error)]

    def result(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the whole answer, once done."""
        count = range(len(self.requests))
        if self.job.dialect == "generate":
            items = [self._native(i) for i in count]
            return items if self.job.batched else items[0]
        is_chat, choices = self.job.talks, []
        for i in count:
            body = {"message": self.messages[i].whole()} if is_chat else {"text": self.texts[i], **self._prompt_ids(i)}
            choices.append(self._choice(i, {**body, **self._new(i)}, self.finishes[i]))
        prompt = self._prompt_ids(0) if is_chat else {}
        return {**self._head(stream=False), "choices": choices, "usage": self.usage(), **prompt,
                **self._spec_details()}  # fmt: skip

    def _spec_details(self) -> dict[str, Any]:
        """Return SGLang's field of what speculation gave, a list for several choices, if it was asked for."""
        if not self.job.spec_details or self.served.nodes == 1:
            return {}
        each = [request.verified.details() for request in self.requests]
        return {"sglext": {"spec_tokens_details": each if len(each) > 1 else each[0]}}

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object over all choices so far; a prompt counts once, as its first choice found it."""
        asked = self.requests[:: self.job.n]
        prompt, output = sum(len(r.prompt_ids) for r in asked), sum(map(len, self.ids))
        cached = sum(r.cached_tokens for r in asked)
        details = {"cached_tokens": cached} if self.served.cache_report and cached else None
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
                 "prompt_tokens_details": details}  # fmt: skip
        if self.job.prediction is not None:
            counts: Counter[str] = Counter()
            for request in self.requests:
                counts.update(request.verified.usage())
            usage["completion_tokens_details"] = dict(counts)
        return usage

    def _events(self, i: int) -> list[dict[str, Any]]:
        """Return the events that bring choice i up to date."""
        finish, spoken = self.finishes[i], len(self.ids[i])
        if self.job.talks and finish is not None and isinstance(finish.matched, int):
            spoken -= not self.job.params[i].no_stop_trim  # what ends a text is no part of it: it goes with the reason
        new_text, new_ids = self.texts[i][self.sent[i][0] :], self._new(i, spoken)
        first, self.sent[i] = self.sent[i] == (0, 0), (len(self.texts[i]), spoken)
        if self.job.dialect == "generate":
            return [{**self._native(i), **({"index": i} if self.job.batched else {})}]
        if self.job.dialect == "completion":
            body = {"text": new_text, **new_ids, **(self._prompt_ids(i) if first else {})}
            return [self._chunk(i, body, finish)] if new_text or new_ids or finish else []
        delta = self.messages[i].delta()
        events = [self._chunk(i, {"delta": delta or {"content": ""}, **new_ids}, None)] if delta or new_ids else []
        return [*events, self._chunk(i, {"delta": {}, **self._new(i)}, finish)] if finish else events

    def _native(self, i: int) -> dict[str, Any]:
        ids = self.ids[i]
        spell = self.spelling.text if self.job.report.texts else None
        info = meta_info(self.requests[i], len(ids), self.finishes[i], self.served.nodes, spell)
        info["id"] = self.job.rids[i]
        trace = {"trace": self.traces[i].upto(len(ids))} if self.job.trace else {}
        return {"text": self.texts[i], "output_ids": list(ids), "meta_info": info, **trace}

    def _head(self, stream: bool) -> dict[str, Any]:
        kind = "text_completion" if self.job.dialect == "completion" else "chat.completion" + ".chunk" * stream
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.model,
                "system_fingerprint": self.served.fingerprint}  # fmt: skip

    def _choice(self, i: int, body: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
        reason: str | None = finish.kind if finish else None
        if reason == "stop" and self.job.talks and self.messages[i].called:
            reason = "tool_calls"
        return {"index": i, "logprobs": None, **body, "finish_reason": reason,
                "matched_stop": finish and finish.matched}  # fmt: skip

    def _chunk(self, i: int, body: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
        chunk = {**self._head(stream=True), "choices": [self._choice(i, body, finish)]}
        if self.job.stream_options.continuous_usage_stats:
            chunk["usage"] = self.usage()
        elif self.job.stream_options.include_usage:
            chunk["usage"] = None
        return chunk

    def _prompt_ids(self, i: int) -> dict[str, list[int]]:
        """Return the field with the prompt's ids, if it was asked for."""
        return {"prompt_token_ids": self.requests[i].prompt_ids} if self.job.return_ids else {}

    def _new(self, i: int, end: int | None = None) -> dict[str, Any]:
        """Return ids and logprobs up to `end` that are in no event yet, where asked for; those of events add up."""
        first, end = self.sent[i][1], len(self.ids[i]) if end is None else end
        if first == end and self.job.stream and self.job.talks:
            return {}
        found: dict[str, Any] = {"token_ids": self.ids[i][first:end]} if self.job.return_ids else {}
        report, request, begins = self.job.report, self.requests[i], self.sent[i] == (0, 0)
        if report.prompt is not None and begins:
            found["prompt_logprobs"] = logprobs.prompt_logprobs(request, report.prompt, self.spelling)
        if report.top is None:
            return found
        if self.job.talks:
            new = (request.output_ids[first:end], request.output_scores[first:end])
            content = logprobs.chat_entries(*new, report.top, self.spelling)
            return {**found, "logprobs": {"content": content, "refusal": None}} if content else found
        if i not in self.lists:
            spoken = len(self._echoed(i))
            self.lists[i] = logprobs.CompletionLists(self.served.tokenizer, self.spelling, request, report.top, spoken)
        lists = self.lists[i].output(first, end)
        if begins and report.echo:
            lists = {name: part + lists[name] for name, part in self.lists[i].prompt().items()}
        return {**found, "logprobs": lists} if lists["tokens"] else found

    def _echoed(self, i: int) -> str:
        """Return the prompt as text, if the text is to begin with it."""
        if not self.job.report.echo:
            return ""
        prompt = self.job.prompts[i]
        if isinstance(prompt, str) and self.job.truncate is None:
            return prompt
        return self.served.tokenizer.decode(self.requests[i].prompt_ids, self.job.params[i].skip_special_tokens)


class EventReply(Reply):
    """An answer whose stream tells of the blocks of one message, in typed events; the last has a type of its own."""

    end = b""

    def __init__(self, job: Job, requests: Sequence[Request], served: Served) -> None:
        super().__init__(job, requests, served)
        self.message = self.messages[0]
        self.count = 0  # events

    def told(self, change: Change) -> list[dict[str, Any]]:
        """Return the events about a change of a block."""
        raise NotImplementedError

    def _events(self, i: int) -> list[dict[str, Any]]:
        self.sent[i] = (len(self.texts[i]), len(self.ids[i]))
        return [event for change in self.message.changes() for event in self.told(change)]
