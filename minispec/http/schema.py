"""The schema: JSON in, requests out; updates in, JSON out. Pure functions, no sockets and no engine.

Three dialects share one path: OpenAI's chat and completions, and SGLang's native `/generate`. A body becomes a `Job`
(what was asked, checked, with prompts still as text), `tokenize` makes its `Request`s, and a `Reply` turns the
scheduler's updates into stream events or one answer. The one idea: a field either acts or is refused by name. What is
not here yet (`_NOT_YET`) is a 400 as soon as it asks for something, while its null and default values pass; a name
without an effect (`_INERT`) is dropped; names nobody knows are ignored with a debug line, because clients send many.

Everything a client sends is hostile until parsed: `parse_json` lets through no NaN, no infinity, no lone surrogate,
no integer beyond 64 bits and no deep nesting.

Read next: `server.py`, which moves these bytes; `request.py` for the sampling parameters.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from minispec.request import ABORT_WANTED, Finish, Request, RequestError, SamplingParams, Update, meta_info

if TYPE_CHECKING:
    from minispec.load.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_BATCH = 128  # prompts in one HTTP request
MAX_DEPTH = 64  # of nested JSON
BYTES_PER_TOKEN = 64  # a longer prompt per token of context is refused before it costs time in the tokenizer
DONE = b"data: [DONE]\n\n"

Kind = Literal["chat", "completion", "generate"]
Prompt = str | list[int] | list[dict]  # text, token ids, or chat messages


# ---- JSON ------------------------------------------------------------------------------------------------------------


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a request body strictly; RequestError 400 for anything but an object of finite, encodable values."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number, parse_float=_finite, parse_int=_bounded)
        _check_values(value, 0)
    except RecursionError:
        raise RequestError(f"the body nests deeper than {MAX_DEPTH} levels") from None
    except RequestError:
        raise
    except ValueError as error:  # JSONDecodeError and UnicodeError are ValueErrors
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {_short(value)}")
    return value


def _no_number(literal: str) -> float:
    raise ValueError(f"{literal} is no JSON number")


def _finite(literal: str) -> float:
    if not math.isfinite(value := float(literal)):
        raise ValueError(f"the number {literal[:40]} is too large")
    return value


def _bounded(literal: str) -> int:
    if len(literal) > 20 or not -(2**63) <= (value := int(literal)) < 2**64:
        raise ValueError(f"the integer {literal[:40]} does not fit 64 bits")
    return value


def _check_values(value: Any, depth: int) -> None:
    """Raise for nesting beyond MAX_DEPTH and for strings that are not Unicode text (lone surrogates)."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, dict):
        for key, item in value.items():
            key.encode("utf-8")
            _check_values(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            if not isinstance(item, int):
                _check_values(item, depth + 1)


def _short(value: Any) -> str:
    """Return `value` as it is shown in an error message."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


# ---- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One HTTP request for text, checked: its prompts, parameters and rids have one entry per choice."""

    kind: Kind
    prompts: list[Prompt]
    params: list[SamplingParams]
    rids: list[str]
    limited: list[bool]  # per prompt: the client set max_new_tokens, so beyond the context it is an error
    batched: bool = False  # a list was sent, so a list goes back (native)
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    add_special_tokens: bool = True
    chat: dict[str, Any] = field(default_factory=dict)  # keyword arguments of Tokenizer.encode_chat


# Fields known from OpenAI, SGLang and vLLM that are not here: name -> values that ask for nothing (null, false and
# empty ones always do).
_NOT_YET: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        """logprobs echo suffix tools functions json_schema regex ebnf structural_tag stop_regex lora_path input_embeds
        prompt_embeds image_data audio_data video_data return_hidden_states custom_logit_processor custom_params
        session_params return_logprob prompt_logprobs chat_template documents audio web_search_options extra_key
        cache_salt guided_json guided_regex guided_choice guided_grammar structured_outputs use_beam_search bad_words
        allowed_token_ids truncate_prompt_tokens stream_interval""".split(),
        (),
    ),
    "n": (1,), "best_of": (1,), "top_logprobs": (0,), "tool_choice": ("none", "auto"), "priority": (0,),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "length_penalty": (1,),
}  # fmt: skip

# Fields that clients send and that change nothing here: only slow Python tokenizers put spaces between special tokens.
_INERT = ("spaces_between_special_tokens",)

# Fields that are the same in a /v1 body and in SamplingParams.
_SAMPLING = """temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty logit_bias stop
    stop_token_ids ignore_eos no_stop_trim skip_special_tokens""".split()
