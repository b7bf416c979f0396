"""SGLang's flags and environment variables that minispec has no use for, and what happens where they are given.

A flag of SGLang's acts (it is a field of `Config`), or it is here. One in `LINES` is taken with any value, and one line
at start says what is done instead. One in `REFUSED` would change what clients get, or would open or close a door, so
the server does not start; `--flag=value` there marks a value that describes what is so anyway, one of several perhaps,
and `--flag=` the bare switch that does. Of variables three are read, by `flags.py`.

docs/flags.md is written from these tables. Read next: `flags.py`, which reads them.
"""

from __future__ import annotations

# The documentation on speculative decoding that is followed, and the newest server arguments that the tables have.
READ, ARGUMENTS = "late 2026", "SGLang 0.5.23, read on 2026-11-28"

LINES = {  # what is done instead -> flags; a whole clause, as it follows "--flag: " in the log
    "attention is FlexAttention on CUDA and gathering on a CPU, compiled, whatever kernels are asked for": """
        --attention-backend --prefill-attention-backend --decode-attention-backend --mm-attention-backend
        --speculative-draft-attention-backend --enable-lean-attention --dsa-prefill-backend --dsa-decode-backend
        --dsa-triton-union --dsa-paged-mqa-logits-backend --dsa-topk-backend --speculative-dsa-topk-backend
        --dsv4-prefill-backend --dsv4-attn-backend --enable-dsa-fused-indexer --enable-deepseek-v4-fp4-indexer
        --qsa-indexer-dtype --triton-attention-reduce-in-fp32 --triton-attention-num-kv-splits
        --triton-attention-split-tile-size --flashinfer-mla-disable-ragged --enable-encoder-swa-bounded-replay
        --enable-decoder-swa-bounded-replay""",
    "products, norms and rotations are PyTorch's own or compiled, whatever kernels are asked for": """
        --fp8-gemm-runner-backend --fp8-gemm-backend --fp4-gemm-runner-backend --fp4-gemm-backend --bf16-gemm-backend
        --enable-tf32-matmul --enable-fused-qk-norm-rope --enable-nvidia-megakernel --enable-amd-monokernel
        --monokernel-backend --disable-flashinfer-autotune --flashinfer-autotune-skip-ops --use-mlx
        --mlx-enable-sampling""",
    "no model with a recurrent state is served": """--mamba-backend --mamba-ssm-dtype --mamba-max-states-per-path
        --enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds --mamba-radix-cache-strategy
        --mamba-track-interval --enable-int8-mamba-checkpoint --int8-mamba-ckpt-size --linear-attn-backend
        --linear-attn-decode-backend --linear-attn-prefill-backend --linear-attn-verify-backend
        --enable-linear-replayssm --linear-replayssm-cache-len --enable-linear-replayssm-spec --max-mamba-cache-size
        --mamba-full-memory-ratio""",
    "of prefill the smallest step alone is captured, with the decode steps": """--cuda-graph-max-bs-prefill
        --cuda-graph-bs-prefill --cuda-graph-max-seq-len-prefill --cuda-graph-prefill-max-context --context-bucket
        --disable-prefill-cuda-graph --disable-piecewise-cuda-graph""",
    "a step is captured whole or not at all, and --cuda-graph-max-bs says which": """--cuda-graph-config
        --cuda-graph-backend-decode --cuda-graph-backend-prefill --enable-profile-cuda-graph --debug-cuda-graph""",
    "one seeded sampler draws for every request": "--sampling-backend",
    "experts have one kernel on each kind of device, and every rank has a part of each": """--moe-runner-backend
        --moe-a2a-backend --speculative-moe-runner-backend --speculative-moe-a2a-backend --enable-w4a4-mxfp4-megamoe
        --speculative-enable-w4a4-mxfp4-megamoe --deepep-mode --deepep-v2-mode --deepep-config
        --deepep-dispatcher-output-dtype --fuseep-mode --flashinfer-a2a-dispatch-type --flashinfer-mxfp4-moe-precision
        --enable-fused-moe-sum-all-reduce --disable-flashinfer-cutlass-moe-fp4-allgather --ep-num-redundant-experts
        --ep-dispatch-algorithm --init-expert-location --enable-eplb --eplb-algorithm --eplb-rebalance-num-iterations
        --eplb-rebalance-layers-per-chunk --eplb-min-rebalancing-utilization-threshold --enable-waterfill
        --expert-distribution-recorder-mode --expert-distribution-recorder-buffer-size
        --expert-balancedness-report-mode --disable-shared-experts-fusion --enforce-shared-experts-fusion
        --enable-shared-experts-attn-tp --shared-experts-tp-size --enable-paged-experts --paged-experts-num-resident
        --kt-weight-path --kt-method --kt-cpuinfer --kt-threadpool-count --kt-num-gpu-experts
        --kt-max-deferred-experts-per-token --moe-dense-tp-size --enable-dense-mlp-attn-tp""",
    "a batch is padded to the next size that there is, captured or not": "--disable-cuda-graph-padding",
    "Python's garbage collector runs as usual while graphs are captured": "--enable-cudagraph-gc",
    "compilation is on unless --disable-torch-compile is given, and its batch sizes follow --max-running-requests":
        "--enable-torch-compile --torch-compile-max-bs --enable-torch-compile-debug-mode",
    "a batch is not split in two that overlap; steps overlap instead": """--enable-two-batch-overlap
        --enable-single-batch-overlap --tbo-token-distribution-threshold""",
    "steps of prefill and of decoding alternate": """--enable-mixed-chunk --prefill-decode-interval
        --prefill-decode-interval-min-bs --num-continuous-decode-steps --enable-prefill-delayer
        --prefill-delayer-max-delay-passes --prefill-delayer-token-usage-low-watermark
        --prefill-delayer-forward-passes-buckets --prefill-delayer-wait-seconds-buckets
        --prefill-delayer-queue-min-ratio --prefill-delayer-max-delay-ms --min-free-slots-delay
        --scheduler-recv-interval""",
    "a step of prefill is bounded by --chunked-prefill-size": """--max-prefill-tokens
        --prefill-max-requests --enable-dynamic-chunking --disable-chunked-prefix-cache""",
    "requests are served in the order of their arrival": """--schedule-policy
        --enable-priority-scheduling --disable-priority-preemption --default-priority-value
        --abort-on-priority-when-disabled --schedule-low-priority-values-first
        --priority-scheduling-preemption-threshold""",
    "a request is admitted when its pages are free, and the newest one waits again when they run out":
        "--schedule-conservativeness --retraction-policy",
    "the prefix cache drops what was used longest ago, and a chat's prefix is found without a session": """
        --radix-eviction-policy --radix-eviction-policy-config --radix-cache-backend --enable-session-radix-cache
        --strip-thinking-cache""",
    "drafts are accepted where they are what the target draws itself, which is as exact": """
        --speculative-use-rejection-sampling --speculative-use-block-verification""",
    "a head with more than one layer is refused when it is loaded": "--enable-multi-layer-eagle",
    "a drafter's keys and values have the activations' dtype": "--speculative-draft-kv-cache-dtype",
    "of windows for drafters there is --speculative-draft-window-size, for DFLASH": "--speculative-draft-sink-size",
    "a request verifies the tree of the longest match, a corpus's or another":
        "--speculative-ngram-external-sam-budget",
    "what a step costs is measured in the steps themselves, and a step's trees have one of a few sizes": """
        --speculative-dspark-sps-table-path --speculative-dspark-align-verify-tokens-to-graph-tier""",
    "confidences choose the size of trees by what trees gave that followed such confidences in the steps themselves":
        "--speculative-dspark-confidence-sts-path",
    "it belongs to a method that is not served": "--speculative-domino-candidate-pool-size --spec-trace-dir",
    "a step that raises answers its requests with an error, and one that hangs ends at --watchdog-timeout":
        "--crash-dump-folder",
    "times are in /metrics, and in no line for each request": """--enable-request-time-stats-logging --show-time-cost
        --collect-tokens-histogram --enable-mfu-metrics --enable-metrics-for-all-schedulers
        --load-snapshot-publish-interval --bucket-time-to-first-token --bucket-inter-token-latency
        --bucket-e2e-request-latency --prompt-tokens-buckets --generation-tokens-buckets
        --enable-forward-pass-metrics --forward-pass-metrics-worker-id --forward-pass-metrics-ipc-name
        --extra-metric-labels --tokenizer-metrics-custom-labels-header --tokenizer-metrics-allowed-custom-labels
        --enable-trace --trace-modules --otlp-traces-endpoint --otlp-service-name --enable-layerwise-nvtx-marker
        --gc-warning-threshold-secs""",
    "--log-requests logs a request's sizes and parameters, in the log alone and never with its text": """
        --log-requests-level --log-requests-format --log-requests-target --uvicorn-access-log-exclude-prefixes""",
    "what is checked while it runs is in docs/reliability.md": "--kv-canary --kv-canary-sweep-interval "
        "--kv-canary-real-data --soft-watchdog-timeout",
    "llguidance constrains output, whichever is named": "--grammar-backend",
    "KV pages and weights stay in the device's memory": """--enable-hierarchical-cache --hicache-ratio --hicache-size
        --cpu-offload-gb --offload-group-size --offload-num-in-group --offload-prefetch-step --offload-mode
        --ple-offload-embedding --ple-offload-backend --ple-offload-dir --hicache-host-memory-mode
        --hicache-host-memory-fraction --hicache-write-policy --hicache-io-backend --hicache-mem-layout
        --hicache-storage-backend --hicache-storage-prefetch-policy --hicache-storage-backend-extra-config
        --hicache-storage-prefetch-retry-poll-interval --hicache-storage-prefetch-retry-max-attempts --enable-hicache
        --enable-unified-cache-external-linker --unified-cache-external-linker-backend
        --unified-cache-external-linker-config --enable-linker-mla-dedup --enable-hisparse --hisparse-config
        --hierarchical-sparse-attention-extra-config --enable-lmcache --lmcache-config-file --enable-flexkv
        --flexkv-config-file --enable-memory-saver --enable-weights-cpu-backup --enable-draft-weights-cpu-backup""",
    "rows of all layers lie in one pool of pages": """--enable-page-major-kv-layout --enable-unified-memory
        --swa-full-tokens-ratio --swa-prefix-tails --disable-hybrid-swa-memory --prefill-only-disable-kv-cache
        --c128-page-size --enable-kv-cache-sharding --prefill-kv-cache-dequant-dtype""",
    "weights are read once, file by file": """--model-loader-extra-config --startup-weight-load-mode
        --weight-loader-disable-mmap --weight-loader-prefetch-checkpoints --weight-loader-prefetch-num-threads
        --weight-loader-drop-cache-after-load --model-config-parser --weight-cache-mode --weight-cache-socket
        --weight-cache-timeout""",
    "an engine without requests waits for them, and OMP_NUM_THREADS sets its threads": """
        --sleep-on-idle --numa-node --gc-threshold""",
    "ranks meet at --dist-init-addr, take the devices in order, and add up by PyTorch's own collectives": """--nccl-port
        --nccl-init-addr --disable-custom-all-reduce --gpu-id-step --enable-p2p-check --enable-nccl-nvls
        --enable-symm-mem --enable-mscclpp --enable-torch-symm-mem --pre-warm-nccl --boundary-reduction
        --enable-quant-communications --enable-flashinfer-allreduce-fusion
        --enforce-disable-flashinfer-allreduce-fusion --flashinfer-allreduce-fusion-backend
        --enable-aiter-allreduce-fusion --disable-aiter-allreduce-fusion-in-prefill
        --disable-aiter-allreduce-fusion-in-decode --enable-scattered-sconv --enable-attn-tp-input-scattered
        --enable-tp-lm-head-all-to-all --enable-layernorm-sp --enable-megamoe-for-layernorm-sp
        --disable-attn-tp-gather --use-ray""",
    "a replica is chosen by the prefixes that it holds and by how many requests it has": "--load-balance-method",
    "the tokenizer is the model's fast one, in threads of the server": """--tokenizer-mode
        --tokenizer-worker-num --tokenizer-backend --detokenizer-worker-num --enable-dynamic-batch-tokenizer
        --dynamic-batch-tokenizer-batch-size --dynamic-batch-tokenizer-batch-timeout --enable-tokenizer-batch-encode
        --disable-tokenizer-batch-decode --batch-notify-size""",
    "models run in this package's own code": "--model-impl",
    "only text goes in, so there is nothing to tune for images and sound": """--mm-processor-worker-num
        --mm-io-worker-num --mm-preprocess-cache-size-mb --enable-mm-global-cache --mm-global-cache-backend
        --image-processor-backend --disable-fast-image-processor --mm-feature-transport --mm-enable-dp-encoder
        --enable-broadcast-mm-inputs-process --enable-prefix-mm-cache --enable-precise-embedding-interpolation
        --allowed-media-domains --media-url-max-file-size-mb --trust-mm-content-hashes --language-only
        --language-model-only --asr-max-buffer-seconds --asr-max-concurrent-sessions""",
    "one HTTP/1.1 server answers, with the warm-up of its own": """--enable-http-worker-reuseport --enable-http2
        --http2-max-concurrent-streams --http2-initial-connection-window-size --warmups --file-storage-path
        --disable-outlines-disk-cache""",
}  # fmt: skip

