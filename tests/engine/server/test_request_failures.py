"""A request that the engine cannot finish fails alone, and its client is told which it was."""

import asyncio
import json
import runpy
import sys
from pathlib import Path

import httpx
import pytest
from one_life import OneLife

import kiln
from kiln.engine.config import EngineConfig, ModelConfig
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.client import EngineClient
from kiln.engine.server.app import create_app
from kiln.engine.server.serving import ServerSettings

ROOT = Path(kiln.__file__).parents[1]
WORKER = Path(__file__).parents[1] / "fake_worker.py"
COMMAND = [
    *(sys.executable, "-P", "-c"),
    f"import sys, runpy; sys.path.append({str(ROOT)!r}); "
    f"sys.exit(runpy.run_path({str(WORKER)!r})['main'](sys.argv[1:]))",
]
FAIL, FAIL_AT_ONCE = (runpy.run_path(str(WORKER))[name] for name in ("FAIL", "FAIL_AT_ONCE"))
HEADERS = {"X-Request-Id": "mine-1"}


async def _both(body):
    """Send a body that fails, and beside it one that does not."""
    process = EngineProcess.spawn(EngineConfig(ModelConfig("fake")), COMMAND)
    async with EngineClient(process) as client:
        await client.wait_ready()
        transport = httpx.ASGITransport(
            create_app(OneLife(client), None, ServerSettings(("tiny",)))
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            good = {"prompt": [5], "max_tokens": 50}
            return await asyncio.gather(
                http.post("/v1/completions", json=body, headers=HEADERS),
                http.post("/v1/completions", json=good),
            )


@pytest.mark.parametrize(
    ("prompt", "streaming"), [(FAIL, False), (FAIL_AT_ONCE, False), (FAIL_AT_ONCE, True)]
)
def test_before_the_first_event_it_is_a_status(prompt, streaming):
    body = {"prompt": [prompt], "max_tokens": 30, "stream": streaming}
    failed, beside = asyncio.run(_both(body))
    assert failed.status_code == 500
    error = failed.json()["error"]
    assert error["code"] == "generation_failed"
    assert "the step of this request broke" in error["message"]
    assert "mine-1" in error["message"]
    assert beside.json()["usage"]["completion_tokens"] == 50


def test_later_it_is_an_event():
    failed, beside = asyncio.run(_both({"prompt": [FAIL], "max_tokens": 30, "stream": True}))
    assert failed.status_code == 200
    *_, last, done, _ = failed.text.split("\n\n")
    assert done == "data: [DONE]"
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "mine-1" in error["message"]
    assert beside.json()["usage"]["completion_tokens"] == 50
