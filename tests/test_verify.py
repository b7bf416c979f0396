"""Verification: both forms against a plain walk in Python, and trees of any shape against one-token-at-a-time decoding.

The latter is the promise of the project in miniature: a toy target, whose logits depend on the last token, must give
the same sequence for every seed, decoded token by token or through arbitrary draft trees.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from exactness import chain, check
from torch import Tensor

from minispec.request import SamplingParams
from minispec.sampling import EVERYTHING, SamplingState, Wishes, law, pick
from minispec.tree import PADDING, DraftTree, ancestors, depth
from minispec.verify import Trees, Verdict, verify, verify_greedy


def random_row(rng: random.Random, nodes: int, vocab: int, root: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of one random tree with distinct siblings and some padding; bushy or thin by chance."""
    tokens, parents, bushy = [root], [-1], rng.random()
    for node in range(1, nodes):
        real = [i for i in range(node) if tokens[i] != PADDING]
        parent = rng.choice(real) if rng.random() < bushy else real[-1]
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        token = rng.randrange(vocab)
        if token in taken or rng.random() < 0.15:
            token, parent = PADDING, 0
        tokens.append(token)
        parents.append(parent)
    return tokens, parents


def forest(rng: random.Random, batch: int, nodes: int, vocab: int, roots: list[int] | None = None) -> DraftTree:
    rows = [random_row(rng, nodes, vocab, roots[b] if roots else rng.randrange(vocab)) for b in range(batch)]
    tree = DraftTree(torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows]))
    check(tree)
    return tree


def walk(tree: DraftTree, row: int, choose) -> tuple[list[int], list[int]]:
    """The definition: choose at a node, go to the child that holds the choice, until there is none."""
    node, path, out = 0, [0], []
    while True:
        out.append(choose(node, len(out)))
        children = [
            i
            for i, (t, p) in enumerate(zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True))
            if t == out[-1] and p == node and t != PADDING
        ]
        if not children:
            return path, out
        node = children[0]
        path.append(node)


def longest(tree: DraftTree) -> int:
    return int(depth(ancestors(tree.parents)).max()) + 1


def trees(tree: DraftTree, most: int, lens: Tensor | None = None) -> Trees:
    """Return trees to verify, of texts of these lengths; default: one token each."""
    batch = len(tree.tokens)
    lens = torch.ones(batch, dtype=torch.int64) if lens is None else lens
    return Trees(tree, ancestors(tree.parents), torch.arange(batch), lens, most)


def assert_verdict(verdict: Verdict, row: int, path: list[int], out: list[int], nodes: int) -> None:
    count = int(verdict.count[row])
    assert count == len(out)
    assert verdict.path[row, :count].tolist() == path
    assert verdict.emitted[row, :count].tolist() == out
    assert verdict.bonus[row] == out[-1]
    assert ((verdict.path[row] >= 0) & (verdict.path[row] < nodes)).all()


