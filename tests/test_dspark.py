"""DSpark: numbers by hand, trees by a heap over a reference that knows no batch and no cache, and checkpoints.

As with DFlash, whose reference computes the block's states here too: a wrong draft changes no output, so every tree of
an engine is compared with that of the reference, which computes the whole text afresh.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import truth
from exactness import CPU, VOCAB, build, mixed_requests, request, run
from test_beam import paths, record
from test_dflash import (
    DRAFTED,
    LAYERS,
    MASK,
    MODEL,
    SIZE,
    D,
    Reference,
    block_one_position_late,
    context_with_the_bonus,
    speculator,
    speculator_tensors,
    stated,
    tensors,
    the_other_direction,
    write,
)
from torch import Tensor
from transformers import Qwen3Config

from minispec.attention import Plan
from minispec.config import Config
from minispec.cpu.gather import PagedGather
from minispec.drafter import Batch, Committed
from minispec.dspark import DSparkConfig, DSparkDrafter, DSparkHead
from minispec.kv import KVShape, PagedKV
from minispec.load.dflash_heads import read_dflash
from minispec.load.drafters import make_drafter
from minispec.load.dspark_heads import read_dspark
from minispec.load.heads import load_head
from minispec.load.tokenizer import byte_tokenizer
from minispec.lookup import Lookups
from minispec.model import Model
from minispec.model_config import ModelError
from minispec.sampling import gumbel
from minispec.scheduler import Scheduler
from minispec.tree import PADDING, DraftTree

R = 6


def deepseek(**more: Any) -> dict[str, Any]:
    """Return a config.json as DeepSeek's trainer writes it: a copy of the target's, with all keys at the top level."""
    config = stated()
    own = config.pop("dflash_config")
    for key in ("auto_map", "rope_theta", "rope_scaling"):
        del config[key]
    return {**config, **own, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "markov_rank": R,
            "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, **more}  # fmt: skip


def heads(rows: int = VOCAB, reads: int = D + R) -> dict[str, Tensor]:
    """Return the tensors of the two heads; biases have a deviation of 1, and confidences lie on both sides of 0.5."""
    generator = torch.Generator().manual_seed(9)
    made = {"markov_head.markov_w1.weight": (VOCAB, R), "markov_head.markov_w2.weight": (rows, R),
            "confidence_head.proj.weight": (1, reads), "confidence_head.proj.bias": (1,)}  # fmt: skip
    found = {name: torch.randn(shape, generator=generator) for name, shape in made.items()}
    return found | {"markov_head.markov_w2.weight": found["markov_head.markov_w2.weight"] / math.sqrt(R)}


def copies() -> dict[str, Tensor]:
    """Return what DeepSeek's files hold of the target."""
    return {"embed_tokens.weight": MODEL.embed_tokens.weight.clone(), "lm_head.weight": MODEL.lm_head.weight.clone()}


def load_dspark(folder: Path, target: Model = MODEL, **how: Any) -> DSparkHead:
    """Return the network in a folder."""
    head = load_head(folder, target, read=read_dspark, **how)
    assert isinstance(head, DSparkHead)
    return head


