"""How an engine is put together, once for every kind of process: from flags and a model's folder to an `Engine`.

`Build.parts` has the steps in their order: target, drafter, 8-bit weights, packed weights. Flags and device decide
whether the last two are done. Then weights move to huge pages, and `Build.engine_of` makes the engine around the parts,
with functions that compile when they first run. `Outline`, `Rehearsal` and `Follow` do a few of the steps differently.

Read next: `memory.py`, which counts what is made here; `link.py` for ranks, `makers.py` for rehearsals.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minispec.asked.grammar import Grammars
from minispec.asked.steps import Asking
from minispec.attention import AttendKind, PagedFlex, allow_uncompiled
from minispec.buffers import Sizes
from minispec.compiled import CompileFor
from minispec.config import WIDE, Config, flag_name
from minispec.cpu.gather import PagedGather
from minispec.cpu.groups import Groups
from minispec.cpu.huge_pages import move_to_huge_pages, move_when_idle, sparse
from minispec.cpu.int4 import Int4Linear, quantize_to_int4
from minispec.cpu.int8 import TEXT, check_int8, pack_integers, quantize, replace_weights
from minispec.cpu.linear import can_pack, own_heads, pack_linears, room_for_both
from minispec.cpu.rowwise import PagedChains, RopeTable, keep_rows_apart, reason_against_attention, round_as_eager
from minispec.cpu.spinning import spin_alone
from minispec.cpu.template import reason_against, reason_against_int4
from minispec.cuda.fp8 import can_capture_fp8, check_fp8, use_fp8
from minispec.cuda.graphs import capture
from minispec.drafter import Drafter, Plain
from minispec.engine import Engine
from minispec.load.architectures import read_model_config
from minispec.load.default_model import ensure_default_model
from minispec.load.drafters import make_drafter, with_own_head
from minispec.load.files import DirectStep, has_compiler, is_empty, prepare, take_from
from minispec.load.fp8_weights import read_weights, stored_in_fp8
from minispec.load.gguf_models import TENSORS, as_folder
from minispec.load.gguf_weights import FileWeights
from minispec.load.keys import naming
from minispec.load.machine import host_memory, limit_threads
from minispec.load.makers import Makers, process_count
from minispec.load.memory import Budget, Memory, free_bytes, largest_graph, make_kv, measure, unsaid
from minispec.load.published import parts_of, published_tensors, reads
from minispec.load.ranks import gather
from minispec.load.selftest import PROMPT, self_test
from minispec.load.tokenizer import Tokenizer, byte_tokenizer, eos_token_ids, load_tokenizer
from minispec.load.tree_shape import coarse_batches, trees_by_batch
from minispec.load.warm_up import make_files, steps_of, time_steps, warm_up
from minispec.load.weights import load_weights, read_config, resolve_model, tied_as_stored
from minispec.model import Block, Model, ModelConfig
from minispec.ranks.link import Elsewhere, Lead, Ranks
from minispec.ranks.link import follow as follow_rank
from minispec.ranks.shards import Shard
from minispec.standalone import StandaloneDrafter
from minispec.verify import Accept

logger = logging.getLogger("minispec")

# Token counts of prefill steps on a CPU, where all prefill steps share a graph.
CPU_PREFILLS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512)

# What replaces the layers of a model that was loaded in 16 bits.
REPLACE: dict[str | None, Callable[[Model], None]] = {"int8": replace_weights, "int4": quantize_to_int4}


class Parts(NamedTuple):
    """What an engine is made of."""

    sizes: Sizes
    network: Model
    drafter: Drafter
    unsplit: Model | None = None  # what the drafter reads of a target that is spread over ranks


class Build:
    """One engine in the making, of rank 0 or of a process alone."""

    memory: Memory  # what the engine takes; set when the engine is complete
    ranks: Ranks | None = None  # the ranks of --tp-size; None: there is one rank
    shard: Shard | None = None  # this rank's part of the model
    _mover: threading.Thread | None = None  # moves weights to huge pages after the last graph is made

    def __init__(self, config: Config, tell: Callable[[str], None]) -> None:
        self.config, self.tell, self.device = config, tell, choose_device(config)
        self.dtype = choose_dtype(config, self.device)
        if config.quantization in ("int4", "gguf") and (why := _reason_against_int4(config, self.dtype)):
            raise ValueError(f"--quantization {config.quantization}: {why}; without the flag the model is served")
        self.folder = choose_folder(config, tell)
        with naming("--model", self.folder):
            self.hf_config = read_config(self.folder)
            self.model_config = read_model_config(self.hf_config)
            if config.load_format != "dummy" and config.quantization != "gguf":
                self.model_config = tied_as_stored(self.model_config, self.folder, config.load_format)
        if self.model_config.sparse and config.quantization is not None:
            raise ValueError(_no_experts("--quantization", config.quantization))
        # Whether the bits of a row must not depend on other rows. In float32 no text was seen that depends on them.
        self.rowwise = config.enable_deterministic_inference and self.dtype != torch.float32
        if config.enable_deterministic_inference and (why := self._reason_against_rowwise()):
            raise ValueError(f"--enable-deterministic-inference: {why}; without the flag the model is served")

    def lead(self, batches: Sequence[int] = (), later: bool = False) -> None:
        """Set what follows from flags and config.json for an engine that serves, and start the other ranks.

        batches, later: `LLM`'s options batches and compile_later.
        """
        on_cpu = self.device.type == "cpu"
        round_as_eager(self.rowwise)
        if on_cpu:
            limit_threads(self.config.tp_size // self.config.nnodes)
            spin_alone()
        if self.config.compiled_files is not None:
            take_from(Path(self.config.compiled_files))
        self.config = config = with_own_head(self.config, self.hf_config, self.folder, self.tell)
        if config.tp_size > 1:
            if config.first_rank() != 0:
                raise ValueError("`LLM` is rank 0 of --tp-size; `python -m minispec.server` is another machine's rank, "
                                 "with --node-rank or by torchrun")  # fmt: skip
            Shard(self.model_config, 0, config.tp_size, "")  # raises ValueError before any process is started
            self.join(gather(config, self.device))
        context = _context_length(config, self.model_config)
        self.tokenizer = choose_tokenizer(config, self.folder, self.model_config.vocab_size)
        with naming("--model", self.folder):
            self.eos_ids = eos_token_ids(self.folder, self.hf_config, self.tokenizer)
        running = config.max_running_requests or (8 if on_cpu else 48)
        if config.adapts_from(not on_cpu) == WIDE <= running:
            self.tell(f"larger batches have smaller trees, and from batch {WIDE} on a step verifies them only where "
                      "measured times favour them; --no-speculative-adaptive keeps trees as given")  # fmt: skip
        chunk = config.chunked_prefill_size or (512 if on_cpu else 2048)
        chunk = context if chunk == -1 else min(chunk, context)
        self.limits: dict[str, Any] = {"context_length": context, "max_running": running, "chunk_size": chunk}
        self.limits |= {"batches": batches} if batches else {}
        self.compiled = _can_compile(config, self.device)
        self.beside = later and self.compiled and self.ranks is None  # whether processes compile
        # With other ranks compiling cannot come later: every rank would need processes that compile beside it.
        # The bits of eager and compiled steps are the same with `rowwise`, but eager ones have compiled products.
        self.later = self.beside and on_cpu and not config.wait_until_compiled and not self.rowwise
        if self.later and is_empty():
            prepare()  # else this is put off, and a stream would be silent meanwhile

    def _reason_against_rowwise(self) -> str | None:
        """Return why a text cannot depend on its own request alone here; None: it can."""
        if self.device.type == "cuda":
            return "on CUDA no kernel is fixed to one order of its sums yet; --device cpu has it"
        if self.config.tp_size > 2:  # of two numbers the sum is the same in either order
            return (
                f"the order in which {self.config.tp_size} ranks add up (--tp-size) moves with the number of rows; "
                "two ranks have one order, and --dp-size changes nothing"
            )
        if self.config.thresholds is not None:
            return "with --speculative-accept-threshold-single or -acc below 1 sampled texts depend on drafts"
        if not self.rowwise:
            return None
        c = self.model_config
        return reason_against(self.dtype) or reason_against_attention(c.heads, c.kv_heads, c.head_dim)

    def join(self, ranks: Ranks) -> None:
        """Make this process one of these ranks, with its part of the model."""
        self.ranks, self.shard = ranks, Shard(self.model_config, ranks.rank, ranks.size, ranks.group)

    # ---- the steps -----------------------------------------------------------------------------------------------

    def parts(self) -> Parts:
        """Return target and drafter, with weights quantized and packed as flags and device say.

        All ranks agree on sizes and quantize together. So every rank must take these steps in the same order.
        """
        parts = self.drafted(self.network())
        _, network, drafter, unsplit = parts
        # By the bytes before quantization, which oneDNN's copy takes.
        keep = self.device.type == "cpu" and room_for_both(_linear_bytes(network), host_memory()[1])
        if self.config.quantization in REPLACE:  # after a head has taken what it needs of the target's weights
            self.quantize(network)
        if self.rowwise:  # before other networks are packed, as what is packed is left alone
            keep_rows_apart(network)
        if self.config.draft_quantization == "fp8" and drafter.network is not None:
            if any(block.sparse for block in _blocks(drafter.network)):
                raise ValueError(_no_experts("--speculative-draft-model-quantization", "fp8"))
            use_fp8(drafter.network)
        if self.device.type == "cpu" and self.compiled and keep and (why := reason_against(self.dtype)):
            self.tell(f"products of several rows are oneDNN's, not those of Inductor's template: {why}")
        if self.device.type == "cpu" and can_pack(self.dtype):
            for model in (drafter.network, unsplit, None if self.rowwise else network):
                if model is not None:
                    pack_linears(model, keep and self.compiled, keep and self.compiled)
            if keep and not self.rowwise:
                pack_integers(network, self.compiled)
        return parts

    def network(self) -> Model:
        """Return the target, or this rank's part of it."""
        network = load_model(self.config, self.model_config, self.folder, self.dtype, self.device, self.shard)
        if self.config.quantization == "gguf":
            kinds = {4: Int4Linear, 8: Groups, 16: nn.Linear}
            counts = {bits: sum(isinstance(part, kind) for part in network.modules()) for bits, kind in kinds.items()}
            self.tell(f"gguf weights: {', '.join(f'{count} have {bits} bits' for bits, count in counts.items())}")
        return network

    def drafted(self, network: Model) -> Parts:
        """Return the parts around a target, with the drafter that the flags ask for; all ranks get the same sizes."""
        config = self.config
        if config.thresholds is not None:
            logger.warning("--speculative-accept-threshold-single %g, -acc %g: sampled output is no longer exact, "
                           "greedy output is", *config.thresholds)  # fmt: skip
        if config.simulate_acc_len is not None:
            logger.warning("--simulate-acc-len %g: steps with trees emit so many tokens in the mean, whatever the "
                           "target picks; output is junk, for measuring speed", config.simulate_acc_len)  # fmt: skip
        spread, target = self.shard is not None and config.reads_target, network
        if spread:  # embedding, final norm and LM head whole, since a head may need any row of them
            target = Model.empty(replace(self.model_config, layers=0), self.dtype, network.norm.weight.device)
            target.config = self.model_config
            _fill(target, config, self.folder)
        drafter = self.draft(target)
        for part in ("embed_tokens", "lm_head") if spread else ():
            if getattr(drafter.network, part, None) is not None:  # the drafter has one of its own
                setattr(target, part, None)
        sizes = resolve_sizes(config, self.device, self.limits, drafter)
        if self.ranks is not None:
            self.ranks.same_sizes(sizes)
        return Parts(sizes, network, drafter, target if spread else None)

    def draft(self, target: Model) -> Drafter:
        """Return the drafter for a target."""
        return make_drafter(self.config, target, self.folder, self.tokenizer)

    def quantize(self, network: Model) -> None:
        """Make the target's weights int8 or int4, and say what that costs in accuracy."""
        ids, kind = self.tokenizer.encode(TEXT), self.config.quantization
        cost = quantize(network, ids if self.ranks is None else self.ranks.same(ids), REPLACE[kind])
        dtype = str(self.dtype).removeprefix("torch.")
        self.tell(f"{kind} weights: on a text of {cost.tokens} tokens the KL divergence from {dtype} "
                  f"weights is {cost.divergence:.4f} nats a token, and the first choice is the same at "
                  f"{cost.agreement:.0%} of them")  # fmt: skip

    def engine_of(self, parts: Parts, pages: int) -> Engine:
        """Return the engine around the parts, with `pages` pages; if `compiled`, its functions compile at first run."""
        sizes, network, drafter, unsplit = parts
        if self.compiled:
            network.compile_blocks(DirectStep)
            drafter.compile(DirectStep)
            # The steps of several requests make these graphs in the warm-up; without them nothing would.
            for model in (network, drafter.network, unsplit) if sizes.max_running > 1 else ():
                for head in own_heads(model):
                    head.compile_alone(DirectStep)
        kv = make_kv(self.config, network, sizes, pages)
        accept = Accept(self.config.thresholds, self.config.simulate_acc_len)
        attend_kind: AttendKind = PagedFlex if self.compiled and kv.pool.is_cuda else PagedGather
        if self.rowwise:  # drafts change no token, so a drafter attends as ever
            network.rope = RopeTable(network, sizes.context_length)  # type: ignore[method-assign]
            attend_kind = lambda of, *args: (PagedChains if of is kv else PagedGather)(of, *args)  # noqa: E731
        engine = Engine(network, kv, drafter, sizes, attend_kind=attend_kind, accept=accept)
        engine.unsplit = unsplit
        if self.compiled:
            # Compiling the code around the blocks costs a CPU seconds for each shape, and gains 7 to 17 % of a step
            # if blocks are fast (docs/log.md). For larger trees the drafter's functions would be compiled too.
            few: CompileFor = lambda batch, nodes: batch == 1  # noqa: E731
            every: CompileFor = lambda batch, nodes: True  # noqa: E731
            engine.compile_small(DirectStep, every if kv.pool.is_cuda else few)
        return engine

    # ---- from the first step to the last -------------------------------------------------------------------------

    @torch.inference_mode()
    def engine(self) -> Engine:
        """Return the engine, warmed up and captured unless that comes later; logs memory, estimated and measured."""
        config, ranks = self.config, self.ranks
        with unsaid():
            budget = Budget(config, self.device, *Outline(self).parts())
        self.tell(f"memory, estimated: {budget.estimate}")
        budget.check()
        with budget.watch("loading the weights"):
            for flag, kind in quantizations(config).items():
                if kind == "fp8":
                    check_fp8(flag, self.dtype, self.device)
                elif kind == "int8":
                    check_int8(self.dtype)
            dtype = dtype_line(config, self.hf_config["torch_dtype"], self.dtype)
            self.tell(f"loading {config.served_name} as {dtype} on {self.device.type}")
            parts = self.parts()
            if self.later and not is_empty():
                # What is in files is loaded before weights move.
                self._mover = threading.Thread(target=move_when_idle, name="huge pages", daemon=True)
            else:
                move_to_huge_pages(self.device)
        budget.sizes, budget.network, budget.drafter, _ = parts
        with budget.watch("making the KV pools"):
            engine = self.engine_of(parts, budget.pages() if ranks is None else ranks.least(budget.pages()))
            engine.asked = Asking(engine, Grammars(self.tokenizer.backend, self.model_config.vocab_size, self.eos_ids))
            if ranks is not None:
                Lead(engine, ranks)  # from here on the other ranks follow this engine
        if self.later:
            for step in steps_of(engine):
                step.ready = False
        else:
            with budget.watch("warming up"):
                by_processes = self.beside and self.device.type == "cuda"
                warm_up(engine, self.tell, partial(self.makers, engine) if by_processes else None)
            with budget.watch("capturing CUDA graphs"):
                captured = captured_batches(config, engine.sizes)
                # In eager steps the number of rows that attention reads is a Python number, which a captured graph
                # would keep for all later steps. So only compiled steps are captured.
                if captured and self.compiled:
                    capture(engine, captured, self.tell)
            engine.settle()
            for _ in self.try_out(engine):
                pass
        self.memory = measure(engine)
        kept = (f"; pages behind the sliding window of {self.model_config.sliding_window} tokens are not given back yet"
                if self.model_config.windows(engine.sizes.context_length) else "")  # fmt: skip
        self.tell(f"memory, measured: {self.memory}{kept}")
        return engine

    def try_out(self, engine: Engine) -> Iterator[None]:
        """Time steps and test the head, once all graphs are made; a request may be served at each `yield`."""
        while self._mover is not None and self._mover.is_alive():
            self._mover.join(0.02)  # seconds; a request waits no longer for this
            yield
        drafter, config = engine.drafter, self.config
        adapts_from = config.adapts_from(self.device.type == "cuda")
        for batch in engine.sizes.batch_sizes:
            if batch >= adapts_from:
                time_steps(engine, batch)
                yield
        if drafter.network is not None and config.load_format != "dummy" and config.simulate_acc_len is None:
            self_test(engine, drafter, self.tokenizer.encode(PROMPT))

    def makers(self, engine: Engine, steps: int) -> Makers:
        """Start processes that make the files of an engine; steps: how many kinds lack them."""
        work = partial(make_files, partial(rehearse, self.config, engine.kv.pages), torch.get_num_threads())
        return Makers(work, process_count(steps))

    def move_weights(self) -> None:
        """Have a thread move the weights to huge pages, if that was put off when they were loaded."""
        if self._mover is not None and self._mover.ident is None:
            self._mover.start()


