"""What adapters add to a step: the adapters that are asked for, and the growth that is computed."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from kiln.engine.bench import lora
from kiln.engine.bench.engine import BenchEngine
from kiln.engine.bench.report import Report
from kiln.engine.bench.side_by_side import measure_all

MS = 0.001


class Steady(BenchEngine):
    """A run takes 1 s, and 10 ms per step and 1 ms more for each distinct adapter in it."""

    load_seconds = 2.0
    lora_backend = "a backend"

    def __init__(self, product="kiln", adapters=(), step_ms=10.0, each_ms=1.0):
        self.product = product
        self.name = f"{product} with LoRA" if adapters else product
        self.adapters = adapters
        self.versions = {product: "1"}
        self.asked = []
        self._step_ms, self._each_ms = step_ms, each_ms

    def run(self, prompts, lengths, adapters=None):
        self.asked.append((len(prompts), None if adapters is None else tuple(adapters)))
        return 1 + max(lengths) * MS * (self._step_ms + self._each_ms * len(set(adapters or ())))

    def step_details(self, prompts, skipped, steps, adapters=None):
        return {"device_ms": 4.0, "device_launches": 200.0 + len(set(adapters or ()))}

    def close(self):
        """Free nothing."""


NAMES = tuple("abcdefgh")
LOAD = lora.LoRALoad((2, 8), prompt_tokens=20, output_tokens=100, adapters=(0, 1, 3, 8), rank=4)


def ignore(text):
    """Show nothing."""


def measured(*engines, load=LOAD, floor_ms=lambda number: 0.5 * number):
    done = measure_all(
        {engine.name: lambda engine=engine: engine for engine in engines},
        lambda engine: lora.measure(engine, load, 50, ignore),
        ignore,
    )
    assert done.failure is None
    assert set(done.load_seconds) == {engine.name for engine in engines}
    return lora.complete(done.rows, floor_ms)


def test_requests_use_the_first_adapters_in_turn_and_small_batches_fewer():
    engine = Steady(adapters=NAMES)
    rows = list(lora.measure(engine, LOAD, 50, ignore))
    assert [(row["adapters"], row["batch_size"]) for row in rows] == [
        (0, 2), (0, 8), (1, 2), (1, 8), (3, 8), (8, 8),
    ]  # fmt: skip
    assert {row["lora_backend"] for row in rows} == {"a backend"}
    used = {
        (2, None),  # of the base model: also the warm-up
        (8, None),
        (2, ("a", "a")),
        (8, ("a",) * 8),
        (2, ("a", "b")),  # only the warm-up of 3 and 8 adapters
        (8, ("a", "b", "c", "a", "b", "c", "a", "b")),
        (8, NAMES),
    }
    assert set(engine.asked) == used
    # Each measured batch runs five times.
    assert [engine.asked.count(one) for one in ((8, NAMES), (8, None), (2, ("a", "a")))] == [
        5, 5, 6,
    ]  # fmt: skip


def test_an_engine_without_adapters_has_one_row_per_batch_size():
    engine = Steady()
    rows = list(lora.measure(engine, LOAD, 50, ignore))
    assert [(row["adapters"], row["batch_size"]) for row in rows] == [(None, 2), (None, 8)]
    assert {adapters for _, adapters in engine.asked} == {None}
    assert all("lora_backend" not in row for row in rows)


def test_growth_is_over_the_same_engine_and_the_ratio_over_the_same_adapters():
    rows = measured(
        Steady(),
        Steady(adapters=NAMES),
        Steady("vllm", step_ms=20),
        Steady("vllm", NAMES, step_ms=22, each_ms=4),
    )
    of_two = [row for row in rows if row["batch_size"] == 2]
    assert rows[: len(of_two)] == of_two  # in order of batch size
    assert [(row["engine"], row["adapters"]) for row in of_two] == [
        ("kiln", None), ("kiln", 0), ("kiln", 1), ("vllm", None), ("vllm", 0), ("vllm", 1),
    ]  # fmt: skip
    eight = {(row["engine"], row["adapters"]): row for row in rows if row["batch_size"] == 8}
    numbers = (None, 0, 1, 3, 8)
    growth = {
        engine: [eight[engine, number]["growth"] for number in numbers]
        for engine in ("kiln", "vllm")
    }
    assert growth["kiln"] == [None, *map(pytest.approx, (0, 0.1, 0.3, 0.8))]
    assert growth["vllm"] == [None, *map(pytest.approx, (0.1, 0.3, 0.7, 1.7))]
    floors = [eight["vllm", number]["growth_floor"] for number in numbers]
    assert floors == [None, 0, *map(pytest.approx, (0.5 / 20, 1.5 / 20, 4 / 20))]
    assert [eight["kiln", number]["ratio"] for number in numbers] == [None] * 5
    ratios = [eight["vllm", number]["ratio"] for number in numbers]
    assert ratios == [pytest.approx(value) for value in (2, 2.2, 26 / 11, 34 / 13, 54 / 18)]
    assert eight["kiln", 8]["output_tokens_per_s"] == pytest.approx(8 * 1000 / 18)


def test_what_is_not_known_gives_no_number():
    rows = measured(Steady(adapters=NAMES), floor_ms=lambda number: None)  # nothing to compare with
    assert {row["growth"] for row in rows} == {row["growth_floor"] for row in rows} == {None}
    flat = Steady(step_ms=0), Steady(adapters=NAMES, step_ms=0, each_ms=0)
    rows = measured(*flat)
    assert {row["step_ms"] for row in rows} == {row["growth"] for row in rows} == {None}


def test_an_engine_needs_as_many_adapters_as_a_batch_can_use():
    def most(adapters, sizes):
        return lora.LoRALoad(sizes, 20, 100, adapters, rank=16).most

    assert most((0, 1, 8), (1, 64)) == 8
    assert most((0, 8), (4,)) == 1  # of which no request makes use
    assert most((0,), (4,)) == 1
    assert most((2, 3, 9), (1, 5)) == 3
    assert most((8, 9), (1, 5)) == 0


def report(rows, **details):
    about = {"context": 78, "num_adapters": 8, "adapter_bytes": 20_185_088}
    return Report(
        "lora",
        "kiln bench lora",
        rows,
        asdict(LOAD) | about,
        {"model": "org/some", "device": "cuda:0", "dtype": "bfloat16", **details},
        hardware={"cpu": "a CPU", "cores": 2, "gpu": "a GPU"},
    )


def test_the_page_and_the_files(tmp_path):
    both = Steady(), Steady(adapters=NAMES), Steady("vllm"), Steady("vllm", NAMES, each_ms=3)
    made = report(measured(*both), copy_bytes_s=4.1e12)
    page = lora.markdown(made)
    assert "rank 4 on all projections" in page
    assert "20.2 MB in bfloat16" in page
    assert "at the 4.10 TB/s" in page
    assert "in kiln: a backend." in page
    assert "| kiln | 8 | without | 10.000 | – | – | 800 | 4.000 | 200 | – |" in page
    assert "| kiln | 8 | 3 | 13.000 | +30.0% | +15.0% | 615 | 4.000 | 203 | – |" in page
    assert "| vllm | 2 | 1 | 13.000 | +30.0% | +5.0% | 154 | 4.000 | 201 | 1.18× |" in page
    paths = made.write_named(tmp_path, page, lora.draw)
    stem = "lora-org-some-gpu"
    assert [path.name for path in paths] == [f"{stem}.json", f"{stem}.md", f"{stem}.png"]


def test_the_plot_has_a_panel_per_batch_size_and_a_bar_per_engine():
    from matplotlib.figure import Figure

    rows = measured(Steady(), Steady(adapters=NAMES), Steady("vllm"), Steady("vllm", NAMES))
    figure = Figure()
    lora.draw(report(rows), "a GPU", figure)
    two, eight = figure.axes
    assert [axes.get_title() for axes in (two, eight)] == ["2 requests", "8 requests"]
    assert [label.get_text() for label in eight.get_xticklabels()] == ["0", "1", "3", "8"]
    bars = [[bar.get_height() for bar in group] for group in eight.containers]
    assert bars == [pytest.approx([0, 10, 30, 80])] * 2
    assert len(two.containers) == 2
    empty = Figure()
    lora.draw(report(measured(Steady())), "a GPU", empty)  # the run ended before any growth
    assert not any(axes.containers for axes in empty.axes)
