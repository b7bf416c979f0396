"""The beam and the drafter around a head: golden trees, and at every step the tree of a slow reference without cache.

Output tests cannot find drafting bugs, since a wrong tree only costs speed. So here every tree that the engine verifies
is compared, token for token, with one computed from the whole text by plain causal attention and Python lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conformance import HALF, random_head, truth
from exactness import CPU, VOCAB, build, check, finish, mixed_requests, request, run, submit, tiny_model
from torch import nn

import minispec.beam as beam_module
from minispec.attention import Causal, Plan
from minispec.beam import BeamDrafter, Candidates, Inputs, branch, candidate_count, likeliest, rerank, sprout
from minispec.drafter import Batch, DraftTree
from minispec.eagle import Eagle3Head, EagleHead
from minispec.engine import Engine
from minispec.model import Model
from minispec.mtp import MtpHead
from minispec.request import Request
from minispec.sampling import gumbel
from minispec.scheduler import Scheduler
from minispec.tree import ancestors, depth

MODEL = tiny_model()
SHAPES = [(1, 1, 2), (3, 1, 4), (2, 2, 7), (3, 3, 8), (4, 4, 16), (1, 5, 4)]  # steps, topk, nodes


class ToyHead(nn.Module):
    """A random head of EAGLE-3's shape: two taps fused, the pair mixed, one block, the target's own LM head."""

    name, taps, hidden_size, kv_heads, head_dim, token_map = "toy", (1, 2), 72, 3, 8, None

    def __init__(self, target: Model) -> None:
        super().__init__()
        self.target = [target]  # in a list: no submodule
        torch.manual_seed(3)
        self.fc, self.mix = nn.Linear(144, 72, bias=False), nn.Linear(144, 72, bias=False)
        self.block = Model.empty(target.config, torch.float32, CPU).layers[0]
        for name, parameter in self.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(0, 0.3)

    def embed(self, tokens):
        """Return the target's embedding."""
        return self.target[0].embed_tokens(tokens)

    def fuse(self, features):
        """Mix the taps."""
        return self.fc(features)

    def rope(self, positions):
        """Return the target's rotary factors."""
        return self.target[0].rope(positions)

    def forward(self, embedding, state, rope, attend, positions):
        """Return the next state."""
        return self.block(self.mix(torch.cat([embedding, state], -1)), rope, attend)

    def logits(self, state):
        """Return the target's logits of a state."""
        return self.target[0].logits(self.target[0].norm(state))


with torch.inference_mode():
    HEAD = ToyHead(MODEL)
HEADS = {
    "toy": HEAD,
    "eagle": random_head(EagleHead, MODEL, fc_bias=True),
    "eagle3": random_head(Eagle3Head, MODEL, taps=(1, 2), token_map=HALF),
    "mtp": random_head(MtpHead, MODEL),
}


def drafter(steps: int, topk: int, nodes: int, head: nn.Module = HEAD, coupled: bool = True) -> BeamDrafter:
    """Return a fresh drafter."""
    return BeamDrafter(head, rounds=steps, topk=topk, nodes=nodes, coupled=coupled)


@torch.inference_mode()
def slow_states(ids: list[int], drafted: list[int], head: nn.Module, model: Model = MODEL) -> torch.Tensor:
    """Return the head's last state after the text `ids` and the drafted tokens, everything computed afresh."""
    given = torch.tensor([ids[:-1]])
    _, features = model(given, torch.arange(len(ids) - 1)[None], Causal(), head.taps)
    states = head.fuse(features)
    out = None
    for extra in range(len(drafted) + 1):
        tokens = torch.tensor([ids[1:] + drafted[:extra]])
        positions = torch.arange(tokens.shape[1])[None]
        out = head(head.embed(tokens), states, head.rope(positions), Causal(), positions)
        states = torch.cat([states, out[:, -1:]], dim=1)
    return out[0, -1]