def _blocks(model: nn.Module | None) -> Iterator[Block]:
    """Yield the decoder layers of a model or of a drafter's network; a layer that is there n times comes n times."""
    parts = [] if model is None else model.named_modules(remove_duplicate=False)
    yield from (part for _, part in parts if isinstance(part, Block))


def _kind(block: Block) -> tuple[Any, ...]:
    """Return the types of a block's layers, and the shapes of their buffers: blocks with the same share graphs.

    The types differ between an MLP and experts, and between blocks of a checkpoint that is fp8 in part; the shapes
    between weights in groups of other sizes.
    """
    return tuple((type(part), *(one.shape for one in part.buffers(recurse=False))) for part in block.modules())


def _linear_bytes(model: Model) -> int:
    """Return the bytes of the linear layers, without experts and a tied LM head, which are never kept twice.

    A block that is there several times counts each time, because an engine that only compiles must get the same number.
    """
    linears = [part for block in _blocks(model) for part in block.modules() if isinstance(part, nn.Linear)]
    linears += [] if model.config.tied else [model.lm_head]
    return sum(parameter.nbytes for linear in linears for parameter in linear.parameters())


def _no_experts(flag: str, kind: str) -> str:
    """Return the error for a flag that would quantize experts."""
    return f"{flag} {kind}: experts are not quantized yet; a mixture of experts is served without the flag"


