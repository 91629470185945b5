"""The trials of tools/cache_stress.py in their short form; it runs the long ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from depth import at_depth

KILL_SECONDS = at_depth("5", "60")
TOOL = Path(__file__).resolve().parents[2] / "tools" / "cache_stress.py"


def run(*arguments):
    command = [sys.executable, str(TOOL), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_processes_killed_while_they_warm_one_cache_leave_no_wrong_byte():
    result = run("kill", "--seconds", KILL_SECONDS, "--min-kills", at_depth("15", "30"))
    assert result["passed"]
    assert result["wrong_payloads"] == result["stuck_workers"] == 0
    assert result["leftovers_after_the_sweep"] == 0
    assert result["kills_amid_a_publication"] > 0, "the trial must hit what it is about"
    steps = result["at_each_call"]
    assert steps["killed"] >= 40
    assert steps["wrong"] == steps["unswept"] == steps["unpublished"] == 0


def test_every_bit_of_three_real_entries_counts():
    result = run("flips", *at_depth([], ["--full"]))
    share = at_depth(0.02, 1.0)
    assert result["flips_tried"] == pytest.approx(8 * share * sum(result["entry_bytes"]), rel=0.01)
    assert result["truncations_tried"] >= share * 0.99 * sum(result["entry_bytes"])
    assert result["flips_tried"] >= share * 390_000
    assert result["flips_believed"] == 0
    assert result["truncations_believed"] == 0
    assert result["swaps_believed"] == 0


def test_two_nodes_on_nfs_start_cold_without_a_failure():
    result = run("nfs", "--seconds", "4", "--min-stale", "100")
    assert result["passed"]
    assert result["wrong"] == result["nodes_that_failed"] == result["not_published"] == 0
    assert result["warnings"] == result["missing_at_the_end"] == 0
    assert result["stale_answers"] >= 100, "the model must lie to the nodes"
    assert result["protocol_without_care"]["failures"] > 0, "and careless nodes must fail on it"
