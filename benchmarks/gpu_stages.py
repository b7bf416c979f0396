"""What `gpu.py` measures: one function a stage, each within minutes on one GPU, with toy sizes on a CPU as well.

A stage writes its figures into a `Report`, each as soon as it is known. Things that are compared run in one process in
the order A B B A, stretches of decode steps of fresh requests, so that a machine that warms up or slows down does so
for both. A figure is the median over the steps of both stretches.

Large models have dummy weights and the sizes of published ones. Their heads are written as random files and loaded as
any head. A random head's trees would be wide and flat, which no head's are, and a flat tree can accept little. So the
head here is made sure of itself: its likeliest token has nearly all the probability, and its trees are S deep. Nothing
is accepted of them but by `--simulate-acc-len`.

Read next: `gpu.py`, the command.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bench
import minispec.model as model_module
from benchmarks import parity, throughput
from benchmarks.lowered import autotuned
from minispec import LLM, SamplingParams
from minispec.attention import FlexLayer, PagedFlex, Plan
from minispec.cuda.fp8 import Fp8Linear, rowwise
from minispec.cuda.graphs import Recorder
from minispec.eagle import Eagle3Head, HeadConfig
from minispec.kv import KVShape, PagedKV
from minispec.load import files
from minispec.load.architectures import read_model_config
from minispec.load.default_model import ensure_default_model
from minispec.load.tokenizer import load_tokenizer
from minispec.model import Model, ModelConfig, RMSNorm, stored
from minispec.request import Request
from minispec.train.export import export

SEED = 1
LLAMA3 = {  # the sizes of Llama-3.1-8B
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128009,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
TOY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
       "num_key_value_heads": 2, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
FAR, FAR_FP8 = 0.02, 0.1  # relative errors that no rounding makes, in bfloat16 and where fp8 numbers are multiplied


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    compiled: bool = True
    sizes: tuple[tuple[str, Any], ...] = ()  # of a model, in place of the published ones
    draft_vocab: int = 32000  # of the EAGLE-3 head, as in its published files
    eagle3: tuple[int, int, int] = (5, 8, 32)  # steps/topk/draft tokens
    prompt: int = 512
    nodes: tuple[int, ...] = (1, 8, 32, 64)  # and contexts, of attention alone
    contexts: tuple[int, ...] = (512, 8192, 32768)
    lengths: tuple[float, ...] = (1.5, 3.5)  # simulated accept lengths
    rows: tuple[int, ...] = (1, 8, 32)  # of single products
    batches: tuple[int, ...] = (4, 16, 48)
    warm_up: int = 8  # decode steps before those that are timed
    steps: int = 40  # timed decode steps of a stretch
    quantization: str = "fp8"  # of the stage of that name
    copied: int = 4 << 30  # bytes of the device copy
    prompts: int | None = None  # of each set for the default model; None: all
    new_tokens: int = 128
    model: str | None = None  # of server and parity; None: the default model
    methods: tuple[str, ...] = ("none", "eagle3", "ngram", "eagle", "mtp", "standalone")
    greedy: str = str(Path(__file__).with_name("greedy.jsonl"))  # what `prepare` writes
    server: tuple[str, ...] = (  # flags of the stage of that name
        "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "4", "--no-speculative-adaptive", "--cuda-graph-bs", "1",
        "--max-running-requests", "1", "--chunked-prefill-size", "128",
    )  # fmt: skip
    tests: tuple[str, ...] = ("-m", "cuda")


FULL = Scale()
TINY = Scale(
    device="cpu", dtype="float32", compiled=False, sizes=tuple(TOY.items()), draft_vocab=256, eagle3=(3, 2, 6),
    prompt=16, nodes=(1, 3), contexts=(16, 90), rows=(1, 3), batches=(2,), lengths=(1.5, 2.5), warm_up=1, steps=6,
    copied=1 << 20, prompts=1, new_tokens=6, methods=("none", "ngram"), quantization="int8",
    server=("--speculative-algorithm", "NGRAM", "--no-speculative-adaptive", "--disable-torch-compile"),
    tests=("tests/test_tree.py",),
)  # fmt: skip


class Report:
    """A stage's JSON file; whoever reads it sees in `complete` whether the stage came to its end without a failure."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """`about`: what figures depend on; those of an earlier run that was cut off are kept if it is the same."""
        self.path, self.about, self.figures = path, json.loads(json.dumps(about)), {}
        self.failures: dict[str, str] = {}
        if path.is_file():
            earlier = json.loads(path.read_text())
            same = all(earlier.get(name) == value for name, value in self.about.items())
            self.figures = earlier["figures"] if same and not earlier["complete"] else {}

    def __contains__(self, name: str) -> bool:
        return name in self.figures

    def add(self, name: str, figure: Any) -> None:
        """Write one more figure."""
        self.figures[name] = figure
        self._write(complete=False)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within this context an error is said and written down, and what comes after goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failures[name] = f"{type(error).__name__}: {error}"[:2000]
            self._write(complete=False)

    def finish(self) -> None:
        """Mark the stage as done, if no part of it failed."""
        self._write(complete=not self.failures)

    def _write(self, complete: bool) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".partial")
        written = {**self.about, "complete": complete, "failures": self.failures, "figures": self.figures}
        scratch.write_text(json.dumps(written, indent=1) + "\n")
        scratch.rename(self.path)