# ---- the other kinds ---------------------------------------------------------------------------------------------


class Outline(Build):
    """The parts that another build will have, on the meta device, to estimate their memory: sizes and no weights.

    `Plain` stands for a drafter of the operator's own, since the code of that drafter should run only once.
    """

    def __init__(self, build: Build) -> None:
        vars(self).update(vars(build))
        self.config, self.ranks = replace(build.config, device=build.device.type), None

    def network(self) -> Model:
        return load_model(self.config, self.model_config, self.folder, self.dtype, torch.device("meta"), self.shard)

    def draft(self, target: Model) -> Drafter:
        return Plain() if self.config.is_own_drafter else super().draft(target)

    def quantize(self, network: Model) -> None:
        """Make the target's weights int8 or int4, and measure nothing."""
        REPLACE[self.config.quantization](network)


class Rehearsal(Outline):
    """The parts of an engine that only compiles: layers of a kind are one, and on CUDA tensors are fake."""

    def network(self) -> Model:
        """Return the target, on the meta device for CUDA."""
        if self.device.type == "cuda":
            network = super().network()
            _share_layers(network)
            return network
        return Model.empty(self.model_config, self.dtype, self.device, change=self._share)

    def _share(self, model: Model) -> None:
        """Let the layers of a kind be one; with a GGUF file's own weights kinds differ by their bits."""
        if self.config.quantization == "gguf":
            _keep_bits(model, self.config, self.folder)
        _share_layers(model)

    def draft(self, target: Model) -> Drafter:
        """Return the drafter for a target, even if it is the operator's own."""
        drafter = Build.draft(self, target)
        if isinstance(drafter, StandaloneDrafter):
            _share_layers(drafter.network.model)
        return drafter


