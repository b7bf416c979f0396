"""Run a client that others wrote against a server that runs, in an environment of its own.

    python -m minispec.server --chat-template hermes
    python tests/clients/run.py litellm [--url http://127.0.0.1:30000]

Agents are run against a scripted model (tests/clients/scripted.py), with the call that stands in their script.

These clients install heavily, or pin versions beside which others cannot be installed. Each gets a folder under
~/.cache/minispec/clients, made at its first run with the newest versions; those that need torch take that of the
environment that runs this script, so run it in the server's. What this script does not know, as the `--examples` of
schemathesis, it hands on. The lighter ones are in the test suite too, tests/test_clients.py. README.md beside this
file has the versions that were run and what came out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple

from minispec.load.default_model import ensure_default_model

HERE = Path(__file__).resolve().parent
BASE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "minispec" / "clients"


class Client(NamedTuple):
    """What is installed, and the command that is run; {url}, {bin}, {here}, {out} and {model} are filled in."""

    packages: tuple[str, ...]
    command: tuple[str, ...]
    needs_torch: bool = False


CLIENTS = {
    "litellm": Client(("litellm", "mcp"), ("{bin}/python", "{here}/litellm_client.py", "{url}")),
    "guidellm": Client(
        ("guidellm",), ("{bin}/python", "{here}/guidellm_run.py", "{url}", "{model}"), needs_torch=True
    ),
    "guidance": Client(("guidance", "openai"), ("{bin}/python", "{here}/guidance_client.py", "{url}")),
    "langchain": Client(("langchain-openai",), ("{bin}/python", "{here}/langchain_client.py", "{url}")),
    "aiperf": Client(("aiperf",), ("{bin}/python", "{here}/aiperf_run.py", "{url}", "{model}")),
    "aider": Client(("aider-chat",), ("{bin}/python", "{here}/aider_client.py", "{url}")),
    "anthropic": Client(("anthropic",), ("{bin}/python", "{here}/anthropic_client.py", "{url}")),
    "claude-code": Client(("@anthropic-ai/claude-code",), ("node", "{out}/claude_code_node.mjs", "{url}")),
    "codex": Client(("@openai/codex",), ("node", "{out}/codex_node.mjs", "{url}")),
    "llama-index": Client(
        ("llama-index-llms-openai-like",), ("{bin}/python", "{here}/llama_index_client.py", "{url}")
    ),
    "opencode": Client(("opencode-ai",), ("node", "{out}/opencode_node.mjs", "{url}")),
    "smolagents": Client(("smolagents[openai]",), ("{bin}/python", "{here}/smolagents_client.py", "{url}")),
    "ai": Client(
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"), ("node", "{out}/ai_node.mjs", "{url}")
    ),
    "dspy": Client(("dspy",), ("{bin}/python", "{here}/dspy_client.py", "{url}")),
    "llm": Client(("llm",), ("{bin}/python", "{here}/llm_client.py", "{url}")),
    "openai": Client(("openai",), ("{bin}/python", "{here}/openai_client.py", "{url}")),
    "openai-agents": Client(("openai-agents",), ("{bin}/python", "{here}/openai_agents_client.py", "{url}")),
    "pydantic-ai": Client(
        ("pydantic-ai-slim[openai]",), ("{bin}/python", "{here}/pydantic_ai_client.py", "{url}")
    ),
    "instructor": Client(("instructor",), ("{bin}/python", "{here}/instructor_client.py", "{url}")),
    "lm-eval": Client(
        ("lm_eval[api,hf]",), ("{bin}/python", "{here}/lm_eval_run.py", "{url}", "{model}"), needs_torch=True
    ),
    "locust": Client(
        ("locust",),
        ("{bin}/locust", "-f", "{here}/locustfile.py", "--headless", "-u", "4", "-r", "4", "-t", "20s", "-H", "{url}",
         "--only-summary"),
    ),
    "openai-node": Client(("openai",), ("node", "{out}/openai_node.mjs", "{url}")),
    "outlines": Client(("outlines", "openai"), ("{bin}/python", "{here}/outlines_client.py", "{url}")),
    "schemathesis": Client(("schemathesis",), ("{bin}/python", "{here}/schemathesis_run.py", "--url", "{url}")),
}  # fmt: skip


def install(name: str, client: Client) -> Path:
    """Return the client's folder, made with its packages if it is not there yet."""
    folder = BASE / name
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.command[0] == "node":
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", *client.packages], cwd=folder, check=True)
        for script in HERE.glob("*.mjs"):  # beside node_modules, where node looks for packages
            shutil.copy(script, folder)
    else:
        venv.create(folder, with_pip=True)
        if client.needs_torch:  # its own packages come first, since a .pth file adds to the end of the path
            (purelib,) = folder.glob("lib/python*/site-packages")
            (purelib / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        subprocess.run([folder / "bin" / "pip", "install", "-q", *client.packages], check=True)
    (folder / "done").touch()
    return folder


def main() -> int:
    """Run one client and return its exit status, 0 if all that it checks held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where the server is")
    parser.add_argument("--model", help="folder of the model, for those that read it; default: the default model's")
    given, more = parser.parse_known_args()
    client = CLIENTS[given.client]
    folder = install(given.client, client)
    names = {"url": given.url, "bin": folder / "bin", "here": HERE, "out": folder, "model": given.model}
    if "{model}" in client.command and given.model is None:
        names["model"] = ensure_default_model()
    command = [*(part.format(**names) for part in client.command), *more]
    own = {"OPENAI_API_KEY": "None", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.call(command, cwd=folder, env={**clean, **own})


if __name__ == "__main__":
    sys.exit(main())
