"""The address of a server, as people write it after ``--url``."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from kiln.engine.errors import ConfigError

_HAS_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_API = re.compile(r"/v1(/.*)?$")


def server_url(text: str) -> str:
    """Return ``http://host:port``, with what is before ``/v1`` if the text has a path.

    http is meant if there is no scheme, and this machine if there is a port alone. What follows
    ``/v1``, such as the path of a route, is left out. Raises ConfigError.
    """
    given = text.strip()
    if given.removeprefix(":").isdecimal():
        given = f"localhost:{given.removeprefix(':')}"
    if not _HAS_SCHEME.match(given):
        given = f"http://{given}"
    try:
        parts = urlsplit(given)
        parts.port  # noqa: B018 (it checks)
    except ValueError as error:
        raise _wrong(text, str(error)) from error
    if parts.scheme not in ("http", "https"):
        raise _wrong(text, f"{parts.scheme} is neither http nor https")
    if not parts.hostname or re.search(r"\s", given):
        raise _wrong(text, "it names no host")
    if parts.query:
        raise _wrong(text, "a query has no meaning here")
    path = _API.sub("", parts.path.rstrip("/")).rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"--url {text[:80]!r}: {why}; want an address such as localhost:8000, http://host:8000/v1 "
        "or http://[::1]:8000"
    )
