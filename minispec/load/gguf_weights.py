"""A GGUF file's own weights, for `--quantization gguf`: 4 bits stay 4 bits, all other types become 16.

Q4_0, Q4_1 and Q4_K have 4 bits in groups of 32. The two levels of Q4_K's scales multiply out to a scale and a minimum
for each group. A tensor is read from the file into memory, and nothing is mapped. So whoever truncates or replaces the
file while it is served harms nobody.

Read next: `int4.py`, whose layers are filled; `gguf_models.py`, which writes where tensors lie.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from minispec.cpu.int4 import Codes, Int4Linear, paths_of
from minispec.load.gguf_models import GGUF_FILE, TENSORS, GGUFError, Stored, unpermute
from minispec.load.published import published_tensors
from minispec.load.weights import read_json
from minispec.model import Model
from minispec.model_config import JOINED

Array = npt.NDArray[Any]

PIECE = 2**22  # weights of 16 bits that are decoded at once, to 32 bits


def _halves(packed: Array) -> Array:
    """Return the codes in packed [..., n]: all low halves, then all high ones, [..., 2 n]."""
    return np.concatenate((packed & 15, packed >> 4), -1)


def _floats(two: Array) -> Array:
    """Return float16 numbers in bytes [n, 2] as float32 [n, 1]."""
    return two.copy().view(np.float16).astype(np.float32)


def _q4_0(block: Array) -> tuple[Array, Array, Array]:
    scale = _floats(block[:, :2])
    return _halves(block[:, 2:]), scale, np.zeros_like(scale)


def _q4_1(block: Array) -> tuple[Array, Array, Array]:
    scale = _floats(block[:, :2])
    return _halves(block[:, 4:]), scale, _floats(block[:, 2:4]) + 8 * scale


def _q4_k(block: Array) -> tuple[Array, Array, Array]:
    low, high, mixed = block[:, 4:8], block[:, 8:12], block[:, 12:16]  # 6 bits each: of four groups, then of four more
    scale = np.concatenate((low & 63, (mixed & 15) | ((low >> 2) & 48)), -1) * _floats(block[:, :2])
    least = np.concatenate((high & 63, (mixed >> 4) | ((high >> 2) & 48)), -1) * _floats(block[:, 2:4])
    # 32 bytes hold one group in their low halves, the next one in their high halves.
    return _halves(block[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256), scale, 8 * scale - least


# Types of 4 bits: a block's bytes, and what blocks [n, bytes] become: codes, scales and zeros, each [n, ...].
Read = Callable[[Array], tuple[Array, Array, Array]]
FOUR_BITS: dict[str, tuple[int, Read]] = {"Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q4_K": (144, _q4_k)}


def four_bits(raw: Array, kind: str) -> Codes:
    """Return rows [out, bytes] of a type of 4 bits."""
    size, read = FOUR_BITS[kind]
    return Codes(*(torch.from_numpy(part.reshape(len(raw), -1)) for part in read(raw.reshape(-1, size))))


class FileWeights:
    """The weights in the GGUF file of a folder that was made without converting them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / GGUF_FILE
        self.stored = {name: Stored(*where) for name, where in read_json(folder / TENSORS).items()}

    def use_int4(self, model: Model) -> None:
        """Replace layers of a model on the meta device by layers of 4 bits, where all that a layer joins has 4 bits."""
        for path in paths_of(model):
            if all(self.stored[part].kind in FOUR_BITS for part in _parts(path)):
                model.set_submodule(path, Int4Linear(cast(nn.Linear, model.get_submodule(path))))

    def fill(self, model: Model) -> None:
        """Give a model with such layers its weights; raises GGUFError if the file is no longer what it was."""
        for name, tensor in published_tensors(model).items():
            self._decode(name, tensor)
        for path, layer in model.named_modules():
            if isinstance(layer, Int4Linear):
                layer.fill(four_bits(self._rows(part), self.stored[part].kind) for part in _parts(path))

    def _decode(self, name: str, into: Tensor) -> None:
        """Write a tensor in 16 bits."""
        from gguf import GGMLQuantizationType, dequantize  # here, as in `read_gguf`

        rows, kind = self._rows(name), GGMLQuantizationType[self.stored[name].kind]
        pieces = into.numel() // PIECE + 1
        for raw, piece in zip(np.array_split(rows, pieces), into.tensor_split(pieces), strict=True):
            piece.copy_(torch.from_numpy(dequantize(raw, kind)).view_as(piece))

    def _rows(self, name: str) -> Array:
        """Return a tensor's bytes as rows [out, bytes], in Hugging Face's order."""
        stored = self.stored[name]
        raw = np.fromfile(self.path, np.uint8, stored.bytes, offset=stored.offset)
        if len(raw) < stored.bytes:
            raise GGUFError(f"--model: {self.path.resolve()} ends early; was it changed while it was read?")
        raw = raw.reshape(stored.rows, -1)
        return unpermute(raw, stored.heads) if stored.heads else raw


def _parts(path: str) -> list[str]:
    """Return the names in files of the weights that a layer joins."""
    block, _, name = path.rpartition(".")
    return [f"{block}.{part}.weight" for part in JOINED[name]]
