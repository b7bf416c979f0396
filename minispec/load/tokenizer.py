"""Text to ids and back: two kinds of tokenizer behind one interface, and incremental decoding.

`Tokenizer` is that interface. Behind it is either a fast Hugging Face tokenizer, or `tiktoken` with a bare rank
table, as in Llama 3's `original/`.

One token may be half of a character, and one step of the engine may emit several tokens, so the newest text is often
uncertain. `Detokenizer` therefore returns text only when no later token can change it. All pieces that it returned,
`flush` included, are exactly `decode` of all ids, at a cost per token that does not grow with the output.

Read next: `output.py`, which looks for stop strings in that text; `chat.py` for prompts of conversations; `weights.py`
for the rest of a model folder.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import importlib.util
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
import transformers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from minispec.load.chat import ChatTemplates, Template, check_templates, check_unicode, given_template, own_template
from minispec.load.chat_templates import NAMED
from minispec.load.keys import LARGEST, Keys
from minispec.load.weights import read_json, unreadable
from minispec.model import some
from minispec.model_config import ModelError
from minispec.output import TokenizerBackend
from minispec.request import RequestError, SamplingParams

logger = logging.getLogger("minispec")

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
PLAIN_CLASS = "PreTrainedTokenizerFast"  # what tokenizer_config.json of a converted GGUF file names
TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HEX_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
REPLACEMENT = "\ufffd"
# GPT-2's spelling of bytes as visible characters: printable ones are themselves, others follow U+0100.
BYTE_OF_CHARACTER: dict[str, int] = {character: byte for byte, character in bytes_to_unicode().items()}
LONG = 4096  # ids, from which on decoding releases the interpreter's lock


class Tokenizer:
    """Text to ids and back, for one model. It has no state after construction, so any thread may use it."""

    def __init__(
        self,
        backend: TokenizerBackend,
        eos_ids: frozenset[int],
        template: Template,
        named_tokens: Mapping[str, str],
    ) -> None:
        """`template` and `named_tokens` are those of `ChatTemplates`."""
        self.backend, self.eos_ids, self.vocab_size = backend, eos_ids, backend.vocab_size
        self.chat = ChatTemplates(template, named_tokens)
        self.model_size = LARGEST  # the model's ids are below this number; `choose_tokenizer` sets it

    def token_id(self, token: str) -> int | None:
        """Return the id of exactly this token, or None."""
        return self.backend.token_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; special tokens written out in it become their ids, as in other engines.

        `add_special_tokens` adds what the model expects around a plain text, such as BOS in front of it. Raises
        RequestError for text that is not Unicode, or has a token that the model lacks.
        """
        check_unicode(text, "text")
        ids = self.backend.encode(text, add_special_tokens)
        if (highest := max(ids, default=0)) >= self.model_size:
            raise RequestError(f"the text has the token {self.backend.token(highest)!r}, id {highest}, which the model "
                               f"lacks: its ids are 0 to {self.model_size - 1}", "prompt")  # fmt: skip
        return ids

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

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> list[int]:
        """Return the ids of the chat that `ChatTemplates.render` makes; the template itself writes BOS where needed."""
        return self.encode(self.chat.render(messages, **how), False)


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Tokenizer:
    """Return the tokenizer in a model folder; raises ValueError if there is none that can be read.

    `chat_template` replaces the model's own: a name of `chat_templates.NAMED`, whose end of turn then ends an answer,
    the path of a Jinja file, or the template itself. No code from the folder is executed, whatever its files ask for.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    Keys(config, path.name).read("added_tokens_decoder", "an object", lambda value: isinstance(value, dict), {})
    if chat_template is None:
        template, where = own_template(folder, config), f"{folder}: "
    else:
        template, where = given_template(chat_template), "--chat-template: "
    check_templates(template, where)
    ranks = None if (folder / "tokenizer.json").is_file() else _rank_file(folder)
    tokenizer = _load_huggingface(folder, template) if ranks is None else _load_tiktoken(ranks, config, template)
    if chat_template in NAMED and (end := tokenizer.token_id(NAMED[chat_template].end)) is not None:
        tokenizer.eos_ids |= {end}
    return tokenizer


def eos_token_ids(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """Return every id that ends an answer: of generation_config.json, of `config`, of the tokenizer, and `<|eom_id|>`.

    Each source alone is incomplete in some published model, so all are joined: Llama 3's end of a chat turn, for one,
    is not its tokenizer's eos. Ids that the model lacks are left out with a warning, since they index tables of the
    vocabulary's size. Raises ModelError if a source has no ids there.
    """
    path = folder / "generation_config.json"
    ids = set(tokenizer.eos_ids)
    fits = lambda given: all(type(one) is int for one in (given if isinstance(given, list) else [given]))  # noqa: E731
    for source in (Keys(read_json(path) if path.is_file() else {}, path.name), Keys(config)):
        given = source.read("eos_token_id", "an id or a list of ids", fits, None)
        ids.update(given if isinstance(given, list) else [] if given is None else [given])
    if (eom := tokenizer.token_id("<|eom_id|>")) is not None:
        ids.add(eom)
    size = config.get("vocab_size") or LARGEST
    if beyond := sorted(token for token in ids if not 0 <= token < size):
        logger.warning("the model has the ids 0 to %d; these, which are to end an answer, are left out: %s", size - 1,
                       some([str(token) for token in beyond]))  # fmt: skip
    return frozenset(ids.difference(beyond))


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of single bytes, for dummy weights; the other ids below `vocab_size` are <256>, <257> ..."""
    letters = sorted(BYTE_OF_CHARACTER, key=BYTE_OF_CHARACTER.__getitem__)[:vocab_size]
    names = [*letters, *(f"<{i}>" for i in range(len(letters), vocab_size))]
    model = tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(_HuggingFace(tokenizer), frozenset(), None, {})


