"""`python -m benchmarks.gpu` without a GPU: every stage in toy sizes, and what the command does around the stages."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from capturing import Capture, reads_all
from conformance import SUBJECTS
from exactness import run

from benchmarks import carry, gpu
from benchmarks.gpu import STAGES
from benchmarks.gpu_first import WISHES, replays_compared
from benchmarks.gpu_stages import TINY, Report, graph_nodes, outcomes_of
from minispec.cuda.graphs import capture
from minispec.load.default_model import FILES, ensure_default_model
from minispec.load.weights import read_config
from minispec.model import Model, ModelConfig, published_tensors
from minispec.train.export import published_config, write_folder

COMPARED = {  # stage: its comparisons, and what each compares
    "step": {"steps": ("plain", "tree")},
    **{f"batch-{n}": {f"accept length {x:g}": ("plain", "tree") for x in TINY.lengths} for n in (1, 8, 64)},
    "overlap": {"plain": ("serial", "overlap"), "tree": ("serial", "overlap")},
    "sampled": {"plain": ("greedy", "temperature 0.8"), "tree": ("greedy", "temperature 0.8")},
    "fp8": {"plain": ("float32", "int8"), "tree": ("float32", "int8")},
}
OTHERS = {"smoke", "attention", "tests", "parity", "default", "profile"}


def measured(stage: str, out: Path) -> dict:
    """Run a stage in toy sizes and return its file."""
    assert gpu.main(["--tiny", "--in-this-process", "--stages", stage, "--out", str(out)]) == 0
    return json.loads((out / "cpu" / f"{stage}.json").read_text())


@torch.inference_mode()
def small_model(folder: Path, like: Path) -> Path:
    """Write two small random layers with the tokenizer of another model."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    config = replace(ModelConfig.from_hf(read_config(like)), **sizes)
    torch.manual_seed(0)
    model = Model.empty(config, torch.float32, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.3)
    write_folder(folder, {**read_config(like), **published_config(config)}, published_tensors(model))
    for name in set(FILES) - {"config.json", "model.safetensors"}:
        shutil.copy(like / name, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_leaves_its_figures(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if stage in ("parity", "default"):
        model = small_model(tmp_path / "model", request.getfixturevalue("demo_folder"))
        monkeypatch.setattr(gpu, "TINY", replace(TINY, model=str(model)))
    found = measured(stage, tmp_path)
    assert found["complete"] and found["stage"] == stage and found["seed"] == 1
    assert found["torch"] and found["transformers"] and "cores" in found["hardware"] and found["revision"]
    figures = found["figures"]
    for name, cases in COMPARED.get(stage, {}).items():
        first, second = (figures[name][case] for case in cases)
        for one in (first, second):
            low, high = one["ms_first_and_last_tenth"]
            assert 0 < low <= one["ms"] <= high and len(one["ms_of_each_stretch"]) == 2
            assert one["steps"] == 2 * TINY.steps and one["mean_context"] > TINY.prompt
        assert figures[name]["ms_ratio"] == pytest.approx(second["ms"] / first["ms"])
        assert first["accept_length"] == 1 or first is not figures[name].get("plain")
        if stage.startswith("batch"):
            rows = 2 * TINY.steps * first["batch"]
            wanted = float(name.split()[-1])
            assert second["accept_length"] == pytest.approx(wanted, abs=1.5 / rows**0.5)
    if stage in COMPARED:
        engine = figures.get("engine") or figures.get("engine, int8") or figures[name]["engine"]
        assert [engine["sizes"][name] for name in ("rounds", "topk", "nodes")] == list(TINY.eagle3)
    else:
        assert stage in OTHERS
    if stage == "step":
        share = figures["bandwidth"]
        assert 0 < share["share_of_copy"] and share["plain_step_bytes"] > 1e4
        assert figures["graphs"] == {} and not engine["captured"]  # absent where nothing is captured
    if stage == "smoke":
        for name in WISHES:
            assert figures[f"{name}, served"]["tokens"] == TINY.steps and f"{name}, replays" in figures
    if stage == "attention":
        cells = [figures[f"{nodes} nodes, context {context}"] for nodes in TINY.nodes for context in TINY.contexts]
        assert all(cell["relative_error"] < 1e-6 and cell["ms_a_layer"] > 0 for cell in cells)
        assert cells[0]["bytes_a_layer"] == 2 * 2 * 16 * 4 * (TINY.contexts[0] + TINY.nodes[0])
    if stage == "tests":
        assert list(figures) == ["left out", "tests/test_tree.py"] and len(figures["tests/test_tree.py"]) > 5
        assert set(figures["tests/test_tree.py"].values()) == {"PASSED"}
    if stage == "profile":
        assert figures["tree"]["operations_per_call"] > figures["plain"]["operations_per_call"] > 100
    if stage == "parity":
        assert [figures[name]["equal"] for name in ("none", "ngram")] == [{"batch 1": 2, "batch 8": 2}] * 2
    if stage == "default":
        assert figures["ngram"]["ngram"]["tokens"] == 2 * TINY.new_tokens and figures["ngram"]["tokens_per_s_ratio"] > 0


@pytest.mark.slow
def test_cuda_tests_are_collected_without_the_packages_that_other_tests_need() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("MINISPEC_CI", "PYTEST_ADDOPTS")}
    command = [sys.executable, "tests/bare.py", "-m", "cuda", "--collect-only", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=gpu.ROOT, env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/test_attention.py::" in done.stdout and "tests/test_fp8.py::" in done.stdout
    for package, file in (("openai", "server"), ("pydantic", "grammar"), ("gguf", "gguf"), ("llguidance", "closing")):
        assert f"test_{file}.py: {package} is not installed" in done.stdout


def test_stages_that_are_done_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(command: list[str], log: Path, limit_s: float) -> str | None:
        ran.append(command[command.index("--stages") + 1])
        return "it died" if ran[-1] == "step" else None

    monkeypatch.setattr(gpu, "run", run)
    (tmp_path / "cpu").mkdir()
    for stage, complete in (("tests", True), ("step", False)):
        (tmp_path / "cpu" / f"{stage}.json").write_text(json.dumps({"complete": complete}))
    command = ["--tiny", "--out", str(tmp_path), "--stages", "tests", "step", "profile"]
    assert gpu.main(command) == 1 and ran == ["step", "profile"]  # one that dies leaves the others
    assert gpu.main([*command, "--force"]) == 1 and ran[2:] == ["tests", "step", "profile"]


def test_a_stage_that_was_cut_off_goes_on_behind_its_last_figure(tmp_path: Path) -> None:
    path = tmp_path / "stage.json"
    Report(path, {"revision": "a", "scale": (1, 2)}).add("one", 1)
    assert not gpu.is_done(path)
    report = Report(path, {"revision": "a", "scale": (1, 2)})
    assert "one" in report and "one" not in Report(path, {"revision": "b", "scale": (1, 2)})
    report.add("two", 2)
    report.finish()
    assert gpu.is_done(path) and json.loads(path.read_text())["figures"] == {"one": 1, "two": 2}
    assert "one" not in Report(path, {"revision": "a", "scale": (1, 2)})  # done, so whoever repeats it begins anew


def test_a_process_is_ended_at_its_limit_with_those_that_it_started(tmp_path: Path) -> None:
    log, made = tmp_path / "log", tmp_path / "made"
    child = f"import time, pathlib; time.sleep(1.5); pathlib.Path({str(made)!r}).touch()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert "after 1 s" in str(gpu.run([sys.executable, "-c", parent], log, 0.7))
    wrong = gpu.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], log, 60)
    assert "status 3" in str(wrong) and "why" in str(wrong)
    assert gpu.run([sys.executable, "-c", ""], log, 60) is None
    time.sleep(1.5)
    assert not made.exists()


