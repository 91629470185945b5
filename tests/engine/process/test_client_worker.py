"""The process boundary: nothing is lost, nothing is left behind, and a death is told to all."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from fake_engine import (
    COMMAND,
    CRASH,
    DIE,
    FAKE,
    LOSE,
    REFUSE,
    ROOT,
    SLEEP,
    collect,
    collect_tokens,
    is_running,
    request,
    spawn,
    until,
    with_client,
)

from kiln.engine.config import EngineConfig, ModelConfig
from kiln.engine.errors import (
    ConfigError,
    EngineDeadError,
    ModelError,
    RequestError,
    RequestLostError,
    SlowReaderError,
)
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.client import EngineClient


def is_asleep(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def times_woken(pid):
    """How often the engine's threads have gone to sleep of their own accord, and woken again."""
    lines = [
        line
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


def test_records_of_steps_come_only_while_they_are_watched():
    async def test(client, process):
        await collect(client.stream(request("a", 1, max_tokens=5)))
        async with asyncio.timeout(30):
            while client.stats().get("running") != 0:
                await asyncio.sleep(0.01)
        assert client.steps.end == 0
        client.watch_steps()
        async with asyncio.timeout(30):
            while client.steps.end < 5:
                await asyncio.sleep(0.01)
        await collect(client.stream(request("b", 1, max_tokens=3)))
        async with asyncio.timeout(30):
            while client.steps.end < 8:
                await asyncio.sleep(0.01)
        first, steps = client.steps.since(0)
        assert first == 0
        assert [one.record.number for one in steps] == [*range(1, 9)]
        assert {(one.engine, one.record.kind, one.record.graph) for one in steps} == {
            (1, "decode", "1")
        }

    with_client(test)


def test_the_model_is_described_when_it_is_ready():
    async def test(client, process):
        info = client.model_info
        assert (info.max_model_len, info.vocab_size) == (512, 2000)
        assert (info.dtype, info.device, info.kernels) == ("float32", "cpu", {"norm": "torch"})
        assert client.is_ready
        assert client.is_alive

    with_client(test)


def test_tokens_arrive_in_order_and_a_stream_ends_with_its_requests():
    async def test(client, process):
        stream = client.stream(request("a", 1, 5), request("b", 1, 50, max_tokens=2))
        outputs = await collect(stream)
        tokens = {"a": [], "b": []}
        for output in outputs:  # those that wait are joined
            tokens[output.request_id] += output.token_ids
        assert tokens == {"a": [6, 7, 8, 9], "b": [51, 52]}
        assert {o.request_id for o in outputs if o.finish_reason == "length"} == {"a", "b"}
        assert len(client._streams) == 0

    with_client(test)


# The engine of fake_engine, whose socket for requests opens half a second after "ready".
_LATE = f"""
import runpy, sys, time
sys.path.append({str(ROOT)!r})
import zmq
from kiln.engine.process.worker import Worker
later = []
def opens(name):
    real = getattr(zmq.Socket, name)
    def late(self, address):
        if address.endswith("/requests"):
            later.append((real, self, address))
        else:
            real(self, address)
    return late
zmq.Socket.bind, zmq.Socket.connect = opens("bind"), opens("connect")
serve = Worker.serve
def slow(self, core):
    time.sleep(0.5)
    for real, socket, address in later:
        real(socket, address)
    serve(self, core)
Worker.serve = slow
sys.exit(runpy.run_path({str(FAKE)!r})["main"](sys.argv[1:]))
"""


def test_a_request_is_not_lost_if_the_engine_hears_it_only_after_it_is_ready():
    async def test(client, process):
        assert await collect_tokens(client.stream(request("a", 1, 5))) == [6, 7, 8, 9]

    with_client(test, command=[sys.executable, "-P", "-c", _LATE])


def test_every_field_of_the_parameters_crosses_the_boundary():
    async def test(client, process):
        stops = request("a", 1, 5, max_tokens=50, stop_token_ids=[8], stop=["x"], seed=2**62)
        outputs = await collect(client.stream(stops))
        assert [token for o in outputs for token in o.token_ids] == [6, 7, 8]
        assert outputs[-1].finish_reason == "stop"

    with_client(test)


@pytest.mark.parametrize("how", ["close", "break", "cancel"])
def test_a_stream_that_is_left_is_aborted_in_the_engine(how):
    async def test(client, process):
        endless = request("a", 1, SLEEP, max_tokens=500)  # would take 25 seconds
        if how == "cancel":
            task = asyncio.create_task(collect_within(client.stream(endless)))
            await until(lambda: client.stats().get("running") == 1)
            task.cancel()
        else:
            async with aclosing(client.stream(endless)) as stream:
                await anext(stream)
                await until(lambda: client.stats().get("running") == 1)
                if how == "close":
                    await stream.aclose()
        await until(lambda: client.stats()["running"] == 0)
        assert len(client._streams) == 0

    with_client(test)


async def collect_within(stream):
    async with aclosing(stream):
        return await collect(stream)


def test_dropping_one_request_leaves_its_sisters_running():
    async def test(client, process):
        stream = client.stream(request("a", 5, max_tokens=99), request("b", 50, max_tokens=9))
        seen, tokens = [], 0
        async for output in stream:
            seen.append(output.request_id)
            tokens += len(output.token_ids) * (output.request_id == "b")
            if seen.count("a") == 2:
                stream.drop("a")
        assert (seen.count("a"), tokens) == (2, 9)

    with_client(test)


def test_a_refused_request_fails_alone():
    async def test(client, process):
        good = client.stream(request("good", 5, max_tokens=30))
        with pytest.raises(RequestError, match="the prompt is refused") as caught:
            await collect(client.stream(request("bad", REFUSE), request("sister", 7)))
        assert caught.value.param == "prompt"
        assert len(await collect_tokens(good)) == 30
        await until(lambda: client.stats()["running"] == 0)
        assert client.is_ready

    with_client(test)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (CRASH, "the step broke"),
        (DIE, "signal 9"),
        (LOSE, "stopped on DeviceError: cuda:0 is lost"),
    ],
)
def test_a_dead_engine_ends_every_stream(prompt, words):
    async def test(client, process):
        others = [
            asyncio.create_task(collect(client.stream(request(f"o{i}", SLEEP, max_tokens=500))))
            for i in range(3)
        ]
        await until(lambda: client.stats().get("running") == 3)
        with pytest.raises(RequestLostError, match=words):
            await collect(client.stream(request("fatal", prompt)))
        for other in others:
            with pytest.raises(RequestLostError):
                await other
        assert not client.is_ready
        assert not client.is_alive
        with pytest.raises(EngineDeadError, match=words) as refused:
            client.stream(request("later", 1))
        assert not isinstance(refused.value, RequestLostError), "the engine never had it"
        with pytest.raises(EngineDeadError, match=words):
            await client.adapters.load("later", "a", pinned=False)

    with_client(test)


