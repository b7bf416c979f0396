"""aiperf against a server: streamed chats, completions and responses under a load, none failed. Run by `run.py`.

aiperf makes prompts of 48 tokens with the model's own tokenizer, keeps two requests running, and asks for 16 tokens
each with EOS ignored, so what comes back can be counted. Token counts are those of the usage that ends each stream.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COUNT, PROMPT, ANSWER = 8, 48, 16  # requests of each kind; tokens


def profile(url: str, folder: str, kind: str, out: str) -> dict[str, Any]:
    """Run one profile of an endpoint and return its report."""
    command = [
        str(Path(sys.executable).with_name("aiperf")), "profile", "--url", url, "--model", "default",
        "--endpoint-type", kind, "--streaming", "--tokenizer", folder, "--concurrency", "2",
        "--request-count", str(COUNT), "--isl", str(PROMPT), "--osl", str(ANSWER), "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true", "--random-seed", "1", "--no-gpu-telemetry", "--no-server-metrics",
        "--ui", "none", "--artifact-dir", out,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return json.loads((Path(out) / "profile_export_aiperf.json").read_text())


def main() -> None:
    """Profile the three endpoints and check what came back."""
    for kind in ("chat", "completions", "responses"):
        with tempfile.TemporaryDirectory() as out:
            report = profile(*sys.argv[1:], kind, out)
        assert report["is_complete"] and report["error_summary"] == [], report["error_summary"]
        assert report["request_count"]["avg"] == COUNT and report["request_error_rate"]["avg"] == 0
        assert report["time_to_first_token"]["min"] > 0
        if kind != "responses":  # aiperf does not read the usage of `response.incomplete`, as these streams end
            assert report["osl_mismatch_count"]["avg"] == 0 and report["total_osl"]["avg"] == COUNT * ANSWER
            assert report["input_sequence_length"]["min"] >= PROMPT - 2
        print(f"{kind}: {COUNT} streams of {ANSWER} tokens, none failed")
    print("aiperf", importlib.metadata.version("aiperf"), "ok")


if __name__ == "__main__":
    main()
