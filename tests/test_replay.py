"""What becomes of requests whose replica dies, at every token, without Ray: replicas are objects of this process.

`Local` stands for the cluster: it makes actors whose calls are coroutines of this event loop, around the real `Replica`
with its engine thread, and kills one by answering nothing from it any more. So a death can come behind any update, and
what goes wrong on purpose shows. test_replicas.py has processes and sockets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_server import options

import minispec.replicas.workers as replicas_module
from minispec.acceptance import Verified
from minispec.config import Config
from minispec.llm import LLM
from minispec.replicas.replica import Replica, given_flags
from minispec.replicas.routing import Routing
from minispec.replicas.workers import Place, Replicas
from minispec.request import Grammar, Logprobs, Request, RequestError, SamplingParams
from minispec.scheduler import Scheduler
from minispec.serve.worker import EngineThread, build_llm

ONCE = [4027, 1980]  # " Once upon", after which the scripted text follows


class Error(Exception):
    """What Ray's errors have in common."""


class Unavailable(Error):
    """What Ray raises for an actor that has died."""


class Died(Error):
    """What Ray raises for one that will not come back, and for a call that raised."""


def crossed(value: Any) -> Any:
    """Return a value as another process gets it."""
    return pickle.loads(pickle.dumps(value))


class Actor:
    """A replica in this process, as Ray hands out actors."""

    def __init__(self, make: Callable[[], Replica]) -> None:
        self._make, self._replica, self._dead = make, make(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        call = lambda *given: asyncio.ensure_future(self._call(name, *given))  # noqa: E731
        return SimpleNamespace(remote=call, options=lambda **how: SimpleNamespace(remote=self._stream))

    async def _call(self, name: str, *given: Any) -> Any:
        return await getattr(self._replica, name)(*crossed(given))

    async def _stream(self, incarnation: str) -> Any:
        dead, updates = self._dead, self._replica.updates(incarnation)
        while True:
            batch, death = asyncio.ensure_future(anext(updates)), asyncio.ensure_future(dead.wait())
            await asyncio.wait([batch, death], return_when=asyncio.FIRST_COMPLETED)
            if dead.is_set():
                batch.cancel()
                raise Unavailable
            death.cancel()
            future = asyncio.get_running_loop().create_future()
            future.set_result(crossed(batch.result()))
            yield future

    def kill(self) -> None:
        """Start again, knowing nothing."""
        if self._replica.engine is not None:
            self._replica.engine.stop()
        self._dead.set()
        self._replica, self._dead = self._make(), asyncio.Event()


def in_turn(step: Callable[[Scheduler], Any]) -> Callable[[Scheduler], Any]:
    """Let an engine's step wait until the door has taken what the one before gave, or a death may come too late."""

    async def turns() -> None:
        for _ in range(20):  # an update takes a few turns of the event loop to get there
            await asyncio.sleep(0)

    def stepped(scheduler: Scheduler) -> Any:
        with suppress(Exception):  # at the end the loop is gone
            if isinstance(threading.current_thread(), EngineThread):
                asyncio.run_coroutine_threadsafe(turns(), Door.loop).result(5)
        return step(scheduler)

    return stepped


class Local:
    """What stands for `cluster.Cluster`."""

    error = Error
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(ActorUnavailableError=Unavailable, ActorDiedError=Died, RayTaskError=Died),
        kill=lambda actor, no_restart: actor.kill(),
    )

    def __init__(self, config: Config) -> None:
        self.config = config

    def actor(self) -> Actor:
        """Return a new replica."""
        return Actor(lambda: Replica(given_flags(self.config), 1))

    def leave(self) -> None:
        """Nothing to leave."""


