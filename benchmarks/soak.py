"""A soak: good and bad clients of every kind at once, for as long as asked, and then a look at what they left behind.

`python -m benchmarks.soak --minutes 30` starts a server of the default model, eager and in float32 so that texts can be
compared, in a queue and a pool of pages that are too small for what comes. Clients are drawn by a seed: streams and
whole answers whose text must be the one that the same request got alone, several choices, grammars, clients who hang
up at a random moment (within a request's head, its body, the queue, the prompt or the answer), hostile bodies,
aborts by id, bursts beyond the queue's bound, and flushes of the cache. /health is asked throughout. At the end nothing
may run or wait, every page must be free, memory may not have grown, and the process must end with 0 and leave no file.
It prints figures, and exits with 1 if anything is not as promised. Other flags go to the server.

Read next: docs/reliability.md, which has the figures; tests/test_reliability.py, which runs a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.hostile import HOSTILE
from benchmarks.start import server

FLAGS = ["--disable-torch-compile", "--dtype", "float32", "--context-length", "1024", "--page-size", "16",
         "--max-running-requests", "4", "--max-queued-requests", "16", "--max-total-tokens", "320",
         "--speculative-algorithm", "NGRAM", "--log-level", "error"]  # fmt: skip
WORDS = "Once upon a time there was some good people who lived by a river near the sea".split()
MAX_GROWTH = 64 * 2**20  # bytes of memory from the first third of the time to the end
PATIENCE = 600.0  # seconds; an answer that takes longer is lost, however slow the machine


class Wish(NamedTuple):
    """A request to /generate, good in itself."""

    prompt: str
    params: dict[str, Any]

    def body(self, **more: Any) -> dict[str, Any]:
        return {"text": self.prompt, "sampling_params": self.params, **more}


def wishes(count: int, longest: int) -> list[Wish]:
    """Return different wishes, greedy and sampled, with several choices, and with a grammar."""
    draw, found = random.Random(0), []
    for i in range(count):
        params: dict[str, Any] = {"temperature": (0, 1.2)[i % 2], "sampling_seed": i, "ignore_eos": True,
                                  "max_new_tokens": draw.randint(longest // 2, longest)}  # fmt: skip
        if i % 6 == 4:
            params["n"] = 2
        if i % 6 == 5:
            params |= {"regex": "[a-d ]{20,40}", "ignore_eos": False}
        found.append(Wish(" ".join(draw.choices(WORDS, k=draw.randint(3, 40))), params))
    return found


def texts(answer: Any) -> list[str]:
    """Return the texts of a native answer."""
    return [item["text"] for item in (answer if isinstance(answer, list) else [answer])]


class Soak:
    """Clients of one server, and what they saw."""

    def __init__(self, url: str, wanted: Sequence[Wish], seed: int = 0) -> None:
        self.url, self.wanted, self.draw = url, list(wanted), random.Random(seed)
        self.host, self.port = url.removeprefix("http://").split(":")
        self.expected: list[list[str]] = []
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {"health": [], "answer": []}
        self.wrong: list[str] = []
        self.over = False

    async def __aenter__(self) -> Soak:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(PATIENCE))
        return self

    async def __aexit__(self, *why: Any) -> None:
        await self.session.close()

    # ---- clients -----------------------------------------------------------------------------------------------------

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=raw) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def stats(self) -> dict[str, Any]:
        """Return internal_states[0] of /server_info."""
        async with self.session.get(self.url + "/server_info") as answer:
            return (await answer.json())["internal_states"][0]

    async def alone(self) -> None:
        """Ask each wish alone, for what its text is."""
        for wish in self.wanted:
            status, answer = await self.post("/generate", wish.body())
            assert status == 200, answer
            self.expected.append(texts(answer))

    async def good(self, index: int | None = None, rid: str | None = None) -> None:
        """Ask a wish, streamed or whole: its text is the known one, or the queue is full; with an id, it may be cut."""
        index = self.draw.randrange(len(self.wanted)) if index is None else index
        named, begun = {} if rid is None else {"rid": rid}, time.monotonic()
        ask = self._streamed if self.draw.random() < 0.5 else self.post
        status, answer = await ask("/generate", self.wanted[index].body(**named))
        if status == 503 and answer["error"]["code"] == "queue_full":
            self.counts["refused"] += 1
            return
        self.seconds["answer"].append(time.monotonic() - begun)
        got, known = texts(answer) if status == 200 else [], self.expected[index]
        cut = [text.rstrip("\ufffd") for text in got]  # what is cut may end in half a character
        if rid is not None and len(got) == len(known) and all(map(str.startswith, known, cut)):
            self.counts["aborted or finished"] += 1
        elif got == known:
            self.counts["good"] += 1
        else:
            self.wrong.append(f"wish {index}: {status} {str(answer)[:300]} in place of {known}")

    async def _streamed(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return a stream's last events as a whole answer, or its error."""
        newest: dict[int, Any] = {}
        async with self.session.post(self.url + path, json={**body, "stream": True}) as answer:
            if answer.status != 200:
                return answer.status, await answer.json()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return 500, event
                    newest[event.get("index", 0)] = event
        return 200, [newest[i] for i in sorted(newest)]

    async def cut(self) -> None:
        """Send a request, maybe not all of it, and hang up at a random moment."""
        wish, draw = self.draw.choice(self.wanted), self.draw
        raw = json.dumps(wish.body(stream=draw.random() < 0.5)).encode()
        raw = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        reader, writer = await asyncio.open_connection(self.host, int(self.port))
        writer.write(raw[: draw.randrange(len(raw))] if draw.random() < 0.2 else raw)
        if draw.random() < 0.5:
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.5 * draw.random()):
                    await reader.read(draw.randint(1, 5000))
        else:
            await asyncio.sleep(0.5 * draw.random())
        if draw.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
        self.counts["cut"] += 1

    async def hostile(self) -> None:
        """Send a body that must be refused."""
        path, body = self.draw.choice(HOSTILE)
        status, answer = await self.post(path, body)
        self.counts["hostile"] += 1
        if status == 503 and answer["error"]["code"] == "queue_full":
            return  # it was to be tokenized to be refused
        if not 400 <= status < 500 or "error" not in answer:
            self.wrong.append(f"hostile {path} {str(body)[:100]}: {status} {str(answer)[:200]}")

    async def abort(self) -> None:
        """Ask a wish and have it aborted meanwhile."""
        rid = f"aborted-{self.draw.getrandbits(60)}"
        asking = asyncio.ensure_future(self.good(rid=rid))
        await asyncio.sleep(0.3 * self.draw.random())
        await self.post("/abort_request", {"rid": rid})
        await asking

    async def burst(self) -> None:
        """Ask many wishes at once, more than the queue holds."""
        await asyncio.gather(*(self.good() for _ in range(32)))
        self.counts["bursts"] += 1

    async def flush(self) -> None:
        """Flush the cache, which works when nothing runs."""
        status, _ = await self.post("/flush_cache", b"")
        self.counts["flushed" if status == 200 else "not flushed"] += 1

    async def watch(self, every: float = 0.1) -> None:
        """Ask /health until the soak is over."""
        while not self.over:
            begun = time.monotonic()
            async with self.session.get(self.url + "/health") as answer:
                if answer.status != 200:
                    self.wrong.append(f"/health is {answer.status}")
            self.seconds["health"].append(time.monotonic() - begun)
            await asyncio.sleep(every)

    # ---- all of it ---------------------------------------------------------------------------------------------------

    async def run(self, seconds: float) -> None:
        """Let eight clients come for so long."""
        kinds = {self.good: 50, self.cut: 25, self.hostile: 15, self.abort: 8, self.flush: 5, self.burst: 1}
        end = time.monotonic() + seconds

        async def work() -> None:
            while time.monotonic() < end:
                kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
                try:
                    await kind()
                except TimeoutError:
                    self.wrong.append(f"{kind.__name__} had no answer in {PATIENCE:g} s: {await self.stats()}")

        self.over = False
        watching = asyncio.ensure_future(self.watch())
        await asyncio.gather(*(work() for _ in range(8)))
        self.over = True
        await watching

    async def idle(self) -> dict[str, Any]:
        """Return the stats once nothing runs or waits; every page is then free or cached, and after a flush free."""
        end = time.monotonic() + 30
        while True:
            stats = await self.stats()
            if stats["num_running_reqs"] == stats["num_queue_reqs"] == 0:
                break
            assert time.monotonic() < end, f"something still runs: {stats}"
            await asyncio.sleep(0.05)
        assert stats["kv_pages_owned"] == 0, stats
        assert stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages_total"], stats
        status, answer = await self.post("/flush_cache", b"")
        assert status == 200, answer
        assert (await self.stats())["kv_pages_free"] == stats["kv_pages_total"]
        return stats


