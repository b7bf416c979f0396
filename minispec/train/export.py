"""A head before training and after it: made in fp32 to be trained, and written in the format that SGLang reads.

A draft head starts near the target: its LM head has the rows of the target's LM head for the most frequent tokens of
the replies (the draft vocabulary, FR-Spec, arXiv 2502.14856). It is written as a folder of config.json and
model.safetensors, with the tensor names of the published heads of its kind. Such a folder can be trained further: a
head that starts from one has its weights and its draft vocabulary in place of the above.

Read next: `load/heads.py`, which reads such folders; `trainer.py`, which trains the head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minispec.dflash import DFlashConfig, DFlashHead
from minispec.dspark import DSparkConfig, DSparkHead
from minispec.eagle import DraftHead, Eagle3Head, EagleHead, HeadConfig
from minispec.load.dflash_heads import read_dflash
from minispec.load.dspark_heads import read_dspark
from minispec.load.heads import (
    BEFORE,
    DFLASH_MODELS,
    DSPARK_MODELS,
    KINDS,
    PAIRS,
    Published,
    head_tensors,
    naming,
    read_head,
    slice_head,
)
from minispec.load.published import published_tensors
from minispec.load.weights import load_weights
from minispec.model import Model, ModelConfig, scaled
from minispec.model_config import ModelError
from minispec.mtp import MtpHead
from minispec.train.corpus import TrainingReply


@dataclass(frozen=True)
class Recipe:
    """How a head is trained; a checkpoint of another recipe is refused."""

    kind: str
    rounds: int  # S of the training-time test
    epochs: int  # how often each reply is learned from
    learning_rate: float
    batch_tokens: int  # reply tokens of one update
    draft_vocab: int
    seed: int
    variant: str = "3"  # of EAGLE-3: "3" or "3.1" (a norm per stream, and the normed state fed back)
    start: str | None = None  # folder of the exported head that training begins with; None: from scratch
    warm_up: int = 50  # updates in which the learning rate rises
    decay: float = 0.2  # share of the updates, at least, in which the learning rate falls at the end
    floor: float = 0.05  # the last learning rate as a share of the highest
    clip: float = 0.5  # largest norm of a gradient
    feature_weight: float = 0.0  # EAGLE-2: weight of the loss for imitating the target's next feature


@dataclass(frozen=True)
class BlockRecipe(Recipe):
    """How a DFlash or DSpark network is trained; `rounds` is the drafts of a block."""

    block_size: int = 8  # S
    layers: int = 2
    mask_token: int = 0  # the target's id that stands where a token is to be drafted
    weights: str = "decay"  # one of `blocks.WEIGHTS`
    markov_rank: int = 256  # R of a DSpark network


def spare_token(replies: Sequence[TrainingReply], vocab_size: int) -> int:
    """Return the highest id that stands in no prompt and no reply, to be a mask; the last id if there is none.

    Models whose embedding has more rows than their tokenizer has tokens have the spare rows at the end.
    """
    seen = {token for reply in replies for token in reply.ids}
    return next((i for i in reversed(range(vocab_size)) if i not in seen), vocab_size - 1)


def draft_vocabulary(replies: Sequence[TrainingReply], size: int, vocab_size: int) -> Tensor:
    """Return the `size` most frequent tokens of the replies, most frequent first, filled up with the lowest ids."""
    tokens = torch.tensor([token for reply in replies for token in reply.ids[reply.start :]], dtype=torch.int64)
    return tokens.bincount(minlength=vocab_size).argsort(descending=True, stable=True)[:size]


def read_start(recipe: Recipe, target: ModelConfig) -> Published | None:
    """Return the exported head that training begins with, None if it begins from scratch.

    target: the sizes of the model to draft for. Raises ModelError naming --start if the folder holds no head for it, or
    one of another kind or draft vocabulary than the recipe's.
    """
    if recipe.start is None:
        return None
    with naming("--start", folder := Path(recipe.start)):
        read = {DFlashHead.name: read_dflash, DSparkHead.name: read_dspark}.get(recipe.kind, read_head)
        start = read(folder, target)
        kind, ids = start.config.kind, start.config.token_map
        if kind != recipe.kind:
            raise ModelError(f"holds a head of the kind {kind}, and this run trains one of the kind {recipe.kind}")
        if ids is not None and len(ids) != recipe.draft_vocab:
            raise ModelError(f"its head drafts {len(ids)} tokens; got --draft-vocab {recipe.draft_vocab}")
    return start


def new_head(recipe: Recipe, model: Model, ids: Tensor, taps: tuple[int, ...], scale: Tensor) -> DraftHead:
    """Return a head to train, in fp32; ids: [Vd] its draft vocabulary, scale: the typical size of each stream it reads.

    Streams differ tenfold in size, and the largest would dominate the others. So the columns of `fc` for a stream start
    divided by its scale. The LM head starts as rows of the target's, and the norm before it as the target's. If the
    recipe starts from an exported head, `ids` must be that head's, if it has any; raises ModelError if it does not fit.
    """
    shape = replace(model.config.plain(), layers=1)
    device = model.embed_tokens.weight.device
    torch.manual_seed(recipe.seed)
    kind, newer = KINDS[recipe.kind], recipe.variant == "3.1"
    config = HeadConfig(recipe.kind, shape, token_map=ids, fc_bias=kind is EagleHead)
    if kind is Eagle3Head:
        config = replace(config, taps=taps, fc_norm=newer, norm_output=newer)
    if isinstance(recipe, BlockRecipe):
        shape = replace(shape, layers=recipe.layers, qk_norm=True, qkv_bias=False, output_bias=False, mlp_bias=False)
        config = DFlashConfig(recipe.kind, shape, taps, ids, block_size=recipe.block_size, mask_token=recipe.mask_token)
        if kind is DSparkHead:
            rank = recipe.markov_rank
            config = DSparkConfig(**vars(config), rank=rank, confidence=shape.hidden_size + rank)
    head = kind(config, model).float()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2 and not name.startswith("lm_head"):
                parameter.normal_(0.0, 0.02)
            elif name.endswith("bias"):
                parameter.zero_()
        if isinstance(head, DSparkHead):  # the Markov head starts with no say
            parameters = dict(head.named_parameters())
            parameters[BEFORE].normal_()
            parameters[PAIRS].zero_()
        assert head.lm_head is not None
        head.lm_head.weight.copy_(slice_head(model, ids).float())
        if isinstance(head, (Eagle3Head, DFlashHead)):
            head.norm.weight.copy_(scaled(model.norm.weight, model.config.logits_multiplier))
            if not newer and head.fc is not None:
                head.fc.weight.div_(scale.repeat_interleave(model.config.hidden_size).to(head.fc.weight.device))
        if not isinstance(head, Eagle3Head):
            head.lm_head.requires_grad_(False)  # when served, the head uses the target's own rows
    if start := read_start(recipe, model.config):
        with naming("--start", Path(str(recipe.start))):
            _fill(head, config, start)
    head.frequencies, head.token_map = head.frequencies.to(device), ids.to(device)
    return head.to(device)


@torch.no_grad()
def _fill(head: DraftHead, config: HeadConfig, start: Published) -> None:
    """Copy an exported head's weights into one of this config, in place; raises ModelError if it does not fit."""
    ours, theirs = _described(config), _described(start.config)
    if differing := [name for name in ours if ours[name] != theirs[name]]:
        name = differing[0]
        raise ModelError(f"its head has {name} {theirs[name]}, and this run trains one with {name} {ours[name]}")
    tensors, own = dict(start.tensors), head_tensors(head, start.layer_name)
    if not isinstance(head, Eagle3Head):
        tensors["lm_head.weight"] = own["lm_head.weight"]  # the target's rows, which are in no file
    if PAIRS in tensors:
        tensors[PAIRS] = tensors[PAIRS][config.token_map]
    load_weights(own, tensors.items())


