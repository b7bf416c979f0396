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
from minispec.load.weights import read_text
from minispec.request import RequestError, short

ADDITIONAL = "additional_chat_templates"  # a folder of further templates, named as their files
PROBE = "a text that no template has of its own"
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
        self._walkers = {name for name, one in self._templates.items() if _walks_parts(one, named_tokens)}
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
        which = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
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
            if which in self._walkers:
                turns = [{**turn, "content": _as_parts(turn["content"])} for turn in turns]
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
        return read_text(Path(given))
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template must be a file with a Jinja template, got {given!r} ({error})") from None


def own_template(folder: Path, config: Mapping[str, Any]) -> Template:
    """Return the model's own templates; chat_template.jinja is the newer convention and wins.

    config: tokenizer_config.json. Raises ValueError naming it if its template or list of templates is malformed.
    """
    path = folder / "chat_template.jinja"
    try:
        given = read_text(path) if path.is_file() else config.get("chat_template")
        more = {path.stem: read_text(path) for path in sorted((folder / ADDITIONAL).glob("*.jinja"))}
    except ValueError as error:
        raise ValueError(f"{error}; --chat-template takes another one") from error
    given = [{"name": "default", "template": given}] if isinstance(given, str) else given or []
    try:
        named = {entry["name"]: entry["template"] for entry in given}
        if not all(isinstance(text, str) for text in (*named, *named.values())):
            raise TypeError
    except (KeyError, TypeError):
        raise ValueError(f"{folder}/tokenizer_config.json: chat_template must be a template or a list of objects with "
                         f"name and template, got {short(given)}") from None  # fmt: skip
    return {**named, **more} or None


def check_templates(template: Template, where: str) -> None:
    """Raise ValueError if a template is no Jinja; where: what gave it, for the message."""
    for source in (template,) if isinstance(template, str) else (template or {}).values():
        _compile(source, where)


def _compile(source: str, where: str = "") -> jinja2.Template:
    try:
        return _compile_jinja_template(source)
    except (jinja2.TemplateSyntaxError, SyntaxError) as error:  # Python's own: of the code that Jinja makes of it
        line = f"{where}the chat template has an error in line {error.lineno}: {error}"
        raise ValueError(f"{line}; --chat-template takes another one") from error


def _walks_parts(template: jinja2.Template, named_tokens: Mapping[str, str]) -> bool:
    """Return whether a template wants a list of parts as content: a plain text is not in its prompt, a part is."""
    given = {**named_tokens, "add_generation_prompt": True, "tools": None, "documents": None}
    for content in (PROBE, _as_parts(PROBE)):
        try:
            prompt = template.render({**given, "messages": [{"role": "user", "content": content}]})
        except Exception:  # whatever the model's author raises, or a text where a part is expected
            continue
        if PROBE in prompt:
            return not isinstance(content, str)
    return False


def _as_parts(text: str) -> list[dict[str, str]]:
    """Return a content as the list of one part, in OpenAI's form."""
    return [{"type": "text", "text": text}]


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
