"""Model folders whose weights are fp8: which of them are read, and what their tensors become in a module.

The one idea: whatever a folder holds is brought to one form on its way into the model, fp8 with a scale for each
output channel. Channels of q, k, v and of gate, up stay apart when the matrices are joined, so joining needs no
arithmetic. Where a layer is to have ordinary weights, the same reader multiplies them out instead. A published weight
with a scale for each channel or for the whole tensor keeps its bits. One with a scale for each block is multiplied out
in fp32 and quantized again, since the product takes no blocks.

Read next: `fp8.py` for the layers, `weights.py`, which reads the files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.cuda.fp8 import FP8, rowwise
from minispec.load.weights import Split, Wanted, read_json, read_tensors
from minispec.model import some
from minispec.model_config import ModelError

logger = logging.getLogger("minispec")

OTHER_FP8 = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SCALES = ("weight_scale", "weight_scale_inv")  # both multiply the weight, whatever the second one is called
IGNORED = ("input_scale", "activation_scale")  # activations have a scale of their own at every product
SUPPORTED = (
    "quant_method fp8, and compressed-tensors whose weights are fp8 (type float, 8 bits), both with e4m3 numbers and "
    "a scale for each tensor, output channel or block; and weights that are not quantized"
)


# ---- what config.json says of quantized weights ---------------------------------------------------------------------


class Scheme(NamedTuple):
    """How a checkpoint's fp8 weights are scaled: by blocks [rows, columns], or (None) by tensors or channels."""

    block: tuple[int, int] | None


def read_scheme(folder: Path) -> Scheme | None:
    """Return how a folder's weights are quantized, None if they are not; raises ModelError for what is not read."""
    stated = read_json(folder / "config.json").get("quantization_config")
    if not stated:
        return None
    try:
        if not isinstance(stated, dict):
            raise ModelError(repr(stated))
        if stated.get("kv_cache_scheme"):
            raise ModelError("a kv_cache_scheme")
        method = stated.get("quant_method")
        if method not in ("fp8", "compressed-tensors"):
            raise ModelError(f"quant_method {method!r}")
        if method == "compressed-tensors":
            return Scheme(_compressed_block(stated))
        _only(stated, fmt=(None, "e4m3"), activation_scheme=(None, "dynamic", "static"))
        block = stated.get("weight_block_size")
        return Scheme(None if block is None else _block(block, "weight_block_size"))
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'} has a quantization_config with {error}, which is not supported; "
                         f"supported: {SUPPORTED}") from None  # fmt: skip


