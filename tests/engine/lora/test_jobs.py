"""Jobs that load and unload adapters: each ends with one result, whatever happens."""

from __future__ import annotations

import asyncio
import time

import pytest

from kiln.engine.config import LoRAConfig, LoRAModule
from kiln.engine.errors import (
    AdapterBusyError,
    AdapterError,
    AdapterNotFoundError,
    AdapterPathError,
    ConfigError,
    EngineDeadError,
)
from kiln.engine.lora.jobs import AdapterJobs, JobResult
from kiln.engine.lora.loaded_adapter import Copied
from kiln.engine.lora.slots import AdapterSlots
from kiln.engine.process import wire
from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.requests.adapter_job import AdapterInfo, LoadAdapter, UnloadAdapter


class Store:
    """Adapters whose path is their size; "raise" raises."""

    num_slots, size = 2, 10

    def __init__(self):
        self.sizes = {"first": 4}
        self.copies = []

    def read(self, name, path):
        if path == "raise":
            raise MemoryError("no room")
        return name, int(path)

    def add(self, packed):
        self.sizes[packed[0]] = packed[1]

    def forget(self, name):
        del self.sizes[name]

    def info(self, name, path, *, pinned):
        return AdapterInfo(name, path, pinned, 1, self.sizes[name])

    def begin(self, name, slot, start):
        self.copies.append(name)

    def copied(self, *, wait=False):
        ended, self.copies = self.copies, []
        return [Copied(name) for name in ended]

    def clear(self, slot):
        pass


@pytest.fixture
def engine():
    store, now = Store(), [0.0]
    slots = AdapterSlots(store)
    config = LoRAConfig((LoRAModule("first", "here"),), root="folder")
    jobs = AdapterJobs(slots, config, clock=lambda: now[0])
    return jobs, slots, store, now


def run(jobs, job):
    jobs.begin(job)
    assert jobs.are_pending
    deadline = time.monotonic() + 10
    while not (ended := jobs.end()):
        assert time.monotonic() < deadline
    (result,) = ended
    assert result.job_id == job.job_id
    assert not jobs.are_pending
    return result.error


def test_load_and_unload(engine):
    jobs, slots, store, _ = engine
    assert run(jobs, LoadAdapter("1", "a", "3")) is None
    assert [info.name for info in jobs.infos] == ["first", "a"]
    assert slots.get("a").size == store.sizes["a"] == 3
    assert run(jobs, UnloadAdapter("2", "a", 0)) is None
    assert run(jobs, LoadAdapter("3", "a", "5")) is None
    assert slots.get("a").size == 5
    for name in ("a", "first"):
        assert run(jobs, UnloadAdapter("4", name, 0)) is None
    assert (jobs.infos, slots.loaded, store.sizes) == ([], [], {})


def test_a_load_that_fails_leaves_nothing(engine):
    jobs, slots, store, _ = engine
    error = run(jobs, LoadAdapter("1", "a", "raise"))
    assert isinstance(error, AdapterError)
    assert "LoRA adapter 'a': MemoryError('no room')" in str(error)
    assert "takes 11 numbers" in str(run(jobs, LoadAdapter("2", "a", "11")))
    assert [info.name for info in jobs.infos] == ["first"]
    assert store.sizes == {"first": 4}
    assert len(slots.loaded) == 1


def test_what_is_refused_at_once(engine):
    jobs, slots, _, _ = engine
    with pytest.raises(AdapterError, match="'first': the name is taken"):
        jobs.begin(LoadAdapter("1", "first", "3"))
    with pytest.raises(ConfigError, match="LoRA adapter name='a b'"):
        jobs.begin(LoadAdapter("1", "a b", "3"))
    with pytest.raises(AdapterNotFoundError, match="'a' is not loaded; loaded: first"):
        jobs.begin(UnloadAdapter("1", "a", 3))
    jobs.begin(LoadAdapter("1", "a", "3"))
    with pytest.raises(AdapterError, match="'a': the name is taken"):
        jobs.begin(LoadAdapter("2", "a", "3"))
    fixed = AdapterJobs(slots, LoRAConfig())
    for job in (LoadAdapter("1", "b", "3"), UnloadAdapter("1", "first", 0)):
        with pytest.raises(AdapterPathError, match="--lora-root"):
            fixed.begin(job)


def test_an_unload_waits_refuses_new_requests_and_gives_up(engine):
    jobs, slots, _, now = engine
    slots.hold("first")
    jobs.begin(UnloadAdapter("1", "first", 3.0))
    assert jobs.end() == []
    with pytest.raises(AdapterNotFoundError, match="'first' is being unloaded; loaded: none"):
        slots.hold("first")
    with pytest.raises(AdapterNotFoundError):
        jobs.begin(UnloadAdapter("2", "first", 3.0))
    now[0] = 3.0
    ((job_id, error),) = jobs.end()
    assert job_id == "1"
    assert isinstance(error, AdapterBusyError)
    slots.hold("first")
    slots.drop("first")
    jobs.begin(UnloadAdapter("3", "first", 3.0))
    assert jobs.end() == []
    slots.drop("first")
    assert jobs.end() == [JobResult("3")]


def test_the_client_gets_the_engines_error_or_its_death():
    async def test():
        sent = []
        calls = AdapterCalls(sent.append)
        tasks = [
            asyncio.create_task(calls.load("a", "b", pinned=True)),
            *(asyncio.create_task(calls.unload("a", 1.0)) for _ in range(3)),
        ]
        await asyncio.sleep(0)
        loaded, gone, busy, _ = (message.job.job_id for message in sent)
        info = AdapterInfo("a", "b", True, 1, 2)
        calls.adapters = {"a": info}
        calls.end(wire.JobDone(loaded))
        calls.adapters = {}  # by the time the caller wakes, another has unloaded it
        tasks[1].cancel()
        calls.end(wire.JobDone(gone))
        calls.end(wire.JobDone("another client's"))
        calls.end(wire.JobDone(busy, "AdapterBusyError", "wait"))
        calls.fail(EngineDeadError("dead"))
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert found[0] == info
        assert [type(one) for one in found[1:]] == [
            asyncio.CancelledError, AdapterBusyError, EngineDeadError,
        ]  # fmt: skip

    asyncio.run(test())