def test_what_fails_is_written_down_and_the_rest_goes_on(tmp_path: Path) -> None:
    report = Report(tmp_path / "stage.json", {})
    with report.part("broken"):
        raise ValueError("why")
    report.add("whole", 1)
    report.finish()
    found = json.loads(report.path.read_text())
    assert found["failures"] == {"broken": "ValueError: why"} and found["figures"] == {"whole": 1}
    assert not gpu.is_done(report.path), "so it is run again"
    again = Report(report.path, {})
    again.finish()
    assert "whole" in again and gpu.is_done(report.path)
    for path in (report.path, tmp_path / "none.json"):
        gpu.note(path, "it was ended")
        assert json.loads(path.read_text())["failures"] == {"process": "it was ended"}


def test_outcomes_are_known_one_by_one_also_where_the_process_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(
        "import os, pytest\n"
        "def test_a(): pass\n"
        "@pytest.mark.parametrize('n', ['b c'])\ndef test_b(n): assert False\n"
        "def test_c(): os._exit(9)\n"
        "def test_d(): pytest.skip('no')\n"
    )
    names = [f"tests/test_x.py::test_{name}" for name in ("a", "b[b c]", "c", "d")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", f"--rootdir={tmp_path}"]
    monkeypatch.chdir(tmp_path)
    found = []
    with pytest.raises(RuntimeError, match=r"status 9 in .*test_c; 1 are left"):
        found.extend(outcomes_of(command, names))
    assert found == [(names[0], "PASSED"), (names[1], "FAILED"), (names[2], "CRASHED")]
    assert [*outcomes_of(command, names[3:])] == [(names[3], "SKIPPED")] and not [*outcomes_of(command, [])]


@pytest.mark.parametrize("wrong", [False, True])
def test_replays_are_compared_bit_by_bit(wrong: bool) -> None:
    scheduler = SUBJECTS["eagle3-tree"].build(running=1, host_looks=False)
    engine = reads_all(scheduler.engine)
    with torch.inference_mode(), Capture().emulated():
        capture(engine, (1,), lambda line: None)
    if wrong:
        graph = engine.graphs[max(engine.graphs, key=lambda key: (getattr(key[0], "nodes", 0), not key[1]))]
        replay = graph.replay
        graph.replay = lambda: (replay(), engine.kv.pool[0, 0, -1].add_(1e-3))
    serve = partial(run, scheduler, SUBJECTS["eagle3-tree"].requests(max_new_tokens=6)[:1])
    with torch.inference_mode():
        if wrong:
            with pytest.raises(AssertionError, match="a replay leaves another state: [0-9]+ numbers"):
                replays_compared(engine, serve)
        else:
            assert replays_compared(engine, serve)["equal"] > 2


def tree(folder: Path) -> Path:
    """Write a tree of sources that git knows, with heads in it."""
    filled(folder, {"a.py": 900, "minispec/heads/eagle/model": 2500, "minispec/heads/map": 10})
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def test_what_is_carried_comes_in_few_loads_and_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "PIECE", 1000)
    monkeypatch.setattr(carry, "TRAVELS", 3500)  # the tree and two pieces
    here, there, loads, store = tree(tmp_path / "here"), tmp_path / "there", tmp_path / "loads", tmp_path / "store"
    before, model = contents(here / "minispec/heads"), filled(tmp_path, {"model": 1500}) / "model"
    compiled = filled(tmp_path / "compiled", {"compiled.json": 5, "compiled.tar.gz.000": 70})
    monkeypatch.setattr(carry, "ROOT", here)
    count = carry.pack(loads, model, None, compiled)
    assert count > 3 and not (here / "minispec/heads").exists()
    with pytest.raises(SystemExit, match="puts it back"):
        carry.pack(loads, model, None, compiled)  # which would lose the pieces
    for load in range(count):
        files = [*(loads / f"{load}").iterdir()]
        assert sum(file.stat().st_size for file in files if file.name != "index.json") <= 2000
    monkeypatch.setattr(carry, "ROOT", there)
    lacking = [[what for what in carry.unpack(loads / f"{load}", store) if what[:4] != "pack"] for load in range(count)]
    assert any("heads.tar: " in what for what in lacking[0]) and lacking[-1] == []
    assert contents(there / "minispec/heads") == before and contents(store / "compiled") == contents(compiled)
    assert b"".join(path.read_bytes() for path in sorted(store.glob("*.gguf.*"))) == model.read_bytes()
    (store / "compiled" / "compiled.tar.gz.000").write_bytes(b"newer")
    carry.unpack(loads / "0", store)
    assert (store / "compiled" / "compiled.tar.gz.000").read_bytes() == b"newer", "what was compiled there stays"
    (store / "heads.tar.001").write_bytes(b"torn")
    assert "heads.tar: its pieces do not make what was cut" in carry.unpack(loads / f"{count - 1}", store)

    results = filled(there / "benchmarks/results", {"h100/step.json": 300, "h100/step.log": 300_000, "h100/x.bin": 9})
    out, cache = tmp_path / "out", filled(tmp_path / "cache", {f"compiled.tar.gz.00{i}": 9 for i in range(4)})
    filled(cache, {"compiled.json": 9})
    assert len(carry.collect(out, cache)) == 6
    filled(cache, {"compiled.tar.gz.004": 9})
    assert carry.collect(tmp_path / "less", cache) == ["results.tar.gz"]
    monkeypatch.setattr(carry, "ROOT", here)
    assert carry.unpack(out, store) == []
    came = contents(here / "benchmarks/results")
    assert came == {"h100/step.json": (results / "h100/step.json").read_bytes(),
                    "h100/step.log": (results / "h100/step.log").read_bytes()[-carry.LOG :]}  # fmt: skip


