"""The served path, over real sockets and with the real engine: what clients get, and what they cannot break.

The model is tiny and scripted: its LM head maps each token of `SCRIPT` to the next, so greedy text is a known cycle of
words, emoji and CJK, while its two random layers make sampled text depend on the whole context.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from clients.scripted import llama
from conftest import free_port, wait_until
from json_schema import is_valid
from transformers import AutoTokenizer

from minispec.config import Config
from minispec.replicas.workers import Replicas
from minispec.request import Request, RequestError, SamplingParams
from minispec.serve import fields, parse, streams
from minispec.serve.messages import parse_message
from minispec.serve.responses import parse_response
from minispec.server import Build, Server, _prepare, build_llm

PIECES = "Once upon a time 😀 there was 中 文 语 한 🎉 é ü ∑ good people who lived by some river near".split(" ")
PARSERS: dict[str, Callable[[dict[str, Any]], parse.Job]] = {
    "/v1/completions": lambda body: parse.parse_completion(body, {}), "/generate": parse.parse_generate,
    "/v1/chat/completions": lambda body: parse.parse_chat(body, {}),
    "/v1/messages": lambda body: parse_message(body, {}),
    "/v1/responses": lambda body: parse_response(body, {}),
}  # fmt: skip
LONG = {"max_new_tokens": 900, "temperature": 0, "ignore_eos": True}


# ---- the model and the server ----------------------------------------------------------------------------------------


def script(tokenizer: Any) -> list[int]:
    """Return ids of a text in which no token occurs twice, so that each token has one successor."""
    ids: list[int] = []
    for piece in PIECES:
        new = tokenizer.encode(" " + piece, add_special_tokens=False)
        if len(set(new)) == len(new) and not set(new) & set(ids):
            ids += new
    return ids


def scripted(demo_folder: Path, folder: Path, ids: list[int]) -> Path:
    """Write a two-layer Llama with the default model's tokenizer, in whose greedy text each of the ids follows the one
    before; return its folder."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    llama(len(tokenizer), 1024, [ids], 1.5).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_folder / name, folder)
    (folder / "generation_config.json").write_text("{}")
    return folder


def options(tiny: Path, **more: Any) -> dict[str, Any]:
    return {
        "model_path": str(tiny), "served_model_name": "org/tiny", "device": "cpu", "dtype": "float32", "port": 0,
        "disable_torch_compile": True, "speculative_algorithm": "NGRAM", "page_size": 16, "max_running_requests": 4,
        "max_queued_requests": 8, "max_total_tokens": 8192, "enable_cache_report": True,
        "enable_metrics": True, **more,
    }  # fmt: skip


class Running:
    """A server in a thread of its own, with the little HTTP that the tests need."""

    def __init__(self, config: Config, build: Build = build_llm) -> None:
        started = threading.Event()

        async def live() -> None:
            self.loop, self.quit = asyncio.get_running_loop(), asyncio.Event()
            self.server = Server(config, build)
            await self.server.start()
            started.set()
            await self.quit.wait()
            await self.server.stop()
            engine = self.server.engine
            engine.join(30)  # which a step of a busy machine may outlast `Server.stop`
            self.ended = engine._cluster is None if isinstance(engine, Replicas) else not engine.is_alive()

        self.thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
        self.thread.start()
        assert started.wait(60)
        self.port = self.server.port

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.quit.set)
        self.thread.join(60)
        assert not self.thread.is_alive() and self.ended

    def call(
        self, path: str, body: Any = None, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """Return (status, body as JSON or text, headers); a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, raw, headers or {})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json else text, answer.headers

    def ok(self, path: str, body: Any = None) -> Any:
        status, value, _ = self.call(path, body)
        assert status == 200, value
        return value

    def stats(self) -> dict[str, Any]:
        return self.ok("/server_info")["internal_states"][0]

    def stream(self, path: str, body: Any, read: int | None = None) -> tuple[list[Any], socket.socket]:
        """Return the events of a stream, all or the first `read`, and the open connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps({**body, "stream": True}).encode())
        sock = connection.sock
        answer = connection.getresponse()
        assert answer.status == 200 and answer.headers["Content-Type"] == "text/event-stream", answer.read()
        return list(events(answer, read)), sock

    def open(self, path: str, body: Any) -> socket.socket:
        """Send a request and leave the connection open, unread."""
        raw = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        return sock

    def wait(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 60) -> dict[str, Any]:
        """Return the stats once they satisfy the condition."""
        end = time.monotonic() + seconds
        while not condition(stats := self.stats()):
            assert time.monotonic() < end, stats
            time.sleep(0.02)
        return stats

    def idle(self) -> dict[str, Any]:
        """Return the stats once nothing runs; every page must then be free or cached."""
        stats = self.wait(lambda s: s["num_running_reqs"] == s["num_queue_reqs"] == 0)
        assert stats["kv_pages_owned"] == 0
        assert stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages_total"] > 0
        return stats


def events(answer: Any, read: int | None = None) -> Iterator[Any]:
    """Yield the events of a server-sent stream; "[DONE]" as a string."""
    count = 0
    while (line := answer.readline()) and (read is None or count < read):
        if line.startswith(b"data: "):
            count += 1
            yield "[DONE]" if line[6:].strip() == b"[DONE]" else json.loads(line[6:])


def ready(running: Running) -> Running:
    end = time.monotonic() + 180
    while (answer := running.call("/health"))[0] != 200:
        assert time.monotonic() < end and answer[1]["status"] == "starting", answer
        time.sleep(0.05)
    return running


