"""The target model: one decoder for the Llama family.

Llama 2/3, Mistral, Mixtral, Qwen2/3, Qwen3-MoE, MiMo, SmolLM2/3, Granite and Phi-3 differ by a few switches:

    biases on q, k, v        Qwen2, MiMo; any Llama whose file says so
    norms on q and k         Qwen3
    rotary scaling           Llama 3.1, YaRN, linear: `rope_frequencies`, `rope_factor`
    no rotary positions      some layers of SmolLM3: `Rope.still`
    sliding windows          Mistral 0.1, Phi-3, some layers of some Qwen2: behind `attend`, `attention.Windows`
    multipliers              Granite: of embedding, attention, residual and logits: `ModelConfig`
    tied embeddings          small models
    a mixture of experts     Mixtral; some or all layers of Qwen3-MoE: `experts.py`
    joined matrices          Phi-3's files, some files of experts: `load/published.py`

`ModelConfig` has these switches, from `config.json` (`load/architectures.py`); nothing here branches on a model's name.

The model reaches its context, the keys and values of earlier tokens, through one function:
`attend.layer(i)(q, k, v) -> out`. Pages, trees, chunks and masks are behind it (`attention.py`). So the same module
decodes, verifies trees, trains heads and is the reference in tests. A drafter may read the residual stream. A tap names
the place where it reads: the input of a layer, or the output of the last layer, before or after the final norm.

Letters: B is the batch, T the tokens of each batch entry, d the hidden size, D the size of an attention head, H the
number of heads (Hq of queries, Hkv of keys and values), L the number of layers, V the size of the vocabulary.

Papers: LLaMA (arXiv 2302.13971), rotary embeddings (arXiv 2104.09864), grouped-query attention (arXiv 2305.13245).
Read next: `kv.py`, then `attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minispec.experts import Experts
from minispec.model_config import ModelConfig

FINAL = "final"  # the tap of the normed last hidden state, which the LM head reads


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Return the rotary angular frequencies [D / 2] fp32: scaled as in Llama 3.1, as in YaRN, linearly, or not at all.

    In Llama 3.1, frequencies that turn more than `high_freq_factor` times within the original context stay, and those
    that turn less than `low_freq_factor` times are divided by `factor`. Those between are interpolated, linearly in
    their turns. YaRN (arXiv 2309.00071, section 3.2; transformers' `_compute_yarn_parameters`) does the same with
    beta_fast and beta_slow, but interpolates linearly in a frequency's index.
    """
    # On a CPU even if the model is on the meta device, where PyTorch would import Dynamo for it.
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":
        return frequency / scaling["factor"]
    if scaling["rope_type"] == "yarn":
        ramp = _yarn_ramp(config.head_dim, config.rope_theta, scaling)
        return 1.0 / (scaling["factor"] * config.rope_theta**exponent) * (1 - ramp) + frequency * ramp
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    # The order of operations is that of transformers: a difference in the last bit becomes 1e-4 in the logits of a
    # model with sharp attention after 300 tokens.
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequency)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequency / scaling["factor"] + keep * frequency


