"""Constrained output: every mask is the one that a fresh matcher gives, and drafts change nothing.

The reference decodes one token after the other from the whole text, with a matcher made anew for each token, and knows
no tree, no rollback and no bitmask. What comes out is then read by `json` and checked by a validator of our own.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance import SUBJECTS, WISHES
from constrained import SCHEMAS, problem
from exactness import CPU, VOCAB, Oracle, build, finish, next_logits, request, run, submit, tiny_model
from llguidance import LLMatcher

import minispec.asked.grammar as grammar_module
import minispec.asked.steps as asked_module
from minispec.asked.grammar import Constraint, Constraints, Grammars, Stuck, mask
from minispec.drafter import Plain
from minispec.engine import COMPILED
from minispec.load.tokenizer import Detokenizer, load_tokenizer
from minispec.model import Model
from minispec.request import Finish, Grammar, Logprobs, Request, RequestError, SamplingParams, Thought
from minispec.sampling import SamplingState, pick
from minispec.scheduler import Scheduler
from minispec.serve import parse
from minispec.tree import PADDING

EOS = 0
TOKENS = ["<eos>", *'{}[]":,- \n', *"0123456789", *"abcdefghijklmnopqrstuvwxyz", '{"', '":', '","', '"}', '": "', "red",
          "ab", "12", "tr", "true", '"x"', "}}"]  # fmt: skip  # id 60 has no token


class Characters:
    """A tokenizer of single characters and a few longer tokens, for the tiny models."""

    byte_level = True
    special_ids = frozenset((EOS,))
    vocab_size = len(TOKENS)

    def token_bytes(self, token: int) -> bytes:
        """Return the text of an id; EOS and the padded id have none."""
        return TOKENS[token].encode() if 0 < token < len(TOKENS) else b""

    def detokenizer(self, params: SamplingParams) -> Detokenizer:
        """Return what makes text of a growing list."""
        return Detokenizer(self, params)

    def serialized(self) -> None:
        """There is no tokenizer.json."""

    def token_id(self, token: str) -> int | None:
        """Return the id of exactly this token."""
        return TOKENS.index(token) if token in TOKENS else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the longest tokens from the left on."""
        ids: list[int] = []
        while text:
            found = max((t for t in TOKENS[1:] if text.startswith(t)), key=len, default=None)
            if found is None:
                return ids
            ids.append(TOKENS.index(found))
            text = text[len(found) :]
        return ids


# Grammars are text, so a schema's own is one. Random models love whitespace.
TERSE = {what: Grammar("json_schema", json.dumps({**schema, "x-guidance": {"whitespace_pattern": " ?"}}))
         for what, schema in SCHEMAS.items()}  # fmt: skip
GRAMMARS = Grammars(Characters(), VOCAB, [EOS])  # type: ignore[arg-type]
HOW = dict(tokenizer=Characters(), eos=(EOS,))


def fresh_mask(grammar: Grammar, output: Sequence[int]) -> torch.Tensor:
    """Return which ids [V] may follow an output, from a matcher made for this question alone."""
    matcher = LLMatcher(GRAMMARS._tokenizer(grammar), GRAMMARS._source(grammar), log_level=0)
    assert matcher.consume_tokens(list(output)), matcher.get_error()
    return torch.tensor([byte != 0 for byte in matcher.compute_logit_bias()][:VOCAB])


@functools.cache
def allowed(grammar: Grammar, output: tuple[int, ...]) -> torch.Tensor:
    """Return the same, remembered."""
    return fresh_mask(grammar, output)


@torch.inference_mode()
def reference(model: Model, request: Request) -> list[int]:
    """Return a constrained request's output, decoded without cache, batch, tree or scheduler."""
    ids, output = list(request.prompt_ids), []
    while len(output) < request.max_new_tokens and output[-1:] != [EOS]:
        state = SamplingState(2, VOCAB, CPU)
        state.assign(1, request.params, request.seed, request.prompt_ids, output, [EOS])
        logits = next_logits(model, ids)
        logits[~allowed(request.params.grammar, tuple(output))] = -torch.inf
        wishes = state.wishes(torch.tensor([1]), state.needs([1]))
        output.append(int(pick(logits[None], wishes, torch.tensor([len(ids)]))))
        ids.append(output[-1])
    return output


def ten_requests(**wishes: object) -> list[Request]:
    """Return a request for each schema, the first half greedy; prompts of several lengths, two of them shared."""
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range((1, 9, 33)[i % 3])] for i in range(8)]
    prompts += prompts[2:4]
    return [
        request(what, prompt, **{"max_new_tokens": 150, "temperature": 0.0 if i < 5 else 1.0, "sampling_seed": i,
                                 "grammar": TERSE[what], **wishes})
        for i, (what, prompt) in enumerate(zip(SCHEMAS, prompts, strict=True))
    ]  # fmt: skip


@functools.cache
def truth(name: str) -> dict[str, list[int]]:
    """Return what plain decoding of a subject's target gives to the ten requests."""
    requests = ten_requests()
    run(build(SUBJECTS[name].model(), Plain(), **HOW), requests)
    return {r.rid: r.output_ids for r in requests}


