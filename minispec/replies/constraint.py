"""The grammar of a reply that must call tools, or that may: then it is calls, or of the form that is asked for.

How a model writes a call its `CallFormat` says. A call is constrained to the model's own way of writing it, name by
name, and its arguments to the tool's JSON schema.

Read next: `asked/grammar.py`, which compiles this; `calls.py`, which finds the calls in a reply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from minispec.replies.formats import CallFormat
from minispec.request import Grammar

_NONE = {"additionalProperties": False}  # the parameters of a function that takes none
# The white space of constrained arguments is fixed: where it is free, small models go on writing it for ever.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def call_or_form(
    tools: Sequence[Mapping[str, Any]], form: CallFormat, asked: Grammar, parallel: bool = True
) -> Grammar:
    """Return the grammar of a reply that is calls, as `constraint` has them, or else what `asked` says.

    Where calls stand without tags and the other is JSON too, both are one schema: llguidance could not tell a call's
    beginning from that of another object. Then there is one call.
    """
    if not form.bare or asked.kind != "json_schema":
        return replace(asked, calls=constraint(tools, form, None, parallel))
    options: list[Any] = [{"type": "object", "required": ["name", form.arguments], "properties": {
        "name": {"const": function["name"]}, form.arguments: _parameters(function)}}
        for function in (tool["function"] for tool in tools)]  # fmt: skip
    options.append(json.loads(asked.text))
    moved = [_moved(option, f"#/anyOf/{at}" + (f"/properties/{form.arguments}" if at < len(tools) else ""))
             for at, option in enumerate(options)]  # fmt: skip
    return replace(asked, text=json.dumps({"anyOf": moved, "x-guidance": _SPACING}, ensure_ascii=False))


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references are right where it stands at `place` of another."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    if isinstance(to := schema.get("$ref"), str) and to.startswith("#"):
        moved["$ref"] = place + to[1:]
    return moved


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("parameters")
    return {"type": "object", **(_NONE if given is None else given)}


def constraint(
    tools: Sequence[Mapping[str, Any]], form: CallFormat, name: str | None = None, parallel: bool = True
) -> str:
    """Return the grammar, in llguidance's Lark, of a reply that is a call of one of the tools, or several `parallel`.

    tools: as clients send them; one without `parameters` takes none, as OpenAI's reference says. name: of the one tool
    that must be called, in one call.
    """
    several, literal = parallel and name is None, partial(json.dumps, ensure_ascii=False)
    calls = []
    for function in (tool["function"] for tool in tools):
        if name in (None, function["name"]):
            head = f'{{"name": {literal(function["name"])}, "{form.arguments}": '
            schema = {**_parameters(function), "x-guidance": _SPACING}
            calls.append(f"{literal(form.spelled[0] + head)} %json {json.dumps(schema)} "
                         f"{literal('}' + form.spelled[1])}")  # fmt: skip
    return "\n".join([
        f"start: call ({literal(form.between)} call)*" if several else "start: call",
        "call: " + " | ".join(f"call_{i}" for i in range(len(calls))),
        *(f"call_{i}: {call}" for i, call in enumerate(calls)),
    ]) + "\n"  # fmt: skip
