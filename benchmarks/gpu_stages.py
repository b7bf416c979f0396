"""What `gpu.py` measures: one function a stage, each within minutes on one GPU, with toy sizes on a CPU as well.

The first two stages, smoke and attention, are in `gpu_first.py`.

A stage writes its figures into a `Report`, each as soon as it is known, so that a stage that is cut off leaves what it
had, and one that is run again goes on behind it. Things that are compared run in one process in the order A B B A,
stretches of decode steps of fresh requests, so that a machine that warms up or slows down does so for both. A figure is
the median over the steps of both stretches; its spread is the first and the last tenth, and both stretches' medians.

Large models have dummy weights and the sizes of published ones. Their heads are written as random files and loaded as
any head. A random head's trees would be wide and flat, which no head's are, and a flat tree can accept little. So the
head here is made sure of itself: its likeliest token has nearly all the probability, and its trees are S deep. Nothing
is accepted of them but by `--simulate-acc-len`. Every figure has the accept length that there was beside it.

Read next: `gpu.py`, the command.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch

import bench
from benchmarks import throughput
from benchmarks.parity import Reference
from minispec import LLM, SamplingParams
from minispec.buffers import Sizes
from minispec.cuda.graphs import Recorder
from minispec.eagle import Eagle3Head, HeadConfig
from minispec.model import Model, ModelConfig
from minispec.request import Request
from minispec.sampling import GREEDY
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
    contexts: tuple[int, ...] = (512, 2048, 8192, 32768)
    lengths: tuple[float, float] = (1.5, 3.5)  # simulated accept lengths
    warm_up: int = 8  # decode steps before those that are timed
    steps: int = 40  # timed decode steps of a stretch
    quantization: str = "fp8"  # of the stage of that name
    copied: int = 4 << 30  # bytes of the device copy
    prompts: int | None = None  # of each set for the default model; None: all
    new_tokens: int = 128
    model: str | None = None  # that parity and default are about; None: the default model
    chunk: int = 2048  # most prompt tokens of a prefill step
    methods: tuple[str, ...] = ("eagle3", "ngram", "eagle", "mtp", "standalone")
    tests: tuple[str, ...] = ("-m", "cuda")


FULL = Scale()
TINY = Scale(
    device="cpu", dtype="float32", compiled=False, sizes=tuple(TOY.items()), draft_vocab=256, eagle3=(3, 2, 6),
    prompt=16, nodes=(1, 3), contexts=(16, 90), lengths=(1.5, 2.5), warm_up=1, steps=6, copied=1 << 20, prompts=1,
    new_tokens=6, chunk=1024, methods=("ngram",), quantization="int8",
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


# ---- models ------------------------------------------------------------------------------------------------------


@contextmanager
def only_batches(sizes: Sequence[int]) -> Iterator[None]:
    """Let engines have these batch buckets alone, and one size of prefill: each takes up to a minute to compile."""
    resolve = Sizes.resolve

    def fewer(*args: Any, **options: Any) -> Sizes:
        whole = resolve(*args, **options)
        return replace(whole, batch_sizes=tuple(sizes), prefill_sizes=whole.prefill_sizes[-1:])

    with mock.patch.object(Sizes, "resolve", fewer):
        yield


def model_sizes(published: dict[str, Any], scale: Scale) -> ModelConfig:
    """Return the sizes of a published model, or of the toy in its place."""
    return ModelConfig.from_hf({**published, **dict(scale.sizes)})


def write_head(folder: Path, target: ModelConfig, draft_vocab: int) -> None:
    """Write a random EAGLE-3 head for a target of these sizes, as published heads are, sure of what it drafts."""
    layers, width = target.layers, target.hidden_size
    ids = torch.arange(draft_vocab)
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
            scale = 64 / width**0.5 if name == "lm_head.weight" else 0.02
            parameter.normal_(0.0, scale, generator=generator)
    export(head, model, folder)


class Dummy:
    """A model of published sizes with dummy weights and an EAGLE-3 head, in a folder of its own while in use."""

    def __init__(self, published: dict[str, Any], scale: Scale) -> None:
        self.published, self.scale = published, scale

    def __enter__(self) -> Dummy:
        self.folder = TemporaryDirectory()
        root, target = Path(self.folder.name), model_sizes(self.published, self.scale)
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps({**self.published, **dict(self.scale.sizes)}))
        write_head(root / "head", target, min(self.scale.draft_vocab, target.vocab_size))
        return self

    def __exit__(self, *error: object) -> None:
        self.folder.cleanup()

    def load(
        self,
        batch: int,
        simulated: float | None = None,
        quantization: str | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> LLM:
        """Return the model with its drafter, ready for `batch` requests of the scale's prompt."""
        scale, root, (steps, topk, nodes) = self.scale, Path(self.folder.name), self.scale.eagle3
        # Requests that were seated first decode while the others' prompts are computed.
        context = scale.prompt + (steps + 1) * (scale.warm_up + scale.steps + batch + 4)
        with only_batches([batch]):
            return LLM(
                root / "model", load_format="dummy", random_seed=SEED, device=scale.device, dtype=scale.dtype,
                progress=tell, disable_torch_compile=not scale.compiled, disable_radix_cache=True,
                decode_log_interval=10**6, context_length=context, max_running_requests=batch,
                max_total_tokens=batch * (context + 256), chunked_prefill_size=min(scale.chunk, batch * scale.prompt),
                simulate_acc_len=simulated, quantization=quantization,
                cuda_graph_bs=[batch] if scale.device == "cuda" else None,
                speculative_algorithm="EAGLE3", speculative_draft_model_path=str(root / "head"),
                speculative_num_steps=steps, speculative_eagle_topk=topk, speculative_num_draft_tokens=nodes,
            )  # fmt: skip


