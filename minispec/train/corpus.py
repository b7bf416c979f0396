"""The text a draft head learns from: replies that the target itself wrote, and what the target computed on them.

A head imitates one model, so it learns from that model's own replies ("on-policy"). Our engine generates them here, so
prompts are enough, and these need an open licence. The head also reads that model's features, which cost a forward
pass: `Features` keeps them on disk, so that a second epoch, or a second head, reads them instead.

A run may be interrupted, so all that is expensive is in files that grow. Replies are appended a group at a time and
features one sequence at a time, and the next run goes on where the last one stopped.

    replies.jsonl    {"made": {"--model": ..., "--seed": ..., ...}}, what all replies below depend on
                     {"ids": [...], "start": P, "temperature": 0.0, "source": "..."}    ids[P:] is the reply
                     {"group": 0, "tokens": R}, at the end of each group, with the number of its reply tokens
    features-TAPS.bin               [tokens, F], the tapped streams of every sequence, one after the other
    choices-TAPS.bin, done-TAPS.bin the target's greedy choice after each token; which sequences are there
    digest-TAPS.txt                 of the sequences, taps and dtype that the features belong to

Features of other replies are dropped and computed anew. Replies that were made with other flags are refused and not
dropped, since they took long to generate.

On-policy data for draft heads comes from DistillSpec (arXiv 2310.08461). Read next: `prompts.py` for where the prompts
come from, then `rounds.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.attention import Causal
from minispec.llm import LLM
from minispec.model import Model
from minispec.request import SamplingParams
from minispec.train.measured import is_measured_on
from minispec.train.prompts import Conversation, Tell, word_lists

GROUP = 1024  # prompts in a group of replies; an interruption loses at most one group
LONG_PROMPT = 384  # tokens from which on a prompt does not run beside short ones
SHORTEST = 8  # tokens of the shortest reply that is kept
SAMPLED = 0.25  # share of replies at a temperature of 0.7 to 1, since such requests are served too
SELF_PROMPTED = 0.4  # share of first user turns that the target makes up
SECOND_TURNS = 0.18  # share of conversations that the target continues in the user's place
HELD_OUT = 200  # replies that are never trained on, by which the result is measured
HELD_OUT_SHARE = 0.04  # of prompts, by their hash: the replies to them are held out until there are so many
USER_TOKENS = 96  # tokens of the longest user turn that is made up
MARK = "\N{LOZENGE}\N{LOZENGE}"


@dataclass(frozen=True)
class TrainingReply:
    """One sequence: a prompt and the target's reply, which starts at `start` and ends with the text."""

    ids: list[int]
    start: int
    temperature: float
    source: str


# ---- generating ---------------------------------------------------------------------------------------------------


def begin_replies(path: Path, made: Mapping[str, object]) -> None:
    """Write what all replies of a file depend on into its first line; if the file exists, check that it says the same.

    made: values by flag of the command. Raises ValueError naming the flags that differ, or saying that there are none.
    """
    first = ""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            first = file.readline()
    if not first.endswith("\n"):  # no file, or one of a run that was killed while it wrote this line
        path.write_text(json.dumps({"made": made}) + "\n", encoding="utf-8")
        return
    found = json.loads(first).get("made")
    if found is None:
        raise ValueError(f"--work {path.parent}: its {path.name} does not say what made it; choose another --work")
    if found != made:
        other = [flag for flag in {**found, **made} if found.get(flag) != made.get(flag)]
        then, now = (" ".join(f"{flag} {have[flag]}" for flag in other if flag in have) for have in (found, made))
        raise ValueError(
            f"--work {path.parent}: its {path.name} was made with {then}, and this run has {now}; "
            "repeat what made it or choose another --work"
        )


