"""EAGLE-2 and EAGLE-3 heads: one decoder layer that drafts from what the target has already computed, and its files.

A small model of its own must read the text again; a head reads the target's mind. For position i it takes the target's
features there and the embedding of token i + 1, known by then, and its state predicts token i + 2. Fed with its own
state and its own token it goes on from there, as far as it is asked to.

The one idea: a head is a step, `forward(embedding, state) -> state`. What differs is where the first state comes from
(`fuse`), how token and state are joined, and which of the two LM heads reads the result (`logits`). Trees, pages and
positions are not known here, so the module that is served is the module that is trained.

    EAGLE-2   u = fc[emb; f]                a = u + attn(u)               logits = target's head(a)      f' = a
    EAGLE-3   g = fc[low; mid; high]        a = g + attn[norm emb; norm g] logits = own head(norm a)     g' = a
    (both)    a = a + mlp(norm a)

Papers: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840), FR-Spec (2502.14856).
Read next: `mtp.py`, a third head, and `load_head`, which tells the three apart.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.load.weights import ModelError, read_config, read_tensors
from minispec.model import (
    FINAL,
    Block,
    LayerAttend,
    Model,
    ModelConfig,
    RMSNorm,
    Rope,
    rope_frequencies,
)

logger = logging.getLogger("minispec")

NAMES_SHOWN = 8


# ---- what every head offers ---------------------------------------------------------------------------------------


class DraftHead(nn.Module):
    """What a drafter asks of a learned head; a subclass adds the layer and the step.

    taps: target layers whose input the features are, in this order, or (FINAL,). token_map: [Vd] int64, the target's
    id of each draft id; None: they are the same. Vd is `token_map`'s length, else V. `lm_head` and `embed_tokens` are
    None where the target's serve.
    """

    name: ClassVar[str]
    architectures: ClassVar[frozenset[str]]  # what config.json may call this kind of head
    layer: Block

    def __init__(
        self,
        shape: ModelConfig,
        target: Model,
        taps: tuple[int | str, ...],
        *,
        token_map: Tensor | None = None,
        own_embedding: bool = False,
        own_head: bool = False,
    ) -> None:
        super().__init__()
        self.taps = taps
        self.hidden_size, self.kv_heads, self.head_dim = shape.hidden_size, shape.kv_heads, shape.head_dim
        self.positions = shape.context_length  # as its files state; it runs on beyond them
        # Neither parameters nor buffers: `to(bfloat16)` must not round the one, `to_empty` not lose the other.
        self.frequencies = rope_frequencies(shape)
        self.token_map = token_map
        self.draft_vocab = shape.vocab_size if token_map is None else len(token_map)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size) if own_embedding else None
        self.lm_head = nn.Linear(shape.hidden_size, self.draft_vocab, bias=False) if own_head else None
        # Bound methods and no submodules: the target's weights are not this module's to load, to train or to pack.
        self._target_embed, self._target_logits = target.embed_tokens.forward, target.logits

    @classmethod
    def empty(
        cls, shape: ModelConfig, target: Model, *, dtype: torch.dtype, device: torch.device, **switches: Any
    ) -> Self:
        """Return a head for inference with uninitialised weights, for a loader to fill."""
        with torch.device("meta"):
            head = cls(shape, target, **switches)
        head = head.to(dtype).to_empty(device=device).requires_grad_(False).eval()
        head.frequencies = rope_frequencies(shape).to(device)
        head.token_map = None if head.token_map is None else head.token_map.to(device)
        return head

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [B, T, H] of target ids tokens [B, T]."""
        return self._target_embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the first state [B, T, H] of target features [B, T, F]; a drafted state is never fused again."""
        return features

    def forward(
        self, embedding: Tensor, state: Tensor, rope: Rope, attend: LayerAttend, positions: Tensor
    ) -> Tensor:
        """Return the next state [B, T, H] of token embeddings and states [B, T, H] at positions [B, T] int64."""
        raise NotImplementedError

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits [..., Vd] of states [..., H] that `forward` returned."""
        return self._target_logits(state) if self.lm_head is None else self.lm_head(state)

    def rope(self, positions: Tensor) -> Rope:
        """Return the rotary factors for positions [B, T], in the head's dtype."""
        angle = positions[:, None, :, None].float() * self.frequencies
        angle = torch.cat((angle, angle), dim=-1)
        dtype = self.layer.post_attention_layernorm.weight.dtype
        return Rope(angle.cos().to(dtype), angle.sin().to(dtype))