def free() -> None:
    """Give memory of models that nobody holds any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---- timing ------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A kind of decode step to be timed."""

    draft: bool  # a tree at every step, or plain steps
    batch: int = 1
    prompt: int = 0
    temperature: float = 0.0
    overlap: bool | None = None  # None: as the scheduler has it


class Stretch(NamedTuple):
    """Decode steps one after the other."""

    seconds: list[float]  # of each step, from call to return; the tokens of one are waited for in it
    tokens: int
    context: float  # mean committed rows of a request


def seated(llm: LLM, case: Case) -> list[Request]:
    """Submit the requests of a case and step until all of them decode."""
    scheduler, rng = llm.scheduler, random.Random(SEED)
    assert scheduler.flush_cache(), "a stretch begins on an idle engine"
    if case.overlap is not None:
        scheduler.overlap = case.overlap
    params = SamplingParams(temperature=case.temperature, max_new_tokens=None, ignore_eos=True, sampling_seed=SEED)
    scheduler.policy.forced = lambda shapes: shapes[-1 if case.draft else 0]
    requests = []
    for number in range(case.batch):
        ids = [rng.randrange(3, llm.model_config.vocab_size) for _ in range(case.prompt)]
        requests.append(request := Request(f"{number}", ids, params))
        scheduler.validate(request)
        scheduler.submit(request)
    while len(scheduler.running) < case.batch:
        scheduler.step()
    return requests


def stretch(llm: LLM, case: Case, scale: Scale) -> Stretch:
    """Time decode steps of fresh requests."""
    requests, scheduler, seconds = seated(llm, case), llm.scheduler, []
    for _ in range(scale.warm_up):
        scheduler.step()
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


def finish(llm: LLM) -> None:
    """End all requests."""
    llm.scheduler.abort("")
    while llm.scheduler.has_work:
        llm.scheduler.step()


def compare(scale: Scale, *pair: tuple[str, LLM, Case]) -> dict[str, Any]:
    """Time two cases in the order A B B A; returns the figures of both, and the second's over the first's."""
    stretches: dict[str, list[Stretch]] = {name: [] for name, _, _ in pair}
    for name, llm, case in (*pair, *reversed(pair)):
        stretches[name].append(stretch(llm, case, scale))
    made: dict[str, Any] = {name: figures(stretches[name], case.batch) for name, _, case in pair}
    a, b = (made[name] for name, _, _ in pair)
    made["ms_ratio"] = b["ms"] / a["ms"]
    made["tokens_per_s_ratio"] = b["tokens_per_s"] / a["tokens_per_s"]
    return made


