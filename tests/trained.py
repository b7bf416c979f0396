"""A tiny target that knows a small language, and drafters trained on it: each takes seconds on one core.

A random head is hardly ever accepted, so a test could not tell if it read the wrong things. Here text is predictable: a
mark says which of two orders the letters follow from now on, and a letter is followed by its successor in that order.
The next token depends on the newest one and on something far back, and the head has to find both: the token in the
embedding, the order in the target's features.

The modules that are trained are those that are served: `Model` and `Eagle3Head` with `attention.Causal`, and
`DFlashHead` and `DSparkHead` as `train/blocks.py` trains them.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from exactness import VOCAB, tiny_config
from torch import Tensor, nn

from minispec.attention import Causal
from minispec.dflash import DFlashConfig, DFlashHead
from minispec.dspark import DSparkConfig, DSparkHead
from minispec.eagle import Eagle3Head, HeadConfig
from minispec.model import FINAL, Model
from minispec.train.blocks import draw_anchors, losses, pack
from minispec.train.corpus import TrainingReply
from minispec.train.rounds import Teacher

MARKS = [0, 1]
LETTERS = list(range(2, VOCAB, 2))
TAPS = (1, 2)
DRAFT_IDS = torch.tensor(MARKS + LETTERS)  # target ids, no two at the same offset from their draft ids
ROUNDS = 3  # of drafting the head is trained for
SHARED: list[Any] = []  # what is trained once in a process, for all its tests; conftest.py sees that it stays eager


@functools.cache
def orders() -> list[dict[int, int]]:
    """Return each mark's successor of every word; all letters of an order are one cycle."""
    rng, tables = random.Random(4), []
    for _ in MARKS:
        cycle = rng.sample(LETTERS, len(LETTERS))
        tables.append(dict(zip([*MARKS, *cycle], [*cycle[: len(MARKS)], *cycle[1:], cycle[0]], strict=True)))
    return tables


def sentence(length: int, rng: random.Random, noise: float = 0.1) -> list[int]:
    """Return a text of the language: a mark, then letters in its order, now and then any letter or another mark."""
    mark = rng.choice(MARKS)
    ids = [mark]
    while len(ids) < length:
        if rng.random() < noise / 4:
            mark = rng.choice(MARKS)
            ids.append(mark)
        else:
            ids.append(rng.choice(LETTERS) if rng.random() < noise else orders()[mark][ids[-1]])
    return ids