@torch.inference_mode()
def slow_tree(
    ids: list[int], steps: int, topk: int, nodes: int, head: nn.Module, model: Model = MODEL
) -> set[tuple[int, ...]]:
    """Return the paths of EAGLE-2's tree after a text."""
    logits = lambda path: head.logits(slow_states(ids, list(path), head, model))  # noqa: E731
    return grown(logits, (steps, topk, nodes), head.token_map)


def grown(
    logits: Callable[[tuple[int, ...]], torch.Tensor], shape: tuple[int, int, int], ids: torch.Tensor | None = None
) -> set[tuple[int, ...]]:
    """Return the paths of the tree that these logits grow; ids: the token that each of them is of, if not its place."""
    rounds, topk, nodes = shape
    found: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(rounds):
        children = []
        for path, score in frontier:
            values, tokens = logits(path).log_softmax(-1).topk(topk)
            tokens = tokens if ids is None else ids[tokens]
            children += [((*path, t), score + v) for t, v in zip(tokens.tolist(), values.tolist(), strict=True)]
        found |= dict(children)
        frontier = sorted(children, key=lambda c: -c[1])[:topk]
    return {path for path, _ in sorted(found.items(), key=lambda item: -item[1])[: nodes - 1]}


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Return the root-to-node paths of a tree, the root left out."""
    known: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        known.append((*known[parent], token))
    return set(known[1:])


def record(scheduler: Scheduler, also: Callable[[int], tuple] = lambda row: ()) -> list[tuple]:
    """Note of each proposed tree the text before it, what `also` tells of its row, tokens, parents and the request."""
    noted: list[tuple] = []
    inner = scheduler.engine.drafter.propose

    def propose(batch: Batch) -> DraftTree:
        tree = inner(batch)
        check(tree)
        slots = {r.slot: r for r in scheduler.running}
        for row, slot in enumerate(batch.slots.tolist()):
            if slot:
                ids = slots[slot].ids
                assert ids[-1] == batch.root[row] == tree.tokens[row, 0] and len(ids) - 1 == batch.lens[row]
                noted.append((ids, *also(row), tree.tokens[row].tolist(), tree.parents[row].tolist(), slots[slot]))
        return tree

    scheduler.engine.drafter.propose = propose
    return noted


def assert_slow_trees(
    compare: list, steps: int, topk: int, nodes: int, every: int = 1, head: nn.Module = HEAD, model: Model = MODEL
) -> None:
    """Compare the noted trees with the slow ones."""
    assert len(compare) > 10
    for ids, tokens, parents, *_ in compare[::every]:
        slow = slow_tree(ids, steps, topk, nodes, head, model)
        assert paths(tokens, parents) == slow, f"after {len(ids)} tokens"


def after_prefix_hits(
    scheduler: Scheduler, first: list[int], differ: int,
    watch: Callable[[Scheduler], list[tuple]] = record, new_tokens: int = 16,
) -> list[tuple]:  # fmt: skip
    """Serve a text, one that differs from it in a token, and its second turn; returns the notes of the last two."""
    other, page = first[:differ] + [50] + first[differ + 1 :], scheduler.kv.page_size
    run(scheduler, [request("a", first, max_new_tokens=4)])
    noted = watch(scheduler)
    again = request("b", other, max_new_tokens=new_tokens)
    run(scheduler, [again])
    assert again.cached_tokens == (differ - scheduler.engine.drafter.lookahead) // page * page
    turn = request("c", [*other, *again.output_ids, 7, 8], max_new_tokens=new_tokens)
    run(scheduler, [turn])
    assert turn.cached_tokens >= 2 * page
    return noted


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tree_is_the_slow_reference_s(shape) -> None:
    scheduler = build(MODEL, drafter(*shape))
    compare = record(scheduler)
    run(scheduler, mixed_requests(max_new_tokens=6))
    assert_slow_trees(compare, *shape, every=3)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_every_published_kind_of_head_drafts_as_the_slow_reference(name) -> None:
    for shape in ((3, 1, 4), (3, 3, 8)):
        scheduler = build(MODEL, drafter(*shape, head=HEADS[name]), chunk=32)
        compare = record(scheduler)
        requests = mixed_requests(max_new_tokens=6)
        run(scheduler, requests)
        assert_slow_trees(compare, *shape, every=3, head=HEADS[name])
        for r in requests:
            assert r.output_ids == truth(MODEL, r)


@pytest.mark.parametrize("how", [dict(running=1), dict(chunk=32), dict(chunk=1, running=2), dict(pages=15)], ids=str)
def test_trees_stay_the_same_alone_in_chunks_and_under_retraction(how) -> None:
    scheduler = build(MODEL, drafter(3, 2, 6), **how)
    compare = record(scheduler)
    requests = mixed_requests(max_new_tokens=40 if "pages" in how else 6)
    run(scheduler, requests)
    assert_slow_trees(compare, 3, 2, 6, every=9 if "pages" in how else 3)
    assert scheduler.metrics.retractions > 0 or "pages" not in how


def test_a_prefix_hit_restores_the_draft_rows_whatever_follows_the_page() -> None:
    # Draft row 15 of a 16-row page depends on token 16: prompts that first differ there must not share the page.
    for page, differ in ((16, 15), (16, 16), (16, 17), (16, 32), (64, 63), (64, 64), (64, 65)):
        scheduler = build(MODEL, drafter(3, 2, 6), page_size=page, pages=20)
        compare = after_prefix_hits(scheduler, [1 + 7 * i % 40 for i in range(2 * page + 7)], differ, new_tokens=12)
        assert_slow_trees(compare, 3, 2, 6, every=3)


def test_prompts_prefilled_together_share_the_pages_of_their_draft_rows_too() -> None:
    scheduler = build(MODEL, drafter(3, 2, 6, coupled=False), pages=40, chunk=256)
    compare = record(scheduler)
    # The second prompt first differs in the token that row 47 of the draft looks ahead to: it shares two pages of six.
    prompt = [5 * i % 61 for i in range(100)]
    prompts = [prompt, prompt, prompt[:48] + [7] + prompt[49:]]
    requests = [request(f"t{i}", p, temperature=1.0, sampling_seed=i, max_new_tokens=12) for i, p in enumerate(prompts)]
    submit(scheduler, *requests)
    finish(scheduler, lambda: len(scheduler.running) == 3)
    one, two, three = (scheduler.seats[r].pages for r in requests)
    assert one[:6] == two[:6] and one[:2] == three[:2] and not set(one[2:]) & set(three[2:])
    finish(scheduler)
    assert_slow_trees(compare, 3, 2, 6, every=3)
    assert all(r.output_ids == truth(MODEL, r) for r in requests)


def test_an_overflow_in_the_trash_page_reaches_no_request(monkeypatch) -> None:
    """A shorter request of a batch has page 0 where the longer one has its last pages; padding may have written NaN."""
    scheduler = build(MODEL, drafter(3, 2, 6), running=3)
    compare = record(scheduler)
    fill = Plan.fill

    def poisoned(self, *step, **more):
        for pool in scheduler.kv.pools:
            pool[:, :, : scheduler.kv.page_size] = float("nan")
        fill(self, *step, **more)

    monkeypatch.setattr(Plan, "fill", poisoned)
    requests = [request("short", [5], max_new_tokens=8), request("long", range(50), max_new_tokens=8)]
    run(scheduler, requests)
    assert_slow_trees(compare, 3, 2, 6, every=3)
    assert all(r.output_ids == truth(MODEL, r) for r in requests)


# ---- errors on purpose ---------------------------------------------------------------------------------------------


def stale_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows written while drafting are kept; the accepted path is not computed again."""
    original = BeamDrafter.commit

    def commit(self, new):
        if new.following.shape[1] == self.depth + 1:
            before = new.ends - (new.ends % new.following.shape[1] > 0).long()
            original(self, new._replace(ends=before))
        else:
            original(self, new)

    patch.setattr(BeamDrafter, "commit", commit)


