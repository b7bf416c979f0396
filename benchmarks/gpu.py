"""Everything that is to be known of a GPU, in one command: `python -m benchmarks.gpu`.

It needs no network; `carry.py` brings what it needs to a machine that has none. The stages (`--stages` names some) are
run in the order of what one wants to know first, each in a process of its own with a limit of less than five minutes,
and each leaves `benchmarks/results/DEVICE/STAGE.json` and a log beside it. What fails is said and written into the JSON
(`failures`), and the next stage goes on. A stage that is done is not run again, unless with `--force`; one that was cut
off or had failures goes on behind its last figure, so the same command, given again, finishes what is left.

Compiling takes most of the time. `--cache FOLDER` keeps what was compiled in pieces of 15 MiB: they are put back at the
start and written anew after each stage that compiled something. `--model FOLDER` says where the default model lies on a
machine that cannot fetch it: a model folder, or the GGUF file of minispec/load/default_model.py, whole or in pieces
whose names sort in their order. `--tiny` runs every stage on a CPU with toy sizes, which shows only that it runs.

Read next: `gpu_first.py` and `gpu_stages.py`, what is measured and how.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_first, gpu_stages, throughput
from benchmarks.carry import archive, cut, joined
from benchmarks.gpu_stages import FULL, SEED, TINY, Report, Scale
from minispec.load.default_model import FILES, FORMAT, MODEL_NAME, convert
from minispec.load.user_cache import cache_root

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 290
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the default model's file
# A fixed place, since compiled code names files in it. Triton's cache lies inside.
COMPILED = Path(tempfile.gettempdir()) / "minispec-gpu-compiled"
STAGES: dict[str, Callable[[Report, Scale], None]] = {  # in the order of what one wants to know first
    "smoke": gpu_first.smoke,
    "attention": gpu_first.attention,
    "step": gpu_stages.step,
    "batch-1": gpu_stages.batch_of(1),
    "batch-8": gpu_stages.batch_of(8),
    "batch-64": gpu_stages.batch_of(64),
    "overlap": gpu_stages.overlap,
    "sampled": gpu_stages.sampled,
    "tests": gpu_stages.tests,
    "parity": gpu_stages.parity,
    "default": gpu_stages.default,
    "fp8": gpu_stages.fp8,
    "profile": gpu_stages.profile,
}


def tell(line: str) -> None:
    """Print one line at once."""
    print(line, flush=True)


# ---- what the figures depend on ----------------------------------------------------------------------------------


def about(stage: str, scale: Scale, revision: str) -> dict[str, Any]:
    """Return what a stage's figures depend on."""
    return {
        "stage": stage,
        "measures": STAGES[stage].__doc__,
        "hardware": throughput.hardware(scale.device),
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "triton", "transformers")},
        "cuda": torch.version.cuda,
        "revision": revision,
        "seed": SEED,
        "scale": asdict(scale),
    }  # fmt: skip


def said(*command: str) -> str | None:
    """Return the first line that a program prints; None where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or None if done.returncode == 0 else None


def version(package: str) -> str | None:
    """Return the version of a package that is installed, else None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_name(scale: Scale) -> str:
    """Return the device's name as that of a folder."""
    name = torch.cuda.get_device_name() if scale.device == "cuda" else scale.device
    return re.sub(r"[^\w.]+", "-", name).strip("-").lower()


# ---- what was compiled, in pieces --------------------------------------------------------------------------------


class CompileCache:
    """A folder of compiled code, kept as numbered pieces of one archive, with a file beside them that describes it."""

    def __init__(self, pieces: Path, compiled: Path, made_with: dict[str, Any]) -> None:
        """`made_with`: what must be the same for compiled code to be of use."""
        self.pieces, self.compiled, self.made_with = pieces, compiled, made_with
        self.kept: list[tuple[str, int]] = []

    def _listing(self) -> list[tuple[str, int]]:
        files = (path for path in self.compiled.rglob("*") if path.is_file())
        return sorted((str(path.relative_to(self.compiled)), path.stat().st_size) for path in files)

    def restore(self) -> bool:
        """Put back what was kept; False, and a word on it, where there is nothing whole or it was made by another."""
        index = self.pieces / "compiled.json"
        if not index.is_file():
            return False
        stated, whole = json.loads(index.read_text()), joined(self.pieces, "compiled.tar.gz")
        if stated["made_with"] != self.made_with:
            tell(f"the compile cache was made with {stated['made_with']}, not {self.made_with}: it is not used")
            return False
        if stated["sha256"] != hashlib.sha256(whole).hexdigest():
            tell(f"the compile cache in {self.pieces} is not complete: it is not used")
            return False
        with tarfile.open(fileobj=io.BytesIO(whole), mode="r:gz") as kept:
            kept.extractall(self.compiled, filter="data")
            self.kept = sorted((member.name.removeprefix("./"), member.size) for member in kept if member.isfile())
        return True

    def save(self) -> int:
        """Keep what was compiled since; returns the number of pieces written, 0 if there is nothing new."""
        listing = self._listing() if self.compiled.is_dir() else []
        if listing == self.kept:
            return 0
        whole = archive(self.compiled, mode="w:gz", compresslevel=3)
        pieces = cut(whole, self.pieces, "compiled.tar.gz")
        index = {"made_with": self.made_with, "sha256": hashlib.sha256(whole).hexdigest(), "bytes": len(whole)}
        (self.pieces / "compiled.json").write_text(json.dumps(index, indent=1) + "\n")
        self.kept = listing
        return pieces


