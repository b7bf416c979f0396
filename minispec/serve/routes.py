"""The routes: one line for each path and method, with its handler, its key, and what goes in and comes out.

The server makes its routes of this table, `auth.py` takes the keys from it, and `openapi.py` the description. A path
may be spelled a little wrong, as clients do that join a base URL and a path: `Misspelt` finds the route that is meant.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from aiohttp import web

from minispec.serve import fields

JSON, TEXT, EVENTS, HTML = "application/json", "text/plain", "text/event-stream", "text/html"
STREAMED: dict[str, Any] = {JSON: "object", EVENTS: "string"}  # content type -> JSON type
NATIVE: dict[str, Any] = {JSON: ["object", "array"], EVENTS: "string"}  # a list of prompts gives a list of answers

NATIVE_EXAMPLE = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}


class Route(NamedTuple):
    """A method of a path: who answers, what it does, the model of its body with an example, what it answers with."""

    method: str
    path: str
    handler: str  # a method of `Server`
    summary: str
    body: type[fields.Fields] | None = None
    example: dict[str, Any] | None = None
    answers: dict[str, Any] = {JSON: "object"}
    key: Literal["user", "admin"] | None = "user"  # None: open to all
    parameter: dict[str, Any] | None = None  # in OpenAPI's words
    pattern: str = ""  # of the parameter, where it is a part of the path


ROUTES = [
    Route("post", "/v1/chat/completions", "chat", "OpenAI's chat completions", fields.Chat,
          {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8}, STREAMED),
    Route("post", "/v1/completions", "completion", "OpenAI's completions", fields.Completion,
          {"prompt": "Once upon a time", "max_tokens": 8}, STREAMED),
    Route("post", "/v1/responses", "response", "OpenAI's responses, none of which is stored", fields.Responses,
          {"input": "Say something.", "max_output_tokens": 8}, STREAMED),
    Route("post", "/v1/messages", "message", "Anthropic's messages", fields.Messages,
          {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8}, STREAMED),
    Route("post", "/v1/messages/count_tokens", "count_tokens", "the tokens of such a message's prompt",
          fields.CountTokens, {"messages": [{"role": "user", "content": "Say something."}]}),
    Route("post", "/generate", "generate", "SGLang's native generate", fields.Generate, NATIVE_EXAMPLE, NATIVE),
    Route("put", "/generate", "generate", "the same", fields.Generate, NATIVE_EXAMPLE, NATIVE),
    Route("get", "/v1/models", "models", "the model served"),
    Route("get", "/v1/models/{id}", "model", "the model by its name, which may contain slashes", pattern=".+",
          parameter={"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}),
    *(Route("get", path, "model_info", "SGLang's description of the model")
      for path in ("/model_info", "/get_model_info")),
    *(Route("get", path, "server_info", "flags, sizes, counters") for path in ("/server_info", "/get_server_info")),
    Route("get", "/v1/loads", "loads", "how busy the server is, in SGLang's words",
          parameter={"name": "include", "in": "query",
                     "schema": {"type": "string", "description": "core, spec or all, separated by commas"}}),
    Route("get", "/props", "props", "the context's size and the chat template, in llama.cpp's words"),
    Route("get", "/tokenizer_info", "tokenizer_info", "the special tokens and the chat template"),
    *(Route("post", path, "tokenize", "text to token ids", fields.Tokenize, {"prompt": "Once upon a time"})
      for path in ("/tokenize", "/v1/tokenize")),
    *(Route("post", path, "detokenize", "token ids to text", fields.Detokenize, {"tokens": [5, 6]})
      for path in ("/detokenize", "/v1/detokenize")),
    Route("post", "/abort_request", "abort_request", "end requests by the beginning of their ids", fields.Abort,
          {"rid": "nobody"}, {}),
    Route("post", "/add_external_corpus", "add_corpus", "add texts that lookups draft from", fields.AddCorpus,
          {"corpus_id": "mine", "documents": ["Once upon a time."]}, key="admin"),
    Route("post", "/remove_external_corpus", "remove_corpus", "remove such texts", fields.RemoveCorpus,
          {"corpus_id": "mine"}, key="admin"),
    Route("get", "/list_external_corpora", "list_corpora", "the tokens of each corpus", key="admin"),
    *(Route(method, "/set_internal_state", "set_internal_state", "change a flag while the server runs",
            fields.InternalState, {"server_args": {"speculative_accept_threshold_single": 1.0}}, {JSON: "array"},
            "admin") for method in ("post", "put")),
    *(Route(method, "/flush_cache", "flush_cache", "empty the prefix cache; 400 while requests run",
            answers={TEXT: "string"}, key="admin") for method in ("get", "post")),
    Route("post", "/replicas/{number}/restart", "restart", "start a replica again, when it has done what it has; 404 "
          "without one", key="admin", pattern="[0-9]{1,6}",
          parameter={"name": "number", "in": "path", "required": True, "schema": {"type": "integer"}}),
    Route("get", "/health", "health", "200 once ready", key=None),
    Route("get", "/ping", "health", "the same", key=None),
    Route("get", "/health_generate", "health_generate", "200 once a token was generated", key=None),
    Route("get", "/", "page", "a page to talk to the model and watch speculation", answers={HTML: "string"}, key=None),
    Route("get", "/openapi.json", "openapi", "this description"),
    Route("get", "/metrics", "metrics", "counters for Prometheus; 404 without --enable-metrics",
          answers={TEXT: "string"}),
]  # fmt: skip


def tidied(path: str) -> str:
    """Return a path as routes have it: no slash is doubled, none stands at the end, and `/v1` stands in it once."""
    path = re.sub("/{2,}", "/", path).rstrip("/") or "/"
    return re.sub("^(/v1)+(?=/v1(/|$))", "", path)


class Misspelt(web.PlainResource):
    """The last resource of a router: it answers for a path that no other has with the route of the path tidied.

    So a request is answered where it stands. A redirect would lose the body of a POST, and its key in some clients.
    """

    def __init__(self, router: web.UrlDispatcher) -> None:
        super().__init__("/")  # under which it is looked at for every path, after the page, which has the same
        self.router = router

    async def resolve(self, request: web.Request) -> tuple[web.UrlMappingMatchInfo | None, set[str]]:
        """Return what the router has for the tidied path, with the methods allowed there where this one is not."""
        path = request.rel_url.raw_path
        if (meant := tidied(path)) == path:
            return None, set()
        found = await self.router.resolve(request.clone(rel_url=meant))
        wrong = found.http_exception
        return None if wrong else found, set(getattr(wrong, "allowed_methods", ()))
