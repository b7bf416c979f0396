"""Sampling: the distributions drawn from, the filters against sorting, penalties against transformers, the noise."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from minispec import sampling
from minispec.request import SamplingParams
from minispec.sampling import EVERYTHING, GREEDY, SamplingState, Wishes, adjust, gumbel, largest, pick

needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def rows_of(
    params: SamplingParams, seeds: list[int], vocab: int, prompt=(), output=(), stop_ids=(), full: bool = False
) -> Wishes:
    """Wishes that are equal and different seeds, through the state as the engine makes them."""
    state = SamplingState(len(seeds) + 1, vocab, "cpu")
    for slot, seed in enumerate(seeds, 1):
        state.assign(slot, params, seed, list(prompt), list(output), stop_ids)
    slots = torch.arange(1, len(seeds) + 1)
    return state.wishes(slots, EVERYTHING if full else state.needs(slots.tolist()))


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """Return z = (chi2 - dof) / sqrt(2 dof) over cells that are expected at all; nothing may fall elsewhere."""
    possible = expected > 0
    assert observed[~possible].sum() == 0
    gap = (observed[possible] - expected[possible]).double()
    dof = int(possible.sum()) - 1
    return float(((gap**2 / expected[possible]).sum() - dof) / math.sqrt(2 * max(dof, 1)))


# ------------------------------------------------------------------------------------------------------- largest


@pytest.mark.parametrize("rows", [1, 6, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_largest_is_argmax_also_of_equal_scores_and_nan(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    for _ in range(20):
        scores = torch.randn(rows, 49152, generator=generator).to(dtype)
        for row in scores:
            places = torch.randint(49152, (8,), generator=generator)
            kind = int(torch.randint(4, (1,), generator=generator))
            row[places] = (9.0, math.inf, math.nan, float(row.max()))[kind]
            if kind == 2:
                row[places[:4]] = math.inf
        assert torch.equal(largest(scores), scores.argmax(-1))
        assert torch.equal(largest(scores[None]), scores[None].argmax(-1))
        assert torch.equal(sampling._largest_of_shares(scores[None]), scores[None].argmax(-1))  # on CUDA


# ---------------------------------------------------------------------------------------------------------- noise


def uniforms(g: Tensor) -> Tensor:
    """Gumbel's distribution function, in double: uniform on [0, 1] if the noise is what it claims."""
    return torch.exp(-torch.exp(-g.double()))


@pytest.mark.parametrize("stretch", ["ids", "positions", "seeds", "both"])
def test_noise_is_standard_gumbel_along_every_axis(stretch: str) -> None:
    n = 200_000
    line, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    g = {
        "ids": lambda: gumbel(torch.tensor(5), torch.tensor(9), n),
        "positions": lambda: gumbel(zero + 5, line, 1)[:, 0],
        "seeds": lambda: gumbel(line, zero + 9, 1)[:, 0],
        "both": lambda: gumbel(line, line, 1)[:, 0],
    }[stretch]()
    assert abs(float(g.mean()) - 0.5772157) < 0.015 and abs(float(g.var()) - math.pi**2 / 6) < 0.03
    cells = torch.histc(uniforms(g), 256, 0, 1)
    assert abs(chi_square(cells, torch.full((256,), n / 256))) < 4.5


def test_neighbouring_seeds_positions_and_ids_are_uncorrelated_and_never_shifted_copies() -> None:
    vocab, worst, seen = 4096, 0.0, 0
    bases = torch.tensor([0, 1, 42, -1, 2**31, 2**63 - 5, -(2**63)])
    for step_seed, step_position in ((1, 0), (0, 1), (1, -1), (1, 1), (2**32, 0), (0, 2)):
        seed, position = bases[:, None] + torch.arange(4) * step_seed, 100 + torch.arange(4) * step_position
        u = uniforms(gumbel(seed, position.expand_as(seed), vocab)) - 0.5
        for a in range(3):
            for shift in (-1, 0, 1):
                other = u[:, a + 1].roll(shift, -1)
                correlation = (u[:, a] * other).mean(-1) * 12
                worst = max(worst, float(correlation.abs().max()))
                seen += correlation.numel()
                assert (u[:, a] - other == 0).float().mean() < 0.01
    assert seen == 6 * 3 * 3 * 7
    assert worst * math.sqrt(vocab) < 4.5
    lag = uniforms(gumbel(torch.tensor(1), torch.tensor(1), 1_000_000)) - 0.5
    for shift in (1, 2, 3, 16, 256, 49152):
        assert abs(float((lag * lag.roll(shift)).mean() * 12)) * 1000 < 4.5