def assert_valid(requests: Sequence[Request]) -> None:
    """Every output is JSON of its schema, ended by EOS."""
    for r in requests:
        assert r.finish == Finish("stop", EOS), (r.rid, r.finish)
        text = "".join(TOKENS[token] for token in r.output_ids[:-1])
        assert problem(text, SCHEMAS[r.rid]) is None, (r.rid, text)


# ---- output ----------------------------------------------------------------------------------------------------------


def test_plain_decoding_gives_what_the_reference_gives() -> None:
    model, requests = tiny_model(), ten_requests()
    run(build(model, Plain(), **HOW), requests)
    assert_valid(requests)
    for r in requests:
        assert r.output_ids == reference(model, r), r.rid
    assert sum(len(r.output_ids) for r in requests) > 150, [len(r.output_ids) for r in requests]


def test_penalties_and_filters_see_the_allowed_tokens_only() -> None:
    model, requests = tiny_model(), ten_requests(**WISHES | {"top_p": 0.6, "top_k": 3})[::2]
    run(build(model, Plain(), **HOW), requests)
    assert_valid(requests)
    assert all(r.output_ids == reference(model, r) for r in requests)


@pytest.mark.parametrize("name", ["ngram", "eagle-chain", "eagle3-tree", "mtp-tree", "standalone-tree"])
def test_ten_schemas_give_the_same_valid_output_with_every_drafter(name: str) -> None:
    requests = ten_requests()
    scheduler = SUBJECTS[name].build(**HOW)
    run(scheduler, requests)
    assert_valid(requests)
    assert {r.rid: r.output_ids for r in requests} == truth(name)
    if name.startswith(("ngram", "standalone")):
        assert scheduler.metrics.verified.accept_length > 1.1, "hardly a draft was accepted"


def knowing(miss: float) -> Oracle:
    """Return an oracle of the ten constrained outputs, which plants them in trees of wrong turns."""
    texts = [r.prompt_ids + truth("none")[r.rid] for r in ten_requests()]

    def continuation(text: tuple[int, ...]) -> list[int]:
        known = next((t for t in texts if t[: len(text)] == list(text)), [])
        return known[len(text) : len(text) + 7]

    return Oracle(continuation, miss=miss)


def oracle_check(requests: list[Request] | None = None, **how: object) -> Scheduler:
    """Raise AssertionError unless accepted branches leave the tokens as they are."""
    requests, drafter = requests or ten_requests(), knowing(0.1)
    scheduler = build(tiny_model(), drafter, **{**HOW, **how})
    run(scheduler, requests)
    for r in requests:
        assert r.output_ids == truth("none")[r.rid], f"{r.rid} differs"
    assert scheduler.metrics.verified.accept_length > 1.5 and drafter.branched > 20
    return scheduler


@pytest.mark.parametrize("how", [dict(), dict(running=3, chunk=32), dict(pages=14, page_size=8)], ids=len)
def test_accepted_branches_change_nothing(how: dict) -> None:
    scheduler = oracle_check(**how)
    assert (scheduler.metrics.retractions > 0) == ("pages" in how)


@pytest.mark.parametrize("name", ["none", "standalone-tree"])
def test_with_overlap_a_flight_is_collected_before_a_mask_is_made(name: str) -> None:
    """Requests without a grammar in the same batch get what they get alone."""
    free = [replace(r.params, grammar=None, max_new_tokens=20) for r in ten_requests()[:3]]
    free = [Request(f"free{i}", [i, 2, 3] * 4, params) for i, params in enumerate(free)]
    alone = [Request(r.rid, r.prompt_ids, r.params) for r in free]
    run(build(SUBJECTS[name].model(), Plain(), **HOW), alone)
    requests = [r for pair in zip(ten_requests(), [*free, *[None] * 7], strict=True) for r in pair if r is not None]
    scheduler = SUBJECTS[name].build(overlap=True, running=4, **HOW)
    run(scheduler, requests, stagger=2)
    assert scheduler.overlap
    for r in requests:
        if not r.rid.startswith("free"):
            assert r.output_ids == truth(name)[r.rid], r.rid
    assert [r.output_ids for r in free] == [r.output_ids for r in alone]


def test_an_output_cut_at_max_tokens_is_a_valid_prefix() -> None:
    requests = ten_requests(max_new_tokens=7, ignore_eos=True)
    run(build(tiny_model(), knowing(0.1), **HOW), requests)
    for r in requests:
        assert r.output_ids == truth("none")[r.rid][:7]
        assert r.finish.kind == "length" or r.output_ids[-1] == EOS
        fresh_mask(r.params.grammar, r.output_ids)  # which consumes them


