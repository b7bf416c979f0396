"""Stop rules and text of one request, with the default model's tokenizer, against the rules applied to whole texts.

The reference decodes all ids anew after every token and searches the whole text; `Output` does so incrementally and
releases text on the way. They must agree on ids, finish and text, however many tokens come between two releases.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import _metaspace_tokenizer, _spelt_tokenizer

from minispec.load.tokenizer import Tokenizer, load_tokenizer
from minispec.output import Output
from minispec.request import Finish, Request, SamplingParams

EOS = 2  # <|im_end|>
PASSAGES = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox sleeps.\n\nStop here? No: go on, and on, and on.",
    "Grüße aus Köln! 日本語のテキスト と 한국어, עברית. 😀👨‍👩‍👧‍👦 and a combining e\u0301 🏳️‍🌈!",
    "def f(x):\n    return x ** 2\n\n\nprint(f(3))\n```\nUser: hi\nAssistant: hello\nUser: bye",
    "aaaa abab abaabaaab aaaa abab abaab",
]


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> Tokenizer:
    return load_tokenizer(demo_folder)


def make(tokenizer: Tokenizer, limit: int = 1000, **params: Any) -> Output:
    """Return the output of a fresh request."""
    request = Request("r", [1], SamplingParams(**params))
    request.max_new_tokens = limit
    return Output(request, tokenizer, frozenset({EOS}))


def feed(output: Output, ids: Sequence[int], rng: random.Random | None = None) -> tuple[Finish | None, list[str]]:
    """Append ids until a rule applies, as a scheduler would; returns the finish and the pieces handed out.

    With `rng` several tokens come between two hand-outs, as from an accepted path; else one.
    """
    pieces, left = [], 1
    for token in ids:
        finish = output.append(token)
        if finish:
            return finish, [*pieces, output.release(True)]
        left -= 1
        if left == 0:
            pieces.append(output.release(False))
            left = rng.randint(1, 5) if rng else 1
    return None, pieces


# ---- the rules, one by one ---------------------------------------------------------------------------------------


def test_eos_may_be_part_of_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    finish, pieces = feed(make(tokenizer, no_stop_trim=True, skip_special_tokens=False), [*ids, EOS])
    assert finish == Finish("stop", EOS) and "".join(pieces) == "one two three<|im_end|>"


def test_beginning_of_a_stop_string_is_held_back_and_released_if_it_is_none(tokenizer: Tokenizer) -> None:
    output = make(tokenizer, stop=(" two three",))
    pieces = []
    for token in tokenizer.encode("one two four"):
        assert output.append(token) is None
        pieces.append(output.release(False))
    assert pieces == ["one", "", " two four"]


def test_text_that_cannot_become_a_stop_string_is_not_held(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PASSAGES[0])
    output = make(tokenizer, stop=("@@@@", "%%%%%%%%"))
    for end, token in enumerate(ids, start=1):
        output.append(token)
        output.release(False)
        assert output.request.released == len(tokenizer.decode(ids[:end]))


# ---- all of them at random ---------------------------------------------------------------------------------------


def certain(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids without half a character at its end."""
    return tokenizer.decode(ids).rstrip("\ufffd")


def by_the_book(
    tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams, limit: int
) -> tuple[Finish, int, str]:
    """Return finish, number of ids and text, every rule applied to the whole text after every token."""
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    before = 0  # characters that were certain once
    for count in range(1, len(ids) + 1):
        kept = ids[:count]
        may_stop = count > params.min_new_tokens
        if may_stop and kept[-1] in stop_ids:
            return Finish("stop", kept[-1]), count, tokenizer.decode(kept if params.no_stop_trim else kept[:-1])
        before = max(before, len(certain(tokenizer, kept[:-1])))
        text = tokenizer.decode(kept) if count == limit else certain(tokenizer, kept)
        ends = [(at, stop) for stop in params.stop for at in range(len(text)) if text.startswith(stop, at)]
        fresh = [(at, stop) for at, stop in ends if at + len(stop) > before]
        if may_stop and fresh:
            at, stop = min(fresh)
            return Finish("stop", stop), count, text[: at + len(stop)] if params.no_stop_trim else text[:at]
        if count == limit:
            return Finish("length"), count, text
    raise AssertionError("the ids do not reach the limit")


