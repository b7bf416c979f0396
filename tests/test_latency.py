"""benchmarks/latency.py against a server whose delays are known."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.latency import Part, Sample, ask, order, table

FIRST, EACH = 0.15, 0.05


class Slow(BaseHTTPRequestHandler):
    """A stream whose first token takes FIRST seconds and whose next two events, of two tokens each, EACH per token."""

    def do_POST(self) -> None:
        """Stream five tokens, or refuse a prompt of one word."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["temperature"] == 0
        self.send_response(200 if " " in body["messages"][0]["content"] else 400)
        self.end_headers()
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for wait, text in ((FIRST, "a"), (2 * EACH, "bc"), (2 * EACH, "de")):
            time.sleep(wait)
            self.event({"choices": [{"delta": {"content": text}}]})
        time.sleep(FIRST)  # what comes after the last token is no token's time
        self.event({"choices": [], "usage": {"completion_tokens": 5}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, what: dict) -> None:
        """Send one event."""
        self.wfile.write(f"data: {json.dumps(what)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        """Be silent."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The slow server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_stream_is_timed_from_sending_to_its_first_and_to_its_last_token(url: str) -> None:
    best = min((ask(url, "hello there", 5) for _ in range(3)), key=lambda sample: sample.first)
    assert best.tokens == 5 and FIRST <= best.first < FIRST + 0.1
    assert EACH * 0.99 <= best.per_token < EACH + 0.03, "over the tokens after the first, and up to the last"
    with pytest.raises(RuntimeError, match="400"):
        ask(url, "hello", 5)


def test_the_servers_take_turns_and_parts_of_a_kind_are_one_row() -> None:
    assert order(["on", "off"], [1, 8], 2) == [(1, "on"), (1, "off"), (1, "off"), (1, "on"),
                                (8, "on"), (8, "off"), (8, "off"), (8, "on")]  # fmt: skip
    assert order(["on", "dp2", "tp2"], [4], 2) == [(4, kind) for kind in ("on", "dp2", "tp2", "tp2", "dp2", "on")]
    sample = Sample(first=0.1, per_token=0.02, tokens=11, began=5.0, ended=5.5)
    slower = sample._replace(first=0.3, per_token=None, tokens=1, began=7.0, ended=7.5)
    lines = table([Part(1, "on", [sample]), Part(1, "off", [sample]), Part(1, "on", [slower])]).splitlines()
    assert lines[2] == "| 1 | on | 200 | 298 | 20.0 | 20.0 | 12.0 | 2 |" and len(lines) == 4
    assert lines[3] == "| 1 | off | 100 | 100 | 20.0 | 20.0 | 22.0 | 1 |"
