"""What the exactness tests share: a tiny sharp model, a drafter that knows the truth, a reference without any cache.

An equality test passes without proving anything if the model ignores its context or the drafter never proposes. So the
model here has random weights scaled until attention is sharp and logits are spread, and the `Oracle` drafter hides the
true continuation in a random tree among wrong tokens. Masks, positions and compaction are then exercised at every step,
and any error shows in the tokens.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.aot_compile_types import SerializableCallable

from minispec.asked.grammar import Grammars
from minispec.asked.steps import Asking
from minispec.attention import AttendKind, Causal, PagedFlex
from minispec.buffers import Sizes
from minispec.cpu.gather import PagedGather
from minispec.drafter import Draft, Drafter, HostDrafter, as_drafter
from minispec.engine import Engine
from minispec.kv import KVShape, PagedKV
from minispec.load import files as files_module
from minispec.load.tokenizer import Detokenizer
from minispec.model import Model, ModelConfig
from minispec.request import Request, SamplingParams, Update
from minispec.sampling import SamplingState, pick
from minispec.scheduler import Scheduler, SchedulerOptions
from minispec.tree import PADDING, DraftTree
from minispec.verify import Accept

VOCAB = 61
CONTEXT = 256
CPU = torch.device("cpu")


class Letters:
    """A tokenizer of one letter a token, enough for the scheduler to make text."""

    byte_level = True
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int) -> bytes:
        """Return the letter of an id."""
        return chr(0x100 + token).encode()

    def detokenizer(self, params: SamplingParams) -> Detokenizer:
        """Return what makes text of a growing list."""
        return Detokenizer(self, params)


def tiny_config(context: int = CONTEXT) -> ModelConfig:
    """Return the sizes of the tiny models: 9 heads over 3, three layers."""
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=72, intermediate_size=96, layers=3, heads=9,
        kv_heads=3, head_dim=8, norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, context_length=context,
        qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, tied=False, sliding_window=None, dtype=None,
    )  # fmt: skip


MIXTURE = {"sparse": (0, 2), "experts": 6, "experts_per_token": 2, "expert_size": 48}  # a dense layer between two
WINDOWED = {"sliding_window": 20, "sliding": (0, 2)}  # a layer that sees the whole text between two that slide


def tiny_model(seed: int = 0, context: int = CONTEXT, **switches: Any) -> Model:
    """Return a random model whose every layer looks far back; switches: fields of its config."""
    torch.manual_seed(seed)
    with torch.inference_mode():
        model = Model.empty(replace(tiny_config(context), **switches), torch.float32, CPU)
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(0, 0.35)
    return model


@torch.inference_mode()
def next_logits(model: Model, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [V] after `ids`, computed from the whole text with plain causal attention."""
    hidden, _ = model(torch.tensor([ids]), torch.arange(len(ids))[None], Causal(model.config.windows(len(ids))))
    return model.logits(hidden[0, -1])


def shortfalls(plain: Model, requests: Sequence[Request]) -> list[float]:
    """Return by how much the logit of each output token is below the largest, in standard deviations of all."""
    found: list[float] = []
    for r in requests:
        for i, token in enumerate(r.output_ids):
            logits = next_logits(plain, r.prompt_ids + r.output_ids[:i]).float()
            found.append(float((logits.max() - logits[token]) / logits.std()))
    return found


@torch.inference_mode()
def reference(model: Model, request: Request, stop_ids: Sequence[int] = ()) -> list[int]:
    """Return the request's output by sequential decoding without cache, batch, tree or scheduler."""
    ids, params = list(request.prompt_ids), request.params
    output: list[int] = []
    while len(output) < request.max_new_tokens:
        state = SamplingState(2, VOCAB, CPU)
        state.assign(1, params, request.seed, request.prompt_ids, output, stop_ids)
        wishes = state.wishes(torch.tensor([1]), state.needs([1]))
        token = int(pick(next_logits(model, ids)[None], wishes, torch.tensor([len(ids)])))
        output.append(token)
        ids.append(token)
        if token in stop_ids and len(output) > params.min_new_tokens:
            break
    return output


