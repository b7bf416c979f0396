"""From logits to a token: penalties, bias, masks, temperature, top-k, top-p, min-p, and noise that can be recomputed.

Sampling is an argmax. `argmax(logits + T * g)` with Gumbel noise g draws from softmax(logits / T), T the temperature.
Here g is a pure function of (request seed, absolute position, token id): a counter-based generator, as in Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3" (2011). So a seeded request picks the same token at the same position
in any batch, with any drafter and any tree (drafter-invariant decoding, arXiv 2408.07978). With T = 0 the same formula
is greedy decoding, so no branch is needed.

Top-k (arXiv 1805.04833), top-p (arXiv 1904.09751) and min-p (arXiv 2407.01082) keep every token whose logit is at least
a threshold, so tokens that tie at the threshold are all kept. Sorting the vocabulary to find the threshold of top-k or
top-p would be slow: `_radix` finds it from three histograms, and a CPU first looks among the likeliest tokens.

`Wishes` are the inputs of a batch's picks, and `Needs` the names of those inputs that some request of the batch uses.
`Needs` and shape decide which operations of a step run, so CUDA graphs are captured for each shape and a few `Needs`. B
is the number of requests, V the size of the vocabulary, R the number of slots.

Read next: `verify.py` for the walk that calls `pick`, `request.py` for the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.kv import upload
from minispec.operators import operator
from minispec.request import GREEDY_BELOW, SamplingParams

# ---------------------------------------------------------------------------------------------------------- noise


def _signed(constant: int) -> int:
    """Return a 64-bit constant as the int64 of the same bits."""
    return constant - 2**64 if constant >= 2**63 else constant


GOLDEN = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio; without it _mix64 would map seed 0 to 0
MIX64 = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _mix64(x: Tensor) -> Tensor:
    """Return SplitMix64's finalizer of x (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * MIX64[0]  # >> copies the sign bit; the mask makes it a logical shift
    x = (x ^ ((x >> 27) & (2**37 - 1))) * MIX64[1]
    x = x ^ ((x >> 31) & (2**33 - 1))
    # Inductor stores what as_strided reads. Else it would trace x twice at each of these lines, and at each line of
    # those that use it, two to the power of their number in all: compiling two picks took 15 s, and takes 7.
    return x.as_strided(x.shape, x.stride())


def _bits(seed: Tensor, position: Tensor, ids: int | Tensor) -> Tensor:
    """Return `[.., V] int32`, 32 uniform bits per token id from `seed, position [..] int64`; ids as in `uniform`.

    Seed and position are mixed into a 64-bit key one after the other: if they were added, (seed, position + 1) and
    (seed + 1, position) would share their noise. Each id is then hashed by hash-prospector's best two-multiply function
    (github.com/skeeto/hash-prospector, issue 19). Half of the key enters before each multiply: else two close keys
    would have the same noise, permuted among the ids. Integer products wrap around in torch on every device alike.
    """
    key = _mix64(_mix64(seed ^ GOLDEN) ^ position)[..., None]
    first, second = (((key >> shift) & 0xFFFFFFFF) - 2**31 for shift in (0, 32))  # in int32's range: casts are exact
    ids = torch.arange(ids, device=seed.device) if isinstance(ids, int) else ids
    x = ids.to(torch.int32) ^ first.to(torch.int32)
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = x ^ second.to(torch.int32)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


def uniform(seed: Tensor, position: Tensor, ids: int | Tensor) -> Tensor:
    """Return `[.., V] fp32`, uniform in [2^-33, 1 - 2^-24], for `seed [..] int64` (any value), `position [..] int64`.

    ids: `[V] int64`, or the number V for the ids 0 to V - 1. No token has a negative id, so the number drawn for a
    negative id is independent of all tokens' noise.
    """
    bits = _bits(seed, position, ids).to(torch.int64) & 0xFFFFFFFF
    return bits.float().mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)


