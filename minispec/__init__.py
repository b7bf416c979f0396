"""minispec: a torch.compile-first speculative-decoding engine, one file per concern.

`LLM` is the interface in Python, and `python -m minispec.server` starts the server. Read next: `tree.py`, then
`verify.py`, `model.py`, `kv.py`, `attention.py`, `drafter.py`, `engine.py`, `scheduler.py`, and `server.py` last.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from minispec.request import RequestError, SamplingParams

__all__ = ["LLM", "Draft", "Drafter", "HostDrafter", "RequestError", "SamplingParams"]
WITH_TORCH = {"LLM": "llm", "Draft": "drafter", "Drafter": "drafter", "HostDrafter": "drafter"}


def __getattr__(name: str) -> Any:
    """Import the names that need torch when they are first used, so that `--help` does not wait for torch."""
    if name in WITH_TORCH:
        return getattr(import_module(f"minispec.{WITH_TORCH[name]}"), name)
    raise AttributeError(f"module 'minispec' has no attribute {name!r}")
