"""Which architectures are served, and what a model's `config.json` says: its sizes and switches.

Every architecture that is served is a row of `_ARCHITECTURES`. For another one an error of one line names what minispec
lacks (`_NEEDS`). docs/models.md is the table for users.

Read next: `weights.py`, which reads the file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from minispec.load.keys import Keys
from minispec.model_config import ModelConfig, ModelError

logger = logging.getLogger("minispec")


class Family(NamedTuple):
    """What an architecture has that its config.json need not say."""

    bias: bool = False  # always a bias on q, k, v
    qk_norm: bool = False  # norms on q and k
    # Keys that Llama does not read, or that have another default than in Llama; the defaults are transformers'.
    keys: Mapping[str, Any] = MappingProxyType({})


# Qwen's keys. If `use_sliding_window` is true, the layers that `layer_types` names have a window; without
# `layer_types`, the layers from `max_window_layers` on.
_SLIDING = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_ARCHITECTURES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(keys={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(bias=True, keys=_SLIDING),
    "MiMoForCausalLM": Family(bias=True, keys=_SLIDING),
    "Qwen3ForCausalLM": Family(qk_norm=True, keys=_SLIDING),
    "SmolLM3ForCausalLM": Family(
        keys={"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layers": None, "no_rope_layer_interval": 4,
              "use_sliding_window": False, "sliding_window": None, "layer_types": None}
    ),
    "GraniteForCausalLM": Family(keys=dict.fromkeys(_MULTIPLIERS, 1.0)),
    "Phi3ForCausalLM": Family(keys={"sliding_window": None, "rms_norm_eps": 1e-5}),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True,
        keys={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
              "decoder_sparse_step": 1, "mlp_only_layers": (), "use_sliding_window": False, "sliding_window": 4096},
    ),
    # The width of an expert is `intermediate_size`, every layer has experts, and a token's weights of experts are
    # divided by their sum.
    "MixtralForCausalLM": Family(
        keys={"num_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1e6,
              "rms_norm_eps": 1e-5}
    ),
}  # fmt: skip
# A key is a part of an architecture's name, its value what such a model needs and minispec lacks. The error names the
# first value whose key fits.
_NEEDS = {
    "GptOss": "attention sinks and MXFP4 weights",
    "Llama4": "attention in chunks and another kind of mixture of experts",
    "DeepseekV": "latent attention and another kind of mixture of experts, in its MTP layer too",
    "Grok": "soft caps on attention and router, norms before and after a layer, and experts with GELU",
    "MiMoV2": "attention sinks, values narrower than keys, experts behind a sigmoid, and several MTP layers",
    "Step3p5": "gates on attention heads, positions on a part of a head, shared experts, and several MTP layers",
    "MiniCPM3": "latent attention",
    "Gemma": "norms that multiply by 1 + weight, and from Gemma 2 on soft caps or two rotary thetas",
    **dict.fromkeys(("Olmo2", "Olmo3"), "norms over the full width of q and k, and none before a layer"),
    **dict.fromkeys(
        ("Qwen3Next", "Qwen3_5", "Hybrid", "Bamba", "FalconH1", "Jamba", "Lfm2", "Mamba", "NemotronH", "Zamba"),
        "a recurrent state beside keys and values",
    ),
    **dict.fromkeys(("Moe", "MoE", "Dbrx"), "another kind of mixture of experts"),
}
# The same by a part of a published model's name, in small letters and digits alone, where there is no config.json yet.
NAMES = {part.lower(): need for part, need in _NEEDS.items() if part not in ("Moe", "MoE", "Hybrid", "Mamba")}

_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN_KEYS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")  # that may be left out
_BY_LENGTH = ("longrope", "su", "dynamic")  # kinds of rotary scaling that differ with the text's length
# Far beyond all models, and small enough to be counted to.
MOST_LAYERS, WIDEST, MOST_TOKENS, LONGEST = 1000, 2**20, 2**24, 2**24


def read_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read a config in the form that `load/weights.py` returns; raise ValueError if something is not supported."""
    key, architecture = Keys(config), _architecture(config)
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [name for name in needed if config.get(name) is None]:
        raise ModelError(f"config.json lacks {', '.join(missing)}, which every {architecture} has")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"config.json: hidden_act {act!r} not supported; supported: silu")
    if (part := key.number("partial_rotary_factor", None)) not in (None, 1.0):
        raise ModelError(f"config.json: partial_rotary_factor {part} not supported; supported: 1.0")
    bias, qk_norm, own = _ARCHITECTURES[architecture]
    key = Keys({**own, **config})
    layers, hidden_size = key.whole("num_hidden_layers", 1, MOST_LAYERS), key.whole("hidden_size", 1, WIDEST)
    inner, (heads, kv_heads, head_dim) = key.whole("intermediate_size", 1, WIDEST), _heads(key, hidden_size)
    attention_bias, multiplied = key.flag("attention_bias"), "attention_multiplier" in own
    scaling = _checked_scaling(key.within("rope_scaling"))
    longest = key.whole("max_position_embeddings", 1, LONGEST, 2048)
    if scaling is not None and scaling["rope_type"] == "yarn":
        # Qwen's model cards advise to add YaRN to a config by hand, and then `max_position_embeddings` stays as it
        # was. So the length is computed from the factor here, as vLLM does.
        longest = max(longest, int(scaling["factor"] * scaling["original_max_position_embeddings"]))
    unrotated = _unrotated(key, layers) if "no_rope_layers" in own else ()
    window, sliding = _sliding(Keys({name: key.stated[name] for name in own}), layers, unrotated)
    # Only Granite reads these keys; transformers' other classes ignore them, whatever a file says.
    multiplier = lambda name: key.number(name) if name in own else 1.0  # noqa: E731
    return ModelConfig(
        architecture=architecture,
        vocab_size=key.whole("vocab_size", 1, MOST_TOKENS),
        hidden_size=hidden_size,
        intermediate_size=inner,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=key.number("rms_norm_eps", 1e-6),
        rope_theta=key.number("rope_theta", None, 1.0) or own.get("rope_theta") or 10000.0,
        rope_scaling=scaling,
        context_length=min(longest, LONGEST),
        qkv_bias=bias or attention_bias,
        # Qwen2 and MiMo have biases on q, k, v only; Llama's and Qwen3's `attention_bias` covers o as well.
        output_bias=attention_bias and not bias,
        mlp_bias=key.flag("mlp_bias"),
        qk_norm=qk_norm,
        tied=key.flag("tie_word_embeddings", own.get("tie_word_embeddings", False)),
        sliding_window=window,
        dtype=config.get("torch_dtype"),
        unrotated=unrotated,
        sliding=sliding,
        embedding_multiplier=multiplier("embedding_multiplier"),
        query_multiplier=multiplier("attention_multiplier") * (math.sqrt(head_dim) if multiplied else 1.0),
        residual_multiplier=multiplier("residual_multiplier"),
        logits_multiplier=1 / multiplier("logits_scaling"),
        **(_mixture(config, own, layers, inner) if "num_experts" in own else {}),
    )


