"""Tensor parallelism on two processes: this one is rank 0, and `rank_one.py` is the other.

(a) In float32 every drafter gives exactly the tokens of plain decoding on as many ranks, whatever batch, chunking,
cache and memory; rank 1's clock, seeds and memory differ. (b) In float64 the tokens are those of one rank, exactly,
whatever requests ask for and whoever fails. Servers of several ranks are in test_parallel_served.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from capturing import Capture, reads_all
from conformance import SUBJECTS, WISHES, Subject, mixture_model, random_head, sharp_model
from conftest import free_port, slow_unless, wait_until
from exactness import (
    MIXTURE,
    WINDOWED,
    Oracle,
    build,
    finish,
    mixed_requests,
    request,
    run,
    submit,
    tiny_config,
    tiny_model,
    truth_of,
)
from rank_one import CHOSEN, FOUND, LOOK, REPLAYED, noted, split
from safetensors.torch import save_file
from test_faults import fail_in, nan_in_a_prompt, nan_while_decoding, raise_once
from test_grammar import HOW as GRAMMATICAL
from test_grammar import TERSE
from test_lookup import PAIRS, adversary, repeating
from test_model import CPU
from test_model import write as write_family

import minispec.engine as engine_module
import minispec.ranks.link as parallel
import minispec.ranks.shards as shards
import minispec.verify as verify_module
from minispec.asked.grammar import Constraints
from minispec.beam import BeamDrafter
from minispec.config import Config
from minispec.cpu.gather import PagedGather
from minispec.cpu.rowwise import PagedChains
from minispec.cpu.template import reason_against
from minispec.cuda.graphs import capture
from minispec.drafter import Plain
from minispec.eagle import Eagle3Head
from minispec.engine import COMPILED
from minispec.experts import Experts
from minispec.load.architectures import read_model_config
from minispec.load.build import load_model
from minispec.load.published import published_tensors
from minispec.load.ranks import RankPlace, RankProcess, described, gather, join, open_store
from minispec.load.weights import read_config
from minispec.model import Model
from minispec.model_config import ModelError
from minispec.ranks.link import Lead, Ranks, SharedLink
from minispec.ranks.shards import Shard, share
from minispec.request import Logprobs, Request, Trace
from minispec.scheduler import Scheduler
from minispec.tree import PLAIN


class Pair:
    """Both ranks: the group that this process is in, and the process of rank 1."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.leading = folder, None
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, str(Path(__file__).with_name("rank_one.py")), str(folder / "meet"), "perturbed"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meet"), 2), rank=0, world_size=2)
        self.ranks = Ranks()
        self.parts: dict[int, tuple[Model, Model, Path]] = {}  # by id of the whole model, which is kept

    def part(self, model: Model) -> tuple[Model, Path]:
        """Return rank 0's part of a model, and where the whole is for rank 1."""
        if id(model) not in self.parts:
            weights = {name: tensor.clone().contiguous() for name, tensor in published_tensors(model).items()}
            path = self.folder / f"{len(self.parts)}.safetensors"
            save_file(weights, path)
            with torch.inference_mode():
                self.parts[id(model)] = (model, split(model.config, self.ranks, weights), path)
        return self.parts[id(model)][1:]

    def build(self, model: Model, drafter: object, fails: str = "", **how: object) -> Scheduler:
        """Put a scheduler together over both ranks; the one before is done with.

        fails: the step that cannot be captured on rank 1.
        """
        self.stop()
        part, weights = self.part(model)
        scheduler = build(part, drafter, **how)
        kv = scheduler.kv
        pages = {"pages": kv.pages, "page_size": kv.page_size, "slots": kv.table.shape[0],
                 "rows_per_slot": kv.pages_per_slot * kv.page_size}  # fmt: skip
        told = {"weights": str(weights), "config": dataclasses.asdict(model.config), "pages": pages,
                "fails": fails}  # fmt: skip
        print(json.dumps(told), file=self.process.stdin, flush=True)
        self.leading = scheduler.engine
        self.ranks.same_sizes(scheduler.sizes)
        Lead(self.leading, self.ranks)
        return scheduler

    def stop(self) -> None:
        """End the engine, if there is one."""
        if self.leading is not None:
            self.ranks.call("stop")
        self.leading = None

    def close(self) -> None:
        """End rank 1, and leave the group."""
        self.stop()
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class OnTwo(Subject):
    """A subject whose schedulers are over both ranks; what it is compared with stays on one."""

    pair: Pair | None = None

    def build(self, **how: object) -> Scheduler:
        """Put a scheduler together over a fresh drafter."""
        with torch.inference_mode():
            drafter = self.drafter(self.model())
        return self.pair.build(self.model(), drafter, **how)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def plain(pair: Pair, model: Model, requests: Sequence[Request]) -> list[list[int]]:
    """Return what requests give one after the other by plain decoding on both ranks, in one chunk, without a cache."""
    run(pair.build(model, Plain(), running=1, radix=False, chunk=256), requests)
    return [r.output_ids for r in requests]


