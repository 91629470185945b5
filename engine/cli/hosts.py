"""The names and the path of the server, by ``--allowed-hosts`` and ``--root-path``."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from kiln.engine.cli.listen import is_loopback
from kiln.engine.errors import ConfigError

_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_ROOT = re.compile(r"(/[\w.~-]+)+", re.ASCII)


def read_hosts(given: Sequence[str] | None, host: str, *, has_key: bool) -> tuple[str, ...] | None:
    """Return the names that are served; None: all. Raises ConfigError.

    Without the flag a server that asks for a key, or that other machines can reach, serves all.
    """
    if given is None and (has_key or not is_loopback(host)):
        return None
    names = [name.lower() for name in given or ()]
    for name in names:
        if name != "*" and not _NAME.fullmatch(name) and not _is_address(name):
            raise ConfigError(
                f"--allowed-hosts {name[:80]!r}: want names such as api.example.org or "
                "*.example.org, without scheme, port and path, or '*' for all"
            )
    return None if "*" in names else ("localhost", host.lower(), *names)


def read_root_path(given: str | None) -> str:
    """Return a root path without a slash at its end; empty: there is none. Raises ConfigError."""
    root = (given or "").rstrip("/")
    if root and (not _ROOT.fullmatch(root) or {".", ".."} & set(root.split("/"))):
        raise ConfigError(
            f"--root-path {root[:80]!r}: want a path such as /kiln, of letters, digits and -._~"
        )
    return root


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
