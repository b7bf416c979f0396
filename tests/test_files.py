"""Model folders as people have them: odd ones load as in transformers, or one line says what is wrong and what to do.

The folders are tiny ones of `benchmarks/files.py`, which sweeps every key. Draft heads are in test_heads.py, GGUF files
in test_gguf.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from benchmarks import files
from benchmarks.files import EAGERLY, LLAMA, PROMPT, TOKENIZER, VOCAB, referred, served, weights_of, write_json
from benchmarks.files import write_model as write
from minispec import LLM, SamplingParams
from minispec.asked.grammar import Constraints
from minispec.load.tokenizer import load_tokenizer
from minispec.load.weights import POINTER
from minispec.request import Grammar, RequestError

WEIGHTS = weights_of(LLAMA)


def load(folder: Path, **options: Any) -> LLM:
    """Return the model of a folder, served eagerly and plainly."""
    return LLM(folder, **{**EAGERLY, "speculative_algorithm": "NONE", **options})


def refusal(folder: Path, **options: Any) -> str:
    """Return the one line with which a folder is refused."""
    with pytest.raises(ValueError) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_as_transformers(folder: Path) -> None:
    """Assert that a folder gives transformers' greedy tokens."""
    ours, theirs = served(folder), referred(folder)
    assert theirs.ids is not None and ours.ids == theirs.ids, (ours, theirs)


