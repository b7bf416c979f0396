"""The start-up self-test: is the draft head accepted at all, and if not, would it be if it were read another way?

A checkpoint may not state which layers' streams a head was trained on, or where its norms stand. A head that is read
wrongly loads, drafts nonsense and changes no output; only the speed suffers, and nobody knows why. So a few steps are
drafted and verified before the first request. A head that is hardly ever accepted is then measured under the readings
that differ in one point from the one its files ask for. Nothing is changed; one line of the log names the key to set.

To judge a reading it need not be served. On one text, with plain causal attention and the true tokens given, we count
the positions at which the head's first choice is the target's, which takes two small forward passes per reading.

Read next: `heads.py`, where config.json becomes a reading; EAGLE-3 (arXiv 2503.01840) for what a head reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minispec.attention import QUERY_BLOCK, Causal
from minispec.bucket import Chunk
from minispec.drafter import Drafter
from minispec.eagle import DraftHead, Eagle3Head
from minispec.engine import Engine
from minispec.model import FINAL, Model
from minispec.request import Request, SamplingParams

logger = logging.getLogger("minispec")

PROMPT = (
    "Question: What do trees need to grow, and why do their leaves fall in autumn?\n"
    "Answer: Trees need light, water and air. Their leaves"
)
STEPS = 24  # verify steps of the test
HOPELESS_LENGTH = 1.05  # a head with an accept length below this is read wrongly, or not made for this target
CLEARLY = 0.1  # a reading is better if the share of positions where it agrees with the target is so much higher

Streams = dict[int | str, Tensor]


class Reading(NamedTuple):
    """One way to read a head: the streams that it gets, and a switch of its forward pass that is set the other way."""

    asks: str  # what config.json has to say for this reading
    taps: tuple[int | str, ...]
    switch: tuple[nn.Module, str] | None = None  # a module and the name of its bool


@torch.inference_mode()
def self_test(engine: Engine, drafter: Drafter, prompt: Sequence[int]) -> None:
    """Draft and verify a few steps after `prompt` and log the accept length; if it is about 1, log a better reading.

    For an idle engine after warm-up; pages, slots and counters are left as they were. If the context or the pool is too
    small for the text, nothing is tested.
    """
    tried = _serve(engine, drafter, prompt[:QUERY_BLOCK])
    if tried is None:
        return
    text, length = tried
    said = f"self-test of the draft head: accept length {length:.2f} over {STEPS} steps"
    if length >= HOPELESS_LENGTH:
        logger.info("%s", said)
        return
    head = drafter.network
    compares = isinstance(head, DraftHead) and engine.alone
    best, now, then = _compare(engine.model, head, text) if compares else (None, 0, 0)
    if best is not None:
        logger.warning("%s; its first choice is the target's at %.0f %% of the positions, and at %.0f %% if its "
                       "config.json had %s", said, 100 * now, 100 * then, best.asks)  # fmt: skip
    else:
        logger.warning("%s, and no neighbouring reading of it is better: it does not help this target; see "
                       "--speculative-draft-model-path", said)  # fmt: skip


def _serve(engine: Engine, drafter: Drafter, prompt: Sequence[int]) -> tuple[list[int], float] | None:
    """Return the prompt with its greedy continuation and the accept length; None where there is no room for it."""
    kv, slot, text = engine.kv, 1, list(prompt)
    rows = len(text) + 1 + STEPS * (drafter.depth + 1)
    pages = kv.pages_for(rows + engine.sizes.tree_rows)
    if rows > engine.sizes.context_length or pages > len(kv.free):
        return None
    taken = kv.allocate(pages)
    kv.map(slot, 0, taken)
    engine.assign(Request("self-test", text, SamplingParams(temperature=0.0), slot=slot), ())
    try:
        text += engine.collect(engine.prefill([Chunk(slot, text, 0, last=True)]))[0]
        known = len(text)
        for _ in range(STEPS):
            text += engine.collect(engine.launch([slot]))[0]
    finally:
        engine.release(slot)
        kv.unmap(slot)
        kv.give_back(taken[::-1])
    return text, (len(text) - known) / STEPS


def _compare(model: Model, head: DraftHead, text: Sequence[int]) -> tuple[Reading | None, float, float]:
    """Return the best neighbouring reading, None if none is clearly better, and the agreement without and with it."""
    ids = torch.tensor([text], device=model.norm.weight.device)
    streams = _streams(model, ids)
    picks = model.logits(streams[FINAL]).argmax(-1)
    now = agreement(head, Reading("", head.taps), streams, ids, picks)
    found = [(agreement(head, reading, streams, ids, picks), reading) for reading in readings(head, len(model.layers))]
    then, best = max(found, key=lambda pair: pair[0])
    return (best if then > now + CLEARLY else None), now, then


def readings(head: DraftHead, layers: int) -> Iterator[Reading]:
    """Yield the readings that differ from a head's own in one point and that its config.json can ask for."""
    key = '"eagle_aux_hidden_state_layer_ids"'
    if head.taps == (FINAL,):
        yield Reading(f"{key}: [{layers}] (the last hidden state before the final norm)", (layers,))
    elif head.taps == (layers,):
        yield Reading(f"no {key} (the last hidden state after the final norm)", (FINAL,))
    else:
        for by in (-1, 1):
            taps = tuple(tap + by for tap in head.taps if isinstance(tap, int))
            if all(0 <= tap < layers for tap in taps):
                yield Reading(f"{key}: {list(taps)} (layer inputs, at its top level and not in eagle_config)", taps)
    if isinstance(head, Eagle3Head):
        before = head.layer.norm_before_residual
        yield Reading(
            f'"norm_before_residual": {str(not before).lower()}', head.taps, (head.layer, "norm_before_residual")
        )
        if head.fc_norm is not None:  # without those tensors the key is not read
            yield Reading(f'"norm_output": {str(not head.norm_output).lower()}', head.taps, (head, "norm_output"))


