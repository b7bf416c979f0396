"""outlines against a server, by the fields of vLLM and by those of SGLang: types of every kind, whole and streamed.

Run by `run.py`. The server needs `minispec[grammar]`. A grammar of outlines' own is Lark, whose first rule is `?start`.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from typing import Any, Literal

import openai
import outlines
import pydantic
from outlines import grammars
from outlines.types import CFG, JsonSchema, Regex
from travel import Stop, Train


def check(model: Any) -> None:
    """Ask for each type, and check what comes back."""
    wish: dict[str, Any] = {"max_tokens": 200, "temperature": 0.7, "seed": 1}
    text = model("Invent a train.", Train, **wish)
    train = Train.model_validate_json(text)
    assert set(pydantic.TypeAdapter(dict).validate_json(text)) == set(Train.model_fields) and 1 <= len(train.stops) <= 2
    assert "".join(model.stream("Invent a train.", Train, **wish)) == text
    assert model("Red, or blue?", Literal["red", "blue"], **wish) in ("red", "blue")
    assert model("How many towns?", int, **wish).lstrip("+-").isdecimal()
    assert re.fullmatch("[A-Z]{3}-[0-9]{2}", model("A part number.", Regex("[A-Z]{3}-[0-9]{2}"), **wish))
    sum_ = model("What is one and one?", CFG(grammars.arithmetic), **{**wish, "max_tokens": 12})
    assert sum_ and not set(sum_) - set("0123456789.eE+-*/() \t"), sum_


def main() -> None:
    """Ask in both forms."""
    client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="None", max_retries=0)
    for make in (outlines.from_vllm, outlines.from_sglang):
        check(make(client, "default"))
    terse = JsonSchema(Stop.model_json_schema(), whitespace_pattern=" ?")  # only vLLM is told the pattern
    assert "\n" not in outlines.from_vllm(client, "default")("A stop.", terse, max_tokens=200)
    print("outlines", importlib.metadata.version("outlines"), "with openai", importlib.metadata.version("openai"),
          "as vLLM and as SGLang ok")  # fmt: skip


if __name__ == "__main__":
    main()