_RENAMED = {"min_tokens": "min_new_tokens", "seed": "sampling_seed", "sampling_seed": "sampling_seed",
            "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}  # fmt: skip
_KNOWN = {
    *_SAMPLING, *_RENAMED, *_INERT, "model", "messages", "prompt", "stream", "stream_options", "rid",
    "continue_final_message", "add_generation_prompt", "chat_template_kwargs", "reasoning_effort", "add_special_tokens",
}  # fmt: skip
_NATIVE_KNOWN = {"text", "input_ids", "sampling_params", "rid", "stream", "model"}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
# Names the template's own machinery uses: a client may not set them.
_TEMPLATE_NAMES = frozenset(
    """messages tools documents conversation chat_template template add_generation_prompt continue_final_message
    tokenize padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    raise_exception strftime_now bos_token eos_token unk_token pad_token loop range dict lipsum cycler joiner
    namespace self caller varargs kwargs""".split()
)


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Job:
    """Return the job of a /v1/chat/completions body; `defaults` are the sampling values of the model, if used."""
    _refuse_not_yet(body)
    _note_unknown(body, _KNOWN)
    continued = _bool(body, "continue_final_message", False)
    messages = _messages(body.get("messages"))
    if continued and messages[-1]["role"] != "assistant":
        raise RequestError("continue_final_message needs a last message of role assistant", "continue_final_message")
    chat = {
        "add_generation_prompt": _bool(body, "add_generation_prompt", True) and not continued,
        "continue_final_message": continued,
        "template_kwargs": _template_kwargs(body),
    }
    params = _openai_params(body, defaults, max_tokens=None)
    return Job(
        "chat", [messages], [params], _rids(body, 1, "chatcmpl-"), [_limited(body)], chat=chat, **_stream_options(body)
    )  # fmt: skip


def parse_completion(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Job:
    """Return the job of a /v1/completions body: a prompt of text or ids, or a list of such prompts."""
    _refuse_not_yet(body)
    _note_unknown(body, _KNOWN)
    prompt = body.get("prompt")
    if prompt is None:
        raise RequestError("prompt is required: text, a list of texts, token ids, or a list of lists of ids", "prompt")
    prompts, batched = _prompts("prompt", prompt)
    params = _openai_params(body, defaults, max_tokens=16)
    return Job(
        "completion", prompts, [params] * len(prompts), _rids(body, len(prompts), "cmpl-"),
        [_limited(body)] * len(prompts), batched,
        add_special_tokens=_bool(body, "add_special_tokens", True), **_stream_options(body),
    )  # fmt: skip


def parse_generate(body: Mapping[str, Any]) -> Job:
    """Return the job of a native /generate body: `text` or `input_ids`, one or a list, and `sampling_params`."""
    _refuse_not_yet(body)
    _note_unknown(body, _NATIVE_KNOWN)
    given = [name for name in ("text", "input_ids") if body.get(name) is not None]
    if len(given) != 1:
        raise RequestError(f"exactly one of text and input_ids must be given, got {given or 'neither'}",
                           given[-1] if given else "text")  # fmt: skip
    name = given[0]
    prompts, batched = _prompts(name, body[name])
    if isinstance(prompts[0], str) != (name == "text"):
        raise RequestError(f"{name} is for {'text' if name == 'text' else 'token ids'}, got {_short(body[name])}", name)
    wishes = body.get("sampling_params")
    wishes = wishes if isinstance(wishes, list) else [{} if wishes is None else wishes] * len(prompts)
    if len(wishes) != len(prompts):
        raise RequestError(f"sampling_params has {len(wishes)} entries for {len(prompts)} prompts", "sampling_params")
    params = [_native_params(wish) for wish in wishes]
    limited = [isinstance(wish, dict) and wish.get("max_new_tokens") is not None for wish in wishes]
    rids = _rids(body, len(prompts), "")
    return Job("generate", prompts, params, rids, limited, batched, stream=_bool(body, "stream", False))


def parse_tokenize(body: Mapping[str, Any]) -> tuple[list[str], bool, bool]:
    """Return (texts, whether a list was sent, add_special_tokens) of a /tokenize body."""
    prompt = body.get("prompt")
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(text, str) for text in texts) or len(texts) > MAX_BATCH:
        raise RequestError(f"prompt must be text or at most {MAX_BATCH} texts, got {_short(prompt)}", "prompt")
    return texts, isinstance(prompt, list), _bool(body, "add_special_tokens", True)


def parse_detokenize(body: Mapping[str, Any], vocab_size: int) -> tuple[list[list[int]], bool, bool]:
    """Return (id lists, whether a list of lists was sent, skip_special_tokens) of a /detokenize body."""
    tokens = body.get("tokens")
    batched = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
    rows = tokens if batched else [tokens]
    for row in rows:
        if not _is_ids(row) or not all(0 <= token < vocab_size for token in row):
            raise RequestError(f"tokens must be a list of ids in [0, {vocab_size - 1}], got {_short(row)}", "tokens")
    return rows, batched, _bool(body, "skip_special_tokens", True)


def check_model(name: Any, accepted: Iterable[str | None] | None) -> None:
    """Raise RequestError 404 unless `name` is missing, empty, "default" or one of the accepted names; None: any name.

    Raises 400 for what is no name at all.
    """
    if name is not None and not isinstance(name, str):
        raise RequestError(f"model must be a string, got {_short(name)}", "model")
    if name in (None, "", "default") or accepted is None:
        return
    names = [n for n in accepted if n]
    if name not in names:
        raise RequestError(f"the model {_short(name)} does not exist here; there is {names[0]!r}", "model", 404,
                           "model_not_found")  # fmt: skip


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling values a model's generation_config.json sets; RequestError if one is out of range."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if found.get("top_k") == 0:  # transformers' way to say: the whole vocabulary
        found["top_k"] = -1
    SamplingParams(**found)
    return found


def tokenize(job: Job, tokenizer: Tokenizer, context_length: int) -> list[Request]:
    """Return one request per prompt of the job; slow for long prompts, so not to be called on the event loop."""
    requests = []
    for prompt, params, rid, limited in zip(job.prompts, job.params, job.rids, job.limited, strict=True):
        is_ids = _is_ids(prompt)
        check_size(prompt, context_length)
        if job.kind == "chat":
            ids = tokenizer.encode_chat(prompt, **job.chat)
        else:
            ids = prompt if is_ids else tokenizer.encode(prompt, add_special_tokens=job.add_special_tokens)
        if not ids:
            raise RequestError("the prompt is empty", "messages" if job.kind == "chat" else "prompt")
        if not limited and params.max_new_tokens is not None:  # the dialect's default gives way to the context
            room = max(context_length - len(ids), 0)
            params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
        # The scheduler's rid is unique whatever the client sends, and no prefix of another: aborts go by prefix.
        requests.append(Request(f"{rid}/{uuid.uuid4().hex}", list(ids), params))
    return requests


def check_size(prompt: Prompt, context_length: int) -> None:
    """Raise RequestError 400 for a prompt that cannot fit the context, before any time is spent on it."""
    parts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m, dict)]
    size, limit = sum(len(part.encode("utf-8")) for part in parts), BYTES_PER_TOKEN * context_length
    if size > limit:
        raise RequestError(f"the prompt has {size} bytes; at most {limit} are looked at with a context of "
                           f"{context_length} tokens", code="context_length_exceeded")  # fmt: skip


