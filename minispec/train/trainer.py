"""The training loop of a head: updates in a fixed order, a checkpoint to resume from, and the measured accept length.

A run that is interrupted and resumed ends with the same bits as one that is not, since the order of the replies and
every random number are functions of the recipe's seed. Some replies are never trained on. On these `accept_length`
replays what a server would do with the head, so the number printed at the end is the one to expect when serving.

Read next: `stages.py` for the order of the replies, `rounds.py` for what one update computes, `export.py` for the head
before and after.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from minispec.dflash import DFlashHead
from minispec.eagle import Eagle3Head
from minispec.load.heads import KINDS, slice_head
from minispec.model import scaled
from minispec.train.corpus import Features, held_out
from minispec.train.export import Recipe, draft_vocabulary, export, new_head, read_start
from minispec.train.prompts import Tell
from minispec.train.rounds import Packed, Teacher, accepted, losses, pack, replay
from minispec.train.stages import Stages

SAVE_EVERY = 300  # seconds between checkpoints


class Trainer:
    """A head, its optimizer and its data; `run` goes on from the checkpoint in `folder`, if there is one.

    features: those of the replies to learn from; they know the replies and the target that wrote them.
    parts: how many replies each part has, in their order; by default all are one part.
    """

    def __init__(self, recipe: Recipe, features: Features, folder: Path, tell: Tell, parts: Sequence[int] = ()) -> None:
        self.recipe, self.features, self.folder, self.tell = recipe, features, folder, tell
        self.model, self.replies = model, replies = features.model, features.sequences
        self.held_out = held_out(replies)
        self.training = sorted(set(range(len(replies))) - set(self.held_out))
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        streams = issubclass(KINDS[recipe.kind], (Eagle3Head, DFlashHead))  # the others read the final state alone
        start = read_start(recipe, model.config)
        if start is not None and start.config.token_map is not None:
            ids = start.config.token_map  # in the order of the rows of its LM head
        else:
            ids = draft_vocabulary([replies[i] for i in self.training], recipe.draft_vocab, vocab)
            ids = ids.sort().values if streams else ids
        ids = ids.to(features.device)
        tapped = tuple(tap for tap in features.taps if isinstance(tap, int))
        self.taps = slice(0, len(tapped) * hidden) if streams else slice(-hidden, None)
        self.head = new_head(recipe, model, ids, tapped, self._scale(len(tapped)))
        rows = scaled(slice_head(model, ids), model.config.logits_multiplier)
        self.teacher = Teacher(rows, ids, vocab)
        trained = [p for p in self.head.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.step = 0
        self.stages = Stages(recipe, features, self.training, parts or [len(replies)])

    def run(self, stop_at: int | None = None) -> None:
        """Train to the end (or to update `stop_at`), print progress, and save checkpoints to resume from."""
        self._resume()
        updates = self.stages.updates
        begun, first, told, saved, tokens = time.perf_counter(), self.step, time.perf_counter(), time.perf_counter(), 0
        hits, loss_sum, count = torch.zeros(self.recipe.rounds, 2), 0.0, 0
        for number, chosen in islice(enumerate(self.stages.order()), self.step, stop_at):
            if number == self.stages.trunk and number > 0:  # from here on the learning rate falls
                trunk = self.folder / "trunk"
                export(self.head, self.model, trunk)
                self.stages.record(trunk)
                self.tell(f"wrote {trunk}, from which --start goes on with more replies")
            loss, found = self._update(chosen)
            hits, loss_sum, count = 0.98 * hits + found.cpu(), loss_sum + loss, count + 1
            tokens += sum(len(self.replies[i].ids) - self.replies[i].start for i in chosen)
            now = time.perf_counter()
            if now - told > 15 or self.step == updates:
                rate = (self.step - first) / (now - begun)
                depth = " ".join(f"{a:.2f}" for a in (hits[:, 0] / hits[:, 1].clamp(min=1)).tolist())
                self.tell(
                    f"update {self.step}/{updates}  loss {loss_sum / count:.3f}  acceptance by depth {depth}  "
                    f"{tokens / (now - begun):.0f} tokens/s  {(updates - self.step) / rate / 60:.1f} min left"
                )
                told, loss_sum, count = now, 0.0, 0
            if now - saved > SAVE_EVERY:
                self._save()
                saved = now
        self._save()

    def accept_length(self, rounds: int) -> float:
        """Return tokens per verify step over the held-out replies, drafting chains of `rounds` tokens."""
        emitted = steps = 0
        for i in self._teaching(self.held_out):
            with self._autocast():
                more = replay(self._accepted(i, rounds))
            emitted, steps = emitted + more[0], steps + more[1]
        return emitted / max(1, steps)

    @property
    def depths(self) -> list[int]:
        """The lengths of chains for which the accept length is worth telling."""
        return [1, 2, 3, 5]

    def _accepted(self, index: int, rounds: int) -> list[int]:
        """Return how many drafts of a chain of `rounds` tokens are accepted at each anchor of one reply."""
        return accepted(self.head, self._batch([index], rounds), self.taps, self.teacher)

    def _losses(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the loss on the replies of these indices, which teach, and the hits by depth."""
        batch = self._batch(chosen, self.recipe.rounds)
        return losses(self.head, batch, self.taps, self.teacher, self.recipe.feature_weight)

    def _batch(self, chosen: Sequence[int], rounds: int) -> Packed:
        """Return a batch of the replies of these indices."""
        found = self.features.several(chosen)
        return pack([self.replies[i] for i in chosen], found, self.model.config.hidden_size, rounds)

    def _teaching(self, chosen: Sequence[int]) -> list[int]:
        """Return these indices by length, so that little is padded. One token teaches nothing, and is left out."""
        teaching = (i for i in chosen if len(self.replies[i].ids) - self.replies[i].start > 1)
        return sorted(teaching, key=lambda i: len(self.replies[i].ids))

    def _update(self, chosen: Sequence[int]) -> tuple[float, Tensor]:
        """Make one update of the weights; returns the loss and the hits."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.stages.rate(self.step)
        with self._autocast():
            loss, hits = self._losses(self._teaching(chosen))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.step += 1
        return loss.item(), hits

    def _autocast(self) -> torch.autocast:
        """Return the context in which products of the fp32 weights are computed in bfloat16, if the target is in it."""
        low = self.features.dtype == torch.bfloat16
        return torch.autocast(self.features.device.type, torch.bfloat16, enabled=low)

    def _scale(self, streams: int) -> Tensor:
        """Return the typical size of each tapped stream: the median over tokens, without the first of each sequence.

        The first token is left out, since it is an attention sink, whose streams are unlike all others in size.
        """
        hidden = self.model.config.hidden_size
        rows = torch.cat([self.features.of(i)[0][1:] for i in self.training[:16]]).float()
        parts = rows[:, : streams * hidden].view(-1, streams, hidden)
        return parts.square().mean(-1).sqrt().median(0).values

    def _save(self) -> None:
        """Write the checkpoint to a second file and rename it, so that no reader finds half of one.

        ids: [Vd], which target ids the rows of the head's LM head are for. data: the digest of the replies, which also
        decide what is held out.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": asdict(self.recipe),
            "data": self.features.digest,
            "ids": self.head.token_map,
            "step": self.step,
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, self.folder / "checkpoint.partial")
        (self.folder / "checkpoint.partial").replace(self.folder / "checkpoint.pt")

    def _resume(self) -> None:
        """Load the checkpoint, if there is one; raises ValueError if it is of another recipe or of other replies."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.features.device, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise ValueError(f"{path} is of another recipe ({state['recipe']}); remove it or choose another --out")
        ids = cast(Tensor, self.head.token_map)
        if state.get("data") != self.features.digest or not torch.equal(state["ids"], ids):
            raise ValueError(
                f"{path} was trained on other replies or in another dtype: its draft ids and held-out replies are not "
                "these; give the --work it was trained with or choose another --out"
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.tell(f"going on from update {self.step} of {self.stages.updates}")
