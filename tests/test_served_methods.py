"""Every method that ships, through a real socket, eagerly: transformers' greedy tokens, plain decoding's samples.

What is launched by default, compiled and in a process of its own, is in test_served.py; here servers run in threads of
the tests' process, which need not import everything anew. The same functions run at length in benchmarks/parity.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import parity
import pytest
from test_served import TURNS, assert_exact
from test_server import Running

from minispec.load.default_model import ensure_default_model
from minispec.load.flags import config_from_args

# With trees in every step: on a busy machine the policy may find plain steps faster.
FLAGS = ["--dtype", "float32", "--disable-torch-compile", "--chunked-prefill-size", "64", "--port", "0",
         "--max-running-requests", "8", "--max-total-tokens", "8192", "--log-level", "error",
         "--no-speculative-adaptive"]  # fmt: skip

SAMPLES = 12  # tokens of each


@contextlib.contextmanager
def serve(drafter: str) -> Iterator[str]:
    """Start a server in a thread, yield its URL when it is ready, and stop it."""
    with Running(config_from_args([*FLAGS, *parity.drafter_flags(drafter)])) as running:
        assert running.server.engine.loaded.wait(300)
        assert running.server.engine.error is None
        yield f"http://127.0.0.1:{running.port}"


@pytest.fixture(scope="module")
def questions() -> parity.Questions:
    """Few prompts, and transformers' greedy answers to them."""
    return parity.Questions(TURNS[:2], ensure_default_model(), new_tokens=16, shared=2)


@pytest.fixture(scope="module")
def samples(questions: parity.Questions) -> list[parity.Ids]:
    """The seeded samples of a server that does not draft."""
    with serve("NONE") as url:
        return parity.sampled(url, questions, 8, SAMPLES)


# EAGLE-3's default tree and NGRAM's are in test_served.py, chains in the offline tests.
@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["EAGLE:3/3/8", "NEXTN:3/3/8", "STANDALONE:2/3/6"])
def test_every_method_that_ships_gives_the_same(
    drafter: str, questions: parity.Questions, samples: list[parity.Ids]
) -> None:
    with serve(drafter) as url:
        assert_exact(url, questions)
        assert parity.sampled(url, questions, 8, SAMPLES) == samples
        assert parity.stats(url)["avg_spec_accept_length"] > 1.05