def no_model(config: Config, progress: Callable[[str], None]) -> Any:
    """Build nothing, for servers whose model is not asked."""
    raise RuntimeError("no model is needed for this")


def slow_steps(served: Running, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> threading.Event:
    """Let decode steps take so long that a request lasts for seconds, until the event that is returned is set."""
    engine, hurry = served.server.engine.llm.scheduler.engine, threading.Event()
    real = engine.launch
    monkeypatch.setattr(engine, "launch", lambda *given, **how: (hurry.wait(seconds), real(*given, **how))[1])
    return hurry


@pytest.fixture
def hurry(served: Running, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The event until which the server leaves the time to do something between a request's first token and its last."""
    return slow_steps(served, monkeypatch)


def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="None", max_retries=0)


def chat(text: str = "Tell me something", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 40, **more}


def native(text: str = "Once upon", **params: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 12, **params}}


# ---- what clients get ------------------------------------------------------------------------------------------------


def test_openai_client_streams_the_text_it_gets_whole(served: Running, tiny: Path) -> None:
    api = client(served)
    messages = [*chat()["messages"], {"role": "assistant", "content": "Once upon"}]
    for more in ({"temperature": 0}, {"temperature": 1.3, "seed": 7}):
        wish = {"model": "org/tiny", "messages": messages, "max_tokens": 90, **more}
        wish["extra_body"] = {"continue_final_message": True}
        whole = api.chat.completions.create(**wish)
        chunks = list(api.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content and len(text) > 50
        usage, same = chunks[-1].usage, whole.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (same.prompt_tokens, same.completion_tokens)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 90 >= usage.completion_tokens
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
        assert all(c.id == chunks[0].id for c in chunks)
        if more["temperature"] == 0:
            tokenizer = AutoTokenizer.from_pretrained(tiny)
            assert tokenizer.decode(script(tokenizer)) in text and "😀" in text
            assert "�" not in text[:-1]  # the last character may be cut by max_tokens


@pytest.mark.usefixtures("timeless")
def test_native_text_is_the_decoding_of_its_ids_and_speculation_is_reported(served: Running, tiny: Path) -> None:
    result = served.ok("/generate", native(max_new_tokens=120))
    assert result["text"] == AutoTokenizer.from_pretrained(tiny).decode(result["output_ids"])
    meta = result["meta_info"]
    assert meta["completion_tokens"] == len(result["output_ids"]) == 120
    assert meta["finish_reason"] == {"type": "length", "length": 120}
    assert meta["spec_accept_length"] > 1 and sum(meta["spec_accept_histogram"]) == meta["spec_verify_ct"]
    received, _ = served.stream("/generate", native(max_new_tokens=120))
    assert received[-1] == "[DONE]" and received[-2]["text"] == result["text"]
    assert all(b["text"].startswith(a["text"]) for a, b in zip(received[:-1], received[1:-1], strict=False))


def test_a_batch_answers_in_the_order_it_was_sent(served: Running) -> None:
    lengths = [9, 3, 14, 1, 6, 2]
    texts = [f"Story {i}" for i in range(len(lengths))]
    params = [{"temperature": 1.5, "sampling_seed": i, "max_new_tokens": n} for i, n in enumerate(lengths)]
    batch = served.ok("/generate", {"text": texts, "sampling_params": params, "rid": [f"b{i}" for i in range(6)]})
    alone = [served.ok("/generate", {"text": t, "sampling_params": p}) for t, p in zip(texts, params, strict=True)]
    assert [r["output_ids"] for r in batch] == [r["output_ids"] for r in alone]
    assert [len(r["output_ids"]) for r in batch] == lengths and len({str(r["output_ids"]) for r in batch}) == 6
    assert [r["meta_info"]["id"] for r in batch] == [f"b{i}" for i in range(6)]


def test_concurrent_requests_with_mixed_parameters_equal_each_alone(served: Running) -> None:
    mixed = [
        native(), native("x", max_new_tokens=1), native("y", max_new_tokens=2, temperature=2, sampling_seed=1),
        native("z", temperature=1, top_p=0.7, sampling_seed=2, frequency_penalty=1.5, max_new_tokens=25),
        native("w", temperature=1, top_k=5, sampling_seed=3, repetition_penalty=1.3, min_new_tokens=5),
        native("v", logit_bias={"500": 100}, max_new_tokens=5), native("u", stop=["time"], max_new_tokens=70),
        native("t", temperature=1e-4, min_p=0.2, sampling_seed=4, presence_penalty=-2),
    ]  # fmt: skip
    alone = [served.ok("/generate", wish)["output_ids"] for wish in mixed]
    with ThreadPoolExecutor(len(mixed)) as pool:
        together = list(pool.map(lambda wish: served.ok("/generate", wish)["output_ids"], mixed))
    assert together == alone and alone[5] == [500] * 5
    served.idle()


def test_a_repeated_prompt_is_cached_until_the_flush(served: Running) -> None:
    wish = {"prompt": "word " * 60, "max_tokens": 4}
    served.ok("/v1/completions", wish)
    details = served.ok("/v1/completions", wish)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 32
    assert served.ok("/flush_cache") == "Cache flushed.\n"
    assert served.stats()["kv_pages_cached"] == 0
    assert served.ok("/v1/completions", wish)["usage"]["prompt_tokens_details"] is None


def test_models_and_info_speak_of_the_served_model(served: Running, tiny: Path) -> None:
    card = served.ok("/v1/models")["data"][0]
    assert card["id"] == "org/tiny" and card["max_model_len"] == 1024
    assert served.ok("/v1/models/org/tiny") == card
    assert served.call("/v1/models/org/other")[0] == 404
    for path in ("/model_info", "/get_model_info"):
        assert served.ok(path)["model_path"] == str(tiny) and served.ok(path)["model_type"] == "llama"
    taken = served.ok("/server_info")
    parts, usage = taken["memory_bytes"], taken["internal_states"][0]["memory_usage"]
    assert parts["target_weights"] > 0 < parts["target_kv_pool"] and parts["graphs_and_workspace"] is None
    assert usage["token_capacity"] == taken["max_total_num_tokens"] and usage["graph"] is None
    assert usage["kvcache"] == pytest.approx((parts["target_kv_pool"] + parts["draft_kv_pool"]) / 2**30, abs=1e-3)
    for path in ("/server_info", "/get_server_info"):
        info = served.ok(path)
        assert info["page_size"] == 16 and "api_key" not in info and info["internal_states"][0]["kv_pages_total"] > 0
    assert served.call("/health_generate")[0] == served.call("/health")[0] == 200


def test_any_model_name_is_answered_by_the_one_model_unless_the_server_is_strict(
    served: Running, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (("/v1/chat/completions", chat(max_tokens=1)), ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
             ("/generate", native(max_new_tokens=1)), ("/tokenize", {"prompt": "a"}),
             ("/detokenize", {"tokens": [5]}))  # fmt: skip
    own = ("org/tiny", str(tiny), "default", "", None)
    for path, body in asked:
        assert [served.call(path, {**body, "model": name})[0] for name in (*own, "gpt-4")] == [200] * 6
        assert served.call(path, {**body, "model": 7})[0] == 400
    assert served.ok(*asked[0])["model"] == "org/tiny"
    monkeypatch.setattr(served.server, "config", dataclasses.replace(served.server.config, strict_model_name=True))
    for path, body in asked:
        assert [served.call(path, {**body, "model": name})[0] for name in own] == [200] * 5
        status, answer, _ = served.call(path, {**body, "model": "gpt-4"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_tokenize_and_detokenize_are_inverse(served: Running) -> None:
    for prefix in ("", "/v1"):
        row = served.ok(prefix + "/tokenize", {"prompt": "good 😀 people"})
        assert row["count"] == len(row["tokens"]) > 3 and row["max_model_len"] == 1024
        assert served.ok(prefix + "/detokenize", {"tokens": row["tokens"]})["text"] == "good 😀 people"
    two = served.ok("/tokenize", {"prompt": ["good 😀 people", "x"]})
    assert two["tokens"][0] == row["tokens"] and two["count"][1] == 1
    assert served.call("/detokenize", {"tokens": [10**9]})[0] == 400


def test_every_path_is_described_and_takes_its_example(served: Running) -> None:
    described = served.ok("/openapi.json")
    routes = served.server.runner.app.router.routes()
    real = {(r.method.lower(), r.resource.canonical) for r in routes if r.method not in ("HEAD", "OPTIONS")}
    assert real == {(method, path) for path, methods in described["paths"].items() for method in methods}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            where = path.replace("{id}", "org/tiny")
            if "requestBody" not in operation:
                told = served.call(where.replace("{number}", "0"), None, method.upper())[0]
                assert told == (404 if path.startswith("/replicas") else 200), path  # this server has no replicas
                continue
            content = operation["requestBody"]["content"]["application/json"]
            example, name = content["example"], content["schema"]["$ref"].rpartition("/")[2]
            status, answer, _ = served.call(where, example, method.upper())
            assert status == 200, (path, answer)
            for required in described["components"]["schemas"][name].get("required", ()):
                status, answer, _ = served.call(where, {k: v for k, v in example.items() if k != required})
                assert status == 400 and f"{required} is required" in answer["error"]["message"]
    status, answer, _ = served.call("/v1/embeddings", {"model": "default", "input": "hi"})
    assert status == 404 and "/v1/embeddings" in answer["error"]["message"]
    named = re.findall(r"/[\w/.]+", answer["error"]["message"])
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/openapi.json"} <= set(named)
    assert all(found in described["paths"] for found in named if found not in ("/v1/embeddings", "/openapi.json"))


@pytest.mark.usefixtures("timeless")
def test_loads_tokenizer_info_and_fingerprint(served: Running) -> None:
    once, params = [4027, 1980], {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}  # " Once upon"
    said = served.ok("/generate", {"input_ids": once, "sampling_params": params})["output_ids"]
    served.ok("/generate", {"input_ids": [*once, *said, *once], "sampling_params": params})  # repeats its own text
    load = served.ok("/v1/loads")["loads"][0]
    assert load["num_running_reqs"] == load["num_used_tokens"] == 0 and 0 < load["cache_hit_rate"] < 1
    assert load["max_total_num_tokens"] == 8192 and load["speculative"]["accept_length"] > 1
    assert "speculative" not in served.ok("/v1/loads?include=core")["loads"][0]
    assert served.call("/v1/loads?include=nonsense")[1]["error"]["param"] == "include"
    info = served.ok("/tokenizer_info")
    assert info["eos_token"] == "<|im_end|>" and "<|im_start|>" in info["chat_template"]
    chunk = served.stream("/v1/chat/completions", chat(max_tokens=1))[0][0]
    prints = {chunk["system_fingerprint"], served.ok("/v1/completions", {"prompt": "a"})["system_fingerprint"]}
    assert len(prints) == 1 and prints.pop().startswith("fp_")


def test_web_pages_of_named_origins_may_call_and_their_browsers_may_ask_without_a_key() -> None:
    page, asks = {"Origin": "https://a.example"}, {"Access-Control-Request-Method": "POST"}
    asks |= {"Access-Control-Request-Headers": "authorization,x-own"}
    answers: dict[str | None, Any] = {}
    for origins in (None, "https://a.example, http://localhost:3000", "*"):
        with Running(Config(port=0, log_level="error", api_key="secret", cors_origins=origins), no_model) as running:
            answers[origins] = [
                running.call("/v1/models", None, "OPTIONS", {**page, **asks}),
                running.call("/health", None, None, page),
                running.call("/v1/models", None, None, page),  # without a key: an error that the page may read
                running.call("/health", None, None, {"Origin": "https://evil.example"}),
            ]  # fmt: skip
    allow = "Access-Control-Allow-Origin"
    assert [(status, headers[allow]) for status, _, headers in answers[None]] == [
        (401, None), (403, None), (401, None), (403, None)]  # fmt: skip
    named, anyone = answers["https://a.example, http://localhost:3000"], answers["*"]
    own = "https://a.example"
    assert [(s, h[allow]) for s, _, h in named] == [(204, own), (503, own), (401, own), (403, None)]
    assert [(s, h[allow]) for s, _, h in anyone] == [(204, "*"), (503, "*"), (401, "*"), (503, "*")]
    assert named[0][2]["Access-Control-Allow-Headers"] == "authorization,x-own" and named[3][2]["Vary"] == "Origin"


@pytest.mark.usefixtures("timeless")
def test_a_prediction_is_drafted_from_and_its_figures_are_in_the_usage(served: Running, tiny: Path) -> None:
    script_of = AutoTokenizer.from_pretrained(tiny)
    expected, usages = script_of.decode(script(script_of)), []
    for wish in ({"prediction": {"type": "content", "content": [{"type": "text", "text": expected}]},
                  "return_spec_tokens_details": True}, {}):  # fmt: skip
        assert served.ok("/flush_cache")
        answer = served.ok("/v1/chat/completions", {**chat(max_tokens=len(script(script_of))), **wish})
        usages.append(answer["usage"])
        if wish:
            looked_up = answer["sglext"]["spec_tokens_details"]["spec_by_source"]["lookup"]
        texts = answer["choices"][0]["message"]["content"]
    details = usages[0]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 5 and details["rejected_prediction_tokens"] >= 0
    assert looked_up["spec_num_correct_drafts"] == details["accepted_prediction_tokens"], "it has no other drafter"
    assert "completion_tokens_details" not in usages[1] and texts
    chunks, _ = served.stream("/v1/chat/completions", {**chat(max_tokens=9), "stream_options": {"include_usage": True},
                                                       "prediction": {"type": "content", "content": expected},
                                                       "return_spec_tokens_details": True})  # fmt: skip
    assert chunks[-2]["usage"]["completion_tokens_details"] and chunks[-3]["sglext"]["spec_tokens_details"]
    error = served.call("/v1/chat/completions", chat(prediction={"type": "content", "content": "x" * 10**5}))[1]
    assert error["error"]["param"] == "prediction"


@pytest.mark.usefixtures("timeless")
def test_thresholds_change_while_the_server_runs_and_back(served: Running) -> None:
    wish = native(" ".join(PIECES) * 3, temperature=5, top_k=2, sampling_seed=4, max_new_tokens=100)
    state = lambda **args: served.call("/set_internal_state", {"server_args": args})  # noqa: E731
    exact = served.ok("/generate", wish)["output_ids"]
    prints = [served.ok("/v1/completions", {"prompt": "a", "max_tokens": 1})["system_fingerprint"]]
    name = "speculative_accept_threshold_single"
    assert state(**{name: 0.0})[:2] == (200, [True]) and served.ok("/server_info")[name] == 0
    assert served.stats()["avg_spec_accept_length"] == 0
    assert served.ok("/generate", wish)["output_ids"] != exact, "drafts are accepted whatever the noise says"
    prints.append(served.ok("/v1/completions", {"prompt": "a", "max_tokens": 1})["system_fingerprint"])
    for args, param in (({name: 7}, None), ({"page_size": 16}, "page_size"), ({name: "x"}, None), (3, None)):
        status, answer, _ = served.call("/set_internal_state", {"server_args": args})
        assert status == 400 and answer["error"]["param"] == (param or "server_args"), answer
    policy = served.server.engine.llm.scheduler.policy
    for adaptive in (False, True):
        assert (policy.adapts_from == 1) is not adaptive and state(speculative_adaptive=adaptive)[0] == 200
        assert (policy.adapts_from == 1) is adaptive
    assert state(**{name: 1.0})[0] == 200
    assert served.ok("/generate", wish)["output_ids"] == exact
    assert len(set(prints)) == 2
    assert served.ok("/v1/completions", {"prompt": "a", "max_tokens": 1})["system_fingerprint"] == prints[0]


def test_a_queued_stream_opens_at_once_and_is_kept_alive_and_its_failure_is_an_event(
    served: Running, hurry: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE", 0.05)
    held = served.open("/generate", {"text": ["x"] * 4, "sampling_params": LONG})
    served.wait(lambda s: s["num_running_reqs"] == 4)
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        raw = json.dumps(chat(stream=True, rid="waiting")).encode()
        sock.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        answer = sock.makefile("rb")
        assert b"200" in answer.readline()
        lines = iter(answer.readline, b"")
        assert b'"role":"assistant"' in next(line for line in lines if line.startswith(b"data: "))
        assert [next(line for line in lines if line.strip()) for _ in range(2)] == [b": keep-alive\n"] * 2
        assert served.stats()["num_queue_reqs"] == 1
        served.call("/abort_request", {"rid": "waiting"})
        rest = [line for line in lines if line.startswith(b"data: ")]
    assert json.loads(rest[0][6:])["error"]["code"] == "aborted" and rest[1:] == [b"data: [DONE]\n"]
    held.close()
    served.idle()


# ---- constrained output ----------------------------------------------------------------------------------------------


def test_an_answer_keeps_to_a_schema_and_what_cannot_be_used_is_named(served: Running) -> None:
    wanted = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": wanted, "strict": True}}
    choice = served.ok("/v1/chat/completions", chat(response_format=form, max_tokens=200))["choices"][0]
    assert choice["finish_reason"] == "stop" and is_valid(json.loads(choice["message"]["content"]), wanted, {})
    assert re.fullmatch("[ab]{3}", served.ok("/generate", native(regex="[ab]{3}"))["text"])
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(50):
        deep = {"type": "array", "items": deep}
    for field, value, said in (
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "not"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"multipleOf": 10**9}}}, "multipleOf"),
        ("ebnf", "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"', "too big"),
        ("regex", "(" * 10**4, "regex"), ("json_schema", json.dumps(deep) * 2, "JSON"),
    ):  # fmt: skip
        status, answer, _ = served.call("/v1/chat/completions", chat(**{field: value}))
        assert status == 400 and answer["error"]["param"] == field and said in answer["error"]["message"], answer
    stuck = native(regex="[ab]{3}", min_new_tokens=9, max_new_tokens=20)
    status, answer, _ = served.call("/generate", stuck)
    assert status == 400 and "min_tokens" in answer["error"]["message"]
    served.idle()


def test_nobody_waits_for_a_grammar_of_somebody_else(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = served.server.engine.llm.scheduler.engine.asked.grammars
    reached, free = threading.Event(), threading.Event()
    compile_as_it_is = grammars.compile

    def slow(grammar: Any) -> Any:
        reached.set()
        assert free.wait(30)
        return compile_as_it_is(grammar)

    monkeypatch.setattr(grammars, "compile", slow)
    answers: list[Any] = []
    asking = [threading.Thread(target=lambda: answers.append(served.ok("/generate", native(regex="[ab]{2}"))))
              for _ in range(3)]  # fmt: skip
    for thread in asking:
        thread.start()
    try:
        assert reached.wait(30)
        assert served.ok("/generate", native(max_new_tokens=3))["output_ids"]
        assert not answers
    finally:
        free.set()
        for thread in asking:
            thread.join(60)
    assert [re.fullmatch("[ab]{2}", answer["text"]) is not None for answer in answers] == [True] * 3


# ---- what clients cannot break ---------------------------------------------------------------------------------------


def test_no_field_of_a_wrong_type_gets_past_the_server_or_hurts_it(served: Running) -> None:
    components = served.ok("/openapi.json")["components"]["schemas"]
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "/v1/chat/completions": ("Chat", chat(max_tokens=1)), "/generate": ("Generate", native(max_new_tokens=1)),
        "/v1/completions": ("Completion", {"prompt": "a", "max_tokens": 1}), "/tokenize": ("Tokenize", {"prompt": "a"}),
        "/detokenize": ("Detokenize", {"tokens": [5]}), "/abort_request": ("Abort", {"rid": "nobody"}),
    }  # fmt: skip
    statuses = []
    for path, (kind, body) in bodies.items():
        for name in fields.acting(getattr(fields, kind)):
            for value in (None, True, -1, 1.5, "x", [], [[True]], [{"type": 1}], {"a": []}):
                status, answer, _ = served.call(path, {**body, name: value})
                statuses.append(status)
                if not is_valid(value, components[kind]["properties"][name], components):
                    assert status == 400 and answer["error"]["param"] in (name, "a", "type"), (name, value, answer)
                assert status in (200, 400), (path, name, value, answer)
    assert statuses.count(200) > 50 and statuses.count(400) > 300
    served.idle()


def test_errors_of_the_engine_name_the_client_s_own_field(served: Running) -> None:
    no_form = {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}
    tool = {"type": "function", "name": "clock"}  # of which the chat template knows nothing
    for path, body, param in (
        ("/v1/chat/completions", chat(max_tokens=None, max_completion_tokens=-2), "max_completion_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -2}, "max_tokens"),
        ("/generate", native(max_new_tokens=-2), "max_new_tokens"),
        ("/v1/responses", {"input": "a", "max_output_tokens": -2}, "max_output_tokens"),
        ("/v1/responses", {"input": "a", "text": no_form}, "text.format"),
        ("/v1/responses", {"input": "a", "tools": [tool]}, "tools"), ("/v1/chat/completions", chat(top_p=0), "top_p"),
        ("/v1/chat/completions", chat(min_tokens=-1), "min_tokens"), ("/v1/chat/completions", chat(stop=[""]), "stop"),
        ("/v1/chat/completions", chat(logit_bias={"1": 1e30}), "logit_bias"),
    ):  # fmt: skip
        status, answer, _ = served.call(path, body)
        assert (status, answer["error"]["param"]) == (400, param) and param in answer["error"]["message"], answer


def test_a_limit_beyond_the_context_is_clamped_unless_the_server_is_strict(
    served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = [500] * (served.ok("/server_info")["max_req_input_len"] - 3)
    bodies = {
        "/v1/completions": ({"prompt": prompt, "max_tokens": 32000}, "max_tokens"),
        "/generate": ({"input_ids": prompt, "sampling_params": {"max_new_tokens": 32000}}, "max_new_tokens"),
        "/v1/chat/completions": (chat(max_tokens=32000, stream=False), "max_tokens"),
        "/v1/responses": ({"input": "a", "max_output_tokens": 32000}, "max_output_tokens"),
        "/v1/messages": ({"messages": chat()["messages"], "max_tokens": 32000}, "max_tokens"),
    }  # fmt: skip
    limits = served.server.engine.front.facts.limits
    with caplog.at_level("INFO", "minispec"):
        for path, (body, _) in list(bodies.items())[:2]:
            assert served.call(path, {**body, "ignore_eos": True} if "prompt" in body else body)[0] == 200
    assert "max_new_tokens is 4, as the context has no room for 32000" in caplog.text
    front = served.server.engine.front
    strict = front._replace(facts=front.facts._replace(limits=limits._replace(strict=True)))
    for path, (body, field) in bodies.items():
        with pytest.raises(RequestError) as caught:
            _prepare(PARSERS[path](body), strict, served.server._served)
        assert (caught.value.param, caught.value.code) == (field, "context_length_exceeded")
        assert field in caught.value.message


def test_the_sentence_about_a_prompt_that_does_not_fit_has_both_counts(served: Running) -> None:
    """Agents look for these words to shorten their conversations; where the pool is the limit, it says so."""
    for path, body, param in (
        ("/v1/completions", {"prompt": [5] * 1100}, "prompt"), ("/generate", {"input_ids": [5] * 1100}, "input_ids"),
        ("/generate", {"text": "a " * 1100}, "text"), ("/v1/responses", {"input": "a " * 1100}, "input"),
        ("/v1/chat/completions", chat("a " * 1100), "messages"),
    ):  # fmt: skip
        status, answer, _ = served.call(path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["code"] == "context_length_exceeded"
        said = re.search(r"\((\d+) tokens\) is longer than the model's context length \(1024 tokens\)",
                         answer["error"]["message"])  # fmt: skip
        assert said and int(said[1]) >= 1100
    limits = served.server.engine.front.facts.limits._replace(context_length=2048, pool_rows=1024)
    with pytest.raises(RequestError, match=r"\(1500 tokens\) is longer than the KV pool can hold"):
        limits.check(Request("r", [5] * 1500, SamplingParams()))


def test_props_and_ping_are_what_clients_of_llama_cpp_look_for(served: Running) -> None:
    told = served.ok("/props")
    assert told["default_generation_settings"]["n_ctx"] == 1024 and told["total_slots"] == 4
    assert "<|im_start|>" in told["chat_template"] and served.ok("/ping")["status"] == "ready"


def test_failures_of_the_framework_are_wrapped_too(served: Running) -> None:
    cases = [
        (served.call("/nope"), 404), (served.call("/generate", {}, "DELETE"), 405),
        (served.call("/generate", b" " * (17 * 2**20)), 413),
    ]  # fmt: skip
    for (status, body, headers), expected in cases:
        assert status == expected and body["error"]["message"], body
        assert headers["x-request-id"]
    assert served.call("/health", headers={"x-request-id": "mine-1"})[2]["x-request-id"] == "mine-1"


def test_whoever_hangs_up_is_aborted_in_decode_and_queue(served: Running, hurry: threading.Event) -> None:
    received, stream = served.stream("/generate", native(**LONG), read=3)
    assert len(received) == 3
    whole = [served.open("/generate", native(f"{i}", **LONG)) for i in range(3)]
    served.wait(lambda s: s["num_running_reqs"] == 4)
    queued = served.open("/generate", native("queued", **LONG))
    served.wait(lambda s: s["num_queue_reqs"] == 1)
    queued.close()
    served.wait(lambda s: s["num_queue_reqs"] == 0 and s["num_running_reqs"] == 4)
    for sock in (stream, *whole):
        sock.close()
    served.idle()
    assert served.server.admitted == 0 and not served.server.exchanges and not served.server.routes


def is_aborted(answer: dict[str, Any]) -> bool:
    """Tell whether a native answer ended by /abort_request, and says so as SGLang does."""
    reason = {"type": "abort", "message": "the request was aborted", "status_code": None, "err_type": None}
    meta = answer["meta_info"]
    return meta["finish_reason"] == reason and meta["completion_tokens"] == len(answer["output_ids"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_aborted_prompt_keeps_its_text_and_the_others_of_its_request_go_on(
    served: Running, hurry: threading.Event, stream: bool
) -> None:
    hurry.set()
    full = served.ok("/generate", native(**LONG))
    hurry.clear()
    short = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    wish = {"text": ["Once upon"] * 3, "rid": ["one", "two", "three"], "sampling_params": [LONG, short, short]}
    with ThreadPoolExecutor(1) as pool:
        before = served.stats()["generated_tokens"]
        answer = pool.submit(served.stream if stream else served.call, "/generate", wish)
        served.wait(lambda s: s["num_running_reqs"] == 3 and s["generated_tokens"] > before + 40)
        assert served.call("/abort_request", {"rid": "one"})[0] == 200
        hurry.set()
        if stream:
            received, _ = answer.result()
            assert received.pop() == "[DONE]"
            items = [[e for e in received if e["index"] == i][-1] for i in range(3)]
        else:
            status, items, _ = answer.result()
            assert status == 200
    assert [item["meta_info"]["id"] for item in items] == wish["rid"] and is_aborted(items[0])
    text = items[0]["text"].rstrip("\ufffd")  # the abort may fall within a character
    assert 10 < len(text) < len(full["text"]) and full["text"].startswith(text)
    assert items[0]["output_ids"] == full["output_ids"][: len(items[0]["output_ids"])]
    for item in items[1:]:
        assert item["meta_info"]["finish_reason"]["type"] == "length" and len(item["output_ids"]) == 400
    served.idle()


def test_a_prompt_is_aborted_in_the_queue_and_before_it_gets_there(
    served: Running, hurry: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = served.open("/generate", {"text": ["x"] * 4, "sampling_params": LONG})
    served.wait(lambda s: s["num_running_reqs"] == 4)
    tokenizing, go_on = threading.Event(), threading.Event()
    real = parse.tokenize

    def slow(*given: Any) -> Any:
        tokenizing.set()
        assert go_on.wait(20)
        return real(*given)

    with ThreadPoolExecutor(2) as pool:
        queued = pool.submit(served.ok, "/generate", {**native(**LONG), "rid": "queued"})
        served.wait(lambda s: s["num_queue_reqs"] == 1)
        monkeypatch.setattr(parse, "tokenize", slow)
        early = pool.submit(served.ok, "/generate", {**native(**LONG), "rid": "early"})
        assert tokenizing.wait(20)
        for rid in ("queued", "early"):
            assert served.call("/abort_request", {"rid": rid})[0] == 200
        go_on.set()
        for answer in (queued.result(), early.result()):
            assert is_aborted(answer) and answer["text"] == "" and answer["output_ids"] == []
    held.close()
    served.idle()


def test_an_abort_under_openai_s_schema_is_its_error_object(served: Running, hurry: threading.Event) -> None:
    wish = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "rid": "open"}
    with ThreadPoolExecutor(2) as pool:
        before = served.stats()["generated_tokens"]
        whole = pool.submit(served.call, "/v1/completions", wish)
        streamed = pool.submit(served.stream, "/v1/completions", wish)
        served.wait(lambda s: s["num_running_reqs"] == 2 and s["generated_tokens"] > before + 20)
        served.call("/abort_request", {"rid": "open"})
        status, body, _ = whole.result()
        (events_, _) = streamed.result()
    assert (status, body["error"]["code"]) == (499, "aborted")
    assert len(events_) > 2 and events_[-2] == body and events_[-1] == "[DONE]"
    served.idle()


def test_abort_request_ends_those_of_a_prefix_only(served: Running, hurry: threading.Event) -> None:
    with ThreadPoolExecutor(3) as pool:
        one, two = (
            pool.submit(served.call, "/generate", {**native(**LONG), "rid": f"group-{i}"}) for i in range(2)
        )  # fmt: skip
        other = pool.submit(served.call, "/generate", {**native(**LONG), "rid": "other"})
        served.wait(lambda s: s["num_running_reqs"] == 3)
        assert served.call("/abort_request", {"rid": "group"})[:2] == (200, "")
        for aborted in (one, two):
            assert aborted.result()[0] == 200 and is_aborted(aborted.result()[1])
        status, body, _ = served.call("/flush_cache", b"")
        assert status == 400 and "running" in body["error"]["message"] and not other.done()
        assert served.call("/abort_request", {"abort_all": True})[0] == 200
        assert is_aborted(other.result()[1])
    assert served.call("/abort_request", {"rid": "nobody"})[0] == 200
    served.idle()


def test_one_clients_rid_never_ends_anothers_request(served: Running, hurry: threading.Event) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(served.call, "/generate", {**native(**LONG), "rid": "ab"})
        served.wait(lambda s: s["num_running_reqs"] == 1)
        for rid in ("a", "ab"):
            sock = served.open("/generate", {**native(**LONG), "rid": rid})
            served.wait(lambda s: s["num_running_reqs"] == 2)
            sock.close()
            served.wait(lambda s: s["num_running_reqs"] == 1)
        hurry.set()
        assert long.result()[0] == 200


def test_a_full_queue_refuses_with_a_date_to_come_back(served: Running, hurry: threading.Event) -> None:
    held = served.open("/generate", {"text": ["x"] * 12, "sampling_params": LONG})
    served.wait(lambda s: s["num_running_reqs"] + s["num_queue_reqs"] == 12)
    status, body, headers = served.call("/generate", native())
    assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "queue_full", "1")
    assert served.call("/health_generate")[0] == 200
    held.close()
    served.idle()
    assert served.call("/generate", native())[0] == 200
    assert served.call("/generate", {"text": ["x"] * 13})[0] == 400


# ---- the beginning and the end ---------------------------------------------------------------------------------------


def test_until_it_is_ready_the_server_says_so_and_only_health_is_open(tiny: Path) -> None:
    gate = threading.Event()

    def build(config: Config, progress: Callable[[str], None]) -> Any:
        progress("waiting for the gate")
        assert gate.wait(30)
        return build_llm(config, progress)

    running = Running(Config(**options(tiny, api_key="secret")), build)
    try:
        status, body, headers = running.call("/health")
        assert status == 503 and headers["Retry-After"] and body["progress"] in ("starting", "waiting for the gate")
        key = {"Authorization": "Bearer secret"}
        for path, wish in (("/v1/chat/completions", chat()), ("/v1/completions", {}), ("/generate", native())):
            assert running.call(path, wish, headers=key)[0] == 503
            assert running.call(path, wish)[0] == 401
            assert running.call(path, wish, headers={"Authorization": "Bearer secret2"})[0] == 401
        assert running.call("/nope")[0] == 401
        gate.set()
        ready(running)
        assert running.call("/generate", native(), headers=key)[0] == 200
    finally:
        gate.set()
        running.stop()


def test_when_the_scheduler_itself_fails_health_turns_503_and_nothing_hangs(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ready(Running(Config(**options(tiny)))) as running:
        scheduler = running.server.engine.llm.scheduler

        def broken(*args: Any) -> Any:
            raise RuntimeError("beyond repair")

        monkeypatch.setattr(scheduler, "step", broken)
        monkeypatch.setattr(scheduler, "fail_all", broken)
        status, body, _ = running.call("/generate", native())
        assert status == 503 and "beyond repair" in body["error"]["message"]
        status, body, _ = running.call("/health")
        assert status == 503 and body["status"] == "failed" and "beyond repair" in body["progress"]
        assert running.call("/generate", native())[0] == running.call("/server_info")[0] == 503


@pytest.mark.parametrize("level", ["info", "warning"])
def test_answers_are_logged_at_the_level_of_http_alone_and_without_queries(
    level: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Running(Config(port=0, log_level_http=level, log_level="error"), no_model) as running:
        assert running.call("/health?key=secret")[0] == 503 and running.call("/no%0Awhere")[0] == 404
    lines = [record.getMessage() for record in caplog.records if record.name == "minispec.access"]
    if level == "warning":
        assert lines == []
    else:
        assert len(lines) == 2 and "secret" not in "".join(lines) and "\n" not in "".join(lines)
        assert " GET /health 503 " in lines[0] and " GET /no%0Awhere 404 " in lines[1]


def launch(*argv: str, env: Mapping[str, str] = {}, **how: Any) -> subprocess.Popen[str]:
    """Start the server as a user does; env: variables beside those of the tests."""
    command = [sys.executable, "-m", "minispec.server", *argv]
    own = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=own, **how)


def await_health(port: int, process: Any) -> http.client.HTTPConnection:
    """Return a connection to a server that is ready."""
    connection, end = http.client.HTTPConnection("127.0.0.1", port, timeout=60), time.monotonic() + 180
    while True:
        assert process.poll() is None and time.monotonic() < end
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                return connection
        except OSError:
            connection.close()
        time.sleep(0.1)


@pytest.mark.slow
def test_a_second_sigterm_ends_streams_and_compilers(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # an empty cache, so that there is much to compile
    port = free_port()
    process = launch("--model", str(tiny), "--port", str(port), "--device", "cpu")
    try:
        connection = await_health(port, process)
        long = {**native(**LONG, speculative=False), "text": ["Once upon"] * 8, "stream": True}  # takes many seconds
        connection.request("POST", "/generate", json.dumps(long).encode())
        answer = connection.getresponse()
        stream = events(answer)
        assert next(stream)["meta_info"]["finish_reason"] is None
        tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
        beside = {int(pid) for children in tasks for pid in children.read_text().split()}
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in beside if os.path.exists(f"/proc/{pid}/exe")]
        compilers = sum("minispec.load.makers" in line for line in lines)
        assert compilers > 0, "the server answers while others compile"
        process.send_signal(signal.SIGTERM)
        other = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        status = 200
        while status == 200:  # the signal takes a moment
            other.request("GET", "/health")
            answer = other.getresponse()
            status = answer.status if answer.read() else 0
        assert status == 503 and next(stream)["meta_info"]["finish_reason"] is None, "what runs goes on"
        process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert rest[-1] == "[DONE]" and rest[-2]["error"]["code"] == "shutting_down"
        assert process.wait(30) == 0, "compiling takes minutes"
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in beside), 30)  # a zombie has none
    finally:
        process.kill()
        _, log = process.communicate()
    assert "fired up and ready to roll" in log and "Traceback" not in log
    assert log.splitlines()[-1].endswith("] shut down: 1 request was ended with an error")


def test_the_last_line_of_a_server_that_was_told_to_end_says_that_it_did(tiny: Path) -> None:
    process = launch("--model", str(tiny), "--port", "0", "--device", "cpu", "--disable-torch-compile")
    assert process.stderr is not None
    try:
        while "listening on" not in (line := process.stderr.readline()):
            assert line, "the server has ended"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and log.splitlines()[-1].endswith("] shut down: no request was cut off")


def test_a_model_that_cannot_be_loaded_ends_the_process_with_one_line(tmp_path: Path) -> None:
    process = launch("--model", str(tmp_path), "--port", "0", "--log-level", "error")
    _, log = process.communicate(timeout=90)
    assert process.returncode == 1
    lines = [line for line in log.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("minispec: error: ") and str(tmp_path) in lines[0], log