@pytest.fixture(scope="module", autouse=True)
def unsealed() -> Iterator[None]:
    """Replicas here share a process with all other tests, in which compiling must stay allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minispec.replicas.replica.build_sealed_llm", build_llm)
        yield


@pytest.fixture(scope="module")
def config(tiny: Path) -> Iterator[Config]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(replicas_module, "Cluster", Local)
        patch.setattr(replicas_module, "PAUSE", 0.005)
        patch.setattr(Scheduler, "step", in_turn(Scheduler.step))
        yield Config(**options(tiny, skip_server_warmup=True, dp_size=2, max_running_requests=8))


@pytest.fixture(scope="module")
def plain(config: Config) -> Config:
    """The same without drafts, which starts sooner."""
    return dataclasses.replace(config, speculative_algorithm="NONE")


@pytest.fixture(scope="module")
def llm(plain: Config) -> LLM:
    return LLM(config=Config(**given_flags(plain)))


def wishes() -> dict[str, Request]:
    """Return a request of each kind of state that has to be rebuilt."""
    given = {
        "held back": {"stop": (" there was 中 文 语",)}, "held back in vain": {"stop": (" time 😀 there was good",)},
        "split character": {}, "sampled": {"temperature": 1.0, "sampling_seed": 3},
        "no seed": {"temperature": 1.0},
        "penalties": {"temperature": 0.8, "sampling_seed": 4, "frequency_penalty": 1.0, "repetition_penalty": 1.3,
                      "min_new_tokens": 20, "stop_token_ids": tuple(range(10, 20000))},
        "grammar": {"grammar": Grammar("regex", "([a-z]{2,5}, ){4}[0-9]{3}")},
        "logprobs": {"logprobs": Logprobs(top=2, start=0), "temperature": 0.5, "sampling_seed": 5},
    }  # fmt: skip
    made: dict[str, Request] = {}
    for name, params in given.items():
        wish = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True, **params})
        made[name] = Request(name + "/1", ONCE * 12, wish)
    leader = Request("leader/1", [*ONCE * 12, 5], SamplingParams(temperature=1.0, max_new_tokens=16, sampling_seed=6))
    made["leader"] = leader
    made["choice"] = Request(
        "choice/1",
        leader.prompt_ids,
        SamplingParams(temperature=1.0, max_new_tokens=16, sampling_seed=7),
        leader=leader,
    )
    return made


class Door:
    """Replicas in an event loop, and what they have delivered."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, config: Config) -> None:
        Door.loop = asyncio.get_running_loop()
        self.texts: dict[Request, str] = {}
        self.ends: dict[Request, Any] = {}
        self.news = asyncio.Event()
        self.replicas = Replicas(config, self.deliver, lambda: None)
        self.after: Callable[[], None] = lambda: None

    def deliver(self, updates: Sequence[Any]) -> None:
        for update in updates:
            assert update.request not in self.ends, "something came behind the end"
            self.texts[update.request] = self.texts.get(update.request, "") + update.text
            if update.finish is not None:
                self.ends[update.request] = update.finish
        self.news.set()
        self.after()

    def kill(self, place: Place) -> None:
        place.actor.kill()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    async def start(self) -> None:
        self.replicas.start()
        await self.until(lambda: [p.state for p in self.replicas.places] == ["ready"] * 2 or self.replicas.error)
        assert self.replicas.error is None, self.replicas.error

    async def serve(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.replicas.front.validate(request)
        self.replicas.submit(requests)
        await self.until(lambda: set(requests) <= set(self.ends))

    def stop(self) -> None:
        self.replicas.stop()
        for place in self.replicas.places:
            place.actor.kill()


def outcome(request: Request, text: str) -> tuple[Any, ...]:
    """Return what must not depend on where a request was computed."""
    scores = [round(scored.logprob, 3) for scored in (*request.prompt_scores, *request.output_scores)]
    return text, request.output_ids, request.finish.kind, request.finish.matched, scores


KNOWN: dict[tuple[str, int], Any] = {}


def truth_of(llm: LLM, requests: dict[str, Request]) -> dict[str, Any]:
    """Return the outcomes that requests with these seeds have alone."""
    for name, request in requests.items():
        if (name, request.seed if name == "no seed" else 0) not in KNOWN:
            params = {**vars(request.params), "sampling_seed": request.seed}
            alone = Request(name, request.prompt_ids, SamplingParams(**params))
            KNOWN[name, request.seed if name == "no seed" else 0] = outcome(alone, llm.serve([alone])[alone])
    return {name: KNOWN[name, request.seed if name == "no seed" else 0] for name, request in requests.items()}


async def killed_at(door: Door, *tokens: int) -> tuple[dict[str, Request], dict[str, Any], int]:
    """Serve all kinds, with a death of a replica as soon as one of its requests has so many tokens.

    Returns requests, outcomes, and how many went elsewhere.
    """
    requests, deaths = wishes(), []

    def after() -> None:
        for place in door.replicas.places:
            most = max((len(r.output_ids) for r in place.requests.values()), default=0)
            if len(deaths) < len(tokens) and most >= tokens[len(deaths)] and place.state == "ready":
                deaths.append(len(place.requests))
                door.kill(place)

    await door.until(lambda: [p.state for p in door.replicas.places] == ["ready"] * 2)
    door.after = after
    await door.serve(list(requests.values()))
    assert len(deaths) == len(tokens) and not any(place.requests for place in door.replicas.places)
    assert not door.replicas.deaths and not door.replicas.unwanted
    return requests, {name: outcome(request, door.texts[request]) for name, request in requests.items()}, sum(deaths)


def played(config: Config, play: Callable[[Door], Any]) -> Any:
    """Return what comes of something that is done at a door."""

    async def all_of_it() -> Any:
        door = Door(config)
        await door.start()
        try:
            return await play(door)
        finally:
            door.stop()

    return asyncio.run(all_of_it())


def test_corpora_reach_all_replicas_and_those_that_start_later(config: Config, tmp_path: Path) -> None:
    (texts := tmp_path / "texts.jsonl").write_text('"Once upon a time there was a fox in the wood."\n')
    named = dataclasses.replace(config, speculative_algorithm="NGRAM", speculative_draft_model_path=None,
                                speculative_ngram_external_corpus_path=str(texts))  # fmt: skip

    def held(door: Door) -> list[set[str]]:
        return [set(place.actor._replica.engine.llm.corpora.table._all) for place in door.replicas.places]

    async def play(door: Door) -> None:
        library = door.replicas.front.corpora
        assert held(door) == [{"external"}] * 2 and library.counts["external"] > 5
        await asyncio.to_thread(library.add, "mine", ["There was a hen, too."], None)
        assert held(door) == [{"external", "mine"}] * 2
        tables = [place.actor._replica.engine.llm.corpora.table._all for place in door.replicas.places]
        assert np.array_equal(tables[0]["mine"].places, door.replicas.corpora["mine"].places)
        door.kill(door.replicas.places[0])
        await door.until(lambda: door.replicas.places[0].state == "starting")
        await asyncio.to_thread(library.remove, "external")
        await asyncio.to_thread(library.add, "late", ["And an owl."], None)
        await door.until(lambda: door.replicas.places[0].state == "ready")
        assert held(door) == [{"mine", "late"}] * 2 and set(library.counts) == {"mine", "late"}
        named = Request("named", [5, 6, 7], SamplingParams(max_new_tokens=4, ngram_corpus_id="external"))
        await door.serve([named])  # the door checks names; what is removed meanwhile ends nobody
        assert named.finish.kind == "length"
        with pytest.raises(RequestError, match="ngram_corpus_id must be the id of a corpus .late, mine."):
            library.check(named.params)

    played(named, play)


@pytest.mark.slow
def test_a_death_behind_any_token_changes_nothing(config: Config, llm: LLM) -> None:
    async def play(door: Door) -> list[Any]:
        return [await killed_at(door, *tokens) for tokens in ((1,), (4,), (5, 10), (12,))]

    for requests, found, moved in played(config, play):
        truth = truth_of(llm, requests)
        assert moved > 3 and found == truth


def twice(copy: Request, request: Request) -> None:
    """Text that was delivered is sent once more."""
    copy.released = 0


def forgetful(copy: Request, request: Request) -> None:
    """A seed that the door has drawn does not cross."""
    copy.params = request.params


def from_the_start(copy: Request, request: Request) -> None:
    """Delivered tokens do not cross."""
    copy.output_ids, copy.output_scores = [], []


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [twice, forgetful, from_the_start], ids=lambda m: m.__name__)
def test_what_is_not_rebuilt_shows(plain: Config, llm: LLM, monkeypatch: pytest.MonkeyPatch, mutation: Any) -> None:
    original = replicas_module.packed

    def packed(requests: Sequence[Request]) -> list[Request]:
        copies = original(requests)
        for copy, request in zip(copies, requests, strict=True):
            mutation(copy, request)
        return copies

    monkeypatch.setattr(replicas_module, "packed", packed)
    requests, found, _ = played(plain, lambda door: killed_at(door, 5))
    truth = truth_of(llm, requests)
    assert any(found[name] != truth[name] for name in requests)


