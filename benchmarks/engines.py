"""The engines that `peers.py` compares: started from one model folder, asked with token ids, stopped.

Three kinds: minispec served, a llama.cpp server, and transformers' `generate` in this process. Each has a method `ask`
for the greedy reply to a prompt, and `clear` to forget earlier ones. All get the same ids and answer with ids, so that
tokens are counted alike.

llama.cpp's files are converted from the same folder by the scripts of its own source tree, once: a file's name has a
digest of what it was made from. EAGLE-3 heads count the layers that they read in two ways, and llama.cpp's converter
knows one of them, so it is given a copy of the head whose config.json says it that way.

Read next: `peers.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import bench
from benchmarks import parity, throughput
from benchmarks.start import ready
from minispec.config import Config
from minispec.load.architectures import read_model_config
from minispec.load.build import choose_folder
from minispec.load.heads import read_head
from minispec.load.machine import core_count
from minispec.load.weights import read_config

Ids = list[int]
ROWS = 8192  # of keys and values: what a server holds for all its requests together
SLOTS = 8  # requests decoded together

MINISPEC = {  # name: title in the tables, flags
    "none": ("minispec NONE", parity.drafter_flags("NONE")),
    "none-int8": ("minispec NONE, int8 weights", [*parity.drafter_flags("NONE"), "--quantization", "int8"]),
    "eagle3": ("minispec EAGLE3", parity.drafter_flags("EAGLE3")),
    "eagle3-chain": ("minispec EAGLE3 3/1/4", parity.drafter_flags("EAGLE3:3/1/4")),
    "ngram": ("minispec NGRAM", parity.drafter_flags("NGRAM")),
}
TITLES = {
    "transformers": "transformers",
    "transformers-lookup": "transformers, prompt lookup",
    "llama.cpp": "llama.cpp BF16",
    "llama.cpp-q8_0": "llama.cpp Q8_0",
    "llama.cpp-eagle3": "llama.cpp BF16, our EAGLE-3 head 3/1/4",
    "llama.cpp-eight": "llama.cpp BF16, eight slots",
    **{name: title for name, (title, _) in MINISPEC.items()},
}


class Reply(NamedTuple):
    """What an engine answered."""

    ids: Ids  # an end-of-sequence token included
    steps: int | None  # forward passes after the first token; None where the engine does not tell


class Peer:
    """An engine whose `ask` returns the greedy reply to a prompt; url: of its server, if it has one."""

    def __init__(self, name: str, url: str = "") -> None:
        self.name, self.url = name, url

    def clear(self) -> None:
        """Forget earlier prompts; most keep none."""


class Minispec(Peer):
    """A minispec server."""

    def ask(self, prompt: Ids, new_tokens: int, ignore_eos: bool = False) -> Reply:
        """Ask /generate."""
        params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": ignore_eos}
        answer = parity.post(self.url + "/generate", {"input_ids": prompt, "sampling_params": params})
        return Reply(answer["output_ids"], answer["meta_info"].get("spec_verify_ct"))

    def clear(self) -> None:
        """Empty the prefix cache and the drafter's memory."""
        parity.flush(self.url)


class Llama(Peer):
    """A llama.cpp server."""

    # The cheapest way to say greedy: one candidate. Penalties and other samplers are not in the list, so they are off.
    GREEDY = {"temperature": 0.0, "top_k": 1, "samplers": ["top_k", "temperature"], "repeat_penalty": 1.0}

    def ask(self, prompt: Ids, new_tokens: int, ignore_eos: bool = False) -> Reply:
        """Ask /completion; nothing is kept from prompt to prompt."""
        body = {"prompt": prompt, "n_predict": new_tokens, "ignore_eos": ignore_eos, "cache_prompt": False}
        answer = parity.post(self.url + "/completion", {**body, **self.GREEDY, "return_tokens": True})
        accepted = answer["timings"].get("draft_n_accepted")
        return Reply(answer["tokens"], None if accepted is None else len(answer["tokens"]) - 1 - accepted)


class Transformers(Peer):
    """transformers' greedy generate, in this process."""

    def __init__(self, name: str, model: Any) -> None:
        super().__init__(name)
        self.inner = throughput.Transformers(name, model, [1])

    def ask(self, prompt: Ids, new_tokens: int, ignore_eos: bool = False) -> Reply:
        """Generate for one prompt."""
        assert not ignore_eos, "not asked of transformers"
        return Reply(list(self.inner.run([prompt], 1, new_tokens, 0.0).outputs[0]), None)


# ---- llama.cpp's files and servers ---------------------------------------------------------------------------------


