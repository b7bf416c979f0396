"""Requests: what one generation asks for, how far it has come, and how it ended. Host side only, no torch.

`SamplingParams` says how to generate. A `Request` is a prompt with these parameters and its progress. `Limits` check a
request before it is queued. An `Update` brings the client what one step added. Names and defaults are those of SGLang's
`sampling_params`.

Read next: `scheduler.py` for the life of a request, `sampling.py` for what the parameters do to logits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from minispec.acceptance import Verified

logger = logging.getLogger("minispec")

MAX_TOP = 20  # likeliest tokens reported beside each token
MAX_ASKED_IDS = 128  # ids reported because a client names them
MAX_STOPS, MAX_STOP = 64, 1024  # stop strings, and characters of each; all are searched for after every token
GREEDY_BELOW = 1e-6  # a temperature under this is greedy, as in SGLang
ABORT_WANTED = 499  # the status of an abort that somebody asked for; any other status means that the request has failed


class RequestError(ValueError):
    """A request that cannot be served; `status` is the HTTP status, `param` the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


class TooLong(RequestError):
    """A prompt of `count` tokens, of which `most` fit; clients that shorten conversations look for both numbers."""

    def __init__(self, message: str, count: int, most: int, param: str | None = "prompt") -> None:
        super().__init__(message, param, code="context_length_exceeded")
        self.count, self.most = count, most


def short(value: Any) -> str:
    """Return `value` as it is shown in an error message."""
    text = repr(value[:100] if isinstance(value, (str, list)) else value)
    return text if len(text) <= 100 else text[:97] + "..."


def one_line(error: BaseException | None) -> str:
    """Return an error as one readable line."""
    text = " ".join(str(error).split())
    ours = type(error).__module__.partition(".")[0] in ("builtins", "minispec")
    plain = ours and isinstance(error, (ValueError, RuntimeError, OSError))
    return text if text and plain else f"{type(error).__name__}: {text}"


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """Return `value` as a float within [low, high] ((low, high] if open_low), or raise naming the field."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {short(value)}", name)
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {short(value)}", name)
    return float(value)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` as an int within [low, high], or raise naming the field."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {short(value)}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}", name)
    return value


def _ids(name: str, value: Any, wanted: str, least: int = 0, most: float = math.inf) -> tuple[int, ...]:
    """Return `value` as token ids, or raise naming the field; wanted: what the error says that it must be."""
    if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
        raise RequestError(f"{name} must be {wanted}, got {short(value)}", name)
    return tuple(_integer(name, token, 0, 2**31) for token in value)


GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "lark")
MAX_GRAMMAR = 2**16  # characters


class Thought(NamedTuple):
    """Reasoning that may precede what an output must match: free text up to its end tag."""

    begin: str
    end: str
    surely: bool  # the output begins within it; else it thinks only if it begins with the begin tag


@dataclass(frozen=True)
class Grammar:
    """What an output must match; `grammar.py` explains the kinds. Errors name `origin`, the field with the grammar."""

    kind: str  # one of GRAMMARS
    text: str = field(repr=False)  # not in logs
    origin: str = field(default="grammar", compare=False)
    thought: Thought | None = field(default=None, repr=False)  # what may come before; None: nothing
    calls: str = field(default="", repr=False)  # in Lark: what the output may be instead, if anything

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS:
            raise RequestError(f"{self.origin} must be of a kind of {', '.join(GRAMMARS)}, got {short(self.kind)}",
                               self.origin)  # fmt: skip
        if not isinstance(self.text, str) or not 0 < len(self.text) <= MAX_GRAMMAR:
            raise RequestError(f"{self.origin} must have 1 to {MAX_GRAMMAR} characters, got "
                               f"{len(self.text) if isinstance(self.text, str) else short(self.text)}",
                               self.origin)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Which log-probabilities a request wants: of its output tokens, and of its prompt tokens after index `start`.

    They come from the model's logits at temperature 1, before penalties, bias and filters.
    """

    top: int = 0  # how many of the likeliest tokens to report beside each token
    ids: tuple[int, ...] = ()  # tokens to report beside each token
    start: int | None = None  # report the prompt tokens after this index; None: no prompt tokens

    def __post_init__(self) -> None:
        _integer("top_logprobs", self.top, 0, MAX_TOP)
        wanted = f"a list of at most {MAX_ASKED_IDS} ids"
        object.__setattr__(self, "ids", _ids("token_ids_logprob", self.ids, wanted, most=MAX_ASKED_IDS))
        if self.start is not None:
            _integer("logprob_start_len", self.start, 0, 2**31)