def test_a_mask_left_empty_fails_that_request_by_name_and_no_other() -> None:
    """A word of two letters cannot be six tokens long; not before it is complete, and not in the drafts."""
    word = Grammar("regex", "(ab){2}")
    outcomes = []
    for drafter in (Plain(), Oracle(lambda text: [TOKENS.index("ab"), EOS], miss=0.0)):
        stuck = request("stuck", [5], grammar=word, min_new_tokens=6)
        other = request("other", [5], grammar=word)
        scheduler = build(tiny_model(), drafter, **HOW)
        submit(scheduler, stuck, other)
        streamed = finish(scheduler)
        assert stuck.finish.kind == "abort" and stuck.finish.status == 400 and "min_tokens" in stuck.finish.message
        assert other.finish == Finish("stop", EOS)
        assert "".join(u.text for u in streamed if u.request is other) == "abab"
        outcomes.append((stuck.output_ids, other.output_ids))
    assert outcomes[0] == outcomes[1] and "".join(TOKENS[t] for t in outcomes[0][0]) == "abab"
    narrow = request("narrow", [5], grammar=word, allowed_token_ids=[TOKENS.index("a"), EOS])
    run(build(tiny_model(), Plain(), **HOW), [narrow])
    assert "allowed_token_ids" in narrow.finish.message and not narrow.output_ids


@pytest.mark.parametrize("name", ["none", "oracle"])
def test_logprobs_are_those_before_the_mask(name: str) -> None:
    r = ten_requests(logprobs=Logprobs(top=1))[5]
    run(build(tiny_model(), Plain() if name == "none" else knowing(0.1), **HOW), [r])
    assert r.output_ids == truth("none")[r.rid]
    for at, score in enumerate(r.output_scores):
        logits = next_logits(tiny_model(), r.prompt_ids + r.output_ids[:at])
        assert score.logprob == pytest.approx(float(logits.log_softmax(-1)[r.output_ids[at]]), abs=1e-4)


def test_drafts_for_which_no_time_is_left_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "DRAFT_SECONDS", 0.0)
    requests = ten_requests()[4:7]
    scheduler = build(tiny_model(), knowing(0.1), **HOW)
    run(scheduler, requests)
    assert all(r.output_ids == truth("none")[r.rid] for r in requests)
    assert scheduler.metrics.verified.accept_length < 1.2  # an EOS needs no mask behind it


def test_a_constrained_step_is_captured_by_no_graph() -> None:
    scheduler = build(tiny_model(), Plain(), **HOW)
    engine = scheduler.engine

    class Graph:
        """Stands for a captured step."""

        def replay(self) -> None:
            """Must not be called."""
            raise AssertionError("replayed")

    for buffers in (*engine.decodes.values(), *engine.prefills.values()):
        engine.graphs |= {(buffers, needs): Graph() for needs in COMPILED}
    requests = ten_requests()[:2]
    run(scheduler, requests)
    assert_valid(requests)
    with pytest.raises(AssertionError, match="replayed"):
        run(scheduler, [request("free", [1, 2])])


# ---- masks -----------------------------------------------------------------------------------------------------------


def random_tree(rng: random.Random, grammar: Grammar, output: list[int], nodes: int) -> tuple[list[int], list[int]]:
    """Return a tree below an output: random nodes, two of three of which the grammar allows."""
    tokens, parents, texts = [output[-1] if output else 1], [-1], [tuple(output)]
    while len(tokens) < nodes:
        parent, token = rng.randrange(len(tokens)), rng.randrange(VOCAB)
        text = texts[parent]
        if text is not None and rng.random() < 0.67:
            token = rng.choice(allowed(grammar, text).nonzero().flatten().tolist())
        if (token, parent) in zip(tokens, parents, strict=True):
            continue
        legal = text is not None and text[-1:] != (EOS,) and allowed(grammar, text)[token]
        tokens.append(token)
        parents.append(parent)
        texts.append((*text, token) if legal else None)
        if len(tokens) < nodes and rng.random() < 0.05:
            tokens, parents, texts = [*tokens, PADDING], [*parents, 0], [*texts, None]
    return tokens, parents


def masks_check() -> None:
    """Raise AssertionError unless every legal node of random trees has the mask of a matcher made for it alone."""
    rng, legal_nodes, cut_nodes = random.Random(5), 0, 0
    for _ in range(12):
        constraints, slots, trees, outputs = Constraints(), [3, 0, 1], [], {}
        for slot in slots:
            what = rng.choice(list(SCHEMAS))
            r = request(what, [1], grammar=TERSE[what], min_new_tokens=3)
            r.compiled_grammar = GRAMMARS.compile(r.params.grammar)
            output = [t for t in truth("none")[what] if t != EOS]
            r.output_ids = output[: rng.randrange(len(output))]
            outputs[slot] = r
            trees.append(random_tree(rng, r.params.grammar, r.output_ids, 10))
            if slot:
                constraints.assign(slot, r, [EOS])
        for _ in range(2):  # the second time from where the first one has left the matchers
            masks = constraints.masks(slots, [tokens for tokens, _ in trees], [parents for _, parents in trees])
            logits = mask(torch.zeros(3, 10, VOCAB), masks.bits)
            for at, slot in enumerate(slots):
                tokens, parents = trees[at]
                if slot == 0:
                    assert masks.tokens[at] == tokens and not logits[at].any(), "no grammar, no mask"
                    continue
                r, texts = outputs[slot], [tuple(outputs[slot].output_ids)]
                for node in range(10):
                    if node:
                        text, token = texts[parents[node]], tokens[node]
                        open_ = token != PADDING and text is not None and text[-1:] != (EOS,)
                        fits = open_ and bool(allowed(r.params.grammar, text)[token])
                        ends = fits and not allowed(r.params.grammar, (*text, token))[1:].any()
                        # Below min_new_tokens there is no EOS, and no node from which nothing else leads on.
                        fits = fits and not (token == EOS and len(text) < 3) and not (ends and len(text) < 2)
                        texts.append((*text, token) if fits else None)
                        assert masks.tokens[at][node] == (token if fits else PADDING), "cut where it is not legal"
                        cut_nodes += not fits
                    if texts[node] is not None and texts[node][-1:] != (EOS,):
                        expected = allowed(r.params.grammar, texts[node]).clone()
                        expected[EOS] &= len(texts[node]) >= 3
                        assert torch.equal(logits[at, node] == 0, expected), "the mask is not that of the node"
                        legal_nodes += 1
        assert not masks.failed
    assert legal_nodes > 100 and cut_nodes > 50


