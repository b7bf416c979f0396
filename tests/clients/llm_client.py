"""llm against a server: its command, whole and streamed, and its Python for a second turn, schemas and tools.

Run by `run.py`. The server needs a chat template with tools (`--chat-template hermes`) and `minispec[grammar]`. llm has
no way to demand a call, so the model may answer with text where it is offered a tool.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import llm
from travel import Town

MODEL = "{{model_id: small, model_name: default, api_base: '{}/v1', supports_tools: true, supports_schema: true}}"
COUNT = "Count from one to five."


def command(*options: str) -> str:
    """Return what the command `llm` prints."""
    asked = [str(Path(sys.executable).with_name("llm")), "-m", "small", "--key", "None", "--no-log", *options]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Ask in each way, and check what comes back."""
    limits = {"temperature": 0, "max_tokens": 24}
    given = [part for name, value in limits.items() for part in ("-o", name, str(value))]
    whole = command(*given, "--no-stream", COUNT)
    assert whole and command(*given, COUNT) == whole

    model = llm.get_model("small")
    talk = model.conversation()
    first = talk.prompt(COUNT, key="None", stream=True, **limits)
    assert first.text().strip() == whole and first.usage().output <= 24
    second = talk.prompt("Go on.", key="None", stream=False, **limits)
    assert second.text() and second.usage().input > first.usage().input + first.usage().output
    for stream in (False, True):
        assert Town.model_validate_json(model.prompt("Name a town.", key="None", schema=Town, stream=stream).text())

    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    chain = model.conversation(chain_limit=3).chain("What is 2 and 3?", tools=[add], key="None", options=limits)
    assert all(call.name == "add" for answer in chain.responses() for call in answer.tool_calls())
    print("llm", importlib.metadata.version("llm"), "with openai", importlib.metadata.version("openai"), "ok")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        (Path(folder) / "extra-openai-models.yaml").write_text("- " + MODEL.format(sys.argv[1]), encoding="utf-8")
        main()
