"""Growing a tree on the device: the beam that heads and draft models share, and the drafter around a head.

A node's score is the log-probability of its path from the root. Round one proposes the root's K likeliest children:
the first frontier. Each later round expands the K nodes of a frontier. It proposes the K likeliest children of each
node, and the K best of these K * K are the next frontier. All proposed nodes are candidates. After S rounds the best
N - 1 candidates form the tree (EAGLE-2, arXiv 2406.16858). A child's score never exceeds its parent's, and ties go to
the earlier index, so the parent of a kept candidate is kept too.

A head reads pairs (state for token i, token i + 1). The keys and values of a pair are in row i of the head's own
memory, whose pages have the same numbers as the target's pages. After a forward pass of the target, `commit` computes
the rows of the accepted tokens from the target's features. The rows that the head writes while drafting come after the
committed rows, and are overwritten later (scratch):

    row   0 ... lens-1 | lens .. lens+K-1 | lens+K .. lens+2K-1 | ...
          committed      first frontier     second frontier          each node sees the committed rows and its ancestors

The noise of the target's picks (`sampling.py`) is known before the target runs. `couple` adds it to the head's logits
too (arXiv 2408.07978), so two models that agree on the logits agree on the pick. Penalties and filters are ignored.

Read next: `eagle.py` for the heads, `standalone.py` for a draft model in place of a head, `engine.py` for the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.attention import AttendKind, Plan
from minispec.compiled import Compiler, Key, Small, Step
from minispec.drafter import Batch, Committed, Drafter, TreeSize
from minispec.kv import KVShape, PagedKV
from minispec.model import Attend, LayerAttend, Rope
from minispec.request import GREEDY_BELOW
from minispec.sampling import gumbel
from minispec.tree import DraftTree


class Candidates(NamedTuple):
    """All C nodes that a beam proposed: K in round one, then K * K in each further round, parents first."""

    tokens: Tensor  # [B, C] int64, target ids
    scores: Tensor  # [B, C] fp32, log-probability of the path from the root
    parents: Tensor  # [B, C] int64, index of the parent candidate; -1 if the parent is the root


class Frontier(NamedTuple):
    """The nodes that a round expands.

    In this file H is the head's hidden size, W the number of scratch rows, Vd the number of ids that a head can draft.
    """

    tokens: Tensor  # [B, K] int64, target ids
    states: Tensor  # [B, K, H], the head's output at each node's parent
    scores: Tensor  # [B, K] fp32, log-probability of the path from the root
    # Each node's index among the candidates. The name hides tuple.index, which nobody calls.
    index: Tensor  # type: ignore[assignment]  # [B, K] int64
    visible: Tensor  # [B, K, W] bool: which scratch rows each node sees; its own row is one of these


class Inputs(NamedTuple):
    """The inputs of the network except the states, with the shapes that they have for a frontier."""

    embedding: Tensor  # [B, K, H]
    rope: Rope
    positions: Tensor  # [B, K] int64


def candidate_count(rounds: int, topk: int) -> int:
    """Return how many candidates S rounds of K branches propose."""
    return topk + (rounds - 1) * topk * topk


def rerank(candidates: Candidates, root: Tensor, nodes: int, scores: Tensor | None = None) -> DraftTree:
    """Return the tree of the root [B] int64 and the best `nodes - 1` candidates, in the order of their indices.

    The candidates' scores are written to `scores`; see `Batch.scores`.
    """
    # A child may score as high as its parent. A stable sort puts the earlier index, the parent, first.
    order = candidates.scores.sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1]
    chosen = order.sort(dim=1).values
    if scores is not None:
        scores[:, 1:] = candidates.scores.gather(1, chosen)
    place = torch.zeros_like(candidates.parents)  # each candidate's node index in the tree
    place.scatter_(1, chosen, torch.arange(1, nodes, device=root.device).expand_as(chosen))
    above = candidates.parents.gather(1, chosen)
    parents = torch.where(above < 0, 0, place.gather(1, above.clamp(min=0)))
    tokens = candidates.tokens.gather(1, chosen)
    return DraftTree(
        torch.cat((root[:, None], tokens), dim=1), torch.cat((torch.full_like(root, -1)[:, None], parents), dim=1)
    )


def likeliest(
    logits: Tensor, count: int, batch: Batch | None, positions: Tensor, token_map: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities fp32 and target ids of the `count` likeliest tokens, each [B, K, count].

    batch: whose picks' noise is added first (`couple`, which has the other arguments); None: no noise.

    Logits with NaN or infinity give NaN probabilities, which a sort puts first. Children with such a score would then
    enter the tree without their parents, so they get -inf.
    """
    logits = logits if batch is None else couple(logits, batch, positions, token_map)
    scores, ids = logits.float().log_softmax(-1).topk(count, dim=-1)
    return scores.masked_fill(scores.isnan(), -torch.inf), ids if token_map is None else token_map[ids]


