"""Mixtures of experts: all ways to one result, and whatever a dense model promises.

test_model.py compares the families with transformers, test_parallel.py one rank with two, and test_cuda_path.py traces
what CUDA runs. Here are the operators themselves, every drafter on a model some of whose layers have experts, and what
is made per layer or per kind of layer: memory, packed weights, compiled graphs.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_standalone
import torch
import torch.nn.functional as F
from conformance import (
    Subject,
    checks_of,
    greedy_alone_and_in_a_batch_of_eight,
    mixture_model,
    nodes_have_the_logits_of_their_own_paths,
    prefix_hits_and_a_second_turn,
    random_head,
    retraction,
    subjects_with,
)
from exactness import (
    CPU,
    MIXTURE,
    Oracle,
    build,
    graphs_made,
    reference,
    request,
    run,
    shortfalls,
    tiny_model,
    trace_only,
    truth_of,
)
from torch import Tensor
from torch._dynamo import lookup_backend

import minispec.cpu.onednn as onednn
import minispec.experts as experts_module
from minispec.beam import BeamDrafter
from minispec.config import Config
from minispec.cpu.linear import PackedLinear, can_pack, pack_linears
from minispec.cpu.onednn import PackedExperts
from minispec.cpu.products import products_pay
from minispec.eagle import Eagle3Head
from minispec.experts import Experts, _by_all, _gathered, _grouped
from minispec.load.build import Build, Outline, Rehearsal, _kind, _linear_bytes
from minispec.load.files import DirectStep
from minispec.load.memory import size_of
from minispec.model import Model

needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="this PyTorch has no oneDNN")


# ---- one result, four ways -------------------------------------------------------------------------------------------


def some_experts(dtype: torch.dtype = torch.float32, renormalises: bool = True) -> Experts:
    """Return six experts of width 48 for rows of 72 numbers, two a token."""
    torch.manual_seed(1)
    experts = Experts(replace(tiny_model().config, **MIXTURE, norm_topk_prob=renormalises)).requires_grad_(False)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.2)
    return experts.to(dtype)


def by_hand(experts: Experts, x: Tensor, scores: Tensor) -> Tensor:
    """Return the mixture's output [..., d] in float64, token by token and expert by expert, from the formula."""
    out = []
    for row, given in zip(x.double().view(-1, x.shape[-1]), scores.double().view(-1, scores.shape[-1]), strict=True):
        chances = (given - given.max()).exp()
        chances = chances / chances.sum()
        best = sorted(range(len(chances)), key=lambda expert: -chances[expert])[: experts.per_token]
        total = sum(chances[expert] for expert in best) if experts.renormalises else 1.0
        parts = []
        for expert in best:
            gate, up = (experts.gate_up_proj[expert].double() @ row).chunk(2)
            parts.append(chances[expert] / total * (experts.down_proj[expert].double() @ (F.silu(gate) * up)))
        out.append(sum(parts))
    return torch.stack(out).view(x.shape)