def test_every_legal_node_has_the_mask_of_a_matcher_made_for_it_alone() -> None:
    masks_check()


def one_node_off(patch: pytest.MonkeyPatch) -> None:
    """Masks lie a node beyond their own."""
    patch.setattr(asked_module, "mask", lambda logits, bits: mask(logits, bits.roll(1, 0)))
    patch.setitem(globals(), "mask", lambda logits, bits: mask_as_it_is(logits, bits.roll(1, 0)))


def forgotten_rollback(patch: pytest.MonkeyPatch) -> None:
    """The matcher stays below the first child."""

    class Stays:
        """A matcher that never goes back."""

        def __init__(self, inner: LLMatcher) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> object:
            return (lambda count: True) if name == "rollback" else getattr(self.inner, name)

    restart = Constraint._restart

    def changed(constraint: Constraint) -> None:
        restart(constraint)
        constraint.matcher = Stays(constraint.matcher)

    patch.setattr(Constraint, "_restart", changed)


def row_of_another(patch: pytest.MonkeyPatch) -> None:
    """Two requests get each other's masks."""
    masks = Constraints.masks

    def swapped(self: Constraints, slots: Sequence[int], *tree: object, **how: object) -> object:
        return masks(self, [*slots[1:2], *slots[:1], *slots[2:]], *tree, **how)

    patch.setattr(Constraints, "masks", swapped)


mask_as_it_is = mask


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [one_node_off, forgotten_rollback, row_of_another], ids=lambda m: m.__name__)
@pytest.mark.parametrize("check", [masks_check, oracle_check], ids=["masks", "output"])
def test_the_checks_notice(mutation, check, monkeypatch: pytest.MonkeyPatch) -> None:
    truth("none")
    mutation(monkeypatch)
    with pytest.raises((AssertionError, AttributeError)):
        check()


# ---- grammars --------------------------------------------------------------------------------------------------------

FORMS = {  # kind -> a grammar, texts that it allows, texts that it does not
    Grammar("regex", "[a-c]{2}-?1"): (["ab1", "ca-1"], ["ab", "abc1", "ab1 "]),
    Grammar("ebnf", 'root ::= item ("," item)*\nitem ::= "a" | "b"'): (["a", "a,b,a"], ["", "a,", "c"]),
    Grammar("ebnf", 'start: "x"+ %json {"enum": [1, 2]}'): (["x1", "xx2"], ["x3", "1"]),
    Grammar("ebnf", 'start: %json {"properties": {"a": {"enum": [1]}}}'): (["{}", '{"a":1}'], ['{"b":1}']),
    Grammar("ebnf", '%llguidance {}\n?start: word ("-" word)*\n!word: /[a-c]+/ -> word'): (["ab", "a-c"], ["-", "d"]),
    Grammar("lark", 'start: "a" /[0-9]+/'): (["a7", "a12"], ["a", "7"]),
    Grammar("json_schema", "true"): (["[]", '{"a":1}', "null"], ["a", "[", "{]"]),
    Grammar("json_schema", '{"properties": {"a": {}}, "type": "object"}'): (["{}", '{"a":1}'], ['{"b":1}', "[]"]),
    Grammar("structural_tag", json.dumps({"structures": [
        {"begin": "fn:a", "schema": {"type": "object", "required": ["x"], "properties": {"x": {"enum": [1]}}},
         "end": "-"},
        {"begin": "fn:b", "schema": {"enum": [2]}, "end": ":"}], "triggers": ["fn:"]})):
        (["abc", 'ab fn:a{"x":1}- cd', "fn:b2:fn:b2:"], ["fn:c", "fn:b3:", 'fn:a{"x":1}', 'fn:a{"x":1,"y":1}-']),
}  # fmt: skip


