"""A replica: the engine thread in a process of its own, which Ray places, starts and starts again.

The class is a plain one; `cluster.py` makes it a Ray actor, so Ray is imported only where there are replicas. Its
methods are called from the door. Updates go back as one stream, with everything that one step, or a few, added.

When the process dies, Ray starts another one in its place, which knows nothing. So each has a name of its own, the
incarnation, that stands with every batch of updates, and the door drops what comes from any but the one it knows. A
step that hangs (`watchdog.py`) or an engine that fails ends the process, and the door sees a death.

Read next: `wire.py` for what goes in and comes out; `workers.py`, the other end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from typing import Any, cast

import numpy as np

from minispec.config import Config
from minispec.corpora import Corpus, Tokens
from minispec.load.machine import code_folder
from minispec.replicas.wire import Told, Values
from minispec.request import ABORTED, Finish, Request, RequestError, Update, one_line
from minispec.serve.front import Front
from minispec.serve.watchdog import Watchdog
from minispec.serve.worker import EngineThread, build_sealed_llm

logger = logging.getLogger("minispec")


AT_THE_DOOR = ("dp_size", "ray_address", "api_key", "admin_api_key", "ssl_keyfile", "ssl_certfile", "chat_template",
               "speculative_ngram_external_corpus_path", "speculative_ngram_learned_folder", "notes")  # fmt: skip


def given_flags(config: Config) -> Values:
    """Return the flags of a replica of a server with this config, in plain values; keys stay at the door."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.init and f.name not in AT_THE_DOOR}


class Replica:
    """One engine and the requests that it has. Every method runs on the actor's event loop."""

    def __init__(self, flags: Values, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported, which is when the engine loads
        self.config = Config(**flags)
        logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S",
                            level=self.config.log_level.upper())  # fmt: skip
        code_folder()
        self.incarnation = uuid.uuid4().hex
        self.engine: EngineThread | None = None
        self.told: dict[str, Told] = {}  # rid -> a request that is here
        self.entering: set[str] = set()  # rids of those whose grammars are being compiled
        self.out: asyncio.Queue[Values] = asyncio.Queue()

    async def begin(self) -> Values:
        """Begin to load, if that is still to be done; return what this process is, and how far it has come."""
        if self.engine is None:
            watchdog = Watchdog(self.config.watchdog_timeout, lambda: os._exit(1))
            self.engine = EngineThread(self.config, build_sealed_llm, self._deliver, self._died, watchdog)
            self.engine.ready_line = "a replica has loaded"  # the server is ready when the door knows of it
            self.engine.start()
        engine, state = self.engine, self.engine.state  # read once, as it may become "ready" while this looks around
        return {
            "incarnation": self.incarnation, "pid": os.getpid(), "host": socket.gethostname(), "state": state,
            "progress": one_line(engine.error) if state == "failed" else engine.progress,
            "graphs": engine.graphs, "facts": cast(Front, engine.front).facts if state == "ready" else None,
        }  # fmt: skip

    @property
    def _begun(self) -> EngineThread:
        assert self.engine is not None, "nobody has begun"
        return self.engine

    async def submit(self, incarnation: str, requests: Sequence[Request]) -> None:
        """Take requests that the door has checked, if they are for this incarnation; all of a prompt come together."""
        if incarnation != self.incarnation:
            return  # the one they were for has died, and the door sends them again
        for request in requests:
            request.arrived = time.monotonic()  # of this machine
        self.told |= {request.rid: Told(request) for request in requests}
        rids = {request.rid for request in requests}
        self.entering |= rids
        if any(request.params.grammar is not None for request in requests):
            refused = await asyncio.to_thread(self._check, requests)
        else:
            refused = self._check(requests)
        for request, error in refused.items():
            self._end(request.rid, Finish("abort", message=error.message, status=error.status))
        fresh = [request for request in requests if request.rid in self.entering]
        self.entering -= rids
        self._begun.submit(fresh)

    def _check(self, requests: Sequence[Request]) -> dict[Request, RequestError]:
        """Check requests against this engine, whose pool may be smaller than others', and compile their grammars."""
        refused = {}
        for request in requests:
            most = request.max_new_tokens
            try:
                cast(Front, self._begun.front).validate(request)
                request.max_new_tokens = min(request.max_new_tokens, most)
            except RequestError as error:
                refused[request] = error
        return refused

    async def abort(self, rids: Sequence[str]) -> None:
        """End requests, wherever they are."""
        for rid in self.entering.intersection(rids):
            self._end(rid, ABORTED)
        self._begun.abort([self.told[rid].request for rid in rids if rid in self.told])

    def _end(self, rid: str, finish: Finish) -> None:
        """End a request that is not in the engine yet."""
        self.entering.discard(rid)
        self._deliver([Update(self.told[rid].request, [], "", finish)])

    async def ask(self, question: str, *given: Any) -> Any:
        """Return the answer to one of `info.QUESTIONS`, asked between two steps."""
        (answer,) = await self._begun.each(question, *given)
        return answer

    async def put(self, name: str, arrays: tuple[Tokens, Tokens] | None) -> None:
        """Add an external corpus, given by the fields of `Corpus`, or remove it; safe while the engine runs."""
        table = cast(Front, self._begun.front).corpora.table
        if table is not None:  # copies, since Ray's memory is for what is under way
            table.put(name, None if arrays is None else Corpus(*map(np.array, arrays)))

    async def updates(self, incarnation: str) -> AsyncIterator[tuple[str, list[Values]]]:
        """Yield batches of updates with the incarnation that they are of, as long as it is the one asked for."""
        while incarnation == self.incarnation:
            batch = [await self.out.get()]
            while not self.out.empty():
                batch.append(self.out.get_nowait())
            yield self.incarnation, batch

    def _deliver(self, updates: Sequence[Update]) -> None:
        for update in updates:
            told = self.told.get(update.request.rid)
            if told is not None:
                self.out.put_nowait(told.update(update))
                if update.finish is not None:
                    del self.told[update.request.rid]

    def _died(self) -> None:
        """The engine thread is gone. What failed to load is told by `begin`; else the process ends, to be replaced."""
        if self._begun.loaded.is_set():
            logger.critical("the engine has failed, and this replica ends: %s", one_line(self._begun.error))
            os._exit(1)
