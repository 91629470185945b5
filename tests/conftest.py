"""What every test shares: the programs that earlier runs compiled, and a seed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from depth import at_depth, choose, set_depth

ROOT = Path(__file__).resolve().parents[1]
_KEEP_DAYS, _KEEP_BYTES = 14, 256 << 20

# A worker for each core: the threads of one would only wait for those of the others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Name the folder of compiled programs, and how deep to test."""
    parser.addoption(
        "--programs",
        type=Path,
        default=ROOT / ".cache" / "programs",
        help="keep compiled programs in this folder (default: .cache/programs)",
    )
    parser.addoption(
        "--interleavings",
        type=int,
        help="schedules under which each all-reduce runs (default: 40, and 1000 with --deep)",
    )
    parser.addoption("--screenshots", type=Path, help="save pictures of the pages in this folder")
    parser.addoption("--deep", action="store_true", help="test each rule on many more cases")
    parser.addoption("--share", type=float, default=1.0, help="run this share of the tests")
    parser.addoption("--share-seed", type=int, default=0, help="draws the tests of --share")


def pytest_configure(config: pytest.Config) -> None:
    """Use one kernel cache for all processes and all runs, away from the user's.

    A program's key covers its whole source, its compiler and the options, so that no test can pass
    on what an earlier version left behind.
    """
    from kiln.cache.disk.trust import make_private_folder

    set_depth(config.option.deep)
    if config.option.interleavings is None:
        config.option.interleavings = at_depth(40, 1000)
    config.option.programs = config.option.programs.absolute()
    if not make_private_folder(config.option.programs):  # a checkout that we cannot write
        temporary = tempfile.TemporaryDirectory(prefix="kiln-tests-")
        config.add_cleanup(temporary.cleanup)
        config.option.programs = Path(temporary.name)
    # The workers of pytest-xdist inherit it.
    os.environ.setdefault("KILN_KERNEL_CACHE_DIR", str(config.option.programs / "kernels"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove programs that no run has used for two weeks; shared libraries see to themselves."""
    from kiln.cache.disk.prune import prune

    if not hasattr(config, "workerinput"):  # once, in the process that starts the workers
        for root in config.option.programs.glob("kernels*"):
            for folder in (root, root / "pieces"):
                prune(folder, max_bytes=_KEEP_BYTES, max_days=_KEEP_DAYS)


@pytest.hookimpl(trylast=True)  # behind -k, so that a few chosen tests all run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are too deep, or not in the drawn share."""
    items[:], left_out = choose(items, config.option.share, config.option.share_seed)
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(1234)
