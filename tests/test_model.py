"""The decoder against transformers, family by family, on small random checkpoints that transformers itself wrote.

Random weights of the usual size make a poor test: attention is flat and logits are near zero, so that a wrong mask,
norm or rotation hardly shows. Here they are scaled until most queries look at one key and logits are spread, which is
asserted. Then what is special to each family is taken away, to see the comparison fail.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conformance import nodes_have_the_logits_of_their_own_paths, random_head
from exactness import Oracle, build, request, run, truth_of
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from minispec.attention import Causal
from minispec.beam import BeamDrafter
from minispec.config import Config
from minispec.cpu import onednn
from minispec.cpu.linear import PackedHead, PackedLinear, can_pack, pack_linears, room_for_both
from minispec.drafter import Plain
from minispec.eagle import Eagle3Head
from minispec.load.architectures import _ARCHITECTURES, _MULTIPLIERS, read_model_config
from minispec.load.build import _context_length
from minispec.load.heads import layer_sizes
from minispec.load.published import parts_of, published_tensors, reads
from minispec.load.weights import load_weights, read_config, read_tensors
from minispec.model import (
    FINAL,
    Block,
    Model,
    RMSNorm,
    rope_factor,
    rope_frequencies,
)
from minispec.model_config import ModelError
from minispec.request import MAX_ASKED_IDS, Logprobs, Scored

TOKENS = 300
VOCAB = 211
BOUND = 1e-4
CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Family:
    """A checkpoint to write, and what to break in the loaded model to see the comparison fail."""

    config: Callable[..., PretrainedConfig]
    options: dict[str, Any]
    breaks: Sequence[Callable[[Model], None]]  # each is seen by itself


def shape(hidden: int, heads: int, kv_heads: int, **options: Any) -> dict[str, Any]:
    """Return the config of a small model."""
    return {
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **options,
    }  # fmt: skip


def without_scaling(model: Model) -> None:
    """Rotate as if the config had no rope scaling, but for a factor."""
    model.frequencies = rope_frequencies(replace(model.config, rope_scaling=None))


def without_factor(model: Model) -> None:
    """Forget YaRN's factor on cos and sin."""
    model.rope_factor = 1.0


def all_rotated(model: Model) -> None:
    """Rotate the layers that have no positions too."""
    model.config = replace(model.config, unrotated=())


def the_others_rotated(model: Model) -> None:
    """Read `no_rope_layers` as its name suggests: 1 for a layer that does not rotate."""
    model.config = replace(model.config, unrotated=tuple(set(range(4)) - set(model.config.unrotated)))


def without(multiplier: str) -> Callable[[Model], None]:
    """Return a function that leaves one of Granite's multipliers out."""

    def leave_out(model: Model) -> None:
        model.config = replace(model.config, **{multiplier: 1.0})
        for block in model.layers:
            if hasattr(block, multiplier):
                setattr(block, multiplier, 1.0)

    return leave_out


def with_qkv_by_heads(model: Model) -> None:
    """Read the rows of the joined matrix as q, k and v of one head after the other."""
    dim, kv_heads = model.config.head_dim, model.config.kv_heads
    for block in model.layers:
        weight = block.qkv_proj.weight.view(kv_heads, -1, dim, model.config.hidden_size)
        weight = torch.cat([part.flatten(0, 2) for part in weight.split([weight.shape[1] - 2, 1, 1], 1)])
        block.qkv_proj.weight.copy_(weight.clone())


def with_up_before_gate(model: Model) -> None:
    """Read the rows of the joined matrix in the other order."""
    for block in model.layers:
        block.gate_up_proj.weight.copy_(torch.cat(block.gate_up_proj.weight.chunk(2)[::-1]))


def with_default_theta(model: Model) -> None:
    """Rotate as if the config had no rope_theta."""
    model.frequencies = rope_frequencies(replace(model.config, rope_theta=10000.0))


def without_bias(model: Model) -> None:
    """Forget the biases of q, k, v."""
    for block in model.layers:
        block.qkv_proj.bias.zero_()


def without_output_bias(model: Model) -> None:
    """Forget the biases that only a Llama can have."""
    for block in model.layers:
        block.o_proj.bias.zero_()
        block.down_proj.bias.zero_()


def without_qk_norm(model: Model) -> None:
    """Forget the norms of q and k."""
    for block in model.layers:
        block.q_norm = block.k_norm = nn.Identity()


def with_interleaved_heads(model: Model) -> None:
    """Let query heads 0, 3, 6 share a KV head instead of 0, 1, 2."""
    heads, kv_heads, dim = model.config.heads, model.config.kv_heads, model.config.head_dim
    order = torch.arange(heads).view(kv_heads, -1).T.flatten()
    rows = (order[:, None] * dim + torch.arange(dim)).flatten()
    for block in model.layers:
        block.qkv_proj.weight[: heads * dim] = block.qkv_proj.weight[rows].clone()
        block.o_proj.weight.copy_(block.o_proj.weight[:, rows].clone())


def with_experts_swapped(model: Model) -> None:
    """Let the first two experts of each layer change places, but not in the router."""
    for block in model.layers:
        for stack in (block.experts.gate_up_proj, block.experts.down_proj) if block.sparse else ():
            stack[:2] = stack[:2].flip(0)


def with_expert_s_up_before_gate(model: Model) -> None:
    """Read the rows of the experts' matrices in the other order."""
    for block in model.layers:
        if block.sparse:
            block.experts.gate_up_proj.copy_(torch.cat(block.experts.gate_up_proj.chunk(2, 1)[::-1], 1))


def with_other_renormalisation(model: Model) -> None:
    """Divide the weights of the chosen experts by their sum where that is not asked for, and leave it where it is."""
    for block in model.layers:
        if block.sparse:
            block.experts.renormalises = not block.experts.renormalises


