"""How much of its machine a process may use, read from trees of files as Linux lays them out, and what follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_llm
import torch

import minispec.load.machine as machine_module
import minispec.load.memory as memory_module
from minispec import LLM
from minispec.load.machine import core_count, host_memory
from minispec.load.memory import coarse

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
MEMINFO = "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\nHugePages_Total: 0\n"  # 64 and 32 GiB
UNLIMITED = "9223372036854771712\n"  # what version 1 writes where there is no limit


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write a machine's files: the process's groups, and what stands under /sys/fs/cgroup."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text)
    return root


def memory(limit: str, used: int, inactive: int, active: int, prefix: str) -> dict[str, str]:
    """Return a group's memory files, sizes in MiB, of version 2 or, with a prefix, of version 1."""
    one = prefix.startswith("memory")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if one else ("memory.max", "memory.current")
    whole = "total_" if one else ""
    stat = f"anon 5\n{whole}inactive_file {inactive * MIB}\n{whole}active_file {active * MIB}\n"
    return {prefix + names[0]: limit, prefix + names[1]: f"{used * MIB}\n", prefix + "memory.stat": stat}


TWO = "0::/slice/job\n"
ONE = "9:name=systemd:/docker/x\n4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n1:cpuset:/\n0::/\n"
MEMORY = {
    "no group": ("", {}, (32768, 65536)),
    "no limit, version 2": (TWO, memory("max\n", 900, 0, 0, "slice/job/"), (32768, 65536)),
    "no limit, version 1": (ONE, memory(UNLIMITED, 900, 0, 0, "memory/"), (32768, 65536)),
    "a limit, version 2": (TWO, memory(f"{4096 * MIB}\n", 3000, 1000, 500, "slice/job/"), (2596, 4096)),
    "a group above is tighter": (
        TWO,
        memory(f"{4096 * MIB}\n", 100, 0, 0, "slice/job/") | memory(f"{2048 * MIB}\n", 1500, 0, 0, "slice/"),
        (548, 2048),
    ),
    "a limit, version 1, in a container that does not show the host's path": (
        ONE, memory(f"{1024 * MIB}\n", 1000, 300, 200, "memory/"), (524, 1024)
    ),
    "a limit, version 1, by its path": (
        ONE, memory(UNLIMITED, 9000, 0, 0, "memory/") | memory(f"{1024 * MIB}\n", 24, 0, 0, "memory/docker/x/"),
        (1000, 1024),
    ),
    "above its limit": (TWO, memory(f"{100 * MIB}\n", 101, 0, 0, "slice/job/"), (0, 100)),
    "beyond the machine": (TWO, memory(f"{99999 * MIB}\n", 10, 0, 0, "slice/job/"), (32768, 65536)),
}  # fmt: skip


@pytest.mark.parametrize("case", MEMORY.values(), ids=MEMORY.keys())
def test_memory_is_what_machine_and_groups_leave(case, tmp_path) -> None:
    groups, files, (free, total) = case
    assert host_memory(machine(tmp_path, groups, files)) == (free * MIB, total * MIB)


