"""The README's commands are run, or parsed by whoever reads them; its step adds up; pages have the code's numbers.

The pages are those that no other test file is about.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from test_layers import ROOT
from test_llm import CONFIG
from test_memory import OPTIONS, folder_of

import bench
import minispec
from benchmarks.yardstick_lines import size_of_files
from minispec import LLM, late, policy
from minispec.attention import most_nodes, prefill_block
from minispec.config import Config
from minispec.cpu import products, spinning
from minispec.cpu.gather import FEW
from minispec.cpu.int8 import MANY_ROWS
from minispec.load.flags import config_from_args
from minispec.load.tokenizer import load_tokenizer
from minispec.load.tree_shape import CPU_SHAPE, LOOKUP_NODES
from minispec.ngram import SHARE
from minispec.serve import parse
from minispec.train.__main__ import _parser as train_parser
from minispec.tree import ancestors, depth

README = (ROOT / "README.md").read_text(encoding="utf-8")
EXTRAS = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
PROGRAMS = ("python ", "pip ", "pytest ", "curl ", "torchrun ")


def commands(page: str) -> list[list[str]]:
    """Return the words of every command in a page's sh blocks, indented lines and inline code."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    (\S.*)$", rest, re.MULTILINE) + re.findall(r"`([^`\n]+)`", rest)
    parts = [part for line in lines for part in line.split(" && ")]
    parts = [re.sub(r"^(?:[A-Z_]+=\S* )*(?:/\S+/bin/)?", "", part) for part in parts]  # variables, and where it lies
    return [shlex.split(part, comments=True) for part in parts if part.startswith(PROGRAMS)]


def flags_in_prose(page: str) -> set[str]:
    """Return the flags that inline code names without a command."""
    return {word for code in re.findall(r"`(--[^`\n]+)`", page) for word in code.split() if word.startswith("--")}


def ends(body: Mapping[str, Any]) -> bool:
    """Return whether a request is greedy and bounded: a small model may go on to the end of its context in nonsense."""
    return body.get("temperature") == 0 and body.get("max_tokens", 10**6) <= 200


def check(words: list[str]) -> None:
    """Raise where a command would not be understood: SystemExit or AssertionError."""
    program, *rest = words
    if program == "torchrun":
        rest = rest[rest.index("-m") :]
    if "--server-flags" in rest:
        config_from_args(rest[rest.index("--server-flags") + 1 :])
        rest = rest[: rest.index("--server-flags") + 1]
    if "--" in rest:
        rest = rest[: rest.index("--")]
    if program == "pip":
        extras = [extra for word in rest for extra in re.findall(r"^(?:\.|minispec)\[([\w,]+)\]$", word)]
        assert rest[0] in ("install", "download") and all(
            f"{e} = " in EXTRAS for part in extras for e in part.split(",")
        )
    elif program == "curl":
        url, body = next(w for w in rest if w.startswith("http")), json.loads(rest[rest.index("-d") + 1])
        assert url == f"http://127.0.0.1:{Config().port}/v1/chat/completions"
        assert parse.parse_chat(body, {}).stream and ends(body)
    elif program == "pytest" or rest[:2] == ["-m", "pytest"]:
        files = [word for word in rest if word.endswith(".py")]
        assert all((ROOT / file).is_file() for file in files)
    elif rest[:2] == ["-m", "minispec.server"]:
        if rest[2:] != ["--help"]:
            config_from_args(rest[2:])
    elif rest[:2] == ["-m", "minispec.train"]:
        train_parser().parse_args(rest[2:])
    elif rest[0] == "bench.py":
        bench.parser().parse_args(rest[1:])
    else:
        (name,) = [word for i, word in enumerate(rest) if rest[i - 1] == "-m"] or [rest[0]]
        source = ROOT / (name if name.endswith(".py") else name.replace(".", "/") + ".py")
        text = source.read_text()
        missing = [word for word in rest if word.startswith("--") and f'"{word}"' not in text]
        assert not missing, f"{name} has no flag {missing}"


@pytest.mark.parametrize("page", ["README.md", "docs/measured.md", "docs/adding-a-drafter.md", "docs/serving.md",
                                  "docs/scaling.md", "docs/reliability.md", "docs/cpu.md", "docs/cuda.md"])  # fmt: skip
def test_every_command_of_a_page_is_understood(page: str) -> None:
    found = commands((ROOT / page).read_text(encoding="utf-8"))
    assert found
    for words in found:
        try:
            check(words)
        except (SystemExit, AssertionError, OSError, ValueError) as error:
            pytest.fail(f"{page}: {shlex.join(words)}: {error!r}")


