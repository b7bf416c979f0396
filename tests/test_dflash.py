"""DFlash: a reference made of transformers' parts, trees by a heap, and checkpoints that are refused.

A wrong draft changes no output. So at every step of an engine the logits of the block are compared with those of a
reference that computes the whole text afresh, and the tree with one that a heap makes of the reference's logits.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import mixture_model, truth, windowed_model
from exactness import VOCAB, build, graphs_made, mixed_requests, reference, request, run, tiny_model, trace_only
from safetensors.torch import save_file
from test_beam import after_prefix_hits, paths, record
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from minispec.attention import Causal, Plan
from minispec.config import Config
from minispec.dflash import DFlashConfig, DFlashDrafter, DFlashHead, Pass
from minispec.drafter import Batch
from minispec.load.dflash_heads import default_ids, read_dflash
from minispec.load.drafters import make_drafter
from minispec.load.files import DirectStep
from minispec.load.heads import load_head
from minispec.load.tokenizer import byte_tokenizer
from minispec.load.warm_up import warm_up
from minispec.lookup import Lookups
from minispec.model import Model
from minispec.model_config import ModelError
from minispec.sampling import gumbel
from minispec.scheduler import Scheduler
from minispec.tree import DraftTree

MODEL = tiny_model()
D, SIZE, LAYERS, MASK = 72, 12, 2, 60  # the draft's hidden size, the size of its heads (4 over 2), layers and mask


# ---- a checkpoint, and a reference that reads it ------------------------------------------------------------------


def stated(**more: Any) -> dict[str, Any]:
    """Return a config.json as z-lab writes it; what is in `more` replaces keys, those of dflash_config too."""
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 1], "block_size": 5}
    config = {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3", "hidden_size": D, "intermediate_size": 80, "num_hidden_layers": LAYERS,
        "num_target_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": SIZE,
        "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "rope_scaling": None,
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "layer_types": ["full_attention"] * LAYERS, "max_window_layers": LAYERS, "use_sliding_window": False,
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "dtype": "float32",
        "transformers_version": "4.57.1", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    own |= {key: more.pop(key) for key in list(more) if key in own}
    return {**config, "dflash_config": {key: value for key, value in own.items() if value is not None}, **more}


def tensors(taps: int = 2) -> dict[str, Tensor]:
    """Return random tensors under z-lab's names; logits come out with a deviation of about 1."""
    generator = torch.Generator().manual_seed(8)
    shapes = {"fc.weight": (D, taps * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(LAYERS):
        rows = {
            "input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (4 * SIZE, D),
            "self_attn.k_proj": (2 * SIZE, D), "self_attn.v_proj": (2 * SIZE, D), "self_attn.o_proj": (D, 4 * SIZE),
            "self_attn.q_norm": (SIZE,), "self_attn.k_norm": (SIZE,), "mlp.gate_proj": (80, D), "mlp.up_proj": (80, D),
            "mlp.down_proj": (D, 80),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in rows.items()}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made = {name: 1 + 0.4 * x if x.dim() == 1 else x / math.sqrt(x.shape[1]) for name, x in made.items()}
    return made | {"norm.weight": 0.3 * made["norm.weight"]}


def write(folder: Path, config: dict[str, Any], content: dict[str, Tensor]) -> Path:
    """Write a checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in content.items()}, folder / "model.safetensors")
    return folder


def load_dflash(folder: Path, target: Model, **how: Any) -> DFlashHead:
    """Return the network in a folder."""
    head = load_head(folder, target, read=read_dflash, **how)
    assert isinstance(head, DFlashHead)
    return head


class Reference:
    """z-lab's forward pass over one text: norms, MLP and rotary embedding of transformers' Qwen3, attention by hand."""

    def __init__(self, folder: Path, model: Model = MODEL) -> None:
        self.model, self.config = model, json.loads((folder / "config.json").read_text())
        self.w, self.own = tensors(), self.config["dflash_config"]
        self.embedding, self.lm_head = model.embed_tokens.weight, model.lm_head.weight
        self.window: int | None = None  # rows that a row of the block sees
        keys = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "rms_norm_eps", "rope_theta")
        self.qwen = Qwen3Config(**{key: self.config[key] for key in keys})

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Return x after one of the norms."""
        module = Qwen3RMSNorm(x.shape[-1], self.config["rms_norm_eps"])
        module.weight.copy_(self.w[f"{name}.weight"])
        return module(x)

    def heads(self, name: str, x: Tensor, at: Tensor, norm: bool = True) -> Tensor:
        """Return the heads [H, T, D] of a projection of x [T, d], normed and turned by positions at [T]."""
        out = (x @ self.w[f"{name}_proj.weight"].T).view(len(x), -1, SIZE)
        if not norm:
            return out.transpose(0, 1)
        out = self.norm(f"{name}_norm", out).transpose(0, 1)[None]
        cos, sin = Qwen3RotaryEmbedding(self.qwen)(out, at[None])
        return apply_rotary_pos_emb(out, out, cos, sin)[0][0]

    @torch.inference_mode()
    def logits(self, ids: list[int], block: int) -> Tensor:
        """Return the logits [block - 1, V] of the block after a text; see `states`."""
        return (self.states(ids, block) @ self.lm_head.T)[1:]

    @torch.inference_mode()
    def states(self, ids: list[int], block: int) -> Tensor:
        """Return the normed states [block, d] of the block after a text whose last token is the bonus."""
        known = len(ids) - 1
        outputs: list[Tensor] = []
        hooks = [self.model.layers[i].register_forward_hook(lambda m, given, out: outputs.append(out))
                 for i in self.own["target_layer_ids"]]  # fmt: skip
        self.model.run_block = lambda layer, *given: layer(*given)  # through the hooks
        self.model(torch.tensor([ids[:-1]]), torch.arange(known)[None], Causal(self.model.config.windows(known)))
        del self.model.run_block
        self.model.run_block = type(self.model.layers[0]).forward
        [hook.remove() for hook in hooks]
        context = self.norm("hidden_norm", torch.cat([out[0] for out in outputs], -1) @ self.w["fc.weight"].T)
        x = self.embedding[[ids[-1]] + [self.own["mask_token_id"]] * (block - 1)]
        far, near = torch.arange(known), torch.arange(known, known + block)
        unseen = torch.ones(block, known + block).triu(known + 1).bool() & bool(self.config.get("is_causal"))
        unseen[:, : max(0, known + block - (self.window or known + block))] = True
        for i in range(LAYERS):
            name = f"layers.{i}.self_attn"
            read = self.norm(f"layers.{i}.input_layernorm", x)
            q = self.heads(f"{name}.q", read, near)
            k = torch.cat((self.heads(f"{name}.k", context, far), self.heads(f"{name}.k", read, near)), 1)
            v = torch.cat((self.heads(f"{name}.v", context, far, False), self.heads(f"{name}.v", read, near, False)), 1)
            scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) / math.sqrt(SIZE)
            out = scores.masked_fill(unseen, -math.inf).softmax(-1) @ v.repeat_interleave(2, 0)
            x = x + out.transpose(0, 1).reshape(block, -1) @ self.w[f"{name}.o_proj.weight"].T
            mlp = Qwen3MLP(self.qwen)
            for part in ("gate_proj", "up_proj", "down_proj"):
                getattr(mlp, part).weight.copy_(self.w[f"layers.{i}.mlp.{part}.weight"])
            x = x + mlp(self.norm(f"layers.{i}.post_attention_layernorm", x))
        return self.norm("norm", x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is bidirectional."""
    return write(tmp_path_factory.mktemp("draft") / "both", stated(), tensors())


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose block is causal."""
    return write(tmp_path_factory.mktemp("draft") / "causal", stated(is_causal=True), tensors())


Seen = list[tuple[list[int], Tensor, list[int], list[int], Any]]  # text, logits, tokens, parents, request


def watch(scheduler: Scheduler, compiled: bool = False) -> Seen:
    """Note of every tree the text before it, the logits of its block unless compiled, the tree and the request."""
    drafter = scheduler.engine.drafter
    read = drafter.network.logits
    drafter.read = torch.zeros(scheduler.sizes.max_running, 0)

    def logits(states: Tensor) -> Tensor:
        drafter.read = read(states)
        return drafter.read

    if not compiled:
        drafter.network.logits = logits
    return record(scheduler, lambda row: (drafter.read[row].clone(),))


def served(
    folder: Path, requests: list[Any], shape: dict[str, Any] | None = None, target: Model = MODEL, **how: Any
) -> tuple[Scheduler, Seen]:
    """Serve requests with a checkpoint, and return what was drafted."""
    with torch.inference_mode():
        drafter = DFlashDrafter(load_dflash(folder, target), **(shape or {"block": 5, "nodes": 5}))
    scheduler = build(target, drafter, **how)
    seen = watch(scheduler)
    run(scheduler, requests)
    return scheduler, seen


def assert_logits(folder: Path, seen: Seen, every: int = 3, block: int = 5, target: Model = MODEL) -> None:
    """Compare the logits of blocks with the reference's."""
    assert len(seen) > 8
    known = Reference(folder, target)
    for ids, logits, *_ in seen[::every]:
        expected = known.logits(ids, block)
        assert expected.std() > 0.5, "logits too flat to compare"
        apart = (logits - expected[: len(logits)]).abs().max()
        assert apart < 1e-5, f"after {len(ids)} tokens: {apart}"


WAYS = [dict(), dict(running=1), dict(chunk=32), dict(chunk=1, running=2), dict(pages=15)]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_logits_are_the_reference_s_alone_in_chunks_and_under_retraction(how: dict, folder: Path) -> None:
    requests = mixed_requests(max_new_tokens=40 if "pages" in how else 6)
    scheduler, seen = served(folder, requests, **how)
    assert_logits(folder, seen, every=9 if "pages" in how else 3)
    assert scheduler.metrics.retractions > 0 or "pages" not in how
    for r in requests[::3]:
        assert r.output_ids == truth(MODEL, r)


def test_a_causal_block_s_logits_are_the_reference_s(causal: Path) -> None:
    assert_logits(causal, served(causal, mixed_requests(max_new_tokens=6))[1])


@pytest.mark.parametrize("make", [windowed_model, mixture_model], ids=["windows", "experts"])
def test_logits_are_the_reference_s_for_a_target_with_windows_or_experts(
    make: Callable[[], Model], folder: Path
) -> None:
    """The block has neither: it sees the whole text."""
    _, seen = served(folder, mixed_requests(max_new_tokens=6), target=make(), chunk=50)
    assert_logits(folder, seen, target=make())


def test_after_commits_of_every_length_logits_are_the_reference_s(folder: Path) -> None:
    """Trees that hold the truth to some depth are accepted to that depth, and plain steps leave a backlog."""
    requests = mixed_requests(4, max_new_tokens=30)
    with torch.inference_mode():
        drafter = DFlashDrafter(load_dflash(folder, MODEL), block=5, nodes=5)
    scheduler = build(MODEL, drafter)
    inner, depths = drafter.propose, []

    def propose(batch: Batch) -> DraftTree:
        tree = inner(batch)
        slots = {r.slot: r for r in scheduler.running}
        for row, slot in enumerate(batch.slots.tolist()):
            if slot:
                depths.append(len(depths) % 5)
                text = truths[slots[slot].rid][len(slots[slot].ids) :][: depths[-1]]
                tree.tokens[row, 1 : 1 + len(text)] = torch.tensor(text, dtype=torch.int64)
        return tree

    truths = {}
    for r in requests:
        long = request(r.rid, r.prompt_ids, max_new_tokens=40)
        long.max_new_tokens = 40
        truths[r.rid] = r.prompt_ids + reference(MODEL, long)
    drafter.propose = propose
    seen, steps = watch(scheduler), iter(range(10**6))
    scheduler.policy.forced = lambda shapes: shapes[0 if next(steps) % 4 == 1 else -1]
    run(scheduler, requests)
    assert {len(r.verified.depths) > 3 for r in requests} == {True}
    assert_logits(folder, seen, every=2)


def test_a_prefix_hit_restores_the_context_rows_to_the_last_of_the_page(folder: Path) -> None:
    assert DFlashDrafter.lookahead == 0  # row i is of the features of token i alone
    for differ in (15, 16, 17, 32):
        with torch.inference_mode():
            scheduler = build(MODEL, DFlashDrafter(load_dflash(folder, MODEL), block=5, nodes=5))
        assert_logits(folder, after_prefix_hits(scheduler, list(range(1, 40)), differ, watch))


def test_a_block_that_is_longer_than_its_tree_has_pages_of_its_own(folder: Path) -> None:
    requests = mixed_requests(max_new_tokens=20)
    assert_logits(folder, served(folder, requests, {"block": 9, "nodes": 2})[1], every=2, block=9)


def test_drafting_goes_on_to_the_last_row_of_the_context(folder: Path) -> None:
    full = request("context", [1, 2, 3] * 70, max_new_tokens=None)
    _, seen = served(folder, [full], running=1)
    assert len(full.prompt_ids) + len(full.output_ids) == 256
    assert_logits(folder, seen, every=4)


# ---- faults, each of which a comparison sees ----------------------------------------------------------------------


def taps_early_by_one(patch: pytest.MonkeyPatch) -> None:
    """The ids are taken for layers whose input is read."""
    init = DFlashHead.__init__

    def early(self: DFlashHead, config: DFlashConfig, target: Model) -> None:
        init(self, replace(config, taps=tuple(tap - 1 for tap in config.taps)), target)

    patch.setattr(DFlashHead, "__init__", early)


def block_one_position_late(patch: pytest.MonkeyPatch) -> None:
    """The block is turned as if the bonus stood one position further."""
    rope = DFlashHead.rope
    patch.setattr(DFlashHead, "rope", lambda self, at: rope(self, at + 1 if at.shape[1] == 5 else at))


def the_other_direction(patch: pytest.MonkeyPatch) -> None:
    """A bidirectional block is causal."""
    init = Pass.__init__

    def turned(self: Pass, *given: Any) -> None:
        init(self, *given)
        self.visible = self.visible.tril() if self.visible.all() else torch.ones_like(self.visible)

    patch.setattr(Pass, "__init__", turned)


def hidden_norm_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Context rows are made of fc's output."""
    patch.setattr(DFlashHead, "fuse", lambda self, features: self.fc(features))


def row_0_used(patch: pytest.MonkeyPatch) -> None:
    """The row of the bonus predicts the next token, the first mask the one after."""
    close = DFlashDrafter._close
    patch.setattr(DFlashDrafter, "_close", lambda self, step, batch, states: close(
        self, step, batch, states.roll(1, 1)))  # fmt: skip


def context_with_the_bonus(patch: pytest.MonkeyPatch) -> None:
    """The block begins a row late, so that the bonus's old row is taken for context."""
    fill = Plan.fill

    def late(self: Plan, slots: Tensor, starts: Tensor, *rest: Any, **more: Any) -> None:
        fill(self, slots, starts + (self.kv.pool.shape[0] == 2 * LAYERS), *rest, **more)

    patch.setattr(Plan, "fill", late)


FAULTS = [taps_early_by_one, block_one_position_late, the_other_direction, hidden_norm_forgotten, row_0_used,
          context_with_the_bonus]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault: Callable[[pytest.MonkeyPatch], None], folder: Path, monkeypatch) -> None:
    fault(monkeypatch)
    seen = served(folder, mixed_requests(4, max_new_tokens=6))[1]
    with pytest.raises(AssertionError, match="after"):
        assert_logits(folder, seen)


# ---- trees --------------------------------------------------------------------------------------------------------


def heap_tree(logp: Tensor, topk: int, count: int) -> set[tuple[int, ...]]:
    """Return the `count` likeliest paths through rows of log-probabilities [rows, V], by a heap (DDTree)."""
    values, ids = logp.topk(topk)
    found: set[tuple[int, ...]] = set()
    heap: list[tuple[float, tuple[int, ...]]] = [(-float(v), (int(t),)) for v, t in zip(values[0], ids[0], strict=True)]
    heapq.heapify(heap)
    while heap and len(found) < count:
        score, path = heapq.heappop(heap)
        found.add(path)
        if len(path) < len(logp):
            row = len(path)
            for v, t in zip(values[row], ids[row], strict=True):
                heapq.heappush(heap, (score - float(v), (*path, int(t))))
    return found


SHAPES = [(5, 1, 5), (5, 4, 16), (2, 4, 4), (6, 3, 40)]  # block, topk, nodes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tree_is_the_heap_s(shape: tuple[int, int, int], folder: Path) -> None:
    block, topk, nodes = shape
    requests = mixed_requests(max_new_tokens=8)
    for r in requests[::2]:
        r.params = replace(r.params, temperature=0.8)
    _, seen = served(folder, requests, {"block": block, "topk": topk, "nodes": nodes})
    assert_logits(folder, seen[:30], block=block)
    for ids, logits, tokens, parents, r in seen:
        if t := r.params.temperature:  # the noise of the target's pick at each row's position
            at = torch.arange(len(ids), len(ids) + block - 1)
            logits = logits / t + gumbel(torch.tensor(r.seed), at, VOCAB)
        assert paths(tokens, parents) == heap_tree(logits.log_softmax(-1), topk, nodes - 1), f"after {len(ids)} tokens"
    for r in requests:
        assert r.output_ids == truth(MODEL, r)


def test_impossible_logits_give_a_tree_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = DFlashHead.logits
    monkeypatch.setattr(DFlashHead, "logits", lambda self, state: logits(self, state) * torch.nan)
    requests = mixed_requests(4, max_new_tokens=4)
    _, seen = served(folder, requests, {"block": 5, "topk": 3, "nodes": 9})
    assert len(seen) > 8 and all(r.output_ids == truth(MODEL, r) for r in requests)


def test_smaller_trees_come_of_the_same_pass(folder: Path) -> None:
    with torch.inference_mode():
        drafter = DFlashDrafter(load_dflash(folder, MODEL), block=5, topk=2, nodes=9, smaller=4)
    scheduler = build(MODEL, drafter)
    turns = iter(range(10**6))
    scheduler.policy.forced = lambda shapes: shapes[1 + next(turns) % 2]
    seen = watch(scheduler)
    run(scheduler, mixed_requests(max_new_tokens=8))
    assert {len(tokens) for _, _, tokens, *_ in seen} == {4, 9}
    known = Reference(folder)
    for ids, logits, tokens, parents, _ in seen[::3]:
        expected = known.logits(ids, 5)[: len(logits)]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert paths(tokens, parents) == heap_tree(expected.log_softmax(-1), 2, len(tokens) - 1)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def test_the_ids_are_of_outputs_and_the_default_is_spread_evenly(tmp_path: Path) -> None:
    assert default_ids(36, 5) == [1, 9, 17, 25, 33] and default_ids(30, 5) == [1, 8, 14, 20, 27]
    for count, taps in ((1, [16]), (2, [2, 28]), (3, [2, 15, 28]), (5, [2, 9, 15, 21, 28])):
        assert [i + 1 for i in default_ids(30, count)] == taps
    deep = Model.empty(replace(MODEL.config, layers=36), torch.float32, torch.device("meta"))
    config = stated(num_target_layers=36, target_layer_ids=[1, 9, 17, 25, 33])
    head = load_dflash(write(tmp_path / "stated", config, tensors(5)), deep)
    assert head.taps == (2, 10, 18, 26, 34) and head.fc.in_features == 5 * D
    head = load_dflash(write(tmp_path / "silent", stated(num_target_layers=36, target_layer_ids=None), tensors()), deep)
    assert head.taps == (2, 34)


def test_older_files_have_the_keys_at_the_top_level_and_a_block_of_16_where_they_say_nothing(tmp_path: Path) -> None:
    top = {**stated(), "mask_token_id": MASK, "target_layer_ids": [0, 1], "block_size": 7, "dflash_config": {}}
    head = load_dflash(write(tmp_path / "top", top, tensors()), MODEL)
    assert (head.mask_token, head.taps, head.block_size, head.causal) == (MASK, (1, 2), 7, False)
    both = {**stated(), "block_size": 7}
    assert load_dflash(write(tmp_path / "both", both, tensors()), MODEL).block_size == 5
    assert load_dflash(write(tmp_path / "none", stated(block_size=None), tensors()), MODEL).block_size == 16
    prefixed = {f"model.{name}": tensor.bfloat16() for name, tensor in tensors().items()}
    assert load_dflash(write(tmp_path / "prefixed", stated(dtype="bfloat16"), prefixed), MODEL).block_size == 5


REFUSED = {
    "a mask beyond the vocabulary": ({"mask_token_id": VOCAB}, {}, "mask_token_id must be .* from 0 to 60, got 61"),
    "no mask": ({"mask_token_id": None}, {}, "config.json lacks mask_token_id, which must be"),
    "the last layer": ({"target_layer_ids": [0, 2]}, {}, r"target_layer_ids must be ids in \[0, 1\].*got \[0, 2\]"),
    "ids of no layers": ({"target_layer_ids": []}, {}, r"target_layer_ids .*got \[\]"),
    "a block of one row": ({"block_size": 1}, {}, "block_size must be a whole number from 2 to 128, got 1"),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, {},
                       r"layer_types sliding_attention \(sliding_window 64\)"),
    "sliding by their number": ({"layer_types": None, "use_sliding_window": True, "sliding_window": 64,
                                 "max_window_layers": 1}, {}, "layer_types sliding_attention"),
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, {}, r"\['DFlash2DraftModel'\] are not supported"),
    "DSpark": ({"architectures": ["DSparkDraftModel"]}, {}, "DSparkDraftModel"),
    "sinks by a key": ({"add_swa_attention_sink_bias": True}, {}, "keys .*add_swa_attention_sink_bias"),
    "a key of its own": ({"dflash_config": {"mask_token_id": MASK, "attention_sink_bias": True}}, {},
                         "dflash_config has keys .*attention_sink_bias"),
    "a soft cap": ({"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping"),
    "values scaled": ({"attention_value_scale": 0.5}, {}, "attention_value_scale"),
    "part of the rotary embedding": ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor 0.5"),
    "sinks": ({}, {"layers.0.self_attn.attention_sink_bias": (4,)}, "unknown tensors: .*attention_sink_bias"),
    "DFlash2's convolutions": ({}, {"layers.1.mlp_conv.base_kernel": (3, 3)}, "unknown tensors: .*mlp_conv"),
    "an LM head of its own": ({}, {"lm_head.weight": (VOCAB, D)}, "unknown tensors: lm_head.weight"),
    "an embedding of its own": ({}, {"embed_tokens.weight": (VOCAB, D)}, "unknown tensors: embed_tokens.weight"),
    "another target's depth": ({"num_target_layers": 36}, {}, "num_target_layers is 36, and the target has 3"),
    "another target's width": ({"hidden_size": 64}, {}, "hidden_size 64, and the target has 72"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    keys, more, said = REFUSED[case]
    content = tensors() | {name: torch.zeros(shape) for name, shape in more.items()}
    with pytest.raises(ModelError, match=f"--speculative-draft-model-path .*{said}"):
        load_dflash(write(tmp_path / "draft", stated(**keys), content), MODEL)


def test_an_embedding_of_the_mask_s_own_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "draft", stated(), {k: v for k, v in tensors().items() if k != "hidden_norm.weight"})
    with pytest.raises(ModelError, match="missing tensors: hidden_norm.weight"):
        load_dflash(path, MODEL)
    (path / "mask_embedding.pt").touch()
    with pytest.raises(ModelError, match="mask_embedding.pt"):
        load_dflash(path, MODEL)


def test_what_does_not_act_is_no_reason_to_refuse(tmp_path: Path) -> None:
    quiet = stated(use_sliding_window=True, sliding_window=4096, add_swa_attention_sink_bias=False,
                   final_logit_softcapping=None)  # fmt: skip
    assert load_dflash(write(tmp_path / "draft", quiet, tensors()), MODEL).block_size == 5


def test_as_an_eagle_head_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    for network in (folder, write(tmp_path / "other", speculator(), speculator_tensors())):
        with pytest.raises(ModelError, match="--speculative-draft-model-path .*give --speculative-algorithm DFLASH"):
            load_head(network, MODEL)


def test_a_token_map_narrows_what_is_drafted(folder: Path) -> None:
    ids = torch.arange(1, VOCAB, 3)
    with torch.inference_mode():
        drafter = DFlashDrafter(load_dflash(folder, MODEL, token_map=ids), block=5, topk=2, nodes=8)
    scheduler = build(MODEL, drafter)
    seen = watch(scheduler)
    requests = mixed_requests(4, max_new_tokens=8)
    requests[0].params = replace(requests[0].params, temperature=1.0)
    run(scheduler, requests)
    known = Reference(folder)
    for text, logits, tokens, parents, r in seen[::3]:
        expected = known.logits(text, 5)[:, ids]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        if t := r.params.temperature:
            expected = expected / t + gumbel(torch.tensor(r.seed), torch.arange(len(text), len(text) + 4), ids)
        tree = heap_tree(expected.log_softmax(-1), 2, 7)
        assert paths(tokens, parents) == {tuple(int(ids[i]) for i in path) for path in tree}


# ---- speculators' format ------------------------------------------------------------------------------------------

DRAFTED = torch.arange(1, VOCAB, 3)  # the target's ids of the network's vocabulary


def speculator(**more: Any) -> dict[str, Any]:
    """Return a config.json as speculators writes it; what is in `more` replaces keys, those of the body too."""
    body = stated(dtype="float32", rope_parameters={"rope_type": "default", "rope_theta": 1000000})
    for key in ("architectures", "auto_map", "dflash_config", "num_target_layers", "rope_theta", "rope_scaling"):
        del body[key]
    body |= {key: more.pop(key) for key in list(more) if key in body}
    return {
        "architectures": ["DFlashSpeculator"], "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [1, 2], "block_size": 5, "draft_vocab_size": len(DRAFTED), "mask_token_id": MASK,
        "sliding_window_non_causal": False, "speculators_config": {"algorithm": "dflash"},
        "speculators_model_type": "dflash", "speculators_version": "0.5.0", "tie_word_embeddings": False,
        "transformer_layer_config": body, **more,
    }  # fmt: skip


def speculator_tensors() -> dict[str, Tensor]:
    """Return z-lab's tensors, and what speculators adds: the target's embedding, an LM head and the draft ids."""
    torch.manual_seed(4)
    used = torch.zeros(VOCAB, dtype=torch.bool)
    used[DRAFTED] = True
    return tensors() | {
        "embed_tokens.weight": MODEL.embed_tokens.weight.detach().clone(), "t2d": used,
        "lm_head.weight": torch.randn(len(DRAFTED), D) / 8, "d2t": DRAFTED - torch.arange(len(DRAFTED)),
    }  # fmt: skip


@pytest.mark.parametrize("embedding", ["the target's", "its own"])
def test_a_network_of_speculators_drafts_by_its_own_lm_head_and_vocabulary(
    embedding: str, folder: Path, tmp_path: Path
) -> None:
    """Its states are those of the same body in z-lab's format, whose ids count outputs."""
    content = speculator_tensors()
    if own := embedding == "its own":
        content["embed_tokens.weight"] = torch.randn(VOCAB, D)
    with torch.inference_mode():
        head = load_dflash(write(tmp_path / "draft", speculator(), content), MODEL)
        assert (head.embed_tokens is not None) == own and head.taps == (1, 2) and head.block_size == 5
        scheduler = build(MODEL, DFlashDrafter(head, block=5, topk=2, nodes=8))
    seen = watch(scheduler)
    requests = mixed_requests(3, max_new_tokens=8)
    run(scheduler, requests)
    assert [r.output_ids for r in requests] == [truth(MODEL, r) for r in requests]
    known = Reference(folder)
    known.embedding, known.lm_head = content["embed_tokens.weight"], content["lm_head.weight"]
    for text, logits, tokens, parents, _ in seen[::3]:
        expected = known.logits(text, 5)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        tree = heap_tree(expected.log_softmax(-1), 2, 7)
        assert paths(tokens, parents) == {tuple(int(DRAFTED[i]) for i in path) for path in tree}


SPECULATORS_REFUSED = {
    "rows that predict the next": ({"sample_from_anchor": True}, (), "sample_from_anchor"),
    "no layers": ({"aux_hidden_state_layer_ids": None}, (), r"lacks aux_hidden_state_layer_ids.* in \[1, 2\]"),
    "the last layer's output": ({"aux_hidden_state_layer_ids": [1, 3]}, (), r"in \[1, 2\].*got \[1, 3\]"),
    "sliding layers": ({"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 64}, (), "sliding_attention"),
    "a soft cap in the body": ({"transformer_layer_config": {**stated(), "final_logit_softcapping": 30.0}}, (),
                               "final_logit_softcapping"),
    "no offsets": ({}, ("d2t",), "missing tensors: d2t"),
    "offsets of zero": ({}, (), "d2t contradicts the t2d beside it"),
    "no LM head": ({}, ("lm_head.weight",), "missing tensors: lm_head.weight"),
    "another vocabulary": ({"draft_vocab_size": 7}, (), "d2t has the shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPECULATORS_REFUSED)
def test_what_is_not_known_of_speculators_is_refused_by_name(case: str, tmp_path: Path) -> None:
    keys, dropped, said = SPECULATORS_REFUSED[case]
    content = {name: tensor for name, tensor in speculator_tensors().items() if name not in dropped}
    if case == "offsets of zero":
        content["d2t"] = torch.zeros(len(DRAFTED), dtype=torch.int64)
    with pytest.raises(ModelError, match=f"--speculative-draft-model-path .*{said}"):
        load_dflash(write(tmp_path / "draft", speculator(**keys), content), MODEL)


# ---- flags --------------------------------------------------------------------------------------------------------


def made(folder: Path, **flags: Any) -> Any:
    """Return the drafter that flags ask for."""
    config = Config(model_path="tiny", speculative_algorithm="DFLASH", speculative_draft_model_path=str(folder),
                    device="cpu", **{f"speculative_{name}": value for name, value in flags.items()})  # fmt: skip
    with torch.inference_mode():
        return make_drafter(config, MODEL, Path("tiny"), byte_tokenizer(VOCAB))


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ({"lookup": False}, (5, 1, 5)),
        ({"eagle_topk": 1}, (5, 1, 5)),
        ({"num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 4}, (4, 1, 4)),
        ({"num_draft_tokens": 4}, (4, 1, 4)),
        ({"dflash_block_size": 3}, (3, 1, 3)),
        ({"dflash_block_size": 4, "num_draft_tokens": 4}, (4, 1, 4)),
        ({"eagle_topk": 4, "num_draft_tokens": 16}, (5, 4, 16)),
        ({"eagle_topk": 2, "num_draft_tokens": 16, "dflash_block_size": 3}, (3, 2, 7)),
    ],
    ids=str,
)
def test_flags_give_the_block_and_the_tree(flags: dict, shape: tuple[int, int, int], folder: Path) -> None:
    drafter = made(folder, **flags)
    drafter = getattr(drafter, "head", drafter)
    assert (drafter.block, drafter.topk, drafter.nodes) == shape
    assert drafter.rounds == 1 and drafter.lookahead == 0 and drafter.depth == shape[0] - 1


@pytest.mark.parametrize("window", [5, 9, 500])
def test_a_window_leaves_the_block_the_newest_rows(window: int, folder: Path) -> None:
    drafter = made(folder, draft_window_size=window, lookup=False, eagle_topk=2, num_draft_tokens=8)
    scheduler = build(MODEL, drafter)
    seen, known = watch(scheduler), Reference(folder)
    requests = mixed_requests(3, max_new_tokens=10)
    run(scheduler, requests)
    assert [r.output_ids for r in requests] == [truth(MODEL, r) for r in requests]
    known.window = window
    assert max(len(text) for text, *_ in seen) > 20
    for text, logits, *_ in seen:
        torch.testing.assert_close(logits, known.logits(text, 5), rtol=1e-5, atol=1e-5)


def test_lookups_stand_beside_it_by_default(folder: Path) -> None:
    drafter = made(folder)
    assert isinstance(drafter, Lookups) and isinstance(drafter.head, DFlashDrafter)
    assert [size.nodes for size in drafter.trees] == [5, 8] and drafter.lookahead == 0
    scheduler = build(MODEL, drafter)
    requests = mixed_requests(4, max_new_tokens=12)
    run(scheduler, requests)
    assert all(r.output_ids == truth(MODEL, r) for r in requests)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_draft_tokens": 4, "dflash_block_size": 5}, "--speculative-num-draft-tokens must be "
                                                          "--speculative-dflash-block-size, 5, .* got 4"),
        ({"eagle_topk": 4}, "--speculative-eagle-topk 4 needs --speculative-num-draft-tokens"),
        ({"num_draft_tokens": 1}, "--speculative-num-draft-tokens must be at least 2"),
        ({"dflash_block_size": 1}, r"--speculative-dflash-block-size must be in \[2, 128\], got 1"),
        ({"draft_window_size": 4}, "--speculative-draft-window-size must be at least 5, .* got 4"),
        ({"draft_model_path": None}, "DFLASH needs --speculative-draft-model-path"),
    ],
    ids=str,
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(flags: dict, said: str, folder: Path) -> None:
    config = {"model_path": "tiny", "speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(folder)}
    config |= {f"speculative_{name}": value for name, value in flags.items()}
    with pytest.raises(ValueError, match=said):
        make_drafter(Config(**config), MODEL, Path("tiny"), byte_tokenizer(VOCAB))


def test_what_is_taken_otherwise_leaves_a_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(model_path="x", speculative_algorithm="DFLASH", speculative_num_steps=5)
    assert any("--speculative-num-steps 5 is taken as 1" in note for note in config.notes)
    for algorithm in ("EAGLE", "mine:Own"):
        given = {"speculative_dflash_block_size": 8, "speculative_draft_window_size": 64}
        notes = Config(model_path="x", speculative_algorithm=algorithm, **given).notes
        for flag in ("--speculative-dflash-block-size", "--speculative-draft-window-size"):
            assert any(f"{flag} does nothing" in note for note in notes)
    with caplog.at_level(logging.WARNING, "minispec"):
        assert made(folder, dflash_block_size=8, lookup=False).block == 8
    assert "blocks of 5 rows, and is to draft 8" in caplog.text


# ---- compiled -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_all_graphs_are_made_before_and_drafts_are_the_same(folder: Path, tmp_path, monkeypatch) -> None:
    trace_only(monkeypatch, tmp_path)  # what Inductor makes of a block is tested in test_compiled.py
    with torch.inference_mode():
        drafter = DFlashDrafter(load_dflash(folder, MODEL), block=5, topk=2, nodes=8)
    compiler, model = DirectStep, tiny_model()
    model.compile_blocks(compiler)
    drafter.compile(compiler)
    scheduler = build(model, drafter, running=2, chunk=128, compiled=True)
    scheduler.engine.compile_small(compiler, lambda batch, nodes: batch == 1)
    with torch.inference_mode():
        warm_up(scheduler.engine, lambda line: None)
    seen = watch(scheduler, compiled=True)
    requests = mixed_requests(4, max_new_tokens=8)
    requests[0].params = replace(requests[0].params, temperature=0.9)
    graphs = graphs_made()
    run(scheduler, requests)
    assert graphs_made() == graphs
    known = Reference(folder)
    for ids, _, tokens, parents, r in seen[::3]:
        logits = known.logits(ids, 5)
        if t := r.params.temperature:
            logits = logits / t + gumbel(torch.tensor(r.seed), torch.arange(len(ids), len(ids) + 4), VOCAB)
        assert paths(tokens, parents) == heap_tree(logits.log_softmax(-1), 2, 7), f"after {len(ids)} tokens"
    assert all(r.output_ids == truth(MODEL, r) for r in requests)
