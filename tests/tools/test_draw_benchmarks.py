"""Plots can be read: no text is cut or over another one, and they come from their records."""

from __future__ import annotations

import json
from functools import partial

import draw_benchmarks
import pytest
from gpu import sum_plots
from plot_texts import faults

from kiln.engine.bench import latency, lora, plots, roofline, serving_plot, style
from kiln.engine.bench.report import Report

RECORDS = draw_benchmarks.ROOT / "benchmarks"
PLOTS = dict(draw_benchmarks.all_plots(RECORDS))
MODEL = "an-organisation/a-model-with-quite-a-long-name-14B-Instruct-2507-FP8"
PROCESSOR = "8 × NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
ENGINES = ("kiln", "vllm", "another engine, batches of 16")


def report(rows, **load):
    return Report("some", "kiln x", rows, load, {"model": MODEL, "device": "cuda:0"})


def served(engine, place, points):
    """The rows of an engine, ``place``: how many engines are faster."""
    for index in range(points):
        speed = 4000 * (1 - 0.9**index + 0.05) * 0.97**place
        times = {"ttft": 20 * 1.9**index, "itl": 4 + index}
        row = {"engine": engine, "output_tokens_per_s": speed, "max_concurrency": 4**index}
        row |= {"request_rate": None, "load": ""}
        for name, ms in times.items():
            row |= {f"median_{name}_ms": ms, f"p99_{name}_ms": 3 * ms}
        yield row


def steps(engine, place):
    for size in (1, 2, 4, 16, 64, 256):
        speed = 90 * size * 0.9**place
        yield {
            "engine": engine, "batch_size": size, "output_tokens_per_s": speed, "floor_ms": 7.0,
        }  # fmt: skip


def drawings():
    curves = [row for place, name in enumerate(ENGINES) for row in served(name, place, 7)]
    data = "10 prefixes of 2,048 random tokens, each before 256 others, 128 out"
    load = {"dataset": data, "percentiles": (50, 99), "num_prompts": 1}
    yield "curves", partial(serving_plot.draw, report(curves, **load), PROCESSOR)
    yield "one load", partial(serving_plot.draw, report(curves[::7], **load), PROCESSOR)
    decode = [row for place, name in enumerate(ENGINES) for row in steps(name, place)]
    yield "steps", partial(latency.draw, report(decode), PROCESSOR)
    yield "bars", partial(plots.draw_throughput, report(curves[:3]), PROCESSOR)
    growths = [
        {"engine": engine, "batch_size": size, "adapters": number, "growth": number / 10,
         "growth_floor": number / 50}
        for engine in ENGINES[:2] for size in (1, 64, 256) for number in (0, 1, 8, 64)
    ]  # fmt: skip
    yield "adapters", partial(lora.draw, report(growths, rank=16), PROCESSOR)
    for worlds in ((2,), (2, 4, 8)):
        sums = [
            {"ranks": world, "bytes": 1 << power, "auto": 2.5, "torch": 6.0 + power**2}
            for world in worlds for power in range(10, 25)
        ]  # fmt: skip
        title = f"a GPU for each rank, the slowest rank; {PROCESSOR}, 2026-11-25"
        yield f"sums of {worlds}", partial(sum_plots.draw_times, sums, title)
    ceilings = {"copy_bytes_s": 3e12, "matmul_flops_s": 8e14}
    points = [
        {"kernel": kernel, "family": "norm", "implementation": name, "flops": size, "bytes": size,
         "median_us": 2 + size / 2e6}
        for kernel in ("rms_norm", "fused_add_rms_norm") for name in ("jit", "torch", "triton")
        for size in (1 << 12, 1 << 16, 1 << 24)
    ]  # fmt: skip
    yield "roofline", partial(roofline.draw_roofline, points, ceilings, PROCESSOR)


@pytest.mark.parametrize(("name", "draw"), [*drawings()], ids=lambda value: str(value)[:20])
def test_a_plot_of_small_data_can_be_read(name, draw):
    assert faults(style.make(draw)) == []


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_of_a_record_is_there_and_can_be_read(name):
    assert faults(style.make(PLOTS[name])) == []
    assert (RECORDS / name).exists(), "python tools/draw_benchmarks.py"


def test_no_plot_is_without_its_record():
    assert {path.name for path in RECORDS.glob("*.png")} == set(PLOTS)


def test_a_plot_is_written_by_name_and_always_the_same(tmp_path, monkeypatch, capsys):
    for end in ("json", "md"):
        text = (RECORDS / f"offline-qwen3-0.6b-gpu.{end}").read_text()
        (tmp_path / f"new.{end}").write_text(text)
    (tmp_path / "none.json").write_text(json.dumps({"benchmark": "graphs"}))
    monkeypatch.setattr("sys.argv", ["x", "--folder", str(tmp_path)])
    written = []
    for _ in range(2):
        draw_benchmarks.main()
        written.append((tmp_path / "new.png").read_bytes())
    assert written[0] == written[1]
    assert capsys.readouterr().out == "new.png\n" * 2


def cut(figure):
    figure.suptitle("a title that is much too long for the figure " * 4)


def crowded(figure):
    axes = figure.subplots()
    axes.set_xticks([0, 0.01, 1], ["first", "second", "third"])


def hidden(figure):
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], label="a line")
    axes.legend(loc="upper right")


@pytest.mark.parametrize(
    ("draw", "says"), [(cut, "is cut"), (crowded, "overlap"), (hidden, "hides a line")]
)
def test_what_cannot_be_read_is_found(draw, says):
    assert any(says in fault for fault in faults(style.make(draw)))