def wanted(subject: Subject) -> list[Request]:
    """Return the requests that all drafters serve: greedy ones and sampled ones, pairs with a common prefix."""
    requests = mixed_requests(6, text=subject.text, max_new_tokens=30)
    for r in requests[1::3]:
        r.params = dataclasses.replace(r.params, **WISHES)
    return requests


DRAFTERS = ("none", "ngram", "oracle", "standalone-tree", "eagle-chain", "eagle3-tree", "mtp-tree",
            "dflash-tree", "dspark-tree")  # fmt: skip
ON_TWO = {name: SUBJECTS[name] for name in DRAFTERS}
ON_TWO |= {f"{name}, experts": dataclasses.replace(SUBJECTS[name], model=mixture_model)
           for name in ("oracle", "eagle3-tree")}  # fmt: skip
_truth: dict[object, list[list[int]]] = {}  # by what was asked of which model


@pytest.mark.parametrize("name", slow_unless(ON_TWO, lambda name: name in ("ngram", "eagle3-tree", "oracle, experts")))
def test_on_two_ranks_every_drafter_gives_the_tokens_of_plain_decoding(name: str, pair: Pair) -> None:
    subject = ON_TWO[name]
    model = subject.model()
    if id(model) not in _truth:
        _truth[id(model)] = plain(pair, model, wanted(subject))
    with torch.inference_mode():
        drafter = subject.drafter(model)
    # Chunks of no round number, a pool that is too small, steps that overlap where the drafter allows it.
    scheduler = pair.build(model, drafter, chunk=50, pages=13, overlap=True)
    requests = wanted(subject)
    run(scheduler, requests)
    assert [r.output_ids for r in requests] == _truth[id(model)]
    assert scheduler.metrics.retractions > 0 and scheduler.metrics.verified.accept_length > subject.accept_length
    again = wanted(subject)[:2]
    run(scheduler, again)
    assert [r.output_ids for r in again] == _truth[id(model)][:2] and sum(r.cached_tokens for r in again) > 30


SWITCHING = Subject(lambda model: BeamDrafter(random_head(Eagle3Head, model, taps=(1, 2)), rounds=2, topk=3, nodes=10,
                                              smaller=[(2, 5)]))  # fmt: skip


@pytest.mark.parametrize("subject", [SWITCHING, PAIRS["standalone"]], ids=["a head", "a model beside lookups"])
def test_on_two_ranks_no_shape_and_no_bet_changes_a_token(subject: Subject, pair: Pair) -> None:
    model, truth = subject.model(), "texts that repeat"  # the subjects have one model
    if truth not in _truth:
        _truth[truth] = plain(pair, model, repeating(subject))
    with torch.inference_mode():
        drafter = subject.drafter(model)
    scheduler, requests = pair.build(model, drafter, pages=14, overlap=True), repeating(subject)
    made = adversary(scheduler)  # plain steps, smaller and larger trees, lookups alone and beside drafts
    run(scheduler, requests)
    assert [r.output_ids for r in requests] == _truth[truth]
    counts = scheduler.metrics
    assert counts.retractions > 0 and counts.verified.accept_length > 1.2 * (subject is not SWITCHING)
    assert {plan.shape for plan in made} == set(scheduler.sizes.shapes_of(1))
    both = [{tree is None for tree in plan.verifies.values()} for plan in made]
    assert ({True, False} in both) == (subject is not SWITCHING)


