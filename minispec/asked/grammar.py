"""Constrained output: which tokens a grammar allows after each node of a draft tree. Host side, by `llguidance`.

A request may carry a grammar: a JSON schema, a regular expression, a context-free grammar, or tags within free text.
`Grammars` compiles it once to a matcher, which reads tokens and says which tokens may come next. A `Constraint` is one
request's copy of that matcher and follows the request's output. `Constraints` holds the constraints of the running
slots and fills the masks of a step. A mask has one bit for each token of the vocabulary: whether it is allowed.

The one idea: a matcher that can go back one token can walk a tree depth first. At each node it cuts the children whose
token the node's mask lacks. For every other child it consumes the token, fills the child's mask, walks on from there,
and rolls back. So the target's pick at every node is one that the grammar allows, whatever was drafted, and the output
is that of plain decoding under the same masks. A mask is applied to logits before penalties, filters and noise.

A grammar's text may be hostile. Compiling and stepping have limits in llguidance's own units (LIMITS), and `schemas.py`
refuses schemas whose cost these limits do not bound. A matcher that hits a limit never works again. If a draft made it
hit the limit, the matcher is made anew; otherwise its request fails, and no other request does. The masks of drafts may
take DRAFT_SECONDS of a step, for all requests together. Drafts that were not reached by then are cut, which costs speed
but not exactness.

An output that thinks has its grammar behind the end of its reasoning (`Grammar.thought`). Where the output surely
thinks, one matcher reads reasoning and answer. Where it may, there are two, and its first token says which one counts.

From Python, `SamplingParams(grammar=Grammar("regex", "[a-z]+"))` constrains a request. The kind "lark" is llguidance's
own language, in which `%json {...}` embeds a schema and `<name>` a special token; tool calls can be written in it. The
kind "ebnf" is that language or GBNF.

Constrained decoding follows Willard, Louf, "Efficient guided generation for large language models", arXiv 2307.09702.
Read next: `schemas.py`, which closes schemas; `steps.py`, which cuts a step in two around `Constraints.masks`.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minispec.asked.schemas import close_embedded, compiled_form
from minispec.output import TokenizerBackend
from minispec.request import Grammar, Request, RequestError, Thought
from minispec.tree import PADDING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# With these limits a mask takes some 20 ms at most, and a compilation a few tenths of a second, on one core.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 400_000, "step_lexer_fuel": 100_000, "step_max_items": 10_000, "max_lexer_states": 30_000,
    "max_grammar_size": 100_000, "max_items_in_row": 500,
}  # fmt: skip
GBNF = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")  # a rule, which Lark writes with a colon alone
MOST_RULES = 2000  # of a grammar in GBNF; the time to translate it grows with their square
KEPT = 64  # compiled grammars in the cache
DRAFT_SECONDS = 0.05  # time that the masks of drafts may take of a step


# ---- from text to a matcher ------------------------------------------------------------------------------------------


class Compiled(NamedTuple):
    """A compiled grammar."""

    matcher: LLMatcher  # has consumed nothing; requests use copies
    words: int  # W, words of 32 bits in a mask
    tokens: int  # how many ids model and tokenizer together have
    known: int  # how many of them the model has
    thinking: LLMatcher | None = None  # of an output that begins with the tag of reasoning, where it may


class Grammars:
    """Compiles grammars for one vocabulary and caches the newest. Any thread may call it; it would block an event loop.

    vocab_size: the model's; ids that the tokenizer lacks are never allowed. eos_ids: ids that are allowed where a
    grammar can end; where it must end, no others are allowed.
    """

    def __init__(self, backend: TokenizerBackend, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self.backend, self.vocab_size, self.eos_ids = backend, vocab_size, sorted(eos_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._compiling = threading.Lock()  # one at a time, so that compilations leave cores to the engine

    def prepare(self, request: Request) -> None:
        """Compile a request's grammar, if it has one; RequestError 400 if it is wrong."""
        if request.params.grammar is not None:
            request.compiled_grammar = self.compile(request.params.grammar)

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar within half a second, the first within 1.5 seconds; RequestError 400 if it is wrong."""
        if (known := self._compiled.get(grammar)) is not None:
            return known
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise RequestError(f"{grammar.origin} needs llguidance, which is not installed here: "
                               "pip install 'minispec[grammar]'", grammar.origin) from None  # fmt: skip

        with self._compiling:
            try:
                source = self._source(grammar)
            except (ValueError, RecursionError) as error:  # RequestError is a ValueError
                raise _refused(grammar, str(error)) from None
            limits, thought = LLParserLimits(verbose_errors=False, **LIMITS), grammar.thought
            sources = [] if thought and thought.surely else [source]
            sources += [_thoughtful(source, thought, self._tokenizer(grammar), self.backend)] if thought else []
            matchers = [LLMatcher(self._tokenizer(grammar), each, log_level=0, limits=limits) for each in sources]
            # The first mask builds a lexer: here, so that no step is delayed.
            masks = [0 if m.get_error() else int.from_bytes(m.deep_copy().compute_bitmask()) for m in matchers]
            if wrong := next(filter(None, (matcher.get_error() for matcher in matchers)), None):
                raise _refused(grammar, wrong)
            plain, *others = matchers
            # A grammar that demands the begin tag itself says what reasoning is.
            thinking = others[0] if others and masks[0] & ~masks[1] else None
            words = -(-self._size // 32)
            compiled = self._compiled[grammar] = Compiled(plain, words, self._size, self.vocab_size, thinking)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return compiled

    @property
    def _size(self) -> int:
        return max(self.vocab_size, self.backend.vocab_size)

    def _source(self, grammar: Grammar) -> str:
        """Return a grammar in llguidance's own form; ValueError if it is not valid."""
        if not grammar.calls:
            return self._form(grammar)
        form = self._form(grammar)
        given = json.loads(form)["grammars"] if form.startswith("{") else [{"lark_grammar": form}]
        calls = close_embedded(grammar.calls).replace("start:", "start: calls | @form\ncalls:", 1)
        return json.dumps({"grammars": [{"lark_grammar": calls}, {**given[0], "name": "form"}, *given[1:]]})

    def _form(self, grammar: Grammar) -> str:
        """Return the same of a grammar without what may stand instead."""
        from llguidance import LLMatcher

        text = grammar.text
        if grammar.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(compiled_form(_parsed(text)))
        if grammar.kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        if grammar.kind == "structural_tag":
            return _tags(_parsed(text), self.backend)
        if grammar.kind == "ebnf" and GBNF.search(text):
            text = _lark(text)
        return LLMatcher.grammar_from_lark(close_embedded(text))

    def _tokenizer(self, grammar: Grammar) -> LLTokenizer:
        """Return llguidance's form of the vocabulary, made at the first call."""
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self.eos_ids:
            raise _refused(grammar, "this model has no EOS token, with which a grammar ends")
        if self._vocabulary is None:
            serialized: Any = self.backend.serialized()
            if serialized is None:
                serialized = TokenizerWrapper(_Bytes(self.backend, self._size, self.eos_ids[0]))
            self._vocabulary = LLTokenizer(serialized, n_vocab=self._size, eos_token=self.eos_ids)
        return self._vocabulary


