"""Weights of 4 and 8 bits in groups: a file's own numbers, products that are theirs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from exactness import forget_graphs, random_linear
from test_gguf import SIZES, hf_model, write
from torch import Tensor

from minispec import LLM, SamplingParams
from minispec.attention import Causal
from minispec.compiled import Key
from minispec.config import Config
from minispec.cpu.groups import FEW, Groups, Rows
from minispec.cpu.groups import dense as in_float32
from minispec.cpu.int4 import MANY_ROWS, Codes, Int4Linear, dense, nearest
from minispec.cpu.linear import PackedLinear
from minispec.cpu.template import reason_against_int4
from minispec.load import files, gguf_weights
from minispec.load.build import Build, choose_device
from minispec.load.files import DirectStep
from minispec.load.gguf_weights import KINDS, FileWeights
from minispec.load.gguf_weights import numbers as numbers_of
from minispec.load.memory import size_of

BF16 = torch.bfloat16
needs_int4 = pytest.mark.skipif(reason_against_int4(BF16) is not None, reason=f"{reason_against_int4(BF16)}")


def rows_of(name: str, rows: int, inputs: int) -> np.ndarray:
    """Return random rows of one of llama.cpp's types: any bytes but for its float16 numbers, which are small."""
    kind, random = gguf.GGMLQuantizationType[name], np.random.default_rng(len(name))
    values, size = gguf.GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (rows * inputs // values, size), dtype=np.uint8)
    places = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_1": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in places.get(name, (0,)):
        raw[:, at : at + 2] = random.uniform(-0.01, 0.01, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def filled(numbers: Codes) -> Int4Linear:
    """Return a layer with these numbers, given in two pieces."""
    layer = Int4Linear(torch.nn.Linear(numbers.codes.shape[1], len(numbers.codes), bias=False))
    layer.fill(Codes(*parts) for parts in zip(*(part.split(64) for part in numbers), strict=True))
    return layer


def weight_of(numbers: Codes) -> Tensor:
    """Return the weight [out, in] fp32 that the numbers stand for."""
    codes = numbers.codes.view(*numbers.scale.shape, 32).float()
    return ((codes - 8) * numbers.scale[..., None] + numbers.zero[..., None]).flatten(1)


@needs_int4
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.bits == 4])
def test_weights_and_products_are_those_of_the_file(name: str) -> None:
    raw = rows_of(name, 192, 512)
    want = torch.from_numpy(np.array(gguf.dequantize(raw, gguf.GGMLQuantizationType[name])))
    numbers = numbers_of(raw, name)
    torch.testing.assert_close(weight_of(numbers), want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))
    layer, x = filled(numbers), torch.randn(MANY_ROWS, 512)
    held = dense(layer.weight, layer.scales).T  # scales and zeros are rounded to bfloat16
    assert (held - want).norm() < 3e-3 * want.norm()
    # The rounding of a scale moves no group's mean by more than the zero's own rounding does.
    off = (held - want).view(192, -1, 32).mean(-1).abs()
    assert (off <= 2**-8 * numbers.zero.abs() + 2**-16 * numbers.scale.abs() * 8 + 1e-6).all()
    exact = x.bfloat16().double() @ held.double().T
    for rows in (1, 2, 8, 12, 16, 64, MANY_ROWS):
        got = layer(x[:rows].bfloat16())
        assert got.dtype == BF16 and (got - exact[:rows]).abs().max() < 1e-2 * exact.abs().max(), f"{rows} rows"


def product(layer: Int4Linear, x: Tensor, key: Key) -> Tensor:
    """Return what a layer makes of activations, as a step calls it."""
    return layer(x.relu())


@needs_int4
def test_compiled_products_of_few_rows_have_the_bits_of_eager_ones_and_files_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    layer, x = filled(numbers_of(rows_of("Q4_K", 128, 512), "Q4_K")), torch.randn(MANY_ROWS + 8, 512).bfloat16()
    with torch.inference_mode():
        want = layer(x[-16:].relu())
        for rows in (1, 8):
            few = x[-rows:].clone()
            assert torch.equal(DirectStep(product)(layer, few, Key()), want[-rows:]), f"{rows} rows"
        forget_graphs()
        monkeypatch.setattr(files, "_make", None)  # so that what is in no file is an error
        assert torch.equal(DirectStep(product)(layer, few, Key()), want[-8:])
        run = torch.compile(product, fullgraph=True, dynamic=False)
        torch._dynamo.maybe_mark_dynamic(many := x.clone(), 0)
        assert (run(layer, many, None)[-16:] - want).abs().max() < 1e-2 * want.abs().max()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.bits == 8])
