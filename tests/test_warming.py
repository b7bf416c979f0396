"""Serving before anything is compiled: takeovers change no token, the process beside the server finds the same graphs.

That the process ends with a server that is told to end is tested in test_server.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_heads
import test_standalone
import torch
from conftest import wait_until
from exactness import (
    Oracle,
    build,
    forget_graphs,
    graphs_made,
    reference,
    request,
    run,
    submit,
    tiny_model,
    trace_only,
    truth_of,
)
from test_engine import MODEL, eagle3
from test_experts import MIXED
from test_llm import config_of

from benchmarks.fake_gpu import H200, pretend_h200, unavailable
from minispec import LLM
from minispec.buffers import PrefillBuffers
from minispec.config import Config
from minispec.drafter import Drafter, HostDrafter
from minispec.load import files as files_module
from minispec.load.build import rehearse
from minispec.load.files import DirectStep, compile_function
from minispec.load.machine import CACHE
from minispec.load.makers import NICENESS, Makers
from minispec.load.warm_up import make_graphs, rehearse_step, steps_of, time_steps
from minispec.model import Block
from minispec.scheduler import Scheduler
from minispec.serve.warming import Warming
from minispec.train.export import BlockRecipe, export, new_head

MAKE_GRAPHS = "minispec.load.warm_up.make_graphs"
PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9]
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


def deferred(drafter: Drafter | HostDrafter) -> Scheduler:
    """Return a scheduler that runs eagerly until graphs are made, in the shapes of test_engine.py."""
    model = tiny_model()
    model.compile_blocks(DirectStep)
    scheduler = build(model, drafter, compiled=True, running=2, pages=14, chunk=100)
    scheduler.engine.drafter.compile(DirectStep)
    for step in steps_of(scheduler.engine):
        step.ready = False
    return scheduler


def test_a_takeover_before_any_step_of_a_reply_leaves_its_tokens() -> None:
    with torch.inference_mode():
        scheduler = deferred(eagle3())
    engine = scheduler.engine
    alone = [step for step in steps_of(engine) if isinstance(step, PrefillBuffers) or step.batch == 1]
    blocks, eagerly = engine.model.run_block, []

    def eager(block: Block, x: torch.Tensor, rope: Any, attend: Any) -> torch.Tensor:
        """Run a block as it is, and note that."""
        if not torch.compiler.is_compiling():  # compiled code would note it at each call
            eagerly.append(block)
        return Block.forward(block, x, rope, attend)

    blocks.function = eager
    asked = request("r", PROMPT, max_new_tokens=16)
    scheduler.validate(asked)
    wanted = reference(MODEL, asked)

    def reply(takeovers: dict[int, int]) -> int:
        """Return the number of steps of a reply, with so many graphs made before some of them, and none before."""
        for step in steps_of(engine):
            step.ready = False
        asked, todo, steps = request("r", PROMPT, max_new_tokens=16), list(alone), 0
        submit(scheduler, asked)
        while scheduler.has_work:
            for _ in range(takeovers.get(steps, 0)):
                if todo:
                    make_graphs(engine, todo.pop(0))
            made, ran = graphs_made(), len(eagerly)
            scheduler.step()
            steps += 1
            assert len(eagerly) > ran if len(todo) == len(alone) else todo or len(eagerly) == ran
            assert graphs_made() == made, "a step that is served makes no graph"
        scheduler.flush_cache()
        assert asked.output_ids == wanted, takeovers
        return steps

    steps = reply({})
    assert not any(step.ready for step in steps_of(engine)) and not blocks.calls and steps > 5
    for at in range(steps):
        reply({at: 99})
        assert all(step.ready for step in alone)
    forget_graphs()  # so that every graph is looked for anew
    blocks.calls.clear()
    reply(dict.fromkeys(range(steps), 1) | {steps - 1: 99})
    assert all(step.ready for step in alone)


def test_before_steps_are_ready_a_drafter_catches_up_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        scheduler = deferred(eagle3())
    engine, passes, made = scheduler.engine, [], graphs_made()
    backlog = engine.late._backlog
    monkeypatch.setattr(engine.late, "_backlog", lambda step: passes.append(step) or backlog(step))
    scheduler.policy.forced = random.Random(1).choice  # plain steps and others in turn
    asked = request("r", PROMPT, max_new_tokens=16)
    run(scheduler, [asked])
    assert passes and asked.output_ids == reference(MODEL, asked)
    assert graphs_made() == made and not engine.drafter.take_in.calls


def test_steps_stand_in_one_order_one_request_first() -> None:
    with torch.inference_mode():
        scheduler = deferred(eagle3())
    assert [step.name for step in steps_of(scheduler.engine)] == [
        "decode, batch 1, 6 nodes a tree", "decode, batch 1, 3 nodes a tree", "decode, batch 1, 1 nodes a tree",
        "prefill of 128 tokens",
        "decode, batch 2, 6 nodes a tree", "decode, batch 2, 3 nodes a tree", "decode, batch 2, 1 nodes a tree",
    ]  # fmt: skip


def test_a_graph_that_no_file_has_is_not_compiled_and_the_step_goes_on_eagerly(monkeypatch) -> None:
    scheduler = deferred(Oracle(truth_of(MODEL), nodes=6))
    engine = scheduler.engine
    monkeypatch.setattr(files_module, "loaded", {})
    monkeypatch.setattr("minispec.load.files.machine", lambda *known: "others")  # so that no file fits
    assert not make_graphs(engine, steps_of(engine)[0], compiles=False)
    assert not steps_of(engine)[0].ready
    asked = request("r", PROMPT)
    run(scheduler, [asked])
    assert asked.output_ids == reference(MODEL, asked)
    assert not any(engine.model.run_block.calls.values()), "nothing ran compiled"


# ---- the process beside the server -----------------------------------------------------------------------------------


def target_and_head(at: Path) -> tuple[Path, Path]:
    """Write a model and an EAGLE-3 head that reads it in three places."""
    target = test_heads.make_target()
    return config_of(target, at / "target"), test_heads.write(at / "head", test_heads.eagle3_specforge(target))


def target_and_block(at: Path) -> tuple[Path, Path]:
    """Write a model and a DSpark network for it, which has DFlash's functions too."""
    target = test_heads.make_target()
    recipe = BlockRecipe("dspark", rounds=3, epochs=1, learning_rate=1e-3, batch_tokens=1, draft_vocab=1, seed=0)
    export(new_head(recipe, target, torch.arange(9), (2, 4, 6), torch.ones(3)), target, at / "head")
    return config_of(target, at / "target"), at / "head"


