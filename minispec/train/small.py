"""A small model to draft with, trained on the target's replies: `python -m minispec.train standalone`, a demonstration.

A drafter for STANDALONE must have the target's vocabulary, and for a target without smaller relatives there is none.
This module makes one: a Llama of two narrow layers, the fewest with which attention can find an earlier text like the
present one and repeat what followed there (induction heads, arXiv 2209.11895).

Read next: `standalone.py`, which serves it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.attention import Causal
from minispec.load.published import published_tensors
from minispec.model import Model
from minispec.train.corpus import TrainingReply, batches, held_out
from minispec.train.export import Recipe, draft_vocabulary, published_config, write_folder
from minispec.train.prompts import Tell


def small_model(model: Model, width: int) -> Model:
    """Return a Llama of `width` and two layers with the target's vocabulary, to train, in fp32.

    Nearly all of its weights are the embedding, which starts as the target's embedding projected onto the `width`
    directions in which that varies most.
    """
    heads = width // 64
    shape = replace(
        model.config.plain(), hidden_size=width, intermediate_size=2 * width, layers=2, heads=heads, kv_heads=1,
        head_dim=64, tied=True, qk_norm=False, qkv_bias=False, output_bias=False, mlp_bias=False,
    )  # fmt: skip
    weight = model.embed_tokens.weight.float()
    small = Model(shape).to(weight.device)
    _, _, directions = torch.linalg.svd(weight - weight.mean(0), full_matrices=False)
    with torch.no_grad():
        for parameter in small.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02)
        start = weight @ directions[:width].T
        small.embed_tokens.weight.copy_(start * (0.05 / start.std()))
    small.frequencies = small.frequencies.to(weight.device)
    return small


def train_small(recipe: Recipe, small: Model, replies: Sequence[TrainingReply], tell: Tell) -> float:
    """Train a small model on the replies by cross-entropy; returns the share of held-out tokens it predicts.

    Logits over the whole vocabulary would be nearly all of the work. So each update computes them for the draft
    vocabulary, for as many tokens drawn at random, and for the tokens of its replies. `small` is changed in place.
    """
    apart = held_out(replies)
    training = sorted(set(range(len(replies))) - set(apart))
    updates = [
        chosen
        for epoch in range(recipe.epochs)
        for chosen in batches(replies, training, recipe.batch_tokens, random.Random(f"{recipe.seed}/{epoch}"))
    ]
    frequent = draft_vocabulary(replies, recipe.draft_vocab, small.config.vocab_size)
    optimizer = torch.optim.AdamW(small.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    rng, told, mean = torch.Generator().manual_seed(recipe.seed), time.perf_counter(), 0.0
    for step, chosen in enumerate(updates):
        for group in optimizer.param_groups:
            rise = min(1.0, (step + 1) / (recipe.warm_up + 1))
            group["lr"] = recipe.learning_rate * rise * (0.525 + 0.475 * math.cos(math.pi * step / len(updates)))
        drawn = torch.randperm(small.config.vocab_size, generator=rng)[: recipe.draft_vocab]
        shown = torch.tensor([token for i in chosen for token in replies[i].ids])
        candidates = torch.cat((frequent, drawn, shown)).unique().to(small.embed_tokens.weight.device)
        optimizer.zero_grad(set_to_none=True)
        for i in chosen:
            loss = _next_token_loss(small, replies[i], candidates) / len(chosen)
            loss.backward()
            mean += 0.02 * (loss.item() * len(chosen) - mean) if mean else loss.item() * len(chosen)
        nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        if time.perf_counter() - told > 15 or step + 1 == len(updates):
            tell(f"update {step + 1}/{len(updates)}  loss {mean:.3f}")
            told = time.perf_counter()
    return foreseen(small, [replies[i] for i in apart])


def export_small(small: Model, tokenizer_digest: str, folder: Path) -> None:
    """Write a small model as a folder in bfloat16, with a digest of the target's tokenizer in place of a copy."""
    published = published_tensors(small)
    tensors = {"model." + name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in published.items()}
    write_folder(folder, published_config(small.config) | {"tokenizer_digest": tokenizer_digest}, tensors)


@torch.no_grad()
def foreseen(small: Model, replies: Sequence[TrainingReply]) -> float:
    """Return the share of reply tokens that are the small model's first choice."""
    right = total = 0
    for reply in replies:
        ids = torch.tensor([reply.ids], device=small.embed_tokens.weight.device)
        logits = small.logits(_hidden(small, ids)[0, reply.start : -1])
        right += int((logits.argmax(-1) == ids[0, reply.start + 1 :]).sum())
        total += len(logits)
    return right / max(1, total)


def _hidden(small: Model, ids: Tensor) -> Tensor:
    """Return the final hidden states [1, T, d] of ids [1, T]."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return small(ids, positions, Causal())[0]


def _next_token_loss(small: Model, reply: TrainingReply, candidates: Tensor) -> Tensor:
    """Return the mean cross-entropy of a reply's tokens among the candidates; its prompt's count a tenth each.

    candidates: sorted ids, all tokens of prompt and reply among them.
    """
    ids = torch.tensor([reply.ids], device=candidates.device)
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = _hidden(small, ids)[0, :-1]
        logits = F.linear(hidden, small.embed_tokens.weight[candidates]).float()
    loss = F.cross_entropy(logits, torch.searchsorted(candidates, ids[0, 1:]), reduction="none")
    weight = torch.full_like(loss, 0.1)
    weight[reply.start - 1 :] = 1.0
    return (loss * weight).sum() / weight.sum()
