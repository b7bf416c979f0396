"""The start-up self-test: is the draft head accepted at all?

A head that is read wrongly changes no output; only the speed suffers, and nobody knows why. So a few steps are drafted
and verified before the first request. A head that is hardly ever accepted gets a warning that names the keys of
config.json to look at.

A DFlash network that reads a layer too early or too late is still accepted, only less, since the streams of neighbours
are alike. So it is tried with each of its layers one earlier and one later as well.

Read next: `heads.py`, where config.json becomes a reading; EAGLE-3 (arXiv 2503.01840) for what a head reads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from minispec.attention import QUERY_BLOCK
from minispec.buffers import Chunk
from minispec.drafter import NOTHING, Drafter
from minispec.engine import Engine
from minispec.request import Request, SamplingParams

logger = logging.getLogger("minispec")

PROMPT = (
    "Question: What do trees need to grow, and why do their leaves fall in autumn?\n"
    "Answer: Trees need light, water and air. Their leaves"
)
STEPS = 24  # verify steps of the test
HOPELESS_LENGTH = 1.05  # a head with an accept length below this is read wrongly, or not made for this target
BETTER = 1.15  # by this factor another reading must be accepted better before it is spoken of
KEYS = {  # of config.json, which decide how a network of this name is read
    "dflash": "dflash_config's target_layer_ids, which number the layers from 0 and mean their outputs (speculators' "
    "aux_hidden_state_layer_ids mean their inputs), mask_token_id, is_causal",
}
KEYS["dspark"] = f"{KEYS['dflash']}, sample_from_anchor"
OTHER_KEYS = "eagle_aux_hidden_state_layer_ids, norm_before_residual"  # of all other heads


@torch.inference_mode()
def self_test(engine: Engine, drafter: Drafter, prompt: Sequence[int]) -> None:
    """Draft and verify a few steps after `prompt` and log the accept length, as a warning if it is about 1.

    For an idle engine after warm-up; pages, slots and counters are left as they were. If the context or the pool is too
    small for the text, nothing is tested.
    """
    length = _serve(engine, drafter, prompt[:QUERY_BLOCK])
    if length is None:
        return
    said = f"self-test of the draft head: accept length {length:.2f} over {STEPS} steps"
    if drafter.name in KEYS and not engine.graphs:  # captured steps read the layers that they were captured with
        _compare_layers(engine, drafter, prompt[:QUERY_BLOCK], length)
    if length >= HOPELESS_LENGTH:
        logger.info("%s", said)
        return
    logger.warning("%s: its config.json may state other layers or norms than it was trained with (%s), or it was not "
                   "made for this target; see --speculative-draft-model-path", said,
                   KEYS.get(drafter.name, OTHER_KEYS))  # fmt: skip


def _compare_layers(engine: Engine, drafter: Drafter, prompt: Sequence[int], length: float) -> None:
    """Log a warning if the drafter is accepted better when it reads other layers; length: as it is."""
    taps, layers = drafter.taps, engine.model.config.layers
    for shift, where in ((-1, "earlier"), (1, "later")):
        moved = tuple(tap + shift for tap in taps if isinstance(tap, int))
        if not all(0 <= tap < layers for tap in moved):
            continue
        drafter.taps = moved
        try:
            other = _serve(engine, drafter, prompt)
        finally:
            drafter.taps = taps
        if other is not None and other > BETTER * length:
            logger.warning("self-test of the draft head: with every layer of target_layer_ids one %s the accept length "
                           "is %.2f, and %.2f as they are: its ids should number layers from 0 and mean "
                           "their outputs", where, other, length)  # fmt: skip


def _serve(engine: Engine, drafter: Drafter, prompt: Sequence[int]) -> float | None:
    """Return the accept length of a greedy continuation of the prompt; None where there is no room for it."""
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
        known, trees = len(text), max(engine.sizes.shapes_of(engine.batch_of(1)))
        for _ in range(STEPS):
            drafts = [NOTHING] if engine.drafter.has_lookups else engine.host_drafts([slot])
            text += engine.collect(engine.launch([slot], trees, drafts))[0]
    finally:
        engine.release(slot)
        kv.unmap(slot)
        kv.give_back(taken[::-1])
    return (len(text) - known) / STEPS
