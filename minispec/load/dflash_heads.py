"""DFlash checkpoints of z-lab and speculators: a folder is read into a `DFlashConfig` and tensors.

z-lab's config.json is that of the network's body, a Qwen3 whatever the target is, with these keys more. `dflash_config`
is read first; older files have some of its keys at the top level.

    dflash_config.target_layer_ids    layers of the target whose OUTPUT is read, so the tap is the next layer's input
    dflash_config.mask_token_id       the target's id whose embedding stands in the places to be drafted
    dflash_config.block_size          rows of the block, the bonus's included
    num_target_layers                 how many layers the target has
    is_causal                         whether a row of the block sees only itself and the rows before

The tensors are `fc`, `hidden_norm`, `norm` and the layers of a Qwen3; embedding and LM head are the target's.

speculators names its format in `speculators_model_type`, writes z-lab's architecture or one of its own, and nests the
body in `transformer_layer_config`. `aux_hidden_state_layer_ids` are layers whose INPUT is read, z-lab's ids plus one.
Beside z-lab's tensors are an embedding, an LM head of `draft_vocab_size` rows, and `d2t`, the offsets from draft ids to
the target's.

Variants come as further keys and tensors (DFlash2's convolutions, attention sinks, values that are scaled). So every
key and every tensor that is not known is refused by its name.

Read next: `dspark_heads.py`, whose files are these and a little more; `heads.py`, which makes a network of them and has
the formats of other heads; `dflash.py` for the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minispec.config import MAX_NODES
from minispec.dflash import DFlashConfig, DFlashHead
from minispec.load import heads
from minispec.load.architectures import MOST_LAYERS, named_architectures
from minispec.load.fp8_weights import read_weights
from minispec.load.keys import REQUIRED, Keys
from minispec.load.weights import read_config
from minispec.model import ModelConfig
from minispec.model_config import ModelError

BLOCK_SIZE = 16  # where config.json states none, as SGLang has it
OWN_KEYS = ("block_size", "mask_token_id", "target_layer_ids", "is_causal")  # in dflash_config, or at the top level
# Keys at the top level that are read here or by `ModelConfig`, and those that change nothing of a draft.
KEYS = frozenset("""
    architectures attention_bias dflash_config head_dim hidden_act hidden_size intermediate_size layer_types
    max_position_embeddings max_window_layers mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
    num_target_layers partial_rotary_factor rms_norm_eps rope_scaling rope_theta sliding_window torch_dtype
    use_sliding_window vocab_size
    _name_or_path attention_dropout auto_map bos_token_id eos_token_id initializer_range model_type pad_token_id
    pretraining_tp quantization_config tie_word_embeddings transformers_version use_cache
    """.split()) | {*OWN_KEYS}  # fmt: skip
# Keys of speculators' config.json. sliding_window_non_causal is about layers that slide, which are refused; max_anchors
# is about training, and older files repeat num_hidden_layers.
SPECULATOR_KEYS = frozenset("""
    architectures aux_hidden_state_layer_ids block_size draft_vocab_size mask_token_id max_anchors num_hidden_layers
    sliding_window_non_causal speculators_config speculators_model_type speculators_version target_hidden_size
    transformer_layer_config
    auto_map model_type tie_word_embeddings torch_dtype transformers_version
    """.split())  # fmt: skip


def read_dflash(folder: Path, target: ModelConfig, load_format: str = "auto") -> heads.Published:
    """Return what a folder describes and holds, for a target of these sizes; for `heads.load_head`.

    Raises ModelError if the folder holds no DFlash network, one for another target, or a variant; its message does not
    name the flag.
    """
    whole = read_config(folder)
    architectures = named_architectures(whole)
    # Files of speculators have z-lab's architecture as well: the class whose weights were saved.
    speculator = "speculators_model_type" in whole or heads.DFLASH_MODELS[1] in architectures
    if len(architectures) != 1 or architectures[0] not in heads.DFLASH_MODELS:
        instead = "; give --speculative-algorithm DSPARK" if set(architectures) & set(heads.DSPARK_MODELS) else ""
        supported = f"{', '.join(heads.DFLASH_MODELS)}{instead}"
        raise ModelError(f"architectures {architectures} are not supported; supported: {supported}")
    found = read_block(folder, whole, dict(read_weights(folder, load_format)), target)
    # An LM head in z-lab's format is refused, since a token map's rows would take its place.
    if not speculator and (own := {"embed_tokens.weight", "lm_head.weight"} & found.tensors.keys()):
        raise ModelError("the weights are not those that config.json describes; unknown tensors: "
                         f"{', '.join(sorted(own))}")  # fmt: skip
    return found._replace(config=replace(found.config, own_lm_head=speculator))


def read_block(
    folder: Path, whole: heads.Stated, tensors: heads.Tensors, target: ModelConfig, lowest: int = 0
) -> heads.Published:
    """Return the network that a config.json, in either format, and tensors describe, for a target of these sizes.

    lowest: the least id of a layer; -1 stands for the embedding. An embedding and an LM head are the network's own if
    they are there; d2t and t2d leave `tensors`. Raises ModelError as `read_dflash` does.
    """
    stated = _body(whole, target) if whole.get("transformer_layer_config") is not None else whole
    own = dict(Keys(stated).within("dflash_config").stated)
    _refuse_unknown("dflash_config", own, OWN_KEYS)
    _refuse_unknown("config.json", stated, KEYS)
    if (folder / "mask_embedding.pt").exists():
        raise ModelError("mask_embedding.pt, an embedding of its own for the mask, is not supported; supported: "
                         "mask_token_id")  # fmt: skip
    layers = Keys(stated).whole("num_hidden_layers", 1, MOST_LAYERS)
    _refuse_sliding(stated, layers)
    prefix = "layers.0."
    key = Keys({**{name: stated[name] for name in OWN_KEYS if name in stated}, **own})
    shape = heads.layer_sizes({**stated, "use_sliding_window": False}, tensors, prefix)
    heads.check_fit(shape.hidden_size, shape.vocab_size, target)
    if (count := Keys(stated).whole("num_target_layers", default=None) or target.layers) != target.layers:
        raise ModelError(f"num_target_layers is {count}, and the target has {target.layers}")
    # The output of layer i is the input of layer i + 1. The last layer's is refused, as files may mean it before the
    # final norm or after. If no layers are stated, as many are read as the network has.
    outputs = _layer_ids(key, "target_layer_ids", (lowest, target.layers - 2), "output", None)
    outputs = outputs or default_ids(target.layers, layers)
    return heads.Published(
        DFlashConfig(
            DFlashHead.name,
            replace(shape, layers=layers),
            tuple(i + 1 for i in outputs),
            heads.draft_ids(whole, tensors, shape.vocab_size),
            "embed_tokens.weight" in tensors,
            "lm_head.weight" in tensors,
            block_size=key.whole("block_size", 2, MAX_NODES, None) or BLOCK_SIZE,
            mask_token=key.whole("mask_token_id", 0, target.vocab_size - 1),
            causal=key.flag("is_causal"),
        ),
        tensors,
        prefix,
    )


def default_ids(layers: int, count: int) -> list[int]:
    """Return the ids of the `count` layers that a network reads if none are stated, of a target of so many layers."""
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]  # a half goes to the even id, as in Python


def _layer_ids(key: Keys, name: str, bounds: tuple[int, int], what: str, default: Any = REQUIRED) -> Any:
    """Return the ids of layers that config.json states; raises ModelError unless they are ids of what is read."""
    low, high = bounds
    fits = lambda ids: type(ids) is list and ids != [] and all(type(i) is int and low <= i <= high for i in ids)  # noqa: E731
    return key.read(name, f"ids in [{low}, {high}], of layers whose {what} is read", fits, default)


def _body(stated: Mapping[str, Any], target: ModelConfig) -> dict[str, Any]:
    """Return speculators' config.json as z-lab's.

    Raises ModelError naming the key if one is not known, or the ids are none.
    """
    _refuse_unknown("config.json", stated, SPECULATOR_KEYS)
    nested = heads.layer_config(stated)
    ids = _layer_ids(Keys(stated), "aux_hidden_state_layer_ids", (1, target.layers - 1), "input")
    own = {"target_layer_ids": [i - 1 for i in ids], "block_size": stated.get("block_size"),
           "mask_token_id": stated.get("mask_token_id")}  # fmt: skip
    return {**{key: value for key, value in nested.items() if key not in ("rope_parameters", "dtype")},
            "dflash_config": own}  # fmt: skip


def _refuse_unknown(where: str, stated: Mapping[str, Any], known: Sequence[str] | frozenset[str]) -> None:
    """Raise ModelError naming the keys that may change what the network computes, and are not known.

    A key that says null or false asks for nothing.
    """
    if unknown := sorted(key for key, value in stated.items() if key not in known and value not in (None, False)):
        raise ModelError(f"{where} has keys that are not supported, of a variant of DFlash or of another drafter: "
                         f"{', '.join(unknown)}")  # fmt: skip


def _refuse_sliding(stated: Mapping[str, Any], layers: int) -> None:
    """Raise ModelError if a layer's attention slides: here every row of the context is seen.

    Without layer_types the layers from max_window_layers on slide, if use_sliding_window is true.
    """
    key = Keys(stated)
    types = key.read("layer_types", "a list", lambda value: isinstance(value, list), None)
    if types is None:
        full = key.whole("max_window_layers", 0, default=layers) if key.flag("use_sliding_window") else layers
        types = ["full_attention" if index < full else "sliding_attention" for index in range(layers)]
    if other := sorted({str(kind) for kind in types} - {"full_attention"}):
        raise ModelError(f"layer_types {', '.join(other)} (sliding_window {stated.get('sliding_window')}) are not "
                         "supported; supported: full_attention")  # fmt: skip