class _Bytes:
    """A tokenizer in the form that llguidance reads: a table of each id's bytes; an id without a token has no bytes."""

    bos_token_id = None

    def __init__(self, backend: TokenizerBackend, size: int, eos_id: int) -> None:
        self.eos_token_id, self._encode = eos_id, backend.encode
        self.tokens = [backend.token_bytes(i) for i in range(size)]
        self.special_token_ids = sorted(backend.special_ids)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text must be a str")
        return self._encode(text, False)


def _thoughtful(source: str, thought: Thought, vocabulary: LLTokenizer, backend: TokenizerBackend) -> str:
    """Return the grammar of reasoning, two newlines at most, and what matches `source`, all in llguidance's form.

    llguidance takes some tokens for special ones that are none for the tokenizer, and text never has those. So a tag
    may be such a token, or text.
    """

    def token(tag: str) -> str:
        found = backend.token_id(tag)
        return f"| {{}} <[{found}]>" if found is not None and vocabulary.is_special_token(found) else ""

    quoted = {tag: json.dumps(tag, ensure_ascii=False) for tag in (thought.begin, thought.end)}
    begin = f"({quoted[thought.begin]} {token(thought.begin).format('')})" + "?" * thought.surely
    head = f"""start: {begin} thought SPACE? @format
thought: text_thought {token(thought.end).format("FREE")}
text_thought[lazy]: FREE {quoted[thought.end]}
FREE: /(.|\\n)*/
SPACE: /\\n{{1,2}}/"""
    inner = json.loads(source)["grammars"][0] if source.lstrip().startswith("{") else {"lark_grammar": source}
    return json.dumps({"grammars": [{"lark_grammar": head}, {**inner, "name": "format"}]})


def _refused(grammar: Grammar, error: str) -> RequestError:
    line = " ".join(error.replace("<non-verbose/>", "").split())
    return RequestError(f"{grammar.origin} cannot be used: {line[:300]}", grammar.origin)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None


