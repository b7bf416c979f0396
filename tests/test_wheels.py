"""Fetching a wheel as data, in environments with and without pip, from an index in a folder.

Each environment is a real one, made by `venv`, and each download is a real one by the pip that is found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from test_layers import ROOT

from minispec.load import wheels

NAME = "tiny_data-1.0-py3-none-any.whl"
FETCH = """
import importlib.util, pathlib, sys
from minispec.load.wheels import pip_download
assert importlib.util.find_spec("pip") is None, "this environment has pip"
print(pip_download("tiny-data==1.0", pathlib.Path(sys.argv[1])).name)
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simple index (PEP 503) of one package, whose dependency is nowhere and must not be asked for."""
    page = tmp_path_factory.mktemp("index") / "simple" / "tiny-data" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<!DOCTYPE html><html><body><a href="{NAME}">{NAME}</a></body></html>')
    with zipfile.ZipFile(page.with_name(NAME), "w") as wheel:
        wheel.writestr("tiny_data/words.txt", "some words")
        info = "tiny_data-1.0.dist-info/"
        named = "Metadata-Version: 2.1\nName: tiny-data\nVersion: 1.0\n"
        wheel.writestr(info + "METADATA", named + "Requires-Dist: nowhere\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    return page.parent.parent


@pytest.fixture(scope="module")
def without_pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment like `uv venv` makes: no pip in it, nor any other package."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def settings(**more: str) -> dict[str, str]:
    """Return this environment without what it says about indexes, and more."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": str(ROOT)} | more


@pytest.mark.parametrize("chosen", ["PIP_INDEX_URL", "UV_DEFAULT_INDEX"])
def test_an_environment_without_pip_fetches_from_the_configured_index(
    chosen: str, index: Path, without_pip: Path, tmp_path: Path
) -> None:
    """What is set for pip comes first, what is set for uv alone counts too."""
    if not list((Path(os.__file__).parent / "ensurepip").glob("_bundled/pip-*.whl")):
        pytest.skip("this Python comes without ensurepip's copy of pip")
    other = {"UV_INDEX_URL": (tmp_path / "nowhere").as_uri()} if chosen == "PIP_INDEX_URL" else {}
    environment = settings(**other, **{chosen: index.as_uri()})
    done = subprocess.run([without_pip, "-c", FETCH, tmp_path], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == NAME, done.stderr
    assert (tmp_path / NAME).read_bytes() == (index / "tiny-data" / NAME).read_bytes()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in an environment without pip, on a Python whose distribution leaves ensurepip out."""
    monkeypatch.setattr(wheels, "_has_pip", lambda: False)
    monkeypatch.setattr(wheels.sysconfig, "get_path", lambda name: str(tmp_path / "stdlib"))
    monkeypatch.setattr(wheels.sysconfig, "get_config_var", lambda name: None)


@pytest.mark.usefixtures("bare")
def test_uv_runs_pip_where_python_has_none_at_all(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, copies = shutil.which("uv"), list((Path(os.__file__).parent / "ensurepip").glob("_bundled/pip-*.whl"))
    if not found or not copies:
        pytest.skip("needs uv on the PATH, and a wheel of pip for it to run offline")
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    local = {"UV_OFFLINE": "1", "UV_FIND_LINKS": copies[0].parent, "UV_CACHE_DIR": tmp_path / "cache"}
    for name, value in {**local, "PIP_INDEX_URL": index.as_uri(), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, str(value))
    assert wheels.pip_download("tiny-data==1.0", tmp_path).name == NAME


@pytest.mark.usefixtures("bare")
def test_without_pip_and_uv_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    with pytest.raises(wheels.DownloadError) as caught:
        wheels.pip_download("tiny-data==1.0", tmp_path)
    message = str(caught.value)
    assert sys.executable in message and "install pip" in message and "uv" in message and "\n" not in message


def test_a_process_that_downloaded_a_wheel_can_still_compile(index: Path, tmp_path: Path) -> None:
    """torch.compile imports setuptools, which a look for pip in the same process breaks."""
    code = """
import pathlib, sys
from minispec.load.wheels import pip_download
pip_download("tiny-data==1.0", pathlib.Path(sys.argv[1]))
import setuptools
"""
    env = settings(PIP_INDEX_URL=index.as_uri())
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
