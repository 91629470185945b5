"""The port of the fronts of examples/ray_serve, and the processes of the command, without Ray."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import httpx
import pytest
from kiln_port import Port
from starlette.responses import PlainTextResponse

from kiln.engine.errors import ConfigError

HOST = "127.0.0.1"
# A process with a child of its own, both of which ignore SIGTERM and outlive their parent.
SLEEPERS = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print(child.pid, flush=True); time.sleep(600)"
)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as free:
        return free.getsockname()[1]


def _listens(port: int) -> bool:
    """Whether a server listens, without a connection that it would have to end."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return True
    return False


async def answer(port: int) -> str:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"http://{HOST}:{port}/", timeout=30)).text


def test_a_second_front_serves_as_soon_as_the_first_one_drains():
    async def run() -> list[str]:
        port, heard = free_port(), []
        first = Port(PlainTextResponse("first"), HOST, port)
        second = Port(PlainTextResponse("second"), HOST, port)
        heard.append(await answer(port))
        await first.drain()
        while len(heard) < 2:
            try:
                heard.append(await answer(port))
            except httpx.ConnectError:
                await asyncio.sleep(0.01)
        await second.drain()
        return heard

    assert asyncio.run(run()) == ["first", "second"]


def test_a_front_that_drains_finishes_its_requests_and_accepts_no_others():
    async def run() -> str:
        port, begun, may_end = free_port(), asyncio.Event(), asyncio.Event()

        async def slow(scope, receive, send):
            begun.set()
            await may_end.wait()
            await PlainTextResponse("whole")(scope, receive, send)

        front = Port(slow, HOST, port)
        request = asyncio.create_task(answer(port))
        await begun.wait()
        drained = asyncio.create_task(front.drain())
        while _listens(port):
            await asyncio.sleep(0.01)
        assert not drained.done()
        may_end.set()
        await drained
        return await request

    assert asyncio.run(run()) == "whole"


def test_a_front_that_waits_for_the_port_can_be_told_to_stop():
    async def run() -> None:
        port = free_port()
        with socket.create_server((HOST, port)):
            await Port(PlainTextResponse("never"), HOST, port).drain()

    asyncio.run(run())


def test_a_host_that_is_not_of_this_machine_is_an_error_at_once():
    async def run() -> None:
        Port(PlainTextResponse("never"), "192.0.2.1", free_port())

    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        asyncio.run(run())


# In a process of its own: the tests' process has other children, which must live.
OUTLIVED = f"""
import subprocess, sys
from kiln_leftovers import Descendants
parent = subprocess.Popen(
    [sys.executable, "-c", {SLEEPERS!r}],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,  # this script's would stay open if it failed
    text=True,
)
child = int(parent.stdout.readline())
known = Descendants()
parent.kill()
parent.wait()
assert known.running() == [child], known.running()
known.end()
assert known.running() == [], known.running()
"""


def test_processes_that_outlive_the_command_are_killed_even_if_their_parent_has_ended():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OUTLIVED]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
