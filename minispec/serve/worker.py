"""The thread that owns an `LLM`: it loads the model, runs the commands in its inbox, and calls `scheduler.step()`.

Commands (submit, abort, questions, stop) go through one inbox and run between two steps. Updates come back with exactly
one `call_soon_threadsafe` per step, because a compiled CPU kernel holds the interpreter lock until it returns.

Read next: `server.py`, whose event loop is at the other end; `replica.py`, where another process has such a thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from minispec.config import Config
from minispec.load.machine import uncollected
from minispec.request import Finish, Request, RequestError, SamplingParams, Update, one_line
from minispec.serve.front import Front, front_of
from minispec.serve.info import QUESTIONS
from minispec.serve.watchdog import Watchdog

if TYPE_CHECKING:
    from minispec.llm import LLM
    from minispec.scheduler import Scheduler
    from minispec.serve.warming import Warming

logger = logging.getLogger("minispec")

Command = Callable[["Scheduler"], Sequence[Update]]
Build = Callable[[Config, Callable[[str], None]], "LLM"]


def build_llm(config: Config, progress: Callable[[str], None]) -> LLM:
    """Load the model; importing torch is part of loading, so that --help and the first /health need not wait for it.

    On a CPU what is to be compiled is left to `Warming`, unless --wait-until-compiled is given.
    """
    with uncollected():
        from minispec.llm import LLM

    return LLM(config=config, progress=progress, compile_later=True)


def build_sealed_llm(config: Config, progress: Callable[[str], None]) -> LLM:
    """Load the model and forbid recompilation in this process, which is therefore to be the server's own.

    It is forbidden as soon as everything is compiled. A recompilation would hold up every request for seconds, and one
    of FlexAttention could end in its eager fallback, a hundred times slower and silent.
    """
    llm = build_llm(config, progress)
    import torch  # only now: `build_llm` imports torch with the garbage collector off, which makes a start faster

    llm.scheduler.engine.when_settled(lambda: torch.compiler.set_stance("fail_on_recompile"))
    return llm


class EngineThread(threading.Thread):
    """The thread that owns the LLM. `state` goes from starting to ready, and from either to failed."""

    def __init__(
        self, config: Config, build: Build, deliver: Callable[[list[Update]], None], died: Callable[[], None],
        watchdog: Watchdog,
    ) -> None:  # fmt: skip
        super().__init__(name="engine", daemon=True)
        self.config, self.build, self.deliver, self.died, self.watchdog = config, build, deliver, died, watchdog
        self.state, self.progress = "starting", "starting"
        self.error: BaseException | None = None
        self.ready_line = "The server is fired up and ready to roll!"  # in the log; scripts wait for SGLang's words
        self.lost = False  # whether this process can compute nothing any more
        self.llm: LLM | None = None  # only this thread may use it; `front` has what other threads may read
        self.warming: Warming | None = None
        self.front: Front | None = None  # known once ready
        self.loaded, self.stopped = threading.Event(), threading.Event()
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.loop = asyncio.get_running_loop()

    # ---- called from the event loop ----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue validated requests."""

        def command(scheduler: Scheduler) -> list[Update]:
            updates = []
            for request in requests:
                try:
                    scheduler.submit(request)
                except Exception as error:  # it never got into the scheduler, so nobody else would answer it
                    logger.exception("submit failed")
                    updates.append(Update(request, [], "", Finish("abort", message=one_line(error), status=500)))
            return updates

        self.inbox.put(command)

    def abort(self, requests: Sequence[Request]) -> None:
        """End those of the requests that have not finished; their rids are unique and none is a prefix of another."""
        self.inbox.put(lambda scheduler: [u for r in requests if not r.finish for u in scheduler.abort(r.rid)])

    async def each(self, question: str, *given: Any) -> list[Any]:
        """Return each engine's answer to one of `QUESTIONS`, asked between two steps; here there is one engine."""
        answer: Future[Any] = Future()

        def command(scheduler: Scheduler) -> list[Update]:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(QUESTIONS[question](self.llm, *given))
                except Exception as error:
                    answer.set_exception(error)
            return []

        self.inbox.put(command)
        return [await asyncio.wrap_future(answer)]

    @property
    def graphs(self) -> str:
        """What /health says of compiled graphs."""
        return self.warming.state if self.warming is not None else "eager"

    def stop(self) -> None:
        """Ask the thread to end after the step it is in."""
        self.stopped.set()
        self._wake()

    def _wake(self) -> None:
        self.inbox.put(lambda scheduler: [])

    # ---- the thread --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Load; then do what the inbox asks and one step, again and again, until stopped."""
        try:
            scheduler = self._load()
            from minispec.serve.warming import Warming  # here, since the server listens before torch is imported

            warming = self.warming = Warming(cast("LLM", self.llm))
            self.watchdog.start()
            while not self.stopped.is_set():
                updates: list[Update] = []
                waited: list[Command] = []
                try:
                    if scheduler.has_work:
                        warming.turn(busy=True)
                    else:
                        self.watchdog.rest()
                        if not (self.inbox.empty() and warming.turn(busy=False)):
                            scheduler.check()  # everything is delivered: now every page must be in its place
                            with suppress(queue.Empty):
                                waited.append(self.inbox.get(timeout=warming.pause))
                    with self.watchdog:
                        while waited or not self.inbox.empty():
                            updates += (waited.pop() if waited else self.inbox.get())(scheduler)
                        if scheduler.has_work:
                            updates += scheduler.step()
                except Exception as error:
                    logger.exception("a step failed; the requests that it has lost are answered with an error")
                    if updates:  # if the device itself failed, so does what follows
                        self._to_loop(self.deliver, updates)
                    self.lost = scheduler.engine.is_lost(error)
                    if self.lost:
                        raise
                    updates = scheduler.fail(error)
                if updates:
                    self._to_loop(self.deliver, updates)
        except (Exception, SystemExit) as error:  # SystemExit: out of a library; whoever waits must be told
            logger.debug("the engine thread ends", exc_info=True)
            self.error, self.state, self.lost = error, "failed", self.lost or getattr(error, "ends_server", False)
            self._to_loop(self.died)
        finally:
            if self.warming is not None:
                self.warming.stop()

    def _load(self) -> Scheduler:
        self.llm = self.build(self.config, self._tell)
        if not self.config.skip_server_warmup:
            self._warm_up(self.llm)
        self.front = front_of(self.llm, self.config)
        self.state = "ready"
        self.loaded.set()
        logger.info("%s", self.ready_line)
        return self.llm.scheduler

    def _tell(self, line: str) -> None:
        self.progress = line
        logger.info("%s", line)

    def _to_loop(self, call: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is listening any more
            self.loop.call_soon_threadsafe(call, *args)

    def _warm_up(self, llm: LLM) -> None:
        """Answer one request of our own, so that ready means: a request was answered; leaves no trace in the totals."""
        self._tell("answering a first request")
        try:
            llm.generate("The capital city of France is", SamplingParams(max_new_tokens=8, temperature=0.0))
        except RequestError as error:  # a context or pool of a few tokens: served, with requests as small
            logger.warning("no start-up request: %s", error)
            return
        llm.scheduler.flush_cache()
