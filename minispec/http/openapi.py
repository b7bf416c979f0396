"""The API described: /openapi.json for programs, the tables of docs/serving.md for people.

Both are made of the models in `fields.py`, so they say what the server checks. `ROUTES` has a line for each path; a
test compares it with the paths that are served. `python -m minispec.http.openapi` prints the tables.

Read next: `fields.py`; `server.py`, which serves it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic.json_schema import models_json_schema

from minispec.http import fields

JSON, TEXT, EVENTS, HTML = "application/json", "text/plain", "text/event-stream", "text/html"
PROMPT = {"prompt": "Once upon a time", "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8}
NATIVE = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}


class Route(NamedTuple):
    """A path: its method, what it does, the model of its body with an example, what it answers with."""

    method: str
    path: str
    summary: str
    body: type[fields.Fields] | None = None
    example: dict[str, Any] | None = None
    answers: tuple[str, ...] = (JSON,)


ROUTES = [
    Route("post", "/v1/chat/completions", "OpenAI's chat completions", fields.Chat, CHAT, (JSON, EVENTS)),
    Route("post", "/v1/completions", "OpenAI's completions", fields.Completion, PROMPT, (JSON, EVENTS)),
    Route("post", "/generate", "SGLang's native generate", fields.Generate, NATIVE, (JSON, EVENTS)),
    Route("put", "/generate", "the same", fields.Generate, NATIVE, (JSON, EVENTS)),
    Route("get", "/v1/models", "the model served"),
    Route("get", "/v1/models/{id}", "the model by its name, which may contain slashes"),
    *(Route("get", path, "SGLang's description of the model") for path in ("/model_info", "/get_model_info")),
    *(Route("get", path, "flags, sizes, counters") for path in ("/server_info", "/get_server_info")),
    Route("get", "/v1/loads", "how busy the server is, in SGLang's words"),
    Route("get", "/tokenizer_info", "the special tokens and the chat template"),
    *(Route("post", path + "/tokenize", "text to token ids", fields.Tokenize, {"prompt": "Once upon a time"})
      for path in ("", "/v1")),
    *(Route("post", path + "/detokenize", "token ids to text", fields.Detokenize, {"tokens": [5, 6]})
      for path in ("", "/v1")),
    Route("post", "/abort_request", "end requests by the beginning of their ids", fields.Abort, {"rid": "nobody"}, ()),
    *(Route(method, "/set_internal_state", "change a flag while the server runs", fields.InternalState,
            {"server_args": {"speculative_accept_threshold_single": 1.0}}) for method in ("post", "put")),
    *(Route(method, "/flush_cache", "empty the prefix cache; 400 while requests run", None, None, (TEXT,))
      for method in ("get", "post")),
    Route("post", "/replicas/{number}/restart", "start a replica again, when it has done what it has; 404 without one"),
    Route("get", "/health", "200 once ready; needs no key"),
    Route("get", "/health_generate", "200 once a token was generated; needs no key"),
    Route("get", "/", "a page to talk to the model and watch speculation; needs no key", None, None, (HTML,)),
    Route("get", "/openapi.json", "this description"),
    Route("get", "/metrics", "counters for Prometheus; 404 without --enable-metrics", None, None, (TEXT,)),
]  # fmt: skip

FAILURES = {
    "400": "something in the request is wrong; param names the field", "401": "a valid API key is needed",
    "403": "the admin key is needed",
    "404": "no such model", "413": "the body is too large", "499": "aborted by /abort_request",
    "500": "a failure of ours, not worth trying again", "503": "not ready, or the queue is full; Retry-After says when",
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
    bodies = {route.body for route in ROUTES if route.body is not None}
    named = sorted(bodies, key=lambda kind: kind.__name__)
    models: list[tuple[Any, Literal["validation"]]] = [(kind, "validation") for kind in named]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "minispec", "version": version, "description": "OpenAI's and SGLang's endpoints."},
        "security": [{"key": []}, {}],  # whether a key is needed the operator says
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    """Return the description of one method of one path."""
    failure = {"content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    types = {kind: "object" if kind == JSON else "string" for kind in route.answers}
    answer: dict[str, Any] = {kind: {"schema": {"type": name}} for kind, name in types.items()}
    if route.path == "/set_internal_state":
        answer[JSON] = {"schema": {"type": "array"}}
    if route.path == "/generate":  # a list of prompts gives a list of answers
        answer[JSON] = {"schema": {"type": ["object", "array"]}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "done", **({"content": answer} if answer else {})},
            **{status: {"description": why, **failure} for status, why in FAILURES.items()},
        },
    }
    if "{id}" in route.path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if "{number}" in route.path:
        operation["parameters"] = [{"name": "number", "in": "path", "required": True, "schema": {"type": "integer"}}]
    if route.path == "/v1/loads":
        names = {"type": "string", "description": "core, spec or all, separated by commas"}
        operation["parameters"] = [{"name": "include", "in": "query", "schema": names}]
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema, "example": route.example}}}
    return operation


# ---- docs/serving.md -------------------------------------------------------------------------------------------------

_PLACES = {  # where a field stands -> its model
    "chat": fields.Chat, "completions": fields.Completion, "generate": fields.Generate,
    "sampling_params": fields.NativeParams, "response_format": fields.ResponseFormat,
    "stream_options": fields.StreamOptions, "messages": fields.Message,
    "tokenize": fields.Tokenize, "detokenize": fields.Detokenize, "abort_request": fields.Abort,
    "set_internal_state": fields.InternalState, "server_args": fields.ServerArgs,
}  # fmt: skip


def tables() -> str:
    """Return the tables of docs/serving.md: what acts, what is refused, what is ignored."""
    acting: dict[tuple[str, str], list[str]] = {}
    for place, kind in _PLACES.items():
        for name, field in fields.acting(kind).items():
            acting.setdefault((f"`{name}`", field.description or ""), []).append(place)
    passes = {
        why: [f"`{name}`: `{json.dumps(value)}`" for name in names.split() for value in fields.IDLE.get(name, ())]
        for why, names in fields.REFUSED.items()
    }
    code = lambda names: ", ".join(f"`{name}`" for name in names.split())  # noqa: E731
    return "\n\n".join([
        "### Fields that act",
        _table(("field", "in", "what it does"),
               [(name, ", ".join(places), text) for (name, text), places in acting.items()]),
        "### Fields that are refused",
        "A 400 names the field where it asks for something. Null, false and empty values pass, and those of the last "
        "column. What the first table has for one place is refused in the others, if it stands here too.",
        _table(("fields", "why", "passes too"),
               [(code(names), why, ", ".join(passes[why])) for why, names in fields.REFUSED.items()]),
        "### Fields that are ignored",
        _table(("fields", "why no answer depends on them"),
               [(code(names), why) for why, names in fields.IGNORED.items()]),
    ]) + "\n"  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


if __name__ == "__main__":
    sys.stdout.write(tables())