def train(parameters: Iterable[Tensor], loss_of: Callable[[Tensor], Tensor], *, steps: int, seed: int) -> None:
    """Minimise `loss_of(ids)` over fresh texts ids [16, 48] int64."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(list(parameters), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps, pct_start=0.2)
    for _ in range(steps):
        loss = loss_of(torch.tensor([sentence(48, rng) for _ in range(16)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def randomise(module: nn.Module, scale: float) -> None:
    """Draw all weights but those of norms."""
    for name, parameter in module.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, 0, scale)


@functools.cache
@torch.inference_mode(False)  # engines are built in inference mode
def trained_model() -> Model:
    """Return the target."""
    torch.manual_seed(0)
    model = Model(tiny_config())
    randomise(model, 0.1)
    positions = torch.arange(47)[None]

    def loss_of(ids: Tensor) -> Tensor:
        hidden, _ = model(ids[:, :-1], positions, Causal())
        return F.cross_entropy(model.logits(hidden).flatten(0, 1), ids[:, 1:].flatten())

    train(model.parameters(), loss_of, steps=160, seed=1)
    SHARED.append(model)
    return model.requires_grad_(False).eval()


@functools.cache
@torch.inference_mode()
def trained_like(**switches: Any) -> Model:
    """Return a target with `trained_model`'s weights and switches of its config, whose text its drafters know as well.

    Experts, if there are any, are its MLPs with some noise, each expert with its own.
    """
    model = trained_model()
    torch.manual_seed(6)
    width = {"expert_size": model.config.intermediate_size}
    other = Model.empty(dataclasses.replace(model.config, **{**switches, **width}), torch.float32, torch.device("cpu"))
    weights = model.state_dict()
    for name, parameter in other.named_parameters():
        if name in weights:
            parameter.copy_(weights[name])
        elif "router" in name:
            parameter.normal_()
        else:
            like = weights[f"{name.replace('experts.', '')}.weight"]
            parameter.copy_(like * (1 + 0.5 * torch.randn(parameter.shape)))
    SHARED.append(other)
    return other


@functools.cache
@torch.inference_mode(False)  # engines are built in inference mode
def trained_head() -> Eagle3Head:
    """Return a head that drafts `trained_model`, with a draft vocabulary of its own.

    Row i of round r holds token i + 1 + r, and the label is what the target picks after it.
    """
    model = trained_model()
    torch.manual_seed(1)
    head = Eagle3Head(HeadConfig("eagle3", model.config, TAPS, token_map=DRAFT_IDS), model)
    randomise(head, 0.1)

    def loss_of(ids: Tensor) -> Tensor:
        with torch.no_grad():
            hidden, features = model(ids, torch.arange(48)[None], Causal(), TAPS)
            labels = model.logits(hidden)[..., DRAFT_IDS].argmax(-1)
        states, loss = head.fuse(features)[:, :-1], torch.tensor(0.0)
        for round_ in range(ROUNDS):
            positions = torch.arange(round_, 47)[None]
            following = ids[:, round_ + 1 :]
            states = head(head.embed(following), states, head.rope(positions), Causal().layer(0), positions)
            loss = loss + F.cross_entropy(head.logits(states).flatten(0, 1), labels[:, round_ + 1 :].flatten())
            states = states[:, :-1]
        return loss / ROUNDS

    train(head.parameters(), loss_of, steps=100, seed=2)
    return head.requires_grad_(False).eval()


BLOCK = 6  # rows
MASK = VOCAB - 2  # an odd id, which no sentence has


@functools.cache
@torch.inference_mode(False)
def trained_dflash(taps: tuple[int, ...] = TAPS) -> DFlashHead:
    """Return a DFlash network that drafts `trained_model` in blocks of six rows, from `DRAFT_IDS`."""
    shape = dataclasses.replace(trained_model().config, layers=2, qk_norm=True)
    return _trained(DFlashHead, DFlashConfig("dflash", shape, taps, DRAFT_IDS, block_size=BLOCK, mask_token=MASK))


@functools.cache
@torch.inference_mode(False)
def trained_dspark() -> DSparkHead:
    """Return a DSpark network that drafts `trained_model` in blocks of five rows, which all draft, from `DRAFT_IDS`."""
    shape, rank = dataclasses.replace(trained_model().config, layers=2, qk_norm=True), 16
    config = DSparkConfig("dspark", shape, TAPS, DRAFT_IDS, block_size=BLOCK - 1, mask_token=MASK, rank=rank,
                          confidence=shape.hidden_size + rank)  # fmt: skip
    return _trained(DSparkHead, config)


def _trained(kind: type[Any], config: DFlashConfig) -> Any:
    """Return a block drafter of this config, trained."""
    model, rng = trained_model(), random.Random(3)
    torch.manual_seed(1)
    head = kind(config, model)
    randomise(head, 0.1)
    head.lm_head.weight.data = model.lm_head.weight[DRAFT_IDS].clone()
    teacher, columns = Teacher(head.lm_head.weight, DRAFT_IDS, VOCAB), slice(0, len(head.taps) * head.hidden_size)

    def loss_of(ids: Tensor) -> Tensor:
        with torch.no_grad():
            hidden, features = model(ids, torch.arange(48)[None], Causal(), (*head.taps, FINAL))
            choices = model.logits(hidden).argmax(-1)
        texts = [TrainingReply(text, 4, 0.0, "") for text in ids.tolist()]
        anchors = [draw_anchors(text, 2 * BLOCK, rng) for text in texts]
        packed = pack(head, texts, list(zip(features, choices, strict=True)), anchors)
        return losses(head, packed, columns, teacher, "decay")[0]

    train([p for p in head.parameters() if p is not head.lm_head.weight], loss_of, steps=120, seed=2)
    SHARED.append(head)
    return head.requires_grad_(False).eval()
