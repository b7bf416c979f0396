"""Bodies of requests, however slowly they come and whatever is in them: read within a time and a memory, then parsed.

The bytes of all bodies under way are bounded too, since many clients who each send half a body and fall silent would
otherwise fill the memory. Large bodies are parsed by a thread of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import ClientPayloadError, http_exceptions, web

from minispec.request import RequestError, one_line
from minispec.serve.parse import parse_json

MAX_BODY = 16 * 2**20  # bytes of one HTTP body, after decompression
MAX_BODIES = 32 * MAX_BODY  # of all bodies that are being read or parsed
INLINE_BODY = 2**16  # a larger one is parsed off the event loop
HEAD_TIMEOUT = 75.0  # seconds for a request's head to arrive, and for which an idle connection is kept
BODY_TIMEOUT = 60.0  # seconds for its body

Parsed = TypeVar("Parsed")


class Bodies:
    """What is being read and parsed."""

    def __init__(self) -> None:
        self.held = 0  # bytes
        self.thread = ThreadPoolExecutor(1, "bodies")

    async def read(self, http: web.Request, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
        """Read and parse a body; RequestError 400 if it is broken on any level, 408 if it is late, 503 for too many."""
        told, packed = http.content_length, "Content-Encoding" in http.headers
        size = MAX_BODY if told is None or packed else min(told, MAX_BODY)  # a longer one is refused as it is read
        if self.held + size > MAX_BODIES:
            raise RequestError("too many large bodies are arriving at once", None, 503, "busy")
        self.held += size
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                raw = await http.read()
        except TimeoutError:
            late = f"the body did not arrive within {BODY_TIMEOUT:g} seconds"
            raise RequestError(late, None, 408, "slow_body") from None
        except (http_exceptions.HttpProcessingError, ClientPayloadError, web.RequestPayloadError) as error:
            raise RequestError(f"the body cannot be read: {one_line(error)}") from None
        else:
            work = lambda: parse(parse_json(raw))  # noqa: E731
            if len(raw) <= INLINE_BODY:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self.thread, work)
        finally:
            self.held -= size
