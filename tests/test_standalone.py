"""A whole model as drafter: a target accepts all drafts of itself, and trees are those of a reference without cache.

Output tests cannot find drafting bugs, since a wrong tree only costs speed. So the target drafts for itself, where each
rejection is a bug, and models near to it and far from it draft trees that are computed again from the whole text, by
plain causal attention and Python lists.
"""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import test_llm
import torch
from conformance import truth
from conftest import slow_unless
from exactness import (
    CPU,
    VOCAB,
    any_ids,
    build,
    graphs_made,
    mixed_requests,
    next_logits,
    request,
    run,
    tiny_model,
    trace_only,
)
from safetensors.torch import load_file, save_file
from test_beam import after_prefix_hits, grown, moved_inputs, paths, record, siblings_see_each_other

from minispec import LLM, SamplingParams
from minispec.attention import Plan
from minispec.buffers import Sizes
from minispec.drafter import Drafter, Plain
from minispec.load.draft_models import ids_differ, load_draft, tokenizer_digest
from minispec.load.files import DirectStep
from minispec.load.memory import Budget
from minispec.load.tokenizer import byte_tokenizer, load_tokenizer
from minispec.load.warm_up import warm_up
from minispec.model import Model
from minispec.request import Request
from minispec.scheduler import Scheduler
from minispec.standalone import DraftModel, StandaloneDrafter

MODEL = tiny_model()
SHAPES = [("near", (1, 1, 2)), ("near", (3, 1, 4)), ("near", (4, 4, 16)), ("near", (1, 5, 4)), ("far", (2, 2, 7)),
          ("far", (3, 3, 8))]  # a draft, and its steps, topk and nodes  # fmt: skip


@torch.inference_mode()
def near(noise: float) -> Model:
    """Return the target with noise on its weights: its drafts are often accepted, and as often wrong."""
    model = tiny_model()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter += noise * torch.randn_like(parameter)
    return model


@torch.inference_mode()
def far() -> Model:
    """Return an unrelated model of another width, depth and attention, whose vocabulary is padded by three rows."""
    config = replace(MODEL.config, hidden_size=40, layers=2, heads=5, kv_heads=1, vocab_size=VOCAB + 3, qk_norm=True,
                     context_length=100)  # fmt: skip
    torch.manual_seed(2)
    model = Model.empty(config, torch.float32, CPU)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.4)
    return model


DRAFTS = {"itself": MODEL, "near": near(0.01), "far": far()}


def drafter(steps: int, topk: int, nodes: int, name: str = "near") -> StandaloneDrafter:
    """Return a fresh drafter."""
    return StandaloneDrafter(DraftModel(DRAFTS[name], VOCAB), rounds=steps, topk=topk, nodes=nodes)


@torch.inference_mode()
def slow_tree(ids: list[int], shape: tuple[int, int, int], draft: Model) -> set[tuple[int, ...]]:
    """Return the paths of the tree after a text, everything computed afresh for every node."""
    return grown(lambda path: next_logits(draft, [*ids, *path])[:VOCAB], shape)


def assert_slow_trees(compare: list, shape: tuple[int, int, int], name: str = "near", every: int = 1) -> None:
    """Compare the noted trees with the slow ones."""
    assert len(compare) > 10
    for ids, tokens, parents, _ in compare[::every]:
        assert paths(tokens, parents) == slow_tree(ids, shape, DRAFTS[name]), f"after {len(ids)} tokens"


def drafted(
    shape: tuple[int, int, int], requests: list[Request], name: str = "near", **how: object
) -> tuple[Scheduler, list]:
    """Serve requests exactly; returns the scheduler and every tree it was offered."""
    scheduler = build(MODEL, drafter(*shape, name), **how)
    compare = record(scheduler)
    run(scheduler, requests)
    assert all(r.output_ids == truth(MODEL, r) for r in requests)
    return scheduler, compare


# ---- the target as its own draft ----------------------------------------------------------------------------------

