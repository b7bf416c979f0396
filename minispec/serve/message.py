"""The assistant's message while it grows: text becomes blocks of reasoning, of text, and calls of tools.

Read next: `replies/thoughts.py` and `replies/calls.py`, which take the text apart.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from minispec.replies.calls import Calls, Piece
from minispec.replies.formats import Formats
from minispec.replies.thoughts import Thoughts


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


class Block:
    """A part of a message that grows until the next begins: reasoning, text, or a call, which has the tool's name."""

    def __init__(self, kind: str, number: int, name: str = "") -> None:
        self.kind, self.number, self.name = kind, number, name  # number: among the blocks that were told of
        self.id, self.text, self.status = uuid.uuid4().hex, "", "in_progress"
        self.broken = False  # a call that turned out to be none: its text follows as text


class Change(NamedTuple):
    """What happened to a block: `begin`, `grow` by a text, or `end`."""

    what: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""


class Message:
    """One assistant's message: a machine that begins, grows and ends blocks, one after the other.

    The dialects are tables over its changes: a chat's deltas here, the events of `responses.py` and `messages.py`.
    `thinking`: whether the prompt ends inside the message's reasoning; None: not known.
    """

    def __init__(self, wish: Wish, formats: Formats, thinking: bool | None = None) -> None:
        self.wish = wish
        form = formats.thoughts if wish.separate else None
        self._thoughts = None if form is None else Thoughts(form, form.always if thinking is None else thinking)
        names = [tool["function"]["name"] for tool in wish.tools]
        self._calls = Calls(formats.calls, names, not wish.parallel) if names and formats.calls else None
        self._told: list[Block] = []
        self._open: Block | None = None
        self._changes: list[Change] = []  # that nobody has taken

    @property
    def blocks(self) -> list[Block]:
        """The message so far."""
        return [block for block in self._told if not block.broken]

    @property
    def called(self) -> bool:
        """Whether there is a complete call."""
        return self._calls is not None and self._calls.complete > 0

    def text(self, kind: str) -> str:
        """Return the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def feed(self, text: str) -> None:
        """Add the next piece of text."""
        if self._thoughts is not None:
            reasoning, text = self._thoughts.feed(text)
            self._think(reasoning)
        self._say(text)

    def completes_call(self, text: str) -> bool:
        """Do what `feed` does, and return whether there is a call: `Request.ends` where only one is wanted."""
        self.feed(text)
        return self.called

    def finish(self, cut: bool) -> None:
        """Add what was held back, and end the last block; `cut`: a limit has ended the text.

        A message without any block gets a text that is empty.
        """
        if self._thoughts is not None:
            reasoning, answer = self._thoughts.finish()
            self._think(reasoning)
            self._say(answer)
        for piece in [] if self._calls is None else self._calls.finish(cut):
            self._take(piece)
        if not self.blocks:
            self._begin("text")
        self.close("incomplete" if cut else "completed")

    def changes(self) -> list[Change]:
        """Return what happened since the last call, but for reasoning that is to be told of when it is complete."""
        if not self.wish.stream_reasoning and self._open is not None and self._open.kind == "reasoning":
            return []
        changes, self._changes = self._changes, []
        return changes

    def close(self, status: str) -> None:
        """End the block that grows, if one does."""
        if self._open is not None:
            self._open.status = status
            self._changes.append(Change("end", self._open))
            self._open = None

    def _begin(self, kind: str, name: str = "") -> None:
        self.close("completed")
        self._open = Block(kind, len(self._told), name)
        self._told.append(self._open)
        self._changes.append(Change("begin", self._open))

    def _grow(self, kind: str, text: str) -> None:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            self._begin(kind)
        block = cast(Block, self._open)
        block.text += text
        last = self._changes[-1] if self._changes else None
        if last is not None and last.what == "grow":  # of this block, as every other ends before
            self._changes[-1] = Change("grow", block, last.text + text)
        else:
            self._changes.append(Change("grow", block, text))

    def _think(self, text: str) -> None:
        """Add reasoning, which ends with its tag."""
        if self.wish.include_reasoning:
            self._grow("reasoning", text)
        if self._open is not None and self._open.kind == "reasoning" and not cast(Thoughts, self._thoughts).inside:
            self.close("completed")

    def _say(self, text: str) -> None:
        """Add text that is no reasoning."""
        for piece in [Piece(text)] if self._calls is None else self._calls.feed(text):
            self._take(piece)

    def _take(self, piece: Piece) -> None:
        """Add a piece of text or of a call; of a call that breaks off, what was told of cannot be taken back."""
        if not piece.call:
            self._grow("text", piece.text)
        elif piece.name is not None:
            self._begin("call", piece.name)
        elif piece.end is None:
            self._grow("call", piece.text)
        else:
            block = cast(Block, self._open)
            self.close("completed" if piece.end else "incomplete")
            block.broken = not piece.end
            if block.broken and any(change.what == "begin" and change.block is block for change in self._changes):
                self._changes = [change for change in self._changes if change.block is not block]
                self._told.remove(block)

    # ---- as a chat has it --------------------------------------------------------------------------------------------

    def delta(self) -> dict[str, Any]:
        """Return what came since the last call, as the delta of an event; {} for nothing."""
        delta: dict[str, Any] = {}
        for what, block, text in self.changes():
            if block.kind != "call" and text:
                name = "content" if block.kind == "text" else "reasoning_content"
                delta[name] = delta.get(name, "") + text
            elif block.kind == "call" and (text or what == "begin"):
                index, calls = self._index(block), delta.setdefault("tool_calls", [])
                if what == "begin":
                    calls.append({"index": index, **_call(block), "function": {"name": block.name, "arguments": ""}})
                elif calls and calls[-1]["index"] == index:
                    calls[-1]["function"]["arguments"] += text
                else:
                    calls.append({"index": index, "function": {"arguments": text}})
        return delta

    def whole(self) -> dict[str, Any]:
        """Return the message so far."""
        content, calls = self.text("text"), [_call(block) for block in self.blocks if block.kind == "call"] or None
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None,
                                   "tool_calls": calls}  # fmt: skip
        if self._thoughts is not None:
            message["reasoning_content"] = self.text("reasoning") or None
        return message

    def _index(self, block: Block) -> int:
        return sum(earlier.kind == "call" for earlier in self._told[: block.number])


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.text}
    return {"id": f"call_{block.id[:24]}", "type": "function", "function": function}
