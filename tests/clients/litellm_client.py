"""litellm against a server: whole and streamed answers, tools, errors, and its `responses`. Run by `run.py`.

The server needs a chat template with tools (`--chat-template hermes`) and `minispec[grammar]`.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import litellm

ADD = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}  # fmt: skip


def respond(base: str) -> None:
    """Ask at /v1/responses: whole, streamed, with a tool, and with its result."""
    wish: dict[str, Any] = {"model": "openai/default", "api_base": base, "api_key": "None", "temperature": 0}
    count = {**wish, "input": "Count from one to five.", "max_output_tokens": 24}
    whole = litellm.responses(**count)
    events = list(litellm.responses(**count, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text and text == whole.output[0].content[0].text
    tools = [{"type": "function", **ADD["function"]}]
    turns: list[Any] = [{"role": "user", "content": "What is 2 and 3?"}]
    called = litellm.responses(**wish, input=turns, tools=tools, tool_choice="required", max_output_tokens=80)
    call = next(item for item in called.output if item.type == "function_call")
    made = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    turns += [made, {"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
    after = litellm.responses(**wish, input=turns, tools=tools, tool_choice="none", max_output_tokens=24)
    assert after.output[0].content[0].text and after.usage.input_tokens > whole.usage.input_tokens


def main() -> None:
    """Ask, and check what comes back."""
    wish = {"model": "openai/default", "api_base": sys.argv[1] + "/v1", "api_key": "None", "temperature": 0,
            "messages": [{"role": "user", "content": "Count from one to five."}], "num_retries": 0}  # fmt: skip
    whole = litellm.completion(**wish, max_tokens=24)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 24 and whole.choices[0].finish_reason in ("stop", "length")
    parts = list(litellm.completion(**wish, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
    assert any(getattr(part, "usage", None) for part in parts)
    called = litellm.completion(**wish, max_tokens=24, tools=[ADD], tool_choice="auto")
    made = [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]
    turn = [{"role": "assistant", "content": None, "tool_calls": made},
            {"role": "tool", "tool_call_id": "call_1", "content": "3"}]  # fmt: skip
    after = litellm.completion(**{**wish, "messages": wish["messages"] + turn}, max_tokens=24, tools=[ADD])
    assert after.usage.prompt_tokens > called.usage.prompt_tokens > whole.usage.prompt_tokens
    try:
        litellm.completion(**{**wish, "temperature": -1})
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a temperature of -1 was taken")
    respond(sys.argv[1] + "/v1")
    print("litellm", importlib.metadata.version("litellm"), "with openai", importlib.metadata.version("openai"), "ok")


if __name__ == "__main__":
    main()