class Slow:
    """The tree after one text, by a heap: a node's children come from its row and its own token."""

    def __init__(self, folder: Path, first: int, made: dict[str, Tensor] | None = None) -> None:
        config = json.loads((folder / "config.json").read_text())
        if "dflash_config" not in config:
            path = folder / "reference"
            path.mkdir(exist_ok=True)
            own = {key: config[key] for key in ("target_layer_ids", "mask_token_id")}
            (path / "config.json").write_text(json.dumps({**config, "rope_theta": 1000000, "dflash_config": own}))
            folder = path
        self.block, self.first, self.w = Reference(folder), first, made or heads()
        self.ids = torch.arange(VOCAB)  # the target's of the draft's

    def confidence(self, h: Tensor, pair: Tensor) -> float:
        """Return the confidence of a row's draft: h [d], its state; pair [R], what the Markov head has before it."""
        proj = self.w["confidence_head.proj.weight"][0]
        said = proj @ torch.cat((h, pair))[: len(proj)] + self.w["confidence_head.proj.bias"][0]
        return 1 / (1 + math.exp(-float(said)))

    @torch.inference_mode()
    def chain_confidences(self, text: list[int], chain: list[int], rows: int) -> list[float]:
        """Return the confidence of each draft of a chain after a text."""
        pairs = self.w["markov_head.markov_w1.weight"][[text[-1], *chain[:-1]]]
        states = self.block.states(text, rows)[self.first :][: len(chain)]
        return [self.confidence(h, pair) for h, pair in zip(states, pairs, strict=True)]

    @torch.inference_mode()
    def tree(
        self, text: list[int], rows: int, topk: int, count: int, threshold: float = 0.0,
        noise: tuple[float, int] | None = None,
    ) -> set[tuple[int, ...]]:  # fmt: skip
        """Return the `count` likeliest paths; rows: of the block. noise: temperature and seed of a sampled request."""
        states = self.block.states(text, rows)[self.first :]
        found: set[tuple[int, ...]] = set()
        heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        while heap and len(found) <= count:
            score, path = heapq.heappop(heap)
            found.add(path)
            if len(path) == len(states):
                continue
            h = states[len(path)]
            pair = self.w["markov_head.markov_w1.weight"][path[-1] if path else text[-1]]
            logits = self.block.lm_head @ h + self.w["markov_head.markov_w2.weight"] @ pair
            if self.confidence(h, pair) < threshold:
                continue
            if noise is not None:  # that of the target's pick there
                at = torch.tensor([len(text) + len(path)])
                logits = logits / noise[0] + gumbel(torch.tensor(noise[1]), at, self.ids)[0]
            values, ids = logits.log_softmax(-1).topk(topk)
            for value, token in zip(values, self.ids[ids], strict=True):
                heapq.heappush(heap, (score - float(value), (*path, int(token))))
        return found - {()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek's files: the bonus's row drafts."""
    return write(tmp_path_factory.mktemp("draft") / "deepseek", deepseek(), tensors() | heads() | copies())


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose bonus's row does not draft."""
    config = deepseek(sample_from_anchor=False)
    return write(tmp_path_factory.mktemp("draft") / "masked", config, tensors() | heads())


def served(
    folder: Path, requests: list[Any], shape: dict[str, Any], threshold: float = 0.0, **how: Any
) -> tuple[Scheduler, list[Any]]:
    """Serve requests with a checkpoint; return the scheduler, and of each tree text, tokens, parents, request."""
    with torch.inference_mode():
        scheduler = build(MODEL, DSparkDrafter(load_dspark(folder), threshold=threshold, **shape), **how)
    seen = record(scheduler)
    run(scheduler, requests)
    for r in requests[::3]:
        assert r.output_ids == truth(MODEL, r)
    return scheduler, seen


def drafted(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Return the paths of a tree without padding, whose parents are the root."""
    assert all(parent == 0 for token, parent in zip(tokens[1:], parents[1:], strict=True) if token == PADDING)
    return {path for path in paths(tokens, parents) if PADDING not in path}


def assert_trees(slow: Slow, seen: list[Any], shape: dict[str, Any], threshold: float = 0.0, every: int = 3) -> None:
    """Compare trees with the reference's."""
    assert len(seen) > 8
    for text, tokens, parents, r in seen[::every]:
        noise = (r.params.temperature, r.seed) if r.params.temperature else None
        expected = slow.tree(text, shape["block"], shape.get("topk", 1), shape["nodes"] - 1, threshold, noise)
        assert drafted(tokens, parents) == expected, f"after {len(text)} tokens"


CHAIN = {"block": 5, "nodes": 6}  # with DeepSeek's network
WAYS = [dict(), dict(chunk=32, running=1), dict(pages=15)]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_chains_are_the_reference_s_in_a_batch_in_chunks_and_under_retraction(how: dict, folder: Path) -> None:
    requests = mixed_requests(max_new_tokens=40 if "pages" in how else 6)
    for r in requests[1::3]:
        r.params = replace(r.params, temperature=0.8)
    scheduler, seen = served(folder, requests, CHAIN, **how)
    assert_trees(Slow(folder, 0), seen, CHAIN, every=11 if "pages" in how else 3)
    assert scheduler.metrics.retractions > 0 or "pages" not in how


SHAPES = [dict(block=5, topk=2, nodes=9), dict(block=3, topk=4, nodes=16), dict(block=4, topk=1, nodes=3)]


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tree_is_the_heap_s(shape: dict, threshold: float, folder: Path) -> None:
    requests = mixed_requests(max_new_tokens=8)
    for r in requests[::2]:
        r.params = replace(r.params, temperature=0.8)
    _, seen = served(folder, requests, shape, threshold)
    assert_trees(Slow(folder, 0), seen, shape, threshold)
    if threshold:
        sizes = {sum(token != PADDING for token in tokens) for _, tokens, *_ in seen}
        assert {1, shape["nodes"]} <= sizes, "nothing was cut, or everything"


def test_where_the_bonus_s_row_does_not_draft_the_trees_are_the_reference_s_too(masked: Path) -> None:
    shape = dict(block=5, topk=2, nodes=9)
    assert_trees(Slow(masked, 1), served(masked, mixed_requests(max_new_tokens=6), shape)[1], shape)


def test_smaller_trees_come_of_the_same_pass(folder: Path) -> None:
    with torch.inference_mode():
        scheduler = build(MODEL, DSparkDrafter(load_dspark(folder), block=5, topk=2, nodes=9, smaller=4))
    turns = iter(range(10**6))
    scheduler.policy.forced = lambda shapes: shapes[next(turns) % 3]  # plain steps leave a backlog too
    seen = record(scheduler)
    requests = mixed_requests(max_new_tokens=10)
    run(scheduler, requests)
    assert {len(tokens) for _, tokens, *_ in seen} == {4, 9}
    for nodes in (4, 9):
        sized = [one for one in seen if len(one[1]) == nodes]
        assert_trees(Slow(folder, 0), sized, dict(block=5, topk=2, nodes=nodes))


@pytest.mark.parametrize("chain", [CHAIN, dict(block=5, nodes=4)], ids=str)
def test_the_policy_hears_how_confident_the_network_is_of_each_chain(chain: dict, folder: Path) -> None:
    with torch.inference_mode():
        scheduler = build(MODEL, DSparkDrafter(load_dspark(folder), **chain))
    seen, heard, says, slow = record(scheduler), defaultdict(list), scheduler.policy.says, Slow(folder, 0)
    scheduler.policy.says = lambda r: heard[r].append(says(r)) or heard[r][-1]
    requests = mixed_requests(max_new_tokens=6)
    run(scheduler, requests)
    assert scheduler.policy.says and sum(map(len, heard.values())) == len(seen) > 8
    for text, tokens, _, r in seen:
        assert heard[r].pop(0) == pytest.approx(slow.chain_confidences(text, tokens[1:], 5), abs=1e-4)


# ---- faults, each of which a comparison sees ----------------------------------------------------------------------


def no_markov_bias(patch: pytest.MonkeyPatch) -> None:
    """Rows draft as DFlash's do."""
    following = DSparkHead.following
    patch.setattr(DSparkHead, "following", lambda self, before: 0 * following(self, before))


def bias_of_the_anchor_in_every_row(patch: pytest.MonkeyPatch) -> None:
    """The token before is taken to be the same for all rows."""
    before = DSparkHead.before
    patch.setattr(DSparkHead, "before", lambda self, tokens: before(self, tokens * 0 + 3))


def the_next_row_s_state(patch: pytest.MonkeyPatch) -> None:
    """The row after the bonus's drafts the first token."""
    close = DSparkDrafter._close
    patch.setattr(DSparkDrafter, "_close", lambda self, step, batch, states: close(
        self, step, batch, states.roll(-1, 1)))  # fmt: skip


def confidence_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    """The confidence head reads states that are not normed."""

    def raw(self: DSparkHead, state: Tensor, before: Tensor) -> Tensor:
        read = torch.cat((state.expand(*before.shape[:-1], -1), before), dim=-1)
        return self.confidence_head["proj"](read).squeeze(-1)

    patch.setattr(DSparkHead, "confidence", raw)


def confidence_without_the_pair(patch: pytest.MonkeyPatch) -> None:
    """The confidence head does not know the token before."""
    confidence = DSparkHead.confidence
    patch.setattr(DSparkHead, "confidence", lambda self, state, before: confidence(self, state, 0 * before))


FAULTS = [block_one_position_late, the_other_direction, context_with_the_bonus, no_markov_bias,
          bias_of_the_anchor_in_every_row, the_next_row_s_state, confidence_before_the_norm,
          confidence_without_the_pair]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault: Callable[[pytest.MonkeyPatch], None], folder: Path, monkeypatch: Any) -> None:
    fault(monkeypatch)
    seen = served(folder, mixed_requests(4, max_new_tokens=6), CHAIN, 0.5)[1]
    with pytest.raises(AssertionError, match="after"):
        assert_trees(Slow(folder, 0), seen, CHAIN, 0.5, every=1)


# ---- numbers by hand ----------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_golden_numbers() -> None:
    """test_dflash.py's block, whose states are known, with W1 = (1, -1), W2 = (0, 2) and w = (1, 0; 1).

    The bonus is token 0 and its bias (0, 2), that after token 1 (0, -2). So the logits are (1.311104, 2.530101), then
    (1.221781, -2.712216), then (1.204440, 1.258836); without the bias all three drafts would be token 0. The logits of
    confidence are 1.311104 + 1, 1.221781 - 1 and 1.204440 + 1.
    """
    shape = replace(MODEL.config, vocab_size=2, hidden_size=2, intermediate_size=2, layers=1, heads=1, kv_heads=1,
                    head_dim=2, qk_norm=True, norm_eps=1e-6)  # fmt: skip
    target = Model.empty(shape, torch.float32, CPU)
    head = DSparkHead.empty(DSparkConfig("dspark", shape, (1,), block_size=3, mask_token=1, rank=1, confidence=3),
                            target)  # fmt: skip
    target.embed_tokens.weight.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    target.lm_head.weight.copy_(torch.eye(2))
    for name, parameter in head.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.zero_()
    head.fc.weight.copy_(torch.eye(2))
    head.layer.o_proj.weight.copy_(torch.eye(2))
    head.layer.qkv_proj.weight.copy_(torch.eye(2).repeat(3, 1))
    head.markov_head["markov_w1"].weight.copy_(torch.tensor([[1.0], [-1.0]]))
    head.markov_head["markov_w2"].weight.copy_(torch.tensor([[0.0], [2.0]]))
    head.confidence_head["proj"].weight.copy_(torch.tensor([[1.0, 0.0, 1.0]]))
    slot, ids = torch.tensor([1]), torch.zeros(1, 2, dtype=torch.int64)

    def tree(threshold: float) -> tuple[list[int], list[float]]:
        kv = PagedKV(KVShape(1, 1, 2), pages=3, page_size=16, slots=2, rows_per_slot=16, zeros=torch.zeros)
        kv.map(1, 0, kv.allocate(1))
        drafter = DSparkDrafter(head, block=3, nodes=4, threshold=threshold)
        drafter.attach(kv, PagedGather, [1], [])
        chain = Plan(kv, 1, 1, 2)
        chain.fill(slot, torch.tensor([0]), torch.ones(1, 2, 2).tril().bool(), torch.ones(1, 2).bool())
        features = torch.tensor([[[3.0, 4.0], [4.0, -3.0]]])
        drafter.commit(Committed(slot, ids, ids, torch.tensor([[0, 1]]), features, slot, chain, prefill=False))
        host, told = DraftTree(torch.zeros(1, 4), torch.zeros(1, 4)), torch.zeros(1, 4)
        found = drafter.propose(Batch(slot, torch.tensor([2]), torch.tensor([0]), host, scores=told))
        return found.tokens[0].tolist(), told[0].exp().tolist()

    tokens, chances = tree(0.0)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    each = sigmoid(2.530101 - 1.311104), sigmoid(1.221781 + 2.712216), sigmoid(1.258836 - 1.204440)
    assert tokens == [0, 1, 0, 1]
    assert chances[1:] == pytest.approx([each[0], each[0] * each[1], each[0] * each[1] * each[2]], abs=2e-6)
    assert [sigmoid(x) for x in (2.311104, 0.221781, 2.204440)] == pytest.approx([0.9098, 0.5552, 0.9006], abs=1e-4)
    assert tree(0.55)[0] == [0, 1, 0, 1] and tree(0.56)[0] == [0, 1, -1, -1] and tree(0.92)[0] == [0, -1, -1, -1]


# ---- checkpoints --------------------------------------------------------------------------------------------------


def test_copies_of_the_target_s_embedding_and_lm_head_are_dropped_and_others_are_the_network_s(
    folder: Path, tmp_path: Path
) -> None:
    head = load_dspark(folder)
    assert head.embed_tokens is None and head.lm_head is None and head.taps == (1, 2)
    assert (head.first, head.block_size, head.mask_token) == (0, 5, MASK)
    own = tensors() | heads() | copies()
    own["lm_head.weight"] = own["lm_head.weight"].flip(0)
    path = write(tmp_path / "own", deepseek(), own)
    slow = Slow(path, 0)
    slow.block.lm_head = own["lm_head.weight"]
    assert load_dspark(path).lm_head is not None
    assert_trees(slow, served(path, mixed_requests(3, max_new_tokens=6), CHAIN)[1], CHAIN)


def test_a_config_written_as_deepseek_s_trainer_writes_it_is_read(folder: Path, tmp_path: Path) -> None:
    """It copies the target's config, sets these attributes, and lets transformers write the file."""
    config = Qwen3Config(
        hidden_size=D, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=SIZE, vocab_size=VOCAB, max_position_embeddings=512, rope_theta=1000000, bos_token_id=1,
    )  # fmt: skip
    own = {"architectures": ["Qwen3DSparkModel"], "num_target_layers": 3, "num_hidden_layers": LAYERS, "block_size": 5,
           "tie_word_embeddings": False, "layer_types": ["full_attention"] * LAYERS, "mask_token_id": MASK,
           "_attn_implementation": "flex_attention", "target_layer_ids": [0, 1], "num_anchors": 512,
           "enable_confidence_head": True, "confidence_head_with_markov": True, "markov_rank": R,
           "markov_head_type": "vanilla", "dtype": torch.bfloat16}  # fmt: skip
    for name, value in own.items():
        setattr(config, name, value)
    path = write(tmp_path / "draft", {}, tensors() | heads() | copies())
    config.save_pretrained(path)
    found, known = load_dspark(path), load_dspark(folder)
    assert (found.taps, found.first, found.block_size, found.mask_token) == ((1, 2), 0, 5, MASK)
    assert torch.equal(found.frequencies, known.frequencies)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), known.parameters(), strict=True))


