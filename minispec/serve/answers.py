"""What every answer has: its form, its id, and its line in the log."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable
from typing import Any

from aiohttp import web
from aiohttp.web_log import AccessLogger

from minispec.request import Request, RequestError, SamplingParams
from minispec.serve.messages import error_of
from minispec.serve.parse import dump
from minispec.serve.reply import error_body
from minispec.serve.routes import EVENTS, ROUTES

logger = logging.getLogger("minispec")
REQUEST_ID = web.RequestKey("request_id", str)
access_logger = logging.getLogger("minispec.access")  # a line for each answer, at --log-level-http info

TEXT_PATHS = ", ".join(dict.fromkeys(route.path for route in ROUTES if EVENTS in route.answers))


class AccessLog(AccessLogger):
    """One line for each answer: who asked for what, its status, bytes and seconds."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log an answer; the path stays encoded, since newlines would forge lines, and a query may hold keys."""
        self.logger.info("%s %s %s %d %d bytes %.3f s", request.remote, request.method, request.rel_url.raw_path,
                         response.status, response.body_length, time)  # fmt: skip


def log_requests(requests: Iterable[Request]) -> None:
    """Log the sizes of requests, and their parameters that are not the defaults; of stop strings only the number."""
    usual = SamplingParams()
    for request in requests:
        differ = {name: value for name, value in vars(request.params).items() if value != getattr(usual, name)}
        if "stop" in differ:
            differ["stop"] = f"{len(request.params.stop)} strings"
        shown = ", ".join(f"{name} {value}" for name, value in differ.items()) or "all by default"
        logger.info("request %s: %d prompt tokens, %s", request.rid, len(request.prompt_ids), shown)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return a response of JSON."""
    return web.Response(body=dump(value), status=status, headers=headers, content_type="application/json")


def error_answer(http: web.Request, error: RequestError, headers: dict[str, str] | None = None) -> web.Response:
    """Return an error response in the form of the endpoint.

    A 503 is worth trying again soon, a 500 is not worth trying again.
    """
    advice = {503: {"Retry-After": "5" if error.code == "not_ready" else "1"}, 500: {"x-should-retry": "false"},
              401: {"WWW-Authenticate": "Bearer"}}  # fmt: skip
    status, body = error_of(error, _request_id(http)) if _is_message(http) else (error.status, error_body(error))
    return json_answer(body, status, {**advice.get(error.status, {}), **(headers or {})})


def _is_message(http: web.Request) -> bool:
    """Return whether the endpoint is Anthropic's."""
    resource = http.match_info.route.resource
    return resource is not None and resource.canonical.startswith("/v1/messages")


def _request_id(http: web.Request) -> str:
    """Return the client's x-request-id if it is harmless, else one that is made once."""
    given = http.headers.get("x-request-id", "")
    return given if re.fullmatch(r"[\w.:-]{1,128}", given) else http.setdefault(REQUEST_ID, uuid.uuid4().hex)


async def set_request_id(http: web.Request, response: web.StreamResponse) -> None:
    """Name every response."""
    response.headers["x-request-id"] = _request_id(http)
    if _is_message(http):
        response.headers["request-id"] = _request_id(http)


@web.middleware
async def errors(http: web.Request, handler: Any) -> web.StreamResponse:
    """Turn every failure into the endpoint's error object."""
    try:
        return await handler(http)
    except RequestError as error:
        return error_answer(http, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        message = f"{error.reason}: {http.method} {http.path}"[:300]
        if error.status == 404:
            message += f"; there are {TEXT_PATHS} for text, and /openapi.json has all paths"
        return error_answer(http, RequestError(message, None, error.status), allow)
    except Exception as error:
        logger.exception("a handler failed")
        return error_answer(http, RequestError(f"{type(error).__name__} in the server", None, 500))
