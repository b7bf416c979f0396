"""The self-test warns of heads that are right in one reading only, and written to disk with another.

Such a head needs no training. With its attention and MLP set to zero it is one matrix between the target's streams and
an LM head, and the text is so short that such a matrix can predict all of it.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import VOCAB, build, reference, request, run, tiny_model
from safetensors.torch import save_file
from torch import Tensor
from trained import BLOCK, DRAFT_IDS, sentence, trained_dflash, trained_model

from minispec.attention import Causal
from minispec.beam import BeamDrafter
from minispec.dflash import DFlashDrafter
from minispec.load.dflash_heads import read_dflash
from minispec.load.heads import load_head
from minispec.load.selftest import STEPS, self_test
from minispec.scheduler import Scheduler
from minispec.train.export import export

WIDTH, HEADS, KV_HEADS, SIZE, INNER, LAYERS = 72, 9, 3, 8, 96, 3
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
MODEL = tiny_model()
with torch.inference_mode():
    MODEL.norm.weight.copy_(torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)))
    for index, block in enumerate(MODEL.layers):  # what a layer adds hides what entered it: neighbours are unlike
        block.down_proj.weight.mul_(8 ** (index + 1))


def text() -> list[int]:
    """Return the prompt and its greedy continuation, as far as a head is to know it."""
    wish = request("a", PROMPT, max_new_tokens=45)
    wish.max_new_tokens = 45
    return PROMPT + reference(MODEL, wish)


@torch.inference_mode()
def by_heart(taps: tuple[int | str, ...], rows: Tensor) -> Tensor:
    """Return the matrix [d, F] from streams at position i to the row of `rows` [V, d] of the text's token i + 2."""
    ids = torch.tensor([text()])
    _, features = MODEL(ids, torch.arange(ids.shape[1])[None], Causal(), taps)
    known, wanted = features[0, :-2].double(), rows[ids[0, 2:]].double()
    return torch.linalg.lstsq(known, wanted, driver="gelsd").solution.T.float()


def layer(prefix: str, inputs: int) -> dict[str, Tensor]:
    """Return a decoder layer's tensors that add nothing to the residual stream."""
    rows = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
    return {
        **{f"{prefix}self_attn.{name}_proj.weight": torch.randn(count, inputs) for name, count in rows.items()},
        f"{prefix}self_attn.o_proj.weight": torch.zeros(WIDTH, HEADS * SIZE),
        f"{prefix}mlp.gate_proj.weight": torch.randn(INNER, WIDTH),
        f"{prefix}mlp.up_proj.weight": torch.randn(INNER, WIDTH),
        f"{prefix}mlp.down_proj.weight": torch.zeros(WIDTH, INNER),
        f"{prefix}post_attention_layernorm.weight": torch.ones(WIDTH),
    }


