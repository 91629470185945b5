"""A step's time is a difference of two runs, and rows of several engines are comparable."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kiln.engine.bench import device_time, latency, offline
from kiln.engine.bench.device_time import device_spans, device_work, union_length
from kiln.engine.bench.engine import BenchEngine, BenchError, check_lengths
from kiln.engine.bench.report import Report, with_ratio
from kiln.engine.bench.side_by_side import measure_all
from kiln.engine.bench.workload import MixedLoad
from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.core import EngineCore


class Steady(BenchEngine):
    """A run takes 1 s, and 10 ms per step, which has all requests."""

    load_seconds = 2.0

    def __init__(self, name="steady", step_seconds=0.010, fails_at=None):
        self.name = name
        self.versions = {name: "1"}
        self.runs = []
        self.closed = False
        self._step_seconds = step_seconds
        self._fails_at = fails_at

    def run(self, prompts, lengths, adapters=None):
        assert adapters is None
        self.runs.append((len(prompts), len(prompts[0]), max(lengths)))
        if len(prompts) == self._fails_at:
            raise MemoryError("no room")
        return 1 + self._step_seconds * max(lengths)

    def step_details(self, prompts, skipped, steps, adapters=None):
        return {"device_ms": 4.0, "asked": (len(prompts), skipped, steps)}

    def close(self):
        self.closed = True


def ignore(text):
    """Show nothing."""


def test_a_step_is_the_difference_of_two_runs_over_their_steps():
    engine, load = Steady(), latency.LatencyLoad((1, 4), prompt_tokens=20, output_tokens=100)
    rows = list(latency.measure(engine, load, 50, ignore))
    assert [row["batch_size"] for row in rows] == [1, 4]
    for row in rows:
        assert row["step_ms"] == pytest.approx(10)
        assert row["output_tokens_per_s"] == pytest.approx(row["batch_size"] * 100)
        # The profiled steps are amid the timed ones: 8 + 42 before, 16, and 42 after.
        assert row["asked"] == (row["batch_size"], 50, 16)
    warm_up, *runs = engine.runs
    assert warm_up == (2, 20, 16)
    assert runs == [(n, 20, length) for n in (1, 4) for length in (8, 8, 8, 108, 108)]
    assert (load.longest, load.context) == (128, 78)


def test_a_difference_that_cannot_be_seen_gives_no_number():
    load = latency.LatencyLoad((2,), 20, 3)
    (row,) = latency.measure(Steady(step_seconds=0), load, 50, ignore)
    assert row["step_ms"] is row["output_tokens_per_s"] is None
    (row,) = latency.complete([row], lambda size: 1.0)
    assert row["share"] is row["idle_ms"] is row["ratio"] is None


def test_rows_of_one_batch_size_are_beside_each_other_with_their_ratio():
    load = latency.LatencyLoad((1, 4), 20, 100)
    engines = {"kiln": Steady("kiln"), "other": Steady("other", 0.025)}
    measured = measure_all(
        {name: lambda engine=engine: engine for name, engine in engines.items()},
        lambda engine: latency.measure(engine, load, 50, ignore),
        ignore,
    )
    assert measured.failure is None
    assert measured.load_seconds == {"kiln": 2.0, "other": 2.0}
    assert measured.versions == {"kiln": "1", "other": "1"}
    assert all(engine.closed for engine in engines.values())
    rows = latency.complete(measured.rows, lambda size: 2.0 * size)
    assert [(row["engine"], row["batch_size"]) for row in rows] == [
        ("kiln", 1), ("other", 1), ("kiln", 4), ("other", 4),
    ]  # fmt: skip
    assert [row["ratio"] for row in rows] == [None, pytest.approx(2.5)] * 2
    assert [row["share"] for row in rows] == pytest.approx([0.2, 0.08, 0.8, 0.32])
    assert [row["idle_ms"] for row in rows] == pytest.approx([6, 21, 6, 21])


def test_the_rows_before_a_baselines_failure_are_kept():
    engines = iter([Steady("kiln"), failing := Steady("other", fails_at=4)])
    load = latency.LatencyLoad((1, 4, 8), 20, 100)
    measured = measure_all(
        dict.fromkeys(["kiln", "other"], lambda: next(engines)),
        lambda engine: latency.measure(engine, load, 50, ignore),
        ignore,
    )
    assert [row["engine"] for row in measured.rows] == ["kiln"] * 3 + ["other"]
    assert isinstance(measured.failure, BenchError)
    assert str(measured.failure) == "other: MemoryError: no room"
    assert failing.closed
    with pytest.raises(MemoryError):  # without any row there is nothing to report
        measure_all(
            {"kiln": lambda: Steady(fails_at=2)},
            lambda engine: latency.measure(engine, load, 50, ignore),
            ignore,
        )


def test_a_gpus_page_says_what_the_floor_is(tmp_path):
    load = latency.LatencyLoad((1, 4), 20, 100)
    rows = [*latency.measure(Steady("kiln"), load, 50, ignore)]
    report = Report(
        "latency",
        "kiln bench latency",
        latency.complete(rows, lambda size: 2.5),
        asdict(load) | {"context": load.context},
        {
            "model": "org/some", "device": "cuda:0", "dtype": "bfloat16",
            "kv_dtype": "float8_e4m3fn", "copy_bytes_s": 4.1e12,
        },
        hardware={"cpu": "a CPU", "cores": 2, "gpu": "a GPU"},
    )  # fmt: skip
    page = latency.markdown(report)
    assert "weights (bfloat16), keys and values (float8_e4m3fn)" in page
    assert "at the 4.10 TB/s" in page
    assert "| kiln | 4 | 10.000 | 400 | 4.000 | 6.000 | 2.500 | 25% | – |" in page
    paths = report.write_named(tmp_path, page, latency.draw)
    stem = "latency-org-some-gpu"
    assert [path.name for path in paths] == [f"{stem}.json", f"{stem}.md", f"{stem}.png"]
    report.details["limits"] = {"tensor_parallel_size": 4}
    paths = report.write_named(tmp_path, page, latency.draw)
    assert paths[0].name == f"{stem}-tp4.json", "it leaves the record of one GPU alone"


def test_an_offline_row_counts_what_was_asked_for():
    load = MixedLoad(6, (3, 5), (2, 7))
    prompts, lengths = load.draw(50)
    engines = (Steady("kiln"), Steady("other", 0.5))
    rows = with_ratio(
        row for engine in engines for row in offline.measure(engine, load, 50, ignore)
    )
    assert [row["engine"] for row in rows] == ["kiln", "other"]
    for row, engine in zip(rows, engines, strict=True):
        assert engine.runs[0] == (2, 3, 2)  # the warm-up is no longer than the shortest request
        assert row["output_tokens"] == sum(lengths)
        assert row["prompt_tokens"] == sum(map(len, prompts))
        assert row["output_tokens_per_s"] == pytest.approx(sum(lengths) / row["seconds"])
    assert rows[0]["ratio"] is None
    assert rows[1]["ratio"] == pytest.approx(rows[1]["seconds"] / rows[0]["seconds"])
    assert rows[1]["ratio"] > 1


def test_a_wrong_number_of_tokens_is_an_error():
    check_lengths("x", [3, 4], [3, 4])
    with pytest.raises(BenchError, match=r"x: 1 of 2 requests .* such as 3 instead of 4"):
        check_lengths("x", [3, 3], [3, 4])


def test_overlapping_kernels_count_once():
    assert union_length([]) == 0
    assert union_length([(0, 2), (5, 6)]) == 3
    assert union_length([(5, 9), (0, 4), (3, 6), (7, 8), (4, 4)]) == 9


def test_only_what_ran_on_the_gpu_counts_as_device_time():
    def event(kind, start, end, annotation=False):
        return SimpleNamespace(
            device_type=SimpleNamespace(name=kind),
            time_range=SimpleNamespace(start=start, end=end),
            is_user_annotation=annotation,
        )

    events = [event("CPU", 0, 9), event("CUDA", 1, 2), event("CUDA", 0, 9, True)]
    assert device_spans(events) == [(1, 2)]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:  # torch's own events have these
        torch.ones(4).sum()
    own = profiler.events()
    assert len(own) > 0
    assert device_spans(own) == []
    assert all(one.time_range.end >= one.time_range.start for one in own)


@pytest.mark.parametrize("budget", [64, 7])
def test_every_profiled_step_has_one_token_of_every_request(fake_runner, monkeypatch, budget):
    runner = fake_runner(num_blocks=128)
    config = EngineConfig(
        ModelConfig("none"),
        KVConfig(block_size=4, enable_prefix_caching=False),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget),
    )
    core = EngineCore(config, runner=runner, eos=frozenset())
    profiled = []

    def record(core, steps):
        before = len(runner.batches)
        for _ in range(steps):
            core.step()
        profiled.append(runner.batches[before:])
        return [(0, 2000), (1000, 3000)]

    monkeypatch.setattr(device_time, "_profiled", record)
    prompts = [[1, 2, 3, 4, 5]] * 5
    work = device_work(core, prompts, skipped=6, steps=4)
    assert work == pytest.approx({"device_ms": 3 / 4, "device_launches": 2 / 4})
    assert [len(batches) for batches in profiled] == [2, 4]
    for batch in profiled[0] + profiled[1]:
        assert [row.num_tokens for row in batch.requests] == [1] * 5
        assert all(row.num_output_tokens >= 6 for row in batch.requests)
    assert not core.has_work
    monkeypatch.setattr(device_time, "_profiled", lambda core, steps: [])
    work = device_work(core, prompts, skipped=1, steps=1)
    assert work == {"device_ms": None, "device_launches": None}


def test_a_request_that_fails_ends_the_measurement(fake_runner):
    runner = fake_runner(num_blocks=128)
    runner.fail_with["profiled-1"] = "no finite value"
    config = EngineConfig(ModelConfig("none"), KVConfig(block_size=4))
    core = EngineCore(config, runner=runner, eos=frozenset())
    with pytest.raises(BenchError, match="no finite value"):
        device_work(core, [[1, 2]] * 3, skipped=3, steps=2)
    assert not core.has_work