def generate(
    llm: LLM, conversations: Sequence[Conversation], path: Path, *, seed: int, max_new_tokens: int, tell: Tell
) -> Iterator[int]:
    """Append the target's replies to all conversations to a file begun by `begin_replies`, going on where it ends.

    Some conversations are replaced by ones that the target makes up, and some get a second turn. Very short replies are
    dropped, and so are those that loop: a loop teaches copying and makes every measurement look too good. No prompt has
    two replies. Yields the number of each group when the file has it.
    """
    seen = {prompt_hash(reply.ids[: reply.start]) for reply in read_replies(path)}
    for group in range(groups_done(path), groups(len(conversations))):
        begun = time.process_time()
        writer = _Writer(llm, random.Random(f"{seed}/{group}"), max_new_tokens, seen)
        with_self = writer.make_up(conversations[group * GROUP : (group + 1) * GROUP])
        kept = writer.reply(with_self)
        kept += writer.reply(writer.second_turns(with_self))
        tokens = sum(len(reply.ids) - reply.start for reply in kept)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(reply)) + "\n" for reply in kept)
            file.write(json.dumps({"group": group, "tokens": tokens}) + "\n")
        rate = tokens / (time.process_time() - begun)
        tell(f"group {group + 1}: {len(kept)} replies, {tokens} tokens, {rate:.0f} a CPU second")
        yield group


def prompt_hash(ids: Sequence[int]) -> int:
    """Return 64 bits that stand for a prompt's tokens, the same on every machine."""
    return int.from_bytes(hashlib.sha256(np.asarray(ids, "<i4").tobytes()).digest()[:8], "big")


def held_out(replies: Sequence[TrainingReply]) -> list[int]:
    """Return which replies are never trained on: the first greedy ones whose prompts have a small hash.

    So it stays decided for good: replies that are added behind them, or another seed, change nothing.
    """
    limit = int(HELD_OUT_SHARE * 2**64)
    greedy = (i for i, reply in enumerate(replies) if reply.temperature == 0)
    return list(islice((i for i in greedy if prompt_hash(replies[i].ids[: replies[i].start]) < limit), HELD_OUT))


def runs_alike(lengths: Sequence[int], temperatures: Sequence[float]) -> list[list[int]]:
    """Return the indices of prompts in the runs that they are to be generated in, each by length.

    A step takes as long as its longest text asks for: attention reads as many rows of every request, and one request
    that samples has noise made for all.
    """
    runs: dict[tuple[bool, bool], list[int]] = {}
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        runs.setdefault((temperatures[i] > 0, lengths[i] >= LONG_PROMPT), []).append(i)
    return [runs[kind] for kind in sorted(runs)]


def read_replies(path: Path) -> list[TrainingReply]:
    """Return the sequences of a file that `generate` wrote; a group that was cut off is left out."""
    return parse_replies(path.read_text(encoding="utf-8").splitlines(keepends=True)[1:])


def parse_replies(lines: Iterable[str]) -> list[TrainingReply]:
    """Return the sequences of whole groups."""
    return [TrainingReply(**json.loads(line)) for group in whole_groups(lines) for line in group[:-1]]


