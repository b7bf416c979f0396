"""guidellm against a server: streamed chats and completions under a load, every one whole. Run by `run.py`.

    python -m minispec.server
    python tests/clients/run.py guidellm

guidellm makes prompts of 48 tokens with the model's own tokenizer, sends two at a time, and asks for 16 tokens each
with EOS ignored, so what comes back can be counted. It takes token counts from the usage that ends each stream.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COUNT, PROMPT, ANSWER = 8, 48, 16  # requests of each kind; tokens


def benchmark(url: str, folder: str, path: str, out: Path) -> dict[str, Any]:
    """Run one benchmark of an endpoint and return its report."""
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},request_format={path}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={COUNT}",
        "--tokenizer", f"kind=huggingface_auto,model={folder}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
        "--output", f"kind=json,path={out}",
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    (report,) = json.loads(out.read_text())["benchmarks"]
    return report


def main() -> None:
    """Benchmark both endpoints and check what came back."""
    url, folder = sys.argv[1:]
    with tempfile.TemporaryDirectory() as place:
        for path in ("/v1/chat/completions", "/v1/completions"):
            report = benchmark(url, folder, path, Path(place) / "report.json")
            totals, requests = report["metrics"]["request_totals"], report["requests"]["successful"]
            assert totals["successful"] == len(requests) == COUNT and not totals["errored"], totals
            for one in requests:
                assert one["output_tokens"] == ANSWER and one["prompt_tokens"] >= PROMPT - 2 and one["output"]
                assert one["time_to_first_token_ms"] > 0
            print(f"{path}: {COUNT} streams of {ANSWER} tokens, none failed")
    print("guidellm", importlib.metadata.version("guidellm"), "ok")


if __name__ == "__main__":
    main()
