"""The tokenizer in a GGUF file, as a tokenizer.json: GPT-2's kind of byte-level BPE, and SentencePiece's BPE.

A GGUF file has vocabulary, merges or scores, and kinds of tokens. How a text is cut before merging is in it only as a
name, `tokenizer.ggml.pre`, which llama.cpp's source explains. With a wrong cut a model still talks, only worse, so an
unknown name is refused. Where Hugging Face's tokenizer of a model and llama.cpp's differ, this is Hugging Face's, which
the model was trained with, if the file tells.

Read next: `tokenizer.py`, which reads the result.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minispec.load.gguf_files import GGUFError, Metadata
from minispec.load.tokenizer import GPT4_SPLIT, PLAIN_CLASS

logger = logging.getLogger("minispec")

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of tokens; all but the first are found in a text whole
SPACE = "\u2581"  # how SentencePiece spells one
# Control tokens that end a text or a turn. A file names one or two, and which of a model's it names is chance.
END_TEXTS = frozenset(
    ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "</s>",
     "<\uff5cend\u2581of\u2581sentence\uff5c>")
)  # fmt: skip

QWEN2_SPLIT = GPT4_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEFAULT_SPLITS = (  # each cuts the pieces of the one before
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


class Rules(NamedTuple):
    """What a name in `tokenizer.ggml.pre` stands for."""

    cut: pre_tokenizers.PreTokenizer
    whole: bool = False  # a piece that is a token is not merged anew
    adds_bos: bool = False  # unless the file says otherwise
    normalizer: normalizers.Normalizer | None = None


def _cut(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Return what cuts a text by patterns, one after the other, and spells the pieces in GPT-2's bytes."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_LLAMA3 = Rules(_cut(GPT4_SPLIT), whole=True, adds_bos=True)
RULES = {
    "gpt-2": Rules(_GPT2),
    "smollm": Rules(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])),
    "default": Rules(_cut(*DEFAULT_SPLITS)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Rules(_cut(QWEN2_SPLIT), normalizer=normalizers.NFC()),
    "deepseek-r1-qwen": Rules(_cut(QWEN2_SPLIT)),
    "tekken": Rules(_cut(TEKKEN_SPLIT), whole=True, adds_bos=True),
}


def gguf_tokenizer(fields: Metadata) -> Tokenizer:
    """Return the tokenizer that the metadata describe; raises GGUFError for one that is not known."""
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = fields[f"{PREFIX}model"]
    if kind not in makers:
        raise GGUFError(f"{PREFIX}model {kind!r} is not supported; supported: {', '.join(makers)}")
    try:
        tokenizer, adds_bos = makers[kind](fields)
        kinds = list(zip(fields[f"{PREFIX}tokens"], _kinds(fields), strict=True))
        # These are found in a text as they stand, and the special ones are left out of answers.
        special = [AddedToken(token, normalized=False) for token, kind in kinds if kind in (UNKNOWN, CONTROL)]
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED])
        _add_ends(tokenizer, fields, adds_bos)
    except GGUFError:
        raise
    except Exception as error:  # the tokenizers package raises plain ones, for a merge of unknown tokens for instance
        raise GGUFError(f"its tokenizer cannot be built ({error})") from error
    return tokenizer


def tokenizer_config(fields: Metadata, context_length: int) -> dict[str, Any]:
    """Return tokenizer_config.json, with the generic class, because a named one would build its own pre-tokenizer."""
    ids = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": PLAIN_CLASS,
        **{f"{role}_token": token for role, name in ids.items() if (token := _named(fields, name)) is not None},
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }


def end_ids(fields: Metadata) -> list[int]:
    """Return the ids that end an answer: those that the file names, and control tokens whose text says so."""
    named = (fields.get(f"{PREFIX}{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = enumerate(zip(fields[f"{PREFIX}tokens"], _kinds(fields), strict=True))
    found = (token for token, (text, kind) in tokens if kind == CONTROL and text in END_TEXTS)
    return list(dict.fromkeys(token for token in (*named, *found) if token is not None))


def _byte_level(fields: Metadata) -> tuple[Tokenizer, bool]:
    """Return byte-level BPE, and whether BOS comes before a text by default."""
    name = fields[f"{PREFIX}pre"]
    if (rules := RULES.get(name)) is None:
        raise GGUFError(f"{PREFIX}pre {name!r} is not known; known: {', '.join(RULES)}")
    merges = [tuple(merge.split(" ")) for merge in fields[f"{PREFIX}merges"]]
    vocab = {token: i for i, token in enumerate(fields[f"{PREFIX}tokens"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.whole))
    tokenizer.pre_tokenizer = rules.cut
    tokenizer.decoder = decoders.ByteLevel()
    if rules.normalizer is not None:
        tokenizer.normalizer = rules.normalizer
    return tokenizer, rules.adds_bos


def _sentencepiece(fields: Metadata) -> tuple[Tokenizer, bool]:
    """Return SentencePiece's BPE, and that BOS comes before a text by default.

    SentencePiece joins the two neighbours whose joined token has the best score. So each way to cut a token in two is a
    merge, and scores rank them. As in llama.cpp a space is put before a text, and before what follows a special token.
    """
    tokens, scores = fields[f"{PREFIX}tokens"], fields[f"{PREFIX}scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = sorted(zip(scores, tokens, _kinds(fields), strict=True), key=lambda entry: -entry[0])
    merges = [(token[:i], token[i:]) for _, token, kind in ranked if kind == NORMAL
              for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]  # fmt: skip
    unknown = _named(fields, "unknown")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = fields.get(f"{PREFIX}add_space_prefix", True)
    before = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    spaces, after = decoders.Replace(SPACE, " "), [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *after])
    return tokenizer, True


def _add_ends(tokenizer: Tokenizer, fields: Metadata, adds_bos: bool) -> None:
    """Let BOS stand before a text and EOS behind it, where the file wants them."""
    begin = _named(fields, "bos") if fields.get(f"{PREFIX}add_bos_token", adds_bos) else None
    end = _named(fields, "eos") if fields.get(f"{PREFIX}add_eos_token", False) else None
    if around := [token for token in (begin, end) if token]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[token for token in (begin, "$A", end) if token],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)],
        )


def _kinds(fields: Metadata) -> list[int]:
    """Return the kind of each token; a file that does not tell has none that is special."""
    return fields.get(f"{PREFIX}token_type") or [NORMAL] * len(fields[f"{PREFIX}tokens"])


def _named(fields: Metadata, name: str) -> str | None:
    """Return the token that a file names as bos, eos, padding or unknown; None where it names none that it has."""
    tokens, key = fields[f"{PREFIX}tokens"], f"{PREFIX}{name}_token_id"
    if key not in fields:
        return None
    if not 0 <= fields[key] < len(tokens):  # writers put 2^32 - 1 there for none
        logger.warning("%s %d is beyond the file's %d tokens and left out", key, fields[key], len(tokens))
        return None
    return tokens[fields[key]]