@pytest.mark.parametrize(
    "command",
    ["pip install -e '.[tests]'", "python -m minispec.server --speculative-algo", "python bench.py --ful --batch",
     "python -m minispec.train eagle4 --out x", "python -m benchmarks.peers --customers 8",
     "python -m benchmarks.nothing", "python -m pytest tests/test_nothing.py"],
)  # fmt: skip
def test_a_wrong_command_is_not(command: str) -> None:
    with pytest.raises((SystemExit, AssertionError, OSError, ValueError)):
        check(shlex.split(command))


def test_the_flags_named_in_sentences_exist(capsys: pytest.CaptureFixture) -> None:
    named = flags_in_prose(README)
    assert len(named) > 4
    with pytest.raises(SystemExit):
        config_from_args(["--help"])
    known = capsys.readouterr().out
    assert not [flag for flag in named if not re.search(rf"{flag}\b", known)]


def test_the_example_without_a_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```$", README, re.S | re.M) if "LLM" in block]
    tiny = partial(LLM, folder_of(tmp_path / "m", {**CONFIG, "vocab_size": 300}), **OPTIONS)
    monkeypatch.setattr(minispec, "LLM", tiny, raising=False)
    exec(compile(code, "README.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) >= 1


def test_the_example_of_a_client_asks_what_a_client_can(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```$", README, re.S | re.M) if "openai" in block]
    asked: list[dict] = []

    def create(self: object, **wish: object) -> list:
        asked.append(wish)
        return []

    monkeypatch.setattr(openai.resources.chat.completions.Completions, "create", create)
    exec(compile(code, "README.md", "exec"), {})
    assert asked[0]["stream"] and asked[0]["messages"][0]["role"] == "user"
    assert ends(asked[0])


def test_the_worked_step_is_one() -> None:
    """What is seen, rows, positions, picks, path and moves follow from tokens, parents and picks."""
    table = re.search(r"^```\n(node .*?)\n\n(emitted: .*?)\n```$", README, re.DOTALL | re.MULTILINE)
    line = re.compile(r'\s*(\d+)\s+(-?\d+)\s+"([^"]*)"\s+((?:[\d.] )+) +(\d+)\s+(\d+)\s+"([^"]*)"\s*(yes)?$')
    rows = [line.match(row).groups() for row in table[1].splitlines()[1:]]
    parents, tokens, picks = [int(row[1]) for row in rows], [row[2] for row in rows], [row[6] for row in rows]
    above = ancestors(torch.tensor([parents]))
    first = int(rows[0][4])
    for node, row in enumerate(rows):
        sees = [int(other) for other in row[3].split() if other != "."]
        assert sees == above[0, node].nonzero()[:, 0].tolist()
        assert (int(row[0]), int(row[4]), int(row[5])) == (node, first + node, first + int(depth(above)[0, node]))
    path = [0]
    while match := [n for n in range(1, len(rows)) if parents[n] == path[-1] and tokens[n] == picks[path[-1]]]:
        path += match
    assert [n for n, row in enumerate(rows) if row[7]] == path and path != list(range(len(path)))
    emitted = " ".join(f'"{picks[node]}"' for node in path)
    moves = ", ".join(f"{first + node} to {first + i}" for i, node in enumerate(path) if node != i)
    assert table[2] == (f"emitted: {emitted}; rows moved: {moves}; lens: {first} to {first + len(path)}; next root: "
                        f'"{picks[path[-1]]}"')  # fmt: skip


AROUND_THE_CORE = {"__init__.py", "config.py", "llm.py", "server.py", "explain.py", "compile.py"}


def test_the_core_has_about_as_many_lines_as_the_readme_says() -> None:
    (said,) = re.findall(r"some ([\d,]+) lines at the top of `minispec/`", README)
    core = [path for path in (ROOT / "minispec").glob("*.py") if path.name not in AROUND_THE_CORE]
    lines = size_of_files(core).lines
    assert abs(lines - int(said.replace(",", ""))) <= 0.1 * lines, f"the core has {lines:,} lines"


def test_the_readme_has_the_length_of_one_and_leads_to_every_page() -> None:
    assert 9_000 <= len(README.encode()) <= 10 * 1024
    links = set(re.findall(r"\]\(([\w./-]+)\)", README))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= links
    (torch_wanted,) = re.findall(r"pip install '(torch[^']*)' --index-url", README)
    assert f'"{torch_wanted}",' in (ROOT / "pyproject.toml").read_text()


