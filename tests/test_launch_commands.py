"""The documentation's launch commands, run as written against tiny checkpoints in the formats of their models.

A folder whose name is a hub's id is found before the hub is asked, so the commands run in a folder that holds their
checkpoints under the very ids. Appended are a free port and `--device cpu --disable-torch-compile`, for speed. Of
commands that differ only in what a CPU has no use for, one runs. The first of them runs in a process of its own, the
others in threads of the tests; `python -m benchmarks.launch_commands` runs all in processes.

Every target follows a script: its LM head maps each token of a fixed text to the next one, through layers of random
weights that add a little noise. So the greedy answer is known beforehand. The heads are made to read the newest token
out of what their format gives them, so that their drafts are right where the format is read rightly: a head that is
loaded wrongly drafts nonsense, and is seen by its acceptance.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from conftest import free_port
from safetensors.torch import load_file, save_file
from test_config import DOCUMENTED, ROOT, Command
from test_server import Running, launch, script
from torch import Tensor
from transformers import AutoTokenizer

from minispec import LLM
from minispec.beam import candidate_count
from minispec.config import FLAGS, NUMBERS, flag_name
from minispec.llm import startup_line
from minispec.load.flags import config_from_args
from minispec.serve.info import stats_of
from minispec.serve.notebooks import print_highlight

Tensors = dict[str, Tensor]
APPENDED = ["--device", "cpu", "--disable-torch-compile"]
H, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 8  # sizes of every target; a head's layer has them too
SIZE = H // HEADS


class Names(NamedTuple):
    """The ids of a command's models."""

    target: str
    draft: str | None


MADE: dict[str, Names] = {}  # what `make` has written last, by target


class Text(NamedTuple):
    """What all models are made of: the vocabulary's size, the script, and an embedding [V, H]."""

    vocab: int
    ids: list[int]
    embed: Tensor

    def head(self, steps: int = 1) -> Tensor:
        """Return an LM head [V, H] that maps each token of the script to the one `steps` further."""
        weight = torch.zeros_like(self.embed)
        weight[[*self.ids[steps:], *self.ids[:steps]]] = 0.2 * self.embed[self.ids]
        return weight


def text_of(base: Path) -> Text:
    """Return the script in the tokenizer of a model's folder, with an embedding."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    generator = torch.Generator().manual_seed(0)
    return Text(len(tokenizer), script(tokenizer), torch.randn(len(tokenizer), H, generator=generator))


# ---- checkpoints --------------------------------------------------------------------------------------------------


def config(text: Text, architecture: str, **more: Any) -> dict[str, Any]:
    """Return what a config.json of the Llama family says."""
    return {
        "architectures": [architecture], "model_type": "llama", "hidden_size": H, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "vocab_size": text.vocab, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 1024,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "float16", **more,
    }  # fmt: skip


def layer(prefix: str, width: int = H, silent: bool = False, biases: bool = False) -> Tensors:
    """Return a layer's matrices under their published names; a silent one passes its residual on as it is."""
    out = 0.0 if silent else 0.01
    shapes = {
        "self_attn.q_proj": (H, width, 0.2), "self_attn.k_proj": (KV_HEADS * SIZE, width, 0.2),
        "self_attn.v_proj": (KV_HEADS * SIZE, width, 0.2), "self_attn.o_proj": (H, H, out),
        "mlp.gate_proj": (INNER, H, 0.2), "mlp.up_proj": (INNER, H, 0.2), "mlp.down_proj": (H, INNER, out),
    }  # fmt: skip
    tensors = {f"{prefix}{name}.weight": std * torch.randn(rows, cols) for name, (rows, cols, std) in shapes.items()}
    tensors[f"{prefix}post_attention_layernorm.weight"] = torch.ones(H)
    if biases:
        for name in ("q", "k", "v"):
            rows = shapes[f"self_attn.{name}_proj"][0]
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = 0.1 * torch.randn(rows)
    return tensors


