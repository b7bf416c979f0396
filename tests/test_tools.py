"""Calls of tools and reasoning, told from text: recorded replies, cut anywhere, are always taken apart the same way."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from test_schema import chat, refused

from minispec.load.chat_templates import NAMED, WITH_TOOLS
from minispec.load.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from minispec.output import Output, overlap
from minispec.replies.constraint import call_or_form, constraint
from minispec.replies.formats import CALLS, THOUGHTS, Formats, calls_of
from minispec.replies.thoughts import Thoughts
from minispec.request import Finish, Grammar, Request, RequestError, Update
from minispec.serve import parse
from minispec.serve.message import Message, Wish
from minispec.serve.reply import Reply, Served

WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a place", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
CLOCK = {"type": "function", "function": {"name": "clock"}}
WISH = Wish(tools=(WEATHER, CLOCK))
CITY = '{"city": "Zürich {\\"a}] 😀"}'
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'

# Replies as models write them: format, text, content, calls.
Call = tuple[str, str]
REPLIES: list[tuple[str, str, str | None, list[Call]]] = [
    ("hermes", f"<tool_call>\n{PARIS}\n</tool_call>", None, [("weather", '{"city": "Paris"}')]),
    ("hermes", f'Let me look.\n\n<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>\n',
     "Let me look.", [("weather", CITY)]),
    ("hermes", f"<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n{{\"name\": \"clock\", \"arguments\": {{}}}}\n"
     "</tool_call>", None, [("weather", '{"city": "Paris"}'), ("clock", "{}")]),
    ("hermes", f"A\n<tool_call>{PARIS}</tool_call>\n\nB", "A\n\nB", [("weather", '{"city": "Paris"}')]),
    ("hermes", f"<tool_call>{PARIS}", None, [("weather", '{"city": "Paris"}')]),  # the end tag is missing
    ("hermes", '<tool_call>{"arguments": {"city": "x"}, "name": "weather"}</tool_call>', None,
     [("weather", '{"city": "x"}')]),
    ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": "\\\\"}}</tool_call>}', "}",
     [("clock", '{"a": "\\\\"}')]),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', None, [("clock", "{}")]),
    ("hermes", '<tool_call>{"name": "clock", "arguments": null}</tool_call>', None, [("clock", "{}")]),
    ("hermes", "No tool is needed for <this> or <tool_cal>.\n", "No tool is needed for <this> or <tool_cal>.\n", []),
    ("hermes", f" {PARIS}", f" {PARIS}", []),  # without tags it is text
    *(("hermes", text, text, []) for text in (  # malformed calls stay text, every character of them
        "<tool_call>\nweather in Paris\n</tool_call>", '<tool_call>{"name": "rain", "arguments": {}}</tool_call>\n',
        '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call> then', "<tool_call>", "<tool_call>\n ",
        '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>', '<tool_call>{"name": "weather", "argum',
        '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>', '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": 1}, "arguments": {"a": 2}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": 1x<tool_call>}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": "\\ud83d"}}</tool_call>',  # half a character
        '<tool_call>{"name": "clock", "arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}</tool_call>",
    )),
    ("hermes", f"<tool_call>oops</tool_call>\n<tool_call>{PARIS}</tool_call>", "<tool_call>oops</tool_call>",
     [("weather", '{"city": "Paris"}')]),
    ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', None, [("weather", '{"city": "Paris"}')]),
    ("llama3", f'<|python_tag|>{{"name": "weather", "parameters": {CITY}}}', None, [("weather", CITY)]),
    ("llama3", '\n{"name": "clock", "parameters": {}}; {"name": "weather", "parameters": {"city": "x"}}', None,
     [("clock", "{}"), ("weather", '{"city": "x"}')]),
    ("llama3", '{"type": "function", "name": "clock", "parameters": {"a": 1}}', None, [("clock", '{"a": 1}')]),
    ("llama3", 'It is {"name": "clock", "parameters": {}}', 'It is {"name": "clock", "parameters": {}}', []),
    ("llama3", ' {"answer": 42} \n', ' {"answer": 42} \n', []),
]  # fmt: skip


def cuts(text: str) -> Iterable[list[str]]:
    """Yield the text whole, in single characters, and cut in two everywhere."""
    yield [text]
    yield list(text)
    yield from ([text[:i], text[i:]] for i in range(1, len(text)))


def joined(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add deltas up as a client does; returns content, reasoning and calls by their index."""
    total: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}}
    for delta in deltas:
        total["content"] += delta.get("content", "")
        total["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] not in total["calls"] and call["type"] == "function"
                assert call["id"].startswith("call_") and call["function"]["name"]
                total["calls"][call["index"]] = [call["function"]["name"], ""]
            total["calls"][call["index"]][1] += call["function"]["arguments"]
    return total


def read(pieces: Iterable[str], message: Message, cut: bool = False) -> list[dict[str, Any]]:
    """Feed a message, and return the deltas of a stream with an event for each piece."""
    deltas = []
    for piece in pieces:
        message.feed(piece)
        deltas.append(message.delta())
    message.finish(cut)
    return [delta for delta in (*deltas, message.delta()) if delta]


def calls_in(message: Message) -> list[Call]:
    found = message.whole()["tool_calls"] or []
    assert len({call["id"] for call in found}) == len(found)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in found]


