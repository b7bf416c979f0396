"""A text and its numbers are one in bfloat16, whatever drafts and whatever runs beside it, and each cause is seen.

The tiny model's log-probabilities are compared to the last bit, since a text of its few tokens seldom changes: where a
row depends on another, they do. Each cause that `rowwise.py` removes is put back, and numbers must then differ.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conformance import random_head
from exactness import (
    CONTEXT,
    VOCAB,
    Oracle,
    any_ids,
    build,
    finish,
    request,
    run,
    submit,
    tiny_config,
    tiny_model,
    truth_of,
)
from test_policy import adversary
from torch import Tensor

from minispec.attention import AttendKind
from minispec.beam import BeamDrafter
from minispec.config import Config
from minispec.cpu import rowwise
from minispec.cpu.gather import PagedGather
from minispec.cpu.int4 import quantize_to_int4
from minispec.cpu.int8 import replace_weights
from minispec.cpu.rowwise import PagedChains, RopeTable, RowNorm, keep_rows_apart, round_as_eager
from minispec.cpu.template import Blocks, reason_against, reason_against_int4, unblocked
from minispec.dflash import DFlashConfig, DFlashDrafter, DFlashHead
from minispec.drafter import Drafter, HostDrafter, Plain
from minispec.dspark import DSparkConfig, DSparkDrafter, DSparkHead
from minispec.eagle import Eagle3Head, EagleHead
from minispec.kv import PagedKV
from minispec.load.build import Build
from minispec.load.tokenizer import byte_tokenizer
from minispec.lookup import Lookups
from minispec.model import Model, RMSNorm, Rope
from minispec.mtp import MtpHead
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.replicas.wire import packed
from minispec.request import Logprobs, Request
from minispec.scheduler import Scheduler
from minispec.serve.parse import choice_seed, parse_generate
from minispec.serve.reply import Served
from minispec.server import _tokenized
from minispec.standalone import DraftModel, StandaloneDrafter

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(reason_against(BF16) is not None, reason=f"no template: {reason_against(BF16)}")
SIZES: dict[str, Any] = {"hidden_size": 64, "heads": 8, "kv_heads": 4}  # multiples of 32 inputs
KINDS: dict[str, dict[str, Any]] = {
    "dense": {}, "windowed": {"sliding_window": 20, "sliding": (0, 2)}, "biases": {"qkv_bias": True},
    "sparse": {"sparse": (0, 2), "experts": 4, "experts_per_token": 2, "expert_size": 32},
}  # fmt: skip
LENGTHS = (1, 15, 16, 17, 33, 64, 65, 100, 191, 192, 193, 200)  # of prefixes; see `PIECE` of rowwise.py
Numbers = list[tuple[list[int], list[float]]]


QUANTIZED: dict[str, Callable[[Model], None]] = {"int8": replace_weights, "int4": quantize_to_int4}


def model_of(kind: str) -> Model:
    """Return a tiny model in bfloat16 whose rows are kept apart."""
    with torch.inference_mode():
        model = tiny_model(**SIZES, **KINDS.get(kind, {})).to(BF16).requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)  # times 1 no number would be rounded
        if kind in QUANTIZED:
            QUANTIZED[kind](model)
        keep_rows_apart(model)
        model.rope = RopeTable(model, CONTEXT)  # type: ignore[method-assign]
    return model


@pytest.fixture(scope="module")
def dense() -> Model:
    return model_of("dense")


@pytest.fixture(scope="module")
def dense_alone(dense: Model) -> Numbers:
    """What eight requests get alone, without drafts."""
    return alone(dense, 8, new=24)


def kind_for(of: PagedKV, *args: Any) -> Any:
    """Return the attention of a target, as `Build.engine_of` chooses it."""
    return PagedChains(of, *args)


def served(model: Model, running: int, nodes: int = 1, kind: AttendKind = kind_for, **options: Any) -> Scheduler:
    """Return a scheduler; nodes: those of trees in which the true continuation hides."""
    drafter = Oracle(truth_of(model), nodes=nodes, seed=running) if nodes > 1 else Plain()
    return build(model, drafter, running=running, kind=kind, **{"radix": False, **options})


def asked(count: int, new: int = 64, **params: Any) -> list[Request]:
    """Return requests of very different lengths that ask for log-probabilities of prompt and output."""
    rng = random.Random(3)
    lengths = [5, 150, 33, 1, 90, 64, 12, 170, 40, 2, 100, 70][:count]
    return [request(f"r{i}", any_ids(length, rng), max_new_tokens=new, logprobs=Logprobs(top=2), sampling_seed=i,
                    **params) for i, length in enumerate(lengths)]  # fmt: skip


def numbers(scheduler: Scheduler, requests: Sequence[Request], at_once: int) -> Numbers:
    """Serve requests, so many at once; returns the ids and the log-probabilities of each."""
    for first in range(0, len(requests), at_once):
        run(scheduler, requests[first : first + at_once])
    return [(r.output_ids, [x for s in r.output_scores for x in (s.logprob, *(p for _, p in s.top))]) for r in requests]


def alone(model: Model, count: int, **params: Any) -> Numbers:
    """Return what each request gets alone, without drafts."""
    return numbers(served(model, 1), asked(count, **params), 1)


def test_a_text_and_its_numbers_are_one_in_any_batch_with_any_drafts(dense: Model) -> None:
    truth = alone(dense, 12)
    assert len({tuple(ids) for ids, _ in truth}) == 12
    for running, nodes in ((1, 8), (2, 2), (5, 8), (12, 1), (12, 8)):
        count = min(running + 1, 12)
        assert numbers(served(dense, running, nodes), asked(count), running) == truth[:count], (running, nodes)


def as_drafted(model: Model) -> Model:
    """Return a target as drafters see it, before its rows are kept apart."""
    with torch.inference_mode():
        other = tiny_model(**SIZES).to(BF16).requires_grad_(False)
        other.load_state_dict({k: v for k, v in model.state_dict().items() if k in other.state_dict()}, strict=False)
    return other


def block_of(kind: type[Any], config: type[Any], **more: Any) -> Callable[[Model], Any]:
    """Return how a random network that drafts a block is made."""

    def make(model: Model) -> Any:
        shape = dataclasses.replace(model.config.plain(), layers=2, qk_norm=True)
        network = kind(config(kind.name, shape, (1, 2), block_size=6, mask_token=VOCAB - 2, **more), model)
        for name, parameter in network.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.3)
        return network.to(BF16)

    return make


def heads(kind: type[Any], **switches: Any) -> Callable[[Model], Drafter]:
    """Return how a drafter around a random head is made, with trees of two sizes."""
    return lambda model: BeamDrafter(random_head(kind, model, **switches).to(BF16), rounds=3, topk=3, nodes=8,
                                     smaller=[(1, 3)])  # fmt: skip


def itself(model: Model) -> StandaloneDrafter:
    """Return a model that drafts for itself, and is mostly right."""
    return StandaloneDrafter(DraftModel(model, VOCAB), rounds=3, topk=3, nodes=8, smaller=[(1, 3)])


DRAFTERS: dict[str, Callable[[Model], Drafter | HostDrafter]] = {
    "ngram": lambda model: NgramDrafter(NgramOptions(nodes=8)),
    "eagle": heads(EagleHead), "eagle3": heads(Eagle3Head, taps=(1, 2)), "mtp": heads(MtpHead), "standalone": itself,
    "lookups": lambda model: Lookups(itself(model), NgramDrafter(NgramOptions(nodes=10), limited=True), VOCAB),
    "dflash": lambda model: DFlashDrafter(block_of(DFlashHead, DFlashConfig)(model), block=6, nodes=8, topk=2),
    "dspark": lambda model: DSparkDrafter(block_of(DSparkHead, DSparkConfig, rank=16)(model), block=6, nodes=8, topk=2),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_gives_the_same_numbers_with_changing_shapes_overlap_and_retraction(
    name: str, dense: Model, dense_alone: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowwise, "NEAR", 1 << 17)  # so that keys of one to four requests are copied together
    with torch.inference_mode():
        drafter = DRAFTERS[name](as_drafted(dense))
    attend = lambda of, *args: (PagedChains if of.pool is of.pools[0] else PagedGather)(of, *args)  # noqa: E731
    scheduler = build(dense, drafter, running=6, kind=attend, pages=34, overlap=True, adaptive=True)
    scheduler.policy.forced = adversary(1)  # each step has a shape by chance, plain ones among them
    requests = asked(6, new=24)
    assert numbers(scheduler, requests, 6) == dense_alone[:6]
    assert len(scheduler.metrics.shapes) > 1 and (any(r.retractions for r in requests) or name == "standalone")


def test_a_request_that_moved_to_another_engine_goes_on_with_the_same_numbers(
    dense: Model, dense_alone: Numbers
) -> None:
    first, requests = served(dense, 6, 8), asked(6, new=24)
    submit(first, *requests)
    finish(first, lambda: min(len(r.output_ids) for r in requests) > 5)
    moved = packed(requests)
    assert all(5 < len(r.output_ids) < 24 for r in moved)
    assert numbers(served(dense, 4), moved, 4) == dense_alone[:6]


def test_chunks_cached_prefixes_and_retraction_change_no_number(dense: Model, dense_alone: Numbers) -> None:
    truth = dense_alone
    assert numbers(served(dense, 8, 8, chunk=32), asked(8, new=24), 8) == truth, "chunks of 32 tokens"
    scheduler = served(dense, 4, 8, radix=True)
    assert numbers(scheduler, asked(8, new=24), 4) == truth
    again = asked(8, new=24)
    assert numbers(scheduler, again, 4) == truth and any(r.cached_tokens for r in again), "from the prefix cache"
    text = any_ids(200, random.Random(4))
    cut = lambda: [request(f"c{n}", text[:n], max_new_tokens=8, logprobs=Logprobs(top=2)) for n in LENGTHS]  # noqa: E731
    again = cut()
    assert numbers(served(dense, 4, 8, radix=True), again, 4) == numbers(served(dense, 1), cut(), 1), "of many lengths"
    assert len({r.cached_tokens for r in again}) > 2
    tight, crowded = served(dense, 8, 8, pages=34), asked(8, new=24)
    assert numbers(tight, crowded, 8) == truth and any(r.retractions for r in crowded), "retracted"


def test_samples_with_penalties_and_filters_are_one(dense: Model) -> None:
    wishes = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2}
    truth = alone(dense, 6, new=24, **wishes)
    assert numbers(served(dense, 6, 8), asked(6, new=24, **wishes), 6) == truth


INT4 = pytest.param("int4", marks=pytest.mark.skipif(reason_against_int4(BF16) is not None, reason="no 4 bits here"))


@pytest.mark.parametrize("kind", ["windowed", "biases", "sparse", "int8", INT4])
def test_other_models_and_weights_keep_their_rows_apart(kind: str) -> None:
    model = model_of(kind)
    assert numbers(served(model, 5, 8), asked(5, new=24), 5) == alone(model, 5, new=24)


@pytest.mark.parametrize("kind", ["dense", INT4])
def test_a_block_has_the_same_bits_compiled_and_eager_for_one_row_and_for_many(kind: str, dense: Model) -> None:
    model = dense if kind == "dense" else model_of(kind)
    block, rope = model.layers[1], model.rope(torch.arange(7)[None])
    from torch._inductor import config  # after the first import of Inductor, which has its own order

    torch._dynamo.reset()
    with torch.inference_mode(), config.patch(emulate_precision_casts=False):  # which is put back
        round_as_eager(True)
        step = lambda x, rope: block(x, rope, lambda q, k, v: q + k.repeat(1, 2, 1, 1) * v.repeat(1, 2, 1, 1))  # noqa: E731
        compiled, x = torch.compile(step, fullgraph=True, dynamic=False), (3 * torch.randn(1, 7, 64)).to(BF16)
        many, eager = compiled(x, rope), step(x, rope)
        first = Rope(*(part[:, :, :1] for part in rope))
        one = compiled(x[:, :1], first)
    torch._dynamo.reset()
    assert torch.equal(many, eager) and torch.equal(many[:, :1], one)


def test_without_a_seed_a_request_has_42_and_answers_of_n_differ() -> None:
    assert Config().seed is None and Config(enable_deterministic_inference=True).seed == 42
    job = parse_generate({"input_ids": [[1, 2], [3]], "sampling_params": {"n": 2, "max_new_tokens": 1}})
    front: Any = SimpleNamespace(tokenizer=byte_tokenizer(256), facts=SimpleNamespace(
        limits=SimpleNamespace(context_length=64, longest_prompt=60)))  # fmt: skip
    for seed, expected in ((42, [42, choice_seed(42, 1)] * 2), (None, [None] * 4)):
        requests = _tokenized(job, front, Served("m", front.tokenizer, seed=seed))
        assert [r.params.sampling_seed for r in requests] == expected


@pytest.mark.parametrize(
    ("device", "options", "said"),
    [
        ("cuda", {}, "on CUDA no kernel is fixed"),
        ("cpu", {"tp_size": 3}, "the order in which 3 ranks add up (--tp-size) moves with the number of rows"),
        ("cpu", {"speculative_accept_threshold_acc": 0.5}, "sampled texts depend on drafts"),
        ("cpu", {"dtype": "float16"}, "float16 has none"),
    ],
)
def test_what_keeps_rows_together_is_refused(device: str, options: dict[str, Any], said: str) -> None:
    build = object.__new__(Build)
    build.config, build.device = Config(enable_deterministic_inference=True, **options), torch.device(device)
    build.rowwise, build.dtype, build.model_config = True, torch.float16, tiny_config()
    assert said in (build._reason_against_rowwise() or "")


# ---- each cause, put back ------------------------------------------------------------------------------------------


def one_row_by_another_product(patch: pytest.MonkeyPatch) -> None:
    by_template = Blocks.forward

    def forward(self: Blocks, x: Tensor, wide: bool = False) -> Tensor:
        if x.shape[:-1].numel() > 1:
            return by_template(self, x, wide)
        return F.linear(x.float(), unblocked(self.weight, self.features).float())

    patch.setattr(Blocks, "forward", forward)


def an_eager_norm_in_one_step(patch: pytest.MonkeyPatch) -> None:
    apart = RowNorm.forward
    patch.setattr(RowNorm, "forward", lambda self, x: (apart if x.shape[:2].numel() > 1 else RMSNorm.forward)(self, x))


def siblings_between_the_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("test_rowwise.PagedChains", PagedGather)


CAUSES = (one_row_by_another_product, an_eager_norm_in_one_step, siblings_between_the_keys)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_that_is_put_back_is_seen(
    cause: Callable[[pytest.MonkeyPatch], None], dense: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause(monkeypatch)
    assert numbers(served(dense, 2, 8), asked(2), 2) != alone(dense, 2)


def test_few_rows_and_halves_that_move_are_seen_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    look = rowwise.reason_against_attention.__wrapped__
    assert look(9, 3, 64) is None
    with monkeypatch.context() as few:
        few.setattr(rowwise, "LEAST_ROWS", 1)
        assert "products of 1 rows" in (look(9, 3, 64) or "")
    monkeypatch.setattr(rowwise, "reach_of", lambda rows: -(-rows // rowwise.STEP) * rowwise.STEP)
    assert "256 keys round otherwise" in (look(9, 3, 64) or "")
