"""Exactness of the served path on a real model: every configuration must give transformers' own greedy tokens.

`python -m benchmarks.parity --dataset FILE.jsonl` (MT-bench's format) starts the server once per configuration, in
float32: compiled, as it is launched by default, and eagerly; with and without a drafter; with small chunks and a pool
so small that requests are retracted. It sends the questions one at a time and eight at a time, then second turns, which
meet a warm prefix cache, and questions with a shared beginning. Sampled requests with seeds must give the same tokens
everywhere. It prints one line per run and exits with 1 if any token differs. The tests run the same functions on fewer
prompts.

With `--deterministic` the servers have `--enable-deterministic-inference` and the default's dtype, bfloat16 where the
processor has it. The texts of all of them are compared with each other: those of the first server, alone, are the
truth. Each server answers the questions alone, in batches in random company and from the prefix cache, and 20 times the
same question in as many batches, of which there must be one unique text.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks import start

Ids = list[int]
GREEDY = {"temperature": 0.0}
# Every method that ships, as a chain and as a tree.
DRAFTERS = [
    "NONE", "NGRAM:1", "NGRAM", "EAGLE3:3/1/4", "EAGLE3", "EAGLE:3/1/4", "EAGLE", "NEXTN:3/1/4", "NEXTN",
    "STANDALONE", "STANDALONE:2/3/6",
]  # fmt: skip
SAMPLED = {
    "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1
}  # fmt: skip
PREAMBLE = (
    "You are the helpful clerk of a small town library. Visitors ask you about everything under the sun. You know "
    "that the library opens at nine, that the reading room is on the first floor, that the children's corner has a "
    "blue carpet, that the catalogue is kept by Mrs. Lind, and that returned books go into the wooden box beside the "
    "door. You answer every question as well as you can, in plain words, and you never send anybody away without an "
    "answer. The next visitor steps up to the desk and asks you this, word for word: "
)  # it has more than 64 tokens, so that prompts which begin with it share a page


def serve(*flags: str) -> AbstractContextManager[str]:
    """Start the server on a free port with these flags, give its URL when it is ready, and stop it."""
    return start.ready([*start.COMMAND, "--wait-until-compiled", *flags])


def post(url: str, body: dict[str, Any]) -> Any:
    """POST JSON and return the answer's JSON; raises RuntimeError with the body of an error."""
    with start.post(url, body) as answer:
        return json.load(answer)


def stats(url: str) -> dict[str, Any]:
    """Return internal_states[0] of /server_info."""
    with start.LOCAL.open(url + "/server_info", timeout=60) as answer:
        return json.load(answer)["internal_states"][0]


def generate(
    url: str, prompts: Sequence[Ids], params: Sequence[dict[str, Any]], at_once: int, **more: Any
) -> list[dict[str, Any]]:
    """Send prompts to /generate, at most `at_once` under way; returns the answers in order. more: further fields."""
    one = lambda job: post(url + "/generate", {"input_ids": job[0], "sampling_params": job[1], **more})  # noqa: E731
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, zip(prompts, params, strict=True)))