class Scored(NamedTuple):
    """The log-probabilities at one token of a text."""

    logprob: float  # of the token itself
    top: list[tuple[int, float]]  # the likeliest ids, the likeliest first
    ids: list[float]  # log-probabilities of `Logprobs.ids`


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop; every field is checked at construction and errors name the field."""

    max_new_tokens: int | None = 128  # None: to the end of the context
    min_new_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 or 0: the whole vocabulary
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None  # None: drawn at submission
    speculative: bool = True  # False: no drafts are verified for this request
    ngram_corpus_id: str | None = None  # the external corpus to draft from; None: all
    logprobs: Logprobs | None = None  # None: none
    grammar: Grammar | None = None  # what the output must match; EOS then ends the output, whatever ignore_eos says

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  frozen: normalise once, here
        if self.max_new_tokens is not None:
            _integer("max_new_tokens", self.max_new_tokens, 0, 2**31)
        _integer("min_new_tokens", self.min_new_tokens, 0, 2**31)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens must be in [0, max_new_tokens={self.max_new_tokens}], got {self.min_new_tokens}",
                "min_new_tokens",
            )
        put("temperature", _number("temperature", self.temperature, 0.0, 1e6))
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put("top_k", _integer("top_k", self.top_k, -1, 2**31) or -1)
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True))
        put("logit_bias", self._checked_bias(self.logit_bias))
        put("stop", self._checked_stop(self.stop))
        # Each id once, so that no list of a client is longer than the vocabulary.
        stop_ids = _ids("stop_token_ids", self.stop_token_ids, "a list of ids")
        put("stop_token_ids", tuple(dict.fromkeys(stop_ids)))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids, "a list of at least one id", least=1)
            put("allowed_token_ids", tuple(dict.fromkeys(allowed)))
        for name in ("ignore_eos", "no_stop_trim", "skip_special_tokens", "speculative"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {short(value)}", name)
        if (corpus := self.ngram_corpus_id) is not None and not isinstance(corpus, str):
            raise RequestError(f"ngram_corpus_id must be a string, got {short(corpus)}", "ngram_corpus_id")
        if self.sampling_seed is not None:
            _integer("sampling_seed", self.sampling_seed, -(2**63), 2**63 - 1)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(f"grammar must be a Grammar, got {short(self.grammar)}", "grammar")

    @staticmethod
    def _checked_bias(bias: Any) -> dict[int, float]:
        """Return logit_bias as {id: bias}; JSON gives ids as strings."""
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {short(bias)}", "logit_bias")
        checked = {}
        for token, value in bias.items():
            try:
                token_id = int(token)
            except (TypeError, ValueError):
                raise RequestError(f"logit_bias keys must be token ids, got {short(token)}", "logit_bias") from None
            checked[token_id] = _number("logit_bias", value, -100.0, 100.0)
        return checked

    @staticmethod
    def _checked_stop(stop: Any) -> tuple[str, ...]:
        """Return stop strings as a tuple; a single string counts as one."""
        stops = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stops, (list, tuple)) or len(stops) > MAX_STOPS:
            raise RequestError(f"stop must be a string or a list of at most {MAX_STOPS} strings, got {short(stop)}",
                               "stop")  # fmt: skip
        for text in stops:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP:
                raise RequestError(f"stop must hold strings of 1 to {MAX_STOP} characters, got {short(text)}", "stop")
        return tuple(stops)

    @property
    def greedy(self) -> bool:
        """Whether the pick is an argmax."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def stop_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Return all ids that end the request; under a grammar, EOS always ends it, since nothing else can follow."""
        endless = self.ignore_eos and self.grammar is None
        return frozenset(self.stop_token_ids) | (frozenset() if endless else eos_ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise if a field names an id outside [0, vocab_size)."""
        named = (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids),
                 ("allowed_token_ids", self.allowed_token_ids or ()),
                 ("token_ids_logprob", self.logprobs.ids if self.logprobs else ()))  # fmt: skip
        for name, ids in named:
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{name}: token id must be in [0, {vocab_size - 1}], got {token}", name)


@dataclass(frozen=True)
class Finish:
    """Why a request ended. `matched` is the stop id or stop string; message, status and code belong to aborts."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    status: int = 400
    code: str = "aborted"


ABORTED = Finish("abort", message="the request was aborted", status=ABORT_WANTED)


@dataclass
class Trace:
    """What a watched request's decode steps did. The scheduler appends; other threads may read."""

    ends: list[int] = field(default_factory=list)  # characters of the text after each output token
    steps: list[dict[str, Any]] = field(default_factory=list)  # decode steps, as `Answered.tell` describes them


class Hints(NamedTuple):
    """What a request says of its drafts. It changes no token."""

    prediction: Sequence[int] = ()  # tokens that the output is expected to resemble
    private: bool = False  # whether it drafts from its own text and the corpus it names, and nobody else from its text
    corpus: str | None = None  # the external corpus to draft from; None: all, but none if private


@dataclass(eq=False)
class Request:
    """One generation and its progress. The scheduler owns all fields below `trace` once the request is submitted."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    arrived: float = field(default_factory=time.monotonic)
    ends: Callable[[str], bool] | None = None  # called with the text of each token; True ends the request there
    prediction: Sequence[int] = ()  # tokens that the output is expected to resemble; a hint for drafts
    begins: bool = False  # its text is one of its own, as a chat's answer is; else it continues the prompt's text
    thinking: bool | None = None  # True: the prompt ends inside reasoning; False: outside of it; None: not known
    leader: Request | None = None  # the first of several choices for this prompt; the others wait for its pages
    salt: str = ""  # requests share cached pages only under the same salt; the text of one with a salt is private
    trace: Trace | None = None  # None: not watched

    seed: int = 0  # params.sampling_seed, or drawn at submission; kept through retraction
    max_new_tokens: int = 0  # params.max_new_tokens, or the room in context and pool if that is less
    output_ids: list[int] = field(default_factory=list)
    released: int = 0  # characters of its text that were handed out
    # These lists have one entry a token, if the request asks for scores. They only grow, so a thread that was told of n
    # ids by updates may read n entries.
    output_scores: list[Scored] = field(default_factory=list)
    prompt_scores: list[Scored] = field(default_factory=list)  # of the prompt tokens after `Logprobs.start`
    prompt_done: bool = False  # whether the prompt's rows were computed and its full pages offered for sharing
    finish: Finish | None = None
    slot: int = 0  # 0: none, since the request waits or has ended
    kv_len: int = 0  # rows of KV written and kept; host mirror of `lens`
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    verified: Verified = field(default_factory=Verified)  # what its decode steps gave it
    undrafted: bool = False  # whether it goes on without drafts, because its logits had NaN in a step with drafts
    retractions: int = 0
    finished_at: float = 0.0
    compiled_grammar: Any = None  # params.grammar, as `Grammars.compile` returned it; set by `Asked.prepare`

    @property
    def speculative(self) -> bool:
        """Whether its steps verify drafts."""
        return self.params.speculative and not self.undrafted

    @property
    def hints(self) -> Hints:
        """What its drafts may come from."""
        return Hints(self.prediction, bool(self.salt), self.params.ngram_corpus_id)

    @property
    def ids(self) -> list[int]:
        """Prompt and output as one list (a copy)."""
        return self.prompt_ids + self.output_ids

    @property
    def cacheable(self) -> int:
        """How many rows of its text may come from a prefix cache.

        The last row may not: its hidden state, from which the next token is picked, must be computed. Nor may rows
        that must still give a score, or rows after them.
        """
        rows, unscored = len(self.prompt_ids) + len(self.output_ids) - 1, self.unscored
        return min(rows, unscored.start) if unscored else rows

    @property
    def unscored(self) -> range:
        """Prompt rows whose next token still needs a score that was asked for."""
        wish, last = self.params.logprobs, len(self.prompt_ids) - 1
        if wish is None or wish.start is None:
            return range(last, last)
        return range(min(wish.start + len(self.prompt_scores), last), last)


class Limits(NamedTuple):
    """What a model and its pool of KV pages allow, as plain numbers that can be sent to another process."""

    vocab_size: int
    context_length: int
    pool_rows: int  # rows in the pool, all pages taken together, without the padding page
    tree_rows: int  # rows that a request needs for one step, beyond those of its text
    eos_ids: tuple[int, ...]
    strict: bool = False  # whether a limit beyond the context is an error, and not cut to what is left

    @property
    def longest_prompt(self) -> int:
        """The longest prompt, in tokens, that leaves room for one output token in context and pool."""
        return min(self.context_length - 1, self.pool_rows - self.tree_rows)

    def check(self, request: Request) -> None:
        """Check a request against model, context and pool, and set its max_new_tokens; raises RequestError (400)."""
        params, count, context = request.params, len(request.prompt_ids), self.context_length
        if not count:
            raise RequestError("the prompt is empty: at least one token is needed", "prompt")
        for token in request.prompt_ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"token id must be in [0, {self.vocab_size - 1}], got {token}", "input_ids")
        params.check_vocabulary(self.vocab_size)
        self._check_scores_and_allowed(request)
        if count > self.longest_prompt:
            message = (f"The input ({count} tokens) is longer than the model's context length ({context} tokens)"
                       ", of which one is left for the output")  # fmt: skip
            if count < context:
                message = (f"The input ({count} tokens) is longer than the KV pool can hold ({self.longest_prompt} "
                           f"tokens: it holds {self.pool_rows}, and a step needs {self.tree_rows}); the model's "
                           f"context length is {context} tokens")  # fmt: skip
            raise TooLong(message, count, self.longest_prompt)
        # `room` is the longest output if no other request has pages. An output of this length ends with `length`.
        room, wanted = self.longest_prompt + 1 - count, params.max_new_tokens
        if wanted is not None and count + wanted > context:
            if self.strict:
                raise RequestError(
                    f"max_new_tokens is {wanted}, and with {count} prompt tokens exceeds the context of {context} "
                    f"tokens; at most {context - count} are possible",
                    "max_tokens",
                    code="context_length_exceeded",
                )
            logger.info("request %s: max_new_tokens is %d, as the context has no room for %d beside %d prompt tokens",
                        request.rid, room, wanted, count)  # fmt: skip
        request.max_new_tokens = room if wanted is None else min(wanted, room)

    def _check_scores_and_allowed(self, request: Request) -> None:
        """Raise RequestError if scores would begin behind the prompt, or if no token could be picked at the start."""
        params, count = request.params, len(request.prompt_ids)
        if params.logprobs is not None and (params.logprobs.start or 0) >= count:
            raise RequestError(f"logprob_start_len must be in [-1, {count - 1}] for {count} prompt tokens, got "
                               f"{params.logprobs.start}", "logprob_start_len")  # fmt: skip
        allowed, ends = params.allowed_token_ids, params.stop_ids(frozenset(self.eos_ids))
        if allowed is not None and params.min_new_tokens and ends >= set(allowed):
            raise RequestError(f"allowed_token_ids has only ids that end the text, and min_new_tokens is "
                               f"{params.min_new_tokens}: no token could be picked", "allowed_token_ids")  # fmt: skip
        if params.min_new_tokens and len(ends) >= self.vocab_size:
            raise RequestError(f"every id ends the text, and min_new_tokens is {params.min_new_tokens}: no token could "
                               "be picked", "min_new_tokens")  # fmt: skip


@dataclass(frozen=True)
class Update:
    """What one step added to one request: new ids, text that became certain, and, in the last update, the finish."""

    request: Request
    ids: list[int]
    text: str
    finish: Finish | None = None