def _lark(gbnf: str) -> str:
    """Translate a grammar from GBNF to Lark; ValueError if it is not GBNF, or has too many rules."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if (rules := gbnf.count("::=")) > MOST_RULES:
        raise ValueError(f"it may have at most {MOST_RULES} rules, got {rules}")
    try:
        return gbnf_to_lark(gbnf)
    except Exception as error:  # its own errors, and any others that a hostile text causes
        raise ValueError(f"it cannot be read as GBNF: {error}") from None


def _tags(given: Any, backend: TokenizerBackend) -> str:
    """Return the grammar of a structural tag in SGLang's form: free text in which triggers begin structures."""
    from llguidance import StructTag

    structures = given.get("structures") if isinstance(given, dict) else None
    triggers = given.get("triggers") if isinstance(given, dict) else None
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise ValueError('it must be {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}')
    tags = []
    for i, structure in enumerate(structures):
        parts: list[Any] = [structure.get(name) for name in ("begin", "end")] if isinstance(structure, dict) else [None]
        if not all(isinstance(part, str) for part in (*parts, *triggers)):
            raise ValueError(f"structures[{i}] must have begin and end, and they and triggers must be strings")
        begin, end = parts
        trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"structures[{i}].begin must begin with one of the triggers, got {begin[:100]!r}")
        body = compiled_form(structure.get("schema", {}))
        tags.append((trigger, StructTag(trigger=trigger, begin=begin, grammar=body, end=end)))
    special = all(backend.token_id(trigger) in backend.special_ids for trigger, _ in tags)
    return StructTag.to_grammar([tag for _, tag in tags], assume_special=special)


# ---- a request's masks -----------------------------------------------------------------------------------------------


class Stuck(Exception):
    """A request's grammar cannot go on; the message is for the client."""


class Constraint:
    """One request's matcher. It consumes the output up to the newest token, the tree's root."""

    def __init__(self, request: Request, stop_ids: Iterable[int]) -> None:
        self.request, self.stop_ids, self.words = request, frozenset(stop_ids), request.compiled_grammar.words
        self.listed: np.ndarray | None = None  # the bits of allowed_token_ids, or of the model's ids if there are more
        listed, compiled = request.params.allowed_token_ids, request.compiled_grammar
        if listed is not None or compiled.known < compiled.tokens:
            allowed = np.zeros(self.words * 32, bool)
            allowed[slice(compiled.known) if listed is None else list(listed)] = True
            self.listed = np.packbits(allowed, bitorder="little").view(np.uint32)
        self._restart()

    def _restart(self) -> None:
        """Replace the matcher by one that has consumed nothing; a matcher with an error never works again."""
        compiled: Compiled = self.request.compiled_grammar
        self.matcher, self.consumed = compiled.matcher.deep_copy(), 0
        # As long as the output may still begin with the tag of reasoning, what would read it then.
        self.thinking = None if compiled.thinking is None else compiled.thinking.deep_copy()

    def catch_up(self) -> None:
        """Consume the output since the last call, or all of it after a restart; raises Stuck."""
        while self.thinking is not None and self.consumed < len(self.request.output_ids):
            self._decide(self.request.output_ids[self.consumed])
        new = self.request.output_ids[self.consumed :]
        if new and not self.matcher.consume_tokens(new):
            raise Stuck(_failure(self.matcher))
        self.consumed += len(new)

    def _decide(self, token: int) -> None:
        """Consume one of the first tokens, and keep the matcher that counts if it tells; raises Stuck."""
        assert self.thinking is not None
        answers, thinks = self.matcher.consume_token(token), self.thinking.consume_token(token)
        begun = thinks and not self.thinking.compute_ff_bytes()  # nothing of the tag is missing
        if thinks and (begun or not answers):
            self.matcher, self.thinking = self.thinking, None
        elif not thinks:
            self.thinking = None
            if not answers:
                raise Stuck(_failure(self.matcher))
        self.consumed += 1

    def fill(self, row: np.ndarray, depth: int) -> None:
        """Write the mask after the consumed tokens, of which the last `depth` are drafts, into `row [W] uint32`.

        Before min_new_tokens the stop ids are not allowed. Raises Stuck if no token is left.
        """
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self.matcher.is_error():
            raise Stuck(_failure(self.matcher))
        if self.thinking is not None:
            other = np.zeros_like(row)
            self.thinking.unsafe_compute_mask_ptr(other.ctypes.data, other.nbytes)
            row |= other
        waiting = self.request.params.min_new_tokens > self.consumed + depth
        for token in self.stop_ids if waiting else ():
            row[token >> 5] &= ~np.uint32(1 << (token & 31))
        if self.listed is not None:
            row &= self.listed
        if not row.any():
            reasons = {"min_tokens forbids to end here": waiting,
                       "allowed_token_ids, or the model's vocabulary": self.listed is not None}  # fmt: skip
            reason = " and ".join(why for why, holds in reasons.items() if holds) or "no token continues it"
            raise Stuck(f"the grammar leaves no token to choose from ({reason})")

    def walk(self, tokens: Sequence[int], parents: Sequence[int], rows: np.ndarray, until: float) -> set[int]:
        """Fill the masks `rows [N, W] uint32` of a tree and return the legal nodes; raises Stuck if the root fails.

        until: the time on `time.perf_counter` after which drafts are cut without a look at them.
        """
        self.catch_up()
        self.fill(rows[0], 0)
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            if tokens[node] != PADDING and self.thinking is None:  # until one matcher counts, drafts are cut
                children[parents[node]].append(node)
        legal = {0}

        def visit(node: int, depth: int) -> None:
            for child in children[node]:
                token = tokens[child]
                if not rows[node, token >> 5] >> np.uint32(token & 31) & 1:
                    continue
                if token in self.stop_ids:  # the request ends with it, so the mask after it is never used
                    legal.add(child)
                elif time.perf_counter() < until:
                    if not self.matcher.consume_token(token):
                        raise Stuck(_failure(self.matcher))
                    try:
                        self.fill(rows[child], depth + 1)
                        legal.add(child)
                        visit(child, depth + 1)
                    except Stuck:  # the child is cut: if the target picks its token, the next step reports the error
                        if self.matcher.is_error():
                            raise
                    if not self.matcher.rollback(1):
                        raise Stuck(_failure(self.matcher))

        try:
            visit(0, 0)
        except Stuck:  # a draft led to a limit that plain decoding might never reach
            self._restart()
        return legal


