"""Users of locust that stream chats and completions; every stream must be whole. Run by `run.py`."""

from __future__ import annotations

import json

from locust import HttpUser, between, task


class Reader(HttpUser):
    """One who asks, reads to the end, and asks again."""

    wait_time = between(0.0, 0.2)

    @task
    def chat(self) -> None:
        """Stream a chat."""
        self._read("/v1/chat/completions", {"messages": [{"role": "user", "content": "Name three rivers."}]})

    @task
    def complete(self) -> None:
        """Stream a completion."""
        self._read("/v1/completions", {"prompt": "The longest river is"})

    def _read(self, path: str, body: dict) -> None:
        """Read a stream; it fails unless it ends with a reason, the usage and [DONE]."""
        wish = {"model": "default", "max_tokens": 16, "stream": True, "stream_options": {"include_usage": True}, **body}
        with self.client.post(path, json=wish, stream=True, catch_response=True) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: ")]
            events = [json.loads(line) for line in lines[:-1]]
            reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
            if lines[-1:] != [b"[DONE]"] or reasons[-1] is None or not events[-1]["usage"]["completion_tokens"]:
                answer.failure("the stream is not whole")