def _yarn_ramp(dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Return how much of each frequency [D / 2] fp32 YaRN keeps, from 1 to 0.

    Frequency i turns t = original / (2 pi theta^(2i / D)) times within the original context. Solved for
    i: i = D log(original / (2 pi t)) / (2 log theta). The ramp's ends are whole indices unless `truncate` is false.
    """
    original = scaling["original_max_position_embeddings"]
    turns = (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
    first, last = (dim * math.log(original / (t * 2 * math.pi)) / (2 * math.log(theta)) for t in turns)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    return 1 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)


def rope_factor(config: ModelConfig) -> float:
    """Return the factor on cos and sin: YaRN's `attention_factor`, by default computed as below; without YaRN 1."""
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if (stated := scaling.get("attention_factor")) is not None:
        return float(stated)
    of = lambda mscale: 0.1 * mscale * math.log(max(scaling["factor"], 1)) + 1.0  # noqa: E731
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return float(of(mscale) / of(all_dim)) if mscale and all_dim else float(of(1))


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x times a factor; x itself for 1, so that the graphs of models without multipliers have no product."""
    return x if factor == 1.0 else x * factor


def stored(x: Tensor) -> Tensor:
    """Return x [B, T, d], which compiled code stores before a product of one row on CUDA reads it.

    There Inductor makes a loop over the weights of the product, and would compute x anew in that loop for every weight:
    27 instructions for each where silu precedes, when memory speed leaves time for 16 on an H200 (docs/cuda.md).
    Inductor stores what `as_strided` reads.
    """
    return x.as_strided(x.shape, x.stride()) if x.is_cuda and x.shape[:2].numel() == 1 else x


class Rope(NamedTuple):
    """Rotary factors of one forward pass: cos, sin [B, 1, T, D], computed once and shared by all layers."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Rope:
        """Return the factors for positions [B, T], frequencies [D / 2] fp32 and `rope_factor`; angles are fp32 too."""
        angle = positions[:, None, :, None].float() * frequencies
        angle = torch.cat((angle, angle), dim=-1)
        return cls(scaled(angle.cos(), factor).to(dtype), scaled(angle.sin(), factor).to(dtype))

    def still(self) -> Rope:
        """Return factors that turn nothing: a layer without positions then runs the graph of all other layers."""
        return Rope(torch.ones_like(self.cos), torch.zeros_like(self.sin))

    def turn(self, x: Tensor) -> Tensor:
        """Rotate x [B, H, T, D] by the positions; element i is paired with element i + D / 2, as in Hugging Face."""
        left, right = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-right, left), dim=-1) * self.sin


