"""OpenAI's /v1/responses: its body becomes that of a chat, and the chat's message becomes items and typed events.

Nothing is kept: every request has the whole conversation, with what the model said and called as items. An item is a
message, a call of a function, or reasoning. Items follow each other: one ends where the next begins.

Read next: `message.py`, which takes the text apart; `reply.py` for what all answers have.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from minispec.request import Request, RequestError, short
from minispec.serve import fields
from minispec.serve.message import Formats, Message, Wish
from minispec.serve.parse import Job, parse_chat, read_object, text_of
from minispec.serve.reply import Reply, Served, error_body
from minispec.serve.tools import Piece

# What a chat calls a thing -> what a response calls it. In order: the longer one first.
_NAMES = {"response_format.json_schema.schema": "text.format.schema", "response_format": "text.format",
          "max_completion_tokens": "max_output_tokens", "messages": "input"}  # fmt: skip
_QUOTED_OR_NAME = re.compile(r"""(?<!\w)'[^']*'|"[^"]*"|""" + "|".join(map(re.escape, _NAMES)))
_SHARED = fields.acting(fields.Responses).keys() & fields.acting(fields.Chat).keys()  # mean the same in both


def parse_response(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Job:
    """Return the job of a /v1/responses body; `defaults` are the sampling values of the model, if used."""
    asked = fields.read(fields.Responses, body)
    tools, choice = _tools(asked)
    chat = {name: body[name] for name in _SHARED & body.keys()} | {
        "messages": _messages(asked), "tools": tools, "tool_choice": choice, "response_format": _format(asked),
        "max_completion_tokens": asked.max_output_tokens,
        "reasoning_effort": asked.reasoning.effort if asked.reasoning else None,
        "rid": f"resp_{uuid.uuid4().hex}" if asked.rid is None else asked.rid,
    }  # fmt: skip
    try:
        job = parse_chat(chat, defaults)
    except RequestError as error:
        raise RequestError(_renamed(error.message), _renamed(error.param or "") or None, code=error.code) from None
    (params,) = job.params
    if params.grammar is not None:
        params = replace(params, grammar=replace(params.grammar, origin=_renamed(params.grammar.origin)))
    names = {name: _NAMES.get(given, given) for name, given in job.names.items()} | {"messages": "input"}
    return replace(job, params=[params], names=names, response=_repeated(asked, job))


def _renamed(text: str) -> str:
    """Return an error's text with a response's names for a chat's fields, but with its quoted values as they were."""
    return _QUOTED_OR_NAME.sub(lambda found: _NAMES.get(found[0], found[0]), text)


def _repeated(asked: fields.Responses, job: Job) -> dict[str, Any]:
    """Return what the answer repeats of its request, and what is always so."""
    form, effort = asked.text.format if asked.text else None, asked.reasoning.effort if asked.reasoning else None
    choice, shown = asked.tool_choice or "auto", {tool["function"]["name"] for tool in job.wish.tools}
    return {
        "background": False, "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None, "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False, "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default", "store": False, "temperature": job.params[0].temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in asked.tools or [] if tool.name in shown],
        "top_logprobs": 0, "top_p": job.params[0].top_p, "truncation": "disabled",
    }  # fmt: skip


# ---- the parts of a body ---------------------------------------------------------------------------------------------


def _messages(asked: fields.Responses) -> list[dict[str, Any]]:
    """Return instructions and input as a chat's messages: what the model made in one turn becomes one message."""
    turns: list[dict[str, Any]] = []
    if asked.instructions is not None:
        turns.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*turns, {"role": "user", "content": asked.input}]
    thought = ""  # waits for the message that it led to
    for i, item in enumerate(asked.input):
        if isinstance(item, fields.ReasoningItem):
            thought = text_of(item.content or item.summary or [])
            continue
        turn = _turn(item, f"input[{i}]")
        if isinstance(item, fields.CallItem) and not thought and turns and turns[-1]["role"] == "assistant":
            turns[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])
            continue
        if thought and turn["role"] == "assistant":
            turn["reasoning_content"] = thought
        thought = ""
        turns.append(turn)
    return turns


