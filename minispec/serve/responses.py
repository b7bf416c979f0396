"""OpenAI's /v1/responses: its body becomes that of a chat, so all that a chat has lies behind it.

Nothing is kept: every request has the whole conversation, with what the model said and called as items.

Read next: `items.py`, which makes the answer.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minispec.request import Grammar, RequestError, short
from minispec.serve import fields
from minispec.serve.parse import Job, parse_chat, read_object, text_of

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
    params = [replace(p, grammar=p.grammar and _named(p.grammar)) for p in job.params]
    names = {name: _NAMES.get(given, given) for name, given in job.names.items()} | {"messages": "input"}
    return replace(job, params=params, names=names, response=_repeated(asked, job))


def _renamed(text: str) -> str:
    """Return an error's text with a response's names for a chat's fields, but with its quoted values as they were."""
    return _QUOTED_OR_NAME.sub(lambda found: _NAMES.get(found[0], found[0]), text)


def _named(grammar: Grammar) -> Grammar:
    return replace(grammar, origin=_NAMES.get(grammar.origin, grammar.origin))


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
