"""openai's client at `/v1/responses`: whole, parsed, streamed, and a loop of tools. Run by `run.py`.

The server needs a chat template with tools (`--chat-template hermes`) and `minispec[grammar]`.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

import openai
from travel import Stop

ADD: Any = {
    "type": "function", "name": "add", "description": "Add two numbers.", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"], "additionalProperties": False},
}  # fmt: skip


def main() -> None:
    """Ask in each way, and check what comes back."""
    client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="None", max_retries=0)
    wish: dict[str, Any] = {"model": "default", "input": "Count from one to five.", "temperature": 0}

    whole = client.responses.create(**wish, max_output_tokens=24, instructions="Be brief.", metadata={"a": "b"})
    assert whole.output_text and whole.usage.output_tokens <= 24 and whole.metadata == {"a": "b"}
    assert (whole.status == "incomplete") == (whole.usage.output_tokens == 24)

    with client.responses.stream(**wish, max_output_tokens=24, instructions="Be brief.") as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text

    parsed = client.responses.parse(**{**wish, "input": "Invent a stop."}, text_format=Stop)
    assert isinstance(parsed.output_parsed, Stop) and parsed.status == "completed"
    with client.responses.stream(**{**wish, "input": "Invent a stop."}, text_format=Stop) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed

    turns: list[Any] = [{"role": "user", "content": "What is 2 and 3?"}]
    for choice in ("required", {"type": "function", "name": "add"}, "none"):
        answer = client.responses.create(**{**wish, "input": turns}, max_output_tokens=80, tools=[ADD],
                                         tool_choice=choice, parallel_tool_calls=False)  # fmt: skip
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [call.name for call in calls] == ([] if choice == "none" else ["add"]), answer.output
        turns += answer.output
        for call in calls:
            given = json.loads(call.arguments)
            turns.append({"type": "function_call_output", "call_id": call.call_id, "output": str(sum(given.values()))})
    assert answer.output_text

    for field, value in (("store", True), ("previous_response_id", whole.id), ("tools", [{"type": "web_search"}])):
        try:
            client.responses.create(**wish, **{field: value})
        except openai.BadRequestError as error:
            assert error.param == field and field in error.message
        else:
            raise AssertionError(f"{field} was taken")
    print("openai", importlib.metadata.version("openai"), "ok")


if __name__ == "__main__":
    main()