def gumbel(seed: Tensor, position: Tensor, ids: int | Tensor) -> Tensor:
    """Return `[.., V] fp32` of standard Gumbel noise in [-2.9, 22.9]; the arguments are those of `uniform`.

    A token's noise must be the same float everywhere: alone or in a batch, among all ids or some, in compiled code or
    eager. The uniform numbers are integers and exact products, which every compiler computes alike. The logarithms are
    a custom operator, since a compiler's logarithm may differ in the last bit.
    """
    # -log(-log1p(-u)), u uniform. Large noise comes from u near 0, where log1p is precise.
    noise = uniform(seed, position, ids).neg_()
    torch.ops.minispec.log_log1p_(noise)
    return noise.neg_()


@operator("log_log1p_(Tensor(a!) x) -> ()")
def _log_log1p(x: Tensor) -> None:
    """Replace x by log(-log1p(x)); x is in (-1, 0)."""
    # In place: on a CPU allocating tensors of width V would take most of the time.
    x.log1p_().neg_().log_()


@operator("exp_(Tensor(a!) x) -> ()")
def _exp(x: Tensor) -> None:
    """Replace x by exp(x)."""
    x.exp_()


# ----------------------------------------------------------------------------------------------------------- pick


class Wishes(NamedTuple):
    """The inputs of one pick per request; a member that may be None is None if no request needs it."""

    temperature: Tensor | None  # [B] fp32; 0 or at least 1e-6; 0 is greedy; None if all requests are greedy
    inverse_temperature: Tensor  # [B] fp32, at most 1e6; has an effect only if temperature is given
    top_k: Tensor | None  # [B] int64, at least 1; the vocabulary size or more keeps all
    top_p: Tensor | None  # [B] fp32; 1 keeps all
    min_p: Tensor | None  # [B] fp32; 0 keeps all
    frequency: Tensor  # [B] fp32; has an effect only if counts is given
    presence: Tensor  # [B] fp32; has an effect only if counts is given
    repetition: Tensor  # [B] fp32; has an effect only if counts and prompt_seen are given
    seed: Tensor  # [B] int64
    min_new: Tensor  # [B] int64, the least number of output tokens; has an effect only if stop_mask is given
    outputs: Tensor  # [B] int64, the number of output tokens so far
    counts: Tensor | None  # [B, V] int32, how often each id was output
    prompt_seen: Tensor | None  # [B, V] bool, ids of the prompt
    bias: Tensor | None  # [B, V] fp32, added to the logits
    stop_mask: Tensor | None  # [B, V] bool, ids that may not be picked while outputs < min_new


def adjust(logits: Tensor, wishes: Wishes) -> Tensor:
    """Return `[B, V] fp32` logits after penalties, bias and the stop ids' mask, in this order.

    The repetition penalty (arXiv 1909.05858) concerns ids in prompt and output: it divides their positive logits and
    multiplies their negative ones. The frequency penalty times the count, and the presence penalty, are subtracted from
    the logits of ids in the output. Neutral values leave a request's logits unchanged, bit for bit.
    """
    logits = logits.float()
    if wishes.counts is not None:
        output = wishes.counts > 0
        if wishes.prompt_seen is not None:
            penalty = wishes.repetition[:, None]
            scaled = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(output | wishes.prompt_seen, scaled, logits)
        logits = logits - wishes.frequency[:, None] * wishes.counts - wishes.presence[:, None] * output
    if wishes.bias is not None:
        logits = logits + wishes.bias
    if wishes.stop_mask is not None:
        waiting = (wishes.outputs < wishes.min_new)[:, None]
        logits = logits.masked_fill(wishes.stop_mask & waiting, -torch.inf)
    return logits


ARGMAX_SHARES = 32  # thread blocks that look for the largest score of a row on CUDA


def largest(scores: Tensor) -> Tensor:
    """Return `[..] int64`, the argmax of `scores [.., V]`: the lowest id of equal ones; NaN counts as the largest.

    On a CPU `max` finds the index that `argmax` finds in a third of its time; tests compare them.
    """
    return _largest_of_shares(scores) if scores.is_cuda else scores.max(-1).indices


