"""Draft heads against formulas: every published format is written as its publisher writes it, loaded, and drafts.

The reference below uses no module of the package: it takes one sequence in float64, loops over attention heads, and
reads tensors under their published names. Then each thing that a checkpoint states is taken away or changed, to see
the comparison fail or the loader say what is wrong.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_weights import reads
from torch import Tensor, nn

from minispec import LLM
from minispec.attention import Causal
from minispec.cpu.linear import PackedLinear, can_pack, pack_linears
from minispec.eagle import DraftHead, HeadConfig
from minispec.load.architectures import read_model_config
from minispec.load.heads import ARCHITECTURES, head_tensors, load_head
from minispec.load.heads import KINDS as HEAD_KINDS
from minispec.load.published import published_tensors
from minispec.load.tokenizer import byte_tokenizer
from minispec.model import FINAL, Model
from minispec.model_config import ModelError

V, D, H, INNER, LAYERS = 61, 17, 32, 40, 9
TOKENS, STEPS = 11, 3
Tensors = dict[str, Tensor]


# ---- the reference: formulas alone --------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def linear(w: Tensors, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def rotate(x: Tensor, theta: float, factor: float) -> Tensor:
    """Turn x [T, D], row t by t: component i of the first half is a complex number with i of the second."""
    half = x.shape[1] // 2
    turned = torch.empty_like(x)
    for t in range(x.shape[0]):
        for i in range(half):
            angle = t / factor * theta ** (-i / half)
            c, s = math.cos(angle), math.sin(angle)
            turned[t, i] = x[t, i] * c - x[t, half + i] * s
            turned[t, half + i] = x[t, half + i] * c + x[t, i] * s
    return turned


def attention(w: Tensors, facts: dict[str, Any], x: Tensor) -> Tensor:
    """Causal attention of x [T, width], head by head."""
    heads, kv_heads, size = facts["heads"], facts["kv_heads"], facts["head_dim"]
    length = x.shape[0]
    q, k, v = (linear(w, f"{name}_proj", x) for name in "qkv")

    def cut(y: Tensor, h: int, norm: str) -> Tensor:
        part = y[:, h * size : (h + 1) * size]
        part = rms(part, w[f"{norm}.weight"], facts["eps"]) if f"{norm}.weight" in w else part
        return rotate(part, facts["theta"], facts.get("factor", 1.0))

    outs = []
    for h in range(heads):
        g = h // (heads // kv_heads)
        scores = cut(q, h, "q_norm") @ cut(k, g, "k_norm").T / math.sqrt(size)
        scores[torch.ones(length, length).triu(1).bool()] = -math.inf
        outs.append(torch.softmax(scores, -1) @ v[:, g * size : (g + 1) * size])
    return linear(w, "o_proj", torch.cat(outs, -1))


def mlp(w: Tensors, x: Tensor) -> Tensor:
    gate = linear(w, "gate_proj", x)
    return linear(w, "down_proj", gate / (1 + torch.exp(-gate)) * linear(w, "up_proj", x))


def tail(w: Tensors, facts: dict[str, Any], a: Tensor) -> Tensor:
    return a + mlp(w, rms(a, w["post_attention_layernorm.weight"], facts["eps"]))


def step_eagle(w: Tensors, facts: dict[str, Any], e: Tensor, f: Tensor) -> Tensor:
    u = linear(w, "fc", torch.cat([e, f], -1))
    return tail(w, facts, u + attention(w, facts, u))


def step_eagle3(w: Tensors, facts: dict[str, Any], e: Tensor, g: Tensor) -> Tensor:
    eps = facts["eps"]
    normed = rms(g, w["hidden_norm.weight"], eps)
    z = torch.cat([rms(e, w["input_layernorm.weight"], eps), normed], -1)
    a = tail(w, facts, (normed if facts.get("before") else g) + attention(w, facts, z))
    return rms(a, w["norm.weight"], eps) if facts.get("norm_output") else a


def step_mtp(w: Tensors, facts: dict[str, Any], e: Tensor, h: Tensor) -> Tensor:
    eps = facts["eps"]
    e = e.clone()
    e[0] = 0
    pair = [rms(h, w["hidden_layernorm.weight"], eps), rms(e, w["token_layernorm.weight"], eps)]
    x = linear(w, "input_proj", torch.cat(pair, -1))
    a = tail(w, facts, x + attention(w, facts, rms(x, w["input_layernorm.weight"], eps)))
    return rms(a, w["final_layernorm.weight"], eps)


def first_state(w: Tensors, facts: dict[str, Any], features: Tensor) -> Tensor:
    if "fc_norm.0.weight" in w:
        width = w["fc_norm.0.weight"].shape[0]
        parts = [features[:, i * width : (i + 1) * width] for i in range(features.shape[1] // width)]
        features = torch.cat([rms(x, w[f"fc_norm.{i}.weight"], facts["eps"]) for i, x in enumerate(parts)], -1)
    if "input_norm.weight" in w:
        features = rms(features, w["input_norm.weight"], facts["eps"])
    return linear(w, "fc", features) if facts["kind"] == "eagle3" and "fc.weight" in w else features


STEP = {"eagle": step_eagle, "eagle3": step_eagle3, "mtp": step_mtp}


@dataclass
class Drafted:
    """What came of drafting: logits of all rows at each step, the last state, the drafted target ids."""

    logits: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def reference(w: Tensors, facts: dict[str, Any], target: Tensors, features: Tensor, tokens: Tensor) -> Drafted:
    """Draft STEPS tokens after features [T, F], the state at i being paired with tokens[i], the text's i + 1."""
    w = {name: tensor.double() for name, tensor in w.items()}
    target = {name: tensor.double() for name, tensor in target.items()}
    embedding = w.get("embed_tokens.weight", target["embed"])
    kind = facts["kind"]
    state, result = first_state(w, facts, features.double()), Drafted()
    for _ in range(STEPS):
        out = STEP[kind](w, facts, embedding[tokens], state)
        read = out
        if kind == "eagle3" and not facts.get("norm_output"):
            read = rms(out, w["norm.weight"], facts["eps"])
        own = w.get("lm_head.weight") if kind == "eagle3" else None
        logits = read @ (target["head"] if own is None else own).T
        choice = int(logits[-1].argmax())
        token = choice + int(w["d2t"][choice]) if "d2t" in w else choice
        result.logits.append(logits)
        result.tokens.append(token)
        state = torch.cat([state, out[-1:]])
        tokens = torch.cat([tokens, torch.tensor([token])])
    return result


