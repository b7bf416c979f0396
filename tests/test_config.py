"""Claims about the launch flags: nothing is parsed and ignored, and every refusal names its flag."""

from __future__ import annotations

import dataclasses
import re

import pytest

from minispec.config import Config, flag_name


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line a bad command line prints; assert that it exits with status 2."""
    with pytest.raises(SystemExit) as stop:
        Config.from_args(argv)
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed
    return printed


def test_defaults_are_those_of_the_contract() -> None:
    config = Config.from_args([])
    expected = {
        "host": "127.0.0.1", "port": 30000, "page_size": 64, "decode_log_interval": 40, "stream_interval": 1,
        "sampling_defaults": "model", "speculative_ngram_min_match_window_size": 1,
        "speculative_ngram_max_match_window_size": 12, "speculative_ngram_min_bfs_breadth": 1,
        "speculative_ngram_max_bfs_breadth": 10, "speculative_ngram_match_type": "BFS",
        "speculative_ngram_branch_length": 18, "speculative_ngram_capacity": 10_000_000,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
HEAD_FLAGS = ("speculative_draft_model_path", "speculative_draft_model_revision", "speculative_token_map", *SHAPE[:2])


def test_every_flag_reaches_its_field_and_underscores_do_too() -> None:
    samples = {
        "load_format": "dummy", "dtype": "bfloat16", "device": "cpu", "sampling_defaults": "openai", "page_size": "16",
        "speculative_algorithm": "ngram", "speculative_ngram_match_type": "prob", "log_level": "debug",
        "mem_fraction_static": "0.5", "speculative_ngram_branch_length": "19",
        "speculative_accept_threshold_single": "0.5", "speculative_accept_threshold_acc": "0",
    }  # fmt: skip
    flags = [f for f in dataclasses.fields(Config) if f.metadata]
    assert len(flags) > 30
    for f in flags:
        for spell in (flag_name(f.name), "--" + f.name):
            argv = [spell] if f.type == "bool" else [spell, samples.get(f.name, "7")]
            if f.name.startswith("speculative_ngram") or f.name.endswith("draft_tokens"):
                argv += ["--speculative-algorithm", "NGRAM"]
            if f.name in HEAD_FLAGS:
                argv += ["--speculative-algorithm", "EAGLE3"]
                argv += [w for name in SHAPE if name in HEAD_FLAGS and f.name in SHAPE for w in (flag_name(name), "3")
                         if name != f.name] + (["--speculative-num-draft-tokens", "4"] if f.name in SHAPE else [])
            if f.name.endswith("draft_model_revision"):
                argv += ["--speculative-draft-model-path", "somewhere"]
            if f.name == "revision":
                argv += ["--model", "somewhere"]
            argv = ["--speculative-ngram-max-bfs-breadth=9", *argv] if f.name == "speculative_ngram_capacity" else argv
            assert getattr(Config.from_args(argv), f.name) != f.default, argv


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--model", "a/b"], "model_path", "a/b"),
        (["--mem-fraction", "0.7"], "mem_fraction_static", 0.7),
        (["--speculative-algo", "none"], "speculative_algorithm", "NONE"),
        (["--speculative_algorithm=Ngram"], "speculative_algorithm", "NGRAM"),
        (["--speculative-algo", "my.drafter:Mine"], "speculative_algorithm", "my.drafter:Mine"),
        (["--speculative-algo=a:B", "--speculative-num-steps=2"], "speculative_num_steps", 2),
        (["--speculative-algo=a:B", "--speculative-draft=x"], "speculative_draft_model_path", "x"),
        (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
        (["--dtype", "half"], "dtype", "float16"),
    ],
)
def test_old_spellings_and_aliases_work(argv: list[str], field: str, value: object) -> None:
    assert getattr(Config.from_args(argv), field) == value


def test_speculation_is_on_for_the_default_model_only() -> None:
    assert Config().algorithm == "EAGLE3" and Config(speculative_algorithm="ngram").draft_tokens == 12
    assert Config(model_path="x").algorithm == "NONE" and Config(model_path="x").draft_tokens == 1
    assert Config(speculative_algorithm="none").algorithm == "NONE"
    assert Config(speculative_algorithm="NGRAM", speculative_ngram_max_match_window_size=9).draft_tokens == 9
    assert Config(model_path="x", speculative_algorithm="NGRAM", speculative_num_draft_tokens=5).draft_tokens == 5


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tp", "2"], "--tp 2: minispec runs on one device"),
        (["--model", "m", "--speculative-draft", "x"], "--speculative-draft-model-path has no meaning with"),
        (["--speculative-algo", "EAGLE3", "--speculative-num-steps", "3"], "--speculative-eagle-topk"),
        (["--speculative-algo", "EAGLE", "--speculative-num-draft-tokens", "4"], "not given: --speculative-num-steps"),
        (["--speculative-algo", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "2",
          "--speculative-num-draft-tokens", "1"], "--speculative-num-draft-tokens must be at least 2"),
        (["--speculative-algo", "NGRAM", "--speculative-eagle-topk", "3"], "belongs to EAGLE, EAGLE3, STANDALONE"),
        (["--quantization", "fp8"], "quantization is not in this version"),
        (["--attention-backend", "fa3"], "attention is FlexAttention"),
        (["--schedule-policy", "lpm"], "fcfs is accepted"),
        (["--pgae-size", "16"], "did you mean --page-size?"),
        (["stray"], "unknown argument stray"),
        (["--page-size", "48"], "--page-size must be one of 16, 32, 64, 128, got 48"),
        (["--port", "70000"], "--port must be in [0, 65535], got 70000"),
        (["--mem-fraction-static", "nan"], "--mem-fraction-static"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size must be positive"),
        (["--max-queued-requests", "0"], "--max-queued-requests must be at least 1, got 0"),
        (["--speculative-algo", "NGRAM", "--speculative-ngram-branch-length", "12"],
         "must be below --speculative-ngram-branch-length, got 12 and 12"),
        (["--speculative-algo", "NGRAM", "--speculative-ngram-min-bfs-breadth", "11"],
         "--speculative-ngram-max-bfs-breadth"),
        (["--model", "x", "--speculative-num-draft-tokens", "4"], "--speculative-algorithm NONE; it belongs to NGRAM"),
        (["--model", "x", "--speculative-accept-threshold-acc", "0.9"], "--speculative-algorithm NONE; it belongs to"),
        (["--speculative-accept-threshold-single", "1.5"], "-single must be in [0, 1], got 1.5"),
        (["--speculative-accept-threshold-acc", "nan"], "--speculative-accept-threshold-acc must be in [0, 1]"),
        (["--revision", "main"], "--revision needs --model-path"),
        (["--speculative-algorithm", "medusa"], "NONE, NGRAM, EAGLE, EAGLE3, NEXTN or STANDALONE, or module:Class of"),
        (["--speculative-algorithm", "my drafter:X"], "or module:Class of your own, got"),
        (["--speculative-algorithm", "my.drafter:X", "--speculative-ngram-capacity", "99"], "belongs to NGRAM"),
        (["--speculative-algo", "standalone", "--speculative-num-steps", "3"], "--speculative-eagle-topk"),
    ],
)
def test_refusals_are_one_line_that_names_the_flag(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *argv)


@pytest.mark.parametrize(
    "argv", [["--tp", "1"], ["--disable-cuda-graph"], ["--disable_overlap_schedule"], ["--schedule-policy", "fcfs"],
             ["--disable-cuda-graph-padding"], ["--trust-remote-code"]],
)  # fmt: skip
def test_flags_that_ask_for_what_is_so_leave_one_note(argv: list[str]) -> None:
    notes = Config.from_args(argv).notes
    assert len(notes) == 1 and argv[0].replace("_", "-") in notes[0]


def test_a_token_map_is_taken_whatever_drafts() -> None:
    for algorithm in ("NONE", "NGRAM", "EAGLE", "EAGLE3"):  # who has no use for it says so when it starts
        assert Config(speculative_algorithm=algorithm, speculative_token_map="x").speculative_token_map == "x"


def test_the_library_gets_the_same_checks() -> None:
    for wrong in ({"page_size": "64"}, {"port": True}, {"disable_radix_cache": 1}, {"host": ""}, {"dtype": "int8"}):
        with pytest.raises(ValueError, match=re.escape(flag_name(next(iter(wrong))))):
            Config(**wrong)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]


def test_help_lists_every_flag_and_hides_the_foreign_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        Config.from_args(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "--tp" not in text
    assert [f.name for f in dataclasses.fields(Config) if f.metadata and flag_name(f.name) not in text] == []


def test_thresholds_are_none_where_verification_is_exact() -> None:
    name = "speculative_accept_threshold_"
    assert Config().thresholds is None and Config.from_args(["--speculative-accept-threshold-acc=1"]).thresholds is None
    assert Config(**{name + "single": 0.25}).thresholds == (0.25, 1.0)
    assert Config(**{name + "single": 0, name + "acc": 0}).thresholds == (0, 1e-9)  # acc divides
    eagle = Config(model_path="x", speculative_algorithm="EAGLE", **{name + "acc": 0.5})
    assert eagle.thresholds == (1.0, 0.5)


@pytest.mark.parametrize(
    ("given", "architecture", "shape"),
    [
        ((), "LlamaForCausalLM", (5, 4, 8)),
        ((), "Qwen3ForCausalLM", (3, 1, 4)),
        ((3, 1, 9), "LlamaForCausalLM", (3, 1, 4)),  # a chain has steps + 1 nodes
        ((2, 2, 8), "LlamaForCausalLM", (2, 2, 7)),  # no more candidates exist
        ((3, 4, 16), "LlamaForCausalLM", (3, 4, 16)),
    ],
)
def test_tree_shapes_are_the_seed_systems_and_possible(given, architecture, shape) -> None:
    wishes = dict(zip(SHAPE, given, strict=False))
    assert Config(model_path="x", speculative_algorithm="NEXTN", **wishes).tree_shape(architecture) == shape
    alone = Config(model_path="x", speculative_algorithm="STANDALONE", **wishes).tree_shape(architecture)
    assert alone == (shape if given else (3, 1, 4))
