"""GGUF files, llama.cpp's models in one file: converted once to a model folder in the user's cache.

Ranks, rehearsals, training and draft models then see a folder like any other. The metadata become config.json, the
tokenizer becomes tokenizer.json (`gguf_tokenizer.py`), and the tensors become safetensors under their Hugging Face
names. 4-bit weights stay as coarse as they are but take 16 bits each.

A conversion that leaves out what it does not know yields a model that talks, only worse. So whatever changes the
computation is read or refused: architecture, rotary scaling, the tokenizer's rules. All names and shapes are compared
with the model that the metadata describe before the first tensor is converted.

GGUF format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read next: `weights.py`, which reads the result.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minispec.load.architectures import read_model_config
from minispec.load.chat import ADDITIONAL
from minispec.load.gguf_files import MAGIC, Entries, GGUFError, Metadata, read_gguf
from minispec.load.gguf_tokenizer import end_ids, gguf_tokenizer, tokenizer_config
from minispec.load.published import published_tensors
from minispec.load.user_cache import Progress, cache_root, make_once, to_stderr
from minispec.load.wheels import DownloadError
from minispec.model import Model, ModelConfig, rope_frequencies, some

if TYPE_CHECKING:
    import gguf

SUFFIX = ".gguf"
FORMAT = "gguf-v2"  # part of the cache path; change it with the conversion, so that older folders are no longer used
ALWAYS_WRITTEN = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
# Of a folder without weights: where the file's tensors lie, and the file itself, or a link to it.
AS_IS_FORMAT, TENSORS, GGUF_FILE = "gguf-as-is-v1", "tensors.json", "model.gguf"
SHARD_BYTES = 2**31  # of weights in one file, so that converting takes no more memory than this and one tensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SPECIAL_IDS = {  # config.json's name -> GGUF's
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
TEMPLATE = "tokenizer.chat_template"  # of further ones the name follows after a dot
UNSCALED = "none"  # rope.scaling.type of a model whose positions are not scaled
SCALING_KEYS = {  # GGUF's name below rope.scaling -> config.json's
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Of Llama 3.1's scaling a file has only what came out of it, a divisor for each frequency. Later Llamas have these too.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_FACTORS = "rope_freqs.weight"


class Stored(NamedTuple):
    """Where a tensor lies in a file, and what it is."""

    kind: str  # a name of gguf.GGMLQuantizationType
    rows: int
    bytes: int
    offset: int
    heads: int  # of a llama's q or k, whose rows are in another order; else 0


def as_folder(name: str, flag: str, tell: Progress = to_stderr, as_is: bool = False) -> str:
    """Return `name`, or if it is a GGUF file the folder that this was converted to, now or earlier.

    flag: the one that gave the name, for messages. as_is: the folder has no weights, and those of the file are read.
    Raises ModelError.
    """
    path = Path(name).expanduser()
    try:
        if path.suffix.lower() == SUFFIX and not path.exists():
            raise GGUFError("there is no such file")
        if not _is_gguf(path):
            return name
        return str(_converted(path.resolve(), tell, as_is))
    except (GGUFError, DownloadError) as error:
        raise GGUFError(f"{flag} {name}: {error}") from error
    except OSError as error:
        raise GGUFError(f"{flag} {name}: it cannot be read ({error})") from error


def _is_gguf(path: Path) -> bool:
    """Tell a GGUF file by its name, or by its first bytes, since other programs keep such files without a suffix."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return path.suffix.lower() == SUFFIX or file.read(len(MAGIC)) == MAGIC


