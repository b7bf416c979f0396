"""The compiled engine: after warm-up nothing recompiles, whatever requests come and go, and the tokens stay exact."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from conformance import random_head
from exactness import (
    Oracle,
    build,
    graphs_made,
    reference,
    request,
    submit,
    tiny_model,
    trace_only,
    truth_of,
)

from minispec.beam import BeamDrafter
from minispec.eagle import Eagle3Head
from minispec.load import files
from minispec.load.files import DirectStep
from minispec.load.warm_up import warm_up
from minispec.serve.info import stats_of

MODEL = tiny_model()


def eagle3() -> BeamDrafter:
    """Return a drafter around a random EAGLE-3 head, compiled."""
    head = random_head(Eagle3Head, MODEL, taps=(1, 2), own_lm_head=True)
    drafter = BeamDrafter(head, rounds=3, topk=2, nodes=6, smaller=[(1, 3)])
    drafter.compile(DirectStep)
    return drafter


@pytest.mark.slow
@pytest.mark.parametrize("name", ["oracle", "eagle3"])
def test_nothing_recompiles_over_200_steps_of_changing_requests(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was traced runs as it is: what Inductor makes of it is tested in test_compiled.py and test_served.py."""
    trace_only(monkeypatch, tmp_path)
    model = tiny_model()
    model.compile_blocks(DirectStep)
    with torch.inference_mode():
        drafter = eagle3() if name == "eagle3" else Oracle(truth_of(MODEL), nodes=6)
    scheduler = build(model, drafter, compiled=True, running=2, pages=14, chunk=100, smaller=3)
    with torch.inference_mode():
        warm_up(scheduler.engine, lambda line: None)
    graphs = graphs_made()
    assert graphs > 1
    rng = random.Random(3)
    scheduler.policy.forced = rng.choice  # plain steps and both trees in turn
    monkeypatch.setattr(files, "find", None)  # nothing can be compiled any more
    rng, requests, steps = random.Random(0), [], 0
    with torch.compiler.set_stance("fail_on_recompile"):
        while steps < 200 or scheduler.has_work:
            if steps < 200 and len(scheduler.waiting) < 3:
                wishes = {"temperature": rng.choice((0.0, 0.8)), "max_new_tokens": rng.randint(1, 60)}
                prompt = [rng.randrange(61) for _ in range(rng.choice((1, 5, 33, 120)))]
                requests.append(request(f"r{steps}", prompt, sampling_seed=steps, **wishes))
                submit(scheduler, requests[-1])
            if rng.random() < 0.03:
                scheduler.abort(rng.choice(requests).rid)
            scheduler.step()
            steps += 1
    scheduler.check()
    assert graphs_made() == graphs
    assert stats_of(scheduler)["kv_pages_owned"] == 0 and scheduler.metrics.retractions > 0
    assert len(scheduler.metrics.shapes) == 3 and min(scheduler.metrics.shapes.values()) > 20
    aborted = [r for r in requests if r.finish.kind == "abort"]
    done = [r for r in requests if r not in aborted]
    assert len(aborted) > 1 and len(done) > 8
    for r in done[:12]:
        assert r.output_ids == reference(MODEL, r)