def _largest_of_shares(scores: Tensor) -> Tensor:
    """Return the same as `largest`, faster on CUDA, where one thread block would read a whole row and not a share."""
    shares = scores.unflatten(-1, (math.gcd(scores.shape[-1], ARGMAX_SHARES), -1))
    values, ids = shares.max(-1)
    best = values.argmax(-1, keepdim=True)
    return (best * shares.shape[-1] + ids.gather(-1, best)).squeeze(-1)


def pick(logits: Tensor, wishes: Wishes, position: Tensor) -> Tensor:
    """Return `[B] int64`, the token picked from each row of `logits [B, V]` at absolute `position [B] int64`.

    The order is `adjust`, temperature, top-k, top-p, min-p. Top-p is a share of the probability that top-k kept, as in
    vLLM. Min-p is relative to the largest probability, which no filter removes. Greedy requests take the largest
    adjusted logit, ties to the lowest id. The id is in range even if logits are NaN.
    """
    logits = adjust(logits, wishes)
    if wishes.temperature is None:
        return largest(logits)
    # `gap` is the distance below the maximum. Close floats subtract exactly, so likely tokens have exact gaps at any
    # temperature. A gap is never negative, so gaps and their bits as integers have the same order; `_cut` needs that.
    gap = logits.amax(-1, keepdim=True) - logits
    score = wishes.temperature[:, None] * gumbel(wishes.seed, position, logits.shape[1]) - gap
    if wishes.top_k is not None or wishes.top_p is not None or wishes.min_p is not None:
        score = score.masked_fill(_filtered(gap, wishes), -torch.inf)
    return largest(score)


# The same as `pick`, but a graph of torch.compile has its code once, however often the graph calls it. Written out, six
# picks took up to a minute to compile on CUDA. The region takes no two tensors that share memory.
pick_region = torch.compiler.nested_compile_region(pick)


def law(logits: Tensor, wishes: Wishes) -> Tensor:
    """Return `[B, V] fp32`, the probabilities with which `pick` draws; one-hot for a greedy request."""
    logits = adjust(logits, wishes)
    likeliest = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    if wishes.temperature is None:
        return likeliest
    gap = logits.amax(-1, keepdim=True) - logits
    scaled = gap * -wishes.inverse_temperature[:, None]
    if wishes.top_k is not None or wishes.top_p is not None or wishes.min_p is not None:
        scaled = scaled.masked_fill(_filtered(gap, wishes), -torch.inf)
    return torch.where(wishes.temperature[:, None] > 0, scaled.softmax(-1), likeliest)


SPREAD = 1024  # bins of `_sums_spread` that are not read


def _filtered(gap: Tensor, wishes: Wishes) -> Tensor:
    """Return `[B, V] bool`, the tokens that top-k, top-p and min-p remove; `gap [B, V] fp32` as in `pick`."""
    bits = gap.view(torch.int32)
    # The probability divided by the largest one. Tokens are kept or removed by its last bit. So the inverse of the
    # temperature is given, since compiled for CUDA a division is not exact, and the exponential is an operator.
    share = gap * -wishes.inverse_temperature[:, None]
    torch.ops.minispec.exp_(share)
    limit = torch.full_like(wishes.seed, 2**31 - 1, dtype=torch.int32)
    if wishes.top_k is not None:
        # A count that keeps all is one more than there are ids, which no cut reaches.
        goal = torch.where(wishes.top_k < bits.shape[1], wishes.top_k, bits.shape[1] + 1)
        limit = _cut(bits, torch.ones_like(bits), goal)
    if wishes.top_p is not None:
        mass = (share * (bits <= limit[:, None]) * _mass_unit(gap.shape[1])).floor().double()
        total = mass.sum(-1)
        goal = (total * wishes.top_p.double()).ceil()
        goal = torch.where(wishes.top_p < 1, goal, total + 1)  # top_p = 1 keeps all: no cut reaches total + 1
        limit = torch.minimum(limit, _cut(bits, mass, goal))
    gone = bits > limit[:, None]
    return gone if wishes.min_p is None else gone | (share < wishes.min_p[:, None])


