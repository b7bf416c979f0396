"""llama-index: an agent of its workflows calls a tool, reads the result, and answers.

python tests/clients/scripted.py --call '{"name": "add", "arguments": {"a": 1}}'
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

called = []


def add(a: int) -> int:
    """Add one."""
    called.append(a)
    return a + 1


async def run() -> None:
    """Run the agent, which streams."""
    model = OpenAILike(model="any", api_base=f"{sys.argv[1]}/v1", api_key="None", is_chat_model=True,
                       is_function_calling_model=True, context_window=65_536, max_tokens=32_000)  # fmt: skip
    said = await FunctionAgent(tools=[add], llm=model, system_prompt="Be brief.").run("What is 1 + 1?")
    assert called == [1] and "all is well" in str(said), (called, said)
    assert "all is well" in str(model.complete("Hello")) or called


asyncio.run(run())
print("ok", importlib.metadata.version("llama-index-core"))