@pytest.mark.parametrize(("form", "text", "content", "calls"), REPLIES)
def test_a_reply_is_taken_apart_the_same_way_wherever_it_is_cut(
    form: str, text: str, content: str | None, calls: list[Call]
) -> None:
    for pieces in cuts(text):
        message = Message(WISH, Formats(CALLS[form]))
        total = joined(read(pieces, message))
        assert message.whole()["content"] == content and calls_in(message) == calls, pieces
        assert message.called == bool(calls) and total["content"] == (content or ""), pieces
        complete = {call["id"] for call in message.whole()["tool_calls"] or ()}
        assert len(complete) == len(calls)
        assert {name for name, _ in total["calls"].values()} <= {"weather", "clock"}, "no other name goes out"
        assert [tuple(call) for call in total["calls"].values()][-len(calls) or len(total["calls"]) :] == calls


def test_a_name_goes_out_before_its_arguments_and_these_as_they_come() -> None:
    deltas = read(list(f"Look:\n<tool_call>\n{PARIS}\n</tool_call>"), Message(WISH, Formats(CALLS["hermes"])))
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert functions[0] == {"name": "weather", "arguments": "{"}
    assert [f["arguments"] for f in functions] == list('{"city": "Paris"}') and len(functions) > 10
    assert [delta["content"] for delta in deltas if "content" in delta] == list("Look:")


def test_a_call_cut_by_the_limit_stays_half_a_call_and_is_none_to_run() -> None:
    whole = f"<tool_call>\n{PARIS}"
    for size in range(1, len(whole)):
        message = Message(WISH, Formats(CALLS["hermes"]))
        total = joined(read(list(whole[:size]), message, cut=True))
        assert not message.called
        if size <= whole.index("{", 15):
            assert (message.whole()["tool_calls"], total["content"]) == (None, whole[:size])
        else:
            assert calls_in(message) == [tuple(total["calls"][0])] and total["content"] == ""
            assert '{"city": "Paris"}'.startswith(total["calls"][0][1])


def test_one_call_alone_is_read_where_calls_may_not_be_parallel() -> None:
    text = f"Now.\n<tool_call>{PARIS}</tool_call><tool_call>{PARIS}</tool_call> text"
    for pieces in cuts(text):
        message = Message(Wish(tools=(WEATHER,), parallel=False), Formats(CALLS["hermes"]))
        total = joined(read(pieces, message))
        assert calls_in(message) == [("weather", '{"city": "Paris"}')] and total["content"] == "Now."


def test_tags_are_text_where_no_tool_may_be_called() -> None:
    message = Message(Wish(), Formats(CALLS["hermes"]))
    read([f"<tool_call>{PARIS}</tool_call>"], message)
    assert message.whole() == {"role": "assistant", "content": f"<tool_call>{PARIS}</tool_call>", "tool_calls": None}


# ---- reasoning -------------------------------------------------------------------------------------------------------