def with_an_expert_less(model: Model) -> None:
    """Let each token go through one expert less."""
    for block in model.layers:
        if block.sparse:
            block.experts.per_token -= 1


def with_another(**fields: Any) -> Callable[[Model], None]:
    """Return a function that changes fields of a model's config."""

    def change(model: Model) -> None:
        model.config = replace(model.config, **fields)

    return change


FAMILIES = {
    "llama3": Family(LlamaConfig, shape(96, 6, 2, head_dim=32, rope_parameters=LLAMA3_ROPE), [without_scaling]),
    "llama-yarn": Family(
        LlamaConfig, shape(96, 6, 2, head_dim=32, rope_parameters=YARN), [without_scaling, without_factor]
    ),
    "llama-biased": Family(
        LlamaConfig, shape(96, 6, 2, attention_bias=True, mlp_bias=True), [without_output_bias]
    ),
    "mistral": Family(
        MistralConfig,
        shape(96, 6, 2, sliding_window=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        [with_default_theta],
    ),
    "qwen2": Family(Qwen2Config, shape(96, 6, 2), [without_bias]),
    "qwen2-yarn": Family(
        Qwen2Config,
        shape(96, 6, 2, rope_parameters={**YARN, "mscale": 3.0, "mscale_all_dim": 0.5, "truncate": False}),
        [without_scaling, without_factor, without_bias],
    ),
    "mistral-windowed": Family(
        MistralConfig, shape(96, 6, 2, num_hidden_layers=2, sliding_window=50),
        [with_another(sliding_window=49), with_another(sliding_window=51), with_another(sliding=(0,))],
    ),
    "qwen2-windowed": Family(
        Qwen2Config,
        shape(96, 6, 2, num_hidden_layers=4, use_sliding_window=True, sliding_window=50, max_window_layers=1,
              layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"]),
        [with_another(sliding_window=49), with_another(sliding_window=51), with_another(sliding=()),
         with_another(sliding=(1, 2, 3))],
    ),
    "phi3-windowed": Family(
        Phi3Config, shape(96, 6, 2, num_hidden_layers=2, sliding_window=50),
        [with_another(sliding_window=49), with_another(sliding_window=51)],
    ),
    "qwen3": Family(Qwen3Config, shape(96, 6, 2, head_dim=32), [without_qk_norm]),
    "smollm2": Family(LlamaConfig, shape(144, 9, 3, tie_word_embeddings=True), [with_interleaved_heads]),
    "mimo": Family(Qwen2Config, shape(96, 6, 3), [without_bias]),
    "smollm3": Family(
        SmolLM3Config,
        shape(96, 6, 2, num_hidden_layers=4, no_rope_layers=[1, 0, 0, 1], tie_word_embeddings=True),
        [all_rotated, the_others_rotated, with_default_theta],
    ),
    "granite": Family(
        GraniteConfig,
        shape(96, 6, 2, embedding_multiplier=2.5, attention_multiplier=0.35, residual_multiplier=0.6,
              logits_scaling=1.3),
        [without("embedding_multiplier"), without("query_multiplier"), without("residual_multiplier"),
         without("logits_multiplier")],
    ),
    "phi3": Family(Phi3Config, shape(96, 6, 2), [with_qkv_by_heads, with_up_before_gate]),
    "qwen3-moe": Family(
        Qwen3MoeConfig,
        shape(96, 6, 2, num_hidden_layers=4, head_dim=32, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
              moe_intermediate_size=48, mlp_only_layers=[0, 3]),
        [with_experts_swapped, with_expert_s_up_before_gate, with_other_renormalisation, with_an_expert_less,
         without_qk_norm],
    ),
    "qwen3-moe-every-other": Family(
        Qwen3MoeConfig,
        shape(96, 6, 2, num_hidden_layers=4, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False,
              moe_intermediate_size=64, decoder_sparse_step=2),
        [with_experts_swapped, with_other_renormalisation, with_an_expert_less],
    ),
    "mixtral": Family(
        MixtralConfig,
        shape(96, 6, 2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        [with_experts_swapped, with_expert_s_up_before_gate, with_other_renormalisation, with_an_expert_less,
         with_default_theta],
    ),
}  # fmt: skip
SCALED = ("llama3", "llama-yarn", "qwen2-yarn")
NEW = ("llama-yarn", "qwen2-yarn", "smollm3", "granite", "phi3", "qwen3-moe", "qwen3-moe-every-other", "mixtral",
       "mistral-windowed", "qwen2-windowed", "phi3-windowed")  # fmt: skip
SPARSE = {"qwen3-moe": (1, 2), "qwen3-moe-every-other": (1, 3), "mixtral": (0, 1, 2)}


def scaled_weights(model: PreTrainedModel) -> None:
    """Draw weights that make attention sharp (scores of standard deviation 5) and logits spread (about 3)."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data = 2.3 + 0.3 * noise
        elif name.endswith("norm.weight"):
            parameter.data = 1 + 0.2 * noise
        elif name.endswith("bias"):
            parameter.data = noise
        else:
            is_sharp = name.endswith(("q_proj.weight", "k_proj.weight", "mlp.gate.weight"))
            gain = 2.3 if is_sharp else 3.0 if name.endswith(("embed_tokens.weight", "lm_head.weight")) else 0.7
            parameter.data = gain * noise / parameter.shape[-1] ** 0.5
            if name.endswith("qkv_proj.weight"):
                values = model.config.num_key_value_heads * model.config.hidden_size // model.config.num_attention_heads
                parameter.data[:-values] *= 2.3 / 0.7


@cache
def hf_model(name: str) -> PreTrainedModel:
    """Return the family's model as transformers builds it, with sharp random weights."""
    family = FAMILIES[name]
    config = family.config(**family.options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    scaled_weights(model)
    return model.requires_grad_(False)


def write(name: str, folder: Path, **options: Any) -> Path:
    """Save a family's checkpoint as transformers does; MiMo gets its architecture and its extra layers."""
    hf_model(name).save_pretrained(folder, **options)
    if name == "mimo":
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
        config["attention_bias"] = True  # says nothing about o_proj, which has none
        (folder / "config.json").write_text(json.dumps(config))
        extra = {
            "model.mtp_layers.0.self_attn.q_proj.weight": torch.ones(96, 96),
            "model.mtp_layers.0.mlp.gate_proj.weight": torch.ones(160, 96),
            "model.mtp_layers.0.input_proj.weight": torch.ones(96, 192),
        }
        torch.save({**hf_model(name).state_dict(), **extra}, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Model:
    """Load a folder as `LLM` does, with changes to the config if wanted."""
    config = replace(read_model_config(read_config(folder)), **changes)
    model = Model.empty(config, dtype, CPU)
    load_weights(
        published_tensors(model), read_tensors(folder, wanted=partial(reads, config), split=partial(parts_of, config))
    )
    return model


def text() -> Tensor:
    """Return random tokens [1, T], the same for every family."""
    return torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def logits_of(model: Model, tokens: Tensor) -> Tensor:
    """Return all logits [B, T, V] by plain causal attention."""
    attend = Causal(model.config.windows(tokens.shape[1]))
    hidden, _ = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), attend)
    return model.logits(hidden)


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family's checkpoint: most in one file, one in many with an index, MiMo's pickled."""
    shards = {"llama3": {"max_shard_size": "100KB"}}
    found = {name: write(name, tmp_path_factory.mktemp(name), **shards.get(name, {})) for name in FAMILIES}
    assert len(list(found["llama3"].glob("model-*.safetensors"))) > 2
    return found


# ---- against transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    want = hf_model(name)(text(), output_attentions=True)
    largest = torch.stack(want.attentions)[..., 10:, :].amax(-1)  # [L, B, H, T]; short rows are sharp by nature
    assert (largest > 0.5).float().mean() > 0.5, "attention is flat: the comparison would prove little"
    assert 2 < want.logits.std() < 4.5

    model = load(folders[name])
    got = logits_of(model, text())
    assert got.shape == (1, TOKENS, VOCAB)
    error = float((got - want.logits).abs().max())
    assert error < BOUND, f"logits differ by {error:.1e}"
    assert torch.equal(got.argmax(-1), want.logits.argmax(-1))

    for fault in FAMILIES[name].breaks:
        model = load(folders[name])
        fault(model)
        broken = float((logits_of(model, text()) - want.logits).abs().max())
        assert broken > 100 * BOUND, f"{fault} changes logits by {broken:.1e} only"


@pytest.mark.parametrize("name", ["llama3", "llama-yarn"])
def test_all_three_branches_of_scaling_act(name: str, folders: dict[str, Path]) -> None:
    config = read_model_config(read_config(folders[name]))
    ratio = rope_frequencies(config) / rope_frequencies(replace(config, rope_scaling=None))
    kept, divided = torch.isclose(ratio, torch.ones(1)), torch.isclose(ratio, torch.tensor(1 / 8))
    assert kept.any() and divided.any() and (~kept & ~divided).any()
    assert (rope_factor(config) > 1.2) == (name == "llama-yarn")


def test_linear_scaling_is_that_of_transformers() -> None:
    options = shape(96, 6, 2, rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0})
    reference = AutoModelForCausalLM.from_config(LlamaConfig(**options))
    given = {"architectures": ["LlamaForCausalLM"], **options, "rope_theta": 5e5}
    given["rope_scaling"] = {"type": "linear", "factor": 4.0}
    frequencies = rope_frequencies(read_model_config(given))
    torch.testing.assert_close(frequencies, reference.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "more",
    [{}, {"mscale": 0.707, "mscale_all_dim": 1.4}, {"mscale": 2.0}, {"attention_factor": 1.7}, {"truncate": False},
     {"beta_fast": 8.0, "beta_slow": 2.0}, {"beta_fast": None, "factor": 0.5},
     {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}],
)  # fmt: skip
def test_yarn_is_that_of_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    config = LlamaConfig(**shape(128, 2, 2, rope_parameters={**YARN, **more}))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    want, got = LlamaRotaryEmbedding(config), read_model_config(read_config(tmp_path))
    torch.testing.assert_close(rope_frequencies(got), want.inv_freq, rtol=1e-6, atol=0)
    assert rope_factor(got) == pytest.approx(want.attention_scaling)
    rope = Model(got).rope(torch.arange(600)[None])
    cos, sin = want(torch.zeros(1), torch.arange(600)[None])
    torch.testing.assert_close(torch.stack((rope.cos[0], rope.sin[0])), torch.stack((cos, sin)), atol=1e-5, rtol=0)


def test_yarn_makes_the_context_longer() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read_model_config(minimal(rope_scaling=yarn)).context_length == 2048
    assert read_model_config(minimal(rope_scaling=yarn, max_position_embeddings=4096)).context_length == 4096


def test_a_layer_without_positions_runs_the_same_graph_and_is_not_turned(folders: dict[str, Path]) -> None:
    model = load(folders["smollm3"])
    rope, q = model.rope(torch.arange(9)[None]), torch.randn(1, 6, 9, 16)
    assert torch.equal(rope.still().turn(q), q) and not torch.equal(rope.turn(q), q)
    torch._dynamo.reset()
    counters.clear()
    model.compile_blocks(lambda step: torch.compile(step, backend="eager", fullgraph=True, dynamic=False))
    with torch.inference_mode():
        model(text()[:, :9], torch.arange(9)[None], Causal())
    assert counters["stats"]["unique_graphs"] == 1


def test_defaults_are_those_of_transformers() -> None:
    """Of keys that a file may leave out, those whose default the weights do not show."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    for architecture, family in _ARCHITECTURES.items():
        kind = architecture.removesuffix("ForCausalLM").lower().replace("moe", "_moe")
        if kind == "mimo":  # transformers has no class for it
            continue
        want = CONFIG_MAPPING[kind](**sizes, pad_token_id=None, bos_token_id=None, eos_token_id=None)
        given = read_model_config({"architectures": [architecture], **sizes})
        assert given.tied == want.tie_word_embeddings, kind
        assert given.norm_eps == want.rms_norm_eps, kind
        assert given.rope_theta == want.rope_parameters["rope_theta"] and given.rope_scaling is None, kind
        assert given.sliding_window == getattr(want, "sliding_window", None), kind
        rotates = getattr(want, "no_rope_layers", [1] * 8)
        assert given.experts == getattr(want, "num_local_experts", 0), kind
        if given.experts:
            inner = getattr(want, "moe_intermediate_size", want.intermediate_size)
            chosen = (want.num_experts_per_tok, inner, getattr(want, "norm_topk_prob", True))
            assert (given.experts_per_token, given.expert_size, given.norm_topk_prob) == chosen, kind
            assert given.sparse == tuple(range(8)) and not getattr(want, "mlp_only_layers", []), kind
        assert given.unrotated == tuple(layer for layer in range(8) if not rotates[layer]), kind
        multipliers = [getattr(want, key, None) for key in _MULTIPLIERS]
        ours = (given.embedding_multiplier, given.query_multiplier * given.head_dim**-0.5, given.residual_multiplier,
                1 / given.logits_multiplier)  # fmt: skip
        assert multipliers == [None] * 4 or ours == pytest.approx(multipliers), kind
        assert (multipliers == [None] * 4) == (not set(_MULTIPLIERS) & set(family.keys)), kind


def test_keys_of_another_family_are_ignored_as_transformers_ignores_them() -> None:
    odd = {"residual_multiplier": 0.3, "logits_scaling": 4.0, "attention_multiplier": 1.0, "no_rope_layers": [0, 0, 0],
           "num_experts": 8, "num_local_experts": 8}  # fmt: skip
    assert read_model_config(minimal(**odd)) == read_model_config(minimal())


def test_joined_matrices_are_split_before_anything_else(folders: dict[str, Path]) -> None:
    config = read_model_config(read_config(folders["phi3"]))
    for name, rows in (("self_attn.qkv_proj", [96, 32, 32]), ("mlp.gate_up_proj", [160, 160])):
        whole = torch.arange(float(sum(rows)))[:, None].expand(-1, 3)
        parts = dict(parts_of(config, f"layers.1.{name}.weight", whole))
        assert [len(part) for part in parts.values()] == rows and torch.equal(torch.cat([*parts.values()]), whole)
        letters = "qkv" if "qkv" in name else ("gate", "up")
        assert list(parts) == [f"layers.1.{name.partition('.')[0]}.{one}_proj.weight" for one in letters]
        of_rows = parts_of(config, f"layers.1.{name}.weight_scale", whole[:, :1])  # of fp8 weights
        assert [len(part) for _, part in of_rows] == rows
        for scale in (torch.ones(()), torch.ones(1)):
            assert all(part is scale for _, part in parts_of(config, f"layers.1.{name}.weight_scale", scale))
    blocks = dict(parts_of(config, "layers.1.self_attn.qkv_proj.weight_scale_inv", torch.arange(5.0)[:, None]))
    assert [part.flatten().tolist() for part in blocks.values()] == [[0.0, 1.0, 2.0], [3.0], [4.0]]
    with pytest.raises(ModelError, match=r"gate_up_proj.weight \[321, 3\] cannot be split into 160 \+ 160 rows"):
        list(parts_of(config, "layers.1.mlp.gate_up_proj.weight", torch.ones(321, 3)))


def test_a_matrix_that_is_there_joined_and_by_itself_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor.clone() for name, tensor in read_tensors(folders["phi3"])}
    tensors["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(32, 96)
    (tmp_path / "config.json").write_bytes((folders["phi3"] / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="twice: layers.2.self_attn.k_proj.weight$"):
        load(tmp_path)


def as_mixtral_names_them(name: str) -> str:
    """Return the name that Mixtral's files give a tensor of a mixture."""
    letters = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for ours, theirs in letters.items():
        name = re.sub(rf"mlp(\.experts\.\d+)\.{ours}", rf"block_sparse_moe\1.{theirs}", name)
    return name.replace("mlp.gate.", "block_sparse_moe.gate.")


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with the experts of a layer stacked, as transformers holds them."""
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in sorted({name.partition(".mlp.experts.")[0] for name in tensors if ".experts." in name}):
        count = len([name for name in tensors if re.fullmatch(rf"{layer}\.mlp\.experts\.\d+\.up_proj\.weight", name)])
        parts = {part: torch.stack([tensors[f"{layer}.mlp.experts.{i}.{part}_proj.weight"] for i in range(count)])
                 for part in ("gate", "up", "down")}  # fmt: skip
        made[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        made[f"{layer}.mlp.experts.down_proj"] = parts["down"]
    return made


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_the_three_layouts_of_experts_load_the_same(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    config = read_model_config(read_config(folders[name]))
    assert config.sparse == SPARSE[name]
    in_file = dict(read_tensors(folders[name]))
    apart = {one: part for whole, tensor in in_file.items() for one, part in parts_of(config, whole, tensor)}
    layouts = [apart, {as_mixtral_names_them(one): tensor for one, tensor in apart.items()}, stacked(apart)]
    assert in_file.keys() == layouts[name == "mixtral"].keys()
    marks = ("layers.1.mlp.experts.1.up_proj.weight", "layers.1.block_sparse_moe.experts.1.w3.weight",
             "layers.1.mlp.experts.gate_up_proj")  # fmt: skip
    want = load(folders[name]).state_dict()
    for number, (mark, tensors) in enumerate(zip(marks, layouts, strict=True)):
        assert [mark in layout for layout in layouts].count(True) == 1 and mark in tensors
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_bytes((folders[name] / "config.json").read_bytes())
        whole = {f"model.{one}": tensor.contiguous() for one, tensor in tensors.items()}
        save_file(whole, folder / "model.safetensors")
        got = load(folder).state_dict()
        assert got.keys() == want.keys() and all(torch.equal(got[one], want[one]) for one in want)


@pytest.mark.parametrize("shape", [(5, 96, 96), (6, 95, 96), (576, 96)])
def test_a_stack_of_experts_of_another_shape_is_named(shape: tuple[int, ...], folders: dict[str, Path]) -> None:
    config = read_model_config(read_config(folders["qwen3-moe"]))
    said = rf"gate_up_proj \[{', '.join(map(str, shape))}\] is no stack of the matrices of 6 experts"
    with pytest.raises(ModelError, match=said):
        parts_of(config, "layers.1.mlp.experts.gate_up_proj", torch.ones(shape))
    transposed = dict(parts_of(config, "layers.1.mlp.experts.gate_up_proj", torch.ones(6, 96, 100)))
    with pytest.raises(ModelError, match=r"wrong shapes: layers.1.mlp.experts.0.gate_proj.weight \[48, 100\]"):
        load_weights(published_tensors(Model.empty(config, torch.float32, CPU)), transposed.items())


def test_a_head_of_a_mixture_has_an_ordinary_mlp_whatever_its_file_copies(folders: dict[str, Path]) -> None:
    stated = read_config(folders["qwen3-moe"])
    target = read_model_config(stated)
    plain = target.plain()
    assert target.sparse and plain.sparse == () and plain.intermediate_size == 160 and plain.qk_norm
    # An EAGLE head's config.json is often its target's with some keys more.
    layer = layer_sizes(stated, {}, "midlayer.")
    assert layer.sparse == () and layer.intermediate_size == 160
    for config in (plain, layer):
        block = Block(config)
        assert not block.sparse and block.gate_up_proj.out_features == 320
    # and if its file has the experts of a mixture, that is said
    experts = {f"mlp.experts.0.{part}_proj.weight": torch.ones(1) for part in ("gate", "up", "down")}
    with pytest.raises(ModelError, match="unknown tensors: mlp.experts.0.gate_proj.weight"):
        load_weights(published_tensors(Block(layer)), experts.items())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen2", {"qkv_bias": False}, "unknown tensors: .*q_proj.bias"),
        ("qwen3", {"qk_norm": False}, "unknown tensors: .*q_norm"),
        ("qwen3", {"head_dim": 96 // 6}, "wrong shapes: .*self_attn.q_proj"),
        ("smollm2", {"tied": False}, "missing tensors: lm_head.weight"),
        ("llama3", {"layers": 4}, "missing tensors: layers.3"),
        ("llama3", {"layers": 2}, "unknown tensors: .*layers.2"),
        ("qwen3-moe", {"sparse": (0, 1, 2)}, "missing tensors: .*layers.0.mlp.experts.0.gate_proj.weight.* unknown"),
        ("qwen3-moe", {"sparse": (1,)}, "missing tensors: layers.2.mlp.gate_proj.weight.*unknown tensors: layers.2"),
        ("qwen3-moe", {"experts": 7}, "missing tensors: .*layers.1.mlp.experts.6.*wrong shapes: .*layers.1.mlp.gate"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    name: str, change: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ModelError, match=message):
        load(folders[name], **change)


def test_stored_head_of_a_tied_model_is_left_alone(folders: dict[str, Path]) -> None:
    model, stored = load(folders["llama3"], tied=True), hf_model("llama3")
    assert not torch.equal(stored.lm_head.weight, stored.model.embed_tokens.weight)
    assert torch.equal(model.embed_tokens.weight, stored.model.embed_tokens.weight)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_missing_part_of_a_fused_matrix_is_named(folders: dict[str, Path]) -> None:
    config = read_model_config(read_config(folders["llama3"]))
    model = Model.empty(config, torch.float32, CPU)
    tensors = read_tensors(folders["llama3"], wanted=lambda name: name != "layers.1.self_attn.k_proj.weight")
    with pytest.raises(ModelError, match="missing tensors: layers.1.self_attn.k_proj.weight$"):
        load_weights(published_tensors(model), tensors)


@pytest.mark.parametrize("name", ["llama3", "smollm2"])
def test_taps_are_the_streams_that_enter_layers(name: str, folders: dict[str, Path]) -> None:
    streams = hf_model(name)(text(), output_hidden_states=True).hidden_states
    model, width = load(folders[name]), FAMILIES[name].options["hidden_size"]
    taps = (2, FINAL, 0, 1)
    hidden, features = model(text(), torch.arange(TOKENS)[None], Causal(), taps)
    assert features is not None and features.shape == (1, TOKENS, 4 * width)
    parts = dict(zip(taps, features.split(width, dim=-1), strict=True))
    for tap in (0, 1, 2):
        torch.testing.assert_close(parts[tap], streams[tap], atol=BOUND, rtol=0)
        assert (parts[tap] - streams[tap + 1]).abs().max() > 100 * BOUND, "a layer's input, not its output"
    torch.testing.assert_close(parts[FINAL], streams[3], atol=BOUND, rtol=0)
    assert torch.equal(parts[FINAL], hidden)
    assert model(text(), torch.arange(TOKENS)[None], Causal())[1] is None


# ---- served: pages, chunks, a prefix, trees ----------------------------------------------------------------------

SERVED = {  # drafters that take part in a step in three ways
    "none": lambda model: Plain(),
    "oracle": lambda model: Oracle(truth_of(model), miss=0.1),  # mostly right: accepted rows are moved
    "eagle3-tree": lambda model: BeamDrafter(random_head(Eagle3Head, model, taps=(1, 2)), rounds=3, topk=3, nodes=8),
}
ASKED = tuple(range(0, VOCAB, 2))[:MAX_ASKED_IDS]


def assert_scores(scores: Sequence[Scored], tokens: Sequence[int], want: Tensor) -> None:
    """Raise AssertionError unless the log-probabilities of tokens and of ASKED are those in want [T, V]."""
    got = torch.tensor([[one.logprob, *one.ids] for one in scores])
    places = torch.tensor([[token, *ASKED] for token in tokens])
    torch.testing.assert_close(got, want.gather(1, places), atol=BOUND, rtol=0)


# Every family with trees that hold the truth, and those whose layers or matrices a plain step or a head could miss.
PLAIN, HEADED = ("llama-yarn", "smollm3", "mixtral"), ("granite", "smollm3", "phi3", "qwen2-windowed")


@pytest.mark.parametrize(
    ("name", "drafter"),
    [(name, "oracle") for name in NEW]
    + [(name, "none") for name in PLAIN]
    + [(name, "eagle3-tree") for name in HEADED],
)
def test_what_is_served_is_what_transformers_generates(name: str, drafter: str, folders: dict[str, Path]) -> None:
    model, other, prompt = load(folders[name]), hf_model(name), text()[0, :150].tolist()
    ids = torch.tensor([prompt])
    made = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
    whole, want = made[0].tolist(), other(made).logits[0].log_softmax(-1)
    with torch.inference_mode():
        scheduler = build(model, SERVED[drafter](model), chunk=50)
    told = Logprobs(ids=ASKED, start=0)
    first = request("first", prompt, logprobs=told)
    run(scheduler, [first])
    assert first.output_ids == whole[150:]
    assert_scores(first.prompt_scores, whole[1:150], want[:149])
    assert_scores(first.output_scores, whole[150:], want[149:-1])
    again = request("again", prompt, logprobs=replace(told, start=None))
    run(scheduler, [again])
    assert again.output_ids == whole[150:] and again.cached_tokens >= 128
    assert_scores(again.output_scores, whole[150:], want[149:-1])
    assert drafter != "oracle" or scheduler.metrics.verified.accept_length > 1.5


@pytest.mark.parametrize("name", ["llama-yarn", "smollm3", "granite"])
def test_every_node_of_a_tree_has_the_logits_of_its_own_path(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and experts are in test_windows.py and test_experts.py."""
    nodes_have_the_logits_of_their_own_paths(load(folders[name]), monkeypatch)


# ---- one model, many folders -------------------------------------------------------------------------------------


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config as transformers 4 wrote it."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope.get("rope_type") != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    return config


@pytest.mark.parametrize("name", FAMILIES)
def test_both_spellings_of_a_config_are_read_the_same(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((folders[name] / "config.json").read_text())
    assert "rope_parameters" in config and "dtype" in config
    (tmp_path / "config.json").write_text(json.dumps(old_spelling(config)))
    new, old = (read_model_config(read_config(folder)) for folder in (folders[name], tmp_path))
    assert new == old and new.dtype == "float32"
    assert (new.rope_scaling is not None) == (name in SCALED)


def test_frequencies_stay_fp32_in_a_bf16_model(folders: dict[str, Path]) -> None:
    model = load(folders["llama3"], torch.bfloat16).to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.frequencies, load(folders["llama3"]).frequencies)
    rope = model.rope(torch.tensor([[511]]))
    want = (511 * model.frequencies.double()).cos()
    torch.testing.assert_close(rope.cos[0, 0, 0, : want.numel()].double(), want, atol=4e-3, rtol=0)


def test_norm_in_bf16_rounds_where_transformers_rounds() -> None:
    ours, theirs = RMSNorm(64, 1e-5).bfloat16(), LlamaRMSNorm(64, 1e-5).bfloat16()
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours.weight.data = theirs.weight.data = weight
    x = (5 * torch.randn(40, 64, generator=torch.Generator().manual_seed(1))).bfloat16()
    assert torch.equal(ours(x), theirs(x)) and ours(x).dtype == torch.bfloat16


# ---- what is refused ---------------------------------------------------------------------------------------------


def minimal(**changes: Any) -> dict[str, Any]:
    """Return a Llama config in the normal form, changed."""
    config = shape(96, 6, 2, architectures=["LlamaForCausalLM"], rope_theta=1e4, rope_scaling=None)
    return {**config, **changes}


MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"architectures": None}, ["architectures", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["longrope", "text's length", "llama3, yarn"]),
        ({"rope_scaling": {"type": "yarn", "long_factor": [1.0]}}, ["longrope", "text's length"]),  # an early Phi-3
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "dynamic", "linear"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["yarn", "lacks original_max_position_embeddings"]),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, ["'ntk' not supported; supported"]),
        ({"rope_scaling": {**YARN, "factor": 0}}, ["'yarn': factor must be a number above 0, got 0"]),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, ["logits_scaling must be", "above 0, got 0"]),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": "x"}, ["residual_multiplier", "got 'x'"]),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, ["no_rope_layers has 2", "layers 3"]),
        ({**MOE, "num_experts": "8"}, ["num_experts must be a whole number from 0 to 1048576, got '8'"]),
        ({**MOE, "num_experts_per_tok": 0}, ["num_experts_per_tok must be a whole number of at least 1, got 0"]),
        ({**MOE, "num_experts_per_tok": 9}, ["num_experts_per_tok must be at most num_experts, 8, got 9"]),
        ({**MOE, "num_local_experts": 4}, ["num_experts 8 and num_local_experts 4 contradict each other"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads must divide num_attention_heads, 6, got 4"]),
        ({"head_dim": 7}, ["head_dim", "must be even, got 7"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings must be a whole number", "got null"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps must be a number above 0, got null"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers must be a whole number from 1 to 1000, got 1000000000"]),
        ({**MOE, "decoder_sparse_step": 0}, ["decoder_sparse_step must be a whole number of at least 1, got 0"]),
        ({**MOE, "moe_intermediate_size": -1}, ["moe_intermediate_size must be a whole number", "got -1"]),
        ({**MOE, "mlp_only_layers": "0,1"}, ["mlp_only_layers must be a list of whole numbers", "got '0,1'"]),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, ["Qwen2Moe", "another kind of mixture of experts"]),
    ],
)
def test_unsupported_models_are_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    read_model_config(minimal())
    with pytest.raises(ValueError) as caught:
        read_model_config(minimal(**changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3, 4]}, (1, 5)),
        ({"decoder_sparse_step": 9}, ()),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, (0, 1, 2, 3, 4, 5)),
        ({"num_experts": 0}, ()),
    ],
)
def test_which_layers_are_sparse_is_as_in_transformers(changes: dict[str, Any], sparse: tuple[int, ...]) -> None:
    given = {**MOE, "num_hidden_layers": 6, "moe_intermediate_size": 16, **changes}
    assert read_model_config(minimal(**given)).sparse == sparse
    options = shape(96, 6, 2, **{key: value for key, value in given.items() if value is not None})
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**options))
    assert tuple(i for i, layer in enumerate(other.model.layers) if hasattr(layer.mlp, "experts")) == sparse


