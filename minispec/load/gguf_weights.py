"""A GGUF file's own weights, for `--quantization gguf`: 4 bits stay 4 bits, 5 to 8 become 8, all other types 16.

All of these types have groups of 32 or 16 inputs. The two levels of scales that K types have multiply out to a scale
and a minimum for each group. A tensor is read from the file into memory, and nothing is mapped. So whoever truncates
or replaces the file while it is served harms nobody.

Read next: `int4.py`, whose layers are filled; `gguf_models.py`, which writes where tensors lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from minispec.cpu.groups import Apart, Groups, Rows
from minispec.cpu.int4 import Codes, Int4Linear, fits
from minispec.cpu.linear import PackedHead, PackedLinear
from minispec.load.gguf_models import GGUF_FILE, TENSORS, GGUFError, Stored, unpermute
from minispec.load.published import published_tensors
from minispec.load.weights import read_json
from minispec.model import Model
from minispec.model_config import EMBEDDING, JOINED, LM_HEAD

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


def _levels(block: Array) -> tuple[Array, Array]:
    """Return scales and minima of a block of Q4_K or Q5_K, eight each."""
    low, high, mixed = block[:, 4:8], block[:, 8:12], block[:, 12:16]  # 6 bits each: of four groups, then of four more
    scale = np.concatenate((low & 63, (mixed & 15) | ((low >> 2) & 48)), -1) * _floats(block[:, :2])
    least = np.concatenate((high & 63, (mixed >> 4) | ((high >> 2) & 48)), -1) * _floats(block[:, 2:4])
    return scale, -least


def _q4_k(block: Array) -> tuple[Array, Array, Array]:
    scale, least = _levels(block)
    return _k_codes(block[:, 16:]), scale, 8 * scale + least


def _k_codes(packed: Array) -> Array:
    """Return the low four bits of a block of Q4_K or Q5_K: 32 bytes hold one group in their low halves, then one."""
    return _halves(packed.reshape(-1, 4, 32)).reshape(-1, 256)


def _bits(packed: Array) -> Array:
    """Return the fifth bit of each code, from bytes [n, bytes] with the lowest bit first."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _q5_0(block: Array) -> tuple[Array, Array, Array]:
    scale = _floats(block[:, :2])
    return (_halves(block[:, 6:]) | _bits(block[:, 2:6])).view(np.int8) - 16, scale, scale


def _q5_1(block: Array) -> tuple[Array, Array, Array]:
    return _halves(block[:, 8:]) | _bits(block[:, 4:8]), _floats(block[:, :2]), _floats(block[:, 2:4])


def _q5_k(block: Array) -> tuple[Array, Array, Array]:
    fifth = _bits(block[:, 16:48]).reshape(-1, 32, 8).swapaxes(1, 2)  # a byte has the bits of eight groups
    return _k_codes(block[:, 48:]) | fifth.reshape(-1, 256), *_levels(block)


