"""NaN and exceptions in a step, at the scheduler: who is ended, what the others get, and what is left behind.

NaN is put where it would come from, into the embeddings that a step computes with, and spreads from there into keys,
values and features. Eager attention reads no row that nobody sees (`PagedGather._rows_and_mask`), but FlexAttention
multiplies such rows of its pages by 0. So whoever comes after a NaN is served by `greedy_reader`, which reads every row
of every page up to the batch's longest reach, page 0 where a table ends, and multiplies what is masked by 0.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from conformance import SUBJECTS, WISHES, Subject, truth
from exactness import finish, request, run, submit

from minispec.beam import Inputs
from minispec.cpu.gather import PagedGather
from minispec.engine import AskedStep, Engine
from minispec.kv import PagedKV
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.request import Logprobs, Request, Update
from minispec.scheduler import NAN, Scheduler
from minispec.seats import Seats
from minispec.tree import PLAIN, DraftTree, ancestors
from minispec.verify import Trees, verify, verify_greedy


@pytest.fixture
def greedy_reader(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function from whose call on eager attention reads every row, seen or not."""
    original = PagedGather._rows_and_mask

    def every_row(self: PagedGather, blocks: slice, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.plan.kv.page_size
        reach = -(-reach // size) * size
        _, mask = original(self, blocks, reach)
        row = torch.arange(reach)
        slots = self.plan.slots[blocks][: len(mask)]
        return self.plan.kv.table[slots][:, row // size].long() * size + row % size, mask

    return lambda: monkeypatch.setattr(PagedGather, "_rows_and_mask", every_row)


class Fault:
    """NaN in place of the embedding of a slot's newest token, from the step on in which it has so many rows."""

    def __init__(self, engine: Engine) -> None:
        self.slot, self.rows = 0, 0
        before, after = engine.small.eager

        def broken(owner: Engine, buffers: object, lens: torch.Tensor, *given: object) -> object:
            *read, embedding, rope = before(owner, buffers, lens, *given)
            if self.slot:
                embedding[(buffers.slots == self.slot) & (lens >= self.rows), 0] = torch.nan
            return *read, embedding, rope

        engine.small.eager = engine.small.compiled = (broken, after)


@contextmanager
def nan_for(network: object, *tokens: int) -> Iterator[None]:
    """Give tokens NaN for their embedding meanwhile."""
    weight, index = network.embed_tokens.weight, list(tokens)
    kept = weight[index].clone()
    with torch.inference_mode():
        weight[index] = torch.nan
        try:
            yield
        finally:
            weight[index] = kept


def sound(scheduler: Scheduler) -> bool:
    """Whether no page holds NaN, neither of the target nor of the drafter."""
    return not any(bool(pool.isnan().any()) for pool in scheduler.kv.pools)


def assert_exact(subject: Subject, *requests: Request) -> None:
    """Compare with the sequential reference."""
    for r in requests:
        assert r.finish.kind == "length" and r.output_ids == truth(subject.model(), r), f"{r.rid} differs"


def assert_failed(subject: Subject, r: Request) -> None:
    """A request that met NaN says so, and what it had until then was right."""
    assert r.finish.kind == "abort" and r.finish.status == 500 and "NaN" in r.finish.message
    assert r.output_ids == truth(subject.model(), r)[: len(r.output_ids)]


# ---- NaN ------------------------------------------------------------------------------------------------------------


def nan_while_decoding(
    subject: Subject, read_all: Callable[[], None], overlap: bool = False, plain: bool = False, **wishes: object
) -> None:
    """A request meets NaN beside a neighbour with a shorter table; others then have its pages, and its prompt."""
    rng = random.Random(3)
    scheduler = subject.build(running=3, pages=40, overlap=overlap)
    steps, fault = itertools.count(), Fault(scheduler.engine)
    if plain:  # NaN comes out of a plain step, and afterwards a drafter that is behind catches up now and then
        scheduler.policy.forced = lambda shapes: PLAIN if not victim.finish or next(steps) % 3 < 2 else max(shapes)
    victim = request("victim", subject.text(70, rng), sampling_seed=1, max_new_tokens=40, **wishes)
    neighbour = request("neighbour", subject.text(5, rng), sampling_seed=2, max_new_tokens=24, **wishes)
    submit(scheduler, victim, neighbour)
    finish(scheduler, lambda: len(victim.output_ids) > 3)
    pages = scheduler.seats[victim].owned()
    fault.slot, fault.rows = victim.slot, victim.kv_len + 4
    finish(scheduler, lambda: victim.finish is not None)
    assert neighbour.finish is None, "the neighbour was to be in the same step"
    assert sound(scheduler)
    fault.slot = 0
    finish(scheduler)
    assert len(victim.output_ids) > 4
    assert_failed(subject, victim)
    assert_exact(subject, neighbour)

    read_all()
    other = request("other", subject.text(120, rng), sampling_seed=3, max_new_tokens=20, **wishes)
    short = request("short", subject.text(3, rng), sampling_seed=4, max_new_tokens=20, **wishes)
    again = request("again", victim.prompt_ids, sampling_seed=1, max_new_tokens=40, **wishes)
    submit(scheduler, other, short, again)
    scheduler.step()
    assert set(pages) & set(scheduler.seats[other].pages), "the next request was to get those very pages"
    finish(scheduler, lambda: not sound(scheduler))
    assert sound(scheduler), "NaN was left somewhere"
    assert_exact(subject, other, short, again)
    assert again.cached_tokens >= 64, "what was computed before the fault was sound, and stays shared"


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(("name", "wishes"), [("none", {}), ("none", WISHES), ("eagle3-tree", {}),
                                              ("standalone-tree", WISHES)])  # fmt: skip
def test_nan_ends_one_request_and_leaves_nothing_behind(
    name: str, wishes: dict, overlap: bool, greedy_reader: Callable[[], None]
) -> None:
    nan_while_decoding(SUBJECTS[name], greedy_reader, overlap, **wishes)


def test_nan_in_a_tree_of_the_host_ends_one_request(greedy_reader: Callable[[], None]) -> None:
    nan_while_decoding(SUBJECTS["oracle"], greedy_reader)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_nan_in_a_plain_step_is_not_taken_in_later(overlap: bool, greedy_reader: Callable[[], None]) -> None:
    nan_while_decoding(SUBJECTS["eagle3-tree"], greedy_reader, overlap, plain=True)


def nan_in_a_prompt(subject: Subject, read_all: Callable[[], None], overlap: bool, abort: bool) -> None:
    """NaN comes out of a chunk in the middle of a prompt; with `abort` the request is ended while it is under way."""
    scheduler, rng = subject.build(running=2, chunk=32, pages=30, overlap=overlap), random.Random(3)
    prompt = [token if token != 7 else 8 for token in subject.text(120, rng)]
    victim, before = request("victim", [*prompt[:40], 7, *prompt[40:]]), request("before", [9, 5, 5], max_new_tokens=3)
    run(scheduler, [before])
    submit(scheduler, victim)
    with nan_for(scheduler.engine.model, 7):
        reached = lambda: victim.kv_len >= 64 and (not overlap or scheduler._flight is not None)  # noqa: E731
        finish(scheduler, reached if abort else lambda: victim.finish is not None)
        if abort:
            assert victim.finish is None and not victim.prompt_done
            scheduler.abort("victim")
        finish(scheduler)
    if not abort:
        assert_failed(subject, victim)
        assert victim.output_ids == []
    read_all()
    again = request("again", victim.prompt_ids)
    run(scheduler, [again])
    assert_exact(subject, again)
    assert sound(scheduler), "a page was not wiped"


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("name", ["none", "eagle3-tree"])
def test_nan_in_a_prompt_is_seen_in_its_chunk(name: str, overlap: bool, greedy_reader: Callable[[], None]) -> None:
    nan_in_a_prompt(SUBJECTS[name], greedy_reader, overlap, abort=False)


def test_a_chunk_under_way_enters_no_cache_when_its_request_is_aborted(greedy_reader: Callable[[], None]) -> None:
    nan_in_a_prompt(SUBJECTS["none"], greedy_reader, overlap=True, abort=True)


def nan_of_the_drafter_alone(subject: Subject, read_all: Callable[[], None]) -> None:
    """The draft model gives NaN for one request, whose text goes on; the next drafts as ever in the same pages."""
    scheduler, rng = subject.build(running=1, pages=14), random.Random(6)
    prompts = [subject.text(100, rng) for _ in range(2)]
    first, second = (request(f"r{i}", prompt, max_new_tokens=40) for i, prompt in enumerate(prompts))
    drafter, read = scheduler.engine.drafter, scheduler.engine.drafter._read

    def broken(tokens: torch.Tensor, positions: torch.Tensor) -> Inputs:
        inputs = read(tokens, positions)
        return inputs._replace(embedding=inputs.embedding * torch.nan)

    drafter._read = broken
    run(scheduler, [first])
    assert_exact(subject, first)
    assert first.verified.accept_length < 1.5 and not sound(scheduler), "it was to compute NaN"
    drafter._read = read
    read_all()
    run(scheduler, [second])
    assert_exact(subject, second)
    assert second.verified.accept_length > 2, "its drafts were spoilt by what the pages held before"


def test_nan_of_the_drafter_alone_ends_nothing_and_spoils_nobody_s_drafts(greedy_reader: Callable[[], None]) -> None:
    nan_of_the_drafter_alone(SUBJECTS["standalone-tree"], greedy_reader)


def test_nan_that_only_drafts_bring_costs_drafts_and_no_text() -> None:
    subject, rng = SUBJECTS["oracle"], random.Random(2)
    scheduler = subject.build(running=2)
    requests = [request(f"r{i}", subject.text(30, rng)) for i in range(2)]
    for r in requests:
        scheduler.validate(r)
    used = {token for r in requests for token in [*r.prompt_ids, *truth(subject.model(), r)]}
    with nan_for(scheduler.engine.model, *set(range(61)) - used):  # the oracle plants them among true tokens
        submit(scheduler, *requests)
        finish(scheduler)
    assert_exact(subject, *requests)
    assert any(r.undrafted and r.retractions == 1 for r in requests), "no draft brought NaN"
    assert sound(scheduler)


@pytest.mark.parametrize("law", ["greedy", "sampled", "lossy"])
@torch.inference_mode()
def test_a_flag_is_of_the_logits_that_gave_tokens_alone(law: str) -> None:
    generator, rng, seen = torch.Generator().manual_seed(0), random.Random(0), set()
    scheduler = SUBJECTS["none"].build(running=6)
    for slot in range(1, 7):
        scheduler.engine.sampling.assign(slot, request("r", [1], temperature=0.8).params, slot, [1], [], ())
    wishes = scheduler.engine.sampling.wishes(torch.arange(1, 7), frozenset(("temperature",)))
    for _ in range(20):
        parents = torch.tensor([[-1, 0, 0, 1, 2]] * 6)
        logits = torch.randn(6, 5, 11, generator=generator) * 6
        likeliest = logits.argmax(-1)
        first = (likeliest[:, 0] + torch.tensor([0, 0, 0, 0, 2, 3])) % 11  # of some rows no child is right
        children = [first, (first + 4) % 11, likeliest[:, 1], likeliest[:, 2]]
        tree = DraftTree(torch.stack([torch.zeros(6, dtype=torch.int64), *children], dim=1), parents)
        for row in range(6):
            logits[row, rng.randrange(5), rng.randrange(11)] = torch.nan
        trees = Trees(tree, ancestors(parents), torch.arange(1, 7), torch.full((6,), 9), 3)
        if law == "greedy":
            verdict = verify_greedy(trees, logits)
        else:
            verdict = verify(trees, logits, wishes, (0.1, 0.5) if law == "lossy" else None)
        for row, (path, count) in enumerate(zip(verdict.path.tolist(), verdict.count.tolist(), strict=True)):
            hurt = bool(logits[row, path[:count]].isnan().any())
            assert bool(verdict.nan[row]) == hurt
            seen.add((count, hurt))
    assert {(1, True), (1, False), (2, True), (3, False)} <= seen


# ---- exceptions -----------------------------------------------------------------------------------------------------


def raise_once(owner: object, name: str, patch: pytest.MonkeyPatch, after: bool = False, at: int = 1) -> None:
    """Make the next call of a method, or the at-th from now, raise before or after it does its work."""
    original, calls = getattr(owner, name), itertools.count(1)

    def broken(*args: object, **kwargs: object) -> object:
        if next(calls) < at:
            return original(*args, **kwargs)
        patch.setattr(owner, name, original)
        if after:
            original(*args, **kwargs)
        raise RuntimeError("injected")

    patch.setattr(owner, name, broken)


def fail_in(scheduler: Scheduler) -> list[Update]:
    """Step until a step raises, and tell the scheduler as the server does."""
    while True:
        try:
            scheduler.step()
        except RuntimeError as error:
            updates = scheduler.fail(error)
            scheduler.check()
            return updates


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(("owner", "name"), [("policy", "before"), ("engine", "host_drafts"), ("sampling", "needs")])
def test_before_anything_has_changed_a_step_costs_its_requests_alone(
    owner: str, name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = SUBJECTS["eagle3-tree"]
    scheduler, rng = subject.build(running=2, chunk=32, overlap=overlap), random.Random(4)
    lost, filling, waiting = (request(f"r{size}", subject.text(size, rng), max_new_tokens=9) for size in (5, 200, 7))
    submit(scheduler, lost, filling, waiting)
    finish(scheduler, lambda: len(lost.output_ids) > 2)
    assert filling in scheduler.prefilling and waiting in scheduler.waiting
    what = {"policy": scheduler.policy, "engine": scheduler.engine, "sampling": scheduler.engine.sampling}[owner]
    scheduler._prefilled_last = True  # so that a decode step is next, and raises
    raise_once(what, name, monkeypatch)
    updates = fail_in(scheduler)
    assert [u.request for u in updates if u.finish] == [lost]
    assert lost.finish.status == 500 and "RuntimeError" in lost.finish.message
    assert filling in scheduler.prefilling and waiting in scheduler.waiting
    finish(scheduler)
    assert_exact(subject, filling, waiting)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [("model", "run_blocks"), ("kv", "compact"), ("drafter", "propose"), ("drafter", "commit"),
     ("sampling", "commit"), ("engine", "collect")],
)  # fmt: skip
def test_halfway_a_step_costs_all_that_have_a_slot_and_leaves_a_sound_engine(
    owner: str, name: str, overlap: bool, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, rng = SUBJECTS["eagle3-tree"], random.Random(4)
    scheduler, steps = subject.build(running=2, chunk=32, overlap=overlap, pages=30), itertools.count()
    scheduler.policy.forced = lambda shapes: max(shapes) if next(steps) % 3 == 2 else PLAIN  # some rows wait
    texts = [subject.text(size, rng) for size in (5, 200, 7)]
    running, filling, waiting = (request(f"r{len(text)}", text, max_new_tokens=20) for text in texts)
    submit(scheduler, running, filling, waiting)
    finish(scheduler, lambda: len(running.output_ids) > 4)
    engine = scheduler.engine
    pages = {page for seat in scheduler.seats.values() for page in seat.owned()}
    what = {"engine": engine, "model": engine.model, "kv": engine.kv, "drafter": engine.drafter,
            "sampling": engine.sampling}[owner]  # fmt: skip
    raise_once(what, name, monkeypatch, after)
    updates = fail_in(scheduler)
    assert {u.request for u in updates if u.finish} == {running, filling} and scheduler.waiting[0] is waiting
    assert sorted(scheduler.free_slots) == [1, 2] and not any(engine.late.waiting) and scheduler._flight is None
    assert not any(bool(pool[:, :, page * 16 : page * 16 + 16].any()) for pool in engine.kv.pools for page in pages)
    again = request("again", running.prompt_ids, max_new_tokens=20)
    submit(scheduler, again)
    finish(scheduler)
    assert_exact(subject, waiting, again)


def test_what_a_step_that_raised_said_of_grammars_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS["none"]
    scheduler = subject.build(running=1)
    first, second = (request(name, [3, 1, 4], max_new_tokens=5) for name in ("first", "second"))
    first.params = replace(first.params, logprobs=Logprobs())  # a step that answers
    submit(scheduler, first, second)
    scheduler.step()
    launch = scheduler.engine.asked.decode

    def failing(*given: object) -> AskedStep:
        step = launch(*given)
        step.failed[first.slot] = "the grammar leaves no token"
        return step

    monkeypatch.setattr(scheduler.engine.asked, "decode", failing)
    raise_once(scheduler.engine, "logits", monkeypatch)
    fail_in(scheduler)
    monkeypatch.setattr(scheduler.engine.asked, "decode", launch)
    finish(scheduler)
    assert first.finish.status == 500
    assert_exact(subject, second)


class Stubborn(NgramDrafter):
    """A drafter that raises when it is to let go of a request."""

    def release(self, slot: int) -> None:
        """Raise."""
        raise KeyError(slot)


def test_a_drafter_that_cannot_let_go_costs_a_request_and_not_the_queue() -> None:
    subject = Subject(lambda model: Stubborn(NgramOptions(nodes=4)))
    scheduler = subject.build(running=1)
    requests = [request(f"r{i}", [i, 1, 4], max_new_tokens=5) for i in range(3)]
    submit(scheduler, *requests)
    while scheduler.has_work:
        try:
            scheduler.step()
        except KeyError as error:
            scheduler.fail(error)
        scheduler.check()
    assert all(r.finish.kind == "abort" and r.output_ids == truth(subject.model(), r)[:5] for r in requests)


def test_an_error_of_cuda_is_told_from_others() -> None:
    engine = SUBJECTS["none"].build().engine
    assert engine.is_lost(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert not any(engine.is_lost(error) for error in (RuntimeError("no"), torch.OutOfMemoryError("no")))


# ---- errors on purpose ----------------------------------------------------------------------------------------------


def no_flag(patch: pytest.MonkeyPatch) -> None:
    """A step does not tell of NaN."""
    collect = Engine.collect

    def told(self: Engine, pending: object) -> list[list[int]]:
        pending.outputs[:, -1] = 0
        return collect(self, pending)

    patch.setattr(Engine, "collect", told)


def pages_shared_all_the_same(patch: pytest.MonkeyPatch) -> None:
    """What was computed of a request with NaN enters the prefix cache."""
    leave = Seats.leave
    patch.setattr(Seats, "leave", lambda self, request, known, sound: leave(self, request, known, True))


def pages_not_wiped(patch: pytest.MonkeyPatch) -> None:
    """Pages go back to the free list as they are."""
    patch.setattr(PagedKV, "wipe", lambda self, pages: self._zero([0], self.pools))


def page_0_not_wiped(patch: pytest.MonkeyPatch) -> None:
    """What padding wrote to page 0 stays there."""
    patch.setattr(PagedKV, "wipe", lambda self, pages: self._zero(pages, self.pools))


def draft_pages_not_wiped(patch: pytest.MonkeyPatch) -> None:
    """The drafter's rows are forgotten about."""
    patch.setattr(PagedKV, "wipe", lambda self, pages: self._zero([0, *pages], self.pools[:1]))


def chunks_under_way_count(patch: pytest.MonkeyPatch) -> None:
    """Rows of a chunk that was launched and not collected are shared."""
    patch.setattr(Scheduler, "_landed_rows", lambda self, r: r.kv_len)


def no_second_try(patch: pytest.MonkeyPatch) -> None:
    """NaN that came with drafts ends a request."""
    patch.setattr(Scheduler, "_send_back", lambda self, r, sound=True: self._end(r, NAN, sound=sound))


def pages_of_who_left_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """What a step computed of a request that left meanwhile is not known when its pages come back."""
    land = Scheduler._land

    def landed(self: Scheduler, flight: object) -> None:
        flight.left[:] = [(0, pages) for _, pages in flight.left]
        land(self, flight)

    patch.setattr(Scheduler, "_land", landed)


def draft_pages_handed_out_as_they_are(patch: pytest.MonkeyPatch) -> None:
    """A page's next owner finds the drafter's old rows."""
    zero = PagedKV._zero
    patch.setattr(PagedKV, "_zero", lambda self, pages, pools: zero(self, pages, pools if len(pools) > 1 else []))


DECODING = lambda read_all: nan_while_decoding(SUBJECTS["eagle3-tree"], read_all, overlap=True)  # noqa: E731
PADDED = lambda read_all: nan_while_decoding(SUBJECTS["oracle"], read_all)  # noqa: E731  trees with few nodes
PROMPT = lambda read_all: nan_in_a_prompt(SUBJECTS["none"], read_all, overlap=False, abort=False)  # noqa: E731
ABORTED = lambda read_all: nan_in_a_prompt(SUBJECTS["none"], read_all, overlap=True, abort=True)  # noqa: E731
DRAFTER = lambda read_all: nan_of_the_drafter_alone(SUBJECTS["standalone-tree"], read_all)  # noqa: E731


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "check"),
    [(no_flag, DECODING), (no_flag, PROMPT), (pages_shared_all_the_same, PROMPT), (pages_not_wiped, DECODING),
     (page_0_not_wiped, PADDED), (draft_pages_not_wiped, DECODING), (chunks_under_way_count, ABORTED),
     (pages_of_who_left_are_not_looked_at, ABORTED), (draft_pages_handed_out_as_they_are, DRAFTER),
     (no_second_try, lambda read_all: test_nan_that_only_drafts_bring_costs_drafts_and_no_text())],
)  # fmt: skip
def test_every_error_shows(
    mutation: Callable[[pytest.MonkeyPatch], None], check: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch, greedy_reader: Callable[[], None],
) -> None:  # fmt: skip
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        check(greedy_reader)
