"""instructor against a server: objects of a model of pydantic's, by tools and by schemas, whole and streamed.

Run by `run.py`. The server needs a chat template with tools (`--chat-template hermes`) and `minispec[grammar]`. The
grammar makes every first answer valid, so instructor may not ask twice. Its mode JSON is left out, since that sends no
schema; streams have a schema of their own, in which nothing is required.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import instructor
import openai
from travel import Train


def main() -> None:
    """Ask in each of instructor's modes, and check what comes back."""
    plain = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="None", max_retries=0)
    wish: dict[str, Any] = {
        "model": "default", "response_model": Train, "max_retries": 0, "max_tokens": 200, "temperature": 0.7, "seed": 1,
        "messages": [{"role": "user", "content": "Invent a train."}],
    }  # fmt: skip
    modes = instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA
    for mode in modes:
        client = instructor.from_openai(plain, mode=mode)
        train, answer = client.chat.completions.create_with_completion(**wish)
        assert isinstance(train, Train) and 1 <= len(train.stops) <= 2 and answer.usage.completion_tokens <= 200
        seen = list(client.chat.completions.create_partial(**wish))
        assert seen and all(train.stops is None or len(train.stops) <= 2 for train in seen)
    print("instructor", importlib.metadata.version("instructor"), "with openai", importlib.metadata.version("openai"),
          "in modes", *(mode.name for mode in modes), "ok")  # fmt: skip


if __name__ == "__main__":
    main()
