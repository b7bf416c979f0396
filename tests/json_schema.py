"""A small JSON Schema validator, written from the standard, for the parts that our models and tests use.

Asked for it, it reads schemas as the server does, where an object that names properties has no others. It follows the
value through the schema as it stands, where the server rewrites the schema.
"""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

Schema = dict[str, Any]

TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),), "boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,),
    "array": (list,), "object": (dict,),
}  # fmt: skip
FORMATS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat, "date-time": datetime.datetime.fromisoformat, "uuid": uuid.UUID,
    "time": datetime.time.fromisoformat,
}  # fmt: skip
BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "minimum": lambda value, bound: value >= bound, "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound, "exclusiveMaximum": lambda value, bound: value < bound,
    "multipleOf": lambda value, bound: abs(value / bound - round(value / bound)) < 1e-6,
}  # fmt: skip
SIZED: dict[str, type] = {"Items": list, "Length": str, "Properties": dict}
PARTS = ("$ref", "allOf", "anyOf", "oneOf")  # describe the same value as what stands beside them


class Said(NamedTuple):
    """What schemas say of an object's properties."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    named: bool = False  # by properties or patternProperties, which close an object
    settled: bool = False  # by additionalProperties, which says all

    def and_(self, *others: Said) -> Said:
        """Return what is said by all of these."""
        each = (self, *others)
        return Said(frozenset().union(*(one.names for one in each)), frozenset().union(*(one.patterns for one in each)),
                    any(one.named for one in each), any(one.settled for one in each))  # fmt: skip

    def forbids(self, name: str) -> bool:
        """Tell whether an object may not have a property, since it is closed and nobody names it."""
        known = name in self.names or any(re.search(pattern, name) for pattern in self.patterns)
        return self.named and not self.settled and not known


def parts_of(schema: Schema, word: str, components: Schema) -> list[Any]:
    """Return the schemas under one of PARTS, a reference's target among them."""
    return [components[schema[word].rsplit("/", 1)[-1]]] if word == "$ref" else schema[word]


def said_by(schema: Any, components: Schema) -> Said:
    """Return what a schema says of an object, in all its parts."""
    if not isinstance(schema, dict):
        return Said()
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    own = Said(frozenset(properties or ()) | frozenset(schema.get("required", ())), frozenset(patterns or ()),
               properties is not None or patterns is not None, "additionalProperties" in schema)  # fmt: skip
    parts = [part for word in PARTS if word in schema for part in parts_of(schema, word, components)]
    return own.and_(*(said_by(part, components) for part in parts))


def is_valid(value: Any, schema: Any, components: Schema, beside: Said | None = None) -> bool:
    """Tell whether a JSON value satisfies a schema, whose references lie in `components`; raises for unknown words.

    beside: None reads the schema as the standard does. `Said()` reads it as the server does; a part of a schema is read
    with what is said beside it of the same object.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if beside is not None and isinstance(value, dict) and not any(word in schema for word in PARTS):
        said = beside.and_(said_by(schema, components))
        if any(said.forbids(name) for name in value):
            return False
    return all(_holds(word, value, schema, components, beside) for word in schema)


def _holds(word: str, value: Any, schema: Schema, components: Schema, beside: Said | None) -> bool:
    """Tell whether a value satisfies one keyword of a schema."""
    inner = lambda value, schema: is_valid(value, schema, components, None if beside is None else Said())  # noqa: E731
    wanted = schema[word]
    if word in PARTS:
        verdicts, parts = [], parts_of(schema, word, components)
        for i, part in enumerate(parts):
            around = beside
            if beside is not None:
                others = [{other: schema[other] for other in schema if other != word}]
                others += parts[:i] + parts[i + 1 :] if word == "allOf" else []
                around = beside.and_(*(said_by(other, components) for other in others))
            verdicts.append(is_valid(value, part, components, around))
        return sum(verdicts) == 1 if word == "oneOf" else any(verdicts) if word == "anyOf" else all(verdicts)
    if word in ("enum", "const"):
        return any(type(value) is type(one) and value == one for one in (wanted if word == "enum" else [wanted]))
    if word == "type":
        kinds = tuple(kind for name in ([wanted] if isinstance(wanted, str) else wanted) for kind in TYPES[name])
        return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    if word[3:] in SIZED and word[:3] in ("min", "max"):
        sized = isinstance(value, SIZED[word[3:]])
        return not sized or (len(value) >= wanted if word.startswith("min") else len(value) <= wanted)
    if word in BOUNDS:
        return isinstance(value, bool) or not isinstance(value, (int, float)) or BOUNDS[word](value, wanted)
    if word == "pattern":
        return not isinstance(value, str) or re.search(wanted, value) is not None
    if word == "format":
        return not isinstance(value, str) or _is_of_format(value, wanted)
    if word in ("items", "prefixItems"):
        if not isinstance(value, list):
            return True
        if word == "items":
            return all(inner(item, wanted) for item in value[len(schema.get("prefixItems", ())) :])
        return all(inner(item, one) for item, one in zip(value, wanted, strict=False))
    if word in ("properties", "patternProperties", "additionalProperties", "required"):
        return not isinstance(value, dict) or _has_properties(word, value, schema, inner)
    if word in ("title", "description", "default", "examples", "discriminator", "$defs"):
        return True
    raise AssertionError(f"the validator does not know {word!r}")


def _has_properties(word: str, value: Schema, schema: Schema, inner: Callable[[Any, Any], bool]) -> bool:
    """Tell whether an object's properties satisfy a keyword about them."""
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    if word == "required":
        return set(schema[word]) <= set(value)
    if word == "properties":
        return all(inner(value[name], one) for name, one in properties.items() if name in value)
    if word == "patternProperties":
        return all(inner(value[name], one) for pattern, one in patterns.items() for name in value
                   if re.search(pattern, name))  # fmt: skip
    rest = [name for name in value if name not in properties and not any(re.search(p, name) for p in patterns)]
    return all(inner(value[name], schema[word]) for name in rest)


def _is_of_format(text: str, name: str) -> bool:
    try:
        FORMATS[name](text)
    except ValueError:
        return False
    return True