def target_and_draft(at: Path) -> tuple[Path, Path]:
    """Write a model and a smaller one of two layers with the same tokenizer."""
    return test_standalone.write(at / "target"), test_standalone.write(at / "draft", seed=1, num_hidden_layers=2)


DRAFTERS = {"EAGLE3": target_and_head, "STANDALONE": target_and_draft, "DSPARK": target_and_block}


def graphs_of_engine_and_rehearsal(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int | None = None
) -> list[list[str]]:
    """Return what an engine and its rehearsal trace for the first steps, for all by default.

    The rehearsal's files are all that the engine asks for: it finds each of them by its name and facts.
    """
    trace_only(monkeypatch, tmp_path / "files")
    (tmp_path / "files").mkdir()
    llm = LLM(config=config, progress=lambda line: None, compile_later=True)
    engine = llm.scheduler.engine
    assert llm.compile_later and not engine.settled
    graphs: list[list[str]] = []

    def note(function: Any, args: Any) -> Any:
        """Note what is made."""
        loaded, made = compile_function(function, args)
        graphs[-1].append(f"{function.__qualname__} {loaded.facts}")
        return loaded, made

    monkeypatch.setattr("minispec.load.files.compile_function", note)
    with rehearse(config, engine.kv.pages) as other:
        for one in (engine, other):
            forget_graphs()
            shutil.rmtree(tmp_path / "files")
            (tmp_path / "files").mkdir()
            graphs.append([])
            for step in steps_of(one)[:count]:
                assert make_graphs(one, step) if one is engine else rehearse_step(one, step)
    return graphs


PLAIN_FLAGS = {"dtype": "float32", "device": "cpu", "max_running_requests": 1, "chunked_prefill_size": 64}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_the_rehearsal_has_the_graphs_of_the_engine(algorithm: str, tmp_path: Path, monkeypatch) -> None:
    target, draft = DRAFTERS[algorithm](tmp_path)
    weights = "auto" if algorithm == "STANDALONE" else "dummy"
    config = Config(
        model_path=str(target), load_format=weights, speculative_algorithm=algorithm, speculative_num_steps=2,
        speculative_draft_model_path=str(draft), speculative_eagle_topk=2, speculative_num_draft_tokens=4,
        **PLAIN_FLAGS,
    )  # fmt: skip
    count = 1 if algorithm == "STANDALONE" else None
    noted = graphs_of_engine_and_rehearsal(config, tmp_path, monkeypatch, count)
    assert noted[0] == noted[1] and len(noted[0]) > 5


