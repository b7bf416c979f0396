"""Faults in a server behind a socket: what clients get, what /health says, and how the process ends.

The servers that are to end are processes of their own, all started together; `faulty.py` is their drafter.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import free_port, wait_until
from faulty import BREAK_CUDA, COMPILE, COMPILING, HANG, HANG_WITH_THE_INTERPRETER, SLOW
from test_llm import CONFIG
from test_server import Running, await_health, chat, events, launch, native, slow_steps

TESTS = Path(__file__).parent
TIMEOUT = 1.5


class Child:
    """A server in a process of its own, on a model of random weights."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        flags = ["--model", str(folder), "--port", str(self.port), "--load-format", "dummy", "--device", "cpu"]
        flags += ["--speculative-algorithm", "faulty:Faulty", "--watchdog-timeout", str(TIMEOUT), "--page-size", "16"]
        flags += ["--disable-torch-compile", "--skip-server-warmup", "--max-total-tokens", "2048"]
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        self.process = launch(*flags, env={"PYTHONPATH": path})

    def get(self, path: str) -> tuple[int, Any]:
        """Return status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def ready(self) -> None:
        """Wait until it serves."""
        await_health(self.port, self.process)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
        """Return status, and the events of a stream or the one body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body).encode())
        answer = connection.getresponse()
        return answer.status, list(events(answer)) if body.get("stream") else [json.loads(answer.read())]

    def ended(self) -> tuple[int, str]:
        """Return exit code and log."""
        _, log = self.process.communicate(timeout=60)
        return self.process.returncode, log


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Child]]:
    folder = tmp_path_factory.mktemp("dummy")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    started = [Child(folder) for _ in range(3)]
    yield started
    for child in started:
        child.process.kill()
        child.process.communicate()


def wish(first: int, count: int = 30) -> dict[str, Any]:
    """Return a body of /generate whose prompt begins with a token that `faulty.py` knows."""
    return {"input_ids": [first, 5, 6, 7], "sampling_params": {"max_new_tokens": count, "temperature": 0,
                                                               "ignore_eos": True}}  # fmt: skip


@pytest.mark.slow
def test_a_step_that_hangs_is_told_by_health_and_at_twice_the_timeout_the_process_ends(children: list[Child]) -> None:
    child = children[0]
    child.ready()
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        answer = pool.submit(child.post, "/generate", wish(COMPILE))
        while not answer.done():  # a compilation beyond all timeouts is no hang
            assert child.get("/health")[0] == 200
            time.sleep(0.1)
        assert answer.result()[0] == 200 and time.monotonic() - began > COMPILING > 2.25 * TIMEOUT
        began, seen = time.monotonic(), []
        answer = pool.submit(child.post, "/generate", {**wish(HANG), "stream": True})
        while not answer.done():
            try:
                answered = child.get("/health")
                seen.append((time.monotonic() - began, *answered))
            except OSError:  # it ends
                break
            time.sleep(0.05)
        received = answer.result()[1]
    code, log = child.ended()
    assert code == 1 and time.monotonic() - began > 2 * TIMEOUT
    assert received[-1] == "[DONE]" and received[-2]["error"]["code"] == "engine_failed"
    assert len(received) > 2, "tokens came before the hang"
    status = {state["status"]: at for at, _, state in reversed(seen)}
    assert set(status) >= {"ready", "hung"} and TIMEOUT < status["hung"]
    assert all((code == 200) == (state["status"] == "ready") for _, code, state in seen)
    assert log.count("most recent call first") >= 3 and 'faulty.py", line' in log and "in draft" in log


def test_a_step_that_hangs_with_the_interpreter_s_lock_ends_the_process_too(children: list[Child]) -> None:
    child = children[1]
    child.ready()
    began = time.monotonic()
    sock = socket.create_connection(("127.0.0.1", child.port))
    raw = json.dumps(wish(HANG_WITH_THE_INTERPRETER)).encode()
    sock.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    code, log = child.ended()
    assert code == 1 and time.monotonic() - began > 2 * TIMEOUT
    assert "Timeout (" in log and 'faulty.py", line' in log and "in draft" in log
    sock.close()


