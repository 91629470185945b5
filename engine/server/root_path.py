"""Serve behind a proxy under a path of its own, whether it takes that path off or not."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kiln.engine.errors import ConfigError


def check_root_path(root: str, paths: Iterable[str]) -> None:
    """Raise ConfigError if a path of the server's own begins with the root path.

    It could not be told apart from a path that a proxy has put the root before.
    """
    for path in paths:
        literal = path.partition("{")[0]
        if f"{literal}/".startswith(f"{root}/") or (literal != path and root.startswith(literal)):
            raise ConfigError(
                f"--root-path {root[:80]!r}: is the beginning of Kiln's own path {path}; give the "
                "proxy another one"
            )


class RootPath:
    """Takes the root path off requests that still have it, and leaves the others alone.

    So the rest of the server sees its own paths. The root itself is redirected to the page below
    it, whose links are relative.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http":
            if scope["path"] == self._root and scope["method"] in ("GET", "HEAD"):
                query = scope.get("query_string", b"").decode("latin-1")
                place = f"{self._root}/" + (f"?{query}" if query else "")
                redirect = Response(status_code=307, headers={"Location": place})
                return await redirect(scope, receive, send)
            if scope["path"].startswith(f"{self._root}/"):
                raw = scope.get("raw_path") or b""
                path = scope["path"].removeprefix(self._root)
                scope = {**scope, "path": path, "raw_path": raw.removeprefix(self._root.encode())}
        await self._app(scope, receive, send)
