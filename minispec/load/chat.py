"""Conversations to prompts: the chat templates of one model.

A chat template is a Jinja program by the model's author. It is rendered in transformers' sandbox, with the functions
that such programs rely on there. A model may have several by name; `default` and `tool_use` are those that are used.

Read next: `chat_templates.py` for the templates that go by a name, `tokenizer.py`, which turns the prompt into ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template

from minispec.load.chat_templates import NAMED, is_template
from minispec.request import RequestError, short

SYSTEM = ("system", "developer")  # roles
CONTINUE_TAG = "<continue-here-1f0c> "  # the space shows whether the template strips the content

Template = str | Mapping[str, str] | None  # one template, or several by name


class ChatTemplates:
    """The templates of one model. It has no state after construction, so any thread may use it."""

    def __init__(self, template: Template, named_tokens: Mapping[str, str]) -> None:
        """`named_tokens`: those that templates may use, like `bos_token`."""
        sources = {"default": template} if isinstance(template, str) else dict(template or {})
        self._templates = {name: _compile(source) for name, source in sources.items()}
        self._sources, self._named_tokens = sources, dict(named_tokens)
        with_tools = sources.get("tool_use", sources.get("default"))
        uses = with_tools is not None and "tools" in find_undeclared_variables(
            _compile(with_tools).environment.parse(with_tools)
        )
        self.tool_template = with_tools if uses else None  # the source of the template that shows tools
        self.info = {**named_tokens, "chat_template": sources.get("default")}  # for clients that render too

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the model's chat template makes of the messages.

        Each message has a role and, as its content, one text (`parse.py` makes them so). `continue_final_message` ends
        the prompt inside the last message, so that the model continues it; then `add_generation_prompt` is false.
        Raises RequestError if there is no template, or if the template raises an error.
        """
        kwargs = dict(template_kwargs or {})
        with_tools = kwargs.get("tools") and "tool_use" in self._templates
        which = "tool_use" if with_tools else "default"
        template, source = self._templates.get(which), self._sources.get(which, "")
        if template is None:
            raise RequestError(
                "this model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
                "messages",
            )
        plain = [_known(message, source) for message in messages]
        if continue_final_message:
            plain[-1]["content"] += CONTINUE_TAG
        variables = {"tools": None, "documents": None, **self._named_tokens, **kwargs,
                     "add_generation_prompt": add_generation_prompt}  # fmt: skip
        prompts, failed = list[str](), None
        for turns in _arrangements(plain):
            try:
                prompts.append(template.render(variables | {"messages": turns}))
            except Exception as error:  # a template is a program by the model's author and may raise whatever it likes
                failed = failed or error
                continue
            if all(m["content"].strip() in prompts[-1] for m in plain if m["role"] in SYSTEM):
                prompts = prompts[-1:]
                break
        if not prompts:
            raise RequestError(f"the chat template cannot render these messages: {failed}", "messages") from failed
        prompt = prompts[0]
        check_unicode(prompt, "messages")
        return _cut_at_tag(prompt) if continue_final_message else prompt


def _known(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a message as the template with this source knows it: its roles, and what it calls reasoning."""
    known = dict(message)
    if known["role"] == "developer" and "developer" not in source:
        known["role"] = "system"
    for name in ("reasoning", "thinking"):
        if "reasoning_content" in known and f".{name}" in source:
            known[name] = known["reasoning_content"]
    return known


def _arrangements(turns: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation as it is, then with its system messages as one at the beginning, then within the first turn.

    Templates that know one system message, or none, raise an error for the others or leave them out.
    """
    yield turns
    system = "\n\n".join(turn["content"] for turn in turns if turn["role"] in SYSTEM)
    others = [turn for turn in turns if turn["role"] not in SYSTEM]
    if system:
        yield [{"role": "system", "content": system}, *others]
    if system and others:
        yield [{**others[0], "content": f"{system}\n\n{others[0]['content']}"}, *others[1:]]


# ---- templates -------------------------------------------------------------------------------------------------------


def given_template(given: str) -> str:
    """Return the operator's template: one of those with a name, the text itself if it is one, or a file's content."""
    if given in NAMED:
        return NAMED[given].source
    if is_template(given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template must be a file with a Jinja template, got {given!r} ({error})") from None


def own_template(folder: Path, config: Mapping[str, Any]) -> Template:
    """Return the model's own template; chat_template.jinja is the newer convention and wins.

    config: tokenizer_config.json. Raises ValueError naming it if its list of templates is malformed.
    """
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    given = config.get("chat_template")
    if not isinstance(given, list):
        return given
    try:
        return {entry["name"]: entry["template"] for entry in given}
    except (KeyError, TypeError):
        raise ValueError(f"{folder}/tokenizer_config.json: chat_template must be a template or a list of objects with "
                         f"name and template, got {short(given)}") from None  # fmt: skip


def _compile(source: str) -> jinja2.Template:
    try:
        return _compile_jinja_template(source)
    except (jinja2.TemplateSyntaxError, SyntaxError) as error:  # Python's own: of the code that Jinja makes of it
        raise ValueError(f"the chat template has an error in line {error.lineno}: {error}") from error


# ---- prompts ---------------------------------------------------------------------------------------------------------


def _cut_at_tag(prompt: str) -> str:
    """Return the prompt, as the template has written it, up to the end of the last message."""
    at = prompt.rfind(CONTINUE_TAG.strip())
    if at < 0:
        raise RequestError("the chat template leaves out the message to continue", "continue_final_message")
    # If the space after the tag is gone, the template strips contents, and without the tag would strip spaces there.
    return prompt[:at] if prompt.startswith(CONTINUE_TAG, at) else prompt[:at].rstrip()


def check_unicode(text: str, field: str) -> None:
    """Raise RequestError if the text has half of a surrogate pair, which JSON can express and no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{field} is not Unicode text: lone surrogate at character {error.start}", field) from None
