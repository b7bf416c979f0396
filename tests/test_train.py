"""The trainer: its rounds of drafting are those that are served, what is learned is what is drafted, and runs resume.

The reference drafts from each anchor separately, one pair at a time, over all it has read so far, with a mask written
out; the trainer does all anchors at once. They must agree to rounding, or a head learns something else than it serves.
"""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import tiny_model
from torch import Tensor

from minispec.attention import Causal
from minispec.config import Config
from minispec.eagle import DraftHead
from minispec.llm import LLM
from minispec.load.build import choose_dtype
from minispec.load.default_model import DefaultModelError
from minispec.load.draft_models import load_draft, tokenizer_digest
from minispec.load.heads import load_head
from minispec.load.tokenizer import Tokenizer, byte_tokenizer
from minispec.model import FINAL, Model
from minispec.model_config import ModelError
from minispec.request import SamplingParams
from minispec.train.__main__ import ON_CUDA, load_target, main
from minispec.train.corpus import (
    Features,
    TrainingReply,
    _Writer,
    batches,
    begin_replies,
    groups_done,
    held_out,
    loops,
    read_replies,
    runs_alike,
)
from minispec.train.export import Recipe, draft_vocabulary, export, new_head
from minispec.train.prompts import Conversation
from minispec.train.rounds import (
    SoftCrossEntropy,
    Teacher,
    Unrolled,
    accepted,
    losses,
    pack,
    replay,
    rows_at_once,
    unroll,
)
from minispec.train.shards import read_shards, restore, shard_files, write_shards
from minispec.train.small import export_small, foreseen, small_model, train_small
from minispec.train.stages import Stages
from minispec.train.trainer import Trainer

KINDS = ("eagle3", "eagle", "mtp")


def target() -> Model:
    """Return the random model of the exactness tests with tensors that a head can be trained on."""
    model = tiny_model()
    copy = Model(model.config).requires_grad_(False)
    copy.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return copy


def recipe(kind: str, **options: object) -> Recipe:
    """Return a small recipe."""
    base = Recipe(kind, rounds=3, epochs=2, learning_rate=1e-2, batch_tokens=40, draft_vocab=24, seed=1, warm_up=0)
    return replace(base, **options)


def replies(model: Model, count: int, seed: int = 0) -> list[TrainingReply]:
    """Return greedy continuations of random prompts, from the target itself."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        ids = [rng.randrange(model.config.vocab_size) for _ in range(rng.randrange(3, 9))]
        start = len(ids)
        for _ in range(rng.randrange(6, 14)):
            ids.append(int(_forward(model, ids, ())[0][0, -1].argmax()))
        out.append(TrainingReply(ids, start, 0.0, "test"))
    return out


def _forward(model: Model, ids: Sequence[int], taps: Sequence[int | str]) -> tuple[Tensor, Tensor | None]:
    """Return logits and features of a text."""
    x = torch.tensor([list(ids)])
    hidden, features = model(x, torch.arange(x.shape[1])[None], Causal(), taps)
    return model.logits(hidden), features


def head_of(kind: str, model: Model, texts: Sequence[TrainingReply]) -> tuple[DraftHead, slice, Teacher]:
    """Return a head with random weights, its columns of the features and what teaches it."""
    ids = draft_vocabulary(texts, 24, model.config.vocab_size).sort().values
    head = new_head(recipe(kind), model, ids, (0, 1, 2), torch.ones(3))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.1)  # larger, and rounding grows from round to round
    width = model.config.hidden_size
    teacher = Teacher(model.lm_head.weight[head.token_map], head.token_map, model.config.vocab_size)
    return head, slice(0, 3 * width) if kind == "eagle3" else slice(-width, None), teacher


TAPS = (0, 1, 2, FINAL)


@pytest.mark.parametrize("kind", KINDS)
def test_all_anchors_at_once_equal_one_chain_at_a_time(kind: str, tmp_path: Path) -> None:
    model = target()
    texts = replies(model, 3)
    head, taps, _ = head_of(kind, model, texts)
    features = Features(model, texts, TAPS, tmp_path, 10**9)
    batch = pack(texts, [features.of(i) for i in range(3)], model.config.hidden_size, rounds=4)
    found = [state.detach() for _, state in unroll(head, batch, taps)]
    for s, states in enumerate(found):
        row = 0
        for text in texts:
            for anchor in range(text.start - 1, len(text.ids) - 2 - s):
                expected = chain(head, model, text.ids, anchor, s, taps)
                torch.testing.assert_close(states[row], expected, rtol=1e-3, atol=1e-3)
                row += 1
        assert row == len(states), "anchors end where the last reply token is drafted"


def chain(head: DraftHead, model: Model, ids: Sequence[int], anchor: int, rounds: int, taps: slice) -> Tensor:
    """Return the state after `rounds` drafted tokens beyond an anchor, recomputing everything, one pair at a time."""
    features = _forward(model, ids, TAPS)[1][0, : anchor + 1, taps]
    tokens = [ids[i + 1] for i in range(anchor + 1)]
    states = list(head.fuse(features[None])[0])
    for _ in range(rounds + 1):
        x, length = torch.tensor([tokens]), len(tokens)
        positions = torch.arange(length)[None]
        out = head(head.embed(x), torch.stack(states)[None], head.rope(positions), masked, positions)[0]
        newest = out[-1]
        states.append(newest)
        tokens.append(ids[length + 1] if length + 1 < len(ids) else 0)
    return newest.detach()


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with the mask written out."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    allowed = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def test_features_on_disk_take_no_more_than_their_limit(tmp_path: Path) -> None:
    texts, limit = replies(target(), 6), 100_000
    features = Features(target(), texts, TAPS, tmp_path, limit)
    kept, computed = features.several(range(len(texts))), Features(target(), texts, TAPS, tmp_path / "all", 10**9)
    assert 0 < features.kept < len(texts), "a limit that some fit into"
    assert limit / 2 < sum(path.stat().st_size for path in tmp_path.glob("*.bin")) - features.kept <= limit
    assert all(torch.equal(a, b) for have, want in zip(kept, computed.several(range(len(texts))), strict=True)
               for a, b in zip(have, want, strict=True))  # fmt: skip


def test_what_is_learned_is_what_the_target_says_next(tmp_path: Path) -> None:
    """At round s anchor i learns the target's distribution after x[i+1+s], among the draft ids, from P - 1 to E - 3."""
    model = target()
    texts = replies(model, 2)
    features = Features(model, texts, TAPS, tmp_path, 10**9)
    batch = pack(texts, [features.of(i) for i in range(2)], model.config.hidden_size, rounds=3)
    ids = torch.arange(model.config.vocab_size)
    wanted = Teacher(model.lm_head.weight, ids, len(ids))(batch.target)
    for s, round_ in enumerate(batch.rounds):
        row = 0
        for text in texts:
            truth = _forward(model, text.ids, ())[0][0].softmax(-1)
            for anchor in range(text.start - 1, len(text.ids) - 2 - s):
                teacher = round_.teacher[row]
                torch.testing.assert_close(wanted[teacher], truth[anchor + 1 + s], rtol=1e-4, atol=1e-5)
                assert int(batch.choice[teacher]) == text.ids[anchor + 2 + s], "a greedy reply is its target's choice"
                row += 1


