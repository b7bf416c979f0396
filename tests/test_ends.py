"""Where a text begins and ends, over a socket: a tiny model whose tokenizer spells what it has no word for in bytes, as
Llama 2's does. Every request is asked with drafts and without, greedy and with a seed; nothing in the answer differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from clients.scripted import llama
from exactness import build
from test_server import PARSERS, Running, options, ready
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from minispec.asked.grammar import Grammars
from minispec.asked.steps import Asking
from minispec.beam import BeamDrafter
from minispec.config import Config
from minispec.dflash import DFlashConfig, DFlashDrafter, DFlashHead
from minispec.drafter import Plain
from minispec.eagle import DraftHead, Eagle3Head, EagleHead, HeadConfig
from minispec.llm import LLM
from minispec.model import Model
from minispec.mtp import MtpHead
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.replies.formats import THOUGHTS, Formats
from minispec.serve import parse
from minispec.serve.reply import Reply, Served
from minispec.standalone import DraftModel, StandaloneDrafter

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<think>", "</think>"]
WORDS = ["▁", "▁a", "▁the", "b", "▁Paris", "▁is", ".", "user", '{"', '":', "x", "}", "a", "中"]
CHAT = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}.{{ tail | default('') }}{% endif %}"
)
FACE = "😀"


@pytest.fixture(scope="module", params=["spelt", "metaspace"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of that model, whose drafts are looked up, with either decoder that such tokenizers have."""
    folder = tmp_path_factory.mktemp(request.param)
    make_model(folder, request.param == "spelt")
    flags = options(folder, max_total_tokens=2048, reasoning_parser="qwen3")
    with ready(Running(Config(**flags))) as running:
        yield running