def _failure(matcher: LLMatcher) -> str:
    error = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return f"the grammar cannot be followed: {error[:300]}"


class Masks(NamedTuple):
    """What grammars allow in a step."""

    tokens: list[list[int]]  # [B, N] of the trees, with padding for nodes that are cut
    bits: Tensor  # [B * N, 4 W] uint8 on the host: bit i of a row says whether token i may follow the node
    failed: dict[int, str]  # slots for which no token is allowed -> why


class Constraints:
    """The constraints of the running slots. One thread uses it."""

    def __init__(self) -> None:
        self.slots: dict[int, Constraint] = {}

    def assign(self, slot: int, request: Request, stop_ids: Iterable[int]) -> None:
        """Follow a request, if it has a grammar; its output so far is consumed at the next step."""
        if request.params.grammar is not None:
            self.slots[slot] = Constraint(request, stop_ids)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self.slots.pop(slot, None)

    def masks(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]],
              pinned: bool = False) -> Masks:  # fmt: skip
        """Return the masks of a step over slots [B] with trees [B, N]; slots without a grammar are allowed all tokens.

        At least one slot of the engine must have a grammar.
        A slot for which no token is allowed has failed; its masks then allow all tokens, as placeholders.
        """
        nodes, kept, failed = len(tokens[0]), [list(row) for row in tokens], dict[int, str]()
        width = max(constraint.words for constraint in self.slots.values())
        words = torch.full((len(slots) * nodes, width), -1, dtype=torch.int32, pin_memory=pinned)
        rows, until = words.numpy().view(np.uint32), time.perf_counter() + DRAFT_SECONDS
        for at, slot in enumerate(slots):
            if (constraint := self.slots.get(slot)) is None:
                continue
            own = rows[at * nodes : (at + 1) * nodes]
            try:
                legal = constraint.walk(tokens[at], parents[at], own, until)
            except Exception as error:  # Stuck, or what a matcher or this request's ids raise: it ends no other request
                failed[slot] = str(error) if isinstance(error, Stuck) else f"the grammar cannot be followed: {error!r}"
                own.fill(0xFFFFFFFF)
                legal = {0}
            kept[at] = [token if node in legal else PADDING for node, token in enumerate(tokens[at])]
        return Masks(kept, words.view(torch.uint8), failed)


def mask(logits: Tensor, bits: Tensor) -> Tensor:
    """Return `logits [.., V]` with -inf where a bit of `bits [rows, 4 W] uint8` is 0; both have as many rows."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    allowed = ((bits[..., None] >> places) & 1).view(len(bits), -1)[:, : logits.shape[-1]]
    return logits.masked_fill(allowed.view(logits.shape) == 0, -torch.inf)