def test_weights_of_8_bits_are_the_file_s_and_a_row_has_the_same_bits_among_few(name: str) -> None:
    torch._dynamo.reset()
    raw, kind = rows_of(name, 192, 512), KINDS[name]
    want = torch.from_numpy(np.array(gguf.dequantize(raw, gguf.GGMLQuantizationType[name])))
    groups = Groups(192, 512, kind.size, kind.has_zero)
    groups.fill(numbers_of(piece, name) for piece in np.array_split(raw, 5))
    layer = PackedLinear(torch.nn.Linear(512, 192, dtype=BF16), several=groups)
    assert torch.equal(in_float32(groups.weight, groups.scale, groups.zero), want)
    embedded = Rows(groups, torch.float32)(torch.tensor([[7, 191]]))
    assert torch.equal(embedded, want[torch.tensor([[7, 191]])])
    x = torch.randn(FEW + 1, 512).bfloat16().relu()
    exact = x.double() @ want.double().T + layer.bias.double()
    with torch.inference_mode():
        step = DirectStep(product)
        for rows in (1, 2, FEW, FEW + 1):
            got = step(layer, x[-rows:].clone(), Key())
            assert got.dtype == BF16 and (got - exact[-rows:]).abs().max() < 1e-2 * exact.abs().max(), f"{rows} rows"
            assert rows > FEW or torch.equal(got[-1:], step(layer, x[-1:].clone(), Key()))
        assert (layer(x) - exact).abs().max() < 1e-2 * exact.abs().max()


def test_codes_are_nearer_than_those_of_a_group_s_ends() -> None:
    weight = random_linear(576, 128, torch.float32).weight.detach()
    groups = weight.view(128, -1, 32)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (most - least) / 15
    ends = (((groups - least) / scale).round() * scale + least).flatten(1)
    found = (weight_of(nearest(weight)) - weight).square().mean()
    assert found < 0.93 * (ends - weight).square().mean()
    constant = torch.full((1, 32), 0.25)
    assert torch.equal(weight_of(nearest(constant)), constant)


# ---- models ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("hidden_size", "intermediate_size"):  # of files: multiples of 64 for each of the heads
        monkeypatch.setitem(SIZES, name, 128)


def sixteen_bit_v(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    """Leave the values' weights in 16 bits, as Q4_K_M has more bits for some of them."""
    for name in list(tensors):
        if name.endswith("attn_v.weight"):
            tensors[name] = tensors[name].astype(np.float16)


@needs_int4
@pytest.mark.parametrize("name", ["llama-biased", "qwen3"])
@torch.inference_mode()
def test_a_model_of_a_file_is_the_one_in_it(name: str, tmp_path: Path) -> None:
    all_four, told = name == "llama-biased", list[str]()
    more = () if all_four else (sixteen_bit_v,)
    path = write(tmp_path / "a.gguf", hf_model(name), *more, kind=gguf.GGMLQuantizationType.Q4_1)
    model = Build(Config(model_path=str(path), quantization="gguf", dtype="bfloat16"), told.append).network()
    kinds = [name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, Int4Linear)]
    # What v shares a layer with has 16 bits too.
    assert kinds == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"][not all_four :] * len(model.layers)
    others = 4 * len(model.layers) - len(kinds) + 1  # with the LM head
    assert told[-1] == f"gguf weights: {len(kinds)} have 4 bits, 0 have 8 bits, {others} have 16 bits"
    converted = Build(Config(model_path=str(path), dtype="float32"), told.append).network()
    ids, at = torch.arange(40)[None] * 5 % 300, torch.arange(40)[None]
    logits, want = (m.logits(m(ids, at, Causal(m.config.windows(40)))[0]) for m in (model, converted))
    assert (logits - want).norm() < 0.05 * want.norm()


