"""The choice of a plan from times, and the files that plans are kept in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kiln.engine.distributed import tune_files, tune_table
from kiln.engine.distributed.all_reduce_plan import Plan, default_plan, gpu_blocks
from kiln.engine.distributed.peer_conditions import HOST, NVLINK, ONE_GPU
from kiln.engine.distributed.tuner import best_plan
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig

RECORDS = Path(__file__).resolve().parents[3] / "benchmarks"
SIZES = (1024, 4096, 16384, 65536)
WIDEST = Plan(ModeConfig(65536), 65536, max_bytes=65536)


def times(**lists):
    return {name: dict(zip(SIZES, own, strict=False)) for name, own in lists.items()}


def test_each_algorithm_gets_the_sizes_at_which_it_is_fastest():
    measured = times(
        one_shot_push=[10, 20, 80, 400], two_shot_push=[20, 25, 40, 300],
        one_shot_pull=[30, 40, 90, 500], two_shot=[30, 30, 50, 90], torch=[90, 90, 95, 100],
    )  # fmt: skip
    _, plan = best_plan(measured, SIZES, WIDEST)
    assert plan.modes == ModeConfig(4096, 16384, 16384, measured=True)
    assert [plan.algorithm_for(size) for size in (*SIZES, 65537)] == [
        "one_shot_push", "one_shot_push", "two_shot_push", "two_shot", None,
    ]  # fmt: skip


def test_torch_takes_what_it_is_faster_at():
    measured = times(one_shot_push=[10, 20, 80], two_shot=[30, 30, 50, 90], torch=[60, 60, 60, 60])
    _, plan = best_plan(measured, SIZES, WIDEST)
    assert plan.max_bytes == 16384
    assert plan.algorithm_for(65536) is None
    _, plan = best_plan(times(one_shot_push=[10] * 4, torch=[5] * 4), SIZES, WIDEST)
    assert plan.max_bytes == 0
    assert {plan.algorithm_for(size) for size in SIZES} == {None}


def test_a_gain_below_three_percent_is_not_worth_another_algorithm():
    measured = times(one_shot_push=[100, 100, 100, 101], two_shot=[120, 120, 120, 100])
    _, plan = best_plan(measured, SIZES, WIDEST)
    assert plan.modes.one_shot_push_threshold == 65536


def test_a_plan_without_the_largest_messages_of_a_push_has_smaller_buffers():
    forced = default_plan(4, forced="two_shot", blocks=2)
    assert forced.layout(4).push_bytes == 1
    assert not forced.fuses(64)
    assert forced.algorithm_for(64) == "two_shot"
    assert default_plan(4, forced="one_shot_push", blocks=2).layout(4).pull_bytes == 1
    assert default_plan(8, forced="auto", blocks=2).layout(8).push_bytes == 128 << 10


def test_the_defaults_of_two_ranks_are_those_that_were_measured_on_two_gpus():
    record = json.loads((RECORDS / "gpu_check_2gpus.json").read_text())
    measured = record["sections"]["tuned_plan"]["rows"][0]
    plan = default_plan(2, forced="auto", blocks=gpu_blocks(2))
    for name in ("fused_threshold", "max_bytes", "max_blocks"):
        assert plan.fields()[name] == measured[name], name
    limits = {f"{name}_threshold": limit for name, limit in plan.modes.limits().items()}
    chosen = ModeConfig(**{name: measured[name] for name in limits})
    for power in range(10, 25):
        assert plan.modes.choose(1 << power) == chosen.choose(1 << power)
    assert not plan.modes.measured  # on this machine


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_files, "cache_root", lambda env: tmp_path)
    return tmp_path


def key(**other):
    return {"gpu": "H", "world": 2, "fabric": NVLINK, "driver": "1", "source": "a", **other}


def test_a_table_is_found_on_the_same_hardware_alone(folder):
    plan = Plan(ModeConfig(1, 2, 3, measured=True), 4, max_bytes=5, max_blocks=6)
    tune_table.store(key(), plan, [])
    assert tune_table.load(key()) == plan
    for other in ({"gpu": "B"}, {"world": 4}, {"driver": "2"}, {"source": "b"}, {"fabric": HOST}):
        assert tune_table.load(key(**other)) is None


def test_times_of_ranks_that_share_a_gpu_are_refused(folder):
    plan = Plan(ModeConfig(1), 4)
    with pytest.raises(ConfigError, match=f"measured on '{ONE_GPU}' says nothing"):
        tune_table.store(key(fabric=ONE_GPU), plan, [])
    cpu = tune_table.key_of(2, torch.device("cpu"), HOST)
    assert cpu["gpu"].startswith("no GPU")
    path = tune_table.store(cpu, plan, [])
    for other in (key(), key(fabric=ONE_GPU)):  # copied to where a GPU's is looked for
        path.rename(tune_table._path(other))
        path = tune_table._path(other)
        assert tune_table.load(other) is None


def test_a_damaged_table_is_reported_and_not_used(folder, caplog):
    path = tune_table.store(key(), Plan(ModeConfig(1), 4), [])
    path.write_text("{}")
    assert tune_table.load(key()) is None
    assert str(path) in caplog.text