def figures(stretches: Sequence[Stretch], batch: int) -> dict[str, Any]:
    """Return the figures of one case."""
    seconds = [second for one in stretches for second in one.seconds]
    tokens, tenths = sum(one.tokens for one in stretches), statistics.quantiles(seconds, n=10)
    return {
        "ms": statistics.median(seconds) * 1e3,
        "ms_first_and_last_tenth": [tenths[0] * 1e3, tenths[-1] * 1e3],
        "ms_of_each_stretch": [statistics.median(one.seconds) * 1e3 for one in stretches],
        "tokens_per_s": tokens / sum(seconds),
        "accept_length": tokens / len(seconds) / batch,
        "steps": len(seconds),
        "batch": batch,
        "mean_context": statistics.mean(one.context for one in stretches),
    }


def state(llm: LLM) -> dict[str, Any]:
    """Return the sizes of an engine, and the most memory taken so far; on a CPU packed weights are not counted."""
    engine = llm.scheduler.engine
    peak = torch.cuda.max_memory_allocated() if engine.device.type == "cuda" else None
    weights = {"target": engine.model, "drafter": engine.drafter.network}
    return {
        "sizes": asdict(engine.sizes),
        "weight_bytes": {n: sum(p.nbytes for p in m.parameters()) for n, m in weights.items() if m is not None},
        "peak_memory_bytes": peak,
        "overlap": llm.scheduler.overlap,
        "captured": sorted({buffers.name for buffers, _ in engine.graphs}),
        "compiled": compiled_so_far(),
    }


def compiled_so_far() -> dict[str, Any]:
    """Return how many graphs this process has compiled, the seconds of each, and what Inductor's cache did for them."""
    counters, times = torch._dynamo.utils.counters, torch._dynamo.utils.compilation_time_metrics
    cache = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
    seconds = times.get("_compile.compile_inner", [])
    return {"graphs": counters["stats"]["unique_graphs"], "seconds": [round(one, 2) for one in seconds], "cache": cache}


