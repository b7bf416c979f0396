"""Every launch command of SGLang's documentation, run as written in a process of its own; prints a table of outcomes.

The checkpoints are the tiny ones of tests/test_launch_commands.py, in the formats of the published ones and under their
ids. Appended are a port, `--device cpu` and `--disable-torch-compile`. A command that starts is asked for 32 tokens; a
refused one must end with one line, which the table has.

`python -m benchmarks.launch_commands [NUMBER ...]`: all take about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))


def outcome(number: int, folder: Path) -> str:
    """Launch a command in the folder of the checkpoints; return what became of it."""
    from test_config import COMMANDS
    from test_launch_commands import Launched

    command, started = COMMANDS[number], time.monotonic()
    launched = Launched(command, folder)
    if command.refused:
        said = launched.process.communicate(timeout=120)[1].strip()
        return f"refused: {said.partition('error: ')[2]}" if "\n" not in said else f"failed: {said[-300:]}"
    try:
        launched.wait()
        ready = time.monotonic() - started
        body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 32}}
        request = urllib.request.Request(f"http://127.0.0.1:{launched.port}/generate", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.load(answer)["meta_info"]
        length = told.get("spec_accept_length", 1)  # there is none without a drafter
        return f"starts in {ready:.0f} s, {told['completion_tokens']} tokens, {length:.2f} a step"
    finally:
        launched.stop()


def main() -> None:
    """Print a line for each command asked for, all by default."""
    from _pytest.outcomes import Failed
    from test_config import COMMANDS
    from test_launch_commands import make, text_of

    from minispec.load.default_model import ensure_default_model

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", type=int, nargs="*", help="of the lines of tests/launch_commands.txt, from 0")
    numbers = parser.parse_args().numbers or range(len(COMMANDS))
    base = ensure_default_model(print)
    text = text_of(base)
    print("| | command | outcome |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for number in numbers:
            if not COMMANDS[number].refused:
                make(Path(name), text, base, COMMANDS[number])
            try:
                said = outcome(number, Path(name))
            except (Exception, Failed) as error:
                said = f"failed: {' '.join(str(error).split())[-300:]}"
            shown = " ".join(COMMANDS[number].argv).replace("|", "\\|")
            print(f"| {number} | `{shown}` | {said.replace('|', '')} |", flush=True)


if __name__ == "__main__":
    main()