class Reference:
    """transformers' own greedy generation, one prompt at a time, in float32."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        import torch
        import transformers

        from benchmarks.throughput import Transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        self.inner = Transformers("reference", model, [1])

    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> list[Ids]:
        """Return the new tokens after each prompt, the end-of-sequence token included."""
        return [list(ids) for ids in self.inner.run(prompts, 1, new_tokens, 0.0).outputs]


class Questions:
    """The prompts of a parity run with their reference outputs: first turns, second turns, shared beginnings."""

    def __init__(self, turns: Sequence[Sequence[str]], folder: Path, new_tokens: int, shared: int = 8) -> None:
        from minispec.load.tokenizer import load_tokenizer

        tokenizer, reference = load_tokenizer(folder), Reference(folder)
        ask = lambda *texts: tokenizer.encode_chat(  # noqa: E731
            [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        )
        self.new_tokens = new_tokens
        self.first = [ask(turn[0]) for turn in turns]
        self.first_truth = reference.generate(self.first, new_tokens)
        answers = [tokenizer.decode(ids) for ids in self.first_truth]
        pairs = [(t[0], a, t[1]) for t, a in zip(turns, answers, strict=True) if len(t) > 1]
        self.second = [ask(*pair) for pair in pairs]
        self.second_truth = reference.generate(self.second, new_tokens)
        self.shared = [ask(PREAMBLE + turn[0]) for turn in turns[:shared]]
        assert all(len(ids) >= 128 and ids[:64] == self.shared[0][:64] for ids in self.shared)
        self.shared_truth = reference.generate(self.shared, new_tokens)


def same(answers: Sequence[dict[str, Any]], truth: Sequence[Ids]) -> tuple[int, int]:
    """Return (how many answers equal the truth, how many there are)."""
    return sum(a["output_ids"] == ids for a, ids in zip(answers, truth, strict=True)), len(truth)


def check(url: str, questions: Questions, expect_retraction: bool = False) -> Iterator[tuple[str, bool, str]]:
    """Run all kinds of traffic against a server; yields (what, whether it was exact, remarks)."""
    params = [{**GREEDY, "max_new_tokens": questions.new_tokens}]

    def ask(prompts: Sequence[Ids], truth: Sequence[Ids], at_once: int) -> tuple[bool, list[dict[str, Any]], str]:
        answers = generate(url, prompts, params * len(prompts), at_once)
        equal, count = same(answers, truth)
        return equal == count > 0, answers, f"{equal}/{count} equal"

    for at_once in (1, 8):
        flush(url)
        exact, answers, remark = ask(questions.first, questions.first_truth, at_once)
        yield f"first turns, {at_once} at once", exact, remark
    exact, answers, remark = ask(questions.second, questions.second_truth, 8)
    cached = sum(a["meta_info"]["cached_tokens"] for a in answers)
    yield "second turns, warm cache", exact and cached > 0, f"{remark}, {cached} cached tokens"
    exact, _, remark = ask(questions.shared[:1], questions.shared_truth[:1], 1)
    more, answers, remark = ask(questions.shared[1:], questions.shared_truth[1:], 8)
    cached = sum(a["meta_info"]["cached_tokens"] for a in answers)
    yield "shared beginnings", exact and more and cached > 0, f"{remark}, {cached} cached tokens"
    if expect_retraction:
        # Outputs so long that the pool cannot hold all of them; alone each of them fits.
        prompts = questions.first[:8]
        long = [{**GREEDY, "max_new_tokens": 2 * questions.new_tokens + 32, "ignore_eos": True}] * len(prompts)
        together, alone = (generate(url, prompts, long, at_once) for at_once in (8, 1))
        retractions = sum(a["meta_info"]["total_retractions"] for a in together)
        equal, count = same(together, [a["output_ids"] for a in alone])
        remark = f"{equal}/{count} as alone, {retractions} retractions"
        yield "long outputs under retraction", equal == count and retractions > 0, remark
    state = stats(url)
    whole = state["kv_pages_free"] + state["kv_pages_cached"] + state["kv_pages_owned"] == state["kv_pages_total"]
    idle = state["kv_pages_owned"] == 0
    remark = f"accept length {state['avg_spec_accept_length']:.2f}, {state['tree_steps']} tree steps"
    yield "pages in order when idle", whole and idle, remark


def flush(url: str) -> None:
    """Empty the prefix cache; the last answer may arrive a moment before its request is gone."""
    for _ in range(50):
        try:
            call = urllib.request.Request(url + "/flush_cache", b"", method="POST")
            start.LOCAL.open(call, timeout=60).close()
            return
        except urllib.error.HTTPError:
            time.sleep(0.1)
    raise RuntimeError("the server does not become idle")


def sampled(url: str, questions: Questions, at_once: int, new_tokens: int = 40, **more: Any) -> list[Ids]:
    """Return seeded samples of the first turns; the seed is the question's number. more: further parameters."""
    same = {**SAMPLED, "max_new_tokens": new_tokens, **more}
    params = [{**same, "sampling_seed": i} for i in range(len(questions.first))]
    return [a["output_ids"] for a in generate(url, questions.first, params, at_once)]


def drafter_flags(drafter: str) -> list[str]:
    """Return the flags of an algorithm with its shape: NAME, NAME:steps/topk/draft tokens, or NGRAM:breadth."""
    name, _, shape = drafter.partition(":")
    values = shape.split("/") if shape else []
    names = ["--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"]
    if name == "NGRAM":
        names = ["--speculative-ngram-max-bfs-breadth"]
    pairs = zip(names, values, strict=True) if values else ()
    return ["--speculative-algorithm", name, *(word for pair in pairs for word in pair)]


def configurations(drafters: Sequence[str], modes: Sequence[str]) -> Iterator[tuple[str, list[str], bool]]:
    """Yield (name, flags, whether retraction is expected) for every server that is to be started."""
    for drafter in drafters:
        for mode in modes:
            base = ["--dtype", "float32", *drafter_flags(drafter)]
            base += ["--disable-torch-compile"] if mode == "eager" else []
            yield f"{drafter}, {mode}", base, False
            small = ["--chunked-prefill-size", "32", "--page-size", "16", "--max-total-tokens", "1024"]
            yield f"{drafter}, {mode}, chunks of 32, small pool", [*base, *small], True


