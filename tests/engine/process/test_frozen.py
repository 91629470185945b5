"""An engine that is stopped or makes no step is as good as dead; one that is busy is not."""

import asyncio
import os
import signal

import pytest
from fake_engine import (
    BURN,
    HANG,
    SILENT,
    SLEEP,
    collect,
    collect_tokens,
    request,
    spawn,
    until,
)

from kiln.engine.distributed.held_for import HeldFor
from kiln.engine.errors import RequestLostError
from kiln.engine.process.client import EngineClient


def with_limits(test, **limits):
    """Run an async test with a ready client of an engine; return the exit code of its process."""

    async def run():
        process = spawn()
        async with asyncio.timeout(120), EngineClient(process, **limits) as client:
            await client.wait_ready()
            await test(client, process)
        assert client.has_ended
        return process.exit_code

    return asyncio.run(run())


def test_a_stopped_engine_is_as_good_as_dead():
    async def test(client, process):
        stream = client.stream(request("a", SLEEP, max_tokens=500))
        await anext(stream)
        os.kill(process.child.pid, signal.SIGSTOP)
        with pytest.raises(RequestLostError, match=r"was stopped \(SIGSTOP\) for 0.5 s"):
            await collect(stream)
        assert not client.is_alive

    assert with_limits(test, stopped_limit=0.5) == -signal.SIGKILL


def test_an_engine_that_is_stopped_for_a_moment_now_and_then_is_not_dead():
    async def test(client, process):
        stream = client.stream(request("a", SLEEP, max_tokens=60))  # 3 s of steps
        for _ in range(6):
            await anext(stream)
            os.kill(process.child.pid, signal.SIGSTOP)
            await asyncio.sleep(0.25)
            os.kill(process.child.pid, signal.SIGCONT)
            await asyncio.sleep(0.25)
        assert client.is_ready
        await collect(stream)

    assert with_limits(test) == 0


def test_an_engine_with_requests_that_makes_no_step_is_as_good_as_dead():
    async def test(client, process):
        beside = asyncio.create_task(collect(client.stream(request("b", SLEEP, max_tokens=500))))
        with pytest.raises(RequestLostError, match=r"has made no step for 0\.5 s"):
            await collect(client.stream(request("a", HANG)))
        with pytest.raises(RequestLostError):
            await beside

    assert with_limits(test, stall_limit=0.5) == -signal.SIGKILL


@pytest.mark.parametrize("prompt", [BURN, SILENT])
def test_long_steps_of_a_cpu_and_steps_without_a_token_are_work(prompt):
    """A long prompt on a CPU; and one in many steps, of which the worker tells."""

    async def test(client, process):
        stream = client.stream(request("a", prompt, max_tokens=1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 1.6)
        assert client.is_alive
        await stream.aclose()

    with_limits(test, stall_limit=0.8)


def test_an_idle_engine_owes_no_step():
    async def test(client, process):
        await collect(client.stream(request("a", 5)))
        await until(lambda: client.stats()["running"] == 0)
        await asyncio.sleep(1.0)
        assert len(await collect_tokens(client.stream(request("b", 5)))) == 4

    with_limits(test, stall_limit=0.4)


def test_a_pause_of_the_process_that_looks_is_not_counted():
    now = 0.0
    held = HeldFor(lambda: now)
    for seconds, holds, counted in (
        (0.2, True, 0.2),
        (0.3, True, 0.5),
        (500.0, True, 1.5),  # this process was stopped, or its machine slept
        (0.2, False, 0.0),
        (500.0, True, 1.0),
    ):
        now += seconds
        assert held.look(holds) == pytest.approx(counted)
