"""dspy's LM against a server: text, a chain of thought, a typed signature and a tool. Run by `run.py`.

The server needs a chat template with tools (`--chat-template hermes`) and `minispec[grammar]`. dspy asks for JSON of a
schema, and offers tools, only where it knows that a model has both. So a module over `openai/default` brings its
schema, and the provider that is declared here says that its models have them.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any, Literal

import dspy
import pydantic
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider
from travel import Town


class Thought(pydantic.BaseModel):
    """A number, and why it is that."""

    reasoning: str = pydantic.Field(max_length=40)
    number: int = pydantic.Field(ge=0, le=9)


class Name(dspy.Signature):
    """Name a town of a country."""

    country: str = dspy.InputField()
    town: Town = dspy.OutputField()
    fare: Literal["low", "high"] = dspy.OutputField()


class Call(dspy.Signature):
    """Call a tool."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def main() -> None:
    """Ask in each way, and check what comes back."""
    url = sys.argv[1] + "/v1"
    wish: dict[str, Any] = {"api_base": url, "api_key": "None", "cache": False, "temperature": 0, "num_retries": 0}
    chat = dspy.LM("openai/default", max_tokens=24, **wish)
    (text,) = chat("Count from one to five.")
    (answer,) = chat.copy(model_type="responses")("Count from one to five.")
    assert text and answer["text"] == text

    dspy.configure(lm=dspy.LM("openai/default", max_tokens=100, **wish), adapter=dspy.JSONAdapter())
    thinker = dspy.ChainOfThought("question -> number: int", response_format=Thought)
    thought = thinker(question="What is two and three?")
    assert thought.reasoning and 0 <= thought.number <= 9

    access = AccessPolicy(provider="minispec", base_url=url)
    support = ModelSupport(function_calling=True, response_schema=True)
    register_provider(ProviderDefinition.chat(access, compat=OpenAIChatCompat()), supports=support)
    dspy.configure(lm=dspy.LM("minispec/default", max_tokens=100, **wish))
    named = dspy.Predict(Name)(country="Italy")
    assert isinstance(named.town, Town) and named.fare in ("low", "high")
    called = dspy.Predict(Call, tool_choice="required")(question="What is 2 and 3?", tools=[dspy.Tool(add)])
    assert called.calls.tool_calls and {call.name for call in called.calls.tool_calls} == {"add"}
    print("dspy", importlib.metadata.version("dspy"), "ok")


if __name__ == "__main__":
    main()
