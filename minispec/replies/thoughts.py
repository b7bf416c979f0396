"""Reasoning in a reply, told apart from the answer while the reply grows.

Read next: `calls.py`, which finds calls in the answer; `serve/message.py`, which makes a message of both.
"""

from __future__ import annotations

from minispec.output import overlap
from minispec.replies.formats import ThoughtFormat


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
