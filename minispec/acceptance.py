"""What verify steps gave: the one record of acceptance, and the forms in which it is told.

Definitions, as in SGLang's log: a decode forward over B requests counts B verify steps. Accept len is the number of
tokens that requests keep per verify step, the target's own token included; plain decoding has 1.00. Accept rate is the
share of verified drafts that was accepted. Tokens behind a stop do not count. SGLang's own spec_accept_length counts
the token that prefill gives, too.

A request has a `Verified`, the engine has one since the start and one for each log line (`metrics.py`). The log,
/server_info, /metrics, `meta_info`, `usage` and `explain` are told from it by the methods here. This file does not
import torch, since a server answers before torch is imported.

Read next: `metrics.py`, the engine's other counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SOURCES = ("head", "lookup", "host")  # whose drafts there are


class Kept(NamedTuple):
    """What a verify step gave one request."""

    tokens: int  # how many of the step's tokens the request kept; tokens behind a stop are not kept
    source: str | None = None  # the source of the drafts verified (`Planned.verified`); None: there were no drafts
    drafted: int = 0  # drafts verified; of a head's tree all nodes but the root, padding included
    accepted: int = 0  # how many of the tokens kept were drafts


@dataclass
class Verified:
    """What verify steps gave, by the source of the drafts that they verified (`Kept.source`)."""

    steps: Counter[str | None] = field(default_factory=Counter)
    tokens: Counter[str | None] = field(default_factory=Counter)
    drafted: Counter[str | None] = field(default_factory=Counter)
    accepted: Counter[str | None] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)  # number of drafts accepted in a step -> number of such steps

    def add(self, kept: Kept) -> None:
        """Count a verify step of one request."""
        tokens, source, drafted, accepted = kept
        self.steps[source] += 1
        self.tokens[source] += tokens
        self.drafted[source] += drafted
        self.accepted[source] += accepted
        self.depths[accepted] += 1

    @property
    def accept_length(self) -> float:
        """Tokens per verify step; 0 before the first."""
        return self.tokens.total() / max(self.steps.total(), 1)

    @property
    def accept_rate(self) -> float:
        """Accepted over verified drafts; 0 before the first."""
        return self.accepted.total() / max(self.drafted.total(), 1)

    @property
    def histogram(self) -> list[int]:
        """How many verify steps accepted exactly i drafts, for each i."""
        return [self.depths[i] for i in range(max(self.depths, default=-1) + 1)]

    @property
    def lookup_shares(self) -> dict[str, float]:
        """The share of verify steps whose tree was looked up, and the share of tokens that came from these steps."""
        counts = {"verify_steps": self.steps, "tokens": self.tokens}
        return {name: round(count["lookup"] / max(count.total(), 1), 4) for name, count in counts.items()}

    def log(self) -> str:
        """Return the part of a log line."""
        return f", accept len: {self.accept_length:.2f}, accept rate: {self.accept_rate:.2f}"

    def meta_info(self) -> dict[str, Any]:
        """Return the fields of SGLang's meta_info."""
        return {
            "spec_verify_ct": self.steps.total(),
            "spec_accept_token_num": self.accepted.total(),
            "spec_draft_token_num": self.drafted.total(),
            "spec_accept_rate": self.accept_rate,
            "spec_accept_length": self.accept_length,
            "spec_accept_histogram": self.histogram,
        }

    def details(self) -> dict[str, Any]:
        """Return spec_tokens_details, with SGLang's newest names: in all, and by the source of the drafts.

        A source has an entry once a tree from it was verified. Steps without drafts are in no entry.
        """
        counts = (self.steps, self.tokens, self.drafted, self.accepted)
        return {
            **_details(*(count.total() for count in counts)),
            "spec_correct_drafts_histogram": self.histogram,
            "spec_by_source": {source: _details(*(count[source] for count in counts))
                               for source in self.steps if source is not None},
        }  # fmt: skip

    def usage(self) -> Counter[str]:
        """Return the counts of OpenAI's completion_tokens_details, which add up over choices."""
        accepted = self.accepted.total()
        return Counter(accepted_prediction_tokens=accepted, rejected_prediction_tokens=self.drafted.total() - accepted)

    def series(self) -> Mapping[str, tuple[str, list[tuple[dict[str, str], int]]]]:
        """Return the counters of /metrics: by name what it counts, and its samples with their labels."""
        by_source = {
            "spec_drafts_total": ("Trees verified, by whose they are.", self.steps),
            "spec_tokens_total": ("Tokens that requests kept of steps with those trees.", self.tokens),
            "spec_draft_tokens_total": ("Nodes of those trees, without the roots.", self.drafted),
            "spec_accepted_tokens_total": ("Drafted tokens that were accepted.", self.accepted),
        }
        by_depth = [({"position": str(depth)}, sum(count for deep, count in self.depths.items() if deep >= depth))
                    for depth in range(1, max(self.depths, default=0) + 1)]  # fmt: skip
        return {
            **{name: (text, [({"source": source}, counts[source]) for source in SOURCES])  # all, from the start on
               for name, (text, counts) in by_source.items()},
            "spec_accepted_tokens_per_position_total": ("Trees accepted at least so deep.", by_depth),
        }  # fmt: skip


def _details(steps: int, tokens: int, drafted: int, accepted: int) -> dict[str, Any]:
    return {
        "spec_verify_ct": steps,
        "spec_accept_length": tokens / max(steps, 1),
        "spec_num_proposed_drafts": drafted,
        "spec_num_correct_drafts": accepted,
        "spec_accept_rate": accepted / max(drafted, 1),
    }
