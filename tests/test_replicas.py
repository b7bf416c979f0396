"""Replicas on Ray, over real sockets: whatever dies, every client gets the text it would have alone.

Two servers have the same model, one of them with two replicas in processes of their own, which the tests kill. The
drafter of those, `deadly.py`, takes its time, so that a kill hits the state that it is meant to hit. test_replay.py
kills at every token, without processes.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from deadly import CRAWLING, PACED
from test_server import Running, launch, options, ready

from minispec.config import Config
from minispec.replicas import workers
from minispec.replicas.workers import Place
from minispec.request import Request

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent
FLAGS = {"max_running_requests": 8, "chunked_prefill_size": 32, "max_queued_requests": 64, "log_level": "warning"}
ONCE = [4027, 1980]  # " Once upon", after which the scripted text follows
PREFIX = [PACED, *range(300, 315)]  # a page, which those that are to meet at one replica share


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Iterator[Running]:
    with ready(Running(Config(**options(tiny, speculative_algorithm="NONE", **FLAGS)))) as running:
        yield running


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))  # where replicas find `deadly`
        config = Config(**options(tiny, speculative_algorithm="deadly:Deadly", dp_size=2, **FLAGS))
        with ready(Running(config)) as running:
            assert any("raylet" in args for args in session(os.getpid()))  # as it will be looked for
            yield running
        left = [args for args in session(os.getpid()) if "ray" in args and "<defunct>" not in args]
        assert not left, left


@pytest.fixture()
def both(served: Running) -> Running:
    """The server, once both replicas are ready and have nothing to do."""
    wait_until(lambda: [p.state for p in served.server.engine.places] == ["ready"] * 2)
    wait_until(lambda: not any(place.requests for place in served.server.engine.places))
    return served


class Killer:
    """Kills a replica as soon as one of its updates has brought its requests into a state.

    Updates that were on their way by then are lost, so the requests leave in the very state that was waited for.
    """

    def __init__(self, running: Running, condition: Callable[[Place], bool], monkeypatch: pytest.MonkeyPatch) -> None:
        self.hit: list[Request] = []  # the requests that went elsewhere
        engine, self.killed, pid = running.server.engine, threading.Event(), 0
        take, gone = engine._take, engine._gone

        def taking(place: Place, *given: Any) -> None:
            nonlocal pid
            if place.known["pid"] == pid:
                return
            take(place, *given)
            if not self.killed.is_set() and condition(place):
                pid = place.known["pid"]
                os.kill(pid, signal.SIGKILL)
                self.killed.set()

        def leaving(place: Place) -> None:
            self.hit += copy.deepcopy(workers.packed(list(place.requests.values())))
            gone(place)

        monkeypatch.setattr(engine, "_take", taking)
        monkeypatch.setattr(engine, "_gone", leaving)


def stream(running: Running, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream of /generate."""
    found, _ = running.stream("/generate", body)
    assert found[-1] == "[DONE]"
    return found[:-1]


def native(ids: Sequence[int], count: int = 60, **params: Any) -> dict[str, Any]:
    return {"input_ids": list(ids), "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True,
                                                        **params}}  # fmt: skip


def outcome(answer: dict[str, Any]) -> tuple[Any, ...]:
    """Return what of an answer of /generate must not depend on where it was computed."""
    info = answer["meta_info"]
    scores = [round(value, 3) for value, *_ in info.get("output_token_logprobs", ())]
    return (answer["text"], answer["output_ids"], info["finish_reason"], info["prompt_tokens"],
            info["completion_tokens"], scores)  # fmt: skip


NATIVES = {
    # Held back when the replica dies: a stop that comes true, and one that does not.
    "stop": native([*PREFIX, *ONCE], stop=[" there was 中 文"]),
    "no stop": native([*PREFIX, *ONCE], stop=[" there was good"]),
    "penalties": native([*PREFIX, *ONCE], frequency_penalty=0.5, temperature=0.7, sampling_seed=11, min_new_tokens=40,
                        stop_token_ids=list(range(3, 3000)), ignore_eos=False)
                 | {"return_logprob": True},
    "in prefill": native([*PREFIX, CRAWLING, *range(300, 900), *ONCE], 20),
}  # fmt: skip


def held(place: Place) -> bool:
    """Whether a request has text that was not handed out, behind some that was, while another is still in prefill."""
    stops = [r for r in place.requests.values() if r.params.stop and 0 < r.released]
    crawls = any(CRAWLING in r.prompt_ids and not r.output_ids for r in place.requests.values())
    return crawls and any(r.output_ids[-1] == 665 for r in stops)  # " there"