# ---- the default model -------------------------------------------------------------------------------------------


def prepare(scale: Scale) -> None:
    """Write the greedy tokens of transformers in float32 for the default model's prompts, as chats."""
    folder = Path(scale.model) if scale.model else ensure_default_model(print)
    texts = [text for texts in bench.read_prompts(bench.PROMPTS, scale.prompts).values() for text in texts]
    prompts = throughput.encode(texts, load_tokenizer(folder))
    tokens = parity.Reference(folder).generate(prompts, scale.new_tokens)
    lines = [json.dumps({"prompt": ids, "greedy": new}) for ids, new in zip(prompts, tokens, strict=True)]
    Path(scale.greedy).write_text("\n".join(lines) + "\n")


def prepared(scale: Scale) -> list[dict[str, list[int]]]:
    """Return what `prepare` wrote."""
    return [json.loads(line) for line in Path(scale.greedy).read_text().splitlines()]


def server(report: Report, scale: Scale) -> None:
    """A server with a drafter, one request at a time, each twice, in float32: replies are transformers' own."""
    prompts, truth = (2 * [line[key] for line in prepared(scale)] for key in ("prompt", "greedy"))  # then cached
    model = ("--model", scale.model) if scale.model else ()
    started = time.perf_counter()
    with parity.serve(*model, "--device", scale.device, "--dtype", "float32", *scale.server) as url:
        ready = time.perf_counter() - started
        params = [{**parity.GREEDY, "max_new_tokens": scale.new_tokens}] * len(prompts)
        answers = parity.generate(url, prompts, params, 1)
        seconds, stats = time.perf_counter() - started - ready, parity.stats(url)
    equal, count = parity.same(answers, truth)
    report.add("replies", {
        "equal": equal, "replies": count, "ready_s": ready, "seconds": seconds, "flags": scale.server,
        "accept_length": stats["avg_spec_accept_length"], "tree_steps": stats["tree_steps"],
        "lengths": [len(ids) for ids in truth],
    })  # fmt: skip
    assert equal == count > 0, f"{equal} of {count} replies are those of transformers"
    assert stats["tree_steps"] > 0, "no step verified a tree"


def methods(report: Report, scale: Scale) -> None:
    """The default model in float32 with every method, alone and in a batch: tokens are transformers', and the speed."""
    lines = prepared(scale)
    for name in (name for name in scale.methods if name not in report):
        with report.part(name):
            one = throughput.Ours(name, {
                **bench.METHODS[name], "model": scale.model, "device": scale.device, "dtype": "float32",
                "disable_torch_compile": not scale.compiled, "max_total_tokens": 8 * 4096, "decode_log_interval": 10**6,
            }, [1, 8])  # fmt: skip
            found: dict[str, Any] = {"prompts": len(lines)}
            for batch in one.batches:
                made = one.run([line["prompt"] for line in lines], batch, scale.new_tokens, 0.0)
                pairs = zip(made.outputs, lines, strict=True)
                found[f"batch {batch}"] = {
                    "equal": sum(list(ids) == line["greedy"] for ids, line in pairs), "seconds": made.seconds,
                    "tokens": made.tokens, "accept_length": throughput.accept_length(made.verified),
                }  # fmt: skip
            report.add(name, found)
            del one
            free()


# ---- models with random weights ----------------------------------------------------------------------------------