def test_a_target_s_multipliers_are_taught_and_are_no_switches_of_what_is_trained(tmp_path: Path) -> None:
    model = target()
    model.config = replace(model.config, embedding_multiplier=1.5, query_multiplier=1.2, residual_multiplier=0.8,
                           logits_multiplier=0.4, unrotated=(0,))  # fmt: skip
    features = Features(model, replies(model, 24), TAPS, tmp_path, 10**9)
    trainer = Trainer(recipe("eagle3"), features, tmp_path, lambda line: None)
    hidden = features.of(0)[0][:, -model.config.hidden_size :]
    wanted = model.logits(hidden)[:, trainer.head.token_map]
    torch.testing.assert_close(trainer.teacher(hidden), wanted.softmax(-1))
    state = features.of(0)[0][:, : model.config.hidden_size]
    torch.testing.assert_close(trainer.head.logits(state), model.logits(model.norm(state))[:, trainer.head.token_map])
    small = small_model(Model(replace(model.config, vocab_size=258)), 64)
    for layer in (trainer.head.layer, small.layers[0]):
        assert (layer.query_multiplier, layer.residual_multiplier) == (1.0, 1.0)
    assert small.config == small.config.plain()


def test_the_loss_is_soft_cross_entropy_and_so_is_its_gradient() -> None:
    torch.manual_seed(0)
    logits, wanted = torch.randn(150, 11, requires_grad=True), torch.randn(90, 11).softmax(-1)
    teacher, weight = torch.randint(90, (150,)), torch.rand(150)
    loss, best = SoftCrossEntropy.apply(logits, wanted, teacher, weight)
    (gradient,) = torch.autograd.grad(3 * loss, logits)
    plain = -(wanted[teacher] * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(loss, (plain * weight).sum())
    torch.testing.assert_close(gradient, torch.autograd.grad(3 * (plain * weight).sum(), logits)[0])
    assert torch.equal(best, logits.argmax(-1))


def test_on_a_cpu_few_rows_are_read_at_a_time_and_on_cuda_an_update_takes_a_handful_of_pieces() -> None:
    """A CPU's number is a matter of its caches, and of every bit of a checkpoint; CUDA's of launches and of memory."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert {rows_at_once(cpu, width) for width in (24, 8192, 128256)} == {64}
    assert ON_CUDA["batch_tokens"] / rows_at_once(cuda, 8192) <= 4
    for width in (8192, 32000, 128256):
        assert 4 * width * rows_at_once(cuda, width) <= 2**28


def test_what_is_computed_again_is_what_was_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: the same loss and the same gradients, to the bit, and no scores of anchors with rows in between."""
    model, found = target(), []
    texts = replies(model, 3)
    head, taps, teacher = head_of("eagle3", model, texts)
    features = Features(model, texts, TAPS, tmp_path, 10**9)
    batch = pack(texts, [features.of(i) for i in range(3)], model.config.hidden_size, rounds=4)
    trained = [p for p in head.parameters() if p.requires_grad]
    scores = {(segment.anchors(s), segment.rows + s) for segment in batch.segments for s in range(1, 4)}
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(Unrolled, "RECOMPUTED_ON", devices)
        kept: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t.shape), t)[1], lambda t: t):
            loss, hits = losses(head, batch, taps, teacher, 0.0)
        found.append((loss, hits, *torch.autograd.grad(loss, trained)))
        assert {tuple(shape[-2:]) for shape in kept} & scores == (set() if devices else scores)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_replies_that_are_padded_to_run_together_teach_what_they_teach_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: groups of replies give the features, the loss, its hits and the gradients of one after the other."""
    model, made = target(), []
    texts = [replace(r, ids=r.ids[: r.start + 2]) if i == 2 else r for i, r in enumerate(replies(model, 7))]
    head, taps, teacher = head_of(kind, model, texts)
    trained = [p for p in head.parameters() if p.requires_grad]
    for together in (1, 3, 16):
        monkeypatch.setattr(Features, "GROUP", {"cpu": together})
        monkeypatch.setattr(Unrolled, "GROUP", {"cpu": together})
        features = Features(model, texts, TAPS, tmp_path / str(together), 0 if together == 3 else 10**9)
        found = features.several(range(len(texts)))
        batch = pack(texts, found, model.config.hidden_size, rounds=4)
        loss, hits = losses(head, batch, taps, teacher, 0.5)
        made.append([*(part for pair in found for part in pair), loss, hits, *torch.autograd.grad(loss, trained)])
        if features.kept:
            kept = (part for pair in features.several(range(len(texts))) for part in pair)
            assert all(torch.equal(a, b) for a, b in zip(kept, made[-1], strict=False)), "what is read back"
    for other in made[1:]:
        for a, b in zip(made[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def assert_a_run_may_be_cut(trainer: Callable[..., Any], **another: object) -> None:
    """Compare a run that is interrupted and resumed with one in one go; trainer: makes one in a folder."""
    whole = trainer("whole")
    whole.run()
    trainer("cut").run(stop_at=3)
    rest = trainer("cut")
    rest.run()
    assert whole.step == rest.step == whole.stages.updates > 4
    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(tensor, rest.head.state_dict()[name]), name
    with pytest.raises(ValueError, match="another recipe"):
        trainer("cut", **another).run()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_cut_in_two_is_bit_identical(kind: str, tmp_path: Path) -> None:
    model = target()
    features = Features(model, replies(model, 24), TAPS, tmp_path / "work", 10**9)
    assert_a_run_may_be_cut(lambda name, **more: Trainer(recipe(kind, **more), features, tmp_path / name, print),
                            epochs=3)  # fmt: skip


def test_parts_that_come_later_change_nothing_before_them(tmp_path: Path) -> None:
    """Every reply is learned from as often as there are epochs, and a longer run begins with the trunk of a shorter."""
    texts = replies(target(), 40)

    def stages(parts: Sequence[int]) -> Stages:
        features = Features(target(), texts[: sum(parts)], TAPS, tmp_path / "work", 10**9)
        training = [i for i in range(sum(parts)) if i % 7]
        return Stages(recipe("eagle3", epochs=3), features, training, parts)

    short, long = stages([10, 12]), stages([10, 12, 11, 7])
    for found in (short, long):
        seen = Counter(i for chosen in found.order() for i in chosen)
        assert seen == {i: 3 for i in found.training}
        rates = [found.rate(step) for step in range(found.updates)]
        assert set(rates[: found.trunk + 1]) == {0.01}
        falling = rates[found.trunk :]
        assert falling == sorted(falling, reverse=True) and 0.0005 < falling[-1] < falling[0]
        assert len(falling) >= 0.2 * found.updates
    assert 0 < short.trunk < long.trunk
    trunk = list(islice(short.order(), short.trunk))
    assert trunk == list(islice(long.order(), short.trunk))
    assert {i for chosen in list(long.order())[: len(list(long._stage(0)))] for i in chosen} <= set(range(10))
    rising = Stages(recipe("eagle3", warm_up=3), short.features, short.training, [22])
    assert [rising.rate(step) for step in range(4)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])


def test_a_trunk_goes_on_with_parts_that_were_added(tmp_path: Path) -> None:
    """The run from a trunk makes the updates that a longer run would have made; a trunk of other replies is refused."""
    model, silent = target(), lambda line: None
    texts, made = replies(model, 30), recipe("eagle3")
    first = Features(model, texts[:20], TAPS, tmp_path / "first", 10**9)
    run = Trainer(made, first, tmp_path / "head", silent, [10, 10])
    run.run()
    trunk = tmp_path / "head" / "trunk"
    assert run.stages.trunk_stages == 2
    more = Features(model, texts, TAPS, tmp_path / "more", 10**9)
    further = replace(made, start=str(trunk))
    rest, whole = (Trainer(r, more, tmp_path / "rest", silent, [10, 10, 10]) for r in (further, made))
    assert list(whole.stages.order())[-rest.stages.updates :] == list(rest.stages.order())
    assert whole.stages.updates - rest.stages.updates == run.stages.trunk == whole.stages.trunk - rest.stages.trunk
    assert torch.equal(rest.head.token_map, run.head.token_map)  # counted once
    before = [tensor.clone() for tensor in rest.head.state_dict().values()]
    rest.run()
    assert any(not torch.equal(a, b) for a, b in zip(before, rest.head.state_dict().values(), strict=True))
    other = Features(model, texts[5:], TAPS, tmp_path / "other", 10**9)
    with pytest.raises(ModelError, match="--start .*trunk: its trained.json is of a run on other replies"):
        Trainer(further, other, tmp_path / "other", silent, [10, 10, 5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ("3", "3.1"))
def test_an_exported_head_is_the_trained_one(kind: str, variant: str, tmp_path: Path) -> None:
    model = target()
    texts = replies(model, 6)
    features = Features(model, texts, (2, 2, 1, FINAL), tmp_path / "work", 10**9)
    made = recipe(kind, variant=variant)
    trainer = Trainer(made, features, tmp_path / "out", lambda line: None)
    with torch.no_grad():
        for parameter in trainer.head.parameters():
            if parameter.requires_grad:  # not the target's own rows
                parameter.copy_(parameter.bfloat16())
    export(trainer.head, model, tmp_path / "head")
    token_map = None if kind == "eagle3" else trainer.head.token_map
    loaded = load_head(tmp_path / "head", model, token_map=token_map)
    assert loaded.name == kind and loaded.taps == trainer.head.taps
    batch = trainer._batch([0, 1], 3)
    for (_, a), (_, b) in zip(
        unroll(trainer.head, batch, trainer.taps), unroll(loaded, batch, trainer.taps), strict=True
    ):
        torch.testing.assert_close(trainer.head.logits(a), loaded.logits(b), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_training_starts_from_an_exported_head(kind: str, tmp_path: Path) -> None:
    model, silent = target(), lambda line: None
    first = Features(model, replies(model, 12), TAPS, tmp_path / "first", 10**9)
    before = Trainer(recipe(kind), first, tmp_path / "before", silent)
    before.run(stop_at=2)
    export(before.head, model, tmp_path / "head")
    more = Features(model, replies(model, 12, seed=9), TAPS, tmp_path / "more", 10**9)  # of other frequent tokens
    further = recipe(kind, start=str(tmp_path / "head"))
    after = Trainer(further, more, tmp_path / "after", silent)
    given = {name: p.bfloat16().float() for name, p in before.head.named_parameters() if p.requires_grad}
    ours = dict(after.head.named_parameters())
    for name in given:
        assert torch.equal(ours[name], given[name]), name
    assert torch.equal(after.head.token_map, before.head.token_map) or kind != "eagle3"
    after.run(stop_at=1)
    assert not any(torch.equal(ours[name], given[name]) for name in given), "nothing was learned from there on"
    with pytest.raises(ValueError, match="another recipe"):
        Trainer(recipe(kind), more, tmp_path / "after", silent).run()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"kind": "eagle"}, "holds a head of the kind eagle3, and this run trains one of the kind eagle"),
        ({"draft_vocab": 23}, "its head drafts 24 tokens; got --draft-vocab 23"),
        ({"variant": "3.1"}, "its head has fc_norm False, and this run trains one with fc_norm True"),
        ({"start": "nowhere"}, "--start nowhere: .*config.json"),
    ],
)
def test_a_head_to_start_from_that_does_not_fit_is_refused(other: dict[str, Any], named: str, tmp_path: Path) -> None:
    model = target()
    features = Features(model, replies(model, 12), TAPS, tmp_path / "work", 10**9)
    export(Trainer(recipe("eagle3"), features, tmp_path, lambda line: None).head, model, tmp_path / "head")
    with pytest.raises(ValueError, match=named) as caught:
        Trainer(recipe(**{"kind": "eagle3", "start": str(tmp_path / "head")} | other), features, tmp_path, print)
    assert str(caught.value).startswith("--start ")


def test_training_learns_and_replay_counts_it(tmp_path: Path) -> None:
    model = target()
    texts = replies(model, 12)
    features = Features(model, texts, (0, 1, 2, FINAL), tmp_path / "work", 10**9)
    made = recipe("eagle3", epochs=60, learning_rate=3e-3, draft_vocab=model.config.vocab_size)
    trainer = Trainer(made, features, tmp_path / "out", lambda line: None)
    trainer.held_out = trainer.training
    before = trainer.accept_length(3)
    trainer.run()
    assert before < 1.6 and trainer.accept_length(3) > 3.0, (before, trainer.accept_length(3))


def test_a_small_model_learns_the_replies_and_loads_as_a_draft(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokenizer = Model(replace(target().config, vocab_size=100)).requires_grad_(False), byte_tokenizer(100)
    texts = replies(model, 20)
    made = recipe("standalone", epochs=15, learning_rate=5e-3)
    small = small_model(model, 64)
    train_small(made, small, texts, print)
    assert foreseen(small, texts) > 0.5
    export_small(small, tokenizer_digest(tokenizer), tmp_path)
    draft = load_draft(tmp_path, model, tokenizer, None)
    ids = torch.tensor([texts[0].ids])
    found = draft.model(ids, torch.arange(ids.shape[1])[None], Causal())[0]
    expected = small(ids, torch.arange(ids.shape[1])[None], Causal())[0]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # bfloat16's rounding of weights


def test_replay_counts_like_a_server(tmp_path: Path) -> None:
    """Accept length is tokens over steps of a walk that jumps over what was accepted."""
    model = target()
    texts = replies(model, 1, seed=5)
    head, taps, teacher = head_of("eagle3", model, texts)
    features = Features(model, texts, TAPS, tmp_path, 10**9)
    batch = pack(texts, [features.of(0)], model.config.hidden_size, rounds=2)
    text, steps, emitted, anchor = texts[0], 0, 0, texts[0].start - 1
    while anchor + 3 <= len(text.ids) - 1:
        run = 0
        for s in range(2):
            choice = head.token_map[head.logits(chain(head, model, text.ids, anchor, s, taps)).argmax()]
            if int(choice) != text.ids[anchor + 2 + s]:
                break
            run += 1
        steps, emitted, anchor = steps + 1, emitted + run + 1, anchor + run + 1
    assert replay(accepted(head, batch, taps, teacher)) == (emitted, steps)
    assert losses(head, batch, taps, teacher, 0.0)[1][0, 1] == len(text.ids) - 1 - text.start


def test_batches_are_all_replies_once() -> None:
    texts = [TrainingReply(list(range(n)), 2, 0.0, "x") for n in range(4, 40)]
    made = list(batches(texts, range(36), 50, random.Random(0)))
    assert sorted(i for batch in made for i in batch) == list(range(36))
    sizes = [sum(len(texts[i].ids) - 2 for i in batch) for batch in made]
    assert all(50 <= size < 90 for size in sizes[:-1])


@pytest.mark.parametrize(
    "tail, expected",
    [
        ([1, 2, 3] * 16, True),
        (list(range(48)), False),
        ([*range(17)] * 3, False),
        ([*range(16)] * 3, True),
        ([7] * 44, False),
    ],
)
def test_a_loop_is_a_short_period_at_the_end(tail: list[int], expected: bool) -> None:
    """48 tokens with a period of at most 16; shorter replies do not loop."""
    assert loops([99, 98, 97, *tail]) == expected


# ---- data that changed between two runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("change", ("more replies", "other replies", "another dtype"))
def test_resuming_with_other_data_is_refused_in_one_sentence(change: str, tmp_path: Path) -> None:
    """The head's rows belong to the draft ids of the old replies, and the new held-out ones were trained on."""
    model = target()
    texts, silent = replies(model, 24), lambda line: None
    before = Features(model, texts, TAPS, tmp_path / "before", 10**9)
    Trainer(recipe("eagle3"), before, tmp_path / "head", silent).run(stop_at=3)
    if change == "another dtype":
        model = model.bfloat16()
    else:
        texts = texts + replies(model, 4, seed=9) if change == "more replies" else replies(model, 24, seed=9)
    after = Features(model, texts, TAPS, tmp_path / "after", 10**9)
    with pytest.raises(ValueError, match="checkpoint.pt .*other replies.*--work.*--out"):
        Trainer(recipe("eagle3"), after, tmp_path / "head", silent).run()


