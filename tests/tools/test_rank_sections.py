"""The sections of gpu_check that run processes of a group, on CPUs by the host toolchain."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest
from depth import at_depth
from forked_scripts import DTYPES, run_forked
from gpu import all_reduce_ipc, engine_ranks, greedy, rank_checks, ranks, several, sum_plots
from gpu import report as gpu_report
from gpu.pace import NotMeasured
from gpu.ranks import CPU, run_job
from gpu.sections import SECTIONS, SEVERAL_GPUS, WHOLE_SEVERAL
from matplotlib.figure import Figure

from kiln.engine.bench.report import Report
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS


@pytest.fixture(autouse=True)
def on_host(monkeypatch, tmp_path):
    monkeypatch.setenv("KILN_CPU_KERNELS", "host")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def cheap_ranks(monkeypatch):
    """Ranks that are forked, and only in deep runs started as on a GPU machine."""
    if at_depth(True, False):
        for module in (ranks, engine_ranks):
            monkeypatch.setattr(module, "run_processes", run_forked)


def rows_of(job, world=2):
    rows = run_job(job, world, CPU, quick=True, seconds=120)
    assert all(row.get("ok", True) for row in rows), rows
    return rows


def test_bits_rounds_and_a_skipped_call_of_processes(cheap_ranks):
    found = list(all_reduce_ipc._of_world(2, CPU))
    assert all(row["ok"] for row in found), found
    of = {job: [row for row in found if row["job"] == job] for job in ("bits", "rounds", "skipped")}
    assert {row["what"] for row in of["bits"]} == {*ALGORITHMS, "fused"}
    assert len(of["bits"]) == 5 * len(at_depth(DTYPES, rank_checks.DTYPES))
    assert of["rounds"][0]["rounds"] == 100
    assert "rank 0 of 2 waited 1.5 s for rank 1" in of["skipped"][0]["told"]


@pytest.mark.deep
def test_times_of_every_way_that_a_cpu_has():
    rows = rows_of("gpu.rank_times:latency")
    assert len(rows) == 2
    for row in rows:
        assert {*ALGORITHMS, "auto", "torch"} <= {*row}
        assert row["symm_mem"] == "needs a GPU for each rank"
    [one, _] = rows_of("gpu.rank_times:fused")
    assert one["ratio"] == pytest.approx(one["apart"] / one["fused"])


BROKEN = """
def broken(ranks):
    ranks.meet()  # a rank that ends while the other connects is another failure
    if ranks.group.rank == 1:
        raise ValueError("a job that fails on one rank")
    return [{"ok": True}]
"""


def test_a_job_that_fails_on_one_rank_says_which_and_why(monkeypatch, tmp_path):
    (tmp_path / "some_job.py").write_text(BROKEN)
    monkeypatch.setattr(ranks, "_PATHS", [*ranks._PATHS, str(tmp_path)])
    *_, row = run_job("some_job:broken", 2, CPU, quick=True, seconds=60)
    assert row["ok"] is False
    assert "rank 1: ValueError: a job that fails on one rank" in row["status"]


def test_an_engine_of_two_ranks_answers_and_its_sums_are_counted(tmp_path, cheap_ranks):
    model = greedy.made_model("Llama", tmp_path)
    prompts = greedy.prompts()[:3]
    wanted = [greedy.generate(model, prompt, "cpu") for prompt in prompts]
    case = engine_ranks.Case(
        "Llama", str(tmp_path), 2, prompts, wanted, algorithm=engine_ranks.NCCL, device="cpu"
    )
    rows = engine_ranks.run(case)
    [row] = engine_ranks.judge(case, [dict(row) for row in rows], {})
    assert (row["ok"], row["wrong"], row["prompts"]) == (True, 0, 3)
    other = replace(case, wanted=[*wanted[:2], [0]])
    [row] = engine_ranks.judge(other, [dict(row) for row in rows], {})
    assert (row["ok"], row["wrong"]) == (False, 1)
    other = replace(case, algorithm="two_shot")
    [row] = engine_ranks.judge(other, rows, {})
    assert row["ok"] is False, "its sums were not those of the case"


@pytest.mark.parametrize(
    ("told", "seconds", "ok"),
    [("rank 1 of 2 is gone", 4.9, True), ("rank 1 of 2 is gone", 5.1, False), ("", 1.0, False)],
)
def test_a_lost_rank_must_be_named_in_time(told, seconds, ok):
    case = engine_ranks.Case("Llama", "", 2, [[1]], lost="kill")
    [row] = engine_ranks.judge(case, [{"told": told, "seconds": seconds}], {})
    assert row["ok"] is ok


def test_too_few_gpus_are_told():
    with pytest.raises(NotMeasured, match="--gpus 64: torch sees"):
        several.bits(argparse.Namespace(gpus=64, quick=True))


def test_sections_of_several_gpus_fit_their_time_and_have_names_of_their_own():
    assert sum(section.seconds for section in SEVERAL_GPUS.values()) < 1.2 * WHOLE_SEVERAL
    assert not SECTIONS.keys() & SEVERAL_GPUS.keys()
    assert WHOLE_SEVERAL < 480


@pytest.mark.deep
def test_the_plot_has_a_panel_for_each_number_of_ranks_and_a_line_for_each_way():
    ways = {"one_shot_push": 3.0, "torch": 9.0, "symm_mem": "needs a GPU for each rank"}
    rows = [
        {"ranks": world, "bytes": size, **ways} for world in range(2, 9) for size in (1024, 4096)
    ]
    figure = Figure()
    sum_plots.draw_times(rows, "sums", figure)
    assert [axes.get_title() for axes in figure.axes] == ["2 ranks", "4 ranks", "8 ranks"]
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == ["one_shot_push", "torch"]
        assert list(axes.lines[1].get_ydata()) == [9.0, 9.0]


def test_the_times_behind_a_plan_are_a_table_by_blocks_and_size(tmp_path):
    times = [
        {"bytes": 1024, "blocks": 16, "algorithm": name, "us": us}
        for name, us in (("one_shot_push", 2.5), ("two_shot", 7.25))
    ]
    rows = [{"ranks": 2, "ok": True}, *({"times": json.dumps(one)} for one in times)]
    section = {"status": "passed", "rows": rows}
    made = Report("gpu_check_2gpus", "tools/x", details={"sections": {"tuned_plan": section}})
    gpu_report.write(made, tmp_path)
    page = (tmp_path / "gpu_check_2gpus.md").read_text()
    assert "| 2 | True |" in page
    assert "| 16 | 1024 | 2.5 | 7.25 |" in page
