"""lm-eval through a server, and by its own Hugging Face backend: what the two find must be the same. Run by `run.py`.

    python -m minispec.server --dtype float32
    python tests/clients/run.py lm-eval

The tasks are the files in lm_eval_tasks/: log-likelihoods of choices, of whole texts, and greedy answers. The server's
side is lm-eval's `local-completions`, once with the model's own tokenizer and once with the server's (/tokenizer_info),
one request at a time and several at once; the other side is lm-eval's `hf` on the very folder that the server loaded,
in float32. The server drafts, which must change nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

# Before what reads them is imported.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

TASKS = Path(__file__).resolve().parent / "lm_eval_tasks"
NAMES = ["minispec_capitals", "minispec_sentences", "minispec_counting"]
WAYS = {
    "the model's tokenizer, one at a time": {"tokenizer_backend": "huggingface"},
    "the server's tokenizer, four at once": {"tokenizer_backend": "remote", "num_concurrent": 4},
    "texts instead of ids, three in a body": {"tokenizer_backend": "huggingface", "tokenized_requests": False,
                                              "batch_size": 3},
}  # fmt: skip
CLOSE = 1e-3


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the server says at this path."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, {"Content-Type": "application/json"})) as said:
        return json.load(said)


def evaluate(backend: str, **arguments: Any) -> dict[str, list[Any]]:
    """Return {task: what the model answered to each of its requests}, and the tasks' scores under "scores"."""
    found = lm_eval.simple_evaluate(
        backend, arguments, tasks=NAMES, task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    answers: dict[str, list[Any]] = {"scores": []}
    for name in NAMES:
        rows = sorted(found["samples"][name], key=lambda row: row["doc_id"])
        answers[name] = [answer for row in rows for answer in row["resps"]]
        scores = {key: value for key, value in found["results"][name].items() if isinstance(value, float)}
        answers["scores"].append((name, {key.split(",")[0]: round(float(value), 4) for key, value in scores.items()}))
    return answers


def flat(answer: Any) -> list[Any]:
    """Return the values of an answer: [log-likelihood, greedy], [log-likelihood] or [text]."""
    return [value for item in answer for value in flat(item)] if isinstance(answer, (list, tuple)) else [answer]


def farthest(mine: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> float:
    """Return the largest distance of two log-likelihoods; all other values must be equal."""
    far, count = 0.0, 0
    for name in NAMES:
        assert len(mine[name]) == len(theirs[name]) > 0
        for one, other in zip(map(flat, mine[name]), map(flat, theirs[name]), strict=True):
            for a, b in zip(one, other, strict=True):
                a, b = (float(v) if str(v).lstrip("-").replace(".", "", 1).isdigit() else str(v) for v in (a, b))
                if isinstance(a, float) and isinstance(b, float):
                    far, count = max(far, abs(a - b)), count + 1
                else:
                    assert a == b, (name, one, other)
    assert count > 50, "log-likelihoods were compared"
    return far


def main() -> None:
    """Evaluate on both sides and compare."""
    url, folder = sys.argv[1:]
    os.chdir(TASKS)  # the tasks name their files without a folder
    state = ask(url, "/server_info")
    assert state["dtype"] == "float32", f"the server computes in {state['dtype']}: start it with --dtype float32"
    theirs = evaluate("hf", pretrained=folder, dtype="float32", device="cpu")
    print("scores:", *(f"{name} {scores}" for name, scores in theirs["scores"]), sep="\n  ")
    for way, more in WAYS.items():
        mine = evaluate("local-completions", model=folder, base_url=url + "/v1/completions", **more)
        far = farthest(mine, theirs)
        print(f"{way}: the farthest log-likelihood is {far:.1e} off, all else is equal")
        assert far <= CLOSE
    body = {"model": "default", "prompt": "The capital of France is Paris", "echo": True, "logprobs": 1}
    none, one = (ask(url, "/v1/completions", {**body, "max_tokens": count})["choices"][0] for count in (0, 1))
    assert none["logprobs"]["token_logprobs"] == one["logprobs"]["token_logprobs"][:-1], "max_tokens 0 scores the same"
    print("lm-eval", importlib.metadata.version("lm_eval"), "with transformers",
          importlib.metadata.version("transformers"), "ok")  # fmt: skip


if __name__ == "__main__":
    main()
