"""How long a newcomer waits: from the start of the server's process to the first answer, and to the last graph.

`python -m benchmarks.start` starts the server, each time anew and three times each, and prints the least of

  cold     with an empty compile cache: the last token of a request of 64 prompt tokens and 16 new ones, sent as soon as
           /health is 200, and the moment at which /health says that everything is compiled
  warm     the same with the cache that the cold start left
  stream   with an empty cache again and one stream running from the first answer until everything is compiled: its
           longest silence, and its tokens a second against those of a server that runs eagerly for good

and the load of the machine before each start, since the figures hold for two quiet cores. Other flags go to the server.
A stream leaves the compiling process little of two cores, so --patience bounds how long it is waited for.

Other benchmarks start their servers here too, by `running`, `ready` and `server`, and ask them by `post`.

Read next: `warming.py` of the package, which is what is measured.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # the variable
COMMAND = (sys.executable, "-m", "minispec.server", "--log-level", "warning")
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers here are behind no proxy
READY_S = 1200.0  # a server may have dozens of graphs to compile
NEW_TOKENS = 16
STREAMED = 200  # of a reply of the stream, before it repeats itself
BOUNDS = "bounds: first answer 15 s; compiled 130 s cold and 16 s warm; silence 2.5 s; 0.50 of eager tokens/s"


class Start(NamedTuple):
    """One start of the server: seconds from its process's start."""

    load: float  # of the machine, just before
    first_answer: float
    compiled: float | None


class Stream(NamedTuple):
    """One client that reads tokens all the time."""

    load: float
    seconds: float
    tokens: int
    silence: float  # the longest
    graphs: str  # what /health said at the end

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Process:
    """A server under way."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.url, self.process, self.started = f"http://127.0.0.1:{port}", process, time.monotonic()

    def health(self) -> dict[str, Any] | None:
        """Return the body of /health, None while it is not 200."""
        try:
            with LOCAL.open(f"{self.url}/health", timeout=600) as answer:
                return json.load(answer)
        except OSError:  # errors of HTTP are OSErrors too
            return None

    def wait_until_ready(self, patience: float = math.inf) -> None:
        """Wait for /health to be 200; raises RuntimeError where the server ends instead, or is not ready in time."""
        while self.health() is None:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}")
            if time.monotonic() - self.started > patience:
                raise RuntimeError(f"the server was not ready after {patience:.0f} s")
            time.sleep(0.02)

    def ask(self) -> float:
        """Send the request; returns the seconds from the process's start to its last token."""
        with post(f"{self.url}/generate", body_of(NEW_TOKENS)) as answer:
            answer.read()
        return time.monotonic() - self.started

    def stream(self) -> Iterator[int]:
        """Yield the number of new tokens of each event, of replies that follow one another without end.

        Each has a prompt of its own, since a reply that was given before would be looked up.
        """
        for number in itertools.count():
            known = 0
            for line in post(f"{self.url}/generate", {**body_of(STREAMED, number), "stream": True}):
                if line.startswith(b"data: {"):
                    count = json.loads(line[6:])["meta_info"]["completion_tokens"]
                    yield count - known
                    known = count


def post(url: str, body: Any) -> http.client.HTTPResponse:
    """POST JSON and return the answer, which is to be read; raises RuntimeError with the body of an error."""
    call = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        return LOCAL.open(call, timeout=600)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {error.read().decode()}") from None


