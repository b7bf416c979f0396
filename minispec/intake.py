"""What a request is checked against before it may wait: vocabulary, context, pool of pages, grammars.

It needs the tokenizer and a few numbers, and no weights, so a process whose model is elsewhere checks requests as the
scheduler does. Everything here is constant: any thread may ask, and none waits for a step.

Read next: `scheduler.py`, which makes one of its own sizes; `replicas.py`, which makes one of what a replica tells.
"""

from __future__ import annotations

from typing import NamedTuple

from minispec.grammar import Grammars
from minispec.load.tokenizer import Tokenizer
from minispec.request import Request, RequestError


class Limits(NamedTuple):
    """What a model and its pool of pages allow; plain numbers, which another process may be told."""

    vocab_size: int
    context_length: int
    pool_rows: int  # of the pages that requests may have
    tree_rows: int  # that a request needs beyond its text for one step
    eos_ids: tuple[int, ...]

    @property
    def longest_prompt(self) -> int:
        """The longest prompt that leaves room for one output token, in context and pool."""
        return min(self.context_length - 1, self.pool_rows - self.tree_rows)


class Intake:
    """Checks requests against `limits`, and compiles their grammars."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer) -> None:
        self.limits, self.tokenizer = limits, tokenizer
        self.grammars = Grammars(tokenizer, limits.vocab_size, limits.eos_ids)

    def validate(self, request: Request) -> None:
        """Check a request against model, context and pool, and set its max_new_tokens; raises RequestError (400).

        Compiles a request's grammar, which takes time.
        """
        limits = self.limits
        vocab_size, context, longest = limits.vocab_size, limits.context_length, limits.longest_prompt
        ids, wanted = request.prompt_ids, request.params.max_new_tokens
        if not ids:
            raise RequestError("the prompt is empty: at least one token is needed", "prompt")
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(f"token id must be in [0, {vocab_size - 1}], got {token}", "input_ids")
        request.params.check_vocabulary(vocab_size)
        self._check_scores_and_allowed(request)
        if len(ids) > longest:
            raise RequestError(
                f"The input ({len(ids)} tokens) is longer than the longest possible ({longest} tokens: "
                f"the context is {context}, the KV pool holds {limits.pool_rows}, and a step "
                f"needs {limits.tree_rows})",
                "prompt",
                code="context_length_exceeded",
            )
        if wanted is not None and len(ids) + wanted > context:
            raise RequestError(
                f"max_new_tokens is {wanted}, and with {len(ids)} prompt tokens exceeds the context of {context} "
                f"tokens; at most {context - len(ids)} are possible",
                "max_tokens",
                code="context_length_exceeded",
            )
        # What a request left alone can reach; it then ends with `length`.
        room = min(context, longest + 1) - len(ids)
        request.max_new_tokens = room if wanted is None else min(wanted, room)
        if request.params.grammar is not None:
            request.compiled = self.grammars.compile(request.params.grammar)

    def _check_scores_and_allowed(self, request: Request) -> None:
        """Raise RequestError where scores begin behind the prompt, or where nothing may be picked at first."""
        params, count = request.params, len(request.prompt_ids)
        if params.logprobs is not None and (params.logprobs.start or 0) >= count:
            raise RequestError(f"logprob_start_len must be in [-1, {count - 1}] for {count} prompt tokens, got "
                               f"{params.logprobs.start}", "logprob_start_len")  # fmt: skip
        allowed, ends = params.allowed_token_ids, params.stop_ids(frozenset(self.limits.eos_ids))
        if allowed is not None and params.min_new_tokens and ends >= set(allowed):
            raise RequestError(f"allowed_token_ids has only ids that end the text, and min_new_tokens is "
                               f"{params.min_new_tokens}: no token could be picked", "allowed_token_ids")  # fmt: skip
