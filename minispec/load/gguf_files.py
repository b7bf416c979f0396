"""What is in a GGUF file: key-value pairs and tensors, read by the gguf package, and refused if the file is not whole.

Read next: `gguf_models.py`, which makes a model folder of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minispec.load.weights import POINTER
from minispec.model_config import ModelError

if TYPE_CHECKING:
    import gguf

MAGIC = b"GGUF"

Entries = dict[str, "gguf.ReaderTensor"]  # tensors by name


class GGUFError(ModelError):
    """A GGUF file cannot be converted; the message says why, without the file's name."""


class Metadata(dict[str, Any]):
    """The key-value pairs of a GGUF file; a key that is needed and lacking is a GGUFError."""

    def __missing__(self, key: str) -> Any:
        raise GGUFError(f"its metadata lack {key}")

    def count(self, key: str) -> int:
        """Return a positive whole number; models that have another one in each layer are refused."""
        value = self[key]
        if not isinstance(value, int) or value < 1:
            raise GGUFError(f"{key} must be one positive whole number, got {value!r}")
        return value


def read_gguf(path: Path) -> tuple[Metadata, Entries]:
    """Return the metadata of a GGUF file, and its tensors, memory-mapped, by their names in it."""
    import gguf  # here, since a start with the model on disk need not wait for it
    from gguf.gguf_reader import GGUFReader

    class Bounded(GGUFReader):
        """The package's reader takes what lies behind the end of a file for empty values, any number of them."""

        def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, *args: Any, **options: Any) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends early")
            return super()._get(offset, dtype, count, *args, **options)

    with open(path, "rb") as file:
        start = file.read(len(POINTER))
    if start == POINTER:
        raise GGUFError("it is a git-lfs pointer in place of the file; `git lfs pull` in its folder fetches the file")
    if not start.startswith(MAGIC):
        raise GGUFError("it is no GGUF file; allowed are a GGUF file, a model folder and a Hugging Face id")
    try:
        reader = Bounded(path)
        fields = Metadata({name: field.contents() for name, field in reader.fields.items()})
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
        raise GGUFError(f"it is no whole GGUF file ({error}); was its download finished?") from error
    if (parts := fields.get("split.count", 1)) > 1:
        raise GGUFError(f"it is one of {parts} parts of a split file, which are not supported; "
                        "llama.cpp's llama-gguf-split --merge makes one file of them")  # fmt: skip
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise GGUFError("it is big-endian; supported are little-endian files")
    return fields, {entry.name: entry for entry in reader.tensors}