def rss(pid: int | str = "self") -> int:
    """Return the resident memory of a process in bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


def spread(seconds: Sequence[float]) -> str:
    """Return median, 99th percentile and maximum, in milliseconds."""
    ranked = sorted(seconds)
    marks = (ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100], ranked[-1])
    return f"{len(ranked)}, median {marks[0] * 1e3:.0f} ms, p99 {marks[1] * 1e3:.0f} ms, max {marks[2] * 1e3:.0f} ms"


# ---- the script ------------------------------------------------------------------------------------------------------


async def soak(url: str, pid: int, seconds: float, seed: int) -> bool:
    """Run a soak and print its figures; returns whether all was as promised."""
    async with Soak(url, wishes(12, 110), seed) as clients:
        await clients.alone()
        memory, retractions, begun = [rss(pid)], 0, time.monotonic()
        while (left := seconds - (time.monotonic() - begun)) > 0:
            await clients.run(min(left, max(seconds / 12, 5)))
            retractions += (await clients.idle())["total_retractions"]  # the flush begins to count anew
            memory.append(rss(pid))
            threads = len(os.listdir(f"/proc/{pid}/task"))
            files = len(os.listdir(f"/proc/{pid}/fd"))
            print(f"{time.monotonic() - begun:6.0f} s: {memory[-1] / 2**20:.0f} MiB, {threads} threads, {files} files, "
                  f"{dict(clients.counts)}", flush=True)  # fmt: skip
        grown = memory[-1] - memory[max(1, len(memory) // 3)]
        print("\n".join(clients.wrong[:20]))
        for kind, took in clients.seconds.items():
            print(f"{kind}: {spread(took)}")
        print(f"retractions: {retractions}; memory: {memory[0] / 2**20:.0f} MiB at first, {memory[-1] / 2**20:.0f} MiB "
              f"at last, {grown / 2**20:+.1f} MiB in the last two thirds; wrong: {len(clients.wrong)}")  # fmt: skip
        return not clients.wrong and grown < MAX_GROWTH and max(clients.seconds["health"]) < 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    given, flags = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        with server([*FLAGS, *flags], {"TMPDIR": folder}) as started:
            started.wait_until_ready()
            process = started.process
            fine = asyncio.run(soak(started.url, process.pid, 60 * given.minutes, given.seed))
        left = os.listdir(folder)
        print(f"exit code {process.returncode}; files left: {left}")
    return 0 if fine and process.returncode == 0 and not left else 1


if __name__ == "__main__":
    sys.exit(main())
