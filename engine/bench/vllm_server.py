"""vLLM's own server, run by another Python, for the serving benchmark."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kiln.engine.bench.engine import BenchError
from kiln.engine.bench.http_get import get, get_json
from kiln.engine.bench.server_log import ServerLog
from kiln.engine.bench.vllm_engine import llm_keywords
from kiln.engine.config import EngineConfig

_MODULE = "vllm.entrypoints.openai.api_server"
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.25
# vLLM must load nothing from the hub, and send no statistics.
_OFFLINE = ("HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1")


def server_flags(config: EngineConfig) -> list[str]:
    """Return the flags of vLLM's server for a config of Kiln.

    They are the model, its dtypes and limits. What Kiln was not told has vLLM's own default, so
    prefixes are cached unless Kiln was told not to.
    """
    keywords = llm_keywords(config)
    for name in ("enable_prefix_caching", "skip_tokenizer_init"):
        del keywords[name]
    flags = []
    for name, value in keywords.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", _text(value)]
    return flags + ([] if config.kv.enable_prefix_caching else ["--no-enable-prefix-caching"])


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


@contextmanager
def vllm_server(
    config: EngineConfig, python: str, log: ServerLog, patience: float
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve on a free port of the loopback interface; yield (URL, process) when it is ready.

    At the end it and its own processes are stopped. Raises BenchError if it is not ready after
    ``patience`` seconds.
    """
    port = _free_port()
    place = ["--host", "127.0.0.1", "--port", str(port)]
    # -P: modules in the working folder must not shadow what vLLM imports.
    process = subprocess.Popen(
        ["env", *_OFFLINE, python, "-P", "-m", _MODULE, *server_flags(config), *place],
        stdin=subprocess.DEVNULL,
        stdout=log.file,
        stderr=log.file,
        start_new_session=True,  # so that its processes can be stopped together
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, log, time.monotonic() + patience)
        yield url, process
    finally:
        _stop(process)


def version(url: str) -> dict[str, str]:
    """Return the version that a server of vLLM's tells, if it does."""
    try:
        return {"vllm": str(get_json(f"{url}/version")["version"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str, log: ServerLog, until: float) -> None:
    while time.monotonic() < until:
        if (code := process.poll()) is not None:
            raise BenchError(f"vllm: its server ended with exit code {code}; {log.end()}")
        with suppress(OSError):
            get(f"{url}/health", timeout=5)
            return
        time.sleep(_POLL_SECONDS)
    raise BenchError(f"vllm: its server is not ready in time; {log.end()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):  # what is left of its session
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
