"""External corpora as an operator handles them: added, removed, saved, and built in a process of their own.

A corpus is built by `python -m minispec.load.corpora` at the lowest priority, so that neither the interpreter's lock
nor the processor is taken from the engine. That process reads documents as JSON lines, and leaves two arrays in a
folder that only this user can enter; the server maps them. The folder goes when the server ends.

What a server learned of its requests can outlive it: if a flag names a folder, the newest texts are written there at an
orderly end, and are a corpus when the next server starts.

Read next: `minispec/corpora.py`, how texts are looked up in them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from minispec.config import Config
from minispec.corpora import END, Corpus, Tokens, load, sort_places
from minispec.request import Request, RequestError, SamplingParams, short

if TYPE_CHECKING:
    from minispec.load.tokenizer import Tokenizer

logger = logging.getLogger("minispec")

AT_START = "external"  # the id of the corpus that a flag names
LEARNED = "learned"  # the id of the corpus of what an earlier server learned
KEPT = 1_000_000  # tokens of requests that are kept to be saved, at most
LONGEST_ID = 200  # characters of an id
# Of the process that builds. A stream keeps nine tenths of its speed beside it, and it gets on. At 19 it hardly did:
# threads that wait for each other spin, and leave no core to it.
NICENESS = 13


class Table(Protocol):
    """What lookups draft from: the table of one engine, or those of all replicas."""

    def put(self, name: str, corpus: Corpus | None) -> None: ...  # adds or replaces a corpus; None removes it


class Library:
    """The corpora of a server. Any thread may call, but `learn` and `forget` one alone; a corpus is built at a time."""

    def __init__(self, table: Table | None, tokenizer: Tokenizer, config: Config) -> None:
        """`table`: where corpora are put; None: the drafter looks nothing up."""
        self.table, self.tokenizer, self.config = table, tokenizer, config
        self.root = config.speculative_ngram_corpus_folder
        self.most = config.speculative_ngram_external_corpus_max_tokens
        self.counts: dict[str, int] = {}
        self._texts: list[bytes] = []  # what is to be saved: the ids of requests that have ended, the oldest first
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._building = threading.Lock()

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError if a request names a corpus that is not there."""
        name = params.ngram_corpus_id
        if name is not None and name not in self.counts:
            known = ", ".join(sorted(self.counts)[:20]) or "none"
            raise RequestError(f"ngram_corpus_id must be the id of a corpus ({known}), got {short(name)}",
                               "ngram_corpus_id")  # fmt: skip

    def add(self, name: str | None, documents: Sequence[str] | None, file: str | None) -> tuple[str, int]:
        """Build a corpus of texts, or of a file of JSON lines, and return its id and its number of tokens.

        A corpus of the same id is replaced. Raises RequestError that names the field.
        """
        if (documents is None) == (file is None):
            raise RequestError("give documents, a list of texts, or file_path, a file of JSON lines", "documents")
        if name is not None and not 0 < len(name) <= LONGEST_ID:
            raise RequestError(f"corpus_id must have 1 to {LONGEST_ID} characters", "corpus_id")
        if file is not None:
            with self._opened(file) as opened:
                return self._built(name, opened, "file_path")
        with tempfile.TemporaryFile() as lines:
            for text in documents or ():
                lines.write(json.dumps(text).encode() + b"\n")
            lines.seek(0)
            return self._built(name, lines, "documents")

    def start(self) -> None:
        """Build the corpora that flags name; raises ValueError naming the flag."""
        path, folder = self.config.speculative_ngram_external_corpus_path, self.config.speculative_ngram_learned_folder
        flag = f"--speculative-ngram-external-corpus-path {path}"
        try:
            if path is not None:
                with open(path, "rb") as opened:
                    self._built(AT_START, opened, flag)
            if folder is not None:
                flag = f"--speculative-ngram-learned-folder {folder}"
                os.makedirs(folder, 0o700, exist_ok=True)
                self._load(Path(folder) / "learned.npz", flag)
        except (OSError, RequestError) as error:
            said = str(error) if isinstance(error, RequestError) else f"{flag}: {error.strerror}"
            raise ValueError(said) from None

    @cached_property
    def _digest(self) -> str:
        """The fingerprint of the tokenizer."""
        from minispec.load.draft_models import tokenizer_digest  # here, since it imports torch

        return tokenizer_digest(self.tokenizer)

    def _load(self, file: Path, flag: str) -> None:
        """Build the corpus of what an earlier server saved, if there is a file and the tokenizer is the same."""
        self._lookups()
        if not file.exists():
            return
        try:
            with np.load(file) as found:
                tokens, digest = found["tokens"], str(found["tokenizer"])
            if digest != self._digest:
                raise ValueError("it was saved with another tokenizer")
            count = self._built(LEARNED, tokens, flag)[1]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:  # RequestError is a ValueError
            logger.warning("%s: what was saved there is not used: %s", flag, error)
            return
        self._texts = [text.tobytes() for text in np.split(tokens, np.flatnonzero(tokens == END) + 1) if len(text)]
        logger.info("%s: %d tokens of earlier requests are looked up", flag, count)

    def learn(self, request: Request) -> None:
        """Keep the text of a request that has ended, if texts are saved and it has no cache salt."""
        if self.config.speculative_ngram_learned_folder is None or request.salt or not request.output_ids:
            return
        text = np.array([*request.ids, END], np.int32).tobytes()
        self._texts = [kept for kept in self._texts if not text.startswith(kept[:-4])]  # an earlier turn, or the same
        self._texts.append(text)
        while sum(map(len, self._texts)) > 4 * min(KEPT, self.most):
            del self._texts[0]

    def forget(self) -> None:
        """Save nothing of the requests so far."""
        self._texts = []

    def save(self) -> None:
        """Write the kept texts to the folder that a flag names, as a file that no other user may read."""
        if (folder := self.config.speculative_ngram_learned_folder) is None:
            return
        try:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:  # has the mode 0600
                tokens = np.frombuffer(b"".join(self._texts), np.int32)
                np.savez(file, tokens=tokens, tokenizer=np.array(self._digest))
            os.replace(file.name, Path(folder) / "learned.npz")
        except OSError as error:
            logger.error("--speculative-ngram-learned-folder %s: nothing is saved: %s", folder, error)

    def remove(self, name: str) -> None:
        """Remove a corpus, without waiting for requests that use it; raises RequestError if there is none."""
        if self.table is None or self.counts.pop(name, None) is None:
            raise RequestError(f"corpus_id must be the id of a corpus, got {short(name)}", "corpus_id")
        self.table.put(name, None)
        if name == LEARNED:
            self.forget()

    def _lookups(self) -> Table:
        """Return where corpora are put; raises RequestError if the drafter looks nothing up."""
        if self.table is None:
            raise RequestError("corpora are what lookups draft from, and this server looks nothing up: give "
                               "--speculative-algorithm NGRAM, or a head without --no-speculative-lookup")  # fmt: skip
        return self.table

    def _opened(self, file: str) -> IO[bytes]:
        """Open a regular file below the folder that a flag names; raises RequestError for any other."""
        refused = RequestError("file_path must be a file below the folder of --speculative-ngram-corpus-folder",
                               "file_path")  # fmt: skip
        if self.root is None:
            raise RequestError("file_path needs --speculative-ngram-corpus-folder, below which files may be read",
                               "file_path")  # fmt: skip
        try:
            root = Path(self.root).resolve(strict=True)
            real = (root / file).resolve(strict=True)
            if not real.is_relative_to(root):
                raise refused
            opened = os.fdopen(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
        except (OSError, ValueError):
            raise refused from None
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            opened.close()
            raise refused
        return opened

    def _built(self, name: str | None, source: IO[bytes] | Tokens, field: str) -> tuple[str, int]:
        """Build a corpus from JSON lines or tokens in a process of its own, and put it in the table."""
        table = self._lookups()
        if not self._building.acquire(blocking=False):
            raise RequestError("another corpus is being built; try again when it is", None, 400, "busy")
        try:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="minispec-corpora-")
            folder, name = Path(tempfile.mkdtemp(dir=self._folder.name)), name or uuid.uuid4().hex
            room = self.most - sum(count for key, count in self.counts.items() if key != name)
            try:
                count = self._run(folder, source, max(room, 0), field)
                corpus = load(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # what is mapped stays until it is dropped
            table.put(name, corpus)
            self.counts[name] = count
            return name, count
        finally:
            self._building.release()

    def _run(self, folder: Path, source: IO[bytes] | Tokens, most: int, field: str) -> int:
        """Run the building process; return how many tokens it read."""
        lines: IO[bytes] | int = subprocess.DEVNULL
        if isinstance(source, np.ndarray):
            np.save(folder / "tokens.npy", source)
        elif (spelled := self.tokenizer.backend.serialized()) is None:  # tiktoken's: its ids are made here
            texts = documents_of(source, field)
            ids = [np.array([*self.tokenizer.encode(text, False), END], np.int32) for text in texts]
            np.save(folder / "tokens.npy", np.concatenate(ids or [np.empty(0, np.int32)]))
        else:
            lines = source
            (folder / "tokenizer.json").write_text(spelled, encoding="utf-8")
        command = [sys.executable, "-m", "minispec.load.corpora", str(folder), str(most), field]
        environ = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdin=lines, capture_output=True, text=True, env=environ)
        if done.returncode == 0:
            return int(done.stdout)
        said = done.stderr.strip().splitlines()[-1:] or [f"the building process ended with {done.returncode}"]
        raise RequestError(said[0] if done.returncode == 2 else f"{field}: not built: {said[0]}", field)


