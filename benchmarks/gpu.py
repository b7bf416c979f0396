"""Everything that is to be known of a GPU, in one command: `python -m benchmarks.gpu --minutes 12`.

The stages (`gpu_stages.STAGES`) run in the order of what one wants to know first, each in a process of its own;
`--stages` names some. A stage ends at its limit or with the minutes, whichever comes first, and leaves
`benchmarks/results/DEVICE/STAGE.json` and a log beside it. What fails is said and written into the JSON (`failures`),
and the next stage goes on. The last thing printed is a table. The same command, given again, finishes what is left: a
stage that is done is not run again, unless with `--force`, and one that was cut off goes on behind its last figure.

No network is needed if `--model` names a folder, or a GGUF file, of the default model. Compiled code stays in
torch.compile's cache for the next run. A server's replies are compared with transformers' greedy tokens, which would
take minutes of a GPU: they are in benchmarks/greedy.jsonl, and `--prepare` writes this file anew, on a CPU. `--tiny`
runs every stage on a CPU with toy sizes, which shows only that it runs.

Read next: `gpu_stages.py`, what is measured and how; docs/cuda.md has a page's worth on what to expect.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import throughput
from benchmarks.gpu_stages import FULL, SEED, STAGES, TINY, Report, Scale, prepare

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S, LEAST_S = 290, 15  # most seconds of a stage; how many must be left for one to be begun
SHOWN = re.compile(r"ms|.*_ratio|ms_a_\w+|share_of_copy|relative_error|equal|accept_length|seconds|ready_s")  # figures


def tell(line: str) -> None:
    """Print one line at once."""
    print(line, flush=True)


def said(*command: str) -> str | None:
    """Return the first line that a program prints; None where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or None if done.returncode == 0 else None


def about(stage: str, scale: Scale) -> dict[str, Any]:
    """Return what a stage's figures depend on."""
    installed = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    return {
        "stage": stage, "measures": STAGES[stage].__doc__, "hardware": throughput.hardware(scale.device),
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(), "cuda": torch.version.cuda,
        **{package: installed.get(package) for package in ("torch", "triton", "transformers")},
        "revision": said("git", "describe", "--always", "--dirty", "--abbrev=40"), "seed": SEED, "scale": asdict(scale),
    }  # fmt: skip


def is_done(path: Path) -> bool:
    """Return whether a stage's file says that the stage came to its end."""
    return path.is_file() and json.loads(path.read_text())["complete"]


def run(command: Sequence[str], log: Path, limit_s: float) -> str | None:
    """Run a stage's process with its output in `log`; returns what went wrong, None if nothing did.

    At the limit the process and those that it started are ended.
    """
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                                   env={**os.environ, "PYTHONUNBUFFERED": "1"})  # fmt: skip
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


def table(figures: Any, name: str = "") -> Iterator[str]:
    """Yield a line for each part of a stage's figures that has some of `SHOWN`."""
    if not isinstance(figures, dict):
        return
    shown = {key: value for key, value in figures.items() if SHOWN.fullmatch(key) and type(value) in (int, float)}
    if shown:
        yield f"  {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in shown.items())
    for key, value in figures.items():
        yield from table(value, f"{name}, {key}" if name else key)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all stages together; default: no end")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE",
                        help=f"of {', '.join(STAGES)}; default: all")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="FOLDER of the results")
    parser.add_argument("--model", help="folder or GGUF file of the default model; default: fetch it")
    parser.add_argument("--force", action="store_true", help="repeat stages that are done")
    parser.add_argument("--prepare", action="store_true", help="write transformers' greedy tokens, and measure nothing")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU")
    parser.add_argument("--in-this-process", action="store_true", help="run the stages here, as their processes do")
    args = parser.parse_args(argv)
    if not (args.tiny or args.prepare or torch.cuda.is_available()):
        parser.error("this PyTorch finds no CUDA device; --tiny runs every stage on a CPU with toy sizes")
    args.out = args.out.resolve()
    return args


def run_here(stage: str, path: Path, scale: Scale) -> bool:
    """Run a stage in this process; return whether a part of it failed."""
    report = Report(path, about(stage, scale))
    with report.part(stage):
        STAGES[stage](report, scale)
    report.finish()
    tell("".join(f"failed: {part}: {why}\n" for part, why in report.failures.items()))
    return bool(report.failures)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that are not done; returns 1 if one went wrong or was not reached."""
    args = parse(argv)
    scale = replace(TINY if args.tiny else FULL, **{"model": args.model} if args.model else {})
    if args.prepare:
        prepare(scale)
        return 0
    name = torch.cuda.get_device_name() if scale.device == "cuda" else scale.device
    results, wrong = args.out / re.sub(r"[^\w.]+", "-", name).strip("-").lower(), 0
    paths = {stage: results / f"{stage}.json" for stage in args.stages}
    if args.in_this_process:
        return int(any([run_here(stage, path, scale) for stage, path in paths.items()]))
    results.mkdir(parents=True, exist_ok=True)
    given, started = list(sys.argv[1:] if argv is None else argv), time.monotonic()
    for stage, path in paths.items():
        begun = time.monotonic()
        left = 60 * args.minutes - (begun - started)
        if is_done(path) and not args.force:
            tell(f"{stage}: done before, {path}")
            continue
        if left < LEAST_S:
            wrong += 1
            tell(f"{stage}: not begun, the {args.minutes:g} minutes are over")
            continue
        if args.force:
            path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.gpu", *given, "--in-this-process", "--stages", stage]
        problem = run(command, path.with_suffix(".log"), min(LIMIT_S, left))
        if problem is not None:
            wrong += 1
            note(path, problem)
        tell(f"{stage}: {problem or f'done, {path}'} ({time.monotonic() - begun:.0f} s)")
    for stage, path in paths.items():
        if path.is_file():
            tell("\n".join([f"{stage}:", *table(json.loads(path.read_text())["figures"])]))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