def test_a_replica_that_becomes_ready_while_it_is_asked_does_not_say_so_without_its_facts(plain: Config) -> None:
    class Loading:
        """An engine that is ready from the second look on."""

        error, progress, graphs, states = None, "loading", "eager", iter(["starting", "ready", "ready"])
        state = property(lambda self: next(self.states))

    async def told() -> dict[str, Any]:
        replica = Replica(given_flags(plain), 1)
        replica.engine = Loading()
        return await replica.begin()

    known = asyncio.run(told())
    assert known["state"] == "starting" and known["facts"] is None


def test_updates_of_an_older_incarnation_are_dropped(plain: Config) -> None:
    async def play(door: Door) -> None:
        request = Request("r/1", ONCE, SamplingParams(max_new_tokens=4, temperature=0.0))
        await door.serve([request])
        late = Request("late/1", ONCE, SamplingParams(max_new_tokens=4, temperature=0.0))
        place = door.replicas.places[0]
        place.requests[late.rid] = late
        update = {"rid": late.rid, "ids": [5], "text": "old", "finish": None, "counts": [0, False, 0],
                  "verified": Verified()}  # fmt: skip
        door.replicas._take(place, "of a process that is gone", [update])
        assert late not in door.texts and not late.output_ids
        door.replicas._take(place, place.incarnation, [update])
        assert door.texts[late] == "old"

    played(plain, play)