def make_model(folder: Path, spelt: bool, script: Sequence[int] = ()) -> None:
    """Write a model of random weights, and its tokenizer; in its greedy text each id of a script follows the last."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    rust = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True,
                                fuse_unk=True))  # fmt: skip
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        if spelt else [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )  # fmt: skip
    rust.add_special_tokens(SPECIAL[: 4 if spelt else 6])  # tags of reasoning are special in some models only
    rust.add_tokens([AddedToken(tag, normalized=False) for tag in SPECIAL[4:] if spelt])
    PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    torch.manual_seed(1)
    if script:
        llama(len(names), 512, [list(script)], 4).save_pretrained(folder)
    else:
        LlamaForCausalLM(LlamaConfig(
            vocab_size=len(names), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False,
        )).save_pretrained(folder)  # fmt: skip
    (folder / "generation_config.json").write_text("{}")


def ids(*tokens: str) -> list[int]:
    """Return ids by name; a text in quotes becomes its bytes."""
    names, found = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS], []
    for token in tokens:
        found += [len(SPECIAL) + byte for byte in token[1:-1].encode()] if token[0] == "'" else [names.index(token)]
    return found


def told(running: Running, body: dict[str, Any], **params: Any) -> tuple[str, list[int], dict[str, Any]]:
    """Return text, ids and finish reason of a native request, the same with drafts, without, streamed, and sampled."""
    answers = []
    for sampled in ({"temperature": 0}, {"temperature": 1.0, "sampling_seed": 3}):
        for speculative in (True, False):
            wish = {
                **body,
                "return_logprob": True,
                "sampling_params": {"max_new_tokens": 24, **params, **sampled, "speculative": speculative},
            }
            answer = running.ok("/generate", wish)
            received, _ = running.stream("/generate", wish)
            assert received[-2]["text"] == answer["text"], "a stream ends with the whole text"
            assert all(answer["text"].startswith(event["text"]) for event in received[:-1]), "and takes nothing back"
            meta = answer["meta_info"]
            answers.append((answer["text"], answer["output_ids"], meta["finish_reason"], meta["completion_tokens"],
                            [entry[0] for entry in meta["output_token_logprobs"]]))  # fmt: skip
        assert answers[-1][:4] == answers[-2][:4] and answers[-1][4] == pytest.approx(answers[-2][4], abs=1e-4)
        assert answers[-1][3] == len(answers[-1][1]) == len(answers[-1][4])
    if "regex" in params:
        assert answers[0][:3] == answers[2][:3]
    return answers[0][0], answers[0][1], answers[0][2]


def stopped(matched: Any) -> dict[str, Any]:
    return {"type": "stop", "matched": matched}


def test_a_stop_string_that_ends_inside_a_run_of_bytes_ends_the_text(served: Running) -> None:
    prompt = {"input_ids": [1, *ids("b", "b")]}
    assert told(served, prompt, regex="b\n", stop=["\n"]) == ("b", ids("b", "'\n'"), stopped("\n"))
    text, output, finish = told(served, prompt, regex=f"b{FACE}{{5}}", stop=[FACE])
    assert (text, output, finish) == ("b", ids("b", f"'{FACE}'"), stopped(FACE))
    for stop, regex, text, count in (("\n\n", "b\n\n\nb", "b", 3), (f"é{FACE}", f"bé{FACE}é", "b", 7),
                                     ("é\n", "é\né", "", 3), ("\n", f"b{FACE}\n{FACE}", f"b{FACE}", 6)):  # fmt: skip
        assert told(served, prompt, regex=regex, stop=[stop])[::2] == (text, stopped(stop)), stop
        kept, output, _ = told(served, prompt, regex=regex, stop=[stop], no_stop_trim=True)
        assert kept == text + stop and len(output) == count


def test_text_that_any_end_releases_is_looked_through(served: Running) -> None:
    prompt = {"input_ids": [1, *ids("b", "b")]}
    whole = f"b\n{FACE}"
    assert told(served, prompt, regex=whole) == (whole, [*ids("b", f"'\n{FACE}'"), 2], stopped(2))  # by EOS
    end = ids("'\n'")[0]
    assert told(served, prompt, regex=whole + "\n", stop_token_ids=[end])[::2] == ("b", stopped(end))
    assert told(served, prompt, regex=f"b{FACE}\n", stop_token_ids=[end])[::2] == (f"b{FACE}", stopped(end))
    assert told(served, prompt, regex=whole, max_new_tokens=2)[::2] == ("b\n", {"type": "length", "length": 2})
    assert told(served, prompt, regex=whole, max_new_tokens=3)[0] == "b\ufffd\ufffd", "as decode says"
    assert told(served, prompt, regex=whole, stop=["\n"], max_new_tokens=2)[::2] == ("b", stopped("\n"))
    # The first of two is waived, though it is in the same run.
    text, output, finish = told(served, prompt, regex="\n\n\nb", stop=["\n"], min_new_tokens=1)
    assert (text, output, finish) == ("\n", ids("'\n\n'"), stopped("\n"))


@pytest.mark.parametrize("prompt", ["the a", "a\n", "a<|im_start|>", "中"])
def test_a_continuation_keeps_the_space_of_its_first_word(served: Running, prompt: str) -> None:
    bias = {"logit_bias": {ids("▁Paris")[0]: 100}, "max_new_tokens": 3}
    assert told(served, {"text": prompt}, **bias)[0] == " Paris Paris Paris"
    assert told(served, {"text": prompt}, **bias, stop=[" Paris"])[::2] == ("", stopped(" Paris"))
    step = served.ok("/generate", {"text": prompt, "trace": True, "sampling_params": {**bias, "temperature": 0}})
    assert {text for each in step["trace"]["steps"] for text in each["emitted_texts"]} == {" Paris"}
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "logprobs": 1, "logit_bias": bias["logit_bias"]}
    choice = served.ok("/v1/completions", body)["choices"][0]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == " Paris Paris Paris"
    assert choice["logprobs"]["text_offset"] == [0, 6, 12]
    echoed = served.ok("/v1/completions", {**body, "echo": True})["choices"][0]
    assert echoed["text"] == f"{prompt} Paris Paris Paris"
    assert echoed["logprobs"]["text_offset"][-3:] == [len(prompt), len(prompt) + 6, len(prompt) + 12]


def test_a_text_of_its_own_begins_without_a_space(served: Running) -> None:
    bias = {"logit_bias": {ids("▁Paris")[0]: 100}, "max_tokens": 2, "temperature": 0}
    assert served.ok("/v1/completions", {"prompt": [1], **bias})["choices"][0]["text"] == "Paris Paris"
    assert told(served, {"input_ids": [1]}, logit_bias=bias["logit_bias"], max_new_tokens=2)[0] == "Paris Paris"
    messages = [{"role": "user", "content": "the"}]
    ask = lambda **more: served.ok("/v1/chat/completions", {"messages": messages, **bias, **more})["choices"][0]  # noqa: E731
    assert ask()["message"]["content"] == "Paris Paris"
    assert ask(stop="Paris Paris")["message"]["content"] == ""
    messages.append({"role": "assistant", "content": "the a"})
    assert ask(continue_final_message=True, add_generation_prompt=False)["message"]["content"] == " Paris Paris"


def test_half_a_character_at_a_prompts_end_is_completed_or_no_part_of_the_text(served: Running) -> None:
    face, first = ids(f"'{FACE}'"), ids("▁a")
    for before in ([1], [1, *first], [1, *first, *ids("'\n'")], []):
        for cut in (1, 2, 3):
            prompt = {"input_ids": [*before, *face[:cut]]}
            assert told(served, prompt, allowed_token_ids=face[cut:][:1], max_new_tokens=1)[0] in ("\ufffd", FACE)
            if cut == 3:
                bias = {str(token): 100 - i for i, token in enumerate([face[3]])}
                assert told(served, prompt, logit_bias=bias, max_new_tokens=1)[0] == FACE
            assert told(served, prompt, allowed_token_ids=ids("b"), max_new_tokens=2)[0] == "bb"


def test_a_stop_string_may_be_or_have_a_special_token_that_the_text_leaves_out(served: Running) -> None:
    prompt, start = {"input_ids": [1, *ids("b", "b")]}, ids("<|im_start|>")[0]
    assert told(served, prompt, allowed_token_ids=[start], stop=["<|im_start|>"]) == (
        "",
        [start],
        stopped("<|im_start|>"),
    )
    bias = {"allowed_token_ids": [start, *ids("user", "x")]}
    for stop in ("<|im_start|>user", "x<|im_start|>", "user<|im_start|><|im_start|>", "<|im_start|>x"):
        text, output, finish = told(served, prompt, **bias, stop=[stop], max_new_tokens=200)
        spelt = "".join("<|im_start|>" if token == start else {ids("user")[0]: "user", ids("x")[0]: "x"}[token]
                        for token in output)  # fmt: skip
        if finish == stopped(stop):
            assert spelt.endswith(stop) and spelt.find(stop) == len(spelt) - len(stop)
            assert text == spelt[: -len(stop)].replace("<|im_start|>", "")
        else:
            assert stop not in spelt
    with_eos = told(served, prompt, allowed_token_ids=[2], stop=["</s>"])
    assert with_eos == ("", [2], stopped(2)), "EOS goes before a stop string"
    assert told(served, prompt, allowed_token_ids=[2], stop=["</s>"], ignore_eos=True)[2] == stopped("</s>")


OBJECT = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
TAG = {"type": "structural_tag", "triggers": ["{"], "structures": [{"begin": "{", "schema": OBJECT, "end": "}"}]}
IS_OBJECT = r'\{\s*"x"\s*:\s*"[ab]"\s*\}'
FORMATS = {
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}}, IS_OBJECT),
    "guided": ({"guided_json": OBJECT}, IS_OBJECT),
    "choice": ({"structured_outputs": {"choice": ["xx", "bb"]}}, "xx|bb"),
    "regex": ({"regex": "[xb<>think]{1,9}"}, "[xb<>think]{1,9}"),
    "free ebnf": ({"ebnf": 'root ::= "" | [^\\n] root'}, r"[^\n]*"),
    "lark": ({"ebnf": "start: /(x|b|<)+/"}, "[xb<]+"),
    "tags": ({"response_format": TAG}, r"(?s)([^{]|\{" + IS_OBJECT + r"\})*"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_reply_that_thinks_has_its_format_behind_the_end_tag_and_every_other_from_its_first_token(
    served: Running, kind: str
) -> None:
    form, pattern = FORMATS[kind]
    think, end = ids("<think>", "</think>")
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 90, "n": 6, "temperature": 1, "seed": 5,
            "logprobs": True, "logit_bias": {think: 4, end: 4, 2: 3}, **form}  # fmt: skip
    for tail, opens in (("", False), ("<think>", True), ("<think> </think>", None)):
        told = []
        for speculative in (True, False):
            wish = {**body, "chat_template_kwargs": {"tail": tail}, "speculative": speculative}
            answer = served.ok("/v1/chat/completions", wish)
            told.append([(c["message"], c["finish_reason"], c["matched_stop"]) for c in answer["choices"]])
            told[-1].append(answer["usage"])
        assert told[0] == told[1], "drafts change nothing"
        thought = 0
        for choice in answer["choices"]:
            message, first = choice["message"], choice["logprobs"]["content"][0]["token"]
            thinks = opens or (opens is False and first == "<think>")
            thought += bool(thinks)
            if choice["finish_reason"] == "stop":
                assert re.fullmatch(pattern, message["content"]), message
                assert any(entry["token"] == "</think>" for entry in choice["logprobs"]["content"]) or not thinks
            assert thinks or not message["reasoning_content"], "reasoning is told apart where it is, and nowhere else"
        assert any(choice["finish_reason"] == "stop" for choice in answer["choices"])
        assert thought == (6 if opens else 0) or opens is False and 0 < thought


# ---- every drafter ---------------------------------------------------------------------------------------------------

SCRIPT = ["▁the", "▁a", "b", f"'\n{FACE}'", "<|im_start|>", "user", "▁Paris", "▁is", "x", "'é'", "."]
BIASED = {str(ids("▁Paris")[0]): 100}
CHATS = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60, "n": 2, "logprobs": True, "top_logprobs": 2,
         "logit_bias": {str(ids("</think>")[0]): 4, "2": 6}}  # fmt: skip
ASKED: list[tuple[str, dict[str, Any]]] = [  # held text, a continuation's space, special tokens, reasoning and formats
    *(("/generate", {"input_ids": [1, *ids("b", "b")], "return_logprob": True, "sampling_params": wish}) for wish in (
        {"regex": "b\n", "stop": "\n"}, {"regex": f"b{FACE}{{5}}", "stop": FACE}, {"regex": f"b{FACE}\n{FACE}"},
        {"stop": "\n", "max_new_tokens": 30}, {"stop": [FACE], "no_stop_trim": True, "max_new_tokens": 60},
        {"stop_token_ids": ids(f"'{FACE}'")[2:3], "max_new_tokens": 60}, {"stop": "é.", "max_new_tokens": 60},
        *({"max_new_tokens": count} for count in range(1, 8)), {"stop": "<|im_start|>", "max_new_tokens": 60},
        {"stop": "<|im_start|>user", "max_new_tokens": 60}, {"stop": "\n", "min_new_tokens": 9, "max_new_tokens": 60},
        {"stop": "user Paris", "skip_special_tokens": False, "max_new_tokens": 60})),
    *(("/v1/completions", {"prompt": prompt, "max_tokens": 9, "logprobs": 2, **more})
      for prompt in ("the a", "a\n", "中")
      for more in ({"logit_bias": BIASED}, {"logit_bias": BIASED, "stop": " Paris"}, {"echo": True})),
    *(("/v1/chat/completions", {**CHATS, "chat_template_kwargs": {"tail": tail}, **FORMATS[kind][0]})
      for kind in ("schema", "free ebnf", "tags", "regex") for tail in ("", "<think>")),
]  # fmt: skip


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, dict[str, list[Any]]]:
    """A model that repeats SCRIPT, and what it answers without drafts, greedy and with a seed."""
    folder, script = tmp_path_factory.mktemp("cycle"), ids(*SCRIPT)
    make_model(folder, True, [*script, script[0]])
    llm = LLM(str(folder), dtype="float32", disable_torch_compile=True, max_total_tokens=512)
    with torch.inference_mode():
        return llm, answers(llm, Plain())[0]


def answers(llm: LLM, drafter: Any) -> tuple[dict[str, list[Any]], int]:
    """Return what all of ASKED is answered, greedy and with a seed, with a drafter; and how many drafts were taken."""
    model, accepted, found = llm.scheduler.engine.model, 0, {}
    formats, grammars = Formats(None, THOUGHTS["qwen3"]), Grammars(llm.tokenizer.backend, model.config.vocab_size, (2,))
    for sampled in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        scheduler = build(model, drafter, radix=False, eos=(2,), tokenizer=llm.tokenizer)
        scheduler.engine.asked = Asking(scheduler.engine, grammars)
        replies, road = [], {}
        for path, body in ASKED:
            own = {"sampling_seed" if name == "seed" else name: value for name, value in sampled.items()}
            wish = ({**body, "sampling_params": {**body["sampling_params"], **own}} if path == "/generate"
                    else {**body, **sampled})  # fmt: skip
            job = PARSERS[path](wish)
            requests = parse.tokenize(job, llm.tokenizer, 512, formats=formats)
            replies.append(Reply(job, requests, Served("m", llm.tokenizer, formats=formats)))
            for request in requests:
                road[request] = replies[-1]
                scheduler.validate(request)
                scheduler.engine.asked.prepare(request)
                scheduler.submit(request)
        while scheduler.has_work:
            for update in scheduler.step():
                road[update.request].take(update)
            scheduler.check()
        accepted += scheduler.metrics.verified.accepted.total()
        found[str(sampled)] = [comparable(reply.result()) for reply in replies]
    return found, accepted


def comparable(answer: Any) -> Any:
    """Return an answer without what no two answers share; numbers that are computed are rounded."""
    if isinstance(answer, dict):
        unlike = ("id", "created", "e2e_latency", "response_sent_to_client_ts")
        return {name: comparable(value) for name, value in answer.items() if name not in unlike}
    if isinstance(answer, list | tuple):
        return [comparable(value) for value in answer]
    return pytest.approx(answer, abs=1e-4) if isinstance(answer, float) else answer


def known_head(kind: type[DraftHead], model: Model) -> DraftHead:
    """Return a head that drafts what follows its token in SCRIPT: its state is the token's embedding, or half of it."""
    size, taps = model.config.hidden_size, {"taps": (1,)} if kind is Eagle3Head else {}
    head: Any = kind.empty(HeadConfig(kind.name, model.config.plain(), **taps), model)
    for name, weight in head.named_parameters():
        weight.fill_(1.0) if "norm" in name else weight.zero_()
    layer, one = head.layer, torch.eye(size)
    if kind is EagleHead:
        head.fc.weight[:, :size] = one
    elif kind is MtpHead:
        head.input_proj.weight[:, size:] = one
    else:  # each token attends to its like alone, and each head of keys hands on its part of the embedding
        query, key, value = layer.qkv_proj.weight.split((layer.q_size, layer.kv_size, layer.kv_size))
        shared = layer.q_size // layer.kv_size
        parts = one[: layer.kv_size].unflatten(0, (-1, model.config.head_dim))
        query[:, :size] = 9 * parts.repeat_interleave(shared, 0).flatten(0, 1)
        key[:, :size], value[:, :size] = 9 * parts.flatten(0, 1), parts.flatten(0, 1)
        layer.o_proj.weight.T.unflatten(0, (-1, model.config.head_dim))[::shared, :] = parts
    return head


