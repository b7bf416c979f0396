"""EAGLE-2 and EAGLE-3 heads: one decoder layer that drafts from the target's hidden states.

A head starts from features: hidden states of the target, read at the layers that the head's taps name. At position i
the head joins the features of token i with the embedding of token i + 1, which the target has picked already. The
head's output at i is a state, from which it predicts token i + 2. To draft further, the head reads this state in place
of the features, and its own draft in place of the target's token.

`forward(embedding, state) -> state` is one round of drafting. A state has H numbers, the head's hidden size. A head
knows nothing of trees or pages, so the same module is trained and served. In the formulas emb is the token's embedding,
[x; y] joins vectors, f and g are states, and f' and g' the states of the next round. The first f is the features
themselves. The first g is made of three streams (low, mid, high), one from each tap.

    EAGLE-2   u = fc[emb; f]           a = u + attn(u)                  logits = target's LM head(a)   f' = a
    EAGLE-3   g = fc[low; mid; high]   a = g + attn[norm emb; norm g]   logits = own LM head(norm a)   g' = a
    In both, the MLP follows the attention: a = a + mlp(norm a).

Papers: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840), FR-Spec (2502.14856: token maps).
Read next: `mtp.py`, the third formula; `load/heads.py`, which reads published heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from minispec.model import FINAL, Block, LayerAttend, Model, RMSNorm, Rope, Uninitialised, rope_factor, rope_frequencies
from minispec.model_config import ModelConfig


@dataclass(frozen=True, eq=False)
class HeadConfig:
    """The formula, sizes and variants of a draft head."""

    kind: str  # which formula: the `name` of a subclass of DraftHead
    layer: ModelConfig  # the sizes of the head's one layer; `vocab_size` is the target's
    taps: tuple[int | str, ...] = (FINAL,)  # where the features are read, in this order; see `Model.forward`
    token_map: Tensor | None = None  # [Vd] int64, the target's id for each id of the head; None: the same ids
    own_embedding: bool = False  # whether the head has its own embedding; if not, it uses the target's
    # Whether a head without a token map has its own LM head; if not, it uses the target's. With a token map it always
    # has its own.
    own_lm_head: bool = False
    fc_bias: bool = False  # whether the head's linear layer `fc` has a bias
    # The fields below are for EAGLE-3 alone. A stream is what one tap reads.
    fc: bool = True  # whether `fuse` has a linear layer; False: the one stream is the first state
    fc_norm: bool = False  # whether each stream has a norm before `fc` (EAGLE-3.1)
    norm_before_fc: bool = False  # whether one norm over the joined streams comes before `fc`
    norm_before_residual: bool = False  # whether attention is added to the normed state; the weights do not show this
    norm_output: bool = False  # whether the next round reads the normed state (EAGLE-3.1)


class DraftHead(nn.Module):
    """The base of all heads; a subclass adds the one decoder layer and `forward`.

    Vd is the number of tokens that the head can draft: the token map's length, or without a map the target's
    vocabulary. `lm_head` and `embed_tokens` are None if the head uses the target's. The head then uses the target's
    matrix alone, without Granite's multipliers, so that a copy of the matrix in the head's own files drafts the same.
    """

    name: ClassVar[str]
    layer: Block

    def __init__(self, config: HeadConfig, target: Model) -> None:
        super().__init__()
        assert config.kind == self.name, f"a {config.kind} head is no {type(self).__name__}"
        shape, ids = config.layer, config.token_map
        self.taps, self.token_map = config.taps, ids
        self.hidden_size, self.kv_heads, self.head_dim = shape.hidden_size, shape.kv_heads, shape.head_dim
        self.positions = shape.context_length  # how many positions config.json states; the head drafts beyond them too
        # Neither `frequencies` nor `token_map` is a buffer: `to(bfloat16)` would round the frequencies, and `to_empty`
        # would lose the map.
        self.frequencies, self.rope_factor = rope_frequencies(shape), rope_factor(shape)
        self.draft_vocab = shape.vocab_size if ids is None else len(ids)
        own_lm_head = config.own_lm_head or ids is not None
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size) if config.own_embedding else None
        self.lm_head = nn.Linear(shape.hidden_size, self.draft_vocab, bias=False) if own_lm_head else None
        # Functions, not submodules, so that the target's weights are not loaded, trained or packed with the head's.
        self._target_embed = lambda tokens: target.embed_tokens(tokens)
        self._target_logits = lambda state: target.lm_head(state)

    @classmethod
    def empty(cls, config: HeadConfig, target: Model) -> Self:
        """Return a head for inference with uninitialised weights, in the target's dtype and on its device."""
        weight = target.norm.weight
        with torch.device("meta"), Uninitialised():
            head = cls(config, target)
        head = head.to(weight.dtype).to_empty(device=weight.device).requires_grad_(False).eval()
        head.frequencies = rope_frequencies(config.layer).to(weight.device)
        head.token_map = None if config.token_map is None else config.token_map.to(weight.device)
        return head

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [B, T, H] of tokens [B, T], which are ids of the target."""
        return self._target_embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the first state [B, T, H] from features [B, T, F]; later states are the output of `forward`."""
        return features

    def forward(self, embedding: Tensor, state: Tensor, rope: Rope, attend: LayerAttend, positions: Tensor) -> Tensor:
        """Return the next state [B, T, H] from embeddings and states, both [B, T, H], at positions [B, T] int64."""
        raise NotImplementedError

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits [..., Vd] of states [..., H] that `forward` returned."""
        return self._target_logits(state) if self.lm_head is None else self.lm_head(state)

    def rope(self, positions: Tensor) -> Rope:
        """Return the rotary factors for positions [B, T], in the head's dtype."""
        return Rope.at(positions, self.frequencies, self.layer.post_attention_layernorm.weight.dtype, self.rope_factor)


