"""Draft heads as they are published: a folder is read into a `HeadConfig` and tensors, and these into a module.

There is no common format for heads. Each borrows a Llama's config.json, adds keys that its publisher needed, and does
not state what the publisher's own loader knows: which layers of the target it reads, whether it shares the target's
embedding. Published configs may contradict the tensors beside them. So whatever the tensors show is taken from them,
and only the rest from the config.

    format                  the layer's names   what else tells it
    EAGLE, EAGLE-2          layers.0.           fc.weight [H, 2H], and no norm but one
    EAGLE-3, SGLang's, 3.1  midlayer.           d2t: offsets from draft ids to the target's; fc_norm.*: 3.1
    speculators             layers.0.           the layer's config nested in transformer_layer_config; d2t
    MiMo's MTP              mtp_layers.0.       lies among the target's own tensors, or in a folder of its own

A head that is read wrongly drafts nonsense, but since no output changes, nobody notices. So every tensor must have its
place and its shape, and a key must be there if publishers disagree on what it means to leave it out.

Read next: `eagle.py` and `mtp.py` for the heads, `selftest.py` for whether a head is accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from minispec.dflash import DFlashHead
from minispec.dspark import DSparkHead
from minispec.eagle import DraftHead, Eagle3Head, EagleHead, HeadConfig
from minispec.load.architectures import LONGEST, named_architectures, one_rope, read_model_config
from minispec.load.fp8_weights import read_weights
from minispec.load.keys import Keys, naming
from minispec.load.published import published_tensors
from minispec.load.token_map import map_problem
from minispec.load.weights import load_weights, read_config
from minispec.model import FINAL, Model, ModelConfig
from minispec.model_config import ModelError
from minispec.mtp import MtpHead

logger = logging.getLogger("minispec")

KINDS: dict[str, type[DraftHead]] = {kind.name: kind for kind in (
    EagleHead, Eagle3Head, MtpHead, DFlashHead, DSparkHead)}  # fmt: skip
# Why a token map is of no use to a head: what it has of its own.
OWN = {Eagle3Head.name: "an EAGLE-3 head has a draft vocabulary", DFlashHead.name: "the DFlash network has an LM head",
       DSparkHead.name: "the DSpark network has an LM head"}  # fmt: skip
ARCHITECTURES = {  # what config.json may call a head of each kind; the first EAGLE heads say LlamaForCausalLM
    EagleHead.name: ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "EagleLlamaForCausalLM"),
    Eagle3Head.name: (
        "LlamaForCausalLMEagle3",
        "Qwen2ForCausalLMEagle3",
        "Qwen3ForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3Speculator",
        "Eagle3DraftModel",
    ),
    MtpHead.name: ("MiMoForCausalLM", "MiMoMTP", "MiMoMTPModel"),
}
# What config.json calls a network that `dflash_heads.py` reads, z-lab's and speculators'.
DFLASH_MODELS = ("DFlashDraftModel", "DFlashSpeculator")  # z-lab's and speculators'
DSPARK_MODELS = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")  # those that `dspark_heads.py` reads
# How the names of a layer's tensors begin; first the spelling that SGLang reads.
LAYER_NAMES = {EagleHead.name: ("layers.0.",), Eagle3Head.name: ("midlayer.", "layers.0."),
               MtpHead.name: ("mtp_layers.0.",)}  # fmt: skip

# The Markov head of a DSpark network: a row for each token of the target, and one for each row of its LM head.
BEFORE, PAIRS = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
TAPS = "eagle_aux_hidden_state_layer_ids"
Stated = Mapping[str, Any]  # a config.json as `read_config` returns it
Tensors = dict[str, Tensor]  # by the file's names, without `model.` in front


class Published(NamedTuple):
    """What a draft folder holds: the head that it describes, and the head's weights by their names in the files."""

    config: HeadConfig
    tensors: Tensors
    layer_name: str  # how the names of the layer's tensors begin


# ---- a head for a target ------------------------------------------------------------------------------------------


