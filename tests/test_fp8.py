"""fp8: rows become the nearest numbers, products are those of a plain reference, published folders are read or refused.

PyTorch's product of fp8 rows has a slow CPU kernel, so the layers that are for CUDA run here as they are. The number
format is written down once more below, from its definition, and is what PyTorch's conversions are compared with.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_heads
import test_standalone
import torch
from exactness import CPU, random_linear, tiny_config
from safetensors.torch import load_file, save_file
from test_cuda_path import NoWaiting
from test_model import as_mixtral_names_them
from torch import Tensor, nn

import minispec.load.build as build_module
from minispec.config import Config
from minispec.cuda.fp8 import FP8, Fp8Linear, check_fp8, rowwise, use_fp8
from minispec.llm import LLM
from minispec.load.architectures import read_model_config
from minispec.load.build import choose_device, load_model
from minispec.load.fp8_weights import read_weights
from minispec.load.heads import load_head
from minispec.load.published import published_tensors
from minispec.load.tree_shape import tree_shape
from minispec.model import Model, ModelConfig
from minispec.model_config import ModelError
from minispec.request import SamplingParams

# ---- the format and the arithmetic, written once more ------------------------------------------------------------

# The finite numbers from 0 on, by their codes: eight subnormals, then 4 bits of exponent and 3 of mantissa; the last
# code is NaN.
NUMBERS = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]


def lacking() -> str:
    """Return why this build of PyTorch cannot multiply fp8 rows on a CPU, as 2.11 cannot; nothing if it can."""
    try:
        check_fp8("--quantization", torch.bfloat16, CPU)
    except ValueError as error:
        return str(error)
    return ""


on_a_cpu = pytest.mark.skipif(bool(why := lacking()), reason=why)


def nearest(x: np.ndarray) -> np.ndarray:
    """Return the nearest fp8 number of each of x, fp64; of two as near the one with the even code."""
    numbers = np.array(NUMBERS)
    high = np.minimum(np.searchsorted(numbers, np.abs(x)), len(numbers) - 1)
    low = np.maximum(high - 1, 0)
    below, above = np.abs(x) - numbers[low], numbers[high] - np.abs(x)
    code = np.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)
    return np.copysign(numbers[code], x)


def rows_of(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return what `rowwise` returns, both parts fp64."""
    wide = x.float().numpy()
    scale = np.maximum(np.abs(wide).max(-1, keepdims=True) / np.float32(448), np.float32(2.0**-126))
    return nearest((wide / scale).astype(np.float64)), scale.astype(np.float64)


def random_rows(dtype: torch.dtype) -> Tensor:
    """Return rows [200, 48] from 1e-40 to 1e30, each over many powers of two."""
    torch.manual_seed(0)
    x = torch.randn(200, 48) * 2.0 ** torch.randint(-24, 1, (200, 48)) * 10.0 ** torch.linspace(-40, 30, 200)[:, None]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_become_the_nearest_numbers_of_their_scale(dtype: torch.dtype) -> None:
    assert len(NUMBERS) == 127 and NUMBERS[-1] == 448 and NUMBERS == sorted(NUMBERS)
    x = random_rows(dtype)
    x[7], x[8, 0] = 0, 448 * 1.5
    x[8, 1:20] = torch.tensor(NUMBERS[40:59]) * 1.5  # numbers of this row's scale, between which lie the next
    x[8, 20:40] = (torch.tensor(NUMBERS[60:80]) + torch.tensor(NUMBERS[61:81])) / 2 * 1.5
    numbers, scale = rowwise(x)
    want_numbers, want_scale = rows_of(x)
    assert numbers.dtype == FP8 and scale.dtype == torch.float32 and scale.shape == (200, 1)
    assert np.array_equal(scale.double().numpy(), want_scale)
    assert np.array_equal(numbers.double().numpy(), want_numbers)
    assert not numbers[7].double().any() and (numbers[20:].double().abs().amax(-1) == 448).all()


@on_a_cpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_never_becomes_one(bad: float) -> None:
    x = torch.ones(3, 16)
    x[1, 5] = bad
    assert rowwise(x)[0].double().isnan()[1, 5]
    out = Fp8Linear(random_linear(16, 32))(x.bfloat16())
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()
    given = random_linear(16, 32)
    given.weight[3, 7] = bad
    out = Fp8Linear(given)(torch.ones(2, 16).bfloat16())
    assert out[:, 3].isnan().all() and out.isnan().sum() == 2


