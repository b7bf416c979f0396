"""minispec: a torch.compile-first speculative-decoding engine, one file per concern.

`LLM` is the interface for use in Python, `python -m minispec.server` starts the server. Read next: `tree.py`, then
`verify.py`, `model.py`, `kv.py`, `attention.py`, `drafter.py`, `engine.py`, `scheduler.py`, and `server.py` last.
"""

from __future__ import annotations

from typing import Any

from minispec.request import RequestError, SamplingParams

__all__ = ["LLM", "RequestError", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import `LLM` when it is first asked for: it brings torch, and `--help` should not wait for that."""
    if name == "LLM":
        from minispec.llm import LLM

        return LLM
    raise AttributeError(f"module 'minispec' has no attribute {name!r}")
