"""bench.py on a tiny model: what it says and when, the order of its runs, its picture, and what Ctrl-C leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_layers import ROOT
from test_llm import CONFIG

import bench
from benchmarks import plot
from benchmarks.throughput import Run
from minispec.load.architectures import read_model_config
from minispec.load.published import published_tensors
from minispec.load.tokenizer import byte_tokenizer
from minispec.model import Model

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that minispec and transformers read, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    config = {**CONFIG, "model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = Model(read_model_config(config)).requires_grad_(False)
    save_file({f"model.{name}".replace("model.lm_head", "lm_head"): tensor.contiguous().clone()
               for name, tensor in published_tensors(model).items()}, folder / "model.safetensors")  # fmt: skip
    (folder / "tokenizer.json").write_text(byte_tokenizer(300).backend._tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def arguments(tiny: Path, *more: str) -> list[str]:
    """Return a command line that takes seconds."""
    return ["bench.py", "--model", str(tiny), "--dtype", "float32", "--device", "cpu", "--limit", "2",
            "--new-tokens", "6", *more]  # fmt: skip


def test_a_run_tells_its_plan_its_progress_every_result_and_who_is_fastest(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'minispec[plot]'")
    out, picture = tmp_path / "rows.json", tmp_path / "speed.png"
    more = ("--disable-torch-compile", "--batch", "1", "2", "--json", str(out), "--plot", str(picture))
    monkeypatch.setattr("sys.argv", arguments(tiny, *more))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    bench.main()
    said, progress = capsys.readouterr()
    first, *middle = said.splitlines()
    assert first.startswith("none, ngram, transformers; batch 1 and 2; 2 ordinary and 2 copying prompts, 6 new tokens")
    assert " minutes on two CPU cores" in first or " seconds on two CPU cores" in first
    results = [line for line in middle if line.startswith("round ")]
    names = ["none", "ngram", "transformers"]
    order = [line.split(": ")[1].split()[0] for line in results]
    assert order == (names + names) * 2 + (names[::-1] + names[::-1]) * 2, "A B B A"
    assert all("round" in line or "loading" in line or "importing" in line for line in progress.splitlines())
    assert "round 2 of 2: none, batch 2, copying; step 24 of 24, about" in progress
    table = [line for line in said.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + 3 * 4 and said.splitlines()[-1].startswith("Fastest here: ")
    report = json.loads(out.read_text())
    assert set(report) == {"hardware", "versions", "flags", "results"} and len(report["results"]) == 12
    assert report["flags"]["dtype"] == "torch.float32" and report["results"][0].keys() == asdict(row("x", 1.0)).keys()
    speeds = [one["tokens_per_s"] for one in report["results"][:3]]
    assert speeds == sorted(speeds, reverse=True), "the fastest first"
    ours = [one for one in report["results"] if one["name"] != "transformers"]
    assert all(one["step_ms"].keys() == one["shapes"].keys() for one in ours), "each size of tree has its time"
    assert all(ms > 0 for one in ours for ms in one["step_ms"].values())
    drawn = picture.read_bytes()
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n" and len(drawn) > 20000
    picture.unlink()
    plot.main([str(out), str(picture)])  # from the rows alone
    assert len(picture.read_bytes()) == len(drawn)


def row(name: str, speed: float, **changed: object) -> bench.Row:
    """Return a row that says little else."""
    unknown = {**dict.fromkeys(bench.Row.__annotations__), "accepted_by_depth": []}
    figures = {"name": name, "tokens_per_s": speed, "prompts": "ordinary", "batch": 1, "temperature": 0.0}
    return bench.Row(**{**unknown, **figures, **changed})


def test_the_picture_has_a_bar_for_each_batch_a_line_by_depth_and_the_time_of_each_tree() -> None:
    figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib: pip install 'minispec[plot]'")
    one, eight = {"accepted_by_depth": [0.7, 0.5, 0.4], "step_ms": {"12": 31.0, "1": 19.0}}, {"step_ms": {"1": 60.0}}
    rows = [row("none", 50.0, step_ms={"1": 20.0}), row("eagle3", 66.0, **one),
            row("eagle3", 90.0, batch=8, accepted_by_depth=[0.1], **eight), row("transformers", 30.0)]  # fmt: skip
    colours = {"none": "C0", "eagle3": "C1", "transformers": "C2"}
    left, middle, right = figure.Figure().subplots(1, 3)
    plot.speeds(left, rows, colours)
    place = lambda bar: round(bar.get_x() + bar.get_width() / 2)  # noqa: E731
    bars = {(bar.get_facecolor()[:3], place(bar)): bar.get_height() for bar in left.patches}
    assert sorted(bars.values()) == [30.0, 50.0, 66.0, 90.0] and len({colour for colour, _ in bars}) == 3
    assert [height for (_, x), height in bars.items() if x == 1] == [90.0], "the larger batch stands apart"
    plot.depths(middle, rows, colours)
    assert [line.get_xydata().tolist() for line in middle.lines] == [[[1, 0.7], [2, 0.5], [3, 0.4]]], "of batch 1"
    plot.times(right, rows, colours)
    assert [line.get_xydata().tolist() for line in right.lines] == [[[1, 20]], [[1, 19], [12, 31]], [[1, 60]]]
    assert [text.get_text() for text in right.texts] == [" 1", " 1", " 8"]


@pytest.mark.parametrize(
    ("file", "said"), [("x.gif", "must end in .png, .svg, .pdf"), ("no/x.png", "there is no folder"), (None, "[plot]")]
)
def test_a_picture_that_cannot_be_written_is_refused_before_anything_runs(
    file: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    if file is None:
        monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    else:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'minispec[plot]'")
    monkeypatch.setattr("sys.argv", ["bench.py", "--plot", str(tmp_path / (file or "x.png"))])
    with pytest.raises(SystemExit, match="2"):
        bench.parse()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("bench.py: error: --plot ") and said in lines[0]


class Terminal(io.StringIO):
    """What a terminal would be sent."""

    def isatty(self) -> bool:
        """Say that it is one."""
        return True


@pytest.mark.parametrize("rich", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_where_rich_is_missing(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    if rich:
        pytest.importorskip("rich", reason="needs rich: pip install 'minispec[explain]'")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    progress = bench.Progress([10.0, 10.0])
    progress.step("loading none")
    progress.finish()
    progress.step("round 1")
    print("a result")
    if rich:
        (task,) = progress.bar.tasks
        assert (task.completed, task.total) == (1, 2) and task.description.startswith("round 1; step 2 of 2, about ")
    progress.end()
    said = terminal.getvalue()
    assert capsys.readouterr().out == "a result\n", "a file gets the results, the bar does not"
    if rich:
        assert said.count("\x1b[?25l") == said.count("\x1b[?25h") == 1, "the cursor is back"
    else:
        assert [line.split("; ")[0] for line in said.splitlines()] == ["loading none", "round 1"]


def test_the_last_sentence_names_the_fastest_of_each_group() -> None:
    rows = [row("none", 50.0), row("eagle3", 66.0, speedup=1.3), row("none", 80.0, prompts="copying"),
            row("ngram", 70.0, prompts="copying", speedup=0.9)]  # fmt: skip
    assert bench.verdict(rows) == ("Fastest here: eagle3 at batch 1, ordinary prompts (1.30 times plain decoding); "
                                   "plain decoding at batch 1, copying prompts (1.14 times ngram).")  # fmt: skip
    assert bench.verdict(rows[1:2]).endswith("(nobody beside it).") and bench.verdict([]) == "Nothing was measured."


def test_ratios_are_taken_within_a_round_also_when_a_round_is_cut_off() -> None:
    results = bench.Results()
    for round_, (plain, other) in enumerate([(1.0, 0.5), (4.0, 1.0), (2.0, None)]):
        for name, seconds in (("none", plain), ("ngram", other)):
            if seconds:
                last = results.add(bench.Task(round_, 1, "copying", 0.0, name), Run(8, seconds))
    assert last.name == "none" and last.tokens_per_s == 4.0
    assert [(one.name, one.tokens_per_s, one.speedup) for one in results.rows()] == [
        ("ngram", 12.0, 3.0), ("none", 4.0, 1.0)
    ]  # fmt: skip


def test_what_is_left_is_scaled_by_how_long_it_took_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.time, "monotonic", lambda: 100.0)
    progress = bench.Progress([10.0, 10.0, 20.0])
    assert progress.left() == 40.0
    monkeypatch.setattr(bench.time, "monotonic", lambda: 140.0)
    progress.done = 2
    assert progress.left() == 40.0, "twice as slow as estimated"


def test_without_arguments_and_with_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench.py"])
    args = bench.parse()
    assert (args.method, args.batch) == (["none", "eagle3", "ngram", "transformers"], [1])
    assert [len(texts) for texts in bench.read_prompts(args.dataset, args.limit).values()] == [8, 8]
    monkeypatch.setattr("sys.argv", ["bench.py", "--full"])
    args = bench.parse()
    assert args.method == ["none", "ngram", "eagle3", "eagle", "mtp", "standalone", *bench.THEIRS]
    assert args.batch == [1, 8]
    lookups = [task for task in bench.tasks(args, bench.entrants(args), ["copying"]) if task.name == bench.THEIRS[1]]
    assert [task.batch for task in lookups] == [1, 1], "transformers looks up for one request at a time"


def test_a_head_has_a_row_alone_and_one_with_lookups(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    more = ("--algorithm", "none", "standalone", "--draft-model-path", str(tiny), "--rounds", "1", "--limit", "1")
    monkeypatch.setattr("sys.argv", arguments(tiny, *more, "--disable-torch-compile"))
    run = bench.Bench(bench.parse())
    run.run()
    rows = [row for row in run.results.rows() if row.name != "none"]
    assert {row.name for row in rows} == {"STANDALONE alone", "STANDALONE + lookup"}
    assert all(row.speedup and row.accept_length for row in rows)
    assert all((row.lookup_shares is None) == row.name.endswith(" alone") for row in rows)
    table = capsys.readouterr().out
    assert "STANDALONE alone " in table and "STANDALONE + lookup " in table


FIELDS = ["batch_size", "steps", "topk", "num_draft_tokens", "acc_length", "step_time", "speed", "completion_tokens"]


def test_a_sweep_measures_each_possible_tree_once_and_goes_on_where_it_was_cut_off(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "cells.jsonl"
    more = ("--algorithm", "standalone", "--draft-model-path", str(tiny), "--disable-torch-compile", "--limit", "1",
            "--sweep", str(out), "--batch", "1", "2", "--num-steps", "0", "2", "--eagle-topk", "0", "1", "2",
            "--num-draft-tokens", "0", "3", "4", "9", "--rounds", "1")  # fmt: skip
    monkeypatch.setattr("sys.argv", arguments(tiny, *more))
    bench.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(line) for line in lines] == [FIELDS] * 8
    shapes = [(0, 0, 0), (2, 1, 3), (2, 2, 3), (2, 2, 4)]  # a chain of 3 has no 4 nodes, and no tree here has 9
    assert [tuple(line.values())[:4] for line in lines] == [(batch, *shape) for batch in (1, 2) for shape in shapes]
    for line in lines:
        # The target drafts for itself: the prompt's forward gives one of six tokens, and a chain's two steps 3 and 2.
        exact = {(0, 0): 1.0, (2, 1): 2.5}.get((line["steps"], line["topk"]))
        assert line["acc_length"] == exact or (exact is None and 5 / 3 < line["acc_length"] <= 2.5)
        assert line["speed"] == pytest.approx(line["acc_length"] / line["step_time"], rel=0.05)
        assert line["completion_tokens"] == 6
    whole = out.read_text().splitlines(keepends=True)
    out.write_text("".join(whole[:-1]))
    bench.main()
    assert [tuple(json.loads(line).values())[:4] for line in capsys.readouterr().out.splitlines()] == [(2, 2, 2, 4)]
    assert len(out.read_text().splitlines()) == 8


def test_the_tuning_script_s_command_line_is_a_sweep_with_its_settings(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "output.jsonl"
    monkeypatch.setattr("sys.argv", [
        "bench.py", "--model-path", str(tiny), "--speculative-draft-model-path", str(tiny), "--trust-remote-code",
        "--speculative-algorithm", "STANDALONE", "--device", "cpu", "--dtype=float32", "--disable-torch-compile",
        "--mem-fraction-static", "0.6", "--batch-size", "2", "--steps", "0", "1", "--topk", "0", "1",
        "--num_draft_tokens", "0", "2", "--num-prompts", "3", "--start", "1", "--end", "2", "--output", str(out),
    ])  # fmt: skip
    args = bench.parse()
    assert (args.new_tokens, args.rounds, args.ignore_eos) == (512, 1, True)
    assert args.launch == {"trust_remote_code": True, "mem_fraction_static": 0.6}
    assert bench.cells(args) == [(2, 0, 0, 0), (2, 1, 1, 2)]
    monkeypatch.setattr(bench, "parse", lambda: (setattr(args, "new_tokens", 6), args)[1])
    bench.main()
    (line,) = (json.loads(line) for line in out.read_text().splitlines())
    assert list(line) == FIELDS and tuple(line.values())[:4] == (2, 1, 1, 2) and line["completion_tokens"] == 6
    assert bench.as_script([]).batch == (1, 2, 4, 8, 16) and len(bench.cells(bench.as_script([]))) > 60


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--num-steps", "1", "2"], "--num-steps 1 2: must be one number, but for --sweep"),
        (["--sweep", "x.jsonl", "--algorithm", "ngram"], "--algorithm ngram: with --sweep must be one of eagle3"),
    ],
)
def test_lists_of_trees_are_for_a_sweep_and_a_sweep_is_of_one_head(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.py", *given])
    with pytest.raises(SystemExit):
        bench.parse()
    assert said in capsys.readouterr().err


def wait_for(words: str, lines: list[str], process: subprocess.Popen, seconds: float = 120) -> None:
    """Wait until a line has these words."""
    end = time.monotonic() + seconds
    while not any(words in line for line in lines):
        assert process.poll() is None and time.monotonic() < end, "".join(lines)
        time.sleep(0.02)


SLOW = """
import sys, time, torch
from minispec.drafter import HostDrafter

def backend(graph, inputs):
    print("compiling", file=sys.stderr, flush=True)
    time.sleep(600)

class Slow(HostDrafter):
    name, nodes, depth = "slow", 2, 1
    def __init__(self, config, *target):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    def draft(self, slots): ...
    def observe(self, slot, tokens, again=False): ...
    def release(self, slot): ...
"""


@pytest.mark.slow
def test_interrupted_while_it_compiles_it_prints_what_it_has(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = arguments(tiny, "--algorithm", "none", "slow:Slow", "--disable-torch-compile", "--rounds", "1", "--json",
                        str(tmp_path / "rows.json"))  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)  # fmt: skip
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    try:
        wait_for("compiling", lines, process)
        assert "none, slow:Slow; batch 1" in lines[0], "the plan is the first line"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        reader.join(60)
    finally:
        process.kill()
    said = "".join(lines)
    after = said[said.index("Interrupted; 1 of 4 runs were done.") :]
    assert "| 1 | ordinary | 0 | none |" in after and "Fastest here: plain decoding" in after
    assert [one["name"] for one in json.loads((tmp_path / "rows.json").read_text())["results"]] == ["none"]
