"""Huge pages: which memory is asked for, and that asking changes no value and does move memory where the system can."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from minispec.cpu import huge_pages
from minispec.cpu.huge_pages import HUGE, full_mappings

SMAPS = """\
10000000-10900000 rw-p 00000000 00:00 0                                  [heap]
Size:               9216 kB
Rss:                9216 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac
20001000-20801000 rw-p 00000000 00:00 0 
Size:               8192 kB
Rss:                7500 kB
AnonHugePages:      2048 kB
VmFlags: rd wr
{rest}"""


def mapping(*, perms: str = "rw-p", device: str = "00:00 0", name: str = "", rss: int = 8192) -> str:
    """Return a mapping of 8 MiB."""
    return f"30000000-30800000 {perms} 00000000 {device}  {name}\nSize: 8192 kB\nRss:   {rss} kB\nVmFlags: rd\n"


def test_memory_that_is_full_is_asked_for_in_whole_huge_pages() -> None:
    found = list(full_mappings(SMAPS.format(rest=mapping())))
    assert found == [(0x10000000, 0x10800000), (0x20200000, 0x20800000), (0x30000000, 0x30800000)]


@pytest.mark.parametrize("other", [
    mapping(rss=4000), mapping(perms="r--p"), mapping(perms="rw-s"), mapping(device="fe:00 77", name="/lib/libc.so"),
    mapping(name="[stack]"),
])  # fmt: skip
def test_stacks_files_and_reserves_are_left_alone(other: str) -> None:
    assert len(list(full_mappings(SMAPS.format(rest=other)))) == 2


def test_nothing_is_asked_where_the_system_says_never(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda start, end, advice: asked.append(start))
    monkeypatch.setattr(huge_pages, "SETTING", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert huge_pages.use_huge_pages() == 0
    assert not huge_pages.zeros(4 * HUGE, dtype=torch.uint8, device=torch.device("cpu")).any()
    assert asked == []
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    huge_pages.zeros(4 * HUGE, dtype=torch.uint8, device=torch.device("cpu"))
    assert len(asked) == 1


def test_sparse_pools_take_memory_where_they_are_written() -> None:
    """An engine that only compiles has pools as large as the serving one's; a server's children would else fill memory.

    In a process of its own, whose allocator has nothing to hand out again.
    """
    code = """
        import torch
        from pathlib import Path
        from minispec.cpu.huge_pages import sparse, zeros
        def taken():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        device, before = torch.device("cpu"), taken()
        with sparse():
            pool = zeros(64, 2**20, dtype=torch.uint8, device=device)
        pool[:, :64] = 1
        print(taken() - before < 16 * 2**20)
        full = zeros(64, 2**20, dtype=torch.uint8, device=device)
        print(taken() - before > 60 * 2**20, bool(full.any()))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True", "False"]


def test_memory_moves_and_keeps_what_is_in_it() -> None:
    if not huge_pages._allowed() or _release() < (6, 1):
        pytest.skip("this system has no huge pages for who asks")
    script = """
        import torch
        from minispec.cpu.huge_pages import use_huge_pages, zeros
        torch.manual_seed(0)
        tensors = [torch.randn(300_000) for _ in range(40)]
        copies = [tensor.tolist() for tensor in tensors]
        moved = use_huge_pages()
        assert all(tensor.tolist() == copy for tensor, copy in zip(tensors, copies))
        print(moved)
        assert not zeros(3, 1 << 20, dtype=torch.float32, device=torch.device("cpu")).any()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    if int(done.stdout) < 32 << 20:  # of 46 MiB in tensors and more in lists
        pytest.skip("this machine has no huge page free")


def _release() -> tuple[int, ...]:
    """Return the version of the kernel."""
    return tuple(map(int, re.findall(r"\d+", Path("/proc/sys/kernel/osrelease").read_text())[:2]))
