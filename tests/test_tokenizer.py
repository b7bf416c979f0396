"""Tokenizers of both kinds against their libraries, templates against transformers, streamed text against decode."""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minispec.load.chat_templates import NAMED
from minispec.load.tokenizer import (
    GPT4_SPLIT,
    LLAMA3_SPECIAL,
    Tokenizer,
    _HuggingFace,
    load_tokenizer,
)
from minispec.request import RequestError, SamplingParams

TEXTS = [
    "Hello, world! It's 2024.",
    "😀👨‍👩‍👧‍👦🏳️‍🌈 emoji",
    "日本語のテキスト、中文，한국어 Ελληνικά",
    "def f(x):\n\treturn x ** 2  # 12345\n\n\n",
    "  spaces   and\r\n\r\nlines \u00a0\ufeff ",
    "",
]
USER = {"role": "user", "content": "What is 2+2?"}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> Tokenizer:
    return load_tokenizer(demo_folder)


@pytest.fixture(scope="module")
def hf(demo_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_folder)


def _refusal(call: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.status == 400
    return caught.value


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face tokenizers


def test_ids_text_and_special_ids_are_those_of_transformers(demo: Tokenizer, hf: PreTrainedTokenizerBase) -> None:
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>"]:
        ids = demo.encode(text)
        assert ids == hf.encode(text)
        for skip in (True, False):
            assert demo.decode(ids, skip) == hf.decode(ids, skip_special_tokens=skip)
    assert (demo.vocab_size, demo.eos_ids) == (len(hf), {hf.eos_token_id})
    assert demo.token_id("<|im_end|>") == 2 and demo.token_id("<|eom_id|>") is None


def test_ids_beyond_the_vocabulary_have_no_text(demo: Tokenizer) -> None:
    assert demo.decode([*demo.encode("a"), demo.vocab_size + 5, *demo.encode("b")]) == "ab"


def test_lone_surrogate_is_the_requests_fault(demo: Tokenizer) -> None:
    assert "surrogate" in str(_refusal(lambda: demo.encode("a\ud800")))


def _word_tokenizer(bos: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.enable_truncation(3)  # as a tokenizer.json saved in training may be
    tokenizer.enable_padding(length=9)
    return tokenizer


def test_tokenizer_json_alone_is_enough_and_never_truncates_or_pads(tmp_path: Path) -> None:
    _word_tokenizer(bos=True).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a b a b") == [0, 2, 3, 2, 3]
    assert tokenizer.encode("a b a b", add_special_tokens=False) == [2, 3, 2, 3]
    assert tokenizer.eos_ids == frozenset()


def test_chat_is_encoded_without_adding_a_second_bos(tmp_path: Path) -> None:
    _word_tokenizer(bos=True).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, "<s> {{ messages[0].content }}")
    assert tokenizer.encode_chat([{"role": "user", "content": "a b"}]) == [0, 2, 3]


def test_code_in_a_model_folder_is_never_executed(tmp_path: Path) -> None:
    marker, folder = tmp_path / "executed", tmp_path / "model"
    folder.mkdir()
    (folder / "tokenization_evil.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Evil: pass\n")
    auto_map = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"], "AutoConfig": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    config = {"tokenizer_class": "Evil", "auto_map": auto_map, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="without running code"):
        load_tokenizer(folder)
    _word_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a b") == [2, 3] and tokenizer.eos_ids == {1}
    assert not marker.exists() and not any("tokenization_evil" in name for name in sys.modules)


def test_folder_without_a_tokenizer_names_the_folder_and_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tokenizer-path") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# tiktoken formats. The expected ids come from an Encoding that the test builds itself.

RANKS = {bytes([byte]): byte for byte in range(256)} | {
    token.encode(): 256 + i
    for i, token in enumerate([" t", "he", " the", "12", "123", "ll", "Hello", " w", "or", "中", "中文"])
}
SINGLE_DIGIT_SPLIT = GPT4_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
MERGED = "Hello the world 12345 中文 I'll"


def _rank_text(ranks: Mapping[bytes, int] = RANKS) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())


def _check_against(tokenizer: Tokenizer, split: str, special: dict[str, int]) -> None:
    wanted = tiktoken.Encoding("reference", pat_str=split, mergeable_ranks=RANKS, special_tokens=special)
    marked = "".join(f"{token}x" for token in list(special)[:3])
    for text in [*TEXTS, MERGED, marked]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == wanted.encode(text, allowed_special="all"), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == wanted.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode(marked, False)) == "xxx"[: len(special)]
    assert max(tokenizer.encode(MERGED, False)) >= 256  # something was merged
    assert tokenizer.vocab_size == max([*RANKS.values(), *special.values()]) + 1


