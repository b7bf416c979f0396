"""Prompts under open licences, on which a target writes the text that its draft heads learn from.

A head drafts badly what it has never met, so six different sources are mixed: user turns of a package of
function-calling questions, small talk and trivia, descriptions of programs, templates written for this file over long
lists of words, and two that every installation has anyway, the code and the documentation of its own open-source
packages. A tenth of the prompts is long, since a head that has only met short ones drafts badly at depth.

No prompt repeats what this project measures on (`measured.py`), and none comes twice, in capitals or not. The
function-calling questions come from a benchmark of that skill, which is not run here.
Packages are pinned and checked like the default model's (`default_model.py`) and read without being installed or run.

Read next: `prompt_words.txt`, then `corpus.py`.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import importlib.util
import io
import json
import random
import re
import sysconfig
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TypeVar

from minispec.load import user_cache, wheels
from minispec.load.machine import text_of
from minispec.train.measured import is_measured_on

PACKAGES = {  # name -> version, wheel's sha256, licence
    "bfcl-eval": ("2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a", "Apache-2.0"),
    "chatterbot-corpus": ("1.3.3", "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154", "BSD-3-Clause"),
    "reasoning-gym": ("0.1.25", "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435", "Apache-2.0"),
}
SHARES = {  # of `count`; if a source has too few prompts, templates make up for them
    "bfcl-eval": 0.15,
    "chatterbot-corpus": 0.10,
    "reasoning-gym": 0.10,
    "code": 0.12,
    "passages": 0.08,
    "templates": 0.45,
}
INSTALLED = (  # read if installed, besides the standard library; all are under PSF, BSD, MIT or Apache-2.0
    "torch transformers numpy sympy networkx aiohttp jinja2 pygments rich requests pydantic tokenizers "
    "safetensors huggingface_hub fsspec yarl multidict packaging click httpx setuptools mpmath"
).split()
LONG_SHARE = 0.5  # of code and passages, hence a tenth of everything
LONG_CHARS = (7000, 14000)  # roughly 2,000 to 4,500 tokens
SYSTEM_SHARES = {"absent": 0.5, "varied": 0.25, "empty": 0.25}

WORD_FILE = Path(__file__).with_name("prompt_words.txt")

Tell = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Conversation:
    """Chat messages up to a user turn that waits for its reply, and the name of the source they came from."""

    messages: list[dict[str, str]]
    source: str


def collect(count: int, seed: int, tell: Tell = user_cache.to_stderr) -> list[Conversation]:
    """Return `count` distinct conversations, shuffled and mixed over the sources; the same for the same seed.

    That holds as long as the installed packages and those that can be downloaded are the same. If a package cannot be
    downloaded, `tell` gets one line about it. Raises ValueError if `count` cannot be reached.
    """
    rng, seen, chosen = random.Random(f"{seed} order"), set[str](), list[Conversation]()
    for name, share in SHARES.items():
        wanted = count - len(chosen) if name == "templates" else int(share * count)  # which come last and fill up
        prompts = _prompts(name, random.Random(f"{seed} {name}"), tell)
        fresh = (text for text in prompts if is_fresh(text, seen))
        chosen += [_with_system(text, name, rng) for text in islice(fresh, wanted)]
    if len(chosen) < count:
        raise ValueError(f"{count} prompts were asked for and only {len(chosen)} distinct ones exist")
    rng.shuffle(chosen)
    return chosen


def is_fresh(text: str, seen: set[str]) -> bool:
    """Return whether a prompt is none of `seen`, to which its words are added, and nothing that is measured on."""
    words = " ".join(re.findall(r"\w+", text.lower())) or text
    if words in seen:
        return False
    seen.add(words)
    return not is_measured_on(text)


def read_jsonl(path: str | Path) -> list[Conversation]:
    """Read a user's own prompts: one object per line, with `messages`, `prompt` or `turns` (the first one is taken).

    Empty lines are skipped. Raises ValueError naming the file, the line and what is allowed.
    """
    found = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    found.append(Conversation(_messages(json.loads(line)), Path(path).name))
                except ValueError as error:
                    raise ValueError(
                        f'{path}, line {number}: {error}; a line is {{"messages": [{{"role": ..., "content": ...}}, '
                        '...]}, {"prompt": "..."} or {"turns": ["...", ...]}'
                    ) from None
    if not found:
        raise ValueError(f"{path} holds no prompts")
    return found


def _messages(row: object) -> list[dict[str, str]]:
    """Return the messages that one line of a user's file gives; raises ValueError saying what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError("not an object")
    keys = [key for key in ("messages", "prompt", "turns") if key in row]
    if len(keys) != 1:
        raise ValueError(f"needs exactly one of messages, prompt and turns, and has {' and '.join(keys) or 'none'}")
    value = row[keys[0]]
    if keys[0] != "messages":
        text = value[0] if keys[0] == "turns" and isinstance(value, list) and value else value
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{keys[0]} holds no text")
        return [{"role": "user", "content": text}]
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and isinstance(message.get("content"), str) for message in value
    ):
        raise ValueError("messages is not a list of objects with a text under content")
    roles = [message.get("role") for message in value]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if len(turns) % 2 == 0 or turns != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
        raise ValueError("roles must be an optional system, then user and assistant in turn, a user last")
    return [{"role": message["role"], "content": message["content"]} for message in value]