def one_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with `rope_theta` (None for the architecture's default) and `rope_scaling` in one spelling.

    `rope_scaling` is a dict with `rope_type`, or None for plain rotation; `rope_parameters`, the newer spelling of
    both, is never there. Of a file that has both `rope_scaling` wins, and what they hold wins over keys beside them, as
    in transformers. Raises ModelError.
    """
    key, config = Keys(config), dict(config)
    older, newer = key.within("rope_scaling"), key.within("rope_parameters")
    rope = dict(older.stated or newer.stated)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"config.json: rope_parameters per layer type are not supported, got {rope}")
    if older.stated and newer.stated and older.stated != newer.stated:
        logger.warning("config.json has rope_scaling %s and rope_parameters %s: the first holds, as in transformers",
                       dict(older.stated), dict(newer.stated))  # fmt: skip
    config.pop("rope_parameters", None)
    for name in ("rope_theta", "partial_rotary_factor"):
        if (value := rope.pop(name, None)) is not None:
            config[name] = value
    config.setdefault("rope_theta", None)
    kind = rope.pop("type", None) or "default"  # `rope_type` was called `type` before 2024
    rope = {"rope_type": kind, **rope}
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config


def what_it_needs(architectures: Sequence[object]) -> str:
    """Return what a model with these architectures needs and minispec lacks; empty if nothing is known of it."""
    if any(name in _ARCHITECTURES for name in architectures):
        return ""
    return next((need for part, need in _NEEDS.items() if any(part in str(name) for name in architectures)), "")


def named_architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the architectures that a config names."""
    fits = lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value)  # noqa: E731
    return Keys(config).read("architectures", "a list of names", fits, None) or []


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture that a config names, or that its model_type stands for; ModelError if none is served."""
    names = named_architectures(config)
    names = names or [name for name in _ARCHITECTURES if _model_type(name) == config.get("model_type")]
    if found := next((name for name in names if name in _ARCHITECTURES), None):
        return found
    needs = f": it needs {need}" if (need := what_it_needs(names)) else ""
    raise ModelError(f"config.json: architectures {names} not supported{needs}; supported: "
                     f"{', '.join(_ARCHITECTURES)}")  # fmt: skip


def _heads(key: Keys, hidden_size: int) -> tuple[int, int, int]:
    """Return the number of heads, of heads of keys and values, and a head's size."""
    heads = key.whole("num_attention_heads", 1, WIDEST)
    kv_heads = key.whole("num_key_value_heads", 1, heads, None) or heads
    if heads % kv_heads:
        raise ModelError(f"config.json: num_key_value_heads must divide num_attention_heads, {heads}, got {kv_heads}")
    head_dim = key.whole("head_dim", 2, WIDEST, None) or hidden_size // heads
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"config.json: head_dim (by default hidden_size {hidden_size} divided by num_attention_heads "
                         f"{heads}) must be even, got {head_dim}")  # fmt: skip
    return heads, kv_heads, head_dim


