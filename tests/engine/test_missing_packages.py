"""Kiln serves without the [cuda] extra, and runs offline without any server package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "engine" / "demo"
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


def start(text, *folders):
    """Run Python code in a process with those folders first on its path."""
    return subprocess.run(
        [sys.executable, "-c", text],
        env={
            "PYTHONPATH": ":".join([*folders, str(ROOT / "tools/import_root")]),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


def run(absent, code):
    done = start(BLOCK.format(absent=set(absent)) + code.format(demo=str(DEMO)))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.quick(1)
@pytest.mark.parametrize("absent", [CUDA + SERVER, CUDA, SERVER], ids=["both", "cuda", "server"])
def test_the_offline_api_needs_neither(absent):
    run(absent, OFFLINE)


COMMAND = """
from kiln.engine.cli.main import main
sys.exit(main({words!r}))
"""
WANTED = [
    ("jsonschema", "doctor"),
    ("tokenizers", "doctor"),
    ("uvicorn", "serve"),
    ("torch", "doctor"),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("package", "verb"), WANTED)
def test_a_command_names_a_package_that_it_lacks(package, verb):
    text = BLOCK.format(absent={package}) + COMMAND.format(words=[verb, str(DEMO)])
    done = start(text)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: the Python package {package} is not")
    assert "Traceback" not in done.stderr


def test_serve_names_a_package_that_the_engine_process_lacks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(absent={"safetensors"}))
    text = COMMAND.format(words=["serve", str(DEMO), "--port", "0"])
    done = start("import sys" + text, str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the Python package safetensors is not")
    assert "Traceback" not in done.stderr


def test_the_server_and_the_commands_need_no_cuda_package():
    run(CUDA, SERVE)