def draft(head: DraftHead, features: Tensor, tokens: Tensor) -> Drafted:
    """Do the same with the head under test: cacheless causal attention over the growing sequence."""
    features, tokens, result = features[None], tokens[None], Drafted()
    state = head.fuse(features)
    for _ in range(STEPS):
        positions = torch.arange(tokens.shape[1])[None]
        out = head(head.embed(tokens), state, head.rope(positions), Causal(), positions)
        logits = head.logits(out)
        choice = logits[0, -1].argmax()
        token = choice if head.token_map is None else head.token_map[choice]
        result.logits.append(logits[0])
        result.tokens.append(int(token))
        state = torch.cat([state, out[:, -1:]], 1)
        tokens = torch.cat([tokens, token.view(1, 1)], 1)
    return result


def distance(one: Drafted, other: Drafted) -> float:
    """The largest difference of any logit; infinite where different tokens were drafted."""
    assert len(one.logits) == len(other.logits) == STEPS
    if one.tokens != other.tokens:
        return math.inf
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one.logits, other.logits, strict=True))


# ---- checkpoints as they are published ----------------------------------------------------------------------------


@dataclass
class Format:
    """A checkpoint to write, and what the reference must know of it."""

    config: dict[str, Any]
    tensors: Tensors
    facts: dict[str, Any]
    taps: tuple[int | str, ...]
    file: str = "model.safetensors"


def made(seed: int) -> Callable[..., Tensor]:
    """A maker of random tensors: matrices that keep the scale, norms and biases far from neutral."""
    generator = torch.Generator().manual_seed(seed)

    def make(*size: int) -> Tensor:
        noise = torch.randn(*size, generator=generator)
        return 0.8 * noise / math.sqrt(size[1]) if len(size) > 1 else 1 + 0.4 * noise

    return make


def layer(make: Callable[..., Tensor], width: int, kv_heads: int, size: int, prefix: str) -> Tensors:
    """The tensors all heads' layers have; q and k are large, so that attention chooses."""
    return {
        f"{prefix}self_attn.q_proj.weight": 2 * make(4 * size, width),
        f"{prefix}self_attn.k_proj.weight": 2 * make(kv_heads * size, width),
        f"{prefix}self_attn.v_proj.weight": make(kv_heads * size, width),
        f"{prefix}self_attn.o_proj.weight": make(H, 4 * size),
        f"{prefix}mlp.gate_proj.weight": make(INNER, H),
        f"{prefix}mlp.up_proj.weight": make(INNER, H),
        f"{prefix}mlp.down_proj.weight": make(H, INNER),
        f"{prefix}post_attention_layernorm.weight": make(H),
    }


def qkv_biases(make: Callable[..., Tensor], kv_heads: int, size: int, prefix: str) -> Tensors:
    rows = {"q": 4 * size, "k": kv_heads * size, "v": kv_heads * size}
    return {f"{prefix}self_attn.{name}_proj.bias": make(count) for name, count in rows.items()}


def llama(architecture: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": "llama", "hidden_size": H, "intermediate_size": INNER,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": V,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 2048, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "float16", **more,
    }  # fmt: skip


def facts(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "heads": 4, "kv_heads": 4, "head_dim": 8, "eps": 1e-5, "theta": 10000.0, **more}


def eagle_original(target: Model) -> Format:
    """yuhuili/EAGLE-*: a plain Llama config without rope_theta, a pickle, fp32, the frozen embedding, fc.bias."""
    make = made(1)
    tensors = {
        "embed_tokens.weight": target.embed_tokens.weight.detach().clone(),
        "fc.weight": make(H, 2 * H),
        "fc.bias": make(H),
        **layer(make, H, 4, 8, "layers.0."),
        "layers.0.self_attn.rotary_emb.inv_freq": make(4),  # older transformers saved it
    }
    return Format(llama("LlamaForCausalLM"), tensors, facts("eagle"), (FINAL,), "pytorch_model.bin")


def eagle_sglang(target: Model) -> Format:
    """lmsys/sglang-EAGLE-LLaMA3-*: an architecture of its own, grouped heads, `bias` false, no embedding."""
    make = made(2)
    tensors = {"fc.weight": make(H, 2 * H), **layer(make, H, 2, 8, "layers.0.")}
    config = llama("LlamaForCausalLMEagle", num_key_value_heads=2, rope_theta=500000.0, bias=False)
    return Format(config, tensors, facts("eagle", kv_heads=2, theta=500000.0), (FINAL,), "pytorch_model.bin")


def eagle_qwen2(target: Model) -> Format:
    """Heads for Qwen2: biases on q, k, v; the config denies the fc.bias that the trainer wrote; head_dim explicit."""
    make = made(3)
    tensors = {
        "fc.weight": make(H, 2 * H),
        "fc.bias": make(H),
        **layer(make, H, 2, 12, "layers.0."),
        **qkv_biases(make, 2, 12, "layers.0."),
    }
    config = llama("Qwen2ForCausalLMEagle", num_key_value_heads=2, head_dim=12, qkv_bias=True, bias=False)
    return Format(config, tensors, facts("eagle", kv_heads=2, head_dim=12), (FINAL,))


def draft_vocabulary(seed: int) -> Tensors:
    """d2t and t2d as trainers make them; ids low enough that reading d2t as ids gives ids as well."""
    ids = torch.randperm(V - D, generator=torch.Generator().manual_seed(seed))[:D].sort().values
    mask = torch.zeros(V, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(D), "t2d": mask}


def eagle3_tensors(seed: int, prefix: str = "midlayer.", *, size: int = 8, streams: int = 3) -> Tensors:
    make, kv_heads = made(seed), 2
    return {
        "fc.weight": make(H, streams * H),
        **layer(make, 2 * H, kv_heads, size, prefix),
        f"{prefix}input_layernorm.weight": make(H),
        f"{prefix}hidden_norm.weight": make(H),
        "norm.weight": make(H),
        "lm_head.weight": make(D, H),
        **draft_vocabulary(seed),
    }