def random_params(rng: random.Random, passage: str, ids: Sequence[int]) -> SamplingParams:
    """Draw stop strings that occur, or nearly, stop ids that occur, and the flags."""
    stops = []
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(passage))
        stop = passage[at : at + rng.randint(1, 12)]
        stops.append(stop if rng.random() < 0.5 else stop + "@")
    return SamplingParams(
        max_new_tokens=None,
        min_new_tokens=rng.choice((0, 0, rng.randrange(20))),
        stop=tuple(stops),
        stop_token_ids=tuple(rng.sample(list(ids), 1)) if rng.random() < 0.2 else (),
        ignore_eos=rng.random() < 0.3,
        no_stop_trim=rng.random() < 0.3,
    )


@pytest.mark.parametrize("kind", ["byte-level", "spelt", "metaspace"])
@pytest.mark.parametrize("passage", PASSAGES, ids=["english", "scripts", "code", "repeats"])
def test_random_requests_end_where_the_book_ends_them(tokenizer: Tokenizer, kind: str, passage: str) -> None:
    """Of tokenizers that spell in bytes what they have no word for, which is nearly all of these passages."""
    if kind != "byte-level":
        tokenizer = _spelt_tokenizer() if kind == "spelt" else _metaspace_tokenizer()
    rng = random.Random(passage)
    kinds = {"stop string": 0, "stop id": 0, "length": 0}
    for _ in range(250 if kind == "byte-level" else 120):
        ids = tokenizer.encode(passage, add_special_tokens=False)
        ids.insert(rng.randrange(len(ids) + 1), EOS)
        params, limit = random_params(rng, passage, ids), rng.randint(1, len(ids))
        finish, count, text = by_the_book(tokenizer, ids, params, limit)
        request = Request("r", [1], params)
        request.max_new_tokens = limit
        output = Output(request, tokenizer, frozenset({EOS}))
        got, pieces = feed(output, ids, rng)
        assert (got, request.output_ids, "".join(pieces)) == (finish, ids[:count], text), params
        assert output.text == text
        kind = "length" if finish.kind == "length" else "stop id" if isinstance(finish.matched, int) else "stop string"
        kinds[kind] += 1
    assert min(kinds.values()) > 7, kinds


# ---- what a tokenizer holds back -------------------------------------------------------------------------------------


def test_an_abort_releases_what_decode_gives() -> None:
    for tokenizer in (_spelt_tokenizer(), _metaspace_tokenizer()):
        ids = tokenizer.encode("b\n😀", add_special_tokens=False)
        for cut in range(1, len(ids) + 1):
            output = make(tokenizer, stop=("b\nx",))
            pieces = []
            for token in ids[:cut]:
                assert output.append(token) is None
                pieces.append(output.release(False))
            assert "".join([*pieces, output.release(True)]) == tokenizer.decode(ids[:cut]), cut


def test_bytes_that_are_no_text_may_be_a_stop_string_and_half_a_character_may_not() -> None:
    for tokenizer in (_spelt_tokenizer(), _metaspace_tokenizer()):
        first, *rest = tokenizer.encode("😀", add_special_tokens=False)[-4:]
        finish, pieces = feed(make(tokenizer, stop=("\ufffd",)), [262, rest[0], first, *rest])
        assert finish == Finish("stop", "\ufffd") and "".join(pieces) == "b"
        finish, pieces = feed(make(tokenizer, limit=6, stop=("\ufffd",)), [262, first, *rest, 262])
        assert finish == Finish("length") and "".join(pieces) == "b😀b"
        finish, pieces = feed(make(tokenizer, stop=("\ufffd",)), [262, first, rest[0], EOS])
        assert finish == Finish("stop", "\ufffd") and "".join(pieces) == "b", "what EOS releases"


def test_looking_into_a_long_run_takes_no_longer_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, decoded = _spelt_tokenizer(), []
    decode = tokenizer.backend.decode
    monkeypatch.setattr(tokenizer.backend, "decode", lambda ids, skip: decoded.append(len(ids)) or decode(ids, skip))
    ids = tokenizer.encode("é" * 1000, add_special_tokens=False)
    finish, pieces = feed(make(tokenizer, limit=len(ids), stop=("x", "é\n")), ids)
    assert finish == Finish("length") and "".join(pieces) == "é" * 1000
    assert sum(decoded) < 20 * len(ids)
