"""The offline face: loads what is there, generates in order, and runs every learned drafter from its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import test_heads
import torch

import minispec.verify as verify_module
from minispec import LLM, RequestError, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("dummy")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_dummy_weights_need_a_config_alone(folder) -> None:
    llm = LLM(folder, load_format="dummy", dtype="float32", disable_torch_compile=True)
    one, two = llm.generate(["hello", [1, 2, 3]], GREEDY)
    assert len(one["output_ids"]) == len(two["output_ids"]) == 12 and one["meta_info"]["prompt_tokens"] == 5
    assert llm.generate([1, 2, 3], GREEDY)["output_ids"] == two["output_ids"]
    assert len(llm.generate(list(range(200)))["output_ids"]) == 56  # the default limit shrinks to the room
    with pytest.raises(RequestError):
        llm.generate([1, 2], SamplingParams(max_new_tokens=500))
    with pytest.raises(ValueError, match="tokenizer"):
        LLM(folder, load_format="dummy", tokenizer_path=str(folder))


def test_the_same_seed_in_another_place_gives_the_same_weights(folder) -> None:
    outputs = [
        LLM(folder, load_format="dummy", dtype="float32", disable_torch_compile=True, speculative_algorithm=name)
        .generate([5, 6, 5, 6, 5], GREEDY)["output_ids"]
        for name in ("none", "ngram")
    ]  # fmt: skip
    assert outputs[0] == outputs[1]


FORMATS = [
    (test_heads.eagle_original, "EAGLE"),
    (test_heads.eagle3_specforge, "EAGLE3"),
    (test_heads.eagle3_official, "EAGLE"),  # switches over
    (test_heads.mtp_alone, "NEXTN"),
]


@pytest.mark.parametrize(("form", "algorithm"), FORMATS, ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 2, 6), (2, 2, 8)], ids=str)
def test_a_published_head_drafts_and_changes_no_token(form, algorithm, shape, tmp_path) -> None:
    target = test_heads.make_target()
    model = tmp_path / "target"
    model.mkdir()
    c = target.config
    config = {
        **CONFIG, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "vocab_size": c.vocab_size,
        "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "tie_word_embeddings": c.tied,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    head = test_heads.write(tmp_path / "head", form(target))
    steps, topk, nodes = shape
    options = {"load_format": "dummy", "dtype": "float32", "disable_torch_compile": True}
    plain = LLM(model, **options)
    drafting = LLM(
        model, speculative_algorithm=algorithm, speculative_draft_model_path=str(head), speculative_num_steps=steps,
        speculative_eagle_topk=topk, speculative_num_draft_tokens=nodes, **options,
    )  # fmt: skip
    prompts = [[1, 2, 3], list(range(20)), [7] * 9]
    want, got = ([r["output_ids"] for r in llm.generate(prompts, GREEDY)] for llm in (plain, drafting))
    assert want == got and all(want)
    assert drafting.scheduler.engine.drafter.nodes == (4 if topk == 1 else min(nodes, 1 + topk + (steps - 1) * topk**2))
    assert drafting.scheduler.metrics.tree_steps > 0


def test_a_threshold_below_one_is_said_and_reaches_verification(folder, caplog, monkeypatch) -> None:
    options = {"load_format": "dummy", "dtype": "float32", "disable_torch_compile": True}
    options |= {"speculative_algorithm": "NGRAM", "random_seed": 3}
    prompt, params = [5, 6, 7] * 8, SamplingParams(temperature=0.5, max_new_tokens=24, sampling_seed=1)
    calls: list[tuple[float, float]] = []
    inner = verify_module.pick_lossy
    monkeypatch.setattr(verify_module, "pick_lossy", lambda *given: calls.append(given[-2:]) or inner(*given))
    LLM(folder, **options, speculative_accept_threshold_single=1.0).generate(prompt, params)
    assert not calls and "exact" not in caplog.text
    LLM(folder, **options, speculative_accept_threshold_acc=0.25).generate(prompt, params)
    assert set(calls) == {(1.0, 0.25)}
    assert "--speculative-accept-threshold-single 1, -acc 0.25: sampled output is no longer exact" in caplog.text


def test_a_head_that_is_missing_or_does_not_fit_names_the_flag(folder, tmp_path) -> None:
    options = {"load_format": "dummy", "dtype": "float32", "disable_torch_compile": True}
    with pytest.raises(ValueError, match="--speculative-draft-model-path"):
        LLM(folder, speculative_algorithm="EAGLE3", **options)
    head = test_heads.write(tmp_path / "head", test_heads.eagle3_official(test_heads.make_target()))
    with pytest.raises(ValueError, match="--speculative-draft-model-path"):
        LLM(folder, speculative_algorithm="EAGLE3", speculative_draft_model_path=str(head), **options)


def test_a_token_map_limits_what_is_drafted_not_what_is_said(tmp_path) -> None:
    from minispec.vocab import read_token_map

    ids = [9, 4, 250]
    (tmp_path / "map.json").write_text(json.dumps(ids))
    torch.save(torch.tensor(ids), tmp_path / "map.pt")
    torch.save(ids, tmp_path / "list.pt")
    for name in ("map.json", "map.pt", "list.pt"):
        assert read_token_map(tmp_path / name, 300).tolist() == ids
    for bad in ([1, 1], [-1], [300], [], ["a"]):
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        with pytest.raises(ValueError, match="--speculative-token-map"):
            read_token_map(tmp_path / "bad.json", 300)