THOUGHT: list[tuple[str, bool | None, str, str, str]] = [  # parser, thinking, text, reasoning, content
    ("qwen3", None, "<think>\nOne, two.\n</think>\n\nThree.\n", "One, two.", "Three.\n"),
    ("qwen3", None, "Plain </think> text", "", "Plain </think> text"),
    ("qwen3", None, "<thin air", "", "<thin air"),
    ("qwen3", True, "One.</think>Two", "One.", "Two"),
    ("qwen3", False, "Two", "", "Two"),
    ("qwen3", None, "<think>\n\n</think>\n\nTwo", "", "Two"),
    ("qwen3", None, "<think>never ends </thi", "never ends </thi", ""),
    ("qwen3-thinking", None, "One.\n</think>\nTwo", "One.", "Two"),
    ("deepseek-r1", None, " \n<think>\nOne. < </think\n</think>\nTwo", "One. < </think", "Two"),
    ("deepseek-r1", None, "One.\n", "One.", ""),
    ("deepseek-r1", False, "Two", "", "Two"),
    ("kimi", None, "◁think▷One◁/think▷Two", "One", "Two"),
]


@pytest.mark.parametrize(("name", "thinking", "text", "reasoning", "content"), THOUGHT)
def test_reasoning_is_told_apart_wherever_the_reply_is_cut(
    name: str, thinking: bool | None, text: str, reasoning: str, content: str
) -> None:
    for pieces in cuts(text):
        for streams in (True, False):
            message = Message(Wish(stream_reasoning=streams), Formats(None, THOUGHTS[name]), thinking)
            deltas = read(pieces, message)
            total = joined(deltas)
            assert (total["reasoning_content"], total["content"]) == (reasoning, content), pieces
            whole = {"content": content, "reasoning_content": reasoning or None}
            assert {**message.whole(), **whole} == message.whole()
            assert streams or sum("reasoning_content" in delta for delta in deltas) <= 1


def test_reasoning_is_left_in_the_content_or_out_of_the_answer_where_that_is_asked_for() -> None:
    text = f"<think>One {PARIS}</think>\n<tool_call>{PARIS}</tool_call>"
    formats = Formats(CALLS["qwen25"], THOUGHTS["qwen3"])
    for wish, reasoning, content in (
        (Wish(tools=(WEATHER,)), f"One {PARIS}", None), (Wish(tools=(WEATHER,), include_reasoning=False), None, None),
        (Wish(tools=(WEATHER,), separate=False), None, text[: text.index("\n")]),
    ):  # fmt: skip
        message = Message(wish, formats)
        total = joined(read(list(text), message))
        assert (message.whole().get("reasoning_content"), message.whole()["content"]) == (reasoning, content)
        assert (total["reasoning_content"] or None, total["content"] or None) == (reasoning, content)
        assert calls_in(message) == [("weather", '{"city": "Paris"}')] and message.called


def test_a_call_inside_the_reasoning_is_no_call() -> None:
    message = Message(WISH, Formats(CALLS["hermes"], THOUGHTS["qwen3"]))
    read([f"<think><tool_call>{PARIS}</tool_call></think>No."], message)
    assert not message.called and message.whole()["content"] == "No."


def test_overlap_is_the_longest_beginning_of_the_tag_that_ends_the_text() -> None:
    for text, size in (("a<thi", 4), ("<think>", 0), ("<<", 1), ("", 0), ("x", 0), ("<think", 6)):
        assert overlap(text, "<think>") == size
    assert Thoughts(THOUGHTS["qwen3"], False).feed("<thi") == ("", "")


# ---- requests --------------------------------------------------------------------------------------------------------


def templated(source: str | None) -> Tokenizer:
    """Return a tokenizer of bytes with a chat template."""
    return Tokenizer(byte_tokenizer(256).backend, frozenset(), source, {"bos_token": ""})


def prompt_of(job: parse.Job, tokenizer: Tokenizer, form: str = "hermes") -> str:
    formats = Formats(CALLS.get(form))
    return tokenizer.decode(parse.tokenize(job, tokenizer, 10**6, formats=formats)[0].prompt_ids)


def test_tools_are_shown_to_the_model_in_one_form_and_hidden_by_none() -> None:
    tokenizer = templated(NAMED["hermes"].source)
    shuffled = {"function": {"strict": True, "parameters": WEATHER["function"]["parameters"], "name": "weather",
                             "description": "of a place"}, "type": "function", "more": 1}  # fmt: skip
    one, other = (prompt_of(chat(tools=[tool]), tokenizer) for tool in (WEATHER, shuffled))
    assert one == other and json.dumps(WEATHER) in one
    for hidden in ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}):
        assert prompt_of(chat(**hidden), tokenizer) == prompt_of(chat(), tokenizer)