def test_the_readme_s_figures_stand_in_the_page_of_measurements() -> None:
    measured = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    table = README.partition("\n## Measured\n")[2].partition("\n\nBelow a fifth")[0]
    rows = {name: figures for name, *figures in re.findall(r"^\| (\w[^|]*) \| ([\d.]+) \| ([\d.]+) \|$", table, re.M)}
    assert len(rows) == 5
    theirs = {"transformers' `generate`": "transformers", "plain decoding": "none", "NGRAM": "ngram",
              "EAGLE3, the default head, alone": "EAGLE3 alone", "EAGLE3 with lookups": "EAGLE3 + lookup"}  # fmt: skip
    for name, method in theirs.items():
        for kind, figure in zip(("ordinary", "copying"), rows.pop(name), strict=True):
            row = rf"^\| 1, {kind} \| {re.escape(method)} \|[^|]*\|[^|]*\| ([\d.]+) \|"
            assert float(re.search(row, measured, re.M)[1]) == float(figure), f"{name}, {kind}"
    newest = measured.partition("### Beside llama.cpp, by server")[2]
    (served,) = re.findall(r"over HTTP: (.*?)\. Eight", README)
    quoted = re.findall(r"(EAGLE3 alone|(?:EAGLE3 )?with lookups|llama\.cpp \w+).*? ([\d.]+)", served)
    for name, figure in quoted:
        row = rf"^\| {'EAGLE3 ' * name.startswith('with')}{re.escape(name)} \|(?:[^|]*\|){{4}} ([\d.]+) \|"
        assert re.search(row, newest, re.M)[1] == figure, name
    assert len(quoted) == 4


def test_tools_need_a_template_on_the_default_model_and_the_readme_s_has_a_place_for_them(demo_folder: Path) -> None:
    (template,) = re.findall(r"^\| tools with the default model \| `--chat-template (\w+)` \|$", README, re.M)
    own, named = load_tokenizer(demo_folder).chat, load_tokenizer(demo_folder, template).chat
    assert own.tool_template is None and named.tool_template is not None


def test_the_glossary_has_thirty_terms_of_one_sentence_each() -> None:
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.M)[1:]
    assert len(rows) == 30 and len({term for term, _, _ in rows}) == 30
    assert all(sentence.endswith(".") and ". " not in sentence for _, sentence, _ in rows)
    names = {name for _, sentence, where in rows for name in re.findall(r"\b(\w+\.py)\b", sentence + where)}
    assert not [name for name in names if not (ROOT / "minispec" / name).is_file()]
    assert f"at most {late.KEPT_ROWS} rows a slot" in page


def number(page: str, pattern: str) -> float:
    """Return the one number that a page has in this place."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    (found,) = set(re.findall(pattern, text))
    words = {"half": 0.5, "twice": 2, "four": 4, "five": 5, "eight": 8, "ten": 10, "hundredth": 0.01}
    return words.get(found) or float(found)


def test_pages_have_the_numbers_of_the_code() -> None:
    steps, topk, nodes = CPU_SHAPE
    assert f"For the heads that ship these are {steps}/{topk}/{nodes}" in (
        ROOT / "docs/cpu.md").read_text(encoding="utf-8")  # fmt: skip
    assert number("cpu", r"looked-up trees have (\d+) nodes") == LOOKUP_NODES
    assert number("architecture", r"The larger trees have at least (\d+) nodes") == LOOKUP_NODES
    assert number("cpu", r"one request has up to (\d+) nodes") == FEW
    assert number("cpu", r"below (\d+) rows it is PyTorch's kernel") == MANY_ROWS
    assert number("cpu", r"tiles of (\d+) queries") == products.TILE
    assert number("cuda", r"Trees have at most (\d+) nodes") == most_nodes(torch.device("cuda"))
    assert number("cuda", r"query blocks of (\d+) tokens") == prefill_block(torch.device("cuda"))
    assert number("architecture", r"(\d+) rows a slot at most") == late.KEPT_ROWS
    assert number("architecture", r"must gain (\d+) %") == round(100 * (policy.GAIN - 1), 6)
    assert number("architecture", r"(\d+) ten-thousandths of the way back") == 10_000 * policy.FORGET
    assert number("architecture", r"Lookups take about a (\w+) of the time") == SHARE
    assert number("serving", r"From (\w+) a core on its threads sleep") == spinning.BUSY
    assert number("serving", r"after (\w+) quiet seconds they spin") == spinning.CALM * spinning.LOOK
    assert number("serving", r"the server looks (\w+) times a second") == 1 / spinning.LOOK
