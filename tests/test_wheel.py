"""The package as it is installed: a wheel, built and unpacked elsewhere, has every module and every data file.

A folder that packaging forgets would not be missed by the other tests, since they run in the checkout, where it is. So
here a process that starts in another folder imports and reads what the wheel has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_layers import PACKAGE, ROOT

FILES = sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)

IMPORT_AND_READ = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(root))
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    assert root in pathlib.Path(module.__file__).parents, f"{name} is imported from {module.__file__}"

from safetensors.torch import load_file
from minispec.config import SHIPPED, Config
from minispec.load.token_map import read_token_map
from minispec.load.weights import read_config
from minispec.train.prompts import WORD_FILE, word_lists
for algorithm in SHIPPED:
    config = Config(speculative_algorithm=algorithm)
    folder = pathlib.Path(config.draft_path)
    assert root in folder.parents and read_config(folder)["vocab_size"] == 49152
    assert len(load_file(folder / "model.safetensors")) > 5
    if config.token_map:
        ids = pathlib.Path(config.token_map)
        assert root in ids.parents and len(read_token_map(ids, 49152)) == 8192
assert root in WORD_FILE.parents and len(word_lists()["templates"]) > 400
print("imported", len(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout, built in a copy of it, since setuptools also packs what an older build left behind."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(PACKAGE, copy / "minispec", ignore=shutil.ignore_patterns("__pycache__"))
    stored = {"--build-option": ["--compression=stored"]}  # deflating the heads would take half of the test's time
    build = f"from setuptools.build_meta import build_wheel; build_wheel('out', {stored})"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next((copy / "out").glob("*.whl"))


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("minispec/")}
        expected = {path.relative_to(ROOT).as_posix(): path for path in FILES}
        assert sorted(set(expected) - packed) == [], "these are left out"
        assert sorted(packed - set(expected)) == [], "these are in it and not in the checkout"
        changed = [name for name, path in expected.items() if archive.read(name) != path.read_bytes()]
    assert not changed and len(packed) > 50


def test_every_module_and_data_file_is_read_from_where_the_wheel_lies(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES if path.suffix == ".py"]
    modules = [name.removesuffix(".__init__") for name in modules]
    command = [sys.executable, "-c", IMPORT_AND_READ, tmp_path / "installed", *modules]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == f"imported {len(modules)}", done.stderr
