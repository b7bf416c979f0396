"""Scores: log-probabilities of the tokens of a text, from the model's logits before the sampler changes them.

The logits at a row score the token after it. A decode step scores the tokens that it emits. A prefill step scores the
token that it picks, and tokens of the prompt, which are known. The step computes these rows anyway, so a score costs no
forward pass: only a softmax, and for a token of the prompt also the LM head over one row. Only rows of requests that
ask are scored, at most 128 at a time, so the logits of a long prompt never exist all at once.

A token's score and its entry among the likeliest tokens are read from the same tensor, so they are the same float.

The host knows before the launch which scores a step is asked for (`Questions`), and uploads the questions in one copy.
The answers (`Scores`) come back with the step's tokens. Steps with questions run uncaptured, since their shapes depend
on what is asked.

Read next: `steps.py`, which asks; `serve/logprobs.py` and `answers.py` for what clients see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from minispec.kv import upload
from minispec.request import Logprobs, Scored

ROWS_AT_ONCE = 128  # rows whose logits are scored together
UNLIKELY = -9999.0  # stands for minus infinity and NaN, which JSON lacks; OpenAI's number


class Question(NamedTuple):
    """Which scores one request asks of a step."""

    row: int  # its index in the batch of a decode step, or among the chunks of a prefill step
    wish: Logprobs
    picks: bool = True  # whether to score the tokens that the step picks
    known: range = range(0)  # which of the T rows of a prefill step score the known token after them


class Questions:
    """The questions to a step. They ask for n = p * A + m scores: A picks of each of p requests, and m known tokens."""

    def __init__(self, asked: Sequence[Question], device: torch.device) -> None:
        self.asked = asked
        self.top = max(question.wish.top for question in asked)  # K in this file: the largest `top` of a request
        self.width = max(len(question.wish.ids) for question in asked)  # I, the most ids that a request names
        picks = [(question.row, owner) for owner, question in enumerate(asked) if question.picks]
        known = [(row, owner) for owner, question in enumerate(asked) for row in question.known]
        self.numbers = [len(picks), *(row for row, _ in known)]  # by which another rank asks for the same rows
        table = [token for question in asked for token in (*question.wish.ids, *[0] * self.width)[: self.width]]
        pairs = [*picks, *known]
        flat = upload([*(row for row, _ in pairs), *(owner for _, owner in pairs), *table], torch.int64, device)
        rows, owners, ids = flat.split((len(pairs), len(pairs), len(table)))
        self.picks, self.known = rows.split((len(picks), len(known)))  # [p] and [m] int64
        self._owners, self._ids = owners, ids.view(len(asked), self.width)

    def ids(self, most: int) -> Tensor:
        """Return `[n, I] int64`: for each score the ids that its request names, padded with 0; `most` is A."""
        count = len(self.picks)
        owners = torch.cat((self._owners[:count].repeat_interleave(most), self._owners[count:]))
        return self._ids.index_select(0, owners)


@dataclass(frozen=True)
class Scores:
    """A step's n answers: first those for the picks, A a request, then those for the known tokens."""

    questions: Questions
    values: Tensor  # [n, 1 + K + I] fp32: log-probabilities of the token, of the K likeliest tokens, of the named ids
    top: Tensor  # [n, K] int64, the ids of the K likeliest tokens

    def to_host(self) -> Scores:
        """Start a copy to the host, and return the copy."""
        values, top = (part.to("cpu", non_blocking=True, copy=True) for part in (self.values, self.top))
        return replace(self, values=values, top=top)

    def read(self, most: int) -> dict[int, tuple[list[Scored], list[Scored]]]:
        """Return the scores of known tokens and of A = `most` picks by row or chunk; the copy must be complete."""
        answers = list(zip(self.values.tolist(), self.top.tolist(), strict=True))
        picked, known = iter(answers), iter(answers[len(self.questions.picks) * most :])
        told = {}
        for question in self.questions.asked:
            told[question.row] = (
                [self._scored(*next(known), question.wish) for _ in question.known],
                [self._scored(*next(picked), question.wish) for _ in range(most * question.picks)],
            )
        return told

    def _scored(self, values: list[float], top: list[int], wish: Logprobs) -> Scored:
        """Return one answer as its request wishes it; among equals the lowest id comes first, as in a greedy pick."""
        count = len(top)
        likeliest = sorted(zip(top, values[1:], strict=False), key=lambda pair: (-pair[1], pair[0]))
        return Scored(values[0], likeliest[: wish.top], values[1 + count : 1 + count + len(wish.ids)])


def score(questions: Questions, tokens: Tensor, logits: Callable[[slice], Tensor], most: int) -> Scores:
    """Score `tokens [n] int64`; `logits(part)` returns the logits `[r, V]` of the r tokens in the slice `part`."""
    ids, parts = questions.ids(most), []
    for first in range(0, len(tokens), ROWS_AT_ONCE):
        part = slice(first, min(first + ROWS_AT_ONCE, len(tokens)))
        parts.append(_score(logits(part), tokens[part], ids[part], questions.top))
    values, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return Scores(questions, values, top)


def _score(logits: Tensor, tokens: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the values and the likeliest ids of `Scores` for rows `logits [r, V]`, `tokens [r]`, `ids [r, I]`."""
    scores = logits.float().log_softmax(-1)
    likeliest, top = scores.topk(min(count, scores.shape[1]), dim=-1)
    values = torch.cat((scores.gather(1, tokens[:, None]), likeliest, scores.gather(1, ids)), dim=1)
    return values.nan_to_num(nan=UNLIKELY, neginf=UNLIKELY), top


def score_picks(questions: Questions, logits: Tensor, path: Tensor, emitted: Tensor) -> Scores:
    """Score the tokens of a decode step: `logits [B, N, V]`, `path` and `emitted [B, A] int64` of its verdict.

    A path has A entries, of which the verdict's count are valid. The others are scored too, and dropped later.
    """
    (_, nodes, vocab), most = logits.shape, path.shape[1]
    flat, rows = logits.reshape(-1, vocab), questions.picks
    index = (rows[:, None] * nodes + path.index_select(0, rows)).flatten()
    return score(questions, emitted.index_select(0, rows).flatten(), lambda part: flat[index[part]], most)


def score_known(
    questions: Questions, picked: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], head: Callable[[Tensor], Tensor]
) -> Scores:
    """Score the picks and the known tokens of a prefill step.

    picked: the logits `[c, V]` at the end of each chunk, and the tokens `[c] int64` picked from them. rows: the hidden
    states `[T, d]` of all rows, from which `head` computes logits, and the tokens `[T] int64` after these rows.
    """
    (logits, tokens), (hidden, following), count = picked, rows, len(questions.picks)

    def part_of(part: slice) -> Tensor:
        """Return the logits for a slice of the n scores; those of the picks, the first `count`, exist already."""
        ready = questions.picks[part]
        known = questions.known[max(part.start - count, 0) : max(part.stop - count, 0)]
        made = [logits.index_select(0, ready)] if len(ready) else []
        return torch.cat([*made, head(hidden.index_select(0, known))] if len(known) else made)

    given = torch.cat((tokens.index_select(0, questions.picks), following.index_select(0, questions.known)))
    return score(questions, given, part_of, 1)