def _share_layers(model: Model) -> None:
    """Replace each layer of a model by the model's first layer of the same kind."""
    firsts: dict[tuple[Any, ...], Block] = {}
    model.layers = nn.ModuleList(firsts.setdefault(_kind(block), block) for block in _blocks(model))


def _pretend(network: nn.Module, device: torch.device) -> None:
    """Put tensors on `device`, of the same shapes, in place of a network's; to be called under FakeTensorMode."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # by a tensor's number: it and its substitute; tied ones stay one

    def on_device(tensor: Tensor) -> Any:
        """Return the tensor's substitute."""
        if id(tensor) not in made:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            new = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            made[id(tensor)] = tensor, new
        return made[id(tensor)][1]

    for part in network.modules():
        for values in (part._parameters, part._buffers, vars(part)):
            values.update({name: on_device(value) for name, value in values.items() if isinstance(value, Tensor)})


@contextmanager
def rehearse(config: Config, pages: int) -> Iterator[Engine]:
    """Yield an engine with the same sizes and pages as another one; within this context its graphs are compiled.

    Graphs do not depend on the values of weights. So the other engine finds in files what is compiled here. On a CPU
    steps on padding write to page 0 alone, so the other pages take no memory. On CUDA nothing is in memory.
    """
    build = Build(config, lambda line: None)
    build.lead()
    rehearsal = Rehearsal(build)
    with torch.inference_mode(), ExitStack() as stack:
        with unsaid(), sparse():
            parts = rehearsal.parts()
            if build.device.type == "cuda":
                from torch._subclasses.fake_tensor import FakeTensorMode

                torch._inductor.config.compile_threads = 1  # a pool of processes for each process would be too many
                allow_uncompiled()
                stack.enter_context(FakeTensorMode())
                for network in (parts.network, parts.drafter.network):
                    if network is not None:
                        _pretend(network, build.device)
            engine = rehearsal.engine_of(parts, pages)
        yield engine