DEFAULT_TAPS = (2, LAYERS // 2, LAYERS - 3)


def eagle3_official(target: Model) -> Format:
    """yuhuili/EAGLE3-*: a pickle, midlayer, no embedding, nothing said of layers or rope_theta."""
    config = llama("LlamaForCausalLMEagle3", num_key_value_heads=2, draft_vocab_size=D)
    return Format(config, eagle3_tensors(4), facts("eagle3", kv_heads=2), DEFAULT_TAPS, "pytorch_model.bin")


def eagle3_sglang(target: Model) -> Format:
    """SGLang's spelling with `model.` in front, llama3-like scaled rope, layers named by their output."""
    own = ("lm_head.weight", "d2t", "t2d")
    tensors = {name if name in own else f"model.{name}": x for name, x in eagle3_tensors(5).items()}
    config = llama(
        "LlamaForCausalLMEagle3",
        num_key_value_heads=2,
        draft_vocab_size=D,
        rope_theta=5000.0,
        rope_scaling={"type": "linear", "factor": 3.0},
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 4, 7]},
    )
    return Format(config, tensors, facts("eagle3", kv_heads=2, theta=5000.0, factor=3.0), (1, 5, 8))


def eagle3_specforge(target: Model) -> Format:
    """SpecForge: bf16 safetensors; norm_output in its old meaning, which must change nothing."""
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in eagle3_tensors(6).items()
    }
    config = llama(
        "LlamaForCausalLMEagle3",
        num_key_value_heads=2,
        draft_vocab_size=D,
        rope_theta=100000,
        target_model_type="llama",
        norm_output=True,
        torch_dtype="bfloat16",
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
    )
    return Format(config, tensors, facts("eagle3", kv_heads=2, theta=100000.0), (2, 4, 6))


def speculators(layer_config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.2.0",
        "draft_vocab_size": D, "norm_before_residual": True, "target_hidden_size": None, "embed_requires_grad": False,
        "transformer_layer_config": layer_config, "torch_dtype": "float32",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]},
        },
        **more,
    }  # fmt: skip


def eagle3_speculators(target: Model) -> Format:
    """speculators: the layer's config nested, layers.0, layers named by their input, an embedding that was trained."""
    tensors = eagle3_tensors(7, "layers.0.")
    tensors["embed_tokens.weight"] = made(70)(V, H)
    config = speculators(
        llama("LlamaForCausalLM", num_key_value_heads=2, rope_theta=2000.0),
        eagle_aux_hidden_state_layer_ids=[1, 3, 7],
    )
    return Format(config, tensors, facts("eagle3", kv_heads=2, theta=2000.0, before=True), (1, 3, 7))


def eagle3_speculators_qwen3(target: Model) -> Format:
    """The newer one: Qwen3's norms on q and k, rope_parameters, a norm over all streams, its target's tied flag."""
    tensors, make = eagle3_tensors(8, "layers.0.", size=12), made(80)
    tensors |= {"layers.0.self_attn.q_norm.weight": make(12), "layers.0.self_attn.k_norm.weight": make(12)}
    tensors["input_norm.weight"] = make(3 * H)
    tensors["embed_tokens.weight"] = target.embed_tokens.weight.detach().clone()
    nested = llama("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=12, tie_word_embeddings=True)
    nested["rope_parameters"] = {"rope_theta": 3000.0, "rope_type": "linear", "factor": 2.0}
    config = speculators(nested, architectures=["Eagle3DraftModel"], norm_before_residual=False, norm_before_fc=True)
    known = facts("eagle3", kv_heads=2, head_dim=12, theta=3000.0, factor=2.0)
    return Format(config, tensors, known, DEFAULT_TAPS)


def eagle31(target: Model) -> Format:
    """EAGLE-3.1: a norm on every stream, and the normed state fed back."""
    tensors, make = eagle3_tensors(9), made(90)
    tensors |= {f"fc_norm.{i}.weight": make(H) for i in range(3)}
    config = llama("LlamaForCausalLMEagle3", num_key_value_heads=2, draft_vocab_size=D, fc_norm=True, norm_output=True)
    return Format(config, tensors, facts("eagle3", kv_heads=2, norm_output=True), DEFAULT_TAPS)


def eagle31_speculators(target: Model) -> Format:
    """EAGLE-3.1 of speculators: one norm over all streams, the normed state fed back, and no fc_norm."""
    tensors, make = eagle3_tensors(14, "layers.0."), made(140)
    tensors |= {"input_norm.weight": make(3 * H), "embed_tokens.weight": make(V, H)}
    nested = llama("LlamaForCausalLM", num_key_value_heads=2)
    nested["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    config = speculators(nested, architectures=["Eagle3DraftModel"], norm_before_residual=False, norm_before_fc=True,
                         norm_output=True, eagle_aux_hidden_state_layer_ids=[2, 3, 4])  # fmt: skip
    return Format(config, tensors, facts("eagle3", kv_heads=2, norm_output=True), (2, 3, 4))


def eagle3_redhat(target: Model) -> Format:
    """RedHatAI's for Gemma 4: rope_parameters nested, norm_output and norm_before_fc false, a head_dim of its own."""
    tensors = eagle3_tensors(15, "layers.0.", size=12)
    tensors["embed_tokens.weight"] = made(150)(V, H)
    nested = llama("LlamaForCausalLM", num_key_value_heads=2, head_dim=12, attention_bias=False)
    nested["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    config = speculators(nested, architectures=["Eagle3DraftModel"], norm_before_fc=False, norm_output=False,
                         tie_word_embeddings=False, eagle_aux_hidden_state_layer_ids=[2, 4, 7])  # fmt: skip
    return Format(config, tensors, facts("eagle3", kv_heads=2, head_dim=12, before=True), (2, 4, 7))


def eagle3_nebius(target: Model) -> Format:
    """nebius/EAGLE3-gpt-oss-20b: a plain Llama's architecture, and vLLM's key for the draft vocabulary."""
    config = llama("LlamaForCausalLM", num_key_value_heads=2, truncated_vocab_size=D)
    return Format(config, eagle3_tensors(16), facts("eagle3", kv_heads=2), DEFAULT_TAPS)


def eagle3_counts_the_target(target: Model) -> Format:
    """The target's number of layers and vocabulary, no LM head, and a tap on what leaves the last layer."""
    tensors = eagle3_tensors(17)
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    config = llama("LlamaForCausalLMEagle3", num_key_value_heads=2, num_hidden_layers=28, draft_vocab_size=V)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}
    return Format(config, tensors, facts("eagle3", kv_heads=2), (2, 5, 9))


