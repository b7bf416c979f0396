"""Model folders: finding a model, reading its config, and copying its tensors into a module.

A model is a folder of data files. This module finds it (a path, or an id of the Hugging Face hub), reads config.json in
either of its two spellings, streams the tensors one by one, and copies them in place into a module, be it the target or
a draft head. It knows no model: the caller says which tensor of the module has which name in the files.

A model with one random matrix still talks, so an incomplete load could go unnoticed. Hence a tensor that is missing,
left over, misshapen or there twice is an error that names it. And since anybody may have written a model folder, no
code in it is ever run: no Python file is imported (`auto_map` is ignored), and pickles are read only by PyTorch's
restricted unpickler.

Read next: `model.py` for the module that is filled, `fp8_weights.py` for weights of 8 bits, `heads.py` for the folder
of a draft head, `tokenizer.py` for the other half of a model's folder.
"""

from __future__ import annotations

import json
import logging
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, errors, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minispec.config import Config
from minispec.load.architectures import one_rope
from minispec.load.keys import Keys
from minispec.model import some
from minispec.model_config import EMBEDDING, LM_HEAD, ModelConfig, ModelError
from minispec.request import SamplingParams

logger = logging.getLogger("minispec")

DATA_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model"]
# Second copies of the weights, and other parts of a pipeline, which are not read here; "*" matches "/" as well.
SECOND_COPIES = ["consolidated*", "*/*.safetensors", "*/*.bin"]
# Pickles of a training run, which lie beside the weights but hold none.
TRAINING_STATE = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
POINTER = b"version https://git-lfs.github.com/spec/"  # how a file begins that git has in place of a large one
ADAPTER = "adapter_config.json"  # of a LoRA adapter

Wanted = Callable[[str], bool]  # whether the tensor of a name is read
Split = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]  # what becomes of a file's tensor: `published.parts_of`


# ---- where the model lies --------------------------------------------------------------------------------------------


def resolve_model(
    name: str, revision: str | None = None, revision_flag: str = "--revision", cache: str | None = None
) -> Path:
    """Return the folder of a model: `name` itself if it is a folder, else the hub's snapshot, downloaded if need be.

    cache: the folder of snapshots, None for the hub's own. The hub's variables apply: HF_HOME, HF_HUB_CACHE,
    HF_HUB_OFFLINE, HF_TOKEN. Pickled weights are fetched only if there are no safetensors. Raises ModelError.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ModelError(f"{revision_flag} {revision} has no meaning for the folder {name}")
        return path
    if path.exists():
        raise ModelError(f"model {name!r} is a file, but no GGUF file; pass the folder that holds config.json")
    folder = _snapshot(name, revision, DATA_FILES, cache)
    if not any(folder.glob("*.safetensors")):
        folder = _snapshot(name, revision, [*DATA_FILES, "*.bin"], cache)
    return folder


def resolve_file(name: str, cache: str | None = None) -> Path:
    """Return a data file: `name` itself if it is one, else owner/repo/file of the hub; raises ModelError.

    cache: the folder of snapshots, None for the hub's own.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    owner, _, rest = name.partition("/")
    repo, _, file = rest.partition("/")
    if not owner or not repo or not file or path.exists():
        raise ModelError("is neither a file nor owner/repo/file on the hub")
    found = _snapshot(f"{owner}/{repo}", None, [file], cache) / file
    if not found.is_file():  # the hub gives a snapshot without it, if it was never fetched or is not there
        kept = cache or constants.HF_HUB_CACHE
        why = f"HF_HUB_OFFLINE is set and the cache {kept}" if constants.HF_HUB_OFFLINE else "the hub"
        raise ModelError(f"{why} has no {file!r} in {owner}/{repo}")
    return found