def test_a_replica_killed_in_prefill_in_decode_and_with_text_held_back_changes_no_stream(
    both: Running, alone: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(both, held, monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        futures, places = {}, both.server.engine.places
        for place in places:  # so that none begins before all are there
            os.kill(place.known["pid"], signal.SIGSTOP)
        for name, body in NATIVES.items():  # the one that is to be in prefill is the last
            futures[name] = pool.submit(stream, both, body)
            wait_until(lambda: sum(len(place.requests) for place in places) == len(futures))
        for place in places:
            os.kill(place.known["pid"], signal.SIGCONT)
        found = {name: future.result() for name, future in futures.items()}
    truth = {name: stream(alone, body) for name, body in NATIVES.items()}
    assert killer.killed.is_set() and len(killer.hit) == len(NATIVES)
    states = {(len(r.output_ids), r.released) for r in killer.hit}
    assert (0, 0) in states and len(states) >= 2, states  # how far the one with penalties is by then is chance
    text = alone.ok("/detokenize", {"tokens": next(r.output_ids for r in killer.hit if r.params.stop)})["text"]
    assert any(0 < r.released < len(text) for r in killer.hit if r.params.stop), "something was held back"
    for name in NATIVES:
        assert outcome(found[name][-1]) == outcome(truth[name][-1]), name
        texts = [event["text"] for event in found[name]]
        assert all(later.startswith(before) for before, later in zip(texts, texts[1:], strict=False)), name
        counts = [event["meta_info"]["completion_tokens"] for event in found[name]]
        assert counts == sorted(counts)


def test_a_rolling_restart_under_load_loses_nothing(both: Running, alone: Running) -> None:
    over, before = threading.Event(), [place.known["pid"] for place in both.server.engine.places]

    def ask(client: int) -> list[tuple[Any, Any]]:
        found, turn = [], 0
        while not over.is_set() or turn < 2:
            body = native([PACED, 700 + client, *ONCE], 30, temperature=0.5, sampling_seed=turn)
            found.append((body, outcome(stream(both, body)[-1])))
            turn += 1
        return found

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        health = pool_health(both, over)
        for number in (0, 1):
            assert both.call(f"/replicas/{number}/restart", {})[:2] == (200, {"status": "ready"})
        over.set()
        found = [pair for future in asking for pair in future.result()]
        assert set(health()) == {200}, "one replica was always ready"
    assert len(found) > 8, "they asked all the while"
    assert all(place.known["pid"] not in before for place in both.server.engine.places)
    for body, got in found[:: max(len(found) // 12, 1)]:
        assert got == outcome(alone.ok("/generate", body))


def pool_health(running: Running, over: threading.Event) -> Callable[[], list[int]]:
    """Ask /health until it is over; returns what gives the statuses."""
    seen: list[int] = []

    def ask() -> None:
        while not over.is_set():
            seen.append(running.call("/health")[0])
            time.sleep(0.05)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()

    def found() -> list[int]:
        asking.join()
        return seen

    return found


def test_a_second_turn_goes_to_its_replica_and_a_shared_prompt_spreads(both: Running) -> None:
    places, sent = both.server.engine.places, []
    for turn in range(2, 8):  # conversations, each with a beginning of its own
        first = both.ok("/generate", native(range(turn * 100, turn * 100 + 40), 30))
        ids = [*range(turn * 100, turn * 100 + 40), *first["output_ids"]]
        second = both.ok("/generate", native([*ids, 7, 8], 5))
        assert second["meta_info"]["cached_tokens"] == len(ids) // 16 * 16 or first["output_ids"][-1:] == [2]
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(stream, both, native([*PREFIX, *ONCE, 900 + i], 900)) for i in range(14)]
        wait_until(lambda: sum(len(place.requests) for place in places) == 14)
        sent = [len(place.requests) for place in places]
        assert both.call("/abort_request", {"abort_all": True})[0] == 200
        assert all(future.result()[-1]["meta_info"]["finish_reason"]["type"] == "abort" for future in asked)
    assert sorted(sent)[0] >= 5, sent


def test_what_the_server_tells_of_its_replicas(both: Running) -> None:
    engine = both.server.engine
    info = both.ok("/server_info")
    assert [(r["dp_rank"], r["state"], r["pid"]) for r in info["replicas"]] == [
        (place.number, "ready", place.known["pid"]) for place in engine.places]  # fmt: skip
    assert [state["dp_rank"] for state in info["internal_states"]] == [0, 1] and info["dp_size"] == 2
    assert [load["dp_rank"] for load in both.ok("/v1/loads")["loads"]] == [0, 1]
    both.ok("/generate", native(ONCE, 3))
    text = both.ok("/metrics")
    for rank in (0, 1):
        assert f'sglang:max_total_num_tokens{{dp_rank="{rank}",' in text
    assert 'sglang:http_requests_total{endpoint="/generate"' in text
    os.kill(engine.places[1].known["pid"], signal.SIGSTOP)
    try:
        told = both.ok("/server_info")
        assert [s["dp_rank"] for s in told["internal_states"]] == [0]
        assert [r["state"] for r in told["replicas"]] == ["ready", "no answer in 2 s"]
        assert both.ok("/generate", native([*ONCE, *range(40)], 3))["meta_info"]["completion_tokens"] == 3
    finally:
        os.kill(engine.places[1].known["pid"], signal.SIGCONT)
    assert both.call("/flush_cache", {})[0] == 200
    assert both.ok("/server_info")["internal_states"][0]["kv_pages_cached"] == 0
    assert both.call("/replicas/2/restart", {})[0] == 404
    changed = both.call("/set_internal_state", {"server_args": {"speculative_accept_threshold_single": 0.9}})
    assert changed[0] == 200 and engine.setting[0] == (0.9, 1.0)
    both.call("/set_internal_state", {"server_args": {"speculative_accept_threshold_single": 1.0}})


def test_an_abort_reaches_the_replica_and_nothing_is_left(both: Running) -> None:
    sock = both.open("/generate", {**native([*PREFIX, *ONCE], 900), "stream": True, "rid": "mine"})
    wait_until(lambda: any(place.requests for place in both.server.engine.places))
    assert both.call("/abort_request", {"rid": "mine"})[0] == 200
    wait_until(lambda: not any(place.requests for place in both.server.engine.places))
    sock.close()
    hung_up = both.open("/generate", {**native([*PREFIX, *ONCE], 900), "stream": True})
    wait_until(lambda: any(place.requests for place in both.server.engine.places))
    hung_up.close()
    wait_until(lambda: not any(place.requests for place in both.server.engine.places))
    states = both.ok("/server_info")["internal_states"]
    assert all(state["num_running_reqs"] == 0 and state["kv_pages_owned"] == 0 for state in states)
    assert not both.server.engine.deaths and not both.server.engine.unwanted


# ---- the command -------------------------------------------------------------------------------------------------


def test_without_ray_and_without_a_cluster_there_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), str(TESTS.parent)])
    missing = launch("--port", "0", "--dp-size", "2", env={"PYTHONPATH": path})
    nobody = launch("--port", "0", "--dp-size", "2", "--ray-address", "127.0.0.1:1")
    for process, says in ((missing, "pip install 'minispec[cluster]'"), (nobody, "ray start --head --port 1")):
        _, log = process.communicate(timeout=120)
        last = log.splitlines()[-1]
        assert process.returncode == 1 and last.startswith("minispec: error: --") and says in last, log
        assert "Traceback" not in log


