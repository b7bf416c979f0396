"""The drafters of docs/adding-a-drafter.md, word for word as the page has them, pass the checks for every drafter."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from conformance import (
    CHECKS,
    Subject,
    assert_exact,
    greedy_alone_and_in_a_batch_of_eight,
    own,
    texts_that_repeat_are_drafted_for,
)
from conftest import slow_unless
from exactness import VOCAB, Oracle, build, mixed_requests, request, run, tiny_model, truth_of
from test_layers import ROOT, missing_files
from test_llm import CONFIG
from test_memory import OPTIONS, folder_of

import minispec
from minispec import LLM
from minispec.config import FLAGS, Config
from minispec.drafter import Draft, HostDrafter
from minispec.load.drafters import make_drafter
from minispec.load.flags import config_from_args
from minispec.load.tokenizer import byte_tokenizer
from minispec.serve.info import stats_of
from minispec.tree import PADDING

PAGE = (ROOT / "docs" / "adding-a-drafter.md").read_text(encoding="utf-8")
EXAMPLE, *CODE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
NAMES = ("pairs:Pairs", "prompt_lookup:PromptLookup", "bigram:Bigram")
CHAIN, TREE, DEVICE = NAMES
QUICK = (greedy_alone_and_in_a_batch_of_eight, texts_that_repeat_are_drafted_for)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path with the page's drafters, each in the file that its name on a command line says."""
    for name, code in zip(NAMES, CODE, strict=True):
        (tmp_path / f"{name.partition(':')[0]}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "check"), slow_unless(
    [(name, check) for name in NAMES for check in CHECKS if name != CHAIN or check in QUICK],
    lambda name, check: name != DEVICE or check in QUICK))  # fmt: skip
def test_the_drafters_of_the_page_pass(name: str, check: Callable[[Subject], None]) -> None:
    check(own(name))


OTHERS = ("ngram_", "dflash_", "dspark_", "draft_window_size")  # a note says that they belong to other drafters
ENGINES = {"algorithm", "adaptive", "adaptive_config", "accept_threshold_single", "accept_threshold_acc",
           "draft_model_revision"}  # fmt: skip
VALUES = {"draft_load_format": "pt", "draft_model_quantization": "fp8", "lookup": True, "draft_model_path": "x",
          "token_map": "x"}  # fmt: skip


def test_the_drafters_of_the_page_refuse_every_flag_that_they_do_not_read(folder: Path) -> None:
    names = [f.name.removeprefix("speculative_") for f in FLAGS if f.name.startswith("speculative_")]
    unread = [name for name in names if not name.startswith(OTHERS) and name not in ENGINES]
    assert len(unread) > 6
    for name, flag in itertools.product(NAMES, unread):
        given = {f"speculative_{flag}": VALUES.get(flag, 8)}
        config = Config(model_path="x", speculative_algorithm=name, **given)
        if (name, flag) == (TREE, "num_draft_tokens"):
            assert make_drafter(config, tiny_model(), folder, byte_tokenizer(VOCAB)).nodes == 8
            continue
        with pytest.raises(ValueError, match=f"--speculative-{flag.replace('_', '-')}: .* does not read it"):
            make_drafter(config, tiny_model(), folder, byte_tokenizer(VOCAB))


def test_the_page_names_every_method_of_a_drafter_on_the_host() -> None:
    methods = {name for name in vars(HostDrafter) if not name.startswith("_")}
    part = PAGE.partition("## What each part answers to")[2].partition("\n## ")[0]
    assert methods > {"draft", "observe", "hint"} and methods <= set(re.findall(r"`(\w+)[(`]", part))


def test_the_chain_is_what_followed_the_last_two_tokens() -> None:
    assert len(CODE[0].strip().splitlines()) <= 32
    drafter = own(CHAIN).drafter(tiny_model()).inner
    drafter.observe(1, [7, 8, 1, 2, 3, 7, 8, 4, 5, 6, 9, 9])
    drafter.observe(1, [7, 8])
    (draft,) = drafter.draft([1])
    assert (draft.tokens, draft.parents, draft.match_length) == ([8, 4, 5, 6, 9], [-1, 0, 1, 2, 3], 2)
    drafter.release(1)
    drafter.observe(1, [7, 8])
    (draft,) = drafter.draft([1])
    assert (draft.tokens, draft.match_length) == ([8], 0)


