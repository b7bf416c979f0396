"""/v1/messages: what a body becomes, blocks and events in Anthropic's order, and its errors, by its client's types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_schema import refused
from test_server import Running
from test_tools import CALLS, PARIS, WEATHER, cuts

from minispec.load.tokenizer import byte_tokenizer
from minispec.replies.formats import THOUGHTS, Formats
from minispec.request import Finish, Request, RequestError, TooLong, Update
from minispec.serve import fields, parse
from minispec.serve.messages import MessageReply, error_of, parse_message
from minispec.serve.reply import Served, sse

anthropic = pytest.importorskip("anthropic")

FORMATS = Formats(CALLS["hermes"], THOUGHTS["qwen3"])
TOOLS = [{"name": "weather", "description": "of a place", "input_schema": WEATHER["function"]["parameters"]},
         {"name": "clock", "input_schema": {"type": "object"}}]  # fmt: skip
USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
CALLED = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
THOUGHT = {"type": "thinking", "thinking": "Hm", "signature": "x"}
SO = {"type": "text", "text": "So."}


def job(*messages: Any, **more: Any) -> parse.Job:
    return parse_message({"max_tokens": 9, "messages": list(messages) or [USER], **more}, {})


# ---- bodies ----------------------------------------------------------------------------------------------------------


def test_blocks_become_the_messages_of_a_chat() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"},
              {"type": "image", "source": {"type": "base64", "data": "x"}}], "is_error": False}  # fmt: skip
    asked = job(USER, {"role": "assistant", "content": [THOUGHT, {"type": "redacted_thinking", "data": "x"}, SO, USE]},
                {"role": "user", "content": [result, {"type": "tool_result", "tool_use_id": "t2"}, SO]},
                {"role": "system", "content": "Brief."},
                {"role": "user", "content": [{**SO, "cache_control": {"type": "ephemeral"}}]},
                system=[SO, {"type": "text", "text": "Then."}])  # fmt: skip
    assert asked.prompts == [[
        {"role": "system", "content": "So.\nThen."}, USER,
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain\n[image left out]"},
        {"role": "tool", "tool_call_id": "t2", "content": ""}, {"role": "user", "content": "So."},
        {"role": "system", "content": "Brief."}, {"role": "user", "content": "So."},
    ]]  # fmt: skip
    assert asked.chat["add_generation_prompt"] and asked.rids[0].startswith("msg_")
    continued = job(USER, {"role": "assistant", "content": "Once"})
    assert continued.chat["continue_final_message"] and not continued.chat["add_generation_prompt"]
    assert not job(USER, {"role": "assistant", "content": [USE]}).chat["continue_final_message"]


def test_fields_of_a_message_are_those_of_a_chat_under_their_names() -> None:
    params = job(stop_sequences=["x"], top_k=0, temperature=0.5, max_tokens=7.0).params[0]
    assert (params.stop, params.top_k, params.temperature, params.max_new_tokens) == (("x",), -1, 0.5, 7)
    for thinking, told in (("disabled", {"enable_thinking": False}), ("adaptive", {}),
                           ("enabled", {"enable_thinking": True})):  # fmt: skip
        assert job(thinking={"type": thinking}).chat["template_kwargs"] == told
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for field in ({"output_format": form}, {"output_config": {"format": form, "effort": "low"}}):
        assert job(**field).params[0].grammar.text == '{"type":"object"}'
    for choice, shown, must, only in ((None, 2, False, None), ("auto", 2, False, None), ("none", 0, False, None),
                                      ("any", 2, True, None), ("tool", 2, True, "clock")):  # fmt: skip
        named = {"name": only} if only else {}
        wish = job(tools=TOOLS, tool_choice=choice and {"type": choice, **named}).wish
        assert (len(wish.tools), wish.must, wish.only, wish.parallel) == (shown, must, only, True)
    assert wish.tools[0] == WEATHER and wish.tools[1]["function"]["name"] == "clock"
    assert not job(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).wish.parallel
    server = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    assert job(tools=[server, *TOOLS]).wish.tools == job(tools=TOOLS).wish.tools
    job(metadata={"user_id": "u"}, service_tier="auto", context_management={"edits": []}, model="claude")
    for wrong, param, says in (
        ({"max_tokens": None}, "max_tokens", "max_tokens must be"), ({"max_tokens": -1}, "max_tokens", "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences must hold"),
        ({"tools": TOOLS * 2}, "tools", "names of their own"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "'any'"),
        ({"tools": [server], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice", "one of the tools"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages", "messages[0].content[0] must be no tool_use"),
        ({"output_format": form, "regex": "a"}, "output_format", "regex, output_format"),
    ):  # fmt: skip
        error = refused(job, **wrong)
        assert error.param == param and says in error.message, error.message


def test_every_field_that_anthropic_s_client_knows_is_known() -> None:
    for theirs in (anthropic.types.message_create_params, anthropic.types.beta.message_create_params):
        names = set(theirs.MessageCreateParamsBase.__annotations__)
        assert len(names) > 15 and not names - set(fields.Messages.model_fields)


# ---- answers ---------------------------------------------------------------------------------------------------------

STREAM = anthropic.types.RawMessageStreamEvent


def replying(pieces: list[str], finish: Finish, **more: Any) -> tuple[MessageReply, list[dict[str, Any]]]:
    """Return the reply to a request with tools that gets these pieces, and its events."""
    asked = job(tools=TOOLS, **more)
    reply = MessageReply(asked, [Request(asked.rids[0], [1, 2], asked.params[0])],
                         Served("m", byte_tokenizer(256), formats=FORMATS))  # fmt: skip
    events = reply.opening()
    for i, piece in enumerate(pieces or [""]):
        end = finish if i == max(len(pieces) - 1, 0) else None
        events += reply.take(Update(reply.requests[0], [i], piece, end))
    return reply, json.loads(json.dumps([*events, *reply.closing()]))


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of a stream; every event is as valid as Anthropic's types want it."""
    message, texts = None, dict[int, bytes]()
    for event in events:
        valid = anthropic._models.construct_type(type_=STREAM, value=event)
        assert type(valid).model_validate(event).type == event["type"]
        message = anthropic.lib.streaming._messages.accumulate_event(
            event=valid, current_snapshot=message, json_bufs=texts)  # fmt: skip
    return message.model_dump(exclude_none=True)