def _refuse_not_yet(body: Mapping[str, Any], prefix: str = "") -> None:
    """Raise RequestError 400 naming the first field that asks for something not built yet."""
    for name, passes in _NOT_YET.items():
        value = body.get(name)
        if value is None or value is False or value in ("", [], {}) or value in passes:
            continue
        raise RequestError(f"{prefix}{name} is not supported yet, got {_short(value)}", name, code="unsupported_field")


def _note_unknown(body: Mapping[str, Any], known: Iterable[str]) -> None:
    unknown = sorted(set(body) - set(known) - set(_NOT_YET))
    if unknown:
        log.debug("ignored fields: %s", _short(unknown))


def _bool(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {_short(value)}", name)
    return default if value is None else value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _prompts(name: str, value: Any) -> tuple[list[Prompt], bool]:
    """Return (prompts, whether several were sent) from text, ids, or a list of either; each is checked non-empty."""
    batched = isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))
    prompts = value if batched else [value]
    if len(prompts) > MAX_BATCH:
        raise RequestError(f"{name} may hold at most {MAX_BATCH} prompts, got {len(prompts)}", name)
    for prompt in prompts:
        if prompt in ("", []):
            raise RequestError(f"{name} must not be empty", name)
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise RequestError(f"{name} must be text, token ids, or a list of either, got {_short(prompt)}", name)
        if isinstance(prompt, str) != isinstance(prompts[0], str):
            raise RequestError(f"{name} must not mix text and token ids", name)
    return prompts, batched


