"""The engines that `peers.py` compares, by name: how each is started, asked with token ids, and stopped.

    plain head lookups ngram int8 gguf gguf-head gguf-lookups dp2 tp2    minispec with the launch flags of `MINISPEC`
    older-NAME                         the same of another checkout, which --older names
    llama-own llama-bf16 llama-q8_0    llama.cpp on the GGUF file that the model is, and on it in 16 and in 8 bits
    llama-own-head llama-bf16-head     the same with our EAGLE-3 head, which drafts three in a row
    transformers transformers-lookup   `generate`, alone and with prompt lookup
    openvino openvino-lookup           OpenVINO GenAI on the GGUF file, alone and with prompt lookup

minispec and llama.cpp are servers, asked over HTTP. The others are in this process, and are asked for one greedy reply
at a time. All get the same ids and answer with ids, so that tokens are counted alike.

The default model is a GGUF file, so llama.cpp gets this very file. Others are made by llama.cpp's own tools, once: a
file's name has a digest of what it was made from. EAGLE-3 heads count the layers that they read in two ways, and
llama.cpp's converter knows one of them, so it is given a copy of the head whose config.json says it that way.

Read next: `peers.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import bench
from benchmarks import parity, throughput
from benchmarks.start import COMMAND, LOCAL, post, ready
from minispec.config import Config
from minispec.load.architectures import read_model_config
from minispec.load.build import choose_folder
from minispec.load.gguf_models import GGUF_FILE
from minispec.load.heads import read_head
from minispec.load.machine import core_count
from minispec.load.tokenizer import eos_token_ids, load_tokenizer
from minispec.load.weights import read_config

Ids = list[int]
ROWS = 16384  # of keys and values: what a server holds for all its requests together
NONE, EAGLE3, NGRAM = map(parity.drafter_flags, ("NONE", "EAGLE3", "NGRAM"))
HEAD, GGUF = [*EAGLE3, "--no-speculative-lookup"], ["--quantization", "gguf"]

MINISPEC = {  # launch flags
    "plain": NONE, "head": HEAD, "lookups": EAGLE3, "ngram": NGRAM, "int8": [*NONE, "--quantization", "int8"],
    "gguf": [*NONE, *GGUF], "gguf-head": [*HEAD, *GGUF], "gguf-lookups": [*EAGLE3, *GGUF],
    "dp2": [*EAGLE3, "--dp-size", "2"], "tp2": [*EAGLE3, "--tp-size", "2"],
}  # fmt: skip
LLAMA = ("llama-own", "llama-bf16", "llama-q8_0", "llama-own-head", "llama-bf16-head")
WITHIN = ("transformers", "transformers-lookup", "openvino", "openvino-lookup")
NAMES = (*MINISPEC, *(f"older-{name}" for name in MINISPEC), *LLAMA, *WITHIN)


class Wish(NamedTuple):
    """What all engines are asked for."""

    new_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    stream: bool = False


class Reply(NamedTuple):
    """What an engine answered; times are seconds since it was asked."""

    ids: Ids  # an end-of-sequence token included
    steps: int | None = None  # forward passes after the first token; None where the engine does not tell
    first: float | None = None  # when a stream's first token came
    last: float | None = None


class Peer:
    """An engine whose `ask` returns the reply to a prompt; url: of its server, if it has one."""

    def __init__(self, name: str, url: str = "") -> None:
        self.name, self.url = name, url

    def ask(self, prompt: Ids, wish: Wish, seed: int) -> Reply:
        """Return the reply to a prompt."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget earlier prompts; most keep none."""


