"""Memory as it is told: estimates equal what is then there, to the byte; when it runs out, one message has the numbers.

What an engine takes is counted here by hand, from shapes and dtypes, beside `measure`, so that the two cannot be wrong
together.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import test_heads
import test_standalone
import torch
from exactness import build, tiny_model
from test_llm import CONFIG, DUMMY, config_of
from torch import nn
from torch.torch_version import TorchVersion

import minispec.load.build as build_module
import minispec.load.memory as memory_module
import minispec.load.warm_up as warm_up_module
from minispec import LLM
from minispec.buffers import Sizes
from minispec.config import Config
from minispec.cpu.linear import PackedLinear
from minispec.drafter import Plain
from minispec.load.architectures import read_model_config
from minispec.load.build import Build, captured_batches, resolve_sizes
from minispec.load.memory import GIB, Budget, Memory, auto_fraction, is_out_of_memory, largest_graph, size_of
from minispec.load.tree_shape import WEIGHT_BOUND, coarse_batches
from minispec.model import Model

CUDA, META = torch.device("cuda"), torch.device("meta")
OPTIONS = {**DUMMY, "device": "cpu", "max_running_requests": 3}
# Sizes that oneDNN's blocks divide, so that reordered weights have no more bytes than the others.
WIDE = {**CONFIG, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 320, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


def folder_of(at: Path, config: dict) -> Path:
    """Write a folder of a config.json alone."""
    at.mkdir()
    (at / "config.json").write_text(json.dumps(config))
    return at


def started(model: Path, caplog: pytest.LogCaptureFixture, **options: object) -> tuple[LLM, Memory]:
    """Start a model; return it and what was estimated before."""
    caplog.set_level(logging.INFO, "minispec")
    budgets: list[Budget] = []
    check = Budget.check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Budget, "check", lambda budget: (budgets.append(budget), check(budget))[1])
        llm = LLM(model, **{**OPTIONS, **options})
    lines = [r.message for r in caplog.records if r.message.startswith("memory, ")]
    assert [line.split(":")[0] for line in lines] == ["memory, estimated", "memory, measured"]
    assert "graphs and workspace not known" in lines[0] and lines[0].split(":")[1] == lines[1].split(":")[1]
    return llm, budgets[0].estimate


def by_hand(llm: LLM) -> Memory:
    """Count an engine's tensors by their shapes."""
    engine, bytes_ = llm.scheduler.engine, lambda *tensors: sum(t.numel() * t.element_size() for t in tensors)
    kv, vocab, slots = engine.kv, llm.model_config.vocab_size, engine.sizes.max_running + 1

    def weights(module: nn.Module | None) -> int:
        if module is None:
            return 0
        found = {t.data_ptr(): t for t in [*module.parameters(), *module.buffers()]}  # an embedding may be the LM head
        for part in module.modules():
            for name in ("frequencies", "token_map"):
                if isinstance(t := getattr(part, name, None), torch.Tensor):
                    found[t.data_ptr()] = t
        return bytes_(*found.values())

    own, draft = weights(engine.model), weights(engine.drafter.network)
    rows, shape = kv.pages * kv.page_size, engine.drafter.kv_shape
    pools = [2 * n * heads * dim * rows * 4 for n, heads, dim in (
        (engine.model.config.layers, engine.model.config.kv_heads, engine.model.config.head_dim), shape)]  # fmt: skip
    drafter, hidden = engine.drafter, engine.model.config.hidden_size
    ring = slots * 64 * (8 + 4 * len(drafter.taps) * hidden) if drafter.commits else 0
    return Memory(own, draft, pools[0] + bytes_(kv.table, kv.logical), pools[1], None, slots * (10 * vocab + 28 + 32),
                  ring)  # fmt: skip


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("how", ["plain", "packed", "int8"])
def test_an_estimate_is_what_is_there_to_the_byte(how, tied, tmp_path, caplog, monkeypatch) -> None:
    if how != "packed":
        monkeypatch.setattr(build_module, "can_pack", lambda dtype: False)
    model = folder_of(tmp_path / "m", {**WIDE, "tie_word_embeddings": tied})
    llm, estimate = started(model, caplog, **({"quantization": "int8"} if how == "int8" else {}))
    assert estimate == llm.memory and estimate.draft_weights == estimate.draft_kv_pool == 0
    expected = by_hand(llm)
    if how == "packed":  # behind their handles: all but embedding, norms and frequencies
        linear = 3 * (64 * 128 + 64 * 64 + 64 * 256 + 128 * 64) + 64 * 320
        expected = replace(expected, target_weights=expected.target_weights + 4 * linear)
        packed = [part for part in llm.scheduler.engine.model.modules() if isinstance(part, PackedLinear)]
        assert packed and all(part.kept is None for part in packed)  # nothing is compiled that would read it
    assert estimate == expected