def eagle_counts_the_target(target: Model) -> Format:
    """An EAGLE-2 head that states its target's 32 layers."""
    form = eagle_sglang(target)
    form.config["num_hidden_layers"] = 32
    return form


def eagle3_full_vocabulary(target: Model) -> Format:
    """No draft_vocab_size: the target's LM head reads the state. Two streams, and an fc.bias, as nothing forbids."""
    tensors = eagle3_tensors(10, streams=2)
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    tensors["fc.bias"] = made(100)(H)
    config = llama("LlamaForCausalLMEagle3", num_key_value_heads=2)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 6]}
    return Format(config, tensors, facts("eagle3", kv_heads=2), (3, 7))


def eagle3_final_state(target: Model) -> Format:
    """use_aux_hidden_state false: the feature is the final state, and there is no fc."""
    tensors = eagle3_tensors(11)
    del tensors["fc.weight"]
    config = llama("LlamaForCausalLMEagle3", num_key_value_heads=2, draft_vocab_size=D)
    config["eagle_config"] = {"use_aux_hidden_state": False}
    return Format(config, tensors, facts("eagle3", kv_heads=2), (FINAL,))


def mtp_tensors(seed: int, *, biases: bool) -> Tensors:
    make, prefix = made(seed), "model.mtp_layers.0."
    return {
        f"{prefix}token_layernorm.weight": make(H),
        f"{prefix}hidden_layernorm.weight": make(H),
        f"{prefix}input_proj.weight": make(H, 2 * H),
        f"{prefix}input_layernorm.weight": make(H),
        f"{prefix}final_layernorm.weight": make(H),
        **layer(make, H, 2, 8, prefix),
        **(qkv_biases(make, 2, 8, prefix) if biases else {}),
    }


