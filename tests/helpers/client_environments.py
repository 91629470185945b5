"""Environments of other people's programs: one for each, kept in ``.cache/clients``.

An environment is made when a test first wants it, from a registry, and is named after the hash of
what it holds. So a changed list is a new environment, and an unchanged one is made once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "clients"
# Fixed versions: a release of theirs cannot turn a test red. Raise them together.
PYTHON = {
    "openai2": ("openai==2.54.0",),
    "openai3": ("openai==3.57.0",),
    "anthropic": ("anthropic==2.14.0",),
    "litellm": ("litellm==1.110.2",),
    "langchain": ("langchain==1.5.2", "langchain-openai==1.7.4"),
    "llama_index": ("llama-index-llms-openai-like==0.8.1",),
    "instructor": ("instructor==1.17.0", "openai==3.3.0"),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.38.0", "openai==3.3.0"),
    "schemathesis": ("schemathesis==4.32.5",),
    "sglang_router": ("sglang-router==0.3.2",),
}
NODE = {
    "openai_node": {"openai": "7.57.0"},
    "ai_sdk": {"ai": "6.0.326", "@ai-sdk/openai-compatible": "2.0.92", "zod": "4.6.7"},
}
_INSTALL_SECONDS = 540.0


class EnvironmentFailedError(Exception):
    """A client could not be installed; the message ends with what the installer said."""


@dataclass(frozen=True)
class Environment:
    """An installed client: ``command`` runs a script of its language."""

    folder: Path
    command: tuple[str, ...]
    suffix: str  # of such scripts


def has_node() -> bool:
    """Whether this machine can run and install programs for Node."""
    return shutil.which("node") is not None and shutil.which("npm") is not None


def environment(name: str) -> Environment:
    """Return the environment of a client, which is made if it is missing.

    Raises EnvironmentFailedError if the registry cannot be reached or lacks a package.
    """
    if name in NODE:
        node = shutil.which("node")
        assert node is not None
        wanted = json.dumps({"private": True, "type": "module", "dependencies": NODE[name]})
        folder = _made(name, wanted, _install_node)
        return Environment(folder, (node,), ".mjs")
    wanted = "\n".join((sys.version, *PYTHON[name]))
    folder = _made(name, wanted, _install_python)
    return Environment(folder, (str(folder / "bin" / "python"), "-I"), ".py")


def _made(name: str, wanted: str, install: Callable[[str, Path, str], None]) -> Path:
    """Return the folder of what is wanted; other processes wait while one makes it."""
    folder = FOLDER / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
    complete = folder / "complete"
    with _alone(name):
        if not complete.exists():
            for old in FOLDER.glob(f"{name}-*"):
                shutil.rmtree(old)
            install(name, folder, wanted)
            complete.touch()
    return folder


@contextmanager
def _alone(name: str) -> Iterator[None]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install_python(name: str, folder: Path, wanted: str) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *PYTHON[name]])


def _install_node(name: str, folder: Path, wanted: str) -> None:
    folder.mkdir(parents=True)
    (folder / "package.json").write_text(wanted)
    _run(["npm", "install", "--loglevel=error", "--no-audit", "--no-fund"], folder)


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    """Run an installer outside of the environment that the tests run in."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    variables = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=_INSTALL_SECONDS
    )
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise EnvironmentFailedError(f"{' '.join(command)}: exit code {done.returncode}\n{said}")
