"""JSON schemas in the form that is compiled: checked, bounded and closed. A closed schema allows no unnamed properties.

By the standard an object may have properties that its schema does not name, and a small model keeps inventing such
properties until its tokens run out. Other servers read such a schema as closed, and so does `closed`: if `properties`
or `patternProperties` name properties, the object has no others, unless `additionalProperties` or
`unevaluatedProperties` says which others it may have. `{"type": "object"}` names none and stays open.

A schema may describe an object in parts: by `allOf`, `anyOf`, `oneOf`, `$ref` and the keywords beside them. A part
that allowed only its own names would forbid the names of the other parts. So each part allows its own names and those
of the parts beside it, and the object may have all these names and no others. An option of `anyOf` or `oneOf` is not
beside another option. A `$ref` that has names beside it is replaced by a copy of its target. A `$ref` alone stays,
since its target is closed in its own place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

# Bound on the least common multiple of all `multipleOf` of a number: an automaton has a state for each remainder.
MOST_MULTIPLE = 10_000
MOST_WORK = 200_000  # bound on the keywords and names that closing a schema reads and copies; copies can hold copies
# The next two bounds keep small models from writing without end: whitespace in JSON, digits of a second's fraction.
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"
MOST_CHARACTERS = {"time": 24, "date-time": 35}  # of a text in this format; room for nine digits of the fraction

_PARTS = ("allOf", "anyOf", "oneOf", "$ref")  # describe the same object as the keywords beside them
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # from names to schemas
_DATA = ("const", "enum", "default", "examples", "required")  # hold no schemas
_EMBEDDED = re.compile(r"%json\s*")

T = TypeVar("T")


def compiled_form(schema: Any) -> str:
    """Return a schema as llguidance gets it: closed and bounded; ValueError if it is no schema, or too large."""
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a JSON schema must be an object or a boolean, got {type(schema).__name__}")
    check_multiples(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(own := schema.get("x-guidance", {}), dict):
        raise ValueError("x-guidance must be an object")
    return json.dumps({**closed(schema), "x-guidance": {"whitespace_pattern": WHITESPACE, **own}})


# ---- schemas embedded in a grammar in Lark ---------------------------------------------------------------------------


def close_embedded(lark: str) -> str:
    """Return a grammar in llguidance's Lark whose embedded schemas are closed; ValueError if one is too large."""
    pieces, copied = [], 0
    for start, end, schema in _embedded(lark):
        if start >= copied and (now := closed(schema)) != schema:
            pieces += [lark[copied:start], json.dumps(now)]
            copied = end
    lark = "".join([*pieces, lark[copied:]])
    for _, _, schema in _embedded(lark):
        check_multiples(schema)
    return lark


def _embedded(lark: str) -> Iterator[tuple[int, int, Any]]:
    """Yield where each schema in a Lark grammar begins, where it ends, and the schema."""
    decoder = json.JSONDecoder()
    for found in _EMBEDDED.finditer(lark):
        try:
            schema, end = decoder.raw_decode(lark, found.end())
        except ValueError:  # it is in a comment, or it is not valid and compiling will report that
            continue
        yield found.end(), end, schema


# ---- bounds ----------------------------------------------------------------------------------------------------------


def check_multiples(schema: Any) -> None:
    """Raise ValueError if `multipleOf` could make an automaton of more than MOST_MULTIPLE states.

    No limit of llguidance bounds these automata. Several numbers in one allOf become one automaton, whose states are
    their least common multiple. So the bound is on the least common multiple of all numbers in the schema.
    """
    common = 1
    for value in _multiples(schema):
        number = Decimal(repr(value)).as_tuple()
        digits = int("".join(map(str, number.digits))) * 10 ** max(int(number.exponent), 0)
        if digits > 0 and (common := math.lcm(common, digits)) > MOST_MULTIPLE:
            raise ValueError("multipleOf is bounded: the least common multiple of all in a schema, decimal points left "
                             f"out, may be {MOST_MULTIPLE}, got {value!r} among them")  # fmt: skip


