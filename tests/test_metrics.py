"""What operators see and what the door lets in: /metrics, the dashboard, keys, TLS, and logs without text or keys."""

from __future__ import annotations

import builtins
import dataclasses
import itertools
import json
import logging
import re
import ssl
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conformance import SUBJECTS
from conftest import wait_until
from exactness import finish, request, submit
from prometheus_client.parser import text_string_to_metric_families
from test_server import Running, chat, native, options

from minispec.acceptance import Kept
from minispec.config import Config
from minispec.metrics import Histogram, Load, Metrics
from minispec.serve.routes import ROUTES

ROOT = Path(__file__).resolve().parent.parent


def scrape(served: Running) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return sample name -> labels other than the server's own -> value."""
    common = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(served.ok("/metrics")):
        for sample in family.samples:
            assert sample.labels["model_name"] == "org/tiny"
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in common))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def load_rate(served: Running) -> float:
    """Return the accept rate that /v1/loads tells."""
    return served.ok("/v1/loads")["loads"][0]["speculative"]["accept_rate"]


@pytest.mark.usefixtures("timeless")
def test_a_scrape_counts_what_requests_got_of_trees_and_plain_steps(served: Running) -> None:
    served.ok("/flush_cache")
    before = scrape(served)
    answer = served.ok("/generate", native(max_new_tokens=120))["meta_info"]
    after = scrape(served)
    steps = {int(nodes): count for ((_, nodes),), count in after["minispec:decode_steps_total"].items()}
    plain, trees = steps[1], sum(count for nodes, count in steps.items() if nodes > 1)
    histogram = answer["spec_accept_histogram"]
    from_texts, others = ((("source", "lookup"),), [(("source", name),) for name in ("head", "host")])
    assert trees == after["minispec:spec_drafts_total"][from_texts] > 2, "one request has a tree in each"
    deep = after["minispec:spec_accepted_tokens_per_position_total"]
    assert [value for _, value in sorted(deep.items(), key=lambda item: int(item[0][0][1]))] == [
        sum(histogram[depth:]) for depth in range(1, len(histogram))]  # fmt: skip
    drafted = after["minispec:spec_draft_tokens_total"][from_texts]
    assert answer["spec_draft_token_num"] == drafted <= sum((nodes - 1) * count for nodes, count in steps.items())
    accepted = after["minispec:spec_accepted_tokens_total"][from_texts]
    assert accepted == answer["spec_accept_token_num"] == sum(deep.values())
    kept = after["minispec:spec_tokens_total"][from_texts]
    assert kept + plain == 119 == round(answer["spec_accept_length"] * answer["spec_verify_ct"]), "one is the prompt's"
    assert not any(after[f"minispec:spec_{name}_total"][other] for other in others
                   for name in ("drafts", "tokens", "draft_tokens", "accepted_tokens"))  # fmt: skip
    assert after["sglang:generation_tokens_total"][()] == 120
    assert after["sglang:prompt_tokens_total"][()] == answer["prompt_tokens"]
    assert after["sglang:spec_verify_calls_total"][()] == answer["spec_verify_ct"] == trees + plain
    timed = {int(nodes): n for ((_, nodes),), n in after["minispec:decode_step_seconds_count"].items()}
    assert timed == {nodes: count for nodes, count in steps.items() if count}
    assert sum(after["minispec:decode_step_seconds_sum"].values()) == pytest.approx(
        served.stats()["step_seconds"], rel=1e-6)  # fmt: skip
    for name, count in (("time_to_first_token", 1), ("e2e_request_latency", 1), ("inter_token_latency", 119)):
        name = f"sglang:{name}_seconds_count"
        assert after[name][()] - before[name][()] == count, name
    assert after["sglang:queue_time_seconds_count"][()] == 1
    assert load_rate(served) == answer["spec_accept_token_num"] / answer["spec_draft_token_num"]
    asked = (("endpoint", "/generate"), ("method", "POST"), ("status_code", "200"))
    assert after["sglang:http_responses_total"][asked] - before["sglang:http_responses_total"].get(asked, 0) == 1
    names = """num_running_reqs num_queue_reqs num_used_tokens max_total_num_tokens token_usage gen_throughput
        cache_hit_rate spec_accept_length spec_accept_rate spec_num_draft_tokens spec_num_steps cached_tokens_total
        num_requests_total num_aborted_requests_total num_retracted_requests_total cuda_graph_passes_total"""
    assert {f"sglang:{name}" for name in names.split()} <= after.keys()