def token_i_instead_of_the_next(patch: pytest.MonkeyPatch) -> None:
    """The pair in row i holds token i."""
    original = BeamDrafter.commit
    patch.setattr(BeamDrafter, "commit", lambda self, new: original(
        self, new._replace(following=new.following.roll(1, 1))))  # fmt: skip


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Drafted rows turn by one position more."""
    patch.setattr(BeamDrafter, "_inputs", moved_inputs(1))


def moved_inputs(by: int) -> Callable[..., Inputs]:
    """Return `BeamDrafter._inputs` with other positions than the plan's rows."""
    original = BeamDrafter._inputs

    def inputs(self, beam, batch, number, frontier):
        found = original(self, beam, batch, number, frontier)
        return self._read(frontier.tokens, found.positions + by)

    return inputs


def feature_of_the_wrong_layer(patch: pytest.MonkeyPatch) -> None:
    """The first tap is one layer early."""
    original = BeamDrafter.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.taps = (0, 2)

    patch.setattr(BeamDrafter, "__init__", init)


def siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    """A drafted node sees all scratch rows, not its ancestors alone."""
    original = Plan.fill

    def fill(self, slots, starts, visible, live, offset=0):
        drafting = self.window != self.width
        original(self, slots, starts, torch.ones_like(visible) if drafting else visible, live, offset)

    patch.setattr(Plan, "fill", fill)


