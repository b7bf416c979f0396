"""Calls of tools in a reply, found while it grows.

A call is a JSON object with a name and arguments, between tags or alone (`formats.py`). `Calls` reads a
reply piece by piece, cut anywhere. Once a call has shown its name, which must be that of a tool offered, and has begun
its arguments, both go out as they come. The call counts when its object is complete and is JSON; one that is malformed
stays text. What went out of a call that breaks off afterwards cannot be taken back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple, cast

from pydantic_core import from_json

from minispec.output import overlap
from minispec.replies.formats import CallFormat

MAX_DEPTH = 64  # of nested JSON, in bodies too; a deeper call is malformed
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
# Brackets, and strings, of which the last may have no end yet.
_PARTS = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*("?))|[{}\[\]]', re.DOTALL)


class Piece(NamedTuple):
    """A piece of a reply: of its content, or of a `call`: its name first, then its arguments, then its end.

    `end` is True where the call is complete, False where it turned out to be malformed: its text follows as content.
    """

    text: str = ""
    call: bool = False
    name: str | None = None
    end: bool | None = None


class Calls:
    """Finds the calls in one reply. With `single` nothing is read beyond the first one."""

    def __init__(self, form: CallFormat, names: Collection[str], single: bool = False) -> None:
        self.form, self.names, self.single = form, frozenset(names), single
        self.complete = 0  # calls
        self._rest = ""  # what is not certain yet: it may be a call from its first character on
        self._gap = ""  # white space before that, which is content only if text follows
        self._bare = form.bare  # whether an object that comes now is a call, tag or not
        self._spoken = False  # whether there is content
        self._ended = self._over = False  # whether an end tag may come, or nothing any more
        self._out: list[Piece] = []
        self._new_object()

    def _new_object(self) -> None:
        self._at = self._depth = 0  # where in the rest to read on, at which depth of brackets
        self._name: str | None = None  # of the call, once that went out
        self._first = self._sent = 0  # where in the rest its arguments begin, and where they go on that did not go out
        self._stop: int | None = None  # where they end
        self._wrong = False  # whether they cannot become JSON

    def feed(self, text: str) -> list[Piece]:
        """Take the next piece of text, and return what has become certain."""
        self._rest += text
        while self._rest and not self._over and self._look():
            pass
        out, self._out = self._out, []
        return out

    def finish(self, cut: bool) -> list[Piece]:
        """Return what is left at the end of the reply; `cut` by a limit, a call whose name is known may stay half."""
        if not self._over and not self._ended and (not cut or self._name is None or self._wrong):
            self._speak(len(self._rest))
            if self._gap and not self.complete:
                self._out.append(Piece(self._gap))
        self._over = True
        return self.feed("")

    def _look(self) -> bool:
        """Take what is certain from the beginning of the rest, and return whether it is worth to look again."""
        text, begin, end = self._rest, self.form.begin, self.form.end
        start = text.lstrip()
        if self._ended:
            if len(start) < len(end) and end.startswith(start):
                return False
            self._ended, self._rest = False, start[len(end) :] if start.startswith(end) else text
            return True
        if not (self._bare and start[:1] == "{"):
            at = text.find(begin)
            if at:
                self._speak(at if at > 0 else len(text) - overlap(text, begin))
                return at > 0
            start = text[len(begin) :].lstrip()
            if start[:1] != "{":
                return bool(start) and self._speak(len(text) - len(start))
        return self._read(len(text) - len(start))

    def _read(self, start: int) -> bool:
        """Read on in the object that begins at `start`, and hand out its arguments as far as they go."""
        for part in _PARTS.finditer(self._rest, max(self._at, start)):
            if part[1] is not None and not part[2]:
                break  # a string that goes on
            self._at = part.end()
            if part[0] in "{[":
                self._depth += 1
                if self._depth == 2 and self._name is None:
                    head = _HEAD.fullmatch(self._rest, start, self._at)
                    if head and head[1] in self.names:
                        self._begin(head[1], self._at - 1)
                if self._depth > MAX_DEPTH:
                    return self._speak(len(self._rest))
            elif part[0] in "]}":
                self._depth -= 1
                if self._depth == 1 and self._name is not None and self._stop is None:
                    self._stop = self._at
                if self._depth == 0:
                    return self._end(start)
        self._send(len(self._rest) if self._stop is None else self._stop)
        return False

    def _begin(self, name: str, at: int) -> None:
        """Hand out the name of a call whose arguments begin at `at`."""
        self._name, self._first, self._sent = name, at, at
        self._out.append(Piece(call=True, name=name))

    def _send(self, stop: int) -> None:
        """Hand out the arguments up to `stop`, unless they are no JSON any more: clients parse them as they come."""
        if self._name is not None and stop > self._sent and not self._wrong:
            try:
                from_json(self._rest[self._first : stop], allow_inf_nan=False, allow_partial="trailing-strings")
            except ValueError:
                self._wrong = True
                return
            self._out.append(Piece(self._rest[self._sent : stop], True))
            self._sent = stop

    def _end(self, start: int) -> bool:
        """Take a complete object as a call, if it is one."""
        call = _read_call(self._rest[start : self._at])
        if call is None or call[0] not in self.names:
            return self._speak(self._at)
        if self._name is None:  # written in another order: there was no name before all was there
            self._begin(call[0], 0)
            self._out.append(Piece(json.dumps(call[1], ensure_ascii=False), True))
        elif call != (self._name, from_json(self._rest[self._first : self._stop])):
            return self._speak(self._at)  # a key stands there twice, and what went out was the wrong one
        else:
            self._send(cast(int, self._stop))
        self._out.append(Piece(call=True, end=True))
        self.complete += 1
        self._bare, self._gap, self._rest = self.form.bare, "", self._rest[self._at :]
        self._ended, self._over = True, self.single
        self._new_object()
        return True

    def _speak(self, size: int) -> bool:
        """Make content of so much of the rest, but for white space at its end; a call that began there was none."""
        if self._name is not None:
            self._out.append(Piece(call=True, end=False))
        self._new_object()
        text, self._rest = self._gap + self._rest[:size], self._rest[size:]
        said = text.rstrip()
        self._gap = text[len(said) :]
        if said:
            self._out.append(Piece(said.lstrip() if self.complete and not self._spoken else said))
            self._spoken, self._bare = True, False
        return True


def _read_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a call, or None if the text is no JSON object with these."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    arguments = {} if arguments is None else arguments
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call, and of one that was cut what came of them; {} if that is no JSON."""
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