def model_sizes(scale: Scale, **changed: Any) -> dict[str, Any]:
    """Return the config of Llama-3.1-8B, or of the toy in its place."""
    return {**LLAMA3, **changed, **dict(scale.sizes)}


def write_head(folder: Path, target: ModelConfig, draft_vocab: int) -> None:
    """Write a random EAGLE-3 head for a target of these sizes, as published heads are, sure of what it drafts."""
    ids, layers = torch.arange(draft_vocab), target.layers
    config = HeadConfig("eagle3", replace(target, layers=1), (2, layers // 2, layers - 3), token_map=ids)
    with torch.device("meta"):
        model = Model(target)
        head = Eagle3Head(config, model)
    head = head.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
    head.token_map = ids
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            # Logits with a standard deviation of 64: the largest of thousands lies some 15 above the next.
            scale = 64 / target.hidden_size**0.5 if name == "lm_head.weight" else 0.02
            parameter.normal_(0.0, scale, generator=generator)
    export(head, model, folder)


class Dummy:
    """A model of published sizes with dummy weights and an EAGLE-3 head, in a folder of its own while in use."""

    def __init__(self, scale: Scale, **changed: Any) -> None:
        """changed: keys of the published config, with other values."""
        self.scale, self.config = scale, model_sizes(scale, **changed)

    def __enter__(self) -> Dummy:
        self.folder = TemporaryDirectory()
        root, target = Path(self.folder.name), read_model_config(self.config)
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps(self.config))
        write_head(root / "head", target, min(self.scale.draft_vocab, target.vocab_size))
        return self

    def __exit__(self, *error: object) -> None:
        self.folder.cleanup()

    def load(self, batch: int, tree: tuple[int, int, int] | None, **flags: Any) -> LLM:
        """Return the model, ready for `batch` requests of the scale's prompt; tree: as `Scale.eagle3`; None: plain."""
        scale, root, (steps, topk, nodes) = self.scale, Path(self.folder.name), tree or (0, 1, 1)
        # Requests that were seated first decode while the others' prompts are computed.
        context = scale.prompt + (steps + 1) * (scale.warm_up + scale.steps + batch + 4)
        drafter = {"speculative_algorithm": "NONE"} if tree is None else {
            "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(root / "head"),
            "speculative_num_steps": steps, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes,
        }  # fmt: skip
        options = {
            "load_format": "dummy", "random_seed": SEED, "device": scale.device, "dtype": scale.dtype,
            "disable_torch_compile": not scale.compiled, "disable_radix_cache": True, "decode_log_interval": 10**6,
            "context_length": context, "max_running_requests": batch, "max_total_tokens": batch * (context + 256),
            "chunked_prefill_size": 128 if batch == 1 else 2048, **drafter, **flags,
        }  # fmt: skip
        return LLM(root / "model", batches=(batch,), **options)


def free() -> None:
    """Give memory of models that nobody holds any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- timing ------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A kind of decode step to be timed."""

    draft: bool  # a tree at every step, or plain steps
    batch: int = 1
    temperature: float = 0.0
    overlap: bool | None = None  # None: as the scheduler has it


class Stretch(NamedTuple):
    """Decode steps one after the other."""

    seconds: list[float]  # of each step, from call to return; the tokens of one are waited for in it
    tokens: int
    context: float  # mean committed rows of a request


def seated(llm: LLM, case: Case, scale: Scale) -> list[Request]:
    """Submit the requests of a case and step until all of them decode and are warmed up."""
    scheduler, rng = llm.scheduler, random.Random(SEED)
    assert scheduler.flush_cache(), "a stretch begins on an idle engine"
    if case.overlap is not None:
        scheduler._may_overlap = case.overlap
    params = SamplingParams(temperature=case.temperature, max_new_tokens=None, ignore_eos=True, sampling_seed=SEED)
    scheduler.policy.forced = lambda shapes: shapes[-1 if case.draft else 0]
    requests = []
    for number in range(case.batch):
        ids = [rng.randrange(3, llm.model_config.vocab_size) for _ in range(scale.prompt)]
        requests.append(request := Request(f"{number}", ids, params))
        scheduler.validate(request)
        scheduler.submit(request)
    while len(scheduler.running) < case.batch:
        scheduler.step()
    for _ in range(scale.warm_up):
        scheduler.step()
    return requests


def finish(llm: LLM) -> None:
    """End all requests."""
    llm.scheduler.abort("")
    while llm.scheduler.has_work:
        llm.scheduler.step()


def stretch(llm: LLM, case: Case, scale: Scale) -> Stretch:
    """Time decode steps of fresh requests."""
    requests, scheduler, seconds = seated(llm, case, scale), llm.scheduler, []
    count = lambda: sum(len(r.output_ids) for r in requests)  # noqa: E731
    before, rows = count(), [r.kv_len for r in requests]
    for _ in range(scale.steps):
        started = time.perf_counter()
        scheduler.step()
        seconds.append(time.perf_counter() - started)
    assert len(scheduler.running) == case.batch, "requests ended while they were timed"
    made = Stretch(seconds, count() - before, statistics.mean(rows + [r.kv_len for r in requests]))
    finish(llm)
    return made


def compare(scale: Scale, *pair: tuple[str, LLM, Case]) -> dict[str, Any]:
    """Time two cases in the order A B B A; returns the figures of both, and the second's over the first's."""
    stretches: dict[str, list[Stretch]] = {name: [] for name, _, _ in pair}
    for name, llm, case in (*pair, *reversed(pair)):
        stretches[name].append(stretch(llm, case, scale))
    made: dict[str, Any] = {name: figures(stretches[name], case.batch) for name, _, case in pair}
    a, b = (made[name] for name, _, _ in pair)
    return {**made, **{f"{what}_ratio": b[what] / a[what] for what in ("ms", "tokens_per_s")}}


def figures(stretches: Sequence[Stretch], batch: int) -> dict[str, Any]:
    """Return the figures of one case."""
    seconds = [second for one in stretches for second in one.seconds]
    tokens, tenths = sum(one.tokens for one in stretches), statistics.quantiles(seconds, n=10)
    return {
        "ms": statistics.median(seconds) * 1e3, "ms_first_and_last_tenth": [tenths[0] * 1e3, tenths[-1] * 1e3],
        "ms_of_each_stretch": [statistics.median(one.seconds) * 1e3 for one in stretches],
        "tokens_per_s": tokens / sum(seconds), "accept_length": tokens / len(seconds) / batch, "steps": len(seconds),
        "batch": batch, "mean_context": statistics.mean(one.context for one in stretches),
    }  # fmt: skip


def copy_bandwidth(scale: Scale) -> float:
    """Return the rate at which the device copies within its memory, bytes read and written counted, in bytes/s."""
    source = torch.ones(scale.copied // 4, dtype=torch.int32, device=scale.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), scale.device)


def median_seconds(function: Callable[[], object], device: str) -> float:
    """Return the median of the seconds that the device takes for a call, without the first three."""
    seconds = []
    for _ in range(23 if device == "cuda" else 5):
        wait(device)
        started = time.perf_counter()
        function()
        wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[3:])


def wait(device: str) -> None:
    """Wait until the device has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def replayed(run: Callable[[], Tensor], scale: Scale) -> Callable[[], object]:
    """Return a call captured as a CUDA graph; on a CPU the call itself."""
    return Recorder(torch.device("cuda")).record(run).replay if scale.device == "cuda" else run


def profiled(function: Callable[[], object], device: str, repeats: int) -> list[str]:
    """Return the profiler's table of so many calls, by what keeps the device busy for longest."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=kinds) as profiler:
        for _ in range(repeats):
            function()
        wait(device)
    averages = profiler.key_averages()
    return averages.table(sort_by=f"self_{device}_time_total", row_limit=25, max_name_column_width=90).splitlines()


# ---- attention ---------------------------------------------------------------------------------------------------


def by_bytes(layer: FlexLayer, b: Tensor, h: Tensor, q: Tensor, row: Tensor) -> Tensor:
    """`FlexLayer._visible` as it was before a node's window became words: a byte for each pair of node and row."""
    plan, size = layer.plan, layer.plan.kv.page_size
    node, page = (q % plan.query_block) % plan.width, layer.logical[plan.slots[b], row // size]
    ahead = page * size + row % size - plan.starts[b].int()
    within = (ahead < plan.window) & plan.visible[b, node, ahead.clamp(0, plan.window - 1)]
    seen = (page >= 0) & ((ahead < 0) | within)
    return seen if plan.first is None else seen & (ahead >= plan.first[b, node])


def by_nothing(layer: FlexLayer, b: Tensor, h: Tensor, q: Tensor, row: Tensor) -> Tensor:
    """See every row: the time is what a prefix without a mask would take, and the result is wrong."""
    return row >= 0


MASKS: dict[str, Callable[..., Tensor]] = {"words": FlexLayer._visible, "bytes": by_bytes, "none": by_nothing}


@torch.inference_mode()
def attention(report: Report, scale: Scale) -> None:
    """Attention alone, by nodes and context: the time of a layer, and what it must read over what a copy moves."""
    sizes = read_model_config(model_sizes(scale))
    shape, page = KVShape(sizes.layers, sizes.kv_heads, sizes.head_dim), 64
    new = {"dtype": getattr(torch, scale.dtype), "device": scale.device}
    rows = max(scale.contexts) + max(scale.nodes)
    kv = PagedKV(shape, pages=2 + rows // page, page_size=page, slots=2, rows_per_slot=rows,
                 zeros=partial(torch.zeros, **new))  # fmt: skip
    torch.manual_seed(SEED)
    kv.pool.normal_()
    kv.map(1, 0, kv.allocate(kv.pages_for(rows)))
    copied = copy_bandwidth(scale)
    for nodes, (mask, visible) in itertools.product(scale.nodes, MASKS.items()):
        plan = Plan(kv, 1, 1, nodes)
        given = [torch.randn(1, heads, nodes, sizes.head_dim, **new)
                 for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]  # fmt: skip
        attend, graph = PagedFlex(kv, plan, sizes.layers), None  # one graph for all contexts, as a step has
        with mock.patch.object(FlexLayer, "_visible", visible):
            torch._dynamo.reset()
            call: Any = autotuned(FlexLayer.__call__) if scale.compiled else FlexLayer.__call__
            # In all layers, so that keys and values come from memory and not from a cache.
            run = lambda: [call(attend.layer(at), *given) for at in range(sizes.layers)][-1]  # noqa: B023, E731
            for context in scale.contexts:
                if (name := f"{nodes} nodes, context {context}, {mask}") in report:
                    continue
                with report.part(name):
                    fill(plan, context)
                    error = attention_error(kv, plan, context, given[0], run())
                    graph = graph or replayed(run, scale)
                    seconds = median_seconds(graph, scale.device)
                    read = shape.bytes(context + nodes, kv.pool.dtype)
                    report.add(name, {
                        "ms_a_layer": seconds / sizes.layers * 1e3, "bytes_a_layer": read / sizes.layers,
                        "share_of_copy": read / seconds / copied, "relative_error": error,
                    })  # fmt: skip
                    assert error < FAR or mask == "none", f"attention differs from plain attention by {error:.3f}"


def fill(plan: Plan, context: int) -> None:
    """Describe a chain of nodes after so many rows of slot 1."""
    device, nodes = plan.slots.device, plan.width
    chain = torch.ones(1, nodes, nodes, dtype=torch.bool, device=device).tril()
    slot, start = (torch.full((1,), value, dtype=torch.int64, device=device) for value in (1, context))
    plan.fill(slot, start, chain, chain[:, -1])


def attention_error(kv: PagedKV, plan: Plan, context: int, q: Tensor, found: Tensor) -> float:
    """Return how far the last layer's result is from plain attention over the same rows in float32, relative to it."""
    position = torch.arange(context + plan.width, device=q.device)[None]
    rows = kv.rows(plan.slots, position, torch.ones_like(position, dtype=torch.bool))
    keys, values = (part[:, :, rows].float() for part in kv.layer(kv.pool.shape[0] // 2 - 1))
    seen = torch.cat((plan.visible.new_ones(1, plan.width, context), plan.visible), dim=2)
    truth = F.scaled_dot_product_attention(q.float(), keys, values, attn_mask=seen, enable_gqa=True)
    return float((found.float() - truth).norm() / truth.norm())


# ---- products ----------------------------------------------------------------------------------------------------

# What precedes each product of a layer, given its norm and two tensors.
BEFORE: dict[str, Callable[..., Tensor]] = {
    "qkv": lambda norm, x, other: norm(x), "o": lambda norm, x, other: x / other,
    "gate_up": lambda norm, x, other: norm(x), "down": lambda norm, x, other: F.silu(x) * other,
}  # fmt: skip


def by_scales_of_rows(linear: Fp8Linear, x: Tensor) -> Tensor:
    """Multiply as `Fp8Linear` did before its product had scales of 1."""
    numbers, scale = rowwise(x.flatten(0, 1))
    scales = {"scale_a": scale, "scale_b": linear.weight_scale.t()}
    return torch._scaled_mm(numbers, linear.weight.t(), **scales, out_dtype=torch.bfloat16)[None]


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "within the loop": lambda linear, x: linear(x), "stored": lambda linear, x: linear(stored(x)),
    "fp8": lambda linear, x: linear(x), "fp8, scales of rows": by_scales_of_rows,
}  # fmt: skip


@torch.inference_mode()
def products(report: Report, scale: Scale) -> None:
    """A layer's four products at few rows: what precedes within the product's loop or stored, fp8 in two ways."""
    sizes, copied = read_model_config(model_sizes(scale)), copy_bandwidth(scale)
    new: dict[str, Any] = {"dtype": torch.bfloat16, "device": scale.device}
    wide, inner, qkv = sizes.hidden_size, sizes.intermediate_size, sizes.heads + 2 * sizes.kv_heads
    shapes = {"qkv": (wide, qkv * sizes.head_dim), "o": (wide, wide), "gate_up": (wide, 2 * inner),
              "down": (inner, wide)}  # fmt: skip
    torch.manual_seed(SEED)
    for name, (size, features) in shapes.items():
        count = max(2, scale.copied // 8 // (size * features))  # so many that no cache holds them all
        linears = [nn.Linear(size, features, bias=False, **new) for _ in range(count)]
        narrow = [Fp8Linear(linear) for linear in linears]
        norm, before = RMSNorm(size, 1e-5).to(**new), BEFORE[name]
        for rows, (way, multiply) in itertools.product(scale.rows, WAYS.items()):
            if (what := f"{name}, {rows} rows, {way}") in report or (way == "stored" and rows > 1):
                continue
            with report.part(what):
                given = [torch.randn(1, rows, size, **new) for _ in range(2)]
                truth = before(norm, *given).float() @ linears[-1].weight.float().t()
                torch._dynamo.reset()  # all products share the code below, and a function may have but so many graphs
                forward = lambda norm, x, other, linear: multiply(linear, before(norm, x, other))  # noqa: B023, E731
                forward.__name__ = "forward"  # as a layer's, which is tuned
                call = autotuned(forward) if scale.compiled else forward
                layers: list[Any] = narrow if "fp8" in way else linears
                run = lambda: [call(norm, *given, linear) for linear in layers][-1]  # noqa: B023, E731
                error = float((run().float() - truth).norm() / truth.norm())
                seconds, read = median_seconds(replayed(run, scale), scale.device) / count, layers[0].weight.nbytes
                report.add(what, {"ms": seconds * 1e3, "weight_bytes": read, "relative_error": error,
                                  "share_of_copy": read / seconds / copied})  # fmt: skip
                assert error < (FAR_FP8 if "fp8" in way else FAR), f"a product is off by {error:.3f}"


# ---- steps -------------------------------------------------------------------------------------------------------


def step(report: Report, scale: Scale) -> None:
    """Batch 1: a plain step against a copy's bandwidth, a tree's over it, in flight, sampled; what the device does."""
    with Dummy(scale) as dummy:
        llm = dummy.load(1, scale.eagle3, simulate_acc_len=scale.lengths[-1])
        plain, tree = (("plain", llm, Case(False)), ("tree", llm, Case(True)))
        copied, steps = copy_bandwidth(scale), compare(scale, plain, tree)
        report.add("steps", steps)
        model, pool = llm.scheduler.engine.model, llm.scheduler.kv.pool
        # A plain step reads the weights once, and keys and values of its rows.
        read = sum(p.nbytes for p in model.parameters()) - (not model.config.tied) * model.embed_tokens.weight.nbytes
        read += steps["plain"]["mean_context"] * pool.shape[0] * pool.shape[1] * pool.shape[3] * pool.itemsize
        report.add("bandwidth", {"copy_bytes_per_s": copied, "plain_step_bytes": read,
                                 "share_of_copy": read / (steps["plain"]["ms"] / 1e3) / copied})  # fmt: skip
        drafter = llm.scheduler.engine.drafter
        shape = {"rounds": drafter.rounds, "topk": drafter.topk, "simulated": scale.lengths[-1]}
        report.add("sizes", {**asdict(llm.scheduler.sizes), **shape})
        for name, case in (plain[0], plain[2]), (tree[0], tree[2]):
            for what, one, other in (("one by one", case._replace(overlap=True), case._replace(overlap=False)),
                                     ("temperature 0.8", case, case._replace(temperature=0.8))):  # fmt: skip
                with report.part(f"{what}, {name}"):
                    report.add(f"{what}, {name}", compare(scale, ("usual", llm, one), (what, llm, other)))
            with report.part(f"profile, {name}"):
                seated(llm, case, scale)
                repeats = min(scale.steps, 10)
                report.add(f"profile of {repeats}, {name}", profiled(llm.scheduler.step, scale.device, repeats))
                finish(llm)


@contextmanager
def made_afresh() -> Iterator[None]:
    """Within this context an engine compiles all its functions itself, and takes none from files or other engines."""
    files.loaded.clear()
    torch._dynamo.reset()
    make = lambda function, args, *_: files.compile_function(function, args)[0]  # noqa: E731
    with mock.patch.object(files, "find", make):
        yield
    files.loaded.clear()


WITHIN = partial(mock.patch.object, model_module, "stored", lambda x: x)
OPTIONS = {"programmatic launches": {"triton.enable_pdl": True}, "combined kernels": {"combo_kernels": True}}


def patched(options: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return a context with these options of Inductor, beside those that a function has (`files.tuning`)."""
    return torch._inductor.config.patch(options)


def variants(report: Report, scale: Scale) -> None:
    """Batch 1, plain steps: each variant of what is compiled against the usual, in the order A B B A."""
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {"within the loop": WITHIN}
    ways |= {name: partial(patched, option) for name, option in OPTIONS.items()}
    with Dummy(scale) as dummy:
        usual = dummy.load(1, None)
        for name, way in ways.items():
            if name not in report:
                with report.part(name), ExitStack() as stack:
                    stack.enter_context(made_afresh() if scale.compiled else nullcontext())
                    stack.enter_context(way())
                    other = dummy.load(1, None)
                    report.add(name, compare(scale, ("usual", usual, Case(False)), (name, other, Case(False))))
                    del other
                    free()


def fp8(report: Report, scale: Scale) -> None:
    """Batch 1: weights of 8 bits against 16; plain, and with trees at a simulated accept length."""
    with Dummy(scale) as dummy:
        for name, tree in (("plain", None), ("tree", scale.eagle3)):
            how = {} if tree is None else {"simulate_acc_len": scale.lengths[-1]}
            wide, narrow = (dummy.load(1, tree, quantization=kind, **how) for kind in (None, scale.quantization))
            case = Case(tree is not None)
            report.add(name, compare(scale, (scale.dtype, wide, case), (scale.quantization, narrow, case)))
            del wide, narrow
            free()


def batches(report: Report, scale: Scale) -> None:
    """Larger batches: plain steps and the tree of each batch, as `Sizes.shapes_of` has it, at its likely length."""
    steps, topk, nodes = scale.eagle3
    with Dummy(scale) as dummy:
        for batch, (tree, length) in itertools.product(scale.batches, (((1, topk, 2), 1.7), ((steps, topk, 8), 2.5))):
            tree = (min(tree[0], steps), topk, min(tree[2], nodes))
            if (name := f"batch {batch}, {'/'.join(map(str, tree))}, accept length {length:g}") in report:
                continue
            with report.part(name):
                llm = dummy.load(batch, tree, simulate_acc_len=length)
                plain, drafted = (("plain", llm, Case(False, batch)), ("tree", llm, Case(True, batch)))
                report.add(name, compare(scale, plain, drafted))
                del llm
                free()


def tests(report: Report, scale: Scale) -> None:
    """The tests marked `cuda`, file by file."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *scale.tests]
    listed = subprocess.run([*command, "--collect-only"], capture_output=True, text=True).stdout.splitlines()
    for file in sorted({line.partition("::")[0] for line in listed if line.startswith("tests/") and "::" in line}):
        if file not in report:
            with report.part(file):
                done = subprocess.run([*command, file], stdout=subprocess.PIPE, text=True)
                assert done.returncode == 0, done.stdout[-1500:]
                report.add(file, done.stdout.strip().rpartition("\n")[2])
    assert report.figures or report.failures, f"no test was found: {listed}"


STAGES: dict[str, Callable[[Report, Scale], None]] = {  # in the order of what one wants to know first
    "server": server, "attention": attention, "products": products, "fp8": fp8, "step": step, "variants": variants,
    "batches": batches, "methods": methods, "tests": tests,
}  # fmt: skip
