"""Training draft heads: `python -m minispec.train eagle3 --out FOLDER`, from no data at all to a head that serves.

The target writes replies to openly licensed prompts (`corpus.py`), and a head learns to foresee them. Two things make
it the head that will be served rather than one that merely fits: it is the same module, and it is trained on its own
drafts. A head reads true features only at the first drafted token; from the second on it reads its own state. So every
training step plays S rounds of drafting from every token of every reply at once ("training-time test", EAGLE-3,
arXiv 2503.01840), with the true tokens and with states of its own:

    round s, anchor i:   embedding of x[i+1+s], state of round s-1 at i      learns the target's p(x[i+2+s])
    attention:           the true rows 0..i of round 0, and of each later round its own row alone

The one idea: those later rows form a diagonal, so a round costs one causal attention and s products per row, whatever
S is (`Unrolled`). The target's features and its distribution come from one forward pass and are kept.

    python -m minispec.train eagle3      EAGLE-3, with a draft vocabulary of its own
    python -m minispec.train eagle       EAGLE-2; its state must also imitate the target's features
    python -m minispec.train mtp         a layer in MiMo's format
    python -m minispec.train standalone  a small model with the target's vocabulary, a demonstration
    python -m minispec.train token-map   the most frequent tokens, for FR-Spec (arXiv 2502.14856)

Read next: `corpus.py`, `eagle.py`; published files and traps are described where they are read.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from minispec.attention import Causal
from minispec.config import Config
from minispec.eagle import DraftHead, Eagle3Head, EagleHead, published_tensors, slice_head, spelled, unfused
from minispec.llm import LLM, choose_device, choose_dtype, choose_folder, load_model
from minispec.load.default_model import DefaultModelError
from minispec.load.packed import can_pack, pack_linears
from minispec.load.tokenizer import load_tokenizer
from minispec.load.weights import read_config
from minispec.model import FINAL, Model, ModelConfig
from minispec.mtp import MtpHead
from minispec.standalone import tokenizer_digest
from minispec.train.corpus import Features, Reply, batches, generate, groups, groups_done, read_replies
from minispec.train.prompts import collect, read_jsonl

HELD_OUT = 48  # replies never trained on, greedy ones, by which progress is told
HEADS = {"eagle3": Eagle3Head, "eagle": EagleHead, "mtp": MtpHead}
DECAY = 0.8  # weight of each round against the one before
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How a head is trained; a checkpoint of another recipe is refused."""

    kind: str
    rounds: int  # S of the training-time test
    epochs: int
    learning_rate: float
    batch_tokens: int  # reply tokens behind one update
    draft_vocab: int
    seed: int
    variant: str = "3"  # of EAGLE-3: "3" or "3.1" (a norm per stream, and the normed state fed back)
    warm_up: float = 0.03  # share of the updates
    floor: float = 0.05  # last learning rate over the peak
    clip: float = 0.5
    feature_weight: float = 0.0  # EAGLE-2: weight of imitating the target's next feature