class Minispec(Peer):
    """A minispec server."""

    def ask(self, prompt: Ids, wish: Wish, seed: int) -> Reply:
        """Ask /generate, without what the model's folder says of sampling, which other engines do not know."""
        params = {"temperature": wish.temperature, "max_new_tokens": wish.new_tokens, "ignore_eos": wish.ignore_eos,
                  "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "sampling_seed": seed}  # fmt: skip
        body = {"input_ids": prompt, "sampling_params": params, "stream": wish.stream}
        events = [event for event in answers(self.url + "/generate", body) if event[1]["output_ids"]]
        answer = events[-1][1]
        return timed(Reply(answer["output_ids"], answer["meta_info"].get("spec_verify_ct")), wish, events)

    def clear(self) -> None:
        """Empty the prefix cache and the drafter's memory."""
        parity.flush(self.url)


class Llama(Peer):
    """A llama.cpp server."""

    # The cheapest way to say greedy: one candidate. Penalties and other samplers are not in the list, so they are off.
    GREEDY = {"temperature": 0.0, "top_k": 1, "samplers": ["top_k", "temperature"]}

    def ask(self, prompt: Ids, wish: Wish, seed: int) -> Reply:
        """Ask /completion; nothing is kept from prompt to prompt."""
        how = self.GREEDY if wish.temperature == 0 else {"temperature": wish.temperature, "samplers": ["temperature"]}
        body = {"prompt": prompt, "n_predict": wish.new_tokens, "ignore_eos": wish.ignore_eos, "cache_prompt": False,
                "seed": seed, "return_tokens": True, "stream": wish.stream, **how}  # fmt: skip
        events = list(answers(self.url + "/completion", body))
        ids = [token for _, event in events for token in event["tokens"]]
        accepted = events[-1][1]["timings"].get("draft_n_accepted")
        reply = Reply(ids, None if accepted is None else len(ids) - 1 - accepted)
        return timed(reply, wish, [event for event in events if event[1]["tokens"]])


def answers(url: str, body: dict[str, Any]) -> Iterator[tuple[float, Any]]:
    """Send a body, and yield the answer, or each event of a stream, with the seconds since it was sent."""
    began = time.perf_counter()
    with post(url, body) as answer:
        for line in answer if body["stream"] else [answer.read()]:
            if (text := line.removeprefix(b"data: ")).startswith(b"{"):
                yield time.perf_counter() - began, json.loads(text)


def timed(reply: Reply, wish: Wish, events: Sequence[tuple[float, Any]]) -> Reply:
    """Return a reply with the times of a stream's events."""
    return reply._replace(first=events[0][0], last=events[-1][0]) if wish.stream else reply


class Transformers(Peer):
    """transformers' greedy generate, in this process."""

    def __init__(self, name: str, model: str | None) -> None:
        super().__init__(name)
        self.inner = throughput.Transformers(name, bench.their_model(model, "auto", "cpu"), [1])

    def ask(self, prompt: Ids, wish: Wish, seed: int) -> Reply:
        """Generate for one prompt."""
        return Reply(list(self.inner.run([prompt], 1, wish.new_tokens, 0.0).outputs[0]))


class OpenVINO(Peer):
    """OpenVINO GenAI on a GGUF file, in this process."""

    def __init__(self, name: str, file: Path, ends: frozenset[int]) -> None:
        from openvino_genai import LLMPipeline

        super().__init__(name)
        lookup = name.endswith("-lookup")
        self.inner = LLMPipeline(str(file), "CPU", **({"prompt_lookup": True} if lookup else {}))
        self.config = self.inner.get_generation_config()
        self.config.do_sample, self.config.stop_token_ids = False, set(ends)
        self.config.repetition_penalty, self.config.apply_chat_template = 1.0, False
        if lookup:  # as its samples have it
            self.config.num_assistant_tokens, self.config.max_ngram_size = 5, 3

    def ask(self, prompt: Ids, wish: Wish, seed: int) -> Reply:
        """Generate for one prompt."""
        import numpy as np
        from openvino import Tensor

        self.config.max_new_tokens = wish.new_tokens
        made = self.inner.generate(Tensor(np.array([prompt])), self.config)
        return Reply(list(made.tokens[0]), len(made.perf_metrics.raw_metrics.m_batch_sizes) - 1)


# ---- llama.cpp's files ---------------------------------------------------------------------------------------------


class LlamaTree(NamedTuple):
    """A built llama.cpp: its server, its source tree with the converter, and the folder for converted files."""

    server: Path
    source: Path
    work: Path

    @classmethod
    def find(cls, server: Path | None, source: Path | None, work: Path) -> LlamaTree:
        """Return the tree around a server; raises ValueError where there is no server."""
        if server is None or not server.is_file():
            raise ValueError("--llama-server was not given" if server is None else
                             f"--llama-server {server}: there is no such file")  # fmt: skip
        server, script = server.resolve(), "convert_hf_to_gguf.py"
        found = source or next((folder for folder in server.parents if (folder / script).is_file()), server.parent)
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
        weights = sorted(folder.glob("*.safetensors"))
        name = f"{folder.name}-{digest(folder / 'config.json', *weights)}-BF16"
        return self._made(name, lambda out: [*script, "--outfile", out])

    def quantize(self, file: Path, kind: str) -> Path:
        """Return a file in another type of numbers."""
        tool = [str(self.server.with_name("llama-quantize")), "--allow-requantize", str(file)]
        return self._made(f"{file.stem}-{digest(file)}-{kind}", lambda out: [*tool, out, kind])

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
        weights = sorted(head.glob("*.safetensors"))
        copy = self.work / f"{head.name}-{digest(head / 'config.json', *weights)}"
        copy.mkdir(exist_ok=True)
        (copy / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": taps}))
        for file in weights:
            shutil.copy(file, copy)
        return copy


def digest(*files: Path) -> str:
    """Return twelve hexadecimal digits that stand for what is in these files."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:12]


# ---- starting --------------------------------------------------------------------------------------------------------


def folder_of(args: argparse.Namespace, **how: Any) -> Path:
    """Return the folder of the model to serve."""
    return choose_folder(Config(model_path=args.model, **how), lambda line: print(line, file=sys.stderr))


def own_file(args: argparse.Namespace) -> Path:
    """Return the GGUF file that the model is; raises ValueError where it is no such file."""
    return (folder_of(args, quantization="gguf") / GGUF_FILE).resolve()


def start(name: str, args: argparse.Namespace, stack: ExitStack) -> Peer:
    """Start an engine, to be stopped with the stack; raises an error whose last line says why it cannot take part."""
    if name in WITHIN:
        if args.batch > 1 or args.temperature or args.ignore_eos:
            raise ValueError("it is asked for one greedy reply at a time, up to its end")
        if name.startswith("transformers"):
            return Transformers(name, args.model)
        folder = folder_of(args)
        return OpenVINO(name, own_file(args), eos_token_ids(folder, read_config(folder), load_tokenizer(folder)))
    if name in LLAMA:
        return Llama(name, stack.enter_context(ready(llama_command(name, args))))
    older = name.startswith("older-")
    if older and args.older is None:
        raise ValueError("--older was not given")
    flags = [*(["--model", args.model] if args.model else []), *MINISPEC[name.removeprefix("older-")]]
    flags += ["--max-total-tokens", str(ROWS), "--max-running-requests", str(max(args.batch, 8)), *args.server_flags]
    python = str(args.older_python) if older else sys.executable
    command = [python, *COMMAND[1:], "--wait-until-compiled", *flags]
    peer = Minispec(name, stack.enter_context(ready(command, cwd=args.older if older else None)))
    while not all(replica["state"] == "ready" for replica in replicas(peer.url)):
        time.sleep(1)
    return peer


def replicas(url: str) -> list[dict[str, Any]]:
    """Return a server's replicas, if it has any; it is ready itself as soon as one of them is."""
    with LOCAL.open(f"{url}/server_info", timeout=60) as answer:
        return json.load(answer).get("replicas", [])


def llama_command(name: str, args: argparse.Namespace) -> list[str]:
    """Return the command of a llama.cpp server, all of whose files are there by then."""
    tree = LlamaTree.find(args.llama_server, args.llama_source, args.work)
    kind, _, head = name.removeprefix("llama-").partition("-")
    try:
        file = own_file(args)
    except ValueError:
        if kind == "own":
            raise
        file = tree.convert(folder_of(args))
    if kind != "own":
        file = tree.quantize(file, kind.upper())
    command = [str(tree.server), "-m", str(file), "-t", str(core_count()), "-tb", str(core_count())]
    command += ["-c", str(ROWS), "-np", str(args.batch)]
    if head:
        ours = Config(model_path=args.model, speculative_algorithm="EAGLE3").draft_path
        if ours is None:
            raise ValueError("no EAGLE-3 head ships for this model")
        draft = tree.convert(tree.plain_head(Path(ours), folder_of(args)), folder_of(args))
        command += ["-md", str(draft), "--spec-type", "draft-eagle3", "--spec-draft-n-max", "3"]
    return command
