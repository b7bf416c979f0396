"""/v1/responses: what a body becomes, the items that come back, and typed events in the order that OpenAI documents.

The golden orders are those of OpenAI's reference (streamed text, a streamed call) and, for reasoning that is told as it
is, of its types of events. Every event and every answer is checked against the types of OpenAI's own client.
"""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from openai.types import responses as theirs
from openai.types.responses import response_create_params
from test_schema import refused
from test_schema import response as job
from test_server import Running
from test_tools import CLOCK, PARIS, WEATHER, cuts, prompt_of, templated

from minispec.load.chat_templates import NAMED
from minispec.load.tokenizer import byte_tokenizer
from minispec.replies.formats import CALLS, THOUGHTS, Formats
from minispec.request import ABORT_WANTED, Finish, Request, RequestError, Update
from minispec.serve import fields, parse
from minispec.serve.reply import Served, sse
from minispec.serve.responses import ResponseReply, parse_response
from minispec.server import _prepare

EVENTS = {get_args(kind.model_fields["type"].annotation)[0]: kind  # OpenAI's types of events by their names
          for kind in get_args(get_args(theirs.ResponseStreamEvent)[0])}  # fmt: skip
TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
FORMATS = Formats(CALLS["hermes"], THOUGHTS["qwen3"])
CALL = f"<tool_call>{PARIS}</tool_call>"


def refusal(**body: Any) -> RequestError:
    error = refused(job, **body)
    assert len(error.message) < 1000
    return error


# ---- bodies ----------------------------------------------------------------------------------------------------------

WEATHER_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}', "id": "fc_1"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
SAID = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "So.", "annotations": []}]}  # fmt: skip
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
USER, SO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "So."}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "rain"}

INPUTS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("hi", [USER]),
    ([USER], [USER]),
    ([{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"},
                                                           {"type": "input_text", "text": "b"}]}],
     [{"role": "developer", "content": "a\nb"}]),
    ([USER, SAID, USER], [USER, SO, USER]),
    ([USER, CALLED, RESULT], [USER, {"role": "assistant", "content": "", "tool_calls": [WEATHER_CALL]}, TOOL]),
    ([USER, THOUGHT, SAID, CALLED, CALLED, RESULT],
     [USER, {**SO, "reasoning_content": "Hm", "tool_calls": [WEATHER_CALL] * 2}, TOOL]),
    ([USER, CALLED, RESULT, THOUGHT, CALLED],
     [USER, {"role": "assistant", "content": "", "tool_calls": [WEATHER_CALL]}, TOOL,
      {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [WEATHER_CALL]}]),
    ([USER, SAID, THOUGHT, CALLED],
     [USER, SO, {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [WEATHER_CALL]}]),
    ([USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}, SAID],
     [USER, {**SO, "reasoning_content": "Hm"}]),
    ([THOUGHT, USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, SAID], [USER, SO]),
    ([USER, {**RESULT, "output": [{"type": "input_text", "text": "rain"}]}], [USER, TOOL]),
    ([USER, {**SAID, "content": []}], [USER, {"role": "assistant", "content": ""}]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "messages"), INPUTS)
def test_items_become_the_messages_of_a_chat(given: Any, messages: list[dict[str, Any]]) -> None:
    assert job(given).prompts == [messages]
    system = {"role": "system", "content": "Be brief."}
    assert job(given, instructions="Be brief.").prompts == [[system, *messages]]


def test_a_response_is_asked_for_as_its_chat() -> None:
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ["x"], "cache_salt": "s", "min_tokens": 2,
            "rid": "mine", "stream": True, "stream_interval": 4, "truncate_prompt_tokens": -1,
            "parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chats = {"messages": [USER], "max_completion_tokens": 9, "reasoning_effort": "low", "tools": [WEATHER, CLOCK],
             "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}  # fmt: skip
    ours = {"input": "hi", "max_output_tokens": 9, "reasoning": {"effort": "low", "summary": "auto"}, "tools": TOOLS,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}}  # fmt: skip
    chat, response = parse.parse_chat({**same, **chats}, {}), parse_response({**same, **ours}, {})
    for name in ("prompts", "params", "rids", "limited", "intervals", "salt", "stream", "truncate", "chat", "wish"):
        assert getattr(chat, name) == getattr(response, name), name
    assert chat.params[0].grammar is not None and response.rids == ["mine"] and job().rids[0].startswith("resp_")
    assert job(text={"format": {"type": "json_object"}}).params[0].grammar.text == '{"type":"object"}'
    assert job(text={"format": {"type": "text"}}).params[0].grammar is None
    assert parse_response({"input": "a"}, {"temperature": 0.6}).params[0].temperature == 0.6


