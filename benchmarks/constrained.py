"""Constrained output with a real model: is every answer valid?

`python -m benchmarks.constrained [--algorithm EAGLE3]` asks for ten answers to each of ten schemas. It reads every
answer with `json` and checks it with the tests' own validator, which shares no code with the library that makes the
masks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from minispec import LLM, SamplingParams
from minispec.request import Grammar

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from json_schema import is_valid  # noqa: E402

WORD = {"type": "string", "maxLength": 8}
POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99},
         "y": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["x", "y"],
         "additionalProperties": False}  # fmt: skip


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": closed(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "a list of colours": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": ["red", "green", "blue"]}},
    "a car": closed(model=closed(maker=WORD, engine=closed(fuel={"enum": ["gas", "oil"]}))),
    "a part number": closed(code={"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"}),
    "an answer": closed(answer={"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, WORD, {"type": "null"}]}),
    "a matrix": {"type": "array", "minItems": 2, "maxItems": 2, "items": {
        "type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "integer", "minimum": 0, "maximum": 9}}},
    "settings": closed(on={"type": "boolean"}, loud={"type": "boolean"}, level={"enum": [1, 2, 3, "max"]}),
    "a shape": closed(kind={"const": "line"}, start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"})
    | {"$defs": {"point": POINT}},
    "a shopping list": {"type": "array", "maxItems": 2, "items": {
        **closed(item=WORD, count={"type": "integer", "minimum": 1, "maximum": 20}), "required": ["item"]}},
    "a menu": closed(dish=WORD, prices={"type": "object", "properties": {"small": {"enum": [1, 2]}, "big": {
        "enum": [3, 4]}}, "additionalProperties": False}),
}  # fmt: skip


def grammar_of(schema: dict[str, Any]) -> Grammar:
    """Return what constrains an output to a schema."""
    return Grammar("json_schema", json.dumps(schema))


def problem(text: str, schema: dict[str, Any]) -> str | None:
    """Return why a text is no JSON of a schema, or None if it is."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON ({error})"
    return None if is_valid(value, schema, schema.get("$defs", {})) else "not of the schema"


def check_valid(llm: LLM) -> int:
    """Ask for ten answers to each schema, one greedy and nine drawn; returns how many are not valid."""
    wrong = 0
    for what, schema in SCHEMAS.items():
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": f"Describe {what} in JSON."}])
        wishes = [
            SamplingParams(max_new_tokens=300, temperature=float(seed > 0), sampling_seed=seed,
                           grammar=grammar_of(schema)) for seed in range(10)
        ]  # fmt: skip
        answers = llm.generate([prompt] * len(wishes), wishes)
        bad = [(a["text"], a["meta_info"]["finish_reason"]) for a in answers
               if problem(a["text"], schema) or a["meta_info"]["finish_reason"]["type"] != "stop"]  # fmt: skip
        wrong += len(bad)
        print(f"{what}: {len(answers) - len(bad)} of {len(answers)} valid, e.g. {answers[1]['text']!r}", *bad)
    return wrong


def main() -> None:
    """Ask for the answers; the exit status is 1 if one is not valid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--disable-torch-compile", action="store_true")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    llm = LLM(speculative_algorithm=args.algorithm, disable_torch_compile=args.disable_torch_compile,
              device=args.device)  # fmt: skip
    if wrong := check_valid(llm):
        sys.exit(f"{wrong} answers are not valid")


if __name__ == "__main__":
    main()
