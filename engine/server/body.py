"""Read and validate a request body: content type, number of values, then fields.

Validating millions of values in a body of a few MiB takes seconds, during which the interpreter
runs nothing else. So objects, lists and keys are first counted in the raw bytes and limited. Lists
of numbers are cheap and not limited here: a prompt may be long.
"""

from __future__ import annotations

import logging
import re
from typing import Literal, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from kiln.engine.server.errors import ApiError, from_validation, unknown_fields
from kiln.engine.server.fields import StrictModel
from kiln.engine.server.threads import LARGE, Threads

MAX_CONTAINERS = 16_384  # objects and lists in one body, such as messages and their parts
MAX_KEYS = 65_536  # keys of all objects in one body
_JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;|$)", re.IGNORECASE)

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=StrictModel)


async def read_body(
    request: Request, model: type[Body], threads: Threads, *, ignore_unknown: bool = False
) -> Body:
    """Parse and check a body. Raises ApiError (400, 408, 413, 415), and ClientDisconnect.

    ``ignore_unknown``: an unknown field is a line in the log, not an error.
    """
    content_type = request.headers.get("content-type", "")
    if not _JSON_TYPE.match(content_type):
        shown = repr(content_type[:80]) if content_type else "not set"
        raise ApiError(415, f"Content-Type is {shown}: send application/json")
    data = await request.body()

    def parse(extra: Literal["ignore"] | None = None) -> Body:
        check_shape(data)
        try:
            return model.model_validate_json(data, extra=extra)
        except ValidationError as error:
            if ignore_unknown and extra is None and (unknown := unknown_fields(error)):
                logger.warning("%s: ignored unknown fields: %s", request.url.path, unknown)
                return parse("ignore")
            raise from_validation(error, model) from None

    return parse() if len(data) < LARGE else await threads.run(parse, len(data))


def check_shape(data: bytes) -> None:
    """Reject a body of too many objects, lists or keys. Raises ApiError 400."""
    if not _exceeds(data):
        return
    # Brackets inside strings do not count. With escapes removed, each quote toggles between inside
    # and outside of a string.
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if _exceeds(b"".join(unescaped.split(b'"')[::2])):
        raise ApiError(
            400,
            f"the body has too many values: at most {MAX_CONTAINERS} objects and lists, and "
            f"{MAX_KEYS} keys",
        )


def _exceeds(data: bytes) -> bool:
    containers = data.count(b"{") + data.count(b"[")
    return containers > MAX_CONTAINERS or data.count(b":") > MAX_KEYS
