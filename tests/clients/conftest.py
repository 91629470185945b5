"""Servers for real clients, and programs that use the clients in environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import agent_engine
import agent_model
import pytest
from client_environments import NODE, environment, has_node

from kiln.engine.cli.local_server import local_server

KEY = "sk-test"  # of the locked server
SCRIPTS = Path(__file__).parent / "scripts"
_SCRIPT_OF = {"openai2": "openai_python", "openai3": "openai_python"}  # others have their own
_SECONDS = 2400.0  # for one program; schemathesis takes the longest by far


@contextmanager
def _serving(arguments: list[str], program: list[str] | None = None) -> Iterator[str]:
    os.environ["OMP_NUM_THREADS"] = "1"
    with local_server(arguments, timeout=120, program=program) as (url, _):
        yield url


@pytest.fixture(scope="session")
def api_key():
    return KEY


@pytest.fixture(scope="session")
def locked_url(tmp_path_factory):
    """The demo model, for clients that have the API key. Its template can also show tools."""
    template = tmp_path_factory.mktemp("templates") / "tools.jinja"
    template.write_text(agent_model.TEMPLATE)
    with _serving(["--api-key", KEY, "--chat-template", str(template)]) as url:
        yield url


@pytest.fixture(scope="session")
def open_url():
    """The demo model, for everybody."""
    with _serving([]) as url:
        yield url


@pytest.fixture(scope="session")
def agent_url(tmp_path_factory):
    """A model that calls tools; see ``agent_model``."""
    folder = tmp_path_factory.mktemp("models") / "agent"
    agent_model.write_folder(folder)
    flags = ["--reasoning-parser", "qwen3"]
    with _serving([str(folder), *flags], agent_engine.kiln_command()) as url:
        yield url


@pytest.fixture(scope="session")
def run_client():
    """Run a client's program in its environment and return what it prints."""

    def run(client: str, mode: str, url: str, key: str = "", text: str = "") -> Any:
        if client in NODE and not has_node():
            pytest.skip("node and npm are not installed")
        place = environment(client)
        script = SCRIPTS / f"{_SCRIPT_OF.get(client, client)}{place.suffix}"
        variables = {"PATH": os.environ["PATH"], "HOME": str(place.folder), "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [*place.command, str(script), mode, url, key],
            input=text,
            cwd=place.folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
