"""Serve the pages: each .html file of this folder, and each file below ``static``.

They hold nothing secret, so they are served without the API key. A page asks its user for the key,
and sends it with each request of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_STATIC = sorted(path for path in (_FOLDER / "static").rglob("*.*") if path.suffix in _TYPES)
# Every path, and its file. The chat is the page of the server itself.
FILES: Mapping[str, Path] = MappingProxyType(
    {f"/{path.stem}": path for path in sorted(_FOLDER.glob("*.html")) if path.stem != "chat"}
    | {f"/{path.relative_to(_FOLDER).as_posix()}": path for path in _STATIC}
    | {"/": _FOLDER / "chat.html"}
)
# A page may load nothing from other hosts and connect only to this server.
# Scripts and styles are files of this folder, never text in a page. No script may turn text into
# HTML (trusted types), so what a model writes cannot run.
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def pages_router(*, needs_key: bool) -> APIRouter:
    """Return the routes of all pages, which ask for the API key at once if the server has one."""
    router = APIRouter()
    for path, file in FILES.items():
        router.add_api_route(path, _show(file, needs_key), include_in_schema=False)
    return router


def _show(file: Path, needs_key: bool) -> Callable[[Request], Awaitable[Response]]:
    body, kind = file.read_bytes(), _TYPES[file.suffix]
    if needs_key and file.suffix == ".html":
        body = body.replace(b"<html ", b"<html data-needs-key ", 1)
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {
        "Content-Type": kind,
        "ETag": tag,
        "Content-Security-Policy": _POLICY,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers)

    return show
