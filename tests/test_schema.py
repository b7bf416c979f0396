"""The schema: hostile JSON is refused, every field acts or is refused by name, and deltas add up to the answer."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from json_schema import is_valid
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat
from pydantic import ValidationError

from minispec.acceptance import Kept
from minispec.asked.answers import meta_info
from minispec.config import Config
from minispec.load.tokenizer import byte_tokenizer
from minispec.load.weights import sampling_defaults
from minispec.request import Finish, Request, RequestError, SamplingParams, Update
from minispec.serve import fields, openapi, parse
from minispec.serve.reply import Reply, Served, error_body, sse
from minispec.serve.responses import parse_response
from minispec.server import Server

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> parse.Job:
    return parse.parse_chat({**CHAT, **fields}, {})


def completion(prompt: Any = "hi", **fields: Any) -> parse.Job:
    return parse.parse_completion({"prompt": prompt, **fields}, {})


def generate(text: Any = "hi", **fields: Any) -> parse.Job:
    return parse.parse_generate({"text": text, **fields})


def response(given: Any = "hi", **fields: Any) -> parse.Job:
    return parse_response({"input": given, **fields}, {})


def refused(call: Any, *args: Any, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(*args, **kwargs)
    assert caught.value.status == 400
    return caught.value


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[1]", b"null", b'"x"', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 18446744073709551616}', b'{"a": "\\ud800"}', b'{"\\udfff": 1}',
        b'{"a": "\xff"}', b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"[" * 90 + b"]" * 90 + b"}",
    ],
)  # fmt: skip
def test_hostile_json_is_refused(body: bytes) -> None:
    refused(parse.parse_json, body)


def test_ordinary_json_passes_unchanged() -> None:
    value = {"a": [1, 2.5, -3e-7, True, None, "😀 中文 \u0000"], "b": {"c": 2**64 - 1}}
    assert parse.parse_json(json.dumps(value).encode()) == value


# ---- fields ----------------------------------------------------------------------------------------------------------


REFUSED = [name for name, (fate, _) in fields.INACTIVE.items() if fate == "refused"]
SAMPLES = [None, True, False, 0, 7, -1, 1.5, "", "x", [], [7], ["x"], [[7]], [{}], [None], {}, {"a": 1}, [1.5],
           ["a", 7], ["a"] * 200]  # fmt: skip
DOCUMENT = openapi.document("0")
COMPONENTS = DOCUMENT["components"]["schemas"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_here_is_refused_by_name_and_what_asks_for_nothing_passes(name: str) -> None:
    kinds = {chat: fields.Chat, completion: fields.Completion, generate: fields.Generate, response: fields.Responses}
    calls = [call for call, kind in kinds.items() if name not in fields.acting(kind)]
    assert calls, "a field that acts everywhere is in no table"
    for call in calls:
        for value in ([{"type": "function"}], "required", 10**6):
            error = refused(call, **{name: value})
            assert error.param == name and name in error.message and error.code == "unsupported_field"
        for value in (None, False, "", [], {}, *fields.IDLE.get(name, ())):
            call(**{name: value})
    if name in fields.NativeParams.model_fields and name not in fields.acting(fields.NativeParams):
        assert refused(generate, sampling_params={name: 2}).param == name
        generate(sampling_params={name: None})


def test_idle_values_are_of_their_json_type() -> None:
    for name, value in (("n", True), ("n", 1.5), ("priority", 0.0), ("tool_choice", ["auto"])):
        assert refused(chat, **{name: value}).param == name
    assert set(fields.IDLE) <= set(REFUSED)


def test_images_and_audio_are_refused_by_name() -> None:
    for kind in ("image_url", "input_audio", "video_url"):
        error = refused(chat, messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}])
        assert error.param == "messages"
        assert error.message.startswith("messages[0].content[0] must be a part of type text") and kind in error.message


def test_best_of_is_n() -> None:
    for call in (chat, completion, generate):
        assert refused(call, best_of=3).message == "best_of must be n, which is 1, got 3"
        call(best_of=1, n=None)
    for call in (chat, completion):
        assert refused(call, best_of=4, n=3).message == "best_of must be n, which is 3, got 4"
        assert len(call(best_of=3, n=3).prompts) == 3


@pytest.mark.parametrize(
    ("kind", "call"),
    [("Chat", chat), ("Completion", completion), ("Generate", generate), ("Responses", response)],
)
def test_each_field_takes_what_the_description_says_and_names_itself_otherwise(kind: str, call: Any) -> None:
    right = wrong = 0
    for name, described in COMPONENTS[kind]["properties"].items():
        for value in SAMPLES:
            body = {"prompt": value} if name == "prompt" else {"text": value} if name == "text" else {name: value}
            if is_valid(value, described, COMPONENTS):
                right += 1
                try:
                    call(**body)
                except RequestError as error:  # a range, or one field beside another
                    assert error.status == 400
            else:
                wrong += 1
                error = refused(call, **body)
                assert error.param == name or name == "sampling_params", (name, value, error.message)
                assert name in error.message and len(error.message) < 500
    assert right > 100 and wrong > 500


def test_a_million_wrong_values_are_one_error_and_no_time() -> None:
    many = 10**6
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (fields.Completion, {"prompt": ["x", *[7] * 100]}),
        (fields.Completion, {"prompt": [7, *["x"] * many]}),
        (fields.Completion, {"prompt": "a", "stop_token_ids": ["x"] * many}),
        (fields.Chat, {"messages": [7] * many}),
        (fields.Completion, {"prompt": "a", "stop": ["", *[7] * many]}),
        (fields.Chat, {"messages": [{}] * many}),
        (fields.Generate, {"text": "a", "sampling_params": [{}] * many}),
        (fields.Detokenize, {"tokens": [1.5] * many}),
        (fields.Generate, {"text": "a", "sampling_params": dict.fromkeys(map(str, range(many)), 0)}),
    ]
    for kind, body in wrong:
        started = time.process_time()
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(body)
        assert caught.value.error_count() == 1 and time.process_time() - started < 10
        assert len(refused(fields.read, kind, body).message) < 500
    # An object of any size is looked at value by value, up to the first wrong one.
    error = refused(completion, logit_bias=dict.fromkeys(map(str, range(many)), "x"))
    assert error.param == "logit_bias"


def test_every_field_that_openai_s_client_knows_is_known() -> None:
    for kind, theirs in ((fields.Chat, openai_chat), (fields.Completion, openai_completion)):
        names = set(theirs.CompletionCreateParamsBase.__annotations__)
        assert len(names) > 15 and not names - set(kind.model_fields)


def test_the_page_has_the_tables_of_the_models() -> None:
    page = (Path(__file__).parent.parent / "docs" / "serving.md").read_text("utf-8")
    assert openapi.tables() in page, "python -m minispec.serve.openapi prints them"
    for name in ("temperature", "tools", "user", "truncate_prompt_tokens"):
        assert re.search(rf"[` ]{name}[` ]", openapi.tables())


def test_the_page_names_every_route_that_answers() -> None:
    routes = {route.resource.canonical for route in Server(Config()).application().router.routes()}
    page = Path(__file__).resolve().parent.parent.joinpath("docs/serving.md").read_text("utf-8")
    plain = {re.sub(r"\{(\w)\w*\}", r"{\1}", path).replace("{n}", "{i}") for path in routes}
    told = page.partition("## Endpoints")[2].partition("\n## ")[0].replace("{id}", "{i}")
    plain -= {"/v1/tokenize", "/v1/detokenize"}  # the page says "and under /v1"
    assert len(plain) > 18 and not [path for path in plain if f"`{path}`" not in told]


def test_the_description_is_openapi_3_1_in_structure() -> None:
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT and DOCUMENT["openapi"] == "3.1.0"
    assert set(DOCUMENT) <= {"openapi", "info", "security", "paths", "components"} and DOCUMENT["info"]["version"]

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/components/schemas/") in COMPONENTS
            if "properties" in node:
                assert set(node.get("required", [])) <= set(node["properties"])
            for inner in node.values():
                walk(inner)
        elif isinstance(node, list):
            for inner in node:
                walk(inner)

    walk(DOCUMENT)
    bodies = 0
    for path, methods in DOCUMENT["paths"].items():
        assert path.startswith("/") and set(methods) <= {"get", "post", "put"}
        for operation in methods.values():
            assert operation["summary"] and {"200", "400", "503"} <= set(operation["responses"])
            assert all(answer["description"] for answer in operation["responses"].values())
            assert ("{id}" in path) == any(p["name"] == "id" for p in operation.get("parameters", []))
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                assert is_valid(content["example"], content["schema"], COMPONENTS)
                bodies += 1
    assert bodies > 6


def test_fields_that_ask_for_nothing_pass_and_unknown_ones_are_ignored() -> None:
    idle = {"n": 1, "best_of": 1, "logprobs": None, "top_logprobs": 0, "echo": False, "suffix": "", "tools": [],
            "tool_choice": "auto", "response_format": {"type": "text"}, "user": "me", "nonsense": 7}  # fmt: skip
    for call in (chat, completion, generate):
        call(**idle)
    assert generate(sampling_params={"n": 1, "regex": None, "json_schema": None, "max_new_tokens": None})


def test_whole_numbers_are_integers_and_zero_likeliest_tokens_are_all() -> None:
    asked = chat(max_tokens=4.0, seed=3.0, top_k=0, n=2.0, stop_token_ids=[5.0, 6], logprobs=True, top_logprobs=2.0)
    assert (asked.params[0].max_new_tokens, asked.params[0].top_k, asked.n) == (4, -1, 2)
    assert asked.params[0].stop_token_ids == (5, 6) and asked.params[0].logprobs.top == 2
    assert completion([1.0, 2]).prompts == [[1, 2]] and SamplingParams(top_k=0) == SamplingParams()
    native = generate(sampling_params={"max_new_tokens": 3.0}, return_logprob=True, logprob_start_len=0.0)
    assert native.params[0].max_new_tokens == 3 and native.params[0].logprobs.start == 0
    assert parse.parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    for wrong in ({"max_tokens": 4.5}, {"seed": "4"}, {"top_k": -2}, {"stop_token_ids": [1.5]}):
        assert refused(chat, **wrong).param == next(iter(wrong))


def test_values_that_ask_for_nothing_pass_and_what_constrains_acts(caplog: pytest.LogCaptureFixture) -> None:
    for call in (chat, response):
        call(verbosity="low", service_tier="flex", truncation="auto")
    parse.leave_out.cache_clear()
    response(text={"verbosity": "low"}, truncation="auto")
    assert "nothing is cut" in caplog.text
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = chat(response_format={"type": "json_object", "schema": schema}).params[0].grammar
    assert (asked.kind, json.loads(asked.text), asked.origin) == ("json_schema", schema, "response_format")
    for call in (chat, completion, response):
        asked = call(grammar='root ::= "a"').params[0].grammar
        assert (asked.kind, asked.text, asked.origin) == ("ebnf", 'root ::= "a"', "grammar")
    told = lambda **wish: chat(**wish).chat["template_kwargs"]  # noqa: E731
    for wish, thinks in (({"thinking": {"type": "disabled"}}, False), ({"thinking": {"type": "enabled"}}, True),
                         ({"enable_thinking": False}, False), ({"enable_thinking": True}, True)):  # fmt: skip
        assert told(**wish) == {"enable_thinking": thinks}
    for name in ("format", "guided_decoding"):
        assert refused(chat, **{name: {"type": "json"}}).param == name


def test_a_line_of_its_own_switches_a_refused_field_on() -> None:
    class Later(fields.Chat):
        priority: fields.Integer = fields.does("who comes first")

    assert fields.read(Later, {**CHAT, "priority": 3}).priority == 3
    assert refused(fields.read, Later, {**CHAT, "priority": "3"}).message == "priority must be an integer, got '3'"
    assert "priority" in fields.acting(Later) and "priority" not in fields.acting(fields.Chat)


def test_the_debug_line_names_what_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "minispec"):
        chat(nonsense=1, user="me", tools=None)
    assert [record.getMessage() for record in caplog.records] == ["ignored fields: ['nonsense']"]


def test_token_limits_follow_the_dialect() -> None:
    assert chat().params[0].max_new_tokens is None
    assert completion().params[0].max_new_tokens == 16
    assert generate().params[0].max_new_tokens == 128
    assert generate(sampling_params={"max_new_tokens": None}).params[0].max_new_tokens == 128
    assert chat(max_tokens=5).params[0].max_new_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).params[0].max_new_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=None).params[0].max_new_tokens == 7


def test_seed_and_sampling_fields_reach_the_parameters() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.2,
             "presence_penalty": -0.3, "repetition_penalty": 1.2, "logit_bias": {"3": 2}, "stop": "x",
             "stop_token_ids": [4], "ignore_eos": True, "no_stop_trim": True, "skip_special_tokens": False}  # fmt: skip
    expected = SamplingParams(**given, max_new_tokens=9, min_new_tokens=2, sampling_seed=11)
    assert chat(**given, max_tokens=9, min_tokens=2, seed=11).params == [expected]
    native = generate(sampling_params={**given, "max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 11})
    assert native.params == [expected]
    assert expected != SamplingParams()


def test_model_defaults_fill_what_the_request_leaves_out(tmp_path: Path) -> None:
    given = {"temperature": 0.3, "top_k": 0, "top_p": None, "max_length": 20, "min_p": 0.05}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    defaults = sampling_defaults(Config(), tmp_path)
    assert defaults == {"temperature": 0.3, "top_k": -1, "min_p": 0.05}
    params = parse.parse_chat({**CHAT, "temperature": 0.0, "min_p": None}, defaults).params[0]
    assert (params.temperature, params.min_p, params.top_p) == (0.0, 0.05, 1.0)


# ---- messages and prompts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        None, [], "hi", [3], [{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}],
        [{"role": "pirate", "content": "x"}], [{"role": "user", "content": 3}], [{"role": "user", "content": [3]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": ["user"], "content": "x"}],
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: Any) -> None:
    assert refused(parse.parse_chat, {"messages": messages}, {}).param == "messages"


def test_text_parts_become_text_and_unknown_message_fields_vanish() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    job = parse.parse_chat({"messages": [{"role": "user", "content": parts, "refusal": None, "evil": 1}]}, {})
    assert job.prompts == [[{"role": "user", "content": "a\nb"}]]


def test_a_matched_stop_stays_by_either_name() -> None:
    for call in (chat, completion):
        assert call(include_stop_str_in_output=True).params == call(no_stop_trim=True).params != call().params
        assert refused(call, include_stop_str_in_output=1).param == "include_stop_str_in_output"


@pytest.mark.parametrize(("keep", "left"), [(3, [7, 8, 9]), (100, list(range(10))), (-1, [4, 5, 6, 7, 8, 9])])
def test_a_prompt_is_cut_at_its_beginning(keep: int, left: list[int]) -> None:
    native = {"input_ids": list(range(10)), "sampling_params": {"max_new_tokens": 6}, "truncate_prompt_tokens": keep}
    job = completion(list(range(10)), truncate_prompt_tokens=keep, max_tokens=6)
    for wish in (job, parse.parse_generate(native)):
        assert parse.tokenize(wish, None, 12)[0].prompt_ids == left
    many = completion(list(range(10)), truncate_prompt_tokens=-1, max_tokens=32000)
    assert parse.tokenize(many, None, 12)[0].prompt_ids == [4, 5, 6, 7, 8, 9], "the output has half of the context"
    if keep == -1:  # where trees need room, prompts end earlier
        assert parse.tokenize(job, None, 12, 4)[0].prompt_ids == [6, 7, 8, 9]
    assert refused(completion, truncate_prompt_tokens=0).param == "truncate_prompt_tokens"


def test_template_variables_are_plain_values_under_free_names() -> None:
    kwargs = {"enable_thinking": False, "effort": "low", "k": 3}
    assert chat(chat_template_kwargs=kwargs).chat["template_kwargs"] == kwargs
    assert chat(reasoning_effort="low").chat["template_kwargs"] == {"reasoning_effort": "low"}
    bad = ({"tokenize": True}, {"messages": []}, {"x": [1]}, {"__class__": 1}, {"a b": 1}, {"x": "y" * 2000}, ["x"])
    for value in bad:
        assert refused(chat, chat_template_kwargs=value).param == "chat_template_kwargs"


def test_continuing_the_final_message_needs_one_of_the_assistant() -> None:
    assert refused(chat, continue_final_message=True).param == "continue_final_message"
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Once"}]
    job = parse.parse_chat({"messages": messages, "continue_final_message": True}, {})
    assert (job.chat["continue_final_message"], job.chat["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]), (["a"], ["a"])],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: Any, prompts: Any) -> None:
    assert completion(prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [1, "a"], ["a", [1]], [True], [1.5], {"a": 1}, 3, None, ["a"] * 1000]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refused(completion, prompt).param == "prompt"


def test_native_batches_pair_prompts_with_parameters() -> None:
    job = generate(["a", "b"], sampling_params=[{"temperature": 0}, {"top_k": 3}], rid=["x", "y"])
    assert job.batched and job.rids == ["x", "y"]
    assert [p.temperature for p in job.params] == [0.0, 1.0] and [p.top_k for p in job.params] == [-1, 3]
    for wrong in ({"sampling_params": [{}]}, {"rid": ["x"]}, {"rid": ""}, {"input_ids": [1]}, {"sampling_params": 3},
                  {"sampling_params": {"tempreature": 1}}):  # fmt: skip
        refused(generate, ["a", "b"], **wrong)
    refused(parse.parse_generate, {})
    refused(parse.parse_generate, {"input_ids": "text"})
    refused(parse.parse_generate, {"text": [1, 2]})


def test_rids_of_one_job_share_a_stem() -> None:
    rids = completion(["a", "b", "c"]).rids
    assert len(set(rids)) == 3 and {rid.rpartition("-")[0] for rid in rids} == {rids[0].removesuffix("-0")}


def test_an_oversized_prompt_is_refused_before_the_tokenizer_sees_it() -> None:
    class Untouchable:
        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            raise AssertionError("tokenized")

        encode_chat = encode

    for job in (completion("x" * 2000), chat(messages=[{"role": "user", "content": "é" * 1000}])):
        assert refused(parse.tokenize, job, Untouchable(), 20).code == "context_length_exceeded"
    with pytest.raises(AssertionError, match="tokenized"):
        parse.tokenize(completion("x" * 100), Untouchable(), 20)


def test_the_default_limit_gives_way_to_the_context_and_an_explicit_one_does_not() -> None:
    ids = list(range(10))
    for job, limit in ((completion(ids), 2), (completion(ids, max_tokens=16), 16), (chat(), None)):
        job = dataclasses.replace(job, dialect="completion", prompts=[ids])
        assert parse.tokenize(job, None, 12)[0].params.max_new_tokens == limit
    for wish, limit in (({}, 2), ({"max_new_tokens": 100}, 100), ({"max_new_tokens": None}, 2)):
        job = parse.parse_generate({"input_ids": ids, "sampling_params": wish})
        assert parse.tokenize(job, None, 12)[0].params.max_new_tokens == limit


def test_spaces_between_special_tokens_is_taken_and_asks_for_nothing() -> None:
    for value in (True, False, None):
        wish = {"spaces_between_special_tokens": value}
        assert chat(**wish).params == chat().params and completion("a", **wish).params == completion("a").params
        native = parse.parse_generate({"text": "a", "sampling_params": wish})
        assert native.params == parse.parse_generate({"text": "a"}).params


# ---- answers ---------------------------------------------------------------------------------------------------------

PIECES = [([5], "He"), ([6, 7], ""), ([8], "llo 😀"), ([9, 10, 11], "!")]


def run(job: parse.Job, **options: Any) -> tuple[Reply, list[dict[str, Any]]]:
    """Feed every request of the job the same updates; return the reply and the events of its stream."""
    requests = [Request(rid, [1, 2, 3], params) for rid, params in zip(job.rids, job.params, strict=True)]
    reply = Reply(job, requests, Served("m", byte_tokenizer(256), **options))
    events = reply.opening() if job.stream else []
    for n, (ids, text) in enumerate(PIECES):
        finish = Finish("stop", 11) if n == len(PIECES) - 1 else None
        for request in requests:
            request.output_ids += ids
            events += reply.take(Update(request, ids, text, finish))
    assert reply.done
    return reply, events + (reply.closing() if job.stream else [])


def test_chat_stream_has_the_order_clients_expect() -> None:
    _, events = run(chat(stream=True, stream_options={"include_usage": True}))
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["delta"].get("content") for e in events[1:-2]] == ["He", "llo 😀", "!"]
    assert events[-2]["choices"][0]["delta"] == {} and events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 7
    assert all(e["usage"] is None for e in events[:-1])
    assert all(e["choices"][0]["finish_reason"] is None for e in events[:-2])


@pytest.mark.parametrize("interval", [1, 2, 5, 100])
def test_deltas_add_up_to_the_answer(interval: int) -> None:
    whole = run(chat())[0].result()["choices"][0]["message"]["content"]
    events = run(chat(stream=True), stream_interval=interval)[1]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == whole == "Hello 😀!"
    events = run(completion(["a", "b"], stream=True), stream_interval=interval)[1]
    for i in range(2):
        assert "".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i) == whole
    assert sum(e["choices"][0]["finish_reason"] == "stop" for e in events) == 2
    assert interval == 1 or len(events) < 6


def test_a_request_may_have_an_interval_of_its_own() -> None:
    texts = [e["choices"][0]["delta"].get("content") for e in run(chat(stream=True, stream_interval=3))[1]]
    assert texts == ["", "He", "llo 😀!", None]
    native = generate(["a", "b"], stream=True, sampling_params=[{}, {"stream_interval": 9}], stream_interval=3)
    assert [e["index"] for e in run(native)[1]] == [0, 0, 1]


def test_ids_are_returned_when_asked_for_and_those_of_events_add_up() -> None:
    ids = [5, 6, 7, 8, 9, 10, 11]
    whole = run(chat(return_token_ids=True))[0].result()
    assert whole["prompt_token_ids"] == [1, 2, 3] and whole["choices"][0]["token_ids"] == ids
    events = run(chat(return_token_ids=True, stream=True))[1]
    assert [e.get("prompt_token_ids") for e in events] == [[1, 2, 3]] + [None] * (len(events) - 1)
    parts = [e["choices"][0].get("token_ids", []) for e in events]
    assert sum(parts, []) == ids
    assert parts[-2:] == [[9, 10], [11]], "the token that ends the text is with the reason, not with the text"
    kept = run(chat(return_token_ids=True, stream=True, no_stop_trim=True))[1]
    assert [e["choices"][0].get("token_ids") for e in kept][-2:] == [[9, 10, 11], None]
    whole = run(completion(["a", "b"], return_token_ids=True))[0].result()
    assert [(c["prompt_token_ids"], c["token_ids"]) for c in whole["choices"]] == [([1, 2, 3], ids)] * 2
    choices = [e["choices"][0] for e in run(completion(["a", "b"], return_token_ids=True, stream=True))[1]]
    for i in range(2):
        own = [c for c in choices if c["index"] == i]
        assert sum((c["token_ids"] for c in own), []) == ids and "".join(c["text"] for c in own) == "Hello 😀!"
        assert [c.get("prompt_token_ids") for c in own] == [[1, 2, 3]] + [None] * (len(own) - 1)
    assert "token_ids" not in json.dumps(run(chat())[0].result()) + json.dumps(run(chat(stream=True))[1])


def test_continuous_usage_counts_up() -> None:
    _, events = run(chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 7


def test_native_events_are_cumulative_and_the_last_is_the_answer() -> None:
    reply, events = run(generate(stream=True))
    assert [e["text"] for e in events] == ["He", "He", "Hello 😀", "Hello 😀!"]
    assert [len(e["output_ids"]) for e in events] == [1, 3, 4, 7]
    result, times = reply.result(), {"e2e_latency": 0, "response_sent_to_client_ts": 0}
    last, whole = ({**answer, "meta_info": {**answer["meta_info"], **times}} for answer in (events[-1], result))
    assert last == whole
    assert events[0]["meta_info"]["finish_reason"] is None
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": 11}


def test_native_batches_answer_a_list_and_single_prompts_an_object() -> None:
    assert isinstance(run(generate("a"))[0].result(), dict)
    assert [r["meta_info"]["id"] for r in run(generate(["a"], rid=["q"]))[0].result()] == ["q"]
    assert {e["index"] for e in run(generate(["a", "b"], stream=True))[1]} == {0, 1}


def test_speculation_fields_follow_their_definitions() -> None:
    request = Request("r", [1, 2], SamplingParams())
    for kept in (Kept(1), Kept(3, "head", 7, 2), Kept(3, "lookup", 11, 2), Kept(2, "head", 7, 2)):
        request.verified.add(kept)
    info = meta_info(request, 11, Finish("length"), nodes=8)
    assert info["finish_reason"] == {"type": "length", "length": 11} and info["e2e_latency"] > 0
    assert (info["spec_verify_ct"], info["spec_accept_token_num"], info["spec_draft_token_num"]) == (4, 6, 25)
    assert info["spec_accept_rate"] == 6 / 25 and info["spec_accept_length"] == 9 / 4, "a stop cut the last step"
    assert info["spec_accept_histogram"] == [1, 0, 3]
    assert not any("spec" in key for key in meta_info(request, 11, None, nodes=8))
    assert not any("spec" in key for key in meta_info(request, 11, Finish("length"), nodes=1))


@pytest.mark.parametrize("make", [chat, completion])
def test_what_speculation_gave_is_told_once_and_only_when_asked_for(make: Any) -> None:
    wish = {"return_spec_tokens_details": True}
    unasked = [run(make(), nodes=8)[0].result(), *run(make(stream=True), nodes=8)[1]]
    assert not any("sglext" in answer for answer in unasked)
    assert "sglext" not in run(make(**wish))[0].result(), "the server does not speculate"
    reply = run(make(**wish), nodes=8)[0]
    assert reply.result()["sglext"]["spec_tokens_details"]["spec_accept_length"] == 0
    reply.requests[0].verified.add(Kept(3, "lookup", 11, 2))
    details = reply.result()["sglext"]["spec_tokens_details"]
    assert details["spec_by_source"] == {"lookup": {
        "spec_verify_ct": 1, "spec_accept_length": 3.0, "spec_num_proposed_drafts": 11, "spec_num_correct_drafts": 2,
        "spec_accept_rate": 2 / 11}}  # fmt: skip
    assert details["spec_correct_drafts_histogram"] == [0, 0, 1]
    assert len(run(make(n=2, **wish), nodes=8)[0].result()["sglext"]["spec_tokens_details"]) == 2
    for usage in (False, True):
        *events, last = run(make(stream=True, stream_options={"include_usage": usage}, **wish), nodes=8)[1]
        told = events.pop() if usage else last
        assert told["choices"] == [] and told["sglext"] and not any("sglext" in event for event in events)
        assert (last["usage"]["completion_tokens"], told["usage"]) == (7, None) if usage else "usage" not in last
    assert refused(make, return_spec_tokens_details=1).param == "return_spec_tokens_details"


def test_cached_tokens_are_reported_when_asked_for() -> None:
    reply = run(chat(), cache_report=True)[0]
    assert reply.usage()["prompt_tokens_details"] is None
    reply.requests[0].cached_tokens = 2
    assert reply.usage()["prompt_tokens_details"] == {"cached_tokens": 2}
    assert reply.usage()["total_tokens"] == 10


def test_an_abort_becomes_an_error() -> None:
    job = chat()
    request = Request(job.rids[0], [1], job.params[0])
    with pytest.raises(RequestError, match="gone") as caught:
        end = Update(request, [], "", Finish("abort", message="gone", status=503))
        Reply(job, [request], Served("m", byte_tokenizer(256))).take(end)
    assert caught.value.status == 503


def test_errors_are_wrapped_as_openai_does() -> None:
    body = error_body(RequestError("no", "model", 404, "model_not_found"))
    assert body == {"error": {"message": "no", "type": "not_found_error", "param": "model", "code": "model_not_found"}}
    assert error_body(RequestError("no"))["error"]["type"] == "invalid_request_error"
    assert error_body(RequestError("no", None, 503))["error"]["type"] == "server_error"
    assert sse({"a": "é"}) == 'data: {"a":"é"}\n\n'.encode()