KINDS = {"full": "full_attention", "slides": "sliding_attention"}
WINDOWED = {  # architecture: its class, and keys with the layers of six that slide then
    "MistralForCausalLM": (MistralConfig, [({}, range(6)), ({"use_sliding_window": False}, range(6)),
                                           ({"sliding_window": None}, ())]),
    "MixtralForCausalLM": (MixtralConfig, [({}, range(6)), ({"sliding_window": None}, ())]),
    "Phi3ForCausalLM": (Phi3Config, [({}, range(6)), ({"sliding_window": None}, ())]),
    "Qwen2ForCausalLM": (Qwen2Config, [
        ({}, ()), ({"use_sliding_window": True}, ()),
        ({"use_sliding_window": True, "max_window_layers": 4}, (4, 5)),
        ({"use_sliding_window": True, "layer_types": [KINDS["slides"], KINDS["full"]] * 3}, (0, 2, 4)),
    ]),
    "Qwen3ForCausalLM": (Qwen3Config, [({"use_sliding_window": True, "max_window_layers": 0}, range(6))]),
    "Qwen3MoeForCausalLM": (Qwen3MoeConfig, [({}, ()), ({"use_sliding_window": True}, range(6))]),
    "SmolLM3ForCausalLM": (SmolLM3Config, [({}, ()), ({"use_sliding_window": True}, (3,))]),
    "GraniteForCausalLM": (GraniteConfig, [({"use_sliding_window": True}, ())]),
    "LlamaForCausalLM": (LlamaConfig, [({"use_sliding_window": True}, ())]),
}  # fmt: skip


