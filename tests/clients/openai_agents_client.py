"""openai-agents at `/v1/responses`: an agent that calls a tool and answers, whole and streamed, and a typed answer.

Run by `run.py`. The server needs a chat template with tools (`--chat-template hermes`) and `minispec[grammar]`. The
first turn must call; after it openai-agents leaves the choice to the model.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys

import agents
import openai
from travel import Town


async def ask(url: str) -> None:
    """Run the agents and check what comes back."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="None", max_retries=0)
    model = agents.OpenAIResponsesModel("default", client)
    asked: list[tuple[int, int]] = []

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        asked.append((a, b))
        return a + b

    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0)
    adder = agents.Agent("adder", instructions="Be brief.", model=model, tools=[add], model_settings=settings)
    result = await agents.Runner.run(adder, "What is 2 and 3?")
    assert asked and result.final_output and result.context_wrapper.usage.requests >= 2
    again = await agents.Runner.run(adder, [*result.to_input_list(), {"role": "user", "content": "And 4 and 5?"}])
    assert again.final_output and len(asked) >= 2

    streamed = agents.Runner.run_streamed(adder, "What is 2 and 3?")
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert streamed.final_output and kinds.count("response.completed") >= 2
    assert "response.function_call_arguments.done" in kinds and "response.output_text.delta" in kinds

    typed = agents.Agent("namer", model=model, output_type=Town, model_settings=agents.ModelSettings(temperature=0))
    named = await agents.Runner.run(typed, "Name a town.")
    assert isinstance(named.final_output, Town)
    print("openai-agents", importlib.metadata.version("openai-agents"), "with openai",
          importlib.metadata.version("openai"), "ok")  # fmt: skip


def adder(asked: list[int]) -> agents.Tool:
    """Return a tool that notes the sums for which it was asked."""

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        asked.append(a + b)
        return a + b

    return add


async def ask_for_both(url: str) -> None:
    """Run agents that have a tool and a typed answer: the scripted model calls, and then there is the answer.

    python tests/clients/scripted.py --call '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    python tests/clients/run.py openai-agents --scripted
    """
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="None", max_retries=0)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        asked: list[int] = []

        agent = agents.Agent("both", instructions="Be brief.", model=kind("default", client), tools=[adder(asked)],
                             output_type=Town)  # fmt: skip
        whole = await agents.Runner.run(agent, "What is 1 and 2?")
        streamed = agents.Runner.run_streamed(agent, "What is 1 and 2?")
        async for _ in streamed.stream_events():
            pass
        assert asked == [3, 3] and isinstance(whole.final_output, Town) and isinstance(streamed.final_output, Town)
    print("openai-agents", importlib.metadata.version("openai-agents"), "ok")


if __name__ == "__main__":
    asyncio.run((ask_for_both if "--scripted" in sys.argv else ask)(sys.argv[1]))