def _described(config: HeadConfig) -> dict[str, Any]:
    """Return what makes a head apart from its draft vocabulary: much of it does not show in the tensors' shapes."""
    layer = published_config(replace(config.layer, layers=1, tied=False))
    own = {name: value for name, value in vars(config).items() if name not in ("layer", "token_map", "own_lm_head")}
    return own | layer


def export(head: DraftHead, model: Model, folder: Path) -> None:
    """Write a head in the format that SGLang reads: config.json and model.safetensors, bfloat16."""
    c = model.config
    config = published_config(replace(c, layers=1, tied=False))
    ours = published_tensors(head) if isinstance(head, DFlashHead) else head_tensors(head)
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in ours.items()}
    assert head.token_map is not None
    ids, outputs = head.token_map.cpu(), [int(tap) - 1 for tap in head.taps if isinstance(tap, int)]
    if isinstance(head, Eagle3Head):
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(ids),
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs},
        }
        if head.norm_output:
            config |= {"fc_norm": True, "norm_output": True}
    else:
        del tensors["lm_head.weight"]  # it is the target's
        if isinstance(head, DFlashHead):
            config |= {  # z-lab's keys, in which DFlash differs from a Llama of one layer
                "architectures": DFLASH_MODELS[:1],
                "model_type": "qwen3",
                "num_hidden_layers": len(head.layers),
                "num_target_layers": c.layers,
                "layer_types": ["full_attention"] * len(head.layers),
                "attention_bias": False,
                "dflash_config": {
                    "block_size": head.block_size, "mask_token_id": head.mask_token, "target_layer_ids": outputs,
                },
            }  # fmt: skip
            if isinstance(head, DSparkHead):  # DeepSeek's keys, all at the top level
                tensors[PAIRS] = torch.zeros(c.vocab_size, tensors[PAIRS].shape[1]).bfloat16().index_copy(
                    0, ids, tensors[PAIRS])  # fmt: skip
                config |= config.pop("dflash_config") | {
                    "architectures": DSPARK_MODELS[:1],
                    "markov_rank": tensors[PAIRS].shape[1],
                    "markov_head_type": "vanilla",
                    "enable_confidence_head": True,
                    "confidence_head_with_markov": True,
                }
        elif isinstance(head, MtpHead):
            tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
            config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
        else:
            config["architectures"] = ["LlamaForCausalLMEagle"]
    write_folder(folder, config, tensors)
    if isinstance(head, DFlashHead):
        save_file({"ids": ids.int()}, folder / "token_map.safetensors")


def published_config(c: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Llama of these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.context_length,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.rope_scaling is None else dict(c.rope_scaling),
        "tie_word_embeddings": c.tied,
        "torch_dtype": "bfloat16",
    }


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors into a folder, which is created if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
