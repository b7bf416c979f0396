"""Servers of several ranks, each a process with a child: a client over a socket, and how they end, or do not start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import openai
import pytest
from conftest import free_port, wait_until
from test_server import launch

ROOT = Path(__file__).parent.parent


@contextmanager
def started(folder: Path, temporary: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Start a server of two ranks on the model of a folder, whose temporary files go to another one."""
    temporary.mkdir()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    server = launch("--model", str(folder), "--tp-size", "2", "--device", "cpu", "--dtype", "float32",
                    "--disable-torch-compile", "--max-running-requests", "2", *flags,
                    env={"TMPDIR": str(temporary), "PYTHONPATH": path})  # fmt: skip
    try:
        yield server
    finally:
        server.kill()
        server.communicate()


def wait_until_ready(server: subprocess.Popen[str]) -> int:
    """Wait until a server serves; returns the process of its other rank."""
    for line in server.stderr:
        if "fired up" in line:
            break
    (child,) = (int(child) for task in Path(f"/proc/{server.pid}/task").iterdir()
                for child in (task / "children").read_text().split())  # fmt: skip
    return child


def errors(log: str) -> list[str]:
    """Return the lines of a log that are errors."""
    return [line for line in log.splitlines() if "error" in line.lower()]


def without_weights(folder: Path) -> Sequence[str]:
    """Write the config of a model of 9 heads over 3; returns the flags with which it is served."""
    stated = {"architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 72, "intermediate_size": 96,
              "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(stated))
    return ("--load-format", "dummy", "--context-length", "2048", "--log-level", "info")


def test_openai_streams_from_two_ranks_and_a_drained_server_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    temporary, port = tmp_path / "temporary", free_port()
    flags = ("--port", str(port), "--speculative-algorithm", "NGRAM", "--shutdown-timeout", "120")
    with started(tiny, temporary, *flags) as server:
        child = wait_until_ready(server)
        rest = threading.Thread(target=server.stderr.read)
        rest.start()  # or the server would wait for who reads its log
        for pid in (server.pid, child):
            files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
            assert not any(name.startswith(("/dev/shm", str(temporary))) for name in files), files
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="None", timeout=60)
        wish = dict(model="any", messages=[{"role": "user", "content": "Once upon a time"}], temperature=0, stream=True,
                    stream_options={"include_usage": True}, extra_body={"ignore_eos": True})  # fmt: skip
        texts = []
        for count in (24, 150):
            chunks = client.chat.completions.create(**wish, max_tokens=count)
            parts = [next(chunks)]
            if count == 150:
                server.send_signal(signal.SIGTERM)  # what runs may finish
            parts += chunks
            texts.append("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
            assert parts[-1].usage.completion_tokens == count and parts[-2].choices[0].finish_reason == "length"
        assert texts[0] and texts[1].startswith(texts[0].rstrip("\ufffd"))  # what ends within a character
        assert server.wait(60) == 0
        rest.join()
        wait_until(lambda: not Path(f"/proc/{child}").exists())
        assert not any(temporary.iterdir())
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_server_with_one_line_and_frees_its_port(tmp_path: Path) -> None:
    flags, temporary, port = without_weights(tmp_path), tmp_path / "temporary", free_port()
    with started(tmp_path, temporary, "--port", str(port), *flags) as server:
        child = wait_until_ready(server)
        body = {"text": "so", "stream": True, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(),
                                       {"Content-Type": "application/json"})  # fmt: skip
        stream = urllib.request.urlopen(asked, timeout=60)
        assert stream.readline().startswith(b"data: ")
        os.kill(child, signal.SIGKILL)
        assert server.wait(60) == 1
        assert errors(server.stderr.read()) == [
            f"minispec: error: rank 1 (process {child}) has ended, and the others cannot go on without it; start the "
            "server again: was killed by signal 9"]  # fmt: skip
        assert not any(temporary.iterdir())
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.slow
def test_a_start_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    flags, addresses = without_weights(tmp_path), [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with ExitStack() as stack:
        starts = [stack.enter_context(started(
            tmp_path, tmp_path / f"temporary{rank}", "--nnodes", "2", "--node-rank", str(rank), "--dist-timeout", "1",
            "--dist-init-addr", there, "--port", "0", *flags)) for rank, there in enumerate(addresses)]  # fmt: skip
        found = [(server.wait(60), errors(server.stderr.read())) for server in starts]
    assert found[0] == (1, ["minispec: error: --tp-size 2: only 1 ranks met within 1 s (--dist-timeout); start every "
                            "machine, with the same --dist-init-addr"])  # fmt: skip
    assert found[1] == (1, [f"minispec: error: --dist-init-addr {addresses[1]}: nobody answered in 1 s (--dist-timeout)"
                            "; start machine 0 first, and see that it is reachable from here: [Errno 111] Connection "
                            "refused"])  # fmt: skip
    assert not any(any((tmp_path / f"temporary{rank}").iterdir()) for rank in range(2))