def _model_type(architecture: str) -> str:
    """Return what a config.json calls an architecture in `model_type`."""
    return architecture.removesuffix("ForCausalLM").lower().replace("moe", "_moe")


def _mixture(config: Mapping[str, Any], own: Mapping[str, Any], layers: int, inner: int) -> dict[str, Any]:
    """Return the fields of `ModelConfig` about experts; own: the keys that the family reads, with their defaults.

    The number of experts has two names, and the files of both families may use either. A null is the default.
    """
    key = Keys({**own, **{name: value for name, value in config.items() if value is not None}})
    experts = Keys(config).whole("num_experts", 0, WIDEST, None, also="num_local_experts")
    experts = own["num_experts"] if experts is None else experts
    step, dense = key.whole("decoder_sparse_step", default=1), key.wholes("mlp_only_layers") or ()
    per_token = key.whole("num_experts_per_tok")
    if per_token > experts > 0:
        raise ModelError(f"config.json: num_experts_per_tok must be at most num_experts, {experts}, got {per_token}")
    sparse = (layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    return {
        "sparse": tuple(sparse) if experts else (), "experts": experts, "experts_per_token": per_token,
        "expert_size": key.whole("moe_intermediate_size", 1, WIDEST, inner),
        "norm_topk_prob": key.flag("norm_topk_prob", True),
    }  # fmt: skip


def _unrotated(key: Keys, layers: int) -> tuple[int, ...]:
    """Return the layers without rotary positions; raise ModelError if `no_rope_layers` is too short.

    In spite of the key's name, a 1 in `no_rope_layers` stands for a layer with rotary positions. Without the list,
    every `no_rope_layer_interval`th layer has none (transformers, models/smollm3/configuration_smollm3.py; NoPE, arXiv
    2305.19466).
    """
    interval = key.whole("no_rope_layer_interval")
    listed = key.wholes("no_rope_layers", 0, 1) or [(index + 1) % interval for index in range(layers)]
    if len(listed) < layers:
        raise ModelError(f"config.json: no_rope_layers has {len(listed)} entries for num_hidden_layers {layers}")
    return tuple(index for index in range(layers) if not listed[index])


def _sliding(key: Keys, layers: int, unrotated: tuple[int, ...]) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window, None if there is none, and the layers that see it, as transformers' classes do.

    key: the keys that the family reads. If a family does not read `use_sliding_window`, there is a window whenever
    `sliding_window` is a number. Without `layer_types` the window is seen by SmolLM3's layers without positions
    (`unrotated`), by the layers of Qwen2, Qwen3 and MiMo from `max_window_layers` on, and by all layers of other
    families.
    """
    if key.stated.get("sliding_window") is None or not key.flag("use_sliding_window", True):
        return None, ()
    window, known = key.whole("sliding_window"), ("full_attention", "sliding_attention")
    fits = lambda kinds: isinstance(kinds, list) and len(kinds) == layers and all(kind in known for kind in kinds)  # noqa: E731
    kinds = key.read("layer_types", f"{' or '.join(known)} for each of {layers} layers", fits, None)
    if kinds is None:
        first = key.whole("max_window_layers", 0, default=0)
        return window, unrotated if "no_rope_layers" in key.stated else tuple(range(first, layers))
    return window, tuple(layer for layer in range(layers) if kinds[layer] == known[1])


def _checked_scaling(scaling: Keys) -> Mapping[str, Any] | None:
    """Return the config's rope_scaling, None if nothing is scaled; raise ModelError for a kind not supported."""
    # `rope_type` was called `type` before 2024, and wins as in transformers; the first Phi-3 files gave longrope
    # another name.
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    kind = "longrope" if "long_factor" in scaling.stated else kind
    if kind == "default":
        return None
    if kind not in _SCALING_KEYS:
        needs = ": it needs factors that change with the text's length" if kind in _BY_LENGTH else ""
        supported = ", ".join(_SCALING_KEYS)
        raise ModelError(f"{scaling.where} type {kind!r} not supported{needs}; supported: default, {supported}")
    key = Keys(scaling.stated, f"{scaling.where} of type {kind!r}")
    for name in _SCALING_KEYS[kind]:
        key.whole(name, 1, LONGEST) if name.startswith("original") else key.number(name)
    if kind == "yarn":
        for name in _YARN_KEYS:
            key.number(name, None)
        key.flag("truncate", True)
    elif kind == "llama3" and key.number("high_freq_factor") <= (low := key.number("low_freq_factor")):
        raise ModelError(f"{key.where}: high_freq_factor must be above low_freq_factor, {low:g}")
    return {**scaling.stated, "rope_type": kind}