@pytest.mark.parametrize("grammar", FORMS, ids=lambda grammar: grammar.kind)
def test_a_grammar_of_each_kind_allows_its_texts_and_no_others(grammar: Grammar) -> None:
    for fits, texts in zip((True, False), FORMS[grammar], strict=True):
        for text in texts:
            matcher = GRAMMARS.compile(grammar).matcher.deep_copy()
            ids = [TOKENS.index(character) for character in text]
            assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits, text


WRONG = [
    (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    (Grammar("json_schema", '{"not": {}}'), "not"), (Grammar("json_schema", '{"if": {}}', "response_format"), "if"),
    (Grammar("json_schema", '{"type": "string", "pattern": "(?=a)b"}'), "look-around"),
    (Grammar("json_schema", '{"type": "strin"}'), "strin"), (Grammar("json_schema", "[1]"), "an object"),
    (Grammar("json_schema", '{"type"'), "JSON"), (Grammar("regex", "(a"), "unclosed"),
    (Grammar("ebnf", "root ::= missing"), "missing"), (Grammar("ebnf", "no grammar"), "no"),
    (Grammar("ebnf", "root ::= a\n" + "a ::= b\n" * 2000), "at most 2000 rules"),
    (Grammar("lark", "start: a"), "a"), (Grammar("structural_tag", "{}"), "structures"),
    (Grammar("structural_tag", '{"structures": [{"begin": "a", "end": ""}], "triggers": ["b"]}'), "triggers"),
    (Grammar("json_schema", '{"x-guidance": 7}'), "x-guidance"),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "said"), WRONG, ids=lambda value: getattr(value, "kind", None))
def test_a_grammar_that_is_wrong_is_a_400_that_says_what(grammar: Grammar, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        GRAMMARS.compile(grammar)
    assert caught.value.status == 400 and caught.value.param == grammar.origin and said in caught.value.message
    assert len(caught.value.message) < 400 and "\n" not in caught.value.message


def test_what_is_no_grammar_is_refused_where_it_is_made() -> None:
    for make in (lambda: Grammar("xml", "a"), lambda: Grammar("regex", ""), lambda: Grammar("regex", "a" * 2**19),
                 lambda: request("r", [1], grammar="[a-z]")):  # fmt: skip
        with pytest.raises(RequestError, match="grammar"):
            make()
    with pytest.raises(RequestError, match="no EOS"):
        Grammars(Characters(), VOCAB, []).compile(Grammar("regex", "a"))  # type: ignore[arg-type]


def test_without_the_library_a_request_is_told_which_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    asked = request("r", [1], grammar=Grammar("regex", "a", "response_format"))
    with pytest.raises(RequestError, match=r"minispec\[grammar\]") as caught:
        build(tiny_model(), Plain(), **HOW).validate(asked)
    assert caught.value.param == "response_format"


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "KEPT", 2)
    grammars = Grammars(Characters(), VOCAB, [EOS])  # type: ignore[arg-type]
    first = grammars.compile(Grammar("regex", "a", "regex"))
    assert grammars.compile(Grammar("regex", "a", "elsewhere")) is first
    for text in "bc":
        grammars.compile(Grammar("regex", text))
    assert grammars.compile(Grammar("regex", "a")) is not first


def nested(depth: int) -> dict:
    """Return a schema of arrays in arrays."""
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "maxItems": 9}
    return schema


HOSTILE = {
    "exponential rules": Grammar("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40))
                                 + 'r40: "a"'),
    "exponential words": Grammar("lark", "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40))
                                 + 'T40: "a"'),
    "ambiguous": Grammar("ebnf", 'start: s\ns: s s | s s s | "a" | '),
    "counted words": Grammar("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    "an automaton of 2^30 states": Grammar("lark", "start: T\nT: ~/(.*a.{30})/ & ~/(.*b.{31})/ & /[ab]*/"),
    "many words at once": Grammar("lark", "start: " + " | ".join(f"T{i}" for i in range(300)) + "\n" + "\n".join(
        f"T{i}: /[a-z]*{chr(97 + i % 26)}[a-z]{{{i}}}/" for i in range(300))),
    "nullable": Grammar("lark", "start: " + "a " * 3000 + '\na: "x" | '),
    "counted rules": Grammar("lark", 'start: a{1,1000000}\na: b{1,100000}\nb: "x"{1,100000}'),
    "deep": Grammar("json_schema", json.dumps(nested(60))), "deeper": Grammar("json_schema", "[" * 60_000),
    "parentheses": Grammar("ebnf", "root ::= " + "(" * 60_000), "deep regex": Grammar("regex", "(" * 60_000),
    "wide": Grammar("json_schema", json.dumps({"properties": {f"k{i}": {"pattern": f"^[a-z]{{1,{i % 50 + 1}}}$"}
                                                              for i in range(800)}})),
    "huge enum": Grammar("json_schema", json.dumps({"enum": [f"v{i}x" for i in range(6000)]})),
    "all of any of": Grammar("json_schema", json.dumps({"allOf": [
        {"anyOf": [{"properties": {f"a{i}": {}}}, {"properties": {f"b{i}": {}}}]} for i in range(40)]})),
    "copies of copies": Grammar("json_schema", json.dumps({"$ref": "#/$defs/0", "properties": {"a": {}}, "$defs": {
        str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)} | {"40": {}}})),
    "blank lines": Grammar("ebnf", "\n" * 65_000),
    "a chain of rules": Grammar("ebnf", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(4000))),
    "multipleOf": Grammar("json_schema", '{"multipleOf": 999983}'),
    "multiples that meet": Grammar("json_schema", json.dumps({"allOf": [{"multipleOf": p} for p in (97, 89, 83, 79)]})),
    "multiples in lark": Grammar("ebnf", 'start: %json {"multipleOf": 0.999983}'),
}  # fmt: skip


