"""The launch flags: each acts or has a line that says why not, documented commands are accepted, errors name flags."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_llm import CONFIG, DUMMY

from minispec import LLM, SamplingParams
from minispec.config import Config, flag_name
from minispec.load.flags import config_from_args, flags_page
from minispec.load.sglang_flags import GREEDY, INSTEAD, LINES, RECORD, REFUSED, SPEC_V2, VARIABLES, foreign_flags
from minispec.load.tree_shape import tree_shape
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.serve.info import stats_of

ROOT = Path(__file__).resolve().parent.parent


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line a bad command line prints; assert that it exits with status 2."""
    with pytest.raises(SystemExit) as stop:
        config_from_args(argv)
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed
    return printed


class Command(NamedTuple):
    """A launch command of SGLang's documentation: environment variables, and the flags as written."""

    environ: dict[str, str]
    argv: list[str]
    refused: bool


def commands() -> list[Command]:
    """Return the launch commands of tests/launch_commands.txt, in its order."""
    found = []
    for line in (ROOT / "tests/launch_commands.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        words = line.removeprefix("refused: ").split()  # not a shell's rules: <your-model> is a name like any other
        at = words.index("minispec.server")
        environ = dict(word.split("=", 1) for word in words[:at])
        found.append(Command(environ, words[at + 1 :], line.startswith("refused: ")))
    return found


COMMANDS = commands()
DOCUMENTED = [command for command in COMMANDS if not command.refused]


@pytest.mark.parametrize("command", DOCUMENTED)
def test_every_documented_command_is_accepted_as_written(command: Command) -> None:
    environ, argv, _ = command
    assert (len(COMMANDS), len(DOCUMENTED)) == (42, 41)
    config = config_from_args(argv, environ)
    asked = dict(zip(argv, argv[1:], strict=False))
    assert config.model_path == (asked.get("--model") or asked["--model-path"])
    assert config.algorithm == (asked.get("--speculative-algorithm") or asked.get("--speculative-algo", "NONE"))
    assert str(config.speculative_num_draft_tokens) == asked.get("--speculative-num-draft-tokens", "None")
    noted = [flag for flag in argv if flag in foreign_flags() or flag == "--trust-remote-code"]
    noted += ["--page-size 1"] * (asked.get("--page-size") == "1")
    assert len(config.notes) == len(noted) + len(environ)  # a line for each flag that does not act, and no other
    assert all(any(flag in note for note in config.notes) for flag in noted)


def test_a_refused_command_names_what_is_missing_before_any_flag(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refused = [command for command in COMMANDS if command.refused]
    said = [refusal(capsys, *argv).partition("error: ")[2] for _, argv, _ in refused]
    assert [line.split(" ")[0] for line in said] == [
        "deepseek-ai/DeepSeek-V4-Flash-DSpark",
    ]  # fmt: skip
    assert "is not served: it needs latent attention" in said[0]
    assert "UNO is not served yet: it needs LoRA" in refusal(capsys, "--model", "x", "--speculative-algorithm", "UNO")
    (tmp_path / "config.json").write_text('{"architectures": ["Grok1ForCausalLM"]}')
    assert "soft caps" in refusal(capsys, "--model", str(tmp_path), "--pgae-size", "4")
    assert "soft caps" not in refusal(capsys, "--model", "x", "--pgae-size", "4")


def test_defaults_are_those_of_the_contract() -> None:
    config = config_from_args([])
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


TOGETHER = ["--tp-size", "56", "--dist-init-addr", "here:1"]


def test_every_flag_reaches_its_field_and_underscores_do_too() -> None:
    samples = {
        "load_format": "dummy", "dtype": "bfloat16", "device": "cpu", "sampling_defaults": "openai", "page_size": "16",
        "speculative_algorithm": "ngram", "speculative_ngram_match_type": "prob", "log_level": "debug",
        "mem_fraction_static": "0.5", "speculative_ngram_branch_length": "19", "quantization": "int8",
        "speculative_accept_threshold_single": "0.5", "speculative_accept_threshold_acc": "0",
        "speculative_draft_load_format": "pt", "log_level_http": "info", "chat_template": "chatml",
        "cors_origins": "https://a.example", "tool_call_parser": "qwen25", "reasoning_parser": "qwen3",
        "ssl_keyfile": __file__, "ssl_certfile": __file__, "dist_init_addr": "here:1", "ray_address": "here:1",
        "speculative_draft_model_quantization": "unquant", "speculative_adaptive_config": __file__,
        "speculative_dspark_confidence_threshold": "0.5",
    }  # fmt: skip
    flags = [f for f in dataclasses.fields(Config) if f.metadata]
    assert len(flags) > 30
    for f in flags:
        for spell in (flag_name(f.name), "--" + f.name, *([flag_name("no_" + f.name)] if "bool |" in f.type else [])):
            argv = [spell] if f.type.startswith("bool") else [spell, samples.get(f.name, "7")]
            if f.name.startswith("speculative_ngram") or f.name.endswith("draft_tokens"):
                argv += ["--speculative-algorithm", "NGRAM"]
            if f.name in HEAD_FLAGS:
                argv += ["--speculative-algorithm", "EAGLE3"]
                argv += [
                    w
                    for name in SHAPE
                    if name in HEAD_FLAGS and f.name in SHAPE
                    for w in (flag_name(name), "3")
                    if name != f.name
                ] + (["--speculative-num-draft-tokens", "4"] if f.name in SHAPE else [])
            if f.name.endswith("draft_model_revision"):
                argv += ["--speculative-draft-model-path", "somewhere"]
            if f.name.startswith("ssl_"):
                argv += ["--ssl-certfile" if f.name == "ssl_keyfile" else "--ssl-keyfile", __file__]
            if f.name == "revision":
                argv += ["--model", "somewhere"]
            argv += {"nnodes": TOGETHER, "node_rank": ["--nnodes", "8", *TOGETHER]}.get(f.name, [])
            assert getattr(config_from_args(argv), f.name) != f.default, argv


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
        (["--speculative-algo=ngram", "--speculative-ngram-max-trie-depth=20"], "speculative_ngram_branch_length", 20),
    ],
)
def test_old_spellings_and_aliases_work(argv: list[str], field: str, value: object) -> None:
    assert getattr(config_from_args(argv), field) == value