@dataclass
class Oracle(HostDrafter):
    """A drafter that knows how each text goes on and plants that path in a random tree of wrong turns.

    `truth` gives the continuation after a text. With probability `miss` the tree leaves the truth early.
    """

    truth: Callable[[tuple[int, ...]], list[int]]
    nodes: int = 8
    miss: float = 0.3
    seed: int = 0
    name: str = "oracle"
    texts: dict[int, list[int]] = field(default_factory=dict)
    branched: int = 0  # true nodes that do not directly follow their parent, so that acceptance needs compaction

    def __post_init__(self) -> None:
        self.depth = self.nodes - 1
        self.random = random.Random(self.seed)

    def draft(self, slots: Sequence[int]) -> list[Draft]:
        """Return a random tree per slot."""
        return [self._tree(self.texts[slot]) for slot in slots]

    def _tree(self, text: list[int]) -> Draft:
        rng, tokens, parents = self.random, [text[-1]], [-1]
        truth = self.truth(tuple(text))[: rng.randint(0, self.nodes - 1)]
        at = 0  # the node that ends the true path so far
        while len(tokens) < self.nodes and (truth or rng.random() < 0.8):
            siblings = {t for t, p in zip(tokens, parents, strict=True) if p == at}
            if truth and rng.random() < 0.6 and truth[0] not in siblings:
                if rng.random() < self.miss:
                    truth = []
                    continue
                parent, token = at, truth.pop(0)
                at = len(tokens)
                self.branched += at != parent + 1
            else:
                parent, token = rng.randrange(len(tokens)), rng.randrange(VOCAB)
                if truth and (parent, token) == (at, truth[0]):
                    continue
            if any(p == parent and t == token for t, p in zip(tokens, parents, strict=True)):
                continue
            tokens.append(token)
            parents.append(parent)
        return Draft(tokens, parents, match_length=1)

    def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        """Remember the text."""
        self.texts.setdefault(slot, []).extend(tokens)

    def release(self, slot: int) -> None:
        """Forget the slot."""
        self.texts.pop(slot, None)

    def clear(self) -> None:
        """Learn nothing, forget nothing."""


@torch.inference_mode()
def build(
    model: Model,
    drafter: Drafter | HostDrafter,
    *,
    pages: int = 200,
    page_size: int = 16,
    running: int = 8,
    chunk: int = 64,
    compiled: bool = False,
    radix: bool = True,
    overlap: bool = False,
    host_looks: bool = True,
    eos: Sequence[int] = (),
    thresholds: tuple[float, float] | None = None,
    simulated: float | None = None,
    adaptive: bool = False,
    smaller: int | None = None,
    tokenizer: object = None,
    flex: bool = False,
    kind: AttendKind = PagedGather,
) -> Scheduler:
    """Put a scheduler together over the tiny model, as `LLM` does over a real one; flex: with CUDA's attention."""
    config, drafter = model.config, as_drafter(drafter, model.config.vocab_size, smaller)
    sizes = Sizes.resolve(drafter, context_length=config.context_length, max_running=running, chunk_size=chunk)
    kv = PagedKV(
        KVShape(config.layers, config.kv_heads, config.head_dim), pages=pages, page_size=page_size, slots=running + 1,
        rows_per_slot=config.context_length + sizes.tree_rows, zeros=model.norm.weight.new_zeros,
    )  # fmt: skip
    kv.host_looks &= host_looks
    attend_kind: AttendKind = PagedFlex if flex or (compiled and kv.pool.is_cuda) else kind
    made = Engine(model, kv, drafter, sizes, attend_kind=attend_kind, accept=Accept(thresholds, simulated))
    tokenizer = tokenizer or Letters()
    made.asked = Asking(made, Grammars(tokenizer, config.vocab_size, eos))
    options = SchedulerOptions(radix=radix, overlap=overlap, adapts_from=1 if adaptive else math.inf)
    return Scheduler(made, tokenizer, frozenset(eos), options)


def request(name: str, prompt: Sequence[int], **params: object) -> Request:
    """Make a request, greedy unless told otherwise."""
    return Request(name, list(prompt), SamplingParams(**{"temperature": 0.0, "max_new_tokens": 24, **params}))


def run(scheduler: Scheduler, requests: Sequence[Request], stagger: int = 0) -> dict[Request, str]:
    """Serve requests to the end, `stagger` steps between arrivals; returns their texts and checks the pages."""
    texts = dict.fromkeys(requests, "")
    pending = list(requests)
    for request in requests:
        scheduler.validate(request)
    step = 0
    while pending or scheduler.has_work:
        while pending and (stagger == 0 or step % stagger == 0):
            scheduler.submit(pending.pop(0))
            if stagger:
                break
        for update in scheduler.step():
            texts[update.request] += update.text
        scheduler.check()
        step += 1
        assert step < 5000, "the scheduler does not come to an end"
    scheduler.step()  # idle: runs the integrity check
    return texts


