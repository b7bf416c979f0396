"""Constrained output with a real model: is every answer valid, and the same without drafts?

`python -m benchmarks.constrained [--algorithm EAGLE3]` asks for ten answers to each of ten schemas, and for five to
each of twenty models of pydantic's (`pydantic_models.py`), whose schemas do not say that objects are closed. It reads
every answer with `json` and checks it with the tests' own validator, which shares no code with the library that makes
the masks; pydantic reads the answers to its models. All is asked for a second time with speculation off, and since it
computes in float32 every text must be the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from benchmarks.pydantic_models import MODELS
from minispec import LLM, SamplingParams
from minispec.request import Grammar

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from json_schema import Said, is_valid  # noqa: E402

MOST_TOKENS = 600  # room to finish
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


def problem(text: str, schema: dict[str, Any]) -> str | None:
    """Return why a text is no JSON of a schema as the server reads it, or None if it is."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON ({error})"
    return None if is_valid(value, schema, schema.get("$defs", {}), Said()) else "not of the schema"


def refusal(text: str, model: type[BaseModel]) -> str | None:
    """Return why a text is no JSON of a model of pydantic's, or None if it is."""
    try:
        model.model_validate_json(text)
    except ValidationError as error:
        return f"refused by pydantic ({error.errors()[0]})"
    return problem(text, model.model_json_schema())


def ask(llm: LLM, what: str, schema: dict[str, Any], count: int) -> tuple[list[dict[str, Any]], int]:
    """Return `count` answers to a schema, one greedy and the others drawn, and how many differ with speculation off."""
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": f"Describe {what} in JSON."}])
    both, grammar = [], Grammar("json_schema", json.dumps(schema))
    for speculative in (True, False):
        wishes = [
            SamplingParams(max_new_tokens=MOST_TOKENS, temperature=float(seed > 0), sampling_seed=seed,
                           speculative=speculative, grammar=grammar) for seed in range(count)
        ]  # fmt: skip
        both.append(llm.generate([prompt] * count, wishes))
    return both[0], sum(one["output_ids"] != other["output_ids"] for one, other in zip(*both, strict=True))


def check(llm: LLM) -> tuple[int, int, int]:
    """Ask for all answers; returns how many there are, how many are not valid, and how many drafts have changed."""
    cases = [(what, schema, 10, functools.partial(problem, schema=schema)) for what, schema in SCHEMAS.items()]
    cases += [(f"one {name}", model.model_json_schema(), 5, functools.partial(refusal, model=model))
              for name, model in MODELS.items()]  # fmt: skip
    asked = wrong = changed = 0
    for what, schema, count, complaint in cases:
        answers, differ = ask(llm, what, schema, count)
        bad = [(a["text"], a["meta_info"]["finish_reason"]) for a in answers
               if complaint(a["text"]) or a["meta_info"]["finish_reason"]["type"] != "stop"]  # fmt: skip
        asked, wrong, changed = asked + count, wrong + len(bad), changed + differ
        print(f"{what}: {count - len(bad)} of {count} valid, {count - differ} the same with speculation off, e.g. "
              f"{answers[1]['text']!r}", *bad, flush=True)  # fmt: skip
    return asked, wrong, changed


def main() -> None:
    """Ask for the answers; the exit status is 1 if one is not valid, or differs with speculation off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--disable-torch-compile", action="store_true")
    args = parser.parse_args()
    llm = LLM(speculative_algorithm=args.algorithm, dtype="float32", disable_torch_compile=args.disable_torch_compile)
    asked, wrong, changed = check(llm)
    print(f"{asked - wrong} of {asked} answers are valid, {asked - changed} the same with speculation off")
    sys.exit(int(wrong + changed > 0))


if __name__ == "__main__":
    main()
