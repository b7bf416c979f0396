"""The offline face, and the one place where everything is put together: `LLM(model, ...).generate(prompts, params)`.

`LLM` turns a `Config` into folder, tokenizer, model, pages, engine and scheduler, in that order. The server builds the
same object and drives the same scheduler, so what is measured offline is what is served.

    from minispec import LLM, SamplingParams
    llm = LLM("path-or-id", speculative_algorithm="NGRAM")
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))["text"])

Read next: `scheduler.py`; for the HTTP face, `server.py`.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from minispec.asked import Asking
from minispec.compiled import Choice, Compiler, cache_is_empty, compile_step, prepare
from minispec.config import Config, flag_name
from minispec.drafter import Drafter, Plain
from minispec.engine import Engine, Sizes, coarse_batches
from minispec.http.logprobs import native_lists
from minispec.load.default_model import ensure_default_model
from minispec.load.drafters import make_drafter
from minispec.load.fp8 import check_fp8, read_weights, stored_in_fp8, use_fp8
from minispec.load.huge_pages import sparse, use_huge_pages
from minispec.load.int8 import TEXT, check_int8, compile_head, prompt_rows, quantize, replace_weights
from minispec.load.machine import core_count, host_memory
from minispec.load.memory import Budget, free_bytes, largest_graph, make_kv, measure, unsaid
from minispec.load.packed import FEW_ROWS, can_pack, pack_linears, room_for_both
from minispec.load.selftest import PROMPT, self_test
from minispec.load.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from minispec.load.weights import eos_token_ids, load_weights, read_config, read_tensors, resolve_model
from minispec.model import Model, ModelConfig, published_tensors
from minispec.parallel import Elsewhere, Lead, Ranks, gather
from minispec.parallel import follow as follow_rank
from minispec.request import Request, RequestError, SamplingParams, meta_info
from minispec.scheduler import Scheduler, SchedulerOptions, logger, startup_line
from minispec.shards import Shard
from minispec.standalone import StandaloneDrafter
from minispec.verify import Accept

Prompt = str | Sequence[int]
# Token counts of prefill steps on a CPU, where all share a graph.
CPU_PREFILLS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512)


class LLM:
    """A loaded model behind a scheduler. Keyword options are the fields of `Config`, that is, the launch flags.

    With tp_size above 1 it starts the other ranks, which end with this process; if one of them dies, so does this.

    compile_later: for the server on a CPU, run eagerly until `warming.py` has graphs made (`Engine.make_graph`). It is
    also an attribute, False where nothing is compiled or everything was at once.
    batches: for bench.py, the batch buckets to compile, in place of the usual ones up to the most running requests.
    Raises ValueError or RuntimeError with one readable sentence where model, flags and machine do not fit together.
    """

    beside: Model | None = None  # what a drafter reads of a target that is spread over ranks
    _mover: _Mover | None = None  # whoever moves weights to huge pages after the last graph is made

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: Config | None = None,
        progress: Callable[[str], None] | None = None,
        batches: Sequence[int] = (),
        compile_later: bool = False,
        **options: Any,
    ) -> None:
        if config is None:
            config = Config(model_path=None if model is None else os.fspath(model), **options)
            for note in config.notes:  # the server, which passes a config, has logged them already
                logger.warning("%s", note)
        elif model is not None or options:
            raise ValueError("give either config or model and options, not both")
        self.compile_later = compile_later
        tell = progress or (lambda line: logger.info("%s", line))
        device = choose_device(config)
        if device.type == "cpu":
            _limit_threads(config.tp_size // config.nnodes)
        self.folder = choose_folder(config, tell)
        hf_config = read_config(self.folder)
        self.config = config = with_own_head(config, hf_config, self.folder, tell)
        self.stored_dtype = hf_config["torch_dtype"]
        self.model_config = ModelConfig.from_hf(hf_config)
        self.ranks: Ranks | None
        self.shard: Shard | None
        self.ranks, self.shard = _gathered(config, self.model_config, device)
        context = _context_length(config, self.model_config)
        self.tokenizer = choose_tokenizer(config, self.folder, self.model_config.vocab_size)
        running = config.max_running_requests or (8 if device.type == "cpu" else 48)
        chunk = config.chunked_prefill_size or (512 if device.type == "cpu" else 2048)
        chunk = context if chunk == -1 else min(chunk, context)
        with torch.inference_mode():
            limits = {"context_length": context, "max_running": running, "chunk_size": chunk}
            engine = self._start(device, limits | ({"batches": batches} if batches else {}), tell)
        self.scheduler = Scheduler(
            engine,
            self.tokenizer,
            eos_token_ids(self.folder, hf_config, self.tokenizer),
            SchedulerOptions(
                radix=not config.disable_radix_cache,
                overlap=device.type == "cuda" and not config.disable_overlap_schedule,
                decode_log_interval=config.decode_log_interval,
                random_seed=config.random_seed,
                adaptive=config.adaptive,
            ),
        )
        engine.when_settled(self.scheduler.restart_times)  # what a step took beside a compiler says nothing
        engine.when_settled(self.move_weights)
        logger.info("%s", startup_line(config, self.scheduler))

    def _start(self, device: torch.device, limits: dict[str, Any], tell: Callable[[str], None]) -> Engine:
        """Return the engine, warmed up and captured; tells where memory goes, before and after."""
        config = self.config
        compiled = not config.disable_torch_compile and _can_compile(device)
        self.compile_later &= compiled and device.type == "cpu" and not config.wait_until_compiled
        self.compile_later &= self.ranks is None  # or every rank would need processes that compile beside it
        if compiled and device.type == "cpu":
            prepare()
        resolve = partial(resolve_sizes, config, device, limits)
        network, drafter = self._outline(device)
        budget = Budget(config, device, resolve(drafter), network, drafter, self.beside)
        tell(f"memory, estimated: {budget.estimate}")
        budget.check()
        with budget.watch("loading the weights"):
            network, drafter = self._load(device, compiled, tell)
        budget.network, budget.drafter, budget.sizes = network, drafter, resolve(drafter)
        with budget.watch("making the KV pools"):
            engine = self._make_engine(budget, compiled)
        self.memory = measure(engine)
        if self.compile_later:
            engine.permits.left = 0
        else:
            self._warm_up(engine, budget, compiled, tell)
            self.memory = measure(engine)
        tell(f"memory, measured: {self.memory}")
        return engine

    def _make_engine(self, budget: Budget, compiled: bool) -> Engine:
        """Return the engine around target and drafter; where there are other ranks, they follow it from here on."""
        if self.ranks is None:
            return _make_engine(self.config, budget, budget.pages(), compiled)
        self.ranks.same_sizes(budget.sizes)
        engine = _make_engine(self.config, budget, self.ranks.least(budget.pages()), compiled)
        engine.beside = self.beside
        Lead(engine, self.ranks)
        return engine

    def _warm_up(self, engine: Engine, budget: Budget, compiled: bool, tell: Callable[[str], None]) -> None:
        """Make all graphs, time steps, and see whether the head is accepted."""
        config = self.config
        with budget.watch("warming up"):
            engine.warm_up(tell)
        with budget.watch("capturing CUDA graphs"):
            captured = captured_batches(config, engine.sizes)
            if captured and compiled:  # run eagerly, attention's reach is a number that Python knows and a graph keeps
                engine.capture(captured, tell)
        engine.settle()
        for _ in self._try_out(engine):
            pass

    @torch.inference_mode()
    def try_out(self) -> Iterator[None]:
        """Time steps and test the head, in a server whose graphs were made while it served, and that is idle.

        It pauses whenever a request may be served in between.
        """
        while self._mover is not None and self._mover.is_alive():
            self._mover.join(0.02)  # seconds, which a request has to wait at most
            yield
        yield from self._try_out(self.scheduler.engine)
        self.scheduler.restart_times()

    def move_weights(self) -> None:
        """Have a thread move the weights to huge pages, if that was put off when they were loaded."""
        if self._mover is not None and self._mover.ident is None:
            self._mover.start()

    def _try_out(self, engine: Engine) -> Iterator[None]:
        drafter, config = engine.drafter, self.config
        for batch in engine.sizes.batch_sizes if config.adaptive else ():
            engine.time_steps(batch)
            yield
        if drafter.network is not None and config.load_format != "dummy" and config.simulate_acc_len is None:
            self_test(engine, drafter, self.tokenizer.encode(PROMPT))

    def _outline(self, device: torch.device) -> tuple[Model, Drafter]:
        """Return target and drafter as `_load` will, on the meta device: their sizes, and no memory.

        A drafter of the operator's own, whose code is to run once, is stood for by none.
        """
        config, dtype = replace(self.config, device=device.type), choose_dtype(self.config, device)
        with unsaid():
            network = load_model(config, self.model_config, self.folder, dtype, torch.device("meta"), self.shard)
            target = self._drafted_from(network)
            drafter = Plain() if config.is_own_drafter else make_drafter(config, target, self.folder, self.tokenizer)
            self.beside = None if target is network else _needed(target, drafter, device)
            if config.quantization == "int8":
                replace_weights(network, prompt_rows(drafter.nodes))
            _change_draft_and_pack(config, device, network, drafter)
        return network, drafter

    def _load(
        self, device: torch.device, compiled: bool, tell: Callable[[str], None]
    ) -> tuple[Model, Drafter]:
        """Return the target and the drafter, their weights packed and their blocks compiled where that is wanted."""
        config, dtype = self.config, choose_dtype(self.config, device)
        for flag, kind in quantizations(config).items():
            check_fp8(flag, dtype, device) if kind == "fp8" else check_int8(dtype)
        tell(f"loading {config.served_name} as {dtype_line(config, self.stored_dtype, dtype)} on {device.type}")
        network = load_model(config, self.model_config, self.folder, dtype, device, self.shard)
        if config.thresholds is not None:
            logger.warning("--speculative-accept-threshold-single %g, -acc %g: sampled output is no longer exact, "
                           "greedy output is", *config.thresholds)  # fmt: skip
        if config.simulate_acc_len is not None:
            logger.warning("--simulate-acc-len %g: steps with trees emit so many tokens in the mean, whatever the "
                           "target picks; output is junk, for measuring speed", config.simulate_acc_len)  # fmt: skip
        target = self._drafted_from(network)
        drafter = make_drafter(config, target, self.folder, self.tokenizer)
        self.beside = None if target is network else _needed(target, drafter, device)
        if config.quantization == "int8":  # after a head has taken what it needs of the target's weights
            self._quantize(network, drafter, tell)
        _change_draft_and_pack(config, device, network, drafter)
        # Where graphs wait in the cache, taking them comes first, and the weights are moved afterwards.
        self._mover = _Mover() if self.compile_later and not cache_is_empty() else None
        if self._mover is None:
            _move_to_huge_pages(device)
        if compiled:
            _compile_blocks(network, drafter, partial(compile_step, device=device))
        return network, drafter

    def _drafted_from(self, network: Model) -> Model:
        """Return what a drafter knows as the target: the network, or, where that is spread over ranks, its ends whole.

        These are embedding, final norm and LM head, of which a head may need any row.
        """
        if self.ranks is None or not self.config.reads_target:
            return network
        weight, whole = network.norm.weight, self.model_config
        target = Model.empty(replace(whole, layers=0), weight.dtype, weight.device)
        target.config = whole
        if self.config.load_format == "dummy":
            _fill_at_random(target, self.config.random_seed or 0)
        elif not weight.is_meta:
            into = published_tensors(target)
            wanted = lambda name: target.reads(name) and name in into  # noqa: E731
            load_weights(into, read_weights(self.folder, self.config.load_format, wanted=wanted))
        return target

    def _quantize(self, network: Model, drafter: Drafter, tell: Callable[[str], None]) -> None:
        """Make the target's weights int8, and say what that costs in accuracy."""
        dtype = str(network.norm.weight.dtype).removeprefix("torch.")
        given = [prompt_rows(drafter.nodes), *self.tokenizer.encode(TEXT)]
        rows, *ids = given if self.ranks is None else self.ranks.same(given)
        cost = quantize(network, ids, rows)
        tell(f"int8 weights: on a text of {cost.tokens} tokens the KL divergence from {dtype} "
             f"weights is {cost.divergence:.4f} nats a token, and the first choice is the same at "
             f"{cost.agreement:.0%} of them")  # fmt: skip

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Any:
        """Return the objects of /generate (text, output_ids, meta_info), one per prompt and in their order.

        A prompt is a string or a list of token ids; a single prompt gives a single object. `params` is one for all or
        one for each. Raises RequestError for a prompt that cannot be served, before any is started.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed = cast(list[Prompt], [prompts] if single else list(prompts))
        wishes = list(params) if isinstance(params, Sequence) else [params] * len(listed)
        if len(wishes) != len(listed):
            raise RequestError(f"{len(listed)} prompts but {len(wishes)} params; give one for all or one for each")
        requests = [self.request(prompt, wish) for prompt, wish in zip(listed, wishes, strict=True)]
        texts = self.serve(requests)
        results = [self._result(request, texts[request]) for request in requests]
        return results[0] if single else results

    def serve(self, requests: Sequence[Request]) -> dict[Request, str]:
        """Run requests to their ends and return their texts. Raises RequestError before any is started."""
        for request in requests:
            self.scheduler.validate(request)
        texts = dict.fromkeys(requests, "")
        for request in requests:
            self.scheduler.submit(request)
        try:
            while self.scheduler.has_work:
                for update in self.scheduler.step():
                    texts[update.request] += update.text
        except BaseException as error:
            self.scheduler.fail_all(error, waiting=True)
            raise
        self.scheduler.check()
        return texts

    def request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Make a request of a prompt; without params the default limit shrinks to the room there is."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if params is None:
            room = self.scheduler.sizes.context_length - len(ids)
            params = SamplingParams(max_new_tokens=max(1, min(SamplingParams().max_new_tokens or 1, room)))
        return Request(uuid.uuid4().hex, ids, params)

    def _result(self, request: Request, text: str) -> dict[str, Any]:
        """Return the object of /generate for a finished request."""
        info = meta_info(request, len(request.output_ids), request.finish, self.scheduler.sizes.nodes)
        info |= native_lists(request, len(request.output_ids), None)
        return {"text": text, "output_ids": request.output_ids, "meta_info": info}


class Parts(NamedTuple):
    """What an engine is made of; a `Budget` has the same and more."""

    network: Model
    drafter: Drafter
    sizes: Sizes


class Rehearsal(LLM):
    """An LLM on a CPU whose graphs are another's: the same sizes and pages, and all layers are one without meaning.

    Graphs know nothing of weights, so what is compiled here is what the other finds in Inductor's cache. Steps on
    padding write to page 0 alone, and of the other pages no memory is taken.
    """

    def __init__(self, config: Config, pages: int) -> None:
        self.pages = pages
        super().__init__(config=config, progress=lambda line: None, compile_later=True)

    def _start(self, device: torch.device, limits: dict[str, int], tell: Callable[[str], None]) -> Engine:
        """Return the engine, with nothing compiled yet."""
        config, dtype = self.config, choose_dtype(self.config, device)
        prepare()
        with unsaid():
            network = Model.empty(self.model_config, dtype, device, change=_share_layer)
            drafter = make_drafter(config, network, self.folder, self.tokenizer)
        if isinstance(drafter, StandaloneDrafter):
            _share_layer(drafter.network.model)
        if config.quantization == "int8":
            replace_weights(network, prompt_rows(drafter.nodes))
        _change_draft_and_pack(config, device, network, drafter)
        _compile_blocks(network, drafter, partial(compile_step, device=device))
        parts = Parts(network, drafter, resolve_sizes(config, device, limits, drafter))
        with sparse():
            engine = _make_engine(config, parts, self.pages, compiled=True)
        engine.permits.left = 0
        return engine


def _share_layer(model: Model) -> None:
    """Let a model have its first layer in place of each."""
    model.layers = nn.ModuleList([model.layers[0]] * len(model.layers))


# ---- the steps of putting it together ----------------------------------------------------------------------------


def choose_device(config: Config) -> torch.device:
    """Return the device to run on."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this PyTorch finds no CUDA device; allowed here: cpu, auto")
    name = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    for flag, kind in quantizations(config).items():
        if kind == "int8" and name != "cpu":
            raise ValueError(f"{flag} int8 is for a CPU, and the device is {name}; --device cpu takes it, fp8 is for "
                             "CUDA, and without the flag weights are not quantized")  # fmt: skip
        if kind == "fp8" and name != "cuda":
            raise ValueError(f"{flag} fp8 is for CUDA, and the device is {name}, where it would be slow; int8 is for a "
                             "CPU, and without the flag weights are not quantized")  # fmt: skip
    return torch.device(name)


