"""Who may do what: two keys, TLS, and which paths are open.

Without keys everything is open. With --api-key every path needs it, but those that `routes.py` says need none, decided
on the matched route and not on the path, which can be spelled in many ways. With --admin-api-key what changes the
server for others needs that one, and it opens all the rest too. Keys are compared in constant time and never logged.
"""

from __future__ import annotations

import hmac
import ssl
from typing import Any

from aiohttp import web

from minispec.config import Config
from minispec.request import RequestError
from minispec.serve.routes import ROUTES

KEYS = {route.path: route.key for route in ROUTES}  # /abort_request needs the admin key too, in part: see its handler


class Auth:
    """The keys and the certificate of a server."""

    def __init__(self, config: Config) -> None:
        self.key, self.admin_key = config.api_key, config.admin_api_key
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
        return self.admin_key is None or _is(http, self.admin_key)

    def forbidden(self, what: str) -> RequestError:
        """Return the error for who lacks the admin key."""
        return RequestError(f"{what} needs the admin key (--admin-api-key)", None, 403, "admin_key_needed")

    @web.middleware
    async def guard(self, http: web.Request, handler: Any) -> web.StreamResponse:
        """Let a request through that has the key its route needs; RequestError 401 or 403 for the others."""
        resource = http.match_info.route.resource
        path = "" if resource is None else resource.canonical
        needed = KEYS.get(path, "user")
        if self.key is not None and needed is not None and not (_is(http, self.key) or _is(http, self.admin_key)):
            raise RequestError("a valid API key is needed: Authorization: Bearer KEY", None, 401, "invalid_api_key")
        if needed == "admin" and not self.is_admin(http):
            raise self.forbidden(path)
        return await handler(http)


def _is(http: web.Request, key: str | None) -> bool:
    """Return whether a request bears this key; nobody bears None."""
    given = http.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    return key is not None and hmac.compare_digest(given, b"Bearer " + key.encode("utf-8"))


def _no_password() -> str:
    """Say that there is none, where OpenSSL would ask the terminal."""
    raise ValueError("the key is encrypted, and no password can be given")