@pytest.mark.parametrize(
    ("flag", "value", "numbers", "nodes"),
    [
        ("max-trie-depth", 8, (1, 7, 8, 10_000_000, 1, 10), 8),
        ("max-trie-depth", 30, (1, 12, 30, 10_000_000, 1, 10), 12),
        ("branch-length", 2, (1, 1, 2, 10_000_000, 1, 10), 2),
        ("min-match-window-size", 20, (20, 20, 21, 10_000_000, 1, 10), 12),
        ("max-match-window-size", 40, (1, 40, 41, 10_000_000, 1, 10), 40),
        ("min-bfs-breadth", 20, (1, 12, 18, 10_000_000, 20, 20), 12),
        ("max-bfs-breadth", 1, (1, 12, 18, 10_000_000, 1, 1), 12),
        ("capacity", 5, (1, 3, 4, 5, 1, 10), 4),
    ],
)
def test_every_number_of_ngram_works_alone_and_what_adapts_is_said(flag, value, numbers, nodes) -> None:
    config = config_from_args(["--speculative-algo=ngram", f"--speculative-ngram-{flag}={value}"])
    assert tuple(config.ngram.values()) == numbers and config.draft_tokens == nodes
    usual = Config(speculative_algorithm="NGRAM").ngram
    moved = [name for name, now in config.ngram.items() if now not in (usual[name], getattr(config, name))]
    assert [note.split(" is taken as ")[0] for note in config.notes] == list(map(flag_name, moved))
    again = dataclasses.replace(config, notes=())
    assert again == config and tuple(again.ngram.values()) == numbers
    NgramDrafter(NgramOptions(*numbers[:2], *numbers[4:], "BFS", *numbers[2:4], nodes))


