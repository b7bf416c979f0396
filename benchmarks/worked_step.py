"""One decode step of the default model in numbers: the draft tree, who sees whom, the target's picks, what is kept.

`python -m benchmarks.worked_step` answers one question greedily with the EAGLE-3 head that ships, and prints the first
step in which three tokens are kept along a branch that does not lie in consecutive rows, so that `kv.compact` has
something to move. The README shows this output. float32, so that it is the same on every machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec import LLM, SamplingParams
from minispec.sampling import largest
from minispec.tree import depth

QUESTION = "Why is the sea salty?"


class Step(NamedTuple):
    """What one step worked on, of the one request there is."""

    lens: int  # rows of keys and values before it
    tokens: list[int]  # [N]
    parents: list[int]  # [N]
    above: list[list[int]]  # [N, N], 1 where the column's node is the row's own or above it
    picks: list[int]  # [N], the target's greedy choice after each node
    path: list[int]  # the nodes kept


def steps(llm: LLM, question: str, new_tokens: int) -> tuple[list[Step], list[int]]:
    """Return the steps in which a greedy answer is decoded, and the ids of question and answer."""
    engine, seen = llm.scheduler.engine, []
    verify = engine._verify

    def watched(tree: Any, above: Tensor, logits: Tensor, wishes: Any, lens: Tensor) -> Any:
        verdict = verify(tree, above, logits, wishes, lens)
        kept = verdict.path[0, : int(verdict.count[0])].tolist()
        rows = tree.tokens[0].tolist(), tree.parents[0].tolist(), above[0].int().tolist(), largest(logits)[0].tolist()
        seen.append(Step(int(lens[0]), *rows, kept))
        return verdict

    engine._verify = watched
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
    answer = llm.generate(ids, SamplingParams(temperature=0.0, max_new_tokens=new_tokens))["output_ids"]
    del engine._verify
    return seen, [*ids, *answer]


def describe(step: Step, text: Any) -> str:
    """Return a step as a table and the sentence under it; `text` gives a token's text in quotes."""
    levels = depth(torch.tensor([step.above], dtype=torch.bool))[0].tolist()
    lines = ["node  parent  token              sees nodes        row  position  target's pick   kept"]
    for node, token in enumerate(step.tokens):
        sees = " ".join(str(other) if on else "." for other, on in enumerate(step.above[node]))
        kept = "yes" if node in step.path else ""
        lines.append(f"{node:>4}  {step.parents[node]:>6}  {text(token):<17}  {sees:<16}  {step.lens + node:>3}  "
                     f"{step.lens + levels[node]:>8}  {text(step.picks[node]):<14}  {kept}".rstrip())  # fmt: skip
    emitted = [step.picks[node] for node in step.path]
    moves = [f"{step.lens + node} to {step.lens + i}" for i, node in enumerate(step.path) if node != i]
    lines += ["", f"emitted: {' '.join(map(text, emitted))}; rows moved: {', '.join(moves) or 'none'}; "
                  f"lens: {step.lens} to {step.lens + len(step.path)}; next root: {text(emitted[-1])}"]  # fmt: skip
    return "\n".join(lines)


def worked(llm: LLM) -> str:
    """Return the first step worth showing, and the text before it."""
    all_steps, ids = steps(llm, QUESTION, 64)
    step = next(s for s in all_steps if len(s.path) == 3 and s.path != [0, 1, 2])
    before = llm.tokenizer.decode(ids[: step.lens + 1], skip_special_tokens=True)
    return f"{before}\n\n" + describe(step, lambda token: repr(llm.tokenizer.decode([token])).replace("'", '"'))


def main() -> None:
    """Print the step."""
    options = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 2, "speculative_eagle_topk": 4,
               "speculative_num_draft_tokens": 6}  # fmt: skip
    print(worked(LLM(dtype="float32", device="cpu", disable_torch_compile=True, max_running_requests=1, **options)))


if __name__ == "__main__":
    main()