def favourites(model: Model) -> DFlashHead:
    """Return a block drafter without layers that do anything: each of its rows prefers the same tokens of SCRIPT."""
    known = torch.tensor(ids("▁Paris", f"'{FACE}'", "b", "x"))
    head: Any = DFlashHead.empty(DFlashConfig("dflash", model.config.plain(), (1,), known, block_size=4), model)
    for name, weight in head.named_parameters():
        weight.fill_(1.0) if "norm" in name else weight.zero_()
    head.lm_head.weight[:] = torch.linspace(0.1, 0, len(known))[:, None] * model.embed_tokens.weight[0]
    return head


DRAFTERS: dict[str, Callable[[Model], Any]] = {
    **{kind.name: lambda model, kind=kind: BeamDrafter(known_head(kind, model), rounds=3, topk=2, nodes=6)
       for kind in (EagleHead, Eagle3Head, MtpHead)},
    "standalone": lambda model: StandaloneDrafter(
        DraftModel(model, model.config.vocab_size), rounds=3, topk=2, nodes=6
    ),
    "dflash": lambda model: DFlashDrafter(favourites(model), block=4, nodes=10, topk=4),
    "ngram": lambda model: NgramDrafter(NgramOptions(nodes=8)),
}  # fmt: skip


@pytest.mark.parametrize("kind", DRAFTERS)
@torch.inference_mode()
def test_no_drafter_changes_text_usage_logprobs_or_the_reason_of_an_end(kind: str, cycle: Any) -> None:
    llm, without = cycle
    found, accepted = answers(llm, DRAFTERS[kind](llm.scheduler.engine.model))
    for how, told in without.items():
        for wish, right, answer in zip(ASKED, told, found[how], strict=True):
            assert answer == right, (how, wish)
    assert accepted > 150, "ends lie among accepted drafts"