def test_speculation_is_on_for_the_default_model_only() -> None:
    assert Config().algorithm == "EAGLE3" and Config(speculative_algorithm="ngram").draft_tokens == 12
    assert Config(model_path="x").algorithm == "NONE" and Config(model_path="x").draft_tokens == 1
    assert Config(speculative_algorithm="none").algorithm == "NONE"
    assert Config(speculative_algorithm="NGRAM", speculative_ngram_max_match_window_size=9).draft_tokens == 9
    assert Config(model_path="x", speculative_algorithm="NGRAM", speculative_num_draft_tokens=5).draft_tokens == 5


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--pp 2", "--pp 2: of parallelism there are --tp-size and --dp-size"),
        ("--speculative-algo EAGLE3 --speculative-num-steps 3", "--speculative-eagle-topk"),
        ("--speculative-algo EAGLE --speculative-num-draft-tokens 4", "not given: --speculative-num-steps"),
        ("--speculative-algo EAGLE --speculative-num-steps 3 --speculative-eagle-topk 2 "
         "--speculative-num-draft-tokens 1",
         "--speculative-num-draft-tokens must be at least 2"),
        ("--speculative-algo EAGLE --speculative-num-steps 3 --speculative-eagle-topk 2",
         "not given: --speculative-num-draft-tokens"),
        ("--quantization w8a8_int8", "--quantization must be one of int8, int4, gguf, fp8, got 'w8a8_int8'"),
        ("--speculative-draft-model-quantization int8", "must be one of fp8, unquant, got 'int8'"),
        ("--ssl-keyfile /nowhere/k.pem", "--ssl-keyfile must be a file, got '/nowhere/k.pem'"),
        (f"--ssl-keyfile {__file__}", "--ssl-keyfile needs --ssl-certfile"),
        (f"--ssl-certfile {__file__}", "--ssl-certfile needs --ssl-keyfile"),
        ("--ssl-ca-certs c.pem", "told apart by keys"),
        ("--lora-paths a", "adapters are not supported"),
        ("--kv-cache-dtype fp8_e5m2", "auto is accepted"),
        ("--chat-template vicuna",
         "or one of chatml, llama-2, llama-3-instruct, vicuna_v1.1, hermes, llama3-json, got 'vicuna'"),
        ("--load-format gguf", "--load-format must be one of auto, safetensors, pt, dummy, got 'gguf'"),
        ("--pgae-size 16", "did you mean --page-size?"),
        ("--speculative-cascade-depth 3", "unknown argument --speculative-cascade-depth; --help lists"),
        ("stray", "unknown argument stray"),
        ("--page-size 48", "--page-size must be one of 16, 32, 64, 128, got 48"),
        ("--port 70000", "--port must be in [0, 65535], got 70000"),
        ("--mem-fraction-static nan", "--mem-fraction-static"),
        ("--chunked-prefill-size 0", "--chunked-prefill-size must be positive"),
        ("--max-queued-requests 0", "--max-queued-requests must be at least 1, got 0"),
        ("--speculative-algo NGRAM --speculative-ngram-branch-length 9 --speculative-ngram-max-match-window-size=9",
         "below --speculative-ngram-branch-length, got 9 and 9"),
        ("--speculative-algo=NGRAM --speculative-ngram-min-match-window-size=13 "
         "--speculative-ngram-max-match-window-size=10",
         "must be at most --speculative-ngram-max-match-window-size, got 13 and 10"),
        ("--speculative-algo NGRAM --speculative-ngram-min-match-window-size 5 --speculative-ngram-max-trie-depth=5",
         "must be below --speculative-ngram-branch-length, got 5 and 5"),
        ("--speculative-algo NGRAM --speculative-ngram-min-bfs-breadth 11 --speculative-ngram-max-bfs-breadth=9",
         "at most --speculative-ngram-max-bfs-breadth, got 11 and 9"),
        ("--speculative-ngram-min-bfs-breadth 0", "--speculative-ngram-min-bfs-breadth must be at least 1, got 0"),
        ("--speculative-ngram-match-type dfs", "ngram-match-type must be one of BFS, PROB, got 'DFS'"),
        ("--speculative-accept-threshold-single 1.5", "-single must be in [0, 1], got 1.5"),
        ("--speculative-accept-threshold-acc nan", "--speculative-accept-threshold-acc must be in [0, 1]"),
        ("--cuda-graph-max-bs 0", "--cuda-graph-max-bs must be at least 1, got 0"),
        ("--cuda-graph-bs 1 -2", "--cuda-graph-bs must be at least 1, got -2"),
        ("--cuda-graph-bs 1 two", "argument --cuda-graph-bs/--cuda-graph-bs-decode: invalid int value: 'two'"),
        ("--cuda-graph-bs", "argument --cuda-graph-bs/--cuda-graph-bs-decode: expected at least one argument"),
        ("--tp-size 3 --nnodes 2", "--tp-size must be a multiple of --nnodes"),
        ("--tp 2 --nnodes 2", "--nnodes 2 needs --dist-init-addr, HOST:PORT of machine 0"),
        ("--tp 2 --nnodes 2 --node-rank 2", "--node-rank must be in [0, 1] with --nnodes 2, got 2"),
        ("--tp 2 --dist-init-addr here", "--dist-init-addr must be HOST:PORT with a port in [1, 65535]"),
        ("--dp 2 --tp 2 --nnodes 2 --dist-init-addr here:1", "--dp-size 2 is not for --nnodes 2"),
        ("--dp 2 --ray-address ray://here:1", "--ray-address must be HOST:PORT with a port in [1, 65535]"),
        ("--revision main", "--revision needs --model-path"),
        ("--speculative-algorithm medusa", "EAGLE, EAGLE3, NEXTN, DFLASH, DSPARK or STANDALONE, or module:"),
        ("--speculative-algorithm my-drafter:X", "or module:Class of your own, got"),
        ("--speculative-algo standalone --speculative-num-steps 3", "--speculative-eagle-topk"),
        ("--simulate-acc-len 0.5", "--simulate-acc-len must be at least 1.0, got 0.5"),
        ("--model x --simulate-acc-len 2", "2 needs trees, and --speculative-algorithm NONE drafts none"),
    ],
)  # fmt: skip
def test_refusals_are_one_line_that_names_the_flag(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, *command.split())


