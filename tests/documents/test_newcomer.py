"""Who clones the repository can follow each page from its top to its bottom.

A clone of the last commit gets the environment that `make serve` or `make test` makes. Then every
command and program of a page runs in it, in their order, with the servers that the page starts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack

import pytest
from document_blocks import PAGES, ROOT, blocks, commands
from document_runs import Place, run, serving

COMPILING = ("kernels.md", "graphs-and-compile.md", "deployment.md")  # they need NVRTC
RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]
FIRST = [page for page in RUN if page.name not in COMPILING]
_SECONDS = 1500.0

pytestmark = [pytest.mark.deep, pytest.mark.timeout(2 * _SECONDS)]


def _make(folder, *words):
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, env=_outside()
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def _outside():
    """Return the variables of a shell that knows nothing of these tests."""
    ours = ("PYTHONPATH", "KILN_KERNEL_CACHE_DIR", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in ours}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with the environment of `make serve`, and the client that the README installs."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    folder = tmp_path_factory.mktemp("newcomer") / "kiln"
    _make(folder.parent, "git", "clone", "--quiet", str(ROOT), str(folder))
    assert "kiln serve" in _make(folder, "make", "-n", "serve")
    _make(folder, "make", ".venv/.serve")
    _make(folder, ".venv/bin/pip", "install", "--quiet", "openai")
    return folder


@pytest.fixture(scope="module")
def compiling_clone(clone):
    """The same with what `make test` installs."""
    _make(clone, "make", ".venv/.dev")
    return clone


def _follow(page, folder, home):
    """Run the blocks of a page in their order."""
    binaries = folder / ".venv" / "bin"
    variables = {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "PYTHONPATH": "",
        "KILN_KERNEL_CACHE_DIR": str(home / "kernels"),
    }
    place = Place(folder, home, variables, [str(binaries / "kiln")], str(binaries / "python"))
    url, server = "", ExitStack()
    with server:
        for block in blocks(folder / page.relative_to(ROOT)):
            if not block.runs:
                continue
            if block.starts_server:
                server.close()
                url = server.enter_context(serving(commands(block.text)[0], place))
                continue
            if block.is_client and not url:  # of the README's server
                url = server.enter_context(serving("kiln serve", place))
            run(block, url, place)
    _make(folder, "git", "clean", "-fdq")  # what a page wrote, such as a kernel


@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.name)
def test_a_page_can_be_followed_after_make_serve(page, clone, tmp_path):
    _follow(page, clone, tmp_path)


@pytest.mark.parametrize("name", COMPILING)
def test_a_page_that_compiles_can_be_followed_after_make_test(name, compiling_clone, tmp_path):
    _follow(ROOT / "docs" / name, compiling_clone, tmp_path)