def whole_groups(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the lines of each group that is not cut off, its own line the last."""
    group: list[str] = []
    for line in lines:
        group.append(line)
        if line.startswith('{"group"') and line.endswith("\n"):
            yield group
            group = []


def groups(conversations: int) -> int:
    """Return how many groups this many conversations make."""
    return -(-conversations // GROUP)


def groups_done(path: Path) -> int:
    """Return how many groups a file of replies holds, cutting off one that is not whole."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = list(whole_groups(lines[1:]))
    path.write_text("".join([*lines[:1], *chain(*whole)]), encoding="utf-8")
    return len(whole)


class _Writer:
    """Generates one group: user turns made up by the target, and its replies."""

    def __init__(self, llm: LLM, rng: random.Random, max_new_tokens: int, seen: set[int]) -> None:
        """`seen`: the hashes of all prompts that have a reply, to which this group's are added."""
        self.llm, self.tokenizer, self.rng = llm, llm.tokenizer, rng
        self.max_new_tokens, self.seen = max_new_tokens, seen
        self.replies: dict[int, str] = {}  # by index in the group, the replies that ended by themselves

    def make_up(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        """Return the conversations, a share of them replaced by user turns sampled after the user's header.

        They begin with words of ours: left to itself, the target asks for fewer kinds of things.
        """
        chosen = [i for i in range(len(conversations)) if self.rng.random() < SELF_PROMPTED]
        texts = self._user_turns([[] for _ in chosen], [self.rng.choice(word_lists()["turns"]) for _ in chosen])
        out = list(conversations)
        for index, text in zip(chosen, texts, strict=True):
            if len(text.split()) >= 3 and not is_measured_on(text):
                out[index] = Conversation([{"role": "user", "content": text}], "self-prompted")
        return out

    def second_turns(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        """Return a share of the conversations with their reply and a next user turn, both written by the target."""
        chosen = [i for i in sorted(self.replies) if self.rng.random() < SECOND_TURNS]
        grown = [[*conversations[i].messages, {"role": "assistant", "content": self.replies[i]}] for i in chosen]
        texts = self._user_turns(grown, [""] * len(grown))
        return [
            Conversation([*messages, {"role": "user", "content": text}], "second turn")
            for messages, text in zip(grown, texts, strict=True)
            if len(text.split()) >= 2 and not is_measured_on(text)
        ]

    def reply(self, conversations: Sequence[Conversation]) -> list[TrainingReply]:
        """Return the target's replies to conversations, without short and looping ones and without a prompt twice."""
        room = self.llm.scheduler.sizes.context_length - self.max_new_tokens
        encoded = [self.tokenizer.encode_chat(conversation.messages) for conversation in conversations]
        chosen = [i for i, ids in enumerate(encoded) if len(ids) < room and self._is_new(ids)]
        heat = [round(self.rng.uniform(0.7, 1.0), 2) if self.rng.random() < SAMPLED else 0.0 for _ in chosen]
        params = [self._params(temperature, self.max_new_tokens) for temperature in heat]
        results = self._ask([encoded[i] for i in chosen], params)
        kept = []
        for i, temperature, result in zip(chosen, heat, results, strict=True):
            ids, prompt = result["output_ids"], encoded[i]
            if len(ids) < SHORTEST or loops(ids):
                continue
            if result["meta_info"]["finish_reason"]["type"] == "stop":
                self.replies.setdefault(i, result["text"])
            kept.append(TrainingReply(prompt + ids, len(prompt), temperature, conversations[i].source))
        return kept

    def _is_new(self, ids: Sequence[int]) -> bool:
        """Return whether no reply to this prompt was asked for yet, and note that one is."""
        found = prompt_hash(ids)
        new = found not in self.seen
        self.seen.add(found)
        return new

    def _ask(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[dict[str, Any]]:
        """Return what the target generates, in the order of the prompts; they run beside their like."""
        results: dict[int, dict[str, Any]] = {}
        for run in runs_alike([len(ids) for ids in prompts], [wish.temperature for wish in params]):
            found = self.llm.generate([prompts[i] for i in run], [params[i] for i in run])
            results.update(zip(run, found, strict=True))
        return [results[i] for i in range(len(prompts))]

    def _user_turns(self, histories: Sequence[list[dict[str, str]]], openings: Sequence[str]) -> list[str]:
        """Return one user turn after each history, sampled from the target in the user's place after an opening."""
        prompts = []
        for messages, opening in zip(histories, openings, strict=True):
            chat = self.tokenizer.chat.render([*messages, {"role": "user", "content": MARK}])
            prompts.append(self.tokenizer.encode(chat[: chat.index(MARK)] + opening, False))
        results = self._ask(prompts, [self._params(1.0, USER_TOKENS) for _ in prompts])
        return [
            (opening + result["text"]).strip() if result["meta_info"]["finish_reason"]["type"] == "stop" else ""
            for opening, result in zip(openings, results, strict=True)
        ]

    def _params(self, temperature: float, limit: int) -> SamplingParams:
        """Return the parameters of one request."""
        return SamplingParams(temperature=temperature, max_new_tokens=limit, sampling_seed=self.rng.randrange(2**31))


# ---- what the target computed --------------------------------------------------------------------------------------


class Features:
    """The target's tapped streams on every sequence, computed once and kept in a file.

    limit: bytes to keep; sequences beyond it are computed anew every time. `digest` stands for the sequences, taps and
    dtype that the features belong to; files of another digest are dropped.
    """

    GROUP = {"cuda": 64}  # sequences that the target reads together, by type of device; elsewhere 1

    def __init__(
        self, model: Model, sequences: Sequence[TrainingReply], taps: Sequence[int | str], folder: Path, limit: int
    ) -> None:
        self.model, self.sequences, self.taps = model, sequences, tuple(taps)
        weight = model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.width = model.config.hidden_size * len(self.taps)
        self.offsets = list(accumulate((len(s.ids) for s in sequences), initial=0))
        self.kept = bisect_right(self.offsets, limit // (self.width * self.dtype.itemsize + 4)) - 1
        rows = max(1, self.offsets[self.kept])  # an empty file cannot be mapped
        self.digest = digest_of(sequences, self.taps, self.dtype)
        name = "-".join(map(str, self.taps))
        files = [folder / f"{part}-{name}.bin" for part in ("features", "choices", "done")]
        _drop_others(files, folder / f"digest-{name}.txt", self.digest)
        self._file = _grown(files[0], self.dtype, (rows, self.width))
        self._choice = _grown(files[1], torch.int32, (rows,))
        self._done = _grown(files[2], torch.uint8, (max(1, self.kept),))

    def of(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a sequence's features [T, F], of the target's dtype, and greedy choices [T] int64, on its device."""
        return self.several([index])[0]

    def several(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return features and greedy choices of some sequences; on CUDA, best of sequences of like length."""
        lacking = [i for i in indices if i >= self.kept or not self._done[i]]
        count, found = self.GROUP.get(self.device.type, 1), dict[int, tuple[Tensor, Tensor]]()
        for group in (lacking[i : i + count] for i in range(0, len(lacking), count)):
            found.update(zip(group, self._compute(group), strict=True))
        for index, (features, choices) in found.items():
            if index < self.kept:
                rows = slice(self.offsets[index], self.offsets[index + 1])
                self._file[rows], self._choice[rows], self._done[index] = features, choices, 1
        return [found[i] if i in found else self._read(i) for i in indices]

    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return self._file[rows].to(self.device), self._choice[rows].long().to(self.device)

    @torch.no_grad()
    def _compute(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Run the target over sequences, padded behind their ends.

        Choices are computed from the token before the reply on, and are 0 before.
        """
        sequences = [self.sequences[i] for i in indices]
        longest = max(len(sequence.ids) for sequence in sequences)
        ids = torch.tensor([[*s.ids, *[0] * (longest - len(s.ids))] for s in sequences], device=self.device)
        positions = torch.arange(longest, device=self.device).expand_as(ids)
        hidden, features = self.model(ids, positions, Causal(self.model.config.windows(longest)), self.taps)
        assert features is not None
        chosen = [hidden[row, s.start - 1 : len(s.ids)] for row, s in enumerate(sequences)]
        best = self.model.logits(torch.cat(chosen)).argmax(-1).split([len(states) for states in chosen])
        return [(features[row, : len(s.ids)], F.pad(best[row], (s.start - 1, 0))) for row, s in enumerate(sequences)]


def digest_of(sequences: Sequence[TrainingReply], taps: Sequence[int | str], dtype: torch.dtype) -> str:
    """Return a sha256 of all that features depend on besides the target's weights, and of each temperature.

    The temperatures are in it because they decide which replies are held out.
    """
    digest = hashlib.sha256(f"{list(taps)} {dtype}".encode())
    for sequence in sequences:
        digest.update(f"{len(sequence.ids)} {sequence.start} {sequence.temperature}".encode())
        digest.update(np.asarray(sequence.ids, np.int64).tobytes())
    return digest.hexdigest()


def _drop_others(files: Sequence[Path], record: Path, digest: str) -> None:
    """Remove `files` unless `record` holds this digest, and write the digest to `record`.

    They are removed and not emptied, since another run may still read the old ones. The record is written last: if the
    run is killed before that, the next one finds no files, and not old ones under the new digest.
    """
    if record.exists() and record.read_text() == digest:
        return
    for path in files:
        path.unlink(missing_ok=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(digest)


def _grown(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a file as a tensor of this shape, created or lengthened with zeros (a sparse file) as needed."""
    size = math.prod(shape)
    with path.open("ab") as file:
        file.truncate(max(file.tell(), size * dtype.itemsize))
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)


def batches(
    sequences: Sequence[TrainingReply], chosen: Sequence[int], tokens: int, rng: random.Random
) -> Iterator[list[int]]:
    """Yield shuffled batches of indices out of `chosen`, each of about `tokens` reply tokens."""
    order = list(chosen)
    rng.shuffle(order)
    batch: list[int] = []
    held = 0
    for index in order:
        batch.append(index)
        held += len(sequences[index].ids) - sequences[index].start
        if held >= tokens:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def loops(tokens: Sequence[int]) -> bool:
    """Return whether a reply's last 48 tokens repeat with a period of at most 16.

    Small models loop under greedy decoding, and a loop is easy to draft. So benchmarks report figures with and without
    such replies.
    """
    tail = list(tokens[-48:])
    return len(tail) == 48 and any(tail[p:] == tail[:-p] for p in range(1, 17))