def run(questions: Questions, drafters: Sequence[str], modes: Sequence[str], tell: Callable[[str], None]) -> bool:
    """Check every configuration; returns whether all were exact."""
    all_exact, samples = True, None
    for name, flags, retract in configurations(drafters, modes):
        started = time.monotonic()
        with serve(*flags) as url:
            tell(f"{name}: ready after {time.monotonic() - started:.0f} s")
            for what, exact, remark in check(url, questions, retract):
                all_exact &= exact
                tell(f"  {'ok  ' if exact else 'FAIL'} {what}: {remark}")
            for at_once in (1, 8):
                drawn = sampled(url, questions, at_once)
                samples = samples or drawn
                all_exact &= drawn == samples
                equal = sum(a == b for a, b in zip(drawn, samples, strict=True))
                verdict = "ok  " if drawn == samples else "FAIL"
                tell(f"  {verdict} seeded samples, {at_once} at once: {equal}/{len(drawn)} equal to the first server's")
    return all_exact


TRIALS = 10  # at each temperature
LONGEST = 448  # tokens of a prompt
ALONE = 16  # prompts that are asked one at a time
ASKS: dict[str, dict[str, Any]] = {"T = 0": GREEDY, "T = 1": {"temperature": 1.0}}  # the seed is the server's, 42
KINDS = ("alone", "eight at once", "trials")
Text = tuple[Ids, list[float]]  # and log-probabilities, of the trials alone