@pytest.mark.slow
def test_of_a_mixture_the_rehearsal_has_two_graphs_of_blocks_for_each_of_the_engine_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXED))
    config = Config(model_path=str(tmp_path), load_format="dummy", speculative_algorithm="NONE", **PLAIN_FLAGS)
    noted = graphs_of_engine_and_rehearsal(config, tmp_path, monkeypatch)
    assert noted[0] == noted[1]
    blocks = [facts for facts in noted[0] if facts.startswith("Block.forward")]
    assert 2 * sum("experts" in facts for facts in blocks) == len(blocks) > 2


def warming(monkeypatch: pytest.MonkeyPatch, command: str, empty: bool = False) -> tuple[Warming, Scheduler]:
    """Return what makes graphs for an engine whose cache is empty; the process runs this Python code."""
    scheduler = deferred(Oracle(truth_of(MODEL), nodes=6))

    monkeypatch.setattr(MAKE_GRAPHS, lambda engine, step, compiles: False)
    monkeypatch.setattr(Makers, "COMMAND", [sys.executable, "-c", command])
    monkeypatch.setattr("minispec.serve.warming.is_empty", lambda: empty)
    monkeypatch.setattr("minispec.serve.warming.PATIENCE", 0.0)
    llm = SimpleNamespace(scheduler=scheduler, compiled=True, compile_later=True, try_out=lambda: iter(()),
                          makers=lambda steps: Makers(print, 2), move_weights=lambda: None)  # fmt: skip
    return Warming(llm), scheduler


def test_if_the_process_fails_what_is_missing_stays_eager_and_is_served(monkeypatch, caplog) -> None:
    beside, scheduler = warming(monkeypatch, "print('no room'); raise SystemExit(1)")
    engine, called = scheduler.engine, []
    engine.when_settled(lambda: called.append(beside.state))
    assert beside.state == "eager" and not beside.turn(busy=False) and beside.state == "warming 0/5"
    wait_until(lambda: beside.turn(busy=False) and engine.settled)
    assert called == ["incomplete 0/5"] == [beside.state] and "5 of 5" in caplog.text and "no room" in caplog.text
    asked = request("r", PROMPT)
    run(scheduler, [asked])
    assert asked.output_ids == reference(MODEL, asked)


def test_no_warning_takes_the_place_of_why_the_process_ended() -> None:
    ends = """
import logging, os
print("no room", flush=True)
logging.getLogger("minispec").warning("other processes use the cores")
os._exit(1)
"""
    makers = Makers(partial(exec, ends), 1)
    wait_until(lambda: makers.ended)
    assert makers.last_words == "no room"


def test_trying_out_goes_in_parts_between_which_requests_are_served(monkeypatch) -> None:
    beside, scheduler = warming(monkeypatch, "")
    engine, free = scheduler.engine, len(scheduler.kv.free)

    @torch.inference_mode()
    def parts() -> Iterator[None]:
        """Time a batch size at a time, as `LLM.try_out` does."""
        for batch in engine.sizes.batch_sizes:
            time_steps(engine, batch)
            yield

    beside.llm.try_out, beside.todo = parts, []
    assert beside.turn(busy=False) and engine.settled
    assert not beside.turn(busy=True) and not engine.step_seconds, "somebody waits"
    for batch in engine.sizes.batch_sizes:
        assert beside.turn(busy=False) and max(engine.step_seconds)[0] == batch and len(scheduler.kv.free) == free
        asked = request(f"{batch}", PROMPT)
        run(scheduler, [asked])
        assert asked.output_ids == reference(MODEL, asked)
        scheduler.flush_cache()
    assert not beside.turn(busy=False)


def test_what_the_process_compiled_and_no_file_has_stays_eager(monkeypatch, caplog) -> None:
    beside, scheduler = warming(monkeypatch, "")
    made = {step.name for step in steps_of(scheduler.engine)}
    beside.llm.makers = lambda steps: SimpleNamespace(made=made, ended=False, close=lambda: None)
    while not scheduler.engine.settled:
        beside.turn(busy=False)
    assert beside.state == "incomplete 0/5" and "was compiled, and is in no file" in caplog.text


