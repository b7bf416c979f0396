"""Answers on their way to clients that read slowly: which updates wait, and for how long.

The engine never waits for a client. Its updates wait until the client's connection takes them. The first `BEHIND` of
them wait one by one, and later ones are merged into the last, so a reader who is behind gets the same text in fewer and
larger events. A reader who is more than `LAG` seconds behind is cut off: the stream ends with an error event, which the
reader can still get within `GRACE` seconds.

Read next: `server.py`, which has the exchanges; `reply.py` for what events say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from minispec.request import Request, RequestError, Update
from minispec.serve.parse import Job
from minispec.serve.reply import Reply, sse

logger = logging.getLogger("minispec")

KEEP_ALIVE = 5.0  # seconds without an event after which a stream sends a comment
BEHIND = 64  # updates that wait one by one for a reader
LAG = 60.0  # seconds a reader may be behind
GRACE = 5.0  # seconds in which a reader who was cut off may read why


@dataclass(eq=False)
class Waiting:
    """The update of one step for a request, or of several steps in one, which waits for the reader."""

    update: Update
    since: float = field(default_factory=time.monotonic)


class Exchange:
    """One HTTP request being answered: its job, and the queue of updates that its reader has not taken yet."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.requests: list[Request] = []
        self.aborted: set[int] = set()  # indices of prompts to end, maybe before they are submitted
        self.items: asyncio.Queue[Waiting | RequestError] = asyncio.Queue()
        self.newest: dict[Request, Waiting] = {}  # of each request, the last of what waits
        self.unread = b""  # the end of a stream that is not read, which `leave` sends

    def add(self, update: Update) -> None:
        """Let an update wait for the reader."""
        last = self.newest.get(update.request)
        if last is not None and self.items.qsize() >= BEHIND:
            before = last.update
            last.update = Update(before.request, before.ids + update.ids, before.text + update.text, update.finish)
        else:
            self.newest[update.request] = Waiting(update)
            self.items.put_nowait(self.newest[update.request])

    def end(self, error: RequestError) -> None:
        """End the exchange with an error, which the reader gets after the updates that wait already."""
        self.items.put_nowait(error)

    async def next(self) -> Update:
        """Return the next update; raises the RequestError that ends it all, or 408 for a reader too far behind."""
        item = await self.items.get()
        if isinstance(item, RequestError):
            raise item
        if self.newest.get(item.update.request) is item:
            del self.newest[item.update.request]
        if time.monotonic() - item.since > LAG:
            raise _too_slow()
        return item.update


async def leave(http: web.Request, response: web.StreamResponse, closing: bytes) -> None:
    """Write the end of a stream, wait up to `GRACE` seconds until the reader has taken everything, and hang up."""
    logger.info("a stream is not read, and ends")
    # Writing fills the transport's buffer at once. Waiting for the client could last for ever, so it is a task.
    writing, end = asyncio.ensure_future(response.write_eof(closing)), time.monotonic() + GRACE
    await asyncio.sleep(0)
    while http.transport is not None and http.transport.get_write_buffer_size() and time.monotonic() < end:
        await asyncio.sleep(0.02)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    _cut(http)


def _too_slow() -> RequestError:
    return RequestError(f"the answer was not read: its reader is more than {LAG:g} seconds behind", None, 408,
                        "slow_reader")  # fmt: skip


async def stream(http: web.Request, exchange: Exchange, reply: Reply) -> web.StreamResponse:
    """Send an exchange's events, the first at once, since the request is checked and in the queue.

    What fails from here on becomes an error event, never a quiet end. While nothing comes, comments tell client and
    proxies that the connection lives.
    """
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    try:
        await response.prepare(http)
        try:
            await _send_events(response, exchange, reply)
            closing = b"".join(map(sse, reply.closing()))
        except ConnectionResetError:
            raise
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("a stream failed")
                error = RequestError(f"{type(error).__name__} in the server", None, 500)
            closing = b"".join(map(sse, reply.failure(error)))
            if error.code == "slow_reader":
                exchange.unread = closing + reply.end
                return response
        await _written(response.write_eof(closing + reply.end))
    except ConnectionResetError:
        logger.debug("a client hung up on its stream")
    except RequestError:  # it has all its text, but does not take the end of it
        _cut(http)
    return response


async def _send_events(response: web.StreamResponse, exchange: Exchange, reply: Reply) -> None:
    events = reply.opening()
    while True:
        if events:
            await _written(response.write(b"".join(map(sse, events))))
        if reply.done:
            return
        try:
            async with asyncio.timeout(KEEP_ALIVE):
                update = await exchange.next()
        except TimeoutError:
            events = []
            await _written(response.write(b": keep-alive\n\n"))
        else:
            events = reply.take(update)


async def _written(writing: Any) -> None:
    """Wait for a write; raises RequestError if the client reads nothing for `LAG` seconds."""
    try:
        async with asyncio.timeout(LAG):
            await writing
    except TimeoutError:
        raise _too_slow() from None


def _cut(http: web.Request) -> None:
    if http.transport is not None:
        http.transport.abort()


async def delivered(http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Send a whole answer, if it is not sent yet, and return it; cut off a client that does not read it in time."""
    try:
        if isinstance(response, web.Response):
            await response.prepare(http)
            await _written(response.write_eof())
    except RequestError:
        logger.info("an answer is not read, and its connection ends")
        _cut(http)
    except ConnectionResetError:
        logger.debug("a client hung up on its answer")
    return response


@web.middleware
async def delivering(http: web.Request, handler: Any) -> web.StreamResponse:
    """Send the answer of any route by `delivered`."""
    return await delivered(http, await handler(http))