@pytest.mark.parametrize("change", ("replies", "dtype", "taps"))
def test_features_of_other_data_are_not_read_back(change: str, tmp_path: Path) -> None:
    model = target()
    texts, taps = replies(model, 3), TAPS
    old = Features(model, texts, taps, tmp_path / "work", 10**9)
    for i in range(3):
        old.of(i)
    if change == "replies":  # of the same lengths, so that nothing in the files' sizes tells them apart
        texts = [replace(text, ids=text.ids[::-1]) for text in texts]
    elif change == "dtype":
        model = model.bfloat16()
    else:
        taps = (0, 1, 1, FINAL)
    found = Features(model, texts, taps, tmp_path / "work", 10**9)
    fresh = Features(model, texts, taps, tmp_path / "fresh", 10**9)
    for i in range(3):
        assert torch.equal(found.of(i)[0], fresh.of(i)[0]) and torch.equal(found.of(i)[1], fresh.of(i)[1])
        assert not torch.equal(old.of(i)[0], fresh.of(i)[0]), "the change changes nothing"


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The command on a random target over single bytes, uncompiled; writes the token map of two replies by default."""
    monkeypatch.setattr("minispec.train.__main__.Config", partial(Config, disable_torch_compile=True))
    torch.manual_seed(0)
    model = Model(replace(target().config, vocab_size=258, tied=True, context_length=512))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    export_small(model, "", tmp_path / "target")
    byte_tokenizer(258).backend._tokenizer.save(str(tmp_path / "target" / "tokenizer.json"))
    (tmp_path / "target" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    base = {"--model": tmp_path / "target", "--out": tmp_path / "out", "--work": tmp_path / "work", "--device": "cpu",
            "--prompts": tmp_path / "mine.jsonl", "--max-new-tokens": 40, "--draft-vocab": 32}  # fmt: skip

    def run(kind: str = "token-map", **flags: object) -> None:
        given = base | {"--" + name.replace("_", "-"): value for name, value in flags.items()}
        main([kind, *(str(word) for pair in given.items() if pair[1] is not None for word in pair)])

    return run


def test_the_same_command_again_reads_its_replies_and_another_kind_shares_them(
    command: Callable[..., None], tmp_path: Path
) -> None:
    command()
    made = (tmp_path / "work" / "replies.jsonl").read_text()
    command()
    command("eagle", epochs=1, rounds=2, batch_tokens=50, out=tmp_path / "head")
    command("eagle", epochs=1, rounds=2, batch_tokens=50, out=tmp_path / "further", start=tmp_path / "head")
    assert (tmp_path / "work" / "replies.jsonl").read_text() == made and made.count('"ids"') >= 2
    assert (tmp_path / "out" / "token_map.safetensors").is_file()
    assert (tmp_path / "head" / "model.safetensors").is_file()
    state = torch.load(tmp_path / "further" / "checkpoint.pt", weights_only=True)
    assert state["recipe"]["start"] == str(tmp_path / "head")


def test_what_wrote_the_replies_is_gone_before_the_target_is_loaded_again(
    command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model, pages and engine, by the command's own doing and not when the collector happens to run."""
    made: list[weakref.ref] = []
    loaded = []

    def start(**options: object) -> LLM:
        llm = LLM(**options)
        engine = llm.scheduler.engine
        made.extend(map(weakref.ref, (engine, engine.kv.pool, engine.model, *engine.model.parameters())))
        return llm

    def load(*args: object) -> Model:
        loaded.append([ref() is not None for ref in made])
        return load_target(*args)

    monkeypatch.setattr("minispec.train.__main__.LLM", start)
    monkeypatch.setattr("minispec.train.__main__.load_target", load)
    gc.disable()
    try:
        command()
    finally:
        gc.enable()
    assert len(made) > 10 and loaded == [[False] * len(made)]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"max_new_tokens": 41}, "--max-new-tokens 40, and this run has --max-new-tokens 41;"),
        ({"seed": 3}, "--seed 0, and this run has --seed 3;"),
        ({"prompts": "other.jsonl"}, "--prompts mine.jsonl .sha256 .*, and this run has --prompts other.jsonl .sha256"),
        ({"prompts": None, "count": 20}, "--prompts mine.jsonl .*, and this run has --count 20;"),
        ({"model": "elsewhere"}, "--model .*/target, and this run has --model .*/elsewhere;"),
    ],
)
def test_replies_made_with_other_flags_are_refused_by_name(
    flags: dict[str, object], named: str, command: Callable[..., None], tmp_path: Path
) -> None:
    command()
    (tmp_path / "target").rename(tmp_path / "elsewhere") if "model" in flags else None
    (tmp_path / "other.jsonl").write_text('{"prompt": "three"}\n{"prompt": "four"}\n')
    files = {name: tmp_path / str(flags[name]) for name in ("prompts", "model") if flags.get(name)}
    with pytest.raises(SystemExit, match=f"^minispec.train: error: --work .* was made with {named}.* --work$"):
        command(**flags | files)


