"""What torchrun tells a process, what rank 0 tells the others, and where a share begins."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from kiln.cache.env import torchrun_variables
from kiln.engine.cli import torchrun
from kiln.engine.cli.commands import serve
from kiln.engine.config import (
    EngineConfig,
    ModelConfig,
    ParallelConfig,
)
from kiln.engine.distributed.launched import launched
from kiln.engine.errors import ConfigError
from kiln.engine.graphs.runner import VARIANTS, GraphKey
from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner.rows import Rows, message_room
from kiln.engine.runner.step_frame import StepFrame, decode, encode

GIVEN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_the_place_of_a_process_is_what_torchrun_says():
    place = launched(torchrun_variables({**GIVEN, "HOME": "/root"}))
    assert (place.rank, place.local_rank, place.world, place.local_world) == (3, 1, 4, 2)
    assert place.has_store
    assert place.attempt == "none/2"
    assert place.own_address() == "127.0.0.1"


def test_other_launchers_are_not_taken_for_torchrun():
    assert launched(torchrun_variables({"RANK": "1", "WORLD_SIZE": "2"})) is None


def test_incomplete_variables_are_refused():
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        launched({name: value for name, value in GIVEN.items() if name != "MASTER_PORT"})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_flag_must_agree_with_torchrun(monkeypatch, size):
    monkeypatch.setattr(torchrun, "launched", lambda: launched(GIVEN))
    config = EngineConfig(ModelConfig("m"), parallel=ParallelConfig(size))
    if size == 2:
        with pytest.raises(ConfigError, match="--tp 2: torchrun has started 4 processes"):
            torchrun.with_torchrun(config)
        return
    config, place = torchrun.with_torchrun(config)
    assert place.rank == 3
    assert config.parallel == ParallelConfig(4, launcher="torchrun")


def test_ranks_of_torchrun_are_not_restarted(monkeypatch):
    """It has started them, and only it can start them again."""
    config = EngineConfig(ModelConfig("m"))
    monkeypatch.setattr(torchrun, "launched", lambda: launched(GIVEN))
    monkeypatch.setattr("kiln.engine.cli.options.find_model", lambda args: (config, None))
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(ConfigError, match="--max-restarts 5: torchrun has started"):
        serve.run(parser.parse_args(["--max-restarts", "5"]))


def request(row, count, samples, slot, is_plain, is_late=False):
    new = list(range(row, row + 2))
    return ScheduledRequest(
        f"r{row}", row, count, 9, [5] * count, 0, new, samples, 0, SamplingParams(), row,
        is_plain=is_plain, adapter_slot=slot, is_late=is_late,
    )  # fmt: skip


@pytest.mark.parametrize(
    "key", [None, *(GraphKey(8, 3, is_decode=False, variant=one) for one in VARIANTS)]
)
def test_a_step_arrives_as_rank_0_runs_it(key):
    rows = (
        request(4, 3, 0, -1, True),
        request(1, 4, 4, 2, False),
        request(2, 1, 1, -1, False, True),
    )
    sent = Batch(rows)
    room = np.zeros(message_room(8, 16, 4), np.int32)
    words = room[: Rows(8).write(sent, room)]
    got, own_key, own_words = decode(encode(StepFrame(sent, key, words)))
    assert own_key == key
    assert own_words.tolist() == words.tolist()
    for name in (
        "row", "num_tokens", "num_computed_tokens", "num_samples", "is_plain", "adapter_slot",
        "is_late",
    ):  # fmt: skip
        assert getattr(got.columns, name) == getattr(sent.columns, name), name
    assert (got.is_decode, got.is_plain, got.has_adapters) == (False, False, True)