@pytest.mark.parametrize("empty", [True, False])
def test_weights_move_to_huge_pages_at_once_or_after_the_graphs_in_files(empty, tmp_path, monkeypatch) -> None:
    moved, go = list[str](), threading.Event()

    def move() -> int:
        """Take a while, if it is beside others."""
        assert empty or go.wait(60)
        moved.append(threading.current_thread().name)
        return 0

    monkeypatch.setattr("minispec.cpu.huge_pages.use_huge_pages", move)
    monkeypatch.setattr("minispec.load.build.is_empty", lambda: empty)
    target = config_of(tiny_model(), tmp_path / "target")
    llm = LLM(config=Config(model_path=str(target), load_format="dummy", dtype="float32", device="cpu",
                            max_running_requests=1, max_total_tokens=512), compile_later=True)  # fmt: skip
    here = threading.current_thread().name
    assert moved == ([here] if empty else [])
    llm.scheduler.engine.settle()
    waits = llm.try_out()
    next(waits)
    assert moved == [here] if empty else not moved, "a request may come while they are moved"
    go.set()
    for _ in waits:
        pass
    llm.move_weights()  # once is enough
    assert moved == [here if empty else "huge pages"]


def test_a_first_answer_waits_neither_for_dynamo_nor_for_garbage_where_there_are_files(tmp_path: Path) -> None:
    """What importing made is not looked through for garbage, and what only compiling needs is imported later."""
    target = config_of(tiny_model(), tmp_path / "target")
    (tmp_path / "minispec").mkdir()
    (tmp_path / "minispec" / f"something{files_module.ENDING}").touch()
    code = f"""
        import gc, sys
        from minispec.config import Config
        from minispec.request import SamplingParams
        from minispec.serve.worker import build_sealed_llm
        before = gc.get_freeze_count()
        llm = build_sealed_llm(Config(model_path={str(target)!r}, load_format="dummy", dtype="bfloat16", device="cpu",
                                      max_running_requests=1, max_total_tokens=512), print)
        print(gc.get_freeze_count() - before > 100_000, gc.isenabled(), llm.compile_later)
        llm.generate([3, 4], SamplingParams(max_new_tokens=4, ignore_eos=True))
        print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True,
                         env=os.environ | {CACHE: str(tmp_path)})  # fmt: skip
    assert run.stdout.splitlines()[-2:] == ["True True True", "[]"]


def test_a_busy_engine_gives_its_requests_as_long_as_the_graph_before_took(monkeypatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("minispec.serve.warming.time", SimpleNamespace(monotonic=lambda: clock[0]))
    beside, scheduler = warming(monkeypatch, "")
    monkeypatch.setattr(MAKE_GRAPHS, lambda *given, **how: clock.__setitem__(0, clock[0] + 0.05) or True)
    assert beside.turn(busy=True) and not beside.turn(busy=True) and beside.turn(busy=False)
    for later, turns in ((0.04, False), (0.02, True)):
        clock[0] += later
        assert beside.turn(busy=True) is turns


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=str)
def test_the_process_and_what_it_runs_end_with_the_server(number: signal.Signals) -> None:
    server = """
import subprocess, time
from functools import partial
from minispec.load.makers import Makers
print(Makers(partial(subprocess.run, ["sleep", "99"]), 1).processes[0].pid, flush=True)
time.sleep(99)
"""
    process = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
    group = int(process.stdout.readline())
    wait_until(lambda: living(group) == 2)
    assert os.getpriority(os.PRIO_PROCESS, group) == os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
    process.send_signal(number)
    process.wait()
    wait_until(lambda: not living(group))


def living(group: int) -> int:
    """Return how many processes of a group there are that have not ended."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        count += int(its) == group and state != "Z"
    return count


# ---- the rehearsal of a GPU ------------------------------------------------------------------------------------------


def rehearsed_as_on_a_gpu(config: Config, folder: Path) -> tuple[int, list[str]]:
    """Return how many graphs a rehearsal for an H200 that is not there traces, and the steps that lack some."""
    memory = (H200.total_memory, H200.total_memory)
    with pytest.MonkeyPatch.context() as patch, pretend_h200():
        trace_only(patch, folder)
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: memory)
        patch.setattr(torch.cuda, "get_device_name", lambda *_: H200.name)
        with rehearse(config, 63) as engine:
            lacking = [step.name for step in steps_of(engine) if not rehearse_step(engine, step)]
            return graphs_made(), lacking


@pytest.mark.slow
def test_a_process_without_a_gpu_s_memory_has_the_graphs_of_an_engine_on_cuda(tmp_path: Path) -> None:
    if why := unavailable():
        pytest.skip(why)
    target, draft = target_and_head(tmp_path)
    config = Config(
        model_path=str(target), load_format="dummy", dtype="bfloat16", device="cuda", speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(draft), speculative_num_steps=2, speculative_eagle_topk=2,
        speculative_num_draft_tokens=4, max_running_requests=4, cuda_graph_bs=(1, 4),
    )  # fmt: skip
    (tmp_path / "files").mkdir()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pretender:
        made, lacking = pretender.submit(rehearsed_as_on_a_gpu, config, tmp_path / "files").result()
    assert made > 20 and not lacking
