"""Run the blocks of the documents, in a folder, with what stands in for models and questions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import agent_engine
import agent_model
from document_blocks import PORT, Block, words

from kiln.engine.cli.local_server import local_server

# What a page names -> what a test takes, which has neither a network nor a GPU.
STAND_INS = {
    "path/to/model": "engine/demo",
    # The model of tests/helpers/agent_model.py calls the functions that a question names.
    '"What is the weather in Paris?"': """'Call get_weather({"city": "Paris"})'""",
}
AGENT = "Qwen/Qwen3-0.6B"  # whose place a model that calls tools takes
_SECONDS = 540.0


@dataclass(frozen=True)
class Place:
    """Where blocks run. ``program``: the ``kiln`` of another checkout than that of the tests."""

    folder: Path
    models: Path  # where stand-ins for models of a hub are written
    variables: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] | None = None
    python: str = sys.executable


def stood_in(text: str) -> str:
    """Return a text with the names of models and questions replaced."""
    for name, instead in STAND_INS.items():
        text = text.replace(name, instead)
    return text


@contextmanager
def serving(command: str, place: Place) -> Iterator[str]:
    """Run the server of a page on a free port, and yield its URL."""
    given = words(stood_in(command))
    start = next(n for n, word in enumerate(given) if not re.match("[A-Z_]+=", word))
    settings = dict(word.split("=", 1) for word in given[:start])
    arguments = given[start + 2 :]  # behind `kiln serve` and `make serve`
    program = place.program
    if AGENT in arguments:
        folder = place.models / "agent"
        if not folder.exists():
            agent_model.write_folder(folder)
        arguments[arguments.index(AGENT)] = str(folder)
        program = agent_engine.kiln_command()
    with ExitStack() as stack:
        stack.enter_context(_inside(place.folder))
        stack.enter_context(_with({"OMP_NUM_THREADS": "1", **place.variables, **settings}))
        url, _ = stack.enter_context(local_server(arguments, 120, program))
        yield url


def run(block: Block, url: str, place: Place) -> None:
    """Run a block; it must succeed and print what its page says."""
    text = stood_in(block.text).replace(f"http://{PORT}", url)
    if block.language == "python":
        command = [place.python, "-c", text]
    else:
        command = ["bash", "-euo", "pipefail", "-c", _failing(text)]
    done = subprocess.run(
        command,
        cwd=place.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **place.variables},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert done.returncode == 0, f"{block.name} ended with {done.returncode}: {said}"
    check_output(block, done.stdout)


def check_output(block: Block, printed: str) -> None:
    """Compare what a block printed with what its page says; an ellipsis stands for anything."""
    if block.output is None:
        return
    if block.output_language == "json":
        found, wanted = json.loads(printed), json.loads(block.output)
        assert _fits(wanted, found), f"{block.name} printed {printed[:2000]}"
        return
    rest = printed
    for line in filter(None, map(str.strip, block.output.splitlines())):
        parts = line.replace("…", " … ").split()
        pattern = r"\s+".join(map(re.escape, parts)).replace(r"\s+…\s+", ".*?")
        pattern = pattern.replace(r"…\s+", ".*?").replace(r"\s+…", ".*?")
        match = re.search(pattern, rest)
        assert match is not None, f"{block.name} printed no {line!r}: {printed[:2000]}"
        rest = rest[match.end() :]


def _fits(wanted: Any, found: Any) -> bool:
    """Whether all that is wanted was found; other keys of an object do not matter."""
    if wanted == "…":
        return True
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            key == "…" or (key in found and _fits(value, found[key]))
            for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return len(wanted) == len(found) and all(map(_fits, wanted, found))
    return bool(wanted == found)


def _failing(text: str) -> str:
    """Let curl fail where the server answers with an error, and show no progress."""
    return re.sub(r"^curl ", "curl -sS --fail-with-body ", text, flags=re.MULTILINE)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _with(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