def ran(where: Path, *command: str, until: Path | None = None) -> int | None:
    """Run a module of the tree at `where`; with `until`, kill it and all its processes once that file has a figure."""
    environment = {**os.environ, "PYTHONPATH": str(where)}
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=where, env=environment)
    try:
        while until is not None and process.poll() is None:
            if until.is_file() and json.loads(until.read_text())["figures"]:
                break
            time.sleep(0.05)
        else:
            return process.wait()
    finally:
        for pid in children(process.pid) if process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return None


def children(pid: int) -> list[int]:
    """Return a process and those that it started."""
    below = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [pid, *(found for child in below for found in children(int(child)))]


@pytest.mark.slow
def test_pieces_in_an_empty_folder_run_and_go_on_where_they_were_killed(tmp_path: Path) -> None:
    here, there, store = tmp_path / "here", tmp_path / "there", str(tmp_path / "store")
    subprocess.run(["git", "clone", "-q", "--shared", str(gpu.ROOT), str(here)], check=True)
    assert ran(here, "benchmarks.carry", "pack") == 0
    names = subprocess.run(["git", "ls-files"], cwd=here, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in (name for name in names if (here / name).is_file()):  # as the tree travels
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(here / name, there / name)
    for load in sorted((here / ".carry").iterdir()):
        assert sum(file.stat().st_size for file in load.iterdir()) < carry.TRAVELS
        assert ran(there, "benchmarks.carry", "unpack", str(load), "--store", store) == 0
    stages, results = ("attention", "tests"), there / "benchmarks/results/cpu"
    command = ("benchmarks.gpu", "--tiny", "--stages", *stages)
    for stage in stages:
        assert ran(there, *command, until=results / f"{stage}.json") is None
        assert not gpu.is_done(results / f"{stage}.json")
    kept = json.loads((results / "tests.json").read_text())["figures"]["left out"]
    assert ran(there, *command) == 0 and all(gpu.is_done(results / f"{stage}.json") for stage in stages)
    assert json.loads((results / "tests.json").read_text())["figures"]["left out"] == kept
    assert ran(there, "benchmarks.carry", "collect", str(tmp_path / "out")) == 0
    loads = map(str, sorted((here / ".carry").iterdir()))
    assert ran(here, "benchmarks.carry", "unpack", *loads, str(tmp_path / "out"), "--store", store) == 0
    assert subprocess.run(["git", "status", "--short"], cwd=here, capture_output=True).stdout.count(b"heads") == 0
    assert gpu.is_done(here / "benchmarks/results/cpu/attention.json")


def filled(folder: Path, sizes: dict[str, int]) -> Path:
    """Write files of random bytes."""
    rng = random.Random(1)
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(rng.randbytes(size))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_compiled_code_comes_back_from_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(carry, "PIECE", 1000)
    pieces, made_with = tmp_path / "pieces", {"torch": "2"}
    source = filled(tmp_path / "compiled", {"fx/a.py": 3000, "triton/0/b.cubin": 1500})
    cache = gpu.CompileCache(pieces, source, made_with)
    assert not cache.restore() and cache.save() >= 5 and cache.save() == 0
    parts = sorted(pieces.glob("*.gz.*"))
    assert len(parts) >= 5 and all(part.stat().st_size <= 1000 for part in parts)
    again = gpu.CompileCache(pieces, tmp_path / "again", made_with)
    assert again.restore() and contents(tmp_path / "again") == contents(source) and again.save() == 0
    filled(tmp_path / "more", {"fx/new.py": 100})  # was compiled before what was kept is put back
    more = gpu.CompileCache(tmp_path / "pieces", tmp_path / "more", made_with)
    assert more.restore() and more.save() > 0 and cache.restore() is True
    (source / "fx/new.py").unlink()
    assert not gpu.CompileCache(pieces, tmp_path / "other", {"torch": "3"}).restore()
    (source / "fx/a.py").unlink()
    assert cache.save() < len(parts) and len(list(pieces.glob("*.gz.*"))) < len(parts)
    assert gpu.CompileCache(pieces, tmp_path / "fewer", made_with).restore()
    assert contents(tmp_path / "fewer") == contents(source)
    sorted(pieces.glob("*.gz.*"))[1].unlink()
    assert not gpu.CompileCache(pieces, tmp_path / "torn", made_with).restore() and not (tmp_path / "torn").exists()
    said = capsys.readouterr().out
    assert "was made with" in said and "not complete" in said


def test_the_default_model_is_made_of_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(tmp_path / "given", {"model.gguf.0": 700, "model.gguf.1": 500, "notes.txt": 9})
    whole = b"".join((folder / f"model.gguf.{i}").read_bytes() for i in range(2))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(SystemExit, match=r"--model .*model.gguf.0, model.gguf.1 .* make no file we know"):
        gpu.place_default_model(folder)

    def convert(path: Path, made: Path, tell: object) -> None:
        assert path.read_bytes() == whole
        filled(made, dict.fromkeys(FILES, 3))

    monkeypatch.setattr(gpu, "convert", convert)
    monkeypatch.setattr(gpu, "GGUF_SHA256", hashlib.sha256(whole).hexdigest())
    placed = gpu.place_default_model(folder)
    assert placed == ensure_default_model(lambda line: None) and sorted(contents(placed)) == sorted(FILES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert contents(gpu.place_default_model(placed)) == contents(placed)


def test_the_nodes_of_a_graph_are_absent_where_it_cannot_be_asked() -> None:
    assert graph_nodes(object()) is None