def test_specforge_s_files_have_a_dflash_config_and_no_copies(tmp_path: Path) -> None:
    """The embedding, id -1, is a layer's output too; the confidence head reads states alone, and has no bias."""
    own = {"mask_token_id": MASK, "target_layer_ids": [-1, 1], "markov_rank": R, "markov_head_type": "vanilla",
           "projector_type": "dspark", "attention_mode": "gqa", "enable_confidence_head": True,
           "confidence_head_with_markov": False, "confidence_head_alpha": 1.0}  # fmt: skip
    made = tensors() | heads(reads=D)
    del made["confidence_head.proj.bias"]
    config = {**stated(), "architectures": ["DSparkDraftModel"], "block_size": 4, "dflash_config": own}
    head = load_dspark(write(tmp_path / "forge", config, made))
    assert head.taps == (0, 2) and (head.first, head.block_size, head.knows_pair) == (0, 4, False)
    assert head.confidence_head["proj"].bias.tolist() == [0.0]
    del config["block_size"]
    assert load_dspark(write(tmp_path / "silent", config, made)).block_size == 7


def own(**more: Any) -> dict[str, Any]:
    """Return a config.json as speculators writes it."""
    return speculator(architectures=["DSparkDraftModel"], speculators_model_type="dspark", markov_rank=R,
                      markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True,
                      max_anchors=3072, speculators_config={"algorithm": "dspark"}, **more)  # fmt: skip