def load_head(
    folder: Path, target: Model, *, token_map: Tensor | None = None, load_format: str = "auto",
    read: Callable[[Path, ModelConfig, str], Published] | None = None,
) -> DraftHead:  # fmt: skip
    """Return the draft head in `folder` for inference, in the target's dtype and on its device.

    token_map: [Vd] int64 target ids that a head without a vocabulary of its own drafts from (FR-Spec). load_format: as
    for `read_weights`. read: `read_dflash` or `read_dspark` for a block drafter, by default `read_head`. To be called
    before the target's LM head is packed. For a target on the meta device the head is there too and has its sizes
    alone. Raises ModelError naming --speculative-draft-model-path if the folder holds no head, is not complete, or
    holds a head for another target or of a variant that is not supported.
    """
    with naming("--speculative-draft-model-path", folder):
        config, tensors, layer_name = (read or read_head)(folder, target.config, load_format)
        config = shared(config, tensors, target)
        if token_map is not None and (config.own_lm_head or config.kind == Eagle3Head.name):
            logger.warning("--speculative-token-map is ignored: %s of its own", OWN[config.kind])
        elif token_map is not None:
            tensors["lm_head.weight"] = slice_head(target, token_map)
            if (pairs := tensors.get(PAIRS)) is not None:
                tensors[PAIRS] = pairs[token_map]
            config = replace(config, token_map=token_map)
        head = KINDS[config.kind].empty(config, target)
        load_weights(head_tensors(head, layer_name), tensors.items())
    if config.kind == Eagle3Head.name:
        logger.info("EAGLE-3 head reads the target's residual stream entering layers %s", config.taps)
    if isinstance(head, DFlashHead):
        logger.info("%s reads the target's residual stream entering layers %s, in blocks of %d", config.kind, head.taps,
                    head.block_size)  # fmt: skip
    return head


def shared(config: HeadConfig, tensors: Tensors, target: Model) -> HeadConfig:
    """Return the config that says which weights the head shares with the target, and change `tensors` accordingly.

    A copy of the target's embedding is dropped, and one of its LM head beside a DSpark network. An EAGLE-3 LM head that
    is tied to an embedding is not in the files: it is added to `tensors`, unless the target's own LM head is tied to
    the same embedding.
    """
    ours, given = target.embed_tokens.weight, tensors.get("embed_tokens.weight")
    if _is_copy(given, ours):
        del tensors["embed_tokens.weight"]
        given, config = None, replace(config, own_embedding=False)
    whole = config.kind == DSparkHead.name and config.token_map is None
    if whole and _is_copy(tensors.get("lm_head.weight"), cast(nn.Linear, target.lm_head).weight):
        del tensors["lm_head.weight"]
        config = replace(config, own_lm_head=False)
    if given is not None:
        logger.info("the draft head uses its own embed_tokens.weight, which differs from the target's")
    tied = config.kind == Eagle3Head.name and config.layer.tied and not config.own_lm_head
    if tied and (given is not None or not target.config.tied):
        tensors["lm_head.weight"] = ours if given is None else given
        config = replace(config, own_lm_head=True)
    return config


def _is_copy(given: Tensor | None, ours: Tensor) -> bool:
    """Return whether a matrix is the target's; where that has sizes alone, one of its shape is taken for a copy."""
    same = given is not None and given.shape == ours.shape
    return same and (ours.is_meta or torch.equal(cast(Tensor, given).to(ours), ours))


def slice_head(target: Model, token_map: Tensor) -> Tensor:
    """Return the rows [Vd, d] of the target's LM head for the ids of a token map [Vd] int64."""
    assert isinstance(target.lm_head, nn.Linear), "the LM head is sliced before it is packed"
    weight = target.lm_head.weight
    return weight[token_map.to(weight.device)]


def head_tensors(head: DraftHead, layer_name: str | None = None) -> Tensors:
    """Return a head's weights by the names that a file gives them, as views, so that writing into them fills the head.

    layer_name: how the names of the layer's tensors begin; None: as SGLang reads them.
    """
    layer_name = layer_name or LAYER_NAMES[head.name][0]
    # MiMo gives the tensors around the layer the same beginning as those of the layer.
    around = layer_name if isinstance(head, MtpHead) else ""

    def spelled(name: str) -> str:
        if name.startswith("layer."):
            return layer_name + name.removeprefix("layer.")
        return name if name == "lm_head.weight" else around + name

    return {spelled(name): tensor for name, tensor in published_tensors(head).items()}


# ---- reading a folder ---------------------------------------------------------------------------------------------


