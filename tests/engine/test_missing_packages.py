"""Kiln serves without the [cuda] extra, and runs offline without any server package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CUDA = ("cuda", "cupy", "triton")
SERVER = ("fastapi", "uvicorn", "starlette", "zmq", "msgspec", "httpx", "rich", "prometheus_client")
BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Absent())
"""
OFFLINE = """
from kiln import LLM, SamplingParams
llm = LLM({demo!r}, device="cpu", kv_memory_gib=0.1)
[out] = llm.chat([{{"role": "user", "content": "What is 17 + 25?"}}], SamplingParams(temperature=0))
assert out.outputs[0].text == "42", out
"""
SERVE = """
import kiln.engine.cli.serving
from kiln.engine.cli.main import main
for command in (["env"], ["kernels", "list"], ["kernels", "choices"], ["doctor"]):
    assert main(command) == 0, command
"""


def run(absent, code):
    text = BLOCK.format(absent=set(absent)) + code.format(demo=str(ROOT / "engine" / "demo"))
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={
            "PYTHONPATH": str(ROOT / "tools/import_root"),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.quick(1)
@pytest.mark.parametrize("absent", [CUDA + SERVER, CUDA, SERVER], ids=["both", "cuda", "server"])
def test_the_offline_api_needs_neither(absent):
    run(absent, OFFLINE)


def test_the_server_and_the_commands_need_no_cuda_package():
    run(CUDA, SERVE)