WAYS = [dict(), dict(running=1), dict(chunk=32), dict(chunk=1, running=2), dict(pages=15)]
STEPS = [(1, dict(pages=15)), (5, dict()), *((3, how) for how in WAYS)]


@pytest.mark.parametrize(("steps", "how"), STEPS, ids=str)
def test_a_chain_of_the_target_s_own_drafts_is_accepted_whole(steps, how) -> None:
    requests = mixed_requests(max_new_tokens=40)
    scheduler = build(MODEL, drafter(steps, 1, steps + 1, "itself"), **how)
    run(scheduler, requests)
    for r in requests:
        # Every step gives S + 1 tokens; the one that the end cuts short, if any, is a request's last.
        assert max(r.verified.depths) == steps and r.verified.depths[steps] >= r.verified.depths.total() - 1
        if not r.retractions:  # the first token is the prompt's
            assert r.verified.steps.total() == -(-39 // (steps + 1)) and len(r.output_ids) == 40
    assert scheduler.metrics.retractions > 0 or "pages" not in how


@pytest.mark.parametrize("coupled", [True, False])
def test_at_temperature_one_its_own_drafts_are_accepted_whole_if_they_share_its_noise(coupled) -> None:
    wish = {"temperature": 1.0, "max_new_tokens": 40}
    prompts = [any_ids(5 + 9 * i, random.Random(i)) for i in range(6)]
    requests = [request(f"r{i}", ids, sampling_seed=i, **wish) for i, ids in enumerate(prompts)]
    drafts = drafter(3, 1, 4, "itself")
    drafts.coupled = coupled
    run(build(MODEL, drafts), requests)
    for r in requests:
        whole = max(r.verified.depths) == 3 and r.verified.depths[3] >= r.verified.depths.total() - 1
        assert whole == coupled and r.output_ids == truth(MODEL, r)


# ---- every tree ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=str)
def test_every_tree_is_the_slow_reference_s(name, shape) -> None:
    requests = mixed_requests(max_new_tokens=8)
    for r in requests[1::4]:
        r.params = replace(r.params, top_p=0.9, repetition_penalty=1.2)
    _, compare = drafted(shape, requests, name)
    assert_slow_trees(compare, shape, name, every=3)


@pytest.mark.parametrize("how", WAYS[1:], ids=str)
def test_trees_stay_the_same_alone_in_chunks_and_under_retraction(how) -> None:
    requests = mixed_requests(max_new_tokens=40 if "pages" in how else 8)
    scheduler, compare = drafted((3, 2, 6), requests, **how)
    assert_slow_trees(compare, (3, 2, 6), every=9 if "pages" in how else 3)
    assert scheduler.metrics.retractions > 0 or "pages" not in how
    assert scheduler.metrics.verified.accept_length > 1.3, "nothing was accepted, so nothing was tested"


def test_a_prefix_hit_restores_the_draft_rows_to_the_last_of_the_page() -> None:
    assert StandaloneDrafter.lookahead == 0  # row i is of token i alone
    for differ in (15, 16, 17, 32):
        compare = after_prefix_hits(build(MODEL, drafter(3, 2, 6)), list(range(1, 40)), differ)
        assert_slow_trees(compare, (3, 2, 6))


def test_a_page_filled_by_the_last_accepted_path_is_whole() -> None:
    # The reply ends in the very row that fills a page, at every place of a step: the next turn reads those rows.
    for length in range(1, 6):
        scheduler = build(MODEL, drafter(3, 1, 4, "itself"))
        opening = request("a", list(range(2, 50 - length)), max_new_tokens=length + 1)
        run(scheduler, [opening])
        compare = record(scheduler)
        turn = request("b", [*opening.prompt_ids, *opening.output_ids, 7, 8], max_new_tokens=40)
        run(scheduler, [turn])
        assert turn.cached_tokens == 48
        assert_slow_trees(compare[:10] + compare, (3, 1, 4), "itself")


def test_drafting_goes_on_to_the_last_row_of_the_context() -> None:
    # Past the far draft's own 100 positions, and past what a tree has room for.
    for name in ("near", "far"):
        full = request("context", [1, 2, 3] * 70, max_new_tokens=None)
        _, compare = drafted((3, 2, 6), [full], name, running=1)
        assert len(full.prompt_ids) + len(full.output_ids) == 256
        assert_slow_trees(compare, (3, 2, 6), name, every=4)


# ---- compiled ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_it_is_one_graph_a_shape_whatever_the_depth_and_the_trees_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_only(monkeypatch, tmp_path)  # what Inductor makes of a block is tested in test_compiled.py
    models, shape = (tiny_model(), near(0.01)), (3, 2, 6)
    own = StandaloneDrafter(DraftModel(models[1], VOCAB), rounds=3, topk=2, nodes=6)
    compiler = DirectStep
    models[0].compile_blocks(compiler)
    own.compile(compiler)
    scheduler = build(models[0], own, running=1, chunk=128, compiled=True)
    with torch.inference_mode():
        warm_up(scheduler.engine, lambda line: None)
    # The target's prompt, a tree and a plain step; the draft's paths and frontiers, of few rows, and the roots of a
    # prefill step, one a query block. The models are of one shape, so the draft's prompts are the target's graph.
    assert graphs_made() == 6
    compare = record(scheduler)
    requests = mixed_requests(count=4, max_new_tokens=10)
    run(scheduler, requests)
    assert graphs_made() == 6
    assert_slow_trees(compare, shape)
    assert all(r.output_ids == truth(MODEL, r) for r in requests)


# ---- errors on purpose --------------------------------------------------------------------------------------------


def positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Drafted rows turn by one position less, as if the first token were not seen."""
    patch.setattr(StandaloneDrafter, "_inputs", moved_inputs(-1))


def drafts_in_the_root_s_row(patch: pytest.MonkeyPatch) -> None:
    """The beam starts where a head's does, one row early."""
    patch.setattr(StandaloneDrafter, "lookahead", 1)


def stale_rows(patch: pytest.MonkeyPatch) -> None:
    """What was drafted is not written again when it is accepted; only the root is."""
    original = Plan.fill

    def fill(self, slots, starts, visible, live, offset=0):
        last = live.cumsum(1) == live.sum(1, keepdim=True)
        path = self.kv.pool.shape[0] == 2 * MODEL.config.layers and self.width == 4 and self.window == 4
        original(self, slots, starts, visible, live & last if path else live, offset)

    patch.setattr(Plan, "fill", fill)


def first_token_unseen(patch: pytest.MonkeyPatch) -> None:
    """Whatever the first token is, the draft reads token 0."""
    original = StandaloneDrafter._read
    patch.setattr(StandaloneDrafter, "_read", lambda self, tokens, positions: original(
        self, tokens.masked_fill(positions == 0, 0), positions))  # fmt: skip


def no_root_after_a_prompt(patch: pytest.MonkeyPatch) -> None:
    """After a prompt the state is that of its last token, not the root's."""
    original = StandaloneDrafter.commit

    def commit(self, new):
        if new.prefill:
            new = new._replace(following=new.tokens)
        original(self, new)

    patch.setattr(StandaloneDrafter, "commit", commit)


def path_one_token_late(patch: pytest.MonkeyPatch) -> None:
    """The rows of a path hold the tokens before theirs."""
    original = StandaloneDrafter.commit
    patch.setattr(StandaloneDrafter, "commit", lambda self, new: original(
        self, new if new.prefill else new._replace(following=new.tokens)))  # fmt: skip


MUTATIONS = [positions_off_by_one, drafts_in_the_root_s_row, stale_rows, first_token_unseen, no_root_after_a_prompt,
             path_one_token_late, siblings_see_each_other]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [None, *MUTATIONS], ids=lambda m: m.__name__ if m else "none")