@pytest.mark.parametrize(
    "argv", [["--ep", "1"], ["--kv-cache-dtype=auto"], ["--enable_two_batch_overlap"], ["--trust-remote-code"],
             ["--json-model-override-args", "{}"], ["--pp-size", "1"], ["--disaggregation-mode", "null"]],
)  # fmt: skip
def test_flags_that_ask_for_what_is_so_leave_one_note(argv: list[str]) -> None:
    notes = config_from_args(argv).notes
    assert len(notes) == 1 and argv[0].partition("=")[0].replace("_", "-") in notes[0]


def test_what_changes_no_output_is_taken_with_any_value_and_one_line() -> None:
    usual, flags = Config(), [flag for flags in LINES.values() for flag in flags.split()]
    assert len(flags) == len(set(flags)) > 250
    for flag in flags:
        for words in ([flag], [flag, "7"], [flag, "1", "2", "4"], [f"{flag}=auto"]):
            config = config_from_args(words)
            assert len(config.notes) == 1 and config.notes[0].startswith(words[0].partition("=")[0])
            assert dataclasses.replace(config, notes=()) == usual


def test_what_opens_a_door_is_refused_but_for_the_value_that_describes_what_is_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flag in [word for flags in REFUSED.values() for word in flags.split()]:
        name, equals, value = flag.partition("=")
        assert f"{name} another: " in refusal(capsys, name, "another")
        if equals:
            assert len(config_from_args([name, value]).notes) == 1


