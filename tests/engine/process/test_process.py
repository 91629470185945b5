"""The engine process imports the Kiln of its parent, whichever others the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kiln

PARENT = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from kiln.engine.distributed.command import module_command
sys.exit(subprocess.run(module_command("probe")).returncode)
"""
PROBE = """
import kiln.engine.process.child
def main(arguments):
    print(kiln.__file__, kiln.engine.process.child.__file__)
    return len(arguments)
"""


@pytest.fixture
def copies(tmp_path):
    """Two copies of Kiln, in ``first`` and in ``second``."""
    ours = Path(kiln.__file__).parent
    for name in ("first", "second"):
        folder = tmp_path / name / "kiln"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text((ours / "__init__.py").read_text())
        for part in ("cache", "engine", "jit_kernels", "kernel_sources"):
            (folder / part).symlink_to((ours / part).resolve())
    (tmp_path / "first" / "probe.py").write_text(PROBE)
    return tmp_path


@pytest.mark.parametrize("used", ["first", "second"])
def test_a_child_imports_the_very_kiln_of_its_parent(copies, used):
    done = subprocess.run(
        [sys.executable, "-c", PARENT, str(copies / used)],
        env={**os.environ, "PYTHONPATH": str(copies / "first")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    own = copies / used / "kiln"
    assert done.stdout.split()[:2] == [f"{own}/__init__.py", f"{own}/engine/process/child.py"]


def test_the_folder_of_kiln_shadows_no_other_module(copies):
    """Installed, that folder is site-packages, whose backports must not replace the library's."""
    (copies / "second" / "this.py").write_text("raise SystemExit(9)")
    (copies / "first" / "probe.py").write_text("import this\n" + PROBE)
    done = subprocess.run(
        [sys.executable, "-c", PARENT, str(copies / "second")],
        env={**os.environ, "PYTHONPATH": str(copies / "first")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