def _q6_k(block: Array) -> tuple[Array, Array, Array]:
    low = _halves(block[:, :128].reshape(-1, 2, 64))
    pairs = block[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scale = block[:, 192:208].view(np.int8) * _floats(block[:, 208:])
    return (low | pairs.reshape(-1, 2, 128) << 4).view(np.int8) - 32, scale, scale


def _q8_0(block: Array) -> tuple[Array, Array, Array]:
    scale = _floats(block[:, :2])
    return block[:, 2:].view(np.int8), scale, scale


Read = Callable[[Array], tuple[Array, Array, Array]]


class Kind(NamedTuple):
    """A type of llama.cpp's: a block's bytes, what blocks [n, bytes] become, and how the weights are held."""

    bytes: int
    read: Read  # returns codes, scales and zeros, each [n, ...]
    bits: int = 8
    size: int = 32  # of a group
    has_zero: bool = True  # whether a group has a zero, else `read` returns anything for it


KINDS = {
    "Q4_0": Kind(18, _q4_0, bits=4), "Q4_1": Kind(20, _q4_1, bits=4), "Q4_K": Kind(144, _q4_k, bits=4),
    "Q5_0": Kind(22, _q5_0, has_zero=False), "Q5_1": Kind(24, _q5_1), "Q5_K": Kind(176, _q5_k),
    "Q6_K": Kind(210, _q6_k, size=16, has_zero=False), "Q8_0": Kind(34, _q8_0, has_zero=False),
}  # fmt: skip
WORTH = 2**27  # bytes of a file's types of 5 to 8 bits, below which they become 16, which is faster for several rows


def numbers(raw: Array, kind: str) -> Codes:
    """Return rows [out, bytes] of one of these types."""
    size, read = KINDS[kind][:2]
    return Codes(*(torch.from_numpy(part.reshape(len(raw), -1)) for part in read(raw.reshape(-1, size))))


class FileWeights:
    """The weights in the GGUF file of a folder that was made without converting them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / GGUF_FILE
        self.stored = {name: Stored(*where) for name, where in read_json(folder / TENSORS).items()}

    def use(self, model: Model, eight: bool, heads: bool) -> None:
        """Replace layers of a model on the meta device by layers that keep the file's bits.

        eight: whether types of 5 to 8 bits may be kept. heads: whether in the embedding and the LM head too.
        """
        known = {name: KINDS[one.kind] for name, one in self.stored.items() if one.kind in KINDS}
        eight &= sum(self.stored[name].bytes for name, kind in known.items() if kind.bits == 8) >= WORTH
        held = {name: kind for name, kind in known.items() if eight or kind.bits == 4}
        for path, linear in list(model.layers.named_modules(prefix="layers")):
            if isinstance(linear, nn.Linear) and (new := self._layer(linear, _parts(path), held)) is not None:
                model.set_submodule(path, new)
        groups = {name: _groups(model.lm_head, kind, [name]) for name, kind in held.items()
                  if heads and kind.bits == 8 and name in (EMBEDDING, LM_HEAD)}  # fmt: skip
        if (rows := groups.get(EMBEDDING)) is not None:
            model.embed_tokens = Rows(rows, model.norm.weight.dtype)  # type: ignore[assignment]  # is called, no more
        if (head := rows if model.config.tied else groups.get(LM_HEAD)) is not None:
            model.lm_head = PackedHead(model.lm_head, several=head)  # type: ignore[assignment]

    def _layer(self, linear: nn.Linear, names: list[str], held: Mapping[str, Kind]) -> nn.Module | None:
        """Return what replaces a linear layer of these tensors; None: one of them is not held, and all become 16."""
        if not held.keys() >= set(names):
            return None
        runs = [list(run) for _, run in groupby(names, lambda name: held[name][2:])]
        parts: list[nn.Module] = []
        for run in runs:
            kind, features = held[run[0]], sum(self.stored[name].rows for name in run)
            part = linear if len(runs) == 1 else nn.Linear(linear.in_features, features, bias=False)
            if kind.bits == 8:
                parts.append(PackedLinear(part, several=_groups(part, kind, run)))
            elif fits(features, linear.in_features):
                parts.append(Int4Linear(part, run))
            else:
                return None
        return parts[0] if len(parts) == 1 else Apart(parts, linear.bias)

    def fill(self, model: Model) -> None:
        """Give a model with such layers its weights; raises GGUFError if the file is no longer what it was."""
        for name, tensor in published_tensors(model).items():
            self._decode(name, tensor)
        for layer in model.modules():
            if isinstance(layer, (Int4Linear, Groups)):
                layer.fill(piece for name in layer.parts for piece in self._numbers(name))

    def _numbers(self, name: str) -> Iterator[Codes]:
        """Yield the numbers of a tensor, some rows after the others, so that little memory is needed beside it."""
        rows, kind = self._rows(name), self.stored[name].kind
        yield from (numbers(raw, kind) for raw in np.array_split(rows, rows.nbytes // PIECE + 1))

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


def _groups(linear: nn.Linear, kind: Kind, names: Sequence[str]) -> Groups:
    """Return an empty weight of 8 bits for these tensors, of a layer's size."""
    return Groups(linear.out_features, linear.in_features, kind.size, kind.has_zero, names)
