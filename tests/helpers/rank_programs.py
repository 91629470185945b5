"""Run a program that forks ranks: the process of pytest has threads, so it must not fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / name) for name in ("tools/import_root", "tests/helpers", "tools")]


def run_program(path: Path, *arguments: str, seconds: float = 190.0) -> Any:
    """Run a program; return the JSON of the last line that it prints."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
