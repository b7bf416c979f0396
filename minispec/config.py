"""Launch flags: one frozen dataclass, checked once, from which the command line is derived.

Names and defaults are SGLang's where they make sense here, so that a launch command written for SGLang starts. Flags
that act are the fields of `Config`. SGLang's other flags are in the tables of `load/sglang_flags.py`. Any other flag is
an error.

A command line (`load/flags.py`) and the library (`LLM(model, page_size=32)`) both make a `Config`, with the same checks
and the same messages. What depends on the machine (dtype auto, chunk size, pool size) is resolved later.

Read next: `load/flags.py`, the command line, and `load/build.py`, which turns a `Config` into an engine.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from minispec.load.chat_templates import NAMED, is_template
from minispec.load.sglang_flags import INSTEAD
from minispec.replies.formats import CALLS, THOUGHTS

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  # served when no model is named
LEARNED = ("EAGLE", "EAGLE3", "DFLASH", "DSPARK")  # drafters with a trained head; NEXTN is another name of EAGLE
GROWN = (*LEARNED, "STANDALONE")  # drafters that draft their trees on the device, and load a draft model or head
NOT_SERVED = {  # SGLang's other methods -> what they need and minispec lacks
    "UNO": "LoRA adapters on the target",
    "FROZEN_KV_MTP": "an MTP layer that reads the target's own keys and values",
}  # fmt: skip
HEADS = Path(__file__).parent / "heads"  # the draft heads and models that ship for the default model
# The folders in `HEADS`. NEXTN is another name of EAGLE, but for the default model it loads another head, an MTP layer.
SHIPPED = {"EAGLE3": "eagle3", "EAGLE": "eagle", "NEXTN": "mtp", "STANDALONE": "standalone"}
MAX_NODES = 128  # of a draft tree: the nodes of one request must fit in a query block of FlexAttention
# From this batch on, trees may cost a GPU more time than they save. So there `policy.py` chooses a step's shape even if
# flags give a tree's numbers.
WIDE = 8
OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:Class, the name of a user's own drafter
# Flags that concern every drafter but NONE.
_SHARED = ("speculative_algorithm", "speculative_num_draft_tokens", "speculative_adaptive",
           "speculative_accept_threshold_single", "speculative_accept_threshold_acc")  # fmt: skip
# The numbers that give a tree its shape, in the order in which shapes are written: steps/topk/nodes.
NUMBERS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
# Shapes of trees that no flag gives, steps/topk/nodes: SGLang's two, by the target's architecture, and for a head that
# ships, on a CPU, the one that is fastest on two cores, greedy and sampled (docs/log.md).
BUSHY, CHAIN, CPU_SHAPE = (5, 4, 8), (3, 1, 4), (3, 4, 8)
BLOCK, WINDOW = "speculative_dflash_block_size", "speculative_draft_window_size"
DRAFTS, THRESHOLD = "speculative_dspark_block_size", "speculative_dspark_confidence_threshold"
BLOCKS = {BLOCK: ("DFLASH",), WINDOW: ("DFLASH", "DSPARK"), DRAFTS: ("DSPARK",), THRESHOLD: ("DSPARK",)}  # whose
# Numbers of NGRAM that ascend: field -> how far it must lie above the one before. An indexed path must be longer than
# the longest match, or a match of that length could draft nothing, and the trie must hold a path.
NGRAM_ORDER = (
    {"speculative_ngram_min_match_window_size": 0, "speculative_ngram_max_match_window_size": 0,
     "speculative_ngram_branch_length": 1, "speculative_ngram_capacity": 1},
    {"speculative_ngram_min_bfs_breadth": 0, "speculative_ngram_max_bfs_breadth": 0},
)  # fmt: skip
TORCHRUN = "TORCHELASTIC_RUN_ID"  # an environment variable that torchrun sets in the processes it starts
_DTYPES = {"half": "float16", "float": "float32"}  # alias -> name
_LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")
_LEVELS = ("debug", "info", "warning", "error", "critical")
Ints = tuple[int, ...]  # type of a flag that takes one or several integers


def _default_shapes(part: int) -> str:
    """Return what one number of a tree's shape is by default: 0 the steps, 1 topk, 2 the nodes."""
    return f"{BUSHY[part]} for Llama, {CHAIN[part]} for others and STANDALONE, {CPU_SHAPE[part]} on a CPU if it ships"