def quantizations(config: Config) -> dict[str, str]:
    """Return how weights are to be quantized, by the flags that say so: the target's, then the drafter's."""
    flags = {"--quantization": config.quantization, "--speculative-draft-model-quantization": config.draft_quantization}
    return {flag: kind for flag, kind in flags.items() if kind is not None}


def choose_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and KV; auto is bfloat16 where the device multiplies it natively."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def dtype_line(config: Config, stored: str | None, dtype: torch.dtype) -> str:
    """Return the name of a dtype, and where auto chose another one than SGLang's auto a word on that.

    stored: the dtype that config.json names. SGLang takes float16 for float16 and float32 checkpoints; bfloat16 has
    float32's range, in which no activation overflows.
    """
    name = str(dtype).removeprefix("torch.")
    differs = config.dtype == "auto" and dtype == torch.bfloat16 and stored in ("float16", "float32")
    return f"{name} (SGLang would take float16 for a {stored} checkpoint; --dtype float16 does)" if differs else name


def with_own_head(
    config: Config, hf_config: Mapping[str, Any], folder: Path, tell: Callable[[str], None]
) -> Config:
    """Return the config, with EAGLE where no flag speaks of speculation and the model brings a head, MiMo's MTP layer.

    SGLang drafts with that layer for --speculative-algorithm EAGLE and not by itself; NONE switches it off here. A copy
    whose files lack the layer decodes plainly, as do dummy weights.
    """
    silent = all(getattr(config, f.name) == f.default for f in fields(config) if f.name.startswith("speculative_"))
    named = "MiMoForCausalLM" in (hf_config.get("architectures") or ()) and hf_config.get("num_nextn_predict_layers")
    if not silent or not named or config.load_format == "dummy":
        return config
    layer = read_tensors(folder, config.load_format, wanted=lambda name: "mtp_layers." in name)
    if next(layer, None) is None:
        tell("config.json speaks of an MTP layer, but the files have none: decoding plainly")
        return config
    tell("the model brings an MTP layer and drafts with it; --speculative-algorithm NONE decodes plainly")
    return replace(config, speculative_algorithm="EAGLE")