def test_an_error_of_cuda_ends_the_process_after_everybody_was_told(children: list[Child]) -> None:
    child = children[2]
    child.ready()
    bodies = {"/generate": wish(SLOW, 200),
              "/v1/completions": {"prompt": [SLOW, 5, 6], "max_tokens": 200, "ignore_eos": True}}  # fmt: skip
    asked = [(path, stream) for path in bodies for stream in (True, False)]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(child.post, path, {**bodies[path], "stream": stream}) for path, stream in asked]
        wait_until(lambda: child.get("/server_info")[1]["internal_states"][0]["num_running_reqs"] == len(asked))
        futures.append(pool.submit(child.post, "/generate", wish(BREAK_CUDA)))
        answers = [future.result() for future in futures]
    for (_, stream), (status, received) in zip([*asked, ("", False)], answers, strict=True):
        if stream:
            assert status == 200 and received[-1] == "[DONE]" and received[-2]["error"]["code"] == "engine_failed"
        else:
            assert status == 503 and received[0]["error"]["code"] == "engine_failed"
    code, log = child.ended()
    assert code == 1 and "illegal memory access" in log.splitlines()[-1]


# ---- faults that a server survives ----------------------------------------------------------------------------------


BODIES = {
    "/generate": native(max_new_tokens=100, ignore_eos=True),
    "/v1/completions": {"prompt": "Once", "max_tokens": 100, "temperature": 0, "ignore_eos": True},
    "/v1/chat/completions": chat(max_tokens=100, temperature=0, ignore_eos=True),
}


def assert_error(answer: Any, stream: bool, says: str) -> None:
    """An error event at the end of a stream, or a 500."""
    if stream:
        received = answer[0]
        assert received[-1] == "[DONE]"
        error = received[-2]["error"]
    else:
        status, body, headers = answer
        error = body["error"]
        assert status == 500 and headers["x-should-retry"] == "false"
    assert error["type"] == "server_error" and says in error["message"] and "made to fail" not in error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("place", ["launch", "collect"])
def test_a_step_that_raises_is_an_error_in_every_dialect(
    served: Running, monkeypatch: pytest.MonkeyPatch, path: str, place: str
) -> None:
    truth = served.ok("/generate", native())["output_ids"]
    engine = served.server.engine.llm.scheduler.engine
    real, calls = getattr(engine, place), []

    def broken(*given: Any, **how: Any) -> Any:
        calls.append(place)
        if len(calls) in (4, 8):  # one for the stream, one for the answer, which follows it
            raise RuntimeError("made to fail")
        return real(*given, **how)

    monkeypatch.setattr(engine, place, broken)
    assert_error(served.stream(path, BODIES[path]), True, "RuntimeError")
    calls[:] = [place] * 4
    assert_error(served.call(path, BODIES[path]), False, "RuntimeError")
    assert served.ok("/generate", native())["output_ids"] == truth and served.call("/health")[0] == 200
    served.idle()


HOW = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 5}, "masked": {"regex": "[a-z ]+"}}


@pytest.mark.parametrize(("path", "how"), zip(BODIES, HOW.values(), strict=True), ids=HOW)
def test_nan_is_an_error_in_every_dialect_and_a_neighbour_s_text_is_exact(
    served: Running, path: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = served.server.engine.llm.scheduler
    neighbour = native(max_new_tokens=400, ignore_eos=True)
    truth = served.ok("/generate", neighbour)["output_ids"]
    hurry = slow_steps(served, monkeypatch, 0.02)
    served.call("/flush_cache", {})
    weight = scheduler.engine.model.embed_tokens.weight
    token = served.ok("/tokenize", {"prompt": " zebra", "add_special_tokens": False})["tokens"][-1]
    text = "Once upon a time " * 30 + "zebra, and then"
    body = {"/generate": {"text": text, "sampling_params": {"max_new_tokens": 9, **{
                {"seed": "sampling_seed"}.get(k, k): v for k, v in how.items()}}},
            "/v1/completions": {"prompt": text, "max_tokens": 9, **how},
            "/v1/chat/completions": chat(text, max_tokens=9, **how)}[path]  # fmt: skip
    with torch.inference_mode():
        kept = weight[token].clone()
        weight[token] = torch.nan
    try:
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(served.ok, "/generate", neighbour)
            served.wait(lambda s: s["num_running_reqs"] == 1)
            assert_error(served.stream(path, body), True, "NaN")
            assert_error(served.call(path, body), False, "NaN")
            assert not beside.done()
            hurry.set()
            assert beside.result()["output_ids"] == truth
    finally:
        with torch.inference_mode():
            weight[token] = kept
    assert not any(bool(pool.isnan().any()) for pool in scheduler.kv.pools)
    assert served.call(path, body)[0] == 200
    served.idle()
