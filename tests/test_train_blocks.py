"""Training a block drafter: blocks are those that are served, rows learn their own tokens, and runs resume."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import build, request, run
from test_train import TAPS, assert_a_run_may_be_cut, command, replies, target  # noqa: F401  `command` is a fixture
from torch import Tensor

from minispec.attention import Causal
from minispec.dflash import DFlashDrafter, DFlashHead
from minispec.drafter import Batch
from minispec.dspark import DSparkDrafter, DSparkHead
from minispec.load.dflash_heads import read_dflash
from minispec.load.dspark_heads import read_dspark
from minispec.load.heads import load_head
from minispec.load.published import published_tensors
from minispec.load.token_map import read_token_map
from minispec.model import Model
from minispec.train.blocks import (
    BlockTrainer,
    Packed,
    accepted,
    decay,
    dpace,
    drafted,
    draw_anchors,
    losses,
    pack,
    states_of,
)
from minispec.train.corpus import Features, TrainingReply
from minispec.train.export import (
    BlockRecipe,
    export,
    new_head,
    published_config,
    read_start,
    spare_token,
    write_folder,
)
from minispec.train.rounds import Teacher

D = 72


def recipe(**options: Any) -> BlockRecipe:
    """Return a small recipe."""
    base = BlockRecipe("dflash", rounds=3, epochs=2, learning_rate=1e-2, batch_tokens=40, draft_vocab=24, seed=1,
                       warm_up=0, block_size=4, layers=2, mask_token=60)  # fmt: skip
    return replace(base, **options)


def head_of(model: Model, causal: bool = False, kind: str = "dflash") -> DFlashHead:
    """Return a network with random weights that drafts every second token."""
    head = new_head(recipe(kind=kind, markov_rank=5), model, torch.arange(0, 60, 2), (1, 2), torch.ones(2))
    head.causal = causal
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2 and parameter.requires_grad:
                parameter.normal_(0.0, 0.1)
    return head


def packed(model: Model, head: DFlashHead, texts: Sequence[TrainingReply], folder: Path, every: bool = True) -> Packed:
    """Return the blocks of replies, at every anchor that there is or at drawn ones."""
    features = Features(model, texts, (1, 2, TAPS[-1]), folder, 10**9)
    rng = random.Random(0)
    anchors = [range(t.start, len(t.ids) - 1) if every else draw_anchors(t, head.block_size, rng) for t in texts]
    return pack(head, texts, [features.of(i) for i in range(len(texts))], anchors)


COLUMNS = slice(0, 2 * D)


@pytest.mark.parametrize(("kind", "causal"), [("dflash", False), ("dflash", True), ("dspark", False)])
def test_a_batch_s_logits_are_those_that_are_served(kind: str, causal: bool, tmp_path: Path) -> None:
    """Of a DSpark network those before the Markov head, which has learned nothing yet."""
    model = target()
    texts, head = replies(model, 3), head_of(model, causal, kind)
    drafts = 4 - head.first
    if kind == "dspark":
        head.markov_head["markov_w2"].weight.data.zero_()
    batch = packed(model, head, texts, tmp_path)
    found = drafted(head, batch, states_of(head, batch, COLUMNS)).detach().view(-1, drafts, 30)
    row = 0
    for text in texts:
        for anchor in range(text.start, len(text.ids) - 1):
            torch.testing.assert_close(found[row], served(model, head, text.ids[: anchor + 1]), rtol=1e-5, atol=1e-5)
            row += 1
    assert row == len(found)


@torch.inference_mode()
def served(model: Model, head: DFlashHead, ids: list[int]) -> Tensor:
    """Return the logits of the first block that an engine drafts for a text, whose last token need not be its pick."""
    make = DSparkDrafter if isinstance(head, DSparkHead) else DFlashDrafter
    drafter, seen = make(head, block=4, nodes=5 - head.first), []
    scheduler = build(model, drafter, running=1)
    inner, read = drafter.propose, head.logits

    def propose(batch: Batch) -> object:
        batch.root[:] = ids[-1]
        head.logits = lambda states: seen.append(read(states)) or seen[-1]
        try:
            return inner(batch)
        finally:
            del head.logits

    drafter.propose = propose
    run(scheduler, [request("r", ids[:-1], max_new_tokens=3)])
    return seen[0][0]


def test_every_row_learns_the_token_at_its_own_position(tmp_path: Path) -> None:
    model = target()
    texts, head = replies(model, 2), head_of(model)
    batch = packed(model, head, texts, tmp_path)
    row = 0
    for text in texts:
        hidden, _ = model(torch.tensor([text.ids]), torch.arange(len(text.ids))[None], Causal())
        for anchor in range(text.start, len(text.ids) - 1):
            tokens, places = batch.tokens.view(-1, 4)[row], batch.positions.view(-1, 4)[row]
            assert tokens.tolist() == [text.ids[anchor], 60, 60, 60]
            assert places.tolist() == list(range(anchor, anchor + 4))
            for j in range(1, 4):
                assert bool(batch.real[row, j - 1]) == (anchor + j < len(text.ids))
                if anchor + j < len(text.ids):
                    at = batch.teacher[row, j - 1]
                    assert batch.labels[row, j - 1] == text.ids[anchor + j] == batch.choice[at], "a greedy reply"
                    torch.testing.assert_close(batch.target[at], hidden[0, anchor + j - 1], rtol=1e-4, atol=1e-4)
            row += 1


def test_a_dspark_row_learns_the_next_token_after_the_reply_s_own_and_what_both_have_in_common(tmp_path: Path) -> None:
    model = target()
    texts, head = replies(model, 2), head_of(model, kind="dspark")
    batch = packed(model, head, texts, tmp_path)
    ids = head.token_map
    teacher = Teacher(model.lm_head.weight[ids], ids, model.config.vocab_size)
    states = states_of(head, batch, COLUMNS).detach()
    base, loss, mass = head.logits(states).detach(), 0.0, 0.0
    anchors = [(text, anchor) for text in texts for anchor in range(text.start, len(text.ids) - 1)]
    w1, w2 = (head.markov_head[name].weight.detach() for name in ("markov_w1", "markov_w2"))
    for row, (text, anchor) in enumerate(anchors):
        for j in range(4):
            assert bool(batch.real[row, j]) == (anchor + j + 1 < len(text.ids))
            if not batch.real[row, j]:
                break
            at = batch.teacher[row, j]
            assert batch.labels[row, j] == text.ids[anchor + j + 1] == batch.choice[at], "a greedy reply"
            pair, h = w1[text.ids[anchor + j]], head.norm(states[row, j]).detach()
            logits = base[row, j] + w2 @ pair
            p = (model.lm_head.weight[ids] @ batch.target[at]).softmax(-1)
            proj = head.confidence_head["proj"]
            sure = float(torch.sigmoid(proj.weight.detach()[0] @ torch.cat((h, pair)) + proj.bias.detach()))
            common = float(torch.minimum(p, logits.softmax(-1)).sum())
            weight = float(decay(5)[j]) * (int(batch.choice[at]) in ids)
            loss -= weight * float((p * logits.log_softmax(-1)).sum())
            loss -= weight * (common * math.log(sure) + (1 - common) * math.log(1 - sure))
            mass += weight
    found, hits = losses(head, batch, COLUMNS, teacher, "decay")
    assert found.item() == pytest.approx(loss / mass, rel=1e-4) and len(hits) == 4
    found.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters() if p.requires_grad)


def test_golden_weights() -> None:
    assert decay(8).tolist() == pytest.approx([1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231], abs=1e-4)
    assert decay(16)[1] == pytest.approx(2.718281828 ** (-1 / 7)) and decay(10)[1] == pytest.approx(2.718281828**-0.2)
    q, real = torch.tensor([[0.8, 0.5, 0.25]]), torch.ones(1, 3, dtype=torch.bool)
    assert dpace(q, real).tolist()[0] == pytest.approx([1.996875, 1.096875, 0.421875])
    real[0, 2] = False
    assert dpace(q, real).tolist()[0] == pytest.approx([1.575, 0.675, 0])


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_the_loss_is_the_weighted_mean_over_rows_with_a_token_that_can_be_drafted(weights: str, tmp_path: Path) -> None:
    model = target()
    texts, head = replies(model, 3), head_of(model)
    batch = packed(model, head, texts, tmp_path)
    ids = head.token_map
    teacher = Teacher(model.lm_head.weight[ids], ids, model.config.vocab_size)
    loss, hits = losses(head, batch, COLUMNS, teacher, weights)
    logp = drafted(head, batch, states_of(head, batch, COLUMNS)).detach().log_softmax(-1).view(-1, 3, 30)
    total, mass, reached = 0.0, 0.0, torch.zeros(3, 2)
    for a in range(len(logp)):
        q = [float(logp[a, j].exp()[ids.tolist().index(t)]) if (t := int(batch.labels[a, j])) % 2 == 0 else 0.0
             for j in range(3)]  # fmt: skip
        alive = True
        for j in range(3):
            if not batch.real[a, j]:
                break
            at = batch.teacher[a, j]
            choice, p = int(batch.choice[at]), (model.lm_head.weight[ids] @ batch.target[at]).softmax(-1)
            ahead = [math.prod((x + 1) / 2 for x in q[: m + 1]) for m in range(j, 3) if batch.real[a, m]]
            weight = (sum(ahead) if weights == "dpace" else float(decay(4)[j])) * (choice % 2 == 0 and choice < 60)
            total, mass = total - weight * float((p * logp[a, j]).sum()), mass + weight
            hit = int(ids[logp[a, j].argmax()]) == choice
            reached[j] += torch.tensor([hit and alive, alive])
            alive &= hit
    assert loss.item() == pytest.approx(total / mass, rel=1e-4)
    assert hits.tolist() == reached.tolist()


def test_anchors_are_drawn_anew_and_leave_the_last_token_out(tmp_path: Path) -> None:
    text, rng = TrainingReply(list(range(100)), 40, 0.0, ""), random.Random(0)
    drawn = [draw_anchors(text, 6, rng) for _ in range(40)]
    assert {len(anchors) for anchors in drawn} == {59 * 3 // 6} and len({tuple(anchors) for anchors in drawn}) == 40
    assert {a for anchors in drawn for a in anchors} == set(range(40, 99))
    assert draw_anchors(TrainingReply([1, 2, 3], 1, 0.0, ""), 8, rng) == [1]


def make_trainer(model: Model, texts: Sequence[TrainingReply], folder: Path, name: str, **options: Any) -> BlockTrainer:
    """Return a trainer over the features in a folder."""
    features = Features(model, texts, (1, 2, TAPS[-1]), folder / "work", 10**9)
    return BlockTrainer(recipe(**options), features, folder / name, lambda line: None)


def test_a_reply_has_other_anchors_in_another_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = target(), []

    def noted(head: DFlashHead, texts: object, found: object, anchors: list[list[int]]) -> Packed:
        seen.append(tuple(anchors[0]))
        return pack(head, texts, found, anchors)

    monkeypatch.setattr("minispec.train.blocks.pack", noted)
    made = make_trainer(model, replies(model, 12), tmp_path, "out")
    for step in (0, 1, 2, 3, 0):
        made.step = step
        made._losses([0])
    assert len(set(seen[:4])) > 2 and seen[4] == seen[0]


def test_a_run_cut_in_two_is_bit_identical(tmp_path: Path) -> None:
    model = target()
    assert_a_run_may_be_cut(partial(make_trainer, model, replies(model, 24), tmp_path), weights="dpace")


@pytest.mark.parametrize(("kind", "weights"), [("dflash", "decay"), ("dflash", "dpace"), ("dspark", "decay")])
def test_training_learns_and_a_server_accepts_what_the_replay_says(kind: str, weights: str, tmp_path: Path) -> None:
    spark = kind == "dspark"
    model = target()
    texts = replies(model, 12)
    made = make_trainer(model, texts, tmp_path, "out", epochs=80, learning_rate=3e-3, draft_vocab=61, weights=weights,
                   kind=kind, rounds=3 + spark, markov_rank=8)  # fmt: skip
    made.held_out = made.training
    assert made.depths == [1, 2, 3, 4][: 3 + spark]
    before = made.accept_length(3)
    made.run()
    after = made.accept_length(3)
    assert before < 1.6 and after > 2.8, (before, after)
    frozen = made.head.lm_head.weight
    assert torch.equal(frozen, model.lm_head.weight[made.head.token_map]), "the target's rows stay"
    with torch.no_grad():
        for parameter in made.head.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.bfloat16())
    export(made.head, model, tmp_path / "head")
    ids = read_token_map(tmp_path / "head" / "token_map.safetensors", 61)
    with torch.inference_mode():
        head = load_head(tmp_path / "head", model, token_map=ids, read=read_dspark if spark else read_dflash)
        assert head.taps == (1, 2) and (head.block_size, head.mask_token, len(head.layers)) == (4, 60, 2)
        text, at = texts[0], made.features.of(0)
        found, expected = (accepted(each, text, at, made.taps, made.teacher, 3) for each in (head, made.head))
        assert found == expected
        scheduler = build(model, (DSparkDrafter if spark else DFlashDrafter)(head, block=4, nodes=4 + spark))
    wishes = [request(f"r{i}", t.ids[: t.start], max_new_tokens=len(t.ids) - t.start) for i, t in enumerate(texts)]
    run(scheduler, wishes)
    assert [r.output_ids for r in wishes] == [t.ids[t.start :] for t in texts]
    assert scheduler.metrics.verified.accept_length > 2.2  # replies are short, and each one's last step is cut short


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_training_starts_from_an_exported_network(kind: str, tmp_path: Path) -> None:
    model = target()
    texts, trainer = replies(model, 12), partial(make_trainer, kind=kind, rounds=3 + (kind == "dspark"))
    before = trainer(model, texts, tmp_path, "before")
    before.run(stop_at=2)
    export(before.head, model, tmp_path / "head")
    after = trainer(model, texts, tmp_path, "after", start=str(tmp_path / "head"))
    given = {name: p.bfloat16().float() for name, p in before.head.named_parameters() if p.requires_grad}
    assert given and all(torch.equal(dict(after.head.named_parameters())[name], given[name]) for name in given)
    for other, said in (
        ({"block_size": 5}, "block_size 4, and this run trains one with block_size 5"),
        ({"mask_token": 59}, "mask_token 60, .* 59"), ({"layers": 3}, "missing tensors: layers.2"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"--start .*{said}"):
            trainer(model, texts, tmp_path, "other", start=str(tmp_path / "head"), **other)
    with pytest.raises(ValueError, match="--start .*hidden_size 72, and the target has 64"):
        read_start(recipe(kind=kind, start=str(tmp_path / "head")), replace(model.config, hidden_size=64))


def test_the_mask_is_an_id_that_no_reply_has() -> None:
    texts = [TrainingReply([5, 9, 8], 1, 0.0, ""), TrainingReply([6, 9], 1, 0.0, "")]
    assert [spare_token(texts, vocab) for vocab in (10, 11, 7)] == [7, 10, 4]


def test_the_command_trains_and_goes_on(command: Any, tmp_path: Path) -> None:  # noqa: F811
    small = dict(epochs=1, batch_tokens=50, block_size=4, layers=1)
    with pytest.raises(SystemExit, match="dflash needs a target of at least 5 layers, and this one has 3"):
        command("dflash", out=tmp_path / "head", **small)
    deep = Model(replace(target().config, vocab_size=258, tied=True, context_length=512, layers=5))
    for parameter in deep.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    weights = {f"model.{name}": tensor for name, tensor in published_tensors(deep).items()}
    write_folder(tmp_path / "deep", published_config(deep.config) | {"tokenizer_digest": ""}, weights)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(tmp_path / "target" / name, tmp_path / "deep")
    small |= {"model": tmp_path / "deep", "work": tmp_path / "deep-work"}
    command("dflash", out=tmp_path / "head", **small)
    head = torch.load(tmp_path / "head" / "checkpoint.pt", weights_only=True)
    assert head["recipe"]["mask_token"] == 257 and head["recipe"]["rounds"] == 3  # the highest id, which nobody wrote
    command("dflash", out=tmp_path / "further", start=tmp_path / "head", weights="dpace", **small)
    state = torch.load(tmp_path / "further" / "checkpoint.pt", weights_only=True)
    assert state["recipe"]["start"] == str(tmp_path / "head") and state["recipe"]["weights"] == "dpace"
    assert (tmp_path / "further" / "token_map.safetensors").is_file()
    with pytest.raises(SystemExit, match=r"--mask-token must be in \[0, 257\], got 258"):
        command("dflash", out=tmp_path / "wrong", mask_token=258, **small)