def test_the_ends_of_the_bit_range_give_the_stated_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_bits", lambda *_: torch.tensor([0, -1, 1, -(2**31)], dtype=torch.int32))
    g = gumbel(torch.tensor(0), torch.tensor(0), 4).double()
    exact = [-math.log(-math.log1p(-u)) for u in (2.0**-33, 1 - 2.0**-24, 1.5 * 2.0**-32, 0.5)]
    assert torch.allclose(g, torch.tensor(exact, dtype=torch.float64), atol=2e-6)


def scalar_bits(seed: int, position: int, token: int) -> int:
    """The generator again, in Python's unbounded integers."""
    m32, m64 = 2**32 - 1, 2**64 - 1

    def finalize(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & m64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & m64
        return x ^ (x >> 31)

    key = finalize(finalize((seed & m64) ^ 0x9E3779B97F4A7C15) ^ (position & m64))
    x = token ^ (key & m32) ^ 2**31
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & m32
    x ^= (key >> 32) ^ 2**31
    x = ((x ^ (x >> 15)) * 0x735A2D97) & m32
    return x ^ (x >> 15)


SEEDS = [0, 1, -1, 12345, 2**31, 2**32 + 7, 2**63 - 1, -(2**63)]


def test_bits_equal_the_generator_in_unbounded_integers() -> None:
    """Wrapping products, logical shifts and casts, at any seed: what every device and compiler must reproduce."""
    bits = sampling._bits(torch.tensor(SEEDS), torch.arange(8) * 1000, 300).to(torch.int64) & 0xFFFFFFFF
    expected = [[scalar_bits(seed, 1000 * i, token) for token in range(300)] for i, seed in enumerate(SEEDS)]
    assert bits.tolist() == expected


@needs_compiler
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_compiled_bits_are_the_eager_bits(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    seed, position = torch.tensor(SEEDS, device=device)[:, None], torch.arange(125_000, device=device) * 1000

    def both(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        return sampling.uniform(seed, position, 2), gumbel(seed, position, 2)

    for compiled, eager in zip(torch.compile(both, fullgraph=True, dynamic=False)(seed, position),
                               both(seed, position), strict=True):  # fmt: skip
        assert compiled.shape == (8, 125_000, 2) and torch.equal(compiled, eager)


@needs_compiler
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_compiled_filters_keep_the_ids_that_eager_ones_keep(device: str) -> None:
    """100,000 rows whose likeliest tokens are close to each other, each with its own temperature, top-p and min-p."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(3)
    compiled = torch.compile(sampling._filtered, fullgraph=True, dynamic=False)
    for _ in range(10):
        gap = torch.rand(10_000, 64, device=device) * 3
        gap -= gap.amin(-1, keepdim=True)
        row = rows_of(SamplingParams(temperature=1.0), [0], 64, [], [], full=True)
        spread = [torch.rand(10_000, device=device) for _ in range(3)]
        wishes = row._replace(
            seed=torch.zeros(10_000, dtype=torch.int64, device=device), temperature=0.3 + spread[0],
            inverse_temperature=1 / (0.3 + spread[0]),
            top_k=torch.full((10_000,), 50, device=device), top_p=spread[1],
            # Thresholds that shares come upon exactly: those of the tokens themselves.
            min_p=(gap[:, 7] * -(1 / (0.3 + spread[0]))).exp(),
        )  # fmt: skip
        assert torch.equal(compiled(gap, wishes), sampling._filtered(gap, wishes))


# ----------------------------------------------------------------------------------------------- the law of `pick`

LOGITS = torch.tensor([2.0, 1.4, 1.1, 0.3, -0.2, -0.9, -3.0, -torch.inf])


def softmax(x: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in x)
    return [math.exp(v) / total for v in x]


def keep_best(p: list[float], enough: Callable[[int, float], bool]) -> list[float]:
    """Take tokens from the likeliest down until `enough(how many, mass)`, and renormalise."""
    kept, mass = [0.0] * len(p), 0.0
    for n, i in enumerate(sorted(range(len(p)), key=lambda i: -p[i]), 1):
        kept[i] = p[i]
        mass += p[i]
        if enough(n, mass):
            break
    return [v / mass for v in kept]


def penalised(logits: list[float], repetition: float, frequency: float, presence: float, prompt, output) -> list[float]:
    out = []
    for i, v in enumerate(logits):
        if i in prompt or i in output:
            v = v / repetition if v > 0 else v * repetition
        out.append(v - frequency * output.count(i) - presence * (i in output))
    return out


RAW = LOGITS.tolist()
PROMPT, OUTPUT = [0, 4, 4], [1, 1, 3]
LAWS: dict[str, tuple[dict, list[float]]] = {
    "plain": ({}, softmax(RAW)),
    "hot": ({"temperature": 2.5}, softmax([v / 2.5 for v in RAW])),
    "cold": ({"temperature": 0.3}, softmax([v / 0.3 for v in RAW])),
    "top_k": ({"top_k": 3}, keep_best(softmax(RAW), lambda n, _: n == 3)),
    "top_p": ({"top_p": 0.8}, keep_best(softmax(RAW), lambda _, mass: mass >= 0.8)),
    "min_p": ({"min_p": 0.2}, softmax([v if v - RAW[0] >= math.log(0.2) else -math.inf for v in RAW])),
    "top_k then top_p": (
        {"top_k": 3, "top_p": 0.75, "temperature": 1.5},
        keep_best(keep_best(softmax([v / 1.5 for v in RAW]), lambda n, _: n == 3), lambda _, mass: mass >= 0.75),
    ),
    "penalties": (
        {"repetition_penalty": 1.6, "frequency_penalty": 0.4, "presence_penalty": -0.5},
        softmax(penalised(RAW, 1.6, 0.4, -0.5, PROMPT, OUTPUT)),
    ),
    "bias": ({"logit_bias": {0: -1.0, 6: 4.0}}, softmax([v + {0: -1.0, 6: 4.0}.get(i, 0) for i, v in enumerate(RAW)])),
    "min_new": ({"min_new_tokens": 4}, softmax([-math.inf if i in (0, 2) else v for i, v in enumerate(RAW)])),
}


@pytest.mark.parametrize("name", LAWS)
def test_picks_have_the_law_of_the_processed_softmax(name: str) -> None:
    wishes, law = LAWS[name]
    seeds, positions = 50, 1200
    rows = rows_of(SamplingParams(**wishes), list(range(seeds)), 8, PROMPT, OUTPUT, [0, 2])
    picks = torch.stack([pick(LOGITS.expand(seeds, 8), rows, torch.full((seeds,), p)) for p in range(positions)])
    drawn = torch.bincount(picks.flatten(), minlength=8).float()
    assert drawn.sum() == seeds * positions
    assert chi_square(drawn, torch.tensor(law) * seeds * positions) < 4.5


def test_a_row_picks_the_same_alone_in_any_company_and_with_every_member_filled() -> None:
    torch.manual_seed(0)
    vocab = 64
    wishes = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.6, frequency_penalty=0.5),
        SamplingParams(min_p=0.1, repetition_penalty=1.3),
        SamplingParams(temperature=2.0, logit_bias={3: 5.0}),
        SamplingParams(top_k=1),
    ]
    state = SamplingState(9, vocab, "cpu")
    for slot, params in enumerate(wishes, 1):
        state.assign(slot, params, 100 + slot, [slot, 5], [7, 7], [9])
    slots = torch.arange(1, 8)
    compared = 0
    for position in range(30):
        logits = torch.randn(7, vocab) * 2
        where = torch.full((7,), position)
        together = pick(logits, state.wishes(slots, state.needs(slots.tolist())), where)
        assert torch.equal(together, pick(logits, state.wishes(slots, EVERYTHING), where))
        for row in range(7):
            alone = pick(logits[row : row + 1], state.wishes(slots[row : row + 1], state.needs([row + 1])), where[:1])
            assert alone == together[row]
            compared += 1
    assert compared == 210


# ----------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("company", [None, 1.0])
@pytest.mark.parametrize("wishes", [{"temperature": 0.0}, {"temperature": 9e-7}, {"temperature": 1.5, "top_k": 1}])
def test_greedy_takes_the_lowest_id_of_the_largest_logits(company: float | None, wishes: dict) -> None:
    vocab, state = 49152, SamplingState(3, 49152, "cpu")
    state.assign(1, SamplingParams(**wishes, top_p=0.5), 1, [], [], [])
    if company:
        state.assign(2, SamplingParams(temperature=company, top_k=50), 2, [], [], [])
    for ties in ([0, 1], [17, 48000], [49150, 49151], [5, 7, 9, 30000]):
        logits = (torch.randn(2, vocab) * 0.1).clamp(max=0.5)
        logits[:, ties] = 20.0
        hosts = [1, 2] if company else [1]
        wishes = state.wishes(torch.tensor(hosts), state.needs(hosts))
        picks = pick(logits[: len(hosts)], wishes, torch.tensor([3, 3])[: len(hosts)])
        assert picks[0] == ties[0]


def test_tiny_temperature_still_draws_by_its_law_between_close_candidates() -> None:
    """Two logits of 900 one rounding step apart: added to them, noise of 1e-4 would drown; taken from the gap not."""
    logits = torch.tensor([[900.0, 900.0 + 2.0**-14, -5.0, 899.0]])
    gap = 2.0**-14 / 1e-4
    rows = rows_of(SamplingParams(temperature=1e-4), [3], 4)
    drawn = torch.bincount(torch.cat([pick(logits, rows, torch.tensor([p])) for p in range(8000)]), minlength=4).float()
    odds = math.exp(gap) / (1 + math.exp(gap))
    assert chi_square(drawn, torch.tensor([1 - odds, odds, 0, 0]) * 8000) < 4.5


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 1.0, 1e6])
def test_extreme_logits_never_give_a_masked_token_nor_leave_the_range(temperature: float) -> None:
    vocab = 1000
    logits = torch.full((4, vocab), -torch.inf)
    logits[0, 7] = 0.0
    logits[1, [7, 8]] = 3e38
    logits[2, [7, 8]] = torch.tensor([-3e38, -3.1e38])
    logits[3] = torch.nan
    for wishes in ({}, {"top_p": 1e-9}, {"top_k": 500, "top_p": 0.99, "min_p": 1.0}):
        rows = rows_of(SamplingParams(temperature=temperature, **wishes), [1, 2, 3, 4], vocab)
        for position in range(20):
            picks = pick(logits, rows, torch.full((4,), position)).tolist()
            assert picks[0] == 7 and picks[1] in (7, 8) and picks[2] == 7 and 0 <= picks[3] < vocab


# --------------------------------------------------------------------------------------------------- the kept sets


def kept(logits: Tensor, params: SamplingParams) -> Tensor:
    """The set pick draws from, [B, V] bool."""
    rows = rows_of(params, list(range(len(logits))), logits.shape[1], full=True)
    gap = logits.amax(-1, keepdim=True) - logits
    return ~sampling._filtered(gap, rows)


def test_top_k_keeps_what_sorting_keeps_with_ties_at_the_threshold() -> None:
    torch.manual_seed(1)
    for vocab in (5, 100, 49152):
        for logits in (torch.randn(3, vocab), torch.randn(3, vocab).mul(3).round(), torch.zeros(3, vocab)):
            logits[1, : vocab // 2] = -torch.inf
            for k in (1, 2, 3, vocab // 2 + 1, vocab - 1):
                threshold = logits.sort(-1, descending=True).values[:, k - 1 : k]
                expected = logits >= threshold
                got = kept(logits, SamplingParams(top_k=k)) if k > 1 else kept_by_rows(logits, top_k=k)
                assert torch.equal(got, expected)


def kept_by_rows(logits: Tensor, **members: float) -> Tensor:
    """As `kept`, for values that the state would turn into something simpler."""
    rows = rows_of(SamplingParams(), list(range(len(logits))), logits.shape[1], full=True)
    rows = rows._replace(**{k: torch.full_like(getattr(rows, k), v) for k, v in members.items()})
    return ~sampling._filtered(logits.amax(-1, keepdim=True) - logits, rows)


def reference_top_p(logits: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Sort-based in double: what surely stays and what may stay, a hair's breadth of mass apart."""
    p = torch.softmax(logits.double() / temperature, -1)
    order = p.sort(-1, descending=True)
    before = order.values.cumsum(-1) - order.values
    sets = []
    for slack in (-1e-6, 1e-6):
        keep = before < top_p + slack * top_p
        keep[:, 0] = True
        threshold = torch.where(keep, order.values, 2.0).amin(-1, keepdim=True)
        sets.append(p >= threshold * (1 - 1e-12))
    return sets[0], sets[1]


@pytest.mark.parametrize("vocab", [6, 200, 49152])
@pytest.mark.parametrize("temperature", [1e-4, 0.7, 3.0])
def test_top_p_keeps_the_smallest_set_that_sorting_finds(vocab: int, temperature: float) -> None:
    torch.manual_seed(2)
    sizes = set()
    for logits in (torch.randn(3, vocab) * 3, torch.randn(3, vocab).mul(2).round(), torch.randn(3, vocab) * 0.01):
        logits[1, 1::2] = -torch.inf
        for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999):
            got = kept(logits, SamplingParams(top_p=top_p, temperature=temperature))
            low, high = reference_top_p(logits, temperature, top_p)
            assert (got | ~low).all() and (high | ~got).all()
            assert got.gather(1, logits.argmax(-1, keepdim=True)).all()
            sizes |= set(got.sum(-1).tolist())
    assert len(sizes) > 1 or (vocab, temperature) == (6, 1e-4)


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 5.0])
def test_min_p_keeps_what_reaches_its_share_of_the_largest(temperature: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(4, 2000) * 3
    for min_p in (1e-6, 0.01, 0.3, 0.99, 0.9999):
        p = torch.softmax(logits.double() / temperature, -1)
        ratio = p / p.amax(-1, keepdim=True)
        sure = (ratio / min_p - 1).abs() > 1e-4
        got = kept(logits, SamplingParams(min_p=min_p, temperature=temperature))
        assert torch.equal(got[sure], (ratio >= min_p)[sure]) and sure.float().mean() > 0.95
        assert got.any(-1).all()


def test_a_row_without_a_filter_passes_through_whatever_its_neighbours_want() -> None:
    torch.manual_seed(4)
    vocab, state = 300, SamplingState(4, 300, "cpu")
    state.assign(1, SamplingParams(top_p=0.5), 1, [], [], [])
    state.assign(2, SamplingParams(), 2, [], [], [])
    state.assign(3, SamplingParams(top_k=4, min_p=0.2), 3, [], [], [])
    logits = torch.randn(3, vocab) * 40  # many masses below the unit of the sums
    logits[1, 0] = -torch.inf
    wishes = state.wishes(torch.tensor([1, 2, 3]), state.needs([1, 2, 3]))
    stays = ~sampling._filtered(logits.amax(-1, keepdim=True) - logits, wishes)
    assert stays[1].all() and not stays[0].all() and 1 <= int(stays[2].sum()) <= 4


# --------------------------------------------------------------------------------------------- penalties and state


def test_repetition_penalty_equals_transformers_bit_for_bit() -> None:
    torch.manual_seed(5)
    vocab, prompt, output = 500, [3, 3, 77, 499, 0], [10, 3, 11]
    logits = torch.randn(1, vocab) * 5
    logits[0, 77] = 0.0
    for penalty in (0.3, 1.1, 1.9):
        rows = rows_of(SamplingParams(repetition_penalty=penalty), [0], vocab, prompt, output)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
        assert torch.equal(adjust(logits, rows), expected)
        assert not torch.equal(adjust(logits, rows), logits)


def test_penalties_and_bias_follow_the_written_formula_in_order() -> None:
    wishes = {"repetition_penalty": 1.5, "frequency_penalty": -0.7, "presence_penalty": 1.1, "logit_bias": {1: 2.0}}
    rows = rows_of(SamplingParams(**wishes), [0], 8, PROMPT, OUTPUT)
    expected = penalised(RAW, 1.5, -0.7, 1.1, PROMPT, OUTPUT)
    expected[1] += 2.0
    assert torch.allclose(adjust(LOGITS[None], rows), torch.tensor([expected]))


def test_neutral_rows_come_out_bit_for_bit_in_fp32_and_bf16() -> None:
    logits = torch.randn(1, 1000) * 10
    rows = rows_of(SamplingParams(), [0], 1000, [1, 2], [3], full=True)
    assert torch.equal(adjust(logits, rows), logits)
    assert torch.equal(adjust(logits.bfloat16(), rows), logits.bfloat16().float())


def test_stop_ids_wait_for_min_new_tokens_and_not_longer() -> None:
    state, slot = SamplingState(2, 10, "cpu"), torch.tensor([1])
    logits = torch.zeros(1, 10)
    logits[0, [4, 6]] = torch.tensor([50.0, 40.0])
    state.assign(1, SamplingParams(min_new_tokens=3), 0, [1], [], [4, 6])
    for index in range(5):
        token = pick(logits, state.wishes(slot, state.needs([1])), torch.tensor([index + 1]))
        assert (int(token) == 4) == (index >= 3) and int(token) != 6
        state.commit(slot, token[:, None], torch.tensor([1]), counted=True)


def test_a_retracted_request_counts_its_output_again() -> None:
    """Assigned with its output it has the rows it had when it had just emitted them, and masks stop ids no longer."""
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2, min_new_tokens=3)
    slot, state, again = torch.tensor([1]), SamplingState(2, 9, "cpu"), SamplingState(2, 9, "cpu")
    state.assign(1, params, 5, [1, 2], [], [8])
    state.commit(slot, torch.tensor([[4, 4, 7, 0]]), torch.tensor([3]), counted=True)
    again.assign(1, params, 5, [1, 2], [4, 4, 7], [8])
    both = (s.wishes(slot, s.needs([1])) for s in (state, again))
    for name, ours, theirs in zip(Wishes._fields, *both, strict=True):
        if name == "stop_mask":
            assert ours is not None and theirs is None  # three outputs are there: nothing left to wait for
        else:
            assert (ours is None and theirs is None) or torch.equal(ours, theirs), name


