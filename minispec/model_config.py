"""A model's sizes and switches.

Read next: `model.py`, the decoder that is built from a `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"  # in files, without `model.` in front
JOINED = {  # our module: the names, within a layer, of the published modules that it joins
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
    "router": ("mlp.gate",),
}


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
    table: str = EMBEDDING  # which tensor of the files is the embedding, LM_HEAD in some files of tied models

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