def agreement(head: DraftHead, reading: Reading, streams: Streams, ids: Tensor, picks: Tensor) -> float:
    """Return the share in [0, 1] of the positions of ids [1, T] at which the head's first choice is the target's.

    picks [1, T]: the target's choice after each position. Half of the choices are for the first drafted token, made
    from the target's features, and half for the second, made from the head's own state. Position 0 is left out, since
    its stream is unlike all others.
    """
    if reading.switch is not None:
        owner, name = reading.switch
        setattr(owner, name, not getattr(owner, name))
    try:
        tokens, wanted = ids[:, 1:], picks[:, 1:]
        positions = torch.arange(tokens.shape[1], device=ids.device)[None]
        embedding, rope = head.embed(tokens), head.rope(positions)
        state = head.fuse(torch.cat([streams[tap] for tap in reading.taps], dim=-1)[:, :-1])
        right = []
        for _ in range(2):
            out = head(embedding, state, rope, Causal(), positions)
            choice = head.logits(out).argmax(-1)
            choice = choice if head.token_map is None else head.token_map[choice]
            right.append((choice == wanted)[:, 1:])
            state = torch.cat([state[:, :1], out[:, :-1]], dim=1)
        return float(torch.cat(right).float().mean())
    finally:
        if reading.switch is not None:
            setattr(owner, name, not getattr(owner, name))


def _streams(model: Model, ids: Tensor) -> Streams:
    """Return every stream [1, T, d] a head can read of ids [1, T]; runs eagerly: compiled blocks are for paged rows."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    x, rope, streams = model.embed(ids), model.rope(positions), Streams()
    for index, block in enumerate(model.layers):
        streams[index] = x
        x = block(x, rope, Causal())
    return streams | {len(model.layers): x, FINAL: model.norm(x)}
