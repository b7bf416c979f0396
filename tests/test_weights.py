"""Finding, reading and loading model folders: both spellings, every file layout, and folders broken in every way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from minispec.load import weights
from minispec.load.tokenizer import eos_token_ids
from minispec.load.weights import load_weights, read_config, read_tensors, resolve_file, resolve_model
from minispec.model_config import ModelError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor([7, 8])}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _write_config(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _same(read: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return set(read) == set(wanted) and all(
        read[k].dtype == wanted[k].dtype and torch.equal(read[k], wanted[k]) for k in wanted
    )


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of every tensor read from a safetensors file from now on."""
    names: list[str] = []

    class Counted:
        def __init__(self, *place: Any, **how: Any) -> None:
            self.file = safe_open(*place, **how)

        def __enter__(self) -> Counted:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_tensor(self, name: str) -> Tensor:
            names.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(weights, "safe_open", Counted)
    return names


def _message(call: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# resolve_model


def hub_snapshot(hub: Path, name: str, files: Mapping[str, str] = {}) -> Path:
    """Lay out a hub cache by hand, as a download would have; returns the snapshot's folder."""
    repo = hub / ("models--" + name.replace("/", "--"))
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for file, content in files.items():
        (snapshot / file).write_text(content)
    return snapshot


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_existing_folder_is_the_model_and_takes_no_revision(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), None) == tmp_path
    assert "--revision main" in _message(lambda: resolve_model(str(tmp_path), "main"))


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model", None) == tmp_path / "model"


def test_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    assert "is a file" in _message(lambda: resolve_model(str(tmp_path / "model.gguf"), None))


def test_id_is_found_in_the_cache_that_the_environment_names_without_network(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "hub", "org/name", {"config.json": "{}", "model.safetensors": ""})
    asked = [None, "main", COMMIT]
    code = f"from minispec.load.weights import resolve_model as r; print(*(r('org/name', v) for v in {asked}))"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [str(snapshot)] * 3, done.stderr


def test_absent_id_offline_is_one_sentence_with_id_cache_and_way_out(offline_hub: Path) -> None:
    message = _message(lambda: resolve_model("org/absent", None))
    for part in ("org/absent", str(offline_hub), "HF_HUB_OFFLINE", "path of their folder"):
        assert part in message


def test_absent_revision_is_named(offline_hub: Path) -> None:
    hub_snapshot(offline_hub, "org/name", {"config.json": "{}", "model.safetensors": ""})
    assert "'v2'" in _message(lambda: resolve_model("org/name", "v2"))


def test_a_cache_of_ones_own_is_looked_in_and_named_instead_of_the_hubs(offline_hub: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    snapshot = hub_snapshot(mine, "org/name", {"config.json": "{}", "model.safetensors": "", "freq.pt": ""})
    assert resolve_model("org/name", cache=str(mine)) == snapshot
    assert resolve_file("org/name/freq.pt", str(mine)) == snapshot / "freq.pt"
    for absent in (lambda: resolve_model("org/absent", cache=str(mine)), lambda: resolve_file("org/name/x", str(mine))):
        message = _message(absent)
        assert str(mine) in message and str(offline_hub) not in message


def test_misspelt_path_is_one_sentence(offline_hub: Path) -> None:
    assert "./no/such/folder" in _message(lambda: resolve_model("./no/such/folder", None))


def test_a_file_is_found_here_or_in_the_cache_by_owner_repo_and_name(offline_hub: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("[1]")
    assert resolve_file(str(tmp_path / "map.json")) == tmp_path / "map.json"
    snapshot = hub_snapshot(offline_hub, "org/name", {"freq.pt": ""})
    assert resolve_file("org/name/freq.pt") == snapshot / "freq.pt"


@pytest.mark.parametrize(
    ("name", "said"),
    [("org/name/other.pt", "has no 'other.pt' in org/name"), ("org/absent/freq.pt", "HF_HUB_OFFLINE is set"),
     ("freq.pt", "neither a file nor owner/repo/file"), ("/no/such/freq.pt", "neither a file nor owner/repo/file")],
)  # fmt: skip
def test_an_absent_file_offline_is_one_sentence(name: str, said: str, offline_hub: Path) -> None:
    hub_snapshot(offline_hub, "org/name", {"freq.pt": ""})
    assert said in _message(lambda: resolve_file(name))


def test_pickles_are_asked_for_only_where_there_are_no_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("minispec.load.weights.snapshot_download", snapshot)
    resolve_model("org/name", None)
    assert len(asked) == 2 and "*.bin" not in asked[0] and "*.bin" in asked[1]
    (tmp_path / "model.safetensors").write_text("")
    asked.clear()
    resolve_model("org/name", None)
    assert len(asked) == 1 and "*.bin" not in asked[0]


# ---------------------------------------------------------------------------------------------------------------------
# read_config


def test_plain_rotation_has_no_scaling_in_any_spelling(tmp_path: Path) -> None:
    plain: list[dict[str, Any]] = [
        {"rope_theta": 7.0},
        {"rope_theta": 7.0, "rope_scaling": None},
        {"rope_theta": 7.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 7, "rope_type": "default"}},
        {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}},
    ]
    for given in plain:
        wanted = {"rope_theta": 7.0, "rope_scaling": None, "torch_dtype": None}
        assert read_config(_write_config(tmp_path, **given)) == wanted, given


