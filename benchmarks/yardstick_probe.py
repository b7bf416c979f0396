"""What `benchmarks/yardstick.py` starts in a checkout: it runs that checkout's engine and tells what it did.

`python /path/to/yardstick_probe.py`, with the checkout as working directory, imports the package there, and not that
beside this file. It reads a command a line from its input, a JSON object whose "do" names a method of `Probe`, and
writes a JSON object a line; between two commands it waits for its input and computes nothing.

All that is internal to a checkout is read in one class, `Checkout`.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

if __name__ == "__main__":
    sys.path[0] = os.getcwd()

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGE = Path.cwd() / "minispec"
TEXTS = (  # the texts that are asked, of this script alone
    "List the months of the year and say in a few words what the weather is like in each of them.",
    "Repeat this sentence three times: the lighthouse keeper counted the boats, and the boats counted the stars.",
    "Explain to a child why bread rises.",
    "Write a function in Python that returns the sum of the squares of the first n whole numbers.",
    "A train leaves at nine and travels for three hours at eighty kilometres an hour. How far does it get, and when?",
    "Once upon a time, in a village between two hills, there was a clock that ran backwards. One morning",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen,",
    "Translate into French: good morning, I would like a cup of coffee and two rolls, please.",
)
WISHES: tuple[dict[str, Any], ...] = (  # of the requests whose tokens are compared, one for each text
    {}, {}, {"temperature": 0.8, "sampling_seed": 11}, {"logprobs": 2}, {"frequency_penalty": 0.7},
    {"temperature": 1.1, "top_p": 0.9, "top_k": 50, "sampling_seed": 12}, {"speculative": False},
    {"json": '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'},
)  # fmt: skip
COMPARED = 20  # new tokens of each of them
TIMED_PROMPT = 32  # tokens, a query block of a CPU: prefill is not timed, and most of a run's time would go there


class Counted(TorchDispatchMode):
    """Counts the operations that are run, by name, under the label of whatever part is being run."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, Counter[str]] = {}
        self.labels: list[Counter[str]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        """Count one operation and run it."""
        if func.namespace == "aten":  # in inference mode some come whole
            with self:
                if (parts := func.decompose(*args, **kwargs or {})) is not NotImplemented:
                    return parts
        if self.labels:
            self.labels[-1][str(func)] += 1
        return func(*args, **kwargs or {})

    @contextmanager
    def part(self, label: str) -> Iterator[None]:
        """Count what is run within as this part's, and not as that of the part around it; the last of a kind stays."""
        self.labels.append(Counter())
        try:
            yield
        finally:
            self.last[label] = self.labels.pop()


class Recorded(TorchDispatchMode):
    """The operations of a step with the tensors they read and wrote, to be run again as a CUDA graph does it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], tuple, dict, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        """Run one operation and note it."""
        kwargs = kwargs or {}
        if func.namespace == "aten":
            with self:
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
        out = func(*args, **kwargs)
        made, given = tensors(out), {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        shared = any(tensor.untyped_storage().data_ptr() in given for tensor in made)
        self.operations.append((func, args, kwargs, [] if shared else made))
        return out

    def replay(self) -> None:
        """Run the operations again, on the tensors of the first time."""
        for func, args, kwargs, fresh in self.operations:
            out = func(*args, **kwargs)
            for old, new in zip(fresh, tensors(out) if fresh else [], strict=True):
                old.copy_(new)


def tensors(value: object) -> list[Tensor]:
    """Return the tensors in an operation's arguments or results."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Checkout:
    """An LLM of the checkout; all that is internal to the checkout is read here."""

    generators = {"flags.md": "minispec.load.flags", "serving.md": "minispec.serve.openapi"}  # page: who writes it

    def __init__(self, options: dict[str, Any]) -> None:
        """Load an LLM. Of the options `uncompiled` has compiling put off, for ever."""
        from minispec import LLM

        options = dict(options)
        later = options.pop("uncompiled", False)
        self.llm = LLM(compile_later=later, decode_log_interval=10**9, **options)
        self.scheduler, self.engine = self.llm.scheduler, self.llm.scheduler.engine
        self.unhurry()

    @staticmethod
    def unhurry() -> None:
        """Take away the limits of seconds on what the host does for drafts, or drafts would differ from run to run."""
        from minispec import ngram
        from minispec.asked import grammar

        ngram.NgramDrafter.seconds = property(lambda drafter: None, lambda drafter, value: None)
        grammar.time = SimpleNamespace(perf_counter=lambda: 0.0)

    def shapes(self) -> list[tuple[Any, ...]]:
        """Return the kind, batch and size of every step that the engine has, and the name of every graph it compiles.

        Of a decode step it is also told whether the drafter drafts in it.
        """
        from minispec.load.warm_up import shapes

        decodes = [("decode step", batch, *shape) for batch, shape in self.engine.decodes]
        prefills = [("prefill step", 1, size) for size in self.engine.prefills]
        return [*decodes, *prefills, *(("graph", name) for name in shapes(self.engine))]

    def params(self, wish: dict[str, Any], new_tokens: int) -> Any:
        """Return sampling parameters: greedy, but for what a wish says; `json` is a schema, `logprobs` how many."""
        from minispec import SamplingParams
        from minispec.request import Grammar, Logprobs

        wish = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True, **wish}
        if "logprobs" in wish:
            wish["logprobs"] = Logprobs(top=wish["logprobs"])
        if "json" in wish:
            wish["grammar"] = Grammar("json_schema", wish.pop("json"))
        return SamplingParams(**wish)

    def force(self, how: str) -> None:
        """Have every step's shape chosen so: "plain", "tree" (the largest), "any" (drawn), "cycle", or "served"."""
        from minispec.tree import PLAIN

        def cycled(shapes: Sequence[Any]) -> Any:
            """Return a plain shape twice, since its rows then wait, the largest tree, and the largest of the host."""
            of_host = max((shape for shape in shapes if shape.of_host), default=PLAIN)
            return (PLAIN, PLAIN, max(shapes), of_host)[next(turn) % 4]

        rng, turn = random.Random(0), itertools.count()
        self.scheduler.policy.forced = {
            "plain": lambda shapes: PLAIN, "tree": max, "any": rng.choice, "cycle": cycled, "served": None,
        }[how]  # fmt: skip

    def start(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
        """Submit requests to an engine that remembers no text, and step until each has its first token."""
        self.engine.drafter.clear()
        requests = [self.llm.request(ids, wish) for ids, wish in zip(prompts, params, strict=True)]
        for request in requests:
            self.scheduler.validate(request)
        for request in requests:
            self.scheduler.submit(request)
        while not all(request.output_ids for request in requests):
            self.scheduler.step()
        return requests

    def stop(self) -> None:
        """End all requests."""
        self.scheduler.abort("")
        while self.scheduler.has_work:
            self.scheduler.step()

    @contextmanager
    def counting(self, counted: Counted) -> Iterator[None]:
        """Count the operations of each kind of step while this is entered."""
        engine, late, launch, prefill = self.engine, self.engine.late, self.engine.launch, self.engine.prefill
        catch_up = late.catch_up

        def launched(slots: Sequence[int], shape: Any, drafts: Any) -> Any:
            host = shape.of_host or not engine.drafter.steps
            with counted.part("plain" if shape.nodes == 1 else "host tree" if host else "tree"):
                return launch(slots, shape, drafts)

        def prefilled(chunks: Any) -> Any:
            with counted.part("prefill"):
                return prefill(chunks)

        def caught_up(slots: Sequence[int]) -> None:
            with counted.part("catch-up" if any(late.waiting[slot] for slot in slots) else "nothing to catch up"):
                catch_up(slots)

        engine.launch, engine.prefill, late.catch_up = launched, prefilled, caught_up
        try:
            with counted:
                yield
        finally:
            del engine.launch, engine.prefill, late.catch_up

    def record(self) -> Callable[[], None]:
        """Record the next decode step of requests that are running; returns what replays it from the same state."""
        engine, kv, recorded = self.engine, self.engine.kv, Recorded()
        kv.host_looks, kv.mapped[0] = False, kv.pages_per_slot  # attention reads all that a slot can have
        decode, state = engine.decode, [engine.lens, engine.root]
        before = [tensor.clone() for tensor in state]

        def noted(bucket: Any, needs: Any) -> None:
            with recorded:
                decode(bucket, needs)

        engine.decode = noted
        try:
            self.scheduler.step()
        finally:
            del engine.decode

        @torch.inference_mode()
        def replay() -> None:
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
            recorded.replay()

        return replay


class Probe:
    """One checkout's engine, and what may be asked of it."""

    def __init__(self) -> None:
        self.llm: Any = None

    def hello(self) -> dict[str, Any]:
        """Tell which package is imported, and what there is."""
        import minispec

        if Path(minispec.__file__).resolve().parent != PACKAGE.resolve():
            raise RuntimeError(f"minispec is imported from {minispec.__file__}, not from {PACKAGE}")
        bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return {"cuda": torch.cuda.is_available(), "bfloat16": bfloat16, "generators": Checkout.generators}

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        """Put an LLM in the place of the one there was."""
        self.llm = None
        gc.collect()
        self.llm = Checkout(options)
        return {}

    def equal(self) -> dict[str, Any]:
        """Tell what may not differ: tokens of all texts at once under every shape, shapes, and operations of steps."""
        llm = self.llm
        params = [llm.params(wish, COMPARED) for wish in WISHES]
        llm.force("any")
        answers = llm.llm.generate(list(TEXTS), params)
        llm.force("cycle")
        counted = Counted()
        with llm.counting(counted):
            llm.llm.generate([TEXTS[1] + TEXTS[6], TEXTS[6] * 2], [llm.params({}, 16)] * 2)
        llm.force("served")
        counted.last.pop("nothing to catch up", None)
        return {
            "tokens": [answer["output_ids"] for answer in answers],
            "verified": [answer["meta_info"].get("spec_verify_ct", 0) for answer in answers],
            "shapes": llm.shapes(),
            "operations": counted.last,
        }

    def setup(self, batch: int) -> list[list[int]]:
        """Return the prompts of so many timed requests, of equal length."""
        whole = [list(self.llm.llm.tokenizer.encode(text * 8))[:TIMED_PROMPT] for text in TEXTS]
        return list(itertools.islice(itertools.cycle(whole), batch))

    def time(self, batch: int, steps: int, wish: dict[str, Any], asking: int, force: str) -> dict[str, Any]:
        """Time so many decode steps of a batch, of which `asking` requests have a wish; tells also what they emitted.

        Prefill is left out. What was said in an earlier stretch is forgotten, so that all stretches do the same work.
        """
        llm = self.llm
        llm.force(force)
        rest = [llm.params({}, 16 * steps)] * (batch - asking)
        requests = llm.start(self.setup(batch), [llm.params(wish, 16 * steps)] * asking + rest)
        return self._timed(requests, llm.scheduler.step, steps)

    def replay(self, batch: int, steps: int) -> dict[str, Any]:
        """Time so many replays of one recorded tree step."""
        llm = self.llm
        llm.force("tree")
        requests = llm.start(self.setup(batch), [llm.params({}, 64)] * batch)
        return self._timed(requests, llm.record(), steps)

    def _timed(self, requests: Sequence[Any], step: Callable[[], object], steps: int) -> dict[str, Any]:
        """Time so many steps, and end the requests, whose tokens are told."""
        step()  # what a first step prepares is not timed
        started = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - started
        tokens = [list(request.output_ids) for request in requests]
        self.llm.stop()
        return {"seconds": seconds, "tokens": tokens}

    def files(self) -> dict[str, Any]:
        """Tell which files of the package have a line that decode steps of one request execute."""
        llm, seen = self.llm, set[str]()
        llm.force("served")
        llm.start(self.setup(1), [llm.params({}, 512)])
        for _ in range(4):
            llm.scheduler.step()

        def trace(frame: Any, event: str, arg: object) -> Any:
            if event == "line":
                seen.add(frame.f_code.co_filename)
                return None
            return trace if frame.f_code.co_filename not in seen else None

        sys.settrace(trace)
        for how, steps in (("served", 12), ("cycle", 8)):  # the policy's times are the machine's, so each shape is run
            llm.force(how)
            for _ in range(steps):
                llm.scheduler.step()
        sys.settrace(None)
        llm.stop()
        inside = (Path(name) for name in seen)
        return {"files": sorted(str(path.relative_to(PACKAGE)) for path in inside if path.is_relative_to(PACKAGE))}


def serve(commands: TextIO, answers: TextIO) -> None:
    """Do what each line says, and answer with a line; an error is an answer, and ends this."""
    probe = None
    for line in commands:
        command = json.loads(line)
        name = command.pop("do")
        try:
            probe = probe or Probe()
            answer = getattr(probe, name)(**command)
        except Exception:
            print(json.dumps({"error": traceback.format_exc()}), file=answers, flush=True)
            return
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # so that whatever else prints does not disturb the answers
        serve(sys.stdin, out)
