"""langchain-openai, as chats and as responses (`use_responses_api`): whole, streamed, bound tools, typed answers.

Run by `run.py`. The server needs a chat template with tools (`--chat-template hermes`) and `minispec[grammar]`.
"""

from __future__ import annotations

import importlib.metadata
import sys

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from travel import Town


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def check(model: ChatOpenAI) -> None:
    """Ask in each way, and check what comes back."""
    whole = model.invoke("Count from one to five.")
    assert whole.text
    assert whole.response_metadata.get("id", "").startswith("resp_") == model.use_responses_api
    total = None
    for chunk in model.stream("Count from one to five."):
        assert isinstance(chunk, AIMessageChunk)
        total = chunk if total is None else total + chunk
    assert total.text == whole.text and total.usage_metadata == whole.usage_metadata

    messages = [HumanMessage("What is 2 and 3?")]
    called = model.bind_tools([add], tool_choice="required", parallel_tool_calls=False).invoke(messages)
    (call,) = called.tool_calls
    assert call["name"] == "add" and set(call["args"]) <= {"a", "b"}
    total = None
    for chunk in model.bind_tools([add], tool_choice="add").stream(messages):
        total = chunk if total is None else total + chunk
    assert [made["name"] for made in total.tool_calls] == ["add"]
    messages += [called, ToolMessage("5", tool_call_id=call["id"])]
    after = model.bind_tools([add], tool_choice="none").invoke(messages)
    assert after.text and after.usage_metadata["input_tokens"] > whole.usage_metadata["input_tokens"]

    typed = model.with_structured_output(Town, method="json_schema").invoke("Name a town.")
    assert isinstance(typed, Town)


def main() -> None:
    """Ask in both forms."""
    for responses in (False, True):
        check(ChatOpenAI(base_url=sys.argv[1] + "/v1", api_key="None", model="default", temperature=0, max_retries=0,
                         stream_usage=True, use_responses_api=responses, max_tokens=80))  # fmt: skip
    print("langchain-openai", importlib.metadata.version("langchain-openai"), "with openai",
          importlib.metadata.version("openai"), "ok")  # fmt: skip


if __name__ == "__main__":
    main()
