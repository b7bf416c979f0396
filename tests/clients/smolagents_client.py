"""smolagents: an agent that calls a tool by the API, twice, whole and streamed, and must end with `final_answer`.

python tests/clients/scripted.py --call '{"name": "final_answer", "arguments": {"answer": "Paris it is"}}'
"""

from __future__ import annotations

import sys

import smolagents

for stream in (False, True):
    model = smolagents.OpenAIModel("any", api_base=f"{sys.argv[1]}/v1", api_key="None", max_tokens=32_000)
    agent = smolagents.ToolCallingAgent(tools=[], model=model, max_steps=2, stream_outputs=stream)
    assert agent.run("What is the capital of France?") == "Paris it is"
print("ok", smolagents.__version__)
