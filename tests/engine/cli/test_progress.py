"""What is shown while a model loads: a bar on a terminal, and one line of a stage elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from kiln.engine.cli.progress import LoadingDisplay
from kiln.engine.models.progress import amount, announcement

CALLS = [("weights", 0, 16_060_000_000), ("weights", 8_030_000_000, 16_060_000_000)]
GRAPHS = [("CUDA graphs", 0, 2), ("CUDA graphs", 1, 2)]


def show(monkeypatch, terminal):
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    monkeypatch.setattr(shown, "isatty", lambda: terminal, raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    display = LoadingDisplay()
    for call in CALLS + GRAPHS:
        display(*call)
    display.close()
    return shown.getvalue()


def test_a_stage_is_one_line_without_a_terminal(monkeypatch):
    assert show(monkeypatch, terminal=False) == "weights, 16.06 GB …\nCUDA graphs …\n"


def test_a_terminal_shows_bytes_and_speed_of_weights_and_counts_of_others(monkeypatch):
    shown = show(monkeypatch, terminal=True)
    assert "8.03/16.06 GB, " in shown
    assert "GB/s" in shown
    assert "1/2" in shown


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (("weights", 0, 16_060_000_000, 0.0), "0.00/16.06 GB"),
        (("weights", 16_060_000_000, 16_060_000_000, 2.5), "16.06/16.06 GB, 6.4 GB/s"),
        (("random weights", 3, 32, 2.0), "3/32"),
        (("compiling", 3, 0, 2.0), "3/?"),
    ],
)
def test_amounts(told, text):
    assert amount(*told) == text


def test_only_bytes_are_announced():
    assert announcement("weights", 988_000_000) == "weights, 0.99 GB"
    assert announcement("random weights", 32) == "random weights"