def d2t_as_ids(patch: pytest.MonkeyPatch) -> None:
    """The file's offsets are taken for target ids."""
    original = beam_module.likeliest

    def likeliest(logits, count, batch, positions, token_map):
        scores, ids = original(logits, count, batch, positions, token_map)
        return scores, ids - torch.searchsorted(token_map, ids)

    patch.setattr(beam_module, "likeliest", likeliest)


def sample_at_a_chunk_s_end(patch: pytest.MonkeyPatch) -> None:
    """The pair at a chunk's end holds what the target would have said, not the prompt's next token."""
    original = Engine.prefill

    def prefill(self, chunks):
        said = original(self, chunks).outputs
        wrong = [c if c.last else c._replace(following=int(said[i, 0])) for i, c in enumerate(chunks)]
        return original(self, wrong)

    patch.setattr(Engine, "prefill", prefill)


MUTATIONS = {  # and the head that shows each: the toy hardly looks at a token, nor at siblings
    stale_rows: "toy", token_i_instead_of_the_next: "eagle", position_off_by_one: "toy",
    feature_of_the_wrong_layer: "toy", siblings_see_each_other: "eagle", d2t_as_ids: "eagle3",
    sample_at_a_chunk_s_end: "eagle",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_wrong_draft_is_noticed(mutation, monkeypatch) -> None:
    mutation(monkeypatch)
    head = HEADS[MUTATIONS[mutation]]
    scheduler = build(MODEL, drafter(3, 3, 8, head=head), chunk=4 if mutation is sample_at_a_chunk_s_end else 32)
    compare = record(scheduler)
    run(scheduler, mixed_requests(max_new_tokens=8))
    with pytest.raises(AssertionError, match="after"):
        assert_slow_trees(compare, 3, 3, 8, every=2, head=head)


# ---- coupling with the noise of the target's picks ---------------------------------------------------------------


def sampled_and_greedy(**params: object) -> list[Request]:
    """Return the mixed requests, every third greedy, the others at two temperatures."""
    requests = mixed_requests(**params)
    for index, r in enumerate(requests):
        r.params = replace(r.params, temperature=(0.0, 1.0, 0.7)[index % 3])
    return requests


def slow_coupled_tree(ids: list[int], r: Request, shape: tuple[int, int, int], head: nn.Module) -> set[tuple[int, ...]]:
    """Return the paths of the tree whose children are scored by softmax(logits / T + the noise of their position)."""
    coupled = r.params.temperature > 0

    class Coupled:
        """The head with noise in its logits; the depth is how many positions the states go beyond the text."""

        taps, token_map, fuse, embed, rope = head.taps, head.token_map, head.fuse, head.embed, head.rope

        def __call__(self, embedding, state, rope, attend, positions):
            self.position = positions.shape[1] + 1  # of the pick: rows 0 to len - 2 hold the text, one more each draft
            return head(embedding, state, rope, attend, positions)

        def logits(self, state):
            if not coupled:
                return head.logits(state)
            noise = gumbel(torch.tensor(r.seed), torch.tensor(self.position), VOCAB)
            noise = noise if head.token_map is None else noise[head.token_map]
            return head.logits(state) / r.params.temperature + noise

    return slow_tree(ids, *shape, Coupled())


def coupled_case(name: str, shape: tuple[int, int, int], coupled: bool) -> None:
    """Serve the requests; compare their trees with slow ones, and their output with the reference."""
    scheduler = build(MODEL, drafter(*shape, head=HEADS[name], coupled=coupled))
    compare = record(scheduler)
    requests = sampled_and_greedy(max_new_tokens=8)
    run(scheduler, requests)
    for ids, tokens, parents, r in compare[::3]:
        slow = slow_coupled_tree(ids, r, shape, HEADS[name]) if coupled else slow_tree(ids, *shape, HEADS[name])
        assert paths(tokens, parents) == slow, f"after {len(ids)} tokens"
    for r in requests:
        assert r.output_ids == truth(MODEL, r)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 4, 12)], ids=str)