@pytest.mark.parametrize("name", INSTEAD)
def test_values_that_stand_for_another_are_taken_as_it_with_a_line(name: str) -> None:
    for given, (taken, _) in INSTEAD[name].items():
        drafting = {"speculative_algorithm": "EAGLE", "model_path": "x"}
        for config in (
            Config(**drafting, **{name: given}),
            config_from_args(["--model=x", "--speculative-algo=EAGLE", flag_name(name), str(given)]),
        ):
            assert getattr(config, name) == taken
            assert len(config.notes) == 1 and f"{flag_name(name)} {given} is taken as {taken}" in config.notes[0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "m", "--speculative-draft", "x"], "--speculative-draft-model-path does nothing with"),
        (["--speculative-algo", "NGRAM", "--speculative-eagle-topk", "3"], "belongs to EAGLE, EAGLE3, DFLASH, DSPARK,"),
        (["--model", "x", "--speculative-num-draft-tokens", "4"], "--speculative-algorithm NONE; it belongs to NGRAM"),
        (["--model", "x", "--speculative-accept-threshold-acc", "0.9"], "--speculative-algorithm NONE; it belongs to"),
        (["--speculative-algorithm", "my.drafter:X", "--speculative-ngram-capacity", "99"], "belongs to NGRAM"),
        (["--speculative-algo", "NGRAM", "--speculative-draft-load-format", "pt"], "--speculative-draft-load-format"),
    ],
)
def test_a_flag_of_another_drafter_does_nothing_and_says_so(argv: list[str], said: str) -> None:
    (note,) = config_from_args(argv).notes
    assert said in note


def test_variables_of_sglang_that_are_set_are_named_in_one_line() -> None:
    environ = {"SGLANG_B": "1", "SGLANG_A": "", "HOME": "/", SPEC_V2: "False"}
    (note,) = config_from_args([], environ).notes
    assert note.endswith(f"not read here: SGLANG_A, SGLANG_B, {SPEC_V2}")
    assert config_from_args([], {"HOME": "/"}).notes == ()


def test_two_variables_of_sglang_act(tmp_path: Path) -> None:
    ngram, environ = ["--speculative-algo=ngram"], {GREEDY: "True", RECORD: "1"}
    config = config_from_args(ngram, environ)
    assert config.verifies_greedily and config.record_step_time
    assert config.notes == (f"{GREEDY}: temperatures of requests count as 0",)
    other = config_from_args([], environ)
    assert not other.verifies_greedily and other.notes == (f"{GREEDY}: nothing but with NGRAM",)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = {**DUMMY, "device": "cpu", "speculative_algorithm": "NGRAM"}
    greedy, plain = LLM(tmp_path, force_greedy=True, record_step_time=True, **options), LLM(tmp_path, **options)
    hot, cold = (SamplingParams(temperature=heat, sampling_seed=3, max_new_tokens=9) for heat in (2.0, 0.0))
    texts = [llm.generate([1, 2, 3], wish)["output_ids"] for llm in (greedy, plain) for wish in (hot, cold)]
    assert texts[0] == texts[1] == texts[3] != texts[2]
    times = stats_of(greedy.scheduler)["step_time_dict"]
    assert list(times) == ["1"] and 2 <= len(times["1"]) <= 16 and min(times["1"]) > 0
    assert "step_time_dict" not in stats_of(plain.scheduler)


