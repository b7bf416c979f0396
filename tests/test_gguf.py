"""GGUF files, written here by the gguf package as llama.cpp's converter writes them, and converted back.

The weights that come out must be those that went in, and the model must have the logits of the one that was written.
What changes the computation and is not known must be refused, in one line that says what it is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from test_model import scaled_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from minispec import LLM, SamplingParams
from minispec.config import Config
from minispec.load import gguf_models
from minispec.load.build import choose_folder
from minispec.load.gguf_files import Metadata
from minispec.load.gguf_tokenizer import RULES, end_ids, gguf_tokenizer
from minispec.load.tokenizer import BYTE_OF_CHARACTER, load_tokenizer
from minispec.load.weights import read_config
from minispec.model import rope_frequencies
from minispec.model_config import ModelError

VOCAB = 320
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 2.0,
}  # fmt: skip
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "pad_token_id": None,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES, head_dim=32, rope_parameters=LLAMA3_ROPE),
    "llama-linear": lambda: LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0}),
    "llama-biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: LlamaConfig(**SIZES | {"tie_word_embeddings": True}),
    "qwen2": lambda: Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2-yarn": lambda: Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
}


def hf_model(name: str) -> PreTrainedModel:
    """Return a small model as transformers builds it, with sharp random weights."""
    model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32, attn_implementation="eager").eval()
    scaled_weights(model)
    return model.requires_grad_(False)


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Return q or k rows as llama.cpp's `llama` has them: the halves of each head interleaved."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def llama3_factors(config: Any) -> np.ndarray:
    """Return what the frequencies are divided by, as llama.cpp's converter computes it."""
    rope, factors = config.rope_parameters, []
    for exponent in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (exponent / config.head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        kept = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        kept = min(max(kept, 0.0), 1.0)
        factors.append(1 / ((1 - kept) / rope["factor"] + kept))
    return np.array(factors, dtype=np.float32)


def add_byte_level(writer: gguf.GGUFWriter, pre: str) -> None:
    """Write a byte-level tokenizer: bytes, three merges, four tokens with a meaning, and padding."""
    letters = sorted(BYTE_OF_CHARACTER, key=BYTE_OF_CHARACTER.__getitem__)
    tokens = [*letters, "he", "ll", "llo", "<|endoftext|>", "<|im_end|>", "<tool>", "<s>"]
    kinds = [NORMAL] * 259 + [CONTROL, CONTROL, USER_DEFINED, CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(len(tokens), VOCAB)])
    writer.add_token_types(kinds + [UNUSED] * (VOCAB - len(kinds)))
    writer.add_token_merges(["h e", "l l", "ll o"])
    writer.add_bos_token_id(262)
    writer.add_eos_token_id(260)
    writer.add_chat_template("{{ messages[0]['content'] }}")


Change = Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None]


