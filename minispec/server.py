"""HTTP to requests and back: a thin aiohttp application in front of one engine thread.

    python -m minispec.server [--model PATH] [--port 30000] ...

There are two main threads. The event loop parses requests, counts prompts and streams answers. The engine thread
(`serve/worker.py`) owns the `LLM` and runs its steps. With --dp-size, replicas in other processes take the place of the
engine thread (`replicas/workers.py`). What the loop knows of the model is in a `Front` (`serve/front.py`).

The server listens before the model is loaded, and answers 503 until it is ready. It answers every failure with OpenAI's
error object, which a stream carries as an event. If a client hangs up, its requests are aborted.

Read next: `serve/parse.py` and `serve/reply.py` for what goes in and out, `scheduler.py` for what a step is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial, partialmethod
from typing import Any, cast

from aiohttp import web

from minispec.config import Config
from minispec.load.flags import config_from_args
from minispec.load.machine import code_folder, remove_caches
from minispec.replicas.workers import Replicas
from minispec.replies.formats import CALLS, THOUGHTS, Formats, calls_of
from minispec.request import Request, RequestError, Update, one_line, short
from minispec.serve import answers, fields, openapi, page, parse, prometheus
from minispec.serve.answers import json_answer
from minispec.serve.auth import Auth
from minispec.serve.bodies import HEAD_TIMEOUT, MAX_BODY, Bodies
from minispec.serve.front import Front
from minispec.serve.info import fingerprint, version
from minispec.serve.messages import MessageReply, parse_message
from minispec.serve.parse import choice_seed
from minispec.serve.reply import Reply, Served
from minispec.serve.responses import ResponseReply, parse_response
from minispec.serve.routes import ROUTES, Misspelt, tidied
from minispec.serve.streams import Exchange, delivered, delivering, leave, stream
from minispec.serve.watchdog import Watchdog
from minispec.serve.worker import Build, EngineThread, build_llm, build_sealed_llm

logger = logging.getLogger("minispec")
Parser = Callable[[dict[str, Any], dict[str, Any]], parse.Job]  # of a body, with the model's sampling defaults

REPLIES: dict[str, type[Reply]] = {"response": ResponseReply, "message": MessageReply}

HEALTH_TIMEOUT = 20.0  # seconds that /health_generate waits for a token
DRAIN_LOOK = 0.02  # seconds between two looks at whether all requests have finished
STOP_TIMEOUT = 1.0  # seconds for connections to end, and again for the engine thread


class Server:
    """The aiohttp application, and which requests are under way. Everything here runs on the event loop."""

    def __init__(self, config: Config, build: Build = build_llm) -> None:
        self.config, self.build = config, build
        self.auth, self.seen = Auth(config), prometheus.Seen()
        self._names = [name for name in (config.served_name, config.model_path) if name]
        self.created = int(time.time())
        self.port = config.port
        self.exchanges: set[Exchange] = set()  # the HTTP requests for text that are under way
        self.routes: dict[Request, Exchange] = {}  # for each request in the engine, the exchange that gets its updates
        self.admitted = 0  # prompts under way, including those not tokenized yet
        self.produced = asyncio.Event()  # set whenever a step has given tokens
        self.must_end = asyncio.Event()  # set if the process must end, since it will not answer any more
        self.draining = self.stopping = False  # draining: no new work is taken; stopping: what is left is ended
        self.bodies = Bodies()
        self.watchdog = Watchdog(0)  # watches nothing; only `serve`, which may end the process, sets one that does
        # These threads do work that takes long. Prompts that wait for them count against the bound of the queue.
        # Requests with a grammar have a thread of their own, so that a slow grammar delays only other grammars.
        self.tokenizing, self.compiling = ThreadPoolExecutor(2, "tokenizing"), ThreadPoolExecutor(1, "grammars")

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, and begin to load the model; raises OSError if the address is taken."""
        self.over: asyncio.Future[RequestError] = asyncio.get_running_loop().create_future()  # why no engine answers
        self.engine: Replicas | EngineThread
        if self.config.dp_size > 1:
            self.engine = Replicas(self.config, self._deliver, self._died)
        else:
            self.engine = EngineThread(self.config, self.build, self._deliver, self._died, self.watchdog)
        answers.access_logger.setLevel(self.config.log_level_http.upper())
        self.runner = web.AppRunner(
            self.application(), handler_cancellation=True, shutdown_timeout=STOP_TIMEOUT,
            access_log=answers.access_logger, access_log_class=answers.AccessLog, keepalive_timeout=HEAD_TIMEOUT,
            auto_decompress=False,  # `bodies.py` does, and says what it cannot
        )  # fmt: skip
        await self.runner.setup()
        site = web.TCPSite(self.runner, self.config.host, self.config.port, ssl_context=self.auth.tls)
        await site.start()
        self.port = self.runner.addresses[0][1]
        scheme = "http" if self.auth.tls is None else "https"
        logger.info("listening on %s://%s:%d; /health tells when it is ready", scheme, self.config.host, self.port)
        self.engine.start()

    async def drain(self, at_once: asyncio.Event) -> None:
        """Take no new work and wait for the work under way, until --shutdown-timeout or `at_once`.

        Then texts are saved for the next server, if a flag names a folder for them. The listener stays, so that a load
        balancer sees a 503 that says why and not a refused connection.
        """
        self.draining = True
        seconds = self.config.shutdown_timeout
        end = time.monotonic() + seconds
        logger.info("shutting down: %d requests under way have %g seconds to finish", len(self.exchanges), seconds)
        while self.exchanges and not at_once.is_set() and time.monotonic() < end:
            await asyncio.sleep(DRAIN_LOOK)
        if self.engine.front is not None:
            await asyncio.to_thread(self.engine.front.corpora.save)

    async def stop(self) -> None:
        """Stop the engine, answer everyone with an error, and close connections."""
        self.draining = self.stopping = True
        self.engine.stop()
        self._fail_everything(shutting_down())
        await self.runner.cleanup()
        for threads in (self.tokenizing, self.compiling, self.bodies.thread):
            threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.engine.join, STOP_TIMEOUT)

    def application(self) -> web.Application:
        """Return the application with its routes and middlewares."""
        steps: list[Any] = [delivering, self._counted_answer, answers.errors, self.auth.preflight, self.auth.guard]
        app = web.Application(middlewares=steps, client_max_size=MAX_BODY)
        app.on_response_prepare.extend((answers.set_request_id, self.auth.let_read))
        for route in ROUTES:
            add = getattr(app.router, f"add_{route.method}")  # `add_get` answers HEAD as well
            add(route.path.replace("}", f":{route.pattern}}}"), getattr(self, route.handler))
        app.router.register_resource(Misspelt(app.router))
        return app

    def _deliver(self, updates: list[Update]) -> None:
        """Hand each update of a step to the exchange that its request belongs to."""
        if any(update.ids for update in updates):
            self.produced.set()
        if self.config.enable_metrics:
            self.seen.updates(updates)
        for update in updates:
            if update.finish is not None and self.engine.front is not None:
                self.engine.front.corpora.learn(update.request)
            exchange = self.routes.get(update.request)
            if exchange is not None:
                exchange.add(update)

    def _died(self) -> None:
        """Answer everyone, since the engine has failed; end the process if the engine was never loaded or is lost."""
        message = one_line(self.engine.error)
        self._fail_everything(RequestError(f"the engine has failed: {message}", None, 503, "engine_failed"))
        if self.engine.loaded.is_set() and not self.engine.lost:
            logger.critical("the engine has failed, and /health says so: %s", message)
        else:
            self.must_end.set()

    def hung(self) -> None:
        """Answer everyone and end the process, since a step hangs."""
        self.engine.error = RuntimeError(f"a step has not ended in {2 * self.watchdog.seconds:g} seconds")
        cast(EngineThread, self.engine).state, self.engine.lost = "failed", True
        self._died()

    def _fail_everything(self, error: RequestError) -> None:
        """End every exchange, and every question to the scheduler; an exchange's handler then aborts its requests."""
        for exchange in self.exchanges:
            exchange.end(error)
        if not self.over.done():
            self.over.set_result(error)

    # ---- text --------------------------------------------------------------------------------------------------------

    async def _answer(self, parsed: Parser, http: web.Request) -> web.StreamResponse:
        """Answer a request for text, streaming or whole; `parsed` returns the job that its body asks for."""
        front = self._open()
        job = await self.bodies.read(http, lambda body: parsed(body, front.defaults))
        self._check_model(job.model)
        exchange = Exchange(job)
        with self._counted(len(job.prompts)), self._kept(exchange):
            threads = self.compiling if any(params.grammar for params in job.params) else self.tokenizing
            reply = await asyncio.get_running_loop().run_in_executor(threads, _prepare, job, front, self._served)
            exchange.requests = reply.requests
            if not exchange.items.empty():
                await exchange.next()  # raises the error that ended the exchange while its prompt was tokenized
            self._submit(exchange)
            if self.config.log_requests:
                answers.log_requests(reply.requests)
            if job.stream:
                response = await stream(http, exchange, reply)
            else:
                while not reply.done:
                    reply.take(await exchange.next())
                response = await delivered(http, json_answer(reply.result()))
        if exchange.unread:
            await leave(http, response, exchange.unread)
        return response

    chat = partialmethod(_answer, parse.parse_chat)
    completion = partialmethod(_answer, parse.parse_completion)
    response = partialmethod(_answer, parse_response)
    message = partialmethod(_answer, parse_message)
    generate = partialmethod(_answer, lambda body, defaults: parse.parse_generate(body))

    @contextmanager
    def _counted(self, count: int) -> Iterator[None]:
        """Count prompts against the bound of the queue while the block runs; RequestError 503 if the queue is full."""
        limit = self._open().facts.max_running * self.config.dp_size + self.config.max_queued_requests
        if count > limit:
            raise RequestError(f"{count} prompts and choices in one request; --max-queued-requests allows {limit}",
                               "prompt")  # fmt: skip
        if self.admitted + count > limit:
            raise RequestError("The request queue is full.", None, 503, "queue_full")
        self.admitted += count
        try:
            yield
        finally:
            self.admitted -= count

    @contextmanager
    def _kept(self, exchange: Exchange) -> Iterator[None]:
        """Keep an exchange in `exchanges` while the block runs, --request-timeout at most; abort what is unfinished."""
        self.exchanges.add(exchange)
        limit = self.config.request_timeout
        late = partial(exchange.end, RequestError(f"the request took more than {limit} seconds", None, 504, "timeout"))
        timer = None if limit is None else asyncio.get_running_loop().call_later(limit, late)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self.exchanges.discard(exchange)
            submitted = [r for r in exchange.requests if self.routes.pop(r, None) is not None]
            if any(r.finish is None for r in submitted):
                self.engine.abort(submitted)

    def _submit(self, exchange: Exchange) -> None:
        """Hand an exchange's requests to the engine, unless the engine has stopped or failed meanwhile."""
        self._ready()
        self.routes.update(dict.fromkeys(exchange.requests, exchange))
        self.engine.submit(exchange.requests)
        self._end_aborted(exchange)

    def _end_aborted(self, exchange: Exchange) -> None:
        """Have the engine end those requests of an exchange that /abort_request named; their last updates follow."""
        aborted = [request for index, request in enumerate(exchange.requests) if index in exchange.aborted]
        if aborted:
            self.engine.abort([request for request in aborted if request in self.routes])

    # ---- the other endpoints -----------------------------------------------------------------------------------------

    async def health(self, http: web.Request) -> web.Response:
        """200 once the server is ready, with how much is compiled; else 503 with a line of progress."""
        state = "shutting_down" if self.draining else self.engine.state
        line = self._progress()
        if state == "ready" and self.watchdog.late:
            state, line = "hung", f"a step has taken longer than {self.watchdog.seconds:g} seconds"
        if state == "ready":
            return json_answer({"status": "ready", "graphs": self.engine.graphs})
        return json_answer({"status": state, "progress": line}, 503, {"Retry-After": "5"})

    async def health_generate(self, http: web.Request) -> web.Response:
        """200 as soon as the engine has generated a token, 503 if that takes longer than 20 seconds."""
        front = self._open()
        body = {"input_ids": front.tokenizer.encode("a"), "rid": f"health-{uuid.uuid4().hex}"}
        exchange = Exchange(parse.parse_generate({**body, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}))
        with self._kept(exchange):
            exchange.requests = _prepare(exchange.job, front, self._served).requests
            self.produced.clear()
            self._submit(exchange)
            # A token of any request will do: in a long queue this request may wait longer, though the server is well.
            waits = [asyncio.ensure_future(self.produced.wait()), asyncio.ensure_future(exchange.next())]
            try:
                done, _ = await asyncio.wait(waits, timeout=HEALTH_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if waits[0] not in done:
            reason = f"no token within {HEALTH_TIMEOUT:g} seconds" if not done else "a request failed"
            raise RequestError(reason, None, 503, "unhealthy")
        return json_answer({"status": "ready"})

    async def models(self, http: web.Request) -> web.Response:
        """The one model served."""
        return json_answer({"object": "list", "data": [self._card()]})

    async def model(self, http: web.Request) -> web.Response:
        """The model of this name, which may contain slashes."""
        name = http.match_info["id"]
        self._check_model(name if name in self._names else tidied(f"/{name}")[1:], strict=True)
        return json_answer(self._card())

    async def model_info(self, http: web.Request) -> web.Response:
        """SGLang's description of the model."""
        info = json.loads((self._ready().folder / "config.json").read_text("utf-8"))
        return json_answer({
            "model_path": self.config.model_path or self.config.served_name,
            "tokenizer_path": self.config.tokenizer_path or self.config.model_path or self.config.served_name,
            "is_generation": True, "preferred_sampling_params": None, "weight_version": "default",
            "has_image_understanding": False, "has_audio_understanding": False,
            "model_type": info.get("model_type"), "architectures": info.get("architectures"),
        })  # fmt: skip

    async def server_info(self, http: web.Request) -> web.Response:
        """The launch flags, with one engine's sizes and current numbers; internal_states has them for each engine."""
        front = self._ready()
        told = await self._ask("stats")
        stats: dict[str, Any] = next(filter(None, told), {})
        given = {**dataclasses.asdict(self.config), "speculative_algorithm": front.facts.algorithm}
        hidden = {"api_key", "admin_api_key", "notes", *stats}  # `stats` has the resolved value of some flags
        flags = {name: value for name, value in given.items() if name not in hidden}
        states = [{**flags, **answer, "dp_rank": rank} for rank, answer in enumerate(told) if answer]
        info = {**stats, **flags, "version": version(), "internal_states": states}
        if isinstance(self.engine, Replicas):
            info["replicas"] = self.engine.listed(told)
        return json_answer(info)

    async def loads(self, http: web.Request) -> web.Response:
        """How busy each engine is, in SGLang's numbers; `include` may leave out the numbers of speculation."""
        self._ready()
        include = set(filter(None, http.query.get("include", "all").split(",")))
        if unknown := include - {"core", "memory", "spec", "lora", "disagg", "queues", "all"}:
            raise RequestError(f"include must be sections such as core, spec and all, got {min(unknown)[:100]!r}",
                               "include")  # fmt: skip
        found = enumerate(await self._ask("load"))
        loads = [{**load, "dp_rank": rank} for rank, load in found if load]
        for load in loads if not include & {"spec", "all"} else ():
            load.pop("speculative", None)
        return json_answer({"timestamp": time.time(), "version": version(), "loads": loads})

    async def props(self, http: web.Request) -> web.Response:
        """What clients of llama.cpp's server look for."""
        facts, info = self._ready().facts, self._ready().tokenizer.chat.info
        return json_answer({
            "default_generation_settings": {"n_ctx": facts.limits.context_length},
            "total_slots": facts.max_running * self.config.dp_size, "model_path": self._names[-1],
            "model_alias": self.config.served_name, "chat_template": info["chat_template"] or "",
            "bos_token": info.get("bos_token", ""), "eos_token": info.get("eos_token", ""),
            "modalities": {"vision": False, "audio": False}, "build_info": f"minispec {version()}",
        })  # fmt: skip

    async def tokenizer_info(self, http: web.Request) -> web.Response:
        """The special tokens and the chat template, for clients that count or tokenize themselves."""
        return json_answer(self._ready().tokenizer.chat.info)

    async def page(self, http: web.Request) -> web.Response:
        """The page to talk to the model; it needs no key, and asks for one where the server wants it."""
        text, headers = page.page()
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def openapi(self, http: web.Request) -> web.Response:
        """The description of this API."""
        return json_answer(openapi.document(version()))

    async def metrics(self, http: web.Request) -> web.Response:
        """The counters, for Prometheus."""
        if not self.config.enable_metrics:
            raise RequestError(f"there is no /metrics without --enable-metrics and {prometheus.EXTRA}", None, 404)
        self._ready()
        body, kind = prometheus.exposition(await self._ask("counters"), self.seen, self.config.served_name)
        return web.Response(body=body, headers={"Content-Type": kind})

    async def flush_cache(self, http: web.Request) -> web.Response:
        """Empty the prefix cache, the drafter's memory and the totals; 400 while requests are running or waiting."""
        corpora = self._ready().corpora
        if not all(await self._ask("flush")):
            raise RequestError("the cache was not flushed: requests are running or waiting", code="busy")
        corpora.forget()
        return web.Response(text="Cache flushed.\n")

    async def restart(self, http: web.Request) -> web.Response:
        """Restart a replica, which may finish its requests first (--shutdown-timeout); answers when it is up again."""
        self._ready()
        if not isinstance(self.engine, Replicas):
            raise RequestError("there are no replicas without --dp-size", None, 404)
        await self.engine.restart(int(http.match_info["number"]))
        return json_answer({"status": "ready"})

    async def set_internal_state(self, http: web.Request) -> web.Response:
        """Change flags between two steps, and restart the counts of accepted drafts, as SGLang does."""
        self._ready()
        asked = (await self._body(http, fields.InternalState)).server_args
        try:
            config = dataclasses.replace(self.config, **asked.model_dump(exclude_none=True))
        except ValueError as error:
            raise RequestError(str(error), "server_args") from None
        await self._ask("reconfigure", config.thresholds, config.speculative_adaptive)
        self.config = config
        self.__dict__.pop("_served", None)  # its fingerprint depends on the config
        return json_answer([True])

    async def add_corpus(self, http: web.Request) -> web.Response:
        """Add texts to draft from; answers when they are there, while requests go on."""
        library, asked = self._open().corpora, await self._body(http, fields.AddCorpus)
        name, count = await asyncio.to_thread(library.add, asked.corpus_id, asked.documents, asked.file_path)
        return json_answer({"success": True, "corpus_id": name, "loaded_token_count": count,
                            "message": f"corpus {name} has {count} tokens"})  # fmt: skip

    async def remove_corpus(self, http: web.Request) -> web.Response:
        """Remove texts to draft from, without waiting for requests that use them."""
        library, asked = self._ready().corpora, await self._body(http, fields.RemoveCorpus)
        await asyncio.to_thread(library.remove, asked.corpus_id)
        return json_answer({"success": True, "message": f"corpus {asked.corpus_id} is removed"})

    async def list_corpora(self, http: web.Request) -> web.Response:
        """The number of tokens of each corpus."""
        return json_answer({"success": True, "corpus_token_counts": dict(self._ready().corpora.counts), "message": ""})

    async def abort_request(self, http: web.Request) -> web.Response:
        """End the prompts whose rid begins with `rid`, or all prompts; 200 even if there were none.

        If there is an admin key, a client without it must name a whole rid. A client that knows the whole rid is taken
        for the one that sent the prompt.
        """
        asked = await self._body(http, fields.Abort)
        if not asked.abort_all and asked.rid is None:
            raise RequestError("give rid, a non-empty string, or abort_all, true", "rid")
        begin = "" if asked.abort_all else asked.rid or ""
        may_all = self.auth.is_admin(http)
        if asked.abort_all and not may_all:
            raise self.auth.forbidden("abort_all")
        for exchange in self.exchanges:
            named = exchange.job.rids
            if not may_all and begin not in (*named, named[0].removesuffix("-0")):
                continue
            exchange.aborted |= {i for i, own in enumerate(named) if own.startswith(begin)}
            self._end_aborted(exchange)
        return web.Response()

    async def tokenize(self, http: web.Request) -> web.Response:
        """Text to token ids."""
        front, asked = self._open(), await self._body(http, fields.Tokenize)
        self._check_model(asked.model)
        if (asked.messages is None) == (asked.prompt is None):
            raise RequestError("exactly one of prompt and messages must be given", "prompt")
        messages = parse.messages_of(asked.messages or ())
        batched = isinstance(asked.prompt, list)
        texts: Any = asked.prompt if batched else [messages or asked.prompt]
        context, tokenizer = front.facts.limits.context_length, front.tokenizer
        plain = partial(tokenizer.encode, add_special_tokens=asked.add_special_tokens is not False)
        encode: Any = tokenizer.encode_chat if messages else plain

        def work() -> dict[str, Any]:
            """Tokenize; runs in a thread."""
            for text in texts:
                parse.check_size(text, context)
            rows, first = [encode(text) for text in texts], slice(None) if batched else 0
            return {"tokens": rows[first], "count": [len(row) for row in rows][first], "max_model_len": context}

        return await self._worked_out(work)

    async def count_tokens(self, http: web.Request) -> web.Response:
        """How many tokens the prompt of a message has."""
        front = self._open()
        job = await self.bodies.read(http, lambda body: parse_message(body, front.defaults, counted=True))
        self._check_model(job.model)
        return await self._worked_out(lambda: {"input_tokens": len(_tokenized(job, front, self._served)[0].prompt_ids)})

    async def detokenize(self, http: web.Request) -> web.Response:
        """Token ids to text."""
        front, asked = self._open(), await self._body(http, fields.Detokenize)
        self._check_model(asked.model)
        tokens: Any = asked.tokens
        batched = bool(tokens) and isinstance(tokens[0], list)
        rows, skip = tokens if batched else [tokens], asked.skip_special_tokens is not False
        size = front.facts.limits.vocab_size

        def work() -> dict[str, Any]:
            for wrong in (token for row in rows for token in row if not 0 <= token < size):
                raise RequestError(f"tokens must be ids in [0, {size - 1}], got {wrong}", "tokens")
            texts = [front.tokenizer.decode(row, skip_special_tokens=skip) for row in rows]
            return {"text": texts if batched else texts[0]}

        return await self._worked_out(work)

    # ---- shared by the endpoints -------------------------------------------------------------------------------------

    async def _body(self, http: web.Request, kind: type[fields.Model]) -> fields.Model:
        return await self.bodies.read(http, partial(fields.read, kind))

    async def _ask(self, question: str, *given: Any) -> list[Any]:
        """Return each engine's answer to one of `info.QUESTIONS`; RequestError if they end before they answer."""
        asking = asyncio.ensure_future(self.engine.each(question, *given))
        try:
            await asyncio.wait((asking, self.over), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise self.over.result()
            return asking.result()
        finally:
            asking.cancel()

    async def _worked_out(self, work: Callable[[], dict[str, Any]]) -> web.Response:
        """Run `work` in a tokenizing thread and answer with its result; this counts as one prompt in the queue."""
        with self._counted(1):
            body = await asyncio.get_running_loop().run_in_executor(self.tokenizing, lambda: parse.dump(work()))
        return web.Response(body=body, content_type="application/json")

    def _progress(self) -> str:
        """Return how far the start is, or what has failed."""
        return one_line(self.engine.error) if self.engine.state == "failed" else self.engine.progress

    def _ready(self) -> Front:
        """Return what is known of the model; RequestError 503 while loading or stopping, or after a failure."""
        if self.stopping:
            raise shutting_down()
        if self.engine.state == "failed" or self.engine.front is None:
            raise RequestError(f"the server is not ready ({self.engine.state}): {self._progress()}", None, 503,
                               "not_ready")  # fmt: skip
        return self.engine.front

    def _open(self) -> Front:
        """Return what `_ready` returns, for new work; raises RequestError 503 also from the first signal on."""
        if self.draining:
            raise shutting_down()
        return self._ready()

    @cached_property
    def _served(self) -> Served:
        """What answers say about the server; this is known once the server is ready."""
        config, front = self.config, self._ready()
        facts, tokenizer = front.facts, front.tokenizer
        shown = calls_of(tokenizer.chat.tool_template or "")
        formats = Formats(CALLS.get(config.tool_call_parser or "", shown), THOUGHTS.get(config.reasoning_parser or ""))
        return Served(config.served_name, tokenizer, fingerprint(config, facts.numbers), facts.nodes,
                      config.stream_interval, config.enable_cache_report, formats, config.seed)  # fmt: skip

    def _check_model(self, name: str | None, strict: bool = False) -> None:
        """If `strict`, or with --strict-model-name, raise RequestError 404 where a request names another model."""
        if (strict or self.config.strict_model_name) and name not in (None, "", "default", *self._names):
            raise RequestError(f"the model {short(name)} does not exist here; there is {self._names[0]!r}", "model",
                               404, "model_not_found")  # fmt: skip

    def _card(self) -> dict[str, Any]:
        name, context = self.config.served_name, self._ready().facts.limits.context_length
        return {"id": name, "object": "model", "created": self.created, "owned_by": "minispec", "root": name,
                "parent": None, "max_model_len": context}  # fmt: skip

    @web.middleware
    async def _counted_answer(self, http: web.Request, handler: Any) -> web.StreamResponse:
        """Count requests and answers by route; the answer to a client that hung up counts as 499."""
        resource, status = http.match_info.route.resource, 499
        try:
            response = await handler(http)
            status = response.status
            return response
        finally:
            self.seen.answer(resource.canonical if resource is not None else "unknown", http.method, status)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def shutting_down() -> RequestError:
    """Return what new work is answered, and what is left in the end."""
    return RequestError("the server is shutting down", None, 503, "shutting_down")


def _prepare(job: parse.Job, front: Front, served: Served) -> Reply:
    """Tokenize and check a job's requests, and return the `Reply` that will answer it; slow; safe on any thread."""
    requests = _tokenized(job, front, served)
    with parse.in_clients_words(job.names):
        for request in requests:
            front.validate(request)
            front.corpora.check(request.params)
    return REPLIES.get(job.dialect, Reply)(job, requests, served)


def _tokenized(job: parse.Job, front: Front, served: Served) -> list[Request]:
    """Return a job's requests; errors name the client's fields."""
    limits = front.facts.limits
    with parse.in_clients_words(job.names):
        requests = parse.tokenize(job, front.tokenizer, limits.context_length, limits.longest_prompt, served.formats)
    for i, request in enumerate(requests):
        if request.params.sampling_seed is None:
            seed = choice_seed(served.seed, i % job.n)
            request.params = dataclasses.replace(request.params, sampling_seed=seed)
    return requests


# ---- the command -----------------------------------------------------------------------------------------------------


async def serve(config: Config) -> int:
    """Serve until a signal comes, let running requests finish, and end the process.

    The exit code is 0, or 1 if the engine was lost. Without a signal the process ends only if `Server.must_end` is set,
    and the code is 1. This function returns only if the server cannot listen on its address or cannot use its
    certificate; the value is 1.
    """
    try:
        server = Server(config, build_sealed_llm)
    except ValueError as error:  # the certificate or its key cannot be used
        return _failed(error)
    loop, first, second = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    for which in (signal.SIGINT, signal.SIGTERM):  # the first asks for an end, the second for an end at once
        loop.add_signal_handler(which, lambda: (second if first.is_set() else first).set())
    server.watchdog = Watchdog(config.watchdog_timeout, lambda: loop.call_soon_threadsafe(server.hung))
    try:
        await server.start()
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror or str(error)
        return _failed(f"cannot listen on {config.host}:{config.port}: {reason}")
    waits = [asyncio.ensure_future(event.wait()) for event in (first, server.must_end)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if first.is_set():
        await server.drain(second)
        code, left = int(server.must_end.is_set()), len(server.exchanges)  # 1: the engine was lost meanwhile
    else:
        code = _failed(one_line(server.engine.error))
    await server.stop()
    if first.is_set():
        ended = "1 request was" if left == 1 else f"{left} requests were"
        logger.info("shut down: %s", f"{ended} ended with an error" if left else "no request was cut off")
    # Threads that compile or tokenize a long prompt cannot be interrupted. An ordinary exit would wait for them, so the
    # process ends by `os._exit`, and what an ordinary exit would do is done here.
    remove_caches()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _failed(why: object) -> int:
    """Print why there is no server, and return the exit code 1."""
    print(f"minispec: error: {why}", file=sys.stderr)
    return 1


def main(argv: Sequence[str] | None = None) -> None:
    """Run the server from the command line; exits with 0 after Ctrl-C or SIGTERM, with another code on failure."""
    config = config_from_args(argv)
    logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S",
                        level=config.log_level.upper())  # fmt: skip
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # its errors quote raw requests, perhaps with keys
    for note in config.notes:
        logger.warning("%s", note)
    code_folder()
    code = 0
    try:
        rank = 0 if config.tp_size == 1 else config.first_rank()
    except ValueError as error:
        sys.exit(f"minispec: error: {error}")
    if rank == 0:
        code = asyncio.run(serve(config))
    else:
        from minispec.load.rank import be_rank  # here, since the server listens before torch is imported

        be_rank(config)  # follows rank 0 until that ends
    sys.exit(code)


if __name__ == "__main__":
    main()