def couple(logits: Tensor, batch: Batch, positions: Tensor, token_map: Tensor | None) -> Tensor:
    """Return the logits [B, K, Vd], with the noise of the target's picks for sampled requests.

    positions [B, K] or [B, 1] int64: the positions of the tokens that the logits predict. token_map: [Vd], the target's
    id for each draft id; None: the same ids. For a sampled request the result is logits / T + noise, up to a constant.
    Its softmax scores the children: given the noise, it is the probability that the target picks each child, if the
    target's logits / T are the head's plus independent standard Gumbel errors.
    """
    if batch.temperature is None or batch.seed is None:
        return logits
    noise = gumbel(batch.seed[:, None], positions, logits.shape[-1] if token_map is None else token_map)
    t, logits = batch.temperature[:, None, None], logits.float()
    score = t * noise - (logits.amax(-1, keepdim=True) - logits)  # in `pick`'s order, so that rounding is equal
    return torch.where(t > 0, score / t.clamp(min=GREEDY_BELOW), logits)


def sprout(scores: Tensor, tokens: Tensor, state: Tensor, width: int) -> tuple[Candidates, Frontier]:
    """Return the K likeliest children of the root, as candidates and as the first frontier.

    scores, tokens [B, K]: from `likeliest`. state [B, H]: the head's output at the root. width: W, the scratch rows.
    """
    batch, topk = tokens.shape
    # `repeat`, not `expand`: the strides must be those of later rounds, or another graph would be needed.
    index = torch.arange(topk, device=tokens.device).repeat(batch, 1)
    visible = torch.eye(topk, width, dtype=torch.bool, device=tokens.device).repeat(batch, 1, 1)
    frontier = Frontier(tokens, state[:, None].repeat(1, topk, 1), scores, index, visible)
    # Copies, since no tensor may stand for two arguments of a compiled function.
    return Candidates(tokens.clone(), scores.clone(), torch.full_like(index, -1)), frontier


def branch(
    round_: Tensor, frontier: Frontier, scores: Tensor, tokens: Tensor, states: Tensor
) -> tuple[Candidates, Frontier]:
    """Return the K likeliest children of each node of a frontier, and the K best of them all as the next frontier.

    round_ [] int64: the number of the frontier, 1 for the root's children. scores, tokens [B, K, K]: each node's
    children from `likeliest`. states [B, K, H]: the head's output at the frontier.
    """
    topk, width = frontier.tokens.shape[1], frontier.visible.shape[-1]
    scores, tokens = (frontier.scores[..., None] + scores).flatten(1), tokens.flatten(1)
    best, flat = scores.topk(topk, dim=-1)
    parent = flat // topk
    row = torch.arange(width, device=flat.device) - round_ * topk
    own = row == torch.arange(topk, device=flat.device)[:, None]
    following = Frontier(
        tokens=tokens.gather(1, flat),
        states=states.gather(1, parent[..., None].expand(-1, -1, states.shape[-1])),
        scores=best,
        index=topk + (round_ - 1) * topk * topk + flat,
        visible=frontier.visible.gather(1, parent[..., None].expand(-1, -1, width)) | own,
    )
    return Candidates(tokens, scores, frontier.index.repeat_interleave(topk, dim=1)), following


class Beam(Key):
    """The size of the trees for B requests, and the static tensors for growing them."""

    def __init__(self, batch: int, size: TreeSize, plan: Plan | None, live: Tensor) -> None:
        """plan: a frontier's attention plan, which all sizes of tree share; None: no frontier is planned.

        live: [B, K] bool, all true: a frontier has no padding, and `Plan.fill` asks for it.
        """
        assert size.rounds is not None, "a beam grows in rounds"
        self.batch, self.nodes, self.rounds, self.live, self.plan = batch, size.nodes, size.rounds, live, plan

    @property
    def of_batch(self) -> Sequence[Tensor]:
        return () if self.batch == 1 else [self.live, *(self.plan.tensors if self.plan is not None else ())]