def test_commit_adds_only_the_emitted_tokens_of_each_slot() -> None:
    state, slots = SamplingState(4, 6, "cpu"), torch.tensor([3, 1, 0, 0])
    for slot in (1, 2, 3):
        state.assign(slot, SamplingParams(presence_penalty=1.0), 0, [0], [5], [])
    tokens = torch.tensor([[2, 2, 4], [1, 3, 3], [5, 5, 5], [5, 5, 5]])
    state.commit(slots, tokens, torch.tensor([2, 1, 3, 1]), counted=True)
    rows = state.wishes(torch.tensor([1, 2, 3]), state.needs([1, 2, 3]))
    assert rows.counts is not None
    assert rows.counts.tolist() == [[0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1], [0, 0, 2, 0, 0, 1]]
    assert rows.outputs.tolist() == [2, 1, 3]


def test_a_reused_slot_never_sees_its_past() -> None:
    state, fresh = SamplingState(3, 12, "cpu"), SamplingState(3, 12, "cpu")
    everything = SamplingParams(
        repetition_penalty=1.9,
        frequency_penalty=1.0,
        logit_bias={2: 9.0},
        min_new_tokens=5,
        top_k=3,
        top_p=0.4,
        min_p=0.1,
    )
    later = SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, logit_bias={3: 1.0}, min_new_tokens=2)
    state.assign(1, everything, 1, [1, 2, 3], [4, 5], [6])
    state.commit(torch.tensor([1]), torch.tensor([[7, 8]]), torch.tensor([2]), counted=True)
    state.release(1)
    assert state.needs([1]) == GREEDY
    for s in (state, fresh):
        s.assign(1, later, 2, [9], [], [0])
    slot = torch.tensor([1])
    both = (s.wishes(slot, EVERYTHING) for s in (state, fresh))
    for name, ours, theirs in zip(Wishes._fields, *both, strict=True):
        assert torch.equal(ours, theirs), name