def _multiples(value: Any) -> Iterator[int | float]:
    """Yield all numbers under `multipleOf` in a schema, but not properties of that name."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            found = value.get("multipleOf")
            if isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found):
                yield found
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


# ---- closing ---------------------------------------------------------------------------------------------------------


def closed(schema: Any) -> Any:
    """Return a schema that allows only the properties it names, with bounded times; ValueError if it is too large."""
    return _Closing(schema).close(schema)


class Names(NamedTuple):
    """What a schema or a part of one says of an object's properties. The names are keys, in the schema's order."""

    properties: Mapping[str, bool] = {}
    patterns: Mapping[str, bool] = {}
    named: bool = False  # whether there are `properties` or `patternProperties`
    settled: bool = False  # whether the schema itself says which other properties there may be


NOTHING = Names()


class _Closing:
    """Closes one document, within which references lead from place to place."""

    def __init__(self, document: Any) -> None:
        self.document, self.left = document, MOST_WORK
        self.followed: list[str] = []  # the references that are being followed, outermost first

    def close(self, schema: Any, beside: Names = NOTHING) -> Any:
        """Return a schema that allows only its own names and those in `beside`, of other parts of the same object."""
        if schema is True and beside.named:
            schema = {}
        if not isinstance(schema, dict):
            return schema
        self._spend(len(schema))
        if schema.get("unevaluatedProperties") is False and beside == NOTHING:  # llguidance lacks this keyword
            schema = {word: value for word, value in schema.items() if word != "unevaluatedProperties"}
            beside = Names(named=True)
        parts = [word for word in schema if word in _PARTS]  # a single part is beside no other: nobody needs its names
        says = {word: self._says(word, value) for word, value in schema.items() if parts != [word]}
        done: dict[str, Any] = {}
        for word, value in schema.items():
            if word in _PARTS:
                others = self._union([beside, *(names for other, names in says.items() if other != word)])
                for key, closed_part in self._close_part(word, value, others).items():
                    done[key] = done[key] + closed_part if key in done else closed_part
            else:
                done[word] = self._close_inner(word, value)
        if not any(schema[word] for word in parts):
            done |= self._closure(says, self._union([beside, *says.values()]))
        if isinstance(form := schema.get("format"), str) and form in MOST_CHARACTERS:
            done.setdefault("maxLength", MOST_CHARACTERS[form])
        return done

    def _close_part(self, word: str, value: Any, others: Names) -> dict[str, Any]:
        """Return a keyword with its schemas closed; they describe an object to which `others` gives names too."""
        if word == "$ref":
            target = None if others == NOTHING else self._follow(value, partial(self.close, beside=others))
            return {word: value} if target is None else {"allOf": [target]}
        if not isinstance(value, list):
            raise ValueError(f"{word} must be an array")
        if word != "allOf":
            return {word: [self.close(option, others) for option in value]}
        says = [self._names(part) for part in value] if len(value) > 1 else []
        return {word: [self.close(part, self._union([*says[:i], *says[i + 1 :], others]))
                       for i, part in enumerate(value)]}  # fmt: skip

    def _close_inner(self, word: str, value: Any) -> Any:
        """Return the value of any other keyword; its schemas describe other values, and each is closed by itself."""
        if word in _DATA:
            return value
        if word in _MAPS and isinstance(value, dict):
            return {name: self.close(schema) for name, schema in value.items()}
        return [self.close(schema) for schema in value] if isinstance(value, list) else self.close(value)

    def _closure(self, says: Mapping[str, Names], whole: Names) -> dict[str, Any]:
        """Return the keywords to add to a schema without parts, so that only the names of the `whole` are allowed."""
        if not whole.named or whole.settled:
            return {}
        own = says.get("properties", NOTHING).properties, says.get("patternProperties", NOTHING).patterns
        if whole.properties.keys() <= own[0].keys() and whole.patterns.keys() <= own[1].keys():
            return {"additionalProperties": False}
        return {"allOf": [{"properties": dict(whole.properties), "patternProperties": dict(whole.patterns),
                           "additionalProperties": False}]}  # fmt: skip

    # ---- what is said of an object -----------------------------------------------------------------------------------

    def _names(self, schema: Any) -> Names:
        """Return what all parts of a schema say of an object."""
        return self._union(self._says(*item) for item in schema.items()) if isinstance(schema, dict) else NOTHING

    def _says(self, word: str, value: Any) -> Names:
        """Return what a keyword of a schema says of an object."""
        if word == "properties" and isinstance(value, dict):
            return Names(dict.fromkeys(value, True), named=True)
        if word == "patternProperties" and isinstance(value, dict):
            return Names(patterns=dict.fromkeys(value, True), named=True)
        if word == "required" and isinstance(value, list):
            return Names(dict.fromkeys((name for name in value if isinstance(name, str)), True))
        if word in ("additionalProperties", "unevaluatedProperties"):
            return Names(settled=True)
        if word == "$ref":
            return self._follow(value, self._names) or Names(settled=True)
        if word in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
            return self._union(map(self._names, value))
        return self._names(value) if word in ("if", "then", "else") else NOTHING

    def _union(self, said: Iterable[Names]) -> Names:
        """Return what several parts say of an object."""
        properties: dict[str, bool] = {}
        patterns: dict[str, bool] = {}
        named = settled = False
        for names in said:
            self._spend(1 + len(names.properties) + len(names.patterns))
            properties.update(names.properties)
            patterns.update(names.patterns)
            named, settled = named or names.named, settled or names.settled
        return Names(properties, patterns, named, settled)

    def _follow(self, reference: Any, use: Callable[[Any], T]) -> T | None:
        """Return what `use` makes of the target of a reference; None if the reference leads in a circle."""
        if not isinstance(reference, str) or reference in self.followed:
            return None
        target, (first, *steps) = self.document, unquote(reference).split("/")
        try:
            if first != "#":
                raise LookupError
            for step in steps:
                step = step.replace("~1", "/").replace("~0", "~")
                target = target[int(step) if isinstance(target, list) and step.isdecimal() else step]
        except (LookupError, TypeError):
            raise ValueError(f"$ref {reference[:100]!r} must be a JSON pointer within the schema, such as "
                             "'#/$defs/name', since there are other keywords beside it") from None  # fmt: skip
        self.followed.append(reference)
        try:
            return use(target)
        finally:
            self.followed.pop()

    def _spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise ValueError("the schema is too large, with a copy for each $ref that has other keywords beside it")