def _snapshot(name: str, revision: str | None, patterns: list[str], cache: str | None) -> Path:
    """Return the snapshot folder of a hub id; raises ModelError with one sentence on why there is none."""
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub could not be reached"
    at = f" at revision {revision!r}" if revision else ""
    reasons: dict[type[Exception], str] = {  # the first kind that an error is of holds
        errors.HFValidationError: "is neither a folder nor an id like org/name",
        errors.GatedRepoError: "needs its licence accepted on the hub and a token in HF_TOKEN",
        errors.RevisionNotFoundError: f"has no revision {revision!r} on the hub",
        errors.RepositoryNotFoundError: "is neither a folder nor a model on the hub (a private one needs HF_TOKEN)",
        errors.LocalEntryNotFoundError:
            f"is no folder, not whole in the cache {cache or constants.HF_HUB_CACHE}{at}, and {why}",
    }  # fmt: skip
    try:
        return Path(snapshot_download(
            name, revision=revision, cache_dir=cache, allow_patterns=patterns, ignore_patterns=SECOND_COPIES
        ))  # fmt: skip
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        other = f"could not be downloaded ({' '.join(str(error).split())})"  # the server's refusal, a full disk
        reason = next((said for kind, said in reasons.items() if isinstance(error, kind)), other)
    raise ModelError(f"model {name!r} {reason}; to use local files pass the path of their folder instead of an id")


# ---- what the config says --------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json in one spelling, whichever transformers wrote it.

    `torch_dtype` (a name like "bfloat16", or None) is always there, and what `one_rope` returns; `dtype`, the newer
    spelling, never. What it says of quantized weights `fp8_weights.py` reads. Raises ModelError.
    """
    config = read_json(folder / "config.json")
    if (folder / ADAPTER).is_file():
        logger.warning("%s has a LoRA adapter beside the model, which is not applied; merge it into the model", folder)
    key = Keys(config)
    dtype = key.text("dtype") or key.text("torch_dtype")
    config["torch_dtype"] = None if dtype is None else dtype.removeprefix("torch.")
    return one_rope({name: value for name, value in config.items() if name != "dtype"})


def tied_as_stored(config: ModelConfig, folder: Path, load_format: str = "auto") -> ModelConfig:
    """Return the config of a tied model as its files have it; any other config as it is.

    If embedding and LM head both are there and differ, they are not tied, as in transformers, and a warning says so. If
    the LM head alone is there, it is the embedding too. Raises ModelError.
    """
    if not config.tied:
        return config
    found = dict(read_tensors(folder, load_format, wanted=lambda name: name in (EMBEDDING, LM_HEAD)))
    if found.keys() == {LM_HEAD}:
        return replace(config, table=LM_HEAD)
    if len(found) < 2 or torch.equal(found[EMBEDDING], found[LM_HEAD].to(found[EMBEDDING].dtype)):
        return config
    logger.warning("%s: tie_word_embeddings is true, but LM head and embedding differ: they are not tied", folder)
    return replace(config, tied=False)


# ---- files ---------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or raise ModelError naming the file."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is no model folder: it has no {path.name}{_other_kind(path.parent)}") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def read_text(path: Path) -> str:
    """Return the text of a file of UTF-8; raises FileNotFoundError, and ModelError naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise unreadable(path, f"cannot be read: {error}") from error
    if text.startswith(POINTER.decode()):
        raise unreadable(path, "")
    return text


def unreadable(path: Path, said: str) -> ModelError:
    """Return the error for a file that cannot be read; said: what is wrong if the file is itself and may be opened."""
    try:
        with open(path, "rb") as file:
            pointer = file.read(len(POINTER)) == POINTER
    except OSError as error:
        return ModelError(f"{path} cannot be read: {error.strerror}")
    if pointer:
        said = "is a git-lfs pointer in place of the file; `git lfs pull` in its folder fetches the file"
    return ModelError(f"{path} {said}")


