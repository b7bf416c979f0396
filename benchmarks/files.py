"""Each key of a model folder's JSON files set to what is wrong: the model answers as in transformers, or is one line.

    python -m benchmarks.files            # null, a wrong type, a negative and a huge number, and no such key
    python -m benchmarks.files --quick    # one of them for each key, in turn; .ci/run runs it

Tiny models with random weights are written to a folder, with one key changed. Then a model is loaded and serves two
requests at once. What it may do: give transformers' greedy tokens, or refuse the folder with one line that names the
key. What it may not do: raise anything else, at the start or in a step, or give other tokens. A draft head may be
refused too, and changes no token. transformers may refuse what is loaded here, if the key changes no token.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from minispec import LLM, SamplingParams
from minispec.eagle import Eagle3Head, HeadConfig
from minispec.load.architectures import one_rope, read_model_config
from minispec.load.heads import head_tensors
from minispec.load.published import published_tensors
from minispec.load.tokenizer import byte_tokenizer, load_tokenizer
from minispec.model import Model

META = torch.device("meta")
VOCAB, END = 320, 300
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32",
    "bos_token_id": 256, "eos_token_id": END, "pad_token_id": None, "use_cache": True, "initializer_range": 0.02,
    "attention_dropout": 0.0, "pretraining_tp": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
FAMILIES: dict[str, dict[str, Any]] = {  # the keys that a family has more
    "Mistral": {"model_type": "mistral", "sliding_window": 8},
    "Qwen2": {"model_type": "qwen2", **WINDOW},
    "Qwen3": {"model_type": "qwen3", **WINDOW},
    "Qwen3Moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                 "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "Mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "SmolLM3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    "Granite": {"model_type": "granite", "embedding_multiplier": 2.0, "attention_multiplier": 0.3,
                "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "Phi3": {"model_type": "phi3", "sliding_window": 64, "partial_rotary_factor": 1.0},
}  # fmt: skip
GENERATION = {"bos_token_id": 256, "eos_token_id": [END, 301], "pad_token_id": 302, "temperature": 0.6, "top_p": 0.9,
              "top_k": 20, "repetition_penalty": 1.1, "do_sample": True, "max_length": 64}  # fmt: skip
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")  # fmt: skip
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, "bos_token": "<256>", "eos_token": "<300>",
    "pad_token": "<302>", "unk_token": None, "add_bos_token": False, "add_eos_token": False, "add_prefix_space": False,
    "model_max_length": 128, "clean_up_tokenization_spaces": False, "padding_side": "left", "legacy": False,
    "added_tokens_decoder": {}, "use_default_system_prompt": False,
}  # fmt: skip
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 40,
        "target_hidden_size": 32, "norm_before_residual": False, "norm_output": False, "fc_norm": False,
        "norm_before_fc": False, "eagle_aux_hidden_state_layer_ids": None,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 0, 1]}}  # fmt: skip
PROMPT = [72, 101, 108, 108, 111, 32, *range(97, 117)]
TEXTS = ("Hello wide  world,\n12 cafe\u0301s", "<256>a<300>", "")
SAID = [{"role": "user", "content": "hi"}]
EAGERLY = {"dtype": "float32", "device": "cpu", "disable_torch_compile": True, "max_running_requests": 2,
           "max_total_tokens": 1024}  # fmt: skip
ABSENT: Any = object()


# ---- tiny folders ----------------------------------------------------------------------------------------------------


def fresh(folder: Path) -> Path:
    """Return a folder without anything in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def filled(outline: Mapping[str, Tensor], seed: int, prefix: str = "") -> dict[str, Tensor]:
    """Return random tensors of these names and shapes; norms are near one, and an embedding is large."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, tensor in outline.items():
        noise = torch.randn(tensor.shape, generator=random)
        whole = f"{prefix}{name}" if name != "lm_head.weight" else name
        made[whole] = noise * 0.1 + 1 if "norm" in name else noise * (2.0 if "embed" in name else 0.2)
    return made


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content))


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are there."""
    return {key: value for key, value in config.items() if value is not ABSENT}