@pytest.mark.parametrize("architecture", WINDOWED)
def test_which_layers_have_a_sliding_window_is_as_in_transformers(architecture: str) -> None:
    kind, cases = WINDOWED[architecture]
    for changes, sliding in cases:
        options = shape(96, 6, 2, **{"num_hidden_layers": 6, "sliding_window": 128, **changes})
        given = read_model_config({"architectures": [architecture], **options})
        assert given.sliding == tuple(sliding) and (given.sliding_window == 128 or not given.sliding)
        with torch.device("meta"):
            attentions = [layer.self_attn for layer in AutoModelForCausalLM.from_config(kind(**options)).model.layers]
        if hasattr(attentions[0], "sliding_window"):
            assert [layer.sliding_window for layer in attentions] == [
                128 if layer in given.sliding else None for layer in range(6)
            ]
        elif kind in (GraniteConfig, LlamaConfig):
            assert given.sliding == ()
        else:  # one mask for all layers, by the window alone
            assert bool(given.sliding) == (kind(**options).sliding_window is not None)


def test_a_window_acts_where_it_is_shorter_than_the_context() -> None:
    mistral = read_model_config(minimal(architectures=["MistralForCausalLM"], sliding_window=128))
    assert mistral.windows(129) == (128,) * 3 and mistral.windows(128) == ()
    qwen2 = replace(mistral, sliding=(1,))
    assert qwen2.windows(512) == (512, 128, 512) and qwen2.plain().windows(512) == ()
    assert _context_length(Config(model_path="m"), mistral) == 512


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 0}, {"sliding_window": "4k"}, {"max_window_layers": -1},
                {"layer_types": [KINDS["full"]]}, {"layer_types": ["chunked_attention"] * 3}],
)  # fmt: skip
def test_a_window_that_cannot_be_read_is_named(changes: dict[str, Any]) -> None:
    given = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 0, **changes}
    (key, value), *_ = changes.items()
    with pytest.raises(ValueError, match=rf"^config.json: {key} must .*, got {re.escape(repr(value))}$"):
        read_model_config(minimal(**given))


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads"])
def test_a_config_without_a_number_that_every_model_has_is_one_sentence(key: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8,
              "num_hidden_layers": 1, "num_attention_heads": 1}  # fmt: skip
    assert read_model_config(config).vocab_size == 9
    del config[key]
    with pytest.raises(ValueError, match=f"^config.json lacks {key}, which every LlamaForCausalLM has$"):
        read_model_config(config)


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="--context-length 513.*512"):
        _context_length(Config(model_path="m", context_length=513), read_model_config(minimal()))