# ---- fast Hugging Face tokenizers ------------------------------------------------------------------------------------


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
        self.byte_fallback = '"ByteFallback"' in json.dumps(decoder)

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


def _load_huggingface(folder: Path, template: Template) -> Tokenizer:
    """Load tokenizer.json as it was trained, whatever class tokenizer_config.json names; without it by that class.

    transformers' classes make a tokenizer of their own from the vocabulary, with another split of the text in some
    releases, even for names that say nothing of it (LlamaTokenizerFast, TokenizersBackend). Its plain class does not.
    """
    has_json = (file := folder / "tokenizer.json").is_file()
    try:
        # By its full name, since importing it takes a while.
        loader = PreTrainedTokenizerFast if has_json else transformers.AutoTokenizer
        loaded = loader.from_pretrained(folder, trust_remote_code=False, local_files_only=True, padding_side="left")
        rust = getattr(loaded, "backend_tokenizer", None)
        failure: object = "only a slow Python tokenizer"
    except Exception as error:  # for a class that it does not know transformers raises nearly any type
        rust, failure = None, error
    if rust is not None:
        eos = loaded.eos_token_id
        named = {role: str(token) for role in TOKEN_ROLES if (token := getattr(loaded, role, None)) is not None}
        return Tokenizer(_HuggingFace(rust), frozenset(() if eos is None else (eos,)), template, named)
    if has_json:
        raise unreadable(file, f"cannot be read, with the tokenizer_config.json beside it: {failure}")
    if (file := folder / "tokenizer.model").is_file():
        lacking = importlib.util.find_spec("sentencepiece") is None
        raise unreadable(file, "alone needs the package sentencepiece, which is not installed here: "
                         "pip install sentencepiece protobuf; or a tokenizer.json beside it" if lacking else
                         f"cannot be read: {failure}")  # fmt: skip
    raise ModelError(f"{folder} has no tokenizer that can be read without running code from it (tokenizer.json or a "
                     f"tiktoken file); name another folder with --tokenizer-path ({failure})")  # fmt: skip


# ---- tiktoken --------------------------------------------------------------------------------------------------------


class _Tiktoken:
    """A rank table with special tokens."""

    byte_level, byte_fallback = True, False

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


def _load_tiktoken(path: Path, config: Mapping[str, Any], template: Template) -> Tokenizer:
    """Load a rank file; its special tokens are those that tokenizer_config.json lists, else Llama 3's."""
    ranks = _read_ranks(path)
    listed = config.get("added_tokens_decoder") or {}
    special = {token: int(i) for i, given in listed.items() if (token := _token_text(given)) is not None}
    if not special:  # Llama 3's come after the ranks, as 128000 to 128255
        special = {token: max(ranks.values()) + 1 + i for i, token in enumerate(LLAMA3_SPECIAL)}
    named = {role: token for role in TOKEN_ROLES if (token := _token_text(config.get(role))) is not None}
    ends = [named["eos_token"]] if named.get("eos_token") in special else LLAMA3_EOS
    eos = {special[token] for token in ends if token in special}
    named.setdefault("bos_token", "<|begin_of_text|>")  # Llama 3's templates use it
    if named["bos_token"] not in special:
        del named["bos_token"]
    bos_id = special.get(named.get("bos_token", ""))
    backend = _Tiktoken(str(path), config.get("pat_str") or GPT4_SPLIT, ranks, special, bos_id)
    return Tokenizer(backend, frozenset(eos), template, named)


def _token_text(given: Any) -> str | None:
    """Return a token of tokenizer_config.json, which may be a text or an object with `content`."""
    return given.get("content") if isinstance(given, Mapping) else given


# ---- incremental decoding --------------------------------------------------------------------------------------------


