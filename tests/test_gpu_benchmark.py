"""`python -m benchmarks.gpu` without a GPU: every stage in toy sizes, and what the command does around the stages."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_stages import STAGES, TINY, Report, graph_nodes
from minispec.load.default_model import FILES, ensure_default_model
from minispec.load.weights import read_config
from minispec.model import Model, ModelConfig, published_tensors
from minispec.train.export import published_config, write_folder

COMPARED = {  # stage: its comparisons, and what each compares
    "step": {"steps": ("plain", "tree")},
    **{f"batch-{n}": {f"accept length {x:g}": ("plain", "tree") for x in TINY.lengths} for n in (1, 8, 64)},
    "eagle2": {"steps": ("plain", "tree")},
    "overlap": {"plain": ("serial", "overlap"), "tree": ("serial", "overlap")},
    "sampled": {"plain": ("greedy", "temperature 0.8"), "tree": ("greedy", "temperature 0.8")},
    "fp8": {"plain": ("float32", "int8"), "tree": ("float32", "int8")},
    "context": {f"prompt {n}": ("plain", "tree") for n in TINY.contexts},
}
OTHERS = {"tests", "parity", "default", "profile"}


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
        assert [engine["sizes"][name] for name in ("steps", "topk", "nodes")] == list(TINY.eagle3)
    else:
        assert stage in OTHERS
    if stage in ("step", "eagle2"):
        share = figures["bandwidth"]
        assert 0 < share["share_of_copy"] and share["plain_step_bytes"] > 1e4
        assert figures["graphs"] == {} and not engine["captured"]  # absent where nothing is captured
    if stage == "tests":
        assert figures["tests"]["tests"] > 5 and figures["tests"]["failures"] == figures["tests"]["exit_status"] == 0
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
    for package, file in (("openai", "served"), ("pydantic", "grammar"), ("gguf", "gguf"), ("llguidance", "closing")):
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
    monkeypatch.setattr(gpu, "PIECE", 1000)
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
