"""The offline interface: `LLM(model, ...).generate(prompts, params)`.

An `LLM` is an engine with a scheduler in front of it; `load/build.py` makes the engine from a `Config`. The server
builds the same object and drives the same scheduler, so offline measurements hold for the server.

    from minispec import LLM, SamplingParams
    llm = LLM("path-or-id", speculative_algorithm="NGRAM")
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))["text"])

Read next: `scheduler.py`; for the HTTP face, `server.py`; for what a start does, `load/build.py`.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

import torch

from minispec.asked.answers import meta_info
from minispec.config import Config
from minispec.load.build import Build
from minispec.load.corpora import Library
from minispec.load.tree_shape import allows
from minispec.request import Request, RequestError, SamplingParams
from minispec.scheduler import Scheduler, SchedulerOptions

logger = logging.getLogger("minispec")
Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]  # a mapping has the fields of SamplingParams by their names


class LLM:
    """A loaded model behind a scheduler. Keyword options are the fields of `Config`, that is, the launch flags.

    With tp_size above 1 the LLM starts the other ranks: processes that have a part of the model each. They end with
    this process, and this process ends if one of them dies.

    compile_later: for the server on a CPU. Steps run eagerly until `serve/warming.py` has made their graphs.
    Flags or the device may forbid this (`Build.lead`); the attribute `compile_later` says whether it was put off.
    batches: for bench.py. Batch sizes to compile. They replace the usual sizes up to the largest size given here;
    larger usual sizes stay.
    Raises ValueError or RuntimeError with one readable sentence if model, flags and machine do not fit together.
    """

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
            for note in config.notes:  # the server passes a config, whose notes it has logged already
                logger.warning("%s", note)
        elif model is not None or options:
            raise ValueError("give either config or model and options, not both")
        self._build = build = Build(config, progress or logger.info)
        build.lead(batches, compile_later)
        self.config = config = build.config
        self.folder, self.model_config = build.folder, build.model_config
        self.tokenizer, self.compiled, self.compile_later = build.tokenizer, build.compiled, build.later
        self.move_weights = build.move_weights  # starts a thread that moves them to huge pages, if loading put that off
        engine = build.engine()
        self.makers = partial(build.makers, engine)  # starts processes that make files of what is to be compiled
        self.memory = build.memory
        self.scheduler = Scheduler(
            engine,
            self.tokenizer,
            build.eos_ids,
            SchedulerOptions(
                radix=not config.disable_radix_cache,
                overlap=engine.device.type == "cuda" and not config.disable_overlap_schedule,
                strict_max_tokens=config.strict_max_tokens,
                decode_log_interval=config.decode_log_interval,
                random_seed=config.random_seed,
                adapts_from=config.adapts_from(engine.device.type == "cuda"),
                allows=allows(config, {size.nodes: size.rounds for size in engine.drafter.trees}),
                greedy=config.verifies_greedily,
                record_times=config.record_step_time,
            ),
        )
        self.corpora = Library(engine.drafter.corpora, self.tokenizer, config)
        self.corpora.start()
        # Step times that were taken while a compiler ran mean nothing.
        engine.when_settled(lambda: self.scheduler.policy.restart(engine.step_seconds))
        engine.when_settled(self.move_weights)
        logger.info("%s", startup_line(config, self.scheduler))

    @torch.inference_mode()
    def try_out(self) -> Iterator[None]:
        """Time steps and test the head (`Build.try_out`), for an idle server that made its graphs while it served."""
        yield from self._build.try_out(self.scheduler.engine)
        self.scheduler.policy.restart(self.scheduler.engine.step_seconds)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None) -> Any:
        """Return objects like the answers of /generate (text, output_ids, meta_info), one per prompt, in their order.

        A prompt is a string or a list of token ids; a single prompt gives a single object. `params`: one for all
        prompts or one for each. If a prompt cannot be served, RequestError is raised before any prompt is started.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed = cast(list[Prompt], [prompts] if single else list(prompts))
        wishes = list(params) if isinstance(params, Sequence) else [params] * len(listed)
        if len(wishes) != len(listed):
            raise RequestError(f"{len(listed)} prompts but {len(wishes)} params; give one for all or one for each")
        requests = [self.request(prompt, wish) for prompt, wish in zip(listed, wishes, strict=True)]
        texts = self.serve(requests)
        nodes = self.scheduler.sizes.nodes
        results = [
            {"text": texts[request], "output_ids": request.output_ids,
             "meta_info": meta_info(request, len(request.output_ids), request.finish, nodes)}
            for request in requests
        ]  # fmt: skip
        return results[0] if single else results

    def serve(self, requests: Sequence[Request]) -> dict[Request, str]:
        """Run requests to their ends and return their texts; raises RequestError, and runs none, if one is invalid."""
        for request in requests:
            self.scheduler.validate(request)
            self.corpora.check(request.params)
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

    def request(self, prompt: Prompt, params: Params | None = None) -> Request:
        """Make a request of a prompt; without params its limit is the default, or the room in the context if less."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if isinstance(params, Mapping):
            known = [member.name for member in fields(SamplingParams)]
            if unknown := [name for name in params if name not in known]:
                raise RequestError(f"{unknown[0]} must be one of {', '.join(known)}", unknown[0])
            params = SamplingParams(**params)
        if params is not None and params.sampling_seed is None:
            params = replace(params, sampling_seed=self.config.seed)
        if params is None:
            room = self.scheduler.sizes.context_length - len(ids)
            params = SamplingParams(max_new_tokens=max(1, min(SamplingParams().max_new_tokens or 1, room)),
                                    sampling_seed=self.config.seed)  # fmt: skip
        return Request(uuid.uuid4().hex, ids, params)


def startup_line(config: Config, scheduler: Scheduler) -> str:
    """Return the line of sizes to log at start, in SGLang's form."""
    pool, sizes, drafter = scheduler.limits.pool_rows, scheduler.sizes, scheduler.engine.drafter
    shape = "" if drafter.rounds is None else f"num_steps={drafter.rounds}, eagle_topk={drafter.topk}, "
    looked_up = f", lookup_draft_tokens={sizes.nodes}" if sizes.has_lookups else ""
    weights = "" if config.quantization is None else f"quantization={config.quantization}, "
    return (
        f"{weights}max_total_num_tokens={pool}, chunked_prefill_size={sizes.chunk_size}, "
        f"max_running_requests={sizes.max_running}, context_len={sizes.context_length}, "
        f"page_size={scheduler.kv.page_size}, speculative_algorithm={config.algorithm}, "
        f"{shape}draft_tokens={sizes.own_nodes}{looked_up}"
    )
