"""What a server must know of its model to take requests and answer them, without having the model.

In one process it is read off the `LLM`. With replicas the process at the door has no model: a replica tells its
`Facts`, and the door reads tokenizer and sampling defaults from the model's folder. Everything is constant, so any
thread may ask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minispec.config import Config
from minispec.request import Limits, Request

if TYPE_CHECKING:
    from minispec.llm import LLM
    from minispec.load.corpora import Library, Table
    from minispec.load.tokenizer import Tokenizer

logger = logging.getLogger("minispec")


class Facts(NamedTuple):
    """What an engine is like."""

    limits: Limits
    max_running: int  # requests decoded together
    nodes: int  # N, nodes of a draft tree
    page_size: int
    pages: int
    algorithm: str  # the drafter that runs
    has_lookups: bool  # whether it may draft from external corpora
    numbers: str  # what the tokens of a seed depend on beside the flags: the model's sizes, its dtype, its device


class Front(NamedTuple):
    """What a server knows of the model; safe on any thread."""

    folder: Path
    tokenizer: Tokenizer
    facts: Facts
    prepare: Callable[[Request], None]  # has ready what a request asks for: that of `Grammars`, or an engine's `Asked`
    defaults: dict[str, Any]  # sampling values for what a /v1 request leaves out
    corpora: Library  # the external corpora

    def validate(self, request: Request) -> None:
        """Do what `Scheduler.validate` does."""
        self.facts.limits.check(request)
        self.prepare(request)


def front_of(llm: LLM, config: Config) -> Front:
    """Return the front in front of an engine in this process."""
    from minispec.load.weights import sampling_defaults  # here, since the server listens before torch is imported

    scheduler, engine = llm.scheduler, llm.scheduler.engine
    weight = engine.model.norm.weight
    facts = Facts(scheduler.limits, scheduler.sizes.max_running, scheduler.sizes.nodes, scheduler.kv.page_size,
                  scheduler.kv.pages, llm.config.algorithm, engine.drafter.corpora is not None,
                  numbers=f"{weight.dtype} {weight.device.type} {llm.model_config}")  # fmt: skip
    defaults = sampling_defaults(config, llm.folder)
    return Front(llm.folder, llm.tokenizer, facts, lambda r: engine.asked.prepare(r), defaults, llm.corpora)


def front_for(facts: Facts, config: Config, table: Table) -> Front:
    """Return the front in front of engines elsewhere, whose corpora `table` puts there.

    It reads the tokenizer and builds the corpora that flags name, so it takes seconds. Raises ValueError as
    `Library.start` does.
    """
    from minispec.asked.grammar import Grammars  # here, since the server listens before torch is imported
    from minispec.load.build import choose_folder, choose_tokenizer
    from minispec.load.corpora import Library
    from minispec.load.weights import sampling_defaults

    folder, limits = choose_folder(config, logger.info), facts.limits
    tokenizer = choose_tokenizer(config, folder, limits.vocab_size)
    grammars = Grammars(tokenizer.backend, limits.vocab_size, limits.eos_ids)
    corpora = Library(table if facts.has_lookups else None, tokenizer, config)
    corpora.start()
    return Front(folder, tokenizer, facts, grammars.prepare, sampling_defaults(config, folder), corpora)
