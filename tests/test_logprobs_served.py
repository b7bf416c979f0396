"""Logprobs and choices over a socket: the openai client as it is, and SGLang's native lists, streamed and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_server import Running, chat, client, native
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "Once upon a time 😀 there was"


@torch.inference_mode()
def truth(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return [T, V], what transformers gives to what follows each token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_openai_s_client_gets_an_entry_for_each_token_of_a_chat(served: Running) -> None:
    wish: dict[str, Any] = {"model": "default", "messages": chat()["messages"], "max_tokens": 30, "temperature": 0,
                            "logprobs": True, "top_logprobs": 2, "n": 2}  # fmt: skip
    api = client(served)
    whole = api.chat.completions.create(**wish)
    chunks = list(api.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    assert whole.usage.completion_tokens == 60 == chunks[-1].usage.completion_tokens
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens < 60  # counted once
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice in whole.choices:
        entries = choice.logprobs.content
        assert len(entries) == 30
        assert b"".join(bytes(e.bytes) for e in entries).decode("utf-8", "replace") == choice.message.content
        for e in entries:
            assert e.top_logprobs[0].logprob == e.logprob <= 0 and len(e.top_logprobs) == 2  # greedy: the same float
            assert e.token == bytes(e.bytes).decode("utf-8", "replace")
        own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == choice.index]
        streamed = [e for part in own if part.logprobs for e in part.logprobs.content]
        assert [(e.token, e.bytes) for e in streamed] == [(e.token, e.bytes) for e in entries]
        assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in entries], abs=5e-4)
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert own[0].delta.role == "assistant" and own[-1].finish_reason == choice.finish_reason == "length"


def test_what_lm_eval_sends_scores_a_text_from_its_second_token_on(served: Running, tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = [tokenizer.encode(PROMPT), tokenizer.encode("good people who lived")]
    wish = {"model": "default", "prompt": rows, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    for more, extra in (({"seed": 1234}, 1), ({"max_tokens": 0}, 0)):
        answer = client(served).completions.create(**{**wish, **more})
        for ids, choice in zip(rows, answer.choices, strict=True):
            lists = choice.logprobs
            assert len(lists.tokens) == len(lists.top_logprobs) == len(lists.token_logprobs) == len(ids) + extra
            assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
            expected = [float(row[token]) for row, token in zip(truth(tiny, ids), ids[1:], strict=False)]
            assert lists.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=5e-4)
            greedy = [t == int(row.argmax()) for row, t in zip(truth(tiny, ids), ids[1:], strict=False)]
            told = zip(lists.token_logprobs[1:], lists.top_logprobs[1:], strict=True)
            assert [lp == max(top.values()) for lp, top in told][: len(ids) - 1] == greedy
            assert choice.text.startswith(tokenizer.decode(ids)) and choice.finish_reason == "length"
            assert all(choice.text[at:].startswith(t) for at, t in zip(lists.text_offset, lists.tokens, strict=True)
                       if "\ufffd" not in t)  # fmt: skip
        assert answer.usage.completion_tokens == 2 * extra
    listed = served.ok("/v1/completions", {**wish, "prompt_logprobs": 2, "logprobs": None, "echo": None})["choices"]
    scores = listed[0]["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(rows[0]) and listed[0]["logprobs"] is None
    assert all(str(token) in at and 2 <= len(at) <= 3 for token, at in zip(rows[0][1:], scores[1:], strict=True))
    spelled = served.ok("/v1/completions", {**wish, "return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
    assert spelled["tokens"][: len(rows[0])] == [f"token_id:{token}" for token in rows[0]]


def test_native_lists_are_triples_and_add_to_events(served: Running, tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = tokenizer.encode(PROMPT)
    wish = {**native(PROMPT, max_new_tokens=20), "return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 3,
            "token_ids_logprob": [5, 6], "return_text_in_logprobs": True}  # fmt: skip
    answer = served.ok("/generate", wish)
    meta, output = answer["meta_info"], answer["output_ids"]
    assert [row[1] for row in meta["output_token_logprobs"]] == output
    assert [row[1] for row in meta["input_token_logprobs"]] == ids[2:] and meta["input_token_logprobs"][0][0] is None
    rows = truth(tiny, ids + output)
    expected = [float(rows[at, token]) for at, token in enumerate((ids + output)[1:])]
    told = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    assert [row[0] for row in told] == pytest.approx(expected[2:], abs=5e-4)
    assert [row[2] for row in told] == [tokenizer.decode([row[1]]) for row in told]
    for name in ("top_logprobs", "token_ids_logprobs"):
        lists = [*meta[f"input_{name}"], *meta[f"output_{name}"]]
        assert lists[0] is None and len(lists) == len(ids + output) - 2
        assert {len(row) for row in lists[1:]} == {3 if name == "top_logprobs" else 2}
    assert meta["input_token_ids_logprobs"][1][0][1:] == [5, tokenizer.decode([5])]
    assert {"cached_tokens_details", "weight_version", "response_sent_to_client_ts", "e2e_latency"} <= set(meta)
    received, _ = served.stream("/generate", wish)
    for event in received[:-1]:
        told = event["meta_info"]["output_token_logprobs"]
        assert [row[1] for row in told] == event["output_ids"] and len(event["meta_info"]["input_top_logprobs"]) > 3
    each = served.ok("/generate", {
        "text": [PROMPT, "good"], "return_logprob": [True, False], "sampling_params": {"max_new_tokens": 2},
        "token_ids_logprob": [[1], []],
    })  # fmt: skip
    assert len(each[0]["meta_info"]["output_token_logprobs"]) == 2
    assert each[0]["meta_info"]["input_token_logprobs"] == [[None, ids[-1], None]]
    assert not any("logprob" in name for name in each[1]["meta_info"])


def test_choices_have_an_index_a_seed_and_one_prompt_between_them(served: Running) -> None:
    served.ok("/flush_cache")
    api, prompt = client(served), "word " * 60
    wish: dict[str, Any] = {"model": "default", "prompt": [prompt, "good people"], "max_tokens": 12, "temperature": 1.5,
                            "seed": 3, "n": 3}  # fmt: skip
    whole = api.completions.create(**wish)
    assert [choice.index for choice in whole.choices] == list(range(6))
    texts = [""] * 6
    for chunk in api.completions.create(**wish, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices] and len(set(texts)) == 6
    alone = api.completions.create(**{**wish, "n": 1})
    assert [choice.text for choice in alone.choices] == [texts[0], texts[3]] and alone.usage.prompt_tokens > 60
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    listed = served.ok("/generate", {"text": "good people", "rid": "own", "sampling_params": {
        "n": 3, "max_new_tokens": 12, "temperature": 1.5, "sampling_seed": 3}})  # fmt: skip
    assert [item["text"] for item in listed] == texts[3:]
    assert [item["meta_info"]["id"] for item in listed] == ["own-0", "own-1", "own-2"]
    received, _ = served.stream("/generate", {"text": prompt, "sampling_params": {"n": 12, "max_new_tokens": 3}})
    assert received.pop() == "[DONE]" and {event["index"] for event in received} == set(range(12))
    assert [len(event["output_ids"]) for event in received if event["meta_info"]["finish_reason"]] == [3] * 12
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "n": 17}, "n"), ("/v1/completions", {"prompt": "a", "n": 0}, "n"),
        ("/v1/chat/completions", chat(n=2, best_of=3), "best_of"),
        ("/v1/chat/completions", chat(top_logprobs=3), "top_logprobs"),
        ("/v1/chat/completions", chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": 5}, "logprob_start_len"),
        ("/generate", {"text": "a", "return_logprob": True, "token_ids_logprob": [10**6]}, "token_ids_logprob"),
        ("/generate", {"text": "a", "sampling_params": {"allowed_token_ids": []}}, "allowed_token_ids"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, "n"),
    ):  # fmt: skip
        status, answer, _ = served.call(path, body)
        assert (status, answer["error"]["param"]) == (400, param) and param in answer["error"]["message"], answer
    served.idle()


def test_a_salt_hides_a_prefix_and_only_allowed_tokens_come(served: Running) -> None:
    served.ok("/flush_cache")
    seen = []
    for salt in ("a", None, "a", "b"):
        wish = {"prompt": "word " * 60, "max_tokens": 2, "cache_salt": salt}
        seen.append(served.ok("/v1/completions", wish)["usage"]["prompt_tokens_details"] is not None)
    assert seen == [False, False, True, False]
    assert served.ok("/v1/completions", {"prompt": "a", "allowed_token_ids": [500], "max_tokens": 3,
                                         "return_token_ids": True})["choices"][0]["token_ids"] == [500] * 3  # fmt: skip
    served.idle()