def as_mixtral(name: str) -> str:
    """Return what Mixtral's files call a tensor of a mixture of experts."""
    for ours, theirs in ((".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(ours, theirs)
    return name


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as Phi-3's files have them: q, k and v are one, gate and up are one."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for part, whole in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
            name = name.replace(f".{part}_proj.", f".{whole}_proj.")
        made[name] = torch.cat((made[name], tensor)) if name in made else tensor
    return made


def weights_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return random weights of the model that a good config describes, by the names in the files."""
    outline = Model.empty(read_model_config(one_rope(config)), torch.float32, META)
    made = filled(published_tensors(outline), seed, "model.")
    if "Phi3ForCausalLM" in config["architectures"]:
        return joined(made)
    mixtral = "MixtralForCausalLM" in config["architectures"]
    return {as_mixtral(name): tensor for name, tensor in made.items()} if mixtral else made


def write_model(folder: Path, config: Mapping[str, Any] = LLAMA, **beside: Any) -> Path:
    """Write a model folder; beside: weights, tokenizer (tokenizer_config.json), generation (generation_config.json).

    weights: by default random ones for `config`; None: none.
    """
    fresh(folder)
    weights = beside["weights"] if "weights" in beside else weights_of(config)
    write_json(folder / "config.json", without(config))
    if weights is not None:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
    serialized = byte_tokenizer(VOCAB).backend.serialized()
    assert serialized is not None
    (folder / "tokenizer.json").write_text(serialized)
    write_json(folder / "tokenizer_config.json", without(beside.get("tokenizer", TOKENIZER)))
    if "generation" in beside:
        write_json(folder / "generation_config.json", without(beside["generation"]))
    return folder


def head_weights(config: Mapping[str, Any] = LLAMA, draft_vocab: int = 40, layer: str = "midlayer.",
                 **variant: Any) -> dict[str, Tensor]:  # fmt: skip
    """Return random weights of an EAGLE-3 head for the model of a config; variant: fields of `HeadConfig`."""
    target = Model.empty(read_model_config(one_rope(config)), torch.float32, META)
    ids = torch.arange(draft_vocab) * 7
    head = HeadConfig(Eagle3Head.name, target.config.plain(), (1, 1, 2), ids, **variant)
    made = filled(head_tensors(Eagle3Head.empty(head, target), layer), 3)
    return made | {"d2t": ids - torch.arange(draft_vocab)}


def write_head(folder: Path, config: Mapping[str, Any] = {**LLAMA, **HEAD}, weights: Mapping[str, Tensor] | None = None,
               ) -> Path:  # fmt: skip
    """Write the folder of a draft head; weights: by default random ones of an EAGLE-3 head."""
    fresh(folder)
    write_json(folder / "config.json", without(config))
    save_file(dict(weights or head_weights()), folder / "model.safetensors")
    return folder


# ---- what comes of it ------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What came of a folder; ids: None if it was refused."""

    ids: list[int] | None
    said: str = ""
    fault: str = ""


def served(folder: Path, **options: Any) -> Outcome:
    """Return what our engine makes of a folder: the greedy tokens of a plain request beside a demanding one."""
    try:
        llm = LLM(folder, **{**EAGERLY, "speculative_algorithm": "NONE", **options})
    except ValueError as error:
        said = str(error)
        return Outcome(None, said, "two lines" if "\n" in said else "")
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}", "raises at the start")
    plain = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    wants = SamplingParams(temperature=0.8, max_new_tokens=6, min_new_tokens=3, sampling_seed=1, repetition_penalty=1.2)
    try:
        one, _ = llm.generate([PROMPT, PROMPT[:4]], [plain, wants])
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}", "raises in a step")
    return Outcome(one["output_ids"])


def referred(folder: Path) -> Outcome:
    """Return what transformers makes of a folder."""
    ids = list(PROMPT)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        model.eval()
        with torch.no_grad():
            for _ in range(6):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}")
    return Outcome(ids[len(PROMPT) :])


def texts(folder: Path) -> list[Any] | None:
    """Return what transformers' tokenizer makes of the texts and of a chat."""
    try:
        other = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        made = [other.encode(text) for text in TEXTS]
        how = {"tokenize": False, "add_generation_prompt": True}
        return made + ([other.apply_chat_template(SAID, **how)] if other.chat_template is not None else [])
    except Exception:
        return None


def tokenized(folder: Path) -> Outcome:
    """Return what our tokenizer makes of a folder, compared with transformers'."""
    try:
        ours = load_tokenizer(folder)
        made: list[Any] = [ours.encode(text) for text in TEXTS]
        made += [ours.chat.render(SAID)] if ours.chat.info["chat_template"] is not None else []
    except ValueError as error:
        return Outcome(None, str(error), "two lines" if "\n" in str(error) else "")
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}", "raises")
    theirs = texts(folder)
    return Outcome([], "" if theirs is None else "compared", "other text" if theirs not in (None, made) else "")


# ---- the sweep -------------------------------------------------------------------------------------------------------

