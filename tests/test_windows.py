"""Sliding windows: every drafter on a model some of whose layers see only the newest tokens of a text.

test_model.py compares the families with transformers, and test_attention.py the kinds of attention with a loop over
what each node sees. Here windows of 20 tokens are served: by trees, in chunks, after prefix hits, compiled.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conformance import (
    SUBJECTS,
    Subject,
    checks_of,
    chunked_prompts,
    greedy_alone_and_in_a_batch_of_eight,
    nodes_have_the_logits_of_their_own_paths,
    prefix_hits_and_a_second_turn,
    retraction,
    sharp_model,
    subjects_with,
    windowed_model,
)
from exactness import (
    CPU,
    VOCAB,
    WINDOWED,
    build,
    forget_graphs,
    graphs_made,
    mixed_requests,
    next_logits,
    reference,
    run,
    shortfalls,
    tiny_model,
    trace_only,
)
from test_llm import CONFIG

import minispec.cpu.gather as gather_module
from minispec import LLM
from minispec.attention import Plan
from minispec.cpu import int8
from minispec.cpu.products import products_pay
from minispec.load.files import DirectStep
from minispec.load.warm_up import warm_up
from minispec.scheduler import Scheduler
from minispec.standalone import DraftModel, StandaloneDrafter
from minispec.train.corpus import Features, TrainingReply

DRAFTERS = subjects_with(windowed_model, **WINDOWED)
QUICK = (greedy_alone_and_in_a_batch_of_eight, chunked_prompts, prefix_hits_and_a_second_turn, retraction)


@pytest.mark.parametrize(("name", "check"), checks_of(DRAFTERS, QUICK))
def test_with_windows_the_tokens_stay_the_same(name: str, check: Callable[[Subject], None]) -> None:
    """A draft model with windows is its own target here, so its accept length shows that it drafts within them."""
    check(DRAFTERS[name])


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_is_noticed(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, within = DRAFTERS["oracle"], Plan.within
    greedy_alone_and_in_a_batch_of_eight(subject)  # so that the truth is known
    monkeypatch.setattr(Plan, "within", lambda plan, sliding: within(plan, sliding + off))
    with pytest.raises(AssertionError, match="differs"):
        greedy_alone_and_in_a_batch_of_eight(subject)


def test_every_node_of_a_tree_has_the_logits_of_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_have_the_logits_of_their_own_paths(windowed_model(), monkeypatch)


def test_a_part_that_is_made_after_its_plan_was_filled_is_filled() -> None:
    """A draft model attends under the target's plan of a prompt, and makes its part with the first prompt."""
    scheduler = build(windowed_model(), SUBJECTS["none"].drafter(windowed_model()))
    plan = Plan(scheduler.kv, 1, 2, 32, prompts=True)
    visible = torch.ones(2, 32, 32, dtype=torch.bool).tril()
    plan.fill(torch.tensor([1, 1]), torch.tensor([64, 96]), visible, torch.ones(2, 32, dtype=torch.bool))
    late = plan.within(20)
    assert late.first is not None and late.first[1].tolist() == [min(row - 19, 0) for row in range(32)]


def test_a_model_without_an_acting_window_runs_what_it_ran() -> None:
    """Neither a tensor nor an operation more: its steps have the kind of attention itself, and no parts."""
    for model, acts in ((sharp_model(), False), (tiny_model(**{**WINDOWED, "sliding_window": 256}), False),
                        (windowed_model(), True)):  # fmt: skip
        engine = build(model, SUBJECTS["standalone-tree"].drafter(model)).engine
        steps = [*engine.prefills.values(), *engine.decodes.values()]
        assert {bool(step.plan.parts) for step in steps} == {acts}
        assert {type(step.attend).__name__ for step in steps} == {"Windows" if acts else "PagedGather"}


def test_what_int8_weights_and_training_read_of_a_target_is_windowed_too(tmp_path: Path) -> None:
    model, ids = windowed_model(), [5 * i % VOCAB for i in range(70)]
    torch.testing.assert_close(int8._logits(model, ids)[-1], next_logits(model, ids))
    (_, choices) = Features(model, [TrainingReply(ids, 69, 0.0, "")], (1,), tmp_path, 10**9).of(0)
    assert int(choices[-1]) == int(next_logits(model, ids).argmax())
    assert (next_logits(sharp_model(), ids) - next_logits(model, ids)).abs().max() > 1, "windows make a difference"
    assert int(choices[-1]) != int(next_logits(sharp_model(), ids).argmax())


@torch.inference_mode()
def compiled(dtype: torch.dtype, drafts: bool) -> tuple[Scheduler, int]:
    """Return a scheduler of a model with windows, compiled, and how many graphs it took.

    drafts: the model drafts for itself, compiled too; otherwise an oracle does.
    """
    forget_graphs()
    model, draft = (tiny_model(**WINDOWED).to(dtype) for _ in range(2))
    compiler = DirectStep
    model.compile_blocks(compiler)
    drafter = (
        StandaloneDrafter(DraftModel(draft, VOCAB), rounds=2, topk=2, nodes=4)
        if drafts
        else SUBJECTS["oracle"].drafter(windowed_model())
    )
    scheduler = build(model, drafter, compiled=True, running=2 if drafts else 1, chunk=100)
    if drafts:
        drafter.compile(compiler)
        scheduler.engine.compile_small(compiler, lambda batch, nodes: batch == 1 < nodes)
    before = graphs_made()
    warm_up(scheduler.engine, lambda line: None)
    return scheduler, graphs_made() - before


@pytest.mark.slow
def test_windows_need_no_further_graph_and_tokens_stay_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are counted, and run as they were traced; Inductor's code is the matter of the test below."""
    trace_only(monkeypatch, tmp_path)
    scheduler, made = compiled(torch.float32, drafts=True)
    assert made == 15, "as without windows"
    requests = mixed_requests(4, max_new_tokens=24)
    run(scheduler, requests)
    assert graphs_made() == made
    for r in requests:
        assert r.output_ids == reference(windowed_model(), r)
    assert scheduler.metrics.verified.accept_length > 1.7


@pytest.mark.slow
@pytest.mark.skipif(not products_pay(torch.bfloat16, CPU), reason="bfloat16 has no products of its own here")
def test_compiled_in_bfloat16_a_token_is_the_likeliest_or_nearly_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose window is a token longer or shorter, many of the tokens would not be that."""
    monkeypatch.setattr(gather_module, "WORTH", 1)  # so that prompts as short as these are attended by products
    scheduler, _ = compiled(torch.bfloat16, drafts=False)
    requests = mixed_requests(4, max_new_tokens=24)
    run(scheduler, requests)
    assert scheduler.metrics.verified.accept_length > 1.3
    for window in (19, 20, 21):
        with torch.inference_mode():
            model = tiny_model(**WINDOWED | {"sliding_window": window}).to(torch.bfloat16)
        off = shortfalls(model, requests)
        assert len(off) == 96
        assert (sum(short == 0 for short in off) > 85) == (max(off) < 0.5) == (window == 20)


def test_the_line_of_memory_says_that_pages_behind_a_window_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    windowed = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(windowed))
    caplog.set_level(logging.INFO, "minispec")
    for context, acts in ((None, True), (64, False)):
        caplog.clear()
        LLM(tmp_path, load_format="dummy", dtype="float32", disable_torch_compile=True, context_length=context)
        (line,) = (r.message for r in caplog.records if r.message.startswith("memory, measured"))
        assert line.endswith("; pages behind the sliding window of 64 tokens are not given back yet") == acts