class EagleHead(DraftHead):
    """The head of EAGLE and EAGLE-2: its state imitates the target's last hidden state after the final norm.

    So the state needs no further norm, neither before the target's LM head nor before the layer's attention.
    """

    name = "eagle"

    def __init__(self, config: HeadConfig, target: Model) -> None:
        super().__init__(config, target)
        shape = config.layer
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=config.fc_bias)
        self.layer = Block(shape)
        self.layer.input_layernorm = nn.Identity()  # type: ignore[assignment]  # the block only calls it

    def forward(self, embedding: Tensor, state: Tensor, rope: Rope, attend: LayerAttend, positions: Tensor) -> Tensor:
        return self.layer(self.fc(torch.cat((embedding, state), dim=-1)), rope, attend)


class PairBlock(Block):
    """EAGLE-3's layer: attention reads normed embedding and state side by side; its output is added to the state."""

    def __init__(self, shape: ModelConfig, norm_before_residual: bool) -> None:
        super().__init__(shape)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.qkv_proj = nn.Linear(2 * shape.hidden_size, self.q_size + 2 * self.kv_size, bias=shape.qkv_bias)

    def forward(self, embedding: Tensor, state: Tensor, rope: Rope, attend: LayerAttend) -> Tensor:  # type: ignore[override]
        """Return the state [B, T, H] after this layer, from embedding and state, both [B, T, H]."""
        normed = self.hidden_norm(state)
        pair = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        return self.add_to(normed if self.norm_before_residual else state, pair, rope, attend)


class Eagle3Head(DraftHead):
    """The head of EAGLE-3: its states need not resemble the target's, so it usually has its own LM head."""

    name = "eagle3"

    def __init__(self, config: HeadConfig, target: Model) -> None:
        super().__init__(config, target)
        shape, stream = config.layer, target.config.hidden_size
        width = stream * len(config.taps)
        self.norm_output = config.norm_output
        self.fc_norm = nn.ModuleList(RMSNorm(stream, shape.norm_eps) for _ in config.taps) if config.fc_norm else None
        self.input_norm = RMSNorm(width, shape.norm_eps) if config.norm_before_fc else None
        self.fc = nn.Linear(width, shape.hidden_size, bias=config.fc_bias) if config.fc else None
        self.layer = PairBlock(shape, config.norm_before_residual)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the first state [B, T, H] from features [B, T, F], the streams joined in the order of `taps`."""
        if self.fc_norm is not None:
            streams = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, streams, strict=True)], dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        return features if self.fc is None else self.fc(features)

    def forward(self, embedding: Tensor, state: Tensor, rope: Rope, attend: LayerAttend, positions: Tensor) -> Tensor:
        """Return the next state [B, T, H], normed only if `norm_output` is set; see `DraftHead.forward`."""
        state = self.layer(embedding, state, rope, attend)
        return self.norm(state) if self.norm_output else state

    def logits(self, state: Tensor) -> Tensor:
        return super().logits(state if self.norm_output else self.norm(state))
