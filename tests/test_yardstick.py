"""How the yardstick judges: what fails, what passes and is listed, and how much there is to read."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance import SUBJECTS
from exactness import run

from benchmarks.yardstick import (
    Finding,
    Side,
    State,
    as_far_as_both,
    explained,
    in_turn,
    interval,
    judge_equal,
    judge_multiset,
    judge_operations,
    judge_start,
    judge_times,
    options_of,
    read_orders,
    settings,
)
from benchmarks.yardstick_lines import Size, size_of, sizes
from benchmarks.yardstick_probe import Checkout, Counted, Recorded, serve
from minispec.engine import Engine

QUIET = [0.99 + 0.001 * i for i in range(20)]  # a control around 1


@pytest.mark.parametrize(
    ("ratio", "control", "passed"),
    [
        (1.0, QUIET, True),
        (1.015, QUIET, True),  # beyond the control, and within what passes anyway
        (1.05, QUIET, False),
        (1.05, [value + 0.1 for value in QUIET], True),  # the machine differs as much from itself
        (0.5, QUIET, True),
    ],
)
def test_a_setting_fails_beyond_both_the_bound_and_the_control(
    ratio: float, control: list[float], passed: bool
) -> None:
    finding = judge_times("time", [ratio] * 11 + [ratio * 2] * 9, control)
    assert finding.passed == passed
    assert f"{ratio:.3f}" in finding.said, "the median, which no nine outliers move"


def test_the_interval_is_the_medians_and_not_the_values() -> None:
    """Of 20 values the sixth and the fifteenth: 95.9 %."""
    values = list(range(20))
    random.Random(0).shuffle(values)
    assert interval([float(value) for value in values]) == (5, 14)
    assert interval([3.0, 1.0, 2.0]) == (1, 3)
    assert interval([7.0]) == (7, 7)


def test_the_interval_has_the_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    ends = [interval([rng.lognormvariate(0, 1) for _ in range(20)]) for _ in range(2000)]
    share = sum(low <= 1 <= high for low, high in ends) / len(ends)
    assert 0.94 < share < 0.98


def test_tokens_that_differ_are_told_by_prompt_and_position() -> None:
    assert judge_equal("tokens", [[1, 2], [3, 4]], [[1, 2], [3, 4]]).passed
    finding = judge_equal("tokens", [[1, 2], [3, 4, 5]], [[1, 2], [3, 9, 5]])
    assert not finding.passed
    assert [*finding.details] == ["1: from position 1 on, A [4, 5], B [9, 5]"]


def test_shapes_are_a_multiset() -> None:
    one, two = ("decode", 1, 1, False), ("decode", 1, 6, True)
    assert judge_multiset("shapes", [one, two, one], [[*two], [*one], [*one]]).passed, "in whatever order"
    finding = judge_multiset("shapes", [one, one], [one, two])
    assert not finding.passed
    assert len(finding.details) == 2
    assert not judge_multiset("shapes", [one, one], [one]).passed, "how often counts"


def test_fewer_operations_pass_and_are_listed() -> None:
    assert judge_operations("operations", {"cat": 2}, {"cat": 2}) == Finding("operations", True, "equal, 2")
    fewer = judge_operations("operations", {"cat": 3, "add": 1}, {"cat": 1, "mul": 1})
    assert fewer.passed
    assert [*fewer.details] == ["add: 1 -> 0", "cat: 3 -> 1", "mul: 0 -> 1"]
    assert not judge_operations("operations", {"cat": 2}, {"cat": 2, "add": 1}).passed
    assert not judge_operations("operations", {"cat": 2}, None).passed, "a kind of step that went is no fewer"


def test_starts_are_judged_by_the_least_and_the_range_of_the_first() -> None:
    assert judge_start("start", [10.0, 12.0], [11.5, 20.0]).passed
    assert not judge_start("start", [10.0, 10.5], [11.5, 20.0]).passed


def test_ordered_differences_are_listed_with_their_reason() -> None:
    differs = judge_equal("/openapi.json", "version 1", "version 2")
    slow = judge_times("time, NONE", [1.5] * 20, QUIET)
    same = judge_equal("tokens", [1], [1])
    orders = {"/openapi*": "the version is 0.2.0", "tokens": "none is expected to differ"}
    told = explained([differs, slow, same], orders)
    assert [finding.passed for finding in told] == [True, False, True, True]
    text = "\n".join(line for finding in told for line in finding.lines())
    assert "ordered: the version is 0.2.0" in text
    assert "-version 1" in text
    assert "nothing differs; it was to be: none is expected to differ" in text


def test_orders_name_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "orders"
    file.write_text("# what this issue orders\n\ntables of flags.md = log-probabilities are in this version\n")
    assert read_orders(["a=b=c"], [file]) == {
        "a": "b=c", "tables of flags.md": "log-probabilities are in this version"}  # fmt: skip
    with pytest.raises(ValueError, match="NAME=REASON, got 'tokens'"):
        read_orders(["tokens"], [])


def test_a_run_that_was_broken_off_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    assert State(path).once("tokens", lambda: [(1, 2)]) == [[1, 2]]
    with path.open("a", encoding="utf-8") as file:
        file.write('["times", {"rat')
    again = State(path)
    assert again.once("tokens", lambda: pytest.fail("it is known")) == [[1, 2]]
    assert again.once("times", lambda: 3) == 3
    assert State(path).known == {"tokens": [[1, 2]], "times": 3}


def test_timed_tokens_are_compared_as_far_as_both_go() -> None:
    assert as_far_as_both([[1, 2, 3], [4]], [[1, 2], [5, 6]]) == ([[1, 2], [4]], [[1, 2], [5]])
    with pytest.raises(ValueError, match="no token"):
        as_far_as_both([[1]], [[]])


def test_settings_of_one_llm_stand_side_by_side() -> None:
    whole, quick = settings(False, True), settings(True, False)
    keys = [json.dumps(setting.options, sort_keys=True) for setting in whole]
    assert sum(a != b for a, b in zip(keys, keys[1:], strict=False)) == len(set(keys)) - 1
    assert len({setting.name for setting in whole}) == len(whole)
    few = {f"{kind}, batch {batch}" for kind in ("EAGLE3 bfloat16", "NGRAM bfloat16 plain", "NGRAM bfloat16")
           for batch in (1, 8)}  # fmt: skip
    assert {setting.name for setting in quick} == few
    assert {s.name for s in quick if s.force == "plain"} == {name for name in few if "plain" in name}
    emulated = {name.replace("bfloat16", "float32") for name in few}
    assert {setting.name for setting in settings(True, False, bfloat16=False)} == emulated


SOURCE = '''"""A module.