# ---- the training-time test -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """One reply in a packed batch: its rows in the first round, and where its anchors begin.

    Row r holds the feature of token r and the embedding of token r + 1. Anchors are the rows from which something is
    really drafted: from the one that ends in the reply's first token, which the target itself chose, to the one whose
    draft is the reply's last token. Each round has one anchor less.
    """

    rows: int
    first: int

    def anchors(self, round_: int) -> int:
        """Return how many anchors a round has."""
        return max(0, self.rows - self.first - round_)


class Unrolled:
    """The attention of the training-time test, a `LayerAttend` that is called once per round.

    Round 0 is causal over all rows of each segment and keeps their keys and values. A query of a later round sees the
    rows up to its anchor's and, of each round since, the row that its own anchor made.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.round = 0
        self.prompt: list[tuple[Tensor, Tensor]] = []  # per segment, round 0: [Hkv, R, D]
        self.own: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []  # per round since, per segment: [Hkv, n, D]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q [1, Hq, N, D] to k, v [1, Hkv, N, D], N the rows or anchors of all segments."""
        q, k = q.to(v.dtype), k.to(v.dtype)
        sizes = [s.anchors(self.round) if self.round else s.rows for s in self.segments]
        queries, keys, values = (x[0].split(sizes, dim=1) for x in (q, k, v))
        if self.round:
            self.own.append((keys, values))
            outs = [self._later(index, query) for index, query in enumerate(queries)]
        else:
            self.prompt = list(zip(keys, values, strict=True))
            outs = [
                F.scaled_dot_product_attention(
                    a[None], b[None], c[None], is_causal=True, enable_gqa=a.shape[0] != b.shape[0]
                )[0]
                for a, b, c in zip(queries, keys, values, strict=True)
            ]
        self.round += 1
        return torch.cat(outs, dim=1)[None]

    def _later(self, index: int, query: Tensor) -> Tensor:
        """Return the attention [Hq, n, D] of one segment's anchors in a round after the first."""
        segment, (keys, values) = self.segments[index], self.prompt[index]
        heads, count, dim = query.shape
        kv_heads, rows = keys.shape[:2]
        query = query.view(kv_heads, -1, count, dim) / math.sqrt(dim)
        scores = query.flatten(1, 2) @ keys.transpose(1, 2)
        scores = scores.view(kv_heads, -1, count, rows).float()
        row = torch.arange(rows, device=keys.device)
        scores = scores.masked_fill(row > segment.first + row[:count, None], -torch.inf)
        mine = [(k[index][:, None, :count], v[index][:, None, :count]) for k, v in self.own]
        diagonal = [(query * k).sum(-1, dtype=torch.float32)[..., None] for k, _ in mine]
        weight = torch.cat((scores, *diagonal), dim=-1).softmax(-1).to(values.dtype)
        out = (weight[..., :rows].flatten(1, 2) @ values).view(kv_heads, -1, count, dim)
        for s, (_, v) in enumerate(mine):
            out = out + weight[..., rows + s, None] * v
        return out.reshape(heads, count, dim)


@dataclass
class Round:
    """What one round of a batch reads and learns, over its n anchors (all rows in the first round)."""

    tokens: Tensor  # [1, n] int64, whose embeddings are read
    positions: Tensor  # [1, n] int64
    learn: Tensor | None  # anchors among the rows, first round only
    keep: Tensor  # anchors of the next round among this round's
    teacher: Tensor  # [n] rows of the batch's teacher


@dataclass
class Packed:
    """Several replies packed into one row."""

    segments: list[Segment]
    features: Tensor  # [1, N, F] of the rows
    target: Tensor  # [n, d] the target's final state at the token before each one learned
    choice: Tensor  # [n] int64, the target's greedy choice there
    rounds: list[Round]


def pack(replies: Sequence[Reply], features: Sequence[tuple[Tensor, Tensor]], hidden: int, rounds: int) -> Packed:
    """Return a batch of replies and their features [T, F]; the last `hidden` columns are the target's final state."""
    device = features[0][0].device
    segments = [Segment(len(r.ids) - 2, r.start - 1) for r in replies]
    ids = [torch.tensor(r.ids, device=device) for r in replies]
    span = lambda start, count: torch.arange(start, start + count, device=device)  # noqa: E731
    first = list(accumulate((segment.anchors(0) for segment in segments), initial=0))
    bases = list(accumulate((segment.rows for segment in segments), initial=0))
    plan: list[Round] = []
    for s in range(rounds):
        now = [segment.anchors(s) for segment in segments]
        before = list(accumulate(now, initial=0))
        places = list(zip(segments, now, strict=True))
        tokens = [
            x[1 + s : 1 + s + g.rows] if s == 0 else x[g.first + 1 + s : g.first + 1 + s + n]
            for x, (g, n) in zip(ids, places, strict=True)
        ]
        starts = [span(0, g.rows) if s == 0 else span(g.first + s, n) for g, n in places]
        plan.append(
            Round(
                tokens=torch.cat(tokens)[None],
                positions=torch.cat(starts)[None],
                learn=torch.cat([span(b + g.first, n) for b, (g, n) in zip(bases, places, strict=False)])
                if s == 0
                else None,
                keep=torch.cat([span(b, max(0, n - 1)) for b, n in zip(before, now, strict=False)]),
                teacher=torch.cat([span(b + s, n) for b, n in zip(first, now, strict=False)]),
            )
        )
    return Packed(
        segments,
        torch.cat([f[: g.rows] for (f, _), g in zip(features, segments, strict=True)])[None],
        torch.cat([f[g.first + 1 : g.rows + 1, -hidden:] for (f, _), g in zip(features, segments, strict=True)]),
        torch.cat([c[g.first + 1 : g.rows + 1] for (_, c), g in zip(features, segments, strict=True)]),
        plan,
    )


