"""What every test shares: no kernel cache but its own, and a seed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# Before anything imports Kiln: one cache for the whole run, away from the user's, so that a
# kernel is compiled once and a test cannot pass on what an earlier version left behind.
_CACHE = tempfile.TemporaryDirectory(prefix="kiln-tests-")
os.environ.setdefault("KILN_KERNEL_CACHE_DIR", _CACHE.name)

# A worker for each core: the threads of one would only wait for those of the others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``make test`` runs two passes, of several processes: they compile each program once."""
    parser.addoption("--programs", type=Path, help="keep the tests' programs in this folder")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(1234)
