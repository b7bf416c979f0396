"""Bodies of requests: read within bounds of time and memory, then parsed.

The bytes of all bodies under way are bounded too, since many clients who each send half a body and fall silent would
otherwise fill the memory. Large bodies are parsed by a thread of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import ClientPayloadError, compression_utils, http_exceptions, web

from minispec.request import RequestError, one_line, short
from minispec.serve.parse import parse_json

MAX_BODY = 16 * 2**20  # bytes of one HTTP body, as it comes and after decompression
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
        """Read and parse a body; RequestError 400 if it is broken on any level, 408 if it is late, 503 for too many.

        RequestError 413 if it is too long once it is decompressed, 415 if it cannot be decompressed here.
        """
        encoding = http.headers.get("Content-Encoding", "").strip().lower() or "identity"
        told, packed, unpack = http.content_length, encoding != "identity", _unpacker(encoding)
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
            work = lambda: parse(parse_json(unpack(raw)))  # noqa: E731
            if len(raw) <= INLINE_BODY and not packed:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self.thread, work)
        finally:
            self.held -= size


def _unpacker(encoding: str) -> Callable[[bytes], bytes]:
    """Return what undoes a Content-Encoding; RequestError 415 if nothing does here."""
    if encoding == "identity":
        return bytes
    if encoding in ("gzip", "x-gzip"):
        return lambda raw: _unpacked(raw, compression_utils.ZLibDecompressor("gzip"))
    if encoding == "deflate":  # some clients leave out the header that it should have
        return lambda raw: _unpacked(raw, compression_utils.ZLibDecompressor(
            "deflate", suppress_deflate_header=bool(raw) and raw[0] & 15 != 8))  # fmt: skip
    if encoding == "br" and compression_utils.HAS_BROTLI:
        return lambda raw: _unpacked(raw, compression_utils.BrotliDecompressor())
    if encoding == "zstd" and compression_utils.HAS_ZSTD:
        return lambda raw: _unpacked(raw, compression_utils.ZSTDDecompressor())
    wrong = f"must be gzip, deflate, br or zstd, got {short(encoding)}"
    if encoding in ("br", "zstd"):
        wrong = f"{encoding} needs a library that is not installed here: pip install 'minispec[compression]'"
    raise RequestError(f"Content-Encoding {wrong}", None, 415, "unsupported_encoding")


def _unpacked(raw: bytes, stream: Any) -> bytes:
    """Return a whole body decompressed by a `stream` of aiohttp's; RequestError 400 or 413 where that cannot be."""
    try:
        text = stream.decompress_sync(raw, MAX_BODY + 1)
        while stream.data_available and len(text) <= MAX_BODY:
            text += stream.decompress_sync(b"", MAX_BODY + 1 - len(text))
    except Exception as error:  # each library has errors of its own
        raise RequestError(f"the body cannot be decompressed: {one_line(error)}") from None
    if len(text) > MAX_BODY:
        raise RequestError(f"the body has more than {MAX_BODY} bytes once it is decompressed", None, 413)
    return text