def _compressed_block(stated: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block of compressed-tensors; the message of a ModelError is what is not supported."""
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise ModelError("no config_groups")
    blocks = set()
    for group in groups.values():
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise ModelError("a group without weights")
        _only(weights, "weights", type=("float",), num_bits=(8,), strategy=("tensor", "channel", "block"),
              symmetric=(None, True), actorder=(None, False))  # fmt: skip
        _only(group.get("input_activations") or {}, "input_activations", type=(None, "float"), num_bits=(None, 8))
        _only(group, output_activations=(None,), format=(None, "float-quantized", "naive-quantized"))
        of_blocks = weights["strategy"] == "block"
        blocks.add(_block(weights.get("block_structure"), "block_structure") if of_blocks else None)
    _only(stated, format=(None, "float-quantized", "naive-quantized"), transform_config=(None, {}))
    _only(stated.get("sparsity_config") or {}, "sparsity_config", format=(None, "dense"))
    if len(blocks) > 1:
        raise ModelError("groups of different blocks")
    return blocks.pop()


def _only(stated: Any, where: str = "", **allowed: tuple[Any, ...]) -> None:
    """Raise ModelError with key and value where a key of `stated` has none of the values allowed."""
    for key, values in allowed.items():
        given = stated.get(key) if isinstance(stated, dict) else stated
        if given not in values:
            raise ModelError(f"{where} {key} {given!r}".strip())


def _block(stated: Any, key: str) -> tuple[int, int]:
    """Return the size of a block; raises ModelError with the key where it is none."""
    if not isinstance(stated, list) or len(stated) != 2 or not all(type(n) is int and n > 0 for n in stated):
        raise ModelError(f"{key} {stated!r}")
    return stated[0], stated[1]


# ---- the tensors ----------------------------------------------------------------------------------------------------


def stored_in_fp8(folder: Path, load_format: str, wanted: Wanted, split: Split) -> frozenset[str]:
    """Return the names of a folder's tensors that are fp8, by the types in the files, whatever config.json lists."""
    return frozenset(name for name, tensor in read_tensors(folder, load_format, wanted, split) if tensor.dtype == FP8)


def read_weights(
    folder: Path,
    load_format: str = "auto",
    wanted: Wanted = lambda name: True,
    into: Mapping[str, Tensor] | None = None,
    split: Split | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield a folder's tensors as `read_tensors` does, fp8 ones brought to the form that the module has.

    into: the module's weights by the file's names, on whose device the arithmetic is done. Where it has a weight_scale,
    weight and weight_scale are yielded as `Fp8Linear` holds them, be the file's weight fp8 or not. Elsewhere, and
    without `into`, fp8 weights are yielded as number times scale in fp32. Raises ModelError.
    """
    scheme = read_scheme(folder)
    if scheme is not None:
        logger.info("%s", _what_becomes(scheme, into))
    into = into or {}
    halves: dict[str, dict[str, Tensor]] = {}  # by module: a weight whose scale has not come yet, or the reverse
    for name, tensor in read_tensors(folder, load_format, lambda name: wanted(_weight_of(name)), split):
        stem, _, kind = name.rpartition(".")
        is_fp8 = tensor.dtype == FP8
        if tensor.dtype in OTHER_FP8 or (is_fp8 and (kind != "weight" or scheme is None)):
            raise ModelError(f"{folder}: {name} is {str(tensor.dtype).removeprefix('torch.')}; supported are weights "
                             f"in float8_e4m3fn, with a quantization_config in config.json: {SUPPORTED}")  # fmt: skip
        if scheme is None or not (is_fp8 or kind in (*SCALES, *IGNORED)):
            yield from _formed(name, tensor, None, into)
        elif kind not in IGNORED:
            pair = halves.setdefault(stem, {})
            pair["weight" if is_fp8 else "scale"] = tensor
            if len(pair) == 2:
                del halves[stem]
                yield from _formed(f"{stem}.weight", pair["weight"], _checked(stem, pair, scheme), into, scheme.block)
    if halves:
        lonely = [f"{stem} has a {next(iter(pair))} only" for stem, pair in halves.items()]
        raise ModelError(f"{folder}: an fp8 weight and its scale go together: {some(lonely)}")


def _what_becomes(scheme: Scheme, into: Mapping[str, Tensor] | None) -> str:
    """Return a line on what happens to a checkpoint's fp8 weights."""
    kind = "tensor or channel" if scheme.block is None else "block of {} x {}".format(*scheme.block)
    then = "multiplied out"
    if any(name.endswith(".weight_scale") for name in into or ()):
        then = "kept" if scheme.block is None else "quantized again with one for each channel"
    elif into is not None:
        then += "; on CUDA, --quantization fp8 keeps weights in 8 bits"
    return f"fp8 weights with a scale for each {kind} are {then}"


def _weight_of(name: str) -> str:
    """Return the name of the weight that a scale belongs to; another name as it is."""
    stem, _, kind = name.rpartition(".")
    return f"{stem}.weight" if kind in (*SCALES, *IGNORED) else name


def _checked(stem: str, pair: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Return the scale of a module's weight [N, K] in fp32, as [N, 1] or by blocks; raises ModelError."""
    weight, scale = pair["weight"], pair["scale"].float()
    rows, size = weight.shape if weight.dim() == 2 else (0, 0)
    shapes = [(rows, 1), (rows,), (1,), ()]
    if scheme.block is not None:
        shapes = [(-(-rows // scheme.block[0]), -(-size // scheme.block[1]))]
    if not rows or scale.shape not in shapes:
        raise ModelError(f"the scale of {stem}.weight {list(weight.shape)} has the shape {list(scale.shape)}; expected "
                         f"is {' or '.join(str(list(shape)) for shape in shapes)}")  # fmt: skip
    return scale.reshape(-1, 1).expand(rows, 1) if scheme.block is None else scale


def _formed(
    name: str, weight: Tensor, scale: Tensor | None, into: Mapping[str, Tensor], block: tuple[int, int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, an fp8 one times its scale; or as weight and weight_scale, where `into` has both."""
    beside = f"{name}_scale"
    if scale is None and beside not in into:
        yield name, weight
        return
    if name in into:
        weight, scale = weight.to(into[name].device), None if scale is None else scale.to(into[name].device)
    if scale is not None and block is None and beside in into:
        yield from ((name, weight), (beside, scale))
        return
    if scale is not None:
        if block is not None:
            scale = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        weight = weight.float() * scale[: weight.shape[0], : weight.shape[1]]
    yield from zip((name, beside), rowwise(weight), strict=True) if beside in into else [(name, weight)]