def in_packed(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Do it with packed weights."""
    return PackedExperts(experts).mix(x, chosen, weights)


def of_stacks(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a way to do it that is given the stacked weights."""
    return lambda experts, x, chosen, weights: function(x, chosen, weights, experts.gate_up_proj, experts.down_proj)


def as_if_many(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Do it by all experts, whatever the number of rows, in pieces."""
    return _by_all(x.view(-1, x.shape[-1]), chosen, weights, gate_up, down).view(x.shape)


WAYS = {
    "operator": Experts.mix, "packed": in_packed, "grouped": of_stacks(_grouped), "gathered": of_stacks(_gathered),
    "by all": of_stacks(as_if_many),
}  # fmt: skip


@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_formula_and_a_row_does_not_depend_on_others(
    way: str, dtype: torch.dtype, bound: float, renormalises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "packed" and not can_pack(dtype):
        pytest.skip(f"oneDNN packs no weights in {dtype} on this processor")
    monkeypatch.setattr(experts_module, "PIECE", 8)
    experts = some_experts(dtype, renormalises)
    for size in ((1, 1), (2, 1), (1, 3), (3, 7)):  # up to six pairs are gathered, from there on all experts are
        x, scores = torch.randn(*size, 72).to(dtype), 2 * torch.randn(*size, 6)
        chosen, weights = experts.choose(scores)
        want, got = by_hand(experts, x, scores), WAYS[way](experts, x, chosen, weights)
        assert got.shape == x.shape and got.dtype == dtype
        assert (got - want).abs().max() < bound * want.abs().max()
        alone = WAYS[way](experts, x[-1:, -1:], chosen[-1:, -1:], weights[-1:, -1:])
        assert (got[-1, -1] - alone[0, 0]).abs().max() < bound * want.abs().max()
        others = x.clone()
        others[0, 0] = torch.nan  # of another request
        spoiled = WAYS[way](experts, others, chosen, weights)
        assert spoiled[0, 0].isnan().all() and not spoiled.flatten(0, 1)[1:].isnan().any()


def test_an_expert_that_was_not_chosen_may_overflow() -> None:
    experts = some_experts(torch.float16)
    x, scores = torch.randn(4, 8, 72).half(), torch.randn(4, 8, 6)
    scores[..., 2] = -9
    experts.gate_up_proj[2] = 6e4
    chosen, weights = experts.choose(scores)
    assert not (chosen == 2).any()
    got = as_if_many(x, chosen, weights, experts.gate_up_proj, experts.down_proj)
    assert got.isfinite().all() and not (x[0] @ experts.gate_up_proj[2].T).isfinite().all()


def test_the_router_s_probabilities_are_in_float32() -> None:
    experts = some_experts(torch.bfloat16, renormalises=False)
    scores = torch.tensor([3.0, 2.0, 1.0, 0.5, 0.25, -4.0])
    chosen, weights = experts.choose(scores.bfloat16())
    assert weights.dtype == torch.float32 and chosen.tolist() == [0, 1]
    torch.testing.assert_close(weights, scores.softmax(-1)[:2], rtol=1e-6, atol=0)


# ---- compiled --------------------------------------------------------------------------------------------------------


@needs_packing
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_code_has_one_operator_for_the_experts_of_a_layer(packed: bool) -> None:
    experts = [some_experts() for _ in range(2)]
    layers = [PackedExperts(one) if packed else one for one in experts]
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    call = torch.compile(Experts.forward, backend=note, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        for layer, one in zip(layers, experts, strict=True):
            x, scores = torch.randn(2, 5, 72), torch.randn(2, 5, 6)
            assert (call(layer, x, scores) - by_hand(one, x, scores)).abs().max() < 1e-4
    name = "packed_experts" if packed else "chosen_experts"
    (graph,) = graphs  # of both layers
    assert sum(name in str(node.target) for node in graph.graph.nodes) == 1


@cache
@torch.inference_mode()
def compiled_model(dtype: torch.dtype) -> tuple[Model, Model]:
    """Return a model as a CPU serves it, with packed weights and compiled blocks, and the same as it was loaded."""
    model, plain = (tiny_model(**MIXTURE).to(dtype) for _ in range(2))
    if can_pack(dtype):
        pack_linears(model, keep=True)
    model.compile_blocks(DirectStep)
    return model, plain


def serve_compiled(dtype: torch.dtype, drafter: str, plain_steps: bool = False) -> tuple[list[Any], Model, float]:
    """Serve three requests over compiled blocks; returns them, the model as it was loaded, and the accept length.

    plain_steps: take some between trees.
    """
    model, plain = compiled_model(dtype)
    with torch.inference_mode():
        head = BeamDrafter(random_head(Eagle3Head, plain, taps=(1, 2)), rounds=2, topk=2, nodes=5)
        drafting = Oracle(truth_of(plain), nodes=5) if drafter == "oracle" else head
        scheduler = build(model, drafting, compiled=True, running=1, chunk=100)
    scheduler.policy.forced = random.Random(1).choice if plain_steps else None
    rng = random.Random(4)
    requests = [request(f"{i}", [rng.randrange(61) for _ in range(40)], max_new_tokens=24) for i in range(3)]
    run(scheduler, requests)
    return requests, plain, scheduler.metrics.verified.accept_length


@pytest.mark.slow
def test_in_float32_the_tokens_are_exact_with_a_graph_for_each_kind_of_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are counted, and run as they were traced; Inductor's code is the matter of the test below."""
    trace_only(monkeypatch, tmp_path)
    requests, plain, accepted = serve_compiled(torch.float32, "oracle", plain_steps=True)
    assert all(r.output_ids == reference(plain, r) for r in requests) and accepted > 1.3
    assert len({_kind(block) for block in compiled_model(torch.float32)[0].layers}) == 2
    assert graphs_made() == 2 * 3, "a prompt, a tree and a plain step"
    requests, plain, _ = serve_compiled(torch.float32, "eagle3")
    assert all(r.output_ids == reference(plain, r) for r in requests)


@pytest.mark.slow
@pytest.mark.skipif(not products_pay(torch.bfloat16, CPU), reason="bfloat16 has no products of its own here")
def test_compiled_in_bfloat16_a_token_is_the_likeliest_or_nearly_so(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, plain, _ = serve_compiled(torch.bfloat16, "oracle")
    off = shortfalls(plain, requests)
    assert len(off) == 72 and sum(short == 0 for short in off) > 60 and max(off) < 0.5
    experts = compiled_model(torch.bfloat16)[0].layers[0].experts
    monkeypatch.setattr(experts, "first", experts.first[::-1])  # compiled code looks experts up when it runs
    requests, plain, _ = serve_compiled(torch.bfloat16, "oracle")
    off = shortfalls(plain, requests)
    assert sum(short == 0 for short in off) < 40 and max(off) > 1


# ---- every drafter, and trees ----------------------------------------------------------------------------------------

DRAFTERS = subjects_with(mixture_model, **MIXTURE)
QUICK = (greedy_alone_and_in_a_batch_of_eight, prefix_hits_and_a_second_turn, retraction)


@pytest.mark.parametrize(("name", "check"), checks_of(DRAFTERS, QUICK))
def test_with_experts_the_tokens_stay_the_same(name: str, check: Callable[[Subject], None]) -> None:
    check(DRAFTERS[name])


def swapped(experts: Experts, scores: Tensor, choose: Callable[..., Any] = Experts.choose) -> tuple[Tensor, Tensor]:
    """Give a batch's tokens each other's experts."""
    chosen, weights = choose(experts, scores)
    return chosen.flip(-2), weights


def test_a_row_that_gets_another_row_s_experts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = DRAFTERS["oracle"]
    subject.build()
    greedy_alone_and_in_a_batch_of_eight(subject)  # so that the truth is known
    monkeypatch.setattr(Experts, "choose", swapped)
    with pytest.raises(AssertionError, match="differs"):
        greedy_alone_and_in_a_batch_of_eight(subject)


def test_every_node_of_a_tree_has_the_logits_of_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_have_the_logits_of_their_own_paths(mixture_model(), monkeypatch)


# ---- what is made per layer ------------------------------------------------------------------------------------------


@needs_packing
def test_packed_experts_take_the_place_of_their_weights_and_go_with_their_module() -> None:
    before = set(onednn._weights)
    model = tiny_model(**MIXTURE)
    stacks = 2 * 6 * 3 * 48 * 72 * 4  # bytes: two layers, six experts, three matrices
    dense = sum(p.nbytes for p in model.layers[1].parameters() if p.dim() == 2)
    router_and_attention = sum(p.nbytes for p in model.layers[0].parameters() if p.dim() == 2)
    assert _linear_bytes(model) == dense + 2 * router_and_attention + model.lm_head.weight.nbytes
    pack_linears(model, keep=True)
    assert isinstance(model.layers[0].experts, PackedExperts) and not hasattr(model.layers[1], "experts")
    assert not [name for name, _ in model.named_parameters() if "experts" in name]
    packed = sum(size_of(model.layers[layer].experts) for layer in MIXTURE["sparse"])
    assert stacks <= packed < 2 * stacks  # oneDNN fills small ones up
    assert isinstance(model.layers[0].router, PackedLinear) and model.layers[0].router.kept is not None
    del model
    gc.collect()
    assert set(onednn._weights) <= before  # other tests' models may have gone too


MIXED = {  # layers 1 and 3 have experts
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2,
}  # fmt: skip


def outline(tmp_path: Path, kind: type[Outline], **flags: Any) -> Outline:
    """Return a build that needs no weights, of a mixture whose layers 1 and 3 are sparse."""
    (tmp_path / "config.json").write_text(json.dumps(MIXED))
    build_of = Build(Config(model_path=str(tmp_path), load_format="dummy", device="cpu", **flags), print)
    build_of.lead()
    return kind(build_of)


def test_an_engine_that_only_compiles_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = outline(tmp_path, Rehearsal).network()
    dense, sparse = model.layers[0], model.layers[1]
    assert sparse.sparse and not dense.sparse
    assert [layer is (sparse if at in (1, 3) else dense) for at, layer in enumerate(model.layers)] == [True] * 5
    whole = Model.empty(model.config, model.norm.weight.dtype, CPU)
    assert size_of(model.layers) < size_of(whole.layers) / 2 and _linear_bytes(model) == _linear_bytes(whole)


def test_the_memory_of_experts_is_in_the_estimate(tmp_path: Path) -> None:
    with torch.inference_mode():
        network = outline(tmp_path, Outline, dtype="float32").parts().network
    stacks = 4 * 3 * 32 * 64 * 4  # bytes: four experts, three matrices
    assert all(0 <= size_of(network.layers[layer].experts) - stacks <= 8 * 9 for layer in (1, 3)), "but for handles"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_experts_are_refused_before_a_weight_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minispec.load.build.choose_device", lambda config: CPU)
    with pytest.raises(ValueError, match=f"^--quantization {kind}: experts are not quantized yet; [^\n]*$"):
        outline(tmp_path, Outline, quantization=kind)


def test_a_draft_model_s_experts_are_not_quantized_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minispec.load.build.choose_device", lambda config: CPU)
    # The draft's files are those of a model without experts: they are compared with its config elsewhere.
    monkeypatch.setattr("minispec.load.draft_models.load_weights", lambda into, tensors: None)
    target = test_standalone.write(tmp_path / "target")
    draft = test_standalone.write(tmp_path / "draft", seed=1)
    stated = json.loads((draft / "config.json").read_text())
    stated |= {key: MIXED[key] for key in MIXED if key.startswith(("arch", "num_experts", "moe"))}
    (draft / "config.json").write_text(json.dumps(stated))
    flags = dict(speculative_algorithm="STANDALONE", speculative_draft_model_path=str(draft), load_format="dummy")
    config = Config(model_path=str(target), device="cpu", **flags)
    made = Build(config, print)
    made.lead()
    with torch.inference_mode():
        Outline(made).parts()  # without the flag it is a draft model like another
    config = replace(config, speculative_draft_model_quantization="fp8")
    made.config = config
    with pytest.raises(ValueError, match="^--speculative-draft-model-quantization fp8: experts are not quantized yet"):
        Outline(made).parts()