class Texts:
    """What servers have answered, kept in a file of JSON lines, so that a run that was cut off goes on."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, list[list[Any]]] = {}  # of each kind by its name: [[number of the prompt, text], ...]
        if path is not None and path.exists():
            self.found = {k: v for line in path.read_text().splitlines() for k, v in json.loads(line).items()}

    def add(self, name: str, texts: list[list[Any]]) -> None:
        """Keep the texts of a kind."""
        self.found[name] = json.loads(json.dumps(texts))
        if self.path is not None:
            with self.path.open("a") as file:
                print(json.dumps({name: texts}), file=file)

    def row(self, model: str, drafter: str) -> tuple[bool, str]:
        """Return whether all texts of a drafter equal those first found, and a row of a table that says how many."""
        cells, exact = [], True
        for ask in ASKS:
            ids: dict[int, Ids] = {}
            scores: dict[int, list[float]] = {}
            for name, texts in self.found.items():
                if name.startswith(f"{model}, ") and f", {ask}, " in name:
                    for number, (text, logprobs) in texts:
                        ids.setdefault(number, text)
                        if logprobs:
                            scores.setdefault(number, logprobs)
            for kind in KINDS:
                texts = self.found.get(f"{model}, {drafter}, {ask}, {kind}", [])
                equal = sum(t == ids[at] and (not s or s == scores[at]) for at, (t, s) in texts)
                exact &= equal == len(texts) > 0
                cells.append(f"{equal}/{len(texts)}")
        return exact, f"| {model}, {drafter} | {' | '.join(cells)} |"


def trials(url: str, prompts: Sequence[Ids], params: dict[str, Any], seed: int) -> list[list[Any]]:
    """Return the answers to the first prompt, asked TRIALS times among shorter others, in batches of random sizes."""
    rng, found = random.Random(seed), []
    for trial in range(TRIALS):
        others = rng.sample(list(prompts[1:]), min(rng.randrange(8), len(prompts) - 1))
        batch = [*others, prompts[0]]
        rng.shuffle(batch)
        shorter = [{**params, "max_new_tokens": rng.randrange(1, params["max_new_tokens"])} for _ in batch]
        shorter[batch.index(prompts[0])] = params
        if trial % 2:
            flush(url)
        answers = generate(url, batch, shorter, len(batch), return_logprob=True)
        found.append([0, text_of(answers[batch.index(prompts[0])])])
    return found


def text_of(answer: dict[str, Any]) -> Text:
    """Return the ids of an answer and their log-probabilities, if it has them."""
    return answer["output_ids"], [score[0] for score in answer["meta_info"].get("output_token_logprobs") or ()]


def run_deterministic(
    model: str, prompts: Sequence[Ids], servers: dict[str, list[str]], new_tokens: int, texts: Texts
) -> Iterator[tuple[bool, str]]:
    """Ask each server, a name and its flags, alone, eight at once in random company and in trials; yields its row."""
    for at, (drafter, flags) in enumerate(servers.items()):
        missing = [
            kind for kind in KINDS if any(f"{model}, {drafter}, {ask}, {kind}" not in texts.found for ask in ASKS)
        ]
        if missing:
            with serve("--enable-deterministic-inference", *flags) as url:
                for kind in missing:
                    for ask, found in asked(url, prompts, kind, at, new_tokens).items():
                        texts.add(f"{model}, {drafter}, {ask}, {kind}", found)
        yield texts.row(model, drafter)


def asked(url: str, prompts: Sequence[Ids], kind: str, at: int, new_tokens: int) -> dict[str, list[list[Any]]]:
    """Return what server number `at` answers, by temperature; behind the first, eight at once, a prompt has one."""
    params = {ask: {**wishes, "max_new_tokens": new_tokens, "ignore_eos": True} for ask, wishes in ASKS.items()}
    if kind == "trials":
        return {ask: trials(url, prompts, params[ask], at) for ask in ASKS}
    jobs = [(i, ask) for i in range(len(prompts)) for number, ask in enumerate(ASKS)
            if (i < ALONE if kind == "alone" else at == 0 or (i + at) % 2 == number)]  # fmt: skip
    random.Random(at).shuffle(jobs)
    answers = generate(
        url, [prompts[i] for i, _ in jobs], [params[ask] for _, ask in jobs], 1 if kind == "alone" else 8
    )
    found: dict[str, list[list[Any]]] = {ask: [] for ask in ASKS}
    for (i, ask), answer in zip(jobs, answers, strict=True):
        found[ask].append([i, text_of(answer)])
    return found


def tiny_copy(family: str, folder: Path) -> Path:
    """Write a tiny model of a family of `benchmarks.files`, whose layers have a multiple of 32 inputs."""
    from benchmarks import files

    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 1024,
             "torch_dtype": "bfloat16", "architectures": [f"{family}ForCausalLM"]}  # fmt: skip
    config = {**files.LLAMA, **files.FAMILIES[family], **sizes}
    config |= {"sliding_window": 64} if config.get("sliding_window") else {}
    config |= {"moe_intermediate_size": 32} if "moe_intermediate_size" in config else {}
    return files.write_model(folder / family, config)


def deterministic(args: argparse.Namespace, questions: Sequence[str], tell: Callable[[str], None]) -> bool:
    """Compare the texts of all servers that the flags name, and print a table; returns whether there is one of each."""
    from minispec.load.default_model import ensure_default_model
    from minispec.load.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as made:
        folder = tiny_copy(args.tiny, Path(made)) if args.tiny else ensure_default_model()
        tokenizer = load_tokenizer(folder)
        prompts = [tokenizer.encode_chat([{"role": "user", "content": text}])[:LONGEST] for text in questions]
        flags = ["--quantization", "int8"] if args.int8 else []
        flags += ["--model-path", str(folder)] if args.tiny else []
        draft = ["--speculative-draft-model-path", str(folder)] if args.tiny else []
        servers = {
            f"{drafter}, {mode}": [
                *(drafter_flags(drafter) + (draft if drafter.startswith("STANDALONE") else [])),
                *(flags + (["--disable-torch-compile"] if mode == "eager" else [])),
            ]
            for drafter in args.drafter
            for mode in args.mode
        }
        name, exact = f"{args.tiny or 'default model'}, {'int8' if args.int8 else 'bfloat16'}", []
        tell(
            "| model, weights, drafter, mode | " + " | ".join(f"{ask}, {kind}" for ask in ASKS for kind in KINDS) + " |"
        )
        tell("|---|" + "---|" * len(ASKS) * len(KINDS))
        for same, row in run_deterministic(name, prompts, servers, args.new_tokens, Texts(args.texts)):
            exact.append(same)
            tell(row)
    tell("one text each" if all(exact) else "NOT one text each")
    return all(exact)


def main() -> None:
    """Run the whole comparison on the default model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, required=True, help="JSON lines with `turns`, MT-bench's format")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafter", nargs="+", default=DRAFTERS, help="NAME, NAME:steps/topk/tokens or NGRAM:breadth")
    parser.add_argument("--mode", nargs="+", choices=("compiled", "eager"), default=["compiled", "eager"])
    parser.add_argument("--deterministic", action="store_true", help="compare texts among servers in bfloat16")
    parser.add_argument("--int8", action="store_true", help="with --deterministic: 8-bit weights")
    parser.add_argument("--tiny", help="with --deterministic: a tiny model, Mistral (windows), Qwen2 or Qwen3Moe")
    parser.add_argument("--texts", type=Path, help="with --deterministic: a file of texts, with which a run goes on")
    args = parser.parse_args()
    from minispec.load.default_model import ensure_default_model

    turns = [json.loads(line)["turns"] for line in args.dataset.read_text().splitlines()]
    step = max(1, len(turns) // args.limit)  # spread over the categories
    tell = lambda line: print(line, flush=True)  # noqa: E731
    if args.deterministic:
        sys.exit(0 if deterministic(args, [turn[0] for turn in turns[::step][: args.limit]], tell) else 1)
    tell("generating the reference with transformers")
    questions = Questions(turns[::step][: args.limit], ensure_default_model(), args.new_tokens)
    exact = run(questions, args.drafter, args.mode, tell)
    tell("all exact" if exact else "NOT exact")
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    main()