def _flag(default: Any, group: str, help: str, *, choices: Sequence[Any] = (), low: float | None = None,
          high: float | None = None) -> Any:  # fmt: skip
    """Declare a flag: default, section of --help, effect, and values (`low` to `high`, both included)."""
    meta = {"group": group, "help": help, "choices": tuple(choices), "low": low, "high": high}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every launch flag, with underscores for dashes; a ValueError names flag, value given and values allowed."""

    model_path: str | None = _flag(None, "Model", f"Hugging Face id, folder or GGUF file; default: {DEFAULT_MODEL}")
    tokenizer_path: str | None = _flag(None, "Model", "id, folder or GGUF file of a tokenizer; default: the model's")
    revision: str | None = _flag(None, "Model", "branch, tag or commit of a Hugging Face id; default: main")
    load_format: str = _flag(
        "auto", "Model", "weight files to read; auto prefers safetensors, dummy draws random weights from config.json",
        choices=_LOAD_FORMATS,
    )  # fmt: skip
    download_dir: str | None = _flag(
        None, "Model", "FOLDER that models, heads and token maps of the hub are kept in; default: the hub's own cache"
    )
    dtype: str = _flag(
        "auto", "Model", "auto: bfloat16 on CUDA and on CPUs with avx512_bf16 or AMX, else float32",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )  # fmt: skip
    quantization: str | None = _flag(
        None, "Model", "on a CPU, where drafters keep their weights, int8: 8 bits, one scale an output channel; int4: "
        "4 bits in groups of 32; gguf: the 4 bits of a GGUF file, and of the default model's. On CUDA fp8: weights "
        "and activations of 8 bits; default: 16 bits, or fp8 as the files are",
        choices=("int8", "int4", "gguf", "fp8"),
    )  # fmt: skip
    device: str = _flag("auto", "Model", "auto takes CUDA when there is one", choices=("auto", "cpu", "cuda"))
    context_length: int | None = _flag(None, "Model", "longest prompt plus output; default: the model's", low=2)
    chat_template: str | None = _flag(
        None, "Model", f"FILE with a Jinja chat template, or {', '.join(NAMED)}; default: the model's own"
    )
    tool_call_parser: str | None = _flag(
        None, "Model", "how the model writes calls of tools; default: as its chat template shows it",
        choices=tuple(CALLS),
    )  # fmt: skip
    reasoning_parser: str | None = _flag(
        None, "Model", "how the model marks its reasoning, which answers then have as reasoning_content; default: it "
        "is not told apart", choices=tuple(THOUGHTS),
    )  # fmt: skip
    trust_remote_code: bool = _flag(False, "Model", "accepted and without effect: code of a model repo never runs here")
    random_seed: int | None = _flag(
        None, "Model", "what seeds of requests without one, and dummy weights, are drawn from; default: another at "
        "each start, 0 for weights", low=0, high=2**63 - 1,
    )  # fmt: skip
    enable_deterministic_inference: bool = _flag(
        False, "Model", "a request's text depends on its prompt, parameters and seed alone in bfloat16 too, and the "
        "seed of a request without one is 42; on a CPU, where the server listens when it is compiled",
    )  # fmt: skip

    served_model_name: str | None = _flag(None, "Server", "name in /v1/models and in answers; default: the model path")
    strict_model_name: bool = _flag(
        False, "Server", "answer 404 to a request that names another model; without it the name is not looked at"
    )
    strict_max_tokens: bool = _flag(
        False, "Server", "answer 400 to a request for more tokens than the context has left, in place of fewer tokens"
    )
    host: str = _flag("127.0.0.1", "Server", "address to listen on")
    port: int = _flag(30000, "Server", "port to listen on; 0 takes a free one", low=0, high=65535)
    api_key: str | None = _flag(
        None,
        "Server",
        "clients must send it as a bearer token, except to /health* and for the page at /; default: none",
    )
    admin_api_key: str | None = _flag(
        None, "Server",
        "key for /flush_cache, /set_internal_state, /replicas/{i}/restart, external corpora and aborting others' "
        "requests, where --api-key is not enough then; it opens every other path too; default: none",
    )  # fmt: skip
    ssl_keyfile: str | None = _flag(None, "Server", "FILE with the private key to speak TLS with; default: no TLS")
    ssl_certfile: str | None = _flag(None, "Server", "FILE with its certificate and those above it; default: no TLS")
    cors_origins: str | None = _flag(
        None,
        "Server",
        "web pages that may call this server: their origins, separated by commas, or * for any; "
        "default: none but the server's own",
    )
    allowed_hosts: str | None = _flag(
        None, "Server", "names under which clients may reach the server beside IP addresses and localhost, separated "
        "by commas, or * for any: a proxy's name, say; default: none on a loopback address, else any",
    )  # fmt: skip
    sampling_defaults: str = _flag(
        "model", "Server", "what a request to /v1 leaves out comes from generation_config.json, or is OpenAI's default",
        choices=("model", "openai"),
    )  # fmt: skip
    stream_interval: int = _flag(1, "Server", "tokens between two events of a stream", low=1)
    enable_cache_report: bool = _flag(False, "Server", "report cached prompt tokens in usage.prompt_tokens_details")
    enable_metrics: bool = _flag(False, "Server", "serve /metrics to Prometheus; needs the extra minispec[metrics]")
    wait_until_compiled: bool = _flag(
        False, "Server", "compile everything before the first request, as on CUDA; without it a server on a "
        "CPU answers eagerly at once, and processes beside it compile"
    )  # fmt: skip
    compiled_files: str | None = _flag(
        None, "Server", "a folder that `python -m minispec.compile` filled with compiled functions: what fits this "
        "machine is taken from there, if only this user and root can write it; for a CPU; default: none"
    )  # fmt: skip
    watchdog_timeout: float = _flag(
        300.0, "Server", "seconds that a step may take, compiling aside: then /health is 503 and the log has all "
        "stacks, and after twice as many the process ends; 0: any number", low=0.0, high=1e6,
    )  # fmt: skip
    shutdown_timeout: float = _flag(
        25.0, "Server", "seconds that requests under way have to finish after Ctrl-C or SIGTERM, while new ones get a "
        "503; a second signal ends them at once", low=0.0,
    )  # fmt: skip
    request_timeout: float | None = _flag(
        None, "Server", "seconds after which a request for text ends with an error, its time in the queue included; "
        "default: none", low=0.0,
    )  # fmt: skip
    skip_server_warmup: bool = _flag(False, "Server", "report ready without first answering a request of our own")

    mem_fraction_static: float | None = _flag(
        None, "Memory and scheduling", "on CUDA the share of the GPU's memory for weights and KV pages of target and "
        "draft; on a CPU the most that KV pages may take of what is free when the weights are loaded; default: on "
        "CUDA by the GPU, on a CPU a quarter", low=0.0, high=1.0,
    )  # fmt: skip
    max_total_tokens: int | None = _flag(
        None, "Memory and scheduling", "rows in the KV pool; default: on a CPU --max-running-requests times the "
        "context or 4096, within --mem-fraction-static; on CUDA what that leaves", low=1,
    )  # fmt: skip
    max_running_requests: int | None = _flag(
        None, "Memory and scheduling", "requests decoded together; default: 8 on a CPU, 48 on CUDA", low=1
    )
    max_queued_requests: int = _flag(
        1024, "Memory and scheduling", "requests that may wait beyond the running ones; more get a 503", low=1
    )
    page_size: int = _flag(64, "Memory and scheduling", "rows of a KV page", choices=(16, 32, 64, 128))
    chunked_prefill_size: int | None = _flag(
        None, "Memory and scheduling", "most prompt tokens a step, -1: all; default: 512 on CPU, 2048 on CUDA", low=-1
    )
    disable_radix_cache: bool = _flag(False, "Memory and scheduling", "share no prefixes between requests")
    disable_overlap_schedule: bool = _flag(
        False, "Memory and scheduling", "finish each step before the next one begins, as on a CPU and with NGRAM always"
    )
    disable_torch_compile: bool = _flag(False, "Memory and scheduling", "run eagerly: starts at once, decodes slower")
    cuda_graph_max_bs: int | None = _flag(
        None, "Memory and scheduling", "largest batch whose decode steps are captured as CUDA graphs, as larger ones "
        "run uncaptured; default: by the GPU's memory, 8 to 512", low=1,
    )  # fmt: skip
    cuda_graph_bs: Ints | None = _flag(
        None, "Memory and scheduling", "the batches whose decode steps are captured, which others are padded to; the "
        "largest becomes --cuda-graph-max-bs; default: as few as padding allows", low=1,
    )  # fmt: skip
    disable_cuda_graph: bool = _flag(False, "Memory and scheduling", "capture no CUDA graphs: starts sooner")

    tp_size: int = _flag(
        1, "Several devices", "ranks that the model is spread over, a process and a device each: docs/scaling.md", low=1
    )
    nnodes: int = _flag(1, "Several devices", "machines that the ranks are on, as many on each", low=1)
    node_rank: int = _flag(0, "Several devices", "which of the machines this is; number 0 serves", low=0)
    dist_init_addr: str | None = _flag(
        None, "Several devices", "HOST:PORT of machine 0, where the ranks meet; default: none, which one machine needs"
    )
    dist_timeout: int = _flag(300, "Several devices", "seconds to wait until all ranks have met", low=1)
    dp_size: int = _flag(
        1, "Several devices", "replicas of the model, with --tp-size ranks each, behind one address; above 1 it needs "
        "the extra minispec[cluster]: docs/scaling.md", low=1,
    )  # fmt: skip
    ray_address: str | None = _flag(
        None, "Several devices", "HOST:PORT of a Ray cluster, or auto for the one that this machine is part of, to "
        "place replicas on; default: on this machine alone",
    )  # fmt: skip

    speculative_algorithm: str | None = _flag(
        None, "Speculation", "NONE, NGRAM, EAGLE (alias NEXTN), EAGLE3, DFLASH, DSPARK or STANDALONE, in any case, or "
        "module:Class of your own (docs/adding-a-drafter.md); default: EAGLE3 for the default model; for a named one "
        "NONE, or a MiMo model's own MTP layer",
    )  # fmt: skip
    speculative_draft_model_path: str | None = _flag(
        None,
        "Speculation",
        "id or folder of the draft head or model, or a model's GGUF file; default: the one "
        "that ships for the default model, and MiMo's own",
    )
    speculative_draft_model_revision: str | None = _flag(
        None, "Speculation", "branch, tag or commit of that id; default: main"
    )
    speculative_draft_load_format: str | None = _flag(
        None, "Speculation", "weight files of the draft to read; default: as --load-format", choices=_LOAD_FORMATS[:3]
    )
    speculative_draft_model_quantization: str | None = _flag(
        None, "Speculation", "fp8 on CUDA, or unquant; default: fp8 where --quantization is fp8, else unquant",
        choices=("fp8", "unquant"),
    )  # fmt: skip
    speculative_num_steps: int | None = _flag(
        None, "Speculation", "rounds of drafting (with --speculative-eagle-topk and --speculative-num-draft-tokens: "
        f"all or none; a chain needs no number of tokens); DFLASH and DSPARK have one; default: {_default_shapes(0)}",
        low=1, high=32,
    )  # fmt: skip
    speculative_eagle_topk: int | None = _flag(
        None, "Speculation", f"branches of a draft round; default: {_default_shapes(1)}", low=1, high=32
    )
    speculative_token_map: str | None = _flag(
        None,
        "Speculation",
        "FILE, or owner/repo/file of the hub, of the target ids a head or draft model may draft, "
        "most frequent first (FR-Spec); default: none, but for the EAGLE head that ships",
    )
    speculative_num_draft_tokens: int | None = _flag(
        None, "Speculation", f"nodes of a draft tree, root included; default: {_default_shapes(2)}; NGRAM: its "
        "longest match window, or the paths indexed where they are shorter; DFLASH: its block; DSPARK: one more than "
        "its block", low=1, high=MAX_NODES,
    )  # fmt: skip
    speculative_dflash_block_size: int | None = _flag(
        None, "Speculation", "rows of DFLASH's block, the newest token's included; in a chain the number of draft "
        "tokens means the same; default: the checkpoint's", low=2, high=MAX_NODES,
    )  # fmt: skip
    speculative_draft_window_size: int | None = _flag(
        None, "Speculation", "newest rows that the block of DFLASH or DSPARK reads, its own included; default: the "
        "whole text", low=2,
    )  # fmt: skip
    speculative_dspark_block_size: int | None = _flag(
        None, "Speculation", "drafts of DSPARK's block; in a chain the number of draft tokens is one more; default: "
        "the checkpoint's", low=1, high=MAX_NODES - 1,
    )  # fmt: skip
    speculative_dspark_confidence_threshold: float = _flag(
        0.0, "Speculation", "DSPARK: a draft of less confidence, and what follows it, is not verified; 0 verifies the "
        "whole tree, whose size follows the confidences", low=0.0, high=1.0,
    )  # fmt: skip
    speculative_adaptive: bool | None = _flag(
        None,
        "Speculation",
        "choose each step's shape, plain or one of the batch's trees, by what it is worth; default: unless numbers of "
        "steps, branches or nodes are given, which then stay fixed; on CUDA they bound the trees, which are smaller in "
        f"larger batches (docs/cuda.md), and from batch {WIDE} on shapes are chosen all the same",
    )
    speculative_adaptive_config: str | None = _flag(
        None, "Speculation", "FILE of JSON with candidate_steps by least batch: a step drafts so many rounds or none; "
        "default: any number of rounds that the drafter's trees have",
    )  # fmt: skip
    speculative_lookup: bool | None = _flag(
        None, "Speculation", "beside a draft head or model look up texts as NGRAM does, and verify for each request "
        "the better bet; on CUDA steps then do not overlap; default: on a CPU, unless numbers are given, and elsewhere "
        "while an external corpus is loaded",
    )  # fmt: skip
    speculative_accept_threshold_single: float = _flag(
        1.0, "Speculation", "accept any draft of at least this probability; below 1 sampled output is not exact",
        low=0.0, high=1.0,
    )  # fmt: skip
    speculative_accept_threshold_acc: float = _flag(
        1.0, "Speculation", "divide what decides acceptance by this; below 1 sampled output is not exact", low=0.0,
        high=1.0,
    )  # fmt: skip
    simulate_acc_len: float | None = _flag(
        None, "Speculation", "for measuring speed, with dummy weights say: mean number of tokens that a step with a "
        "tree emits, whatever the target picks, at most the trees' depth plus 1; the output is junk; default: what the "
        "target picks", low=1.0,
    )  # fmt: skip
    speculative_ngram_min_match_window_size: int = _flag(
        1, "Speculation", "shortest suffix looked up, in the trie and in a request's own text (there at least 2 "
        "tokens)", low=1,
    )  # fmt: skip
    speculative_ngram_max_match_window_size: int = _flag(
        12, "Speculation", "longest suffix looked up, of a request's own text and in the trie", low=1
    )
    speculative_ngram_min_bfs_breadth: int = _flag(1, "Speculation", "trie: breadth after the longest match", low=1)
    speculative_ngram_max_bfs_breadth: int = _flag(10, "Speculation", "trie: breadth after the shortest match", low=1)
    speculative_ngram_match_type: str = _flag(
        "BFS", "Speculation", "trie: continuations by recency (BFS) or by frequency (PROB)", choices=("BFS", "PROB")
    )
    speculative_ngram_branch_length: int = _flag(18, "Speculation", "trie: length of the paths indexed", low=2)
    speculative_ngram_capacity: int = _flag(10_000_000, "Speculation", "trie: most nodes", low=3)

    speculative_ngram_external_corpus_path: str | None = _flag(
        None, "Speculation", "FILE of JSON lines, texts that lookups draft from, as corpus external; more come by POST "
        "/add_external_corpus; default: none",
    )  # fmt: skip
    speculative_ngram_external_corpus_max_tokens: int = _flag(
        10_000_000, "Speculation", "most tokens of all external corpora together", low=1, high=2**31 - 2
    )
    speculative_ngram_corpus_folder: str | None = _flag(
        None, "Speculation", "FOLDER below which file_path of /add_external_corpus may name files; default: none may"
    )
    speculative_ngram_learned_folder: str | None = _flag(
        None, "Speculation", "FOLDER in which a server that ends saves the texts of its newest requests, but none with "
        "a cache salt; the next one drafts from them, as corpus learned; default: nothing is saved",
    )  # fmt: skip

    log_level: str = _flag("info", "Logging", "how much is logged", choices=_LEVELS)
    log_level_http: str = _flag(
        "warning", "Logging", "how much is logged of HTTP: info is a line for each answer", choices=_LEVELS
    )
    log_requests: bool = _flag(
        False, "Logging", "log each request's sizes, and its parameters that are not the defaults (never its text)"
    )
    decode_log_interval: int = _flag(40, "Logging", "decode steps between two log lines", low=1)

    draft_path: str | None = field(default=None, init=False)  # the draft model or head: as named, or a shipped one
    # What environment variables of SGLang's say, on a command line: `load/flags.py`.
    force_greedy: bool = False  # with NGRAM every request's temperature counts as 0
    record_step_time: bool = False  # /server_info has the times of the newest decode steps
    notes: tuple[str, ...] = ()  # lines to log, one for each flag that does not act as given

    def __post_init__(self) -> None:
        for name in ("speculative_algorithm", "speculative_ngram_match_type"):
            value = getattr(self, name)
            if isinstance(value, str) and ":" not in value:  # module:Class is kept as it is
                self._put(name, value.upper())
        for name, values in INSTEAD.items():
            given = getattr(self, name)
            if type(given) in (int, str) and given in values:
                self._put(name, values[given][0])
                self._note(f"{flag_name(name)} {given} is taken as {values[given][0]}: {values[given][1]}")
        asked = self.speculative_algorithm
        if asked == "NEXTN":
            self._put("speculative_algorithm", "EAGLE")
        for f in FLAGS:
            _check(f, getattr(self, f.name))
        self._put_graph_batches()
        self._put("draft_path", self.speculative_draft_model_path or self._shipped(asked or self.algorithm))
        self._put("speculative_accept_threshold_acc", max(self.speculative_accept_threshold_acc, 1e-9))  # a divisor
        self._put("dtype", _DTYPES.get(self.dtype, self.dtype))
        self._check_together()

    def _check_together(self) -> None:
        """Raise ValueError if a value is impossible, alone or beside the others."""
        if (lacking := NOT_SERVED.get(self.speculative_algorithm or "")) is not None:
            raise ValueError(f"--speculative-algorithm {self.speculative_algorithm} is not served yet: it needs "
                             f"{lacking}")  # fmt: skip
        if self.speculative_algorithm not in (None, "NONE", "NGRAM", *GROWN) and not self.is_own_drafter:
            raise ValueError("--speculative-algorithm must be NONE, NGRAM, EAGLE, EAGLE3, NEXTN, DFLASH, DSPARK or "
                             "STANDALONE, or module:Class of your own, got "
                             f"{self.speculative_algorithm!r}")  # fmt: skip
        if self.mem_fraction_static in (0.0, 1.0):
            raise ValueError(f"--mem-fraction-static must lie between 0 and 1, got {self.mem_fraction_static:g}")
        if self.chunked_prefill_size == 0:
            raise ValueError("--chunked-prefill-size must be positive, or -1 for no limit, got 0")
        for origin in self.origins - {"*"}:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*]+", origin):
                raise ValueError("--cors-origins must be * or origins like https://host:port, separated by commas, "
                                 f"got {origin!r}")  # fmt: skip
        for name in (self.hosts or frozenset()) - {"*"}:
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError("--allowed-hosts must be * or names without scheme and port, separated by commas, "
                                 f"got {name!r}")  # fmt: skip
        self._check_tls()
        self._check_ranks()
        if self.revision is not None and self.model_path is None:
            raise ValueError("--revision needs --model-path: the default model has one revision")
        template = self.chat_template
        if template is not None and template not in NAMED and not is_template(template):
            if not Path(template).is_file():
                raise ValueError(f"--chat-template must be a file with a Jinja template or one of {', '.join(NAMED)}, "
                                 f"got {template!r}, which is no file")  # fmt: skip
        self._check_drafter()
        for name, value in self.ngram.items():
            if value != getattr(self, name):
                self._note(f"{flag_name(name)} is taken as {value}, since other flags leave no room for its default, "
                           f"{getattr(self, name)}")  # fmt: skip

    def _check_tls(self) -> None:
        """Raise ValueError unless key and certificate are both given, as files that exist, or neither is."""
        for name, other in (("ssl_keyfile", "ssl_certfile"), ("ssl_certfile", "ssl_keyfile")):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{flag_name(name)} must be a file, got {path!r}, which is none")
            if path is not None and getattr(self, other) is None:
                raise ValueError(f"{flag_name(name)} needs {flag_name(other)} beside it")

    def _check_ranks(self) -> None:
        """Raise ValueError if ranks, replicas, machines and the addresses where they meet do not fit together."""
        if self.tp_size % self.nnodes:
            raise ValueError(f"--tp-size must be a multiple of --nnodes, as every machine has as many ranks, got "
                             f"{self.tp_size} and {self.nnodes}")  # fmt: skip
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank must be in [0, {self.nnodes - 1}] with --nnodes {self.nnodes}, got "
                             f"{self.node_rank}")  # fmt: skip
        address = self.dist_init_addr
        if address is None and self.nnodes > 1:
            raise ValueError(f"--nnodes {self.nnodes} needs --dist-init-addr, HOST:PORT of machine 0, the same on all")
        if address is not None and not _is_address(address):
            raise ValueError(f"--dist-init-addr must be HOST:PORT with a port in [1, 65535], got {address!r}")
        if address is not None and self.tp_size == 1:
            self._note("--dist-init-addr does nothing with --tp-size 1: there is nobody to meet")
        if self.dp_size > 1 and self.nnodes > 1:
            raise ValueError(f"--dp-size {self.dp_size} is not for --nnodes {self.nnodes}: ranks of a replica are on "
                             "one machine; for replicas on several give --ray-address and no --nnodes")  # fmt: skip
        cluster = self.ray_address
        if cluster is not None and cluster != "auto" and ("/" in cluster or not _is_address(cluster)):
            raise ValueError(f"--ray-address must be HOST:PORT with a port in [1, 65535], or auto, got {cluster!r}")
        if cluster is not None and self.dp_size == 1:
            self._note("--ray-address does nothing with --dp-size 1: there are no replicas to place")

    def _check_drafter(self) -> None:
        """Note flags that belong to other drafters; raise ValueError if the drafter's flags contradict each other."""
        for f in FLAGS:
            if not f.name.startswith("speculative_") or getattr(self, f.name) in (f.default, "NONE"):
                continue
            owners: tuple[str, ...] = ("NGRAM", *GROWN) if f.name in _SHARED else GROWN
            if f.name.startswith("speculative_ngram_"):
                owners = ("NGRAM", *GROWN) if self.may_look_up else ("NGRAM",)
            if f.name == "speculative_token_map":
                continue  # `make_drafter` logs a line if the map is not used
            if self.is_own_drafter and not f.name.startswith(("speculative_ngram_", *BLOCKS)):
                continue  # the user's class gets the whole config, and may use the flag
            owners = BLOCKS.get(f.name, owners)
            if self.algorithm not in owners:
                self._note(f"{flag_name(f.name)} does nothing with --speculative-algorithm {self.algorithm}; "
                           f"it belongs to {', '.join(owners)}")  # fmt: skip
        self._check_block() if self.algorithm in ("DFLASH", "DSPARK") else self._check_rounds()
        if self.algorithm in GROWN and self.speculative_num_draft_tokens == 1:
            raise ValueError("--speculative-num-draft-tokens must be at least 2, the root and a draft, got 1")
        if self.simulate_acc_len is not None and self.algorithm == "NONE":
            raise ValueError(f"--simulate-acc-len {self.simulate_acc_len:g} needs trees, and --speculative-algorithm "
                             "NONE drafts none")  # fmt: skip
        if self.speculative_draft_model_revision is not None and self.speculative_draft_model_path is None:
            raise ValueError("--speculative-draft-model-revision needs --speculative-draft-model-path")

        if self.force_greedy:
            does = "temperatures of requests count as 0" if self.verifies_greedily else "nothing but with NGRAM"
            self._note(f"SGLANG_NGRAM_FORCE_GREEDY_VERIFY: {does}")

    def _check_rounds(self) -> None:
        """Raise ValueError if some of the numbers of a tree grown in rounds are given and others are missing."""
        missing = [flag_name(name) for name in NUMBERS if getattr(self, name) is None]
        is_chain = self.speculative_eagle_topk == 1 and missing == [flag_name(NUMBERS[2])]  # its nodes are steps + 1
        if self.algorithm in GROWN and 0 < len(missing) < len(NUMBERS) and not is_chain:
            raise ValueError(f"{', '.join(map(flag_name, NUMBERS))} go together, all or none; not given: "
                             f"{', '.join(missing)}")  # fmt: skip

    def _check_block(self) -> None:
        """Raise ValueError if the numbers of a tree drafted as a block contradict each other."""
        topk, nodes, chain = self.speculative_eagle_topk or 1, self.speculative_num_draft_tokens, self.block_nodes
        if (self.speculative_num_steps or 1) > 1:
            self._note(f"--speculative-num-steps {self.speculative_num_steps} is taken as 1: {self.algorithm} drafts a "
                       "block in one pass")  # fmt: skip
        if topk == 1 and nodes is not None and chain not in (None, nodes):
            more, block = ("", BLOCK) if self.algorithm == "DFLASH" else ("one more than ", DRAFTS)
            raise ValueError(f"--speculative-num-draft-tokens must be {more}{flag_name(block)}, {chain}, where drafts "
                             f"are a chain, got {nodes}")  # fmt: skip
        if topk > 1 and nodes is None:
            raise ValueError(f"--speculative-eagle-topk {topk} needs --speculative-num-draft-tokens, the nodes of the "
                             "tree")  # fmt: skip

    def _put_graph_batches(self) -> None:
        """Sort the batches of --cuda-graph-bs; the largest of them becomes --cuda-graph-max-bs, as in SGLang."""
        largest = self.cuda_graph_max_bs
        if self.cuda_graph_bs is not None:
            batches = tuple(sorted(set(self.cuda_graph_bs)))
            if largest not in (None, batches[-1]):
                self._note(f"--cuda-graph-max-bs {largest} is taken as {batches[-1]}, the largest of --cuda-graph-bs")
            self._put("cuda_graph_bs", batches)
            self._put("cuda_graph_max_bs", batches[-1])
        if self.disable_cuda_graph and self.cuda_graph_max_bs is not None:
            given = "cuda_graph_bs" if self.cuda_graph_bs else "cuda_graph_max_bs"
            self._note(f"{flag_name(given)} does nothing beside --disable-cuda-graph")

    def _note(self, line: str) -> None:
        """Add a line to `notes`."""
        self._put("notes", (*self.notes, line))

    def _put(self, name: str, value: Any) -> None:
        """Set a field while the config is made, since the class is frozen."""
        object.__setattr__(self, name, value)

    @property
    def gives_numbers(self) -> bool:
        """Whether flags give any number of the tree's shape."""
        return any(getattr(self, name) is not None for name in (*NUMBERS, BLOCK, DRAFTS))

    @property
    def block_nodes(self) -> int | None:
        """The nodes of the chain that a block gives, root included, by the block's flag; None if it is not given."""
        drafts = getattr(self, DRAFTS)
        return getattr(self, BLOCK) if self.algorithm != "DSPARK" else None if drafts is None else drafts + 1

    @property
    def adaptive(self) -> bool:
        """Whether `policy.py` chooses each step's shape."""
        if self.speculative_adaptive is None:  # a simulated accept length belongs to one shape
            return not self.gives_numbers and self.simulate_acc_len is None
        return self.speculative_adaptive

    def adapts_from(self, on_cuda: bool) -> float:
        """Return the smallest batch for which `policy.py` chooses each step's shape: 1, `WIDE`, or infinity for none.

        On CUDA shapes of wide batches are chosen even where flags give a tree's numbers.
        """
        if self.adaptive:
            return 1
        default = self.speculative_adaptive is None and self.simulate_acc_len is None
        return WIDE if on_cuda and default else math.inf

    @property
    def several_sizes(self) -> bool:
        """Whether trees may have more than one size, because shapes are chosen and no flag gives numbers."""
        return self.adaptive and not self.gives_numbers

    def has_lookups(self, on_cpu: bool) -> bool:
        """Return whether texts are looked up beside such a drafter even if no external corpus is loaded."""
        wanted = self.speculative_lookup
        if wanted is None:  # not on CUDA, where lookups keep steps from overlapping
            wanted = on_cpu and self.several_sizes
        return wanted and self.may_look_up

    @property
    def may_look_up(self) -> bool:
        """Whether texts are looked up beside a drafter that grows its trees on the device, if only in a corpus."""
        return self.speculative_lookup is not False and self.algorithm in GROWN

    @property
    def algorithm(self) -> str:
        """The drafter to run: the one that the flag names, or the default for this model."""
        if self.speculative_algorithm is not None:
            return self.speculative_algorithm
        if self.model_path is not None:
            return "NONE"
        return "EAGLE3" if self._shipped("EAGLE3") else "NGRAM"

    @property
    def ngram(self) -> dict[str, int]:
        """The numbers of the trie by field: as given, and what no flag gives moved to where those leave it room.

        Raises ValueError if two of the numbers given contradict each other.
        """
        found: dict[str, int] = {}
        for chain in NGRAM_ORDER:
            names = list(chain)
            given = [name for name in names if getattr(self, name) != DEFAULTS[name]]
            for small, large in itertools.pairwise(given):
                a, b = getattr(self, small), getattr(self, large)
                gap = sum(chain[name] for name in names[names.index(small) + 1 : names.index(large) + 1])
                if a + gap > b:
                    raise ValueError(f"{flag_name(small)} must be {'below' if gap else 'at most'} {flag_name(large)}, "
                                     f"got {a} and {b}")  # fmt: skip
            values = [getattr(self, name) for name in names]
            for i in range(1, len(names)):  # room above what is given, then below it
                if names[i] not in given:
                    values[i] = max(values[i], values[i - 1] + chain[names[i]])
            for i in reversed(range(len(names) - 1)):
                if names[i] not in given:
                    values[i] = min(values[i], values[i + 1] - chain[names[i + 1]])
            found |= dict(zip(names, values, strict=True))
        return found

    @property
    def token_map(self) -> str | None:
        """The file of ids that a head may draft: the one named, else the one shipped with an EAGLE head, else None."""
        if self.speculative_token_map is not None:
            return None if self.speculative_token_map == "none" else self.speculative_token_map
        beside = HEADS / "token_map.safetensors"
        wanted = self.algorithm == "EAGLE" and self.speculative_draft_model_path is None and self.draft_path
        return str(beside) if wanted and beside.is_file() else None

    def _shipped(self, name: str) -> str | None:
        """Return the folder of the head that ships under this name; None if there is none, or for a named model."""
        folder = HEADS / SHIPPED.get(name, "")
        whole = self.model_path is None and name in SHIPPED and (folder / "config.json").is_file()
        return str(folder) if whole else None

    @property
    def draft_load_format(self) -> str:
        """Which weight files of the draft are read; they are never dummy, since tensors show the kind of a head."""
        return self.speculative_draft_load_format or ("auto" if self.load_format == "dummy" else self.load_format)

    @property
    def draft_quantization(self) -> str | None:
        """How the drafter's weights are quantized: fp8 or None, by the drafter's flag, else as the target's."""
        wanted = self.speculative_draft_model_quantization or self.quantization
        return "fp8" if wanted == "fp8" and (self.algorithm in GROWN or self.is_own_drafter) else None

    @property
    def verifies_greedily(self) -> bool:
        """Whether every request's temperature counts as 0."""
        return self.force_greedy and self.algorithm == "NGRAM"

    @property
    def is_own_drafter(self) -> bool:
        """Whether the drafter is a user's own, named as module:Class."""
        return OWN.fullmatch(self.algorithm) is not None

    def first_rank(self, environ: Mapping[str, str] = os.environ) -> int:
        """Return the rank of this process, which was started with these flags by a user or torchrun; rank 0 serves.

        Raises ValueError if torchrun has started a number of processes other than --tp-size.
        """
        if TORCHRUN not in environ:
            return self.node_rank * (self.tp_size // self.nnodes)
        if int(environ["WORLD_SIZE"]) != self.tp_size:
            raise ValueError(f"--tp-size {self.tp_size}: torchrun has started {environ['WORLD_SIZE']} processes, and "
                             "each is a rank; --nproc-per-node times --nnodes must be --tp-size")  # fmt: skip
        return int(environ["RANK"])

    @property
    def reads_target(self) -> bool:
        """Whether the drafter may use rows of the target's embedding and LM head."""
        return self.algorithm in LEARNED or self.is_own_drafter

    @property
    def draft_tokens(self) -> int:
        """Nodes of a tree drafted on the host, root included (N); 1 without speculation."""
        if self.algorithm == "NONE":
            return 1
        window = self.speculative_ngram_max_match_window_size
        usual = DEFAULTS["speculative_ngram_max_match_window_size"]
        default = window if window != usual else min(usual, self.ngram["speculative_ngram_branch_length"])
        return self.speculative_num_draft_tokens or min(default, MAX_NODES)

    @property
    def origins(self) -> frozenset[str]:
        """The origins of web pages that may call the server; "*" stands for any origin."""
        return frozenset(filter(None, map(str.strip, (self.cors_origins or "").split(","))))

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that a request's Host may have beside localhost and IP addresses; None: any."""
        names = frozenset(filter(None, (name.strip().lower() for name in (self.allowed_hosts or "").split(","))))
        known = bool(names) or _is_loopback(self.host)
        return names if known and "*" not in names else None

    @property
    def thresholds(self) -> tuple[float, float] | None:
        """The accept thresholds (single, acc), or None if both are 1: verification is then exact."""
        pair = (self.speculative_accept_threshold_single, self.speculative_accept_threshold_acc)
        return None if pair == (1, 1) else pair

    @property
    def seed(self) -> int | None:
        """The seed of a request without one, as in SGLang; None: it is drawn."""
        return 42 if self.enable_deterministic_inference else None

    @property
    def served_name(self) -> str:
        """The model's name in answers: the name given, else the path given, else the default model's name."""
        return self.served_model_name or self.model_path or DEFAULT_MODEL


FLAGS: tuple[Any, ...] = tuple(f for f in fields(Config) if f.metadata)  # the fields that are flags, in order
DEFAULTS = {f.name: f.default for f in FLAGS}


def flag_name(name: str) -> str:
    """Return the flag of a field, e.g. page_size -> --page-size."""
    return "--" + name.replace("_", "-")


def _is_address(text: str) -> bool:
    """Return whether a text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def _is_loopback(host: str) -> bool:
    """Return whether a host is an address of this machine that no other machine reaches."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check(f: Any, value: Any) -> None:
    """Raise ValueError unless `value` has the type of field `f` and lies in its choices or range."""
    kind, _, optional = f.type.partition(" | ")
    if value is None and optional:
        return
    flag, meta, low, high = flag_name(f.name), f.metadata, f.metadata["low"], f.metadata["high"]
    if kind == "Ints" and (not isinstance(value, (list, tuple)) or not value):
        raise ValueError(f"{flag} must be one or more ints, got {value!r}")
    known: dict[str, Any] = {"str": str, "int": int, "Ints": int, "float": (int, float), "bool": bool}
    for one in value if kind == "Ints" else [value]:
        if not isinstance(one, known[kind]) or (isinstance(one, bool) and kind != "bool"):
            raise ValueError(f"{flag} must be {'an int' if known[kind] is int else f'a {kind}'}, got {one!r}")
        if kind == "str" and not one:
            raise ValueError(f"{flag} must not be empty")
        if meta["choices"] and one not in meta["choices"]:
            raise ValueError(f"{flag} must be one of {', '.join(map(str, meta['choices']))}, got {one!r}")
        if (low is not None and not one >= low) or (high is not None and not one <= high):
            allowed = f"in [{low:g}, {high:g}]" if high is not None else f"at least {low}"
            raise ValueError(f"{flag} must be {allowed}, got {one}")