def choose_folder(config: Config, tell: Callable[[str], None]) -> Path:
    """Return the folder of the model to serve."""
    if config.model_path is None:
        return ensure_default_model(tell)
    return resolve_model(config.model_path, config.revision, cache=config.download_dir)


def choose_tokenizer(config: Config, folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer: the one named, else the model's own; dummy weights may do without either."""
    where = folder if config.tokenizer_path is None else resolve_model(config.tokenizer_path, cache=config.download_dir)
    try:
        return load_tokenizer(where, config.chat_template)
    except ValueError as error:
        if config.load_format != "dummy" or config.tokenizer_path is not None:
            raise
        logger.info("no tokenizer (%s): every byte is a token", error)
        return byte_tokenizer(vocab_size)


def _context_length(config: Config, model: ModelConfig) -> int:
    """Return the context to serve; raises ValueError where the model cannot."""
    context = config.context_length or model.context_length
    if context > model.context_length:
        raise ValueError(f"--context-length {context} is beyond the model's {model.context_length} positions")
    if model.sliding_window is not None and model.sliding_window < context:
        raise ValueError(
            f"the model attends within a sliding window of {model.sliding_window} tokens, shorter than the context "
            f"of {context}, which is not supported; --context-length {model.sliding_window} serves it exactly"
        )
    return context


def load_model(
    config: Config, model_config: ModelConfig, folder: Path, dtype: torch.dtype, device: torch.device,
    shard: Shard | None = None,
) -> Model:  # fmt: skip
    """Return the model with its weights, in fp8 where that is asked for; int8 comes later. On meta it has none.

    shard: the part of the model that is wanted, whose layers are joined with those of the other ranks.
    """
    model = _load_alone(config, model_config if shard is None else shard.config, folder, (dtype, device), shard)
    if shard is not None:
        shard.join(model)
    return model


def _load_alone(
    config: Config, model_config: ModelConfig, folder: Path, like: tuple[torch.dtype, torch.device],
    shard: Shard | None,
) -> Model:  # fmt: skip
    """Return a model of these sizes with its weights, or this rank's part of them; `like`: dtype and device."""
    dtype, device = like
    to_fp8, kind, outline = config.quantization == "fp8", config.load_format, device.type == "meta"
    if kind == "dummy":
        model = Model.empty(model_config, dtype, device)
        if not outline:
            _fill_at_random(model, config.random_seed or 0)
        if to_fp8:
            use_fp8(model)
        return model
    change = lambda model: use_fp8(model, stored_in_fp8(folder, kind, model.reads)) if to_fp8 else None  # noqa: E731
    model = Model.empty(model_config, dtype, device, change)
    if outline:
        return model
    into = published_tensors(model)
    tensors = read_weights(folder, kind, wanted=model.reads, into=into)
    load_weights(into, tensors if shard is None else shard.slices(tensors))
    return model


def _gathered(
    config: Config, model_config: ModelConfig, device: torch.device
) -> tuple[Ranks, Shard] | tuple[None, None]:
    """Return the ranks of --tp-size, and this one's part of the model; both None where there is one rank."""
    if config.tp_size == 1:
        return None, None
    if config.first_rank() != 0:
        raise ValueError("`LLM` is rank 0 of --tp-size; `python -m minispec.server` is another machine's rank, with "
                         "--node-rank or by torchrun")  # fmt: skip
    Shard(model_config, 0, config.tp_size, "")  # raises ValueError before any process is started
    ranks = gather(config, device)
    return ranks, Shard(model_config, ranks.rank, ranks.size, ranks.group)


def _needed(target: Model, drafter: Drafter, device: torch.device) -> Model:
    """Return the ends of the target without those that a drafter's network has of its own, packed on a CPU."""
    for part in ("embed_tokens", "lm_head"):
        if getattr(drafter.network, part, None) is not None:
            setattr(target, part, None)
    if device.type == "cpu" and can_pack(target.norm.weight.dtype):
        pack_linears(target)
    return target


@torch.inference_mode()
def follow(config: Config, ranks: Ranks) -> None:
    """Be another rank than 0: load its part of the model, and do what rank 0 calls until that ends.

    What is done here is what `LLM` does on rank 0, in the same order wherever the ranks do something together.
    """
    device = choose_device(config)
    dtype, folder = choose_dtype(config, device), choose_folder(config, logger.info)
    model_config = ModelConfig.from_hf(read_config(folder))
    compiled = not config.disable_torch_compile and _can_compile(device)
    if compiled and device.type == "cpu":
        prepare()
    network = load_model(config, model_config, folder, dtype, device, Shard(model_config, ranks.rank, ranks.size,
                                                                            ranks.group))  # fmt: skip
    if config.quantization == "int8":
        rows, *ids = ranks.same(())
        quantize(network, ids, rows)
    sizes = ranks.same_sizes(None)
    drafter = Elsewhere(sizes)
    _change_draft_and_pack(config, device, network, drafter)
    _move_to_huge_pages(device)
    if compiled:
        _compile_blocks(network, drafter, partial(compile_step, device=device))
    budget = Budget(config, device, sizes, network, drafter)
    engine = _make_engine(config, budget, ranks.least(budget.pages()), compiled)
    engine.when_settled(lambda: torch.compiler.set_stance("fail_on_recompile"))
    follow_rank(engine, ranks)


def _change_draft_and_pack(config: Config, device: torch.device, network: Model, drafter: Drafter) -> None:
    """Make the draft's weights fp8 where that is asked for; on a CPU reorder what is left of linear layers."""
    if config.draft_quantization == "fp8" and drafter.network is not None:
        use_fp8(drafter.network)
    if device.type == "cpu" and can_pack(network.norm.weight.dtype):
        # Not of all parameters: in an engine that only compiles, layers share theirs.
        block_bytes = len(network.layers) * sum(parameter.nbytes for parameter in network.layers[0].parameters())
        keep = room_for_both(block_bytes, host_memory()[1])
        pack_linears(network, keep)
        if drafter.network is not None:
            pack_linears(drafter.network, keep)


def _move_to_huge_pages(device: torch.device) -> None:
    """On a CPU, have weights lie in huge pages; to be called when they are loaded."""
    if device.type == "cpu":
        logger.debug("%d MiB were moved to huge pages", use_huge_pages() >> 20)


class _Mover(threading.Thread):
    """Moves weights to huge pages while the engine serves, whenever the processor is idle."""

    def __init__(self) -> None:
        super().__init__(name="huge pages", daemon=True)

    def run(self) -> None:
        """Move them."""
        with suppress(AttributeError, OSError):  # where there is no such thing it takes its share
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread alone
        _move_to_huge_pages(torch.device("cpu"))


def _compile_blocks(network: Model, drafter: Drafter, compiler: Compiler) -> None:
    """From now on run the blocks of the target and the drafter's network as `compiler` compiles them."""
    network.compile_blocks(compiler)
    drafter.compile(compiler)


def resolve_sizes(config: Config, device: torch.device, limits: dict[str, Any], drafter: Drafter) -> Sizes:
    """Return the sizes of an engine with this drafter; `limits` are those that `Sizes.resolve` takes by name.

    On CUDA the batch buckets are those of --cuda-graph-bs, or by default as few as cost no time; `limits` may name
    others. On a CPU the smaller trees are for batches of one and two, since they pay for their graphs' compiling there
    alone; and there are more prefill buckets, since they share their graph, and padding costs time.
    """
    batches: Sequence[int] = ()
    if device.type == "cuda":
        largest = largest_graph(config, free_bytes(device)[1])
        batches = config.cuda_graph_bs or coarse_batches(limits["max_running"], drafter.nodes, largest)
    both_up_to = 2 if device.type == "cpu" else None
    sizes = Sizes.resolve(drafter, **{"batches": batches, "both_up_to": both_up_to, **limits})
    if device.type == "cuda":
        return sizes
    # With int8 weights, fewer tokens in a row than these are taken for a tree.
    least = prompt_rows(drafter.nodes) if config.quantization == "int8" else 1
    more = {size for size in CPU_PREFILLS if least <= size < sizes.prefill_sizes[-1]}
    return replace(sizes, prefill_sizes=tuple(sorted({*sizes.prefill_sizes, *more})))


def captured_batches(config: Config, sizes: Sizes) -> tuple[int, ...]:
    """Return the batch buckets whose decode steps are captured as CUDA graphs; none on a CPU, where one line says so.

    They are the buckets up to --cuda-graph-max-bs, whose default follows the GPU's memory as SGLang's does; or those
    that --cuda-graph-bs lists.
    """
    device = choose_device(config)
    if device.type != "cuda":
        flags = {"cuda_graph_bs": config.cuda_graph_bs, "cuda_graph_max_bs": config.cuda_graph_max_bs,
                 "disable_cuda_graph": config.disable_cuda_graph}  # fmt: skip
        if given := next((name for name, value in flags.items() if value), None):
            value = " ".join(map(str, config.cuda_graph_bs or ())) if given == "cuda_graph_bs" else flags[given]
            shown = flag_name(given) + ("" if value is True else f" {value}")
            logger.warning("%s changes nothing: on a CPU there are no CUDA graphs", shown)
        return ()
    largest = largest_graph(config, free_bytes(device)[1])
    listed = sizes.batch_sizes if config.cuda_graph_bs is None else config.cuda_graph_bs
    return tuple(batch for batch in sizes.batch_sizes if batch <= largest and batch in listed)


def _make_engine(
    config: Config, parts: Parts | Budget, pages: int, compiled: bool
) -> Engine:
    """Return the engine around target and drafter, with so many pages."""
    network, drafter, sizes = parts.network, parts.drafter, parts.sizes
    kv = make_kv(config, network, drafter, sizes, pages)
    accept = Accept(config.thresholds, config.simulate_acc_len)
    engine = Engine(network, kv, drafter, sizes, compiled=compiled, accept=accept)
    engine.asked = Asking(engine)
    if compiled:
        # On a CPU it costs seconds of compiling a shape, and gains 5 to 7 % where blocks are fast: docs/log.md. Larger
        # trees that a drafter grows on the device would have its own functions compiled as well.
        most = sizes.nodes if sizes.steps is None else FEW_ROWS
        few: Choice = lambda batch, nodes, samples: batch == 1 and nodes <= most and not samples  # noqa: E731
        every: Choice = lambda batch, nodes, samples: True  # noqa: E731
        compiler = partial(compile_step, device=kv.pool.device)
        engine.compile_small(compiler, every if kv.pool.is_cuda else few)
        compile_head(network, compiler, engine.permits)
        # Every shape is a graph of the same function, and several LLMs may share a process. Not for the warm-up alone:
        # whoever registers a pytree node later (transformers does) invalidates all graphs.
        # Blocks whose layers are not of the same types, as in a checkpoint that is fp8 in part, have a graph each.
        kinds = {tuple(type(part) for part in block.modules()) for block in network.layers}
        torch._dynamo.config.recompile_limit += len(engine.shapes()) * len(kinds)
    return engine


def _fill_at_random(model: Model, seed: int) -> None:
    """Draw weights of a plausible scale: for speed work, where the text does not matter."""
    generator = torch.Generator(device=model.embed_tokens.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(("o_proj.bias", "down_proj.bias")):  # which all ranks have, so they must not differ there
            parameter.zero_()
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def _can_compile(device: torch.device) -> bool:
    """Return whether torch.compile can build here; if not, say once what is missing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        if device.type == "cpu":
            get_cpp_compiler()
        return True
    except InvalidCxxCompiler:
        logger.warning("torch.compile needs a C++ compiler (g++ or clang++) and found none: running eagerly, slower")
        return False


def _limit_threads(processes: int = 1) -> None:
    """Let torch use no more threads than the process has whole cores, unless OMP_NUM_THREADS says otherwise.

    processes: ranks among which the cores are divided.

    torch counts the machine's cores and knows no quota. Threads beyond it make every parallel loop wait for those that
    are not scheduled.
    """
    cores = max(core_count() // processes, 1)
    if "OMP_NUM_THREADS" not in os.environ and cores < torch.get_num_threads():
        logger.info("%d threads, as many as the process has cores; OMP_NUM_THREADS sets another number", cores)
        torch.set_num_threads(cores)