def _converted(path: Path, tell: Progress, as_is: bool) -> Path:
    """Return the folder of a GGUF file as it is now; folders of what the file was earlier are deleted."""
    state = path.stat()
    kind, number = AS_IS_FORMAT if as_is else FORMAT, hashlib.sha256(bytes(path)).hexdigest()[:12]
    own = cache_root() / kind / f"{path.stem[:100]}-{number}"

    def make(folder: Path) -> None:
        convert(path, folder, tell, as_is)
        if as_is:
            (folder / GGUF_FILE).symlink_to(path)
        for older in own.glob("[0-9]*-[0-9]*"):
            shutil.rmtree(older)

    try:
        return make_once(own / f"{state.st_size}-{state.st_mtime_ns}", ALWAYS_WRITTEN, path.name, make, tell)
    except OSError as error:
        raise GGUFError(f"it could not be converted to the cache folder {own} ({error})") from error


def convert(path: Path, folder: Path, progress: Progress = to_stderr, as_is: bool = False) -> None:
    """Write the model in the GGUF file `path` as a Hugging Face folder; raises GGUFError if it is not supported.

    Weights are bfloat16, but those of a file in 16 or 32 bits keep their dtype. as_is: TENSORS is written in
    their place.
    """
    fields, entries = read_gguf(path)
    config, entries = _described(fields, entries)
    tokenizer = gguf_tokenizer(fields)
    folder.mkdir(parents=True, exist_ok=True)
    if as_is:
        write_json(folder / TENSORS, {name: _stored(entry, config) for name, entry in entries.items()})
    else:
        _write_weights(entries, config, folder, lambda text: progress(f"Converting {path.name}: {text}"))
    tokenizer.save(str(folder / "tokenizer.json"))
    if template := fields.get(TEMPLATE):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for key in fields:  # templates by name, `tool_use` among them
        if (name := key.removeprefix(f"{TEMPLATE}.")) != key and name.isidentifier():
            (folder / ADDITIONAL).mkdir(exist_ok=True)
            (folder / ADDITIONAL / f"{name}.jinja").write_text(fields[key], encoding="utf-8")
    special_ids = {name: config[name] for name in SPECIAL_IDS if name in config}
    if ends := end_ids(fields):
        special_ids["eos_token_id"] = ends
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special_ids)
    write_json(folder / "tokenizer_config.json", tokenizer_config(fields, config["max_position_embeddings"]))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON file, readable by people."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- what the metadata say -------------------------------------------------------------------------------------------


def _described(fields: Metadata, entries: Entries) -> tuple[dict[str, Any], Entries]:
    """Return config.json, and the tensors under the names that `published_tensors` has for its model.

    Raises GGUFError if the model is not supported, or if the tensors are not all of its own.
    """
    try:
        config = _model_config(fields, entries)
        stated = read_model_config(config)
        if (factors := entries.pop(ROPE_FACTORS, None)) is not None:
            config["rope_scaling"] = _llama3_scaling(stated, factors.data)
        outline = published_tensors(Model.empty(stated, torch.bfloat16, torch.device("meta")))
    except (ValueError, TypeError) as error:  # a GGUFError is a ValueError too, and keeps its text
        raise GGUFError(str(error)) from error
    names = _gguf_names(outline, config)
    found = {name: entries[theirs] for name, theirs in names.items() if theirs in entries}
    shapes = {name: list(map(int, reversed(entry.shape))) for name, entry in found.items()}
    problems = {
        "missing tensors": [theirs for name, theirs in names.items() if name not in found],
        "unknown tensors": [theirs for theirs in entries if theirs not in names.values()],
        "wrong shapes": [f"{found[name].name} {shapes[name]} for {list(tensor.shape)}" for name, tensor in
                         outline.items() if name in found and shapes[name] != list(tensor.shape)],
        "unknown types": _unknown_types(found),
    }  # fmt: skip
    if told := [f"{kind}: {some(names)}" for kind, names in problems.items() if names]:
        raise GGUFError(f"its tensors are not those of the {config['model_type']} model that its metadata describe; "
                        + "; ".join(told))  # fmt: skip
    return config, found


def _short_float(value: float) -> float:
    """Return the shortest decimal number that rounds to the same float32: 9.999999747378752e-06 gives 1e-05."""
    return float(str(np.float32(value)))