def body_of(new_tokens: int, number: int = 0) -> dict[str, Any]:
    """Return a request for this many tokens, each number with another prompt of 64."""
    prompt = [100 + (37 + 2 * number) * i % 4000 for i in range(64)]
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": params}


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[Process]:
    """Start a server on a free port, which is added to its command, and stop it; options: those of `Popen`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], **options)
    try:
        yield Process(port, process)
    finally:
        process.terminate()
        try:
            process.wait(40)
        finally:
            process.kill()


@contextmanager
def ready(command: Sequence[str], cwd: Path | None = None) -> Iterator[str]:
    """Start a server, yield its URL when it is ready, and stop it; raises RuntimeError with its last words."""
    with tempfile.TemporaryFile("w+") as log, running(command, stdout=log, stderr=log, cwd=cwd) as process:
        try:
            process.wait_until_ready(READY_S)
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)} did not start:\n{log.read()[-4000:]}") from error
        yield process.url


def server(
    flags: Sequence[str], variables: Mapping[str, str], folder: Path | None = None
) -> AbstractContextManager[Process]:
    """Start minispec with these environment variables, and stop it; folder: another checkout, whose server it is."""
    return running([*COMMAND, *flags], env=os.environ | variables, cwd=folder)


def start(cache: Path, flags: Sequence[str], patience: float, folder: Path | None = None) -> Start:
    """Measure one start without load."""
    load = os.getloadavg()[0]
    with server(flags, {CACHE: str(cache)}, folder) as process:
        process.wait_until_ready()
        answered, compiled = process.ask(), None
        while compiled is None and time.monotonic() - process.started < patience:
            graphs = (process.health() or {}).get("graphs", "")
            compiled = time.monotonic() - process.started if graphs == "compiled" else None
            time.sleep(0.1)
        return Start(load, answered, compiled)


def stream(cache: Path, flags: Sequence[str], patience: float, folder: Path | None = None) -> Stream:
    """Measure a stream that runs until everything is compiled, or for so many seconds."""
    load, graphs = os.getloadavg()[0], ""
    with server(flags, {CACHE: str(cache)}, folder) as process:
        process.wait_until_ready()
        tokens = process.stream()
        next(tokens)
        began = last = looked = time.monotonic()
        count, silence = 0, 0.0
        while graphs != "compiled" and last - began < patience:
            count += next(tokens)
            now = time.monotonic()
            silence, last = max(silence, now - last), now
            if now - looked > 1:
                graphs, looked = (process.health() or {}).get("graphs", ""), now
        return Stream(load, last - began, count, silence, graphs)


def tell(name: str, run: Start | Stream) -> None:
    """Print one measurement."""
    if isinstance(run, Start):
        compiled = "not in time" if run.compiled is None else f"{run.compiled:.1f} s"
        said = f"first answer {run.first_answer:.1f} s, all compiled {compiled}"
    else:
        said = (f"{run.tokens} tokens in {run.seconds:.1f} s, {run.rate:.1f} tokens/s, longest silence "
                f"{run.silence:.2f} s, in the end {run.graphs}")  # fmt: skip
    print(f"{name}: {said}; load before {run.load:.1f}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["cold", "warm", "stream"], choices=["cold", "warm", "stream"])
    parser.add_argument("--runs", type=int, default=3, help="starts of each kind")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for the last graph")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        caches = (Path(folder) / str(number) for number in itertools.count())
        for part in args.parts:
            if part == "stream":
                eager = stream(next(caches), [*flags, "--disable-torch-compile"], 10)
                tell("stream, undisturbed eager", eager)
                found = stream(next(caches), flags, args.patience)
                tell("stream while compiling", found)
                print(f"stream: longest silence {found.silence:.2f} s, {found.rate / eager.rate:.2f} of eager tokens/s")
                continue
            warm = next(caches)
            if part == "warm":
                start(warm, flags, args.patience)
            runs = []
            for _ in range(args.runs):
                runs.append(start(warm if part == "warm" else next(caches), flags, args.patience))
                tell(part, runs[-1])
            compiled = [run.compiled for run in runs if run.compiled is not None]
            print(f"{part}, least of {args.runs}: first answer {min(run.first_answer for run in runs):.1f} s, all "
                  f"compiled {f'{min(compiled):.1f} s' if compiled else 'never'}")  # fmt: skip
    print(BOUNDS)


if __name__ == "__main__":
    main()