# ---- the default model -------------------------------------------------------------------------------------------


def place_default_model(folder: Path) -> Path:
    """Put the default model where it is looked for, out of a folder that has it converted, or as GGUF in pieces."""
    target = cache_root() / FORMAT / MODEL_NAME
    if all((target / name).is_file() for name in FILES):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / MODEL_NAME
        if (folder / "config.json").is_file():
            shutil.copytree(folder, made)
        else:
            parts = sorted(path for path in folder.rglob("*") if ".gguf" in path.name and path.is_file())
            whole = b"".join(part.read_bytes() for part in parts)
            if (found := hashlib.sha256(whole).hexdigest()) != GGUF_SHA256:
                names = ", ".join(part.name for part in parts) or "no file"
                raise SystemExit(f"--model {folder}: {names} with .gguf in the name make no file we know (sha256 "
                                 f"{found}, expected {GGUF_SHA256})")  # fmt: skip
            (Path(scratch) / "model.gguf").write_bytes(whole)
            convert(Path(scratch) / "model.gguf", made, tell)
        made.rename(target)
    return target


# ---- stages, each in a process -----------------------------------------------------------------------------------


def is_done(path: Path) -> bool:
    """Return whether a stage's file says that the stage came to its end."""
    return path.is_file() and json.loads(path.read_text())["complete"]


def run(command: Sequence[str], log: Path, limit_s: float) -> str | None:
    """Run a stage's process with its output in `log`; returns what went wrong, None if nothing did.

    At the limit the process and those that it started are ended.
    """
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(COMPILED), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it was ended after {limit_s:.0f} s; what it had measured is kept"
    if status == 0:
        return None
    return f"it ended with status {status}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def note(path: Path, problem: str) -> None:
    """Write into a stage's file that its process did not come to its end, and why."""
    found = json.loads(path.read_text()) if path.is_file() else {"stage": path.stem, "complete": False, "figures": {}}
    found["failures"] = {**found.get("failures", {}), "process": problem}
    path.write_text(json.dumps(found, indent=1) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE",
                        help=f"of {', '.join(STAGES)}; default: all")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="FOLDER of the results")
    parser.add_argument("--cache", type=Path, help="FOLDER to keep compiled code in, in pieces of 15 MiB")
    parser.add_argument("--model", type=Path, help="FOLDER that has the default model, converted or as GGUF in pieces")
    parser.add_argument("--force", action="store_true", help="repeat stages that are done")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="most seconds of a stage")
    parser.add_argument("--revision", help="of the sources, where git does not know it")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU")
    parser.add_argument("--in-this-process", action="store_true", help="run the stages here, as their processes do")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        parser.error("this PyTorch finds no CUDA device; --tiny runs every stage on a CPU with toy sizes")
    args.out, args.cache = args.out.resolve(), args.cache and args.cache.resolve()
    args.revision = args.revision or said("git", "describe", "--always", "--dirty", "--abbrev=40") or "unknown"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that are not done; returns 1 if one went wrong."""
    args = parse(argv)
    scale = TINY if args.tiny else FULL
    results, wrong = args.out / device_name(scale), 0
    if args.in_this_process:
        for stage in args.stages:
            report = Report(results / f"{stage}.json", about(stage, scale, args.revision))
            with report.part(stage):
                STAGES[stage](report, scale)
            report.finish()
            tell("".join(f"failed: {part}: {why}\n" for part, why in report.failures.items()))
            wrong += bool(report.failures)
        return int(wrong > 0)
    if args.model is not None:
        try:
            place_default_model(args.model)
        except (Exception, SystemExit) as error:
            tell(f"{error}; stages that need the default model will fail")
    made_with = {"device": device_name(scale), "torch": torch.__version__, "triton": version("triton")}
    cache = CompileCache(args.cache, COMPILED, made_with) if args.cache else None
    if cache and cache.restore():
        tell(f"restored {len(cache.kept)} compiled files")
    results.mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        path = results / f"{stage}.json"
        if is_done(path) and not args.force:
            tell(f"{stage}: done before, {path}")
            continue
        if args.force:
            path.unlink(missing_ok=True)
        started = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.gpu", "--in-this-process", "--stages", stage, "--out",
                   str(args.out), "--revision", args.revision, *(["--tiny"] if args.tiny else [])]  # fmt: skip
        problem = run(command, path.with_suffix(".log"), args.limit)
        if problem is not None:
            wrong += 1
            note(path, problem)
        tell(f"{stage}: {problem or f'done, {path}'} ({time.monotonic() - started:.0f} s)")
        if cache and (pieces := cache.save()):
            tell(f"kept what was compiled in {pieces} pieces")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