CALL = f"<tool_call>{PARIS}</tool_call>"
REPLIES = [
    ("Hello there", Finish("stop", 2), ["text"], "end_turn"), (CALL, Finish("stop", 2), ["tool_use"], "tool_use"),
    (f"<think>Hm</think>So.\n{CALL}\n{CALL}", Finish("stop", 2), ["thinking", "text", "tool_use", "tool_use"],
     "tool_use"),
    ("Hello", Finish("stop", "x"), ["text"], "stop_sequence"), ("", Finish("stop", 2), ["text"], "end_turn"),
    ("<think>Hm", Finish("length"), ["thinking"], "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "finish", "kinds", "reason"), REPLIES)
def test_events_add_up_to_the_whole_answer_wherever_the_text_is_cut(
    text: str, finish: Finish, kinds: list[str], reason: str
) -> None:
    for pieces in cuts(text):
        reply, events = replying(pieces, finish, stream=True)
        whole = json.loads(json.dumps(reply.result()))
        anthropic.types.Message.model_validate(whole)
        assert [block["type"] for block in whole["content"]] == kinds and whole["stop_reason"] == reason
        assert whole["stop_sequence"] == (finish.matched if reason == "stop_sequence" else None)
        names = [event["type"] for event in events]
        assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
        told = added_up(events)
        assert [{k: v for k, v in block.items() if k in whole["content"][i]} for i, block in
                enumerate(told["content"])] == whole["content"]  # fmt: skip
        assert (told["stop_reason"], told["usage"]["output_tokens"]) == (reason, whole["usage"]["output_tokens"])
        order = [(event.get("index"), event["type"].removeprefix("content_block_")) for event in events[1:-2]]
        assert [index for index, what in order if what == "start"] == list(range(len(kinds)))
        assert [index for index, _ in order] == sorted(index for index, _ in order), "blocks do not overlap"
    assert sse(events[0]).startswith(b"event: message_start\ndata: {") and reply.end == b""


ODD = r'<tool_call>{"name": "weather", "arguments": {"a": {"b": [1.5e-3, true, "x\n\u00e9\ud83d\ude00"]}, "é😀": -2}}'


def test_a_call_that_breaks_off_anywhere_does_not_end_the_stream_in_anthropic_s_client() -> None:
    """The client parses the arguments at each delta, and raises where they do not begin an object."""
    begun = ODD.index('{"a"') + 1
    for size in range(begun, len(ODD)):
        reply, events = replying(list(ODD[:size]), Finish("length"), stream=True)
        (block,) = reply.result()["content"]
        told = added_up(events)
        assert (told["stop_reason"], block["type"], told["content"][0]["name"]) == ("max_tokens", "tool_use", "weather")
        assert set(told["content"][0]["input"]) <= set(block["input"])
    for wrong in (r'{"a": "\ud83d"}', '{"a" x}', '{"a": 1x}', '{"a": {"b": tru}}', '{"a": "\n"}', '{"a": NaN}'):
        text = f'<tool_call>{{"name": "weather", "arguments": {wrong}}}</tool_call>'
        for given, end in ((text, Finish("stop", 2)), (text.removesuffix("}</tool_call>"), Finish("length"))):
            reply, events = replying(list(given), end, stream=True)
            assert added_up(events)["stop_reason"] == ("max_tokens" if end.kind == "length" else "end_turn")
            if end.kind == "stop":
                assert reply.result()["content"] == [{"type": "text", "text": text}], "a call that is none stays text"


def test_errors_have_anthropic_s_form_and_the_sentence_on_which_clients_compact() -> None:
    status, body = error_of(TooLong("The input is longer than ...", 900, 512), "id")
    assert status == 400 and body["error"]["message"].startswith("prompt is too long: 900 tokens > 512 maximum")
    for given, status, kind in ((400, 400, "invalid_request_error"), (401, 401, "authentication_error"),
                                (503, 529, "overloaded_error"), (500, 500, "api_error"),
                                (413, 413, "request_too_large")):  # fmt: skip
        told, body = error_of(RequestError("x", None, given), "id")
        assert told == status and body == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "id"}


# ---- served ----------------------------------------------------------------------------------------------------------


def test_anthropic_s_client_is_answered_streamed_and_whole_and_counted(served: Running) -> None:
    api = anthropic.Anthropic(base_url=f"http://127.0.0.1:{served.port}", api_key="x", max_retries=0)
    wish: dict[str, Any] = {"model": "any", "max_tokens": 40, "messages": [USER], "system": "Be brief.",
                            "extra_body": {"temperature": 0}}  # fmt: skip
    whole = api.messages.create(**wish)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 40 and whole._request_id
    with api.messages.stream(**wish) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        usage = stream.get_final_message().usage
    del wish["max_tokens"]
    count = api.messages.count_tokens(**wish).input_tokens
    assert count == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count and usage.cache_read_input_tokens > 0
    stopped = api.messages.create(**wish, max_tokens=40, stop_sequences=[whole.content[0].text[5:12]])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == whole.content[0].text[5:12]
    long = {"max_tokens": 4, "messages": [{"role": "user", "content": "a " * 2000}]}
    for body, says in ((long, "prompt is too long"), ({"messages": [USER]}, "max_tokens is required")):  # fmt: skip
        with pytest.raises(anthropic.BadRequestError, match=says) as caught:
            api.post("/v1/messages", body=body, cast_to=object)
        assert caught.value.body["error"]["type"] == "invalid_request_error" and caught.value.body["request_id"]
    assert served.call("/v1/messages?beta=true", {"max_tokens": 2, "messages": [USER]})[0] == 200
