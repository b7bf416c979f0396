"""What docs/reliability.md promises of load, of clients who are slow, silent or gone, and of the end of a server."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import free_port, wait_until
from test_server import LONG, Running, await_health, events, launch, native, no_model, options, ready, slow_steps

from benchmarks.soak import Soak, rss, spread, wishes
from minispec.config import Config
from minispec.serve import bodies, streams

SOAK_SECONDS = float(os.environ.get("MINISPEC_SOAK_SECONDS", "8"))  # 120 is what a release is tested with
SERVED = QUEUE = {"max_queued_requests": 16, "max_total_tokens": 320, "enable_metrics": False}  # too few pages for four


def url(served: Running) -> str:
    return f"http://127.0.0.1:{served.port}"


# ---- load ------------------------------------------------------------------------------------------------------------


def test_256_clients_on_a_queue_of_16_get_their_own_text_or_a_refusal_before_any_tokenizer_call(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def storm() -> Soak:
        async with Soak(url(served), wishes(8, 110)) as clients:
            await clients.alone()
            tokenizer = served.server.engine.llm.tokenizer
            encode = tokenizer.encode
            monkeypatch.setattr(tokenizer, "encode", lambda *a, **k: encoded.append(a[0]) or encode(*a, **k))
            hurry = slow_steps(served, monkeypatch)
            watching = asyncio.ensure_future(clients.watch(0.02))
            asking = [asyncio.ensure_future(clients.good(i % 8)) for i in range(256)]
            while clients.counts["refused"] < 100 and not all(one.done() for one in asking):
                await asyncio.sleep(0.02)
            hurry.set()
            await asyncio.gather(*asking)
            clients.over = True
            await watching
            stats.update(await clients.idle())
            return clients

    encoded: list[str] = []
    stats: dict[str, Any] = {}
    clients = asyncio.run(storm())
    assert not clients.wrong, clients.wrong[:3]
    counts = clients.counts
    assert counts["good"] + counts["refused"] == 256 and counts["good"] >= 10 and counts["refused"] >= 100
    assert len(encoded) == counts["good"], "who is refused costs no tokenizing"
    assert stats["total_retractions"] > 0, "the pool was too small"
    assert len(clients.seconds["health"]) > 5 and max(clients.seconds["health"]) < 30
    print("health:", spread(clients.seconds["health"]))


@pytest.mark.slow
def test_clients_cut_at_random_moments_leave_nothing_running_and_no_memory_taken(
    tiny: Path, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rounds() -> None:
        async with Soak(url(served), wishes(12, 60), seed=1) as clients:
            for _ in range(10):
                await asyncio.gather(*(clients.cut() for _ in range(200)))
                stats = await clients.idle()
                assert stats["kv_pages_total"] == pages
                assert served.server.admitted == 0 == served.server.bodies.held
                assert not served.server.exchanges and not served.server.routes
                memory.append(rss() / 2**20)

    monkeypatch.setattr(served.server, "config", Config(**options(tiny, **{**QUEUE, "max_queued_requests": 512})))
    scheduler, where = served.server.engine.llm.scheduler, Counter()
    end = scheduler._end

    def ended(request: Any, finish: Any, ids: Any = ()) -> None:
        if finish.kind == "abort":
            queued = "waiting" if not request.slot else "running" if request in scheduler.running else "prefilling"
            where[queued] += 1
        end(request, finish, ids)

    monkeypatch.setattr(scheduler, "_end", ended)
    pages, memory = served.stats()["kv_pages_total"], []
    slow_steps(served, monkeypatch, 0.02)  # so that some are cut while they run
    asyncio.run(rounds())
    print("cut:", where, "MiB:", [round(size) for size in memory])
    assert where["waiting"] > 100 and where["running"] > 20
    assert min(memory[-3:]) - memory[1] < 20, memory
    assert served.ok("/generate", native())["output_ids"]


@pytest.mark.slow
def test_a_short_soak_of_everything_at_once(served: Running) -> None:
    async def run() -> Soak:
        async with Soak(url(served), wishes(12, 40), seed=2) as clients:
            await clients.alone()
            await clients.run(SOAK_SECONDS)
            await clients.idle()
            return clients

    clients = asyncio.run(run())
    assert not clients.wrong, clients.wrong[:3]
    assert all(clients.counts[kind] for kind in ("good", "cut", "hostile", "aborted or finished")), clients.counts
    assert max(clients.seconds["health"]) < 30


def test_a_long_text_is_tokenized_while_others_are_answered(served: Running) -> None:
    text, looks = "0123456789" * 60_000, 0  # a slow one for the tokenizer
    thread = threading.Thread(target=served.server.engine.llm.tokenizer.encode, args=(text,))
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        looks += 1
    assert looks > 20, "the interpreter is not held for a whole text"


def test_a_request_that_takes_too_long_ends_with_a_reason(
    tiny: Path, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server, "config", Config(**options(tiny, **QUEUE, request_timeout=1.0)))
    slow_steps(served, monkeypatch)
    status, answer, _ = served.call("/generate", native(**LONG))
    assert (status, answer["error"]["code"]) == (504, "timeout")
    received, _ = served.stream("/generate", native(**LONG))
    assert received[-2]["error"]["code"] == "timeout" and received[-1] == "[DONE]"
    served.idle()


# ---- slow and silent clients -----------------------------------------------------------------------------------------


def test_silent_clients_are_let_go_in_head_and_body(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minispec.server.HEAD_TIMEOUT", 0.3)
    monkeypatch.setattr(bodies, "BODY_TIMEOUT", 0.3)
    with Running(Config(port=0, log_level="error"), no_model) as running:
        for sent in (b"", b"POST /abort_request HTT", b"POST /abort_request HTTP/1.1\r\nHost: localhost\r\nX-A: "):
            with socket.create_connection(("127.0.0.1", running.port), timeout=30) as sock:
                sock.sendall(sent)
                assert sock.recv(1000) == b"", "the connection ends without a word"
        with socket.create_connection(("127.0.0.1", running.port), timeout=30) as sock:
            sock.sendall(b'POST /abort_request HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"rid": ')
            answer = sock.recv(1000)
            assert b" 408 " in answer.splitlines()[0] and b"slow_body" in answer
        assert running.server.bodies.held == 0
        monkeypatch.setattr(bodies, "BODY_TIMEOUT", 60)
        monkeypatch.setattr(bodies, "MAX_BODIES", 150)
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as sock:
            sock.sendall(b'POST /abort_request HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"rid": ')
            wait_until(lambda: running.server.bodies.held > 0)
            status, answer, _ = running.call("/abort_request", {"rid": "x" * 100})
            assert (status, answer["error"]["code"]) == (503, "busy")


def stalled(served: Running, body: dict[str, Any]) -> socket.socket:
    """Return a connection whose client has asked for much and reads nothing of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", served.port))
    raw = json.dumps(body).encode()
    sock.sendall(b"POST /generate HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    return sock


def test_a_reader_who_stops_reading_is_cut_off_and_finds_the_reason(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_buffers(served, monkeypatch)
    monkeypatch.setattr(streams, "LAG", 0.5)
    slow_steps(served, monkeypatch, 0.01)
    wish = {**native(**LONG, speculative=False), "stream": True, "trace": True}  # some 900 KB
    waiting: list[int] = []
    real = streams.Exchange.add
    monkeypatch.setattr(streams.Exchange, "add", lambda self, up: real(self, up) or waiting.append(self.items.qsize()))
    with stalled(served, wish) as sock:
        served.wait(lambda s: s["num_running_reqs"] == 1)
        exchange = next(iter(served.server.exchanges))
        wait_until(lambda: exchange.items.qsize() >= 2)  # nothing is taken any more
        served.idle()  # the engine has ended it, or is done with it
        rest = b"".join(iter(lambda: sock.recv(65536), b""))
    lines = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]
    assert json.loads(lines[-2][6:])["error"]["code"] == "slow_reader" and lines[-1] == b"data: [DONE]"
    assert max(waiting) <= streams.BEHIND, "what waits is bounded"
    with stalled(served, wish) as sock:  # and who never comes back is gone
        monkeypatch.setattr(streams, "GRACE", 0.1)
        served.wait(lambda s: s["num_running_reqs"] == 1)
        wait_until(lambda: not served.server.exchanges)
    assert served.server.admitted == 0


def small_buffers(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel keep little of what a stream's client does not read."""
    real = streams.web.StreamResponse.prepare

    async def prepare(self: Any, http: Any) -> Any:
        http.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return await real(self, http)

    monkeypatch.setattr(streams.web.StreamResponse, "prepare", prepare)


def test_a_reader_who_is_behind_gets_the_same_text_in_fewer_events(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = {"prompt": "Once upon", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    whole = served.ok("/v1/completions", wish)["choices"][0]["text"]
    small_buffers(served, monkeypatch)
    monkeypatch.setattr(streams, "BEHIND", 3)
    real = streams._send_events

    async def late(*given: Any) -> None:
        while served.server.engine.llm.scheduler.has_work or not given[1].items.qsize():
            await asyncio.sleep(0.02)
        await real(*given)

    monkeypatch.setattr(streams, "_send_events", late)
    received, _ = served.stream("/v1/completions", wish)
    assert "".join(event["choices"][0]["text"] for event in received[:-1]) == whole
    assert len(received) <= 5


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_after_a_signal_what_runs_finishes_and_new_work_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ready(Running(Config(**options(tiny, shutdown_timeout=120.0)))) as running:
        expected = running.ok("/generate", native(max_new_tokens=100))["text"]
        hurry = slow_steps(running, monkeypatch)
        with ThreadPoolExecutor(2) as pool:
            streamed = pool.submit(running.stream, "/generate", native(max_new_tokens=100, speculative=False))
            whole = pool.submit(running.call, "/generate", native(max_new_tokens=100, speculative=False))
            running.wait(lambda s: s["num_running_reqs"] == 2)
            drained = asyncio.run_coroutine_threadsafe(running.server.drain(asyncio.Event()), running.loop)
            for path, body in (("/generate", native()), ("/v1/chat/completions", b"{"), ("/tokenize", {"prompt": "a"})):
                status, answer, headers = running.call(path, body)
                assert (status, answer["error"]["code"]) == (503, "shutting_down") and headers["Retry-After"]
            status, answer, _ = running.call("/health")
            assert (status, answer["status"]) == (503, "shutting_down")
            assert running.call("/health_generate")[0] == 503 and running.call("/server_info")[0] == 200
            assert not drained.done(), "all this was while requests ran"
            hurry.set()
            assert streamed.result()[0][-2]["text"] == whole.result()[1]["text"] == expected
            drained.result(60)
            assert not running.server.exchanges


def test_when_the_time_to_finish_is_over_what_is_left_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = ready(Running(Config(**options(tiny, shutdown_timeout=0.2))))
    slow_steps(running, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        streamed = pool.submit(running.stream, "/generate", native(**LONG))
        running.wait(lambda s: s["num_running_reqs"] == 1)
        begun = time.monotonic()
        asyncio.run_coroutine_threadsafe(running.server.drain(asyncio.Event()), running.loop).result(30)
        assert running.server.exchanges and time.monotonic() - begun >= 0.2
        running.stop()
        received = streamed.result()[0]
    assert received[-2]["error"]["code"] == "shutting_down" and received[-1] == "[DONE]"


def threads() -> set[str]:
    """Return the names of the threads of this process that a server may have started."""
    return {thread.name for thread in threading.enumerate() if thread is not threading.main_thread()}


@pytest.mark.parametrize("fails", [False, True], ids=["served", "never loaded"])
def test_a_server_leaves_no_thread_and_no_port(fails: bool, tiny: Path) -> None:
    def build(config: Config, progress: Callable[[str], None]) -> Any:
        raise RuntimeError("made to fail")

    before = threads()
    running = Running(Config(**options(tiny)), *([build] if fails else []))
    if not fails:
        ready(running)
        assert running.call("/generate", native(regex="[ab]{3}"))[0] == 200
        assert running.call("/tokenize", {"prompt": "a" * 60_000})[0] in (200, 400)
    running.stop()
    wait_until(lambda: threads() <= before)
    with socket.create_server(("127.0.0.1", running.port)):
        pass


def test_a_process_finishes_what_runs_after_ctrl_c_and_leaves_no_file_process_or_port(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # so that compiled code can only be kept for the time being
    port = free_port()
    process = launch("--model", str(tiny), "--port", str(port), "--device", "cpu", "--disable-torch-compile",
                     "--shutdown-timeout", "120")  # fmt: skip
    try:
        connection = await_health(port, process)
        wish = {**native(temperature=1, max_new_tokens=400, ignore_eos=True), "stream": True}
        connection.request("POST", "/generate", json.dumps(wish).encode())
        stream = events(connection.getresponse())
        next(stream)
        process.send_signal(signal.SIGINT)
        other = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        status = 200
        with suppress(OSError):  # it may have finished and ended meanwhile
            while status == 200:  # the signal takes a moment
                other.request("GET", "/health")
                answer = other.getresponse()
                answer.read()
                status = answer.status
        assert status in (200, 503)
        *_, last, done = stream
        assert last["meta_info"]["completion_tokens"] == 400 and done == "[DONE]"
        assert process.wait(60) == 0
    finally:
        process.kill()
        _, log = process.communicate()
    assert "Traceback" not in log and list(tmp_path.iterdir()) == []
    assert not list(Path("/proc").glob(f"[0-9]*/task/{process.pid}")), "it is gone"
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_the_page_of_promises_names_tests_that_exist() -> None:
    here = Path(__file__).resolve().parent
    page = (here.parent / "docs" / "reliability.md").read_text("utf-8")
    defined = {name for path in here.glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 10 and named <= defined, named - defined
