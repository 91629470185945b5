"""The trials of tools/engine_faults.py, shorter: no client waits for an engine that has ended.

No verdict depends on how busy the machine is: the times are for the record.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal

import engine_faults
import pytest
from fault_trials import trials

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]


def faults(trial):
    return asyncio.run(trial)["faults"]


def ignore(count):
    """Take the number of units that are done."""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_ends_five_times_under_load_is_told_replaced_and_leaves_nothing(how):
    row = asyncio.run(trials.deaths("stub", how, 5, ignore, limit=math.inf))
    assert row["faults"] == []
    assert row["descriptors"] == 0
    assert row["told"] > 5


def test_the_real_engine_is_replaced_too():
    assert faults(trials.deaths("demo", signal.SIGKILL, 2, ignore, limit=math.inf)) == []


def test_saturation_is_no_false_alarm():
    assert faults(trials.saturation("stub", 30.0, ignore)) == []


def test_clients_that_leave_leave_nothing_behind():
    assert faults(trials.disconnects("demo", 100, 2, ignore)) == []


def test_requests_leave_no_memory_behind_and_a_row_is_written(monkeypatch, tmp_path, capsys):
    flags = ["requests", "--requests", "20000", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["engine_faults.py", *flags])
    assert engine_faults.main() == 0
    (row,) = json.loads((tmp_path / "engine_faults.json").read_text())["rows"]
    assert row["growth_bytes"] < trials.GROWTH_LIMIT
    assert "20,000 requests" in (tmp_path / "engine_faults.md").read_text()
