"""A small JSON Schema validator, written from the standard, for the parts that our models and tests use."""

from __future__ import annotations

import re
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),), "boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def is_valid(value: Any, schema: dict[str, Any], components: dict[str, Any]) -> bool:
    """Tell whether a JSON value satisfies a schema, whose references lie in `components`; raises for unknown words."""
    inner = lambda value, schema: is_valid(value, schema, components)  # noqa: E731
    for word, wanted in schema.items():
        if word == "$ref":
            holds = inner(value, components[wanted.rsplit("/", 1)[-1]])
        elif word == "anyOf":
            holds = any(inner(value, option) for option in wanted)
        elif word == "oneOf":
            holds = sum(inner(value, option) for option in wanted) == 1
        elif word in ("enum", "const"):
            holds = any(type(value) is type(one) and value == one for one in (wanted if word == "enum" else [wanted]))
        elif word == "type":
            kinds = tuple(kind for name in ([wanted] if isinstance(wanted, str) else wanted) for kind in TYPES[name])
            holds = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
        elif word in ("minItems", "minLength", "maxItems", "maxLength"):
            sized = isinstance(value, list if word.endswith("Items") else str)
            holds = not sized or (len(value) >= wanted if word.startswith("min") else len(value) <= wanted)
        elif word in ("minimum", "maximum"):
            holds = not isinstance(value, (int, float)) or (value >= wanted if word == "minimum" else value <= wanted)
        elif word == "pattern":
            holds = not isinstance(value, str) or re.search(wanted, value) is not None
        elif word == "items":
            holds = not isinstance(value, list) or all(inner(item, wanted) for item in value)
        elif word == "properties":
            holds = not isinstance(value, dict) or all(inner(value[k], s) for k, s in wanted.items() if k in value)
        elif word == "required":
            holds = not isinstance(value, dict) or set(wanted) <= set(value)
        elif word == "additionalProperties":
            rest = set(value) - set(schema.get("properties", {})) if isinstance(value, dict) else set()
            holds = all(wanted is not False and (wanted is True or inner(value[name], wanted)) for name in rest)
        elif word in ("title", "description", "default", "$defs"):
            holds = True
        else:
            raise AssertionError(f"the validator does not know {word!r}")
        if not holds:
            return False
    return True
