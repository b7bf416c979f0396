"""The assistant's message while it grows: text in, and out come reasoning, content and calls of tools.

Read next: `tools.py`, which finds the calls.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

from minispec.load.reply_formats import CallFormat, ThoughtFormat
from minispec.output import overlap
from minispec.serve.tools import Calls, Piece


class Formats(NamedTuple):
    """How the served model writes calls and reasoning; None where that is not known, and so not looked for."""

    calls: CallFormat | None = None
    thoughts: ThoughtFormat | None = None


PLAIN_FORMATS = Formats()


@dataclass(frozen=True)
class Wish:
    """What a chat request says about calls and reasoning."""

    tools: tuple[dict[str, Any], ...] = ()  # that may be called; empty with tool_choice none
    must: bool = False  # the reply must be a call
    only: str | None = None  # the one tool to be called
    parallel: bool = True  # several calls in a reply
    separate: bool = True  # tell reasoning apart
    stream_reasoning: bool = True  # send reasoning as it comes, not at its end
    include_reasoning: bool = True


class Thoughts:
    """Tells a reply's reasoning from its answer while it grows: what stands between tags like <think> and </think>.

    Text arrives in pieces that end anywhere, so what may be the beginning of a tag is held back, and so is white space
    before it, which belongs to neither side. However a text is cut, the pieces add up to the same two texts. `inside`:
    the reply begins in its reasoning, since the prompt or the model's kind says so.
    """

    def __init__(self, form: ThoughtFormat, inside: bool) -> None:
        self.form, self.inside = form, inside
        self._held = ""  # not handed out yet
        self._opening = True  # nothing but white space has come, or the begin tag in part
        self._leading = False  # white space that comes now stands before the reasoning, or between it and the answer

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece, and return what of reasoning and of the answer has become certain."""
        self._held += text
        if self._opening:
            start = self._held.lstrip()
            if len(start) < len(self.form.begin) and self.form.begin.startswith(start):
                return "", ""
            self._opening = False
            if start.startswith(self.form.begin):
                self.inside, self._held = True, start[len(self.form.begin) :]
            self._leading = self.inside
        reasoning = self._reasoning() if self.inside else ""
        return reasoning, "" if self.inside else self._take(len(self._held))

    def finish(self) -> tuple[str, str]:
        """Return what is left at the end of the reply: half a tag is text, white space after reasoning is nothing."""
        left, self._held = self._held, ""
        if not self.inside:
            return "", left
        return (left if left.strip() else ""), ""

    def _reasoning(self) -> str:
        """Return the reasoning that is certain; its end tag ends it."""
        at = self._held.find(self.form.end)
        if at < 0:
            certain = self._held[: len(self._held) - overlap(self._held, self.form.end)].rstrip()
            return self._take(len(certain))
        self.inside = False
        reasoning = self._take(at).rstrip()
        self._held, self._leading = self._held[len(self.form.end) :], True
        return reasoning

    def _take(self, size: int) -> str:
        """Hand out the next `size` characters, without leading white space."""
        text, self._held = self._held[:size], self._held[size:]
        if self._leading:
            text = text.lstrip()
            self._leading = not text
        return text


class Message:
    """One assistant's message. `thinking`: whether the prompt ends inside its reasoning; None: not known."""

    def __init__(self, wish: Wish, formats: Formats, thinking: bool | None = None) -> None:
        self.wish = wish
        form = formats.thoughts if wish.separate else None
        self._thoughts = None if form is None else Thoughts(form, form.always if thinking is None else thinking)
        names = [tool["function"]["name"] for tool in wish.tools]
        self._calls = Calls(formats.calls, names, not wish.parallel) if names and formats.calls else None
        self.content = self.reasoning = ""
        self._withheld = ""  # reasoning, until it is complete
        self._by_number: dict[int, dict[str, Any]] = {}
        self._delta: dict[str, Any] = {}

    @property
    def called(self) -> bool:
        """Whether there is a complete call."""
        return self._calls is not None and self._calls.complete > 0

    def feed(self, text: str) -> None:
        """Add the next piece of text."""
        reasoning, answer = ("", text) if self._thoughts is None else self._thoughts.feed(text)
        self.think(reasoning)
        self._say(answer)

    def completes_call(self, text: str) -> bool:
        """Do what `feed` does, and return whether there is a call: the `Request.ends` of who wants only one."""
        self.feed(text)
        return self.called

    def finish(self, cut: bool) -> None:
        """Add what was held back; `cut`: a limit has ended the text."""
        if self._thoughts is not None:
            reasoning, answer = self._thoughts.finish()
            self._thoughts.inside = False
            self.think(reasoning)
            self._say(answer)
        if self._calls is not None:
            for piece in self._calls.finish(cut):
                self.take(piece)

    def delta(self) -> dict[str, Any]:
        """Return what came since the last call, as the delta of an event; {} for nothing."""
        delta, self._delta = self._delta, {}
        return delta

    def whole(self) -> dict[str, Any]:
        """Return the message so far."""
        calls = [{**call, "function": dict(call["function"])} for call in self._by_number.values()] or None
        content = None if calls and not self.content else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
        if self._thoughts is not None:
            message["reasoning_content"] = self.reasoning or None
        return message

    def think(self, text: str) -> None:
        """Add reasoning."""
        if self._thoughts is None or not self.wish.include_reasoning:
            return
        self.reasoning += text
        self._withheld += text
        if self._withheld and (self.wish.stream_reasoning or not self._thoughts.inside):
            self._delta["reasoning_content"] = self._delta.get("reasoning_content", "") + self._withheld
            self._withheld = ""

    def _say(self, text: str) -> None:
        """Add text that is no reasoning."""
        for piece in [Piece(text)] if self._calls is None else self._calls.feed(text):
            self.take(piece)

    def take(self, piece: Piece) -> None:
        """Add a piece of content or of a call."""
        if piece.call is None:
            self.content += piece.text
            if piece.text:
                self._delta["content"] = self._delta.get("content", "") + piece.text
            return
        if piece.name is not None:
            call: dict[str, Any] = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
                    "function": {"name": piece.name, "arguments": ""}}  # fmt: skip
            self._by_number[piece.call] = call
            new = {"index": piece.call, **call, "function": dict(call["function"])}
            self._delta.setdefault("tool_calls", []).append(new)
        elif piece.end is False:
            # What no event carried yet of a malformed call is taken back; what went out cannot be.
            del self._by_number[piece.call]
            if kept := [call for call in self._delta.pop("tool_calls", ()) if call["index"] != piece.call]:
                self._delta["tool_calls"] = kept
        elif piece.text:
            self._by_number[piece.call]["function"]["arguments"] += piece.text
            news = self._delta.setdefault("tool_calls", [])
            if not news or news[-1]["index"] != piece.call:
                news.append({"index": piece.call, "function": {"arguments": ""}})
            news[-1]["function"]["arguments"] += piece.text