class BeamDrafter(Drafter):
    """The drafter around a head: S rounds of K branches propose nodes, and the best form a tree of N nodes.

    Smaller sizes of tree may have fewer rounds. They use the plans of the largest one, so the head needs no further
    graph. `_open`, `_round` and `_close` run before, between and after the calls of the network. They may be
    compiled. The only tensors that they write in place are those of the next call's plan.
    """

    lookahead = 1  # row i depends on token i + 1, which is in the head's pair
    network: Any  # see `__init__`
    rounds: int
    topk: int

    def __init__(
        self, network: Any, *, rounds: int, topk: int, nodes: int, coupled: bool = True,
        smaller: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """network: an nn.Module with these members of `eagle.DraftHead`: name, taps, token_map, hidden_size, kv_heads,
        head_dim, embed, fuse, rope, forward, logits.

        smaller: rounds and nodes of each smaller size, ascending.
        coupled: whether to draft with the noise of the target's picks; if not, drafts are the likeliest tokens.
        """
        assert nodes <= candidate_count(rounds, topk) + 1, "more nodes than candidates"
        self.network, self.rounds, self.topk, self.nodes, self.coupled = network, rounds, topk, nodes, coupled
        self.name, self.taps = network.name, network.taps
        self.depth = min(rounds, nodes - 1)
        for fewer, size in smaller:
            assert fewer <= rounds and 1 < size < nodes, "the smaller tree is the smaller one"
            assert size <= candidate_count(fewer, topk) + 1, "more nodes than candidates"
            self.smaller += (TreeSize(size, min(fewer, size - 1), fewer),)
        self.kv_shape = KVShape(1, network.kv_heads, network.head_dim)
        self.window = self.scratch = (rounds - 1) * topk  # W, the rows that all frontiers together take
        self.run_network: Callable[..., Tensor] = type(network).forward
        self.take_in: Step = BeamDrafter._take_in
        self.small = Small(BeamDrafter._open, BeamDrafter._round, BeamDrafter._close)

    def attach(
        self, kv: PagedKV, attend_kind: AttendKind, batch_sizes: Sequence[int], chunk_counts: Sequence[int]
    ) -> None:
        """Allocate the drafter's own pages, per-slot state and plans."""
        self.kv, self.attend_kind = kv.sibling(self.kv_shape), attend_kind
        slots = kv.table.shape[0]
        like: dict[str, Any] = {"dtype": kv.pool.dtype, "device": kv.pool.device}
        self.state = torch.zeros(slots, self.network.hidden_size, **like)  # the head's output at each slot's last row
        self._attends: dict[Plan, Attend] = {}
        self._beams: dict[tuple[int, ...], Beam] = {}  # the beams by B and N
        for batch in batch_sizes:
            plan = Plan(self.kv, batch, 1, self.topk, window=self.window) if self.window else None
            live = torch.ones(batch, self.topk, dtype=torch.bool, device=kv.pool.device)
            for size in self.trees:
                # Trees of one round have no frontier to plan. On CUDA they share a graph with others, which plan one.
                planned = plan if size.rounds != 1 or not kv.host_looks else None
                self._beams[batch, size.nodes] = Beam(batch, size, planned, live)
        # The numbers of the rounds, as tensors, so that one graph serves every round.
        self._rounds = [torch.full((), number, device=kv.pool.device) for number in range(self.rounds + 1)]

    def compile(self, compiler: Compiler) -> None:
        """Compile the network for frontiers, and what `commit` does."""
        self.run_network = compiler(type(self.network).forward)
        self.take_in = compiler(BeamDrafter._take_in)

    def attend_paths(self, plan: Plan) -> None:
        """Make the attention for a plan of accepted paths, and for the frontiers of its batch."""
        self._attend(plan)
        frontier = self._beams[plan.batch, self.nodes].plan
        if frontier is not None and plan.width > 2:  # paths of two tokens are those of one round, without a frontier
            self._attend(frontier)

    def propose(self, batch: Batch) -> DraftTree:
        """Grow one tree per request; writes scratch rows beyond the committed ones in the drafter's own pages."""
        beam, watched = self._beams[tuple(batch.tree.tokens.shape)], batch.scores is not None
        batch = batch._replace(tree=None)  # type: ignore[arg-type]  # the beam does not read the host's trees
        open_, round_, close = self.small.eager if watched else self.small.of(beam)
        found, frontier, inputs = open_(self, beam, batch)
        if beam.rounds == 1:
            return self._shallow(beam, batch, found)
        candidates = [*found]
        for number in self._rounds[1 : beam.rounds]:
            assert inputs is not None and beam.plan is not None
            states = self._through(inputs, frontier.states, beam.plan)
            if number is self._rounds[beam.rounds - 1]:
                break
            found, frontier, inputs = round_(self, beam, batch, number, frontier, states)
            candidates += found
        return close(self, beam, batch, frontier, states, tuple(candidates))

    def _open(self, beam: Beam, batch: Batch) -> tuple[Candidates, Frontier, Inputs | None]:
        """Propose the root's children; return them as candidates and as the first frontier, with its inputs."""
        state = self.state[batch.slots]
        scores, tokens = self._children(self.network.logits(state)[:, None], batch, 0)
        found, frontier = sprout(scores[:, 0], tokens[:, 0], state, self.window)
        return found, frontier, self._inputs(beam, batch, self._rounds[1], frontier)

    def _round(
        self, beam: Beam, batch: Batch, number: Tensor, frontier: Frontier, states: Tensor
    ) -> tuple[Candidates, Frontier, Inputs | None]:
        """Propose the children of frontier `number`; return them as candidates, the next frontier and its inputs."""
        found, frontier = branch(number, frontier, *self._children(self.network.logits(states), batch, number), states)
        return found, frontier, self._inputs(beam, batch, number + 1, frontier)

    def _shallow(self, beam: Beam, batch: Batch, found: Candidates) -> DraftTree:
        """Return the tree of the root and its likeliest children, which come in the order of their scores.

        It is no function of `small`, since a graph would have little more than these two copies to make.
        """
        if batch.scores is not None:
            batch.scores[:, 1:] = found.scores[:, : beam.nodes - 1]
        tokens = torch.cat((batch.root[:, None], found.tokens[:, : beam.nodes - 1]), dim=1)
        return DraftTree(tokens, torch.cat((found.parents[:, :1], torch.zeros_like(tokens[:, 1:])), dim=1))

    def _close(
        self, beam: Beam, batch: Batch, frontier: Frontier, states: Tensor, found: tuple[Tensor, ...]
    ) -> DraftTree:
        """Propose the last frontier's children, and return the tree of the best candidates.

        states: the head's output at the frontier. found: the fields of the candidates of all earlier rounds, one after
        the other.
        """
        number = self._rounds[beam.rounds - 1]
        children = self._children(self.network.logits(states), batch, number)
        # Not `+=`: Dynamo of torch 2.11 adds no named tuple to a tuple.
        found = (*found, *branch(number, frontier, *children, states)[0])
        fields = len(Candidates._fields)
        candidates = Candidates(*(torch.cat(found[field::fields], dim=1) for field in range(fields)))
        return rerank(candidates, batch.root, beam.nodes, batch.scores)

    def _inputs(self, beam: Beam, batch: Batch, number: Tensor, frontier: Frontier) -> Inputs | None:
        """Fill the plan for frontier `number`, whose rows follow those of earlier frontiers; return its inputs."""
        if beam.plan is None:
            return None
        first = batch.lens + 1 - self.lookahead  # the first drafted row; its number is also frontier 1's position
        beam.plan.fill(batch.slots, first, frontier.visible, beam.live, offset=(number - 1) * self.topk)
        positions = (first + number - 1)[:, None].repeat(1, self.topk)
        return self._read(frontier.tokens, positions)

    def commit(self, new: Committed) -> None:
        """Compute the rows of the tokens just committed, from the target's features; keep each last row's state."""
        attend = self._attend(new.plan).layer(0)
        states = self.take_in(self, attend, new.following, new.features, new.positions)
        self.state[new.slots] = states.flatten(0, 1)[new.ends]  # eager: a graph would serve one number of chunks only

    def _take_in(self, attend: LayerAttend, tokens: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """Return the states [B, T, H] of committed rows; tokens: for each row, the token after it. May be compiled."""
        embedding, rope, _ = self._read(tokens, positions)
        return self.network(embedding, self.network.fuse(features), rope, attend, positions)

    def _read(self, tokens: Tensor, positions: Tensor) -> Inputs:
        """Return the inputs of the network for tokens at positions, both [B, T] int64."""
        return Inputs(self.network.embed(tokens.clamp(min=0)), self.network.rope(positions), positions)

    def _through(self, inputs: Inputs, states: Tensor | None, plan: Plan) -> Tensor:
        """Return the network's states [B, T, H] under a plan."""
        embedding, rope, positions = inputs
        return self.run_network(self.network, embedding, states, rope, self._attend(plan).layer(0), positions)

    def _attend(self, plan: Plan) -> Attend:
        """Return the attention over the drafter's own pages under a plan."""
        if plan not in self._attends:
            self._attends[plan] = self.attend_kind(self.kv, plan, self.kv_shape[0])
        return self._attends[plan]

    def _children(self, logits: Tensor, batch: Batch, depth: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and target ids of the K likeliest children of nodes at `depth`; logits [B, K, Vd]."""
        noise, positions = batch if self.coupled else None, (batch.lens + depth + 1)[:, None]
        return likeliest(logits, self.topk, noise, positions, self.network.token_map)