def test_a_wrong_draft_is_noticed(mutation, monkeypatch) -> None:
    if mutation is None:
        _, compare = drafted((3, 3, 8), mixed_requests(max_new_tokens=8), chunk=32)
        return assert_slow_trees(compare, (3, 3, 8))
    mutation(monkeypatch)
    _, compare = drafted((3, 3, 8), mixed_requests(max_new_tokens=8), chunk=32)
    with pytest.raises(AssertionError, match="after"):
        assert_slow_trees(compare, (3, 3, 8))
    return None


# ---- from files ---------------------------------------------------------------------------------------------------

CONFIG = {**test_llm.CONFIG, "num_hidden_layers": 2}
# Every step drafts: on a model so small a tree pays only now and then.
OPTIONS = {"dtype": "float32", "disable_torch_compile": True, "max_running_requests": 4, "speculative_adaptive": False}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16)


def write(folder: Path, seed: int = 0, tokens: int | None = 300, swap: bool = False, **config: object) -> Path:
    """Write a random model of a few layers and a tokenizer of so many ids, two of them swapped if asked for."""
    folder.mkdir()
    config = {**CONFIG, **config}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    d, ff, kv, v = config["hidden_size"], config["intermediate_size"], config["hidden_size"] // 2, config["vocab_size"]
    shapes = {"self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
              "self_attn.o_proj": (d, d), "mlp.gate_proj": (ff, d), "mlp.up_proj": (ff, d), "mlp.down_proj": (d, ff),
              "input_layernorm": (d,), "post_attention_layernorm": (d,)}  # fmt: skip
    tensors = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}
    tensors |= {f"model.layers.{i}.{name}.weight": shape for i in range(config["num_hidden_layers"])
                for name, shape in shapes.items()}  # fmt: skip
    save_file({name: torch.ones(s) if "norm" in name else 0.5 * torch.randn(s) for name, s in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    if tokens is not None:
        spec = json.loads(byte_tokenizer(tokens).backend._tokenizer.to_str())
        vocab = spec["model"]["vocab"]
        if swap:
            a, b = (next(name for name, i in vocab.items() if i == wanted) for wanted in (40, 41))
            vocab[a], vocab[b] = 41, 40
        (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def drafting(target: Path, draft: Path, *shape: int, **options: object) -> LLM:
    """Return the target drafting with a model in a folder, by default in the default shape."""
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    return LLM(target, speculative_algorithm="standalone", speculative_draft_model_path=str(draft),
               **dict(zip(names, shape, strict=False)), **{**OPTIONS, **options})  # fmt: skip


def outputs(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return what it says to a few prompts at once."""
    prompts = [[1, 2, 3], "hello", list(range(100)), [7] * 9, [299, 298, 280]]
    return [result["output_ids"] for result in llm.generate(prompts, params)]


def test_a_draft_model_s_joined_matrices_are_split(tmp_path: Path) -> None:
    write(tmp_path / "apart")
    joined = write(tmp_path / "joined", architectures=["Phi3ForCausalLM"], sliding_window=None)
    tensors = load_file(joined / "model.safetensors")
    for layer in range(2):
        for part, names in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            stem = f"model.layers.{layer}.{part.partition('.')[0]}"
            rows = [tensors.pop(f"{stem}.{name}_proj.weight") for name in names]
            tensors[f"model.layers.{layer}.{part}_proj.weight"] = torch.cat(rows)
    save_file(tensors, joined / "model.safetensors")
    with torch.inference_mode():
        one, other = (load_draft(tmp_path / name, tiny_model(), byte_tokenizer(300), 64).model.state_dict()
                      for name in ("apart", "joined"))  # fmt: skip
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_target_drafts_for_itself_from_its_own_folder(tmp_path) -> None:
    target = write(tmp_path / "target")
    llm = drafting(target, target)
    drafter = llm.scheduler.engine.drafter
    assert (drafter.rounds, drafter.topk, drafter.nodes, drafter.name) == (3, 1, 4, "standalone")
    assert drafter.network.model is not llm.scheduler.engine.model
    assert outputs(llm) == outputs(LLM(target, **OPTIONS))
    assert llm.scheduler.metrics.verified.accept_length > 3.5


def test_a_draft_may_state_its_tokenizer_s_digest_in_place_of_a_copy(tmp_path) -> None:
    target = write(tmp_path / "target")
    digest = tokenizer_digest(load_tokenizer(target))
    assert digest != tokenizer_digest(byte_tokenizer(299))
    draft = write(tmp_path / "draft", seed=1, tokens=None, num_hidden_layers=1, tokenizer_digest=digest)
    assert outputs(drafting(target, draft)) == outputs(LLM(target, **OPTIONS))


SIZES = [(320, 300), (320, 320), (290, 290), (300, 290), (256, 256)]  # of the target's vocabulary and of the draft's


@pytest.mark.parametrize(("vocab",), slow_unless([(sizes,) for sizes in SIZES],
                         lambda sizes: sizes in ((320, 300), (290, 290))), ids=str)  # fmt: skip
def test_vocabularies_of_other_sizes_fit_and_padding_is_never_proposed(vocab, tmp_path) -> None:
    # The draft's rows and the ids its tokenizer knows; the target has 300 and 300.
    rows, tokens = vocab
    target = write(tmp_path / "target")
    draft = write(tmp_path / "draft", seed=1, tokens=tokens, vocab_size=rows, num_hidden_layers=1)
    plain = LLM(target, **OPTIONS)
    for shape in ((), (3, 4, 16)):
        llm = drafting(target, draft, *shape)
        noted = record(llm.scheduler)
        for params in (GREEDY, SamplingParams(temperature=1.0, max_new_tokens=16, sampling_seed=3)):
            assert outputs(llm, params) == outputs(plain, params)
        seen = [draft for _, nodes, *_ in noted for draft in nodes[1:]]
        assert 0 <= min(seen) and max(seen) < min(rows, tokens, 300) and len(seen) > 50


@pytest.mark.parametrize("tied", [True, False])
def test_with_a_token_map_the_draft_keeps_those_rows_of_its_lm_head_and_changes_no_token(tied, tmp_path) -> None:
    target = write(tmp_path / "target")
    draft = write(tmp_path / "draft", vocab_size=280, tokens=280, num_hidden_layers=1, tie_word_embeddings=tied, seed=1)
    ids = [5, 60, 7, 290, 8, 31, 2, 120]  # the draft has no 290
    known = [token for token in ids if token < 280]
    (tmp_path / "map.json").write_text(json.dumps(ids))
    (tmp_path / "none.json").write_text("[290, 291]")
    plain, whole = LLM(target, **OPTIONS), drafting(target, draft)
    llm = drafting(target, draft, 3, 4, 9, speculative_token_map=str(tmp_path / "map.json"))
    few, full = (one.scheduler.engine.drafter.network for one in (llm, whole))
    state = torch.randn(4, few.hidden_size)
    with torch.inference_mode():
        torch.testing.assert_close(few.logits(state), full.logits(state)[:, known])
    noted = record(llm.scheduler)
    for params in (GREEDY, SamplingParams(temperature=1.0, max_new_tokens=16, sampling_seed=3)):
        assert outputs(llm, params) == outputs(plain, params)
    drafted = {draft for _, nodes, *_ in noted for draft in nodes[1:]}
    assert drafted <= set(known) and len(drafted) > 3
    with pytest.raises(ValueError, match="--speculative-token-map has no id below 280"):
        drafting(target, draft, speculative_token_map=str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="--speculative-eagle-topk 8: the draft has 7 tokens only"):
        drafting(target, draft, 3, 8, 9, speculative_token_map=str(tmp_path / "map.json"))


def refusal(target: Path, draft: Path | str, **options: object) -> str:
    """Return the one line with which a draft is refused; it names the flag."""
    with pytest.raises(ValueError, match="--speculative-draft-model-path") as caught:
        drafting(target, draft, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_draft_that_does_not_fit_is_refused_in_one_line(tmp_path) -> None:
    target = write(tmp_path / "target")
    assert "id 40 is" in refusal(target, write(tmp_path / "swapped", swap=True))
    assert "no tokenizer" in refusal(target, write(tmp_path / "mute", tokens=None))
    other = write(tmp_path / "other", tokens=None, tokenizer_digest=tokenizer_digest(byte_tokenizer(299)))
    assert "tokenizer_digest" in refusal(target, other)
    assert "neither a folder" in refusal(target, "no/such/model/anywhere")
    assert "no meaning for the folder" in refusal(target, target, speculative_draft_model_revision="main")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refusal(target, empty)
    odd = write(tmp_path / "odd", architectures=["LlamaForCausalLMEagle"])
    assert "LlamaForCausalLMEagle" in refusal(target, odd)
    thin = write(tmp_path / "thin")
    (thin / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    assert "missing tensors: layers.2." in refusal(target, thin)
    small = write(tmp_path / "small", quantization_config={"quant_method": "awq"})
    assert "quantization_config with quant_method 'awq'" in refusal(target, small)
    bare = write(tmp_path / "bare")
    (bare / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "vocab_size"}))
    assert "vocab_size" in refusal(target, bare)
    with pytest.raises(ValueError, match="STANDALONE needs --speculative-draft-model-path"):
        LLM(target, speculative_algorithm="STANDALONE", **OPTIONS)


def test_a_draft_of_a_shorter_context_runs_on_and_says_so_once(tmp_path, caplog) -> None:
    target = write(tmp_path / "target")
    draft = write(tmp_path / "draft", max_position_embeddings=64)
    with caplog.at_level(logging.INFO, logger="minispec"):
        llm = drafting(target, draft)
        assert outputs(llm) == outputs(LLM(target, **OPTIONS))
    assert sum("made for 64 tokens of the 256" in line for line in caplog.messages) == 1
    assert llm.scheduler.metrics.verified.accept_length > 3.5  # the same weights, and true positions beyond its 64
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="minispec"):
        drafting(target, draft, context_length=64)
    assert not any("made for" in line for line in caplog.messages)


def test_the_pool_counts_the_draft_s_pages(tmp_path) -> None:
    target, deep = write(tmp_path / "target"), write(tmp_path / "deep", num_hidden_layers=6)
    llm = drafting(target, deep)
    drafter, engine = llm.scheduler.engine.drafter.head, llm.scheduler.engine
    assert drafter.kv_shape == (6, 2, 8) and drafter.kv.pool.shape[0] == 12 and engine.kv.pool.shape[0] == 4

    def pages(drafter: Drafter) -> int:
        config = replace(llm.config, max_total_tokens=None)
        sizes = Sizes.resolve(drafter, context_length=10**6, max_running=4, chunk_size=64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minispec.load.memory.host_memory", lambda: (2**20, 2**20))
            return Budget(config, CPU, sizes, engine.model, drafter).pages() - 1

    # 64 rows of 2 layers, keys and values, 2 heads of 8 floats: 16 KiB a page, and 48 KiB more for 6 layers.
    assert pages(Plain()) == 2**18 // 2**14 and pages(drafter) == 2**18 // 2**16


def test_tokenizers_are_compared_by_what_ids_mean() -> None:
    one = byte_tokenizer(300)
    assert ids_differ(one, byte_tokenizer(300)) is None and ids_differ(one, byte_tokenizer(270)) is None
    other = byte_tokenizer(300)
    inner = other.backend.token_bytes
    other.backend.token_bytes = lambda token: inner(token) + b"!" * (token == 299)
    assert "id 299" in ids_differ(one, other) and ids_differ(byte_tokenizer(299), other) is None
