"""Prefill: each run has other prompts, and a row says how much of its time the GPU worked."""

from __future__ import annotations

import pytest

from kiln.engine.bench import prefill
from kiln.engine.bench.engine import BenchEngine
from kiln.engine.bench.report import Report, with_ratio
from kiln.engine.bench.side_by_side import measure_all

LOAD = ((4, 10), (2, 50))


class Slower(BenchEngine):
    """A prompt token takes 1 ms, less in later runs; half of the time the GPU works, if known."""

    load_seconds = 2.0

    def __init__(self, name, budget, own=False, token_ms=1.0, profiled=True):
        self.name, self.token_budget, self.own_budget = name, budget, own
        self.ran = []
        self._token_ms, self._profiled = token_ms, profiled

    def run(self, prompts, lengths, adapters=None):
        assert lengths == [1] * len(prompts)
        self.ran.append(prompts)
        seconds = self._token_ms * sum(map(len, prompts)) / 1000
        return seconds * (1 + 1 / len(self.ran))

    def device_ms(self, prompts, lengths):
        return self.run(prompts, lengths) and (20.0 if self._profiled else None)

    def close(self):
        """Free nothing."""


def ignore(text):
    """Show nothing."""


def report(engines, device="cuda:0"):
    measured = measure_all(
        {str(index): lambda engine=engine: engine for index, engine in enumerate(engines)},
        lambda engine: prefill.measure(engine, LOAD, 400, ignore),
        ignore,
    )
    assert list(measured.load_seconds) == [str(index) for index in range(len(engines))]
    case = ("asked_budget", "num_prompts", "prompt_tokens")
    rows = with_ratio(measured.rows, *case, speed="tokens_per_s")
    where = {"cpu": "a CPU", "cores": 2, "gpu": "none" if device == "cpu" else "a GPU"}
    about = {"model": "org/some", "device": device}
    return Report("prefill", "kiln bench prefill", rows, {"prompts": LOAD}, about, hardware=where)


def test_the_best_of_two_runs_counts_and_no_run_repeats_a_prompt():
    engine = Slower("kiln", 2048)
    first, second = prefill.measure(engine, LOAD, 400, ignore)
    assert [len(prompts) for prompts in engine.ran] == [4] * 4 + [2] * 4
    every = [tuple(prompt) for prompts in engine.ran for prompt in prompts]
    assert len({*every}) == len(every)
    assert first["seconds"] == pytest.approx([0.040 * 3 / 2, 0.040 * 4 / 3])
    assert first["tokens_per_s"] == pytest.approx(40 / min(first["seconds"]))
    assert first["busy"] == pytest.approx(0.020 / min(first["seconds"]))
    assert (second["num_prompts"], second["prompt_tokens"]) == LOAD[1]


def test_engines_are_compared_at_the_same_budget_and_each_at_its_own_default(tmp_path):
    engines = [
        Slower("kiln", 2048, own=True),
        Slower("kiln", 512, token_ms=2),
        Slower("vllm", 8192, own=True, token_ms=3, profiled=False),
        Slower("vllm", 512, token_ms=3, profiled=False),
    ]
    made = report(engines)
    ratios = [row["ratio"] for row in made.rows]
    assert ratios == [None] * 4 + [pytest.approx(value) for value in (3, 3, 1.5, 1.5)]
    assert [row["busy"] is None for row in made.rows] == [False] * 4 + [True] * 4
    page = prefill.markdown(made)
    assert "| kiln | 2,048 (default) | 4 × 10 | 750 | 53.3 | 20.0 | 38% | – |" in page
    assert "| vllm | 512 | 4 × 10 | 250 | 160.0 | – | – | 1.50× |" in page
    assert "not given for vLLM" in page
    names = [path.name for path in made.write_named(tmp_path, page, prefill.draw)]
    assert names == [f"prefill-org-some-gpu.{end}" for end in ("json", "md", "png")]


def test_the_plot_has_a_group_of_bars_per_load_and_a_bar_per_engine_and_budget():
    from matplotlib.figure import Figure

    engines = [Slower("kiln", 2048, own=True), Slower("vllm", 8192, own=True, profiled=False)]
    figure = Figure(layout="constrained")
    prefill.draw(report(engines), "a GPU", figure)
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["4 × 10", "2 × 50"]
    labels = [group.get_label() for group in axes.containers]
    assert labels == ["kiln, 2,048 (default)", "vllm, 8,192 (default)"]
    assert [text.get_text() for text in axes.texts[:1]] == ["0.75k\n38%"]
    assert "%" not in axes.texts[-1].get_text()


def test_a_cpu_has_no_busy_share():
    made = report([Slower("kiln", 2048, own=True, profiled=False)], device="cpu")
    page = prefill.markdown(made)
    assert "not given on a CPU" in page
    assert page.count("| – | – | – |") == 2
