"""Refuse what a page of another site can make a browser send to a server that asks for no key.

DNS rebinding: a page's own name may come to mean this machine, and then the page is of the same
origin as the server. Its requests carry the page's name in Host, so only known names are served.
An address there is fine: no name was looked up.

Simple requests: a browser sends some without asking the server before. A POST with a JSON body is
none of them, and the page reads no answer; but a POST without a body would act.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kiln.engine.server.errors import ApiError
from kiln.engine.server.middleware import ErrorResponse

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")
_SAFE = ("GET", "HEAD", "OPTIONS")


class KnownHosts:
    """Serves requests whose Host is an address, or one of ``hosts``, such as ``*.example.org``.

    ``origins``: of pages of other sites that may send simple requests; ``*``: all.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset(host for host in hosts if not host.startswith("*"))
        self._endings = tuple(host[1:] for host in hosts if host.startswith("*."))
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or return 421 or 403."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        error = self._error(Headers(scope=scope), scope["method"])
        app = self._app if error is None else ErrorResponse(error)
        await app(scope, receive, send)

    def _error(self, headers: Headers, method: str) -> ApiError | None:
        host = headers.get("host")
        if host is None:  # HTTP/1.0, which no browser sends
            return None
        if not self._knows(host):
            message = (
                f"Host {host[:80]!r} is not a name of this server: start it with --allowed-hosts "
                "and the name, or ask for 127.0.0.1 or localhost"
            )
            return ApiError(421, message, code="unknown_host")
        origin = headers.get("origin")
        if origin is None or method in _SAFE or "content-type" in headers:
            return None
        if {origin, "*"} & self._origins or urlsplit(origin).netloc == host:
            return None
        message = f"Origin {origin[:80]!r} may not send this: --allowed-origins allows pages"
        return ApiError(403, message, code="origin_not_allowed")

    def _knows(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        name = "" if found is None else found[1].lower().removesuffix(".")
        if name in self._hosts or name.endswith(self._endings):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True
