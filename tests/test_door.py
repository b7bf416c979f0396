"""Which web pages reach a server, under which names, and with which keys: over a socket, as browsers send it."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import compression_utils
from test_server import Running, no_model

from minispec.config import Config
from minispec.serve import bodies
from minispec.serve.routes import tidied

NEEDS = "needs pip install 'minispec[compression]'"
KEY = {"Authorization": "Bearer secret"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PLAIN = {"Content-Type": "text/plain"}  # what a page may send without asking first
IMAGE = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
ACTING = [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"}),
          ("/abort_request", {"abort_all": True}), ("/flush_cache", {}), ("/set_internal_state", {"server_args": {}}),
          ("/flush_cache", None), ("/health", None), ("/v1/responses", {"input": "a"}), ("/nowhere", None)]  # fmt: skip


def server(**flags: Any) -> Running:
    """Return a server whose model is not asked: what gets past the door meets another error than 403, or the page."""
    return Running(Config(port=0, log_level="error", **flags), no_model)


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with server() as running:
        yield running


def passes(running: Running, headers: dict[str, str], path: str = "/v1/models", body: Any = None) -> bool:
    """Return whether a request gets past the door; a refusal must be an error object that names the flag."""
    status, answer, _ = running.call(path, body, None, headers)
    if status != 403:
        return True
    flag = "--allowed-hosts" if answer["error"]["code"] == "host_not_allowed" else "--cors-origins"
    assert answer["error"]["type"] == "permission_error" and flag in answer["error"]["message"], answer
    return False


@pytest.mark.parametrize(("path", "body"), ACTING)
def test_another_site_s_page_reaches_nothing(plain: Running, path: str, body: Any) -> None:
    own = {"Origin": f"http://127.0.0.1:{plain.port}", "Sec-Fetch-Site": "same-origin"}
    assert passes(plain, {}, path, body) and passes(plain, own, path, body)
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://localhost:9", "file://", "", "a b"):
        assert not passes(plain, {"Origin": origin, **PLAIN}, path, body), origin
    assert not passes(plain, {"Host": f"evil.example:{plain.port}", "Origin": f"http://evil.example:{plain.port}"},
                      path, body)  # fmt: skip
    for site in ("cross-site", "same-site"):
        assert not passes(plain, {"Sec-Fetch-Site": site, **IMAGE}, path, body)
    assert not passes(plain, LINK, path, body), "a link may lead to the page alone"


def test_a_browser_that_does_not_say_which_page_asks_empties_no_cache_by_an_image() -> None:
    """Sec-Fetch headers go to HTTPS and loopback alone; a page chooses what its request accepts and refers to."""
    browser = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/149.0.0.0",
               "Host": "box.lan:30000", "Accept": "*/*"}  # fmt: skip
    with server(host="0.0.0.0") as running:
        for path in ("/flush_cache", "//flush_cache/"):
            assert not passes(running, browser, path)
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
            connection.request("HEAD", path, headers=browser)
            assert connection.getresponse().status == 403
            connection.close()
            for own in ({}, {"Origin": "http://box.lan:30000"}, {"Sec-Fetch-Site": "none"}):
                agent = {} if own else {"User-Agent": "python-requests/2.34.0"}
                assert passes(running, {**browser, **agent, **own}, path), own
            assert passes(running, {**browser, "Origin": "http://box.lan:30000"}, path, {})
        for path in ("/health", "/v1/models", "/", "/server_info"):
            assert passes(running, browser, path), "what only tells is no harm"
    with server(host="0.0.0.0", api_key="secret") as running:
        assert passes(running, {**browser, **KEY}, "/flush_cache")


def test_a_link_to_the_page_may_be_followed_and_the_page_may_ask(plain: Running) -> None:
    for site in ("cross-site", "same-site", "none"):
        assert plain.call("/", headers={**LINK, "Sec-Fetch-Site": site})[0] == 200
    assert not passes(plain, {"Sec-Fetch-Site": "cross-site", **IMAGE}, "/")
    assert passes(plain, {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, "/health")  # typed by hand
    assert passes(plain, {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"})


def test_names_are_addresses_and_localhost_on_loopback_whatever_the_port(plain: Running) -> None:
    for host in ("127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:30000", "192.168.1.5:80", "[fe80::1]"):
        assert passes(plain, {"Host": host}), host
    for host in ("evil.example", "x", "localhost.evil.example:30000", "127.0.0.1.evil.example", "[::1", "a:b:c", "2e5"):
        assert not passes(plain, {"Host": host}), host
    with socket.create_connection(("127.0.0.1", plain.port), timeout=10) as old:  # without a Host
        old.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert old.recv(100).startswith(b"HTTP/1.0 503 ")


def test_named_origins_and_hosts_pass_and_no_others() -> None:
    with server(cors_origins="https://app.example, app://obsidian.md", allowed_hosts="llm.example.com, Box") as running:
        for origin in ("https://app.example", "app://obsidian.md"):
            assert passes(running, {"Origin": origin, "Sec-Fetch-Site": "cross-site"}, "/generate", {"text": "a"})
        for origin in ("https://app.example:8443", "http://app.example", "null", "https://evil.example"):
            assert not passes(running, {"Origin": origin})
        for host in ("llm.example.com", "llm.example.com:8443", "box", "127.0.0.1"):
            assert passes(running, {"Host": host}), host
        assert not passes(running, {"Host": "evil.example"})
        behind = {"Host": "llm.example.com", "Origin": "https://llm.example.com"}  # of a proxy that speaks TLS
        assert passes(running, behind) and passes(running, {**behind, "Host": "llm.example.com:443"})
        assert not passes(running, {**behind, "Origin": "https://llm.example.com:8443"})
    with server(cors_origins="*", allowed_hosts="*") as running:
        assert passes(running, {"Origin": "null"}) and passes(running, {"Origin": "x://y", "Host": "any.example"})
    with server(host="0.0.0.0") as running:
        assert passes(running, {"Host": "box.lan"}) and not passes(running, {"Origin": "https://evil.example"})
    with server(host="0.0.0.0", allowed_hosts="box.lan") as running:
        assert passes(running, {"Host": "box.lan:30000"}) and not passes(running, {"Host": "evil.example"})
    for wrong in ("https://llm.example.com", "box:80", "a b"):
        with pytest.raises(ValueError, match="--allowed-hosts must be"):
            Config(allowed_hosts=wrong)


def test_who_has_a_key_passes_whatever_else_the_request_says() -> None:
    foreign = {"Origin": "https://evil.example", "Host": "evil.example", "Sec-Fetch-Site": "cross-site"}
    with server(api_key="secret", admin_api_key="root") as running:
        assert passes(running, {**foreign, **KEY}) and passes(running, {**foreign, "x-api-key": "root"})
        assert running.call("/v1/models", headers=foreign)[0] == 401
        assert not passes(running, foreign, "/health") and not passes(running, foreign, "/")
        assert not passes(running, {**foreign, "Authorization": "Bearer wrong"}, "/health")
    with server(admin_api_key="root") as running:
        assert not passes(running, foreign) and passes(running, {**foreign, "api-key": "root"}, "/flush_cache", {})
        assert json.dumps(running.call("/flush_cache", {}, headers=foreign)[1]).count("--admin-api-key")


def test_a_key_is_known_in_every_spelling_that_clients_have_and_in_no_other() -> None:
    with server(api_key="s\xe9cret") as running:
        for name, value in (("Authorization", "Bearer s\xe9cret"), ("Authorization", "bearer s\xe9cret"),
                            ("Authorization", "BEARER   s\xe9cret  "), ("x-api-key", "s\xe9cret"),
                            ("api-key", "s\xe9cret"), ("X-Api-Key", " s\xe9cret ")):  # fmt: skip
            assert running.call("/v1/models", headers={name: value.encode()})[0] == 503, (name, value)
        both = {"Authorization": "Bearer of another gateway", "x-api-key": "s\xe9cret".encode()}
        assert running.call("/v1/models", headers=both)[0] == 503
        for name, value in (("Authorization", "s\xe9cret"), ("Authorization", "Basic s\xe9cret"), ("api-key", ""),
                            ("Authorization", "Bearers\xe9cret"), ("Authorization", "Bearer s\xe9cret x"),
                            ("x-api-key", "Bearer s\xe9cret"), ("x-key", "s\xe9cret")):  # fmt: skip
            assert running.call("/v1/models", headers={name: value.encode()})[0] == 401, (name, value)


def brotli(raw: bytes) -> bytes:
    return pytest.importorskip("brotli", reason=NEEDS).compress(raw, quality=5)


def zstd(raw: bytes) -> bytes:
    return pytest.importorskip("backports.zstd", reason=NEEDS).compress(raw)


PACKED = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "br": brotli, "zstd": zstd}


@pytest.mark.parametrize("encoding", PACKED)
def test_a_body_is_decompressed_as_far_as_a_body_may_be_long(plain: Running, encoding: str) -> None:
    pack: Callable[[bytes], bytes] = PACKED[encoding]
    ask = lambda raw, name=encoding: plain.call("/abort_request", raw, None, {"Content-Encoding": name})  # noqa: E731
    body = json.dumps({"rid": "nobody"}).encode()
    for raw, name in ((pack(body), encoding), (pack(body), encoding.upper()), (body, "identity"), (body, "")):
        assert ask(raw, name)[0] == 200
    whole = body + b" " * (bodies.MAX_BODY - len(body))
    assert ask(pack(whole))[0] == 200
    for longer in (whole + b" ", whole * 8):
        assert len(packed := pack(longer)) < 2**18
        status, answer, _ = ask(packed)
        assert status == 413 and "decompressed" in answer["error"]["message"]
    for broken in (b"junk" * 5, pack(body)[: len(pack(body)) // 2], b""):
        status, answer, _ = ask(broken)
        assert status == 400 and answer["error"]["message"], broken


def test_what_cannot_be_decompressed_is_a_415_that_says_what_can(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression_utils, "HAS_BROTLI", False)
    monkeypatch.setattr(compression_utils, "HAS_ZSTD", False)
    for encoding, told in (("br", "minispec[compression]"), ("zstd", "minispec[compression]"), ("gzip, br", "deflate"),
                           ("compress", "deflate"), ("aws-chunked", "deflate")):  # fmt: skip
        status, answer, headers = plain.call("/abort_request", b"{}", None, {"Content-Encoding": encoding})
        assert status == 415 and told in answer["error"]["message"], answer
        assert headers.get_content_type() == "application/json"


def test_a_path_spelled_a_little_wrong_is_answered_where_it_stands() -> None:
    with server(api_key="secret", served_model_name="org/tiny") as running:
        for path in ("/health/", "//health", "///health//", "//", "/health_generate/"):
            assert running.call(path)[0] == running.call(tidied(path))[0] in (200, 503), path  # no key is needed
        chats = ("/v1/v1/chat/completions", "//v1/chat/completions", "/v1//chat/completions/", "/v1/chat//completions",
                 "/v1/v1/v1//chat/completions/")  # fmt: skip
        for path in (*chats, "/generate/", "/v1/v1/responses", "/v1/models/", "/v1/models//org/tiny/", "/v1/v1/loads/"):
            body = {} if path in chats or "gen" in path or "resp" in path else None
            assert running.call(path, body)[0] == 401, path
            status, answer, _ = running.call(path, body, headers=KEY)
            assert status == 503 and answer["error"]["code"] == "not_ready", path  # and no redirect
        for path, status in (("/v1/models/other/", 404), ("/v1/v2/models", 404), ("/v1/v1", 404), ("/healthy/", 404)):
            assert running.call(path, headers=KEY)[0] == status, path
        status, _, headers = running.call("/v1/v1/models/", {}, "POST", KEY)
        assert status == 405 and "GET" in headers["Allow"]
