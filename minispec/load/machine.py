"""A process on its machine: memory and cores within the limits of its control groups; a folder of its own; its end.

A container or a batch job usually gets a part of its machine, but /proc/meminfo and the number of cores describe the
whole machine. The limits stand in the files of the process's control groups and of all groups above them, and the
tightest one holds. Both versions of control groups are read. In every function `root` stands for /, so that tests can
lay out the files of a machine elsewhere.

Read next: `memory.py`, which sizes the KV pool by these.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minispec.load.user_cache import cache_root

logger = logging.getLogger("minispec")

SLASH = Path("/")
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # the variable that names the cache of torch.compile


def host_memory(root: Path = SLASH) -> tuple[int, int]:
    """Return the (free, total) bytes of memory that the process may use; memory the kernel can reclaim is free."""
    free, total = _machine_memory(root)
    for group in _groups(root, "memory"):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        if limit is not None:
            used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
            total = min(total, limit)
            free = min(free, max(limit - used + _file_pages(group), 0))
    return min(free, total), total


def core_count(root: Path = SLASH) -> int:
    """Return how many whole cores the process may keep busy, at least 1: its affinity mask, within the CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(root, "cpu"):
        quota, _, period = text_of(group / "cpu.max").partition(" ")
        quota = quota or text_of(group / "cpu.cfs_quota_us")
        period = period or text_of(group / "cpu.cfs_period_us")
        if quota.strip() not in ("", "max", "-1"):  # without a quota version 2 says max, and version 1 says -1
            cores = min(cores, int(quota) // int(period))
    return max(cores, 1)


def limit_threads(processes: int = 1) -> None:
    """Let torch use no more threads than the process has whole cores, unless OMP_NUM_THREADS says otherwise.

    processes: ranks among which the cores are divided.

    torch counts the machine's cores and knows no quota. Threads beyond it make every parallel loop wait for those that
    are not scheduled.
    """
    import torch  # here, since the server listens before torch is imported

    cores = max(core_count() // processes, 1)
    if "OMP_NUM_THREADS" not in os.environ and cores < torch.get_num_threads():
        logger.info("%d threads, as many as the process has cores; OMP_NUM_THREADS sets another number", cores)
        torch.set_num_threads(cores)


def keep_freed_memory() -> bool:
    """Have the C library keep memory that is freed, up to a gigabyte; returns whether it is one that can, glibc.

    Tensors of some megabytes come and go in every layer. By default each is given back to the system, which then has
    to find and clear as many pages for the next one. To be called once weights lie where they stay.
    """
    trim_threshold, mmap_threshold = -1, -3  # of <malloc.h>
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError, OSError):
        return False
    return all([mallopt(which, 10**9) == 1 for which in (trim_threshold, mmap_threshold)])


@contextmanager
def uncollected() -> Iterator[None]:
    """Within this context Python collects no garbage; what was made in it is never collected. For the import of torch.

    Importing makes half a million objects. All of them stay, but each search for garbage would go through them: for a
    second of the start, and in a pause of every request that runs into one.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def code_folder() -> Path:
    """Return the folder for files of compiled functions, in torch.compile's cache, which holds code too; it exists.

    The cache is the user's, since PyTorch's default is a guessable folder in the shared temporary directory. A cache
    that others can write is replaced by one that only this process and its children have.
    """
    return _code_folder(os.environ.get(CACHE))


@functools.cache
def _code_folder(given: str | None) -> Path:
    try:
        cache = cache_root() / "inductor" if given is None else Path(given)
        if given is None:
            cache.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for own in (cache.parent, cache):
                own.mkdir(mode=0o700, exist_ok=True)
                if not is_ours(own.stat()):  # many a umask lets the user's group write
                    own.chmod(0o700)
            logger.info("compiled code is kept in %s (%s)", cache, CACHE)
        (cache / "minispec").mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = trusted(cache / "minispec")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _temporary.append(tempfile.mkdtemp(prefix="minispec-inductor-"))
        atexit.register(remove_caches)
        folder = Path(_temporary[-1], "minispec")
        folder.mkdir(mode=0o700)  # or other processes of ours would not trust it either
        logger.warning("compiled code is in %s until the end, and is not kept: %s", folder.parent, error)
    os.environ[CACHE] = str(folder.parent)
    return folder


_temporary: list[str] = []  # the folders of this process


def remove_caches() -> None:
    """Remove the folders that took the place of a cache, as an ordinary end of the process does."""
    while _temporary:
        shutil.rmtree(_temporary.pop(), ignore_errors=True)


def trusted(path: Path) -> Path:
    """Return a folder's path without links; raises OSError unless only this user and root can put code there.

    A sticky folder's entries cannot be replaced by others.
    """
    path = path.resolve()
    for part in (path, *path.parents):
        status = part.stat()
        if not is_ours(status) and not (status.st_uid in (0, os.getuid()) and status.st_mode & stat.S_ISVTX):
            raise PermissionError(f"{part} can be written by others")
    return path


def is_ours(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user or root, and nobody else can write it."""
    return status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def end_with_parent() -> None:
    """Kill this process, and the compilers that it runs, when standard input ends."""
    while os.read(0, 4096):  # not by way of `sys.stdin`, whose lock the end of Python would wait for
        pass
    os.killpg(0, signal.SIGKILL)


def _machine_memory(root: Path) -> tuple[int, int]:
    """Return the machine's own (free, total) bytes."""
    lines = [line.split() for line in text_of(root / "proc/meminfo").splitlines()]
    known = {words[0]: int(words[1]) * 1024 for words in lines}
    if "MemAvailable:" in known:  # unlike sysconf's number, this one includes memory that the kernel can reclaim
        return known["MemAvailable:"], known["MemTotal:"]
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's control groups that may limit this controller, the innermost first.

    Within a container the path may be the host's, while the mounted tree has only the end of that path or nothing of
    it. So all folders from the path up to the mount point are tried.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}"]
        else:
            continue
        for mount in mounts:
            folder = root / mount
            inner = folder / path.strip("/")
            yield from (each for each in (inner, *inner.parents) if each.is_relative_to(folder) and each.is_dir())


def _file_pages(group: Path) -> int:
    """Return the bytes of cached files, which count as the group's memory but which the kernel drops when needed."""
    words = [line.split() for line in text_of(group / "memory.stat").splitlines()]
    known = {name: int(value) for name, value in words}
    whole = "total_" if "total_inactive_file" in known else ""  # version 1 counts the groups below only in these
    return known.get(whole + "inactive_file", 0) + known.get(whole + "active_file", 0)


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file or no number in it, as when the limit is the word max."""
    try:
        return int(text_of(path))
    except ValueError:
        return None


def text_of(path: Path, encoding: str = "ascii") -> str:
    """Return a file's text, empty where it cannot be read."""
    try:
        return path.read_text(encoding, "replace")
    except OSError:
        return ""
