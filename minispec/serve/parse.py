"""Requests: JSON in, requests for the scheduler out. Pure functions, no sockets and no engine.

A body becomes a `Job` (what was asked, checked, with prompts still as text), and `tokenize` makes its `Request`s.
OpenAI's chats and responses and Anthropic's messages become a `Conversation` first, in which each part is checked under
the name that its client knows; from there on they are one. Everything a client sends is hostile until `parse_json` has
read it.

Read next: `fields.py` for the fields; `responses.py` and `messages.py` for two of the dialects; `reply.py` for the way
back; `request.py` for the sampling parameters.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import json
import logging
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from pydantic_core import from_json

from minispec.load.chat_templates import RESERVED, WITH_TOOLS
from minispec.replies.calls import MAX_DEPTH
from minispec.replies.constraint import call_or_form, constraint
from minispec.replies.formats import PLAIN_FORMATS, Formats
from minispec.request import (
    Grammar,
    Logprobs,
    Request,
    RequestError,
    SamplingParams,
    Thought,
    TooLong,
    Trace,
    short,
)
from minispec.serve import fields
from minispec.serve.fields import read
from minispec.serve.logprobs import Report
from minispec.serve.message import Message, Wish

if TYPE_CHECKING:
    from minispec.load.tokenizer import Tokenizer

BYTES_PER_TOKEN = 64  # a longer prompt per token of context is refused before it costs time in the tokenizer

logger = logging.getLogger("minispec")
Dialect = Literal["chat", "response", "message", "completion", "generate"]
PREFIXES = {"chat": "chatcmpl-", "response": "resp_", "message": "msg_", "completion": "cmpl-"}  # of ids
HIDES, DEMANDS = {"none"}, {"required", "any"}  # choices of tools, as the dialects call them
Prompt = str | list[int] | list[dict]  # text, token ids, or chat messages
OF_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
T = TypeVar("T")
Sampled = tuple[SamplingParams, dict[str, str]]  # and `Job.names`, which has max_new_tokens if the client set it
Form = tuple[str, str, Any]  # a field that constrains, the kind of grammar, and its rule
KINDS = {
    "json_schema": "json_schema",
    "json": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
    "choice": "lark",
}  # of grammars
SAMPLED = {field.name for field in dataclasses.fields(SamplingParams)} - {"grammar", "logprobs"}  # plain values


# ---- JSON ------------------------------------------------------------------------------------------------------------


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a request body strictly; RequestError 400 for anything but an object of finite, encodable values."""
    try:
        value = from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
        _check_values(value, 0)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {short(value)}")
    return value


def _check_values(value: Any, depth: int) -> None:
    """Raise ValueError for nesting beyond MAX_DEPTH, and for numbers of more than 64 bits."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_values(item, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"the integer {short(value)} does not fit 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is too large")


def dump(value: Any) -> bytes:
    """Return `value` as compact UTF-8 JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


# ---- jobs ------------------------------------------------------------------------------------------------------------


