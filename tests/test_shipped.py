"""The heads that ship with the package: they are found without a path, complete, small, and for the default model.

What they draft and how much of it is accepted is tested through the server, in tests/test_served.py.
"""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from minispec.config import HEADS, SHIPPED, Config
from minispec.load.token_map import read_token_map
from minispec.load.tree_shape import tree_shape

MEGABYTE = 10**6


@pytest.mark.parametrize("algorithm", SHIPPED)
def test_an_algorithm_without_a_path_takes_its_shipped_head(algorithm: str) -> None:
    config = Config(speculative_algorithm=algorithm)
    assert config.draft_path == str(HEADS / SHIPPED[algorithm])
    assert Config(model_path="x", speculative_algorithm=algorithm).draft_path is None
    named = Config(speculative_algorithm=algorithm, speculative_draft_model_path="y")
    assert named.draft_path == "y" and named.token_map is None


def test_the_default_model_drafts_with_eagle3_and_its_vocabulary_maps_come_along() -> None:
    assert Config().algorithm == "EAGLE3" and Config().token_map is None
    for algorithm in ("EAGLE", "NEXTN"):
        config = Config(speculative_algorithm=algorithm)
        ids = read_token_map(HEADS / "token_map.safetensors", 49152)
        assert config.token_map == str(HEADS / "token_map.safetensors") and len(ids) == 8192
        assert Config(speculative_algorithm=algorithm, speculative_token_map="none").token_map is None
        assert Config(speculative_algorithm=algorithm, speculative_token_map="z").token_map == "z"


def test_on_a_cpu_heads_that_ship_draft_in_the_shape_measured_fastest() -> None:
    shape = lambda on_cpu=True, **flags: tree_shape(Config(**flags), "LlamaForCausalLM", on_cpu)  # noqa: E731
    assert shape() == shape(speculative_algorithm="NEXTN") == (3, 4, 8) and shape(on_cpu=False) == (5, 4, 8)
    assert shape(speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4) == (3, 1, 4)
    assert shape(speculative_algorithm="STANDALONE") == (3, 1, 4)
    for other in ({"model_path": "x"}, {}):
        assert shape(speculative_algorithm="EAGLE", speculative_draft_model_path="y", **other) == (5, 4, 8)


@pytest.mark.parametrize("name", sorted(set(SHIPPED.values())))
def test_a_shipped_head_says_where_it_comes_from(name: str) -> None:
    folder = HEADS / name
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert config["vocab_size"] == 49152 and all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())
    page = (folder / "README.md").read_text()
    for word in ("python -m minispec.train", "Apache-2.0", "accept", "bfcl-eval", "templates"):
        assert word in page.lower() or word in page, f"{folder.name}/README.md does not speak of {word}"


def test_heads_and_repository_stay_small() -> None:
    files = [path for path in HEADS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 50 * MEGABYTE
    assert (HEADS / "standalone" / "model.safetensors").stat().st_size < 14 * MEGABYTE