@pytest.mark.slow
def test_a_request_that_kills_fails_alone_and_takes_three_replicas_with_it(plain: Config, llm: LLM) -> None:
    async def play(door: Door) -> None:
        requests, killed = wishes(), []
        poison = Request("poison/1", ONCE * 12, SamplingParams(max_new_tokens=24, temperature=0.0))

        def after() -> None:
            for place in door.replicas.places:
                if poison.rid in place.requests and len(poison.output_ids) > 3 and place.state == "ready":
                    if place.incarnation not in killed:
                        killed.append(place.incarnation)
                        door.kill(place)

        door.after = after
        await door.serve([poison, *requests.values()])
        assert len(killed) == 3 and poison.finish.status == 500 and poison.finish.code == "replica_lost"
        truth = truth_of(llm, requests)
        assert {name: outcome(r, door.texts[r]) for name, r in requests.items()} == truth

    played(plain, play)


@pytest.mark.slow
def test_a_restart_of_each_in_turn_loses_nothing_and_nobody_is_blamed(plain: Config, llm: LLM) -> None:
    async def play(door: Door) -> dict[str, Request]:
        requests, before = wishes(), [place.incarnation for place in door.replicas.places]
        first, begun = door.replicas.places[0], asyncio.Event()
        door.after = lambda: begun.set() if any(r.output_ids for r in first.requests.values()) else None
        serving = asyncio.ensure_future(door.serve(list(requests.values())))
        for number in (0, 1):
            await begun.wait()  # with an update: whoever looks now and then may find all requests done
            with pytest.MonkeyPatch.context() as patch:
                # For the first everything is replayed that has not finished at once, the second is drained.
                patch.setattr(door.replicas, "config", dataclasses.replace(plain, shutdown_timeout=30.0 * number))
                await door.replicas.restart(number)
            assert door.replicas.state == "ready" and not door.replicas.deaths
        await serving
        assert not {place.incarnation for place in door.replicas.places} & set(before)
        assert {name: outcome(r, door.texts[r]) for name, r in requests.items()} == truth_of(llm, requests)
        return requests

    requests = played(plain, play)
    assert any(request.retractions for request in requests.values())


# ---- who gets a request ------------------------------------------------------------------------------------------


def test_the_longest_prefix_wins_until_its_replica_is_too_busy() -> None:
    routing = Routing(4, 100)
    text = routing.prefixes(range(20))
    assert len(text) == 5 and text[:3] == routing.prefixes(range(14))
    routing.sent(1, text[:2])
    routing.sent(2, text[:4])
    assert routing.choose(text, {0: 0, 1: 0, 2: 3}) == 2
    assert routing.choose(text, {0: 0, 1: 0, 2: 4}) == 2
    assert routing.choose(text, {0: 0, 1: 0, 2: 5}) == 0, "then the least loaded one, whatever it holds"
    assert routing.choose(text, {0: 6, 1: 6, 2: 9}) == 2 and routing.choose(text, {0: 6, 1: 6, 2: 10}) == 0
    assert routing.choose(text, {0: 1, 1: 0}) == 1, "one that is not there is not chosen"
    assert routing.choose(routing.prefixes(range(20), "salt"), {0: 1, 1: 0, 2: 3}) == 1
    routing.forget(2)
    assert routing.choose(text, {0: 0, 1: 3, 2: 0}) == 1


def test_what_is_remembered_of_a_replica_is_bounded_and_the_beginning_is_forgotten_last() -> None:
    routing = Routing(4, 6)
    first, second = routing.prefixes(range(20)), routing.prefixes(range(100, 112))
    routing.sent(0, first)
    routing.sent(0, second)
    assert routing._shared(0, first) == 3 and routing._shared(0, second) == 3 and len(routing._held[0]) == 6


def test_one_system_prompt_spreads() -> None:
    routing, loads = Routing(4, 1000), {0: 0, 1: 0, 2: 0}
    for client in range(60):
        text = routing.prefixes([*range(40), 1000 + client])
        chosen = routing.choose(text, loads)
        routing.sent(chosen, text)
        loads[chosen] += 1
    assert min(loads.values()) >= 12, loads
