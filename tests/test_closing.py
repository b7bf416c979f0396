"""Schemas are read as closed: an object that names properties has no others, wherever it stands and however composed.

The examples say by hand what fits. Random schemas are compared with the validator of `json_schema.py`, which follows a
value through the schema as it is and rewrites nothing.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest
from json_schema import Said, is_valid
from llguidance import LLMatcher, LLTokenizer
from pydantic_models import MODELS, Customer

from minispec.asked.schemas import close_embedded, closed, compiled_form
from minispec.replies.constraint import constraint
from minispec.replies.formats import CALLS

BYTES = LLTokenizer("byte")
A, B = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
X = {"patternProperties": {"^x": {"type": "integer"}}}
DEFS = {"$defs": {"A": A, "B": B}}
A_REF, B_REF = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}


def accepts(source: str, text: str) -> bool:
    """Tell whether a compiled grammar allows a text, wholly."""
    matcher = LLMatcher(BYTES, source, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(list(text.encode()))
    return taken == len(text.encode()) and matcher.is_accepting()


def fits(schema: Any, value: Any) -> bool:
    """Tell whether a schema, as it is compiled, allows a value."""
    return accepts(LLMatcher.grammar_from_json_schema(compiled_form(schema)), json.dumps(value))


CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {  # what -> a schema, what fits, what does not
    "properties": (A, [{}, {"a": 1}], [{"a": 1, "x": 1}, {"x": 1}]),
    "a bare object stays open": ({"type": "object"}, [{"x": [1]}, {}], []),
    "required alone names nothing": ({"type": "object", "required": ["a"]}, [{"a": 1, "x": 2}], [{}]),
    "no properties": ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
    "a pattern": (X, [{"x1": 1}, {}], [{"y": 1}]),
    "what the schema says holds": ({**A, "additionalProperties": True}, [{"x": "y"}], [{"a": "y"}]),
    "and if it is a schema": ({**A, "additionalProperties": B}, [{"x": {"b": 1}}], [{"x": {"c": 1}}, {"x": 1}]),
    "a required name that is no property": ({**A, "required": ["r"]}, [{"a": 1, "r": [1]}], [{"r": 1, "s": 1}, {}]),
    "nested": ({"properties": {"o": {"properties": {"i": A}}}}, [{"o": {"i": {"a": 1}}}],
               [{"o": {"i": {"x": 1}}}, {"o": {"x": {}}}]),
    "items": ({"items": A}, [[{"a": 1}, {}]], [[{"x": 1}]]),
    "tuples": ({"type": "array", "prefixItems": [A, B], "items": False}, [[{"a": 1}, {"b": 1}]], [[{"b": 1}, {}]]),
    "definitions": ({**DEFS, "items": A_REF}, [[{"a": 1}]], [[{"b": 1}]]),
    "definitions elsewhere": ({"components": {"schemas": {"P": A}}, "$ref": "#/components/schemas/P"}, [{"a": 1}],
                              [{"x": 1}]),
    "recursion": ({"properties": {"next": {"$ref": "#"}}}, [{"next": {"next": {}}}], [{"next": {"x": 1}}]),
    "a property of a keyword's name": ({"properties": {"properties": {"type": "object"}, "allOf": A}},
                                       [{"properties": {"x": 1}, "allOf": {"a": 1}}], [{"allOf": {"x": 1}}]),
    "constants are no schemas": ({"const": {"properties": {"x": {}}}}, [{"properties": {"x": {}}}], []),
    "anyOf: each option": ({"anyOf": [A, B, {"type": "null"}]}, [{"a": 1}, {"b": 1}, None],
                           [{"a": 1, "b": 1}, {"x": 1}]),
    "anyOf: an open option": ({"anyOf": [{**A, "required": ["a"]}, {"type": "object", "required": ["z"]}]},
                              [{"a": 1}, {"z": 1, "x": 2}], [{"a": 1, "x": 2}]),
    "anyOf with properties beside it": ({**A, "anyOf": [B, {"properties": {"c": {"type": "integer"}}}]},
                                        [{"a": 1, "b": 1}, {"a": 1, "c": 1}], [{"a": 1, "b": 1, "c": 1}, {"x": 1}]),
    "anyOf of what is required": ({"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]},
                                                                              {"required": ["b"]}]},
                                  [{"a": 1}, {"b": 1}], [{}, {"a": 1, "x": 1}]),
    "oneOf": ({"oneOf": [{**A, "required": ["a"]}, {"properties": {"a": {"const": "x"}, "b": {}}, "required": ["a"]}]},
              [{"a": 1}, {"a": "x", "b": 2}], [{"a": 1, "b": 2}]),
    "allOf: the whole": ({"allOf": [A, B]}, [{"a": 1, "b": 2}, {"b": 2}, {}], [{"a": 1, "x": 2}, {"a": 1, "b": "x"}]),
    "allOf with properties beside it": ({"allOf": [A, B], "properties": {"c": {}}, "required": ["c"]},
                                        [{"a": 1, "b": 2, "c": 3}], [{"a": 1, "b": 2}, {"c": 3, "x": 1}]),
    "allOf of references": ({**DEFS, "properties": {"alone": A_REF}, "allOf": [A_REF, B_REF]},
                            [{"alone": {"a": 1}, "a": 1, "b": 2}], [{"alone": {"b": 2}}, {"x": 1}]),
    "allOf of one reference": ({**DEFS, "allOf": [A_REF], "description": "one"}, [{"a": 1}], [{"b": 1}]),
    "a reference with properties beside it": ({**DEFS, **A_REF, **B}, [{"a": 1, "b": 1}], [{"x": 1}]),
    "allOf with a part that is open": ({"allOf": [{**A, "additionalProperties": True}, B]}, [{"x": 1}], [{"b": "x"}]),
    "allOf with a part that is closed": ({"allOf": [{**A, "additionalProperties": False}, B]}, [{"a": 1}], [{"b": 1}]),
    "allOf with patterns": ({"allOf": [A, X]}, [{"a": 1, "x1": 1}], [{"y": 1}, {"x1": "y"}]),
    "allOf of anyOfs": ({"allOf": [{"anyOf": [A, B]}, {"anyOf": [X, {"properties": {"c": {}}}]}]},
                        [{"a": 1, "x1": 1}, {"b": 1, "c": 1}], [{"a": 1, "b": 1}, {"a": 1, "y": 1}]),
    "a union with properties beside it": ({"$defs": {"U": {"anyOf": [A, B]}}, "$ref": "#/$defs/U",
                                           "properties": {"k": {}}},
                                          [{"a": 1, "k": 1}, {"b": 1, "k": 1}], [{"a": 1, "b": 1}, {"k": 1, "x": 1}]),
    "unevaluatedProperties: false": ({"allOf": [A, B], "unevaluatedProperties": False}, [{"a": 1, "b": 1}], [{"x": 1}]),
    "unevaluatedProperties: false of no names": ({"type": "object", "unevaluatedProperties": False}, [{}], [{"x": 1}]),
    "then, where it is let pass": ({**A, "then": B, "x-guidance": {"lenient": True}}, [{"a": 1, "b": 1}], [{"x": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_an_object_that_names_properties_has_no_others(what: str) -> None:
    schema, right, wrong = CASES[what]
    for values, verdict in ((right, True), (wrong, False)):
        for value in values:
            assert fits(schema, value) is verdict, value
            if not {"components", "unevaluatedProperties", "then"} & schema.keys() and what != "recursion":
                assert is_valid(value, schema, DEFS["$defs"] | schema.get("$defs", {}), Said()) is verdict, value


def test_properties_keep_their_order() -> None:
    for schema, order in (
        ({"allOf": [B, A], "properties": {"z": {}}}, "baz"), ({"properties": {"z": {}}, "allOf": [B, A]}, "zba"),
        ({**DEFS, "$ref": "#/$defs/B", "properties": {"z": {}}, "allOf": [A]}, "bza"),
    ):  # fmt: skip
        for tried in itertools.permutations("abz"):
            assert fits(schema, dict.fromkeys(tried, 1)) is (tried == tuple(order)), (schema, tried)


def random_schema(rng: random.Random, depth: int) -> Any:
    """Return a schema of objects with few names, composed in parts."""
    schema: dict[str, Any] = {}
    if rng.random() < 0.7:
        schema["properties"] = {name: random_inner(rng, depth) for name in rng.sample("abc", rng.randrange(1, 3))}
    if rng.random() < 0.15:
        schema["required"] = [rng.choice("abc")]
    if rng.random() < 0.1:
        schema["additionalProperties"] = rng.choice([True, False, {"type": "integer"}])
    if depth and rng.random() < 0.4:
        schema["allOf"] = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    if depth and rng.random() < 0.4:
        schema["anyOf"] = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.3:
        schema["$ref"] = f"#/$defs/{rng.choice('PQ')}"
    return schema


def random_inner(rng: random.Random, depth: int) -> Any:
    return random_schema(rng, depth - 1) if depth and rng.random() < 0.2 else {"type": "integer"}


def test_random_compositions_are_closed_as_a_validator_reads_them() -> None:
    rng, verdicts, closings = random.Random(7), {True: 0, False: 0}, 0
    values = [dict.fromkeys(names, 1) for size in range(4) for names in itertools.combinations("abcx", size)]
    values += [{"a": {"b": 1}}, {"a": {"x": 1}}, {"b": {"c": 1}}]
    for _ in range(300):
        defs = {"P": random_schema(rng, 0) | {"$ref": "#/$defs/Q"}, "Q": random_schema(rng, 0)}
        defs["Q"].pop("$ref", None)
        schema = {**random_schema(rng, 2), "$defs": defs}
        matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(compiled_form(schema)), log_level=0)
        if matcher.get_error():
            assert "nsatisfiable" in matcher.get_error(), matcher.get_error()
            assert not any(is_valid(value, schema, defs, Said()) for value in values)
            continue
        for value in values:
            texts = [json.dumps(dict(order)) for order in itertools.permutations(value.items())]
            allowed = any(matcher.deep_copy().try_consume_tokens(list(t.encode())) == len(t) for t in texts)
            wanted = is_valid(value, schema, defs, Said())
            assert allowed is wanted, (schema, value)
            verdicts[wanted] += 1
            closings += is_valid(value, schema, defs) and not wanted
    assert min(verdicts.values()) > 500 and closings > 300, (verdicts, closings)


def invented(value: Any, schema: dict[str, Any]) -> list[Any]:
    """Return the value with a property too many, once for each of its objects that are models."""
    found = []

    def visit(part: Any, change: Any) -> None:
        if isinstance(part, list):
            for i, inner in enumerate(part):
                visit(inner, lambda new, i=i: change([*part[:i], new, *part[i + 1 :]]))
        elif isinstance(part, dict):
            for name, inner in part.items():
                visit(inner, lambda new, name=name: change({**part, name: new}))
            found.append(change({**part, "invented": 1}))

    visit(value, lambda new: new)
    return found


EXAMPLES: dict[str, dict[str, Any]] = {
    "customer": {"name": "Ann", "address": {"street": "Rue 1", "city": "Bern", "postcode": "3000"}, "billing": None},
    "recipe": {"title": "Tea", "ingredients": [{"name": "tea", "amount": 2.5, "unit": "g"}], "steps": ["Boil."]},
    "comment": {"text": "Hm", "replies": [{"text": "Yes", "replies": []}]},
    "household": {"town": "Chur", "pets": [{"kind": "dog", "good": True}, {"kind": "cat", "lives": 9}]},
    "song": {"title": "A", "artists": [{"name": "B", "age": 40}], "album": {"title": "C", "year": 1999, "tags": []}},
    "settings": {"theme": "dark", "fontSize": 12}, "empty": {},
    "event": {"id": "2f0c1b4e-7a53-4a63-9d0e-d7a3c1a0b111", "name": "Fair", "at": "2026-05-01T10:00:00Z",
              "until": None},
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_model_of_pydantic_s_takes_its_own_fields_at_every_level_and_no_others(name: str) -> None:
    model, value = MODELS[name], EXAMPLES[name]
    schema = model.model_json_schema()
    model.model_validate(value)
    assert fits(schema, value) and is_valid(value, schema, schema.get("$defs", {}), Said())
    assert '"additionalProperties"' not in json.dumps(schema)
    for longer in invented(value, schema):
        assert is_valid(longer, schema, schema.get("$defs", {})), "the standard allows it"
        assert not fits(schema, longer) and not is_valid(longer, schema, schema.get("$defs", {}), Said())


def test_all_twenty_models_compile_and_a_dictionary_stays_one() -> None:
    assert len(MODELS) == 20
    for model in MODELS.values():
        matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(compiled_form(model.model_json_schema())))
        assert not matcher.get_error(), model
    grades = MODELS["grades"].model_json_schema()
    assert fits(grades, {"student": "Ann", "grades": {"physics": [5], "music": []}})
    assert not fits(grades, {"student": "Ann", "grades": {}, "age": 9})


def test_the_fraction_of_a_second_ends() -> None:
    times = {"time": "23:59:59.{}+00:00", "date-time": "2026-05-01T23:59:59.{}+00:00"}
    for form, text in times.items():
        for schema in ({"format": form}, {"anyOf": [{"type": "string", "format": form}, {"type": "null"}]}):
            assert fits(schema, text.format("123456789")) and not fits(schema, text.format("1234567890"))
    assert fits({"format": "time", "maxLength": 60}, times["time"].format("1" * 30)), "its own bound holds"


def test_the_schema_of_a_tool_s_parameters_is_read_the_same() -> None:
    function = {"name": "f", "parameters": Customer.model_json_schema()}
    lark = constraint([{"type": "function", "function": function}], CALLS["hermes"])
    source = LLMatcher.grammar_from_lark(close_embedded(lark))
    call = {"name": "f", "arguments": EXAMPLES["customer"]}
    write = lambda call: f"<tool_call>\n{json.dumps(call)}\n</tool_call>"  # noqa: E731
    assert accepts(source, write(call)) is True
    for longer in invented(call["arguments"], {}):
        assert not accepts(source, write({**call, "arguments": longer}))


def test_what_is_embedded_in_a_grammar_is_closed_and_the_rest_of_it_stays() -> None:
    lark = 'start: "%json {" x // %json {"properties": \n x: %json ' + json.dumps(A) + ' "}" | %json {"type": "object"}'
    changed = close_embedded(lark)
    assert changed == lark.replace(json.dumps(A), json.dumps({**A, "additionalProperties": False}))
    assert close_embedded('start: "a"') == 'start: "a"'


def test_a_reference_that_cannot_be_followed_is_an_error_where_names_stand_beside_it() -> None:
    anchored = {"$defs": {"P": {**A, "$anchor": "p"}}}
    assert fits({**anchored, "$ref": "#p"}, {"a": 1}) and not fits({**anchored, "$ref": "#p"}, {"x": 1})
    for reference in ("#p", "#/$defs/missing", "other.json#/a", "p", "#/$defs/P/properties/9"):
        with pytest.raises(ValueError, match="must be a JSON pointer"):
            closed({**anchored, **B, "$ref": reference})
    circle = {"properties": {"a": {"$ref": "#", "properties": {"b": {}}}}}
    assert closed(circle)["properties"]["a"]["allOf"], "it is followed once"


MALFORMED = {"properties": [1], "patternProperties": 3, "required": {"a": 1}, "allOf": {"x": 1}, "anyOf": [1, None],
             "oneOf": "x", "$ref": [1], "items": None, "if": 7, "additionalProperties": "no"}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_malformed_is_a_value_error_here_or_left_to_the_compiler(size: int) -> None:
    for words in itertools.combinations(MALFORMED, size):
        broken = {word: MALFORMED[word] for word in words}
        for schema in (broken, {"items": broken}, {**DEFS, **A_REF, **broken}, {**DEFS, **broken, **B_REF, "title": 7}):
            if {"allOf", "oneOf"} & broken.keys():
                with pytest.raises(ValueError, match="must be an array"):
                    closed(schema)
            else:
                assert closed(schema)


@pytest.mark.parametrize("what", ["parts", "nothing", "copies", "words", "options"])
def test_a_hostile_composition_is_refused_before_it_costs_time(what: str) -> None:
    doubling = {f"D{i}": {"allOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 2} for i in range(40)}
    names = [{"properties": {f"n{i}": {}}} for i in range(20_000)]
    schema = {
        "parts": {"allOf": names}, "nothing": {"allOf": [{}] * 170_000}, "words": {f"w{i}": 1 for i in range(70_000)},
        "copies": {"$defs": doubling | {"D40": A}, "$ref": "#/$defs/D0", **B}, "options": {**A, "anyOf": names},
    }[what]  # fmt: skip
    started = time.thread_time()
    try:
        closed(schema)
    except ValueError as error:
        assert "too large" in str(error)
    else:
        assert what in ("words", "options")
    assert time.thread_time() - started < 20