# ---- packed linear layers ----------------------------------------------------------------------------------------

needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="this PyTorch has no oneDNN")


def skip_what_cannot_be_packed(dtype: torch.dtype) -> None:
    """Skip a test whose weights oneDNN refuses on this processor."""
    if not can_pack(dtype):
        pytest.skip(f"oneDNN packs no weights in {dtype} on this processor")


@needs_packing
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear_is_a_linearlayer_sizes(dtype: torch.dtype, bound: float, bias: bool) -> None:
    skip_what_cannot_be_packed(dtype)
    torch.manual_seed(0)
    linear = nn.Linear(72, 100, bias=bias).to(dtype)
    layer = PackedLinear(linear)
    for rows in ((1, 1), (3, 1), (2, 8), (1, 65), (1, 512), (5,)):
        x = torch.randn(*rows, 72, dtype=dtype)
        want = F.linear(x.float(), linear.weight.float(), None if linear.bias is None else linear.bias.float())
        got = layer(x)
        assert got.shape == (*rows, 100) and got.dtype == dtype
        assert (got.float() - want).abs().max() < bound * want.abs().max()


@needs_packing
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_one_row_is_multiplied_by_the_weight_as_it_was_in_compiled_code(dtype: torch.dtype, bias: bool) -> None:
    """A strided row is read by its strides, and two rows go by the packed weight."""
    skip_what_cannot_be_packed(dtype)
    torch.manual_seed(0)
    linear, norm = nn.Linear(72, 100, bias=bias).to(dtype), RMSNorm(72, 1e-5).to(dtype)
    layer = PackedLinear(linear, keep=True)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return lookup_backend("inductor")(graph, inputs)

    def run(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        got = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(x)
        want = function(x)
        assert got.shape == want.shape and got.dtype == dtype
        assert (got - want).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-7) * want.abs().max()
        return got

    both, alone = lambda x: layer(norm(x)), lambda x: layer(x)
    with torch.inference_mode():
        run(both, torch.randn(1, 1, 72).to(dtype))
        run(alone, torch.randn(1, 144)[:, ::2].to(dtype))
        run(both, torch.randn(1, 2, 72).to(dtype))
        of_any_size = torch.randn(1, 3, 72).to(dtype)
        torch._dynamo.maybe_mark_dynamic(of_any_size, [1])
        run(both, of_any_size)
    asked = ["packed_linear" in str(graph.graph) for graph in graphs]
    assert asked == [False, False, True, True], "one row, a strided one, two, three of any number"


