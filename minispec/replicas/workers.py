"""Replicas behind one door: who gets a request, and what becomes of it when its replica dies.

The server is the door. It tokenizes and checks requests and draws their seeds. It keeps a `Request` object for each
request and adds the tokens of every update to it, so the rest of the server knows nothing of replicas.

A text depends on its prompt and seed alone, not on where it is computed. So when a replica dies, its requests go
elsewhere as they stand, with the tokens that were delivered, as if they had just been retracted. Clients see a pause.

A request may be what kills a replica. So each request counts the deaths that it may have caused: when a replica dies,
its requests with the highest count get one more. A request with two deaths shares no replica with another such one, so
the next death shows which of them it was. At its third death a request ends with an error.

Read next: `replica.py`, the other end; `routing.py` for who gets a request; docs/scaling.md.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from minispec.config import Config
from minispec.corpora import Corpus
from minispec.replicas.cluster import Cluster
from minispec.replicas.routing import Routing
from minispec.replicas.wire import Values, packed, taken
from minispec.request import ABORTED, Finish, Request, RequestError, Update, one_line
from minispec.serve.front import Facts, Front, front_for

logger = logging.getLogger("minispec")

LIVES = 3  # deaths of its replica that end a request
STARTS = 3  # of a replica that dies while it loads, before the server gives up
PAUSE = 0.1  # seconds between two looks at a replica that is not ready
GLANCE = 5.0  # and at one that is
ANSWER = 2.0  # seconds a replica has to tell of itself
LOST = Finish("abort", message=f"the replica has died under this request {LIVES} times", status=500,
              code="replica_lost")  # fmt: skip


class Place:
    """A replica as the door knows it."""

    def __init__(self, number: int, actor: Any) -> None:
        self.number, self.actor = number, actor
        self.state = "starting"  # then ready; draining before it is started anew
        self.known: Values = {}  # what it has told of itself
        self.requests: dict[str, Request] = {}  # that it has, by rid
        self.incarnation = self.last = ""  # the process that the door listens to, and the one before
        self.starts = 0  # since it was last ready
        self.planned = False  # whether its end was asked for, and so is nobody's fault


class Replicas:
    """What `worker.EngineThread` is to a server, for several engines elsewhere.

    Everything runs on the event loop, except `_enter` and `join`.
    """

    def __init__(self, config: Config, deliver: Callable[[list[Update]], None], died: Callable[[], None]) -> None:
        self.config, self.deliver, self.died = config, deliver, died
        self.error: BaseException | None = None
        self.lost, self.loaded = True, threading.Event()  # a failure here is always the end
        self.front: Front | None = None
        self.routing: Routing  # known with the front
        self.places: list[Place] = []
        self.waiting: list[Request] = []
        self.deaths: Counter[Request] = Counter()
        self.unwanted: set[Request] = set()  # aborted, and the replica has not said so yet
        self.setting: tuple[Any, ...] = ()  # what `reconfigure` was last told, for replicas that start later
        self.corpora: dict[str, Corpus] = {}  # for replicas that start later too
        self._loop = asyncio.get_running_loop()
        self._opening = asyncio.Lock()
        self._seeds = random.Random(config.random_seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._cluster: Cluster | None = None
        self._entering, self._stopped = threading.Lock(), False

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to start the replicas."""
        self._tasks.add(asyncio.ensure_future(self._run()))

    async def _run(self) -> None:
        try:
            await asyncio.to_thread(self._enter)
            self.places = [Place(number, self._entered.actor()) for number in range(self.config.dp_size)]
            self._tasks |= {asyncio.ensure_future(self._keep(place)) for place in self.places}
            await asyncio.to_thread(import_module, "minispec.load.build")  # which the front needs, while replicas load
        except Exception as error:
            self._fail(error)

    def _enter(self) -> None:
        with self._entering:
            if not self._stopped:
                self._cluster = Cluster(self.config)

    @property
    def _entered(self) -> Cluster:
        assert self._cluster is not None, "the cluster was left"
        return self._cluster

    def stop(self) -> None:
        """Stop listening to all replicas; `join` ends them."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()

    def join(self, timeout: float) -> None:
        """End the replicas, and leave the cluster; not on the event loop, as it takes a second or two."""
        with self._entering:
            if self._cluster is not None:
                self._cluster.leave()
                self._cluster = None

    def _fail(self, error: Exception) -> None:
        """End the server, since there will be no replica."""
        logger.debug("the replicas have failed", exc_info=error)
        if self.error is None:
            self.error = error
            self.died()

    @property
    def state(self) -> str:
        """Starting until a replica was ready; then ready while one is, else recovering; failed in the end."""
        if self.error is not None:
            return "failed"
        if any(place.state == "ready" for place in self.places):
            return "ready"
        return "starting" if self.front is None else "recovering"

    @property
    def progress(self) -> str:
        """How far the replicas are."""
        told = [f"replica {place.number}: {place.known.get('progress', 'being placed')}" for place in self.places
                if place.state == "starting"]  # fmt: skip
        return "; ".join(told) or ("being drained" if self.places else "starting Ray")

    @property
    def graphs(self) -> str:
        """What /health says of compiled graphs: what the replicas said last."""
        return ", ".join(sorted({place.known["graphs"] for place in self.places if place.state != "starting"}))

    # ---- a replica's life ----------------------------------------------------------------------------------------

    async def _keep(self, place: Place) -> None:
        """Follow a replica from one incarnation to the next."""
        ray_error = self._entered.error
        while True:
            glance = None
            try:
                await self._begin(place)
                glance = asyncio.ensure_future(self._glance(place))
                updates = place.actor.updates.options(num_returns="streaming")
                async for batch in updates.remote(place.incarnation):
                    self._take(place, *await batch)
            except ray_error as error:
                logger.debug("replica %d", place.number, exc_info=error)
            except Exception as error:
                return self._fail(error)
            finally:
                if glance is not None:
                    glance.cancel()
            self._gone(place)

    async def _begin(self, place: Place) -> None:
        """Wait until a replica is ready, and let it have requests."""
        cluster = self._entered
        while place.known.get("state") != "ready" or not place.incarnation:
            await asyncio.sleep(PAUSE)
            try:
                told = await place.actor.begin.remote()
            except cluster.ray.exceptions.ActorUnavailableError:
                continue  # Ray is about to start it
            except cluster.ray.exceptions.ActorDiedError as error:  # and Ray will not start it again
                told = {"incarnation": "", "state": "failed", "progress": " ".join(str(error).split())[:300]}
                place.actor = cluster.actor()
            if told["incarnation"] == place.last != "":  # it lives, but its stream has broken, so it has to end
                cluster.ray.kill(place.actor, no_restart=False)
                continue
            place.starts += told["incarnation"] != place.incarnation
            place.incarnation, place.known = told["incarnation"], told
            if told["state"] == "failed" or place.starts > STARTS:
                await self._stumbled(place)
        await self._open(place)

    async def _stumbled(self, place: Place) -> None:
        """Start a replica again that could not load, after a while; RuntimeError where none ever could."""
        loads = place.known["state"] == "failed"
        line = place.known["progress"] if loads else f"replica {place.number} dies while it loads"
        if self.front is None:
            raise RuntimeError(line)
        logger.error("replica %d: %s; it is started again", place.number, line)
        await asyncio.sleep(GLANCE)
        if place.incarnation:
            self._entered.ray.kill(place.actor, no_restart=False)
            place.last, place.incarnation, place.starts = place.incarnation, "", 0

    async def _open(self, place: Place) -> None:
        """Send requests to a replica that is ready, from now on."""
        async with self._opening:
            if self.front is None:
                facts: Facts = place.known["facts"]
                front = await asyncio.to_thread(front_for, facts, self.config, self)
                self.front, self.routing = front, Routing(facts.page_size, facts.pages)
                logger.info("The server is fired up and ready to roll!")
        if self.setting:
            await place.actor.ask.remote("reconfigure", *self.setting)
        given: dict[str, Corpus] = {}
        while given != self.corpora:  # others may come meanwhile
            before, given = given, dict(self.corpora)
            for name in given.keys() | before.keys():
                await self._hand(place, name, given.get(name))
        place.state, place.starts = "ready", 0
        logger.info("replica %d is ready: process %d on %s", place.number, place.known["pid"], place.known["host"])
        self._send()

    async def _glance(self, place: Place) -> None:
        """Ask a replica now and then how it is, for /health."""
        with suppress(self._entered.error):
            while True:
                await asyncio.sleep(GLANCE)
                place.known |= {"graphs": (await place.actor.begin.remote())["graphs"]}

    def _gone(self, place: Place) -> None:
        """Take back the requests of a replica that has died, and send them elsewhere."""
        lost, place.requests = list(place.requests.values()), {}
        was, place.state = place.state, "starting"
        place.last, place.incarnation = place.incarnation, ""
        if self.front is None:
            return
        self.routing.forget(place.number)
        if lost and not place.planned:
            most = max(self.deaths[request] for request in lost)
            self.deaths.update([request for request in lost if self.deaths[request] == most])
        if was != "starting":
            logger.warning("replica %d (process %d) has %s; %d requests go on elsewhere", place.number,
                           place.known["pid"], "ended" if place.planned else "died", len(lost))  # fmt: skip
        place.planned = False
        ended = [request for request in lost if request in self.unwanted or self.deaths[request] >= LIVES]
        again = [request for request in lost if request not in ended]
        for request in again:
            request.retractions += bool(request.output_ids)  # what it has is computed once more, and counted once
        self.waiting = again + self.waiting
        self._end([(request, ABORTED if request in self.unwanted else LOST) for request in ended])
        self._send()

    async def restart(self, number: int) -> None:
        """Let a replica finish what it has, end it, and wait until it is ready again; RequestError 404 or 503.

        What is not finished within --shutdown-timeout goes on elsewhere.
        """
        if not 0 <= number < len(self.places):
            raise RequestError(f"there is no replica {number}; there are {len(self.places)}, from 0 on", None, 404)
        place = self.places[number]
        if place.state != "ready":
            raise RequestError(f"replica {number} is {place.state}", None, 503, "not_ready")
        place.state = "draining"
        restarting = asyncio.ensure_future(self._restart(place))
        self._tasks.add(restarting)
        restarting.add_done_callback(self._tasks.discard)
        await asyncio.shield(restarting)  # whoever asked may hang up

    async def _restart(self, place: Place) -> None:
        """Drain a replica, end it, and wait for its next incarnation."""
        old, end = place.incarnation, time.monotonic() + self.config.shutdown_timeout
        while place.requests and place.state == "draining" and time.monotonic() < end:
            await asyncio.sleep(PAUSE)
        if place.incarnation == old and place.state == "draining":
            place.planned = True
            self._entered.ray.kill(place.actor, no_restart=False)
        while place.incarnation == old or place.state != "ready":
            await asyncio.sleep(PAUSE)

    # ---- requests ------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Give requests that were checked their seeds, and send them to replicas."""
        for request in requests:
            seed = request.params.sampling_seed
            request.seed = self._seeds.getrandbits(62) if seed is None else seed
        self.waiting += requests
        self._send()

    def abort(self, requests: Sequence[Request]) -> None:
        """End those of the requests that have not finished."""
        here = [request for request in requests if request in self.waiting]
        self.waiting = [request for request in self.waiting if request not in here]
        self._end([(request, ABORTED) for request in here])
        for place in self.places:
            if there := [request for request in requests if request.rid in place.requests]:
                self.unwanted.update(there)
                place.actor.abort.remote([request.rid for request in there])

    def _end(self, ends: Sequence[tuple[Request, Finish]]) -> None:
        """End requests that no replica has."""
        for request, finish in ends:
            request.finish, request.finished_at = finish, time.monotonic()
            self._forget(request)
        if ends:
            self.deliver([Update(request, [], "", finish) for request, finish in ends])

    def _forget(self, request: Request) -> None:
        self.deaths.pop(request, None)
        self.unwanted.discard(request)

    def _send(self) -> None:
        """Send the requests that wait to replicas, those that can go."""
        batches: dict[Place, list[Request]] = {}
        for request in list(self.waiting):
            place = self._choose(request)
            if place is not None:
                self.waiting.remove(request)
                place.requests[request.rid] = request
                batches.setdefault(place, []).append(request)
        for place, batch in batches.items():
            taking = place.actor.submit.remote(place.incarnation, packed(batch))
            sending = asyncio.ensure_future(self._sent(place, batch, taking))
            self._tasks.add(sending)
            sending.add_done_callback(self._tasks.discard)

    async def _sent(self, place: Place, batch: Sequence[Request], taking: Any) -> None:
        """See that a replica takes requests; of one that has died the stream tells."""
        try:
            await taking
        except self._entered.ray.exceptions.RayTaskError as error:
            logger.error("replica %d cannot take requests: %s", place.number, str(error).strip().splitlines()[-1])
            refused = [request for request in batch if place.requests.pop(request.rid, None) is not None]
            finish = Finish("abort", message="a replica could not take the request", status=500)
            self._end([(request, finish) for request in refused])
        except self._entered.error:
            pass

    def _choose(self, request: Request) -> Place | None:
        """Return who gets a request; None if it has to wait."""
        ready = [place for place in self.places if place.state == "ready"]
        if self._suspect(request):
            ready = [place for place in ready if not any(map(self._suspect, place.requests.values()))]
        if not ready:
            return None
        prefixes = self._prefixes(request.prompt_ids, request)
        place = next((place for place in ready if request.leader and request.leader.rid in place.requests), None)
        if place is None:
            place = self.places[self.routing.choose(prefixes, {place.number: len(place.requests) for place in ready})]
        self.routing.sent(place.number, prefixes)
        return place

    def _suspect(self, request: Request) -> bool:
        return self.deaths[request] == LIVES - 1

    def _prefixes(self, ids: Sequence[int], request: Request) -> list[int]:
        return [] if self.config.disable_radix_cache else self.routing.prefixes(ids, request.salt)

    def _take(self, place: Place, incarnation: str, batch: Sequence[Values]) -> None:
        """Take in what a replica's steps have added."""
        if incarnation != place.incarnation:
            return  # of a process that is gone; its requests are elsewhere
        updates = []
        for values in batch:
            request = place.requests.get(values["rid"])
            if request is None:
                continue
            updates.append(taken(request, values))
            if request.finish is not None:
                del place.requests[request.rid]
                self._forget(request)
                self.routing.sent(place.number, self._prefixes(request.ids, request))
        self.deliver(updates)
        if self.waiting:
            self._send()

    # ---- external corpora ----------------------------------------------------------------------------------------

    def put(self, name: str, corpus: Corpus | None) -> None:
        """Add a corpus to all replicas, those that start later too, or remove it; not on the event loop."""
        asyncio.run_coroutine_threadsafe(self._spread(name, corpus), self._loop).result()

    async def _spread(self, name: str, corpus: Corpus | None) -> None:
        others = {key: one for key, one in self.corpora.items() if key != name}
        self.corpora = others if corpus is None else {**others, name: corpus}
        there = [place for place in self.places if place.state != "starting"]
        handed = (self._hand(place, name, corpus) for place in there)
        for place, error in zip(there, await asyncio.gather(*handed, return_exceptions=True), strict=True):
            if error is not None:  # one that has died gets it when it starts again
                logger.warning("replica %d does not have corpus %s: %s", place.number, name, one_line(error))

    async def _hand(self, place: Place, name: str, corpus: Corpus | None) -> None:
        await place.actor.put.remote(name, None if corpus is None else (corpus.tokens, corpus.places))

    # ---- questions -----------------------------------------------------------------------------------------------

    async def each(self, question: str, *given: Any) -> list[Any]:
        """Return every replica's answer to one of `info.QUESTIONS`; None where there is none in time."""
        if question == "reconfigure":
            self.setting = given
        if question == "flush" and self.waiting:
            return [False]
        found = await asyncio.gather(*(self._ask(place, question, given) for place in self.places))
        if question == "flush" and all(found):
            for place in self.places:
                self.routing.forget(place.number)
        return found

    async def _ask(self, place: Place, question: str, given: Sequence[Any]) -> Any:
        """Return a replica's answer; what changes it may take as long as its step takes."""
        changes = question in ("flush", "reconfigure")
        if place.state == "starting":
            return changes  # it will start with an empty cache, and with `setting`
        try:
            async with asyncio.timeout(None if changes else ANSWER):
                return await place.actor.ask.remote(question, *given)
        except (TimeoutError, self._entered.error):
            return changes or None

    def listed(self, answers: Sequence[Any]) -> list[dict[str, Any]]:
        """Return what /server_info says of each replica, with what it has answered."""
        return [
            {"dp_rank": place.number, "pid": place.known.get("pid"), "node": place.known.get("host"),
             "state": place.state if answer or place.state == "starting" else f"no answer in {ANSWER:g} s",
             "requests": len(place.requests)}
            for place, answer in zip(self.places, answers, strict=True)
        ]  # fmt: skip