@pytest.mark.parametrize(
    ("form", "algorithm"),
    [(test_heads.eagle3_official, "EAGLE3"), (test_heads.eagle_sglang, "EAGLE"), (test_heads.mtp_alone, "NEXTN")],
)
def test_a_head_and_its_pool_are_in_the_estimate(form, algorithm, tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(build_module, "can_pack", lambda dtype: False)
    target = test_heads.make_target()
    model, head = config_of(target, tmp_path / "m"), test_heads.write(tmp_path / "h", form(target))
    options = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head)}
    llm, estimate = started(model, caplog, **options)
    assert estimate == llm.memory == by_hand(llm)
    assert estimate.draft_weights > 0 < estimate.draft_kv_pool
    assert len({r.message for r in caplog.records}) == len(caplog.records), "an outline says nothing twice"


def test_a_draft_model_and_its_pool_are_in_the_estimate(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(build_module, "can_pack", lambda dtype: False)
    model = test_standalone.write(tmp_path / "m", num_hidden_layers=3)
    draft = test_standalone.write(tmp_path / "d", seed=1, num_hidden_layers=2)
    options = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft), "load_format": "auto"}
    llm, estimate = started(model, caplog, **options)
    assert estimate == llm.memory == by_hand(llm)
    assert 0 < estimate.draft_weights < estimate.target_weights and 0 < estimate.draft_kv_pool < estimate.target_kv_pool


def test_storages_are_counted_once_and_by_what_they_hold() -> None:
    one = torch.empty(10, 4, device=META)
    assert size_of([one, one[2:], {"again": one.view(-1)}]) == 160 and size_of(None) == 0
    seen: set[int] = set()
    assert size_of(nn.Linear(4, 10), seen) == 200 and len(seen) == 2


# ---- a GPU, by its sizes ------------------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_WEIGHTS = 2 * 8_030_261_248 + 4 * 64  # Llama-3.1-8B's published count, and the frequencies of its angles