class ByteRun:
    """A run of byte tokens that goes on: the text that `decode` gives for it now."""

    def __init__(self, values: Sequence[int] = ()) -> None:
        self.text, self.size, self.half = "", 0, False  # half: it ends in half a character, and its text will change
        self._utf8, self._broken = codecs.getincrementaldecoder("utf-8")(), False
        for value in values:
            self.add(value)

    def add(self, value: int) -> None:
        """Add a byte. Once the run cannot be UTF-8 any more, each of its bytes is U+FFFD."""
        self.size += 1
        try:
            self.text += "" if self._broken else self._utf8.decode(bytes([value]))
        except UnicodeDecodeError:
            self._broken = True
        self.half = not self._broken and self._utf8.getstate()[0] != b""
        if self._broken:
            self.text = REPLACEMENT * self.size


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
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._half = False  # whether half a character precedes the text, which is no part of it
        self._window: list[int] = []  # ids of the piece returned last, then those whose text is not yet returned
        self._read = 0  # length of that piece, in tokens
        self._run: ByteRun | None = None  # at the end of the window
        self._around: tuple[str, str] | None = None  # text of the piece returned last, and of all that precedes the run

    def follow(self, before: Sequence[int]) -> None:
        """Begin behind ids whose text is there already, such as a prompt's, so that the first word keeps its space.

        Half a character at their end may be completed, and is no part of the text if it is not. To be called first.
        """
        if self._backend.byte_level:
            for token_id in before[-8:]:
                self.append(token_id)
            self._half = self._utf8.getstate()[0] != b""
            return
        # The window begins with the last token that is no byte. A run of bytes behind it counts from its last character
        # on: what was whole before stays whole, whatever follows.
        values: list[int] = []  # the bytes of a run, backwards
        run: list[int] = []
        for token_id in reversed(before):
            if token_id in self._skipped or (token := self._backend.token(token_id)) is None:
                continue
            if (value := self._byte(token)) is None:
                self._window = [token_id]
                break
            if not values or 0x80 <= values[-1] < 0xC0:  # to the first byte of the last character
                values.append(value)
                run.append(token_id)
        last = ByteRun(values[::-1])
        if last.half or run and not self._window:
            self._window, self._run = self._window + run[::-1], last
        self._read = len(self._window)

    def append(self, token_id: int) -> str:
        """Add one id and return the text that it made certain, often "" and never with half a character."""
        if token_id in self._skipped:
            return ""
        if self._backend.byte_level:
            return self._joined(self._utf8.decode(self._backend.token_bytes(token_id)))
        token = self._backend.token(token_id)
        if token is None:  # `decode` skips ids beyond the vocabulary as well
            return ""
        self._window.append(token_id)
        if (value := self._byte(token)) is None:
            self._run = self._around = None
            return self._slide(hold=True)
        self._run = self._run or ByteRun()
        self._run.add(value)
        return ""

    def held(self) -> str:
        """Return what follows the returned text as `decode` gives it now; "" while that ends in half a character."""
        if self._run is None or self._run.half:
            return ""
        if self._around is None:
            pieces = self._window[: self._read], self._window[: -self._run.size]
            self._around = self._backend.decode(pieces[0], False), self._backend.decode(pieces[1], False)
        (known, ahead), text = self._around, self._run.text
        first = self._window[:1] if len(self._window) == self._run.size and text.startswith(" ") else []
        if first and not self._backend.decode(first, False):  # the space with which a text begins is none
            text = text[1:]
        return _beyond(known, ahead + text)

    def left_out(self, token_id: int) -> str:
        """Return the text of a special token that is left out, "" for any other token."""
        return (self._backend.token(token_id) or "") if token_id in self._skipped else ""

    def flush(self) -> str:
        """Return what is left at the end; half a character becomes U+FFFD, as in `decode`."""
        if self._backend.byte_level:
            return self._joined(self._utf8.decode(b"", final=True))
        self._run = self._around = None
        return self._slide(hold=False)

    def _byte(self, token: str) -> int | None:
        """Return the byte that a token stands for, where the tokenizer has such tokens."""
        return int(token[3:5], 16) if self._backend.byte_fallback and HEX_BYTE.fullmatch(token) else None

    def _joined(self, text: str) -> str:
        """Return text without the U+FFFD that half a character before it becomes where nothing completes that."""
        if text and self._half:
            self._half, text = False, text.removeprefix(REPLACEMENT)
        return text

    def _slide(self, hold: bool) -> str:
        """Return the window's new text and move the window on; with `hold`, not while it ends in half a character."""
        known = self._backend.decode(self._window[: self._read], False)
        text = self._backend.decode(self._window, False)
        pending = len(self._window) - self._read
        if hold and text.endswith(REPLACEMENT) and pending < 4:  # 4 ids are no half, as a character has 4 bytes at most
            return ""
        if new := _beyond(known, text):
            self._window, self._read = self._window[self._read :], pending
        return new


def _beyond(known: str, text: str) -> str:
    """Return what a text adds to a known one, whose half character at the end it may have completed."""
    if text.startswith(known):
        return text[len(known) :]
    return text[len(os.path.commonprefix((known, text))) :]
