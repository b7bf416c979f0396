"""minispec: a torch.compile-first speculative-decoding engine, one file per concern.

`LLM` is the offline face, `python -m minispec.server` the served one. Read next: `model.py`, then `attention.py`,
`verify.py`, `engine.py` and `scheduler.py`.
"""

from minispec.llm import LLM
from minispec.request import RequestError, SamplingParams

__all__ = ["LLM", "RequestError", "SamplingParams"]