def read_head(folder: Path, target: ModelConfig, load_format: str = "auto") -> Published:
    """Return what a draft folder describes and holds, for a target of these sizes; no weight of the target is read.

    Of a whole model's folder only the MTP layers are read. Raises ValueError; its message does not name the flag.
    """
    stated = read_config(folder)
    if isinstance(nested := stated.get("model"), dict) and "hidden_size" not in stated and "hidden_size" in nested:
        raise ModelError("config.json has the head's sizes within model, as vLLM's converter writes them, which is "
                         "not supported; they must be at the top level or in transformer_layer_config")  # fmt: skip
    whole = "MiMoForCausalLM" in named_architectures(stated)
    wanted: Callable[[str], bool] = lambda name: not whole or name.startswith("mtp_layers.")  # noqa: E731
    tensors = dict(read_weights(folder, load_format, wanted=wanted))
    kind = _kind(stated, tensors)
    names = LAYER_NAMES[kind]
    layer_name = next((begin for begin in names if any(name.startswith(begin) for name in tensors)), names[-1])
    read = _read_eagle3 if kind == Eagle3Head.name else partial(_read_last, kind)
    return Published(read(stated, tensors, target, layer_name), tensors, layer_name)


def _kind(stated: Stated, tensors: Tensors) -> str:
    """Return the kind of head a folder holds: the tensors decide, and `architectures` must not contradict them."""
    architectures = named_architectures(stated)
    for algorithm, names in (("DFLASH", DFLASH_MODELS), ("DSPARK", DSPARK_MODELS)):
        if set(names).intersection(architectures):
            raise ModelError(f"{architectures[0]} is no head of one layer; give --speculative-algorithm {algorithm}")
    if (speculators := stated.get("speculators_model_type", Eagle3Head.name)) != Eagle3Head.name:
        raise ModelError(f"speculators_model_type {speculators!r} is not supported; supported: {Eagle3Head.name}")
    said = next((kind for kind, names in ARCHITECTURES.items() if set(names) & set(architectures)), None)
    signs = {  # the first that is there tells
        MtpHead.name: any(name.startswith("mtp_layers.") for name in tensors),
        Eagle3Head.name: any(name.startswith("midlayer.") or "hidden_norm" in name or name in ("d2t", "t2d")
                             for name in tensors),
        EagleHead.name: "fc.weight" in tensors,
    }  # fmt: skip
    found = next((kind for kind, is_there in signs.items() if is_there), None)
    if said and found and said != found:
        raise ModelError(f"architectures {architectures} say {said}, the tensors are those of {found}")
    if kind := found or said:
        return kind
    raise ModelError(
        f"holds no draft head that is supported ({', '.join(ARCHITECTURES)}): architectures {architectures}, "
        f"tensors {', '.join(sorted(tensors)[:4])}, ..."
    )


def _read_last(kind: str, stated: Stated, tensors: Tensors, target: ModelConfig, layer_name: str) -> HeadConfig:
    """Return the config of a head that reads the last state: EAGLE's, EAGLE-2's or MiMo's.

    An EAGLE head's LM head is taken out of `tensors`. What "bias" in its config says does not count: published configs
    and files contradict each other.
    """
    eagle = kind == EagleHead.name
    layer = layer_sizes(stated, tensors, layer_name)
    _check_single(tensors, layer_name)
    check_fit(layer.hidden_size, layer.vocab_size, target)
    if eagle and tensors.pop("lm_head.weight", None) is not None:
        logger.info("the draft head's own lm_head.weight is not used: EAGLE-2 drafts with the target's")
    return HeadConfig(
        kind,
        layer,
        _last_state(stated, target),
        own_embedding=eagle and "embed_tokens.weight" in tensors,
        fc_bias=eagle and "fc.bias" in tensors,
    )


def _read_eagle3(stated: Stated, tensors: Tensors, target: ModelConfig, layer_name: str) -> HeadConfig:
    """Return the config of an official, SGLang, SpecForge or speculators head; d2t and t2d leave `tensors`."""
    nested = layer_config(stated)
    layer = layer_sizes(nested, tensors, layer_name)
    _check_single(tensors, layer_name)
    stream = Keys(stated).whole("target_hidden_size", default=None) or layer.hidden_size
    check_fit(stream, layer.vocab_size, target)
    taps = _taps(stated, target)
    return HeadConfig(
        Eagle3Head.name,
        layer,
        taps,
        own_embedding="embed_tokens.weight" in tensors or stream != layer.hidden_size,
        own_lm_head=_owns_lm_head(stated, tensors, layer, target),
        token_map=draft_ids(stated, tensors, layer.vocab_size),
        fc=taps not in ((FINAL,), (target.layers,)) or "fc.weight" in tensors,
        **_switches(stated, tensors),
    )


