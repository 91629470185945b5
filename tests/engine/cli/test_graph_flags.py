"""The flags of CUDA graphs reach the engine's settings, and the engine process."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kiln.engine.cli.options import (
    DEMO_FOLDER,
    add_engine_arguments,
    engine_config,
    engine_flags,
)
from kiln.engine.config import GraphConfig
from kiln.engine.core import load_runner
from kiln.engine.errors import ConfigError

FLAGS = [
    ("", GraphConfig()),
    ("--disable-cuda-graph", GraphConfig(enabled=False)),
    ("--cuda-graph-max-bs 24", GraphConfig(max_bs=24)),
    ("--cuda-graph-bs 1 2 16", GraphConfig(bs=(1, 2, 16))),
    ("--enable-cudagraph-gc", GraphConfig(garbage_collection=True)),
    (
        "--enable-cudagraph-gc --cuda-graph-max-bs 3 --disable-cuda-graph",
        GraphConfig(enabled=False, max_bs=3, garbage_collection=True),
    ),
]


def parse(line):
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return parser.parse_args(["model", *line])


@pytest.mark.parametrize(("line", "wanted"), FLAGS)
def test_each_flag_is_a_setting(line, wanted):
    assert engine_config(parse(line.split()), Path("model")).graphs == wanted


@pytest.mark.parametrize(("line", "wanted"), FLAGS)
def test_another_kiln_gets_the_same_settings(line, wanted):
    model, *flags = engine_flags(parse(line.split()))
    assert model == "model"
    assert engine_config(parse(flags), Path("model")).graphs == wanted


@pytest.mark.parametrize(
    "line",
    ["--cuda-graph-max-bs 0", "--cuda-graph-bs 0", "--cuda-graph-bs 2 --cuda-graph-max-bs 4"],
)
def test_a_setting_that_makes_no_sense_is_refused(line):
    with pytest.raises(ConfigError, match="cuda_graph_"):
        engine_config(parse(line.split()), Path("model"))


def test_a_size_that_no_step_has_is_told():
    """By the function that the engine process calls to load the model."""
    args = parse(["--cuda-graph-bs", "1", "9", "--max-num-seqs", "8", "--device", "cpu"])
    with pytest.raises(ConfigError, match="cuda_graph_bs: 9 rows, but a step has at most 8"):
        load_runner(engine_config(args, DEMO_FOLDER), None)


@pytest.mark.deep
def test_a_size_that_no_step_has_is_told_on_the_command_line(kiln):
    done = kiln("chat", "--cuda-graph-bs", 1, 9, "--max-num-seqs", 8, stdin="hi\n")
    assert done.returncode == 1
    assert "cuda_graph_bs: 9 rows, but a step has at most 8" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