def session(leader: int) -> list[str]:
    """Return the command lines of the processes that descend from one, whatever group they are in."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    own = {str(leader)}
    for _ in rows:
        own |= {pid for pid, parent, _ in rows if parent in own}
    return [args for pid, _, args in rows if pid in own and pid != str(leader)]


def test_ctrl_c_lets_what_runs_finish_and_leaves_no_process_and_no_file(tiny: Path) -> None:
    flags = ["--model", str(tiny), "--device", "cpu", "--dtype", "float32", "--disable-torch-compile", "--dp-size", "2",
             "--speculative-algorithm", "NONE", "--skip-server-warmup", "--port", "0"]  # fmt: skip
    temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    env = {"TMPDIR": str(temporary), "PYTHONPATH": str(TESTS.parent)}
    process = launch(*flags, env=env, start_new_session=True)
    try:
        log = []
        for line in process.stderr:
            log.append(line)
            if "replica 0 is ready" in line:
                break
        wait_until(lambda: sum("ray::Replica" in args for args in session(process.pid)) == 2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of the group
        _, rest = process.communicate(timeout=120)
        assert process.returncode == 0, rest
        # Scripts wait for this line, so replicas do not say it. Ray may print another's line in front of it.
        said = [line for line in (*log, *rest.splitlines()) if "ready to roll" in line]
        assert len(said) == 1 and not re.search(r"Replica pid=\d+\) *(\[[^]]*\])? *The server is fired up", said[0])
    finally:
        process.kill()
    left = subprocess.run(["ps", "-wweo", "args="], capture_output=True, text=True, check=True).stdout
    assert str(temporary) not in left and not list(temporary.iterdir())
    temporary.rmdir()
