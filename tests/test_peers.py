"""benchmarks/peers.py: a run with a real server, what it makes of its runs, and what it gives to the engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import wait_until
from test_layers import ROOT

from benchmarks import peers
from benchmarks.engines import Llama, LlamaTree, Peer, Reply, Wish
from benchmarks.peers import Run, measure, parse, questions, table
from minispec.config import HEADS
from minispec.load.tokenizer import load_tokenizer

FIRST, EACH = 0.15, 0.05


def test_a_run_asks_a_server_and_transformers_the_same_and_says_who_is_left_out(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = f"""peers --names transformers older-ngram llama-own --model {tiny} --older {ROOT} --kind copying --limit 2
                --new-tokens 40 --stream --over transformers --server-flags --disable-torch-compile
                --no-speculative-adaptive"""
    monkeypatch.setattr("sys.argv", words.split())
    monkeypatch.setattr(peers, "LOOK", 0)  # nothing here is a measurement
    peers.main()
    lines = capsys.readouterr().out.splitlines()
    assert "llama-own is left out: --llama-server was not given" in lines
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[-4:])
    assert head == ["engine", "tokens/s", "in all", "tokens a step", "same", "loop", "first token, ms: p50, p99",
                    "each further one", "/ transformers"]  # fmt: skip
    theirs, ours = (dict(zip(head, row, strict=True)) for row in rows)
    assert (theirs["engine"], ours["engine"]) == ("transformers", "older-ngram")
    assert theirs["tokens a step"] == "" and float(ours["tokens a step"]) > 1.2
    assert theirs["same"] == ours["same"] == "2/2" and theirs["/ transformers"] == "1.00 (1.00)"
    first, each = (float(ours[title].split(",")[0]) for title in head[6:8])
    assert 0 < each and 0 < first


def run(name: str, job: int, seconds: float, **changed: object) -> Run:
    """Return a run of 9 tokens in 4 steps."""
    return Run(name, (0, job), seconds, [Reply([*range(9)], 4)._replace(**changed)])


def test_ratios_are_taken_within_a_question_and_of_all_together() -> None:
    runs = [
        run("plain", 0, 1.0), run("ngram", 0, 0.5), run("ngram", 1, 1.0), run("plain", 1, 3.0),
        run("plain", 2, 4.0), run("ngram", 2, 3.5, ids=[1, *range(8)]), run("ngram", 3, 9.0),
    ]  # fmt: skip
    said = table(runs, ("plain", "llama-own")).splitlines()
    assert said[0] == "| engine | tokens/s | in all | tokens a step | same | loop | / plain |"
    assert said[2] == "| plain | 3.0 [2.2..9.0] | 3.4 | 2.00 | 3/3 | 0 | 1.00 (1.00) |"
    assert said[3] == "| ngram | 5.8 [1.0..18.0] | 2.6 | 2.00 | 2/4 | 0 | 2.00 (1.60) |"  # of 2, 3 and 8/7; 8 / 5
    streamed = table([run("plain", 0, 1.0, first=0.2, last=1.0)], ()).splitlines()
    assert streamed[2] == "| plain | 9.0 [9.0..9.0] | 9.0 | 2.00 | 1/1 | 0 | 200, 200 | 100, 100 |"


class Recorder(Peer):
    """An engine that notes what it is asked and answers with the prompt."""

    def __init__(self, name: str, asked: list[tuple[str, int]]) -> None:
        super().__init__(name)
        self.asked = asked

    def ask(self, prompt: list[int], wish: Wish, seed: int) -> Reply:
        """Answer with the prompt."""
        self.asked.append((self.name, prompt[0]))
        return Reply(prompt)


def test_the_next_question_is_asked_in_the_reverse_order() -> None:
    asked: list[tuple[str, int]] = []
    both, runs = [Recorder("plain", asked), Recorder("ngram", asked)], list[Run]()
    measure(both, [[[1]], [[2]]], Wish(8), 2, runs)
    there, back = [("plain", 1), ("ngram", 1)], [("ngram", 2), ("plain", 2)]
    assert asked == [*there, *back, *[(name, 1) for name, _ in there[::-1]], *[(name, 2) for name, _ in back[::-1]]]
    assert [run.job for run in runs] == [(0, 0)] * 2 + [(0, 1)] * 2 + [(1, 0)] * 2 + [(1, 1)] * 2


def test_prompts_of_a_size_have_it_and_share_no_page_and_every_job_is_full(demo_folder: Path) -> None:
    tokenizer = load_tokenizer(demo_folder)
    for size in (64, 512):
        sets = questions(parse(f"--prompt-tokens {size} --batch 3 --limit 4".split()), tokenizer)
        assert list(sets) == ["ordinary", "copying"]
        for jobs in sets.values():
            assert [[len(ids) for ids in job] for job in jobs] == [[size] * 3] * 2
            assert len({tuple(ids[:64]) for job in jobs for ids in job}) == 4


class Slow(BaseHTTPRequestHandler):
    """A stream in llama.cpp's words, whose first token takes FIRST seconds and whose next events EACH per token."""

    now, looks = 0.0, 0  # what the client's clock shows, and how often the client has looked

    def do_POST(self) -> None:
        """Stream five tokens."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["return_tokens"] and body["top_k"] == 1 and not body["cache_prompt"]
        self.send_response(200)
        self.end_headers()
        for wait, tokens in ((FIRST, [4]), (2 * EACH, [5, 6]), (2 * EACH, [7, 8])):
            Slow.now += wait
            self.event({"content": "a", "tokens": tokens, "stop": False})
        Slow.now += FIRST  # what comes after the last token is no token's time
        self.event({"content": "", "tokens": [], "stop": True, "timings": {"draft_n_accepted": 2}})

    def event(self, what: dict) -> None:
        """Send one event, and wait until the client has looked at the clock."""
        looks = Slow.looks
        self.wfile.write(f"data: {json.dumps(what)}\n\n".encode())
        wait_until(lambda: Slow.looks > looks)

    def log_message(self, *_: object) -> None:
        """Be silent."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the slow server, which moves its clients' clock."""

    def look() -> float:
        Slow.looks += 1
        return Slow.now

    monkeypatch.setattr("benchmarks.engines.time", SimpleNamespace(perf_counter=look))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_stream_is_timed_from_sending_to_its_first_and_to_its_last_token(slow: str) -> None:
    reply = Llama("llama-own", slow).ask([1], Wish(5, stream=True), 0)
    assert reply.ids == [4, 5, 6, 7, 8] and reply.steps == 2
    assert (reply.first, reply.last) == pytest.approx((FIRST, FIRST + 4 * EACH))


def test_the_head_for_llama_cpp_names_the_layers_that_it_is_given(demo_folder: Path, tmp_path: Path) -> None:
    tree = LlamaTree(tmp_path, tmp_path, tmp_path)
    copy = tree.plain_head(HEADS / "eagle3", demo_folder)
    config = json.loads((copy / "config.json").read_text())
    after = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]  # layers whose output it reads
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in after]
    assert (copy / "model.safetensors").read_bytes() == (HEADS / "eagle3" / "model.safetensors").read_bytes()
