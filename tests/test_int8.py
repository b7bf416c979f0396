"""int8 weights: products are those of the integers and their scales, tokens stay exact, memory halves."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conformance import (
    SUBJECTS,
    Subject,
    chunked_prompts,
    greedy_alone_and_in_a_batch_of_eight,
    retraction,
    seeded_samples,
    sharp_model,
)
from conftest import slow_unless
from exactness import (
    CPU,
    Oracle,
    build,
    forget_graphs,
    graphs_made,
    mixed_requests,
    random_linear,
    reference,
    run,
    tiny_config,
    tiny_model,
    truth_of,
)
from torch import Tensor, nn
from trained import trained_model

import minispec.load.build as build_module
from minispec.compiled import Key
from minispec.config import Config
from minispec.cpu import int8
from minispec.cpu.int8 import (
    MANY_ROWS,
    Int8Embedding,
    Int8Linear,
    check_int8,
    pack_integers,
    quantize,
    quantized,
    replace_weights,
)
from minispec.cpu.linear import can_pack
from minispec.eagle import Eagle3Head, HeadConfig
from minispec.llm import LLM
from minispec.load.build import choose_device
from minispec.load.files import DirectStep
from minispec.model import Model, RMSNorm
from minispec.ranks.shards import Shard, SplitEmbedding
from minispec.request import SamplingParams
from minispec.serve.info import stats_of

IDS = list(range(40))
SHAPES = [(576, 576), (72, 61)]  # (in, out): a layer of the default model, and one whose rows the kernel cannot read


def weight_of(linear: Int8Linear) -> Tensor:
    """Return the weight [out, in] fp64 that an int8 layer stands for."""
    return linear.weight.double() * linear.scale.double()[:, None]


# ---- products ----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """An int8 layer within what is around it in a block: a norm or an activation before it, an activation behind."""

    def __init__(self, linear: Int8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.norm = linear, RMSNorm(linear.weight.shape[1], 1e-5).to(dtype)

    def forward(self, x: Tensor, attend: Key) -> tuple[Tensor, Tensor]:
        """Return two results of x [B, T, in], or of gate and up [B, T, 2 in]."""
        out = self.linear(self.norm(x) if x.shape[-1] == self.linear.weight.shape[1] else gated(x))
        return out + 1, gated(out)


def gated(x: Tensor) -> Tensor:
    """Return [..., n] of gate and up [..., 2 n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class Rows(Key):
    """In place of attention: one row has a graph of its own, others share one for all numbers."""

    def __init__(self, few: bool) -> None:
        self.few = few

    @property
    def any_size(self) -> tuple:
        return () if self.few else ((torch.zeros(3), (0,)),)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((576, 960), torch.bfloat16), ((1536, 576), torch.float32), ((72, 62), torch.bfloat16)],
    ids=str,
)
def test_compiled_products_are_those_of_the_dequantized_weight(
    shape: tuple[int, int], dtype: torch.dtype, packed: bool
) -> None:
    if packed and not can_pack(dtype):
        pytest.skip("oneDNN does not take this dtype here")
    torch._dynamo.reset()
    forget_graphs()
    given = Layer(Int8Linear(random_linear(*shape, dtype, bias=shape[1] == 62)), dtype)
    if packed:
        given.linear.pack()
    compiled, width = DirectStep(Layer.forward), shape[0] if shape[0] < 1000 else 2 * shape[0]
    x = torch.randn(1, 64, width).to(dtype)
    exact = copy.deepcopy(given).double()
    exact.linear = nn.Linear(*shape, bias=given.linear.bias is not None, dtype=torch.float64)
    exact.linear.weight = nn.Parameter(weight_of(given.linear))
    exact.linear.bias = None if given.linear.bias is None else nn.Parameter(given.linear.bias.double())
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    keys = {rows: Rows(few=rows == 1) for rows in (1, 2, 3, 4, 5, 12, MANY_ROWS - 1, MANY_ROWS, 64)}
    with torch.inference_mode():
        want = exact(x.double(), keys[64])
        ones = [compiled(given, row.clone(), keys[1]) for row in x.split(1, 1)]
        alone = [torch.cat(rows, 1) for rows in zip(*ones, strict=True)]
        for rows, key in keys.items():
            found = compiled(given, x[:, :rows].clone(), key)
            for got, single, right in zip(found, alone, want, strict=True):
                assert (got - right[:, :rows]).abs().max() <= bound * right.abs().max(), f"{rows} rows"
                if rows == 1:
                    assert torch.equal(got, single[:, :rows])
    assert graphs_made() == 2, "of one row, and of any other number"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 8e-3), (torch.float32, 1e-5), (torch.float16, 1e-3)])
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_products_are_those_of_the_dequantized_weight(
    rows: int, dtype: torch.dtype, bound: float, packed: bool
) -> None:
    if packed and not can_pack(dtype):
        pytest.skip("oneDNN does not take this dtype here")
    for size, features in SHAPES:
        given = random_linear(size, features, dtype, bias=True)
        linear, x = Int8Linear(given), torch.randn(2, rows, size).to(dtype)
        want = F.linear(x.double(), weight_of(linear), given.bias.double())
        if packed:
            linear.pack()
        got = linear(x)
        assert got.dtype == dtype and (got - want).abs().max() < bound * want.abs().max()