def unroll(head: DraftHead, batch: Packed, taps: slice) -> Iterator[tuple[Round, Tensor]]:
    """Yield each round and the head's states [n, H] at its anchors; `taps` are the head's columns of the features."""
    attend = Unrolled(batch.segments)
    state = head.fuse(batch.features[..., taps])
    for round_ in batch.rounds:
        rope = head.rope(round_.positions)
        state = head(head.embed(round_.tokens), state, rope, attend, round_.positions)
        if round_.learn is not None:
            state = state[:, round_.learn]
        yield round_, state[0]
        state = state[:, round_.keep]


# ---- a step, and what it is worth -----------------------------------------------------------------------------------


class Teacher:
    """The target's distribution over the draft vocabulary, and where a draft id of its choice is."""

    def __init__(self, weight: Tensor, ids: Tensor, vocab_size: int) -> None:
        self.weight = weight  # [Vd, d]
        self.place = torch.full((vocab_size,), -1, dtype=torch.int64, device=ids.device)
        self.place[ids] = torch.arange(len(ids), device=ids.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the probabilities [n, Vd] fp32, renormalised over the draft vocabulary, after states [n, d]."""
        return F.linear(hidden, self.weight).float().softmax(-1)


class SoftCrossEntropy(torch.autograd.Function):
    """The cross-entropy of logits against the teacher's distribution, its gradient worked out in the same pass.

    A vocabulary-sized row is read once, a few rows at a time that stay in the cache, and nothing of fp32 size is kept:
    as separate operations this costs more than the matrix product before it.
    """

    ROWS = 64

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, teacher: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, summed with `weight` [n], and the best draft id [n] of logits [n, Vd].

        wanted: [m, Vd] the teacher's probabilities, of which row i is to be compared with row teacher[i].
        """
        gradient, best = torch.empty_like(logits), torch.empty_like(teacher)
        total = weight.new_zeros(())
        for start in range(0, len(logits), SoftCrossEntropy.ROWS):
            part = slice(start, start + SoftCrossEntropy.ROWS)
            z, p, w = logits[part].float(), wanted[teacher[part]], weight[part, None]
            best[part] = z.argmax(-1)
            z = z - z.logsumexp(-1, keepdim=True)
            total -= (p * z * w).sum()
            gradient[part] = z.exp_().sub_(p).mul_(w)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits."""
        return ctx.saved_tensors[0] * upstream, None, None, None


def losses(
    head: DraftHead, batch: Packed, taps: slice, teacher: Teacher, feature_weight: float
) -> tuple[Tensor, Tensor]:
    """Return the loss and, detached, how often the head's first choice was the target's: [S, 2] hits and anchors.

    Soft cross-entropy per round, mean over the anchors whose choice is in the draft vocabulary. A hit counts where all
    rounds before it hit as well, and so do the anchors: the acceptance at a depth that was reached.
    """
    wanted = teacher(batch.target)
    place = teacher.place[batch.choice]
    total = wanted.new_zeros(())
    hits, alive = [], None
    for s, (round_, state) in enumerate(unroll(head, batch, taps)):
        known = (place[round_.teacher] >= 0).float()
        weight = DECAY**s * known / known.sum().clamp(min=1)
        loss, best = SoftCrossEntropy.apply(head.logits(state), wanted, round_.teacher, weight)
        total = total + loss
        if feature_weight:
            imitate = F.smooth_l1_loss(state.float(), batch.target[round_.teacher].float(), reduction="none").mean(-1)
            total = total + feature_weight * DECAY**s * imitate.mean()
        hit = best == place[round_.teacher]
        alive = hit.new_ones(hit.shape) if alive is None else alive
        hits.append(torch.stack([(hit & alive).sum(), alive.sum()]))
        alive = (alive & hit)[round_.keep]
    return total, torch.stack(hits)


@torch.no_grad()
def replay(head: DraftHead, batch: Packed, taps: slice, teacher: Teacher) -> tuple[int, int]:
    """Return tokens emitted and verify steps of drafting chains along greedy replies, as a server would.

    Only for replies at temperature 0, whose tokens are the target's choices. A step cut by the reply's end is left out.
    """
    place = teacher.place[batch.choice]
    agree = []
    for round_, state in unroll(head, batch, taps):
        hit = head.logits(state).argmax(-1) == place[round_.teacher]
        agree.append(list(hit.split([segment.anchors(len(agree)) for segment in batch.segments])))
    emitted = steps = 0
    for index, segment in enumerate(batch.segments):
        table = [agree[s][index].tolist() for s in range(len(agree))]
        anchor = 0
        while anchor + len(agree) <= segment.anchors(0):
            run = next((s for s in range(len(agree)) if not table[s][anchor]), len(agree))
            emitted, steps, anchor = emitted + run + 1, steps + 1, anchor + run + 1
    return emitted, steps


# ---- making and exporting heads -------------------------------------------------------------------------------------


def draft_vocabulary(replies: Sequence[Reply], size: int, vocab_size: int) -> Tensor:
    """Return the `size` most frequent tokens of the replies, most frequent first, filled up with the lowest ids."""
    counts = Counter(token for reply in replies for token in reply.ids[reply.start :])
    frequent = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    seen = set(frequent)
    return torch.tensor((frequent + [i for i in range(vocab_size) if i not in seen])[: min(size, vocab_size)])


def new_head(recipe: Recipe, model: Model, ids: Tensor, taps: tuple[int, ...], scale: Tensor) -> DraftHead:
    """Return a head to train, in fp32: [Vd] draft ids, and `scale` the size of each stream that it reads.

    Streams differ tenfold in size, and the largest would drown the rest: each column block of `fc` starts as small as
    its stream is large. The LM head starts as the target's rows, its norm as the target's.
    """
    shape = replace(model.config, layers=1)
    device = model.embed_tokens.weight.device
    torch.manual_seed(recipe.seed)
    kind, newer = HEADS[recipe.kind], recipe.variant == "3.1"
    more = {"taps": taps, "fc_norm": newer, "norm_output": newer} if kind is Eagle3Head else {}
    head: DraftHead = kind(shape, model, token_map=ids, **more).float()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2 and not name.startswith("lm_head"):
                parameter.normal_(0.0, 0.02)
            elif name.endswith("bias"):
                parameter.zero_()
        assert head.lm_head is not None
        head.lm_head.weight.copy_(slice_head(model, ids, None).float())
        if isinstance(head, Eagle3Head):
            head.norm.weight.copy_(model.norm.weight)
            if not head.fc_norm:
                head.fc.weight.div_(scale.repeat_interleave(model.config.hidden_size))
        else:
            head.lm_head.requires_grad_(False)  # the target's own rows, and they stay what they are
    head.frequencies, head.token_map = head.frequencies.to(device), ids.to(device)
    return head.to(device)


def export(head: DraftHead, recipe: Recipe, model: Model, folder: Path) -> None:
    """Write a head in the format that SGLang reads: config.json and model.safetensors, bfloat16."""
    c = model.config
    config = published_config(replace(c, layers=1, tied=False))
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in published_tensors(head).items()}
    assert head.token_map is not None
    ids = head.token_map.cpu()
    if isinstance(head, Eagle3Head):
        tensors = {spelled(name, "midlayer."): tensor for name, tensor in tensors.items()}
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        outputs = [int(tap) - 1 for tap in head.taps]
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(ids),
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs},
        }
        if head.norm_output:
            config |= {"fc_norm": True, "norm_output": True}
    else:
        del tensors["lm_head.weight"]  # the target's
        if isinstance(head, MtpHead):
            tensors = {"model.mtp_layers.0." + name.removeprefix("layer."): tensor for name, tensor in tensors.items()}
            config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
        else:
            tensors = {spelled(name, "layers.0."): tensor for name, tensor in tensors.items()}
            config["architectures"] = ["LlamaForCausalLMEagle"]
    write_folder(folder, config, tensors)


def published_config(c: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Llama of these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.context_length,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.rope_scaling is None else dict(c.rope_scaling),
        "tie_word_embeddings": c.tied,
        "torch_dtype": "bfloat16",
    }


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors into a folder, made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


# ---- the loop -------------------------------------------------------------------------------------------------------


class Trainer:
    """A head, its optimizer and its data; `run` goes on from the checkpoint in `folder`, if there is one."""

    def __init__(
        self, recipe: Recipe, model: Model, replies: Sequence[Reply], features: Features, folder: Path, tell: Tell
    ) -> None:
        self.recipe, self.model, self.replies, self.features, self.folder = recipe, model, replies, features, folder
        self.tell = tell
        order = list(range(len(replies)))
        random.Random(recipe.seed).shuffle(order)
        greedy = [i for i in order if replies[i].temperature == 0]
        self.held_out = greedy[: min(HELD_OUT, len(order) // 10)]
        self.training = sorted(set(order) - set(self.held_out))
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        ids = draft_vocabulary([replies[i] for i in self.training], recipe.draft_vocab, vocab)
        streams = HEADS[recipe.kind] is Eagle3Head  # the others read the final state alone
        ids = (ids.sort().values if streams else ids).to(features.device)
        tapped = tuple(tap for tap in features.taps if tap != FINAL)
        self.taps = slice(0, len(tapped) * hidden) if streams else slice(-hidden, None)
        self.head = new_head(recipe, model, ids, tapped, self._scale(len(tapped)))
        self.teacher = Teacher(slice_head(model, ids, None), ids, vocab)
        trained = [p for p in self.head.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.step = 0
        self.updates = sum(1 for _ in self._order())

    def run(self, save_every: float = 300.0, stop_at: int | None = None) -> None:
        """Train to the end (or to update `stop_at`), telling progress and saving what it takes to go on."""
        self._resume()
        begun, first, told, saved, tokens = time.perf_counter(), self.step, time.perf_counter(), time.perf_counter(), 0
        hits, loss_sum, count = torch.zeros(self.recipe.rounds, 2), 0.0, 0
        for number, chosen in enumerate(self._order()):
            if number < self.step:
                continue
            if number == stop_at:
                break
            loss, found = self._update(chosen)
            hits, loss_sum, count = 0.98 * hits + found.cpu(), loss_sum + loss, count + 1
            tokens += sum(len(self.replies[i].ids) - self.replies[i].start for i in chosen)
            now = time.perf_counter()
            if now - told > 15 or self.step == self.updates:
                rate = (self.step - first) / (now - begun)
                depth = " ".join(f"{a:.2f}" for a in (hits[:, 0] / hits[:, 1].clamp(min=1)).tolist())
                self.tell(
                    f"update {self.step}/{self.updates}  loss {loss_sum / count:.3f}  acceptance by depth {depth}  "
                    f"{tokens / (now - begun):.0f} tokens/s  {(self.updates - self.step) / rate / 60:.1f} min left"
                )
                told, loss_sum, count = now, 0.0, 0
            if now - saved > save_every:
                self._save()
                saved = now
        self._save()

    def accept_length(self, rounds: int) -> float:
        """Return tokens per verify step over the held-out replies, drafting chains of `rounds`."""
        emitted = steps = 0
        for i in self.held_out:
            with self._autocast():
                more = replay(self.head, self._batch([i], rounds), self.taps, self.teacher)
            emitted, steps = emitted + more[0], steps + more[1]
        return emitted / max(1, steps)

    def _order(self) -> Iterator[list[int]]:
        """Yield the replies of every update, the same in every run."""
        for epoch in range(self.recipe.epochs):
            rng = random.Random(f"{self.recipe.seed}/{epoch}")
            yield from batches(self.replies, self.training, self.recipe.batch_tokens, rng)

    def _batch(self, chosen: Sequence[int], rounds: int) -> Packed:
        """Return a batch of replies by their numbers."""
        chosen = [i for i in chosen if len(self.replies[i].ids) - self.replies[i].start > 1]
        found = [self.features.of(i) for i in chosen]
        return pack([self.replies[i] for i in chosen], found, self.model.config.hidden_size, rounds)

    def _update(self, chosen: Sequence[int]) -> tuple[float, Tensor]:
        """Make one update of the weights; returns the loss and the hits."""
        recipe, share = self.recipe, self.step / self.updates
        rise = min(1.0, (self.step + 1) / (recipe.warm_up * self.updates + 1))
        fall = recipe.floor + (1 - recipe.floor) * 0.5 * (1 + math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rise * fall
        batch = self._batch(chosen, recipe.rounds)
        with self._autocast():
            loss, hits = losses(self.head, batch, self.taps, self.teacher, recipe.feature_weight)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), recipe.clip)
        self.optimizer.step()
        self.step += 1
        return loss.item(), hits

    def _autocast(self) -> torch.autocast:
        """Return the context in which products are computed in the target's bfloat16 from fp32 master weights."""
        low = self.features.dtype == torch.bfloat16
        return torch.autocast(self.features.device.type, torch.bfloat16, enabled=low)

    def _scale(self, streams: int) -> Tensor:
        """Return the usual size of each tapped stream: a median over replies without their first token, a sink."""
        hidden = self.model.config.hidden_size
        rows = torch.cat([self.features.of(i)[0][1:] for i in self.training[:16]]).float()
        parts = rows[:, : streams * hidden].view(-1, streams, hidden)
        return parts.square().mean(-1).sqrt().median(0).values

    def _save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": asdict(self.recipe),
            "step": self.step,
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, self.folder / "checkpoint.partial")
        (self.folder / "checkpoint.partial").replace(self.folder / "checkpoint.pt")

    def _resume(self) -> None:
        """Take up the checkpoint, if there is one of this recipe."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.features.device, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise ValueError(f"{path} is of another recipe ({state['recipe']}); remove it or choose another --out")
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.tell(f"going on from update {self.step} of {self.updates}")


# ---- a small model of its own ---------------------------------------------------------------------------------------


def small_model(model: Model, width: int, layers: int) -> Model:
    """Return a Llama of `width` with the target's vocabulary, to train, in fp32.

    Nearly all of it is the embedding, so it starts as the target's seen from its `width` widest directions.
    """
    heads = width // 64
    shape = replace(
        model.config, hidden_size=width, intermediate_size=2 * width, layers=layers, heads=heads, kv_heads=1,
        head_dim=64, tied=True, qk_norm=False, qkv_bias=False, output_bias=False, mlp_bias=False,
    )  # fmt: skip
    weight = model.embed_tokens.weight.float()
    small = Model(shape).to(weight.device)
    _, _, directions = torch.linalg.svd(weight - weight.mean(0), full_matrices=False)
    with torch.no_grad():
        for parameter in small.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02)
        start = weight @ directions[:width].T
        small.embed_tokens.weight.copy_(start * (0.05 / start.std()))
    small.frequencies = small.frequencies.to(weight.device)
    return small


def train_small(
    recipe: Recipe, model: Model, small: Model, replies: Sequence[Reply], folder: Path, digest: str, tell: Tell
) -> float:
    """Train a small model on the replies by cross-entropy; returns the share of held-out tokens it foresees.

    Of the vocabulary only the draft vocabulary and as many tokens again, drawn anew for each update, are told apart:
    the full product would be nearly all of the work. digest: of the tokenizer, which the folder states.
    """
    ids = draft_vocabulary(replies, recipe.draft_vocab, model.config.vocab_size)
    order = list(range(len(replies)))
    random.Random(recipe.seed).shuffle(order)
    held_out, training = order[:HELD_OUT], sorted(order[HELD_OUT:])
    optimizer = torch.optim.AdamW(small.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    plan = [
        (epoch, chosen)
        for epoch in range(recipe.epochs)
        for chosen in batches(replies, training, recipe.batch_tokens, random.Random(f"{recipe.seed}/{epoch}"))
    ]
    device = model.embed_tokens.weight.device
    rng, told, mean = torch.Generator().manual_seed(recipe.seed), time.perf_counter(), 0.0
    for step, (_, chosen) in enumerate(plan):
        for group in optimizer.param_groups:
            rise = min(1.0, (step + 1) / (recipe.warm_up * len(plan) + 1))
            group["lr"] = recipe.learning_rate * rise * (0.525 + 0.475 * math.cos(math.pi * step / len(plan)))
        drawn = torch.randperm(model.config.vocab_size, generator=rng)[: recipe.draft_vocab]
        shown = torch.tensor([t for i in chosen for t in replies[i].ids])
        candidates = torch.cat((ids, drawn, shown)).unique().to(device)
        place = torch.zeros(model.config.vocab_size, dtype=torch.int64, device=device)
        place[candidates] = torch.arange(len(candidates), device=device)
        optimizer.zero_grad(set_to_none=True)
        for i in chosen:
            loss = _next_token_loss(small, replies[i], candidates, place) / len(chosen)
            loss.backward()
            mean += 0.02 * (loss.item() * len(chosen) - mean) if mean else loss.item() * len(chosen)
        nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        if time.perf_counter() - told > 15 or step + 1 == len(plan):
            tell(f"update {step + 1}/{len(plan)}  loss {mean:.3f}")
            told = time.perf_counter()
    tensors = {"model." + name: t.detach().to("cpu", torch.bfloat16) for name, t in _hf_tensors(small)}
    write_folder(folder, published_config(small.config) | {"tokenizer_digest": digest}, tensors)
    right = total = 0
    with torch.no_grad():
        for i in held_out:
            x = torch.tensor([replies[i].ids], device=device)
            logits = small.logits(_hidden(small, x)[0, replies[i].start : -1])
            right += int((logits.argmax(-1) == x[0, replies[i].start + 1 :]).sum())
            total += len(logits)
    return right / max(1, total)


def _hidden(small: Model, ids: Tensor) -> Tensor:
    """Return the final hidden states [1, T, d] of ids [1, T]."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return small(ids, positions, Causal())[0]