def _rids(body: Mapping[str, Any], count: int, prefix: str) -> list[str]:
    """Return one id per prompt: the client's, or new ones with a common stem so that one prefix aborts them all."""
    given = body.get("rid")
    if isinstance(given, list) and len(given) != count:
        raise RequestError(f"rid has {len(given)} entries for {count} prompts", "rid")
    rids = given if isinstance(given, list) else [prefix + uuid.uuid4().hex if given is None else given]
    if not all(isinstance(rid, str) and 0 < len(rid) <= 256 for rid in rids):
        raise RequestError(f"rid must be a string of 1 to 256 characters or a list of such, got {_short(given)}", "rid")
    return rids if len(rids) == count else [f"{rids[0]}-{i}" for i in range(count)]


def _stream_options(body: Mapping[str, Any]) -> dict[str, bool]:
    """Return the stream fields of a job from `stream` and `stream_options`."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError(f"stream_options must be an object, got {_short(options)}", "stream_options")
    return {
        "stream": _bool(body, "stream", False),
        "include_usage": _bool(options, "include_usage", False),
        "continuous_usage": _bool(options, "continuous_usage_stats", False),
    }


def _limited(body: Mapping[str, Any]) -> bool:
    return any(body.get(name) is not None for name in ("max_tokens", "max_completion_tokens"))


def _openai_params(body: Mapping[str, Any], defaults: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
    """Return the parameters of a /v1 body; max_completion_tokens beats max_tokens. Errors name its own fields."""
    wish = {**defaults, **{name: body[name] for name in _SAMPLING if body.get(name) is not None}}
    wish["max_new_tokens"] = max_tokens
    source = {}
    for name, inner in _RENAMED.items():  # in order: a later name wins
        if body.get(name) is not None:
            wish[inner], source[inner] = body[name], name
    try:
        return SamplingParams(**wish)
    except RequestError as error:
        message = error.message
        for inner, name in source.items():
            message = message.replace(inner, name)
        raise RequestError(message, source.get(error.param or "", error.param), error.status, error.code) from None


def _native_params(wish: Any) -> SamplingParams:
    """Return the parameters of one `sampling_params` object."""
    if isinstance(wish, dict):
        _refuse_not_yet(wish, "sampling_params.")
        wish = {name: value for name, value in wish.items() if name not in _NOT_YET and name not in _INERT}
        if wish.get("max_new_tokens", 0) is None:  # null means "the default", as in every other field of a body
            del wish["max_new_tokens"]
    return SamplingParams.from_dict(wish)


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Return chat messages with text content, ready for a template; RequestError 400 where they are not."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty list", "messages")
    checked = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}, got {_short(message)}", "messages")
        clean = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
        clean["content"] = _content(message, where)
        checked.append(clean)
    return checked


def _content(message: Mapping[str, Any], where: str) -> str:
    """Return a message's content as text: a string, or text parts joined by newlines."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return ""
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where}.content must be text or a list of text parts, got {_short(content)}", "messages")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(f"{where}.content may have parts of type text only, got {_short(kind)}", "messages")
    return "\n".join(part["text"] for part in content)


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables a client may set in the chat template: plain values under names of its own."""
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict) or len(kwargs) > 16:
        raise RequestError("chat_template_kwargs must be an object of at most 16 names", "chat_template_kwargs")
    if body.get("reasoning_effort") is not None:
        kwargs = {"reasoning_effort": body["reasoning_effort"], **kwargs}
    for name, value in kwargs.items():
        if not name.isidentifier() or name.startswith("_") or name in _TEMPLATE_NAMES:
            raise RequestError(f"chat_template_kwargs may not set {_short(name)}", "chat_template_kwargs")
        if not isinstance(value, (str, bool, int, float, type(None))) or (isinstance(value, str) and len(value) > 1000):
            raise RequestError(f"chat_template_kwargs.{name} must be a short string, a number, a bool or null",
                               "chat_template_kwargs")  # fmt: skip
    return kwargs


# ---- answers ---------------------------------------------------------------------------------------------------------

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object, the body of every failure."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message[:2000], "type": kind, "param": param, "code": code}}


def dump(value: Any) -> bytes:
    """Return `value` as compact UTF-8 JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def sse(event: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + dump(event) + b"\n\n"


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Return the entry of /v1/models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "minispec", "root": name, "parent": None,
            "max_model_len": max_model_len}  # fmt: skip


