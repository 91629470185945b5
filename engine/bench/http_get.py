"""A GET request to a server that is measured."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

# As the load does, it goes to the server itself, whatever proxy the environment names.
_DIRECT = urllib.request.ProxyHandler({})


def get(url: str, api_key: str | None = None, timeout: float = 30.0) -> bytes:
    """Return the body of an answer. Raises OSError, also on a status of 400 and more."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.build_opener(_DIRECT).open(request, timeout=timeout) as answer:
        return bytes(answer.read())


def get_json(url: str, api_key: str | None = None) -> Any:
    """Return the JSON of an answer. Raises OSError and ValueError."""
    return json.loads(get(url, api_key))
