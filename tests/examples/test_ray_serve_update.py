"""A second command that replaces what the first one serves, in a cluster of its own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from ray_trials.cluster import FLAGS, Cluster, free_port, running
from ray_trials.load import load

pytest.importorskip("ray.serve", reason='needs Ray: pip install -e ".[ray]"')
pytestmark = pytest.mark.deep

RAY = Path(sys.executable).parent / "ray"


@pytest.fixture
def address(monkeypatch, tmp_path):
    """Start the first machine of a cluster; stop it afterwards."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    port = free_port()
    start = [RAY, "start", "--head", f"--port={port}", "--num-cpus=8", "--include-dashboard=false"]
    with (tmp_path / "ray").open("wb") as log:
        head = subprocess.Popen([*start, "--block"], stdout=log, stderr=log)
    Cluster.wait_until(lambda: b"Ray runtime started" in (tmp_path / "ray").read_bytes())
    yield f"127.0.0.1:{port}"
    head.terminate()
    head.wait(60)


def test_a_newer_command_takes_over_without_a_bad_request_and_outlives_the_old_one(
    address, tmp_path
):
    flags = [*FLAGS, "--address", address]
    with running(tmp_path / "old", flags) as old, load(old.url, 8, 10**6) as made:
        try:
            made.wait_for(50)
            port = int(old.url.rpartition(":")[2])
            with running(tmp_path / "new", [*flags, "--max-num-seqs", "16"], port) as new:
                os.kill(old.process.pid, signal.SIGINT)
                assert old.process.wait(60) == 0
                assert "another command serves" in (tmp_path / "old").read_text()
                made.wait_for(len(made.answers) + 200)
                made.stop()
                made.wait()
                assert not made.bad
                new.process.send_signal(signal.SIGTERM)
                assert new.process.wait(60) == 0
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{old.url}/health")
        finally:
            made.stop()