def check_products(device: torch.device, sizes: tuple[tuple[int, int], ...]) -> None:
    """Compare layers of these sizes with exact products of the same fp8 numbers, and these with the reference's.

    CUDA divides by 448 by a product with its inverse, so a scale may have another last bit and a number in the middle
    of two become the other one. A CPU adds in fp32. Hopper's tensor cores keep 14 bits (DeepSeek-V3, arXiv 2412.19437,
    3.3.2); sums were off by up to 2^-14 of their terms on an H200.
    """
    rounding, step = (2.0**-20, 0.0) if device == CPU else (2.0**-13, 2.0**-3)
    for size, features in sizes:
        for bias in (False, True):
            given = random_linear(size, features, bias=bias)
            b, scale_b = rows_of(given.weight)
            added = given.bias.clone() if bias else torch.zeros(features, dtype=torch.bfloat16)
            made = Fp8Linear(given).to(device)  # given's bias moves with it
            for rows in (1, 2, 17, 130):
                x = torch.randn(rows, size).bfloat16() * 10.0 ** torch.randint(-3, 3, (rows, 1))
                a, scale_a = (part.cpu().double().numpy() for part in rowwise(x.to(device)))
                want_a, want_scale = rows_of(x)
                assert (np.abs(a - want_a) <= np.maximum(step * np.abs(want_a), 2.0**-6 * step)).all()
                assert (np.abs(scale_a - want_scale) <= 2.0**-20 * step * want_scale).all()
                scales = scale_a * scale_b.T
                want, terms = (torch.from_numpy(part * scales) for part in (a @ b.T, np.abs(a) @ np.abs(b).T))
                got = made(x.to(device)).cpu()
                exact = want + added.double()
                low, high = ((exact + sign * rounding * terms).bfloat16() for sign in (-1, 1))
                worst = f"off by up to {((got - exact).abs() / terms).max():.2e} of the sum of a product's terms"
                assert got.dtype == torch.bfloat16, got.dtype
                assert ((low <= got) & (got <= high)).all(), (size, features, rows, bias, worst)


@on_a_cpu
def test_products_are_those_of_the_reference() -> None:
    check_products(CPU, ((64, 32), (16, 16), (576, 960)))


@pytest.mark.cuda
def test_products_are_those_of_the_reference_on_cuda() -> None:
    check_products(torch.device("cuda"), ((64, 32), (16, 16), (576, 960), (4096, 6144)))


@on_a_cpu
def test_rows_may_lie_anyhow_and_nobody_waits() -> None:
    made = Fp8Linear(random_linear(64, 32, bias=True))
    x = torch.randn(3, 5, 64).bfloat16()
    flat = made(x.view(15, 64))
    assert torch.equal(made(x), flat.view(3, 5, 32)) and torch.equal(made(x[1, 2]), flat[7])
    assert torch.equal(made(x.transpose(0, 1)), flat.view(3, 5, 32).transpose(0, 1))
    assert torch.equal(made(x.view(15, 64).t().contiguous().t()), flat), "columns that lie together"
    with NoWaiting():
        made(x)


def test_a_layer_that_gets_memory_has_scales_of_one() -> None:
    with torch.device("meta"):
        made = Fp8Linear(nn.Linear(64, 32, dtype=torch.bfloat16))
    assert made.to_empty(device="cpu").one == 1 and made.weight.shape == (32, 64)
    assert [name for name, _ in made.named_parameters()] == ["weight", "weight_scale", "bias"], "what loaders fill"


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_a_cpu), pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_compiled_layer_gives_the_same(device: str) -> None:
    made = Fp8Linear(random_linear(64, 32, bias=True)).to(device)
    x = torch.randn(5, 64).bfloat16()
    x[1], x[2, 3] = 0, float("nan")
    with torch.inference_mode():
        got = torch.compile(Fp8Linear.forward, fullgraph=True, dynamic=False)(made, x.to(device)).cpu()
        want = made(x.to(device)).cpu()
    assert got[2].isnan().all() and not got[1].isnan().any()
    fine = [0, 1, 3, 4]
    assert torch.equal(got[fine], want[fine]) if device == "cpu" else torch.allclose(got[fine], want[fine], 0.02, 0.02)


