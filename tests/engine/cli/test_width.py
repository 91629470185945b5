"""What the verbs print fits a terminal of 80 columns, and has no styles where it is no terminal."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from kiln.engine.distributed.command import module_command

DEMO = Path(__file__).parents[3] / "engine" / "demo"
VERBS = ["", "env", "doctor", f"doctor {DEMO}", "kernels choices", "kernels list --arch sm_80"]
CROWDED = '{"abc": 1, "hidden_act": "tanh", "another": {"deep": "and rather long a value it is"}}'


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("verb", VERBS)
def test_no_line_is_longer_than_the_terminal(kiln, monkeypatch, verb, columns):
    monkeypatch.setenv("KILN_KERNEL_CACHE_DIR", "/no/such/cache")
    done = kiln(*verb.split(), COLUMNS=str(columns))
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= columns
    assert "\x1b" not in done.stdout


def test_problems_of_a_checkpoint_fit_too(kiln):
    done = kiln("doctor", DEMO, "--hf-overrides", CROWDED, COLUMNS="80")
    assert done.returncode == 1
    assert done.stdout.count("broken") == 3
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("verb", [*VERBS, "serve --help=all", "chat --help", "bench --help"])
def test_a_terminal_wraps_no_line(tmp_path, verb, columns):
    """tmux joins the lines that it wrapped, if asked to; here it has none to join."""
    socket, ended = str(tmp_path / "tmux"), tmp_path / "ended"
    command = shlex.join([*module_command("kiln.engine.cli.main"), *verb.split()])
    line = f"{command}; touch {shlex.quote(str(ended))}; sleep 60"
    tmux = ["tmux", "-f", "/dev/null", "-S", socket]
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    kept["KILN_KERNEL_CACHE_DIR"] = "/no/such/cache"
    subprocess.run(
        [*tmux, "new-session", "-d", "-x", str(columns), "-y", "400", line], check=True, env=kept
    )
    try:
        for _ in range(600):
            if ended.exists():
                break
            time.sleep(0.1)
        assert ended.exists()
        plain, joined = (
            subprocess.run(
                [*tmux, "capture-pane", "-p", *more], check=True, capture_output=True, text=True
            ).stdout.rstrip()
            for more in ([], ["-J"])
        )
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    assert len(plain.splitlines()) > 3
    assert [one.rstrip() for one in plain.splitlines()] == [
        one.rstrip() for one in joined.splitlines()
    ]
