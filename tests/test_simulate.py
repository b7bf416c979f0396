"""Simulated acceptance: the mean is the one asked for, the path is a path, and keys and values are those of the text.

Output is junk by design, so tokens are compared with nothing. What must hold is what the speed of a step depends on:
how many tokens it emits, and that everything goes on as after a verdict that the target gave.
"""

from __future__ import annotations

import random

import pytest
import torch
from conformance import SUBJECTS, WISHES
from conftest import slow_unless
from exactness import finish, request, run, submit
from test_capture import replayed
from test_cuda_path import serve, some_requests
from test_llm import CONFIG, DUMMY
from test_memory import folder_of
from test_verify import forest

from minispec import LLM
from minispec.scheduler import Scheduler
from minispec.tree import PADDING, DraftTree, ancestors, depth
from minispec.verify import Trees, simulate, verify_greedy


def emitted(scheduler: Scheduler) -> list[int]:
    """Return a list that will hold how many tokens every row of a decode step emits, at the context's end too."""
    counts: list[int] = []
    collect = scheduler.engine.collect

    def collected(pending):
        found = collect(pending)
        if not pending.chunks:
            counts.extend(map(len, found))
        return found

    scheduler.engine.collect = collected
    return counts


@pytest.mark.parametrize(("length", "wishes"), slow_unless(
    [(1.0, {}), (1.5, WISHES), (2.7, {}), (2.7, WISHES), (4.0, WISHES)],
    lambda length, wishes: length == 2.7))  # fmt: skip
def test_the_mean_is_the_one_asked_for(length: float, wishes: dict) -> None:
    subject = SUBJECTS["standalone-chain"]  # it would always be accepted
    scheduler = subject.build(simulated=length, overlap=True)
    counts, requests = emitted(scheduler), subject.requests(max_new_tokens=100, ignore_eos=True, **wishes)
    run(scheduler, requests)
    assert all(len(r.output_ids) == 100 for r in requests)
    assert len(counts) > 190 and set(counts) == {int(length), -int(-length // 1)}
    assert sum(counts) / len(counts) == pytest.approx(length, abs=0.07)


def test_rows_draw_apart_and_a_run_repeats() -> None:
    subject = SUBJECTS["standalone-chain"]
    runs = []
    for _ in range(2):
        scheduler = subject.build(simulated=2.5, running=2)
        counts = emitted(scheduler)
        run(scheduler, [request(name, [5, 6, 7], max_new_tokens=60) for name in "ab"])
        runs.append(counts)
    assert runs[0] == runs[1]
    pairs = list(zip(runs[0][:30:2], runs[0][1:30:2], strict=True))
    assert 0 < sum(a != b for a, b in pairs) < len(pairs)


def test_the_path_goes_to_the_first_of_the_deepest_nodes() -> None:
    rng = random.Random(3)
    for _ in range(40):
        batch, nodes, most = 3, rng.randint(2, 9), rng.randint(2, 5)
        tree = forest(rng, batch, nodes, 11)
        tree.tokens[0] = PADDING  # where the context ends the root is masked as well
        mean, lens = rng.uniform(1, most), torch.tensor([rng.randrange(99) for _ in range(batch)])
        trees = Trees(tree, ancestors(tree.parents), torch.arange(batch), lens, most)
        verdict = verify_greedy(trees, torch.rand(batch, nodes, 11))
        made = simulate(trees, verdict, mean)
        for row in range(batch):
            tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
            paths = []
            for node in range(nodes):
                if node and tokens[node] == PADDING:
                    continue
                paths.append([node])
                while paths[-1][0]:
                    paths[-1].insert(0, parents[paths[-1][0]])
            whole = max(paths, key=len)  # the first of the longest
            count, path = int(made.count[row]), made.path[row].tolist()
            assert count in {min(int(mean) + more, len(whole), most) for more in (0, 1)}
            assert path[:count] == whole[:count] and all(0 <= node < nodes for node in path)
            bonus = int(verdict.bonus[row])
            assert made.emitted[row, :count].tolist() == [tokens[node] for node in whole[1:count]] + [bonus]
            assert made.bonus[row] == bonus and ((made.emitted[row] >= 0) & (made.emitted[row] < 11)).all()


def test_the_number_drawn_has_the_mean_at_every_length() -> None:
    tree = DraftTree(torch.arange(6).expand(4000, 6), torch.arange(-1, 5).expand(4000, 6))
    above, rows = ancestors(tree.parents), torch.arange(4000)
    assert int(depth(above).max()) == 5
    trees = Trees(tree, above, rows, rows, 6)
    verdict = verify_greedy(trees, torch.rand(4000, 6, 7))
    for mean in (1.0, 1.25, 3.5, 5.999, 6.0):
        for slots, lens in ((rows, torch.full_like(rows, 7)), (torch.ones_like(rows), rows)):
            count = simulate(trees._replace(slots=slots, lens=lens), verdict, mean).count
            assert count.double().mean() == pytest.approx(mean, abs=0.03) and int(count.max()) <= 6
            assert mean % 1 or len(count.unique()) == 1


@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_no_step_looks_at_a_value(law: str) -> None:
    scheduler = SUBJECTS["eagle3-tree"].build(running=2, simulated=1.5, host_looks=False)
    assert serve(scheduler, some_requests("eagle3-tree", law)) > 1


def test_a_replayed_step_draws_anew() -> None:
    assert replayed("standalone-chain", simulated=2.5, temperature=0.9).compared.total() > 8


@pytest.mark.parametrize("name", ["standalone-tree", "eagle3-tree"])
def test_the_rows_of_a_text_are_those_of_its_prefill(name: str) -> None:
    subject = SUBJECTS[name]
    scheduler = subject.build(simulated=2.3)
    one = request("one", subject.text(21, random.Random(1)), max_new_tokens=60)
    submit(scheduler, one)
    finish(scheduler, lambda: len(one.output_ids) >= 40)
    other = subject.build()
    same = request("same", one.ids[: one.kv_len], max_new_tokens=2)
    submit(other, same)
    finish(other, lambda: bool(same.output_ids))
    made, true = (
        s.kv.pool[:, :, s.kv.rows(torch.tensor([r.slot]), torch.arange(one.kv_len)[None],
                                  torch.ones(1, one.kv_len, dtype=torch.bool))]
        for s, r in ((scheduler, one), (other, same))
    )  # fmt: skip
    torch.testing.assert_close(made, true, rtol=1e-4, atol=1e-4)
    assert one.verified.accepted.total() > 10


def test_it_is_said_at_start_and_more_than_a_tree_s_depth_is_refused(tmp_path, caplog) -> None:
    model = folder_of(tmp_path / "m", CONFIG)
    options = {**DUMMY, "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    llm = LLM(model, simulate_acc_len=2.5, **options)
    assert llm.scheduler.engine.accept.simulated == 2.5
    assert "--simulate-acc-len 2.5" in caplog.text and "output is junk" in caplog.text
    with pytest.raises(ValueError, match=r"--simulate-acc-len must be in \[1, 4\].* got 4.1"):
        LLM(model, simulate_acc_len=4.1, **options)