REFUSED = {  # why -> flags
    "of parallelism there are --tp-size and --dp-size": """--pp-size=1 --pp=1 --pipeline-parallel-size=1 --ep-size=1
        --ep=1 --expert-parallel-size=1 --base-gpu-id=0 --enable-dp-attention --enable-ep-moe --pp-max-micro-batch-size
        --pp-async-batch-depth=0 --dcp-size=1 --decode-context-parallel-size=1 --dcp-comm-backend
        --dcp-replicate-q-proj --attn-dp-size=1 --attention-data-parallel-size=1 --attn-cp-size=1
        --attention-context-parallel-size=1 --moe-dp-size=1 --moe-data-parallel-size=1 --dwdp-size=1
        --enable-prefill-cp --cp-strategy --enable-dsa-cache-layer-split --enable-cp-decode-attn-tp
        --enable-dp-attention-local-control-broadcast --enable-dp-lm-head --gated-launch-port --max-ep-size
        --elastic-ep-backend --elastic-ep-initial-size --elastic-ep-scale-timeout --elastic-ep-join-mode
        --elastic-ep-join-rank-offset --ep-join-mode --ep-join-rank-offset --enable-elastic-expert-backup
        --mooncake-ib-device --enable-pdmux --pdmux-config-path --sm-group-num --encoder-only""",
    "prefill and decoding, target and drafter run in one engine": """--disaggregation-mode=null
        --disaggregation-decode-allocation-policy --disaggregation-transfer-backend --disaggregation-enable-kv-checksum
        --disaggregation-bootstrap-port --disaggregation-ib-device --disaggregation-decode-enable-radix-cache
        --disaggregation-decode-enable-offload-kvcache --disaggregation-decode-retraction-backup
        --disaggregation-decode-extra-slots --disaggregation-decode-polling-interval
        --disaggregation-decode-host-receive-threshold --num-reserved-decode-tokens --enable-pd-role-switch
        --optimistic-prefill-attempts --encoder-transfer-backend --encoder-urls --encoder-bootstrap-port
        --encoder-register-urls --enable-adaptive-dispatch-to-encoder --decoupled-spec-role=null
        --decoupled-spec-bind-endpoint --decoupled-spec-connect-endpoints --decoupled-spec-rank""",
    "of quantizations there are those of --quantization": """--quantization-param-path --torchao-config
        --modelopt-quant --modelopt-checkpoint-restore-path --modelopt-checkpoint-save-path --modelopt-export-path
        --quantize-and-serve --rl-quant-profile""",
    "keys and values have the activations' dtype": "--kv-cache-dtype=auto",
    "LoRA adapters are not supported": """--enable-lora --lora-paths --max-loras-per-batch --max-lora-rank
        --lora-target-modules --lora-backend --enable-lora-overlap-loading --max-loaded-loras --lora-eviction-policy
        --max-lora-chunk-size --experts-shared-outer-loras --lora-use-virtual-experts --lora-strict-loading
        --lora-drain-wait-threshold --uno-lora-path""",
    "clients are told apart by keys, not by certificates, and the file of the server's own key has no password":
        "--ssl-ca-certs --ssl-keyfile-password --enable-ssl-refresh",
    "one kind of attention drafts and verifies, in either mode":
        "--speculative-attention-mode=prefill --speculative-attention-mode=decode",
    "a prompt longer than the context is answered with 400, never cut": "--allow-auto-truncate",
    "constrained JSON has at most 16 characters of whitespace in a row": """
        --constrained-json-whitespace-pattern --constrained-json-disable-any-whitespace
        --constrained-json-max-whitespace-cnt""",
    "the client runs the tools that it offers; there are none here": "--tool-server",
    "requests may not bring code": "--enable-custom-logit-processor",
    "answers have text, tokens and log-probabilities, and no hidden states, experts or masks": """
        --enable-return-hidden-states --return-hidden-states-mode --enable-return-aux-hidden-states
        --return-aux-hidden-state-layer-ids --enable-return-routed-experts --enable-return-indexer-topk
        --sampling-mask-max-tokens --return-input-ids --return-output-ids --enable-mis
        --stream-response-default-include-usage""",
    "events of /generate are cumulative": "--stream-output --incremental-streaming-output",
    "text is drawn as the model says, from logits in the activations' dtype": """--enable-watermark --watermark-config
        --enable-fp32-lm-head --rl-on-policy-target --enable-strict-thinking""",
    "a model of text that decodes token by token is served": """--dllm-algorithm --dllm-algorithm-config
        --dllm-fdfo""",
    "of ways in there is HTTP, with no sessions, and no path before it": """--smg-grpc-mode --grpc-mode --grpc-port
        --grpc-response-timeout-secs --grpc-http-sidecar-port --smg-http-sidecar-port --sidecar --sidecar-args
        --fastapi-root-path --enable-streaming-session --enable-response-store --kv-events-config
        --load-publish-endpoint""",
    "nothing is written but the log": """--export-metrics-to-file --export-metrics-to-file-dir
        --debug-tensor-dump-output-folder --debug-tensor-dump-layers --debug-tensor-dump-input-file --forward-hooks
        --msprobe-dump-config""",
    "weights come from the model's folder as they are, and stay": """--custom-weight-loader --model-checksum
        --delete-ckpt-after-loading --decrypted-config-file --decrypted-draft-config-file
        --checkpoint-engine-wait-weights-before-ready --weight-version=default
        --remote-instance-weight-loader-seed-instance-ip
        --remote-instance-weight-loader-seed-instance-service-port
        --remote-instance-weight-loader-send-weights-group-ports --remote-instance-weight-loader-backend
        --remote-instance-weight-loader-start-seed-via-transfer-engine --engine-info-bootstrap-port
        --modelexpress-config""",
    "a chat template comes from --chat-template or the model": """--trust-request-chat-template
        --hf-chat-template-name --completion-template --default-chat-template-kwargs""",
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

SPEC_V2, GREEDY, RECORD = "SGLANG_ENABLE_SPEC_V2", "SGLANG_NGRAM_FORCE_GREEDY_VERIFY", "SGLANG_RECORD_STEP_TIME"
VARIABLES = {  # -> what holds here, whether the variable is set or not
    SPEC_V2: "on CUDA steps overlap unless --disable-overlap-schedule is given, with trees (topk above 1) too",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "a step describes itself on the device; there is no plan to overlap",
    GREEDY: "with NGRAM every request's temperature counts as 0, and a line says so; without it sampled requests are "
        "verified exactly",
    "SGLANG_RAGGED_VERIFY_MODE":
        "the trees of a step have one size, which follows DSPARK's confidences; drafts below the threshold are padding",
    "SGLANG_SIMULATE_ACC_LEN": "--simulate-acc-len simulates acceptance",
    "SGLANG_SIMULATE_ACC_METHOD": "--simulate-acc-len draws the floor or the ceiling of its number",
    "SGLANG_RETURN_ORIGINAL_LOGPROB":
        "log-probabilities are the model's own, before temperature, penalties and filters",
    RECORD: "/server_info has step_time_dict, the newest 1,000 decode steps by number of requests",
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
            others = (table[flag][0] if flag in table else None) or frozenset()
            table[flag] = (others | ({value} if equals else set()), reason)
    return table