def test_the_example_without_a_server_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tiny = partial(LLM, folder_of(folder / "m", CONFIG), **OPTIONS)
    monkeypatch.setattr(minispec, "LLM", tiny, raising=False)
    exec(compile(EXAMPLE, "the page", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) >= 1


def test_tokens_are_observed_before_every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[int, list[int]] = {}
    fresh: set[int] = set()

    class Listener(Oracle):
        def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
            super().observe(slot, tokens, again)
            heard.setdefault(slot, []).extend(tokens)
            fresh.add(slot)

        def draft(self, slots: Sequence[int]) -> list[Draft]:
            assert set(slots) <= fresh, "between two trees of a slot tokens are observed"
            assert [texts[slot] for slot in slots] == [heard[slot] for slot in slots], "up to the root"
            fresh.difference_update(slots)
            return super().draft(slots)

        def release(self, slot: int) -> None:
            super().release(slot)
            heard.pop(slot, None)

    scheduler = build(tiny_model(), Listener(truth_of(tiny_model())), pages=15)
    requests = mixed_requests(max_new_tokens=24)
    step = scheduler.step
    texts: dict[int, list[int]] = {}

    def watched() -> list:
        texts.clear()
        texts.update({r.slot: r.ids for r in requests if r.slot})
        return step()

    scheduler.step = watched
    run(scheduler, requests)
    assert scheduler.metrics.retractions > 0 and stats_of(scheduler)["tree_steps"] > 5


def test_it_drafts_what_followed_before() -> None:
    drafter = own(TREE).drafter(tiny_model()).inner
    drafter.observe(1, [1, 2, 3, 4, 5, 9, 2, 3, 7, 8])
    drafter.observe(1, [2, 3])
    (draft,) = drafter.draft([1])
    # After 2 3 came 7 8 2 3 lately, and 4 5 9 2 3 7 before; 3 alone adds nothing to them.
    assert draft.tokens == [3, 7, 8, 2, 3, 4, 5, 9, 2, 3, 7] and draft.match_length == 2
    assert draft.parents == [-1, 0, 1, 2, 3, 0, 5, 6, 7, 8, 9]
    drafter.release(1)
    drafter.observe(1, [2, 3])
    assert drafter.draft([1])[0].tokens == [3]


def test_its_trees_are_trees_and_every_branch_stood_in_the_text() -> None:
    rng, drafter, text = random.Random(0), own(TREE).drafter(tiny_model()).inner, []
    for _ in range(300):
        new = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        drafter.observe(5, new)
        text += new
        (draft,) = drafter.draft([5])
        assert len(draft.tokens) <= drafter.nodes and draft.tokens[0] == text[-1]
        assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft.tokens)
        paths = [[text[-1]]]
        for token, parent in zip(draft.tokens[1:], draft.parents[1:], strict=True):
            paths.append([*paths[parent], token])
            assert 0 <= parent < len(paths) - 1 and PADDING < token < VOCAB and len(paths[-1]) <= drafter.depth + 1
            assert any(text[i : i + len(paths[-1])] == paths[-1] for i in range(len(text)))


def test_the_page_names_files_that_exist_and_the_flags_it_shows_parse() -> None:
    assert set(missing_files(PAGE)) == {"prompt_lookup.py", "pairs.py", "bigram.py"}
    (line,) = re.findall(r"^python -m minispec.server (.*)$", PAGE, re.MULTILINE)
    config = config_from_args(line.split())
    assert config.algorithm == TREE and config.draft_tokens == 8


OLDER = """
from minispec.drafter import Draft, HostDrafter
class Older(HostDrafter):
    name, nodes, depth = "older", 4, 3
    def __init__(self, config, *target): self.texts = {}
    def commit(self, place, tokens, again=False): self.texts.setdefault(place, []).extend(tokens)
    def propose(self, places): return [self.repeated(self.texts[place]) for place in places]
    def repeated(self, text): return Draft([text[-1], *text[-4:-1]], [-1, 0, 1, 2][:len(text[-4:])], 3)
    def release(self, place): self.texts.pop(place, None)
class Heir(Older):
    name = "heir"
"""


def test_a_drafter_with_the_former_names_of_its_methods_runs_and_one_line_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "older_drafter.py").write_text(OLDER)
    for name in ("Older", "Heir"):
        subject = own(f"older_drafter:{name}")
        scheduler = subject.build()
        requests = [request(f"r{i}", [i, 5, 9, i, 5, 9], max_new_tokens=20) for i in range(3)]
        run(scheduler, requests)
        assert_exact(subject, requests)
        assert scheduler.metrics.verified.steps["host"] > 10 and not scheduler.engine.drafter.inner.texts
    (line,) = [record.getMessage() for record in caplog.records if "former names" in record.getMessage()]
    assert "Older" in line and "propose is draft now, commit is observe now" in line


BROKEN = """
from minispec.drafter import HostDrafter
class Stranger:
    pass
class Half(HostDrafter):
    def __init__(self, config, *target): pass
    def draft(self, slots): return []
class Nameless(Half):
    nodes, depth = 4, 3
    observe = release = print
class Wide(Nameless):
    name, nodes = "wide", 129
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere_at_all:Drafter", "there is no module nowhere_at_all on the Python path"),
        ("minispec.nowhere:Drafter", "there is no module minispec.nowhere on the Python path"),
        ("broken_drafter:Drafter", "broken_drafter has no class Drafter; it has Stranger, Half, Nameless, Wide"),
        ("broken_drafter:Stranger", "Stranger must derive from HostDrafter or Drafter of minispec/drafter.py"),
        ("broken_drafter:Half", "Half lacks the methods observe, release; see"),
        ("broken_drafter:Nameless", "Nameless must set name; see"),
        ("broken_drafter:Wide", r"nodes must be in \[1, 128\] and depth in \[0, nodes - 1\], got 129 and 3"),
    ],
)
def test_a_wrong_name_or_class_is_one_line(name: str, message: str, folder: Path) -> None:
    (folder / "broken_drafter.py").write_text(BROKEN)
    config = Config(model_path="x", speculative_algorithm=name)
    with pytest.raises(ValueError, match=message) as error:
        make_drafter(config, tiny_model(), folder, byte_tokenizer(VOCAB))
    assert "\n" not in str(error.value) and f"--speculative-algorithm {name}" in str(error.value)


def test_an_error_inside_the_file_is_its_own(folder: Path) -> None:
    (folder / "imports_what_is_not.py").write_text("import no_such_library")
    config = Config(model_path="x", speculative_algorithm="imports_what_is_not:Drafter")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        make_drafter(config, tiny_model(), folder, byte_tokenizer(VOCAB))