def mtp_in_target(target: Model) -> Format:
    """MiMo: the layer lies among the target's own tensors."""
    tensors = mtp_tensors(12, biases=True)
    tensors |= {"model.embed_tokens.weight": target.embed_tokens.weight.detach().clone()}
    tensors |= {"lm_head.weight": target.lm_head.weight.detach().clone(), "model.norm.weight": torch.ones(H)}
    tensors |= {f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(H, H) for i in range(LAYERS)}
    config = llama("MiMoForCausalLM", num_key_value_heads=2, num_hidden_layers=LAYERS, rope_theta=640000)
    config |= {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    config |= {"use_sliding_window": False, "sliding_window": 32768}
    return Format(config, tensors, facts("mtp", kv_heads=2, theta=640000.0), (FINAL,))


def mtp_alone(target: Model) -> Format:
    """A MiMo-format layer in a folder of its own, for a target without biases."""
    config = llama("MiMoMTP", num_key_value_heads=2, rope_theta=100000)
    return Format(config, mtp_tensors(13, biases=False), facts("mtp", kv_heads=2, theta=100000.0), (FINAL,))


FORMATS = [
    eagle_original, eagle_sglang, eagle_qwen2, eagle3_official, eagle3_sglang, eagle3_specforge, eagle3_speculators,
    eagle3_speculators_qwen3, eagle31, eagle31_speculators, eagle3_redhat, eagle3_nebius, eagle3_counts_the_target,
    eagle_counts_the_target, eagle3_full_vocabulary, eagle3_final_state, mtp_in_target, mtp_alone,
]  # fmt: skip
MakeFormat = Callable[[Model], Format]


# ---- writing and comparing ----------------------------------------------------------------------------------------


def make_target(hidden: int = H, layers: int = LAYERS, tied: bool = False) -> Model:
    config = llama("LlamaForCausalLM", hidden_size=hidden, num_hidden_layers=layers, tie_word_embeddings=tied)
    torch.manual_seed(0)
    target = Model(read_model_config(config)).requires_grad_(False)
    target.embed_tokens.weight.normal_()
    if not tied:
        target.lm_head.weight.normal_(0, 0.2)
    return target


@pytest.fixture(scope="module")
def target() -> Model:
    return make_target()


def write(folder: Path, form: Format) -> Path:
    """Write a checkpoint as its publisher does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(form.config))
    if form.file.endswith(".bin"):
        torch.save(form.tensors, folder / form.file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in form.tensors.items()}, folder / form.file)
    return folder


def plain_names(tensors: Tensors) -> Tensors:
    """The head's tensors by their last names, as the reference wants them; of a whole model only the MTP layer."""
    whole = any(name.startswith("model.layers.") for name in tensors)
    result = {}
    for name, tensor in tensors.items():
        if whole and "mtp_layers" not in name:
            continue
        for prefix in ("model.", "mtp_layers.0.", "midlayer.", "layers.0.", "self_attn.", "mlp."):
            name = name.removeprefix(prefix)
        assert name not in result
        result[name] = tensor
    return result


def sequences(streams: int, width: int = H) -> Iterator[tuple[Tensor, Tensor]]:
    """Two sequences: features [T, F] of unequal scales, as real streams are, and tokens [T]."""
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(TOKENS, streams, width, generator=generator) * (1 + torch.arange(streams))[:, None]
        yield features.flatten(1), torch.randint(0, V, (TOKENS,), generator=generator)


def expected(form: Format, target: Model) -> list[Drafted]:
    shared = {"embed": target.embed_tokens.weight, "head": target.lm_head.weight}
    w = plain_names(form.tensors)
    width = target.config.hidden_size
    return [reference(w, form.facts, shared, *pair) for pair in sequences(len(form.taps), width)]


def drafted(head: DraftHead, width: int = H) -> list[Drafted]:
    with torch.inference_mode():
        return [draft(head, *pair) for pair in sequences(len(head.taps), width)]


def furthest(head: DraftHead, wanted: list[Drafted]) -> float:
    got = drafted(head)
    assert len(got) == len(wanted) == 2
    return max(distance(a, b) for a, b in zip(got, wanted, strict=True))


# ---- the comparison -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", FORMATS, ids=lambda make: make.__name__)
def test_published_format_loads_and_drafts_as_the_formulas_say(make: MakeFormat, target: Model, tmp_path: Path) -> None:
    form = make(target)
    head = load_head(write(tmp_path, form), target)
    wanted = expected(form, target)
    assert head.taps == form.taps
    assert head.name == form.facts["kind"]
    assert (head.hidden_size, head.kv_heads, head.head_dim) == (H, form.facts["kv_heads"], form.facts["head_dim"])
    assert min(float(logits.std()) for one in wanted for logits in one.logits) > 0.5, "logits too flat to compare"
    assert furthest(head, wanted) < 1e-5


def swap_halves(*names: str) -> Callable[[Format], None]:
    """The two halves of what a matrix reads, exchanged: what a wrong order of concatenation amounts to."""

    def change(form: Format) -> None:
        for name in names:
            left, right = form.tensors[name].chunk(2, dim=1)
            form.tensors[name] = torch.cat((right, left), dim=1)

    return change


def set_config(**values: Any) -> Callable[[Format], None]:
    return lambda form: form.config.update(values)


def without(*names: str) -> Callable[[Format], None]:
    return lambda form: [form.tensors.pop(name) for name in names] and None


def offsets_as_ids(form: Format) -> None:
    form.tensors["d2t"] += torch.arange(D)
    del form.tensors["t2d"]  # beside which it would be refused


def streams_reversed(form: Format) -> None:
    form.tensors["fc.weight"] = torch.cat(form.tensors["fc.weight"].chunk(3, dim=1)[::-1], dim=1)


QKV = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
CHANGES: dict[str, tuple[MakeFormat, Callable[[Format], None]]] = {
    "EAGLE-2, hidden first": (eagle_original, swap_halves("fc.weight")),
    "EAGLE-2, no fc.bias": (eagle_original, without("fc.bias")),
    "EAGLE-2, no q, k, v biases": (
        eagle_qwen2, without(*(f"layers.0.self_attn.{name}_proj.bias" for name in "qkv")),
    ),
    "EAGLE-2, theta unread": (eagle_sglang, set_config(rope_theta=None)),
    "EAGLE-3, hidden first": (eagle3_official, swap_halves(*QKV)),
    "EAGLE-3, streams reversed": (eagle3_official, streams_reversed),
    "EAGLE-3, d2t as ids": (eagle3_official, offsets_as_ids),
    "EAGLE-3, normed residual": (eagle3_official, set_config(norm_before_residual=True)),
    "EAGLE-3, raw residual": (eagle3_speculators, set_config(norm_before_residual=False)),
    "EAGLE-3, target's embedding": (eagle3_speculators, without("embed_tokens.weight")),
    "EAGLE-3, no q and k norms": (
        eagle3_speculators_qwen3, without("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight"),
    ),
    "EAGLE-3, scaling unread": (eagle3_sglang, set_config(rope_scaling=None)),
    "EAGLE-3, eps": (eagle3_official, set_config(rms_norm_eps=0.1)),
    "EAGLE-3.1, raw state fed back": (eagle31, set_config(norm_output=False)),
    "MTP, embedding first": (mtp_alone, swap_halves("model.mtp_layers.0.input_proj.weight")),
    "MTP, no biases": (
        mtp_in_target, without(*(f"model.mtp_layers.0.self_attn.{name}_proj.bias" for name in "qkv")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_comparison_sees(change: str, target: Model, tmp_path: Path) -> None:
    make, apply = CHANGES[change]
    form = make(target)
    wanted = expected(form, target)
    apply(form)
    assert furthest(load_head(write(tmp_path, form), target), wanted) > 1e-3


def test_token_at_position_zero_is_not_read_by_mtp_alone(target: Model, tmp_path: Path) -> None:
    positions = torch.arange(TOKENS)[None]
    for make, read in ((mtp_alone, False), (eagle_original, True), (eagle3_official, True)):
        head = load_head(write(tmp_path / make.__name__, make(target)), target)
        features, tokens = next(sequences(len(head.taps)))
        other = tokens.clone()
        other[0] = (tokens[0] + 1) % V
        states = [
            head(head.embed(ids[None]), head.fuse(features[None]), head.rope(positions), Causal(), positions)
            for ids in (tokens, other)
        ]
        assert torch.equal(*states) != read


def test_wider_target_needs_an_embedding_in_the_file(tmp_path: Path) -> None:
    wide = make_target(hidden=48)
    form = eagle3_official(wide)
    form.config["target_hidden_size"] = 48
    form.tensors["fc.weight"] = made(200)(H, 3 * 48)
    with pytest.raises(ModelError, match="missing tensors: embed_tokens.weight"):
        load_head(write(tmp_path / "without", form), wide)
    form.tensors["embed_tokens.weight"] = made(201)(V, H)
    head = load_head(write(tmp_path / "with", form), wide)
    pairs = zip(drafted(head, 48), expected(form, wide), strict=True)
    assert max(distance(*pair) for pair in pairs) < 1e-5


def test_head_of_all_ids_in_order_has_no_map(target: Model, tmp_path: Path) -> None:
    form = eagle3_official(target)
    form.tensors |= {"d2t": torch.zeros(V, dtype=torch.int64), "lm_head.weight": made(1)(V, H)}
    form.tensors["t2d"] = torch.ones(V, dtype=torch.bool)
    form.config["draft_vocab_size"] = V
    head = load_head(write(tmp_path, form), target)
    assert head.token_map is None
    assert furthest(head, expected(form, target)) < 1e-5


@pytest.mark.parametrize("target_tied", [False, True])
@pytest.mark.parametrize("own_embedding", [False, True])
def test_tied_head_reads_the_embedding(target_tied: bool, own_embedding: bool, tmp_path: Path) -> None:
    target = make_target(tied=target_tied)
    form = eagle3_full_vocabulary(target)
    form.config["tie_word_embeddings"] = True
    if own_embedding:
        form.tensors["embed_tokens.weight"] = made(300)(V, H)
    head = load_head(write(tmp_path, form), target)
    form.tensors["lm_head.weight"] = form.tensors.get("embed_tokens.weight", target.embed_tokens.weight)
    assert furthest(head, expected(form, target)) < 1e-5


@pytest.mark.parametrize("make", [eagle3_official, eagle3_sglang, eagle3_speculators], ids=lambda make: make.__name__)
@pytest.mark.parametrize("offsets", [True, False])
def test_a_draft_vocabulary_of_all_ids_without_an_lm_head_reads_the_target_s(
    make: MakeFormat, offsets: bool, target: Model, tmp_path: Path
) -> None:
    form = make(target)
    without("d2t", "t2d", "lm_head.weight")(form)
    form.tensors |= {"d2t": torch.zeros(V, dtype=torch.int64)} if offsets else {}
    form.config["draft_vocab_size"] = V
    head = load_head(write(tmp_path, form), target)
    assert head.lm_head is None and head.token_map is None and head.draft_vocab == V
    assert furthest(head, expected(form, target)) < 1e-5


def test_embedding_is_shared_unless_it_differs(target: Model, tmp_path: Path) -> None:
    form = eagle_original(target)
    assert "embed_tokens.weight" in form.tensors
    assert load_head(write(tmp_path / "same", form), target).embed_tokens is None
    form.tensors["embed_tokens.weight"][3, 5] += 1.0
    other = load_head(write(tmp_path / "other", form), target)
    assert torch.equal(other.embed(torch.tensor([[3]]))[0, 0], form.tensors["embed_tokens.weight"][3])
    assert not torch.equal(target.embed_tokens.weight[3], form.tensors["embed_tokens.weight"][3])
    assert furthest(other, expected(form, target)) < 1e-5


@pytest.mark.parametrize("make", [eagle_original, eagle3_full_vocabulary, mtp_alone], ids=lambda make: make.__name__)
def test_a_head_borrows_matrices_without_the_target_s_multipliers(make: MakeFormat, tmp_path: Path) -> None:
    target = make_target()
    form, tokens = make(target), torch.arange(9)[None]
    form.tensors.pop("lm_head.weight", None)
    target.config = replace(target.config, embedding_multiplier=3.0, query_multiplier=0.5, residual_multiplier=0.7,
                            logits_multiplier=0.4, unrotated=(0,))  # fmt: skip
    head = load_head(write(tmp_path, form), target)
    if form.facts["kind"] == "eagle3":
        form.tensors["lm_head.weight"] = target.lm_head.weight
    assert furthest(head, expected(form, target)) < 1e-5
    assert head.embed_tokens is None and (target.embed(tokens) - 3 * head.embed(tokens)).abs().max() < 1e-5


def test_a_head_reads_yarn_in_its_own_file(target: Model, tmp_path: Path) -> None:
    form, positions = eagle3_official(target), torch.arange(90)[None]
    form.config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    head = load_head(write(tmp_path, form), target)
    model = Model(read_model_config({**form.config, "architectures": ["LlamaForCausalLM"]}))
    assert all(torch.equal(*pair) for pair in zip(head.rope(positions), model.rope(positions), strict=True))
    assert head.rope(positions).cos[0, 0, 0, 0] > 1.1 > target.rope(positions).cos[0, 0, 0, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_lm_head_in_an_eagle2_file_is_left_alone(tied: bool, target: Model, tmp_path: Path) -> None:
    form = eagle_original(target)
    form.tensors |= {"lm_head.weight": made(5)(V, H), "embed_tokens.weight": made(6)(V, H)}
    form.config["tie_word_embeddings"] = tied
    assert furthest(load_head(write(tmp_path, form), target), expected(form, target)) < 1e-5


def test_norm_output_without_fc_norm_is_ignored_with_a_line(
    target: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="minispec"):
        head = load_head(write(tmp_path, eagle3_specforge(target)), target)
    assert "norm_output is ignored" in caplog.text
    assert not head.norm_output


# ---- which layers are read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [7, 0, 3]}}, (8, 1, 4)),  # an order of its own
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [8, -1, 3]}}, (9, 0, 4)),  # the embedding, as 0
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, (2, 5, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6],
          "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (2, 4, 6)),
    ],
)  # fmt: skip
def test_layers_are_counted_as_the_format_counts(
    config: dict[str, Any], taps: tuple[int, ...], target: Model, tmp_path: Path
) -> None:
    form = eagle3_official(target)
    form.config.update(config)
    assert load_head(write(tmp_path, form), target).taps == taps