def test_a_model_that_cannot_be_loaded_is_reported_as_it_was_raised():
    async def test():
        process = spawn(model="missing")
        async with EngineClient(process) as client:
            with pytest.raises(ModelError, match="no such folder"):
                await client.wait_ready()
        assert not process.folder.exists()

    asyncio.run(test())


def test_progress_is_told_while_loading():
    async def test():
        told = []
        async with EngineClient(spawn(), lambda *progress: told.append(progress)) as client:
            await client.wait_ready()
        assert told == [("loading", 0, 2), ("loading", 2, 2)]

    asyncio.run(test())


def test_why_a_model_cannot_be_loaded_reaches_a_client_that_comes_late():
    """A busy machine may have loaded the engine before the server."""

    async def test():
        process = spawn("missing")
        await asyncio.sleep(3)
        assert process.exit_code is None, "it waits until somebody has read why"
        async with EngineClient(process) as client:
            with pytest.raises(ModelError, match="no such folder"):
                await client.wait_ready()

    asyncio.run(test())


def test_an_idle_engine_sleeps():
    async def test(client, process):
        pid = process.child.pid
        await until(lambda: is_asleep(pid))  # it has just said that it is ready
        begun, before, asleep = time.monotonic(), times_woken(pid), 0
        for _ in range(50):
            asleep += is_asleep(pid)
            await asyncio.sleep(0.02)
        assert asleep >= 45
        assert times_woken(pid) - before <= 10 * (time.monotonic() - begun)

    with_client(test)


