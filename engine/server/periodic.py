"""Call a function again and again beside the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def repeated(call: Callable[[], None], seconds: float) -> AsyncIterator[None]:
    """Call ``call`` every ``seconds`` on the event loop while the block runs.

    An error that it raises is logged, and it is called again.
    """

    async def run() -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                call()
            except Exception:
                logger.exception("%r failed; it is tried again in %g s", call, seconds)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