# ---- FR-Spec ------------------------------------------------------------------------------------------------------

MAP = torch.tensor([40, 3, 7, 60, 0, 12])


@pytest.mark.parametrize("make", [eagle_original, mtp_in_target], ids=lambda make: make.__name__)
@pytest.mark.parametrize("tied", [False, True])
def test_token_map_slices_the_targets_head(make: MakeFormat, tied: bool, tmp_path: Path) -> None:
    target = make_target(tied=tied)
    form = make(target)
    target.config = replace(target.config, logits_multiplier=0.5)  # neither of them has it
    whole, sliced = (load_head(write(tmp_path, form), target, token_map=ids) for ids in (None, MAP))
    state = torch.randn(2, 5, H)
    assert sliced.logits(state).shape == (2, 5, len(MAP))
    assert torch.allclose(sliced.logits(state), whole.logits(state)[..., MAP], atol=1e-6)
    assert sliced.token_map is not None and torch.equal(sliced.token_map, MAP)


@pytest.mark.skipif(not can_pack(torch.float32), reason="this build of PyTorch cannot pack")
def test_packed_target_cannot_be_sliced(tmp_path: Path) -> None:
    target = make_target()
    pack_linears(target)
    with pytest.raises(AssertionError, match="before it is packed"):
        load_head(write(tmp_path, eagle_original(target)), target, token_map=MAP)