@pytest.mark.parametrize("rows", [3, 64])
def test_integers_may_sum_to_what_float16_cannot_hold(rows: int) -> None:
    given = random_linear(576, 61, torch.float16)
    given.weight.fill_(0.01)
    out = Int8Linear(given)(torch.full((rows, 576), 2.0, dtype=torch.float16))  # 127 * 2 * 576 before the scale
    assert (out - 0.01 * 2 * 576).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_off_by_at_most_half_a_unit(dtype: torch.dtype) -> None:
    weight = random_linear(72, 61, dtype).weight
    weight[3], weight[4] = 0, 1e-5  # float16 has no scale near enough to the second one
    integers, scale = quantized(weight)
    assert integers.shape == (61, 72) and not integers[3].any()
    assert integers.abs().max() == 127 and (integers[4] == 127).all()
    off = (integers.double() * scale.double()[:, None] - weight.double()).abs() / scale.double()[:, None]
    off[4] = 0
    assert off.max() <= 0.5001


# ---- a model ------------------------------------------------------------------------------------------------------


def bytes_of(model: nn.Module) -> int:
    """Return the memory of all parameters and buffers, shared ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_the_default_model_takes_half_the_memory_and_nobody_keeps_the_old_weights(demo_folder: Path) -> None:
    config = Config(load_format="dummy", random_seed=1)
    shape = build_module.read_model_config(build_module.read_config(demo_folder))
    with torch.inference_mode():
        model = build_module.load_model(config, shape, demo_folder, torch.bfloat16, CPU)
        head = Eagle3Head.empty(HeadConfig("eagle3", shape, (1, 2)), model)
        before, old = bytes_of(model), [weakref.ref(p) for name, p in model.named_parameters() if "norm" not in name]
        quantize(model, IDS, replace_weights)
    gc.collect()
    assert bytes_of(model) <= 0.55 * before
    assert len(old) == 1 + 4 * shape.layers and not any(ref() is not None for ref in old)
    tokens = torch.tensor([[5, 49151]])
    assert torch.equal(head.embed(tokens), model.embed_tokens(tokens))
    assert model.embed_tokens.weight is model.lm_head.weight


def test_a_tied_embedding_is_the_lm_head_s_rows_and_another_one_stays() -> None:
    with torch.inference_mode():
        tied = Model.empty(replace(tiny_config(), tied=True), torch.bfloat16, CPU)
        for parameter in tied.parameters():
            parameter.normal_(0, 0.35)
        quantize(tied, IDS, replace_weights)
        apart = tiny_model()
        kept = apart.embed_tokens.weight
        quantize(apart, IDS, replace_weights)
    tokens = torch.tensor([[3, 60], [0, 3]])
    assert isinstance(tied.embed_tokens, Int8Embedding)
    assert tied.embed(tokens).dtype == torch.bfloat16
    assert torch.equal(tied.embed(tokens), weight_of(tied.lm_head)[tokens].bfloat16())
    assert apart.embed_tokens.weight is kept


def test_a_tied_embedding_of_one_of_two_ranks_is_the_rows_of_its_part_of_the_lm_head() -> None:
    shard = Shard(replace(tiny_config(), tied=True), 1, 2, "")
    model = Model.empty(shard.config, torch.bfloat16, torch.device("meta"))
    shard.join(model)
    int8.replace_weights(model)
    assert isinstance(model.embed_tokens, SplitEmbedding) and isinstance(model.embed_tokens.rows, Int8Embedding)
    rows = model.lm_head.linear.weight
    assert model.embed_tokens.weight is rows and rows.dtype == torch.int8


def test_the_cost_is_what_the_distributions_say() -> None:
    model = tiny_model()
    with torch.inference_mode():
        old = int8._logits(model, IDS).double().log_softmax(-1)
        cost = quantize(model, IDS, replace_weights)
        new = int8._logits(model, IDS).double().log_softmax(-1)
    divergence = float((old.exp() * (old - new)).sum(-1).mean())
    assert cost.divergence == pytest.approx(divergence, rel=1e-3) and divergence > 1e-5
    assert cost.agreement == float((old.argmax(-1) == new.argmax(-1)).double().mean()) > 0.8
    assert cost.tokens == len(IDS)


# ---- exact tokens in float32 --------------------------------------------------------------------------------------


@functools.cache
@torch.inference_mode()
def int8_of(make: Callable[[], Model], packed: bool = True) -> Model:
    """Return a model of the conformance tests with int8 weights."""
    model = copy.deepcopy(make())
    quantize(model, IDS, replace_weights)
    if packed:
        pack_integers(model)
    return model


def as_int8(subject: Subject, packed: bool = True) -> Subject:
    """Return the subject over the same model with int8 weights."""
    return replace(subject, model=partial(int8_of, subject.model, packed), built=[])


# A linear layer may depend on the rows beside a row and on nothing else, so these checks are those that change them.
ROWS_BESIDE = (greedy_alone_and_in_a_batch_of_eight, seeded_samples, chunked_prompts, retraction)


@pytest.mark.parametrize("check", slow_unless(ROWS_BESIDE, lambda check: check is seeded_samples),
                         ids=lambda check: check.__name__)  # fmt: skip
def test_tokens_stay_the_same(check: Callable[[Subject], None]) -> None:
    check(as_int8(SUBJECTS["trained-tree"]))


@pytest.mark.parametrize("name", slow_unless(["none", "ngram", "standalone-tree", "mtp-tree"],
                         lambda name: name == "ngram"))  # fmt: skip
def test_tokens_stay_the_same_whoever_drafts(name: str) -> None:
    greedy_alone_and_in_a_batch_of_eight(as_int8(SUBJECTS[name]))


def test_tokens_stay_the_same_without_memory_for_both_layouts() -> None:
    greedy_alone_and_in_a_batch_of_eight(as_int8(SUBJECTS["ngram"], packed=False))


def test_int8_weights_are_what_is_served() -> None:
    """The tokens above would be exact with the old weights too."""
    for make in (sharp_model, trained_model):
        assert all(isinstance(m, Int8Linear) for m in int8_of(make, packed=False).modules() if hasattr(m, "bias"))
    requests = mixed_requests()
    run(build(int8_of(sharp_model), SUBJECTS["none"].drafter(sharp_model())), requests)
    assert any(r.output_ids != reference(sharp_model(), r) for r in requests)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_compiled_steps_are_exact() -> None:
    torch._dynamo.reset()  # the blocks of other tests are the same function
    model = copy.deepcopy(int8_of(sharp_model))
    model.compile_blocks(DirectStep)
    scheduler = build(model, Oracle(truth_of(int8_of(sharp_model)), nodes=4), compiled=True, running=1, chunk=100)
    requests = [*mixed_requests(2), *mixed_requests(2, seed=2, temperature=1.0)]
    run(scheduler, requests)
    assert stats_of(scheduler)["tree_steps"] > 10
    for r in requests:
        assert r.output_ids == reference(int8_of(sharp_model), r)


# ---- flags --------------------------------------------------------------------------------------------------------


def test_other_devices_and_builds_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(Config(quantization="int8", device="cpu")) == CPU
    with pytest.raises(ValueError, match="^--quantization int8 .* cuda; --device cpu .*$"):
        choose_device(Config(quantization="int8"))
    check_int8(torch.bfloat16)
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    with pytest.raises(ValueError, match="^--quantization int8: this build of PyTorch .*$"):
        check_int8(torch.bfloat16)


@pytest.mark.slow
def test_an_engine_says_what_int8_costs(demo_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="minispec"):
        llm = LLM(quantization="int8", disable_torch_compile=True, max_running_requests=1)
    (said,) = [r.message for r in caplog.records if r.message.startswith("int8 weights")]
    divergence, agreement = (float(said.split(word)[1].split()[0].rstrip("%")) for word in ("weights is ", "same at "))
    assert 0.0005 < divergence < 0.03 and 85 <= agreement <= 100
    assert any(r.message.startswith("quantization=int8, ") for r in caplog.records)
    engine = llm.scheduler.engine
    drafter = engine.drafter
    layers = [m for m in engine.model.modules() if isinstance(m, Int8Linear)]
    assert layers and all((m.packed is not None) == can_pack(engine.model.embed_tokens.scale.dtype) for m in layers)
    assert not any(isinstance(m, Int8Linear) for m in drafter.network.modules())
    text = llm.generate("The capital of France is", SamplingParams(temperature=0, max_new_tokens=8))["text"]
    assert "Paris" in text and llm.scheduler.metrics.verified.accept_length >= 1
