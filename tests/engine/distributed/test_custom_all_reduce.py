"""The sums of a group by Kiln's kernels: processes that share memory, on the host toolchain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from depth import at_depth
from rank_programs import run_program

WORLDS = at_depth(["2"], ["2", "3"])
DTYPES = at_depth(["float32"], ["bfloat16", "float32"])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return world -> what each rank's cases returned."""
    folder, here = tmp_path_factory.mktemp("tables"), Path(__file__)
    return run_program(
        here.with_name("sum_cases.py"), str(folder), json.dumps(WORLDS), json.dumps(DTYPES)
    )


@pytest.fixture
def of(results):
    """Return a function from a case to what the two ranks returned."""
    return lambda case: [rank[case] for rank in results["2"]]


@pytest.mark.parametrize("world", WORLDS)
def test_every_algorithm_has_the_bits_of_the_sum_in_rank_order(results, world):
    for rank in results[world]:
        found = rank["bits"]
        assert found["disabled"] == ""
        assert found["wrong"] == []
        assert found["fused"]


def test_messages_that_are_not_for_the_kernels(of):
    for found in of("bits"):
        assert not found["too large"]
        assert not found["no such dtype"]
        assert not found["not dense"]
        assert found["fuses"] == [True, False, True, False]


def test_calls_are_counted_by_algorithm_and_none_runs_after_the_end(of):
    for found in of("bits"):
        names = {"one_shot_push", "two_shot_push", "one_shot_pull", "two_shot"}
        assert names < set(found["stats"])
        assert found["stats"]["fused_all_reduce_add_rms_norm"] == 3 * len(DTYPES)
        assert found["stats"]["stream_waits"] == 0
        assert (found["closed"], found["after"]) == ("it is closed", False)


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_skips_a_call_is_named_by_all_who_waited(results, world):
    *others, last = (rank["skips"] for rank in results[world])
    for rank, found in enumerate(others):
        words = f"rank {rank} of {world} waited 0.7 s for rank {len(others)} (one_shot_push, 160"
        assert words in found["message"]
        assert "call 3)" in found["message"]
        assert found["again"] == found["message"]
        assert found["seconds"] < 0.3
    assert f"waited in vain for rank {len(others)}, so rank {len(others)} of" in last["message"]


def test_ranks_with_other_settings_are_named_with_the_settings(of):
    for found in of("differs"):
        assert found["error"] == "ConfigError"
        assert "one_shot_push_threshold is 2048 on rank 0; 4096 on rank 1" in found["message"]
    for found in of("waits_differ"):
        assert "watchdog_ms is 1001 on rank 0; 1000 on rank 1" in found["message"]
    for found in of("environment_differs"):
        assert "KILN_ALL_REDUCE is auto on rank 0; torch on rank 1" in found["message"]


def test_what_one_rank_cannot_access_nobody_uses(of):
    for found in of("no_access"):
        assert found["disabled"]
        assert "what rank 1 wrote to the buffer of rank 0 is not there" in found["reason"]
    for found in of("no_memory"):
        assert (found["disabled"], "there is none" in found["reason"]) == (True, True)


def test_the_toggle_decides(of):
    for found in of("torch_only"):
        assert (found["disabled"], "KILN_ALL_REDUCE=torch" in found["reason"]) == (True, True)
    for found in of("must_work"):
        assert found["error"] == "ConfigError"
        assert "KILN_ALL_REDUCE=jit cannot be used here" in found["message"]


def test_a_measured_plan_is_kept_and_found_again(of):
    one, other = of("tuned")
    assert one == other  # of the slowest rank's times, so that all choose the same
    assert (one["before"], one["alike"], one["plan"]["measured"]) == (False, True, True)
    assert {"one_shot_push", "two_shot", "torch", "fused", "apart"} <= set(one["names"])
    assert one["blocks"] == [0, 1, 2]


def test_where_torch_is_faster_it_sums_and_the_engine_says_so(of):
    for found in of("torch_is_faster"):
        assert found["reason"].startswith("torch sums messages of every size faster here")
        assert found["forced"] == "", "KILN_ALL_REDUCE=jit"


def test_wrong_sums_are_not_timed(of):
    for found in of("wrong_bits"):
        assert found["error"] == "ConfigError"
        assert "gives wrong sums of 256 bytes" in found["message"]


def test_a_wait_ends_as_soon_as_the_rank_is_known_to_be_gone(of):
    found, _ = of("aborted")
    assert found["seconds"] < 20
    assert "waited" in found["message"]
    assert "for rank 1" in found["message"]
