"""Text to ids and back: two kinds of tokenizer behind one interface, chat templates, and incremental decoding.

`Tokenizer` is that interface. Behind it is either a fast Hugging Face tokenizer, or `tiktoken` with a bare rank
table, as in Llama 3's `original/`. Chat templates are programs by the model's author: they are rendered here, in a
sandbox, in the same way for both kinds.

One token may be half of a character, and one step of the engine may emit several tokens, so the newest text is often
uncertain. `Detokenizer` therefore returns text only when no later token can change it. All pieces that it returned,
`flush` included, are exactly `decode` of all ids, at a cost per token that does not grow with the output.

Read next: `output.py`, which looks for stop strings in that text; `weights.py` for the rest of a model folder.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import tiktoken
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minispec.load.chat_templates import NAMED, is_template
from minispec.load.weights import read_json
from minispec.output import TokenizerBackend
from minispec.request import RequestError, SamplingParams

# How tiktoken formats split a text before merging, since the rank files do not say.
GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)  # Llama 3 as well

LLAMA3_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)
LLAMA3_EOS = ("<|end_of_text|>", "<|eot_id|>")  # these end a text and a turn, if no config says what does
TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RESERVED_NAMES = frozenset(
    "messages tokenize add_generation_prompt continue_final_message chat_template return_dict".split()
)
CONTINUE_TAG = "<continue-here-1f0c> "  # the space shows whether the template strips the content
HEX_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
REPLACEMENT = "\ufffd"
LONG = 4096  # ids, from which on decoding releases the interpreter's lock


class Tokenizer:
    """Text to ids and back, for one model. It has no state after construction, so any thread may use it."""

    def __init__(
        self,
        backend: TokenizerBackend,
        eos_ids: frozenset[int],
        template: str | Mapping[str, str] | None,
        named_tokens: Mapping[str, str],
    ) -> None:
        """`template` is one template, or several by name; `named_tokens` are those it may use, like `bos_token`."""
        self.backend, self.eos_ids = backend, eos_ids
        self.vocab_size = backend.vocab_size
        sources = {"default": template} if isinstance(template, str) else dict(template or {})
        self._templates = {name: _compile(source) for name, source in sources.items()}
        named = "tool_use" if "tool_use" in sources else "default"
        uses = "tools" in _variables_of(sources[named]) if named in sources else False
        self.tool_template = sources[named] if uses else None  # the source of the template that shows tools
        self._named_tokens = dict(named_tokens)
        self.info = {**self._named_tokens, "chat_template": sources.get("default")}  # for clients that tokenize too

    def token_id(self, token: str) -> int | None:
        """Return the id of exactly this token, or None."""
        return self.backend.token_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; special tokens written out in it become their ids, as in other engines.

        `add_special_tokens` adds what the model expects around a plain text, such as BOS in front of it. Raises
        RequestError for text that is not Unicode.
        """
        _check_unicode(text, "text")
        return self.backend.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; an id without a token has no text, and bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that an id stands for within a text, maybe half a character; none for an unknown id."""
        token = None if self.backend.byte_level else self.backend.token(token_id)
        if token is None:
            return self.backend.token_bytes(token_id)
        return bytes([int(token[3:5], 16)]) if HEX_BYTE.fullmatch(token) else token.replace("\u2581", " ").encode()

    def detokenizer(self, params: SamplingParams) -> Detokenizer:
        """Return what turns a growing list of ids into text."""
        return Detokenizer(self.backend, params)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the model's chat template makes of the messages.

        `continue_final_message` ends the prompt inside the last message, so that the model continues it. Raises
        RequestError if there is no template, if messages are not text, or if the template raises an error.
        """
        kwargs = dict(template_kwargs or {})
        if taken := sorted(RESERVED_NAMES & kwargs.keys()):
            raise RequestError(f"chat_template_kwargs may not set {taken[0]!r}", "chat_template_kwargs")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message continues the last message, so add_generation_prompt must be false",
                "continue_final_message",
            )
        template, plain = self._template(kwargs), _plain_messages(messages)
        if continue_final_message:
            plain[-1]["content"] += CONTINUE_TAG
        variables = {"tools": None, "documents": None, **self._named_tokens, **kwargs}
        try:
            prompt = template.render(variables | {"messages": plain, "add_generation_prompt": add_generation_prompt})
        except Exception as error:  # a template is a program by the model's author and may raise whatever it likes
            raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from error
        _check_unicode(prompt, "messages")
        return _cut_at_tag(prompt) if continue_final_message else prompt

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of the rendered chat; the template writes BOS where the model wants one, so none is added."""
        prompt = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        return self.backend.encode(prompt, False)

    def _template(self, kwargs: Mapping[str, Any]) -> jinja2.Template:
        """Return the template for this request; a model with several calls the one for tools `tool_use`."""
        if kwargs.get("tools") and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise RequestError(
                "this model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
                "messages",
            )
        return self._templates["default"]


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Tokenizer:
    """Return the tokenizer in a model folder; raises ValueError if there is none that can be read.

    `chat_template` replaces the model's own: a name of `chat_templates.NAMED`, whose end of turn then ends an answer,
    the path of a Jinja file, or the template itself. No code from the folder is executed, whatever its files ask for.
    """
    config = _read_config(folder)
    template = _own_template(folder, config) if chat_template is None else _given_template(chat_template)
    tokenizer = _load(folder, config, template)
    if chat_template in NAMED and (end := tokenizer.token_id(NAMED[chat_template].end)) is not None:
        tokenizer.eos_ids |= {end}
    return tokenizer


def _load(folder: Path, config: Mapping[str, Any], template: str | Mapping[str, str] | None) -> Tokenizer:
    """Return the folder's tokenizer, by the files it has."""
    if not (folder / "tokenizer.json").is_file() and (ranks := _rank_file(folder)) is not None:
        return _load_tiktoken(ranks, config, template)
    return _load_huggingface(folder, template)


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of single bytes, for dummy weights; the other ids below `vocab_size` are <256>, <257> ..."""
    letters = sorted(BYTE_OF_CHARACTER, key=BYTE_OF_CHARACTER.__getitem__)[:vocab_size]
    names = [*letters, *(f"<{i}>" for i in range(len(letters), vocab_size))]
    model = tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(_HuggingFace(tokenizer), frozenset(), None, {})


# ---------------------------------------------------------------------------------------------------------------------
# Fast Hugging Face tokenizers


class _HuggingFace:
    """The Rust tokenizer itself; its Python wrapper sets truncation and padding per call, which is not thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()  # tokenizer.json may still have both from training
        self._tokenizer.no_padding()
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        self.byte_level = decoder.get("type") == "ByteLevel"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch of one: only for batches is the interpreter's lock released, else a long text stops all threads.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(ids) > LONG:
            return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def serialized(self) -> str:
        return self._tokenizer.to_str()

    def token_bytes(self, token_id: int) -> bytes:
        token = self.token(token_id) or ""
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token, which is plain text and not spelt in the byte alphabet
            return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's spelling of bytes as visible characters: printable ones are themselves, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def _load_huggingface(folder: Path, template: str | Mapping[str, str] | None) -> Tokenizer:
    """Load with transformers, which knows the models' classes; last with its plain class, for any tokenizer.json."""
    has_json = (folder / "tokenizer.json").is_file()
    loaders = [AutoTokenizer] if (folder / "tokenizer_config.json").is_file() or not has_json else []
    loaders += [PreTrainedTokenizerFast] if has_json else []
    failure: Exception | None = None
    for loader in loaders:
        try:
            loaded = loader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # for a class that it does not know transformers raises nearly any type
            failure = failure or error
            continue
        if (rust := getattr(loaded, "backend_tokenizer", None)) is not None:
            eos = loaded.eos_token_id
            named = {role: str(token) for role in TOKEN_ROLES if (token := getattr(loaded, role, None)) is not None}
            return Tokenizer(_HuggingFace(rust), frozenset(() if eos is None else (eos,)), template, named)
    raise ValueError(
        f"{folder} has no tokenizer that can be read without running code from it (tokenizer.json or a tiktoken file); "
        f"name another folder with --tokenizer-path ({failure or 'only a slow Python tokenizer'})"
    ) from failure