CHANGES = ("null", "wrong type", "negative", "huge", "removed")


def changed(value: Any, change: str) -> Any:
    """Return a value that is changed in one way."""
    wrong = 7 if isinstance(value, str) else "x"
    return {"null": None, "wrong type": wrong, "negative": -1, "huge": 10**12, "removed": ABSENT}[change]


def cases(quick: bool) -> Iterator[tuple[str, str, str, Callable[[Path], Outcome]]]:
    """Yield the name of a file, a key, a change, and what tries it in a folder."""
    number = 0

    def of(name: str, keys: Mapping[str, Any], attempt: Callable[[dict[str, Any], Path], Outcome]) -> Iterator[Any]:
        nonlocal number
        for key, value in keys.items():
            number += 1
            for at, change in enumerate(CHANGES):
                if not quick or at == number % len(CHANGES):
                    new = {**keys, key: changed(value, change)}
                    yield name, key, change, lambda folder, new=new: attempt(new, folder)

    weights = weights_of(LLAMA)
    yield from of("config.json", LLAMA, lambda new, folder: compared(write_model(folder, new, weights=weights)))
    rope = {**LLAMA, "rope_scaling": None}
    yield from of("rope_scaling", YARN, lambda new, folder: compared(
        write_model(folder, {**rope, "rope_scaling": without(new)}, weights=weights)))  # fmt: skip
    for family, more in FAMILIES.items():
        whole = {**LLAMA, **more, "architectures": [f"{family}ForCausalLM"]}
        own = {key: value for key, value in more.items() if key != "model_type"}
        ready = weights_of(whole)
        yield from of(f"config.json of {family}", own, lambda new, folder, whole=whole, ready=ready: compared(
            write_model(folder, {**whole, **new}, weights=ready)))  # fmt: skip
    yield from of("generation_config.json", GENERATION, lambda new, folder: compared(
        write_model(folder, LLAMA, weights=weights, generation=new)))  # fmt: skip
    yield from of("tokenizer_config.json", TOKENIZER, lambda new, folder: tokenized(
        write_model(folder, LLAMA, weights=None, tokenizer=new)))  # fmt: skip

    def drafted(new: dict[str, Any], folder: Path) -> Outcome:
        target = write_model(folder / "target", LLAMA, weights=weights)
        head = write_head(folder / "head", new)
        found = served(target, speculative_algorithm="EAGLE3", speculative_draft_model_path=str(head))
        if found.ids is None:
            return found
        wrong = "" if found.ids == served(target).ids else "other tokens"
        return Outcome(found.ids, "compared", wrong)

    yield from of("a head's config.json", {**LLAMA, **HEAD}, drafted)


def compared(folder: Path) -> Outcome:
    """Return what our engine makes of a folder; its fault is to differ from transformers."""
    ours = served(folder)
    if ours.fault or ours.ids is None:
        return ours  # transformers would count to a huge number of layers
    if (theirs := referred(folder)).ids is None:
        return Outcome(ours.ids)
    return Outcome(ours.ids, "compared", "" if ours.ids == theirs.ids else "other tokens")


def main() -> int:
    """Run the sweep and print a table; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one change for each key")
    parser.add_argument("--show", action="store_true", help="print what is said of each refused folder")
    options = parser.parse_args()
    logging.getLogger("minispec").setLevel(logging.ERROR)
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    started, counts, wrong = time.monotonic(), Counter[tuple[str, str]](), list[str]()
    with tempfile.TemporaryDirectory() as place:
        for name, key, change, attempt in cases(options.quick):
            found = attempt(Path(place) / "tried")
            fault = found.fault
            named = any(word in found.said for word in (key, "tensors: ", "wrong shapes: ", "the default of", "d2t"))
            if not fault and found.ids is None and not named:
                fault = "the key is not named"
            refused = found.ids is None
            kind = "wrong" if fault else "one line" if refused else "as transformers" if found.said else "loaded alone"
            counts[name, kind] += 1
            if fault:
                wrong += [name]
                print(f"{name}: {key}, {change}: {fault}: {found.said[:200]}", flush=True)
            elif refused and options.show:
                print(f"{name}: {key}, {change}: {found.said}")
    kinds = ("as transformers", "one line", "loaded alone", "wrong")
    print("| file | " + " | ".join(kinds) + " |\n|---|" + "--:|" * len(kinds))
    for name in dict.fromkeys(name for name, _ in counts):
        print(f"| {name} | " + " | ".join(str(counts[name, kind]) for kind in kinds) + " |")
    print(f"{time.monotonic() - started:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