def test_spec_v2_says_that_trees_are_served() -> None:
    tree = ["--model=x", "--speculative-algo=EAGLE", "--speculative-num-steps=3", "--speculative-eagle-topk=4",
            "--speculative-num-draft-tokens=16"]  # fmt: skip
    (note,) = config_from_args(tree, {SPEC_V2: "True"}).notes
    assert SPEC_V2 in note and "--speculative-eagle-topk 4 trees are served" in note
    (note,) = config_from_args([], {SPEC_V2: "1"}).notes
    assert SPEC_V2 in note and "trees" not in note


CONTRACT = """
    --admin-api-key --allow-auto-truncate --api-key --attention-backend --chat-template --chunked-prefill-size --config
    --context-length --cuda-graph-bs --cuda-graph-max --cuda-graph-max-bs --decode-log-interval --disable-cuda-graph
    --disable-cuda-graph-padding --disable-overlap-schedule --disable-radix-cache --dp --dtype --enable-cache-report
    --enable-custom-logit-processor --enable-metrics --enable-mixed-chunk --enable-multi-layer-eagle
    --enable-return-hidden-states --enable-torch-compile --ep --grammar-backend --host --json-model-override-args
    --kv-cache-dtype --log-level --max-prefill-tokens --max-queued-requests --max-running-requests --max-total-tokens
    --mem-frac --mem-fraction --mem-fraction-static --model --model-path --page-size --port --preferred-sampling-params
    --quantization --random-seed --sampling-backend --sampling-defaults --schedule-conservativeness --schedule-policy
    --served-model-name --skip-server-warmup --speculative-accept-threshold-acc --speculative-accept-threshold-single
    --speculative-adaptive --speculative-algo --speculative-algorithm --speculative-attention-mode --speculative-draft
    --speculative-draft-attention-backend --speculative-draft-load-format --speculative-draft-model
    --speculative-draft-model-path --speculative-draft-model-quantization --speculative-draft-model-revision
    --speculative-dflash-block-size --speculative-dflash-draft-window-size --speculative-draft-window-size
    --speculative-dspark-block-size --speculative-dspark-confidence-threshold --speculative-dspark-sps-table-path
    --speculative-dspark-confidence-sts-path
    --speculative-eagle-topk --speculative-moe-a2a-backend --speculative-moe-runner-backend
    --speculative-ngram-branch-length --speculative-ngram-capacity --speculative-ngram-match-type
    --speculative-ngram-max-bfs-breadth --speculative-ngram-max-match-window-size --speculative-ngram-max-trie-depth
    --speculative-ngram-min-bfs-breadth --speculative-ngram-min-match-window-size --speculative-num-draft-tokens
    --speculative-num-steps --speculative-token-map --speculative-use-block-verification
    --speculative-use-rejection-sampling --stream-interval --stream-output --tensor-parallel-size --tokenizer-path
    --torch-compile-max-bs --tp --tp-size --watchdog-timeout --download-dir --log-level-http --trust-remote-code
    """.split()


def test_the_page_of_flags_is_what_the_tables_say_and_lists_the_whole_contract(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
    assert page == flags_page(), "python -m minispec.load.flags > docs/flags.md"
    acting = page.partition("## Flags that act")[2].partition("\n## ")[0].splitlines()[4:]
    assert len(acting) > 70 and [row for row in acting if row.startswith("|") and "|  |" in row] == []  # all defaults
    assert [flag for flag in CONTRACT if not re.search(rf"[` ]{flag}[` ]", page)] == []
    assert [name for name in VARIABLES if f"`{name}`" not in page] == [] and len(VARIABLES) == 11
    for flag in CONTRACT:  # and the parser knows each: whatever else it says, it is not that it never heard of it
        try:
            config_from_args([flag, "1"])
        except SystemExit:
            assert "unknown argument --" not in capsys.readouterr().err, flag


def test_a_token_map_is_taken_whatever_drafts() -> None:
    for algorithm in ("NONE", "NGRAM", "EAGLE", "EAGLE3"):  # who has no use for it says so when it starts
        assert Config(speculative_algorithm=algorithm, speculative_token_map="x").speculative_token_map == "x"


def test_the_library_gets_the_same_checks() -> None:
    for wrong in ({"page_size": "64"}, {"port": True}, {"disable_radix_cache": 1}, {"host": ""}, {"dtype": "int8"},
                  {"page_size": True}, {"page_size": [1]}):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(flag_name(next(iter(wrong))))):
            Config(**wrong)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]


