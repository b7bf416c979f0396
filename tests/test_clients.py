"""Clients that others wrote, unmodified, over a socket: a loop of tools with each, streamed and not.

The model's greedy answer is scripted: a thought, then a call of `add`. Its JSON is spaced so that no token occurs
twice, since each token of the script has one successor. Clients that install heavily, or beside which others cannot be
installed, are run by the scripts in tests/clients/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from test_server import Running, client, options, ready, scripted
from transformers import AutoTokenizer

from minispec.config import Config
from minispec.load.tokenizer import load_tokenizer

THOUGHT, CALL = "Hm", '{"name":"add","parameters"     :{      "a": 1   }\t}'
ADD = {"type": "function", "function": {"name": "add", "description": "Add one.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}  # fmt: skip
ASK = {"role": "user", "content": "What is 1 + 1?"}


@pytest.fixture(scope="module")
def caller(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that calls a tool, whatever it is asked."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    ids = tokenizer.encode(f"{THOUGHT}</think>{CALL}", add_special_tokens=False)
    last = load_tokenizer(demo_folder, "hermes").encode_chat([ASK])[-1]  # of every prompt
    ids = [last, *ids, tokenizer.eos_token_id]
    assert len(set(ids)) == len(ids)
    folder = scripted(demo_folder, tmp_path_factory.mktemp("models") / "caller", ids)
    flags = {"chat_template": "hermes", "tool_call_parser": "llama3", "reasoning_parser": "deepseek-r1"}
    with ready(Running(Config(**options(folder, **flags)))) as running:
        yield running


def test_openai_runs_a_loop_of_tools(caller: Running) -> None:
    api, messages = client(caller), [dict(ASK)]
    for _ in range(2):
        wish: dict[str, Any] = {"model": "any", "messages": messages, "tools": [ADD], "temperature": 0}
        choice = api.chat.completions.create(**wish).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert choice.message.reasoning_content == THOUGHT
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
    answer = api.chat.completions.create(**{**wish, "messages": messages, "tool_choice": "none"}).choices[0]
    assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == ("stop", CALL, None)


def test_openai_s_stream_adds_up_to_the_same_message(caller: Running) -> None:
    wish = {"model": "any", "messages": [ASK], "tools": [ADD], "temperature": 0}
    caller.ok("/flush_cache")  # so that not all of the call is drafted, and comes at once
    with client(caller).chat.completions.stream(**wish) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    whole = client(caller).chat.completions.create(**wish).choices[0].message
    assert message.tool_calls[0].function.arguments == whole.tool_calls[0].function.arguments
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    chunks = list(client(caller).chat.completions.create(**wish, stream=True))
    thoughts = [getattr(c.choices[0].delta, "reasoning_content", None) for c in chunks]
    assert "".join(filter(None, thoughts)) == THOUGHT and chunks[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_ends_the_answer_where_calls_may_not_be_parallel(caller: Running) -> None:
    wish = {"model": "any", "messages": [ASK], "tools": [ADD], "temperature": 0}
    both, one = (client(caller).chat.completions.create(**wish, parallel_tool_calls=flag) for flag in (True, False))
    assert both.choices[0].message.tool_calls[0].function == one.choices[0].message.tool_calls[0].function
    assert one.usage.completion_tokens == both.usage.completion_tokens - 1, "EOS was not waited for"


def test_openai_gets_the_call_that_it_requires_or_names_and_json_of_a_schema(caller: Running) -> None:
    """The model begins with a thought; after it a grammar lets it write nothing but what is asked for."""
    api = client(caller)
    other = {"type": "function", "function": {"name": "clock", "parameters": {
        "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
        "additionalProperties": False}}}  # fmt: skip
    named: Any = {"type": "function", "function": {"name": "clock"}}
    wish: dict[str, Any] = {
        "model": "any",
        "messages": [ASK],
        "tools": [ADD, other],
        "max_tokens": 200,
        "temperature": 0.3,
    }
    for choice, names in (("required", {"add", "clock"}), (named, {"clock"})):
        for seed in (1, 2):
            answer = api.chat.completions.create(**wish, tool_choice=choice, parallel_tool_calls=False, seed=seed)
            (call,) = answer.choices[0].message.tool_calls
            assert answer.choices[0].message.reasoning_content == THOUGHT
            assert answer.choices[0].finish_reason == "tool_calls" and call.function.name in names
            assert json.loads(call.function.arguments).keys() <= {"a", "zone"}

    class Zone(pydantic.BaseModel):
        zone: Literal["UTC", "CET"]
        summer: bool

    parsed = api.chat.completions.parse(model="any", messages=[ASK], response_format=Zone, seed=3, temperature=0.3)
    assert parsed.choices[0].message.parsed.zone in ("UTC", "CET")
    for field in ({"structured_outputs": {"choice": ["UTC", "CET"]}}, {"guided_choice": ["UTC", "CET"]}):
        chosen = api.chat.completions.create(model="any", messages=[ASK], extra_body=field, seed=3, temperature=0.3)
        assert chosen.choices[0].message.content in ("UTC", "CET") and chosen.choices[0].finish_reason == "stop"


def test_openai_runs_a_loop_of_tools_at_responses_streamed_and_whole(caller: Running) -> None:
    api, turns = client(caller), [dict(ASK)]
    tool: Any = {"type": "function", **ADD["function"], "strict": False}
    for stream in (False, True):
        wish: dict[str, Any] = {"model": "any", "input": turns, "tools": [tool], "temperature": 0}
        if stream:
            caller.ok("/flush_cache")  # so that not all of the call is drafted, and comes at once
            with api.responses.stream(**wish) as events:
                kinds = [event.type for event in events]
                answer = events.get_final_response()
            assert kinds.count("response.function_call_arguments.delta") > 2
            assert "response.reasoning_text.delta" in kinds
        else:
            answer = api.responses.create(**wish)
        thought, call = answer.output
        assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT) and answer.status == "completed"
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
        assert answer.usage.output_tokens_details.reasoning_tokens == 2
        turns += [item.model_dump(exclude_none=True) for item in answer.output]
        turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
    answer = api.responses.create(**{**wish, "input": turns, "tool_choice": "none"})
    assert answer.output_text == CALL and [item.type for item in answer.output] == ["reasoning", "message"]


def test_openai_parses_responses_and_gets_the_call_that_it_requires(caller: Running) -> None:
    api = client(caller)

    class Zone(pydantic.BaseModel):
        zone: Literal["UTC", "CET"]
        summer: bool

    wish: dict[str, Any] = {"model": "any", "input": [ASK], "temperature": 0.3, "extra_body": {"seed": 3}}
    assert api.responses.parse(**wish, text_format=Zone).output_parsed.zone in ("UTC", "CET")
    with api.responses.stream(**wish, text_format=Zone) as stream:
        assert stream.get_final_response().output_parsed == api.responses.parse(**wish, text_format=Zone).output_parsed
    clock = {"type": "function", "name": "clock", "strict": True, "parameters": Zone.model_json_schema()}
    tools: Any = [clock, {"type": "function", **ADD["function"]}]
    for choice, names in (("required", {"add", "clock"}), ({"type": "function", "name": "clock"}, {"clock"})):
        answer = api.responses.create(**wish, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        thought, call = answer.output
        assert thought.content[0].text == THOUGHT
        assert call.name in names and json.loads(call.arguments).keys() <= {"a", "zone", "summer"}
    for field, value in (("store", True), ("previous_response_id", "resp_1")):
        with pytest.raises(openai.BadRequestError, match="nothing is stored") as caught:
            api.responses.create(model="any", input="hi", **{field: value})
        assert caught.value.param == field


def test_openai_calls_a_tool_although_it_wants_an_answer_of_a_type(caller: Running) -> None:
    """The reply is one or the other, as the seed has it; neither is invented."""
    schema = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "Zone", "schema": schema}}
    thought = {"role": "assistant", "content": f"{THOUGHT}</think>So"}
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    wish: dict[str, Any] = {"model": "any", "messages": [ASK, thought], "tools": [ADD], "response_format": form,
                            "max_tokens": 60, "extra_body": go_on}  # fmt: skip
    made = set()
    for seed in range(12):
        message = client(caller).chat.completions.create(**wish, seed=seed).choices[0].message
        if message.tool_calls:
            assert json.loads(message.tool_calls[0].function.arguments).keys() == {"a"}
        else:
            assert json.loads(message.content)["zone"] in ("UTC", "CET")
        made.add(bool(message.tool_calls))
    assert made == {False, True}


def test_anthropic_runs_a_loop_of_tools_streamed_and_whole(caller: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    api = anthropic.Anthropic(base_url=f"http://127.0.0.1:{caller.port}", api_key="None", max_retries=0)
    tool = {"name": "add", "description": "Add one.", "input_schema": ADD["function"]["parameters"]}
    turns: list[dict[str, Any]] = [dict(ASK)]
    wish: dict[str, Any] = {"model": "any", "max_tokens": 200, "tools": [tool], "extra_body": {"temperature": 0},
                            "thinking": {"type": "adaptive"}}  # fmt: skip
    for stream in (False, True):
        if stream:
            caller.ok("/flush_cache")
            with api.messages.stream(**wish, messages=turns) as events:
                kinds = [event.type for event in events]
                answer = events.get_final_message()
            assert kinds.count("input_json") > 2 and "thinking" in kinds
        else:
            answer = api.messages.create(**wish, messages=turns)
        thought, call = answer.content
        assert (thought.type, thought.thinking, answer.stop_reason) == ("thinking", THOUGHT, "tool_use")
        assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1}) and thought.signature
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        turns.append({"role": "assistant", "content": blocks})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
        turns.append({"role": "user", "content": [result, {"type": "text", "text": ASK["content"]}]})
    answer = api.messages.create(**wish, messages=turns, tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["thinking", "text"] and answer.content[1].text == CALL


def test_a_call_that_the_limit_cut_is_taken_back_by_every_dialect(caller: Running) -> None:
    """What the server gave it takes, however broken the arguments are."""
    api, body = client(caller), {"messages": [ASK], "tools": [ADD], "temperature": 0}
    for most in range(8, 40):  # until the arguments have begun
        message = caller.ok("/v1/chat/completions", {**body, "max_tokens": most})["choices"][0]["message"]
        if message["tool_calls"]:
            break
    assert not message["tool_calls"][0]["function"]["arguments"].endswith("}")
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": None}
    caller.ok("/v1/chat/completions", {**body, "messages": [ASK, message, result, ASK]})
    tool: Any = {"type": "function", **ADD["function"], "strict": False}
    cut = api.responses.create(model="any", input=[ASK], tools=[tool], temperature=0, max_output_tokens=most)
    items = [item.model_dump(exclude_none=True) for item in cut.output]
    assert items[-1]["status"] == "incomplete" and items[-1]["type"] == "function_call"
    api.responses.create(model="any", input=[ASK, *items, ASK], tools=[tool], max_output_tokens=5)


@pytest.mark.parametrize("responses", [False, True], ids=["chats", "responses"])
def test_langchain_binds_tools_and_streams_their_calls(responses: bool, caller: Running) -> None:
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def add(a: int) -> int:
        """Add one."""
        return a + 1

    model = langchain.ChatOpenAI(
        base_url=f"http://127.0.0.1:{caller.port}/v1", api_key="None", model="any", temperature=0, max_retries=0,
        use_responses_api=responses,
    )  # fmt: skip
    bound, messages = model.bind_tools([add]), [HumanMessage(ASK["content"])]
    answer = bound.invoke(messages)
    assert [(c["name"], c["args"]) for c in answer.tool_calls] == [("add", {"a": 1})] and not answer.invalid_tool_calls
    results = [ToolMessage(str(add.invoke(c["args"])), tool_call_id=c["id"]) for c in answer.tool_calls]
    again = bound.invoke([*messages, answer, *results])
    assert again.tool_calls[0]["args"] == {"a": 1} and again.usage_metadata["output_tokens"] > 10
    total = None
    for chunk in bound.stream(messages):
        total = chunk if total is None else total + chunk
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [("add", {"a": 1})]
    assert model.invoke(messages).text == CALL
    said = model.bind_tools([add], tool_choice="none").invoke([*messages, answer, *results])
    assert said.text == CALL and said.usage_metadata["output_tokens"] > 10


def test_llm_chains_tools_and_streams(caller: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    llm = pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- {{model_id: tiny, model_name: any, api_base: 'http://127.0.0.1:{caller.port}/v1', supports_tools: true}}\n"
    )
    called = []

    def add(a: int) -> str:
        """Add one."""
        called.append(a)
        return str(a + 1)

    model = llm.get_model("tiny")
    model.key = "DUMMY_KEY"
    assert model.prompt(ASK["content"], temperature=0).text() == CALL
    assert "".join(model.prompt(ASK["content"], temperature=0, stream=True)) == CALL
    with pytest.raises(ValueError, match="limit"):  # the model calls whenever it may
        list(model.conversation(chain_limit=2).chain(ASK["content"], tools=[add], options={"temperature": 0}))
    assert called == [1]
