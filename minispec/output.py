"""Tokens to text, and when to stop: the rules applied to every emitted token, one at a time, in order.

A request ends at the same token as in plain decoding; tokens that its step emitted after it are dropped. The rules in
their order: EOS or stop id, stop string, the request's own rule (`Request.ends`), length. The id that stops a request
stays in the ids but not in the text. A stop string is cut from the text, while the ids keep all tokens up to the one
that completes it. With `no_stop_trim` the text keeps the stop id's text and the stop string. For the first
`min_new_tokens` tokens only the length can end a request, and the sampler masks EOS and stop ids.

Text that may be the beginning of a stop string, or half of a character, is held back until it is certain. Stop strings
are looked for in what the tokenizer holds back too, as `decode` gives it now, and in special tokens that the text
leaves out.

Read next: `scheduler.py`, which calls `append`; `load/tokenizer.py` for the incremental decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minispec.request import Finish, Request, SamplingParams


class GrowingText(Protocol):
    """The text of a list of ids to which ids are added one by one."""

    def follow(self, before: Sequence[int]) -> None: ...  # it continues the text of these ids
    def append(self, token_id: int) -> str: ...  # returns the text that this id makes certain
    def held(self) -> str: ...  # what follows it as `decode` gives it now; "" while that ends in half a character
    def left_out(self, token_id: int) -> str: ...  # the text of a special token that `append` gives no text for
    def flush(self) -> str: ...  # returns the text held back, once the list is complete


class TextMaker(Protocol):
    """A tokenizer, as far as it makes text for requests."""

    def detokenizer(self, params: SamplingParams) -> GrowingText: ...


class TokenizerBackend(Protocol):
    """What each kind of tokenizer offers: text to ids and back, and the text of every id."""

    vocab_size: int
    special_ids: frozenset[int]  # which skip_special_tokens leaves out of the text
    byte_level: bool  # whether joining `token_bytes` of all ids gives the bytes of the text
    byte_fallback: bool  # whether tokens like <0x0A> are bytes

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token_id(self, token: str) -> int | None: ...
    def token(self, token_id: int) -> str | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def serialized(self) -> str | None: ...  # the text of tokenizer.json; None for a tokenizer of another kind


def overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `tag`, and not all of it."""
    return next(size for size in range(min(len(text), len(tag) - 1), -1, -1) if text.endswith(tag[:size]))


class StopStrings:
    """Looks for a request's stop strings in its text, token by token."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.reach = stops, max(map(len, stops), default=1) - 1
        # The end of the text so far, as much as a stop string may begin with. A special token that the text leaves out
        # stands in it all the same; `kept` has a "+" for a character of the text and a "-" for one of such a token.
        self.tail = self.kept = ""
        self.held = ""  # what the tokenizer held back when it was last looked at

    def find(self, new: str, held: str, left_out: str = "") -> tuple[str, int, int] | None:
        """Return the earliest stop string that the newest token completes, None if there is none.

        new: the text that the token made certain. held: what follows it for now. left_out: its own text, if it is a
        special token without text. After the stop string come the numbers of characters of the text, `held` included,
        from its begin on and behind its end. A stop string that an earlier token completed is not found: that token
        was one of the first `min_new_tokens`.
        """
        fresh, left_out = new + held, left_out if any(left_out in stop for stop in self.stops) else ""
        seen = len(self.tail) + (len(self.held) if fresh.startswith(self.held) else 0)
        text, kept = self.tail + fresh + left_out, self.kept + "+" * len(fresh) + "-" * len(left_out)
        found = [(text.find(stop, max(0, seen - len(stop) + 1)), stop) for stop in self.stops]
        at, stop = min((match for match in found if match[0] >= 0), default=(0, ""))
        self.held = held if fresh else self.held  # nothing is there for now where half a character has come
        if self.reach:
            certain = new + ("" if held else left_out)
            self.tail = (self.tail + certain)[-self.reach :]
            self.kept = (self.kept + "+" * len(new) + "-" * (len(certain) - len(new)))[-self.reach :]
        return (stop, kept.count("+", at), kept.count("+", at + len(stop))) if stop else None

    @property
    def begun(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        sizes = [overlap(self.tail, stop) for stop in self.stops]
        return self.kept.count("+", len(self.kept) - max(sizes, default=0))


class Output:
    """The growing output of one request: its text, whose end may be held back, and the stop rules."""

    def __init__(self, request: Request, tokenizer: TextMaker, eos_ids: frozenset[int]) -> None:
        self.request, self.params = request, request.params
        self.stop_ids = self.params.stop_ids(eos_ids)
        self.detokenizer = tokenizer.detokenizer(self.params)
        if not request.begins:
            self.detokenizer.follow(request.prompt_ids)
        self.stops = StopStrings(self.params.stop)
        self.text = ""
        self.ends: list[int] = []  # the text's length after each token
        self.finish: Finish | None = None
        given, request.output_ids = request.output_ids, []
        for token in given:  # a request that began on another replica has output already
            self.append(token)

    def append(self, token: int) -> Finish | None:
        """Add one emitted token to the request's ids and text; returns why the request ends, or None if it goes on."""
        self.finish = self._append(token)
        self.ends.append(len(self.text))
        return self.finish

    def _append(self, token: int) -> Finish | None:
        """Do what `append` does, except for `ends`."""
        self.request.output_ids.append(token)
        count = len(self.request.output_ids)
        may_stop, last = count > self.params.min_new_tokens, count >= self.request.max_new_tokens
        if may_stop and token in self.stop_ids:
            if self.params.no_stop_trim:
                self.text += self.detokenizer.append(token) + self.detokenizer.flush()
                return Finish("stop", token)
            return Finish("stop", self._look(self.detokenizer.flush(), True) or token)
        new = self.detokenizer.append(token) + (self.detokenizer.flush() if last else "")
        if (matched := self._look(new, may_stop, token)) is not None:
            return Finish("stop", matched)
        if self.request.ends is not None and self.request.ends(new) and may_stop:
            return Finish("stop")
        return Finish("length") if last else None

    def _look(self, new: str, may_stop: bool, token: int | None = None) -> str | None:
        """Add text; return the stop string that it or `token` completes, and cut the text there, if that may stop."""
        self.text += new
        if not self.params.stop:
            return None
        held = self.detokenizer.held()
        found = self.stops.find(new, held, "" if token is None else self.detokenizer.left_out(token))
        if found is None or not may_stop:
            return None
        stop, begin, end = found
        self.text += held
        self.text = self.text[: len(self.text) - (end if self.params.no_stop_trim else begin)]
        return stop

    def release(self, finished: bool) -> str:
        """Return the text that became certain since the last call; if the request is finished, all text left."""
        if finished and self.finish is None:  # aborted
            self._look(self.detokenizer.flush(), True)
        left = self.text[self.request.released :]
        new = left if finished else left[: max(len(left) - self.stops.begun, 0)]
        self.request.released += len(new)
        return new