def test_splits_are_those_of_the_published_models() -> None:
    def pieces(split: str, text: str) -> list[str]:
        # A token never crosses a piece, so with every substring ranked the tokens would be the pieces themselves.
        parts = {text[a:b].encode() for a in range(len(text)) for b in range(a + 1, len(text) + 1)}
        ranked = {**RANKS, **{p: 9000 + i for i, p in enumerate(sorted(parts - set(RANKS), key=len))}}
        encoding = tiktoken.Encoding("x", pat_str=split, mergeable_ranks=ranked, special_tokens={})
        return [encoding.decode([i]) for i in encoding.encode(text)]

    assert pieces(GPT4_SPLIT, "ab 1234") == ["ab", " ", "123", "4"]
    assert pieces(SINGLE_DIGIT_SPLIT, "ab 123") == ["ab", " ", "1", "2", "3"]
    assert pieces(GPT4_SPLIT, "ab中文 I'll") == ["ab中文", " I", "'ll"]


def test_listed_special_tokens_and_pattern_of_the_config_rule_over_llama3s(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text(_rank_text())
    special = {"[BOS]": 300, "[EOS]": 301, "<|im_end|>": 302}
    listed = {str(i): {"content": token, "special": True} for token, i in special.items()}
    config = {"added_tokens_decoder": listed, "eos_token": "[EOS]", "bos_token": {"content": "[BOS]"},
              "tokenizer_class": "TikTokenTokenizer", "chat_template": CHATML}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    _check_against(tokenizer, GPT4_SPLIT, special)
    assert tokenizer.encode("a") == [300, 97] and tokenizer.eos_ids == {301}
    assert tokenizer.chat.render([USER]) == "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "pat_str": SINGLE_DIGIT_SPLIT}))
    _check_against(load_tokenizer(tmp_path), SINGLE_DIGIT_SPLIT, special)


def test_a_rank_file_of_a_family_that_is_not_served_is_not_read_with_another_s_split(tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_text(_rank_text())
    with pytest.raises(ValueError, match="no tokenizer that can be read"):
        load_tokenizer(tmp_path)


def test_llama3_original_has_its_pattern_and_special_tokens_behind_the_ranks(tmp_path: Path) -> None:
    assert len(LLAMA3_SPECIAL) == len(set(LLAMA3_SPECIAL)) == 256
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.model").write_text(_rank_text())
    tokenizer = load_tokenizer(tmp_path)
    _check_against(tokenizer, GPT4_SPLIT, {token: len(RANKS) + i for i, token in enumerate(LLAMA3_SPECIAL)})
    published = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|finetune_right_pad_id|>": 128004,
                 "<|start_header_id|>": 128006, "<|end_header_id|>": 128007, "<|eom_id|>": 128008,
                 "<|eot_id|>": 128009, "<|python_tag|>": 128010, "<|reserved_special_token_247|>": 128255}  # fmt: skip
    for token, llama_id in published.items():
        assert tokenizer.token_id(token) == len(RANKS) + llama_id - 128000
    assert tokenizer.encode("a") == [len(RANKS), 97]
    assert tokenizer.eos_ids == {len(RANKS) + 1, len(RANKS) + 9}


def test_sentencepiece_model_is_not_taken_for_a_rank_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(ValueError, match="tokenizer.model (alone needs the package sentencepiece|cannot be read)"):
        load_tokenizer(tmp_path)


def test_broken_rank_file_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text(_rank_text() + "!!! 999\n")
    with pytest.raises(ValueError, match=f"line {len(RANKS) + 1}"):
        load_tokenizer(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Chat templates

CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief. <b> & 'x'"}, USER, {"role": "assistant", "content": "4 "}],
    [USER, {"role": "assistant", "content": "It is"}],
]
TEMPLATES = {
    "chatml": CHATML,
    "strips": CHATML.replace("m.content", "(m.content | trim)"),
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ bos_token }}" + CHATML,
    "loops": "{%- for m in messages %}\n  {% if loop.index > 2 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "switch": "{{ 'think' if enable_thinking | default(true) else 'no' }}" + CHATML,
}


