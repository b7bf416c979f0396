"""The offline interface: `LLM` loads published folders, generates in order, and runs learned drafters from files."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import test_heads
import torch
from test_weights import hub_snapshot

import minispec.verify as verify_module
from minispec import LLM, SamplingParams
from minispec.config import Config
from minispec.engine import Engine
from minispec.load.build import dtype_line
from minispec.load.drafters import make_drafter
from minispec.load.tokenizer import byte_tokenizer
from minispec.model import Model
from minispec.request import RequestError
from minispec.serve.info import stats_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)
DUMMY = {"load_format": "dummy", "dtype": "float32", "disable_torch_compile": True}
OPTIONS = {**DUMMY, "speculative_adaptive": False}  # trees at every step: whether they pay here is of no interest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("dummy")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_dummy_weights_need_a_config_alone(folder) -> None:
    llm = LLM(folder, **DUMMY)
    one, two = llm.generate(["hello", [1, 2, 3]], GREEDY)
    assert len(one["output_ids"]) == len(two["output_ids"]) == 12 and one["meta_info"]["prompt_tokens"] == 5
    assert llm.generate([1, 2, 3], GREEDY)["output_ids"] == two["output_ids"]
    assert len(llm.generate(list(range(200)))["output_ids"]) == 56  # the default limit shrinks to the room
    assert len(llm.generate([1, 2], SamplingParams(max_new_tokens=500))["output_ids"]) == 254, "clamped to the context"
    with pytest.raises(ValueError, match="tokenizer"):
        LLM(folder, load_format="dummy", tokenizer_path=str(folder))


def test_what_is_done_in_place_of_an_option_is_said_once(folder, caplog) -> None:
    llm = LLM(folder, load_format="dummy", page_size=1, speculative_num_steps=3, disable_torch_compile=True)
    assert llm.scheduler.kv.page_size == 16
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [line.split()[0] for line in said] == ["--page-size", "--speculative-num-steps"]


def test_the_same_seed_in_another_place_gives_the_same_weights(folder) -> None:
    outputs = [
        LLM(folder, speculative_algorithm=name, **DUMMY).generate([5, 6, 5, 6, 5], GREEDY)["output_ids"]
        for name in ("none", "ngram")
    ]
    assert outputs[0] == outputs[1]


FORMATS = [
    (test_heads.eagle_original, "EAGLE"),
    (test_heads.eagle3_specforge, "EAGLE3"),
    (test_heads.eagle3_official, "EAGLE"),  # switches over
    (test_heads.mtp_alone, "NEXTN"),
]


def config_of(target: Model, folder: Path) -> Path:
    """Write a folder whose config.json describes a model of the target's sizes."""
    folder.mkdir()
    c = target.config
    config = {
        **CONFIG, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "vocab_size": c.vocab_size,
        "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "tie_word_embeddings": c.tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SHAPES = [(3, 1, 6), (3, 2, 6), (2, 2, 8), (3, 2, 6)]  # a chain has 4 nodes, the third 7


@pytest.mark.parametrize(
    ("form", "algorithm", "shape"),
    [(*form, shape) for form, shape in zip(FORMATS, SHAPES, strict=True)],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_a_published_head_drafts_and_changes_no_token(form, algorithm, shape, tmp_path, caplog) -> None:
    target = test_heads.make_target()
    model = config_of(target, tmp_path / "target")
    head = test_heads.write(tmp_path / "head", form(target))
    steps, topk, nodes = shape
    caplog.set_level(logging.INFO, "minispec")
    plain = LLM(model, **DUMMY)
    drafting = LLM(
        model, speculative_algorithm=algorithm, speculative_draft_model_path=str(head), speculative_num_steps=steps,
        speculative_eagle_topk=topk, speculative_num_draft_tokens=nodes, **DUMMY,
    )  # fmt: skip
    prompts = [[1, 2, 3], list(range(20)), [7] * 9]
    want, got = ([r["output_ids"] for r in llm.generate(prompts, GREEDY)] for llm in (plain, drafting))
    assert want == got and all(want)
    assert drafting.scheduler.engine.drafter.nodes == (4 if topk == 1 else min(nodes, 1 + topk + (steps - 1) * topk**2))
    assert stats_of(drafting.scheduler)["tree_steps"] > 0
    switched = form is test_heads.eagle3_official or algorithm == "NEXTN"
    assert ("is of kind" in caplog.text) == switched
    has = drafting.scheduler.engine.drafter.nodes
    assert (f"--speculative-num-draft-tokens {nodes} becomes {has}" in caplog.text) == (nodes != has)


def test_a_threshold_below_one_is_said_and_reaches_verification(folder, caplog, monkeypatch) -> None:
    options = {**OPTIONS, "speculative_algorithm": "NGRAM", "random_seed": 3}
    prompt, params = [5, 6, 7] * 8, SamplingParams(temperature=0.5, max_new_tokens=24, sampling_seed=1)
    calls: list[tuple[float, float]] = []
    inner = verify_module.pick_lossy
    monkeypatch.setattr(verify_module, "pick_lossy", lambda *given: calls.append(given[-2:]) or inner(*given))
    LLM(folder, **options, speculative_accept_threshold_single=1.0).generate(prompt, params)
    assert not calls and "exact" not in caplog.text
    LLM(folder, **options, speculative_accept_threshold_acc=0.25).generate(prompt, params)
    assert set(calls) == {(1.0, 0.25)}
    assert "--speculative-accept-threshold-single 1, -acc 0.25: sampled output is no longer exact" in caplog.text


def test_params_may_be_a_mapping_as_sglang_takes_them(folder) -> None:
    llm = LLM(folder, **DUMMY)
    params = SamplingParams(temperature=0.0, max_new_tokens=5)
    both = llm.generate([[1, 2, 3]] * 2, [params, {"temperature": 0, "max_new_tokens": 5}])
    assert both[0]["output_ids"] == both[1]["output_ids"]
    with pytest.raises(RequestError, match="max_new_token must be one of max_new_tokens, min_new_tokens, .*, grammar$"):
        llm.generate([1], {"max_new_token": 5})


def test_what_is_wrong_with_a_head_is_one_line_that_names_a_flag(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    target = test_heads.make_target()
    model = config_of(target, tmp_path / "target")
    eagle = str(test_heads.write(tmp_path / "eagle", test_heads.eagle_original(target)))
    form = test_heads.eagle_original(target)
    form.config["hidden_size"] = 64
    wide = str(test_heads.write(tmp_path / "wide", form))
    (tmp_path / "map.json").write_text("[1, 2]")
    few = {"speculative_token_map": str(tmp_path / "map.json"), "speculative_num_steps": 2,
           "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 4}  # fmt: skip
    for wishes, flag in (
        ({}, "needs --speculative-draft-model-path"),
        ({"speculative_draft_model_path": "org/absent"}, "--speculative-draft-model-path org/absent"),
        ({"speculative_draft_model_path": str(model)}, "--speculative-draft-model-path"),
        ({"speculative_draft_model_path": wide}, "made for a target of hidden_size 64, and the target has 32"),
        ({"speculative_draft_model_path": eagle, "speculative_draft_model_revision": "v2"},
         "--speculative-draft-model-revision v2"),
        ({"speculative_draft_model_path": eagle, "speculative_token_map": "org/absent/map.pt"},
         "--speculative-token-map org/absent/map.pt"),
        ({"speculative_draft_model_path": eagle, **few}, "--speculative-eagle-topk 3"),
    ):  # fmt: skip
        monkeypatch.setattr(Engine, "__init__", lambda *_, **__: pytest.fail("started all the same"))
        with pytest.raises(ValueError, match=flag) as refused:
            LLM(model, speculative_algorithm="EAGLE", **wishes, **OPTIONS)
        assert "\n" not in str(refused.value) and "--speculative-" in str(refused.value)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])  # the head is EAGLE-3 under either name
@pytest.mark.parametrize("name", ["org/absent/map.pt", "absent.json", "twice.json"])
def test_a_bad_token_map_does_not_stop_a_head_that_ignores_it(algorithm, name, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    Path("twice.json").write_text("[1, 1]")
    target = test_heads.make_target()
    model = config_of(target, tmp_path / "target")
    head = test_heads.write(tmp_path / "head", test_heads.eagle3_official(target))
    options = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head), **OPTIONS}
    llm = LLM(model, speculative_token_map=name, **options)
    assert llm.generate([1, 2, 3], GREEDY)["output_ids"] and stats_of(llm.scheduler)["tree_steps"] > 0
    (warning,) = [record.message for record in caplog.records if "--speculative-token-map" in record.message]
    assert name in warning and "ignored" in warning


def test_models_heads_and_maps_of_the_hub_are_looked_for_in_the_download_dir(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    target, at = test_heads.make_target(), tmp_path / "kept"
    kept = {name: hub_snapshot(at, name) for name in ("org/model", "org/draft", "org/maps")}
    config_of(target, kept["org/model"] / "new")
    (kept["org/model"] / "new/config.json").rename(kept["org/model"] / "config.json")
    test_heads.write(kept["org/draft"], test_heads.eagle_original(target))
    torch.save([5, 6, 7, 8], kept["org/maps"] / "freq.pt")
    options = {"speculative_draft_model_path": "org/draft", "speculative_token_map": "org/maps/freq.pt", **OPTIONS}
    llm = LLM("org/model", speculative_algorithm="EAGLE", download_dir=str(at), **options)
    assert llm.folder == kept["org/model"] and llm.scheduler.engine.drafter.network.draft_vocab == 4


@pytest.mark.parametrize(
    ("flags", "pickled"),
    [({}, False), ({"load_format": "pt"}, True), ({"speculative_draft_load_format": "pt"}, True),
     ({"load_format": "pt", "speculative_draft_load_format": "safetensors"}, False), ({"load_format": "dummy"}, False)],
    ids=str,
)  # fmt: skip
def test_the_load_format_reaches_the_draft_unless_it_has_its_own(flags, pickled, tmp_path) -> None:
    target, form = test_heads.make_target(), test_heads.eagle_sglang(test_heads.make_target())
    test_heads.write(tmp_path, replace(form, file="model.safetensors"))
    tensors = {name: torch.full_like(tensor, 7.0) for name, tensor in form.tensors.items()}
    test_heads.write(tmp_path, replace(form, tensors=tensors, file="pytorch_model.bin"))
    config = Config(model_path="x", speculative_algorithm="EAGLE", speculative_draft_model_path=str(tmp_path), **flags)
    head = make_drafter(config, target, tmp_path, byte_tokenizer(test_heads.V)).network
    assert bool((head.fc.weight == 7.0).all()) == pickled


def test_the_line_at_start_says_where_sglang_would_have_taken_float16() -> None:
    auto, half = Config(model_path="x"), Config(model_path="x", dtype="bfloat16")
    for stored in ("float16", "float32"):
        line = dtype_line(auto, stored, torch.bfloat16)
        assert line.startswith("bfloat16 (") and "float16 for a " + stored in line and "--dtype float16" in line
        assert dtype_line(half, stored, torch.bfloat16) == "bfloat16"  # asked for: nothing to say
        assert dtype_line(auto, stored, torch.float32) == "float32"  # a CPU without bfloat16
    assert dtype_line(auto, "bfloat16", torch.bfloat16) == dtype_line(auto, None, torch.bfloat16) == "bfloat16"


def test_a_head_of_few_positions_drafts_on_and_is_named_once(tmp_path, caplog) -> None:
    target = test_heads.make_target()
    model, form = config_of(target, tmp_path / "target"), test_heads.eagle_sglang(target)
    form.config["max_position_embeddings"] = 64
    head = test_heads.write(tmp_path / "head", form)
    caplog.set_level(logging.INFO, "minispec")
    options = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(head), **OPTIONS}
    long = LLM(model, **options).generate([1, 2] * 40, GREEDY)
    assert long["output_ids"] == LLM(model, **OPTIONS).generate([1, 2] * 40, GREEDY)["output_ids"]
    assert caplog.text.count("states 64 positions, the context has 256") == 1
    caplog.clear()
    LLM(model, context_length=64, **options)
    assert "head states" not in caplog.text


def test_the_self_test_runs_where_weights_are_real(tmp_path, monkeypatch) -> None:
    target = test_heads.make_target()
    model, head = config_of(target, tmp_path / "t"), test_heads.write(tmp_path / "h", test_heads.eagle_sglang(target))
    tested = []
    monkeypatch.setattr("minispec.load.build.self_test", lambda engine, drafter, ids: tested.append(ids))
    options = {**OPTIONS, "speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(head)}
    LLM(model, **options)
    assert tested == []
    monkeypatch.setattr("minispec.load.build.load_model", lambda *_: test_heads.make_target())
    monkeypatch.setattr("minispec.load.build.choose_tokenizer", lambda config, folder, size: byte_tokenizer(size))
    LLM(model, **{**options, "load_format": "auto"})
    assert len(tested) == 1 and len(tested[0]) > 20


def test_a_token_map_limits_what_is_drafted_not_what_is_said(tmp_path) -> None:
    from minispec.load.token_map import read_token_map

    ids = [9, 4, 250]
    (tmp_path / "map.json").write_text(json.dumps(ids))
    torch.save(torch.tensor(ids), tmp_path / "map.pt")
    torch.save(ids, tmp_path / "list.pt")
    for name in ("map.json", "map.pt", "list.pt"):
        assert read_token_map(tmp_path / name, 300).tolist() == ids
    wrong = {"stands in it twice": [1, 1], "got -1 to 2": [-1, 2], "got 1 to 300": [1, 300], "1 to 300 integer": [],
             "not readable": ["a"]}  # fmt: skip
    for message, bad in wrong.items():
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=f"--speculative-token-map .*{message}"):
            read_token_map(tmp_path / "bad.json", 300)