def _model_config(fields: Metadata, entries: Entries) -> dict[str, Any]:
    """Return config.json from the metadata, without what `rope_freqs.weight` says."""
    if (content := fields.get("general.type", "model")) != "model":
        raise GGUFError(f"its general.type is {content!r}, so it is no model; allowed is 'model'")
    kind = fields["general.architecture"]
    if kind not in ARCHITECTURES:
        raise GGUFError(f"general.architecture {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}; a "
                        "draft head is read from a folder of config.json and weights")  # fmt: skip
    for key in (f"{kind}.expert_count", f"{kind}.attention.sliding_window"):
        if fields.get(key):
            raise GGUFError(f"{key} {fields[key]} is not supported")
    if "token_embd.weight" not in entries:
        raise GGUFError("it holds no token_embd.weight, so no model" if entries else
                        "it holds a vocabulary and no weights, so no model")  # fmt: skip
    if (layers := fields.count(f"{kind}.block_count")) > len(entries):
        raise GGUFError(f"it holds {len(entries)} tensors, too few for {kind}.block_count {layers}")
    rows, tokens = int(entries["token_embd.weight"].shape[-1]), len(fields["tokenizer.ggml.tokens"])
    if tokens > rows:
        raise GGUFError(f"it has {tokens} tokens, more than the {rows} rows of token_embd.weight")
    width, heads = fields.count(f"{kind}.embedding_length"), fields.count(f"{kind}.attention.head_count")
    # The weights to write have the dtype of the widest matrix, and bfloat16 if all have fewer bits.
    stored = {entry.tensor_type.name for entry in entries.values() if len(entry.shape) > 1}
    head_dim = fields.count(key) if (key := f"{kind}.attention.key_length") in fields else width // heads
    for key in (f"{kind}.attention.value_length", f"{kind}.rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise GGUFError(f"{key} {fields[key]} is not supported beside heads of {head_dim}")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": fields.count(f"{kind}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        # By default as many as heads of queries, says the format.
        "num_key_value_heads": fields.count(key) if (key := f"{kind}.attention.head_count_kv") in fields else heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": kind != "qwen2" and "blk.0.attn_output.bias" in entries,
        "mlp_bias": "blk.0.ffn_down.bias" in entries,
        "max_position_embeddings": fields.count(f"{kind}.context_length"),
        "rms_norm_eps": _short_float(fields[f"{kind}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": fields.get(f"{kind}.rope.freq_base", 10000.0),
        "rope_scaling": _stated_scaling(fields, kind),
        "tie_word_embeddings": "output.weight" not in entries,
        "vocab_size": rows,
        **{name: fields[key] for name, key in SPECIAL_IDS.items() if key in fields},
        "torch_dtype": "float32" if "F32" in stored else "float16" if "F16" in stored else "bfloat16",
    }


def _stated_scaling(fields: Metadata, kind: str) -> dict[str, Any] | None:
    """Return config.json's rope_scaling from the metadata; the kinds that the model knows are the model's to say."""
    prefix = f"{kind}.rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    given.pop("finetuned", None)
    how = given.pop("type", "linear")
    factor = given.setdefault("factor", fields.get(f"{kind}.rope.scale_linear", 0.0))
    if how == UNSCALED or factor in (0.0, 1.0):
        return None
    if unknown := sorted(given.keys() - SCALING_KEYS):
        raise GGUFError(f"{prefix}{unknown[0]} is not supported; supported: {', '.join(SCALING_KEYS)}")
    return {"rope_type": how, **{SCALING_KEYS[key]: value for key, value in given.items()}}


def _llama3_scaling(stated: ModelConfig, factors: npt.NDArray[np.float32]) -> dict[str, Any] | None:
    """Return the rope_scaling that divides the frequencies of the model `stated` by `factors` [head_dim / 2]."""
    divisors = torch.from_numpy(np.array(factors, dtype=np.float32))
    if stated.rope_scaling is not None:
        raise GGUFError(f"{ROPE_FACTORS} is not supported beside rope_scaling {stated.rope_scaling}")
    scaling = {"rope_type": "llama3", "factor": _short_float(divisors.max().item()), **LLAMA3}
    for guess in (None, scaling):
        expected = rope_frequencies(stated) / rope_frequencies(replace(stated, rope_scaling=guess))
        if expected.shape == divisors.shape and torch.allclose(expected, divisors, rtol=1e-4):
            return guess
    raise GGUFError(f"{ROPE_FACTORS} is not the scaling of Llama 3.1 and later ({LLAMA3}), which alone is supported")


# ---- the tensors -----------------------------------------------------------------------------------------------------


def _gguf_names(names: Iterable[str], config: dict[str, Any]) -> dict[str, str]:
    """Return what GGUF calls the tensors of a module: layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight."""
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == config["model_type"])
    table = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    return {name: str(table.get_name(_published(name), (".weight", ".bias"))) for name in names}


def _published(name: str) -> str:
    """Return the name of a module's tensor in Hugging Face's files."""
    return name if name == "lm_head.weight" else f"model.{name}"


def _unknown_types(entries: Entries) -> list[str]:
    """Return the quantization types of tensors that the gguf package cannot decode."""
    import gguf

    unknown = []
    for kind, data in {entry.tensor_type: entry.data for entry in entries.values()}.items():
        try:
            gguf.dequantize(data[:1] if data.ndim > 1 else data, kind)
        except NotImplementedError:
            unknown.append(kind.name)
    return unknown


def _write_weights(entries: Entries, config: dict[str, Any], folder: Path, progress: Progress) -> None:
    """Write all tensors, decoded, as model.safetensors, or as shards of `SHARD_BYTES` with an index."""
    dtype, done = getattr(torch, config["torch_dtype"]), 0
    published = {_published(name): entry for name, entry in entries.items()}
    shards = split_state_dict_into_shards_factory(
        published, get_storage_size=lambda entry: int(entry.n_elements) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_BYTES,
    )  # fmt: skip
    for file, names in shards.filename_to_tensors.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors[name], done = _decoded(published[name], config).to(dtype), done + 1
            if done % 68 == 0 or done == len(entries):
                progress(f"{done} of {len(entries)} tensors")
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk
            raise OSError(str(error)) from error
    if shards.is_sharded:
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": shards.tensor_to_filename})


def _decoded(entry: gguf.ReaderTensor, config: dict[str, Any]) -> Tensor:
    """Return one tensor in float32; q and k rows of the llama architecture in Hugging Face's order."""
    import gguf

    weight, heads = np.array(gguf.dequantize(entry.data, entry.tensor_type)), _heads(entry, config)
    return torch.from_numpy(unpermute(weight, heads) if heads else weight)


def _heads(entry: gguf.ReaderTensor, config: dict[str, Any]) -> int:
    """Return the number of heads in q or k of the llama architecture, and 0 for all other tensors."""
    part = entry.name.split(".")[-2]
    if config["model_type"] == "llama" and part in ("attn_q", "attn_k"):
        return int(config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])
    return 0


def _stored(entry: gguf.ReaderTensor, config: dict[str, Any]) -> Stored:
    """Return where a tensor lies in its file."""
    numbers = entry.shape[-1], entry.n_bytes, entry.data_offset, _heads(entry, config)
    return Stored(entry.tensor_type.name, *map(int, numbers))


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return q or k rows `weight [heads * head_dim, ...]` in Hugging Face's order.

    Without this step the model loads and talks nonsense. llama.cpp's `llama` rotates neighbours (2i, 2i+1) and Hugging
    Face rotates the halves (i, i + head_dim/2), so the writer of the GGUF interleaved the halves of every attention
    head. Its other architectures rotate the halves themselves.
    """
    rows = len(weight)
    return weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
