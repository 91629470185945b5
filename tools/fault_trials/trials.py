"""The trials. Each returns a row: numbers, and ``faults``, what has happened and must not."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from fault_trials.clients import PATH, Client, Clients, Connection, request_bytes, wait_ended
from fault_trials.server import Held, Server, family, held, is_running, server

Row = dict[str, Any]
Advance = Callable[[int], None]  # how many more units are done

TOLD_LIMIT = 5.0
GROWTH_LIMIT = 5_000_000  # bytes of private memory over all requests
_CLIENTS = 16
_BACK_SECONDS = 300.0
_LONG = {"prompt": [5, 6, 7, 8], "max_tokens": 1500, "ignore_eos": True}
_CLOSING_SECONDS = 5.0  # for the server to close the connections of the trial's own questions
_TOLD = ("engine_unavailable", "restarting", "finished")  # the last: just before the engine's end
_EXPECTED = ("finished", "queue_full")
_ROUNDS = 20  # of the requests, with a look at the memory after each
_ENDLESS = {"max_tokens": 2, "ignore_eos": True}
_SHORT: tuple[tuple[int, Row], ...] = (  # the status that a request gets
    (200, {**_ENDLESS, "prompt": "Once upon"}),
    (200, {**_ENDLESS, "prompt": "Once upon", "stream": True}),
    (200, {**_ENDLESS, "prompt": [5, 6, 7], "user": "somebody"}),
    (400, {**_ENDLESS, "prompt": "x", "top_p": 2.0}),
)


async def deaths(
    engine: str,
    how: signal.Signals,
    count: int,
    advance: Advance,
    limit: float = TOLD_LIMIT,
    ranks: int = 1,
) -> Row:
    """Kill or stop the engine under load, ``count`` times at random moments.

    ``limit``: the seconds after its engine's end in which each client must be told. Of several
    ``ranks`` of tensor parallelism one is drawn each time.
    """
    draw = random.Random(count)
    told: list[float] = []
    back: list[float] = []
    faults: list[str] = []
    bodies = [{**_LONG, "stream": index % 4 > 0} for index in range(_CLIENTS)]
    flags = ("--max-num-seqs", str(_CLIENTS), "--tp", str(ranks))
    with server(engine, *flags) as served:
        async with Clients(served.address, bodies) as clients:
            memory: list[Held] = []  # of the API process, after each restart
            for _ in range(count):
                await clients.wait_all_busy(_BACK_SECONDS)
                await asyncio.sleep(draw.uniform(0.0, 0.5))
                victim = draw.choice(served.ranks())
                await _end_once(served, victim, how, clients.all, told, back, faults)
                await clients.wait_all_busy(_BACK_SECONDS)
                memory.append(held(served.pid))
                advance(1)
            restarts = served.metric("engine_restarts_total")
        if restarts != count:
            faults.append(f"{restarts:g} restarts after {count} ends")
        if not told:
            raise RuntimeError(f"no request was in flight: {clients.outcomes}")
        if max(told) > limit:
            faults.append(f"a client was told after {max(told):.1f} s")
        last = served.engine()
    faults += _left(*last)
    return {
        "trial": f"{count} × {how.name}", "clients": _CLIENTS,
        "engine": engine if ranks == 1 else f"{engine} on {ranks} ranks",
        "told_max_s": max(told), "told_mean_s": sum(told) / len(told), "told": len(told),
        "back_max_s": max(back), "growth_bytes": memory[-1].num_bytes - memory[0].num_bytes,
        "descriptors": memory[-1].descriptors - memory[0].descriptors,
        "threads": memory[-1].threads - memory[0].threads, "faults": faults,
        "memory": {"api": [one.num_bytes for one in memory]},
    }  # fmt: skip


async def _end_once(
    served: Server,
    victim: int,
    how: signal.Signals,
    clients: list[Client],
    told: list[float],
    back: list[float],
    faults: list[str],
) -> None:
    """End a rank once; note when each client was told, and when requests are served again."""
    pid, folder = served.engine()
    old = family(pid)
    waiting = [client for client in clients if client.in_flight]
    for client in waiting:
        client.ended.clear()
    begun = time.monotonic()
    os.kill(victim, how)
    await wait_ended(waiting, _BACK_SECONDS)
    for client in waiting:
        if not client.ended.is_set():
            faults.append("a client was never told")
        elif client.last not in _TOLD:
            faults.append(f"an answer ended with {client.last!r}")
        elif client.last != "finished":
            told.append(client.last_time - begun)
    while not await asyncio.to_thread(served.is_ready):
        if time.monotonic() - begun > _BACK_SECONDS:
            raise TimeoutError("the engine is not restarted")
        await asyncio.sleep(0.05)
    back.append(time.monotonic() - begun)
    faults += _left(pid, folder, *old)


def _left(pid: int, folder: os.PathLike[str], *others: int) -> list[str]:
    """Return what is left of an engine that has ended."""
    left = [f"process {one} is left" for one in {pid, *others} if is_running(one)]
    return left + ([f"folder {folder} is left"] if os.path.exists(folder) else [])


async def saturation(engine: str, seconds: float, advance: Advance) -> Row:
    """Keep the server saturated, beyond its queue, and look for false alarms."""
    faults: list[str] = []
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client has a connection
    longest, end = 0.0, time.monotonic() + seconds
    bodies = [{**_LONG, "max_tokens": 200, "stream": index % 2 > 0} for index in range(1280)]
    flags = ("--max-num-seqs", "64", "--max-waiting", "1000")
    with server(engine, *flags) as served:
        async with Clients(served.address, bodies) as clients, httpx.AsyncClient() as http:
            while time.monotonic() < end:
                for probe in ("live", "ready"):
                    asked = time.monotonic()
                    answer = await http.get(f"{served.url}/health/{probe}", timeout=60)
                    longest = max(longest, time.monotonic() - asked)
                    if answer.status_code != 200:
                        faults.append(f"{probe}: {answer.text[:120]}")
                await asyncio.sleep(1.0)
                advance(1)
            outcomes, restarts = clients.outcomes, served.metric("engine_restarts_total")
    if restarts:
        faults.append(f"{restarts:g} restarts without a cause")
    faults += [f"{n} × {what}" for what, n in outcomes.items() if what not in _EXPECTED]
    return {
        "trial": f"{seconds / 60:g} min of saturation", "engine": engine, "clients": len(bodies),
        "requests": outcomes["finished"], "refused": outcomes["queue_full"],
        "probe_max_s": longest, "faults": faults,
    }  # fmt: skip


async def requests(engine: str, count: int, advance: Advance) -> Row:
    """Serve so many requests, and compare the memory of both processes before and after.

    A twentieth of as many requests come before: caches and pools of threads have their size then.
    """
    failed = 0

    async def send(connection: Connection, number: int) -> None:
        nonlocal failed
        for index in range(number):
            status, body = _SHORT[index % len(_SHORT)]
            failed += (await connection.ask(body)).status != status
            if index % 50 == 49:
                advance(50)

    with server(engine, "--max-num-seqs", "64") as served:
        processes = {"api": served.pid, "engine": served.engine()[0]}
        connections = [Connection(served.address) for _ in range(_CLIENTS)]
        memory: dict[str, list[Held]] = {name: [] for name in processes}
        for _ in range(_ROUNDS + 1):
            await asyncio.gather(*(send(one, count // _ROUNDS // _CLIENTS) for one in connections))
            for name, pid in processes.items():
                memory[name].append(held(pid))
        for one in connections:
            one.close()
    growth = {name: own[-1].num_bytes - own[0].num_bytes for name, own in memory.items()}
    faults = [f"{failed} answers had another status"] if failed else []
    faults += [
        f"the {name} process grew by {size:,} bytes"
        for name, size in growth.items()
        if size > GROWTH_LIMIT
    ]
    first, last = memory["api"][0], memory["api"][-1]
    return {
        "trial": f"{count:,} requests", "engine": engine, "clients": _CLIENTS, "requests": count,
        "growth_bytes": growth["api"], "engine_growth_bytes": growth["engine"],
        "descriptors": last.descriptors - first.descriptors,
        "threads": last.threads - first.threads, "faults": faults,
        "memory": {name: [one.num_bytes for one in own] for name, own in memory.items()},
    }  # fmt: skip


async def disconnects(engine: str, count: int, seeds: int, advance: Advance) -> Row:
    """Let clients leave at any moment of their requests; nothing of theirs may stay."""
    faults: list[str] = []
    flags = ("--max-num-seqs", "8", "--max-waiting", "1000")
    with server(engine, *flags) as served:
        await _leave(served, random.Random(-1), 20)
        await _settle(served, faults)
        before = held(served.pid)
        for seed in range(seeds):
            await _leave(served, random.Random(seed), count)
            await _settle(served, faults)
            advance(count)
        left = served.metric("requests_aborted_total")
        after = held(served.pid)
        until = time.monotonic() + _CLOSING_SECONDS
        while after.descriptors > before.descriptors and time.monotonic() < until:
            await asyncio.sleep(0.1)
            after = held(served.pid)
    if left < count * seeds / 4:
        faults.append(f"only {left:g} clients left while their request was under way")
    if after.descriptors > before.descriptors:
        faults.append(f"{after.descriptors - before.descriptors} descriptors are left")
    return {
        "trial": f"{count} disconnects × {seeds} seeds", "engine": engine, "clients": 50,
        "requests": count * seeds, "left_early": left,
        "growth_bytes": after.num_bytes - before.num_bytes,
        "descriptors": after.descriptors - before.descriptors,
        "threads": after.threads - before.threads, "faults": faults,
    }  # fmt: skip


async def _leave(served: Server, draw: random.Random, count: int) -> None:
    """Open so many connections, 50 at a time, and close each at a random moment."""

    async def one() -> None:
        body = {**_LONG, "max_tokens": 400, "stream": draw.random() < 0.5, "n": draw.randint(1, 3)}
        data = request_bytes(body, PATH)
        cut = len(data) if draw.random() < 0.8 else draw.randrange(len(data))
        patience = draw.uniform(0.0, 1.0) ** 3
        reader, writer = await asyncio.open_connection(*served.address)
        writer.write(data[:cut])
        with suppress(TimeoutError, OSError):
            await asyncio.wait_for(reader.read(), patience)
        writer.close()

    for _ in range(0, count, 50):
        await asyncio.gather(*(one() for _ in range(min(50, count))))


async def _settle(served: Server, faults: list[str]) -> None:
    """Wait until the engine holds nothing."""
    names = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
    for _ in range(600):
        left = {name: await asyncio.to_thread(served.metric, name) for name in names}
        if not any(left.values()):
            return
        await asyncio.sleep(0.1)
    faults.append(f"held after a minute: {left}")