def copy_bandwidth(scale: Scale) -> dict[str, float]:
    """Return the rate at which the device copies within its memory, bytes read and written counted, in bytes/s."""
    source = torch.ones(scale.copied // 4, dtype=torch.int32, device=scale.device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), scale.device)
    return {"bytes_per_s": 2 * source.nbytes / seconds, "copied_bytes": source.nbytes}


def median_seconds(function: Callable[[], object], device: str, repeats: int = 20) -> float:
    """Return the median of the seconds that the device takes for a call, without the first three."""
    seconds = []
    for _ in range(repeats + 3):
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


def plain_bytes(llm: LLM, rows: float) -> float:
    """Return the bytes that a plain step of one request must read: weights once, and keys and values of its rows."""
    model, pool = llm.scheduler.engine.model, llm.scheduler.kv.pool
    looked_up = 0 if model.config.tied else model.embed_tokens.weight.nbytes
    row_bytes = pool.shape[0] * pool.shape[1] * pool.shape[3] * pool.itemsize
    return sum(p.nbytes for p in model.parameters()) - looked_up + rows * row_bytes


# ---- captured graphs ---------------------------------------------------------------------------------------------


def graph_nodes(graph: Any) -> int | None:
    """Return the number of nodes of a captured graph; None where PyTorch has not kept what could be asked."""
    try:
        handle = graph.raw_cuda_graph()
        maps = Path("/proc/self/maps").read_text().split()
        runtime = ctypes.CDLL(next(word for word in maps if "libcudart" in word))
    except (AttributeError, RuntimeError, OSError, StopIteration):
        return None
    count = ctypes.c_size_t()
    status = runtime.cudaGraphGetNodes(ctypes.c_void_p(handle), None, ctypes.byref(count))
    return count.value if status == 0 else None


def profiled(function: Callable[[], object], device: str, repeats: int = 1) -> dict[str, Any]:
    """Run a function under the profiler; returns operations and time of the device (on a CPU: of its operators)."""
    from torch.profiler import ProfilerActivity, profile

    function()
    wait(device)
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    started = time.perf_counter()
    with profile(activities=kinds) as profiler:
        for _ in range(repeats):
            function()
        wait(device)
    wall = time.perf_counter() - started
    wanted = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    time_of = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    found = [event for event in profiler.key_averages() if event.device_type == wanted]
    found.sort(key=lambda event: -getattr(event, time_of))
    return {
        "operations_per_call": sum(event.count for event in found) / repeats,
        "device_ms_per_call": sum(getattr(event, time_of) for event in found) / repeats / 1e3,
        "wall_ms_per_call_profiled": wall / repeats * 1e3,
        "longest": [
            {"name": event.key[:120], "calls": event.count / repeats,
             "ms_per_call": getattr(event, time_of) / repeats / 1e3}
            for event in found[:20]
        ],
    }  # fmt: skip


@torch.inference_mode()
def graphs_of(llm: LLM) -> dict[str, Any]:
    """Capture the greedy decode steps once more, in a form that can be asked, and return how large their graphs are.

    Nothing where the device is no GPU.
    """
    engine, made = llm.scheduler.engine, {}
    if engine.device.type != "cuda":
        return made
    asked = partial(torch.cuda.CUDAGraph, keep_graph=True)
    for buffers in engine.decodes.values():
        buffers.upload([], ())
        with mock.patch.object(torch.cuda, "CUDAGraph", asked):
            graph = Recorder(engine.device).record(lambda: engine.decode(buffers, GREEDY))  # noqa: B023  called at once
        counted = profiled(graph.replay, engine.device.type)["operations_per_call"]
        made[buffers.name] = {"nodes": graph_nodes(graph), "operations_of_a_replay": counted or None}
    return made


# ---- the stages --------------------------------------------------------------------------------------------------


OUTCOME = re.compile(r"(tests/.+?::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


def tests(report: Report, scale: Scale) -> None:
    """The tests marked `cuda`, file by file; the outcome of each is written as soon as it is known."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    listed = subprocess.run([*command, "-rs", "--collect-only", *scale.tests], capture_output=True, text=True)
    files: dict[str, list[str]] = defaultdict(list)
    for line in listed.stdout.splitlines():
        if line.startswith("tests/") and "::" in line:
            files[line.partition("::")[0]].append(line)
    if listed.returncode or not files:
        raise RuntimeError(f"pytest ended with status {listed.returncode}: {listed.stdout[-1500:]}{listed.stderr}")
    report.add("left out", re.findall(r"test_\w+\.py: \w+ is not installed|SKIPPED.*", listed.stdout))
    for file, names in files.items():
        with report.part(file):
            outcomes = {**report.figures.get(file, {})}
            for name, outcome in outcomes_of([*command, "-vv"], [name for name in names if name not in outcomes]):
                outcomes[name] = outcome
                report.add(file, outcomes)
    every = [outcome for file in files for outcome in report.figures.get(file, {}).values()]
    if not {"PASSED", "FAILED"}.intersection(every):
        raise RuntimeError("no test ran: all were skipped")


def outcomes_of(command: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Run tests in a process and yield each one's name and outcome; one with which the process died has CRASHED.

    Then RuntimeError is raised, and whoever calls again with the rest goes on behind it.
    """
    left = [*names]
    if not left:
        return
    with subprocess.Popen([*command, *left], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if (found := OUTCOME.match(line)) and found[1] in names:
                left = [name for name in left if name != found[1]]
                yield found[1], found[2]
    if left:
        yield left[0], "CRASHED"
        raise RuntimeError(f"pytest ended with status {process.returncode} in {left[0]}; {len(left) - 1} are left")


def step(report: Report, scale: Scale) -> None:
    """Batch 1: plain decoding against the bandwidth of a copy, and the whole step with a tree over a plain one."""
    with Dummy(LLAMA3, scale) as dummy:
        llm = dummy.load(1)
        copies = [copy_bandwidth(scale)]
        plain, tree = Case(False, prompt=scale.prompt), Case(True, prompt=scale.prompt)
        steps = compare(scale, ("plain", llm, plain), ("tree", llm, tree))
        report.add("steps", steps)
        copies.append(copy_bandwidth(scale))
        read = plain_bytes(llm, steps["plain"]["mean_context"])
        rate = read / (steps["plain"]["ms"] / 1e3)
        copied = statistics.mean(copy["bytes_per_s"] for copy in copies)
        report.add("bandwidth", {"copies_before_and_after": copies, "plain_step_bytes": read,
                                 "plain_step_bytes_per_s": rate, "share_of_copy": rate / copied})  # fmt: skip
        report.add("engine", state(llm))
        report.add("graphs", graphs_of(llm))


def batch_of(batch: int) -> Callable[[Report, Scale], None]:
    """Return the stage that compares plain decoding with simulated accept lengths for so many requests."""

    def stage(report: Report, scale: Scale) -> None:
        with Dummy(LLAMA3, scale) as dummy:
            for length in scale.lengths:
                name = f"accept length {length:g}"
                if name in report:
                    continue
                llm = dummy.load(batch, simulated=length)
                plain, tree = (Case(draft, batch, scale.prompt) for draft in (False, True))
                found = compare(scale, ("plain", llm, plain), ("tree", llm, tree))
                report.add(name, {**found, "engine": state(llm), "simulated": length})
                del llm
                free()

    stage.__doc__ = f"Batch {batch}: plain decoding and trees at simulated accept lengths."
    return stage


def compare_both(report: Report, scale: Scale, *pair: tuple[str, LLM, dict[str, Any]]) -> None:
    """Compare two cases, each with its LLM and options of `Case`, in plain steps and in steps with trees."""
    for draft, name in ((False, "plain"), (True, "tree")):
        cases = [(what, llm, Case(draft, prompt=scale.prompt, **options)) for what, llm, options in pair]
        report.add(name, compare(scale, *cases))


def overlap(report: Report, scale: Scale) -> None:
    """Batch 1: steps launched before the one before is collected, and steps one by one; plain, and with trees."""
    with Dummy(LLAMA3, scale) as dummy:
        llm = dummy.load(1, simulated=scale.lengths[1])
        compare_both(report, scale, ("serial", llm, {"overlap": False}), ("overlap", llm, {"overlap": True}))
        report.add("engine", {**state(llm), "simulated": scale.lengths[1]})


def sampled(report: Report, scale: Scale) -> None:
    """Batch 1: sampled decoding against greedy; plain, and with trees at a simulated accept length."""
    with Dummy(LLAMA3, scale) as dummy:
        llm = dummy.load(1, simulated=scale.lengths[1])
        compare_both(report, scale, ("greedy", llm, {}), ("temperature 0.8", llm, {"temperature": 0.8}))
        report.add("engine", {**state(llm), "simulated": scale.lengths[1]})


def fp8(report: Report, scale: Scale) -> None:
    """Batch 1: weights of 8 bits against 16; plain, and with trees at a simulated accept length."""
    with Dummy(LLAMA3, scale) as dummy:
        wide = dummy.load(1, simulated=scale.lengths[1])
        narrow = dummy.load(1, simulated=scale.lengths[1], quantization=scale.quantization)
        compare_both(report, scale, (scale.dtype, wide, {}), (scale.quantization, narrow, {}))
        for name, llm in ((scale.dtype, wide), (scale.quantization, narrow)):
            report.add(f"engine, {name}", {**state(llm), "simulated": scale.lengths[1]})


def profile(report: Report, scale: Scale) -> None:
    """Batch 1: what the device is busy with in a plain step and in one with a tree."""
    with Dummy(LLAMA3, scale) as dummy:
        llm = dummy.load(1, simulated=scale.lengths[1])
        for draft, name in ((False, "plain"), (True, "tree")):
            seated(llm, Case(draft, prompt=scale.prompt))
            for _ in range(scale.warm_up):
                llm.scheduler.step()
            report.add(name, profiled(llm.scheduler.step, scale.device, repeats=min(scale.steps, 10)))
            finish(llm)
        report.add("engine", {**state(llm), "simulated": scale.lengths[1]})


# ---- the default model -------------------------------------------------------------------------------------------


def default_options(scale: Scale, name: str, dtype: str) -> dict[str, Any]:
    """Return the options of the default model with a method of `bench.METHODS`."""
    return {
        **bench.METHODS[name], "model": scale.model, "device": scale.device, "dtype": dtype,
        "disable_torch_compile": not scale.compiled, "chunked_prefill_size": scale.chunk,
        "max_total_tokens": 8 * 4096, "decode_log_interval": 10**6,
    }  # fmt: skip


def default_prompts(llm: LLM, scale: Scale) -> list[list[int]]:
    """Return prompts as chats."""
    sets = bench.read_prompts(bench.PROMPTS, scale.prompts)
    return throughput.encode([text for texts in sets.values() for text in texts], llm.tokenizer)


def parity(report: Report, scale: Scale) -> None:
    """The default model in float32: greedy tokens are transformers' own with every method, alone and in a batch."""
    prompts: list[list[int]] = []
    truth: list[list[int]] = []
    for name in ("none", *scale.methods):
        if name in report:
            continue
        with report.part(name):
            with only_batches([1, 8]):
                one = throughput.Ours(name, default_options(scale, name, "float32"), [1, 8])
            if not truth:
                prompts = default_prompts(one.llm, scale)
                truth = Reference(one.llm.folder, scale.device).generate(prompts, scale.new_tokens)
            equal = {}
            for batch in one.batches:
                outputs = one.run(prompts, batch, scale.new_tokens, 0.0).outputs
                equal[f"batch {batch}"] = sum(list(a) == b for a, b in zip(outputs, truth, strict=True))
            report.add(name, {"equal": equal, "prompts": len(prompts), "engine": state(one.llm)})
            del one
            free()


def default(report: Report, scale: Scale) -> None:
    """The default model with what ships for it, batch 1: tokens/s and accept length beside plain decoding."""
    with only_batches([1]):
        plain = throughput.Ours("none", default_options(scale, "none", scale.dtype), [1])
    prompts = default_prompts(plain.llm, scale)
    warm = throughput.encode(throughput.WARM_UP, plain.llm.tokenizer)
    for name in scale.methods:
        if name in report:
            continue
        with report.part(name):
            with only_batches([1]):
                one = throughput.Ours(name, default_options(scale, name, scale.dtype), [1])
            for contestant in (plain, one):
                contestant.run(warm, 1, 8, 0.0)
            runs: dict[str, list[throughput.Run]] = {"none": [], name: []}
            for contestant in (plain, one, one, plain):
                runs[contestant.name].append(contestant.run(prompts, 1, scale.new_tokens, 0.0))
            made = {who: served(both) for who, both in runs.items()}
            ratio = made[name]["tokens_per_s"] / made["none"]["tokens_per_s"]
            report.add(name, {**made, "tokens_per_s_ratio": ratio, "engine": state(one.llm)})
            del one, contestant
            free()


def served(runs: Sequence[throughput.Run]) -> dict[str, Any]:
    """Return the figures of runs over the same prompts; prefill is included but in decode_tokens_per_s."""
    rates = [run.tokens / run.seconds for run in runs]
    decoding = [run.decoded / run.decode_seconds for run in runs if run.decode_seconds]
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_of_each_run": rates,
        "decode_tokens_per_s": statistics.median(decoding) if decoding else None,
        "accept_length": throughput.accept_length(runs[0].verified),
        "accept_length_without_loops": throughput.accept_length(runs[0].verified_unlooped),
        "accepted_by_depth": throughput.by_depth(runs[0].verified),
        "tokens": runs[0].tokens,
    }