def test_old_name_of_the_scaling_type_and_of_a_dtype_are_understood(tmp_path: Path) -> None:
    given = {"rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "torch.float16"}
    config = read_config(_write_config(tmp_path, **given))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert config["rope_theta"] is None and config["torch_dtype"] == "float16"  # the architecture's default


def test_rope_per_layer_type_is_refused_rather_than_misread(tmp_path: Path) -> None:
    _write_config(tmp_path, rope_parameters={"full_attention": {"rope_theta": 1e6}})
    assert "rope_parameters" in _message(lambda: read_config(tmp_path))


def test_unreadable_config_names_the_file(tmp_path: Path) -> None:
    assert "no config.json" in _message(lambda: read_config(tmp_path))
    for text in ("{", "[1]", "[" * 100000):
        (tmp_path / "config.json").write_text(text)
        assert str(tmp_path / "config.json") in _message(lambda: read_config(tmp_path))


# ---------------------------------------------------------------------------------------------------------------------
# eos_token_ids


class _FakeTokenizer:
    def __init__(self, eos_ids: set[int], vocabulary: dict[str, int]) -> None:
        self.eos_ids, self.vocabulary = frozenset(eos_ids), vocabulary

    def token_id(self, token: str) -> int | None:
        return self.vocabulary.get(token)


def test_eos_is_the_union_of_all_sources(tmp_path: Path) -> None:
    plain, eom = _FakeTokenizer({3}, {}), _FakeTokenizer({3}, {"<|eom_id|>": 9})
    assert eos_token_ids(tmp_path, {}, plain) == {3}
    assert eos_token_ids(tmp_path, {"eos_token_id": None}, eom) == {3, 9}
    for ids in ([1, 2], 1):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        wanted = {1, 2} if isinstance(ids, list) else {1}
        assert eos_token_ids(tmp_path, {"eos_token_id": [4, 5]}, plain) == wanted | {3, 4, 5}


# ---------------------------------------------------------------------------------------------------------------------
# read_tensors


def _write_shards(folder: Path, suffix: str, save: Callable[[dict[str, Tensor], Path], object]) -> None:
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    first, second = f"{stem}-00001-of-00002.{suffix}", f"{stem}-00002-of-00002.{suffix}"
    save({"a": TENSORS["a"], "b": TENSORS["b"]}, folder / first)
    save({"c": TENSORS["c"]}, folder / second)
    index = {"metadata": {}, "weight_map": {"a": first, "b": first, "c": second}}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def test_every_layout_yields_the_same_tensors(tmp_path: Path) -> None:
    layouts: dict[str, Callable[[Path], object]] = {
        "single": lambda f: save_file(TENSORS, f / "model.safetensors"),
        "other name": lambda f: save_file(TENSORS, f / "weights.safetensors"),
        "sharded": lambda f: _write_shards(f, "safetensors", save_file),
        "pickle": lambda f: torch.save(TENSORS, f / "pytorch_model.bin"),
        "old pickle": lambda f: torch.save(TENSORS, f / "pytorch_model.bin", _use_new_zipfile_serialization=False),
        "pt": lambda f: torch.save(TENSORS, f / "head.pt"),
        "sharded pickle": lambda f: _write_shards(f, "bin", torch.save),
    }
    for name, write in layouts.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder)
        torch.save({"no": "weights"}, folder / "training_args.bin")
        assert _same(dict(read_tensors(folder, "auto")), TENSORS), name


