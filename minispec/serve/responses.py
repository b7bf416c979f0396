"""OpenAI's /v1/responses: its body becomes a conversation, and the blocks of the answer become items and typed events.

Nothing is kept: every request has the whole conversation, with what the model said and called as items. An item is a
message, a call, or reasoning. Items follow each other: one ends where the next begins. A tool in a namespace has one
joined name for the model; its call has the client's two names. A tool that wants a text is called with the argument
`input`, whose text the client gets.

Read next: `message.py`, which takes the text apart; `reply.py` for what all answers have.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from minispec.replies.calls import read_arguments
from minispec.request import RequestError
from minispec.serve import fields, parse
from minispec.serve.message import Block, Change
from minispec.serve.reply import EventReply, error_body


def parse_response(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> parse.Job:
    """Return the job of a /v1/responses body; `defaults` are the sampling values of the model, if used."""
    asked: Any = fields.read(fields.Responses, body)
    form, effort = asked.text.format if asked.text else None, asked.reasoning.effort if asked.reasoning else None
    offered = list(asked.tools or [])
    for item in asked.input:
        offered += item.tools if isinstance(item, fields.ToolsItem) else []
    if asked.truncation == "auto":
        parse.leave_out("truncation auto: nothing is cut")
    job = parse.job_of(parse.Conversation(
        "response", _messages(asked), "input", parse.tools_of(offered), parse.pick_of(asked.tool_choice),
        asked.parallel_tool_calls is not False,
        parse.schema_form("text.format.schema", form.type, form.schema_) if form else (),
        parse.variables(asked, effort=effort)), asked, defaults)  # fmt: skip
    return replace(job, repeated=_repeated(asked, job))


def _repeated(asked: Any, job: parse.Job) -> dict[str, Any]:
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
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [tool.model_dump() for tool in asked.tools or [] if getattr(tool, "name", None) in shown],
        "top_logprobs": 0, "top_p": job.params[0].top_p, "truncation": "disabled",
    }  # fmt: skip


# ---- the parts of a body ---------------------------------------------------------------------------------------------


def _messages(asked: Any) -> list[dict[str, Any]]:
    """Return instructions and input as a chat's messages: what the model made in one turn becomes one message."""
    turns = [] if asked.instructions is None else [parse.turn("system", asked.instructions)]
    thought = ""  # waits for the message that it led to
    for item in [asked.input] if isinstance(asked.input, str) else asked.input:
        if isinstance(item, fields.ReasoningItem):
            thought = parse.text_of(item.content or item.summary or [])
        elif isinstance(item, fields.UnservedItem):
            parse.leave_out(item.type)
        elif not isinstance(item, fields.ToolsItem):
            turn = _turn(item, thought)
            if "tool_calls" in turn and not thought and turns and turns[-1]["role"] == "assistant":
                turns[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])
            else:
                turns.append(turn)
            thought = ""
    return turns or [parse.turn("user", "")]


def _turn(item: Any, thought: str) -> dict[str, Any]:
    """Return an item as a message of its own; `thought`: what led to it."""
    if isinstance(item, str):
        return parse.turn("user", item)
    if isinstance(item, fields.OutputItem):
        return parse.turn("tool", item.output, tool_call_id=item.call_id)
    if isinstance(item, fields.MessageItem):
        return parse.turn(item.role, item.content, [thought] if item.role == "assistant" else ())
    arguments = {"input": item.input} if isinstance(item, fields.CustomCallItem) else item.arguments
    return parse.turn("assistant", "", [thought], [parse.made_call(item.call_id, parse.joined(item), arguments)])


# ---- the answer ------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of item: its type, the beginning of its ids, its fields, and how its text is told."""

    type: str
    prefix: str
    empty: dict[str, Any]
    told: str  # the events response.TOLD.delta and .done
    value: str  # the field of `done` with the whole text
    part: dict[str, Any] | None = None  # that has the text; None: the text is a field of the item itself


KINDS = {
    "text": Kind("message", "msg", {"role": "assistant", "content": []}, "output_text", "text",
                 {"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
    "reasoning": Kind("reasoning", "rs", {"summary": [], "content": [], "encrypted_content": None}, "reasoning_text",
                      "text", {"type": "reasoning_text", "text": ""}),
    "call": Kind("function_call", "fc", {}, "function_call_arguments", "arguments"),
    "free call": Kind("custom_tool_call", "ctc", {}, "custom_tool_call_input", "input"),
}  # fmt: skip


class ResponseReply(EventReply):
    """The answer to one job of /v1/responses."""

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
        self.message.close("incomplete")
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
        reasoning = len(self.served.tokenizer.encode(self.message.text("reasoning"), False))
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": min(reasoning, usage["completion_tokens"])},
        }  # fmt: skip

    def told(self, change: Change) -> list[dict[str, Any]]:
        """Return the events about a change of a block."""
        block, text = change.block, change.text
        kind, item = self._kind(block), self._item(block, begun=change.what == "begin")
        place: dict[str, Any] = {"item_id": item["id"], "output_index": block.number}
        if kind.part is not None:
            place["content_index"] = 0
        said = {**place, **({"logprobs": []} if block.kind == "text" else {})}
        if kind.prefix == "ctc" and change.what != "begin":  # a text is told when all of its JSON is there
            text = item["input"] if change.what == "end" else ""
        events = [{"type": f"response.{kind.told}.delta", **said, "delta": text}] if text else []
        if change.what == "begin":
            events.append({"type": "response.output_item.added", "output_index": block.number, "item": item})
            if kind.part is not None:
                events.append({"type": "response.content_part.added", **place, "part": kind.part})
        elif change.what == "end":
            part = {} if kind.part is None else item["content"][0]
            named = {"name": item["name"]} if kind.prefix == "fc" else {}
            events.append({"type": f"response.{kind.told}.done", **said, kind.value: {**item, **part}[kind.value],
                           **named})  # fmt: skip
            if part:
                events.append({"type": "response.content_part.done", **place, "part": part})
            events.append({"type": "response.output_item.done", "output_index": block.number, "item": item})
        return self._numbered(events)

    def _numbered(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        first, self.count = self.count, self.count + len(events)
        return [{**event, "sequence_number": number} for number, event in enumerate(events, first)]

    def _kind(self, block: Block) -> Kind:
        return KINDS["free call" if block.kind == "call" and self.job.tools[block.name].free else block.kind]

    def _item(self, block: Block, begun: bool = False) -> dict[str, Any]:
        """Return a block as an item; one that has just begun has no text."""
        kind, text = self._kind(block), "" if begun else block.text
        item = {"id": f"{kind.prefix}_{block.id}", "type": kind.type,
                "status": "in_progress" if begun else block.status, **kind.empty}  # fmt: skip
        if kind.part is not None:
            return item if begun else {**item, "content": [{**kind.part, "text": text}]}
        tool = self.job.tools[block.name]
        if tool.free:
            text = str(read_arguments(text).get("input", ""))
        space = {} if tool.namespace is None else {"namespace": tool.namespace}
        return {**item, "call_id": f"call_{block.id[:24]}", "name": tool.name, **space, kind.value: text}

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        over = status in ("completed", "incomplete")
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None, "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.served.model, "output": [self._item(block) for block in self.message.blocks],
            "usage": self.usage() if over else None, **self.job.repeated,
        }  # fmt: skip