class Follow(Build):
    """The build of a rank other than 0: its part of the model, and no drafter, since rank 0 sends the trees."""

    ranks: Ranks

    def drafted(self, network: Model) -> Parts:
        """Return the parts around a target, with `Elsewhere` in place of rank 0's drafter."""
        sizes = self.ranks.same_sizes(None)
        return Parts(sizes, network, Elsewhere(sizes))

    def quantize(self, network: Model) -> None:
        """Make the weights int8 together with rank 0, which logs the cost in accuracy."""
        quantize(network, self.ranks.same(()), replace_weights)


@torch.inference_mode()
def follow(config: Config, ranks: Ranks) -> None:
    """Run a rank other than 0: load its part of the model, and do what rank 0 calls until rank 0 ends."""
    build = Follow(config, logger.info)
    build.join(ranks)
    round_as_eager(build.rowwise)
    if build.device.type == "cpu":
        spin_alone()
    build.compiled = _can_compile(config, build.device)
    parts = build.parts()
    move_to_huge_pages(build.device)
    budget = Budget(config, build.device, *parts)
    engine = build.engine_of(parts, ranks.least(budget.pages()))
    engine.when_settled(lambda: torch.compiler.set_stance("fail_on_recompile"))
    follow_rank(engine, ranks)


# ---- from flags to what they stand for ---------------------------------------------------------------------------


