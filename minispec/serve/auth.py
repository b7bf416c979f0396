"""Who may do what: two keys, TLS, which paths are open, and which web pages may ask and read.

Without keys everything is open to programs. With --api-key every path needs it, but those that `routes.py` says need
none, decided on the matched route and not on the path, which can be spelled in many ways. With --admin-api-key a
request that changes the server for others needs the admin key, which opens all other paths too. Keys are compared in
constant time and never logged.

A browser sends requests for whatever page is open in it, and does not need to show the page the answer for the request
to act. So who has no key is asked where the request comes from: `Auth._check_page` has the rule.
"""

from __future__ import annotations

import hmac
import re
import ssl
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from minispec.config import Config
from minispec.request import RequestError, short
from minispec.serve.routes import ROUTES

KEYS = {route.path: route.key for route in ROUTES}  # /abort_request needs the admin key too, in part: see its handler
ACTING = {route.path for route in ROUTES if route.method != "get"}  # though some of them may be asked by GET too
PORTS = {"http": 80, "https": 443}  # which browsers leave out of Origin and Host


class Auth:
    """The keys and the certificate of a server."""

    def __init__(self, config: Config) -> None:
        self.key, self.admin_key = config.api_key, config.admin_api_key
        self.origins, self.names = config.origins, config.hosts
        self.tls: ssl.SSLContext | None = None
        if config.ssl_certfile is not None:  # the key is given too; `Config` saw to it
            self.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            try:
                self.tls.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _no_password)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise ValueError(f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile} are no "
                                 f"certificate with its key, in PEM form: {error}") from None  # fmt: skip

    def is_admin(self, http: web.Request) -> bool:
        """Return whether a request has the admin key, or there is none to have."""
        return self.admin_key is None or _bears(http, self.admin_key)

    def forbidden(self, what: str) -> RequestError:
        """Return the error for who lacks the admin key."""
        return RequestError(f"{what} needs the admin key (--admin-api-key)", None, 403, "admin_key_needed")

    @web.middleware
    async def guard(self, http: web.Request, handler: Any) -> web.StreamResponse:
        """Let a request through that has the key its route needs; RequestError 401 or 403 for the others."""
        resource = http.match_info.route.resource
        path = "" if resource is None else resource.canonical
        needed, known = KEYS.get(path, "user"), _bears(http, self.key) or _bears(http, self.admin_key)
        if self.key is not None and needed is not None and not known:
            raise RequestError("a valid API key is needed: Authorization: Bearer KEY", None, 401, "invalid_api_key")
        if needed == "admin" and not self.is_admin(http):
            raise self.forbidden(path)
        if not known:
            self._check_page(http, path)
        return await handler(http)

    @web.middleware
    async def preflight(self, http: web.Request, handler: Any) -> web.StreamResponse:
        """Answer a browser that asks before it sends what a page wants; it asks without a key."""
        if http.method != "OPTIONS" or "Access-Control-Request-Method" not in http.headers or not self.origins:
            return await handler(http)
        headers = http.headers.get("Access-Control-Request-Headers", "")
        return web.Response(status=204, headers={
            "Access-Control-Allow-Methods": "GET, POST, PUT", "Access-Control-Allow-Headers": headers,
            "Access-Control-Max-Age": "600",
        })  # fmt: skip

    async def let_read(self, http: web.Request, response: web.StreamResponse) -> None:
        """Let pages of the origins in --cors-origins read the response; browsers keep it from all others."""
        origin, allowed = http.headers.get("Origin"), self.origins
        if "*" in allowed or origin in allowed:
            response.headers["Access-Control-Allow-Origin"] = "*" if "*" in allowed else str(origin)
            response.headers["Access-Control-Expose-Headers"] = "x-request-id, Retry-After"
        if allowed:
            response.headers["Vary"] = "Origin"

    def _check_page(self, http: web.Request, path: str) -> None:
        """Raise RequestError 403 for what a browser sends for another site's page; no other client sends its headers.

        An Origin decides: the server's own, or one of --cors-origins. A request for an image or a form's first page has
        no Origin, but says that it crosses sites; only a link to the page at `/` may. The name in Host must be the
        server's too, since a page may let its own name point at this address (DNS rebinding), which makes it the
        server's own page.

        Browsers send these headers only over HTTPS and to loopback addresses. Over plain HTTP elsewhere an image in a
        page looks like the GET of a program. So there a browser, known by its User-Agent, may not ask by GET for what
        acts.
        """
        host, origin = http.headers.get("Host", ""), http.headers.get("Origin")
        site, linked = http.headers.get("Sec-Fetch-Site"), http.headers.get("Sec-Fetch-Mode") == "navigate"
        if not self._may_be_called(host):
            raise RequestError(f"Host {short(host)} is none of this server's names: IP addresses, localhost and those "
                               "in --allowed-hosts", None, 403, "host_not_allowed")  # fmt: skip
        if origin is not None and not self.origins & {origin, "*"} and not _is_own(origin, host):
            raise RequestError(f"web pages of the origin {short(origin)} may not call this server; --cors-origins "
                               "lists those that may", None, 403, "origin_not_allowed")  # fmt: skip
        if origin is None and site in ("cross-site", "same-site") and not (linked and path == "/"):
            raise RequestError(f"a web page of another site (Sec-Fetch-Site: {site}) may not call this server without "
                               "an Origin that --cors-origins lists", None, 403, "origin_not_allowed")  # fmt: skip
        unsaid, browser = origin is None and site is None, http.headers.get("User-Agent", "").startswith("Mozilla/")
        if unsaid and browser and http.method in ("GET", "HEAD") and path in ACTING:
            raise RequestError(f"{path} takes POST alone from a browser that does not say which page asks (no Origin, "
                               "as --cors-origins lists them, and no Sec-Fetch-Site)", None, 403,
                               "origin_not_allowed")  # fmt: skip

    def _may_be_called(self, host: str) -> bool:
        """Return whether a Host header has one of the server's names, whatever its port."""
        if self.names is None or not host:
            return True
        name = re.sub(r":\d*$", "", host).lower()
        if name == "localhost" or name in self.names:
            return True
        try:
            return bool(ip_address(name[1:-1] if name.startswith("[") else name))
        except ValueError:
            return False


def _is_own(origin: str, host: str) -> bool:
    """Return whether Origin and Host have the same name and port; the scheme may be that of a proxy."""
    try:
        page = urlsplit(origin)
        ours = urlsplit(f"{page.scheme}://{host}")
        port = PORTS.get(page.scheme)
        return (page.hostname, page.port or port) == (ours.hostname, ours.port or port) and page.hostname is not None
    except ValueError:  # no port, or half an IPv6 address
        return False


def _bears(http: web.Request, key: str | None) -> bool:
    """Return whether a request bears this key; nobody bears None."""
    return key is not None and any(hmac.compare_digest(given, key.encode("utf-8")) for given in _keys(http))


def _keys(http: web.Request) -> Iterator[bytes]:
    """Yield the keys that a request bears: a bearer token, or in a header of Anthropic's or Azure's."""
    scheme, _, token = http.headers.get("Authorization", "").strip().partition(" ")
    tokens = [token.strip()] if scheme.lower() == "bearer" else []
    for given in (*tokens, http.headers.get("x-api-key"), http.headers.get("api-key")):
        if given is not None:
            yield given.encode("utf-8", "surrogateescape")


def _no_password() -> str:
    """Say that there is none, where OpenSSL would ask the terminal."""
    raise ValueError("the key is encrypted, and no password can be given")
