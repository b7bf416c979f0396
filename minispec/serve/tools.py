"""Calls of tools in a reply, found while it grows.

A call is a JSON object with a name and arguments, between tags or alone (`load/reply_formats.py`). `Calls` reads a
reply piece by piece, cut anywhere. Once a call has shown its name, which must be that of a tool offered, and has begun
its arguments, both go out as they come. The call counts when its object is complete and is JSON; one that is malformed
stays text. What went out of a call that breaks off afterwards cannot be taken back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from pydantic_core import from_json

from minispec.load.reply_formats import CallFormat
from minispec.output import overlap

MAX_DEPTH = 64  # of nested JSON, in bodies too; a deeper call is malformed
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
# Brackets, and strings, of which the last may have no end yet.
_PARTS = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*("?))|[{}\[\]]', re.DOTALL)
_BETWEEN, _OPEN, _OBJECT, _AFTER, _OVER = range(5)  # where in the reply: `_OPEN` is after a begin tag


class Piece(NamedTuple):
    """A piece of a reply: of its content, or of call number `call`: its name first, then its arguments, then its end.

    `end` is True where the call is complete, False where it turned out to be malformed: its text follows as content.
    """

    text: str = ""
    call: int | None = None
    name: str | None = None
    end: bool | None = None


class Calls:
    """Finds the calls in one reply. With `single` nothing is read beyond the first one."""

    def __init__(self, form: CallFormat, names: Collection[str], single: bool = False) -> None:
        self.form, self.names, self.single = form, frozenset(names), single
        self.complete = 0  # calls
        self._state = _BETWEEN
        self._rest = ""  # not looked at yet
        self._gap = ""  # white space that is content only if text follows
        self._before = ""  # what stood before the object that is being read: content, if it is malformed
        self._bare = form.bare  # whether an object that comes now is a call, tag or not
        self._spoken = False  # whether there is content
        self._started = 0  # calls of which a name went out
        self._new_object()
        self._out: list[Piece] = []

    def _new_object(self) -> None:
        self._object, self._depth, self._at = "", 0, 0  # read up to `_at`, at this depth of brackets
        self._number: int | None = None  # of the call, once its name went out
        self._name = ""
        self._first = self._sent = 0  # where in the object the arguments begin, and go on that did not go out
        self._stop: int | None = None  # where they end
        self._wrong = False  # whether they cannot become JSON

    def feed(self, text: str) -> list[Piece]:
        """Take the next piece of text, and return what has become certain."""
        self._rest += text
        steps = {_BETWEEN: self._between, _OPEN: self._open, _OBJECT: self._read, _AFTER: self._after}
        while self._rest and self._state in steps and steps[self._state]():
            pass
        if self._state == _OVER:
            self._rest = ""
        out, self._out = self._out, []
        return out

    def finish(self, cut: bool) -> list[Piece]:
        """Return what is left at the end of the reply; `cut` by a limit, a call whose name is known may stay half."""
        if self._state in (_OPEN, _OBJECT) and (not cut or self._number is None or self._wrong):
            self._malformed()
        if self._state == _BETWEEN:
            self._say(self._rest)
            if self._gap and not self.complete:
                self._out.append(Piece(self._gap))
        self._state = _OVER
        out, self._out = self._out, []
        return out

    # ---- the states; each returns whether it is worth to look again --------------------------------------------------

    def _between(self) -> bool:
        """Hand out content up to the next begin tag, or up to what may become one."""
        if self._bare and (start := self._rest.lstrip())[:1] == "{":
            self._before, self._gap = self._gap + self._rest[: -len(start)], ""
            return self._go(_OBJECT, start)
        at = self._rest.find(self.form.begin)
        if at < 0:
            at = len(self._rest) - overlap(self._rest, self.form.begin)
            self._say(self._rest[:at])
            self._rest = self._rest[at:]
            return False
        self._say(self._rest[:at])
        self._before, self._gap = self._gap + self.form.begin, ""
        return self._go(_OPEN, self._rest[at + len(self.form.begin) :])

    def _open(self) -> bool:
        start = self._rest.lstrip()
        self._before += self._rest[: len(self._rest) - len(start)]
        self._rest = start
        if start[:1] == "{":
            return self._go(_OBJECT, start)
        return bool(start) and self._malformed()

    def _read(self) -> bool:
        """Read on to the end of the object, and hand out its arguments as far as they go."""
        self._object, self._rest = self._object + self._rest, ""
        for part in _PARTS.finditer(self._object, self._at):
            if part[1] is not None and not part[2]:
                break  # a string that goes on
            self._at = part.end()
            if part[0] in "{[":
                if self._depth == 1 and self._number is None and (head := _HEAD.fullmatch(self._object, 0, self._at)):
                    if head[1] in self.names:
                        self._begin(head[1], self._at - 1)
                self._depth += 1
                if self._depth > MAX_DEPTH:
                    return self._malformed()
            elif part[0] in "]}":
                self._depth -= 1
                if self._depth == 1 and self._number is not None and self._stop is None:
                    self._stop = self._at
                if self._depth == 0:
                    self._object, self._rest = self._object[: self._at], self._object[self._at :]
                    return self._end()
        self._send()
        return False

    def _after(self) -> bool:
        """Skip the end tag, which may be missing."""
        start = self._rest.lstrip()
        if len(start) < len(self.form.end) and self.form.end.startswith(start):
            return False
        return self._go(_BETWEEN, start[len(self.form.end) :] if start.startswith(self.form.end) else self._rest)

    def _go(self, state: int, rest: str) -> bool:
        self._state, self._rest = state, rest
        return True

    # ---- an object ---------------------------------------------------------------------------------------------------

    def _begin(self, name: str, at: int) -> None:
        """Hand out the name of a call whose arguments begin at `at`."""
        self._number, self._name, self._first, self._sent = self._started, name, at, at
        self._started += 1
        self._out.append(Piece(call=self._number, name=name))

    def _send(self) -> None:
        """Hand out the arguments that came, unless they are no JSON any more: clients parse them as they come."""
        stop = len(self._object) if self._stop is None else self._stop
        if self._number is not None and stop > self._sent and not self._wrong:
            try:
                from_json(self._object[self._first : stop], allow_inf_nan=False, allow_partial="trailing-strings")
            except ValueError:
                self._wrong = True
                return
            self._out.append(Piece(self._object[self._sent : stop], self._number))
            self._sent = stop

    def _end(self) -> bool:
        """Take a complete object as a call, if it is one."""
        call = _read_call(self._object)
        if call is None or call[0] not in self.names:
            return self._malformed()
        if self._number is None:  # written in another order: there was no name before all was there
            self._begin(call[0], 0)
            self._out.append(Piece(json.dumps(call[1], ensure_ascii=False), self._number))
        elif not (head := _HEAD.match(self._object)) or call != (
            self._name, from_json(self._object[head.end() - 1 : self._stop])
        ):  # fmt: skip
            return self._malformed()  # a key stands there twice, and what went out was the wrong one
        else:
            self._send()
        self._out.append(Piece(call=self._number, end=True))
        self.complete += 1
        self._new_object()
        self._bare, self._before, self._gap = self.form.bare, "", ""
        return self._go(_OVER if self.single else _AFTER, self._rest)

    def _malformed(self) -> bool:
        """Make content of what was taken for the beginning of a call."""
        if self._number is not None:
            self._out.append(Piece(call=self._number, end=False))
        text = self._before + self._object
        self._new_object()
        self._before = ""
        self._say(text)
        return self._go(_BETWEEN, self._rest)

    def _say(self, text: str) -> None:
        """Hand out content, but for white space at its end."""
        text, self._gap = self._gap + text, ""
        said = text.rstrip()
        self._gap = text[len(said) :]
        if said:
            self._out.append(Piece(said.lstrip() if self.complete and not self._spoken else said))
            self._spoken, self._bare = True, False


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