class Tool(NamedTuple):
    """A tool as its client knows it. The model knows it under one name, and calls it with an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    namespace: str | None = None
    free: bool = False  # its client wants a text, which is the argument `input` of the model's call

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as the chat template gets it."""
        said = {"name": joined(self), "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in said.items() if value is not None}}


def joined(tool: Any) -> str:
    """Return the model's name for a tool, or for the tool that a call or a choice names."""
    tool = getattr(tool, "function", tool)
    return f"{tool.namespace}__{tool.name}" if getattr(tool, "namespace", None) else str(tool.name)


def tools_of(offered: Iterable[Any], namespace: str | None = None) -> list[Tool]:
    """Return the tools that the client runs; of the others the log has a line."""
    tools: list[Tool] = []
    for tool in offered:
        if isinstance(tool, fields.Namespace):
            tools += tools_of(tool.tools, tool.name)
        elif isinstance(tool, fields.Unserved):
            leave_out(tool.type)
        elif free := isinstance(tool, fields.CustomTool):
            tools.append(Tool(tool.name, tool.description, OF_TEXT, namespace, free))
        else:
            schema = tool.input_schema if isinstance(tool, fields.ClientTool) else tool.parameters
            tools.append(Tool(tool.name, tool.description, schema, namespace))
    return tools


class Pick(NamedTuple):
    """Which tools may or must be called."""

    mode: str | None = None  # the client's word; "required" and "any" demand a call, "none" forbids it
    only: str | None = None  # the one tool that must be called
    allowed: Sequence[str] | None = None  # the others are hidden; None: none is


def pick_of(choice: Any) -> Pick:
    """Return a choice of tools; of those that are allowed, the ones that are not served do not count."""
    if choice is None or isinstance(choice, str):
        return Pick(choice)
    if isinstance(choice, fields.Named | fields.NamedTool):
        return Pick(only=joined(choice))
    allowed = getattr(choice, "allowed_tools", choice)
    return Pick(allowed.mode, allowed=[joined(tool) for tool in allowed.tools if not isinstance(tool, fields.Unserved)])


@dataclass(frozen=True)
class Conversation:
    """What a chat, a response or a message asks for, with the client's own names for what errors may be about."""

    dialect: Dialect
    messages: list[dict[str, Any]]  # as a chat template wants them
    where: str  # the field that has the messages
    tools: Sequence[Tool] = ()
    pick: Pick = Pick()
    parallel: bool = True  # several calls in an answer
    forms: Sequence[Form] = ()  # what the answer's text must be, beside the fields of `Constrained`
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the chat template
    continued: bool = False  # whether the answer continues the last message
    generates: bool = True  # whether the template begins a new message, unless the last is continued
    thoughts: Mapping[str, bool] = field(default_factory=dict)  # what `Wish` says of reasoning, where not as usual

    def wish(self) -> Wish:
        """Return what the answer may call; RequestError 400 where tools and choice do not fit together."""
        (mode, only, allowed), names = self.pick, [joined(tool) for tool in self.tools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise RequestError(f"tools must have names of their own, got {twice!r} twice", "tools")
        if missing := sorted(set(allowed or ()) - set(names)):
            raise RequestError(f"tool_choice must allow some of the tools, got {short(missing[0])}", "tool_choice")
        if only is not None and only not in names:
            raise RequestError(f"tool_choice must name one of the tools, got {short(only)}", "tool_choice")
        shown = [tool for tool in self.tools if mode not in HIDES and (allowed is None or joined(tool) in allowed)]
        must = only is not None or mode in DEMANDS
        if must and not shown:
            raise RequestError(f"tool_choice must be none or auto where there are no tools, got {mode!r}",
                               "tool_choice")  # fmt: skip
        return Wish(tuple(tool.shown for tool in shown), must, only, self.parallel, **self.thoughts)


@dataclass(frozen=True)
class Job:
    """One HTTP request for text, checked: prompts, parameters, rids and their like have one entry per choice."""

    dialect: Dialect
    model: str | None  # the name the client gave
    prompts: list[Prompt]
    params: list[SamplingParams]
    rids: list[str]
    limited: list[bool]  # per prompt: the client set max_new_tokens
    intervals: list[int | None]  # per prompt: tokens between two events; None: as the server likes
    n: int = 1  # choices for each prompt, which follow each other
    salt: str = ""  # of the prefix cache
    report: Report = Report()  # what of the logprobs goes into the answer
    batched: bool = False  # a list was sent, so a list goes back (native)
    stream: bool = False
    stream_options: fields.StreamOptions = field(default_factory=fields.StreamOptions)
    return_ids: bool = False
    spec_details: bool = False  # tell what was drafted and accepted (OpenAI's)
    trace: bool = False  # tell how each token came about (native)
    add_special_tokens: bool = True
    truncate: int | None = None  # prompt tokens to keep; -1: as many as leave room for the output
    chat: dict[str, Any] = field(default_factory=dict)  # keyword arguments of Tokenizer.encode_chat
    wish: Wish = Wish()  # what becomes of a conversation's answer
    tools: Mapping[str, Tool] = field(default_factory=dict)  # by the model's names
    prediction: str | None = None  # what the answer is expected to be like
    repeated: dict[str, Any] = field(default_factory=dict)  # what the answer repeats of its request
    names: dict[str, str] = field(default_factory=dict)  # what our errors call a field -> what the client does

    @property
    def talks(self) -> bool:
        """Whether the answer is a message."""
        return self.dialect not in ("completion", "generate")


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Job:
    """Return the job of a /v1/chat/completions body; `defaults` are the sampling values of the model, if used."""
    asked: Any = read(fields.Chat, body)
    continued = asked.continue_final_message is True
    messages = messages_of(asked.messages)
    if continued and messages[-1]["role"] != "assistant":
        raise RequestError("continue_final_message needs a last message of role assistant", "continue_final_message")
    top = (asked.top_logprobs or 0) if asked.logprobs is True else None
    if top is None and asked.top_logprobs:
        raise RequestError(f"top_logprobs must be left out unless logprobs is true, got {asked.top_logprobs}",
                           "top_logprobs")  # fmt: skip
    told = Conversation(
        "chat", messages, "messages",
        tools_of(tool.function for tool in asked.tools or []), pick_of(asked.tool_choice),
        asked.parallel_tool_calls is not False, _response_format(asked),
        variables(asked, effort=asked.reasoning_effort, thinks=asked.enable_thinking), continued,
        asked.add_generation_prompt is not False,
        {"separate": asked.separate_reasoning is not False, "stream_reasoning": asked.stream_reasoning is not False,
         "include_reasoning": asked.include_reasoning is not False})  # fmt: skip
    return job_of(told, asked, {**defaults, "logprobs": None if top is None else Logprobs(top=top)},
                  report=Report(top, as_ids=asked.return_tokens_as_token_ids is True),
                  prediction=text_of(asked.prediction.content) if asked.prediction else None)  # fmt: skip


def job_of(told: Conversation, asked: Any, defaults: Mapping[str, Any], **own: Any) -> Job:
    """Return the job of a conversation; `asked`: the body as read, with its sampling fields. own: fields of `Job`.

    A format is that of the text, so it is dropped where the answer must be a call; what constrains the whole answer may
    not be given there.
    """
    wish, form = told.wish(), _grammar(asked, told.forms)
    if wish.must and form is not None and form.origin not in {origin for origin, _, _ in told.forms}:
        raise RequestError(f"{form.origin} may not be given where tool_choice asks for a call", form.origin)
    values = {"max_new_tokens": None, **defaults, "grammar": None if wish.must else form}
    chat = {"add_generation_prompt": told.generates and not told.continued, "continue_final_message": told.continued,
            "template_kwargs": {**told.variables, **({"tools": list(wish.tools)} if wish.tools else {})}}  # fmt: skip
    return _job(told.dialect, asked, [told.messages], [_sampled(asked, values, told.where)], chat=chat, wish=wish,
                tools={joined(tool): tool for tool in told.tools}, **own)  # fmt: skip


def parse_completion(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Job:
    """Return the job of a /v1/completions body: a prompt of text or ids, or a list of such prompts."""
    asked = read(fields.Completion, body)
    prompts = _listed(asked.prompt)
    report = Report(asked.logprobs, asked.prompt_logprobs, asked.echo is True,
                    as_ids=asked.return_tokens_as_token_ids is True)  # fmt: skip
    start = 0 if report.prompt is not None or (report.echo and report.top is not None) else None
    counts = _given(asked, ("logprobs", "prompt_logprobs"))
    wishes = [_logprobs(name, top=count, start=start) for name, count in counts.items()]
    values = {**defaults, "max_new_tokens": 16, "logprobs": max(wishes, key=lambda wish: wish.top, default=None),
              "grammar": _grammar(asked, _response_format(asked))}  # fmt: skip
    return _job("completion", asked, prompts, [_sampled(asked, values, "prompt")] * len(prompts), report=report,
                add_special_tokens=asked.add_special_tokens is not False)  # fmt: skip


def parse_generate(body: Mapping[str, Any]) -> Job:
    """Return the job of a native /generate body: `text` or `input_ids`, one or a list, and `sampling_params`."""
    asked = read(fields.Generate, body)
    given = [name for name in ("text", "input_ids") if getattr(asked, name) is not None]
    if len(given) != 1:
        raise RequestError(f"exactly one of text and input_ids must be given, got {given or 'neither'}",
                           given[-1] if given else "text")  # fmt: skip
    prompt = getattr(asked, given[0])
    prompts, wishes = _listed(prompt), asked.sampling_params
    if not isinstance(wishes, list):
        wishes = [wishes or fields.NativeParams()] * len(prompts)
    if len(wishes) != len(prompts):
        raise RequestError(f"sampling_params has {len(wishes)} entries for {len(prompts)} prompts", "sampling_params")
    counts = {wish.n or 1 for wish in wishes}
    if len(counts) > 1:
        raise RequestError(f"n must be the same for all prompts, got {sorted(counts)}", "n")
    n = counts.pop()
    sampled = [_sampled(wish, {"grammar": _grammar(wish), "logprobs": scores}, given[0])
               for wish, scores in zip(wishes, _native_wishes(asked, len(prompts)), strict=True)]  # fmt: skip
    return _job(
        "generate", asked, prompts, sampled, n, report=Report(texts=asked.return_text_in_logprobs is True),
        intervals=_repeated([wish.stream_interval or asked.stream_interval for wish in wishes], n),
        batched=prompts is prompt or n > 1, trace=asked.trace is True,
    )  # fmt: skip


def _sampled(asked: Any, values: Mapping[str, Any], prompt: str) -> Sampled:
    """Return the parameters that a body sets, or `values` where it does not; `prompt`: the field with the prompts."""
    given = _given(asked, [name for name in SAMPLED if hasattr(asked, name)])
    names = {"prompt": prompt, "messages": prompt, **{name: name for name in given}}
    for name, ours in fields.MEANS.items():
        if (value := getattr(asked, name, None)) is not None:
            given[ours], names[ours] = value, name
    native = isinstance(asked, fields.NativeParams)
    names["max_tokens"] = names.get("max_new_tokens", "max_new_tokens" if native else "max_tokens")
    with in_clients_words(names):
        return SamplingParams(**{**values, **given}), names


def _job(
    dialect: Dialect, asked: Any, prompts: list[Prompt], sampled: Sequence[Sampled], n: int | None = None, **own: Any
) -> Job:
    """Return a job with what all dialects have in common; each of the n choices for a prompt has a seed of its own.

    sampled: for each prompt. n: by default the body's. own: fields of `Job`.
    """
    n, rid = n or asked.n or 1, asked.rid
    options: dict[str, Any] = {"intervals": [asked.stream_interval] * (len(prompts) * n)}
    if isinstance(asked, fields.OpenAI):
        rid = rid or asked.request_id
        options |= {"stream_options": asked.stream_options or fields.StreamOptions(),
                    "return_ids": asked.return_token_ids is True,
                    "spec_details": asked.return_spec_tokens_details is True}  # fmt: skip
    seeded = [replace(p, sampling_seed=choice_seed(p.sampling_seed, choice)) for p, _ in sampled for choice in range(n)]
    salts = [asked.cache_salt, asked.extra_key]  # told apart, so that no pair equals another
    return Job(
        dialect, asked.model, _repeated(prompts, n), seeded, _rids(rid, len(prompts), PREFIXES.get(dialect, ""), n),
        _repeated(["max_new_tokens" in names for _, names in sampled], n), n=n,
        salt=json.dumps(salts) if any(salts) else "", stream=asked.stream is True,
        truncate=asked.truncate_prompt_tokens, names=sampled[0][1], **{**options, **own},
    )  # fmt: skip


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Return the seed of the choice-th answer to one prompt: seed + choice * 0x9E3779B97F4A7C15 in 64 bits with a sign.

    The first choice has the plain seed. If `seed` is None, the result is None, and each choice draws its own seed.
    """
    return seed if seed is None else (seed + choice * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63


def _rids(given: str | list[str] | None, prompts: int, prefix: str, n: int) -> list[str]:
    """Return one id per choice: the client's, or new ones with a common stem so that one prefix aborts them all."""
    if isinstance(given, list):
        if len(given) != prompts:
            raise RequestError(f"rid has {len(given)} entries for {prompts} prompts", "rid")
        return given if n == 1 else [f"{rid}-{choice}" for rid in given for choice in range(n)]
    stem = prefix + uuid.uuid4().hex if given is None else given
    return [stem] if prompts * n == 1 else [f"{stem}-{i}" for i in range(prompts * n)]


def _repeated(items: Sequence[T], n: int) -> list[T]:
    return [item for item in items for _ in range(n)]


def _given(asked: fields.Fields, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(asked, name)) is not None}


def _listed(prompt: Any) -> list[Prompt]:
    """Return a prompt, or a list of them, as a list."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


# ---- what is sampled -------------------------------------------------------------------------------------------------


@contextmanager
def in_clients_words(names: Mapping[str, str]) -> Iterator[None]:
    """Within this, make an error about a field of ours one about the client's; `names` as in `Job.names`."""
    try:
        yield
    except RequestError as error:
        for ours in set(names) & {*fields.MEANS.values(), "top_logprobs"}:
            error.message = re.sub(rf"\b{ours}\b", names[ours], error.message)
        error.args, error.param = (error.message,), names.get(error.param or "", error.param)
        raise


def _grammar(asked: Any, forms: Iterable[Form] = ()) -> Grammar | None:
    """Return what the client wants the output to be, if anything; RequestError if it wants several things.

    The same may be asked for twice: clients that do not know which vLLM they talk to use its older and newer fields.
    """
    wishes = list(_wishes(asked))
    if newer := asked.structured_outputs if isinstance(asked, fields.OpenAI) else None:
        own = list(_wishes(newer, "structured_outputs"))
        if len(own) != 1:
            raise RequestError("structured_outputs must be an object with exactly one of json, regex, choice, grammar, "
                               f"json_object and structural_tag, got {len(own)}", "structured_outputs")  # fmt: skip
        wishes += own
    grammars = [Grammar(kind, rule if isinstance(rule, str) else dump(rule).decode(), origin)
                for origin, kind, rule in (*wishes, *forms)]  # fmt: skip
    if len(set(grammars)) > 1:
        raise RequestError(f"at most one of {', '.join(grammar.origin for grammar in grammars)} may be given",
                           grammars[-1].origin)  # fmt: skip
    return grammars[0] if grammars else None


def _wishes(asked: Any, where: str | None = None) -> Iterator[Form]:
    """Yield what the fields of a body, or of its object `where`, want the output to be."""
    space = asked.guided_whitespace_pattern if isinstance(asked, fields.OpenAI) else None
    if isinstance(asked, fields.StructuredOutputs):
        space = "" if asked.disable_any_whitespace else asked.whitespace_pattern
    body: Any = type(asked)
    for name in fields.acting(body):
        kind = KINDS.get(name.removeprefix("guided_"))
        value = None if kind is None else getattr(asked, name if name != "json" else "json_")
        if kind is None or value in (None, "", [], False):
            continue
        if kind == "lark":
            value = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
        elif kind == "json_schema":
            value = _spaced({"type": "object"} if value is True else value, space, where or name)
        yield where or name, kind, value


def _spaced(schema: Any, pattern: str | None, field_name: str) -> Any:
    """Return a schema, or its text, with what may stand between tokens, unless `pattern` is None."""
    if pattern is None:
        return schema
    if isinstance(schema, str):
        try:
            schema = parse_json(schema.encode("utf-8"))
        except RequestError as error:
            raise RequestError(f"{field_name} must have the text of a JSON object: {error.message}",
                               field_name) from None  # fmt: skip
    return {"x-guidance": {"whitespace_pattern": pattern}, **schema}


def _response_format(asked: fields.OpenAI) -> list[Form]:
    """Return what `response_format` asks for."""
    form = asked.response_format
    if form is None:
        return []
    if form.type == "structural_tag":
        return [("response_format", form.type, _given(form, ("structures", "triggers")))]
    where = "response_format.json_schema.schema" if form.type == "json_schema" else "response_format.schema"
    return schema_form(where, form.type, (form.json_schema or {}).get("schema") or form.schema_)


def schema_form(where: str, kind: str, schema: Any) -> list[Form]:
    """Return what a format asks for that is `text`, any `json_object`, or JSON of the schema in the field `where`."""
    if kind == "text":
        return []
    if schema is None and kind == "json_object":
        schema = {"type": "object"}
    origin = where.removesuffix(".schema").removesuffix(".json_schema")
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"{where} must be a JSON schema, got {short(schema)}", origin)
    return [(origin, "json_schema", schema)]


def _logprobs(counted: str, **wish: Any) -> Logprobs:
    """Return what is wished; an error about the number of likeliest tokens names the field `counted`."""
    with in_clients_words({"top_logprobs": counted}):
        return Logprobs(**wish)


def _native_wishes(asked: fields.Generate, prompts: int) -> list[Logprobs | None]:
    """Return the logprobs that each prompt of a native body asks for."""
    each: dict[str, list[Any]] = {}
    for name in ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"):
        given = getattr(asked, name)
        listed = isinstance(given, list)
        if name == "token_ids_logprob":  # one list of ids is for all prompts
            listed = bool(given) and isinstance(given[0], list)
        each[name] = given if listed else [given] * prompts
        if len(each[name]) != prompts:
            raise RequestError(f"{name} has {len(each[name])} entries for {prompts} prompts", name)
    wishes = [_logprobs("top_logprobs_num", top=top or 0, ids=tuple(ids or ()), start=None if start == -1 else start)
              for _, start, top, ids in zip(*each.values(), strict=True)]  # fmt: skip
    return [wish if wanted else None for wanted, wish in zip(each["return_logprob"], wishes, strict=True)]


# ---- chats -----------------------------------------------------------------------------------------------------------


def messages_of(given: Sequence[fields.Message]) -> list[dict[str, Any]]:
    """Return a chat's messages as chat templates know them."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message with text as its content; `where` names it in errors."""
    role = "tool" if message.role == "function" else message.role
    if message.content is None and role not in ("assistant", "tool"):
        raise RequestError(f"{where}.content must be text or a list of text parts, got None", "messages")
    thoughts = [message.reasoning_content or message.reasoning]
    calls = [made_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return turn(role, message.content, thoughts, calls, **_given(message, ("name", "tool_call_id")))


def turn(
    role: str, content: Any, thoughts: Iterable[str | None] = (), calls: Sequence[dict[str, Any]] = (), **own: str
) -> dict[str, Any]:
    """Return a message as chat templates know it; what it has none of is left out."""
    said: dict[str, Any] = {**own, "role": role, "content": text_of(content)}
    among = [part.thinking for part in content if part.type == "thinking"] if isinstance(content, list) else []
    if thought := "\n".join(filter(None, (*thoughts, *among))):
        said["reasoning_content"] = thought
    return {**said, "tool_calls": calls} if calls else said


def text_of(content: Any) -> str:
    """Return content as text, its parts as lines; what is no text is left out, and thoughts are none."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_said(part) for part in content if part.type != "thinking")


def _said(part: Any) -> str:
    if (what := fields.LEFT_OUT.get(part.type)) is not None:
        leave_out(what)
        return f"[{what} left out]"
    return str(part.refusal if part.type == "refusal" else part.text)


@functools.lru_cache(256)
def leave_out(what: str) -> None:
    """Say in the log, once, that a kind of tool, item or part is left out of conversations."""
    logger.warning("left out of conversations, since only text goes in and clients run the tools: %s", short(what))


def made_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return an earlier call as templates know it, its arguments as an object.

    Some templates print arguments, others walk them, so only an object does for all. An object is itself, also if it
    comes as text. Of nothing, an empty text and null, it is {}; of anything else {"arguments": TEXT}, with the text as
    the model wrote it. A model writes such calls, and a limit cuts them, so they are no errors of the client's.
    """
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments.encode("utf-8"))
        except RequestError:
            arguments = arguments if arguments.strip() not in ("", "null") else None
    if not isinstance(arguments, dict):
        text = arguments if isinstance(arguments, str) else dump(arguments).decode()
        arguments = {} if arguments is None else {"arguments": text}
    given = {} if call_id is None else {"id": call_id}
    return {**given, "type": "function", "function": {"name": name, "arguments": arguments}}


def variables(asked: Any, *, effort: str | None, thinks: bool | None = None) -> dict[str, Any]:
    """Return the variables a client sets in the chat template: plain values under names of its own.

    asked: a body with `thinking` and `chat_template_kwargs`. thinks: `enable_thinking`, if that was given.
    """
    kwargs = asked.chat_template_kwargs or {}
    if len(kwargs) > 16:
        raise RequestError(f"chat_template_kwargs must have at most 16 names, got {len(kwargs)}",
                           "chat_template_kwargs")  # fmt: skip
    for name, value in kwargs.items():
        if not name.isidentifier() or name.startswith("_") or name in RESERVED:
            raise RequestError(f"chat_template_kwargs may not set {short(name)}", "chat_template_kwargs")
        if not isinstance(value, (str, bool, int, float, type(None))) or (isinstance(value, str) and len(value) > 1000):
            raise RequestError(f"chat_template_kwargs.{name} must be a short string, a number, a bool or null",
                               "chat_template_kwargs")  # fmt: skip
    if thinks is None and asked.thinking:
        thinks = {"enabled": True, "disabled": False}.get(asked.thinking.type)
    own = {"reasoning_effort": effort, "enable_thinking": thinks}
    return {**{name: value for name, value in own.items() if value is not None}, **kwargs}


# ---- requests --------------------------------------------------------------------------------------------------------


def tokenize(
    job: Job, tokenizer: Tokenizer, context_length: int, longest: int | None = None, formats: Formats = PLAIN_FORMATS
) -> list[Request]:
    """Return one request per prompt of the job; slow for long prompts, so not to be called on the event loop.

    longest: tokens of the longest possible prompt, to which a prompt is cut if the client wants it cut to what fits.
    """
    requests: list[Request] = []
    if job.prediction:
        check_size(job.prediction, context_length, "prediction")
    if job.wish.tools:
        if tokenizer.chat.tool_template is None:
            raise RequestError("tools: the chat template of this model has no place for them; start the server with "
                               f"one that has, --chat-template FILE or {' or '.join(WITH_TOOLS)}", "tools")  # fmt: skip
        if formats.calls is None:
            raise RequestError("tools: the chat template does not show how the model writes a call; start the server "
                               "with --tool-call-parser", "tools")  # fmt: skip
        check_size(list(job.wish.tools), context_length, "tools")
    for i, (params, rid, limited) in enumerate(zip(job.params, job.rids, job.limited, strict=True)):
        leader = requests[i - i % job.n] if i % job.n else None
        ids = _prompt_ids(job, i, tokenizer, context_length, longest) if leader is None else leader.prompt_ids
        if not limited and params.max_new_tokens is not None:  # the dialect's default gives way to the context
            room = max(context_length - len(ids), 0)
            params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
        # The scheduler's rid is unique whatever the client sends, and no prefix of another: aborts go by prefix.
        own = f"{rid}/{uuid.uuid4().hex}"
        request = Request(own, list(ids), params, leader=leader, salt=job.salt)
        request.trace = Trace() if job.trace else None
        if job.prediction:
            request.prediction = tokenizer.encode(job.prediction, False)[:context_length]
        if job.talks:
            _prepare_answer(request, job, tokenizer, formats)
        requests.append(request)
    return requests


def _prompt_ids(job: Job, i: int, tokenizer: Tokenizer, context_length: int, longest: int | None) -> list[int]:
    """Return the ids of a job's i-th prompt, cut to the length that the client wants."""
    prompt, wanted = job.prompts[i], job.params[i].max_new_tokens
    check_size(prompt, context_length)
    if job.talks:
        ids = tokenizer.encode_chat(cast(list[dict[str, Any]], prompt), **job.chat)
    elif isinstance(prompt, str):
        ids = tokenizer.encode(prompt, job.add_special_tokens)
    else:
        ids = cast(list[int], prompt)
    if not ids:
        raise RequestError("the prompt is empty", job.names.get("prompt", "prompt"))
    if job.truncate == -1:
        output = min(wanted, context_length // 2) if job.limited[i] and wanted is not None else 1
        return ids[-max(min(longest or context_length, context_length - output), 1) :]
    return ids if job.truncate is None else ids[-job.truncate :]


def _prepare_answer(request: Request, job: Job, tokenizer: Tokenizer, formats: Formats) -> None:
    """Note with a chat's request what its answer depends on: must it be a call, does its prompt leave it thinking."""
    wish, thoughts, calls = job.wish, formats.thoughts, formats.calls
    request.begins = not job.chat["continue_final_message"]
    if wish.must and calls is not None:
        must = Grammar("lark", constraint(wish.tools, calls, wish.only, wish.parallel), "tool_choice")
        request.params = replace(request.params, grammar=must)
    elif wish.tools and calls is not None and (form := request.params.grammar) is not None:
        request.params = replace(request.params, grammar=call_or_form(wish.tools, calls, form, wish.parallel))
    if thoughts is not None:
        tail = tokenizer.decode(request.prompt_ids[-32:], skip_special_tokens=False).rstrip()
        if job.chat["continue_final_message"]:
            tail = cast(list[dict[str, Any]], job.prompts[0])[-1]["content"]
            request.thinking = tail.rfind(thoughts.begin) > tail.rfind(thoughts.end)
        elif tail.endswith((thoughts.begin, thoughts.end)):
            request.thinking = tail.endswith(thoughts.begin)
        if (form := request.params.grammar) is not None and request.thinking is not False:
            thought = Thought(thoughts.begin, thoughts.end, request.thinking or thoughts.always)
            request.params = replace(request.params, grammar=replace(form, thought=thought))
    marks = [calls.begin] if wish.tools and calls is not None else []
    marks += [thoughts.begin, thoughts.end] if thoughts is not None and wish.separate else []
    if any(tokenizer.token_id(mark) in tokenizer.backend.special_ids for mark in marks):
        request.params = replace(request.params, skip_special_tokens=False)  # they must be seen to be found
    if wish.tools and not wish.parallel:
        request.ends = Message(wish, formats, request.thinking).completes_call


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_size(prompt: Prompt, context_length: int, param: str | None = None) -> None:
    """Raise RequestError 400 for a prompt, or a field `param`, that cannot fit the context, before it costs time."""
    if not isinstance(prompt, str) and isinstance(prompt[0], int):
        return  # ids are no work
    size = len(prompt.encode("utf-8") if isinstance(prompt, str) else dump(prompt))
    limit = BYTES_PER_TOKEN * context_length
    if size > limit:
        raise TooLong(f"the {param or 'prompt'} has {size} bytes; at most {limit} are looked at with the model's "
                      f"context length ({context_length} tokens)", size // BYTES_PER_TOKEN, context_length,
                      param)  # fmt: skip