@needs_packing
def test_layers_keep_their_weights_where_a_machine_has_room_and_an_lm_head_its_embedding(
    folders: dict[str, Path],
) -> None:
    model = load(folders["smollm2"])
    block_bytes = sum(parameter.nbytes for parameter in model.layers.parameters())
    assert room_for_both(block_bytes, 8 * block_bytes) and not room_for_both(block_bytes, 8 * block_bytes - 8)
    weight = model.layers[1].down_proj.weight.clone()
    pack_linears(model, keep=True)
    assert torch.equal(model.layers[1].down_proj.kept, weight)
    assert model.lm_head.kept.data_ptr() == model.embed_tokens.weight.data_ptr()


@needs_packing
@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN takes no bfloat16 here")
def test_an_lm_head_multiplies_one_row_in_a_loop_that_does_not_round_and_two_packed() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear = nn.Linear(72, 96, bias=False).to(torch.bfloat16)  # 72 inputs do not fill the template's blocks
    head = PackedHead(linear, keep=True)
    run = torch.compile(lambda x: head(x), fullgraph=True, dynamic=False)
    with torch.inference_mode():
        x = torch.randn(1, 2, 72).to(torch.bfloat16)
        one, two = run(x[:, :1]), run(x)
        exact = x.double() @ linear.weight.double().T
        assert one.dtype == torch.float32 and (one - exact[:, :1]).abs().max() < 1e-5
        assert two.dtype == torch.bfloat16 and torch.equal(two, head(x))