# ---------------------------------------------------------------------------------------------------------------------
# tiktoken


class _Tiktoken:
    """A rank table with special tokens."""

    byte_level = True

    def __init__(
        self, name: str, split: str, ranks: dict[bytes, int], special: dict[str, int], bos_id: int | None
    ) -> None:
        self._encoding = tiktoken.Encoding(name, pat_str=split, mergeable_ranks=ranks, special_tokens=special)
        self._bytes = {i: token for token, i in ranks.items()} | {i: token.encode() for token, i in special.items()}
        self._special, self._ranks, self._bos_id = special, ranks, bos_id
        self.vocab_size = max(self._bytes) + 1
        self.special_ids = frozenset(special.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self._encoding.encode(text, allowed_special="all")
        return ids if self._bos_id is None or not add_special_tokens else [self._bos_id, *ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        return self._special.get(token, self._ranks.get(token.encode()))

    def token(self, token_id: int) -> str | None:
        return self.token_bytes(token_id).decode("utf-8", "replace") if token_id in self._bytes else None

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def serialized(self) -> None:
        return None


def _rank_file(folder: Path) -> Path | None:
    """Return the tiktoken file of a model folder, if it has one."""
    candidates = (folder / "original/tokenizer.model", folder / "tokenizer.model")
    return next((path for path in candidates if path.is_file() and _is_rank_file(path)), None)


def _is_rank_file(path: Path) -> bool:
    """Tell a tiktoken file from sentencepiece's binary one of the same name: lines of base64, a space, a number."""
    with open(path, "rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", file.readline(4096)) is not None


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the table of a tiktoken file, token bytes to rank; raises ValueError naming the line at fault."""
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path} line {number} must be base64 and a rank, got {line[:80]!r}") from None
    return ranks


def _load_tiktoken(path: Path, config: Mapping[str, Any], template: str | Mapping[str, str] | None) -> Tokenizer:
    """Load a rank file; its special tokens are those that tokenizer_config.json lists, else Llama 3's."""
    ranks = _read_ranks(path)
    listed = config.get("added_tokens_decoder") or {}
    special = {token: int(i) for i, given in listed.items() if (token := _token_text(given)) is not None}
    if not special:  # Llama 3's come after the ranks, as 128000 to 128255
        special = {token: max(ranks.values()) + 1 + i for i, token in enumerate(LLAMA3_SPECIAL)}
    named = {role: token for role in TOKEN_ROLES if (token := _token_text(config.get(role))) is not None}
    eos = {special[token] for token in LLAMA3_EOS if token in special}
    if named.get("eos_token") in special:
        eos = {special[named["eos_token"]]}
    named.setdefault("bos_token", "<|begin_of_text|>")  # Llama 3's templates use it
    if named["bos_token"] not in special:
        del named["bos_token"]
    bos_id = special.get(named.get("bos_token", ""))
    backend = _Tiktoken(str(path), config.get("pat_str") or GPT4_SPLIT, ranks, special, bos_id)
    return Tokenizer(backend, frozenset(eos), template, named)


# ---------------------------------------------------------------------------------------------------------------------
# Chat templates


class _Generation(Extension):
    """The block tag {% generation %}, which marks answers for training; here its content is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a sandbox with the functions that authors of chat templates rely on."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes HTML characters

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template has an error in line {error.lineno}: {error.message}") from error


def _variables_of(source: str) -> set[str]:
    """Return the names that a template looks up among what it is given."""
    return jinja2.meta.find_undeclared_variables(_environment().parse(source))


def _given_template(given: str) -> str:
    """Return the operator's template: one of those with a name, the text itself if it is one, or a file's content."""
    if given in NAMED:
        return NAMED[given].source
    if is_template(given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template must be a file with a Jinja template, got {given!r} ({error})") from None


def _own_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the model's template, or its templates by name; chat_template.jinja is the newer convention and wins."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return given


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the messages with plain text as content; raises RequestError naming the field at fault."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a non-empty list", "messages")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] must be an object with a role", "messages")
        plain.append({**message, "content": _plain_content(message, f"messages[{i}].content")})
    return plain


def _plain_content(message: Mapping[str, Any], field: str) -> str:
    """Return a message's content as one text, its parts joined by newlines; parts other than text are refused."""
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return ""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise RequestError(f"{field} must be text or a list of text parts, got {content!r}", field)
    texts = []
    for j, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{field}[{j}] must be of type text, got {kind!r}: this model reads text only", field)
        _check_unicode(text, field)
        texts.append(text)
    return "\n".join(texts)


def _cut_at_tag(prompt: str) -> str:
    """Return the prompt, as the template has written it, up to the end of the last message."""
    at = prompt.rfind(CONTINUE_TAG.strip())
    if at < 0:
        raise RequestError("the chat template leaves out the message to continue", "continue_final_message")
    # If the space after the tag is gone, the template strips contents, and without the tag would strip spaces there.
    return prompt[:at] if prompt.startswith(CONTINUE_TAG, at) else prompt[:at].rstrip()


# ---------------------------------------------------------------------------------------------------------------------
# Incremental decoding


class Detokenizer:
    """Text of one growing list of ids, returned as it becomes certain.

    Byte-level tokenizers (both GPT-2's kind and tiktoken) spell text as bytes, so an incremental UTF-8 decoder is
    enough for them. With others the text of a token depends on its neighbours: the first one loses its leading space,
    and a run of byte tokens like <0xE4> is text only if all of it is UTF-8. For these a short window is decoded that
    begins one piece earlier, and the text of that piece is subtracted. Within a run of bytes nothing is returned.
    """

    def __init__(self, backend: TokenizerBackend, params: SamplingParams) -> None:
        self._backend = backend
        self._skipped = backend.special_ids if params.skip_special_tokens else frozenset()
        self._pieces: list[str] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []  # ids of the piece returned last, then those whose text is not yet returned
        self._read = 0  # length of that piece, in tokens

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def append(self, token_id: int) -> str:
        """Add one id and return the text that it made certain, often "" and never with half a character."""
        if token_id in self._skipped:
            return ""
        if self._backend.byte_level:
            return self._hand_out(self._utf8.decode(self._backend.token_bytes(token_id)))
        token = self._backend.token(token_id)
        if token is None:  # `decode` skips ids beyond the vocabulary as well
            return ""
        self._window.append(token_id)
        return "" if HEX_BYTE.fullmatch(token) else self._slide(hold=True)

    def flush(self) -> str:
        """Return what is left at the end; half a character becomes U+FFFD, as in `decode`."""
        if self._backend.byte_level:
            return self._hand_out(self._utf8.decode(b"", final=True))
        return self._slide(hold=False)

    def _slide(self, hold: bool) -> str:
        """Return the window's new text and move the window on; with `hold`, not while it ends in half a character."""
        known = self._backend.decode(self._window[: self._read], False)
        text = self._backend.decode(self._window, False)
        pending = len(self._window) - self._read
        if hold and text.endswith(REPLACEMENT) and pending < 4:  # 4 ids are no half, as a character has 4 bytes at most
            return ""
        new = text[len(known) :]
        if new:
            self._window, self._read = self._window[self._read :], pending
        return self._hand_out(new)

    def _hand_out(self, text: str) -> str:
        """Note a piece of text as returned, and return it."""
        if text:
            self._pieces.append(text)
        return text


# ---------------------------------------------------------------------------------------------------------------------
# Small helpers


def _check_unicode(text: str, field: str) -> None:
    """Raise RequestError if the text has half of a surrogate pair, which JSON can express and no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{field} is not Unicode text: lone surrogate at character {error.start}", field) from None


def _token_text(given: Any) -> str | None:
    """Return a token of tokenizer_config.json, which may be a text or an object with `content`."""
    return given.get("content") if isinstance(given, Mapping) else given


def _read_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, empty if there is none."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}
