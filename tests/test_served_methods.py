"""Every method that ships, through a real socket, eagerly: transformers' greedy tokens, plain decoding's samples.

What is launched by default, compiled, is in test_served.py. The same functions run at length in benchmarks/parity.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import parity
import pytest
from test_served import TURNS, assert_exact

from minispec.load.default_model import ensure_default_model

FLAGS = ["--dtype", "float32", "--disable-torch-compile", "--chunked-prefill-size", "64"]


@pytest.fixture(scope="module")
def questions() -> parity.Questions:
    """Few prompts, and transformers' greedy answers to them."""
    return parity.Questions(TURNS[:2], ensure_default_model(), new_tokens=16, shared=2)


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    """A server that does not draft."""
    with parity.serve(*FLAGS, *parity.drafter_flags("NONE")) as url:
        yield url


# EAGLE-3's default tree and NGRAM's are in test_served.py, chains of the others in the offline tests.
@pytest.mark.parametrize("drafter", ["EAGLE3:3/1/4", "EAGLE:3/3/8", "NEXTN:3/1/4", "NEXTN:3/3/8", "STANDALONE:2/3/6"])
def test_every_method_that_ships_gives_the_same(drafter: str, questions: parity.Questions, plain: str) -> None:
    with parity.serve(*FLAGS, *parity.drafter_flags(drafter)) as url:
        assert_exact(url, questions)
        assert parity.sampled(url, questions, 8) == parity.sampled(plain, questions, 8)
        assert parity.stats(url)["avg_spec_accept_length"] > 1.05
