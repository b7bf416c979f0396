"""Folders in the user's cache that are made once: the default model, GGUF files converted.

A start may be killed half-way, and two may begin at once. So a folder is made under a lock in a scratch folder beside
its place, and one rename moves it there: a folder that exists is complete, the second process waits for the first, and
what a killed one left in scratch is deleted by the next.

Read next: `default_model.py` and `gguf_models.py`, which say what is in such a folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from minispec.load.wheels import DownloadError

SCRATCH_PREFIX = ".partial-"

Progress = Callable[[str], None]


def to_stderr(message: str) -> None:
    """Print one progress message."""
    print(message, file=sys.stderr, flush=True)


def cache_root() -> Path:
    """Return our folder in the user's cache (not created). Raises DownloadError where there is no home folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):  # the XDG rules say to ignore anything else
        return Path(cache) / "minispec"
    try:
        return Path.home() / ".cache" / "minispec"
    except RuntimeError:  # a container user without HOME and without an entry in the user database
        raise DownloadError("there is no home folder to keep it in (set HOME or XDG_CACHE_HOME)") from None


def make_once(target: Path, files: Sequence[str], what: str, make: Callable[[Path], None], progress: Progress) -> Path:
    """Return the folder `target`, which `make` fills on first use, or where one of `files` was deleted.

    make: writes the folder that it is given; the folder around that one is scratch too. what: its name in messages.
    """
    if _is_whole(target, files):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it even if this process is killed
        except BlockingIOError:
            progress(f"Waiting for another process that is preparing {what}")
            fcntl.flock(file, fcntl.LOCK_EX)
        if _is_whole(target, files):  # another process may have made it while we waited
            return target
        for leftover in target.parent.glob(SCRATCH_PREFIX + "*"):  # a killed process's: a living one holds the lock
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            make(made)
            if target.exists():
                shutil.rmtree(target)
            made.rename(target)
        progress(f"{what} is ready in {target}")
    return target


def _is_whole(folder: Path, files: Sequence[str]) -> bool:
    """Tell whether every file is there; one rename brought them all, so a missing one was deleted later."""
    return all((folder / name).is_file() for name in files)
