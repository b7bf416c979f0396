"""What is in deploy/: the proxy's configuration with a server behind it, the unit, and the Dockerfiles, as far as they
can be read. nginx and systemd-analyze run where they are installed; deploy/rehearse.py runs the lines of a Dockerfile.
"""

from __future__ import annotations

import http.client
import json
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import free_port
from test_layers import ROOT
from test_server import Running, events, slow_steps

from minispec.load.flags import config_from_args

DEPLOY = ROOT / "deploy"
sys.path.insert(0, str(DEPLOY))
from rehearse import PASSED_OVER, instructions  # noqa: E402

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
NAMES = ["Dockerfile.cpu", "Dockerfile.cuda"]
SERVED = {"max_running_requests": 1}


# ---- the proxy -------------------------------------------------------------------------------------------------------


class Proxy:
    """nginx with the shipped configuration before a server; only ports and the files of its certificate are changed."""

    def __init__(self, folder: Path, upstream: int) -> None:
        self.tls, self.plain = free_port(), free_port()
        key, certificate = folder / "key.pem", folder / "cert.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate,
                        "-days", "2", "-subj", "/CN=localhost"], check=True, capture_output=True)  # fmt: skip
        text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
        changes = {"127.0.0.1:30000": f"127.0.0.1:{upstream}", "listen 443 ssl": f"listen 127.0.0.1:{self.tls} ssl",
                   "listen 80;": f"listen 127.0.0.1:{self.plain};", "/etc/ssl/minispec/fullchain.pem": str(certificate),
                   "/etc/ssl/minispec/privkey.pem": str(key)}  # fmt: skip
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        places = "".join(f"{name}_temp_path {folder}/{name};" for name in
                         ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))  # fmt: skip
        config = folder / "nginx.conf"
        config.write_text(f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
                          f"events {{}} http {{ access_log off; {places}\n{text}\n}}\n")  # fmt: skip
        command = [NGINX, "-p", folder, "-e", folder / "error.log", "-c", config]
        subprocess.run([*command, "-t"], check=True, capture_output=True)
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.context = ssl.create_default_context(cafile=str(certificate))
        self.context.check_hostname = False

    def ask(
        self, path: str, body: Any = None, plain: bool = False, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """Return the answer to a request, its body unread."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = http.client.HTTPConnection if plain else http.client.HTTPSConnection
        tls = {} if plain else {"context": self.context}
        self.connection = kind("127.0.0.1", self.plain if plain else self.tls, timeout=30, **tls)
        self.connection.request("GET" if raw is None else "POST", path, raw, headers or {})
        return self.connection.getresponse()


@pytest.fixture(scope="module")
def proxy(served: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The proxy, listening."""
    if NGINX is None or shutil.which("openssl") is None:
        pytest.skip("needs nginx and openssl")
    proxy = Proxy(tmp_path_factory.mktemp("nginx"), served.port)
    end = time.monotonic() + 20
    while True:
        try:
            proxy.ask("/health").read()
            break
        except OSError:
            assert proxy.process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
    yield proxy
    proxy.process.terminate()
    proxy.process.wait(10)


def test_answers_come_through_the_proxy_as_they_are(served: Running, proxy: Proxy) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    straight, through = served.ok("/v1/completions", body), json.loads(proxy.ask("/v1/completions", body).read())
    assert through["choices"] == straight["choices"] and through["usage"] == straight["usage"]
    streamed = list(events(proxy.ask("/v1/completions", {**body, "stream": True}), None))
    assert "".join(e["choices"][0]["text"] for e in streamed if e != "[DONE]") == straight["choices"][0]["text"]
    assert streamed[-1] == "[DONE]"


def test_an_event_is_not_held_back_and_who_leaves_is_gone_for_the_server(
    served: Running, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(served, monkeypatch)
    body = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 900, "ignore_eos": True, "stream": True}
    before = served.stats()["generated_tokens"]
    first = proxy.ask("/v1/chat/completions", body)
    holds = proxy.connection
    assert next(events(first, 1))["choices"][0]["delta"]["role"] == "assistant"
    served.wait(lambda s: s["num_running_reqs"] == 1)
    second = proxy.ask("/v1/chat/completions", body)  # waits in the queue, so its one event fills no buffer
    assert next(events(second, 1))["choices"][0]["delta"]["role"] == "assistant"
    queued = proxy.connection
    whole = http.client.HTTPSConnection("127.0.0.1", proxy.tls, timeout=30, context=proxy.context)
    whole.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": False}).encode())
    served.wait(lambda s: s["num_running_reqs"] == 1 and s["num_queue_reqs"] == 2)
    for thing in (second, queued, whole, first, holds):
        thing.close()
    served.wait(lambda s: s["num_running_reqs"] == s["num_queue_reqs"] == 0)
    assert served.stats()["generated_tokens"] - before < 900, "none of the three was generated to its end"


def test_the_proxy_keeps_what_is_the_operators_and_what_is_too_large(proxy: Proxy) -> None:
    for path in ("/metrics", "/flush_cache", "/set_internal_state", "/server_info", "//flush_cache", "/metrics/"):
        assert proxy.ask(path).status == 404
    assert proxy.ask("/v1/completions", b" " * (16 * 2**20 + 1)).status == 413
    answer = proxy.ask("/v1/models", plain=True)
    assert answer.status == 301 and answer.headers["Location"] == "https://127.0.0.1/v1/models"


def test_a_page_of_the_proxy_s_own_name_passes_where_the_server_knows_that_name(served: Running, proxy: Proxy) -> None:
    name, path = "llm.example.com", "/v1/models"
    hosts = [name, f"{name}:{proxy.tls}"]
    assert [proxy.ask(path, headers={"Host": host}).status for host in hosts] == [403, 403], "not on loopback"
    auth, served.server.auth.names = served.server.auth, frozenset({name})
    try:
        for host in hosts:
            assert proxy.ask(path, headers={"Host": host, "Origin": f"https://{host}"}).status == 200
        other = {"Host": hosts[0], "Origin": f"https://{hosts[1]}"}
        assert proxy.ask(path, headers=other).status == 403, "another port is another origin"
        assert proxy.ask(path, headers={"Host": "evil.example", "Origin": "https://evil.example"}).status == 403
    finally:
        auth.names = frozenset()


# ---- the unit --------------------------------------------------------------------------------------------------------


def test_the_unit_is_one_and_starts_the_server(tmp_path: Path) -> None:
    text = (DEPLOY / "minispec.service").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE)
    python, *rest = shlex.split(command)
    assert rest[:2] == ["-m", "minispec.server"] and config_from_args(rest[2:]).host == "127.0.0.1"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "minispec.service"
    unit.write_text(text.replace(python, sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert done.returncode == 0 and "minispec.service" not in done.stderr, done.stderr
    unit.write_text(text.replace(python, sys.executable).replace("Type=exec", "Type=exact"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert "exact" in done.stderr, "a mistake is seen"


# ---- the Dockerfiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_dockerfile_names_what_there_is(name: str) -> None:
    lines = instructions((DEPLOY / name).read_text(encoding="utf-8"))
    known = {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "ENTRYPOINT", *PASSED_OVER}
    assert lines[0][0] == "FROM" and {line[0] for line in lines} <= known
    copied = [word for kind, rest in lines if kind == "COPY" for word in rest.split()[:-1]]
    assert set(copied) >= {"pyproject.toml", "minispec"} and all((ROOT / word).exists() for word in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert all(Path(file).name in copied for file in (project["readme"], *project["license-files"]))
    (extras,) = re.findall(r'pip install --no-cache-dir "\.\[([\w,]+)\]"', (DEPLOY / name).read_text())
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (torch,) = re.findall(r'"(torch[^"]*)"', (DEPLOY / name).read_text())
    assert torch in project["dependencies"], "the build that is installed first is the one that is kept"
    (entry,) = (json.loads(rest) for kind, rest in lines if kind == "ENTRYPOINT")
    assert entry[:3] == ["python", "-m", "minispec.server"] and config_from_args(entry[3:]).host == "0.0.0.0"
    kinds = [line[0] for line in lines]
    assert kinds.index("USER") < kinds.index("ENTRYPOINT") and "RUN" not in kinds[kinds.index("USER") :]


def test_continued_lines_and_comments_of_a_dockerfile_are_read() -> None:
    text = "# a\nFROM debian:bookworm-slim\nRUN a \\\n    && b \\\n    # said between\n    && c\n\nUSER x\n"
    assert instructions(text) == [("FROM", "debian:bookworm-slim"), ("RUN", "a && b && c"), ("USER", "x")]
