"""Tokens to text, and when to stop: the rules applied to every emitted token, one at a time, in order.

A step may emit several tokens. They are appended one by one, and the rules are checked after each. So a request ends at
the same token as in plain decoding; tokens that the step emitted after it are dropped from ids and text.

The rules are checked in this order: EOS or stop id, stop string, the request's own rule (`Request.ends`), length. The
id that stops a request stays in the ids but not in the text. A stop string is cut from the text, while the ids keep all
tokens up to the one that completes it. With `no_stop_trim` the text keeps the stop id's text and the stop string. For
the first `min_new_tokens` tokens only the length can end a request, and the sampler masks EOS and stop ids.

Text that may be the beginning of a stop string, or half of a character, is held back until it is certain.

Read next: `scheduler.py`, which calls `append`; `load/tokenizer.py` for the incremental decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minispec.request import Finish, Request, SamplingParams


class GrowingText(Protocol):
    """The text of a list of ids to which ids are added one by one."""

    def append(self, token_id: int) -> str: ...  # returns the text that this id makes certain
    def flush(self) -> str: ...  # returns the text held back, once the list is complete


class TextMaker(Protocol):
    """A tokenizer, as far as it makes text for requests."""

    def detokenizer(self, params: SamplingParams) -> GrowingText: ...


class TokenizerBackend(Protocol):
    """What each kind of tokenizer offers: text to ids and back, and the text of every id."""

    vocab_size: int
    special_ids: frozenset[int]  # which skip_special_tokens leaves out of the text
    byte_level: bool  # whether joining `token_bytes` of all ids gives the bytes of the text

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token_id(self, token: str) -> int | None: ...
    def token(self, token_id: int) -> str | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def serialized(self) -> str | None: ...  # the text of tokenizer.json; None for a tokenizer of another kind


def overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `tag`, and not all of it."""
    return next(size for size in range(min(len(text), len(tag) - 1), -1, -1) if text.endswith(tag[:size]))


class Output:
    """The growing output of one request: its text, whose end may be held back, and the stop rules."""

    def __init__(self, request: Request, tokenizer: TextMaker, eos_ids: frozenset[int]) -> None:
        self.request, self.params = request, request.params
        self.stop_ids = self.params.stop_ids(eos_ids)
        self.detokenizer = tokenizer.detokenizer(self.params)
        self.text = ""
        self.ends: list[int] = []  # the text's length after each token
        given, request.output_ids = request.output_ids, []
        for token in given:  # a request that began on another replica has output already
            self.append(token)

    def append(self, token: int) -> Finish | None:
        """Add one emitted token to the request's ids and text; returns why the request ends, or None if it goes on."""
        finish = self._append(token)
        self.ends.append(len(self.text))
        return finish

    def _append(self, token: int) -> Finish | None:
        """Do what `append` does, except for `ends`."""
        self.request.output_ids.append(token)
        count = len(self.request.output_ids)
        may_stop = count > self.params.min_new_tokens
        if may_stop and token in self.stop_ids:
            if self.params.no_stop_trim:
                self.text += self.detokenizer.append(token)
            self.text += self.detokenizer.flush()
            return Finish("stop", token)
        before = len(self.text)
        self.text += self.detokenizer.append(token)
        last = count >= self.request.max_new_tokens
        if last:
            self.text += self.detokenizer.flush()
        if may_stop and (matched := self._stop_string(before)):
            return Finish("stop", matched)
        if self.request.ends is not None and self.request.ends(self.text[before:]) and may_stop:
            return Finish("stop")
        return Finish("length") if last else None

    def _stop_string(self, before: int) -> str | None:
        """Return the earliest stop string that ends in text[before:], and cut the text at it; None if there is none."""
        # A stop string that an earlier token completed is not searched for. That token was one of the first
        # min_new_tokens, or the request would have ended with it.
        found = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self.params.stop]
        at, stop = min((match for match in found if match[0] >= 0), default=(0, None))
        if stop is None:
            return None
        self.text = self.text[: at + len(stop) if self.params.no_stop_trim else at]
        return stop

    def release(self, finished: bool) -> str:
        """Return the text that became certain since the last call; if the request is finished, all text left."""
        left = self.text[self.request.released :]
        held_back = 0 if finished else max((overlap(left, stop) for stop in self.params.stop), default=0)
        new = left[: len(left) - held_back]
        self.request.released += len(new)
        return new