def test_every_metric_of_the_dashboard_is_in_a_scrape(served: Running) -> None:
    served.ok("/generate", native(max_new_tokens=60))
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text("utf-8"))
    text = json.dumps([dashboard["templating"], *(panel.get("targets") for panel in dashboard["panels"])])
    used = set(re.findall(r"(?:sglang|minispec):\w+", text))
    samples = scrape(served)
    assert len(used) > 20 and used <= samples.keys(), used - samples.keys()
    labels = {name for of in samples.values() for key in of for name, _ in key} | {"le", "model_name"}
    grouped = {name for by in re.findall(r"by \(([^)]*)\)", text) for name in by.split(", ")}
    assert grouped <= labels and len(grouped) > 4
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) > 20


def test_without_the_flag_or_the_extra_there_is_a_404_that_names_it(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server, "config", dataclasses.replace(served.server.config, enable_metrics=False))
    status, answer, _ = served.call("/metrics")
    assert status == 404 and "--enable-metrics" in answer["error"]["message"]
    monkeypatch.undo()
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    status, answer, _ = served.call("/metrics")
    assert status == 404 and "minispec[metrics]" in answer["error"]["message"]


def test_a_histogram_puts_a_value_at_or_below_its_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.add(value)
    histogram.add(9.0, times=3)
    assert histogram.counts == [2, 2, 4] and histogram.total == 34.5


def test_accept_rate_divides_by_the_drafts_that_ran_whatever_the_largest_tree(caplog: pytest.LogCaptureFixture) -> None:
    metrics, load = Metrics(12, log_interval=3), Load(0.5, 2, 0)
    steps = (([Kept(1), Kept(1)], 1), ([Kept(3, "head", 4, 2), Kept(1, "lookup", 2)], 5),
             ([Kept(2, "host", 1, 1), Kept(1)], 2))  # fmt: skip
    with caplog.at_level(logging.INFO, "minispec"):
        for kept, nodes in steps:
            metrics.decode(load, kept, nodes=nodes, captured=False)
    assert metrics.verified == metrics.last and metrics.verified.accept_rate == 3 / 7
    assert metrics.verified.accept_length == 9 / 6 and metrics.generated_tokens == 9
    assert "accept len: 1.50, accept rate: 0.43" in caplog.text and caplog.text.count("accept len") == 1
    assert metrics.verified.lookup_shares == {"verify_steps": 0.1667, "tokens": 0.1111}
    metrics.decode(load, [Kept(2, "head", 2, 1)], nodes=3, captured=False)
    assert metrics.verified.drafted == {None: 0, "head": 6, "lookup": 2, "host": 1}
    assert metrics.last.tokens.total() == 9, "the window of the log"