def test_demo_chat_is_rendered_as_transformers_does(demo: Tokenizer, hf: PreTrainedTokenizerBase) -> None:
    for chat in CHATS:
        for generate in (True, False):
            wanted = hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate)
            assert demo.chat.render(chat, add_generation_prompt=generate) == wanted
            ids = hf.apply_chat_template(chat, add_generation_prompt=generate, return_dict=False)
            assert demo.encode_chat(chat, add_generation_prompt=generate) == ids and len(ids) > 10


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_transformers_does(name: str, demo_folder: Path, hf: PreTrainedTokenizerBase) -> None:
    ours = load_tokenizer(demo_folder, TEMPLATES[name])
    kwargs = {"tools": [{"name": "f<é>", "n": 1}]} if name == "tools" else {"enable_thinking": False}
    for chat in CHATS:
        for generate in (True, False):
            wanted = hf.apply_chat_template(
                chat, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=generate, **kwargs
            )
            assert ours.chat.render(chat, add_generation_prompt=generate, template_kwargs=kwargs) == wanted


@pytest.mark.parametrize("name", ["chatml", "strips"])
def test_final_message_is_continued_as_transformers_does(
    name: str, demo_folder: Path, hf: PreTrainedTokenizerBase
) -> None:
    ours = load_tokenizer(demo_folder, TEMPLATES[name])
    for chat in CHATS[1:]:
        before = json.dumps(chat)
        wanted = hf.apply_chat_template(
            chat, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
        )
        found = ours.chat.render(chat, add_generation_prompt=False, continue_final_message=True)
        assert found == wanted and found.rstrip().endswith(chat[-1]["content"].strip())
        assert json.dumps(chat) == before  # the caller's messages are left alone


def test_template_comes_from_argument_file_and_config_in_that_order(demo_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((demo_folder / "tokenizer.json").read_bytes())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).chat.render([USER]) == "plain"
    assert load_tokenizer(tmp_path).chat.render([USER], template_kwargs={"tools": [1]}) == "tools"
    for wrong in ([{"template": "nameless"}], ["plain"]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": wrong}))
        with pytest.raises(ValueError, match="tokenizer_config.json: chat_template must be a template or a list"):
            load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).chat.render([USER]) == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert load_tokenizer(tmp_path, str(tmp_path / "mine.jinja")).chat.render([USER]) == "mine"
    assert load_tokenizer(tmp_path, "{{ 'text' }}").chat.render([USER]) == "text"
    with pytest.raises(ValueError, match="--chat-template"):
        load_tokenizer(tmp_path, str(tmp_path / "absent.jinja"))
    with pytest.raises(ValueError, match="line 2"):
        load_tokenizer(tmp_path, "{{ 1 }}\n{% if %}")


SPOKEN = [("user", "Hi"), ("assistant", "Yes"), ("user", "2+2?")]
HELPED, RULED = ([("system", rule), *SPOKEN] for rule in ("You are a helpful assistant.", "Be brief."))
TURNS, WITH_RULES = ([{"role": role, "content": text} for role, text in turns] for turns in (SPOKEN, RULED))
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)


def as_chatml(turns: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def as_llama3(turns: Sequence[tuple[str, str]]) -> str:
    head = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    return "<s>" + "".join(f"{head(role)}{text}<|eot_id|>" for role, text in turns) + head("assistant")


NAMED_FORMATS = {  # the prompts of TURNS, without a system message and with one, as they are published
    "chatml": (as_chatml(HELPED), as_chatml(RULED)), "hermes": (as_chatml(HELPED), as_chatml(RULED)),
    "llama-3-instruct": (as_llama3(SPOKEN), as_llama3(RULED)), "llama3-json": (as_llama3(HELPED), as_llama3(RULED)),
    "llama-2": ("<s>[INST] Hi [/INST] Yes </s><s>[INST] 2+2? [/INST]",
                "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yes </s><s>[INST] 2+2? [/INST]"),
    "vicuna_v1.1": (f"<s>{VICUNA} USER: Hi ASSISTANT: Yes</s>USER: 2+2? ASSISTANT:",
                    "<s>Be brief. USER: Hi ASSISTANT: Yes</s>USER: 2+2? ASSISTANT:"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_named_template_writes_its_published_format_and_its_end_of_turn_ends_an_answer(
    name: str, tmp_path: Path
) -> None:
    rust, end = _word_tokenizer(), NAMED[name].end
    rust.add_special_tokens([AddedToken(end)])
    rust.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "b"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path, name)
    plain, ruled = NAMED_FORMATS[name]
    assert tokenizer.chat.render(TURNS) == plain and tokenizer.chat.render(WITH_RULES) == ruled
    assert tokenizer.eos_ids == {3, tokenizer.token_id(end)}
    open_end = tokenizer.chat.render(TURNS[:2], add_generation_prompt=False, continue_final_message=True)
    assert open_end.endswith("Yes") and plain.startswith(open_end)
    if name in ("llama-2", "vicuna_v1.1"):
        _refusal(lambda: tokenizer.chat.render([*TURNS, {"role": "tool", "content": "4"}]))


def test_no_template_is_a_400_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text(_rank_text())
    message = str(_refusal(lambda: load_tokenizer(tmp_path).chat.render([USER])))
    assert "--chat-template" in message and "/v1/completions" in message


def test_templates_cannot_leave_the_sandbox(demo_folder: Path) -> None:
    escapes = [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ messages.append(1) }}",  # immutable: a template changes nothing either
        "{{ strftime_now.__globals__['sys'] }}",
    ]
    for source in escapes:
        _refusal(lambda source=source: load_tokenizer(demo_folder, source).chat.render([USER]))
    assert load_tokenizer(demo_folder, "{{ raise_exception.__globals__ }}").chat.render([USER]) == ""