def _other_kind(folder: Path) -> str:
    """Return what a folder without config.json is instead, and what to do, if that is known."""
    if (folder / ADAPTER).is_file():
        base = read_json(folder / ADAPTER).get("base_model_name_or_path")
        return f"; it is a LoRA adapter of {base}: peft's merge_and_unload makes a model of both, whose folder to pass"
    if files := sorted(path.name for path in folder.glob("*.gguf")):
        return f"; it has GGUF files, of which to pass one: {some(files)}"
    if folder.name.startswith("models--") and (folder / "snapshots").is_dir():
        name = folder.name.removeprefix("models--").replace("--", "/")
        return f"; it is the hub's cache of {name}: pass this id, or a folder below {folder / 'snapshots'}"
    if inside := sorted(path.parent.name for path in folder.glob("*/config.json")):
        return f"; folders with one are in it: {some(inside)}"
    return ""


# ---- the tensors -----------------------------------------------------------------------------------------------------


def read_tensors(
    folder: Path, load_format: str = "auto", wanted: Wanted = lambda name: True, split: Split | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every (name, tensor) of the folder's weights, on the CPU and in the dtype of the file, file by file.

    Names come without the `model.` that most writers put in front. load_format: "safetensors", "pt" (.bin and .pt
    pickles of plain tensors), or "auto": safetensors where there are some. wanted: whether the tensor of a name is to
    be read at all. split: what becomes of a tensor that is read; None: it stays as it is. A missing file is noticed
    before the first tensor is read; raises ModelError, also while iterating.
    """
    # "consolidated" files hold the same weights again under other names.
    whole = ("model.safetensors", ("*.safetensors",), "consolidated")
    files, reader = _files(folder, *whole) if load_format != "pt" else {}, _read_safetensors
    if not files and load_format != "safetensors":
        files, reader = _files(folder, "pytorch_model.bin", ("*.bin", "*.pt"), TRAINING_STATE), _read_pickle
    if not files:
        kinds = {"auto": "*.safetensors, *.bin or *.pt", "safetensors": "*.safetensors", "pt": "*.bin or *.pt"}
        raise ModelError(f"{folder} holds no weights ({kinds[load_format]})")
    # Earlier versions of transformers saved the rotary frequencies as well; here they are computed from config.json.
    read = lambda name: not name.endswith("rotary_emb.inv_freq") and wanted(_plain(name))  # noqa: E731
    tensors = _read_all(files, lambda path, names: reader(path, names, read))
    return tensors if split is None else (part for name, tensor in tensors for part in split(name, tensor))


def _plain(name: str) -> str:
    """Return a tensor's name without the `model.` that most writers put in front."""
    return name.removeprefix("model.")


# The names of a file's tensors, as its index lists them; None: all of them.
Files = dict[Path, list[str] | None]


def _files(folder: Path, name: str, patterns: Iterable[str], apart: str | tuple[str, ...]) -> Files:
    """Return the files of one kind to read: the one of this name, else those of the index, else all but those apart."""
    if (single := folder / name).is_file():  # first, as in transformers: an index beside it may be left over
        return {single: None}
    if (index := folder / f"{name}.index.json").is_file():
        return _indexed_files(index)
    found = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return {path: None for path in found if not path.name.startswith(apart)}


def _indexed_files(index: Path) -> Files:
    """Return the shards an index names; raises ModelError if one is not in the folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{index} has no weight_map from tensor names to files")
    files: dict[Path, list[str]] = {}
    for name, shard in weight_map.items():
        if Path(shard).name != shard:  # the folder is untrusted: no ../ and no absolute path
            raise ModelError(f"{index} names a file outside of its folder: {shard!r}")
        files.setdefault(index.parent / shard, []).append(name)
    absent = sorted(path.name for path in files if not path.is_file())
    if absent:
        raise ModelError(f"{index.parent} lacks {some(absent)} of {len(files)} shards listed in {index.name}")
    return dict(sorted(files.items()))


def _read_all(
    files: Files, reader: Callable[[Path, list[str] | None], Iterator[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all files under their plain names; raises ModelError for a name that comes twice."""
    seen: set[str] = set()
    for path, names in files.items():
        for name, tensor in reader(path, names):
            if _plain(name) in seen:
                raise ModelError(f"{path.parent} holds {_plain(name)} twice, in two files or with and without model. "
                                 "in front")  # fmt: skip
            seen.add(_plain(name))
            yield _plain(name), tensor


def _read_safetensors(path: Path, names: list[str] | None, wanted: Wanted) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of one safetensors file that are wanted, memory-mapped; the others are not read."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            _check_listed(path, names, file.keys())
            for name in filter(wanted, names or file.keys()):
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise unreadable(path, f"is no whole safetensors file ({error}); was its download finished?") from error


def _read_pickle(path: Path, names: list[str] | None, wanted: Wanted) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of one PyTorch file that are wanted; a file with other content is refused."""
    try:
        # Files of torch before 1.6 are not zip archives and cannot be memory-mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise unreadable(path, f"holds more than tensors and is refused: {str(error).splitlines()[0]}") from error
    except (RuntimeError, EOFError, OSError) as error:
        raise unreadable(path, f"is no whole PyTorch file ({error}); was its download finished?") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a dict from names to tensors, got {type(content).__name__}")
    # Sparse tensors are refused as well: their indices are not checked when they are read.
    other = [str(k) for k, v in content.items() if not isinstance(v, Tensor) or v.layout != torch.strided]
    if other:
        raise ModelError(f"{path} must hold a dict from names to dense tensors; not so: {some(other)}")
    _check_listed(path, names, content)
    for name in filter(wanted, names or content):
        yield name, content[name]


def _check_listed(path: Path, names: list[str] | None, found: Iterable[str]) -> None:
    """Raise ModelError if the index promises tensors that the file does not hold."""
    absent = sorted(set(names or ()) - set(found))
    if absent:
        raise ModelError(f"{path} lacks tensors that its index lists: {some(absent)}")


# ---- into a module ---------------------------------------------------------------------------------------------------


def load_weights(module_tensors: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor of a file into the one of the same name in a module, in place and cast to its dtype.

    module_tensors: the module's weights by the file's names, as `published_tensors` gives them. When all tensors
    are read, raises ModelError naming those that are missing, unknown, misshapen or there twice (split from a joined
    matrix, and by themselves); the module is then filled in part.
    """
    loaded: set[str] = set()
    unknown, misshapen, twice = [], [], []
    for name, tensor in tensors:
        wanted = module_tensors.get(name)
        if name in loaded:
            twice.append(name)
        elif wanted is None:
            unknown.append(name)
        elif wanted.shape != tensor.shape:
            misshapen.append(f"{name} {list(tensor.shape)} for {list(wanted.shape)}")
        else:
            wanted.copy_(tensor)
        loaded.add(name)
    missing = [name for name in module_tensors if name not in loaded]
    problems = {"missing tensors": missing, "unknown tensors": unknown, "wrong shapes": misshapen, "twice": twice}
    if found := [f"{kind}: {some(names)}" for kind, names in problems.items() if names]:
        raise ModelError(f"the weights are not those that config.json describes; {'; '.join(found)}")


def sampling_defaults(config: Config, folder: Path) -> dict[str, Any]:
    """Return the sampling values of generation_config.json; none if it is not to be read, or not there, or wrong."""
    if config.sampling_defaults != "model":
        return {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    try:
        given = json.loads((folder / "generation_config.json").read_text("utf-8"))
        found = {name: given[name] for name in names if given.get(name) is not None}
        if found.get("top_k") == 0:  # transformers' way to say: the whole vocabulary
            found["top_k"] = -1
        SamplingParams(**found)  # checks the ranges
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # RequestError is a ValueError
        logger.warning("generation_config.json is not used: %s", error)
        return {}
    logger.info("sampling defaults of the model: %s", found or "none")
    return found