# ---- what is wrong in one request alone -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["config.json", "generation_config.json", "tokenizer"])
def test_an_end_outside_the_vocabulary_is_left_out_with_one_line(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids: Any = {"config.json": VOCAB, "generation_config.json": [-1, 2**32 - 1, 300]}.get(where, 300)
    beside: dict[str, Any] = {"generation": {"eos_token_id": ids}} if where == "generation_config.json" else {}
    config = {**LLAMA, "eos_token_id": ids if where == "config.json" else 300}
    folder = write(tmp_path, config, weights=WEIGHTS, **beside)
    if where == "tokenizer":  # its end has the id 320, one more than the model has
        rust = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        rust.add_special_tokens([tokenizers.AddedToken("<end>", normalized=False)])
        rust.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", {**TOKENIZER, "eos_token": "<end>"})
    with caplog.at_level(logging.WARNING, logger="minispec"):
        llm = load(folder)
    assert caplog.text.count("are left out") == 1
    assert llm.scheduler.eos_ids == {300}
    plain = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    wants = SamplingParams(min_new_tokens=2, max_new_tokens=4)
    one, other = llm.generate([PROMPT, PROMPT], [plain, wants])
    assert one["output_ids"] == referred(folder).ids and len(other["output_ids"]) >= 2
    if where == "tokenizer":
        with pytest.raises(RequestError, match="has the token '<end>', id 320, which the model lacks: its ids are"):
            llm.generate("a<end>")


def break_slot(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    """Let the request that is set up with these parameters name an id that no table has."""
    llm.scheduler.eos_ids = frozenset([VOCAB + 80])
    return SamplingParams(min_new_tokens=2, max_new_tokens=4)


def break_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    """Let the tokenizer raise for the request that wants special tokens."""
    make = llm.tokenizer.detokenizer

    def spoiled(params: SamplingParams) -> Any:
        made = make(params)
        if not params.skip_special_tokens:
            made.append, made.flush, made.follow = None, str, list
        return made

    monkeypatch.setattr(llm.tokenizer, "detokenizer", spoiled)
    return SamplingParams(max_new_tokens=4, skip_special_tokens=False)


def break_grammar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    """Let a grammar's stop ids lie outside its masks."""
    assign = Constraints.assign
    monkeypatch.setattr(Constraints, "assign", lambda self, slot, request, ids: assign(self, slot, request, [2**20]))
    return SamplingParams(min_new_tokens=2, max_new_tokens=4, grammar=Grammar("regex", "[a-z]{4}"))


@pytest.mark.parametrize("spoil", [break_slot, break_text, break_grammar])
def test_what_is_wrong_in_one_request_ends_that_request_alone(
    spoil: Callable[[LLM, pytest.MonkeyPatch], SamplingParams], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(write(tmp_path, weights=WEIGHTS))
    plain = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    wanted = llm.generate(PROMPT, plain)["output_ids"]
    scheduler = llm.scheduler
    running = llm.request(PROMPT, plain)
    scheduler.validate(running)
    scheduler.submit(running)
    for _ in range(3):
        scheduler.step()
    broken = llm.request(PROMPT[:5], spoil(llm, monkeypatch))
    scheduler.validate(broken)
    scheduler.submit(broken)
    while scheduler.has_work:
        scheduler.step()
    assert broken.finish is not None and broken.finish.kind == "abort"
    assert running.output_ids == wanted and running.finish is not None and running.finish.kind == "length"
    scheduler.check()


def test_a_grammar_that_asks_for_a_token_which_the_model_lacks_is_refused_before_a_token(tmp_path: Path) -> None:
    config = {**LLAMA, "vocab_size": 118, "eos_token_id": 10}  # an id is a byte, the last one "u"
    llm = load(write(tmp_path, config, weights=weights_of(config)))
    with pytest.raises(RequestError, match="has the token"):
        llm.generate("y")
    known, lacking = (SamplingParams(max_new_tokens=4, grammar=Grammar("regex", text)) for text in ("[a-d]{4}", "z{4}"))
    one, other = (llm.request([65, 66], params) for params in (known, lacking))
    llm.serve([one, other])
    assert len(one.output_ids) == 4 and one.finish is not None and one.finish.kind != "abort"
    assert not other.output_ids and other.finish is not None and "the model's vocabulary" in other.finish.message


# ---- as transformers reads them -------------------------------------------------------------------------------------

DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
ROPES: dict[str, dict[str, Any]] = {
    "YARN beside default": {"rope_parameters": DEFAULT, "rope_scaling": files.YARN},
    "default beside linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3},
                              "rope_scaling": {"rope_type": "default"}},
    "three thetas": {"rope_theta": 1e6, "rope_parameters": {**DEFAULT, "rope_theta": 500.0},
                     "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    "two types": {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 8.0}},
    "the new one alone": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
}  # fmt: skip


@pytest.mark.parametrize("case", ROPES)
def test_of_two_spellings_of_rope_the_one_holds_that_holds_in_transformers(case: str, tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rope_scaling"} | ROPES[case]
    folder = write(tmp_path, config, weights=WEIGHTS)
    assert_as_transformers(folder)
    plain = served(folder).ids == served(write(tmp_path, weights=WEIGHTS)).ids
    assert plain == (case in ("default beside linear", "two types"))


def test_the_number_of_experts_has_two_spellings_that_may_not_contradict_each_other(tmp_path: Path) -> None:
    config = {**LLAMA, **files.FAMILIES["Qwen3Moe"], "architectures": ["Qwen3MoeForCausalLM"]}
    said = refusal(write(tmp_path, {**config, "num_local_experts": 8}, weights=weights_of(config)))
    assert f"--model {tmp_path}: config.json: num_experts 4 and num_local_experts 8 contradict each other" in said


def test_a_model_without_architectures_is_known_by_its_type(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    weights = weights_of(config)
    del config["architectures"]
    assert_as_transformers(write(tmp_path, config, weights=weights))


TIED = {**LLAMA, "tie_word_embeddings": True}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
TIES: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "another head": lambda: {**WEIGHTS, HEAD: -WEIGHTS[HEAD]},
    "the same head": lambda: {**WEIGHTS, HEAD: WEIGHTS[TABLE].clone()},
    "a head alone": lambda: {HEAD: WEIGHTS[TABLE], **{n: t for n, t in WEIGHTS.items() if n not in (HEAD, TABLE)}},
    "a table alone": lambda: {name: tensor for name, tensor in WEIGHTS.items() if name != HEAD},
}  # fmt: skip


@pytest.mark.parametrize("case", TIES)
def test_a_tied_model_with_an_lm_head_in_its_files(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_as_transformers(folder := write(tmp_path, TIED, weights=TIES[case]()))
    assert load(folder).model_config.tied == (case != "another head")
    assert ("they are not tied" in caplog.text) == (case == "another head")


INDEXES: dict[str, Any] = {
    "of no shards": {"weight_map": {HEAD: "model-00001-of-00002.safetensors"}}, "of another form": {"weights": []},
    "of a folder above": {"weight_map": {HEAD: "../model.safetensors"}},
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_beside_the_whole_weights_is_not_read(case: str, tmp_path: Path) -> None:
    write_json(write(tmp_path, weights=WEIGHTS) / "model.safetensors.index.json", INDEXES[case])
    assert_as_transformers(tmp_path)


# ---- tokenizers and templates ---------------------------------------------------------------------------------------

CLASSES = ("LlamaTokenizerFast", "TokenizersBackend", "Qwen2TokenizerFast", "GPT2Tokenizer", "LlamaTokenizer", None)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("named", CLASSES)
def test_tokenizer_json_is_believed_whatever_class_is_named(named: str | None, kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {**LLAMA, "model_type": kind}, weights=None,
                   tokenizer={**TOKENIZER, "tokenizer_class": named or files.ABSENT})  # fmt: skip
    trained, ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), load_tokenizer(folder)
    for text in ("cafe\u0301 au  lait", " a\tb\n\n12345 don't", "\u4e2d\u6587 <319>"):
        ids = trained.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, False) == ids and ours.decode(ids, False) == trained.decode(ids, False) == text
    assert ours.eos_ids == {300}


LOOP, SHOWN = "{% for m in messages %}", "{% for p in m.content %}{{ p.text }}{% endfor %}"
TEMPLATES = {  # a template, and whether it wants parts
    "walks parts": (LOOP + "{{ m.role }}:" + SHOWN + "{% endfor %}", True),
    "walks text parts alone": (
        LOOP + "{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}{% endfor %}{% endfor %}", True,
    ),
    "refuses a text": (
        LOOP + "{% if m.content is string %}{{ raise_exception('no') }}{% endif %}" + SHOWN + "{% endfor %}", True,
    ),
    "takes both": (
        LOOP + "{% if m.content is string %}{{ m.content }}{% else %}" + SHOWN + "{% endif %}{% endfor %}", False,
    ),
    "takes a text": (files.CHATML, False),
}  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_gets_the_content_in_the_form_that_it_reads(case: str, tmp_path: Path) -> None:
    template, parts = TEMPLATES[case]
    folder = write(tmp_path, weights=None, tokenizer={**TOKENIZER, "chat_template": template})
    said = [("user", "hi there"), ("assistant", "yes"), ("user", "so")]
    prompt = load_tokenizer(folder).chat.render([{"role": role, "content": text} for role, text in said])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        [{"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in said],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert prompt == theirs and all(text in prompt for _, text in said)


WITH_TOOLS = "{{ messages[0].content }}{% if tools %}{{ tools | length }} tools{% endif %}"
TOOL_FILES = {"jinja": ("{{ 1 }}", None), "config": (None, "{{ 1 }}"), "both": ("{{ 1 }}", "{{ 2 }}")}


@pytest.mark.parametrize("case", TOOL_FILES)
def test_a_template_for_tools_lies_beside_the_default_one(case: str, tmp_path: Path) -> None:
    alone, inside = TOOL_FILES[case]
    folder = write(tmp_path, weights=None, tokenizer={**TOKENIZER, "chat_template": inside})
    if alone is not None:
        (folder / "chat_template.jinja").write_text(alone)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(WITH_TOOLS)
    chat, tool = load_tokenizer(folder).chat, {"type": "function", "function": {"name": "f", "parameters": {}}}
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for tools in (None, [tool]):
        ours = chat.render([{"role": "user", "content": "hi"}], template_kwargs={"tools": tools})
        # transformers reads additional templates beside chat_template.jinja alone
        if alone is not None:
            assert ours == theirs.apply_chat_template([{"role": "user", "content": "hi"}], tools=tools, tokenize=False)
        assert ours == ("1" if tools is None else "hi1 tools")
    assert chat.tool_template == WITH_TOOLS


# ---- one line --------------------------------------------------------------------------------------------------------


def other_folder(**content: str) -> Callable[[Path], Path]:
    """Return what writes a folder that holds no model."""

    def write_it(folder: Path) -> Path:
        for name, text in content.items():
            path = folder / name.replace("__", "/").replace("_json", ".json").replace("_gguf", ".gguf")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    return write_it


def spoilt(name: str, content: bytes | None, **beside: Any) -> Callable[[Path], Path]:
    """Return what writes a model folder with one file replaced; None: tokenizer.json is taken out."""

    def write_it(folder: Path) -> Path:
        write(folder, **{"weights": WEIGHTS, **beside})
        if name == "tokenizer.model":
            (folder / "tokenizer.json").unlink()
        (folder / name).write_bytes(content or b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
        return folder

    return write_it


def within_hub(folder: Path) -> Path:
    """Write the folder in which the hub's cache keeps snapshots."""
    (where := folder / "models--org--name" / "snapshots").mkdir(parents=True)
    return where.parent


FETCHED = "is a git-lfs pointer in place of the file; `git lfs pull` in its folder fetches the file"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "an adapter": (other_folder(adapter_config_json='{"base_model_name_or_path": "org/base"}'),
                   "it has no config.json; it is a LoRA adapter of org/base: peft's merge_and_unload makes"),
    "GGUF files": (other_folder(a_gguf="GGUF", b_gguf="GGUF"), "it has GGUF files, of which to pass one: a.gguf, b"),
    "the hub's": (within_hub, "it is the hub's cache of org/name: pass this id, or a folder below"),
    "two models": (other_folder(one__config_json="{}", two__config_json="{}"), "folders with one are in it: one, two"),
    "null": (lambda folder: write(folder, {**LLAMA, "rms_norm_eps": None}, weights=WEIGHTS),
             "config.json: rms_norm_eps must be a number above 0, got null"),
    "too wide": (lambda folder: write(folder, {**LLAMA, "hidden_size": 2**20}, weights=WEIGHTS),
                 "the weights are not those that config.json describes; wrong shapes: lm_head.weight [320, 32] for"),
    "sentencepiece": (spoilt("tokenizer.model", None), "tokenizer.model "),
    "no UTF-8": (spoilt("chat_template.jinja", b"\xff"), "chat_template.jinja cannot be read: 'utf-8' codec can't"),
    "no Jinja": (spoilt("chat_template.jinja", b"{% for %}"), "the chat template has an error in line 1: Expected an"),
    "an end of text": (spoilt("generation_config.json", b'{"eos_token_id": "</s>"}'),
                       "generation_config.json: eos_token_id must be an id or a list of ids, got '</s>'"),
    **{f"pointer {name}": (spoilt(name, POINTER + b"v1\noid sha256:0\nsize 9\n"), f"{name} {FETCHED}")
       for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
                    "generation_config.json", "chat_template.jinja")},
    "pointer pytorch_model.bin": (spoilt("pytorch_model.bin", POINTER, weights=None), f"pytorch_model.bin {FETCHED}"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_refused_says_which_file_what_is_wrong_and_what_to_do(case: str, tmp_path: Path) -> None:
    make, words = REFUSED[case]
    said = refusal(folder := make(tmp_path))
    assert said.startswith(f"--model {folder}: ") and words in said, said
    assert "--chat-template takes another one" in said or "chat" not in words


def test_a_given_template_that_cannot_be_read_names_its_flag(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", weights=WEIGHTS)
    (other := tmp_path / "other.jinja").write_bytes(b"\xff{{ 1 }}")
    assert refusal(folder, chat_template=str(other)).startswith("--chat-template must be a file with a Jinja template")
    assert refusal(folder, chat_template="{% for %}").startswith("--chat-template: the chat template has an error in")


def test_a_file_that_may_not_be_opened_is_not_taken_for_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, weights=WEIGHTS)

    def denied(*place: Any, **how: Any) -> None:  # root, who runs these tests in places, may open every file
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("minispec.load.weights.open", denied, raising=False)
    monkeypatch.setattr("minispec.load.weights.safe_open", denied)
    assert refusal(folder).endswith("model.safetensors cannot be read: Permission denied")


def test_an_adapter_beside_a_model_leaves_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (write(tmp_path, weights=WEIGHTS) / "adapter_config.json").write_text("{}")
    load(tmp_path)
    assert "has a LoRA adapter beside the model, which is not applied" in caplog.text