@pytest.mark.parametrize("said", [{}, {"sample_from_anchor": True}], ids=str)
def test_speculators_files_have_a_draft_vocabulary_and_say_if_the_bonus_s_row_drafts(
    said: dict, tmp_path: Path
) -> None:
    made = speculator_tensors() | heads(len(DRAFTED))
    path = write(tmp_path / "draft", own(**said), made)
    first = 0 if said else 1
    assert load_dspark(path).first == first
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "config.json").write_text(json.dumps(stated()))
    slow, shape = Slow(tmp_path / "flat", first, made), dict(block=5, topk=2, nodes=9)
    slow.block.lm_head, slow.ids = made["lm_head.weight"], DRAFTED
    requests = mixed_requests(4, max_new_tokens=6)
    requests[0].params = replace(requests[0].params, temperature=1.0)
    assert_trees(slow, served(path, requests, shape)[1], shape)


def test_a_token_map_narrows_the_markov_head_too(folder: Path) -> None:
    with torch.inference_mode():
        scheduler = build(MODEL, DSparkDrafter(load_dspark(folder, token_map=DRAFTED), **CHAIN))
    seen, requests, made = record(scheduler), mixed_requests(4, max_new_tokens=6), heads()
    run(scheduler, requests)
    name = "markov_head.markov_w2.weight"
    slow = Slow(folder, 0, made | {name: made[name][DRAFTED]})
    slow.block.lm_head, slow.ids = MODEL.lm_head.weight[DRAFTED], DRAFTED
    assert_trees(slow, seen, CHAIN)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gated": ({"markov_head_type": "gated"}, {}, "markov_head_type gated is not supported; supported: vanilla"),
    "a gate all the same": ({}, {"markov_head.gate_proj.weight": (R, D + R)}, "unknown tensors: .*gate_proj"),
    "no Markov head": ({}, {"markov_head.markov_w1.weight": None}, "missing tensors: markov_head.markov_w1.weight"),
    "half a Markov head": ({}, {"markov_head.markov_w2.weight": None}, "missing tensors: markov_head.markov_w2.weight"),
    "another rank": ({"markov_rank": 7}, {}, "markov_w1.weight"),
    "latent attention": ({"attention_mode": "mla"}, {}, "attention_mode 'mla' is not supported; supported: gqa"),
    "DFlash": ({"architectures": ["DFlashDraftModel"]}, {}, r"\['DFlashDraftModel'\] are not supported; .*Qwen3DSpark"),
    "the last layer": ({"target_layer_ids": [0, 2]}, {}, r"ids in \[-1, 1\].*got \[0, 2\]"),
    "sliding layers": ({"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 64}, {}, "sliding_attention"),
    "an unknown key": ({"shift_label": True}, {}, "keys .*shift_label"),
    "another target's depth": ({"num_target_layers": 36}, {}, "num_target_layers is 36, and the target has 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    keys, more, said = REFUSED[case]
    made = {**tensors(), **heads(), **{name: shape and torch.zeros(shape) for name, shape in more.items()}}
    path = write(tmp_path / "draft", deepseek(**keys), {name: x for name, x in made.items() if x is not None})
    with pytest.raises(ModelError, match=f"--speculative-draft-model-path .*{said}"):
        load_dspark(path)


# ---- flags --------------------------------------------------------------------------------------------------------


def made(folder: Path | None, **flags: Any) -> Any:
    """Return the drafter that flags ask for."""
    config = Config(model_path="tiny", speculative_algorithm="DSPARK", device="cpu",
                    speculative_draft_model_path=None if folder is None else str(folder),
                    **{f"speculative_{name}": value for name, value in flags.items()})  # fmt: skip
    with torch.inference_mode():
        return make_drafter(config, MODEL, Path("tiny"), byte_tokenizer(VOCAB))


@pytest.mark.parametrize(
    ("flags", "shape", "rows"),
    [
        ({"lookup": False}, (1, 6), (5, 6)),
        ({"dspark_block_size": 3}, (1, 4), (3, 4)),
        ({"num_draft_tokens": 4}, (1, 4), (3, 4)),
        ({"dspark_block_size": 4, "num_draft_tokens": 5, "num_steps": 1, "eagle_topk": 1}, (1, 5), (4, 5)),
        ({"eagle_topk": 2, "num_draft_tokens": 9}, (2, 9), (5, 5)),
    ],
    ids=str,
)
def test_flags_give_the_block_and_the_tree(
    flags: dict, shape: tuple[int, int], rows: tuple[int, int], folder: Path, masked: Path
) -> None:
    """rows: of the block of DeepSeek's network, and of that whose bonus's row does not draft."""
    for path, block in zip((folder, masked), rows, strict=True):
        if flags == {"lookup": False} and path == masked:
            continue  # its five rows are four drafts
        drafter = made(path, **flags)
        drafter = getattr(drafter, "head", drafter)
        assert (drafter.topk, drafter.nodes, drafter.block) == (*shape, block)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_draft_tokens": 5, "dspark_block_size": 5}, "--speculative-num-draft-tokens must be one more than "
                                                          "--speculative-dspark-block-size, 6, .* got 5"),
        ({"eagle_topk": 4}, "--speculative-eagle-topk 4 needs --speculative-num-draft-tokens"),
        ({"dspark_confidence_threshold": 1.5}, r"-confidence-threshold must be in \[0, 1\], got 1.5"),
        ({"draft_window_size": 4}, "--speculative-draft-window-size must be at least 5, .* got 4"),
        ({"draft_model_path": None}, "DSPARK needs --speculative-draft-model-path: a DSpark checkpoint"),
    ],
    ids=str,
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(flags: dict, said: str, folder: Path) -> None:
    path = flags.pop("draft_model_path", folder)
    with pytest.raises(ValueError, match=said):
        made(path, **flags)


def test_a_threshold_needs_a_confidence_head(tmp_path: Path) -> None:
    silent = {name: x for name, x in (tensors() | heads()).items() if "confidence" not in name}
    path = write(tmp_path / "silent", deepseek(enable_confidence_head=False), silent)
    assert made(path, lookup=False).nodes == 6
    with pytest.raises(ValueError, match="--speculative-dspark-confidence-threshold 0.5: .* no confidence head"):
        made(path, dspark_confidence_threshold=0.5)


def test_lookups_stand_beside_it_by_default_and_a_window_bounds_its_rows(folder: Path) -> None:
    drafter = made(folder, dspark_confidence_threshold=0.4)
    assert isinstance(drafter, Lookups) and isinstance(drafter.head, DSparkDrafter) and drafter.head.threshold == 0.4
    assert [size.nodes for size in drafter.trees] == [6, 8]
    scheduler, requests = build(MODEL, drafter), mixed_requests(4, max_new_tokens=12)
    run(scheduler, requests)
    assert all(r.output_ids == truth(MODEL, r) for r in requests)
    scheduler = build(MODEL, made(folder, draft_window_size=7, eagle_topk=1))
    seen, slow = record(scheduler), Slow(folder, 0)
    slow.block.window = 7
    run(scheduler, [request("r", range(40), max_new_tokens=24)])
    assert_trees(slow, seen, CHAIN, every=1)


def test_an_eagle_or_dflash_flag_names_the_right_one(folder: Path) -> None:
    for read in ({}, {"read": read_dflash}):
        with pytest.raises(ModelError, match="give --speculative-algorithm DSPARK"):
            load_head(folder, MODEL, **read)