def choose_device(config: Config) -> torch.device:
    """Return the device to run on."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this PyTorch finds no CUDA device; allowed here: cpu, auto")
    name = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    for flag, kind in quantizations(config).items():
        if kind != "fp8" and name != "cpu":
            raise ValueError(f"{flag} {kind} is for a CPU, and the device is {name}; --device cpu takes it, fp8 is for "
                             "CUDA, and without the flag weights are not quantized")  # fmt: skip
        if kind == "fp8" and name != "cuda":
            whole = flag == "--quantization"
            other = "int8 is for a CPU, and " if whole else "a drafter on a CPU keeps its weights, so "
            raise ValueError(f"{flag} fp8 is for CUDA, and the device is {name}, where it would be slow; {other}"
                             "without the flag weights are not quantized")  # fmt: skip
    return torch.device(name)


def quantizations(config: Config) -> dict[str, str]:
    """Return the kinds of quantization asked for, by flag: the target's, then the drafter's."""
    flags = {"--quantization": config.quantization, "--speculative-draft-model-quantization": config.draft_quantization}
    return {flag: kind for flag, kind in flags.items() if kind is not None}


def choose_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and KV; auto is bfloat16 if the device multiplies bfloat16 natively, else float32."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def dtype_line(config: Config, stored: str | None, dtype: torch.dtype) -> str:
    """Return the name of a dtype, with a remark if SGLang's auto would have chosen another one.

    stored: the dtype that config.json names. SGLang takes float16 for float16 and float32 checkpoints. Here auto never
    does, since activations can overflow in float16; bfloat16 has float32's range.
    """
    name = str(dtype).removeprefix("torch.")
    differs = config.dtype == "auto" and dtype == torch.bfloat16 and stored in ("float16", "float32")
    return f"{name} (SGLang would take float16 for a {stored} checkpoint; --dtype float16 does)" if differs else name


def _reason_against_int4(config: Config, dtype: torch.dtype) -> str | None:
    """Return why weights of 4 bits are not served with these flags; None: they are."""
    if config.tp_size > 1:
        return f"weights of 4 bits are not split over --tp-size {config.tp_size} yet; --dp-size has them"
    if config.quantization == "gguf" and config.load_format == "dummy":
        return "with --load-format dummy no file is read"
    return reason_against_int4(dtype)


def choose_folder(config: Config, tell: Callable[[str], None]) -> Path:
    """Return the folder of the model to serve."""
    as_is = config.quantization == "gguf"
    if config.model_path is None:
        return ensure_default_model(tell, as_is)
    folder = as_folder(config.model_path, "--model", tell, as_is)
    if as_is and not Path(folder, TENSORS).is_file():
        raise ValueError(f"--quantization gguf keeps a GGUF file's own 4 bits, and --model {config.model_path} is no "
                         "such file; int4 and int8 take a folder or a Hugging Face id")  # fmt: skip
    return resolve_model(folder, config.revision, cache=config.download_dir)


def choose_tokenizer(config: Config, folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer: the one named, else the model's own; with dummy weights, one of bytes if there is none."""
    flag = "--model"
    if (path := config.tokenizer_path) is not None:
        folder, flag = resolve_model(as_folder(path, "--tokenizer-path"), cache=config.download_dir), "--tokenizer-path"
    try:
        with naming(flag, folder):
            tokenizer = load_tokenizer(folder, config.chat_template)
    except ValueError as error:
        if config.load_format != "dummy" or config.tokenizer_path is not None:
            raise
        logger.info("no tokenizer (%s): every byte is a token", error)
        return byte_tokenizer(vocab_size)
    if tokenizer.vocab_size > vocab_size:
        logger.warning("the tokenizer of %s has %d ids, the model %d: a prompt with %r or a later token is refused",
                       folder, tokenizer.vocab_size, vocab_size, tokenizer.backend.token(vocab_size))  # fmt: skip
    tokenizer.model_size = vocab_size
    return tokenizer