@pytest.fixture(scope="module")
def real_vocabulary(demo_folder: Path) -> Grammars:
    """The grammars of the default model, with some ids more than its tokenizer has."""
    tokenizer = load_tokenizer(demo_folder)
    grammars = Grammars(tokenizer.backend, tokenizer.vocab_size + 100, tokenizer.eos_ids)
    grammars.compile(Grammar("regex", "a"))
    return grammars


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_grammar_costs_little_before_it_fails_or_does_no_harm(what: str, real_vocabulary: Grammars) -> None:
    started = time.thread_time()
    try:
        compiled = real_vocabulary.compile(HOSTILE[what])
    except RequestError as error:
        compiled = None
        assert error.status == 400
    assert time.thread_time() - started < 10
    if compiled is None:
        return
    r = Request(what, [1], SamplingParams(grammar=HOSTILE[what]), compiled_grammar=compiled)
    constraint, row, rng = Constraint(r, [2]), np.zeros(compiled.words, np.uint32), random.Random(1)
    for _ in range(40):
        started = time.thread_time()
        try:
            constraint.catch_up()
            constraint.fill(row, 0)
        except Stuck:
            break
        finally:
            assert time.thread_time() - started < 3
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert ids.max() < real_vocabulary.backend.vocab_size, "a padded id has no text"
        if (token := int(rng.choice([token for token in ids if token != 2] or [2]))) == 2:
            break
        r.output_ids.append(token)