def submit(scheduler: Scheduler, *requests: Request) -> None:
    """Validate and queue."""
    for r in requests:
        scheduler.validate(r)
        scheduler.submit(r)


def finish(scheduler: Scheduler, until: Callable[[], bool] = lambda: False) -> list[Update]:
    """Step until all is done, or the condition holds, checking the pages."""
    updates: list[Update] = []
    while scheduler.has_work and not until():
        updates += scheduler.step()
        scheduler.check()
    return updates


@functools.cache
def truth_of(model: Model) -> Callable[[tuple[int, ...]], list[int]]:
    """Return an oracle of greedy continuations, remembered by prefix, for all who ask about this model."""
    known: dict[tuple[int, ...], int] = {}

    def truth(text: tuple[int, ...]) -> list[int]:
        ids, out = list(text), []
        for _ in range(7):
            key = tuple(ids)
            if key not in known:
                known[key] = int(next_logits(model, ids).argmax())
            out.append(known[key])
            ids.append(known[key])
        return out

    return truth


def any_ids(length: int, rng: random.Random) -> list[int]:
    """Return ids drawn evenly from the vocabulary."""
    return [rng.randrange(VOCAB) for _ in range(length)]


def mixed_requests(
    count: int = 8, seed: int = 1, text: Callable[[int, random.Random], list[int]] = any_ids, **params: object
) -> list[Request]:
    """Return requests of different lengths and sampling seeds, pairs of which share a prefix of several pages."""
    rng = random.Random(seed)
    shared = text(40, rng)
    prompts = []
    for index in range(count):
        own = text(rng.choice((1, 7, 16, 30, 70)), rng)
        prompts.append(shared + own if index % 2 else own)
    return [request(f"r{i}", prompt, sampling_seed=7 * i - 3, **params) for i, prompt in enumerate(prompts)]


# ---- trees --------------------------------------------------------------------------------------------------------


def chain(tokens: torch.Tensor) -> DraftTree:
    """Return the tree without branches over `tokens [B, N] int64`; -1 may pad its end."""
    before = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
    # A padded root stays a root: only nodes after it move below node 0.
    return DraftTree(tokens, torch.where((tokens == PADDING) & (before >= 0), 0, before))


def check(tree: DraftTree) -> None:
    """Raise AssertionError where a tree breaks the invariant; written apart from the engine's `tree.problem`."""
    assert tree.tokens.shape == tree.parents.shape, f"shapes differ: {tree.tokens.shape}, {tree.parents.shape}"
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        assert parents[0] == -1, f"row {row}: the root's parent is {parents[0]}, not -1"
        siblings: set[tuple[int, int]] = set()
        for node in range(1, len(tokens)):
            token, parent = tokens[node], parents[node]
            where = f"row {row}, node {node} (token {token}, parent {parent})"
            if token == PADDING:
                assert parent == 0, f"{where}: padding must hang below the root"
                continue
            assert token >= 0, f"{where}: tokens are ids or {PADDING}"
            assert 0 <= parent < node, f"{where}: parents precede children"
            assert parent == 0 or tokens[parent] != PADDING, f"{where}: the parent is padding"
            assert (parent, token) not in siblings, f"{where}: a sibling holds the same token"
            siblings.add((parent, token))


def random_linear(size: int, features: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> torch.nn.Linear:
    """Return a random layer whose channels differ in scale."""
    torch.manual_seed(size + features)
    made = torch.nn.Linear(size, features, bias=bias, dtype=dtype).requires_grad_(False)
    made.weight *= torch.rand(features, 1) + 0.1
    return made


def graphs_made() -> int:
    """Return how many compiled functions this process has: made here, or taken from files."""
    return sum(map(len, files_module.loaded.values()))


def forget_graphs() -> None:
    """Have every compiled function looked for anew, in files, so that it counts once more."""
    files_module.loaded.clear()


class Traced(SerializableCallable):
    """What stands for Inductor's code where only traces matter: the graph itself, run eagerly. No file can hold it."""

    def __init__(self, graph: Any, inputs: Any, **options: Any) -> None:
        self.graph = graph

    def __call__(self, *args: Any) -> Any:
        return self.graph(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        """Return nothing."""
        return b""

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Any:
        """Refuse."""
        raise ValueError("it was only traced")


def trace_only(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have functions traced and not compiled, from now on; a folder takes what stands for their files."""
    patch.setattr(files_module, "loaded", {})
    patch.setattr(files_module, "BACKEND", Traced)
    patch.setattr(files_module, "code_folder", lambda: folder)