@needs_packing
@pytest.mark.parametrize("name", ["qwen2", "smollm2"])
def test_packed_model_gives_the_same_logits_and_keeps_its_embedding(name: str, folders: dict[str, Path]) -> None:
    model = load(folders[name])
    want, embedding = logits_of(model, text()), model.embed_tokens.weight.clone()
    pack_linears(model)
    assert not [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert isinstance(model.lm_head, PackedLinear) and isinstance(model.layers[2].down_proj, PackedLinear)
    assert (logits_of(model, text()) - want).abs().max() < BOUND
    assert torch.equal(model.embed_tokens.weight, embedding)


@needs_packing
def test_one_compiled_graph_serves_packed_layers_of_one_shape() -> None:
    layers = [PackedLinear(nn.Linear(16, 24)) for _ in range(3)]
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(PackedLinear.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    x = torch.randn(4, 16)
    with torch.inference_mode():
        outs = [run(layer, x) for layer in layers]
        assert all(torch.equal(out, layer(x)) for out, layer in zip(outs, layers, strict=True))
    assert not torch.equal(outs[0], outs[1])
    assert counters["stats"]["unique_graphs"] == 1


@needs_packing
def test_packed_weight_goes_with_its_module() -> None:
    before = set(onednn._weights)
    layer = PackedLinear(nn.Linear(8, 8))
    assert len(onednn._weights) == len(before) + 1
    del layer
    assert set(onednn._weights) == before
