"""Replies to keep: files of at most 250,000 reply tokens each, compressed, that are never changed once they are there.

A file of replies grows in the work folder (`corpus.py`). Whenever its newest groups are enough for a shard, they are
written to one, line for line behind the line that says what all were made with. So shards can be shared, and a run
that has lost its work folder begins it anew from them.

    replies-0000.jsonl.xz    the same lines as those of replies.jsonl, from one group's beginning to another's end

Read next: `__main__.py`, whose `--replies` learns from shards; `stages.py`, for which each shard is a part.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from minispec.train.corpus import TrainingReply, parse_replies, whole_groups

SHARD_TOKENS = 250_000  # most reply tokens of a shard
ALL_BYTES = 8_000_000  # most bytes of all shards


def shard_files(folder: Path) -> list[Path]:
    """Return the shards of a folder in their order; raises ValueError where one of them is missing."""
    files = sorted(folder.glob("replies-*.jsonl.xz"))
    for number, file in enumerate(files):
        if file != _shard(folder, number):
            raise ValueError(f"{folder} has {file.name} but not {_shard(folder, number).name}, which comes before it")
    return files


def read_shards(folder: Path, model: str) -> list[list[TrainingReply]]:
    """Return the replies of each shard in their order; raises ValueError if there are none or another model's."""
    shards: list[list[TrainingReply]] = []
    for file in shard_files(folder):
        lines = _lines(file)
        if (wrote := json.loads(lines[0])["made"]["--model"]) != model:
            raise ValueError(f"--replies {folder}: {file.name} was written by {wrote}, and this run trains for {model}")
        shards.append(parse_replies(lines[1:]))
    if not shards:
        raise ValueError(f"--replies {folder} holds no shard such as {_shard(folder, 0).name}")
    return shards


def restore(path: Path, folder: Path) -> None:
    """Replace a file of replies that has fewer groups than the shards of a folder by what these hold.

    Raises ValueError if the shards were not made as the file says in its first line.
    """
    made, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
    shards = [_lines(file) for file in shard_files(folder)]
    if other := [lines[0] for lines in shards if lines[0] != made]:
        raise ValueError(f"--out {folder}: its shards are of {other[0].strip()}, and this run is of {made.strip()}")
    lines = [line for shard in shards for line in shard[1:]]
    if len(list(whole_groups(lines))) > len(list(whole_groups(rest))):
        partial = path.with_suffix(".partial")
        partial.write_text("".join([made, *lines]), encoding="utf-8")
        partial.replace(path)


def write_shards(path: Path, folder: Path, last: bool = False) -> bool:
    """Write the whole groups of a file of replies that no shard has yet; returns whether there is room for more.

    A shard is written as soon as the next group does not fit in it, or if this is the last call.
    """
    made, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
    done = sum(len(list(whole_groups(_lines(file)))) for file in shard_files(folder))
    held, tokens = list[str](), 0
    for lines in islice(whole_groups(rest), done, None):
        count = json.loads(lines[-1])["tokens"]
        if held and tokens + count > SHARD_TOKENS:
            if not _write(folder, [made, *held]):
                return False
            held, tokens = [], 0
        held, tokens = [*held, *lines], tokens + count
    return not (last and held) or _write(folder, [made, *held])


def _write(folder: Path, lines: Sequence[str]) -> bool:
    """Write the next shard, so that no reader finds half of it; returns whether all shards have room for it."""
    content = lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
    files = shard_files(folder)
    if sum(file.stat().st_size for file in files) + len(content) > ALL_BYTES:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "partial"
    partial.write_bytes(content)
    partial.replace(_shard(folder, len(files)))
    return True


def _shard(folder: Path, number: int) -> Path:
    return folder / f"replies-{number:04}.jsonl.xz"


def _lines(file: Path) -> list[str]:
    """Return the lines of a shard."""
    return lzma.decompress(file.read_bytes()).decode().splitlines(keepends=True)
