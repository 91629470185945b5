"""A dead engine is replaced, with back-off, and without the requests that it had."""

import asyncio
import itertools
import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from fake_engine import (
    COMMAND,
    DIE,
    SLEEP,
    collect,
    collect_tokens,
    is_running,
    request,
    spawn,
    until,
)

from kiln.engine.config import LoRAModule
from kiln.engine.errors import EngineDeadError, ModelError, RequestLostError
from kiln.engine.process.supervisor import RestartPolicy, Supervisor

QUICK = RestartPolicy(delay=0.05)
NEVER_READY = [sys.executable, "-c", "import time; time.sleep(600)"]


class Lives:
    """What a supervisor spawns: the engines of some models, one after the other."""

    def __init__(self, *models, **options):
        self._models = itertools.chain(models, itertools.repeat("fake"))
        self._options = options
        self.processes = []

    def __call__(self):
        self.processes.append(spawn(next(self._models), **self._options))
        return self.processes[-1]

    @property
    def pid(self):
        return self.processes[-1].child.pid


def supervise(test, *models, policy=QUICK, **options):
    """Run an async test with a supervisor whose first engine is ready; then nothing is left."""
    lives = Lives(*models, **options)

    async def run():
        async with asyncio.timeout(120), Supervisor(lives(), lives, policy) as engine:
            await engine.client.wait_ready()
            await test(engine, lives)

    asyncio.run(run())
    for process in lives.processes:
        assert process.exit_code is not None
        assert not process.folder.exists()
    return lives


async def serves(engine, restarts=1):
    """Wait until requests are accepted again, after so many restarts."""
    await until(lambda: engine.num_restarts >= restarts and engine.client.is_ready, 60)


def test_the_records_of_steps_go_on_over_a_restart():
    """A reader of the timeline sees the last steps of the engine that died, then the next one's."""

    async def test(engine, lives):
        steps = engine.client.steps
        engine.client.watch_steps()
        await collect(engine.client.stream(request("a", 1, max_tokens=5)))
        await until(lambda: steps.end >= 5, 30)
        os.kill(lives.pid, signal.SIGKILL)
        await serves(engine)
        before = steps.end
        engine.client.watch_steps()
        await collect(engine.client.stream(request("b", 1, max_tokens=5)))
        await until(lambda: steps.end >= before + 5, 30)
        seen = [(one.engine, one.record.number) for one in steps.since(0)[1]]
        assert seen[:5] == [(1, number) for number in range(1, 6)]
        assert seen[before : before + 5] == [(2, number) for number in range(1, 6)]

    supervise(test)