def test_a_prompts_file_that_was_edited_is_refused(command: Callable[..., None], tmp_path: Path) -> None:
    """The content counts, not the name: moved it is the same, edited under the same name it is not."""
    command()
    (tmp_path / "moved").mkdir()
    moved = (tmp_path / "mine.jsonl").rename(tmp_path / "moved" / "mine.jsonl")
    command(prompts=moved)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "one"}\n{"prompt": "three"}\n')
    with pytest.raises(SystemExit, match="--prompts mine.jsonl .sha256"):
        command()


def test_replies_in_another_dtype_are_refused(command: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A target of another precision would have replied otherwise; the device chooses it."""
    command()
    other = torch.float32 if choose_dtype(Config(), torch.device("cpu")) == torch.bfloat16 else torch.bfloat16
    monkeypatch.setattr("minispec.train.__main__.choose_dtype", lambda config, device: other)
    with pytest.raises(SystemExit, match="dtype .*32.*dtype|dtype .*16.*dtype"):
        command()


def test_a_work_folder_that_does_not_say_what_made_it_is_refused(tmp_path: Path) -> None:
    """Replies of unknown making are not trained on, and a first line that was cut off is written anew."""
    path = tmp_path / "replies.jsonl"
    path.write_text('{"ids": [1, 2, 3], "start": 1, "temperature": 0.0, "source": "x"}\n{"group": 0}\n')
    with pytest.raises(ValueError, match="does not say what made it.*--work"):
        begin_replies(path, {"--seed": 0})
    path.write_text('{"made w')
    begin_replies(path, {"--seed": 0})
    begin_replies(path, {"--seed": 0})
    assert groups_done(path) == 0 and read_replies(path) == []
    with pytest.raises(ValueError, match="--seed 0, and this run has --seed 1"):
        begin_replies(path, {"--seed": 1})


# ---- replies made in runs, kept in shards ---------------------------------------------------------------------------


def test_runs_keep_sampled_and_long_prompts_apart_and_each_is_by_length() -> None:
    lengths, heat = [900, 5, 30, 400, 7, 383, 384], [0.0, 0.0, 0.8, 0.0, 0.0, 0.0, 0.7]
    assert runs_alike(lengths, heat) == [[1, 4, 5], [3, 0], [2], [6]]


def test_what_is_held_out_is_decided_by_the_prompt_for_good() -> None:
    """More replies behind them change nothing, sampled ones are no measure, and there are at most 200."""
    made = [TrainingReply([n, 7, 8, n % 5], 3, 0.0 if n % 4 else 0.8, "x") for n in range(20_000)]
    some = held_out(made[:2000])
    assert 40 < len(some) < 80 and held_out(made)[: len(some)] == some and len(held_out(made)) == 200
    assert all(made[i].temperature == 0 for i in held_out(made))
    other_replies = [replace(reply, ids=[*reply.ids[:3], 1, 2, 3]) for reply in made]
    assert held_out(other_replies) == held_out(made)


class Says:
    """An LLM that ends every reply with the same text."""

    def __init__(self, text: str) -> None:
        self.text, self.tokenizer = text, Tokenizer(byte_tokenizer(258).backend, frozenset(), TEMPLATE, {})

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[dict[str, Any]]:
        """Return it once a prompt."""
        return [{"text": self.text, "meta_info": {"finish_reason": {"type": "stop"}}} for _ in prompts]


@pytest.mark.parametrize(
    ("text", "kept"), [("Name a good book.", True), ("Why did the Roman Republic become an empire? Well.", False)]
)
def test_no_turn_that_is_made_up_repeats_what_is_measured_on(text: str, kept: bool) -> None:
    writer = _Writer(Says(f" {text}"), random.Random(0), 40, set())  # type: ignore[arg-type]
    asked = [Conversation([{"role": "user", "content": "hi"}], "x")] * 50
    assert ("self-prompted" in {each.source for each in writer.make_up(asked)}) is kept
    writer.replies = dict.fromkeys(range(50), "hello")
    assert bool(writer.second_turns(asked)) is kept


def growing(path: Path, sizes: Sequence[int], half: int = 0) -> None:
    """Write a file of replies with groups of so many reply tokens, ten a reply, and perhaps a part of another group."""
    begin_replies(path, {"--model": "m", "--seed": 0})
    with path.open("a") as file:
        for group, size in enumerate([*sizes, half]):
            for number in range(size // 10):
                ids = [group, number, *range(10)]
                file.write(json.dumps({"ids": ids, "start": 2, "temperature": 0.0, "source": "x"}) + "\n")
            if group < len(sizes):
                file.write(json.dumps({"group": group, "tokens": size}) + "\n")


def test_shards_hold_whole_groups_in_order_and_are_never_changed(tmp_path: Path, monkeypatch: Any) -> None:
    """A shard is written when the next group does not fit; the rest waits, and goes into the last one at the end."""
    monkeypatch.setattr("minispec.train.shards.SHARD_TOKENS", 250)
    path, folder = tmp_path / "replies.jsonl", tmp_path / "shards"
    growing(path, [100, 100, 60], half=50)
    assert write_shards(path, folder) and len(shard_files(folder)) == 1
    first = shard_files(folder)[0].read_bytes()
    assert [[len(r.ids) - r.start for r in shard] for shard in read_shards(folder, "m")] == [[10] * 20]
    path.unlink()
    growing(path, [100, 100, 60, 240, 10])
    assert write_shards(path, folder) and len(shard_files(folder)) == 2
    assert write_shards(path, folder, last=True) and write_shards(path, folder, last=True)
    assert len(shard_files(folder)) == 3 and shard_files(folder)[0].read_bytes() == first
    assert sum(read_shards(folder, "m"), []) == read_replies(path)


def test_a_lost_work_folder_is_begun_anew_from_the_shards(tmp_path: Path, monkeypatch: Any) -> None:
    """With all their groups; a file that has more is left alone, and shards made otherwise are refused."""
    monkeypatch.setattr("minispec.train.shards.SHARD_TOKENS", 100)
    path, folder, fresh = tmp_path / "replies.jsonl", tmp_path / "shards", tmp_path / "fresh.jsonl"
    growing(path, [90, 80, 70])
    write_shards(path, folder)
    restore(path, folder)
    assert groups_done(path) == 3
    begin_replies(fresh, {"--model": "m", "--seed": 0})
    restore(fresh, folder)
    assert groups_done(fresh) == len(shard_files(folder)) == 2 and read_replies(fresh) == read_replies(path)[:17]
    begin_replies(tmp_path / "other.jsonl", {"--model": "m", "--seed": 1})
    with pytest.raises(ValueError, match="--out .*--seed.: 0.*this run is of .*--seed.: 1"):
        restore(tmp_path / "other.jsonl", folder)


def test_shards_stop_where_their_folder_is_full_and_a_missing_one_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("minispec.train.shards.SHARD_TOKENS", 100)
    path, folder = tmp_path / "replies.jsonl", tmp_path / "shards"
    growing(path, [100, 100, 100, 100])
    write_shards(path, tmp_path / "all")
    size = sum(file.stat().st_size for file in shard_files(tmp_path / "all")[:2])
    monkeypatch.setattr("minispec.train.shards.ALL_BYTES", size)
    assert not write_shards(path, folder) and len(shard_files(folder)) == 2
    with pytest.raises(ValueError, match="was written by m, and this run trains for another"):
        read_shards(folder, "another")
    shard_files(folder)[0].unlink()
    with pytest.raises(ValueError, match="has replies-0001.jsonl.xz but not replies-0000.jsonl.xz"):
        shard_files(folder)
    with pytest.raises(ValueError, match="--replies .* holds no shard"):
        read_shards(tmp_path / "nowhere", "m")


def test_the_command_writes_shards_goes_on_from_them_and_learns_from_them(
    command: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prompt has two replies; without its work folder it writes nothing again; a head needs the shards alone."""
    lines = [json.dumps({"prompt": f"say {n}"}) for n in (*range(20), *range(20))]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    command("replies", out=tmp_path / "shards")
    found = sum(read_shards(tmp_path / "shards", str(tmp_path / "target")), [])
    assert found == read_replies(tmp_path / "work" / "replies.jsonl")
    assert 10 < len(found) == len({tuple(reply.ids[: reply.start]) for reply in found})
    monkeypatch.setattr("minispec.train.__main__.LLM", None)  # from here on nothing is generated
    command("replies", out=tmp_path / "shards", work=tmp_path / "other")
    assert len(shard_files(tmp_path / "shards")) == 1
    assert read_replies(tmp_path / "other" / "replies.jsonl") == found
    command("eagle", replies=tmp_path / "shards", work=tmp_path / "third", epochs=1, rounds=2, prompts=None)
    assert (tmp_path / "out" / "model.safetensors").is_file() and not (tmp_path / "third" / "replies.jsonl").exists()


def test_a_default_model_that_cannot_be_had_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tell: object, as_is: bool) -> None:
        raise DefaultModelError("the wheel is nowhere")

    monkeypatch.setattr("minispec.load.build.ensure_default_model", fail)
    with pytest.raises(SystemExit, match="^minispec.train: error: .*the wheel is nowhere"):
        main(["eagle3", "--out", str(tmp_path)])
