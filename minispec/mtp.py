"""MiMo's MTP head, a layer that was trained together with its target; and `load_head`, which reads any draft folder.

Multi-token prediction gives a model one more layer that predicts one token further. MiMo publishes it inside the
model's own files, so drafting with it needs no draft folder at all.

The one idea: it is a head like EAGLE's, an ordinary block behind another way of joining token and state. The hidden
state comes FIRST, each half has its own norm, and the norm at the end belongs to the state that is fed back:

    x = input_proj[norm f; norm emb]     a = block(x)     f' = norm a     logits = target's head(f')

The published use is one step; further steps re-apply the layer to its own state.

Papers: MiMo (arXiv 2505.07608); multi-token prediction, Gloeckle et al. (arXiv 2404.19737).
Read next: `eagle.py` for what a head is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from minispec.eagle import Checkpoint, DraftHead, Eagle3Head, EagleHead, slice_head
from minispec.model import FINAL, Block, LayerAttend, Model, ModelConfig, RMSNorm, Rope

_PREFIX = "mtp_layers.0."


class MtpHead(DraftHead):
    """MiMo's layer: hidden state first, an ordinary pre-norm block, and a final norm inside the step."""

    name = "mtp"
    architectures = frozenset({"MiMoForCausalLM", "MiMoMTP", "MiMoMTPModel"})

    def __init__(self, shape: ModelConfig, target: Model, *, token_map: Tensor | None = None) -> None:
        super().__init__(shape, target, (FINAL,), token_map=token_map, own_head=token_map is not None)
        d, eps = shape.hidden_size, shape.norm_eps
        self.token_layernorm = RMSNorm(d, eps)
        self.hidden_layernorm = RMSNorm(d, eps)
        self.input_proj = nn.Linear(2 * d, d, bias=False)
        self.layer = Block(shape)
        self.final_layernorm = RMSNorm(d, eps)

    def forward(
        self, embedding: Tensor, state: Tensor, rope: Rope, attend: LayerAttend, positions: Tensor
    ) -> Tensor:
        """Return the next state [B, T, H], normed; see `DraftHead.forward`."""
        # As SGLang and vLLM serve it, and so as its acceptance is known: no token at position 0.
        embedding = embedding.masked_fill((positions == 0)[..., None], 0)
        pair = torch.cat((self.hidden_layernorm(state), self.token_layernorm(embedding)), dim=-1)
        return self.final_layernorm(self.layer(self.input_proj(pair), rope, attend))

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        target: Model,
        *,
        token_map: Tensor | None,
        head_weight: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Return the layer out of a whole model's files or out of a folder of its own; raises ModelError."""
        tensors = checkpoint.tensors
        if any(name.startswith("layers.") for name in tensors):  # a whole model: the rest of it is not ours
            for name in [name for name in tensors if not name.startswith("mtp_layers.")]:
                del tensors[name]
        checkpoint.check_single("num_nextn_predict_layers", checkpoint.config)
        shape = checkpoint.shape(checkpoint.config, _PREFIX)
        checkpoint.check_fit(shape.hidden_size, shape.vocab_size, target)
        if token_map is not None:
            tensors["lm_head.weight"] = slice_head(target, token_map, head_weight)
        head = cls.empty(shape, target, dtype=dtype, device=device, token_map=token_map)
        head.taps = checkpoint.last_state(target)
        checkpoint.fill(head, _spelled)
        return head


def _spelled(name: str) -> str:
    """Return the file's name of a tensor; the layer and what surrounds it stand side by side there."""
    return name if name == "lm_head.weight" else _PREFIX + name.removeprefix("layer.")


# ---- any head -----------------------------------------------------------------------------------------------------


def load_head(
    folder: Path,
    target: Model,
    *,
    token_map: Tensor | None = None,
    head_weight: Tensor | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftHead:
    """Return the draft head that lies in `folder`, for inference with `target`; which kind it is, its tensors tell.

    token_map: [Vd] int64 target ids that a head without a vocabulary of its own drafts from (FR-Spec). head_weight: the
    target's LM head [V, d], needed to slice one that is packed. Raises ModelError naming --speculative-draft-model-path
    for a folder that is no head, not whole, not this target's, or of a variant without a formula here.
    """
    checkpoint = Checkpoint.read(folder)
    kind = _kind(checkpoint)
    return kind.load(
        checkpoint, target, token_map=token_map, head_weight=head_weight, dtype=dtype, device=device
    )


def _kind(checkpoint: Checkpoint) -> type[EagleHead | Eagle3Head | MtpHead]:
    """Return the kind of head a folder holds: the tensors decide, and `architectures` must not contradict them.

    It cannot decide: the first EAGLE heads were published as plain LlamaForCausalLM.
    """
    names, config = checkpoint.tensors.keys(), checkpoint.config
    if (speculators := config.get("speculators_model_type", Eagle3Head.name)) != Eagle3Head.name:
        checkpoint.fail(f"speculators_model_type {speculators!r} is not supported; supported: {Eagle3Head.name}")
    architectures = config.get("architectures") or []
    stated = next((kind for kind in (EagleHead, Eagle3Head, MtpHead) if kind.architectures & set(architectures)), None)
    found = None
    if any(name.startswith("mtp_layers.") for name in names):
        found = MtpHead
    elif any(name.startswith("midlayer.") or "hidden_norm" in name or name in ("d2t", "t2d") for name in names):
        found = Eagle3Head
    elif "fc.weight" in names:
        found = EagleHead
    if stated and found and stated is not found:
        checkpoint.fail(f"architectures {architectures} say {stated.name}, the tensors are those of {found.name}")
    if kind := found or stated:
        return kind
    checkpoint.fail(
        f"holds no draft head that is supported (eagle, eagle3, mtp): architectures {architectures}, "
        f"tensors {', '.join(sorted(names)[:4])}, ..."
    )