def test_eagle3_ignores_a_token_map_with_a_warning(
    target: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = eagle3_official(target)
    head = load_head(write(tmp_path, form), target, token_map=MAP)
    assert "--speculative-token-map is ignored" in caplog.text
    assert furthest(head, expected(form, target)) < 1e-5


# ---- what is read -------------------------------------------------------------------------------------------------


def whole_mimo(folder: Path, *, layer: bool = True) -> Format:
    """Write a MiMo of two layers with a tokenizer, with or without the MTP layer that its config.json names."""
    form = mtp_in_target(make_target())
    form.config |= {"vocab_size": 300, "num_hidden_layers": 2}
    ours = published_tensors(Model(read_model_config(form.config)))
    form.tensors = {f"model.{name}": tensor for name, tensor in ours.items()}
    form.tensors |= mtp_tensors(12, biases=True) if layer else {}
    (write(folder, form) / "tokenizer.json").write_text(byte_tokenizer(300).backend._tokenizer.to_str())
    return form


EAGERLY = dict(dtype="float32", disable_torch_compile=True, device="cpu")


def test_a_mimo_start_maps_each_tensor_for_its_size_then_for_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = whole_mimo(tmp_path)
    read = reads(monkeypatch)
    llm = LLM(tmp_path, speculative_algorithm="EAGLE", **EAGERLY)
    assert llm.scheduler.engine.drafter.name == "mtp"
    assert sorted(read) == sorted([*form.tensors, *form.tensors])


@pytest.mark.parametrize(
    ("layer", "flags", "name"),
    [
        (True, {}, "mtp"), (True, {"speculative_algorithm": "NONE"}, "none"), (False, {}, "none"),
        (True, {"load_format": "dummy"}, "none"), (True, {"speculative_num_steps": 1}, "none"),
    ],
    ids=["by itself", "switched off", "files without it", "dummy weights", "a flag of speculation alone"],
)  # fmt: skip
def test_a_named_mimo_drafts_with_its_own_layer_without_a_flag(
    layer: bool, flags: dict[str, Any], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole_mimo(tmp_path, layer=layer)
    with caplog.at_level(logging.INFO, "minispec"):
        llm = LLM(tmp_path, **EAGERLY, **flags)
    assert llm.scheduler.engine.drafter.name == name and llm.config.algorithm == ("EAGLE" if name == "mtp" else "NONE")
    assert ("brings an MTP layer and drafts with it" in caplog.text) == (name == "mtp")
    assert ("the files have none" in caplog.text) == (not layer)


# ---- what is refused ----------------------------------------------------------------------------------------------


def add(name: str, *size: int) -> Callable[[Format], None]:
    return lambda form: form.tensors.update({name: torch.ones(*size)})


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Format], None]:
    return lambda form: form.tensors.update({name: change(form.tensors[name].clone())})


def nested_in_model(form: Format) -> None:
    form.config = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": form.config}


def layers_alone(form: Format) -> None:
    form.tensors = {f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(H, H) for i in range(3)}


