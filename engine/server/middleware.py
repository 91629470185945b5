"""Middleware for every request: request ids, the API key, and limits on headers and body.

Plain ASGI, because Starlette's BaseHTTPMiddleware hides disconnects from the routes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kiln.engine.distributed.logs import note_request_id
from kiln.engine.server.anthropic import errors as anthropic
from kiln.engine.server.errors import ApiError
from kiln.engine.server.pages import routes as pages
from kiln.engine.server.responses import encode_json

# Exact paths, not prefixes.
OPEN_PATHS = frozenset(
    ("/health", "/health/live", "/health/ready", "/ping", "/version", *pages.FILES)
)
MAX_HEADER_BYTES = 16_384
MAX_HEADERS = 64
BODY_SECONDS = 60.0  # from the headers to the end of the body
_KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ErrorResponse(Response):
    """An error as a response, in the envelope of the path's API.

    It leaves the error in the request's state, for the log.
    """

    def __init__(self, error: ApiError) -> None:
        body = encode_json(error.envelope())
        super().__init__(body, error.status, error.headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        scope.setdefault("state", {})["error"] = self._error
        if anthropic.is_own(scope["path"]):
            self.status_code = anthropic.status(self._error)
            self.body = encode_json(anthropic.envelope(self._error))
            self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


class RequestIds:
    """Assigns each request an id and returns it; a valid id from the client is kept."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        note_request_id(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKey:
    """Rejects requests without the key, except on the paths for probes and of the pages.

    The key is accepted as ``Authorization: Bearer KEY``, as the password of Basic,
    and as ``x-api-key`` or ``api-key``, for clients of Anthropic's and Azure's APIs. One of them is
    enough. Its digests are compared in constant time, so the key may hold any bytes.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or return 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(scope):
            return await self._app(scope, receive, send)
        error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        response = ErrorResponse(error)
        # Not Basic: browsers would ask for a password before a page could ask for the key.
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        tokens = (_token(name, value) for name, value in scope["headers"] if name in _KEY_HEADERS)
        # A list, so that the time does not tell which of several headers has the key.
        return any([self._is_key(token) for token in tokens if token is not None])

    def _is_key(self, token: bytes) -> bool:
        return hmac.compare_digest(hashlib.sha256(token).digest(), self._digest)


def _token(header: bytes, value: bytes) -> bytes | None:
    """Return what a header offers as the key; None for another scheme."""
    if header != b"authorization":
        return value.strip()
    scheme, _, token = value.partition(b" ")
    token = token.strip()
    if scheme.lower() == b"bearer":
        return token
    if scheme.lower() != b"basic":
        return None
    try:
        return base64.b64decode(token, validate=True).partition(b":")[2]
    except binascii.Error:
        return None


class Limits:
    """Rejects oversized headers, and oversized or slow bodies before they are parsed.

    The HTTP parser limits headers that arrive in several pieces, but not in one.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, body_seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or return 431, 413 or 408."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_HEADER_BYTES or len(scope["headers"]) > MAX_HEADERS:
            error = ApiError(
                431, f"the headers are more than {MAX_HEADER_BYTES} bytes or {MAX_HEADERS}"
            )
            return await ErrorResponse(error)(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdigit() or int(declared) > self._max_bytes:
            return await ErrorResponse(self._too_large())(scope, receive, send)
        left, complete = self._max_bytes, False
        deadline = asyncio.get_running_loop().time() + self._body_seconds

        async def receive_bounded() -> Message:
            nonlocal left, complete
            if complete:
                return await receive()  # a later disconnect
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body took over {self._body_seconds:g} s to arrive"
                raise ApiError(408, late, code="timeout") from None
            complete = not message.get("more_body", False)
            left -= len(message.get("body", b""))
            if left < 0:  # a chunked body declares no length
                raise self._too_large()
            return message

        await self._app(scope, receive_bounded, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes: send less")