def test_a_choice_of_tools_is_that_of_the_chat() -> None:
    named = {"type": "function", "name": "clock"}
    allowed = {"type": "allowed_tools", "tools": [named]}
    for choice, shown, must, only in (
        (None, 2, False, None), ("auto", 2, False, None), ("none", 0, False, None), ("required", 2, True, None),
        (named, 2, True, "clock"), ({**allowed, "mode": "auto"}, 1, False, None),
        ({**allowed, "mode": "required"}, 1, True, None),
    ):  # fmt: skip
        wish = job(tools=TOOLS, tool_choice=choice).wish
        assert (len(wish.tools), wish.must, wish.only) == (shown, must, only), choice
    assert wish.tools == (CLOCK | {"function": {"name": "clock"}},)
    form = {"text": {"format": {"type": "json_object"}}}
    assert job(tools=TOOLS, tool_choice="required", **form).params[0].grammar is None


SPACE = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [
    {"type": "function", "name": "read", "parameters": {"type": "object"}}]}  # fmt: skip
PATCH = {"type": "custom", "name": "patch", "description": "of files", "format": {"type": "text"}}


def test_what_codex_sends_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """Its tools, the items that it hands back, and what is left out of both."""
    parse.leave_out.cache_clear()
    left_out = [{"type": kind} for kind in ("web_search", "image_generation", "local_shell", "web_search")]
    read = {"type": "function_call", "call_id": "c1", "namespace": "mcp__files", "name": "read", "arguments": '{"p'}
    image = {"type": "input_image", "image_url": "data:x"}
    asked = job([
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}, image]},
        {"type": "additional_tools", "role": "developer", "tools": [PATCH]}, USER, read,
        {"type": "web_search_call", "id": "ws_1", "status": "completed"}, {**RESULT, "output": [image]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ], tools=[*TOOLS, SPACE, *left_out], tool_choice="auto", client_metadata={"a": "b"}, reasoning=None)  # fmt: skip
    assert [tool["function"]["name"] for tool in asked.wish.tools] == ["weather", "clock", "mcp__files__read", "patch"]
    assert asked.wish.tools[3]["function"]["parameters"]["required"] == ["input"]
    made = [call["function"] for turn in asked.prompts[0] for call in turn.get("tool_calls", ())]
    assert made == [{"name": "mcp__files__read", "arguments": {"arguments": '{"p'}},
                    {"name": "patch", "arguments": {"input": "*** Begin"}}]  # fmt: skip
    contents = [turn["content"] for turn in asked.prompts[0]]
    assert contents == ["D\n[image left out]", "hi", "", "[image left out]", "", "done", "No."]
    kinds = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    kinds_of = ["image", "web_search", "image_generation", "local_shell", "web_search_call"]
    assert sorted(kinds) == sorted(map(repr, kinds_of))
    pair = {"type": "function", "namespace": "mcp__files", "name": "read"}
    assert job(tools=[SPACE], tool_choice=pair).wish.only == "mcp__files__read"
    assert job(tools=[PATCH], tool_choice={"type": "custom", "name": "patch"}).wish.only == "patch"
    twice = {"type": "function", "name": "mcp__files__read"}
    assert "names of their own" in refusal(tools=[SPACE, twice]).message
    assert job("", max_output_tokens=1).prompts == job([], max_output_tokens=1).prompts == [[{**USER, "content": ""}]]


@pytest.mark.parametrize("cut", [False, True])
def test_a_call_has_its_client_s_names_and_a_custom_one_its_text(cut: bool) -> None:
    for name, arguments, kind, told in (
        ("mcp__files__read", '{"path": "a"}', "function_call", {"namespace": "mcp__files", "name": "read"}),
        ("patch", '{"input": "a\\n\\"b"}', "custom_tool_call", {"name": "patch", "input": 'a\n"b'}),
    ):  # fmt: skip
        text = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        finish, status = ("length", "incomplete") if cut else ("stop", "completed")
        text = text[: text.rindex('"}')] if cut else text
        for pieces in cuts(text):
            events = streamed(pieces, finish, tools=[SPACE, PATCH])
            (item,) = events[-1]["response"]["output"]
            shown = {k: v for k, v in told.items() if not cut or k != "input"}
            assert (item["type"], item["status"]) == (kind, status) and shown.items() <= item.items()
            assert item.get("arguments", arguments).startswith(arguments[: -2 if cut else None])
            if kind == "custom_tool_call":
                assert told["input"].startswith(item["input"]) and item["input"].startswith("a")
                deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
                assert deltas == [item["input"]]