class LlamaTree(NamedTuple):
    """A built llama.cpp: its server, its source tree with the converter, and the folder for converted files."""

    server: Path
    source: Path
    work: Path

    @classmethod
    def find(cls, server: Path, source: Path | None, work: Path) -> LlamaTree:
        """Return the tree around a server; raises ValueError where the converter is not found."""
        server, script = server.resolve(), "convert_hf_to_gguf.py"
        found = source or next((folder for folder in server.parents if (folder / script).is_file()), None)
        if not server.is_file():
            raise ValueError(f"--llama-server {server}: there is no such file")
        if found is None or not (found / script).is_file():
            raise ValueError(f"--llama-source {found or 'not given'}: it must be a llama.cpp source tree with {script}")
        work.mkdir(parents=True, exist_ok=True)
        return cls(server, found, work)

    def version(self) -> str:
        """Return what the server calls its version, in one line."""
        said = subprocess.run([self.server, "--version"], capture_output=True, text=True, check=True)
        return next(line for line in (said.stderr + said.stdout).splitlines() if line.startswith("version"))

    def convert(self, folder: Path, target: Path | None = None) -> Path:
        """Return the BF16 file of a model's folder, or of a head's for its `target`."""
        script = [sys.executable, str(self.source / "convert_hf_to_gguf.py"), str(folder), "--outtype", "bf16"]
        script += ["--target-model-dir", str(target)] if target else []
        return self._made(f"{folder.name}-{digest(folder)}-BF16", lambda out: [*script, "--outfile", out])

    def quantize(self, file: Path, kind: str) -> Path:
        """Return a BF16 file quantized to `kind`."""
        tool = str(self.server.with_name("llama-quantize"))
        return self._made(file.stem.replace("BF16", kind), lambda out: [tool, str(file), out, kind])

    def _made(self, name: str, command: Callable[[str], list[str]]) -> Path:
        """Return the file of this name, made by `command` unless it is there."""
        path, part = self.work / f"{name}.gguf", self.work / f"{name}.part.gguf"
        if not path.is_file():
            print(f"making {path}", file=sys.stderr)
            made = subprocess.run(command(str(part)), capture_output=True, text=True)
            if made.returncode:
                raise RuntimeError(f"{path.name} could not be made:\n" + (made.stdout + made.stderr)[-2000:])
            part.rename(path)
        return path

    def plain_head(self, head: Path, target: Path) -> Path:
        """Return a copy of an EAGLE-3 head whose config.json names the layers that it reads as the converter expects.

        It reads `eagle_aux_hidden_state_layer_ids` at the top alone, as layers whose input the head is given.
        """
        config = json.loads((head / "config.json").read_text())
        taps = read_head(head, read_model_config(read_config(target))).config.taps
        copy = self.work / f"{head.name}-{digest(head)}"
        copy.mkdir(exist_ok=True)
        (copy / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": taps}))
        for file in head.glob("*.safetensors"):
            shutil.copy(file, copy)
        return copy


def digest(folder: Path) -> str:
    """Return twelve hexadecimal digits that stand for a folder's config and weights."""
    total = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:12]


# ---- starting --------------------------------------------------------------------------------------------------------


def start(args: argparse.Namespace, names: Sequence[str], stack: ExitStack) -> tuple[list[Peer], list[str]]:
    """Start the engines of these names, to be stopped with the stack; returns them and a line for each left out."""
    config = Config(model_path=args.model)
    folder = choose_folder(config, lambda line: print(line, file=sys.stderr))
    peers: list[Peer] = []
    if theirs := [name for name in names if name.startswith("transformers")]:
        their_model = bench.their_model(args.model, "auto", "cpu")
        peers += [Transformers(name, their_model) for name in theirs]
    left_out = []
    if llamas := [name for name in names if name.startswith("llama.cpp")]:
        if args.llama_server:
            tree = LlamaTree.find(args.llama_server, args.llama_source, args.work)
            peers += start_llamas(tree, folder, config, llamas, stack)
        else:
            left_out += [f"{TITLES[name]}: --llama-server was not given" for name in llamas]
    model = ["--model", args.model] if args.model else []
    for name in [name for name in names if name in MINISPEC]:
        print(f"starting {TITLES[name]}", file=sys.stderr)
        flags = [*model, *MINISPEC[name][1], "--max-total-tokens", str(ROWS), "--max-running-requests",
                 str(SLOTS if name == "none" else 1)]  # fmt: skip
        try:
            peers.append(Minispec(name, stack.enter_context(parity.serve(*flags))))
        except RuntimeError as error:
            if "--quantization" not in flags:
                raise
            left_out.append(f"{TITLES[name]}: {str(error).splitlines()[-1]}")
    return peers, left_out


def start_llamas(tree: LlamaTree, folder: Path, config: Config, names: Sequence[str], stack: ExitStack) -> list[Peer]:
    """Convert what the llama.cpp engines of these names need and start them."""
    whole = tree.convert(folder)
    one = ["-m", str(whole), "-np", "1"]
    flags = {"llama.cpp": one, "llama.cpp-eight": ["-m", str(whole), "-np", str(SLOTS)]}
    if "llama.cpp-q8_0" in names:
        flags["llama.cpp-q8_0"] = ["-m", str(tree.quantize(whole, "Q8_0")), "-np", "1"]
    if "llama.cpp-eagle3" in names:
        head = dataclasses.replace(config, speculative_algorithm="EAGLE3").draft_path
        assert head is not None, "no EAGLE-3 head ships for this model"
        draft = str(tree.convert(tree.plain_head(Path(head), folder), folder))
        flags["llama.cpp-eagle3"] = [*one, "-md", draft, "--spec-type", "draft-eagle3", "--spec-draft-n-max", "3"]
    cores = str(core_count())
    command = [str(tree.server), "-t", cores, "-tb", cores, "-c", str(ROWS)]
    return [Llama(name, stack.enter_context(ready([*command, *flags[name]]))) for name in names]