def test_rows_hold_only_what_some_request_wants() -> None:
    optional = ("temperature", "top_k", "top_p", "min_p", "counts", "prompt_seen", "bias", "stop_mask")
    cases = [
        ({"temperature": 0.0}, set()),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 7}, set()),
        ({}, {"temperature"}),
        ({"top_k": 10_000}, {"temperature"}),
        ({"top_p": 0.5}, {"temperature", "top_p"}),
        ({"temperature": 0.0, "presence_penalty": 1.0}, {"counts"}),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, {"counts", "prompt_seen"}),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, {"bias"}),
        ({"temperature": 0.0, "min_new_tokens": 1}, {"stop_mask"}),
    ]
    for wishes, expected in cases:
        state = SamplingState(3, 20, "cpu")
        state.assign(1, SamplingParams(**wishes), 0, [1], [], [2])
        rows = state.wishes(torch.tensor([1, 0]), state.needs([1, 0]))
        assert {name for name in optional if getattr(rows, name) is not None} == expected
        assert state.needs([1, 0]) == expected and state.needs([0, 2]) == GREEDY
    full = state.wishes(torch.tensor([1]), EVERYTHING)
    assert all(getattr(full, name) is not None for name in optional)


@pytest.mark.slow
@needs_compiler
def test_compiled_pick_is_the_eager_pick() -> None:
    torch.manual_seed(6)
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
    rows = rows_of(params, [1, 2], 257, [3, 4], [5], full=True)
    compiled = torch.compile(pick, fullgraph=True, dynamic=False)
    for position in range(20):
        logits, where = torch.randn(2, 257) * 4, torch.full((2,), position)
        assert torch.equal(compiled(logits, rows, where), pick(logits, rows, where))


