"""Serve a model that calls one tool and then answers, whatever it is asked: for agents, which no small model can drive.

    python tests/clients/scripted.py --call '{"name": "exec_command", "arguments": {"cmd": "echo hi"}}' [--port 30000]

What it writes is scripted: each piece of the call and of the answer is a token of its own, after which the next is the
likeliest. The chat template ends a prompt with one of two tokens, by whether the last message is a tool's result. All
else is real: the tokenizer, two layers with attention, drafts, grammars, and a context of 65,536 tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from minispec.load.chat_templates import NAMED
from minispec.load.default_model import ensure_default_model
from minispec.server import main

CONTEXT = 65_536
CALLS, ANSWERS = "<|it calls|>", "<|it answers|>"


def pieces(text: str, known: set[str]) -> list[str]:
    """Return a text in pieces, none of which is a token already or comes twice."""
    found: list[str] = []
    for piece in re.findall(r"\w+\W*|\W+", text):
        while found and (piece in known or piece in found):
            piece = found.pop() + piece
        found.append(piece)
    return found


def llama(vocab_size: int, context: int, scripts: list[list[int]], weight: float) -> LlamaForCausalLM:
    """Return a two-layer Llama in whose greedy text each id of a script follows the one before it; `weight`: how much
    likelier than by its random layers."""
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    ))  # fmt: skip
    with torch.no_grad():
        embed = torch.nn.functional.normalize(torch.randn(vocab_size, 64), dim=-1)
        model.model.embed_tokens.weight.copy_(embed)
        model.lm_head.weight.zero_()
        for ids in scripts:
            for token, following in zip(ids, ids[1:], strict=False):
                model.lm_head.weight[following] += weight * embed[token]
    return model


def write(folder: Path, call: str, answer: str) -> None:
    """Write the model's folder."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ensure_default_model())
    known = set(tokenizer.get_vocab())
    scripts = [[CALLS, *pieces(f"<tool_call>\n{call}\n</tool_call>", known)], [ANSWERS, *pieces(answer, known)]]
    for script in scripts:
        tokenizer.add_tokens(script)
    end = tokenizer.eos_token_id
    model = llama(len(tokenizer), CONTEXT, [[*tokenizer.convert_tokens_to_ids(script), end] for script in scripts], 3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0}')
    turn = f"{{{{ '{ANSWERS}' if messages[-1].role == 'tool' else '{CALLS}' }}}}"
    template = NAMED["hermes"].source + "{% if add_generation_prompt %}" + turn + "{% endif %}"
    (folder / "chat_template.jinja").write_text(template)


def serve() -> None:
    """Write the model and serve it; what this does not know goes to the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", required=True, help="the call, as JSON with name and arguments")
    parser.add_argument("--answer", default="The tool was run and all is well.")
    given, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), json.dumps(json.loads(given.call)), given.answer)
        main(["--model", folder, "--dtype", "float32", "--disable-torch-compile", "--speculative-algorithm", "NGRAM",
              "--max-total-tokens", str(2 * CONTEXT), "--tool-call-parser", "hermes", "--log-requests",
              *more])  # fmt: skip


if __name__ == "__main__":
    sys.exit(serve())