# ---- published folders -------------------------------------------------------------------------------------------

SHAPE = replace(
    tiny_config(), hidden_size=160, intermediate_size=288, layers=2, heads=10, kv_heads=5, head_dim=16, qkv_bias=True,
    architecture="Qwen2ForCausalLM",
)  # fmt: skip
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 160, "intermediate_size": 288, "num_hidden_layers": 2,
    "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 16, "vocab_size": 61, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256, "torch_dtype": "bfloat16",
}  # fmt: skip
SPARSE = replace(
    SHAPE, architecture="Qwen3MoeForCausalLM", qkv_bias=False, qk_norm=True, sparse=(1,), experts=4,
    experts_per_token=2, expert_size=144, norm_topk_prob=False,
)  # fmt: skip
OF_EXPERTS = {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
              "moe_intermediate_size": 144, "decoder_sparse_step": 2}  # fmt: skip
IGNORED = ("layers.0.self_attn.k_proj.weight", "layers.1.self_attn.o_proj.weight")  # as modules_to_not_convert lists


def compressed(strategy: str = "channel", **changes: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors as llm-compressor writes it; changes are of the weights."""
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
        "observer": "minmax", "strategy": strategy, "symmetric": True, "type": "float", **changes,
    }  # fmt: skip
    activations = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group}, "format": "float-quantized", "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


BLOCKWISE = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
STATIC = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
FORMATS: dict[str, tuple[dict[str, Any], str, Callable[[int, int], tuple[int, ...]]]] = {
    # by name: quantization_config, name of the scale, shape of the scale for a weight [N, K]
    "compressed-tensors, channels": (compressed(), "weight_scale", lambda n, k: (n, 1)),
    "compressed-tensors, tensors": (compressed("tensor"), "weight_scale", lambda n, k: (1,)),
    "compressed-tensors, blocks": (compressed("block", block_structure=[64, 96]), "weight_scale",
                                   lambda n, k: (-(-n // 64), -(-k // 96))),
    "fp8, blocks": (BLOCKWISE, "weight_scale_inv", lambda n, k: (-(-n // 128), -(-k // 128))),
    "fp8, static": (STATIC, "weight_scale", lambda n, k: ()),
}  # fmt: skip
BLOCK = {"compressed-tensors, blocks": (64, 96), "fp8, blocks": (128, 128)}


class Written:
    """A folder of a published format: what is in its files, and what its weights stand for."""

    def __init__(self, folder: Path, name: str, shape: ModelConfig = SHAPE, config: dict[str, Any] = CONFIG) -> None:
        """config: what config.json says of a model of this shape."""
        torch.manual_seed(len(name))
        self.shape, self.config = shape, config
        stated, suffix, shape_of = FORMATS[name]
        self.folder, self.name, self.files, self.meant = folder, name, {}, {}
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in published_tensors(Model(shape)).items()}
        for tensor, shape in shapes.items():
            value = torch.randn(shape).bfloat16()
            spelled = tensor if tensor.startswith("lm_head") else f"model.{tensor}"
            self.files[spelled], self.meant[tensor] = value, value.double()
            if "_proj.weight" not in tensor or tensor in IGNORED:
                continue
            numbers, scale = (torch.randn(shape) * 30).to(FP8), torch.rand(shape_of(*shape)) / 100 + 0.001
            scale = scale.bfloat16() if "inv" in suffix else scale
            self.files[spelled], self.files[spelled.replace("weight", suffix)] = numbers, scale
            if name == "fp8, static":
                self.files[spelled.replace("weight", "input_scale")] = torch.tensor(0.5)
            self.meant[tensor] = numbers.double() * self.stretched(scale, shape, BLOCK.get(name))
        self.write(stated)

    @staticmethod
    def stretched(scale: Tensor, shape: tuple[int, int], block: tuple[int, int] | None) -> Tensor:
        """Return a scale for every weight, fp64."""
        if block is None:
            return scale.double().reshape(-1, 1).expand(shape)
        rows, columns = (torch.arange(size) // step for size, step in zip(shape, block, strict=True))
        return scale.double()[rows[:, None], columns]

    def write(self, stated: Any) -> None:
        """Write config.json and two shards; a weight and its scale are never in the same one."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps({**self.config, "quantization_config": stated}))
        shards = {"a.safetensors": {}, "b.safetensors": {}}
        for name, tensor in self.files.items():
            shards["ab"[name.endswith("weight") == ("up_proj" in name)] + ".safetensors"][name] = tensor
        for file, tensors in shards.items():
            save_file(tensors, self.folder / file)
        index = {name: file for file, tensors in shards.items() for name in tensors}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    def load(self, dtype: torch.dtype = torch.bfloat16, quantization: str | None = None) -> Model:
        """Load the folder as `LLM` does, on the CPU."""
        config = Config(model_path=str(self.folder), quantization=quantization)
        with torch.inference_mode():
            return load_model(config, self.shape, self.folder, dtype, CPU)


@pytest.fixture(params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    """A folder of each format."""
    return Written(tmp_path / "published", request.param)


def test_a_checkpoint_s_weights_are_numbers_times_scales(written: Written) -> None:
    shape = read_model_config(build_module.read_config(written.folder))
    assert (shape.hidden_size, shape.qkv_bias) == (SHAPE.hidden_size, True)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = published_tensors(written.load(dtype))
        assert tensors.keys() == written.meant.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, written.meant[name].float().to(dtype)), name


@pytest.mark.parametrize("spelling", [lambda name: name, as_mixtral_names_them], ids=["Qwen3-MoE", "Mixtral"])
@pytest.mark.parametrize("name", ["fp8, blocks", "compressed-tensors, tensors"])
def test_a_checkpoint_s_experts_are_multiplied_out(name: str, spelling: Callable[[str], str], tmp_path: Path) -> None:
    made = Written(tmp_path / "published", name, SPARSE, OF_EXPERTS)
    made.files = {spelling(one): tensor for one, tensor in made.files.items()}
    made.write(FORMATS[name][0])
    shape = read_model_config(build_module.read_config(made.folder))
    assert (shape.sparse, shape.experts, shape.expert_size) == (SPARSE.sparse, SPARSE.experts, SPARSE.expert_size)
    assert made.files[f"model.{spelling('layers.1.mlp.experts.3.up_proj.weight')}"].dtype == FP8
    tensors = published_tensors(made.load())
    assert tensors.keys() == made.meant.keys()
    assert all(torch.equal(tensor, made.meant[one].float().bfloat16()) for one, tensor in tensors.items())


def test_with_fp8_a_checkpoint_keeps_its_weights_where_it_can(
    written: Written, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="minispec"):
        model = written.load(quantization="fp8")
    tensors = published_tensors(model)
    kinds = {name: type(part) for name, part in model.named_modules() if hasattr(part, "bias")}
    plain = ["layers.0.qkv_proj", "layers.1.o_proj", "lm_head"]
    assert [name for name, kind in kinds.items() if kind is nn.Linear] == plain
    assert [kinds[name] for name in kinds if name not in plain] == [Fp8Linear] * 6
    for name, meant in written.meant.items():
        if f"{name}_scale" not in tensors:
            assert torch.equal(tensors[name], meant.float().bfloat16()), name
            continue
        numbers, scale = tensors[name].double(), tensors[f"{name}_scale"].double()
        published = written.files[f"model.{name}"].double()
        if written.name not in BLOCK:
            assert torch.equal(numbers, published) and torch.equal(numbers * scale, meant), name
        else:
            want_numbers, want_scale = rows_of(meant)
            assert np.array_equal(numbers, want_numbers) and np.array_equal(scale, want_scale), name
    said = "quantized again with one for each channel" if written.name in BLOCK else "are kept"
    assert said in caplog.text
    (line,) = [r.message for r in caplog.records if r.message.startswith("fp8 weights in")]
    assert "in 6 linear layers of the Model" in line and "so do layers.0.qkv_proj, layers.1.o_proj, whose" in line


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_joined_matrices_are_split_with_their_scales(quantization: str | None, tmp_path: Path) -> None:
    written = Written(tmp_path, "compressed-tensors, channels")
    apart = published_tensors(written.load(quantization=quantization))
    for layer, part, names in ((1, "self_attn.qkv", "qkv"), (0, "mlp.gate_up", ("gate", "up")),
                               (1, "mlp.gate_up", ("gate", "up"))):  # fmt: skip
        stem = f"model.layers.{layer}.{part.partition('.')[0]}"
        for kind in ("weight", "weight_scale"):
            rows = [written.files.pop(f"{stem}.{name}_proj.{kind}") for name in names]
            written.files[f"model.layers.{layer}.{part}_proj.{kind}"] = torch.cat(rows)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    written.write(FORMATS[written.name][0])
    joined = published_tensors(written.load(quantization=quantization))
    assert apart.keys() == joined.keys()
    assert [name for name, tensor in apart.items() if not torch.equal(tensor, joined[name])] == []
    assert any(tensor.dtype == FP8 for tensor in joined.values()) == (quantization == "fp8")


def test_a_plain_checkpoint_is_quantized_on_its_way_in(tmp_path: Path) -> None:
    written = Written(tmp_path, "fp8, blocks")
    written.files = {f"model.{name}": tensor.float() for name, tensor in written.meant.items() if "lm_head" not in name}
    written.files["lm_head.weight"] = written.meant["lm_head.weight"].float()
    written.write(None)
    model = written.load(quantization="fp8")
    for name, tensor in published_tensors(model).items():
        if name.endswith("proj.weight"):
            assert np.array_equal(tensor.double().numpy(), rows_of(written.meant[name])[0]), name
    assert [name for name, part in model.named_modules() if isinstance(part, nn.Linear)] == ["lm_head"]
    dummy = Config(model_path=str(tmp_path), load_format="dummy", quantization="fp8")
    with torch.inference_mode():
        model = load_model(dummy, SHAPE, tmp_path, torch.bfloat16, CPU)
    assert sum(isinstance(part, Fp8Linear) for part in model.modules()) == 8


def test_a_scale_is_wanted_where_its_weight_is_and_may_be_a_power_of_two(tmp_path: Path) -> None:
    written = Written(tmp_path, "fp8, blocks")
    for name in [name for name in written.files if name.endswith("scale_inv")]:  # as scale_fmt ue8m0 says
        written.files[name] = written.files[name].float().to(torch.float8_e8m0fnu)
    written.write(BLOCKWISE | {"scale_fmt": "ue8m0"})
    left_out = "layers.0.mlp.up_proj.weight"
    read = dict(read_weights(tmp_path, wanted=lambda name: name != left_out))
    assert written.meant.keys() - read.keys() == {left_out} and read.keys() <= written.meant.keys()
    down = "layers.0.mlp.down_proj.weight"
    numbers, scale = (written.files[f"model.{down}{end}"].double() for end in ("", "_scale_inv"))
    assert torch.equal(read[down][128:, 256:].double(), numbers[128:, 256:] * scale[1, 2])


def test_a_layer_of_another_size_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with torch.inference_mode(), caplog.at_level(logging.INFO, logger="minispec"):
        model = Model.empty(replace(SHAPE, layers=1, intermediate_size=296), torch.bfloat16, CPU, use_fp8)
    left = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    assert left == ["layers.0.down_proj", "lm_head"], "296 inputs are too odd, 592 outputs are not"
    assert "stay in bfloat16; so do layers.0.down_proj, whose sizes are no multiples of 16" in caplog.text
    tied = Model.empty(replace(SHAPE, tied=True), torch.bfloat16, CPU, use_fp8)
    assert tied.lm_head.weight is tied.embed_tokens.weight and tied.embed_tokens.weight.dtype == torch.bfloat16


def test_a_head_is_read_from_fp8_and_turned_into_fp8(tmp_path: Path) -> None:
    target = test_heads.make_target()
    form = test_heads.eagle3_official(target)
    plain = load_head(test_heads.write(tmp_path / "plain", form), target)
    stated = {**form.config, "quantization_config": compressed()}
    tensors = {name: tensor for name, tensor in form.tensors.items() if "_proj" not in name}
    for name in form.tensors.keys() - tensors.keys():
        numbers, scale = rowwise(form.tensors[name])
        tensors |= {name: numbers, f"{name}_scale": scale}
    head = load_head(test_heads.write(tmp_path / "fp8", replace(form, config=stated, tensors=tensors)), target)
    ours, theirs = head.layer.qkv_proj.weight, plain.layer.qkv_proj.weight
    numbers, scale = rowwise(theirs)
    assert torch.equal(ours, numbers.float() * scale) and not torch.equal(ours, theirs)
    with torch.inference_mode():
        use_fp8(head)
    left = {name for name, part in head.named_modules() if isinstance(part, nn.Linear)}
    assert left == {"lm_head", "layer.down_proj"}, "its 40 inputs are no multiple of 16"
    assert torch.equal(head.layer.qkv_proj.weight.float(), numbers.float())


# ---- what is refused ---------------------------------------------------------------------------------------------

INT4 = compressed("group", type="int", num_bits=4, group_size=128) | {"format": "pack-quantized"}


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "quant_method 'gptq'"),
        ({"quant_algo": "FP8"}, "quant_method None"),
        ("int4", "'int4'"),
        (INT4, "weights type 'int'"),
        (compressed(type="int"), "weights type 'int'"),
        (compressed(num_bits=4), "weights num_bits 4"),
        (compressed("group"), "weights strategy 'group'"),
        (compressed(symmetric=False), "weights symmetric False"),
        (compressed(actorder="group"), "weights actorder 'group'"),
        (compressed("block"), "block_structure None"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "a kv_cache_scheme"),
        (compressed() | {"format": "pack-quantized"}, "format 'pack-quantized'"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config format 'sparse-24"),
        (compressed() | {"transform_config": {"R1": {}}}, "transform_config {'R1'"),
        (compressed() | {"config_groups": {}}, "no config_groups"),
        (BLOCKWISE | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (BLOCKWISE | {"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        (STATIC | {"kv_cache_scheme": "static"}, "a kv_cache_scheme"),
    ],
    ids=str,
)
def test_another_scheme_is_refused_by_its_name(stated: Any, said: str, tmp_path: Path) -> None:
    written = Written(tmp_path, "fp8, blocks")
    written.write(stated)
    line = f"^.*config.json has a quantization_config with {said}.*, which is not supported; supported: quant_method"
    with pytest.raises(ModelError, match=line):
        written.load()
    with pytest.raises(ModelError, match=line):
        written.load(quantization="fp8")


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (f"{UP}_scale_inv", None, "fp8 weight and its scale go together: layers.1.mlp.up_proj has a weight only"),
        (UP, None, "fp8 weight and its scale go together: layers.1.mlp.up_proj has a scale only"),
        (
            f"{UP}_scale_inv",
            torch.ones(288, 1),
            r"layers.1.mlp.up_proj.weight \[288, 160\] has the shape \[288, 1\]; "
            r"expected is \[3, 2\]",
        ),
        (UP, torch.ones(160, 160).to(FP8), r"\[160, 160\] has the shape \[3, 2\]; expected is \[2, 2\]"),
        (UP, torch.ones(288, 160).to(torch.float8_e5m2), "up_proj.weight is float8_e5m2; supported .*float8_e4m3fn"),
        (NORM.replace("weight", "bias"), torch.ones(160).to(FP8), "norm.bias is float8_e4m3fn; supported are weights"),
        ("model.layers.0.self_attn.k_scale", torch.ones(1), "unknown tensors: layers.0.self_attn.k_scale"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_tensors_that_do_not_go_together_are_named(name: str, tensor: Tensor | None, said: str, tmp_path: Path) -> None:
    written = Written(tmp_path, "fp8, blocks")
    written.files[name] = tensor
    if tensor is None:
        del written.files[name]
    written.write(BLOCKWISE)
    for quantization in (None, "fp8"):
        with pytest.raises(ModelError, match=said):
            written.load(quantization=quantization)


def test_fp8_tensors_need_a_quantization_config(tmp_path: Path) -> None:
    written = Written(tmp_path, "fp8, static")
    written.write(None)
    with pytest.raises(ModelError, match="proj.weight is float8_e4m3fn; supported .* with a quantization_config in"):
        written.load()


# ---- flags -------------------------------------------------------------------------------------------------------


@on_a_cpu
def test_fp8_is_for_cuda_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"model_path": "m", "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "h"}
    draft = {**head, "speculative_draft_model_quantization": "fp8"}
    with pytest.raises(ValueError, match="^--quantization fp8 is for CUDA, and the device is cpu.*int8 .* a CPU.*$"):
        choose_device(Config(quantization="fp8", device="cpu"))
    with pytest.raises(ValueError, match="^--speculative-draft-model-quantization fp8 is .* a CPU keeps its weights"):
        choose_device(Config(device="cpu", **draft))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(Config(quantization="fp8")).type == choose_device(Config(**draft)).type == "cuda"
    check_fp8("--quantization", torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="^--quantization fp8 computes in bfloat16, and --dtype gives float16; "):
        check_fp8("--quantization", torch.float16, CPU)
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(ValueError, match="^--quantization fp8: this build of PyTorch .* no product of fp8 rows .*$"):
        check_fp8("--quantization", torch.bfloat16, CPU)


def test_a_drafter_follows_its_target_to_fp8_unless_told_otherwise() -> None:
    def draft(target: str | None, own: str | None, algorithm: str = "EAGLE3") -> str | None:
        return Config(quantization=target, speculative_draft_model_quantization=own,
                      speculative_algorithm=algorithm).draft_quantization  # fmt: skip

    assert draft("fp8", None) == draft("fp8", "fp8") == draft(None, "fp8") == draft("int8", "fp8") == "fp8"
    assert draft("fp8", "unquant") is draft("int8", None) is draft(None, None) is draft("int8", "unquant") is None
    assert draft("fp8", None, "my.module:Class") == draft("fp8", None, "STANDALONE") == "fp8"
    assert draft("fp8", None, "NGRAM") is draft("fp8", "fp8", "NONE") is None
    fp8 = Config(quantization="fp8", model_path="m", speculative_algorithm="EAGLE", speculative_draft_model_path="h")
    assert tree_shape(fp8, "LlamaForCausalLM") == (5, 4, 8), "trees are as large as without it"
    assert Config(quantization="fp8", speculative_algorithm="NGRAM").draft_tokens == 12


def of_kind(module: nn.Module, kind: type[nn.Module]) -> int:
    """Return how many layers of a kind a module has."""
    return sum(isinstance(part, kind) for part in module.modules())


@on_a_cpu
@pytest.mark.parametrize("draft", [None, "fp8", "unquant"])
def test_target_and_draft_are_served_in_fp8(draft: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "choose_device", lambda config: CPU)  # which refuses it, as it is slow
    folder = str(test_standalone.write(tmp_path / "model"))
    weights = tmp_path / "model/model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(weights).items()}, weights)
    shape = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
    llm = LLM(folder, quantization="fp8", dtype="bfloat16", disable_torch_compile=True, max_running_requests=2,
              speculative_algorithm="STANDALONE", speculative_draft_model_path=folder,
              speculative_draft_model_quantization=draft, **shape)  # fmt: skip
    engine = llm.scheduler.engine
    assert of_kind(engine.model, Fp8Linear) == 8
    assert of_kind(engine.drafter.network, Fp8Linear) == (0 if draft == "unquant" else 8)
    result = llm.generate([5, 6, 7, 8], SamplingParams(temperature=0, max_new_tokens=40))
    assert len(result["output_ids"]) == 40
    accepted = llm.scheduler.metrics.verified.accept_length
    assert accepted > 3.5 if draft != "unquant" else 1 < accepted < 3.5, "the target in fp8 is another model"


@pytest.mark.cuda
def test_the_default_model_speaks_in_fp8(demo_folder: Path) -> None:
    llm = LLM(quantization="fp8", device="cuda", max_running_requests=1)
    engine = llm.scheduler.engine
    assert of_kind(engine.model, Fp8Linear) == 4 * engine.model.config.layers and of_kind(engine.model, nn.Linear) == 1
    assert isinstance(engine.drafter.network.layer.qkv_proj, Fp8Linear)
    text = llm.generate("The capital of France is", SamplingParams(temperature=0, max_new_tokens=12))["text"]
    assert "Paris" in text and llm.scheduler.metrics.verified.accept_length > 1
