"""Log-probabilities as clients see them: OpenAI's two forms and vLLM's `prompt_logprobs`.

The scheduler keeps numbers and ids (`request.Scored`, made in `asked/scores.py`); here they get texts and names. The
entries of a stream's events add up to those of the whole answer. SGLang's lists are in `asked/answers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from minispec.request import Request, Scored

if TYPE_CHECKING:
    from minispec.load.tokenizer import Tokenizer


@dataclass(frozen=True)
class Report:
    """What of the scores a client wants to see, and how."""

    top: int | None = None  # OpenAI's logprobs of the answer, so many likeliest tokens beside each; None: none
    prompt: int | None = None  # vLLM's prompt_logprobs; None: none
    echo: bool = False  # a completion begins with its prompt, and so do its logprobs
    texts: bool = False  # a text beside each id, in SGLang's lists
    as_ids: bool = False  # token_id:N in place of a token's text, in OpenAI's forms


class Spelling:
    """Tokens as text, bytes and keys."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._as_ids = as_ids
        self.bytes = cache(tokenizer.piece)  # what a token stands for, maybe half a character

    def text(self, token: int) -> str:
        """Return a token as text, with U+FFFD for half a character."""
        return f"token_id:{token}" if self._as_ids else self.bytes(token).decode("utf-8", "replace")

    def key(self, token: int) -> str:
        """Return a token as text, or for half a character its bytes spelt out, so that it differs from other halves."""
        text, raw = self.text(token), self.bytes(token)
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_entries(ids: Iterable[int], scores: Iterable[Scored], top: int, spelling: Spelling) -> list[dict[str, Any]]:
    """Return the entries of a chat's `logprobs.content`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spelling.text(token), "logprob": logprob, "bytes": list(spelling.bytes(token))}

    return [
        {**entry(token, at.logprob), "top_logprobs": [entry(*other) for other in at.top[:top]]}
        for token, at in zip(ids, scores, strict=True)
    ]


class CompletionLists:
    """The lists of a completion's `logprobs`, a part at a time; offsets are characters of the text, echo included."""

    def __init__(self, tokenizer: Tokenizer, spelling: Spelling, request: Request, top: int, echoed: int) -> None:
        """`echoed`: characters of the prompt at the beginning of the text."""
        self.spelling, self.request, self.top = spelling, request, top
        self._at = {True: 0, False: echoed}  # characters so far, in front of the next token of prompt and of output
        self._texts = {part: tokenizer.detokenizer(request.params) for part in self._at}
        self._texts[False].follow(request.prompt_ids)

    def prompt(self) -> dict[str, list[Any]]:
        """Return the lists of the prompt's tokens; nothing precedes the first, so it has no score."""
        return self._lists(self.request.prompt_ids, [None, *self.request.prompt_scores], prompt=True)

    def output(self, first: int, end: int) -> dict[str, list[Any]]:
        """Return the lists of the output's tokens from `first` up to `end`."""
        return self._lists(self.request.output_ids[first:end], self.request.output_scores[first:end])

    def _lists(self, ids: Sequence[int], scores: Sequence[Scored | None], prompt: bool = False) -> dict[str, list[Any]]:
        text, offsets = self._texts[prompt], []
        for token in ids:
            offsets.append(self._at[prompt])
            self._at[prompt] += len(text.append(token))
        return {
            "text_offset": offsets,
            "token_logprobs": [at and at.logprob for at in scores],
            "tokens": [self.spelling.text(token) for token in ids],
            "top_logprobs": [at and self._likeliest(token, at) for token, at in zip(ids, scores, strict=True)],
        }

    def _likeliest(self, token: int, at: Scored) -> dict[str, float]:
        """Return the likeliest tokens and the token itself; of two with one spelling the likelier counts."""
        found: dict[str, float] = {}
        for other, logprob in (*at.top[: self.top], (token, at.logprob)):
            found.setdefault(self.spelling.key(other), logprob)
        return found


def prompt_logprobs(request: Request, top: int, spelling: Spelling) -> list[dict[str, Any] | None]:
    """Return vLLM's prompt_logprobs: None for the first token, then by id the likeliest tokens and the prompt's own."""
    lists: list[dict[str, Any] | None] = [None]
    for token, at in zip(request.prompt_ids[1:], request.prompt_scores, strict=True):
        entries: dict[str, Any] = {}
        ranked = [(*pair, rank) for rank, pair in enumerate(at.top, start=1)]
        for other, logprob, rank in (*ranked[:top], *[r for r in ranked if r[0] == token], (token, at.logprob, None)):
            entry = {"logprob": logprob, "rank": rank, "decoded_token": spelling.text(other)}
            entries.setdefault(str(other), entry)
        lists.append(entries)
    return lists
