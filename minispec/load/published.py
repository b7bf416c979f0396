"""What files call the weights of a model or a draft head, and which of our tensors these are.

Read next: `weights.py`, which reads the files, and `architectures.py` for the config beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn

from minispec.model import Block
from minispec.model_config import EMBEDDING, JOINED, LM_HEAD, ModelConfig, ModelError

# Some files stack the matrices of a layer's E experts in one tensor [E, out, in]. A key is the last part of such a
# tensor's name, its value the matrices of each expert in the tensor, one below the other.
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_LETTERS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # what Mixtral's files call an expert's matrices


def published_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's or a draft head's weights under the names that files use: q, k, v, gate, up and experts apart.

    The tensors are views, so writing into them fills the module. A tied LM head is left out: it is the embedding.
    """
    published: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():  # each once; a tied one under its first name
        stem, _, kind = name.rpartition(".")
        owner, _, part = stem.rpartition(".")
        if part == "experts":
            each = expert_names(f"{owner}.mlp", kind, len(parameter))
            published |= zip(each, parameter.detach().flatten(0, 1).chunk(len(each)), strict=True)
            continue
        names = JOINED.get(part, (part,))
        rows = [len(parameter) // len(names)] * len(names)
        if part == "qkv_proj":
            block = cast(Block, module.get_submodule(owner))
            rows = [block.q_size, block.kv_size, block.kv_size]
        prefix = f"{owner}." if owner else ""
        for one, view in zip(names, parameter.detach().split(rows), strict=True):
            published[f"{prefix}{one}.{kind}"] = view
    return published


def reads(config: ModelConfig, name: str) -> bool:
    """Return whether a file's tensor `name` belongs to the model; an MTP layer is a draft head and does not."""
    other = config.tied and name in (EMBEDDING, LM_HEAD) and name != config.table
    return not name.startswith("mtp_layers.") and not other


def parts_of(config: ModelConfig, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Return a file's tensor with its name; if it joins several matrices, return each matrix with its name.

    A tensor may join q, k and v, or gate and up. The rows of its parts lie one after the other (transformers,
    models/phi3/modeling_phi3.py), and so do scales of fp8 weights. If there is one scale for all rows, every part
    gets it. Experts may be stacked (`STACKED`) or, as in Mixtral's files, have other names. Raises ModelError if a
    border between two parts falls inside a row, as it can where one row of scales covers several rows of weights.
    """
    name = EMBEDDING if config.tied and name == config.table else name.replace(".block_sparse_moe.", ".mlp.")
    stem, _, kind = name.rpartition(".")
    owner, _, part = stem.rpartition(".")
    if part in _LETTERS:
        return [(f"{owner}.{_LETTERS[part]}.{kind}", tensor)]
    if part == "experts" and kind in STACKED:
        names = expert_names(owner, kind, config.experts)
        if tensor.dim() != 3 or len(tensor) != config.experts or tensor.shape[1] % len(STACKED[kind]):
            raise ModelError(f"{name} {list(tensor.shape)} is no stack of the matrices of {config.experts} experts")
        return zip(names, tensor.flatten(0, 1).chunk(len(names)), strict=True)
    key_rows = config.kv_heads * config.head_dim
    rows = {"qkv_proj": (config.heads * config.head_dim, key_rows, key_rows),
            "gate_up_proj": (config.intermediate_size, config.intermediate_size)}.get(part)  # fmt: skip
    if rows is None:
        return [(name, tensor)]
    names = [f"{owner.rpartition('.')[0]}.{one}.{kind}" for one in JOINED[part]]
    count, total = len(tensor) if tensor.dim() else 1, sum(rows)
    if count == 1:
        return [(one, tensor) for one in names]
    if any(own * count % total for own in rows):
        raise ModelError(f"{name} {list(tensor.shape)} cannot be split into {' + '.join(map(str, rows))} rows")
    return zip(names, tensor.split([own * count // total for own in rows]), strict=True)


def expert_names(owner: str, kind: str, count: int) -> list[str]:
    """Return the names of the matrices that a stacked tensor of a layer's experts holds, in their order.

    owner: the name of the layer's MLP. kind: the last part of the stacked tensor's name, see `STACKED`.
    """
    return [f"{owner}.experts.{expert}.{part}.weight" for expert in range(count) for part in STACKED[kind]]
