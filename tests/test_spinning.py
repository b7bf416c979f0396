"""Threads that wait for each other sleep beside busy processes, and spin on quiet cores."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from test_machine import CONFIG

from minispec.cpu.spinning import BUSY, CALM, ENDS, RECENT, VARIABLES, Spinning, spin_alone

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0))

STAT = """cpu  9999 9999 9999 9999 9999 9999 9999 9999 0 0
cpu0 100 20 30 5000 700 4 5 6 90 0
cpu1 1000 0 0 5000 0 0 0 0 0 0
cpu2 300 0 0 5000 0 0 0 41 0 0
intr 12345
ctxt 12345
"""


def test_what_others_use_is_all_work_of_our_cores_but_our_own(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(STAT)
    ticks = (100 + 20 + 30 + 4 + 5 + 6) + (300 + 41)
    own = time.process_time()
    found = Spinning(2, {0, 2}, tmp_path).used_by_others()
    assert own <= ticks / os.sysconf("SC_CLK_TCK") - found <= time.process_time()


def test_threads_sleep_at_three_busy_looks_and_spin_after_many_calm_ones(caplog: pytest.LogCaptureFixture) -> None:
    spinning = Spinning(2, {0, 1, 2})  # one core is left over
    with caplog.at_level(logging.INFO, "minispec"):
        spinning.decide(1.0, 1 + BUSY)
        for _ in range(ENDS):
            spinning.decide(1.0, 1.1 + BUSY)
            assert spinning.team is None
        for _ in range(2):
            spinning.decide(1.0, 1.1 + BUSY)
            team = spinning.team
            assert team is not None and team.is_alive() and team.size == 3
        for _ in range(CALM - 1):
            spinning.decide(1.0, 1.0)
        for _ in range(ENDS + 1):
            spinning.decide(1.0, 2.0)
        for _ in range(CALM - 1):
            spinning.decide(1.0, 1.0)
        assert spinning.team is team and team.is_alive(), "three busy looks in between begin the count anew"
        spinning.decide(1.0, 1.0)
        assert spinning.team is None
        team.join(60)
        assert not team.is_alive()
        for _ in range(ENDS + 1):
            spinning.decide(1.0, 3.0)
        assert spinning.team is not None
        spinning.team.ended.set()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "GOMP_SPINCOUNT" in warnings[0] and "1.6 of 3 cores" in warnings[0]
    assert len(caplog.records) == 3


def test_processes_that_take_turns_with_this_one_leave_its_threads_spinning() -> None:
    spinning = Spinning(2, {0, 1})
    long = [(1.0, 1.0), *[(2.0, 0.0)] * RECENT, (1.0, 1.0), *[(0.0, 2.0)] * RECENT]
    short = [(1.0, 1.0), (1.0, 1.0), (0.0, 2.0)]
    for ours, others in (long + short) * 3:
        spinning.decide(ours, others)
        assert spinning.team is None
    for _ in range(ENDS + 1):
        spinning.decide(1.0, 1.0)
    assert spinning.team is not None
    for _ in range(CALM // 2):  # sleeping threads spin again, though others work whenever ours do not
        for ours, others in ((1.0, 0.0), (1.0, 0.0), (0.0, 2.0)):
            spinning.decide(ours, others)
    assert spinning.team is None


def test_a_process_that_is_busy_every_other_look_has_threads_sleep() -> None:
    spinning = Spinning(2, {0, 1})
    for _ in range(2 * CALM):
        spinning.decide(1.0, 1.0)
        spinning.decide(1.0, 0.2)
    assert spinning.team is not None
    spinning.team.ended.set()


@pytest.mark.parametrize("variable", VARIABLES)
def test_nobody_looks_where_the_user_has_decided(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: CORES)
    monkeypatch.setattr(Spinning, "start", lambda self: pytest.fail("started"))
    monkeypatch.setenv(variable, "3000")
    spin_alone()


@pytest.mark.parametrize(("threads", "cores", "looks"), [
    (1, 2, False), (2, 2, True), (4, 2, False), (8, 16, True), (7, 16, False)])  # fmt: skip
def test_cores_are_looked_at_where_threads_may_wait_for_them(
    threads: int, cores: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Spinning] = []
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(Spinning, "start", lambda self: started.append(self))
    monkeypatch.setattr(threading, "enumerate", lambda: started)
    spin_alone()
    spin_alone()
    assert len(started) == looks


BESIDE = """
import subprocess, sys, threading, time
from minispec import LLM
from minispec.cpu.spinning import Spinning

hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(int(sys.argv[2]))]
try:
    llm = LLM(sys.argv[1], load_format="dummy", dtype="float32", device="cpu", disable_torch_compile=True,
              max_running_requests=1, max_total_tokens=64)
    watcher = next(thread for thread in threading.enumerate() if isinstance(thread, Spinning))
    end = time.monotonic() + 60
    while watcher.team is None and time.monotonic() < end:
        llm.generate([1, 2, 3])
    print(watcher.team is not None)
finally:
    for hog in hogs:
        hog.kill()
"""


@pytest.mark.skipif(CORES < 2, reason="one core has no threads that wait for each other")
def test_beside_busy_processes_the_threads_of_a_loaded_model_sleep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    decided = {*VARIABLES, "OMP_NUM_THREADS"}
    environment = {name: value for name, value in os.environ.items() if name not in decided}
    run = subprocess.run([sys.executable, "-c", BESIDE, str(tmp_path), str(CORES)], capture_output=True, text=True,
                         cwd=ROOT, env=environment, timeout=120)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout == "True\n", "docs/log.md has what sleep is worth"
    assert "GOMP_SPINCOUNT" in run.stderr
