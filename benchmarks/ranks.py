"""Is a model on several ranks the same model? Its logits and tokens beside those of one rank, in float32.

    python -m benchmarks.ranks --tp 2 [--model ID_OR_FOLDER] [--tokens 48] [--device cpu] [--compile]

Sums in another order round differently, so equality has to be told from luck. The answers of one rank are read again by
both as prompts, and all logits are compared, three ways. `absolute` is the largest difference of two logits. It is
mostly a constant that all logits of a row share, which softmax does not see. `shifted` is the largest difference
without that constant: the difference of two logits less the mean difference of their row. `relative` is the largest
difference over the largest logit of its row. `shifted` may be 1e-4, or twice what float32 itself is off, which is what
one rank differs by from the same model in float64; `relative` may be 1e-5. docs/scaling.md says why `absolute` has no
such bound. How many logits would fail torch.testing's kind of bound, 1e-4 and 1e-4 of their size, is printed too.

Then each answer of several ranks is compared with that of one, token by token, up to the first that differs. There the
two candidates must have been so close that ten times the absolute difference could have swapped them: by their scores
after noise, penalties and filters, as `sampling.pick` has them. A swap at a wider margin fails, and so does a run that
compares less than 95 % of all tokens.

Read next: `minispec/ranks/shards.py`; tests/test_parallel.py has the same on tiny models, exactly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minispec import LLM, SamplingParams
from minispec.attention import Causal
from minispec.load.build import load_model
from minispec.request import Logprobs, Request
from minispec.sampling import SamplingState, _filtered, adjust, gumbel
from minispec.scheduler import Scheduler

PROMPTS = (
    "Why is the sea salty?", "Write three sentences about a dog that is afraid of rain.", "The capital of France is",
    "def fibonacci(n):", "List the planets of the solar system.", "Explain to a child what a magnet does.",
)  # fmt: skip
WISHES = (
    {"temperature": 0.0}, {"temperature": 0.8, "sampling_seed": 5},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "sampling_seed": 6},
    {"temperature": 0.0, "frequency_penalty": 0.4},
)  # fmt: skip
CLOSE = 1e-4  # the largest shifted difference, unless float32 is as far from float64; and part of a usual bound
RELATIVE = 1e-5  # the largest difference over the largest logit of a row
SWAPS = 10  # times the measured difference, below which a margin may be swapped
SHARE = 0.95  # of all tokens that must have been compared


class Difference(NamedTuple):
    """How far two lists of logits are apart; NaN where one of them is NaN."""

    absolute: float
    shifted: float  # without what a whole row has in common
    relative: float  # to the largest logit of the row
    outside: int  # logits beyond 1e-4 + 1e-4 of their size

    def __str__(self) -> str:
        return (f"absolute {self.absolute:.2e}, shifted {self.shifted:.2e}, relative {self.relative:.2e}, "
                f"{self.outside} outside")  # fmt: skip


class Compared(NamedTuple):
    """What came of comparing answers."""

    tokens: int  # of one rank
    compared: int  # until the first that differs
    swaps: list[float]  # the margin at each place where answers part


def compare(answers: Sequence[tuple[Sequence[int], Sequence[int]]], margins: Sequence[Sequence[float]]) -> Compared:
    """Compare pairs of answers, of one rank and of several; `margins[i]`: of the two candidates where pair i parts."""
    found = Compared(sum(len(one) for one, _ in answers), 0, [])
    for (one, several), margin in zip(answers, margins, strict=True):
        parts = next((at for at, pair in enumerate(zip(one, several, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(one), len(several)) if parts is None else parts
        found = found._replace(compared=found.compared + same, swaps=[*found.swaps, *margin])
    return found


def differ(logits: Sequence[Tensor], others: Sequence[Tensor]) -> Difference:
    """Return how far logits are from those of another list, by which their size is measured."""
    parts = []
    for a, b in zip(logits, others, strict=True):
        apart = a - b
        largest = apart.abs().amax(-1)
        shifted = (apart - apart.mean(-1, keepdim=True)).abs().max()
        outside = (~(apart.abs() <= CLOSE + CLOSE * b.abs())).sum()
        parts.append(torch.stack((largest.max(), shifted, (largest / b.abs().amax(-1)).max(), outside)))
    most, total = torch.stack(parts).amax(0).tolist(), sum(int(part[-1]) for part in parts)
    return Difference(*most[:3], total)


def verdict(found: Compared, apart: Difference, floor: Difference) -> list[str]:
    """Return what is wrong; nothing where several ranks are the same model as one, `floor` off in float32."""
    wrong = []
    if not apart.shifted <= max(CLOSE, 2 * floor.shifted):
        wrong.append(f"logits of a row differ by {apart.shifted:.2e} beside what all have in common, more than "
                     f"{CLOSE:g} and than twice {floor.shifted:.2e}")  # fmt: skip
    if not apart.relative <= RELATIVE:
        wrong.append(f"logits differ by {apart.relative:.2e} of the largest in their row, more than {RELATIVE:g}")
    wrong += [f"a token differs at a margin of {margin:.2e}, which no difference of {apart.absolute:.2e} explains"
              for margin in found.swaps if not margin < SWAPS * apart.absolute]  # fmt: skip
    if found.compared < SHARE * found.tokens:
        wrong.append(f"only {found.compared} of {found.tokens} tokens were compared")
    return wrong


@torch.inference_mode()
def in_float64(llm: LLM, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return what `read_again` does, by the same weights in float64, in one pass without pages."""
    device = llm.scheduler.engine.device
    model = load_model(llm.config, llm.model_config, llm.folder, torch.float64, device)
    rows = [torch.tensor([text[:-1]], device=device) for text in texts]
    places = [torch.arange(row.shape[1], device=device)[None] for row in rows]
    attends = [Causal(model.config.windows(row.shape[1])) for row in rows]
    return [model.logits(model(*given)[0][0]).cpu().float() for given in zip(rows, places, attends, strict=True)]


