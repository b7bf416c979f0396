"""pydantic-ai's models of chats and of responses: text, typed answers by a tool and by a schema, a loop of tools.

Run by `run.py`. The server needs a chat template with tools (`--chat-template hermes`) and `minispec[grammar]`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from typing import Any

from pydantic_ai import Agent, NativeOutput, RunContext, ToolDefinition
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from travel import Town


async def ask(model: Any) -> None:
    """Run the agents and check what comes back."""
    settings: Any = {"temperature": 0, "max_tokens": 80}
    plain = Agent(model, instructions="Be brief.", model_settings=settings)
    whole = await plain.run("Count from one to three.")
    async with plain.run_stream("Count from one to three.") as stream:
        assert await stream.get_output() == whole.output
    again = await plain.run("Go on.", message_history=whole.all_messages())
    assert again.output and again.usage.input_tokens > whole.usage.input_tokens

    for form in (Town, NativeOutput(Town)):
        typed = Agent(model, output_type=form, model_settings=settings)
        assert isinstance((await typed.run("Name a town.")).output, Town)
        async with typed.run_stream("Name a town.") as stream:
            assert isinstance(await stream.get_output(), Town)

    added: list[int] = []

    async def once(context: RunContext, tool: ToolDefinition) -> ToolDefinition | None:
        return None if added else tool  # the model would call for ever

    adder = Agent(model, output_type=Town, model_settings={**settings, "parallel_tool_calls": False})

    @adder.tool_plain(prepare=once)
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        added.append(a + b)
        return a + b

    result = await adder.run("Call add with 2 and 3.")
    parts = [part for message in result.all_messages() for part in message.parts]
    assert isinstance(result.output, Town) and len(added) == 1 and result.usage.requests == 2
    assert [part.content for part in parts if isinstance(part, ToolReturnPart) and part.tool_name == "add"] == added


async def main() -> None:
    """Ask in both forms."""
    for form in (OpenAIChatModel, OpenAIResponsesModel):
        await ask(form("default", provider=OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="None")))
    print("pydantic-ai", importlib.metadata.version("pydantic-ai-slim"), "with openai",
          importlib.metadata.version("openai"), "ok")  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