With a docstring of lines.
"""

# a comment


def double(x: int) -> int:
    """Return twice x."""
    text = "no docstring"
    if x: return x + x  # two statements in a line
    return 0
'''


def test_joined_lines_have_fewer_lines_and_no_fewer_statements() -> None:
    size = size_of(SOURCE)
    assert size == Size(1, 13, 5, 22)  # def, text, if, return, return; 10, 3, 7 and 2 tokens
    joined = SOURCE.replace("\n    return 0", "; return 0")
    longer = SOURCE.replace("if x: return", "if x:\n        return")
    assert size_of(longer) == size._replace(lines=14)
    assert size_of(joined.replace("  # two statements in a line", "")).statements == 5
    assert size_of(SOURCE.replace("# a comment", "# a comment\n# of two lines")) == size._replace(lines=14)


def test_sizes_are_of_the_package_its_top_level_and_the_files_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "engine.py").write_text("x = 1\n")
    (tmp_path / "server.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "cpu" / "int8.py").write_text("z = 3\n\n\n")
    found = sizes(tmp_path, ["cpu/int8.py", "engine.py"])
    assert found == {"package": Size(3, 6, 4, 12), "top level": Size(2, 3, 3, 9),
                     "default decode step": Size(2, 4, 2, 6)}  # fmt: skip


# ---- the probe -------------------------------------------------------------------------------------------------------


def adapted(name: str, **options: Any) -> Checkout:
    """Return the adapter of this checkout around a tiny engine."""
    adapter = Checkout.__new__(Checkout)
    adapter.scheduler = SUBJECTS[name].build(**options)
    adapter.engine = adapter.scheduler.engine
    return adapter


def operations(adapter: Checkout) -> dict[str, dict[str, int]]:
    """Return the operations of each kind of step."""
    adapter.force("cycle")
    counted = Counted()
    with adapter.counting(counted), torch.inference_mode():
        run(adapter.scheduler, SUBJECTS["eagle3-tree"].requests(max_new_tokens=12)[:2])
    return {label: dict(of) for label, of in counted.last.items()}


def test_operations_are_counted_by_kind_of_step_and_one_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = operations(adapted("eagle3-tree"))
    assert {"plain", "tree", "prefill", "catch-up"} <= set(before)
    assert before == operations(adapted("eagle3-tree")), "the same twice"
    assert sum(before["tree"].values()) > sum(before["plain"].values()) > 50
    clear = Engine._clear_padding
    monkeypatch.setattr(Engine, "_clear_padding", lambda engine: (clear(engine), engine.lens[:1].zero_()))
    after = operations(adapted("eagle3-tree"))
    for step in ("plain", "tree", "prefill"):
        finding = judge_operations(step, before[step], after[step])
        assert not finding.passed
        assert any("zero_" in line for line in finding.details)
    assert judge_operations("catch-up", before["catch-up"], after["catch-up"]).said.startswith("equal")


def test_a_text_tree_is_a_host_tree() -> None:
    found = operations(adapted("ngram"))
    assert {"plain", "host tree", "prefill"} <= set(found)
    assert not {"tree", "catch-up"} & set(found), "nobody drafts on the device"


def test_a_recorded_run_is_replayed_on_the_tensors_of_the_first_time() -> None:
    given, total = torch.arange(4.0), torch.zeros(4)
    with Recorded() as recorded:
        doubled = given * 2
        total.add_(doubled)
    given.fill_(5)
    recorded.replay()
    assert doubled.tolist() == [10.0] * 4
    assert total.tolist() == [10.0, 12.0, 14.0, 16.0], "what was written in place is written again"


def test_shapes_are_told_with_batch_nodes_and_who_drafts() -> None:
    shapes = adapted("eagle3-tree", running=2).shapes()
    assert ("decode step", 2, 1, False) in shapes
    assert any(kind == "decode step" and drafts for kind, *_, drafts in shapes)
    assert any(kind == "graph" and name.startswith("target, ") for kind, name, *_ in shapes)


def test_an_error_in_a_checkout_is_an_answer() -> None:
    answers = io.StringIO()
    serve(io.StringIO('{"do": "load", "options": {"dtype": "float7"}}\n{"do": "hello"}\n'), answers)
    (line,) = answers.getvalue().splitlines()
    assert "float7" in json.loads(line)["error"]


def test_who_finds_all_in_a_cache_loads_at_once_and_the_others_wait_for_who_fills_it(tmp_path: Path) -> None:
    options = options_of("NONE")
    a, b, c = (SimpleNamespace(side=object.__new__(Side)) for _ in range(3))
    for child, name in ((a, "one"), (b, "two"), (c, "one")):
        child.side.cache = tmp_path / name
        child.side.cache.mkdir(exist_ok=True)
    assert in_turn([a, b, c], options) == [[a, b], [c]]
    assert in_turn([a, c], options) == [[a], [c]]
    a.side.compiled(options).touch()
    assert in_turn([a, b, c], options) == [[a, b, c]] and in_turn([a, b, c], options_of("NGRAM")) == [[a, b], [c]]
