"""The default model behind a real socket: exact tokens through the served path, compiled as launched and eagerly.

The same functions run in benchmarks/parity.py on many questions; here they run on a few of our own.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator

import parity
import pytest

from minispec.load.default_model import ensure_default_model

TURNS = [
    ("Name three fruits and say what each tastes like.", "Which of them grows on trees?"),
    # With its answer longer than a page and a token, so that the second turn always finds a page in the cache.
    (
        "Repeat this three times: the cat sat on the mat, the dog sat on the log, and the bird sat on "
        "the old stone wall.",
        "Now repeat it once more.",
    ),
    ("Write a Python function that adds two numbers.", "Add a docstring to the function."),
    ("Why is the sea salty?", "Say it again in one sentence."),
    ("Count from one to twenty in words.", "And backwards?"),
    ("Give me a short recipe for pancakes.", "What can I use instead of eggs?"),
]


@pytest.fixture(scope="module")
def questions() -> parity.Questions:
    """Prompts and transformers' greedy answers to them."""
    return parity.Questions(TURNS[:3], ensure_default_model(), new_tokens=16, shared=2)


@pytest.fixture(scope="module")
def compiled() -> Iterator[str]:
    """A server as launched by default, FlexAttention compiled, EAGLE-3 on; float32 for exactness, few sizes to compile
    (test_engine.py compiles larger batches), and trees in every step, since on a busy machine the policy may have found
    that plain ones are faster."""
    sizes = ["--max-running-requests", "1", "--chunked-prefill-size", "128", "--no-speculative-adaptive"]
    with parity.serve("--dtype", "float32", *sizes) as url:
        yield url


def assert_exact(url: str, questions: parity.Questions, expect_retraction: bool = False) -> None:
    """Run all traffic of a parity check and fail on the first that is not exact."""
    done = 0
    for what, exact, remark in parity.check(url, questions, expect_retraction):
        assert exact, f"{what}: {remark}"
        done += 1
    assert done >= 5


@pytest.mark.slow
def test_compiled_server_gives_transformers_tokens(compiled, questions) -> None:
    assert_exact(compiled, questions)
    stats = parity.stats(compiled)
    assert stats["avg_spec_accept_length"] > 1
    shape = [stats[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    assert shape == [3, 4, 8], "as resolved, since none was asked for"


@pytest.fixture(scope="module")
def eager() -> Iterator[str]:
    """An eager server with small chunks and a pool so small that requests are retracted."""
    flags = ["--dtype", "float32", "--disable-torch-compile", "--speculative-algorithm", "NGRAM"]
    flags += ["--chunked-prefill-size", "32", "--page-size", "16", "--max-total-tokens", "256"]
    with parity.serve(*flags) as url:
        yield url


def test_eager_server_with_small_chunks_and_a_small_pool_gives_transformers_tokens(eager, questions) -> None:
    assert_exact(eager, questions, expect_retraction=True)


@pytest.mark.slow
def test_samples_are_the_same_with_drafts_and_without(compiled, questions) -> None:
    drafted, plain = (parity.sampled(compiled, questions, 8, 16, speculative=how) for how in (True, False))
    assert drafted == plain and len({*map(tuple, plain)}) == len(plain) == 3


@pytest.mark.cuda
@pytest.mark.parametrize("drafter", ["NONE", "NGRAM", "EAGLE3:3/1/4"])
def test_cuda_server_gives_transformers_tokens_and_never_recompiles(drafter, questions) -> None:
    # The server forbids recompilation once it is ready, so one would fail its requests. Few sizes are compiled.
    flags = ["--device", "cuda", "--dtype", "float32", "--max-running-requests", "8", "--chunked-prefill-size", "128"]
    flags += ["--no-speculative-adaptive", *parity.drafter_flags(drafter)]
    with parity.serve(*flags, "--cuda-graph-bs", "1", "8", "--max-total-tokens", "8192") as url:
        assert_exact(url, questions)
    with parity.serve(*flags, "--cuda-graph-bs", "8", "--page-size", "32", "--max-total-tokens", "256") as url:
        assert_exact(url, questions, expect_retraction=True)


@pytest.mark.slow
def test_a_text_that_repeats_itself_is_accepted_several_tokens_at_a_time(compiled) -> None:
    prompt = "one two three four five six seven eight nine ten. " * 6
    wish = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 60}}
    info = parity.post(compiled + "/generate", wish)["meta_info"]
    assert info["spec_accept_length"] > 1.25 and info["spec_verify_ct"] < 60


@pytest.mark.slow
def test_health_answers_while_a_long_prompt_is_prefilled(compiled) -> None:
    body = {"input_ids": [100 + i % 1000 for i in range(1500)], "sampling_params": {"max_new_tokens": 1}}
    thread = threading.Thread(target=parity.post, args=(compiled + "/generate", body))
    thread.start()
    answers = 0
    while thread.is_alive():
        with urllib.request.urlopen(compiled + "/health", timeout=20) as answer:
            assert json.load(answer)["status"] == "ready"
        answers += 1
    assert answers > 5, "a blocked loop answers once or twice"