def gpu(monkeypatch: pytest.MonkeyPatch, free: float, total: float) -> None:
    """Let the GPU have so many GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), int(total * GIB)))


def budget(**options: object) -> Budget:
    """Return the budget of Llama-3.1-8B without a drafter on the GPU."""
    config = Config(model_path="x", **options)
    network = Model.empty(read_model_config(LLAMA), torch.bfloat16, META)
    sizes = Sizes.resolve(Plain(), context_length=65536, max_running=48, chunk_size=2048)
    return Budget(config, CUDA, sizes, network, Plain())


def test_the_automatic_fraction_is_sglang_s_with_the_draft_inside() -> None:
    # SGLang's example, 80 GiB and chunks of 8192: 13440 MiB are kept, and 2048 more for a draft head outside.
    assert auto_fraction(80 * GIB, 8192, 256) == round(1 - 13440 / 81920, 3) == 0.836
    assert round(1 - (13440 + 2048) / 81920, 3) == 0.811  # what SGLang prints
    assert auto_fraction(80 * GIB, 2048, 8) == round(1 - 10240 / 81920, 3)  # never less than 10 GiB of a large one
    assert auto_fraction(24 * GIB, 512, 24) == round(1 - (512 + 3072 + 48 + 128) / 24576, 3)
    assert auto_fraction(2 * GIB, 2048, 8) == 0


def test_weights_and_pools_share_the_fraction(monkeypatch) -> None:
    gpu(monkeypatch, 79, 80)
    found = budget()
    parts = found.estimate
    assert found.fraction == auto_fraction(80 * GIB, 2048, 256) and parts.target_weights == LLAMA_WEIGHTS
    static = 79 * GIB - 80 * GIB * (1 - found.fraction)
    taken = parts.target_weights + 131072 * 64 * (parts.target_kv_pool // (131072 * 64) - 1)  # page 0 holds nothing
    assert 0.93 * static < taken <= static and abs(parts.graphs_and_workspace - 10 * GIB) < GIB / 10
    half = budget(mem_fraction_static=0.5)
    assert half.fraction == 0.5 and half.estimate.target_kv_pool < parts.target_kv_pool
    found.check()


def test_what_cannot_fit_is_refused_before_it_is_loaded(monkeypatch) -> None:
    gpu(monkeypatch, 12, 80)  # another process has the rest
    with pytest.raises(ValueError) as refused:
        budget().check()
    said = str(refused.value)
    assert "target weights 14.96 GiB" in said and "12.00 GiB of 80.00 GiB are free" in said and "\n" not in said
    assert "before loading (3.02 GiB are missing)" in said, "weights, a page and tables are more than what is free"
    flags = "--mem-fraction-static 0.875, --cuda-graph-max-bs 256, --max-running-requests 48, --quantization none"
    assert flags in said and "--speculative" not in said and "--dtype" not in said


def test_a_pool_without_room_for_a_tree_gives_the_same_message_and_says_which_flag_to_raise(monkeypatch) -> None:
    gpu(monkeypatch, 79, 80)
    made = budget(mem_fraction_static=0.2)
    gpu(monkeypatch, 63, 80)  # the weights are there now
    with pytest.raises(ValueError, match="would hold 0 tokens and needs 64.*--mem-fraction-static 0.2 .raise this one"):
        made.pages()


@pytest.mark.parametrize("page", [16, 64, 128])
def test_a_pool_on_cuda_holds_whole_blocks_of_128_rows(page, monkeypatch) -> None:
    gpu(monkeypatch, 79, 80)
    assert budget(page_size=page).pages() * page % 128 == 0
    for tokens in (1000, 4096, 5000):
        pages = budget(page_size=page, max_total_tokens=tokens).pages()
        assert pages * page % 128 == 0 and tokens <= (pages - 1) * page < tokens + 128 + page


@pytest.mark.parametrize(
    ("options", "gib", "largest"),
    [({}, 16, 8), ({}, 24, 24), ({}, 48, 32), ({}, 80, 256), ({}, 180, 512), ({"cuda_graph_max_bs": 3}, 80, 3),
     ({"cuda_graph_bs": [4, 2, 4]}, 80, 4), ({"disable_cuda_graph": True}, 80, 0)],
    ids=str,
)  # fmt: skip
def test_the_largest_captured_batch_is_sglang_s_or_the_one_given(options, gib, largest, monkeypatch) -> None:
    assert largest_graph(Config(**options), gib * GIB) == largest
    gpu(monkeypatch, gib, gib)
    monkeypatch.setattr(build_module, "choose_device", lambda config: CUDA)
    listed = Config(**options).cuda_graph_bs or ()
    sizes = Sizes.resolve(Plain(), context_length=64, max_running=48, chunk_size=64, batches=listed)
    assert sizes.batch_sizes == ((2, 4, 8, 16, 32, 48) if listed else (1, 2, 4, 8, 16, 32, 48))
    assert captured_batches(Config(**options), sizes) == tuple(b for b in sizes.batch_sizes if b <= largest)


@pytest.mark.parametrize(
    ("version", "capability", "options", "any_captured"),
    [("2.11.0", (8, 9), {"quantization": "fp8"}, False), ("2.12.0", (8, 9), {"quantization": "fp8"}, True),
     ("2.11.0", (9, 0), {"quantization": "fp8"}, True), ("2.11.0", (8, 9), {}, True),
     ("2.11.0", (8, 9), {"speculative_draft_model_quantization": "fp8"}, False)],
    ids=str,
)  # fmt: skip
def test_fp8_is_not_captured_where_it_leaves_the_stream(
    version, capability, options, any_captured, monkeypatch, caplog
) -> None:
    gpu(monkeypatch, 24, 24)
    monkeypatch.setattr(build_module, "choose_device", lambda config: CUDA)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    sizes = Sizes.resolve(Plain(), context_length=64, max_running=48, chunk_size=64)
    assert bool(captured_batches(Config(**options), sizes)) == any_captured
    said = ["fp8 on sm_89 is not captured by PyTorch before 2.12: all steps run uncaptured, more slowly"]
    assert caplog.messages == ([] if any_captured else said)


@pytest.mark.parametrize(
    ("nodes", "gib", "options", "expected"),
    [(1, 80, {}, (1, 4, 16, 48)), (8, 80, {}, (1, 4, 16, 48)), (32, 80, {}, (1, 4, 8, 16, 48)),
     (33, 80, {}, (1, 2, 4, 8, 16, 48)), (1, 16, {}, (1, 4, 8, 16, 48)), (1, 80, {"disable_cuda_graph": True},
     (1, 4, 16, 48)), (1, 80, {"cuda_graph_bs": [2, 4]}, (2, 4, 8, 16, 32, 48))],
    ids=str,
)  # fmt: skip
def test_on_cuda_buckets_are_few_where_padding_is_free(nodes, gib, options, expected, monkeypatch) -> None:
    gpu(monkeypatch, gib, gib)
    drafter, limits = Plain(), {"context_length": 64, "max_running": 48, "chunk_size": 64}
    drafter.nodes = nodes
    config = Config(**options)
    found = resolve_sizes(config, CUDA, limits, drafter)
    assert found.batch_sizes == expected
    monkeypatch.setattr(build_module, "choose_device", lambda config: CUDA)
    captured = captured_batches(config, found)
    if not options:  # whatever batch SGLang would capture is padded to one that is captured
        assert max(captured) == min(largest_graph(config, gib * GIB), 48)
    on_cpu = resolve_sizes(config, torch.device("cpu"), limits, drafter)
    assert on_cpu.batch_sizes == (1, 2, 4, 8, 16, 32, 48), "on a CPU every row costs, and nothing is autotuned"


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 17, 64, 257])
def test_coarse_buckets_pad_by_less_than_half_or_within_what_is_free(most: int) -> None:
    for nodes in (1, 6, 32, 127):
        found = coarse_batches(most, nodes, 0)
        assert found[0] == 1 and found[-1] == most
        for small, large in itertools.pairwise(found):
            rare = large == most <= 3 * small and small >= 8
            assert large <= 2 * small or (large <= 4 * small and large * nodes <= WEIGHT_BOUND) or rare


def test_given_batches_beyond_the_running_requests_are_left_out() -> None:
    sizes = Sizes.resolve(Plain(), context_length=64, max_running=5, chunk_size=64, batches=(3, 8))
    assert sizes.batch_sizes == (3, 5)


# ---- it runs out ---------------------------------------------------------------------------------------------------


def test_an_allocation_that_fails_gives_one_message(tmp_path, monkeypatch) -> None:
    model = folder_of(tmp_path / "m", CONFIG)
    with pytest.raises(ValueError, match="before loading .*are missing.: .*--max-total-tokens 1000000000000,"):
        LLM(model, max_total_tokens=10**12, **OPTIONS)
    monkeypatch.setattr(memory_module, "host_memory", lambda: (2**60, 2**60))  # the machine boasts
    with pytest.raises(RuntimeError) as ended:
        LLM(model, max_total_tokens=10**12, speculative_algorithm="NGRAM", **OPTIONS)
    said = str(ended.value)
    assert said.startswith("not enough memory on cpu, making the KV pools (") and "allocate memory" in said
    assert f"target KV pool {10**12 * 3 * 2 * 16 * 4 / GIB:.0f}"[:-3] in said and "\n" not in said
    order = ["--max-total-tokens", "--max-running-requests 3", "--dtype float32",  # these were given
             "--speculative-num-draft-tokens 12", "--quantization"]  # fmt: skip
    assert sorted(order, key=said.index) == order and "--cuda-graph" not in said


OUT = "not enough memory on cpu, warming up .*estimated are target weights"


@pytest.mark.parametrize(
    ("error", "said"),
    [(torch.OutOfMemoryError("CUDA out of memory."), OUT), (MemoryError(), OUT),
     (RuntimeError("inductor: out of memory"), OUT), (RuntimeError("a kernel is wrong"), "^a kernel is wrong$")],
)  # fmt: skip
def test_whoever_runs_out_in_warm_up_is_told_of_once_and_other_errors_pass(error, said, tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("minispec.load.build.warm_up", fail)
    with pytest.raises(RuntimeError, match=said):
        LLM(folder_of(tmp_path / "m", CONFIG), **OPTIONS)
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_cpu_says_once_that_it_captures_nothing(tmp_path, caplog) -> None:
    llm = LLM(folder_of(tmp_path / "m", CONFIG), cuda_graph_bs=[3, 1], **OPTIONS)
    (line,) = [r.message for r in caplog.records if "graph" in r.message and r.levelname == "WARNING"]
    assert line.startswith("--cuda-graph-bs 1 3 changes nothing")
    assert llm.scheduler.sizes.batch_sizes == (1, 2, 3)


@pytest.mark.parametrize(
    ("device", "options", "adapts_from"),
    [(CUDA, {}, 8), (torch.device("cpu"), {}, math.inf), (CUDA, {"max_running_requests": 4}, 8),
     (CUDA, {"speculative_adaptive": False}, math.inf), (CUDA, {"speculative_adaptive": True}, 1),
     (CUDA, {"simulate_acc_len": 2.0}, math.inf), (CUDA, {"speculative_num_draft_tokens": None}, 1)],
)  # fmt: skip
def test_shapes_of_wide_batches_adapt_on_cuda_where_numbers_are_given(
    device, options, adapts_from, tmp_path, monkeypatch
) -> None:
    folder = folder_of(tmp_path / "model", WIDE)
    monkeypatch.setattr(build_module, "choose_device", lambda config: device)
    monkeypatch.setattr(build_module, "spin_alone", lambda: None)
    given = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4, **options}
    lines: list[str] = []
    build = Build(Config(model_path=str(folder), load_format="dummy", **given), lines.append)
    build.lead()
    assert build.config.adapts_from(device == CUDA) == adapts_from
    said = [line for line in lines if "--no-speculative-adaptive" in line]
    assert len(said) == (adapts_from == 8 and "max_running_requests" not in options), "one line where a batch is wide"


def test_a_long_start_begins_with_one_request(monkeypatch) -> None:
    engine, ran = build(tiny_model(), Plain()).engine, []
    monkeypatch.setattr(warm_up_module, "make_graphs", lambda engine, step, **how: ran.append(step))
    warm_up_module.warm_up(engine, lambda line: None)
    assert ran == warm_up_module.steps_of(engine) and ran[0].batch == 1 and len(ran) > 3