@pytest.mark.parametrize("name", ["toy", "eagle3"])  # eagle3 has a draft vocabulary of its own
def test_greedy_and_sampled_rows_share_a_batch_coupled_or_not(name, shape, coupled) -> None:
    coupled_case(name, shape, coupled)


@pytest.mark.parametrize(("temperature", "sampled"), [(0.0, False), (0.7, True)])
def test_penalties_alone_ask_the_drafter_for_no_other_graph(temperature: float, sampled: bool) -> None:
    """Graphs are found by which arguments there are, and a greedy step's was made without penalties."""
    scheduler, given = build(MODEL, drafter(3, 1, 4, coupled=True)), []
    propose = scheduler.engine.drafter.propose

    def noted(batch: Batch) -> DraftTree:
        given.append((batch.temperature is not None, batch.seed is not None))
        return propose(batch)

    scheduler.engine.drafter.propose = noted
    asked = request("r", [5, 9, 2], temperature=temperature, repetition_penalty=1.3, max_new_tokens=6, ignore_eos=True)
    run(scheduler, [asked])
    assert set(given) == {(sampled, sampled)} and asked.output_ids == truth(MODEL, asked)


@pytest.mark.slow
def test_noise_of_the_wrong_position_is_noticed(monkeypatch) -> None:
    original = BeamDrafter._children
    monkeypatch.setattr(BeamDrafter, "_children", lambda self, logits, batch, depth: original(
        self, logits, batch, depth + 1))  # fmt: skip
    with pytest.raises(AssertionError, match="after"):
        coupled_case("toy", (3, 1, 4), True)


@pytest.mark.slow
def test_noise_of_draft_ids_instead_of_target_ids_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(beam_module, "gumbel", lambda seed, position, ids: gumbel(
        seed, position, ids if isinstance(ids, int) else len(ids)))  # fmt: skip
    with pytest.raises(AssertionError, match="after"):
        coupled_case("eagle3", (3, 1, 4), True)


# ---- golden vectors ----------------------------------------------------------------------------------------------


def grow(root: torch.Tensor, logits: Callable[[], torch.Tensor], rounds: int, topk: int) -> Candidates:
    """Grow a tree from the logits at the root, and those of every further frontier in turn."""
    children = lambda logits: likeliest(logits, topk, None, logits, None)  # noqa: E731
    scores, tokens = children(root)
    found, frontier = sprout(scores, tokens, torch.zeros(len(root), 4), (rounds - 1) * topk)
    candidates = [found]
    for number in range(1, rounds):
        found, frontier = branch(torch.tensor(number), frontier, *children(logits()), frontier.states)
        candidates.append(found)
    return Candidates(*(torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True)))