# ---- what config.json and the tensors say -------------------------------------------------------------------------


def layer_sizes(stated: Stated, tensors: Tensors, layer_name: str) -> ModelConfig:
    """Return the sizes of the head's layer; the tensors tell whether it has biases and norms on q and k."""
    # How many layers there are the tensors say: published configs state the target's number.
    like_llama = {**stated, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    positions = Keys(stated).whole("max_position_embeddings", 1, LONGEST, None) or LONGEST
    shape = read_model_config({**like_llama, "max_position_embeddings": positions})
    if Keys(stated).flag("use_sliding_window") and (window := stated.get("sliding_window")) is not None:
        raise ModelError(f"sliding_window {window} of the head is not supported; supported: none")

    def has(*parts: str) -> bool:
        return any(f"{layer_name}{part}" in tensors for part in parts)

    return replace(
        shape,
        layers=1,
        qkv_bias=has("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        output_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    )


def layer_config(stated: Stated) -> Stated:
    """Return the config of the head's layer, which speculators nest, with rope in either spelling."""
    if stated.get("transformer_layer_config") is None:
        return stated
    return one_rope(Keys(stated).within("transformer_layer_config").stated)


def _check_single(tensors: Tensors, layer_name: str) -> None:
    """Raise ModelError unless the tensors have one layer, whatever config.json says of their number."""
    kind = layer_name.partition(".")[0]
    layers = {name.split(".")[1] for name in tensors if name.startswith(f"{kind}.") and kind != "midlayer"}
    if len(layers) > 1:
        raise ModelError(f"the tensors have {len(layers)} layers, {kind}.{' and '.join(sorted(layers))}, and such "
                         "a head needs keys and values for each of its layers, and another layer for each round; "
                         "supported: 1")  # fmt: skip


def check_fit(hidden_size: int, vocab_size: int, target: ModelConfig) -> None:
    """Raise ModelError unless the head was made for a target of these sizes."""
    for key, made_for, has in (
        ("hidden_size", hidden_size, target.hidden_size),
        ("vocab_size", vocab_size, target.vocab_size),
    ):
        if made_for != has:
            raise ModelError(f"the head is made for a target of {key} {made_for}, and the target has {has}")


def _last_state(stated: Stated, target: ModelConfig) -> tuple[int | str]:
    """Return the tap of a head that reads the last hidden state: after the final norm, unless config.json says before.

    It says so by the number L, as every stream is named by the layer that it enters: layer L would come after the last.
    """
    return (target.layers,) if stated.get(TAPS) == [target.layers] else (FINAL,)


def _taps(stated: Stated, target: ModelConfig) -> tuple[int | str, ...]:
    """Return the layers of the target whose input an EAGLE-3 head was trained on.

    Files count in two ways. `eagle_config.eagle_aux_hidden_state_layer_ids` (SGLang, SpecForge) names layers whose
    OUTPUT is read, which enters the next one. The same key at the top level (speculators, vLLM) names layers whose
    INPUT is read.
    """
    top, nested = Keys(stated), Keys(stated).within("eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        return _last_state(stated, target)
    entering, leaving = top.wholes(TAPS), nested.wholes(TAPS, -1)  # the output of layer -1 is the embedding
    readings = [tuple(entering)] if entering else []
    readings += [tuple(i + 1 for i in leaving)] if leaving else []
    if len(set(readings)) > 1:
        raise ModelError(
            f"{TAPS} are {entering} (layer inputs) and, in eagle_config, {leaving} "
            "(layer outputs), which are not the same streams; remove one of them"
        )
    layers = target.layers
    taps = readings[0] if readings else (2, layers // 2, layers - 3)
    # Tap L is the output of the last layer, before the final norm.
    if not all(0 <= tap <= layers for tap in taps):
        origin = f"{TAPS} ask" if readings else "the default of 2, L // 2, L - 3 asks"
        raise ModelError(f"{origin} for the input of layers {taps}; the target has 0 to {layers - 1}, and {layers} is "
                         "the output of the last")  # fmt: skip
    return taps


def _switches(stated: Stated, tensors: Tensors) -> dict[str, bool]:
    """Return the variant of an EAGLE-3 head: what tensors show, from the tensors; the rest from the config."""
    key, speculators = Keys(stated), "speculators_model_type" in stated
    if speculators and stated.get("norm_before_residual") is None:
        # Other loaders differ in what a missing key means, and the wrong reading costs nearly all acceptance.
        raise ModelError("config.json lacks norm_before_residual (true or false), which speculators heads must state")
    fc_norm = key.flag("fc_norm") or any(name.startswith("fc_norm.") for name in tensors)
    output = key.flag("norm_output")
    if output and not (fc_norm or speculators):
        # In SpecForge's files the key once meant the norm in front of the LM head, which every EAGLE-3 head has.
        logger.info("the draft head's norm_output is ignored, since there are no fc_norm tensors beside it")
    return {
        "fc_bias": "fc.bias" in tensors,
        "fc_norm": fc_norm,
        "norm_before_fc": key.flag("norm_before_fc") or "input_norm.weight" in tensors,
        "norm_before_residual": key.flag("norm_before_residual"),
        "norm_output": output and (fc_norm or speculators),
    }


def _owns_lm_head(stated: Stated, tensors: Tensors, layer: ModelConfig, target: ModelConfig) -> bool:
    """Return whether the LM head must be in the files; else it is tied to the embedding, or the target's is used."""
    draft_vocab = _draft_vocab(stated, target.vocab_size)
    if "lm_head.weight" in tensors or (draft_vocab != target.vocab_size and not layer.tied):
        return True
    if draft_vocab != target.vocab_size:
        raise ModelError(
            f"tie_word_embeddings makes the LM head the embedding of {target.vocab_size} tokens, "
            f"but draft_vocab_size is {draft_vocab}, and the file has no lm_head.weight"
        )
    if not layer.tied and layer.hidden_size != target.hidden_size:
        raise ModelError("lm_head.weight is missing, and the target's reads another hidden size")
    return False


def _draft_vocab(stated: Stated, vocab_size: int) -> int:
    """Return how many tokens a head drafts; vLLM's key for it is truncated_vocab_size."""
    return Keys(stated).whole("draft_vocab_size", 1, vocab_size, None, "truncated_vocab_size") or vocab_size


def draft_ids(stated: Stated, tensors: Tensors, vocab_size: int) -> Tensor | None:
    """Return the target's id of every draft id [Vd] int64; None if draft and target have the same ids.

    The file's d2t holds offsets, target id minus draft id. It is taken out of `tensors`, and all other code sees ids.
    """
    draft_vocab = _draft_vocab(stated, vocab_size)
    drafted, offsets = tensors.pop("t2d", None), tensors.pop("d2t", None)
    if offsets is None:
        if draft_vocab != vocab_size:
            raise ModelError(f"missing tensors: d2t, for a draft vocabulary of {draft_vocab} of {vocab_size} tokens")
        return None
    if list(offsets.shape) != [draft_vocab]:
        key = "draft_vocab_size" if stated.get("draft_vocab_size") else "vocab_size, for want of another,"
        raise ModelError(f"d2t has the shape {list(offsets.shape)}, but {key} is {draft_vocab}")
    ids = torch.arange(draft_vocab) + offsets.long()
    if problem := map_problem(ids, vocab_size):
        raise ModelError(f"d2t, draft id plus offset: {problem}")
    # Beside it t2d marks the target ids that are drafted. Exporters were seen to write a wrong d2t, by which nearly
    # every draft is another token than the head means.
    if drafted is not None and set(drafted.unique().tolist()) <= {0, 1}:
        marked = drafted.flatten().nonzero().flatten()
        if strange := sorted(set(ids.tolist()) ^ set(marked.tolist())):
            raise ModelError(f"d2t contradicts the t2d beside it: draft id plus offset gives {ids.numel()} target ids, "
                             f"t2d marks {marked.numel()}, and {len(strange)} are in one of them alone, "
                             f"{strange[0]} the first; d2t must hold target id minus draft id")  # fmt: skip
    return None if draft_vocab == vocab_size and not offsets.any() else ids
