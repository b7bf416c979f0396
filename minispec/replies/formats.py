"""How models write calls and reasoning, under SGLang's names: those of `--tool-call-parser` and `--reasoning-parser`.

A model is trained on one way to write a call into its text, which its chat template shows. There are two here, and both
spell a call as a JSON object. Reasoning stands between two tags.

Read next: `constraint.py`, the grammar of a call; `calls.py` and `thoughts.py`, which find these in a reply.
"""

from __future__ import annotations

from typing import NamedTuple


class CallFormat(NamedTuple):
    """How a call is written: `begin` {"name": ..., `arguments`: {...}} `end`."""

    begin: str
    end: str
    arguments: str  # the key of the arguments where the model is told how to write a call; either key is read
    bare: bool  # whether a reply that is an object from its first character on is a call too
    spelled: tuple[str, str]  # what stands around the object in a reply that is constrained to be a call
    between: str  # and between two of them


class ThoughtFormat(NamedTuple):
    """The tags around the reasoning; `always`: a reply begins with it, whether the begin tag is written or not."""

    begin: str
    end: str
    always: bool


class Formats(NamedTuple):
    """How the served model writes calls and reasoning; None where that is not known, and so not looked for."""

    calls: CallFormat | None = None
    thoughts: ThoughtFormat | None = None


PLAIN_FORMATS = Formats()

_HERMES = CallFormat("<tool_call>", "</tool_call>", "arguments", False, ("<tool_call>\n", "\n</tool_call>"), "\n")
_LLAMA3 = CallFormat("<|python_tag|>", ";", "parameters", True, ("", ""), "; ")
CALLS = {"hermes": _HERMES, "qwen25": _HERMES, "qwen": _HERMES, "llama3": _LLAMA3}

_THINK = ("<think>", "</think>")
THOUGHTS = {
    "deepseek-r1": ThoughtFormat(*_THINK, always=True),
    "deepseek-v3": ThoughtFormat(*_THINK, always=False),
    "glm45": ThoughtFormat(*_THINK, always=False),
    "kimi": ThoughtFormat("◁think▷", "◁/think▷", always=False),
    "kimi_k2": ThoughtFormat(*_THINK, always=False),
    "qwen3": ThoughtFormat(*_THINK, always=False),
    "qwen3-thinking": ThoughtFormat(*_THINK, always=True),
    "step3": ThoughtFormat(*_THINK, always=True),
}


def calls_of(template: str) -> CallFormat | None:
    """Return how a model with this chat template writes calls, or None if the template does not show it."""
    if "<tool_call>" in template and "<function=" not in template:  # the latter writes arguments as XML
        return _HERMES
    return _LLAMA3 if "<|start_header_id|>" in template and '"parameters"' in template else None
