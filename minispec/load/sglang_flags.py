"""SGLang's flags and environment variables that minispec has no use for, and what happens where they are given.

A flag of SGLang's acts (it is a field of `Config`), or it is here. One in `LINES` is taken with any value, and one line
at start says what is done instead. One in `REFUSED` would change what clients get, or would open or close a door, so
the server does not start; `--flag=value` there marks a value that describes what is so anyway, and `--flag=` the bare
switch that does. Variables are never read, except for the wish in SGLANG_ENABLE_SPEC_V2.

docs/flags.md is written from these tables. Read next: `flags.py`, which reads them.
"""

from __future__ import annotations

LINES = {  # what is done instead -> flags; a whole clause, as it follows "--flag: " in the log
    "attention is FlexAttention on CUDA and gathering on a CPU, compiled, whatever kernels are asked for": """
        --attention-backend --prefill-attention-backend --decode-attention-backend --mm-attention-backend
        --speculative-attention-mode --speculative-draft-attention-backend""",
    "one seeded sampler draws for every request": "--sampling-backend",
    "experts have one kernel on each kind of device, so there is none to choose": """--moe-runner-backend
        --moe-a2a-backend --speculative-moe-runner-backend --speculative-moe-a2a-backend""",
    "a batch is padded to the next size that there is, captured or not": "--disable-cuda-graph-padding",
    "Python's garbage collector runs as usual while graphs are captured": "--enable-cudagraph-gc",
    "compilation is on unless --disable-torch-compile is given, and its batch sizes follow --max-running-requests":
        "--enable-torch-compile --torch-compile-max-bs",
    "a batch is not split in two that overlap; steps overlap instead": """--enable-two-batch-overlap""",
    "steps of prefill and of decoding alternate": "--enable-mixed-chunk",
    "a step of prefill is bounded by --chunked-prefill-size": "--max-prefill-tokens --prefill-max-requests",
    "requests are served in the order of their arrival": "--schedule-policy --enable-priority-scheduling",
    "a request is admitted when its pages are free, and the newest one waits again when they run out":
        "--schedule-conservativeness",
    "shapes are chosen by what they are measured to be worth, from at most three": "--speculative-adaptive-config",
    "drafts are accepted where they are what the target draws itself, which is as exact": """
        --speculative-use-rejection-sampling --speculative-use-block-verification""",
    "a head with more than one layer is refused when it is loaded": "--enable-multi-layer-eagle",
    "a step that raises answers its requests with an error, and one that hangs ends at --watchdog-timeout":
        "--crash-dump-folder",
    "times are in /metrics, and in no line for each request": """--enable-request-time-stats-logging --show-time-cost
        --collect-tokens-histogram""",
    "llguidance constrains output, whichever is named": "--grammar-backend",
    "KV pages and weights stay in the device's memory": """--enable-hierarchical-cache --hicache-ratio --hicache-size
        --cpu-offload-gb""",
    "ranks meet at --dist-init-addr, take the devices in order, and add up by PyTorch's own collectives": """--nccl-port
        --disable-custom-all-reduce --gpu-id-step""",
    "a replica is chosen by the prefixes that it holds and by how many requests it has": "--load-balance-method",
    "the tokenizer is the model's fast one, in threads of the server": "--tokenizer-mode --tokenizer-worker-num",
    "models run in this package's own code": "--model-impl",
}  # fmt: skip

REFUSED = {  # why -> flags
    "of parallelism there are --tp-size and --dp-size": """--pp-size=1 --pp=1 --pipeline-parallel-size=1 --ep-size=1
        --ep=1 --expert-parallel-size=1 --base-gpu-id=0 --enable-dp-attention --enable-ep-moe
        --disaggregation-mode=null""",
    "of quantizations there are --quantization int8 and fp8":
        "--quantization-param-path --torchao-config --modelopt-quant",
    "keys and values have the activations' dtype": "--kv-cache-dtype=auto",
    "LoRA adapters are not supported": """--enable-lora --lora-paths --max-loras-per-batch --max-lora-rank
        --lora-target-modules --lora-backend""",
    "clients are told apart by keys, not by certificates, and the file of the server's own key has no password":
        "--ssl-ca-certs --ssl-keyfile-password",
    "in bfloat16 two batch shapes may round differently, so determinism is not promised beyond float32":
        "--enable-deterministic-inference",
    "a prompt longer than the context is answered with 400, never cut": "--allow-auto-truncate",
    "constrained JSON has at most 16 characters of whitespace in a row": "--constrained-json-whitespace-pattern",
    "the client runs the tools that it offers; there are none here": "--tool-server",
    "requests may not bring code": "--enable-custom-logit-processor",
    "hidden states are not returned": "--enable-return-hidden-states",
    "events of /generate are cumulative": "--stream-output",
    "defaults come from --sampling-defaults": "--preferred-sampling-params",
    "the model's config.json is taken as it is": "--json-model-override-args={} --is-embedding",
    "only text goes in": "--enable-multimodal --limit-mm-data-per-request --mm-process-config",
    "only text comes out, so the tokenizer is needed": "--skip-tokenizer-init",
    "flags are read from the command line alone": "--config",
}  # fmt: skip

# A value of SGLang's that a flag of ours takes as another one: {field: {value: (value taken, why)}}.
INSTEAD: dict[str, dict[int | str, tuple[int | str, str]]] = {
    "page_size": {1: (16, "the smallest page has 16 rows, and prompts share whole pages")},
    "load_format": {
        "npcache": ("pt", "no second copy of the weights is kept"),
        "layered": ("auto", "weights are always read one tensor after another"),
        "fastsafetensors": ("safetensors", "they are read by the plain reader"),
    },
}
INSTEAD["speculative_draft_load_format"] = {
    **INSTEAD["load_format"], "dummy": ("auto", "what kind of head a draft is, its tensors tell, so they are read"),
}  # fmt: skip

SPEC_V2 = "SGLANG_ENABLE_SPEC_V2"
VARIABLES = {  # -> what holds here, whether the variable is set or not
    SPEC_V2: "on CUDA steps overlap unless --disable-overlap-schedule is given, with trees (topk above 1) too",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "a step describes itself on the device; there is no plan to overlap",
    "SGLANG_NGRAM_FORCE_GREEDY_VERIFY": "sampled requests are verified exactly with every drafter",
    "SGLANG_SIMULATE_ACC_LEN": "--simulate-acc-len simulates acceptance",
    "SGLANG_SIMULATE_ACC_METHOD": "--simulate-acc-len draws the floor or the ceiling of its number",
    "SGLANG_RETURN_ORIGINAL_LOGPROB":
        "log-probabilities are the model's own, before temperature, penalties and filters",
    "SGLANG_RECORD_STEP_TIME": "times of decode steps are in /metrics, by tree size",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN":
        "a context beyond the target's is refused; beyond the draft's the draft runs on, and a line says so",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "/health generates nothing, /health_generate one token",
    "SGLANG_HEALTH_CHECK_TIMEOUT": "/health_generate waits for 20 seconds",
}  # fmt: skip


def foreign_flags() -> dict[str, tuple[frozenset[str] | None, str]]:
    """Return by flag the values accepted (None: any; "" is the bare switch), and what is done instead or why not."""
    table: dict[str, tuple[frozenset[str] | None, str]] = {
        flag: (None, reason) for reason, flags in LINES.items() for flag in flags.split()
    }
    for reason, flags in REFUSED.items():
        for word in flags.split():
            flag, equals, value = word.partition("=")
            table[flag] = (frozenset([value] if equals else []), reason)
    return table
