"""The oldest packages that pyproject.toml allows still serve, torch aside: it is too large."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# The tests of the code that uses these packages.
TESTS = (
    "tests/engine/text",
    "tests/engine/models",
    "tests/engine/process",
    "tests/engine/server",
    "tests/engine/test_llm.py",
)
# These compare with what later versions of transformers do, which Kiln itself does not call.
LATER = (
    "tests/engine/text/test_tokenizer.py::test_chats_are_rendered_and_encoded_as_transformers_does",
    "tests/engine/text/test_tokenizer.py::test_a_prefix_space_of_llama_is_added_as_transformers_does",
)


def oldest():
    """Return the requirements of the package, each at its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [re.fullmatch(r"([\w-]+)>=([\w.]+)", one) for one in project["dependencies"]]
    assert all(bounds), "a requirement without a lower bound"
    return sorted(f"{one[1]}=={one[2]}" for one in bounds if one[1] != "torch")


@pytest.fixture(scope="module")
def folder():
    """A folder with the oldest packages, which comes before the environment's own."""
    wanted = oldest()
    digest = hashlib.sha256("\n".join((sys.version, *wanted)).encode()).hexdigest()[:16]
    place = ROOT / ".cache" / "oldest" / digest
    if not (place / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(place), *wanted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=540)
        assert done.returncode == 0, done.stderr[-3000:]
        (place / "complete").touch()
    return place


@pytest.mark.deep
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("tests", TESTS)
def test_the_oldest_packages_that_are_allowed_serve(folder, request, tests):
    paths = os.pathsep.join((str(folder), str(ROOT / "tools" / "import_root")))
    hidden = ("PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", tests]
    command.append(f"--programs={request.config.getoption('programs')}")
    command += [f"--deselect={one}" for one in LATER]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**variables, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=2300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