def test_the_wait_doubles_up_to_a_limit():
    policy = RestartPolicy(delay=1.0, max_delay=30.0)
    assert [policy.delay_of(number) for number in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_request_that_kills_the_engine_kills_it_once(caplog):
    async def test(engine, lives):
        first = engine.client
        beside = asyncio.create_task(collect(first.stream(request("b", SLEEP, max_tokens=500))))
        with pytest.raises(RequestLostError, match="signal 9"):
            await collect(first.stream(request("fatal", DIE)))
        with pytest.raises(RequestLostError):
            await beside
        assert engine.is_restarting
        assert engine.is_alive
        await serves(engine)
        assert engine.client is not first
        assert len(await collect_tokens(engine.client.stream(request("c", 5)))) == 4
        assert engine.stats()["engine_restarts"] == engine.num_restarts == 1
        assert engine.stats()["running"] == 0

    with caplog.at_level(logging.WARNING):
        assert len(supervise(test).processes) == 2
    said = [record.getMessage() for record in caplog.records]
    assert "was killed by signal 9" in said[0]
    assert "started again in 0.05 s: restart 1 of at most 3 in a row" in said[1]
    assert "serves again after" in said[2]


def test_the_old_process_and_its_ranks_are_gone_before_the_next_one_starts(monkeypatch):
    """Also a rank that is stopped, and one whose engine was killed before it could end it."""
    ranks = f"import subprocess; subprocess.Popen({['sleep', '600']!r}); "
    with_ranks = [*COMMAND[:-1], ranks + COMMAND[-1]]

    def own_rank(pid):
        (rank,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(rank)

    async def test(engine, lives):
        found, start = [], lives.__call__

        def alive_at_start():
            found.append([is_running(pid) for pid in (lives.pid, rank)])
            return start()

        monkeypatch.setattr(engine, "_spawn", alive_at_start)
        rank = own_rank(lives.pid)
        os.kill(rank, signal.SIGSTOP)
        os.kill(lives.pid, signal.SIGKILL)
        await until(lambda: len(lives.processes) == 2)
        await serves(engine)
        assert found == [[False, False]]

    supervise(test, command=with_ranks)


@pytest.mark.parametrize("most", [0, 2])
def test_an_engine_that_cannot_be_started_again_is_given_up(most):
    async def test(engine, lives):
        os.kill(lives.pid, signal.SIGKILL)
        error = await engine.wait_over()
        assert isinstance(error, ModelError if most else EngineDeadError)
        assert engine.num_restarts == most
        assert not engine.is_restarting
        assert not engine.is_alive

    policy = RestartPolicy(max_restarts=most, delay=0.01)
    lives = supervise(test, "fake", "missing", "missing", policy=policy)
    assert len(lives.processes) == 1 + most


def test_a_model_that_cannot_be_loaded_is_not_tried_again():
    async def run():
        lives = Lives("missing")
        async with asyncio.timeout(60), Supervisor(lives(), lives, QUICK) as engine:
            assert isinstance(await engine.wait_over(), ModelError)
            assert not engine.is_restarting
        assert len(lives.processes) == 1

    asyncio.run(run())


@pytest.mark.parametrize("healthy", [0.0, 600.0])
def test_a_healthy_period_ends_the_row_of_restarts(healthy):
    async def test(engine, lives):
        for _ in range(2):
            os.kill(lives.pid, signal.SIGKILL)
            await until(lambda: not engine.client.is_alive)
            await until(lambda: engine.client.is_ready or not engine.is_alive)
        assert engine.client.is_ready == (healthy == 0)
        assert engine.num_restarts == (2 if healthy == 0 else 1)

    supervise(test, policy=RestartPolicy(max_restarts=1, delay=0.01, healthy=healthy))


@pytest.fixture
def folders(tmp_path):
    """The folders of two adapters."""
    made = tmp_path / "good", tmp_path / "bad"
    for folder in made:
        folder.mkdir()
    return made


def test_adapters_are_as_they_were(caplog, folders):
    """Loaded while serving, unloaded while serving, another one under a name of the start."""
    modules = [LoRAModule(name, "at/start") for name in ("kept", "gone", "other")]

    async def test(engine, lives):
        calls = engine.client.adapters
        await calls.unload("gone", 1.0)
        await calls.unload("other", 1.0)
        await calls.load("other", str(folders[0]), pinned=True)
        await calls.load("late", str(folders[1]), pinned=False)
        before = dict(calls.adapters)
        os.kill(lives.pid, signal.SIGKILL)
        await until(lambda: engine.is_restarting)
        assert engine.client.adapters.adapters == before
        await serves(engine)
        assert engine.client.adapters.adapters == before

    supervise(test, modules=tuple(modules))
    assert "; 2 LoRA adapters loaded again" in caplog.text


@pytest.mark.parametrize("damage", ["gone", "fatal"])
def test_an_adapter_that_cannot_be_loaded_again_is_left_out(caplog, folders, damage):
    good, bad = folders

    async def test(engine, lives):
        calls = engine.client.adapters
        await calls.load("bad", str(bad), pinned=False)
        await calls.load("good", str(good), pinned=False)
        if damage == "gone":
            bad.rmdir()
        else:
            (bad / "fatal").touch()
        os.kill(lives.pid, signal.SIGKILL)
        restarts = 1 if damage == "gone" else 2
        await serves(engine, restarts)
        assert list(engine.client.adapters.adapters) == ["good"]
        assert engine.num_restarts == restarts

    supervise(test)
    assert "LoRA adapter 'bad' is not loaded again" in caplog.text


def test_an_adapter_that_kills_the_engine_kills_it_once(folders):
    good, bad = folders
    (bad / "fatal").touch()

    async def test(engine, lives):
        await engine.client.adapters.load("good", str(good), pinned=False)
        with pytest.raises(EngineDeadError):
            await engine.client.adapters.load("bad", str(bad), pinned=False)
        await serves(engine)
        assert list(engine.client.adapters.adapters) == ["good"]
        assert engine.num_restarts == 1

    supervise(test)


@pytest.mark.parametrize("when", ["waiting", "loading"])
def test_a_server_that_ends_gives_a_restart_up(when):
    async def test(engine, lives):
        begun = time.monotonic()
        os.kill(lives.pid, signal.SIGKILL)
        if when == "loading":
            lives._options["command"] = NEVER_READY
            await until(lambda: len(lives.processes) == 2)
        else:
            await until(lambda: engine.is_restarting)
        engine.end_restarts()
        assert isinstance(await engine.wait_over(), EngineDeadError)
        assert time.monotonic() - begun < 300

    delay = 0.05 if when == "loading" else 600.0
    supervise(test, policy=RestartPolicy(delay=delay, max_delay=600.0))


def test_an_engine_that_ends_while_the_server_drains_stays_ended():
    async def test(engine, lives):
        engine.end_restarts()
        assert engine.client.is_ready, "its requests may finish"
        os.kill(lives.pid, signal.SIGKILL)
        assert isinstance(await engine.wait_over(), EngineDeadError)

    assert len(supervise(test).processes) == 1