# ---- EAGLE-2 ------------------------------------------------------------------------------------------------------


class EagleHead(DraftHead):
    """The head of EAGLE and EAGLE-2: its state imitates the target's normed last hidden state.

    So the target's LM head reads it without a norm in between, and the layer has no norm in front of its attention.
    """

    name = "eagle"
    architectures = frozenset({"LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "EagleLlamaForCausalLM"})

    def __init__(
        self,
        shape: ModelConfig,
        target: Model,
        *,
        fc_bias: bool = True,
        token_map: Tensor | None = None,
        own_embedding: bool = False,
    ) -> None:
        super().__init__(
            shape,
            target,
            (FINAL,),
            token_map=token_map,
            own_embedding=own_embedding,
            own_head=token_map is not None,
        )
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=fc_bias)
        self.layer = Block(shape)
        self.layer.input_layernorm = nn.Identity()

    def forward(
        self, embedding: Tensor, state: Tensor, rope: Rope, attend: LayerAttend, positions: Tensor
    ) -> Tensor:
        """Return the next state [B, T, H]; see `DraftHead.forward`."""
        return self.layer(self.fc(torch.cat((embedding, state), dim=-1)), rope, attend)

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
        """Return the head of a published file; raises ModelError."""
        shape = checkpoint.shape(checkpoint.config, "layers.0.")
        checkpoint.check_single("num_hidden_layers", checkpoint.config)
        checkpoint.check_fit(shape.hidden_size, shape.vocab_size, target)
        tensors = checkpoint.tensors
        if tensors.pop("lm_head.weight", None) is not None:
            logger.info("%s: its lm_head.weight is not used, EAGLE-2 drafts with the target's", checkpoint.folder)
        if token_map is not None:
            tensors["lm_head.weight"] = slice_head(target, token_map, head_weight)
        head = cls.empty(
            shape,
            target,
            dtype=dtype,
            device=device,
            # Whatever "bias" in the config says: published configs and files contradict each other.
            fc_bias="fc.bias" in tensors,
            token_map=token_map,
            own_embedding=checkpoint.ships_embedding(target),
        )
        head.taps = checkpoint.last_state(target)
        checkpoint.fill(head, lambda name: spelled(name, "layers.0."))
        return head


# ---- EAGLE-3 ------------------------------------------------------------------------------------------------------


class PairBlock(Block):
    """EAGLE-3's layer: attention reads token and state side by side, each behind its norm; the residual is the state.

    norm_before_residual: the residual is the normed state instead, a variant that the weights do not show.
    """

    def __init__(self, shape: ModelConfig, norm_before_residual: bool) -> None:
        super().__init__(shape)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.qkv_proj = nn.Linear(2 * shape.hidden_size, self.q_size + 2 * self.kv_size, bias=shape.qkv_bias)

    def forward(self, embedding: Tensor, state: Tensor, rope: Rope, attend: LayerAttend) -> Tensor:  # type: ignore[override]
        """Return the state [B, T, H] after this layer, from token embedding and state [B, T, H]."""
        batch, length, _ = state.shape
        normed = self.hidden_norm(state)
        pair = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        qkv = self.qkv_proj(pair).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q, k, v = (part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in qkv)
        out = attend(rope.turn(self.q_norm(q)), rope.turn(self.k_norm(k)), v)
        x = normed if self.norm_before_residual else state
        x = x + self.o_proj(out.transpose(1, 2).reshape(batch, length, self.q_size))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class Eagle3Head(DraftHead):
    """EAGLE-3: starts from three raw residual streams and is bound to no feature of the target; has its own LM head.

    Switches: fc_norm normalises each stream before `fc` and norm_output feeds the normed state back (both EAGLE-3.1);
    norm_before_fc is one norm over all streams together; fc=False takes the single stream as it is.
    """

    name = "eagle3"
    architectures = frozenset(
        {
            "LlamaForCausalLMEagle3",
            "Qwen2ForCausalLMEagle3",
            "Qwen3ForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3Speculator",
            "Eagle3DraftModel",
        }
    )

    def __init__(
        self,
        shape: ModelConfig,
        target: Model,
        *,
        taps: tuple[int | str, ...],
        token_map: Tensor | None = None,
        own_embedding: bool = False,
        own_head: bool = True,
        fc: bool = True,
        fc_bias: bool = False,
        fc_norm: bool = False,
        norm_before_fc: bool = False,
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__(
            shape, target, taps, token_map=token_map, own_embedding=own_embedding, own_head=own_head
        )
        stream = target.config.hidden_size
        width = stream * len(taps)
        self.norm_output = norm_output
        self.fc_norm = nn.ModuleList(RMSNorm(stream, shape.norm_eps) for _ in taps) if fc_norm else None
        self.input_norm = RMSNorm(width, shape.norm_eps) if norm_before_fc else None
        self.fc = nn.Linear(width, shape.hidden_size, bias=fc_bias) if fc else None
        self.layer = PairBlock(shape, norm_before_residual)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the first state [B, T, H] of the residual streams [B, T, F], joined in the order of `taps`."""
        if self.fc_norm is not None:
            streams = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, streams, strict=True)], dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        return features if self.fc is None else self.fc(features)

    def forward(
        self, embedding: Tensor, state: Tensor, rope: Rope, attend: LayerAttend, positions: Tensor
    ) -> Tensor:
        """Return the next state [B, T, H], not yet normed unless `norm_output`; see `DraftHead.forward`."""
        state = self.layer(embedding, state, rope, attend)
        return self.norm(state) if self.norm_output else state

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits [..., Vd] of states [..., H] that `forward` returned."""
        return super().logits(state if self.norm_output else self.norm(state))

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
        """Return the head of an official, SGLang, SpecForge or speculators file; raises ModelError."""
        if token_map is not None:
            logger.warning("--speculative-token-map is ignored: an EAGLE-3 head has a draft vocabulary of its own")
        checkpoint.tensors.pop("t2d", None)  # d2t seen from the other side
        config, tensors = _layer_config(checkpoint), checkpoint.tensors
        block = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
        shape = checkpoint.shape(config, block)
        checkpoint.check_single("num_hidden_layers", config)
        stream = checkpoint.config.get("target_hidden_size") or shape.hidden_size
        checkpoint.check_fit(stream, shape.vocab_size, target)
        taps = _taps(checkpoint, target)
        switches = _switches(checkpoint) | {
            "own_embedding": checkpoint.ships_embedding(target) or stream != shape.hidden_size,
            "own_head": _owns_head(checkpoint, config, target),
            "token_map": _draft_ids(checkpoint, shape.vocab_size),
            "fc": taps not in ((FINAL,), (target.config.layers,)),
        }
        head = cls.empty(shape, target, taps=taps, dtype=dtype, device=device, **switches)
        checkpoint.fill(head, lambda name: spelled(name, block))
        logger.info("EAGLE-3 head reads the target's residual stream entering layers %s", taps)
        return head


def _layer_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the config of the head's layer: speculators nest it, in either spelling of rope."""
    nested = checkpoint.config.get("transformer_layer_config")
    if nested is None:
        return checkpoint.config
    rope = {**(nested.get("rope_scaling") or {}), **(nested.get("rope_parameters") or {})}
    theta = rope.pop("rope_theta", None) or nested.get("rope_theta")
    return {**nested, "rope_theta": theta, "rope_scaling": rope or None}


def _taps(checkpoint: Checkpoint, target: Model) -> tuple[int | str, ...]:
    """Return the layers of the target whose input the head was trained on.

    Files count in two ways. `eagle_config.eagle_aux_hidden_state_layer_ids` (SGLang, SpecForge) names layers by their
    OUTPUT, which enters the next one. The same key at the top level (speculators, vLLM) names them by their INPUT.
    """
    nested = checkpoint.config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        return checkpoint.last_state(target)
    layers = target.config.layers
    entering = checkpoint.config.get("eagle_aux_hidden_state_layer_ids")
    leaving = nested.get("eagle_aux_hidden_state_layer_ids")
    readings = [tuple(entering)] if entering else []
    readings += [tuple(i + 1 for i in leaving)] if leaving else []
    if len(set(readings)) > 1:
        checkpoint.fail(
            f"eagle_aux_hidden_state_layer_ids are {entering} (layer inputs) and, in eagle_config, {leaving} "
            "(layer outputs), which are not the same streams; remove one of them"
        )
    taps = readings[0] if readings else (2, layers // 2, layers - 3)
    if not all(0 <= tap < layers for tap in taps):
        origin = "eagle_aux_hidden_state_layer_ids ask" if readings else "the default of 2, L // 2, L - 3 asks"
        checkpoint.fail(f"{origin} for the input of layers {taps}; the target has 0 to {layers - 1}")
    return taps


def _switches(checkpoint: Checkpoint) -> dict[str, bool]:
    """Return the variant of the forward pass: what tensors show, from the tensors; the rest from the config."""
    config, tensors = checkpoint.config, checkpoint.tensors
    before = config.get("norm_before_residual")
    if before is None and "speculators_model_type" in config:
        # Its readers differ in what a missing key means, and the wrong one costs nearly all acceptance.
        checkpoint.fail("config.json lacks norm_before_residual (true or false), which speculators heads must state")
    fc_norm = bool(config.get("fc_norm")) or any(name.startswith("fc_norm.") for name in tensors)
    output = bool(config.get("norm_output"))
    if output and not fc_norm:
        # The key once meant the norm in front of the LM head, which every EAGLE-3 head has.
        logger.info("%s: norm_output is ignored, since there are no fc_norm tensors beside it", checkpoint.folder)
    return {
        "fc_bias": "fc.bias" in tensors,
        "fc_norm": fc_norm,
        "norm_before_fc": bool(config.get("norm_before_fc")) or "input_norm.weight" in tensors,
        "norm_before_residual": bool(before),
        "norm_output": output and fc_norm,
    }


def _owns_head(checkpoint: Checkpoint, config: Mapping[str, Any], target: Model) -> bool:
    """Return whether the LM head is the file's; without one, `tie_word_embeddings` and no draft vocabulary decide."""
    tensors, draft_vocab = checkpoint.tensors, checkpoint.config.get("draft_vocab_size")
    tied = bool(config.get("tie_word_embeddings"))
    if "lm_head.weight" in tensors or (draft_vocab is not None and not tied):
        return True
    if draft_vocab not in (None, target.config.vocab_size):
        checkpoint.fail(
            f"tie_word_embeddings makes the LM head the embedding of {target.config.vocab_size} tokens, "
            f"but draft_vocab_size is {draft_vocab}, and the file has no lm_head.weight"
        )
    if tied and "embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        return True
    if tied and not target.config.tied:
        tensors["lm_head.weight"] = target.embed_tokens.weight
        return True
    if config["hidden_size"] != target.config.hidden_size:
        checkpoint.fail("lm_head.weight is missing, and the target's reads another hidden size")
    return False


def _draft_ids(checkpoint: Checkpoint, vocab_size: int) -> Tensor | None:
    """Return the target's id of every draft id [D] int64; None where there is but one vocabulary.

    The file's d2t holds offsets, target id minus draft id; from here on there are only ids.
    """
    draft_vocab = checkpoint.config.get("draft_vocab_size") or vocab_size
    offsets = checkpoint.tensors.pop("d2t", None)
    if offsets is None:
        if draft_vocab != vocab_size:
            checkpoint.fail(f"missing tensors: d2t, for a draft vocabulary of {draft_vocab} of {vocab_size} tokens")
        return None
    if list(offsets.shape) != [draft_vocab]:
        key = "draft_vocab_size" if checkpoint.config.get("draft_vocab_size") else "vocab_size, for want of another,"
        checkpoint.fail(f"d2t has the shape {list(offsets.shape)}, but {key} is {draft_vocab}")
    ids = torch.arange(draft_vocab) + offsets.long()
    if problem := map_problem(ids, vocab_size):
        checkpoint.fail(f"d2t, draft id plus offset, {problem}")
    return None if draft_vocab == vocab_size and not offsets.any() else ids


# ---- the target's LM head, sliced ---------------------------------------------------------------------------------


def slice_head(target: Model, token_map: Tensor, head_weight: Tensor | None) -> Tensor:
    """Return the rows [Vd, d] of the target's LM head that draft the ids of token_map [Vd] int64 (FR-Spec).

    head_weight: the LM head's matrix [V, d], needed where the target's own is packed and not tied. Raises ModelError
    for a map with ids that do not exist or come twice.
    """
    if problem := map_problem(token_map, target.config.vocab_size):
        raise ModelError(f"--speculative-token-map {problem}")
    if head_weight is None and target.config.tied:
        head_weight = target.embed_tokens.weight
    if head_weight is None:
        assert isinstance(target.lm_head, nn.Linear), "a packed LM head cannot be sliced; pass head_weight"
        head_weight = target.lm_head.weight
    return head_weight[token_map.to(head_weight.device)]


def map_problem(ids: Tensor, vocab_size: int) -> str | None:
    """Return what is wrong with a map from draft ids to target ids; siblings in a tree must be distinct tokens."""
    if ids.dim() != 1 or not len(ids):
        return f"must be a list of token ids, got the shape {list(ids.shape)}"
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        return f"has ids from {low} to {high}; the target's vocabulary has 0 to {vocab_size - 1}"
    repeated = len(ids) - len(ids.unique())
    return f"names {repeated} token ids more than once" if repeated else None


# ---- reading a draft folder ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A draft folder as read: config.json and the tensors by name, without the `model.` some writers put in front.

    Loaders take out of `tensors` what is no weight of the head, and put in what the target contributes.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a folder; raises ModelError."""
        try:
            checkpoint, tensors = cls(folder, read_config(folder), {}), list(read_tensors(folder))
        except ModelError as error:
            raise ModelError(f"--speculative-draft-model-path {folder}: {error}") from error
        for source, tensor in tensors:
            name = source.removeprefix("model.")
            if name in checkpoint.tensors:
                checkpoint.fail(f"holds {name} twice, with and without model. in front")
            if not name.endswith("rotary_emb.inv_freq"):
                checkpoint.tensors[name] = tensor
        return checkpoint

    def fail(self, problem: str) -> NoReturn:
        """Raise ModelError that names the flag and the folder."""
        raise ModelError(f"--speculative-draft-model-path {self.folder}: {problem}")

    def shape(self, config: Mapping[str, Any], block: str) -> ModelConfig:
        """Return the sizes of the head's layer; whether it has biases and q, k norms is seen from the tensors.

        block: how the names of the layer's tensors begin. Raises ModelError.
        """
        needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        if missing := [key for key in needed if config.get(key) is None]:
            self.fail(f"config.json lacks {', '.join(missing)}")
        try:
            stated = {"num_hidden_layers": 1, **config, "architectures": ["LlamaForCausalLM"]}
            positions = config.get("max_position_embeddings") or sys.maxsize
            shape = ModelConfig.from_hf({**stated, "max_position_embeddings": positions})
        except ValueError as error:
            self.fail(str(error))
        if shape.sliding_window is not None:
            self.fail(f"sliding_window {shape.sliding_window} of the head is not supported; supported: none")

        def has(*parts: str) -> bool:
            return any(f"{block}{part}" in self.tensors for part in parts)

        return replace(
            shape,
            layers=1,
            qkv_bias=has("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
            output_bias=has("self_attn.o_proj.bias"),
            mlp_bias=has("mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"),
            qk_norm=has("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        )

    def check_fit(self, hidden_size: int, vocab_size: int, target: Model) -> None:
        """Raise ModelError unless the head was made for a target of these sizes."""
        ours = target.config
        for key, made_for, has in (
            ("hidden_size", hidden_size, ours.hidden_size),
            ("vocab_size", vocab_size, ours.vocab_size),
        ):
            if made_for != has:
                self.fail(f"the head is made for a target of {key} {made_for}, and the target has {has}")

    def check_single(self, key: str, config: Mapping[str, Any]) -> None:
        """Raise ModelError unless the number of layers that `key` states, if it does, is one."""
        if (layers := config.get(key, 1)) != 1:
            self.fail(f"{key} is {layers}; supported: 1")

    def last_state(self, target: Model) -> tuple[int | str]:
        """Return the tap of a head that reads the last hidden state: behind the final norm, unless config.json says so.

        It says so as it would name any stream: by the layer L that it would enter, the first there is not.
        """
        layers = target.config.layers
        return (layers,) if self.config.get("eagle_aux_hidden_state_layer_ids") == [layers] else (FINAL,)

    def ships_embedding(self, target: Model) -> bool:
        """Return whether the file has an embedding of its own; a copy of the target's is dropped from `tensors`."""
        given, shared = self.tensors.get("embed_tokens.weight"), target.embed_tokens.weight
        if given is None:
            return False
        if given.shape == shared.shape and torch.equal(given.to(shared), shared):
            del self.tensors["embed_tokens.weight"]
            return False
        logger.info("%s: the head uses its own embed_tokens.weight, which differs from the target's", self.folder)
        return True

    def fill(self, head: DraftHead, spell: Callable[[str], str]) -> None:
        """Copy `tensors` into the head; raises ModelError naming all that is missing, unknown or misshapen.

        spell: the file's name of a tensor that `published_tensors` names.
        """
        given, wanted = self.tensors, {spell(name): tensor for name, tensor in published_tensors(head).items()}
        problems = {
            "missing tensors": sorted(wanted.keys() - given.keys()),
            "unknown tensors": sorted(given.keys() - wanted.keys()),
            "wrong shapes": [
                f"{name} {list(given[name].shape)} for {list(tensor.shape)}"
                for name, tensor in wanted.items()
                if name in given and given[name].shape != tensor.shape
            ],
        }
        if found := [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]:
            self.fail("; ".join(found))
        for name, tensor in wanted.items():
            tensor.copy_(given[name])


def spelled(name: str, block: str) -> str:
    """Return a tensor's name in a file whose layer's names begin with `block`."""
    return block + name.removeprefix("layer.") if name.startswith("layer.") else name


def published_tensors(head: DraftHead) -> dict[str, Tensor]:
    """Return the head's weights under the names that files use, the layer's as `layer.self_attn.q_proj.weight`.

    They are views, fused matrices taken apart: writing to them fills the head. Only for a head that is not packed.
    """
    published: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        owner, _, rest = name.partition(".")
        if owner == "layer":
            published |= {f"layer.{part}": view for part, view in unfused(head.layer, rest, tensor)}
        else:
            published[name] = tensor
    return published


def unfused(block: Block, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return a block's tensor under its published names, a fused matrix as views of its parts.

    name: within the block, as `qkv_proj.weight`.
    """
    part, _, kind = name.partition(".")
    names = _PUBLISHED.get(part)
    if names is None:
        return [(name, tensor)]
    q, kv = block.q_size, block.kv_size
    rows = (q, kv, kv) if len(names) == 3 else [len(tensor) // len(names)] * len(names)
    return [(f"{one}.{kind}", view) for one, view in zip(names, tensor.split(rows), strict=True)]


_PUBLISHED = {  # our matrices -> the published ones that they join
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}


def _some(names: list[str]) -> str:
    """Return the first few names and how many there are in all."""
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, ... ({len(names)} in all)"