def unchanged(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    """Leave a file as it is."""


def write(
    path: Path, model: PreTrainedModel, change: Change = unchanged,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    norms: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:  # fmt: skip
    """Write a model as llama.cpp's converter does, its matrices of one kind; `change` may add and replace."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch, endianess=endianess)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    tensors = {}
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    elif config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(config.rope_parameters["beta_fast"])
    elif config.rope_parameters["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(config)
    add_byte_level(writer, pre)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        if arch == "llama" and name.endswith(("q_proj.weight", "q_proj.bias")):
            tensor = permuted(tensor, config.num_attention_heads)
        if arch == "llama" and name.endswith(("k_proj.weight", "k_proj.bias")):
            tensor = permuted(tensor, config.num_key_value_heads)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = tensor.numpy()
    change(writer, tensors)
    for name, array in tensors.items():
        if (kept := kind if array.ndim > 1 else norms) and array.dtype == np.float32:
            writer.add_tensor(name, gguf.quantize(array, kept), raw_dtype=kept)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path, folder: Path) -> Path:
    """Convert a file into a folder."""
    gguf_models.convert(path, folder, lambda line: None)
    return folder


def reason(path: Path) -> str:
    """Return why a file is refused by --model: one line that names the flag and what was given."""
    with pytest.raises(ModelError) as caught:
        choose_folder(Config(model_path=str(path)), lambda line: None)
    message = str(caught.value)
    assert message.startswith(f"--model {path}: ") and "\n" not in message
    return message.removeprefix(f"--model {path}: ")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/minispec" / gguf_models.FORMAT


# ---------------------------------------------------------------------------------------------------------------------
# Weights and config.json


@pytest.mark.parametrize("name", MODELS)
def test_the_model_that_comes_out_is_the_one_that_went_in(name: str, tmp_path: Path) -> None:
    model = hf_model(name)
    folder = converted(write(tmp_path / "a.gguf", model), tmp_path / "out")
    found, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(told.values()), told
    assert read_config(folder)["torch_dtype"] == "float32"  # as the file's matrices: nothing is rounded
    ids = torch.arange(60)[None] * 5 % VOCAB
    with torch.inference_mode():
        assert torch.equal(found(ids).logits, model(ids).logits)
    config = gguf_models.read_model_config(read_config(folder))
    expected = torch.as_tensor(model.model.rotary_emb.inv_freq)
    torch.testing.assert_close(rope_frequencies(config), expected, rtol=1e-6, atol=0)
    assert (config.context_length, config.norm_eps) == (512, 1e-5)


@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", "bfloat16"), ("Q5_1", "bfloat16"), ("BF16", "bfloat16"),
                                             ("F16", "float16")])  # fmt: skip
def test_weights_of_fewer_bits_are_the_decoded_ones(kind: str, dtype: str, tmp_path: Path) -> None:
    model, kind = hf_model("qwen2"), gguf.GGMLQuantizationType[kind]
    weights = load_file(converted(write(tmp_path / "a.gguf", model, kind=kind), tmp_path / "out") / "model.safetensors")
    assert set(weights) == set(model.state_dict())
    for name, weight in model.state_dict().items():
        decoded = gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind) if weight.ndim > 1 else weight.numpy()
        assert torch.equal(weights[name], torch.from_numpy(decoded.copy()).to(getattr(torch, dtype))), name
        assert torch.allclose(weights[name].float(), weight, atol=0.3), name


MANY_HEADS = {**SIZES, "num_key_value_heads": 4}


@pytest.mark.parametrize(("make", "key"), [
    (lambda: LlamaConfig(**MANY_HEADS), "llama.attention.head_count_kv"),
    (lambda: Qwen2Config(**MANY_HEADS), "qwen2.attention.head_count_kv"),
    (lambda: Qwen3Config(**MANY_HEADS, head_dim=32), "qwen3.attention.head_count_kv"),
], ids=["llama", "qwen2", "qwen3"])  # fmt: skip
def test_without_a_number_of_key_heads_there_are_as_many_as_heads(
    make: Callable[[], Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "many heads", make)
    model = hf_model("many heads")
    folder = converted(write(tmp_path / "a.gguf", model, _keys((key, None))), tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(60)[None] * 5 % VOCAB
    with torch.inference_mode():
        assert torch.equal(found(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["llama-biased", "llama-tied", "qwen3"])
def test_norms_of_sixteen_bits_are_read(name: str, tmp_path: Path) -> None:
    model, bf16 = hf_model(name).bfloat16().float(), gguf.GGMLQuantizationType.BF16
    folder = converted(write(tmp_path / "a.gguf", model, kind=bf16, norms=bf16), tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert read_config(folder)["torch_dtype"] == "bfloat16"
    for key, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[key], weight), key


def test_a_template_for_tools_and_an_id_of_no_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shows = "{{ messages[0].content }}{% if tools %} with tools{% endif %}"

    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        writer.add_string("tokenizer.chat_template.tool_use", shows)
        writer.add_uint32("tokenizer.ggml.padding_token_id", 2**32 - 1)

    folder = converted(write(tmp_path / "a.gguf", hf_model("llama"), change), tmp_path / "out")
    chat = load_tokenizer(folder).chat
    assert chat.tool_template == shows and "padding_token_id 4294967295 is beyond the file's 320 tokens" in caplog.text
    message = [{"role": "user", "content": "hi"}]
    assert chat.render(message) == "hi" and chat.render(message, template_kwargs={"tools": [1]}) == "hi with tools"


def test_large_weights_are_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.gguf", hf_model("qwen3"))
    whole = load_file(converted(path, tmp_path / "whole") / "model.safetensors")
    monkeypatch.setattr(gguf_models, "SHARD_BYTES", 100_000)
    folder = converted(path, tmp_path / "shards")
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {file: load_file(folder / file) for file in set(where.values())}
    assert len(shards) > 2 and all((folder / file).stat().st_size < 110_000 for file in shards)
    assert set(where) == set(whole) and all(torch.equal(whole[name], shards[where[name]][name]) for name in where)


def test_special_ids_and_template_are_the_file_s(tmp_path: Path) -> None:
    folder = converted(write(tmp_path / "a.gguf", hf_model("llama-tied")), tmp_path / "out")
    config, generation = read_config(folder), json.loads((folder / "generation_config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["tie_word_embeddings"]) == (262, 260, True)
    assert generation == {"bos_token_id": 262, "eos_token_id": [260, 259]}  # named, then <|endoftext|> by its text
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


# ---------------------------------------------------------------------------------------------------------------------
# Where flags name a file


def test_a_file_is_target_and_draft_model(tmp_path: Path) -> None:
    model = hf_model("llama")
    path = str(write(tmp_path / "a.gguf", model))
    llm = LLM(path, speculative_algorithm="STANDALONE", speculative_draft_model_path=path, tokenizer_path=path,
              speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4, dtype="float32",
              disable_torch_compile=True, max_running_requests=1)  # fmt: skip
    answer = llm.generate("hello, 123", SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True))
    ids = llm.tokenizer.encode("hello, 123")
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert answer["output_ids"] == expected[0, len(ids) :].tolist()
    assert answer["meta_info"]["spec_accept_length"] > 2  # it drafts for itself


def test_each_flag_is_named_in_its_refusal(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", hf_model("qwen2"))
    (bad := tmp_path / "bad.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert reason(bad).startswith("it is a git-lfs pointer in place of the file; `git lfs pull`")
    bad.write_text("text")
    for option, flag in {"tokenizer_path": "--tokenizer-path",
                         "speculative_draft_model_path": "--speculative-draft-model-path"}.items():  # fmt: skip
        with pytest.raises(ModelError, match=f"^{flag} {bad}: it is no GGUF file; allowed are a GGUF file"):
            LLM(path, speculative_algorithm="STANDALONE", **{option: str(bad)}, disable_torch_compile=True)


def test_a_file_is_converted_once_and_anew_when_it_changed(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.gguf", hf_model("qwen2"))
    said: list[str] = []
    first = choose_folder(Config(model_path=str(path)), said.append)
    assert first.is_relative_to(cache) and said[-1] == f"a.gguf is ready in {first}"
    said.clear()
    assert choose_folder(Config(model_path=str(path)), said.append) == first and not said
    (blob := tmp_path / "sha256-1234").symlink_to(path)  # without a suffix, and the same file
    assert choose_folder(Config(model_path=str(blob)), said.append) == first and not said
    os.utime(path, ns=(1, 1))
    second = choose_folder(Config(model_path=str(path)), said.append)
    assert said and [entry for entry in second.parent.iterdir() if entry.is_dir()] == [second] != [first]


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.gguf", hf_model("qwen2"))
    monkeypatch.setattr(gguf_models, "save_file", _full)
    message = reason(path)
    assert message.startswith("it could not be converted to the cache folder") and "No space left" in message


def _full(tensors: dict[str, Tensor], target: Path, metadata: dict[str, str]) -> None:
    raise SafetensorError("I/O error: No space left on device (os error 28)")


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def _tensor(name: str, array: np.ndarray | None) -> Change:
    """Return what replaces a tensor, or with None leaves it out."""

    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(name, None)
        if array is not None:
            tensors[name] = array

    return change


def _keys(*pairs: tuple[str, Any]) -> Change:
    """Return what replaces values of the metadata, or with None leaves them out."""

    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        for key, value in pairs:
            writer.kv_data[0].pop(key, None)
            if value is not None:
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    return change


REFUSED: dict[str, tuple[str, Change]] = {
    "architecture": ("general.architecture 'gemma3' is not supported; supported: llama, qwen2, qwen3",
                     _keys(("general.architecture", "gemma3"))),
    "split": ("it is one of 2 parts of a split file", _keys(("split.count", 2))),
    "experts": ("llama.expert_count 8 is not supported", _keys(("llama.expert_count", 8))),
    "window": ("llama.attention.sliding_window 64 is not", _keys(("llama.attention.sliding_window", 64))),
    "part of a head": ("llama.rope.dimension_count 8 is not supported beside heads of 32",
                       _keys(("llama.rope.dimension_count", 8))),
    "scaling": ("rope_scaling type 'longrope' not supported",
                _keys(("llama.rope.scaling.type", "longrope"), ("llama.rope.scaling.factor", 2.0))),
    "a key of scaling": ("llama.rope.scaling.alpha is not supported; supported: factor",
                         _keys(("llama.rope.scaling.alpha", 4.0), ("llama.rope.scaling.factor", 2.0))),
    "two scalings": ("rope_freqs.weight is not supported beside rope_scaling", _keys(("llama.rope.scale_linear", 2.0))),
    "rope factors": ("rope_freqs.weight is not the scaling of Llama 3.1",
                     _tensor("rope_freqs.weight", np.linspace(1, 8, 16, dtype=np.float32))),
    "a lost tensor": ("missing tensors: blk.1.ffn_up.weight", _tensor("blk.1.ffn_up.weight", None)),
    "no embedding": ("it holds no token_embd.weight", _tensor("token_embd.weight", None)),
    "a strange tensor": ("unknown tensors: blk.0.ffn_gate_inp.weight",
                         _tensor("blk.0.ffn_gate_inp.weight", np.zeros((2, 64), np.float32))),
    "a shape": ("wrong shapes: output_norm.weight [63] for [64]",
                _tensor("output_norm.weight", np.zeros(63, np.float32))),
    "a type": ("unknown types: I8", _tensor("output_norm.weight", np.zeros(64, np.int8))),
    "layers": ("it holds 22 tensors, too few for llama.block_count 1000000", _keys(("llama.block_count", 10**6))),
    "a size in each layer": ("llama.feed_forward_length must be one positive whole number, got [96, 64]",
                             _keys(("llama.feed_forward_length", [96, 64]))),
    "a key": ("its metadata lack llama.context_length", _keys(("llama.context_length", None))),
    "pre-tokenizer": ("tokenizer.ggml.pre 'viking' is not known; known: gpt-2, smollm",
                      _keys(("tokenizer.ggml.pre", "viking"))),
    "tokenizer": ("tokenizer.ggml.model 'bert' is not supported; supported: gpt2, llama",
                  _keys(("tokenizer.ggml.model", "bert"))),
    "merges": ("its tokenizer cannot be built", _keys(("tokenizer.ggml.merges", ["he llo"]))),
    "tokens": ("it has 321 tokens, more than the 320 rows of token_embd.weight",
               _keys(("tokenizer.ggml.tokens", [f"{i}" for i in range(VOCAB + 1)]))),
    "an imatrix": ("its general.type is 'imatrix', so it is no model", _keys(("general.type", "imatrix"))),
    "a vocabulary": ("it holds a vocabulary and no weights", lambda writer, tensors: tensors.clear()),
    "a head": ("'eagle3' is not supported; supported: llama, qwen2, qwen3; a draft head is read from a folder",
               _keys(("general.architecture", "eagle3"))),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_known_is_refused_by_name(what: str, tmp_path: Path, cache: Path) -> None:
    message, change = REFUSED[what]
    assert message in reason(write(tmp_path / "a.gguf", hf_model("llama"), change))
    assert not list(cache.rglob("config.json"))


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", hf_model("qwen2"), endianess=gguf.GGUFEndian.BIG)
    assert "it is big-endian" in reason(path)


@pytest.mark.parametrize("part", [0.0001, 0.01, 0.02, 0.03, 0.5, 0.999])
def test_a_truncated_file_is_refused(part: float, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", hf_model("qwen2"))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    assert "it is no whole GGUF file (" in reason(path) and reason(path).endswith("was its download finished?")


def test_a_count_beyond_the_file_s_end_is_not_counted_to(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    content = path.read_bytes()
    place = content.rindex((3).to_bytes(8, "little"))
    path.write_bytes(content[:place] + (2**60).to_bytes(8, "little") + content[place + 8 :])
    assert "it ends early" in reason(path)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.gguf", hf_model("qwen2"))

    def denied(*given: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(gguf_models, "_is_gguf", denied)  # the tests may run as root, who may read anything
    assert reason(path) == f"it cannot be read ([Errno 13] Permission denied: '{path}')"


def test_a_name_without_a_file_is_an_id_and_a_text_is_no_model(tmp_path: Path) -> None:
    assert gguf_models.as_folder("org/name", "--model") == "org/name"
    assert reason(tmp_path / "lost.gguf") == "there is no such file"
    (folder := tmp_path / "folder.gguf").mkdir()
    assert gguf_models.as_folder(str(folder), "--model") == str(folder)  # a folder may be called anything
    (text := tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ModelError, match="is a file, but no GGUF file"):
        choose_folder(Config(model_path=str(text)), lambda line: None)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "ĠIT", "'", "S", "Ġ1234", "ĠÂ½", ".", "\u010a", "\u010a", "x"]),
        ("smollm", ["It", "'s", "ĠIT", "'", "S", "Ġ", "1", "2", "3", "4", "Ġ", "Â½", ".", "\u010a", "\u010a", "x"]),
        ("default", ["It", "'", "s", "ĠIT", "'", "S", "Ġ", "123", "4", "Ġ", "Â½", ".", "\u010a", "\u010a", "x"]),
        ("llama-bpe", ["It", "'s", "ĠIT", "'S", "Ġ", "123", "4", "Ġ", "Â½", ".\u010a\u010a", "x"]),
        ("qwen2", ["It", "'s", "ĠIT", "'S", "Ġ", "1", "2", "3", "4", "Ġ", "Â½", ".\u010a\u010a", "x"]),
        ("deepseek-r1-qwen", ["It", "'s", "ĠIT", "'S", "Ġ", "1", "2", "3", "4", "Ġ", "Â½", ".\u010a\u010a", "x"]),
        ("tekken", ["It", "'s", "ĠIT", "'S", "Ġ", "1", "2", "3", "4", "Ġ", "Â½", ".\u010a\u010a", "x"]),
    ],
)
def test_each_name_cuts_a_text_its_own_way(pre: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in RULES[pre].cut.pre_tokenize_str("It's IT'S 1234 ½.\n\nx")] == pieces


def test_byte_level_tokens_of_each_kind_and_bos(tmp_path: Path) -> None:
    model = hf_model("qwen2")
    tokenizers = {}
    for pre in ("qwen2", "llama-bpe", "gpt-2"):
        path = write(tmp_path / f"{pre}.gguf", model, pre=pre)
        tokenizers[pre] = load_tokenizer(converted(path, tmp_path / pre))
    tokenizer = tokenizers["qwen2"]
    ids = tokenizer.encode("hello<|im_end|><tool> e\u0301")
    assert ids[:4] == [256, 258, 260, 261] and tokenizer.eos_ids == {260}
    assert tokenizer.decode(ids) == "hello<tool> \u00e9"  # special tokens are left out, others kept; accents joined
    assert tokenizer.encode("e", True) == tokenizers["llama-bpe"].encode("e", False)
    assert tokenizers["llama-bpe"].encode("e", True) == [262, *tokenizer.encode("e")]  # as llama.cpp does unasked
    gpt2 = tokenizers["gpt-2"]  # transformers' class for Qwen2 would join accents here too
    assert gpt2.decode(gpt2.encode("e\u0301")) == "e\u0301"
    assert tokenizer.chat.render([{"role": "user", "content": "hi"}]) == "hi"


def _sentencepiece_fields(**more: Any) -> Metadata:
    pieces = ["\u2581", "a", "b", "ab", "\u2581ab", "ba", "abba"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -2.0, -3.0, -1.0, -4.0]
    named = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 1,
             "eos_token_id": 2, "unknown_token_id": 0, **more}  # fmt: skip
    return Metadata({f"tokenizer.ggml.{key}": value for key, value in named.items()})


def _tokens(text: str, **more: Any) -> Sequence[str]:
    return gguf_tokenizer(_sentencepiece_fields(**more)).encode(text).tokens


def test_sentencepiece_joins_by_score_and_spells_the_rest_in_bytes() -> None:
    assert _tokens("ab") == ["<s>", "\u2581ab"]
    assert _tokens("aba") == ["<s>", "\u2581", "a", "ba"]
    assert _tokens("abba") == ["<s>", "\u2581ab", "ba"]  # of two ways to go on, the one with the better score
    assert _tokens("abba", add_space_prefix=False, add_bos_token=False) == ["abba"]
    assert _tokens("a\u00e9", add_bos_token=False) == ["\u2581", "a", "<0xC3>", "<0xA9>"]
    assert _tokens("a</s>a") == ["<s>", "\u2581", "a", "</s>", "\u2581", "a"]
    assert _tokens("a", add_bos_token=False, add_eos_token=True) == ["\u2581", "a", "</s>"]
    tokenizer = gguf_tokenizer(_sentencepiece_fields())
    assert tokenizer.decode(tokenizer.encode("  ab \u00e9b").ids) == "  ab \u00e9b"


def test_every_id_that_ends_an_answer_is_found() -> None:
    fields = Metadata({
        "tokenizer.ggml.tokens": ["<|im_end|>", "<|im_end|>x", "</s>", "<|eot_id|>", "a"],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, NORMAL, CONTROL, NORMAL],
        "tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eom_token_id": 0,
    })  # fmt: skip
    assert end_ids(fields) == [4, 0, 3]
