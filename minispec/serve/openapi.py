"""The API described: /openapi.json for programs, the tables of docs/serving.md for people.

Both are made of the models in `fields.py` and the table in `routes.py`, so they say what the server checks and serves.
`python -m minispec.serve.openapi` prints the tables.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from pydantic.json_schema import models_json_schema

from minispec.load.flags import markdown_table
from minispec.serve import fields
from minispec.serve.routes import JSON, ROUTES, Route

FAILURES = {
    "400": "something in the request is wrong; param names the field", "401": "a valid API key is needed",
    "403": "the admin key is needed",
    "404": "no such model", "413": "the body is too large", "499": "aborted by /abort_request",
    "500": "a failure of ours, not worth trying again", "503": "not ready, or the queue is full; Retry-After says when",
    "529": "of messages: the same",
}  # fmt: skip

ERROR = {
    "type": "object", "required": ["error"], "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"], "properties": {
            "message": {"type": "string"}, "type": {"type": "string"},
            "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
        },
    }},
}  # fmt: skip


def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    bodies = sorted({route.body for route in ROUTES if route.body is not None}, key=lambda kind: kind.__name__)
    models: list[tuple[Any, Literal["validation"]]] = [(kind, "validation") for kind in bodies]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "minispec", "version": version, "description": "OpenAI's and SGLang's endpoints."},
        "security": [{"key": []}, {}],  # the operator decides whether a key is needed
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    failure = {"content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    answer = {kind: {"schema": {"type": name}} for kind, name in route.answers.items()}
    operation: dict[str, Any] = {
        "summary": route.summary + "; needs no key" * (route.key is None),
        "responses": {
            "200": {"description": "done", **({"content": answer} if answer else {})},
            **{status: {"description": why, **failure} for status, why in FAILURES.items()},
        },
    }
    if route.parameter is not None:
        operation["parameters"] = [route.parameter]
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema, "example": route.example}}}
    return operation


# ---- docs/serving.md -------------------------------------------------------------------------------------------------

_PLACES = {  # where a field stands -> its model
    "chat": fields.Chat, "completions": fields.Completion, "responses": fields.Responses,
    "generate": fields.Generate, "sampling_params": fields.NativeParams, "response_format": fields.ResponseFormat,
    "structured_outputs": fields.StructuredOutputs, "text": fields.TextConfig, "text.format": fields.TextFormat,
    "reasoning": fields.Reasoning, "stream_options": fields.StreamOptions, "chat messages": fields.Message,
    "messages": fields.Messages,
    "tokenize": fields.Tokenize, "detokenize": fields.Detokenize, "abort_request": fields.Abort,
    "add_external_corpus": fields.AddCorpus,
    "remove_external_corpus": fields.RemoveCorpus,
    "set_internal_state": fields.InternalState, "server_args": fields.ServerArgs,
}  # fmt: skip


_TEXT = ("chat", "completions", "responses", "messages")  # the bodies that ask for text, but /generate's


def _where(places: list[str]) -> str:
    """Return the places where a field stands, with one word for those that most fields have."""
    for word, native in (("all", "sampling_params"), ("all bodies", "generate")):
        if {*_TEXT, native} <= {*places}:
            return ", ".join([word, *(place for place in places if place not in (*_TEXT, native))])
    return ", ".join(places)


def tables() -> str:
    """Return the tables of docs/serving.md: what acts, what is refused, what is ignored."""
    acting: dict[tuple[str, str], list[str]] = {}
    for place, kind in _PLACES.items():
        for name, field in fields.acting(kind).items():
            acting.setdefault((name, field.description or ""), []).append(place)
    alike: dict[tuple[str, str], list[str]] = {}  # where, and what it does -> names
    for (name, text), places in acting.items():
        alike.setdefault((_where(places), text), []).append(name)
    passes = {
        why: [f"`{name}`: `{json.dumps(value)}`" for name in names.split() for value in fields.IDLE.get(name, ())]
        for why, names in fields.REFUSED.items()
    }
    code = lambda names: f"`{' '.join(names.split())}`"  # noqa: E731
    return "\n\n".join([
        "### Fields that act",
        "In *all* are chat, completions, responses, messages, and the `sampling_params` of /generate; in *all bodies* "
        "are the same, but of /generate the body itself.",
        markdown_table(("field", "in", "what it does"),
               [(", ".join(f"`{name}`" for name in names), *row) for row, names in alike.items()]),
        "### Fields that are refused",
        "A 400 names the field where it asks for something. Null, false and empty values pass, and those of the last "
        "column. What the first table has for one place is refused in the others, if it stands here too.",
        markdown_table(("fields", "why", "passes too"),
               [(code(names), why, ", ".join(passes[why])) for why, names in fields.REFUSED.items()]),
        "### Fields that are ignored",
        markdown_table(("fields", "why no answer depends on them"),
               [(code(names), why) for why, names in fields.IGNORED.items()]),
    ]) + "\n"  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(tables())
