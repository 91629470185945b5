"""The log of a drain says how many requests were in flight, and what became of them."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from kiln.engine.server.run import drain


@pytest.mark.parametrize("end", ["finished", "timeout", "second signal"])
def test_a_drain_is_logged_with_its_requests(caplog, end):
    async def run():
        release, second = asyncio.Event(), asyncio.Event()
        requests = [asyncio.create_task(release.wait()) for _ in range(2)]
        requests.append(asyncio.create_task(asyncio.sleep(0)))
        serving = asyncio.create_task(asyncio.wait(requests))
        state = SimpleNamespace(tasks=set(requests))
        if end != "timeout":
            {"finished": release, "second signal": second}[end].set()
        timeout = 0.2 if end == "timeout" else 600.0
        await drain(SimpleNamespace(server_state=state), serving, second, timeout)
        release.set()
        await serving

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    begun, ended = [record.getMessage() for record in caplog.records]
    assert "3 requests in flight have" in begun
    assert "3 requests have finished, 0 were" in ended if end == "finished" else "2 were" in ended
