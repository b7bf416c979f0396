"""The order in which a head learns from replies, made so that more of them may come later.

Replies come in parts, such as shards. A stage is one pass over a few parts in a row. With two epochs and the parts A,
B and C the stages are A, AB, BC and C, so each part is learned from twice:

    trunk    the stages before the decay, at a constant learning rate
    decay    the last stages, in which the learning rate falls

What the trunk learns from does not depend on the parts that come later. So the head as it is at the trunk's end is
kept, and a later run goes on from it with more parts as if they had been there from the beginning. Only the
optimizer's averages begin anew.

    trunk/                 a head's folder, as `export` writes it
    trunk/trained.json     {"stages": 2, "data": ...}, how many stages are done, and the digest of their replies

A constant rate with a decay at the end: MiniCPM (arXiv 2404.06395). Read next: `trainer.py`, which makes the updates.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from minispec.model_config import ModelError
from minispec.train.corpus import Features, batches, digest_of
from minispec.train.export import Recipe

RECORD = "trained.json"


class Stages:
    """The updates of a run, and its learning rate.

    training: the replies that may be learned from, by index, in their order. parts: how many replies each part has.
    `updates`: how many updates the run has. `trunk`: after how many of them the decay begins.
    """

    def __init__(self, recipe: Recipe, features: Features, training: Sequence[int], parts: Sequence[int]) -> None:
        self.recipe, self.features, self.training, self.parts = recipe, features, training, parts
        self.count = len(parts) + recipe.epochs - 1
        self.first = self._done()
        ends = list(accumulate((sum(1 for _ in self._stage(stage)) for stage in range(self.count)), initial=0))
        # A stage behind the last part would differ if there were more parts, so it is never the trunk's.
        fits = (stage for stage in range(len(parts) + 1) if ends[stage] <= (1 - recipe.decay) * ends[-1])
        self.trunk_stages = max(self.first, *fits)
        self.updates = ends[-1] - ends[self.first]
        self.trunk = ends[self.trunk_stages] - ends[self.first]

    def order(self) -> Iterator[list[int]]:
        """Yield the replies of every update, the same in every run."""
        for stage in range(self.first, self.count):
            yield from self._stage(stage)

    def rate(self, step: int) -> float:
        """Return the learning rate of an update: it rises at the beginning, stays, and falls as a cosine at the end."""
        recipe = self.recipe
        rise = min(1.0, (step + 1) / (recipe.warm_up + 1))
        share = max(0, step - self.trunk) / (self.updates - self.trunk)  # of the decay that is over
        return recipe.learning_rate * rise * (recipe.floor + (1 - recipe.floor) * 0.5 * (1 + math.cos(math.pi * share)))

    def record(self, folder: Path) -> None:
        """Note in the folder of the trunk's head what it has learned from."""
        trained = {"stages": self.trunk_stages, "data": self._data(self.trunk_stages)}
        (folder / RECORD).write_text(json.dumps(trained) + "\n", encoding="utf-8")

    def _stage(self, stage: int) -> Iterator[list[int]]:
        """Yield the replies of every update of a stage, those of its parts in a random order."""
        ends = list(accumulate(self.parts, initial=0))
        first = ends[max(0, stage - self.recipe.epochs + 1)]
        end = ends[min(stage + 1, len(self.parts))]
        chosen = [i for i in self.training if first <= i < end]
        rng = random.Random(f"{self.recipe.seed}/{stage}")
        yield from batches(self.features.sequences, chosen, self.recipe.batch_tokens, rng)

    def _done(self) -> int:
        """Return how many stages the head that training starts from has behind it, 0 unless it is a trunk.

        Raises ModelError naming --start if it is one of other replies than these.
        """
        if self.recipe.start is None or not (path := Path(self.recipe.start) / RECORD).exists():
            return 0
        trained = json.loads(path.read_text(encoding="utf-8"))
        if trained["stages"] > len(self.parts) or trained["data"] != self._data(trained["stages"]):
            raise ModelError(
                f"--start {self.recipe.start}: its {RECORD} is of a run on other replies or in another dtype; give the "
                "--replies of that run, to which shards may have been added"
            )
        return int(trained["stages"])

    def _data(self, stages: int) -> str:
        """Return the digest of the replies that the first `stages` stages learn from."""
        replies = self.features.sequences[: sum(self.parts[:stages])]
        return digest_of(replies, self.features.taps, self.features.dtype)