# Attention of one layer: q [B, Hq, T, D], k and v [B, Hkv, T, D] -> out [B, Hq, T, D].
LayerAttend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attend(Protocol):
    """The model's access to its context; `attention.py` names the kinds."""

    def layer(self, index: int) -> LayerAttend: ...


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in fp32, scaled in the module's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Block(nn.Module):
    """One decoder layer: attention and a gated MLP, each after a norm and with a residual.

    One matrix computes q, k and v, another one gate and up: fewer, larger products are faster on every device.
    sparse: whether the MLP is a mixture of experts.
    """

    def __init__(self, config: ModelConfig, sparse: bool = False) -> None:
        super().__init__()
        d, self.head_dim = config.hidden_size, config.head_dim
        self.q_size, self.kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query_multiplier, self.residual_multiplier = config.query_multiplier, config.residual_multiplier
        self.input_layernorm = RMSNorm(d, config.norm_eps)
        self.qkv_proj = nn.Linear(d, self.q_size + 2 * self.kv_size, bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.o_proj = nn.Linear(self.q_size, d, bias=config.output_bias)
        self.post_attention_layernorm = RMSNorm(d, config.norm_eps)
        self.sparse = sparse
        if sparse:
            self.router, self.experts = nn.Linear(d, config.experts, bias=False), Experts(config)
            return
        self.gate_up_proj = nn.Linear(d, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, d, bias=config.mlp_bias)

    def forward(self, x: Tensor, rope: Rope, attend: LayerAttend) -> Tensor:
        """Return the residual stream x [B, T, d] after this layer."""
        return self.add_to(x, self.input_layernorm(x), rope, attend)

    def add_to(self, x: Tensor, read: Tensor, rope: Rope, attend: LayerAttend) -> Tensor:
        """Add the attention of `read` [B, T, ...] to x [B, T, d], then the MLP of the sum; return the result.

        EAGLE-3's head reads token and state side by side, so `read` may be wider than d.
        """
        batch, length, _ = x.shape
        out = attend(*self.project(read, rope)).transpose(1, 2).reshape(batch, length, self.q_size)
        x = x + scaled(self.o_proj(stored(out)), self.residual_multiplier)
        return x + scaled(self.mlp(self.post_attention_layernorm(x)), self.residual_multiplier)

    def mlp(self, x: Tensor) -> Tensor:
        """Return the output [B, T, d] of the MLP, or of the mixture, for normed x [B, T, d]."""
        if self.sparse:
            return self.experts(x, self.router(x))
        gate, up = self.gate_up_proj(stored(x)).chunk(2, dim=-1)
        return self.down_proj(stored(F.silu(gate) * up))

    def project(self, read: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, Hq, T, D], keys and values [B, Hkv, T, D] of `read` [B, T, ...], as attention takes them.

        Queries and keys are normed if the model norms them, and turned by `rope`.
        """
        batch, length, _ = read.shape
        qkv = self.qkv_proj(stored(read)).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q, k, v = (part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in qkv)
        return scaled(rope.turn(self.q_norm(q)), self.query_multiplier), rope.turn(self.k_norm(k)), v


class Uninitialised(TorchFunctionMode):
    """Within this, modules leave their weights as they are: on the meta device PyTorch imports Dynamo to set them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the weight in place of what torch.nn.init would fill, and call all other functions."""
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


class Model(nn.Module):
    """The decoder: embedding, blocks, final norm, LM head.

    `run_block` runs one block; `compile_blocks` replaces it by compiled code. All blocks of a kind, with an MLP or with
    experts, share one compiled graph per shape, so compile time does not grow with the number of layers.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer in config.sparse) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        # Not a parameter or a buffer: `to(bfloat16)` would round it, but large positions need fp32.
        self.frequencies, self.rope_factor = rope_frequencies(config), rope_factor(config)
        self.run_block: Callable[[Block, Tensor, Rope, LayerAttend], Tensor] = Block.forward

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        change: Callable[[Model], None] = lambda model: None,
    ) -> Model:
        """Return a model for inference with uninitialised weights, for a loader to fill.

        change: a function that may replace layers, called before the weights get memory.
        """
        with torch.device("meta"), Uninitialised():
            model = cls(config).to(dtype)
            change(model)
        model = model.to_empty(device=device).requires_grad_(False).eval()
        model.tie()  # to_empty untied the LM head and the embedding
        model.frequencies = rope_frequencies(config).to(device)
        return model

    def tie(self) -> None:
        """Let a plain LM head use the embedding's weight if the config ties them."""
        if self.config.tied and isinstance(self.lm_head, nn.Linear):
            self.lm_head.weight = self.embed_tokens.weight

    def compile_blocks(self, compiler: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        """Run the blocks compiled by `compiler` from now on."""
        self.run_block = compiler(Block.forward)

    def rope(self, positions: Tensor) -> Rope:
        """Return the rotary factors for positions [B, T], in the model's dtype."""
        return Rope.at(positions, self.frequencies, self.norm.weight.dtype, self.rope_factor)

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int | str] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Return the normed hidden state [B, T, d] and the features [B, T, F], None without taps.

        tokens, positions [B, T] int64. Tap i reads the residual stream that ENTERS layer i, tap L the stream that
        leaves the last layer, and FINAL that stream after the norm. The features are what the taps read, joined in the
        order of `taps`. An `attend` with pages writes the new keys and values there.
        """
        return self.finish(self.run_blocks(self.embed(tokens), self.rope(positions), attend, taps), taps)

    def run_blocks(self, x: Tensor, rope: Rope, attend: Attend, taps: Sequence[int | str] = ()) -> Sequence[Tensor]:
        """Run all blocks on embeddings x [B, T, d]; return the streams that enter tapped layers, then the last output.

        The engine compiles the blocks, and the parts of `forward` before and after them, separately.
        """
        streams, unrotated = [], self.config.unrotated
        still = rope.still() if unrotated else rope
        for index, block in enumerate(cast(Iterable[Block], self.layers)):
            if index in taps:
                streams.append(x)
            x = self.run_block(block, x, still if index in unrotated else rope, attend.layer(index))
        return (*streams, x)

    def finish(self, streams: Sequence[Tensor], taps: Sequence[int | str] = ()) -> tuple[Tensor, Tensor | None]:
        """Return the results of `forward` from the streams that `run_blocks` returned."""
        layers = len(self.layers)
        hidden = self.norm(streams[-1])
        named: dict[int | str, Tensor] = {FINAL: hidden, layers: streams[-1]}
        named |= zip(sorted({tap for tap in taps if tap not in named}), streams, strict=False)
        return hidden, torch.cat([named[tap] for tap in taps], dim=-1) if taps else None

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of tokens [...] int64."""
        return scaled(self.embed_tokens(tokens), self.config.embedding_multiplier)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of normed hidden states [..., d]."""
        return scaled(self.lm_head(hidden), self.config.logits_multiplier)


def some(names: list[str], shown: int = 8) -> str:
    """Return the names; if they are many, the first few and how many there are in all."""
    more = f", ... ({len(names)} in all)" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
