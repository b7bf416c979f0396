"""What a model's `config.json` says: its sizes and switches.

Every architecture that is served is a row of `_ARCHITECTURES`. For another one an error of one line names what minispec
lacks (`_NEEDS`). docs/models.md is the table for users.

Read next: `model.py`, the decoder that is built from a `ModelConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

JOINED = {  # our module: the names, within a layer, of the published modules that it joins
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
    "router": ("mlp.gate",),
}
# Some files stack the matrices of a layer's E experts in one tensor [E, out, in]. A key is the last part of such a
# tensor's name, its value the matrices of each expert in the tensor, one below the other.
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_LETTERS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # what Mixtral's files call an expert's matrices


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
_BY_LENGTH = ("longrope", "su", "dynamic")  # kinds of rotary scaling that differ with the text's length


class ModelError(ValueError):
    """A model cannot be found or read; the message is for the user."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of a decoder, read once from a Hugging Face `config.json`.

    Granite alone has multipliers (transformers, models/granite/modeling_granite.py):

        x = embedding_multiplier * embedding        scores = attention_multiplier * q k, in place of q k / sqrt(D)
        x = x + residual_multiplier * (attention, then MLP)             logits = LM head / logits_scaling
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    context_length: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    sliding_window: int | None  # how many of a text's newest tokens the `sliding` layers see; None: all
    dtype: str | None
    unrotated: tuple[int, ...] = ()  # layers without rotary positions
    sliding: tuple[int, ...] = ()  # layers that see a sliding window; the others see the whole text
    embedding_multiplier: float = 1.0
    # The query is multiplied by this after its rotary embedding. It is attention_multiplier * sqrt(D), since all kinds
    # of attention divide by sqrt(D). If D is 64 and attention_multiplier 1/64, it is a power of two, which costs no
    # rounding.
    query_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0  # 1 / logits_scaling
    sparse: tuple[int, ...] = ()  # layers with a mixture of experts in place of an MLP (`experts.py`)
    experts: int = 0  # the number of experts in such a layer
    experts_per_token: int = 0
    expert_size: int = 0  # an expert's inner width
    norm_topk_prob: bool = True  # whether a token's weights of experts are divided by their sum

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config in the form that `load/weights.py` returns; raise ValueError if something is not supported."""
        names = config.get("architectures") or []
        architecture = next((name for name in names if name in _ARCHITECTURES), None)
        if architecture is None:
            needs = f": it needs {need}" if (need := what_it_needs(names)) else ""
            raise ValueError(f"architectures {names} not supported{needs}; supported: {', '.join(_ARCHITECTURES)}")
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [key for key in needed if config.get(key) is None]:
            raise ValueError(f"config.json lacks {', '.join(missing)}, which every {architecture} has")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act {act!r} not supported; supported: silu")
        if (part := config.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
            raise ValueError(f"partial_rotary_factor {part} not supported; supported: 1.0")
        bias, qk_norm, keys = _ARCHITECTURES[architecture]
        given = {**keys, **config}
        attention_bias = bool(config.get("attention_bias", False))
        heads, multiplied = config["num_attention_heads"], "attention_multiplier" in keys
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        scaling = _checked_scaling(config.get("rope_scaling"))
        longest = config.get("max_position_embeddings", 2048)
        if scaling is not None and scaling["rope_type"] == "yarn":
            # Qwen's model cards advise to add YaRN to a config by hand, and then `max_position_embeddings` stays as it
            # was. So the length is computed from the factor here, as vLLM does.
            longest = max(longest, int(scaling["factor"] * scaling["original_max_position_embeddings"]))
        unrotated = _unrotated(given, config["num_hidden_layers"]) if "no_rope_layers" in keys else ()
        window, sliding = _sliding({key: given[key] for key in keys}, config["num_hidden_layers"], unrotated)
        # Only Granite reads these keys; transformers' other classes ignore them, whatever a file says.
        multiplier = lambda key: _positive(key, given[key]) if key in keys else 1.0  # noqa: E731
        return cls(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            norm_eps=given.get("rms_norm_eps", 1e-6),
            rope_theta=float(config.get("rope_theta") or keys.get("rope_theta") or 10000.0),
            rope_scaling=scaling,
            context_length=longest,
            qkv_bias=bias or attention_bias,
            # Qwen2 and MiMo have biases on q, k, v only; Llama's and Qwen3's `attention_bias` covers o as well.
            output_bias=attention_bias and not bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qk_norm,
            tied=bool(given.get("tie_word_embeddings", False)),
            sliding_window=window,
            dtype=config.get("torch_dtype"),
            unrotated=unrotated,
            sliding=sliding,
            embedding_multiplier=multiplier("embedding_multiplier"),
            query_multiplier=multiplier("attention_multiplier") * (math.sqrt(head_dim) if multiplied else 1.0),
            residual_multiplier=multiplier("residual_multiplier"),
            logits_multiplier=1 / multiplier("logits_scaling"),
            **(_mixture(config, keys) if "num_experts" in keys else {}),
        )

    def plain(self) -> ModelConfig:
        """Return a copy for a drafter of this model: a Llama with positions and an MLP in all layers, multipliers 1.

        All its layers see the whole text. Biases, norms on q and k and all else stay.
        """
        return replace(
            self, architecture="LlamaForCausalLM", unrotated=(), sliding_window=None, sliding=(), sparse=(),
            embedding_multiplier=1.0, query_multiplier=1.0, residual_multiplier=1.0, logits_multiplier=1.0,
        )  # fmt: skip

    def windows(self, longest: int) -> tuple[int, ...]:
        """Return how many tokens each layer sees of texts of up to `longest` tokens; () if all layers see all."""
        if not self.sliding or self.sliding_window is None or self.sliding_window >= longest:
            return ()
        return tuple(self.sliding_window if layer in self.sliding else longest for layer in range(self.layers))

    def split(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return a file's tensor with its name; if it joins several matrices, return each matrix with its name.

        A tensor may join q, k and v, or gate and up. The rows of its parts lie one after the other (transformers,
        models/phi3/modeling_phi3.py), and so do scales of fp8 weights. If there is one scale for all rows, every part
        gets it. Experts may be stacked (`STACKED`) or, as in Mixtral's files, have other names. Raises ModelError if a
        border between two parts falls inside a row, as it can where one row of scales covers several rows of weights.
        """
        name = name.replace(".block_sparse_moe.", ".mlp.")
        stem, _, kind = name.rpartition(".")
        owner, _, part = stem.rpartition(".")
        if part in _LETTERS:
            return [(f"{owner}.{_LETTERS[part]}.{kind}", tensor)]
        if part == "experts" and kind in STACKED:
            names = expert_names(owner, kind, self.experts)
            if tensor.dim() != 3 or len(tensor) != self.experts or tensor.shape[1] % len(STACKED[kind]):
                raise ModelError(f"{name} {list(tensor.shape)} is no stack of the matrices of {self.experts} experts")
            return zip(names, tensor.flatten(0, 1).chunk(len(names)), strict=True)
        key_rows = self.kv_heads * self.head_dim
        rows = {"qkv_proj": (self.heads * self.head_dim, key_rows, key_rows),
                "gate_up_proj": (self.intermediate_size, self.intermediate_size)}.get(part)  # fmt: skip
        if rows is None:
            return [(name, tensor)]
        names = [f"{owner.rpartition('.')[0]}.{one}.{kind}" for one in JOINED[part]]
        count, total = len(tensor) if tensor.dim() else 1, sum(rows)
        if count == 1:
            return [(one, tensor) for one in names]
        if any(own * count % total for own in rows):
            raise ModelError(f"{name} {list(tensor.shape)} cannot be split into {' + '.join(map(str, rows))} rows")
        return zip(names, tensor.split([own * count // total for own in rows]), strict=True)


def what_it_needs(architectures: Sequence[object]) -> str:
    """Return what a model with these architectures needs and minispec lacks; empty if nothing is known of it."""
    if any(name in _ARCHITECTURES for name in architectures):
        return ""
    return next((need for part, need in _NEEDS.items() if any(part in str(name) for name in architectures)), "")


def expert_names(owner: str, kind: str, count: int) -> list[str]:
    """Return the names of the matrices that a stacked tensor of a layer's experts holds, in their order.

    owner: the name of the layer's MLP. kind: the last part of the stacked tensor's name, see `STACKED`.
    """
    return [f"{owner}.experts.{expert}.{part}.weight" for expert in range(count) for part in STACKED[kind]]


def _mixture(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelConfig` about experts; keys: the keys that the family reads, with their defaults.

    The number of experts has two names, and the files of both families may use either.
    """
    names = ("num_experts", "num_local_experts")
    given = {**config, "num_experts": next((config[name] for name in names if config.get(name) is not None), None)}
    read = {key: default if given.get(key) is None else given[key] for key, default in keys.items()}
    experts = _whole("num_experts", read["num_experts"], 0)
    step, dense = _whole("decoder_sparse_step", read.get("decoder_sparse_step", 1)), read.get("mlp_only_layers", ())
    if not isinstance(dense, (list, tuple)) or not all(isinstance(layer, int) for layer in dense):
        raise ValueError(f"mlp_only_layers must be a list of layers, got {dense!r}")
    sparse = (layer for layer in range(config["num_hidden_layers"]) if layer not in dense and (layer + 1) % step == 0)
    per_token = _whole("num_experts_per_tok", read["num_experts_per_tok"])
    if per_token > experts > 0:
        raise ValueError(f"num_experts_per_tok must be at most num_experts, {experts}, got {per_token}")
    return {
        "sparse": tuple(sparse) if experts else (), "experts": experts, "experts_per_token": per_token,
        "expert_size": _whole("moe_intermediate_size", read.get("moe_intermediate_size", config["intermediate_size"])),
        "norm_topk_prob": bool(read.get("norm_topk_prob", True)),
    }  # fmt: skip


def _whole(key: str, value: Any, least: int = 1) -> int:
    """Return a whole number that a config states; raise ValueError naming the key for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, got {value!r}")
    return value


def _positive(key: str, value: Any) -> float:
    """Return a number above 0 that a config states; raise ValueError naming the key for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a number above 0, got {value!r}")
    return float(value)


def _unrotated(given: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers without rotary positions; raise ValueError if `no_rope_layers` is too short.

    In spite of the key's name, a 1 in `no_rope_layers` stands for a layer with rotary positions. Without the list,
    every `no_rope_layer_interval`th layer has none (transformers, models/smollm3/configuration_smollm3.py; NoPE, arXiv
    2305.19466).
    """
    interval = _positive("no_rope_layer_interval", given["no_rope_layer_interval"])
    listed = given["no_rope_layers"] or [(index + 1) % interval for index in range(layers)]
    if len(listed) < layers:
        raise ValueError(f"no_rope_layers has {len(listed)} entries for num_hidden_layers {layers}")
    return tuple(index for index in range(layers) if not listed[index])


def _sliding(read: Mapping[str, Any], layers: int, unrotated: tuple[int, ...]) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window, None if there is none, and the layers that see it, as transformers' classes do.

    read: the keys that the family reads. If a family does not read `use_sliding_window`, there is a window whenever
    `sliding_window` is a number. Without `layer_types` the window is seen by SmolLM3's layers without positions
    (`unrotated`), by the layers of Qwen2, Qwen3 and MiMo from `max_window_layers` on, and by all layers of other
    families.
    """
    window, kinds = read.get("sliding_window"), read.get("layer_types")
    if window is None or not read.get("use_sliding_window", True):
        return None, ()
    if kinds is None:
        first = _whole("max_window_layers", read.get("max_window_layers", 0), 0)
        kinds = unrotated if "no_rope_layers" in read else range(first, layers)
        return _whole("sliding_window", window), tuple(kinds)
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, (list, tuple)) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ValueError(f"layer_types must have {' or '.join(known)} for each of {layers} layers, got {kinds!r}")
    return _whole("sliding_window", window), tuple(layer for layer in range(layers) if kinds[layer] == known[1])


def _checked_scaling(scaling: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the config's rope_scaling, None if nothing is scaled; raise ValueError for a kind not supported."""
    if not scaling:
        return None
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if "long_factor" in scaling:  # the first Phi-3 files gave this kind another name
        kind = "longrope"
    if kind == "default":
        return None
    if kind not in _SCALING_KEYS:
        needs = ": it needs factors that change with the text's length" if kind in _BY_LENGTH else ""
        supported = ", ".join(_SCALING_KEYS)
        raise ValueError(f"rope_scaling type {kind!r} not supported{needs}; supported: default, {supported}")
    if missing := [key for key in _SCALING_KEYS[kind] if scaling.get(key) is None]:
        raise ValueError(f"rope_scaling of type {kind!r} lacks {', '.join(missing)}")
    for key in _SCALING_KEYS[kind]:
        _positive(f"rope_scaling's {key}", scaling[key])
    return {**scaling, "rope_type": kind}
