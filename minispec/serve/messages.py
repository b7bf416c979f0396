"""Anthropic's /v1/messages: its body becomes a conversation, and the blocks of the answer become blocks and events.

A result of a tool stands inside a user's message there, and is a message of its own for a chat template. Thinking that
comes back goes to templates that read reasoning; its signature means nothing here. If the last message is the
assistant's, the answer continues it.

Read next: `message.py`, which takes the text apart; `reply.py` for what all answers have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from minispec.replies.calls import read_arguments
from minispec.request import Finish, RequestError, TooLong
from minispec.serve import fields, parse
from minispec.serve.message import Block, Change
from minispec.serve.reply import ERROR_TYPES, EventReply

_ERRORS = {**ERROR_TYPES, 413: "request_too_large", 503: "overloaded_error"}


def parse_message(body: Mapping[str, Any], defaults: Mapping[str, Any], counted: bool = False) -> parse.Job:
    """Return the job of a /v1/messages body; `defaults` are the sampling values of the model, if used.

    counted: it is a body of /v1/messages/count_tokens, which has no limit.
    """
    asked: Any = fields.read(fields.CountTokens if counted else fields.Messages, body)
    config, choice = asked.output_config, asked.tool_choice
    forms = [(where, form) for where, form in (("output_format", asked.output_format),
                                               ("output_config.format", config and config.format)) if form]  # fmt: skip
    if asked.thinking and asked.thinking.budget_tokens:
        parse.leave_out("thinking.budget_tokens: reasoning is bounded by max_tokens alone")
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise RequestError(f"tool_choice must have a name if its type is tool, and else none, got {choice.name!r}",
                           "tool_choice")  # fmt: skip
    messages = [turn for i, turn in enumerate(asked.messages) for turn in _turns(turn, f"messages[{i}]")]
    if asked.system:
        messages.insert(0, parse.turn("system", asked.system))
    return parse.job_of(parse.Conversation(
        "message", messages, "messages", parse.tools_of(asked.tools or ()),
        parse.Pick(choice and choice.type, choice and choice.name),
        not (choice and choice.disable_parallel_tool_use),
        [form for where, given in forms for form in parse.schema_form(f"{where}.schema", given.type, given.schema_)],
        parse.variables(asked, effort=config and config.effort),
        continued=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
    ), asked, defaults)  # fmt: skip


def _turns(turn: Any, where: str) -> list[dict[str, Any]]:
    """Return a message as a chat's: results of tools in it are messages of their own; `where` names it in errors."""
    if isinstance(turn.content, str):
        return [parse.turn(turn.role, turn.content)]
    turns: list[dict[str, Any]] = []
    said: list[Any] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(turn.content):
        of = {"tool_result": "user", "tool_use": "assistant", "thinking": "assistant"}.get(block.type, turn.role)
        if of != turn.role:
            raise RequestError(f"{where}.content[{i}] must be no {block.type} in a message of role {turn.role}",
                               "messages")  # fmt: skip
        if isinstance(block, fields.UnservedBlock):
            parse.leave_out(block.type)
        elif isinstance(block, fields.ToolResult):
            turns.append(parse.turn("tool", block.content, tool_call_id=block.tool_use_id))
        elif isinstance(block, fields.ToolUse):
            calls.append(parse.made_call(block.id, block.name, block.input))
        else:
            said.append(block)
    if said or calls or not turns:
        turns.append(parse.turn(turn.role, said, calls=calls))
    return turns


def error_of(error: RequestError, request_id: str | None = None) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of a failure; clients look at the sentence for a conversation that is too long."""
    message = error.message
    if isinstance(error, TooLong):
        message = f"prompt is too long: {error.count} tokens > {error.most} maximum. {message}"
    status = 529 if error.status == 503 else error.status
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": message[:2000]}, "request_id": request_id}
    return status, body


# ---- the answer ------------------------------------------------------------------------------------------------------

# A block's kind -> the block without its text, the type of its deltas, and the field with the text in these.
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "text": ({"type": "text", "text": ""}, "text_delta", "text"),
    "reasoning": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "call": ({"type": "tool_use"}, "input_json_delta", "partial_json"),
}


class MessageReply(EventReply):
    """The answer to one job of /v1/messages."""

    def opening(self) -> list[dict[str, Any]]:
        """Return the event that opens a stream."""
        return [{"type": "message_start", "message": self._message([], None)}]

    def closing(self) -> list[dict[str, Any]]:
        """Return the events that close a stream."""
        whole = self.result()
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": whole["usage"]}, {"type": "message_stop"}]

    def failure(self, error: RequestError) -> list[dict[str, Any]]:
        """Return the event of a stream that ends with an error."""
        return [error_of(error)[1]]

    def result(self) -> dict[str, Any]:
        """Return the whole answer, once done."""
        finish = cast(Finish, self.finishes[0])
        reason = "stop_sequence" if isinstance(finish.matched, str) else "end_turn"
        if finish.kind == "length":
            reason = "max_tokens"
        elif self.message.called:
            reason = "tool_use"
        return self._message(list(map(_block, self.message.blocks)), reason)

    def usage(self) -> dict[str, Any]:
        """Return the usage so far; what the cache gave counts apart."""
        usage = super().usage()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"],
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}  # fmt: skip

    def told(self, change: Change) -> list[dict[str, Any]]:
        """Return the events about a change of a block."""
        block, place = change.block, {"index": change.block.number}
        _, kind, field = KINDS[block.kind]
        if change.what == "begin":
            return [{"type": "content_block_start", **place, "content_block": _block(block, begun=True)}]
        deltas = [{"type": kind, field: change.text}] if change.what == "grow" else []
        if change.what == "end" and block.kind == "reasoning":
            deltas = [{"type": "signature_delta", "signature": block.id}]
        events = [{"type": "content_block_delta", **place, "delta": delta} for delta in deltas]
        return [*events, {"type": "content_block_stop", **place}] if change.what == "end" else events

    def _message(self, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        finish = self.finishes[0]
        matched = finish.matched if finish is not None and isinstance(finish.matched, str) else None
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.served.model, "content": content,
                "stop_reason": reason, "stop_sequence": matched, "usage": self.usage()}  # fmt: skip


def _block(block: Block, begun: bool = False) -> dict[str, Any]:
    """Return a block of the answer; one that has just begun has no text. A call that was cut has what came of it."""
    empty, _, field = KINDS[block.kind]
    if block.kind == "call":
        given = {} if begun else read_arguments(block.text)
        return {**empty, "id": f"toolu_{block.id[:24]}", "name": block.name, "input": given}
    signed = {"signature": block.id} if block.kind == "reasoning" else {}
    return empty if begun else {**empty, field: block.text, **signed}
