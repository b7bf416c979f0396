"""Anthropic's client: whole and streamed answers, a loop of tools, thinking handed back, counts, errors.

python tests/clients/scripted.py --call '{"name": "add", "arguments": {"a": 1}}'
"""

from __future__ import annotations

import sys
from typing import Any

import anthropic

api = anthropic.Anthropic(base_url=sys.argv[1], api_key="None", max_retries=0)
tool = {"name": "add", "description": "Add one.", "input_schema": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}  # fmt: skip
turns: list[Any] = [{"role": "user", "content": "What is 1 + 1?"}]
wish: dict[str, Any] = {"model": "any", "max_tokens": 16_000, "tools": [tool], "system": "Be brief."}

whole = api.messages.create(**wish, messages=turns)
with api.messages.stream(**wish, messages=turns) as stream:
    streamed = stream.get_final_message()
assert [block.input for block in whole.content] == [block.input for block in streamed.content] == [{"a": 1}]
assert whole.stop_reason == streamed.stop_reason == "tool_use"
counted = api.messages.count_tokens(model="any", tools=[tool], system="Be brief.", messages=turns).input_tokens
assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens

turns += [
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": "x"}, *(
        block.model_dump(exclude_none=True) for block in whole.content)]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "2"}]},
]  # fmt: skip
answer = api.messages.create(**wish, messages=turns)
assert answer.stop_reason == "end_turn" and "all is well" in answer.content[0].text, answer

runner = api.beta.messages.tool_runner(
    model="any", max_tokens=1000, messages=turns[:1],
    tools=[anthropic.beta_tool(lambda a: str(a + 1), name="add", description="Add one.",
                               input_schema=tool["input_schema"])],
)  # fmt: skip
assert "all is well" in runner.until_done().content[0].text
try:
    api.messages.create(model="any", max_tokens=9, messages=[{"role": "user", "content": "long " * 200_000}])
    raise AssertionError("it fitted")
except anthropic.BadRequestError as error:
    assert "prompt is too long" in str(error)
print("ok", anthropic.__version__)
