"""MiMo's MTP head: a layer that was trained together with its target.

Multi-token prediction (MTP) gives a model one more layer, which predicts one token further than the model does. MiMo's
model files contain this layer, so no draft folder is needed.

The layer is a draft head like EAGLE's, with an ordinary decoder block. Three things differ from EAGLE's heads: in the
joined input the state stands BEFORE the token's embedding, each of the two has its own norm, and the next round reads
the state after the final norm. In the terms of `eagle.py`:

    x = input_proj[norm f; norm emb]     a = block(x)     f' = norm a     logits = target's LM head(f')

MiMo is published for one round of drafting. In further rounds the layer reads the f' that it returned.

Papers: MiMo (arXiv 2505.07608); multi-token prediction, Gloeckle et al. (arXiv 2404.19737).
Read next: `eagle.py` for heads in general, `beam.py` for the trees that they grow.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minispec.eagle import DraftHead, HeadConfig
from minispec.model import Block, LayerAttend, Model, RMSNorm, Rope


class MtpHead(DraftHead):
    """MiMo's layer."""

    name = "mtp"

    def __init__(self, config: HeadConfig, target: Model) -> None:
        super().__init__(config, target)
        size, eps = config.layer.hidden_size, config.layer.norm_eps
        self.token_layernorm = RMSNorm(size, eps)
        self.hidden_layernorm = RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = Block(config.layer)
        self.final_layernorm = RMSNorm(size, eps)

    def forward(self, embedding: Tensor, state: Tensor, rope: Rope, attend: LayerAttend, positions: Tensor) -> Tensor:
        """Return the next state [B, T, H], after the final norm; see `DraftHead.forward`."""
        # Zeros replace the embedding at position 0, as in SGLang and vLLM.
        embedding = embedding.masked_fill((positions == 0)[..., None], 0)
        pair = torch.cat((self.hidden_layernorm(state), self.token_layernorm(embedding)), dim=-1)
        return self.final_layernorm(self.layer(self.input_proj(pair), rope, attend))
