"""Two depths of testing, and a share that is drawn at random."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
from depth import at_depth

@pytest.mark.parametrize("letter", "abc")
@pytest.mark.parametrize("number", range(4))
@pytest.mark.quick(5)
def test_thinned(letter, number):
    print("ran", "thinned", letter, number)

@pytest.mark.deep
def test_deep():
    print("ran deep")

@pytest.mark.parametrize("case", range(at_depth(2, 20)))
def test_sized(case):
    print("ran", "sized", case)
"""
HELPERS = Path(__file__).parent / "helpers"
CONFTEST = """
from depth import choose, set_depth

def pytest_addoption(parser):
    parser.addoption("--deep", action="store_true")
    parser.addoption("--share", type=float, default=1.0)

def pytest_configure(config):
    set_depth(config.option.deep)

def pytest_collection_modifyitems(config, items):
    items[:], _ = choose(items, config.option.share, 7)
"""


@pytest.fixture
def ran(tmp_path):
    """Run the tests above with some flags, and return what they printed."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\nmarkers =\n  deep\n  quick\npythonpath = {HELPERS}\n"
    )

    def run(*flags):
        command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *flags]
        out = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        return [line[line.index("ran ") + 4 :] for line in out.splitlines() if "ran " in line]

    return run


def test_quick_runs_show_each_value_and_deep_runs_each_case(ran):
    quick, deep = ran(), ran("--deep")
    thinned = [line.split()[1:] for line in quick if line.startswith("thinned")]
    assert len(thinned) <= 5
    assert {letter for letter, _ in thinned} == set("abc")
    assert {number for _, number in thinned} == set("0123")
    assert "deep" not in quick
    assert sum(line.startswith("sized") for line in quick) == 2
    assert len([line for line in deep if line.startswith("thinned")]) == 12
    assert "deep" in deep
    assert sum(line.startswith("sized") for line in deep) == 20


def test_a_share_is_drawn_alike_each_time(ran):
    drawn = ran("--deep", "--share", "0.2")
    assert len(drawn) == round(0.2 * 33)
    assert ran("--deep", "--share", "0.2") == drawn
