"""What a server and its engine process write to stderr, as a program reads it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import agent_engine
import agent_model
import httpx
import pytest

FAILING = """
import sys
sys.path[:0] = {places!r}
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.worker import run

def load(config, progress):
    progress("weights", 0, 1)
    raise ZeroDivisionError("of the engine")

if len(sys.argv) > 2 and sys.argv[1] == "engine":
    sys.exit(run(load, sys.argv[2:]))
spawn = EngineProcess.spawn
EngineProcess.spawn = lambda config: spawn(config, [sys.executable, "-P", __file__, "engine"])
from kiln.engine.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    agent_model.write_folder(folder)
    return folder


def _start(program, folder, *flags):
    command = [*program, "serve", str(folder), "--port", "0", "--device", "cpu", *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def test_a_server_logs_objects_from_its_start_to_its_end(folder):
    flags = ["--log-format", "json", "--access-log", "--disable-access-log-for-endpoints"]
    server = _start(agent_engine.kiln_command(), folder, *flags, "/health, /version")
    try:
        url = next(line for line in server.stdout if line.startswith("http")).split()[0]
        httpx.get(f"{url}/version")
        body = {"prompt": "hidden", "max_tokens": 3}
        headers = {"X-Request-Id": "r-1"}
        httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        httpx.get(f"{url}/nothing")
    finally:
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=60)
    assert server.returncode == 0
    lines = [json.loads(line) for line in said.splitlines()]
    assert all({"time", "level", "process", "logger", "message"} <= set(line) for line in lines)
    good, bad = (line for line in lines if line["logger"].endswith("access_log"))
    assert (good["path"], good["request_id"]) == ("/v1/completions", "r-1")
    assert good["output_tokens"] == 3
    assert (bad["status"], bad["level"]) == (404, "WARNING")
    assert any("draining" in line["message"] for line in lines)
    assert "hidden" not in said


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_bug_in_the_engine_is_logged_by_it_and_ends_the_command_with_one_line(
    folder, tmp_path, form
):
    program = tmp_path / "kiln.py"
    places = [str(Path(agent_engine.kiln.__file__).parents[1]), str(Path(__file__).parent)]
    program.write_text(FAILING.format(places=places))
    server = _start([sys.executable, "-P", str(program)], folder, "--log-format", form)
    _, said = server.communicate(timeout=60)
    assert server.returncode != 0
    *lines, last = said.splitlines()
    assert last.startswith("error: the engine stopped on ZeroDivisionError: of the engine")
    if form == "text":
        assert "ZeroDivisionError: of the engine" in lines
        return
    (bug,) = [line for line in map(json.loads, lines) if line["level"] == "ERROR"]
    assert bug["process"] == "engine"
    assert bug["exception"].endswith("ZeroDivisionError: of the engine")