@cache
def word_lists() -> dict[str, tuple[str, ...]]:
    """Return the lists of `prompt_words.txt` by name: ways to ask, and the words that fill their slots."""
    return parse_word_lists(WORD_FILE.read_text(encoding="utf-8"))


def parse_word_lists(text: str) -> dict[str, tuple[str, ...]]:
    """Return lists by name from the notation that is described at the top of `prompt_words.txt`.

    Raises ValueError for an entry that stands in no list and for a name that comes twice.
    """
    lists: dict[str, tuple[str, ...]] = {}
    name = None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("["):
            name = line.strip().strip("[]")
            if name in lists:
                raise ValueError(f"{WORD_FILE.name}, line {number}: there are two lists [{name}]")
            lists[name] = ()
        elif line.strip() and not line.startswith("#"):
            if name is None:
                raise ValueError(f"{WORD_FILE.name}, line {number}: an entry stands above the first [name]")
            lists[name] += tuple(entry.strip().replace("\\n", "\n") for entry in line.split(" | "))
    return lists


def _one_of(name: str, rng: random.Random) -> str:
    """Return an entry of a list of `prompt_words.txt`."""
    return rng.choice(word_lists()[name])


def _with_system(text: str, source: str, rng: random.Random) -> Conversation:
    """Return `text` as a user turn after no system turn (the template may add its own), a varied or an empty one."""
    kind = rng.choices(list(SYSTEM_SHARES), list(SYSTEM_SHARES.values()))[0]
    user = {"role": "user", "content": text}
    if kind == "absent":
        return Conversation([user], source)
    system = _fill(_one_of("systems", rng), rng) if kind == "varied" else ""
    return Conversation([{"role": "system", "content": system}, user], source)


# ---------------------------------------------------------------------------------------------------------------------
# Sources: each takes a random generator and yields prompts as long as it has any; some may come twice


def _prompts(source: str, rng: random.Random, tell: Tell) -> Iterable[str]:
    """Return a source's prompts; if its package is missing it is downloaded, and if it cannot be there are none."""
    readers = {"bfcl-eval": _bfcl, "chatterbot-corpus": _chatterbot, "reasoning-gym": _reasoning_gym}
    if source not in readers:
        return {"code": _code, "passages": _passages, "templates": _templates}[source](rng)
    wheel = _wheel(source, tell)
    return _shuffled(sorted(set(readers[source](wheel))), rng) if wheel else []