REFUSED: dict[str, tuple[MakeFormat, Callable[[Format], None], str]] = {
    "unknown": (eagle_original, add("layers.0.input_layernorm.weight", H), "unknown.*layers.0.input_layernorm.weight"),
    "unknown3": (eagle3_official, add("embedding_layernorm.weight", H), "unknown tensors: embedding_layernorm.weight"),
    "unknown mtp": (mtp_alone, add("model.fc.weight", H, H), "unknown tensors: fc.weight"),
    "missing": (
        eagle_original, without("layers.0.self_attn.k_proj.weight"), "missing.*layers.0.self_attn.k_proj.weight",
    ),
    "missing fc": (eagle3_official, without("fc.weight"), "missing tensors: fc.weight"),
    "missing up": (eagle3_official, without("midlayer.mlp.up_proj.weight"), "missing.*midlayer.mlp.up_proj.weight"),
    "missing head": (eagle3_official, without("lm_head.weight"), "missing tensors: lm_head.weight"),
    "missing norm": (eagle31, without("fc_norm.1.weight"), "missing tensors: fc_norm.1.weight"),
    "missing fc_norm": (eagle3_official, set_config(fc_norm=True), "missing tensors: fc_norm.0.weight"),
    "missing d2t": (eagle3_official, without("d2t"), "missing tensors: d2t"),
    "one bias of three": (
        eagle_qwen2, without("layers.0.self_attn.v_proj.bias"), "missing tensors: layers.0.self_attn.v_proj.bias",
    ),
    "missing mtp": (
        mtp_in_target, without("model.mtp_layers.0.input_proj.weight"), "missing.*mtp_layers.0.input_proj.weight",
    ),
    "shape": (eagle3_official, set_config(num_key_value_heads=4), r"k_proj.weight \[16, 64\] for \[32, 64\]"),
    "streams": (
        eagle3_official, set_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3]}),
        r"fc.weight \[32, 96\] for \[32, 64\]",
    ),
    "hidden size": (eagle_original, set_config(hidden_size=64), "hidden_size 64, and the target has 32"),
    "target's size": (eagle3_official, set_config(target_hidden_size=64), "hidden_size 64, and the target has 32"),
    "vocabulary": (eagle_original, set_config(vocab_size=99), "vocab_size 99, and the target has 61"),
    "mtp's size": (mtp_alone, set_config(hidden_size=64), "hidden_size 64, and the target has 32"),
    "quantized": (
        eagle3_official, set_config(quantization_config={"quant_method": "awq"}),
        "has a quantization_config with quant_method 'awq'",
    ),
    "two layers": (eagle_original, add("layers.1.mlp.up_proj.weight", INNER, H), "layers.0 and 1, and such"),
    "two layers 3": (eagle3_official, add("layers.1.mlp.up_proj.weight", INNER, H), "unknown.*layers.1.mlp.up_proj"),
    "second mtp layer": (mtp_in_target, add("model.mtp_layers.1.input_proj.weight", H, H), "have 2 layers, mtp_layers"),
    "vLLM's": (eagle_original, nested_in_model, "head's sizes within model, as vLLM's converter writes them"),
    "a list": (eagle3_official, set_config(eagle_config=[1]), r"eagle_config must be an object, got \[1\]"),
    "no ids": (eagle3_official, set_config(eagle_aux_hidden_state_layer_ids="2,4"), "_ids must be a list of whole"),
    "no flag": (eagle3_official, set_config(norm_output="yes"), "norm_output must be true or false, got 'yes'"),
    "no size": (eagle3_official, set_config(intermediate_size=None), "config.json lacks intermediate_size"),
    "rope": (eagle3_official, set_config(rope_scaling={"type": "su", "factor": 2}), "type 'su' not supported: it"),
    "window": (eagle_original, set_config(use_sliding_window=True, sliding_window=64), "sliding_window 64"),
    "d2t range": (eagle3_official, changed("d2t", lambda ids: ids + V * (ids == ids[-1])), r"d2t.*\[0, 60\]"),
    "d2t twice": (eagle3_official, changed("d2t", lambda ids: torch.cat((ids[:1], ids[:1] - 1, ids[2:]))),
                  "d2t.*stands in it twice"),
    "d2t length": (eagle3_official, set_config(draft_vocab_size=D + 1), r"d2t has the shape \[17\].* is 18"),
    "d2t of zeros": (eagle3_official, changed("d2t", torch.zeros_like), "d2t contradicts the t2d beside it"),
    "d2t counted": (eagle3_speculators, changed("d2t", lambda ids: torch.arange(D)),
                    "d2t contradicts the t2d beside it"),
    "ids for d2t": (eagle31, changed("d2t", lambda ids: ids + torch.arange(D)), "d2t contradicts the t2d beside it"),
    "one mark missing": (eagle3_official, changed(
        "t2d", lambda marks: marks.to(torch.uint8).index_fill(0, marks.nonzero()[0], 0)),
        "17 target ids, t2d marks 16, and 1 are in one"),
    "residual unsaid": (eagle3_speculators, set_config(norm_before_residual=None), "lacks norm_before_residual"),
    "speculators' EAGLE-1": (eagle3_speculators, set_config(speculators_model_type="eagle"), "model_type 'eagle'"),
    "tied and short": (
        eagle3_full_vocabulary, set_config(tie_word_embeddings=True, draft_vocab_size=D),
        "61 tokens.*draft_vocab_size is 17",
    ),
    "says otherwise": (eagle3_official, set_config(architectures=["LlamaForCausalLMEagle"]), "say eagle.*of eagle3"),
    "no such layer": (
        eagle3_official, set_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}),
        r"layers \(2, 4, 10\).*0 to 8, and 9 is the output of the last",
    ),
    "two lists of layers": (
        eagle3_official, set_config(eagle_aux_hidden_state_layer_ids=[2, 4, 6],
                                    eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}),
        "not the same streams",
    ),
    "a whole model": (eagle_original, layers_alone, "no draft head.*LlamaForCausalLM"),
    "two vocabularies": (eagle3_official, set_config(truncated_vocab_size=V), "truncated_vocab_size 61 contradict"),
    "both spellings": (eagle3_official, add("model.fc.weight", H, 3 * H), "fc.weight twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_head_that_does_not_fit_is_refused_by_name(case: str, target: Model, tmp_path: Path) -> None:
    make, spoil, message = REFUSED[case]
    form = make(target)
    spoil(form)
    with pytest.raises(ModelError, match=message) as caught:
        load_head(write(tmp_path, form), target)
    assert f"--speculative-draft-model-path {tmp_path}" in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- the module ---------------------------------------------------------------------------------------------------

KINDS = [eagle_original, eagle31, mtp_alone]


@pytest.mark.skipif(not can_pack(torch.float32), reason="this build of PyTorch cannot pack")
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_packed_head_drafts_the_same_and_leaves_the_target_alone(make: MakeFormat, tmp_path: Path) -> None:
    target = make_target()
    form = make(target)
    head = load_head(write(tmp_path, form), target)
    pack_linears(head)
    assert sum(isinstance(module, PackedLinear) for module in head.modules()) >= 5
    assert not any(isinstance(module, PackedLinear) for module in target.modules())
    assert furthest(head, expected(form, target)) < 1e-4


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_head_shares_the_targets_lm_head_whatever_replaces_it_and_owns_none_of_it(
    make: MakeFormat, tmp_path: Path
) -> None:
    target = make_target()
    head = load_head(write(tmp_path, make(target)), target)
    assert not {id(p) for p in target.parameters()} & {id(p) for p in head.parameters()}
    state = torch.randn(1, 2, H)
    before, matrix = head.logits(state), target.lm_head.weight
    target.lm_head = nn.Linear(H, V, bias=False)  # as packing does
    target.lm_head.weight = nn.Parameter(2 * matrix, requires_grad=False)
    shared = head.lm_head is None
    assert shared == (head.name != "eagle3")
    assert torch.allclose(head.logits(state), before * (2 if shared else 1), atol=1e-5)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_head_is_one_graph(make: MakeFormat, target: Model, tmp_path: Path) -> None:
    form = make(target)
    head = load_head(write(tmp_path, form), target)

    def step(tokens: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        state = head(head.embed(tokens), head.fuse(features), head.rope(positions), Causal(), positions)
        return head.logits(state)

    features, tokens = next(sequences(len(head.taps)))
    inputs = tokens[None], features[None], torch.arange(TOKENS)[None]
    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
    with torch.inference_mode():
        assert torch.equal(compiled(*inputs), step(*inputs))


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_head_takes_the_target_s_dtype_and_rope_stays_wide(make: MakeFormat, target: Model, tmp_path: Path) -> None:
    head = load_head(write(tmp_path, make(target)), make_target().to(torch.bfloat16))
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    assert head.frequencies.dtype == torch.float32
    assert head.rope(torch.tensor([[5000]])).cos.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in head.parameters())


def fresh(kind: str, target: Model) -> DraftHead:
    """A head for training, with no file behind it."""
    torch.manual_seed(3)
    shape = replace(target.config, kv_heads=2, layers=1, rope_theta=777.0)
    config = HeadConfig(kind, shape, fc_bias=kind == "eagle")
    if kind == "eagle3":
        ids = draft_vocabulary(5)["d2t"] + torch.arange(D)
        config = replace(config, taps=DEFAULT_TAPS, token_map=ids, fc_norm=True)
    return HEAD_KINDS[kind](config, target)


@pytest.mark.parametrize("kind", STEP)
def test_module_that_is_trained_is_the_module_that_is_served(kind: str, target: Model, tmp_path: Path) -> None:
    head = fresh(kind, target)
    features, tokens = next(sequences(len(head.taps)))
    positions = torch.arange(TOKENS)[None]
    state = head(head.embed(tokens[None]), head.fuse(features[None]), head.rope(positions), Causal(), positions)
    head.logits(state).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    # Written out under the published names it loads again as the same head.
    tensors = {f"model.{name}": tensor.clone() for name, tensor in head_tensors(head).items()}
    config = llama(min(ARCHITECTURES[kind]), num_key_value_heads=2, rope_theta=777.0)
    if head.token_map is not None:
        tensors["d2t"] = head.token_map - torch.arange(D)
        config["draft_vocab_size"] = D
    served = load_head(write(tmp_path, Format(config, tensors, {}, ())), target)
    assert all(distance(*pair) == 0 for pair in zip(drafted(served), drafted(head), strict=True))