def _context_length(config: Config, model: ModelConfig) -> int:
    """Return the length of the context to serve; raises ValueError if it is beyond the model's."""
    context = config.context_length or model.context_length
    if context > model.context_length:
        raise ValueError(f"--context-length {context} is beyond the model's {model.context_length} positions")
    return context


def load_model(
    config: Config, model_config: ModelConfig, folder: Path, dtype: torch.dtype, device: torch.device,
    shard: Shard | None = None,
) -> Model:  # fmt: skip
    """Return the model with its weights, in fp8 or a GGUF file's own bits if that is asked for; others come later.

    On the meta device the model has no weights. shard: the part of the model that is wanted; its layers are joined with
    those of the other ranks.
    """
    dummy, to_fp8 = config.load_format == "dummy", config.quantization == "fp8"

    def change(model: Model) -> None:
        """Put in such layers before weights get memory; dummy weights are converted afterwards."""
        if config.quantization == "gguf":
            _keep_bits(model, config, folder)
        if to_fp8 and not dummy:
            wanted, split = partial(reads, model_config), partial(parts_of, model_config)
            use_fp8(model, stored_in_fp8(folder, config.load_format, wanted, split))

    model = Model.empty(model_config if shard is None else shard.config, dtype, device, change)
    _fill(model, config, folder, shard)
    if to_fp8 and dummy:
        use_fp8(model)
    if shard is not None:
        shard.join(model)
    return model


def _keep_bits(model: Model, config: Config, folder: Path) -> None:
    """Replace layers of a model on the meta device by those that keep the bits of its GGUF file."""
    # Several rows are slower with 8 bits than with 16 (`groups.py`).
    eight = config.max_running_requests == 1 and not config.enable_deterministic_inference
    FileWeights(folder).use(model, eight=eight, heads=not config.reads_target)