@pytest.mark.parametrize(("name", "key"), [("hermes", "arguments"), ("llama3-json", "parameters")])
def test_earlier_calls_and_their_results_reach_the_template_arguments_as_objects(name: str, key: str) -> None:
    assert name in WITH_TOOLS and calls_of(NAMED[name].source).arguments == key
    made = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Bern"}'}}
    bare = {"function": {"name": "clock", "arguments": ""}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [made, bare]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
                {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]}]  # fmt: skip
    prompt = prompt_of(chat(messages=messages, tools=[WEATHER, CLOCK]), templated(NAMED[name].source))
    assert f'{{"name": "weather", "{key}": {{"city": "Bern"}}}}' in prompt
    assert f'{{"name": "clock", "{key}": {{}}}}' in prompt and "sunny" in prompt and "noon" in prompt
    for calls in ([{}], [{"function": {}}], 3, [made] * 200):
        wrong = [{"role": "assistant", "tool_calls": calls}]
        assert refused(lambda wrong=wrong: chat(messages=wrong)).param == "messages"


def test_tools_that_cannot_be_shown_or_found_again_are_refused_by_name() -> None:
    ask = chat(tools=[WEATHER])
    error = refused(lambda: prompt_of(ask, templated(NAMED["chatml"].source)))
    assert error.param == "tools" and all(name in error.message for name in ("tools", *WITH_TOOLS))
    error = refused(lambda: prompt_of(ask, templated("{{ tools }}"), "unknown"))
    assert error.param == "tools" and "--tool-call-parser" in error.message
    for wrong, param in (
        ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [{"type": "web_search", "function": {}}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"), ({"tools": [WEATHER] * 200}, "tools"), ({"tools": {}}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "rain"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ):  # fmt: skip
        error = refused(lambda wrong=wrong: chat(**wrong))
        assert error.param == param and param in error.message


def test_how_a_model_writes_calls_is_seen_in_its_template() -> None:
    assert [calls_of(NAMED[name].source) for name in WITH_TOOLS] == [CALLS["qwen25"], CALLS["llama3"]]
    assert all(calls_of(NAMED[name].source) is None for name in NAMED if name not in WITH_TOOLS)
    assert calls_of("<tool_call>\n<function=f>") is None
    published = "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}{% endif %}"
    assert templated(published).chat.tool_template == published and templated("{# tools #}").chat.tool_template is None
    both = Tokenizer(byte_tokenizer(256).backend, frozenset(), {"default": "plain", "tool_use": "{{ tools }}"}, {})
    assert both.chat.tool_template == "{{ tools }}" and templated(None).chat.tool_template is None


@pytest.mark.parametrize(("template", "thinking"), [
    ("{{ messages[0].content }}<think>\n", True), ("<think>\n\n</think>\n\n", False), ("<think> no", None),
])  # fmt: skip
def test_whether_the_prompt_leaves_the_model_thinking_is_seen_at_its_end(template: str, thinking: bool | None) -> None:
    formats, tokenizer = Formats(None, THOUGHTS["qwen3"]), templated(template)
    assert parse.tokenize(chat(), tokenizer, 10**6, formats=formats)[0].thinking is thinking
    assert parse.tokenize(chat(), tokenizer, 10**6)[0].thinking is None


@pytest.mark.parametrize(("template", "parser", "surely"), [
    ("{{ tools }}<think>\n", "qwen3", True), ("{{ tools }}", "deepseek-r1", True), ("{{ tools }}", "qwen3", False),
    ("{{ tools }}<think>\n\n</think>\n\n", "deepseek-r1", None),
])  # fmt: skip
def test_a_forced_call_and_every_format_stand_behind_the_reasoning(
    template: str, parser: str, surely: bool | None
) -> None:
    formats, tokenizer = Formats(CALLS["hermes"], THOUGHTS[parser]), templated(template)
    for ask in (chat(tools=[WEATHER], tool_choice="required"), chat(regex="a+"), chat(regex="a+", tools=[WEATHER])):
        request = parse.tokenize(ask, tokenizer, 10**6, formats=formats)[0]
        thought = request.params.grammar.thought
        assert (thought and thought.surely) is surely and (thought is None or thought[:2] == ("<think>", "</think>"))
    message = Message(Wish(tools=(WEATHER,), must=True), formats, request.thinking)
    read(["<think>Hm" if surely is False else "Hm", f"</think>\n<tool_call>{PARIS}</tool_call>"], message)
    assert (message.whole()["reasoning_content"] == "Hm") is (surely is not None) and message.called


def test_a_message_to_continue_says_whether_it_is_thinking() -> None:
    for text, thinking in (("<think>One", True), ("<think>One</think>Two", False), ("Two", False)):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
        ask = chat(messages=messages, continue_final_message=True)
        formats, tokenizer = Formats(None, THOUGHTS["deepseek-r1"]), templated("{{ messages[1].content }}")
        assert parse.tokenize(ask, tokenizer, 10**6, formats=formats)[0].thinking is thinking


def test_a_request_without_parallel_calls_ends_at_the_token_that_completes_the_first() -> None:
    tokenizer = templated(NAMED["hermes"].source)
    text = f"<think><tool_call>{PARIS}</tool_call></think><tool_call>{PARIS}</tool_call>" * 2
    for most, size in ((None, text.index("</tool_call>", text.index("</think>"))), (5, 5)):
        ask = chat(tools=[WEATHER], parallel_tool_calls=False, max_tokens=most)
        request = parse.tokenize(ask, tokenizer, 10**6, formats=Formats(CALLS["hermes"], THOUGHTS["qwen3"]))[0]
        request.max_new_tokens = most or 10**6
        output = Output(request, tokenizer, frozenset())
        ends = [output.append(token) for token in text.encode()[:size]]
        assert ends[:-1] == [None] * (size - 1) and ends[-1] == (Finish("length") if most else Finish("stop"))
    assert parse.tokenize(chat(tools=[WEATHER]), tokenizer, 10**6, formats=Formats(CALLS["hermes"]))[0].ends is None


def test_tags_that_are_special_tokens_are_not_left_out_of_the_text(demo_folder: Path) -> None:
    tokenizer = load_tokenizer(demo_folder, NAMED["hermes"].source)
    marked = Formats(CALLS["hermes"]._replace(begin="<|im_start|>"))
    for formats, skips in ((marked, False), (Formats(CALLS["hermes"]), True)):
        request = parse.tokenize(chat(tools=[WEATHER]), tokenizer, 10**6, formats=formats)[0]
        assert request.params.skip_special_tokens is skips


def answers(ask: parse.Job, text: str, formats: Formats, kind: str = "stop") -> tuple[dict, list[dict]]:
    """Return the whole answer, and the choices of a stream, to a job whose request gives this text by characters."""
    request = Request(ask.rids[0], [1], ask.params[0])
    reply, choices = Reply(ask, [request], Served("m", byte_tokenizer(256), formats=formats)), []
    for i, character in enumerate(text):
        finish = Finish(kind) if i == len(text) - 1 else None
        choices += reply.take(Update(request, [i], character, finish))
    return reply.result(), [event["choices"][0] for event in choices]


def test_answers_have_calls_and_say_so_at_their_end() -> None:
    text, formats = f"<think>Hm</think>So.\n<tool_call>{PARIS}</tool_call>", Formats(CALLS["hermes"], THOUGHTS["qwen3"])
    whole, choices = answers(chat(tools=[WEATHER], stream=True), text, formats)
    message, total = whole["choices"][0]["message"], joined(choice["delta"] for choice in choices)
    assert (message["content"], message["reasoning_content"]) == ("So.", "Hm") == (
        total["content"], total["reasoning_content"])  # fmt: skip
    assert total["calls"] == {0: ["weather", '{"city": "Paris"}']}
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    for choice in (whole["choices"][0], choices[-1]):
        assert choice["finish_reason"] == "tool_calls"
    assert choices[-1]["delta"] == {} and [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    for ask, kind, reason in ((chat(tools=[WEATHER]), "length", "length"), (chat(), "stop", "stop")):
        assert answers(ask, text, formats, kind)[0]["choices"][0]["finish_reason"] == reason


# ---- calls that must be made -----------------------------------------------------------------------------------------

MUST = [("hermes", None, True), ("hermes", None, False), ("hermes", "clock", True), ("llama3", None, True),
        ("llama3", "weather", False)]  # fmt: skip


@pytest.mark.parametrize(("form", "name", "parallel"), MUST)
def test_the_grammar_of_calls_takes_what_the_parser_reads_and_nothing_else(
    form: str, name: str | None, parallel: bool
) -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    place = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
             "$defs": {"City": {"type": "string"}}}  # fmt: skip
    tools = [{"function": {**WEATHER["function"], "parameters": place}}, CLOCK,
             {"function": {"name": 'quo"ted é'}}]  # fmt: skip
    grammar = constraint(tools, CALLS[form], name, parallel)

    def accepts(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()

    key, (begin, end), between = CALLS[form].arguments, CALLS[form].spelled, CALLS[form].between
    weather = begin + json.dumps({"name": "weather", key: {"city": "Bern"}}) + end
    clock = begin + json.dumps({"name": "clock", key: {}}) + end
    verdicts = {
        weather: name in (None, "weather"), clock: name in (None, "clock"),
        weather + between + clock: parallel and name is None, "Hello": False, "": False,
        begin + json.dumps({"name": "rain", key: {}}) + end: False,
        begin + json.dumps({"name": 'quo"ted é', key: {}}, ensure_ascii=False) + end: name is None,
        begin + json.dumps({"name": 'quo"ted é', key: {"a": 1}}, ensure_ascii=False) + end: False,  # it takes nothing
        begin + f'{{"name": "clock",{" " * 9}"{key}": {{}}}}' + end: False,
        begin + json.dumps({"name": "weather", key: {"city": 7}}) + end: False,
    }  # fmt: skip
    for text, right in verdicts.items():
        assert accepts(text) is right, text
        if right:
            message = Message(Wish(tools=tuple(tools)), Formats(CALLS[form]))
            read([text], message)
            assert message.called and message.whole()["content"] is None


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_a_reply_with_tools_and_a_format_is_a_call_or_of_the_format(form: str) -> None:
    """Whatever the format is asked for with; where calls are JSON without tags, both are one schema."""
    llguidance = pytest.importorskip("llguidance")
    from minispec.asked.grammar import Grammars

    grammars, tokenizer = Grammars(byte_tokenizer(257).backend, 257, [256]), llguidance.LLTokenizer("byte")
    place = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
             "$defs": {"City": {"enum": ["Bern"]}}}  # fmt: skip
    tools = [{"function": {"name": "weather", "parameters": place}}, CLOCK]
    key, (begin, end) = CALLS[form].arguments, CALLS[form].spelled
    calls = [begin + json.dumps({"name": "weather", key: {"city": "Bern"}}) + end,
             begin + json.dumps({"name": "clock", key: {}}) + end]  # fmt: skip
    answer = {"type": "object", "properties": {"nation": {"$ref": "#/$defs/N"}}, "required": ["nation"],
              "$defs": {"N": {"enum": ["CH"]}}}  # fmt: skip
    for asked, right in ((Grammar("json_schema", json.dumps(answer)), '{"nation": "CH"}'),
                         (Grammar("json_schema", '{"type": "object"}'), '{"name": 3}'),
                         (Grammar("regex", "a/b+"), "a/bb"),
                         (Grammar("lark", 'start: CHOICE\nCHOICE: "UTC" | "CET"'), "CET"),
                         (Grammar("ebnf", 'root ::= "x" [0-9]+'), "x12")):  # fmt: skip
        source = grammars._source(call_or_form(tools, CALLS[form], asked))
        for text, fits in [
            (right, True),
            *((call, True) for call in calls),
            ("No.", False),
            (calls[0].replace("Bern", "Rome"), asked.text == '{"type": "object"}' and form == "llama3"),
            (calls[0].replace("weather", "rain"), asked.text == '{"type": "object"}' and not begin),
        ]:
            matcher = llguidance.LLMatcher(tokenizer, source)
            assert not matcher.is_error(), matcher.get_error()
            taken = all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()
            assert taken is fits, (asked, text)


def test_tools_may_be_called_beside_each_field_that_constrains() -> None:
    tokenizer, formats = templated(NAMED["hermes"].source), Formats(CALLS["hermes"])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for wish in ({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, {"regex": "a"},
                 {"ebnf": 'root ::= "a"'}, {"json_schema": json.dumps(schema)}, {"guided_choice": ["a"]}):  # fmt: skip
        (request,) = parse.tokenize(chat(tools=[WEATHER], **wish), tokenizer, 10**6, formats=formats)
        assert "<tool_call>" in request.params.grammar.calls
        hidden = chat(tools=[WEATHER], tool_choice="none", **wish)
        assert not parse.tokenize(hidden, tokenizer, 10**6, formats=formats)[0].params.grammar.calls


def test_arguments_that_are_no_object_reach_templates_that_print_them_and_templates_that_walk_them() -> None:
    printed = "{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    walked = (">{% for c in messages[1].tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};"
              "{% endfor %}{% endfor %}")  # fmt: skip
    for given, told in (
        ('{"city": "Rome"}', {"city": "Rome"}),
        ({"city": 4}, {"city": 4}),
        ("", {}),
        (" null", {}),
        (None, {}),
        ('{"city', {"arguments": '{"city'}),
        ("[]", {"arguments": "[]"}),
        ('"Rome"', {"arguments": '"Rome"'}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ([1], {"arguments": "[1]"}),
        (7, {"arguments": "7"}),
        ("{" * 99, {"arguments": "{" * 99}),
    ):
        made = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": given}}]}
        asked = chat(messages=[{"role": "user", "content": "hi"}, made])
        assert prompt_of(asked, templated(printed)) == json.dumps(told)
        assert prompt_of(asked, templated(walked)) == ">" + "".join(f"{k}={v};" for k, v in told.items())


def test_roles_are_those_that_the_template_knows() -> None:
    turns = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    knows = "{% if messages[0].role == 'developer' %}!{% endif %}" + turns
    strict = ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
              "{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}")  # fmt: skip
    drops = ("{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}:{{ m.content }}]{% endif %}"
             "{% endfor %}")  # fmt: skip
    none = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
            "[{{ m.role }}:{{ m.content }}]{% endfor %}")  # fmt: skip
    messages = [{"role": "developer", "content": "D"}, {"role": "user", "content": "u"},
                {"role": "system", "content": " S"}, {"role": "function", "name": "f"}]  # fmt: skip
    for template, told in (
        (turns, "[system:D][user:u][system: S][tool:]"), (knows, "![developer:D][user:u][system: S][tool:]"),
        (strict, "[system:D\n\n S][user:u][tool:]"), (drops, "[system:D\n\n S][user:u][tool:]"),
        (none, "[user:D\n\n S\n\nu][tool:]"),
    ):  # fmt: skip
        assert prompt_of(chat(messages=messages), templated(template)) == told
    with pytest.raises(RequestError, match="never"):
        prompt_of(chat(messages=messages), templated("{{ raise_exception('never') }}"))


def test_contents_that_say_nothing_pass_and_reasoning_reaches_the_templates_that_read_it() -> None:
    for message, told in (
        ({"role": "assistant", "content": None}, {"content": ""}), ({"role": "tool"}, {"content": ""}),
        ({"role": "user", "content": []}, {"content": ""}), ({"role": "assistant"}, {"content": ""}),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "So."}]},
         {"content": "So.", "reasoning_content": "Hm"}),
        ({"role": "assistant", "content": "So.", "reasoning": "Hm"}, {"content": "So.", "reasoning_content": "Hm"}),
    ):  # fmt: skip
        assert chat(messages=[message]).prompts == [[{"role": message["role"], **told}]]
    for name in ("reasoning_content", "reasoning", "thinking"):
        template = templated("{{ messages[0]." + name + " }}")
        assert prompt_of(chat(messages=[message]), template) == "Hm"
    for wrong in ({"role": "user"}, {"role": "system", "content": None}):
        assert refused(chat, messages=[wrong]).param == "messages"


def test_allowed_tools_hide_the_others_in_a_chat() -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    for mode, must in (("auto", False), ("required", True)):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        wish = chat(tools=[WEATHER, CLOCK], tool_choice=choice).wish
        assert (wish.tools, wish.must) == ((CLOCK,), must)
    assert refused(chat, tools=[WEATHER], tool_choice=choice).param == "tool_choice"


def test_a_call_that_must_be_made_is_asked_for_by_one_grammar() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        assert chat(tools=[WEATHER], tool_choice=choice).wish.must
        error = refused(lambda choice=choice: chat(tools=[WEATHER], tool_choice=choice, regex="a"))
        assert error.param == "regex" and "tool_choice" in error.message


def test_a_call_that_must_be_made_leaves_no_text_to_be_of_a_response_format() -> None:
    form = {"response_format": {"type": "json_object"}}
    must, may = (chat(tools=[WEATHER], tool_choice=choice, **form) for choice in ("required", "auto"))
    assert must.wish.must and must.params[0].grammar is None
    assert may.params[0].grammar is not None
    error = refused(lambda: chat(tools=[WEATHER], tool_choice="required", response_format={"type": "json_schema"}))
    assert error.param == "response_format", "it is read all the same"