def _next_token_loss(small: Model, reply: Reply, candidates: Tensor, place: Tensor) -> Tensor:
    """Return the mean cross-entropy of a reply's tokens among the candidates, and of its prompt's at a tenth."""
    ids = torch.tensor([reply.ids], device=candidates.device)
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = _hidden(small, ids)[0, :-1]
        logits = F.linear(hidden, small.embed_tokens.weight[candidates]).float()
    loss = F.cross_entropy(logits, place[ids[0, 1:]], reduction="none")
    weight = torch.full_like(loss, 0.1)
    weight[reply.start - 1 :] = 1.0
    return (loss * weight).sum() / weight.sum()


def _hf_tensors(small: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield a tied model's weights under their published names."""
    for name, tensor in small.state_dict().items():
        owner, _, rest = name.partition(".")
        if owner == "layers":
            index, _, rest = rest.partition(".")
            for part, view in unfused(small.layers[int(index)], rest, tensor):
                yield f"layers.{index}.{part}", view
        elif name != "lm_head.weight":
            yield name, tensor


# ---- the command ----------------------------------------------------------------------------------------------------

KINDS = (*HEADS, "standalone", "token-map")
FEATURE_WEIGHT = {"eagle": 1.0}  # its LM head is the target's, so its state must come close to the target's
ON_CPU = {"count": 3000, "max_new_tokens": 96, "long_share": 0.25, "rounds": 3, "epochs": 4, "batch_tokens": 1500}
ON_CUDA = {"count": 100_000, "max_new_tokens": 512, "long_share": 1.0, "rounds": 5, "epochs": 3, "batch_tokens": 32768}
RATE = {"eagle3": 1e-3, "eagle": 1e-3, "mtp": 1e-3, "standalone": 2e-3}
LONG = 768  # prompt tokens from which on a conversation counts as long


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(argv)
    begun = time.perf_counter()

    def tell(line: str) -> None:
        """Print a line with the minutes gone by."""
        print(f"{(time.perf_counter() - begun) / 60:6.1f} min  {line}", flush=True)

    try:
        run(options, tell)
    except (ValueError, DefaultModelError) as error:
        sys.exit(f"minispec.train: error: {error}")  # one line, as the server's


def run(options: argparse.Namespace, tell: Tell) -> None:
    """Make what `options` ask for: replies, features, a head, its files."""
    config = Config(model_path=options.model, device=options.device, speculative_algorithm="NONE")
    device = choose_device(config)
    for name, value in (ON_CUDA if device.type == "cuda" else ON_CPU).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    work = options.work or options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    owner = work / "model.txt"
    if owner.exists() and owner.read_text() != config.served_name:
        raise ValueError(f"--work {work} holds the replies of {owner.read_text()}, not of {config.served_name}")
    owner.write_text(config.served_name)
    replies = ensure_replies(options, config, work / "replies.jsonl", tell)
    tell(f"{len(replies)} replies, {sum(len(r.ids) - r.start for r in replies)} reply tokens, "
         f"{sum(len(r.ids) for r in replies)} in all")  # fmt: skip
    model = load_target(config, tell)
    if options.kind == "token-map":
        ids = draft_vocabulary(replies, options.draft_vocab, model.config.vocab_size)
        options.out.mkdir(parents=True, exist_ok=True)
        save_file({"ids": ids.int()}, options.out / "token_map.safetensors")
        tell(f"wrote {options.out / 'token_map.safetensors'}: {len(ids)} ids, most frequent first")
        return
    recipe = Recipe(
        kind=options.kind,
        rounds=options.rounds,
        epochs=options.epochs,
        learning_rate=options.learning_rate or RATE[options.kind],
        batch_tokens=options.batch_tokens,
        draft_vocab=options.draft_vocab,
        seed=options.seed,
        variant=options.variant,
        feature_weight=FEATURE_WEIGHT.get(options.kind, 0.0),
    )
    if options.kind not in HEADS:
        digest = tokenizer_digest(load_tokenizer(choose_folder(config, tell)))
        right = train_small(recipe, model, small_model(model, options.width, 1), replies, options.out, digest, tell)
        tell(f"held out: {right:.3f} of reply tokens foreseen; wrote {options.out}")
        return
    taps: tuple[int | str, ...] = (2, model.config.layers // 2, model.config.layers - 3, FINAL)
    features = Features(model, replies, taps, work, options.feature_gigabytes * 10**9)
    trainer = Trainer(recipe, model, replies, features, options.out, tell)
    trainer.run()
    export(trainer.head, recipe, model, options.out)
    lengths = ", ".join(f"{trainer.accept_length(rounds):.2f} with {rounds}" for rounds in (1, 2, 3, 5))
    tell(f"held out ({len(trainer.held_out)} greedy replies), accept length drafting chains: {lengths}")
    tell(f"wrote {options.out}; serve it with --speculative-draft-model-path {options.out}")


def ensure_replies(options: argparse.Namespace, config: Config, path: Path, tell: Tell) -> list[Reply]:
    """Return the replies in a file, generating what is missing of them."""
    tokenizer = load_tokenizer(choose_folder(config, tell))
    rng, short = random.Random(options.seed), []
    for conversation in read_jsonl(options.prompts) if options.prompts else collect(options.count, options.seed, tell):
        long = len(tokenizer.encode_chat(conversation.messages)) >= LONG
        if not long or rng.random() < options.long_share:
            short.append(conversation)
    if groups_done(path) < groups(len(short)):
        running = 32 if choose_device(config).type == "cpu" else 256
        llm = LLM(config=replace(config, max_running_requests=running), progress=tell)
        generate(llm, short, path, seed=options.seed, max_new_tokens=options.max_new_tokens, tell=tell)
    return read_replies(path)


def load_target(config: Config, tell: Tell) -> Model:
    """Return the target without pages and graphs, its blocks packed where that is faster."""
    device = choose_device(config)
    folder = choose_folder(config, tell)
    shape, dtype = ModelConfig.from_hf(read_config(folder)), choose_dtype(config, device)
    with torch.no_grad():
        model = load_model(config, shape, folder, dtype, device)
        if device.type == "cpu" and can_pack(dtype):
            pack_linears(model.layers)  # the LM head stays a matrix, whose rows a head takes
    return model


def _parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m minispec.train",
        description="Train a draft head for a model on its own replies to openly licensed prompts.",
    )
    add = parser.add_argument
    add("kind", choices=KINDS)
    add("--model", help="Hugging Face id or folder of the target; without it the default model")
    add("--out", type=Path, required=True, help="folder for the head, its checkpoint and, unless --work, its data")
    add("--work", type=Path, help="folder of replies and features, which several heads can share")
    add("--prompts", type=Path, help='prompts of your own: JSON lines of {"messages": [...]} or {"prompt": "..."}')
    add("--count", type=int, help="conversations to collect (CPU 3000, CUDA 100000)")
    add("--long-share", type=float, help=f"share kept of the prompts beyond {LONG} tokens (CPU 0.25, CUDA 1)")
    add("--max-new-tokens", type=int, help="longest reply (CPU 96, CUDA 512)")
    add("--rounds", type=int, help="rounds of drafting in training (CPU 3, CUDA 5)")
    add("--epochs", type=int, help="passes over the replies (CPU 4, CUDA 3)")
    add("--batch-tokens", type=int, help="reply tokens behind an update (CPU 1500, CUDA 32768)")
    add("--learning-rate", type=float, help="peak of the cosine (default 1e-3; standalone 2e-3)")
    add("--draft-vocab", type=int, default=8192, help="size of the draft vocabulary (default 8192)")
    add("--variant", choices=("3", "3.1"), default="3", help="EAGLE-3 as published, or 3.1 with a norm per stream")
    add("--width", type=int, default=128, help="hidden size of a standalone model (default 128)")
    add("--feature-gigabytes", type=int, default=8, help="features kept on disk (default 8); others are recomputed")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


if __name__ == "__main__":
    main()