def test_auto_prefers_safetensors_and_each_format_can_be_asked_for(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    values = {form: dict(read_tensors(tmp_path, form))["x"].item() for form in ("auto", "safetensors", "pt")}
    assert values == {"auto": 0.0, "safetensors": 0.0, "pt": 1.0}


def test_missing_shard_is_named_before_anything_is_read(tmp_path: Path) -> None:
    for suffix, save in (("safetensors", save_file), ("bin", torch.save)):
        _write_shards(tmp_path, suffix, save)
        shard = next(tmp_path.glob(f"*00002-of-00002.{suffix}"))
        shard.unlink()
        form = "pt" if suffix == "bin" else "auto"
        assert shard.name in _message(lambda form=form: read_tensors(tmp_path, form))


def test_shard_without_a_listed_tensor_is_an_error(tmp_path: Path) -> None:
    _write_shards(tmp_path, "safetensors", save_file)
    save_file({"d": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
    assert "index lists: c" in _message(lambda: dict(read_tensors(tmp_path, "auto")))


def test_index_cannot_point_outside_of_the_folder(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    save_file(TENSORS, tmp_path / "secret.safetensors")
    for shard in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
        assert "outside" in _message(lambda: read_tensors(inside, "auto"))


def test_folder_without_weights_and_broken_files_are_named(tmp_path: Path) -> None:
    assert str(tmp_path) in _message(lambda: read_tensors(tmp_path, "auto"))
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        assert name in _message(lambda: dict(read_tensors(tmp_path, "auto")))


def test_names_come_plain_and_rotary_frequencies_not_at_all(tmp_path: Path) -> None:
    given = {f"model.{name}": tensor for name, tensor in TENSORS.items()}
    save_file({**given, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    assert _same(dict(read_tensors(tmp_path)), TENSORS)


def test_tensor_given_twice_is_an_error(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    save_file({"a": torch.zeros(1), "model.a": torch.ones(1)}, one / "model.safetensors")
    for name in ("first", "second"):  # no index says which of them counts
        save_file({"a": torch.zeros(1)}, two / f"{name}.safetensors")
    assert f"{one} holds a twice" in _message(lambda: list(read_tensors(one)))
    assert f"{two} holds a twice" in _message(lambda: list(read_tensors(two)))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_tensor_that_is_not_wanted_is_not_read(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_shards(tmp_path, suffix, save_file if suffix == "safetensors" else torch.save)
    touched = reads(monkeypatch)
    assert _same(dict(read_tensors(tmp_path, wanted=lambda name: name == "c")), {"c": TENSORS["c"]})
    assert touched == (["c"] if suffix == "safetensors" else [])  # a pickle is mapped as a whole


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_malicious_pickle_is_refused_and_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    for zipped in (True, False):
        torch.save({"a": _Evil(marker)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        assert "refused" in _message(lambda: dict(read_tensors(tmp_path, "auto")))
        assert not marker.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert marker.exists()  # the trap works: only the reader's refusal kept it from closing


def test_pickle_of_something_else_than_named_dense_tensors_is_refused(tmp_path: Path) -> None:
    for content in ([torch.ones(1)], {"a": 1}, {"model": {"a": torch.ones(1)}}, {"a": torch.eye(2).to_sparse()}):
        torch.save(content, tmp_path / "pytorch_model.bin")
        assert "tensors" in _message(lambda: dict(read_tensors(tmp_path, "auto")))


def test_code_in_a_model_folder_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "executed"
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for module in ("modeling_evil", "configuration_evil"):
        (folder / f"{module}.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Evil: pass\n")
    auto_map = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    _write_config(folder, auto_map=auto_map, model_type="evil", architectures=["Evil"])
    save_file(TENSORS, folder / "model.safetensors")
    assert read_config(folder)["model_type"] == "evil"
    assert _same(dict(read_tensors(folder, "auto")), TENSORS)
    assert not marker.exists() and not any(name.endswith("_evil") for name in sys.modules)


# ---------------------------------------------------------------------------------------------------------------------
# load_weights


def _named() -> dict[str, Tensor]:
    """Return a module's weights by name, as `published_tensors` does: views of one storage among them."""
    joined = torch.zeros(6, 4)
    return {"q": joined[:4], "k": joined[4:], "norm": torch.zeros(2, dtype=torch.bfloat16)}


def _state() -> dict[str, Tensor]:
    return {"q": torch.randn(4, 4), "k": torch.randn(2, 4), "norm": torch.tensor([1.0, 2.0])}


def test_weights_are_copied_into_the_same_storage_and_cast() -> None:
    named, state = _named(), _state()
    joined = named["q"]._base
    load_weights(named, state.items())
    assert torch.equal(joined, torch.cat([state["q"], state["k"]]))
    assert named["norm"].dtype == torch.bfloat16 and torch.equal(named["norm"].float(), state["norm"])


def test_every_misfit_is_named_in_one_error() -> None:
    state = _state()
    del state["q"]
    state["norm"] = torch.zeros(3)
    state["k_scale"] = torch.zeros(1)
    message = _message(lambda: load_weights(_named(), state.items()))
    assert message.endswith("missing tensors: q; unknown tensors: k_scale; wrong shapes: norm [3] for [2]")


def test_long_lists_show_the_first_few_and_the_count() -> None:
    tensors = [(f"extra{i}", torch.zeros(1)) for i in range(40)]
    message = _message(lambda: load_weights(_named(), [*_state().items(), *tensors]))
    assert "extra7" in message and "extra8" not in message and "40 in all" in message