def documents_of(lines: IO[bytes], field: str) -> Iterator[str]:
    """Yield the texts of JSON lines, strings or objects with `text`; raises RequestError naming the line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            said: Any = json.loads(line)
            text = said["text"] if isinstance(said, dict) else said
            if not isinstance(text, str):
                raise ValueError
            text.encode()
        except (ValueError, KeyError):
            raise RequestError(f"{field}: line {number} must be a JSON string, or an object with text", field) from None
        yield text


def main() -> int:
    """Build a corpus: FOLDER MOST FIELD, documents on standard input; print its number of tokens."""
    folder, most, field = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.nice(NICENESS)
    try:
        if (folder / "tokens.npy").exists():
            tokens = np.load(folder / "tokens.npy")
        else:
            tokens = _encoded(folder / "tokenizer.json", most, field)
        count = int((tokens != END).sum())
        if not 0 < count <= most:
            raise RequestError(f"{field}: must have 1 to {most} tokens beside the other corpora "
                               f"(--speculative-ngram-external-corpus-max-tokens), got {count}", field)  # fmt: skip
        np.save(folder / "tokens.npy", tokens)
        np.save(folder / "places.npy", sort_places(tokens))
    except RequestError as error:
        print(error, file=sys.stderr)
        return 2
    print(count)
    return 0


def _encoded(tokenizer: Path, most: int, field: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the ids of the documents on standard input, END after each; stops early once there are too many."""
    import tokenizers

    encode = tokenizers.Tokenizer.from_file(str(tokenizer)).encode
    parts, count = [], 0
    for text in documents_of(sys.stdin.buffer, field):
        parts.append(np.array([*encode(text, add_special_tokens=False).ids, END], np.int32))
        count += len(parts[-1]) - 1
        if count > most:
            break
    return np.concatenate(parts or [np.empty(0, np.int32)])


if __name__ == "__main__":
    sys.exit(main())