def test_a_chat_template_is_a_name_a_file_or_a_template(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("{{ messages }}")
    for given in ("llama-2", str(tmp_path / "mine"), "{% for m in messages %}{% endfor %}"):
        assert config_from_args(["--chat-template", given]).chat_template == given


def test_help_lists_every_flag_and_hides_the_foreign_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        config_from_args(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "--pp" not in text
    assert [f.name for f in dataclasses.fields(Config) if f.metadata and flag_name(f.name) not in text] == []


@pytest.mark.parametrize("columns", [60, 150])
def test_help_is_as_wide_as_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        config_from_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    texts = [line for line in lines if "--" not in line]  # a flag's names and values are not broken
    assert columns - 10 < max(map(len, texts)) <= columns


def test_the_batches_of_graphs_are_sorted_and_their_largest_is_the_largest() -> None:
    for config in (config_from_args(["--cuda-graph-bs", "8", "2", "8"]), Config(cuda_graph_bs=[8, 2, 8])):
        assert (config.cuda_graph_bs, config.cuda_graph_max_bs, config.notes) == ((2, 8), 8, ())
    assert Config(cuda_graph_bs=(2,), cuda_graph_max_bs=2).notes == ()
    (note,) = config_from_args(["--cuda-graph-bs", "2", "--cuda-graph-max", "4"]).notes
    assert note == "--cuda-graph-max-bs 4 is taken as 2, the largest of --cuda-graph-bs"
    (note,) = Config(cuda_graph_bs=(2,), disable_cuda_graph=True).notes
    assert note == "--cuda-graph-bs does nothing beside --disable-cuda-graph"
    for wrong in ([], 3, ["1"], [True], [1.0]):
        with pytest.raises(ValueError, match="--cuda-graph-bs must be"):
            Config(cuda_graph_bs=wrong)


def test_thresholds_are_none_where_verification_is_exact() -> None:
    name = "speculative_accept_threshold_"
    assert Config().thresholds is None and config_from_args(["--speculative-accept-threshold-acc=1"]).thresholds is None
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
        ((3, 1), "LlamaForCausalLM", (3, 1, 4)),  # a chain needs no count
        ((5, 1), "Qwen3ForCausalLM", (5, 1, 6)),
    ],
)
def test_tree_shapes_are_the_seed_systems_and_possible(given, architecture, shape) -> None:
    wishes = dict(zip(SHAPE, given, strict=False))
    assert tree_shape(Config(model_path="x", speculative_algorithm="NEXTN", **wishes), architecture) == shape
    alone = tree_shape(Config(model_path="x", speculative_algorithm="STANDALONE", **wishes), architecture)
    assert alone == (shape if given else (3, 1, 4))


def test_what_cpu_md_says_of_prefill_steps_is_so() -> None:
    from minispec.attention import prefill_block
    from minispec.load.build import CPU_PREFILLS

    page = (Path(__file__).resolve().parent.parent / "docs/cpu.md").read_text(encoding="utf-8")
    said = r"\(128 tokens on CUDA, (\d+) on a CPU\), of which a step holds one of (\w+) numbers"
    width, count = re.search(said, page).groups()
    assert int(width) == prefill_block(torch.device("cpu")) and prefill_block(torch.device("cuda")) == 128
    assert {10: "ten"}[len(CPU_PREFILLS)] == count and CPU_PREFILLS[-1] == 512