def answer(scheduler: Scheduler, prompts: Sequence[Sequence[int]], tokens: int) -> list[Request]:
    """Serve every prompt with every wish, together."""
    requests = [
        Request(f"{i}", list(ids), SamplingParams(max_new_tokens=tokens, **WISHES[i % len(WISHES)]))
        for i, ids in enumerate(ids for ids in prompts for _ in WISHES)
    ]
    serve(scheduler, requests)
    return requests


def serve(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """Run requests to their ends."""
    for request in requests:
        scheduler.validate(request)
        scheduler.submit(request)
    while scheduler.has_work:
        scheduler.step()


def read_again(scheduler: Scheduler, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the logits [T - 1, V] behind all tokens of each text but the last, made as scores of a prompt are."""
    model, found = scheduler.engine.model, []
    scheduler.flush_cache()
    for ids in texts:
        seen: list[Tensor] = []
        inner = model.logits
        model.logits = lambda hidden: (seen.append(out := inner(hidden)), out)[1]  # noqa: B023  called within this turn
        try:
            wish = SamplingParams(temperature=0.0, max_new_tokens=1, logprobs=Logprobs(start=0))
            serve(scheduler, [Request("again", list(ids), wish)])
        finally:
            del model.logits
        # A step's first logits are those behind its chunks; then come the rows that were asked for.
        rows = torch.cat([out.reshape(-1, out.shape[-1]).cpu() for out in seen if len(out) > 0][1:])
        assert len(rows) == len(ids) - 1, "one chunk, and all rows of it but the last"
        found.append(rows)
    return found


def margin(request: Request, other: Sequence[int], logits: Tensor) -> list[float]:
    """Return by how much one rank preferred its token where another answer parts; empty where it does not.

    logits [T - 1, V] are one rank's over the request's whole text.
    """
    pairs = enumerate(zip(request.output_ids, other, strict=False))
    at = next((at for at, (one, several) in pairs if one != several), None)
    if at is None:
        return []
    state = SamplingState(2, logits.shape[1], "cpu")
    state.assign(1, request.params, request.seed, request.prompt_ids, request.output_ids[:at], ())
    wishes = state.wishes(torch.tensor([1]), state.needs([1]))
    position = len(request.prompt_ids) + at
    adjusted = adjust(logits[position - 1][None], wishes)
    gap = adjusted.amax(-1, keepdim=True) - adjusted
    score = -gap
    if wishes.temperature is not None:
        score = score + wishes.temperature[:, None] * gumbel(wishes.seed, torch.tensor([position]), logits.shape[1])
        if any(part is not None for part in (wishes.top_k, wishes.top_p, wishes.min_p)):
            score = score.masked_fill(_filtered(gap, wishes), -torch.inf)
    return [float(score[0, request.output_ids[at]] - score[0, other[at]])]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print what was found, and return 0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args(argv)
    flags = {
        "dtype": "float32",
        "device": args.device,
        "context_length": 512,
        "max_running_requests": 8,
        "chunked_prefill_size": -1,
        "speculative_algorithm": "NONE",
        "disable_torch_compile": not args.compile,
    }
    one = LLM(args.model, **flags)
    prompts = [one.tokenizer.encode(prompt) for prompt in PROMPTS]
    answers = answer(one.scheduler, prompts, args.tokens)
    texts = [r.prompt_ids + r.output_ids for r in answers]
    logits, exact = read_again(one.scheduler, texts), in_float64(one, texts)
    several = LLM(args.model, tp_size=args.tp, **flags)
    others = [r.output_ids for r in answer(several.scheduler, prompts, args.tokens)]
    again = read_again(several.scheduler, texts)
    apart, floor = differ(again, logits), differ(logits, exact)
    margins = [margin(*three) for three in zip(answers, others, logits, strict=True)]
    found = compare([(r.output_ids, other) for r, other in zip(answers, others, strict=True)], margins)
    rows = sum(map(len, logits))
    print(f"largest differences of {sum(map(torch.numel, logits))} logits in {rows} rows; the largest logit is "
          f"{max(float(part.abs().max()) for part in exact):.1f}")  # fmt: skip
    for what, found_apart in ((f"{args.tp} ranks from one", apart), ("one rank from float64", floor),
                              (f"{args.tp} ranks from float64", differ(again, exact))):  # fmt: skip
        print(f"  {what}: {found_apart}")
    print(f"{found.compared} of {found.tokens} tokens were compared ({found.compared / found.tokens:.1%}); answers "
          f"part at margins of {[f'{m:.1e}' for m in found.swaps] or 'none'}")  # fmt: skip
    for line in (wrong := verdict(found, apart, floor)):
        print(f"wrong: {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
