"""The keys of a JSON file that anybody may have written: each is read with its type, its range and both its spellings.

An error names file and key, what the key holds, and what it may hold. So a config with one wrong number is one line at
start, and no wrong shape, no wrong text and no error within a step.

Read next: `architectures.py` and `heads.py`, which read configs with it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from minispec.model_config import ModelError

REQUIRED: Any = object()  # a default: the key must be there
LARGEST = 2**31 - 1


class Keys:
    """The keys of one JSON object; `where` names it in errors."""

    def __init__(self, stated: Mapping[str, Any], where: str = "config.json") -> None:
        self.stated, self.where = stated, where

    def read(
        self, key: str, wanted: str, fits: Callable[[Any], bool], default: Any = REQUIRED, also: str | None = None
    ) -> Any:
        """Return the value of `key`, or of its other spelling `also`; the default if neither is there.

        null stands for a key that is not there, unless the default is a value, since readers disagree on that case.
        wanted: what the value must be, in words. fits: whether a value is so. Raises ModelError.
        """
        found = {name: self.stated[name] for name in (key, also) if name is not None and name in self.stated}
        given = {name: value for name, value in found.items() if value is not None}
        if not given and default is REQUIRED:
            raise ModelError(f"{self.where} lacks {key}, which must be {wanted}")
        if not given and (not found or default is None):
            return default
        for name, value in (given or found).items():
            if value is None or not fits(value):
                shown = "null" if value is None else reprlib.repr(value)
                raise ModelError(f"{self.where}: {name} must be {wanted}, got {shown}")
        first, *others = given.values()
        if any(other != first for other in others):
            said = " and ".join(f"{name} {reprlib.repr(value)}" for name, value in given.items())
            raise ModelError(f"{self.where}: {said} contradict each other; remove one of them")
        return first

    def whole(
        self, key: str, low: int = 1, high: int = LARGEST, default: Any = REQUIRED, also: str | None = None
    ) -> Any:
        """Return a whole number in [low, high]."""
        return self.read(key, f"a whole number {_range(low, high)}", lambda value: _is_whole(value, low, high),
                         default, also)  # fmt: skip

    def number(self, key: str, default: Any = REQUIRED, least: float = 0.0) -> Any:
        """Return a number above `least` as a float."""
        fits = lambda value: type(value) in (int, float) and least < value < 1e30  # noqa: E731
        value = self.read(key, f"a number above {least:g}", fits, default)
        return value if value is None else float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false; null is the default, as many files have it."""
        value = self.read(key, "true or false", lambda value: isinstance(value, bool), None)
        return default if value is None else value

    def text(self, key: str, default: Any = None) -> Any:
        """Return a string."""
        return self.read(key, "a string", lambda value: isinstance(value, str), default)

    def wholes(self, key: str, low: int = 0, high: int = LARGEST) -> list[int] | None:
        """Return a list of whole numbers in [low, high]; None if the key is not there."""
        fits = lambda value: isinstance(value, (list, tuple)) and all(_is_whole(n, low, high) for n in value)  # noqa: E731
        return self.read(key, f"a list of whole numbers {_range(low, high)}", fits, None)

    def within(self, key: str) -> Keys:
        """Return the keys of the object that `key` holds; no keys if it is not there."""
        stated = self.read(key, "an object", lambda value: isinstance(value, Mapping), None)
        return Keys(stated or {}, f"{self.where}: {key}")


def _range(low: int, high: int) -> str:
    """Return a range in words."""
    return f"of at least {low}" if high == LARGEST else f"from {low} to {high}"


def _is_whole(value: Any, low: int, high: int) -> bool:
    """Return whether a value is a whole number in [low, high]; true and false are none."""
    return type(value) is int and low <= value <= high


@contextmanager
def naming(flag: str, given: object) -> Iterator[None]:
    """Raise an error about what a flag names again, with the flag and what was given in front."""
    try:
        yield
    except ValueError as error:
        said = str(error)
        named = said.startswith((f"{flag} ", "--chat-template"))
        raise ModelError(said if named else f"{flag} {given}: {said}") from error
