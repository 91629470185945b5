"""Processes killed at any moment; and the trials of tools/cache_stress.py, which runs longer ones.

In small: test_entry.py and test_store.py flip bits, test_nfs.py has two nodes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Runs in a process of its own, which has one thread: only then is it safe to fork.
KILLS = """
import json, sys
from pathlib import Path
from cache_trials import kills

folder = Path(sys.argv[1])
(folder / "locks").mkdir(mode=0o700)
steps = kills.kill_at_each_call(folder / "steps")
programs = kills.stand_ins(16)
result = kills.random_kills(folder / "cache", folder / "locks", programs, seconds=0.5)
wrong = {name: result[name] for name in kills.MUST_BE_ZERO}
print(json.dumps({"steps": steps, "kills": result["kills"], "wrong": wrong}))
"""


def test_a_process_killed_at_any_call_leaves_no_wrong_byte(tmp_path):
    environ = {"PYTHONPATH": f"{ROOT / 'tools/import_root'}:{ROOT / 'tools'}"}
    command = [sys.executable, "-c", KILLS, str(tmp_path)]
    result = json.loads(subprocess.check_output(command, env=environ, timeout=120))
    steps = result["steps"]
    assert steps["killed"] >= 40
    assert steps["wrong"] == steps["unswept"] == steps["unpublished"] == 0
    assert result["kills"] > 0
    assert not any(result["wrong"].values()), result["wrong"]


def run(*arguments):
    command = [sys.executable, str(ROOT / "tools" / "cache_stress.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.deep
def test_processes_killed_while_they_warm_one_cache_leave_no_wrong_byte():
    result = run("kill", "--seconds", "60", "--min-kills", "30")
    assert result["passed"]
    assert result["wrong_payloads"] == result["stuck_workers"] == 0
    assert result["leftovers_after_the_sweep"] == 0
    assert result["kills_amid_a_publication"] > 0, "the trial must hit what it is about"
    steps = result["at_each_call"]
    assert steps["killed"] >= 40
    assert steps["wrong"] == steps["unswept"] == steps["unpublished"] == 0


@pytest.mark.deep
def test_every_bit_of_three_real_entries_counts():
    result = run("flips", "--full")
    assert result["flips_tried"] == pytest.approx(8 * sum(result["entry_bytes"]), rel=0.01)
    assert result["truncations_tried"] >= 0.99 * sum(result["entry_bytes"])
    assert result["flips_tried"] >= 390_000
    assert result["flips_believed"] == 0
    assert result["truncations_believed"] == 0
    assert result["swaps_believed"] == 0


@pytest.mark.deep
def test_two_nodes_on_nfs_start_cold_without_a_failure():
    result = run("nfs", "--seconds", "4", "--min-stale", "100")
    assert result["passed"]
    assert result["wrong"] == result["nodes_that_failed"] == result["not_published"] == 0
    assert result["warnings"] == result["missing_at_the_end"] == 0
    assert result["stale_answers"] >= 100, "the model must lie to the nodes"
    assert result["protocol_without_care"]["failures"] > 0, "and careless nodes must fail on it"
