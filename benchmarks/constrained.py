"""Constrained output with a real model: is every answer valid, and what does a step cost more?

    python -m benchmarks.constrained valid [--algorithm EAGLE3]      ten answers to each of ten schemas
    python -m benchmarks.constrained cost [--algorithm EAGLE3]       time of a step with a grammar and without

`valid` reads every answer with `json` and checks it with the tests' own validator, which shares no code with the
library that makes the masks. `cost` compares steps of the same shape: the grammar there allows all text, so that the
same tokens come out as without one, up to rounding, and a third request follows a schema. Rounds alternate, and medians
are told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minispec import LLM, SamplingParams
from minispec.request import Grammar, Request

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


def step_seconds(llm: LLM, batch: int, grammar: Grammar | None) -> tuple[list[float], list[int]]:
    """Return the seconds of the decode steps of `batch` equal requests, and the tokens of one."""
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "Write a story about a bear as JSON."}])
    wish = SamplingParams(max_new_tokens=24, min_new_tokens=0, temperature=0, ignore_eos=True, grammar=grammar)
    requests = [Request(f"r{i}", prompt, wish) for i in range(batch)]
    scheduler, seconds = llm.scheduler, []
    for request in requests:
        scheduler.validate(request)
        scheduler.submit(request)
    while scheduler.has_work:
        steps, started = scheduler.metrics.plain_steps + scheduler.metrics.tree_steps, time.perf_counter()
        scheduler.step()
        if scheduler.metrics.plain_steps + scheduler.metrics.tree_steps > steps:
            seconds.append(time.perf_counter() - started)
    return seconds, requests[0].output_ids


@contextmanager
def timed(llm: LLM, seconds: list[float]) -> Iterator[None]:
    """Note how long the engine takes over the masks of each step."""
    engine, inner = llm.scheduler.engine, llm.scheduler.engine._constrain

    def constrain(*given: Any) -> Any:
        started = time.perf_counter()
        made = inner(*given)
        seconds.append(time.perf_counter() - started)
        return made

    engine._constrain = constrain
    yield
    engine._constrain = inner


def measure_cost(llm: LLM, batches: Sequence[int], rounds: int) -> None:
    """Print the median time of a step without a grammar, with one that allows all, and with a schema."""
    grammars = {
        "none": None, "anything": Grammar("regex", r"(.|\n)*"),
        "a schema": grammar_of(closed(title=WORD, text={"type": "string", "maxLength": 2000})),
    }  # fmt: skip
    for batch in batches:
        times: dict[str, list[float]] = {name: [] for name in grammars}
        masking: dict[str, list[float]] = {name: [] for name in grammars}
        outputs = {name: step_seconds(llm, batch, grammar)[1] for name, grammar in grammars.items()}
        if outputs["none"] != outputs["anything"]:
            print(f"batch {batch}: in {llm.scheduler.engine.model.norm.weight.dtype} one token came out differently")
        for _ in range(rounds):
            for name, grammar in grammars.items():
                with timed(llm, masking[name]):
                    times[name] += step_seconds(llm, batch, grammar)[0]
        medians = {name: statistics.median(seconds) * 1000 for name, seconds in times.items()}
        masks = {name: statistics.median(seconds) * 1000 if seconds else 0 for name, seconds in masking.items()}
        print(f"batch {batch}:", *(f"{name} {ms:.2f} ms ({ms / medians['none']:.3f}), masks {masks[name]:.2f} ms;"
                                   for name, ms in medians.items()), flush=True)  # fmt: skip


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("valid", "cost"))
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disable-torch-compile", action="store_true")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    llm = LLM(speculative_algorithm=args.algorithm, disable_torch_compile=args.disable_torch_compile,
              device=args.device)  # fmt: skip
    if args.what == "cost":
        measure_cost(llm, args.batch, args.rounds)
    elif wrong := check_valid(llm):
        sys.exit(f"{wrong} answers are not valid")


if __name__ == "__main__":
    main()
