"""DSpark checkpoints: a DFlash network's files (`dflash_heads.py`) with two heads more.

    markov_head.markov_w1.weight    [V, R], by the target's id of the token before
    markov_head.markov_w2.weight    [Vd, R], by the draft's id of the next token
    confidence_head.proj.weight     [1, d + R], or [1, d] if it reads states alone; it may be missing
    confidence_head.proj.bias       [1]; it may be missing

Keys of config.json are in `dflash_config` or at the top level, and the tensors' shapes tell most of what they say:

    markov_head_type     vanilla; gated and rnn are heads of more tensors, which are refused
    sample_from_anchor   whether the bonus's row drafts. Without the key it does, but not in speculators' files
    block_size           the rows of the block, so as many drafts if the bonus's row drafts, else one less

DeepSeek's folders (`Qwen3DSparkModel`) have all keys at the top level, with copies of the target's embedding and LM
head. SpecForge's (`DSparkDraftModel`) have a `dflash_config`. speculators' have its nested body.

Read next: `dspark.py` for the network.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from minispec.dflash import DFlashConfig
from minispec.dspark import DSparkConfig, DSparkHead
from minispec.load import heads
from minispec.load.architectures import named_architectures
from minispec.load.dflash_heads import read_block
from minispec.load.fp8_weights import read_weights
from minispec.load.keys import Keys
from minispec.load.weights import read_config
from minispec.model import ModelConfig
from minispec.model_config import ModelError

BLOCK_SIZE = 7  # where config.json states none, as SGLang has it
# Keys of DSpark alone. Those of the second line say how the network was trained.
KEYS = frozenset("""
    markov_head_type markov_rank enable_confidence_head confidence_head_with_markov sample_from_anchor
    num_anchors max_anchors confidence_head_alpha ce_loss_alpha l1_loss_alpha loss_decay_gamma
    """.split())  # fmt: skip
FIXED = {"projector_type": "dspark", "attention_mode": "gqa"}  # keys of SpecForge's whose other values are refused
CONFIDENCE = "confidence_head.proj.weight"


def read_dspark(folder: Path, target: ModelConfig, load_format: str = "auto") -> heads.Published:
    """Return what a folder describes and holds, for a target of these sizes; for `heads.load_head`.

    Raises ModelError if the folder holds no DSpark network, one for another target, or a variant; its message does not
    name the flag.
    """
    whole = read_config(folder)
    architectures = named_architectures(whole)
    if len(architectures) != 1 or architectures[0] not in heads.DSPARK_MODELS:
        raise ModelError(f"architectures {architectures} are not supported; supported: "
                         f"{', '.join(heads.DSPARK_MODELS)}")  # fmt: skip
    nested = Keys(whole).within("dflash_config").stated
    key = Keys({**whole, **nested})
    if (kind := key.text("markov_head_type", "vanilla")) != "vanilla":
        raise ModelError(f"markov_head_type {kind} is not supported; supported: vanilla")
    exported = "transformer_layer_config" in whole or "aux_hidden_state_layer_ids" in whole  # by speculators
    from_anchor = key.flag("sample_from_anchor", not exported)
    tensors = dict(read_weights(folder, load_format))
    markov, confidence = tensors.get(heads.BEFORE), tensors.get(CONFIDENCE)
    if markov is None or markov.dim() != 2:
        raise ModelError(f"missing tensors: {heads.BEFORE}, a matrix")
    if confidence is not None:
        tensors.setdefault("confidence_head.proj.bias", torch.zeros(1))
    body = {**whole, "block_size": key.whole("block_size", 1, default=None) or BLOCK_SIZE}
    if nested:
        body["dflash_config"] = _without_own(nested)
    found = read_block(folder, _without_own(body), tensors, target, lowest=-1)
    common: dict[str, Any] = {field.name: getattr(found.config, field.name) for field in fields(DFlashConfig)}
    return found._replace(
        config=DSparkConfig(
            **{**common, "kind": DSparkHead.name},
            rank=key.whole("markov_rank", default=None) or markov.shape[1],
            from_anchor=from_anchor,
            confidence=0 if confidence is None else confidence.shape[-1],
        )
    )


def _without_own(stated: heads.Stated) -> dict[str, Any]:
    """Return a config without DSpark's keys; raises ModelError for a value that stands for another network."""
    for name, value in FIXED.items():
        if stated.get(name, value) != value:
            raise ModelError(f"{name} {stated[name]!r} is not supported; supported: {value}")
    return {name: value for name, value in stated.items() if name not in KEYS and name not in FIXED}
