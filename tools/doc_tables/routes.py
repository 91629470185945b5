"""The table of routes, from the server's OpenAPI document."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, cast

from doc_tables.markdown import code, table
from kiln.engine.server.app import create_app
from kiln.engine.server.middleware import OPEN_PATHS
from kiln.engine.server.serving import ServerSettings


@cache
def paths() -> dict[str, dict[str, Any]]:
    """Return path -> method -> what the OpenAPI document says of it."""
    engine = cast(Any, SimpleNamespace(stats=dict, is_ready=True))
    found: dict[str, dict[str, Any]] = create_app(
        engine, None, ServerSettings(("model",))
    ).openapi()
    return cast(dict[str, dict[str, Any]], found["paths"])


def routes() -> str:
    """Return every route, what it does, and whether it is open without the API key."""
    rows = [
        (code(f"{', '.join(methods).upper()} {path}"), _about(methods), _key(path))
        for path, methods in paths().items()
    ]
    return table(("route", "what it does", "needs the key"), rows)


def _about(methods: dict[str, Any]) -> str:
    about: str = next(iter(methods.values())).get("description", "")
    return about.split("\n\n")[0].replace("``", "`")


def _key(path: str) -> str:
    return "no" if path in OPEN_PATHS else "yes"
