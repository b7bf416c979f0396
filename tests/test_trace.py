"""Watching speculation: what is told of a step is what happened, and being watched changes no token.

The probabilities told are compared with those of the whole text, computed afresh without a cache.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance import SUBJECTS, assert_exact
from exactness import VOCAB, build, next_logits, request, run, submit
from test_server import Running, native
from test_standalone import MODEL, near

from minispec.asked.answers import Telling
from minispec.engine import COMPILED
from minispec.explain import LEGEND, PARTS, Screen, explain, tree_lines
from minispec.request import Request, Trace
from minispec.sampling import gumbel
from minispec.standalone import DraftModel, StandaloneDrafter

NEAR = near(0.01)


def watched(requests: list[Request], every: int = 2) -> list[Request]:
    """Ask to see every second request."""
    for r in requests[::every]:
        r.trace = Trace()
    return requests


def path(step: dict[str, Any], node: int) -> list[int]:
    """Return the tokens from below the root to a node."""
    tokens: list[int] = []
    while node > 0:
        tokens.insert(0, step["tokens"][node])
        node = step["parents"][node]
    return tokens


def assert_told_truly(r: Request, model: Any) -> None:
    """Compare every step that was told of a request with the text that came out, and with the model itself."""
    assert r.trace is not None and len(r.trace.ends) == len(r.output_ids)
    at = 1  # the first token is the prompt's, and no decode step's
    for step in r.trace.steps:
        before = [*r.prompt_ids, *r.output_ids[: step["at"]]]
        emitted, accepted = step["emitted"], step["accepted"]
        assert step["at"] == at and step["tokens"][0] == before[-1] and step["seconds"] > 0
        assert emitted == r.output_ids[at : at + len(emitted)] and accepted[0] == 0
        assert path(step, accepted[-1]) == emitted[: len(accepted) - 1], "a draft behind a stop counts as accepted"
        at += len(emitted)
        for node in range(1, len(step["tokens"])):
            *above, token = path(step, node)
            probability = next_logits(model, [*before, *above]).softmax(-1)[token]
            assert step["target"][node] == pytest.approx(float(probability), abs=2e-4)
        for i in range(len(emitted)):
            logits = next_logits(model, [*before, *emitted[:i]])
            assert step["logprobs"][i] == pytest.approx(float(logits.log_softmax(-1)[emitted[i]]), abs=1e-3)
            noise = gumbel(torch.tensor(r.seed), torch.tensor(len(before) + i), VOCAB)
            best = (logits + r.params.temperature * noise).sort(descending=True)
            assert int(best.indices[0]) == emitted[i] and step["margins"][i] == pytest.approx(
                float(best.values[0] - best.values[1]), abs=1e-3)  # fmt: skip
    assert at == len(r.output_ids)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("none", 0.0), ("ngram", 0.9), ("oracle", 0.0), ("standalone-tree", 0.9), ("eagle3-tree", 0.0)],
)
def test_what_is_told_of_a_step_is_what_happened_and_nobody_gets_another_token(name: str, temperature: float) -> None:
    subject = SUBJECTS[name]
    scheduler = subject.build(running=3, overlap=name == "standalone-tree")
    requests = watched(subject.requests(max_new_tokens=8, temperature=temperature)[:4])
    run(scheduler, requests, stagger=1)
    assert_exact(subject, requests)
    for r in requests[::2]:
        assert_told_truly(r, subject.model())
    assert all(r.trace is None for r in requests[1::2])
    sources = {step["source"] for r in requests[::2] for step in r.trace.steps if len(step["tokens"]) > 1}
    assert sources == {"none": set(), "ngram": {"lookup"}, "oracle": {"host"}}.get(name, {"head"})
    drafted = [p for r in requests[::2] for step in r.trace.steps for p in step["draft"][1:]]
    if name in ("standalone-tree", "eagle3-tree"):
        assert len(drafted) > 20 and all(0 <= p <= 1 for p in drafted)
    else:
        assert (len(drafted) > 0) is (name != "none") and set(drafted) <= {None}, "it drafts without probabilities"


def test_a_node_is_scored_by_the_draft_models_own_probability_after_its_parent() -> None:
    scheduler = build(MODEL, StandaloneDrafter(DraftModel(NEAR, VOCAB), rounds=3, topk=3, nodes=9), running=2)
    requests = watched([request("a", [5, 9, 2], max_new_tokens=9), request("b", [7] * 20, max_new_tokens=9)], every=1)
    run(scheduler, requests)
    compared = 0
    for r in requests:
        for step in r.trace.steps:
            before = [*r.prompt_ids, *r.output_ids[: step["at"]]]
            for node in range(1, 9):
                *above, token = path(step, node)
                own = float(next_logits(NEAR, [*before, *above]).softmax(-1)[token])
                assert step["draft"][node] == pytest.approx(own, abs=2e-4)
                compared += own > 1e-3
    assert compared > 20


def test_a_watched_step_is_none_of_the_captured_ones() -> None:
    scheduler = SUBJECTS["none"].build(running=2)
    engine = scheduler.engine
    replayed = []
    graph = SimpleNamespace(replay=lambda: replayed.append(1))
    engine.graphs = {(step, needs): graph for step in engine.decodes.values() for needs in COMPILED}
    watched = request("watched", [1, 2], max_new_tokens=4)
    watched.trace = Trace()
    run(scheduler, [watched])
    assert len(watched.trace.steps) == 3 and not replayed
    submitted = request("free", [1, 2], max_new_tokens=3)
    submit(scheduler, submitted)
    scheduler.step(), scheduler.step()
    assert replayed, "a step that nobody watches is replayed"


def test_an_event_tells_a_step_once_and_waits_for_its_tokens() -> None:
    step = {"at": 1, "emitted": [4, 5, 6], "accepted": [0, 2, 3], "tokens": [3, 9, 4, 5], "parents": [-1, 0, 0, 2]}
    trace = Trace(ends=[1, 2, 3, 4, 5], steps=[step, {**step, "at": 4, "emitted": [7], "accepted": [0, 1]}])
    telling = Telling(Request("r", [1], None, trace=trace), str)
    assert telling.upto(2) == {"origins": [0, 0], "ends": [1, 2], "steps": []}
    told = telling.upto(4)
    assert told["origins"] == [0, 1, 2, 0] and told["ends"] == [1, 2, 3, 4]
    assert [(s["texts"], s["emitted_texts"]) for s in told["steps"]] == [(["3", "9", "4", "5"], ["4", "5", "6"])]
    cut = telling.upto(5)  # a stop ended the request at a draft
    assert cut["origins"] == [0, 1, 2, 0, 1] and len(cut["steps"]) == 1 and telling.upto(5)["steps"] == []


# ---- in a terminal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rich", [True, False])
def test_explain_draws_each_step_and_ends_with_a_table(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    elif importlib.util.find_spec("rich") is None:
        pytest.skip("needs rich: pip install 'minispec[explain]'")
    monkeypatch.setenv("COLUMNS", "60")
    screen = Screen()
    assert (screen.console is not None) is rich
    letter = lambda ids, skip_special_tokens=True: "".join(chr(0x100 + i) for i in ids)  # noqa: E731
    scheduler = SUBJECTS["standalone-tree"].build(running=1)
    asked = request("r", [5, 9, 2], max_new_tokens=40)
    explain(SimpleNamespace(scheduler=scheduler, tokenizer=SimpleNamespace(decode=letter)), asked, 3, screen)
    for name in ("run_blocks", "logits"):  # other tests copy this model, and a copy would run the original's
        del vars(scheduler.engine.model)[name]
    said = capsys.readouterr().out
    steps = asked.trace.steps
    assert len(steps) == 3 and not scheduler.has_work and said.count(" ms: propose ") == 3
    accepted = sum(len(step["accepted"]) - 1 for step in steps)
    assert said.count("%  accepted") == accepted > 3 and said.count("the model's own, ahead by") == 3
    assert said.count("  draft ") == sum(len(step["tokens"]) - 1 for step in steps)
    tokens = sum(len(step["emitted"]) for step in steps)
    sums = next(line.split() for line in said.splitlines() if line.split()[:1] == ["all"])
    assert sums[1:4] == [str(sum(len(step["tokens"]) - 1 for step in steps)), str(accepted), str(tokens)]
    assert f"accept length {tokens / 3:.2f}: {tokens} tokens in 3 steps" in said
    head = next(line for line in said.splitlines() if line.split()[:1] == ["step"] and "accepted" in line)
    assert head.split() == ["step", "drafted", "accepted", "tokens", "ms", *PARTS] and len(head) < 80
    assert repr(letter(asked.output_ids)) in said.replace("\n", "")
    drafts = sum(len(step["tokens"]) - 1 for step in steps)
    assert said.count("● ") == drafts + 1 and said.count("◆") == 1, "the draft model drafted all"


@pytest.mark.parametrize(("source", "mark"), [("head", "●"), ("lookup", "◆"), ("host", "▲")])
def test_a_tree_is_drawn_with_its_branches_in_order_and_says_whose_drafts_they_are(source: str, mark: str) -> None:
    step = {"tokens": [1, 2, 3, 4, 5], "parents": [-1, 0, 0, 1, 1], "draft": [None, 0.5, 0.25, None, 1.0],
            "target": [None, 0.75, 0.0, 0.1, 0.2], "accepted": [0, 1], "emitted": [2, 9],
            "margins": [1.0, 0.5], "source": source}  # fmt: skip
    lines = ["".join(text for text, _ in line) for line in tree_lines(step, str)]
    assert lines == [
        "'1'  so far", f"├─ {mark} '2'  draft 50.0%, model 75.0%  accepted", f"│  ├─ {mark} '4'  draft –, model 10.0%",
        f"│  ├─ {mark} '5'  draft 100.0%, model 20.0%", "│  └─ '9'  the model's own, ahead by 0.5",
        f"└─ {mark} '3'  draft 25.0%, model 0.0%"]  # fmt: skip
    assert LEGEND.count(mark) == 1


# ---- as clients see it -----------------------------------------------------------------------------------------------


def assert_pieces_come_from_steps(told: dict[str, Any], steps: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    """Compare what is told of each token of an answer with the steps that are told of it."""
    origins, ends, counts = told["origins"], told["ends"], answer["meta_info"]
    assert len(origins) == len(ends) == 90 and ends == sorted(ends) and ends[-1] == len(answer["text"])
    assert max(origins) > 0
    by_start = {step["at"]: step for step in steps}
    assert len(by_start) == len(steps) == counts["spec_verify_ct"]
    assert {step["source"] for step in steps} <= {"lookup", None}, "it drafts from texts"
    assert all((step["source"] is None) == (len(step["tokens"]) == 1) for step in steps)
    assert sum(origin > 0 for origin in origins) == counts["spec_accept_token_num"]
    at = 1
    while at < 90:  # each step begins where the one before it ended
        step = by_start[at]
        depth = len(step["accepted"]) - 1
        assert origins[at : at + len(step["emitted"])] == [*range(1, depth + 1), 0][: len(step["emitted"])]
        assert all(map(math.isfinite, [*step["logprobs"], *step["margins"]]))
        assert len(step["texts"]) == len(step["tokens"])
        at += len(step["emitted"])


@pytest.mark.usefixtures("timeless")
def test_a_stream_tells_where_each_piece_of_the_text_came_from(served: Running) -> None:
    plain = served.ok("/generate", native(max_new_tokens=90))
    received, _ = served.stream("/generate", {**native(max_new_tokens=90), "trace": True})
    *events, done = received
    last, steps = events[-1], [step for event in events for step in event["trace"]["steps"]]
    assert done == "[DONE]" and last["output_ids"] == plain["output_ids"] and last["text"] == plain["text"]
    assert "trace" not in plain and "😀" in last["text"]
    assert_pieces_come_from_steps(last["trace"], steps, last)
    # What the policy and the trie have learnt by then is more, so the steps of two runs may differ.
    whole = served.ok("/generate", {**native(max_new_tokens=90), "trace": True})
    assert whole["output_ids"] == plain["output_ids"] and whole["trace"]["ends"] == last["trace"]["ends"]
    assert_pieces_come_from_steps(whole["trace"], whole["trace"]["steps"], whole)


def test_a_conversation_is_tokenized_as_a_chat_is(served: Running) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."},
                {"role": "user", "content": [{"type": "text", "text": "And?"}]}]  # fmt: skip
    row = served.ok("/tokenize", {"messages": messages})
    answer = served.ok("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True})
    assert row["tokens"] == answer["prompt_token_ids"] and row["count"] == len(row["tokens"]) > 5
    for wrong in ({}, {"prompt": "a", "messages": messages}, {"messages": []}, {"messages": [{"role": "user"}]},
                  {"messages": [{"role": "user", "content": "x" * 10**6}]}):  # fmt: skip
        assert served.call("/tokenize", wrong)[0] == 400, wrong