def _fill(model: Model, config: Config, folder: Path, shard: Shard | None = None) -> None:
    """Give a model its weights, from the files or at random.

    A model on the meta device gets none, but its names and sizes are compared with those of the files. So a config that
    contradicts its files is an error that names the tensor, before memory is estimated.
    shard: the part of the weights that is wanted. A model without layers is embedding, final norm and LM head of
    another model; the files then have more tensors, which are not read.
    """
    if config.quantization == "gguf":
        if not model.norm.weight.is_meta:
            FileWeights(folder).fill(model)
        return
    into, kind = published_tensors(model), config.load_format
    split = partial(parts_of, model.config if shard is None else shard.whole)  # a rank slices afterwards
    known = partial(reads, model.config)
    if kind == "dummy":
        if not model.norm.weight.is_meta:
            _fill_at_random(model, config.random_seed or 0)
        return
    with naming("--model", folder):
        if not model.layers:
            names = {*into, model.config.table}
            wanted = lambda name: known(name) and name in names  # noqa: E731
            load_weights(into, read_weights(folder, kind, wanted=wanted, split=split))
        else:
            tensors = read_weights(folder, kind, wanted=known, into=into, split=split)
            load_weights(into, tensors if shard is None else shard.slices(tensors))


def _fill_at_random(model: Model, seed: int) -> None:
    """Draw weights of a plausible scale, for measuring speed, where the text does not matter."""
    generator = torch.Generator(device=model.embed_tokens.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(("o_proj.bias", "down_proj.bias")):  # whole on all ranks: must not differ
            parameter.zero_()
        elif name.endswith("router.weight"):  # routers too are whole on all ranks
            parameter.normal_(0.0, 0.02, generator=torch.Generator(device=parameter.device).manual_seed(seed))
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def resolve_sizes(config: Config, device: torch.device, limits: dict[str, Any], drafter: Drafter) -> Sizes:
    """Return the sizes of an engine with this drafter; `limits` are keyword arguments of `Sizes.resolve`.

    A bucket is a size to which steps are padded. On CUDA the batch buckets are those of --cuda-graph-bs, or by default
    as few as cost no time; `limits` may name others. A CPU has more prefill buckets than CUDA, since all share a graph
    there, and padding costs time.
    """
    trees = trees_by_batch(drafter, limits["max_running"], device.type == "cpu")
    if device.type == "cuda":
        largest = largest_graph(config, free_bytes(device)[1])
        least = min((size.nodes for size in drafter.trees), default=1)
        batches = config.cuda_graph_bs or coarse_batches(limits["max_running"], least, largest)
        listed = config.speculative_adaptive_config is not None  # then this file says which trees a batch may have
        return Sizes.resolve(drafter, **{"batches": batches, "trees": () if listed else trees, **limits})
    sizes = Sizes.resolve(drafter, trees=trees, **limits)
    more = {size for size in CPU_PREFILLS if size < sizes.prefill_sizes[-1]}
    return replace(sizes, prefill_sizes=tuple(sorted({*sizes.prefill_sizes, *more})))


def captured_batches(config: Config, sizes: Sizes) -> tuple[int, ...]:
    """Return the batch buckets whose decode steps are captured as CUDA graphs; on a CPU none, with a warning."""
    device = choose_device(config)
    if device.type != "cuda":
        flags = {"cuda_graph_bs": config.cuda_graph_bs, "cuda_graph_max_bs": config.cuda_graph_max_bs,
                 "disable_cuda_graph": config.disable_cuda_graph}  # fmt: skip
        if given := next((name for name, value in flags.items() if value), None):
            value = " ".join(map(str, config.cuda_graph_bs or ())) if given == "cuda_graph_bs" else flags[given]
            shown = flag_name(given) + ("" if value is True else f" {value}")
            logger.warning("%s changes nothing: on a CPU there are no CUDA graphs", shown)
        return ()
    if "fp8" in quantizations(config).values() and not can_capture_fp8(device):
        logger.warning("fp8 on sm_89 is not captured by PyTorch before 2.12: all steps run uncaptured, more slowly")
        return ()
    largest = largest_graph(config, free_bytes(device)[1])
    listed = sizes.batch_sizes if config.cuda_graph_bs is None else config.cuda_graph_bs
    return tuple(batch for batch in sizes.batch_sizes if batch <= largest and batch in listed)


def _can_compile(config: Config, device: torch.device) -> bool:
    """Return whether blocks are compiled; if they cannot be, log what is missing."""
    if config.disable_torch_compile:
        return False
    if device.type == "cuda" or has_compiler():
        return True
    logger.warning("torch.compile needs a C++ compiler (g++ or clang++) and found none: what is in no file runs "
                   "eagerly, slower")  # fmt: skip
    return not is_empty()