def _turn(item: fields.MessageItem | fields.CallItem | fields.OutputItem, where: str) -> dict[str, Any]:
    """Return an item as a message of its own; `where` names it in errors."""
    if isinstance(item, fields.OutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
    if isinstance(item, fields.MessageItem):
        return {"role": item.role, "content": text_of(item.content)}
    function = {"name": item.name, "arguments": read_object(item.arguments, f"{where}.arguments must be", "input")}
    return {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}


def _tools(asked: fields.Responses) -> tuple[list[dict[str, Any]], Any]:
    """Return the tools that are shown, and the choice among them, as a chat has both."""
    tools, choice = asked.tools or [], asked.tool_choice
    if isinstance(choice, fields.AllowedTools):
        allowed, offered = {tool.name for tool in choice.tools}, {tool.name for tool in tools}
        if missing := sorted(allowed - offered):
            raise RequestError(f"tool_choice must allow some of the tools, got {short(missing[0])}", "tool_choice")
        tools, choice = [tool for tool in tools if tool.name in allowed], choice.mode
    elif isinstance(choice, fields.NamedTool):
        choice = {"type": "function", "function": {"name": choice.name}}
    names = fields.Function.model_fields
    return [{"type": "function", "function": tool.model_dump(include=set(names))} for tool in tools], choice


def _format(asked: fields.Responses) -> dict[str, Any] | None:
    """Return `text.format` as a chat's `response_format`."""
    form = asked.text.format if asked.text else None
    if form is None:
        return None
    return {"type": form.type, "json_schema": {"schema": form.schema_} if form.type == "json_schema" else None}


# ---- the answer ------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of item: the beginning of its ids, its fields, what it is told of with, and the part that has its text."""

    prefix: str
    empty: dict[str, Any]
    told: str  # the events response.TOLD.delta and .done
    value: str  # the field of `done` with the whole text
    part: dict[str, Any] | None = None  # None: the text is a field of the item itself


KINDS = {
    "message": Kind("msg", {"role": "assistant", "content": []}, "output_text", "text",
                    {"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
    "reasoning": Kind("rs", {"summary": [], "content": [], "encrypted_content": None}, "reasoning_text", "text",
                      {"type": "reasoning_text", "text": ""}),
    "function_call": Kind("fc", {"arguments": ""}, "function_call_arguments", "arguments"),
}  # fmt: skip


class Items(Message):
    """One answer as items."""

    def __init__(self, wish: Wish, formats: Formats, thinking: bool | None = None) -> None:
        super().__init__(wish, formats, thinking)
        self.items: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []  # that nobody has taken
        self._begun = 0  # items
        self._text: str | None = None  # of the item that grows; None: none does
        self._untold: int | None = None  # where in the events the newest item begins; None: it was told of

    def think(self, text: str) -> None:
        """Add reasoning."""
        self.reasoning += text
        self._grow("reasoning", text)

    def take(self, piece: Piece) -> None:
        """Add a piece of content or of a call; a call that broke off is no item, and if it was told of, incomplete."""
        if piece.call is None:
            self._grow("message", piece.text)
        elif piece.name is not None:
            self._begin("function_call", call_id=f"call_{uuid.uuid4().hex[:24]}", name=piece.name)
        elif piece.end is None:
            self._grow("function_call", piece.text)
        else:
            self.close("completed" if piece.end else "incomplete")
            if not piece.end:  # what was told of the item cannot be taken back
                self.items.pop()
                if self._untold is not None:
                    del self._events[self._untold :]
                    self._begun -= 1

    def finish(self, cut: bool) -> None:
        """Add what was held back, and end the last item; an answer without any has a message without text."""
        super().finish(cut)
        if not self.items:
            self._begin("message")
        self.close("incomplete" if cut else "completed")

    def events(self) -> list[dict[str, Any]]:
        """Return what came since the last call."""
        events, self._events, self._untold = self._events, [], None
        return events

    def close(self, status: str) -> None:
        """End the item that grows, if one does."""
        if self._text is None:
            return
        item, text, self._text = self.items[-1], self._text, None
        kind = KINDS[item["type"]]
        self._tell(f"{kind.told}.done", **{kind.value: text})
        if kind.part is not None:
            item["content"] = [{**kind.part, "text": text}]
            self._tell("content_part.done", part=item["content"][0])
        else:
            item["arguments"] = text
            self._events[-1]["name"] = item["name"]
        item["status"] = status
        self._events.append({"type": "response.output_item.done", "output_index": self._begun - 1, "item": item})

    def _begin(self, what: str, **own: Any) -> None:
        self.close("completed")
        kind = KINDS[what]
        item = {"id": f"{kind.prefix}_{uuid.uuid4().hex}", "type": what, "status": "in_progress", **kind.empty, **own}
        self.items.append(item)
        self._begun, self._text, self._untold = self._begun + 1, "", len(self._events)
        self._events.append({"type": "response.output_item.added", "output_index": self._begun - 1, "item": {**item}})
        if kind.part is not None:
            self._tell("content_part.added", part=kind.part)

    def _grow(self, what: str, text: str) -> None:
        if not text:
            return
        if self._text is None or self.items[-1]["type"] != what:
            self._begin(what)
        self._text = (self._text or "") + text
        kind, last = KINDS[what], self._events[-1] if self._events else {}
        if last.get("type") == f"response.{kind.told}.delta":
            last["delta"] += text
        else:
            self._tell(f"{kind.told}.delta", delta=text)

    def _tell(self, what: str, **more: Any) -> None:
        """Add an event about the item that grows."""
        place: dict[str, Any] = {"item_id": self.items[-1]["id"], "output_index": self._begun - 1}
        if self.items[-1]["type"] != "function_call":
            place["content_index"] = 0
        if what.startswith("output_text"):
            place["logprobs"] = []
        self._events.append({"type": f"response.{what}", **place, **more})


class ResponseReply(Reply):
    """The answer to one job of /v1/responses."""

    message_type = Items
    end = b""  # the last event says that it is the last

    def __init__(self, job: Job, requests: Sequence[Request], served: Served) -> None:
        super().__init__(job, requests, served)
        self.told = 0  # events
        self.items = cast(Items, self.messages[0])

    def opening(self) -> list[dict[str, Any]]:
        """Return the events that open a stream."""
        begun = self._response("in_progress")
        return self._numbered([{"type": f"response.{what}", "response": begun} for what in ("created", "in_progress")])

    def closing(self) -> list[dict[str, Any]]:
        """Return the event that closes a stream, with the whole answer."""
        whole = self.result()
        return self._numbered([{"type": f"response.{whole['status']}", "response": whole}])

    def failure(self, error: RequestError) -> list[dict[str, Any]]:
        """Return the events of a stream that ends with an error: the error, and the answer as far as it came."""
        told = error_body(error)["error"]
        flat = {name: told[name] for name in ("code", "message", "param")}
        self.items.close("incomplete")
        kind = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = self._response("failed", {"code": kind, "message": told["message"]})
        ends = [{"type": "error", **flat, "error": told}, {"type": "response.failed", "response": failed}]
        return self._numbered(ends)

    def result(self) -> dict[str, Any]:
        """Return the whole answer, once done."""
        finish = self.finishes[0]
        return self._response("incomplete" if finish is not None and finish.kind == "length" else "completed")

    def usage(self) -> dict[str, Any]:
        """Return the usage of a response; reasoning is counted by tokenizing its text."""
        usage = super().usage()
        reasoning = len(self.served.tokenizer.encode(self.items.reasoning, False))
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": min(reasoning, usage["completion_tokens"])},
        }  # fmt: skip

    def _events(self, i: int) -> list[dict[str, Any]]:
        self.sent[i] = (len(self.texts[i]), len(self.ids[i]))
        return self._numbered(self.items.events())

    def _numbered(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        first, self.told = self.told, self.told + len(events)
        return [{**event, "sequence_number": number} for number, event in enumerate(events, first)]

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        over = status in ("completed", "incomplete")
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None, "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.served.model, "output": list(self.items.items), "usage": self.usage() if over else None,
            **(self.job.response or {}),
        }  # fmt: skip