def test_ties_never_keep_a_child_without_its_parent() -> None:
    certain = torch.full((1, VOCAB), -1e9)
    certain[0, 7] = 0.0  # probability 1: every child ties with its parent
    for nodes in range(2, candidate_count(4, 3) + 2):
        candidates = grow(certain, lambda: certain[:, None].expand(-1, 3, -1), rounds=4, topk=3)
        tree = rerank(candidates, torch.tensor([1]), nodes)
        check(tree)
        above = ancestors(tree.parents)[0]
        assert depth(above[None])[0].max() == min(nodes - 1, 4)


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_the_tree_of_one_round_is_the_best_of_its_candidates(nodes: int) -> None:
    made, told = drafter(1, 3, nodes), [torch.zeros(2, nodes) for _ in range(2)]
    scores = torch.tensor([[-0.1, -0.1, -3.0], [-1.0, -2.0, -torch.inf]])
    found = Candidates(torch.tensor([[5, 6, 7], [8, 9, 1]]), scores, torch.full((2, 3), -1))
    root, beam = torch.tensor([3, 4]), SimpleNamespace(nodes=nodes)
    shallow = made._shallow(beam, SimpleNamespace(root=root, scores=told[0]), found)
    best = rerank(found, root, nodes, told[1])
    assert all(map(torch.equal, shallow, best)) and torch.equal(*told)


# ---- logits that are no numbers ----------------------------------------------------------------------------------

BROKEN = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("round_", range(3))
@pytest.mark.parametrize("whole", [False, True], ids=["one logit", "all logits"])
def test_a_child_without_probability_never_stands_without_its_parent(round_: int, value: float, whole: bool) -> None:
    """The middle node of a frontier has broken logits; the root, in round 0."""
    generator, rounds = torch.Generator().manual_seed(round_), 3

    def draw(round_now: int, nodes: int) -> torch.Tensor:
        logits = 4 * torch.randn(2, nodes, VOCAB, generator=generator)
        if round_now == round_:
            logits[:, nodes // 2, slice(None) if whole else 7] = value
        return logits

    now = iter(range(1, rounds))
    candidates = grow(draw(0, 1)[:, 0], lambda: draw(next(now), 3), rounds=rounds, topk=3)
    for nodes in range(2, candidate_count(rounds, 3) + 2):
        tree = rerank(candidates, torch.tensor([1, 2]), nodes)
        check(tree)
        for row in range(2):
            proposed = paths([-1, *candidates.tokens[row].tolist()], [-1, *(candidates.parents[row] + 1).tolist()])
            assert paths(tree.tokens[row].tolist(), tree.parents[row].tolist()) <= proposed, f"{nodes} nodes"


class BrokenHead(ToyHead):
    """The toy head, whose logits are broken at one node of the frontier in one round of three."""

    def break_at(self, round_: int, value: float) -> BrokenHead:
        """Choose the round, and what stands in the logits."""
        self.round, self.value, self.calls = round_, value, 0
        return self

    def logits(self, state):
        """Return the target's logits, now and then broken."""
        logits = super().logits(state)
        if self.calls % 3 == self.round:
            logits[:, logits.shape[1] // 2] = self.value
        self.calls += 1
        return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("round_", "value"), [(0, BROKEN[0]), (1, BROKEN[0]), (2, BROKEN[0]), (1, BROKEN[1])], ids=str)
def test_output_stays_exact_when_a_head_gives_no_numbers(round_: int, value: float, temperature: float) -> None:
    with torch.inference_mode():
        head = BrokenHead(MODEL).break_at(round_, value)
    scheduler = build(MODEL, drafter(3, 3, 8, head=head))
    compare = record(scheduler)
    requests = mixed_requests(count=4, max_new_tokens=8, temperature=temperature)
    run(scheduler, requests)
    assert len(compare) > 10 and head.calls > 20
    assert all(r.output_ids == truth(MODEL, r) for r in requests)