@needs_int4
@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])
def test_types_of_5_to_8_bits_take_8_beside_4_and_nothing_is_there_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        """Have a file's tensors of four types, as those of a Q4_K_M differ."""
        types = {"attn_v": "Q5_1", "ffn_down": "Q5_0", "token_embd": "Q8_0", "output": "Q8_0"}
        for name in [name for name in tensors if name.endswith(".weight")]:
            if (part := name.split(".")[-2]) in types:
                kind = gguf.GGMLQuantizationType[types[part]]
                writer.add_tensor(name, gguf.quantize(tensors.pop(name), kind), raw_dtype=kind)

    path = write(tmp_path / "a.gguf", hf_model(name), mixed, kind=gguf.GGMLQuantizationType.Q4_1)
    options = {"dtype": "bfloat16", "disable_torch_compile": True, "max_running_requests": 1}
    config = Config(model_path=str(path), quantization="gguf", speculative_algorithm="NONE", dtype="bfloat16",
                    max_running_requests=1)  # fmt: skip
    assert not any(isinstance(part, Groups) for part in Build(config, print).network().modules())  # so small a file
    monkeypatch.setattr(gguf_weights, "WORTH", 0)
    others = {"max_running_requests": 2}, {"enable_deterministic_inference": True}, {"speculative_algorithm": "EAGLE3"}
    for reads in others:
        network = Build(replace(config, **reads), print).network()
        assert isinstance(network.lm_head, torch.nn.Linear) and isinstance(network.embed_tokens, torch.nn.Embedding)
    llm = LLM(str(path), quantization="gguf", speculative_algorithm="NONE", **options)
    model = llm.scheduler.engine.model
    kinds = [type(part).__name__ for part in model.layers[0].modules()]
    assert [kinds.count(kind) for kind in ("Apart", "Int4Linear", "Groups", "Linear")] == [1, 3, 2, 0]
    size, inner, vocabulary, tied = 128, 128, SIZES["vocab_size"], model.config.tied
    values = model.config.kv_heads * model.config.head_dim
    four = (2 * size * size + values * size + 2 * inner * size) * 5 // 8  # q, k, o, gate, up
    eight = size * inner * 9 // 8 + values * size * 5 // 4
    biases = sum(part.numel() * 2 for name, part in model.named_parameters() if name.endswith(("bias", "norm.weight")))
    heads = (1 if tied else 2) * vocabulary * size * 9 // 8
    assert size_of(model) == 2 * (four + eight) + heads + biases + model.frequencies.nbytes
    asked = ("hello, 123", SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True))
    plain = LLM(str(path), speculative_algorithm="NONE", **{**options, "dtype": "float32"})
    ids, at = torch.arange(40)[None] * 5 % 300, torch.arange(40)[None]
    with torch.inference_mode():
        logits, want = (m.logits(m(ids, at, Causal(m.config.windows(40)))[0])
                        for m in (model, plain.scheduler.engine.model))  # fmt: skip
    assert (logits - want).norm() < 0.05 * want.norm()
    assert len(llm.generate(*asked)["output_ids"]) == 12


@needs_int4
def test_a_file_that_is_truncated_or_replaced_while_it_is_served_does_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", hf_model("llama-tied"), kind=gguf.GGMLQuantizationType.Q4_0)
    options = {"dtype": "bfloat16", "disable_torch_compile": True, "max_running_requests": 1}
    llm = LLM(str(path), quantization="gguf", speculative_algorithm="NONE", **options)
    assert any(isinstance(part, Int4Linear) for part in llm.scheduler.engine.model.modules())
    assert str(path) not in Path("/proc/self/maps").read_text()
    asked = ("hello, 123", SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True))
    first = llm.generate(*asked)["output_ids"]
    path.write_bytes(path.read_bytes()[:4096])
    assert llm.generate(*asked)["output_ids"] == first and len(first) == 12
    with pytest.raises(ValueError, match="a.gguf ends early; was it changed while it was read"):
        FileWeights(llm._build.folder).fill(llm.scheduler.engine.model)
    path.unlink()
    write(path, hf_model("llama"))
    assert llm.generate(*asked)["output_ids"] == first


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"dtype": "float32"}, "it is for --dtype bfloat16, and the dtype is float32"),
        ({"tp_size": 2}, "weights of 4 bits are not split over --tp-size 2 yet; --dp-size has them"),
        ({"load_format": "dummy"}, "with --load-format dummy no file is read"),
        ({"torch": "2.12.0+cpu"}, "it needs PyTorch 2.13.x, and this is 2.12.0+cpu"),
        ({"processor": "AVX2"}, "it needs a processor with AVX512, and PyTorch finds AVX2"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    flags: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.gguf", hf_model("qwen2"), kind=gguf.GGMLQuantizationType.Q4_0)
    flags = {"dtype": "bfloat16", **flags}
    processor = flags.pop("processor", "AVX512")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)
    monkeypatch.setattr(torch, "__version__", flags.pop("torch", "2.13.0"))
    with pytest.raises(ValueError) as error:
        Build(Config(model_path=str(path), quantization="gguf", **flags), lambda line: None)
    assert str(error.value) == f"--quantization gguf: {said}; without the flag the model is served"


@needs_int4
def test_gguf_wants_a_gguf_file_and_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"^--quantization gguf keeps .* --model {tmp_path} is no such file; int4 and"):
        Build(Config(model_path=str(tmp_path), quantization="gguf", dtype="bfloat16"), lambda line: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for kind in ("gguf", "int4"):
        with pytest.raises(ValueError, match=f"^--quantization {kind} is for a CPU, and the device is cuda"):
            choose_device(Config(quantization=kind))