def test_a_throughput_has_no_idle_time_and_all_time_with_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pause = 10_000.0  # seconds
    later, looks, scheduler = [0.0], itertools.count(), SUBJECTS["none"].build(running=1, chunk=16)
    clock = SimpleNamespace(monotonic=lambda: later[0] + next(looks) / 1000)
    monkeypatch.setattr("minispec.metrics.time", clock)
    scheduler.metrics.log_interval = 10

    def speeds(idle: float, *, busy: float, prompt: int = 3, tokens: int = 11) -> tuple[list[float], list[float]]:
        """Return the throughputs, computed and generated, of two requests, the second of which waits for the first."""
        caplog.clear()
        later[0] += idle
        for rid in ("first", "second"):
            asked = request(rid, list(range(prompt)), max_new_tokens=tokens, ignore_eos=True)
            submit(scheduler, asked)
            scheduler.step()
            later[0] += busy if rid == "first" else 0
        finish(scheduler)
        return tuple([float(speed) for speed in re.findall(kind + r" throughput \(token/s\): ([\d.]+)", caplog.text)]
                     for kind in ("input", "gen"))  # fmt: skip

    with caplog.at_level(logging.INFO, "minispec"):
        for _ in range(2):
            computed, generated = speeds(pause, busy=0)
            assert len(computed) == len(generated) == 2 and min(computed + generated) > 1
        assert "cuda graph" not in caplog.text, "a CPU has none"
        computed, generated = speeds(pause, busy=pause)
        assert min(computed) > 1 and generated[0] < 0.01 and generated[1] > 1, "a request had to wait"
        computed, _ = speeds(pause, busy=pause, prompt=20, tokens=1)
        assert computed[0] > 1 > 0.01 > computed[1], "and it had to wait for the rest of its prompt"
        _, generated = speeds(0, busy=0)
        assert generated[0] < 0.01, "which a window has, though no decode step followed"


def test_log_lines_speak_of_cuda_graphs_where_there_may_be_some(caplog: pytest.LogCaptureFixture) -> None:
    metrics, load = Metrics(4, 1, on_cuda=True), Load(0.5, 2, 0)
    with caplog.at_level(logging.INFO, "minispec"):
        metrics.prefill(load, [3], cached=0, emitted=1, captured=False)
        metrics.decode(load, [Kept(2, "head", 3, 1)], nodes=4, captured=True)
    assert caplog.messages[0].endswith(", cuda graph: False")
    assert "accept len: 2.00, accept rate: 0.33, cuda graph: True, gen throughput (token/s): " in caplog.messages[1]


def test_counting_costs_the_engine_thread_few_lines_of_python_a_step() -> None:
    """Two hundred lines take some ten microseconds."""
    metrics, ran = Metrics(8, log_interval=10**9), Counter[str]()
    load, kept = Load(0.5, 8, 0), [Kept(n, "head", 7, n - 1) for n in (1, 2, 3, 1, 1, 4, 2, 1)]

    def count(frame: Any, event: str, argument: Any) -> Any:
        ran[event] += 1
        return count

    for trace in [None] * 200 + [count]:  # the last of many costs what the first does
        sys.settrace(trace)
        metrics.decode(load, kept, nodes=8, captured=False, seconds=0.01)
    sys.settrace(None)
    assert 50 < ran["line"] < 300, f"{ran} in a step of eight requests"


# ---- the door --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with both keys, TLS, and metrics; its certificate is made for it."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    try:
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate,
                        "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
                       check=True, capture_output=True)  # fmt: skip
    except FileNotFoundError:
        pytest.skip("openssl, which makes the certificate, is not installed")
    config = Config(**options(tiny, api_key="user-key", admin_api_key="admin-key", enable_metrics=True,
                              log_level="debug", ssl_keyfile=str(key), ssl_certfile=str(certificate)))  # fmt: skip
    with Running(config) as running:
        running.certificate = certificate  # type: ignore[attr-defined]
        wait_until(lambda: ask(running, "/health")[0] == 200)
        yield running


def ask(running: Running, path: str, key: str | None = None, body: Any = None) -> tuple[int, str]:
    """Return (status, body) of a request over TLS, whose certificate is checked."""
    context = ssl.create_default_context(cafile=running.certificate)  # type: ignore[attr-defined]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"https://127.0.0.1:{running.port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_keys_guard_every_route_but_health_and_the_page(locked: Running) -> None:
    paths = {route.path for route in ROUTES if route.method == "get" and route.key != "admin"}
    assert len(paths) > 10
    for path in sorted(paths):
        where = path.replace("{id}", "org/tiny")
        is_open = path in ("/", "/health", "/health_generate", "/ping")
        assert ask(locked, where)[0] == (200 if is_open else 401), path
        assert ask(locked, where, "wrong")[0] == (200 if is_open else 401), path
        assert ask(locked, where, "user-key")[0] == ask(locked, where, "admin-key")[0] == 200, path
    for path in ("/nowhere", "//metrics", "/v1/v1/models", "/health/../metrics", "/%68ealth/x", "/flush_cache/"):
        assert ask(locked, path)[0] == 401, path
    assert [ask(locked, "/generate", key, native())[0] for key in (None, "user-key")] == [401, 200]