def eagle3(signs: Tensor, **more: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return an EAGLE-3 head for the streams entering layers 1 and 2; `signs` is the scale of its norm of the state."""
    own = torch.randn(VOCAB, WIDTH)
    tensors = {
        "fc.weight": by_heart((1, 2), own),
        **layer("midlayer.", 2 * WIDTH),
        "midlayer.input_layernorm.weight": torch.ones(WIDTH),
        "midlayer.hidden_norm.weight": signs,
        "norm.weight": torch.ones(WIDTH),
        "lm_head.weight": own * signs,
    }
    return {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB, **more}, tensors


def eagle2() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return an EAGLE-2 head for the last hidden state before the final norm."""
    matrix = by_heart((LAYERS,), MODEL.lm_head.weight)
    tensors = {"fc.weight": torch.cat([torch.zeros(WIDTH, WIDTH), matrix], 1), **layer("layers.0.", WIDTH)}
    return {"architectures": ["LlamaForCausalLMEagle"]}, tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a draft folder."""
    folder.mkdir(exist_ok=True)
    shape = {
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**shape, **config}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@torch.inference_mode()
def served(folder: Path) -> Scheduler:
    """Put a scheduler together around the head in a folder."""
    head = load_head(folder, MODEL)
    return build(MODEL, BeamDrafter(head, rounds=3, topk=1, nodes=4), running=2)


def said(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Return what the self-test says of the head in a folder, and check that it leaves nothing behind."""
    scheduler = served(folder)
    free = list(scheduler.kv.free)
    caplog.clear()
    with caplog.at_level(logging.INFO, "minispec"):
        self_test(scheduler.engine, scheduler.engine.drafter, PROMPT)
    lines = [r.getMessage() for r in caplog.records if "self-test" in r.getMessage()]
    assert len(lines) == 1 and "\n" not in lines[0]
    assert scheduler.kv.free == free and not scheduler.engine.lens.any() and not scheduler.kv.table.any()
    assert scheduler.cache.count == scheduler.metrics.verified.steps.total() == 0
    after = request("b", [*PROMPT, 7], max_new_tokens=6)
    run(scheduler, [after])
    assert after.cached_tokens == 0 and after.output_ids == reference(MODEL, after)
    return lines[0]


SIGNS = 1.0 - 2.0 * (torch.arange(WIDTH) % 2)
RIGHT, KEY = [1, 2], "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("wrong", "mended"),
    [
        ({KEY: [0, 1]}, {KEY: RIGHT}),
        ({"eagle_config": {KEY: [-1, 0]}}, {KEY: RIGHT}),
        ({KEY: RIGHT, "norm_before_residual": False}, {"norm_before_residual": True}),
    ],
    ids=str,
)
def test_an_eagle3_head_that_is_read_wrongly_is_warned_of_and_one_read_rightly_is_not(
    wrong, mended, tmp_path, caplog
) -> None:
    torch.manual_seed(2)
    config, tensors = eagle3(SIGNS, norm_before_residual=True)
    line = said(write(tmp_path, {**config, **wrong}, tensors), caplog)
    assert KEY in line and "norm_before_residual" in line and "accept length 1.0" in line
    config = {name: value for name, value in {**config, **wrong, **mended}.items() if name != "eagle_config"}
    line = said(write(tmp_path, config, tensors), caplog)
    assert float(line.split("accept length ")[1].split()[0]) > 1.5 and KEY not in line


def test_features_on_the_wrong_side_of_the_final_norm_are_warned_of(tmp_path, caplog) -> None:
    torch.manual_seed(3)
    config, tensors = eagle2()
    assert KEY in said(write(tmp_path, config, tensors), caplog)
    line = said(write(tmp_path, {**config, KEY: [LAYERS]}, tensors), caplog)
    assert float(line.split("accept length ")[1].split()[0]) > 1.5 and KEY not in line


def test_a_head_that_was_not_made_for_the_target_is_warned_of(tmp_path, caplog) -> None:
    torch.manual_seed(4)
    config, tensors = eagle3(SIGNS, norm_before_residual=True, **{KEY: RIGHT})
    tensors["lm_head.weight"] = torch.randn(VOCAB, WIDTH)
    assert "--speculative-draft-model-path" in said(write(tmp_path, config, tensors), caplog)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({}, []),
        ({"target_layer_ids": [0]}, ["one later the accept length is"]),
        (None, ["target_layer_ids, which number the layers from 0"]),  # a network of which nothing is accepted
    ],
    ids=str,
)
def test_a_dflash_network_that_reads_the_layer_before_is_warned_of(written, said, tmp_path, caplog) -> None:
    export(trained_dflash((2,)), trained_model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"] |= written or {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        network = load_head(tmp_path, trained_model(), token_map=DRAFT_IDS, read=read_dflash)
        network.norm.weight.mul_(-1 if written is None else 1)
        drafter = DFlashDrafter(network, block=BLOCK, nodes=BLOCK)
        scheduler = build(trained_model(), drafter, running=2)
    with caplog.at_level(logging.WARNING, "minispec"):
        self_test(scheduler.engine, drafter, sentence(20, random.Random(5)))
    lines = [record.getMessage() for record in caplog.records if record.name == "minispec"]
    assert len(lines) == len(said) and all(part in line for part, line in zip(said, lines, strict=True)), lines
    assert drafter.taps == network.taps and not scheduler.kv.table.any()


def test_without_room_nothing_is_tested(tmp_path, caplog) -> None:
    torch.manual_seed(2)
    folder = write(tmp_path, *eagle3(SIGNS, norm_before_residual=True, **{KEY: RIGHT}))
    scheduler = served(folder)
    scheduler.kv.free[:] = scheduler.kv.free[: STEPS // 16]
    free = list(scheduler.kv.free)
    with caplog.at_level(logging.INFO, "minispec"):
        caplog.clear()
        self_test(scheduler.engine, scheduler.engine.drafter, PROMPT)
    assert scheduler.kv.free == free and "self-test" not in caplog.text