def test_a_token_s_noise_is_the_same_float_in_every_shape() -> None:
    """Alone and in a batch, among all ids, some or one, in any order, for a tree's rows, and in compiled code."""
    torch.manual_seed(8)
    for vocab in (61, 4099):
        seed, position = torch.randint(-(2**62), 2**62, (5,)), torch.randint(0, 9999, (5,))
        whole, ids = gumbel(seed, position, vocab), torch.randperm(vocab)[: vocab // 2]
        assert torch.equal(gumbel(seed, position, ids), whole[:, ids])
        rows = gumbel(seed[:, None], position[:, None] + torch.arange(3), ids[:33])
        assert torch.equal(rows[:, 0], whole[:, ids[:33]])
        compiled = torch.compile(lambda *given: gumbel(*given) * 2, backend=seen_by_the_compiler, fullgraph=True)
        assert torch.equal(compiled(seed, position, ids), whole[:, ids] * 2)
        for row in range(5):
            assert torch.equal(gumbel(seed[row : row + 1], position[row : row + 1], vocab)[0], whole[row])
            for token in range(0, vocab, 1 + vocab // 20):
                assert gumbel(seed[row], position[row], torch.tensor([token])) == whole[row, token]


def seen_by_the_compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
    """A backend that asserts that the noise's logarithms are one operation, which a compiler does not make itself."""
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "log" in name] == ["minispec.log_log1p_"], called
    return graph.forward


def test_histograms_for_cuda_give_the_sums_of_those_for_a_cpu() -> None:
    torch.manual_seed(9)
    for vocab, reach in ((61, 3), (4099, 400), (4099, 3000)):
        digit = torch.randint(-reach, reach, (3, vocab), dtype=torch.int32)
        mass = torch.randint(0, 2**40, (3, vocab)).double()
        below = (mass * (digit < 0)).sum(-1, keepdim=True)
        assert torch.equal(below + sampling._sums_spread(digit, mass, 1024), sampling._sums(digit, mass, 1024))
        bits, goal = digit.abs(), mass.sum(-1) // 2
        assert torch.equal(*(sampling._radix(bits, mass, goal, spread) for spread in (True, False)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_the_cut_among_the_likeliest_is_that_of_a_search_of_all(dtype: torch.dtype) -> None:
    """Goals that the first id reaches, the last one that is sorted, the one behind it, all ids together, and none."""
    torch.manual_seed(10)
    for vocab, ties in ((100, 1), (4099, 1), (4099, 60)):
        bits = torch.stack([torch.randperm(vocab) // ties for _ in range(4)]).int()
        mass = torch.randint(0, 1000, bits.shape).to(dtype)
        in_order = mass.gather(1, bits.argsort(1)).cumsum(1)
        last = min(sampling.LIKELY, vocab) - 1
        for place in (0, 7, last - 1, last, min(last + 1, vocab - 1), vocab - 1):
            goal = in_order[:, place] + torch.tensor([0, 0, 1, 2 * vocab * 1000])
            want = [next((t for t in range(vocab) if mass[row][bits[row] <= t].sum() >= goal[row]), 2**31 - 1)
                    for row in range(4)]  # fmt: skip
            assert sampling._cut(bits, mass, goal).tolist() == want


@pytest.mark.parametrize("vocab", [2, 49152, 128256, 131073])
def test_sums_of_probabilities_are_whole_numbers_that_fp64_has(vocab: int) -> None:
    """So no order of summation changes which tokens top-p keeps. The most that a sum can be: all are the likeliest."""
    unit = sampling._mass_unit(vocab)
    assert unit == int(unit) and 2**52 < int(unit) * 2 * vocab and int(unit) * vocab <= 2**53
    torch.manual_seed(vocab)
    mass = (torch.rand(vocab) * unit).floor().double()
    exact = sum(map(int, mass.tolist()))
    assert all(int(mass[torch.randperm(vocab)].cumsum(0)[-1]) == exact for _ in range(5))