def test_what_changes_the_server_for_others_needs_the_admin_key(locked: Running) -> None:
    assert [ask(locked, "/flush_cache", key)[0] for key in (None, "user-key", "admin-key")] == [401, 403, 200]
    change = {"server_args": {"speculative_accept_threshold_single": 1.0}}
    assert [ask(locked, "/set_internal_state", key, change)[0] for key in ("user-key", "admin-key")] == [403, 200]
    everybody = {"abort_all": True}
    assert [ask(locked, "/abort_request", key, everybody)[0] for key in ("user-key", "admin-key")] == [403, 200]
    for key, rid, ended in (("user-key", "mi", False), ("user-key", "mine", True), ("admin-key", "mi", True)):
        exchange = type("Exchange", (), {"job": type("Job", (), {"rids": ["mine-0", "mine-1"]}), "aborted": set(),
                                     "requests": []})()  # fmt: skip
        locked.server.exchanges.add(exchange)
        try:
            assert ask(locked, "/abort_request", key, {"rid": rid})[0] == 200
        finally:
            locked.server.exchanges.discard(exchange)
        assert bool(exchange.aborted) is ended, (key, rid)


def test_no_log_line_has_a_key_or_a_prompt_even_at_debug(locked: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        said = native("a very secret prompt", max_new_tokens=3, stop=["another secret"])
        assert ask(locked, "/generate", "user-key", said)[0] == 200
        assert ask(locked, "/generate", "user-key", {**said, "trace_of_secret": 1})[0] == 200
        assert ask(locked, "/v1/chat/completions", "user-key", chat("a very secret prompt", max_tokens=3))[0] == 200
        assert ask(locked, "/generate?key=user-key", "admin-key", {"text": "secret prompt", "n": 7})[0] == 400
        assert ask(locked, "/flush_cache", "user-key")[0] == 403
        ask(locked, "/flush_cache", "admin-key")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("minispec")]
    assert len(lines) > 3, "nothing was logged, so nothing was tested"
    told = "\n".join(lines).replace("trace_of_secret", "")  # the name of a field that is not known
    assert "secret" not in told and "user-key" not in told and "admin-key" not in told
    assert "-key" not in ask(locked, "/server_info", "user-key")[1].replace("key.pem", "")


def test_the_log_of_requests_has_what_differs_from_the_defaults_and_no_text(
    served: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server, "config", dataclasses.replace(served.server.config, log_requests=True))
    wishes = [{}, {"max_new_tokens": 2, "top_p": 0.5, "stop": ["secret", "x"], "regex": "secret.*", "temperature": 1}]
    with caplog.at_level(logging.INFO, "minispec"):
        for number, wish in enumerate(wishes):
            served.ok("/generate", {"input_ids": [5, 6, 7], "rid": f"r{number}", "sampling_params": wish})
    lines = [line.partition(": ")[2] for line in caplog.messages if line.startswith("request ")]
    assert lines == ["3 prompt tokens, all by default", "3 prompt tokens, max_new_tokens 2, top_p 0.5, stop 2 strings, "
                     "grammar Grammar(kind='regex', origin='regex')"]  # fmt: skip
    assert "secret" not in caplog.text


def test_files_that_are_no_certificate_end_the_start_with_one_line() -> None:
    from minispec.serve.auth import Auth

    with pytest.raises(ValueError, match="are no certificate with its key, in PEM form"):
        Auth(Config(ssl_certfile=__file__, ssl_keyfile=__file__))