def test_what_one_rank_cannot_capture_or_replay_none_does(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    subject, fails = SUBJECTS["standalone-tree"], "decode, batch 2, 8 nodes a tree"
    wishes = ({}, {"logprobs": Logprobs()}, {"temperature": 0.9}, {"temperature": 0.9, "frequency_penalty": 0.5})
    prompt = {"prompt": [7, 9, 30], "max_new_tokens": 8, "sampling_seed": 5}
    wanted = lambda: [request(f"r{i}", **prompt, **wish) for i, wish in enumerate(wishes)]  # noqa: E731
    with torch.inference_mode():
        drafter = subject.drafter(subject.model())
    scheduler = pair.build(subject.model(), drafter, fails, running=2, host_looks=False)
    engine = reads_all(scheduler.engine)
    with torch.inference_mode(), Capture().emulated():
        capture(engine, (1, 2), lambda line: None)
    assert [r.getMessage() for r in caplog.records] == [
        f"{fails} runs uncaptured, since its capture failed: on another rank"]  # fmt: skip
    assert fails not in {step.name for step, _ in engine.graphs} and len(engine.graphs) == 4 * len(COMPILED) - 1
    requests = wanted()
    for together in (requests[:1], requests[1:2], requests[2:3], requests[3:], again := wanted()):
        run(scheduler, together)  # in steps that are captured, or not on any rank, or are not replayed for such wishes
    pair.stop()
    wait_until((pair.folder / REPLAYED).exists)
    replays = sum(graph.replays for graph in engine.graphs.values())
    assert int((pair.folder / REPLAYED).read_text()) == replays > 3
    assert [r.output_ids for r in (*requests, *again)] == 2 * plain(pair, subject.model(), wanted())


# ---- (b) as on one rank ------------------------------------------------------------------------------------------


@functools.cache
def double_model(**switches: object) -> Model:
    """Return a tiny model in float64 that has every bias and norm there is, and whose LM head is its embedding."""
    sizes = dataclasses.replace(tiny_config(), qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, tied=True,
                                **switches)  # fmt: skip
    torch.manual_seed(3)
    with torch.inference_mode():
        model = Model.empty(sizes, torch.float64, torch.device("cpu"))
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(0, 0.35)
    return model


def as_on_one_rank(pair: Pair, **switches: object) -> bool:
    """Return whether a batch in float64, with the log-probabilities of prompts, is what one rank makes of it."""
    model = double_model(**switches)
    wishes = dict(max_new_tokens=12, logprobs=Logprobs(top=2, start=0))
    alone, split_up = mixed_requests(4, **wishes), mixed_requests(4, **wishes)
    run(build(model, Plain()), alone)
    run(pair.build(model, Oracle(truth_of(model))), split_up)
    for r, other in zip(alone, split_up, strict=True):
        if r.output_ids != other.output_ids:
            return False
        scores = [[s.logprob for s in (*q.prompt_scores, *q.output_scores)] for q in (r, other)]
        assert len(scores[0]) == len(r.prompt_ids) - 1 + 12 and scores[1] == pytest.approx(scores[0], abs=1e-4)
    return True


def test_in_float64_the_tokens_are_those_of_one_rank(pair: Pair) -> None:
    assert as_on_one_rank(pair)
    assert as_on_one_rank(pair, unrotated=(1,), embedding_multiplier=1.5, query_multiplier=1.2,
                          residual_multiplier=0.8, logits_multiplier=0.9)  # fmt: skip
    assert as_on_one_rank(pair, **MIXTURE) and as_on_one_rank(pair, **MIXTURE, norm_topk_prob=False)
    assert as_on_one_rank(pair, **WINDOWED)


def test_all_ranks_have_the_same_scores_of_experts_and_choose_the_same_bit_for_bit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(Experts, "choose", noted(choices))
    scheduler = pair.build(mixture_model(), Plain(), running=3, chunk=50)
    (pair.folder / CHOSEN).unlink(missing_ok=True)  # of the engine before
    run(scheduler, mixed_requests(6))
    pair.stop()
    wait_until((pair.folder / CHOSEN).exists)
    others = torch.load(pair.folder / CHOSEN)
    assert len(choices) == len(others) > 100 and len({int(i) for _, chosen in choices for i in chosen.unique()}) == 6
    assert all(torch.equal(scores, other) for (scores, _), (other, _) in zip(choices, others, strict=True))
    assert all(torch.equal(chosen, other) for (_, chosen), (_, other) in zip(choices, others, strict=True))


def sum_dropped(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 goes on with its own part of each sum."""
    inner = shards.summed
    patch.setattr(shards, "summed", lambda x, group: (inner(x, group), x)[1])


def keys_of_other_heads(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 slices k one head further than q and v."""
    inner = Shard.slice

    def slice_(self: Shard, name: str, tensor: torch.Tensor) -> torch.Tensor:
        further = self.whole.head_dim * (".k_proj" in name and self.rank == 0)
        return inner(self, name, tensor.roll(-further, 0))

    patch.setattr(Shard, "slice", slice_)


def bias_added_by_each(patch: pytest.MonkeyPatch) -> None:
    """The bias of o and down is part of each rank's product."""
    patch.setattr(shards.Summed, "forward", lambda self, x: shards.summed(
        self.layer(x) + self.bias, self.group))  # fmt: skip


def another_verdict(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 is told that the roots alone are kept, in their places."""
    patch.setattr(Lead, "verdict", lambda self, verdict: (SharedLink.verdict(self, verdict._replace(
        path=torch.zeros_like(verdict.path))), verdict)[1])  # fmt: skip


def router_cut(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 has the router's rows of the first half of the experts only."""
    inner = Shard.slice

    def slice_(self: Shard, name: str, tensor: torch.Tensor) -> torch.Tensor:
        part = inner(self, name, tensor)
        if ".mlp.gate." not in name or self.rank:
            return part
        return torch.cat((part[: len(part) // 2], torch.zeros_like(part[len(part) // 2 :])))

    patch.setattr(Shard, "slice", slice_)


def experts_swapped(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes its part of the first expert for that of the second, and the reverse."""
    inner = Shard.slices
    other = {".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}

    def slices(self: Shard, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in inner(self, tensors):
            mark = next((mark for mark in other if mark in name and not self.rank), "")
            yield name.replace(mark, other.get(mark, "")), tensor

    patch.setattr(Shard, "slices", slices)


MUTATIONS = {
    sum_dropped: {}, keys_of_other_heads: {}, bias_added_by_each: {}, another_verdict: {}, router_cut: MIXTURE,
    experts_swapped: MIXTURE,
}  # fmt: skip


@pytest.mark.skipif(reason_against(torch.bfloat16) is not None, reason="no template for products in bfloat16")
def test_on_two_ranks_a_row_in_bfloat16_is_what_it_is_alone(pair: Pair) -> None:
    # What `Build.engine_of` puts together for --enable-deterministic-inference. Each rank has one KV head, and its
    # inputs are multiples of 32, as the template wants them.
    with torch.inference_mode():
        model = tiny_model(hidden_size=64, heads=8, kv_heads=2, intermediate_size=128).to(torch.bfloat16)
        truth = truth_of(model)

    def numbers(drafter: object, at_once: int, apart: bool = True) -> list[tuple[list[int], list[float]]]:
        requests = mixed_requests(5, max_new_tokens=20, logprobs=Logprobs(top=2))
        scheduler = pair.build(model, drafter, running=at_once, radix=False, kind=PagedChains if apart else PagedGather)
        for first in range(0, 5, at_once):
            run(scheduler, requests[first : first + at_once])
        return [(r.output_ids, [s.logprob for s in r.output_scores]) for r in requests]

    alone = numbers(Plain(), 1)
    assert numbers(Oracle(truth, nodes=8), 5) == alone and numbers(Plain(), 4) == alone
    assert numbers(Oracle(truth, nodes=8), 5, apart=False) != alone, "rank 0's attention keeps no rows apart"


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_sum_or_slice_is_noticed(
    mutation: Callable[[pytest.MonkeyPatch], None], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    pair.parts.clear()
    assert not as_on_one_rank(pair, **MUTATIONS[mutation])
    pair.parts.clear()


def of_every_kind() -> list[Request]:
    """Return requests with grammars, penalties, biases, filters and questions for log-probabilities, in one batch."""
    told = Logprobs(top=3, start=0)
    wishes = [
        dict(grammar=TERSE["a car"], max_new_tokens=80),
        dict(grammar=TERSE["a list of colours"], **WISHES, logprobs=told),
        dict(repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.3, logprobs=told),
        dict(logit_bias={1: 4.0, 7: -3.0}, temperature=1.0, logprobs=told), dict(min_new_tokens=9, temperature=1.0),
        dict(top_k=3, temperature=1.0), dict(allowed_token_ids=list(range(5, 40)), logprobs=told), dict(),
    ]  # fmt: skip
    return [request(f"kind{i}", [i + 1, 9, 30, i, 9], **{"sampling_seed": i, **wish}) for i, wish in enumerate(wishes)]


@pytest.mark.slow
def test_in_float64_requests_of_every_kind_are_those_of_one_rank(pair: Pair) -> None:
    alone, split_up = of_every_kind(), of_every_kind()
    watched = [split_up[kind] for kind in (1, 3, 7)]  # with a grammar and log-probabilities, with the latter, with none
    for r in watched:
        r.trace = Trace()
    run(build(double_model(), Plain(), **GRAMMATICAL), alone)
    scheduler = pair.build(double_model(), Oracle(truth_of(double_model())), pages=30, **GRAMMATICAL)
    run(scheduler, split_up)
    for r, other in zip(alone, split_up, strict=True):
        assert other.output_ids == r.output_ids and other.finish == r.finish, r.rid
        scores = [[s.logprob for s in (*q.prompt_scores, *q.output_scores)] for q in (r, other)]
        assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    assert [len(r.prompt_scores) for r in split_up] == [4 * (r.params.logprobs is not None) for r in split_up]
    for r in watched:
        assert [token for step in r.trace.steps for token in step["emitted"]] == r.output_ids[1:]
        assert len(r.trace.ends) == len(r.output_ids) and max(len(step["tokens"]) for step in r.trace.steps) > 1
    assert all(r.finish.kind == "stop" for r in split_up[:2]) and scheduler.metrics.verified.accept_length > 1.1


# ---- who fails ---------------------------------------------------------------------------------------------------


def nan_on_two_ranks(pair: Pair) -> None:
    """NaN comes out of rank 0's own embedding, in decoding and in a prompt, and reaches rank 1 in the first sum."""
    subject = OnTwo(lambda model: Oracle(truth_of(model)), model=double_model, pair=pair)
    asked, found = pair.folder / LOOK, pair.folder / FOUND
    for check in (nan_while_decoding, functools.partial(nan_in_a_prompt, overlap=False, abort=False)):
        try:
            check(subject, asked.touch)  # after the fault; others are served then
            assert not found.exists(), "there was NaN in rank 1's pages"
        finally:
            asked.unlink()
            found.unlink(missing_ok=True)


def test_nan_ends_one_request_and_leaves_nothing_behind_on_any_rank(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan_on_two_ranks(pair)
    call = Ranks.call
    monkeypatch.setattr(Ranks, "call", lambda self, name, numbers=(): (
        None if name == "wipe" else call(self, name, numbers)))  # fmt: skip
    with pytest.raises(AssertionError, match="in rank 1's pages"):
        nan_on_two_ranks(pair)


def test_what_fails_of_rank_0_s_own_part_costs_those_that_have_a_slot(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SWITCHING.model()
    wanted = lambda: [SWITCHING.text(9, random.Random(5)), SWITCHING.text(12, random.Random(6))]  # noqa: E731
    truth = plain(pair, model, [request(f"r{i}", ids, max_new_tokens=12) for i, ids in enumerate(wanted())])
    with torch.inference_mode():
        drafter = SWITCHING.drafter(model)
    scheduler = pair.build(model, drafter, running=1, **GRAMMATICAL)
    scheduler.policy.forced = max
    grammatical = {"grammar": TERSE["a list of colours"]}
    for what, name, wish in (
        (type(drafter), "propose", {}), (type(drafter), "commit", {}), (verify_module, "verify_greedy", {}),
        (engine_module, "largest", {}), (Constraints, "masks", grammatical),
    ):  # fmt: skip
        lost, waiting = (request(f"{name}{i}", ids, max_new_tokens=12, **(wish if i == 0 else {}))
                         for i, ids in enumerate(wanted()))  # fmt: skip
        submit(scheduler, lost, waiting)
        if name != "largest":
            finish(scheduler, lambda: lost.prompt_done)  # noqa: B023  called at once
        raise_once(what, name, monkeypatch)
        updates = fail_in(scheduler)
        assert [u.request for u in updates if u.finish] == [lost] and lost.finish.status == 500
        again = request("again", lost.prompt_ids, max_new_tokens=12)
        submit(scheduler, again)
        finish(scheduler)
        assert [again.output_ids, waiting.output_ids] == truth, name


# ---- who has what ------------------------------------------------------------------------------------------------


def shards_of(size: int, **sizes: int) -> list[Shard]:
    """Return the shards of a model of 9 heads over 3."""
    return [Shard(dataclasses.replace(tiny_config(), **sizes), rank, size, "") for rank in range(size)]


def test_kv_groups_are_whole_and_spread_evenly() -> None:
    assert [(len(s.heads), len(s.kv_heads)) for s in shards_of(2)] == [(6, 2), (3, 1)]
    assert [(s.heads, s.kv_heads) for s in shards_of(3)] == [
        (range(3 * i, 3 * i + 3), range(i, i + 1)) for i in range(3)]  # fmt: skip
    six = shards_of(6)  # each KV head on two ranks, which share its three query heads
    assert [(s.heads, s.kv_heads) for s in six[:3]] == [
        (range(0, 2), range(0, 1)), (range(2, 3), range(0, 1)), (range(3, 5), range(1, 2))]  # fmt: skip
    for size in (2, 3, 6, 9):
        assert [i for s in shards_of(size) for i in s.heads] == list(range(9))
        assert [i for s in shards_of(size) for i in s.inner(96)] == list(range(96))
    assert [s.config.intermediate_size for s in shards_of(9)] == [11] * 6 + [10] * 3  # 96 has not 9 times 16
    assert share(10, 3, 0) == range(0, 4) and share(96, 4, 0, 16) == range(0, 32)


@pytest.mark.parametrize("size", [4, 5, 7, 12])
def test_heads_that_do_not_divide_are_one_line_with_what_is_allowed(size: int) -> None:
    with pytest.raises(ValueError, match=rf"--tp-size {size}: .* 9 attention heads over 3 .*; allowed: 1, 2, 3, 6, 9"):
        shards_of(size)


def test_a_mixture_whose_experts_are_too_narrow_is_one_line() -> None:
    with pytest.raises(ValueError, match="--tp-size 3: its MLP of 2 or its vocabulary of 61 has less than a row for"):
        shards_of(3, **{**MIXTURE, "expert_size": 2})
    assert [s.config.expert_size for s in shards_of(3, **MIXTURE)] == [16, 16, 16]


@pytest.mark.parametrize("switches", [{}, {**MIXTURE, "expert_size": 64}], ids=["dense", "experts"])
def test_slices_put_together_are_the_whole(switches: dict[str, object]) -> None:
    model = double_model(**switches)
    two, weights = [Shard(model.config, rank, 2, "") for rank in range(2)], published_tensors(model)
    for name, tensor in weights.items():
        first, second = (shard.slice(name, tensor) for shard in two)
        dim = int(name.endswith(("o_proj.weight", "down_proj.weight")))
        if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias", ".mlp.gate.weight")):
            assert torch.equal(first, tensor) and torch.equal(second, tensor)
        else:
            assert torch.equal(torch.cat((first, second), dim).narrow(dim, 0, tensor.shape[dim]), tensor), name
    total = sum(t.nbytes for t in weights.values())
    parts = [sum(shard.slice(name, t).nbytes for name, t in weights.items()) for shard in two]
    assert all(0.4 < part / total < 0.6 for part in parts)  # 6 heads of 9, and half of all else
    scale = torch.arange(72.0)[:, None]  # of output channels, as fp8 weights have them
    assert torch.equal(two[1].slice("layers.0.self_attn.q_proj.weight_scale", scale), scale[48:])
    assert torch.equal(two[1].slice("layers.0.self_attn.o_proj.weight_scale", scale), scale)
    with pytest.raises(ModelError, match=r"wrong shapes: layers.0.self_attn.q_proj.weight \[71, 72\]"):
        two[0].slice("layers.0.self_attn.q_proj.weight", torch.ones(71, 72))


@torch.inference_mode()
def test_joined_matrices_of_a_file_are_split_before_they_are_sliced(tmp_path: Path) -> None:
    write_family("phi3", tmp_path)
    config, sizes = Config(model_path=str(tmp_path)), read_model_config(read_config(tmp_path))
    load = lambda shard=None: load_model(config, sizes, tmp_path, torch.float32, CPU, shard)  # noqa: E731
    whole = published_tensors(load())
    # On six ranks q, k and v are no longer in the proportions that they have in the file.
    for shard in (Shard(sizes, rank, size, "") for size in (2, 6) for rank in range(size)):
        for block, index in zip(load(shard).layers, range(3), strict=True):
            for part, names in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
                owner = "self_attn" if part == "qkv_proj" else "mlp"
                names = [f"layers.{index}.{owner}.{name}_proj.weight" for name in names]
                want = torch.cat([shard.slice(name, whole[name]) for name in names])
                assert torch.equal(getattr(block, part).weight, want), names


@torch.inference_mode()
def test_random_weights_have_the_same_routers_on_all_ranks(tmp_path: Path) -> None:
    config, sizes = Config(model_path=str(tmp_path), load_format="dummy"), mixture_model().config
    first, second = (load_model(config, sizes, tmp_path, torch.float32, CPU, Shard(sizes, rank, 2, ""))
                     for rank in range(2))  # fmt: skip
    for layer in MIXTURE["sparse"]:
        one, other = (model.layers[layer] for model in (first, second))
        assert torch.equal(one.router.weight, other.router.weight) and one.router.weight.std() > 0.01
        assert one.experts.layer.down_proj.shape == (6, 72, 32) and other.experts.layer.down_proj.shape == (6, 72, 16)


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"--dist-init-addr {address}: machine 0 cannot listen there: the port is"):
            open_store(RankPlace(0, 2, 0, address), 1.0)


def test_an_address_at_which_nobody_is_is_one_line() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=f"--dist-init-addr {address}: nobody answered in 1 s .*start machine 0 first"):
        open_store(RankPlace(1, 2, 0, address), 1.0)


def test_an_address_that_is_not_machine_0_s_is_one_line() -> None:
    address = f"203.0.113.9:{free_port()}"  # of nobody, kept for documentation
    said = f"--dist-init-addr {address}: machine 0 cannot be reached there; give an address of its own: "
    with pytest.raises(ValueError, match=said):
        open_store(RankPlace(0, 2, 0, address), 0.5)


def test_ranks_meet_at_an_address() -> None:
    address = f"localhost:{free_port()}"
    places = [RankPlace(rank, 2, 0, address) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(open_store, places[1], 10.0)  # before anybody listens there
        first = open_store(places[0], 10.0)
        first.set("word", "met")
        assert later.result().get("word") == b"met"


def test_more_ranks_than_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="--tp-size: 4 ranks on this machine need a GPU each, and it has 2; give"):
        gather(Config(model_path="x", tp_size=4), torch.device("cuda"))


def test_a_process_is_a_rank_of_one_model(pair: Pair) -> None:
    with pytest.raises(ValueError, match="--tp-size 2: this process is a rank of another model"):
        gather(Config(model_path="x", tp_size=2), torch.device("cpu"))


def test_ranks_that_do_not_come_are_counted(tmp_path: Path) -> None:
    place = RankPlace(0, 3, 0, str(tmp_path / "meet"))
    with pytest.raises(RuntimeError, match=r"--tp-size 3: only 1 ranks met within 0.2 s \(--dist-timeout\)"):
        join(place, open_store(place, 1.0), torch.device("cpu"), 0.2)


def test_a_step_that_fails_on_rank_0_is_nothing_to_go_on_from(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = pair.build(SUBJECTS["none"].model(), Plain(), running=1)
    monkeypatch.setattr(parallel, "PATIENCE", 0.0)

    def broken(*given: object) -> None:
        raise RuntimeError("the wire\nis cut")

    said = "failed on rank 0, and the others of --tp-size 2 cannot .*; start the server again: .*: the wire is cut"
    try:
        for name, where in (("broadcast", dist), ("begin", scheduler.engine.link)):
            monkeypatch.setattr(where, name, broken)
            monkeypatch.setattr(pair.ranks, "parted", name == "begin")  # or rank 1 would be told of a step to wait in
            with pytest.raises(parallel.RanksParted, match=said), torch.inference_mode():
                scheduler.engine.launch([], PLAIN, ())
            assert pair.ranks.parted
        scheduler.fail_all(RuntimeError())  # says nothing to the others, which do not listen
    finally:
        monkeypatch.undo()
        pair.ranks.parted = False
    assert not issubclass(parallel.RanksParted, Exception)  # a server that goes on after an error does not after this


def test_torchrun_says_which_rank_a_process_is() -> None:
    config = Config(model_path="x", tp_size=4, nnodes=2, node_rank=1, dist_init_addr="here:1")
    assert config.first_rank({}) == 2
    assert config.first_rank({"TORCHELASTIC_RUN_ID": "7", "WORLD_SIZE": "4", "RANK": "3"}) == 3
    with pytest.raises(ValueError, match="--tp-size 4: torchrun has started 2 processes"):
        config.first_rank({"TORCHELASTIC_RUN_ID": "7", "WORLD_SIZE": "2", "RANK": "1"})


def test_a_follower_is_told_its_flags_and_ends_with_its_parent(tmp_path: Path) -> None:
    config = Config(model_path="x", tp_size=2, cuda_graph_bs=(2, 1))
    place = RankPlace(1, 2, 1, str(tmp_path / "meeting"))
    told = described(config, place)
    assert pickle.loads(told) == (config, place)
    read = "import pickle, sys; pickle.load(sys.stdin.buffer); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", read], input=told, capture_output=True).stdout == b"False\n"
    process = subprocess.Popen(RankProcess.COMMAND, stdin=subprocess.PIPE, process_group=0)
    process.stdin.write(told)
    process.stdin.close()  # as when the parent has ended
    assert process.wait(120) == -signal.SIGKILL


# ---- (c) how far float32 on two ranks is from one ----------------------------------------------------------------


def logits_of(scheduler: Scheduler, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the logits [T - 1, V] behind all tokens of each text but the last, made as scores of a prompt are."""
    model, found = scheduler.engine.model, []
    for ids in texts:
        seen: list[torch.Tensor] = []
        inner = model.logits
        model.logits = lambda hidden: (seen.append(out := inner(hidden)), out)[1]  # noqa: B023  called within this turn
        try:
            run(scheduler, [request("again", list(ids), max_new_tokens=1, logprobs=Logprobs(start=0))])
        finally:
            del model.logits
        # A step's first logits are those behind its chunks; then come the rows that were asked for.
        found.append(torch.cat([out.reshape(-1, out.shape[-1]) for out in seen if len(out) > 0][1:]))
        assert len(found[-1]) == len(ids) - 1, "one chunk, and all rows of it but the last"
    return found


@pytest.mark.parametrize("model_of", [sharp_model, mixture_model], ids=["dense", "experts"])
def test_in_float32_two_ranks_are_the_model_of_one(model_of: Callable[[], Model], pair: Pair) -> None:
    model = model_of()
    one, answers = build(model, Plain(), chunk=256), mixed_requests(8)
    run(one, answers)
    texts = [r.prompt_ids + r.output_ids for r in answers[:4]]
    logits = logits_of(one, texts)
    several, others = pair.build(model, Plain(), chunk=256), mixed_requests(8)
    run(several, others)
    assert [r.output_ids for r in answers] == [r.output_ids for r in others]
    apart = [a - b for a, b in zip(logits_of(several, texts), logits, strict=True)]
    assert 0 < max(float(part.abs().max()) for part in apart) < 1e-4