def test_whatever_a_template_raises_is_a_400(demo_folder: Path) -> None:
    for source in ("{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"):
        error = _refusal(lambda source=source: load_tokenizer(demo_folder, source).chat.render([USER]))
        assert "chat template" in str(error) and ("roles must" not in source or "roles must alternate" in str(error))


# ---------------------------------------------------------------------------------------------------------------------
# Detokenizer


def _stream(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> list[str]:
    """Feed ids one by one; check that pieces add up to decode. Returns the pieces."""
    detokenizer = tokenizer.detokenizer(SamplingParams(skip_special_tokens=skip))
    pieces = [*(detokenizer.append(token_id) for token_id in ids), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    return pieces


def _spelt_tokenizer() -> Tokenizer:
    """A sentencepiece-like tokenizer as Llama 2's: words with a leading space, single bytes for the rest."""
    words = ["▁", "▁a", "▁the", "b", "é", "中", "▁▁", "\ufffd", "."]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + i for i, word in enumerate(words)}
    rust = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _wrapped(rust)


def _wrapped(rust: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(_HuggingFace(rust), frozenset(), None, {})


def _metaspace_tokenizer() -> Tokenizer:
    """The same vocabulary under the decoder that newer conversions write."""
    spelt = _spelt_tokenizer()
    rust = tokenizers.Tokenizer.from_str(spelt.backend._tokenizer.to_str())
    rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return _wrapped(rust)


@pytest.mark.parametrize("skip", [True, False])
def test_streamed_random_ids_add_up_to_decode_for_byte_level_bpe(demo: Tokenizer, skip: bool) -> None:
    draw = random.Random(5)
    # Random ids are mostly whole words; the short tokens are the bytes, and make every kind of invalid UTF-8.
    short = [i for i in range(17, 2000) if len(demo.backend.token_bytes(i)) == 1]
    pools = [range(demo.vocab_size), short, [*short, 0, 1, 2, demo.vocab_size + 9], range(20)]
    assert len(short) > 200  # this vocabulary leaves out bytes such as 0xFF; the tiktoken test below has all 256
    broken = 0
    for round_ in range(200):
        ids = [draw.choice(pools[round_ % 4]) for _ in range(40)]
        broken += "\ufffd" in "".join(_stream(demo, ids, skip))
    assert broken > 50


def test_added_tokens_outside_of_the_byte_alphabet_keep_their_text(demo_folder: Path) -> None:
    rust = tokenizers.Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    rust.add_tokens(["two words", "中文"])
    tokenizer = _wrapped(rust)
    assert tokenizer.backend.byte_level
    ids = tokenizer.encode("a two words 中文 😀")
    assert {49152, 49153} <= set(ids)  # the two that were added
    assert "".join(_stream(tokenizer, ids, True)) == "a two words 中文 😀"


@pytest.mark.parametrize("make", [_spelt_tokenizer, _metaspace_tokenizer])
@pytest.mark.parametrize("skip", [True, False])
def test_streamed_random_ids_add_up_to_decode_for_byte_fallback(make: Callable[[], Tokenizer], skip: bool) -> None:
    tokenizer, draw = make(), random.Random(6)
    encoded = [3 + byte for byte in "😀中é".encode()]
    pools = [range(268), range(3, 259), [*range(259, 268), 999, 0, 2], [*encoded, 260, 2]]
    broken = whole = 0
    for round_ in range(200):
        ids = [draw.choice(pools[round_ % 4]) for _ in range(30)]
        if round_ % 2:
            ids[10:10] = [260, *encoded, 260]  # between words: among stray bytes it would be broken too
        text = "".join(_stream(tokenizer, ids, skip))
        broken, whole = broken + ("\ufffd" in text), whole + ("😀" in text)
    assert broken > 50 and whole > 20


def test_streamed_random_ids_add_up_to_decode_for_tiktoken(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text(_rank_text())
    tokenizer, draw = load_tokenizer(tmp_path), random.Random(7)
    for skip in (True, False):
        for _ in range(100):
            _stream(tokenizer, [draw.randrange(tokenizer.vocab_size + 3) for _ in range(40)], skip)


def test_valid_text_is_never_broken_and_characters_come_as_soon_as_they_are_whole(demo: Tokenizer) -> None:
    for tokenizer in (demo, _spelt_tokenizer(), _metaspace_tokenizer()):
        for text in ["a 😀 b 👨‍👩‍👧 日本語 c", "中éa b. 한국"]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            pieces = _stream(tokenizer, ids, True)
            assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
            assert sum(piece == "" for piece in pieces) > 3  # halves were held back
    face = demo.encode("😀")
    assert len(face) > 1 and _stream(demo, face, True) == [""] * (len(face) - 1) + ["😀", ""]


def test_half_a_character_at_the_end_comes_with_the_flush(demo: Tokenizer) -> None:
    for tokenizer in (demo, _spelt_tokenizer()):
        ids = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
        pieces = _stream(tokenizer, ids, True)
        assert pieces[-1].startswith("\ufffd") and not any("\ufffd" in piece for piece in pieces[:-1])


def _continued(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    detokenizer = tokenizer.detokenizer(SamplingParams())
    detokenizer.follow(before)
    return "".join([*map(detokenizer.append, ids), detokenizer.flush()])


def test_leading_space_is_dropped_once_where_a_text_begins_and_nowhere_else() -> None:
    for tokenizer in (_spelt_tokenizer(), _metaspace_tokenizer()):
        assert _stream(tokenizer, [260, 261, 259, 262], True)[:4] == ["a", " the", " ", "b"]
        assert "".join(_stream(tokenizer, [259, 259, 262], True)) == " b"
        for before in ([260], [262], [260, 2], [260, 999], [3 + 10], [260, 3 + 10], [264], [1, 260, 0]):
            assert _continued(tokenizer, before, [260, 261]) == " a the", before
        for before in ([], [1], [1, 2, 999]):
            assert _continued(tokenizer, before, [260, 261]) == "a the", before


def test_a_text_and_what_continues_it_are_the_text_of_both(demo: Tokenizer) -> None:
    """However whole characters are cut in two; half a character belongs to the side that has its end."""
    for tokenizer in (demo, _spelt_tokenizer(), _metaspace_tokenizer()):
        for text in ("a the 😀中 éa.\nb 日本\n\n b", "😀b", "\n"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            raw = [tokenizer.piece(token) for token in ids]
            for cut in range(len(ids) + 1):
                begun = b"".join(raw[:cut]).decode("utf-8", "ignore")
                begun = begun if text.startswith(begun) else begun[1:]  # of the first word the space is no text
                assert _continued(tokenizer, ids[:cut], ids[cut:]) == text[len(begun) :], (text, cut)


def test_half_a_character_that_nothing_completes_is_no_part_of_what_follows(demo: Tokenizer) -> None:
    for tokenizer in (demo, _spelt_tokenizer(), _metaspace_tokenizer()):
        *_, b = tokenizer.encode("b", add_special_tokens=False)
        face = tokenizer.encode("b😀", add_special_tokens=False)[1:]
        for before in ([b], []):
            for cut in range(1, len(face)):
                assert _continued(tokenizer, [*before, *face[:cut]], [b, b]) == "bb"
                assert _continued(tokenizer, [*before, *face[:cut]], face[cut:]) == "😀"


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_work_per_token_does_not_grow_with_the_output(kind: str, demo: Tokenizer, monkeypatch: Any) -> None:
    tokenizer = demo if kind == "byte-level" else _spelt_tokenizer()
    decoded: list[int] = []
    decode = tokenizer.backend.decode

    def counted(ids: Sequence[int], skip_special_tokens: bool) -> str:
        decoded.append(len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer.backend, "decode", counted)
    invalid, word = (tokenizer.token_id("<0x80>"), 262) if kind != "byte-level" else (demo.encode("é")[-1], 2000)
    unknown = tokenizer.vocab_size + 1
    replacement = tokenizer.token_id("\ufffd") or invalid
    for pattern in ([word], [invalid], [unknown], [invalid, word], [replacement]):
        ids = (pattern * 500)[:500]
        decoded.clear()
        detokenizer = tokenizer.detokenizer(SamplingParams())
        for token_id in ids:
            detokenizer.append(token_id)
        detokenizer.flush()
        assert sum(decoded) <= 20 * len(ids), pattern  # quadratic would be 250 times