def _mass_unit(vocab_size: int) -> float:
    """Return the integer that stands for the likeliest token's probability when the probabilities of V ids are summed.

    Floats that are summed in another order round differently, so two batch shapes could disagree about a threshold.
    These integers' sums are at most 2^53, so fp64 has all of them. Not int64, which CUDA adds with twice the kernels.
    """
    return 2.0 ** (53 - (vocab_size - 1).bit_length())


def _cut(bits: Tensor, mass: Tensor, goal: Tensor) -> Tensor:
    """Return `[B] int32`, the smallest t with sum(mass[bits <= t]) >= goal, or 2^31 - 1 if there is none.

    `bits [B, V] int32` are not negative; `mass [B, V]` is int32 and `goal [B]` int64, or both are fp64. Mass is whole
    and not negative, and a sum of it is at most 2^53, so no order of summation rounds.
    """
    return _radix(bits, mass, goal, spread=True) if bits.is_cuda else torch.ops.minispec.cut(bits, mass, goal)


LIKELY = 256  # ids that a CPU sorts before it makes histograms of all


# An operator, since which rows need histograms is a decision of the host.
@operator(
    "cut(Tensor bits, Tensor mass, Tensor goal) -> Tensor",
    lambda bits, mass, goal: torch.empty_like(goal, dtype=torch.int32),
)
def _cut_among_likely(bits: Tensor, mass: Tensor, goal: Tensor) -> Tensor:
    """Return what `_cut` returns, for a CPU: from the LIKELY smallest bits where their mass reaches the goal."""
    cut = torch.full_like(goal, 2**31 - 1, dtype=torch.int32)
    within = mass.sum(-1) >= goal  # false for a filter that keeps all
    if not within.any():
        return cut
    smallest, ids = bits.topk(min(LIKELY, bits.shape[1]), largest=False)
    reached = mass.gather(-1, ids).cumsum(-1) >= goal[:, None]
    likely = smallest.gather(-1, reached.to(torch.int8).argmax(-1, keepdim=True)).squeeze(-1)
    cut = torch.where(reached[:, -1], likely, cut)
    others = within & ~reached[:, -1]
    if others.any():
        cut[others] = _radix(bits[others], mass[others], goal[others], spread=False)
    return cut


def _radix(bits: Tensor, mass: Tensor, goal: Tensor, spread: bool) -> Tensor:
    """Return what `_cut` returns by a radix selection.

    t's 31 bits are found as digits of 11, 10 and 10 bits, each from one histogram. The sum of the largest digit is not
    needed: this digit is the answer if no smaller one reaches the goal. spread: as `_sums_spread` does it, for CUDA.
    """
    prefix = torch.zeros_like(goal, dtype=torch.int32)
    below = torch.zeros_like(goal)  # the mass of ids with bits below the prefix
    for shift, digits in ((20, 2048), (10, 1024), (0, 1024)):
        digit = (bits - prefix[:, None]) >> shift
        sums = below[:, None] + _sums_spread(digit, mass, digits) if spread else _sums(digit, mass, digits)
        short = sums < goal[:, None]
        prefix = prefix + (short.sum(-1) << shift).to(torch.int32)
        if spread:
            below = torch.maximum(below, (sums * short).amax(-1))
    return prefix


def _sums(digit: Tensor, mass: Tensor, digits: int) -> Tensor:
    """Return `[B, digits - 1]`, int64 or fp64, the mass at or below each digit but the largest; `digit [B, V] int32`.

    Ids with bits below the prefix have a negative digit. They fall into the first bin, so that every sum has them.
    """
    bins = digit.clamp(0, digits - 1).to(torch.int64)
    histogram = torch.zeros(len(digit), digits, dtype=mass.dtype, device=digit.device)
    return histogram.scatter_add_(1, bins, mass).cumsum(-1)[:, :-1]


