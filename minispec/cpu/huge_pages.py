"""Weights on a CPU in huge pages: a decode step reads all of them, and looks up an address for each page.

With pages of 4 KiB a quarter of a gigabyte is 66,000 addresses a step, each of which costs several reads of memory, on
a virtual machine more. With pages of 2 MiB the products of a step take four fifths of the time (`docs/log.md`). Most
systems give such pages only to who asks for them, and PyTorch's allocator and oneDNN do not ask.

The one idea: memory that is filled already may be moved. Since Linux 6.1 a process can ask for that (`MADV_COLLAPSE`),
so it is asked once, when weights are loaded or later, for all memory that is nearly full, and nothing else has to know.
Memory for keys and values is asked for before it is filled, which older systems know too. Where the system's setting is
"never" everything stays as it is.

Read next: `linear.py`, whose weights lie there, and `kv.py`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("minispec")

HUGE = 2 << 20  # bytes of a page on x86-64 and, where a small one has 4 KiB, on Arm
FULL = 0.9  # of a mapping must be in use, since what is moved is filled up with memory that was not in use
MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_COLLAPSE = 14, 15, 25  # of <linux/mman.h>

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPPINGS, ROLLUP = Path("/proc/self/smaps"), Path("/proc/self/smaps_rollup")  # each mapping's numbers, and their sums


def use_huge_pages() -> int:
    """Move what memory this process has filled into huge pages, where the system allows it; returns the bytes moved.

    It takes some two seconds a gigabyte. Other threads may go on reading and writing.
    """
    if not _allowed():
        return 0
    before = _bytes("AnonHugePages", _text_of(ROLLUP))
    for start, end in full_mappings(_text_of(MAPPINGS)):
        _madvise(start, end, MADV_HUGEPAGE)  # so that what is split later, by a fork say, is put together again
        _madvise(start, end, MADV_COLLAPSE)
    return _bytes("AnonHugePages", _text_of(ROLLUP)) - before


def move_to_huge_pages(device: torch.device) -> None:
    """On a CPU, have weights lie in huge pages; to be called when they are loaded."""
    if device.type == "cpu":
        logger.debug("%d MiB were moved to huge pages", use_huge_pages() >> 20)


def move_when_idle() -> None:
    """Move weights to huge pages, whenever the processor is idle; for a thread beside an engine that serves."""
    with suppress(AttributeError, OSError):  # without this policy the thread runs at the usual priority
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread alone
    move_to_huge_pages(torch.device("cpu"))


_sparse = False  # whether `zeros` leaves memory unwritten


@contextmanager
def sparse() -> Iterator[None]:
    """Within this, `zeros` returns memory that is not taken until somebody writes to it, and holds anything.

    For an engine that only compiles: its pools are as large as those of the engine that serves.
    """
    global _sparse
    _sparse = True
    try:
        yield
    finally:
        _sparse = False


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `torch.zeros` of this shape; on a CPU in huge pages, as far as it fills them."""
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    if device.type == "cpu" and _allowed():
        begin = tensor.data_ptr()
        start, end = _whole(begin, begin + tensor.nbytes)
        if start < end:
            # In sparse memory, writing one row would make the kernel fill a whole huge page.
            _madvise(start, end, MADV_NOHUGEPAGE if _sparse else MADV_HUGEPAGE)
    return tensor if _sparse else tensor.zero_()


def _allowed() -> bool:
    """Return whether the system gives huge pages to programs that ask for them."""
    return sys.platform.startswith("linux") and "[never]" not in _text_of(SETTING)


def _text_of(path: Path) -> str:
    """Return a file's text, empty where it cannot be read."""
    with suppress(OSError):
        return path.read_text("ascii", "replace")
    return ""


def _whole(begin: int, finish: int) -> tuple[int, int]:
    """Return the first and last address of the huge pages that lie wholly between two addresses."""
    return -(-begin // HUGE) * HUGE, finish // HUGE * HUGE


def _madvise(start: int, end: int, advice: int) -> None:
    """Tell the kernel; where it refuses, memory stays in small pages, which hold the same."""
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call(start, end - start, advice)


def full_mappings(smaps: str) -> Iterator[tuple[int, int]]:
    """Yield the first and last address, whole huge pages, of memory of the process's own that is nearly full.

    `smaps` is the text of /proc/self/smaps. Stacks and reserves, which are nearly empty, and files are left out.
    """
    head = r"^([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ 00:00 0 *(?:\[heap\])?\n"
    for mapping in re.finditer(head + r"((?:[A-Z]\w+:.*\n?)*)", smaps, re.MULTILINE):
        begin, finish = int(mapping[1], 16), int(mapping[2], 16)
        start, end = _whole(begin, finish)
        if start < end and _bytes("Rss", mapping[3]) >= FULL * (finish - begin):
            yield start, end


def _bytes(name: str, lines: str) -> int:
    """Return a number of a mapping, or of all, in bytes; 0 where it is not told."""
    found = re.search(rf"^{name}: +(\d+) kB", lines, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
