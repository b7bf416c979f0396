"""What benchmarks/peers.py makes of its runs, and what it gives to the engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench
from benchmarks import peers
from benchmarks.engines import LlamaTree, Reply
from benchmarks.peers import Part, Run, accept_length, looping, measure, rates, ratio, sections, texts
from minispec.config import HEADS
from minispec.load.tokenizer import load_tokenizer

PART = Part("Two prompts", ("none", "ngram"), [[[1]], [[2]]], 8)


def run(name: str, round_: int, job: int, seconds: float, **changed: object) -> Run:
    """Return a run of 8 tokens in 4 steps."""
    return Run(name, round_, job, 8, seconds, 4, False)._replace(**changed)


RUNS = [
    run("none", 0, 0, 1.0), run("ngram", 0, 0, 0.5), run("ngram", 0, 1, 1.5), run("none", 0, 1, 3.0),
    run("none", 1, 0, 4.0), run("ngram", 1, 0, 1.0), run("ngram", 1, 1, 1.0), run("none", 1, 1, 4.0),
    run("none", 2, 0, 0.5), run("ngram", 2, 0, 0.2), run("ngram", 2, 1, 0.2, loops=True), run("none", 2, 1, 0.5),
]  # fmt: skip


def test_ratios_are_taken_within_a_round() -> None:
    assert rates(RUNS, "none") == [4.0, 2.0, 16.0]
    assert rates(RUNS, "ngram") == [8.0, 8.0, 40.0]
    assert ratio(RUNS, "ngram", "none") == pytest.approx(2.5)  # of 2, 4, 2.5; the medians' ratio were 8 / 4


def test_prompts_with_a_looping_reply_are_left_out_for_everyone() -> None:
    assert looping(RUNS) == {1}
    assert rates(RUNS, "none", {1}) == [8.0, 2.0, 16.0]
    whole, rest = sections(PART, RUNS)
    assert "without the 1 of 2 that loop" in rest
    assert "| minispec NGRAM | 16.0 | 2.50 | 1.75 |" in rest
    assert "| minispec NGRAM | 8.0 | 2.50 | 1.75 |" in whole


def test_the_accept_length_leaves_out_the_token_that_prefill_gives() -> None:
    assert accept_length(RUNS, "ngram") == pytest.approx(7 / 4)
    assert accept_length([one._replace(steps=None) for one in RUNS], "ngram") is None


class Recorder:
    """An engine that notes what it is asked and answers with the prompt."""

    def __init__(self, name: str, asked: list[tuple[str, int]]) -> None:
        self.name, self.asked = name, asked

    def ask(self, prompt: list[int], new_tokens: int, ignore_eos: bool = False) -> Reply:
        """Answer with the prompt."""
        self.asked.append((self.name, prompt[0]))
        return Reply(prompt, 1)

    def clear(self) -> None:
        """Begin a round: what was asked to warm up is forgotten."""
        self.asked.clear()


def test_the_next_prompt_is_asked_in_the_reverse_order() -> None:
    asked: list[tuple[str, int]] = []
    measure(PART, [Recorder("none", asked), Recorder("ngram", asked)], 1)
    assert asked == [("none", 1), ("ngram", 1), ("ngram", 2), ("none", 2)]


def test_prompts_of_a_size_have_it_and_share_no_page(demo_folder: Path) -> None:
    tokenizer = load_tokenizer(demo_folder)
    others = [text for prompts in bench.read_prompts(bench.PROMPTS, None).values() for text in prompts]
    for size in peers.PREFILLS:
        made = texts(others, tokenizer, size, 4)
        assert [len(ids) for ids in made] == [size] * 4
        assert len({tuple(ids[:64]) for ids in made}) == 4


def test_the_head_for_llama_cpp_names_the_layers_that_it_is_given(demo_folder: Path, tmp_path: Path) -> None:
    tree = LlamaTree(tmp_path, tmp_path, tmp_path)
    copy = tree.plain_head(HEADS / "eagle3", demo_folder)
    config = json.loads((copy / "config.json").read_text())
    after = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]  # layers whose output it reads
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in after]
    assert (copy / "model.safetensors").read_bytes() == (HEADS / "eagle3" / "model.safetensors").read_bytes()