def _sums_spread(digit: Tensor, mass: Tensor, digits: int) -> Tensor:
    """Return the same as `_sums` without the ids of negative digits, faster on CUDA.

    CUDA adds the ids of one bin one after the other, and in `_sums` nearly all could be in one bin. Here ids with
    negative digits, and ids beyond the digits, are spread over bins that are not read.
    """
    aside = digits + torch.arange(digit.shape[1], device=digit.device) % SPREAD
    bins = torch.where((digit >= 0) & (digit < digits), digit, aside)
    histogram = torch.zeros(len(digit), digits + SPREAD, dtype=mass.dtype, device=digit.device)
    return histogram.scatter_add_(1, bins, mass)[:, : digits - 1].cumsum(-1)


# ---------------------------------------------------------------------------------------------------------- state

_unbind_copy = torch.ops.aten.unbind_copy.int  # torch.unbind_copy has a wrong type
FLOATS = ("temperature", "inverse_temperature", "top_p", "min_p", "frequency", "presence", "repetition")
INTS = ("seed", "top_k", "min_new", "outputs")
OUTPUTS = INTS.index("outputs")
NEUTRAL_FLOATS = (0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0)  # greedy, no filter, no penalty
TABLES = {"counts": torch.int32, "prompt_seen": torch.bool, "bias": torch.float32, "stop_mask": torch.bool}

# The names of the members of `Wishes` that a batch needs, among those that can be None.
Needs = frozenset[str]
GREEDY: Needs = frozenset()  # a bare argmax
TEMPERED: Needs = frozenset(("temperature",))  # sampling without filters, penalties and bias
EVERYTHING: Needs = frozenset(("temperature", "top_k", "top_p", "min_p", *TABLES))


def _needed(params: SamplingParams, outputs: int, vocab_size: int) -> Needs:
    """Return the needs of a request that has output `outputs` tokens."""
    penalised = params.frequency_penalty != 0 or params.presence_penalty != 0 or params.repetition_penalty != 1
    needs = {
        "temperature": not params.greedy,
        "top_k": not params.greedy and 0 < params.top_k < vocab_size,
        "top_p": not params.greedy and params.top_p < 1,
        "min_p": not params.greedy and params.min_p > 0,
        "counts": penalised,
        "prompt_seen": params.repetition_penalty != 1,
        "bias": bool(params.logit_bias) or params.allowed_token_ids is not None,
        "stop_mask": params.min_new_tokens > outputs,
    }
    return frozenset(name for name, needed in needs.items() if needed)