def greedy_rows(batch: int, vocab: int, **params) -> Wishes:
    state = SamplingState(batch + 1, vocab, "cpu")
    for slot in range(1, batch + 1):
        state.assign(slot, SamplingParams(temperature=0.0, **params), slot, [], [], [])
    return state.wishes(torch.arange(1, batch + 1), state.needs(range(1, batch + 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_verifications_agree_with_a_plain_walk_on_random_trees(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    accepted = 0
    for _ in range(150):
        nodes, vocab = rng.choice([1, 2, 4, 9, 20]), rng.choice([2, 3, 5])
        tree = forest(rng, 3, nodes, vocab)
        logits = torch.randn(3, nodes, vocab).round().to(dtype)  # rounded: many ties
        A = longest(tree) + rng.choice([0, 0, 2])
        fast = verify_greedy(trees(tree, A), logits)
        slow = verify(trees(tree, A, torch.tensor([5, 9, 1])), logits, greedy_rows(3, vocab))
        for row in range(3):
            lists = logits[row].tolist()
            path, out = walk(tree, row, lambda node, _, lists=lists: lists[node].index(max(lists[node])))
            assert_verdict(fast, row, path, out, nodes)
            assert_verdict(slow, row, path, out, nodes)
            accepted += len(out) - 1
    assert accepted > 200  # the trees were walked, not only looked at


def test_no_more_than_A_tokens_are_emitted_from_a_deeper_tree() -> None:
    tree = chain(torch.tensor([[0, 1, 1, 1, 1]]))
    logits = torch.tensor([0.0, 1.0]).expand(1, 5, 2)
    for A in (1, 2, 3, 5):
        for verdict in (
            verify_greedy(trees(tree, A), logits),
            verify(trees(tree, A, torch.tensor([4])), logits, greedy_rows(1, 2)),
        ):
            assert_verdict(verdict, 0, list(range(A)), [1] * A, 5)


# ------------------------------------------------------------------------ drafts never change a sampled sequence

VOCAB, LENGTH = 7, 14
PARAMS = {
    "temperature": SamplingParams(temperature=0.9),
    "filters": SamplingParams(temperature=1.3, top_k=4, top_p=0.8, min_p=0.05),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=-0.3),
    "greedy penalties": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "min new": SamplingParams(temperature=1.0, min_new_tokens=6, logit_bias={2: 3.0}, top_p=0.9),
}
STOPS = {"min new": [2]}
PROMPT = [3, 1, 3]


def slots_of(batch: int, params: SamplingParams, first_seed: int, stop_ids: list[int]) -> SamplingState:
    state = SamplingState(batch + 1, VOCAB, "cpu")
    for row in range(batch):
        state.assign(row + 1, params, first_seed + row, PROMPT, [], stop_ids)
    return state


def one_by_one(target: Tensor, params: SamplingParams, seed: int, stop_ids: list[int]) -> list[int]:
    state, slot = slots_of(1, params, seed, stop_ids), torch.tensor([1])
    ids = list(PROMPT)
    while len(ids) < len(PROMPT) + LENGTH:
        token = pick(target[ids[-1]][None], state.wishes(slot, state.needs([1])), torch.tensor([len(ids)]))
        state.commit(slot, token[:, None], torch.tensor([1]), counted=True)
        ids.append(int(token))
    return ids[len(PROMPT) :]


def by_trees(
    target: Tensor, params: SamplingParams, batch: int, first_seed: int, stop_ids: list[int], rng: random.Random
) -> tuple[list[list[int]], int]:
    """Decode `batch` seeds at once through random trees; return the outputs and the number of accepted drafts."""
    state, slots = slots_of(batch, params, first_seed, stop_ids), torch.arange(1, batch + 1)
    host = list(range(1, batch + 1))
    ids = [list(PROMPT) for _ in range(batch)]
    wishes = state.wishes(slots, state.needs(host))
    first = pick(target[torch.full((batch,), PROMPT[-1])], wishes, torch.full((batch,), len(PROMPT)))
    state.commit(slots, first[:, None], torch.ones(batch, dtype=torch.int64), counted=True)
    for row in range(batch):
        ids[row].append(int(first[row]))
    accepted = 0
    while min(map(len, ids)) < len(PROMPT) + LENGTH:
        tree = forest(rng, batch, rng.choice([1, 3, 8, 16]), VOCAB, [row[-1] for row in ids])
        lens = torch.tensor([len(row) - 1 for row in ids])  # the root is not in the KV cache
        logits = target[tree.tokens.clamp(min=0)]
        verdict = verify(trees(tree, longest(tree), lens), logits, state.wishes(slots, state.needs(host)))
        state.commit(slots, verdict.emitted, verdict.count, counted=True)
        for row in range(batch):
            count = int(verdict.count[row])
            ids[row] += verdict.emitted[row, :count].tolist()
            accepted += count - 1
    return [row[len(PROMPT) : len(PROMPT) + LENGTH] for row in ids], accepted


@pytest.mark.parametrize("name", PARAMS)
def test_any_drafts_give_the_very_sequence_of_one_token_at_a_time(name: str) -> None:
    torch.manual_seed(3)
    target = torch.randn(VOCAB, VOCAB) * 1.5
    params, stop_ids, rng = PARAMS[name], STOPS.get(name, []), random.Random(7)
    total, distinct = 0, set()
    for first_seed in (-20, 2**63 - 20):
        drafted, accepted = by_trees(target, params, 20, first_seed, stop_ids, rng)
        for row in range(20):
            expected = one_by_one(target, params, first_seed + row, stop_ids)
            assert drafted[row] == expected
            distinct.add(tuple(expected))
        total += accepted
    assert total > 60
    assert len(distinct) == (1 if params.greedy else 40)


def test_penalties_see_the_path_and_leave_the_rows_as_they_were() -> None:
    logits = torch.tensor([3.0, 2.0, 1.5]).expand(1, 4, 3)
    state = SamplingState(2, 3, "cpu")
    state.assign(1, SamplingParams(temperature=0.0, presence_penalty=2.0), 0, [0], [], [])
    rows = state.wishes(torch.tensor([1]), state.needs([1]))
    assert rows.counts is not None
    verdict = verify(trees(chain(torch.tensor([[0, 0, 1, 2]])), 4, torch.tensor([1])), logits, rows)
    assert verdict.emitted.tolist() == [[0, 1, 2, 0]]  # each id pays once, then the order is the old one
    assert rows.counts.sum() == 0


@pytest.mark.parametrize("lossy", [None, pytest.param((0.4, 0.6), marks=pytest.mark.slow)])
def test_the_compiled_walk_has_no_host_decision_and_the_same_verdict(lossy: tuple[float, float] | None) -> None:
    """Without the early exit: traced as one graph (the eager backend: this is about the trace, not the kernels)."""
    torch.manual_seed(6)
    tree = forest(random.Random(2), 4, 8, VOCAB)
    logits, A = torch.randn(VOCAB, VOCAB)[tree.tokens.clamp(min=0)], longest(tree)
    rows = slots_of(4, PARAMS["filters"], 9, []).wishes(torch.arange(1, 5), EVERYTHING)
    lens = torch.tensor([4, 5, 6, 7])
    given = (trees(tree, A, lens), logits, rows, lossy)
    compiled = torch.compile(verify, fullgraph=True, dynamic=False, backend="eager")(*given)
    eager = verify(*given, host_looks=True)
    for row in range(4):
        count = int(eager.count[row])
        assert_verdict(compiled, row, eager.path[row, :count].tolist(), eager.emitted[row, :count].tolist(), 8)


def test_a_compiled_walk_has_the_code_of_its_pick_once() -> None:
    tree = forest(random.Random(2), 4, 8, VOCAB)
    rows = slots_of(4, PARAMS["filters"], 9, []).wishes(torch.arange(1, 5), EVERYTHING)
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        regions = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
        called.extend(node.args[0].target for node in regions)
        return graph

    torch.compile(verify, fullgraph=True, dynamic=False, backend=backend)(
        trees(tree, 4), torch.randn(4, 8, VOCAB), rows)  # fmt: skip
    assert len(called) == 4 and len({*called}) == 1


# ------------------------------------------------------------------------------------------------ lossy thresholds


def tree_of_links(tokens: list[int], first: list[int], following: list[int]) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree given as first children and next siblings."""
    parents = [-1] * len(tokens)
    for node, child in enumerate(first):
        while child >= 0:
            parents[child] = node
            child = following[child]
    return tokens, parents


@pytest.mark.parametrize("single", [0.0, 1.0])
@pytest.mark.parametrize("acc", [1e-9, 1.0])
def test_the_published_verdicts_of_two_requests_at_any_threshold(single: float, acc: float) -> None:
    """D = 6, S = 3, V = 20, T = 0.01: of no probability, a child is not accepted even where the threshold is 0."""
    links = (
        ([0, 1, 2, 3, 4, 5], [1, 2, -1, 4, 5, -1], [-1, 3, -1, -1, -1, -1]),
        ([7, 8, 9, 10, 11, 12], [4, 2, 3, -1, 5, -1], [-1, -1, -1, -1, 1, -1]),
    )
    tokens, parents = zip(*(tree_of_links(*row) for row in links), strict=True)
    tree = DraftTree(torch.tensor(tokens), torch.tensor(parents))
    check(tree)
    logits = torch.ones(2, 6, 20)
    for row, likely in enumerate(([3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18])):
        logits[row, range(6), likely] = 10.0
    rows = slots_of(2, SamplingParams(temperature=0.01), 1, []).wishes(torch.arange(1, 3), frozenset({"temperature"}))
    lens = torch.tensor([5, 9])
    for verdict in (
        verify(trees(tree, 4, lens), logits, rows, (single, acc)),
        verify_greedy(trees(tree, 4), logits),
    ):
        assert_verdict(verdict, 0, [0, 3, 4, 5], [3, 4, 5, 18], 6)
        assert_verdict(verdict, 1, [0, 4, 5], [11, 12, 18], 6)


def lossy_law(q: list[float], tree: DraftTree, single: float, acc: float, node: int = 0) -> dict[tuple, float]:
    """The law of what is emitted from a node on, where every node has the distribution q: the rule in closed form."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    out: dict[tuple, float] = {}
    mass, covered, left = 0.0, 0.0, list(q)
    for child, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent != node or token == PADDING:
            continue
        mass, left[token] = mass + q[token], 0.0
        reach = covered if q[token] == 0 else 1.0 if q[token] >= single else min(1.0, mass / acc)  # coins below it
        for rest, chance in lossy_law(q, tree, single, acc, child).items():
            out[(token, *rest)] = chance * max(0.0, reach - covered)
        covered = max(covered, reach)
    left = left if sum(left) > 0 else q
    for token, share in enumerate(left):
        out[(token,)] = out.get((token,), 0.0) + (1 - covered) * share / sum(left)
    return out


LOGITS = [0.9, 0.1, -0.4, 1.2, -torch.inf]
BUSHY = DraftTree(  # two levels of two and three, a child without probability, padding, an order that is no ranking
    torch.tensor([[2, 1, 3, PADDING, 0, 4, 3, 2]]), torch.tensor([[-1, 0, 0, 0, 1, 1, 1, 2]])
)


@pytest.mark.parametrize(
    ("single", "acc"), [(1.0, 1.0), (0.3, 1.0), (0.7, 1.0), (1.0, 0.3), (1.0, 0.7), (0.3, 0.7), (0.7, 0.3), (0.0, 1.0)]
)
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_emitted_paths_follow_the_threshold_rule_in_closed_form(single: float, acc: float, top_p: float) -> None:
    n = 40_000 if top_p == 1 else 5_000  # a filter's histograms are of thousands of bins a row
    params, rows_of = SamplingParams(temperature=0.8, top_p=top_p), torch.arange(1, n + 1)
    state = SamplingState(n + 1, 5, "cpu")
    state.assign(1, params, 0, [], [], [])
    rows = state.wishes(torch.ones(n, dtype=torch.int64), state.needs([1]))._replace(seed=rows_of)
    tree = DraftTree(BUSHY.tokens.expand(n, -1), BUSHY.parents.expand(n, -1))
    verdict = verify(trees(tree, 3, rows_of % 7), torch.tensor(LOGITS).expand(n, 8, 5), rows, (single, acc))
    q = (torch.tensor(LOGITS).double() / 0.8).softmax(-1)
    kept = q.argsort(descending=True)[: 2 if top_p < 1 else 5]  # 0.45 and 0.31: the first two have more than 0.6
    q = (torch.zeros_like(q).index_copy_(0, kept, q[kept]) / q[kept].sum()).tolist()
    expected = lossy_law(q, BUSHY, single, acc)
    assert abs(sum(expected.values()) - 1) < 1e-9
    cells = {path: 0 for path in expected}
    for emitted, count in zip(verdict.emitted.tolist(), verdict.count.tolist(), strict=True):
        cells[tuple(emitted[:count])] += 1
    chi2, dof = 0.0, -1
    for path, chance in expected.items():
        if chance < 1e-9:
            assert cells[path] == 0, path
        else:
            chi2, dof = chi2 + (cells[path] - n * chance) ** 2 / (n * chance), dof + 1
    assert abs(chi2 - dof) < 4.5 * (2 * max(dof, 1)) ** 0.5


def test_at_thresholds_of_one_the_first_token_has_the_target_s_own_law() -> None:
    q = torch.tensor(LOGITS).double().softmax(-1).tolist()
    first = [0.0] * 5
    for path, chance in lossy_law(q, BUSHY, 1.0, 1.0).items():
        first[path[0]] += chance
    assert first == pytest.approx(q)


def test_a_lossy_walk_keeps_greedy_rows_exact_penalised_ones_too() -> None:
    torch.manual_seed(8)
    rng, target = random.Random(3), torch.randn(VOCAB, VOCAB)
    for adjusted in ({}, {"frequency_penalty": 1.5, "logit_bias": {2: 1.0}}):
        state, slots = SamplingState(7, VOCAB, "cpu"), torch.arange(1, 7)
        for slot in range(1, 7):
            wishes = {"temperature": 0.0 if slot % 2 else 1.0, **adjusted}
            state.assign(slot, SamplingParams(**wishes), slot, PROMPT, [], [])
        accepted = 0
        for _ in range(40):
            tree = forest(rng, 6, 12, VOCAB)
            logits, A, lens = target[tree.tokens.clamp(min=0)], longest(tree), torch.full((6,), 4)
            rows = state.wishes(slots, state.needs(range(1, 7)))
            lossy, exact = (verify(trees(tree, A, lens), logits, rows, lossy) for lossy in ((0.1, 0.3), None))
            for row in range(0, 6, 2):
                count = int(exact.count[row])
                assert_verdict(lossy, row, exact.path[row, :count].tolist(), exact.emitted[row, :count].tolist(), 12)
            accepted += int(lossy.count[1::2].sum() - exact.count[1::2].sum())
            for row, a in itertools.product(range(6), range(A - 1)):  # a path holds what it emits
                if a + 1 < lossy.count[row]:
                    assert tree.tokens[row, lossy.path[row, a + 1]] == lossy.emitted[row, a]
        assert accepted > 10


@pytest.mark.slow
def test_the_law_is_that_of_pick() -> None:
    n, logits = 15_000, torch.tensor([[1.0, 0.4, 0.1, -0.7, -1.9]])
    state = SamplingState(2, 5, "cpu")
    for params in PARAMS.values():
        state.assign(1, params, 0, [3, 1], [1], STOPS.get("min new", []))
        rows = state.wishes(torch.ones(n, dtype=torch.int64), state.needs([1]))._replace(seed=torch.arange(n))
        expected = law(logits, rows._replace(**{k: v[:1] for k, v in rows._asdict().items() if v is not None}))[0]
        seen = torch.bincount(pick(logits.expand(n, -1), rows, torch.full((n,), 3)), minlength=5) / n
        assert (seen - expected).abs().max() < 0.015 and float(expected.sum()) == pytest.approx(1)