def test_what_the_model_is_shown_is_what_a_chat_shows() -> None:
    hermes = templated(NAMED["hermes"].source)
    made = {"role": "assistant", "content": None, "tool_calls": [WEATHER_CALL]}
    chat = {"messages": [{"role": "system", "content": "Be brief."}, USER, made, TOOL], "tools": [WEATHER]}
    response = job([USER, CALLED, RESULT], instructions="Be brief.", tools=TOOLS[:1])
    assert prompt_of(response, hermes) == prompt_of(parse.parse_chat(chat, {}), hermes)


@pytest.mark.parametrize(("body", "param", "says"), [
    ({"store": True}, "store", "nothing is stored"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
    ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
    ({"background": True}, "background", "nothing is stored"),
    ({"prompt": {"id": "p"}}, "prompt", "a prompt is text"),
    ({"truncation": "all"}, "truncation", "must be 'disabled' or 'auto'"),
    ({"include": ["file_search_call.results"]}, "include", "include[0] must be 'reasoning.encrypted_content'"),
    ({"include": ["message.output_text.logprobs"]}, "include", "got 'message.output_text.logprobs'"),
    ({"top_logprobs": 3}, "top_logprobs", "responses have none"),
    ({"n": 2}, "n", "n is not supported"),
    ({"tools": [{"name": "web_search"}]}, "tools", "tools[0] must be a tool, got"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "an object of type function"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}},
     "tool_choice", "no tools"),
    ({"tools": [CLOCK]}, "tools", "tools[0].name is required"),
    ({"tools": TOOLS[:1] * 2}, "tools", "names of their own"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": {"type": "function", "name": "messages"}, "tools": TOOLS}, "tool_choice", "got 'messages'"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice", "an object of type function, custom or allowed_tools"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice", "one of the tools, got 'x'"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
     "tool_choice", "got 'x'"),
    ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens must be"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format.schema must be a JSON schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text", "text.format.type must be"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format", "regex, text.format may be given"),
    ({"regex": "a", "tool_choice": "required", "tools": TOOLS}, "regex",
     "regex may not be given where tool_choice asks for a call"),
    ({"metadata": {"a": 1}}, "metadata", "at most 16 texts"),
    ({"metadata": {str(i): "a" for i in range(17)}}, "metadata", "at most 16 texts"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "at most 16 texts"),
    ({"given": [{"type": "item_reference", "id": "msg_1"}]}, "input", "nothing is stored, so no item can be"),
    ({"given": [{"type": "my_call"}]}, "input", "input[0] must be an item of type message"),
    ({"given": [{"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}]}, "input",
     "input[0].content[0] must be a text part"),
    ({"given": None}, "input", "input must be text or a list of items"),
])  # fmt: skip
def test_what_cannot_be_is_refused_under_the_name_that_a_response_has_for_it(
    body: dict[str, Any], param: str, says: str
) -> None:
    error = refusal(**body)
    assert error.param == param and says in error.message, error.message


def test_what_asks_for_nothing_or_for_what_is_done_passes() -> None:
    wish = {"store": False, "background": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"],
            "service_tier": "auto", "previous_response_id": None, "conversation": None, "user": "me", "n": 1,
            "safety_identifier": "x", "prompt_cache_key": "k", "max_tool_calls": 3, "top_logprobs": 0,
            "stream_options": {"include_obfuscation": False}, "text": {"verbosity": "medium"},
            "nonsense": 7}  # fmt: skip
    assert job(**wish).params == job().params


def test_every_field_of_openai_s_client_is_known() -> None:
    names = set(response_create_params.ResponseCreateParamsBase.__annotations__)
    assert len(names) > 25 and not names - set(fields.Responses.model_fields)


def test_an_error_of_the_chat_template_names_the_input() -> None:
    tokenizer = templated(NAMED["llama-2"].source)  # has no place for a tool's result
    facts = SimpleNamespace(limits=SimpleNamespace(context_length=10**6, longest_prompt=None))
    front: Any = SimpleNamespace(facts=facts, tokenizer=tokenizer, validate=lambda request: None)
    with pytest.raises(RequestError, match="no place for the role tool") as caught:
        _prepare(job([USER, RESULT]), front, Served("m", tokenizer))
    assert caught.value.param == "input"


# ---- answers ---------------------------------------------------------------------------------------------------------


def replying(formats: Formats = FORMATS, **more: Any) -> ResponseReply:
    """Return the reply, which has nothing yet, to a request with tools and these fields."""
    asked = job(**{"tools": TOOLS, **more})
    request = Request(asked.rids[0], [1, 2], asked.params[0])
    return ResponseReply(asked, [request], Served("m", byte_tokenizer(256), formats=formats))


def fed(reply: ResponseReply, pieces: list[str], kind: str = "stop") -> list[dict[str, Any]]:
    """Return the events of a reply that gets these pieces and ends."""
    events = []
    for i, piece in enumerate(pieces or [""]):
        finish = Finish(kind) if i == max(len(pieces) - 1, 0) else None
        events += json.loads(json.dumps(reply.take(Update(reply.requests[0], [i], piece, finish))))
    return events


def streamed(pieces: list[str], kind: str = "stop", **more: Any) -> list[dict[str, Any]]:
    """Return the events of a stream of these pieces, each as valid as OpenAI's client wants it."""
    reply = replying(stream=True, **more)
    events = json.loads(json.dumps([*reply.opening(), *fed(reply, pieces, kind), *reply.closing()]))
    check(events)
    return events


def whole(pieces: list[str], kind: str = "stop", **more: Any) -> dict[str, Any]:
    """Return the same answer without a stream."""
    reply = replying(**more)
    assert fed(reply, pieces, kind) == []
    theirs.Response.model_validate(reply.result())
    return reply.result()


def check(events: list[dict[str, Any]]) -> None:
    """See that events are OpenAI's, numbered, about items that are there, and add up to what `done` says."""
    grown: dict[str, str] = {}
    for number, event in enumerate(events):
        EVENTS[event["type"]].model_validate(event)
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(grown) and event["item"]["status"] == "in_progress"
            grown[event["item"]["id"]] = ""
        elif kind.endswith(".delta"):
            assert event["item_id"] == list(grown)[-1] and event["delta"] and event["output_index"] == len(grown) - 1
            grown[event["item_id"]] += event["delta"]
        elif kind.endswith(("text.done", "arguments.done")):
            assert event.get("text", event.get("arguments")) == grown[event["item_id"]]
        elif kind == "output_item.done":
            item = event["item"]
            texts = [part["text"] for part in item.get("content", ())] or [item.get("arguments", item.get("input"))]
            assert texts == [grown[item["id"]]] and item["status"] in ("completed", "incomplete")


def order(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, several deltas as one."""
    return [kind.removeprefix("response.") for kind, _ in itertools.groupby(event["type"] for event in events)]


BEGIN, END = ["created", "in_progress"], ["completed"]
TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done"]  # fmt: skip
REASONING = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
             "content_part.done", "output_item.done"]  # fmt: skip
FUNCTION = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
EMPTY = [kind for kind in TEXT if not kind.endswith("delta")]
BROKEN = '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>'

ORDERS = {
    "text": ("Hello there", "stop", BEGIN + TEXT + END),
    "a call": (CALL, "stop", BEGIN + FUNCTION + END),
    "two calls": (CALL + "\n" + CALL, "stop", BEGIN + FUNCTION * 2 + END),
    "text and a call": ("Let me look.\n" + CALL, "stop", BEGIN + TEXT + FUNCTION + END),
    "a call and text": (CALL + "\nThere.", "stop", BEGIN + FUNCTION + TEXT + END),
    "reasoning and text": ("<think>Hm</think>\nSo.", "stop", BEGIN + REASONING + TEXT + END),
    "reasoning and a call": (f"<think>Hm</think>{CALL}", "stop", BEGIN + REASONING + FUNCTION + END),
    "nothing": ("", "stop", BEGIN + EMPTY + END),
    "text cut": ("Hello", "length", [*BEGIN, *TEXT, "incomplete"]),
    "reasoning cut": ("<think>Hm", "length", [*BEGIN, *REASONING, "incomplete"]),
    "a call cut": (CALL[:50], "length", [*BEGIN, *FUNCTION, "incomplete"]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_events_come_in_the_order_that_openai_documents(name: str) -> None:
    text, kind, golden = ORDERS[name]
    for pieces in cuts(text):
        assert order(streamed(pieces, kind)) == golden


def test_a_call_that_broke_off_is_incomplete_where_it_was_told_of_and_left_out_of_the_answer() -> None:
    assert order(streamed([BROKEN])) == BEGIN + TEXT + END
    assert order(streamed(["Ah. " + BROKEN, " then"])) == BEGIN + TEXT * 2 + END
    events = streamed(list(BROKEN))
    assert order(events) == BEGIN + FUNCTION + TEXT + END
    (made,) = (e["item"] for e in events if e["type"].endswith("item.done") and e["item"]["type"] == "function_call")
    assert made["status"] == "incomplete" and made["arguments"] == '{"city": '
    (item,) = events[-1]["response"]["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == BROKEN


def test_a_limit_leaves_the_answer_and_its_last_item_incomplete() -> None:
    for answer in (whole(list("Hello"), "length"), streamed(list("Hello"), "length")[-1]["response"]):
        assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][0]["status"] == "incomplete" and answer["completed_at"] is None
    done = whole(list("Hello"))
    assert done["incomplete_details"] is None and done["output"][0]["status"] == "completed" and done["completed_at"]


def test_an_interval_gathers_deltas() -> None:
    text = "Hello,you"
    for interval in (1, 4, 100):
        deltas = [e["delta"] for e in streamed(list(text), stream_interval=interval) if e["type"].endswith(".delta")]
        assert "".join(deltas) == text and len(deltas) == -(-len(text) // interval)


def test_the_usage_counts_tokens_and_those_of_the_reasoning() -> None:
    usage = whole(list("<think>Hm</think>So."))["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (2, 20, 22)
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}  # a byte is a token
    assert usage["input_tokens_details"]["cached_tokens"] == 0
    assert whole(list("So."))["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_the_answer_repeats_what_was_asked_for() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    wish = {"instructions": "Be brief.", "max_output_tokens": 9, "metadata": {"a": "b"}, "temperature": 0.5,
            "top_p": 0.9, "tool_choice": "auto", "parallel_tool_calls": False, "text": {"format": form}}  # fmt: skip
    for answer in (whole(["a"], **wish), *(e["response"] for e in streamed(["a"], **wish) if "response" in e)):
        assert {name: answer[name] for name in wish} == wish
        assert [tool["name"] for tool in answer["tools"]] == ["weather", "clock"] and answer["store"] is False
    assert whole(["a"], tool_choice="none")["tools"] == [] and whole(["a"])["tool_choice"] == "auto"
    named = {"type": "function", "name": "clock"}
    assert whole(["a"], tool_choice=named)["tool_choice"] == named


def test_a_failure_is_told_in_openai_s_form_with_the_answer_so_far() -> None:
    reply = replying(stream=True)
    events = [*reply.opening(), *reply.take(Update(reply.requests[0], [5], "Hel"))]
    with pytest.raises(RequestError) as caught:
        reply.take(Update(reply.requests[0], [], "", Finish("abort", message="gone", status=ABORT_WANTED)))
    events += reply.failure(RequestError("late", None, 504, "timeout"))
    check(events)
    assert order(events)[-3:] == ["output_text.delta", "error", "failed"] and caught.value.status == ABORT_WANTED
    assert (events[-2]["code"], events[-2]["message"], events[-2]["error"]["type"]) == ("timeout", "late",
                                                                                        "server_error")  # fmt: skip
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"] == {"code": "server_error", "message": "late"}
    assert failed["output"][0]["status"] == "incomplete" and failed["output"][0]["content"][0]["text"] == "Hel"
    other = replying(stream=True).failure(RequestError("wrong", "input", 400))
    assert other[-1]["response"]["error"]["code"] == "invalid_prompt" and other[0]["param"] == "input"
    assert sse(events[-1]).startswith(b"event: response.failed\ndata: {") and reply.end == b""


# ---- served ----------------------------------------------------------------------------------------------------------


LONG_ONE = {"input": "Tell me something", "temperature": 0, "ignore_eos": True, "max_output_tokens": 900}


def test_a_stream_has_the_text_of_the_whole_answer_and_that_of_the_chat(served: Running) -> None:
    wish = {**LONG_ONE, "max_output_tokens": 60}
    told = served.ok("/v1/responses", wish)
    theirs.Response.model_validate(told)
    events, _ = served.stream("/v1/responses", wish)
    check(events)
    assert order(events) == [*BEGIN, *TEXT, "incomplete"]
    chat = {"messages": [{"role": "user", "content": wish["input"]}], "temperature": 0, "ignore_eos": True}
    said = served.ok("/v1/chat/completions", {**chat, "max_tokens": 60})
    texts = [answer["output"][0]["content"][0]["text"] for answer in (told, events[-1]["response"])]
    assert texts == [said["choices"][0]["message"]["content"]] * 2 and texts[0]
    usage = events[-1]["response"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (said["usage"]["prompt_tokens"], 60)
    assert usage["input_tokens_details"]["cached_tokens"] > 0
    assert events[0]["response"]["id"] == events[-1]["response"]["id"]
