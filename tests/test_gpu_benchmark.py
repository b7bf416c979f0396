"""`python -m benchmarks.gpu` without a GPU: every stage in toy sizes, and what the command does around the stages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import wait_until

from benchmarks import gpu
from benchmarks.gpu_stages import MASKS, OPTIONS, STAGES, TINY, Report
from minispec.load.architectures import read_model_config
from minispec.load.default_model import FILES
from minispec.load.published import published_tensors
from minispec.load.weights import read_config
from minispec.model import Model
from minispec.train.export import published_config, write_folder

OF_STEPS = [f"{what}, {name}" for what in ("one by one", "temperature 0.8") for name in ("plain", "tree")]
COMPARED = {  # stage: its comparisons, and what each compares
    "step": {"steps": ("plain", "tree"), **{name: ("usual", name.split(", ")[0]) for name in OF_STEPS}},
    "batches": {f"batch 2, {tree}": ("plain", "tree")
                for tree in ("1/2/2, accept length 1.7", "3/2/6, accept length 2.5")},
    "variants": {name: ("usual", name) for name in ("within the loop", *OPTIONS)},
    "fp8": {"plain": ("float32", "int8"), "tree": ("float32", "int8")},
}  # fmt: skip


def measured(stage: str, out: Path) -> dict:
    """Run a stage in toy sizes and return its file."""
    assert gpu.main(["--tiny", "--in-this-process", "--stages", stage, "--out", str(out)]) == 0
    return json.loads((out / "cpu" / f"{stage}.json").read_text())


@torch.inference_mode()
def small_model(folder: Path, like: Path) -> Path:
    """Write two small random layers with the tokenizer of another model."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    config = replace(read_model_config(read_config(like)), **sizes)
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
    if stage in ("server", "methods"):
        model = small_model(tmp_path / "model", request.getfixturevalue("demo_folder"))
        monkeypatch.setattr(gpu, "TINY", replace(TINY, model=str(model), greedy=str(tmp_path / "greedy.jsonl")))
        assert gpu.main(["--tiny", "--prepare"]) == 0
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
        if stage == "batches":
            rows = 2 * TINY.steps * first["batch"]
            assert second["accept_length"] == pytest.approx(float(name.split()[-1]), abs=1.5 / rows**0.5)
    if stage == "step":
        assert [figures["sizes"][name] for name in ("rounds", "topk", "nodes")] == list(TINY.eagle3)
        assert 0 < figures["bandwidth"]["share_of_copy"] and figures["bandwidth"]["plain_step_bytes"] > 1e4
        tables = [figures[f"profile of {TINY.steps}, {what}"] for what in ("tree", "plain")]
        assert all(any("scaled_dot_product" in line for line in table) for table in tables)
    if stage == "attention":
        cells = [figures[f"{nodes} nodes, context {context}, {mask}"]
                 for mask in MASKS for nodes in TINY.nodes for context in TINY.contexts]  # fmt: skip
        assert all(cell["relative_error"] < 1e-6 for cell in cells[: -len(TINY.nodes) * len(TINY.contexts)])
        assert len(cells) == 12 and all(cell["ms_a_layer"] > 0 for cell in cells)
        assert cells[0]["bytes_a_layer"] == 2 * 2 * 16 * 4 * (TINY.contexts[0] + TINY.nodes[0])
    if stage == "products":
        assert len(figures) == 4 * (4 + 3) and all(0 < found["relative_error"] < 0.1 for found in figures.values())
    if stage == "tests":
        assert [*figures] == ["tests/test_tree.py"] and "passed" in figures["tests/test_tree.py"]
    if stage == "server":
        assert figures["replies"]["equal"] == 4 and figures["replies"]["lengths"] == [TINY.new_tokens] * 4
    if stage == "methods":
        assert [figures[name][f"batch {batch}"]["equal"] for name in TINY.methods for batch in (1, 8)] == [2] * 4


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


def test_stages_that_are_done_are_not_run_again_and_none_begins_when_the_minutes_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    limits: list[float] = []

    def run(command: list[str], log: Path, limit_s: float) -> str | None:
        ran.append(command[-1])
        limits.append(limit_s)
        return "it died" if ran[-1] == "step" else None

    monkeypatch.setattr(gpu, "run", run)
    (tmp_path / "cpu").mkdir()
    for stage, complete in (("tests", True), ("step", False)):
        (tmp_path / "cpu" / f"{stage}.json").write_text(json.dumps({"complete": complete, "figures": {}}))
    command = ["--tiny", "--out", str(tmp_path), "--stages", "tests", "step", "fp8"]
    assert gpu.main(command) == 1 and ran == ["step", "fp8"]  # one that dies leaves the others
    assert gpu.main([*command, "--force"]) == 1 and ran[2:] == ["tests", "step", "fp8"]
    assert set(limits) == {gpu.LIMIT_S}
    assert gpu.main([*command, "--force", "--minutes", "2"]) == 1 and 115 < limits[-1] <= 120
    said = capsys.readouterr().out
    assert gpu.main([*command, "--minutes", "0.1"]) == 1 and len(ran) == 8
    assert "step: not begun, the 0.1 minutes are over" in capsys.readouterr().out and "not begun" not in said


def test_the_table_has_what_is_compared() -> None:
    figures = {"a": {"plain": {"ms": 4.3, "steps": 2}, "ms_ratio": 1.25}, "sizes": [1], "equal": True}
    assert [*gpu.table(figures)] == ["  a: ms_ratio 1.25", "  a, plain: ms 4.3"]


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
    log, child = tmp_path / "log", tmp_path / "child"
    assert "after 1 s" in str(gpu.run(["sh", "-c", f"sleep 99 & echo $! > {child}; wait"], log, 0.7))
    wrong = gpu.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], log, 60)
    assert "status 3" in str(wrong) and "why" in str(wrong)
    assert gpu.run([sys.executable, "-c", ""], log, 60) is None
    pid = int(child.read_text())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}/exe"))  # a zombie has none


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