def test_ordinary_schemas_are_far_from_the_limits(real_vocabulary: Grammars) -> None:
    for wanted in (
        {"enum": [f"word number {i}" for i in range(1000)]},
        {"type": "object", "additionalProperties": False, "properties": {
            f"field_{i}": {"type": "string", "maxLength": 200} for i in range(100)}},
        nested(20), {"type": "string", "pattern": r"^[\w.]{1,64}@[a-z0-9-]{1,64}\.[a-z]{2,8}$"},
        {"type": "string", "format": "date-time"}, {"type": "number", "multipleOf": 0.01},
        {"type": "object", "properties": {"multipleOf": True}, "additionalProperties": False},
        {"type": "string", "maxLength": 20000}, {"type": "array", "items": {"type": "integer"}, "maxItems": 10000},
    ):  # fmt: skip
        r = Request("r", [1], SamplingParams(grammar=Grammar("json_schema", json.dumps(wanted))))
        r.compiled_grammar = real_vocabulary.compile(r.params.grammar)
        constraint, row, rng = Constraint(r, [2]), np.zeros(r.compiled_grammar.words, np.uint32), random.Random(1)
        for _ in range(30):
            constraint.catch_up()
            constraint.fill(row, 0)
            r.output_ids.append(int(rng.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")))))
            if r.output_ids[-1] == 2:
                break


def test_a_draft_that_leads_to_a_limit_is_cut_and_the_request_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second branch is too much for the limits, and the text goes the first way."""
    grammar = Grammar("lark", 'start: "x" /[0-9]{2}/ | "y" ' + "a " * 3000 + '\na: "z" | ')
    x, y, one, two, three = (TOKENS.index(text) for text in "xy123")
    r = request("r", [1], grammar=grammar)
    r.compiled_grammar = GRAMMARS.compile(grammar)
    constraints = Constraints()
    constraints.assign(1, r, [EOS])
    masks = constraints.masks([1], [[5, y, x, one]], [[-1, 0, 0, 2]])
    assert masks.tokens[0][1] == PADDING and not masks.failed
    r.output_ids = [x, two]
    masks = constraints.masks([1], [[two, three, y]], [[-1, 0, 0]])
    assert masks.tokens == [[two, three, PADDING]] and not masks.failed
    r.output_ids = [y]
    constraints.assign(1, r, [EOS])
    assert "cannot be followed" in constraints.masks([1], [[y]], [[-1]]).failed[1]


# ---- fields ----------------------------------------------------------------------------------------------------------


def test_every_way_to_ask_for_a_grammar_ends_in_the_same_one() -> None:
    body, own = {"messages": [{"role": "user", "content": "hi"}]}, {"type": "object", "properties": {"a": {}}}
    ways = [
        parse.parse_chat({**body, "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": own, "strict": True}}}, {}),
        parse.parse_completion({"prompt": "hi", "json_schema": json.dumps(own)}, {}),
        parse.parse_generate({"text": "hi", "sampling_params": {"json_schema": own}}),
    ]  # fmt: skip
    assert [p.grammar.kind for job in ways for p in job.params] == ["json_schema"] * 3
    assert all(json.loads(job.params[0].grammar.text) == own for job in ways)
    assert [job.params[0].grammar.origin for job in ways] == ["response_format", "json_schema", "json_schema"]
    for kind in ("regex", "ebnf", "structural_tag"):
        native = parse.parse_generate({"text": "hi", "sampling_params": [{kind: "a"}]})
        assert native.params[0].grammar == Grammar(kind, "a")
    tag = {"type": "structural_tag", "structures": [{"begin": "a"}], "triggers": ["a"]}
    asked = parse.parse_chat({**body, "response_format": tag}, {}).params[0].grammar
    assert asked.kind == "structural_tag" and json.loads(asked.text)["triggers"] == ["a"]
    anything = parse.parse_chat({**body, "response_format": {"type": "json_object"}}, {}).params[0].grammar
    assert json.loads(anything.text) == {"type": "object"}
    for idle in ({"response_format": {"type": "text"}}, {"regex": ""}, {"json_schema": None}):
        assert parse.parse_chat({**body, **idle}, {}).params[0].grammar is None
    for wrong, said in (
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"), ({"regex": "a", "ebnf": "b"}, "one of"),
        ({"response_format": {"type": "xml"}}, "response_format.type"), ({"regex": 7}, "a string"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=said):
            parse.parse_chat({**body, **wrong}, {})


def test_vllm_s_fields_end_in_the_same_grammars_as_ours() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    tag = {"structures": [{"begin": "a"}], "triggers": ["a"]}
    own = {"json_schema": schema, "regex": "a+", "ebnf": 'root ::= "a"', "structural_tag": tag}
    newer = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}

    def asked(**wish: object) -> Grammar | None:
        bodies = {"messages": [{"role": "user", "content": "hi"}], **wish}, {"prompt": "hi", **wish}
        chat, completion = parse.parse_chat(bodies[0], {}), parse.parse_completion(bodies[1], {})
        assert chat.params[0].grammar == completion.params[0].grammar
        return chat.params[0].grammar

    for name, value in own.items():
        for origin, wish in [("structured_outputs", {newer[name]: value})] + [
            (f"guided_{newer[name]}", value)] * (name != "structural_tag"):  # fmt: skip
            found = asked(**{origin: wish})
            assert found == asked(**{name: value}) and found.origin == origin
    assert asked(structured_outputs={"json": json.dumps(schema)}) == asked(json_schema=json.dumps(schema))
    anything = asked(response_format={"type": "json_object"})
    assert asked(structured_outputs={"json_object": True}) == anything
    spaced = asked(structured_outputs={"json": json.dumps(schema), "whitespace_pattern": " ?"})
    assert json.loads(spaced.text) == {**schema, "x-guidance": {"whitespace_pattern": " ?"}}
    assert spaced == asked(guided_json=schema, guided_whitespace_pattern=" ?")
    tight = asked(structured_outputs={"json_object": True, "disable_any_whitespace": True})
    assert json.loads(tight.text)["x-guidance"] == {"whitespace_pattern": ""}
    kept = {"x-guidance": {"whitespace_flexible": False}}
    assert json.loads(asked(structured_outputs={"json": kept, "whitespace_pattern": "x"}).text) == kept
    for idle in ({"guided_choice": []}, {"guided_json": None, "guided_regex": ""}, {"guided_decoding_backend": "x"}):
        assert asked(**idle) is None


def test_a_choice_is_one_of_its_texts_wholly() -> None:
    choices = ["ab", "abc", "", "}: ", '"x"']
    for wish in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        grammar = parse.parse_completion({"prompt": "hi", **wish}, {}).params[0].grammar
        for text, fits in [(text, True) for text in choices] + [("a", False), ("abcab", False), ("x", False)]:
            matcher = GRAMMARS.compile(grammar).matcher.deep_copy()
            ids = [TOKENS.index(character) for character in text]
            assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits, text
    strange = ['say "no"\\\n', "été 😀", "a/b", "%json {}", "// no"]
    GRAMMARS.compile(parse.parse_completion({"prompt": "hi", "guided_choice": strange}, {}).params[0].grammar)


def test_one_thing_may_be_asked_for_twice_but_two_are_a_400() -> None:
    """guidance sends a grammar in vLLM's newer and its older form at once, since it does not know the version."""
    grammar = "%llguidance {}\nstart: /[a-z]+/"
    both = {"structured_outputs": {"grammar": grammar}, "guided_grammar": grammar, "guided_decoding_backend": "auto"}
    assert parse.parse_completion({"prompt": "hi", **both}, {}).params[0].grammar == Grammar("ebnf", grammar)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    exactly = "structured_outputs must be an object with exactly one of json, regex, choice, grammar, json_object and"
    for wrong, said, param in (
        ({**both, "guided_grammar": "root ::= x"}, "at most one of guided_grammar, structured_outputs", None),
        ({"structured_outputs": {"regex": "a"}, "response_format": form}, "structured_outputs, response_format",
         "response_format"),
        ({"guided_regex": "a", "regex": "b"}, "at most one of regex, guided_regex may be given", "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, exactly, None),
        ({"structured_outputs": {}}, exactly, None), ({"structured_outputs": {"json_object": False}}, exactly, None),
        ({"structured_outputs": {"regex": 7}}, r"structured_outputs\.regex must be a string, got 7", None),
        ({"structured_outputs": {"choice": ["a", 7]}}, r"structured_outputs\.choice\[1\] must be a string", None),
        ({"structured_outputs": {"json": [1]}}, r"structured_outputs\.json must be a JSON schema, as text or", None),
        ({"structured_outputs": "a"}, "structured_outputs must be an object, got 'a'", None),
        ({"structured_outputs": {"json": "{", "whitespace_pattern": " "}}, "must have the text of a JSON object", None),
        ({"guided_choice": "a"}, "guided_choice must be a list, got 'a'", "guided_choice"),
        ({"guided_json": 7}, "guided_json must be a JSON schema, as text or as an object, got 7", "guided_json"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=said) as caught:
            parse.parse_completion({"prompt": "hi", **wrong}, {})
        assert caught.value.status == 400 and caught.value.param == (param or "structured_outputs")


# ---- reasoning before a grammar --------------------------------------------------------------------------------------

R1, QWEN, KIMI = (Thought("<think>", "</think>", True), Thought("<think>", "</think>", False),
                  Thought("◁think▷", "◁/think▷", False))  # fmt: skip
AB = ("json_schema", '{"type": "object", "properties": {"a": {"const": "b"}}, "required": ["a"]}')
LINE, OWN = ("regex", r"[^\n]+"), ("ebnf", 'root ::= "<think>" [a-z]+ "</think>" [0-9]+')
TAGGED = ("structural_tag",
          '{"structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f"]}')  # fmt: skip
THOUGHTFUL = {  # of a kind of reasoning and a grammar: which outputs are allowed
    "surely, JSON": (R1, AB, ('so\n{"a": 2}</think>{"a": "b"}', '<think>so</think>\n\n{"a": "b"}',
                              '</think>{"a": "b"}'),
                     ('{"a": "b"}', 'so</think>\n\n\n{"a": "b"}', 'so</think>x', "so", 'so</think>{"a": "c"}')),
    "maybe, JSON": (QWEN, AB, ('{"a": "b"}', '<think>so < </thin</think>\n{"a": "b"}'),
                    ('so</think>{"a": "b"}', '{"a": "b"}<think>', '<think>{"a": "b"}', ' <think></think>{"a": "b"}')),
    "maybe, a line": (QWEN, LINE, ("ab", "<thin", "<b", "a <think>", "<think>a\nb</think>c", "<think></think><think>"),
                      ("a\nb", "<think>a", "<think>a</think>b\nc", "<think>a</think>", "")),
    "maybe, its own": (QWEN, OWN, ("<think>ab</think>12",), ("<think>A</think>12", "12", "<think>ab</think>")),
    "maybe, tags": (QWEN, TAGGED, ("x <f>1</f> y", "<think>x <f2</think>y <f>1</f>", "<think>x</think>", "<t"),
                    ("x <f>2</f>", "<think>x</think><f>2</f>", "<think>x <f>1</f>")),
    "in other words": (KIMI, AB, ('{"a": "b"}', '◁think▷◁so◁/think▷{"a": "b"}'), ('◁{"a": "b"}', "◁think▷so")),
}  # fmt: skip


@pytest.mark.parametrize("case", THOUGHTFUL)
def test_a_grammar_begins_behind_the_reasoning_wherever_tokens_cut_the_tags(case: str, demo_folder: Path) -> None:
    """The default model has no token for either tag, so they come in pieces, and their ends in a token with more."""
    thought, (kind, text), good, bad = THOUGHTFUL[case]
    tokenizer = load_tokenizer(demo_folder)
    grammars = Grammars(tokenizer.backend, tokenizer.vocab_size, [2])
    grammar = Grammar(kind, text, thought=thought)

    def follows(before: list[int], token: int, constraint: Constraint) -> bool:
        """Return whether a request with this output may emit the token."""
        constraint.request.output_ids, row = before, np.zeros((1, constraint.words), np.uint32)
        try:
            constraint.walk([0], [-1], row, 0)
        except Stuck:
            return False
        return bool(row[0, token >> 5] >> np.uint32(token & 31) & 1)

    def fresh() -> Constraint:
        params = SamplingParams(grammar=grammar)
        return Constraint(Request("r", [1], params, compiled_grammar=grammars.compile(grammar)), [2])

    def allowed(ids: list[int]) -> bool:
        """Return whether a request may emit these ids; who knows all but the last at once says the same of it."""
        constraint = fresh()
        answer = all(follows(ids[:at], token, constraint) for at, token in enumerate(ids))
        assert not answer or follows(ids[:-1], ids[-1], fresh())
        return answer

    for wanted, texts in ((True, good), (False, bad)):
        for text in texts:
            ids = tokenizer.encode(text, False)
            assert allowed([*ids, 2]) is wanted, (text, [tokenizer.decode([token]) for token in ids])
