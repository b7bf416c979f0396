"""What this project measures on, as hashes of eight words in a row, so that no prompt to train on repeats any of it.

A figure on text that was trained on would show nothing. MT-bench is not ours to pass on, and a hash of eight words is
enough to recognise them. Words are lower-cased and lose the punctuation at their ends.

    python -m minispec.train.measured question.jsonl benchmarks/prompts.jsonl > minispec/train/measured.txt

writes the file anew, a hash a line: of MT-bench's questions, both turns, and of the prompts of the benchmarks here.

Read next: `prompts.py`, which asks this of every prompt.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

RUN = 8  # words in a row that nothing else may share
HASH_FILE = Path(__file__).with_name("measured.txt")


def hashes(text: str) -> set[str]:
    """Return a hash of 8 hex digits for every `RUN` words in a row."""
    words = [word.strip(string.punctuation) or word for word in text.lower().split()]
    runs = (" ".join(words[first : first + RUN]) for first in range(len(words) - RUN + 1))
    return {blake2b(run.encode(), digest_size=4).hexdigest() for run in runs}


@cache
def known() -> frozenset[str]:
    """Return the hashes of `measured.txt`."""
    return frozenset(HASH_FILE.read_text(encoding="ascii").split())


def is_measured_on(text: str) -> bool:
    """Return whether a text shares `RUN` words in a row with anything that this project measures on."""
    return not hashes(text).isdisjoint(known())


def main(paths: Sequence[str]) -> None:
    """Print the hashes of files of questions, lines of {"turns": [...]} or {"prompt": ...}."""
    rows = [json.loads(line) for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    found = set[str]().union(*(hashes(text) for row in rows for text in row.get("turns") or [row["prompt"]]))
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
