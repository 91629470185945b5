"""A client of the fake engine of ``fake_worker``, and what tests ask of its process."""

import asyncio
import sys
import time
from pathlib import Path

import kiln
from kiln.engine.config import EngineConfig, LoRAConfig, ModelConfig
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.client import EngineClient
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

ROOT = Path(kiln.__file__).parents[1]
FAKE = Path(__file__).parents[1] / "engine" / "fake_worker.py"
COMMAND = [
    *(sys.executable, "-P", "-c"),
    f"import sys, runpy; sys.path.append({str(ROOT)!r}); "
    f"sys.exit(runpy.run_path({str(FAKE)!r})['main'](sys.argv[1:]))",
]
# As in fake_worker.py.
REFUSE, CRASH, SLEEP, DIE, LOSE, SILENT = 1001, 1002, 1003, 1004, 1005, 1006
HANG, BURN = 1009, 1010


def spawn(model="fake", command=COMMAND, modules=()):
    config = EngineConfig(ModelConfig(model), lora=LoRAConfig(modules))
    return EngineProcess.spawn(config, command)


def request(name, *prompt, **params):
    return NewRequest(name, list(prompt), SamplingParams(**{"max_tokens": 4, **params}))


def with_client(test, **options):
    """Run an async test with a ready client; afterwards no process and no folder is left."""

    async def run():
        process = spawn(**options)
        async with asyncio.timeout(120):
            async with EngineClient(process) as client:
                await client.wait_ready()
                result = await test(client, process)
        assert process.exit_code is not None
        assert not process.folder.exists()
        return result

    return asyncio.run(run())


async def collect(stream):
    return [output async for output in stream]


async def collect_tokens(stream):
    """The tokens of a stream: a reader that is late gets several in one output."""
    return [token for output in await collect(stream) for token in output.token_ids]


def is_running(pid):
    """Neither gone nor a zombie that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        await asyncio.sleep(0.01)
