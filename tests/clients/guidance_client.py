"""guidance against a server, by the fields of vLLM and by those of SGLang: choices, patterns, schemas, grammars.

Run by `run.py`. The server needs `minispec[grammar]`. For vLLM guidance sends a grammar in its newer and its older
form at once, both in llguidance's Lark.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from typing import Any

import guidance
import pydantic
from guidance.models.experimental import SglangModel, VLLMModel


class Stop(pydantic.BaseModel):
    """A stop of a train."""

    town: str = pydantic.Field(max_length=12)
    minute: int = pydantic.Field(ge=0, le=59)


def ask(lm: Any, question: str, answer: Any) -> Any:
    """Return the chat with a question and an answer of this form."""
    with guidance.user():
        lm += question
    with guidance.assistant():
        lm += answer
    return lm


def main() -> None:
    """Ask in both forms, and check what comes back."""
    for kind in (VLLMModel, SglangModel):
        lm = kind("default", base_url=sys.argv[1] + "/v1", api_key="None", echo=False)
        assert ask(lm, "Red, or blue?", guidance.select(["red", "blue"], name="colour"))["colour"] in ("red", "blue")
        code = ask(lm, "A code, please.", guidance.gen("code", regex="[A-Z]{3}-[0-9]{2}"))["code"]
        assert re.fullmatch("[A-Z]{3}-[0-9]{2}", code)
        both = ask(lm, "A pair.", guidance.gen("word", regex="[a-z]{3}") + ": " + guidance.gen("number", regex="[0-9]"))
        assert re.fullmatch("[a-z]{3}", both["word"]) and both["number"].isdecimal()
        stop = json.loads(ask(lm, "A stop.", guidance.json("stop", schema=Stop))["stop"])
        assert Stop.model_validate(stop) and stop.keys() == Stop.model_fields.keys()
    print("guidance", importlib.metadata.version("guidance"), "with openai", importlib.metadata.version("openai"),
          "as vLLM and as SGLang ok")  # fmt: skip


if __name__ == "__main__":
    main()