def _wheel(package: str, tell: Tell) -> zipfile.ZipFile | None:
    """Return a package's wheel, checked, from the cache or downloaded; None, after a line to `tell`, if that fails."""
    version, sha256, _ = PACKAGES[package]
    try:
        folder = user_cache.cache_root() / "prompts"
        cached = folder / f"{package}-{version}.whl"
        if not cached.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=user_cache.SCRATCH_PREFIX, dir=folder) as scratch:
                tell(f"Downloading prompts: {package} {version} with pip, once")
                wheels.pip_download(f"{package}=={version}", Path(scratch)).replace(cached)
        content = cached.read_bytes()
        if (found := hashlib.sha256(content).hexdigest()) != sha256:
            cached.unlink()
            raise wheels.DownloadError(f"it is not the file we know (sha256 {found}, expected {sha256})")
        return zipfile.ZipFile(io.BytesIO(content))
    except (wheels.DownloadError, OSError) as error:
        tell(f"Going on without the prompts of {package} {version}: {error}")
        return None


def _bfcl(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Yield what users ask in the first turn of the Berkeley function-calling leaderboard, without the functions."""
    for name in wheel.namelist():
        if re.fullmatch(r"bfcl_eval/data/BFCL_v4_(?!memory|format)\w+\.json", name):
            for line in wheel.read(name).decode().splitlines():
                for message in json.loads(line)["question"][0]:
                    if message["role"] == "user" and 8 < len(text := message["content"].strip()) < 3000:
                        yield text


def _chatterbot(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Yield what is said first in the English dialogues; their YAML is simple enough for a pattern."""
    for name in wheel.namelist():
        if re.fullmatch(r"chatterbot_corpus/data/english/\w+\.yml", name):
            for said in re.findall(r"^- - (.*(?:\n    .*)*)", wheel.read(name).decode(), re.MULTILINE):
                yield re.sub(r"\s+", " ", said).strip(" '\"|").replace("''", "'")


def _reasoning_gym(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Yield requests about the small programs that the package has as data; its generators would have to be run."""
    for row in json.loads(gzip.decompress(wheel.read("reasoning_gym/data/codeio-hq.jsonl.gz"))):
        task, code = row["task_description"].strip(), row["code_sample"].strip()
        rng = random.Random(task)
        yield task + " " + _one_of("how_solved", rng)
        yield "\n\n".join((_one_of("write_program", rng), task, row["input_output_spec"].strip()))
        if len(code) < LONG_CHARS[0]:
            yield _one_of("code_asks", rng).format(language="Python", code=f"```python\n{code}\n```")


def _code(rng: random.Random) -> Iterator[str]:
    """Yield questions about functions of installed sources: one function, or a long stretch of a file."""
    long = rng.random() < LONG_SHARE
    for path in _shuffled(_sources(), rng):
        source = text_of(path, "utf-8")
        lines = source.splitlines()
        spans = [
            (node.lineno - 1, node.end_lineno or node.lineno)
            for node in ast.walk(_parsed(source))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and 4 < (node.end_lineno or node.lineno) - node.lineno < 60
        ]
        for start, end in _shuffled(spans, rng)[:8]:
            code = lines[start:end]
            if long:
                stretch = "\n".join(lines[start:])
                if len(stretch) < LONG_CHARS[0]:
                    continue  # `long` stays true, so that a later file gives the long prompt
                code = stretch[: _long(rng)].splitlines()[:-1]
            margin = min((len(line) - len(line.lstrip()) for line in code if line.strip()), default=0)
            text = "\n".join(line[margin:] for line in code).strip("\n")
            yield _one_of("code_asks", rng).format(language="Python", code=f"```python\n{text}\n```")
            long = rng.random() < LONG_SHARE


def _passages(rng: random.Random) -> Iterator[str]:
    """Yield requests about documentation: the language's own reference, package descriptions and docstrings."""
    chapters = [[text] for text in _language_reference()]
    sections = [[text for text in re.split(r"\n(?=#+ )", description)] for description in _descriptions()]
    files = _shuffled(_sources(), rng)
    long = rng.random() < LONG_SHARE
    # In turn, and the rest of the longer one.
    pairs = zip_longest(_shuffled(chapters + sections, rng), map(_docstrings, files), fillvalue=())
    for texts in chain.from_iterable(pairs):
        for start in _shuffled(range(len(texts)), rng)[:6]:
            text = "\n\n".join(texts[start:]) if long else texts[start]
            if len(text) < (LONG_CHARS[0] if long else 300):
                continue  # `long` stays as it is, so that a later text makes up for this one
            text = text[: _long(rng) if long else rng.randint(300, 1800)].rsplit(" ", 1)[0].strip()
            yield _one_of("passage_asks", rng).format(passage=text)
            long = rng.random() < LONG_SHARE


def _long(rng: random.Random) -> int:
    """Return how many characters a long prompt gets; smaller numbers are more frequent."""
    return int(rng.triangular(*LONG_CHARS, LONG_CHARS[0]))


def _templates(rng: random.Random) -> Iterator[str]:
    """Yield filled templates without end, all equally often, some with an opener, limits or a casual spelling."""
    while True:
        text = _fill(_one_of("templates", rng), rng)
        if rng.random() < 0.2:
            text = _fill(_one_of("openers", rng), rng) + " " + text
        for limit in rng.sample(word_lists()["limits"], rng.choice((0, 0, 0, 0, 0, 1, 1, 2, 3))):
            text = f"{text} {_fill(limit, rng)}"
        if (casual := rng.random()) < 0.12:
            text = text[0].lower() + text[1:].rstrip(".?")
        if casual < 0.04:
            text = text.lower()
        yield text


def _fill(template: str, rng: random.Random) -> str:
    """Replace slots by words, as `prompt_words.txt` says; a word may have slots itself."""
    drawn: dict[str, str] = {}

    def draw(slot: re.Match[str]) -> str:
        """Return a number from the slot's range, or a word of its list; a numbered slot always gets the same word."""
        if slot[3]:
            return str(rng.randint(int(slot[3]), int(slot[4])))
        if slot[2] and slot[0] in drawn:
            return drawn[slot[0]]
        entries = word_lists()[slot[1]]
        word = rng.choice([entry for entry in entries if entry not in drawn.values()] or entries)
        drawn[slot[0] if slot[2] else str(len(drawn))] = word
        return word

    while (filled := re.sub(r"\{(?:([a-z]+)(\d?)|(\d+)-(\d+))\}", draw, template)) != template:
        template = filled
    text = re.sub(r"\b([Aa]) (?=[aeiou](?!ni[cfqtv]|uro|ne\b|se[rd])|hon[eo])", r"\1n ", template)
    return text[0].upper() + text[1:]


# ---------------------------------------------------------------------------------------------------------------------
# What every installation has: its own sources and their documentation


def _sources() -> list[Path]:
    """Return the Python files of the standard library and of the named packages, without their tests, in order."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in library.rglob("*.py") if "site-packages" not in path.parts]
    for package in INSTALLED:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            files += Path(folder).rglob("*.py")
    return sorted(path for path in files if not re.search(r"/(tests?|testing|idlelib|lib2to3)/|/test_", str(path)))


def _descriptions() -> Iterator[str]:
    """Yield the descriptions (READMEs) of the named packages that are installed, without the fields above them."""
    for path in sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info/METADATA")):
        if path.parent.name.split("-")[0].lower() in INSTALLED:
            yield text_of(path, "utf-8").partition("\n\n")[2]


def _language_reference() -> Iterator[str]:
    """Yield the chapters of Python's own reference that `help` shows, where they are installed."""
    if importlib.util.find_spec("pydoc_data.topics"):
        from pydoc_data import topics

        yield from (text for text in topics.topics.values() if len(text) > 300)


def _docstrings(path: Path) -> list[str]:
    """Return the docstrings of a file that have more than 300 characters."""
    nodes = ast.walk(_parsed(text_of(path, "utf-8")))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = (ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))
    return [doc for doc in docs if len(doc) > 300]


def _parsed(source: str) -> ast.Module:
    """Return a source's syntax tree, an empty one if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escape sequences in other people's code
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _shuffled(items: Sequence[T], rng: random.Random) -> list[T]:
    """Return a shuffled copy."""
    return rng.sample(items, len(items))