def target(text: Text, biases: bool = False, layers: int = LAYERS) -> Tensors:
    """Return the tensors of a whole model that follows the script."""
    tensors = {"model.embed_tokens.weight": text.embed, "lm_head.weight": text.head()}
    tensors["model.norm.weight"] = torch.ones(H)
    for i in range(layers):
        tensors |= layer(f"model.layers.{i}.", biases=biases)
        tensors[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(H)
    return tensors


def keep(width: int, part: int) -> Tensor:
    """Return the matrix [H, width] that reads the part-th H of its input and drops the rest."""
    matrix = torch.zeros(H, width)
    matrix[:, part * H : (part + 1) * H] = torch.eye(H)
    return matrix


def write(folder: Path, stated: dict[str, Any], tensors: Tensors, *, tokenizer: Path | None = None,
          pickled: bool = False) -> None:  # fmt: skip
    """Write a checkpoint in float16, with a tokenizer if it is a whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated))
    tensors = {name: t.half().contiguous() if t.is_floating_point() else t for name, t in tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tokenizer / name, folder)


def eagle2(at: Path, text: Text, base: Path, names: Names) -> None:
    """Llama 2 and SGLang's EAGLE head: fc over (embedding, feature), a layer without an input norm, a pickle."""
    write(at / names.target, config(text, "LlamaForCausalLM"), target(text), tokenizer=base)
    head = {"fc.weight": keep(2 * H, 0), **layer("layers.0.", silent=True)}
    stated = config(text, "LlamaForCausalLMEagle", num_hidden_layers=1, bias=False)
    write(at / names.draft, stated, head, pickled=True)


def fr_spec(at: Path, text: Text, base: Path, names: Names) -> None:
    """Llama 3, an EAGLE head, and FR-Spec's map: a pickled list of the most frequent ids."""
    stated = config(text, "LlamaForCausalLM", rope_theta=500000.0)
    write(at / names.target, stated, target(text), tokenizer=base)
    head = {"fc.weight": keep(2 * H, 0), **layer("layers.0.", silent=True)}
    stated = config(text, "LlamaForCausalLMEagle", num_hidden_layers=1, bias=False, rope_theta=500000.0)
    write(at / names.draft, stated, head, pickled=True)
    others = [i for i in range(text.vocab) if i not in text.ids][:40]
    (maps := at / "thunlp/LLaMA3-Instruct-8B-FR-Spec").mkdir(parents=True, exist_ok=True)
    torch.save(text.ids[::-1] + others, maps / "freq_32768.pt")


def eagle3(at: Path, text: Text, base: Path, names: Names) -> None:
    """Llama 3.1 and an EAGLE-3 head with a draft vocabulary: three streams of the target, offsets in d2t.

    The state is the stream itself, that is the token before the newest; so the head's own LM head looks two ahead.
    """
    stated = config(text, "LlamaForCausalLM", rope_theta=500000.0)
    write(at / names.target, stated, target(text), tokenizer=base)
    ids = torch.tensor(sorted(text.ids))
    head = {
        "fc.weight": keep(3 * H, 0), **layer("midlayer.", width=2 * H, silent=True), "norm.weight": torch.ones(H),
        "midlayer.input_layernorm.weight": torch.ones(H), "midlayer.hidden_norm.weight": torch.ones(H),
        "lm_head.weight": text.head(2)[ids], "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(text.vocab, dtype=torch.bool).index_fill(0, ids, True),
    }  # fmt: skip
    stated = config(text, "LlamaForCausalLMEagle3", num_hidden_layers=1, draft_vocab_size=len(ids))
    write(at / names.draft, stated, head, pickled=True)


def mimo(at: Path, text: Text, base: Path, names: Names) -> None:
    """MiMo: biases on q, k, v, and the MTP layer among the target's tensors; hidden state first, then embedding."""
    prefix = "model.mtp_layers.0."
    ones = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
    mtp = {f"{prefix}{name}.weight": torch.ones(H) for name in ones}
    mtp |= {f"{prefix}input_proj.weight": keep(2 * H, 1), **layer(prefix, silent=True, biases=True)}
    stated = config(text, "MiMoForCausalLM", model_type="mimo", attention_bias=True, num_nextn_predict_layers=1)
    write(at / names.target, stated, {**target(text, biases=True), **mtp}, tokenizer=base)


def standalone(at: Path, text: Text, base: Path, names: Names) -> None:
    """Two Qwen2.5 of one tokenizer, the draft of two layers."""
    stated = config(text, "Qwen2ForCausalLM", model_type="qwen2")
    write(at / names.target, stated, target(text, biases=True), tokenizer=base)
    draft = {**stated, "num_hidden_layers": 2}
    if names.draft:
        write(at / names.draft, draft, target(text, biases=True, layers=2), tokenizer=base)


def plain(at: Path, text: Text, base: Path, names: Names) -> None:
    """Qwen3, whose queries and keys are normed."""
    norms = {f"model.layers.{i}.self_attn.{name}_norm.weight": torch.ones(SIZE) for i in range(LAYERS) for name in "qk"}
    stated = config(text, "Qwen3ForCausalLM", model_type="qwen3", head_dim=SIZE)
    write(at / names.target, stated, target(text) | norms, tokenizer=base)


def dflash(at: Path, text: Text, base: Path, names: Names) -> None:
    """Qwen3 or Llama, and z-lab's DFlash: the masks, whose embedding is zero, take in the newest token by attention.

    Context rows hold nothing, as do masks, and all rows weigh the same. So each mask predicts what follows the newest
    token, which is right in the first row alone.
    """
    mask = next(i for i in range(text.vocab) if i not in text.ids)
    norms = {f"self_attn.{name}_norm.weight": torch.ones(SIZE) for name in "qk"}
    qwen = names.target.startswith("Qwen")
    own = {f"model.layers.{i}.{name}": x for i in range(LAYERS) for name, x in norms.items()}
    whole = target(text) | (own if qwen else {})
    whole["model.embed_tokens.weight"] = text.embed.index_fill(0, torch.tensor([mask]), 0.0)
    stated = config(text, "Qwen3ForCausalLM", model_type="qwen3", head_dim=SIZE)
    llama = config(text, "LlamaForCausalLM", head_dim=SIZE)
    write(at / names.target, stated if qwen else llama, whole, tokenizer=base)
    draft = {"fc.weight": keep(H, 0), "hidden_norm.weight": torch.zeros(H), "norm.weight": torch.ones(H),
             **layer("layers.0.", silent=True), **{f"layers.0.{name}": x for name, x in norms.items()},
             "layers.0.input_layernorm.weight": torch.ones(H)}  # fmt: skip
    for name, factor in (("q", 0.0), ("k", 1.0), ("v", 10.0), ("o", 10.0)):
        draft[f"layers.0.self_attn.{name}_proj.weight"] = factor * torch.eye(H)
    stated |= {
        "architectures": ["DFlashDraftModel"], "num_hidden_layers": 1, "num_target_layers": LAYERS,
        "num_key_value_heads": HEADS, "layer_types": ["full_attention"], "block_size": 16,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": [1]},
    }  # fmt: skip
    write(at / names.draft, stated, draft)


def dspark(at: Path, text: Text, base: Path, names: Names) -> None:
    """Qwen3, and DeepSeek's DSpark: DFlash's block, and a Markov head that knows what follows each token."""
    dflash(at, text, base, names)
    folder = at / str(names.draft)
    stated = json.loads((folder / "config.json").read_text())
    stated |= stated.pop("dflash_config") | {
        "architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": H, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True, "num_anchors": 512,
    }  # fmt: skip
    draft = load_file(folder / "model.safetensors") | {
        "markov_head.markov_w1.weight": text.embed, "markov_head.markov_w2.weight": 10 * text.head(),
        "confidence_head.proj.weight": torch.zeros(1, 2 * H), "confidence_head.proj.bias": torch.ones(1),
    }  # fmt: skip
    write(folder, stated, draft)


def make(at: Path, text: Text, base: Path, command: Command) -> None:
    """Write the checkpoints that a command names, and the file of its --speculative-adaptive-config."""
    asked = dict(zip(command.argv, command.argv[1:], strict=False))
    names = Names(asked.get("--model") or asked["--model-path"],
                  asked.get("--speculative-draft-model-path") or asked.get("--speculative-draft"))  # fmt: skip
    method = asked.get("--speculative-algorithm") or asked.get("--speculative-algo", "NONE")
    makers = {"NONE": plain, "EAGLE": eagle2, "EAGLE3": eagle3, "DFLASH": dflash, "DSPARK": dspark,
              "STANDALONE": standalone, "NGRAM": standalone}  # fmt: skip
    maker = mimo if "MiMo" in names.target else fr_spec if "--speculative-token-map" in asked else makers[method]
    if MADE.get(names.target) != names:
        MADE[names.target] = names
        torch.manual_seed(1)
        maker(at, text, base, names)
    (at / "adaptive_spec.json").write_text('{"ema_alpha": 0.2, "1": {"candidate_steps": [1, 3]}}')


class Case(NamedTuple):
    """A command that is launched, and what it gives if it is read rightly."""

    command: Command
    shape: tuple[int | None, int | None, int]  # steps, topk and nodes
    accepts: float  # tokens a verify step, at least


def accepted(method: str, steps: int | None) -> float:
    """Return the tokens a step that the checkpoints above are good for, less a half."""
    if method in ("EAGLE3", "DFLASH"):  # their first draft is right
        return 1.8
    return 1.9 if steps is None else steps + 0.5


def cases() -> list[Case]:
    """Return one case for each kind of command that differs on a CPU."""
    found: dict[object, Case] = {}
    for command in DOCUMENTED:
        parsed = config_from_args(command.argv, {})
        values = {f.name: getattr(parsed, f.name) for f in FLAGS if not f.name.startswith("cuda_graph")}
        if parsed.enable_deterministic_inference:  # without a drafter, so one model is enough
            values["model_path"] = None
        key = tuple(sorted((k, v) for k, v in values.items() if k not in IRRELEVANT))
        steps, topk, nodes = (values[name] for name in NUMBERS)
        if parsed.algorithm in ("DFLASH", "DSPARK"):
            steps, topk, nodes = 1, 1, nodes or (16 if parsed.algorithm == "DFLASH" else 8)
        elif steps is not None:
            nodes = min(nodes, candidate_count(steps, topk) + 1)
        if parsed.algorithm == "NONE":
            nodes = 1
        least = 1.0 if parsed.adaptive or nodes == 1 else accepted(parsed.algorithm, steps)
        found.setdefault(key, Case(command, (steps, topk, nodes), least))
    return list(found.values())


IRRELEVANT = ("log_level", "host", "port", "trust_remote_code")
CASES = cases()


# ---- the server, as launched --------------------------------------------------------------------------------------


class Launched:
    """A documented command running in a folder, with a free port."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.port = free_port()
        environ, argv, _ = command
        env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **environ}
        self.process = launch(*argv, "--port", str(self.port), *APPENDED, env=env, cwd=folder)

    def get(self, path: str) -> Any:
        """Return the JSON of a path."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return json.load(answer)

    def wait(self, seconds: float = 300) -> None:
        """Wait until it is ready."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except OSError:  # nobody listens yet, or 503
                time.sleep(0.2)
        self.process.kill()
        pytest.fail(f"not ready: {self.process.communicate()[1]}")

    def stop(self) -> str:
        """End it and return its log."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.communicate(timeout=60)[1]
        finally:
            self.process.kill()


class InThread:
    """The same in a thread of the tests: the command is parsed as a server parses it, and nothing is imported anew."""

    def __init__(
        self, command: Command, folder: Path, patch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
    ) -> None:
        environ, argv, _ = command
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        config = config_from_args([*argv, "--port", "0", *APPENDED], environ)
        self.running, self.notes, self.log = Running(config), config.notes, log
        self.port = self.running.port

    def get(self, path: str) -> Any:
        """Return the JSON of a path."""
        return self.running.ok(path)

    def wait(self, seconds: float = 300) -> None:
        """Wait until it is ready."""
        engine = self.running.server.engine
        assert engine.loaded.wait(seconds) and engine.error is None, engine.error

    def stop(self) -> str:
        """End it and return its log."""
        self.running.stop()
        return "\n".join([*self.notes, self.log.text])


@pytest.fixture(scope="module")
def text(demo_folder: Path) -> Text:
    """The script in the default model's tokenizer."""
    return text_of(demo_folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the commands run in."""
    MADE.clear()
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{CASES.index(case)}-{case.shape}")
def test_a_documented_command_serves_the_documented_call(
    case: Case, text: Text, demo_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    assert len(CASES) == 22
    make(folder, text, demo_folder, case.command)
    alone = case == CASES[0]  # in a process of its own, which takes seconds to begin
    launched = Launched(case.command, folder) if alone else InThread(case.command, folder, monkeypatch, caplog)
    try:
        launched.wait()
        asked = case.command.argv
        model = next(value for flag, value in zip(asked, asked[1:], strict=False) if flag.startswith("--model"))
        client = openai.Client(base_url=f"http://127.0.0.1:{launched.port}/v1", api_key="None", max_retries=0)
        response = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "List 3 countries and their capitals."}],
            temperature=0,
            max_tokens=64,
        )
        answer = response.choices[0].message.content
        state = launched.get("/server_info")["internal_states"][0]
    finally:
        log = launched.stop()
    assert "Traceback" not in log and (not alone or launched.process.returncode == 0), log
    assert response.model == model and response.usage.completion_tokens == 64
    cycle = AutoTokenizer.from_pretrained(demo_folder).decode(text.ids * 8)
    assert len(answer) > 100 and answer.strip("\N{REPLACEMENT CHARACTER}") in cycle, answer
    shape = [state[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    if case.command.argv[-1] == "adaptive_spec.json":  # the steps in use, which are the policy's
        assert shape[0] in (0, 1, 3) and state["speculative_adaptive_config"] == "adaptive_spec.json"
    assert tuple(shape[1:]) == case.shape[1:] and (shape[0] == case.shape[0] or "--speculative-adaptive" in asked)
    assert state["avg_spec_accept_length"] >= case.accepts
    for flag, value in zip(asked, asked[1:], strict=False):  # the line that says what is done instead
        if flag.startswith("--cuda-graph"):
            assert f"--cuda-graph-max-bs {value} changes nothing" in log
        assert flag != "--trust-remote-code" or f"{flag} is without effect" in log


def test_without_numbers_the_documented_ones_are_told_and_those_of_lookups_apart(
    text: Text, demo_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    numbers = set(map(flag_name, NUMBERS))
    for number, documented in ((0, (5, 4, 8)), (4, (3, 1, 4)), (6, (3, 1, 4))):  # EAGLE on Llama, MiMo, STANDALONE
        make(folder, text, demo_folder, command := DOCUMENTED[number])
        pairs = zip(["", *command.argv], command.argv, strict=False)
        bare = [word for before, word in pairs if not {before, word} & numbers]
        llm = LLM(config=config_from_args([*bare, *APPENDED], {}))
        stats, line = stats_of(llm.scheduler), startup_line(llm.config, llm.scheduler)
        assert tuple(stats[name] for name in NUMBERS) == documented
        assert stats["speculative_lookup_num_draft_tokens"] == 8
        steps, topk, nodes = documented
        assert f"num_steps={steps}, eagle_topk={topk}, draft_tokens={nodes}, lookup_draft_tokens=8" in line


# The first cell of each older page, with the import changed: that of February 2025 names a port, the others get one.
NAMED = """
from minispec.serve.notebooks import execute_shell_command, wait_for_server, terminate_process

server_process = execute_shell_command(
    '''
python3 -m sglang.launch_server %s
'''
)
wait_for_server("http://localhost:30020")
"""
FREE = """
from minispec.serve.notebooks import launch_server_cmd, print_highlight, wait_for_server, terminate_process

server_process, port = launch_server_cmd(
    '''
python3 -m sglang.launch_server %s
'''
)
wait_for_server(f"http://localhost:{port}", process=server_process)
"""
# The number of their command among the documented ones. Those of later pages differ from that of March 2025 in numbers.
CELLS = {"February 2025": (NAMED, 37), "March 2025": (FREE, 36), "March 2026": (FREE, 17)}
CALL = """
import openai

client = openai.Client(base_url=f"http://127.0.0.1:{port}/v1", api_key="None")
response = client.chat.completions.create(
    model="meta-llama/Llama-2-7b-chat-hf",
    messages=[{"role": "user", "content": "List 3 countries and their capitals."}],
    temperature=0,
    max_tokens=64,
)
print_highlight(f"Response: {response}")
terminate_process(server_process)
"""


@pytest.mark.parametrize(("cell", "command"), CELLS.values(), ids=CELLS)
def test_a_cell_of_the_older_pages_runs_with_one_import_changed(
    cell: str, command: int, text: Text, demo_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder, text, demo_folder, DOCUMENTED[command])
    cell %= " \\\n    ".join(DOCUMENTED[command].argv)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    port = free_port()
    shown: list[str] = []
    names: dict[str, Any] = {"port": port, "print_highlight": print}
    exec(cell.replace("30020", str(port)), names)
    names["print_highlight"] = lambda said: (shown.append(said), print_highlight(said))
    exec(CALL, names)
    assert shown[0].startswith("Response: ChatCompletion(") and "completion_tokens=64" in shown[0]
    assert names["server_process"].returncode == 0