CORES = {
    "no group": ("", {}, 8),
    "no quota, version 2": (TWO, {"slice/job/cpu.max": "max 100000\n"}, 8),
    "two and a half cores": (TWO, {"slice/job/cpu.max": "250000 100000\n"}, 2),
    "less than a core": (TWO, {"slice/job/cpu.max": "50000 100000\n"}, 1),
    "more than the mask": (TWO, {"slice/job/cpu.max": "6400000 100000\n"}, 8),
    "a group above is tighter": (TWO, {"slice/job/cpu.max": "700000 100000\n", "slice/cpu.max": "300000 100000\n"}, 3),
    "no quota, version 1": (ONE, {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 8),
    "a quota, version 1": (ONE, {"cpu,cpuacct/cpu.cfs_quota_us": "20000", "cpu,cpuacct/cpu.cfs_period_us": "5000"}, 4),
    "a quota, version 1, under one name": (ONE, {"cpu/docker/x/cpu.cfs_quota_us": "200000",
                                                 "cpu/docker/x/cpu.cfs_period_us": "100000"}, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CORES.values(), ids=CORES.keys())
def test_cores_are_what_mask_and_quota_leave(case, tmp_path, monkeypatch) -> None:
    groups, files, cores = case
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert core_count(machine(tmp_path, groups, files)) == cores


def test_this_machine_s_own_files_can_be_read() -> None:
    free, total = host_memory()
    assert 0 < free <= total and 1 <= core_count() <= (os.cpu_count() or 1)


# ---- what is made of it ------------------------------------------------------------------------------------------

CONFIG = {**test_llm.CONFIG, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 100_000}
OPTIONS = {**test_llm.DUMMY, "device": "cpu"}


def start(folder: Path, **options: object) -> LLM:
    """Start a model of random weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return LLM(folder, **OPTIONS, **options)


@pytest.mark.parametrize("options", [{"mem_fraction_static": 0.11}, {}], ids=["a share of memory", "a quarter"])
def test_the_pool_keeps_to_the_group_and_nearby_memory_gives_the_same_pages(options, tmp_path, monkeypatch) -> None:
    pages = set()
    for used in (12, 13, 14):  # of 160 MiB, 2 of them files
        root = machine(tmp_path / str(used), TWO, memory(f"{160 * MIB}\n", used, 2, 0, "slice/job/"))
        monkeypatch.setattr(memory_module, "host_memory", lambda root=root: host_memory(root))
        kv = start(tmp_path / "model", max_running_requests=40, page_size=64, **options).scheduler.kv
        free = (162 - used) * MIB
        room = int(0.11 * free) if options else free // 4
        taken = kv.pool.numel() * kv.pool.element_size() * (kv.pages - 1) // kv.pages  # page 0 holds nothing
        assert 15 * room < 16 * taken <= 16 * room
        pages.add(kv.pages)
    assert len(pages) == 1, "a start a moment later would compile everything anew"


def test_a_documented_fraction_takes_no_memory_that_others_hold_and_a_tree_always_fits(tmp_path, monkeypatch) -> None:
    drafting = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 16}

    def rows(held: int, **options: object) -> int:
        """Return the rows of the pool on a machine of 160 MiB where others hold so many."""
        root = machine(tmp_path / f"{held}", TWO, memory(f"{160 * MIB}\n", held, 0, 0, "slice/job/"))
        monkeypatch.setattr(memory_module, "host_memory", lambda: host_memory(root))
        kv = start(tmp_path / "model", page_size=16, **{"max_running_requests": 4, **options}).scheduler.kv
        return (kv.pages - 1) * kv.page_size

    usual = rows(80)
    assert rows(80, mem_fraction_static=0.5) == rows(80, mem_fraction_static=0.7) == rows(120, max_total_tokens=usual)
    assert rows(80, mem_fraction_static=0.5, max_total_tokens=2 * usual) == 2 * usual
    assert rows(80, mem_fraction_static=1e-6, **drafting) == 32  # 16 nodes and a root, in pages of 16
    with pytest.raises(ValueError, match=r"would hold 0 tokens and needs 32; 8.0 KiB are missing") as short:
        rows(160, mem_fraction_static=0.5, **drafting)
    advice = "--speculative-num-draft-tokens 16, --max-running-requests 4, --dtype float32"
    assert advice in str(short.value) and "--mem-fraction-static" not in str(short.value)


def test_the_grid_of_pages_is_coarse_and_close_below() -> None:
    assert [coarse(n) for n in (0, 1, 31, 32, 33, 63, 64, 1000)] == [0, 1, 31, 32, 32, 62, 64, 992]
    numbers = range(10_000, 20_000)
    assert len({coarse(n) for n in numbers}) == 17 and all(15 * n < 16 * coarse(n) <= 16 * n for n in numbers)


@pytest.mark.parametrize(("wish", "threads"), [(None, 3), ("5", 5)], ids=["no wish", "OMP_NUM_THREADS"])
def test_a_start_lowers_the_threads_to_the_cores_unless_told_otherwise(wish, threads, tmp_path, monkeypatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wish:
        monkeypatch.setenv("OMP_NUM_THREADS", wish)
    monkeypatch.setattr(machine_module, "core_count", lambda: 3)
    try:
        torch.set_num_threads(5)
        start(tmp_path / "model", max_running_requests=1, max_total_tokens=64)
        assert torch.get_num_threads() == threads
        torch.set_num_threads(2)
        start(tmp_path / "model", max_running_requests=1, max_total_tokens=64)
        assert torch.get_num_threads() == 2, "raised"
    finally:
        torch.set_num_threads(before)


KEEPING = """
import ctypes, resource, sys
from minispec.load.machine import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("cannot")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for number in range(9):
    if number == 1:
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = libc.malloc(64 << 20)
    ctypes.memset(memory, 1, 64 << 20)
    libc.free(memory)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)
"""


def test_memory_that_is_freed_is_kept_for_the_next_to_ask() -> None:
    """Eight times 64 MiB are new pages each time by default, and none of them where freed memory is kept."""
    runs = [
        subprocess.run([sys.executable, "-c", KEEPING, way], capture_output=True, text=True, cwd=ROOT)
        for way in ("keep", "default")
    ]
    if runs[0].stderr.strip() == "cannot":
        pytest.skip("the C library is not glibc")
    kept, default = (int(run.stdout) for run in runs)
    assert default >= 8 * 32 and kept * 10 < default  # pages of 2 MiB at the most


def test_compiled_code_is_kept_whatever_a_new_folder_lets_the_user_s_group_do(tmp_path: Path) -> None:
    """A umask of 002 is the default on some systems, where each user has a group alone."""
    code = "import os; os.umask(2); from minispec.load.machine import code_folder; print(code_folder())"
    env = {name: value for name, value in os.environ.items() if name != machine_module.CACHE}
    for _ in ("an empty home", "a full one"):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                             env=env | {"XDG_CACHE_HOME": str(tmp_path / "cache")})  # fmt: skip
        assert Path(run.stdout.strip()) == tmp_path / "cache" / "minispec" / "inductor" / "minispec"
        (tmp_path / "cache" / "minispec").chmod(0o775)  # as earlier releases made it


def test_what_takes_the_place_of_a_cache_serves_the_processes_that_compile_too(tmp_path: Path) -> None:
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(
        "import os, subprocess, sys\nos.umask(2)\nfrom minispec.load.machine import code_folder\n"
        "print(code_folder(), flush=True)\n"
        "len(sys.argv) > 1 or subprocess.run([sys.executable, __file__, 'again'], check=True)\n"
    )
    cache.mkdir()
    cache.chmod(0o777)
    env = os.environ | {machine_module.CACHE: str(cache)}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=env)
    own, child = run.stdout.split()
    assert own == child and not own.startswith(str(cache))
