"""How the yardstick judges, what its probe tells of this checkout, and how much there is to read."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conformance import SUBJECTS

from benchmarks.yardstick import Probe, interval, judge_equal, judge_times, serve
from benchmarks.yardstick_lines import Size, size_of, sizes

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


def test_the_interval_has_the_median_as_often_as_it_says() -> None:
    values = list(range(20))
    random.Random(0).shuffle(values)
    assert interval([float(value) for value in values]) == (5, 14), "of 20 values the sixth and the fifteenth: 95.9 %"
    assert interval([3.0, 1.0, 2.0]) == (1, 3) and interval([7.0]) == (7, 7)
    rng = random.Random(1)
    ends = [interval([rng.lognormvariate(0, 1) for _ in range(20)]) for _ in range(2000)]
    assert 0.94 < sum(low <= 1 <= high for low, high in ends) / len(ends) < 0.98


def test_differences_are_told_by_item_and_by_line() -> None:
    assert judge_equal("tokens", [[1, 2], [3, 4]], [[1, 2], [3, 4]]).passed
    finding = judge_equal("tokens", [[1, 2], [3, 4, 5]], [[1, 2], [3, 9, 5]])
    assert not finding.passed and "-[3, 4, 5]" in finding.details and "+[3, 9, 5]" in finding.details
    text = str(judge_equal("/openapi.json", "\n".join(map(str, range(99))), "other"))
    assert text.startswith("FAILS") and text.endswith("more") and text.count("\n") == 9


def test_the_probe_times_steps_and_leaves_no_request() -> None:
    scheduler, probe, subject = SUBJECTS["eagle3-tree"].build(), Probe(), SUBJECTS["eagle3-tree"]
    requests = iter(subject.requests(max_new_tokens=40))
    probe.llm = SimpleNamespace(
        scheduler=scheduler,
        tokenizer=SimpleNamespace(encode=lambda text: text),
        request=lambda ids, wish: next(requests),
    )
    with torch.inference_mode():
        probe.force("tree")
        assert probe.time(batch=2, steps=3, force="tree") > 0 and not scheduler.has_work
        assert probe.llm.scheduler.policy.forced is max


def test_an_error_in_a_checkout_is_an_answer() -> None:
    answers = io.StringIO()
    serve(io.StringIO('{"do": "load", "options": {"dtype": "float7"}}\n{"do": "equal"}\n'), answers)
    (line,) = answers.getvalue().splitlines()
    assert "float7" in json.loads(line)["error"]


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


def test_sizes_are_of_the_package_and_its_top_level(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "engine.py").write_text("x = 1\n")
    (tmp_path / "server.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "cpu" / "int8.py").write_text("z = 3\n\n\n")
    assert sizes(tmp_path) == {"package": Size(3, 6, 4, 12), "top level": Size(2, 3, 3, 9)}