class SamplingState:
    """The sampling parameters and token counts of every slot, on the device; slot 0 is padding and greedy.

    Numbers are in two tables `[R, 7] fp32` and `[R, 4] int64`; `tables` holds four tables `[R, V]`. All are allocated
    here, since a captured step that allocated a table would zero it at every replay. `assign` writes all of a slot's
    entries, so nothing of the previous request is left.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self._floats = torch.tensor(NEUTRAL_FLOATS, device=self.device).repeat(slots, 1)
        self._ints = torch.tensor([0, vocab_size, 0, 0], device=self.device).repeat(slots, 1)
        self.tables = {name: torch.zeros(slots, vocab_size, dtype=kind, device=device) for name, kind in TABLES.items()}
        self._needs: list[Needs] = [GREEDY] * slots

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        stop_ids: Iterable[int],
    ) -> None:
        """Give `slot` to a request whose output so far is `output_ids`; a retracted request has some already.

        stop_ids: the ids that end the request, which are masked until min_new_tokens are output. Every id must be in
        the vocabulary. A top_k of 1 is stored as temperature 0: the likeliest token is picked, and of equally likely
        ones that with the lowest id.
        """
        needs = self._needs[slot] = _needed(params, len(output_ids), self.vocab_size)
        temperature = 0.0 if params.greedy else params.temperature
        top_k = self.vocab_size if params.top_k == -1 else params.top_k
        p = params
        floats = [temperature, 1 / max(temperature, GREEDY_BELOW), p.top_p, p.min_p]
        floats += [p.frequency_penalty, p.presence_penalty, p.repetition_penalty]
        self._floats[slot] = upload(floats, torch.float32, self.device)
        self._ints[slot] = upload([seed, top_k, params.min_new_tokens, len(output_ids)], torch.int64, self.device)
        for table in self.tables.values():
            table[slot].zero_()
        if "counts" in needs:
            ids = upload(output_ids, torch.int64, self.device)
            self.tables["counts"][slot].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        if "prompt_seen" in needs:
            self.tables["prompt_seen"][slot].index_fill_(0, upload(prompt_ids, torch.int64, self.device), True)
        if "bias" in needs:
            self._assign_bias(self.tables["bias"][slot], params)
        if "stop_mask" in needs:
            self.tables["stop_mask"][slot].index_fill_(0, upload(list(stop_ids), torch.int64, self.device), True)

    def _assign_bias(self, row: Tensor, params: SamplingParams) -> None:
        """Write the bias into a slot's row [V], which is zero; ids that are not allowed get minus infinity."""
        if params.allowed_token_ids is not None:
            row.fill_(-torch.inf)
            row.index_fill_(0, upload(params.allowed_token_ids, torch.int64, self.device), 0.0)
        ids = upload(list(params.logit_bias), torch.int64, self.device)
        bias = upload(list(params.logit_bias.values()), torch.float32, self.device)
        row.index_add_(0, ids, bias)

    def release(self, slot: int) -> None:
        """Forget the needs of `slot`, so that they cost no batch anything; the slot's table entries stay."""
        self._needs[slot] = GREEDY

    def stops_allowed(self, slot: int) -> None:
        """Note that the request of `slot` has output its min_new_tokens, so it needs no stop mask any more."""
        self._needs[slot] -= {"stop_mask"}

    def needs(self, slots: Sequence[int]) -> Needs:
        """Return the union of the needs of the requests in these slots; GREEDY if a bare argmax serves them all."""
        return GREEDY.union(*(self._needs[slot] for slot in slots))

    def noise(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the temperatures [B] fp32 and the seeds [B] int64 of `slots [B] int64`: what a pick's noise needs."""
        return self._floats[:, FLOATS.index("temperature")][slots], self._ints[:, INTS.index("seed")][slots]

    def wishes(self, slots: Tensor, needs: Needs) -> Wishes:
        """Return the `Wishes` of `slots [B] int64`, as copies.

        Members that may be None are None unless `needs` has them. EVERYTHING serves any batch, since the entries that a
        request does not use are neutral. No two members share memory, as `pick_region` asks.
        """
        members: dict[str, Any] = dict(zip(FLOATS, _unbind_copy(self._floats[slots], 1), strict=True))
        members |= zip(INTS, _unbind_copy(self._ints[slots], 1), strict=True)
        members |= {name: table[slots] for name, table in self.tables.items() if name in needs}
        members |= {name: None for name in EVERYTHING - needs}
        return Wishes(**members)

    def commit(self, slots: Tensor, tokens: Tensor, count: Tensor, counted: bool) -> None:
        """Count the first `count [B]` of `tokens [B, A]` as outputs of `slots [B]`; if `counted`, also by token id."""
        self._ints[:, OUTPUTS].index_add_(0, slots, count.to(torch.int64))
        if not counted:
            return
        valid = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        cell = torch.where(valid, slots[:, None] * self.vocab_size + tokens, 0)
        self.tables["counts"].view(-1).scatter_add_(0, cell.flatten(), valid.flatten().to(torch.int32))