class Reply:
    """The answer to one job while it grows: `take` every update, send what it returns, or ask `result` at the end.

    Deltas are pieces of the same text that `result` holds, so concatenated they are equal to it.
    """

    def __init__(
        self, job: Job, requests: Sequence[Request], model: str, *, nodes: int = 1, stream_interval: int = 1,
        cache_report: bool = False,
    ) -> None:  # fmt: skip
        self.job, self.requests, self.model = job, list(requests), model
        self.nodes, self.interval, self.cache_report = nodes, stream_interval, cache_report
        count = len(self.requests)
        self.created = int(time.time())
        self.id = job.rids[0] if count == 1 else job.rids[0].removesuffix("-0")
        self.texts: list[str] = [""] * count
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.finishes: list[Finish | None] = [None] * count
        self.sent = [(0, 0)] * count  # characters and tokens already in events
        self._index = {id(request): i for i, request in enumerate(self.requests)}

    @property
    def done(self) -> bool:
        """True when every request has finished."""
        return all(finish is not None for finish in self.finishes)

    def take(self, update: Update) -> list[dict[str, Any]]:
        """Add one update and return the events to send now, if streaming; RequestError if the request has failed.

        An abort that was asked for ends a native prompt with the text so far, and its siblings go on, as in SGLang.
        OpenAI's schema has no finish_reason for it, so there it is a RequestError too.
        """
        i = self._index[id(update.request)]
        finish = update.finish
        if finish is not None and finish.kind == "abort":
            if finish.status != ABORT_WANTED or self.job.kind != "generate":
                raise RequestError(finish.message or "the request was aborted", None, finish.status, "aborted")
        self.texts[i] += update.text
        self.ids[i] += update.ids
        self.finishes[i] = finish
        if not self.job.stream or (finish is None and len(self.ids[i]) - self.sent[i][1] < self.interval):
            return []
        return self._events(i)

    def opening(self) -> list[dict[str, Any]]:
        """Return the events that open a stream: the assistant's role, in a chat."""
        if self.job.kind != "chat":
            return []
        return [self._chunk(0, {"delta": {"role": "assistant", "content": ""}}, None)]

    def closing(self) -> list[dict[str, Any]]:
        """Return the events that close a stream: the usage, if it was asked for."""
        if not self.job.include_usage or self.job.kind == "generate":
            return []
        return [{**self._head(stream=True), "choices": [], "usage": self.usage()}]

    def result(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the whole answer, once done."""
        count = range(len(self.requests))
        if self.job.kind == "generate":
            items = [self._native(i) for i in count]
            return items if self.job.batched else items[0]
        choices = []
        for i in count:
            message = {"role": "assistant", "content": self.texts[i], "tool_calls": None}
            body = {"message": message} if self.job.kind == "chat" else {"text": self.texts[i]}
            choices.append(self._choice(i, body, self.finishes[i]))
        return {**self._head(stream=False), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object over all choices so far."""
        prompt, output = sum(len(r.prompt_ids) for r in self.requests), sum(map(len, self.ids))
        cached = sum(r.cached_tokens for r in self.requests)
        details = {"cached_tokens": cached} if self.cache_report and cached else None
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
                "prompt_tokens_details": details}  # fmt: skip

    def _events(self, i: int) -> list[dict[str, Any]]:
        """Return the events that bring choice i up to date."""
        new_text, finish = self.texts[i][self.sent[i][0] :], self.finishes[i]
        self.sent[i] = (len(self.texts[i]), len(self.ids[i]))
        if self.job.kind == "generate":
            return [{**self._native(i), "index": i} if self.job.batched else self._native(i)]
        if self.job.kind == "completion":
            return [self._chunk(i, {"text": new_text}, finish)] if new_text or finish else []
        events = [self._chunk(i, {"delta": {"content": new_text}}, None)] if new_text else []
        return [*events, self._chunk(i, {"delta": {}}, finish)] if finish else events

    def _native(self, i: int) -> dict[str, Any]:
        ids = self.ids[i]
        info = meta_info(self.requests[i], len(ids), self.finishes[i], self.nodes)
        info["id"] = self.job.rids[i]
        return {"text": self.texts[i], "output_ids": list(ids), "meta_info": info}

    def _head(self, stream: bool) -> dict[str, Any]:
        kind = "text_completion" if self.job.kind == "completion" else "chat.completion" + ".chunk" * stream
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, i: int, body: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
        return {"index": i, **body, "logprobs": None, "finish_reason": finish and finish.kind,
                "matched_stop": finish and finish.matched}  # fmt: skip

    def _chunk(self, i: int, body: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
        chunk = {**self._head(stream=True), "choices": [self._choice(i, body, finish)]}
        if self.job.continuous_usage:
            chunk["usage"] = self.usage()
        elif self.job.include_usage:
            chunk["usage"] = None
        return chunk
