"""GGUF files made by llama.cpp's own tools: minispec's greedy text is llama.cpp's, to the letter.

llama.cpp rounds activations to 8 bits where weights are quantized, and minispec does not. A model with random weights
therefore picks other tokens now and then, since its two best logits are often closer than that. The models here have
learnt the README by heart, and their two best logits are nats apart.

The tests need a llama.cpp that was built as docs/measured.md says, its folder in LLAMA_CPP, and the packages of its
converter. Without them they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_layers import ROOT
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from benchmarks.engines import LlamaTree
from minispec import LLM, SamplingParams
from minispec.cpu.template import reason_against_int4
from minispec.load.gguf_files import read_gguf
from minispec.load.gguf_tokenizer import gguf_tokenizer, tokenizer_config

LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", "llama.cpp"))
TOOLS = LLAMA_CPP / "build/bin"
README = (ROOT / "README.md").read_text(encoding="utf-8")
STARTS = [README.index(" ", 1100 * part) for part in range(8)]
PROMPTS = [README[start : README.index(" ", start + 60)] for start in STARTS]
NEW_TOKENS, BF16 = 64, torch.bfloat16
SIZES = {  # 256 weights of a row share the scales of a K-quant
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": None,
}  # fmt: skip
MODELS: dict[str, tuple[str, PretrainedConfig]] = {  # name: (vocabulary among llama.cpp's, config)
    "llama": ("llama-bpe", LlamaConfig(**SIZES, vocab_size=128256, tie_word_embeddings=False, bos_token_id=128000,
                                       eos_token_id=128001)),
    "qwen2": ("qwen2", Qwen2Config(**SIZES, vocab_size=151936, tie_word_embeddings=True, bos_token_id=None,
                                   eos_token_id=151645)),
}  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TOOLS / "llama-simple").is_file(), reason="LLAMA_CPP names no built llama.cpp"),
]


def learnt(config: PretrainedConfig, ids: Tensor, steps: int = 250, length: int = 96) -> PreTrainedModel:
    """Return a model that goes on as ids [N] int64 do, after any few of them and a BOS if it has one.

    A small vocabulary is trained, of the ids that occur and one more, whose rows all others get: it has learnt that
    it never comes next.
    """
    torch.manual_seed(0)
    bos = [] if config.bos_token_id is None else [config.bos_token_id]
    seen, small = torch.cat([torch.tensor(bos, dtype=torch.int64), ids]).unique(return_inverse=True)
    first, text = small[: len(bos)], small[len(bos) :]
    sizes = {**config.to_dict(), "vocab_size": len(seen) + 1, "bos_token_id": None, "eos_token_id": None}
    model = AutoModelForCausalLM.from_config(type(config).from_dict(sizes), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (16,)).tolist()
        batch = torch.stack([torch.cat([first, text[start : start + length]]) for start in starts])
        logits = model(batch[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = model.state_dict()
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & weights.keys():
        rows = weights[name]
        weights[name] = rows[-1].repeat(config.vocab_size, 1)
        weights[name][seen] = rows[:-1]
    whole.load_state_dict(weights)
    return whole


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> LlamaTree:
    """The converter and the quantizer of llama.cpp."""
    pytest.importorskip("sentencepiece")
    return LlamaTree(TOOLS / "llama-server", LLAMA_CPP, tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tree: LlamaTree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as published ones are, with a tokenizer of llama.cpp's collection of vocabularies."""
    vocabulary, config = MODELS[request.param]
    fields, _ = read_gguf(tree.source / f"models/ggml-vocab-{vocabulary}.gguf")
    tokenizer, made = gguf_tokenizer(fields), tmp_path_factory.mktemp("model") / request.param
    learnt(config, torch.tensor(tokenizer.encode(README, add_special_tokens=False).ids)).save_pretrained(made)
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(fields, config.max_position_embeddings)))
    return made


def greedy(path: str, prompt: str) -> str:
    """Return the text with which llama.cpp goes on."""
    command = [TOOLS / "llama-simple", "-m", path, "-n", str(NEW_TOKENS), prompt]
    told = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    return told.partition(prompt)[2].removesuffix("\n")


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_K_M", "Q4_1", "Q4_0"])
def test_the_greedy_text_is_llama_cpp_s(
    folder: Path, tree: LlamaTree, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tree.quantize(tree.convert(folder), kind))
    theirs = [greedy(path, prompt) for prompt in PROMPTS]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True, skip_special_tokens=False)
    # As 16 bits, and as the file's own 4 bits where it has some.
    for quantization in (None, "gguf") if kind.startswith("Q4") and reason_against_int4(BF16) is None else (None,):
        llm = LLM(path, speculative_algorithm="NONE", disable_torch_compile=True, max_running_requests=1,
                  context_length=1024, quantization=quantization)  # fmt: skip
        assert [llm.generate(prompt, params)["text"] for prompt in PROMPTS] == theirs, quantization
    assert min(map(len, theirs)) > NEW_TOKENS