def test_signals_of_the_terminal_do_not_reach_the_engine():
    async def test(client, process):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.child.pid, number)
        assert os.getpgid(process.child.pid) != os.getpgid(0)
        assert len(await collect_tokens(client.stream(request("a", 5)))) == 4

    with_client(test)


def test_the_sockets_are_in_a_private_folder():
    async def test(client, process):
        assert process.folder.stat().st_mode & 0o777 == 0o700
        assert {path.name for path in process.folder.iterdir()} == {"requests", "outputs"}

    with_client(test)


def test_a_stopped_engine_leaves_by_itself_with_code_0():
    async def test(client, process):
        return process

    assert with_client(test).exit_code == 0  # else it was killed after the time it is given


PARENT = """
import asyncio, sys
sys.path.append({root!r})
from kiln.engine.process.client import EngineClient
from kiln.engine.config import EngineConfig, ModelConfig
from kiln.engine.process.child import EngineProcess

async def main():
    process = EngineProcess.spawn(EngineConfig(ModelConfig("fake")), {command!r})
    async with EngineClient(process) as client:
        await client.wait_ready()
        print(process.child.pid, process.folder, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_an_engine_whose_parent_was_killed_leaves_by_itself():
    code = PARENT.format(root=str(ROOT), command=COMMAND)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid, folder = parent.stdout.readline().split()
        assert is_running(pid)
        parent.kill()
    asyncio.run(until(lambda: not is_running(pid)))
    assert not Path(folder).exists()


def test_a_client_serves_the_real_engine():
    demo = Path(__file__).parents[3] / "engine" / "demo"

    async def test():
        config = EngineConfig(ModelConfig(str(demo), device="cpu"))
        process = EngineProcess.spawn(config)
        async with asyncio.timeout(60), EngineClient(process) as client:
            await client.wait_ready()
            assert client.model_info.max_model_len == 2048
            assert set(client.model_info.kernels) >= {"activation", "norm", "rotary"}
            long = request("a", 5, 6, 7, max_tokens=9, ignore_eos=True, logprobs=1)
            outputs = await collect(client.stream(long))
            assert len(outputs) == 9
            assert all(len(output.logprobs) == 1 for output in outputs)
            with pytest.raises(RequestError, match="2048") as caught:
                await collect(client.stream(request("b", *([5] * 3000))))
            assert caught.value.param == "prompt"

    asyncio.run(test())


def test_a_program_that_cannot_be_started_is_a_config_error():
    with pytest.raises(ConfigError, match="cannot start the engine process /nowhere"):
        spawn(command=["/nowhere"])


def test_a_loading_engine_is_ended_at_once(monkeypatch):
    graces, stop = [], EngineProcess.stop
    monkeypatch.setattr(EngineProcess, "stop", lambda *args: (graces.append(args[1]), stop(*args)))

    async def test():
        forever = [sys.executable, "-c", "import time; time.sleep(60)"]
        process = spawn(command=forever)
        async with EngineClient(process) as client:
            assert not client.is_ready
            with pytest.raises(EngineDeadError, match="loading"):
                client.stream(request("a", 1))
        assert graces == [0]
        assert process.exit_code == -signal.SIGKILL

    asyncio.run(test())


def test_a_reader_that_never_reads_is_aborted_in_the_engine(monkeypatch):
    monkeypatch.setattr("kiln.engine.process.token_stream.MAX_WAITING_TOKENS", 100)

    async def test(client, process):
        stalled = [client.stream(request(f"s{i}", 5, max_tokens=None)) for i in range(3)]
        beside = await collect(client.stream(request("a", 50, max_tokens=200)))
        assert [token for o in beside for token in o.token_ids] == list(range(51, 251))
        await until(lambda: len(client._streams) == 0, 20)
        for stream in stalled:
            with pytest.raises(SlowReaderError):
                await collect(stream)
        await until(lambda: client.stats()["running"] == 0)

    with_client(test)
